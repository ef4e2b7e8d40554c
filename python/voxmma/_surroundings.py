"""What surrounds a call: autocast, policies that cast (`voxmma.policy`), calls of modules under way."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch


class _Surroundings(threading.local):
    """Policies that cast in this thread, the innermost last; one that is not a policy casts nothing."""

    def __init__(self) -> None:
        self.modes: list[Any] = []


surroundings = _Surroundings()


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Block whose operations run in the dtypes they are written in: autocast and policies stay outside."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        mark = object()
        surroundings.modes.append(mark)
        try:
            yield
        finally:
            surroundings.modes.remove(mark)


def module_call() -> FrameType | None:
    """For a hook: the frame of the module's call. `is_running` says whether it has ended.

    PyTorch calls no hook, not even with ``always_call``, where a forward ends by an exception that is no
    Exception, such as KeyboardInterrupt.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (
        frame.f_globals is vars(torch.nn.modules.module) and "_call_impl" in frame.f_code.co_name
    ):
        frame = frame.f_back
    return frame


def is_running(call: FrameType | None) -> bool:
    """Whether a call of this thread is under way; True where its frame is not known."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame is not call:
        frame = frame.f_back
    return call is None or frame is not None
