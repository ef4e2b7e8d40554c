"""Crops."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from voxmma.compat.torchsparse.nn.functional.crop import spcrop
from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["SparseCrop"]


class SparseCrop(nn.Module):
    """nn.functional.spcrop."""

    def __init__(
        self, coords_min: Sequence[int] | None = None, coords_max: Sequence[int] | None = None
    ) -> None:
        super().__init__()
        self.coords_min, self.coords_max = coords_min, coords_max

    def forward(self, input: SparseTensor) -> SparseTensor:
        return spcrop(input, self.coords_min, self.coords_max)
