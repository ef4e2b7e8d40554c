"""The sweep: clean modes pass, and each planted fault is caught (mutation tests)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import Tensor
from typer.testing import CliRunner

import voxmma
from voxmma import sweep
from voxmma.explain import Record
from voxmma.sweep import MODES, Grid, Mode, Operands, Row

FP16, FP32 = "fp16 acc fp16", "fp16 acc fp32"
CPU = torch.device("cpu")
Mutation = Callable[[str, Mode, Operands, Tensor], Tensor]


def rows_of(grid: Grid, **options: Any) -> list[Row]:
    return [Row(**row) for row in sweep.run(CPU, grid, compare=False, **options)["rows"]]


@pytest.mark.parametrize("volume", list(sweep.KERNEL_SIZES))
def test_every_mode_is_within_its_bound(volume: int) -> None:
    grid = Grid(channels=(24 if volume < 125 else 8,), volumes=(volume,))
    rows = rows_of(grid, voxels=100)
    assert len(rows) == grid.cases and {row.verdict for row in rows} == {"ok"}
    assert all(row.nonfinite == 0 and row.ratio <= 1 and row.max_eta <= row.bound for row in rows)
    assert {row.accumulator for row in rows if row.op == "wgrad" and row.mode == FP16} == {"fp32"}
    assert {row.accumulator for row in rows if row.op == "dgrad" and row.mode == FP16} == {"fp16"}


def test_reduction_counts_active_offsets() -> None:
    x = sweep.scene(CPU, 100)
    assert sweep.reduction("fprop", 8, voxmma.kernel_map(x.coord_set, 1)) == (8, 1)
    mapping = voxmma.kernel_map(x.coord_set, 3)
    active = int((mapping.neighbor_table() >= 0).sum(0).max())
    assert sweep.reduction("fprop", 8, mapping) == (8 * active, active)
    assert sweep.reduction("wgrad", 8, mapping) == (x.num_voxels, 1)


# ---- mutations -------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, mutate: Mutation) -> None:
    """Lets `mutate` change every result of the library before the sweep sees it."""
    honest = sweep.execute

    def execute(
        op: str, mode: Mode, given: Operands, x: voxmma.Voxels, mapping: voxmma.KernelMap
    ) -> tuple[Tensor, Record]:
        result, record = honest(op, mode, given, x, mapping)
        return mutate(op, mode, given, result.clone()), record

    monkeypatch.setattr(sweep, "execute", execute)


def verdicts(family: str, modes: tuple[str, ...] = (FP32,), voxels: int = 150) -> dict[str, str]:
    grid = Grid(ops=("fprop",), modes=modes, channels=(64,), families=(family,))
    return {row.mode: row.verdict for row in rows_of(grid, voxels=voxels)}


def test_one_corrupt_cell_in_a_hundred_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(op: str, mode: Mode, given: Operands, y: Tensor) -> Tensor:
        flat = y.view(-1)
        flat[::100_000] += 0.01 * flat.abs().max()
        return y

    clean = rows_of(Grid(("fprop",), (FP32,), (64,), (27,), ("signed",)), voxels=1700)[0]
    assert clean.cells > 100_000 and clean.verdict == "ok"
    plant(monkeypatch, mutate)
    row = rows_of(Grid(("fprop",), (FP32,), (64,), (27,), ("signed",)), voxels=1700)[0]
    assert row.failed and row.verdict == "above the bound"
    assert row.p99_eta <= clean.p99_eta * 1.01  # the percentile does not see it


def test_a_nonfinite_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(op: str, mode: Mode, given: Operands, y: Tensor) -> Tensor:
        y[-1, -1] = float("nan")
        return y

    plant(monkeypatch, mutate)
    assert verdicts("signed") == {FP32: "1 non-finite cells"}


def test_accumulators_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sweep.execute

    def execute(op: str, mode: Mode, *rest: Any) -> tuple[Tensor, Record]:
        other = MODES[FP32 if mode.accumulator == "fp16" else FP16]
        claimed = honest(op, mode, *rest)[1]
        return honest(op, other, *rest)[0], claimed

    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed", (FP32, FP16)) == {
        FP32: "above the bound",
        FP16: "no fp16 error: the fp16 accumulator did not run",
    }
    assert verdicts("signed", (FP32, FP16))[FP16] == "no fp16 error: the fp16 accumulator did not run"


def test_a_promoted_accumulator_that_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    promoted = "fp16 acc fp16_promoted:32"
    assert verdicts("one_signed", (promoted,)) == {promoted: "ok"}
    honest = sweep.execute

    def execute(op: str, mode: Mode, *rest: Any) -> tuple[Tensor, Record]:
        claimed = honest(op, mode, *rest)[1]
        return honest(op, MODES[FP16], *rest)[0], claimed

    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed", (promoted,)) == {promoted: "above the bound"}


def test_tf32_operands_that_are_not_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    tf32 = "tf32 acc fp32"
    assert verdicts("one_signed", (tf32,)) == {tf32: "ok"}
    honest = sweep.execute

    def execute(op: str, mode: Mode, given: Operands, *rest: Any) -> tuple[Tensor, Record]:
        below = ((given.x.view(torch.int32) - 0x2000) & ~0x1FFF).view(torch.float32)  # one TF32 step short
        short = Operands(below, given.weight, given.dy, given.y64, given.abs64)
        return honest(op, mode, short, *rest)

    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed", (tf32,)) == {tf32: "above the bound"}


def test_a_truncated_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sweep.execute

    def execute(op: str, mode: Mode, given: Operands, *rest: Any) -> tuple[Tensor, Record]:
        kept = given.x.view(torch.int16) & ~0x7  # three mantissa bits cut from the features
        cut = Operands(kept.view(torch.float16), given.weight, given.dy, given.y64, given.abs64)
        return honest(op, mode, cut, *rest)

    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed") == {FP32: "above the bound"}


def test_a_skipped_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def mutate(op: str, mode: Mode, given: Operands, y: Tensor) -> Tensor:
        y[32:48, 8:16] = y[16:32, 8:16].clone()  # one fragment stored from the data of the one before
        return y

    plant(monkeypatch, mutate)
    assert verdicts("signed") == {FP32: "above the bound"}


def test_results_that_differ_between_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def mutate(op: str, mode: Mode, given: Operands, y: Tensor) -> Tensor:
        calls.append(op)
        if len(calls) == 2:  # one cell moves to the neighbouring fp16 number, well inside the bound
            y.view(torch.int16)[0, 0] -= 1
        return y

    plant(monkeypatch, mutate)
    assert verdicts("signed") == {FP32: "repeats differ"}
    assert len(calls) >= 2


def test_a_fallback_is_said_and_still_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = sweep.execute

    def execute(op: str, mode: Mode, *rest: Any) -> tuple[Tensor, Record]:
        return honest(op, MODES[FP32], *rest)

    monkeypatch.setattr(sweep, "execute", execute)
    found = verdicts("signed", (FP16,))
    assert found[FP16].startswith("not run: ")
    plant(monkeypatch, lambda op, mode, given, y: y * 1.01)
    assert verdicts("signed", (FP16,)) == {FP16: "above the bound"}


# ---- published table, command ----------------------------------------------------------------------------


def test_published_table_stands_beside_ours() -> None:
    lines = sweep.published(sweep.scene(CPU, 150))
    assert [(line["channels"], line["published"]) for line in lines] == list(sweep.PUBLISHED.items())
    for line in lines:
        assert line["accumulator"] == "fp16"
        assert 2e-4 < line["difference"] < 2e-3
        assert line["per_offset"] < line["difference"] / 10  # the CPU path rounds once per offset as well


def test_offset_rounding_is_what_it_says() -> None:
    x = sweep.scene(CPU, 60)
    mapping = voxmma.kernel_map(x.coord_set, 3)
    given = sweep.draw("fprop", "signed", torch.float16, 4, mapping)
    expected = torch.zeros(x.num_voxels, 4, dtype=torch.float16)
    for k, row in enumerate(mapping.neighbor_table().tolist()):
        for out, source in enumerate(row):
            if source >= 0:
                part = given.x[source].double() @ given.weight[k].double()
                expected[out] = (expected[out].double() + part).half()
    assert torch.equal(sweep.offset_rounded(given.x, given.weight, mapping), expected)


def command(*arguments: str) -> Any:
    app = typer.Typer()
    sweep.register(app)
    app.callback()(lambda: None)
    return CliRunner().invoke(app, ["sweep", "--device", "cpu", "--voxels", "100", *arguments])


def test_command_writes_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = (
        "--channels",
        "8",
        "--families",
        "signed,near_max",
        "--ops",
        "fprop,wgrad",
        "--out",
        str(tmp_path),
    )
    done = command(*small, "--json")
    assert done.exit_code == 0, done.output
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert json.loads(done.stdout) == saved and len(saved["rows"]) == 2 * 2 * len(MODES)
    assert (tmp_path / "sweep.png").read_bytes()[:4] == b"\x89PNG"
    assert "published" in command(*small).stdout

    plant(monkeypatch, lambda op, mode, given, y: y * float("inf"))
    failed = command(*small, "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["rows"][0]["max_eta"] == "inf"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--ops", "fprop,bprop"), "'bprop' is none of"),
        (("--volumes", "26"), "26 is none of"),
        (("--channels", "0"), "channels must be positive"),
        (("--modes", "fp8"), "'fp8' is none of"),
    ],
)
def test_command_names_what_it_does_not_know(arguments: tuple[str, str], message: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2 and message in " ".join(done.output.replace("│", " ").split())


@pytest.mark.gpu
@pytest.mark.slow
def test_sweep_on_the_gpu() -> None:
    grid = Grid(channels=(8, 32, 64, 128, 256), families=("signed", "one_signed", "cancelling", "near_max"))
    result = sweep.run(torch.device("cuda", 0), grid)
    failed = [row for row in result["rows"] if Row(**row).failed]
    assert result["voxels"] >= 200_000 and result["repeats"] == 10 and not failed, failed
