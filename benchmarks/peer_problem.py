"""What benchmarks/peerbench.py measures: a layer on coordinates, its operands, and the fp64 results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from voxmma._timing import input_sets
from voxmma.data.scenes import Array
from voxmma.ops import formats
from voxmma.verify import accuracy


@dataclass(frozen=True)
class Layer:
    """What is measured: a cubic kernel without bias; stride 1 is submanifold.

    A transposed layer goes from the cells that the strided layer of its kernel reaches back onto the scene.
    """

    c_in: int
    c_out: int
    kernel: int = 3
    stride: int = 1
    dtype: str = "fp16"
    transposed: bool = False

    @property
    def volume(self) -> int:
        return self.kernel**3

    @property
    def origin(self) -> int:
        """Offsets of the kernel run from minus this number."""
        return self.kernel // 2 if self.kernel % 2 else 0

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Of the kernel, lexicographic."""
        return itertools.product(range(-self.origin, self.kernel - self.origin), repeat=3)

    @property
    def name(self) -> str:
        """Such as '64x128 k3 fp16', '64x64 k2s2 fp16', and transposed '64x64 k2t2 fp16'."""
        stride = f"{'t' if self.transposed else 's'}{self.stride}" if self.stride > 1 else ""
        return f"{self.c_in}x{self.c_out} k{self.kernel}{stride} {self.dtype}"


def prepared(coords: Array) -> Array:
    """Coordinates that every library takes: (N, 4) int32 distinct, from 0, samples one after the other.

    Raises ValueError unless `coords` is (N, 4) integers.
    """
    if coords.ndim != 2 or coords.shape[1] != 4 or not np.issubdtype(coords.dtype, np.integer):
        raise ValueError(f"coords must be integers (N, 4), got {coords.dtype} {coords.shape}")
    made = coords.astype(np.int64)
    if len(made):
        made -= made.min(axis=0)
    _, first = np.unique(made, axis=0, return_index=True)
    made = made[np.sort(first)]
    return made[np.argsort(made[:, 0], kind="stable")].astype(np.int32)


def _keys(coords: Tensor, extent: int) -> Tensor:
    """One number for a coordinate (batch, x, y, z) within (-extent, extent)."""
    b, x, y, z = coords.long().unbind(1)
    side = 2 * extent
    return ((b * side + x + extent) * side + y + extent) * side + z + extent


def lookup(coords: Tensor, queries: Tensor) -> Tensor:
    """Row of each query in `coords`, -1 = none. Both (.., 4) integers."""
    if not len(coords) or not len(queries):
        return torch.full((len(queries),), -1, device=coords.device, dtype=torch.int64)
    extent = int(max(coords.abs().max(), queries.abs().max())) + 1
    ordered, rows = _keys(coords, extent).sort()
    wanted = _keys(queries, extent)
    place = torch.searchsorted(ordered, wanted).clamp_(max=len(ordered) - 1)
    return torch.where(ordered[place] == wanted, rows[place], -1)


def reached(coords: Tensor, layer: Layer) -> Tensor:
    """Coordinates beyond a layer: `coords` themselves, or in order of (batch, x, y, z) all cells whose kernel
    meets one of them."""
    if layer.stride == 1:
        return coords
    found = []
    for offset in layer.offsets():
        moved = coords - torch.tensor([0, *offset], device=coords.device, dtype=coords.dtype)
        whole = (moved[:, 1:].remainder(layer.stride) == 0).all(1)
        moved[:, 1:] = moved[:, 1:].div(layer.stride, rounding_mode="floor")
        found.append(moved[whole])
    return torch.unique(torch.cat(found), dim=0)


class Problem:
    """Coordinates on a device, and the pairs of any kernel on them, found with torch alone."""

    def __init__(self, coords: Array, device: torch.device) -> None:
        self.coords = torch.from_numpy(coords).to(device).contiguous()
        self.device = device
        self.batch_size = int(coords[:, 0].max(initial=-1)) + 1
        self.shape = [int(v) + 1 for v in coords[:, 1:].max(axis=0, initial=-1)]
        self._pairs: dict[tuple[int, int], list[tuple[Tensor, Tensor]]] = {}
        self._beyond: dict[tuple[int, int], Tensor] = {}

    def _reached(self, layer: Layer) -> Tensor:
        key = (layer.kernel, layer.stride)
        if key not in self._beyond:
            self._beyond[key] = reached(self.coords, layer)
        return self._beyond[key]

    def inputs(self, layer: Layer) -> Tensor:
        """(N, 4) input coordinates: the scene, or what `reached` says for a transposed layer."""
        return self._reached(layer) if layer.transposed else self.coords

    def outputs(self, layer: Layer) -> Tensor:
        """(M, 4) output coordinates: the other way round."""
        return self.coords if layer.transposed else self._reached(layer)

    def pairs(self, layer: Layer) -> list[tuple[Tensor, Tensor]]:
        """(input rows, output rows) of every offset, in voxmma's order of offsets."""
        key = (layer.kernel, layer.stride)
        if key not in self._pairs:
            self._pairs = {key: find_pairs(self.coords, self._reached(layer), layer)}
        found = self._pairs[key]
        return [(out, rows) for rows, out in found] if layer.transposed else found


def find_pairs(coords: Tensor, outputs: Tensor, layer: Layer) -> list[tuple[Tensor, Tensor]]:
    """Of a layer that is not transposed."""
    base = outputs * torch.tensor([1, *[layer.stride] * 3], device=coords.device, dtype=torch.int64)
    pairs = []
    for offset in layer.offsets():
        rows = lookup(coords, base + torch.tensor([0, *offset], device=coords.device, dtype=torch.int64))
        out = torch.nonzero(rows >= 0).flatten()
        pairs.append((rows[out], out))
    return pairs


class Data:
    """Operands of a layer, the same in every process, and its fp64 results (y, dx, dW with their sums)."""

    def __init__(self, problem: Problem, layer: Layer) -> None:
        device = problem.device
        dtype = formats.DTYPES[layer.dtype]
        generator = torch.Generator(device)
        generator.manual_seed(layer.c_in * 1_000_003 + layer.c_out * 1_009 + layer.volume)
        n_in, n_out = len(problem.inputs(layer)), len(problem.outputs(layer))

        def draw(*shape: int, scale: float = 1.0) -> Tensor:
            made = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(scale)
            return formats.round_tf32(made) if layer.dtype == "tf32" else made.to(dtype)

        word = torch.finfo(dtype).bits // 8
        self.sets = input_sets(device, (n_in * layer.c_in + n_out * layer.c_out) * word)
        self.w = draw(layer.volume, layer.c_in, layer.c_out, scale=(layer.volume * layer.c_in) ** -0.5)
        self.x = [draw(n_in, layer.c_in) for _ in range(self.sets)]
        self.dy = [draw(n_out, layer.c_out, scale=0.1) for _ in range(self.sets)]
        pairs = problem.pairs(layer)
        self.pairs = sum(len(rows) for rows, _ in pairs)
        self.references = (
            accuracy.reference_conv(self.x[0], self.w, pairs, n_out),
            accuracy.reference_dgrad(self.dy[0], self.w, pairs, n_in),
            accuracy.reference_wgrad(self.x[0], self.dy[0], pairs),
        )
