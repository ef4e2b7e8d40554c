"""Arguments of MinkowskiEngine's layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from voxmma._types import integers


def convert_to_int_list(arg: Any, dimension: int) -> list[int]:
    """`dimension` integers from one or from as many; ValueError for anything else."""
    values = integers(arg, dimension)
    if values is None:
        raise ValueError(f"expected an int or {dimension} of them, got {arg!r}")
    return list(values)


def convert_to_int_tensor(arg: Any, dimension: int) -> torch.Tensor:
    """`convert_to_int_list` as an int32 tensor."""
    return torch.tensor(convert_to_int_list(arg, dimension), dtype=torch.int32, device="cpu")


def check_dimension(dimension: Any) -> int:
    """The number of spatial axes; ValueError unless it is 1, 2 or 3."""
    if dimension not in (1, 2, 3):
        raise ValueError(f"dimension must be 1, 2 or 3, got {dimension}: voxmma has three spatial axes")
    return int(dimension)


class MinkowskiModuleBase(nn.Module):
    """Base of the layers."""
