"""The sweep: clean modes pass, and each planted fault is caught (mutation tests)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from voxmma.dispatch.record import Record
from voxmma.tools import sweep
from voxmma.tools.cli import app
from voxmma.tools.sweep import Grid, Row
from voxmma.verify import accuracy, trials
from voxmma.verify.trials import MODES, Mode, Operands, Site

FP16, FP32 = "fp16 acc fp16", "fp16 acc fp32"
CPU = torch.device("cpu")
Mutation = Callable[[str, Mode, Operands, Tensor], Tensor]
Results = Iterator[tuple[Tensor, Record]]


def rows_of(grid: Grid, **options: Any) -> list[Row]:
    return [Row(**row) for row in sweep.run(CPU, grid, compare=False, **options)["rows"]]


@pytest.mark.parametrize("volume", [1, 8, 27, pytest.param(125, marks=pytest.mark.slow)])
def test_every_mode_is_within_its_bound(volume: int) -> None:
    grid = Grid(channels=(24 if volume < 125 else 8,), volumes=(volume,))
    rows = rows_of(grid, voxels=100)
    assert len(rows) == len(grid.cases()) and {row.verdict for row in rows} == {"ok"}
    assert all(row.nonfinite == 0 and row.ratio <= 1 and row.max_eta <= row.bound for row in rows)
    assert {row.accumulator for row in rows if row.op == "wgrad" and row.mode == FP16} == {"fp32"}
    assert {row.accumulator for row in rows if row.op == "dgrad" and row.mode == FP16} == {"fp16"}


def test_reduction_counts_active_offsets() -> None:
    x = trials.scene(CPU, 100)
    assert trials.site(x, 1).reduction("fprop", 8) == (8, 1)
    where = trials.site(x, 2)
    table = where.mapping.neighbor_table()
    active = int((table >= 0).sum(0).max())
    assert where.reduction("fprop", 8) == (8 * active, active)
    reached = int(torch.bincount(table[table >= 0]).max())
    assert where.reduction("dgrad", 8) == (8 * reached, reached)
    assert where.reduction("wgrad", 8) == (x.num_voxels, 1)


def test_a_reference_is_shared_by_accumulators(monkeypatch: pytest.MonkeyPatch) -> None:
    """One fp64 result for a case and input format, whatever the number of accumulators and repeats."""
    calls = []
    honest = accuracy.reference_conv
    monkeypatch.setattr(accuracy, "reference_conv", lambda *rest: (calls.append(1), honest(*rest))[1])
    rows_of(Grid(("fprop",), tuple(MODES), (8,), (1, 8), ("signed", "relu")), voxels=60, repeats=3)
    assert len(calls) == 2 * 2 * 5  # volumes, families; fp16, bf16, fp32, tf32, fp64


# ---- mutations -------------------------------------------------------------------------------------------


def plant(monkeypatch: pytest.MonkeyPatch, mutate: Mutation) -> None:
    """Lets `mutate` change every result of the library before the sweep sees it."""
    honest = trials.execute

    def execute(op: str, mode: Mode, given: Operands, where: Site) -> Results:
        for result, record in honest(op, mode, given, where):
            yield mutate(op, mode, given, result.clone()), record

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(sweep, "execute", execute)


def claim(results: Results, claimed: Results) -> Results:
    """Results of one case under the record of another."""
    return ((y, record) for (y, _), (_, record) in zip(results, claimed, strict=True))


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
    honest = trials.execute

    def execute(op: str, mode: Mode, *rest: Any) -> Results:
        other = MODES[FP32 if mode.accumulator == "fp16" else FP16]
        return claim(honest(op, other, *rest), honest(op, mode, *rest))

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed", (FP32, FP16)) == {
        FP32: "above the bound",
        FP16: "no fp16 error: the fp16 accumulator did not run",
    }
    assert verdicts("signed", (FP32, FP16))[FP16] == "no fp16 error: the fp16 accumulator did not run"


def test_a_promoted_accumulator_that_is_not_promoted(monkeypatch: pytest.MonkeyPatch) -> None:
    promoted = "fp16 acc fp16_promoted:32"
    assert verdicts("one_signed", (promoted,)) == {promoted: "ok"}
    honest = trials.execute

    def execute(op: str, mode: Mode, *rest: Any) -> Results:
        return claim(honest(op, MODES[FP16], *rest), honest(op, mode, *rest))

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed", (promoted,)) == {promoted: "above the bound"}


def test_tf32_operands_that_are_not_rounded_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    tf32 = "tf32 acc fp32"
    assert verdicts("one_signed", (tf32,)) == {tf32: "ok"}
    honest = trials.execute

    def execute(op: str, mode: Mode, given: Operands, *rest: Any) -> Results:
        x, weight = ((t.view(torch.int32) & ~0x1FFF).view(torch.float32) for t in (given.x, given.weight))
        cut = Operands(x, weight, given.dy, given.y64, given.abs64)  # what reaches an MMA that does not round
        return honest(op, mode, cut, *rest)

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(sweep, "execute", execute)
    assert verdicts("one_signed", (tf32,)) == {tf32: "above the bound"}


def test_a_truncated_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = trials.execute

    def execute(op: str, mode: Mode, given: Operands, *rest: Any) -> Results:
        kept = given.x.view(torch.int16) & ~0x7  # three mantissa bits cut from the features
        cut = Operands(kept.view(torch.float16), given.weight, given.dy, given.y64, given.abs64)
        return honest(op, mode, cut, *rest)

    monkeypatch.setattr(trials, "execute", execute)
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
    honest = trials.execute

    def execute(op: str, mode: Mode, *rest: Any) -> Results:
        return honest(op, MODES["fp32 acc fp32" if mode.tf32 else FP32], *rest)

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(sweep, "execute", execute)
    found = verdicts("signed", (FP16, "tf32 acc fp32"))
    assert all(text.startswith("not run: ") for text in found.values()), found
    plant(monkeypatch, lambda op, mode, given, y: y * 1.01)
    assert verdicts("signed", (FP16,)) == {FP16: "above the bound"}


# ---- published table, command ----------------------------------------------------------------------------


def test_published_table_stands_beside_ours() -> None:
    lines = sweep.published(trials.scene(CPU, 150))
    assert [(line["channels"], line["published"]) for line in lines] == list(sweep.PUBLISHED.items())
    for line in lines:
        assert line["accumulator"] == "fp16"
        assert 2e-4 < line["difference"] < 2e-3
        assert line["per_offset"] < line["difference"] / 10  # the CPU path rounds once per offset as well


def test_offset_rounding_is_what_it_says() -> None:
    x = trials.scene(CPU, 60)
    where = trials.site(x, 3)
    given = trials.draw("fprop", "signed", torch.float16, 4, where)
    expected = torch.zeros(x.num_voxels, 4, dtype=torch.float16)
    for k, row in enumerate(where.mapping.neighbor_table().tolist()):
        for out, source in enumerate(row):
            if source >= 0:
                part = given.x[source].double() @ given.weight[k].double()
                expected[out] = (expected[out].double() + part).half()
    rounded = sweep.offset_rounded(given.x, given.weight, where.pairs, x.num_voxels)
    assert torch.equal(rounded, expected)


def command(*arguments: str) -> Any:
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
    small += ("--no-plots",)
    assert "published" in command(*small).stdout

    plant(monkeypatch, lambda op, mode, given, y: y * float("inf"))
    failed = command(*small, "--json")
    assert failed.exit_code == 1
    assert json.loads(failed.stdout)["rows"][0]["max_eta"] == "inf"


# ---- budget, estimate ------------------------------------------------------------------------------------


def test_a_cut_run_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock jumps by six seconds a look: the file is written on the way, and the budget ends the run."""
    ticks = iter(range(0, 100_000, 6))
    monkeypatch.setattr(sweep.time, "monotonic", lambda: float(next(ticks)))
    kept: list[int] = []
    grid = Grid(("fprop", "dgrad"), (FP32, FP16), (8, 16), (27, 1), ("signed",))
    result = sweep.run(
        CPU, grid, 60, 2, compare=False, budget=40.0, keep=lambda part: kept.append(len(part["rows"]))
    )
    done = len(result["rows"])
    assert 0 < done < 16 and kept and kept == sorted(kept) and kept[-1] < done
    order = [(row["volume"], row["channels"], row["op"], row["mode"]) for row in result["rows"]]
    assert (
        order[:5]
        == [
            (27, 8, "fprop", FP32),
            (27, 8, "fprop", FP16),
            (27, 8, "dgrad", FP32),
            (27, 8, "dgrad", FP16),
            (27, 16, "fprop", FP32),
        ][:done]
    )
    assert done + sum(part["rows"] for part in result["left_out"]) == 16
    assert {"volume": 1, "channels": 16, "op": "dgrad", "rows": 2} in result["left_out"]


def test_an_interrupted_run_keeps_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    honest, kept = sweep.measure, []

    def measure(case: sweep.Case, *rest: Any) -> Row:
        if case.op == "dgrad":
            raise KeyboardInterrupt
        return honest(case, *rest)

    monkeypatch.setattr(sweep, "measure", measure)
    grid = Grid(("fprop", "dgrad"), (FP32, FP16), (8,), (27,), ("signed",))
    with pytest.raises(KeyboardInterrupt):
        sweep.run(CPU, grid, 60, 2, compare=False, keep=kept.append)
    assert [len(part["rows"]) for part in kept] == [2]
    assert kept[0]["left_out"] == [{"volume": 27, "channels": 8, "op": "dgrad", "rows": 2}]


def test_command_says_what_the_budget_left_out(tmp_path: Path) -> None:
    done = command("--channels", "8", "--families", "signed", "--budget", "0", "--out", str(tmp_path))
    assert done.exit_code == 0 and "the budget of 0 s left out 33 of 33 rows" in done.output
    saved = json.loads((tmp_path / "sweep.json").read_text())
    assert not saved["rows"] and [part["rows"] for part in saved["left_out"]] == [11, 11, 11]
    assert not (tmp_path / "sweep.png").exists()


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
    """Every family, op and mode; the wide layers, which take minutes, are left to the command."""
    grid = Grid(channels=(8, 32, 64, 128), volumes=(1, 8, 27, 125))
    result = sweep.run(torch.device("cuda", 0), grid)
    assert len(result["rows"]) == len(grid.cases()) and not result["left_out"]
    failed = [row for row in result["rows"] if Row(**row).failed]
    assert result["voxels"] >= 200_000 and result["repeats"] == 10 and not failed, failed
