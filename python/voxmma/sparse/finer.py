"""The link from a coordinate set to the finer one that it was made from."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from voxmma.sparse.coords import CoordSet
    from voxmma.sparse.geometry import Geometry


class Finer:
    """The finer set that a set was made from, and how: what a transposed layer goes back to.

    Holds the finer set's coordinates, index and map tensors, not the object, which holds the sets made from
    it: a cycle would keep GPU memory until Python's garbage collector runs. When nothing else holds the finer
    set any more, `get()` makes one of the same rows.

    `given`: the coarser set was not made from the finer one but given to a layer on it as `coords`.
    """

    def __init__(
        self, fine: CoordSet, geometry: Geometry, given: bool = False, ambiguous: bool = False
    ) -> None:
        self.geometry = geometry
        self.given = given
        self.ambiguous = ambiguous
        """whether a layer on yet another set that is alive was given the coarser set, too"""
        self.sides: dict[bool, Any] = {}
        """tensors of the map between the two, shared with its MapCore"""
        self._fine = weakref.ref(fine)
        self._make = fine._of_parts
        self._parts = (fine._made, fine.batch_size, fine._index, fine.spatial_shape, fine.finer, fine._full)

    def get(self) -> CoordSet:
        """The finer set: the one it came from while that lives."""
        fine = self._fine()
        if fine is None:
            made, batch_size, index, shape, finer, full = self._parts
            with index.lock:
                fine = self._fine()
                if fine is None:
                    fine = self._make(made, batch_size, index, shape)
                    fine.finer, fine._full = finer, full
                    self._fine = weakref.ref(fine)
        return fine

    @property
    def kind(self) -> tuple[Geometry, bool, bool]:
        """What a copy of the link is made with, beside a copy of the finer set."""
        return self.geometry, self.given, self.ambiguous

    def came_from(self, fine: CoordSet) -> bool:
        return self._fine() is fine

    @property
    def alive(self) -> bool:
        """Whether somebody holds the finer set."""
        return self._fine() is not None
