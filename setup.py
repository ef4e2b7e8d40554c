"""Builds voxmma._C: the torch-free kernel library by CMakeLists.txt, then csrc/torch against torch.

Environment variables (all optional):

VOXMMA_CUDA            1: CUDA kernels or an error; 0: CPU only; unset: CUDA where an nvcc is found
TORCH_CUDA_ARCH_LIST   architectures, default "8.0;9.0a"; 9.0 means 9.0a (Hopper kernels); 8.0+PTX
                       and 9.0+PTX add PTX for newer cards, without Hopper kernels
CUDA_HOME, CUDA_PATH   the CUDA toolkit; else the nvcc on PATH leads to it
VOXMMA_CUTLASS_DIR     CUTLASS' headers (else third_party/cutlass, the nvidia-cutlass wheel, a download)
MAX_JOBS               compiler processes at a time, default 2
VOXMMA_LINEINFO        1: keep source lines in the kernels, for profilers and compute-sanitizer
VOXMMA_RACECHECK       1: a build that compute-sanitizer's racecheck can follow (csrc/common/memory.cuh: why)

Build files stay in build/, by architecture and Python, so that a second build compiles only what changed.
In place, for the interpreter at hand: ``python setup.py build_ext --inplace``.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
CUTLASS_PIN = "nvidia-cutlass==4.2.0.0"
DEFAULT_ARCHS = "8.0;9.0a"
ARCH_NAMES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}


class BuildError(RuntimeError):
    """A build that cannot go on, with what to do about it."""


@dataclass(frozen=True)
class Toolkit:
    """A CUDA toolkit: its folder (with include/cuda_runtime.h) and the version of its nvcc, "13.0"."""

    home: Path
    version: str


def say(text: str) -> None:
    """Prints one line to the build log."""
    print(f"voxmma: {text}", flush=True)


# ---- what to build -----------------------------------------------------------------------------------------


def parse_archs(text: str | None) -> list[str]:
    """TORCH_CUDA_ARCH_LIST as a list of "major.minor", "major.minor+PTX", "major.minora" and "major.minorf".

    9.0 becomes 9.0a, for the Hopper kernels; 9.0+PTX is 9.0a and PTX of 9.0, which newer cards can run and
    which has none of them. Where code of each runs is said in csrc/include/voxmma/arch.h. What is older than
    8.0 and what CUDA does not have is an error, as is PTX of 9.0a and its like: it would serve no other card.

    >>> parse_archs("8.0 9.0+PTX")
    ['8.0', '9.0a', '9.0+PTX']
    """
    archs: list[str] = []
    words = re.split(r"[;, ]+", text or DEFAULT_ARCHS)
    for word in (part for w in words for part in ARCH_NAMES.get(w, w).split(";")):
        if not word:
            continue
        match = re.fullmatch(r"(\d+)\.(\d)([af]?)(\+PTX)?", word)
        if match is None:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={text!r}: {word!r} is no architecture such as 8.0, 9.0a or 8.6+PTX"
            )
        major, minor, feature, ptx = int(match[1]), int(match[2]), match[3], match[4] or ""
        if major < 8:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={text!r}: {word!r} is older than 8.0, the oldest that is supported"
            )
        if major < {"": 8, "a": 9, "f": 10}[feature]:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST={text!r}: CUDA has no {word!r}")
        if feature and ptx:
            raise BuildError(
                f"TORCH_CUDA_ARCH_LIST={text!r}: PTX of {major}.{minor}{feature} serves no newer card: "
                f"name {major}.{minor}+PTX"
            )
        wanted = [f"{major}.{minor}{feature}{ptx}"]
        if (major, minor) == (9, 0):
            wanted = ["9.0a", *(["9.0+PTX"] if ptx else [])]
        archs += [arch for arch in wanted if arch not in archs]
    if not archs:
        raise BuildError(f"TORCH_CUDA_ARCH_LIST={text!r} names no architecture")
    return archs


def cmake_archs(archs: list[str]) -> str:
    """The list as CMAKE_CUDA_ARCHITECTURES: machine code for each, and PTX where +PTX asks for it.

    Machine code for 9.0 is that of 9.0a.

    >>> cmake_archs(["8.0+PTX", "9.0a", "9.0+PTX"])
    '80-real;80-virtual;90a-real;90-virtual'
    """
    out = []
    for arch in archs:
        number = arch.removesuffix("+PTX").replace(".", "")
        out += [f"{number}-real"] * (arch != "9.0+PTX") + [f"{number}-virtual"] * arch.endswith("+PTX")
    return ";".join(dict.fromkeys(out))


def cuda_includes(home: Path) -> list[Path]:
    """The toolkit's folders with cuda_runtime.h."""
    folders = [home / "include", *sorted(home.glob("targets/*/include"))]
    return [folder for folder in folders if (folder / "cuda_runtime.h").exists()]


def _toolkit_root(nvcc: Path) -> Path | None:
    """The toolkit an nvcc belongs to. The one on PATH may be a script elsewhere, so nvcc itself is asked."""
    dryrun = subprocess.run([str(nvcc), "--dryrun", "-c", "x.cu"], capture_output=True, text=True)
    top = re.search(r"^#\$ TOP=(.+)$", dryrun.stderr, re.MULTILINE)
    candidates = ([Path(top[1].strip()).resolve()] if top else []) + [nvcc.resolve().parent.parent]
    return next(
        (root for root in candidates if (root / "bin" / "nvcc").exists() and cuda_includes(root)), None
    )


def find_toolkit(env: Mapping[str, str]) -> Toolkit | None:
    """The CUDA toolkit of CUDA_HOME, CUDA_PATH or the nvcc on PATH, in this order; None without an nvcc."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if env.get(variable) and not (Path(env[variable]) / "bin" / "nvcc").exists():
            say(f"{variable}={env[variable]} holds no bin/nvcc, looking further")
    homes = [Path(env[v]) / "bin" / "nvcc" for v in ("CUDA_HOME", "CUDA_PATH") if env.get(v)]
    on_path = shutil.which("nvcc", path=env.get("PATH", ""))
    for nvcc in homes + ([Path(on_path)] if on_path else []):
        root = _toolkit_root(nvcc) if nvcc.exists() else None
        if root is not None:
            text = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
            release = re.search(r"release (\d+\.\d+)", text)
            if release is None:
                raise BuildError(f"{nvcc} --version names no release: {text!r}")
            return Toolkit(root, release[1])
    return None


def choose_toolkit(env: Mapping[str, str], torch_cuda: str | None) -> Toolkit | None:
    """The toolkit to build with, or None for a CPU-only build; what does not fit is a BuildError.

    torch_cuda is torch.version.cuda; None (a CPU-only torch) conflicts with no toolkit: the kernels are
    compiled and linked all the same. Whether this machine has a GPU plays no part.
    """
    wanted = env.get("VOXMMA_CUDA", "")
    if wanted not in ("", "0", "1"):
        raise BuildError(f"VOXMMA_CUDA={wanted!r}: expected 0, 1 or nothing")
    if wanted == "0":
        say("VOXMMA_CUDA=0: building for the CPU only")
        return None
    toolkit = find_toolkit(env)
    if toolkit is None:
        if wanted == "1":
            raise BuildError(
                "VOXMMA_CUDA=1, but there is no nvcc: not in CUDA_HOME or CUDA_PATH, not on PATH"
            )
        say("no nvcc found (CUDA_HOME, CUDA_PATH, PATH): building for the CPU only, WITHOUT CUDA kernels")
        return None
    if torch_cuda is not None and torch_cuda.split(".")[0] != toolkit.version.split(".")[0]:
        raise BuildError(
            f"nvcc is of CUDA {toolkit.version} ({toolkit.home}) but torch was built for CUDA {torch_cuda}: "
            f"their major versions must agree. Point CUDA_HOME at a CUDA {torch_cuda.split('.')[0]} toolkit, "
            f"install a torch for CUDA {toolkit.version.split('.')[0]}, or set VOXMMA_CUDA=0 (CPU only)"
        )
    return toolkit


# ---- where things are --------------------------------------------------------------------------------------


def locate(package: str) -> Path | None:
    """Folder of a package of this environment or, in pip's isolated build, of the one installed into."""
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    code = f"import importlib.util as u; s = u.find_spec({package!r}); print(s.origin if s else '')"
    found = subprocess.run([sys.executable, "-E", "-c", code], capture_output=True, text=True).stdout.strip()
    return Path(found).parent if found else None


@dataclass(frozen=True)
class Torch:
    """The torch that voxmma will run with."""

    folder: Path
    version: str  # "2.13.0+cpu"
    cuda: str | None  # torch.version.cuda
    cxx11_abi: bool


def find_torch() -> Torch:
    """torch of the environment being installed into, so that the binding fits the torch it will run with."""
    folder = locate("torch")
    if folder is None:
        raise BuildError("torch is not installed, and voxmma is built against it: pip install 'torch>=2.8'")
    return read_torch(folder)


def read_torch(folder: Path) -> Torch:
    """The torch in a folder.

    Its files are read and it is not imported: pip's isolated build hides it, and a CUDA build of torch can be
    linked to on a machine where it cannot be loaded.
    """
    facts: dict[str, Any] = {}
    exec((folder / "version.py").read_text(), facts)
    config = (folder / "share" / "cmake" / "Torch" / "TorchConfig.cmake").read_text()
    return Torch(folder, facts["__version__"], facts["cuda"], "_GLIBCXX_USE_CXX11_ABI=0" not in config)


def _has_cute(folder: Path) -> bool:
    return (folder / "cute" / "tensor.hpp").exists()


def find_cutlass(root: Path, env: Mapping[str, str]) -> Path | None:
    """Folder with cute/: in VOXMMA_CUTLASS_DIR, third_party/cutlass, the nvidia-cutlass wheel, or None."""
    given = env.get("VOXMMA_CUTLASS_DIR")
    if given:
        for folder in (Path(given), Path(given) / "include"):
            if _has_cute(folder):
                return folder
        raise BuildError(
            f"VOXMMA_CUTLASS_DIR={given} holds neither cute/tensor.hpp nor include/cute/tensor.hpp"
        )
    vendored = root / "third_party" / "cutlass" / "include"
    if _has_cute(vendored):
        return vendored
    wheel = locate("cutlass_library")
    if wheel is not None and _has_cute(wheel / "source" / "include"):
        return wheel / "source" / "include"
    return None


def fetch_cutlass(build: Path) -> Path:
    """CUTLASS' headers out of the nvidia-cutlass wheel, downloaded by pip into build/."""
    target = build / CUTLASS_PIN.replace("==", "-")
    include = target / "cutlass_library" / "source" / "include"
    if not _has_cute(include):
        say(f"CUTLASS not found, downloading {CUTLASS_PIN}")
        # -I: pip of the environment itself, which pip's isolated build hides.
        command = [sys.executable, "-I", "-m", "pip", "download", "--no-deps", "-d", str(target), CUTLASS_PIN]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(target.glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise BuildError(
                f"CUTLASS' headers were not found, and downloading them failed:\n{done.stderr.strip()}\n"
                f"Install them with 'pip install --no-deps {CUTLASS_PIN}', or put CUTLASS into "
                f"third_party/cutlass, or name its folder in VOXMMA_CUTLASS_DIR"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(
                target, [n for n in wheel.namelist() if n.startswith("cutlass_library/source/include/")]
            )
        wheels[0].unlink()
    return include


def tool(name: str) -> str:
    """Path of a build tool: the environment's own (pip installs cmake and ninja) before the machine's."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    if found is None:
        raise BuildError(f"{name} is not installed: pip install {name}")
    return found


# ---- the build ---------------------------------------------------------------------------------------------


def build_id(archs: list[str], version: str) -> str:
    """Hash of all under csrc, the architectures and the compiler's version: keys caches of measured times."""
    digest = hashlib.sha256(f"{' '.join(archs)} {version}".encode())
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix in {".cu", ".cuh", ".h", ".cpp"}:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def build_kernels(
    toolkit: Toolkit, archs: list[str], cutlass: Path, cxx11_abi: bool, env: Mapping[str, str]
) -> Path:
    """Configures and builds the kernel library in build/cmake-<archs>; returns libvoxmma_kernels.a."""
    folder = ROOT / "build" / ("cmake-" + "-".join(a.replace("+PTX", "ptx") for a in archs))
    # Behind a fixed name: the same headers found elsewhere (another environment's wheel) recompile nothing.
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "cutlass"
    if not link.is_symlink() or link.resolve() != cutlass.resolve():
        link.unlink(missing_ok=True)
        link.symlink_to(cutlass.resolve())
    options = {
        "CMAKE_CUDA_COMPILER": toolkit.home / "bin" / "nvcc",
        "CMAKE_MAKE_PROGRAM": tool("ninja"),
        "VOXMMA_ARCHS": cmake_archs(archs),
        "VOXMMA_CUTLASS": link,
        "VOXMMA_CXX11_ABI": "ON" if cxx11_abi else "OFF",
        "VOXMMA_LINEINFO": "ON" if env.get("VOXMMA_LINEINFO") == "1" else "OFF",
        "VOXMMA_RACECHECK": "ON" if env.get("VOXMMA_RACECHECK") == "1" else "OFF",
    }
    configure = [tool("cmake"), "-S", str(ROOT), "-B", str(folder), "-G", "Ninja"]
    subprocess.run(configure + [f"-D{key}={value}" for key, value in options.items()], check=True)
    jobs = env.get("MAX_JOBS") or "2"
    subprocess.run(
        [tool("cmake"), "--build", str(folder), "--target", "voxmma_kernels", "-j", jobs], check=True
    )
    return folder / "libvoxmma_kernels.a"


def static_runtime(toolkit: Toolkit) -> Path:
    """libcudart_static.a of the toolkit."""
    for folder in ("lib64", "lib", f"targets/{platform.machine()}-linux/lib"):
        path = toolkit.home / folder / "libcudart_static.a"
        if path.exists():
            return path
    raise BuildError(
        f"{toolkit.home} holds no libcudart_static.a (part of the toolkit's cudart development files)"
    )


def binding_sources(cuda: bool) -> list[Path]:
    """The sources of the binding; those in csrc/torch/cuda call the kernel library."""
    folder = ROOT / "csrc" / "torch"
    return sorted([*folder.glob("*.cpp"), *(folder.glob("cuda/*.cpp") if cuda else ())])


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


def compile_command(compiler: list[str], torch: Torch, toolkit: Toolkit | None) -> list[str]:
    """What compiles a source of the binding against a torch, with CUDA kernels where a toolkit is given."""
    macros = ["TORCH_EXTENSION_NAME=_C", f"_GLIBCXX_USE_CXX11_ABI={int(torch.cxx11_abi)}"]
    include = torch.folder / "include"
    includes = [include, include / "torch" / "csrc" / "api" / "include", Path(sysconfig.get_path("include"))]
    if toolkit is not None:
        macros.append("VOXMMA_WITH_CUDA")
        includes += cuda_includes(toolkit.home)
    flags = ["-std=c++20", "-O2", "-g0", "-fPIC", "-fvisibility=hidden", "-Wall"]  # torch 2.14 needs C++20
    flags += [f"-D{macro}" for macro in macros]
    flags += [f"-I{ROOT / 'csrc' / 'include'}"]  # what is behind -isystem does not make an object stale
    return [*compiler, *flags, *(word for folder in includes for word in ("-isystem", str(folder)))]


def build_binding(compiler: list[str], output: Path, env: Mapping[str, str]) -> None:
    """Builds voxmma._C for this Python and its torch into `output`; running processes keep their old one."""
    torch = find_torch()
    toolkit = choose_toolkit(env, torch.cuda)
    archs: list[str] = []
    libraries: list[str] = []
    if toolkit is not None:
        archs = parse_archs(env.get("TORCH_CUDA_ARCH_LIST"))
        cutlass = find_cutlass(ROOT, env) or fetch_cutlass(ROOT / "build")
        say(
            f"CUDA kernels for {' '.join(archs)} with nvcc {toolkit.version} of {toolkit.home}, "
            f"CUTLASS of {cutlass}"
        )
        kernels = build_kernels(toolkit, archs, cutlass, torch.cxx11_abi, env)
        libraries = [str(kernels), str(static_runtime(toolkit)), "-lrt", "-lpthread", "-ldl"]

    version = toolkit.version if toolkit else ""
    tag = f"{sysconfig.get_config_var('SOABI')}-torch{torch.version}-{'cuda' + version if toolkit else 'cpu'}"
    folder = ROOT / "build" / f"binding-{tag}"
    folder.mkdir(parents=True, exist_ok=True)
    info = folder / "build_info.cpp"
    values = {
        "kBuildId": build_id(archs, version),
        "kCudaArchs": " ".join(archs),
        "kCudaVersion": version,
        "kTorchVersion": torch.version,
    }
    lines = [f'extern const char* const {k};\nconst char* const {k} = "{v}";\n' for k, v in values.items()]
    text = "namespace voxmma {\n" + "".join(lines) + "}\n"
    if not info.exists() or info.read_text() != text:
        info.write_text(text)

    command = compile_command(compiler, torch, toolkit)
    sources = [info, *binding_sources(toolkit is not None)]
    objects = [folder / f"{source.parent.name}-{source.stem}.o" for source in sources]
    with ThreadPoolExecutor(int(env.get("MAX_JOBS") or "2")) as pool:
        list(pool.map(compile_object, [command] * len(sources), sources, objects))
    fresh = output.with_name(output.name + ".new")
    output.parent.mkdir(parents=True, exist_ok=True)
    command = [
        *compiler,
        "-shared",
        "-o",
        str(fresh),
        *map(str, objects),
        *libraries,
        f"-L{torch.folder / 'lib'}",
    ]
    command += ["-ltorch_python", "-ltorch", "-ltorch_cpu", "-lc10", "-Wl,--exclude-libs,ALL"]
    subprocess.run(command, check=True)
    os.replace(fresh, output)
    say(
        f"built {output.name} for torch {torch.version}, {'CUDA ' + ' '.join(archs) if archs else 'CPU only'}"
    )


def find_compiler(env: Mapping[str, str]) -> list[str]:
    """The C++ compiler of CXX, else the one that Python was built with, else c++."""
    return shlex.split(env.get("CXX") or sysconfig.get_config_var("CXX") or "c++")[:1]


def main() -> None:
    """The setuptools entry point."""
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        """Hands the one extension to build_binding."""

        def build_extension(self, ext: Extension) -> None:
            try:
                (ROOT / "build").mkdir(exist_ok=True)
                with open(ROOT / "build" / ".lock", "w") as lock:  # one build at a time in this tree
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    build_binding(
                        find_compiler(os.environ), Path(self.get_ext_fullpath(ext.name)).resolve(), os.environ
                    )
            except BuildError as error:
                raise SystemExit(f"voxmma: {error}") from None

    # Without a torch to build against, pip's isolated build is asked for the newest, as the dependency is.
    isolated = "setuptools.build_meta" in sys.modules
    setup(
        ext_modules=[Extension("voxmma._C", [str(p.relative_to(ROOT)) for p in binding_sources(True)])],
        cmdclass={"build_ext": BuildExt},
        setup_requires=["torch>=2.8"] if isolated and locate("torch") is None else [],
    )


if __name__ == "__main__":
    main()
