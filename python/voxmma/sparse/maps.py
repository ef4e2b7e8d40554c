"""Kernel maps: which input row meets which output row under which kernel offset.

A map is built once for a coordinate set (or a pair of them) and a kernel shape, and cached on one of them.
It has two directions, each built on demand: from the geometry's inputs to its outputs, and the opposite one,
which transposed and inverse layers and the input gradient run over. A symmetric map (submanifold, odd kernel)
is its own opposite with the offsets mirrored.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from voxmma._dynamo import eager
from voxmma._types import Triple
from voxmma.sparse.build import build_cpu, build_cuda, neighbor_table
from voxmma.sparse.cached import Made, outside_transforms, refuse_capture
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.cores import Direction, MapCore, core_between
from voxmma.sparse.geometry import (
    Geometry,
    check_outputs,
    geometry_of,
    output_padding_triple,
)
from voxmma.sparse.levels import made_from

if TYPE_CHECKING:
    from voxmma.sparse.tensor import Voxels


_FRAGMENT_ROWS = 16


class KernelMap:
    """One direction of a kernel map: input rows of `in_coords` to output rows of `out_coords`.

    Made by `kernel_map()`. Two objects are equal when they are the same direction of the same cached map.

    `tensors` is what the ops take. On a CPU: [in_rows int64 (P,), out_rows int64 (P,), kptr int64 (K+1,),
    size], pairs sorted by (offset, output row), offset k owning kptr[k]:kptr[k+1]. On a GPU the tile plan of
    plan.h: [order int32 (T*256,), schedule int32 (2, T, 4), passes int32 (P, 4), frag int32 (P, 16), uniq
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
            with self._core.lock, torch.inference_mode(False), torch.no_grad(), outside_transforms():
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
            elif self.in_coords._coords.is_cuda:
                refuse_capture(self._what, self.device)
                with outside_transforms():
                    made = build_cuda(self.in_coords, self.out_coords, core.geometry, self.reverse)
            else:
                # Normal tensors also under inference_mode: a later training pass saves them for its backward.
                with torch.inference_mode(False), torch.no_grad(), outside_transforms():
                    made = build_cpu(
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
            with torch.inference_mode(False), torch.no_grad(), outside_transforms():
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
        if owner.own.get(core.geometry) is core:
            del owner.own[core.geometry]
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
    enough for any plan: 1 MiB, or no more than is usual, as between a grid and its 2x2x2 blocks.

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
    kernel = kernel_size, dilation, stride, padding
    plain = type(kernel_size) is type(dilation) is type(stride) is type(output_padding) is int
    if plain and padding is None and type(outputs) is str and not torch.compiler.is_compiling():
        geometry, more = _cubic_arguments(*kernel, output_padding, outputs)
    else:
        geometry, more = _arguments(*kernel, output_padding, outputs)
    source = _coord_set(in_coords, "in_coords")
    target = None if out_coords is None else _coord_set(out_coords, "out_coords")
    return map_over(source, geometry, target, transposed, generative, outputs, max_voxels, more)


def _arguments(
    kernel_size: Any, dilation: Any, stride: Any, padding: Any, output_padding: Any, outputs: str
) -> tuple[Geometry, Triple]:
    """Arguments of `kernel_map`, checked."""
    geometry, more = (
        geometry_of(kernel_size, dilation, stride, padding),
        output_padding_triple(output_padding),
    )
    check_outputs(outputs)
    return geometry, more


#: The same for plain ints: equal arguments of other types, such as True, must not find what 1 left.
_cubic_arguments = functools.lru_cache(maxsize=256)(_arguments)


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
    source = source.sites
    target, flipped = source, False  # cached on the set that the other one was made from
    if out_coords is not None:
        target = out_coords.sites
        if target is not source:
            if not transposed and geometry.stride != (1, 1, 1):
                target.remember(source, geometry)
            if source.device != target.device:
                raise ValueError(f"out_coords is on {target.device}, in_coords is on {source.device}")
            if source.batch_size != target.batch_size:
                raise ValueError(
                    f"out_coords has {target.batch_size} samples, in_coords has {source.batch_size}"
                )
    elif generative or geometry.stride != (1, 1, 1):
        rule = outputs, max_voxels, output_padding
        target, flipped = made_from(source, geometry, transposed, generative, *rule)
    core = source.own.get(geometry) if target is source and not source.traced else None
    if core is None:
        fine, coarse = (target, source) if transposed else (source, target)
        core = core_between(fine, coarse, geometry, flipped)
    return KernelMap(source, target, core, transposed and not core.symmetric)._built()  # one serves both


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


def _coord_set(value: CoordSet | Voxels, name: str) -> CoordSet:
    coords = value if isinstance(value, CoordSet) else getattr(value, "coord_set", None)
    if not isinstance(coords, CoordSet):
        raise TypeError(f"{name} must be a CoordSet or a Voxels, got {type(value).__name__}")
    return coords.sites
