"""Kernel maps under keys of the caller's, kept on the sets they lead from and to."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from voxmma.sparse.coords import CoordSet
from voxmma.sparse.finer import Finer
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.maps import KernelMap, kernel_map


class Keyed(NamedTuple):
    """What a set knows of a map under a key: its kernel and the other set."""

    geometry: Geometry
    transposed: bool
    source: Finer | None = None
    """on the output set: the inputs, which live on in it"""
    target: weakref.ref[CoordSet] | None = None
    """on the input set: the outputs; both None: the set itself"""

    def leads_here_from(self, other: CoordSet | None) -> bool:
        """Whether it is kept on its output set and the inputs are `other`, None for the set itself."""
        if self.source is None or other is None:
            return self.source is None and self.target is None and other is None
        return self.source.came_from(other)

    @property
    def gone(self) -> bool:
        """Whether nobody holds the other set."""
        if self.source is not None:
            return not self.source.alive
        return self.target is not None and self.target() is None

    def map(self, here: CoordSet) -> KernelMap | None:
        """The map, of the set that this is kept on; None where its outputs are gone."""
        size, stride, dilation, padding = self.geometry
        given = here if self.source is None else self.source.get()
        target = here if self.target is None else self.target()
        if target is None:
            return None
        return kernel_map(
            given,
            size,
            stride=stride,
            dilation=dilation,
            padding=padding,
            out_coords=target,
            transposed=self.transposed,
        )


class MapsByKey(Mapping[str, KernelMap]):
    """The kernel maps from or to a coordinate set that layers with a `map_key` ran over, by that key.

    Read-only. The map from a set is listed as long as its outputs live; the map to a set always is.
    """

    def __init__(self, coords: CoordSet) -> None:
        self._coords = coords

    def __getitem__(self, key: str) -> KernelMap:
        made = self._coords.keyed[key].map(self._coords)
        if made is None:
            raise KeyError(key)
        return made

    def __iter__(self) -> Iterator[str]:
        return (key for key, kept in tuple(self._coords.keyed.items()) if kept.source or not kept.gone)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def keep_map(key: str, made: KernelMap) -> None:
    """Keeps `made` under `key` on both of its sets.

    ValueError where another map to one of them has the key.
    """
    given, target = made.in_coords, made.out_coords
    geometry = made.core.geometry
    own = target is given
    with target._index.lock:
        known = target.keyed.get(key)
        same = known is not None and known[:2] == (geometry, made.reverse)
        if same and known is not None and known.leads_here_from(None if own else given):
            return
        if known is not None and known.target is None and not known.gone:
            raise _taken(key)
        source = None if own else Finer(given, geometry)
        target.keyed[key] = Keyed(geometry, made.reverse, source)
    if own:
        return
    with given._index.lock:
        known = given.keyed.get(key)
        if known is not None and known.target is None and not known.gone:
            raise _taken(key)
        given.keyed[key] = Keyed(geometry, made.reverse, None, weakref.ref(target))


def inverse_map(key: str, coords: CoordSet) -> KernelMap:
    """The opposite of the map under `key` that leads to `coords`. ValueError where there is none."""
    known = coords.keyed.get(key)
    made = None if known is None or known.target is not None else known.map(coords)
    if made is None:
        there = ", ".join(repr(name) for name, kept in coords.keyed.items() if kept.target is None) or "none"
        raise ValueError(
            f"inverse_of={key!r}: no layer with this map_key made the coordinates of x, which know {there}"
        )
    return made.transposed()


def _taken(key: str) -> ValueError:
    return ValueError(f"map_key={key!r} is the key of another map to these coordinates: take another one")
