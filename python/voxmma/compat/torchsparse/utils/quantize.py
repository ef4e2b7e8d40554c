"""Cells of points."""

from __future__ import annotations

from typing import Any

import numpy as np

from voxmma._types import real_numbers

__all__ = ["sparse_quantize"]


def sparse_quantize(
    coords: Any, voxel_size: Any = 1, *, return_index: bool = False, return_inverse: bool = False
) -> Any:
    """The cells (M, 3) int32 that hold points (N, 3), sorted; also the first point of each (M,) and the cell
    of each point (N,) where asked for. `voxel_size`: edge length, one number or three."""
    points = np.asarray(coords)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"coords must be (N, 3), got shape {points.shape}")
    one = real_numbers((voxel_size,), 1)
    edge = one * 3 if one is not None else real_numbers(voxel_size, 3)
    if edge is None or min(edge) <= 0:
        raise ValueError(f"voxel_size must be a positive number or three, got {voxel_size!r}")
    cells = np.floor(points / np.array(edge)).astype(np.int32)
    found, index, inverse = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    made = [found, *([index] if return_index else []), *([inverse.reshape(-1)] if return_inverse else [])]
    return made[0] if len(made) == 1 else made
