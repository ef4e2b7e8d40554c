"""Sparse tensors and points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from voxmma._types import Triple
from voxmma.compat.kernels import columns_inside, columns_outside, turned
from voxmma.compat.sets import known, remember, version
from voxmma.compat.torchsparse import options
from voxmma.compat.torchsparse.utils.tensor_cache import KernelMaps, TensorCache, cache_for
from voxmma.compat.torchsparse.utils.utils import make_ntuple, make_triple
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.tensor import Voxels

if TYPE_CHECKING:
    from typing_extensions import Self

    from voxmma.dispatch.record import Record

__all__ = ["PointTensor", "SparseTensor"]

_allow_negative_coordinates = False


def get_allow_negative_coordinates() -> bool:
    return _allow_negative_coordinates


def set_allow_negative_coordinates(allow_negative_coordinates: bool) -> None:
    """Whether strided layers of 2.x make voxels below 0. By default they drop them."""
    global _allow_negative_coordinates
    _allow_negative_coordinates = bool(allow_negative_coordinates)


class SparseTensor:
    """Features (N, C) and coordinates (N, 4): (batch, x, y, z) in cells of its own grid with version 2, with
    version 1 (x, y, z, batch) in units of tensor stride 1. Both may be replaced.

    A coordinate tensor stands for one coordinate set as long as nobody writes into it; maps are made once for
    it. Rows that come twice are kept: each has its voxel's result, of the first row's features.
    `spatial_range`: (batch, X, Y, Z), what strided layers are clipped by instead of the largest coordinates.
    """

    def __init__(
        self,
        feats: torch.Tensor,
        coords: torch.Tensor,
        stride: Any = 1,
        spatial_range: Sequence[int] | None = None,
    ) -> None:
        self._feats = feats
        self.coords = coords
        self.stride: Triple = make_triple(stride)
        self.spatial_range = None if spatial_range is None else make_ntuple(spatial_range, len(spatial_range))
        self._caches = cache_for()
        self._record: Record | None = None
        self._applied: tuple[str, ...] = ()
        self._set: tuple[torch.Tensor, int, CoordSet] | None = None

    @staticmethod
    def _make(
        feats: torch.Tensor,
        coords: torch.Tensor,
        stride: Triple,
        spatial_range: tuple[int, ...] | None,
        caches: TensorCache,
        found: tuple[torch.Tensor, int, CoordSet] | None,
        record: Record | None = None,
        applied: tuple[str, ...] = (),
    ) -> SparseTensor:
        """From parts that fit together."""
        made = SparseTensor.__new__(SparseTensor)
        made._feats, made.coords, made.stride, made.spatial_range = feats, coords, stride, spatial_range
        made._caches, made._set, made._record, made._applied = caches, found, record, applied
        return made

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def feats(self) -> torch.Tensor:
        return self._feats

    @feats.setter
    def feats(self, feats: torch.Tensor) -> None:
        self._feats, self._record, self._applied = feats, None, ()

    F = feats

    @property
    def C(self) -> torch.Tensor:
        return self.coords

    @C.setter
    def C(self, coords: torch.Tensor) -> None:
        self.coords = coords

    @property
    def s(self) -> Triple:
        return self.stride

    @s.setter
    def s(self, stride: Any) -> None:
        self.stride = make_triple(stride)

    @property
    def cmaps(self) -> dict[Any, Any]:
        """Coordinates by tensor stride: what transposed layers go back to. Shared by what is made of a
        tensor."""
        return self._caches.cmaps

    @cmaps.setter
    def cmaps(self, maps: dict[Any, Any]) -> None:
        self._caches.cmaps = maps

    @property
    def kmaps(self) -> KernelMaps:
        """What layers have run, by (tensor stride, kernel size, stride, dilation). Shared like `cmaps`."""
        return self._caches.kmaps

    @kmaps.setter
    def kmaps(self, maps: dict[Any, Any]) -> None:
        self._caches.kmaps = maps if isinstance(maps, KernelMaps) else KernelMaps(maps)

    @property
    def coord_set(self) -> CoordSet:
        """The coordinate set, its columns (batch, z, y, x) in cells. TypeError or ValueError as in
        CoordSet."""
        coords = self.coords
        found = self._set
        if found is None or found[0] is not coords or found[1] != version(coords):
            found = self._set = (coords, version(coords), coord_set(coords, self.stride))
        return found[2]

    @property
    def voxels(self) -> Voxels:
        """The voxmma.Voxels of the features on `coord_set`."""
        made = Voxels._make(self.coord_set, self._feats, turned(self.stride), self._record, self._applied)
        return made if len(self._feats) == made.num_voxels else made.with_feats(self._feats)

    def _like(self, feats: torch.Tensor, applied: str = "") -> SparseTensor:
        """Other features on the same coordinates, made row by row by what is called `applied`."""
        where = self.coords, self.stride, self.spatial_range, self._caches, self._set
        if applied and self._record is not None:
            return SparseTensor._make(feats, *where, self._record, (*self._applied, applied))
        return SparseTensor._make(feats, *where)

    # ---- in place, as there --------------------------------------------------------------------------------

    def to(self, device: Any, non_blocking: bool = True) -> Self:
        self.coords = self.coords.to(device, non_blocking=non_blocking)
        self.feats = self._feats.to(device, non_blocking=non_blocking)
        return self

    def cpu(self) -> Self:
        return self.to("cpu")

    def cuda(self) -> Self:
        return self.to("cuda")

    def half(self) -> Self:
        self.feats = self._feats.half()
        return self

    def float(self) -> Self:
        self.feats = self._feats.float()
        return self

    def detach(self) -> Self:
        self.coords = self.coords.detach()
        self._feats = self._feats.detach()
        return self

    def dense(self) -> torch.Tensor:
        """(B, X, Y, Z, C) grid of `spatial_range`; ValueError where there is none."""
        from voxmma.compat.torchsparse.utils.to_dense import to_dense

        if self.spatial_range is None:
            raise ValueError("dense needs a spatial_range: SparseTensor(..., spatial_range=(batch, X, Y, Z))")
        return to_dense(self._feats, self.coords, self.spatial_range)

    def __add__(self, other: SparseTensor) -> SparseTensor:
        """The sum of the features, row by row. ValueError where the coordinates differ."""
        return self._like(self._feats + same_rows(self, other))

    def __repr__(self) -> str:
        shape = tuple(self._feats.shape)
        return (
            f"SparseTensor(feats {shape} {self._feats.dtype} on {self._feats.device}, stride={self.stride})"
        )


def same_rows(tensor: SparseTensor, other: SparseTensor) -> torch.Tensor:
    """The features of `other`, whose rows are those of `tensor`; ValueError where they are not."""
    if other.coords is not tensor.coords and not other.coord_set.equal(tensor.coord_set):
        raise ValueError(
            f"different coordinates: {len(tensor.coords)} rows of stride {tensor.stride} and "
            f"{len(other.coords)} of stride {other.stride}"
        )
    return other.feats


def coord_set(coords: torch.Tensor, stride: Triple) -> CoordSet:
    """The coordinate set of a coordinate tensor."""
    inside = stride if options.version == 1 else (1, 1, 1)

    def make() -> CoordSet:
        if not isinstance(coords, torch.Tensor) or coords.dim() != 2 or coords.shape[1] != 4:
            raise ValueError(f"coords must be a (N, 4) tensor, got {getattr(coords, 'shape', type(coords))}")
        if coords.is_floating_point():
            raise TypeError(
                f"coords must be integers, got {coords.dtype}: sparse_quantize makes them of points"
            )
        first = coords[:, [3, 0, 1, 2]] if options.version == 1 else coords
        return CoordSet(columns_inside(first, inside, "coords"), duplicates="keep")

    return known(coords, (options.version, inside), make)


def coords_of(found: CoordSet, stride: Triple, maps: KernelMaps) -> torch.Tensor:
    """The coordinate tensor of a set that a layer made; the same one for all tensors that share `maps`."""
    made = maps.coords.get(found)
    if made is None:
        inside = stride if options.version == 1 else (1, 1, 1)
        with torch.inference_mode(False), torch.no_grad():
            made = columns_outside(found.coords, inside)
            made = made[:, [1, 2, 3, 0]].contiguous() if options.version == 1 else made
        remember(made, (options.version, inside), found)
        maps.coords[found] = made
    return made


class PointTensor:
    """Features and float coordinates of points, with what was looked up for them: `idx_query`, `weights`,
    `additional_features`."""

    def __init__(
        self,
        feats: torch.Tensor,
        coords: torch.Tensor,
        idx_query: dict[Any, Any] | None = None,
        weights: dict[Any, Any] | None = None,
    ) -> None:
        self.F = feats
        self.C = coords
        self.idx_query = {} if idx_query is None else idx_query
        self.weights = {} if weights is None else weights
        self.additional_features: dict[str, dict[Any, Any]] = {"idx_query": {}, "counts": {}}

    def to(self, device: Any, non_blocking: bool = True) -> Self:
        self.F = self.F.to(device, non_blocking=non_blocking)
        self.C = self.C.to(device, non_blocking=non_blocking)
        return self

    def cuda(self) -> Self:
        return self.to("cuda")

    def detach(self) -> Self:
        self.F = self.F.detach()
        self.C = self.C.detach()
        return self

    def __add__(self, other: PointTensor) -> PointTensor:
        made = PointTensor(self.F + other.F, self.C, self.idx_query, self.weights)
        made.additional_features = self.additional_features
        return made
