"""Compiles the binding against the headers of the newest torch that pip offers, which is not installed.

The headers of its wheel are kept in build/torch-headers, by version. VOXMMA_CI_OFFLINE=1 leaves this out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
KEPT = ("torch/include/", "torch/version.py", "torch/share/cmake/Torch/TorchConfig.cmake")


def pip(*arguments: str) -> str:
    """What pip printed; SystemExit where it fails."""
    done = subprocess.run([*PIP, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"no torch to be had from pip: {done.stderr.strip()}\n"
            "VOXMMA_CI_OFFLINE=1 leaves out the check against the newest torch's headers"
        )
    return done.stdout


def headers() -> Path:
    """Folder of the newest torch, with its headers and what says how it was built."""
    newest = ("--no-deps", "--ignore-installed", "torch")
    report = json.loads(pip("install", "-q", "--dry-run", "--report", "-", *newest))
    version = report["install"][0]["metadata"]["version"]
    folder = ROOT / "build" / "torch-headers" / version
    if not folder.exists():
        print(f"fetching the headers of torch {version}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as name:
            pip("download", "-q", "--no-cache-dir", "--no-deps", "-d", name, f"torch=={version}")
            (wheel,) = Path(name).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(Path(name) / "kept", [n for n in archive.namelist() if n.startswith(KEPT)])
            shutil.move(Path(name) / "kept", folder)
    return folder / "torch"


def setup() -> ModuleType:
    """setup.py as a module."""
    spec = importlib.util.spec_from_file_location("voxmma_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    """The check."""
    if os.environ.get("VOXMMA_CI_OFFLINE") == "1":
        print("VOXMMA_CI_OFFLINE=1: the binding is NOT compiled against the newest torch's headers")
        return
    build = setup()
    torch = build.read_torch(headers())
    toolkit = build.choose_toolkit(os.environ, None)
    command = build.compile_command(build.find_compiler(os.environ), torch, toolkit)
    sources = map(str, build.binding_sources(toolkit is not None))
    subprocess.run([*command, "-fsyntax-only", *sources], check=True)
    print(f"the binding compiles against torch {torch.version}, {'with' if toolkit else 'without'} CUDA")


if __name__ == "__main__":
    main()
