"""Convolution layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from voxmma.compat.kernels import KernelConv
from voxmma.compat.torchsparse import options
from voxmma.compat.torchsparse.nn.functional.conv import (
    effective_dilation,
    kernel_inside,
    run,
    shape_of,
)
from voxmma.compat.torchsparse.nn.functional.conv_config import rule
from voxmma.compat.torchsparse.tensor import SparseTensor
from voxmma.compat.torchsparse.utils.utils import make_triple

__all__ = ["Conv3d"]


class Conv3d(KernelConv):
    """`kernel` (K, C_in, C_out), or (C_in, C_out) of a kernel of one cell and stride 1; `bias` (C_out,) or
    None.

    See nn.functional.conv3d. `padding` counts in strided layers alone; along an axis of odd size and stride 1
    it is (kernel_size - 1) / 2. ValueError as there, and for a dilation as configured.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        bias: bool = False,
        transposed: bool = False,
        generative: bool = False,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        size, step, spread = make_triple(kernel_size), make_triple(stride), effective_dilation(dilation)
        flat = math.prod(size) == 1 and step == (1, 1, 1)
        super().__init__(
            in_channels,
            out_channels,
            size,
            step,
            spread,
            interface="torchsparse",
            bias=bias,
            flat=flat,
            transposed=transposed,
        )
        self._sizes = size, step, spread
        given = zip(size, step, make_triple(padding), strict=True)
        self._padding = make_triple([(k - 1) // 2 if k % 2 and s == 1 else p for k, s, p in given])
        self._config = config
        self._generative = generative
        self.kernel_volume = math.prod(size)

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The kernel as voxmma.nn's layers have it, for columns turned round."""
        return kernel_inside(self.kernel, self._sizes[0])

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        """(N, C_in) to (M, C_out)."""
        shape = shape_of(*self._sizes, self._padding, rule(self._config), options.version)
        kernel = kernel_inside(self.kernel, shape.size)
        return run(self.config, input, kernel, self.bias, shape, self._generative)

    def extra_repr(self) -> str:
        size, stride, dilation = self._sizes
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={size}"]
        for name, value, default in (
            ("stride", stride, (1, 1, 1)),
            ("dilation", dilation, (1, 1, 1)),
            ("bias", self.bias is not None, True),
            ("transposed", self.transposed, False),
        ):
            if value != default:
                parts.append(f"{name}={value}")
        return ", ".join(parts)
