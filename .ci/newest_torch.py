"""Compiles the binding against the headers of the newest torch that pip offers, which is not installed.

The headers of its wheel are kept in build/torch-headers, by version. VOXMMA_CI_OFFLINE=1 leaves this out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import setup as build  # noqa: E402


def newest() -> str:
    """The version of the newest torch."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--dry-run"]
    command += ["--report", "-", "--no-deps", "--ignore-installed", "torch"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"no torch to be had from pip: {done.stderr.strip()}\n"
            "VOXMMA_CI_OFFLINE=1 leaves out the check against the newest torch's headers"
        )
    return str(json.loads(done.stdout)["install"][0]["metadata"]["version"])


def main() -> None:
    """The check."""
    if os.environ.get("VOXMMA_CI_OFFLINE") == "1":
        print("VOXMMA_CI_OFFLINE=1: the binding is NOT compiled against the newest torch's headers")
        return
    version = newest()
    torch = build.fetch_torch(f"torch=={version}", version)
    toolkit = build.choose_toolkit(os.environ, None)
    compiler = build.binding.find_compiler(os.environ)
    command = build.binding.compile_command(compiler, torch, ROOT / "csrc", toolkit is not None)
    unit = ROOT / "build" / "newest_torch.cpp"
    unit.write_text(build.binding.unit(ROOT / "csrc", toolkit is not None))
    subprocess.run([*command, "-fsyntax-only", str(unit)], check=True)
    print(f"the binding compiles against torch {torch.version}, {'with' if toolkit else 'without'} CUDA")


if __name__ == "__main__":
    main()
