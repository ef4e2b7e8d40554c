"""The sparse encoder of SECOND and of the LiDAR detectors after it."""

from __future__ import annotations

from functools import partial

from torch import nn

import voxmma.nn as vnn
from voxmma.models.blocks import conv_norm
from voxmma.sparse.tensor import Voxels


class SECONDBackbone(nn.Module):
    """Voxels (N, in_channels) -> five Voxels: 16, 32, 64, 64 channels at strides 1, 2, 4, 8, and the result,
    128 channels, whose first column has stride 16.

    The shape of OpenPCDet's VoxelBackBone8x. The columns of the input are (batch, z, y, x), as OpenPCDet
    hands them over: the last convolution, 3 x 1 x 1 with stride (2, 1, 1), and the padding of the third
    strided one, (0, 1, 1), treat the first column as the height.

    Bounds: spconv drops what its strided layers would make outside of the grid, of an axis of n cells all but
    cells 0 to (n + 2 * padding - kernel_size) // stride; voxmma's grid has no border and keeps them. The
    result may therefore have cells at the rim that upstream's does not have, negative ones included, and
    values next to them differ. A scene that stays 16 cells away from the border agrees; one that touches it,
    as the height of OpenPCDet's grids does, need not. `dense()` of the result wants an `origin` and a
    `spatial_shape` that hold these cells.

    Args:
        in_channels: of the input, mostly x, y, z and intensity.
        last_padding: of the last convolution, for its three columns (OpenPCDet's `last_pad`).
    """

    def __init__(self, in_channels: int = 4, *, last_padding: int | tuple[int, int, int] = 0) -> None:
        super().__init__()
        make = partial(conv_norm, norm=partial(vnn.BatchNorm, eps=1e-3, momentum=0.01))
        self.stem = make(in_channels, 16, 3)
        self.levels = nn.ModuleList([vnn.Sequential(make(16, 16, 3))])
        for c_in, c_out, padding in ((16, 32, (1, 1, 1)), (32, 64, (1, 1, 1)), (64, 64, (0, 1, 1))):
            down = make(c_in, c_out, 3, 2, padding=padding)
            self.levels.append(vnn.Sequential(down, make(c_out, c_out, 3), make(c_out, c_out, 3)))
        self.out = make(64, 128, (3, 1, 1), (2, 1, 1), padding=last_padding)

    def forward(self, x: Voxels) -> list[Voxels]:
        x = self.stem(x)
        made = []
        for level in (*self.levels, self.out):
            x = level(x)
            made.append(x)
        return made
