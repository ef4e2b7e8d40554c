"""Coordinate sets by tensor stride and name: every tensor of a manager with the same key has the same
rows."""

from __future__ import annotations

import enum
import itertools
import threading
from collections.abc import Sequence
from typing import Any

import torch

from voxmma.compat.kernels import columns_inside, columns_outside, turned
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import check_dimension, convert_to_int_list
from voxmma.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator, RegionType
from voxmma.compat.sets import whole
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import children, windows
from voxmma.sparse.maps import kernel_map
from voxmma.sparse.sets import downsample, union
from voxmma.sparse.tensor import Voxels


class CoordinateMapType(enum.Enum):
    """Accepted; coordinates are where their tensor is."""

    CPU = 0
    CUDA = 1


class GPUMemoryAllocatorType(enum.Enum):
    """Accepted; memory is PyTorch's."""

    PYTORCH = 0
    CUDA = 1


def set_gpu_allocator(backend: GPUMemoryAllocatorType) -> None:
    """Accepted, without effect."""


set_memory_manager_backend = set_gpu_allocator


class MinkowskiAlgorithm(enum.Enum):
    """Accepted; voxmma.tune and the tile table decide about kernels."""

    DEFAULT = 0
    MEMORY_EFFICIENT = 1
    SPEED_OPTIMIZED = 2


class CoordinateMapKey:
    """Names a coordinate set of a manager: tensor stride per axis, and a string."""

    def __init__(self, tensor_stride: Sequence[int], string_id: str = "") -> None:
        self._key = (tuple(int(s) for s in tensor_stride), string_id)

    def get_key(self) -> tuple[list[int], str]:
        return list(self._key[0]), self._key[1]

    def get_tensor_stride(self) -> list[int]:
        return list(self._key[0])

    def get_coordinate_size(self) -> int:
        return len(self._key[0]) + 1

    def get_dimension(self) -> int:
        return len(self._key[0])

    def is_key_set(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CoordinateMapKey) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return f"coordinate map key:{list(self._key[0])}{':' + self._key[1] if self._key[1] else ''}"


class CoordinateManager:
    """The coordinate sets of tensors that belong together, and the maps between them (cached on the sets).

    A strided layer on (stride, name) leads to (stride * s, name): the cells of the coarser grid, made once.
    The other arguments are accepted: they choose a hash table and its memory in MinkowskiEngine.
    """

    def __init__(
        self,
        D: int = 3,
        num_threads: int = -1,
        coordinate_map_type: CoordinateMapType | None = None,
        allocator_type: GPUMemoryAllocatorType | None = None,
        minkowski_algorithm: MinkowskiAlgorithm | None = None,
    ) -> None:
        self.D = check_dimension(D)
        self.batch_size: int | None = None
        self._sets: dict[CoordinateMapKey, CoordSet] = {}
        self._coordinates: dict[CoordinateMapKey, torch.Tensor] = {}
        self._fields: dict[CoordinateMapKey, torch.Tensor] = {}
        self._field_rows: dict[tuple[CoordinateMapKey, CoordinateMapKey], torch.Tensor] = {}
        self._samples: torch.Tensor | None = None
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    # ---- sets ----------------------------------------------------------------------------------------------

    def coord_set(self, key: CoordinateMapKey) -> CoordSet:
        """The set of a key, its columns (batch, z, y, x) in cells of its grid."""
        found = self._sets.get(key)
        if found is None:
            raise ValueError(f"{key} is not of this coordinate manager, which has {list(self._sets)}")
        return found

    def free_key(self, tensor_stride: Sequence[int], string_id: str = "") -> CoordinateMapKey:
        """A key that no set has: with this string where it can be."""
        key = CoordinateMapKey(tensor_stride, string_id)
        while key in self._sets or key in self._fields:
            key = CoordinateMapKey(tensor_stride, f"{string_id}-{next(self._numbers)}")
        return key

    def add(self, coord_set: CoordSet, tensor_stride: Sequence[int], string_id: str = "") -> CoordinateMapKey:
        """Names a set."""
        with self._lock:
            if self.batch_size is None:
                self.batch_size = coord_set.batch_size
            key = self.free_key(tensor_stride, string_id)
            self._sets[key] = coord_set
        return key

    def insert_and_map(
        self, coordinates: torch.Tensor, tensor_stride: Any = 1, string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
        """Adds (N, 1 + D) coordinates; returns their key and (unique rows, place of each row among these),
        both empty where no coordinate comes twice. ValueError names a row that cannot be."""
        stride = tuple(convert_to_int_list(tensor_stride, self.D))
        rows = whole(coordinates, "coordinates")
        if rows.shape[1] != self.D + 1:
            raise ValueError(f"coordinates must be (N, {self.D + 1}), got shape {tuple(rows.shape)}")
        columns = columns_inside(rows, stride)
        found = CoordSet(columns, self.batch_size, duplicates="keep")
        if found.repeated is None:
            empty = torch.empty(0, dtype=torch.int64, device=rows.device)
            return self.add(found, stride, string_id), (empty, empty)
        first, place = found.repeated.rows.get()
        unique, order = torch.sort(first)
        made = CoordSet(columns[unique], found.batch_size)
        return self.add(made, stride, string_id), (unique, torch.argsort(order)[place])

    def stride(
        self, coordinate_map_key: CoordinateMapKey, stride: Any, string_id: str = ""
    ) -> CoordinateMapKey:
        """The key of the cells coarser by `stride`, which are made when there are none."""
        step = convert_to_int_list(stride, self.D)
        fine, name = coordinate_map_key.get_key()
        key = CoordinateMapKey([f * s for f, s in zip(fine, step, strict=True)], string_id or name)
        if key not in self._sets:
            with self._lock:
                if key not in self._sets:
                    self._sets[key] = downsample(self.coord_set(coordinate_map_key), turned(tuple(step)))
        return key

    def expand(self, key: CoordinateMapKey, kernel: KernelGenerator, transposed: bool) -> CoordinateMapKey:
        """The key of a new set: every cell that a kernel at a cell of `key` reaches. ValueError where a layer
        that is not transposed cannot have one."""
        geometry = kernel.geometry
        if transposed:
            strides = self.finer_strides(key, kernel.kernel_stride)
            made = children(self.coord_set(key), geometry)
        else:
            if not geometry.mirrored:
                raise ValueError("expand_coordinates needs kernels of odd size")
            fine = key.get_tensor_stride()
            strides = [f * s for f, s in zip(fine, kernel.kernel_stride, strict=True)]
            made = windows(self.coord_set(key), geometry)
        return self.add(made, strides)

    def finer_strides(self, key: CoordinateMapKey, step: Sequence[int]) -> list[int]:
        """Tensor strides of a grid finer by `step`; ValueError where there is none."""
        strides = key.get_tensor_stride()
        if any(t % s for t, s in zip(strides, step, strict=True)):
            raise ValueError(
                f"a transposed layer of stride {list(step)} cannot work at tensor stride {strides}"
            )
        return [t // s for t, s in zip(strides, step, strict=True)]

    def onto(
        self, source: CoordinateMapKey, target: CoordinateMapKey, transposed: bool
    ) -> tuple[CoordSet, tuple[int, int, int], torch.Tensor | None]:
        """For a layer from one set onto another that its caller chose: the set, the stride that leads to it,
        along the columns inside, whatever that of the layer is, and which rows of `target` the set has (None:
        all of them in order; the others hold nothing, as they are between the cells of `source`).

        Offsets of a layer count cells of its input, those of a transposed one cells of its output. ValueError
        where the strides of the sets do not fit.
        """
        fine, coarse = source.get_tensor_stride(), target.get_tensor_stride()
        if transposed:
            fine, coarse = coarse, fine
        if all(0 < f <= c and c % f == 0 for f, c in zip(fine, coarse, strict=True)):
            step = tuple(c // f for f, c in zip(fine, coarse, strict=True))
            return self.coord_set(target), turned(step), None
        if transposed or not all(0 < c <= f and f % c == 0 for f, c in zip(fine, coarse, strict=True)):
            kind = "transposed layer" if transposed else "layer"
            raise ValueError(f"a {kind} cannot lead from {source} to {target}")
        coordinates = self.get_coordinates(target)
        between = coordinates[:, 1:] % torch.tensor(fine, dtype=torch.int32, device=coordinates.device)
        rows = torch.nonzero((between == 0).all(1)).flatten()
        columns = columns_inside(coordinates[rows], tuple(fine))
        return CoordSet(columns, self.batch_size), (1, 1, 1), rows

    def union(self, keys: Sequence[CoordinateMapKey]) -> CoordinateMapKey:
        """The key of a new set with the cells of all `keys`, whose tensor strides must be equal."""
        strides = keys[0].get_tensor_stride()
        for key in keys[1:]:
            if key.get_tensor_stride() != strides:
                raise ValueError(f"tensor strides differ: {strides} and {key.get_tensor_stride()}")
        return self.add(union(*map(self.coord_set, keys)), strides, "union")

    def origin(self) -> CoordinateMapKey:
        """The key of one row (batch, 0, ...) for each sample that has a voxel."""
        key = CoordinateMapKey([0] * self.D)
        if key not in self._sets:
            with self._lock:
                if key not in self._sets:
                    batch = self._first_batch()
                    samples = torch.unique(batch).int().unsqueeze(1)
                    columns = torch.cat([samples, samples.new_zeros((len(samples), 3))], dim=1)
                    self._sets[key] = CoordSet(columns, self.batch_size)
                    self._samples = samples.flatten().long()
        return key

    def _first_batch(self) -> torch.Tensor:
        """The batch column of the first set, or field where there is no set."""
        for found in self._sets.values():
            return found.coords[:, 0]
        for points in self._fields.values():
            return points[:, 0]
        raise ValueError("the coordinate manager has no coordinates yet")

    @property
    def samples(self) -> torch.Tensor:
        """(B,) int64 batch index of each row of the origin."""
        self.origin()
        assert self._samples is not None
        return self._samples

    def rows_of_samples(self, batch: torch.Tensor) -> list[torch.Tensor]:
        """The rows (N_i,) int64 of each sample, from a batch column (N,). Waits for a GPU."""
        ordered, order = torch.sort(batch.long(), stable=True)
        counts = torch.bincount(ordered, minlength=int(self.samples.max()) + 1)
        return list(torch.split(order, counts.tolist()))

    def origin_map(self, key: CoordinateMapKey) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(batch index of each row of the origin, rows of `key` by batch index), int64."""
        return self.samples, self.rows_of_samples(self.coord_set(key).coords[:, 0])

    def origin_field_map(self, key: CoordinateMapKey) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """`origin_map` of a field."""
        return self.samples, self.rows_of_samples(self.get_coordinate_field(key)[:, 0])

    def number_of_unique_batch_indices(self) -> int:
        return len(self.samples)

    def exists(self, key: CoordinateMapKey) -> bool:
        return key in self._sets

    def size(self, coordinate_map_key: CoordinateMapKey) -> int:
        """Number of rows of a set or a field."""
        field = self._fields.get(coordinate_map_key)
        return self.coord_set(coordinate_map_key).num if field is None else len(field)

    def _key(self, key_or_strides: Any) -> CoordinateMapKey:
        if isinstance(key_or_strides, CoordinateMapKey):
            return key_or_strides
        return CoordinateMapKey(convert_to_int_list(key_or_strides, self.D))

    def get_unique_coordinate_map_key(self, tensor_stride: Any) -> CoordinateMapKey:
        """The key that has no string; ValueError when there is none."""
        key = self._key(tensor_stride)
        self.coord_set(key)
        return key

    def get_coordinate_map_keys(self, tensor_stride: Any) -> list[CoordinateMapKey]:
        """All keys of a tensor stride."""
        wanted = convert_to_int_list(tensor_stride, self.D)
        return [key for key in self._sets if key.get_tensor_stride() == wanted]

    def get_coordinates(self, coords_key_or_tensor_strides: Any) -> torch.Tensor:
        """(N, 1 + D) int32 batch, x, ... in units of tensor stride 1. The same tensor every time."""
        key = self._key(coords_key_or_tensor_strides)
        found = self._coordinates.get(key)
        if found is None:
            strides = tuple(key.get_tensor_stride())
            with torch.inference_mode(False), torch.no_grad():
                found = columns_outside(self.coord_set(key).coords, strides)
            self._coordinates[key] = found
        return found

    # ---- maps ----------------------------------------------------------------------------------------------

    def kernel_map(
        self,
        in_key: Any,
        out_key: Any,
        stride: Any = 1,
        kernel_size: Any = 3,
        dilation: Any = 1,
        region_type: Any = RegionType.HYPER_CUBE,
        region_offset: torch.Tensor | None = None,
        is_transpose: bool = False,
        is_pool: bool = False,
    ) -> dict[int, torch.Tensor]:
        """Index pairs by kernel offset: {k: (2, n) int32 input rows and output rows}, empty ones left out.

        `in_key`, `out_key`: keys, or tensor strides. As for layers onto coordinates that are given, offsets
        count cells of the input, transposed of the output, and `stride` says nothing.
        """
        source, target = self._key(in_key), self._key(out_key)
        kernel = KernelGenerator(
            kernel_size,
            stride,
            dilation,
            is_transpose,
            RegionType(region_type),
            region_offset,
            dimension=self.D,
        )
        geometry = kernel.geometry
        where, step, rows = self.onto(source, target, is_transpose)
        found = kernel_map(
            self.coord_set(source),
            geometry.kernel_size,
            stride=step,
            dilation=geometry.dilation,
            padding=geometry.padding,
            out_coords=where,
            transposed=is_transpose,
        )
        pairs = found.pairs()
        if is_transpose and found.symmetric:
            pairs.reverse()
        made = {}
        for k, cell in enumerate(range(len(pairs)) if kernel.cells is None else kernel.cells.tolist()):
            rows_in, rows_out = pairs[cell]
            if len(rows_in):
                to = rows_out if rows is None else rows[rows_out.long()]
                made[k] = torch.stack([rows_in.long(), to.long()]).int()
        return made

    get_kernel_map = kernel_map

    def stride_map(
        self, in_key: CoordinateMapKey, stride_key: CoordinateMapKey
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows of `in_key`, row of the coarser `stride_key` each lies in), int64, those that lie in one."""
        rows = self.rows_of(self.get_coordinates(in_key), stride_key)
        inside = torch.nonzero(rows >= 0).flatten()
        return inside, rows[inside]

    def rows_of(self, coordinates: torch.Tensor, key: CoordinateMapKey) -> torch.Tensor:
        """(N,) int64 row of `key` whose cell holds each of (N, 1 + D) coordinates, whole or not, or -1."""
        strides = key.get_tensor_stride()
        step = torch.tensor([1, *strides], dtype=coordinates.dtype, device=coordinates.device)
        cells = whole(coordinates.div(step, rounding_mode="floor"), "coordinates")
        columns = columns_inside(cells, (1,) * self.D)
        return self.coord_set(key).lookup(columns)

    def interpolation(self, key: CoordinateMapKey, points: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows (M, 2^D) int64 of `key` around (M, 1 + D) positions, -1 where there is none, and their
        weights."""
        step = torch.tensor(key.get_tensor_stride(), dtype=torch.float64, device=points.device)
        place = points[:, 1:].double() / step
        low = place.floor()
        found = self.coord_set(key)
        batch = points[:, :1].round().int()
        rows, weights = [], []
        for corner in itertools.product((0, 1), repeat=self.D):
            cell = low + torch.tensor(corner, dtype=torch.float64, device=points.device)
            cells = torch.cat([batch, whole(cell, "query_coordinates")], dim=1)
            rows.append(found.lookup(columns_inside(cells, (1,) * self.D)))
            weights.append((1 - (place - cell).abs()).prod(1))
        return torch.stack(rows, dim=1), torch.stack(weights, dim=1)

    def interpolation_map_weight(
        self, key: CoordinateMapKey, samples: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rows of `key`, rows of `samples`, weights) of all pairs that exist."""
        rows, weights = self.interpolation(key, samples)
        points, corner = torch.nonzero(rows >= 0, as_tuple=True)
        return rows[points, corner], points, weights[points, corner].to(samples.dtype)

    # ---- fields --------------------------------------------------------------------------------------------

    def insert_field(
        self, coordinates: torch.Tensor, tensor_stride: Any, string_id: str = ""
    ) -> CoordinateMapKey:
        """Keeps (N, 1 + D) float coordinates of a TensorField."""
        strides = convert_to_int_list(tensor_stride, self.D)
        with self._lock:
            key = self.free_key(strides, string_id or "field")
            self._fields[key] = coordinates
        return key

    def get_coordinate_field(self, key: CoordinateMapKey) -> torch.Tensor:
        if key not in self._fields:
            raise ValueError(f"{key} is no field of this coordinate manager")
        return self._fields[key]

    def field_to_sparse_insert_and_map(
        self, field_map_key: CoordinateMapKey, sparse_tensor_stride: Any, sparse_tensor_string_id: str = ""
    ) -> tuple[CoordinateMapKey, tuple[torch.Tensor, torch.Tensor]]:
        """Adds the cells that hold points of a field: `insert_and_map` of its coordinates rounded down."""
        strides = convert_to_int_list(sparse_tensor_stride, self.D)
        field = self.get_coordinate_field(field_map_key)
        step = torch.tensor([1, *strides], dtype=field.dtype, device=field.device)
        cells = whole(field.div(step, rounding_mode="floor"), "coordinates") * step.int()
        key, (unique, inverse) = self.insert_and_map(cells, strides, sparse_tensor_string_id)
        rows = inverse if len(inverse) else torch.arange(len(field), device=field.device)
        self._field_rows[field_map_key, key] = rows
        return key, (unique, inverse)

    def field_rows(self, field: CoordinateMapKey, key: CoordinateMapKey) -> torch.Tensor:
        """(N,) int64 row of `key` for each point of a field. ValueError names the first point without one."""
        rows = self._field_rows.get((field, key))
        if rows is None:
            points = self.get_coordinate_field(field)
            rows = self.rows_of(points, key)
            if bool((rows < 0).any()):
                row = int(torch.nonzero(rows < 0)[0])
                raise ValueError(f"point {row}, {tuple(points[row].tolist())}, lies in no cell of {key}")
            self._field_rows[field, key] = rows
        return rows

    def exists_field_to_sparse(
        self, field_map_key: CoordinateMapKey, sparse_map_key: CoordinateMapKey
    ) -> bool:
        return (field_map_key, sparse_map_key) in self._field_rows

    def field_to_sparse_keys(self, field_map_key: CoordinateMapKey) -> list[CoordinateMapKey]:
        return [key for field, key in self._field_rows if field == field_map_key]

    def __repr__(self) -> str:
        sets = "".join(f"\n\t{key}: {found.num} rows" for key, found in self._sets.items())
        return f"CoordinateManager(D={self.D}){sets}"


def voxels_of(manager: CoordinateManager, key: CoordinateMapKey, feats: torch.Tensor) -> Voxels:
    """Voxels of features on a set of a manager; TypeError or ValueError as in Voxels."""
    if not isinstance(feats, torch.Tensor):
        raise TypeError(f"features must be a tensor, got {type(feats).__name__}")
    strides = turned(tuple(max(s, 1) for s in key.get_tensor_stride()))
    return Voxels(manager.coord_set(key), feats, stride=strides)
