"""What a sweep's result looks like: tables, the JSON file, and plots of error against channels."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from voxmma.verify.trials import MODES, OPS

Result = dict[str, Any]


def render(result: Result) -> Group:
    """Worst family per op, mode, channels and volume; every failed row; the published table."""
    title = f"{result['device']}, {result['voxels']:,} voxels, worst of {result['repeats']} runs, all cells"
    columns = ("op", "mode", "C", "K", "worst family", "max eta", "p99 eta", "bound", "of bound", "rel-L2")
    worst = Table(*columns, "max_rel", "non-finite", "verdict", title=title)
    groups: dict[tuple[Any, ...], list[Result]] = {}
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
    if result["left_out"]:
        table = Table("K", "C", "op", "rows", title="left out: no time within the budget")
        for part in result["left_out"]:
            table.add_row(*(str(part[key]) for key in ("volume", "channels", "op", "rows")))
        tables.append(table)
    return Group(*tables)


def write(folder: Path, result: Result) -> Path:
    """Writes sweep.json into `folder`, which is made if need be, in one step; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path, draft = folder / "sweep.json", folder / "sweep.json.part"
    rows = [json.dumps(plain(row), allow_nan=False) for row in result["rows"]]
    others = {key: value for key, value in plain(result | {"rows": []}).items() if key != "rows"}
    head = json.dumps(others, indent=1, allow_nan=False).removesuffix("\n}")
    draft.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(rows) + "\n ]\n}\n")
    os.replace(draft, path)
    return path


def plain(value: Any) -> Any:
    """A result as JSON can hold it: infinite figures as the string 'inf'."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


#: One colour per input format, one line style per accumulator.
_COLORS = {"fp16": "C0", "bf16": "C1", "fp32": "C2", "tf32": "C3", "fp64": "C7"}
_MARKS = {
    "fp32": "o-",
    "fp16": "x-",
    "fp16_promoted:32": "v:",
    "fp16_promoted:64": "^:",
    "fp16_promoted:128": "<:",
    "fp16_promoted:offset": ">:",
    "fp64": "s-",
}


def _style(mode: str) -> dict[str, Any]:
    form, _, accumulator = mode.partition(" acc ")
    mark = _MARKS[accumulator]
    return {
        "color": _COLORS[form],
        "marker": mark[0],
        "linestyle": mark[1:],
        "markersize": 4,
        "linewidth": 1.2,
    }


def plot(result: Result, path: Path, volume: int | None = None, note: dict[str, str] | None = None) -> None:
    """Errors against channels by mode, a column an op: rel-L2, max eta, and max eta as a share of its bound.

    Args:
        result: with `device`, `voxels`, `repeats` and `rows`. path: of the PNG.
        volume: kernel volume; default 27, or the largest there is. note: texts for the PNG's metadata.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ran = [row for row in result["rows"] if not row["verdict"].startswith("not run")]
    if volume is None:
        volume = max((row["volume"] for row in ran), key=lambda v: (v == 27, v), default=27)
    ran = [row for row in ran if row["volume"] == volume]
    ops = [op for op in OPS if any(row["op"] == op for row in ran)]
    figure = Figure(figsize=(4.6 * max(1, len(ops)), 10), layout="constrained")
    FigureCanvasAgg(figure)
    scale = f"{result['voxels']:,} voxels, K = {volume}, all cells, worst of {result['repeats']} runs"
    figure.suptitle(f"Errors against fp64, {result['device']}, {scale}")
    titles = ("rel-L2, signed inputs", "max eta, worst input family", "max eta / bound, worst input family")
    grid = figure.subplots(3, max(1, len(ops)), squeeze=False, sharey="row")
    for column, op in enumerate(ops):
        for mode in MODES:
            rows = [row for row in ran if (row["op"], row["mode"]) == (op, mode)]
            channels = sorted({row["channels"] for row in rows})
            signed = {row["channels"]: float(row["rel_l2"]) for row in rows if row["family"] == "signed"}
            _line(grid[0][column], sorted(signed), [signed[c] for c in sorted(signed)], mode)
            for axes, key in ((grid[1][column], "max_eta"), (grid[2][column], "ratio")):
                worst = [max(float(r[key]) for r in rows if r["channels"] == c) for c in channels]
                _line(axes, channels, worst, mode)
        ticks = sorted({row["channels"] for row in ran})
        for axes, label in zip(grid[:, column], titles, strict=True):
            axes.set(
                xlabel="channels" if axes is grid[2][column] else "", title=op, ylabel="" if column else label
            )
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.grid(alpha=0.3)
        grid[2][column].axhline(1.0, color="black", linewidth=1)
    for row in grid:  # a logarithmic axis needs a line that has it
        if any(len(line.get_xdata()) for axes in row for line in axes.get_lines()):
            row[0].set_yscale("log")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(path, dpi=90, metadata=note)


def _line(axes: Any, x: Sequence[int], y: Sequence[float], mode: str) -> None:
    """A line of the positive finite values; a logarithmic axis has no others."""
    shown = [(a, b) for a, b in zip(x, y, strict=True) if 0 < b < math.inf]
    axes.plot([a for a, _ in shown], [b for _, b in shown], label=mode, **_style(mode))
