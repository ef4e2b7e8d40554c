"""Normalisation."""

from __future__ import annotations

from torch import nn

from voxmma.compat.torchsparse.nn.utils.apply import fapply
from voxmma.compat.torchsparse.tensor import SparseTensor
from voxmma.nn.functional.norm import group_norm
from voxmma.nn.modules import norm

__all__ = ["BatchNorm", "GroupNorm"]


class BatchNorm(norm.BatchNorm):
    """torch.nn.BatchNorm1d over all voxels of all samples."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return fapply(input, super().forward)


class GroupNorm(nn.GroupNorm):
    """torch.nn.GroupNorm, statistics over the voxels of each sample."""

    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        made = group_norm(input.voxels, self.num_groups, self.weight, self.bias, self.eps)
        return input._like(made.feats, f"group_norm({self.num_groups})")
