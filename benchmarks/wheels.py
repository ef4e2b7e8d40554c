"""Installs wheels beside every minor version of torch, without nvcc on PATH, and runs them.

    python benchmarks/wheels.py dist/*.whl --pythons python3.10 python3.12   # every torch of wheels/torch.txt
    python benchmarks/wheels.py dist/*.whl --pythons python3.12 --torch 2.11.0 --uv uv
    python benchmarks/wheels.py dist/*cp312*.whl --here --json row.json      # this Python and its torch

For each torch and Python: a fresh environment with torch and what the voxmma command needs, then, timed, the
wheel alone; wheels/smoke.py and `voxmma demo` outside of the sources, with an empty cache and no compiler, so
that nothing is compiled on import. Then the smoke test with one copy of the wheel that all torches share. An
environment is removed before the next is made (3 to 8 GB where torch brings CUDA's libraries). --uv: uv
installs torch and the last Python's wheel, and keeps what torches share. Rows go to
benchmarks/results/wheels.json; `make docs` makes the table in docs/install.md. --here writes a row for
another machine's results, to be added to that file. Exit code 1: one failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "wheels.json"
COMMAND = ["numpy", "typer", "rich", "pyyaml", "pydantic>=2"]
SYSTEM_PATH = "/usr/bin:/bin"
BARE = {"PATH": SYSTEM_PATH, "CXX": "/nowhere/c++", "OMP_NUM_THREADS": "1"}


def pinned() -> list[str]:
    """The versions of wheels/torch.txt."""
    return re.findall(r"^torch==(\S+)", (ROOT / "wheels" / "torch.txt").read_text(), re.MULTILINE)


def version_of(python: str) -> str:
    """The version of an interpreter, "3.12.1"."""
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def tag_of(python: str) -> str:
    """What the names of an interpreter's wheels have, "cp312"."""
    return "cp" + "".join(version_of(python).split(".")[:2])


def system() -> str:
    """ "Debian GNU/Linux 12, glibc 2.36"."""
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"].split(" (")[0]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, glibc {platform.libc_ver()[1]}"


def stamp() -> dict[str, str]:
    """Commit and date. Where there is no git, or no repository, the commit is that of the variable COMMIT."""
    commit = os.environ.get("COMMIT", "")
    if shutil.which("git"):
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip() or commit
    return {"commit": commit, "date": datetime.date.today().isoformat()}


class Failed(RuntimeError):
    """What went wrong, in a line."""


def run(what: str, *command: str | Path, env: dict[str, str] | None = None, cwd: str | None = None) -> str:
    """What a command printed; Failed with its last line."""
    print(f"  {what}", flush=True)
    done = subprocess.run(
        [str(c) for c in command], env=env, cwd=cwd, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise Failed(f"{what}: " + (last[0][:200] if last else f"exit code {done.returncode}"))
    return done.stdout


def smoke(python: str | Path, folder: Path, site: Path | None = None) -> dict[str, Any]:
    """The smoke test's line, run in an empty folder with the system's PATH and an empty cache."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        env = {**BARE, "HOME": name}
        if site is not None:
            env["PYTHONPATH"] = str(site)
        said = run("smoke test", python, ROOT / "wheels" / "smoke.py", env=env, cwd=name)
        found = json.loads(said.strip().splitlines()[-1])
        if "/_bindings/" not in found["binding"] or not found["binding"].startswith(str(site or "")):
            raise Failed(f"smoke test: the binding is {found['binding']}")
        return dict(found)


def demo(python: str | Path, folder: Path, site: Path | None = None) -> float:
    """Seconds of `voxmma demo`."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        env = {**BARE, "HOME": name}
        if site is not None:
            env["PYTHONPATH"] = str(site)
        began = time.monotonic()
        run("demo", python, "-m", "voxmma", "demo", "--repeats", "1", env=env, cwd=name)
        return round(time.monotonic() - began, 1)


def row_of(python: str | Path, folder: Path, site: Path | None = None) -> dict[str, Any]:
    """The part of a row that an installed wheel gives."""
    found = smoke(python, folder, site)
    seconds = demo(python, folder, site)
    kept = {key: found[key] for key in ("python", "torch", "ran", "import_seconds")}
    return {**kept, "demo_seconds": seconds, "system": system()}


def try_torch(
    version: str, python: str, wheel: Path, shared: Path, uv: str | None, by_uv: bool
) -> dict[str, Any]:
    """A fresh environment with a torch, and the wheel in it; the row of the result."""
    row: dict[str, Any] = {"torch": version, "python": version_of(python), "system": system(), "problem": ""}
    row |= {"installer": "uv" if by_uv else "pip", "install_seconds": 0.0, "ran": [], "import_seconds": 0.0}
    print(f"torch {version}, {python}", flush=True)
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        folder = Path(name)
        inside = folder / "env" / "bin" / "python"
        pip = [inside, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
        with_uv = [uv or "", "pip", "install", "-q", "--python", inside]
        clean = {**os.environ, "PATH": SYSTEM_PATH}
        for name_ in ("CUDA_HOME", "CUDA_PATH", "PYTHONPATH"):
            clean.pop(name_, None)
        try:
            run("environment", python, "-m", "venv", folder / "env")
            packages = [f"torch=={version}", *COMMAND]
            run("torch", *(with_uv if uv else [*pip, "--no-cache-dir"]), *packages, env=clean)
            began = time.monotonic()
            run("wheel", *(with_uv if by_uv else pip), wheel, env=clean)
            row["install_seconds"] = round(time.monotonic() - began, 1)
            row |= row_of(inside, folder)
            if not shared.exists():
                run("shared copy", *pip, "--no-deps", "--target", shared, wheel, env=clean)
            smoke(inside, folder, shared)
        except Failed as failed:
            row["problem"] = str(failed)
    return row


def try_here(wheel: Path, links: Path | None) -> dict[str, Any]:
    """The row for this Python and its torch. links: folder of wheels of what the voxmma command needs."""
    with tempfile.TemporaryDirectory(prefix="wheels-") as name:
        folder, site = Path(name), Path(name) / "site"
        began = time.monotonic()
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
        run("wheel", *pip, "--no-index", "--target", site, wheel)
        seconds = round(time.monotonic() - began, 1)
        if links is not None:
            offline = ["--no-index", "--find-links", str(links), "--target", str(site), *COMMAND[1:]]
            run("command", *[word for word in pip if word != "--no-deps"], *offline)
        found = row_of(sys.executable, folder, site)
    return {**found, "installer": "pip", "install_seconds": seconds, "problem": "", **stamp()}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--pythons", nargs="+", default=[], help="interpreters, each with a wheel")
    parser.add_argument("--torch", nargs="+", default=[], help="versions; default: those of wheels/torch.txt")
    parser.add_argument("--uv", help="path of uv")
    parser.add_argument("--here", action="store_true", help="this Python and its torch")
    parser.add_argument("--links", type=Path, help="with --here: folder of wheels, without an index")
    parser.add_argument("--json", type=Path, default=RESULT, dest="out")
    args = parser.parse_args()
    if args.here:
        args.out.write_text(json.dumps(try_here(args.wheels[0], args.links), indent=1) + "\n")
        return 0
    wheels = {
        python: next(w for w in args.wheels if f"-{tag_of(python)}-" in w.name) for python in args.pythons
    }
    rows = json.loads(args.out.read_text())["wheels"] if args.out.exists() else []
    failed = False
    with tempfile.TemporaryDirectory(prefix="wheels-shared-") as shared:
        for version in args.torch or pinned():
            for index, python in enumerate(args.pythons):
                by_uv = args.uv is not None and index == len(args.pythons) - 1
                where = Path(shared) / tag_of(python)
                row = try_torch(version, python, wheels[python].resolve(), where, args.uv, by_uv) | stamp()
                print(f"torch {version}, {python}: {row['problem'] or 'passed'}", flush=True)
                failed |= bool(row["problem"])
                same = ("torch", "python", "system")
                rows = [r for r in rows if any(r[key] != row[key] for key in same)] + [row]
                args.out.write_text(json.dumps({"card": "wheels", "wheels": rows}, indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
