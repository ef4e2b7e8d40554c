"""`voxmma sweep`: the error of every precision mode against fp64, held to its worst-case bound.

Each row is one operation (forward, input gradient, weight gradient) in one mode, at one channel count, kernel
volume and input family. All cells are compared. Repeats must equal the first run bit by bit; one that does
not is compared with fp64 too, and the worst is kept. The fp64 result belongs to the operands: it is computed
once for a case and shared by all accumulators of an input format. `run` measures and returns plain data,
voxmma.sweep_show makes tables and plots of it, voxmma.sweep_cost says beforehand what it will take.

A row fails on a non-finite cell, a cell above its bound, repeats that differ, or an fp16 accumulator whose
error is no larger than that of fp32: then the fp16 path never ran.
"""

from __future__ import annotations

import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from voxmma import _C, accuracy, scenes, settings
from voxmma.accuracy import FAMILIES, Bound, Errors
from voxmma.explain import Record
from voxmma.kernel_map import KernelMap, kernel_map
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.overflow import rescaled_floor
from voxmma.tiles import CHUNKS, accumulator_label, parse_accumulator
from voxmma.voxels import Voxels

OPS = ("fprop", "dgrad", "wgrad")
KERNEL_SIZES = {1: 1, 8: 2, 27: 3, 125: 5}


@dataclass(frozen=True)
class Mode:
    """What is asked for: compute dtype and accumulator ('fp32', 'fp16', 'fp16_promoted:64', ..., 'fp64')."""

    dtype: torch.dtype
    accumulator: str
    tf32: bool = False
    """fp32 operands that the kernel rounds to TF32; the reference takes the nearest TF32 numbers."""

    @property
    def name(self) -> str:
        """Such as 'fp16 acc fp32'."""
        return f"{'tf32' if self.tf32 else accuracy.format_name(self.dtype)} acc {self.accumulator}"


MODES: dict[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(torch.float16, "fp32"),
        Mode(torch.float16, "fp16"),
        *(Mode(torch.float16, f"fp16_promoted:{chunk}") for chunk in CHUNKS),
        Mode(torch.bfloat16, "fp32"),
        Mode(torch.bfloat16, "fp16"),
        Mode(torch.float32, "fp32"),
        Mode(torch.float32, "fp32", tf32=True),
        Mode(torch.float64, "fp64"),
    )
}

# Relative difference between results of fp16 and fp32 accumulators by channels, 3x3x3, as WarpConvNet's
# documentation gives it ("Accumulator Precision", edited 2026-05-26). Its reference rounds the running sum to
# fp16 once per kernel offset.
PUBLISHED = {8: 1.4e-5, 32: 2.4e-4, 128: 5.3e-4, 256: 7.5e-4}


@dataclass(frozen=True)
class Case:
    """One row to be. `mode` is a key of MODES."""

    volume: int
    channels: int
    op: str
    family: str
    mode: str

    def __str__(self) -> str:
        return f"{self.op} {self.mode}, C={self.channels}, K={self.volume}, {self.family}"


@dataclass(frozen=True)
class Grid:
    """The cases of a sweep: every combination, volumes varying slowest, then channels."""

    ops: Sequence[str] = OPS
    modes: Sequence[str] = tuple(MODES)
    channels: Sequence[int] = (8, 16, 32, 64, 96, 128, 256)
    volumes: Sequence[int] = (27,)
    families: Sequence[str] = tuple(FAMILIES)

    def __post_init__(self) -> None:
        known: dict[str, Sequence[Any]] = {
            "ops": OPS,
            "modes": tuple(MODES),
            "volumes": tuple(KERNEL_SIZES),
            "families": tuple(FAMILIES),
        }
        for field, allowed in known.items():
            for value in getattr(self, field):
                if value not in allowed:
                    raise ValueError(f"{field}: {value!r} is none of {', '.join(map(str, allowed))}")
        if not all(c >= 1 for c in self.channels):
            raise ValueError(f"channels must be positive, got {list(self.channels)}")

    def cases(self) -> list[Case]:
        """In the order in which they are measured. Modes of one input format stand together."""
        modes = sorted(self.modes, key=list(MODES).index)
        axes = (self.volumes, self.channels, self.ops, self.families, modes)
        return [Case(*values) for values in product(*axes)]


@dataclass(frozen=True)
class Row:
    """One case. `n` is the largest number of products that a cell sums."""

    op: str
    mode: str
    family: str
    channels: int
    volume: int
    n: int
    accumulator: str
    """What ran."""
    tile: str
    max_eta: float
    p99_eta: float
    rel_l2: float
    max_rel: float
    nonfinite: int
    cells: int
    bound: float
    ratio: float
    """max_eta / bound"""
    formula: str
    verdict: str
    """'ok', 'not run: why', or what is wrong"""

    @property
    def failed(self) -> bool:
        """Whether the verdict is neither 'ok' nor 'not run'."""
        return self.verdict != "ok" and not self.verdict.startswith("not run")


# ---- what cases share ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A scene, the map of one kernel on it, and the lengths of its sums."""

    voxels: Voxels
    mapping: KernelMap
    pairs: list[tuple[Tensor, Tensor]]
    """of `mapping`, by offset"""
    inputs: int
    """most offsets that an output row sums over"""
    outputs: int
    """most offsets by which an input row is read: the length of an input gradient's sum"""
    longest: int
    """most pairs of one offset: the length of a weight gradient's sum"""

    def reduction(self, op: str, channels: int) -> tuple[int, int]:
        """(n, offsets) of the longest sum: active offsets x channels; for wgrad pairs of one offset."""
        if op == "wgrad":
            return self.longest, 1
        active = self.inputs if op == "fprop" else self.outputs
        return active * channels, max(1, active)


def site(x: Voxels, kernel_size: int) -> Site:
    """The site of a kernel on a scene. Waits for the device."""
    mapping = kernel_map(x.coord_set, kernel_size)
    pairs = mapping.pairs()

    def most(side: int) -> int:
        rows = torch.cat([pair[side] for pair in pairs])
        return int(torch.bincount(rows).max()) if len(rows) else 0

    return Site(x, mapping, pairs, most(1), most(0), max((len(rows) for rows, _ in pairs), default=0))


@dataclass(frozen=True)
class Operands:
    """Tensors of one case and its fp64 result. For TF32: fp32 operands, the result of rounded ones."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    y64: Tensor
    abs64: Tensor


def draw(
    op: str, family: str, dtype: torch.dtype, channels: int, where: Site, tf32: bool = False
) -> Operands:
    """Operands of a case on the site's device; the reduction of `op` sees what the family is about."""
    device = where.mapping.device
    volume, rows = where.mapping.kernel_volume, where.mapping.in_coords.num
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{op} {family} {channels} {volume}".encode()))
    drawn = FAMILIES[family]

    def read(t: Tensor) -> Tensor:
        return accuracy.quantise(t, "tf32") if tf32 else t

    first = drawn.activations((rows, channels), dtype, generator, device)
    weight = drawn.weights((volume, channels, channels), dtype, generator, device)
    zeros = torch.zeros_like(first)
    if op == "fprop":
        found = accuracy.reference_conv(read(first), read(weight), where.pairs, rows)
        return Operands(first, weight, zeros, *found)
    if op == "dgrad":
        weight = weight.transpose(-1, -2).contiguous()
        found = accuracy.reference_dgrad(read(first), read(weight), where.pairs, rows)
        return Operands(zeros, weight, first, *found)
    dy = drawn.gradients((rows, channels), dtype, generator, device)
    weight = torch.zeros(weight.shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return Operands(first, weight, dy, *accuracy.reference_wgrad(read(first), read(dy), where.pairs))


# ---- one case --------------------------------------------------------------------------------------------


def execute(op: str, mode: Mode, given: Operands, where: Site) -> Iterator[tuple[Tensor, Record]]:
    """The library's own result of a case and the record of what ran, computed anew each time it is asked for.

    A gradient's forward pass runs once.
    """
    feats = given.x.detach().requires_grad_(op == "dgrad")
    weight = given.weight.detach().requires_grad_(op == "wgrad")
    size = where.mapping.kernel_size
    accumulator = None if mode.accumulator == "fp64" else mode.accumulator

    def forward() -> tuple[Tensor, Record]:
        with settings.override(fp32_precision="tf32" if mode.tf32 else "ieee"):
            y = spatially_sparse_conv(
                where.voxels.with_feats(feats),
                weight,
                size,
                accumulator=accumulator,
                kernel_map=where.mapping,
                layer=f"sweep {op}",
            )
        assert y._record is not None
        return y.feats, y._record

    y, record = forward()
    while op == "fprop":
        yield y, record
        y, record = forward()
    leaf = feats if op == "dgrad" else weight
    while True:
        (gradient,) = torch.autograd.grad(y, leaf, given.dy, retain_graph=True)
        yield gradient, record


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one dtype are equal bit by bit. Waits for the device."""
    bits = _BITS[a.element_size()]
    return torch.equal(a.view(bits), b.view(bits))


def limit_of(op: str, mode: Mode, accumulator: str, channels: int, where: Site) -> Bound:
    """The bound of a case that ran with `accumulator`. Weight gradients come out in fp32 (fp64)."""
    n, offsets = where.reduction(op, channels)
    wide = torch.promote_types(mode.dtype, torch.float32)
    name, chunk = parse_accumulator(accumulator)
    operands: torch.dtype | str = "tf32" if mode.tf32 else mode.dtype
    return accuracy.bound(
        name,
        n,
        torch.float16 if name.startswith("fp16") else operands,
        wide if op == "wgrad" else mode.dtype,
        accuracy.arch_of(where.mapping.device),
        offsets=offsets,
        chunk=chunk,
    )


def examine(
    results: Iterator[tuple[Tensor, Record]], given: Operands, limit: Bound, first: Tensor, repeats: int
) -> tuple[Errors, bool]:
    """(errors, whether all repeats equal `first` bit by bit) of `first` and of repeats - 1 more results.

    The errors of a repeat that equals the first are those of the first; of one that does not they are
    measured, and the worst of all is returned.
    """
    found, repeatable = accuracy.errors(first, given.y64, given.abs64, limit.floor), True
    for again, _ in islice(results, repeats - 1):
        if not same_bits(first, again):
            repeatable = False
            found = found.worst(accuracy.errors(again, given.y64, given.abs64, limit.floor))
    return found, repeatable


def measure(case: Case, given: Operands, where: Site, repeats: int) -> Row:
    """Runs a case `repeats` times and judges it."""
    op, mode, channels = case.op, MODES[case.mode], case.channels
    wide = "fp64" if mode.dtype == torch.float64 else "fp32"
    wanted = wide if op == "wgrad" else mode.accumulator
    results = execute(op, mode, given, where)
    first, record = next(results)
    ran = wide if op == "wgrad" else accumulator_label(record.accumulator, record.chunk)
    tile = {"fprop": record.tile, "dgrad": record.dgrad_tile, "wgrad": record.wgrad_tile}[op]
    as_asked = ran == wanted and mode.tf32 == tile.endswith("_tf32")
    if mode.tf32 and not as_asked:  # what ran read the operands as they are
        mode = MODES["fp32 acc fp32"]
        given = draw(op, case.family, mode.dtype, channels, where)
    limit = limit_of(op, mode, ran, channels, where)
    n = where.reduction(op, channels)[0]
    operands = {
        "fprop": (given.x, given.weight),
        "dgrad": (given.dy, given.weight),
        "wgrad": (given.x, given.dy),
    }
    a, b = operands[op]
    if record.rescaled and op != "wgrad":
        floor = rescaled_floor(limit.floor, n, a, b, transpose=op == "dgrad", chunk=record.chunk)
        limit = replace(limit, floor=floor)
    if tile.endswith("_3xtf32"):
        limit = replace(limit, floor=limit.floor + accuracy.tf32_loss(n, a, b))
    found, repeatable = examine(results, given, limit, first, repeats)
    return Row(
        op=op,
        mode=case.mode,
        family=case.family,
        channels=channels,
        volume=case.volume,
        n=n,
        accumulator=ran,
        tile=tile,
        **found.as_dict(),  # type: ignore[arg-type]
        bound=limit.eta,
        ratio=found.max_eta / limit.eta,
        formula=limit.formula,
        verdict=judge(found, limit, repeatable, "" if as_asked else record.reason),
    )


def judge(found: Errors, limit: Bound, repeatable: bool, fallback: str) -> str:
    """The verdict of one case on its own; wrong results count whatever ran."""
    if found.nonfinite:
        return f"{found.nonfinite} non-finite cells"
    if not found.within(limit):
        return "above the bound"
    if not repeatable:
        return "repeats differ"
    return f"not run: {fallback}" if fallback else "ok"


def cross_check(rows: Sequence[Row]) -> list[Row]:
    """Fails fp16-accumulator rows whose rel-L2 does not exceed that of the same case with fp32 accumulators.

    Applies to forward and dgrad of the families whose sums need rounding at every step, from four offsets on.
    """
    fp32 = {
        (r.op, r.family, r.channels, r.volume): r.rel_l2
        for r in rows
        if r.mode == MODES["fp16 acc fp32"].name
    }
    checked = []
    for row in rows:
        other = fp32.get((row.op, row.family, row.channels, row.volume))
        relevant = (
            row.mode == MODES["fp16 acc fp16"].name
            and row.accumulator == "fp16"
            and row.family in ("signed", "one_signed")
            and row.volume >= 8
        )
        if relevant and other is not None and row.n >= 4 * row.channels and not row.rel_l2 > other:
            row = replace(row, verdict="no fp16 error: the fp16 accumulator did not run")
        checked.append(row)
    return checked


# ---- the sweep -------------------------------------------------------------------------------------------


def scene(device: torch.device, voxels: int) -> Voxels:
    """At least `voxels` voxels of a wavy surface (about 2.5 a cell of its area), without features."""
    side = math.ceil(math.sqrt(voxels / 2.5))
    coords = scenes.surface(side)
    while len(coords) < voxels:
        side += 1
        coords = scenes.surface(side)
    index = torch.from_numpy(coords).to(device)
    return Voxels(index, torch.zeros(len(index), 1, device=device, dtype=torch.float32))


def defaults(device: torch.device, voxels: int | None, repeats: int | None) -> tuple[int, int]:
    """(voxels, repeats): what is None becomes 200,000 and 10 on a GPU, 500 and 2 on a CPU."""
    on_gpu = device.type == "cuda"
    return voxels or (200_000 if on_gpu else 500), repeats or (10 if on_gpu else 2)


def run(
    device: torch.device,
    grid: Grid | None = None,
    voxels: int | None = None,
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
    compare: bool = True,
    budget: float | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Runs a sweep.

    Args:
        device: where. grid: which cases; default all of Grid().
        voxels, repeats: size of the scene and runs of each case; see `defaults`.
        advance: called with a text before each case.
        compare: make the comparison with the published table too, before everything else.
        budget: seconds after which no further case is begun; None: no limit.
        keep: called with the result so far whenever ten seconds of work have been added to it, and before an
            exception goes on its way.

    Returns:
        Plain data: device, arch, torch, build, voxels, pairs (by kernel volume), repeats, seconds, rows
            (fields of Row), published (list), left_out (volume, channels, op and how many rows the budget
            left no time for), failed (number of rows).
    """
    begin = time.monotonic()
    cases = (grid or Grid()).cases()
    size, repeats = defaults(device, voxels, repeats)
    x = scene(device, size)
    table = published(x) if compare else []
    rows: list[Row] = []
    pairs: dict[str, int] = {}

    def result() -> dict[str, Any]:
        checked = cross_check(rows)
        left = Counter((case.volume, case.channels, case.op) for case in cases[len(rows) :])
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "arch": accuracy.arch_of(device),
            "torch": torch.__version__,
            "build": _C.BUILD_ID,
            "voxels": x.num_voxels,
            "pairs": pairs,
            "repeats": repeats,
            "seconds": time.monotonic() - begin,
            "rows": [asdict(row) for row in checked],
            "published": table,
            "left_out": [
                {"volume": volume, "channels": channels, "op": op, "rows": count}
                for (volume, channels, op), count in left.items()
            ],
            "failed": sum(row.failed for row in checked),
        }

    def begun() -> Iterator[Case]:
        kept = begin
        for case in cases:
            now = time.monotonic()
            if budget is not None and now - begin > budget:
                return
            if now - kept > 10:
                keep(result())
                kept = time.monotonic()
            advance(str(case))
            yield case

    try:
        for row in _rows(begun(), x, repeats, pairs):
            rows.append(row)
    except BaseException:  # also an interrupt
        keep(result())
        raise
    return result()


def _rows(cases: Iterable[Case], x: Voxels, repeats: int, pairs: dict[str, int]) -> Iterator[Row]:
    """Measures cases one after the other; consecutive ones share what they can. Notes the maps' `pairs`."""
    where: Site | None = None
    given: tuple[Any, Operands] | None = None
    for case in cases:
        if where is None or case.volume != where.mapping.kernel_volume:
            where = site(x, KERNEL_SIZES[case.volume])
            pairs[str(case.volume)] = where.mapping.num_pairs
        mode = MODES[case.mode]
        key = (case.volume, case.channels, case.op, case.family, mode.dtype, mode.tf32)
        if given is None or given[0] != key:
            given = None  # frees the tensors of the one before
            given = key, draw(case.op, case.family, mode.dtype, case.channels, where, mode.tf32)
        yield measure(case, given[1], where, repeats)


def offset_rounded(x: Tensor, weight: Tensor, pairs: accuracy.Pairs, n_out: int) -> Tensor:
    """A forward pass whose running sum is rounded to fp16 after each offset; products exact. (n, C_out)."""
    y = torch.zeros(n_out, weight.shape[-1], dtype=torch.float16, device=x.device)
    for k, (in_rows, out_rows) in enumerate(pairs):
        added = x[in_rows].double() @ weight[k].double()
        y[out_rows] = (y[out_rows].double() + added).half()
    return y


def published(x: Voxels) -> list[dict[str, Any]]:
    """Published differences of fp16 from fp32 accumulators beside ours: 3x3x3, signed inputs, fp16 output.

    `difference` compares our two accumulators, `per_offset` our fp16 accumulator with a reference that rounds
    once per offset, as the published reference does. Both are relative L2 norms.
    """
    where = site(x, 3)
    lines = []
    for channels, value in PUBLISHED.items():
        given = draw("fprop", "signed", torch.float16, channels, where)
        fp32, _ = next(execute("fprop", MODES["fp16 acc fp32"], given, where))
        fp16, record = next(execute("fprop", MODES["fp16 acc fp16"], given, where))
        rounded = offset_rounded(given.x, given.weight, where.pairs, x.num_voxels).double()
        lines.append(
            {
                "channels": channels,
                "published": value,
                "accumulator": record.accumulator,
                "difference": _rel_l2(fp16, fp32.double()),
                "per_offset": _rel_l2(fp16, rounded),
            }
        )
    return lines


def _rel_l2(y: Tensor, reference: Tensor) -> float:
    return accuracy.errors(y, reference, reference.abs()).rel_l2


# ---- command line ----------------------------------------------------------------------------------------


def register(app: typer.Typer) -> None:
    """Adds `voxmma sweep` to the command line."""
    app.command()(sweep)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def sweep(
    out: Annotated[Path, typer.Option(help="Folder for sweep.json and sweep.png.")] = Path("voxmma-sweep"),
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, ...")] = "",
    ops: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(OPS),
    modes: Annotated[str, typer.Option(help="Comma-separated.")] = ",".join(MODES),
    channels: Annotated[str, typer.Option(help="Comma-separated.")] = "8,16,32,64,96,128,256",
    volumes: Annotated[str, typer.Option(help="Kernel volumes, of 1, 8, 27, 125.")] = "27",
    families: Annotated[str, typer.Option(help="Comma-separated input families.")] = ",".join(FAMILIES),
    voxels: Annotated[int | None, typer.Option(help="Default 200000 on a GPU, 500 on a CPU.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Default 10 on a GPU, 2 on a CPU.", min=1)] = None,
    budget: Annotated[
        float | None, typer.Option(help="Seconds after which no further row is begun.", min=0)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only estimate the work and its time.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw sweep.png, which needs matplotlib.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the error of every precision mode against fp64 and hold it to its worst-case bound.

    Volumes, and within them channels, are measured in the order given. sweep.json is written every ten
    seconds, so that a run that is cut off keeps what it has. The exit code is 1 if a bound is broken, a cell
    is not finite, repeats differ, or an fp16 accumulator shows no fp16 error.
    """
    from voxmma import cli, doctor, sweep_cost, sweep_show

    target = torch.device(device) if device else doctor.usable_devices()[-1]
    try:
        grid = Grid(
            _words(ops), _words(modes), tuple(map(int, _words(channels))), tuple(map(int, _words(volumes))),
            _words(families),
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    if dry_run:
        estimate = sweep_cost.estimate(target, grid, voxels, repeats, budget)
        cli.show(estimate, sweep_cost.render(estimate), as_json)
        return
    with cli.progress(len(grid.cases())) as advance:
        keep = partial(sweep_show.write, out)
        result = run(target, grid, voxels, repeats, advance, budget=budget, keep=keep)
    written = [sweep_show.write(out, result)]
    if plots and result["rows"]:
        written.append(out / "sweep.png")
        sweep_show.plot(result, written[-1])
    cli.show(sweep_show.plain(result), sweep_show.render(result), as_json)
    typer.echo(f"written: {', '.join(str(path) for path in written)}", err=True)
    if result["left_out"]:
        rows = sum(part["rows"] for part in result["left_out"])
        typer.echo(f"the budget of {budget:g} s left out {rows} of {len(grid.cases())} rows", err=True)
    if result["failed"]:
        typer.echo(f"{result['failed']} of {len(result['rows'])} rows failed", err=True)
        raise typer.Exit(1)
