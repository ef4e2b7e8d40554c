"""Kernel maps as they are cached: the tensors of both directions, without the coordinate sets."""

from __future__ import annotations

import functools
import threading
import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch

from voxmma._dynamo import eager
from voxmma.sparse.cached import Made, keep, new_lock, refuse_capture
from voxmma.sparse.coords import _KEPT, CoordSet
from voxmma.sparse.geometry import Geometry

if TYPE_CHECKING:
    from voxmma._extension import _C
    from voxmma.sparse.ahead import Wanted


class Direction:
    """The tensors of one direction of a map, and how many pairs they hold.

    A plan whose size the GPU has not told yet has its statistics in `stats`: int64 (3,) units of 4 entries of
    uniq, passes, pairs. Until they are asked for, passes, frag and uniq end in unused room.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        num_pairs: int | None,
        stats: torch.Tensor | None = None,
        event: _C.StreamEvent | None = None,
    ) -> None:
        self.tensors = tensors
        kept = tensors if stats is None else [*tensors, stats]
        self.made = Made(kept, "the tensors of a kernel map", event)
        self.counts: Made | None = None
        """KernelMap.counts, once asked for"""
        self.wanted: Wanted | None = None
        """why it was made before a layer asked for it"""
        self._num_pairs = num_pairs
        self._stats = stats

    @property
    def num_pairs(self) -> int:
        """Waits for the GPU, once, where they have not been read."""
        if self._num_pairs is None:
            with _SETTLING:
                if self._num_pairs is None:
                    self._num_pairs = self._settle()
        return self._num_pairs

    def _settle(self) -> int:
        assert self._stats is not None
        refuse_capture("the number of pairs of a kernel map", self._stats.device)
        self.made.use()
        units, passes, pairs = self._stats.tolist()
        order, schedule, pass_list, frag, uniq, *rest = self.tensors
        self.tensors = [order, schedule, pass_list[:passes], frag[:passes], uniq[: 4 * units], *rest]
        return pairs

    def settled(self) -> list[torch.Tensor]:
        """The tensors without unused room. Waits like `num_pairs`."""
        _ = self.num_pairs
        self.made.get()
        return self.tensors

    @property
    def known(self) -> bool:
        """Whether the tensors are as long as they are used."""
        return self._num_pairs is not None

    def __reduce__(self) -> tuple[Any, ...]:
        return Direction, (self.settled(), self.num_pairs)


_SETTLING = threading.RLock()


#: Sets that maps lead to from now on, while somebody wants them to live.
held_sets: ContextVar[list[CoordSet] | None] = ContextVar("held_sets", default=None)


class MapCore:
    """Both directions of a map, cached on one of its two sets and holding none of them: it goes with either.

    `other` is the set it is not cached on (None: one and the same), `flipped` says that it is cached on the
    output set of its geometry: the finer set was made out of the coarser one.
    """

    def __init__(self, geometry: Geometry, other: CoordSet | None, flipped: bool = False) -> None:
        self.geometry = geometry
        self.key = cache_key(geometry, other, flipped)
        """cache key on the owning set: unique while both sets live"""
        self._other = None if other is None else weakref.ref(other)
        self.flipped = flipped
        self.symmetric = other is None and geometry.stride == (1, 1, 1) and geometry.mirrored
        self.sides: dict[bool, Direction] = {}
        """what has been built, by KernelMap.reverse"""
        self.freed = False
        self.lock = new_lock()

    @property
    def other(self) -> CoordSet | None:
        return None if self._other is None else self._other()

    def cached(self, owner: CoordSet) -> MapCore:
        """The core in the cache of `owner` under this one's key, which is this one where there was none."""
        if torch.compiler.is_dynamo_compiling():  # the sets are new and go with the trace
            return owner.maps.setdefault(self.key, self)
        with owner._index.lock:
            core = keep(owner.maps, self.key, self, _KEPT["maps"])
            other = self.other
            if core is self and other is not None:
                held = held_sets.get()
                if held is not None:
                    held.append(other)
                self._other = weakref.ref(other, functools.partial(_forget, weakref.ref(owner), self.key))
            if self._other is None:
                owner.own.pop(self.geometry, None)
                keep(owner.own, self.geometry, core, _KEPT["maps"])
        return core


def _forget(owner: weakref.ref[CoordSet], key: tuple[Any, ...], other: weakref.ref[CoordSet]) -> None:
    """Uncaches the map between an owner and a set that is gone."""
    holder = owner()
    core = None if holder is None else holder.maps.get(key)
    if holder is not None and core is not None and core._other is other:
        holder.maps.pop(key, None)


def cache_key(geometry: Geometry, other: CoordSet | None, flipped: bool = False) -> tuple[Any, ...]:
    """Identity of a map on the set it is cached on: the kernel's shape and the other set, never its size."""
    return geometry, None if other is None else id(other), flipped


def core_between(fine: CoordSet, coarse: CoordSet, geometry: Geometry, flipped: bool = False) -> MapCore:
    """The map from `fine` (the geometry's input) to `coarse`, made when there is none.

    Cached on `fine`, or with `flipped` on `coarse`; found on either.
    """
    owner, other = (coarse, fine) if flipped else (fine, coarse)
    if owner is other:
        flipped = False
    core = owner.maps.get(cache_key(geometry, None if owner is other else other, flipped))
    if core is None and owner is not other:
        core = other.maps.get(cache_key(geometry, owner, not flipped))
    return _new_core(owner, other, fine, coarse, geometry, flipped) if core is None else core


@eager
def _new_core(
    owner: CoordSet, other: CoordSet, fine: CoordSet, coarse: CoordSet, geometry: Geometry, flipped: bool
) -> MapCore:
    core = MapCore(geometry, None if owner is other else other, flipped)
    link = coarse.finer
    if link is not None and link.geometry == geometry and link.came_from(fine):
        core.sides = link.sides
    return core.cached(owner)
