"""benchmarks/collect.py and readme_tables.py: sweeps, gate verdicts, sanitizer logs, emulator reports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from voxmma.dispatch import validation
from voxmma.tools import sweep, sweep_show
from voxmma.tools.sweep import Grid
from voxmma.tuning import gate

from conftest import script

ROOT = Path(__file__).resolve().parents[2]
MODES = ("fp16 acc fp32", "fp16 acc fp16")
ORIGIN = ("--driver", "1.2", "--commit", "abc", "--date", "2026-01-01")


collect, tables = script("collect"), script("readme_tables")


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    grid = Grid(("fprop", "wgrad"), MODES, (8, 32), (27, 1), ("signed", "relu"))
    return sweep.run(torch.device("cpu"), grid, voxels=60)


def stored(raw: dict[str, Any], folder: Path, *options: str) -> dict[str, Any]:
    """What is loaded after a sweep was collected as that of a CPU named X."""
    file = sweep_show.write(folder / "raw", raw)
    chosen = [*ORIGIN, *options]
    assert collect.main([str(file), "--results", str(folder), "--card", "CPU X", *chosen]) == 0
    (found,) = tables.load(folder)
    return found


# ---- sweeps ------------------------------------------------------------------------------------------------


def test_a_collected_sweep_holds_every_row(measured: dict[str, Any], tmp_path: Path) -> None:
    found = stored(measured, tmp_path)
    assert (tmp_path / "sweep-cpu-x.json").exists() and found["card"] == "CPU X" and found["commit"] == "abc"
    assert len(found["sweep"]) == len(measured["rows"]) == 32 and not found["left_out"]
    for ours, raw in zip(found["sweep"], measured["rows"], strict=True):
        assert [ours[name] for name in collect.SWEEP_COLUMNS[:8]] == [
            raw[name] for name in collect.SWEEP_COLUMNS[:8]
        ]
        for name in ("max_eta", "p99_eta", "rel_l2", "bound", "ratio"):
            assert ours[name] == pytest.approx(raw[name], rel=2e-3)
    text = tables.accuracy_table([found])
    signed = next(
        row
        for row in measured["rows"]
        if (row["op"], row["volume"], row["channels"], row["family"], row["mode"])
        == ("fprop", 27, 32, "signed", "fp16 acc fp16")
    )
    assert f"{signed['rel_l2']:.1e}" in text
    assert "32 rows, none of them above a bound" in text and "commit abc, 2026-01-01" in text
    assert [line["channels"] for line in found["published"]] == [8, 32, 128, 256]


def test_a_wrong_row_shows_in_every_table(measured: dict[str, Any], tmp_path: Path) -> None:
    bad = json.loads(json.dumps(measured))
    bad["rows"][0] |= {"max_eta": float("inf"), "nonfinite": 3, "verdict": "3 non-finite cells"}
    found = stored(bad, tmp_path)
    assert "1 of them above a bound or otherwise wrong" in tables.accuracy_table([found])
    assert tables.sweep_table([found]).count("**wrong**") == 1


def test_parts_of_one_sweep_are_joined(measured: dict[str, Any], tmp_path: Path) -> None:
    first, second = (
        {**measured, "rows": [row for row in measured["rows"] if row["channels"] == c]} for c in (8, 32)
    )
    first["left_out"] = [{"volume": 27, "channels": 32, "op": "fprop", "rows": 4}]
    found = stored(first, tmp_path)
    assert len(found["sweep"]) == 16 and found["left_out"] == first["left_out"]
    assert "4 left out for want of time" in tables.accuracy_table([found])
    found = stored(second, tmp_path)
    assert len(found["sweep"]) == 32 and not found["left_out"]
    found = stored(second, tmp_path, "--commit", "def")  # another commit: nothing to be joined to
    assert len(found["sweep"]) == 16 and found["commit"] == "def"


def test_a_sweep_of_a_cpu_needs_a_name(measured: dict[str, Any], tmp_path: Path) -> None:
    file = sweep_show.write(tmp_path, measured)
    with pytest.raises(SystemExit, match="--card"):
        collect.main([str(file), "--results", str(tmp_path), *ORIGIN])


def test_plots_carry_the_figures_they_were_drawn_from(measured: dict[str, Any], tmp_path: Path) -> None:
    found = stored(measured, tmp_path / "results")
    names = ["sweep-cpu-x-k27.png", "sweep-cpu-x-k1.png"]
    (tmp_path / "sweep-other-k27.png").write_bytes(b"")
    assert tables.stale_plots([found], tmp_path) == [*names, "sweep-other-k27.png"]
    tables.draw_plots([found], tmp_path)
    assert tables.stale_plots([found], tmp_path) == []
    assert sorted(path.name for path in tmp_path.glob("*.png")) == sorted(names)
    assert all(f"({name})" in tables.plots_block([found]) for name in names)
    found["sweep"][0]["max_eta"] *= 2
    assert tables.stale_plots([found], tmp_path) == names[:1]


# ---- gate, sanitizer, emulator, times ----------------------------------------------------------------------


def test_gate_verdicts_are_collected(tmp_path: Path) -> None:
    verdicts = [
        validation.Verdict(
            "a",
            False,
            (validation.Check("bound", True, "max eta 1"), validation.Check("gain", False, "0.98x")),
        ),
        validation.Verdict("b", True, (validation.Check("bound", True, "max eta 2"),)),
    ]
    raw = {**gate.describe(torch.device("cpu"), verdicts), "device": "GPU Y", "driver": "9.9"}
    raw["board"] = {"fp16": 600.0, "fp32": 500.0, "ratio": 1.2}
    (tmp_path / "gate.json").write_text(json.dumps(raw))
    folder = tmp_path / "results"
    assert collect.main([str(tmp_path / "gate.json"), "--results", str(folder), *ORIGIN[2:]]) == 0
    (found,) = tables.load(folder)
    assert (found["card"], found["driver"], found["board"]["ratio"]) == ("GPU Y", "9.9", 1.2)
    assert [(row["subject"], row["allowed"]) for row in found["gate"]] == [("a", False), ("b", True)]
    assert [check["detail"] for check in found["gate"][0]["checks"]] == ["max eta 1", "0.98x"]


LOG = """========= COMPUTE-SANITIZER
sm80_f16_256x64x32_acc32 C=8 ball: rel-L2 2.1e-04 ok
sm80_f16_256x64x32_acc32 C=64 ball: rel-L2 2.1e-04 ok
sm90_f16_wgrad_64x64 C=8 box: rel-L2 1.1e-07 ok
3 runs, 0 above the bound
========= RACECHECK SUMMARY: {hazards} hazards displayed ({hazards} errors, 0 warnings)
"""


def test_sanitizer_logs_are_collected(tmp_path: Path) -> None:
    race, memory = tmp_path / "race.log", tmp_path / "memory.log"
    race.write_text(LOG.format(hazards=2))
    memory.write_text(LOG.split("========= RACECHECK")[0] + "========= ERROR SUMMARY: 0 errors\n")
    options = ["--results", str(tmp_path / "r"), "--card", "GPU Y", *ORIGIN]
    assert collect.main(["--sanitizer", f"racecheck={race}", f"memcheck={memory}", *options]) == 0
    (found,) = tables.load(tmp_path / "r")
    assert [(e["tool"], e["found"], e["runs"], e["wrong"]) for e in found["sanitizer"]] == [
        ("racecheck", 2, 3, 0),
        ("memcheck", 0, 3, 0),
    ]
    assert found["sanitizer"][0]["channels"] == [8, 64] and found["sanitizer"][0]["scenes"] == ["ball", "box"]
    race.write_text(LOG.format(hazards=0))  # the same tiles again: replaced
    assert collect.main(["--sanitizer", f"racecheck={race}", *options]) == 0
    (found,) = tables.load(tmp_path / "r")
    assert sorted((e["tool"], e["found"]) for e in found["sanitizer"]) == [("memcheck", 0), ("racecheck", 0)]


@pytest.mark.parametrize(
    "text",
    [
        LOG.split("3 runs")[0],  # cut off: no summary
        LOG.replace("3 runs", "4 runs").format(hazards=0),  # a line is missing
        "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",  # nothing ran
    ],
)
def test_a_log_that_proves_nothing_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "race.log").write_text(text)
    with pytest.raises(SystemExit, match="came to its end"):
        collect.main(["--sanitizer", f"racecheck={tmp_path / 'race.log'}", "--card", "Y", *ORIGIN])
    with pytest.raises(SystemExit, match="expected such as"):
        collect.main(["--sanitizer", "nonsense=x", "--card", "Y", *ORIGIN])


NCU = """"ID","Kernel Name","Block Size","gpu__time_duration.sum",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",\
"l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed"
"","","","us","%","%"
"0","void fprop_kernel<FpropConfig<half_t, float, 64, 64>>(ConvArgs)","(640, 1, 1)","1,216.51","50.09","74.8"
"1","void wgrad_kernel<WgradConfig<half_t, 64, 64>>(ConvArgs, WgradGrid)","(384, 1, 1)","281.69","33.9","56"
"""


def test_a_table_of_ncu_becomes_one_of_ours(tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text(NCU)
    options = ["--results", str(tmp_path / "r"), "--card", "GPU Y", *ORIGIN]
    assert collect.main(["--ncu", f"ball={tmp_path / 'raw.csv'}", *options]) == 0
    (found,) = tables.load(tmp_path / "r")
    text = tables.ncu_table([found])
    assert "**ball** on GPU Y" in text and "1.217" in text and "0.282" in text  # us became ms


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (NCU.replace("gpu__time", "time"), "no column gpu__time_duration.sum"),
        ("".join(NCU.splitlines(keepends=True)[:2]), "one launch a kernel"),
        (
            NCU.replace("wgrad_kernel<WgradConfig<half_t", "fprop_kernel<FpropConfig<half_t, float"),
            "one launch",
        ),
        ("", "no column Kernel Name"),
    ],
)
def test_other_tables_of_ncu_are_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "raw.csv").write_text(text)
    with pytest.raises(SystemExit, match=why):
        collect.main(["--ncu", f"ball={tmp_path / 'raw.csv'}", "--card", "Y", *ORIGIN])


def test_emulator_reports_show_agreement_and_disagreement(tmp_path: Path) -> None:
    line = {"device": "GPU Y", "instruction": "mma f16_f32", "inputs": "normal", "dots": 1000, "agree": 1000}
    lines = [
        {**line, "first_disagreement": ""},
        {**line, "inputs": "sparse", "agree": 998, "first_disagreement": "a=[1.0]"},
    ]
    (tmp_path / "emulator-gpu-y.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    text = tables.emulator_table(tables.load(tmp_path))
    assert "2,000 dot products, 0.999000000 of them equal" in text and "on sparse: a=[1.0]" in text


# ---- small sets --------------------------------------------------------------------------------------------


def test_times_of_small_sets_become_a_table(tmp_path: Path) -> None:
    assert "No run" in tables.small_sets_table([])
    file, folder = tmp_path / "small.json", tmp_path / "results"
    sizes = ["--voxels", "254", "--voxels", "5", "--channels", "8", "--repeats", "1", "--device", "cpu"]
    assert script("small_sets").main([*sizes, "--out", str(file)]) == 0
    raw = json.loads(file.read_text())
    times = {"forward_us": 16.78399, "forward_kernel_us": 12.542, "step_us": 1042.304}
    raw["rows"][0] |= {**times, "forward_spread_us": [16.448001, 17.152], "parts": 7}
    raw["rows"].append({**raw["rows"][0], "lib": "spconv", "variant": "implicit", "forward_us": 1.0})
    del raw["rows"][-1]["parts"]

    def stored(rows: list[dict[str, Any]], commit: str = "abc") -> dict[str, Any]:
        file.write_text(json.dumps({**raw, "driver": "1.3", "rows": rows}))
        options = ["--results", str(folder), "--card", "GPU Y", "--commit", commit, "--date", "2026-01-01"]
        assert collect.main([str(file), *options]) == 0
        (found,) = tables.load(folder)
        assert found["card"] == "GPU Y" and found["small_sets"]["driver"] == "1.3"
        return found

    found = stored(raw["rows"])
    assert [row["lib"] for row in found["small_sets"]["rows"]] == ["voxmma", "voxmma", "spconv"]
    assert found["small_sets"]["rows"][0]["forward_spread_us"] == [16.45, 17.15]
    text = tables.small_sets_table([found])
    assert "driver 1.3, commit abc" in text and "1042.0" in text
    again = stored([{**raw["rows"][1], "parts": 3}])["small_sets"][
        "rows"
    ]  # the same commit: one row is replaced
    assert [row.get("parts") for row in again] == [7, 3, None]
    assert len(stored(raw["rows"][:1], commit="def")["small_sets"]["rows"]) == 1


# ---- networks of other repositories -----------------------------------------------------------------------


def test_networks_of_other_repositories_become_a_table(tmp_path: Path) -> None:
    assert "No run" in tables.upstream_table([])
    row = {"repository": "Points", "network": "Net", "dtype": "fp16", "tolerance": 0.02, "voxels": 60123}
    row |= {"difference": 0.00312345, "agrees": True, "note": "", "reference": "spconv 2.3.8"}
    wrong = {**row, "network": "Other", "difference": 0.5, "agrees": False, "voxmma_ms": 1.5}
    none = {"repository": "Points", "network": "Third", "dtype": "fp16", "tolerance": 0.02}
    none |= {"difference": None, "agrees": None, "note": "runs in neither: a|b"}
    raw = {
        "kind": "upstream",
        "device": "GPU Y",
        "driver": "1.3",
        "environment": {"torch": "2.11"},
        "repeats": 9,
    }

    def shown(*rows: dict[str, Any]) -> list[str]:
        (tmp_path / "raw.json").write_text(json.dumps({**raw, "rows": rows}))
        assert collect.main([str(tmp_path / "raw.json"), "--results", str(tmp_path / "r"), *ORIGIN[2:]]) == 0
        found = tables.load(tmp_path / "r")
        assert found[0]["upstream"]["commit"] == "abc"
        return tables.upstream_table(found).splitlines()

    lines = shown(
        {**row, "voxmma_ms": 2.0, "spconv_ms": 5.0, "voxmma_rest_ms": 1.25, "spconv_rest_ms": 1.5},
        wrong,
        none,
    )
    assert lines[0].startswith("**GPU Y**, medians of 9 forwards") and "driver 1.3, commit abc" in lines[0]
    assert lines[4].startswith("| Points | Net | 60,123 | fp16 | spconv 2.3.8 | 3.1e-03 | yes (0.02) |")
    assert lines[4].endswith("| 2.00 | 5.00 | 0.40 | 1.25 |  |")
    assert "5.0e-01 | **no** (0.02) | 1.50 | – | – | – |" in lines[5]
    assert lines[6] == "| Points | Third | – | fp16 | – | – | – | – | – | – | – | runs in neither: a\\|b |"
    again = "\n".join(shown(row))  # the same commit: one row is replaced
    assert "0.40" not in again and again.count("| Points | Net |") == 1 and "Other" in again


# ---- one command -------------------------------------------------------------------------------------------


def test_one_command_collects_and_makes_the_tables() -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "--no-print-directory", "-n", "docs", "RAW=a.json b.json", "VENV=somewhere"]
    env = {name: value for name, value in os.environ.items() if "MAKE" not in name}  # not as make's child
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=env)
    wanted = ["benchmarks/collect.py a.json b.json", "benchmarks/readme_tables.py"]
    assert [line.split("bin/python ")[-1] for line in run.stdout.splitlines()[-2:]] == wanted


# ---- versions of torch -------------------------------------------------------------------------------------


def test_every_minor_version_of_torch_is_gone_over_once() -> None:
    versions = script("torch_versions")
    listed = "torch (2.15.0)\nAvailable versions: 2.15.0, 2.14.1, 2.14.0, 2.13.0+cpu, 2.13.0, 2.8.0, 2.7.1\n"
    assert versions.newest_patches(listed) == ["2.8.0", "2.13.0+cpu", "2.14.1", "2.15.0"]
    with pytest.raises(SystemExit, match="pip lists no versions"):
        versions.newest_patches("ERROR: no network")


def test_the_table_of_torch_versions_shows_what_failed(tmp_path: Path) -> None:
    versions = script("torch_versions")
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite><testcase classname='a' name='x'/><testcase classname='a' name='y'><skipped/>"
        "</testcase><testcase classname='a' name='z'><failure/></testcase></testsuite></testsuites>"
    )
    found = versions.counts(report)
    assert found == {"passed": 1, "skipped": 1, "failed": ["a::z"]}
    row = {"torch": "2.8.0", "problem": "test: exit code 1", "python": "3.11.7", "tests": "tests", **found}
    text = tables.torch_table([{"torch_versions": [{**row, "commit": "abc", "date": "2026-01-01"}]}])
    assert "test: exit code 1" in text
    assert tables.torch_table([]) == "No version has been recorded yet."


# ---- wheels ------------------------------------------------------------------------------------------------


def test_the_table_of_wheels_shows_what_failed() -> None:
    wheels = script("wheels")
    assert wheels.pinned()[0].startswith("2.8.") and len(wheels.pinned()) >= 8
    assert wheels.tag_of(sys.executable) == f"cp{sys.version_info[0]}{sys.version_info[1]}"
    row = {
        "torch": "2.8.0",
        "python": "3.12.1",
        "system": "Debian",
        "installer": "uv",
        "install_seconds": 7.6,
    }
    row |= {"problem": "demo: exit code 1", "ran": ["cpu float32"], "import_seconds": 0.31}
    text = tables.wheels_table([{"wheels": [{**row, "commit": "abc", "date": "2026-01-01"}]}])
    assert "demo: exit code 1" in text and "8 s" in text
    assert tables.wheels_table([]) == "No wheel has been recorded yet."
