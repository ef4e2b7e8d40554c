"""`voxmma sweep`: the command line of voxmma.tools.sweep."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from voxmma.tools import sweep_show
from voxmma.tools.bench import chosen_device
from voxmma.tools.console import Json, can_draw, progress, show
from voxmma.tools.sweep import Grid, run
from voxmma.verify.families import FAMILIES
from voxmma.verify.trials import MODES, OPS


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def sweep(
    out: Annotated[Path, typer.Option(help="Folder for sweep.json and sweep.png.")] = Path("voxmma-sweep"),
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...")] = None,
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
    plots: Annotated[bool, typer.Option(help="Draw sweep.png, which needs matplotlib.")] = True,
    as_json: Json = False,
) -> None:
    """Measure the error of every precision mode against fp64 and hold it to its worst-case bound.

    Volumes, and within them channels, are measured in the order given. sweep.json is written every ten
    seconds, so that a run that is cut off keeps what it has. The exit code is 1 if a bound is broken, a cell
    is not finite, repeats differ, or an fp16 accumulator shows no fp16 error.
    """
    target = chosen_device(device)
    try:
        grid = Grid(
            _words(ops), _words(modes), tuple(map(int, _words(channels))), tuple(map(int, _words(volumes))),
            _words(families),
        )  # fmt: skip
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with progress(len(grid.cases())) as advance:
        keep = partial(sweep_show.write, out)
        result = run(target, grid, voxels, repeats, advance, budget=budget, keep=keep)
    written = [sweep_show.write(out, result)]
    if plots and result["rows"] and can_draw():
        written.append(out / "sweep.png")
        sweep_show.plot(result, written[-1])
    show(sweep_show.plain(result), sweep_show.render(result), as_json)
    typer.echo(f"written: {', '.join(str(path) for path in written)}", err=True)
    if result["left_out"]:
        rows = sum(part["rows"] for part in result["left_out"])
        typer.echo(f"the budget of {budget:g} s left out {rows} of {len(grid.cases())} rows", err=True)
    if result["failed"]:
        typer.echo(f"{result['failed']} of {len(result['rows'])} rows failed", err=True)
        raise typer.Exit(1)
