"""Installs an sdist with build isolation, for the CPU, and runs it outside of the sources.

What an installation fetches (build tools) takes the network: VOXMMA_CI_OFFLINE=1 leaves it out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """The check."""
    if os.environ.get("VOXMMA_CI_OFFLINE") == "1":
        print("VOXMMA_CI_OFFLINE=1: no sdist is installed")
        return
    with tempfile.TemporaryDirectory() as name:
        subprocess.run([sys.executable, "setup.py", "-q", "sdist", "-d", name], cwd=ROOT, check=True)
        (sdist,) = Path(name).glob("*.tar.gz")
        site = Path(name) / "site"
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", "install", "--no-deps"]
        env = {**os.environ, "VOXMMA_CUDA": "0"}
        subprocess.run([*pip, "--target", str(site), str(sdist)], cwd=name, env=env, check=True)
        env = {"PATH": "/usr/bin:/bin", "HOME": name, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
        smoke = [sys.executable, str(ROOT / "wheels" / "smoke.py")]
        said = subprocess.run(smoke, cwd=name, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout
        assert str(site / "voxmma" / "_bindings") in said, said
        print(said, end="")


if __name__ == "__main__":
    main()
