"""What every command prints with: JSON or a table, and progress on standard error."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def show(data: Any, table: Any, as_json: bool) -> None:
    """Prints a result: `data` as JSON, or `table`, which in a file or pipe gets the width that it needs."""
    if as_json:
        typer.echo(json.dumps(data, indent=1))
        return
    console = Console()
    if not console.is_terminal:
        console = Console(width=max(Console(width=1_000).measure(table).maximum, 80))
    console.print(table)


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar on standard error; call what this yields with a text before each of `total` steps."""
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=total)
        started = 0

        def advance(text: str) -> None:
            nonlocal started
            bars.update(task, description=text, completed=started)
            started += 1

        yield advance
        bars.update(task, completed=total)


def can_draw() -> bool:
    """Whether pictures can be drawn here; says on standard error what is missing."""
    if importlib.util.find_spec("matplotlib") is not None:
        return True
    typer.echo("no picture: it needs matplotlib (pip install 'voxmma[bench]')", err=True)
    return False
