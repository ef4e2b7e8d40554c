"""Sets and maps of which the device alone knows how large they are: buffers of a capacity, and a count.

A program that is laid out once runs for every set up to its capacities. Nothing here waits for a GPU or
depends on what the tensors hold, so that a CUDA graph can capture it; on a CPU the same functions look at the
counts. What is made for the first `count` rows equals what coords.py, derive.py and maps.py make of them.
Counts below 0 stand for 0, those above the capacity for the capacity.

Faults do not raise but are told in a `status`, int64 (4,) on the sets' device, overwritten by each call, to
be read when it suits. Results are wrong then, and nothing is read or written outside the buffers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from voxmma._extension import _C
from voxmma.sparse.coords import Bounds, first_duplicate, pack, unpack
from voxmma.sparse.derive import _NONE, Derived, _candidates, _distinct, reach
from voxmma.sparse.maps import Geometry, cpu_pairs, plan_rule, size_tensor

_INT32 = torch.iinfo(torch.int32)
_EMPTY = (*[_INT32.max] * 4, *[_INT32.min] * 4)


@dataclass(frozen=True)
class SizedSet:
    coords: torch.Tensor
    """(capacity, 4) int32 rows (batch, x, y, z); those from `count` on mean nothing"""
    count: torch.Tensor
    """(1,) int64"""
    inner: torch.Tensor | None
    """(8,) int32: CoordSet.bounds of the rows; None: `bounds` are. Of an empty set the smallest are above the
    largest"""
    index: tuple[torch.Tensor, torch.Tensor]
    """GPU: order (capacity,), hash table (coords.HashIndex). CPU: packed keys (capacity,) int64, ascending,
    and the row of each; bad rows and those from `count` on have a key above all others"""
    bounds: Bounds
    """where the rows have to lie"""


def index_sized(coords: torch.Tensor, count: torch.Tensor, bounds: Bounds, status: torch.Tensor) -> SizedSet:
    """The set of the first `count` rows of (capacity, 4) int32 `coords`.

    status: [count as given, smallest row outside `bounds` or -1, duplicate row << 32 | its earliest twin or
    -1, unused].
    """
    if coords.is_cuda:
        order, blocks, inner = _C.index_sized(coords, count, bounds, status)
        return SizedSet(coords, count, inner, (order, blocks), bounds)
    rows = coords[: _number(count, coords)]
    low, high = rows.new_tensor(bounds[:4]), rows.new_tensor(bounds[4:])
    inside = ((rows >= low) & (rows <= high)).all(1)
    good, bad = torch.nonzero(inside).flatten(), torch.nonzero(~inside).flatten()
    keys, place = torch.sort(pack(rows[good]), stable=True)
    order = good[place]
    duplicate, twin = first_duplicate(keys, order)
    pair = duplicate << 32 | twin if duplicate >= 0 else -1
    _tell(status, int(count), int(bad[0]) if len(bad) else -1, pair, 0)
    inner = torch.cat(torch.aminmax(rows[good], dim=0)) if len(good) else rows.new_tensor(_EMPTY)
    index = _room(keys, len(coords), _NONE), _room(torch.cat([order, bad]), len(coords))
    return SizedSet(coords, count, inner, index, bounds)


def derive_sized(source: SizedSet, made: Derived, capacity: int, status: torch.Tensor) -> SizedSet:
    """The output set `made` of a set; sorted, like that.

    status: [sites, not 0 where one was outside the bounds or the packable range, unused, unused]. Where there
    are more sites than `capacity`, the set is empty; if its bounds hold more than 2^27 cells, with the extent
    of each axis rounded up to a power of two, the number of sites is then some number above the capacity.
    """
    bounds = reach(source.bounds, *made)
    if source.coords.is_cuda:
        coords, count, inner, order, blocks = _C.derive_sized(
            source.coords,
            source.count,
            source.inner,
            *made.geometry,
            made.to_children,
            made.shape or (),
            bounds,
            capacity,
            status,
        )
        return SizedSet(coords, count, inner, (order, blocks), bounds)
    rows = source.coords[: _number(source.count, source.coords)]
    keys, outside, inner = pack(rows), False, source.inner
    if len(rows):
        keys, outside = _distinct(_candidates(rows, made))
        if inner is not None:
            inner = inner.new_tensor(reach(tuple(inner.tolist()), *made))
    sites = unpack(keys)
    _tell(status, len(keys), int(outside), 0, 0)
    number = len(keys) if len(keys) <= capacity else 0
    index = _room(keys[:number], capacity, _NONE), _room(torch.arange(number, device=rows.device), capacity)
    count = torch.tensor([number], dtype=torch.int64, device=rows.device)
    return SizedSet(_room(sites[:number], capacity), count, inner, index, bounds)


def plan_room(geometry: Geometry, reverse: bool, n_in: int, n_out: int) -> tuple[int, int, int, int]:
    """Passes, and units of 4 unique rows, that a map on a GPU takes as a rule; then, that always suffice."""
    return _C.plan_room(n_out, n_in, *plan_rule(geometry, reverse))


def plan_sized(
    inputs: SizedSet,
    outputs: SizedSet,
    geometry: Geometry,
    reverse: bool,
    room: tuple[int, int],
    status: torch.Tensor,
    compact: bool = False,
) -> list[torch.Tensor]:
    """The tensors of a kernel map (maps.KernelMap) for as many rows as `inputs` and `outputs` have room for.

    Rows from the count on have no inputs, and on a GPU no place in the plan: results for them mean nothing.
    `room`, for a GPU, is a number of passes and of units of 4 unique rows; a tile that finds none is left out
    like those.

    status: [units of 4 unique rows, passes, pairs, unused], as many as are needed.

    `compact`: only tiles that have rows are on the schedule, (2, tiles, 4) at the beginning of its memory.
    """
    if outputs.coords.is_cuda:
        (order, _), (in_order, blocks), rule = outputs.index, inputs.index, plan_rule(geometry, reverse)
        made = outputs.coords, outputs.count, order, blocks, in_order
        tensors = list(_C.plan_sized(*made, *rule, *room, status, compact))
    else:
        n_in, n_out = (_number(side.count, side.coords) for side in (inputs, outputs))
        keys, row = inputs.index
        out_row = outputs.index[1][:n_out]
        tensors = cpu_pairs(keys[:n_in], row[:n_in], out_row, outputs.coords, geometry, reverse)
        _tell(status, 0, 0, len(tensors[0]), 0)
    return [*tensors, size_tensor(inputs.coords, outputs.coords)]


def _number(count: torch.Tensor, coords: torch.Tensor) -> int:
    return max(0, min(int(count), len(coords)))


def _room(rows: torch.Tensor, capacity: int, fill: int = 0) -> torch.Tensor:
    """`rows` with others of `fill` behind them."""
    made = rows.new_full((capacity, *rows.shape[1:]), fill)
    made[: len(rows)] = rows
    return made


def _tell(status: torch.Tensor, *numbers: int) -> None:
    status.copy_(torch.tensor(numbers, dtype=torch.int64, device=status.device))
