"""benchmarks/networks.py: networks in other libraries, processes, budgets, and tables of its results."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import voxmma
from voxmma import models

import network_libraries
import networks
from conftest import random_coords, script
from network_scenes import GENERATED, MARGIN, scene

collect, tables = script("collect"), script("readme_tables")
CPU = torch.device("cpu")
ORIGIN = ("--driver", "1.2", "--commit", "abc", "--date", "2026-01-01")

SMALL = {
    "spunet": lambda: models.SparseUNet(3, 5, channels=(8, 6, 4, 7), blocks=(1, 2, 1, 2), stem_channels=4),
    "minkunet": lambda: models.SparseUNet(
        3, 5, channels=(8, 6), blocks=(2, 1), stem_channels=4, stem_kernels=(3, 3), widen="block"
    ),
    "features": lambda: models.SparseUNet(3, 0, channels=(8, 6), blocks=(1, 1), stem_channels=4),
    "second": lambda: models.SECONDBackbone(3),
    "resnet21d": lambda: models.ResNet21D(3, width=0.25),
    "vae": lambda: models.VAEDecoder((3, 6, 4), unpruned=0),
}


class Given:
    """What a library is told of an input."""

    def __init__(self, factor: int) -> None:
        self.batch, self.factor, self.shape = 2, factor, [64 // factor] * 3


@pytest.mark.parametrize("lib", [name for name, kind in network_libraries.LIBRARIES.items() if kind])
@pytest.mark.parametrize("name", SMALL)
def test_other_libraries_run_the_same_network(name: str, lib: str, device: torch.device) -> None:
    """Of plain torch in fp64; of others, where they are installed, in fp32."""
    kind = network_libraries.LIBRARIES[lib]
    assert kind is not None
    if importlib.util.find_spec(kind.package) is None:
        pytest.skip(f"{lib} is not installed")
    if kind.needs_gpu and device.type != "cuda":
        pytest.skip(f"{lib} runs on a GPU only")
    dtype, bound = (torch.float64, 1e-12) if lib == "torch" else (torch.float32, 1e-4)
    voxmma.set_fp32_precision("ieee")
    net = SMALL[name]().to(dtype).eval()
    for buffer_name, buffer in net.named_buffers():
        if buffer_name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    target = random_coords(150, 20, batch=2)
    target[:, 1:] += MARGIN
    factor = 4 if name == "vae" else 1
    coords = torch.unique(network_libraries.shrunk(target, factor), dim=0)
    feats = torch.randn(len(coords), 3, dtype=dtype)
    library = kind(device)
    copy = network_libraries.ported(net, library)[0].to(device, dtype).eval()
    net.to(device)
    coords, feats, target = coords.to(device), feats.to(device), target.to(device)
    with torch.no_grad():
        made = copy(library.start(coords, feats, Given(factor)), target)
        x = voxmma.Voxels(coords, feats, stride=factor)
        ours = net(x, voxmma.CoordSet(target)) if name == "vae" else net(x)
    expected = [ours[0], *ours[1]] if name == "vae" else [ours[-1] if isinstance(ours, list) else ours]
    assert len(made) == len(expected)
    for theirs, y in zip(made, expected, strict=True):
        rows = network_libraries.Index(library.coords(theirs)).find(y.coords)
        assert len(rows) == len(library.coords(theirs)) and (rows >= 0).all()
        assert float((library.feats(theirs)[rows] - y.feats).norm() / y.feats.norm()) < bound


def test_scenes_are_distinct_and_away_from_the_border() -> None:
    for name in (*GENERATED, "grid_500", "room/4"):
        cells = scene(name, None, 600)
        assert cells.dtype == np.int32 and len(np.unique(cells, axis=0)) == len(cells)
        assert cells.min() == MARGIN
        if "/" not in name:
            assert 300 < len(cells) < 1200, name
    assert len(scene("grid_500", None)) == 500
    assert len(scene("room/4", None, 600)) < len(scene("room", None, 600)) / 4


def test_scenes_come_from_a_folder(tmp_path: Path) -> None:
    rows = np.array([[5, 5, 5], [-3, 0, 1], [6, 5, 5]], np.int16)
    np.savez(tmp_path / "scan.npz", coords=rows)
    made = scene("scan", tmp_path)
    assert sorted((made - made.min(0)).tolist()) == [[0, 0, 0], [8, 5, 4], [9, 5, 4]]
    with pytest.raises(FileNotFoundError):
        scene("absent", tmp_path)
    with pytest.raises(KeyError):
        scene("absent", None)


def test_every_job_names_a_network_and_a_scene() -> None:
    for folder in (False, True):
        todo = networks.jobs(folder)
        assert len(set(todo)) == len(todo) > 30
        assert {job.network for job in todo} == set(networks.NETWORKS)
        bases = {job.scene.partition("/")[0] for job in todo if not job.scene.startswith("grid_")}
        assert folder or bases == set(GENERATED)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    """A run of the command on the CPU, and what it printed."""
    import contextlib
    import io

    file, text = tmp_path_factory.mktemp("networks") / "r.json", io.StringIO()
    with contextlib.redirect_stdout(text):
        code = networks.main(
            [
                *("--device", "cpu", "--libraries", "voxmma,torch", "--voxels", "150", "--repeats", "1"),
                *(
                    "--only",
                    "second:street:1",
                    "--only",
                    "vae:surface:1",
                    "--only",
                    "conv4:",
                    "--out",
                    str(file),
                ),
            ]
        )
    assert code == 0
    return json.loads(file.read_text()), text.getvalue()


@pytest.mark.slow
def test_the_command_measures_every_library(measured: tuple[dict[str, Any], str]) -> None:
    raw, text = measured
    names = [(row["network"], row["scene"], row["batch"], row["lib"]) for row in raw["rows"]]
    wanted = [("second", "street", 1), ("vae", "surface", 1), ("conv4", "grid_150", 1)]
    assert names == [(*job, lib) for job in wanted for lib in ("voxmma", "torch")]
    assert raw["kind"] == "networks" and raw["dtype"] == "fp32" and raw["absent"] == {}
    for row in raw["rows"]:
        assert not {"error", "train_error"} & set(row), row
        assert 0 < row["infer_least_ms"] <= row["infer_ms"] and row["train_ms"] > 0 and row["kept_ms"] > 0
        assert row["rel_l2"] == row["rel_l2_fp32"] < 1e-5  # both are fp32 here
        assert row["cells_missing"] == row["cells_more"] == 0 and row["voxels"] > 50
    assert [row["parameters"] for row in raw["rows"][:2]] == [711_872] * 2
    assert len(text.splitlines()) == len(raw["rows"])


@pytest.mark.slow
def test_results_become_tables(measured: tuple[dict[str, Any], str], tmp_path: Path) -> None:
    raw = json.loads(json.dumps(measured[0]))
    for row in raw["rows"]:
        if row["lib"] == "torch":
            row |= {"lib": "spconv", "version": "9.9", "infer_ms": 4.0, "train_error": "RuntimeError: no"}
        else:
            row |= {"infer_ms": 1.0, "idle": 0.25, "kernels": 12, "cells_more": 3}
            row |= {"gpu_ms": 0.6, "stream_ms": 0.8}
    raw["rows"].append({**raw["rows"][0], "lib": "torchsparse", "unsupported": "runs on a GPU only"})
    del raw["rows"][-1]["infer_ms"]
    raw["absent"] = {"flexgemm": "no module named flexgemm"}
    (tmp_path / "raw.json").write_text(json.dumps(raw))
    options = [*ORIGIN, "--results", str(tmp_path / "r"), "--card", "GPU Y"]
    assert collect.main([str(tmp_path / "raw.json"), *options]) == 0
    (found,) = tables.load(tmp_path / "r")
    assert found["networks"]["absent"] == {"flexgemm": "no module named flexgemm"}
    text = tables.networks_table([found])
    assert "**GPU Y**, fp32, medians of 1" in text and "spconv 9.9" in text and "commit abc" in text
    text = tables.network_rows_table([found])
    assert "* RuntimeError: no: spconv 9.9, SECOND backbone, street" in text
    assert "* runs on a GPU only: torchsparse" in text and "cells -0 +3" in text
    assert "| 25% | 0.800 (25%) | 12 |" in text
    assert "* no module named flexgemm: flexgemm" in text
    part = {**raw, "rows": [{**raw["rows"][0], "infer_ms": 2.0}]}  # the same commit: one row is replaced
    (tmp_path / "raw.json").write_text(json.dumps(part))
    assert collect.main([str(tmp_path / "raw.json"), *options]) == 0
    (again,) = tables.load(tmp_path / "r")
    assert (
        len(again["networks"]["rows"]) == len(raw["rows"]) and again["networks"]["rows"][0]["infer_ms"] == 2.0
    )
    assert collect.main([str(tmp_path / "raw.json"), *options, "--commit", "def"]) == 0
    (again,) = tables.load(tmp_path / "r")
    assert len(again["networks"]["rows"]) == 1


def run(**options: Any) -> list[dict[str, Any]]:
    job = networks.Job("conv4", "grid_100")
    return networks.run([job], options.pop("libraries", ["torch"]), CPU, repeats=1, **options)["rows"]


def test_what_fails_is_recorded() -> None:
    # One voxel: norms cannot be trained on it.
    jobs = [networks.Job("second", place) for place in ("nowhere", "grid_1")]
    missing, single = networks.run(jobs, ["torch"], CPU, repeats=1)["rows"]
    assert missing["error"] == "scene: KeyError: 'nowhere'"
    assert single["error"].startswith("reference: ValueError: Expected more than 1 value")
    (row,) = run(budget=0.0)
    assert "no time" in row["left_out"] and "infer_ms" not in row
    if networks.missing("spconv-triton") is None:
        (row,) = run(libraries=["spconv-triton"])
        assert "GPU only" in row["unsupported"]


class Counting:
    """Stands for a library's process; every answer is another."""

    asked = 0
    absent = None

    def __init__(self, lib: str, *_: Any) -> None:
        self.lib = lib

    def start(self) -> None: ...
    def close(self) -> None: ...
    def ready(self, timeout: float) -> dict[str, Any]:
        return {}

    def ask(self, job: dict[str, Any], timeout: float) -> dict[str, Any]:
        if self.lib == "reference":
            return {}
        Counting.asked += 1
        return {"infer_ms": float(Counting.asked), "cells_missing": 0, "cells_more": 0}


def test_what_was_measured_is_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(networks, "Worker", Counting)
    file = tmp_path / "r.json"
    options = ["--device", "cpu", "--libraries", "torch", "--voxels", "100", "--out", str(file)]

    def rows(*flags: str) -> list[dict[str, Any]]:
        assert networks.main([*options, *flags]) == 0
        made: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
        return made

    (cut,) = rows("--only", "conv4:", "--budget", "0")
    assert "left_out" in cut
    (first,) = rows("--only", "conv4:")
    assert first["infer_ms"] > 0
    assert rows("--only", "conv4:") == [first]
    both = rows("--only", "conv4:", "--only", "conv16:")
    assert both[0] == first and both[1]["network"] == "conv16"
    again = rows("--only", "conv4:", "--again")
    assert again[0] == both[1] and again[1]["network"] == "conv4" and again[1] != first
    with pytest.raises(SystemExit):
        networks.main([*options, "--only", "conv4:", "--repeats", "2"])
    assert "has another repeats" in capsys.readouterr().err
    raw = json.loads(file.read_text())
    file.write_text(json.dumps({**raw, "device": "another"}))
    assert len(rows("--only", "conv4:", "--again")) == 1  # rows of another machine do not stay
    file.unlink()
    todo = networks.jobs(True)
    assert [key[:3] for key in map(networks.key, networks.run(todo, ["torch"], CPU, budget=0.0)["rows"])] == [
        (job.network, job.scene, job.batch) for job in todo
    ]


@pytest.mark.slow
def test_a_library_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """Neither rows nor silence: the reason stands in the result."""
    (tmp_path / "torchsparse").mkdir()
    (tmp_path / "torchsparse" / "__init__.py").write_text("raise ImportError('no such symbol')\n")
    kind = network_libraries.LIBRARIES["torchsparse"]
    assert kind is not None
    if importlib.util.find_spec("torchsparse") is not None:
        pytest.skip("torchsparse is installed")
    assert networks.missing("torchsparse") == "no module named torchsparse"
    options = ["--device", "cpu", "--libraries", "torchsparse,torch", "--voxels", "50", "--repeats", "1"]
    options += ["--only", "conv4:", "--path", str(tmp_path), "--out", str(tmp_path / "r.json")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", list(sys.path))
        assert networks.main(options) == 0
    raw = json.loads((tmp_path / "r.json").read_text())
    assert raw["absent"] == {"torchsparse": "ImportError: no such symbol"}
    assert [row["lib"] for row in raw["rows"]] == ["torch"]


@pytest.mark.slow
def test_a_process_that_says_nothing_or_dies_is_started_again(tmp_path: Path) -> None:
    np.save(tmp_path / "cells.npy", scene("grid_100", None))
    task = {
        "job": {"network": "conv4", "scene": "grid_100", "batch": 1},
        "cells": str(tmp_path / "cells.npy"),
    }
    task["reference"] = str(tmp_path / "reference.pt")
    worker = networks.Worker("reference", ["--device", "cpu", "--repeats", "1"], tmp_path / "log")
    try:
        assert worker.ask(task, 0.0) == {"error": "no answer in 0 s"}
        assert worker.ask(task, 300.0).keys() == {"seconds"} and (tmp_path / "reference.pt").exists()
        assert worker.process is not None
        worker.process.kill()
        assert worker.ask(task, 300.0)["error"].startswith("the process died (-9)")
        assert worker.ask(task, 300.0).keys() == {"seconds"}
    finally:
        worker.close()


@pytest.mark.parametrize(
    "flags", [["--libraries", "nolib"], ["--networks", "nonet"], ["--scenes", "/nowhere"]]
)
def test_unknown_names_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        networks.main([*flags, "--device", "cpu"])
    assert flags[1] in capsys.readouterr().err
