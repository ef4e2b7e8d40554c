"""AOTInductor packages of exported programs: machine code ahead of time, where there is a toolchain.

A package is bound to the PyTorch, processor and kind of GPU it was made with (`Machine`). This library's
operators are called from it through PyTorch's dispatcher, so importing voxmma is all it needs.
"""

from __future__ import annotations

import platform
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
            return path.read_bytes(), ""
        except Exception as error:  # whatever a compiler, a linker or Triton's absence raises
            first = (str(error).strip().splitlines() or [""])[0]
            return b"", f"{type(error).__name__}: {first}"


def load(package: bytes) -> Callable[..., Any]:
    """The compiled program in ``package``."""
    from torch._inductor import aoti_load_package

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pt2"
        path.write_bytes(package)
        made: Callable[..., Any] = aoti_load_package(str(path))
        return made
