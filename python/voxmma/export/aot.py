"""AOTInductor packages of exported programs: machine code ahead of time, where there is a toolchain.

A package is bound to the PyTorch, processor and kind of GPU it was made with (`Machine`). This library's
operators are called from it through PyTorch's dispatcher, so importing voxmma is all it needs.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Machine", "build", "load"]


@dataclass(frozen=True)
class Machine:
    """What a package is bound to. `device`: 'cpu', or 'cuda' with the compute capability."""

    pytorch: str
    system: str
    cpu: str
    device: str

    @classmethod
    def here(cls, device: torch.device) -> Machine:
        """This machine, for tensors on ``device``."""
        name = device.type
        if name == "cuda":
            name = "cuda {}.{}".format(*torch.cuda.get_device_capability(device))
        system = f"{platform.system()}-{platform.machine()}"
        return cls(torch.__version__, system, torch.backends.cpu.get_cpu_capability(), name)

    def to_json(self) -> dict[str, str]:
        """JSON types."""
        return asdict(self)

    def mismatch(self, record: dict[str, str]) -> str:
        """How a recorded machine differs from this one, '' when it does not."""
        mine = self.to_json()
        differing = [f"{k} {record.get(k)}, here {mine[k]}" for k in mine if record.get(k) != mine[k]]
        return f"made for {'; '.join(differing)}" if differing else ""


def build(program: torch.export.ExportedProgram) -> tuple[bytes, str]:
    """The package of ``program``, or b"" and the reason why there is none."""
    from torch._inductor import aoti_compile_and_package

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.pt2"
        try:
            aoti_compile_and_package(program, package_path=str(path))
        except Exception as error:  # whatever a compiler, a linker or Triton's absence raises
            first = (str(error).strip().splitlines() or [""])[0]
            return b"", f"{type(error).__name__}: {first}"
        reason = _not_loadable(path)
        return (b"", reason) if reason else (path.read_bytes(), "")


def _not_loadable(path: Path) -> str:
    """Why another process cannot load the package, "" if it can.

    A loader that crashes takes its process along, as torch 2.11 for CUDA 13.0 was seen to do on an H200 with
    the package of one linear layer.
    """
    package_root = str(Path(__file__).resolve().parents[2])
    paths = [package_root, *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "voxmma.export.aot", str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
    )
    if done.returncode < 0:
        return f"a process that loads it ends by signal {-done.returncode}"
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return f"it cannot be loaded: {last}" if done.returncode else ""


def load(package: bytes) -> Callable[..., Any]:
    """The compiled program in ``package``."""
    from torch._inductor import aoti_load_package

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        path.write_bytes(package)
        made: Callable[..., Any] = aoti_load_package(str(path))
        return made


if __name__ == "__main__":  # see _not_loadable
    load(Path(sys.argv[1]).read_bytes())
