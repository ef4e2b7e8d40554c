"""What an engine is given: described when it is compiled, checked in every frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from voxmma import _surroundings
from voxmma._extension import _C
from voxmma._types import Triple, as_tensor, positive
from voxmma.engine import ops
from voxmma.sparse import segments
from voxmma.sparse.checks import check_columns
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import DEFAULT_MAX_VOXELS
from voxmma.sparse.points import grid_of, join_samples
from voxmma.sparse.tensor import Voxels

MOST_ROWS = min(segments.BLOCK**ops.LEVELS, DEFAULT_MAX_VOXELS)
"""that an engine takes"""
_ONE = pytree.tree_structure([0])  # a single input


@dataclass(frozen=True, eq=False)
class Points:
    """Points in place of Voxels: an engine makes the voxels of them, as `Voxels.from_points` does.

    Args:
        points: (N, 3) floating point positions.
        feats: (N, C) features.
        voxel_size: edge length of a cell, one number or one per axis.
        batch_index: (N,) int64 sample of each point. Default: sample 0.
        batch_size: number of samples.
        reduce: 'mean' or 'sum' of the features of a cell.
        origin: position of the corner of cell (0, 0, 0).

    Raises TypeError, ValueError: naming the argument. Values are looked at by the engine.
    """

    points: Tensor
    feats: Tensor
    voxel_size: float | Sequence[float]
    batch_index: Tensor | None = None
    batch_size: int = 1
    reduce: str = "mean"
    origin: Sequence[float] = (0.0, 0.0, 0.0)

    def __post_init__(self) -> None:
        points, feats, batch = (
            as_tensor(getattr(self, name), name) for name in ("points", "feats", "batch_index")
        )
        join_samples(points, feats, batch, None, check=False)
        if batch is not None and batch.dtype != torch.int64:
            raise TypeError(f"batch_index must be int64, got {batch.dtype}")
        if positive(self.batch_size, "batch_size") > 1 and batch is None:
            raise ValueError(f"batch_size is {self.batch_size}: batch_index must say whose the points are")
        if self.reduce not in ("mean", "sum"):
            raise ValueError(f"reduce must be 'mean' or 'sum', got {self.reduce!r}")
        origin, edge = grid_of(self.voxel_size, self.origin)
        made = {"points": points, "feats": feats, "batch_index": batch, "voxel_size": edge, "origin": origin}
        for name, value in made.items():
            object.__setattr__(self, name, value)

    @property
    def device(self) -> torch.device:
        return self.points.device

    @property
    def grid(self) -> Grid:
        edge, origin = tuple(self.voxel_size), tuple(self.origin)  # type: ignore[arg-type]
        return Grid(self.points.dtype, edge, origin, self.reduce)

    def voxels(self) -> Voxels:
        """Of the same arguments, now."""
        return Voxels.from_points(
            self.points, self.feats, self.voxel_size, self.reduce, batch_index=self.batch_index,
            batch_size=self.batch_size, origin=self.origin,
        )  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """The cells that an input's points fall into; dtype of the points."""

    dtype: torch.dtype
    edge: tuple[float, ...]
    origin: tuple[float, ...]
    reduce: str


def is_input(value: Any) -> bool:
    return isinstance(value, (Voxels, Points))


def _is_sparse(value: Any) -> bool:
    """Voxels, points, or a pair of tensors with coordinates first."""
    if type(value) is not tuple:
        return is_input(value)
    first = value[0] if len(value) == 2 else None
    return not isinstance(first, (Voxels, Points, tuple, list, dict)) and getattr(first, "ndim", 0) == 2


@dataclass(frozen=True)
class Input:
    """A place of the network's inputs: Voxels or Points (`root` their number), or a tensor of one shape."""

    shape: tuple[int, ...]
    """of the tensor, or (channels,)"""
    dtype: torch.dtype
    root: int = -1
    batch_size: int = 0
    stride: Triple = (1, 1, 1)
    spatial_shape: Triple | None = None
    grid: Grid | None = None
    """of points"""

    @property
    def sparse(self) -> bool:
        return self.root >= 0

    def buffers(self, rows: int, device: torch.device) -> list[Tensor]:
        """What a program reads. Of Voxels: coordinates, features, number. Of points: positions, features,
        number, and where there are several samples that of each. Else the tensor."""

        def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        if not self.sparse:
            return [zeros(self.shape, self.dtype)]
        made = [zeros((rows, *self.shape), self.dtype), zeros((1,), torch.int64)]
        if self.grid is None:
            return [zeros((rows, 4), torch.int32), *made]
        batch = [zeros((rows,), torch.int64)] if self.batch_size > 1 else []
        return [zeros((rows, 3), self.grid.dtype), *made, *batch]

    @property
    def count(self) -> int:
        """Number of buffers."""
        return 1 if not self.sparse else 3 + (self.grid is not None and self.batch_size > 1)

    def sources(self, frame: Any) -> list[Tensor | int]:
        """What a frame's part, as `check_frame` gives it, has for each buffer; see `put`."""
        if not self.sparse:
            return [frame]
        made = [frame.where, frame.feats, frame.size]
        return made if self.count == 3 else [*made, 0 if frame.batch is None else frame.batch]


def put(buffers: Sequence[Tensor], sources: Sequence[Tensor | int]) -> None:
    """Copies what `Input.sources` has for each buffer into its first rows and columns, or fills it."""
    if buffers and buffers[0].is_cuda:
        _C.put(buffers, sources)
        return
    for buffer, source in zip(buffers, sources, strict=True):
        if isinstance(source, int):
            buffer.fill_(source)
            continue
        if source.dtype == torch.int64 and buffer.dtype == torch.int32:  # what is too large is out of bounds
            source = source.clamp(-(1 << 30), 1 << 30)
        if buffer.shape != source.shape:
            buffer = buffer[: len(source)]
            if buffer.shape != source.shape:
                buffer = buffer[:, : source.shape[1]]
        buffer.copy_(source)


class Rows(NamedTuple):
    """A frame's part."""

    where: Tensor
    """coordinates or points"""
    feats: Tensor
    batch_size: int
    coord_set: CoordSet | None = None
    batch: Tensor | None = None

    @property
    def size(self) -> int:
        return self.where.shape[0]

    @property
    def kind(self) -> str:
        return "voxels" if self.where.shape[1] == 4 else "points"


def described(leaves: Sequence[Any]) -> list[Input]:
    found, roots = [], 0
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Voxels):
            found.append(
                Input((leaf.channels,), leaf.dtype, roots, leaf.batch_size, leaf.stride, leaf.spatial_shape)
            )
            roots += 1
        elif isinstance(leaf, Points):
            width = (leaf.feats.shape[1],)
            found.append(Input(width, leaf.feats.dtype, roots, leaf.batch_size, grid=leaf.grid))
            roots += 1
        elif isinstance(leaf, Tensor):
            found.append(Input(tuple(leaf.shape), leaf.dtype))
        else:
            raise TypeError(
                f"input {place} must be voxmma.Voxels, Points or a tensor, got {type(leaf).__name__}"
            )
    if not roots:
        raise TypeError("example must hold Voxels or Points")
    return found


def as_inputs(example: Any) -> list[Any]:
    return list(example) if isinstance(example, tuple) else [example]


@_surroundings.undisturbed()
def fresh(leaf: Any) -> Any:
    """A copy: of Voxels on a set of their own that nothing was made from yet. Of points their voxels."""
    if isinstance(leaf, Points):
        return leaf.voxels()
    if not isinstance(leaf, Voxels):
        return leaf.detach().clone()
    if leaf.coord_set.finer is not None:
        raise ValueError("the input was made by a strided layer: compile from what it was made from")
    copied = CoordSet.trusted(leaf.coords, leaf.batch_size, spatial_shape=leaf.spatial_shape)
    copied._index = replace(leaf.coord_set._index, segments=None)
    return Voxels._make(copied, leaf.feats.detach().clone(), leaf.stride)


def _flat(inputs: Sequence[Any], spec: Any, wanted: Sequence[Input]) -> list[Any]:
    """The inputs flat, pairs for Voxels not taken apart."""
    if len(inputs) == 1 and spec == _ONE and _is_sparse(inputs[0]):
        return [inputs[0]]
    for is_leaf in (_is_sparse, is_input):  # a pair may be two tensors, too
        leaves, its_spec = pytree.tree_flatten(list(inputs), is_leaf=is_leaf)
        if its_spec == spec:
            return list(leaves)
    form = pytree.tree_unflatten([_word(one) for one in wanted], spec)

    def word(value: Any) -> str:
        return "Points" if isinstance(value, Points) else "Voxels" if _is_sparse(value) else "tensor"

    got = pytree.tree_map(word, list(inputs), is_leaf=_is_sparse)
    raise TypeError(f"expected inputs built as {form}, got {got}".replace("'", ""))


def _word(given: Input) -> str:
    return "tensor" if not given.sparse else "Voxels" if given.grid is None else "Points"


def check_frame(inputs: Sequence[Any], spec: Any, wanted: Sequence[Input], device: torch.device) -> list[Any]:
    """The inputs flat: Rows of each sparse one."""
    leaves = _flat(inputs, spec, wanted)
    found: list[Any] = []
    for place, (given, leaf) in enumerate(zip(wanted, leaves, strict=True)):
        name = f"input {place}" if len(leaves) > 1 else "the input"
        if given.sparse:
            check = _check_voxels if given.grid is None else _check_points
            found.append(check(name, leaf, given, device))
            continue
        tensor = as_tensor(leaf, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(leaf).__name__}")
        _same(name, tensor, given.dtype, device)
        if tuple(tensor.shape) != given.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the engine takes {given.shape}")
        found.append(tensor)
    return found


def _check_voxels(name: str, leaf: Any, given: Input, device: torch.device) -> Rows:
    if isinstance(leaf, Voxels):
        for what, got, wanted in (
            ("stride", leaf.stride, given.stride),
            ("spatial_shape", leaf.spatial_shape, given.spatial_shape),
        ):
            if got != wanted:
                raise ValueError(f"{name} has {what} {got}, the engine takes {wanted}")
        _check_samples(name, leaf.batch_size, given)
        if leaf.coord_set.repeated is not None:
            raise ValueError(f"{name} has repeated rows: an engine takes distinct voxels")
        made = Rows(leaf.coords, leaf.feats, leaf.batch_size, leaf.coord_set)
    elif isinstance(leaf, tuple) and len(leaf) == 2:
        made = Rows(as_tensor(leaf[0], "coords"), as_tensor(leaf[1], "feats"), given.batch_size)
    else:
        raise TypeError(f"{name} must be Voxels or (coords, feats), got {type(leaf).__name__}")
    check_columns(made.where)
    _check_rows("coords", made, given, device)
    return made


def _check_points(name: str, leaf: Any, given: Input, device: torch.device) -> Rows:
    assert given.grid is not None
    if isinstance(leaf, Points):
        if leaf.grid != given.grid:
            raise ValueError(f"{name} is {leaf.grid}, the engine takes {given.grid}")
        _check_samples(name, leaf.batch_size, given)
        made = Rows(leaf.points, leaf.feats, leaf.batch_size, batch=leaf.batch_index)
    elif isinstance(leaf, tuple) and len(leaf) == 2 and given.batch_size == 1:
        made = Rows(as_tensor(leaf[0], "points"), as_tensor(leaf[1], "feats"), 1)
        if not isinstance(made.where, Tensor) or made.where.dim() != 2 or made.where.shape[1] != 3:
            raise ValueError(f"points must be (N, 3), got {getattr(made.where, 'shape', type(made.where))}")
        _same("points", made.where, given.grid.dtype, device)
    else:
        raise TypeError(f"{name} must be Points, got {type(leaf).__name__}")
    _check_rows("points", made, given, device)
    return made


def _check_samples(name: str, samples: int, given: Input) -> None:
    if samples > given.batch_size:
        raise ValueError(f"{name} has {samples} samples, the engine takes {given.batch_size}")


def _check_rows(what: str, made: Rows, given: Input, device: torch.device) -> None:
    where, feats = made.where, made.feats
    if not isinstance(feats, Tensor):
        raise TypeError(f"feats must be a tensor, got {type(feats).__name__}")
    _same("feats", feats, given.dtype, device)
    if where.device != device:
        raise ValueError(f"{what} is on {where.device}, the engine on {device}")
    rows, shape = made.size, feats.shape
    if len(shape) != 2 or shape[0] != rows:
        raise ValueError(f"feats must be ({rows}, C), got shape {tuple(shape)}")
    if shape[1] != given.shape[0]:
        raise ValueError(f"feats has {shape[1]} channels, the engine takes {given.shape[0]}")
    if rows > MOST_ROWS:
        raise ValueError(f"{what} has {rows:,} rows, an engine takes {MOST_ROWS:,} at most")


def _same(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, the engine takes {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the engine on {device}")
