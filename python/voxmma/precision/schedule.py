"""Precision that changes during training: `TF32Scheduler` and `PolicyScheduler`.

A schedule maps the first epoch (or step) to what holds from then on. Call ``start(i)`` at the beginning of
each epoch or step, inside a ``with`` block that puts everything back at its end, also after an exception:

    with TF32Scheduler({0: True, 100: False}, model=model) as schedule:
        for epoch in range(first_epoch, 200):
            schedule.start(epoch)
            ...

What holds at an index depends on the schedule and the index alone, so a run resumed from a checkpoint
(`state_dict`, `load_state_dict`) continues exactly as one that never stopped. `lightning_callback` wraps a
scheduler for Lightning.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Generic, TypeVar

from torch import nn

from voxmma import torchflags
from voxmma._types import integer
from voxmma.precision.active import activate
from voxmma.precision.policy import AppliedPolicy, PrecisionPolicy, apply_policy, as_policy

__all__ = ["PolicyScheduler", "ScheduleError", "TF32Scheduler", "lightning_callback"]

_LOG = logging.getLogger("voxmma.schedule")
T = TypeVar("T")


class ScheduleError(ValueError):
    """A schedule that cannot be followed."""


def parse_schedule(schedule: Mapping[Any, T]) -> dict[int, T]:
    """The schedule with integer keys in ascending order.

    Keys may be strings, as YAML and JSON have them. Raises ScheduleError for an empty schedule, a key that is
    no integer >= 0, a key given twice ("0" and 0), or a missing key 0, TypeError for what is no mapping.
    """
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule maps the first epoch or step to what holds, got {schedule!r}")
    parsed: dict[int, T] = {}
    for key, value in schedule.items():
        text = key.strip() if isinstance(key, str) else key
        if isinstance(text, str) and text.removeprefix("-").isdecimal():
            text = int(text)
        start = integer(text)
        if start is None:
            raise ScheduleError(f"schedule keys are whole numbers, not {key!r}")
        if start < 0:
            raise ScheduleError(f"schedule keys start at 0, not at {start}")
        if start in parsed:
            raise ScheduleError(f"key {start} is in the schedule twice")
        parsed[start] = value
    if 0 not in parsed:
        raise ScheduleError("the schedule needs key 0: what holds at the start of training")
    return dict(sorted(parsed.items()))


class _Scheduler(Generic[T]):
    """What both schedulers do; a subclass knows how to put one value to work."""

    def __init__(self, schedule: Mapping[Any, T], unit: str) -> None:
        if unit not in ("epoch", "step"):
            raise ScheduleError(f"unit is 'epoch' or 'step', not {unit!r}")
        self.schedule = parse_schedule(schedule)
        self.unit = unit
        self.index: int | None = None
        self._before: torchflags.Hold | None = None
        self._active: AppliedPolicy | None = None
        self._value: T | None = None

    # ---- what a subclass provides
    def _policy(self, value: T) -> PrecisionPolicy:
        raise NotImplementedError

    def _activate(self, value: T) -> AppliedPolicy:
        raise NotImplementedError

    def _describe(self, value: T) -> str:
        return str(value)

    # ---- following the schedule
    def value_at(self, index: int) -> T:
        """What holds at ``index``: the value of the largest key that is not above it.

        Raises ScheduleError unless it is an integer >= 0.
        """
        start = integer(index)
        if start is None or start < 0:
            raise ScheduleError(f"{self.unit} is a whole number >= 0, not {index!r}")
        return self.schedule[max(key for key in self.schedule if key <= start)]

    def start(self, index: int) -> T:
        """Call at the beginning of epoch or step ``index``. Sets what holds from here, and logs it.

        Returns the value. Indices may jump or go back, as after a resume. Raises RuntimeError outside of the
        ``with`` block (or between `begin` and `end`).
        """
        if self._before is None:
            raise RuntimeError("start() belongs inside the scheduler's with block, so that the end restores")
        value = self.value_at(index)
        if self._active is None or value != self._value:
            self._deactivate()
            self._active = self._activate(value)
            self._value = value
        self.index = integer(index)
        _LOG.info("%s %d: %s", self.unit, index, self._describe(value))
        return value

    def _deactivate(self) -> None:
        if self._active is not None:
            active, self._active = self._active, None
            active.revert()

    def begin(self) -> None:
        """Remembers the present state. Entering the ``with`` block does this."""
        if self._before is not None:
            raise RuntimeError("the scheduler is already running")
        self._before = torchflags.Hold()

    def end(self) -> None:
        """Puts the remembered state back. Leaving the ``with`` block does this; a second call does nothing.

        Raises torchflags.FlagsError when PyTorch's float32 switches could not be put back exactly.
        """
        before, self._before = self._before, None
        if before is None:
            return
        try:
            self._deactivate()
        finally:
            left = before.release()
        if left:
            raise torchflags.FlagsError("not put back: " + "; ".join(map(str, left)))

    def __enter__(self: S) -> S:
        self.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    # ---- checkpoints
    def _record(self) -> dict[str, Any]:
        """The schedule as JSON types."""
        return {str(key): self._policy(value).to_json() for key, value in self.schedule.items()}

    def state_dict(self) -> dict[str, Any]:
        """JSON types: the schedule, its unit, and the last index started (None before the first)."""
        return {"version": 1, "unit": self.unit, "index": self.index, "schedule": self._record()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a checkpoint; in the ``with`` block the state of the saved index holds at once.

        Raises ScheduleError when the checkpoint was written under another schedule or unit, because then the
        run would not continue as it began, and for what `state_dict` did not return.
        """
        if state.get("version") != 1:
            raise ScheduleError(f"scheduler state version {state.get('version')!r} is not known here")
        if missing := {"unit", "index", "schedule"} - set(state):
            raise ScheduleError(f"the scheduler state has no {', '.join(sorted(missing))}")
        if state["unit"] != self.unit or state["schedule"] != self._record():
            theirs = ", ".join(f"{key}: {as_policy(value)}" for key, value in state["schedule"].items())
            raise ScheduleError(
                f"the checkpoint was trained under another schedule ({state['unit']}s {theirs}); make the "
                "scheduler with that one to resume"
            )
        index = state["index"]
        if index is not None:
            self.value_at(index)
        self.index = index
        if index is not None and self._before is not None:
            self.start(index)


S = TypeVar("S", bound=_Scheduler[Any])


class PolicyScheduler(_Scheduler[PrecisionPolicy]):
    """Policies by epoch or step: operands, accumulator and chunk of everything `voxmma.policy` reaches.

    Args:
        schedule: index to policy (object, name or record), ``{0: "always_f32", 10: "auto_mixed"}``.
        model: the module to put the policies on (refused with TypeError when it holds float64 tensors). None
            changes what this thread calls instead, as ``with policy:`` does.
        unit: 'epoch' or 'step'; only names what `start` counts.
        trainer_precision: the precision the trainer itself applies, such as Lightning's "bf16-mixed"; a
            schedule with TF32 is refused together with bf16-mixed.
    """

    def __init__(
        self,
        schedule: Mapping[Any, PrecisionPolicy | str | Mapping[str, Any]],
        model: nn.Module | None = None,
        unit: str = "epoch",
        trainer_precision: str | None = None,
    ) -> None:
        super().__init__({key: as_policy(value) for key, value in parse_schedule(schedule).items()}, unit)
        self.model = model
        if model is not None:
            torchflags.refuse_fp64(model, "a policy schedule")
        if any(policy.tf32 for policy in self.schedule.values()):
            refuse_bf16_mixed(trainer_precision)

    def _policy(self, value: PrecisionPolicy) -> PrecisionPolicy:
        return value

    def _activate(self, value: PrecisionPolicy) -> AppliedPolicy:
        return activate(value) if self.model is None else apply_policy(self.model, value)


class TF32Scheduler(_Scheduler[bool]):
    """TF32 on and off by epoch or step, process-wide, for float32 products on CUDA.

    Args:
        schedule: index to bool, ``{0: True, 100: False}``. Key 0 is required and must match the global
            setting.
        allow_tf32: the global setting the run was configured with; None reads it from PyTorch
            (`torchflags.tf32_allowed`).
        model: refused with TypeError when it holds float64 tensors, on which TF32 has no effect.
        unit: 'epoch' or 'step'.
        trainer_precision: the trainer's own precision; bf16-mixed is refused.

    Raises ScheduleError for a schedule that cannot be followed.
    """

    def __init__(
        self,
        schedule: Mapping[Any, bool],
        allow_tf32: bool | None = None,
        model: nn.Module | None = None,
        unit: str = "epoch",
        trainer_precision: str | None = None,
    ) -> None:
        super().__init__(schedule, unit)
        for key, value in self.schedule.items():
            if not isinstance(value, bool):
                raise ScheduleError(f"{unit} {key}: TF32 is True or False, not {value!r}")
        allowed = torchflags.tf32_allowed() if allow_tf32 is None else allow_tf32
        if self.schedule[0] != allowed:
            raise ScheduleError(
                f"the schedule starts with TF32 {'on' if self.schedule[0] else 'off'}, but the global "
                f"setting allow_tf32 is {allowed}; make them agree"
            )
        if model is not None:
            torchflags.refuse_fp64(model, "TF32")
        if any(self.schedule.values()):
            refuse_bf16_mixed(trainer_precision)

    def _policy(self, value: bool) -> PrecisionPolicy:
        return PrecisionPolicy.custom({"Compute": "tf32" if value else "f32"})

    def _activate(self, value: bool) -> AppliedPolicy:
        return activate(self._policy(value), switches_only=True)

    def _describe(self, value: bool) -> str:
        return f"TF32 {'on' if value else 'off'}"


def refuse_bf16_mixed(trainer_precision: str | None) -> None:
    """Raises ScheduleError for bf16-mixed training: its products are bf16, so TF32 would not be what runs."""
    if trainer_precision is not None and str(trainer_precision).replace("_", "-") in ("bf16-mixed", "bf16"):
        raise ScheduleError(f"trainer precision {trainer_precision!r} and TF32 exclude each other")


def lightning_callback(scheduler: _Scheduler[Any]) -> Any:
    """A Lightning ``Callback`` that follows ``scheduler`` in fit and saves its state in the checkpoint.

    Works with ``lightning`` and ``pytorch_lightning``, whichever is installed; raises ImportError when
    neither is. The trainer's precision and the model are checked when fit starts.
    """
    for package in ("lightning.pytorch", "pytorch_lightning"):
        try:
            base: Any = importlib.import_module(package).Callback
            break
        except ImportError:
            continue
    else:
        raise ImportError("lightning_callback needs the package lightning or pytorch_lightning")

    class PrecisionCallback(base):
        """Follows a scheduler of voxmma."""

        def __init__(self) -> None:
            self.scheduler = scheduler

        @property
        def state_key(self) -> str:
            """Its place in the checkpoint, so that a trainer may have one callback of each kind."""
            return f"voxmma.{type(scheduler).__name__}.{scheduler.unit}"

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                torchflags.refuse_fp64(pl_module, "a precision schedule")
                if any(scheduler._policy(value).tf32 for value in scheduler.schedule.values()):
                    refuse_bf16_mixed(trainer.precision)

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            scheduler.begin()

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            # Resuming in the middle of an epoch begins none: Lightning does not call on_train_epoch_start.
            scheduler.start(trainer.current_epoch if scheduler.unit == "epoch" else trainer.global_step)

        def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
            if scheduler.unit == "epoch":
                scheduler.start(trainer.current_epoch)

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if scheduler.unit == "step":
                scheduler.start(trainer.global_step)

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            scheduler.end()

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            scheduler.end()

        def state_dict(self) -> dict[str, Any]:
            return scheduler.state_dict()

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            scheduler.load_state_dict(state_dict)

    return PrecisionCallback()
