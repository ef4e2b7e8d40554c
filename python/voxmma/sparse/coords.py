"""Coordinate sets: checked once, indexed once, shared by everything that lives on the same voxels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma._types import Triple, as_tensor, integer, triple
from voxmma.sparse.cached import ByTensor, Made, new_lock, refuse_capture

if TYPE_CHECKING:
    from voxmma.dispatch.calls import Repeat
    from voxmma.sparse.ahead import Place
    from voxmma.sparse.derive import Derived
    from voxmma.sparse.keyed import Keyed
    from voxmma.sparse.maps import Direction, Geometry, MapCore

COORD_BITS = 18
COORD_MIN = -(1 << (COORD_BITS - 1))
COORD_MAX = -COORD_MIN - 1
BATCH_MAX = 1022
_BATCH_BIAS = 512  # keeps the packed key of batch 0..1022 inside a signed 64-bit integer, in order
_SHIFTS = (3 * COORD_BITS, 2 * COORD_BITS, COORD_BITS, 0)
_INT32 = torch.iinfo(torch.int32)
_KEPT = {"maps": 64, "derived": 64, "calls": 512}  # most entries of a set's caches; the oldest leaves
_KEPT_OF_A_TENSOR = 64  # sets, beside those that live


def pack(coords: torch.Tensor) -> torch.Tensor:
    """(N, 4) packable coordinates -> (N,) int64 keys whose order is that of (batch, x, y, z)."""
    key, *axes = (coords.long() - COORD_MIN).unbind(1)
    key = key + (COORD_MIN - _BATCH_BIAS)
    for axis in axes:
        key = torch.add(axis, key, alpha=1 << COORD_BITS)
    return key


def pack_batch(batch: torch.Tensor) -> torch.Tensor:
    """What the batch column adds to a packed key. int64."""
    return (batch.long() - _BATCH_BIAS) << _SHIFTS[0]


def pack_axis(values: torch.Tensor, axis: int) -> torch.Tensor:
    """What one spatial column (axis 0, 1, 2 = x, y, z) adds to a packed key. int64."""
    return (values.long() - COORD_MIN) << _SHIFTS[1 + axis]


def unpack(keys: torch.Tensor) -> torch.Tensor:
    """(N,) packed keys -> (N, 4) int32 coordinates."""
    mask = (1 << COORD_BITS) - 1
    columns = [
        (keys >> _SHIFTS[0]) + _BATCH_BIAS,
        *(((keys >> shift) & mask) + COORD_MIN for shift in _SHIFTS[1:]),
    ]
    return torch.stack(columns, dim=1).int()


Bounds = tuple[int, ...]
"""smallest batch, x, y, z of a set, then the largest; or numbers beyond them"""


class HashIndex(NamedTuple):
    """GPU index of a coordinate set (csrc/include/voxmma/kernels.h)."""

    order: torch.Tensor
    """(N,) int32 rows along a Morton curve"""
    hash_blocks: torch.Tensor
    """(slots, 4) int32 hash table of its 2x2x2 blocks"""


@dataclass
class _Index:
    """What is derived from the coordinates alone, when first asked for. Shared by `Finer.get()`'s sets."""

    counts: Made | None = None
    ordered: Made | None = None
    hashed: Made | None = None
    segments: Made | None = None
    bounds: Bounds | None = None
    lock: AbstractContextManager[Any] = field(default_factory=new_lock)


class Repeated(NamedTuple):
    """The distinct voxels of a set whose rows repeat some of them."""

    sites: CoordSet
    """sorted by (batch, x, y, z)"""
    rows: Made
    """(M,) int64 first row of each; (N,) int64 which of them each row is"""


class _Full(NamedTuple):
    """What a set of distinct voxels knows of the set with repeated rows, which holds it."""

    set: weakref.ref[CoordSet]
    made: Made
    """its coordinates"""
    rows: Made


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
        self._parts = (fine._made, fine.batch_size, fine._index, fine.spatial_shape, fine.finer, fine._full)

    def get(self) -> CoordSet:
        """The finer set: the one it came from while that lives."""
        fine = self._fine()
        if fine is None:
            made, batch_size, index, shape, finer, full = self._parts
            with index.lock:
                fine = self._fine()
                if fine is None:
                    fine = CoordSet.__new__(CoordSet)
                    fine._start(made, batch_size, index, shape)
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


class CoordSet:
    """An immutable set of N voxel coordinates of `batch_size` samples.

    Two coordinate sets are the same when they are the same object: kernel maps are cached on it, and every
    `Voxels` derived from one input shares it. Row order is the caller's.

    Args:
        coords: (N, 4) int32 or int64 rows (batch, x, y, z), any strides, CPU or CUDA; copied. x, y, z lie in
            -131072..131071 (18 bits an axis), batch in 0..1022. No row twice. N may be 0.
        batch_size: number of samples, 0..1023; empty samples count. Default: largest batch index + 1 (0 when
            N = 0).
        spatial_shape: one int or three (X, Y, Z), 1 to 131072: the coordinates lie in [0, X) x [0, Y) x
            [0, Z), and what layers make of them stays within torch's output shape. Default: no borders.
        duplicates: 'error' refuses a row that comes twice. 'keep' keeps them: layers then run on the distinct
            voxels with the features of the first row of each, and every row gets its voxel's result; see
            `repeated`.

    Raises:
        TypeError: `coords` is no tensor, or has a dtype other than int32 or int64; `batch_size` is no int.
        ValueError: wrong shape or device, a coordinate out of range, a batch index that is negative or not
            below `batch_size`, outside of `spatial_shape`, or a duplicate. The message names the argument and
            the offending row (both rows for duplicates).

    On a GPU construction reads a few numbers back to the host once (twice where the box around
    them has more than 2^28 cells, 2^24 for fewer than 65,536 voxels); nothing later does.
    """

    sized = False
    """whether the number of rows lies on the device, and `num` is a capacity: voxmma.engine"""

    __slots__ = (
        "__weakref__",
        "_claim",
        "_finer",
        "_full",
        "_index",
        "_made",
        "_moved",
        "_version",
        "batch_size",
        "calls",
        "derived",
        "keyed",
        "levels",
        "maps",
        "own",
        "place",
        "repeated",
        "spatial_shape",
        "traced",
    )

    batch_size: int
    spatial_shape: Triple | None
    """(X, Y, Z) of the grid that the coordinates lie in, from 0; None: a grid without borders"""
    repeated: Repeated | None
    """the distinct voxels, where rows repeat; maps and derived sets are theirs"""
    maps: dict[tuple[Any, ...], MapCore]
    """kernel maps built last, by kernel shape; one to another set leaves with it. See voxmma.kernel_map"""
    own: dict[Geometry, MapCore]
    """maps from the set to itself: torch.compile guards on keys, and these hold no id"""
    place: Place | None
    """among the sets of a network; see voxmma.sparse.ahead"""
    traced: bool
    """whether all its maps are inputs of a graph; see voxmma.export.mapped"""
    calls: dict[tuple[Any, ...], Repeat]
    """what was decided last for layers that ran on this set; see voxmma.dispatch.calls"""
    keyed: dict[str, Keyed]
    """maps under keys of the caller's; see voxmma.sparse.keyed"""
    levels: tuple[weakref.WeakValueDictionary[Triple, CoordSet], Triple] | None
    """the sets of cells of all strides that were made from one set, by that stride, and this one's"""
    derived: dict[Derived, CoordSet]
    """output sets of strided and generative layers made last; see voxmma.sparse.derive"""

    def __init__(
        self,
        coords: torch.Tensor,
        batch_size: int | None = None,
        spatial_shape: int | Sequence[int] | None = None,
        duplicates: str = "error",
    ) -> None:
        if duplicates not in ("error", "keep"):
            raise ValueError(f"duplicates must be 'error' or 'keep', got {duplicates!r}")
        coords = as_tensor(coords, "coords")
        check_columns(coords)
        batch_size = check_batch_size(batch_size)
        shape = check_spatial_shape(spatial_shape)
        if coords.is_cuda:
            refuse_capture("a coordinate set", coords.device)
        with torch.inference_mode(False), torch.no_grad():
            rows = narrow(coords)
            index = _C.index_coords(rows) if coords.is_cuda else None  # first: one event for all of it
            self._start(Made((rows,), _COORDS), batch_size or 0, spatial_shape=shape)
            if index is None:
                bad, duplicate, twin, largest_batch = self._index_cpu()
            else:
                bad, duplicate, twin, largest_batch = self._index_cuda(*index)
        if bad >= 0:
            raise ValueError(explain_unpackable(bad, coords[bad].tolist()))
        if duplicate >= 0 and duplicates == "error":
            raise ValueError(
                f"coords rows {twin} and {duplicate} are the same voxel {tuple(coords[twin].tolist())}; "
                "Voxels(..., duplicates='mean'|'sum'|'max'|'first') merges duplicates, 'keep' keeps them"
            )
        self.batch_size = resolve_batch_size(batch_size, largest_batch, self._coords, "coords")
        if shape is not None:
            self._check_inside()
        if duplicate >= 0:
            self._split()

    def _start(
        self, made: Made, batch_size: int, index: _Index | None = None, spatial_shape: Triple | None = None
    ) -> None:
        self._made = made
        self._version = made._version
        self.batch_size = batch_size
        self.spatial_shape = spatial_shape
        self.maps = {}
        self.own = {}
        self.traced = False
        self.derived = {}
        self.keyed = {}
        self.levels = None
        self.calls = {}
        self.place = None
        self.repeated = None
        self._full: _Full | None = None
        self._finer: Finer | None = None
        self._claim: tuple[torch.Tensor, Finer] | None = None
        self._index = _Index() if index is None else index
        self._moved: dict[torch.device | str, weakref.ref[CoordSet]] = {}

    @classmethod
    def trusted(
        cls,
        coords: torch.Tensor,
        batch_size: int,
        bounds: Bounds | None = None,
        spatial_shape: Triple | None = None,
        repeats: bool = False,
        beside: Made | None = None,
    ) -> CoordSet:
        """A set of (N, 4) contiguous int32 `coords` known to be valid: nothing is checked or copied.

        `bounds`, where they are known, save work when the set is indexed on a GPU. `repeats`: rows may come
        twice; that is looked for, and waits for a GPU. `beside`: as of `Made`.
        """
        made = cls.__new__(cls)
        made._start(_made(coords, beside), batch_size, spatial_shape=spatial_shape)
        made._index.bounds = bounds
        if repeats and isinstance(coords, torch.Tensor):
            made._split()
        return made

    @classmethod
    def of(
        cls,
        coords: torch.Tensor,
        batch_size: int | None = None,
        spatial_shape: int | Sequence[int] | None = None,
        duplicates: str = "error",
    ) -> CoordSet:
        """The set of a tensor, arguments and errors as of the constructor: the same set, maps included, for
        the same tensor object while a set of it lives and torch has not written into it.

        `coords` of Voxels lead back to the set they are of. A write that torch does not count (through .data,
        numpy or DLPack) is seen on a CPU, where the coordinates are compared, and not on a GPU.
        """
        plain = (
            not torch.compiler.is_compiling() and type(coords) is torch.Tensor and not coords.is_inference()
        )
        if not plain or torch._C._are_functorch_transforms_active():
            return cls(coords, batch_size, spatial_shape, duplicates)
        samples, shape = check_batch_size(batch_size), check_spatial_shape(spatial_shape)
        known, asked = _wrapped.get(coords), (samples, shape, duplicates)
        state = coords._version, coords.data_ptr(), coords.shape, coords.stride()
        if known.state != state:
            known.state, known.sets = state, {}
        owner = None if known.owner is None else known.owner()
        if owner is not None and owner._coords is coords and not owner._made.written:
            fits = owner.batch_size == samples and owner.spatial_shape == shape
            if fits and (owner.repeated is None or duplicates == "keep"):
                return owner
        found = known.get(asked)
        if found is not None and not found._made.written and (coords.is_cuda or found._reads(coords)):
            return found
        made = cls(coords, *asked)
        known.put(asked, made)
        return made

    def _reads(self, coords: torch.Tensor) -> bool:
        """Whether (N, 4) integers are its coordinates."""
        mine = self._coords
        return torch.equal(mine, coords) if mine.dtype == coords.dtype else bool((mine == coords).all())

    # ---- repeated rows -------------------------------------------------------------------------------------

    def _split(self) -> None:
        """Finds the distinct voxels, and whether there are fewer than rows."""
        with torch.inference_mode(False), torch.no_grad():
            self._index.hashed = None
            keys, order = torch.sort(pack(self.coords), stable=True)
            start = torch.ones_like(keys, dtype=torch.bool)
            torch.ne(keys[1:], keys[:-1], out=start[1:])
            first = order[start]
            if len(first) == self.num:
                return
            place = torch.empty_like(order)
            place[order] = torch.cumsum(start, 0) - 1
            sites = CoordSet.trusted(
                unpack(keys[start]), self.batch_size, self._index.bounds, self.spatial_shape
            )
            self._repeat(sites, Made((first, place), "the distinct rows of a coordinate set"))

    def _repeat(self, sites: CoordSet, rows: Made) -> None:
        self.repeated = Repeated(sites, rows)
        sites._full = _Full(weakref.ref(self), self._made, rows)

    def expand(self, feats: torch.Tensor) -> tuple[CoordSet, torch.Tensor]:
        """The set with repeated rows that these are the distinct voxels of, and features (N, C) of it; this
        set and `feats` where there is none."""
        if self._full is None:
            return self, feats
        return self.full, gather_rows(feats, self._full.rows.get()[1])

    def _rows(self, full: _Full) -> CoordSet:
        made = full.set()
        if made is None:
            made = CoordSet.__new__(CoordSet)
            made._start(full.made, self.batch_size, spatial_shape=self.spatial_shape)
            made._index.bounds = self._index.bounds
            made._repeat(self, full.rows)
        return made

    def with_spatial_shape(self, spatial_shape: int | Sequence[int] | None) -> CoordSet:
        """A set of the same coordinates and index in a grid of this shape (None: without borders); itself
        where it has this shape. Maps and sets made from it are its own.

        Waits for a GPU only where the box around the coordinates is not known. TypeError or ValueError names
        the argument, or the first row outside.
        """
        shape = check_spatial_shape(spatial_shape)
        if shape == self.spatial_shape:
            return self
        made = CoordSet.__new__(CoordSet)
        made._start(self._made, self.batch_size, self._index, shape)
        made._check_inside()
        made._finer, made._claim = self._finer, self._claim
        if self.repeated is not None:
            sites = CoordSet.__new__(CoordSet)
            sites._start(self.sites._made, self.batch_size, self.sites._index, shape)
            made._repeat(sites, self.repeated.rows)
        return made

    def _check_inside(self) -> None:
        """ValueError names the first row outside of the grid."""
        shape, box = self.spatial_shape, self._index.bounds
        if shape is None or self.num == 0:
            return
        if box is None or min(box[1:4]) < 0 or any(n <= last for n, last in zip(shape, box[5:], strict=True)):
            check_inside(self.coords, shape)  # the box may be larger than need be

    # ---- indexing ------------------------------------------------------------------------------------------

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
            with self._index.lock, torch.inference_mode(False), torch.no_grad():
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

    def _hash(self) -> tuple[torch.Tensor, ...]:
        return _C.index_coords(self.coords, self.bounds)[:2]  # not indexed at construction: known to be valid

    def _set_hashed(self, order: torch.Tensor, hash_blocks: torch.Tensor) -> None:
        """Takes an index that was made on this stream before the set."""
        self._index.hashed = Made((order, hash_blocks), _HASHED, self._made)

    def lookup(self, coords: torch.Tensor) -> torch.Tensor:
        """Rows (M,) int64 of any (M, 4) integers on the same device, -1 where the set has none; the first
        where it has several.

        Never waits for the GPU.
        """
        if self.repeated is not None:
            rows = self.repeated.sites.lookup(coords)
            return torch.where(rows < 0, rows, self.repeated.rows.get()[0][rows.clamp(min=0)])
        if self.num and kernels_take(coords):
            return _C.lookup_rows(coords, *self.hash_index())
        return find_rows(coords, *self.sorted_keys())

    def derive(self, key: Derived) -> CoordSet:
        """Of a sized set: the output set of a layer."""
        raise NotImplementedError

    def plan(self, outputs: CoordSet, geometry: Geometry, reverse: bool) -> Direction:
        """Of a sized set: one direction of the map to `outputs`."""
        raise NotImplementedError

    def dense(self, feats: torch.Tensor, shape: Triple, origin: Triple) -> torch.Tensor:
        """Of a sized set: `Voxels.dense` of features on it."""
        raise NotImplementedError

    def weighted(self, feats: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of a sized set: voxmma.sparse.interpolate.weighted."""
        raise NotImplementedError

    def check_points(self, points: torch.Tensor) -> None:
        """Of a sized set: has the first of points (M, 3) that is not finite reported after the frame."""
        raise NotImplementedError

    def tree(self) -> tuple[torch.Tensor, ...]:
        """Of a sized set: the tree over its samples, with one more for what is behind the rows."""
        raise NotImplementedError

    # ---- facts ---------------------------------------------------------------------------------------------

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

    def exposed(self) -> torch.Tensor:
        """`coords`, which `of` leads back to this set from now on."""
        coords = self.coords
        if not torch.compiler.is_compiling():
            known = _wrapped.get(coords)
            if known.owner is None or known.owner() is not self:
                known.owner = weakref.ref(self)
        return coords

    def use(self, made: Made) -> None:
        """What a repeated call does before it reads the map tensors `made`, at little cost."""
        if self._made.tensors[0]._version != self._version:
            self._made.check()
        made.use()

    @property
    def finer(self) -> Finer | None:
        """Where a strided layer made this set from, or was told to put its outputs for lack of such."""
        if self._claim is not None:
            self._prove()
        return self._finer

    @finer.setter
    def finer(self, link: Finer | None) -> None:
        self._finer = link

    @eager
    def _prove(self) -> None:
        """Takes over the link of the coordinates that these were copied from, where they are the same."""
        with self._index.lock:
            if self._claim is None:
                return
            coords, link = self._claim
            refuse_capture("the comparison of copied coordinates with their original", self.device)
            if coords.shape == self._coords.shape and torch.equal(coords.to(self.device), self.coords):
                fine = link.get()
                self._finer = Finer(fine.to(self.device), *link.kind)
            self._claim = None

    def remember(self, fine: CoordSet, geometry: Geometry) -> None:
        """Links this set, which a strided layer on `fine` was given as `coords`, to `fine`.

        A set that was made by a strided layer stays linked to what it was made from; one that is linked to
        another set that is alive is ambiguous from now on (`finer_set` refuses it).
        """
        link = self.finer
        if link is None or (link.given and not link.came_from(fine)):
            self._relink(fine, geometry)

    @eager
    def _relink(self, fine: CoordSet, geometry: Geometry) -> None:
        made = Finer(fine, geometry, given=True)
        with self._index.lock:
            link = self._finer
            if link is not None and (not link.given or link.came_from(fine)):
                return
            if link is not None and link.alive:
                link.ambiguous = True
            else:
                self._finer = made

    @property
    def num(self) -> int:
        """Number of voxels N."""
        return self._coords.shape[0]

    @property
    def sites(self) -> CoordSet:
        """The distinct voxels: another set only where rows repeat (duplicates='keep')."""
        return self if self.repeated is None else self.repeated.sites

    @property
    def full(self) -> CoordSet:
        """The set with repeated rows that these are the distinct voxels of; else this one."""
        return self if self._full is None else self._rows(self._full)

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

    def equal(self, other: CoordSet) -> bool:
        """True for the same set, and for one with the same rows in the same order, the same batch size and
        the same grid."""
        if self is other:
            return True
        same_place = (
            self.device == other.device
            and self.batch_size == other.batch_size
            and self.num == other.num
            and self.spatial_shape == other.spatial_shape
        )
        return same_place and (self._coords is other._coords or torch.equal(self.coords, other.coords))

    def __repr__(self) -> str:
        facts = f"num={self.num}, batch_size={self.batch_size}, device='{self.device}', maps={len(self.maps)}"
        if self.spatial_shape is not None:
            facts += f", spatial_shape={self.spatial_shape}"
        return f"CoordSet({facts})"

    # ---- copies --------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CoordSet:
        """The same coordinates on `device`; itself when they are there, and the same copy while one lives.

        `non_blocking` counts on the way to a GPU only: the host reads a set's coordinates unasked.
        """
        # resolves 'cuda' to the current device
        target = torch.empty(0, device=device, dtype=torch.uint8).device
        if target == self.device:
            return self
        if self._full is not None:
            return self.full.to(device, non_blocking).sites
        later = non_blocking and target.type != "cpu"
        return self._copied(
            target, lambda t: t.to(target, non_blocking=later), lambda fine: fine.to(target, non_blocking)
        )

    def pin_memory(self) -> CoordSet:
        """A page-locked copy, the same while it lives; itself when it is page-locked."""
        if self._coords.is_pinned():
            return self
        if self._full is not None:
            return self.full.pin_memory().sites
        return self._copied("pinned", torch.Tensor.pin_memory, CoordSet.pin_memory)

    def _copied(
        self,
        place: torch.device | str,
        copy: Callable[[torch.Tensor], torch.Tensor],
        again: Callable[[CoordSet], CoordSet],
    ) -> CoordSet:
        """The copy at `place`, which remembers a copy of the finer set."""
        with self._index.lock:
            reference = self._moved.get(place)
            made = reference() if reference is not None else None
            if made is not None:
                return made
            target = place if isinstance(place, torch.device) else self.device
            refuse_capture("a copy of a coordinate set", target)
            with torch.inference_mode(False), torch.no_grad():
                facts = self.batch_size, self._index.bounds, self.spatial_shape
                made = CoordSet.trusted(copy(self.coords), *facts)
                if self.repeated is not None:
                    sites = CoordSet.trusted(copy(self.repeated.sites.coords), *facts)
                    rows = map(copy, self.repeated.rows.get())
                    made._repeat(sites, Made(rows, self.repeated.rows.what))
            link = self.finer
            if link is not None:
                made.finer = Finer(again(link.get()), *link.kind)
            self._moved[place] = weakref.ref(made)
            if isinstance(place, torch.device):
                made._moved[self.device] = weakref.ref(self)
            return made

    def same_as(self, coords: torch.Tensor) -> CoordSet:
        """A set of `coords`, which a tree_map made of this one's: it is the same set where nothing was done.

        It remembers the finer set if the coordinates turn out to be equal once that is asked for.
        """
        if coords is self._coords:
            return self
        repeats = self.repeated is not None
        made = CoordSet.trusted(coords, self.batch_size, None, self.spatial_shape, repeats)
        if self._claim is not None:
            made._claim = self._claim
        elif self._finer is not None:
            made._claim = self._coords, self._finer
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        if self._full is not None:
            return _sites_of, (self.full,)
        repeats = self.repeated is not None
        parts = self.coords, self.batch_size, self._index.bounds, self.spatial_shape, repeats
        link = self.finer
        return (CoordSet.trusted, parts) if link is None else (_restore, (*parts, link.get(), *link.kind))

    def __copy__(self) -> CoordSet:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CoordSet:
        return self  # immutable


def _restore(
    coords: torch.Tensor,
    batch_size: int,
    bounds: Bounds | None,
    spatial_shape: Triple | None,
    repeats: bool,
    fine: CoordSet,
    *kind: Any,
) -> CoordSet:
    """Unpickles a set that is linked to a finer one."""
    made = CoordSet.trusted(coords, batch_size, bounds, spatial_shape, repeats)
    made.finer = Finer(fine, *kind)
    return made


def _sites_of(full: CoordSet) -> CoordSet:
    """Unpickles the distinct voxels of a set with repeated rows."""
    return full.sites


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

_COORDS = "the coordinates of a coordinate set"
_SORTED = "the sorted keys of a coordinate set"
_HASHED = "the index tensors of a coordinate set"
_COUNTS = "the voxel counts of a coordinate set"


def _made(coords: torch.Tensor, beside: Made | None = None) -> Made:
    """Coordinates as a set keeps them: tensors whose writes are counted, and which a backward can keep."""
    if not torch.compiler.is_compiling() and isinstance(coords, torch.Tensor) and coords.is_inference():
        with torch.inference_mode(False):
            coords = coords.clone()
    return Made((coords,), _COORDS, beside)


def kernels_take(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one for kernels: on a GPU, and with memory, as under torch.func none is."""
    return tensor.is_cuda and not torch._C._are_functorch_transforms_active()


def gather_rows(feats: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """feats[rows] by the operator whose backward is deterministic on the device although rows repeat."""
    return feats[rows] if feats.is_cuda else feats.index_select(0, rows)


def find_keys(keys: torch.Tensor, ordered: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows (M,) int64 of packed `keys` (M,) in a set with sorted keys `ordered` of rows `row`, or -1."""
    if ordered.numel() == 0:
        return torch.full_like(keys, -1)
    place = torch.searchsorted(ordered, keys).clamp_(max=ordered.numel() - 1)
    return torch.where(ordered[place] == keys, row[place], -1)


def find_rows(coords: torch.Tensor, ordered: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """`find_keys` of any (M, 4) integers."""
    space, batch = coords[:, 1:], coords[:, 0]
    packable = ((space >= COORD_MIN) & (space <= COORD_MAX)).all(1) & (batch >= 0) & (batch <= BATCH_MAX)
    keys = pack(torch.where(packable.unsqueeze(1), coords, 0))
    return torch.where(packable, find_keys(keys, ordered, row), -1)


def first_duplicate(keys: torch.Tensor, order: torch.Tensor) -> tuple[int, int]:
    """The smallest row that repeats an earlier one, and the earliest such, of ascending keys and the row of
    each, rows of a key ascending; -1, -1 where there is none."""
    repeated = torch.nonzero(keys[1:] == keys[:-1]).flatten() + 1
    if not repeated.numel():
        return -1, -1
    place = repeated[torch.argmin(order[repeated])]
    return int(order[place]), int(order[torch.searchsorted(keys, keys[place])])


def check_columns(coords: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless `coords` is a (N, 4) int32 or int64 tensor on a CPU or a GPU."""
    if not isinstance(coords, torch.Tensor):
        raise TypeError(f"coords must be a tensor, got {type(coords).__name__}")
    if coords.dtype not in (torch.int32, torch.int64):
        hint = "; Voxels.from_points takes points" if coords.is_floating_point() else ""
        raise TypeError(f"coords must be int32 or int64, got {coords.dtype}{hint}")
    shape = coords.shape
    if len(shape) != 2 or shape[1] != 4:
        raise ValueError(f"coords must be (N, 4) rows of batch, x, y, z, got shape {tuple(shape)}")
    if shape[0] > _INT32.max:
        raise ValueError(f"coords has {shape[0]} rows, at most {_INT32.max} are possible")
    if not (coords.is_cpu or coords.is_cuda):
        raise ValueError(f"coords must be on a CPU or a CUDA device, got {coords.device}")


def check_batch_size(batch_size: int | None) -> int | None:
    """`batch_size` as an int; TypeError or ValueError unless it is None or in 0..1023."""
    if batch_size is None:
        return None
    made = integer(batch_size)
    if made is None:
        raise TypeError(f"batch_size must be an int or None, got {type(batch_size).__name__}")
    if not 0 <= made <= BATCH_MAX + 1:
        raise ValueError(f"batch_size must be in 0..{BATCH_MAX + 1}, got {batch_size}")
    return made


def check_spatial_shape(spatial_shape: int | Sequence[int] | None) -> Triple | None:
    """`spatial_shape` as a triple or None; TypeError or ValueError unless each axis is in 1..131072."""
    return None if spatial_shape is None else triple(spatial_shape, "spatial_shape", 1, COORD_MAX + 1)


def check_inside(coords: torch.Tensor, shape: Triple) -> None:
    """ValueError names the first row of (N, 4) integer coordinates outside of [0, shape)."""
    space = coords[:, 1:]
    outside = ((space < 0) | (space >= torch.tensor(shape, dtype=coords.dtype, device=coords.device))).any(1)
    if bool(outside.any()):
        row = int(torch.nonzero(outside)[0])
        raise ValueError(
            f"coords row {row}, {tuple(coords[row].tolist())}, lies outside of spatial_shape {shape}"
        )


def resolve_batch_size(batch_size: int | None, largest: int, rows: torch.Tensor, name: str) -> int:
    """`batch_size`, or largest + 1 when None. ValueError names the first of `rows`, batch indices (N,) or
    coordinates (N, 4), above it."""
    if batch_size is None:
        return largest + 1
    if largest >= batch_size:
        batch = rows if rows.dim() == 1 else rows[:, 0]
        row = int(torch.nonzero(batch >= batch_size)[0])
        raise ValueError(f"{name} row {row} has batch index {int(batch[row])}, batch_size is {batch_size}")
    return batch_size


def first_unpackable(coords: torch.Tensor) -> int:
    """Smallest row of (N, 4) integer coordinates outside the packable range, -1 when there is none."""
    space, batch = coords[:, 1:], coords[:, 0]
    bad = ((space < COORD_MIN) | (space > COORD_MAX)).any(1) | (batch < 0) | (batch > BATCH_MAX)
    return int(torch.nonzero(bad)[0]) if bool(bad.any()) else -1


def narrow(coords: torch.Tensor) -> torch.Tensor:
    """A contiguous int32 copy of integer coordinates; what does not fit stays outside the packable range."""
    if coords.dtype == torch.int64:
        return coords.clamp(_INT32.min, _INT32.max).to(torch.int32, memory_format=torch.contiguous_format)
    return coords.clone(memory_format=torch.contiguous_format)


def explain_unpackable(row: int, values: list[int]) -> str:
    """The message for a row outside the packable range."""
    where = f"coords row {row} is {tuple(values)}"
    if values[0] < 0:
        return f"{where}: the batch index is negative"
    if values[0] > BATCH_MAX:
        return f"{where}: the batch index must be in 0..{BATCH_MAX}"
    axis = next(axis for axis in range(3) if not COORD_MIN <= values[1 + axis] <= COORD_MAX)
    return f"{where}: {'xyz'[axis]} must be in {COORD_MIN}..{COORD_MAX}"
