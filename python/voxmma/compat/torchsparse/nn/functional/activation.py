"""Activations."""

from __future__ import annotations

import torch.nn.functional as F

from voxmma.compat.torchsparse.nn.utils.apply import fapply
from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["leaky_relu", "relu", "silu"]


def relu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    return fapply(input, F.relu, inplace=inplace)


def silu(input: SparseTensor, inplace: bool = True) -> SparseTensor:
    return fapply(input, F.silu, inplace=inplace)


def leaky_relu(input: SparseTensor, negative_slope: float = 0.1, inplace: bool = True) -> SparseTensor:
    return fapply(input, F.leaky_relu, negative_slope=negative_slope, inplace=inplace)
