"""Weighted sums of rows of features and their transpose, differentiable any number of times. GPU only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from voxmma._extension import _C


class Interpolate(Function):
    """(M, C): y[i] = sum over k of weights[i, k] * feats[rows[i, k]] for feats (N, C), serially in k.

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
