"""Crops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxmma.compat.torchsparse import options
from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["spcrop"]


def spcrop(
    input: SparseTensor, coords_min: Sequence[int] | None = None, coords_max: Sequence[int] | None = None
) -> SparseTensor:
    """The voxels with coords_min <= (x, y, z) < coords_max on every axis."""
    space = input.coords[:, :3] if options.version == 1 else input.coords[:, 1:]
    keep = torch.ones(len(space), dtype=torch.bool, device=space.device)
    if coords_min is not None:
        keep &= (space >= space.new_tensor(coords_min)).all(1)
    if coords_max is not None:
        keep &= (space < space.new_tensor(coords_max)).all(1)
    return SparseTensor(input.feats[keep], input.coords[keep], input.stride, input.spatial_range)
