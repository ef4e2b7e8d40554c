"""Points into cells, and rows of equal cells into one, for Voxels.from_points and merged duplicates.

The CPU path is the reference. On a GPU kernels of csrc/points give the same bits, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma._types import ANY_DTYPE, DTYPE_NAMES, as_tensor, real_numbers
from voxmma.sparse.checks import (
    check_batch_size,
    explain_unpackable,
    first_unpackable,
    narrow,
    resolve_batch_size,
)
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.index import kernels_take
from voxmma.sparse.packing import BATCH_MAX, COORD_MAX, COORD_MIN, find_keys, pack, unpack

Number = float  # Voxels.float hides the built-in inside that class

_INT32_MAX = torch.iinfo(torch.int32).max
REDUCTIONS = ("mean", "sum", "max", "min", "first")


def merge(
    coords: torch.Tensor, feats: torch.Tensor, batch_size: int | None, reduce: str
) -> tuple[CoordSet, torch.Tensor]:
    """Sorted coordinate set of (N, 4) rows that may repeat, and their features (N, C) reduced to a row each.

    `coords` and `feats` have been checked but for values; errors are those of Voxels.
    """
    batch_size = check_batch_size(batch_size)
    runs = _group(narrow(coords)) if kernels_take(feats) else None
    bad = first_unpackable(coords) if runs is None else runs.bad
    if bad >= 0:
        raise ValueError(explain_unpackable(bad, coords[bad].tolist()))
    if runs is not None:
        samples = resolve_batch_size(batch_size, runs.largest_batch, coords, "coords")
        return _merge_runs(runs, feats, samples, reduce)
    largest = int(coords[:, 0].max()) if len(coords) else -1
    samples = resolve_batch_size(batch_size, largest, coords, "coords")
    return _merge(pack(narrow(coords)), feats, samples, reduce)


def quantize(
    points: torch.Tensor | Sequence[torch.Tensor],
    feats: torch.Tensor | Sequence[torch.Tensor],
    voxel_size: Number | Sequence[Number],
    reduce: str,
    batch_index: torch.Tensor | None,
    batch_size: int | None,
    origin: Sequence[Number],
) -> tuple[CoordSet, torch.Tensor, Callable[[], torch.Tensor]]:
    """Coordinates and features of Voxels.from_points, and what gives each point's voxel, (N,) int64."""
    if reduce not in REDUCTIONS:
        raise ValueError(f"reduce must be one of {', '.join(map(repr, REDUCTIONS))}, got {reduce!r}")
    batch_size = check_batch_size(batch_size)
    points, feats, batch_index = (
        tensors(points, "points"),
        tensors(feats, "feats"),
        as_tensor(batch_index, "batch_index"),
    )
    one = isinstance(points, torch.Tensor)
    points, feats, batch, samples = join_samples(points, feats, batch_index, batch_size, check=False)
    if points.dtype in DTYPE_NAMES and len(points) <= _INT32_MAX and kernels_take(feats):
        runs = _group(_cells_cuda(points, batch, voxel_size, origin))
        if runs.bad < 0:  # else the lines below find out what is wrong
            if one:
                samples = _samples(batch, runs.largest_batch, batch_size)
            coord_set, merged = _merge_runs(runs, feats, samples, reduce)
            return coord_set, merged, lambda: runs.run_of
    if one:
        samples = check_batch(batch, batch_size)
    cell = torch.floor(grid_positions(points, voxel_size, origin))
    inside = ((cell >= COORD_MIN) & (cell <= COORD_MAX)).all(1)  # False for nan and inf too
    if not bool(inside.all()):
        row = int(torch.nonzero(~inside)[0])
        position = tuple(points[row].tolist())
        if not all(map(math.isfinite, position)):
            raise ValueError(f"points row {row} is not finite: {position}")
        raise ValueError(
            f"points row {row}, {position}, lies in cell {tuple(cell[row].tolist())}, outside "
            f"{COORD_MIN}..{COORD_MAX}: voxel_size is too small or the origin too far"
        )
    keys = pack(torch.cat([batch.unsqueeze(1), cell.long()], dim=1))
    coord_set, merged = _merge(keys, feats, samples, reduce)
    return coord_set, merged, lambda: find_keys(keys, *coord_set.sorted_keys())


def grid_positions(
    points: torch.Tensor, voxel_size: Number | Sequence[Number], origin: Sequence[Number]
) -> torch.Tensor:
    """(N, 3) fp64 positions of points (N, 3) in cells of tensor stride 1: (p - origin) / voxel_size. Their
    floor is the cell, in every function: a coarser cell is made from it, not from the point."""
    shift, edge = (per_axis(values, points.device) for values in grid_of(voxel_size, origin))
    return (points.detach().double() - shift) / edge


def per_axis(values: Sequence[Number], device: torch.device) -> torch.Tensor:
    """(3,) fp64. To divide by: by a Python number CUDA multiplies with the rounded reciprocal instead."""
    # Filled on the device: a copy from the host would wait for it.
    return torch.stack([torch.full((), v, dtype=torch.float64, device=device) for v in values])


def grid_of(
    voxel_size: Number | Sequence[Number], origin: Sequence[Number]
) -> tuple[tuple[Number, ...], tuple[Number, ...]]:
    """Origin and edges of a grid, checked."""
    size = real_numbers((voxel_size,) * 3, 3) or real_numbers(voxel_size, 3)
    if size is None or min(size) <= 0:
        raise ValueError(f"voxel_size must be a positive number or three of them, got {voxel_size!r}")
    start = real_numbers(origin, 3)
    if start is None:
        raise ValueError(f"origin must be three finite numbers, got {origin!r}")
    return start, size


def tensors(value: Any, name: str) -> Any:
    """A tensor or a sequence of them, numpy arrays as the tensors that share their memory."""
    if isinstance(value, list | tuple):
        return [as_tensor(part, f"{name}[{i}]") for i, part in enumerate(value)]
    return as_tensor(value, name)


def join_samples(
    points: torch.Tensor | Sequence[torch.Tensor],
    feats: torch.Tensor | Sequence[torch.Tensor],
    batch_index: torch.Tensor | None,
    batch_size: int | None,
    check: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Checks the arguments of from_points; returns points, feats, batch (N,) int64 and the batch size.

    Without `check` the values of `batch_index` are not looked at: the batch size of one tensor is -1.
    """
    if isinstance(points, torch.Tensor):
        if not isinstance(feats, torch.Tensor):
            raise TypeError("feats must be one tensor when points is one")
        _check_points(points, "points")
        _check_feats_of_points(feats, points, "feats", "points")
        if batch_index is None:
            batch_index = torch.zeros(len(points), dtype=torch.int64, device=points.device)
        elif not isinstance(batch_index, torch.Tensor) or batch_index.dtype not in (torch.int32, torch.int64):
            what = getattr(batch_index, "dtype", type(batch_index).__name__)
            raise TypeError(f"batch_index must be an int32 or int64 tensor, got {what}")
        elif batch_index.shape != points.shape[:1] or batch_index.device != points.device:
            raise ValueError(
                f"batch_index must be ({len(points)},) on {points.device}, got {tuple(batch_index.shape)} "
                f"on {batch_index.device}"
            )
        batch = batch_index.long()
        return points, feats, batch, check_batch(batch, batch_size) if check else -1
    if batch_index is not None:
        raise ValueError(
            "batch_index goes with one points tensor, not with a sequence: the position is the sample"
        )
    if isinstance(feats, torch.Tensor) or len(points) != len(feats):
        count = "one tensor" if isinstance(feats, torch.Tensor) else f"{len(feats)} tensors"
        raise ValueError(f"feats must be a sequence of {len(points)} tensors like points, got {count}")
    if not points:
        raise ValueError("points must hold at least one tensor")
    for i, (p, f) in enumerate(zip(points, feats, strict=True)):
        _check_points(p, f"points[{i}]")
        _check_feats_of_points(f, p, f"feats[{i}]", f"points[{i}]")
        for name, tensor, first in ((f"points[{i}]", p, points[0]), (f"feats[{i}]", f, feats[0])):
            if (
                tensor.device != first.device
                or tensor.dtype != first.dtype
                or tensor.shape[1] != first.shape[1]
            ):
                raise ValueError(f"{name} differs from the first in device, dtype or number of columns")
    samples = len(points) if batch_size is None else batch_size
    if not len(points) <= samples <= BATCH_MAX + 1:
        raise ValueError(
            f"points holds {len(points)} samples, batch_size is {samples}, the limit {BATCH_MAX + 1}"
        )
    sizes = torch.tensor([len(p) for p in points], dtype=torch.int64, device="cpu")
    together = torch.cat(list(points))
    if together.is_cuda:  # from pageable memory the copy would wait
        sizes = sizes.pin_memory()
    sizes = sizes.to(together.device, non_blocking=True)
    batch = torch.repeat_interleave(
        torch.arange(len(points), device=together.device), sizes, output_size=len(together)
    )
    return together, torch.cat(list(feats)), batch, samples


def check_batch(batch: torch.Tensor, batch_size: int | None) -> int:
    """The batch size, once all of `batch` (N,) int64 are samples of it."""
    smallest, largest = torch.stack(batch.aminmax()).tolist() if len(batch) else (0, -1)
    if smallest < 0 or largest > BATCH_MAX:
        row = int(torch.nonzero((batch < 0) | (batch > BATCH_MAX))[0])
        raise ValueError(f"batch_index row {row} is {int(batch[row])}, it must be in 0..{BATCH_MAX}")
    return _samples(batch, largest, batch_size)


def _samples(batch: torch.Tensor, largest: int, batch_size: int | None) -> int:
    samples = resolve_batch_size(batch_size, largest, batch, "batch_index")
    return max(samples, 1) if batch_size is None else samples


def _check_points(points: torch.Tensor, name: str) -> None:
    if not isinstance(points, torch.Tensor) or not points.is_floating_point():
        what = points.dtype if isinstance(points, torch.Tensor) else type(points).__name__
        raise TypeError(f"{name} must be a floating point tensor, got {what}")
    if points.dim() != 2 or points.shape[1] != 3 or points.layout != torch.strided:
        raise ValueError(
            f"{name} must be (N, 3) and dense, got {points.layout} of shape {tuple(points.shape)}"
        )


def _check_feats_of_points(feats: torch.Tensor, points: torch.Tensor, name: str, points_name: str) -> None:
    if not isinstance(feats, torch.Tensor) or feats.dtype not in DTYPE_NAMES:
        what = feats.dtype if isinstance(feats, torch.Tensor) else type(feats).__name__
        raise TypeError(f"{name} must be a {ANY_DTYPE} tensor, got {what}")
    if feats.dim() != 2 or feats.shape[0] != points.shape[0] or feats.layout != torch.strided:
        raise ValueError(
            f"{name} must be ({points.shape[0]}, C) like {points_name} and dense, got {feats.layout} of "
            f"shape {tuple(feats.shape)}"
        )
    if feats.device != points.device:
        raise ValueError(f"{name} is on {feats.device}, {points_name} is on {points.device}")


def _merge(
    keys: torch.Tensor, feats: torch.Tensor, samples: int, reduce: str
) -> tuple[CoordSet, torch.Tensor]:
    """Sorted coordinate set of the packed keys (N,) and the features (N, C) of equal keys reduced to one row
    each. One read-back: how many keys there are, and how many rows the most frequent one has.
    """
    ordered, order = torch.sort(keys, stable=True)
    start, longest = _runs(ordered)
    coord_set = CoordSet.trusted(unpack(ordered[start]), samples)
    return coord_set, _combine(feats, order, start, longest, reduce)


def _combine(
    feats: torch.Tensor, order: torch.Tensor, start: torch.Tensor, longest: int, reduce: str
) -> torch.Tensor:
    """Rows of `feats` reduced to one a run; the runs of `order` (N,) begin at `start`.

    Rows of a run are combined as a balanced tree in row order by elementwise operations, so every device
    gives the same bits and the gradient is that of the elementwise operations. No read-back.
    """
    if reduce == "first":
        return feats[order[start]]
    combine = {"max": torch.maximum, "min": torch.minimum}.get(reduce, torch.add)
    wide = _wide(feats.dtype) if combine is torch.add else feats.dtype
    values = feats if longest > 1 else feats[order].to(wide)
    size = torch.cat([start, start.new_full((1,), len(order))]).diff()
    remaining, count = size, len(start)
    while longest > 1:
        # Ranks 0 1 2 3 4 of a key: (0,1) (2,3) (4) become the ranks 0 1 2 of the next round. How many rows
        # that makes is not read back: there is room for the most there can be, and what is too much copies
        # the rows before it, which nothing takes.
        after, room = (remaining + 1) // 2, (len(values) + count) // 2
        rows = torch.arange(room, device=order.device)
        unused = (room - after.sum()).unsqueeze(0)
        key = torch.repeat_interleave(torch.cat([after, unused]), output_size=room)
        used, key = key < count, key.clamp(max=count - 1)
        begin = (torch.cumsum(remaining, 0) - remaining)[key]
        left = begin + 2 * (rows - (torch.cumsum(after, 0) - after)[key])
        paired = used & (left + 1 < begin + remaining[key])
        left = torch.where(used, left, rows)
        right = torch.where(paired, left + 1, left)
        if values is feats:  # the first round sorts on the way
            left, right = order[left], order[right]
        first, second = values[left].to(wide), values[right].to(wide)
        values = torch.where(paired.unsqueeze(1), combine(first, second), first)
        remaining, longest = after, (longest + 1) // 2
    values = values[:count]
    if reduce == "mean":
        values = values / size.to(values.dtype).unsqueeze(1)
    return values.to(feats.dtype)


def _runs(ordered: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Where each run of equal values in `ordered` (N,) begins, int64, and the length of the longest."""
    n = len(ordered)
    if n == 0:
        return ordered.new_empty(0, dtype=torch.int64), 0
    fresh = torch.ones_like(ordered, dtype=torch.bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    run = torch.cumsum(fresh, 0) - 1
    rows = torch.arange(n, device=ordered.device)
    start = rows.new_zeros(n + 1).scatter_(0, torch.where(fresh, run, n), rows)  # the last takes the others
    count, longest = (torch.stack([run[-1], (rows - start[run]).max()]) + 1).tolist()
    return start[:count], longest


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over the rows of a voxel are kept in: of fp32 in fp64, too."""
    return torch.float32 if dtype.itemsize <= 2 else torch.float64


# ---- the same on a GPU, by kernels of csrc/points ----------------------------------------------------------

_LONGEST = 4096  # rows of a run that one thread adds up; longer ones go round by round


@dataclass(frozen=True, eq=False)
class _Runs:
    """Rows of (N, 4) coordinates, those of each voxel together."""

    coords: torch.Tensor  # (count, 4) int32 voxels sorted by (batch, x, y, z)
    order: torch.Tensor  # (N,) int32 rows by voxel, those of a voxel in the caller's order
    start: torch.Tensor  # (count + 1,) int32 where each voxel's begin in `order`
    run_of: torch.Tensor  # (N,) int64 voxel of each row
    bad: int  # the smallest row that is not packable, or -1; then the tensors are empty
    longest: int  # most rows of a voxel
    bounds: tuple[int, ...]  # smallest batch, x, y, z, then the largest; zeros if N = 0

    @property
    def largest_batch(self) -> int:
        return self.bounds[4] if len(self.order) else -1


@eager
def _group(cells: torch.Tensor) -> _Runs:
    """Two read-backs: extents and bad rows; how many voxels, and rows of the most frequent one."""
    coords, order, start, run_of, (bad, longest, *bounds) = _C.group_cells(cells)
    return _Runs(coords, order, start, run_of, bad, longest, tuple(bounds))


@eager
def _cells_cuda(
    points: torch.Tensor,
    batch: torch.Tensor,
    voxel_size: Number | Sequence[Number],
    origin: Sequence[Number],
) -> torch.Tensor:
    """(N, 4) int32 cells; not packable where points or samples are out of range."""
    shift, edge = grid_of(voxel_size, origin)
    return _C.cells_of_points(points.detach(), batch.contiguous(), shift, edge)


@eager
def _merge_runs(runs: _Runs, feats: torch.Tensor, samples: int, reduce: str) -> tuple[CoordSet, torch.Tensor]:
    """As `_merge`, bit for bit."""
    coord_set = CoordSet.trusted(runs.coords, samples, runs.bounds if len(runs.order) else None)
    if reduce in ("sum", "mean") and runs.longest <= _LONGEST:
        merged: torch.Tensor = _RunSum.apply(feats, runs, reduce == "mean", False)
        return coord_set, merged
    return coord_set, _combine(feats, runs.order.long(), runs.start[:-1].long(), runs.longest, reduce)


class _RunSum(torch.autograd.Function):
    """Sum or mean of the rows of each run, in the dtype of the rows or in that of the sums (`wide`)."""

    @staticmethod
    def forward(ctx: Any, feats: torch.Tensor, runs: _Runs, mean: bool, wide: bool) -> torch.Tensor:
        ctx.runs, ctx.mean, ctx.dtype = runs, mean, feats.dtype
        return _C.merge_runs(feats, runs.order, runs.start, runs.longest, mean, wide)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        grad = grad.to(_wide(ctx.dtype))
        if ctx.mean:
            grad = grad / ctx.runs.start.diff().to(grad.dtype).unsqueeze(1)
        return _RunSpread.apply(grad, ctx.runs, ctx.dtype), None, None, None


class _RunSpread(torch.autograd.Function):
    """A row for each row of each run; the transpose of the sum."""

    @staticmethod
    def forward(ctx: Any, sums: torch.Tensor, runs: _Runs, dtype: torch.dtype) -> torch.Tensor:
        ctx.runs = runs
        return sums.to(dtype).index_select(0, runs.run_of)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _RunSum.apply(grad, ctx.runs, False, True), None, None
