"""Where the thread that launches kernels runs."""

from __future__ import annotations

import os


def pin() -> None:
    """The calling thread, and threads that it starts from now on, run on the first four cores it may use.

    Cores of a machine differ in speed: processes that are compared share the same ones.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:4])
