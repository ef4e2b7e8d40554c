"""Keys among keys."""

from __future__ import annotations

import torch

from voxmma.sparse.packing import find_keys

__all__ = ["sphashquery"]


def find_rows(keys: torch.Tensor, among: torch.Tensor) -> torch.Tensor:
    """Row int64 of each key in `among` (N,), the first of equal ones, -1 where there is none."""
    return find_keys(keys.flatten(), *torch.sort(among.flatten(), stable=True)).view(keys.shape)


def sphashquery(queries: torch.Tensor, references: torch.Tensor) -> torch.Tensor:
    """Row int64 of each of `queries`, hashes of `sphash` in any shape, in `references` (N,), or -1."""
    return find_rows(queries, references)
