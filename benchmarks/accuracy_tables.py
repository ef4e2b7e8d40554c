"""Tables of errors and checks: sweeps, emulator, sanitizer, profiler, validation, versions of torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from result_files import Result, gpus_first, markdown, number, origin


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
    for result in gpus_first(results, "sweep")[:1]:
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
                        number(_worst((r for r in signed if r["channels"] == c), "rel_l2"), ".1e")
                        for c in _SHOWN
                    ),
                    number(_worst(forward, "max_eta"), ".1e"),
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
        caption = f"**{result['card']}**, {_scene(result)}: {counts}; {origin(result, result['torch'])}."
        blocks.append(f"{caption}\n\n{markdown(header, rows)}")
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


def in_docs(results: list[Result]) -> list[tuple[Result, list[Result]]]:
    """(sweep, its rows that docs show): all of the first card, of the others those of 3x3x3."""
    found = gpus_first(results, "sweep")
    return [
        (result, [row for row in result["sweep"] if result is found[0] or row["volume"] == 27])
        for result in found
    ]


def sweep_table(results: list[Result]) -> str:
    """A line an op, kernel volume and mode: the worst family at each number of channels, and its bound."""
    blocks = []
    for result, shown in in_docs(results):
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
        caption = f"**{result['card']}**, {_scene(result)}; {origin(result, result['torch'])}."
        blocks.append(f"{caption}\n\n{markdown(header, lines)}{left}")
    return "\n\n".join(blocks) or "No sweep has been recorded yet."


def published_table(results: list[Result]) -> str:
    """Published differences of fp16 from fp32 accumulators beside ours."""
    having = [r for r in gpus_first(results, "sweep") if r["published"]]
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
    return markdown(header, lines)


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
        blocks.append(f"{caption}\n\n{markdown(['instruction', *inputs], rows)}{wrong}")
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
    return markdown(header, rows) if rows else "No run has been recorded yet."


def ncu_table(results: list[Result]) -> str:
    """How busy ncu saw kernels keep the units that bound them."""
    blocks = []
    for result in results:
        if (found := result.get("ncu")) is None:
            continue
        rows = [
            [f"`{row['kernel']}`", number(row["ms"], ".3f")]
            + [f"{row[f'{unit}_percent']:.0f}%" for unit in ("tensor", "shared")]
            for row in found["kernels"]
        ]
        header = ["kernel", "ms at ncu's clock", "tensor cores busy", "shared memory busy"]
        driver = f"driver {found['driver']}, " if found["driver"] else ""
        origin = f"{driver}commit {found['commit']}, {found['date']}"
        caption = f"**{found['scene']}** on {result['card']}; {origin}."
        blocks.append(f"{caption}\n\n{markdown(header, rows)}")
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
        blocks.append(f"{caption}\n\n{markdown(['tile', *names, 'inference mode takes it'], rows)}")
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
        blocks.append(f"{caption}\n\n{markdown(header, rows)}")
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
    return markdown(header, rows) if rows else "No version has been recorded yet."


def wheels_table(results: list[Result]) -> str:
    """What installed wheels did with each torch and Python."""
    rows = [
        [
            row["torch"],
            row["python"],
            row["system"],
            row["installer"],
            f"{row['install_seconds']:.0f} s",
            row["problem"] or "passed",
            ", ".join(row["ran"]),
            f"{row['import_seconds']:.2f} s",
            f"{row['commit']}, {row['date']}",
        ]
        for result in results
        for row in result.get("wheels", [])
    ]
    header = [
        "torch",
        "Python",
        "system",
        "by",
        "install",
        "demo and smoke test",
        "on",
        "import",
        "commit, date",
    ]
    return markdown(header, rows) if rows else "No wheel has been recorded yet."
