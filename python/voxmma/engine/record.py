"""What a network does, written down: a program for any number of rows.

The network runs twice on sized sets (voxmma.engine.sets) under a mode that sees every operator. Numbers that
were capacities in both runs become places that a capacity is put into later; anything else that differs
between the runs depends on the frame in a way that no program could follow, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)
from torch.utils.weak import WeakTensorKeyDictionary

from voxmma._types import Triple
from voxmma.dispatch.launches import leave
from voxmma.engine import rules
from voxmma.engine.errors import EngineError
from voxmma.engine.lanes import Lanes
from voxmma.engine.sets import NetworkSet
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import Derived
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.packing import Bounds
from voxmma.sparse.tensor import Voxels

Path = tuple[Any, ...]
"""identity of a level: the number of its input, then the Derived of each layer on the way"""


@dataclass(frozen=True)
class Ref:
    """A tensor that a program makes or is given."""

    number: int


@dataclass(frozen=True)
class Const:
    """A tensor that a program holds."""

    number: int


@dataclass(frozen=True)
class Capacity:
    """The capacity of a level."""

    level: int


@dataclass(frozen=True)
class Room:
    """How much room a map's plan has, in units of what one takes as a rule."""

    map: int


@dataclass(frozen=True)
class Level:
    """A coordinate set of the network. `bounds`: smallest and largest (batch, x, y, z) that it may hold."""

    path: Path
    parent: int
    """-1: an input"""
    bounds: Bounds
    marker: int = 0
    """capacity while it is recorded"""

    def __str__(self) -> str:
        if self.parent < 0:
            return f"input {self.path[0]}"
        geometry, to_children, _ = self.path[-1]
        kind = "generative layer" if to_children else "layer"
        size, stride, *_ = geometry
        return f"{kind} of kernel_size {size}, stride {stride} on level {self.parent}"


@dataclass(frozen=True)
class Plan:
    """A kernel map of the network, from level `source` to level `target`."""

    source: int
    target: int
    geometry: Geometry
    reverse: bool


@dataclass(frozen=True)
class Report:
    """Where a status comes from: 'index', 'sites', 'map', 'dense', 'points', 'finite'; of a level or map."""

    kind: str
    number: int
    status: Any


@dataclass
class Step:
    """A call of an operator. `args` and `kwargs` hold Ref, Const, Capacity and Room."""

    func: Any
    args: Any
    kwargs: Any
    out: tuple[int | None, ...]
    """numbers of the tensors among the flattened results"""
    frees: tuple[int, ...] = ()
    """tensors that nobody reads any more"""

    def named(self) -> dict[str, Any]:
        """The arguments by name."""
        names = (argument.name for argument in self.func._schema.arguments)
        return {**dict(zip(names, self.args, strict=False)), **self.kwargs}


@dataclass(frozen=True)
class VoxelsOut:
    """A Voxels among the results."""

    level: int
    feats: Any
    coords: Any
    stride: Triple
    record: Any = None


@dataclass(frozen=True)
class TensorOut:
    """A tensor among the results; level of its first dimension, -1: it is none of rows."""

    level: int
    value: Any


@dataclass
class Program:
    """Steps from the inputs to the results, for whatever capacities."""

    levels: list[Level]
    plans: list[Plan]
    inputs: list[Ref]
    steps: list[Step]
    consts: list[Tensor]
    counts: list[Any]
    """of every level: (1,) int64"""
    reports: list[Report]
    outputs: list[Any]
    spec: Any
    """pytree of the outputs"""
    records: list[Any] = field(default_factory=list)

    def lanes(self) -> Lanes:
        """Streams to capture the program on; the current one is being captured."""
        return Lanes(self.steps, self.beside(), lambda step: _numbers(step, Ref), self._given())

    def beside(self) -> list[Step]:
        """The steps that make sets and maps out of the inputs and each other, in order."""
        known, found = self._given(), []
        for step in self.steps:
            if step.func._schema.name.startswith("voxmma::sized_") and known.issuperset(_numbers(step, Ref)):
                found.append(step)
                known.update(number for number in step.out if number is not None)
        return found

    def _given(self) -> set[int]:
        return {ref.number for ref in self.inputs}

    def run(
        self,
        inputs: Sequence[Tensor],
        capacities: Sequence[int],
        rooms: Sequence[float],
        lanes: Lanes | None = None,
    ) -> dict[int, Tensor]:
        """What `places` names, from `inputs`: coordinates, features and (1,) counts, or tensors."""
        env = {ref.number: tensor for ref, tensor in zip(self.inputs, inputs, strict=True)}

        def fill(value: Any) -> Any:
            kind = type(value)
            if kind is Ref:
                return env[value.number]
            if kind is Const:
                return self.consts[value.number]
            if kind is Capacity:
                return capacities[value.level]
            if kind is Room:
                return rooms[value.map]
            if kind is list or kind is tuple:
                return kind(map(fill, value))
            return value

        kept = set() if lanes is None else lanes.kept
        for step in self.steps if lanes is None else lanes.run():
            made = step.func(*fill(step.args), **{name: fill(value) for name, value in step.kwargs.items()})
            for number, tensor in zip(step.out, _leaves(made), strict=True):
                if number is not None:
                    env[number] = tensor
            del made
            for number in step.frees:
                if number not in kept:
                    del env[number]
        return env

    def value(self, env: dict[int, Tensor], place: Any) -> Tensor:
        """The tensor that a Ref or Const among outputs, counts and reports stands for."""
        return env[place.number] if isinstance(place, Ref) else self.consts[place.number]

    def places(self) -> list[Any]:
        """What the outside reads."""
        found = [*self.counts, *(report.status for report in self.reports)]
        for out in self.outputs:
            if isinstance(out, VoxelsOut):
                found += [out.feats, out.coords]
            elif isinstance(out, TensorOut):
                found.append(out.value)
        return found

    def optimise(self, dtypes: Mapping[int, torch.dtype]) -> None:
        """Computes what no input reaches, packs weights, drops what nobody reads, and says what is free when.

        dtypes: of the tensors by number.
        """
        self._fold()
        for step in self.steps:
            self._pack(step, dtypes)
        self._prune()

    def _fold(self) -> None:
        """Computes what no input reaches."""
        written = {n for step in self.steps if step.func._schema.is_mutable for n in _numbers(step, Ref)}
        # A write into a view reaches what it is a view of: everything that shares memory with it stays.
        aliases = _Aliases()
        for step in self.steps:
            if any(a.alias_info is not None for a in step.func._schema.arguments):
                aliases.join([*_numbers(step, Ref), *(n for n in step.out if n is not None)])
        kept = {aliases.find(n) for n in written}
        fixed: dict[int, Const] = {}
        steps = []
        with torch.no_grad():
            for step in self.steps:
                step.args, step.kwargs = _put(step.args, fixed), _put(step.kwargs, fixed)
                outs = [n for n in step.out if n is not None]
                if (
                    _has(step, (Ref, Capacity, Room))
                    or step.func._schema.is_mutable
                    or any(aliases.find(n) in kept for n in outs)
                ):
                    steps.append(step)
                    continue
                made = step.func(*_held(step.args, self.consts), **_held(step.kwargs, self.consts))
                for number, tensor in zip(step.out, _leaves(made), strict=True):
                    if number is not None:
                        fixed[number] = Const(len(self.consts))
                        self.consts.append(tensor)
        self.steps = steps
        self._replace_outputs(fixed)

    def _pack(self, step: Step, dtypes: Mapping[int, torch.dtype]) -> None:
        """Makes a convolution whose weight is frozen one that takes it as its kernel reads it."""
        ops = torch.ops.voxmma
        if step.func not in (ops.conv.default, ops.conv_fused.default):
            return
        given = step.named()
        x, weight = given["x"], given["weight"]
        numbers = {name: given.get(name) for name in ("bias", "scale", "shift", "mean", "var")}
        frozen = all(isinstance(value, Const) for value in (weight, *numbers.values()) if value is not None)
        if not frozen or not isinstance(x, Ref) or given.get("packed") is not None:
            return
        bias, *channels = _held(list(numbers.values()), self.consts)
        how = [given[name] for name in ("symmetric", "transpose", "accumulator", "tile")]
        packed = ops.pack_weight(
            self.consts[weight.number], bias, *how, dtypes[x.number], eps=given.get("eps", 0.0),
            **dict(zip(list(numbers)[1:], channels, strict=True)),
        )  # fmt: skip
        self.consts.append(packed)
        rest = ("scale", "shift", "mean", "var", "eps", "residual", "activation", "slope")
        step.func = ops.conv_fused.default
        step.args = [
            *(given[name] for name in ("x", "weight", "bias", "map", "n_out")), *how, given.get("out_dtype")
        ]  # fmt: skip
        step.kwargs = {name: given[name] for name in rest if name in given}
        step.kwargs["packed"] = Const(len(self.consts) - 1)

    def _prune(self) -> None:
        """Drops what nobody reads, and says what is free after each step."""
        steps = self.steps
        needed = {place.number for place in self.places() if isinstance(place, Ref)}
        live = []
        for step in reversed(steps):
            outs = [n for n in step.out if n is not None]
            if step.func._schema.is_mutable or needed.intersection(outs):
                needed.update(_numbers(step, Ref))
                live.append(step)
        self.steps = live[::-1]
        last = {place.number for place in self.places() if isinstance(place, Ref)}
        for step in reversed(self.steps):
            seen = {*_numbers(step, Ref), *(n for n in step.out if n is not None)}
            step.frees = tuple(sorted(seen - last))
            last |= seen
        used: dict[int, int] = {}
        for step in self.steps:
            for number in _numbers(step, Const):
                used.setdefault(number, len(used))
        for place in self.places():
            if isinstance(place, Const):
                used.setdefault(place.number, len(used))
        moved = {old: Const(new) for old, new in used.items()}
        for step in self.steps:
            step.args, step.kwargs = _put(step.args, moved, Const), _put(step.kwargs, moved, Const)
        self._replace_outputs(moved, Const)
        self.consts = [self.consts[old] for old in used]

    def _replace_outputs(self, table: dict[int, Any], kind: type = Ref) -> None:
        def put(value: Any) -> Any:
            return _put(value, table, kind)

        self.counts = put(self.counts)
        self.reports = [Report(r.kind, r.number, put(r.status)) for r in self.reports]
        outputs: list[Any] = []
        for out in self.outputs:
            if isinstance(out, VoxelsOut):
                out = VoxelsOut(out.level, put(out.feats), put(out.coords), out.stride, out.record)
            elif isinstance(out, TensorOut):
                out = TensorOut(out.level, put(out.value))
            outputs.append(out)
        self.outputs = outputs


class _Aliases:
    """Sets of tensors that may share memory."""

    def __init__(self) -> None:
        self.parent: dict[int, int] = {}

    def find(self, number: int) -> int:
        while self.parent.get(number, number) != number:
            number = self.parent[number]
        return number

    def join(self, numbers: Sequence[int]) -> None:
        for number in numbers[1:]:
            self.parent[self.find(number)] = self.find(numbers[0])


def _leaves(value: Any) -> list[Any]:
    """The results of an operator, flat; None where there is no tensor."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in _leaves(part)]
    return [value if isinstance(value, Tensor) else None]


def _each(value: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for part in value for found in _each(part, kinds)]
    return [value] if isinstance(value, kinds) else []


def _numbers(step: Step, kind: type) -> list[int]:
    return [place.number for place in (*_each(step.args, kind), *_each(step.kwargs, kind))]


def _has(step: Step, kinds: tuple[type, ...]) -> bool:
    return bool(_each(step.args, kinds) or _each(step.kwargs, kinds))


def _put(value: Any, table: dict[int, Any], kind: type = Ref) -> Any:
    """`value` with the Refs (or Consts) of the table replaced."""
    if isinstance(value, dict):
        return {name: _put(part, table, kind) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_put(part, table, kind) for part in value)
    return table.get(value.number, value) if isinstance(value, kind) else value  # type: ignore[attr-defined]


def _held(value: Any, consts: list[Tensor]) -> Any:
    return _put(value, dict(enumerate(consts)), Const)


# ---- recording ---------------------------------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """One run of a network on sized sets.

    Args:
        capacities: of levels by path. known: sizes that no level may have, of whatever else there is.
        shift: added to capacities, another in another run.
    """

    def __init__(
        self, capacities: dict[Path, int], rooms: dict[Any, float], taken: set[int], shift: int
    ) -> None:
        super().__init__()
        self.capacities, self.rooms, self.taken, self.shift = capacities, rooms, set(taken), shift
        self.levels: list[Level] = []
        self.plans: list[Plan] = []
        self.sets: list[NetworkSet] = []
        self.steps: list[Step] = []
        self.reports: list[Report] = []
        self.consts: list[Tensor] = []
        self._numbers = WeakTensorKeyDictionary()
        self.dtypes: dict[int, torch.dtype] = {}
        self.moving: set[int] = set()
        """numbers of the tensors that depend on the frame"""
        self._count = 0

    # ---- levels and maps

    def level(self, path: Path, parent: int, bounds: Bounds, capacity: int) -> int:
        """A new level with a capacity that nothing else has."""
        marker = capacity + self.shift
        while marker in self.taken:
            marker += 1
        self.taken.add(marker)
        self.levels.append(Level(path, parent, bounds, marker))
        return len(self.levels) - 1

    def site(self, parent: int, key: Derived, bounds: Bounds) -> int:
        path = (*self.levels[parent].path, key)
        capacity = self.capacities.get(path)
        if capacity is None:
            raise EngineError(
                "the network made other coordinates than before: they depend on more than its input's"
            )
        return self.level(path, parent, bounds, capacity)

    def plan(self, source: int, target: int, geometry: Geometry, reverse: bool) -> int:
        self.plans.append(Plan(source, target, geometry, reverse))
        return len(self.plans) - 1

    def room(self, number: int) -> float:
        return self.rooms.get(number, 1.0) + 0.0

    def report(self, kind: str, number: int, status: Tensor) -> None:
        if kind == "map":
            self.steps[-1].args[-1] = Room(number)
        self.reports.append(Report(kind, number, self.place(status)))

    # ---- tensors

    def input(self, tensor: Tensor) -> Ref:
        """A tensor that the program is given."""
        ref = self.give(tensor)
        self.moving.add(ref.number)
        return ref

    def give(self, tensor: Tensor) -> Ref:
        """A tensor that the program makes."""
        ref = Ref(self._count)
        self._count += 1
        self._numbers[tensor] = ref
        self.dtypes[ref.number] = tensor.dtype
        return ref

    def place(self, tensor: Tensor) -> Any:
        """Ref or Const of a tensor."""
        found = self._numbers.get(tensor)
        if found is None:
            found = Const(len(self.consts))
            self.consts.append(tensor)
            self._numbers[tensor] = found
        return found

    def _rows(self, value: Any) -> list[int]:
        return self._sized(value) if isinstance(value, Tensor) and self._made(value) else []

    def _sized(self, tensor: Tensor) -> list[int]:
        """Dimensions whose size is a capacity."""
        markers = {level.marker for level in self.levels}
        return [dim for dim, size in enumerate(tensor.shape) if size in markers]

    def _moves(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the frame."""
        found = self._numbers.get(tensor)
        return isinstance(found, Ref) and found.number in self.moving

    def _made(self, tensor: Tensor) -> bool:
        """Whether the program makes or is given a tensor."""
        return isinstance(self._numbers.get(tensor), Ref)

    def level_of(self, tensor: Tensor) -> int:
        """The level whose rows a tensor's first dimension is, -1 for none."""
        if 0 not in self._rows(tensor):
            return -1
        return next(n for n, level in enumerate(self.levels) if level.marker == tensor.shape[0])

    def count(self, level: int) -> Tensor:
        """How many rows it has: (1,) int64."""
        return next(made.count for made in self.sets if made.level == level)

    # ---- operators

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made_here = any(self._made(t) for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        if made_here or torch.Tag.nondeterministic_seeded in func.tags:
            rules.check_host(func, args)
        args = self._masked(func, args)
        out = func(*args, **kwargs)
        rules.check(func, args, kwargs, out, self._rows, self._sized)
        self._write(func, args, kwargs, out)
        return out

    def _masked(self, func: Any, args: Any) -> Any:
        """The arguments, with zeros behind the rows where what stands there might do harm."""
        name, rows = rules.name_of(func), self._rows
        if name in ("index", "index_select", "gather"):
            picks = enumerate(args[1]) if name == "index" else [(args[1] % args[0].dim(), args[2])]
            for dim, picked in picks:
                if dim in rows(args[0]) and isinstance(picked, Tensor) and not self._moves(picked):
                    raise rules.refuse(func, "it picks rows by number, and a frame may have fewer")
        if name in ("index_select", "embedding", "gather"):
            place = 1 if name == "embedding" else 2
            return (*args[:place], self._zeroed(args[place]), *args[place + 1 :])
        if name == "index":
            return (args[0], [None if t is None else self._zeroed(t) for t in args[1]], *args[2:])
        if name == "conv_rescaled" and rows(args[0]):
            return (self._zeroed(args[0]), *args[1:])
        return args

    def _zeroed(self, tensor: Tensor) -> Tensor:
        if 0 not in self._rows(tensor):
            return tensor
        count = self.count(self.level_of(tensor))
        func = torch.ops.voxmma.sized_rows.default
        out: Tensor = func(tensor, count)
        self._write(func, (tensor, count), {}, out)
        return out

    def _write(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        schema = func._schema
        given = (self._placed(list(args)), {name: self._placed(value) for name, value in kwargs.items()})
        for argument, value in zip(schema.arguments, given[0], strict=False):
            self._check_write(func, argument, value)
        for argument in schema.arguments[len(given[0]) :]:
            self._check_write(func, argument, given[1].get(argument.name))
        numbers: list[int | None] = []
        for leaf in _leaves(out):
            if leaf is None:
                numbers.append(None)
            elif self._made(leaf):  # in place
                numbers.append(self._numbers[leaf].number)
            else:
                numbers.append(self.give(leaf).number)
        self.steps.append(Step(func, *given, tuple(numbers)))
        if not self.moving.isdisjoint(_numbers(self.steps[-1], Ref)):
            self.moving.update(number for number in numbers if number is not None)

    def _check_write(self, func: Any, argument: Any, value: Any) -> None:
        alias = argument.alias_info
        if alias is not None and alias.is_write and _each(value, Const):
            raise rules.refuse(func, "it writes into a tensor of the model (is it in training mode?)")

    def _placed(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self.place(value)
        if isinstance(value, list | tuple):
            return [self._placed(part) for part in value]
        return value

    def __enter__(self) -> Recorder:
        """Below the modes that are there, to see what they make of operators."""
        above = [_pop_mode() for _ in _get_current_dispatch_mode_stack()]
        super().__enter__()
        for mode in reversed(above):
            _push_mode(mode)
        return self

    def __exit__(self, *exception: Any) -> None:
        leave(self, lambda: super(Recorder, self).__exit__(*exception))

    # ---- results

    def output(self, leaf: Any) -> Any:
        """A leaf of the network's result as the program names it."""
        if isinstance(leaf, Voxels):
            made = leaf.coord_set
            if not isinstance(made, NetworkSet):
                raise EngineError("the network returns voxels on coordinates that it does not make")
            return VoxelsOut(
                made.level, self.place(leaf.feats), self.place(made._coords), leaf.stride, leaf._record
            )
        if isinstance(leaf, Tensor):
            dims = self._rows(leaf)
            if dims not in ([], [0]):
                raise EngineError("the network returns a tensor whose rows are not its first dimension")
            return TensorOut(self.level_of(leaf), self.place(leaf))
        if isinstance(leaf, CoordSet):
            raise EngineError("the network returns a coordinate set: return voxels on it")
        return leaf


# ---- two runs ----------------------------------------------------------------------------------------------


def join(first: Recorder, second: Recorder) -> tuple[list[Step], list[Tensor]]:
    """The steps of two runs as one. EngineError names the first operator at which they part."""
    if [level.path for level in first.levels] != [level.path for level in second.levels]:
        raise EngineError("the network makes other coordinates for another frame")
    for a, b in zip(first.steps, second.steps, strict=False):
        alike = len(a.args) == len(b.args) and a.kwargs.keys() == b.kwargs.keys()
        if a.func is not b.func or a.out != b.out or not alike:
            raise rules.refuse(a.func, "another frame takes another way through the network here")
        a.args = [
            _joined(a.func, place, x, y, first, second)
            for place, (x, y) in enumerate(zip(a.args, b.args, strict=True))
        ]
        a.kwargs = {
            name: _joined(a.func, name, x, b.kwargs[name], first, second) for name, x in a.kwargs.items()
        }
    if len(first.steps) != len(second.steps):
        raise EngineError(
            "the network takes another way for another frame: its Python code looks at the rows"
        )
    return first.steps, first.consts


def _joined(func: Any, name: str | int, a: Any, b: Any, first: Recorder, second: Recorder) -> Any:
    """An argument, of which the runs have `a` and `b`."""
    if type(a) is not type(b):
        raise rules.refuse(func, "its arguments depend on the frame")
    if type(a) in (list, tuple):
        if len(a) != len(b):
            raise rules.refuse(func, "its arguments depend on the frame")
        return [_joined(func, name, x, y, first, second) for x, y in zip(a, b, strict=True)]
    if isinstance(a, Const):
        x, y = first.consts[a.number], second.consts[b.number]
        alike = x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))
        if not alike:
            raise rules.refuse(
                func, "one of its operands depends on the frame and was not made by an operator"
            )
        return a
    if isinstance(a, Ref) and a != b:
        raise rules.refuse(func, "another frame gives it other operands")
    if type(a) is int and a != b and rules.takes_size(func, name):
        for number, (one, other) in enumerate(zip(first.levels, second.levels, strict=True)):
            if (a, b) == (one.marker, other.marker):
                return Capacity(number)
    if a != b and not a != a:  # NaN is no number of rows
        raise rules.refuse(func, f"its argument {a!r} depends on the number of rows")
    return a
