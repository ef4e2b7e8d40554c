"""`voxmma tune`: the command line of voxmma.tune."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor

from voxmma.dispatch import measurements, store
from voxmma.ops import formats
from voxmma.ops.kernels import parse_accumulator
from voxmma.sparse.maps import kernel_map
from voxmma.sparse.tensor import Voxels
from voxmma.tools import bench
from voxmma.tools.compile import _factory
from voxmma.tools.console import Json, progress, show
from voxmma.tuning.machine import device_name
from voxmma.tuning.tuner import OPS, Case, Report, _distinct, cases_of, tune

# ---- command line ------------------------------------------------------------------------------------------


def cases_on(
    name: str,
    coords: Any,
    channels: Sequence[tuple[int, int]],
    kernels: Sequence[tuple[int, int]],
    dtype: str,
    accumulator: str,
    device: torch.device,
) -> list[Case]:
    """Cases of every kernel (size, stride) and channel pair on a scene's coordinates (N, 4).

    `dtype`: 'fp16', 'bf16', 'fp32' or 'tf32'.
    """
    index = torch.from_numpy(coords).to(device)
    source = Voxels(index, torch.zeros(len(index), 1, device=device, dtype=torch.float32)).coord_set
    made = []
    for size, stride in kernels:
        mapping = kernel_map(source, size, stride=stride)
        for c_in, c_out in channels:
            made.append(
                Case(
                    mapping,
                    c_in,
                    c_out,
                    formats.DTYPES[dtype],
                    accumulator,
                    precision="tf32" if dtype == "tf32" else "ieee",
                    layer=f"{name} k{size}{f's{stride}' if stride > 1 else ''}",
                )
            )
    return made


def tune_command(
    model: Annotated[
        str | None, typer.Argument(help="FILE.py:function that returns (module, example inputs).")
    ] = None,
    channels: Annotated[
        str, typer.Option(help="Without a model: C or C_inxC_out, with commas.")
    ] = "16,32,64,96,128,256,32x64,64x128",
    kernel: Annotated[
        str, typer.Option(help="Without a model: kernel sizes, s and stride behind, such as 3,2s2,5.")
    ] = "3,2s2",
    scene: Annotated[
        list[str] | None, typer.Option(help="Without a model: surface, lidar, room, or FILE.npz.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Without a model: fp16, bf16, fp32, tf32, with commas.")
    ] = "fp16",
    accumulator: Annotated[
        str, typer.Option(help="Without a model: fp32, fp16, fp16_promoted:64, ...")
    ] = "fp32",
    ops: Annotated[str, typer.Option(help="fwd, dgrad, wgrad, with commas.")] = ",".join(OPS),
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; default: cuda if it can be used.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Rounds; default 15 on a GPU, 3 on a CPU.", min=1)
    ] = None,
    save: Annotated[bool, typer.Option("--save/--no-save", help="Keep the measurements.")] = True,
    show_kept: Annotated[bool, typer.Option("--list", help="Only show what is kept for this card.")] = False,
    forget: Annotated[bool, typer.Option("--forget", help="Only delete all measurements.")] = False,
    as_json: Json = False,
) -> None:
    """Measure which tile is fastest, for a model or a list of shapes, and keep it for the selector.

    Without a model and options: 3x3x3 and strided layers of 16 to 256 channels on a generated surface.
    Exit code 1: the measurements could not be kept.
    """
    if forget:
        try:
            count = measurements.forget()
        except OSError as error:
            typer.echo(f"{store.path()}: {error.strerror}", err=True)
            raise typer.Exit(1) from None
        typer.echo(f"{count} line(s) deleted from {store.path()}")
        return
    target = bench.chosen_device(device)
    if show_kept:
        kept = [
            {**one["key"], "ms": one["ms"], "at": one.get("at"), "by": one.get("by")}
            for one in measurements.table(target).bodies.values()
        ]
        show(kept, _kept_table(kept, target), as_json)
        return
    try:
        if model is not None:
            module, inputs = _factory(model)
            module = module.to(target)
            moved = [value.to(target) if isinstance(value, Tensor | Voxels) else value for value in inputs]
            work = cases_of(module, moved)
        else:
            parse_accumulator(accumulator)
            words = dtype.split(",")
            wrong = [word for word in words if word not in (*bench.DTYPES, "tf32")]
            if wrong:
                raise ValueError(f"dtype: {wrong[0]!r} is none of {', '.join(bench.DTYPES)}, tf32")
            work = [
                case
                for name, coords in bench.load_scenes(scene or ["surface"], target).items()
                for word in words
                for case in cases_on(
                    name,
                    coords,
                    bench.parse_channels(channels),
                    bench.parse_kernels(kernel),
                    word,
                    accumulator,
                    target,
                )
            ]
        wanted = tuple(ops.split(","))
        with progress(len(_distinct(work, wanted)[0])) as advance, warnings.catch_warnings():
            warnings.simplefilter("ignore" if as_json else "default")
            report = tune(work, ops=wanted, repeats=repeats, save=save, advance=advance)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    show(report.as_dict(), render(report), as_json)
    if report.problem:
        typer.echo(report.problem, err=True)
        raise typer.Exit(1)


def render(report: Report) -> Table:
    """What `tune` did, as a table."""
    caption = report.problem or (f"kept in {report.written}" if report.written else "not kept")
    table = Table(title=f"tiles on {report.device}, ms", caption="; ".join([caption, *report.skipped]))
    for column in (
        "op",
        "C",
        "K",
        "dtype",
        "accumulator",
        "layers",
        "heuristic",
        "winner",
        "gain",
        "all",
    ):
        table.add_column(column, overflow="fold")
    for result in report.results:
        key = result.key
        others = [f"{name} {ms:.3f}" for name, ms in sorted(result.ms.items(), key=lambda item: item[1])]
        others += [f"{name} refused: {why}" for name, why in result.refused.items()]
        groups = f" /{key.groups}" if key.groups > 1 else ""
        table.add_row(
            key.op,
            f"{key.c_in}x{key.c_out}{groups}",
            str(key.volume),
            key.dtype if key.precision == "ieee" else key.precision,
            key.accumulator,
            ", ".join(result.layers),
            result.default,
            result.winner,
            "–" if result.gain is None else f"{result.gain:.2f}",
            "\n".join(others),
        )
    return table


def _kept_table(kept: Sequence[dict[str, Any]], device: torch.device) -> Table:
    table = Table(title=f"measurements for {device_name(device)} in {store.path()}")
    for column in ("op", "C", "K", "dtype", "accumulator", "fastest", "ms", "tiles", "at", "by"):
        table.add_column(column, overflow="fold")
    for one in kept:
        fastest = min(one["ms"], key=one["ms"].get)
        table.add_row(
            one["op"],
            f"{one['c_in']}x{one['c_out']}",
            str(one["volume"]),
            one["dtype"],
            one["accumulator"],
            fastest,
            f"{one['ms'][fastest]:.3f}",
            str(len(one["ms"])),
            str(one["at"]),
            str(one["by"]),
        )
    return table
