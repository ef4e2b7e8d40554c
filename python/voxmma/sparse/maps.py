"""Kernel maps: which input row meets which output row under which kernel offset.

A map is built once for a coordinate set (or a pair of them) and a kernel shape, and cached on one of them.
It has two directions, each built on demand: from the geometry's inputs to its outputs, and the opposite one,
which transposed and inverse layers and the input gradient run over. A symmetric map (submanifold, odd kernel)
is its own opposite with the offsets mirrored.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma._types import Triple, triple
from voxmma.sparse.cached import Made, keep, new_lock, refuse_capture
from voxmma.sparse.coords import (
    _KEPT,
    COORD_MAX,
    COORD_MIN,
    CoordSet,
    Finer,
    pack,
    pack_axis,
    pack_batch,
    unpack,
)
from voxmma.sparse.derive import cells, cells_shape, check_count, children, windows

if TYPE_CHECKING:
    from voxmma.sparse.ahead import Wanted
    from voxmma.sparse.tensor import Voxels


MAX_KERNEL = 9
MAX_STRIDE = 4096
MAX_OFFSET = 1 << 20
_FRAGMENT_ROWS = 16


class Geometry(NamedTuple):
    """Input coordinate that an output coordinate meets: out * stride - padding + k * dilation, k from 0."""

    kernel_size: Triple
    stride: Triple
    dilation: Triple
    padding: Triple

    def offsets(self, reverse: bool = False) -> list[Triple]:
        """k * dilation - padding of every k, lexicographic, last axis fastest; negative with `reverse`."""
        sign = -1 if reverse else 1
        axes = [
            [sign * (i * dilation - padding) for i in range(size)]
            for size, dilation, padding in zip(self.kernel_size, self.dilation, self.padding, strict=True)
        ]
        return [(x, y, z) for x, y, z in itertools.product(*axes)]

    @property
    def mirrored(self) -> bool:
        """Whether the offsets are their own negatives, in reverse order."""
        (i, j, k), _, (a, b, c), (x, y, z) = self
        return (i - 1) * a == 2 * x and (j - 1) * b == 2 * y and (k - 1) * c == 2 * z


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
        beside: Made | None = None,
    ) -> None:
        self.tensors = tensors
        kept = tensors if stats is None else [*tensors, stats]
        self.made = Made(kept, "the tensors of a kernel map", beside)
        self.counts: Made | None = None
        """KernelMap.counts, once asked for"""
        self.wanted: Wanted | None = None
        """why it was made before a layer asked for it"""
        self._num_pairs = num_pairs
        self._stats = stats
        self._lock = contextlib.nullcontext() if stats is None else new_lock()

    @property
    def num_pairs(self) -> int:
        """Waits for the GPU, once, where they have not been read."""
        if self._num_pairs is None:
            with self._lock:
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

    def __reduce__(self) -> tuple[Any, ...]:
        return Direction, (self.settled(), self.num_pairs)


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


class KernelMap:
    """One direction of a kernel map: input rows of `in_coords` to output rows of `out_coords`.

    Made by `kernel_map()`. Two objects are equal when they are the same direction of the same cached map.

    `tensors` is what the ops take. On a CPU: [in_rows int64 (P,), out_rows int64 (P,), kptr int64 (K+1,),
    size], pairs sorted by (offset, output row), offset k owning kptr[k]:kptr[k+1]. On a GPU the tile plan of
    kernels.h: [order int32 (T*256,), schedule int32 (2, T, 4), passes int32 (P, 4), frag int32 (P, 16), uniq
    int32 (U,), local int16 (T, K, 256), size]. The last is empty int32 of shape (0, n_in, n_out).

    Maps may be used on any CUDA stream and in any thread. What they hand out is to be read only: they raise
    RuntimeError once torch has written into it (writes through .data, numpy or DLPack go unseen). A map that
    is first needed while a CUDA graph is captured raises RuntimeError, too.
    """

    def __init__(
        self, in_coords: CoordSet, out_coords: CoordSet, core: MapCore, reverse: bool = False
    ) -> None:
        self.in_coords = in_coords
        self.out_coords = out_coords
        self._core = core
        self.reverse = reverse
        """True for the direction from the geometry's outputs to its inputs: a transposed layer's"""

    # ---- facts ---------------------------------------------------------------------------------------------

    @property
    def kernel_size(self) -> Triple:
        return self._core.geometry.kernel_size

    @property
    def stride(self) -> Triple:
        return self._core.geometry.stride

    @property
    def dilation(self) -> Triple:
        return self._core.geometry.dilation

    @property
    def padding(self) -> Triple:
        return self._core.geometry.padding

    @property
    def symmetric(self) -> bool:
        """True when the opposite direction is this map with its offsets mirrored."""
        return self._core.symmetric

    @property
    def device(self) -> torch.device:
        return self.in_coords.device

    @property
    def offsets(self) -> list[Triple]:
        """Offset k: the input is at out * stride + offset, or at (out + offset) / stride when `reverse`."""
        return self._core.geometry.offsets(self.reverse)

    @property
    def kernel_volume(self) -> int:
        """Number of offsets K."""
        x, y, z = self.kernel_size
        return x * y * z

    @property
    def tensors(self) -> list[torch.Tensor]:
        """See the class. RuntimeError after `free()`."""
        return list(self._direction().tensors)

    @property
    def made(self) -> Made:
        """The tensors as they are kept: `CoordSet.use`."""
        return self._found().made

    @property
    def num_pairs(self) -> int:
        """(offset, output row) pairs with an input."""
        return self._direction().num_pairs

    @property
    def counts(self) -> torch.Tensor:
        """(n_out,) int32: how many inputs every output row has. Made once; does not wait for a GPU."""
        direction = self._direction()
        made = direction.counts
        if made is None:
            if torch.compiler.is_compiling():  # a traced tensor is one of its graph
                return self._count(direction)
            with self._core.lock, torch.inference_mode(False), torch.no_grad():
                made = direction.counts
                if made is None:
                    what = "the neighbour counts of a kernel map"
                    refuse_capture(what, self.device)
                    made = direction.counts = Made((self._count(direction),), what)
        return made.get()[0]

    def _count(self, direction: Direction) -> torch.Tensor:
        return torch.ops.voxmma.neighbor_counts(direction.tensors, self.kernel_volume, self.out_coords.num)

    @property
    def nbytes(self) -> int:
        """Bytes of the directions built so far, without the coordinates and their index."""
        sides = tuple(self._core.sides.values())
        counts = [tensor for d in sides if d.counts is not None for tensor in d.counts.tensors]
        return held_bytes([*(tensor for d in sides for tensor in d.tensors), *counts])

    def _direction(self) -> Direction:
        direction = self._found()
        direction.made.get()  # checked, and for this stream
        return direction

    def _found(self) -> Direction:
        direction = self._core.sides.get(self.reverse)
        if direction is None:
            return self._build()
        if direction.wanted is not None:
            direction.wanted.taken = True
        return direction

    @property
    def _owner(self) -> CoordSet:
        """The set the map is cached on."""
        return self.in_coords if self.reverse == self._core.flipped else self.out_coords

    @eager
    def _build(self) -> Direction:
        core = self._core
        with core.lock:
            if core.freed:
                raise RuntimeError("this kernel map was freed; kernel_map() builds it anew")
            made = core.sides.get(self.reverse)
            if made is not None:
                return made
            if self.in_coords.sized or self.out_coords.sized:
                made = self.in_coords.plan(self.out_coords, core.geometry, self.reverse)
            elif self.device.type == "cuda":
                refuse_capture(self._what, self.device)
                made = _build_cuda(self.in_coords, self.out_coords, core.geometry, self.reverse)
            else:
                # Normal tensors also under inference_mode: a later training pass saves them for its backward.
                with torch.inference_mode(False), torch.no_grad():
                    made = _build_cpu(
                        self.in_coords, self.out_coords, core.geometry, self.reverse, self.symmetric
                    )
            core.sides[self.reverse] = made
            if self.in_coords.place is not None:
                self.in_coords.place.mapped(self.out_coords.place, core, self.reverse, made)
            return made

    def _what(self) -> str:
        kind = "the transposed kernel map" if self.reverse else "the kernel map"
        return f"{kind} (kernel_size {self.kernel_size}, stride {self.stride})"

    @property
    def core(self) -> MapCore:
        """Both directions, without the coordinate sets."""
        return self._core

    def transposed(self) -> KernelMap:
        """The opposite direction, built when first used; itself when symmetric. Twice gives an equal map."""
        if self.symmetric:
            return self
        return KernelMap(self.out_coords, self.in_coords, self._core, not self.reverse)

    # ---- inspection ----------------------------------------------------------------------------------------

    def neighbor_table(self) -> torch.Tensor:
        """(K, n_out) int32 input row of each offset and output row, -1 = none, on the map's device."""
        return neighbor_table(self.tensors, self.kernel_volume, self.out_coords.num)

    def pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(in_rows, out_rows), both int64, of every offset, output rows ascending."""
        if self.device.type == "cuda":
            table = self.neighbor_table()
            found = [torch.nonzero(row >= 0).flatten() for row in table]
            return [(row[out].long(), out) for row, out in zip(table, found, strict=True)]
        in_rows, out_rows, kptr, _ = self.tensors
        sizes = kptr.diff().tolist()
        return list(zip(torch.split(in_rows, sizes), torch.split(out_rows, sizes), strict=True))

    def summary(self) -> str:
        """Readable facts; on a GPU also the tile plan and the share of issued MMA rows that are useful."""
        n_out = self.out_coords.num
        kind = ", symmetric" if self.symmetric else ", opposite direction" if self.reverse else ""
        lines = [
            f"kernel       {'x'.join(map(str, self.kernel_size))}, stride {self.stride}, "
            f"dilation {self.dilation}, padding {self.padding}{kind}",
            f"rows         {self.in_coords.num:,} in, {n_out:,} out on {self.device}",
            f"pairs        {self.num_pairs:,} ({self.num_pairs / max(n_out, 1):.2f} per output row)",
            f"memory       {self.nbytes / 1e6:.2f} MB",
        ]
        if self.device.type == "cuda" and n_out:
            schedule, passes = self._direction().settled()[1:3]
            unique = int(passes[:, 3].sum())
            lines.append(
                f"tile plan    {schedule.shape[1]:,} tiles, {len(passes):,} passes, "
                f"{unique / n_out:.2f} unique inputs per row"
            )
            useful = ", ".join(f"{self.mma_efficiency(rows):.3f} at {rows} rows" for rows in (16, 64))
            lines.append(f"useful MMA   {useful}")
        return "\n".join(lines)

    def mma_efficiency(self, rows: int = _FRAGMENT_ROWS) -> float:
        """Pairs / MMA rows issued, skipping fragments of `rows` = 16, 32, 64, 128 or 256 rows. GPU only."""
        if self.device.type != "cuda":
            raise ValueError("mma_efficiency needs a map on a GPU: a CPU map has no tiles")
        if rows not in (16, 32, 64, 128, 256):
            raise ValueError(f"rows must be 16, 32, 64, 128 or 256, got {rows}")
        frag = self._direction().settled()[3]
        bits = (frag.unsqueeze(-1) >> torch.arange(32, device=frag.device, dtype=torch.int32)) & 1
        bits = bits.reshape(len(frag), frag.shape[1] * _FRAGMENT_ROWS // rows, rows // _FRAGMENT_ROWS, 32)
        issued = int(bits.amax(2).sum()) * rows
        return self.num_pairs / issued if issued else 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelMap) and self._core is other._core and self.reverse == other.reverse

    def __hash__(self) -> int:
        return hash((id(self._core), self.reverse))

    def __repr__(self) -> str:
        direction = self._core.sides.get(self.reverse)
        state = "freed" if self._core.freed else f"pairs={direction.num_pairs}" if direction else "not built"
        return (
            f"KernelMap(kernel_size={self.kernel_size}, stride={self.stride}, dilation={self.dilation}, "
            f"n_in={self.in_coords.num}, n_out={self.out_coords.num}, {state}, device='{self.device}')"
        )

    # ---- life ----------------------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> KernelMap:
        """The map on another device, cached on the moved coordinates.

        Copied between GPUs; between CPU and GPU, whose tensors differ, it is built there.
        """
        inputs, outputs = self.in_coords.to(device), self.out_coords.to(device)
        if inputs is self.in_coords:
            return self
        core = self._core
        owner, other = (inputs, outputs) if self.reverse == core.flipped else (outputs, inputs)
        if core.freed:
            raise RuntimeError("this kernel map was freed; kernel_map() builds it anew")
        one = self.in_coords is self.out_coords
        moved = MapCore(core.geometry, None if one else other, core.flipped).cached(owner)
        if owner.device.type == self.device.type:
            with torch.inference_mode(False), torch.no_grad():
                for reverse, source in tuple(core.sides.items()):
                    with moved.lock:
                        if reverse not in moved.sides:
                            tensors = [tensor.to(owner.device) for tensor in source.settled()]
                            moved.sides[reverse] = Direction(tensors, source.num_pairs)
        return KernelMap(inputs, outputs, moved, self.reverse)._built()

    def _built(self) -> KernelMap:
        self._found()
        return self

    def free(self) -> None:
        """Releases both directions and uncaches the map. Autograd graphs that hold its tensors keep them."""
        core, owner = self._core, self._owner
        core.freed = True
        core.sides.clear()
        if owner.maps.get(core.key) is core:
            del owner.maps[core.key]
            owner.own.pop(core.geometry, None)
        for coords in (self.in_coords, self.out_coords):  # calls hold the tensors, too
            for key in [key for key, call in tuple(coords.calls.items()) if call.core is core]:
                coords.calls.pop(key, None)

    def share(self) -> KernelMap:
        """Moves the CPU tensors of the map and its coordinates to shared memory, for other processes; returns
        itself.

        CUDA tensors are shared between processes by torch as they are.
        """
        if self.device.type == "cpu":
            self._direction()
            for tensor in (
                self.in_coords.coords,
                self.out_coords.coords,
                *(tensor for d in self._core.sides.values() for tensor in d.tensors),
            ):
                tensor.share_memory_()
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        core = self._core
        if core.freed:
            raise RuntimeError("this kernel map was freed; kernel_map() builds it anew")
        return _restore, (
            self.in_coords,
            self.out_coords,
            core.geometry,
            core.sides,
            self.reverse,
            core.flipped,
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> KernelMap:
        """An independent, uncached map on the same coordinate sets."""
        core = MapCore(self._core.geometry, self._core.other, self._core.flipped)
        core.freed = self._core.freed
        for reverse, source in tuple(self._core.sides.items()):
            core.sides[reverse] = Direction([tensor.clone() for tensor in source.settled()], source.num_pairs)
        return KernelMap(self.in_coords, self.out_coords, core, self.reverse)


def _restore(
    in_coords: CoordSet,
    out_coords: CoordSet,
    geometry: Geometry,
    sides: dict[bool, Direction],
    reverse: bool,
    flipped: bool,
) -> KernelMap:
    """Unpickles a map without building anything, and puts it into the cache of its set."""
    owner, other = (in_coords, out_coords) if reverse == flipped else (out_coords, in_coords)
    core = MapCore(geometry, None if owner is other else other, flipped)
    core.sides = sides
    core.cached(owner)
    return KernelMap(in_coords, out_coords, core, reverse)


def kernel_map(
    in_coords: CoordSet | Voxels,
    kernel_size: int | Sequence[int],
    *,
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | None = None,
    out_coords: CoordSet | Voxels | None = None,
    transposed: bool = False,
    generative: bool = False,
    max_voxels: int | None = None,
    output_padding: int | Sequence[int] = 0,
    outputs: str = "windows",
) -> KernelMap:
    """The kernel map of a convolution or pooling layer, built on first use and cached on a coordinate set.

    Output row i meets, under kernel position k (from 0), the input row at `out_i * stride - padding + k *
    dilation` of the same sample; transposed, the input row j for which `in_j * stride - padding + k *
    dilation` is output i. The outputs are, in this order of preference:

    - `out_coords`, which with a stride remembers the inputs as its finer set when it has no other;
    - not transposed: with stride 1 the inputs themselves (submanifold); with another stride, or generative,
      every site whose window holds an input;
    - transposed: with stride 1 the inputs themselves; else, unless generative, the finer set that strided
      layers of this total stride made `in_coords` from; else every site that an input reaches.

    With outputs='cells' a strided layer that is not generative makes the cells of the coarser grid that hold
    an input instead, whatever its kernel: `voxmma.downsample`. Where `in_coords` has a `spatial_shape`, sites
    outside of torch's output shape are left out; where it has none, the grid has no borders.

    Sets made here are sorted by (batch, x, y, z), and made once for an input set and a kernel. On a GPU that
    reads back how many they are; building a map reads back how large its plan is, unless little room is
    enough for any plan, as between a grid and its 2x2x2 blocks.

    Args:
        in_coords: input coordinates (a Voxels stands for its coordinate set).
        kernel_size: 1 to 9 per axis, one int or three. Odd kernels are centred, even ones start at 0.
        dilation: 1 or more per axis.
        stride: 1 to 4096 per axis.
        padding: default (kernel_size // 2) * dilation for odd and 0 for even sizes.
        out_coords: output coordinates. Another object is another set, however equal.
        transposed, generative: see above.
        max_voxels: most voxels a set made here may have, default 2^26.
        output_padding: 0 or more, one int or three: cells added to the far side of the `spatial_shape` that a
            transposed layer makes.
        outputs: 'windows' or 'cells', see above.

    Raises:
        TypeError, ValueError: naming the argument: wrong type, out of range, sets on two devices or of two
            batch sizes; an output shape that cannot be; more than `max_voxels` outputs, before they come into
            being.
        RuntimeError: the coordinates are on a GPU and this build has no CUDA kernels.
    """
    cubic = type(kernel_size) is type(dilation) is type(stride) is int and padding is None
    make = _cubic_geometry if cubic and not torch.compiler.is_compiling() else geometry_of
    geometry = make(kernel_size, dilation, stride, padding)
    source, more = _coord_set(in_coords, "in_coords"), output_padding_triple(output_padding)
    target = None if out_coords is None else _coord_set(out_coords, "out_coords")
    rule = check_outputs(outputs), max_voxels, more
    return map_over(source, geometry, target, transposed, generative, *rule)


def map_over(
    source: CoordSet,
    geometry: Geometry,
    out_coords: CoordSet | None,
    transposed: bool,
    generative: bool,
    outputs: str = "windows",
    max_voxels: int | None = None,
    output_padding: Triple = (0, 0, 0),
) -> KernelMap:
    """`kernel_map` of arguments that have been checked."""
    flipped = False  # cached on the set that the other one was made from
    source = source.sites
    if out_coords is not None:
        target = out_coords.sites
    else:
        rule = outputs, max_voxels, output_padding
        target, flipped = made_from(source, geometry, transposed, generative, *rule)
    if target is not source:
        if out_coords is not None and not transposed and geometry.stride != (1, 1, 1):
            target.remember(source, geometry)
        if source.device != target.device:
            raise ValueError(f"out_coords is on {target.device}, in_coords is on {source.device}")
        if source.batch_size != target.batch_size:
            raise ValueError(f"out_coords has {target.batch_size} samples, in_coords has {source.batch_size}")
    fine, coarse = (target, source) if transposed else (source, target)
    if torch.compiler.is_compiling() and target is source and not source.traced and geometry in source.own:
        core = source.own[geometry]
    else:
        core = core_between(fine, coarse, geometry, flipped)
    made = KernelMap(source, target, core, transposed)
    if made.symmetric:
        made.reverse = False  # one direction serves both
    return made._built()


def made_from(
    source: CoordSet,
    geometry: Geometry,
    transposed: bool,
    generative: bool,
    outputs: str,
    max_voxels: int | None,
    output_padding: Triple,
) -> tuple[CoordSet, bool]:
    """The outputs of a layer on `source`, and whether the finer set was made out of the coarser one."""
    if geometry.stride == (1, 1, 1) and not generative:
        return source, False
    if not transposed and outputs == "cells" and not generative:
        return coarser_set(source, geometry.stride, max_voxels), False
    if not transposed:
        return windows(source, geometry, max_voxels), False
    finer = None if generative else finer_set(source, geometry.stride)
    if finer is not None:
        return finer, False
    return children(source, geometry, max_voxels, output_padding), True


def geometry_of(
    kernel_size: int | Sequence[int],
    dilation: int | Sequence[int],
    stride: int | Sequence[int],
    padding: int | Sequence[int] | None,
) -> Geometry:
    """The arguments of `kernel_map`, checked: TypeError or ValueError naming the one that is wrong."""
    size = triple(kernel_size, "kernel_size", 1, MAX_KERNEL)
    step = triple(stride, "stride", 1, MAX_STRIDE)
    spread = triple(dilation, "dilation", 1, MAX_OFFSET)
    pad = padding_triple(padding, size, spread)
    for k, d, p in zip(size, spread, pad, strict=True):
        if (k - 1) * d - p > MAX_OFFSET:
            raise ValueError(f"dilation {spread} with kernel_size {size} reaches offsets above {MAX_OFFSET}")
    return Geometry(size, step, spread, pad)


#: The same for plain ints: equal arguments of other types, such as True, must not find what 1 left.
_cubic_geometry = functools.lru_cache(maxsize=256)(geometry_of)


def traceable(x: CoordSet, geometry: Geometry, elsewhere: bool = False) -> bool:
    """Whether torch.compile can find a layer's map among its inputs, in a way that serves other sets, too.

    So it is for maps that are inputs of the graph (voxmma.export.mapped), and for maps from a set to itself
    that are there. Others are cached under ids of sets, or have yet to be built.

    `elsewhere`: the layer makes its outputs on another set, whatever its stride. Reads little of what it is
    given: all of that is guarded on, and layers share the code.
    """
    if x.traced:
        return True
    if elsewhere or geometry.stride != (1, 1, 1) or geometry not in x.own:
        return False
    core = x.own[geometry]
    return False in core.sides and (core.symmetric or True in core.sides)


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, some of which may share it."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def finer_set(coarse: CoordSet, stride: Triple) -> CoordSet | None:
    """The set that strided layers of this total stride made `coarse` from, or of cells of which it holds
    those (`coarser_set`); None when there is none.

    ValueError when there are several: `CoordSet.remember`.
    """
    link = coarse.finer
    if link is not None and link.geometry.stride == stride and not link.ambiguous:
        return link.get()
    total, found = (1, 1, 1), coarse
    while total != stride:
        link = found.finer
        if link is None or any(t > s for t, s in zip(total, stride, strict=True)):
            return _finer_level(coarse, stride)
        if link.ambiguous:
            raise ValueError(
                "strided layers on several inputs put their outputs on the coordinates of x (coords=...): "
                "say which voxels to go back to with coords= (out_coords= of kernel_map)"
            )
        x, y, z = (t * s for t, s in zip(total, link.geometry.stride, strict=True))
        total, found = (x, y, z), link.get()
    return found


def _finer_level(coarse: CoordSet, stride: Triple) -> CoordSet | None:
    if coarse.levels is None:
        return None
    family, mine = coarse.levels
    x, y, z = (m // s if m % s == 0 else 0 for m, s in zip(mine, stride, strict=True))
    return family.get((x, y, z))


def padding_triple(padding: int | Sequence[int] | None, size: Triple, dilation: Triple) -> Triple:
    """`padding` per axis, or its default: (size // 2) * dilation for odd sizes, 0 for even ones."""
    if padding is not None:
        return triple(padding, "padding", -MAX_OFFSET, MAX_OFFSET)
    x, y, z = (k // 2 * d if k % 2 else 0 for k, d in zip(size, dilation, strict=True))
    return x, y, z


def coarser_set(source: CoordSet, stride: Triple, max_voxels: int | None = None) -> CoordSet:
    """The cells of a grid coarser by `stride` that hold a voxel: one set for every total stride from the set
    that the first of them was made from, by whatever steps.

    Raises ValueError as `voxmma.sparse.derive.windows`.
    """
    if stride == (1, 1, 1) or torch.compiler.is_compiling():
        return _cells(source, stride, max_voxels)
    with source._index.lock:
        if source.levels is None:
            source.levels = weakref.WeakValueDictionary({(1, 1, 1): source}), (1, 1, 1)
        family, mine = source.levels
        x, y, z = (m * s for m, s in zip(mine, stride, strict=True))
        made = family.get((x, y, z))
        if made is None or made._made.written:
            made = _cells(source, stride, max_voxels)
            made.levels = family, (x, y, z)
            family[x, y, z] = made
        check_count(made.num, max_voxels, source.num)
        return made


def _cells(source: CoordSet, stride: Triple, max_voxels: int | None) -> CoordSet:
    geometry = Geometry(stride, stride, (1, 1, 1), (0, 0, 0))
    if max(stride) <= MAX_KERNEL:
        return cells(source, geometry, max_voxels)
    columns = zip(source.coords.unbind(1), (1, *stride), strict=True)
    coarse = torch.stack([column.div(size, rounding_mode="floor") for column, size in columns], dim=1)
    with torch.inference_mode(False), torch.no_grad():
        rows = unpack(torch.unique(pack(coarse)))
        made = CoordSet.trusted(
            rows, source.batch_size, spatial_shape=cells_shape(source.spatial_shape, stride)
        )
    made.finer = Finer(source, geometry)
    return made


def check_outputs(outputs: str) -> str:
    """`outputs`; ValueError unless it is 'windows' or 'cells'."""
    if outputs not in ("windows", "cells"):
        raise ValueError(f"outputs must be 'windows' or 'cells', got {outputs!r}")
    return outputs


def output_padding_triple(output_padding: int | Sequence[int]) -> Triple:
    """`output_padding` per axis; TypeError or ValueError unless each is 0 or more."""
    return triple(output_padding, "output_padding", 0, MAX_OFFSET)


def neighbor_table(tensors: list[torch.Tensor], kernel_volume: int, n_out: int) -> torch.Tensor:
    """KernelMap.neighbor_table() from the tensors of a map. Does not wait for a GPU."""
    if tensors[0].is_cuda:
        return _C.plan_to_table(tensors, n_out)
    in_rows, out_rows, kptr, _ = tensors
    table = torch.full((kernel_volume, n_out), -1, dtype=torch.int32, device=in_rows.device)
    offset = torch.repeat_interleave(torch.arange(kernel_volume, device=in_rows.device), kptr.diff())
    table[offset, out_rows] = in_rows.int()
    return table


def _coord_set(value: CoordSet | Voxels, name: str) -> CoordSet:
    coords = value if isinstance(value, CoordSet) else getattr(value, "coord_set", None)
    if not isinstance(coords, CoordSet):
        raise TypeError(f"{name} must be a CoordSet or a Voxels, got {type(value).__name__}")
    return coords.sites


@functools.lru_cache(maxsize=256)
def plan_rule(geometry: Geometry, reverse: bool) -> tuple[Triple, list[int], list[int], Triple, Triple]:
    """size, start, step, mul and div of `_C.build_plan`."""
    size, stride, dilation, padding = geometry
    sign = 1 if reverse else -1
    start, step = [sign * p for p in padding], [-sign * d for d in dilation]
    mul, div = ((1, 1, 1), stride) if reverse else (stride, (1, 1, 1))
    return size, start, step, mul, div


def _build_cuda(in_coords: CoordSet, out_coords: CoordSet, geometry: Geometry, reverse: bool) -> Direction:
    """The tile plan; symmetry saves nothing there."""
    in_order, hash_blocks = in_coords.hash_index()
    out_order = in_order if out_coords is in_coords else out_coords.hash_index().order
    *tensors, stats, pairs = _C.build_plan(
        out_coords.coords, out_order, hash_blocks, in_order, *plan_rule(geometry, reverse)
    )
    tensors.append(size_tensor(in_coords._coords, out_coords._coords))
    return Direction(tensors, None, stats) if pairs < 0 else Direction(tensors, pairs)


def size_tensor(in_coords: torch.Tensor, out_coords: torch.Tensor) -> torch.Tensor:
    """What tells the ops, by its shape alone, between how many rows a map leads."""
    return _C.map_size(in_coords, len(in_coords), len(out_coords))


def _build_cpu(
    in_coords: CoordSet, out_coords: CoordSet, geometry: Geometry, reverse: bool, symmetric: bool
) -> Direction:
    """A symmetric map searches half its offsets; the other half holds the same pairs the other way round."""
    out_row = out_coords.sorted_keys()[1]
    tensors = cpu_pairs(
        *in_coords.sorted_keys(), out_row, out_coords.coords, geometry, reverse, symmetric=symmetric
    )
    return Direction([*tensors, size_tensor(in_coords._coords, out_coords._coords)], len(tensors[0]))


def cpu_pairs(
    ordered: torch.Tensor,
    in_row: torch.Tensor,
    out_row: torch.Tensor,
    out_coords: torch.Tensor,
    geometry: Geometry,
    reverse: bool,
    *,
    symmetric: bool = False,
) -> list[torch.Tensor]:
    """in_rows, out_rows and kptr of a map on a CPU: binary searches of the output rows `out_row` per offset.

    `ordered` are the inputs' ascending keys, `in_row` the row of each. `out_row` comes in the order of the
    outputs' keys, so that searches share cache lines.
    """
    one = (1, 1, 1)
    mul, div = (one, geometry.stride) if reverse else (geometry.stride, one)
    offsets = geometry.offsets(reverse)
    n_in, n_out = len(ordered), len(out_row)
    in_order = ordered
    ordered = torch.cat(
        [ordered, ordered.new_zeros(1)]
    )  # searches that run off the end find something to read
    coords = out_coords[out_row]
    batch, *columns = coords.long().unbind(1)
    axes = [
        {add: _axis_query(column, mul[axis], add, div[axis], axis) for add in {o[axis] for o in offsets}}
        for axis, column in enumerate(columns)
    ]
    # Buffers for all offsets: fresh memory for every step would cost more than the searches.
    batch = pack_batch(batch)
    key, place, seen = (torch.empty(n_out, dtype=torch.int64, device=batch.device) for _ in range(3))
    hit = torch.empty(n_out, dtype=torch.bool, device=batch.device)
    neighbour = torch.empty(len(out_coords), dtype=torch.int64, device=batch.device)
    in_rows: list[torch.Tensor] = []
    out_rows: list[torch.Tensor] = []
    for k, offset in enumerate(offsets):
        mirror = len(offsets) - 1 - k
        if symmetric and mirror < k:
            rows, source = in_rows[mirror], out_rows[mirror]
        else:
            queries = [cache[add] for cache, add in zip(axes, offset, strict=True)]
            torch.add(batch, queries[0][0], out=key).add_(queries[1][0]).add_(queries[2][0])
            torch.searchsorted(in_order, key, out=place)
            torch.eq(torch.index_select(ordered, 0, place, out=seen), key, out=hit)
            hit &= place < n_in
            for _, ok in queries:
                if ok is not None:
                    hit &= ok
            found = torch.nonzero(hit).flatten()
            rows, source = out_row[found], in_row[place[found]]
        neighbour.fill_(-1)
        neighbour[rows] = source
        out_rows.append(torch.nonzero(neighbour >= 0).flatten())
        in_rows.append(neighbour[out_rows[-1]])
    kptr = [0, *itertools.accumulate(len(rows) for rows in out_rows)]
    starts = torch.tensor(kptr, dtype=torch.int64, device=coords.device)
    return [torch.cat(in_rows), torch.cat(out_rows), starts]


def _axis_query(
    column: torch.Tensor, mul: int, add: int, div: int, axis: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Part of the packed query key that an int64 column makes, and which rows have one (None: all)."""
    query = column + add if mul == 1 else column * mul + add
    ok = (query >= COORD_MIN * div) & (query <= COORD_MAX * div)
    if div != 1:
        ok &= query % div == 0
        query = query.div(div, rounding_mode="floor")
    return pack_axis(query, axis), None if bool(ok.all()) else ok
