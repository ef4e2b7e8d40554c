"""The shape of a kernel map: its arguments, checked, and the coordinates that they lead to."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from voxmma._types import Triple, triple

MAX_KERNEL = 9
MAX_STRIDE = 4096
MAX_OFFSET = 1 << 20


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
            raise ValueError(
                f"dilation {spread} with kernel_size {size} and padding {pad} reaches offsets above "
                f"{MAX_OFFSET}"
            )
    return Geometry(size, step, spread, pad)


def padding_triple(padding: int | Sequence[int] | None, size: Triple, dilation: Triple) -> Triple:
    """`padding` per axis, or its default: (size // 2) * dilation for odd sizes, 0 for even ones."""
    if padding is not None:
        return triple(padding, "padding", -MAX_OFFSET, MAX_OFFSET)
    x, y, z = (k // 2 * d if k % 2 else 0 for k, d in zip(size, dilation, strict=True))
    return x, y, z


def output_padding_triple(output_padding: int | Sequence[int]) -> Triple:
    """`output_padding` per axis; TypeError or ValueError unless each is 0 or more."""
    return triple(output_padding, "output_padding", 0, MAX_OFFSET)


def check_outputs(outputs: str) -> str:
    """`outputs`; ValueError unless it is 'windows' or 'cells'."""
    if outputs not in ("windows", "cells"):
        raise ValueError(f"outputs must be 'windows' or 'cells', got {outputs!r}")
    return outputs


@functools.lru_cache(maxsize=256)
def plan_rule(geometry: Geometry, reverse: bool) -> tuple[Triple, list[int], list[int], Triple, Triple]:
    """size, start, step, mul and div of `_C.build_plan`."""
    size, stride, dilation, padding = geometry
    sign = 1 if reverse else -1
    start, step = [sign * p for p in padding], [-sign * d for d in dilation]
    mul, div = ((1, 1, 1), stride) if reverse else (stride, (1, 1, 1))
    return size, start, step, mul, div
