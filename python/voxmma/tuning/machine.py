"""The machine: devices that can be used, and what results are labelled with."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

import torch

from voxmma._extension import _C
from voxmma._surroundings import undisturbed
from voxmma._version import __version__
from voxmma.dispatch.selection import card
from voxmma.dispatch.store import driver_version
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


def device_name(device: torch.device) -> str:
    """What a GPU or the processor is called."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def labels(device: torch.device) -> dict[str, Any]:
    """What results of a device are labelled with: its name, its driver (None for a CPU), `environment()`."""
    driver = driver_version() if device.type == "cuda" else None
    return {"device": device_name(device), "driver": driver, "environment": environment()}


def usable_devices() -> list[torch.device]:
    """The CPU, and the first GPU if this build has kernels that run on it."""
    found = [torch.device("cpu")]
    if _C.HAS_CUDA and torch.cuda.is_available():
        device = torch.device("cuda", 0)
        if any(tile.runs_on(card(device)) for tile in compiled()):
            found.append(device)
    return found


@undisturbed()
def fp32_behaviour(device: str | torch.device, n: int = 64) -> dict[str, float]:
    """What float32 arithmetic does on ``device``: max eta of a matrix product and a convolution.

    eta = |y - y64| / sum|a||b| over all cells, reduction length ``n``. IEEE float32 stays below 1e-6, TF32 is
    above 1e-5 (operands with 10 mantissa bits), whatever autocast or policy surrounds the call. Keys 'matmul'
    and 'conv'.
    """
    gen = torch.Generator().manual_seed(20)
    a = torch.randn(256, n, generator=gen, dtype=torch.float32, device="cpu").to(device)
    b = torch.randn(n, 256, generator=gen, dtype=torch.float32, device="cpu").to(device)
    y64, mag = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    eta = {"matmul": float(((a @ b).double() - y64).abs().div(mag).max())}
    image, kernel = (
        a.reshape(1, 256, n // 8, 8).transpose(0, 1).contiguous(),
        b.t().reshape(256, 1, n // 8, 8),
    )
    got = torch.nn.functional.conv2d(image, kernel.contiguous())
    eta["conv"] = float((got.double().reshape(256, 256) - y64).abs().div(mag).max())
    return eta
