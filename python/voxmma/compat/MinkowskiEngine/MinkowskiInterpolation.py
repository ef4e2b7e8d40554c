"""Interpolation."""

from __future__ import annotations

from typing import Any

import torch

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor


class MinkowskiInterpolation(MinkowskiModuleBase):
    """SparseTensor.features_at_coordinates as a layer, with the maps (rows of the tensor, rows of the points)
    and their weights where asked for."""

    def __init__(self, return_kernel_map: bool = False, return_weights: bool = False) -> None:
        super().__init__()
        self.return_kernel_map = return_kernel_map
        self.return_weights = return_weights

    def forward(self, input: SparseTensor, tfield: torch.Tensor) -> Any:
        feats = input.features_at_coordinates(tfield)
        if not (self.return_kernel_map or self.return_weights):
            return feats
        rows, points, weights = input._manager.interpolation_map_weight(input.coordinate_map_key, tfield)
        made: list[Any] = [feats]
        if self.return_kernel_map:
            made.append((rows, points))
        if self.return_weights:
            made.append(weights)
        return tuple(made)

    def __repr__(self) -> str:
        return type(self).__name__ + "()"
