"""Sparse convolution of rows of features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from voxmma import compat
from voxmma._types import Triple, positive, positive_triple
from voxmma.compat.names import missing as _missing
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.tensor import Voxels


class Algorithm:
    """Names that `set_algorithm` takes."""

    EXPLICIT_GEMM = "explicit_gemm"
    IMPLICIT_GEMM = "implicit_gemm"
    IMPLICIT_GEMM_SPLITK = "implicit_gemm_splitk"
    MASKED_IMPLICIT_GEMM = "masked_implicit_gemm"
    MASKED_IMPLICIT_GEMM_SPLITK = "masked_implicit_gemm_splitk"


ALGORITHM = Algorithm.MASKED_IMPLICIT_GEMM_SPLITK
HASHMAP_RATIO = 2.0


def set_algorithm(algorithm: str) -> None:
    """Kept in ALGORITHM, without effect: voxmma has one algorithm, with the tile that its settings choose.
    ValueError for a name that FlexGEMM has not."""
    global ALGORITHM
    names = [value for name, value in vars(Algorithm).items() if name.isupper()]
    if algorithm not in names:
        raise ValueError(f"algorithm must be one of {', '.join(names)}, got {algorithm!r}")
    ALGORITHM = algorithm


def set_hashmap_ratio(ratio: float) -> None:
    """Kept in HASHMAP_RATIO, without effect."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


class NeighborCache:
    """What calls on the same coordinates share: the coordinate set, on which all maps are cached."""

    def __init__(self, coord_set: CoordSet, out_set: CoordSet | None = None) -> None:
        self.coord_set = coord_set
        self.out_set = out_set
        """of a strided convolution"""


SubMConv3dNeighborCache = SparseConv3dNeighborCache = NeighborCache


def sparse_submanifold_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: NeighborCache | None = None,
    dilation: Any = (1, 1, 1),
) -> tuple[torch.Tensor, NeighborCache]:
    """Submanifold convolution: (N, C_out) features on the coordinates of the input, and what the next call on
    these coordinates may be given.

    Args:
        feats: (N, C_in). coords: (N, 4) int32 batch, x, y, z. The same tensor, unwritten, is the same set.
        shape: (B, C_in, X, Y, Z); B counts here.
        weight: (C_out, K_x, K_y, K_z, C_in), sizes odd. bias: (C_out,).
        neighbor_cache: of an earlier call on these coordinates, of any kernel.
        dilation: one int or three.

    ValueError and TypeError as in voxmma.nn.functional.spatially_sparse_conv.
    """
    size, kernel = _kernel(weight)
    if any(k % 2 == 0 for k in size):
        raise ValueError(f"weight must have kernel sizes that are odd, got {size}")
    x, cache = _input(feats, coords, shape, neighbor_cache)
    spread = positive_triple(dilation, "dilation")
    y = _conv(x, kernel, size, bias, dilation=spread, layer="sparse_submanifold_conv3d")
    return y.feats, cache


def sparse_conv3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    neighbor_cache: NeighborCache | None = None,
    out_coords: torch.Tensor | None = None,
    stride: Any = (1, 1, 1),
    padding: Any = (0, 0, 0),
    dilation: Any = (1, 1, 1),
) -> tuple[torch.Tensor, torch.Tensor, NeighborCache]:
    """Convolution of a grid of `shape` (B, C_in, X, Y, Z) with zeros where there is no voxel: (M, C_out)
    features, their coordinates (M, 4), and what the next call of this kernel may be given.

    Outputs are the cells of torch's output grid whose window holds a voxel, sorted, or `out_coords`. Else as
    `sparse_submanifold_conv3d`; ValueError names coordinates outside of the grid.
    """
    size, kernel = _kernel(weight)
    step = positive_triple(stride, "stride")
    x, cache = _input(feats, coords, shape, neighbor_cache, bounded=True)
    target = cache.out_set
    if target is None and out_coords is not None:
        target = CoordSet.of(out_coords, x.batch_size)
    y = _conv(
        x,
        kernel,
        size,
        bias,
        stride=step,
        dilation=positive_triple(dilation, "dilation"),
        padding=padding,
        generative=step == (1, 1, 1),
        coords=target,
        layer="sparse_conv3d",
    )
    made = y.coord_set.exposed() if out_coords is None else out_coords
    return y.feats, made, NeighborCache(x.coord_set, y.coord_set)


def _kernel(weight: torch.Tensor) -> tuple[Triple, torch.Tensor]:
    """Kernel size, and the weight as (K, C_in, C_out)."""
    if not isinstance(weight, torch.Tensor) or weight.dim() != 5:
        shape = tuple(weight.shape) if isinstance(weight, torch.Tensor) else type(weight).__name__
        raise ValueError(f"weight must be (C_out, K_x, K_y, K_z, C_in), got {shape}")
    x, y, z = weight.shape[1:4]
    return (x, y, z), weight.flatten(1, 3).permute(1, 2, 0)


def _input(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    cache: NeighborCache | None,
    bounded: bool = False,
) -> tuple[Voxels, NeighborCache]:
    if cache is None:
        grid = tuple(shape[-3:]) if bounded else None
        cache = NeighborCache(CoordSet.of(coords, positive(shape[0], "shape[0]"), grid))
    elif not isinstance(cache, NeighborCache):
        raise TypeError(f"neighbor_cache must be one of voxmma's, got {type(cache).__name__}")
    return Voxels(cache.coord_set, feats), cache


def _conv(x: Voxels, kernel: torch.Tensor, size: Triple, bias: torch.Tensor | None, **options: Any) -> Voxels:
    options |= compat.PRECISION["flex_gemm"]
    return spatially_sparse_conv(x, kernel, size, bias, **options)


__getattr__ = _missing(
    __name__, {"SerializationMode": "the rows as they are", "SubMConv3dFunction": "sparse_submanifold_conv3d"}
)
