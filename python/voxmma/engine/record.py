"""What a network does, written down: a program for any number of rows.

The network runs twice on sized sets (voxmma.engine.sets) under a mode that sees every operator. Numbers that
were capacities in both runs become places that a capacity is put into later; anything else that differs
between the runs depends on the frame in a way that no program could follow, and is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
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

from voxmma.dispatch.launches import leave
from voxmma.engine import rules
from voxmma.engine.errors import EngineError
from voxmma.engine.program import (
    CELLS,
    Capacity,
    Const,
    Facts,
    Level,
    Path,
    Plan,
    Ref,
    Report,
    Room,
    Step,
    TensorOut,
    VoxelsOut,
    each,
    leaves,
    places,
    reads,
)
from voxmma.engine.sets import NetworkSet
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import Derived
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.packing import Bounds
from voxmma.sparse.tensor import Voxels

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
"""what a network may return beside tensors"""


class Recorder(TorchDispatchMode):
    """One run of a network on sized sets.

    Args:
        capacities: of levels by path. known: sizes that no level may have, of whatever else there is.
        shift: added to capacities, another in another run.
    """

    def __init__(self, capacities: dict[Path, int], taken: set[int], shift: int) -> None:
        super().__init__()
        self.capacities, self.taken, self.shift = capacities, set(taken), shift
        self.levels: list[Level] = []
        self.plans: list[Plan] = []
        self.sets: list[NetworkSet] = []
        self.steps: list[Step] = []
        self.reports: list[Report] = []
        self.consts: list[Tensor] = []
        self.found: list[Tensor] = []
        """of every map its status"""
        self._numbers = WeakTensorKeyDictionary()
        self.facts: dict[int, Facts] = {}
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

    def cells(self, parent: int, root: int, bounds: Bounds) -> int:
        """The level of the voxels of an input's points."""
        return self.level((root, CELLS), parent, bounds, self.capacities[root, CELLS])

    def plan(self, source: int, target: int, geometry: Geometry, reverse: bool) -> int:
        self.plans.append(Plan(source, target, geometry, reverse))
        return len(self.plans) - 1

    def report(self, kind: str, number: int, status: Tensor) -> None:
        if kind == "map":
            self.steps[-1].args[-1] = [Room(number)]
            self.found.append(status)
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
        self.facts[ref.number] = Facts(tensor.dtype, tensor.dim(), tensor.shape[-1:].numel())
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
        for leaf in leaves(out):
            if leaf is None:
                numbers.append(None)
            elif self._made(leaf):  # in place
                numbers.append(self._numbers[leaf].number)
            else:
                numbers.append(self.give(leaf).number)
        self.steps.append(Step(func, *given, tuple(numbers)))
        if not self.moving.isdisjoint(reads(self.steps[-1], Ref)):
            self.moving.update(number for number in numbers if number is not None)

    def _check_write(self, func: Any, argument: Any, value: Any) -> None:
        alias = argument.alias_info
        if alias is not None and alias.is_write and each(value, Const):
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
        if not isinstance(leaf, _PLAIN):
            raise EngineError(
                f"the network returns a {type(leaf).__name__}, which an engine does not look into: return "
                "voxels and tensors in tuples, lists and dictionaries"
            )
        return leaf


# ---- two runs ----------------------------------------------------------------------------------------------


def same_outputs(first: Recorder, second: Recorder, a: Sequence[Any], b: Sequence[Any]) -> None:
    """EngineError unless two runs return the same: tensors of the same place, and the same plain values."""
    for x, y in zip(a, b, strict=True):
        if isinstance(x, VoxelsOut) and isinstance(y, VoxelsOut):
            alike = (x.level, x.stride) == (y.level, y.stride)
        elif isinstance(x, TensorOut) and isinstance(y, TensorOut):
            alike = x.level == y.level
        else:
            alike = type(x) is type(y) and (x == y or x != x)
        pairs = zip(places(x), places(y), strict=False)
        if not alike or not all(_same_tensor(first, second, p, q) for p, q in pairs):
            said = "" if places(x) else f": {x!r}, which depends on the number of rows"
            raise EngineError(f"the network returns something else for another frame{said}")


def _same_tensor(first: Recorder, second: Recorder, a: Any, b: Any) -> bool:
    if not (isinstance(a, Const) and isinstance(b, Const)):
        return bool(a == b)
    x, y = first.consts[a.number], second.consts[b.number]
    return x is y or (x.shape == y.shape and x.dtype == y.dtype and torch.equal(x, y))


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
        if not _same_tensor(first, second, a, b):
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
