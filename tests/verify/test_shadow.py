"""Shadow verification and calibrated plans."""

from __future__ import annotations

import importlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import voxmma
from voxmma.dispatch import observers
from voxmma.dispatch.record import Record
from voxmma.nn import SparseConv3d
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.verify import shadow

from conftest import random_coords

plan_module = importlib.import_module("voxmma.verify.plan")
call_module = importlib.import_module("voxmma.dispatch.calls")


class Net(nn.Module):
    """Two sparse layers with a ReLU between them."""

    def __init__(self, channels: int = 16, **options: Any) -> None:
        super().__init__()
        self.first = SparseConv3d(8, channels, 3, **options)
        self.second = SparseConv3d(channels, 8, 2, **options)

    def forward(self, x: voxmma.Voxels) -> voxmma.Voxels:
        y = self.first(x)
        return self.second(y.with_feats(y.feats.relu()))


def voxels(device: torch.device, dtype: torch.dtype = torch.float16, seed: int = 0) -> voxmma.Voxels:
    coords = random_coords(150, 6, seed=seed).to(device)
    feats = torch.randn(150, 8, generator=torch.Generator().manual_seed(seed))
    return voxmma.Voxels(coords, feats.to(device, dtype))


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Lets a test change the results of fp16-accumulator calls: fault['change'] = function of the result."""
    planted: dict[str, Any] = {}
    honest = call_module.observe

    def observe(x: Tensor, w: Tensor, b: Any, mapping: Any, y: Tensor, record: Record) -> None:
        if "change" in planted and record.accumulator.startswith("fp16"):
            planted["change"](y)
        honest(x, w, b, mapping, y, record)

    monkeypatch.setattr(call_module, "observe", observe)
    monkeypatch.setattr(call_module, "observed", lambda: True)  # who compares results need not listen
    yield planted


# ---- shadow ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("accumulator", [None, "fp16", "fp16_promoted:32"])
def test_honest_layers_pass(device: torch.device, dtype: torch.dtype, accumulator: str | None) -> None:
    model = Net(accumulator=accumulator).to(device, torch.promote_types(dtype, torch.float32))
    watch = shadow.verify(model, every=2, rows=20)
    for seed in range(5):
        model(voxels(device, dtype, seed))
    watch.remove()
    model(voxels(device, dtype))
    assert not watch.breaches
    assert watch.calls == {"first": 5, "second": 5} and watch.checked == {"first": 3, "second": 3}
    assert not observers._observers
    assert model.first.accumulator == accumulator


def test_biased_grouped_scaled_and_tf32_calls_pass(device: torch.device) -> None:
    conv = SparseConv3d(8, 8, 3, groups=2, accumulator="fp16", compute_dtype=torch.bfloat16).to(device)
    with torch.no_grad():
        conv.bias.fill_(3.0)  # type: ignore[union-attr]
    watch = shadow.verify(conv, every=1, rows=200)
    x = voxels(device, torch.float32)
    for scale in (1.0, 2.0**-60, 2.0**50):
        conv(x.with_feats(x.feats * scale))
    with voxmma.settings.override(fp32_precision="tf32"):
        wide = SparseConv3d(8, 8, 3).to(device)
        second = shadow.verify(wide, every=1)
        wide(x)
    watch.remove()
    second.remove()
    assert not watch.breaches and not second.breaches
    assert watch.checked[""] == 3 and second.checked[""] == 1


def test_an_engine_is_made_of_a_watched_network_as_of_another(device: torch.device) -> None:
    """Its calls are written down: what a check computes is no part of the network."""
    model = Net().to(device).eval()
    x = voxels(device, torch.float32)
    watch = shadow.verify(model, every=1)
    wanted = model(x).feats
    engine = voxmma.engine.compile(model, x)
    assert watch.calls == watch.checked == {"first": 1, "second": 1}
    model(x)
    watch.remove()
    assert watch.calls == {"first": 2, "second": 2} and not watch.breaches
    torch.testing.assert_close(engine(x).voxels.feats, wanted)


def test_subnormal_fp32_calls_pass(device: torch.device) -> None:
    """On a GPU these run in 3xTF32, which has no bits below 2^-136: within its bound, so no breach."""
    conv = SparseConv3d(64, 64, 3, bias=False).to(device)
    coords = random_coords(150, 6).to(device)
    feats = torch.randn(150, 64, generator=torch.Generator().manual_seed(0)).to(device) * 2.0**-128
    watch = shadow.verify(conv, every=1, rows=150)
    conv(voxmma.Voxels(coords, feats))
    watch.remove()
    assert watch.checked[""] == 1 and not watch.breaches


def test_limit_of_3xtf32_includes_what_tf32_cannot_hold() -> None:
    x, w = torch.full((4, 8), 0.5), torch.full((27, 8, 8), -2.0)
    record = voxmma.explain(spatially_sparse_conv(voxels(torch.device("cpu"), torch.float32), w, 3))
    plain = shadow.limit(x, w, record)
    split = shadow.limit(x, w, replace(record, tile="sm80_f32_256x64x32_3xtf32"))
    assert split.eta == plain.eta and split.floor == plain.floor + 27 * 8 * 2.5 * 2.0**-136


@pytest.mark.parametrize("kind", ["cell", "nan", "scaled"])
def test_a_breach_demotes_the_layer(device: torch.device, fault: dict[str, Any], kind: str) -> None:
    """Mutations: one corrupt cell, a NaN row, all a little off. The layer goes to fp32, and says so."""

    def change(y: Tensor) -> None:
        with torch.no_grad():
            if kind == "cell":
                y[3, 1] += 5.0
            elif kind == "nan":
                y[int(y.isfinite().all(1).nonzero()[0])] = torch.nan  # no row that read the first layer's
            else:
                y *= 1.05

    model = Net(use_fp16_accum=True).to(device)
    watch = shadow.verify(model, every=1, rows=150)
    x = voxels(device)
    fault["change"] = change
    with pytest.warns(UserWarning, match="shadow verification: first, call 0: .*runs in fp32 from now on"):
        model(x)
    found = {breach.layer: breach for breach in watch.breaches}
    assert set(found) == {"first", "second"} and found["first"].record.accumulator == "fp16"
    assert ("not finite" in str(found["first"])) == (kind == "nan")
    assert model.first.use_fp16_accum is False and model.first.accumulator is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        record = voxmma.explain(model(x))
        voxmma.set_fp16_accum(True)
        assert voxmma.explain(model(x)) == record
    assert (record.accumulator, record.decided_by) == ("fp32", "module")
    assert len(watch.breaches) == 2
    watch.remove()


def test_overflow_beyond_the_output_is_no_breach_but_a_lost_sum_is() -> None:
    cpu = torch.device("cpu")
    conv = SparseConv3d(8, 8, 1, bias=False, use_fp16_accum=False).half()
    x = voxels(cpu)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(8) * 60000)
    watch = shadow.verify(conv, every=1, rows=150)
    y = conv(x.with_feats(x.feats * 8))
    assert not bool(y.feats.isfinite().all()) and not watch.breaches
    watch.remove()
    conv = SparseConv3d(8, 8, 1, bias=False, use_fp16_accum=True).half()
    sums = torch.zeros(8, 8)
    sums[:4], sums[4:] = 60000, -60000
    with torch.no_grad():
        conv.weight.copy_(sums)
    wide = SparseConv3d(8, 8, 3, bias=False, use_fp16_accum=True).half()
    with torch.no_grad():
        wide.weight.zero_()
        wide.weight[0], wide.weight[13] = (
            30000,
            -30000,
        )  # offsets cancel, but only after the first is infinite
    watch = shadow.verify(wide, every=1, rows=150)
    with pytest.warns(UserWarning, match="not finite"):
        wide(x.with_feats(torch.ones_like(x.feats)))
    assert len(watch.breaches) == 1
    watch.remove()


def test_verify_refuses_what_it_cannot_watch() -> None:
    with pytest.raises(ValueError, match="no sparse convolution layer"):
        shadow.verify(nn.Linear(3, 3))
    for bad in ({"every": 0}, {"rows": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            shadow.verify(Net(), **bad)


def test_an_interrupt_inside_a_layer_leaves_the_watch_in_order(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch calls no hook for it; what comes next was none of that layer's."""

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    net, x = Net().to(device), voxels(device, torch.float32)
    watch = shadow.verify(net, every=1)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as kept:
        patch.setattr(net.first, "forward", interrupted)
        net(x)
    spatially_sparse_conv(x, torch.zeros(1, 8, 8, device=device), kernel_size=1)
    assert watch.calls == {"first": 0, "second": 0}
    net(x)
    assert watch.calls == {"first": 1, "second": 1} and kept.traceback
    watch.remove()


def test_an_exception_inside_a_layer_leaves_the_watch_in_order() -> None:
    model = Net()
    watch = shadow.verify(model, every=1)
    with pytest.raises(ValueError, match="channels"):
        model.first(voxels(torch.device("cpu")).with_feats(torch.zeros(150, 3)))
    model(voxels(torch.device("cpu"), torch.float32))
    assert watch.calls == {"first": 1, "second": 1} and not watch._running
    spatially_sparse_conv(voxels(torch.device("cpu"), torch.float32), torch.zeros(27, 8, 8), 3)  # no layer
    watch.remove()
    watch.remove()


# ---- plans -------------------------------------------------------------------------------------------------


@pytest.fixture
def fast_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A board on which fp16 accumulators take half the time and promoted ones two thirds."""
    fixed_times(monkeypatch, {"fp32": 3.0, "fp16": 1.5, "fp16_promoted": 2.0})


def fixed_times(monkeypatch: pytest.MonkeyPatch, ms: dict[str, float]) -> None:
    """A trial takes so many milliseconds, by accumulator."""

    def clock(device: torch.device, repeats: int) -> Any:
        return lambda run: SimpleNamespace(ms=ms[run(0)[1].accumulator])

    monkeypatch.setattr(plan_module, "Clock", clock)


def calibrated(budget: float, seed: int = 0, **options: Any) -> tuple[Net, dict[str, Any]]:
    torch.manual_seed(seed)
    model = Net().half()
    batches = [voxels(torch.device("cpu"), seed=i) for i in range(2)]
    return model, voxmma.calibrate(model, batches, budget=budget, repeats=1, **options)


def test_calibration_takes_what_is_fast_and_within_the_budget(fast_fp16: None) -> None:
    model, plan = calibrated(1e-2)
    assert plan == json.loads(json.dumps(plan, allow_nan=False))
    assert {name: entry["accumulator"] for name, entry in plan["layers"].items()} == {
        "first": "fp16",
        "second": "fp16",
    }
    assert 0 < plan["error"] <= plan["budget"] and plan["batches"] == 2
    for entry in plan["layers"].values():
        trials = {trial["accumulator"]: trial for trial in entry["trials"]}
        assert set(trials) == {"fp32", *plan_module.CANDIDATES}
        assert trials["fp32"]["difference"] == 0 and trials["fp32"]["margin"] is None
        assert trials["fp16"]["margin"] > 2 and trials["fp16"]["milliseconds"] == 3.0  # two batches
        assert trials["fp16"]["difference"] > 0
        for trial in trials.values():
            assert 0 < trial["of_bound"] <= 1 and 0 < trial["rel_l2"] < 2e-3 and not trial["refused"]
    assert model.first.accumulator is None and model.first.use_fp16_accum is None and model.training


def test_budget_of_nothing_means_fp32(fast_fp16: None) -> None:
    _, plan = calibrated(0.0)
    assert {entry["accumulator"] for entry in plan["layers"].values()} == {"fp32"} and plan["error"] == 0


def test_no_gain_means_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed_times(monkeypatch, dict.fromkeys(("fp32", "fp16", "fp16_promoted"), 1.0))
    _, plan = calibrated(1.0)
    assert {entry["accumulator"] for entry in plan["layers"].values()} == {"fp32"}


def test_the_whole_model_is_measured(fast_fp16: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers whose errors add up to more than estimated go back to fp32 one by one, the worst first."""
    monkeypatch.setattr(plan_module, "choose", lambda trials, budget: dict.fromkeys(trials, "fp16"))
    _, plan = calibrated(1e-2)
    both = plan["error"]
    _, plan = calibrated(0.99 * both)
    chosen = [entry["accumulator"] for entry in plan["layers"].values()]
    assert sorted(chosen) != ["fp16", "fp16"] and plan["error"] <= 0.99 * both


def test_overflow_margin_and_errors_refuse_a_candidate(fast_fp16: None, fault: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model, x = Net().half(), voxels(torch.device("cpu"))
    plan = voxmma.calibrate(model, [x.with_feats(x.feats * 4000)], budget=1.0, repeats=1)
    trials = {t["accumulator"]: t for t in plan["layers"]["first"]["trials"]}
    assert "overflow margin" in trials["fp16"]["refused"]
    assert not trials["fp32"]["refused"]

    def wrong(y: Tensor) -> None:
        y *= 1.1

    fault["change"] = wrong
    plan = voxmma.calibrate(model, [x], budget=1.0, repeats=1)
    assert {entry["accumulator"] for entry in plan["layers"].values()} == {"fp32"}
    trials = {t["accumulator"]: t for t in plan["layers"]["first"]["trials"]}
    assert "above the bound" in trials["fp16"]["refused"]


def test_layers_in_fp32_have_nothing_to_choose() -> None:
    model = Net()
    plan = voxmma.calibrate(model, [voxels(torch.device("cpu"), torch.float32)], repeats=1)
    assert [len(entry["trials"]) for entry in plan["layers"].values()] == [1, 1]
    assert voxmma.apply_plan(model, plan) == []
    assert voxmma.explain(model.double()(voxels(torch.device("cpu"), torch.float64))).accumulator == "fp64"


def test_a_fitting_plan_is_applied(fast_fp16: None) -> None:
    model, plan = calibrated(1e-2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert voxmma.apply_plan(model, json.loads(json.dumps(plan))) == []
    assert (model.first.accumulator, model.second.accumulator) == ("fp16", "fp16")
    record = voxmma.explain(model(voxels(torch.device("cpu"))))
    assert (record.accumulator, record.decided_by) == ("fp16", "module")


@pytest.mark.parametrize("what", ["weights", "device", "driver", "build", "layer", "unknown"])
def test_a_stale_plan_means_fp32_and_says_so(
    fast_fp16: None, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    model, plan = calibrated(1e-2)
    if what == "weights":
        with torch.no_grad():
            model.first.weight[0, 0, 0] += 0.5
    elif what == "layer":
        plan["layers"]["third"] = {"accumulator": "fp16"}
    elif what == "unknown":
        what = "driver"
        plan["identity"]["driver"] = "unknown"
        honest = plan_module.identity
        monkeypatch.setattr(
            plan_module, "identity", lambda layers, device: {**honest(layers, device), "driver": "unknown"}
        )
    else:
        plan["identity"][what] = "another"
    with pytest.warns(UserWarning, match=f"this plan is stale, .*fp32 accumulators: .*{what}"):
        (difference,) = voxmma.apply_plan(model, plan)
    assert what in difference
    assert (model.first.accumulator, model.second.accumulator) == ("fp32", "fp32")
    voxmma.set_fp16_accum(True)
    assert voxmma.explain(model(voxels(torch.device("cpu")))).accumulator == "fp32"


def test_bad_arguments_are_named(fast_fp16: None) -> None:
    model, plan = calibrated(1e-2)
    for bad, message in (
        ({}, "not a plan"),
        ({**plan, "format": 99}, "format 99"),
        ({**plan, "layers": {"first": {}}}, "not a plan"),
        ({**plan, "layers": {"first": {"accumulator": "fp8"}}}, "accumulator must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            voxmma.apply_plan(model, bad)
    with pytest.raises(ValueError, match="batches is empty"):
        voxmma.calibrate(model, [])
    with pytest.raises(ValueError, match="budget"):
        voxmma.calibrate(model, [voxels(torch.device("cpu"))], budget=-1)
    for call in (lambda m: voxmma.calibrate(m, [1]), lambda m: voxmma.apply_plan(m, plan)):
        with pytest.raises(ValueError, match="no sparse convolution layer"):
            call(nn.Linear(2, 2))


@pytest.mark.gpu
def test_plan_on_the_gpu() -> None:
    device = torch.device("cuda", 0)
    model = Net(64).to(device).half()
    plan = voxmma.calibrate(model, [voxels(device)], budget=1e-2, repeats=3)
    assert plan["identity"]["device"] not in ("unknown", "cpu") and plan["error"] <= 1e-2
    assert voxmma.apply_plan(model, plan) == []
    assert voxmma.apply_plan(model.cpu(), plan)
