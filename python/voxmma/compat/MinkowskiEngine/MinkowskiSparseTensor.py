"""Sparse tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from voxmma._types import integers
from voxmma.compat.kernels import turned
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import convert_to_int_list, renamed
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    CoordinateManager,
    CoordinateMapKey,
    voxels_of,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    SparseTensorQuantizationMode,
    Tensor,
    manager_for,
)
from voxmma.sparse.interpolate import spread_weighted, weighted
from voxmma.sparse.tensor import Voxels

if TYPE_CHECKING:
    from voxmma.compat.MinkowskiEngine.MinkowskiTensorField import TensorField
    from voxmma.dispatch.record import Record

Mode = SparseTensorQuantizationMode


def merge(
    feats: torch.Tensor, unique: torch.Tensor, inverse: torch.Tensor, mode: SparseTensorQuantizationMode
) -> torch.Tensor:
    """Features (M, C) of the M unique rows out of (N, C): `unique` (M,), `inverse` (N,), both empty where no
    row comes twice. ValueError where `mode` merges none."""
    if mode == Mode.SPLAT_LINEAR_INTERPOLATION:
        raise ValueError("SPLAT_LINEAR_INTERPOLATION goes with TensorField.splat() alone")
    if not len(inverse):
        return feats
    if mode == Mode.RANDOM_SUBSAMPLE:
        return feats[unique]
    if mode == Mode.MAX_POOL:
        rows = inverse.unsqueeze(1).expand_as(feats)
        return feats.new_zeros((len(unique), feats.shape[1])).scatter_reduce(
            0, rows, feats, "amax", include_self=False
        )
    if mode == Mode.NO_QUANTIZATION:
        raise ValueError("coordinates hold a row twice, and quantization_mode is NO_QUANTIZATION")
    share = torch.ones(len(feats), dtype=torch.float64, device=feats.device)
    if mode == Mode.UNWEIGHTED_AVERAGE:
        counts = torch.zeros(len(unique), dtype=torch.float64, device=feats.device)
        share = share / counts.index_add(0, inverse, share)[inverse]
    return spread_weighted(feats, inverse.unsqueeze(1), share.unsqueeze(1), len(unique), found=True)


class SparseTensor(Tensor):
    """Features (N, C) on coordinates (N, 1 + D) int batch, x, ..., D = 1, 2 or 3.

    Rows that come twice are merged as `quantization_mode` says; those that are left keep their order, and
    `unique_index`, `inverse_mapping` say which they are. `voxels` is the voxmma.Voxels behind it, whose
    columns are (batch, z, y, x).

    ValueError names a row that is no multiple of `tensor_stride`, or out of range.
    """

    @renamed(
        feats="features",
        coords="coordinates",
        coords_key="coordinate_map_key",
        coords_manager="coordinate_manager",
    )
    def __init__(
        self,
        features: torch.Tensor,
        coordinates: torch.Tensor | None = None,
        tensor_stride: Any = 1,
        coordinate_map_key: CoordinateMapKey | None = None,
        coordinate_manager: CoordinateManager | None = None,
        quantization_mode: SparseTensorQuantizationMode = Mode.RANDOM_SUBSAMPLE,
        allocator_type: Any = None,
        minkowski_algorithm: Any = None,
        requires_grad: bool | None = None,
        device: Any = None,
    ) -> None:
        if not isinstance(features, torch.Tensor):
            raise TypeError(f"features must be a tensor, got {type(features).__name__}")
        if features.dim() != 2:
            raise ValueError(f"features must be (N, C), got shape {tuple(features.shape)}")
        if device is not None:
            features = features.to(device)
        self.quantization_mode = quantization_mode
        self.unique_index: torch.Tensor | None = None
        self._inverse: torch.Tensor | None = None
        if coordinates is None:
            if coordinate_map_key is None or coordinate_manager is None:
                raise ValueError("give coordinates, or coordinate_map_key and coordinate_manager")
            self._manager = coordinate_manager
            self.coordinate_map_key = coordinate_map_key
        else:
            if coordinate_map_key is not None:
                raise ValueError("coordinates and coordinate_map_key exclude each other")
            if not isinstance(coordinates, torch.Tensor) or coordinates.dim() != 2:
                raise TypeError("coordinates must be a (N, 1 + D) tensor of integers")
            if len(coordinates) != len(features):
                raise ValueError(f"features has {len(features)} rows, coordinates has {len(coordinates)}")
            if coordinates.is_floating_point():
                warnings.warn("coordinates are no integers: they are rounded down", stacklevel=2)
            manager = coordinate_manager or manager_for(coordinates.shape[1] - 1)
            key, (unique, inverse) = manager.insert_and_map(coordinates.to(features.device), tensor_stride)
            if len(unique):
                self.unique_index, self._inverse = unique, inverse
            features = merge(features, unique, inverse, quantization_mode)
            self._manager, self.coordinate_map_key = manager, key
        if requires_grad is not None:
            features.requires_grad_(requires_grad)
        self.voxels: Voxels = voxels_of(self._manager, self.coordinate_map_key, features)

    @classmethod
    def _make(
        cls, voxels: Voxels, key: CoordinateMapKey, manager: CoordinateManager, like: Tensor
    ) -> SparseTensor:
        """From parts that fit together."""
        made = cls.__new__(cls)
        made.quantization_mode = like.quantization_mode
        made.unique_index = made._inverse = None
        made._manager, made.coordinate_map_key, made.voxels = manager, key, voxels
        return made

    @property
    def _key(self) -> CoordinateMapKey:
        return self.coordinate_map_key

    @property
    def F(self) -> torch.Tensor:
        return self.voxels._feats

    @property
    def C(self) -> torch.Tensor:
        return self._manager.get_coordinates(self.coordinate_map_key)

    @property
    def inverse_mapping(self) -> torch.Tensor:
        """(N,) int64 row that each row of the coordinates handed over became."""
        if self._inverse is None:
            return torch.arange(len(self), device=self.device)
        return self._inverse

    @property
    def _record(self) -> Record | None:
        return self.voxels._record

    @property
    def _applied(self) -> tuple[str, ...]:
        return self.voxels._applied

    def _with(self, feats: torch.Tensor, applied: str = "") -> SparseTensor:
        voxels = self.voxels._after(feats, applied) if applied else self.voxels.with_feats(feats)
        made = SparseTensor._make(voxels, self.coordinate_map_key, self._manager, self)
        made.unique_index, made._inverse = self.unique_index, self._inverse
        return made

    def _replace(self, feats: torch.Tensor) -> None:
        self.voxels = self.voxels.with_feats(feats)

    def _elsewhere(self, other: Any, function: Callable[[Any, Any], torch.Tensor]) -> SparseTensor:
        manager = self._manager
        key = manager.union([self.coordinate_map_key, other.coordinate_map_key])
        total = manager.coord_set(key)
        mine, theirs = (total.lookup(t.voxels.coords) for t in (self, other))
        feats = self.F.new_zeros((total.num, self.F.shape[1])).index_copy(0, mine, self.F)
        both = function(feats.index_select(0, theirs), other.F)
        feats = feats.index_copy(0, theirs, both)
        return SparseTensor(feats, coordinate_map_key=key, coordinate_manager=manager)

    # ---- between voxels ------------------------------------------------------------------------------------

    def features_at_coordinates(self, query_coordinates: torch.Tensor) -> torch.Tensor:
        """(M, C) features at (M, 1 + D) float positions batch, x, ..., between the voxels around each.

        A voxel's features sit at its coordinate; the 2^D around a position are weighted linearly, those that
        do not exist count 0 (their weight goes to none of the others). Differentiable in the features.
        """
        if not isinstance(query_coordinates, torch.Tensor) or query_coordinates.dim() != 2:
            raise TypeError("query_coordinates must be a (M, 1 + D) tensor")
        if query_coordinates.shape[1] != self.D + 1:
            raise ValueError(
                f"query_coordinates must be (M, {self.D + 1}), got {tuple(query_coordinates.shape)}"
            )
        rows, weights = self._manager.interpolation(self.coordinate_map_key, query_coordinates)
        return weighted(self.F, rows, weights, found=True)

    def interpolate(self, X: TensorField) -> TensorField:
        """`features_at_coordinates` of a field's points, as a field."""
        return X._with(self.features_at_coordinates(X.C))

    def slice(self, X: Any) -> TensorField:
        """The features of this tensor at the points that `X` (a TensorField, or a SparseTensor made of
        coordinates) was made of; ValueError where X has other voxels."""
        if isinstance(X, self._field):
            return X._with(self.F[X.inverse_mapping(self.coordinate_map_key)])
        if not isinstance(X, SparseTensor):
            raise TypeError(f"X must be a TensorField or a SparseTensor, got {type(X).__name__}")
        if X.coordinate_map_key != self.coordinate_map_key:
            raise ValueError(f"slice needs one key: {self.coordinate_map_key} and {X.coordinate_map_key}")
        rows = X.inverse_mapping
        return self._field(self.F[rows], coordinates=self.C[rows].float(), coordinate_manager=self._manager)

    def cat_slice(self, X: Any) -> TensorField:
        """`slice`, with the features of the field `X` behind."""
        sliced = self.slice(X)
        mine = X.F if len(X.F) == len(sliced.F) else X.F[X.inverse_mapping]
        return sliced._with(torch.cat([sliced.F, mine], dim=1))

    # ---- dense grids ---------------------------------------------------------------------------------------

    def dense(
        self,
        shape: torch.Size | None = None,
        min_coordinate: torch.Tensor | None = None,
        contract_stride: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(B, C, X, ...) grid with zeros where there is no voxel, its first coordinate and the tensor
        strides.

        `min_coordinate` (D,), a multiple of the tensor stride; default: 0, where negative coordinates raise
        ValueError. The first coordinate returned is the smallest there is where none is given.
        `contract_stride`: a cell of the grid for each cell, not for each unit of tensor stride 1.
        """
        size = self.D
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32, device=self.device)
        space = self.C[:, 1:]
        if min_coordinate is None:
            if not len(self):
                if shape is None:
                    raise ValueError("shape is needed where there is no voxel")
                return self.F.new_zeros(shape), stride * 0, stride.cpu()
            origin = space.amin(0)
            if bool((origin < 0).any()):
                raise ValueError(f"coordinates go down to {tuple(origin.tolist())}: give min_coordinate")
        else:
            values = integers(min_coordinate, size)
            if values is None:
                raise TypeError(f"min_coordinate must be {size} integers, got {min_coordinate!r}")
            origin = torch.tensor(values, dtype=torch.int32, device=self.device)
            if bool((origin % stride).any()):
                raise ValueError(f"min_coordinate {values} is no multiple of {self.tensor_stride}")
            space = space - origin
        cells = space // stride if contract_stride else space
        if shape is None:
            ends = (cells.amax(0) + 1).tolist()
            shape = torch.Size([int(self.C[:, 0].max()) + 1, self.F.shape[1], *ends])
        if len(shape) != size + 2:
            raise ValueError(f"shape must have {size + 2} numbers, got {tuple(shape)}")
        limit = torch.tensor([shape[0], *shape[2:]], dtype=torch.int64, device=self.device)
        index = torch.cat([self.C[:, :1], cells], dim=1).long()
        outside = ((index < 0) | (index >= limit)).any(1)
        if bool(outside.any()):
            row = int(torch.nonzero(outside)[0])
            raise ValueError(f"row {row}, {tuple(self.C[row].tolist())}, lies outside shape {tuple(shape)}")
        grid = self.F.new_zeros((shape[0], *shape[2:], self.F.shape[1]))
        grid = grid.index_put(tuple(index.unbind(1)), self.F)
        return grid.movedim(-1, 1), origin.unsqueeze(0) if min_coordinate is None else origin, stride.cpu()

    def sparse(
        self, min_coords: Any = None, max_coords: Any = None, contract_coords: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A torch.sparse tensor (B, X, ..., C) with dense last axis, its first coordinate, and the
        strides."""
        stride = torch.tensor(self.tensor_stride, dtype=torch.int32, device=self.device)
        low = self.C[:, 1:].amin(0) if min_coords is None else min_coords.to(self.device)
        space = self.C[:, 1:] - low
        cells = space // stride if contract_coords else space
        ends = cells.amax(0) if max_coords is None else (max_coords.to(self.device) - low) // stride
        index = torch.cat([self.C[:, :1], cells], dim=1).long().t()
        size = [int(self.C[:, 0].max()) + 1, *(ends + 1).tolist(), self.F.shape[1]]
        return (
            torch.sparse_coo_tensor(index, self.F, size, dtype=self.F.dtype, device=self.F.device),
            low,
            stride.cpu(),
        )


def target_key(input: SparseTensor, coordinates: Any, tensor_stride: Any = 1) -> CoordinateMapKey:
    """The key that the `coordinates` argument of a layer names: a key, a SparseTensor, or a tensor (which
    makes a set of `tensor_stride`)."""
    if isinstance(coordinates, CoordinateMapKey):
        return coordinates
    if isinstance(coordinates, SparseTensor):
        if coordinates._manager is not input._manager:
            raise ValueError("coordinates are of another coordinate manager than the input")
        return coordinates.coordinate_map_key
    if isinstance(coordinates, torch.Tensor):
        strides = convert_to_int_list(tensor_stride, input.D)
        return input._manager.insert_and_map(coordinates.to(input.device), strides)[0]
    raise TypeError(
        f"coordinates must be a key, a SparseTensor or a tensor, got {type(coordinates).__name__}"
    )


# ---- pytree: policies, data loaders and DDP see the two tensors --------------------------------------------


@dataclass(frozen=True, eq=False)
class _Context:
    key: CoordinateMapKey
    manager: CoordinateManager
    coords: torch.Tensor
    mode: SparseTensorQuantizationMode
    rows: tuple[torch.Tensor | None, torch.Tensor | None]


def _flatten(x: SparseTensor) -> tuple[list[Any], _Context]:
    rows = x.unique_index, x._inverse
    return [x.F, x.C], _Context(x.coordinate_map_key, x._manager, x.C, x.quantization_mode, rows)


def _unflatten(children: Iterable[Any], context: _Context) -> SparseTensor:
    """With coordinates of its own where they are another tensor: moved to a device, say."""
    feats, coords = children
    if coords is not context.coords and isinstance(coords, torch.Tensor):
        return SparseTensor(feats, coords, context.key.get_tensor_stride())
    made = SparseTensor.__new__(SparseTensor)
    made.quantization_mode, made._manager = context.mode, context.manager
    made.coordinate_map_key = context.key
    made.unique_index, made._inverse = context.rows
    strides = turned(tuple(max(s, 1) for s in context.key.get_tensor_stride()))
    made.voxels = Voxels._make(context.manager.coord_set(context.key), feats, strides)
    return made


pytree.register_pytree_node(SparseTensor, _flatten, _unflatten)
