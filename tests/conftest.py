"""Shared fixtures and scenes of the test suite.

Markers (registered in pyproject.toml): `gpu` needs a CUDA device and a CUDA build of voxmma, `slow` is left
out of quick runs, `multigpu` needs two devices.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import multiprocessing
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import voxmma


def gpu_missing(count: int = 1) -> str | None:
    """Why tests on `count` GPUs cannot run here; None when they can."""
    if not torch.cuda.is_available():
        return "torch.cuda is not available"
    if not voxmma._C.HAS_CUDA:
        return "voxmma was built without CUDA"
    if torch.cuda.device_count() < count:
        return f"{torch.cuda.device_count()} CUDA device(s), {count} needed"
    return None


def in_child(work: Callable[[], None]) -> int:
    """Runs `work` in a forked process; its exit code, negative for a signal."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(600)
    assert child.exitcode is not None
    return child.exitcode


def pytest_collection_finish() -> None:
    """What was imported stays: collections of garbage need not look at it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for marker, count in (("gpu", 1), ("multigpu", 2)):
        reason = gpu_missing(count)
        if reason is not None:
            for item in items:
                if item.get_closest_marker(marker) is not None:
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every test that takes `device` runs on the CPU, and on the GPU where there is one."""
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed_and_settings() -> Iterator[None]:
    """Fixed seeds before, and every voxmma setting as it was after each test."""
    random.seed(0)
    torch.manual_seed(0)
    saved = voxmma.settings.snapshot()
    yield
    voxmma.settings.restore(saved)


# ---- code in processes of its own -------------------------------------------------------------------------

#: Has imported torch, and runs what each line holds in a child of its own.
SERVER = """
import json, os, sys, time, torch, traceback
before, answers = set(sys.modules), os.dup(1)
os.dup2(2, 1)
for line in sys.stdin:
    if os.fork() == 0:
        try:
            exec(json.loads(line))
            said = {"found": found}
        except BaseException:
            said = {"error": traceback.format_exc()}
        os.write(answers, (json.dumps(said) + "\\n").encode())
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code:
        os.write(answers, (json.dumps({"error": f"exit code {code}"}) + "\\n").encode())
"""

Clean = Callable[[str], Any]


@pytest.fixture(scope="session")
def clean() -> Iterator[Clean]:
    """Gives what code puts into `found`, run in a process that has imported torch and nothing else."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVER],
        stdin=-1,
        stdout=-1,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    ) as process:
        stdin, stdout = process.stdin, process.stdout
        assert stdin is not None and stdout is not None

        def run(code: str) -> Any:
            print(json.dumps(code), file=stdin, flush=True)
            said = json.loads(stdout.readline())
            assert "error" not in said, said["error"]
            return said["found"]

        yield run
        stdin.close()


# ---- scenes: (N, 4) int32 batch, x, y, z; no duplicates ----------------------------------------------------


def script(name: str) -> ModuleType:
    """A file of benchmarks/ as a module."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_coords(n: int, extent: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """n distinct random voxels in [0, extent)^3 of every sample, in random order."""
    cells = extent**3 * batch
    if n > cells:
        raise ValueError(f"{n} voxels do not fit into {cells} cells")
    generator = torch.Generator().manual_seed(seed)
    if cells <= 1 << 24:
        flat = torch.randperm(cells, generator=generator)[:n]
    else:
        flat = torch.unique(torch.randint(cells, (n + n // 4,), generator=generator))
        flat = flat[torch.randperm(flat.numel(), generator=generator)[:n]]
    columns = []
    for _ in range(3):
        columns.append(flat % extent)
        flat = flat // extent
    return torch.stack([flat, *reversed(columns)], dim=1).int()


def grid_coords(shape: tuple[int, int, int], batch: int = 1) -> torch.Tensor:
    """Every cell of a full grid in lexicographic order: row i is cell i of a dense (batch, *shape) tensor."""
    axes = [torch.arange(batch), *(torch.arange(s) for s in shape)]
    return torch.cartesian_prod(*axes).int()


def surface_coords(extent: int, seed: int = 0) -> torch.Tensor:
    """A wavy surface, two voxels thick, as indoor scans look: about 2 * extent^2 voxels."""
    x, y = torch.meshgrid(torch.arange(extent), torch.arange(extent), indexing="ij")
    phase = 6.2831853 * torch.rand(2, generator=torch.Generator().manual_seed(seed))
    waves = torch.sin(6.0 * x / extent + phase[0]) + torch.cos(5.0 * y / extent + phase[1])
    height = (extent * (0.5 + 0.2 * waves)).long()
    layers = [torch.stack([torch.zeros_like(x), x, y, height + dz], dim=-1).reshape(-1, 4) for dz in (0, 1)]
    coords = torch.cat(layers)
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(seed + 1))
    return coords[order].int()


def kernel_offsets(kernel_size: int | tuple[int, int, int], dilation: int | tuple[int, int, int] = 1) -> list:
    """Offsets of a stride 1 kernel in the documented order, written independently of the library."""
    size = (kernel_size,) * 3 if isinstance(kernel_size, int) else kernel_size
    dil = (dilation,) * 3 if isinstance(dilation, int) else dilation
    starts = [-(k // 2) if k % 2 else 0 for k in size]
    axes = [[(start + i) * d for i in range(k)] for start, k, d in zip(starts, size, dil, strict=True)]
    return list(itertools.product(*axes))
