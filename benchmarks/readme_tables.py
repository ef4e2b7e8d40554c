"""Makes the tables of README.md and docs/*.md, and the plots of docs/, from benchmarks/results.

    python benchmarks/readme_tables.py            # rewrite them; --check: exit 1 if one is stale

A table stands between `<!-- results:begin NAME -->` and `<!-- results:end -->` and is never typed. A plot
carries the hash of the figures it was drawn from. benchmarks/collect.py makes the result files.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, Any]


def slug(name: str) -> str:
    """A device name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def load(folder: Path) -> list[Result]:
    """Every result file, by file name; the rows of a sweep as dicts, with their share of the bound."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for result in results:
        if "columns" in result:
            rows = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
            result["sweep"] = [{**row, "ratio": float(row["max_eta"]) / row["bound"]} for row in rows]
    for path in sorted(folder.glob("emulator-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        results.append({"card": lines[0]["device"], "emulator": lines})
    return results


def _markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def _number(value: float | None, pattern: str, unit: str = "") -> str:
    return "–" if value is None else format(value, pattern) + unit


def _origin(part: Result, torch: str) -> str:
    driver = f", driver {part['driver']}" if part["driver"] else ""
    return f"torch {torch}{driver}, commit {part['commit']}, {part['date']}"


def demo_table(results: list[Result]) -> str:
    """The demo's figures: of a GPU if there are any, else of a CPU."""
    having = [r for r in results if "demo" in r]
    if not having:
        return "No demo figures have been recorded yet; `make demo` shows those of your machine."
    best = max(having, key=lambda r: any(row["device"] == "cuda" for row in r["demo"]["rows"]))
    part = best["demo"]
    scene = part["scene"]
    rows = [
        [
            row["mode"],
            row["device"],
            row["tile"],
            row["accumulator"],
            row["decided_by"],
            _number(row["forward_ms"], ".3g", " ms"),
            _number(row["backward_ms"], ".3g", " ms"),
            _number(row["rel_l2"], ".1e"),
            _number(row["max_eta"], ".1e"),
            _number(row["max_rel"], ".1e"),
        ]
        for row in part["rows"]
    ]
    header = [
        "mode",
        "device",
        "tile",
        "accumulator",
        "decided by",
        "forward",
        "backward",
        "rel-L2",
        "max eta",
        "max_rel",
    ]
    caption = (
        f"{best['card']}, {scene['voxels']:,} voxels with {scene['neighbours_3x3x3']:.1f} neighbours each; "
        f"{_origin(part, part['environment']['torch'])}."
    )
    return f"{_markdown(header, rows)}\n\n{caption}"


def _fastest(rows: list[Result], lib: str, what: str) -> float | None:
    return min((row[what] for row in rows if row["lib"] == lib and what in row), default=None)


def _shape(row: Result) -> str:
    """Such as '64x64 fp16', and for other kernels than 3x3x3 '64x64 fp16, K = 8, stride 2 transposed'."""
    kernel, stride = row.get("kernel", 3), row.get("stride", 1)
    other = f", K = {kernel**3}" + (f", stride {stride}" if stride > 1 else "")
    other += " transposed" if row.get("transposed") else ""
    return f"{row['ci']}x{row['co']} {row['dtype']}{other if (kernel, stride) != (3, 1) else ''}"


def _by_shape(rows: list[Result]) -> dict[str, list[Result]]:
    groups: dict[str, list[Result]] = {}
    for row in rows:
        groups.setdefault(_shape(row), []).append(row)
    return groups


def speed_table(results: list[Result]) -> str:
    """voxmma (fp32 accumulator) against spconv in the same run, per card and scene."""
    blocks = []
    for result in results:
        for scene, part in result.get("scenes", {}).items():
            rows = []
            rooflines = any("forward_of_floor" in row for row in part["rows"])
            for shape, group in _by_shape(part["rows"]).items():
                ours = next(
                    (row for row in group if (row["lib"], row["variant"]) == ("voxmma", "fp32")), None
                )
                if ours is None:
                    continue
                peer = [_fastest(group, "spconv", what) for what in ("forward_ms", "backward_ms")]
                times = [ours["forward_ms"], ours["backward_ms"]]
                ratios = [t / p if p else None for t, p in zip(times, peer, strict=True)]
                theirs = min(
                    (row for row in group if row["lib"] == "spconv"),
                    key=lambda row: row["forward_ms"],
                    default=None,
                )
                rows.append(
                    [
                        shape,
                        *(
                            cell
                            for what, t, p, ratio in zip(
                                ("forward", "backward"), times, peer, ratios, strict=True
                            )
                            for cell in (
                                _number(t, ".3f"),
                                *([_number(ours.get(f"{what}_of_floor"), ".0%")] if rooflines else []),
                                _number(p, ".3f"),
                                _number(ratio, ".2f"),
                            )
                        ),
                        _number(ours.get("map_ms"), ".2f"),
                        _number(ours.get("map_mib"), ".0f"),
                        _number(ours["rel_l2"][0], ".1e"),
                        _number(theirs["rel_l2"][0] if theirs else None, ".1e"),
                        _number(ours["max_eta"][0], ".1e"),
                    ]
                )
            if not rows:
                continue
            of_roofline = ["of roofline"] if rooflines else []
            header = [
                "C_in x C_out", "forward ms", *of_roofline, "spconv", "ratio", "backward ms", *of_roofline,
                "spconv", "ratio", "map build ms", "map MiB", "rel-L2", "spconv's", "max eta",
            ]  # fmt: skip
            counts = f"{part['voxels']:,} voxels, {part['pairs'] / part['voxels']:.1f} neighbours each"
            caption = f"**{scene}** on {result['card']}: {counts}; {_origin(part, part['torch'])}."
            blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "No GPU figures have been recorded yet."


def peers_table(results: list[Result]) -> str:
    """Every library of benchmarks/peerbench.py, per card and scene."""
    blocks = []
    for result in results:
        for scene, part in result.get("scenes", {}).items():
            if "rates" not in part:
                continue
            rows = []
            for shape, group in _by_shape(part["rows"]).items():
                for row in group:
                    cells = [shape, f"{row['lib']} {row['version']}".strip() + f", {row['variant']}"]
                    for op in ("forward", "dgrad", "wgrad", "backward"):
                        cells.append(_number(row.get(f"{op}_ms"), ".3f"))
                        cells.append(_number(row.get(f"{op}_of_floor"), ".0%"))
                    for name, pattern in (
                        ("forward_cold_ms", ".3f"), ("backward_cold_ms", ".3f"), ("step_ms", ".3f"),
                        ("host_us", ".0f"), ("map_ms", ".2f"), ("first_ms", ".2f"), ("map_mib", ".0f"),
                        ("step_peak_mib", ".0f"),
                    ):  # fmt: skip
                        cells.append(_number(row.get(name), pattern))
                    cells += [
                        " ".join(f"{value:.0e}" for value in row[name]) for name in ("rel_l2", "max_eta")
                    ]
                    rows.append(cells)
            header = [
                "layer", "library", "forward ms", "of roofline", "dgrad ms", "of roofline", "wgrad ms",
                "of roofline", "backward ms", "of roofline", "cold forward ms", "cold backward ms", "step ms",
                "host us", "map ms", "first ms", "map MiB", "peak MiB", "rel-L2 y dx dW", "max eta y dx dW",
            ]  # fmt: skip
            rates = part["rates"]
            reach = ", ".join(f"{name} {value:.4g} TFLOP/s" for name, value in rates["tflops"].items())
            caption = (
                f"**{scene}** on {result['card']}: {part['voxels']:,} voxels; measured limits {reach} and "
                f"{rates['bandwidth']:.0f} GB/s; {_origin(part, part['torch'])}."
            )
            reasons: dict[str, list[str]] = {}
            for label, why in part["failed"].items():
                reasons.setdefault(why, []).append(label)
            failed = "".join(f"\n* {why}: {', '.join(labels)}" for why, labels in reasons.items())
            failed = f"\n\nWithout figures:\n{failed}" if failed else ""
            blocks.append(f"{caption}\n\n{_markdown(header, rows)}{failed}")
    return "\n\n".join(blocks) or "No run of benchmarks/peerbench.py has been recorded yet."


def scaling_table(results: list[Result]) -> str:
    """Time a pair by voxels and channels, per card."""
    blocks = []
    for result in (r for r in results if "scaling" in r):
        part = result["scaling"]
        rows = []
        for row in part["rows"]:
            head = [str(row["channels"]), f"{row['voxels']:,}"]
            if "error" in row:
                rows.append([*head, row["error"], *[""] * 9])
                continue
            cells = [f"{row['map_ns_a_voxel']:.2f}"]
            for op in ("forward", "dgrad", "wgrad"):
                cells += [
                    f"{row[f'{op}_ms']:.3f}",
                    f"{row[f'{op}_ps_a_pair']:.3g}",
                    f"{row[f'{op}_of_floor']:.0%}",
                ]
            rows.append([*head, *cells, f"{row['max_eta']:.1e}"])
        header = ["C", "voxels", "map ns a voxel"]
        for op in ("forward", "dgrad", "wgrad"):
            header += [f"{op} ms", "ps a pair", "of roofline"]
        growth = [
            [str(line["channels"]), *(_number(line[op], ".2f") for op in ("forward", "dgrad", "wgrad"))]
            for line in part["growth"]
        ]
        caption = f"**{result['card']}**, {part['dtype']}; {_origin(part, part['environment']['torch'])}."
        note = "Time a pair at the largest size over the least at a smaller one:"
        moves = _markdown(["C", "forward", "dgrad", "wgrad"], growth)
        blocks.append(f"{caption}\n\n{_markdown([*header, 'max eta'], rows)}\n\n{note}\n\n{moves}")
    return "\n\n".join(blocks) or "No run of benchmarks/scaling.py has been recorded yet."


def small_sets_table(results: list[Result]) -> str:
    """A layer of ours by voxels and channels, per card."""
    blocks = []
    for result in _gpus_first(results, "small_sets"):
        part = result["small_sets"]
        ours = [row for row in part["rows"] if row["lib"] == "voxmma"]
        rows = [
            [
                f"{row['voxels']:,}",
                str(row["channels"]),
                *(f"{row[name]:.1f}" for name in ("forward_kernel_us", "forward_us", "step_us")),
                str(row["parts"]),
            ]
            for row in sorted(ours, key=lambda row: (row["voxels"], row["channels"]))
        ]
        header = ["voxels", "C", "forward kernel us", "forward us", "step us", "parts"]
        caption = _medians(result["card"], part, ", ".join(sorted({row["dtype"] for row in ours})))
        blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "No run of benchmarks/small_sets.py has been recorded yet."


def operators_table(results: list[Result]) -> str:
    """Coordinate sets, kernel maps, pooling and what only moves data, per card and scene."""
    blocks = []
    for result in results:
        for scene, part in result.get("operators", {}).items():
            made = [
                [
                    row["what"],
                    _number(row["ms"], ".3f"),
                    _number(row["least_ms"], ".3f"),
                    _number(row["waits"], "d"),
                ]
                for row in part["maps"]
            ]
            pools, reasons = [], {}
            for row in part["pools"]:
                window = f"{row['kind']}, k{row['kernel']}s{row['stride']}"
                cells = [window, f"{row['channels']} {row['dtype']}", _number(row["floor_ms"], ".4f")]
                for op in ("forward", "backward"):
                    cells += [
                        _number(row[f"{op}_ms"], ".4f"),
                        _number(row[f"{op}_over_floor"], ".2f"),
                        _number(row.get(f"spconv_{op}_ms"), ".4f"),
                    ]
                pools.append(cells)
                if "spconv_error" in row:
                    reasons.setdefault(row["spconv_error"], []).append(f"{window}, C = {row['channels']}")
            sizes = " and ".join(
                f"{part[f'{name}_bytes'] / 2**20:.1f} MiB of {text}"
                for name, text in (("map", "3x3x3 map"), ("index", "coordinate index"))
            )
            caption = (
                f"**{scene}** on {result['card']}: {part['voxels']:,} voxels, {sizes}; copy "
                f"{part['bandwidth']:.0f} GB/s; {_origin(part, part['torch'])}."
            )
            header = ["pooling", "C", "roofline ms"]
            theirs = f"spconv {part['spconv'] or ''}".strip()
            for op in ("forward", "backward"):
                header += [f"{op} ms", "time / roofline", theirs]
            tables = [
                _markdown(["what is made", "median ms", "least ms", "waits for the GPU"], made),
                _markdown(header, pools),
                _moves_table(part["moves"]),
            ]
            failed = [f"* {why}: {', '.join(labels)}" for why, labels in reasons.items()]
            tables += ["spconv failed:", "\n".join(failed)] if failed else []
            blocks.append("\n\n".join([caption, *tables]))
    return "\n\n".join(blocks) or "No run of `benchmarks/operators.py` has been recorded yet."


_NETWORKS = {
    "spunet": "SpUNet",
    "minkunet34c": "MinkUNet34C",
    "second": "SECOND backbone",
    "resnet21d": "ResNet21D",
    "vae": "VAE decoder",
}


def _network(row: Result) -> str:
    """Such as 'SpUNet, indoor_scannet x 4', 'conv 64, grid_10000'."""
    name = row["network"]
    title = _NETWORKS.get(name) or f"3x3x3, C = {name.removeprefix('conv')}"
    return f"{title}, {row['scene']}" + (f" x {row['batch']}" if row["batch"] > 1 else "")


def _medians(card: str, part: Result, dtype: str) -> str:
    origin = _origin(part, part["environment"]["torch"])
    return f"**{card}**, {dtype}, medians of {part['repeats']}; {origin}."


def _networks_caption(result: Result) -> str:
    part = result["networks"]
    return _medians(result["card"], part, part["dtype"])


def networks_table(results: list[Result]) -> str:
    """Whole networks, without single layers: ours, and in brackets our part of spconv's in the same run."""
    blocks = []
    for result in _gpus_first(results, "networks"):
        rows = [row for row in result["networks"]["rows"] if row["network"] in _NETWORKS]
        theirs = {_network(row): row for row in rows if row["lib"] == "spconv"}
        cells = []
        for row in (row for row in rows if row["lib"] == "voxmma" and "infer_ms" in row):
            peer, line = theirs.get(_network(row), {}), [_network(row), f"{row['voxels']:,}"]
            for what, pattern in (
                ("infer_ms", ".2f"), ("gpu_ms", ".2f"), ("infer_mib", ".0f"),
                ("train_ms", ".1f"), ("train_gpu_ms", ".2f"), ("train_mib", ".0f"),
            ):  # fmt: skip
                ours, other = row.get(what), peer.get(what)
                ratio = f" ({ours / other:.2f})" if ours is not None and other else ""
                line.append(_number(ours, pattern) + ratio)
            cells.append([*line, _number(row["rel_l2"], ".1e"), _number(peer.get("rel_l2"), ".1e")])
        header = ["network, scene", "voxels", "infer ms", "GPU ms", "MiB", "train ms", "GPU ms", "MiB"]
        versions = sorted({row["version"] for row in theirs.values()})
        caption = _networks_caption(result)
        if theirs:
            caption += f" In brackets: part of what spconv {', '.join(versions)} takes in the same run."
        if cells:
            blocks.append(f"{caption}\n\n{_markdown([*header, 'rel-L2', 'spconv'], cells)}")
    return "\n\n".join(blocks) or "No run of `benchmarks/networks.py` has been recorded yet."


def network_rows_table(results: list[Result]) -> str:
    """Every row of benchmarks/networks.py, per card."""
    blocks = []
    for result in _gpus_first(results, "networks"):
        rows, reasons = [], {}
        for row in result["networks"]["rows"]:
            name = f"{row['lib']} {row['version']}".strip()
            for kind in ("error", "unsupported", "train_error"):
                if kind in row:
                    reasons.setdefault(row[kind], []).append(f"{name}, {_network(row)}")
            if "infer_ms" not in row:
                continue
            line = [_network(row), f"{row['voxels']:,}", name]
            for what, pattern in (
                ("infer_ms", ".3f"), ("kept_ms", ".3f"), ("gpu_ms", ".3f"), ("idle", ".0%"),
                ("kernels", "d"), ("infer_mib", ".0f"), ("train_ms", ".3f"), ("train_gpu_ms", ".3f"),
                ("train_idle", ".0%"), ("train_kernels", "d"), ("train_mib", ".0f"), ("rel_l2", ".1e"),
                ("rel_l2_fp32", ".1e"),
            ):  # fmt: skip
                line.append(_number(row.get(what), pattern))
            apart = row["cells_missing"] or row["cells_more"]
            line[-2] += f", cells -{row['cells_missing']} +{row['cells_more']}" if apart else ""
            rows.append(line)
        header = [
            "network, scene", "voxels", "library", "infer ms", "maps kept", "GPU ms", "idle", "kernels",
            "MiB", "train ms", "GPU ms", "idle", "kernels", "MiB", "rel-L2", "fp32",
        ]  # fmt: skip
        failed = [f"* {why}: {', '.join(labels)}" for why, labels in reasons.items()]
        failed = ["Without figures:", "\n".join(failed)] if failed else []
        blocks.append("\n\n".join([_networks_caption(result), _markdown(header, rows), *failed]))
    return "\n\n".join(blocks) or "No run of `benchmarks/networks.py` has been recorded yet."


def _moves_table(moves: list[Result]) -> str:
    """Operations that only move data, and what their rooflines count."""
    rows, notes = [], {}
    for row in moves:
        mark = notes.setdefault(row["counted"], len(notes) + 1)
        rows.append(
            [
                f"{row['what']} ({mark})",
                f"{row['channels']} {row['dtype']}" if row["channels"] else "",
                _number(row["floor_ms"], ".4f"),
                _number(row.get("ms"), ".4f"),
                _number(row["wall_ms"], ".3f"),
                _number(row["waits"], "d"),
                _number(row["over_floor"], ".2f"),
                _number(row.get("backward_ms"), ".4f"),
                _number(row.get("backward_over_floor"), ".2f"),
            ]
        )
    header = [
        "operation", "C", "roofline ms", "device ms", "wall ms", "waits for the GPU", "time / roofline",
        "backward ms", "time / roofline",
    ]  # fmt: skip
    said = " ".join(f"({mark}) {text}." for text, mark in notes.items())
    return f"{_markdown(header, rows)}\n\nRooflines count, once each: {said}"


# ---- accuracy ----------------------------------------------------------------------------------------------


def _gpus_first(results: list[Result], key: str) -> list[Result]:
    """Results that have `key`, those of a CPU last."""
    return sorted((r for r in results if key in r), key=lambda r: r.get("arch") == "cpu")


def _scene(result: Result) -> str:
    neighbours = {int(v): count / result["voxels"] for v, count in result["pairs"].items()}
    each = ", ".join(f"{neighbours[v]:.1f} of {v}" for v in sorted(neighbours))
    return f"{result['voxels']:,} voxels with {each} neighbours, {result['repeats']} runs a row"


def _worst(rows: Iterable[Result], key: str) -> float | None:
    return max((float(row[key]) for row in rows), default=None)


#: Channel counts of the README's accuracy table.
_SHOWN = (8, 32, 128, 512)


def accuracy_table(results: list[Result]) -> str:
    """The sweep's modes, of a GPU if there is one: errors by channels, and what is nearest to its bound."""
    blocks = []
    for result in _gpus_first(results, "sweep")[:1]:
        ran = [row for row in result["sweep"] if not row["verdict"].startswith("not run")]
        rows = []
        for mode in dict.fromkeys(row["mode"] for row in ran):
            mine = [row for row in ran if row["mode"] == mode]
            forward = [row for row in mine if (row["op"], row["volume"]) == ("fprop", 27)]
            signed = [row for row in forward if row["family"] == "signed"]
            tight = max(mine, key=lambda row: row["ratio"])
            rows.append(
                [
                    mode.replace(" acc ", ", "),
                    *(
                        _number(_worst((r for r in signed if r["channels"] == c), "rel_l2"), ".1e")
                        for c in _SHOWN
                    ),
                    _number(_worst(forward, "max_eta"), ".1e"),
                    f"{tight['ratio']:.0%} ({tight['op']}, {tight['family']}, C = {tight['channels']})",
                    str(sum(row["nonfinite"] for row in mine)),
                ]
            )
        header = [
            "inputs, accumulator",
            *(f"rel-L2, C = {c}" for c in _SHOWN),
            "max eta",
            "nearest to its bound",
            "non-finite",
        ]
        counts = _counts(result)
        caption = f"**{result['card']}**, {_scene(result)}: {counts}; {_origin(result, result['torch'])}."
        blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "No sweep has been recorded yet; `voxmma sweep` shows the errors here."


def _counts(result: Result) -> str:
    """Rows measured, failed, not run, left out."""
    verdicts = [row["verdict"] for row in result["sweep"]]
    not_run = sum(verdict.startswith("not run") for verdict in verdicts)
    failed = sum(verdict != "ok" for verdict in verdicts) - not_run
    left = sum(part["rows"] for part in result["left_out"])
    text = f"{len(verdicts):,} rows, {failed or 'none'} of them above a bound or otherwise wrong"
    text += f", {not_run} with another accumulator than asked for" if not_run else ""
    return text + (f", {left:,} left out for want of time" if left else "")


def _in_docs(results: list[Result]) -> list[tuple[Result, list[Result]]]:
    """(sweep, its rows that docs show): all of the first card, of the others those of 3x3x3."""
    found = _gpus_first(results, "sweep")
    return [
        (result, [row for row in result["sweep"] if result is found[0] or row["volume"] == 27])
        for result in found
    ]


def sweep_table(results: list[Result]) -> str:
    """A line an op, kernel volume and mode: the worst family at each number of channels, and its bound."""
    blocks = []
    for result, shown in _in_docs(results):
        channels = sorted({row["channels"] for row in shown})
        lines = []
        groups: dict[tuple[Any, ...], dict[int, list[Result]]] = {}
        for row in shown:
            group = groups.setdefault((row["op"], row["volume"], row["mode"]), {})
            if not row["verdict"].startswith("not run"):
                group.setdefault(row["channels"], []).append(row)
        for (op, volume, mode), group in groups.items():
            cells = []
            for c in channels:
                rows = group.get(c, [])
                if not rows:
                    cells.append("–")
                    continue
                worst = max(rows, key=lambda row: float(row["max_eta"]))
                wrong = " **wrong**" if any(row["verdict"] != "ok" for row in rows) else ""
                cells.append(f"{float(worst['max_eta']):.1e} of {worst['bound']:.1e}{wrong}")
            lines.append([op, str(volume), mode.replace(" acc ", ", "), *cells])
        header = ["op", "K", "inputs, accumulator", *(f"C = {c}" for c in channels)]
        left = ""
        if result["left_out"]:
            parts = (
                f"{p['rows']} rows of {p['op']}, K = {p['volume']}, C = {p['channels']}"
                for p in result["left_out"]
            )
            left = f"\n\nLeft out for want of time: {'; '.join(parts)}."
        caption = f"**{result['card']}**, {_scene(result)}; {_origin(result, result['torch'])}."
        blocks.append(f"{caption}\n\n{_markdown(header, lines)}{left}")
    return "\n\n".join(blocks) or "No sweep has been recorded yet."


def published_table(results: list[Result]) -> str:
    """Published differences of fp16 from fp32 accumulators beside ours."""
    having = [r for r in _gpus_first(results, "sweep") if r["published"]]
    if not having:
        return "No comparison has been recorded yet; `voxmma sweep` makes one."
    header = ["C", "published"]
    for result in having:
        header += [
            f"{result['card']}: fp16 against fp32 accumulator",
            "against a reference that rounds once an offset",
        ]
    lines = []
    for i, line in enumerate(having[0]["published"]):
        cells = [str(line["channels"]), f"{line['published']:.1e}"]
        for result in having:
            ours = result["published"][i]
            cells += [f"{ours['difference']:.1e}", f"{ours['per_offset']:.1e}"]
        lines.append(cells)
    return _markdown(header, lines)


# ---- what was proved on a card -----------------------------------------------------------------------------


def _agreement(line: Result | None) -> str:
    if line is None:
        return "–"
    return (
        f"all {line['dots']:,}" if line["agree"] == line["dots"] else f"{line['agree']:,} of {line['dots']:,}"
    )


def emulator_table(results: list[Result]) -> str:
    """Agreement of the emulator with the hardware, by instruction and class of inputs."""
    blocks = []
    for result in results:
        if "emulator" not in result:
            continue
        lines = result["emulator"]
        inputs = list(dict.fromkeys(line["inputs"] for line in lines))
        rows = []
        for instruction in dict.fromkeys(line["instruction"] for line in lines):
            mine = {line["inputs"]: line for line in lines if line["instruction"] == instruction}
            cells = [_agreement(mine.get(name)) for name in inputs]
            rows.append([f"`{instruction}`", *cells])
        dots, agree = (sum(line[key] for line in lines) for key in ("dots", "agree"))
        rate = "every one" if agree == dots else f"{agree / dots:.9f} of them"
        caption = f"**{result['card']}**: {dots:,} dot products, {rate} equal bit by bit."
        wrong = "".join(
            f"\n\nFirst disagreement of `{line['instruction']}` on {line['inputs']}: "
            f"{line['first_disagreement']}"
            for line in lines
            if line["first_disagreement"]
        )
        blocks.append(f"{caption}\n\n{_markdown(['instruction', *inputs], rows)}{wrong}")
    return "\n\n".join(blocks) or "No comparison has been recorded yet."


def sanitizer_table(results: list[Result]) -> str:
    """What compute-sanitizer covered and found."""
    header = ["card", "tool", "tiles", "channels", "scenes", "runs", "errors or hazards", "commit, date"]
    rows = []
    for result in results:
        for entry in result.get("sanitizer", []):
            tiles = entry["tiles"]
            rows.append(
                [
                    result["card"],
                    entry["tool"],
                    f"{len(tiles)}: `{tiles[0]}` to `{tiles[-1]}`" if len(tiles) > 1 else f"`{tiles[0]}`",
                    ", ".join(map(str, entry["channels"])),
                    ", ".join(entry["scenes"]),
                    f"{entry['runs']}, {entry['wrong'] or 'none'} wrong",
                    str(entry["found"]),
                    f"{entry['commit']}, {entry['date']}",
                ]
            )
    return _markdown(header, rows) if rows else "No run has been recorded yet."


def ncu_table(results: list[Result]) -> str:
    """How busy ncu saw kernels keep the units that bound them."""
    blocks = []
    for result in results:
        if (found := result.get("ncu")) is None:
            continue
        rows = [
            [f"`{row['kernel']}`", _number(row["ms"], ".3f")]
            + [f"{row[f'{unit}_percent']:.0f}%" for unit in ("tensor", "shared")]
            for row in found["kernels"]
        ]
        header = ["kernel", "ms at ncu's clock", "tensor cores busy", "shared memory busy"]
        driver = f"driver {found['driver']}, " if found["driver"] else ""
        origin = f"{driver}commit {found['commit']}, {found['date']}"
        caption = f"**{found['scene']}** on {result['card']}; {origin}."
        blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "No run of ncu has been recorded yet."


def gate_table(results: list[Result]) -> str:
    """Verdicts of `voxmma tiles --gate` with their figures."""
    blocks = []
    for result in results:
        if "gate" not in result:
            continue
        names = ["overflow", "finite", "bound", "repeats", "budget", "gain"]
        rows = []
        for verdict in result["gate"]:
            details = {check["name"]: check for check in verdict["checks"]}
            cells = [
                "–"
                if name not in details
                else ("" if details[name]["passed"] else "failed: ") + details[name]["detail"]
                for name in names
            ]
            rows.append([f"`{verdict['subject']}`", *cells, "yes" if verdict["allowed"] else "no"])
        board = result["board"]
        speeds = (
            "" if board is None else f": matrix units add in fp16 {board['ratio']:.2f}x as fast as in fp32"
        )
        driver = f"driver {result['driver']}, " if result["driver"] else ""
        caption = f"**{result['card']}**{speeds}; {driver}commit {result['commit']}, {result['date']}."
        blocks.append(f"{caption}\n\n{_markdown(['tile', *names, 'inference mode takes it'], rows)}")
    return "\n\n".join(blocks) or "No verdicts have been recorded yet; `voxmma tiles --gate` makes them."


#: Kinds of forward tiles whose times are compared, and how their names end.
_KINDS = {
    "fp16, fp32": "_acc32",
    "fp16, fp16": "_acc16",
    "fp16, fp16 promoted every 128": "_acc16p128",
    "fp16, fp16 promoted every 64": "_acc16p64",
    "fp16, fp16 promoted every offset": "_acc16poff",
    "fp16, fp16 promoted every 32": "_acc16p32",
    "tf32, fp32": "_tf32",
    "fp32, 3xTF32": "_3xtf32",
    "fp32, plain FMAs": "simt_f32",
}


def cost_table(results: list[Result]) -> str:
    """Time of the fastest forward tile of each kind, over that of the fastest fp32-accumulator tile."""
    blocks = []
    for result in results:
        tiles = {n: t for n, t in result.get("tiles", {}).items() if "wgrad" not in n and "bf16" not in n}
        channels = sorted({c for times in tiles.values() for c in times}, key=int)
        rows = []
        base: dict[str, float] = {}
        for kind, ending in _KINDS.items():
            mine = [name for name in tiles if name.endswith(ending)]
            if not mine:
                continue
            cells, names = [], []
            for c in channels:
                name = min((n for n in mine if c in tiles[n]), key=lambda n: tiles[n][c]["ms"])
                base.setdefault(c, tiles[name][c]["ms"])
                names.append(name)
                cells += [f"{tiles[name][c]['ms']:.3f}", f"{tiles[name][c]['ms'] / base[c]:.2f}"]
            rows.append([kind, ", ".join(f"`{name}`" for name in dict.fromkeys(names)), *cells])
        if not rows:
            continue
        header = ["inputs, accumulator", "fastest tile"]
        for c in channels:
            header += [f"C = {c}: ms", "of fp32's"]
        caption = (
            f"**{result['card']}**, {result['scene']}; driver {result['driver']}, commit {result['commit']}, "
            f"{result['date']}."
        )
        blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "No times have been recorded yet."


def torch_table(results: list[Result]) -> str:
    """What each version of torch gave: built, and how many tests passed."""
    rows = [
        [
            row["torch"],
            row["python"],
            row["problem"] or "passed",
            f"{row['passed']:,}",
            f"{len(row['failed'])}",
            f"{row['skipped']:,}",
            f"`{row['tests']}`",
            f"{row['commit']}, {row['date']}",
        ]
        for result in results
        for row in result.get("torch_versions", [])
    ]
    header = ["torch", "Python", "outcome", "passed", "failed", "skipped", "of", "commit, date"]
    return _markdown(header, rows) if rows else "No version has been recorded yet."


# ---- plots -------------------------------------------------------------------------------------------------


def _plots(results: list[Result]) -> list[tuple[str, Result, int, str]]:
    """(file name, sweep, kernel volume, hash of its figures) of every plot in docs/."""
    found = []
    for result, shown in _in_docs(results):
        for volume in sorted({row["volume"] for row in shown}, key=lambda v: (v != 27, v)):
            rows = [row for row in shown if row["volume"] == volume]
            if len({row["channels"] for row in rows}) < 2:
                continue
            digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
            found.append((f"sweep-{slug(result['card'])}-k{volume}.png", result, volume, digest))
    return found


def plots_block(results: list[Result]) -> str:
    """The plots as images."""
    lines = [
        f"![Errors against channels on {result['card']}, kernel volume {volume}]({name})"
        for name, result, volume, _ in _plots(results)
    ]
    return "\n\n".join(lines) or "No sweep has been recorded yet."


def _speed_plots(results: list[Result]) -> list[tuple[str, str, Result, str]]:
    """(file name, kind, what benchmarks/benchplots.py draws, hash of its figures) of every plot of speed."""
    found: list[tuple[str, str, Result]] = []
    for result in results:
        for scene, part in result.get("scenes", {}).items():
            if "rates" in part and part["rows"]:
                rows = [
                    {**row, "scene": scene, "c_in": row["ci"], "c_out": row["co"]} for row in part["rows"]
                ]
                shown = {"device": result["card"], "environment": {"torch": part["torch"]}, "rows": rows}
                name = f"peers-{slug(result['card'])}-{slug(scene)}.png"
                found.append((name, "peers", {**shown, "rates": part["rates"]}))
        if "scaling" in result:
            found.append((f"scaling-{slug(result['card'])}.png", "scaling", result["scaling"]))
        if "training" in result:
            shown = {"device": result["card"], "runs": result["training"]["runs"]}
            found.append((f"training-{slug(result['card'])}.png", "training", shown))
    return [
        (*plot, hashlib.sha256(json.dumps(plot[2], sort_keys=True).encode()).hexdigest()[:16])
        for plot in found
    ]


def speed_plots_block(results: list[Result]) -> str:
    """The plots of speed as images."""
    titles = {
        "peers": "Speed against other libraries, and the roofline",
        "scaling": "Time a pair against voxels",
    }
    lines = [
        f"![{titles[kind]}, on {shown['device']}]({name})"
        for name, kind, shown, _ in _speed_plots(results)
        if kind in titles
    ]
    return "\n\n".join(lines) or "Nothing has been drawn yet."


def _carries(path: Path, digest: str) -> bool:
    """Whether a PNG says that it was drawn from the figures of this hash."""
    return path.exists() and f"Source\0{digest}".encode() in path.read_bytes()


#: What the file names of plots begin with.
PLOTS = ("sweep", "peers", "scaling", "training")


def stale_plots(results: list[Result], folder: Path) -> list[str]:
    """Plots that are missing, were drawn from other figures, or belong to none."""
    wanted = {name: digest for name, _, _, digest in [*_plots(results), *_speed_plots(results)]}
    wrong = [name for name, digest in wanted.items() if not _carries(folder / name, digest)]
    drawn = [path for kind in PLOTS for path in sorted(folder.glob(f"{kind}-*.png"))]
    return wrong + [path.name for path in drawn if path.name not in wanted]


def draw_plots(results: list[Result], folder: Path) -> None:
    """Draws the stale plots, and removes those that belong to no figures."""
    wanted = {name: (result, volume, digest) for name, result, volume, digest in _plots(results)}
    speed = {name: plot for name, *plot in _speed_plots(results)}
    for name in stale_plots(results, folder):
        if name in speed:
            import benchplots

            kind, shown, digest = speed[name]
            draw = {
                "peers": benchplots.draw_peers,
                "scaling": benchplots.draw_scaling,
                "training": draw_training,
            }[kind]
            draw(shown, folder / name, {"Source": digest})
            continue
        if name not in wanted:
            (folder / name).unlink()
            continue
        from voxmma.tools import sweep_show

        result, volume, digest = wanted[name]
        shown = {**result, "device": result["card"], "rows": result["sweep"]}
        sweep_show.plot(shown, folder / name, volume, {"Source": digest})


# ---- training and policies ---------------------------------------------------------------------------------


def _with_spread(values: list[float], pattern: str) -> str:
    """Mean, and the standard deviation where there are several."""
    text = format(statistics.fmean(values), pattern)
    return f"{text} ± {statistics.stdev(values):{pattern.lstrip('+')}}" if len(values) > 1 else text


REFERENCE = "always_f32"


def training_table(results: list[Result]) -> str:
    """Outcome of the training runs by policy, with the curves, and whether a policy differs, per card."""
    blocks = []
    for result in _gpus_first(results, "training"):
        part = result["training"]
        reference = part["runs"][REFERENCE]
        rows, apart = [], []
        for policy, runs in part["runs"].items():
            cells = [policy, f"{statistics.fmean(run['losses'][-1] for run in runs):.4f}"]
            for what in ("accuracy", "iou"):
                values = [100 * run[what] for run in runs]
                paired = [value - 100 * run[what] for value, run in zip(values, reference, strict=True)]
                cells.append(_with_spread(values, ".2f"))
                cells.append("" if policy == REFERENCE else _with_spread(paired, "+.2f"))
                spread = statistics.stdev([100 * run[what] for run in reference]) if len(runs) > 1 else 0.0
                if abs(statistics.fmean(paired)) > spread:
                    apart.append(f"{policy} in {'accuracy' if what == 'accuracy' else 'IoU'}")
            cells += [str(sum(run["skipped"] for run in runs))]
            cells.append(f"{statistics.fmean(run['seconds'] for run in runs):.1f}")
            rows.append(cells)
        header = [
            "policy", "last loss", "accuracy %", "against fp32", "mean IoU %", "against fp32", "skipped",
            "s a run",
        ]  # fmt: skip
        seeds = len(part["seeds"])
        verdict = (
            f"Further from {REFERENCE} than its own spread over the seeds: {', '.join(apart)}."
            if apart
            else f"No policy is further from {REFERENCE} than that varies over the seeds."
        )
        caption = (
            f"**{result['card']}**: {part['steps']} steps, {seeds} seeds; mean ± standard deviation over the "
            f"seeds, differences between runs of one seed. {_origin(part, part['environment']['torch'])}."
        )
        image = f"![Loss curves on {result['card']}](training-{slug(result['card'])}.png)"
        blocks.append(f"{caption}\n\n{_markdown(header, rows)}\n\n{verdict}\n\n{image}")
    return "\n\n".join(blocks) or "No run has been recorded yet."


def draw_training(shown: Result, path: Path, metadata: dict[str, str]) -> None:
    """The loss curves of training runs."""
    sys.path.insert(0, str(ROOT / "examples"))
    from common import draw_curves

    curves = {
        name: [[float("nan") if v is None else v for v in run["losses"]] for run in runs]
        for name, runs in shown["runs"].items()
    }
    draw_curves(curves, {name: name for name in curves}, path, f"sparse U-Net on {shown['device']}", metadata)


def policies_table(results: list[Result]) -> str:
    """Casts, errors and time of a training step by policy, per card."""
    blocks = []
    for result in _gpus_first(results, "policies"):
        part = result["policies"]
        rows = []
        for row in part["rows"]:
            graph = row["graph"]
            counts = f"{graph['inserted']} / {graph['removed']} / {graph['left']}"
            errors = [_number(row[name], ".1e") for name in ("out_rel_l2", "grad_rel_l2")]
            names = [row["network"], f"`{row['policy']}`"]
            rows.append([*names, str(row["casts"]), counts, *errors, _number(row["ms"], ".2f")])
        header = [
            "network", "policy", "casts a step", "graph: inserted / removed / left", "output", "gradients",
            "ms a step",
        ]  # fmt: skip
        sizes = "; ".join(f"{name}: {size}" for name, size in part["sizes"].items())
        caption = f"**{result['card']}**: {sizes}; {_origin(part, part['environment']['torch'])}."
        blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "Nothing has been recorded yet."


# ---- pages -------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[list[Result]], str]] = {
    "accuracy": accuracy_table,
    "cost": cost_table,
    "demo": demo_table,
    "emulator": emulator_table,
    "gate": gate_table,
    "network_rows": network_rows_table,
    "networks": networks_table,
    "operators": operators_table,
    "peers": peers_table,
    "plots": plots_block,
    "policies": policies_table,
    "published": published_table,
    "sanitizer": sanitizer_table,
    "ncu": ncu_table,
    "scaling": scaling_table,
    "small_sets": small_sets_table,
    "speed": speed_table,
    "speed_plots": speed_plots_block,
    "sweep": sweep_table,
    "torch": torch_table,
    "training": training_table,
}

_BLOCK = re.compile(r"(<!-- results:begin (\S+) -->\n).*?(<!-- results:end -->)", re.DOTALL)


def fill(text: str, results: list[Result]) -> str:
    """`text` with every marked block made anew.

    ValueError for an unknown name or a marker without its partner.
    """
    if (
        not text.count("<!-- results:begin ")
        == text.count("<!-- results:end -->")
        == len(_BLOCK.findall(text))
    ):
        raise ValueError("a results:begin or results:end marker has no partner")

    def block(match: re.Match[str]) -> str:
        if match[2] not in TABLES:
            raise ValueError(f"no table named {match[2]!r}; there are {', '.join(TABLES)}")
        return f"{match[1]}{TABLES[match[2]](results)}\n{match[3]}"

    return _BLOCK.sub(block, text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a table is stale")
    parser.add_argument("--readme", type=Path, help="only this page, and no plot")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    docs = ROOT / "docs"
    results = load(given.results)
    stale = []
    for page in [given.readme] if given.readme else [ROOT / "README.md", *sorted(docs.glob("*.md"))]:
        before = page.read_text()
        after = fill(before, results)
        if not given.check:
            page.write_text(after)
        elif after != before:
            stale.append(str(page))
    if given.readme is None:
        if given.check:
            stale += stale_plots(results, docs)
        else:
            draw_plots(results, docs)
    if stale:
        print(f"stale: {', '.join(stale)}; run python benchmarks/readme_tables.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
