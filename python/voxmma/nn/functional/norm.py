"""Normalisation, activations and other functions of the features, and sums and concatenations of Voxels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from voxmma._dynamo import eager
from voxmma._types import positive, sum_dtype
from voxmma.dispatch.epilogue import one_pass
from voxmma.nn.functional.activation import follow
from voxmma.ops.cpu import ACTIVATIONS
from voxmma.sparse.segments import sample_mean, spread, statistics_break
from voxmma.sparse.tensor import Voxels

# ---- statistics over all voxels ----------------------------------------------------------------------------


def batch_norm(
    x: Any,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """torch.nn.functional.batch_norm of the features over all voxels of all samples, (N, C) -> (N, C).

    Fewer than two voxels have no statistics: they are normalised by the running ones, which stay as they
    are; where there are none (both None), the deviation from the mean is 0 and the result is the bias.
    """

    def normalise(feats: torch.Tensor) -> torch.Tensor:
        mean, var, own = running_mean, running_var, training or running_mean is None
        if own and feats.shape[0] < 2:
            if mean is None or var is None:
                feats, mean = feats - feats, feats.new_zeros(feats.shape[1])
                var = torch.ones_like(mean)
            own = False
        return F.batch_norm(feats, mean, var, weight, bias, own, momentum, eps)

    return follow("batch_norm", normalise, x)


def norm_act(
    x: Any,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    residual: Any = None,
    activation: str = "none",
    slope: float = 0.01,
) -> Any:
    """`activation(batch_norm(x, training=True) + residual)`, (N, C) -> (N, C), on Voxels or a tensor.

    activation: 'none', 'relu', 'leaky_relu' with its slope, 'silu' or 'gelu' (erf). residual: as x, on the
    coordinate set of x. On a GPU one pass makes the statistics, one the result, and two the gradient (docs/
    precision.md); sums of the rows are made in a fixed order. x and the statistics are kept for the gradient,
    with a residual also a bit a cell (relu, leaky_relu) or the residual (silu, gelu); without one, a
    convolution of the result keeps these instead of it. Else, and under torch.compile, torch's functions one
    after another.

    ValueError for another activation, or a residual on other coordinates.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    voxels = isinstance(x, Voxels)
    rows = x.feats if voxels else x
    added = residual.feats if isinstance(residual, Voxels) else residual
    if voxels and isinstance(residual, Voxels) and residual.coord_set is not x.coord_set:
        raise ValueError("residual must be on the coordinate set of x: x.with_feats(x.align(residual))")
    numbers = (weight, bias, running_mean, running_var)
    if one_pass(rows, added, numbers):
        y, _, _ = torch.ops.voxmma.norm_act(rows, *numbers, None, momentum, eps, added, activation, slope)
    else:
        y = batch_norm(rows, running_mean, running_var, weight, bias, True, momentum, eps)
        y = ACTIVATIONS[activation](y if added is None else y + added, slope)
    if not voxels:
        return y
    return x._after(y, f"norm_act({activation})") if added is None else x.with_feats(y)


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks of a group, on every rank; so is its gradient. torch's own differentiable
    all_reduce is another one in every other version."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.group), None


def sync_batch_norm(
    x: Any,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """`batch_norm` in training, with the statistics of the voxels of all ranks of `group`.

    Any backend and device; two sums over the ranks forward and two backward, which every rank must take part
    in, also one without voxels. Statistics in fp32 (fp64 for fp64). Running statistics (or None) are updated
    in place when the ranks hold two voxels or more together.
    """

    def normalise(feats: torch.Tensor) -> torch.Tensor:
        values = feats.to(sum_dtype(feats.dtype))
        rows = values.new_full((1,), feats.shape[0])
        total = _SumOverRanks.apply(torch.cat([values.sum(0), rows]), group)
        count = total[-1].detach()
        mean = total[:-1] / count.clamp(min=1)
        centred = values - mean
        squares = _SumOverRanks.apply(centred.square().sum(0), group)
        var = squares / count.clamp(min=1)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                rate = (count > 1).to(count.dtype) * momentum
                unbiased = squares.detach() / (count - 1).clamp(min=1)
                for running, now in ((running_mean, mean.detach()), (running_var, unbiased)):
                    running.lerp_(now.to(running.dtype), rate.to(running.dtype))
        return _affine(centred * torch.rsqrt(var + eps), weight, bias).to(feats.dtype)

    return follow("sync_batch_norm", normalise, x)


# ---- statistics per sample ---------------------------------------------------------------------------------


def group_norm(
    x: Voxels,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Voxels:
    """Group normalisation with mean and (biased) variance over the voxels of each sample, group by group.

    (N, C) -> (N, C) in the dtype of x; statistics in fp32 (fp64 for fp64). A sample of one voxel with one
    channel a group has variance 0: its result is the bias. Empty samples have no rows and change nothing.
    weight, bias: (C,) or None. Deterministic; no host synchronisation once the coordinate set was used.
    TypeError unless x is a Voxels, ValueError unless C is divisible by num_groups.
    """
    if not isinstance(x, Voxels):
        raise TypeError(f"x must be a voxmma.Voxels, statistics are per sample; got {type(x).__name__}")
    coords = x.coord_set
    if statistics_break(coords):
        return _group_norm_outside(x, num_groups, weight, bias, eps)
    channels = x.feats.shape[1]
    num_groups = positive(num_groups, "num_groups")
    if channels % num_groups:
        raise ValueError(f"num_groups={num_groups} does not divide the {channels} channels of x")
    values = x.feats.to(sum_dtype(x.dtype))

    def group_mean(v: torch.Tensor) -> torch.Tensor:
        mean = sample_mean(v, coords).unflatten(1, (num_groups, -1)).mean(2, keepdim=True)
        return mean.expand(-1, -1, channels // num_groups).flatten(1)

    centred = values - spread(group_mean(values), coords)
    scale = torch.rsqrt(group_mean(centred.square()) + eps)
    feats = _affine(centred * spread(scale, coords), weight, bias).to(x.dtype)
    return x._after(feats, f"group_norm({num_groups})")


_group_norm_outside = eager(group_norm)


def instance_norm(
    x: Voxels,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> Voxels:
    """`group_norm` with one channel a group: mean and variance of each sample and channel."""
    if not isinstance(x, Voxels):
        raise TypeError(f"x must be a voxmma.Voxels, statistics are per sample; got {type(x).__name__}")
    return group_norm(x, max(x.feats.shape[1], 1), weight, bias, eps)


def _affine(values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        values = values * weight.to(values.dtype)
    return values if bias is None else values + bias.to(values.dtype)
