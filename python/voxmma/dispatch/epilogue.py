"""What follows a convolution: batch norm, residual, activation; in its launch or node where it can be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import has_torch_function

from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES, sum_dtype
from voxmma.ops.cpu import ACTIVATIONS
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.tensor import Voxels

#: Dtypes of a norm's numbers beside rows of a dtype, as torch's batch norm takes them.
_TAKEN = {dtype: (dtype, sum_dtype(dtype)) for dtype in DTYPE_NAMES}


class Norm(NamedTuple):
    """A batch norm by running statistics: (C,) each, weight and bias may be None. With a momentum it is one
    in training: statistics are those of its rows, running ones (or None) and `batches` are updated."""

    mean: Tensor | None
    var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    name: str
    momentum: float | None = None
    batches: Tensor | None = None
    """one int64, incremented"""


_NO_NORM = Norm(None, None, None, None, 0.0, "")


def one_pass(x: Tensor, residual: Tensor | None, numbers: tuple[Tensor | None, ...]) -> bool:
    """Whether the kernels of norm_act take a call: a GPU, rows of one dtype, two or more, nobody who watches.
    numbers: weight, bias, running mean, running variance."""
    if not x.is_cuda or torch.compiler.is_compiling() or x.dtype not in _TAKEN or x.shape[0] < 2:
        return False
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return False
    return takes_numbers(numbers, x.dtype) and not has_torch_function((x, residual, *numbers))


def takes_numbers(numbers: tuple[Tensor | None, ...], dtype: torch.dtype) -> bool:
    """`one_pass`, of weight, bias, running mean and variance beside rows of `dtype`."""
    taken, (mean, var) = _TAKEN[dtype], numbers[2:]
    if (mean is None) != (var is None) or (mean is not None and var is not None and mean.dtype != var.dtype):
        return False
    for number in numbers:
        if number is not None and (number.dtype not in taken or not number.is_contiguous()):
            return False
    return True


class Activation(NamedTuple):
    """A key of voxmma.ops.cpu.ACTIVATIONS, the slope of 'leaky_relu', and what the record calls it."""

    kind: str
    slope: float
    name: str


class Epilogue(NamedTuple):
    """`activation(norm(y) + residual)` of a convolution's result y; each may be missing."""

    norm: Norm | None = None
    residual: Voxels | None = None
    activation: Activation | None = None
    residual_first: bool = False
    """Whether the sum is residual + y, whose coordinates and row order are the residual's."""
    otherwise: Callable[[Voxels], Voxels] | None = None
    """The layers one by one; a norm in training and `beside` need it."""
    beside: tuple[Voxels, ...] = ()
    """What the result is concatenated with: it is written into its columns of the wider tensor. Not in
    training."""

    def trains(self) -> bool:
        """Whether the norm takes the statistics of its rows."""
        return self.norm is not None and self.norm.momentum is not None

    def fits(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        out: CoordSet,
        channels: int,
    ) -> bool:
        """Whether one call does what the layers would, with `channels` in the result: dtypes are those that
        torch's batch norm takes, the residual lies on the very coordinates of the result, and no gradient is
        asked for, but of a norm in training, which needs two rows and a GPU."""
        norm, trains = self.norm, self.trains()
        if norm is not None and trains:
            if not x.is_cuda or out.num < 2 or not takes_numbers((*norm[2:4], *norm[:2]), dtype):
                return False
        elif norm is not None:
            taken = _TAKEN[dtype]
            for number in norm[:4]:
                if number is not None and number.dtype not in taken:
                    return False
        residual, others = self.residual, self.beside
        if residual is not None:
            rows = residual._feats
            if residual._coord_set is not out or rows.dtype != dtype or rows.shape[1] != channels:
                return False
        for other in others:
            if other._coord_set is not out or other._feats.dtype != dtype:
                return False
        if not trains and not torch.is_grad_enabled():
            return True
        numbers = () if norm is None else norm[:4]
        others = others if residual is None else (residual, *others)
        operands = [x, weight, bias, *numbers, *(other._feats for other in others)]
        if trains:
            return not has_torch_function(operands)
        return not any(t is not None and t.requires_grad for t in operands)

    def run(self, prepared: _C.PreparedConv, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution and this."""
        kind, slope, _ = self.activation or ("none", 0.0, "")
        rows = None if self.residual is None else self.residual._feats
        mean, var, scale, shift, eps, _, momentum, batches = self.norm or _NO_NORM
        if momentum is not None:
            numbers = scale, shift, mean, var, batches, momentum, eps
            return prepared.trained(x, weight, bias, *numbers, rows, kind, slope)
        if not self.beside:
            return prepared.fused(x, weight, bias, scale, shift, mean, var, eps, rows, kind, slope)
        end = channels = weight.shape[-1] * (weight.shape[1] if weight.dim() == 4 else 1)
        first = self.beside[0]._feats
        y = first.new_empty((first.shape[0], channels + sum(v._feats.shape[1] for v in self.beside)))
        prepared.fused_into(x, weight, bias, scale, shift, mean, var, eps, rows, kind, slope, y[:, :channels])
        for other in self.beside:
            y[:, end : end + other._feats.shape[1]] = other._feats
            end += other._feats.shape[1]
        return y

    def names(self) -> tuple[str, ...]:
        """What `explain` lists where one call did it."""
        norm, act = self.norm, self.activation
        return _fused(
            None if norm is None else norm.name,
            None if self.residual is None else "+ residual",
            None if act is None else act.name,
            "cat" if self.beside else None,
        )

    def apply(self, y: Voxels) -> Voxels:
        """The same on its own, rounding after each step, as the layers do."""
        if self.otherwise is not None:
            return self.otherwise(y)
        if self.norm is not None:
            mean, var, weight, bias, eps, name, *_ = self.norm
            y = y._after(F.batch_norm(y._feats, mean, var, weight, bias, False, 0.0, eps), name)
        if self.residual is not None:
            y = self.residual + y if self.residual_first else y + self.residual
        if self.activation is not None:
            kind, slope, name = self.activation
            y = y._after(ACTIVATIONS[kind](y._feats, slope), name)
        return y


@functools.lru_cache(maxsize=256)
def _fused(*names: str | None) -> tuple[str, ...]:
    return tuple([f"{name} (fused)" for name in names if name is not None])
