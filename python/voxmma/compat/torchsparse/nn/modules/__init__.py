"""Layers."""

from voxmma.compat.torchsparse.nn.modules.activation import LeakyReLU as LeakyReLU
from voxmma.compat.torchsparse.nn.modules.activation import ReLU as ReLU
from voxmma.compat.torchsparse.nn.modules.activation import SiLU as SiLU
from voxmma.compat.torchsparse.nn.modules.conv import Conv3d as Conv3d
from voxmma.compat.torchsparse.nn.modules.crop import SparseCrop as SparseCrop
from voxmma.compat.torchsparse.nn.modules.norm import BatchNorm as BatchNorm
from voxmma.compat.torchsparse.nn.modules.norm import GroupNorm as GroupNorm
from voxmma.compat.torchsparse.nn.modules.pooling import GlobalAvgPool as GlobalAvgPool
from voxmma.compat.torchsparse.nn.modules.pooling import GlobalMaxPool as GlobalMaxPool
