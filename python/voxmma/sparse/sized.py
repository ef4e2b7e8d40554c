"""Sets and maps of which the device alone knows how large they are: buffers of a capacity, and a count.

A program that is laid out once runs for every set up to its capacities. Nothing here waits for a GPU or
depends on what the tensors hold, so that a CUDA graph can capture it; on a CPU the same functions look at the
counts. What is made for the first `count` rows equals what coords.py, derive.py and maps.py make of them.
Counts below 0 stand for 0, those above the capacity for the capacity.

Faults do not raise but are told in a `status`, int64 (4,) on the sets' device, overwritten by each call, to
be read when it suits. Results are wrong then, and nothing is read or written outside the buffers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from voxmma._extension import _C
from voxmma.sparse.build import cpu_pairs, size_tensor
from voxmma.sparse.derive import _NONE, Derived, _candidates, _distinct, reach
from voxmma.sparse.geometry import Geometry, plan_rule
from voxmma.sparse.packing import Bounds, find_rows, first_duplicate, pack, unpack
from voxmma.sparse.points import _combine, _runs, grid_positions

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


LONGEST = 8191
"""points of a voxel that are added up on a GPU"""


def voxels_sized(
    points: torch.Tensor,
    batch: torch.Tensor | None,
    feats: torch.Tensor,
    count: torch.Tensor,
    grid: tuple[Sequence[float], Sequence[float], str],
    box: torch.Tensor,
    capacity: int,
    status: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Voxels.from_points of the first `count` points: coordinates, features and number of the voxels.

    grid: edges of a cell, origin, and 'mean' or 'sum'. box: (2, 4) int32, where cells have to lie.

    status: [voxels, smallest point row whose cell is outside `box`, that is of no sample or not finite, or
    -1; most points of a voxel, unused]. Bad points are left out. Where there are more voxels than `capacity`,
    there are none; on a GPU voxels of more than `LONGEST` points have wrong features.
    """
    edge, origin, reduce = grid
    if not points.is_cuda:
        number = _number(count, points)
        cells = torch.floor(grid_positions(points[:number], edge, origin))
        samples = cells.new_zeros(number) if batch is None else batch[:number]
        cells = torch.cat([samples.unsqueeze(1).to(cells.dtype), cells], dim=1)
        inside = ((cells >= box[0]) & (cells <= box[1])).all(1)
        bad = torch.nonzero(~inside).flatten()
        keys, order = torch.sort(pack(cells[inside].long()), stable=True)
        start, longest = _runs(keys)
        _tell(status, len(start), int(bad[0]) if len(bad) else -1, longest, 0)
        made = len(start) if len(start) <= capacity else 0
        merged = _combine(feats[:number][inside], order, start, longest, reduce)[:made]
        coords = unpack(keys[start])[:made]
        number_made = torch.tensor([made], dtype=torch.int64, device=coords.device)
        return _room(coords, capacity), _room(merged, capacity), number_made
    rows = torch.arange(len(points), device=points.device)
    cells = _C.cells_of_points(points, batch, origin, edge)
    there, inside = rows < count, ((cells >= box[0]) & (cells <= box[1])).all(1)
    good = there & inside
    ordered, order = torch.sort(torch.where(good, pack(cells), _NONE), stable=True)
    fresh = ordered < _NONE
    fresh[1:] &= ordered[1:] != ordered[:-1]
    run = torch.cumsum(fresh, 0)
    total, last = run[-1:], good.sum().view(1)
    start = last.repeat(capacity + 2)  # the last takes the others
    start.scatter_(0, torch.where(fresh & (run <= capacity + 1), run - 1, capacity + 1), rows)
    begin = start[: capacity + 1]
    coords = cells[order[begin[:-1].clamp(max=len(points) - 1)]]
    merged = _C.merge_runs(feats, order.int(), begin.int(), LONGEST, reduce == "mean", False)
    bad = torch.where(there & ~inside, rows, len(points)).amin().view(1)
    bad = torch.where(bad < len(points), bad, -1)
    torch.cat([total, bad, begin.diff().amax().view(1), torch.zeros_like(total)], out=status)
    return coords, merged, torch.where(total <= capacity, total, 0)


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


def lookup_sized(made: SizedSet, query: torch.Tensor) -> torch.Tensor:
    """CoordSet.lookup in a set: rows (M,) int64 of any (M, 4) integers, -1 where it has none."""
    if query.is_cuda:
        rows: torch.Tensor = _C.lookup_rows(query, *made.index)
        return rows
    number = _number(made.count, made.coords)
    return find_rows(query, made.index[0][:number], made.index[1][:number])


def plan_room(geometry: Geometry, reverse: bool, n_in: int, n_out: int) -> tuple[int, int, int, int]:
    """Passes, and units of 4 unique rows, that a map on a GPU takes as a rule; then, that always suffice."""
    return _C.plan_room(n_out, n_in, *plan_rule(geometry, reverse))


class Plan(NamedTuple):
    """A kernel map to be made."""

    inputs: SizedSet
    outputs: SizedSet
    geometry: Geometry
    reverse: bool
    room: tuple[int, int]
    """for a GPU: passes and units of 4 unique rows; a tile that finds none is left out"""


def plans_sized(
    plans: Sequence[Plan], status: torch.Tensor, compact: bool = False
) -> list[list[torch.Tensor]]:
    """The tensors of kernel maps (maps.KernelMap) for as many rows as their sets have room for, made side by
    side on a GPU.

    Rows from the count on have no inputs, and on a GPU no place in the plan: results for them mean nothing.

    status: (plans, 4), of each [units of 4 unique rows, passes, pairs, unused], as many as are needed.

    `compact`: for `_C.cut_plan`, without the last tensor. Only tiles that have rows are on the schedule,
    (2, tiles, 4) at the beginning of its memory.
    """
    if plans and status.is_cuda:
        rules = [[*itertools.chain(*plan_rule(p.geometry, p.reverse)), *p.room] for p in plans]
        outputs = [p.outputs for p in plans]
        made: list[list[torch.Tensor]] = [
            list(tensors)
            for tensors in _C.plans_sized(
                [out.coords for out in outputs],
                [out.count for out in outputs],
                [out.index[0] for out in outputs],
                [p.inputs.index[1] for p in plans],
                [p.inputs.index[0] for p in plans],
                rules,
                status,
                compact,
            )
        ]
    else:
        made = [_pairs(p) for p in plans]
        for line, tensors in zip(status, made, strict=True):
            _tell(line, 0, 0, len(tensors[0]), 0)
    if not compact:
        for plan, tensors in zip(plans, made, strict=True):
            tensors.append(size_tensor(plan.inputs.coords, plan.outputs.coords))
    return made


def _pairs(plan: Plan) -> list[torch.Tensor]:
    n_in, n_out = (_number(side.count, side.coords) for side in (plan.inputs, plan.outputs))
    keys, row = plan.inputs.index
    out_row = plan.outputs.index[1][:n_out]
    return cpu_pairs(keys[:n_in], row[:n_in], out_row, plan.outputs.coords, plan.geometry, plan.reverse)


def _number(count: torch.Tensor, coords: torch.Tensor) -> int:
    return max(0, min(int(count), len(coords)))


def _room(rows: torch.Tensor, capacity: int, fill: int = 0) -> torch.Tensor:
    """`rows` with others of `fill` behind them."""
    made = rows.new_full((capacity, *rows.shape[1:]), fill)
    made[: len(rows)] = rows
    return made


def _tell(status: torch.Tensor, *numbers: int) -> None:
    status.copy_(torch.tensor(numbers, dtype=torch.int64, device=status.device))
