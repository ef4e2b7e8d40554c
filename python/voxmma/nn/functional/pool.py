"""Pooling of Voxels over kernel windows and over samples, and its opposite.

Windows are ops over the kernel map (torch.ops.voxmma.pool_*), each output a gather of its inputs in the order
of the offsets. Nothing is scattered: gradients gather over the opposite direction, so results repeat bit by
bit, and CPU and GPU add in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from voxmma._dynamo import eager
from voxmma._types import ANY_DTYPE, DTYPE_NAMES
from voxmma.dispatch.config import KernelSize, kernel_triple
from voxmma.dispatch.mapping import Target, Window, resolve_map
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import Geometry, geometry_of
from voxmma.sparse.maps import KernelMap, traceable
from voxmma.sparse.segments import sample_argmax, sample_mean, sample_sum, statistics_break
from voxmma.sparse.tensor import Voxels

# ---- windows -----------------------------------------------------------------------------------------------


def _windowed(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None,
    dilation: KernelSize,
    padding: KernelSize | None,
    coords: Target | None,
    kernel_map: KernelMap | None,
) -> tuple[KernelMap, CoordSet, tuple[int, int, int]]:
    geometry = geometry_of(kernel_size, dilation, kernel_size if stride is None else stride, padding)
    return resolve_map(x, Window(geometry, padding), coords, kernel_map)


def _breaks(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None,
    dilation: KernelSize,
    padding: KernelSize | None,
    coords: Target | None,
    kernel_map: KernelMap | None,
) -> bool:
    """Whether torch.compile has to leave a pooling to eager code; see voxmma.sparse.maps.traceable."""
    if not torch.compiler.is_compiling() or kernel_map is not None or not isinstance(x, Voxels):
        return False
    geometry = geometry_of(kernel_size, dilation, kernel_size if stride is None else stride, padding)
    return not traceable(x.coord_set, geometry, coords is not None)


def _directions(over: KernelMap, both: bool) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a map, and with `both` those of the opposite direction where they are others."""
    return over.tensors, over.transposed().tensors if both and not over.symmetric else []


def _sum(x: Tensor, over: KernelMap, out_count: Tensor | None = None) -> Tensor:
    """Sums over the windows of `over`, divided by `out_count` (n_out,) where given."""
    maps = _directions(over, torch.is_grad_enabled() and x.requires_grad)
    return torch.ops.voxmma.pool_sum(
        x, None, out_count, *maps, over.kernel_volume, over.out_coords.num, over.symmetric, False
    )


def _check(x: Voxels) -> None:
    if not isinstance(x, Voxels):
        raise TypeError(f"x must be a voxmma.Voxels, got {type(x).__name__}")
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(f"the features of x must be {ANY_DTYPE}, got {x.dtype}")


def max_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    *,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
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
        padding: one int or three; default (kernel_size // 2) * dilation for odd sizes, 0 for even ones. At
            stride 1 another one goes with coords or kernel_map only.
        coords: output coordinates. kernel_map: a map for the coordinates of x. As in spatially_sparse_conv.

    Returns:
        Voxels of C channels and the dtype of x. Equal values: the gradient goes to the one of the smallest
        offset index. A NaN in the window wins. A window without a voxel (only possible with `coords`) gives 0
        and no gradient.

    Raises TypeError or ValueError naming the argument.
    """
    return _extreme(x, True, False, kernel_size, stride, dilation, padding, coords, kernel_map)[0]


def max_pool_with_indices(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    *,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> tuple[Voxels, PoolIndices]:
    """`max_pool`, and which voxel each output took: what `max_unpool` needs."""
    return _extreme(x, True, True, kernel_size, stride, dilation, padding, coords, kernel_map)


def min_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    *,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Smallest input in each output's window; otherwise as `max_pool`."""
    return _extreme(x, False, False, kernel_size, stride, dilation, padding, coords, kernel_map)[0]


def min_pool_with_indices(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    *,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> tuple[Voxels, PoolIndices]:
    """`min_pool`, and which voxel each output took: what `max_unpool` needs."""
    return _extreme(x, False, True, kernel_size, stride, dilation, padding, coords, kernel_map)


def _extreme(x: Voxels, largest: bool, indices: bool, *window: Any) -> tuple[Voxels, PoolIndices]:
    if _breaks(x, *window):
        return _extreme_outside(x, largest, indices, *window)
    _check(x)
    x = x.sites()
    over, out_coords, out_stride = _windowed(x, *window)
    back = torch.is_grad_enabled() and x.feats.requires_grad
    y, winner = torch.ops.voxmma.pool_max(
        x.feats,
        *_directions(over, back),
        over.kernel_volume,
        over.out_coords.num,
        over.symmetric,
        largest,
        back or indices,
    )
    return Voxels._make(*out_coords.expand(y), out_stride), PoolIndices(winner, over, x)


_extreme_outside = eager(_extreme)


class PoolIndices:
    """Which of the pooled voxels each output took, channel by channel.

    Made by `max_pool_with_indices` and `min_pool_with_indices`, used by `max_unpool`.
    """

    def __init__(self, winner: Tensor, over: KernelMap, x: Voxels) -> None:
        self.winner = winner
        """(M, C) offset index of what was taken, uint8 or int16; the number of offsets stands for "none\""""
        self.kernel_map = over
        self.coord_set = x.coord_set
        """coordinates of the N voxels that were pooled"""
        self.stride = x.stride
        """their tensor stride"""

    def rows(self) -> Tensor:
        """(M, C) int64 row of the pooled voxels that was taken, -1 where the window holds none."""
        table = self.kernel_map.neighbor_table().long()
        table = torch.cat([table, table.new_full((1, table.shape[1]), -1)])
        return table.gather(0, self.winner.long().t()).t()

    def __repr__(self) -> str:
        rows, channels = self.winner.shape
        return f"PoolIndices({rows} of {self.coord_set.num} voxels, {channels} channels)"


def max_unpool(x: Voxels, indices: PoolIndices) -> Voxels:
    """Puts each value at the voxel that `max_pool` took it from, and 0 everywhere else, channel by channel.

    Where windows overlap and several of them took the same voxel, their values are added: this is the
    transpose of the selection that max_pool made.

    Args:
        x: M voxels with C channels on the coordinates that max_pool made, any float dtype.
        indices: what `max_pool_with_indices` (or `min_pool_with_indices`) returned beside them.

    Returns:
        The N voxels that were pooled, in their order, with C channels and the dtype of x. Differentiable in x
        any number of times.

    Raises:
        TypeError: x is no Voxels, `indices` is no PoolIndices.
        ValueError: x has other coordinates than were made with the indices, or another number of channels.
    """
    _check(x)
    if not isinstance(indices, PoolIndices):
        raise TypeError(f"indices must be PoolIndices, got {type(indices).__name__}")
    over = indices.kernel_map
    x = x.sites()
    if not over.out_coords.equal(x.coord_set):
        raise ValueError("x has other coordinates than those the indices were made with")
    if x.feats.shape[1] != indices.winner.shape[1]:
        raise ValueError(f"x has {x.feats.shape[1]} channels, the indices are of {indices.winner.shape[1]}")
    feats = torch.ops.voxmma.pool_put(
        x.feats,
        indices.winner,
        *_directions(over, True),
        over.kernel_volume,
        over.in_coords.num,
        over.symmetric,
    )
    return Voxels._make(*indices.coord_set.expand(feats), indices.stride)


def sum_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    *,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Sum of the inputs in each output's window, added in fp32 for half dtypes; otherwise as `max_pool`."""
    return _summed(x, False, kernel_size, stride, dilation, padding, coords, kernel_map)


def avg_pool(
    x: Voxels,
    kernel_size: KernelSize,
    stride: KernelSize | None = None,
    *,
    dilation: KernelSize = 1,
    padding: KernelSize | None = None,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
) -> Voxels:
    """Mean of the inputs present in each output's window, 0 where there is none; otherwise as `sum_pool`."""
    return _summed(x, True, kernel_size, stride, dilation, padding, coords, kernel_map)


def _summed(x: Voxels, mean: bool, *window: Any) -> Voxels:
    if _breaks(x, *window):
        return _summed_outside(x, mean, *window)
    _check(x)
    x = x.sites()
    over, out_coords, out_stride = _windowed(x, *window)
    feats = _sum(x.feats, over, over.counts if mean else None)
    return Voxels._make(*out_coords.expand(feats), out_stride)


_summed_outside = eager(_summed)


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
    if torch.compiler.is_compiling() and coords is None and not x.coord_set.traced:
        return _unpool_outside(x, stride, generative=generative, max_voxels=max_voxels)
    size = kernel_triple(stride)
    window = Window(Geometry(size, size, (1, 1, 1), (0, 0, 0)), 0, True, generative, max_voxels)
    x = x.sites()
    over, out_coords, out_stride = resolve_map(x, window, coords)
    return Voxels._make(*out_coords.expand(_sum(x.feats, over)), out_stride)


_unpool_outside = eager(unpool)

# ---- samples -----------------------------------------------------------------------------------------------


@eager
def _global_outside(pool: Callable[[Voxels], Tensor], x: Voxels) -> Tensor:
    return pool(x)


def global_sum_pool(x: Voxels) -> Tensor:
    """(batch_size, C) sum over the voxels of each sample, 0 for an empty one; in fp32 for half dtypes."""
    if isinstance(x, Voxels) and statistics_break(x.coord_set):
        return _global_outside(global_sum_pool, x)
    _check(x)
    return sample_sum(x.feats, x.coord_set).to(x.dtype)


def global_avg_pool(x: Voxels) -> Tensor:
    """(batch_size, C) mean over the voxels of each sample, 0 for an empty one; in fp32 for half dtypes."""
    if isinstance(x, Voxels) and statistics_break(x.coord_set):
        return _global_outside(global_avg_pool, x)
    _check(x)
    return sample_mean(x.feats, x.coord_set).to(x.dtype)


def global_max_pool(x: Voxels) -> Tensor:
    """(batch_size, C) largest feature of each sample; an empty sample gives 0 and no gradient.

    Equal values: the gradient goes to the one in the smallest row. A NaN in the sample wins.
    """
    if isinstance(x, Voxels) and statistics_break(x.coord_set):
        return _global_outside(global_max_pool, x)
    _check(x)
    if x.num_voxels == 0:
        return x.feats.new_zeros((x.batch_size, x.feats.shape[1])) + x.feats.sum(0)
    with torch.no_grad():
        winner = sample_argmax(x.feats, x.coord_set)
    return torch.where(winner >= 0, x.feats.gather(0, winner.clamp(min=0)), 0)
