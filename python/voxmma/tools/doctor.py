"""`voxmma doctor`: what this installation has, what it lacks, and what to do about it."""

from __future__ import annotations

import importlib
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

import voxmma
from voxmma._extension import _C
from voxmma.dispatch import settings
from voxmma.dispatch.selection import card
from voxmma.ops.kernels import compiled
from voxmma.sparse.maps import kernel_map
from voxmma.tuning.machine import cpu_name, environment, usable_devices
from voxmma.verify import accuracy

#: What setup.py reads.
BUILD_VARIABLES = {
    "VOXMMA_CUDA",
    "VOXMMA_CUTLASS_DIR",
    "VOXMMA_LINEINFO",
    "VOXMMA_WHEEL",
    "TORCH_CUDA_ARCH_LIST",
    "CUDA_HOME",
    "CUDA_PATH",
    "MAX_JOBS",
}


@dataclass(frozen=True)
class Check:
    """One line of the report. `status` is 'ok', 'note' (nothing to do), 'missing' or 'fail' (not usable)."""

    name: str
    status: str
    found: str
    advice: str = ""


def _nvcc() -> tuple[str, str] | None:
    """(path, version) of the CUDA compiler that a build would take."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    path = shutil.which("nvcc", path=str(Path(home) / "bin")) if home else None
    path = path or shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")
    if path is None:
        return None
    text = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    return (path, match.group(1)) if match else None


# ---- checks ------------------------------------------------------------------------------------------------


def _check_build() -> Check:
    if not _C.HAS_CUDA:
        return Check(
            "kernels",
            "missing",
            "built for the CPU only",
            "for a GPU: install nvcc of torch's CUDA major, then VOXMMA_CUDA=1 pip install .",
        )
    found = f"CUDA {_C.CUDA_VERSION}, {', '.join(_C.CUDA_ARCHS)}, {len(compiled())} kernels, {_C.BUILD_ID}"
    return Check("kernels", "ok", found)


def code_for(archs: Sequence[str], capability: tuple[int, int]) -> str:
    """Which of a build's code a card runs: machine code of the newest that fits, else PTX.

    >>> code_for(["8.0", "9.0a", "12.0+PTX"], (12, 1))
    'machine code for 12.0'
    """

    def fits(arch: str) -> bool:
        return _C.build_runs_on(arch, 80, *capability)

    exact = [arch for arch in archs if arch != "9.0+PTX" and fits(arch.removesuffix("+PTX"))]
    if exact:
        return f"machine code for {exact[-1].removesuffix('+PTX')}"
    ptx = [arch for arch in archs if fits(arch)]
    return (
        f"PTX of {ptx[-1].removesuffix('+PTX')}, which the driver compiles at its first use"
        if ptx
        else "no code"
    )


def _check_driver() -> list[Check]:
    """Whether the driver is new enough for the kernels' CUDA; to have none is no fault."""
    if not _C.HAS_CUDA or not _C.driver_version():
        return []
    driver, runtime = _C.driver_version(), _C.runtime_version()
    found = f"for CUDA {driver // 1000}.{driver % 1000 // 10}, the kernels need {runtime // 1000}"
    problem = _C.driver_problem(driver, runtime)
    return [Check("driver", "fail" if problem else "ok", found, problem)]


def _check_gpus() -> list[Check]:
    if not torch.cuda.is_available():
        why = "torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device or driver"
        return [Check("GPU", "note", why, "everything runs on the CPU")]
    checks = []
    for index in range(torch.cuda.device_count()):
        capability = torch.cuda.get_device_capability(index)
        name = f"{torch.cuda.get_device_name(index)}, sm_{capability[0]}{capability[1]}"
        if not _C.HAS_CUDA:
            checks.append(Check(f"GPU {index}", "missing", name, "this build has no GPU code: see kernels"))
            continue
        try:
            here = card(torch.device("cuda", index))
        except (ValueError, RuntimeError) as error:
            checks.append(Check(f"GPU {index}", "fail", name, str(error).splitlines()[0]))
            continue
        running = [tile for tile in compiled() if tile.runs_on(here)]
        if running:
            code = code_for(_C.CUDA_ARCHS, capability)
            found = f"{name}: {len(running)} kernels run on it, from {code}{here.limited}"
            checks.append(Check(f"GPU {index}", "ok", found))
        else:
            wanted = f"{capability[0]}.{capability[1]}"
            advice = f'rebuild with TORCH_CUDA_ARCH_LIST="{wanted}"; sm_80 or newer is needed'
            checks.append(
                Check(f"GPU {index}", "missing", f"{name}: no kernel of this build runs on it", advice)
            )
    return checks


def _check_compiler() -> Check:
    nvcc = _nvcc()
    if nvcc is None:
        return Check(
            "nvcc", "note", "not found", "only needed to build GPU code; CUDA_HOME or PATH is searched"
        )
    path, version = nvcc
    wanted = torch.version.cuda
    if wanted is not None and wanted.split(".")[0] != version.split(".")[0]:
        return Check(
            "nvcc",
            "missing",
            f"{path}, CUDA {version}, but torch was built with CUDA {wanted}",
            "to build GPU code install nvcc of torch's CUDA major, or a torch for this nvcc",
        )
    return Check("nvcc", "ok", f"{path}, CUDA {version}")


def _check_cutlass() -> Check:
    places = []
    if "VOXMMA_CUTLASS_DIR" in os.environ:
        given = Path(os.environ["VOXMMA_CUTLASS_DIR"])
        places += [given, given / "include"]
    places.append(Path(voxmma.__file__).parents[2] / "third_party" / "cutlass" / "include")
    wheel = importlib.util.find_spec("cutlass_library")
    if wheel is not None and wheel.origin is not None:
        places.append(Path(wheel.origin).parent / "source" / "include")
    for place in places:
        if (place / "cute" / "tensor.hpp").is_file():
            return Check("CUTLASS", "ok", str(place))
    return Check(
        "CUTLASS", "note", "not found", "only needed to build GPU code; the build then fetches its headers"
    )


def _check_variables() -> Check:
    known = {variable for variable, _ in settings._ENVIRONMENT.values()} | BUILD_VARIABLES
    present = {k: v for k, v in sorted(os.environ.items()) if k.startswith("VOXMMA_") or k in BUILD_VARIABLES}
    unknown = [name for name in present if name not in known]
    found = ", ".join(f"{name}={value}" for name, value in present.items()) or "none set"
    if unknown:
        return Check(
            "variables", "missing", found, f"{', '.join(unknown)}: no such variable, it has no effect"
        )
    return Check("variables", "ok", found)


def _check_settings() -> Check:
    pools = ", ".join(f"{op} pool {'/'.join(settings.get_algo_mode(op))}" for op in settings.OPS)
    found = (
        f"fp16 accumulators {'asked for' if settings.get_fp16_accum() else 'not asked for'}, "
        f"fp32 inputs {settings.get_fp32_precision()}, "
        f"{'' if settings.get_deterministic() else 'not '}deterministic, {pools}, "
        f"cache {settings.get_cache_dir()}"
    )
    return Check("settings", "ok", found)


def _check_convolution(device: torch.device) -> Check:
    """Runs a convolution and its gradient and compares them with fp64."""
    generator = torch.Generator().manual_seed(0)
    axis = torch.arange(5, device="cpu")
    coords = torch.cartesian_prod(torch.zeros(1, dtype=torch.long, device="cpu"), axis, axis, axis).int()
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    x = torch.randn(len(coords), 16, generator=generator, dtype=torch.float32, device="cpu")
    x = x.to(device, dtype).requires_grad_()
    weight = torch.randn(27, 16, 16, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
    name = f"convolution on {device.type}"
    try:
        voxels = voxmma.Voxels(coords.to(device), x)
        y = voxmma.nn.functional.spatially_sparse_conv(
            voxels, weight, kernel_size=3, use_fp16_accum=False
        ).feats
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        pairs = kernel_map(voxels.coord_set, 3).pairs()
        forward = accuracy.errors(y.detach(), *accuracy.reference_conv(x.detach(), weight, pairs, len(x)))
        ones = torch.ones_like(y)
        gradient = accuracy.errors(dx, *accuracy.reference_dgrad(ones, weight, pairs, len(x)))
    except RuntimeError as error:
        return Check(
            name, "fail", str(error).splitlines()[0], "reinstall; if it stays, please report this output"
        )
    limit = accuracy.bound("fp32", 27 * 16, dtype, dtype, accuracy.arch_of(device), offsets=27)
    worst = max(forward.max_eta, gradient.max_eta)
    if not (forward.within(limit) and gradient.within(limit)):
        return Check(
            name, "fail", f"max eta {worst:.1e} above the bound {limit.eta:.1e}", "do not use this build"
        )
    return Check(name, "ok", f"max eta {worst:.1e}, bound {limit.eta:.1e}")


def run() -> list[Check]:
    """Every check, cheapest first."""
    gpus = _check_gpus()
    devices = usable_devices() if usable(gpus) else [torch.device("cpu")]
    torch_build = (
        f"{torch.__version__}, CUDA {torch.version.cuda}" if torch.version.cuda else torch.__version__
    )
    return [
        Check("voxmma", "ok", f"{voxmma.__version__}, {Path(voxmma.__file__).parent}"),
        Check("Python", "ok", f"{platform.python_version()}, {sys.executable}"),
        Check("torch", "ok", torch_build),
        Check("CPU", "ok", f"{cpu_name()}, {torch.get_num_threads()} threads"),
        Check("binding", "ok", f"for torch {_C.TORCH_VERSION}, {_C.__file__}"),
        _check_build(),
        *_check_driver(),
        *gpus,
        _check_compiler(),
        _check_cutlass(),
        _check_variables(),
        _check_settings(),
        *(_check_convolution(device) for device in devices),
    ]


def usable(checks: list[Check]) -> bool:
    """Nothing failed; what is merely missing does not count, because the CPU path needs none of it."""
    return all(check.status != "fail" for check in checks)


def as_data(checks: list[Check]) -> dict[str, Any]:
    """The report for JSON."""
    return {
        "usable": usable(checks),
        "environment": environment(),
        "checks": [asdict(check) for check in checks],
    }


def render(checks: list[Check]) -> Table:
    """The report as a table."""
    colors = {"ok": "green", "note": "cyan", "missing": "yellow", "fail": "bold red"}
    table = Table(title="voxmma doctor")
    for column in ("what", "", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for check in checks:
        color = colors[check.status]
        table.add_row(check.name, Text(check.status, style=color), Text(check.found), Text(check.advice))
    return table
