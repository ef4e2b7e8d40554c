"""`compile` makes an engine of a network, which runs it frame after frame."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from voxmma import _surroundings
from voxmma._types import positive
from voxmma.dispatch.observers import unobserved
from voxmma.engine import ops
from voxmma.engine.compiled import Engine
from voxmma.engine.errors import EngineError
from voxmma.engine.inputs import MOST_ROWS, Input, Points, Rows, as_inputs, described, is_input, put
from voxmma.engine.optimise import optimise
from voxmma.engine.program import Program, Ref
from voxmma.engine.record import Recorder, join, same_outputs
from voxmma.engine.sets import NetworkSet
from voxmma.engine.survey import Survey, wanted_bounds
from voxmma.sparse.packing import Bounds
from voxmma.sparse.tensor import Voxels

_SLACK = 1.1
"""of the room in a kernel map's plan, which does not follow from the number of rows alone"""


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
        example: its inputs: Voxels, or a tuple of inputs. Tensors have these sizes later, too. For `Points`
            the network gets the voxels that the engine makes of them.
        capacity: voxels (or points) that a frame may have. Default: a quarter more than the largest example.
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
    inputs = as_inputs(example)
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=is_input)
    given = described(leaves)
    device = next(leaf.device for leaf in leaves if is_input(leaf))
    examples = [leaves]
    for place, frame in enumerate(frames):
        more, its_spec = pytree.tree_flatten(as_inputs(frame), is_leaf=is_input)
        if its_spec != spec:
            raise TypeError(f"frames[{place}] is built as {its_spec}, the example as {spec}")
        examples.append(more)
        described(more)
    if not isinstance(levels, Mapping | None):
        raise TypeError(f"levels must be a mapping of numbers to rows, got {type(levels).__name__}")
    for leaf in (leaf for leaves in examples for leaf in leaves):
        if leaf.device != device:
            raise ValueError(f"the example is on {device} and {leaf.device}")
    batch = max(leaf.batch_size for one in examples for leaf in one if is_input(leaf))
    given = [replace(one, batch_size=batch) if one.sparse else one for one in given]
    with torch.inference_mode(False), torch.no_grad(), unobserved():
        survey = Survey.of(model, examples, spec)
        first = survey.capacity(capacity)
        wanted = [
            wanted_bounds(bounds, box, batch, one.spatial_shape)
            for box, one in zip(survey.boxes, (one for one in given if one.sparse), strict=True)
        ]
        capacities = survey.capacities(first, wanted)
        taken = _sizes(model, examples)
        runs = []
        for shift, half in ((0, False), (7, True)):
            recorder = Recorder(capacities, taken, shift)
            runs.append(
                (recorder, _record(recorder, model, leaves, spec, given, wanted, first, half, check_finite))
            )
        (recorder, program), (second, other) = runs
        rooms = _rooms(recorder)
        program.steps, program.consts = join(recorder, second)
        if program.spec != other.spec:
            raise EngineError("the network returns something else for another frame")
        same_outputs(recorder, second, program.outputs, other.outputs)
        with _surroundings.undisturbed():
            program.consts = [tensor.detach().clone() for tensor in program.consts]
            optimise(program, recorder.facts, device)
    made = [capacities[level.path] for level in program.levels]
    for number, rows in (levels or {}).items():
        if not 0 <= number < len(made):
            raise ValueError(f"levels has {number}, the network's levels are 0 to {len(made) - 1}")
        made[number] = positive(rows, f"levels[{number}]")
        if made[number] > MOST_ROWS:
            raise ValueError(f"levels[{number}] is {made[number]:,}, at most {MOST_ROWS:,} are possible")
        need = survey.needs[program.levels[number].path]
        if made[number] < need:
            raise ValueError(f"levels[{number}] is {made[number]:,}, an example needs {need:,} rows there")
    engine = Engine(
        program, given, spec, made, rooms, device, True,
        [survey.needs[level.path] for level in program.levels],
    )  # fmt: skip
    for one in examples:  # grows where another than the first takes more room in a plan
        engine(*pytree.tree_unflatten(one, spec)).check()
    engine.grow = grow
    engine.frames = 0
    return engine


def _rooms(recorder: Recorder) -> list[float]:
    """What the plans of a run took, and a little more."""
    if not recorder.found or not recorder.found[0].is_cuda:
        return [1.0] * len(recorder.plans)
    rows = {made.level: int(made.count) for made in recorder.sets}
    needs = torch.cat(recorder.found).tolist()
    return [
        _SLACK
        * ops.plan_room(plan.geometry, plan.reverse, rows[plan.source], rows[plan.target], passes, units)
        for plan, (units, passes, *_) in zip(recorder.plans, needs, strict=True)
    ]


def _sizes(model: Any, examples: Sequence[Sequence[Any]]) -> set[int]:
    """Sizes that tensors have already."""
    found = {size for one in examples for leaf in one if isinstance(leaf, Tensor) for size in leaf.shape}
    found |= {leaf.feats.shape[1] for one in examples for leaf in one if is_input(leaf)}
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
    flat, form = pytree.tree_flatten(out, is_leaf=is_input)
    outputs = [recorder.output(leaf) for leaf in flat]
    return Program(
        recorder.levels, recorder.plans, inputs, recorder.steps, recorder.consts, recorder.reports,
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
        where, batch = (leaf.points, leaf.batch_index) if isinstance(leaf, Points) else (leaf.coords, None)
        rows = Rows(where.detach(), leaf.feats.detach(), one.batch_size, batch=batch)
        if half:
            rows = rows._replace(where=where.flip(0)[::2], feats=rows.feats.flip(0)[::2])
            rows = rows._replace(batch=None if batch is None else batch.flip(0)[::2])
        box = bounds[one.root]
        level = recorder.level((one.root,), -1, box, capacity)
        buffers = one.buffers(recorder.levels[level].marker, where.device)
        put(buffers, one.sources(rows))
        inputs += [recorder.input(t) for t in buffers]
        coords, feats, count, *samples = buffers
        with recorder:
            if check_finite:
                recorder.report("finite", one.root, torch.ops.voxmma.sized_finite(feats, count))
            if one.grid is not None:
                level = recorder.cells(level, one.root, box)
                coords, feats, count, status = torch.ops.voxmma.sized_voxels(
                    coords,
                    samples[0] if samples else None,
                    feats,
                    count,
                    coords.new_tensor([box[:4], box[4:]], dtype=torch.int32),
                    list(one.grid.edge),
                    list(one.grid.origin),
                    one.grid.reduce,
                    recorder.levels[level].marker,
                )
                recorder.report("voxels", level, status)
            *index, status = torch.ops.voxmma.sized_index(coords, count, list(box))
            recorder.report("index", level, status)
        made = NetworkSet.make(
            recorder, level, (coords, count, *index), one.batch_size, box, one.spatial_shape
        )
        filled.append(Voxels._make(made, feats, one.stride))
    return inputs, filled
