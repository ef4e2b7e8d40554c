"""The tile table and its selector, on the table of a build with every tile, so that no GPU is needed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import voxmma
from voxmma import _C, _types
from voxmma.dispatch import selection, settings, store, validation
from voxmma.ops import formats, kernels
from voxmma.tools import doctor
from voxmma.tuning import machine

from conftest import random_coords
from tile_table import ARCHS, snapshot, stand_in

select_tile, plan_call = selection.select_tile, selection.plan_call
card, parse_accumulator = selection.card, kernels.parse_accumulator

H100, A100, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (12, 0)
DEFAULT_POOLS = dict(
    zip(
        ("fwd", "dgrad", "wgrad", "small_ch_ceil", "fp32_precision", "limits"),
        settings.DEFAULT_POOLS,
        strict=True,
    )
)
HALF = (torch.float16, torch.bfloat16)
F16_FORWARD = "sm90_f16_256x64x64_acc16"


def _clear() -> None:
    kernels.compiled.cache_clear()
    selection._plan_call.cache_clear()


def _use(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], archs: list[str]) -> None:
    stand_in(monkeypatch, rows, archs)
    _clear()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build that holds every tile for sm_80 and sm_90a."""
    _use(monkeypatch, snapshot(), ARCHS)
    yield
    monkeypatch.undo()
    _clear()


def plan(
    dtype: torch.dtype,
    requested: bool,
    decided_by: str,
    target: Any = H100,
    c: int = 64,
    groups: int = 1,
    **pools: Any,
) -> Any:
    return plan_call(
        dtype, requested, decided_by, c, c, groups, target, tuple({**DEFAULT_POOLS, **pools}.values())
    )


@pytest.mark.parametrize(
    ("op", "dtype", "accumulator", "c_in", "c_out", "groups", "capability", "expected"),
    [
        ("fwd", torch.float16, "fp32", 64, 64, 1, H100, "sm90_f16_256x64x64_acc32"),
        ("fwd", torch.float16, "fp16", 64, 64, 1, H100, "sm90_f16_256x64x64_acc16"),
        ("fwd", torch.float16, "fp16", 32, 32, 1, H100, "sm90_f16_256x32x32_acc16"),
        ("fwd", torch.float16, "fp32", 96, 96, 1, H100, "sm90_f16_256x96x32_acc32"),
        ("fwd", torch.bfloat16, "fp32", 192, 192, 1, H100, "sm90_bf16_256x96x64_acc32"),
        ("fwd", torch.float16, "fp16", 96, 96, 1, H100, "sm90_f16_256x128x32_acc16"),
        ("fwd", torch.float16, "fp32", 100, 40, 1, H100, "sm90_f16_256x64x64_acc32"),
        ("fwd", torch.float16, "fp32", 256, 512, 1, H100, "sm90_f16_256x128x64_acc32"),
        ("fwd", torch.float16, "fp32", 4, 64, 1, H100, "sm80_f16_256x64x32_acc32"),
        ("dgrad", torch.float16, "fp32", 4, 64, 1, H100, "sm90_f16_256x32x64_acc32"),
        ("dgrad", torch.float16, "fp32", 128, 32, 1, H100, "sm90_f16_256x128x32_acc32"),
        ("fwd", torch.bfloat16, "fp32", 64, 128, 1, A100, "sm80_bf16_256x128x64_acc32"),
        ("fwd", torch.bfloat16, "fp32", 64, 128, 1, ADA, "sm80_bf16_256x64x64_small_acc32"),
        ("fwd", torch.float16, "fp16", 128, 128, 1, ADA, "sm80_f16_256x64x64_small_acc16"),
        ("wgrad", torch.float16, "fp32", 64, 64, 1, H100, "sm90_f16_wgrad_64x64"),
        ("wgrad", torch.float16, "fp32", 16, 256, 1, H100, "sm90_f16_wgrad_32x128"),
        ("wgrad", torch.bfloat16, "fp32", 64, 64, 1, A100, "sm80_bf16_wgrad_64x64"),
        ("wgrad", torch.bfloat16, "fp32", 64, 64, 1, ADA, "sm80_bf16_wgrad_64x64"),
        ("wgrad", torch.float16, "fp32", 32, 32, 1, ADA, "sm80_f16_wgrad_32x32"),
        ("wgrad", torch.float16, "fp32", 64, 32, 1, ADA, "sm80_f16_wgrad_64x64"),
        ("wgrad", torch.float16, "fp32", 192, 96, 1, A100, "sm80_f16_wgrad_96x96"),
        ("wgrad", torch.float16, "fp32", 128, 64, 1, A100, "sm80_f16_wgrad_64x64"),
        ("wgrad", torch.float16, "fp32", 256, 128, 1, ADA, "sm80_f16_wgrad_128x128"),
        ("fwd", torch.float16, "fp32", 96, 96, 1, ADA, "sm80_f16_256x64x64_small_acc32"),
        ("fwd", torch.float16, "fp32", 64, 64, 64, H100, "simt_f16"),
        ("wgrad", torch.float16, "fp32", 64, 64, 64, H100, "simt_f16_wgrad"),
        ("fwd", torch.float16, "fp32", 64, 64, 8, H100, "sm80_f16_256x32x32_acc32"),
        ("fwd", torch.float16, "fp16", 64, 64, 64, A100, "sm80_f16_256x32x32_acc16"),
        ("fwd", torch.float32, "fp32", 64, 64, 1, H100, "sm80_f32_256x32x32_3xtf32"),
        ("fwd", torch.float32, "fp32", 64, 63, 1, H100, "simt_f32"),
        ("fwd", torch.float32, "fp32", 128, 128, 2, H100, "sm80_f32_256x32x32_3xtf32"),
        ("fwd", torch.float32, "fp32", 128, 128, 4, H100, "simt_f32"),
        ("dgrad", torch.float32, "fp32", 256, 96, 1, A100, "sm80_f32_256x32x32_3xtf32"),
        ("wgrad", torch.float32, "fp32", 64, 64, 1, H100, "sm80_f32_wgrad_32x32_3xtf32"),
        ("wgrad", torch.float32, "fp32", 64, 64, 1, A100, "sm80_f32_wgrad_32x32_small_3xtf32"),
        ("wgrad", torch.float32, "fp32", 64, 64, 1, ADA, "sm80_f32_wgrad_32x32_small_3xtf32"),
        ("wgrad", torch.float32, "fp32", 32, 64, 1, A100, "simt_f32_wgrad"),
        ("fwd", torch.float32, "fp32", 64, 64, 1, ADA, "sm80_f32_256x32x32_3xtf32"),
        ("fwd", torch.float16, "fp16_promoted:64", 64, 64, 1, H100, "sm80_f16_256x32x64_acc16p64"),
        ("dgrad", torch.float16, "fp16_promoted:32", 32, 96, 1, ADA, "sm80_f16_256x32x32_acc16p32"),
        ("fwd", torch.float16, "fp16_promoted:offset", 32, 32, 1, A100, "sm80_f16_256x32x64_acc16poff"),
        ("fwd", torch.float16, "fp16_promoted", 128, 256, 1, A100, "sm80_f16_256x32x64_acc16p64"),
        ("wgrad", torch.float64, "fp64", 3, 5, 1, A100, "simt_f64_wgrad"),
    ],
)
def test_selector(
    build: None, op: str, dtype: torch.dtype, accumulator: str, c_in: int, c_out: int, groups: int,
    capability: tuple[int, int], expected: str,
) -> None:  # fmt: skip
    choice = select_tile(op, dtype, accumulator, c_in, c_out, groups, capability)
    assert choice.name == expected
    assert choice.reason


def test_every_selected_tile_fits_the_call(build: None) -> None:
    """Whatever the channels, the tile has the call's op, inputs and accumulator and runs on the device."""
    by_name = {tile.name: tile for tile in kernels.compiled()}
    channels = (1, 3, 8, 18, 32, 96, 128, 320)
    for op, dtype, c_in, c_out, cap in itertools.product(
        settings.OPS, HALF, channels, channels, (H100, A100, ADA)
    ):
        accumulators = ("fp32", "fp16") if dtype == torch.float16 and op != "wgrad" else ("fp32",)
        for accumulator in accumulators:
            tile = by_name[select_tile(op, dtype, accumulator, c_in, c_out, 1, cap).name]
            assert tile.op == ("wgrad" if op == "wgrad" else "fprop")
            assert (tile.input, tile.accum) == (_types.DTYPE_NAMES[dtype], accumulator)
            assert tile.runs_on(card(cap)) and tile.atom != "SIMT"


def test_fault_40_every_card_has_a_tile_for_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile found runs on the card: code, architecture, and no more shared memory than CUDA documents."""
    kilobytes = dict(zip(CAPABILITIES, (163, 99, 163, 99, 227, 227, 227, 227, 99, 99), strict=True))
    combinations = [
        *itertools.product(settings.OPS, HALF, ("fp32",)),
        *(
            (op, torch.float16, accumulator)
            for op in ("fwd", "dgrad")
            for accumulator in ("fp16", *(f"fp16_promoted:{chunk}" for chunk in kernels.CHUNKS))
        ),
        *itertools.product(settings.OPS, (torch.float32,), ("fp32",)),
        *itertools.product(settings.OPS, (torch.float64,), ("fp64",)),
    ]
    channels = (1, 3, 8, 16, 18, 32, 64, 96, 128, 320)
    for archs in (["8.0+PTX", "9.0a"], ["8.0+PTX"]):
        _use(monkeypatch, snapshot(), archs)
        by_name = {tile.name: tile for tile in kernels.compiled()}
        for capability, (op, dtype, accumulator) in itertools.product(CAPABILITIES, combinations):
            kind, (accum, chunk) = "wgrad" if op == "wgrad" else "fprop", parse_accumulator(accumulator)
            for c_in, c_out, groups, precision in itertools.product(
                channels, channels, (1, 8), ("ieee", "tf32")
            ):
                if c_in % groups or c_out % groups or (precision == "tf32" and dtype != torch.float32):
                    continue
                call = (op, dtype, accumulator, c_in, c_out, groups, capability)
                tile = by_name[select_tile(*call, fp32_precision=precision).name]
                found = (tile.op, tile.input, tile.accum, tile.promote if chunk else 0)
                assert found == (kind, _types.DTYPE_NAMES[dtype], accum, chunk), call
                assert tile.shared_memory <= 1024 * kilobytes[capability], call
                assert tile.arch == 80 or (capability == H100 and "9.0a" in archs), call
                assert precision == "tf32" or tile.scheme != "tf32", call
    monkeypatch.undo()
    _clear()


def test_a_tile_needs_what_the_library_says(build: None) -> None:
    """98,432 bytes fit where 101,376 are allowed, 106,624 do not; one byte less and neither does."""
    by_name = {tile.name: tile for tile in kernels.compiled()}
    small, large = by_name["sm80_f16_256x32x64_acc32"], by_name["sm80_f16_256x64x64_acc32"]
    assert (small.shared_memory, large.shared_memory) == (98_432, 106_624)
    ada = card(ADA)
    assert ada == kernels.Card(ADA, 101_376, ADA)
    assert small.runs_on(ada) and not small.runs_on(ada._replace(shared_memory=98_431))
    expected = f"{large.name} needs 106,624 bytes of shared memory a block, sm_89 allows 101,376"
    assert large.obstacle(ada) == expected
    reason = select_tile("fwd", torch.float16, "fp32", 64, 64, 1, ADA, (large.name,)).reason
    assert f"cannot run this; {expected}" in reason


def test_a_call_without_a_tile_that_fits_says_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, [row for row in snapshot() if row["name"] == "sm80_f16_256x64x64_acc32"], ARCHS)
    with pytest.raises(RuntimeError, match=r"sm_89: \S+ needs 106,624 bytes .* sm_89 allows 101,376"):
        select_tile("fwd", torch.float16, "fp32", 64, 64, 1, ADA)
    monkeypatch.undo()
    _clear()


# ---- a big card like a small one ---------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch, build: None) -> torch.device:
    """A stand-in for an H100 at cuda:0."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H100)
    return torch.device("cuda", 0)


def test_limits_choose_the_tiles_of_a_small_card(hopper: torch.device) -> None:
    """Another setting, another decision, though the call is the same: no cache may keep the former one."""

    def chosen(dtype: torch.dtype = torch.float16) -> Any:
        return plan_call(dtype, False, "default", 64, 64, 1, hopper, settings.get_pools(dtype))[1:]

    assert chosen()[1:] == ("sm90_f16_256x64x64_acc32",) * 2 + ("sm90_f16_wgrad_64x64",)
    with settings.override(shared_memory=101_376):
        assert card(hopper) == kernels.Card(H100, 101_376, H100, card(hopper).limited)
        reason, *names = chosen()
        assert names == ["sm80_f16_256x64x64_small_acc32"] * 2 + ["sm80_f16_wgrad_64x64"]
        assert "101,376 bytes of shared memory" in reason
        assert chosen(torch.float32)[3] == "sm80_f32_wgrad_32x32_small_3xtf32"
    with settings.override(compute_capability=(8, 6)):
        assert card(hopper)[:3] == ((8, 6), 101_376, H100)
        reason, *names = chosen()
        assert names == ["sm80_f16_256x64x64_small_acc32"] * 2 + ["sm80_f16_wgrad_64x64"]
        assert "sm_86, as if of capability 8.6" in reason
    with settings.override(compute_capability=(8, 0)):
        assert card(hopper).shared_memory == 163 * 1024
        assert chosen()[1:] == ("sm80_f16_256x64x64_acc32",) * 2 + ("sm80_f16_wgrad_64x64",)
    assert chosen()[1:] == ("sm90_f16_256x64x64_acc32",) * 2 + ("sm90_f16_wgrad_64x64",)


def test_limits_apply_to_devices_only(hopper: torch.device) -> None:
    with settings.override(shared_memory=101_376, compute_capability=(8, 0)):
        assert card(H100) == kernels.Card(H100, 227 * 1024, H100)
        assert select_tile("fwd", torch.float16, "fp32", 64, 64, 1, H100).name == F32_FORWARD
        assert select_tile("fwd", torch.float16, "fp32", 64, 64, 1, "cpu").name == "cpu"
        pool = {row.name for row in voxmma.tiles(hopper) if row.in_pool}
    assert "sm80_f16_256x32x64_acc32" in pool and not any(
        "sm90" in name or "x64x64_acc" in name for name in pool
    )


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"shared_memory": 232_449}, r"shared_memory=232449 \(VOXMMA_SHARED_MEMORY\).*allows 232448 bytes"),
        ({"compute_capability": (10, 0)}, r"VOXMMA_COMPUTE_CAPABILITY\): cuda:0 has 9.0"),
        (
            {"compute_capability": (8, 6), "shared_memory": 101_377},
            "allows 101376 bytes a block, as if of capability 8.6",
        ),
    ],
)
def test_limits_beyond_the_device_are_errors(hopper: torch.device, limits: Any, message: str) -> None:
    with settings.override(**limits), pytest.raises(ValueError, match=message):
        plan_call(torch.float16, False, "default", 64, 64, 1, hopper, settings.get_pools())


def test_doctor_shows_limits_and_refuses_nonsense(
    hopper: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, answer in (("is_available", True), ("device_count", 1), ("get_device_name", "H100")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, a=answer: a)
    monkeypatch.setattr(machine, "_C", kernels._C)
    monkeypatch.setattr(doctor, "_C", kernels._C)
    (plain,) = doctor._check_gpus()
    with settings.override(compute_capability=(8, 6)):
        (limited,) = doctor._check_gpus()
    with settings.override(shared_memory=1 << 20):
        (refused,) = doctor._check_gpus()
    assert (plain.status, limited.status, refused.status) == ("ok", "ok", "fail")
    assert f"{len(snapshot())} kernels run on it" in plain.found and "as if" not in plain.found
    assert "as if of capability 8.6, with 101,376 bytes of shared memory a block" in limited.found
    assert "shared_memory=1048576 (VOXMMA_SHARED_MEMORY)" in refused.advice


@pytest.mark.skipif(not _C.HAS_CUDA, reason="a CPU-only build has no tile table")
def test_the_snapshot_is_the_table_of_this_build() -> None:
    """After a change of tiles: python tests/tile_table.py."""
    rows = (
        snapshot() if "9.0a" in _C.CUDA_ARCHS else [r for r in snapshot() if not r["name"].startswith("sm90")]
    )
    assert _C.kernel_configs() == rows


def test_cpu_is_its_own_tile() -> None:
    assert select_tile("fwd", torch.float16, "fp16", 64, 64).name == "cpu"
    with pytest.raises(ValueError, match="forward"):
        select_tile("forward", torch.float16, "fp16", 64, 64)


@pytest.mark.parametrize("capability", [(7, 0), (7, 5), BLACKWELL])
def test_unlisted_architecture_is_named(build: None, capability: tuple[int, int]) -> None:
    with pytest.raises(
        RuntimeError, match=rf"sm_{capability[0]}{capability[1]}.*built for 8.0, 9.0a.*ARCH_LIST"
    ):
        select_tile("fwd", torch.float16, "fp32", 64, 64, 1, capability)


CAPABILITIES = ((8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))


@pytest.mark.parametrize(
    ("archs", "serves", "hopper"),
    [
        ("", [], False),
        ("8.0", [(8, 0), (8, 6), (8, 9)], False),
        ("8.6", [(8, 6), (8, 9)], False),
        ("8.7", [(8, 7)], False),
        ("9.0a", [(9, 0)], True),
        ("8.0 9.0a", [(8, 0), (8, 6), (8, 9), (9, 0)], True),
        ("9.0a 9.0+PTX", [c for c in CAPABILITIES if c >= (9, 0)], True),
        ("8.0+PTX", list(CAPABILITIES), False),
        ("10.0", [(10, 0), (10, 3)], False),
        ("10.0a", [(10, 0)], False),
        ("10.0f", [(10, 0), (10, 3)], False),
        ("10.3f", [(10, 3)], False),
        ("12.0f", [(12, 0), (12, 1)], False),
        ("12.1", [(12, 1)], False),
    ],
)
def test_fault_41_code_of_a_build(archs: str, serves: list[tuple[int, int]], hopper: bool) -> None:
    """Kernels for 9.0a run on 9.0 and nothing else; PTX of 8.0 on a Hopper holds none of them."""
    assert [c for c in CAPABILITIES if _C.build_runs_on(archs, 80, *c)] == serves
    assert [c for c in CAPABILITIES if _C.build_runs_on(archs, 90, *c)] == ([H100] if hopper else [])


# ---- which accumulator runs --------------------------------------------------------------------------------

POOLS = (
    ("auto",),
    ("trimmed",),
    ("all",),
    (F16_FORWARD,),
    ("sm80_f16_256x64x64_acc16", "sm80_f16_256x64x64_acc32"),
)


def test_false_is_final_in_every_pool(build: None) -> None:
    by_name = {tile.name: tile for tile in kernels.compiled()}
    for level, fwd, dgrad, cap in itertools.product(
        ("module", "runtime", "environment"), POOLS, POOLS, (H100, A100, ADA)
    ):
        accumulator, _, *names = plan(
            torch.float16, False, level, cap, fwd=fwd, dgrad=dgrad, small_ch_ceil=1024
        )
        assert accumulator == "fp32"
        assert {by_name[name].accum for name in names} == {"fp32"}


def test_wgrad_accumulates_in_fp32_whatever_is_asked(build: None) -> None:
    by_name = {tile.name: tile for tile in kernels.compiled()}
    for requested, pool, dtype in itertools.product((True, False), POOLS, HALF):
        *_, wgrad = plan(dtype, requested, "module", fwd=pool, dgrad=pool)
        assert by_name[wgrad].accum == "fp32" and by_name[wgrad].op == "wgrad"


@pytest.mark.parametrize("level", ["module", "runtime", "environment"])
def test_explicit_true_runs_fp16_for_fp16_inputs(build: None, level: str) -> None:
    for cap, c, groups in itertools.product((H100, A100, ADA), (8, 16, 64, 256), (1, 8)):
        accumulator, reason, tile, dgrad, _ = plan(torch.float16, True, level, cap, c=c, groups=groups)
        assert accumulator == "fp16" and tile.endswith("acc16") and dgrad.endswith("acc16")
        assert "explicit" in reason


def test_explicit_true_is_honoured_or_explained(build: None) -> None:
    accumulator, reason, tile, dgrad, wgrad = plan(torch.bfloat16, True, "module")
    assert accumulator == "fp16" and "powers of two" in reason
    assert tile == dgrad == "sm90_f16_256x64x64_acc16" and wgrad.startswith("sm90_bf16")
    assert selection.rescaled(torch.bfloat16, accumulator, "module", False)
    assert plan(torch.float32, True, "module")[:1] == ("fp32",)
    assert "never become fp16" in plan(torch.float32, True, "module")[1]
    assert plan(torch.float64, True, "runtime")[0] == "fp64"


def test_explicit_true_without_a_tile_is_explained(monkeypatch: pytest.MonkeyPatch, build: None) -> None:
    _use(monkeypatch, [row for row in snapshot() if row["accum"] != "fp16"], ARCHS)
    accumulator, reason, *_ = plan(torch.float16, True, "module")
    assert accumulator == "fp32" and "no fprop kernel for fp16 inputs with fp16 accumulators" in reason


def test_automatic_rule_is_a_permission(build: None) -> None:
    accumulator, reason, tile, *_ = plan(torch.float16, True, "inference_mode")
    assert (accumulator, tile) == ("fp32", "sm90_f16_256x64x64_acc32")
    assert "no measurement on record" in reason
    accumulator, reason, *_ = plan(torch.float16, True, "inference_mode", torch.device("cpu"))
    assert accumulator == "fp32" and "does not apply on the CPU" in reason


def test_cpu_emulates_an_explicit_request() -> None:
    accumulator, reason, *names = plan(torch.float16, True, "module", torch.device("cpu"))
    assert accumulator == "fp16" and "emulated" in reason and names == ["cpu"] * 3
    assert plan(torch.bfloat16, True, "module", torch.device("cpu"))[0] == "fp16"
    assert plan(torch.float16, False, "default", torch.device("cpu"), fwd=("all",))[0] == "fp32"


def test_named_fp16_tile_is_admitted_without_the_flag(build: None) -> None:
    accumulator, reason, tile, dgrad, _ = plan(torch.float16, False, "default", fwd=(F16_FORWARD,))
    assert (accumulator, tile) == ("fp16", F16_FORWARD) and dgrad.endswith("acc16")
    assert F16_FORWARD in reason


def test_all_mode_and_ceiling_admit_but_do_not_prefer(build: None) -> None:
    both = ("sm90_f16_256x64x64_acc16", "sm90_f16_256x64x64_acc32")
    for modes in ({"fwd": ("all",)}, {"fwd": both}, {"small_ch_ceil": 64}):
        accumulator, reason, *_ = plan(torch.float16, False, "default", **modes)
        assert accumulator == "fp32" and "admitted" in reason
    assert "admitted" not in plan(torch.float16, False, "default", small_ch_ceil=63)[1]


def test_named_pool_that_cannot_run_says_so(build: None) -> None:
    accumulator, reason, tile, *_ = plan(torch.bfloat16, False, "default", fwd=(F16_FORWARD,))
    assert (accumulator, tile) == ("fp32", "sm90_bf16_256x64x64_acc32")
    assert "cannot run this" in reason
    reason = plan(torch.float16, False, "default", dgrad=(F16_FORWARD,), wgrad=("sm80_f16_wgrad_64x64",))[1]
    assert f"dgrad pool [{F16_FORWARD}] cannot run this" in reason
    assert "wgrad pool [sm80_f16_wgrad_64x64]" in reason and reason.count("cannot run") == 1
    pinned = "sm80_f16_256x128x64_acc32"
    assert plan(torch.float16, False, "default", fwd=(pinned,))[2] == pinned


def test_tf32_is_opt_in_and_ieee_never_takes_it(build: None) -> None:
    tf32 = plan(torch.float32, False, "default", fp32_precision="tf32")
    assert [name.endswith("_tf32") for name in tf32[2:]] == [True] * 3 and "rounded to tf32" in tf32[1]
    small = plan(torch.float32, False, "default", c=16, fp32_precision="tf32")
    assert small[2] == "sm80_f32_256x32x32_tf32"
    narrow = plan(torch.float32, False, "default", c=16, groups=16, fp32_precision="tf32")
    assert narrow[2] == "simt_f32" and "groups too narrow" in narrow[1]
    for cap, c, mode in itertools.product(
        (H100, A100, ADA), (8, 64, 320), (("auto",), ("all",), ("sm80_f32_256x64x32_tf32",))
    ):
        names = plan(torch.float32, False, "default", cap, c=c, fwd=mode, dgrad=mode)[2:]
        assert not any(name.endswith("_tf32") for name in names)
    reason = plan(torch.float32, False, "default")[1]
    assert "three TF32 products, ieee accuracy" in reason
    assert "fp32 below 64 channels" in plan(torch.float32, False, "default", c=32)[1]


def test_tf32_without_a_tile_runs_ieee(monkeypatch: pytest.MonkeyPatch, build: None) -> None:
    _use(monkeypatch, [row for row in snapshot() if "tf32" not in row["name"]], ARCHS)
    accumulator, reason, tile, *_ = plan(torch.float32, False, "default", fp32_precision="tf32")
    assert (accumulator, tile) == ("fp32", "simt_f32") and "no tf32 tile" in reason


def test_cpu_tiles_say_chunk_and_rounding() -> None:
    for text, chunk, name in (("32", 32, "cpu_p32"), ("128", 128, "cpu_p128"), ("offset", -1, "cpu_poff")):
        assert select_tile("fwd", torch.float16, f"fp16_promoted:{text}", 8, 8).name == name
        assert kernels.chunk_of(name) == chunk
    assert kernels.chunk_of("cpu") == kernels.chunk_of("cpu_tf32") == 0
    names = plan(torch.float32, False, "default", torch.device("cpu"), fp32_precision="tf32")[2:]
    assert names == ("cpu_tf32",) * 3
    assert plan(torch.float32, False, "default", torch.device("cpu"))[2:] == ("cpu",) * 3


def test_accumulator_words() -> None:
    parse, label = kernels.parse_accumulator, kernels.accumulator_label
    assert parse("fp16_promoted") == parse("fp16_promoted:64") == ("fp16_promoted", 64)
    for text in ("fp32", "fp16", "fp64", "fp16_promoted:32", "fp16_promoted:offset"):
        assert label(*parse(text)) == text
    for bad in ("fp8", "fp16_promoted:", "fp16_promoted:16", "fp16:64", "", None, 64):
        with pytest.raises(ValueError, match="accumulator must be one of fp32, fp16, fp16_promoted:32"):
            parse(bad)


# ---- the gate in the way -----------------------------------------------------------------------------------

OWNER = store.Owner("Some Card", "9.0", 132, "580.1", "abc", device="GPU-1")
CUDA = torch.device("cuda", 0)
F32_FORWARD = "sm90_f16_256x64x64_acc32"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, build: None, tmp_path: Path) -> Iterator[Any]:
    """A stand-in for a device with a file of verdicts; call it to record one: records(tile, failed check)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H100)
    monkeypatch.setattr(store, "owner_of", lambda device, one_card=False: OWNER)

    def record(tile: str, failed: str = "") -> None:
        checks = [validation.Check("bound", True, "d")]
        if failed:
            checks.append(validation.Check(failed, False, "1.00x, 1.03x needed"))
        validation.keep(validation.Verdict(tile, not failed, tuple(checks)), CUDA)

    with settings.override(cache_dir=str(tmp_path)):
        yield record


def automatic(**pools: Any) -> Any:
    return plan(torch.float16, True, "inference_mode", CUDA, **pools)


def test_automatic_rule_needs_a_verdict_of_this_device(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that fails if the gate is removed: nothing on record, a refusal, a foreign device."""
    accumulator, reason, tile, *_ = automatic()
    assert (accumulator, tile) == ("fp32", F32_FORWARD) and "no measurement on record" in reason
    records(F16_FORWARD, failed="gain")
    accumulator, reason, tile, *_ = automatic()
    assert (accumulator, tile) == ("fp32", F32_FORWARD) and "gain: 1.00x, 1.03x needed" in reason
    records(F16_FORWARD)
    accumulator, reason, tile, dgrad, wgrad = automatic()
    assert (accumulator, tile, dgrad) == ("fp16", F16_FORWARD, F16_FORWARD) and "gate passed" in reason
    assert wgrad == "sm90_f16_wgrad_64x64"
    assert selection.rescaled(torch.float16, accumulator, "inference_mode", False)
    assert plan(torch.bfloat16, True, "inference_mode", CUDA)[0] == "fp16"
    assert plan(torch.float16, True, "inference_mode", CUDA, c=32)[0] == "fp32"  # another tile
    for changed in (*(replace(OWNER, **{f: "changed"}) for f in ("device", "driver", "build")), None):
        monkeypatch.setattr(store, "owner_of", lambda device, one_card=False, owner=changed: owner)
        _clear()
        assert automatic()[0] == "fp32"
    _clear()
    assert automatic()[0] == "fp32"


def test_a_missing_step_closes_the_gate(records: Any) -> None:
    validation.keep(validation.Verdict(F16_FORWARD, True, ()), CUDA)
    records(F16_FORWARD, failed="bound")
    assert automatic()[0] == "fp32"
    with settings.override(cache_dir="/nowhere"):
        assert automatic()[0] == "fp32"


def test_speed_is_no_objection_to_a_request_but_an_error_is(records: Any) -> None:
    assert plan(torch.float16, True, "module", CUDA)[0] == "fp16"
    records(F16_FORWARD, failed="gain")
    assert plan(torch.float16, True, "module", CUDA)[0] == "fp16"
    for check in ("legality", "overflow", "finite", "bound", "budget"):
        records(F16_FORWARD, failed=check)
        accumulator, reason, tile, *_ = plan(torch.float16, True, "module", CUDA)
        assert (accumulator, tile) == ("fp32", F32_FORWARD)
        assert f"the gate refuses {F16_FORWARD}: {check}" in reason
        assert plan(torch.float16, False, "default", CUDA, fwd=(F16_FORWARD,))[0] == "fp32"
    token = validation._measuring.set(True)  # a new measurement can still run it
    try:
        assert plan(torch.float16, True, "module", CUDA)[0] == "fp16"
        assert automatic()[0] == "fp32"
    finally:
        validation._measuring.reset(token)


def test_small_channel_ceiling_and_all_mode_need_the_verdict_too(records: Any) -> None:
    small = "sm90_f16_256x32x32_acc16"

    def default(c: int, **pools: Any) -> Any:
        return plan(torch.float16, False, "default", CUDA, c=c, **pools)

    assert default(32, small_ch_ceil=32)[0] == default(64, fwd=("all",))[0] == "fp32"
    records(small)
    records(F16_FORWARD)
    assert default(32)[0] == "fp32"  # the default ceiling is 0
    accumulator, reason, tile, *_ = default(32, small_ch_ceil=32)
    assert (accumulator, tile) == ("fp16", small) and "the gate allows" in reason
    assert selection.rescaled(torch.float16, accumulator, "default", False)
    assert default(32, small_ch_ceil=31)[0] == "fp32" and default(64, small_ch_ceil=32)[0] == "fp32"
    assert default(64, fwd=("all",))[0] == "fp16"
    for level in ("module", "runtime", "environment"):
        assert plan(torch.float16, False, level, CUDA, c=32, small_ch_ceil=32)[0] == "fp32"
    records(small, failed="gain")
    assert default(32, small_ch_ceil=32)[0] == "fp32"


def test_verdicts_are_read_once(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    records(F16_FORWARD)
    automatic()
    monkeypatch.setattr(validation, "on_record", lambda *_: pytest.fail("the verdict was read again"))
    assert automatic()[0] == "fp16"
    monkeypatch.setattr(validation, "stamp", lambda: pytest.fail("a plain call looked for verdicts"))
    assert plan(torch.float16, False, "default", CUDA)[0] == "fp32"


# ---- the table ---------------------------------------------------------------------------------------------

PUBLISHED = [
    ("fwd", "32x32x32", "fp16", "C <= 48"),
    ("fwd", "64x64x32", "fp32", "C = 64"),
    ("fwd", "128x64x32", "fp32", "C = 64"),
    ("fwd", "64x128x32", "fp32", "C >= 128"),
    ("fwd", "64x128x32", "fp16", "C >= 128"),
    ("dgrad", "64x64x32", "fp32", "C = 64"),
    ("dgrad", "64x128x32", "fp32", "C >= 128"),
    ("dgrad", "64x64x32", "fp16", "C = 64"),
    ("dgrad", "64x128x32", "fp16", "C >= 128"),
]


def test_table_has_a_row_for_every_published_tile(build: None) -> None:
    table = voxmma.tiles("cpu")
    published = [row for row in table if row.architectures == "published"]
    for op, shape, accumulator, rule in PUBLISHED:
        rows = [
            row
            for row in published
            if (row.op, row.shape, row.accumulator) == (op, shape, accumulator)
            and row.channel_rule.startswith(rule)
        ]
        assert len(rows) == 2, "the tile and its offset-precomputing variant"
        assert sum("pcoff" in row.name for row in rows) == 1
        for row in rows:
            assert row.ours.endswith(f"acc{accumulator[2:]}")
    assert len(published) == 2 * len(PUBLISHED)
    assert any(row.stages == 3 and row.shape == "64x128x32" for row in published)
    ours = {row.name: row.ours for row in published}
    assert ours["fwd_32x32x32_f16acc"] == "sm90_f16_256x32x32_acc16"
    assert ours["dgrad_64x128x32"] == "sm90_f16_256x128x64_acc32"


def test_table_lists_every_compiled_tile_and_prints(build: None) -> None:
    table = voxmma.tiles("cpu")
    names = {row.name for row in table}
    assert names >= {row["name"] for row in snapshot()}
    text = str(table)
    assert all(name in text for name in names)
    assert "built for 8.0, 9.0a" in text and repr(table) == text


def test_table_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    _use(monkeypatch, [], [])
    try:
        table = voxmma.tiles()
        assert "built without CUDA" in str(table)
        assert {row.ours for row in table if row.architectures == "published"} == {"not compiled here"}
        cpu = [row for row in table if row.name == "cpu"]
        assert [(row.op, row.accumulator, row.in_pool) for row in cpu] == [
            ("fprop", "fp32", True),
            ("fprop", "fp16", False),
            ("fprop", "fp64", True),
            ("wgrad", "fp32", True),
        ]
        voxmma.set_fp16_accum(True)
        assert [row.in_pool for row in voxmma.tiles("cpu") if row.name == "cpu"] == [True] * 4
    finally:
        monkeypatch.undo()
        _clear()


def test_pool_column_follows_the_settings(monkeypatch: pytest.MonkeyPatch, build: None) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H100)

    def pool() -> dict[str, bool]:
        return {row.name: row.in_pool for row in voxmma.tiles("cuda:0")}

    assert pool()["sm90_f16_256x64x64_acc32"] and not pool()[F16_FORWARD]
    voxmma.set_fp16_accum(True)
    assert pool()[F16_FORWARD]
    voxmma.set_fp16_accum(None)
    with settings.override(fwd_algo_mode="all"):
        assert pool()[F16_FORWARD]
        voxmma.set_fp16_accum(False)
        assert not pool()[F16_FORWARD]
        voxmma.set_fp16_accum(None)
    with settings.override(fwd_algo_mode=F16_FORWARD, dgrad_algo_mode=F16_FORWARD):
        assert pool()[F16_FORWARD] and not pool()["sm90_f16_256x64x64_acc32"]
    with (
        pytest.raises(ValueError, match="is no fwd tile"),
        settings.override(fwd_algo_mode="sm90_f16_256x64x64_acc8"),
    ):
        pass


@pytest.mark.gpu
def test_this_device_has_a_tile_for_every_call() -> None:
    for dtype, c in itertools.product((*HALF, torch.float32, torch.float64), (1, 3, 8, 16, 64, 256)):
        accumulator = "fp64" if dtype == torch.float64 else "fp32"
        for op in settings.OPS:
            assert select_tile(op, dtype, accumulator, c, c, 1, "cuda").name != "cpu"
    roles = [row for row in voxmma.tiles() if row.architectures == "published"]
    assert all(row.ours != "not compiled here" for row in roles)
    assert any(row.in_pool for row in voxmma.tiles())


@pytest.mark.gpu
def test_the_device_says_its_shared_memory() -> None:
    """The driver, torch and CUDA's documentation agree."""
    device = torch.device("cuda", 0)
    capability = torch.cuda.get_device_capability(device)
    asked = card(device, settings.NO_LIMITS)
    assert asked == kernels.Card(capability, kernels.shared_memory_of(capability), capability)
    told = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)
    assert told in (None, asked.shared_memory)


@pytest.mark.gpu
def test_an_error_is_told_once() -> None:
    """CUDA keeps a thread's last error until it is asked for, and a launch asks how it went."""
    x = voxmma.Voxels(random_coords(300, 9).cuda(), torch.ones(300, 16, device="cuda"))
    layer = voxmma.nn.SparseConv3d(16, 16, 3, device="cuda")
    expected = layer(x).feats
    for device, message in ((torch.cuda.device_count(), "invalid device"), (-1, "has no index")):
        with pytest.raises(RuntimeError, match=message):
            voxmma._C.shared_memory(device)
        assert torch.equal(layer(x).feats, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp16", "bf16", "ieee", "tf32"])
def test_fault_40_training_as_on_a_small_card(precision: str) -> None:
    """Forward and both gradients with 99 KB: only tiles that fit run, and they give what large ones give."""
    dtype = formats.DTYPES.get(precision, torch.float32)
    coords = random_coords(3000, 20).cuda()
    x = torch.randn(3000, 64, device="cuda", dtype=dtype)
    layer = voxmma.nn.SparseConv3d(64, 64, 3).to("cuda", dtype)
    small = {"compute_capability": (8, 0), "shared_memory": 101_376}
    fp32_precision = "tf32" if precision == "tf32" else "ieee"
    results = []
    for limits in ({"compute_capability": None, "shared_memory": None}, small):
        with settings.override(fp32_precision=fp32_precision, **limits):
            feats = x.clone().requires_grad_()
            out = layer(voxmma.Voxels(coords, feats))
            results.append((out.feats, *torch.autograd.grad(out.feats, (feats, layer.weight), out.feats)))
            record = voxmma.explain(out)
    by_name = {tile.name: tile for tile in kernels.compiled()}
    ran = [by_name[name] for name in (record.tile, record.dgrad_tile, record.wgrad_tile)]
    assert all(tile.arch == 80 and tile.shared_memory <= 101_376 for tile in ran), ran
    for large, got in zip(*results, strict=True):
        error = float((got.double() - large.double()).norm() / large.double().norm())
        assert error < {"fp16": 2e-3, "bf16": 1e-2, "ieee": 1e-5, "tf32": 2e-3}[precision], record
