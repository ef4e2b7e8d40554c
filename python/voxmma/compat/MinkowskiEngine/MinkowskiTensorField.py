"""Features at points."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateManager, CoordinateMapKey
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, merge
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    SparseTensorQuantizationMode,
    Tensor,
    manager_for,
)
from voxmma.compat.sets import whole
from voxmma.sparse.interpolate import spread_weighted


class TensorField(Tensor):
    """Features (N, C) at points (N, 1 + D) batch, x, ... of any positions, row by row.

    `sparse()` makes voxels of the cells that hold points; `slice` of what a network made of these brings its
    features back to the points.
    """

    def __init__(
        self,
        features: torch.Tensor,
        coordinates: torch.Tensor | None = None,
        tensor_stride: Any = 1,
        coordinate_field_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = SparseTensorQuantizationMode.UNWEIGHTED_AVERAGE,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
        requires_grad: bool | None = None,
        device: Any = None,
    ) -> None:
        if not isinstance(features, torch.Tensor) or features.dim() != 2:
            raise TypeError("features must be a (N, C) tensor")
        if device is not None:
            features = features.to(device)
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self.quantization_mode = quantization_mode
        if coordinates is None:
            if coordinate_field_map_key is None or coordinate_manager is None:
                raise ValueError("give coordinates, or coordinate_field_map_key and coordinate_manager")
            self._manager, self.coordinate_field_map_key = coordinate_manager, coordinate_field_map_key
        else:
            if not isinstance(coordinates, torch.Tensor) or coordinates.dim() != 2:
                raise TypeError("coordinates must be a (N, 1 + D) tensor")
            points = coordinates.to(features.device)
            points = points if points.is_floating_point() else points.float()
            self._manager = coordinate_manager or manager_for(coordinates.shape[1] - 1)
            self.coordinate_field_map_key = self._manager.insert_field(points, tensor_stride)
        rows = self._manager.size(self.coordinate_field_map_key)
        if len(features) != rows:
            raise ValueError(f"features has {len(features)} rows, the coordinates have {rows}")
        self._feats = features

    @property
    def _key(self) -> CoordinateMapKey:
        return self.coordinate_field_map_key

    @property
    def F(self) -> torch.Tensor:
        return self._feats

    @property
    def C(self) -> torch.Tensor:
        """(N, 1 + D) float positions."""
        return self._manager.get_coordinate_field(self.coordinate_field_map_key)

    def _with(self, feats: torch.Tensor, applied: str = "") -> TensorField:
        return TensorField(
            feats,
            coordinate_field_map_key=self.coordinate_field_map_key,
            coordinate_manager=self._manager,
            quantization_mode=self.quantization_mode,
        )

    def _replace(self, feats: torch.Tensor) -> None:
        self._feats = feats

    def sparse(
        self,
        tensor_stride: Any = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        quantization_mode: SparseTensorQuantizationMode | None = None,
    ) -> SparseTensor:
        """The cells of `tensor_stride` that hold points, with their features merged; with a key, its cells,
        which must hold all points."""
        mode = self.quantization_mode if quantization_mode is None else quantization_mode
        field = self.coordinate_field_map_key
        if coordinate_map_key is None:
            key, (unique, inverse) = self._manager.field_to_sparse_insert_and_map(field, tensor_stride)
            feats = merge(self._feats, unique, inverse, mode)
        else:
            key = coordinate_map_key
            inverse = self._manager.field_rows(field, key)
            count = self._manager.size(key)
            first = torch.full((count,), len(inverse), dtype=torch.int64, device=inverse.device)
            numbers = torch.arange(len(inverse), device=inverse.device)
            first = first.scatter_reduce(0, inverse, numbers, "amin").clamp(max=len(inverse) - 1)
            feats = merge(self._feats, first, inverse, mode)
        return SparseTensor(
            feats, coordinate_map_key=key, coordinate_manager=self._manager, quantization_mode=mode
        )

    def splat(self) -> SparseTensor:
        """The corners of the cells around the points, with the features of the points, each shared linearly
        among its 2^D corners; `SparseTensor.interpolate` is the transpose."""
        manager = self._manager
        points, step = self.C, torch.tensor([1, *self.tensor_stride], dtype=torch.int64, device=self.device)
        low = whole(points.div(step, rounding_mode="floor"), "coordinates") * step
        corners = torch.tensor(
            list(itertools.product((0,), *[(0, 1)] * self.D)), dtype=torch.int64, device=self.device
        )
        corners = corners * step
        cells = torch.unique((low.unsqueeze(1) + corners).flatten(0, 1), dim=0)
        key, _ = manager.insert_and_map(cells, self.tensor_stride)
        rows, weights = manager.interpolation(key, points)
        feats = spread_weighted(self._feats, rows, weights, len(cells), found=True)
        return SparseTensor(feats, coordinate_map_key=key, coordinate_manager=manager)

    def inverse_mapping(self, sparse_tensor_map_key: CoordinateMapKey) -> torch.Tensor:
        """(N,) int64 row of the voxel that each point lies in; ValueError names a point that lies in none."""
        return self._manager.field_rows(self.coordinate_field_map_key, sparse_tensor_map_key)


Tensor._field = TensorField
