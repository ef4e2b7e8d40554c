"""Convolutions in every precision mode on generated operands, for sweeps and for validation."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from voxmma.data import scenes
from voxmma.dispatch import settings
from voxmma.dispatch.record import Record
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.ops import formats
from voxmma.ops.kernels import CHUNKS, parse_accumulator
from voxmma.sparse.maps import KernelMap, kernel_map
from voxmma.sparse.tensor import Voxels
from voxmma.verify import accuracy
from voxmma.verify.accuracy import Bound, Errors
from voxmma.verify.families import FAMILIES

OPS = ("fprop", "dgrad", "wgrad")
KERNEL_SIZES = {1: 1, 8: 2, 27: 3, 125: 5}


@dataclass(frozen=True)
class Mode:
    """What is asked for: compute dtype and accumulator ('fp32', 'fp16', 'fp16_promoted:64', ..., 'fp64')."""

    dtype: torch.dtype
    accumulator: str
    tf32: bool = False
    """fp32 operands that the kernel rounds to TF32; the reference takes the nearest TF32 numbers."""

    @property
    def name(self) -> str:
        """Such as 'fp16 acc fp32'."""
        return f"{'tf32' if self.tf32 else formats.format_name(self.dtype)} acc {self.accumulator}"


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(torch.float16, "fp32"),
        Mode(torch.float16, "fp16"),
        *(Mode(torch.float16, f"fp16_promoted:{chunk}") for chunk in CHUNKS),
        Mode(torch.bfloat16, "fp32"),
        Mode(torch.bfloat16, "fp16"),
        Mode(torch.float32, "fp32"),
        Mode(torch.float32, "fp32", tf32=True),
        Mode(torch.float64, "fp64"),
    )
}


# ---- what rows share -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A scene, the map of one kernel on it, and the lengths of its sums."""

    voxels: Voxels
    mapping: KernelMap
    pairs: list[tuple[Tensor, Tensor]]
    """of `mapping`, by offset"""
    inputs: int
    """most offsets that an output row sums over"""
    outputs: int
    """most offsets by which an input row is read: the length of an input gradient's sum"""
    longest: int
    """most pairs of one offset: the length of a weight gradient's sum"""

    def reduction(self, op: str, channels: int) -> tuple[int, int]:
        """(n, offsets) of the longest sum: active offsets x channels; for wgrad pairs of one offset."""
        if op == "wgrad":
            return self.longest, 1
        active = self.inputs if op == "fprop" else self.outputs
        return active * channels, max(1, active)


def site(x: Voxels, kernel_size: int) -> Site:
    """The site of a kernel on a scene. Waits for the device."""
    mapping = kernel_map(x.coord_set, kernel_size)
    pairs = mapping.pairs()

    def most(side: int) -> int:
        rows = torch.cat([pair[side] for pair in pairs])
        return int(torch.bincount(rows).max()) if len(rows) else 0

    return Site(x, mapping, pairs, most(1), most(0), max((len(rows) for rows, _ in pairs), default=0))


@dataclass(frozen=True)
class Operands:
    """Operands of one row and its fp64 result. For TF32: fp32 operands, the result of rounded ones."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    y64: Tensor
    abs64: Tensor


def draw(
    op: str, family: str, dtype: torch.dtype, channels: int, where: Site, tf32: bool = False
) -> Operands:
    """Operands of a row on the site's device; the reduction of `op` sees what the family is about."""
    device = where.mapping.device
    volume, rows = where.mapping.kernel_volume, where.mapping.in_coords.num
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{op} {family} {channels} {volume}".encode()))
    drawn = FAMILIES[family]

    def read(t: Tensor) -> Tensor:
        return formats.round_tf32(t) if tf32 else t

    first = drawn.activations((rows, channels), dtype, generator, device)
    weight = drawn.weights((volume, channels, channels), dtype, generator, device)
    zeros = torch.zeros_like(first)
    if op == "fprop":
        found = accuracy.reference_conv(read(first), read(weight), where.pairs, rows)
        return Operands(first, weight, zeros, *found)
    if op == "dgrad":
        weight = weight.transpose(-1, -2).contiguous()
        found = accuracy.reference_dgrad(read(first), read(weight), where.pairs, rows)
        return Operands(zeros, weight, first, *found)
    dy = drawn.gradients((rows, channels), dtype, generator, device)
    weight = torch.zeros(weight.shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return Operands(first, weight, dy, *accuracy.reference_wgrad(read(first), read(dy), where.pairs))


# ---- one row ---------------------------------------------------------------------------------------------


def execute(op: str, mode: Mode, given: Operands, where: Site) -> Iterator[tuple[Tensor, Record]]:
    """The library's own result of a row and the record of what ran, computed anew each time it is asked for.

    A gradient's forward pass runs once.
    """
    feats = given.x.detach().requires_grad_(op == "dgrad")
    weight = given.weight.detach().requires_grad_(op == "wgrad")
    size = where.mapping.kernel_size
    accumulator = None if mode.accumulator == "fp64" else mode.accumulator

    def forward() -> tuple[Tensor, Record]:
        with settings.override(fp32_precision="tf32" if mode.tf32 else "ieee"):
            y = spatially_sparse_conv(
                where.voxels.with_feats(feats),
                weight,
                size,
                accumulator=accumulator,
                kernel_map=where.mapping,
                layer=f"sweep {op}",
            )
        assert y._record is not None
        return y.feats, y._record

    y, record = forward()
    while op == "fprop":
        yield y, record
        y, record = forward()
    leaf = feats if op == "dgrad" else weight
    while True:
        (gradient,) = torch.autograd.grad(y, leaf, given.dy, retain_graph=True)
        yield gradient, record


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit by bit. Waits for the device."""
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def limit_of(op: str, mode: Mode, accumulator: str, channels: int, where: Site) -> Bound:
    """The bound of a row that ran with `accumulator`. Weight gradients come out in fp32 (fp64)."""
    n, offsets = where.reduction(op, channels)
    wide = torch.promote_types(mode.dtype, torch.float32)
    name, chunk = parse_accumulator(accumulator)
    operands: torch.dtype | str = "tf32" if mode.tf32 else mode.dtype
    return accuracy.bound(
        name,
        n,
        torch.float16 if name.startswith("fp16") else operands,
        wide if op == "wgrad" else mode.dtype,
        accuracy.arch_of(where.mapping.device),
        offsets=offsets,
        chunk=chunk,
    )


def examine(
    results: Iterator[tuple[Tensor, Record]], given: Operands, limit: Bound, first: Tensor, repeats: int
) -> tuple[Errors, bool]:
    """(errors, whether all repeats equal `first` bit by bit) of `first` and of repeats - 1 more results.

    The errors of a repeat that equals the first are those of the first; of one that does not they are
    measured, and the worst of all is returned.
    """
    found, repeatable = accuracy.errors(first, given.y64, given.abs64, limit.floor), True
    for again, _ in islice(results, repeats - 1):
        if not same_bits(first, again):
            repeatable = False
            found = found.worst(accuracy.errors(again, given.y64, given.abs64, limit.floor))
    return found, repeatable


# ---- the sweep -------------------------------------------------------------------------------------------


def scene(device: torch.device, voxels: int) -> Voxels:
    """At least `voxels` voxels of a wavy surface (about 2.5 a cell of its area), without features."""
    side = math.ceil(math.sqrt(voxels / 2.5))
    coords = scenes.surface(side)
    while len(coords) < voxels:
        side += 1
        coords = scenes.surface(side)
    index = torch.from_numpy(coords).to(device)
    return Voxels(index, torch.zeros(len(index), 1, device=device, dtype=torch.float32))


def defaults(device: torch.device, voxels: int | None, repeats: int | None) -> tuple[int, int]:
    """(voxels, repeats): what is None becomes 200,000 and 10 on a GPU, 500 and 2 on a CPU."""
    on_gpu = device.type == "cuda"
    return voxels or (200_000 if on_gpu else 500), repeats or (10 if on_gpu else 2)
