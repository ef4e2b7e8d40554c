"""Pooling over samples."""

from __future__ import annotations

import torch

from voxmma.compat.torchsparse.tensor import SparseTensor
from voxmma.nn.functional import pool

__all__ = ["global_avg_pool", "global_max_pool"]


def global_avg_pool(inputs: SparseTensor) -> torch.Tensor:
    """(B, C) means over the voxels of each sample, 0 for one without."""
    return pool.global_avg_pool(inputs.voxels)


def global_max_pool(inputs: SparseTensor) -> torch.Tensor:
    """(B, C) largest features of each sample, 0 for one without."""
    return pool.global_max_pool(inputs.voxels)
