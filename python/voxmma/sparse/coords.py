"""Coordinate sets: checked once, indexed once, shared by everything that lives on the same voxels."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma._types import Triple, as_tensor
from voxmma.sparse.cached import Made, normally, of_no_transform, outside_transforms, refuse_capture
from voxmma.sparse.checks import (
    check_batch_size,
    check_columns,
    check_inside,
    check_spatial_shape,
    explain_unpackable,
    narrow,
    resolve_batch_size,
)
from voxmma.sparse.finer import Finer
from voxmma.sparse.index import _COORDS, Indexed, _Index, _made, gather_rows, kernels_take
from voxmma.sparse.packing import Bounds, find_rows, pack, unpack
from voxmma.sparse.wrapped import _wrapped

if TYPE_CHECKING:
    from voxmma.dispatch.calls import Repeat
    from voxmma.sparse.ahead import Place
    from voxmma.sparse.cores import Direction, MapCore
    from voxmma.sparse.derive import Derived
    from voxmma.sparse.geometry import Geometry
    from voxmma.sparse.keyed import Keyed

_KEPT = {"maps": 64, "derived": 64, "calls": 512}  # most entries of a set's caches; the oldest leaves


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


class CoordSet(Indexed):
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
        coords = of_no_transform(as_tensor(coords, "coords"))
        check_columns(coords)
        batch_size = check_batch_size(batch_size)
        shape = check_spatial_shape(spatial_shape)
        if coords.is_cuda:
            refuse_capture("a coordinate set", coords.device)
        bad, duplicate, twin, largest_batch = normally(self._read, coords, batch_size or 0, shape)
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

    def _read(self, coords: torch.Tensor, batch_size: int, shape: Triple | None) -> tuple[int, int, int, int]:
        """Copies and indexes: bad row, duplicate row, its twin, largest batch index; -1 where none is."""
        rows = narrow(coords)
        if not coords.is_cuda:
            self._start(Made((rows,), _COORDS), batch_size, spatial_shape=shape)
            return self._index_cpu()
        index = _C.index_coords(rows)  # first: one event for all of it
        self._start(Made((rows,), _COORDS), batch_size, spatial_shape=shape)
        return self._index_cuda(*index)

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

    @staticmethod
    def _of_parts(
        made: Made, batch_size: int, index: _Index | None, spatial_shape: Triple | None
    ) -> CoordSet:
        """A set of coordinates that are kept already, index included where there is one."""
        coords = CoordSet.__new__(CoordSet)
        coords._start(made, batch_size, index, spatial_shape)
        return coords

    @classmethod
    def trusted(
        cls,
        coords: torch.Tensor,
        batch_size: int,
        bounds: Bounds | None = None,
        spatial_shape: Triple | None = None,
        repeats: bool = False,
        event: _C.StreamEvent | None = None,
    ) -> CoordSet:
        """A set of (N, 4) contiguous int32 `coords` known to be valid: nothing is checked or copied.

        `bounds`, where they are known, save work when the set is indexed on a GPU. `repeats`: rows may come
        twice; that is looked for, and waits for a GPU. `event`: as of `Made`.
        """
        made = cls.__new__(cls)
        made._start(_made(coords, event), batch_size, spatial_shape=spatial_shape)
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
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
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
            made = CoordSet._of_parts(full.made, self.batch_size, None, self.spatial_shape)
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
        made = CoordSet._of_parts(self._made, self.batch_size, self._index, shape)
        made._check_inside()
        made._finer, made._claim = self._finer, self._claim
        if self.repeated is not None:
            sites = CoordSet._of_parts(self.sites._made, self.batch_size, self.sites._index, shape)
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

    def exposed(self) -> torch.Tensor:
        """`coords`, which `of` leads back to this set from now on."""
        coords = self.coords
        if not torch.compiler.is_compiling():
            known = _wrapped.get(coords)
            if known.owner is None or known.owner() is not self:
                known.owner = weakref.ref(self)
        return coords

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
    def sites(self) -> CoordSet:
        """The distinct voxels: another set only where rows repeat (duplicates='keep')."""
        return self if self.repeated is None else self.repeated.sites

    @property
    def full(self) -> CoordSet:
        """The set with repeated rows that these are the distinct voxels of; else this one."""
        return self if self._full is None else self._rows(self._full)

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
            with torch.inference_mode(False), torch.no_grad(), outside_transforms():
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
