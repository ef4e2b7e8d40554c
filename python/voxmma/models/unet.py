"""A sparse U-Net: every voxel gets features that know its surroundings, near and far.

Level l has the voxels of the scene on a grid coarser by 2^l. The encoder goes down with convolutions of
kernel size 2 and stride 2, the decoder goes back up onto the very voxels it came from, and on each level the
decoder is handed what the encoder had there (the skip).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

import voxmma.nn as vnn
from voxmma.models.blocks import Layer, conv_norm, residual_stage
from voxmma.nn.modules.container import cat_behind
from voxmma.sparse.tensor import Voxels

#: Blocks and channels of each stage in MinkowskiEngine's examples/minkunet.py, those of basic blocks.
_BLOCKS = {"14": (1,) * 8, "18": (2,) * 8, "34": (2, 3, 4, 6, 2, 2, 2, 2)}
_DOWN = (32, 64, 128, 256)
MINKUNETS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "14A": (_BLOCKS["14"], (*_DOWN, 128, 128, 96, 96)),
    "14B": (_BLOCKS["14"], (*_DOWN, 128, 128, 128, 128)),
    "14C": (_BLOCKS["14"], (*_DOWN, 192, 192, 128, 128)),
    "14D": (_BLOCKS["14"], (*_DOWN, 384, 384, 384, 384)),
    "18A": (_BLOCKS["18"], (*_DOWN, 128, 128, 96, 96)),
    "18B": (_BLOCKS["18"], (*_DOWN, 128, 128, 128, 128)),
    "18D": (_BLOCKS["18"], (*_DOWN, 384, 384, 384, 384)),
    "34A": (_BLOCKS["34"], (*_DOWN, 256, 128, 64, 64)),
    "34B": (_BLOCKS["34"], (*_DOWN, 256, 128, 64, 32)),
    "34C": (_BLOCKS["34"], (*_DOWN, 256, 128, 96, 96)),
}


class SparseUNet(nn.Module):
    """Voxels (N, in_channels) -> Voxels (N, out_channels) on the same coordinates.

    Args:
        in_channels: of the input.
        out_channels: of the head, a 1x1x1 convolution with bias; 0 = no head, (N, channels[-1]).
        channels: 2 L numbers, encoder levels 1 to L, then decoder levels L - 1 to 0.
        blocks: residual blocks of each of these stages.
        stem_channels: of level 0, before and after the stem's convolutions.
        stem_kernels: kernel size of each convolution of the stem.
        widen: 'down', the strided convolution goes to the next level's channels, or 'block', the first
            residual block after it does.
        norm: makes a norm for C channels.

    Raises ValueError naming the argument that does not fit.
    """

    fuses_itself = True  # by `cat_behind`

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        *,
        channels: Sequence[int] = (32, 64, 128, 256, 256, 128, 96, 96),
        blocks: Sequence[int] = (2, 3, 4, 6, 2, 2, 2, 2),
        stem_channels: int = 32,
        stem_kernels: Sequence[int] = (5,),
        widen: str = "down",
        norm: Layer = vnn.BatchNorm,
    ) -> None:
        super().__init__()
        if len(channels) % 2 or len(channels) != len(blocks) or not channels:
            raise ValueError(f"channels and blocks must be two a level, got {channels} and {blocks}")
        if widen not in ("down", "block"):
            raise ValueError(f"widen must be 'down' or 'block', got {widen!r}")
        levels = len(channels) // 2
        widths = [stem_channels, *channels[:levels]]  # of the encoder, by level
        inputs = [in_channels, *[stem_channels] * (len(stem_kernels) - 1)]
        self.stem = vnn.Sequential(
            *(conv_norm(c, stem_channels, k, norm=norm) for c, k in zip(inputs, stem_kernels, strict=True))
        )
        self.down, self.encoder, self.up, self.decoder = (nn.ModuleList() for _ in range(4))
        for level in range(levels):
            fine, coarse = widths[level : level + 2]
            entered = coarse if widen == "down" else fine
            self.down.append(conv_norm(fine, entered, 2, 2, norm=norm))
            self.encoder.append(residual_stage(entered, coarse, blocks[level], norm=norm))
            made, below = channels[-1 - level], channels[-2 - level]
            self.up.append(conv_norm(below, made, 2, 2, norm=norm, conv=vnn.SparseConvTranspose3d))
            self.decoder.append(residual_stage(made + fine, made, blocks[-1 - level], norm=norm))
        self.head = vnn.SparseConv3d(channels[-1], out_channels, 1) if out_channels else nn.Identity()

    def forward(self, x: Voxels) -> Voxels:
        x = self.stem(x)
        skips = []
        for down, encode in zip(self.down, self.encoder, strict=True):
            skips.append(x)
            x = encode(down(x))
        for up, decode in zip(reversed(self.up), reversed(self.decoder), strict=True):
            x = decode(cat_behind(up, x, skips.pop()))
        y: Voxels = self.head(x)
        return y


def spunet(in_channels: int, out_channels: int) -> SparseUNet:
    """The shape of Pointcept's SpUNet-v1m1 with its defaults (39.2 M parameters at 6 and 20 channels).

    Voxels with features (N, in_channels) -> the same voxels with (N, out_channels).
    """
    return SparseUNet(in_channels, out_channels, norm=partial(vnn.BatchNorm, eps=1e-3, momentum=0.01))


def minkunet(name: str, in_channels: int, out_channels: int) -> SparseUNet:
    """The shape of a MinkUNet of MinkowskiEngine, by its name in `MINKUNETS`: '34C' (37.9 M parameters), ...

    Voxels with features (N, in_channels) -> the same voxels with (N, out_channels). KeyError for another
    name; MinkUNet50 and 101, of bottleneck blocks, are not here.
    """
    if name not in MINKUNETS:
        raise KeyError(f"name is {name!r}, there are {', '.join(MINKUNETS)}")
    blocks, channels = MINKUNETS[name]
    return SparseUNet(in_channels, out_channels, channels=channels, blocks=blocks, widen="block")


def resunet42(in_channels: int = 4, out_channels: int = 0) -> SparseUNet:
    """The shape of torchsparse's SparseResUNet42 (21.7 M parameters), with a 1x1x1 head if `out_channels` is
    not 0. Voxels with features (N, in_channels) -> the same voxels with (N, 96) or (N, out_channels)."""
    return SparseUNet(in_channels, out_channels, blocks=(2,) * 8, stem_kernels=(3, 3), widen="block")
