"""libvoxmma as the tests of its folder use it: built once by CMake, called through ctypes."""

from __future__ import annotations

import ctypes
import fcntl
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8
)  # fmt: skip


def tool(name: str) -> str:
    """A program of this environment, or of the machine."""
    found = shutil.which(name, path=sysconfig.get_path("scripts")) or shutil.which(name)
    assert found is not None, f"{name} is not installed"
    return found


def run(*command: str | Path, timeout: float = 600) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def kernels() -> Path | None:
    """The kernel library that setup.py built, if it has."""
    found = (ROOT / "build").glob("cmake-*/libvoxmma_kernels.a")
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process builds at a time."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build(name: str, *options: str, targets: Sequence[str] = ()) -> Path:
    """Configures and builds runtime/ in build/runtime-<name>, which it returns."""
    folder = ROOT / "build" / f"runtime-{name}"
    with _alone(folder):
        ninja = f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"
        run(tool("cmake"), "-S", ROOT / "runtime", "-B", folder, "-G", "Ninja", ninja, *options)
        wanted = [part for target in targets for part in ("--target", target)]
        run(tool("cmake"), "--build", folder, *wanted)
    return folder


def cuda_options() -> list[str]:
    """Options of a build for GPUs on top of the kernels that are built already."""
    library = kernels()
    assert library is not None
    cache = (library.parent / "CMakeCache.txt").read_text().splitlines()
    known = dict(line.split(":", 1) for line in cache if ":" in line and not line.startswith(("#", "/")))
    values = {name: known[name].split("=", 1)[1] for name in ("VOXMMA_ARCHS", "CMAKE_CUDA_COMPILER")}
    given = [f"-D{name}={value}" for name, value in values.items()]
    return ["-DVOXMMA_CUDA=ON", f"-DVOXMMA_KERNELS={library}", *given]


# ---- the C interface ---------------------------------------------------------------------------------------


class Allocator(ctypes.Structure):
    ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    RELEASE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
    _fields_ = (("context", ctypes.c_void_p), ("allocate", ALLOCATE), ("release", RELEASE))


class Options(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t), ("device", ctypes.c_int), ("graph", ctypes.c_int), ("allocator", Allocator)
    )  # fmt: skip


class InputInfo(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int), ("dtype", ctypes.c_int), ("dims", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 8), ("samples", ctypes.c_int32), ("low", ctypes.c_int32 * 4),
        ("high", ctypes.c_int32 * 4), ("stride", ctypes.c_int32 * 3), ("point_dtype", ctypes.c_int),
    )  # fmt: skip


class OutputInfo(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int), ("dtype", ctypes.c_int), ("dims", ctypes.c_int32),
        ("shape", ctypes.c_int64 * 8), ("level", ctypes.c_int32), ("stride", ctypes.c_int32 * 3),
    )  # fmt: skip


class EngineInfo(ctypes.Structure):
    _fields_ = (
        ("inputs", ctypes.c_int32), ("outputs", ctypes.c_int32), ("levels", ctypes.c_int32),
        ("cuda", ctypes.c_int32), ("device", ctypes.c_int32), ("memory", ctypes.c_size_t),
    )  # fmt: skip


class Input(ctypes.Structure):
    _fields_ = (
        ("where", ctypes.c_void_p), ("data", ctypes.c_void_p), ("rows", ctypes.c_int64),
        ("samples", ctypes.c_void_p), ("count", ctypes.c_void_p),
    )  # fmt: skip


class Output(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("coords", ctypes.c_void_p), ("strides", ctypes.c_int64 * 8),
        ("rows", ctypes.c_void_p),
    )  # fmt: skip


class Frame(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int), ("level", ctypes.c_int32), ("map", ctypes.c_int32), ("row", ctypes.c_int64),
        ("twin", ctypes.c_int64), ("needed", ctypes.c_int64), ("capacity", ctypes.c_int64),
    )  # fmt: skip


class RuntimeFault(Exception):
    """A code that is not VXM_OK."""

    def __init__(self, code: str, text: str, frame: Frame | None = None) -> None:
        super().__init__(f"{code}: {text}")
        self.code, self.frame = code, frame


class Library:
    """libvoxmma of a build folder."""

    def __init__(self, folder: Path) -> None:
        self.c = ctypes.CDLL(str(folder / "libvoxmma.so"))
        self.c.vxm_last_error.restype = self.c.vxm_voxmma_version.restype = ctypes.c_char_p
        self.c.vxm_code_name.restype = ctypes.c_char_p

    def check(self, code: int, frame: Frame | None = None) -> None:
        name = self.c.vxm_code_name(code).decode().removeprefix("VXM_")
        assert name.partition("_")[0] in ("OK", "ERROR", "FRAME")
        if name != "OK":
            text = self.c.vxm_last_error().decode()
            assert text
            raise RuntimeFault(name, text, frame)

    def options(self) -> Options:
        made = Options()
        self.c.vxm_options_init(ctypes.byref(made))
        return made

    def load(self, path: Path, options: Options | None = None) -> Loaded:
        return Loaded(self, path, options)


class Loaded:
    """A vxm_engine."""

    def __init__(self, library: Library, path: Path, options: Options | None) -> None:
        self.library, self.handle = library, ctypes.c_void_p()
        given = None if options is None else ctypes.byref(options)
        library.check(library.c.vxm_engine_load(str(path).encode(), given, ctypes.byref(self.handle)))
        self.info = EngineInfo()
        library.check(library.c.vxm_engine_get_info(self.handle, ctypes.byref(self.info)))
        self.inputs = [self._filled("vxm_engine_input", InputInfo, i) for i in range(self.info.inputs)]
        self.outputs = [
            self._filled("vxm_engine_output_info", OutputInfo, i) for i in range(self.info.outputs)
        ]

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_: Any) -> None:
        self.library.c.vxm_engine_free(self.handle)
        self.handle = None

    def _filled(self, name: str, kind: Any, *numbers: int) -> Any:
        made = kind()
        self.library.check(getattr(self.library.c, name)(self.handle, *numbers, ctypes.byref(made)))
        return made

    def run(self, *inputs: Any, stream: int | None = None, count: torch.Tensor | None = None) -> None:
        """A frame of (coords, feats), (points, feats, samples) and tensors. count: rows of the first."""
        given = [
            Input(leaf[0].data_ptr(), leaf[1].data_ptr(), len(leaf[0]), *(t.data_ptr() for t in leaf[2:]))
            if isinstance(leaf, tuple)
            else Input(None, leaf.data_ptr(), 0, None)
            for leaf in inputs
        ]
        if count is not None:
            given[0].count = count.data_ptr()
        array = (Input * len(given))(*given)
        self.library.check(
            self.library.c.vxm_engine_run(self.handle, array, len(given), ctypes.c_void_p(stream))
        )

    def status(self) -> Frame:
        frame = Frame()
        self.library.check(self.library.c.vxm_engine_status(self.handle, ctypes.byref(frame)), frame)
        return frame

    def rows(self, level: int) -> int:
        return int(self._filled("vxm_engine_rows", ctypes.c_int64, level).value)

    def output(self, i: int) -> Output:
        return self._filled("vxm_engine_output", Output, i)

    def read(self, i: int) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Coordinates, where there are any, and values of a result, on the host."""
        of = self.outputs[i]
        shape = list(of.shape[: of.dims])
        if of.level >= 0:
            shape[0] = self.rows(of.level)
        data = torch.empty(shape, dtype=DTYPES[of.dtype])
        coords = torch.empty((shape[0], 4), dtype=torch.int32) if of.kind == 0 else None
        where = None if coords is None else ctypes.c_void_p(coords.data_ptr())
        self.library.check(
            self.library.c.vxm_engine_read(self.handle, i, where, ctypes.c_void_p(data.data_ptr()))
        )
        return coords, data
