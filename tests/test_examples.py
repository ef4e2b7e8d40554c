"""The training examples: they learn, under every policy they offer, and write their picture."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import script

EXAMPLES = Path(__file__).parents[1] / "examples"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(name: str, schedule: str, steps: int) -> Any:
    common, example = importlib.import_module("common"), importlib.import_module(f"train_{name}")
    return common.train(example.task(CPU), common.parse_schedule(schedule), steps, CPU, 0)


@pytest.mark.parametrize(
    ("name", "schedule", "steps", "accuracy"),
    [
        pytest.param("transformer", "0=always_f32", 120, 0.5, marks=pytest.mark.slow),
        ("transformer", "0=auto_mixed_bf16,40=always_f32", 80, 0.5),
        pytest.param("resnet", "0=always_f32", 40, 0.5, marks=pytest.mark.slow),
        ("resnet", "0=auto_mixed_bf16", 40, 0.5),
        pytest.param("unet", "0=always_f32", 20, 0.6, marks=pytest.mark.slow),
        pytest.param("unet", "0=auto_mixed", 20, 0.6, marks=pytest.mark.slow),
        pytest.param("unet", "0=fp16_sum", 20, 0.6, marks=pytest.mark.slow),
        ("unet", "0=auto_mixed_conservative,10=auto_mixed_bf16", 20, 0.6),
    ],
)
def test_an_example_learns(name: str, schedule: str, steps: int, accuracy: float) -> None:
    outcome = run(name, schedule, steps)
    assert sum(outcome.losses[-5:]) < 0.7 * sum(outcome.losses[:5])
    assert outcome.accuracy > accuracy


def test_the_same_start_and_batches_for_every_policy() -> None:
    one, two = (run("unet", schedule, 2).losses for schedule in ("0=always_f32", "0=auto_mixed"))
    assert abs(one[0] - two[0]) < 1e-2 * one[0] and one[0] != two[0]
    assert run("unet", "0=auto_mixed", 2).losses == two


@pytest.mark.slow
def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(EXAMPLES / "train_unet.py"), "--steps", "2"),
            *("--device", "cpu", "--policies", "always_f32,fp16_sum", "--seeds", "2", "--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "always_f32" in done.stdout and "fp16_sum" in done.stdout and "%" in done.stdout
    assert (tmp_path / "unet.png").read_bytes().startswith(b"\x89PNG")

    collect, tables = script("collect"), script("readme_tables")
    folder = tmp_path / "results"
    assert collect.main([str(tmp_path / "unet.json"), "--results", str(folder), "--commit", "abc"]) == 0
    text = tables.training_table(tables.load(folder))
    assert "2 steps, 2 seeds" in text and "| always_f32 |" in text and "| fp16_sum |" in text
    (name,) = re.findall(r"\]\((training-.*\.png)\)", text)
    tables.draw_plots(tables.load(folder), tmp_path)
    assert name in [path.name for path in tmp_path.glob("*.png")]
    assert tables.stale_plots(tables.load(folder), tmp_path) == []


def test_the_table_of_training_runs_says_which_policy_differs() -> None:
    def runs(*accuracies: float) -> list[dict[str, Any]]:
        rest = {"losses": [1.0, 0.5], "iou": 0.5, "skipped": 1, "seconds": 2.0}
        return [{"accuracy": accuracy, **rest} for accuracy in accuracies]

    part = {
        "seeds": [0, 1, 2],
        "steps": 10,
        "environment": {"torch": "2"},
        **{"driver": None, "commit": "abc", "date": "2026-01-01"},
    }
    same = {"always_f32": runs(0.90, 0.91, 0.92), "near": runs(0.905, 0.912, 0.92)}
    table = script("readme_tables").training_table
    text = table([{"card": "X", "training": {**part, "runs": same}}])
    assert "No policy is further from always_f32" in text
    assert "| near | 0.5000 | 91.23 ± 0.75 | +0.23 ± 0.25 | 50.00 ± 0.00 | +0.00 ± 0.00 | 3 | 2.0 |" in text
    other = {**same, "far": runs(0.88, 0.90, 0.90)}
    text = table([{"card": "X", "training": {**part, "runs": other}}])
    assert "Further from always_f32 than its own spread over the seeds: far in accuracy." in text


def test_losses_accuracy_and_skipped_steps_are_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    common = importlib.import_module("common")
    x, target = torch.eye(4), torch.arange(4)

    class Fixed(torch.nn.Module):
        """Right for three of four; class 3 is taken for class 0."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.eye(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rows = torch.tensor([0, 1, 2, 0])
            return x[rows] * 5 + 0 * (x @ self.weight)

    task = common.Task("t", Fixed, lambda step: (x, target), torch.nn.functional.cross_entropy, 6)
    outcome = common.train(task, common.parse_schedule("0=auto_mixed"), 6, CPU, 0)
    assert (outcome.accuracy, outcome.iou, outcome.skipped) == (0.75, (0.5 + 1 + 1 + 0) / 4, 0)
    assert len(outcome.losses) == 6 and outcome.curve()[0] == pytest.approx(sum(outcome.losses[:5]) / 5)
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **k: scaler(*a, **{**k, "init_scale": 2.0**120}))
    run = common.Task("t", lambda: torch.nn.Linear(4, 4), task.batch, task.loss, 6)
    assert common.train(run, common.parse_schedule("0=auto_mixed"), 3, CPU, 0).skipped == 3
    factors = [common.one_cycle(step, 10) for step in range(10)]
    assert factors[1] == 1.0 and factors[0] == 0.5 and factors[9] < 0.05
    assert factors[1:] == sorted(factors[1:], reverse=True)
