"""The `voxmma` command; `python -m voxmma` is the same.

Each command is a few lines here around a module that does the work: its `run` returns plain data and its
`render` makes something rich can print. With --json a command prints that data and nothing else on standard
output; progress goes to standard error in either case.
"""

from __future__ import annotations

from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

import voxmma
from voxmma.tools import bench as bench_module
from voxmma.tools import compile, report, speedbench, sweep_command, tune
from voxmma.tools import demo as demo_module
from voxmma.tools import doctor as doctor_module
from voxmma.tools import gate as gate_module
from voxmma.tools.console import Json, progress, show
from voxmma.tuning import gate, machine

app = typer.Typer(
    help="3-D sparse convolution with tensor-core precision under control.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _version(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(voxmma.__version__)
        raise typer.Exit


class Devices(str, Enum):
    """Choices of --device."""

    cpu = "cpu"
    cuda = "cuda"
    every = "all"


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for demo.json and demo.png.")] = Path("voxmma-demo"),
    device: Annotated[Devices, typer.Option(help="Where to run.")] = Devices.every,
    voxel_size: Annotated[float, typer.Option(help="Metres.", min=0.01)] = demo_module.VOXEL_SIZE,
    repeats: Annotated[int | None, typer.Option(help="Timed runs per figure.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Run a small network on the shipped scan in every precision mode and compare each with fp64.

    The exit code is 1 if a layer's error is above its worst-case bound.
    """
    devices = [d for d in machine.usable_devices() if device is Devices.every or d.type == device.value]
    if not devices:
        raise typer.BadParameter("no GPU can be used here; voxmma doctor says why", param_hint="--device")
    with progress(len(devices) * len(demo_module.MODES)) as advance:
        result = demo_module.run(devices, voxel_size, repeats, advance)
    written = demo_module.save(result, out)
    show(result, demo_module.render(result), as_json)
    typer.echo(f"written: {', '.join(str(path) for path in written)}", err=True)
    if not all(row["within_bound"] for row in result["rows"]):
        typer.echo("error above the worst-case bound: see the marked rows", err=True)
        raise typer.Exit(1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what this installation has and what is missing. Exit code 0 if it is usable, on a CPU at least."""
    checks = doctor_module.run()
    show(doctor_module.as_data(checks), doctor_module.render(checks), as_json)
    if not doctor_module.usable(checks):
        raise typer.Exit(1)


@app.command()
def tiles(
    device: Annotated[
        str | None, typer.Option(help="For this device, such as cuda:1, and not the default.")
    ] = None,
    judge: Annotated[
        bool,
        typer.Option(
            "--gate", help="Validate every fp16-accumulator tile on this device, and record the verdicts."
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the tile table: every kernel in this build, where it runs, and the published role it takes.

    With --gate: each fp16-accumulator tile's errors, bounds and gain on the device instead (on a GPU every
    input family at 200,000 voxels), and whether inference mode may use it from now on. The exit code is 1 if
    a tile is wrong; being no faster is no fault.
    """
    if judge:
        chosen = bench_module.chosen_device(device)
        with progress(len(gate.candidates(chosen))) as advance:
            verdicts = gate.run(chosen, advance=advance)
        said = gate.describe(chosen, verdicts)
        show(said, gate_module.render(verdicts, gate_module.title(said)), as_json)
        wrong = [verdict.subject for verdict in verdicts if not verdict.runs_on_request]
        if wrong:
            typer.echo(f"found wrong: {', '.join(wrong)}", err=True)
            raise typer.Exit(1)
        return
    found = voxmma.tiles(device)
    titles, lines = found.cells()
    table = Table(*titles, title=found.title)
    for line in lines:
        table.add_row(*line)
    show([asdict(row) for row in found], table, as_json)


bench = typer.Typer(help="Times and errors on this machine; without a subcommand: layers.")
app.add_typer(bench, name="bench")


@bench.callback(invoke_without_command=True)
def _bench(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file: as `voxmma bench run`.")] = None,
    paranoid: Annotated[bool, typer.Option("--paranoid", help="With --config.")] = False,
    out: Annotated[Path | None, typer.Option(help="With --config: also write the JSON here.")] = None,
    as_json: Json = False,
) -> None:
    if context.invoked_subcommand is None:
        if config is not None:
            speedbench.command(config, paranoid, out, as_json)
        elif paranoid or out is not None:
            raise typer.BadParameter("goes with --config", param_hint="--paranoid" if paranoid else "--out")
        else:
            layers(as_json=as_json)


@bench.command()
def layers(
    scene: Annotated[list[str] | None, typer.Option(help="surface, lidar, room; default: all.")] = None,
    channels: Annotated[str, typer.Option(help="C or C_inxC_out, with commas.")] = "32,64,128",
    dtype: Annotated[str, typer.Option(help="fp16, bf16, fp32, with commas.")] = "fp16",
    fp16_accum: Annotated[bool, typer.Option(help="Run fp16 with both accumulators.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if it can be used.")] = None,
    repeats: Annotated[int | None, typer.Option(help="Timed runs per figure.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Time forward, gradients and map of single layers on generated scenes, with the error of each.

    The exit code is 1 if an error is above its worst-case bound.
    """
    chosen = bench_module.chosen_device(device)
    names, dtypes = scene or list(bench_module.SCENES), dtype.split(",")
    for value, known, hint in (
        (names, bench_module.SCENES, "--scene"),
        (dtypes, bench_module.DTYPES, "--dtype"),
    ):
        unknown = [word for word in value if word not in known]
        if unknown:
            raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}", param_hint=hint)
    try:
        pairs = bench_module.parse_channels(channels)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--channels") from None
    wanted = bench_module.cases(names, pairs, dtypes, fp16_accum)
    with progress(len(wanted)) as advance:
        result = bench_module.run(wanted, chosen, repeats, advance)
    show(result, bench_module.render(result), as_json)
    if not all(row["within_bound"] for row in result["rows"]):
        typer.echo("error above the worst-case bound: see the marked rows", err=True)
        raise typer.Exit(1)


app.command("compile")(compile.compile_command)
app.command("report")(report.report_command)
bench.command("run")(speedbench.command)
app.command()(sweep_command.sweep)
app.command("tune")(tune.tune_command)
