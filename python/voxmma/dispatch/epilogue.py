"""What follows a convolution: batch norm, residual, activation; in its launch or node where it can be."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES, sum_dtype
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
_NO_ACTIVATION = "none", 0.0, ""


def one_pass(x: Tensor, residual: Tensor | None, numbers: tuple[Tensor | None, ...]) -> bool:
    """Whether the kernels of norm_act take a call: a GPU, rows of one dtype, two or more, nobody who watches.
    numbers: weight, bias, running mean, running variance."""
    if not x.is_cuda or torch.compiler.is_compiling() or x.dtype not in _TAKEN or x.shape[0] < 2:
        return False
    if residual is not None and (residual.dtype != x.dtype or residual.shape != x.shape):
        return False
    taken, (mean, var) = _TAKEN[x.dtype], numbers[2:]
    if (mean is None) != (var is None) or (mean is not None and var is not None and mean.dtype != var.dtype):
        return False
    for number in numbers:
        if number is not None and (number.dtype not in taken or not number.is_contiguous()):
            return False
    return not has_torch_function((x, residual, *numbers))


class Activation(NamedTuple):
    """A name in voxmma.ops.cpu.ACTIVATIONS, the slope of 'leaky_relu', and what the record calls it."""

    kind: str
    slope: float
    name: str


class Epilogue(NamedTuple):
    """`activation(norm(y) + residual)` of a convolution's result y; each may be missing. Who asks for it runs
    the layers one by one where the result says that nothing of it was done (`Voxels._applied` is empty)."""

    norm: Norm | None = None
    residual: Voxels | None = None
    activation: Activation | None = None
    beside: tuple[Voxels, ...] = ()
    """What the result is concatenated with: it is written into its columns of the wider tensor. Not in
    training."""

    def trains(self) -> bool:
        """Whether the norm takes the statistics of its rows."""
        return self.norm is not None and self.norm.momentum is not None

    def run(
        self,
        prepared: _C.PreparedConv,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        out: CoordSet,
        channels: int,
    ) -> Tensor | None:
        """The convolution and this in one call, to `channels` of `dtype` on `out`; None where it would not do
        what the layers do: dtypes are those that torch's batch norm takes, the residual lies on the very
        coordinates of the result, and no gradient is asked for, but of a norm in training, which needs two
        rows and a GPU."""
        norm, residual = self.norm, self.residual
        kind, slope, _ = self.activation or _NO_ACTIVATION
        rows = None if residual is None else residual._feats
        if residual is not None and residual._coord_set is not out:
            return None
        mean, var, scale, shift, eps, _, momentum, batches = norm or _NO_NORM
        if momentum is not None:
            if has_torch_function((x, weight, bias, rows, mean, var, scale, shift)):
                return None
            numbers = scale, shift, mean, var, batches, momentum, eps
            return prepared.trained(x, weight, bias, *numbers, rows, kind, slope)
        taken = _TAKEN[dtype]
        for number in (mean, var, scale, shift):
            if number is not None and number.dtype not in taken:
                return None
        if rows is not None and (rows.dtype != dtype or rows.shape[1] != channels):
            return None
        for other in self.beside:
            if other._coord_set is not out or other._feats.dtype != dtype:
                return None
        if torch.is_grad_enabled():
            others = [other._feats for other in self.beside]
            operands = (x, weight, bias, rows, mean, var, scale, shift, *others)
            if any(t is not None and t.requires_grad for t in operands):
                return None
        if not self.beside:
            return prepared.fused(x, weight, bias, scale, shift, mean, var, eps, rows, kind, slope)
        first, end = self.beside[0]._feats, channels
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


@functools.lru_cache(maxsize=256)
def _fused(*names: str | None) -> tuple[str, ...]:
    return tuple([f"{name} (fused)" for name in names if name is not None])
