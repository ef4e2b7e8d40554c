"""The index of a coordinate set: what is derived from the coordinates alone, when first asked for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from voxmma._extension import _C
from voxmma.sparse.cached import Made, new_lock, outside_transforms, refuse_capture
from voxmma.sparse.checks import first_unpackable
from voxmma.sparse.packing import BATCH_MAX, COORD_MAX, COORD_MIN, Bounds, first_duplicate, pack

if TYPE_CHECKING:
    from voxmma.sparse.coords import Repeated

_COORDS = "the coordinates of a coordinate set"
_SORTED = "the sorted keys of a coordinate set"
_HASHED = "the index tensors of a coordinate set"
_COUNTS = "the voxel counts of a coordinate set"


class HashIndex(NamedTuple):
    """GPU index of a coordinate set (csrc/include/voxmma/map.h)."""

    order: torch.Tensor
    """(N,) int32 rows along a Morton curve"""
    hash_blocks: torch.Tensor
    """(slots, 4) int32 hash table of its 2x2x2 blocks"""


@dataclass(eq=False, slots=True)
class _Index:
    """What is derived from the coordinates alone, when first asked for. Shared by `Finer.get()`'s sets."""

    counts: Made | None = None
    ordered: Made | None = None
    hashed: Made | None = None
    segments: Made | None = None
    bounds: Bounds | None = None
    lock: AbstractContextManager[Any] = field(default_factory=new_lock)


class Indexed:
    """What a coordinate set knows of its rows alone. CoordSet has the slots."""

    __slots__ = ()

    if TYPE_CHECKING:
        _made: Made
        _version: int
        _index: _Index
        batch_size: int
        repeated: Repeated | None

    @property
    def _coords(self) -> torch.Tensor:
        """The coordinates without a look at streams and writes."""  # no slot: torch 2.10's dynamo minds two
        return self._made.tensors[0]

    @property
    def coords(self) -> torch.Tensor:
        """(N, 4) int32, contiguous; to be read only. RuntimeError once torch has written into it or a view.

        (Writes through .data, numpy or DLPack go unseen. The maps and sets made before are then wrong.)
        """
        return self._made.get()[0]

    def use(self, made: Made) -> None:
        """What a repeated call does before it reads the map tensors `made`, at little cost."""
        if self._made.tensors[0]._version != self._version:
            self._made.check()
        made.use()

    @property
    def num(self) -> int:
        """Number of voxels N."""
        return self._coords.shape[0]

    @property
    def device(self) -> torch.device:
        return self._coords.device

    @property
    def counts(self) -> torch.Tensor:
        """(batch_size,) int64 voxels of each sample on the set's device, zeros for empty samples; to be read
        only. RuntimeError once it was written to."""
        return self._of_index("counts", self._count, _COUNTS)[0]

    def _count(self) -> tuple[torch.Tensor, ...]:
        batch = self.coords[:, 0].long()
        zeros = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
        return (zeros.index_add_(0, batch, torch.ones_like(batch)),)

    @property
    def bounds(self) -> Bounds:
        """A box around the voxels: as small as it can be where that is known without waiting for a GPU."""
        if self._index.bounds is None:
            self._index.bounds = (0, *[COORD_MIN] * 3, max(self.batch_size - 1, 0), *[COORD_MAX] * 3)
        return self._index.bounds

    def _index_cuda(
        self, order: torch.Tensor, hash_blocks: torch.Tensor, found: list[int]
    ) -> tuple[int, int, int, int]:
        bad, duplicate, twin, *bounds = found
        self._set_hashed(order, hash_blocks)
        if self.num == 0:
            return bad, duplicate, twin, -1
        self._index.bounds = tuple(bounds)
        return bad, duplicate, twin, bounds[4]

    def _index_cpu(self) -> tuple[int, int, int, int]:
        if self.num == 0:
            return -1, -1, -1, -1
        low, high = (bound.tolist() for bound in torch.aminmax(self._coords, dim=0))
        batches, columns = low[0] >= 0 and high[0] <= BATCH_MAX, (min(low[1:]), max(high[1:]))
        if not batches or columns[0] < COORD_MIN or columns[1] > COORD_MAX:
            return first_unpackable(self._coords), -1, -1, -1
        duplicate, twin = first_duplicate(*self.sorted_keys())
        self._index.bounds = (*low, *high)
        return -1, duplicate, twin, high[0]

    def sorted_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed keys (N,) int64 in ascending order, by (batch, x, y, z), and the row of each, (N,) int64.

        RuntimeError when they were written to.
        """
        keys, order = self._of_index("ordered", self._sort, _SORTED)
        return keys, order

    def _sort(self) -> tuple[torch.Tensor, ...]:
        return torch.sort(pack(self.coords), stable=True)

    def _of_index(
        self, name: str, make: Callable[[], tuple[torch.Tensor, ...]], what: str
    ) -> tuple[torch.Tensor, ...]:
        """The tensors of a field of the index, made when there are none."""
        made: Made | None = getattr(self._index, name)
        if made is None:
            if torch.compiler.is_compiling():  # a traced tensor is one of its graph
                return make()
            with self._index.lock, torch.inference_mode(False), torch.no_grad(), outside_transforms():
                made = getattr(self._index, name)
                if made is None:
                    refuse_capture(what, self.device)
                    made = Made(make(), what)
                    setattr(self._index, name, made)
        return made.get()

    def _set_sorted(self, keys: torch.Tensor, order: torch.Tensor) -> None:
        self._index.ordered = Made((keys, order), _SORTED)

    def hash_index(self) -> HashIndex:
        """The GPU index; RuntimeError where this build has no CUDA kernels, and when it was written to.

        Never waits for the GPU. ValueError for a set with repeated rows.
        """
        if self.repeated is not None:
            raise ValueError("the voxels have duplicates (duplicates='keep'): merge them first")
        return HashIndex(*self._of_index("hashed", self._hash, _HASHED))

    def _hashed(self) -> tuple[torch.Tensor, ...]:
        """`hash_index()` where nothing is compiled and no row is repeated."""
        made = self._index.hashed
        return self.hash_index() if made is None else made.eager()

    def _hash(self) -> tuple[torch.Tensor, ...]:
        return _C.index_coords(self.coords, self.bounds)[:2]  # not indexed at construction: known to be valid

    def _set_hashed(self, order: torch.Tensor, hash_blocks: torch.Tensor) -> None:
        """Takes an index that was made on this stream before the set."""
        self._index.hashed = Made((order, hash_blocks), _HASHED, self._made.event)


def _made(coords: torch.Tensor, event: _C.StreamEvent | None = None) -> Made:
    """Coordinates as a set keeps them: tensors whose writes are counted, and which a backward can keep."""
    if not torch.compiler.is_compiling() and isinstance(coords, torch.Tensor) and coords.is_inference():
        with torch.inference_mode(False):
            coords = coords.clone()
    return Made((coords,), _COORDS, event)


def kernels_take(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one for kernels: on a GPU, and with memory, as under torch.func none is."""
    return tensor.is_cuda and not torch._C._are_functorch_transforms_active()


def gather_rows(feats: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """feats[rows] by the operator whose backward is deterministic on the device although rows repeat."""
    return feats[rows] if feats.is_cuda else feats.index_select(0, rows)
