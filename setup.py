"""Builds the torch-free kernel library by CMakeLists.txt, and the binding of csrc/torch for a torch or more.

In place, for the interpreter and the torch at hand, as one file: ``python setup.py build_ext --inplace``.
A wheel and ``pip install .`` have the kernel library as a shared object, beside it a binding for the torch
that is installed, or for those of VOXMMA_WHEEL, and the binding's sources (python/voxmma/_extension.py).

Environment variables (all optional):

VOXMMA_CUDA            1: CUDA kernels or an error; 0: CPU only; unset: CUDA where an nvcc is found
TORCH_CUDA_ARCH_LIST   architectures, default "8.0;9.0a"; 9.0 means 9.0a (Hopper kernels); 8.0+PTX
                       and 9.0+PTX add PTX for newer cards, without Hopper kernels
CUDA_HOME, CUDA_PATH   the CUDA toolkit; else the nvcc on PATH leads to it
VOXMMA_CUTLASS_DIR     CUTLASS' headers (else third_party/cutlass, the nvidia-cutlass wheel, a download)
VOXMMA_WHEEL           a wheel for any machine with glibc 2.28: bindings for these minor versions of torch
                       ("2.11 2.13"), or "all" of wheels/torch.txt, whose headers are fetched
MAX_JOBS               compiler processes at a time, default 2
VOXMMA_LINEINFO        1: keep source lines in the kernels, for profilers and compute-sanitizer
VOXMMA_RACECHECK       1: a build that compute-sanitizer's racecheck can follow (csrc/common/memory.cuh: why)

Build files stay in build/, by architecture and Python, so that a second build compiles only what changed.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parent


def load(path: str) -> ModuleType:
    """A module of this tree by its path; nothing of voxmma is imported."""
    name = f"voxmma_setup_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


if TYPE_CHECKING:
    from voxmma import _binding as binding
    from voxmma._binding import BuildError, Torch
else:
    binding = load("python/voxmma/_binding.py")
    BuildError, Torch = binding.BuildError, binding.Torch
CUTLASS_PINS, TORCH_PINS = ROOT / "wheels" / "cutlass.txt", ROOT / "wheels" / "torch.txt"
DEFAULT_ARCHS = "8.0;9.0a"
ARCH_NAMES = {"Ampere": "8.0;8.6", "Ada": "8.9", "Hopper": "9.0", "Blackwell": "10.0;12.0"}


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


def fetch(
    requirements: list[str], kept: tuple[str, ...], target: Path, options: tuple[str, ...] = ()
) -> None:
    """Downloads one wheel by pip and keeps what begins as `kept` in `target`, at once or not at all.

    requirements: lines of a requirements file; a hash in them must be that of the wheel.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        (Path(name) / "requirements.txt").write_text("\n".join(requirements) + "\n")
        # -I: pip of the environment itself, which pip's isolated build hides.
        command = [
            sys.executable,
            "-I",
            "-m",
            "pip",
            "download",
            "-q",
            "--no-cache-dir",
            "--no-deps",
            *options,
        ]
        command += ["-d", name, "-r", str(Path(name) / "requirements.txt")]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = sorted(Path(name).glob("*.whl"))
        if done.returncode != 0 or not wheels:
            raise BuildError(f"downloading {requirements[0].split()[0]} failed:\n{done.stderr.strip()}")
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(name) / "kept", [n for n in wheel.namelist() if n.startswith(kept)])
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(Path(name) / "kept", target)


def torch_pins() -> dict[str, str]:
    """The line of wheels/torch.txt for each minor version, "2.11"."""
    lines = [line for line in TORCH_PINS.read_text().splitlines() if line.startswith("torch==")]
    return {".".join(map(str, binding.minor_of(line.removeprefix("torch==")))): line for line in lines}


def fetch_torch(requirement: str, name: str) -> Torch:
    """The headers of a torch, without its libraries, kept in build/torch-headers/<name>."""
    folder = ROOT / "build" / "torch-headers" / name
    if not (folder / "torch" / "include").exists():
        say(f"fetching the headers of {requirement.split()[0]}")
        # Any Python's wheel has them; this machine's Python may have none of this torch.
        pinned = ("--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12")
        kept = ("torch/include/", "torch/version.py", "torch/share/cmake/Torch/TorchConfig.cmake")
        fetch([requirement], kept, folder, pinned if "--hash" in requirement else ())
    return binding.read_torch(folder / "torch")


def find_torches(env: Mapping[str, str]) -> list[Torch]:
    """The torches to build bindings for: those of VOXMMA_WHEEL, else that of the environment.

    Where an installation has none (pip's isolated build for a new environment), it gets the newest, and so
    does the binding; its headers are fetched and nothing else.
    """
    folder = locate("torch")
    here = binding.read_torch(folder) if folder is not None else None
    if not env.get("VOXMMA_WHEEL"):
        if here is None and "setuptools.build_meta" not in sys.modules:
            raise BuildError(
                "torch is not installed, and voxmma is built against it: pip install 'torch>=2.8'"
            )
        return [here or fetch_torch("torch>=2.8", "newest")]
    pins = torch_pins()
    wanted = list(pins) if env["VOXMMA_WHEEL"] == "all" else env["VOXMMA_WHEEL"].split()
    found = []
    for minor in wanted:
        if here is not None and binding.folder_of(here.version, here.cxx11_abi) == minor:
            found.append(here)
        elif minor in pins:
            found.append(fetch_torch(pins[minor], minor))
        else:
            raise BuildError(
                f"VOXMMA_WHEEL={env['VOXMMA_WHEEL']!r}: {minor!r} is neither the torch installed nor one of "
                f"{', '.join(pins)} (wheels/torch.txt)"
            )
    return found


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
    pin = next(line for line in CUTLASS_PINS.read_text().splitlines() if line.startswith("nvidia-cutlass=="))
    name = pin.split()[0]
    target = build / name.replace("==", "-")
    include = target / "cutlass_library" / "source" / "include"
    if not _has_cute(include):
        say(f"CUTLASS not found, downloading {name}")
        try:
            fetch([pin], ("cutlass_library/source/include/",), target)
        except BuildError as error:
            raise BuildError(
                f"CUTLASS' headers were not found, and {error}\n"
                f"Install them with 'pip install --no-deps {name}', or put CUTLASS into "
                f"third_party/cutlass, or name its folder in VOXMMA_CUTLASS_DIR"
            ) from None
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


@dataclass(frozen=True)
class Kernels:
    """The kernel library and how it was built; a build for the CPU has neither files nor architectures."""

    files: list[str]  # what the linker takes: the library and CUDA's runtime
    archs: list[str]
    version: str  # of CUDA, "13.0"


def build_all_kernels(toolkit: Toolkit | None, cxx11_abi: bool, env: Mapping[str, str]) -> Kernels:
    """The kernel library as it is linked."""
    if toolkit is None:
        return Kernels([], [], "")
    archs = parse_archs(env.get("TORCH_CUDA_ARCH_LIST"))
    cutlass = find_cutlass(ROOT, env) or fetch_cutlass(ROOT / "build")
    say(
        f"CUDA kernels for {' '.join(archs)} with nvcc {toolkit.version} of {toolkit.home}, "
        f"CUTLASS of {cutlass}"
    )
    built = str(build_kernels(toolkit, archs, cutlass, cxx11_abi, env))
    files = ["-Wl,--whole-archive", built, "-Wl,--no-whole-archive", str(static_runtime(toolkit))]
    return Kernels([*files, "-lrt", "-lpthread", "-ldl"], archs, toolkit.version)


def write_info(kernels: Kernels, folder: Path) -> Path:
    """The constants of csrc/torch/module.h."""
    values = {
        "kBuildId": build_id(kernels.archs, kernels.version),
        "kCudaArchs": " ".join(kernels.archs),
        "kCudaVersion": kernels.version,
    }
    lines = [f'extern const char* const {k};\nconst char* const {k} = "{v}";\n' for k, v in values.items()]
    path = folder / "build_info.cpp"
    binding.write_changed(path, "namespace voxmma {\n" + "".join(lines) + "}\n")
    return path


def compile_binding(compiler: list[str], torch: Torch, kernels: Kernels) -> tuple[list[Path], Path]:
    """The objects of the binding for a torch and this Python, and the source of its constants."""
    cuda = f"cuda{kernels.version}" if kernels.files else "cpu"
    folder = ROOT / "build" / f"binding-{sysconfig.get_config_var('SOABI')}-torch{torch.version}-{cuda}"
    folder.mkdir(parents=True, exist_ok=True)
    info = write_info(kernels, folder)
    what = f"CUDA {' '.join(kernels.archs)}" if kernels.files else "CPU only"
    say(f"binding for torch {torch.version}, {what}")
    return binding.compile_binding(compiler, torch, ROOT / "csrc", info, folder, bool(kernels.files)), info


def build_in_place(compiler: list[str], output: Path, env: Mapping[str, str]) -> None:
    """Builds voxmma._C for this Python and its torch as one file."""
    (torch,) = find_torches({})
    kernels = build_all_kernels(choose_toolkit(env, torch.cuda), torch.cxx11_abi, env)
    made, _ = compile_binding(compiler, torch, kernels)
    libraries = [f"-L{torch.folder / 'lib'}", *(f"-l{name}" for name in binding.LIBRARIES)]
    binding.link(compiler, output, [*map(str, made), *kernels.files, *libraries, "-Wl,--exclude-libs,ALL"])


def build_bindings(compiler: list[str], folder: Path, env: Mapping[str, str]) -> None:
    """Builds a wheel's voxmma/_bindings: the kernel library, the bindings and their sources."""
    torches = find_torches(env)
    portable, wheel = load("wheels/portable.py"), bool(env.get("VOXMMA_WHEEL"))
    toolkit = choose_toolkit(env, None if wheel else torches[0].cuda)
    kernels = build_all_kernels(toolkit, torches[0].cxx11_abi, env)
    link = ROOT / "build" / "link"
    last = portable.old_glibc(compiler, link / "glibc") if wheel else []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    library = folder / binding.KERNELS
    if kernels.files:
        # Names of this library alone are seen from outside; torch has a CUDA runtime of its own.
        exports = link / "exports.map"
        exports.parent.mkdir(parents=True, exist_ok=True)
        exports.write_text('{ global: extern "C++" { voxmma::*; }; local: *; };\n')
        options = [f"-Wl,-soname,{library.name}", f"-Wl,--version-script={exports}", "-Wl,-z,defs"]
        binding.link(compiler, library, [*kernels.files, *options, *last])
    with ThreadPoolExecutor(int(env.get("MAX_JOBS") or "2")) as pool:
        compiled = list(pool.map(lambda torch: compile_binding(compiler, torch, kernels), torches))
    for torch, (made, info) in zip(torches, compiled, strict=True):
        inputs = [*map(str, made), *portable.absent_libraries(compiler, link / "torch", binding.LIBRARIES)]
        if kernels.files:
            inputs += [str(library), "-Wl,-rpath,$ORIGIN/.", "-Wl,-rpath,$ORIGIN/.."]
        name = binding.folder_of(torch.version, torch.cxx11_abi)
        output = folder / name / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
        binding.link(compiler, output, [*inputs, *last])
        shutil.copyfile(info, folder / "build_info.cpp")
    for part in ("torch", "include"):
        shutil.copytree(ROOT / "csrc" / part, folder / "csrc" / part)


def main() -> None:
    """The setuptools entry point."""
    from setuptools import Extension, setup
    from setuptools.command.build_ext import build_ext

    class BuildExt(build_ext):
        """Hands the one extension to the functions above."""

        def run(self) -> None:
            self.into_sources = bool(self.inplace)  # setuptools builds elsewhere, and copies afterwards
            super().run()

        def build_extension(self, ext: Extension) -> None:
            compiler, path = (
                binding.find_compiler(os.environ),
                Path(self.get_ext_fullpath(ext.name)).resolve(),
            )
            try:
                (ROOT / "build").mkdir(exist_ok=True)
                with open(ROOT / "build" / ".lock", "w") as lock:  # one build at a time in this tree
                    fcntl.flock(lock, fcntl.LOCK_EX)
                    if self.into_sources:
                        build_in_place(compiler, path, os.environ)
                    else:
                        path.unlink(missing_ok=True)
                        build_bindings(compiler, path.parent / "_bindings", os.environ)
            except BuildError as error:
                raise SystemExit(f"voxmma: {error}") from None

    setup(
        ext_modules=[
            Extension("voxmma._C", [str(p.relative_to(ROOT)) for p in binding.sources(ROOT / "csrc", True)])
        ],
        cmdclass={"build_ext": BuildExt},
    )


if __name__ == "__main__":
    main()
