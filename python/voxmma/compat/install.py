"""Another library's name for a module of voxmma.compat: `import torchsparse` then finds it, parts
included."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

#: What can be installed: the library's name and where its options go.
NAMES = ("MinkowskiEngine", "flex_gemm", "torchsparse")


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `name` and `name.anything` as the modules of the same names in voxmma.compat, not as copies."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name and not fullname.startswith(f"{self.name}."):
            return None
        if importlib.util.find_spec(f"voxmma.compat.{fullname}") is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"voxmma.compat.{spec.name}")
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # which the import system replaced


def install(name: str, **options: Any) -> ModuleType:
    """Makes `import name` mean voxmma.compat.`name`, in this process, from now on; returns that module.

    Args:
        name: one of `NAMES`.
        options: what the module's `configure` takes: for torchsparse `version` and `dilation`.

    Raises ValueError for another name, RuntimeError where the library itself has been imported already.
    """
    if name not in NAMES:
        raise ValueError(f"name must be one of {', '.join(NAMES)}, got {name!r}")
    module = importlib.import_module(f"voxmma.compat.{name}")
    loaded = sys.modules.get(name)
    if loaded is not None and loaded is not module:
        raise RuntimeError(f"{name} has been imported from {loaded.__file__}: install voxmma's before that")
    if options or hasattr(module, "configure"):
        module.configure(**options)
    if not any(isinstance(finder, _Alias) and finder.name == name for finder in sys.meta_path):
        sys.meta_path.insert(0, _Alias(name))
    return module
