"""Points to voxels."""

from __future__ import annotations

import torch

from voxmma.sparse.interpolate import spread_weighted

__all__ = ["spvoxelize"]


def spvoxelize(feats: torch.Tensor, coords: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(M, C) means of features (N, C) of points over the voxels that `coords` (N,) says, -1 = none; `counts`
    (M,) is how many each voxel has, of `spcount`. Differentiable in feats; results repeat bit by bit."""
    rows = coords.flatten().long()
    share = 1.0 / counts.clamp(min=1).double()
    weights = share[rows.clamp(min=0)]
    return spread_weighted(feats, rows.unsqueeze(1), weights.unsqueeze(1), len(counts))
