"""A residual encoder for LiDAR scans."""

from __future__ import annotations

from typing import Any

from torch import nn

import voxmma.nn as vnn
from voxmma.models.blocks import ResidualBlock, conv_norm
from voxmma.sparse.tensor import Voxels

Size = int | tuple[int, int, int]


class ResNet21D(nn.Module):
    """Voxels (N, in_channels) -> Voxels of every stage: 16, 32, 64, 128 channels at strides 1, 2, 4, 8, and
    128 after a convolution along the second column alone, kernel size (1, 3, 1), stride (1, 2, 1).

    The shape of torchsparse's SparseResNet21D. Each stage is a convolution, strided from the second on, and
    two residual blocks; the last has none.

    Args:
        in_channels: of the input.
        width: factor of all channels.
        padding: of the strided convolutions, 0 as in torchsparse 2.1, which besides drops outputs beyond the
            largest coordinate of its input; voxmma's grid has no border.
    """

    #: Output channels, kernel size and stride of a stage's convolution, and residual blocks after it.
    STAGES: tuple[tuple[int, Size, Size, int], ...] = (
        (16, 3, 1, 2),
        (32, 3, 2, 2),
        (64, 3, 2, 2),
        (128, 3, 2, 2),
        (128, (1, 3, 1), (1, 2, 1), 0),
    )

    def __init__(self, in_channels: int = 4, *, width: float = 1.0, padding: Size = 0) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        c_in = in_channels
        for channels, kernel_size, stride, blocks in self.STAGES:
            c_out = int(channels * width)
            options: dict[str, Any] = {} if stride == 1 else {"padding": padding}
            first = conv_norm(c_in, c_out, kernel_size, stride, **options)
            self.stages.append(vnn.Sequential(first, *(ResidualBlock(c_out, c_out) for _ in range(blocks))))
            c_in = c_out

    def forward(self, x: Voxels) -> list[Voxels]:
        made = []
        for stage in self.stages:
            x = stage(x)
            made.append(x)
        return made
