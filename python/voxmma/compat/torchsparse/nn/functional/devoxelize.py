"""Voxels to points."""

from __future__ import annotations

import itertools

import torch

from voxmma.compat.torchsparse import options
from voxmma.sparse.interpolate import weighted

__all__ = ["calc_ti_weights", "spdevoxelize"]


def calc_ti_weights(coords: torch.Tensor, idx_query: torch.Tensor, scale: float = 1) -> torch.Tensor:
    """Trilinear weights of the eight voxels around points (N, 3 or 4) x, y, z at a grid of edge `scale`.

    `idx_query` is the row of each of the eight, -1 = none, z fastest: (N, 8) with version 2, (8, N) with
    version 1, as are the weights. Absent ones weigh 0, the others are scaled to sum to 1.
    """
    first = options.version == 1  # the eight come first
    shape = (8, len(coords)) if first else (len(coords), 8)
    if idx_query.shape != shape:
        raise ValueError(f"idx_query must be {shape} with version {options.version}, got {idx_query.shape}")
    with torch.no_grad():
        low = torch.floor(coords[:, :3] / scale) * scale
        far = (coords[:, :3] - low) / scale
        axes = [(1 - far[:, axis], far[:, axis]) for axis in range(3)]
        shares = [axes[0][x] * axes[1][y] * axes[2][z] for x, y, z in itertools.product((0, 1), repeat=3)]
        weights = torch.stack(shares, dim=0 if first else 1)
        weights = torch.where(idx_query == -1, 0, weights)
        return weights / (weights.sum(0 if first else 1, keepdim=True) + 1e-8)


def spdevoxelize(feats: torch.Tensor, coords: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """(N, C): sum over k of weights (N, 8) times the rows `coords` (N, 8) of feats (M, C), -1 = none.

    Differentiable in feats; results repeat bit by bit.
    """
    return weighted(feats, coords, weights)
