"""What follows a convolution: batch norm of evaluation, residual, activation; in its launch if it can be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from voxmma.ops.cpu import ACTIVATIONS
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.tensor import Voxels

_HALVES = (torch.float16, torch.bfloat16)


class Norm(NamedTuple):
    """A batch norm by running statistics: (C,) each, weight and bias may be None."""

    mean: Tensor
    var: Tensor
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    name: str


class Activation(NamedTuple):
    """A key of voxmma.ops.cpu.ACTIVATIONS, the slope of 'leaky_relu', and what the record calls it."""

    kind: str
    slope: float
    name: str


@dataclass(frozen=True, slots=True)
class Epilogue:
    """`activation(norm(y) + residual)` of a convolution's result y; each may be missing."""

    norm: Norm | None = None
    residual: Voxels | None = None
    activation: Activation | None = None
    residual_first: bool = False
    """Whether the sum is residual + y, whose coordinates and row order are the residual's."""

    def fits(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        dtype: torch.dtype,
        out: CoordSet,
    ) -> bool:
        """Whether one launch does what the layers would: no gradient is asked for, dtypes are those that
        torch's batch norm takes, the residual lies on the very coordinates of the result."""
        channels = weight.shape[-1] * (weight.shape[1] if weight.dim() == 4 else 1)
        operands = [x, weight, bias]
        if self.norm is not None:
            taken = (dtype, torch.float32) if dtype in _HALVES else (dtype,)
            if any(tensor is not None and tensor.dtype not in taken for tensor in self.norm[:4]):
                return False
            operands += self.norm[:4]
        if self.residual is not None:
            rows = self.residual._feats
            if self.residual._coord_set is not out or rows.dtype != dtype or rows.shape[1] != channels:
                return False
            operands.append(rows)
        if torch.is_grad_enabled():
            return not any(t is not None and t.requires_grad for t in operands)
        return True

    def operands(self) -> dict[str, Any]:
        """Arguments of torch.ops.voxmma.conv_fused."""
        mean, var, scale, shift, eps, _ = self.norm or (None, None, None, None, 0.0, "")
        kind, slope, _ = self.activation or ("none", 0.0, "")
        rows = None if self.residual is None else self.residual._feats
        return {
            "scale": scale, "shift": shift, "mean": mean, "var": var, "eps": eps, "residual": rows,
            "activation": kind, "slope": slope,
        }  # fmt: skip

    def run(self, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution and this, by `PreparedConv.fused`."""
        mean, var, scale, shift, eps, _ = self.norm or (None, None, None, None, 0.0, "")
        kind, slope, _ = self.activation or ("none", 0.0, "")
        rows = None if self.residual is None else self.residual._feats
        return op(x, weight, bias, scale, shift, mean, var, eps, rows, kind, slope)

    def names(self) -> tuple[str, ...]:
        """What `explain` lists where one launch did it."""
        found = [self.norm.name] if self.norm is not None else []
        if self.residual is not None:
            found.append("+ residual")
        if self.activation is not None:
            found.append(self.activation.name)
        return tuple(f"{name} (fused)" for name in found)

    def apply(self, y: Voxels) -> Voxels:
        """The same on its own, rounding after each step, as the layers do."""
        if self.norm is not None:
            mean, var, weight, bias, eps, name = self.norm
            y = y._after(F.batch_norm(y._feats, mean, var, weight, bias, False, 0.0, eps), name)
        if self.residual is not None:
            y = self.residual + y if self.residual_first else y + self.residual
        if self.activation is not None:
            kind, slope, name = self.activation
            y = y._after(ACTIVATIONS[kind](y._feats, slope), name)
        return y
