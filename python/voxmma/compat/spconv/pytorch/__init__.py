"""spconv.pytorch: tensors, layers and containers; see voxmma.compat.spconv."""

from __future__ import annotations

from voxmma.compat.spconv.core import ConvAlgo, missing
from voxmma.compat.spconv.pytorch import constants as constants
from voxmma.compat.spconv.pytorch import conv as conv
from voxmma.compat.spconv.pytorch import core as core
from voxmma.compat.spconv.pytorch import functional as functional
from voxmma.compat.spconv.pytorch import identity as identity
from voxmma.compat.spconv.pytorch import modules as modules
from voxmma.compat.spconv.pytorch import ops as ops
from voxmma.compat.spconv.pytorch import pool as pool
from voxmma.compat.spconv.pytorch import tables as tables
from voxmma.compat.spconv.pytorch import utils as utils
from voxmma.compat.spconv.pytorch.conv import (
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvolution,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from voxmma.compat.spconv.pytorch.core import SparseConvTensor, scatter_nd
from voxmma.compat.spconv.pytorch.identity import Identity
from voxmma.compat.spconv.pytorch.modules import (
    RemoveGrid,
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    ToDense,
    assign_name_for_sparse_modules,
    is_sparse_conv,
    is_spconv_module,
)
from voxmma.compat.spconv.pytorch.pool import (
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
)
from voxmma.compat.spconv.pytorch.tables import AddTable, ConcatTable, JoinTable

__all__ = [
    "AddTable",
    "ConcatTable",
    "ConvAlgo",
    "Identity",
    "JoinTable",
    "RemoveGrid",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseBatchNorm",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseIdentity",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparseReLU",
    "SparseSequential",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "ToDense",
    "assign_name_for_sparse_modules",
    "is_sparse_conv",
    "is_spconv_module",
    "scatter_nd",
]


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch", name))
