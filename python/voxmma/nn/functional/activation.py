"""Functions of every voxel by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from voxmma.sparse.tensor import Voxels

# ---- any function of the features --------------------------------------------------------------------------


def lift(function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """`function` on the features (N, C) of a Voxels, the coordinates shared; on anything else `function`
    alone.

    `function` returns (N, C') features of a float dtype; ValueError when it changes the number of rows.
    """
    if isinstance(x, Voxels):
        return x.with_feats(function(x.feats, *args, **kwargs))
    return function(x, *args, **kwargs)


def follow(name: str, function: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """`lift` of a norm or an activation: the record of the convolution that made x comes along, with
    `name`."""
    y = lift(function, x, *args, **kwargs)
    return x._after(y.feats, name) if isinstance(x, Voxels) else y


#: Where torch keeps the layers that `follow` is for.
_FOLLOWED = tuple(
    f"torch.nn.modules.{name}" for name in ("activation", "batchnorm", "normalization", "dropout")
)


def apply_module(module: torch.nn.Module, x: Any) -> Any:
    """A module of a tensor (N, C), on Voxels: `follow` for torch's norms and activations, else `lift`."""
    if type(module).__module__ in _FOLLOWED:
        return follow(type(module).__name__, module, x)
    return lift(module, x)


def lifted(function: Callable[..., Any], followed: bool = True) -> Callable[..., Any]:
    """A function of a tensor (N, C) as one of Voxels; see `lift` and `follow`."""
    name = function.__name__

    @functools.wraps(function)
    def on_voxels(x: Any, *args: Any, **kwargs: Any) -> Any:
        if followed:
            return follow(name, function, x, *args, **kwargs)
        return lift(function, x, *args, **kwargs)

    return on_voxels


relu, gelu, silu, leaky_relu = lifted(F.relu), lifted(F.gelu), lifted(F.silu), lifted(F.leaky_relu)
sigmoid, tanh, dropout = lifted(torch.sigmoid), lifted(torch.tanh), lifted(F.dropout)
layer_norm, rms_norm = lifted(F.layer_norm), lifted(F.rms_norm)
linear = lifted(F.linear, followed=False)
