"""Packed keys: a voxel as one integer whose order is that of (batch, x, y, z)."""

from __future__ import annotations

import torch

COORD_BITS = 18
COORD_MIN = -(1 << (COORD_BITS - 1))
COORD_MAX = -COORD_MIN - 1
BATCH_MAX = 1022
_BATCH_BIAS = 512  # keeps the packed key of batch 0..1022 inside a signed 64-bit integer, in order
_SHIFTS = (3 * COORD_BITS, 2 * COORD_BITS, COORD_BITS, 0)
Bounds = tuple[int, ...]
"""smallest batch, x, y, z of a set, then the largest; or numbers beyond them"""


def pack(coords: torch.Tensor) -> torch.Tensor:
    """(N, 4) packable coordinates -> (N,) int64 keys whose order is that of (batch, x, y, z)."""
    key, *axes = (coords.long() - COORD_MIN).unbind(1)
    key = key + (COORD_MIN - _BATCH_BIAS)
    for axis in axes:
        key = torch.add(axis, key, alpha=1 << COORD_BITS)
    return key


def pack_batch(batch: torch.Tensor) -> torch.Tensor:
    """What the batch column adds to a packed key. int64."""
    return (batch.long() - _BATCH_BIAS) << _SHIFTS[0]


def pack_axis(values: torch.Tensor, axis: int) -> torch.Tensor:
    """What one spatial column (axis 0, 1, 2 = x, y, z) adds to a packed key. int64."""
    return (values.long() - COORD_MIN) << _SHIFTS[1 + axis]


def unpack(keys: torch.Tensor) -> torch.Tensor:
    """(N,) packed keys -> (N, 4) int32 coordinates."""
    mask = (1 << COORD_BITS) - 1
    columns = [
        (keys >> _SHIFTS[0]) + _BATCH_BIAS,
        *(((keys >> shift) & mask) + COORD_MIN for shift in _SHIFTS[1:]),
    ]
    return torch.stack(columns, dim=1).int()


def find_keys(keys: torch.Tensor, ordered: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows (M,) int64 of packed `keys` (M,) in a set with sorted keys `ordered` of rows `row`, or -1."""
    if ordered.numel() == 0:
        return torch.full_like(keys, -1)
    place = torch.searchsorted(ordered, keys).clamp_(max=ordered.numel() - 1)
    return torch.where(ordered[place] == keys, row[place], -1)


def find_rows(coords: torch.Tensor, ordered: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """`find_keys` of any (M, 4) integers."""
    space, batch = coords[:, 1:], coords[:, 0]
    packable = ((space >= COORD_MIN) & (space <= COORD_MAX)).all(1) & (batch >= 0) & (batch <= BATCH_MAX)
    keys = pack(torch.where(packable.unsqueeze(1), coords, 0))
    return torch.where(packable, find_keys(keys, ordered, row), -1)


def first_duplicate(keys: torch.Tensor, order: torch.Tensor) -> tuple[int, int]:
    """The smallest row that repeats an earlier one, and the earliest such, of ascending keys and the row of
    each, rows of a key ascending; -1, -1 where there is none."""
    repeated = torch.nonzero(keys[1:] == keys[:-1]).flatten() + 1
    if not repeated.numel():
        return -1, -1
    place = repeated[torch.argmin(order[repeated])]
    return int(order[place]), int(order[torch.searchsorted(keys, keys[place])])
