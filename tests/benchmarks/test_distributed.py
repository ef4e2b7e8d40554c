"""benchmarks/reproducible.py, ddp.py and host_times.py on the CPU, and the tables of their results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import ddp
import reproducible
from conftest import script

collect, tables = script("collect"), script("readme_tables")
ORIGIN = ("--driver", "1.2", "--commit", "abc", "--date", "2026-01-01", "--card", "GPU Y")


def stored(raw: Any, folder: Path) -> dict[str, Any]:
    """What is loaded after a result was collected."""
    (folder / "raw.json").write_text(json.dumps(raw))
    assert collect.main([str(folder / "raw.json"), "--results", str(folder / "r"), *ORIGIN]) == 0
    (found,) = tables.load(folder / "r")
    return found  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "processes"),
    [
        ("cpu", 2),
        pytest.param("cuda", 1, marks=pytest.mark.gpu),
        pytest.param("cuda", 2, marks=pytest.mark.multigpu),
    ],
)
def test_a_training_has_the_same_bits_again(kind: str, processes: int, tmp_path: Path) -> None:
    """30 steps with autocast and GradScaler, on two CPU processes with gloo: in fresh processes, and taken up
    from a checkpoint."""
    file = tmp_path / "r.json"
    options = ["--device", kind, "--network", "small", "--steps", "30", "--voxels", "150"]
    assert reproducible.main([*options, "--processes", str(processes), "--out", str(file)]) == 0
    raw = json.loads(file.read_text())
    (row,) = raw["rows"]
    assert row["equal"] and row["equal_resumed"] and row["first_step"] is None and row["ranks_agree"]
    assert row["weights_apart"] == row["loss_apart"] == 0.0
    assert row["last_loss"] < 0.9 * row["first_loss"]  # it has been trained
    text = tables.reproducible_table([stored(raw, tmp_path)])
    assert "**GPU Y**" in text and "commit abc" in text
    assert f"| yes | yes | – | – | – | {'yes' if processes == 2 else '–'} |" in text


def training(seed: int, steps: int = 6) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "losses": torch.rand(steps, generator=generator) + 1,
        "sums": torch.arange(steps),
        "weights": torch.rand(50, generator=generator),
        "rest": "abc",
        "scale": 1.0,
    }


def test_a_single_bit_of_a_training_counts(tmp_path: Path) -> None:
    same = {"equal": True, "equal_resumed": True, "first_step": None, "weights_apart": 0.0, "loss_apart": 0.0}
    assert same.items() <= reproducible.compared([training(0)] * 3).items()

    def changed(part: str, place: int) -> dict[str, Any]:
        run = training(0)
        run[part].view(torch.int32 if part != "sums" else torch.int64)[place] += 1
        return run

    row = reproducible.compared([training(0), training(0), changed("sums", 4)])
    assert row["equal"] and not row["equal_resumed"] and row["first_step"] == 4
    row = reproducible.compared([training(0), changed("losses", 5), changed("losses", 2)])
    assert (
        not row["equal"]
        and not row["equal_resumed"]
        and row["first_step"] == 2
        and 0 < row["loss_apart"] < 1e-6
    )
    row = reproducible.compared([training(0), changed("weights", 7), training(0)])
    assert not row["equal"] and row["equal_resumed"] and 0 < row["weights_apart"] < 1e-6
    for part, value in (("rest", "abd"), ("scale", 2.0)):
        row = reproducible.compared([training(0), training(0) | {part: value}, training(0)])
        assert not row["equal"] and row["equal_resumed"]
    zeros = training(0) | {"weights": torch.zeros(50)}
    assert not reproducible.compared([zeros, zeros | {"weights": -torch.zeros(50)}, zeros])["equal"]
    head = {"lib": "spconv", "version": "9.9", "processes": 2, "network": "spunet", "optimiser": "sgd"}
    head |= {"scene": "room", "steps": 6, "ranks_agree": False}
    failed = {**head, "lib": "torchsparse", "error": "RuntimeError: no"}
    where = {"torch": "2.0"}
    raw = {"kind": "reproducible", "device": "x", "driver": None, "environment": where}
    raw |= {"absent": {"spconv-triton": "no module"}, "rows": [head | row, failed]}
    text = tables.reproducible_table([stored(raw, tmp_path)])
    assert "| spconv 9.9 | 2 | SpUNet, room, sgd, 6 steps | **no** | yes |" in text
    assert "* RuntimeError: no: torchsparse 9.9, SpUNet, room, sgd, 6 steps, 2" in text
    assert "* no module: spconv-triton" in text


def test_points_and_voxels_of_a_step_are_the_same(device: torch.device) -> None:
    """What voxmma is given as points is what the others are given as voxels; steps and processes differ."""
    import numpy as np

    import voxmma

    cells = np.unique(np.random.default_rng(0).integers(16, 40, (500, 3)), axis=0)
    first = reproducible.Sample(cells, 3, 0, device)
    x = voxmma.Voxels.from_points([first.points], [first.given], voxel_size=1.0)
    assert torch.equal(x.coords, first.coords)
    again = reproducible.Sample(cells, 3, 0, device)
    assert torch.equal(first.points, again.points) and torch.equal(first.given, again.given)
    for other in (reproducible.Sample(cells, 4, 0, device), reproducible.Sample(cells, 3, 1, device)):
        assert other.points.shape != first.points.shape or not torch.equal(other.points, first.points)


@pytest.mark.slow
def test_steps_under_ddp_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "d.json"
    options = ["--device", "cpu", "--steps", "1", "--rounds", "2", "--voxels", "60", "--out", str(file)]
    jobs = ["--job", "conv4:room", "--job", "conv4:nowhere", "--options", "default,static"]
    assert ddp.main([*options, *jobs]) == 1
    raw = json.loads(file.read_text())
    default, static, failed = raw["rows"]
    assert "KeyError: 'nowhere'" in failed["error"]
    for row, name in ((default, "default"), (static, "static")):
        assert row["options"] == name and row["gradients_agree"] and row["mean_rel"] < 1e-6
        assert row["efficiency"] == row["alone_ms"] / row["ddp_ms"] > 0 and row["processes"] == 2
    text = tables.ddp_table([stored(raw, tmp_path)])
    assert "medians of 2 rounds of 1 steps" in text and "3x3x3, C = 4, room" in text
    assert "KeyError: 'nowhere': voxmma" in text


def test_the_slowest_process_counts() -> None:
    times = [{"alone": [2.0, 4.0, 3.0], "beside": [4.0, 4.0, 4.0], "default": [5.0, 6.0, 9.0]}]
    times += [{"alone": [0.0, 0.0, 0.0], "beside": [3.0, 5.0, 3.0], "default": [7.0, 5.0, 1.0]}]
    found = [{"voxels": 9, "times": t, "checks": {"default": {"mean_rel": 0.0}}} for t in times]
    (row,) = ddp.rows_of(found)
    assert (row["alone_ms"], row["beside_ms"], row["ddp_ms"]) == (3.0, 4.0, 7.0)
    assert row["efficiency"] == 3 / 7 and row["of_beside"] == 4 / 7


def test_host_times_become_a_table(tmp_path: Path) -> None:
    rows = [{"what": "set", "us": 12.345}, {"what": "warm 3x3x3", "us": 8.1, "against_us": 9.0, "ratio": 0.9}]
    raw = {"kind": "host_times", "device": "x", "driver": None, "environment": {"torch": "2.0"}, "voxels": 30}
    text = tables.host_times_table([stored(raw | {"channels": 16, "rows": rows}, tmp_path)])
    assert "**GPU Y**: 30 voxels, C = 16; torch 2.0, driver 1.2, commit abc" in text
    assert "| set | 12.3 |" in text and "| warm 3x3x3 | 8.1 |" in text


@pytest.mark.parametrize(
    ("main", "flags", "said"),
    [
        (reproducible.main, ["--libraries", "nolib"], "nolib"),
        (reproducible.main, ["--steps", "0"], "at least 1"),
        (ddp.main, ["--libraries", "voxmma-engine"], "trains"),
        (ddp.main, ["--job", "spunet"], "NETWORK:SCENE"),
        (ddp.main, ["--options", "fast"], "fast"),
        (ddp.main, ["--rounds", "0"], "at least 1"),
    ],
)
def test_bad_arguments_are_refused(
    main: Any, flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*flags, "--device", "cpu"])
    assert said in capsys.readouterr().err
