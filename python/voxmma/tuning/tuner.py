"""`voxmma tune` and `voxmma.tune()`: measures the tiles that may run a call; the selector takes the best.

    voxmma.tune(model, x)                    # every sparse convolution that model(x) runs
    voxmma.tune([Case(...), ...])

Measured are tiles of the compiled table that are legal for the call's operation, dtype and accumulator
(never another accumulator), that no validation record speaks against, and whose result here is within its
worst-case bound of fp64; how many, says settings.get_algo_mode (`candidates`). They take turns, in the
median of several rounds. The measurements are kept (voxmma.dispatch.measurements); explain() and audit() say
'tuned' where one decided.

Nothing here runs unless it is called. In a job with a process group every rank calls tune() with the same
model; the work is divided, and all ranks leave with the same measurements.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from voxmma._timing import Clock, input_sets
from voxmma._types import DTYPE_NAMES
from voxmma.dispatch import measurements, settings, store, validation
from voxmma.dispatch.calls import convolve
from voxmma.dispatch.config import ConvConfig
from voxmma.dispatch.measurements import Body, Key
from voxmma.dispatch.record import Record
from voxmma.dispatch.selection import card, select_tile
from voxmma.nn.modules.sparse_conv import sparse_layers
from voxmma.ops import formats
from voxmma.ops.kernels import accumulator_label, legal, parse_accumulator
from voxmma.sparse.maps import KernelMap
from voxmma.tuning import gate, machine
from voxmma.verify import accuracy
from voxmma.verify.plan import _observe

OPS = settings.OPS
#: A tile that takes so many times the fastest's time after a first look is not measured further.
HOPELESS = 2.0
#: How many tiles are measured under `trimmed`, the heuristic's among them.
TRIMMED = 4
_FIRST_LOOK = 3


@dataclass(frozen=True)
class Case:
    """A convolution to tune: where it runs, and what runs there."""

    mapping: KernelMap
    c_in: int
    c_out: int
    dtype: torch.dtype = torch.float16
    """compute dtype: fp16, bf16 or fp32"""
    accumulator: str = "fp32"
    """as `accumulator=` of a layer takes it"""
    groups: int = 1
    precision: str = "ieee"
    """of fp32 inputs: 'ieee' or 'tf32'"""
    layer: str = ""

    def key(self, op: str) -> Key:
        """What the selector will look up for `op`."""
        narrow = self.accumulator.startswith("fp16") and op != "wgrad"
        operands = "fp16" if narrow else DTYPE_NAMES[self.dtype]
        accumulator = accumulator_label(*parse_accumulator(self.accumulator)) if op != "wgrad" else "fp32"
        precision = self.precision if self.dtype == torch.float32 else "ieee"
        return Key(
            op,
            operands,
            accumulator,
            self.c_in,
            self.c_out,
            self.groups,
            self.mapping.kernel_volume,
            precision,
        )


@dataclass
class Result:
    """What was found for one operation."""

    key: Key
    layers: list[str]
    default: str
    """the heuristic's tile"""
    winner: str
    """the tile that the selector takes from now on"""
    ms: dict[str, float] = field(default_factory=dict)
    """by tile; those that were dropped after a first look included"""
    refused: dict[str, str] = field(default_factory=dict)
    """tiles that were not measured, and why"""

    @property
    def gain(self) -> float | None:
        """Time of the heuristic's tile over the winner's."""
        if self.default not in self.ms or self.winner not in self.ms:
            return None
        return self.ms[self.default] / self.ms[self.winner]


@dataclass
class Report:
    """What `tune` did. `written` is where the measurements were put, `problem` why they could not be."""

    device: str
    results: list[Result]
    written: str = ""
    problem: str = ""
    skipped: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        made = asdict(self)
        for row, result in zip(made["results"], self.results, strict=True):
            row["key"], row["gain"] = result.key._asdict(), result.gain
        return made

    def __str__(self) -> str:
        lines = [
            f"{r.key.op} {r.key.c_in}x{r.key.c_out} K={r.key.volume} {r.key.dtype}: {r.winner}"
            + (f", {r.gain:.2f}x {r.default}" if r.gain and r.winner != r.default else "")
            for r in self.results
        ]
        return "\n".join([*lines, *self.skipped, self.problem or self.written]).strip()


# ---- what to tune ------------------------------------------------------------------------------------------


def cases_of(model: nn.Module, inputs: Sequence[Any]) -> list[Case]:
    """The sparse convolutions that `model(*inputs)` runs, in evaluation mode; the model is left as it was.

    Raises ValueError when it has no sparse convolution layer or runs none.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("model has no sparse convolution layer")
    training = {module: module.training for module in model.modules()}
    try:
        model.eval()  # statistics of norms are not to move
        calls = _observe(model, layers, tuple(inputs))
    finally:
        for module, mode in training.items():
            module.training = mode
    made = [
        _case(name, call.weight, call.mapping, call.record) for name, found in calls.items() for call in found
    ]
    if not made:
        raise ValueError("model ran no sparse convolution layer with these inputs")
    return made


def _case(name: str, weight: Tensor, mapping: KernelMap, record: Record) -> Case:
    groups = weight.shape[1] if weight.dim() == 4 else 1
    return Case(
        mapping=mapping,
        c_in=weight.shape[-2] * groups,
        c_out=weight.shape[-1] * groups,
        dtype=record.compute_dtype,
        accumulator=accumulator_label(record.accumulator, record.chunk),
        groups=groups,
        precision="tf32" if record.tile.endswith("_tf32") else "ieee",
        layer=name,
    )


def candidates(case: Case, op: str) -> tuple[list[str], dict[str, str]]:
    """Tiles to measure, and by name those that are on record as wrong, with the reason.

    Under `all` every legal tile. Plain FMAs on 16-bit operands are many times slower than any matrix unit:
    otherwise they are measured only where the heuristic takes them. Under `trimmed` the TRIMMED tiles that
    the heuristic ranks first.
    """
    key, device = case.key(op), case.mapping.device
    if device.type != "cuda":
        return [_heuristic(case, op)], {}
    (word, *_), default = settings.get_algo_mode(op), _heuristic(case, op)
    names, refused = [], {}
    for tile in legal(op, formats.DTYPES[key.dtype], key.accumulator, card(device), key.precision):
        if word != "all" and tile.atom == "SIMT" and key.dtype != "fp32" and tile.name != default:
            continue
        if tile.accum.startswith("fp16"):
            verdict = validation.on_record(tile.name, device)
            if not verdict.runs_on_request:
                refused[tile.name] = f"validation: {verdict.reason}"
                continue
        names.append(tile.name)
    return _ranked(case, op, names)[:TRIMMED] if word == "trimmed" else names, refused


def _ranked(case: Case, op: str, names: Sequence[str]) -> list[str]:
    """`names` in the order in which the heuristic would take them."""
    rest, ranked = list(names), []
    while rest:
        ranked.append(_heuristic(case, op, tuple(rest)))
        rest.remove(ranked[-1])
    return ranked


def _heuristic(case: Case, op: str, mode: settings.AlgoMode = ("auto",)) -> str:
    """The tile that is chosen without measurements, of those that `mode` names."""
    key = case.key(op)
    return select_tile(
        op, formats.DTYPES[key.dtype], key.accumulator, key.c_in, key.c_out, key.groups, case.mapping.device,
        mode, fp32_precision=key.precision,
    ).name  # fmt: skip


# ---- measuring ---------------------------------------------------------------------------------------------


class Bench:
    """Operands of a case, and its operations with any tile."""

    def __init__(self, case: Case) -> None:
        mapping, device = case.mapping, case.mapping.device
        n_in, n_out = mapping.in_coords.num, mapping.out_coords.num
        c_in, c_out, groups, volume = case.c_in, case.c_out, case.groups, mapping.kernel_volume
        generator = torch.Generator(device)
        generator.manual_seed(c_in * 1_009 + c_out)
        sets = input_sets(device, (n_in * c_in + n_out * c_out) * case.dtype.itemsize)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(case.dtype)

        split = (volume, c_in, c_out) if groups == 1 else (volume, groups, c_in // groups, c_out // groups)
        self.case = case
        size = mapping.kernel_size
        self.config = ConvConfig(size, groups=groups, accumulator=case.accumulator, layer="tune")
        self.w = (draw(*split) / math.sqrt(volume * c_in / groups)).to(case.dtype).requires_grad_()
        self.x = [draw(n_in, c_in).requires_grad_() for _ in range(sets)]
        self.dy = [draw(n_out, c_out) for _ in range(sets)]
        self._pairs: list[tuple[Tensor, Tensor]] | None = None

    def conv(self, i: int, op: str, tile: str) -> tuple[Tensor, Record]:
        """The forward pass of input set i, such that `op` runs with `tile` where it can."""
        case = self.case
        device = case.mapping.device
        forced: dict[str, Any] = {f"{op}_algo_mode": tile} if device.type == "cuda" else {}
        if case.dtype == torch.float32:
            forced["fp32_precision"] = case.precision
        with settings.override(**forced):
            x = self.x[i % len(self.x)]
            return convolve(self.config, x, self.w, None, case.mapping, case.dtype)

    def runner(self, op: str, tile: str) -> tuple[Callable[[int], object], Tensor, Record]:
        """What to time, its result for input set 0, and the record of what ran."""
        if op == "fwd":

            def forward(i: int) -> Tensor:
                with torch.no_grad():
                    return self.conv(i, op, tile)[0]

            with torch.no_grad():
                y, record = self.conv(0, op, tile)
            return forward, y, record
        graphs = [self.conv(i, op, tile) for i in range(len(self.x))]

        def gradient(i: int) -> Tensor:
            number = i % len(graphs)
            wanted = self.x[number] if op == "dgrad" else self.w
            (made,) = torch.autograd.grad(graphs[number][0], wanted, self.dy[number], retain_graph=True)
            return made

        return gradient, gradient(0), graphs[0][1]

    def reference(self, op: str) -> tuple[Tensor, Tensor]:
        """fp64 result of input set 0 and its sums of absolute terms."""
        case = self.case
        if self._pairs is None:
            self._pairs = case.mapping.pairs()
        rounded = [self.x[0].detach(), self.w.detach(), self.dy[0]]
        if case.precision == "tf32" and case.dtype == torch.float32:
            rounded = [formats.round_tf32(t) for t in rounded]
        x, w, dy = rounded
        if op == "fwd":
            return accuracy.reference_conv(x, w, self._pairs, case.mapping.out_coords.num)
        if op == "dgrad":
            return accuracy.reference_dgrad(dy, w, self._pairs, case.mapping.in_coords.num)
        return accuracy.reference_wgrad(x, dy, self._pairs, case.groups)

    def limit(self, op: str, tile: str) -> accuracy.Bound:
        """The worst case of `op` with this tile, every offset active."""
        case, key = self.case, self.case.key(op)
        name, chunk = parse_accumulator(key.accumulator)
        if op == "wgrad":
            n, offsets = max((len(rows) for rows, _ in self._pairs or []), default=1), 1
        else:
            n = key.volume * (case.c_in if op == "fwd" else case.c_out) // case.groups
            offsets = key.volume
        out = torch.float32 if op == "wgrad" and case.dtype == torch.float32 else case.dtype
        return accuracy.bound(
            name,
            max(1, n),
            "tf32" if tile.endswith("_tf32") else key.dtype,
            out,
            "simt" if tile.startswith("simt") else accuracy.arch_of(case.mapping.device),
            offsets=offsets,
            chunk=chunk,
        )


def _tile_of(record: Record, op: str) -> str:
    return {"fwd": record.tile, "dgrad": record.dgrad_tile, "wgrad": record.wgrad_tile}[op]


def _proved(
    found: Bench, op: str, names: Sequence[str], refused: dict[str, str]
) -> dict[str, Callable[[int], object]]:
    """What to time by tile, of those that ran and were right; the others go to `refused`."""
    reference = found.reference(op)
    runs = {}
    for name in names:
        try:
            run, result, record = found.runner(op, name)
        except RuntimeError as error:
            refused[name] = str(error).splitlines()[0][:200]
            continue
        if _tile_of(record, op) != name:
            refused[name] = f"{_tile_of(record, op)} ran instead"
            continue
        limit = found.limit(op, name)
        errors = accuracy.errors(result.detach(), *reference, limit.floor)
        if record.rescaled:  # whose own floor depends on the operands
            good = errors.nonfinite == 0 and errors.rel_l2 < gate.BUDGET
        else:
            good = errors.within(limit)
        if good:
            runs[name] = run
        else:
            refused[name] = f"wrong: max eta {errors.max_eta:.1e} of {limit.eta:.1e}"
    return runs


def measure(case: Case, op: str, repeats: int, found: Bench | None = None) -> tuple[Result, Body | None]:
    """Measures the candidates of one operation. No measurement comes back where there is nothing to choose.

    Those that a first look finds HOPELESS are not timed further, but under `all`.

    Args:
        found: the operands of `case`, for several operations of it.
    """
    names, refused = candidates(case, op)
    default = _heuristic(case, op)
    result = Result(case.key(op), [case.layer] if case.layer else [], default, default, {}, refused)
    device = case.mapping.device
    if case.mapping.num_pairs == 0:
        return result, None
    found = found or Bench(case)
    runs = _proved(found, op, names, refused)
    clock = Clock(device, repeats)
    if runs:
        look = clock.race(runs, repeats=_FIRST_LOOK)
        least = min(timing.median for timing in look.values())
        result.ms = {name: timing.ms for name, timing in look.items()}
        slowest = math.inf if settings.get_algo_mode(op)[0] == "all" else HOPELESS * least
        close = {name: run for name, run in runs.items() if look[name].median <= slowest}
        result.ms |= {name: timing.ms for name, timing in clock.race(close).items()}
    owner = store.owner_of(device)
    if owner is None or not result.ms:
        return result, None
    measured = measurements.body(
        owner,
        result.key,
        result.ms,
        default=default,
        refused=refused,
        rows=[case.mapping.in_coords.num, case.mapping.out_coords.num, case.mapping.num_pairs],
        repeats=repeats,
        by=f"{platform.node()}:{os.getpid()}",
        at=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    )
    return result, measured


# ---- the whole of it ---------------------------------------------------------------------------------------


def _ranks() -> tuple[int, int]:
    """(this rank, ranks); (0, 1) without a process group."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    return dist.get_rank(), dist.get_world_size()


def _agreed(value: Any, failure: Exception | None) -> list[Any]:
    """What every rank gives, by rank. Where one failed all raise: its own error, or RuntimeError."""
    import torch.distributed as dist

    made: list[Any] = [None] * dist.get_world_size()
    problem = "" if failure is None else f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(made, (value, problem))
    if failure is not None:
        raise failure
    failed = [f"rank {number}: {said}" for number, (_, said) in enumerate(made) if said]
    if failed:
        raise RuntimeError(f"tuning failed on {'; '.join(failed)}")
    return [given for given, _ in made]


def _device(given: Sequence[Case]) -> torch.device:
    """The device of all cases."""
    if not given:
        raise ValueError("no convolution to tune")
    devices = {case.mapping.device for case in given}
    if len(devices) > 1:
        raise ValueError(f"the cases are on several devices: {', '.join(sorted(map(str, devices)))}")
    return given[0].mapping.device


def tune(
    what: nn.Module | Iterable[Case],
    *inputs: Any,
    ops: Sequence[str] = OPS,
    repeats: int | None = None,
    save: bool = True,
    advance: Callable[[str], None] = lambda text: None,
) -> Report:
    """Measures the tiles of every distinct convolution and keeps the measurements for the selector.

    Takes effect at once in this process (calls that torch.compile has traced keep their tiles), and in
    processes that start later. Waits for the device; not for a training step.

    Args:
        what: a model, which is run once on `inputs` in evaluation mode without gradients (call this under
            autocast where the model runs so), or cases.
        ops: of 'fwd', 'dgrad', 'wgrad'.
        repeats: rounds that count, default 15 on a GPU, 3 on a CPU.
        save: write to the cache; False keeps the measurements for this process.
        advance: called with a text before each operation.

    With a process group all ranks have to call it, with the same convolutions: each measures a share of them,
    and all of them use all measurements.

    Returns:
        A Report. A full disk or a folder that cannot be written is a warning and its `problem`; then the
        measurements last for this process.

    Raises:
        ValueError: an unknown op, no convolution to tune, cases on several devices.
        RuntimeError: another rank failed.
    """
    unknown = [op for op in ops if op not in OPS]
    if unknown:
        raise ValueError(f"ops: {unknown[0]!r} is none of {', '.join(OPS)}")
    rank, ranks = _ranks()
    work: list[tuple[Key, list[Case]]] = []
    skipped: list[str] = []
    device = torch.device("cpu")
    failure: Exception | None = None
    try:
        given = cases_of(what, inputs) if isinstance(what, nn.Module) else list(what)
        device = _device(given)
        work, skipped = _distinct(given, ops)
    except Exception as error:  # raised below, when the other ranks know
        failure = error
    if ranks > 1:
        theirs = _agreed([key for key, _ in work], failure)
        owners = _divided(theirs)
        work = [(key, cases) for key, cases in work if owners[key] == rank]
    elif failure is not None:
        raise failure
    results, bodies, failure = _measured(work, repeats or (15 if device.type == "cuda" else 3), advance)
    if ranks > 1:
        everything = _agreed((results, bodies), failure)
        results = [result for part in everything for result in part[0]]
        bodies = [one for part in everything for one in part[1]]
        measurements.share(device)
    elif failure is not None:
        raise failure
    measurements.adopt(device, bodies)
    if store.owner_of(device) is None:
        where = "a CPU has one tile for each call" if device.type == "cpu" else "the driver is unknown"
        skipped.append(f"nothing is kept: {where}")
    report = Report(machine.device_name(device), results, skipped=skipped)
    if save and bodies:
        problem = store.append(bodies) if rank == 0 else None
        report.written, report.problem = ("", problem) if problem else (str(store.path()), "")
        if problem:
            warnings.warn(f"{problem}; the measurements last for this process", stacklevel=2)
    for result in results:
        tiles = list(result.ms)
        won = measurements.table(device).choose(result.key, result.default, tiles)
        result.winner = won.tile if won else result.default
    return report


def _distinct(given: Sequence[Case], ops: Sequence[str]) -> tuple[list[tuple[Key, list[Case]]], list[str]]:
    """Cases by what the selector will look up, in the order given, and what cannot be tuned."""
    work: dict[Key, list[Case]] = {}
    skipped = []
    for case in given:
        if case.dtype == torch.float64:
            skipped.append(f"{case.layer or 'a case'}: fp64 has one tile")
            continue
        for op in ops:
            work.setdefault(case.key(op), []).append(case)
    return list(work.items()), list(dict.fromkeys(skipped))


def _divided(keys: Sequence[Sequence[Key]]) -> dict[Key, int]:
    """Which rank measures what: in turn, among those that have it."""
    having: dict[Key, list[int]] = {}
    for rank, found in enumerate(keys):
        for key in found:
            having.setdefault(key, []).append(rank)
    return {key: having[key][number % len(having[key])] for number, key in enumerate(sorted(having))}


def _measured(
    work: Sequence[tuple[Key, list[Case]]], rounds: int, advance: Callable[[str], None]
) -> tuple[list[Result], list[Body], Exception | None]:
    """Results and measurements; an error ends it and comes back, so that no other rank waits for this one."""
    results: list[Result] = []
    bodies: list[Body] = []
    kept: tuple[Case, Bench] | None = None
    try:
        for key, cases in work:
            case = max(cases, key=lambda case: case.mapping.num_pairs)  # the one that takes most time
            advance(f"{key.op} {key.c_in}x{key.c_out} K={key.volume} {key.dtype}")
            if kept is None or kept[0] is not case:
                kept = None
                kept = (case, Bench(case))
            result, measured = measure(case, key.op, rounds, kept[1])
            result.layers = list(dict.fromkeys(c.layer for c in cases if c.layer))
            results.append(result)
            bodies += [measured] if measured else []
    except Exception as error:
        return results, bodies, error
    return results, bodies, None
