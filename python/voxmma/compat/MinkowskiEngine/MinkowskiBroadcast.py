"""Features of a sample to each of its voxels."""

from __future__ import annotations

import enum

import torch

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import to_rows
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor


class BroadcastMode(enum.Enum):
    ELEMENTWISE_ADDITON = 0
    ELEMENTWISE_MULTIPLICATION = 1


class MinkowskiBroadcast(MinkowskiModuleBase):
    """`input_glob` (B, C), as global pooling makes it, at the voxels of `input`: (N, C)."""

    def forward(self, input: SparseTensor, input_glob: SparseTensor) -> SparseTensor:
        if input_glob._manager is not input._manager:
            raise ValueError("input and input_glob are of two coordinate managers")
        return input._with(self._combine(input.F, to_rows(input_glob, input.voxels)))

    @staticmethod
    def _combine(mine: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return sample.clone()


class MinkowskiBroadcastAddition(MinkowskiBroadcast):
    """Adds each sample's features to its voxels."""

    @staticmethod
    def _combine(mine: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return mine + sample


class MinkowskiBroadcastMultiplication(MinkowskiBroadcast):
    """Multiplies the voxels by their sample's features."""

    @staticmethod
    def _combine(mine: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return mine * sample


class MinkowskiBroadcastConcatenation(MinkowskiBroadcast):
    """Each sample's features behind those of its voxels."""

    @staticmethod
    def _combine(mine: torch.Tensor, sample: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine, sample], dim=1)
