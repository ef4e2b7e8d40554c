"""Adds raw benchmark files to benchmarks/results/<card>.json.

    python benchmarks/collect.py surface_512.json lidar_dense.json --driver 580.159.04
    python benchmarks/collect.py voxmma-demo/demo.json

Raw files are what `voxmma demo` writes, and what a peer benchmark writes: `info` and `results`, one file a
scene, all libraries in one run. benchmarks/readme_tables.py makes the README tables from the result files.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

Result = dict[str, Any]


def slug(name: str) -> str:
    """A device name as a file name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _commit() -> str:
    run = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()


def _row(entry: Result) -> Result:
    """One library on one shape, in our names. Units: ms, MiB; errors of output, input and weight gradient."""
    r = entry["r"]
    row: Result = {name: entry[name] for name in ("lib", "variant", "ci", "co", "dtype")}
    for ours, theirs in (
        ("forward_ms", "fwd_ms"),
        ("backward_ms", "bwd_ms"),
        ("dgrad_ms", "dgrad_ms"),
        ("wgrad_ms", "wgrad_ms"),
        ("step_ms", "step_ms"),
        ("map_ms", "kmap_ms"),
        ("map_mib", "map_MB"),
        ("forward_spread_ms", "fwd_p10p90"),
        ("backward_spread_ms", "bwd_p10p90"),
        ("rel_l2", "relL2"),
        ("max_eta", "maxc"),
    ):
        if r.get(theirs) is not None:
            row[ours] = r[theirs]
    return row


def collect(
    files: Iterable[Path], folder: Path, driver: str | None, commit: str, date: str, card: str | None = None
) -> list[Path]:
    """Adds raw files to the result file of their card and returns the files written.

    A scene or demo collected before is replaced. Each part keeps its own commit, date, torch and driver.
    """
    written = []
    for file in files:
        raw = json.loads(file.read_text())
        scene: str | None = None
        origin: Result = {"commit": commit, "date": date, "driver": driver}
        if raw.get("kind") == "demo":
            where = raw["environment"]
            name = card or (
                where["gpus"][0] if any(r["device"] == "cuda" for r in raw["rows"]) else where["cpu"]
            )
            rows = [{k: v for k, v in row.items() if k != "layers"} for row in raw["rows"]]
            value = {**origin, "environment": where, "scene": raw["scene"], "rows": rows}
        elif raw.get("info") and "results" in raw:
            info = raw["info"]
            name = card or info["gpu"]
            scene = Path(raw["coords"]).stem if ":" not in raw["coords"] else raw["coords"]
            failed = {
                f"{e['lib']} {e['variant']} {e['ci']}x{e['co']} {e['dtype']}": e["err"]
                for e in raw["results"]
                if "err" in e
            }
            value = {
                **origin,
                "torch": info["torch"],
                "voxels": info["N"],
                "pairs": info["P"],
                "repeats": raw["reps"],
                "rows": [_row(entry) for entry in raw["results"] if "fwd_ms" in entry.get("r", {})],
                "failed": failed,
            }
        else:
            raise SystemExit(f"{file}: neither a peer benchmark nor a demo result")
        path = folder / f"{slug(name)}.json"
        result: Result = json.loads(path.read_text()) if path.exists() else {"card": name}
        if scene is None:
            result["demo"] = value
        else:
            result.setdefault("scenes", {})[scene] = value
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")
        written.append(path)
    return sorted(set(written))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--driver", help="version of the GPU driver")
    parser.add_argument("--card", help="name of the device; default: what the file says")
    parser.add_argument("--commit", help="default: HEAD")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parser.add_argument("--date", default=today)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    commit = given.commit or _commit()
    for path in collect(given.files, given.results, given.driver, commit, given.date, given.card):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
