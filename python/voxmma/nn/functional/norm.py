"""Normalisation, activations and other functions of the features, and sums and concatenations of Voxels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from voxmma._types import positive
from voxmma.coordops import lookup, union
from voxmma.segments import sample_mean, spread, statistics_break
from voxmma.voxels import Voxels

# ---- any function of the features --------------------------------------------------------------------------


def lift(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """`function` on the features (N, C) of a Voxels, the coordinates shared; on anything else `function`
    alone.

    `function` returns (N, C') features of a float dtype; ValueError when it changes the number of rows.
    """
    if isinstance(x, Voxels):
        return x.with_feats(function(x.feats, *args, **kwargs))
    return function(x, *args, **kwargs)


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor (N, C) as one of Voxels; see `lift`."""

    @functools.wraps(function)
    def on_voxels(x: Any, *args: Any, **kwargs: Any) -> Any:
        return lift(function, x, *args, **kwargs)

    return on_voxels


relu, gelu, silu, leaky_relu = lifted(F.relu), lifted(F.gelu), lifted(F.silu), lifted(F.leaky_relu)
sigmoid, tanh, dropout = lifted(torch.sigmoid), lifted(torch.tanh), lifted(F.dropout)
linear, layer_norm, rms_norm = lifted(F.linear), lifted(F.layer_norm), lifted(F.rms_norm)

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

    return lift(normalise, x)


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
    from torch.distributed.nn.functional import all_reduce

    def normalise(feats: torch.Tensor) -> torch.Tensor:
        values = _wide(feats)
        rows = values.new_full((1,), feats.shape[0])
        total = all_reduce(torch.cat([values.sum(0), rows]), group=group)
        count = total[-1].detach()
        mean = total[:-1] / count.clamp(min=1)
        centred = values - mean
        squares = all_reduce(centred.square().sum(0), group=group)
        var = squares / count.clamp(min=1)
        if running_mean is not None and running_var is not None:
            with torch.no_grad():
                rate = (count > 1).to(count.dtype) * momentum
                unbiased = squares.detach() / (count - 1).clamp(min=1)
                for running, now in ((running_mean, mean.detach()), (running_var, unbiased)):
                    running.lerp_(now.to(running.dtype), rate.to(running.dtype))
        return _affine(centred * torch.rsqrt(var + eps), weight, bias).to(feats.dtype)

    return lift(normalise, x)


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
    values = _wide(x.feats)

    def group_mean(v: torch.Tensor) -> torch.Tensor:
        mean = sample_mean(v, coords).unflatten(1, (num_groups, -1)).mean(2, keepdim=True)
        return mean.expand(-1, -1, channels // num_groups).flatten(1)

    centred = values - spread(group_mean(values), coords)
    scale = torch.rsqrt(group_mean(centred.square()) + eps)
    return x.with_feats(_affine(centred * spread(scale, coords), weight, bias).to(x.dtype))


_group_norm_outside = torch.compiler.disable(group_norm)


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


def _wide(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.float64 else values.float()


def _affine(values: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        values = values * weight.to(values.dtype)
    return values if bias is None else values + bias.to(values.dtype)


# ---- several Voxels ----------------------------------------------------------------------------------------


def cat(*voxels: Voxels) -> Voxels:
    """The channels of all `voxels`, (N, C1 + C2 + ...), in the row order of the first.

    Coordinates must be equal: the same set, or the same voxels in whatever order (see Voxels.align), never
    just as many. ValueError names what differs. `Voxels.cat` is the concatenation of samples.
    """
    first = _first(voxels)
    return first.with_feats(torch.cat([first.align(v, "concatenate") for v in voxels], dim=1))


def add(*voxels: Voxels) -> Voxels:
    """The sum of the features of voxels on equal coordinates, as `+`."""
    total = _first(voxels)
    for other in voxels[1:]:
        total = total + other
    return total


def add_union(*voxels: Voxels) -> Voxels:
    """The sum of the features (N_i, C) on the union of the coordinates, absent voxels counting 0.

    The union is sorted by (batch, x, y, z); voxels that all share one coordinate set keep it, and its order.
    ValueError names the argument whose device, batch size, stride or channels differ from the first.
    """
    first = _first(voxels)
    for i, v in enumerate(voxels):
        for name, mine, other in (
            ("stride", v.stride, first.stride),
            ("channels", v.feats.shape[1], first.feats.shape[1]),
        ):
            if mine != other:
                raise ValueError(f"voxels[{i}] has {name} {mine}, voxels[0] has {other}")
    coords = union(*voxels)
    if all(v.coord_set is coords for v in voxels):
        return add(*voxels)
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in voxels))
    total = torch.zeros((coords.num, first.feats.shape[1]), dtype=dtype, device=first.device)
    for v in voxels:  # rows of one addition are distinct: no order is left to chance
        total = total.index_add(0, lookup(coords, v.coords), v.feats.to(dtype))
    return Voxels(coords, total, stride=first.stride)


def _first(voxels: tuple[Voxels, ...]) -> Voxels:
    if not voxels:
        raise ValueError("voxels must be at least one Voxels")
    for i, v in enumerate(voxels):
        if not isinstance(v, Voxels):
            raise TypeError(f"voxels[{i}] must be a voxmma.Voxels, got {type(v).__name__}")
    return voxels[0]


# ---- memory ------------------------------------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint for functions of Voxels: recomputes `function(*args)` in backward.

    Without `use_reentrant`, torch's own function takes Voxels as well. With it, torch only sees gradients of
    plain tensors among the arguments and results; this one hands it the features of every Voxels in `args`
    and in the result (nested at will), and coordinates and their maps stay shared. kwargs go to torch.
    """
    leaves, spec = pytree.tree_flatten(args)
    moving = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    result: list[Any] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for i, tensor in zip(moving, tensors, strict=True):
            filled[i] = tensor
        out, out_spec = pytree.tree_flatten(function(*pytree.tree_unflatten(filled, spec)))
        if not result:
            result.extend(([None if _is_float(leaf) else leaf for leaf in out], out_spec))
        return tuple(leaf for leaf in out if _is_float(leaf))

    inputs = [leaves[i] for i in moving]
    tensors = iter(_torch_checkpoint(run, *inputs, use_reentrant=use_reentrant, **kwargs))
    kept, out_spec = result
    return pytree.tree_unflatten([next(tensors) if leaf is None else leaf for leaf in kept], out_spec)


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
