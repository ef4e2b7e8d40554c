"""What a frame gave."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from operator import le
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma.engine import ops
from voxmma.engine.errors import EngineError
from voxmma.engine.program import Program, TensorOut, VoxelsOut
from voxmma.engine.survey import MARGIN
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.sized import LONGEST
from voxmma.sparse.tensor import Voxels

if TYPE_CHECKING:
    from voxmma.engine.compiled import Engine, Instance

_NOTHING = contextlib.nullcontext()
_ANY = (1 << 63) - 1


def largest(program: Program, made: Instance) -> list[int]:
    """The numbers of the reports that a right frame has, at most: of each report four."""
    found = []
    for report in program.reports:
        number, most = report.number, [_ANY] * ops.STATUS
        if report.kind == "index":
            if program.levels[number].parent < 0:  # voxels of points are as they should be
                most[1:3] = -1, -1
        elif report.kind == "voxels":
            most[:3] = made.capacities[number], -1, LONGEST if made.inputs[0].is_cuda else _ANY
        elif report.kind == "sites":
            most[:2] = made.capacities[number], 0
        elif report.kind == "map":
            if made.limits:
                most[:2] = made.limits[number][::-1]
        else:  # the first row that is wrong
            most[0] = -1
        found += most
    return found


class Result:
    """What a frame gave: on the device, and not looked at until it is read.

    Reading waits, once, until the device has told how large the result is and whether the frame was right,
    and raises what was wrong:

    - ValueError: coordinates outside of the engine's bounds, more samples than it has, a voxel that comes
      twice, a value that is not finite (where the engine checks that), voxels outside of a dense grid.
    - EngineError: a level has more voxels than its capacity, or a kernel map more than its room; the message
      names it, with what it needs. With `grow` the engine is made larger instead, and the frame run again.
    - RuntimeError: the result is no copy, and a later frame has begun.

    That is known when sets and kernel maps are made, unless a layer has something to tell, too. So the layers
    may still be under way: what was read is on the stream of the call, which the current one waits for.
    """

    def __init__(
        self,
        engine: Engine,
        made: Instance,
        frame: list[Any],
        number: int,
        tensors: list[Tensor],
        told: Callable[[], list[int]],
        end: _C.StreamEvent | None = None,
    ) -> None:
        """number: of the frame. told: waits for the numbers of its reports. end: on a GPU, behind it."""
        self._engine, self._made, self._frame, self._number = engine, made, frame, number
        self._tensors, self._told, self._end = tensors, told, end
        self._lent = tensors is made.results
        self._value: Any = None
        self._done = False
        self._error: Exception | None = None
        self._lock = threading.RLock()

    @property
    def ready(self) -> bool:
        """Whether the device has finished the frame; does not wait."""
        return self._end is None or self._end.done()

    @eager
    def get(self) -> Any:
        """The network's result, built as the network returned it."""
        with self._lock:
            if not self._done:
                try:
                    self._value = self._read()
                except (ValueError, EngineError) as error:
                    self._error = error
                self._done = True
                self._tensors = self._frame = []
                del self._told
            if self._error is not None:
                raise self._error
            with self._still():
                self._check_there()
                self._enter()
                return self._value

    def _still(self) -> contextlib.AbstractContextManager[Any]:
        """Within, no other frame begins where this one's result is no copy."""
        return self._engine._lock if self._lent else _NOTHING

    def _check_there(self) -> None:
        if self._lent and self._engine._begun != self._number:
            raise RuntimeError(
                "the result was in the engine's memory, which a later frame has: read it before, or call the "
                "engine with copy=True"
            )

    def _enter(self) -> None:
        """Makes the current stream one that may read the result."""
        if self._end is None:
            return
        device, readers = self._engine.device, self._made.readers
        current = torch._C._cuda_getCurrentRawStream(device.index)
        if current != self._end.stream:
            self._end.wait()
        if self._lent and current not in readers:
            readers[current] = torch.cuda.current_stream(device)

    @property
    def voxels(self) -> Voxels:
        """The result of a network that returns one Voxels."""
        value = self.get()
        if not isinstance(value, Voxels):
            raise TypeError(f"the network returns {type(value).__name__}: take get()")
        return value

    @property
    def feats(self) -> Tensor:
        """Features of `voxels`, or the result of a network that returns one tensor."""
        value = self.get()
        if isinstance(value, Tensor):
            return value
        return self.voxels.feats

    def check(self) -> None:
        """Waits until it is known what was wrong with the frame, and raises that."""
        self.get()

    def _read(self) -> Any:
        engine = self._engine
        while True:
            told = self._told()
            with self._still():
                self._check_there()
                grown, rooms = self._judge(told)
                if not grown and not rooms:
                    return self._build(told)
                with engine._lock:
                    engine._grow(grown, rooms)
                    again = engine._frame(self._frame, not self._lent)
            self._made, self._number, self._tensors = again._made, again._number, again._tensors
            self._told, self._end = again._told, again._end

    def _judge(self, told: list[int]) -> tuple[dict[int, int], dict[int, float]]:
        """What has to grow; raises what growing does not help, or may not."""
        engine, made = self._engine, self._made
        program = engine._program
        grown: dict[int, int] = {}
        rooms: dict[int, float] = {}
        if all(map(le, told, made.most)):
            return grown, rooms
        for at, report in enumerate(program.reports):
            here = slice(ops.STATUS * at, ops.STATUS * (at + 1))
            number, values, most = report.number, told[here], made.most[here]
            if all(map(le, values, most)):
                continue
            if report.kind == "index":
                self._refuse_coords(number, values)
            elif report.kind == "voxels" and (values[1] > most[1] or values[2] > most[2]):
                self._refuse_points(number, values)
            elif report.kind == "sites" and values[1]:
                level = program.levels[number]
                raise EngineError(f"level {number} ({level}) has voxels outside of its bounds {level.bounds}")
            elif report.kind in ("voxels", "sites"):
                grown[number] = values[0]
                break  # nothing behind it is right
            elif report.kind == "map":
                rule = engine._plan_rules(made.capacities)[number]
                rooms[number] = MARGIN * ops.plan_room(*rule, values[1], values[0])
            elif report.kind == "finite":
                raise ValueError(f"feats row {values[0]} of input {number} is not finite")
            elif report.kind == "points":
                raise ValueError(f"points row {values[0]} is not finite, or of a sample that is not there")
            else:
                raise ValueError(
                    f"a voxel of level {number} (row {values[0]}) lies outside of the dense grid"
                )
        if not engine.grow:
            for number, need in grown.items():
                raise EngineError(
                    f"the frame does not fit: level {number} ({program.levels[number]}) needs {need:,} "
                    f"rows, its capacity is {made.capacities[number]:,}; compile with "
                    f"levels={{{number}: {need}}} or more, or with grow=True"
                )
            for number, factor in rooms.items():
                plan = program.plans[number]
                raise EngineError(
                    f"the frame does not fit: the kernel map {number} from level {plan.source} to level "
                    f"{plan.target} needs {factor:.2f} times its usual room, it has "
                    f"{made.rooms[number]:.2f}; compile with grow=True, or with an example like this frame"
                )
        return grown, rooms

    def _refuse_coords(self, level: int, values: list[int]) -> NoReturn:
        engine = self._engine
        coords = dict(engine._sparse(self._frame))[level].where
        bounds = engine._program.levels[level].bounds
        if values[1] < 0:
            row, twin = values[2] >> 32, values[2] & 0xFFFFFFFF
            raise ValueError(f"coords rows {twin} and {row} are the same voxel {tuple(coords[row].tolist())}")
        row = values[1]
        found = tuple(coords[row].tolist())
        if not bounds[0] <= found[0] <= bounds[4]:
            why = f"the batch index must be in 0..{bounds[4]}, the engine has {bounds[4] + 1} samples"
        else:
            why = f"the engine's bounds are {bounds[1:4]} to {bounds[5:]}"
        raise ValueError(f"coords row {row} is {found}: {why}")

    def _refuse_points(self, level: int, values: list[int]) -> NoReturn:
        if values[1] < 0:
            raise ValueError(f"a voxel has {values[2]:,} points, an engine adds up to {LONGEST:,}")
        made, row = self._engine._program.levels[level], values[1]
        points = dict(self._engine._sparse(self._frame))[made.parent]
        sample = "" if points.batch is None else f" of sample {int(points.batch[row])}"
        raise ValueError(
            f"points row {row}{sample}, {tuple(points.where[row].tolist())}, is not finite or lies in a "
            f"cell outside of the engine's bounds, {made.bounds}"
        )

    def _build(self, told: list[int]) -> Any:
        engine, program = self._engine, self._engine._program
        given = engine._sparse(self._frame)
        values = _C.first_rows(self._tensors, [told[at] if at >= 0 else -1 for at in engine._rows_at])
        sets = {root: leaf.coord_set for root, leaf in given if leaf.coord_set is not None}
        leaves: list[Any] = []
        for out, parts in engine._outputs:
            if isinstance(out, VoxelsOut):
                coords, feats = values[parts[0]], values[parts[1]]
                coord_set = sets.get(out.level)
                if coord_set is None:
                    level = program.levels[out.level]
                    samples = given[level.path[0]][1].batch_size
                    coord_set = sets[out.level] = CoordSet.trusted(
                        coords, samples, level.bounds, engine._shapes[out.level], event=self._end
                    )
                leaves.append(Voxels._make(coord_set, feats, out.stride, out.record))
            else:
                leaves.append(values[parts[0]] if isinstance(out, TensorOut) else out)
        return pytree.tree_unflatten(leaves, program.spec)
