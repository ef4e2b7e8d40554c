"""What sparse tensors and tensor fields share."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateManager, CoordinateMapKey

if TYPE_CHECKING:
    from typing_extensions import Self


class SparseTensorOperationMode(enum.Enum):
    """Whether tensors that are made without a coordinate manager get one each or share one."""

    SEPARATE_COORDINATE_MANAGER = 0
    SHARE_COORDINATE_MANAGER = 1


class SparseTensorQuantizationMode(enum.Enum):
    """What becomes of rows with the same coordinate. RANDOM_SUBSAMPLE keeps the first, NO_QUANTIZATION
    refuses them, SPLAT_LINEAR_INTERPOLATION goes with TensorField.splat()."""

    RANDOM_SUBSAMPLE = 0
    UNWEIGHTED_AVERAGE = 1
    UNWEIGHTED_SUM = 2
    NO_QUANTIZATION = 3
    MAX_POOL = 4
    SPLAT_LINEAR_INTERPOLATION = 5


_mode = SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER
_shared: CoordinateManager | None = None


def set_sparse_tensor_operation_mode(operation_mode: SparseTensorOperationMode) -> None:
    global _mode
    _mode = SparseTensorOperationMode(operation_mode)


def sparse_tensor_operation_mode() -> SparseTensorOperationMode:
    return _mode


def global_coordinate_manager() -> CoordinateManager | None:
    """The shared coordinate manager, if there is one."""
    return _shared


def set_global_coordinate_manager(coordinate_manager: CoordinateManager | None) -> None:
    global _shared
    _shared = coordinate_manager


def clear_global_coordinate_manager() -> None:
    """To be called after each step where tensors share a coordinate manager."""
    set_global_coordinate_manager(None)


def manager_for(dimension: int) -> CoordinateManager:
    """The coordinate manager of a tensor that is given none."""
    if _mode == SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER:
        return CoordinateManager(dimension)
    if _shared is None:
        set_global_coordinate_manager(CoordinateManager(dimension))
    assert _shared is not None
    return _shared


class Tensor:
    """Features on rows of a coordinate manager. Equality is identity."""

    quantization_mode: SparseTensorQuantizationMode
    _manager: CoordinateManager
    _field: ClassVar[type[Any]]
    """TensorField, whose module says so"""

    # ---- what the two kinds do in their own way ------------------------------------------------------------

    @property
    def _key(self) -> CoordinateMapKey:
        raise NotImplementedError

    @property
    def F(self) -> torch.Tensor:
        """(N, C) features."""
        raise NotImplementedError

    @property
    def C(self) -> torch.Tensor:
        """(N, 1 + D) batch, x, ..."""
        raise NotImplementedError

    def _with(self, feats: torch.Tensor, applied: str = "") -> Self:
        """Other features on the same rows, made row by row by what is called `applied`."""
        raise NotImplementedError

    def _replace(self, feats: torch.Tensor) -> None:
        """Other features for this object."""
        raise NotImplementedError

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def features(self) -> torch.Tensor:
        return self.F

    @property
    def _F(self) -> torch.Tensor:
        return self.F

    @_F.setter
    def _F(self, feats: torch.Tensor) -> None:
        self._replace(feats)

    @property
    def coordinates(self) -> torch.Tensor:
        return self.C

    @property
    def coordinate_manager(self) -> CoordinateManager:
        return self._manager

    @property
    def coordinate_key(self) -> CoordinateMapKey:
        return self._key

    feats, coords, coords_key, coords_man = features, coordinates, coordinate_key, coordinate_manager
    """their names in MinkowskiEngine 0.4"""

    @property
    def tensor_stride(self) -> list[int]:
        return self._key.get_tensor_stride()

    @property
    def D(self) -> int:
        """Number of spatial axes."""
        return self._manager.D

    dimension = D

    @property
    def shape(self) -> torch.Size:
        return self.F.shape

    @property
    def device(self) -> torch.device:
        return self.F.device

    @property
    def dtype(self) -> torch.dtype:
        return self.F.dtype

    @property
    def requires_grad(self) -> bool:
        return self.F.requires_grad

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.F.requires_grad_(requires_grad)
        return self

    def size(self, *dim: int) -> Any:
        return self.F.size(*dim)

    def get_device(self) -> int:
        return self.F.get_device()

    def __len__(self) -> int:
        return len(self.F)

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"{type(self).__name__}(\n  coordinates={self.C}\n  features={self.F}\n  {self._key})"

    # ---- samples -------------------------------------------------------------------------------------------

    @property
    def decomposition_permutations(self) -> list[torch.Tensor]:
        """The rows of each sample up to the last that has any in the coordinate manager, int64, in their
        order. Waits for a GPU."""
        return self._manager.rows_of_samples(self.C[:, 0])

    _batchwise_row_indices = decomposition_permutations

    @property
    def decomposed_coordinates(self) -> list[torch.Tensor]:
        """The coordinates (N_i, D) of each sample."""
        return [self.C[rows, 1:] for rows in self.decomposition_permutations]

    @property
    def decomposed_features(self) -> list[torch.Tensor]:
        """The features (N_i, C) of each sample."""
        return [self.F[rows] for rows in self.decomposition_permutations]

    @property
    def decomposed_coordinates_and_features(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        rows = self.decomposition_permutations
        return [self.C[r, 1:] for r in rows], [self.F[r] for r in rows]

    def coordinates_at(self, batch_index: int) -> torch.Tensor:
        return self.decomposed_coordinates[batch_index]

    def features_at(self, batch_index: int) -> torch.Tensor:
        return self.decomposed_features[batch_index]

    def coordinates_and_features_at(self, batch_index: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.decomposition_permutations[batch_index]
        return self.C[rows, 1:], self.F[rows]

    # ---- arithmetic ----------------------------------------------------------------------------------------

    def _elsewhere(self, other: Any, function: Callable[[Any, Any], torch.Tensor]) -> Self:
        raise ValueError(f"the keys differ: {self._key} and {other._key}")

    def _binary(self, other: Any, function: Callable[[Any, Any], torch.Tensor], name: str) -> Self:
        if isinstance(other, Tensor):
            self._check(other)
            if other._key != self._key:
                return self._elsewhere(other, function)
            return self._with(function(self.F, other.F))
        if isinstance(other, torch.Tensor):
            return self._with(function(self.F, other))
        if isinstance(other, int | float):
            return self._with(function(self.F, other), f"{name} {other}")
        return NotImplemented

    def _check(self, other: Tensor) -> None:
        if type(other) is not type(self):
            raise TypeError(f"cannot combine a {type(self).__name__} with a {type(other).__name__}")
        if other._manager is not self._manager:
            raise ValueError(
                "the tensors are of two coordinate managers: make one with coordinate_manager= of the other"
            )

    def _in_place(self, other: Any, function: Callable[[Any, Any], torch.Tensor]) -> Self:
        if isinstance(other, Tensor):
            self._check(other)
            if other._key != self._key:
                raise ValueError(f"in place needs one coordinate_map_key: {self._key} and {other._key}")
            other = other.F
        self._replace(function(self.F, other))
        return self

    def __add__(self, other: Any) -> Self:
        """With a tensor on other coordinates: on the union of both, absent rows counting 0."""
        return self._binary(other, torch.add, "+")

    def __sub__(self, other: Any) -> Self:
        return self._binary(other, torch.sub, "-")

    def __mul__(self, other: Any) -> Self:
        return self._binary(other, torch.mul, "*")

    def __truediv__(self, other: Any) -> Self:
        return self._binary(other, torch.div, "/")

    def __pow__(self, power: Any) -> Self:
        return self._with(self.F**power)

    __power__ = __pow__

    def __iadd__(self, other: Any) -> Self:
        return self._in_place(other, torch.add)

    def __isub__(self, other: Any) -> Self:
        return self._in_place(other, torch.sub)

    def __imul__(self, other: Any) -> Self:
        return self._in_place(other, torch.mul)

    def __itruediv__(self, other: Any) -> Self:
        return self._in_place(other, torch.div)

    # ---- the same rows -------------------------------------------------------------------------------------

    def detach(self) -> Self:
        return self._with(self.F.detach())

    def float(self) -> Self:
        return self._with(self.F.float())

    def double(self) -> Self:
        return self._with(self.F.double())

    def half(self) -> Self:
        return self._with(self.F.half())
