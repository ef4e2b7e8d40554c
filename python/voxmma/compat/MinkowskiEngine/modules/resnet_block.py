"""Residual blocks, with the names of their parts as in checkpoints: conv1, norm1, ..., downsample."""

from __future__ import annotations

from typing import Any

from torch import nn

from voxmma.compat.MinkowskiEngine.MinkowskiConvolution import MinkowskiConvolution
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import MinkowskiReLU
from voxmma.compat.MinkowskiEngine.MinkowskiNormalization import MinkowskiBatchNorm


class _Block(nn.Module):
    expansion = 1
    kernels: tuple[int, ...]

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        bn_momentum: float = 0.1,
        dimension: int = -1,
    ) -> None:
        super().__init__()
        strided = self.kernels.index(3)  # the first convolution with neighbours
        channels = inplanes
        for i, size in enumerate(self.kernels):
            last = i == len(self.kernels) - 1
            made = planes * self.expansion if last else planes
            conv = MinkowskiConvolution(
                channels,
                made,
                kernel_size=size,
                stride=stride if i == strided else 1,
                dilation=dilation if size > 1 else 1,
                dimension=dimension,
            )
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"norm{i + 1}", MinkowskiBatchNorm(made, momentum=bn_momentum))
            channels = made
        self.relu = MinkowskiReLU(inplace=True)
        self.downsample = downsample

    def _before_sum(self, out: Any) -> Any:
        return out

    def forward(self, x: Any) -> Any:
        out = x
        for i in range(1, len(self.kernels) + 1):
            out = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(out))
            if i < len(self.kernels):
                out = self.relu(out)
        out = self._before_sum(out)
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class BasicBlock(_Block):
    """Two convolutions of kernel size 3, the first with the stride, and the input (or `downsample` of it)
    added."""

    kernels = (3, 3)


class Bottleneck(_Block):
    """Convolutions of kernel sizes 1, 3 (with the stride) and 1, the last to four times the channels."""

    expansion = 4
    kernels = (1, 3, 1)
