"""voxmma: 3-D sparse convolution for PyTorch with the precision of the tensor cores under control.

import torch, voxmma
x = voxmma.Voxels(coords, feats)                                 # (N, 4) int32 batch, x, y, z; (N, C)
y = voxmma.nn.SparseConv3d(64, 128, kernel_size=3)(x)
voxmma.set_fp16_accum(True); print(voxmma.explain(y)); print(voxmma.tiles())
"""

from voxmma import ops  # isort: skip  (first: registers torch.ops.voxmma, and explains a missing or foreign build)
from voxmma import _C, settings
from voxmma.coords import CoordSet
from voxmma.explain import Record, explain
from voxmma.kernel_map import KernelMap, kernel_map
from voxmma.settings import (
    get_deterministic,
    get_fp16_accum,
    get_fp32_precision,
    resolve_fp16_accum,
    set_deterministic,
    set_fp16_accum,
    set_fp32_precision,
)
from voxmma.tiles import tiles
from voxmma.voxels import Voxels

from voxmma import nn  # isort: skip

__version__ = "0.1.0"

__all__ = [
    "CoordSet",
    "KernelMap",
    "Record",
    "Voxels",
    "explain",
    "get_deterministic",
    "get_fp16_accum",
    "get_fp32_precision",
    "kernel_map",
    "nn",
    "resolve_fp16_accum",
    "set_deterministic",
    "set_fp16_accum",
    "set_fp32_precision",
    "settings",
    "tiles",
]
