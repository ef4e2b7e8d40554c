"""`voxmma sweep`: the error of every precision mode against fp64, held to its worst-case bound.

Each row is one operation (forward, input gradient, weight gradient) in one mode, at one channel count, kernel
volume and input family. All cells are compared, the worst of all repeats is kept, and repeats must be equal
bit by bit. `run` measures and returns plain data, `render` makes tables of it, `save` writes JSON and a PNG.

A row fails on a non-finite cell, a cell above its bound, repeats that differ, or an fp16 accumulator whose
error is no larger than that of fp32: then the fp16 path never ran.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.table import Table
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
    """fp32 operands rounded to TF32; the reference takes the rounded ones."""

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

# Relative difference between results of fp16 and fp32 accumulators published for this kernel family, 3x3x3,
# by channels. The reference of that table rounds its running sum to fp16 once per kernel offset.
PUBLISHED = {8: 1.4e-5, 32: 2.4e-4, 128: 5.3e-4, 256: 7.5e-4}


@dataclass(frozen=True)
class Grid:
    """The cases of a sweep: every combination."""

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

    @property
    def cases(self) -> int:
        """Number of rows."""
        sizes = (self.ops, self.modes, self.channels, self.volumes, self.families)
        return math.prod(len(values) for values in sizes)


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


@dataclass(frozen=True)
class Operands:
    """Tensors of one case, quantised, and its fp64 result."""

    x: Tensor
    weight: Tensor
    dy: Tensor
    y64: Tensor
    abs64: Tensor


# ---- one case --------------------------------------------------------------------------------------------


def draw(
    op: str, family: str, dtype: torch.dtype, channels: int, mapping: KernelMap, tf32: bool = False
) -> Operands:
    """Operands of a case on the map's device; the reduction of `op` sees what the family is about."""
    device = mapping.in_coords.device
    volume, rows = len(mapping.offsets), mapping.in_coords.num
    generator = torch.Generator(device)
    generator.manual_seed(zlib.crc32(f"{op} {family} {channels} {volume}".encode()))
    drawn = FAMILIES[family]

    def quantised(t: Tensor) -> Tensor:
        return accuracy.quantise(t, "tf32") if tf32 else t

    first = quantised(drawn.activations((rows, channels), dtype, generator, device))
    weight = quantised(drawn.weights((volume, channels, channels), dtype, generator, device))
    zeros = torch.zeros_like(first)
    pairs = mapping.pairs()
    if op == "fprop":
        return Operands(first, weight, zeros, *accuracy.reference_conv(first, weight, pairs, rows))
    if op == "dgrad":
        weight = weight.transpose(-1, -2).contiguous()
        return Operands(zeros, weight, first, *accuracy.reference_dgrad(first, weight, pairs, rows))
    dy = quantised(drawn.gradients((rows, channels), dtype, generator, device))
    weight = torch.zeros(weight.shape, device=device, dtype=torch.promote_types(dtype, torch.float32))
    return Operands(first, weight, dy, *accuracy.reference_wgrad(first, dy, pairs))


def execute(op: str, mode: Mode, given: Operands, x: Voxels, mapping: KernelMap) -> tuple[Tensor, Record]:
    """The library's own result of a case, and the record of what ran."""
    feats = given.x.clone().requires_grad_(op == "dgrad")
    weight = given.weight.clone().requires_grad_(op == "wgrad")
    size = (mapping.kernel_size[0], mapping.kernel_size[1], mapping.kernel_size[2])
    accumulator = None if mode.accumulator == "fp64" else mode.accumulator
    with settings.override(fp32_precision="tf32" if mode.tf32 else "ieee"):
        y = spatially_sparse_conv(
            x.with_feats(feats),
            weight,
            size,
            accumulator=accumulator,
            kernel_map=mapping,
            layer=f"sweep {op}",
        )
    record = y._record
    assert record is not None
    if op == "fprop":
        return y.feats.detach(), record
    (gradient,) = torch.autograd.grad(y.feats, feats if op == "dgrad" else weight, given.dy)
    return gradient, record


def reduction(op: str, channels: int, mapping: KernelMap) -> tuple[int, int]:
    """(n, offsets) of the longest sum: active offsets x channels; for wgrad pairs of one offset."""
    pairs = mapping.pairs()
    if op == "wgrad":
        return max((len(rows) for rows, _ in pairs), default=0), 1
    rows = torch.cat([pair[1 if op == "fprop" else 0] for pair in pairs])
    active = int(torch.bincount(rows).max()) if len(rows) else 0
    return active * channels, max(1, active)


def limit_of(op: str, mode: Mode, accumulator: str, channels: int, mapping: KernelMap) -> Bound:
    """The bound of a case that ran with `accumulator`. Weight gradients come out in fp32 (fp64)."""
    n, offsets = reduction(op, channels, mapping)
    wide = torch.promote_types(mode.dtype, torch.float32)
    name, chunk = parse_accumulator(accumulator)
    operands: torch.dtype | str = "tf32" if mode.tf32 else mode.dtype
    return accuracy.bound(
        name,
        n,
        torch.float16 if name.startswith("fp16") else operands,
        wide if op == "wgrad" else mode.dtype,
        accuracy.arch_of(mapping.in_coords.device),
        offsets=offsets,
        chunk=chunk,
    )


def measure(
    op: str, mode: Mode, family: str, given: Operands, x: Voxels, mapping: KernelMap, repeats: int
) -> Row:
    """Runs a case `repeats` times and judges it."""
    channels = given.x.shape[1]
    wide = "fp64" if mode.dtype == torch.float64 else "fp32"
    wanted = wide if op == "wgrad" else mode.accumulator
    result, record = execute(op, mode, given, x, mapping)
    ran = wide if op == "wgrad" else accumulator_label(record.accumulator, record.chunk)
    limit = limit_of(op, mode, ran, channels, mapping)
    if record.rescaled and op != "wgrad":
        a, n = (given.x if op == "fprop" else given.dy), reduction(op, channels, mapping)[0]
        chunk = record.chunk
        floor = rescaled_floor(limit.floor, n, a, given.weight, transpose=op == "dgrad", chunk=chunk)
        limit = replace(limit, floor=floor)
    tile = {"fprop": record.tile, "dgrad": record.dgrad_tile, "wgrad": record.wgrad_tile}[op]
    as_asked = ran == wanted and mode.tf32 == tile.endswith("_tf32")
    found = accuracy.errors(result, given.y64, given.abs64, limit.floor)
    repeatable = True
    for _ in range(repeats - 1):
        again, _ = execute(op, mode, given, x, mapping)
        if not torch.equal(result, again):
            repeatable = False
            found = found.worst(accuracy.errors(again, given.y64, given.abs64, limit.floor))
    return Row(
        op=op,
        mode=mode.name,
        family=family,
        channels=channels,
        volume=len(mapping.offsets),
        n=reduction(op, channels, mapping)[0],
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
    """At least `voxels` voxels of a wavy surface, without features."""
    coords = scenes.surface(math.ceil(math.sqrt(voxels / 2)))
    index = torch.from_numpy(coords).to(device)
    return Voxels(index, torch.zeros(len(index), 1, device=device))


def run(
    device: torch.device,
    grid: Grid | None = None,
    voxels: int | None = None,
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
    compare: bool = True,
) -> dict[str, Any]:
    """Runs a sweep.

    Args:
        device: where. grid: which cases; default all of Grid().
        voxels: size of the scene; default 200,000 on a GPU, 500 on a CPU.
        repeats: runs of each case; default 10 on a GPU, 2 on a CPU.
        advance: called with a text before each of the `grid.cases` cases.
        compare: make the comparison with the published table too.

    Returns:
        Plain data: device, arch, voxels, repeats, rows (fields of Row), published (list), failed (number of
            rows).
    """
    grid = grid or Grid()
    on_gpu = device.type == "cuda"
    x = scene(device, voxels or (200_000 if on_gpu else 500))
    repeats = repeats or (10 if on_gpu else 2)
    rows: list[Row] = []
    for volume in grid.volumes:
        mapping = kernel_map(x.coord_set, KERNEL_SIZES[volume])
        for op in grid.ops:
            for channels in grid.channels:
                for family in grid.families:
                    given: dict[tuple[torch.dtype, bool], Operands] = {}
                    for name in grid.modes:
                        mode = MODES[name]
                        advance(f"{op} {name}, C={channels}, K={volume}, {family}")
                        key = (mode.dtype, mode.tf32)
                        if key not in given:
                            given = {key: draw(op, family, mode.dtype, channels, mapping, mode.tf32)}
                        rows.append(measure(op, mode, family, given[key], x, mapping, repeats))
    rows = cross_check(rows)
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "arch": accuracy.arch_of(device),
        "torch": torch.__version__,
        "build": _C.BUILD_ID,
        "voxels": x.num_voxels,
        "repeats": repeats,
        "rows": [asdict(row) for row in rows],
        "published": published(x) if compare else [],
        "failed": sum(row.failed for row in rows),
    }


def offset_rounded(x: Tensor, weight: Tensor, mapping: KernelMap) -> Tensor:
    """A forward pass whose running sum is rounded to fp16 after each offset; products exact. (n, C_out)."""
    y = torch.zeros(mapping.out_coords.num, weight.shape[-1], dtype=torch.float16, device=x.device)
    for k, (in_rows, out_rows) in enumerate(mapping.pairs()):
        product = x[in_rows].double() @ weight[k].double()
        y[out_rows] = (y[out_rows].double() + product).half()
    return y


def published(x: Voxels) -> list[dict[str, Any]]:
    """Published differences of fp16 from fp32 accumulators beside ours: 3x3x3, signed inputs, fp16 output.

    `difference` compares our two accumulators, `per_offset` our fp16 accumulator with a reference that rounds
    once per offset, as the published reference does. Both are relative L2 norms.
    """
    mapping = kernel_map(x.coord_set, 3)
    lines = []
    for channels, value in PUBLISHED.items():
        given = draw("fprop", "signed", torch.float16, channels, mapping)
        fp32, _ = execute("fprop", MODES["fp16 acc fp32"], given, x, mapping)
        fp16, record = execute("fprop", MODES["fp16 acc fp16"], given, x, mapping)
        rounded = offset_rounded(given.x, given.weight, mapping).double()
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


# ---- showing ---------------------------------------------------------------------------------------------


def render(result: dict[str, Any]) -> Group:
    """Worst family per op, mode, channels and volume; every failed row; the published table."""
    title = f"{result['device']}, {result['voxels']:,} voxels, worst of {result['repeats']} runs, all cells"
    columns = ("op", "mode", "C", "K", "worst family", "max eta", "p99 eta", "bound", "of bound", "rel-L2")
    worst = Table(*columns, "max_rel", "non-finite", "verdict", title=title)
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["op"], row["mode"], row["channels"], row["volume"]), []).append(row)
    for (op, mode, channels, volume), rows in groups.items():
        bad = [row for row in rows if row["verdict"] != "ok"]
        row = max(bad or rows, key=lambda r: r["ratio"])
        worst.add_row(
            op,
            mode,
            str(channels),
            str(volume),
            row["family"],
            *(f"{row[key]:.2e}" for key in ("max_eta", "p99_eta", "bound")),
            f"{row['ratio']:.1%}",
            *(f"{max(r[key] for r in rows):.2e}" for key in ("rel_l2", "max_rel")),
            str(sum(r["nonfinite"] for r in rows)),
            row["verdict"] + (f" ({len(bad)} of {len(rows)})" if bad else ""),
        )
    tables: list[Any] = [worst]
    if result["published"]:
        table = Table(
            "C",
            "published",
            "ours, fp16 against fp32",
            "ours against a reference rounding once per offset",
            title="fp16 accumulators, relative difference (3x3x3, signed)",
            caption="The published reference rounds to fp16 once per offset itself, so it shares most of the "
            "rounding; the second column of ours has no fp16 in its reference.",
        )
        for line in result["published"]:
            table.add_row(
                str(line["channels"]),
                *(f"{line[key]:.1e}" for key in ("published", "difference", "per_offset")),
            )
        tables.append(table)
    return Group(*tables)


def save(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes sweep.json and sweep.png into `folder`, which is made if need be; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "sweep.json", folder / "sweep.png"
    data.write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    plot(result, picture)
    return [data, picture]


def plain(value: Any) -> Any:
    """A result as JSON can hold it: infinite figures as the string 'inf'."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def plot(result: dict[str, Any], path: Path) -> None:
    """Error against channels by mode: rel-L2 of signed inputs above, worst max eta with its bound below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ran = [row for row in result["rows"] if not row["verdict"].startswith("not run")]
    ops = [op for op in OPS if any(row["op"] == op for row in ran)]
    volume = max((row["volume"] for row in ran), key=lambda v: (v == 27, v), default=27)
    figure = Figure(figsize=(5.2 * max(1, len(ops)), 8), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"Error against fp64, {result['device']}, {result['voxels']:,} voxels, K = {volume}")
    for column, op in enumerate(ops):
        l2 = figure.add_subplot(2, len(ops), column + 1)
        eta = figure.add_subplot(2, len(ops), len(ops) + column + 1)
        for number, mode in enumerate(MODES):
            rows = [r for r in ran if (r["op"], r["mode"], r["volume"]) == (op, mode, volume)]
            channels = sorted({row["channels"] for row in rows})
            color = f"C{number}"
            signed = {row["channels"]: row["rel_l2"] for row in rows if row["family"] == "signed"}
            worst = [max(r["max_eta"] for r in rows if r["channels"] == c) for c in channels]
            limit = [max(r["bound"] for r in rows if r["channels"] == c) for c in channels]
            l2.plot(list(signed), list(signed.values()), "o-", color=color, label=mode)
            eta.plot(channels, worst, "o-", color=color)
            eta.plot(channels, limit, "--", color=color, linewidth=1)
        scalable = any(0 < row["rel_l2"] < math.inf for row in ran if row["op"] == op)
        for axes, label in ((l2, "rel-L2, signed inputs"), (eta, "max eta, worst family (dashed: bound)")):
            axes.set(xlabel="channels", ylabel=label, title=op)
            axes.set_yscale("log" if scalable else "linear")
            axes.set_xscale("log", base=2)
            ticks = sorted({row["channels"] for row in ran})
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.grid(alpha=0.3)
        if column == 0:
            l2.legend(fontsize="small")
    figure.savefig(path, dpi=110)


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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Measure the error of every precision mode against fp64 and hold it to its worst-case bound.

    The exit code is 1 if a bound is broken, a cell is not finite, repeats differ, or an fp16 accumulator
    shows no fp16 error.
    """
    from voxmma import cli, doctor

    target = torch.device(device) if device else doctor.usable_devices()[-1]
    try:
        grid = Grid(
            _words(ops), _words(modes), tuple(map(int, _words(channels))), tuple(map(int, _words(volumes))),
            _words(families),
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with cli.progress(grid.cases) as advance:
        result = run(target, grid, voxels, repeats, advance)
    written = save(result, out)
    cli.show(plain(result), render(result), as_json)
    typer.echo(f"written: {', '.join(str(path) for path in written)}", err=True)
    if result["failed"]:
        typer.echo(f"{result['failed']} of {len(result['rows'])} rows failed", err=True)
        raise typer.Exit(1)
