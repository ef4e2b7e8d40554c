"""Switches of spconv.constants that networks read or set. None of them changes what runs here."""

from __future__ import annotations

from voxmma.compat.spconv.core import missing

SPCONV_USE_DIRECT_TABLE = True
"""which hash table spconv makes maps with"""
SPCONV_DO_SORT = True
"""whether spconv sorts rows by their masks"""
SPCONV_ALLOW_TF32 = False
"""TF32 follows torch's switches and voxmma.set_fp32_precision"""
ALL_WEIGHT_IS_KRSC = True
"""weights are stored (O, k..., I)"""
FILTER_HWIO = False
SAVED_WEIGHT_LAYOUT = ""
"""weights of 1.x, (k..., I, O), are known by their shape when they are loaded"""
NDIM_DONT_CARE = 3


def __getattr__(name: str) -> object:
    raise AttributeError(missing("constants", name))
