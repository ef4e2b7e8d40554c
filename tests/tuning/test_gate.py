"""The gate fails closed: on missing evidence, planted faults and stale records; its arithmetic is safe."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma.dispatch import measurements, store, validation
from voxmma.ops.kernels import chunk_of, compiled, parse_accumulator
from voxmma.ops.rescale import fp16_operands, overflow_bound, safe_factor
from voxmma.tools import gate as gate_module
from voxmma.tools import sweep
from voxmma.tuning import gate
from voxmma.tuning.gate import judge
from voxmma.verify import trials
from voxmma.verify.accuracy import Bound, Errors, reference_conv
from voxmma.verify.families import FAMILIES
from voxmma.verify.overflow import Certificate, certificate

CPU = torch.device("cpu")
GOOD = Errors(1e-4, 1e-5, 1e-3, 2.0, 0, 1000)
LIMIT = Bound(1e-3, 0.0, "")
EVIDENCE: dict[str, Any] = {
    "certificate": Certificate(1000.0, 0),
    "errors": GOOD,
    "limit": LIMIT,
    "repeatable": True,
    "rel_l2": 1e-3,
    "gain": 1.5,
}


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    with voxmma.settings.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache" / "records.jsonl"


# ---- the decision ----------------------------------------------------------------------------------------


def decide(
    op: str = "fprop", dtype: torch.dtype = torch.float16, automatic: bool = True, **change: Any
) -> validation.Verdict:
    return judge("tile", op, dtype, automatic=automatic, **{**EVIDENCE, **change})


def test_complete_evidence_is_admitted() -> None:
    verdict = decide()
    assert verdict.allowed and verdict.accumulator == "fp16" and verdict.reason == "all checks passed"
    assert [check.name for check in verdict.checks] == [
        "legality",
        "overflow",
        "finite",
        "bound",
        "repeats",
        "budget",
        "gain",
    ]


@pytest.mark.parametrize(
    ("change", "step"),
    [
        ({"op": "wgrad"}, "legality"),
        ({"dtype": torch.bfloat16}, "legality"),
        ({"dtype": torch.float32}, "legality"),
        ({"certificate": None}, "overflow"),
        ({"certificate": Certificate(65505.0, 1)}, "overflow"),
        ({"certificate": Certificate(math.nan, 0)}, "overflow"),
        ({"certificate": Certificate(math.inf, 0)}, "overflow"),
        ({"errors": None}, "finite"),
        ({"errors": Errors(math.inf, math.inf, math.inf, math.inf, 1, 1000)}, "finite"),
        ({"limit": None}, "bound"),
        ({"errors": Errors(1.1e-3, 0.0, 0.0, 0.0, 0, 1000)}, "bound"),
        ({"errors": Errors(math.nan, 0.0, 0.0, 0.0, 0, 1000)}, "bound"),
        ({"repeatable": None}, "repeats"),
        ({"repeatable": False}, "repeats"),
        ({"rel_l2": None}, "budget"),
        ({"rel_l2": 2 * gate.BUDGET}, "budget"),
        ({"rel_l2": math.nan}, "budget"),
        ({"gain": None}, "gain"),
        ({"gain": 1.03}, "gain"),
        ({"gain": math.nan}, "gain"),
    ],
)
def test_each_step_fails_closed(change: dict[str, Any], step: str) -> None:
    verdict = decide(**change)
    assert not verdict.allowed and verdict.accumulator == "fp32"
    assert verdict.checks[-1].name == step and verdict.reason.startswith(step)
    assert all(check.passed for check in verdict.checks[:-1])


def test_speed_is_no_objection_to_an_explicit_request() -> None:
    assert decide(automatic=False, gain=None).allowed
    assert not decide(automatic=False, certificate=None).allowed
    assert not decide(automatic=False, errors=None).allowed


def test_no_evidence_at_all_is_refused() -> None:
    for automatic in (True, False):
        assert not judge("tile", "fprop", torch.float16, automatic=automatic).allowed


# ---- overflow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("chunk", [0, -1, 4, 5])
@pytest.mark.parametrize("transpose", [False, True])
def test_bound_covers_every_partial_sum(transpose: bool, chunk: int, groups: int) -> None:
    a = torch.randn(40, 12 * groups).half()
    w = torch.randn(5, groups, 12, 12).half()
    value = float(overflow_bound(a, w if groups > 1 else w[:, 0], transpose=transpose, chunk=chunk))
    columns = (w.transpose(-1, -2) if transpose else w).double().abs()  # (K, G, reduced, written)
    if chunk == 0:
        sums = columns.sum(dim=(0, 2))
    else:
        size = 12 if chunk == -1 else chunk
        sums = torch.stack([columns[:, :, i : i + size].sum(2) for i in range(0, 12, size)])
    exact = float(a.double().abs().max() * sums.max())
    assert exact <= value <= 1.001 * exact


def test_certificate_is_never_too_optimistic() -> None:
    for name, family in FAMILIES.items():
        g = torch.Generator().manual_seed(1)
        x = family.activations((200, 32), torch.float16, g, CPU)
        w = family.weights((27, 32, 16), torch.float16, g, CPU)
        pairs = [(torch.randperm(200), torch.arange(200)) for _ in range(27)]
        proof = certificate(x, w)
        assert float(reference_conv(x, w, pairs, 200)[1].max()) <= proof.bound, name
        assert proof.fits, name


def test_certificate_suggests_the_smallest_sufficient_shift() -> None:
    w = torch.ones(1, 1, 1).half()
    for value, shift in ((65504.0, 1), (40000.0, 0), (1e5, 1), (131000.0, 1), (3e5, 3), (1e9, 14)):
        proof = certificate(torch.tensor([[value]]), w)
        assert proof.shift == shift and proof.fits == (shift == 0), (value, proof)
        assert proof.bound * 2.0**-shift <= 65504
    for bad in (math.inf, -math.inf, math.nan):
        proof = certificate(torch.tensor([[bad]]), w)
        assert not proof.fits and proof.shift == 0
    assert certificate(torch.zeros(0, 1), w).fits


def test_safe_factor_is_a_power_of_two_that_fits() -> None:
    bounds = torch.cat([torch.logspace(-3, 30, 500), torch.tensor([0.0, 65504.0, 65505.0, 131008.0])])
    factor = safe_factor(bounds)
    mantissa, _ = torch.frexp(factor)
    assert bool((mantissa == 0.5).all() and (factor <= 1).all() and (factor * bounds <= 65504).all())
    assert (
        bool((factor[bounds <= 65504] == 1).all())
        and float((factor * bounds)[bounds > 65504].min()) > 65504 / 4
    )
    assert safe_factor(torch.tensor([math.inf, math.nan])).tolist() == [1.0, 1.0]


def test_bf16_operands_reach_fp16_exactly_where_the_range_allows() -> None:
    x, w = (torch.randn(300, 16) * 2.0**40).bfloat16(), (torch.randn(27, 16, 8) * 2.0**-60).bfloat16()
    x[x.abs() < 2.0**38], w[w.abs() < 2.0**-63] = 0, 0
    got = fp16_operands(x, w)
    assert bool(got.exact) and got.a.dtype == got.weight.dtype == torch.float16
    assert float(overflow_bound(got.a, got.weight)) <= 65504 < 4 * float(overflow_bound(got.a, got.weight))
    pairs = [(torch.randperm(300), torch.arange(300)) for _ in range(27)]
    y, _ = reference_conv(got.a, got.weight, pairs, 300)
    wanted, _ = reference_conv(x, w, pairs, 300)
    torch.testing.assert_close(
        y / got.factor.double(), wanted, rtol=0, atol=1e-12 * float(wanted.abs().max())
    )

    wide = torch.tensor([[2.0**60, 2.0**-60]]).bfloat16()  # 120 binades do not fit into fp16's 40
    assert not bool(fp16_operands(wide, torch.ones(1, 2, 1).bfloat16()).exact)
    for special in (math.inf, math.nan):
        got = fp16_operands(torch.tensor([[special]]).bfloat16(), torch.ones(1, 1, 1).bfloat16())
        assert not math.isfinite(float(got.a))
    assert bool(fp16_operands(torch.zeros(2, 1), torch.zeros(1, 1, 1)).exact)


def test_gradscaler_sized_gradients_survive_the_rescale() -> None:
    dy, w = torch.full((10, 8), 3e5), torch.ones(27, 4, 8) / 8  # Ci = 4, Co = 8
    got = fp16_operands(dy, w, transpose=True)
    assert bool(got.a.isfinite().all()) and float(overflow_bound(got.a, got.weight, transpose=True)) <= 65504
    back = got.a.double() @ got.weight[0].double().T / got.factor.double()
    torch.testing.assert_close(back, dy.double() @ w[0].double().T, rtol=2**-11, atol=0)


# ---- measuring, mutations --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scene() -> voxmma.Voxels:
    return trials.scene(CPU, 100)


def test_cpu_path_passes_all_but_the_gain(scene: voxmma.Voxels, cache: Path) -> None:
    verdict = gate.measure(None, scene, repeats=2)
    assert [check.passed for check in verdict.checks] == [True] * 6 + [False]
    assert verdict.reason == "gain: not measured on this device" and not cache.exists()
    assert gate.measure(None, scene, repeats=1).reason == "repeats: not measured"


@pytest.mark.parametrize(
    ("fault", "step"),
    [
        ("corrupt", "bound"),
        ("nan", "finite"),
        ("accumulator", "ran"),
        ("tile", "ran"),
        ("coarse", "bound"),
        ("race", "repeats"),
    ],
)
def test_planted_faults_are_caught(
    fault: str, step: str, scene: voxmma.Voxels, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = trials.execute

    def execute(op: str, mode: trials.Mode, *rest: Any) -> Iterator[tuple[Tensor, voxmma.Record]]:
        if fault == "accumulator":
            mode = trials.MODES["fp16 acc fp32"]
        for count, (y, record) in enumerate(honest(op, mode, *rest)):
            y = y.clone()
            if fault == "corrupt" and op == "dgrad":  # one cell of one of fourteen cases
                y[3, 3] = -y[3, 3]
            elif fault == "nan" and op == "dgrad":
                y[0, 0] = math.nan
            elif fault == "coarse":  # a store of five mantissa bits
                y = (y.view(torch.int16) & ~0x1F).view(torch.float16)
            elif fault == "race" and op == "dgrad" and count == 1:  # the last bit of one cell, once
                y.view(torch.int16)[5, 5] ^= 1
            elif fault == "tile":
                record = voxmma.Record(**{**record.__dict__, "tile": "another"})
            yield y, record

    monkeypatch.setattr(trials, "execute", execute)
    monkeypatch.setattr(sweep, "execute", execute)
    verdict = gate.measure(None, scene, repeats=2)
    assert not verdict.allowed and verdict.checks[-1].name == step, verdict


def test_every_fp16_tile_can_be_asked_for() -> None:
    for tile in compiled():
        if tile.op == "fprop" and tile.accum.startswith("fp16"):
            asked = parse_accumulator(gate._mode(tile).accumulator)
            assert asked == (tile.accum, chunk_of(tile.name)), tile
    assert gate._mode(None) == trials.MODES["fp16 acc fp16"]


def test_table_shows_every_figure(scene: voxmma.Voxels) -> None:
    verdicts = gate.run(CPU, voxels=100)
    table = gate_module.render(verdicts)
    assert table.row_count == 1 and len(table.columns) == 9
    shown = [next(iter(column.cells)) for column in table.columns]
    assert shown[0] == "cpu" and shown[7].startswith("FAILED") and shown[8].startswith("refused, gain")


# ---- records ---------------------------------------------------------------------------------------------

OWNER = store.Owner("Some Card", "9.0", 132, "580.1", "abc", device="GPU-1")


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> Callable[[store.Owner | None], None]:
    """Says whose records those of every device are, the CPU's too."""

    def own(owner: store.Owner | None) -> None:
        monkeypatch.setattr(store, "owner_of", lambda device, one_card=False: owner)

    store.warn_once.cache_clear()
    own(OWNER)
    return own


def test_records_belong_to_device_driver_and_build(
    cache: Path, owners: Callable[[store.Owner | None], None]
) -> None:
    verdict = decide()
    assert not validation.on_record("tile", CPU).allowed
    validation.keep(verdict, CPU)
    assert validation.on_record("tile", CPU) == verdict
    assert not validation.on_record("other", CPU).allowed
    for field in ("card", "device", "driver", "build"):
        owners(replace(OWNER, **{field: "changed"}))
        stale = validation.on_record("tile", CPU)
        assert not stale.allowed and stale.reason == "record: no measurement on record for this device"
    owners(None)
    assert not validation.on_record("tile", CPU).allowed


def test_a_later_refusal_beats_an_earlier_permission(
    cache: Path, owners: Callable[[store.Owner | None], None]
) -> None:
    failed = (validation.Check("bound", False, "d"),)
    for verdict in (decide(), validation.Verdict("tile", False, failed), decide()):
        validation.keep(verdict, CPU)
        assert validation.on_record("tile", CPU) == verdict
    # a record that claims a permission which its own checks do not give is refused
    validation.keep(validation.Verdict("tile", True, failed), CPU)
    assert not validation.on_record("tile", CPU).allowed


def test_unreadable_and_unwritable_records_are_no_error(
    cache: Path, owners: Callable[[store.Owner | None], None]
) -> None:
    validation.keep(decide(), CPU)
    whole = cache.read_bytes()
    cache.write_bytes(whole + b'{"kind": "tile"\n[1, 2]\n\xff\xfe\n')
    with pytest.warns(UserWarning, match=r"records.jsonl holds 3 damaged line\(s\), which are ignored"):
        assert validation.on_record("tile", CPU) == decide()
    cache.write_bytes(whole.replace(b'"allowed": true', b'"allowed": false'))  # fails its checksum
    with pytest.warns(UserWarning, match="1 damaged line"):
        assert validation.on_record("tile", CPU).reason.startswith("record")
    unwritable = "cannot be written .* the verdicts are not kept"
    with voxmma.settings.override(cache_dir=os.devnull), pytest.warns(UserWarning, match=unwritable):
        validation.keep(decide(), CPU)


def test_fault_63_a_refusal_after_a_cut_line_counts(
    cache: Path, owners: Callable[[store.Owner | None], None]
) -> None:
    """Joined to the cut line it would be lost, and the permission before it would stand."""
    validation.keep(decide(), CPU)
    with cache.open("ab") as file:
        file.write(cache.read_bytes()[:30])  # its writer was killed
    refused = validation.Verdict("tile", False, (validation.Check("bound", False, "d"),))
    validation.keep(refused, CPU)
    with pytest.warns(UserWarning, match="1 damaged line"):
        assert validation.on_record("tile", CPU) == refused


def test_repeated_calls_look_at_the_file_at_intervals(
    cache: Path, owners: Callable[[store.Owner | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: now))
    before = validation.stamp()
    validation.keep(decide(), CPU)
    own = validation.stamp(recent=True)
    assert own != before  # at once
    with cache.open("a") as file:
        file.write("another process was here\n")
    now = 0.9 * store.LOOK_SECONDS
    assert validation.stamp(recent=True) == own
    now = store.LOOK_SECONDS
    theirs = validation.stamp(recent=True)
    assert theirs == validation.stamp() != own
    with cache.open("a") as file:
        file.write("and again\n")
    assert validation.stamp(recent=True) == theirs
    newest = validation.stamp()  # a new decision looks
    assert newest == validation.stamp(recent=True) != theirs
    assert measurements.forget() == 2
    assert validation.stamp(recent=True) not in (newest, theirs)


def test_a_look_that_a_write_overtakes_is_not_kept(
    cache: Path, owners: Callable[[store.Owner | None], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stat = store.os.stat

    def overtaken(file: Path) -> os.stat_result:
        found = stat(file)
        monkeypatch.setattr(store.os, "stat", stat)
        validation.keep(decide(), CPU)
        return found

    validation.keep(decide(), CPU)
    before = validation.stamp()
    monkeypatch.setattr(store.os, "stat", overtaken)
    assert validation.stamp() == before
    assert validation.stamp(recent=True) == validation.stamp() != before


def test_times_and_verdicts_share_a_file(cache: Path, owners: Callable[[store.Owner | None], None]) -> None:
    """Deleting measurements leaves verdicts; either kind is read without the other."""
    key = measurements.Key("fwd", "fp16", "fp32", 64, 64, 1, 27, "ieee")
    timed = measurements.body(OWNER, key, {"tile": 1.0})
    store.append([timed])
    validation.keep(decide(), CPU)
    store.append([timed])
    assert measurements.read(cache, OWNER) == [timed, timed]
    assert validation.on_record("tile", CPU) == decide()
    with cache.open("a") as file:
        file.write("damage\n")
    assert measurements.forget() == 3
    assert measurements.read(cache, OWNER) == [] and len(cache.read_text().splitlines()) == 1
    assert validation.on_record("tile", CPU) == decide()


def test_board_refuses_a_cpu() -> None:
    with pytest.raises(ValueError, match="CUDA device, got cpu"):
        gate.board("cpu")


# ---- the gate is in the way ------------------------------------------------------------------------------


def test_nothing_runs_fp16_accumulators_without_a_flag() -> None:
    assert voxmma.settings.get_pcoff_f16acc_small_ch_ceil() == 0
    for channels in (8, 16, 32, 48):
        w = torch.randn(27, channels, channels).half()
        x = voxmma.Voxels(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]).int(), torch.randn(2, channels).half())
        with torch.inference_mode():
            y = voxmma.nn.functional.spatially_sparse_conv(x, w, 3)
        assert voxmma.explain(y).accumulator == "fp32" and voxmma.explain(y).reason


@pytest.mark.gpu
def test_board_is_probed_once_and_kept(cache: Path) -> None:
    gate._board.cache_clear()
    first = gate.board("cuda")
    assert first.fp32 > 10 and 0.9 < first.ratio < 2.2
    gate._board.cache_clear()
    assert gate.board("cuda:0") == first
    assert [json.loads(line)["kind"] for line in cache.read_text().splitlines()] == ["rates"]


@pytest.mark.gpu
@pytest.mark.slow
def test_every_fp16_tile_has_a_verdict(cache: Path) -> None:
    device = torch.device("cuda", 0)
    verdicts = gate.run(device)
    assert len(verdicts) == len(gate.candidates(device)) > 0
    for verdict in verdicts:
        accuracy_checks = [check for check in verdict.checks if check.name != "gain"]
        assert all(check.passed for check in accuracy_checks), verdict
        assert validation.on_record(verdict.subject, device) == verdict


@pytest.mark.gpu
def test_overflow_arithmetic_does_not_wait_for_the_device() -> None:
    # multiples of 1/16, which keep every bit in fp16 whatever power of two scales them
    a, w = (
        (16 * torch.randn(*shape, device="cuda")).round().div(16).bfloat16()
        for shape in ((1000, 64), (27, 64, 64))
    )
    fp16_operands(a, w)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = fp16_operands(a, w)
        safe_factor(overflow_bound(a, w, chunk=32))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert bool(got.exact)
