"""How the binding is compiled: by setup.py, and on import for a torch that an installed wheel has none for.

The standard library alone, and nothing of voxmma: setup.py loads this file by its path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST_TORCH = (2, 8)
LIBRARIES = ("torch_python", "torch_cpu", "c10")  # the same in torch's builds for the CPU and for every CUDA
KERNELS = "libvoxmma_kernels.so"


class BuildError(RuntimeError):
    """A build that cannot go on, with what to do about it."""


@dataclass(frozen=True)
class Torch:
    """The torch that a binding is compiled against."""

    folder: Path
    version: str  # "2.13.0+cpu"
    cuda: str | None  # torch.version.cuda
    cxx11_abi: bool


def minor_of(version: str) -> tuple[int, int]:
    """(2, 13) of "2.13.0+cpu"."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise BuildError(f"torch {version!r} is no version")
    return int(found[1]), int(found[2])


def is_release(version: str) -> bool:
    """Whether a version of torch is released; the C++ interface of others is that of no minor version.

    >>> is_release("2.13.0+cpu"), is_release("2.9.0a0+git12"), is_release("2.12.0.dev20260101")
    (True, False, False)
    """
    return re.fullmatch(r"\d+\.\d+(\.\d+)?(\.post\d+)?(\+.*)?", version) is not None


def folder_of(version: str, cxx11_abi: bool) -> str:
    """Folder, in a wheel's _bindings, of the binding for a torch: "2.13" serves every release of torch 2.13.

    >>> folder_of("2.13.0+cpu", True), folder_of("2.9.0a0+git12", True)
    ('2.13', '2.9.0a0+git12')
    """
    if not (cxx11_abi and is_release(version)):
        return version + ("" if cxx11_abi else "-old-abi")
    return ".".join(map(str, minor_of(version)))


def read_torch(folder: Path) -> Torch:
    """The torch in a folder.

    Its files are read and it is not imported: pip's isolated build hides it, and a CUDA build of torch can be
    linked to on a machine where it cannot be loaded.
    """
    facts: dict[str, Any] = {}
    exec((folder / "version.py").read_text(), facts)
    config = (folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake").read_text()
    return Torch(folder, facts["__version__"], facts["cuda"], "_GLIBCXX_USE_CXX11_ABI=0" not in config)


def sources(csrc: Path, cuda: bool) -> list[Path]:
    """The sources of the binding; those in csrc/torch/cuda call the kernel library."""
    folder = csrc / "torch"
    return sorted([*folder.glob("*.cpp"), *(folder.glob("cuda/*.cpp") if cuda else ())])


def unit(csrc: Path, cuda: bool) -> str:
    """The binding as one translation unit, because most of the time goes into torch's headers.

    One compiler takes three quarters of a minute for it, and four times as long for a unit of each source.
    """
    return "".join(f'#include "{path}"\n' for path in sources(csrc, cuda))


def find_compiler(env: Mapping[str, str]) -> list[str]:
    """The C++ compiler of CXX, else the one that Python was built with, else c++."""
    given = shlex.split(env.get("CXX") or sysconfig.get_config_var("CXX") or "")[:1]
    return given if given and (env.get("CXX") or shutil.which(given[0])) else ["c++"]


def compile_command(compiler: list[str], torch: Torch, csrc: Path, cuda: bool) -> list[str]:
    """What compiles a source of the binding against a torch; no toolkit's header is included."""
    macros = ["TORCH_EXTENSION_NAME=_C", f"_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}"]
    macros += ["VOXMMA_WITH_CUDA"] * cuda
    include = torch.folder / "include"
    includes = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    flags = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall"]  # torch 2.14 needs C++20
    flags += [f"-D{macro}" for macro in macros]
    flags += [f"-I{csrc / 'include'}"]  # what is behind -isystem does not make an object stale
    return [*compiler, *flags, *(word for folder in includes for word in ("-isystem", str(folder)))]


def stale(target: Path, command: list[str]) -> bool:
    """Whether an object is missing, made by another command, or older than a file that it was made from."""
    depends, made_by = target.with_suffix(".d"), target.with_suffix(".command")
    if not (target.exists() and depends.exists() and made_by.exists()):
        return True
    if made_by.read_text() != shlex.join(command):
        return True
    # make's rule "object: file file \\": a space in a name is written "\\ "
    rule = depends.read_text().partition(": ")[2].replace("\\\n", " ")
    inputs = [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", rule.strip())]
    made = target.stat().st_mtime
    return any(not path.exists() or path.stat().st_mtime > made for path in inputs)


def compile_object(command: list[str], source: Path, target: Path) -> None:
    """Compiles a source where its object is stale."""
    command = [*command, "-MMD", "-MF", str(target.with_suffix(".d")), "-c", str(source), "-o", str(target)]
    if stale(target, command):
        target.unlink(missing_ok=True)
        subprocess.run(command, check=True)
        target.with_suffix(".command").write_text(shlex.join(command))


def write_changed(path: Path, text: str) -> None:
    """Writes a file that is missing or says something else; one that does not change makes nothing stale."""
    if not path.exists() or path.read_text() != text:
        path.write_text(text)


def compile_binding(
    compiler: list[str], torch: Torch, csrc: Path, info: Path, folder: Path, cuda: bool
) -> list[Path]:
    """Compiles the binding to objects in `folder`. info: source of the constants in csrc/torch/module.h.

    They are an object of their own, so that a changed kernel does not recompile the binding.
    """
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "binding.cpp"
    write_changed(source, unit(csrc, cuda))
    command = compile_command(compiler, torch, csrc, cuda)
    compile_object(command, source, folder / "binding.o")
    compile_object(command, info, folder / "build_info.o")
    return [folder / "binding.o", folder / "build_info.o"]


def link(compiler: list[str], output: Path, inputs: list[str]) -> None:
    """Links a shared object. The file is replaced at once; a process that runs keeps its old one."""
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_name(f"{output.name}.{os.getpid()}")
    try:
        subprocess.run([*compiler, "-shared", "-o", str(fresh), *inputs], check=True)
        os.replace(fresh, output)
    finally:
        fresh.unlink(missing_ok=True)


# ---- on import ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One process at a time; those that wait say so."""
    with open(path, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"voxmma: another process compiles the binding, waiting for it ({path})", file=sys.stderr)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def compiled_once(bindings: Path, cache: Path, torch: Torch, env: Mapping[str, str]) -> Path:
    """The binding for a torch that the wheel has none for, from `cache`; compiled where it is missing.

    bindings: the wheel's folder, with csrc/ (the sources), build_info.cpp and, with CUDA kernels, KERNELS.
    BuildError, in one sentence: what is missing, or what the compiler said.
    """
    csrc, kernels = bindings / "csrc", bindings / KERNELS
    digest = hashlib.sha256(f"{torch} {sysconfig.get_config_var('SOABI')} {kernels}".encode())
    for path in sorted(p for p in [bindings / "build_info.cpp", *csrc.rglob("*")] if p.is_file()):
        digest.update(path.relative_to(bindings).as_posix().encode() + b"\0" + path.read_bytes())
    folder = cache / f"torch{torch.version}-{digest.hexdigest()[:16]}"
    output = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if output.exists():
        return output
    compiler = find_compiler(env)
    python = Path(sysconfig.get_path("include")) / "Python.h"
    for what, found in (
        (f"C++ compiler ({compiler[0]}, or another that CXX names)", shutil.which(compiler[0])),
        (f"{python}", python.exists()),
        (f"{torch.folder / 'include'}", (torch.folder / "include" / "torch" / "library.h").exists()),
    ):
        if not found:
            raise BuildError(f"its binding can be compiled on import, but there is no {what}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            if not output.exists():
                print(
                    f"voxmma: compiling the binding for torch {torch.version}, once, for about a minute, "
                    f"into {folder}",
                    file=sys.stderr,
                    flush=True,
                )
                info = bindings / "build_info.cpp"
                made = compile_binding(compiler, torch, csrc, info, folder, kernels.exists())
                libraries = [f"-L{torch.folder / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
                if kernels.exists():
                    libraries += [str(kernels), f"-Wl,-rpath,{bindings}"]
                link(compiler, output, [*map(str, made), *libraries])
                for path in made:
                    path.unlink()
    except (subprocess.CalledProcessError, OSError) as error:
        raise BuildError(f"compiling its binding on import failed ({error})") from error
    return output
