"""What is worked out once: constants, packed weights, what nobody reads, and what is free when."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from voxmma.engine import ops
from voxmma.engine.program import (
    Capacity,
    Const,
    Facts,
    Program,
    Ref,
    Room,
    Step,
    TensorOut,
    VoxelsOut,
    has,
    held,
    leaves,
    made,
    put,
    reads,
)

_OPS = torch.ops.voxmma
_ALIGN = {"cuda": 16}  # bytes in which MMA kernels read rows


def optimise(program: Program, facts: Mapping[int, Facts], device: torch.device) -> None:
    """Computes what no input reaches, packs weights, drops what nobody reads, and makes maps together.

    facts: of the tensors by number.
    """
    _fold(program)
    _widen(program, facts, _ALIGN.get(device.type, 1))
    for step in program.steps:
        _pack(program, step, facts)
    _prune(program)
    _join_columns(program, facts, device)
    _arrange(program)
    _say_free(program)
    _number_consts(program)


def _fold(program: Program) -> None:
    """Computes what no input reaches."""
    aliases = _Aliases(program.steps)
    fixed: dict[int, Const] = {}
    steps = []
    with torch.no_grad():
        for step in program.steps:
            step.args, step.kwargs = put(step.args, fixed), put(step.kwargs, fixed)
            outs = made(step)
            if (
                has(step, (Ref, Capacity, Room))
                or step.func._schema.is_mutable
                or any(map(aliases.written, outs))
            ):
                steps.append(step)
                continue
            out = step.func(*held(step.args, program.consts), **held(step.kwargs, program.consts))
            for number, tensor in zip(step.out, leaves(out), strict=True):
                if number is not None:
                    fixed[number] = Const(len(program.consts))
                    program.consts.append(tensor)
    program.steps = steps
    _replace_outputs(program, fixed)


def _widen(program: Program, facts: Mapping[int, Facts], align: int) -> None:
    """Puts zero columns behind inputs that a convolution would otherwise copy and pad in every frame."""
    for given in program.inputs:
        fact = facts[given.number]
        more = -(fact.width * fact.dtype.itemsize) % align // fact.dtype.itemsize
        readers = [step for step in program.steps if given.number in reads(step, Ref)]
        convs = [step for step in readers if more and _pads(program, step, given, fact.width)]
        if not convs:
            continue
        narrow = Ref(_unused(program))
        for step in readers:
            if step not in convs:
                step.args, step.kwargs = (
                    put(value, {given.number: narrow}) for value in (step.args, step.kwargs)
                )
                step.out = tuple(narrow.number if n == given.number else n for n in step.out)
        for step in convs:
            weight = program.consts[step.named()["weight"].number]
            step.args = [*step.args]
            step.args[1] = Const(len(program.consts))
            program.consts.append(torch.nn.functional.pad(weight, (0, 0, 0, more)))
        program.steps.insert(
            0, Step(torch.ops.aten.slice.Tensor, [given, 1, 0, fact.width], {}, (narrow.number,))
        )
        program.widths[given.number] = fact.width + more


def _pads(program: Program, step: Step, x: Ref, width: int) -> bool:
    """Whether a convolution reads `x` by the MMA, and how many channels follows from its weight."""
    if step.func not in (_OPS.conv.default, _OPS.conv_fused.default):
        return False
    given = step.named()
    weight = given["weight"]
    return (
        given["x"] == x
        and reads(step, Ref).count(x.number) == 1
        and isinstance(weight, Const)
        and not given["transpose"]
        and not given["tile"].startswith("simt")
        and program.consts[weight.number].shape[1:-1] == (width,)
    )


def _pack(program: Program, step: Step, facts: Mapping[int, Facts]) -> None:
    """Makes a convolution whose weight is frozen one that takes it as its kernel reads it."""
    if step.func not in (_OPS.conv.default, _OPS.conv_fused.default):
        return
    given = step.named()
    x, weight = given["x"], given["weight"]
    numbers = {name: given.get(name) for name in ("bias", "scale", "shift", "mean", "var")}
    frozen = all(isinstance(value, Const) for value in (weight, *numbers.values()) if value is not None)
    if not frozen or not isinstance(x, Ref) or given.get("packed") is not None:
        return
    bias, *channels = held(list(numbers.values()), program.consts)
    how = [given[name] for name in ("symmetric", "transpose", "accumulator", "tile")]
    packed = _OPS.pack_weight(
        program.consts[weight.number], bias, *how, facts[x.number].dtype, eps=given.get("eps", 0.0),
        **dict(zip(list(numbers)[1:], channels, strict=True)),
    )  # fmt: skip
    program.consts.append(packed)
    rest = ("scale", "shift", "mean", "var", "eps", "residual", "activation", "slope")
    step.func = _OPS.conv_fused.default
    step.args = [
        *(given[name] for name in ("x", "weight", "bias", "map", "n_out")), *how, given.get("out_dtype")
    ]  # fmt: skip
    step.kwargs = {name: given[name] for name in rest if name in given}
    step.kwargs["packed"] = Const(len(program.consts) - 1)


def _join_columns(program: Program, facts: Mapping[int, Facts], device: torch.device) -> None:
    """Has convolutions that only a concatenation of columns reads write into its result."""
    uses = Counter(n for step in program.steps for n in reads(step, Ref))
    uses.update(place.number for place in program.places() if isinstance(place, Ref))
    makers = {n: step for step in program.steps for n in made(step)}
    for cat in [step for step in program.steps if step.func is torch.ops.aten.cat.default]:
        parts = [part.number for part in cat.args[0] if isinstance(part, Ref) and part.number in facts]
        known = [facts[number] for number in parts]
        convs = [
            makers[number]
            for number in parts
            if uses[number] == 1 and number in makers and makers[number].func is _OPS.conv_fused.default
        ]
        if (
            convs
            and len(parts) == len(cat.args[0])
            and cat.named().get("dim", 0) in (1, -1)
            and all(fact == (known[0].dtype, 2, fact.width) for fact in known)
        ):
            _write_columns(program, cat, parts, known, convs, device)


def _write_columns(
    program: Program,
    cat: Step,
    parts: Sequence[int],
    known: Sequence[Facts],
    convs: Sequence[Step],
    device: torch.device,
) -> None:
    aten = torch.ops.aten
    whole, free = Ref(made(cat)[0]), _unused(program)
    size = [convs[0].named()["n_out"], sum(fact.width for fact in known)]
    how = {"dtype": known[0].dtype, "device": device, "pin_memory": False}
    before = [Step(aten.empty.memory_format, [size], how, (whole.number,))]
    after, begin = [], 0
    for columns, part, fact in zip(map(Ref, itertools.count(free)), parts, known, strict=False):
        end = begin + fact.width
        before.append(Step(aten.slice.Tensor, [whole, 1, begin, end], {}, (columns.number,)))
        conv = next((step for step in convs if part in step.out), None)
        if conv is None:
            after.append(Step(aten.copy_.default, [columns, Ref(part)], {}, (columns.number,)))
        else:
            conv.func, conv.out = _OPS.conv_fused_into.default, (None,)
            conv.kwargs["out"] = columns
        begin = end
    at = program.steps.index(cat)
    program.steps[at : at + 1] = after
    first = min(program.steps.index(step) for step in convs)
    program.steps[first:first] = before


def _unused(program: Program) -> int:
    """A number that no tensor has, nor any larger one."""
    taken = [n for step in program.steps for n in (*made(step), *reads(step, Ref))]
    return 1 + max(*taken, *(place.number for place in program.places() if isinstance(place, Ref)), -1)


def _prune(program: Program) -> None:
    """Drops what nobody reads."""
    steps = program.steps
    needed = {place.number for place in program.places() if isinstance(place, Ref)}
    live = []
    for step in reversed(steps):
        outs = made(step)
        if step.func._schema.is_mutable or needed.intersection(outs):
            needed.update(reads(step, Ref))
            live.append(step)
    program.steps = live[::-1]


def _say_free(program: Program) -> None:
    """What nobody reads after each step."""
    last = {place.number for place in program.places() if isinstance(place, Ref)}
    for step in reversed(program.steps):
        seen = {*reads(step, Ref), *made(step)}
        step.frees = tuple(sorted(seen - last))
        last |= seen


def _number_consts(program: Program) -> None:
    """Drops the constants that nobody reads."""
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

    program.reports = [replace(r, status=moved(r.status)) for r in program.reports]
    outputs: list[Any] = []
    for out in program.outputs:
        if isinstance(out, VoxelsOut):
            out = VoxelsOut(out.level, moved(out.feats), moved(out.coords), out.stride, out.record)
        elif isinstance(out, TensorOut):
            out = TensorOut(out.level, moved(out.value))
        outputs.append(out)
    program.outputs = outputs


class _Aliases:
    """Tensors that may share memory. What is written into one reaches all."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self.parent: dict[int, int] = {}
        for step in steps:
            if any(a.alias_info is not None for a in step.func._schema.arguments):
                first, *others = [*reads(step, Ref), *made(step)] or [-1]
                for number in others:
                    self.parent[self.find(number)] = self.find(first)
        self._written = {
            self.find(n) for step in steps if step.func._schema.is_mutable for n in reads(step, Ref)
        }

    def find(self, number: int) -> int:
        while self.parent.get(number, number) != number:
            number = self.parent[number]
        return number

    def written(self, number: int) -> bool:
        return self.find(number) in self._written


# ---- sets and maps -----------------------------------------------------------------------------------------


def beside(program: Program) -> list[Step]:
    """The steps that make sets and maps out of the inputs and each other, in order."""
    aliases = _Aliases(program.steps)
    known = {ref.number for ref in program.inputs if not aliases.written(ref.number)}
    found = []
    for step in program.steps:
        if step.func._schema.name.startswith("voxmma::sized_") and known.issuperset(reads(step, Ref)):
            found.append(step)
            known.update(made(step))
    return found


def _arrange(program: Program) -> None:
    """Sets first, then maps, all of them by two operators, then the layers.

    The second makes those that the first layers read, which need no set but the inputs'.
    """
    first = beside(program)
    layers = [step for step in program.steps if step not in first]
    index = [s for s in first if s.func in (_OPS.sized_voxels.default, _OPS.sized_index.default)]
    maps = [step for step in first if step.func is _OPS.sized_maps.default]
    sets = [step for step in first if step not in index and step not in maps]
    given = {ref.number for ref in program.inputs}.union(*map(made, index))
    makers = {number: step for step in maps for number in made(step)}
    early: list[Step] = []
    for layer in layers:
        needed = dict.fromkeys(makers[number] for number in reads(layer, Ref) if number in makers)
        if not all(given.issuperset(reads(step, Ref)) for step in needed):
            break
        early += [step for step in needed if step not in early]
    late = [step for step in maps if step not in early]
    side = [*sets, *_together(program, late)]
    program.steps = [*index, *side, *_together(program, early), *layers]
    program.side = (len(index), len(index) + len(side))


def _together(program: Program, maps: list[Step]) -> list[Step]:
    """The operator that makes all of these maps, if there are any."""
    if not maps:
        return []
    places: dict[tuple[Any, ...], int] = {}
    args: list[list[Any]] = [[] for _ in range(5)]
    out: list[int | None] = []
    status = _unused(program)
    lines: dict[int, int] = {}
    for line, step in enumerate(maps):
        tensors, *others = step.args
        sets = [tuple(tensors[i : i + ops.SET]) for i in range(0, len(tensors), ops.SET)]
        for place, ends in zip(args[:2], others[:2], strict=True):
            place += [places.setdefault(sets[end], len(places)) for end in ends]
        for values, more in zip(args[2:], others[2:], strict=True):
            values += more
        out += step.out[:-1]
        lines[made(step)[-1]] = line
    program.reports = [
        replace(r, status=Ref(status), line=lines[r.status.number])
        if isinstance(r.status, Ref) and r.status.number in lines
        else r
        for r in program.reports
    ]
    parts = [part for one in places for part in one]
    return [Step(_OPS.sized_maps.default, [parts, *args], {}, (*out, status))]
