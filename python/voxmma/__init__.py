"""voxmma: 3-D sparse convolution for PyTorch with the precision of the tensor cores under control.

import torch, voxmma
x = voxmma.Voxels(coords, feats)                                 # (N, 4) int32 batch, x, y, z; (N, C)
y = voxmma.nn.SparseConv3d(64, 128, kernel_size=3)(x)
voxmma.set_fp16_accum(True); print(voxmma.explain(y)); print(voxmma.tiles())
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

# First: registers torch.ops.voxmma, and explains a missing or foreign build.
from voxmma import ops  # noqa: F401  # isort: skip
from voxmma import _C, convert, settings  # noqa: F401
from voxmma.audit import audit
from voxmma.coordops import (
    batch,
    collate,
    crop,
    devoxelise,
    downsample,
    from_dense,
    intersection,
    lookup,
    prune,
    sparse_quantize,
    to_dense,
    unbatch,
    union,
    unique,
)
from voxmma.coords import CoordSet
from voxmma.explain import Record, explain
from voxmma.kernel_map import KernelMap, kernel_map
from voxmma.overflow import OverflowGuard
from voxmma.settings import (
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
from voxmma.tiles import tiles
from voxmma.voxels import Voxels

from voxmma import nn  # isort: skip
from voxmma import shadow  # isort: skip
from voxmma.plan import apply_plan, calibrate  # isort: skip

if _TYPE_CHECKING:
    from voxmma.tuner import tune

__version__ = "0.1.0"

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
    "get_deterministic",
    "get_fp16_accum",
    "get_fp16_rescale",
    "get_fp32_precision",
    "intersection",
    "kernel_map",
    "lookup",
    "nn",
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


def __getattr__(name: str) -> _Any:
    """`voxmma.tune`, whose module brings the command line's packages along."""
    if name == "tune":
        from voxmma.tuner import tune

        return tune
    raise AttributeError(f"module 'voxmma' has no attribute {name!r}")
