"""Builds a wheel for this Python and its torch from what is compiled already, checks and runs it.

Without nvcc, outside of the sources: with the binding in it; then, with that one taken away, as under a torch
newer than the wheel, without a compiler, which is one sentence, and with one, in two processes at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
MINOR = ".".join(torch.__version__.split(".")[:2])
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]


def main() -> None:
    """The check."""
    for left in ROOT.glob("build/lib.*"):
        shutil.rmtree(left)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
        subprocess.run(build, env={**os.environ, "VOXMMA_WHEEL": MINOR}, check=True)
        (wheel,) = folder.glob("*.whl")
        subprocess.run([sys.executable, ROOT / "wheels" / "check.py", "--tag", wheel], check=True)
        (wheel,) = folder.glob("*.whl")
        site = folder / "site"
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(site), str(wheel)], check=True)
        # Neither nvcc nor the sources: what the system has, and the wheel.
        env = {"PATH": "/usr/bin:/bin", "HOME": name, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        smoke = [sys.executable, str(ROOT / "wheels" / "smoke.py")]

        def runs(env: dict[str, str], count: int = 1) -> list[tuple[int, str, str]]:
            started = [
                subprocess.Popen(smoke, env=env, cwd=name, stdout=-1, stderr=-1, text=True)
                for _ in range(count)
            ]
            texts = [process.communicate() for process in started]
            return [(p.returncode, *text) for p, text in zip(started, texts, strict=True)]

        (found,) = runs(env)
        assert found[0] == 0 and str(site / "voxmma" / "_bindings" / MINOR) in found[1], found
        assert "compiling" not in found[2], found
        print(found[1], end="")
        shutil.rmtree(site / "voxmma" / "_bindings" / MINOR)
        (found,) = runs({**env, "CXX": "/nowhere/c++"})
        last = found[2].strip().splitlines()[-1]
        assert found[0] != 0 and last.startswith("ImportError: ") and "there is no C++ compiler" in last, (
            found
        )
        print(last)
        both = runs(env, 2)
        assert [found[0] for found in both] == [0, 0], both
        assert sum("compiling the binding" in found[2] for found in both) == 1, both
        assert all(f"{name}/.cache/voxmma/bindings/torch{torch.__version__}" in found[1] for found in both), (
            both
        )
        print(both[0][1], end="")


if __name__ == "__main__":
    main()
