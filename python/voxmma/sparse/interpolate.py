"""Weighted sums of rows of features and their transpose, differentiable any number of times."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import pad

from voxmma._extension import _C
from voxmma._types import sum_dtype
from voxmma.sparse.index import gather_rows, kernels_take


def weighted(feats: Tensor, rows: Tensor, weights: Tensor, found: bool = False) -> Tensor:
    """(M, C) in the dtype of feats: y[i] = sum over k of weights[i, k] * feats[rows[i, k]] for feats (N, C).

    rows (M, K) integers, K up to 8, negative = none; weights (M, K) of any float dtype. Weights and sums are
    fp64 for fp64 features, else fp32, added up serially in k: CPU and GPU give the same bits. Differentiable
    in feats, deterministic. IndexError for rows from N on; on a GPU the device asserts, as torch's does.
    `found`: rows are a lookup's, of which none is.
    """
    _check(rows, None if found else len(feats))
    if len(feats) and kernels_take(feats):
        return Interpolate.apply(feats, *_corners(feats, rows, weights))
    table = feats if len(feats) else feats.new_zeros((1, feats.shape[1])) + feats.sum(0)
    # Rows without weight pick some row, each another one (equal ones would be added up one by one in the
    # backward pass), and its value is masked, not multiplied: it may be inf or nan.
    other = torch.arange(len(rows), device=feats.device) % len(table)
    out = torch.zeros((len(rows), feats.shape[1]), dtype=sum_dtype(feats.dtype), device=feats.device)
    for at, share in zip(rows.long().unbind(1), weights.to(out.dtype).unbind(1), strict=True):
        weight = torch.where(at >= 0, share, 0).unsqueeze(1)
        picked = gather_rows(table, torch.where(at >= 0, at, other)).to(out.dtype)
        out = out + torch.where(weight != 0, picked * weight, 0)
    return out.to(feats.dtype)


def spread_weighted(feats: Tensor, rows: Tensor, weights: Tensor, num: int, found: bool = False) -> Tensor:
    """The transpose of `weighted`: (num, C) sums of weights[i, k] * feats[i] at rows[i, k], for feats (M, C).

    Sums in row order in fp64 for fp64 features, else in fp32, rounded once. Differentiable in feats.
    IndexError as there, for rows from `num` on, and `found` as there.
    """
    _check(rows, None if found else num)
    if num and kernels_take(feats):
        return Spread.apply(feats, *_corners(feats, rows, weights), num)
    wide = sum_dtype(feats.dtype)
    total = torch.zeros((num + 1, feats.shape[1]), dtype=wide, device=feats.device)  # the last: none
    for at, share in zip(rows.long().unbind(1), weights.to(wide).unbind(1), strict=True):
        total = total.index_add(0, torch.where(at >= 0, at, num), feats.to(wide) * share.unsqueeze(1))
    return total[:num].to(feats.dtype)


def _check(rows: Tensor, num: int | None) -> None:
    if rows.dim() != 2 or not 1 <= rows.shape[1] <= 8:
        raise ValueError(f"rows must be (M, K) with K of 1 to 8, got {tuple(rows.shape)}")
    if num is None or torch.compiler.is_compiling():  # there torch's own functions will tell
        return
    inside = (rows < num).all()
    if rows.is_cuda:
        torch._assert_async(inside, f"rows must be less than {num}")
    elif not bool(inside):
        row = int(torch.nonzero((rows >= num).any(1))[0])
        raise IndexError(f"rows[{row}] is {rows[row].tolist()}, there are {num}")


def _corners(feats: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and weights as the kernels take them: one or eight a point, no row where there is no weight."""
    room = 0 if rows.shape[1] in (1, 8) else -rows.shape[1] % 8
    rows = pad(torch.where(weights != 0, rows, -1).int(), (0, room), value=-1)
    return rows.contiguous(), pad(weights.to(sum_dtype(feats.dtype)), (0, room)).contiguous()


class Interpolate(Function):
    """`weighted` on a GPU, without a look at its arguments.

    rows (M, K) int32, -1 = none; weights (M, K) in fp64 for fp64 features, else in fp32, as are the sums.
    """

    @staticmethod
    def forward(feats: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        return _C.gather_weighted(feats, rows, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        feats, rows, weights = inputs
        _save(ctx, rows, weights)
        ctx.num = len(feats)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        return Spread.apply(dy, rows, weights, ctx.num), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        rows, weights = ctx.saved_tensors
        return Interpolate.apply(tangent, rows, weights)


class Spread(Function):
    """The transpose, (num, C) from dy (M, C). Terms of a row are sorted and added up in a fixed order, and
    the sum is rounded once."""

    @staticmethod
    def forward(dy: Tensor, rows: Tensor, weights: Tensor, num: int) -> Tensor:
        keys, entries = torch.sort(rows.flatten(), stable=True)  # those of no row come first
        starts = torch.searchsorted(keys, torch.arange(num + 1, dtype=torch.int32, device=rows.device))
        return _C.scatter_weighted(dy, entries, starts, weights)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _save(ctx, *inputs[1:3])
        ctx.num = inputs[3]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None, None]:
        rows, weights = ctx.saved_tensors
        return Interpolate.apply(dx, rows, weights), None, None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        rows, weights = ctx.saved_tensors
        return Spread.apply(tangent, rows, weights, ctx.num)


def _save(ctx: Any, rows: Tensor, weights: Tensor) -> None:
    ctx.save_for_backward(rows, weights)
    ctx.save_for_forward(rows, weights)
