"""What surrounds a call: autocast, and policies that cast (`voxmma.policy`)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
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
