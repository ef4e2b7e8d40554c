"""Functions of the features."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["fapply"]


def fapply(input: SparseTensor, fn: Callable[..., torch.Tensor], *args: Any, **kwargs: Any) -> SparseTensor:
    """`fn` on the features (N, C), the coordinates shared."""
    owner = getattr(fn, "__self__", fn)
    name = type(owner).__name__ if isinstance(owner, torch.nn.Module) else getattr(fn, "__name__", "function")
    return input._like(fn(input.feats, *args, **kwargs), name)
