"""Hashes of coordinates."""

from __future__ import annotations

import torch

__all__ = ["sphash"]

_START = 14695981039346656037 - (1 << 64)  # FNV-1 of 64 bits, whose products are taken modulo 2^64
_PRIME = 1099511628211


def sphash(coords: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor:
    """60-bit hashes, int64 (N,), of integer coordinates (N, 4) whose last column is the batch; with `offsets`
    (K, 3), which are added to the other columns, (K, N).

    FNV-1 of the four columns, folded, as torchsparse's: equal coordinates have equal hashes, and others
    almost surely have not. To be given to `sphashquery`.
    """
    if coords.dim() != 2 or coords.shape[1] != 4 or coords.is_floating_point():
        raise ValueError(f"coords must be (N, 4) integers, got {tuple(coords.shape)} {coords.dtype}")
    columns = coords.long()
    if offsets is not None:
        shift = torch.nn.functional.pad(offsets.long(), (0, 1))
        columns = columns + shift.unsqueeze(1)
    made = columns.new_full(columns.shape[:-1], _START)
    for column in columns.unbind(-1):
        made = (made ^ (column & 0xFFFFFFFF)) * _PRIME
    return ((made >> 60) & 0xF) ^ (made & 0xFFFFFFFFFFFFFFF)
