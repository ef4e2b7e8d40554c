"""Programs: the steps of a network for any number of rows, and how they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from voxmma._types import Triple
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.packing import Bounds

Path = tuple[Any, ...]
"""identity of a level: number of its input, `CELLS` if that is of points, the Derived of each layer"""
CELLS = "cells"


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
        if self.path[-1] == CELLS:
            return f"cells that hold points of level {self.parent}"
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
    """Where a status comes from: of what, of which level or map. See result.py."""

    kind: str
    number: int
    status: Any
    line: int = 0
    """of a status of several"""


@dataclass(eq=False)
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


class Facts(NamedTuple):
    """Of a tensor whatever the frame: dtype, dimensions, size of the last one."""

    dtype: torch.dtype
    dims: int
    width: int


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
    reports: list[Report]
    outputs: list[Any]
    spec: Any
    """pytree of the outputs"""
    widths: dict[int, int] = field(default_factory=dict)
    """columns of an input's buffer, by its number, where it has more than the input"""

    def start(self, inputs: Sequence[Tensor]) -> dict[int, Tensor]:
        """What `run` begins with: coordinates, features and (1,) counts, or tensors, by number."""
        return {ref.number: tensor for ref, tensor in zip(self.inputs, inputs, strict=True)}

    def parts(self) -> list[list[Step]]:
        """The steps until all reports are made, and those behind, if these do anything."""
        told = {r.status.number for r in self.reports if isinstance(r.status, Ref)}
        cut = max((at for at, step in enumerate(self.steps) if told.intersection(made(step))), default=-1) + 1
        behind = any(map(_computes, self.steps[cut:]))
        return [self.steps[:cut], self.steps[cut:]] if cut and behind else [self.steps]

    def run(
        self,
        steps: Sequence[Step],
        env: dict[int, Tensor],
        capacities: Sequence[int],
        rooms: Sequence[float],
        meter: Any = None,
    ) -> None:
        """Runs some of the steps on the tensors that there are; what `places` names stays among them.

        meter: a memory.Meter.
        """

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

        for step in steps:
            if meter is not None:
                meter.before()
            out = step.func(*fill(step.args), **{name: fill(value) for name, value in step.kwargs.items()})
            for number, tensor in zip(step.out, leaves(out), strict=True):
                if number is not None:
                    env[number] = tensor
            del out
            if meter is not None:
                meter.after(made(step), env)
            for number in step.frees:
                del env[number]

    def value(self, env: dict[int, Tensor], place: Any) -> Tensor:
        """The tensor that a Ref or Const among outputs, counts and reports stands for."""
        return env[place.number] if isinstance(place, Ref) else self.consts[place.number]

    def places(self) -> list[Any]:
        """What the outside reads."""
        return [r.status for r in self.reports] + [place for out in self.outputs for place in places(out)]


def places(out: Any) -> list[Any]:
    """Of a part of the result, the tensors."""
    if isinstance(out, VoxelsOut):
        return [out.coords, out.feats]
    return [out.value] if isinstance(out, TensorOut) else []


def leaves(value: Any) -> list[Any]:
    """The results of an operator, flat; None where there is no tensor."""
    if isinstance(value, list | tuple):
        return [leaf for part in value for leaf in leaves(part)]
    return [value if isinstance(value, Tensor) else None]


def each(value: Any, kinds: type | tuple[type, ...]) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [found for part in value for found in each(part, kinds)]
    return [value] if isinstance(value, kinds) else []


def reads(step: Step, kind: type) -> list[int]:
    return [place.number for place in (*each(step.args, kind), *each(step.kwargs, kind))]


def made(step: Step) -> list[int]:
    """Numbers of the tensors that a step makes."""
    return [number for number in step.out if number is not None]


def _computes(step: Step) -> bool:
    """Whether a step does more than to name memory."""
    schema = step.func._schema
    views = any(value.alias_info is not None for value in schema.returns)
    return schema.is_mutable or not (views or schema.name == "aten::empty")


def has(step: Step, kinds: tuple[type, ...]) -> bool:
    return bool(each(step.args, kinds) or each(step.kwargs, kinds))


def put(value: Any, table: dict[int, Any], kind: type = Ref) -> Any:
    """`value` with the Refs (or Consts) of the table replaced."""
    if isinstance(value, dict):
        return {name: put(part, table, kind) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(put(part, table, kind) for part in value)
    return table.get(value.number, value) if isinstance(value, kind) else value  # type: ignore[attr-defined]


def held(value: Any, consts: list[Tensor]) -> Any:
    return put(value, dict(enumerate(consts)), Const)
