"""What a wheel brings for a torch, what is compiled on import, and what its libraries may ask for."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import stat
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from voxmma import _binding, _extension
from voxmma._extension import _C
from voxmma.tools import doctor

ROOT = Path(__file__).resolve().parents[1]
SUFFIX = importlib.machinery.EXTENSION_SUFFIXES[0]
MODULE = """
#include <Python.h>
#include "voxmma/answer.h"
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
PyMODINIT_FUNC PyInit__C() {
  PyObject* made = PyModule_Create(&definition);
  PyModule_AddIntConstant(made, "ANSWER", kAnswer);
  return made;
}
"""


def load(name: str) -> ModuleType:
    """A file of wheels/ as a module."""
    spec = importlib.util.spec_from_file_location(f"wheels_{name}", ROOT / "wheels" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- which binding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "abi", "folder"),
    [
        ("2.13.0+cpu", True, "2.13"),
        ("2.8.1", True, "2.8"),
        ("2.11.0+cu130", True, "2.11"),
        ("2.13.0.post1", True, "2.13"),
        ("2.9.0a0+git12.nv25", True, "2.9.0a0+git12.nv25"),
        ("2.16.0.dev20270101+cu130", True, "2.16.0.dev20270101+cu130"),
        ("2.12.0rc1", True, "2.12.0rc1"),
        ("2.11.0", False, "2.11.0-old-abi"),
    ],
)
def test_fault_66_a_binding_serves_the_releases_of_one_minor_version(
    version: str, abi: bool, folder: str
) -> None:
    assert _binding.folder_of(version, abi) == folder


def bindings_for(folder: Path, *minors: str) -> Path:
    for minor in minors:
        (folder / minor).mkdir(parents=True)
        (folder / minor / f"_C{SUFFIX}").touch()
    return folder


def test_the_binding_is_that_of_the_torch(tmp_path: Path) -> None:
    bindings = bindings_for(tmp_path, "2.8", "2.11")
    for version, minor in (("2.8.0+cpu", "2.8"), ("2.11.1+cu130", "2.11")):
        assert _extension._choose(bindings, version, {}) == bindings / minor / f"_C{SUFFIX}"


def test_without_a_home_directory_the_import_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as without HOME
    with pytest.raises(ImportError, match=r"none for torch 2\.99\.0: .* home directory"):
        _extension._choose(bindings_for(tmp_path, "2.9"), "2.99.0", {})


def test_fault_66_a_torch_without_a_binding_is_one_sentence(tmp_path: Path) -> None:
    bindings = bindings_for(tmp_path, "2.9", "2.10")
    with pytest.raises(
        ImportError, match=r"bindings for torch 2\.9, 2\.10, and none for torch 2\.7\.1, which is"
    ):
        _extension._choose(bindings, "2.7.1", {})
    env = {"CXX": str(tmp_path / "nowhere"), "VOXMMA_CACHE_DIR": str(tmp_path / "cache")}
    with pytest.raises(
        ImportError, match=r"none for torch 2\.99\.0: .* there is no C\+\+ compiler"
    ) as raised:
        _extension._choose(bindings, "2.99.0", env)
    assert "\n" not in str(raised.value)


# ---- compiled on import ------------------------------------------------------------------------------------


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel's _bindings with a small module for its source."""
    monkeypatch.setattr(_binding, "LIBRARIES", ())
    bindings = tmp_path / "site" / "_bindings"
    for name, text in (
        ("torch/module.cpp", MODULE),
        ("include/voxmma/answer.h", "const int kAnswer = 42;\n"),
    ):
        path = bindings / "csrc" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    (bindings / "build_info.cpp").touch()
    return bindings


def small_torch(folder: Path) -> _binding.Torch:
    (folder / "include" / "torch").mkdir(parents=True, exist_ok=True)
    (folder / "include" / "torch" / "library.h").touch()
    return _binding.Torch(folder, "2.99.0", None, True)


def counting_compiler(folder: Path) -> dict[str, str]:
    """An environment whose compiler leaves a line of each of its runs in `folder`/runs."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\necho "$$" >> {folder}/runs\nexec c++ "$@"\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "CXX": str(script)}


CHILD = """
import os
import sys
from pathlib import Path
from voxmma import _binding
_binding.LIBRARIES = ()
bindings, cache, folder = map(Path, sys.argv[1:4])
print(_binding.compiled_once(bindings, cache, _binding.Torch(folder, "2.99.0", None, True), os.environ))
"""


@pytest.mark.slow
def test_fault_66_processes_at_once_compile_once(wheel: Path, tmp_path: Path) -> None:
    """Both get the same file, which is whole; the compiler ran once for each object and once to link."""
    torch_folder, env = small_torch(tmp_path / "torch").folder, counting_compiler(tmp_path)
    command = [sys.executable, "-c", CHILD, str(wheel), str(tmp_path / "cache"), str(torch_folder)]
    running = [
        subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outputs
    (path,) = {out.strip() for out, _ in outputs}
    assert sum("compiling the binding for torch 2.99.0, once" in said for _, said in outputs) == 1
    assert len((tmp_path / "runs").read_text().splitlines()) == 3
    code = f"""
import importlib.util as u
spec = u.spec_from_file_location("_C", {path!r}); m = u.module_from_spec(spec); spec.loader.exec_module(m)
print(m.ANSWER)"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "42\n"


def test_what_was_compiled_is_of_these_sources_and_this_torch(wheel: Path, tmp_path: Path) -> None:
    env, known = counting_compiler(tmp_path), small_torch(tmp_path / "torch")
    first = _binding.compiled_once(wheel, tmp_path / "cache", known, env)
    assert _binding.compiled_once(wheel, tmp_path / "cache", known, env) == first
    assert len((tmp_path / "runs").read_text().splitlines()) == 3
    (wheel / "csrc" / "include" / "voxmma" / "answer.h").write_text("const int kAnswer = 43;\n")
    assert _binding.compiled_once(wheel, tmp_path / "cache", known, env) != first
    newer = _binding.Torch(known.folder, "2.100.0", None, True)
    assert "2.100.0" in str(_binding.compiled_once(wheel, tmp_path / "cache", newer, env))


def test_a_source_that_does_not_compile_is_an_error_and_leaves_nothing(wheel: Path, tmp_path: Path) -> None:
    (wheel / "csrc" / "torch" / "module.cpp").write_text("#error no\n")
    for _ in range(2):
        with pytest.raises(_binding.BuildError, match="compiling its binding on import failed"):
            _binding.compiled_once(wheel, tmp_path / "cache", small_torch(tmp_path / "torch"), {})
    assert not list((tmp_path / "cache").rglob("*.so*"))


def test_headers_that_are_missing_are_named(wheel: Path, tmp_path: Path) -> None:
    bare = _binding.Torch(tmp_path / "bare", "2.99.0", None, True)
    with pytest.raises(_binding.BuildError, match=r"there is no .*bare/include"):
        _binding.compiled_once(wheel, tmp_path / "cache", bare, {})


# ---- libraries ---------------------------------------------------------------------------------------------

NEW = """
#include <dlfcn.h>
#include <exception>
#include <pthread.h>
#include <sstream>
#include <vector>
static void* work(void*) { return nullptr; }
extern "C" int %s(int n) {
  pthread_t thread;
  if (pthread_create(&thread, nullptr, work, nullptr) != 0 || pthread_join(thread, nullptr) != 0) return -1;
  if (dlopen("libnothing.so", RTLD_NOW) != nullptr) return -2;
  std::exception_ptr held;
  try { throw 7; } catch (...) { held = std::current_exception(); }
  std::vector<std::exception_ptr> copies(3, held);
  held = nullptr;
  copies.resize(1);
  std::ostringstream text;
  try { std::rethrow_exception(copies[0]); } catch (int value) { text << value << n; }
  try { new int[static_cast<size_t>(-n)]; return -3; } catch (const std::bad_alloc&) {}
  return text.str() == "75" && std::move(text).str() == "75" ? 0 : -4;
}
"""


# What later compilers ask for, called by its name.
NEWER = """
#include <cstdlib>
#include <exception>
#include <string>
#include <unwind.h>
#define STRING "_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEE"
void cold(std::string*, char*, size_t, const char*, size_t, size_t) asm(STRING "15_M_replace_coldEPcmPKcmm");
void streams() asm("_ZSt21ios_base_library_initv");
extern "C" void __cxa_call_terminate(void*);
static bool replaces(size_t at, size_t length, size_t from, size_t count) {
  std::string text = "0123456789abcdefghijklmnopqrstuvwxyz", expected = text;
  text.reserve(100);
  expected.replace(at, length, std::string(expected, from, count));
  cold(&text, &text[at], length, &text[from], count, text.size() - at - length);
  return std::string(text.data(), expected.size()) == expected;
}
extern "C" int %s(int n) {
  streams();
  for (int from = 0; from < 20; ++from)
    for (int count = 0; count < 12; ++count) if (!replaces(n, 6, from, count)) return -1;
  std::set_terminate([] {
    try { throw; } catch (int value) { std::_Exit(value); }
  });
  try { throw 7; } catch (...) {
    const std::exception_ptr held = std::current_exception();  // a pointer to the 7, which its head precedes
    __cxa_call_terminate(*reinterpret_cast<_Unwind_Exception* const*>(&held) - 1);
  }
  return -2;
}
"""


@pytest.mark.parametrize(("text", "code"), [(NEW, 0), (NEWER, 7)], ids=["to GCC 12", "to GCC 16"])
def test_what_is_linked_for_a_wheel_runs_and_asks_for_no_newer_glibc(
    text: str, code: int, tmp_path: Path
) -> None:
    """dlopen and threads (glibc 2.34), libstdc++ of GCC 9 to 16, behind the symbols of old."""
    portable = load("portable")
    source, library = tmp_path / "new.cpp", tmp_path / "new.so"
    source.write_text(text % "run")
    last = portable.old_glibc(["c++"], tmp_path / "glibc")
    subprocess.run(
        ["c++", "-std=c++20", "-O1", "-shared", "-fPIC", "-w", "-o", library, source, *last], check=True
    )
    listed = subprocess.run(["nm", "-D", library], capture_output=True, text=True, check=True).stdout
    versions = {word.split("@")[1] for word in listed.split() if "@" in word}
    assert versions
    for name, newest in (("GLIBC", (2, 28)), ("GLIBCXX", (3, 4, 25)), ("CXXABI", (1, 3, 11))):
        found = [portable.version_of(v.replace(name, "GLIBC")) for v in versions if v.startswith(f"{name}_")]
        assert max(found) <= newest, versions
    command = f"import ctypes, os; os._exit(ctypes.CDLL({str(library)!r}).run(5))"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == code, done


def test_foreign_symbols_are_found(tmp_path: Path) -> None:
    check = load("check")

    def made(name: str, text: str, *options: str) -> Path:
        (tmp_path / "x.cpp").write_text(text)
        path = tmp_path / name
        command = ["c++", "-shared", "-fPIC", "-o", path, tmp_path / "x.cpp", *options]
        subprocess.run(command, check=True)
        return path

    kernels = "libvoxmma_kernels.so"
    good = "namespace voxmma { int launch(int n) { return n; } }"
    assert check.problems_of(made(kernels, good)) == []
    bad = good + 'extern "C" int cudaFree(void*); extern "C" int other(void* p) { return cudaFree(p); }'
    texts = "\n".join(check.problems_of(made(kernels, bad)))
    assert "exports other" in texts and "asks for CUDA's cudaFree" in texts
    made("libcudart.so.13", 'extern "C" int cudaFree(void*) { return 0; }', "-Wl,-soname,libcudart.so.13")
    calls = 'extern "C" int cudaFree(void*); extern "C" int PyInit__C() { return cudaFree(0); }'
    linked = made("_C.so", calls, str(tmp_path / "libcudart.so.13"))
    assert any("asks for libcudart.so.13" in text for text in check.problems_of(linked))
    torch_cuda = (
        'namespace c10 { namespace cuda { int f(); } } extern "C" int PyInit__C() { return c10::cuda::f(); }'
    )
    assert any("c104cuda" in text for text in check.problems_of(made("_C.so", torch_cuda)))
    assert check.problems_of(made("_C.so", 'extern "C" int PyInit__C() { return 0; }')) == []


# ---- the card and its driver -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "code"),
    [
        ((8, 0), "machine code for 8.0"),
        ((8, 6), "machine code for 8.6"),
        ((8, 9), "machine code for 8.6"),
        ((9, 0), "machine code for 9.0a"),
        ((10, 3), "machine code for 10.0"),
        ((12, 0), "machine code for 12.0"),
        ((13, 0), "PTX of 12.0, which the driver compiles at its first use"),
        ((7, 5), "no code"),
    ],
)
def test_what_code_a_card_gets(capability: tuple[int, int], code: str) -> None:
    assert doctor.code_for(["8.0", "8.6", "9.0a", "10.0", "12.0+PTX"], capability) == code


def test_make_wheel_has_machine_code_for_every_card_since_ampere() -> None:
    """What docs/install.md says of a wheel of the default architectures."""
    archs, own = load("build").ARCHS.split(), "machine code for "
    for capability in ((8, 0), (8, 6), (8, 9), (10, 0), (12, 0)):
        assert doctor.code_for(archs, capability).startswith(f"{own}{capability[0]}.{capability[1]}")
    assert doctor.code_for(archs, (9, 0)) == f"{own}9.0a"
    assert doctor.code_for(archs, (10, 3)) == f"{own}10.0"
    assert doctor.code_for(archs, (12, 1)).startswith(f"{own}12.0")
    assert doctor.code_for(archs, (8, 7)) == "no code"
    assert doctor.code_for(archs, (13, 0)).startswith("PTX of 12.0")


def test_fault_67_an_old_driver_is_one_sentence() -> None:
    for driver, runtime in ((13000, 13000), (13010, 13000), (13000, 12090), (12000, 12090)):
        assert _C.driver_problem(driver, runtime) == ""
    said = _C.driver_problem(12080, 13000)
    assert "built with CUDA 13.0 and need an NVIDIA driver for CUDA 13 (580 or newer)" in said
    assert "the one here is for CUDA 12.8" in said and "\n" not in said
    assert "there is none here" in _C.driver_problem(0, 12090)


def test_the_runtime_is_that_of_the_kernels() -> None:
    if not _C.HAS_CUDA:
        pytest.skip("a build without kernels")
    assert _C.runtime_version() // 1000 == int(_C.CUDA_VERSION.split(".")[0])


@pytest.mark.gpu
def test_the_driver_of_a_gpu_that_works_is_new_enough() -> None:
    assert _C.driver_problem(_C.driver_version(), _C.runtime_version()) == ""
    assert [check.status for check in doctor._check_driver()] == ["ok"]
    capability = torch.cuda.get_device_capability()
    assert doctor.code_for(_C.CUDA_ARCHS, capability) != "no code"
