"""What a frame gave."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from voxmma import _surroundings
from voxmma._dynamo import eager
from voxmma.engine import ops
from voxmma.engine.errors import EngineError
from voxmma.engine.program import CELLS, TensorOut, VoxelsOut
from voxmma.engine.survey import MARGIN
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.sized import LONGEST
from voxmma.sparse.tensor import Voxels

if TYPE_CHECKING:
    from voxmma.engine.compiled import Engine, Instance


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
        status: Tensor,
        device: tuple[Any, Any, Any] | None = None,
    ) -> None:
        """number: of the frame. device: on a GPU its stream, and events behind its status and its end."""
        self._engine, self._made, self._frame, self._number = engine, made, frame, number
        self._tensors, self._status, self._device = tensors, status, device
        self._lent = tensors is made.results
        self._value: Any = None
        self._done = False
        self._error: Exception | None = None
        self._lock = threading.RLock()

    @property
    def ready(self) -> bool:
        """Whether the device has finished the frame; does not wait."""
        return self._device is None or bool(self._device[2].query())

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
            if self._error is not None:
                raise self._error
            with self._still():
                self._check_there()
                self._enter()
                return self._value

    def _still(self) -> contextlib.AbstractContextManager[Any]:
        """Within, no other frame begins where this one's result is no copy."""
        return self._engine._lock if self._lent else contextlib.nullcontext()

    def _check_there(self) -> None:
        if self._lent and self._engine._begun != self._number:
            raise RuntimeError(
                "the result was in the engine's memory, which a later frame has: read it before, or call the "
                "engine with copy=True"
            )

    def _enter(self) -> None:
        """Makes the current stream one that may read the result."""
        if self._device is None:
            return
        stream, _, end = self._device
        current = stream
        if torch._C._cuda_getCurrentRawStream(stream.device.index) != stream.cuda_stream:
            current = torch.cuda.current_stream(stream.device)
            current.wait_event(end)
        if self._lent and current not in self._made.readers:
            self._made.readers.append(current)

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
            if self._device is not None:
                self._device[1].synchronize()
            with self._still():
                self._check_there()
                grown, rooms = self._judge()
                if not grown and not rooms:
                    return self._build()
                with engine._lock:
                    engine._grow(grown, rooms)
                    again = engine._frame(self._frame, not self._lent)
            self._made, self._number, self._tensors = again._made, again._number, again._tensors
            self._status, self._device = again._status, again._device

    def _judge(self) -> tuple[dict[int, int], dict[int, float]]:
        """What has to grow; raises what growing does not help, or may not."""
        engine, made = self._engine, self._made
        program = engine._program
        grown: dict[int, int] = {}
        rooms: dict[int, float] = {}
        rows: dict[int, int] = {}
        for report, values in zip(program.reports, self._status.tolist(), strict=True):
            number = report.number
            if report.kind == "index":
                rows[number] = values[0]
                if program.levels[number].parent < 0:  # voxels of points are as they should be
                    self._judge_input(number, values)
            elif report.kind == "voxels":
                self._judge_points(number, values)
                if values[0] > made.capacities[number]:
                    grown[number] = values[0]
                    break
            elif report.kind == "finite" and values[0] >= 0:
                raise ValueError(f"feats row {values[0]} of input {number} is not finite")
            elif report.kind == "sites":
                level = program.levels[number]
                if values[1]:
                    raise EngineError(
                        f"level {number} ({level}) has voxels outside of its bounds {level.bounds}"
                    )
                if values[0] > made.capacities[number]:
                    grown[number] = values[0]
                    break  # nothing behind it is right
                rows[number] = values[0]
            elif report.kind == "map":
                factor = self._lacking(number, values)
                if factor:
                    rooms[number] = factor
            elif report.kind == "points" and values[0] >= 0:
                raise ValueError(f"points row {values[0]} is not finite, or of a sample that is not there")
            elif report.kind == "dense" and values[0] >= 0:
                raise ValueError(
                    f"a voxel of level {number} (row {values[0]}) lies outside of the dense grid"
                )
        self._rows = rows
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

    def _lacking(self, number: int, values: list[int]) -> float:
        """Room that a plan needs, 0 where it has it."""
        limits = self._made.limits
        if not limits or (values[0] <= limits[number][1] and values[1] <= limits[number][0]):
            return 0.0
        rule = self._engine._plan_rules(self._made.capacities)[number]
        return MARGIN * ops.plan_room(*rule, values[1], values[0])

    def _judge_input(self, level: int, values: list[int]) -> None:
        engine = self._engine
        coords = dict(engine._sparse(self._frame))[level].where
        bounds = engine._program.levels[level].bounds
        if values[1] >= 0:
            row = values[1]
            found = tuple(coords[row].tolist())
            if not bounds[0] <= found[0] <= bounds[4]:
                why = f"the batch index must be in 0..{bounds[4]}, the engine has {bounds[4] + 1} samples"
            else:
                why = f"the engine's bounds are {bounds[1:4]} to {bounds[5:]}"
            raise ValueError(f"coords row {row} is {found}: {why}")
        if values[2] >= 0:
            row, twin = values[2] >> 32, values[2] & 0xFFFFFFFF
            raise ValueError(f"coords rows {twin} and {row} are the same voxel {tuple(coords[row].tolist())}")

    def _judge_points(self, level: int, values: list[int]) -> None:
        made = self._engine._program.levels[level]
        points = dict(self._engine._sparse(self._frame))[made.parent]
        if values[1] >= 0:
            row = values[1]
            sample = "" if points.batch is None else f" of sample {int(points.batch[row])}"
            raise ValueError(
                f"points row {row}{sample}, {tuple(points.where[row].tolist())}, is not finite or lies in a "
                f"cell outside of the engine's bounds, {made.bounds}"
            )
        if values[2] > LONGEST and points.where.is_cuda:
            raise ValueError(f"a voxel has {values[2]:,} points, an engine adds up to {LONGEST:,}")

    @_surroundings.undisturbed()
    @torch.inference_mode(False)
    @torch.no_grad()
    def _build(self) -> Any:
        self._enter()
        engine, program = self._engine, self._engine._program
        given = engine._sparse(self._frame)
        batches = [leaf.batch_size for _, leaf in given]
        grids = [one.spatial_shape for one in engine._inputs if one.sparse]
        event = None  # one for all sets
        sets: dict[int, CoordSet] = {
            root: leaf.coord_set for root, leaf in given if leaf.coord_set is not None
        }
        tensors = dict(zip(engine._places, self._tensors, strict=True))
        leaves: list[Any] = []
        for out in program.outputs:
            if isinstance(out, VoxelsOut):
                rows = self._rows[out.level]
                if out.level not in sets:
                    level = program.levels[out.level]
                    sets[out.level] = CoordSet.trusted(
                        tensors[out.coords].narrow(0, 0, rows).contiguous(),
                        batches[level.path[0]],
                        level.bounds,
                        grids[level.path[0]]
                        if level.parent < 0 or level.path[-1] == CELLS
                        else level.path[-1].shape,
                        beside=event,
                    )
                    event = event or sets[out.level]._made
                feats = tensors[out.feats].narrow(0, 0, rows)
                leaves.append(Voxels._make(sets[out.level], feats, out.stride, out.record))
            elif isinstance(out, TensorOut):
                value = tensors[out.value]
                leaves.append(value if out.level < 0 else value.narrow(0, 0, self._rows[out.level]))
            else:
                leaves.append(out)
        return pytree.tree_unflatten(leaves, program.spec)
