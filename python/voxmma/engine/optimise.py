"""What is worked out once: constants, packed weights, what nobody reads, and what is free when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from voxmma.engine.program import (
    Capacity,
    Const,
    Program,
    Ref,
    Report,
    Room,
    Step,
    TensorOut,
    VoxelsOut,
    has,
    held,
    leaves,
    put,
    reads,
)


def optimise(program: Program, dtypes: Mapping[int, torch.dtype]) -> None:
    """Computes what no input reaches, packs weights, drops what nobody reads, and says what is free when.

    dtypes: of the tensors by number.
    """
    _fold(program)
    for step in program.steps:
        _pack(program, step, dtypes)
    _prune(program)


def _fold(program: Program) -> None:
    """Computes what no input reaches."""
    written = {n for step in program.steps if step.func._schema.is_mutable for n in reads(step, Ref)}
    # A write into a view reaches what it is a view of: everything that shares memory with it stays.
    aliases = _Aliases()
    for step in program.steps:
        if any(a.alias_info is not None for a in step.func._schema.arguments):
            aliases.join([*reads(step, Ref), *(n for n in step.out if n is not None)])
    kept = {aliases.find(n) for n in written}
    fixed: dict[int, Const] = {}
    steps = []
    with torch.no_grad():
        for step in program.steps:
            step.args, step.kwargs = put(step.args, fixed), put(step.kwargs, fixed)
            outs = [n for n in step.out if n is not None]
            if (
                has(step, (Ref, Capacity, Room))
                or step.func._schema.is_mutable
                or any(aliases.find(n) in kept for n in outs)
            ):
                steps.append(step)
                continue
            made = step.func(*held(step.args, program.consts), **held(step.kwargs, program.consts))
            for number, tensor in zip(step.out, leaves(made), strict=True):
                if number is not None:
                    fixed[number] = Const(len(program.consts))
                    program.consts.append(tensor)
    program.steps = steps
    _replace_outputs(program, fixed)


def _pack(program: Program, step: Step, dtypes: Mapping[int, torch.dtype]) -> None:
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
    bias, *channels = held(list(numbers.values()), program.consts)
    how = [given[name] for name in ("symmetric", "transpose", "accumulator", "tile")]
    packed = ops.pack_weight(
        program.consts[weight.number], bias, *how, dtypes[x.number], eps=given.get("eps", 0.0),
        **dict(zip(list(numbers)[1:], channels, strict=True)),
    )  # fmt: skip
    program.consts.append(packed)
    rest = ("scale", "shift", "mean", "var", "eps", "residual", "activation", "slope")
    step.func = ops.conv_fused.default
    step.args = [
        *(given[name] for name in ("x", "weight", "bias", "map", "n_out")), *how, given.get("out_dtype")
    ]  # fmt: skip
    step.kwargs = {name: given[name] for name in rest if name in given}
    step.kwargs["packed"] = Const(len(program.consts) - 1)


def _prune(program: Program) -> None:
    """Drops what nobody reads, and says what is free after each step."""
    steps = program.steps
    needed = {place.number for place in program.places() if isinstance(place, Ref)}
    live = []
    for step in reversed(steps):
        outs = [n for n in step.out if n is not None]
        if step.func._schema.is_mutable or needed.intersection(outs):
            needed.update(reads(step, Ref))
            live.append(step)
    program.steps = live[::-1]
    last = {place.number for place in program.places() if isinstance(place, Ref)}
    for step in reversed(program.steps):
        seen = {*reads(step, Ref), *(n for n in step.out if n is not None)}
        step.frees = tuple(sorted(seen - last))
        last |= seen
    used: dict[int, int] = {}
    for step in program.steps:
        for number in reads(step, Const):
            used.setdefault(number, len(used))
    for place in program.places():
        if isinstance(place, Const):
            used.setdefault(place.number, len(used))
    moved = {old: Const(new) for old, new in used.items()}
    for step in program.steps:
        step.args, step.kwargs = put(step.args, moved, Const), put(step.kwargs, moved, Const)
    _replace_outputs(program, moved, Const)
    program.consts = [program.consts[old] for old in used]


def _replace_outputs(program: Program, table: dict[int, Any], kind: type = Ref) -> None:
    def moved(value: Any) -> Any:
        return put(value, table, kind)

    program.counts = moved(program.counts)
    program.reports = [Report(r.kind, r.number, moved(r.status)) for r in program.reports]
    outputs: list[Any] = []
    for out in program.outputs:
        if isinstance(out, VoxelsOut):
            out = VoxelsOut(out.level, moved(out.feats), moved(out.coords), out.stride, out.record)
        elif isinstance(out, TensorOut):
            out = TensorOut(out.level, moved(out.value))
        outputs.append(out)
    program.outputs = outputs


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
