"""Convolution (`spconv`) and interpolation (`grid_sample`)."""

from voxmma.compat.flex_gemm.ops import grid_sample as grid_sample
from voxmma.compat.flex_gemm.ops import spconv as spconv
from voxmma.compat.names import missing as _missing

__getattr__ = _missing(__name__, {"serialize": "the rows as they are: maps need no order of theirs"})
