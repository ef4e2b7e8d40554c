"""Shapes and dtypes of the dispatcher ops, for torch.compile and torch.export."""

from __future__ import annotations

import torch
from torch import Tensor

from voxmma._types import sum_dtype
from voxmma.ops.cpu import winner_dtype


def _result(x: Tensor, weight: Tensor, n_out: int, transpose: bool, out_dtype: torch.dtype | None) -> Tensor:
    groups = weight.shape[1] if weight.dim() == 4 else 1
    channels = groups * (weight.shape[-2] if transpose else weight.shape[-1])
    return x.new_empty((n_out, channels), dtype=out_dtype or x.dtype)


@torch.library.register_fake("voxmma::conv")
def _conv_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    map_t: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    dgrad_tile: str,
    wgrad_tile: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    return _result(x, weight, n_out, transpose, out_dtype)


def _fused_fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    out_dtype: torch.dtype | None = None,
    **then: object,
) -> Tensor:
    return _result(x, weight, n_out, transpose, out_dtype)


def _fused_into_fake(*args: object, **kwargs: object) -> None:
    return None


def _pack_weight_fake(weight: Tensor, *args: object, **kwargs: object) -> Tensor:
    return weight.new_empty((torch.library.get_ctx().new_dynamic_size(),), dtype=torch.uint8)


torch.library.register_fake("voxmma::conv_fused", _fused_fake)
torch.library.register_fake("voxmma::conv_fused_into", _fused_into_fake)
torch.library.register_fake("voxmma::pack_weight", _pack_weight_fake)


@torch.library.register_fake("voxmma::norm_act")
def _norm_act_fake(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    activation: str,
    slope: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    n, channels = x.shape
    size = x.element_size()
    vector = 2 if size == 8 else 4
    rows = 32 // (vector * size)
    keeps = keep and residual is not None and activation in ("relu", "leaky_relu")
    passed = (n + rows - 1) // rows * ((channels + vector - 1) // vector) * ((vector * rows + 7) // 8)
    return (
        x.new_empty(x.shape),
        x.new_empty((4, channels), dtype=sum_dtype(x.dtype)),
        x.new_empty((passed if keeps else 0,), dtype=torch.uint8),
    )


@torch.library.register_fake("voxmma::norm_act_again")
def _norm_act_again_fake(
    x: Tensor, stats: Tensor, residual: Tensor | None, activation: str, slope: float
) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.register_fake("voxmma::norm_act_backward")
def _norm_act_backward_fake(
    dy: Tensor,
    x: Tensor,
    stats: Tensor,
    residual: Tensor | None,
    passed: Tensor | None,
    activation: str,
    slope: float,
    residual_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = stats.new_empty((x.shape[1],))
    added = x.new_empty(x.shape if residual_gradient else (0,))
    return x.new_empty(x.shape), numbers, torch.empty_like(numbers), added


@torch.library.register_fake("voxmma::conv_wgrad")
def _conv_wgrad_fake(
    x: Tensor,
    dy: Tensor,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    groups: int,
    symmetric: bool,
    accumulator: str,
    tile: str,
    dgrad_tile: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    c_in, c_out = x.shape[1] // groups, dy.shape[1] // groups
    shape = (kernel_volume, c_in, c_out) if groups == 1 else (kernel_volume, groups, c_in, c_out)
    return x.new_empty(shape, dtype=out_dtype or x.dtype)


@torch.library.register_fake("voxmma::pool_sum")
def _pool_sum_fake(
    x: Tensor,
    in_count: Tensor | None,
    out_count: Tensor | None,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    n_out: int,
    symmetric: bool,
    mirror: bool,
) -> Tensor:
    return x.new_empty((n_out, x.shape[1]))


@torch.library.register_fake("voxmma::pool_max")
def _pool_max_fake(
    x: Tensor,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    n_out: int,
    symmetric: bool,
    largest: bool,
    keep_winner: bool,
) -> tuple[Tensor, Tensor]:
    rows = n_out if keep_winner else 0
    winner = x.new_empty((rows, x.shape[1]), dtype=winner_dtype(kernel_volume))
    return x.new_empty((n_out, x.shape[1])), winner


@torch.library.register_fake("voxmma::pool_pick")
def _pool_pick_fake(
    x: Tensor, winner: Tensor, map: list[Tensor], map_t: list[Tensor], kernel_volume: int, symmetric: bool
) -> Tensor:
    return x.new_empty(winner.shape)


@torch.library.register_fake("voxmma::pool_put")
def _pool_put_fake(
    x: Tensor,
    winner: Tensor,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    n_out: int,
    symmetric: bool,
) -> Tensor:
    return x.new_empty((n_out, x.shape[1]))


@torch.library.register_fake("voxmma::neighbor_counts")
def _neighbor_counts_fake(map: list[Tensor], kernel_volume: int, n_out: int) -> Tensor:
    return map[0].new_empty((n_out,), dtype=torch.int32)


@torch.library.register_fake("voxmma::segment_sum")
def _segment_sum_fake(x: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    return x.new_empty((starts.shape[0], x.shape[1]), dtype=sum_dtype(x.dtype))


@torch.library.register_fake("voxmma::segment_argmax")
def _segment_argmax_fake(x: Tensor, candidates: Tensor | None, rows: Tensor, starts: Tensor) -> Tensor:
    return rows.new_empty((starts.shape[0], x.shape[1]))
