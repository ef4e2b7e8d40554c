"""`voxmma compile`: the command line of voxmma.export."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from torch import nn

from voxmma.export.artefact import compile_model, load
from voxmma.export.frozen import ArtefactError
from voxmma.precision.policy import ComputeSpec, Precision, PrecisionPolicy, as_policy
from voxmma.tools.console import Json, show


# ---------------------------------------------------------------- the command
def _factory(where: str) -> tuple[nn.Module, tuple[Any, ...]]:
    """Calls ``FILE.py:function``, which returns a module and a tuple of example inputs."""
    file, _, name = where.rpartition(":")
    if not file or not Path(file).is_file():
        raise typer.BadParameter(f"expected FILE.py:function with an existing file, got {where!r}")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    if spec is None or spec.loader is None:
        raise typer.BadParameter(f"{file} is no Python file")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    if not hasattr(found, name):
        raise typer.BadParameter(f"{file} has no {name!r}")
    made = getattr(found, name)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise typer.BadParameter(f"{where} has to return (module, example inputs)")
    return made[0], tuple(made[1])


def choose_policy(name: str, tf32: bool, fp16_accum: bool) -> PrecisionPolicy:
    """The policy of the command's flags. Raises PolicyError for flags that exclude each other."""
    policy = as_policy(name)
    if tf32:
        policy = policy.with_compute(ComputeSpec(Precision.TF32))
    if fp16_accum:
        policy = policy.with_compute(ComputeSpec(policy.forward.input, Precision.F16))
    return policy


def compile_command(
    model: Annotated[str, typer.Argument(help="FILE.py:function that returns (module, example inputs).")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The artefact, FILE.pt2.")],
    policy: Annotated[str, typer.Option(help="A named policy.")] = "always_f32",
    tf32: Annotated[bool, typer.Option("--tf32/--no-tf32", help="float32 products in TF32.")] = False,
    fp16_accum: Annotated[
        bool, typer.Option("--fp16-accum/--no-fp16-accum", help="fp16 accumulators in sparse layers.")
    ] = False,
    aot: Annotated[
        bool | None,
        typer.Option("--aot/--no-aot", help="Compile with AOTInductor; by default where that works."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Export a network with its precision frozen, whatever training used.

    Exit code 1 if it cannot be frozen or misses its tolerance, 2 for flags or a model that make no sense.
    """
    try:
        chosen = choose_policy(policy, tf32, fp16_accum)
    except ValueError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    module, inputs = _factory(model)
    try:
        artefact = compile_model(module, inputs, chosen, aot)
        artefact.save(out)
        loaded = load(out, check=False, trust_code=True)  # written a moment ago
        check = loaded.check()
    except (ArtefactError, ValueError, TypeError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    table = Table(title=f"{out}: {artefact.metadata['name']}; {check}", show_header=False)
    for product in artefact.metadata["products"]:
        detail = ", ".join(f"{k}={v}" for k, v in product.items() if k not in ("node", "op"))
        table.add_row(product["node"], product["op"], detail)
    machine_code = loaded.engine == "aot"
    table.add_row("AOTInductor", "compiled" if machine_code else "not compiled", loaded.reason)
    found = {"out": str(out), "engine": loaded.engine, "reason": loaded.reason}
    show({**artefact.metadata, **found}, table, as_json)
    if not check.good:
        raise typer.Exit(1)
