"""Precision schedules: what they refuse, what holds when, and that everything comes back."""

from __future__ import annotations

import json
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import voxmma
from voxmma import torchflags
from voxmma.precision.policy import ComputeSpec, PolicyError, Precision, PrecisionPolicy, current_policy
from voxmma.precision.schedule import PolicyScheduler, ScheduleError, TF32Scheduler, lightning_callback


def state() -> tuple[torchflags.Flags, Any]:
    return torchflags.snapshot(), voxmma.settings.snapshot()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "key 0"),
        ({1: False}, "key 0"),
        ({0: False, -1: True}, "start at 0"),
        ({"0": False, "-5": True}, "start at 0"),
        ({0: False, "0": True}, "twice"),
        ({0: False, "ten": True}, "whole numbers"),
        ({0: False, 1.5: True}, "whole numbers"),
        ({0: False, True: True}, "whole numbers"),
        ({0: False, 3: "on"}, "True or False"),
        ({0: False, 3: 1}, "True or False"),
        ({0: True, 100: False}, "global setting"),
    ],
)
def test_schedules_that_cannot_be_followed(schedule: Any, message: str) -> None:
    assert not torchflags.tf32_allowed()
    with pytest.raises(ScheduleError, match=message):
        TF32Scheduler(schedule)


def test_indices_and_states_that_cannot_be_are_named() -> None:
    with pytest.raises(TypeError, match="schedule maps"):
        TF32Scheduler([False])  # type: ignore[arg-type]
    schedule = TF32Scheduler({0: False, 2: True})
    saved = schedule.state_dict()
    with schedule:
        for index in (2.5, "2", None, True, -1):
            with pytest.raises(ScheduleError, match="epoch is a whole number"):
                schedule.start(index)  # type: ignore[arg-type]
            with pytest.raises(ScheduleError, match=r"no index|epoch is a whole number"):
                schedule.load_state_dict(
                    {**saved, "index": index} if index is not None else {"version": 1, "unit": "epoch"}
                )
        assert schedule.index is None and not torchflags.tf32_allowed()
        schedule.start(torch.tensor(2))  # type: ignore[arg-type]
        assert json.loads(json.dumps(schedule.state_dict()))["index"] == 2


def test_key_zero_must_match_the_global_setting() -> None:
    TF32Scheduler({0: True, 100: False}, allow_tf32=True)
    with pytest.raises(ScheduleError, match="allow_tf32 is True"):
        TF32Scheduler({0: False}, allow_tf32=True)
    with torchflags.preserved():
        torchflags.set_tf32(True)
        TF32Scheduler({0: True})
        with pytest.raises(ScheduleError):
            TF32Scheduler({0: False})


def test_float64_models_and_bf16_mixed_are_refused() -> None:
    model = nn.Linear(2, 2)
    TF32Scheduler({0: False, 5: True}, model=model)
    with pytest.raises(TypeError, match=r"float64.*weight"):
        TF32Scheduler({0: False, 5: True}, model=model.double())
    with pytest.raises(TypeError, match="float64"):
        PolicyScheduler({0: "auto_mixed"}, model=model)
    with pytest.raises(TypeError, match="float64"):
        torchflags.set_tf32(True, model=model)
    tf32 = PrecisionPolicy.custom({"Compute": "tf32"})
    for precision in ("bf16-mixed", "bf16_mixed", "bf16"):
        with pytest.raises(ScheduleError, match="exclude"):
            TF32Scheduler({0: False, 5: True}, trainer_precision=precision)
        with pytest.raises(ScheduleError, match="exclude"):
            PolicyScheduler({0: "always_f32", 2: tf32}, trainer_precision=precision)
    TF32Scheduler({0: False, 5: True}, trainer_precision="32-true")
    with pytest.raises(ScheduleError, match="unit"):
        TF32Scheduler({0: False}, unit="batch")


@settings(deadline=None, max_examples=50)
@given(st.dictionaries(st.integers(1, 40), st.booleans(), max_size=6), st.integers(0, 60), st.booleans())
def test_what_holds_is_the_last_entry_not_above(rest: dict[int, bool], index: int, first: bool) -> None:
    schedule = {str(k): v for k, v in {**rest, 0: first}.items()}
    naive = first
    for epoch in range(1, index + 1):
        naive = rest.get(epoch, naive)
    scheduler = TF32Scheduler(schedule, allow_tf32=first)
    assert scheduler.value_at(index) is naive
    with pytest.raises(ScheduleError, match="not -1"):
        scheduler.value_at(-1)


def test_the_state_follows_is_logged_and_comes_back(caplog: pytest.LogCaptureFixture) -> None:
    before = state()
    seen = []
    with (
        caplog.at_level(logging.INFO, "voxmma.schedule"),
        TF32Scheduler({0: False, 2: True, 4: False}) as run,
    ):
        for epoch in range(6):
            run.start(epoch)
            seen.append([torchflags.effective_fp32_precision(op) for op in ("matmul", "conv", "rnn")])
    assert seen == [["ieee"] * 3] * 2 + [["tf32"] * 3] * 2 + [["ieee"] * 3] * 2
    assert [r.getMessage() for r in caplog.records if r.name == "voxmma.schedule"] == [
        f"epoch {i}: TF32 {'on' if i in (2, 3) else 'off'}" for i in range(6)
    ]
    assert state() == before


def test_an_exception_restores_too() -> None:
    before = state()
    with pytest.raises(ZeroDivisionError), TF32Scheduler({0: False, 1: True}) as run:
        run.start(1)
        assert torchflags.tf32_allowed()
        raise ZeroDivisionError
    assert state() == before
    with pytest.raises(RuntimeError, match="with block"):
        run.start(0)
    model = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), PolicyScheduler({0: "auto_mixed"}, model) as policies:
        policies.start(0)
        assert model._forward_pre_hooks
        raise ZeroDivisionError
    assert not model._forward_pre_hooks and state() == before


def test_the_state_found_at_the_start_is_what_comes_back() -> None:
    with torchflags.preserved():
        torch.set_float32_matmul_precision("high")
        before = state()
        with TF32Scheduler({0: True, 1: False}) as run:
            run.start(0)
            run.start(1)
            assert not torchflags.tf32_allowed()
        assert state() == before and torch.get_float32_matmul_precision() == "high"


def test_only_one_block_at_a_time() -> None:
    run = TF32Scheduler({0: False})
    with run, pytest.raises(RuntimeError, match="already running"):
        run.begin()
    run.end()


HALF_SUM = PrecisionPolicy.auto_mixed.with_compute(ComputeSpec(Precision.F16, Precision.F16))
SCHEDULE: dict[Any, Any] = {"0": "always_f32", "2": "auto_mixed", 3: HALF_SUM, 5: "always_f32@1"}


def test_policies_by_step_on_a_model() -> None:
    model = nn.Linear(64, 64)
    sparse = voxmma.nn.SparseConv3d(4, 4, 3)
    net = nn.ModuleList([model, sparse])
    x = torch.randn(8, 64)
    exact = nn.functional.linear(x, model.weight, model.bias)
    halves = []
    with PolicyScheduler(SCHEDULE, net, unit="step") as run:
        for step in range(7):
            run.start(step)
            halves.append((sparse.compute_dtype, sparse.use_fp16_accum))
    f32, f16 = (torch.float32, False), (torch.float16, False)
    assert halves == [f32, f32, f16, (torch.float16, True), (torch.float16, True), f32, f32]
    assert (sparse.compute_dtype, sparse.use_fp16_accum) == (None, None)
    with PolicyScheduler({0: "auto_mixed"}, model) as run:
        run.start(0)
        assert not torch.equal(model(x), exact)
    assert torch.equal(model(x), exact)


def test_policies_without_a_model_reach_what_the_thread_calls() -> None:
    x = torch.randn(3, 3)
    with PolicyScheduler(SCHEDULE) as run:
        dtypes = []
        for epoch in range(4):
            run.start(epoch)
            dtypes.append((x @ x).dtype)
    assert dtypes == [torch.float32] * 2 + [torch.float16] * 2
    assert (x @ x).dtype == torch.float32 and current_policy() is None
    with pytest.raises(PolicyError, match="unknown policy"):
        PolicyScheduler({0: "mixed"})


def train(
    run: PolicyScheduler, model: nn.Module, epochs: range, save_after: int | None
) -> tuple[list[float], Any]:
    """Losses of each epoch, and a checkpoint taken in the middle as JSON text."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses, saved = [], None
    for epoch in epochs:
        run.start(epoch)
        torch.manual_seed(epoch)
        x = torch.randn(16, 8)
        loss = (model(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if epoch == save_after:
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            saved = (weights, json.dumps(run.state_dict()))
    return losses, saved


@pytest.mark.parametrize("split", range(6))
def test_resuming_continues_bit_by_bit(split: int) -> None:
    def fresh() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    model = fresh()
    with PolicyScheduler(SCHEDULE, model) as run:
        whole, saved = train(run, model, range(7), split)
    weights, record = saved
    resumed = fresh()
    resumed.load_state_dict(weights)
    with PolicyScheduler(SCHEDULE, resumed) as run:
        run.load_state_dict(json.loads(record))
        assert run.index == split
        assert run._value == run.value_at(split)  # holds at once, not from the next epoch on
        rest, _ = train(run, resumed, range(split + 1, 7), None)
    assert rest == whole[split + 1 :]
    assert len({*whole}) == 7


def test_a_checkpoint_of_another_schedule_is_refused() -> None:
    saved = TF32Scheduler({0: False, 5: True}).state_dict()
    TF32Scheduler({"0": False, "5": True}).load_state_dict(saved)
    for other in (
        TF32Scheduler({0: False, 6: True}),
        TF32Scheduler({0: False, 5: False}),
        TF32Scheduler({0: False, 5: True}, unit="step"),
    ):
        with pytest.raises(ScheduleError, match="another schedule"):
            other.load_state_dict(saved)
    with pytest.raises(ScheduleError, match="version"):
        TF32Scheduler({0: False}).load_state_dict({**saved, "version": 9})


# ---------------------------------------------------------------- Lightning, without Lightning
class FakeTrainer:
    """Calls a callback in Lightning's order."""

    def __init__(self, callback: Any, precision: str = "32-true") -> None:
        self.callback, self.precision = callback, precision
        self.current_epoch = self.global_step = 0

    def fit(
        self,
        model: nn.Module,
        epochs: range,
        fail_at: int | None = None,
        checkpoint: Any = None,
        first: int = 0,
    ) -> list[bool]:
        seen = []
        self.callback.setup(self, model, "fit")
        if checkpoint is not None:
            self.callback.load_state_dict(checkpoint)
        try:
            self.callback.on_fit_start(self, model)
            self.current_epoch = epochs[0]
            self.callback.on_train_start(self, model)
            for self.current_epoch in epochs:
                done = first if self.current_epoch == epochs[0] else 0
                if not done:  # Lightning resumes an epoch without its start
                    self.callback.on_train_epoch_start(self, model)
                for batch in range(done, 2):
                    self.callback.on_train_batch_start(self, model, None, batch)
                    seen.append(torchflags.tf32_allowed())
                    if self.current_epoch == fail_at:
                        raise ZeroDivisionError
                    self.global_step += 1
            self.callback.on_fit_end(self, model)
        except BaseException as error:
            self.callback.on_exception(self, model, error)
            raise
        return seen


@pytest.fixture
def lightning(monkeypatch: pytest.MonkeyPatch) -> type:
    """A stand-in for the package lightning with its Callback base class."""
    module, parent = types.ModuleType("lightning.pytorch"), types.ModuleType("lightning")
    base = type("Callback", (), {})
    module.Callback = base  # type: ignore[attr-defined]
    parent.pytorch = module  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "lightning", parent)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", module)
    return base


def test_the_lightning_callback(lightning: type) -> None:
    before = state()
    model = nn.Linear(2, 2)
    callback = lightning_callback(TF32Scheduler({0: False, 1: True, 3: False}))
    assert isinstance(callback, lightning)
    assert FakeTrainer(callback).fit(model, range(4)) == [False] * 2 + [True] * 4 + [False] * 2
    assert state() == before
    saved = json.loads(json.dumps(callback.state_dict()))

    again = lightning_callback(TF32Scheduler({0: False, 1: True, 3: False}))
    assert FakeTrainer(again).fit(model, range(2, 5), checkpoint=saved) == [True] * 2 + [False] * 4
    middle = lightning_callback(TF32Scheduler({0: False, 1: True, 3: False}))
    assert FakeTrainer(middle).fit(model, range(2, 4), checkpoint=saved, first=1) == [True, False, False]
    steps = lightning_callback(TF32Scheduler({0: False, 3: True}, unit="step"))
    assert FakeTrainer(steps).fit(model, range(2)) == [False, False, False, True]
    assert state() == before


def test_the_lightning_callback_restores_and_refuses(lightning: type) -> None:
    before = state()
    callback = lightning_callback(TF32Scheduler({0: False, 1: True}))
    with pytest.raises(ZeroDivisionError):
        FakeTrainer(callback).fit(nn.Linear(2, 2), range(3), fail_at=1)
    assert state() == before
    with pytest.raises(ScheduleError, match="exclude"):
        FakeTrainer(callback, "bf16-mixed").fit(nn.Linear(2, 2), range(3))
    with pytest.raises(TypeError, match="float64"):
        FakeTrainer(callback).fit(nn.Linear(2, 2).double(), range(3))
    assert state() == before


def test_the_callback_in_a_real_trainer(tmp_path: Path) -> None:
    """Where Lightning is installed: its hooks, checkpoints, exceptions and refusals are as assumed."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, fail_at: int | None = None) -> None:
            super().__init__()
            self.layer, self.fail_at = nn.Linear(4, 4), fail_at
            self.seen: list[tuple[int, bool]] = []

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            self.seen.append((self.current_epoch, torchflags.tf32_allowed()))
            if self.current_epoch == self.fail_at:
                raise ZeroDivisionError
            out: torch.Tensor = self.layer(batch).square().mean()
            return out

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    def fit(
        model: Model, epochs: int, callbacks: list[Any], resume: Path | None = None, **options: Any
    ) -> Any:
        quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
        trainer = lightning.Trainer(
            max_epochs=epochs,
            callbacks=callbacks,
            accelerator="cpu",
            default_root_dir=tmp_path,
            **quiet,
            **options,
        )
        trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4), ckpt_path=resume)
        return trainer

    def callback() -> Any:
        return lightning_callback(TF32Scheduler({0: False, 1: True, 3: False}))

    before = state()
    whole, first, rest = Model(), Model(), Model()
    fit(whole, 4, [callback()])
    assert whole.seen == [(epoch, epoch in (1, 2)) for epoch in range(4) for _ in range(2)]
    steps = lightning_callback(PolicyScheduler({0: "auto_mixed_bf16"}, unit="step"))
    fit(first, 2, [callback(), steps]).save_checkpoint(tmp_path / "two.ckpt")
    fit(rest, 4, [callback()], tmp_path / "two.ckpt")
    assert first.seen + rest.seen == whole.seen
    begun, resumed = Model(), Model()
    saves = lightning.callbacks.ModelCheckpoint(tmp_path, "middle", every_n_train_steps=3)
    fit(begun, 2, [callback(), saves])
    fit(resumed, 4, [callback()], tmp_path / "middle.ckpt")
    assert begun.seen[:3] + resumed.seen == whole.seen  # the second epoch goes on as it began
    other = lightning_callback(TF32Scheduler({0: False, 1: True}))
    for model, callbacks, options, error in (
        (Model(), [other], {"resume": tmp_path / "two.ckpt"}, ScheduleError),
        (Model(fail_at=1), [callback()], {}, ZeroDivisionError),
        (Model(), [callback()], {"precision": "bf16-mixed"}, ScheduleError),
        (Model().double(), [callback()], {}, TypeError),
    ):
        with pytest.raises(error):
            fit(model, 4, callbacks, **options)
        assert state() == before


def test_without_lightning_the_callback_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match="lightning or pytorch_lightning"):
        lightning_callback(TF32Scheduler({0: False}))
