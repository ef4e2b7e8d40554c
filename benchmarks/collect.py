"""Adds raw benchmark files to benchmarks/results.

    python benchmarks/collect.py surface_512.json lidar_dense.json --driver 580.159.04
    python benchmarks/collect.py voxmma-demo/demo.json
    python benchmarks/collect.py voxmma-peers/peers.json voxmma-scaling/scaling.json operators.json
    python benchmarks/collect.py networks.json                  # of benchmarks/networks.py
    python benchmarks/collect.py small.json host.json           # of benchmarks/small_sets.py, host_times.py
    python benchmarks/collect.py reproducible.json ddp.json upstream.json
    python benchmarks/collect.py voxmma-sweep/sweep.json --driver 580.159.04
    python benchmarks/collect.py gate.json                      # of voxmma tiles --gate --json
    python benchmarks/collect.py unet.json policies.json        # of examples/train_unet.py, policy_table.py
    python benchmarks/collect.py --sanitizer memcheck=memory.log racecheck=races.log --card "NVIDIA H100"
    python benchmarks/collect.py --ncu surface_512=raw.csv --card "NVIDIA H100"

`voxmma demo`, benchmarks/peerbench.py, scaling.py, operators.py, networks.py, small_sets.py, host_times.py,
reproducible.py, ddp.py and upstream.py, and foreign peer benchmarks (`info` and `results`, one file a scene,
all libraries in one run) go into <card>.json; rows of peerbench.py are added to those of the same commit and
scene, rows of networks.py and what follows it to those of the same commit. A sweep goes into
sweep-<card>.json (one of the same commit and scene is added to), verdicts of `voxmma tiles --gate` into
gate-<card>.json, training runs into training-<card>.json, the policies' casts, errors and times into
policies-<card>.json, what compute-sanitizer printed around benchmarks/sanitize.py into sanitizer-<card>.json,
and a table of ncu (`--page raw --csv`) of one launch a kernel into ncu-<card>.json (sections "Proving a
kernel" and "Figures" of CONTRIBUTING.md).
benchmarks/readme_tables.py makes the tables of README and docs from the result files.
"""

from __future__ import annotations

import argparse
import csv
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


# ---- benchmarks/peerbench.py -------------------------------------------------------------------------------

#: Fields of a row that name it, in the names of result files.
_PEER_KEY = ("lib", "variant", "ci", "co", "kernel", "stride", "dtype", "transposed")
#: By kind of a run that is kept whole: what is kept of it beside its rows, and the fields that name a row.
_RUNS = {
    "networks": (("environment", "repeats", "dtype"), ("network", "scene", "batch", "lib")),
    "small_sets": (("environment", "repeats", "spconv"), ("voxels", "channels", "lib", "variant")),
    "host_times": (("environment", "voxels", "channels"), ("what",)),
    "reproducible": (("environment",), ("lib", "processes", "network", "optimiser", "scene", "steps")),
    "ddp": (("environment", "steps", "rounds"), ("network", "scene", "lib", "processes", "options")),
    "upstream": (("environment", "repeats"), ("repository", "network", "dtype")),
}
_PEER_SAME = ("commit", "driver", "torch", "voxels", "repeats", "limits")


def _peers(raw: Result, former: Result, origin: Result) -> Result:
    """The scenes of a run of benchmarks/peerbench.py, added to `former` scenes of the same commit."""
    scenes = dict(former)
    for scene, voxels in raw["scenes"].items():
        part: Result = {
            **origin,
            "driver": origin["driver"] or raw["driver"],
            "torch": raw["environment"]["torch"],
            "voxels": voxels,
            "repeats": raw["repeats"],
            "rates": raw["rates"],
            **({"limits": raw["limits"]} if any(raw["limits"]) else {}),
        }
        known = scenes.get(scene, {})
        same = all(known.get(name) == part.get(name) for name in _PEER_SAME) and "rates" in known
        rows = {_peer_key(row): row for row in known["rows"]} if same else {}
        failed = dict(known["failed"]) if same else {}
        pairs = known["pairs"] if same else 0
        for given in raw["rows"]:
            if given["scene"] != scene:
                continue
            row = {
                {"c_in": "ci", "c_out": "co"}.get(name, name): _figures(value)
                for name, value in given.items()
                if name not in ("scene", "voxels")
            }
            key = _peer_key(row)
            label = "{} {} {}x{} k{}{}{} {}".format(*key[:5], "t" if key[-1] else "s", *key[5:7])
            rows.pop(key, None)
            failed.pop(label, None)
            if "left_out" in row:
                continue
            if "forward_ms" not in row:
                failed[label] = row.get("error") or row["unsupported"]
                continue
            rows[key] = row
            if (row["kernel"], row["stride"]) == (3, 1):
                pairs = row["pairs"]
        by_layer = sorted(rows.values(), key=_by_layer)
        scenes[scene] = {**part, "pairs": pairs, "rows": by_layer, "failed": failed}
    return scenes


def _peer_key(row: Result) -> tuple[Any, ...]:
    """What names a row; those of before there were transposed layers do not say that they are none."""
    return tuple(row.get(name, False) if name == "transposed" else row[name] for name in _PEER_KEY)


def _by_layer(row: Result) -> tuple[Any, ...]:
    """Submanifold layers by kernel, strided and then transposed ones after them, small ones first."""
    kind = row.get("transposed", False), row["stride"], row["kernel"]
    return *kind, row["dtype"], row["ci"] * row["co"], row["ci"]


def _run(raw: Result, former: Result | None, origin: Result) -> Result:
    """A run of a kind of `_RUNS`, added to `former` where that is of the same commit and machine."""
    kept, key = _RUNS[raw["kind"]]
    part: Result = {
        **origin,
        "driver": origin["driver"] or raw["driver"],
        **{name: raw[name] for name in kept},
    }
    rows: dict[tuple[Any, ...], Result] = {}
    if former is not None and all(former[name] == part[name] for name in ("commit", "driver", *kept)):
        rows = {tuple(row[name] for name in key): row for row in former["rows"]}
    else:
        former = None
    for row in raw["rows"]:
        if "left_out" not in row:
            rows[tuple(row[name] for name in key)] = {name: _figures(value) for name, value in row.items()}
    if "absent" in raw:  # libraries that were not there, and have no row of an earlier part
        absent = {**((former or {}).get("absent") or {}), **raw["absent"]}
        part["absent"] = {
            lib: why for lib, why in absent.items() if lib not in {r["lib"] for r in rows.values()}
        }
    return {**part, "rows": list(rows.values())}


def _figures(value: Any) -> Any:
    return [_short(item) for item in value] if isinstance(value, list) else _short(value)


def _operators(raw: Result, origin: Result) -> Result:
    """The scenes of a run of benchmarks/operators.py."""
    part: Result = {
        **origin,
        "driver": origin["driver"] or raw["driver"],
        "torch": raw["environment"]["torch"],
        **{name: _short(raw[name]) for name in ("repeats", "bandwidth", "spconv")},
    }
    return {
        scene: {
            **part,
            **found,
            **{
                name: [{key: _figures(value) for key, value in row.items()} for row in found[name]]
                for name in ("maps", "pools", "moves")
            },
        }
        for scene, found in raw["scenes"].items()
    }


# ---- sweeps ------------------------------------------------------------------------------------------------

#: Fields of voxmma.tools.sweep.Row that are kept; the others follow from them.
SWEEP_COLUMNS = (
    "op", "mode", "family", "channels", "volume", "n", "accumulator", "tile", "max_eta", "p99_eta", "rel_l2",
    "max_rel", "nonfinite", "bound", "verdict",
)  # fmt: skip
_KEY = 5  # the first columns name a row
_SAME = ("commit", "driver", "torch", "build", "voxels", "repeats")


def _short(value: Any) -> Any:
    """A figure with four digits; infinite ones are strings already."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _sweep(raw: Result, former: Result | None, origin: Result) -> Result:
    """A sweep as it is kept, added to `former` where that is of the same commit, scene and repeats."""
    kept = ("arch", "torch", "build", "voxels", "pairs", "repeats", "seconds", "published")
    value: Result = {**origin, **{name: raw[name] for name in kept}}
    rows = {}
    if former is not None and all(former[name] == value[name] for name in _SAME):
        rows = {tuple(row[:_KEY]): row for row in former["rows"]}
        value["seconds"] += former["seconds"]
        value["pairs"] = {**former["pairs"], **value["pairs"]}
        value["published"] = value["published"] or former["published"]
    for row in raw["rows"]:
        listed = [_short(row[name]) for name in SWEEP_COLUMNS]
        rows[tuple(listed[:_KEY])] = listed
    missing = {(part["volume"], part["channels"], part["op"]): part["rows"] for part in raw["left_out"]}
    blocks = {(row[4], row[3], row[0]) for row in rows.values()} | set(missing)
    modes, families = ({row[i] for row in rows.values()} for i in (1, 2))
    left = []
    for volume, channels, op in sorted(blocks):
        here = sum((row[4], row[3], row[0]) == (volume, channels, op) for row in rows.values())
        if len(modes) * len(families) > here:
            count = len(modes) * len(families) - here
            left.append({"volume": volume, "channels": channels, "op": op, "rows": count})
    return {**value, "left_out": left, "columns": list(SWEEP_COLUMNS), "rows": list(rows.values())}


def _dump(result: Result) -> str:
    """JSON, the rows of a sweep one a line."""
    if "columns" not in result:
        return json.dumps(result, indent=1) + "\n"
    head = json.dumps({**result, "rows": []}, indent=1).removesuffix("[]\n}")
    return head + "[\n" + ",\n".join("  " + json.dumps(row) for row in result["rows"]) + "\n ]\n}\n"


# ---- the sanitizer -----------------------------------------------------------------------------------------

_RUN = re.compile(r"^(\w+) C=(\d+) (\w+): rel-L2 (\S+) (.*)$", re.MULTILINE)
_SUMMARY = re.compile(r"^=+ (?:(ERROR) SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", re.MULTILINE)


def sanitizer_log(text: str) -> Result:
    """What a log of `compute-sanitizer --tool TOOL python benchmarks/sanitize.py` covers and found.

    Returns:
        tiles, channels, scenes (sorted lists), runs, wrong (runs above their error bound), found (errors or
        hazards).

    Raises:
        ValueError: the log has no run, or not the summary of a run that came to its end.
    """
    runs = _RUN.findall(text)
    summaries = _SUMMARY.findall(text)
    ended = re.search(r"^(\d+) runs, (\d+) above the bound$", text, re.MULTILINE)
    if not runs or not summaries or ended is None or int(ended[1]) != len(runs):
        raise ValueError("no run of benchmarks/sanitize.py that came to its end under compute-sanitizer")
    return {
        "tiles": sorted({run[0] for run in runs}),
        "channels": sorted({int(run[1]) for run in runs}),
        "scenes": sorted({run[2] for run in runs}),
        "runs": len(runs),
        "wrong": int(ended[2]),
        "found": sum(int(errors or hazards) for _, errors, hazards in summaries),
    }


def collect_sanitizer(logs: Iterable[str], folder: Path, card: str, origin: Result) -> Path:
    """Adds logs (TOOL=FILE) to sanitizer-<card>.json, one entry a tool: what its logs cover together."""
    path = folder / f"sanitizer-{slug(card)}.json"
    result: Result = json.loads(path.read_text()) if path.exists() else {"card": card, "sanitizer": []}
    new: dict[str, Result] = {}
    for given in logs:
        tool, _, name = given.partition("=")
        if not name or tool not in ("memcheck", "racecheck", "initcheck", "synccheck"):
            raise SystemExit(f"--sanitizer: expected such as memcheck=FILE, got {given!r}")
        try:
            found = sanitizer_log(Path(name).read_text(errors="replace"))
        except ValueError as error:
            raise SystemExit(f"{name}: {error}") from None
        entry = new.setdefault(tool, {"tool": tool, **origin})
        for key, value in found.items():
            listed = isinstance(value, list)
            entry[key] = sorted({*entry.get(key, []), *value}) if listed else entry.get(key, 0) + value
    result["sanitizer"] = [e for e in result["sanitizer"] if e["tool"] not in new] + list(new.values())
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump(result))
    return path


# ---- ncu ---------------------------------------------------------------------------------------------------

#: What is kept of a launch, by the names of ncu.
_NCU = {
    "ms": "gpu__time_duration.sum",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "shared_percent": "l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed",
}
_NCU_MS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


def ncu_rows(text: str) -> list[Result]:
    """Launches of a table of ncu: kernel (without its arguments) and the figures of `_NCU`.

    Raises:
        ValueError: no such table, a metric is not in it, or a kernel comes twice.
    """
    header, units, *launches = [*csv.reader(text.splitlines()), [], []]
    missing = [name for name in ("Kernel Name", *_NCU.values()) if name not in header]
    if missing:
        raise ValueError(f"no column {missing[0]}: expected the output of ncu --page raw --csv")
    rows: list[Result] = []
    for launch in filter(None, launches):
        found = dict(zip(header, launch, strict=True))
        kernel = re.sub(r"^void |\([^()]*\)$", "", found["Kernel Name"])
        row = {name: float(found[metric].replace(",", "")) for name, metric in _NCU.items()}
        row["ms"] *= _NCU_MS[units[header.index(_NCU["ms"])]]
        rows.append({"kernel": kernel, **{name: _short(value) for name, value in row.items()}})
    names = [row["kernel"] for row in rows]
    if not rows or len(set(names)) < len(names):
        raise ValueError("one launch a kernel is expected")
    return rows


def collect_ncu(given: str, folder: Path, card: str, origin: Result) -> Path:
    """Writes SCENE=FILE.csv to ncu-<card>.json."""
    scene, _, name = given.partition("=")
    if not name:
        raise SystemExit(f"--ncu: expected such as surface_512=raw.csv, got {given!r}")
    try:
        kernels = ncu_rows(Path(name).read_text())
    except ValueError as error:
        raise SystemExit(f"{name}: {error}") from None
    path = folder / f"ncu-{slug(card)}.json"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(_dump({"card": card, "ncu": {"scene": scene, **origin, "kernels": kernels}}))
    return path


# ---- all ---------------------------------------------------------------------------------------------------


def collect(
    files: Iterable[Path], folder: Path, driver: str | None, commit: str, date: str, card: str | None = None
) -> list[Path]:
    """Adds raw files to the result files of their card and returns the files written.

    A scene or demo collected before is replaced. Each part keeps its own commit, date, torch and driver.
    """
    written = []
    for file in files:
        raw = json.loads(file.read_text())
        scene: str | None = None
        origin: Result = {"commit": commit, "date": date, "driver": driver}
        kind = "gate" if raw.get("kind") == "gate" else "sweep" if "left_out" in raw else None
        if kind is not None:
            if raw["device"] == "cpu" and card is None:
                raise SystemExit(f"{file} was made on a CPU: name it with --card")
            name = card or raw["device"]
            path = folder / f"{kind}-{slug(name)}.json"
            folder.mkdir(parents=True, exist_ok=True)
            if kind == "sweep":
                former = json.loads(path.read_text()) if path.exists() else None
                made = _sweep(raw, former, origin)
            else:
                made = {
                    **origin,
                    "driver": driver or raw["driver"],
                    "board": raw["board"],
                    "gate": raw["verdicts"],
                }
            path.write_text(_dump({"card": name, **made}))
            written.append(path)
            continue
        if raw.get("kind") in ("training", "policies"):
            where = raw["environment"]
            name = card or (where["gpus"][0] if raw["device"] == "cuda" else where["cpu"])
            path = folder / f"{raw['kind']}-{slug(name)}.json"
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"card": name, raw["kind"]: {**origin, **raw}}, indent=1) + "\n")
            written.append(path)
            continue
        if raw.get("kind") in ("peers", "scaling", "operators", *_RUNS):
            path = folder / f"{slug(card or raw['device'])}.json"
            kept: Result = json.loads(path.read_text()) if path.exists() else {"card": card or raw["device"]}
            if raw["kind"] == "peers":
                part = "smaller" if any(raw["limits"]) else "scenes"
                kept[part] = _peers(raw, kept.get(part, {}), origin)
            elif raw["kind"] in _RUNS:
                kept[raw["kind"]] = _run(raw, kept.get(raw["kind"]), origin)
            elif raw["kind"] == "operators":
                kept["operators"] = {**kept.get("operators", {}), **_operators(raw, origin)}
            else:
                scaling = {**raw, **origin, "driver": driver or raw["driver"]}
                scaling["rows"] = [{n: _figures(v) for n, v in row.items()} for row in raw["rows"]]
                kept["scaling"] = scaling
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(kept, indent=1) + "\n")
            written.append(path)
            continue
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
            raise SystemExit(f"{file}: no peer benchmark, demo, sweep or gate result")
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
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--sanitizer", nargs="+", metavar="TOOL=LOG", default=[], help="needs --card")
    parser.add_argument("--ncu", metavar="SCENE=FILE.csv", help="needs --card")
    parser.add_argument("--driver", help="version of the GPU driver")
    parser.add_argument("--card", help="name of the device; default: what the file says")
    parser.add_argument("--commit", help="default: HEAD")
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parser.add_argument("--date", default=today)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args(arguments)
    if not given.files and not given.sanitizer and not given.ncu:
        parser.error("no file")
    if (given.sanitizer or given.ncu) and not given.card:
        parser.error("--sanitizer and --ncu need --card")
    commit = given.commit or _commit()
    for path in collect(given.files, given.results, given.driver, commit, given.date, given.card):
        print(path)
    origin = {"commit": commit, "date": given.date, "driver": given.driver}
    if given.sanitizer:
        print(collect_sanitizer(given.sanitizer, given.results, given.card, origin))
    if given.ncu:
        print(collect_ncu(given.ncu, given.results, given.card, origin))
    return 0


if __name__ == "__main__":
    sys.exit(main())
