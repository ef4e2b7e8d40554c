"""Layers on Voxels."""

from voxmma.nn.modules.sparse_conv import SparseConv3d

__all__ = ["SparseConv3d"]
