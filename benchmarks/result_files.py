"""Result files, and what all tables made of them have in common."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])


def number(value: float | None, pattern: str, unit: str = "") -> str:
    return "–" if value is None else format(value, pattern) + unit


def origin(part: Result, torch: str) -> str:
    driver = f", driver {part['driver']}" if part["driver"] else ""
    return f"torch {torch}{driver}, commit {part['commit']}, {part['date']}"


def gpus_first(results: list[Result], key: str) -> list[Result]:
    """Results that have `key`, those of a CPU last."""
    return sorted((r for r in results if key in r), key=lambda r: r.get("arch") == "cpu")
