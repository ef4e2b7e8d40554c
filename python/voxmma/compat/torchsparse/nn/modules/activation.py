"""Activations."""

from __future__ import annotations

from torch import nn

from voxmma.compat.torchsparse.nn.utils.apply import fapply
from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["LeakyReLU", "ReLU", "SiLU"]


class ReLU(nn.ReLU):
    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return fapply(input, super().forward)


class LeakyReLU(nn.LeakyReLU):
    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return fapply(input, super().forward)


class SiLU(nn.SiLU):
    def forward(self, input: SparseTensor) -> SparseTensor:  # type: ignore[override]
        return fapply(input, super().forward)
