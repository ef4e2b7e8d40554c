"""What networks call of cumm.tensorview: torch's CPU tensors are its tensors here."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import torch

from voxmma.compat.spconv.core import missing

Tensor = torch.Tensor
from_numpy = torch.from_numpy
"""numpy array -> tensor that shares its memory"""


class Activation(enum.Enum):
    """`act_type` of SparseConvolution."""

    None_ = 0
    ReLU = 1
    Sigmoid = 2
    LeakyReLU = 3


gemm = SimpleNamespace(Activation=Activation)


def __getattr__(name: str) -> object:
    raise AttributeError(missing("cumm.tensorview", name))
