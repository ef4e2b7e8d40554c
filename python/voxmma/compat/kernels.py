"""Convolutions whose parameter is `kernel` (K, C_in, C_out), as MinkowskiEngine and torchsparse have them.

Their offsets run along the first column fastest, ours along the last. So coordinates are kept with the
columns turned round, (batch, z, y, x): then the kernel is used as it is stored.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from voxmma import compat
from voxmma.nn.modules.sparse_conv import SparseConv3d

Numbers = tuple[int, ...]


def turned(values: Numbers, fill: int = 1) -> tuple[int, int, int]:
    """One to three numbers, for x, y and z, as those of the columns inside: z, y, x."""
    z, y, x = (*[fill] * (3 - len(values)), *reversed(values))
    return z, y, x


def columns_inside(coords: torch.Tensor, stride: Numbers, name: str = "coordinates") -> torch.Tensor:
    """(N, 4) batch, z, y, x in cells of a grid from (N, 1 + D) batch, x, ... that are multiples of `stride`.

    ValueError names the first row that is none; this waits for a GPU unless all strides are 1.
    """
    space = coords[:, 1:]
    if any(s != 1 for s in stride):
        step = torch.tensor(stride, dtype=coords.dtype, device=coords.device)
        wrong = (space % step != 0).any(1)
        if bool(wrong.any()):
            row = int(torch.nonzero(wrong)[0])
            raise ValueError(
                f"{name} row {row}, {tuple(coords[row].tolist())}, is no multiple of tensor stride {stride}"
            )
        space = space.div(step, rounding_mode="floor")
    missing = 3 - space.shape[1]
    return torch.cat([coords[:, :1], space.new_zeros((len(space), missing)), space.flip(1)], dim=1)


def columns_outside(columns: torch.Tensor, stride: Numbers) -> torch.Tensor:
    """The opposite of `columns_inside`: (N, 1 + D) in units of tensor stride 1."""
    space = columns[:, 4 - len(stride) :].flip(1)
    if any(s != 1 for s in stride):
        space = space * torch.tensor(stride, dtype=space.dtype, device=space.device)
    return torch.cat([columns[:, :1], space], dim=1)


class KernelConv(SparseConv3d):
    """A voxmma.nn.SparseConv3d (policies, plans, explain and audit know it) with another's parameters.

    `kernel` is (K, C_in, C_out), or (C_in, C_out) where `flat`; the sizes of the arguments are for x, y, z,
    one to three. `interface` is the library whose precision (voxmma.compat.install) it starts with.
    """

    kernel: nn.Parameter

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Numbers,
        stride: Numbers,
        dilation: Numbers,
        *,
        interface: str,
        bias: bool,
        flat: bool,
        **options: Any,
    ) -> None:
        size, step, spread = turned(kernel_size), turned(stride), turned(dilation)
        super().__init__(in_channels, out_channels, size, step, dilation=spread, bias=bias, **options)
        self.config = replace(self.config, **compat.PRECISION[interface])
        weight = self._parameters.pop("weight")
        assert weight is not None
        self.kernel = nn.Parameter(weight.detach()[0] if flat else weight.detach())
        if "bias" in self._parameters:
            self._parameters["bias"] = self._parameters.pop("bias")  # behind the kernel, as there
        self.reset_parameters()

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The kernel as voxmma.nn's layers have it."""
        kernel = self.kernel
        return kernel if kernel.dim() == 3 else kernel.unsqueeze(0)

    def reset_parameters(self) -> None:
        """Draws kernel and bias anew, uniform in +-1 / sqrt(K * C), C the channels that a forward pass sums
        over, of the output where the layer is transposed."""
        if "kernel" not in self._parameters:
            return  # not made yet
        channels = self.out_channels if self.transposed else self.in_channels
        bound = 1.0 / math.sqrt(channels * (1 if self.kernel.dim() == 2 else len(self.kernel)))
        nn.init.uniform_(self.kernel, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)
