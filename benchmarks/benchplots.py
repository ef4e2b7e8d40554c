"""Tables and pictures of benchmarks/peerbench.py and benchmarks/scaling.py."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]

#: A fixed colour for each library, so that pictures can be compared.
_COLORS = {
    "voxmma": "#1f77b4", "torch": "#7f7f7f", "spconv": "#d62728", "spconv-triton": "#ff9896",
    "torchsparse": "#2ca02c", "minkowski": "#8c564b", "warpconvnet": "#9467bd", "flexgemm": "#ff7f0e",
    "fvdb": "#17becf",
}  # fmt: skip


def plain(value: Any) -> Any:
    """A result as JSON can hold it: figures that are not finite as strings."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None, pattern: str) -> str:
    return "–" if value is None else format(value, pattern)


def _errors(values: Sequence[float] | None) -> str:
    """Of y, dx and dW."""
    return "–" if values is None else " ".join(f"{value:.0e}" for value in values)


def label(row: Row, rows: Iterable[Row]) -> str:
    """A library's name, with its variant where there are several."""
    several = len({other["variant"] for other in rows if other["lib"] == row["lib"]}) > 1
    return f"{row['lib']} {row['variant']}" if several else str(row["lib"])


def layer_name(row: Row) -> str:
    """Such as '64x128 k3 fp16'; 't' instead of 's' before the stride of a transposed layer."""
    stride = f"{'t' if row.get('transposed') else 's'}{row['stride']}" if row["stride"] > 1 else ""
    return f"{row['c_in']}x{row['c_out']} k{row['kernel']}{stride} {row['dtype']}"


def measured(rows: Iterable[Row]) -> list[Row]:
    """Rows with figures."""
    return [row for row in rows if "forward_ms" in row]


def fastest_peer(row: Row, rows: Iterable[Row], what: str) -> float | None:
    """Least `what` among other libraries on the layer and scene of `row`."""

    def layer(found: Row) -> list[Any]:
        named = [found[key] for key in ("scene", "c_in", "c_out", "kernel", "stride", "dtype")]
        return [*named, bool(found.get("transposed"))]

    return min(
        (
            other[what]
            for other in measured(rows)
            if other["lib"] not in (row["lib"], "torch") and layer(other) == layer(row)
        ),
        default=None,
    )


# ---- peers -------------------------------------------------------------------------------------------------

_PEER_COLUMNS = (
    "scene", "layer", "library", "forward", "p10-p90", "cold", "of roofline", "dgrad", "wgrad", "backward",
    "of roofline", "cold", "step", "host us", "map", "first", "map MiB", "peak MiB", "rel-L2 y dx dW",
    "max eta y dx dW",
)  # fmt: skip


def peers_table(result: dict[str, Any]) -> Group:
    """One line a row of peerbench.run, and what is missing."""
    rates = result["rates"]
    reach = ", ".join(f"{name} {value:.4g} TFLOP/s" for name, value in rates["tflops"].items())
    table = Table(
        title=f"{result['device']}: ms, medians of {result['repeats']}, inputs rotated",
        caption=f"roofline: {reach}, {rates['bandwidth']:.0f} GB/s, measured here. forward, dgrad, wgrad, "
        "backward: device time, launching hidden; cold: caches flushed before; step: wall clock, launching "
        "included; map: step from fresh coordinates less step; first: map and forward.",
    )
    for column in _PEER_COLUMNS:
        table.add_column(column, overflow="fold")
    rows = result["rows"]
    for row in rows:
        name = label(row, rows)
        if "forward_ms" not in row:
            said = {"unsupported": "not supported: {}", "left_out": "left out: {}", "error": "{}"}
            why = next(text.format(row[key]) for key, text in said.items() if key in row)
            style = "red" if "error" in row else "dim"
            table.add_row(row["scene"], layer_name(row), name, Text(why, style=style))
            continue
        low, high = row["forward_spread_ms"]
        table.add_row(
            row["scene"],
            layer_name(row),
            f"{name} {row['version']}",
            f"{row['forward_ms']:.3f}",
            f"{low:.3f}-{high:.3f}",
            _number(row.get("forward_cold_ms"), ".3f"),
            f"{row['forward_of_floor']:.0%} {row['forward_bound']}",
            _number(row.get("dgrad_ms"), ".3f"),
            _number(row.get("wgrad_ms"), ".3f"),
            f"{row['backward_ms']:.3f}",
            f"{row['backward_of_floor']:.0%} {row['backward_bound']}",
            _number(row.get("backward_cold_ms"), ".3f"),
            f"{row['step_ms']:.3f}",
            f"{row['host_us']:.0f}",
            f"{row['map_ms']:.2f}",
            f"{row['first_ms']:.2f}",
            _number(row.get("map_mib"), ".1f"),
            _number(row.get("step_peak_mib"), ".0f"),
            _errors(row["rel_l2"]),
            _errors(row["max_eta"]),
        )
    missing = Text(f"not installed: {', '.join(result['absent']) or 'none'}")
    return Group(table, missing)


def save(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes a result of kind K into K.json and K.png of `folder`, made if need be; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = (folder / f"{result['kind']}.{suffix}" for suffix in ("json", "png"))
    data.write_text(json.dumps(plain(result), indent=1, allow_nan=False) + "\n")
    {"peers": draw_peers, "scaling": draw_scaling}[result["kind"]](result, picture)
    return [data, picture]


def _canvas(figure: Any) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)


def draw_peers(result: dict[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Speed-up bars (how often voxmma's time goes into a peer's; without voxmma, times) and the roofline.

    `metadata`: text chunks of the PNG.
    """
    from matplotlib.figure import Figure

    rows = measured(result["rows"])
    names = list(dict.fromkeys(label(row, result["rows"]) for row in rows))
    groups = list(dict.fromkeys((row["scene"], layer_name(row)) for row in rows))
    figure = Figure(
        figsize=(max(9.0, 2.2 + 0.32 * len(groups) * max(1, len(names))), 12), layout="constrained"
    )
    _canvas(figure)
    figure.suptitle(f"{result['device']}, torch {result['environment']['torch']}")
    by_place: dict[tuple[str, str], dict[str, Row]] = {group: {} for group in groups}
    for row in rows:
        by_place[row["scene"], layer_name(row)][label(row, result["rows"])] = row
    for number, what in enumerate(("forward", "backward")):
        _bars(figure.add_subplot(3, 1, number + 1), by_place, names, what)
    _roofline(figure.add_subplot(3, 1, 3), rows, result)
    figure.savefig(path, dpi=110, metadata=metadata)


def _color(name: str, number: int) -> str:
    known = name.split(" ")[0]
    return _COLORS.get(name, _COLORS.get(known, f"C{number}"))


def _bars(axes: Any, places: dict[tuple[str, str], dict[str, Row]], names: list[str], what: str) -> None:
    ours = next((name for name in names if name.startswith("voxmma")), None)
    shown = [name for name in names if name != ours] if ours and len(names) > 1 else names
    relative = ours is not None and shown != names
    width = 0.8 / max(1, len(shown))
    for number, name in enumerate(shown):
        heights = []
        for rows in places.values():
            taken = rows[name][f"{what}_ms"] if name in rows else math.nan
            if relative:
                taken = taken / rows[ours][f"{what}_ms"] if ours in rows else math.nan
            heights.append(taken)
        at = [place + (number - (len(shown) - 1) / 2) * width for place in range(len(places))]
        bars = axes.bar(at, heights, width, label=name, color=_color(name, number), edgecolor="white")
        axes.bar_label(bars, fmt="%.2f", fontsize=6, padding=1)
    axes.set_yscale("log")
    if relative:
        axes.axhline(1, color="black", linewidth=0.8)
    axes.set_ylabel("time / time of voxmma" if relative else "ms")
    axes.set_title(what)
    axes.set_xticks(range(len(places)), [f"{scene}\n{layer}" for scene, layer in places], fontsize=7)
    if shown:
        axes.legend(fontsize="small")


def _roofline(axes: Any, rows: list[Row], result: dict[str, Any]) -> None:
    rates = result["rates"]
    intensities = [row[f"{what}_intensity"] for row in rows for what in ("forward", "backward")]
    low, high = min(intensities, default=1.0) / 2, max(intensities, default=1e3) * 2
    for dtype, peak in rates["tflops"].items():
        ridge = peak * 1e3 / rates["bandwidth"]
        xs = sorted({low, high, min(max(ridge, low), high)})
        axes.plot(xs, [min(peak, x * rates["bandwidth"] / 1e3) for x in xs], "k-", linewidth=1)
        axes.annotate(f"{dtype} {peak:.3g} TFLOP/s", (high, min(peak, high * rates["bandwidth"] / 1e3)),
                      ha="right", va="bottom", fontsize=7)  # fmt: skip
    seen: set[str] = set()
    for number, row in enumerate(rows):
        name = label(row, result["rows"])
        for what, marker in (("forward", "o"), ("backward", "^")):
            axes.plot(
                row[f"{what}_intensity"],
                row[f"{what}_tflops"],
                marker,
                color=_color(name, number),
                markersize=6,
                markerfacecolor="none" if what == "backward" else None,
                label=None if f"{name} {what}" in seen else f"{name} {what}",
            )
            seen.add(f"{name} {what}")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="FLOP of existing pairs / compulsory byte",
        ylabel="TFLOP/s",
        title=f"roofline ({rates['bandwidth']:.0f} GB/s)",
    )
    axes.grid(alpha=0.3, which="both")
    if seen:
        axes.legend(fontsize="x-small", ncols=2)


# ---- scaling -----------------------------------------------------------------------------------------------

SCALING_OPS = ("forward", "dgrad", "wgrad")


def scaling_table(result: dict[str, Any]) -> Group:
    """One line a size, and one a channel count with how the time per pair moves."""
    title = f"{result['device']}: {result['kernel']}x{result['kernel']}x{result['kernel']} {result['dtype']}"
    table = Table(title=f"{title}, ms and picoseconds a pair, medians of {result['repeats']}")
    columns = ["C", "voxels", "pairs", "map ms", "map ns/voxel", "map MiB"]
    columns += [f"{op}{unit}" for op in SCALING_OPS for unit in (" ms", " ps/pair", " of roofline")]
    for column in (*columns, "max eta"):
        table.add_column(column, justify="right")
    for row in result["rows"]:
        head = [str(row["channels"]), f"{row['voxels']:,}"]
        if "error" in row:
            table.add_row(*head, Text(row["error"], style="red"))
            continue
        cells = [f"{row['pairs']:,}", f"{row['map_ms']:.2f}", f"{row['map_ns_a_voxel']:.2f}"]
        cells.append(_number(row["map_mib"], ".1f"))
        for op in SCALING_OPS:
            cells += [
                f"{row[f'{op}_ms']:.4g}",
                f"{row[f'{op}_ps_a_pair']:.4g}",
                f"{row[f'{op}_of_floor']:.0%}",
            ]
        style = None if row["within_bound"] else "bold red"
        table.add_row(*head, *cells, f"{row['max_eta']:.1e}", style=style)
    growth = Table(title="time a pair at the largest size / least time a pair at a smaller one")
    for column in ("C", *SCALING_OPS):
        growth.add_column(column, justify="right")
    for line in result["growth"]:
        growth.add_row(str(line["channels"]), *(_number(line[op], ".2f") for op in SCALING_OPS))
    return Group(table, growth)


def draw_scaling(result: dict[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Time a pair against voxels, a line a channel count, a panel an operation; the map beside them.

    `metadata`: text chunks of the PNG.
    """
    from matplotlib.figure import Figure

    rows = [row for row in result["rows"] if "error" not in row]
    figure = Figure(figsize=(18, 4.6), layout="constrained")
    _canvas(figure)
    figure.suptitle(f"{result['device']}, {result['dtype']}, kernel {result['kernel']}")
    channels = sorted({row["channels"] for row in rows})
    for number, op in enumerate(SCALING_OPS):
        axes = figure.add_subplot(1, 4, number + 1)
        for c in channels:
            line = [(row["voxels"], row[f"{op}_ps_a_pair"]) for row in rows if row["channels"] == c]
            axes.plot(*zip(*line, strict=True), "o-", label=f"C = {c}")
        axes.set(xscale="log", yscale="log", xlabel="voxels", ylabel="ps a pair", title=op)
        axes.grid(alpha=0.3, which="both")
    axes = figure.add_subplot(1, 4, 4)
    line = sorted({row["voxels"]: row["map_ns_a_voxel"] for row in rows}.items())
    if line:
        axes.plot(*zip(*line, strict=True), "o-")
    axes.set(xscale="log", yscale="log", xlabel="voxels", ylabel="ns a voxel", title="kernel map")
    axes.grid(alpha=0.3, which="both")
    if channels:
        figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110, metadata=metadata)
