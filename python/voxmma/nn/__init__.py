"""Layers (`voxmma.nn.SparseConv3d`, ...) and the functions behind them (`voxmma.nn.functional`)."""

from voxmma.nn import functional, modules
from voxmma.nn.modules import *  # noqa: F403

__all__ = modules.__all__ + ["functional"]  # noqa: RUF005
