"""Validation records: which fp16-accumulator tiles were shown to be right on a device, on disk."""

from __future__ import annotations

import contextvars
import functools
import json
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from voxmma._extension import _C
from voxmma.dispatch import settings
from voxmma.dispatch.measurements import driver_version

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


def identity(device: torch.device) -> dict[str, str] | None:
    """What a measurement belongs to: device UUID, driver and kernel build. None where one is unknown."""
    if device.type != "cuda" or (driver := driver_version()) is None:
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"device": uuid, "driver": driver, "build": _C.BUILD_ID}


_measuring = contextvars.ContextVar("voxmma_gate_measuring", default=False)


def stamp() -> str:
    """The state of the records, part of the key under which a call's plan is cached; '' when there are none.

    Also '' inside `measure`, whose explicit requests must reach a tile whatever was found before.
    """
    if _measuring.get():
        return ""
    path = _record_file()
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{path}:{found.st_mtime_ns}:{found.st_size}"


@functools.lru_cache(maxsize=64)
def _file_in(folder: Path) -> Path:
    return folder / "gate.jsonl"


def _record_file() -> Path:
    return _file_in(settings.get_cache_dir())


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _read(kind: str, subject: str, owner: dict[str, str] | None) -> dict[str, Any] | None:
    """The newest entry of this kind and subject that belongs to `owner`."""
    if owner is None:
        return None
    try:
        lines = _record_file().read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            if (entry["kind"], entry["subject"], entry["owner"]) == (kind, subject, owner):
                return dict(entry["data"])
        except (ValueError, KeyError, TypeError):
            _warn_once(f"{_record_file()} holds a line that cannot be read; it is ignored")
    return None


def _write(kind: str, subject: str, owner: dict[str, str] | None, data: dict[str, Any]) -> None:
    """Appends an entry in one write, so that many processes may do it. Failing to is a warning, no error."""
    if owner is None:
        return
    line = json.dumps({"kind": kind, "subject": subject, "owner": owner, "data": data}) + "\n"
    try:
        _record_file().parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(_record_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        _warn_once(
            f"{_record_file()} cannot be written ({error.strerror}); measurements last for this process"
        )


def on_record(tile: str, device: torch.device) -> Verdict:
    """The automatic rule's verdict on a tile as measured on this device before; refused when there is none.

    `voxmma tiles --gate` measures and records.
    """
    data = _read("tile", tile, identity(device))
    if data is None:
        return Verdict(tile, False, (Check("record", False, "no measurement on record for this device"),))
    checks = tuple(Check(**check) for check in data["checks"])
    return Verdict(tile, bool(data["allowed"]) and all(check.passed for check in checks), checks)
