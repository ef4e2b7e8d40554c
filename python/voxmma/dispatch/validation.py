"""Validation records: which fp16-accumulator tiles were shown to be right on a card."""

from __future__ import annotations

import contextvars
from dataclasses import asdict, dataclass

import torch

from voxmma.dispatch import store

# ---- verdicts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One step of the gate: a figure against its limit."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """Whether an fp16 accumulator may run, and the steps up to the first that failed."""

    subject: str
    allowed: bool
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """The step that failed, or that all passed."""
        if self.allowed:
            return "all checks passed"
        return f"{self.checks[-1].name}: {self.checks[-1].detail}"

    @property
    def runs_on_request(self) -> bool:
        """Whether an explicit request is honoured: only speed or a missing measurement speaks against it."""
        return all(check.passed or check.name in ("gain", "record") for check in self.checks)

    @property
    def accumulator(self) -> str:
        """What may run: 'fp16' or 'fp32'."""
        return "fp16" if self.allowed else "fp32"


# ---- what is on record -------------------------------------------------------------------------------------

_measuring = contextvars.ContextVar("voxmma_gate_measuring", default=False)


def stamp(recent: bool = False) -> str:
    """The state of the records, part of the key under which a call's plan is cached; '' when there are none.

    Also '' while tiles are measured, whose explicit requests must run whatever was found before. `recent`: as
    of `store.recent_stamp`.
    """
    if _measuring.get():
        return ""
    return store.recent_stamp() if recent else store.stamp()


def on_record(tile: str, device: torch.device) -> Verdict:
    """The automatic rule's verdict on a tile as measured on this card before; refused when there is none.

    `voxmma tiles --gate` measures and records.
    """
    found = store.newest("verdict", store.owner_of(device, one_card=True), {"tile": tile})
    if found is None:
        return Verdict(tile, False, (Check("record", False, "no measurement on record for this device"),))
    checks = tuple(Check(**check) for check in found["checks"])
    return Verdict(tile, bool(found["allowed"]) and all(check.passed for check in checks), checks)


def keep(verdict: Verdict, device: torch.device) -> None:
    """Puts a verdict on record. Failing to is a warning, no error; nothing is kept for a CPU."""
    owner = store.owner_of(device, one_card=True)
    if owner is None:
        return
    checks = [asdict(check) for check in verdict.checks]
    made = store.entry("verdict", owner, {"tile": verdict.subject}, allowed=verdict.allowed, checks=checks)
    if problem := store.append([made]):
        store.warn_once(f"{problem}; the verdicts are not kept")
