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


def lifted(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tensor (N, C) as one of Voxels; see `lift`."""

    @functools.wraps(function)
    def on_voxels(x: Any, *args: Any, **kwargs: Any) -> Any:
        return lift(function, x, *args, **kwargs)

    return on_voxels


relu, gelu, silu, leaky_relu = lifted(F.relu), lifted(F.gelu), lifted(F.silu), lifted(F.leaky_relu)
sigmoid, tanh, dropout = lifted(torch.sigmoid), lifted(torch.tanh), lifted(F.dropout)
linear, layer_norm, rms_norm = lifted(F.linear), lifted(F.layer_norm), lifted(F.rms_norm)
