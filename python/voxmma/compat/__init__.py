"""Other libraries' checkpoints (`convert`) and interfaces: networks written for them, run by voxmma.

import voxmma.compat
voxmma.compat.install("spconv")          # before anything imports it
import spconv.pytorch as spconv          # ... and the network, unmodified
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from types import ModuleType
from typing import Any

import torch

from voxmma.dispatch.config import ConvConfig, fp16_accum_flag

#: Libraries with an interface here, and other names under which its modules are imported: name -> module of
#: ours. Those of other libraries stand in only where the real one cannot be imported.
INTERFACES: dict[str, dict[str, str]] = {
    "spconv": {
        **{
            f"spconv.{m}": f"spconv.pytorch.{m}"
            for m in ("conv", "functional", "modules", "ops", "pool", "tables")
        },
        "cumm": "spconv.cumm",
        "cumm.tensorview": "spconv.cumm.tensorview",
    },
    "MinkowskiEngine": {  # whose modules can be imported by themselves
        name: f"MinkowskiEngine.{name}"
        for name in (
            "MinkowskiBroadcast",
            "MinkowskiCommon",
            "MinkowskiConvolution",
            "MinkowskiCoordinateManager",
            "MinkowskiFunctional",
            "MinkowskiInterpolation",
            "MinkowskiKernelGenerator",
            "MinkowskiNetwork",
            "MinkowskiNonlinearity",
            "MinkowskiNormalization",
            "MinkowskiOps",
            "MinkowskiPooling",
            "MinkowskiPruning",
            "MinkowskiSparseTensor",
            "MinkowskiTensor",
            "MinkowskiTensorField",
            "MinkowskiUnion",
        )
    },
    "torchsparse": {},
    "flex_gemm": {},
}

#: Precision that the convolutions of an interface are made with: fields of ConvConfig, by interface.
PRECISION: dict[str, dict[str, Any]] = {name: {} for name in INTERFACES}


def install(
    name: str,
    *,
    use_fp16_accum: bool | None = None,
    accumulator: str | None = None,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    **options: Any,
) -> ModuleType:
    """Makes `import NAME` give the interface of `voxmma.compat.NAME`, and says how precise its layers are.

    Args:
        name: 'spconv', 'MinkowskiEngine', 'torchsparse' or 'flex_gemm'.
        use_fp16_accum, accumulator, compute_dtype, out_dtype: what convolutions made from now on start with,
            as of voxmma.nn.SparseConv3d; a layer's own `fp32_accum` wins. Policies, plans and
            voxmma.settings work on these layers as on voxmma's. A second call changes these.
        options: of 'torchsparse', `version` (1 or 2) and `dilation`: see voxmma.compat.torchsparse.options;
            of 'MinkowskiEngine', `version` (0.4 or 0.5); of 'spconv', `version` (1 or 2).

    Returns the module.

    Raises:
        ValueError: an interface that is not there; a precision or an option out of range.
        TypeError: an option that the interface has not.
        RuntimeError: the real library has been imported: whoever did so holds its classes.
    """
    if name not in INTERFACES:
        raise ValueError(f"name must be one of {', '.join(INTERFACES)}, got {name!r}")
    precision: dict[str, Any] = {
        "use_fp16_accum": use_fp16_accum,
        "accumulator": accumulator,
        "compute_dtype": compute_dtype,
        "out_dtype": out_dtype,
    }
    fp16_accum_flag(use_fp16_accum, accumulator)
    ConvConfig((1, 1, 1), **precision)
    package = importlib.import_module(f"{__name__}.{name}")
    theirs = sys.modules.get(name)
    if theirs is not None and theirs is not package:
        where = getattr(theirs, "__file__", None) or "no file"
        raise RuntimeError(
            f"{name} has been imported already ({where}): call voxmma.compat.install({name!r}) before "
            "anything imports it"
        )
    if hasattr(package, "configure"):
        package.configure(**options)
    elif options:
        raise TypeError(f"{name} has no option {', '.join(options)}")
    aliases = {name: package}
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        aliases[found.name.removeprefix(f"{__name__}.")] = importlib.import_module(found.name)
    for alias, module in INTERFACES[name].items():
        if alias.startswith(f"{name}.") or _absent(alias.partition(".")[0]):
            aliases[alias] = importlib.import_module(f"{__name__}.{module}")
    sys.modules.update(aliases)
    PRECISION[name] = {field: value for field, value in precision.items() if value is not None}
    return package


def _absent(name: str) -> bool:
    """Whether `import NAME` would find nothing but what stands in here."""
    there = sys.modules.get(name)
    if there is not None:
        return there.__name__.startswith(f"{__name__}.")
    return importlib.util.find_spec(name) is None


def uninstall(name: str) -> None:
    """Takes back `install(name)`: `import NAME` looks for the real library again, and the precision is
    forgotten.

    Classes that have been imported stay what they are. Nothing happens where nothing was installed;
    ValueError for an interface that is not there.
    """
    if name not in INTERFACES:
        raise ValueError(f"name must be one of {', '.join(INTERFACES)}, got {name!r}")
    for alias, module in tuple(sys.modules.items()):
        ours = getattr(module, "__name__", "").startswith(f"{__name__}.{name}")
        if ours and not alias.startswith(f"{__name__}."):
            del sys.modules[alias]
    PRECISION[name] = {}
