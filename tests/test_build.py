"""What setup.py decides before anything is compiled: toolkit, CUDA major, architectures, CUTLASS."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """setup.py as a module (its main() runs under __main__ only)."""
    spec = importlib.util.spec_from_file_location("voxmma_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def make_toolkit(root: Path, release: str) -> Path:
    """A toolkit folder with an nvcc that answers --version as the real one does."""
    (root / "bin").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "include" / "cuda_runtime.h").touch()
    nvcc = root / "bin" / "nvcc"
    nvcc.write_text(
        f'#!/bin/sh\n[ "$1" = --dryrun ] && echo "#$ TOP={root}" >&2\necho "release {release}, V1"\n'
    )
    nvcc.chmod(0o755)
    return root


def make_cutlass(folder: Path) -> Path:
    (folder / "cute").mkdir(parents=True)
    (folder / "cute" / "tensor.hpp").touch()
    return folder


# ---- toolkit -----------------------------------------------------------------------------------------------


def test_no_nvcc_means_cpu_only_and_is_said(build, capsys):
    assert build.choose_toolkit({"PATH": "/nonexistent"}, "13.0") is None
    assert "no nvcc found" in capsys.readouterr().out


def test_cuda_demanded_without_nvcc_is_an_error(build):
    with pytest.raises(build.BuildError, match="VOXMMA_CUDA=1, but there is no nvcc"):
        build.choose_toolkit({"PATH": "/nonexistent", "VOXMMA_CUDA": "1"}, "13.0")


def test_cpu_only_is_chosen_though_nvcc_is_there(build, tmp_path, capsys):
    home = make_toolkit(tmp_path / "cuda", "13.0")
    assert build.choose_toolkit({"PATH": "", "CUDA_HOME": str(home), "VOXMMA_CUDA": "0"}, "13.0") is None
    assert "CPU only" in capsys.readouterr().out


def test_unknown_value_of_voxmma_cuda(build):
    with pytest.raises(build.BuildError, match="VOXMMA_CUDA='yes'"):
        build.choose_toolkit({"PATH": "", "VOXMMA_CUDA": "yes"}, None)


def test_majors_must_agree_and_the_error_names_both(build, tmp_path):
    home = make_toolkit(tmp_path / "cuda", "12.6")
    env = {"PATH": "", "CUDA_HOME": str(home)}
    with pytest.raises(build.BuildError, match=r"CUDA 12\.6 .* torch was built for CUDA 13\.0"):
        build.choose_toolkit(env, "13.0")
    assert build.choose_toolkit(env, "12.8") == build.Toolkit(home, "12.6")
    assert build.choose_toolkit(env, None) == build.Toolkit(
        home, "12.6"
    )  # CPU-only torch: compiled all the same


def test_toolkit_order_and_nvcc_behind_a_script(build, tmp_path, capsys):
    homes = {name: make_toolkit(tmp_path / name, "13.0") for name in ("home", "path", "real")}
    shim = tmp_path / "bin" / "nvcc"  # as /usr/local/bin/nvcc may be: a script that starts the real one
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {homes["real"]}/bin/nvcc "$@"\n')
    shim.chmod(0o755)
    env = {"CUDA_HOME": str(homes["home"]), "CUDA_PATH": str(homes["path"]), "PATH": str(shim.parent)}
    for variable, expected in (("CUDA_HOME", "home"), ("CUDA_PATH", "path"), (None, "real")):
        assert build.find_toolkit(env).home == homes[expected]
        env.pop(variable or "", None)
    env["CUDA_HOME"] = str(tmp_path / "nowhere")
    assert build.find_toolkit(env).home == homes["real"]
    assert "nowhere holds no bin/nvcc" in capsys.readouterr().out


# ---- architectures -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "archs", "cmake"),
    [
        (None, ["8.0", "9.0a"], "80-real;90a-real"),
        ("", ["8.0", "9.0a"], "80-real;90a-real"),
        ("9.0", ["9.0a"], "90a-real"),
        ("8.0;9.0a", ["8.0", "9.0a"], "80-real;90a-real"),
        ("8.6 8.9+PTX", ["8.6", "8.9+PTX"], "86-real;89-real;89-virtual"),
        ("9.0+PTX", ["9.0a", "9.0+PTX"], "90a-real;90-virtual"),
        ("9.0a 9.0+PTX", ["9.0a", "9.0+PTX"], "90a-real;90-virtual"),
        ("8.0;8.0+PTX", ["8.0", "8.0+PTX"], "80-real;80-virtual"),
        ("10.0a", ["10.0a"], "100a-real"),
        ("10.0;12.0f", ["10.0", "12.0f"], "100-real;120f-real"),
        ("12.1+PTX", ["12.1+PTX"], "121-real;121-virtual"),
        ("8.0,12.0a, 9.0 9.0a", ["8.0", "12.0a", "9.0a"], "80-real;120a-real;90a-real"),
        ("Ampere;Hopper", ["8.0", "8.6", "9.0a"], "80-real;86-real;90a-real"),
    ],
)
def test_arch_list(build, text, archs, cmake):
    assert build.parse_archs(text) == archs
    assert build.cmake_archs(archs) == cmake


@pytest.mark.parametrize(
    "text",
    [
        "7.5",
        "8.0;7.0",
        "sm_80",
        "90",
        ";",
        "8.0-real",
        "8.0a",
        "9.0f",
        "9.0a+PTX",
        "12.0f+PTX",
        "10.0a+PTX",
        "12.0fa",
    ],
)
def test_bad_arch_list_is_named(build, text):
    with pytest.raises(build.BuildError, match="TORCH_CUDA_ARCH_LIST="):
        build.parse_archs(text)


# ---- CUTLASS -----------------------------------------------------------------------------------------------


def test_cutlass_order(build, tmp_path, monkeypatch):
    given = make_cutlass(tmp_path / "given" / "include")
    vendored = make_cutlass(tmp_path / "third_party" / "cutlass" / "include")
    wheel = make_cutlass(tmp_path / "site" / "cutlass_library" / "source" / "include")
    monkeypatch.setattr(build, "locate", lambda package: tmp_path / "site" / package)
    assert build.find_cutlass(tmp_path, {"VOXMMA_CUTLASS_DIR": str(given.parent)}) == given
    assert build.find_cutlass(tmp_path, {"VOXMMA_CUTLASS_DIR": str(given)}) == given
    assert build.find_cutlass(tmp_path, {}) == vendored
    (vendored / "cute" / "tensor.hpp").unlink()
    assert build.find_cutlass(tmp_path, {}) == wheel
    (wheel / "cute" / "tensor.hpp").unlink()
    assert build.find_cutlass(tmp_path, {}) is None
    with pytest.raises(build.BuildError, match=r"VOXMMA_CUTLASS_DIR=.*holds neither"):
        build.find_cutlass(tmp_path, {"VOXMMA_CUTLASS_DIR": str(tmp_path / "empty")})


def test_failed_download_says_how_to_get_cutlass(build, tmp_path, monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "", "no network")
    monkeypatch.setattr(build.subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(
        build.BuildError, match=r"no network\n.*pip install --no-deps nvidia-cutlass==4\.2\.0\.0"
    ):
        build.fetch_cutlass(tmp_path)


# ---- torches -----------------------------------------------------------------------------------------------


def test_everything_that_a_wheel_fetches_is_pinned_by_a_hash(build):
    """pip checks hashes once a requirement has one: every line of every list has."""
    for name in ("torch", "cutlass", "build"):
        lines = (ROOT / "wheels" / f"{name}.txt").read_text().splitlines()
        pins = [line for line in lines if not line.startswith("#")]
        assert pins and all(re.fullmatch(r"[\w-]+==[\w.]+ --hash=sha256:[0-9a-f]{64}", pin) for pin in pins)
    minors = [build.binding.minor_of(minor) for minor in build.torch_pins()]
    assert minors == [(2, minor) for minor in range(8, 8 + len(minors))] and len(minors) >= 8


def test_a_wheel_is_built_for_torches_that_are_known(build, tmp_path, monkeypatch):
    known = build.Torch(tmp_path, "2.13.0+cpu", None, True)
    monkeypatch.setattr(build, "locate", lambda package: tmp_path)
    monkeypatch.setattr(build.binding, "read_torch", lambda folder: known)
    monkeypatch.setattr(build, "fetch_torch", lambda requirement, name: requirement.split()[0])
    assert build.find_torches({}) == [known]
    assert build.find_torches({"VOXMMA_WHEEL": "2.8 2.13"}) == [
        "torch==2.8.0",
        known,
    ]  # that at hand needs no fetching
    assert len(build.find_torches({"VOXMMA_WHEEL": "all"})) == len(build.torch_pins())
    with pytest.raises(
        build.BuildError, match=r"VOXMMA_WHEEL='2\.7': '2\.7' is neither the torch installed nor one of 2\.8"
    ):
        build.find_torches({"VOXMMA_WHEEL": "2.7"})


def test_without_a_torch_only_an_isolated_build_fetches_headers(build, monkeypatch):
    monkeypatch.setattr(build, "locate", lambda package: None)
    monkeypatch.setattr(build, "fetch_torch", lambda requirement, name: requirement)
    monkeypatch.delitem(sys.modules, "setuptools.build_meta", raising=False)
    with pytest.raises(build.BuildError, match="torch is not installed"):
        build.find_torches({})
    monkeypatch.setitem(sys.modules, "setuptools.build_meta", build)
    assert build.find_torches({}) == ["torch>=2.8"]


# ---- files -------------------------------------------------------------------------------------------------


def test_every_cuda_source_is_built(build):
    """A source that CMakeLists.txt does not name is never compiled, and nobody is told."""
    text = (ROOT / "CMakeLists.txt").read_text()
    sources = {p for p in (ROOT / "csrc").rglob("*") if p.suffix in {".cu", ".cpp"}}
    binding = set(build.binding.sources(ROOT / "csrc", cuda=True))
    named = [p.relative_to(ROOT).as_posix() for p in sources - binding]
    assert named and [n for n in named if n not in text] == []
    assert binding == {p for p in sources if (ROOT / "csrc" / "torch") in p.parents}
    assert binding - set(build.binding.sources(ROOT / "csrc", cuda=False)) == set(
        (ROOT / "csrc/torch/cuda").glob("*.cpp")
    )


def test_an_object_is_compiled_again_only_when_needed(build, tmp_path, monkeypatch):
    runs: list[str] = []
    folder = tmp_path / "a folder"  # a space, as make's rules write it
    folder.mkdir()
    source, header, target = folder / "x.cpp", folder / "x.h", tmp_path / "x.o"
    source.write_text("")
    header.write_text("")

    def compiler(command, check):
        runs.append(command[0])
        target.write_text("")
        names = " \\\n ".join(str(p).replace(" ", "\\ ") for p in (source, header))
        target.with_suffix(".d").write_text(f"{target}: {names}\n")

    def compiled(command="c++"):
        before = len(runs)
        build.binding.compile_object([command], source, target)
        return len(runs) > before

    def touch(path):
        later = target.stat().st_mtime + 10
        os.utime(path, (later, later))

    monkeypatch.setattr(build.binding.subprocess, "run", compiler)
    assert compiled() and not compiled()
    for path in (source, header):
        touch(path)
        assert compiled()
        os.utime(path, (0, 0))
        assert not compiled()
    assert compiled("clang++") and not compiled("clang++")
    header.unlink()
    assert compiled("clang++")


def test_an_object_that_failed_to_compile_is_compiled_again(build, tmp_path, monkeypatch):
    def compiler(command, check):
        raise subprocess.CalledProcessError(1, command)

    target = tmp_path / "x.o"
    for suffix in (".o", ".d"):
        target.with_suffix(suffix).write_text("")
    monkeypatch.setattr(build.binding.subprocess, "run", compiler)
    for _ in range(2):
        with pytest.raises(subprocess.CalledProcessError):
            build.binding.compile_object(["c++"], tmp_path / "x.cpp", target)


def test_build_id_follows_sources_architectures_and_compiler(build, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "ROOT", tmp_path)
    source = tmp_path / "csrc" / "conv" / "kernel.cu"
    source.parent.mkdir(parents=True)
    source.write_text("a")
    ids = [build.build_id(["8.0"], "13.0"), build.build_id(["9.0a"], "13.0"), build.build_id(["8.0"], "12.6")]
    source.write_text("b")
    ids.append(build.build_id(["8.0"], "13.0"))
    assert len(set(ids)) == 4 and build.build_id(["8.0"], "13.0") == ids[-1]
