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
from collections.abc import Callable
from functools import partial
from pathlib import Path

from accuracy_tables import (
    accuracy_table,
    cost_table,
    emulator_table,
    gate_table,
    in_docs,
    ncu_table,
    published_table,
    sanitizer_table,
    sweep_table,
    torch_table,
    wheels_table,
)
from result_files import Result, gpus_first, load, markdown, number, origin, slug
from speed_tables import (
    ddp_table,
    demo_table,
    host_times_table,
    network_rows_table,
    networks_table,
    operators_table,
    overview_table,
    peers_table,
    reproducible_table,
    scaling_table,
    small_sets_table,
    speed_table,
    upstream_table,
)

ROOT = Path(__file__).resolve().parent.parent

# ---- plots -------------------------------------------------------------------------------------------------


def _plots(results: list[Result]) -> list[tuple[str, Result, int, str]]:
    """(file name, sweep, kernel volume, hash of its figures) of every plot in docs/."""
    found = []
    for result, shown in in_docs(results):
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
    for result in gpus_first(results, "training"):
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
            f"seeds, differences between runs of one seed. {origin(part, part['environment']['torch'])}."
        )
        image = f"![Loss curves on {result['card']}](training-{slug(result['card'])}.png)"
        blocks.append(f"{caption}\n\n{markdown(header, rows)}\n\n{verdict}\n\n{image}")
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
    for result in gpus_first(results, "policies"):
        part = result["policies"]
        rows = []
        for row in part["rows"]:
            graph = row["graph"]
            counts = f"{graph['inserted']} / {graph['removed']} / {graph['left']}"
            errors = [number(row[name], ".1e") for name in ("out_rel_l2", "grad_rel_l2")]
            names = [row["network"], f"`{row['policy']}`"]
            rows.append([*names, str(row["casts"]), counts, *errors, number(row["ms"], ".2f")])
        header = [
            "network", "policy", "casts a step", "graph: inserted / removed / left", "output", "gradients",
            "ms a step",
        ]  # fmt: skip
        sizes = "; ".join(f"{name}: {size}" for name, size in part["sizes"].items())
        caption = f"**{result['card']}**: {sizes}; {origin(part, part['environment']['torch'])}."
        blocks.append(f"{caption}\n\n{markdown(header, rows)}")
    return "\n\n".join(blocks) or "Nothing has been recorded yet."


# ---- pages -------------------------------------------------------------------------------------------------

TABLES: dict[str, Callable[[list[Result]], str]] = {
    "accuracy": accuracy_table,
    "cost": cost_table,
    "ddp": ddp_table,
    "demo": demo_table,
    "emulator": emulator_table,
    "gate": gate_table,
    "host_times": host_times_table,
    "network_rows": network_rows_table,
    "networks": networks_table,
    "operators": operators_table,
    "overview": overview_table,
    "peers": peers_table,
    "plots": plots_block,
    "policies": policies_table,
    "published": published_table,
    "reproducible": reproducible_table,
    "sanitizer": sanitizer_table,
    "ncu": ncu_table,
    "scaling": scaling_table,
    "small_sets": small_sets_table,
    "speed": speed_table,
    "smaller": partial(speed_table, parts="smaller"),
    "speed_plots": speed_plots_block,
    "sweep": sweep_table,
    "torch": torch_table,
    "training": training_table,
    "upstream": upstream_table,
    "wheels": wheels_table,
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
