"""Arguments of MinkowskiEngine's layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn

from voxmma._types import integers

_F = TypeVar("_F", bound=Callable[..., Any])


def renamed(**names: str) -> Callable[[_F], _F]:
    """Takes keywords by their names in MinkowskiEngine 0.4, too: renamed(old="new"). TypeError where both
    are given."""

    def decorate(function: _F) -> _F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                if names[old] in kwargs:
                    raise TypeError(f"{old} and {names[old]} are the same argument: give one of them")
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


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
