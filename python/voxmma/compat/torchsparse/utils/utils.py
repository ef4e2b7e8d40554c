"""Numbers per axis."""

from __future__ import annotations

from typing import Any

import torch

from voxmma._types import Triple, integers

__all__ = ["make_divisible", "make_ntuple", "make_tensor"]


def make_ntuple(x: Any, ndim: int) -> tuple[int, ...]:
    """`ndim` integers from one or from as many; ValueError for anything else."""
    values = integers(x, ndim)
    if values is None:
        raise ValueError(f"expected an int or {ndim} of them, got {x!r}")
    return values


def make_triple(x: Any) -> Triple:
    """`make_ntuple` of three."""
    a, b, c = make_ntuple(x, 3)
    return a, b, c


def make_tensor(x: Any, dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.tensor(x, dtype=dtype, device=device)


def make_divisible(x: int, divisor: int) -> int:
    """The smallest multiple of `divisor` that is not below x."""
    return -(-x // divisor) * divisor
