"""Pooling of Voxels over kernel windows and over samples, and its opposite.

Windows run over the neighbour table of the kernel map, one gather an offset, on every device. Nothing is
scattered: gradients gather over the opposite table, so results repeat bit by bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from voxmma.coords import CoordSet
from voxmma.kernel_map import KernelMap, neighbor_table
from voxmma.nn.functional.sparse_conv import (
    KernelSize,
    Target,
    dilation_triple,
    kernel_triple,
    resolve_map,
    stride_triple,
)
from voxmma.segments import BLOCK, sample_mean, sample_sum, tree
from voxmma.voxels import FEATURE_DTYPES, Voxels

# ---- linear operators over a map, differentiable any number of times ---------------------------------------


class _Map:
    """Both directions of a map as tensors, for autograd: they outlive KernelMap.free()."""

    def __init__(self, made: KernelMap, both: bool) -> None:
        self.volume = made.kernel_volume
        self.symmetric = made.symmetric
        self.n_in, self.n_out = made.in_coords.num, made.out_coords.num
        self.tensors = made.tensors
        self.opposite = made.transposed().tensors if both else []

    def table(self, transposed: bool) -> Tensor:
        """(K, rows) neighbour table, int32, -1 for none; transposed: of the opposite direction."""
        if not transposed:
            return neighbor_table(self.tensors, self.volume, self.n_out)
        table = neighbor_table(self.opposite, self.volume, self.n_in)
        return table.flip(0) if self.symmetric else table


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of this dtype are kept in."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _gather(values: Tensor, rows: Tensor) -> Tensor:
    """Rows (M,) of `values`; row 0 for -1. `values` has at least one row."""
    return values.index_select(0, rows.clamp(min=0))


class _Sum(torch.autograd.Function):
    """y[i] = sum over k of x[table[k, i]], in the order of k, in fp32 for half dtypes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: _Map, transposed: bool, out_dtype: torch.dtype) -> Tensor:
        ctx.over, ctx.transposed, ctx.dtype = over, transposed, x.dtype
        rows = over.n_in if transposed else over.n_out
        y = x.new_zeros((rows, x.shape[1]), dtype=_wide(x.dtype))
        if x.shape[0]:
            for row in over.table(transposed):
                y += _gather(x, row).masked_fill_((row < 0).unsqueeze(1), 0)
        return y.to(out_dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _Sum.apply(grad, ctx.over, not ctx.transposed, ctx.dtype), None, None, None


class _Extreme(torch.autograd.Function):
    """The largest (smallest) input of each window and channel, 0 for an empty window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: _Map, largest: bool) -> Tensor:
        best, chosen = _choose(x, over, largest)
        ctx.over, ctx.chosen = over, chosen
        return best

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Return.apply(grad, ctx.over, ctx.chosen), None, None


class _Pick(torch.autograd.Function):
    """y[i, c] = x[table[chosen[i, c], i], c], 0 where `chosen` (n_out, C) is -1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, over: _Map, chosen: Tensor) -> Tensor:
        ctx.over, ctx.chosen = over, chosen
        y = x.new_zeros(chosen.shape)
        if x.shape[0]:
            for k, row in enumerate(over.table(False)):
                y = torch.where(chosen == k, _gather(x, row), y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Return.apply(grad, ctx.over, ctx.chosen), None, None


class _Return(torch.autograd.Function):
    """The transpose of _Pick: x[j, c] = sum of y[i, c] over the outputs i that picked row j."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, over: _Map, chosen: Tensor) -> Tensor:
        ctx.over, ctx.chosen = over, chosen
        x = y.new_zeros((over.n_in, y.shape[1]), dtype=_wide(y.dtype))
        if y.shape[0]:
            for k, row in enumerate(over.table(True)):
                picked = (_gather(chosen, row) == k) & (row >= 0).unsqueeze(1)
                x += torch.where(picked, _gather(y, row), 0)
        return x.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Pick.apply(grad, ctx.over, ctx.chosen), None, None


def _better(value: Tensor, best: Tensor, largest: bool) -> Tensor:
    """Where `value` takes the place of `best`: strictly larger (smaller), or the first NaN."""
    return ((value > best) if largest else (value < best)) | (value.isnan() & ~best.isnan())


def _choose(x: Tensor, over: _Map, largest: bool) -> tuple[Tensor, Tensor]:
    """Largest (smallest) input of each window (n_out, C), and its offset (first of equals; -1: none)."""
    best = x.new_zeros((over.n_out, x.shape[1]))
    chosen = torch.full(best.shape, -1, dtype=torch.int16, device=x.device)
    if x.shape[0]:
        for k, row in enumerate(over.table(False)):
            value = _gather(x, row)
            take = ((chosen < 0) | _better(value, best, largest)) & (row >= 0).unsqueeze(1)
            best = torch.where(take, value, best)
            chosen.masked_fill_(take, k)
    return best, chosen


# ---- windows -----------------------------------------------------------------------------------------------


def _windowed(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None,
    dilation: KernelSize,
    padding: KernelSize | None,
    coords: Target | None,
    kernel_map: KernelMap | None,
) -> tuple[_Map, CoordSet, tuple[int, int, int]]:
    _check(x)
    size = kernel_triple(kernel_size)
    step = size if stride is None else stride_triple(stride)
    made, out_coords, out_stride = resolve_map(
        x, size, step, dilation_triple(dilation), padding, coords=coords, given=kernel_map
    )
    return _Map(made, torch.is_grad_enabled() and x.feats.requires_grad), out_coords, out_stride


def _check(x: Voxels) -> None:
    if not isinstance(x, Voxels):
        raise TypeError(f"x must be a voxmma.Voxels, got {type(x).__name__}")
    if x.dtype not in FEATURE_DTYPES:
        raise TypeError(f"the features of x must be fp16, bf16, fp32 or fp64, got {x.dtype}")


def max_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    *,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Largest input in each output's window, per channel; only voxels that exist count.

    Windows, output voxels and their order are those of `spatially_sparse_conv` with the same arguments:
    stride 1 keeps the voxels of x, another makes every site whose window holds a voxel.

    Args:
        x: N voxels with C channels, fp16, bf16, fp32 or fp64; N may be 0.
        kernel_size: one int or three, 1 to 9 each.
        stride: one int or three; default kernel_size. dilation: one int or three.
        padding: one int or three; default (kernel_size // 2) * dilation for odd sizes, 0 for even ones.
        coords: output coordinates. kernel_map: a map for the coordinates of x. As in spatially_sparse_conv.

    Returns:
        Voxels of C channels and the dtype of x. Equal values: the gradient goes to the one of the smallest
        offset index. A NaN in the window wins. A window without a voxel (only possible with `coords`) gives 0
        and no gradient.

    Raises TypeError or ValueError naming the argument.
    """
    return _extreme(x, True, kernel_size, stride, dilation, padding, coords, kernel_map)


def min_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    *,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Smallest input in each output's window; otherwise as `max_pool`."""
    return _extreme(x, False, kernel_size, stride, dilation, padding, coords, kernel_map)


def _extreme(x: Voxels, largest: bool, *window: Any) -> Voxels:
    over, out_coords, out_stride = _windowed(x, *window)
    return Voxels._make(out_coords, _Extreme.apply(x.feats, over, largest), out_stride)


def sum_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    *,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Sum of the inputs in each output's window, added in fp32 for half dtypes; otherwise as `max_pool`."""
    over, out_coords, out_stride = _windowed(x, kernel_size, stride, dilation, padding, coords, kernel_map)
    return Voxels._make(out_coords, _Sum.apply(x.feats, over, False, x.dtype), out_stride)


def avg_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    *,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Mean of the inputs present in each output's window, 0 where there is none; otherwise as `sum_pool`."""
    over, out_coords, out_stride = _windowed(x, kernel_size, stride, dilation, padding, coords, kernel_map)
    wide = _wide(x.dtype)
    present = (over.table(False) >= 0).sum(0).clamp(min=1).to(wide).unsqueeze(1)
    mean = _Sum.apply(x.feats, over, False, wide) / present
    return Voxels._make(out_coords, mean.to(x.dtype), out_stride)


def unpool(
    x: Voxels,
    stride: KernelSize = 2,
    *,
    coords: Target | None = None,
    generative: bool = False,
    max_voxels: int | None = None,
) -> Voxels:
    """Nearest-neighbour upsampling: voxel i takes the features of the coarse voxel floor(i / stride).

    Args:
        x: N voxels with C channels.
        stride: one int or three, 1 to 9 each.
        coords, generative, max_voxels: where the outputs are, as for a transposed `spatially_sparse_conv`
            of kernel_size = stride: `coords`; else the finer voxels that strided layers of this total stride
            made those of x from; for want of such, or generative, all stride^3 children, sorted.

    Returns:
        Voxels of C channels; 0 where the coarse voxel does not exist.

    Raises TypeError or ValueError naming the argument.
    """
    _check(x)
    size = kernel_triple(stride)
    made, out_coords, out_stride = resolve_map(
        x, size, size, (1, 1, 1), 0, True, generative, coords, max_voxels
    )
    over = _Map(made, torch.is_grad_enabled() and x.feats.requires_grad)
    return Voxels._make(out_coords, _Sum.apply(x.feats, over, False, x.dtype), out_stride)


# ---- samples -----------------------------------------------------------------------------------------------


def global_sum_pool(x: Voxels) -> Tensor:
    """(batch_size, C) sum over the voxels of each sample, 0 for an empty one; in fp32 for half dtypes."""
    _check(x)
    return sample_sum(x.feats.to(_wide(x.dtype)), x.coord_set).to(x.dtype)


def global_avg_pool(x: Voxels) -> Tensor:
    """(batch_size, C) mean over the voxels of each sample, 0 for an empty one; in fp32 for half dtypes."""
    _check(x)
    return sample_mean(x.feats.to(_wide(x.dtype)), x.coord_set).to(x.dtype)


def global_max_pool(x: Voxels) -> Tensor:
    """(batch_size, C) largest feature of each sample; an empty sample gives 0 and no gradient.

    Equal values: the gradient goes to the one in the smallest row. A NaN in the sample wins.
    """
    _check(x)
    if x.num_voxels == 0:
        return x.feats.new_zeros((x.batch_size, x.feats.shape[1])) + x.feats.sum(0)
    with torch.no_grad():
        winner = _largest_rows(x.feats, x.coord_set)
    return torch.where(winner >= 0, x.feats.gather(0, winner.clamp(min=0)), 0)


def _largest_rows(values: Tensor, coords: CoordSet) -> Tensor:
    """(batch_size, C) int64 row of each sample's largest value, the first of equals, -1 for empty samples.

    Block by block up the tree of voxmma.segments. Rows of a block come first in it, then what belongs to no
    sample (-1), so that among equal -inf a row that exists is the first.
    """
    rows: Tensor | None = None  # (blocks, C) row of the original `values` that each block chose
    step = torch.arange(BLOCK, device=values.device)
    for order, starts in tree(coords):
        ends = torch.cat([starts[1:], starts.new_full((1,), len(order))])
        place = starts.unsqueeze(1) + step
        source = order[place.clamp(max=len(order) - 1)]
        row = torch.where(place < ends.unsqueeze(1), source, -1).unsqueeze(2)  # (blocks, BLOCK, 1)
        if rows is not None:
            row = torch.where(row >= 0, rows[source], -1)  # (blocks, BLOCK, C)
        values, slot = values[source].masked_fill(row < 0, -torch.inf).max(1)
        rows = row.expand(-1, -1, values.shape[1]).gather(1, slot.unsqueeze(1)).squeeze(1)
    assert rows is not None
    return rows
