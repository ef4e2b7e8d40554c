"""Sums and maxima over the voxels of each sample: deterministic, no host sync.

Rows are added in blocks of 64 in sample order, the partial sums again in blocks of 64, and so on: a fixed
tree, so results repeat bit by bit and the rounding error grows with the logarithm of the number of voxels.
"""

from __future__ import annotations

from typing import Any

import torch

from voxmma._dynamo import eager
from voxmma._types import sum_dtype
from voxmma.sparse.coords import CoordSet

BLOCK = 64
WHAT = "the tree over the samples of a coordinate set"


@eager
def _build(coords: CoordSet) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The levels of the tree over the samples of `coords`."""
    with torch.inference_mode(False), torch.no_grad():
        return levels(coords.coords[:, 0], coords.counts)


def levels(
    batch: torch.Tensor, size: torch.Tensor, depth: int | None = None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(row indices, start of each block among them) of every level of the tree, both int64.

    batch: (N,) sample of each row. size: (samples,) int64 rows of each. depth: number of levels, those after
    the tree's own change nothing; ValueError where it has more.
    """
    samples, device = len(size), size.device
    rows = torch.sort(batch, stable=True).indices
    longest, total = len(batch), len(batch)  # bounds the host knows without asking the device
    made: list[tuple[torch.Tensor, torch.Tensor]] = []
    while True:
        last = longest <= BLOCK
        blocks = torch.ones_like(size) if last else ((size + BLOCK - 1) // BLOCK).clamp(min=1)
        count = samples if last else total // BLOCK + samples  # at least blocks.sum()
        block = torch.arange(count, device=device)
        ends = torch.cumsum(blocks, 0)
        sample = torch.searchsorted(ends, block, right=True).clamp(max=samples - 1)
        first, start = ends - blocks, torch.cumsum(size, 0) - size
        inside = torch.minimum((block - first[sample]) * BLOCK, size[sample])
        made.append((rows, start[sample] + inside))
        if last:
            break
        size, longest, total = blocks, -(-longest // BLOCK), count
        rows = block
    if depth is not None and len(made) > depth:
        raise ValueError(f"{len(batch):,} rows take a tree of {len(made)} levels, {depth} are possible")
    for _ in range((depth or 0) - len(made)):
        same = torch.arange(samples, device=device)
        made.append((same, same.clone()))
    return made


def tree(coords: CoordSet) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The levels of the tree over the samples, leaves first: (rows, start of each block among them), int64.

    Rows of the first level are rows of `coords`, those of the next are blocks of the level before; blocks of
    the last are the samples. No block is longer than 64 rows. Built once. Needs batch_size > 0.
    """

    def make() -> tuple[torch.Tensor, ...]:
        return coords.tree() if coords.sized else tuple(t for level in _build(coords) for t in level)

    tensors = coords._of_index("segments", make, WHAT)
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def statistics_break(coords: CoordSet) -> bool:
    """Whether torch.compile has to leave sums over samples to eager code: the tree has yet to be built."""
    return torch.compiler.is_compiling() and not coords.traced and coords._index.segments is None


class _SampleSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, coords: CoordSet) -> torch.Tensor:
        ctx.coords, ctx.dtype = coords, values.dtype
        if coords.batch_size == 0:
            return values.new_zeros((0, values.shape[1]), dtype=sum_dtype(values.dtype))
        for rows, starts in tree(coords):
            values = torch.ops.voxmma.segment_sum(values, rows, starts)
        return values[: coords.batch_size] if coords.sized else values

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Spread.apply(grad, ctx.coords, ctx.dtype), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stats: torch.Tensor, coords: CoordSet, dtype: torch.dtype) -> torch.Tensor:
        ctx.coords, ctx.dtype = coords, stats.dtype
        rows = stats.to(dtype)
        if coords.batch_size == 1:
            return rows.expand(coords.num, -1)
        return rows.index_select(0, coords.coords[:, 0].contiguous())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _SampleSum.apply(grad, ctx.coords).to(ctx.dtype), None, None


def sample_sum(values: torch.Tensor, coords: CoordSet) -> torch.Tensor:
    """(batch_size, C) sums of the rows (N, C) of each sample, zeros for empty samples.

    `values` is fp16, bf16, fp32 or fp64 on the device of `coords` and lies in its row order; the sum is fp32,
    of fp64 it is fp64. Differentiable any number of times.
    """
    return _SampleSum.apply(values, coords)


def sample_mean(values: torch.Tensor, coords: CoordSet) -> torch.Tensor:
    """(batch_size, C) means of the rows of each sample, zeros for empty samples; else as `sample_sum`."""
    return sample_sum(values, coords) / coords.counts.clamp(min=1).to(sum_dtype(values.dtype)).unsqueeze(1)


def spread(stats: torch.Tensor, coords: CoordSet) -> torch.Tensor:
    """(N, C) row of `stats` (batch_size, C) of each voxel's sample; the transpose of `sample_sum`.

    To be read only: rows may share memory.
    """
    return _Spread.apply(stats, coords, stats.dtype)


def sample_argmax(values: torch.Tensor, coords: CoordSet) -> torch.Tensor:
    """(batch_size, C) int64 row of each sample's largest value, -1 for empty samples.

    The first of equals, the first NaN above all. `values` as in `sample_sum`. Needs batch_size > 0.
    """
    winner = None
    for rows, starts in tree(coords):
        winner = torch.ops.voxmma.segment_argmax(values, winner, rows, starts)
    assert winner is not None
    return winner[: coords.batch_size] if coords.sized else winner
