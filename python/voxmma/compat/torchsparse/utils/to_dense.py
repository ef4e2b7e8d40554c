"""Dense grids."""

from __future__ import annotations

from typing import Any

import torch

from voxmma.compat.torchsparse.utils.utils import make_ntuple

__all__ = ["to_dense"]


def to_dense(feats: torch.Tensor, coords: torch.Tensor, spatial_range: Any) -> torch.Tensor:
    """(B, X, Y, Z, C) grid of `spatial_range` = (B, X, Y, Z), features at coords (N, 4), zeros elsewhere.

    Differentiable. ValueError names the first row that lies outside.
    """
    shape = make_ntuple(spatial_range, 4)
    index = coords.long()
    outside = ((index < 0) | (index >= index.new_tensor(shape))).any(1)
    if bool(outside.any()):
        row = int(torch.nonzero(outside)[0])
        raise ValueError(f"coords row {row}, {tuple(coords[row].tolist())}, lies outside of {shape}")
    grid = feats.new_zeros((*shape, feats.shape[1]))
    return grid.index_put(tuple(index.unbind(1)), feats)
