"""Features between voxels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxmma._types import positive
from voxmma.compat.names import missing as _missing
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.sampling import devoxelise
from voxmma.sparse.tensor import Voxels

HASHMAP_RATIO = 2.0


def set_hashmap_ratio(ratio: float) -> None:
    """Kept in HASHMAP_RATIO, without effect."""
    global HASHMAP_RATIO
    HASHMAP_RATIO = ratio


def grid_sample_3d(
    feats: torch.Tensor,
    coords: torch.Tensor,
    shape: Sequence[int],
    grid: torch.Tensor,
    mode: str = "trilinear",
) -> torch.Tensor:
    """(B, L, C) features at positions `grid` (B, L, 3) in cells; voxel i of an axis is [i, i + 1).

    'nearest': the voxel whose cell holds the position (rounded towards 0), 0 where there is none.
    'trilinear': the eight voxels whose centres surround it; weights of those that exist are scaled to sum to
    1. Differentiable in feats.

    Args:
        feats: (N, C). coords: (N, 4) int32 batch, x, y, z. shape: (B, C, X, Y, Z); B counts here.
        grid: floating point. mode: 'trilinear' or 'nearest'.

    ValueError names what does not fit, and a position that is not finite.
    """
    if mode not in ("nearest", "trilinear"):
        raise ValueError(f"mode must be 'nearest' or 'trilinear', got {mode!r}")
    samples = positive(shape[0], "shape[0]")
    if grid.dim() != 3 or grid.shape[2] != 3 or len(grid) != samples:
        raise ValueError(f"grid must be ({samples}, L, 3), got {tuple(grid.shape)}")
    x = Voxels(CoordSet.of(coords, samples), feats)
    points = grid.flatten(0, 1)
    batch = torch.arange(samples, device=grid.device).repeat_interleave(grid.shape[1])
    made = devoxelise(x, points.trunc() if mode == "nearest" else points, 1.0, mode, batch_index=batch)
    return made.view(samples, grid.shape[1], feats.shape[1])


__getattr__ = _missing(
    __name__, {"grid_sample_3d_torch": "grid_sample_3d", "GridSample3dFunction": "grid_sample_3d"}
)
