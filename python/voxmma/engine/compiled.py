"""Engines: capacities, buffers and graph of a program, and its frames."""

from __future__ import annotations

import contextlib
import gc
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from voxmma import _surroundings, torchflags
from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma.engine import ops
from voxmma.engine.errors import EngineError
from voxmma.engine.inputs import MOST_ROWS, Input, Rows, check_frame, put
from voxmma.engine.memory import WORKSPACE, Meter
from voxmma.engine.program import CELLS, Program, Ref, Step, places, reads
from voxmma.engine.result import Result, largest
from voxmma.engine.survey import MARGIN
from voxmma.sparse.geometry import Geometry

_capturing = threading.Lock()  # one graph at a time


@dataclass
class Instance:
    """The program with capacities and rooms put in, and on a GPU its graphs."""

    capacities: list[int]
    rooms: list[float]
    inputs: list[Tensor]
    """what the program reads: of Voxels coordinates, features and count; of others the tensor"""
    env: dict[int, Tensor]
    graphs: list[Any] = field(default_factory=list)
    """of the program's parts"""
    early: list[int] = field(default_factory=list)
    """of the inputs, what the program's first part reads"""
    late: list[int] = field(default_factory=list)
    """the others"""
    results: list[Tensor] = field(default_factory=list)
    """what the results consist of, without repetition"""
    status: Tensor | None = None
    """(reports, 4) int64"""
    limits: list[tuple[int, int]] = field(default_factory=list)
    """on a GPU: passes and units of 4 unique rows that each map's plan may have"""
    most: list[int] = field(default_factory=list)
    """largest numbers that the reports of a right frame have"""
    meter: Meter | None = None
    """of the last run that was looked at"""
    pool: int = 0
    """bytes that the graphs have reserved"""
    end: _C.StreamEvent | None = None
    """behind the last frame"""
    readers: dict[int, Any] = field(default_factory=dict)
    """streams on which its results were read where they were, not copied, by their handles"""
    homes: set[int] = field(default_factory=set)
    """where the storages of its results begin"""
    streams: dict[int, Any] = field(default_factory=dict)
    """that frames ran on, as the allocator knows, by their handles"""

    def enter(self, handle: int, held: Sequence[Tensor]) -> None:
        """Makes the current stream, of this handle, the one of the next frame, behind the last one and those
        who read its results. What it runs on, `held` included, is not given to others before it is done."""
        if handle not in self.streams:
            stream = self.streams[handle] = torch.cuda.current_stream()
            for tensor in (*self.inputs, *held):
                tensor.record_stream(stream)
        if self.end is not None and self.end.stream != handle:
            self.end.wait()
        if self.readers:
            for other, reader in self.readers.items():
                if other != handle:
                    self.streams[handle].wait_stream(reader)
            self.readers = {}


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

    Made by `compile`. On a GPU a call copies the frame into the engine's buffers, replays its CUDA graphs, of
    sets and kernel maps and of the layers, and returns without having waited for the device. On a CPU it runs
    the same program operator by operator.

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
        sparse = [(given, place) for place, given in enumerate(inputs) if given.sparse]
        self._sparse_places = [(self._roots[given.root], place) for given, place in sparse]
        """level of each sparse input, and its place among all"""
        grids = [given.spatial_shape for given, _ in sparse]
        self._shapes = [
            grids[level.path[0]] if level.parent < 0 or level.path[-1] == CELLS else level.path[-1].shape
            for level in program.levels
        ]
        """spatial shapes of the levels"""
        self._flags = torchflags.snapshot()
        self._lock = threading.RLock()
        parts = [[(place, out.level) for place in places(out)] for out in program.outputs]
        self._places = list(dict.fromkeys(part for found in parts for part in found))
        """what the results consist of, without repetition, and its level"""
        self._outputs = [
            (out, [self._places.index(part) for part in found])
            for out, found in zip(program.outputs, parts, strict=True)
        ]
        """and which of that each of them is"""
        told = {
            r.number: ops.STATUS * at for at, r in enumerate(program.reports) if r.kind in ("index", "sites")
        }
        self._rows_at = [told[level] if level >= 0 else -1 for _, level in self._places]
        """where among the numbers of the reports the rows of each are, -1: it has none"""
        self._begun = 0
        """number of the last frame that began"""
        self._lent: Sequence[Tensor] = ()
        """the tensors that the last frame's result is, where it is no copy"""
        self._lent_at: set[int] = set()
        """where their storages begin"""
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
            given = step.named()
            if op.startswith("voxmma::") and "accumulator" in given:
                found.append({"op": op, "accumulator": given["accumulator"], "tile": given["tile"]})
        return found

    @property
    def operators(self) -> dict[str, int]:
        """Calls of each operator in a frame, by name: on a GPU about a kernel for each, and up to ten
        for those that make sets."""
        return dict(Counter(step.func._schema.name.split("::")[1] for step in self._program.steps))

    @property
    def memory(self) -> int:
        """Bytes that a frame takes at a time beyond its own, copies of its results, and weights: buffers of
        the inputs, and what is alive between the steps and in them.

        This is what torch.cuda.max_memory_allocated would say of the same steps. On a GPU the graph keeps it
        (`reserved`). On a CPU 0 before the first frame.
        """
        return self._buffers + (self._instance.meter.peak if self._instance.meter else 0)

    @property
    def reserved(self) -> int:
        """Bytes that an engine on a GPU keeps for itself: buffers, and blocks of the graph."""
        return self._buffers + self._instance.pool

    @property
    def _buffers(self) -> int:
        return sum(t.nbytes for t in self._instance.inputs)

    def levels(self) -> str:
        """The levels as a table: what makes each, its capacity, what the examples needed, and where `memory`
        goes when most is taken, in MiB: buffers and set of the level, kernel maps to it, features on it. What
        belongs to no level, workspace included, is in the last line."""
        made = self._instance
        parts = Counter(made.meter.parts if made.meter else {})
        for _, root, tensors in self._input_buffers(made):
            parts["sets", root] += sum(t.nbytes for t in tensors)
        names = ("sets", "maps", "features")
        lines = [
            f"{'level':>5} {'capacity':>10} {'needed':>10} {'set':>7} {'maps':>7} {'features':>8}  made by"
        ]
        for number, level in enumerate(self._program.levels):
            need = self._needs[number]
            a, b, c = (parts.pop((name, number), 0) / 2**20 for name in names)
            lines.append(
                f"{number:5} {made.capacities[number]:10,} {need:10,} {a:7.1f} {b:7.1f} {c:8.1f}  {level}"
            )
        workspace = parts.pop(WORKSPACE, 0) / 2**20
        lines.append(
            f"{self.memory / 2**20:.1f} MiB, of which workspace {workspace:.1f} and others "
            f"{parts.total() / 2**20:.1f}"
        )
        return "\n".join(lines)

    def _input_buffers(self, made: Instance) -> Iterator[tuple[Input, int, list[Tensor]]]:
        """Each input, its level (-1: none) and its buffers."""
        begin = 0
        for given in self._inputs:
            end = begin + given.count
            yield given, self._roots[given.root] if given.sparse else -1, made.inputs[begin:end]
            begin = end

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("an engine cannot be copied or pickled: voxmma.engine.save and load make another one")

    def __repr__(self) -> str:
        return (
            f"Engine(capacity={self.capacities[0]}, batch_size={self.batch_size}, device='{self.device}', "
            f"steps={len(self._program.steps)}, grow={self.grow})"
        )

    # ---- buffers and graph

    def _build(self, capacities: list[int], rooms: list[float]) -> Instance:
        buffers: list[Tensor] = []
        with torch.inference_mode(False), torch.no_grad():
            for given in self._inputs:
                rows = capacities[self._roots[given.root]] if given.sparse else 0
                buffers += given.buffers(rows, self.device)
            for number, (ref, buffer) in enumerate(zip(self._program.inputs, buffers, strict=True)):
                wide = self._program.widths.get(ref.number)
                if wide is not None:
                    buffers[number] = buffer.new_zeros((len(buffer), wide))
            made = Instance(capacities, rooms, buffers, {})
            if self.device.type == "cuda":
                read = {number for step in self._program.parts()[0] for number in reads(step, Ref)}
                for at, ref in enumerate(self._program.inputs):
                    (made.early if ref.number in read else made.late).append(at)
                made.limits = [
                    ops.plan_capacity(*rule, room)
                    for rule, room in zip(self._plan_rules(capacities), rooms, strict=True)
                ]
                with torchflags.preserved():  # of whenever it grows
                    torchflags.restore(self._flags)
                    self._capture(made)
        made.most = largest(self._program, made)
        return made

    def _plan_rules(self, rows: Sequence[int]) -> list[tuple[Geometry, bool, int, int]]:
        """Geometry, direction and sides of every kernel map, where levels have so many rows."""
        return [(p.geometry, p.reverse, rows[p.source], rows[p.target]) for p in self._program.plans]

    @_surroundings.undisturbed()
    def _run(self, made: Instance, steps: Sequence[Step], meter: Meter | None = None) -> None:
        """A part of the program; behind the first one, what it reports is in `made.status`."""
        program = self._program
        program.run(steps, made.env, made.capacities, made.rooms, meter)
        if made.status is None:
            reports = program.reports
            lines = [program.value(made.env, r.status).view(-1, ops.STATUS)[r.line] for r in reports]
            made.status = torch.stack(lines)

    def _run_all(self, made: Instance) -> None:
        made.env, made.status, made.homes = self._program.start(made.inputs), None, set()
        meter = Meter(self._program, made.inputs, self.device) if made.meter is None else None
        for steps in self._program.parts():
            self._run(made, steps, meter)
        made.meter = meter or made.meter
        made.results = [self._program.value(made.env, place) for place, _ in self._places]

    def _capture(self, made: Instance) -> None:
        """The program's parts as CUDA graphs, after one run that loads what is loaded once."""
        with _capturing, torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._run_all(made)
                made.env, made.status, made.results = {}, None, []
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            made.env = self._program.start(made.inputs)
            pool = torch.cuda.graph_pool_handle()
            for steps in self._program.parts():
                graph = torch.cuda.CUDAGraph()
                with (
                    _nothing_collected(),
                    torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"),
                ):
                    if not made.graphs:
                        # A block for what is there at a time: else the allocator takes another one, of 20 MiB
                        # or more, whenever nothing fits.
                        assert made.meter is not None
                        torch.empty(made.meter.large, dtype=torch.uint8, device=self.device)
                    self._run(made, steps)
                made.graphs.append(graph)
            made.pool = torch.cuda.memory_reserved() - before
            made.results = [self._program.value(made.env, place) for place, _ in self._places]

    # ---- a frame

    @eager
    def __call__(self, *inputs: Any, copy: bool = True) -> Result:
        """Runs a frame.

        Args:
            inputs: as the example: in place of Voxels also (coords, feats), (N, 4) int32 or int64 rows
                (batch, x, y, z) and (N, C) features of the example's dtype, which nobody has looked at
                before; in place of Points of one sample also (points, feats). N may be 0 and is at most the
                engine's capacity, unless it may grow. Other tensors have the example's shape and dtype. All
                on the engine's device. They are not to be written to before the result is read.
            copy: False: the result lies in the engine's own memory, without a copy. It is there until the
                next frame begins, and is not to be written to. A result that is read later raises
                RuntimeError, and so do coordinates of it, and a backward pass that has kept features of it.

        Returns a Result, whose device work is on the current stream.

        Raises:
            TypeError, ValueError: naming the input: structure, dtype, device, channels, more rows than the
                engine has room for, more samples.
        """
        frame = check_frame(inputs, self._spec, self._inputs, self.device)
        with self._lock:
            rows = self._instance.capacities
            wanted = {root: leaf.size for root, leaf in self._sparse(frame) if leaf.size > rows[root]}
            if wanted:
                self._make_room(wanted, frame)
            return self._frame(frame, copy)

    def _make_room(self, wanted: dict[int, int], frame: list[Any]) -> None:
        if self.grow:
            self._grow(wanted)
            return
        for root, leaf in self._sparse(frame):
            if root in wanted:
                raise ValueError(
                    f"the frame has {leaf.size:,} {leaf.kind}, the engine's capacity is "
                    f"{self._instance.capacities[root]:,}: compile it with more, or with grow=True"
                )

    def _sparse(self, frame: list[Any]) -> list[tuple[int, Rows]]:
        """Level and leaf of each sparse input."""
        return [(level, frame[place]) for level, place in self._sparse_places]

    def _frame(self, frame: list[Any], copy: bool) -> Result:
        """Enqueues a frame that there is room for. Under the lock."""
        run = self._replay if self.device.type == "cuda" else self._compute
        result = run(self._instance, frame, copy)
        self.frames += 1
        return result

    def _apart(self, frame: list[Any]) -> list[Any]:
        """The frame, with copies of what lies in memory that the last one lent, and this one writes to."""
        if not self._lent:
            return frame

        def own(value: Any) -> Any:
            if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() not in self._lent_at:
                return value
            return value.detach().clone()

        parts: list[Any] = []
        for leaf in frame:
            if not isinstance(leaf, Rows):
                parts.append(own(leaf))
                continue
            where = own(leaf.where)
            coord_set = leaf.coord_set if where is leaf.where else None
            parts.append(Rows(where, own(leaf.feats), leaf.batch_size, coord_set, own(leaf.batch)))
        return parts

    def _begin(self) -> int:
        """The number of a new frame. What the last one has lent counts as written to."""
        if self._lent:
            torch.autograd.graph.increment_version(self._lent)
            self._lent = ()
        self._begun += 1
        return self._begun

    def _results(self, made: Instance, copy: bool) -> list[Tensor]:
        """What the frame made, in copies or lent."""
        if copy:
            return (
                _C.copies(made.results) if self.device.type == "cuda" else [t.clone() for t in made.results]
            )
        if not made.homes:
            made.homes = {tensor.untyped_storage().data_ptr() for tensor in made.results}
        self._lent, self._lent_at = made.results, made.homes
        return made.results

    @torch.inference_mode(False)
    @torch.no_grad()
    def _compute(self, made: Instance, frame: list[Any], copy: bool) -> Result:
        """A frame on a CPU."""
        frame = self._apart(frame)
        number = self._begin()
        put(made.inputs, self._sources(frame))
        with torchflags.pinned("ieee"):
            self._run_all(made)
        assert made.status is not None
        return Result(self, made, frame, number, self._results(made, copy), made.status.flatten().tolist)

    def _sources(self, frame: list[Any]) -> list[Tensor | int]:
        """What the frame has for each buffer."""
        return [
            source for given, leaf in zip(self._inputs, frame, strict=True) for source in given.sources(leaf)
        ]

    def _replay(self, made: Instance, frame: list[Any], copy: bool) -> Result:
        """A frame on a GPU. What comes before the first graph is what the device waits for."""
        index = self.device.index
        if torch._C._cuda_getDevice() != index:
            with torch.cuda.device(index):
                return self._replay(made, frame, copy)
        if torch._C._cuda_isCurrentStreamCapturing():
            raise RuntimeError("an engine is CUDA graphs: it cannot be called while another one is captured")
        made.enter(torch._C._cuda_getCurrentRawStream(index), self._program.consts)
        frame = self._apart(frame)
        number = self._begin()
        sources, buffers = self._sources(frame), made.inputs
        first, *others = made.graphs
        assert made.status is not None
        try:
            put([buffers[at] for at in made.early], [sources[at] for at in made.early])
            first.replay()
            # Sets and maps are made: while the layers run, the host looks at what is told of these. Nothing
            # is read of the frame any more.
            told = _C.Told.of(
                made.status, [buffers[at] for at in made.late], [sources[at] for at in made.late]
            )
            for graph in others:
                graph.replay()
            results = self._results(made, copy)
        finally:
            made.end = _C.StreamEvent.record(index)
        return Result(self, made, frame, number, results, told.numbers, made.end)

    # ---- growth

    def _grow(self, wanted: Mapping[int, int], rooms: Mapping[int, float] | None = None) -> None:
        """Makes room for `wanted` rows of levels, and in plans. Under the lock."""
        if not wanted and not rooms:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # frames in flight use the buffers
        capacities = list(self._instance.capacities)
        for level, need in wanted.items():
            if need > MOST_ROWS:
                raise EngineError(f"level {level} needs {need:,} rows, an engine takes {MOST_ROWS:,} at most")
            capacities[level] = max(capacities[level], min(math.ceil(need * MARGIN), MOST_ROWS))
        room = list(self._instance.rooms)
        for plan, factor in (rooms or {}).items():
            room[plan] = max(room[plan], factor)
        self._instance = self._build(capacities, room)
        for level, need in wanted.items():
            self._needs[level] = max(self._needs[level], need)
