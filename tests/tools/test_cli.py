"""The command line, the demo behind it, the doctor, and the README tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import voxmma
from voxmma.data import scenes
from voxmma.dispatch import validation
from voxmma.tools import bench, demo, doctor
from voxmma.tools.cli import app
from voxmma.tuning import gate, machine
from voxmma.verify import accuracy

from conftest import Clean, script

ROOT = Path(__file__).resolve().parents[2]


def invoke(*arguments: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result


# ---- the program -------------------------------------------------------------------------------------------


def test_module_and_version(clean: Clean) -> None:
    code, said = clean(
        "import contextlib, io, runpy\n"
        "sys.argv[1:], text = ['--version'], io.StringIO()\n"
        "with contextlib.redirect_stdout(text):\n"
        "    try:\n        runpy.run_module('voxmma', run_name='__main__', alter_sys=True)\n"
        "    except SystemExit as exit:\n        found = [exit.code, text.getvalue()]"
    )
    assert code in (None, 0) and said.strip() == voxmma.__version__


def test_help_names_every_command() -> None:
    text = invoke("--help").output
    for name in ("demo", "doctor", "tiles", "report", "sweep", "compile", "tune"):
        assert name in text
        assert "--json" in invoke(name, "--help").output
    text = invoke("bench", "--help").output
    for name in ("layers", "run"):
        assert name in text
        assert "--json" in invoke("bench", name, "--help").output


def test_unknown_command_is_an_error() -> None:
    invoke("frobnicate", code=2)


# ---- tiles -------------------------------------------------------------------------------------------------


def test_tiles_gate_measures_and_says_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = gate.run
    monkeypatch.setattr(gate, "run", lambda device, advance: honest(device, voxels=100, advance=advance))
    found = json.loads(invoke("tiles", "--gate", "--device", "cpu", "--json").stdout)
    assert (found["kind"], found["device"], found["board"]) == ("gate", "cpu", None)
    (verdict,) = found["verdicts"]
    assert verdict["subject"] == "cpu" and verdict["allowed"] is False
    assert [check["name"] for check in verdict["checks"]][-2:] == ["budget", "gain"]
    text = invoke("tiles", "--gate", "--device", "cpu").stdout
    assert "FAILED" in text and "refused, gain" in text and "rel-L2" in text
    bad = validation.Verdict("t", False, (validation.Check("bound", False, "max eta 1 of 0.1"),))
    monkeypatch.setattr(gate, "run", lambda device, advance: [bad])
    assert "found wrong: t" in invoke("tiles", "--gate", "--device", "cpu", code=1).output
    wrong = CliRunner().invoke(app, ["tiles", "--gate", "--device", "meta"])
    assert wrong.exit_code == 2 and "cannot be used here" in wrong.output


def test_tiles_prints_the_table_and_the_same_as_json() -> None:
    rows = json.loads(invoke("tiles", "--json").stdout)
    assert [row["name"] for row in rows] == [row.name for row in voxmma.tiles()]
    text = invoke("tiles").stdout
    for row in rows:
        assert row["name"] in text


# ---- doctor ------------------------------------------------------------------------------------------------


def test_doctor_reports_and_succeeds() -> None:
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["usable"] is True
    checks = {check["name"]: check for check in report["checks"]}
    assert checks["voxmma"]["found"].startswith(voxmma.__version__)
    assert torch.__version__ in checks["torch"]["found"]
    assert checks["convolution on cpu"]["status"] == "ok"
    assert "convolution on cpu" in invoke("doctor").stdout


def test_doctor_points_out_variables_that_do_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VOXMMA_FP16ACCUM", "1")
    (check,) = [c for c in doctor.run() if c.name == "variables"]
    assert check.status == "missing" and "VOXMMA_FP16ACCUM" in check.advice
    assert doctor.usable([check])


def test_doctor_fails_when_results_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    right = accuracy.reference_conv

    def wrong(x: Any, w: Any, pairs: Any, n_out: int) -> Any:
        y64, abs64 = right(x, w, pairs, n_out)
        y64[7, 3] += 1e-2 * abs64[7, 3]
        return y64, abs64

    monkeypatch.setattr(accuracy, "reference_conv", wrong)
    report = json.loads(invoke("doctor", "--json", code=1).stdout)
    assert report["usable"] is False
    assert "above the bound" in invoke("doctor", code=1).stdout


# ---- demo --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path, str]:
    """One run of the demo on coarse voxels: its result, its folder, the table that it printed."""
    folder = tmp_path_factory.mktemp("demo")
    arguments = ["demo", "--device", "cpu", "--voxel-size", "0.5", "--repeats", "1", "--out", str(folder)]
    table = invoke(*arguments).stdout
    return json.loads((folder / "demo.json").read_text()), folder, table


def test_demo_shows_every_mode(demo_run: tuple[dict[str, Any], Path, str]) -> None:
    result, folder, table = demo_run
    assert [row["mode"] for row in result["rows"]] == [mode.name for mode in demo.MODES]
    for row in result["rows"]:
        assert row["mode"] in table
        assert row["forward_ms"] > 0
        assert row["nonfinite"] == 0 and row["within_bound"] is True and 0 < row["of_bound"] <= 1
        assert len(row["layers"]) == 5
    assert (folder / "demo.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_demo_modes_ran_as_they_say(demo_run: tuple[dict[str, Any], Path, str]) -> None:
    rows = {row["mode"]: row for row in demo_run[0]["rows"]}
    ran = {mode: (row["requested"], row["decided_by"], row["accumulator"]) for mode, row in rows.items()}
    assert ran == {
        "fp32": ("fp32", "default", "fp32"),
        "bf16": ("fp32", "default", "fp32"),
        "fp16, flag False": ("fp32", "module", "fp32"),
        "fp16, flag True": ("fp16", "module", "fp16"),
        "fp16, inference_mode": ("fp16", "inference_mode", "fp32"),
    }
    assert rows["fp16, inference_mode"]["backward_ms"] is None


def test_demo_errors_are_ordered_as_the_formats_are(demo_run: tuple[dict[str, Any], Path, str]) -> None:
    rows = {row["mode"]: row for row in demo_run[0]["rows"]}
    fp32, bf16, fp16 = rows["fp32"], rows["bf16"], rows["fp16, flag False"]
    assert fp32["rel_l2"] < 1e-5 < fp16["rel_l2"] < bf16["rel_l2"] < 0.05
    assert rows["fp16, flag True"]["max_eta"] > fp16["max_eta"]  # or the fp16 accumulator never ran
    assert fp32["grad_rel_l2"] < fp16["grad_rel_l2"] < bf16["grad_rel_l2"] < 0.1


def test_demo_exits_with_an_error_above_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "MODES", demo.MODES[:1])
    tight = accuracy.Bound(eta=1e-12, floor=0.0, formula="none")
    monkeypatch.setattr(accuracy, "bound", lambda *_, **__: tight)
    arguments = ["demo", "--device", "cpu", "--voxel-size", "0.5", "--repeats", "1", "--out", str(tmp_path)]
    done = invoke(*arguments, "--json", code=1)
    assert "above the worst-case bound" in done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["within_bound"] is False and row["of_bound"] > 1


def test_demo_refuses_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "usable_devices", lambda: [torch.device("cpu")])
    monkeypatch.setattr(doctor, "usable_devices", lambda: [torch.device("cpu")])
    assert "voxmma doctor" in invoke("demo", "--device", "cuda", code=2).output


# ---- bench -------------------------------------------------------------------------------------------------


def test_bench_layers_measures_times_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    small = scenes.surface(16)
    monkeypatch.setitem(bench.SCENES, "surface", (lambda: small, lambda: small))
    arguments = [
        "bench",
        "layers",
        "--device",
        "cpu",
        "--repeats",
        "1",
        "--scene",
        "surface",
        "--channels",
        "8,12x20",
    ]
    rows = json.loads(invoke(*arguments, "--dtype", "fp16,fp32", "--fp16-accum", "--json").stdout)["rows"]
    shapes = [(row["c_in"], row["c_out"], row["dtype"], row["accumulator"]) for row in rows]
    per_shape = [("fp16", "fp32"), ("fp16", "fp16"), ("fp32", "fp32")]
    assert shapes == [(ci, co, *mode) for ci, co in ((8, 8), (12, 20)) for mode in per_shape]
    for row in rows:
        assert row["voxels"] == len(small) and row["within_bound"] is True
        assert min(row["forward_ms"], row["dgrad_ms"], row["wgrad_ms"], row["map_ms"]) > 0
    assert rows[1]["rel_l2"] > rows[0]["rel_l2"] > rows[2]["rel_l2"] > 0


@pytest.mark.parametrize(
    ("option", "value"), [("--scene", "moon"), ("--dtype", "fp8"), ("--channels", "0"), ("--device", "tpu")]
)
def test_bench_layers_names_what_it_cannot_run(option: str, value: str) -> None:
    output = invoke("bench", "layers", option, value, code=2).output
    assert option in output and value in output


# ---- README tables -----------------------------------------------------------------------------------------


collect, tables = script("collect"), script("readme_tables")


def test_readme_is_up_to_date() -> None:
    assert tables.main(["--check"]) == 0


def _peer_entry(lib: str, variant: str, forward: float, backward: float, error: float) -> dict[str, Any]:
    return {
        "lib": lib,
        "variant": variant,
        "ci": 64,
        "co": 64,
        "dtype": "fp16",
        "r": {
            "fwd_ms": forward,
            "bwd_ms": backward,
            "kmap_ms": 0.5,
            "map_MB": 60.0,
            "relL2": [error, error, error],
            "maxc": [error / 2, error / 2, error / 2],
        },
    }


def test_peer_figures_become_a_table(tmp_path: Path) -> None:
    raw = tmp_path / "surface_512.json"
    entries = [
        _peer_entry("voxmma", "fp32", 0.15, 0.5, 2e-4),
        _peer_entry("voxmma", "fp16", 0.10, 0.5, 2e-3),
        _peer_entry("spconv", "mask", 0.30, 2.0, 2e-3),
        _peer_entry("spconv", "split", 0.40, 1.0, 1e-3),
        {"lib": "spconv", "variant": "native", "ci": 64, "co": 64, "dtype": "fp16", "err": "out of memory"},
    ]
    info = {"gpu": "NVIDIA H100 80GB HBM3", "torch": "2.11.0+cu130", "N": 1000, "P": 13000}
    raw.write_text(
        json.dumps({"info": info, "reps": 40, "coords": "/data/surface_512.npz", "results": entries})
    )
    folder = tmp_path / "results"
    options = ["--results", str(folder), "--driver", "580.1", "--commit", "abc", "--date", "2026-01-01"]
    assert collect.main([str(raw), *options]) == 0

    (stored,) = tables.load(folder)
    scene = stored["scenes"]["surface_512"]
    assert (scene["driver"], scene["commit"], scene["date"], scene["repeats"]) == (
        "580.1",
        "abc",
        "2026-01-01",
        40,
    )
    assert scene["failed"] == {"spconv native 64x64 fp16": "out of memory"}

    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- results:begin speed -->\nold\n<!-- results:end -->\nb\n")
    where = ["--readme", str(readme), "--results", str(folder)]
    assert tables.main(["--check", *where]) == 1
    assert tables.main(where) == 0
    assert tables.main(["--check", *where]) == 0
    (line,) = re.findall(r"^\| 64x64 fp16 .*$", readme.read_text(), re.MULTILINE)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    # the fp32 accumulator's times over the fastest spconv variant of each column
    assert cells[1:7] == ["0.150", "0.300", "0.50", "0.500", "1.000", "0.50"]
    assert cells[9:] == ["2.0e-04", "2.0e-03", "1.0e-04"]


def test_markers_without_partner_or_table_are_errors() -> None:
    with pytest.raises(ValueError, match="partner"):
        tables.fill("<!-- results:begin speed -->\n", [])
    with pytest.raises(ValueError, match="nonsense"):
        tables.fill("<!-- results:begin nonsense -->\n<!-- results:end -->", [])
