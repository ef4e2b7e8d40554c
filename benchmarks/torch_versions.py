"""Builds voxmma against every minor version of torch from 2.8 on, and runs the suite on each.

    python benchmarks/torch_versions.py                       # all that pip offers this Python
    python benchmarks/torch_versions.py --only 2.8 2.14       # some; rows of the others stay
    python benchmarks/torch_versions.py --tests tests/ops/test_ops.py tests/nn/test_norm.py

One version at a time: a copy of the committed files and a fresh environment in a temporary folder (3 to 8 GB
where torch brings CUDA's libraries), the newest patch of the version, a build for the CPU, and the tests that
are neither slow nor need a GPU. Each row is written to benchmarks/results/torch-versions.json at once; `make
docs` makes the table of it. Exit code 1 if a version does not install, build or pass.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "torch-versions.json"
OLDEST = (2, 8)
PACKAGES = ["setuptools>=77", "wheel", "numpy", "typer", "rich", "pyyaml", "pydantic>=2", "matplotlib"]
TOOLS = ["pytest>=8", "hypothesis"]


def minor_of(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu"."""
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def newest_patches(listed: str) -> list[str]:
    """The newest patch of every minor version from OLDEST on, oldest first.

    `listed`: what `pip index versions torch` says.
    A CPU build ("2.13.0+cpu") goes before the same version with CUDA: it installs sooner.
    """
    found = re.search(r"^Available versions: (.+)$", listed, re.MULTILINE)
    if found is None:
        raise SystemExit(f"pip lists no versions of torch: {listed!r}")
    newest: dict[tuple[int, ...], str] = {}
    for version in found[1].split(", "):  # newest first
        if minor_of(version) >= OLDEST:
            newest.setdefault(minor_of(version), version)
    return [newest[minor] for minor in sorted(newest)]


def counts(report: Path) -> dict[str, Any]:
    """passed, skipped and the names of failed tests in a JUnit report."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skipped = [c for c in cases if c.find("skipped") is not None]
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "skipped": len(skipped),
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in failed],
    }


def try_version(version: str, tests: list[str]) -> dict[str, Any]:
    """Installs, builds and tests one version; the row of the result. `problem` is '' where all went well."""
    row: dict[str, Any] = {"torch": version, "problem": "", "passed": 0, "skipped": 0, "failed": []}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torch-versions-") as name:
        folder = Path(name)
        python, tree, report = folder / "env" / "bin" / "python", folder / "tree", folder / "report.xml"
        env = {**os.environ, "VOXMMA_CUDA": "0", "PYTHONPATH": str(tree / "python"), "OMP_NUM_THREADS": "1"}

        def run(what: str, *command: str | Path, into: int | None = None) -> bool:
            print(f"torch {version}: {what}", flush=True)
            done = subprocess.run(
                [str(part) for part in command], cwd=tree, env=env, text=True, check=False,
                stdout=into, stderr=into and subprocess.STDOUT,
            )  # fmt: skip
            if done.returncode != 0:
                last = (done.stdout or "").strip().splitlines()[-1:]
                row["problem"] = f"{what}: " + (last[0][:200] if last else f"exit code {done.returncode}")
            return done.returncode == 0

        tree.mkdir()
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x"], cwd=tree, input=archive, check=True)
        pip = (python, "-m", "pip", "install", "-q", "--no-cache-dir", "--disable-pip-version-check")
        if (
            run("environment", sys.executable, "-m", "venv", folder / "env")
            and run("install", *pip, f"torch=={version}", *PACKAGES, *TOOLS, into=subprocess.PIPE)
            and run("build", python, "setup.py", "build_ext", "--inplace", into=subprocess.PIPE)
        ):
            selected = ["-m", "not slow and not gpu and not multigpu", "-p", "no:cacheprovider"]
            run("test", python, "-m", "pytest", "-q", *selected, f"--junit-xml={report}", *tests)
            if report.exists():
                row.update(counts(report))
    row["minutes"] = round((time.monotonic() - began) / 60, 1)
    return row


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="minor versions, such as 2.8")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="what pytest runs")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "index", "versions", "torch"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    versions = newest_patches(listed)
    unknown = set(args.only) - {".".join(map(str, minor_of(v))) for v in versions}
    if unknown:
        raise SystemExit(f"pip offers no torch {', '.join(sorted(unknown))}: {', '.join(versions)}")
    wanted = [v for v in versions if not args.only or ".".join(map(str, minor_of(v))) in args.only]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.strip()
    rows: dict[tuple[int, ...], dict[str, Any]] = {}
    if args.out.exists():
        rows = {minor_of(row["torch"]): row for row in json.loads(args.out.read_text())["torch_versions"]}
    for version in wanted:
        row = try_version(version, args.tests)
        row |= {
            "python": platform.python_version(),
            "tests": " ".join(args.tests),
            "commit": commit,
            "date": datetime.date.today().isoformat(),
        }
        rows[minor_of(version)] = row
        print(f"torch {version}: {row['problem'] or 'passed'}", flush=True)
        found = {"card": "torch versions", "torch_versions": [rows[minor] for minor in sorted(rows)]}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(rows[minor_of(version)]["problem"] for version in wanted))


if __name__ == "__main__":
    sys.exit(main())
