"""Linear layers, concatenation and other operators on tensors with the same rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateManager as CoordinateManager
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateMapKey as CoordinateMapKey
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import Tensor
from voxmma.compat.MinkowskiEngine.MinkowskiTensorField import TensorField

_T = TypeVar("_T", bound=Tensor)


class MinkowskiLinear(nn.Module):
    """torch.nn.Linear on the features; the layer that does it is `linear`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=bias)

    def forward(self, input: _T) -> _T:
        return input._with(self.linear(input.F))

    def __repr__(self) -> str:
        linear = self.linear
        return (
            f"{type(self).__name__}(in_features={linear.in_features}, out_features={linear.out_features}, "
            f"bias={linear.bias is not None})"
        )


def _same_rows(tensors: tuple[Any, ...]) -> list[Any]:
    """Tensors handed over one by one or as a sequence; ValueError unless their keys are one."""
    found = list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], Sequence) else list(tensors)
    if not found:
        raise ValueError("give at least one tensor")
    for i, tensor in enumerate(found[1:], 1):
        found[0]._check(tensor)
        if tensor._key != found[0]._key:
            raise ValueError(f"tensor {i} has key {tensor._key}, the first has {found[0]._key}")
    return found


def _operator(function: Callable[[list[torch.Tensor]], torch.Tensor], *tensors: Any) -> Any:
    found = _same_rows(tensors)
    return found[0]._with(function([t.F for t in found]))


def cat(*sparse_tensors: Any) -> Any:
    """The channels of tensors on the same coordinates, one after the other."""
    return _operator(functools.partial(torch.cat, dim=1), *sparse_tensors)


def _sum(*sparse_tensors: Any) -> Any:
    """The sum of tensors on the same coordinates."""
    return _operator(lambda feats: functools.reduce(torch.add, feats), *sparse_tensors)


def mean(*sparse_tensors: Any) -> Any:
    """The mean of tensors on the same coordinates."""
    return _operator(lambda feats: torch.stack(feats).mean(0), *sparse_tensors)


def var(*sparse_tensors: Any) -> Any:
    """The mean square distance from `mean`."""
    return _operator(lambda feats: torch.stack(feats).var(0, unbiased=False), *sparse_tensors)


def dense_coordinates(shape: Sequence[int]) -> torch.Tensor:
    """(B * X * ..., 1 + D) int32 coordinates of every cell of a grid (B, C, X, ...)."""
    axes = [torch.arange(n, dtype=torch.int32, device="cpu") for n in (shape[0], *shape[2:])]
    return torch.cartesian_prod(*axes)


def to_sparse(
    x: torch.Tensor, format: str | None = None, coordinates: torch.Tensor | None = None, device: Any = None
) -> SparseTensor:
    """The cells of a dense grid that are not all zero. `format` says the axes: B first, one C, the others X;
    default BCX..."""
    if not isinstance(x, torch.Tensor) or x.dim() < 3:
        raise TypeError("x must be a tensor with batch, channels and at least one axis of space")
    axes = format or "BC" + "X" * (x.dim() - 2)
    if len(axes) != x.dim() or axes[0] != "B" or axes.count("B") != 1 or axes.count("C") != 1:
        raise ValueError(f"format must have B first, one C and X, {x.dim()} letters, got {format!r}")
    last = x.movedim(axes.index("C"), -1)
    found = torch.nonzero((last != 0).any(-1)) if coordinates is None else coordinates.to(x.device)
    feats = last[tuple(found.long().unbind(1))]
    return SparseTensor(feats, coordinates=found.int(), device=device or x.device)


def to_sparse_all(dense_tensor: torch.Tensor, coordinates: torch.Tensor | None = None) -> SparseTensor:
    """Every cell of a dense grid (B, C, X, ...), or those of `coordinates` in the order of
    `dense_coordinates`."""
    if coordinates is None:
        coordinates = dense_coordinates(dense_tensor.shape)
    feats = dense_tensor.movedim(1, -1).flatten(0, -2)
    return SparseTensor(feats, coordinates, device=dense_tensor.device)


class MinkowskiToSparseTensor(MinkowskiModuleBase):
    """A TensorField, or a dense grid (B, C, X, ...), as a SparseTensor.

    As MinkowskiEngine 0.5 does it: without `coordinates` every cell stays, zero or not; with them and
    `remove_zeros` those that are not zero, else those of `coordinates`, which are then all, in the order of
    `dense_coordinates`.
    """

    def __init__(self, remove_zeros: bool = True, coordinates: torch.Tensor | None = None) -> None:
        super().__init__()
        self.remove_zeros = remove_zeros
        self.coordinates = coordinates

    def forward(self, input: Any) -> SparseTensor:
        if isinstance(input, TensorField):
            return input.sparse()
        if not isinstance(input, torch.Tensor):
            raise TypeError(f"input must be a TensorField or a tensor, got {type(input).__name__}")
        if self.coordinates is not None and self.remove_zeros:
            return to_sparse(input)
        return to_sparse_all(input, self.coordinates)


class MinkowskiToDenseTensor(MinkowskiModuleBase):
    """A SparseTensor as a dense grid (B, C, X, ...) of `shape`."""

    def __init__(self, shape: torch.Size | None = None) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, input: SparseTensor) -> torch.Tensor:
        return input.dense(self.shape)[0]


class MinkowskiToFeature(MinkowskiModuleBase):
    """The features alone."""

    def forward(self, x: Tensor) -> torch.Tensor:
        return x.F


class MinkowskiStackCat(nn.Sequential):
    """`cat` of what the modules make of one input."""

    def forward(self, x: Any) -> Any:
        return cat([module(x) for module in self])


class MinkowskiStackSum(nn.Sequential):
    """The sum of what the modules make of one input."""

    def forward(self, x: Any) -> Any:
        return _sum([module(x) for module in self])


class MinkowskiStackMean(nn.Sequential):
    """The mean of what the modules make of one input."""

    def forward(self, x: Any) -> Any:
        return mean([module(x) for module in self])


class MinkowskiStackVar(nn.Sequential):
    """The variance of what the modules make of one input."""

    def forward(self, x: Any) -> Any:
        return var([module(x) for module in self])
