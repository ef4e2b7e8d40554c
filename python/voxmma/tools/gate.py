"""The table of `voxmma tiles --gate`."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from voxmma.dispatch.validation import Verdict


def title(found: dict[str, Any]) -> str:
    """A line on what `describe` found out about the board."""
    name, rates = (
        f"validation of fp16-accumulator tiles (automatic rule) on {found['device']}",
        found["board"],
    )
    if rates is None:
        return name
    speeds = f"{rates['fp16']:.0f} and {rates['fp32']:.0f} TFLOP/s"
    return f"{name}: its matrix units add in fp16 {rates['ratio']:.2f}x as fast as in fp32 ({speeds})"


def render(
    verdicts: list[Verdict], title: str = "validation of fp16-accumulator tiles (automatic rule)"
) -> Table:
    """A table: one line a tile, one column a check."""
    names = ("legality", "overflow", "finite", "bound", "repeats", "budget", "gain")
    table = Table("tile", *names, "verdict", title=title)
    for verdict in verdicts:
        details = {
            check.name: f"{'' if check.passed else 'FAILED: '}{check.detail}" for check in verdict.checks
        }
        outcome = "admitted" if verdict.allowed else f"refused, {verdict.reason}"
        table.add_row(verdict.subject, *(details.get(name, "-") for name in names), outcome)
    return table
