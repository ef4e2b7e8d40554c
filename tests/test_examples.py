"""The training examples: they learn, under every policy they offer, and write their picture."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

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
        ("transformer", "0=always_f32", 120, 0.5),
        ("transformer", "0=auto_mixed_bf16,60=always_f32", 120, 0.5),
        ("resnet", "0=always_f32", 40, 0.5),
        ("resnet", "0=auto_mixed_bf16", 40, 0.5),
        ("unet", "0=always_f32", 20, 0.6),
        ("unet", "0=auto_mixed", 20, 0.6),
        ("unet", "0=fp16_sum", 20, 0.6),
        ("unet", "0=auto_mixed_conservative,10=auto_mixed_bf16", 20, 0.6),
    ],
)
def test_an_example_learns(name: str, schedule: str, steps: int, accuracy: float) -> None:
    outcome = run(name, schedule, steps)
    assert sum(outcome.losses[-5:]) < 0.7 * sum(outcome.losses[:5])
    assert outcome.accuracy > accuracy


def test_the_same_start_and_batches_for_every_policy() -> None:
    one, two = (run("unet", schedule, 3).losses for schedule in ("0=always_f32", "0=auto_mixed"))
    assert abs(one[0] - two[0]) < 1e-2 * one[0] and one[0] != two[0]
    assert run("unet", "0=auto_mixed", 3).losses == two


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-W", "ignore", str(EXAMPLES / "train_unet.py"), "--steps", "4"),
            *("--device", "cpu", "--policies", "always_f32,fp16_sum", "--out", str(tmp_path)),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "always_f32" in done.stdout and "fp16_sum" in done.stdout and "%" in done.stdout
    assert (tmp_path / "unet.png").read_bytes().startswith(b"\x89PNG")
