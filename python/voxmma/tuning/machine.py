"""The machine: devices that can be used, and what results are labelled with."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from voxmma._extension import _C
from voxmma._version import __version__
from voxmma.dispatch.selection import card
from voxmma.ops.kernels import compiled

# ---- facts -------------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The processor as the system calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def environment() -> dict[str, Any]:
    """Versions and devices, as every JSON file of voxmma records them."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return {
        "voxmma": __version__,
        "build": _C.BUILD_ID,
        "archs": list(_C.CUDA_ARCHS) if _C.HAS_CUDA else [],
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(gpus)],
    }


def usable_devices() -> list[torch.device]:
    """The CPU, and the first GPU if this build has kernels that run on it."""
    found = [torch.device("cpu")]
    if _C.HAS_CUDA and torch.cuda.is_available():
        device = torch.device("cuda", 0)
        if any(tile.runs_on(card(device)) for tile in compiled()):
            found.append(device)
    return found
