"""Pooling over samples."""

from __future__ import annotations

import torch
from torch import nn

from voxmma.compat.torchsparse.nn.functional.pooling import global_avg_pool, global_max_pool
from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["GlobalAvgPool", "GlobalMaxPool"]


class GlobalAvgPool(nn.Module):
    """nn.functional.global_avg_pool."""

    def forward(self, input: SparseTensor) -> torch.Tensor:
        return global_avg_pool(input)


class GlobalMaxPool(nn.Module):
    """nn.functional.global_max_pool."""

    def forward(self, input: SparseTensor) -> torch.Tensor:
        return global_max_pool(input)
