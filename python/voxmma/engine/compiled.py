"""`compile` makes an engine of a network, which runs it frame after frame."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from voxmma import _surroundings, torchflags
from voxmma._types import Triple, as_tensor, integer, positive
from voxmma.engine import ops
from voxmma.engine.errors import EngineError
from voxmma.engine.record import (
    Path,
    Program,
    Recorder,
    Ref,
    TensorOut,
    VoxelsOut,
    join,
)
from voxmma.engine.sets import NetworkSet
from voxmma.sparse import segments
from voxmma.sparse.checks import check_columns
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import DEFAULT_MAX_VOXELS, reach
from voxmma.sparse.packing import COORD_MAX, COORD_MIN, Bounds
from voxmma.sparse.tensor import Voxels

MARGIN = 1.25
"""room that the input, a level and a map's plan have beyond what the examples need"""
_LEAST = 64  # rows of a level
_MOST_ROWS = min(segments.BLOCK**ops.LEVELS, DEFAULT_MAX_VOXELS)


_capturing = threading.Lock()  # one graph at a time


def _is_voxels(value: Any) -> bool:
    return isinstance(value, Voxels)


def _is_sparse(value: Any) -> bool:
    """Voxels, or a pair of tensors with coordinates first."""
    if _is_voxels(value):
        return True
    if type(value) is not tuple or len(value) != 2:
        return False
    first = value[0]
    return not isinstance(first, Voxels | tuple | list | dict) and getattr(first, "ndim", 0) == 2


# ---- what a frame needs ------------------------------------------------------------------------------------


def _needs(roots: Sequence[CoordSet]) -> dict[Path, int]:
    """Rows of every set that layers made from `roots`, and of these, by path."""
    found: dict[Path, int] = {}

    def visit(made: CoordSet, path: Path) -> None:
        found[path] = made.num
        for step, child in made.derived.items():
            visit(child, (*path, step))

    for number, root in enumerate(roots):
        visit(root, (number,))
    return found


@dataclass
class _Survey:
    """What the examples take."""

    needs: dict[Path, int]
    """rows of every level"""
    shares: dict[Path, float]
    """largest share of its input's rows that a level has"""
    boxes: list[Bounds]
    """around the rows of every input"""

    @classmethod
    def of(cls, model: Callable[..., Any], examples: Sequence[Sequence[Any]], spec: Any) -> _Survey:
        """Runs the network on copies of the examples."""
        found = cls({}, {}, [])
        for one in examples:
            fresh = [_fresh(leaf) for leaf in one]
            model(*pytree.tree_unflatten(fresh, spec))
            roots = [leaf.coord_set for leaf in fresh if isinstance(leaf, Voxels)]
            needs, boxes = _needs(roots), [_box(root) for root in roots]
            for path, need in needs.items():
                found.needs[path] = max(found.needs.get(path, 0), need)
                share = need / max(needs[path[:1]], 1)
                found.shares[path] = max(found.shares.get(path, 0.0), share)
            found.boxes = [_around(a, b) for a, b in zip(found.boxes or boxes, boxes, strict=True)]
        return found

    def capacity(self, given: int | None) -> int:
        """Rows of an input."""
        most = max(need for path, need in self.needs.items() if len(path) == 1)
        made = math.ceil(MARGIN * max(most, _LEAST)) if given is None else positive(given, "capacity")
        if most > made:
            raise ValueError(f"capacity is {made:,}, an example has {most:,} voxels")
        if made > _MOST_ROWS:
            raise ValueError(f"capacity is {made:,}, at most {_MOST_ROWS:,} are possible")
        return made

    def capacities(self, first: int, boxes: Sequence[Bounds]) -> dict[Path, int]:
        """Of every level: the input's, times the level's share in the examples, with room."""
        found: dict[Path, int] = {}
        bounds: dict[Path, Bounds] = {}
        for path in sorted(self.needs, key=len):
            if len(path) == 1:
                found[path], bounds[path] = first, boxes[path[0]]
                continue
            above, key = path[:-1], path[-1]
            size, stride, dilation, _ = key.geometry
            bounds[path] = box = reach(bounds[above], *key)
            wanted = max(math.ceil(first * self.shares[path] * MARGIN), _LEAST)
            tight = not key.to_children and size == stride and dilation == (1, 1, 1)
            most = found[above] if tight else math.prod(size) * found[above]
            cells = math.prod(box[4 + axis] - box[axis] + 1 for axis in range(4))
            found[path] = max(1, min(wanted, most, cells, _MOST_ROWS))
        return found


@dataclass(frozen=True)
class Input:
    """A place of the network's inputs: Voxels (`root` its number) or a tensor of one shape."""

    shape: tuple[int, ...]
    """of the tensor, or (channels,)"""
    dtype: torch.dtype
    root: int = -1
    batch_size: int = 0
    stride: Triple = (1, 1, 1)
    spatial_shape: Triple | None = None

    @property
    def sparse(self) -> bool:
        return self.root >= 0


def _described(leaves: Sequence[Any]) -> list[Input]:
    found, roots = [], 0
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Voxels):
            found.append(
                Input((leaf.channels,), leaf.dtype, roots, leaf.batch_size, leaf.stride, leaf.spatial_shape)
            )
            roots += 1
        elif isinstance(leaf, Tensor):
            found.append(Input(tuple(leaf.shape), leaf.dtype))
        else:
            raise TypeError(f"input {place} must be voxmma.Voxels or a tensor, got {type(leaf).__name__}")
    if not roots:
        raise TypeError("example must hold Voxels")
    return found


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


def _wanted_bounds(
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


# ---- an engine ---------------------------------------------------------------------------------------------


@dataclass
class _Instance:
    """The program with capacities and rooms put in, and on a GPU its graph."""

    capacities: list[int]
    rooms: list[float]
    inputs: list[Tensor]
    """what the program reads: of Voxels coordinates, features and count; of others the tensor"""
    env: dict[int, Tensor]
    graph: Any = None
    status: Tensor | None = None
    """(reports, 4) int64"""
    limits: list[tuple[int, int]] = field(default_factory=list)
    """on a GPU: passes and units of 4 unique rows that each map's plan may have"""
    pool: int = 0
    """bytes that the graph works in"""


@contextlib.contextmanager
def _nothing_collected() -> Iterator[None]:
    """Block in which Python's garbage collector rests: what it would free on a GPU may break a capture."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


class Engine:
    """A network that runs on the device from coordinates to its result, for any frame up to its capacity.

    Made by `compile`. On a GPU a call copies the frame into the engine's buffers, replays one CUDA graph and
    returns without having waited for the device. On a CPU it runs the same program operator by operator.

    Attributes:
        device: where it runs.
        batch_size: samples that a frame may have.
        grow: whether a frame that does not fit makes the engine larger.
    """

    def __init__(
        self,
        program: Program,
        inputs: list[Input],
        spec: Any,
        capacities: Sequence[int],
        rooms: Sequence[float],
        device: torch.device,
        grow: bool,
        needs: Sequence[int],
    ) -> None:
        self._program = program
        self._inputs = inputs
        self._spec = spec
        self.device = device
        self.grow = grow
        self._needs = list(needs)
        self._roots = [number for number, level in enumerate(program.levels) if level.parent < 0]
        self._flags = torchflags.snapshot()
        self._lock = threading.RLock()
        self._last: Any = None
        self.frames = 0
        """frames that were run"""
        self._instance = self._build(list(capacities), list(rooms))

    # ---- facts

    @property
    def batch_size(self) -> int:
        return next(given.batch_size for given in self._inputs if given.sparse)

    @property
    def capacities(self) -> list[int]:
        """Rows that each level may have; level 0 is the (first) input."""
        return list(self._instance.capacities)

    @property
    def plan(self) -> list[dict[str, Any]]:
        """Accumulator, tile and dtype of every sparse convolution, in order, as they were frozen."""
        found = []
        for step in self._program.steps:
            op = step.func._schema.name
            if op in ("voxmma::conv", "voxmma::conv_fused", "voxmma::conv_rescaled"):
                given = step.named()
                found.append({"op": op, "accumulator": given["accumulator"], "tile": given["tile"]})
        return found

    @property
    def memory(self) -> int:
        """Bytes of buffers and, on a GPU, of what the graph works in; weights not counted."""
        return sum(t.nbytes for t in self._instance.inputs) + self._instance.pool

    def levels(self) -> str:
        """The levels as a table: what makes each, its capacity, and what the examples needed."""
        lines = [f"{'level':>5} {'capacity':>10} {'needed':>10}  made by"]
        for number, level in enumerate(self._program.levels):
            need = self._needs[number]
            lines.append(f"{number:5} {self._instance.capacities[number]:10,} {need:10,}  {level}")
        return "\n".join(lines)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an engine cannot be copied or pickled: voxmma.engine.save and load make another one")

    def __repr__(self) -> str:
        return (
            f"Engine(capacity={self.capacities[0]}, batch_size={self.batch_size}, device='{self.device}', "
            f"steps={len(self._program.steps)}, grow={self.grow})"
        )

    # ---- buffers and graph

    def _build(self, capacities: list[int], rooms: list[float]) -> _Instance:
        buffers: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for given in self._inputs:
                if given.sparse:
                    rows = capacities[self._root(given)]
                    buffers.append(torch.zeros((rows, 4), dtype=torch.int32, device=self.device))
                    buffers.append(torch.zeros((rows, *given.shape), dtype=given.dtype, device=self.device))
                    buffers.append(torch.zeros(1, dtype=torch.int64, device=self.device))
                else:
                    buffers.append(torch.zeros(given.shape, dtype=given.dtype, device=self.device))
            made = _Instance(capacities, rooms, buffers, {})
            if self.device.type == "cuda":
                made.limits = [
                    self._plan_capacity(number, capacities, room) for number, room in enumerate(rooms)
                ]
                with torchflags.preserved():  # of whenever it grows
                    torchflags.restore(self._flags)
                    self._capture(made)
        return made

    def _plan_capacity(self, number: int, capacities: Sequence[int], room: float) -> tuple[int, int]:
        plan = self._program.plans[number]
        rows = capacities[plan.source], capacities[plan.target]
        return ops.plan_capacity(plan.geometry, plan.reverse, *rows, room)

    @_surroundings.undisturbed()
    def _run(self, made: _Instance, lanes: bool = False) -> None:
        streams = self._program.lanes() if lanes else None
        made.env = self._program.run(made.inputs, made.capacities, made.rooms, streams)
        reports = [self._program.value(made.env, report.status) for report in self._program.reports]
        made.status = torch.stack(reports)

    def _capture(self, made: _Instance) -> None:
        """The program as a CUDA graph, after one run that loads what is loaded once."""
        with _capturing, torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run(made)
                made.env = {}
                made.status = None
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            before = torch.cuda.memory_reserved()
            graph = torch.cuda.CUDAGraph()
            with (
                _nothing_collected(),
                torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"),
            ):
                self._run(made, lanes=True)
            made.graph, made.pool = graph, torch.cuda.memory_reserved() - before

    # ---- a frame

    def __call__(self, *inputs: Any) -> Result:
        """Runs a frame.

        Args:
            inputs: as the example: in place of Voxels also (coords, feats), (N, 4) int32 or int64 rows
                (batch, x, y, z) and (N, C) features of the example's dtype, which nobody has looked at
                before. N may be 0 and is at most the engine's capacity, unless it may grow. Other tensors
                have the example's shape and dtype. All on the engine's device. They are not to be written
                to before the result is read.

        Returns a Result, whose device work is on the current stream.

        Raises:
            TypeError, ValueError: naming the input: structure, dtype, device, channels, more rows than the
                engine has room for, more samples.
        """
        frame = self._check(inputs)
        with self._lock:
            return self._frame(frame)

    def _check(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The inputs flat: (coords, feats, batch size, coordinate set or None) of each sparse one."""
        leaves = self._flat(inputs)
        found: list[Any] = []
        for place, (given, leaf) in enumerate(zip(self._inputs, leaves, strict=True)):
            name = f"input {place}" if len(leaves) > 1 else "the input"
            if not given.sparse:
                tensor = as_tensor(leaf, name)
                if not isinstance(tensor, Tensor):
                    raise TypeError(f"{name} must be a tensor, got {type(leaf).__name__}")
                _same(name, tensor, given.dtype, self.device)
                if tuple(tensor.shape) != given.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}, the engine takes {given.shape}"
                    )
                found.append(tensor)
                continue
            if isinstance(leaf, Voxels):
                if leaf.stride != given.stride:
                    raise ValueError(f"{name} has stride {leaf.stride}, the engine takes {given.stride}")
                if leaf.batch_size > given.batch_size:
                    raise ValueError(
                        f"{name} has {leaf.batch_size} samples, the engine takes {given.batch_size}"
                    )
                if leaf.spatial_shape != given.spatial_shape:
                    raise ValueError(
                        f"{name} has spatial_shape {leaf.spatial_shape}, the engine takes "
                        f"{given.spatial_shape}"
                    )
                if leaf.coord_set.repeated is not None:
                    raise ValueError(f"{name} has repeated rows: an engine takes distinct voxels")
                made: Any = (leaf.coords, leaf.feats, leaf.batch_size, leaf.coord_set)
            elif isinstance(leaf, tuple) and len(leaf) == 2:
                made = (as_tensor(leaf[0], "coords"), as_tensor(leaf[1], "feats"), given.batch_size, None)
            else:
                raise TypeError(f"{name} must be Voxels or (coords, feats), got {type(leaf).__name__}")
            coords, feats = made[:2]
            check_columns(coords)
            if not isinstance(feats, Tensor):
                raise TypeError(f"feats must be a tensor, got {type(feats).__name__}")
            _same("feats", feats, given.dtype, self.device)
            if coords.device != self.device:
                raise ValueError(f"coords is on {coords.device}, the engine on {self.device}")
            if feats.dim() != 2 or feats.shape[0] != coords.shape[0]:
                raise ValueError(f"feats must be ({coords.shape[0]}, C), got shape {tuple(feats.shape)}")
            if feats.shape[1] != given.shape[0]:
                raise ValueError(f"feats has {feats.shape[1]} channels, the engine takes {given.shape[0]}")
            if len(coords) > _MOST_ROWS:
                raise ValueError(f"coords has {len(coords):,} rows, an engine takes {_MOST_ROWS:,} at most")
            found.append(made)
        for given, leaf in zip(self._inputs, found, strict=True):
            root = self._root(given)
            if given.sparse and len(leaf[0]) > self._instance.capacities[root] and not self.grow:
                raise ValueError(
                    f"the frame has {len(leaf[0]):,} voxels, the engine's capacity is "
                    f"{self._instance.capacities[root]:,}: compile it with more, or with grow=True"
                )
        return found

    def _root(self, given: Input) -> int:
        return self._roots[given.root] if given.sparse else -1

    def _flat(self, inputs: tuple[Any, ...]) -> list[Any]:
        """The inputs flat, pairs for Voxels not taken apart."""
        for is_leaf in (_is_sparse, _is_voxels):  # a pair may be two tensors, too
            leaves, spec = pytree.tree_flatten(list(inputs), is_leaf=is_leaf)
            if spec == self._spec:
                return list(leaves)
        given = ["Voxels" if one.sparse else "tensor" for one in self._inputs]
        wanted = pytree.tree_unflatten(given, self._spec)
        got = pytree.tree_map(
            lambda value: "Voxels" if _is_sparse(value) else "tensor", list(inputs), is_leaf=_is_sparse
        )
        raise TypeError(f"expected inputs built as {wanted}, got {got}".replace("'", ""))

    @_surroundings.undisturbed()
    def _frame(self, frame: list[Any]) -> Result:
        """Enqueues a frame. Under the lock."""
        wanted = {}
        for given, leaf in zip(self._inputs, frame, strict=True):
            if given.sparse and len(leaf[0]) > self._instance.capacities[self._root(given)]:
                wanted[self._root(given)] = len(leaf[0])
        self._grow(wanted)
        made = self._instance
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            if self.device.type == "cuda":
                stack.enter_context(torch.cuda.device(self.device))
                if self._last is not None:
                    torch.cuda.current_stream().wait_event(self._last)  # the buffers are one frame's
            self._load(made, frame)
            if made.graph is not None:
                made.graph.replay()
            else:
                with torchflags.pinned("ieee"):
                    self._run(made)
            result = self._result(made, frame)
            if self.device.type == "cuda":
                self._last = result._event
        self.frames += 1
        return result

    def _load(self, made: _Instance, frame: list[Any]) -> None:
        """Copies a frame into the buffers."""
        buffers = iter(made.inputs)
        for given, leaf in zip(self._inputs, frame, strict=True):
            if not given.sparse:
                next(buffers).copy_(leaf)
                continue
            coords, feats = leaf[:2]
            rows = len(coords)
            if coords.dtype == torch.int64:  # what does not fit stays outside of the bounds
                coords = coords.clamp(-(1 << 30), 1 << 30)
            next(buffers)[:rows].copy_(coords)
            next(buffers)[:rows].copy_(feats)
            next(buffers).fill_(rows)

    def _result(self, made: _Instance, frame: list[Any]) -> Result:
        program = self._program

        def copied(place: Any) -> Tensor:
            return program.value(made.env, place).clone()  # the next frame writes into what it may be

        outputs: list[Any] = []
        seen: dict[Any, Tensor] = {}
        for out in program.outputs:
            if isinstance(out, VoxelsOut):
                if out.coords not in seen:
                    seen[out.coords] = copied(out.coords)
                outputs.append((seen[out.coords], copied(out.feats)))
            elif isinstance(out, TensorOut):
                outputs.append(copied(out.value))
            else:
                outputs.append(out)
        assert made.status is not None
        event = None
        status = made.status
        if made.graph is not None:
            status = torch.empty(status.shape, dtype=status.dtype, device="cpu", pin_memory=True)
            status.copy_(made.status, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        return Result(self, made, frame, outputs, status, event)

    # ---- growth

    def _grow(self, wanted: Mapping[int, int], rooms: Mapping[int, float] | None = None) -> None:
        """Makes room for `wanted` rows of levels, and in plans. Under the lock."""
        if not wanted and not rooms:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # frames in flight use the buffers
        capacities = list(self._instance.capacities)
        for level, need in wanted.items():
            if need > _MOST_ROWS:
                raise EngineError(
                    f"level {level} needs {need:,} rows, an engine takes {_MOST_ROWS:,} at most"
                )
            capacities[level] = max(capacities[level], min(math.ceil(need * MARGIN), _MOST_ROWS))
            self._needs[level] = max(self._needs[level], need)
        room = list(self._instance.rooms)
        for plan, factor in (rooms or {}).items():
            room[plan] = max(room[plan], factor)
        self._instance = self._build(capacities, room)


def _same(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, the engine takes {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the engine on {device}")


# ---- a result ----------------------------------------------------------------------------------------------


class Result:
    """What a frame gave: on the device, and not looked at until it is read.

    Reading waits for the frame, once, and raises what was wrong with it:

    - ValueError: coordinates outside of the engine's bounds, more samples than it has, a voxel that comes
      twice, a value that is not finite (where the engine checks that), voxels outside of a dense grid.
    - EngineError: a level has more voxels than its capacity, or a kernel map more than its room; the message
      names it, with what it needs. With `grow` the engine is made larger instead, and the frame run again.
    """

    def __init__(
        self,
        engine: Engine,
        made: _Instance,
        frame: list[Any],
        outputs: list[Any],
        status: Tensor,
        event: Any,
    ) -> None:
        self._engine, self._made, self._frame = engine, made, frame
        self._outputs, self._status, self._event = outputs, status, event
        self._value: Any = None
        self._done = False
        self._error: Exception | None = None
        self._lock = threading.RLock()

    @property
    def ready(self) -> bool:
        """Whether the device has finished the frame; does not wait."""
        return self._event is None or bool(self._event.query())

    def get(self) -> Any:
        """The network's result, built as the network returned it."""
        with self._lock:
            if not self._done:
                try:
                    self._value = self._read()
                except (ValueError, EngineError) as error:
                    self._error = error
                self._done = True
                self._outputs = self._frame = []
            if self._error is not None:
                raise self._error
            return self._value

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
        """Waits for the frame and raises what was wrong with it."""
        self.get()

    def _read(self) -> Any:
        engine = self._engine
        while True:
            if self._event is not None:
                self._event.synchronize()
            grown, rooms = self._judge()
            if not grown and not rooms:
                return self._build()
            with engine._lock:
                engine._grow(grown, rooms)
                again = engine._frame(self._frame)
            self._made, self._outputs = again._made, again._outputs
            self._status, self._event = again._status, again._event

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
                self._judge_input(number, values)
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
        passes, units = self._engine._plan_capacity(number, self._made.capacities, 1.0)
        return MARGIN * max(values[1] / passes, values[0] / units)

    def _judge_input(self, level: int, values: list[int]) -> None:
        engine = self._engine
        place = next(i for i, given in enumerate(engine._inputs) if engine._root(given) == level)
        coords = self._frame[place][0]
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

    @_surroundings.undisturbed()
    def _build(self) -> Any:
        engine, program = self._engine, self._engine._program
        sets: dict[int, CoordSet] = {}
        batches = [leaf[2] for given, leaf in zip(engine._inputs, self._frame, strict=True) if given.sparse]
        grids = [given.spatial_shape for given in engine._inputs if given.sparse]
        for given, leaf in zip(engine._inputs, self._frame, strict=True):
            if given.sparse and leaf[3] is not None:
                sets[engine._root(given)] = leaf[3]
        leaves: list[Any] = []
        for out, made in zip(program.outputs, self._outputs, strict=True):
            if isinstance(out, VoxelsOut):
                rows = self._rows[out.level]
                if out.level not in sets:
                    level = program.levels[out.level]
                    sets[out.level] = CoordSet.trusted(
                        made[0][:rows].contiguous(),
                        batches[level.path[0]],
                        level.bounds,
                        level.path[-1].shape if len(level.path) > 1 else grids[level.path[0]],
                    )
                leaves.append(Voxels._make(sets[out.level], made[1][:rows], out.stride, out.record))
            elif isinstance(out, TensorOut) and out.level >= 0:
                leaves.append(made[: self._rows[out.level]])
            else:
                leaves.append(made)
        return pytree.tree_unflatten(leaves, program.spec)


# ---- compiling ---------------------------------------------------------------------------------------------


def compile(
    model: nn.Module | Callable[..., Any],
    example: Any,
    *,
    capacity: int | None = None,
    levels: Mapping[int, int] | None = None,
    bounds: Sequence[int] | None = None,
    frames: Sequence[Any] = (),
    grow: bool = False,
    check_finite: bool = False,
) -> Engine:
    """Makes an engine of a network in evaluation mode.

    The network runs a few times on the example; what it does is written down as a program of operators with
    the weights and the precision of now, in which settings, autocast and parameters of later change nothing.

    Args:
        model: takes and returns Voxels and tensors, nested in tuples, lists and dicts; not changed.
            Convolutions, pooling, norms in evaluation mode, activations, linear layers, sums and
            concatenations on one set, pooling over samples, dense(spatial_shape=...) and whatever else keeps
            rows apart.
        example: its inputs: Voxels, or a tuple of inputs. Tensors have these sizes later, too.
        capacity: voxels that a frame may have. Default: a quarter more than the largest example.
        levels: capacities of levels by number (`Engine.levels()`), instead of what the examples lead to.
        bounds: least x, y, z and largest x, y, z of a frame's coordinates. Default: a box around the
            examples, larger where that costs nothing. Boxes of up to 2^27 cells, samples included and every
            side rounded up to a power of two, are faster.
        frames: more examples, which capacities and bounds are to hold for.
        grow: frames that do not fit make the engine larger (which waits for the device, and captures anew).
        check_finite: features are looked at on the device, and NaN and infinity reported.

    Raises:
        TypeError, ValueError: naming the argument.
        EngineError: naming the operation that an engine cannot take.
    """
    if isinstance(model, nn.Module) and any(module.training for module in model.modules()):
        raise ValueError("model is in training mode: call model.eval()")
    inputs = _as_inputs(example)
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=_is_voxels)
    given = _described(leaves)
    device = next(leaf.device for leaf in leaves if isinstance(leaf, Voxels))
    examples = [leaves]
    for place, frame in enumerate(frames):
        more, its_spec = pytree.tree_flatten(_as_inputs(frame), is_leaf=_is_voxels)
        if its_spec != spec:
            raise TypeError(f"frames[{place}] is built as {its_spec}, the example as {spec}")
        examples.append(more)
    for leaf in (leaf for leaves in examples for leaf in leaves):
        if leaf.device != device:
            raise ValueError(f"the example is on {device} and {leaf.device}")
    batch = max(leaf.batch_size for one in examples for leaf in one if isinstance(leaf, Voxels))
    given = [replace(one, batch_size=batch) if one.sparse else one for one in given]
    with torch.inference_mode(False), torch.no_grad():
        survey = _Survey.of(model, examples, spec)
        first = survey.capacity(capacity)
        wanted = [
            _wanted_bounds(bounds, box, batch, one.spatial_shape)
            for box, one in zip(survey.boxes, (one for one in given if one.sparse), strict=True)
        ]
        capacities = survey.capacities(first, wanted)
        taken = _sizes(model, examples)
        runs = []
        for shift, half in ((0, False), (7, True)):
            recorder = Recorder(capacities, {}, taken, shift)
            runs.append(
                (recorder, _record(recorder, model, leaves, spec, given, wanted, first, half, check_finite))
            )
        (recorder, program), (second, _) = runs
        program.steps, program.consts = join(recorder, second)
        with _surroundings.undisturbed():
            program.consts = [tensor.detach().clone() for tensor in program.consts]
            program.optimise(recorder.dtypes)
    made = [capacities[level.path] for level in program.levels]
    for number, rows in (levels or {}).items():
        if not 0 <= number < len(made):
            raise ValueError(f"levels has {number}, the network's levels are 0 to {len(made) - 1}")
        made[number] = positive(rows, f"levels[{number}]")
        need = survey.needs[program.levels[number].path]
        if made[number] < need:
            raise ValueError(f"levels[{number}] is {made[number]:,}, an example needs {need:,} rows there")
    engine = Engine(
        program, given, spec, made, [MARGIN] * len(program.plans), device, True,
        [survey.needs[level.path] for level in program.levels],
    )  # fmt: skip
    for one in examples:  # rooms of plans are learnt here
        engine(*pytree.tree_unflatten(one, spec)).check()
    engine.grow = grow
    engine.frames = 0
    return engine


def _as_inputs(example: Any) -> list[Any]:
    return list(example) if isinstance(example, tuple) else [example]


@_surroundings.undisturbed()
def _fresh(leaf: Any) -> Any:
    """A copy: of Voxels on a set of their own that nothing was made from yet."""
    if not isinstance(leaf, Voxels):
        return leaf.detach().clone()
    if leaf.coord_set.finer is not None:
        raise ValueError("the input was made by a strided layer: compile from what it was made from")
    copied = CoordSet.trusted(leaf.coords, leaf.batch_size, spatial_shape=leaf.spatial_shape)
    copied._index = replace(leaf.coord_set._index, segments=None)
    return Voxels._make(copied, leaf.feats.detach().clone(), leaf.stride)


@_surroundings.undisturbed()
def _box(coords: CoordSet) -> Bounds:
    """The box around a set's rows."""
    if not coords.num:
        return (0,) * 8
    low, high = torch.aminmax(coords.coords, dim=0)
    return (*low.tolist(), *high.tolist())


def _around(a: Bounds, b: Bounds) -> Bounds:
    return (*map(min, a[:4], b[:4]), *map(max, a[4:], b[4:]))


def _sizes(model: Any, examples: Sequence[Sequence[Any]]) -> set[int]:
    """Sizes that tensors have already."""
    found = {size for one in examples for leaf in one if isinstance(leaf, Tensor) for size in leaf.shape}
    found |= {leaf.channels for one in examples for leaf in one if isinstance(leaf, Voxels)}
    if isinstance(model, nn.Module):
        for tensor in (*model.parameters(), *model.buffers()):
            found |= set(tensor.shape)
            found |= {c * 2**i for c in tensor.shape for i in range(3)}
    return found


def _record(
    recorder: Recorder,
    model: Callable[..., Any],
    leaves: Sequence[Any],
    spec: Any,
    given: Sequence[Input],
    bounds: Sequence[Bounds],
    capacity: int,
    half: bool,
    check_finite: bool,
) -> Program:
    """Runs the network on sized sets; with `half`, of every other row of the example, in another order."""
    inputs, filled = _inputs(recorder, leaves, given, bounds, capacity, half, check_finite)
    with torch.random.fork_rng(devices=[]), recorder:
        out = model(*pytree.tree_unflatten(filled, spec))
    flat, form = pytree.tree_flatten(out, is_leaf=_is_voxels)
    outputs = [recorder.output(leaf) for leaf in flat]
    counts = [recorder.place(recorder.count(number)) for number in range(len(recorder.levels))]
    return Program(
        recorder.levels, recorder.plans, inputs, recorder.steps, recorder.consts, counts, recorder.reports,
        outputs, form,
    )  # fmt: skip


@_surroundings.undisturbed()
def _inputs(
    recorder: Recorder,
    leaves: Sequence[Any],
    given: Sequence[Input],
    bounds: Sequence[Bounds],
    capacity: int,
    half: bool,
    check_finite: bool,
) -> tuple[list[Ref], list[Any]]:
    """The program's inputs, and what the network is given for them."""
    inputs: list[Ref] = []
    filled: list[Any] = []
    for leaf, one in zip(leaves, given, strict=True):
        if not one.sparse:
            tensor = leaf.detach().clone()
            inputs.append(recorder.input(tensor))
            filled.append(tensor)
            continue
        coords, feats = leaf.coords, leaf.feats.detach()
        if half:
            coords, feats = coords.flip(0)[::2], feats.flip(0)[::2]
        box = bounds[one.root]
        level = recorder.level((one.root,), -1, box, capacity)
        rows = recorder.levels[level].marker
        buffers = (coords.new_zeros((rows, 4)), feats.new_zeros((rows, *one.shape)))
        buffers[0][: len(coords)], buffers[1][: len(feats)] = coords, feats
        count = torch.full((1,), len(coords), dtype=torch.int64, device=coords.device)
        inputs += [recorder.input(t) for t in (*buffers, count)]
        with recorder:
            *index, status = torch.ops.voxmma.sized_index(buffers[0], count, list(box))
            recorder.report("index", level, status)
            if check_finite:
                recorder.report("finite", one.root, torch.ops.voxmma.sized_finite(buffers[1], count))
        parts = (buffers[0], count, *index)
        made = NetworkSet.make(recorder, level, parts, one.batch_size, box, one.spatial_shape)
        filled.append(Voxels._make(made, buffers[1], one.stride))
    return inputs, filled
