"""The five-level precedence, exhaustively, and the settings around it."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch

import voxmma
from voxmma.dispatch import settings

STATES = (None, True, False)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def environment(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """Puts the process in the state an import under these variables gives."""
    monkeypatch.setattr(settings, "_environment", settings.read_environment(variables))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", ["train", "no_grad", "inference_mode"])
def test_precedence_is_exhaustively_right(
    monkeypatch: pytest.MonkeyPatch, mode: str, dtype: torch.dtype
) -> None:
    context = {"train": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[
        mode
    ]
    words = {True: "true", False: "false"}
    for module, runtime, env in itertools.product(STATES, STATES, STATES):
        environment(monkeypatch, **({} if env is None else {"VOXMMA_USE_FP16_ACCUM": words[env]}))
        voxmma.set_fp16_accum(runtime)
        if module is not None:
            expected = (module, "module")
        elif runtime is not None:
            expected = (runtime, "runtime")
        elif env is not None:
            expected = (env, "environment")
        elif mode == "inference_mode" and dtype in (torch.float16, torch.bfloat16):
            expected = (True, "inference_mode")
        else:
            expected = (False, "default")
        with context():
            assert voxmma.resolve_fp16_accum(module, dtype) == expected, (module, runtime, env)
            got = voxmma.get_fp16_accum()
        assert got is bool(runtime if runtime is not None else env)


@pytest.mark.parametrize("text", ["true", "TRUE", "True", "1", "false", "False", "FALSE", "0"])
def test_environment_flag_is_case_insensitive(text: str) -> None:
    read = settings.read_environment({"VOXMMA_USE_FP16_ACCUM": text})
    assert read.fp16_accum is (text.lower() in ("true", "1"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("VOXMMA_USE_FP16_ACCUM", "maybe"),
        ("VOXMMA_USE_FP16_ACCUM", ""),
        ("VOXMMA_USE_FP16_ACCUM", "yes"),
        ("VOXMMA_FP32_PRECISION", "fast"),
        ("VOXMMA_FWD_ALGO_MODE", "trimed"),
        ("VOXMMA_DGRAD_ALGO_MODE", "[auto,all]"),
        ("VOXMMA_WGRAD_ALGO_MODE", "[]"),
        ("VOXMMA_PCOFF_F16ACC_SMALL_CH_CEIL", "-1"),
        ("VOXMMA_PCOFF_F16ACC_SMALL_CH_CEIL", "many"),
        ("VOXMMA_CACHE_DIR", " "),
        ("VOXMMA_SHARED_MEMORY", "99 KB"),
        ("VOXMMA_SHARED_MEMORY", "0"),
        ("VOXMMA_COMPUTE_CAPABILITY", "86"),
        ("VOXMMA_COMPUTE_CAPABILITY", "7.5"),
    ],
)
def test_unreadable_environment_names_variable_and_value(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{variable}={value!r}".replace("[", r"\[").replace("]", r"\]")):
        settings.read_environment({variable: value})


def test_readable_environment() -> None:
    read = settings.read_environment(
        {
            "VOXMMA_FP32_PRECISION": "TF32",
            "VOXMMA_FWD_ALGO_MODE": "All",
            "VOXMMA_PCOFF_F16ACC_SMALL_CH_CEIL": "32",
            "VOXMMA_CACHE_DIR": "/tmp/somewhere",
            "VOXMMA_SHARED_MEMORY": "101376",
            "VOXMMA_COMPUTE_CAPABILITY": "8.6",
        }
    )
    assert read == settings.Settings(
        fp32_precision="tf32",
        fwd_algo_mode=("all",),
        pcoff_f16acc_small_ch_ceil=32,
        cache_dir="/tmp/somewhere",
        shared_memory=101376,
        compute_capability=(8, 6),
    )
    assert settings.read_environment({}) == settings.Settings()


@pytest.mark.parametrize("bad", [0, 1, "true", torch.tensor(True)])
def test_flags_take_bools_and_none_only(bad: object) -> None:
    with pytest.raises(TypeError, match="True, False or None"):
        voxmma.set_fp16_accum(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="use_fp16_accum"):
        voxmma.resolve_fp16_accum(bad, torch.float16)  # type: ignore[arg-type]


def test_snapshot_and_restore_keep_unset_unset() -> None:
    start = settings.snapshot()
    voxmma.set_fp16_accum(False)
    voxmma.set_fp32_precision("tf32")
    changed = settings.snapshot()
    settings.restore(start)
    assert settings.snapshot() == start == settings.Settings()
    settings.restore(changed)
    assert voxmma.resolve_fp16_accum(None, torch.float16) == (False, "runtime")
    assert voxmma.get_fp32_precision() == "tf32"
    with pytest.raises(TypeError, match="snapshot"):
        settings.restore({"fp16_accum": True})  # type: ignore[arg-type]


def test_override_restores_its_own_settings_after_an_exception() -> None:
    voxmma.set_fp16_accum(False)
    with pytest.raises(RuntimeError, match="inside"), settings.override(fp16_accum=True, fwd_algo_mode="all"):
        assert voxmma.get_fp16_accum() and settings.get_algo_mode("fwd") == ("all",)
        voxmma.set_deterministic(True)
        raise RuntimeError("inside")
    assert settings.snapshot() == settings.Settings(fp16_accum=False, deterministic=True)


def test_override_refuses_what_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="fp17_accum"), settings.override(fp17_accum=True):
        pass
    with (
        pytest.raises(ValueError, match="dgrad_algo_mode='quick'"),
        settings.override(dgrad_algo_mode="quick"),
    ):
        pass
    with pytest.raises(ValueError, match="fp32_precision"):
        voxmma.set_fp32_precision("bf16x3")
    assert settings.snapshot() == settings.Settings()


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("fwd_algo_mode", 3, TypeError),
        ("dgrad_algo_mode", [1], TypeError),
        ("wgrad_algo_mode", [], TypeError),
        ("compute_capability", (9, -1), ValueError),
        ("compute_capability", (9, 12), ValueError),
        ("cache_dir", 3, TypeError),
        ("cache_dir", b"/tmp", TypeError),
        ("cache_dir", "", ValueError),
        ("cache_dir", " ", ValueError),
        ("cache_dir", "a\0b", ValueError),
    ],
)
def test_bad_values_are_named(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name} must be"), settings.override(**{name: value}):
        pass
    assert settings.snapshot() == settings.Settings()


def test_fp32_precision_follows_torch_until_set(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = torch.backends.cuda.matmul
    assert voxmma.get_fp32_precision() == "ieee"
    before = matmul.allow_tf32
    try:
        matmul.allow_tf32 = True
        assert voxmma.get_fp32_precision() == "tf32"
        environment(monkeypatch, VOXMMA_FP32_PRECISION="ieee")
        assert voxmma.get_fp32_precision() == "ieee"
        voxmma.set_fp32_precision("tf32")
        assert voxmma.get_fp32_precision() == "tf32"
    finally:
        matmul.allow_tf32 = before


def test_deterministic_follows_torch() -> None:
    assert voxmma.get_deterministic()
    voxmma.set_deterministic(False)
    assert not voxmma.get_deterministic()
    torch.use_deterministic_algorithms(True)
    try:
        assert voxmma.get_deterministic()
    finally:
        torch.use_deterministic_algorithms(False)


def test_algo_modes_and_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.get_algo_mode("wgrad") == ("auto",)
    environment(monkeypatch, VOXMMA_WGRAD_ALGO_MODE="trimmed", VOXMMA_CACHE_DIR="~/elsewhere")
    assert settings.get_algo_mode("wgrad") == ("trimmed",)
    assert settings.get_algo_mode("fwd") == ("auto",)
    assert settings.get_cache_dir() == settings.Path("~/elsewhere").expanduser()
    with settings.override(wgrad_algo_mode="all", pcoff_f16acc_small_ch_ceil=48):
        assert settings.get_algo_mode("wgrad") == ("all",)
        assert settings.get_pcoff_f16acc_small_ch_ceil() == 48
    assert settings.get_pcoff_f16acc_small_ch_ceil() == 0
    with pytest.raises(ValueError, match="bwd"):
        settings.get_algo_mode("bwd")


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    environment(monkeypatch, VOXMMA_SHARED_MEMORY="101376")
    assert settings.get_limits() == settings.get_pools()[5] == (None, 101376)
    with settings.override(compute_capability=(8, 6), shared_memory=65536):
        assert settings.get_limits() == ((8, 6), 65536)
    for bad in ({"shared_memory": 0}, {"shared_memory": "99"}, {"compute_capability": (7, 5)},
                {"compute_capability": 8.6}):  # fmt: skip
        with pytest.raises(ValueError, match=f"{next(iter(bad))} must be"), settings.override(**bad):
            pass


def test_decision_is_per_thread_and_per_call() -> None:
    """Inference mode is a property of a thread, a flag of a call: neither leaks into other threads."""
    wrong: list[object] = []
    start = threading.Barrier(6)

    def work(index: int) -> None:
        inference = index % 2 == 0
        flag = STATES[index // 2]
        expected = (
            (flag, "module")
            if flag is not None
            else (inference, "inference_mode" if inference else "default")
        )
        start.wait()
        for _ in range(300):
            with torch.inference_mode(inference):
                got = voxmma.resolve_fp16_accum(flag, torch.float16)
            if got != expected:
                wrong.append((index, got))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_concurrent_setters_lose_nothing() -> None:
    """Two threads that change different settings at the same time do not undo each other."""

    def work(name: str, value: object) -> None:
        for _ in range(500):
            with settings.override(**{name: value}):
                pass

    threads = [
        threading.Thread(target=work, args=("fp16_accum", True)),
        threading.Thread(target=work, args=("pcoff_f16acc_small_ch_ceil", 32)),
    ]
    voxmma.set_fp32_precision("ieee")
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert settings.snapshot() == settings.Settings(fp32_precision="ieee")
