"""Sets of tensors: what a tensor of coordinates leads back to."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from voxmma.sparse.cached import ByTensor

if TYPE_CHECKING:
    from voxmma.sparse.coords import CoordSet

_KEPT_OF_A_TENSOR = 64  # sets, beside those that live


class _Wrapped:
    """Of a tensor: the sets that were made of it, held weakly."""

    __slots__ = ("owner", "sets", "state")

    def __init__(self) -> None:
        self.owner: weakref.ref[CoordSet] | None = None
        """the set whose own coordinates it is, if it was handed out"""
        self.state: tuple[Any, ...] = ()
        """version, address, shape and strides that the sets are of"""
        self.sets: dict[tuple[Any, ...], weakref.ref[CoordSet]] = {}
        """by the other arguments"""

    def get(self, asked: tuple[Any, ...]) -> CoordSet | None:
        found = self.sets.get(asked)
        return None if found is None else found()

    def put(self, asked: tuple[Any, ...], made: CoordSet) -> None:
        if len(self.sets) >= _KEPT_OF_A_TENSOR:
            self.sets = {key: known for key, known in self.sets.items() if known() is not None}
        self.sets[asked] = weakref.ref(made)


_wrapped = ByTensor(_Wrapped)
