"""Builds wheels into dist/: one for each Python given, with bindings for every torch of wheels/torch.txt.

    python wheels/build.py python3.10 python3.12       # or make wheel PYTHONS="python3.10 python3.12"

Each Python gets an environment in build/ with the tools of wheels/build.txt, pinned by their hashes like all
that is fetched. The kernels are compiled once. Every wheel is checked and gets its manylinux tag
(wheels/check.py). VOXMMA_WHEEL and setup.py's other variables narrow what is built.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Machine code for every card since Ampere, and PTX for what comes after.
ARCHS = "8.0 8.6 8.9 9.0a 10.0 12.0+PTX"


def environment(python: str) -> Path:
    """The interpreter of an environment of that Python with the pinned tools."""
    code = "import sysconfig; print(sysconfig.get_config_var('SOABI'))"
    soabi = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    folder = ROOT / "build" / f"tools-{soabi}"
    made = folder / "bin" / "python"
    pins = ROOT / "wheels" / "build.txt"
    done = folder / "pins.txt"
    if not done.exists() or done.read_text() != pins.read_text():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
        install = [str(made), "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        subprocess.run([*install, "--require-hashes", "-r", str(pins)], check=True)
        shutil.copyfile(pins, done)
    return made


def build(python: Path, out: Path) -> Path:
    """The wheel of a Python, with its tag."""
    for left in ROOT.glob("build/lib.*"):  # a module that is gone would go along
        shutil.rmtree(left)
    env = {"VOXMMA_WHEEL": "all", "VOXMMA_CUDA": "1", "TORCH_CUDA_ARCH_LIST": ARCHS, **os.environ}
    env["PATH"] = f"{python.parent}{os.pathsep}{env['PATH']}"
    before = set(out.glob("*.whl"))
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "wheel", "-v", "--no-deps"]
    command += ["--no-build-isolation", "-w", str(out), str(ROOT)]
    with open(ROOT / "build" / "wheel.log", "w") as log:
        done = subprocess.run(command, env=env, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode != 0:
        raise SystemExit((ROOT / "build" / "wheel.log").read_text()[-4000:])
    made = max(set(out.glob("*.whl")) - before or out.glob("*.whl"), key=lambda path: path.stat().st_mtime)
    subprocess.run([str(python), str(ROOT / "wheels" / "check.py"), "--tag", str(made)], env=env, check=True)
    return made


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pythons", nargs="+", help="interpreters")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    for python in args.pythons:
        build(environment(python), args.out.resolve())


if __name__ == "__main__":
    sys.exit(main())
