"""Blocks of the backbones."""

from voxmma.compat.torchsparse.backbones.modules.blocks import SparseConvBlock as SparseConvBlock
from voxmma.compat.torchsparse.backbones.modules.blocks import (
    SparseConvTransposeBlock as SparseConvTransposeBlock,
)
from voxmma.compat.torchsparse.backbones.modules.blocks import SparseResBlock as SparseResBlock
