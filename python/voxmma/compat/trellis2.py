"""A convolution backend for TRELLIS.2: `voxmma.compat.trellis2.use()` before its models are made.

Parameters have the names and the layout of the flex_gemm backend, weight (C_out, K_x, K_y, K_z, C_in), whose
checkpoints load. All layers on the same voxels share one coordinate set, whatever their kernel.

    from voxmma.compat.trellis2 import *      # or as trellis2/modules/sparse/conv/conv_voxmma.py,
                                              # with trellis2.modules.sparse.config.CONV = "voxmma"
"""

from __future__ import annotations

import importlib
import math
import sys
from typing import Any

import torch
from torch import nn

from voxmma._types import positive_triple
from voxmma.compat.flex_gemm.ops.spconv import NeighborCache, sparse_submanifold_conv3d
from voxmma.sparse.coords import CoordSet

__all__ = [
    "sparse_conv3d_forward",
    "sparse_conv3d_init",
    "sparse_inverse_conv3d_forward",
    "sparse_inverse_conv3d_init",
]

_KEY = "voxmma_coord_set"


def use() -> None:
    """Makes this the backend of trellis2.modules.sparse, which must be importable."""
    sparse = importlib.import_module("trellis2.modules.sparse")
    conv = importlib.import_module("trellis2.modules.sparse.conv.conv")
    conv._backends["voxmma"] = sys.modules[__name__]
    sparse.config.CONV = "voxmma"


def sparse_conv3d_init(
    self: nn.Module,
    in_channels: int,
    out_channels: int,
    kernel_size: Any,
    stride: Any = 1,
    dilation: Any = 1,
    padding: Any = None,
    bias: bool = True,
    indice_key: str | None = None,
) -> None:
    """Parameters of a submanifold layer, drawn as torch.nn.Conv3d's. `indice_key` is accepted: maps are found
    by the coordinates. NotImplementedError for another stride, or padding."""
    layer: Any = self
    if positive_triple(stride, "stride") != (1, 1, 1) or padding is not None:
        raise NotImplementedError(
            f"stride={stride}, padding={padding}: this backend has submanifold layers (stride 1, no padding) "
            "as flex_gemm's has; for others set CONV to 'spconv' after voxmma.compat.install('spconv')"
        )
    size = positive_triple(kernel_size, "kernel_size")
    layer.in_channels, layer.out_channels = in_channels, out_channels
    layer.kernel_size, layer.stride, layer.dilation = size, (1, 1, 1), positive_triple(dilation, "dilation")
    layer.weight = nn.Parameter(torch.empty(out_channels, *size, in_channels, device=None, dtype=None))
    bound = 1 / math.sqrt(in_channels * math.prod(size))
    nn.init.uniform_(layer.weight, -bound, bound)
    if bias:
        layer.bias = nn.Parameter(torch.empty(out_channels, device=None, dtype=None))
        nn.init.uniform_(layer.bias, -bound, bound)
    else:
        layer.register_parameter("bias", None)


def sparse_conv3d_forward(self: Any, x: Any) -> Any:
    """A TRELLIS SparseTensor of C_in channels to one of C_out channels on the same voxels."""
    coord_set: CoordSet | None = x.get_spatial_cache(_KEY)
    shape = (x.shape[0], self.in_channels, *x.spatial_shape)
    cache = None if coord_set is None else NeighborCache(coord_set)
    feats, made = sparse_submanifold_conv3d(
        x.feats, x.coords, shape, self.weight, self.bias, cache, self.dilation
    )
    if coord_set is None:
        x.register_spatial_cache(_KEY, made.coord_set)
    return x.replace(feats)


def sparse_inverse_conv3d_init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
    """NotImplementedError, as in the flex_gemm backend."""
    raise NotImplementedError(
        "SparseInverseConv3d goes with the 'spconv' backend: voxmma.compat.install('spconv')"
    )


def sparse_inverse_conv3d_forward(self: Any, x: Any) -> Any:
    """See sparse_inverse_conv3d_init."""
    raise NotImplementedError(
        "SparseInverseConv3d goes with the 'spconv' backend: voxmma.compat.install('spconv')"
    )
