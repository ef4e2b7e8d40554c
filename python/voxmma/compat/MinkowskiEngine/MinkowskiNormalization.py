"""Normalisation."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import Tensor
from voxmma.nn.functional.norm import instance_norm
from voxmma.nn.modules.norm import BatchNorm, SyncBatchNorm

_T = TypeVar("_T", bound=Tensor)


class MinkowskiBatchNorm(nn.Module):
    """Batch normalisation over all rows; the layer that does it is `bn`, a torch.nn.BatchNorm1d."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
    ) -> None:
        super().__init__()
        self.bn: nn.BatchNorm1d = BatchNorm(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: _T) -> _T:
        return input._with(self.bn(input.F), "BatchNorm")

    def __repr__(self) -> str:
        bn = self.bn
        return (
            f"{type(self).__name__}({bn.num_features}, eps={bn.eps}, momentum={bn.momentum}, "
            f"affine={bn.affine}, track_running_stats={bn.track_running_stats})"
        )


class MinkowskiSyncBatchNorm(MinkowskiBatchNorm):
    """MinkowskiBatchNorm with the statistics of all ranks in training."""

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        made = SyncBatchNorm(num_features, eps, momentum, affine, track_running_stats)
        made.process_group = process_group
        self.bn = made

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> nn.Module:
        """`module` with the statistics of every batch norm inside over all ranks, MinkowskiEngine's and
        torch's; parameters, buffers and keys stay."""
        return SyncBatchNorm.convert_sync_batchnorm(module, process_group)


class MinkowskiInstanceNorm(MinkowskiModuleBase):
    """Mean and variance of each sample and channel; `weight`, `bias` (1, C)."""

    EPS = 1e-8

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.weight = nn.Parameter(torch.ones(1, num_features, device=None, dtype=None))
        self.bias = nn.Parameter(torch.zeros(1, num_features, device=None, dtype=None))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, input: SparseTensor) -> SparseTensor:
        made = instance_norm(input.voxels, self.weight.view(-1), self.bias.view(-1), self.EPS)
        return input._with(made.feats, "InstanceNorm")

    def __repr__(self) -> str:
        return f"{type(self).__name__}(nchannels={self.num_features})"


class MinkowskiStableInstanceNorm(MinkowskiInstanceNorm):
    """MinkowskiInstanceNorm with a larger epsilon."""

    EPS = 1e-6
