"""SparseConvTensor: features on voxels, as spconv hands them from layer to layer."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from voxmma._types import Triple, as_tensor, integer, integers
from voxmma.compat.spconv.core import ConvAlgo
from voxmma.dispatch.record import Record
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.maps import KernelMap, map_over
from voxmma.sparse.tensor import Voxels

_ONE = (1, 1, 1)


def sizes(value: Any, ndim: int, name: str) -> tuple[int, ...]:
    """`ndim` integers from one or from as many: ints, numpy integers, tensors, any sequence of these."""
    if (
        not isinstance(value, (int, torch.Tensor))
        and hasattr(value, "__len__")
        and hasattr(value, "__getitem__")
    ):
        value = [value[i] for i in range(len(value))]  # OmegaConf's lists are no Sequence
    made = integers(value, ndim)
    if made is None:
        raise TypeError(f"{name} must be an int or {ndim} of them, got {value!r}")
    return made


def padded(values: tuple[int, ...], fill: int) -> Triple:
    """One to three integers as three: the axes that 1-D and 2-D grids lack come last."""
    x, y, z = (*values, fill, fill)[:3]
    return x, y, z


#: Places by the id of their `indices`, which they hold: a tensor that is known is not indexed again.
_known: weakref.WeakValueDictionary[int, Places] = weakref.WeakValueDictionary()


class Places:
    """Where the voxels of tensors are: `indices` as callers see them, and our set of them; each when first
    needed.

    Tensors on the same voxels share it. A write into `indices` or another grid makes another one.
    """

    __slots__ = (
        "__weakref__",
        "_alike",
        "_coords",
        "_indices",
        "_size",
        "_version",
        "batch",
        "count",
        "ndim",
        "shape",
        "shape_given",
    )

    def __init__(
        self, indices: torch.Tensor | None, coords: CoordSet | None, shape: Any, batch: Any, ndim: int
    ) -> None:
        self.ndim = ndim
        self.shape_given = shape
        """the object that said the shape"""
        self.shape = copy.copy(shape)
        self.batch = batch
        self.count: int = coords.num if indices is None else indices.shape[0]  # type: ignore[union-attr]
        """number of rows"""
        self._indices: torch.Tensor | None = None
        self._coords = coords
        self._size: tuple[int, ...] | None = None
        self._alike: list[Any] = []
        """what the last list held that said this shape"""
        self._version = 0
        if indices is not None:
            self._see(indices)

    def _see(self, indices: torch.Tensor) -> None:
        self._indices = indices
        self._version = -1 if indices.is_inference() else indices._version
        _known[id(indices)] = self

    @classmethod
    def of(cls, indices: torch.Tensor, shape: Any, batch: Any) -> Places:
        """Those of `indices`: the ones made for this very tensor, if it was not written to since."""
        found = _known.get(id(indices))
        if found is not None and found.fresh and found.in_grid(shape, batch):
            return found
        return cls(indices, None, shape, batch, indices.shape[1] - 1)

    @property
    def fresh(self) -> bool:
        """Whether nobody wrote into `indices` since the set of them was made."""
        indices = self._indices
        if indices is None or self._version < 0:  # writes into tensors of inference mode are not counted
            return True
        return indices._version == self._version

    def in_grid(self, shape: Any, batch: Any) -> bool:
        """Whether that is the grid they were made for."""
        known, same = self.shape, shape is self.shape_given
        if shape.__class__ is list and known.__class__ is list:  # it may be written into
            same = any(len(shape) == len(old) and all(map(is_, shape, old)) for old in (known, self._alike))
        if not same:
            same = sizes(shape, self.ndim, "spatial_shape") == self.size
            if same and shape.__class__ is list:
                self._alike = list(shape)
        return same and (batch is self.batch or integer(batch) == integer(self.batch))

    @property
    def size(self) -> tuple[int, ...]:
        """The grid's shape as integers, read once: of tensors on a GPU that waits for it."""
        if self._size is None:
            self._size = sizes(self.shape, self.ndim, "spatial_shape")
        return self._size

    @property
    def indices(self) -> torch.Tensor:
        """(N, ndim + 1) int32, the caller's own, or a copy of our coordinates: callers write into it."""
        if self._indices is None:
            assert self._coords is not None
            with torch.inference_mode(False), torch.no_grad():
                self._see(
                    self._coords.coords[:, : self.ndim + 1].clone(memory_format=torch.contiguous_format)
                )
        assert self._indices is not None
        return self._indices

    @property
    def coords(self) -> CoordSet:
        """The set of `indices` in the grid."""
        if self._coords is None:
            assert self._indices is not None
            rows = self._indices if self.ndim == 3 else nn.functional.pad(self._indices, (0, 3 - self.ndim))
            batch, grid = integer(self.batch), padded(self.size, 1)
            if batch is None:
                raise TypeError(f"batch_size must be an int, got {self.batch!r}")
            try:
                self._coords = CoordSet(rows, batch, grid, "keep")
            except (TypeError, ValueError) as error:
                raise type(error)(str(error).replace("coords", "indices")) from None
        return self._coords

    @property
    def grid(self) -> list[int]:
        """The shape of the grid: the very list that said so where there is one, which `_here` knows."""
        given = self.shape_given
        if given.__class__ is list and given == self.shape:
            return given
        return list((self.coords.spatial_shape or ())[: self.ndim])

    def __reduce__(self) -> tuple[Any, ...]:
        return Places.of, (self.indices, self.shape, self.batch)


class IndiceData:
    """What a layer leaves under its `indice_key`: which map it ran over, for inverse layers and for later
    ones.

    The map itself, and the pairs that spconv's own has, are made when they are asked for.
    """

    def __init__(
        self,
        inputs: Places,
        outputs: Places,
        geometry: Geometry,
        is_subm: bool,
        algo: ConvAlgo | None,
        transposed: bool = False,
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.geometry = geometry
        self.is_subm = is_subm
        self.algo = algo
        self.transposed = transposed
        self.voxel_num = None
        self._back: KernelMap | None = None

    @property
    def map(self) -> KernelMap:
        outside = None if self.is_subm else self.outputs.coords
        return map_over(self.inputs.coords, self.geometry, outside, self.transposed, False)

    @property
    def back(self) -> KernelMap:
        """The opposite direction: an inverse layer's."""
        if self._back is None:
            self._back = self.map.transposed()
        return self._back

    def _axes(self, values: Triple) -> list[int]:
        return list(values[: self.inputs.ndim])

    ksize = property(lambda self: self._axes(self.geometry.kernel_size))
    stride = property(lambda self: self._axes(self.geometry.stride))
    dilation = property(lambda self: self._axes(self.geometry.dilation))
    padding = property(lambda self: self._axes(self.geometry.padding))
    spatial_shape = property(lambda self: self.inputs.grid)
    out_spatial_shape = property(lambda self: self.outputs.grid)
    indices = property(lambda self: self.inputs.indices)
    out_indices = property(lambda self: self.outputs.indices)

    @property
    def indice_pairs(self) -> torch.Tensor:
        """(2, K, N) int32 rows of inputs and outputs of each offset, -1 after the last of them."""
        found = self.map.pairs()
        longest = max([self.inputs.count, *(len(rows) for rows, _ in found)])
        made = torch.full((2, len(found), longest), -1, dtype=torch.int32, device=self.map.device)
        for k, sides in enumerate(found):
            for side, rows in enumerate(sides):
                made[side, k, : len(rows)] = rows
        return made

    @property
    def indice_pair_num(self) -> torch.Tensor:
        """(K,) int32 pairs of each offset."""
        counts = [len(rows) for rows, _ in self.map.pairs()]
        return torch.tensor(counts, dtype=torch.int32, device=self.map.device)


class SparseConvTensor:
    """Features (N, C) on voxels (N, ndim + 1), with the grid they lie in.

    Columns keep their meaning: `indices` are int32 (batch, z, y, x) or (batch, y, x), `spatial_shape` and
    kernels are in the same order. `voxels` gives what voxmma's own functions take.

    Args:
        features: (N, C), any float dtype.
        indices: (N, ndim + 1) integers, ndim 1 to 3, on the device of the features. A tensor
            that was seen before and not written to since is not indexed again.
        spatial_shape: ndim sizes, which voxels must not exceed; ints, numpy integers, tensors.
        batch_size: number of samples.
        grid, voxel_num, permanent_thrust_allocator, enable_timer, force_algo: kept or ignored, as they only
            steer spconv's own machinery.
        indice_dict: what layers left under their `indice_key`.
        benchmark: time every layer into `benchmark_record`; layers need names then
            (`assign_name_for_sparse_modules`).

    Raises TypeError or ValueError naming the argument; where coordinates are wrong, when a layer first needs
    them.
    """

    def __init__(
        self,
        features: torch.Tensor,
        indices: torch.Tensor,
        spatial_shape: Any,
        batch_size: Any,
        grid: torch.Tensor | None = None,
        voxel_num: torch.Tensor | None = None,
        indice_dict: dict[Any, IndiceData] | None = None,
        benchmark: bool = False,
        permanent_thrust_allocator: bool = False,
        enable_timer: bool = False,
        force_algo: ConvAlgo | None = None,
    ) -> None:
        self._features = as_tensor(features, "features")
        self.spatial_shape = spatial_shape
        self.batch_size = batch_size
        self.indice_dict: dict[Any, IndiceData] = {} if indice_dict is None else indice_dict
        self.grid = grid
        self.voxel_num = voxel_num
        self.benchmark = benchmark
        self.benchmark_record: dict[str, Any] = {}
        self.thrust_allocator = None
        self._timer = None
        self.force_algo = force_algo
        self.int8_scale = None
        self._record: Record | None = None
        self._applied: tuple[str, ...] = ()
        self._places = self._placed(indices)

    def _placed(self, indices: Any) -> Places:
        indices = as_tensor(indices, "indices")
        if not isinstance(indices, torch.Tensor) or indices.dtype not in (torch.int32, torch.int64):
            what = indices.dtype if isinstance(indices, torch.Tensor) else type(indices).__name__
            raise TypeError(f"indices must be an int32 tensor, got {what}")
        if indices.dim() != 2 or not 2 <= indices.shape[1] <= 4:
            raise ValueError(
                f"indices must be (N, ndim + 1) rows of batch and 1 to 3 coordinates, "
                f"got {tuple(indices.shape)}"
            )
        return Places.of(indices, self.spatial_shape, self.batch_size)

    def _with(self, features: torch.Tensor) -> SparseConvTensor:
        """Other features; all else is shared."""
        state = self.__dict__.copy()
        state["_features"] = features
        return _of_state(state)

    # ---- facts -------------------------------------------------------------------------------------------

    @property
    def features(self) -> torch.Tensor:
        return self._features

    @features.setter
    def features(self, value: torch.Tensor) -> None:
        """As in spconv 1.x; 2.x refuses and wants `replace_feature`."""
        self._features, self._record, self._applied = value, None, ()

    @property
    def indices(self) -> torch.Tensor:
        """(N, ndim + 1) int32; may be written into, and replaced."""
        return self._places.indices

    @indices.setter
    def indices(self, value: torch.Tensor) -> None:
        self._places = self._placed(value)

    def _here(self) -> Places:
        """Where the voxels are now: after writes into `indices`, and into the grid, somewhere else."""
        places, shape = self._places, self.spatial_shape
        indices = places._indices
        if (
            (indices is None or places._version < 0 or indices._version == places._version)
            and (shape is places.shape_given and (shape.__class__ is not list or shape == places.shape))
            and self.batch_size is places.batch
        ):
            return places
        return self._moved(places)

    def _moved(self, places: Places) -> Places:
        if not places.fresh or not places.in_grid(self.spatial_shape, self.batch_size):
            same = places.fresh and integer(self.batch_size) == integer(places.batch)
            known = places._coords if same else None
            places = Places.of(places.indices, self.spatial_shape, self.batch_size)
            if places._coords is None and known is not None:
                grid = sizes(self.spatial_shape, places.ndim, "spatial_shape")
                places._coords = known.with_spatial_shape(padded(grid, 1))
            self._places = places
        return places

    @property
    def voxels(self) -> Voxels:
        """The same as voxmma's own value: columns in the same order, 0 in those that 1-D and 2-D grids
        lack."""
        coords, features = self._here().coords, self._features
        if features.shape[0] != coords.num:
            raise ValueError(f"features has {features.shape[0]} rows, indices has {coords.num}")
        return Voxels._make(coords, features, _ONE, self._record, self._applied)

    @property
    def spatial_size(self) -> int:
        """Number of cells of the grid."""
        size = 1
        for n in self._shape():
            size *= n
        return size

    @property
    def sparity(self) -> float:
        """Share of the grid's cells that hold a voxel."""
        return self._features.shape[0] / (self.spatial_size * (integer(self.batch_size) or 1))

    @property
    def is_quantized(self) -> bool:
        return self._features.is_quantized

    def _shape(self) -> list[int]:
        return list(sizes(self.spatial_shape, self._places.ndim, "spatial_shape"))

    def find_indice_pair(self, key: Any) -> IndiceData | None:
        """What the layer with this `indice_key` left; None where there is none."""
        return None if key is None else self.indice_dict.get(key)

    def __repr__(self) -> str:
        return f"SparseConvTensor[shape={self._features.shape}]"

    def __dir__(self) -> list[str]:
        """Some names twice, so that it takes a fifth of the time: OpenPCDet looks here for `replace_feature`
        at every call."""
        names: list[str] = []
        for cls in type(self).__mro__:
            names += cls.__dict__
        names += self.__dict__
        return names

    # ---- other features, other voxels --------------------------------------------------------------------

    def replace_feature(self, feature: torch.Tensor) -> SparseConvTensor:
        """The same voxels with other features (N, C')."""
        state = self.__dict__.copy()
        state["_features"], state["_record"], state["_applied"] = feature, None, ()
        return _of_state(state)

    def shadow_copy(self) -> SparseConvTensor:
        """Another object of the same parts."""
        return self._with(self._features)

    def minus(self) -> SparseConvTensor:
        """The features negated."""
        return self._with(-self._features)

    def select_by_index(self, valid_indices: torch.Tensor) -> SparseConvTensor:
        """The voxels of these rows, or where a mask is True. Maps of all voxels are left behind."""
        made = self.replace_feature(self._features[valid_indices])
        made.indices = self.indices[valid_indices]
        made.indice_dict = {}
        return made

    def dense(self, channels_first: bool = True) -> torch.Tensor:
        """(batch_size, C, *spatial_shape), or with the channels last; zeros where there is no voxel. Of
        rows that repeat a voxel the first counts."""
        x, ndim = self.voxels.sites(), self._places.ndim
        shape = (x.batch_size, *self._shape(), x.channels)
        grid = scatter_nd(x.coords[:, : ndim + 1], x.feats, shape)
        return grid.permute(0, ndim + 1, *range(1, ndim + 1)).contiguous() if channels_first else grid

    @classmethod
    def from_dense(cls, x: torch.Tensor) -> SparseConvTensor:
        """Of a channels-last grid (batch, *spatial_shape, C): the cells with a channel that is not zero,
        sorted."""
        indices = torch.nonzero((x != 0).any(-1)).int().contiguous()
        return cls(x[tuple(indices.long().unbind(1))], indices, list(x.shape[1:-1]), x.shape[0])

    # ---- arithmetic --------------------------------------------------------------------------------------

    def _rows_of(self, other: Any, verb: str) -> Any:
        """`other` as something to combine the features with, row by row."""
        if not isinstance(other, SparseConvTensor):
            return other
        if other._places is self._places and other._features.shape[0] == self._features.shape[0]:
            return other._features
        return self.voxels.align(other.voxels, verb)

    def __add__(self, other: SparseConvTensor | torch.Tensor | float) -> SparseConvTensor:
        """Sum of the features on equal voxels, in this one's row order; or with a tensor (N, C) or a number.

        ValueError where the voxels are not equal (`functional.sparse_add` takes their union).
        """
        return self.replace_feature(self._features + self._rows_of(other, "add"))

    __radd__ = __add__

    def __iadd__(self, other: SparseConvTensor | torch.Tensor | float) -> SparseConvTensor:
        self.features = self._features + self._rows_of(other, "add")
        return self

    def __sub__(self, other: SparseConvTensor | torch.Tensor | float) -> SparseConvTensor:
        return self.replace_feature(self._features - self._rows_of(other, "subtract"))

    def __rsub__(self, other: torch.Tensor | float) -> SparseConvTensor:
        return self.replace_feature(other - self._features)

    def __mul__(self, other: SparseConvTensor | torch.Tensor | float) -> SparseConvTensor:
        return self.replace_feature(self._features * self._rows_of(other, "multiply"))

    __rmul__ = __mul__

    def __truediv__(self, other: SparseConvTensor | torch.Tensor | float) -> SparseConvTensor:
        return self.replace_feature(self._features / self._rows_of(other, "divide"))

    def __neg__(self) -> SparseConvTensor:
        return self.minus()


def _of_state(state: dict[str, Any]) -> SparseConvTensor:
    """With these attributes, which become its own dict: a copy of another's takes half as long as filling the
    one that a new object has."""
    made = SparseConvTensor.__new__(SparseConvTensor)
    made.__dict__ = state
    return made


def scatter_nd(indices: torch.Tensor, updates: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Zeros of `shape` with `updates` (N, ...) at `indices` (N, k)."""
    return updates.new_zeros(tuple(shape)).index_put(tuple(indices.long().unbind(1)), updates)


# ---- pytree: policies, data loaders and DDP see the two tensors --------------------------------------------


def _flatten(x: SparseConvTensor) -> tuple[list[Any], SparseConvTensor]:
    return [x._features, x.indices], x._with(x._features[:0])


def _unflatten(children: Iterable[Any], x: SparseConvTensor) -> SparseConvTensor:
    features, indices = children
    made = x._with(features)
    if indices is not x._places._indices:
        made._places = made._placed(indices) if isinstance(indices, torch.Tensor) else x._places
    return made


pytree.register_pytree_node(SparseConvTensor, _flatten, _unflatten)
