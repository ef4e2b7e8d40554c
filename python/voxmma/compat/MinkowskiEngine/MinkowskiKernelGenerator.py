"""Kernel shapes."""

from __future__ import annotations

import enum
import itertools
import math
from typing import Any

import torch

from voxmma.compat.kernels import turned
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import check_dimension, convert_to_int_list
from voxmma.sparse.geometry import Geometry, padding_triple


class RegionType(enum.IntEnum):
    """Which cells around a cell a kernel has. HYPER_CUBE: all of a box; HYPER_CROSS: those on the axes, the
    cell itself first, then axis after axis +1, +2, ..., -2, -1; CUSTOM: those of `region_offsets`; HYBRID:
    the box along axes of type HYPER_CUBE and the cells on those of type HYPER_CROSS, as MinkowskiEngine 0.4
    has it. HYPERCUBE and HYPERCROSS are names of 0.4."""

    HYPER_CUBE = HYPERCUBE = 0
    HYPER_CROSS = HYPERCROSS = 1
    CUSTOM = 2
    HYBRID = 3


def get_kernel_volume(
    region_type: RegionType, kernel_size: Any, region_offset: Any, axis_types: Any, dimension: int
) -> int:
    """Number of offsets of a kernel; ValueError where there is no such kernel."""
    size = convert_to_int_list(kernel_size, dimension)
    return KernelGenerator(
        size,
        region_type=region_type,
        region_offsets=region_offset,
        axis_types=axis_types,
        dimension=dimension,
    ).kernel_volume


class KernelGenerator:
    """The kernel of a layer: size, stride, dilation, region.

    `region_offsets`: (K, D) integers in cells of the layer's input grid, for CUSTOM alone; the box around
    them has at most 9 cells a side. `axis_types`: of each axis, for HYBRID; else they may say region_type.

    ValueError names what does not fit.
    """

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        is_transpose: bool = False,
        region_type: RegionType = RegionType.HYPER_CUBE,
        region_offsets: torch.Tensor | None = None,
        expand_coordinates: bool = False,
        axis_types: Any = None,
        dimension: int = -1,
    ) -> None:
        self.dimension = check_dimension(dimension)
        self.region_type = RegionType(region_type)
        types = None if axis_types is None else [RegionType(t) for t in axis_types]
        if self.region_type == RegionType.HYBRID:
            if types is None or len(types) != dimension or max(types) > RegionType.HYPER_CROSS:
                raise ValueError(f"HYBRID takes {dimension} axis_types, HYPER_CUBE or HYPER_CROSS each")
        elif types is not None and any(t != self.region_type for t in types):
            raise ValueError(f"axis_types {axis_types} differ from region_type: write the offsets as CUSTOM")
        self.kernel_stride = convert_to_int_list(stride, dimension)
        self.kernel_dilation = convert_to_int_list(dilation, dimension)
        self.is_transpose = is_transpose
        self.expand_coordinates = expand_coordinates
        self.axis_types = axis_types
        self.region_offsets = region_offsets
        self.cells: torch.Tensor | None = None
        """which cells of the box around them the offsets are, (K,) int64; None: all, in order"""
        if self.region_type == RegionType.CUSTOM:
            low = self._custom(region_offsets)
        elif region_offsets is not None and len(region_offsets):
            raise ValueError("region_offsets go with RegionType.CUSTOM alone")
        else:
            self.kernel_size = convert_to_int_list(kernel_size, dimension)
            if min(self.kernel_size) < 1:
                raise ValueError(f"kernel_size must be positive, got {kernel_size}")
            low = None
            if self.region_type == RegionType.HYPER_CROSS:
                self._cross()
            elif types is not None and self.region_type == RegionType.HYBRID:
                self._hybrid(types)
        size, spread = turned(tuple(self.kernel_size)), turned(tuple(self.kernel_dilation))
        padding = padding_triple(None, size, spread) if low is None else turned(tuple(-v for v in low), 0)
        self.geometry = Geometry(size, turned(tuple(self.kernel_stride)), spread, padding)
        """of the box, along the columns inside"""
        self.kernel_volume = math.prod(self.kernel_size) if self.cells is None else len(self.cells)
        self.requires_strided_coordinates = all(s == 1 for s in self.kernel_stride)

    def _cell(self, position: Any) -> int:
        """Number of a cell of the box, the first axis fastest."""
        return sum(p * math.prod(self.kernel_size[:axis]) for axis, p in enumerate(position))

    def _cross(self) -> None:
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(f"kernel_size of a HYPER_CROSS must be odd, got {self.kernel_size}")
        middle = [size // 2 for size in self.kernel_size]
        cells = [self._cell(middle)]
        for axis, centre in enumerate(middle):
            for step in itertools.chain(range(1, centre + 1), range(-centre, 0)):
                cells.append(self._cell([m + step * (a == axis) for a, m in enumerate(middle)]))
        self.cells = torch.tensor(cells, dtype=torch.int64, device="cpu")

    def _hybrid(self, types: list[RegionType]) -> None:
        """The cell itself; along each axis of the box what there is so far, moved; then axes of the cross."""
        if any(size % 2 == 0 for size in self.kernel_size):
            raise ValueError(f"kernel_size of a HYBRID must be odd, got {self.kernel_size}")
        middle = [size // 2 for size in self.kernel_size]
        cells = [tuple(middle)]
        for kind in (RegionType.HYPER_CUBE, RegionType.HYPER_CROSS):
            for axis, size in enumerate(self.kernel_size):
                if types[axis] == kind:
                    moved = cells if kind == RegionType.HYPER_CUBE else cells[:1]
                    steps = [step for step in range(size) if step != middle[axis]]
                    cells = cells + [(*c[:axis], step, *c[axis + 1 :]) for c in moved for step in steps]
        self.cells = torch.tensor([self._cell(c) for c in cells], dtype=torch.int64, device="cpu")

    def _custom(self, region_offsets: Any) -> list[int]:
        if region_offsets is None or region_offsets.dim() != 2 or region_offsets.shape[1] != self.dimension:
            raise ValueError(f"region_offsets must be (K, {self.dimension}) for RegionType.CUSTOM")
        if any(d != 1 for d in self.kernel_dilation):
            raise ValueError("region_offsets say the distances themselves: dilation must be 1")
        offsets = region_offsets.tolist()
        low = [min(column) for column in zip(*offsets, strict=True)]
        high = [max(column) for column in zip(*offsets, strict=True)]
        self.kernel_size = [h - v + 1 for v, h in zip(low, high, strict=True)]
        self.cells = torch.tensor(
            [self._cell([o - v for o, v in zip(row, low, strict=True)]) for row in offsets],
            dtype=torch.int64,
            device="cpu",
        )
        if len(set(self.cells.tolist())) != len(offsets):
            raise ValueError("region_offsets hold an offset twice")
        return low

    def __repr__(self) -> str:
        return (
            f"KernelGenerator(kernel_size={self.kernel_size}, kernel_stride={self.kernel_stride}, "
            f"kernel_dilation={self.kernel_dilation}, region_type={self.region_type!r}, "
            f"expand_coordinates={self.expand_coordinates}, dimension={self.dimension})"
        )
