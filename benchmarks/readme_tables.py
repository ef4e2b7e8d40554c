"""Makes the benchmark tables of README.md from benchmarks/results/*.json.

    python benchmarks/readme_tables.py            # rewrite the tables; --check: exit 1 if they are stale

A table stands between `<!-- results:begin NAME -->` and `<!-- results:end -->` and is never typed.
benchmarks/collect.py makes the result files.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, Any]


def load(folder: Path) -> list[Result]:
    """Every result file, by file name."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


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


def speed_table(results: list[Result]) -> str:
    """voxmma (fp32 accumulator) against spconv in the same run, per card and scene."""
    blocks = []
    for result in results:
        for scene, part in result.get("scenes", {}).items():
            rows = []
            shapes = dict.fromkeys((row["ci"], row["co"], row["dtype"]) for row in part["rows"])
            for ci, co, dtype in shapes:
                group = [
                    row for row in part["rows"] if (row["ci"], row["co"], row["dtype"]) == (ci, co, dtype)
                ]
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
                        f"{ci}x{co} {dtype}",
                        *(
                            cell
                            for t, p, ratio in zip(times, peer, ratios, strict=True)
                            for cell in (_number(t, ".3f"), _number(p, ".3f"), _number(ratio, ".2f"))
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
            header = [
                "C_in x C_out", "forward ms", "spconv", "ratio", "backward ms", "spconv", "ratio",
                "map build ms", "map MiB", "rel-L2", "spconv's", "max eta",
            ]  # fmt: skip
            counts = f"{part['voxels']:,} voxels, {part['pairs'] / part['voxels']:.1f} neighbours each"
            caption = f"**{scene}** on {result['card']}: {counts}; {_origin(part, part['torch'])}."
            blocks.append(f"{caption}\n\n{_markdown(header, rows)}")
    return "\n\n".join(blocks) or "No GPU figures have been recorded yet."


TABLES: dict[str, Callable[[list[Result]], str]] = {"demo": demo_table, "speed": speed_table}

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
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    before = given.readme.read_text()
    after = fill(before, load(given.results))
    if not given.check:
        given.readme.write_text(after)
    elif after != before:
        print(f"{given.readme} is stale: run python benchmarks/readme_tables.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
