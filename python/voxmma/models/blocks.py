"""What all networks of voxmma.models are made of: convolution + norm + activation, and the residual block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import voxmma.nn as vnn
from voxmma.nn.modules.container import residual
from voxmma.sparse.tensor import Voxels

Layer = Callable[[int], nn.Module]
"""makes a layer for C channels, as `vnn.BatchNorm` does"""


def conv_norm(
    c_in: int,
    c_out: int,
    kernel_size: int | tuple[int, int, int],
    stride: int | tuple[int, int, int] = 1,
    *,
    norm: Layer = vnn.BatchNorm,
    act: Callable[[], nn.Module] = vnn.ReLU,
    conv: type[vnn.SparseConv3d] = vnn.SparseConv3d,
    **options: Any,
) -> vnn.Sequential:
    """Convolution without bias, norm and activation: layers 0, 1 and 2. (N, c_in) -> (M, c_out).

    M = N at stride 1 (submanifold). `options` go to the convolution, whose class `conv` is.
    """
    layer = conv(c_in, c_out, kernel_size, stride=stride, bias=False, **options)
    return vnn.Sequential(layer, norm(c_out), act())


class ResidualBlock(nn.Module):
    """ReLU(body(x) + shortcut(x)) on the voxels of x, (N, c_in) -> (N, c_out).

    body: 3x3x3 convolution, norm, ReLU, 3x3x3 convolution, norm. shortcut: x itself, or where channels change
    a 1x1x1 convolution and a norm.

    Args:
        kernel_size: of the body's convolutions. norm: makes a norm for C channels.
    """

    fuses_itself = True  # by `residual`

    def __init__(
        self,
        c_in: int,
        c_out: int,
        kernel_size: int | tuple[int, int, int] = 3,
        *,
        norm: Layer = vnn.BatchNorm,
    ) -> None:
        super().__init__()
        self.body = vnn.Sequential(
            *conv_norm(c_in, c_out, kernel_size, norm=norm),
            vnn.SparseConv3d(c_out, c_out, kernel_size, bias=False),
            norm(c_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if c_in != c_out:
            self.shortcut = vnn.Sequential(vnn.SparseConv3d(c_in, c_out, 1, bias=False), norm(c_out))
        self.relu = vnn.ReLU()

    def forward(self, x: Voxels) -> Voxels:
        y: Voxels = residual(self.body, x, self.shortcut(x), self.relu)
        return y


def residual_stage(c_in: int, c_out: int, blocks: int, *, norm: Layer = vnn.BatchNorm) -> vnn.Sequential:
    """`blocks` residual blocks, the first of which goes from c_in to c_out channels."""
    return vnn.Sequential(*(ResidualBlock(c_out if i else c_in, c_out, norm=norm) for i in range(blocks)))
