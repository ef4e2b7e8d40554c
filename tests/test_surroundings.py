"""What surrounds a call does not change it, and scopes leave nothing behind: order, threads, copies."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import json
import pickle
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import voxmma
from voxmma import nn as vnn
from voxmma import torchflags
from voxmma.dispatch import settings
from voxmma.export.artefact import compile_model, load
from voxmma.export.frozen import ArtefactError
from voxmma.precision.active import activate
from voxmma.precision.policy import PolicyError, PrecisionPolicy, applied, apply_policy
from voxmma.precision.schedule import PolicyScheduler, TF32Scheduler
from voxmma.tools import report
from voxmma.tools.cli import app
from voxmma.verify import shadow

from conftest import in_child, random_coords

TF32 = PrecisionPolicy.custom({"Compute": "tf32"})


def voxels(channels: int = 64, device: torch.device | str = "cpu", n: int = 400) -> voxmma.Voxels:
    feats = torch.randn(n, channels, generator=torch.Generator().manual_seed(3))
    return voxmma.Voxels(random_coords(n, 9).to(device), feats.to(device))


# ---------------------------------------------------------------- precision
def _bf16_on_cpu() -> None:
    if torchflags.HAS_TREE:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        torch.backends.mkldnn.conv.fp32_precision = "bf16"  # type: ignore[attr-defined]


SWITCHES: dict[str, Callable[[], Any]] = {
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "mkldnn": _bf16_on_cpu,
    "tf32": lambda: torchflags.set_tf32(True),
    "cudnn": lambda: torchflags.set_flag("cudnn.benchmark", True),
}


@contextlib.contextmanager
def surrounded(name: str) -> Iterator[None]:
    """A block with one of SWITCHES set, autocast on, or a policy of the caller at work."""
    with torchflags.preserved():
        if name in SWITCHES:
            SWITCHES[name]()
            yield
        elif name == "autocast":
            with (
                torch.autocast("cpu", dtype=torch.bfloat16),
                torch.autocast("cuda", dtype=torch.float16, enabled=torch.cuda.is_available()),
            ):
                yield
        elif name == "override":
            with settings.override(fp16_accum=True, fp16_rescale=True, fp32_precision="tf32"):
                yield
        else:
            with getattr(PrecisionPolicy, name) if name != "tf32 policy" else TF32:
                yield


AROUND = [*SWITCHES, "autocast", "override", "always_f16", "auto_mixed_bf16", "tf32 policy"]


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", SWITCHES)
def test_fault_44_ieee_layers_give_the_same_bits_under_every_switch(
    name: str, groups: int, device: torch.device
) -> None:
    """Forward and both gradients, against fp64 and against the bits without the switch."""
    layer, x = vnn.SparseConv3d(64, 64, 3, groups=groups, device=device), voxels(device=device)
    wide = copy.deepcopy(layer).double()

    def run(layer: nn.Module, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
        feats = x.feats.to(dtype).requires_grad_()
        y = layer(x.with_feats(feats)).feats
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [feats, layer.weight])]

    voxmma.set_fp32_precision("ieee")
    expected, exact = run(layer), run(wide, torch.float64)
    with surrounded(name):
        flags = torchflags.snapshot()
        found = run(layer)
        assert torchflags.snapshot() == flags
    for a, b, c in zip(found, expected, exact, strict=True):
        assert torch.equal(a, b)
        assert float((a.double() - c).norm() / c.norm()) < 1e-6


def test_products_on_the_cpu_are_made_with_the_switches_at_ieee(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a processor without bf16 instructions cannot show: what the product itself sees."""
    from voxmma.ops import cpu

    seen, inner = [], cpu._sums

    def sums(*args: Any) -> torch.Tensor:
        seen.append([torchflags.effective_fp32_precision(op, "cpu") for op in ("matmul", "conv")])
        return inner(*args)

    monkeypatch.setattr(cpu, "_sums", sums)
    for name in ("medium", "mkldnn"):
        with surrounded(name):
            before = torchflags.effective_fp32_precision("matmul", "cpu")
            vnn.SparseConv3d(64, 64, 3)(voxels())
            assert torchflags.effective_fp32_precision("matmul", "cpu") == before
            assert before == "bf16" or (name == "mkldnn" and not torchflags.HAS_TREE)
    assert seen and all(found == ["ieee", "ieee"] for found in seen)


def test_a_backward_inside_a_policy_block_is_not_cast() -> None:
    layer, x = vnn.SparseConv3d(16, 16, 3), voxels(16)
    feats = x.feats.requires_grad_()
    y = layer(x.with_feats(feats)).feats.sum()
    torch.autograd.backward(y, retain_graph=True)
    expected, feats.grad = feats.grad, None
    with PrecisionPolicy.always_f16:
        torch.autograd.backward(y)
    assert torch.equal(feats.grad, expected)


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)
        self.up = nn.ConvTranspose2d(8, 8, 2)
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(self.up(self.conv(x)).relu().flatten(2).transpose(1, 2))
        return nn.functional.scaled_dot_product_attention(y, y, y) @ y.transpose(1, 2)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def artefacts(request: pytest.FixtureRequest) -> list[tuple[Any, Any, Any]]:
    """(artefact, input, result) of dense and sparse networks under several policies."""
    torch.manual_seed(0)
    found: list[tuple[Any, Any, Any]] = []
    device = request.param
    x, v = torch.randn(2, 4, 9, 9, device=device), voxels(8, device)
    sparse = vnn.Sequential(vnn.SparseConv3d(8, 16, 3), vnn.BatchNorm(16), vnn.ReLU(), vnn.Linear(16, 8))
    for policy in ("always_f32", TF32, "auto_mixed"):
        for model, given in ((Dense(), x), (sparse, v)):
            artefact = compile_model(model.to(device).eval(), (given,), policy)
            y = artefact(given)
            found.append((artefact, given, y))
    return found


@pytest.mark.parametrize("name", AROUND)
def test_fault_44_a_frozen_artefact_gives_the_same_bits_wherever_it_is_called(
    name: str, artefacts: list[tuple[Any, Any, Any]]
) -> None:
    for artefact, x, expected in artefacts:
        with surrounded(name):
            flags = torchflags.snapshot()
            y = artefact(x)
            assert torchflags.snapshot() == flags
        a, b = (getattr(t, "feats", t) for t in (y, expected))
        assert a.dtype == b.dtype and torch.equal(a, b), (name, artefact.metadata["name"])


def test_freezing_inside_a_policy_or_autocast_changes_nothing() -> None:
    model, x = nn.Linear(64, 64).eval(), torch.randn(32, 64)
    expected = compile_model(model, (x,))(x)
    for name in ("autocast", "auto_mixed"):
        with surrounded(name):
            artefact = compile_model(model, (x,))
        assert torch.equal(artefact(x), expected)


@pytest.mark.parametrize("name", AROUND)
def test_verification_finds_the_same_errors_wherever_it_runs(name: str) -> None:
    layer, x = vnn.SparseConv3d(16, 16, 3, use_fp16_accum=False, compute_dtype=torch.float16), voxels(16)
    watch = shadow.verify(layer, every=1)
    with surrounded(name):
        layer(x)
    watch.remove()
    assert watch.checked == {"": 1} and watch.breaches == []


def test_a_policy_of_float32_is_float32_on_a_cpu_that_may_use_bf16() -> None:
    for name in ("medium", "mkldnn"):
        with surrounded(name):
            flags = torchflags.snapshot()
            for policy, allowed in ((PrecisionPolicy.always_f32, ("ieee",)), (TF32, ("ieee", "tf32"))):
                with policy:
                    assert torchflags.effective_fp32_precision("matmul", "cpu") in allowed
                assert torchflags.snapshot() == flags


def test_a_policy_of_16_bits_adds_up_in_float32() -> None:
    name = "cuda.matmul.allow_fp16_reduced_precision_reduction"
    with torchflags.preserved():
        value = torchflags.get_flag(name)
        torchflags.set_flag(name, [True, *value[1:]])
        with PrecisionPolicy.auto_mixed:
            assert torchflags.get_flag(name)[0] is False
        assert torchflags.get_flag(name)[0] is True


def test_a_model_copied_inside_a_policy_block_keeps_its_dtype() -> None:
    model = nn.Linear(4, 4)
    with PrecisionPolicy.auto_mixed:
        twin = copy.deepcopy(model)
    assert twin.weight.dtype == torch.float32 and torch.equal(twin.weight, model.weight)


# ---------------------------------------------------------------- order and threads
def _state() -> tuple[Any, ...]:
    return (
        settings.snapshot(),
        torchflags.snapshot(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.overrides._get_current_function_mode_stack(),
    )


def _begin(kind: str) -> Callable[[], None]:
    """Begins a scope; returns what ends it."""
    stack = contextlib.ExitStack()
    if kind == "override":
        stack.enter_context(settings.override(fp16_accum=True, fp32_precision="tf32"))
    elif kind == "override off":
        stack.enter_context(settings.override(fp16_accum=False))
    elif kind == "block":
        stack.enter_context(PrecisionPolicy.auto_mixed)
    elif kind == "active":
        return activate(TF32).revert
    elif kind == "applied":
        return apply_policy(nn.Linear(2, 2), "always_f32").revert
    elif kind == "schedule":
        schedule: Any = stack.enter_context(PolicyScheduler({0: TF32}))
        schedule.start(0)
    elif kind == "tf32 schedule":
        other = stack.enter_context(TF32Scheduler({0: torchflags.tf32_allowed(), 1: True}))
        other.start(1)
    else:
        stack.enter_context(torchflags.preserved())
        torchflags.set_flag("cudnn.benchmark", not torchflags.get_flag("cudnn.benchmark"))
    return stack.close


KINDS = ("override", "override off", "block", "active", "applied", "schedule", "tf32 schedule", "preserved")


@pytest.mark.parametrize("kinds", list(itertools.combinations(KINDS, 3)), ids="-".join)
def test_fault_45_scopes_end_in_any_order(kinds: tuple[str, ...]) -> None:
    before = _state()
    for order in itertools.permutations(range(3)):
        ends = [_begin(kind) for kind in kinds]
        for i in order:
            ends[i]()
        assert _state() == before, order
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


def test_an_ended_scope_has_no_say_and_an_open_one_has() -> None:
    first = settings.begin(fp16_accum=True)
    second = settings.begin(fp16_accum=False)
    assert settings.snapshot().fp16_accum is False
    first()
    assert settings.snapshot().fp16_accum is False
    voxmma.set_fp16_accum(True)  # inside: until the scope ends
    assert settings.snapshot().fp16_accum is True
    voxmma.set_fp16_rescale(True)  # not named by the scope: stays
    second()
    assert settings.snapshot().fp16_accum is None and voxmma.get_fp16_rescale()
    second()
    assert settings._scopes == []

    one, two = activate(PrecisionPolicy.always_f16), activate(TF32)
    one.revert()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32 and torchflags.tf32_allowed()
    two.revert()
    one, two = activate(TF32), activate(PrecisionPolicy.always_f16)
    one.revert()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16 and not torchflags.tf32_allowed()
    two.revert()


@pytest.mark.parametrize("kind", ["override", "active", "applied", "block", "preserved"])
def test_fault_45_overlapping_threads_leave_what_was_there(kind: str) -> None:
    before, failures = _state(), []
    barrier = threading.Barrier(4)

    def work(turn: int) -> None:
        try:
            for _ in range(5):
                end = _begin(kind)
                barrier.wait(60)
                if turn % 2:
                    end()
                barrier.wait(60)
                if not turn % 2:
                    end()
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and _state() == before


def test_a_policy_ended_by_another_thread_casts_no_more() -> None:
    before = _state()
    policy = activate(PrecisionPolicy.always_f16)
    thread = threading.Thread(target=policy.revert)
    thread.start()
    thread.join()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert _state()[:4] == before[:4]
    torch.overrides._pop_mode()  # what is left is a mode that does nothing


def test_a_policy_reverted_while_another_thread_is_in_the_forward_leaves_it_plain() -> None:
    entered, go, seen = threading.Event(), threading.Event(), []

    class Waits(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            entered.set()
            go.wait(60)
            return x @ x

    model = Waits()
    policy = apply_policy(model, "auto_mixed")

    def work() -> None:
        model(torch.ones(2, 2))
        seen.append((torch.overrides._get_current_function_mode_stack(), torch.is_autocast_enabled("cpu")))
        seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    entered.wait(60)
    policy.revert()
    go.set()
    thread.join()
    assert seen == [([], False), torch.float32] and not model._forward_hooks


def test_scopes_in_generators_and_after_exceptions_leave_nothing() -> None:
    def steps() -> Iterator[None]:
        with settings.override(fp16_accum=True), TF32:
            yield

    before = _state()
    one, two = steps(), steps()
    next(one), next(two)
    one.close()
    two.close()
    with pytest.raises(ZeroDivisionError), settings.override(fp16_accum=True), TF32:
        raise ZeroDivisionError
    with pytest.raises(TypeError), settings.override(fp16_accum=True, unknown=1):
        pass
    assert _state() == before


def test_a_model_under_a_policy_that_is_dropped_leaves_the_switches_as_they_were() -> None:
    before = _state()
    apply_policy(nn.Linear(2, 2), TF32)
    assert _state() == before


def test_a_launch_that_holds_other_switches_decides_for_itself_alone() -> None:
    with torchflags.pinned("tf32", "cuda"):
        assert torchflags.effective_fp32_precision("matmul") == "tf32"
        assert voxmma.get_fp32_precision() == "ieee" and not torchflags.tf32_allowed()
    assert torchflags.effective_fp32_precision("matmul") == "ieee"


def test_audits_and_guards_end_in_any_order() -> None:
    layer, x = vnn.SparseConv3d(8, 8, 3), voxels(8)
    for order in itertools.permutations(range(3)):
        logs: list[Any] = [voxmma.audit(), voxmma.OverflowGuard("cpu"), voxmma.audit()]
        for log in logs:
            log.__enter__()
        layer(x)
        for i in order:
            logs[i].__exit__(None, None, None)
        layer(x)
        assert [len(logs[0]), logs[1].read()["fprop"]["launches"], len(logs[2])] == [1, 1, 1]
    logs = [voxmma.audit(), voxmma.audit()]
    for log in logs:
        log.__enter__()
    logs[0].__exit__(None, None, None)
    layer(x)
    logs[1].__exit__(None, None, None)
    assert [len(log) for log in logs] == [0, 1] and logs[1][0].layer


# ---------------------------------------------------------------- copies
def _net() -> nn.Module:
    return vnn.Sequential(vnn.SparseConv3d(8, 8, 3), vnn.ReLU(), vnn.SparseConv3d(8, 8, 3))


def _saved(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    found: nn.Module = torch.load(buffer, weights_only=False)
    return found


def _ema(model: nn.Module) -> nn.Module:
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    averaged.update_parameters(model)
    return averaged


def _state_dict(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    twin = _net()
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    return twin


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "save": _saved,
    "ema": _ema,
    "state dict": _state_dict,
    "compiled": lambda model: torch.compile(copy.deepcopy(model), backend="eager")._orig_mod,
}


@pytest.mark.parametrize("how", COPIES)
def test_fault_46_a_copy_of_a_watched_model_is_a_plain_model(how: str) -> None:
    model, x = _net(), voxels(8)
    watch = shadow.verify(model, every=1)
    expected = model(x).feats
    calls = dict(watch.calls)
    twin = COPIES[how](model)
    assert torch.equal(twin(x).feats, expected) and watch.calls == calls
    own = shadow.verify(twin, every=1)
    twin(x)
    assert set(own.calls.values()) == {1} and watch.calls == calls
    own.remove()
    watch.remove()
    assert torch.equal(COPIES[how](twin)(x).feats, expected)


@pytest.mark.parametrize("how", COPIES)
def test_fault_46_a_copy_of_a_model_under_a_policy_has_a_handle(how: str) -> None:
    model, x = _net(), voxels(8)
    plain = model(x).feats
    policy = apply_policy(model, "auto_mixed")
    under = model(x).feats
    assert not torch.equal(plain, under)
    twin = COPIES[how](model)
    if how != "state dict":
        assert torch.equal(twin(x).feats, under)
        found = applied(twin)
        assert found is not None and found.policy == policy.policy
        found.revert()
    assert applied(twin) is None and torch.equal(twin(x).feats, plain)
    assert torch.equal(model(x).feats, under)
    apply_policy(twin, "auto_mixed").revert()
    policy.revert()
    assert applied(model) is None and torch.equal(model(x).feats, plain)


@pytest.mark.parametrize("how", COPIES)
def test_copies_of_calibrated_and_scheduled_models_work(how: str) -> None:
    model, x = _net(), voxels(8)
    plan = voxmma.calibrate(model, [x], repeats=1)
    voxmma.apply_plan(model, plan)
    assert torch.equal(COPIES[how](model)(x).feats, model(x).feats)
    with PolicyScheduler({0: "auto_mixed"}, model) as schedule:
        schedule.start(0)
        twin = COPIES[how](model)
        if how != "state dict":
            assert torch.equal(twin(x).feats, model(x).feats)


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_watched_compiled_model_runs_and_copies() -> None:
    torch._dynamo.reset()
    model = torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
    sparse = _net()
    watch = shadow.verify(sparse, every=1)
    assert copy.deepcopy(model)(torch.ones(1, 4)).shape == (1, 4)
    torch.compile(sparse, backend="eager")(voxels(8))
    assert all(name in watch.calls for name in ("0", "2"))
    watch.remove()


HALVES = {
    "linear": lambda: nn.Linear(6, 6),
    "conv": lambda: nn.Conv2d(8, 8, 3),
    "norm": lambda: nn.BatchNorm2d(8),
    "instance": lambda: nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 8),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("policy", ["always_f32", "always_f16", "auto_mixed", "auto_mixed_bf16"])
@pytest.mark.parametrize("name", HALVES)
def test_fault_47_a_half_model_runs_under_a_policy_or_is_refused_at_once(
    name: str, policy: str, dtype: torch.dtype
) -> None:
    model, before = HALVES[name]().to(dtype), _state()
    hooks = len(model._forward_hooks)
    try:
        handle = apply_policy(model, policy)
    except PolicyError as error:
        assert "float()" in str(error) and _state() == before and len(model._forward_hooks) == hooks
        return
    with handle:
        y = model(torch.randn(2, 8, 6, 6))
        assert y.dtype == torch.float32 and bool(y.isfinite().all())


# ---------------------------------------------------------------- one model, several threads
def test_fault_48_threads_on_one_watched_model_do_not_mix() -> None:
    model = nn.ModuleDict({f"m{i}": vnn.SparseConv3d(8, 8, 3) for i in range(4)})
    watch = shadow.verify(model, every=3)
    guard, failures = voxmma.OverflowGuard("cpu"), []
    barrier = threading.Barrier(4)

    def work(turn: int) -> None:
        try:
            x = voxels(8, n=6)
            barrier.wait(60)
            with guard, voxmma.audit() as log:
                for _ in range(25):
                    model[f"m{turn}"](x)
                    model["m0"](x)
            assert len(log) == 50 and all(launch.layer for launch in log)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(turn,)) for turn in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    watch.remove()
    assert not failures
    assert watch.calls == {"m0": 125, "m1": 25, "m2": 25, "m3": 25}
    assert watch.checked == {"m0": 42, "m1": 9, "m2": 9, "m3": 9}
    assert watch.breaches == [] and guard.read()["fprop"]["launches"] == 200


def test_a_guard_counts_the_inexact_rescales_of_its_own_thread_only() -> None:
    """Two threads, each in a guard of its own, one of which meets an inexact rescale."""
    layer = vnn.SparseConv3d(8, 8, 3, use_fp16_accum=True, compute_dtype=torch.bfloat16)
    spread, flat = voxels(8, n=60), voxels(8, n=60)
    spread = spread.with_feats(spread.feats * torch.logspace(-30, 30, 8, base=2.0))
    flat = flat.with_feats(torch.ones_like(flat.feats))
    with torch.no_grad():
        layer.weight.fill_(1.0)
    counts, barrier, failures = {}, threading.Barrier(2), []

    def work(name: str, x: voxmma.Voxels) -> None:
        try:
            guard = voxmma.OverflowGuard("cpu")
            with guard, torch.no_grad():
                barrier.wait(60)
                for _ in range(20):
                    layer(x)
                barrier.wait(60)
            counts[name] = guard.read()["fprop"]["inexact"]
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    with settings.override(fp16_rescale=True):
        threads = [threading.Thread(target=work, args=item) for item in (("spread", spread), ("flat", flat))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures and counts == {"spread": 20, "flat": 0}


# ---------------------------------------------------------------- report, cut files
@pytest.mark.parametrize("name", ["medium", "mkldnn", "autocast", "auto_mixed_bf16"])
def test_fault_49_report_raises_no_false_alarm(name: str) -> None:
    with surrounded(name):
        found = report.collect(torch.device("cpu"))
        assert report.contradictions(found) == []
        if name == "autocast":
            assert max(found["fp32_eta"].values()) < report.TF32_ETA
    # where the processor does use bf16, the switches that allow it are no contradiction; without them it is
    found["fp32_eta"] = {"matmul": 1e-3, "conv": 1e-3}
    found["fp32_cpu"] = dict.fromkeys(("matmul", "conv", "rnn"), "bf16")
    assert report.contradictions(found) == []
    found["fp32_cpu"] = dict.fromkeys(("matmul", "conv", "rnn"), "ieee")
    assert len(report.contradictions(found)) == 2


def test_fault_49_an_exception_while_measuring_restores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before, facts = torchflags.snapshot(), report.collect(torch.device("cpu"))
    change = {"cudnn.benchmark": not before.plain["cudnn.benchmark"]}
    monkeypatch.setattr(report, "recommend", lambda *_: report.Recommendation(changes=change))
    calls = iter([facts])
    monkeypatch.setattr(report, "collect", lambda *_: next(calls))  # the second one raises
    with pytest.raises(StopIteration):
        report.run(apply=True, journal=tmp_path / "journal.json")
    assert torchflags.snapshot() == before and not list(tmp_path.iterdir())
    with pytest.raises(KeyError):
        report.apply_changes({**change, "unknown": True})
    assert torchflags.snapshot() == before


def test_fault_49_a_damaged_or_unwritable_journal_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    path = tmp_path / "journal.json"
    runner = CliRunner()
    assert runner.invoke(app, ["report", "--apply", "--restore", "--journal", str(path)]).exit_code == 0
    whole = path.read_bytes()
    data = json.loads(whole)
    broken = [whole[:cut] for cut in range(0, len(whole) - 2, max(1, len(whole) // 20))]
    broken += [b"\xff\xfe", b"[" * 100_000, b"null"]
    for name, value in (("before", 5), ("before", {}), ("changes", [1]), ("changes", {"tf32": "yes"})):
        broken.append(json.dumps({**data, name: value}).encode())
    for part in ("tree", "legacy", "plain"):
        values = {name: [17] for name in data["before"][part]}
        if values:
            broken.append(json.dumps({**data, "before": {**data["before"], part: values}}).encode())
    before = torchflags.snapshot()
    for content in broken:
        path.write_bytes(content)
        result = runner.invoke(app, ["report", "--restore", "--journal", str(path)])
        assert result.exit_code == 2, content[:80]
        assert len(result.output.strip().splitlines()) == 1
        with pytest.raises(report.JournalError):
            report.apply_journal(path)
    folder = tmp_path / "a file"
    folder.write_text("")
    for bad in (folder / "journal.json", tmp_path):
        result = runner.invoke(app, ["report", "--apply", "--journal", str(bad)])
        assert result.exit_code == 2 and len(result.output.strip().splitlines()) == 1
    assert torchflags.snapshot() == before


def test_fault_49_a_cut_artefact_is_an_artefact_error(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    compile_model(model, (x,)).save(tmp_path / "whole.pt2")
    whole = (tmp_path / "whole.pt2").read_bytes()
    path = tmp_path / "cut.pt2"
    cuts = [0, 1, 3, 4, 30, *range(100, len(whole), len(whole) // 40), len(whole) - 22, len(whole) - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(ArtefactError):
            load(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("other/data", "no artefact")
    with pytest.raises(ArtefactError):
        load(path)
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "absent.pt2")


@pytest.mark.skipif(not torchflags.HAS_TREE, reason="this PyTorch has no precision of its own for a CPU")
def test_a_child_process_has_no_launch_of_another_thread() -> None:
    """What a launch holds is put back in a child that is forked meanwhile; one's own launch goes on."""

    def here() -> None:
        assert torchflags.snapshot() == before

    begun, over = threading.Event(), threading.Event()

    def launch() -> None:
        with torchflags.pinned("ieee", "cpu"):
            begun.set()
            over.wait(60)

    with torchflags.preserved():
        torchflags._set("mkldnn", "matmul", "bf16")
        before = torchflags.snapshot()
        worker = threading.Thread(target=launch)
        worker.start()
        begun.wait(60)
        assert torchflags.effective_fp32_precision("matmul", "cpu") == "ieee"
        assert in_child(here) == 0
        over.set()
        worker.join()
        launched = torchflags.pinned("ieee", "cpu")
        launched.__enter__()

        def ends() -> None:
            assert torchflags.effective_fp32_precision("matmul", "cpu") == "ieee"
            launched.__exit__(None, None, None)
            here()
            assert torchflags._launches.count == 0

        assert in_child(ends) == 0
        launched.__exit__(None, None, None)
        here()
