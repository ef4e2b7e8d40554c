"""Layers (`voxmma.nn.SparseConv3d`, ...) and the functions behind them (`voxmma.nn.functional`)."""

from voxmma.nn import functional
from voxmma.nn.modules import SparseConv3d

__all__ = ["SparseConv3d", "functional"]
