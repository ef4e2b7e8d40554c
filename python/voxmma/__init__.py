"""voxmma: 3-D sparse convolution for PyTorch with the precision of the tensor cores under control.

import torch, voxmma
x = voxmma.Voxels(coords, feats)                                 # (N, 4) int32 batch, x, y, z; (N, C)
y = voxmma.nn.SparseConv3d(64, 128, kernel_size=3)(x)
voxmma.set_fp16_accum(True); print(voxmma.explain(y)); print(voxmma.tiles())
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

# First: explains a missing or foreign build.
from voxmma import _extension  # noqa: F401  # isort: skip
from voxmma import _C  # noqa: F401
from voxmma._version import __version__ as __version__
from voxmma.dispatch import rescale_op as _rescale_op  # noqa: F401
from voxmma.dispatch import settings
from voxmma.dispatch.launches import audit
from voxmma.dispatch.record import Record, explain
from voxmma.dispatch.settings import (
    get_deterministic,
    get_fp16_accum,
    get_fp16_rescale,
    get_fp32_precision,
    resolve_fp16_accum,
    set_deterministic,
    set_fp16_accum,
    set_fp16_rescale,
    set_fp32_precision,
)
from voxmma.dispatch.table import tiles
from voxmma.ops import cpu as _cpu  # noqa: F401
from voxmma.ops import fake as _fake  # noqa: F401
from voxmma.sparse.batching import batch, collate, from_dense, to_dense, unbatch
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import KernelMap, kernel_map
from voxmma.sparse.sampling import devoxelise, sparse_quantize
from voxmma.sparse.sets import crop, downsample, intersection, lookup, output_coords, prune, union, unique
from voxmma.sparse.tensor import Voxels

from voxmma import nn  # isort: skip

if _TYPE_CHECKING:
    from voxmma import engine as engine
    from voxmma import export as export
    from voxmma import models as models
    from voxmma.compat import convert as convert
    from voxmma.nn.fusion import fuse
    from voxmma.precision import policy as policy
    from voxmma.precision import schedule as schedule
    from voxmma.tuning import gate as gate
    from voxmma.tuning.tuner import tune
    from voxmma.verify import accuracy as accuracy
    from voxmma.verify import shadow as shadow
    from voxmma.verify.overflow import OverflowGuard
    from voxmma.verify.plan import apply_plan, calibrate

__all__ = [
    "CoordSet",
    "KernelMap",
    "OverflowGuard",
    "Record",
    "Voxels",
    "apply_plan",
    "audit",
    "batch",
    "calibrate",
    "collate",
    "convert",
    "crop",
    "devoxelise",
    "downsample",
    "explain",
    "from_dense",
    "fuse",
    "get_deterministic",
    "get_fp16_accum",
    "get_fp16_rescale",
    "get_fp32_precision",
    "intersection",
    "kernel_map",
    "lookup",
    "nn",
    "output_coords",
    "prune",
    "resolve_fp16_accum",
    "set_deterministic",
    "set_fp16_accum",
    "set_fp16_rescale",
    "set_fp32_precision",
    "settings",
    "shadow",
    "sparse_quantize",
    "tiles",
    "to_dense",
    "tune",
    "unbatch",
    "union",
    "unique",
]

#: Attributes that load when they are touched: "module" or "module:name".
_LAZY = {
    "OverflowGuard": "voxmma.verify.overflow:OverflowGuard",
    "accuracy": "voxmma.verify.accuracy",
    "apply_plan": "voxmma.verify.plan:apply_plan",
    "calibrate": "voxmma.verify.plan:calibrate",
    "convert": "voxmma.compat.convert",
    "engine": "voxmma.engine",
    "export": "voxmma.export",
    "fuse": "voxmma.nn.fusion:fuse",
    "gate": "voxmma.tuning.gate",
    "models": "voxmma.models",
    "policy": "voxmma.precision.policy",
    "schedule": "voxmma.precision.schedule",
    "shadow": "voxmma.verify.shadow",
    "tune": "voxmma.tuning.tuner:tune",
}


def __getattr__(name: str) -> object:
    """What is heavy or seldom used, from its module."""
    if name not in _LAZY:
        raise AttributeError(f"module 'voxmma' has no attribute {name!r}")
    import importlib

    module, _, attribute = _LAZY[name].partition(":")
    found = importlib.import_module(module)
    globals()[name] = value = getattr(found, attribute) if attribute else found
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
