"""benchmarks/scaling.py: the time a pair takes must not grow with the number of voxels.

Surfaces of one kind at every size: up to about 130,000 voxels one surface, beyond that copies of it as
samples of a batch, so that the neighbours of a voxel are alike at all sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from voxmma._timing import Clock, input_sets
from voxmma.data import scenes
from voxmma.dispatch.calls import convolve
from voxmma.dispatch.config import ConvConfig
from voxmma.ops import formats
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import KernelMap, kernel_map
from voxmma.tools import bench
from voxmma.tuning import machine
from voxmma.verify import shadow

import benchplots
import roofline

#: Cells along an axis of the largest surface that is generated; larger scenes are copies of it.
_RESOLUTION = 256
_CHECKED_ROWS = 256


def coordinates(voxels: int, device: torch.device) -> Tensor:
    """(N, 4) int32 coordinates, N about `voxels` and within a few percent from 1,000 on."""
    if voxels < 1:
        raise ValueError(f"voxels must be at least 1, got {voxels}")
    resolution = min(_RESOLUTION, max(4, round(math.sqrt(voxels / 2.5))))
    base = torch.from_numpy(scenes.surface(resolution)).to(device)
    copies = max(1, round(voxels / len(base)))
    coords = base.repeat(copies, 1)
    coords[:, 0] = torch.arange(copies, device=device, dtype=torch.int32).repeat_interleave(len(base))
    return coords


def _layer(
    mapping: KernelMap,
    coords: Tensor,
    channels: int,
    dtype: str,
    clock: Clock,
    rates: roofline.Rates,
) -> dict[str, Any]:
    """Times and error of one layer on a map."""
    device, n = coords.device, len(coords)
    kind = formats.DTYPES[dtype]
    generator = torch.Generator(device)
    generator.manual_seed(channels)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=kind)

    sets = input_sets(device, 2 * n * channels * kind.itemsize, least=1)
    xs = [draw(n, channels).requires_grad_() for _ in range(sets)]
    dys = [draw(n, channels) for _ in range(sets)]
    w = (
        draw(mapping.kernel_volume, channels, channels) / math.sqrt(mapping.kernel_volume * channels)
    ).detach()
    w.requires_grad_()

    config = ConvConfig(mapping.kernel_size, use_fp16_accum=False, layer="scaling")

    def conv(x: Tensor) -> Any:
        return convolve(config, x, w, None, mapping, kind)

    def forward(i: int) -> None:
        with torch.no_grad():
            conv(xs[i % sets])

    with torch.no_grad():
        y, record = conv(xs[0])
        rows = torch.linspace(0, n - 1, min(n, _CHECKED_ROWS), dtype=torch.float64, device="cpu").long()
        found, limit = shadow.check(xs[0].detach(), w.detach(), None, mapping, y, record, rows)
        del y
    ys = [conv(x)[0] for x in xs]
    timings = {
        "forward": clock(forward),
        "dgrad": clock(
            lambda i: torch.autograd.grad(ys[i % sets], xs[i % sets], dys[i % sets], retain_graph=True)
        ),
        "wgrad": clock(lambda i: torch.autograd.grad(ys[i % sets], w, dys[i % sets], retain_graph=True)),
    }
    row: dict[str, Any] = {"tiles": [record.tile, record.dgrad_tile, record.wgrad_tile]}
    for op, timing in timings.items():
        least = roofline.least_time(
            op, rates, pairs=mapping.num_pairs, n_in=n, n_out=n, volume=mapping.kernel_volume,
            c_in=channels, c_out=channels, dtype=dtype,
        )  # fmt: skip
        row[f"{op}_ms"], row[f"{op}_spread_ms"] = timing.ms, timing.spread_ms
        row[f"{op}_ps_a_pair"] = timing.median * 1e12 / max(1, mapping.num_pairs)
        row[f"{op}_of_floor"] = least.seconds / timing.median
        row[f"{op}_bound"] = least.bound
    return {**row, "rel_l2": found.rel_l2, "max_eta": found.max_eta, "within_bound": found.within(limit)}


def run(
    device: torch.device,
    sizes: Sequence[int],
    channels: Sequence[int],
    kernel: int = 3,
    dtype: str = "fp16",
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures submanifold layers, C_in = C_out, at every size and channel count.

    Args:
        sizes: numbers of voxels. repeats: default 10 on a GPU, 3 on a CPU. advance: called before each row.

    Returns:
        Plain data: environment, device, driver, rates, kernel, dtype, repeats; `rows` with times in ms, in
        picoseconds a pair and as a share of the roofline, the map's time and memory, and the errors of 256
        output rows against fp64, or with `error`; `growth`: by channels and operation the time a pair at the
        largest size over the least at a smaller one (None: not measured).
    """
    on_gpu = device.type == "cuda"
    count = repeats or (10 if on_gpu else 3)
    clock = Clock(device, count)
    rates = roofline.measure(device, (dtype,))
    rows: list[dict[str, Any]] = []
    for size in sorted(sizes):
        coords = coordinates(size, device)
        batch = int(coords[-1, 0]) + 1

        def fresh(coords: Tensor = coords, batch: int = batch) -> KernelMap:
            return kernel_map(CoordSet(coords, batch), kernel)

        head: dict[str, Any] = {}
        mapping: KernelMap | None = None
        for c in channels:
            advance(f"{len(coords):,} voxels, C = {c}")
            row: dict[str, Any] = {"channels": c, "voxels": len(coords)}
            try:
                if mapping is None:
                    taken = clock.wall(lambda i, fresh=fresh: fresh())
                    mapping = fresh()
                    head = {
                        "pairs": mapping.num_pairs,
                        "map_ms": taken.ms,
                        "map_ns_a_voxel": taken.median * 1e9 / len(coords),
                        "map_mib": mapping.nbytes / 2**20,
                    }
                rows.append({**row, **head, **_layer(mapping, coords, c, dtype, clock, rates)})
            except RuntimeError as error:  # out of memory, above all
                rows.append({**row, "error": str(error).splitlines()[0][:200]})
            if on_gpu:
                torch.cuda.empty_cache()
    return {
        "kind": "scaling",
        **machine.labels(device),
        "rates": rates.as_dict(),
        "kernel": kernel,
        "dtype": dtype,
        "repeats": count,
        "rows": rows,
        "growth": growth(rows),
    }


def growth(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By channels: time a pair at the largest size over the least at a smaller size, of each operation."""
    lines = []
    for c in dict.fromkeys(row["channels"] for row in rows):
        line: dict[str, Any] = {"channels": c}
        good = [row for row in rows if row["channels"] == c and "error" not in row]
        for op in benchplots.SCALING_OPS:
            times = [row[f"{op}_ps_a_pair"] for row in good]
            line[op] = times[-1] / min(times[:-1]) if len(times) > 1 else None
        lines.append(line)
    return lines


# ---- command line ------------------------------------------------------------------------------------------


def _numbers(text: str, hint: str) -> list[int]:
    try:
        made = [int(float(word)) for word in text.split(",")]
    except (ValueError, OverflowError):
        made = [0]
    if min(made) < 1:
        raise typer.BadParameter(f"expected numbers of 1 or more, got {text!r}", param_hint=hint)
    return made


def scaling(
    voxels: Annotated[
        str | None, typer.Option(help="Such as 1e4,1e5. Default: to 1e7 on a GPU, to 1e4 on a CPU.")
    ] = None,
    channels: Annotated[
        str | None, typer.Option(help="With commas. Default: 8 to 512 on a GPU, 8,32 on a CPU.")
    ] = None,
    kernel: Annotated[int, typer.Option(help="Kernel size.", min=1, max=9)] = 3,
    dtype: Annotated[str, typer.Option(help="fp16, bf16 or fp32.")] = "fp16",
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; default: cuda if it can be used.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Of each figure; default 10 on a GPU, 3 on a CPU.", min=1)
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for scaling.json and scaling.png.")] = Path(
        "voxmma-scaling"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Time layers over numbers of voxels and channels: how the time a pair takes moves with the size.

    The exit code is 1 if a checked cell is above its worst-case bound.
    """
    from voxmma.tools import console

    target = bench.chosen_device(device)
    on_gpu = target.type == "cuda"
    sizes = _numbers(voxels or ("1e4,1e5,1e6,1e7" if on_gpu else "1e3,1e4"), "--voxels")
    widths = _numbers(channels or ("8,32,128,512" if on_gpu else "8,32"), "--channels")
    if dtype not in bench.DTYPES:
        raise typer.BadParameter(f"{dtype!r} is none of {', '.join(bench.DTYPES)}", param_hint="--dtype")
    with console.progress(len(sizes) * len(widths)) as advance:
        result = run(target, sizes, widths, kernel, dtype, repeats, advance)
    written = benchplots.save(result, out)
    console.show(benchplots.plain(result), benchplots.scaling_table(result), as_json)
    typer.echo(f"written: {', '.join(str(path) for path in written)}", err=True)
    if not all(row.get("within_bound", True) for row in result["rows"]):
        typer.echo("error above the worst-case bound: see the marked rows", err=True)
        raise typer.Exit(1)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(scaling)

if __name__ == "__main__":
    app()
