"""What the examples take, and from that: capacities of levels, and the box that coordinates lie in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from voxmma import _surroundings
from voxmma._types import Triple, integer, positive
from voxmma.engine.inputs import MOST_ROWS, Points, fresh, is_input
from voxmma.engine.program import CELLS, Path
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import reach
from voxmma.sparse.packing import COORD_MAX, COORD_MIN, Bounds
from voxmma.sparse.tensor import Voxels

MARGIN = 1.25
"""room that an engine has beyond what the examples need"""
_LEAST = 64  # rows of a level


def _needs(roots: Sequence[CoordSet], points: Sequence[int]) -> dict[Path, int]:
    """Rows of every set that layers made from `roots`, and of these, by path; points of each, -1 for none."""
    found: dict[Path, int] = {}

    def visit(made: CoordSet, path: Path) -> None:
        found[path] = made.num
        for step, child in made.derived.items():
            visit(child, (*path, step))

    for number, root in enumerate(roots):
        if points[number] >= 0:
            found[number,] = points[number]
        visit(root, (number, CELLS) if points[number] >= 0 else (number,))
    return found


@dataclass
class Survey:
    """What the examples take."""

    needs: dict[Path, int]
    """rows of every level"""
    boxes: list[Bounds]
    """around the rows of every input"""

    @classmethod
    def of(cls, model: Callable[..., Any], examples: Sequence[Sequence[Any]], spec: Any) -> Survey:
        """Runs the network on copies of the examples."""
        found = cls({}, [])
        for one in examples:
            copies = [fresh(leaf) for leaf in one]
            model(*pytree.tree_unflatten(copies, spec))
            roots = [leaf.coord_set for leaf in copies if isinstance(leaf, Voxels)]
            points = [len(leaf.points) if isinstance(leaf, Points) else -1 for leaf in one if is_input(leaf)]
            needs, boxes = _needs(roots, points), [_box(root) for root in roots]
            for path, need in needs.items():
                found.needs[path] = max(found.needs.get(path, 0), need)
            found.boxes = [_around(a, b) for a, b in zip(found.boxes or boxes, boxes, strict=True)]
        return found

    def capacity(self, given: int | None) -> int:
        """Rows of an input."""
        most = max(need for path, need in self.needs.items() if len(path) == 1)
        made = math.ceil(MARGIN * max(most, _LEAST)) if given is None else positive(given, "capacity")
        if most > made:
            raise ValueError(f"capacity is {made:,}, an example has {most:,} voxels")
        if made > MOST_ROWS:
            raise ValueError(f"capacity is {made:,}, at most {MOST_ROWS:,} are possible")
        return made

    def capacities(self, first: int, boxes: Sequence[Bounds]) -> dict[Path, int]:
        """Of every level, where its input has `first` rows: as much beyond what the examples need."""
        found: dict[Path, int] = {}
        bounds: dict[Path, Bounds] = {}
        for path in sorted(self.needs, key=len):
            if len(path) == 1:
                found[path], bounds[path] = first, boxes[path[0]]
                continue
            above, key = path[:-1], path[-1]
            more = max(first / max(self.needs[path[:1]], 1), MARGIN)
            wanted = max(math.ceil(self.needs[path] * more), _LEAST)
            if key == CELLS:
                bounds[path] = bounds[above]
                found[path] = min(wanted, first)
                continue
            size, stride, dilation, _ = key.geometry
            bounds[path] = box = reach(bounds[above], *key)
            tight = not key.to_children and size == stride and dilation == (1, 1, 1)
            room = found[above] if tight else math.prod(size) * found[above]
            cells = math.prod(box[4 + axis] - box[axis] + 1 for axis in range(4))
            found[path] = max(1, min(wanted, room, cells, MOST_ROWS))
        return found


@_surroundings.undisturbed()
def _box(coords: CoordSet) -> Bounds:
    """The box around a set's rows."""
    if not coords.num:
        return (0,) * 8
    low, high = torch.aminmax(coords.coords, dim=0)
    return (*low.tolist(), *high.tolist())


def _around(a: Bounds, b: Bounds) -> Bounds:
    return (*map(min, a[:4], b[:4]), *map(max, a[4:], b[4:]))


def _wide_bounds(bounds: Bounds, batch_size: int) -> Bounds:
    """A larger box around `bounds` that takes no more cells once sides are rounded up to powers of two.

    A little less, since the boxes of coarser levels reach beyond their share.
    """
    low, high = [0], [max(batch_size - 1, 0)]
    for axis in range(1, 4):
        side = bounds[4 + axis] - bounds[axis] + 1
        room = max((1 << (side - 1).bit_length()) * 15 // 16 - side, 0) // 2
        low.append(max(bounds[axis] - room, COORD_MIN))
        high.append(min(bounds[4 + axis] + room, COORD_MAX))
    return (*low, *high)


def wanted_bounds(
    bounds: Sequence[int] | None, box: Bounds, batch_size: int, spatial_shape: Triple | None
) -> Bounds:
    """What the caller gave, else around `box`; within the grid, if there is one."""
    made = _wide_bounds(box, batch_size) if bounds is None else _check_bounds(bounds, batch_size)
    if spatial_shape is None:
        return made
    least = [max(value, 0) for value in made[1:4]]
    most = [min(value, size - 1) for value, size in zip(made[5:], spatial_shape, strict=True)]
    if any(a > b for a, b in zip(least, most, strict=True)):
        raise ValueError(f"bounds {bounds} lie outside of spatial_shape {spatial_shape}")
    return (made[0], *least, made[4], *most)


def _check_bounds(bounds: Sequence[int], batch_size: int) -> Bounds:
    values = tuple(bounds)
    if len(values) == 6:
        values = (0, *values[:3], max(batch_size - 1, 0), *values[3:])
    if len(values) != 8 or any(integer(v) is None for v in values):
        raise ValueError(f"bounds must be 6 integers, x, y, z least and then largest, got {bounds!r}")
    for axis in range(1, 4):
        if not COORD_MIN <= values[axis] <= values[4 + axis] <= COORD_MAX:
            raise ValueError(
                f"bounds {tuple(bounds)}: {'xyz'[axis - 1]} must rise within {COORD_MIN}..{COORD_MAX}"
            )
    return values
