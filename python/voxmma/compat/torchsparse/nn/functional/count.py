"""Points in each voxel."""

from __future__ import annotations

import torch

__all__ = ["spcount"]


def spcount(coords: torch.Tensor, num: int) -> torch.Tensor:
    """(num,) int32: how often each of 0 ... num - 1 comes in `coords` (N,); negative ones count nowhere."""
    rows = coords.flatten().long()
    inside = (rows >= 0).int()
    return torch.zeros(int(num), dtype=torch.int32, device=rows.device).index_add(
        0, rows.clamp(min=0), inside
    )
