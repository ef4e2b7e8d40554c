"""Voxels: features on a coordinate set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, TypeGuard

import torch
import torch.utils._pytree as pytree

from voxmma._types import ANY_DTYPE, DTYPE_NAMES, Triple, as_tensor, integer, positive_triple, three_integers
from voxmma.sparse.checks import check_columns, check_inside, check_spatial_shape
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.index import gather_rows
from voxmma.sparse.keyed import MapsByKey
from voxmma.sparse.packing import BATCH_MAX, COORD_MAX, COORD_MIN
from voxmma.sparse.points import REDUCTIONS, Number, merge, quantize

if TYPE_CHECKING:
    from voxmma.dispatch.record import Record

_P = ParamSpec("_P")


def _or_fields(init: Callable[_P, None]) -> Callable[_P, None]:
    """Lets the constructor take the dataclass fields instead, as dataclasses.replace (FSDP2) passes them."""

    @functools.wraps(init)
    def construct(*args: _P.args, **kwargs: _P.kwargs) -> None:
        if "_coord_set" in kwargs:
            for name, value in kwargs.items():
                setattr(args[0], name, value)
        else:
            init(*args, **kwargs)

    return construct


@dataclass(init=False, eq=False, repr=False)  # a dataclass: DDP and FSDP2 look for tensors inside
class Voxels:
    """N voxels with C features each: an immutable value. Whatever keeps the coordinates shares them, maps
    included.

    Args:
        coords: (N, 4) int32 or int64 rows (batch, x, y, z); see CoordSet for the ranges. A CoordSet is shared
            as it is, and so is the set of a tensor that was wrapped before (`CoordSet.of`). N may be 0. The
            row order is kept. Here and wherever coordinates, points and their features are taken, a numpy
            array stands for the CPU tensor that shares its memory.
        feats: (N, C) fp16, bf16, fp32 or fp64 on the device of `coords`, any strides.
        batch_size: number of samples, empty ones included. Default: largest batch index + 1.
        stride: tensor stride per axis, one int or three: a record of how coarse the grid is. Coordinates at a
            coarser level are grid coordinates of that level, that is, already divided.
        duplicates: 'error' refuses a coordinate that comes twice; 'mean', 'sum', 'max', 'min' or 'first'
            (smallest row) merges its features, and the voxels come out sorted by (batch, x, y, z), duplicates
            or not. 'keep' keeps all rows as they are: layers and pooling see the first row of each voxel, and
            every row of it gets the result; what works row by row works on all.
        spatial_shape: one int or three (X, Y, Z): the voxels lie in a grid of this shape from 0 on, and what
            layers make of them in that of torch's output shape; see `CoordSet`. Default: no borders.

    Raises:
        TypeError, ValueError: naming the argument and the offending row: wrong type, dtype, shape or device,
            numbers of rows that differ, coordinates or batch indices out of range or outside of the grid,
            duplicates.

    Equality is identity. Supports `torch.save`, pickle, deepcopy (coordinates are shared) and torch's pytree.
    """

    _feats: torch.Tensor
    _coord_set: CoordSet
    _stride: Triple
    _record: Record | None
    """of the convolution that made the features"""
    _applied: tuple[str, ...] = ()
    """what was applied to its result since"""

    @_or_fields
    def __init__(
        self,
        coords: torch.Tensor | CoordSet,
        feats: torch.Tensor,
        batch_size: int | None = None,
        stride: int | Sequence[int] = 1,
        duplicates: str = "error",
        spatial_shape: int | Sequence[int] | None = None,
    ) -> None:
        if duplicates not in ("error", "keep", *REDUCTIONS):
            raise ValueError(
                f"duplicates must be 'error', 'keep', {', '.join(map(repr, REDUCTIONS))}, got {duplicates!r}"
            )
        feats = as_tensor(feats, "feats")
        if isinstance(coords, CoordSet):
            if batch_size is not None and integer(batch_size) != coords.batch_size:
                raise ValueError(f"batch_size is {batch_size}, the CoordSet has {coords.batch_size}")
            _check_feats(feats, coords.num, coords.device)
            coord_set = coords if spatial_shape is None else coords.with_spatial_shape(spatial_shape)
        else:
            rows: torch.Tensor = as_tensor(coords, "coords")
            check_columns(rows)
            _check_feats(feats, rows.shape[0], rows.device)
            if duplicates in ("error", "keep"):
                coord_set = CoordSet.of(rows, batch_size, spatial_shape, duplicates)
            else:
                shape = check_spatial_shape(spatial_shape)
                if shape is not None:
                    check_inside(rows, shape)
                coord_set, feats = merge(rows, feats, batch_size, duplicates)
                coord_set.spatial_shape = shape
        self._start(coord_set, feats, positive_triple(stride, "stride"))

    def _start(
        self,
        coord_set: CoordSet,
        feats: torch.Tensor,
        stride: Triple,
        record: Record | None = None,
        applied: tuple[str, ...] = (),
    ) -> None:
        self._coord_set = coord_set
        self._feats = feats
        self._stride = stride
        self._record = record
        self._applied = applied

    @classmethod
    def _make(
        cls,
        coord_set: CoordSet,
        feats: torch.Tensor,
        stride: Triple,
        record: Record | None = None,
        applied: tuple[str, ...] = (),
    ) -> Voxels:
        """From parts that fit together."""
        made = cls.__new__(cls)
        made._start(coord_set, feats, stride, record, applied)
        return made

    def _after(self, feats: torch.Tensor, what: str) -> Voxels:
        """What a function of every row, named `what`, made of the features; the record comes along."""
        if self._record is None:
            return Voxels._make(self._coord_set, feats, self._stride)
        return Voxels._make(self._coord_set, feats, self._stride, self._record, (*self._applied, what))

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def coord_set(self) -> CoordSet:
        """The coordinate set, shared by all voxels on the same coordinates; kernel maps are cached on it."""
        return self._coord_set

    @property
    def coords(self) -> torch.Tensor:
        """(N, 4) int32 batch, x, y, z, contiguous; to be read only, see `CoordSet.coords`."""
        return self._coord_set.exposed()

    @property
    def feats(self) -> torch.Tensor:
        """(N, C) features."""
        return self._feats

    @property
    def batch_size(self) -> int:
        return self._coord_set.batch_size

    @property
    def stride(self) -> Triple:
        """Tensor stride per axis."""
        return self._stride

    @property
    def spatial_shape(self) -> Triple | None:
        """(X, Y, Z) of the grid that the voxels lie in; None: a grid without borders."""
        return self._coord_set.spatial_shape

    @property
    def maps(self) -> MapsByKey:
        """The kernel maps from and to these voxels that layers with a `map_key` ran over, by that key."""
        return MapsByKey(self._coord_set.sites)

    @property
    def counts(self) -> torch.Tensor:
        """(batch_size,) int64 voxels of each sample, zeros for empty samples, on the voxels' device; to be
        read only."""
        return self._coord_set.counts

    @property
    def num_voxels(self) -> int:
        return self._coord_set.num

    @property
    def device(self) -> torch.device:
        return self._feats.device

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the features."""
        return self._feats.dtype

    @property
    def channels(self) -> int:
        """Number of features C of a voxel."""
        return self._feats.shape[1]

    @property
    def requires_grad(self) -> bool:
        """Whether the features do."""
        return self._feats.requires_grad

    def __len__(self) -> int:
        """Number of voxels N."""
        return self._coord_set.num

    def __bool__(self) -> bool:
        """True, without voxels too: `x or other` asks whether there is an x."""
        return True

    def __repr__(self) -> str:
        shape = "" if self.spatial_shape is None else f", spatial_shape={self.spatial_shape}"
        return (
            f"Voxels(num_voxels={self.num_voxels}, channels={self._feats.shape[1]}, dtype={self.dtype}, "
            f"device='{self.device}', batch_size={self.batch_size}, stride={self._stride}{shape})"
        )

    # ---- same coordinates ----------------------------------------------------------------------------------

    def sites(self) -> Voxels:
        """What layers see: the distinct voxels with the features of the first row of each; itself unless rows
        repeat (duplicates='keep')."""
        repeated = self._coord_set.repeated
        if repeated is None:
            return self
        feats = gather_rows(self._feats, repeated.rows.get()[0])
        return Voxels._make(repeated.sites, feats, self._stride)

    def with_feats(self, feats: torch.Tensor) -> Voxels:
        """Other features (N, C') on the same coordinates. TypeError or ValueError as in the constructor."""
        feats = as_tensor(feats, "feats")
        _check_feats(feats, self._coord_set.num, self._coord_set.device)
        return Voxels._make(self._coord_set, feats, self._stride)

    def with_spatial_shape(self, spatial_shape: int | Sequence[int] | None) -> Voxels:
        """The same voxels in a grid of this shape; see `CoordSet.with_spatial_shape`."""
        coord_set = self._coord_set.with_spatial_shape(spatial_shape)
        return Voxels._make(coord_set, self._feats, self._stride, self._record, self._applied)

    def to(self, *args: Any, **kwargs: Any) -> Voxels:
        """Features to a dtype, everything to a device; arguments as in `torch.Tensor.to`. Coordinates stay
        int32.

        Voxels that shared coordinates before share them afterwards.
        """
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        if dtype is not None and dtype not in DTYPE_NAMES:
            raise TypeError(f"features can be {ANY_DTYPE}, not {dtype}")
        feats = self._feats.to(device=device, dtype=dtype, non_blocking=non_blocking)
        coord_set = self._coord_set if device is None else self._coord_set.to(device, non_blocking)
        return Voxels._make(coord_set, feats, self._stride)

    def detach(self) -> Voxels:
        """The same voxels, out of the autograd graph."""
        feats = self._feats.detach()
        return Voxels._make(self._coord_set, feats, self._stride, self._record, self._applied)

    def half(self) -> Voxels:
        return self.to(torch.float16)

    def bfloat16(self) -> Voxels:
        return self.to(torch.bfloat16)

    def float(self) -> Voxels:
        return self.to(torch.float32)

    def double(self) -> Voxels:
        return self.to(torch.float64)

    def cpu(self) -> Voxels:
        return self.to("cpu")

    def cuda(self, device: torch.device | int | str | None = None) -> Voxels:
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or "cuda")

    def pin_memory(self) -> Voxels:
        """Page-locked copy, as a DataLoader with pin_memory=True makes.

        Voxels that shared coordinates before share them afterwards.
        """
        return Voxels._make(self._coord_set.pin_memory(), self._feats.pin_memory(), self._stride)

    def __add__(self, other: object) -> Voxels:
        """With a number: added to every feature. With Voxels: sum of the features on equal coordinates, in
        this one's row order.

        Coordinates are equal when they are the same set or hold the same voxels, in whatever row order.
        ValueError otherwise, or when batch size, stride, spatial shape or device differ.
        """
        if _is_number(other):
            return self._after(self._feats + other, f"+ {other}")
        if not isinstance(other, Voxels):
            return NotImplemented
        right = self.align(other)
        if self._feats.shape[1] != right.shape[1]:
            raise ValueError(
                f"cannot add voxels: {self._feats.shape[1]} channels on the left, "
                f"{right.shape[1]} on the right"
            )
        return Voxels._make(self._coord_set, self._feats + right, self._stride)

    def __sub__(self, other: object) -> Voxels:
        return self._after(self._feats - other, f"- {other}") if _is_number(other) else NotImplemented

    def __rsub__(self, other: object) -> Voxels:
        return self._after(other - self._feats, f"{other} -") if _is_number(other) else NotImplemented

    def __mul__(self, other: object) -> Voxels:
        """Every feature times a number."""
        return self._after(self._feats * other, f"* {other}") if _is_number(other) else NotImplemented

    def __truediv__(self, other: object) -> Voxels:
        """Every feature divided by a number."""
        return self._after(self._feats / other, f"/ {other}") if _is_number(other) else NotImplemented

    def __radd__(self, other: object) -> Voxels:
        return self + other if _is_number(other) else NotImplemented

    def __rmul__(self, other: object) -> Voxels:
        return self * other if _is_number(other) else NotImplemented

    def __neg__(self) -> Voxels:
        return self._after(-self._feats, "neg")

    def align(self, other: Voxels, verb: str = "add") -> torch.Tensor:
        """The features of `other`, whose coordinates are equal, in this one's row order.

        Costs nothing when both share their coordinate set; otherwise the coordinates are compared, on a GPU
        with one host synchronisation. ValueError ("cannot <verb> voxels: ...") as for `+`.
        """
        for name in ("device", "batch_size", "stride", "spatial_shape"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"cannot {verb} voxels: {name} {mine} on the left, {theirs} on the right")
        if self._coord_set.equal(other._coord_set):
            return other._feats
        if self._coord_set.repeated is not None or other._coord_set.repeated is not None:
            raise ValueError(f"cannot {verb} voxels: they have duplicates, and other rows")
        if self.num_voxels != other.num_voxels:
            raise ValueError(
                f"cannot {verb} voxels: {self.num_voxels} on the left, {other.num_voxels} on the right"
            )
        rows = other._coord_set.lookup(self.coords)
        if bool((rows < 0).any()):
            row = int(torch.nonzero(rows < 0)[0])
            raise ValueError(
                f"cannot {verb} voxels: row {row} of the left, {tuple(self.coords[row].tolist())}, "
                "is not in the right"
            )
        return other._feats[rows]

    # ---- dense grids ---------------------------------------------------------------------------------------

    def dense(
        self, spatial_shape: Sequence[int] | None = None, origin: Sequence[int] = (0, 0, 0)
    ) -> torch.Tensor:
        """(batch_size, C, X, Y, Z) grid with zeros where there is no voxel. Differentiable.

        Args:
            spatial_shape: (X, Y, Z). Default: that of the voxels less `origin`, or where they have none just
                large enough.
            origin: coordinates (x, y, z) of the grid's first cell.

        Of duplicates (duplicates='keep') the first row counts. Raises ValueError naming the first voxel that
        lies outside the grid.
        """
        if self._coord_set.repeated is not None:
            return self.sites().dense(spatial_shape, origin)
        start = three_integers(origin, "origin")
        if self._coord_set.sized and spatial_shape is not None:
            return self._coord_set.dense(self._feats, positive_triple(spatial_shape, "spatial_shape"), start)
        cell = self.coords[:, 1:].long() - torch.tensor(start, device=self.device, dtype=torch.int64)
        if spatial_shape is None and self.spatial_shape is not None:
            shape = tuple(n - first for n, first in zip(self.spatial_shape, start, strict=True))
            shape = positive_triple(shape, "spatial_shape less origin")
        elif spatial_shape is None:
            shape = tuple((cell.amax(0) + 1).clamp(min=1).tolist()) if self.num_voxels else (1, 1, 1)
        else:
            shape = positive_triple(spatial_shape, "spatial_shape")
        outside = ((cell < 0) | (cell >= torch.tensor(shape, device=self.device, dtype=torch.int64))).any(1)
        if bool(outside.any()):
            row = int(torch.nonzero(outside)[0])
            raise ValueError(
                f"coords row {row}, {tuple(self.coords[row].tolist())}, lies outside the grid of "
                f"origin {start} and shape {shape}"
            )
        grid = self._feats.new_zeros((self.batch_size, *shape, self._feats.shape[1]))
        grid = grid.index_put((self.coords[:, 0].long(), *cell.unbind(1)), self._feats)
        return grid.permute(0, 4, 1, 2, 3)

    @staticmethod
    def from_dense(
        dense: torch.Tensor,
        mask: torch.Tensor | None = None,
        origin: Sequence[int] = (0, 0, 0),
        stride: int | Sequence[int] = 1,
    ) -> Voxels:
        """Voxels of a (B, C, X, Y, Z) grid, sorted by (batch, x, y, z). Differentiable with respect to
        `dense`.

        `mask` (B, X, Y, Z) bool says which cells become voxels; default: those with a channel that is not
        zero. `origin` is the coordinate (x, y, z) of the first cell. TypeError or ValueError names what does
        not fit.
        """
        dense, mask = as_tensor(dense, "dense"), as_tensor(mask, "mask")
        if not isinstance(dense, torch.Tensor) or dense.dtype not in DTYPE_NAMES:
            what = dense.dtype if isinstance(dense, torch.Tensor) else type(dense).__name__
            raise TypeError(f"dense must be a {ANY_DTYPE} tensor, got {what}")
        if dense.dim() != 5:
            raise ValueError(f"dense must be (B, C, X, Y, Z), got shape {tuple(dense.shape)}")
        if dense.shape[0] > BATCH_MAX + 1:
            raise ValueError(f"dense has {dense.shape[0]} samples, at most {BATCH_MAX + 1} are possible")
        last = dense.permute(0, 2, 3, 4, 1)
        if mask is None:
            mask = (last != 0).any(-1)
        elif not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
            raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
        elif mask.shape != last.shape[:-1] or mask.device != dense.device:
            raise ValueError(
                f"mask must be {tuple(last.shape[:-1])} on {dense.device}, got {tuple(mask.shape)} "
                f"on {mask.device}"
            )
        start = three_integers(origin, "origin")
        for axis, (first, cells) in enumerate(zip(start, dense.shape[2:], strict=True)):
            if first < COORD_MIN or first + cells - 1 > COORD_MAX:
                raise ValueError(f"origin {start}: {'xyz'[axis]} of the grid leaves {COORD_MIN}..{COORD_MAX}")
        coords = torch.nonzero(mask)
        index = coords.unbind(1)
        coords = (coords + torch.tensor((0, *start), device=dense.device, dtype=torch.int64)).int()
        coords = coords.contiguous()  # nonzero gives columns on CUDA
        return Voxels._make(
            CoordSet.trusted(coords, dense.shape[0]), last[index], positive_triple(stride, "stride")
        )

    # ---- points --------------------------------------------------------------------------------------------

    @staticmethod
    def from_points(
        points: torch.Tensor | Sequence[torch.Tensor],
        feats: torch.Tensor | Sequence[torch.Tensor],
        voxel_size: Number | Sequence[Number],
        reduce: str = "mean",
        *,
        batch_index: torch.Tensor | None = None,
        batch_size: int | None = None,
        origin: Sequence[Number] = (0.0, 0.0, 0.0),
    ) -> Voxels:
        """Voxels of the cells that hold points, sorted by (batch, x, y, z). Differentiable with respect to
        `feats`.

        Cell i of an axis is the half-open interval [i, i + 1): i = floor((p - origin) / voxel_size), computed
        in fp64 whatever the dtype of the points. Features of a cell are combined pairwise in row order, in
        fp32 for half features and in fp64 for the others, so that CPU and GPU give the same bits.

        Args:
            points: (N, 3) floating point positions, or a sequence with one (N_i, 3) tensor per sample.
            feats: (N, C) features, or a sequence of (N_i, C), as `points`.
            voxel_size: edge length of a cell, one number or one per axis.
            reduce: 'mean', 'sum', 'max', 'min' or 'first' (smallest row of the cell).
            batch_index: (N,) int32 or int64 sample of each point, only with one `points` tensor. Default:
                sample 0.
            batch_size: number of samples. Default: the length of the sequence, or largest index + 1 (at least
                1).
            origin: position of the corner of cell (0, 0, 0).

        Raises:
            TypeError, ValueError: naming the argument and the offending row: non-finite points, cells outside
                -131072..131071, wrong dtype, shape or device.
        """
        coord_set, merged, _ = quantize(points, feats, voxel_size, reduce, batch_index, batch_size, origin)
        return Voxels._make(coord_set, merged, (1, 1, 1))

    # ---- samples -------------------------------------------------------------------------------------------


# ---- helpers -----------------------------------------------------------------------------------------------


def _is_number(value: object) -> TypeGuard[float]:
    """A real number; no bool, of which a sum would be meant by mistake."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_feats(feats: torch.Tensor, rows: int, device: torch.device) -> None:
    if not isinstance(feats, torch.Tensor):
        raise TypeError(f"feats must be a tensor, got {type(feats).__name__}")
    if feats.dtype not in DTYPE_NAMES:
        raise TypeError(f"feats must be {ANY_DTYPE}, got {feats.dtype}")
    if feats.dim() != 2 or feats.layout != torch.strided:
        raise ValueError(f"feats must be (N, C) and dense, got {feats.layout} of shape {tuple(feats.shape)}")
    if feats.shape[0] != rows:
        raise ValueError(f"feats has {feats.shape[0]} rows, coords has {rows}")
    if feats.device != device:
        raise ValueError(f"feats is on {feats.device}, coords is on {device}")


# ---- pytree: torch.compile, torch.export and data loaders see the two tensors ------------------------------


@dataclass(frozen=True)
class _Context:
    """What the tensors do not say. Two trees of different coordinate sets still have the same structure."""

    batch_size: int
    stride: Triple
    spatial_shape: Triple | None = None
    coord_set: CoordSet | None = field(default=None, compare=False)


def _flatten(voxels: Voxels) -> tuple[list[Any], _Context]:
    facts = voxels.batch_size, voxels.stride, voxels.spatial_shape
    return [voxels.coords, voxels.feats], _Context(*facts, voxels.coord_set)


def _flatten_with_keys(voxels: Voxels) -> tuple[list[tuple[pytree.KeyEntry, Any]], _Context]:
    children, context = _flatten(voxels)
    keys = (pytree.GetAttrKey("coords"), pytree.GetAttrKey("feats"))
    return list(zip(keys, children, strict=True)), context


def _unflatten(children: Any, context: _Context) -> Voxels:
    coords, feats = children
    if isinstance(coords, torch.Tensor) and coords.dtype != torch.int32:
        raise TypeError(f"coords of voxels must stay int32, a tree_map made them {coords.dtype}")
    if context.coord_set is not None and isinstance(coords, torch.Tensor):
        coord_set = context.coord_set.same_as(coords)
    else:
        coord_set = CoordSet.trusted(coords, context.batch_size, spatial_shape=context.spatial_shape)
    return Voxels._make(coord_set, feats, context.stride)


pytree.register_pytree_node(
    Voxels,
    _flatten,
    _unflatten,
    serialized_type_name="voxmma.Voxels",
    to_dumpable_context=lambda context: [context.batch_size, context.stride, context.spatial_shape],
    from_dumpable_context=lambda dumped: _Context(
        dumped[0], tuple(dumped[1]), None if dumped[2] is None else tuple(dumped[2])
    ),
    flatten_with_keys_fn=_flatten_with_keys,
)
