"""Coordinate sets: checked once, indexed once, shared by everything that lives on the same voxels."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from voxmma.call import Repeat
    from voxmma.kernel_map import Geometry, MapCore

COORD_BITS = 18
COORD_MIN = -(1 << (COORD_BITS - 1))
COORD_MAX = -COORD_MIN - 1
BATCH_MAX = 1022
_BATCH_BIAS = 512  # keeps the packed key of batch 0..1022 inside a signed 64-bit integer, in order
_SHIFTS = (3 * COORD_BITS, 2 * COORD_BITS, COORD_BITS, 0)
_INT32 = torch.iinfo(torch.int32)


def pack(coords: torch.Tensor) -> torch.Tensor:
    """(N, 4) packable coordinates -> (N,) int64 keys whose order is that of (batch, x, y, z)."""
    x, y, z = (pack_axis(coords[:, 1 + axis], axis) for axis in range(3))
    return pack_batch(coords[:, 0]) + x + y + z


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
    bricks: torch.Tensor
    """(slots, 4) int32 hash table of its 2x2x2 blocks"""


@dataclass
class _Index:
    """What is derived from the coordinates alone, when first asked for. Shared by `Finer.get()`'s sets."""

    counts: torch.Tensor | None = None
    ordered: tuple[torch.Tensor, torch.Tensor] | None = None
    hashed: HashIndex | None = None
    bounds: Bounds | None = None


class Finer:
    """The finer set that a set was made from, and how: what a transposed layer goes back to.

    Holds the finer set's coordinates, index and map tensors, not the object: the finer set's maps hold the
    coarser set, and a cycle would keep GPU memory until Python's garbage collector runs. When nothing else
    holds the finer set any more, `get()` makes one of the same rows.
    """

    def __init__(self, fine: CoordSet, geometry: Geometry) -> None:
        self.geometry = geometry
        self.sides: dict[bool, Any] = {}
        """tensors of the map between the two, shared with its MapCore"""
        self._fine = weakref.ref(fine)
        self._parts = (fine.coords, fine.batch_size, fine._index, fine.finer)

    def get(self) -> CoordSet:
        """The finer set: the one it came from while that lives."""
        fine = self._fine()
        if fine is None:
            coords, batch_size, index, finer = self._parts
            fine = CoordSet.trusted(coords, batch_size)
            fine._index, fine.finer = index, finer
            self._fine = weakref.ref(fine)
        return fine

    def came_from(self, fine: CoordSet) -> bool:
        return self._fine() is fine


class CoordSet:
    """An immutable set of N voxel coordinates of `batch_size` samples.

    Two coordinate sets are the same when they are the same object: kernel maps are cached on it, and every
    `Voxels` derived from one input shares it. Row order is the caller's.

    Args:
        coords: (N, 4) int32 or int64 rows (batch, x, y, z), any strides, CPU or CUDA; copied. x, y, z lie in
            -131072..131071 (18 bits an axis), batch in 0..1022. No row twice. N may be 0.
        batch_size: number of samples, 0..1023; empty samples count. Default: largest batch index + 1 (0 when
            N = 0).

    Raises:
        TypeError: `coords` is no tensor, or has a dtype other than int32 or int64; `batch_size` is no int.
        ValueError: wrong shape or device, a coordinate out of range, a batch index that is negative or not
            below `batch_size`, or a duplicate. The message names the argument and the offending row (both
            rows for duplicates).

    On a GPU construction reads a few numbers back to the host once (twice where the box around
    them has more than 2^28 cells, 2^24 for fewer than 65,536 voxels); nothing later does.
    """

    __slots__ = (
        "__weakref__",
        "_index",
        "_moved",
        "_segments",
        "batch_size",
        "calls",
        "coords",
        "derived",
        "finer",
        "maps",
        "own",
        "traced",
    )

    coords: torch.Tensor
    """(N, 4) int32, contiguous"""
    batch_size: int
    maps: dict[tuple[Any, ...], MapCore]
    """kernel maps built so far, by kernel shape; see voxmma.kernel_map"""
    own: dict[Geometry, MapCore]
    """maps from the set to itself: torch.compile guards on keys, and these hold no id"""
    traced: bool
    """whether all its maps are inputs of a graph; see voxmma.mapped"""
    calls: dict[tuple[Any, ...], Repeat]
    """what was decided for layers that ran on this set; see voxmma.call"""
    derived: dict[tuple[Any, ...], CoordSet]
    """output sets of strided and generative layers made so far; see voxmma.derive"""
    finer: Finer | None
    """where a strided layer made this set from"""

    def __init__(self, coords: torch.Tensor, batch_size: int | None = None) -> None:
        check_columns(coords)
        check_batch_size(batch_size)
        with torch.inference_mode(False), torch.no_grad():
            self._start(narrow(coords), batch_size or 0)
            if coords.is_cuda:
                bad, duplicate, twin, largest_batch = self._index_cuda()
            else:
                bad, duplicate, twin, largest_batch = self._index_cpu()
        if bad >= 0:
            raise ValueError(explain_unpackable(bad, coords[bad].tolist()))
        if duplicate >= 0:
            raise ValueError(
                f"coords rows {twin} and {duplicate} are the same voxel {tuple(coords[twin].tolist())}; "
                "Voxels(..., duplicates='mean'|'sum'|'max'|'first') merges duplicates"
            )
        self.batch_size = resolve_batch_size(batch_size, largest_batch, self.coords[:, 0], "coords")

    def _start(self, coords: torch.Tensor, batch_size: int) -> None:
        self.coords = coords
        self.batch_size = batch_size
        self.maps = {}
        self.own = {}
        self.traced = False
        self.derived = {}
        self.calls = {}
        self.finer = None
        self._index = _Index()
        self._segments: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # see voxmma.segments
        self._moved: dict[torch.device, weakref.ref[CoordSet]] = {}

    @classmethod
    def trusted(cls, coords: torch.Tensor, batch_size: int, bounds: Bounds | None = None) -> CoordSet:
        """A set of (N, 4) contiguous int32 `coords` known to be valid: nothing is checked or copied.

        `bounds`, where they are known, save work when the set is indexed on a GPU.
        """
        made = cls.__new__(cls)
        made._start(coords, batch_size)
        made._index.bounds = bounds
        return made

    # ---- indexing ------------------------------------------------------------------------------------------

    def _index_cuda(self) -> tuple[int, int, int, int]:
        from voxmma import _C

        order, bricks, (bad, duplicate, twin, *bounds) = _C.index_coords(self.coords)
        self._index.hashed = HashIndex(order, bricks)
        if self.num == 0:
            return bad, duplicate, twin, -1
        self._index.bounds = tuple(bounds)
        return bad, duplicate, twin, bounds[4]

    def _index_cpu(self) -> tuple[int, int, int, int]:
        if self.num == 0:
            return -1, -1, -1, -1
        bad = first_unpackable(self.coords)
        if bad >= 0:
            return bad, -1, -1, -1
        keys, order = self.sorted_keys()
        repeated = torch.nonzero(keys[1:] == keys[:-1]).flatten() + 1
        duplicate = twin = -1
        if repeated.numel():
            place = repeated[torch.argmin(order[repeated])]
            duplicate = int(order[place])
            twin = int(
                order[torch.searchsorted(keys, keys[place])]
            )  # stable sort: the first of the run is the winner
        low, high = torch.aminmax(self.coords, dim=0)
        bounds = (*low.tolist(), *high.tolist())
        self._index.bounds = bounds
        return -1, duplicate, twin, bounds[4]

    def sorted_keys(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed keys (N,) int64 in ascending order, by (batch, x, y, z), and the row of each, (N,) int64."""
        if self._index.ordered is None:
            with torch.inference_mode(False), torch.no_grad():
                keys, order = torch.sort(pack(self.coords), stable=True)
                self._index.ordered = keys, order
        return self._index.ordered

    def hash_index(self) -> HashIndex:
        """The GPU index; RuntimeError where this build has no CUDA kernels. Never waits for the GPU."""
        if self._index.hashed is None:
            from voxmma import _C

            with (
                torch.inference_mode(False),
                torch.no_grad(),
            ):  # not indexed at construction: known to be valid
                order, bricks, _ = _C.index_coords(self.coords, self.bounds)
                self._index.hashed = HashIndex(order, bricks)
        return self._index.hashed

    def lookup(self, coords: torch.Tensor) -> torch.Tensor:
        """Rows (M,) int64 of any (M, 4) integers on the same device, -1 where the set has none.

        Never waits for the GPU.
        """
        if self.num and kernels_take(coords):
            from voxmma import _C

            return _C.lookup_rows(coords, *self.hash_index())
        space, batch = coords[:, 1:], coords[:, 0]
        packable = ((space >= COORD_MIN) & (space <= COORD_MAX)).all(1) & (batch >= 0) & (batch <= BATCH_MAX)
        keys = pack(torch.where(packable.unsqueeze(1), coords, 0))
        return torch.where(packable, find_keys(keys, *self.sorted_keys()), -1)

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def num(self) -> int:
        """Number of voxels N."""
        return self.coords.shape[0]

    @property
    def device(self) -> torch.device:
        return self.coords.device

    @property
    def counts(self) -> torch.Tensor:
        """(batch_size,) int64 voxels of each sample on the set's device, zeros for empty samples."""
        if self._index.counts is None:
            with torch.inference_mode(False), torch.no_grad():
                batch = self.coords[:, 0].long()
                zeros = torch.zeros(self.batch_size, dtype=torch.int64, device=self.device)
                self._index.counts = zeros.index_add_(0, batch, torch.ones_like(batch))
        return self._index.counts

    @property
    def bounds(self) -> Bounds:
        """A box around the voxels: as small as it can be where that is known without waiting for a GPU."""
        if self._index.bounds is None:
            self._index.bounds = (0, *[COORD_MIN] * 3, max(self.batch_size - 1, 0), *[COORD_MAX] * 3)
        return self._index.bounds

    def equal(self, other: CoordSet) -> bool:
        """True for the same set, and for one with the same rows in the same order and the same batch size."""
        if self is other:
            return True
        same_place = (
            self.device == other.device and self.batch_size == other.batch_size and self.num == other.num
        )
        return same_place and torch.equal(self.coords, other.coords)

    def __repr__(self) -> str:
        facts = f"num={self.num}, batch_size={self.batch_size}, device='{self.device}', maps={len(self.maps)}"
        return f"CoordSet({facts})"

    # ---- copies --------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str, non_blocking: bool = False) -> CoordSet:
        """The same coordinates on `device`; itself when they are there, and the same copy while one lives."""
        # resolves 'cuda' to the current device
        target = torch.empty(0, device=device, dtype=torch.uint8).device
        if target == self.device:
            return self
        reference = self._moved.get(target)
        copy = reference() if reference is not None else None
        if copy is None:
            with torch.inference_mode(False), torch.no_grad():
                coords = self.coords.to(target, non_blocking=non_blocking)
                copy = CoordSet.trusted(coords, self.batch_size, self._index.bounds)
            if self.finer is not None:
                copy.finer = Finer(self.finer.get().to(target, non_blocking), self.finer.geometry)
            self._moved[target] = weakref.ref(copy)
            copy._moved[self.device] = weakref.ref(self)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        if self.finer is None:
            return CoordSet.trusted, (self.coords, self.batch_size, self._index.bounds)
        link = self.finer
        return _restore, (self.coords, self.batch_size, link.get(), link.geometry, self._index.bounds)

    def __copy__(self) -> CoordSet:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CoordSet:
        return self  # immutable


def _restore(
    coords: torch.Tensor, batch_size: int, fine: CoordSet, geometry: Geometry, bounds: Bounds | None = None
) -> CoordSet:
    """Unpickles a set that a strided layer made."""
    made = CoordSet.trusted(coords, batch_size, bounds)
    made.finer = Finer(fine, geometry)
    return made


def kernels_take(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one for kernels: on a GPU, and with memory, as under torch.func none is."""
    return tensor.is_cuda and not torch._C._are_functorch_transforms_active()


def find_keys(keys: torch.Tensor, ordered: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Rows (M,) int64 of packed `keys` (M,) in a set with sorted keys `ordered` of rows `row`, or -1."""
    if ordered.numel() == 0:
        return torch.full_like(keys, -1)
    place = torch.searchsorted(ordered, keys).clamp_(max=ordered.numel() - 1)
    return torch.where(ordered[place] == keys, row[place], -1)


def check_columns(coords: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless `coords` is a (N, 4) int32 or int64 tensor on a CPU or a GPU."""
    if not isinstance(coords, torch.Tensor):
        raise TypeError(f"coords must be a tensor, got {type(coords).__name__}")
    if coords.dtype not in (torch.int32, torch.int64):
        hint = "; Voxels.from_points takes points" if coords.is_floating_point() else ""
        raise TypeError(f"coords must be int32 or int64, got {coords.dtype}{hint}")
    if coords.dim() != 2 or coords.shape[1] != 4:
        raise ValueError(f"coords must be (N, 4) rows of batch, x, y, z, got shape {tuple(coords.shape)}")
    if coords.shape[0] > _INT32.max:
        raise ValueError(f"coords has {coords.shape[0]} rows, at most {_INT32.max} are possible")
    if coords.device.type not in ("cpu", "cuda"):
        raise ValueError(f"coords must be on a CPU or a CUDA device, got {coords.device}")


def check_batch_size(batch_size: int | None) -> None:
    """Raises TypeError or ValueError unless `batch_size` is None or in 0..1023."""
    if batch_size is None:
        return
    if isinstance(batch_size, bool) or not isinstance(batch_size, int):
        raise TypeError(f"batch_size must be an int or None, got {type(batch_size).__name__}")
    if not 0 <= batch_size <= BATCH_MAX + 1:
        raise ValueError(f"batch_size must be in 0..{BATCH_MAX + 1}, got {batch_size}")


def resolve_batch_size(batch_size: int | None, largest: int, batch: torch.Tensor, name: str) -> int:
    """`batch_size`, or largest + 1 when None. ValueError names the first row of `batch` (N,) above it."""
    if batch_size is None:
        return largest + 1
    if largest >= batch_size:
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
