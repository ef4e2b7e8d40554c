"""Coordinate sets of which only a capacity is known while a network is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from voxmma._types import Triple
from voxmma.engine.errors import EngineError
from voxmma.engine.ops import flat
from voxmma.sparse.cached import Made
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.cores import Direction
from voxmma.sparse.derive import Derived, reach
from voxmma.sparse.finer import Finer
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.packing import Bounds

if TYPE_CHECKING:
    from voxmma.engine.record import Recorder

_OPS = torch.ops.voxmma


class NetworkSet(CoordSet):
    """A coordinate set whose number of rows lies on the device; `num` is its capacity.

    Made by an engine's recorder alone. Output sets and kernel maps of it are made by the operators of
    voxmma.engine.ops. What would have to look at the coordinates raises EngineError.
    """

    __slots__ = ("level", "parts", "recorder")

    sized = True
    level: int
    """its number among the recorder's levels"""
    parts: tuple[Tensor, ...]
    """coordinates, count and what else a voxmma.sparse.sized.SizedSet consists of, in its order"""
    recorder: Recorder

    @classmethod
    def make(
        cls,
        recorder: Recorder,
        level: int,
        parts: tuple[Tensor, ...],
        batch_size: int,
        bounds: Bounds,
        shape: Triple | None = None,
    ) -> NetworkSet:
        made = cls.trusted(parts[0], batch_size, bounds, shape)
        assert isinstance(made, NetworkSet)
        made.recorder, made.level, made.parts = recorder, level, parts
        recorder.sets.append(made)
        return made

    @property
    def count(self) -> Tensor:
        """(1,) int64"""
        return self.parts[1]

    def derive(self, key: Derived) -> CoordSet:
        """The output set of a layer."""
        recorder = self.recorder
        bounds = reach(self.bounds, *key)
        level = recorder.site(self.level, key, bounds)
        capacity = recorder.levels[level].marker
        *parts, status = _OPS.sized_sites(
            *self.parts,
            list(self.bounds),
            flat(key.geometry),
            key.to_children,
            list(key.shape or ()),
            capacity,
        )
        recorder.report("sites", level, status)
        made = NetworkSet.make(recorder, level, tuple(parts), self.batch_size, bounds, key.shape)
        if not key.to_children and key.geometry.stride != (1, 1, 1):
            made.finer = Finer(self, key.geometry)
        return made

    def plan(self, outputs: CoordSet, geometry: Geometry, reverse: bool) -> Direction:
        """The kernel map from these rows to those of `outputs`."""
        if not isinstance(outputs, NetworkSet):
            raise EngineError("an engine cannot take a layer to coordinates that are not made in the network")
        recorder = self.recorder
        number = recorder.plan(self.level, outputs.level, geometry, reverse)
        sets = [self] if outputs is self else [self, outputs]
        parts = [tensor for one in sets for tensor in one.parts]
        tensors, status = _OPS.sized_maps(parts, [0], [len(sets) - 1], flat(geometry), [int(reverse)], [1.0])
        recorder.report("map", number, status)
        return Direction(tensors, -1)

    def dense(self, feats: Tensor, shape: tuple[int, ...], origin: tuple[int, ...]) -> Tensor:
        """The grid of Voxels.dense."""
        grid, status = _OPS.sized_dense(
            feats, self._coords, self.count, self.batch_size, list(shape), list(origin)
        )
        self.recorder.report("dense", self.level, status)
        made: Tensor = grid
        return made

    def lookup(self, coords: Tensor) -> Tensor:
        """Rows (M,) int64 of any (M, 4) integers, -1 where the set has none."""
        made: Tensor = _OPS.sized_lookup(coords, *self.parts)
        return made

    def weighted(self, feats: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """voxmma.sparse.interpolate.weighted."""
        made: Tensor = _OPS.sized_weighted(feats, rows, weights)
        return made

    def check_points(self, points: Tensor) -> None:
        """Has the first row that is not finite reported; of points that are a level's rows, among those."""
        number = self.recorder.level_of(points)
        if number < 0:
            count = torch.full((1,), len(points), dtype=torch.int64, device=points.device)
        else:
            count = self.recorder.count(number)
        self.recorder.report("points", number, _OPS.sized_finite(points, count))

    def tree(self) -> tuple[Tensor, ...]:
        return tuple(_OPS.sized_tree(self._coords, self.count, self.batch_size))

    @property
    def coords(self) -> Tensor:
        """(capacity, 4) int32, zeros behind the rows."""
        made = self._index.counts  # nothing else is kept there
        if made is None:
            made = Made((_OPS.sized_rows(self._coords, self.count),), "the coordinates of a sized set")
            self._index.counts = made
        return made.get()[0]

    @property
    def counts(self) -> Tensor:
        made: Tensor = _OPS.sized_counts(self._coords, self.count, self.batch_size)
        return made

    def _refuse(self, *_: Any) -> NoReturn:
        raise EngineError("an engine cannot compare, unite or intersect coordinates while it runs")

    sorted_keys = hash_index = _sort = _hash = _refuse
