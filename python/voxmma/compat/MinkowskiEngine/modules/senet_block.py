"""Squeeze-and-excitation blocks."""

from __future__ import annotations

from typing import Any

from torch import nn

from voxmma.compat.MinkowskiEngine.MinkowskiBroadcast import MinkowskiBroadcastMultiplication
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import MinkowskiReLU, MinkowskiSigmoid
from voxmma.compat.MinkowskiEngine.MinkowskiOps import MinkowskiLinear
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import MinkowskiGlobalPooling
from voxmma.compat.MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck


class SELayer(nn.Module):
    """Scales the channels of each sample by what two linear layers make of their mean."""

    def __init__(self, channel: int, reduction: int = 16, D: int = -1) -> None:
        super().__init__()
        self.fc = nn.Sequential(
            MinkowskiLinear(channel, channel // reduction),
            MinkowskiReLU(inplace=True),
            MinkowskiLinear(channel // reduction, channel),
            MinkowskiSigmoid(),
        )
        self.pooling = MinkowskiGlobalPooling()
        self.broadcast_mul = MinkowskiBroadcastMultiplication()

    def forward(self, x: Any) -> Any:
        return self.broadcast_mul(x, self.fc(self.pooling(x)))


class SEBasicBlock(BasicBlock):
    """BasicBlock with an SELayer before the input is added."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        reduction: int = 16,
        D: int = -1,
    ) -> None:
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes, reduction, D)

    def _before_sum(self, out: Any) -> Any:
        return self.se(out)


class SEBottleneck(Bottleneck):
    """Bottleneck with an SELayer before the input is added."""

    def __init__(
        self,
        inplanes: int,
        planes: int,
        stride: Any = 1,
        dilation: Any = 1,
        downsample: nn.Module | None = None,
        D: int = 3,
        reduction: int = 16,
    ) -> None:
        super().__init__(inplanes, planes, stride, dilation, downsample, dimension=D)
        self.se = SELayer(planes * self.expansion, reduction, D)

    def _before_sum(self, out: Any) -> Any:
        return self.se(out)
