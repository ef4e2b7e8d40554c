"""The compiled part, `_C`: loaded once, and explained where it is missing or was built for another torch.

A build from source has one, beside this file. A wheel has one for each minor version of torch, in _bindings.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from voxmma import _binding

_REBUILD = "run 'pip install --no-build-isolation .' in voxmma's source folder"
_BINDINGS = Path(__file__).parent / "_bindings"


def _choose(bindings: Path, version: str, env: dict[str, str]) -> Path:
    """The file of a wheel's binding for a version of torch; ImportError where there is none and cannot be."""
    file = f"_C{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    made = bindings / _binding.folder_of(version, torch._C._GLIBCXX_USE_CXX11_ABI) / file
    if made.exists():
        return made
    has = sorted((p.parent.name for p in bindings.glob(f"*/{file}")), key=_binding.minor_of)
    listed = f"torch {', '.join(has)}" if has else "no torch"
    what = f"this voxmma has bindings for {listed}, and none for torch {version}"
    if _binding.minor_of(version) < _binding.OLDEST_TORCH:
        raise ImportError(f"{what}, which is older than 2.8: install torch 2.8 or newer")
    try:
        cache = Path(env.get("VOXMMA_CACHE_DIR") or "~/.cache/voxmma").expanduser() / "bindings"
        found = _binding.read_torch(Path(torch.__file__).parent)
        return _binding.compiled_once(bindings, cache, found, env)
    except (RuntimeError, OSError) as error:  # BuildError, or there is no home directory
        raise ImportError(f"{what}: {error}; install one of these, or a newer voxmma") from error


def _load(path: Path) -> ModuleType:
    """The extension in a file as voxmma._C."""
    spec = importlib.util.spec_from_file_location("voxmma._C", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["voxmma._C"] = module
    sys.modules["voxmma"]._C = module  # type: ignore[attr-defined]
    return module


try:
    if not TYPE_CHECKING and _BINDINGS.is_dir():
        _load(_choose(_BINDINGS, torch.__version__, dict(os.environ)))
    from voxmma import _C as _C
except ImportError as error:
    if _BINDINGS.is_dir():
        raise
    raise ImportError(
        f"voxmma's compiled part cannot be loaded with torch {torch.__version__} ({error}): {_REBUILD}"
    ) from error
if _C.TORCH_VERSION.split(".")[:2] != torch.__version__.split(".")[:2]:  # C++ interfaces change
    raise ImportError(
        f"voxmma was built for torch {_C.TORCH_VERSION}, this is torch {torch.__version__}: {_REBUILD}"
    )
