"""The tile table and its selector, on a stand-in build that holds every tile, so that no GPU is needed."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import voxmma
from voxmma import gate, settings

tiles_module = importlib.import_module("voxmma.tiles")  # the name voxmma.tiles is the function
select_tile, plan_call = tiles_module.select_tile, tiles_module.plan_call

H100, A100, ADA, BLACKWELL = (9, 0), (8, 0), (8, 9), (12, 0)
DEFAULT_POOLS = dict(
    zip(("fwd", "dgrad", "wgrad", "small_ch_ceil", "fp32_precision"), settings.DEFAULT_POOLS, strict=True)
)
HALF = (torch.float16, torch.bfloat16)
F16_FORWARD = "sm90_f16_256x64x64_acc16"


def _row(
    name: str, op: str, dtype: str, accum: str, m: int, n: int, k: int, atom: str, arch: int
) -> dict[str, Any]:
    row = {"name": name, "op": op, "dtype": dtype, "accum": accum, "m": m, "n": n, "k": k, "atom": atom}
    return {**row, "stages": 3, "promote": 0, "arch": arch}


def full_build() -> list[dict[str, Any]]:
    rows = []
    for arch, short in itertools.product((90, 80), ("f16", "bf16")):
        dtype = {"f16": "fp16", "bf16": "bf16"}[short]
        for accum, n, k in itertools.product(
            ("fp32", "fp16") if short == "f16" else ("fp32",), (32, 64, 128), (32, 64)
        ):
            name = f"sm{arch}_{short}_256x{n}x{k}_acc{accum[2:]}"
            rows.append(_row(name, "fprop", dtype, accum, 256, n, k, "MMA", arch))
        for m, n in ((32, 64), (64, 64), (64, 128)) if arch == 90 else ((64, 64), (32, 64)):
            needs = 90 if m == 64 else arch
            rows.append(
                _row(f"sm{arch}_{short}_wgrad_{m}x{n}", "wgrad", dtype, "fp32", m, n, 16, "MMA", needs)
            )
        if arch == 80:
            small = _row(f"sm80_{short}_wgrad_32x64_small", "wgrad", dtype, "fp32", 32, 64, 16, "MMA", 80)
            rows.append({**small, "stages": 1})
    for n, (k, chunk) in itertools.product((32, 64), ((32, 32), (64, 64), (64, 128), (64, -1))):
        name = f"sm80_f16_256x{n}x{k}_acc16p{'off' if chunk == -1 else chunk}"
        row = _row(name, "fprop", "fp16", "fp16_promoted", 256, n, k, "MMA", 80)
        rows.append({**row, "promote": chunk})
    for scheme, promote in (("3xtf32", 8), ("tf32", 0)):
        for n in (32, 64):
            row = _row(f"sm80_f32_256x{n}x32_{scheme}", "fprop", "fp32", "fp32", 256, n, 32, "MMA", 80)
            rows.append({**row, "promote": promote})
        for small, stages in (("", 2), ("_small", 1)):
            name = f"sm80_f32_wgrad_32x32{small}_{scheme}"
            row = _row(name, "wgrad", "fp32", "fp32", 32, 32, 16, "MMA", 80)
            rows.append({**row, "promote": promote, "stages": stages})
    for short, dtype in (("f32", "fp32"), ("f64", "fp64"), ("f16", "fp16"), ("bf16", "bf16")):
        accum = "fp64" if short == "f64" else "fp32"
        rows.append(_row(f"simt_{short}", "fprop", dtype, accum, 256, 32, 32, "SIMT", 80))
        rows.append(_row(f"simt_{short}_wgrad", "wgrad", dtype, accum, 32, 32, 32, "SIMT", 80))
    return rows


def _clear() -> None:
    tiles_module.compiled.cache_clear()
    tiles_module._plan_call.cache_clear()


def _use(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], archs: list[str]) -> None:
    build = SimpleNamespace(HAS_CUDA=bool(rows), CUDA_ARCHS=archs, kernel_configs=lambda: rows)
    monkeypatch.setattr(tiles_module, "_C", build)
    monkeypatch.setattr(settings, "_C", build)
    _clear()


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A build that holds every tile for sm_80 and sm_90a."""
    _use(monkeypatch, full_build(), ["8.0", "9.0a"])
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
        ("fwd", torch.float16, "fp32", 96, 96, 1, H100, "sm90_f16_256x128x32_acc32"),
        ("fwd", torch.float16, "fp32", 100, 40, 1, H100, "sm90_f16_256x64x64_acc32"),
        ("fwd", torch.float16, "fp32", 256, 512, 1, H100, "sm90_f16_256x128x64_acc32"),
        ("fwd", torch.float16, "fp32", 4, 64, 1, H100, "sm80_f16_256x64x32_acc32"),
        ("dgrad", torch.float16, "fp32", 4, 64, 1, H100, "sm90_f16_256x32x64_acc32"),
        ("dgrad", torch.float16, "fp32", 128, 32, 1, H100, "sm90_f16_256x128x32_acc32"),
        ("fwd", torch.bfloat16, "fp32", 64, 128, 1, A100, "sm80_bf16_256x128x64_acc32"),
        ("fwd", torch.bfloat16, "fp32", 64, 128, 1, ADA, "sm80_bf16_256x128x32_acc32"),
        ("fwd", torch.float16, "fp16", 128, 128, 1, ADA, "sm80_f16_256x128x32_acc16"),
        ("wgrad", torch.float16, "fp32", 64, 64, 1, H100, "sm90_f16_wgrad_64x64"),
        ("wgrad", torch.float16, "fp32", 16, 256, 1, H100, "sm90_f16_wgrad_64x128"),
        ("wgrad", torch.bfloat16, "fp32", 64, 64, 1, A100, "sm80_bf16_wgrad_32x64"),
        ("wgrad", torch.bfloat16, "fp32", 64, 64, 1, ADA, "sm80_bf16_wgrad_32x64_small"),
        ("fwd", torch.float16, "fp32", 64, 64, 64, H100, "simt_f16"),
        ("wgrad", torch.float16, "fp32", 64, 64, 64, H100, "simt_f16_wgrad"),
        ("fwd", torch.float16, "fp32", 64, 64, 8, H100, "sm80_f16_256x32x32_acc32"),
        ("fwd", torch.float16, "fp16", 64, 64, 64, A100, "sm80_f16_256x32x32_acc16"),
        ("fwd", torch.float32, "fp32", 64, 64, 1, H100, "sm80_f32_256x32x32_3xtf32"),
        ("fwd", torch.float32, "fp32", 64, 63, 1, H100, "simt_f32"),
        ("fwd", torch.float32, "fp32", 128, 128, 2, H100, "sm80_f32_256x32x32_3xtf32"),
        ("fwd", torch.float32, "fp32", 128, 128, 4, H100, "simt_f32"),
        ("dgrad", torch.float32, "fp32", 256, 96, 1, A100, "sm80_f32_256x32x32_3xtf32"),
        ("wgrad", torch.float32, "fp32", 64, 64, 1, A100, "sm80_f32_wgrad_32x32_3xtf32"),
        ("wgrad", torch.float32, "fp32", 64, 64, 1, ADA, "sm80_f32_wgrad_32x32_small_3xtf32"),
        ("wgrad", torch.float32, "fp32", 32, 64, 1, A100, "simt_f32_wgrad"),
        ("fwd", torch.float32, "fp32", 64, 64, 1, ADA, "simt_f32"),
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
    by_name = {tile.name: tile for tile in tiles_module.compiled()}
    channels = (1, 3, 8, 18, 32, 96, 128, 320)
    for op, dtype, c_in, c_out, cap in itertools.product(
        settings.OPS, HALF, channels, channels, (H100, A100, ADA)
    ):
        accumulators = ("fp32", "fp16") if dtype == torch.float16 and op != "wgrad" else ("fp32",)
        for accumulator in accumulators:
            tile = by_name[select_tile(op, dtype, accumulator, c_in, c_out, 1, cap).name]
            assert tile.op == ("wgrad" if op == "wgrad" else "fprop")
            assert (tile.input, tile.accum) == (tiles_module.DTYPE_NAMES[dtype], accumulator)
            assert tile.runs_on(cap) and tile.atom != "SIMT"


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


@pytest.mark.parametrize(
    ("archs", "capability", "expected"),
    [
        (["8.0"], (8, 6), True),
        (["8.6"], (8, 0), False),
        (["9.0a"], (9, 0), True),
        (["9.0a"], (10, 0), False),
        (["9.0+PTX"], (12, 0), True),
        (["9.0"], (12, 0), False),
        ([], (8, 0), False),
    ],
)
def test_machine_code_of_a_build(
    monkeypatch: pytest.MonkeyPatch, archs: list[str], capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(tiles_module, "_C", SimpleNamespace(CUDA_ARCHS=archs))
    assert tiles_module.built_for(capability) is expected


# ---- which accumulator runs --------------------------------------------------------------------------------

POOLS = (
    ("auto",),
    ("trimmed",),
    ("all",),
    (F16_FORWARD,),
    ("sm80_f16_256x64x64_acc16", "sm80_f16_256x64x64_acc32"),
)


def test_false_is_final_in_every_pool(build: None) -> None:
    by_name = {tile.name: tile for tile in tiles_module.compiled()}
    for level, fwd, dgrad, cap in itertools.product(
        ("module", "runtime", "environment"), POOLS, POOLS, (H100, A100, ADA)
    ):
        accumulator, _, *names = plan(
            torch.float16, False, level, cap, fwd=fwd, dgrad=dgrad, small_ch_ceil=1024
        )
        assert accumulator == "fp32"
        assert {by_name[name].accum for name in names} == {"fp32"}


def test_wgrad_accumulates_in_fp32_whatever_is_asked(build: None) -> None:
    by_name = {tile.name: tile for tile in tiles_module.compiled()}
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
    assert tiles_module.rescaled(torch.bfloat16, accumulator, "module", False)
    assert plan(torch.float32, True, "module")[:1] == ("fp32",)
    assert "never become fp16" in plan(torch.float32, True, "module")[1]
    assert plan(torch.float64, True, "runtime")[0] == "fp64"


def test_explicit_true_without_a_tile_is_explained(monkeypatch: pytest.MonkeyPatch, build: None) -> None:
    _use(monkeypatch, [row for row in full_build() if row["accum"] != "fp16"], ["8.0", "9.0a"])
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
    reason = plan(torch.float16, False, "default", dgrad=(F16_FORWARD,), wgrad=("sm80_f16_wgrad_32x64",))[1]
    assert f"dgrad pool [{F16_FORWARD}] cannot run this" in reason
    assert "wgrad pool [sm80_f16_wgrad_32x64]" in reason and reason.count("cannot run") == 1
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
    _use(monkeypatch, [row for row in full_build() if "tf32" not in row["name"]], ["8.0", "9.0a"])
    accumulator, reason, tile, *_ = plan(torch.float32, False, "default", fp32_precision="tf32")
    assert (accumulator, tile) == ("fp32", "simt_f32") and "no tf32 tile" in reason


def test_cpu_tiles_say_chunk_and_rounding() -> None:
    for text, chunk, name in (("32", 32, "cpu_p32"), ("128", 128, "cpu_p128"), ("offset", -1, "cpu_poff")):
        assert select_tile("fwd", torch.float16, f"fp16_promoted:{text}", 8, 8).name == name
        assert tiles_module.chunk_of(name) == chunk
    assert tiles_module.chunk_of("cpu") == tiles_module.chunk_of("cpu_tf32") == 0
    names = plan(torch.float32, False, "default", torch.device("cpu"), fp32_precision="tf32")[2:]
    assert names == ("cpu_tf32",) * 3
    assert plan(torch.float32, False, "default", torch.device("cpu"))[2:] == ("cpu",) * 3


def test_accumulator_words() -> None:
    parse, label = tiles_module.parse_accumulator, tiles_module.accumulator_label
    assert parse("fp16_promoted") == parse("fp16_promoted:64") == ("fp16_promoted", 64)
    for text in ("fp32", "fp16", "fp64", "fp16_promoted:32", "fp16_promoted:offset"):
        assert label(*parse(text)) == text
    for bad in ("fp8", "fp16_promoted:", "fp16_promoted:16", "fp16:64", "", None, 64):
        with pytest.raises(ValueError, match="accumulator must be one of fp32, fp16, fp16_promoted:32"):
            parse(bad)


# ---- the gate in the way -----------------------------------------------------------------------------------

OWNER = {"device": "GPU-1", "driver": "580.1", "build": "abc"}
CUDA = torch.device("cuda", 0)
F32_FORWARD = "sm90_f16_256x64x64_acc32"


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, build: None, tmp_path: Path) -> Iterator[Any]:
    """A stand-in for a device with a file of verdicts; call it to record one: records(tile, failed check)."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H100)
    monkeypatch.setattr(gate, "identity", lambda device: OWNER)

    def record(tile: str, failed: str = "") -> None:
        checks = [{"name": "bound", "passed": True, "detail": "d"}]
        if failed:
            checks.append({"name": failed, "passed": False, "detail": "1.00x, 1.03x needed"})
        gate._write("tile", tile, OWNER, {"allowed": not failed, "checks": checks})

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
    assert tiles_module.rescaled(torch.float16, accumulator, "inference_mode", False)
    assert plan(torch.bfloat16, True, "inference_mode", CUDA)[0] == "fp16"
    assert plan(torch.float16, True, "inference_mode", CUDA, c=32)[0] == "fp32"  # another tile
    for field in OWNER:
        monkeypatch.setattr(gate, "identity", lambda device, f=field: {**OWNER, f: "changed"})
        _clear()
        assert automatic()[0] == "fp32"
    monkeypatch.setattr(gate, "identity", lambda device: None)
    _clear()
    assert automatic()[0] == "fp32"


def test_a_missing_step_closes_the_gate(records: Any) -> None:
    gate._write("tile", F16_FORWARD, OWNER, {"allowed": True, "checks": []})
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
    token = gate._measuring.set(True)  # a new measurement can still run it
    try:
        assert plan(torch.float16, True, "module", CUDA)[0] == "fp16"
        assert automatic()[0] == "fp32"
    finally:
        gate._measuring.reset(token)


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
    assert tiles_module.rescaled(torch.float16, accumulator, "default", False)
    assert default(32, small_ch_ceil=31)[0] == "fp32" and default(64, small_ch_ceil=32)[0] == "fp32"
    assert default(64, fwd=("all",))[0] == "fp16"
    for level in ("module", "runtime", "environment"):
        assert plan(torch.float16, False, level, CUDA, c=32, small_ch_ceil=32)[0] == "fp32"
    records(small, failed="gain")
    assert default(32, small_ch_ceil=32)[0] == "fp32"


def test_verdicts_are_read_once(records: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    records(F16_FORWARD)
    automatic()
    monkeypatch.setattr(gate, "on_record", lambda *_: pytest.fail("the verdict was read again"))
    assert automatic()[0] == "fp16"
    monkeypatch.setattr(gate, "stamp", lambda: pytest.fail("a plain call looked for verdicts"))
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
    assert names >= {row["name"] for row in full_build()}
    text = str(table)
    assert all(name in text for name in names)
    assert "built for 8.0, 9.0a" in text and repr(table) == text
    from rich.console import Console

    console = Console(width=400, file=None, record=True)
    with console.capture() as capture:
        console.print(table)
    assert "sm90_f16_wgrad_64x64" in capture.get()


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
