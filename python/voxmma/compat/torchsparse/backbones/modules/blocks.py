"""Blocks, with the names of their parts as in checkpoints."""

from __future__ import annotations

from typing import Any

from torch import nn

from voxmma.compat.torchsparse.nn.modules import BatchNorm, Conv3d, ReLU
from voxmma.compat.torchsparse.tensor import SparseTensor
from voxmma.compat.torchsparse.utils.utils import make_triple

__all__ = ["SparseConvBlock", "SparseConvTransposeBlock", "SparseResBlock"]


class SparseConvBlock(nn.Sequential):
    """Convolution, norm, ReLU: layers 0, 1 and 2."""

    TRANSPOSED = False

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: Any = 1
    ) -> None:
        conv = Conv3d(
            in_channels, out_channels, kernel_size, stride, dilation=dilation, transposed=self.TRANSPOSED
        )
        super().__init__(conv, BatchNorm(out_channels), ReLU(True))


class SparseConvTransposeBlock(SparseConvBlock):
    """SparseConvBlock with a transposed convolution."""

    TRANSPOSED = True


class SparseResBlock(nn.Module):
    """relu(main(x) + shortcut(x)): two convolutions with norms, the first with the stride; the shortcut is a
    1x1x1 convolution and a norm where channels or stride change."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, stride: Any = 1, dilation: Any = 1
    ) -> None:
        super().__init__()
        self.main = nn.Sequential(
            Conv3d(in_channels, out_channels, kernel_size, stride, dilation=dilation),
            BatchNorm(out_channels),
            ReLU(True),
            Conv3d(out_channels, out_channels, kernel_size, dilation=dilation),
            BatchNorm(out_channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if in_channels != out_channels or make_triple(stride) != (1, 1, 1):
            self.shortcut = nn.Sequential(
                Conv3d(in_channels, out_channels, 1, stride), BatchNorm(out_channels)
            )
        self.relu = ReLU(True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        made: SparseTensor = self.relu(self.main(x) + self.shortcut(x))
        return made
