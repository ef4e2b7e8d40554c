"""Frozen exports: what they compute, that the process does not matter to them, and what they refuse."""

from __future__ import annotations

import copy
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from typer.testing import CliRunner

import voxmma
from voxmma import torchflags
from voxmma.export import aot, frozen, mapped
from voxmma.export import artefact as artefact_module
from voxmma.export.artefact import compile_model, load
from voxmma.export.frozen import ArtefactError
from voxmma.ops.formats import round_tf32
from voxmma.precision.policy import ComputeSpec, PolicyError, Precision, PrecisionPolicy
from voxmma.tools import compile as export
from voxmma.tools.cli import app
from voxmma.tools.speedbench import SparseUNet

from conftest import random_coords

TF32 = PrecisionPolicy.custom({"Compute": "tf32"})
HALF_SUM, PROMOTED, RESCALED = (
    PrecisionPolicy.auto_mixed.with_compute(spec)
    for spec in (
        ComputeSpec(Precision.F16, Precision.F16),
        ComputeSpec(Precision.F16, Precision.F16, chunk=32),
        ComputeSpec(Precision.BF16, Precision.F16, rescale=True),
    )
)


class Net(nn.Module):
    """Convolution, transposed convolution, attention, matmul and linear."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 16, 3, 2, 1), nn.ConvTranspose2d(16, 16, 2, 2)
        self.norm, self.head = nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.up(self.down(x)))).flatten(2).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(y, y, y)
        y = y + 0.1 * (y @ y.transpose(1, 2) @ y) / y.shape[1]
        out: torch.Tensor = self.head(y.mean(1))
        return out


class SparseNet(nn.Module):
    """Two sparse layers on coordinates the module holds."""

    def __init__(self) -> None:
        super().__init__()
        self.voxels = voxmma.Voxels(random_coords(90, 6), torch.zeros(90, 8))
        self.first, self.second = voxmma.nn.SparseConv3d(8, 16, 3), voxmma.nn.SparseConv3d(16, 4, 3)

    def forward(self, feats: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(self.voxels.with_feats(feats))).feats


def net() -> tuple[nn.Module, torch.Tensor]:
    return Net().eval(), torch.randn(2, 3, 8, 8)


def error(found: torch.Tensor, model: nn.Module, x: torch.Tensor) -> float:
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    return float((found.double() - exact).norm() / exact.norm())


@settings(deadline=None, max_examples=200)
@given(st.floats(-(2.0**120), 2.0**120, width=32, allow_subnormal=False))
def test_rounding_to_tf32(value: float) -> None:
    x = torch.tensor([value])
    rounded = round_tf32(x)
    assert int(rounded.view(torch.int32)) & 0x1FFF == 0
    assert abs(float(rounded) - value) <= 2.0**-11 * abs(value)
    assert torch.equal(round_tf32(rounded), rounded)
    assert torch.equal(round_tf32(-x), -rounded)


def test_rounding_to_tf32_at_the_edges() -> None:
    tie = torch.tensor([1.0 + 2.0**-11, 1.0 + 2.0**-11 - 2.0**-23])
    assert round_tf32(tie).tolist() == [1.0 + 2.0**-10, 1.0]
    odd = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0])
    assert torch.equal(round_tf32(odd).nan_to_num(7.0), odd.nan_to_num(7.0))


def test_frozen_operators_obey_the_dispatcher() -> None:
    ops, x = torch.ops.voxmma, torch.randn(2, 3, 4, 4)
    a, b = torch.randn(5, 4), torch.randn(6, 4)
    for op, args in (
        (ops.frozen_linear.default, (a, b, torch.randn(6), "tf32")),
        (ops.frozen_matmul.default, (a, b.t(), "ieee")),
        (
            ops.frozen_convolution.default,
            (x, torch.randn(3, 2, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1, "tf32"),
        ),
        (ops.frozen_attention.default, (x, x, x, None, True, None, False, "ieee")),
    ):
        torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    with pytest.raises(ValueError, match="fp32_precision"):
        ops.frozen_matmul(a, b.t(), "bf16")
    assert torch.equal(ops.frozen_matmul(a, b.t(), "ieee"), a @ b.t())
    assert torch.equal(ops.frozen_matmul(a, b.t(), "tf32"), round_tf32(a) @ frozen.round_tf32(b.t()))


@pytest.mark.parametrize(
    ("policy", "low", "high"),
    [
        (PrecisionPolicy.always_f32, 0.0, 1e-6),
        (TF32, 1e-5, 2e-3),
        (PrecisionPolicy.auto_mixed, 1e-5, 5e-3),
        (PrecisionPolicy.auto_mixed_bf16, 1e-4, 5e-2),
    ],
)
def test_a_frozen_network_is_as_exact_as_its_policy(
    policy: PrecisionPolicy, low: float, high: float, tmp_path: Path
) -> None:
    model, x = net()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    artefact = compile_model(model, (x,), policy)
    assert low <= error(artefact(x), model, x) < high
    check = artefact.check()
    assert check.good and check.error <= check.tolerance < 1e3 * max(check.error, 1e-7)
    artefact.save(tmp_path / "net.pt2")
    again = load(tmp_path / "net.pt2")
    assert torch.equal(again(x), artefact(x))
    assert again.policy == policy and again.metadata == artefact.metadata
    assert len(again.metadata["products"]) == 6
    for product in again.metadata["products"]:
        if policy.forward.input.is_half:
            assert product["operands"] == str(policy.forward.input.dtype).removeprefix("torch.")
        else:
            assert product["fp32_precision"] == ("tf32" if policy.tf32 else "ieee")
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


def test_the_process_does_not_matter_and_is_not_touched(tmp_path: Path) -> None:
    model, x = net()
    for name, policy in (("exact", PrecisionPolicy.always_f32), ("fast", TF32)):
        compile_model(model, (x,), policy).save(tmp_path / name)
    plain = torchflags.snapshot(), voxmma.settings.snapshot()
    exact, fast = load(tmp_path / "exact"), load(tmp_path / "fast")
    assert (torchflags.snapshot(), voxmma.settings.snapshot()) == plain
    first, second = exact(x), fast(x)
    assert error(first, model, x) < 1e-6 < 1e-5 < error(second, model, x)
    for on in (True, False):
        with torchflags.preserved():
            torchflags.set_tf32(on)
            here = torchflags.snapshot()
            for _ in range(2):  # side by side
                assert torch.equal(exact(x), first) and torch.equal(fast(x), second)
            assert torch.equal(load(tmp_path / "fast")(x), second)
            assert torchflags.snapshot() == here


def test_the_accumulator_of_sparse_layers_is_frozen() -> None:
    model = SparseNet().eval()
    feats = torch.randn(90, 8)
    found = {}
    for ambient in (None, True, False):
        voxmma.set_fp16_accum(ambient)
        for policy in (PrecisionPolicy.always_f32, PrecisionPolicy.auto_mixed, HALF_SUM):
            artefact = compile_model(model, (feats,), policy)
            rows = artefact.metadata["products"]
            assert [r["accumulator"] for r in rows] == [policy.forward.accumulator_name] * 2
            out = artefact(feats)
            assert torch.equal(found.setdefault(str(policy), out), out)
        assert voxmma.settings.snapshot().fp16_accum is ambient
    errors = [error(out, model, feats) for out in found.values()]
    assert errors[0] < 1e-5 < errors[1] < errors[2] < 1e-2
    assert model.first.use_fp16_accum is None and model.first.compute_dtype is None


def test_a_float32_product_that_cannot_be_frozen_is_refused() -> None:
    class Sums(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.einsum("ij,kj->ik", x, x)

    x = torch.randn(4, 4)
    with pytest.raises(ArtefactError, match="einsum"):
        compile_model(Sums(), (x,))
    half = compile_model(Sums(), (x,), "auto_mixed")  # its operands are fp16: nothing to freeze
    assert torch.equal(half(x), (x.half() @ x.half().t()).float())
    with pytest.raises(TypeError, match="float64"):
        compile_model(nn.Linear(2, 2).double(), (torch.ones(1, 2, dtype=torch.float64),))


def test_files_that_are_not_what_they_say_are_refused(tmp_path: Path) -> None:
    model, x = net()
    artefact = compile_model(model, (x,), "auto_mixed")
    path = tmp_path / "net.pt2"
    torch.export.save(artefact.program, str(path))
    with pytest.raises(ArtefactError, match="not written by voxmma"):
        load(path)

    good = dict(artefact.metadata)
    artefact.metadata = {**good, "format": 99}
    artefact.save(path)
    with pytest.raises(ArtefactError, match="format 99"):
        load(path)
    artefact.metadata = {**good, "tolerance": good["error"] / 2}
    artefact.save(path)
    with pytest.raises(ArtefactError, match="ABOVE the tolerance"):
        load(path)
    assert not load(path, check=False).check().good

    artefact.metadata = good
    with torch.no_grad():
        next(v for k, v in artefact.program.state_dict.items() if k.endswith("head.weight")).mul_(1.03)
    artefact.save(path)
    with pytest.raises(ArtefactError, match="weights"):
        load(path)
    artefact.metadata = {**good, "weights": artefact_module._weights_hash(artefact.program.state_dict)}
    artefact.save(path)
    with pytest.raises(
        ArtefactError, match="other numbers"
    ):  # 3 % of one layer is more than the bound allows
        load(path)


@pytest.mark.gpu
def test_frozen_precision_holds_on_a_gpu_whatever_the_switches() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 below capability 8.0")
    model = nn.Linear(512, 512).cuda()
    x = torch.randn(256, 512, device="cuda")
    exact, fast = compile_model(model, (x,)), compile_model(model, (x,), TF32)
    for on in (True, False):
        with torchflags.preserved():
            torchflags.set_tf32(on)
            here = torchflags.snapshot()
            assert error(exact(x), model, x) < 2e-6 < 5e-5 < error(fast(x), model, x) < 2e-3
            assert torchflags.snapshot() == here


@pytest.mark.gpu
def test_sums_of_16_bit_products_hold_on_a_gpu_whatever_the_switches() -> None:
    if torchflags.get_flag("cuda.matmul.allow_fp16_accumulation") is None:
        pytest.skip("this PyTorch has no fp16 accumulation")
    model = nn.Linear(4096, 64).cuda()
    x = torch.rand(64, 4096, device="cuda")
    artefact = compile_model(model, (x,), "auto_mixed")
    expected = artefact(x)
    with torchflags.preserved():
        for name in torchflags.SHORT_SUMS:
            value = torchflags.get_flag(name)
            if value is not None and not name.startswith("cpu"):
                torchflags.set_flag(name, [True, *value[1:]] if isinstance(value, list) else True)
        assert torch.equal(artefact(x), expected)


def test_a_launch_holds_the_sums_of_16_bit_products_and_puts_the_switches_back() -> None:
    names = [name for name in torchflags.SHORT_SUMS if not name.startswith("cpu")]  # not every CPU has it

    def state() -> list[Any]:
        return [torchflags.get_flag(name) for name in names]

    with torchflags.preserved():
        for name in names:
            value = torchflags.get_flag(name)
            if value is not None:
                torchflags.set_flag(name, [True, *value[1:]] if isinstance(value, list) else True)
        before = state()
        with pytest.raises(ZeroDivisionError), torchflags.pinned("ieee", "cuda", dict.fromkeys(names, False)):
            held = [value[0] if isinstance(value, list) else value for value in state()]
            assert not any(held) and before != state()
            raise ZeroDivisionError
        assert state() == before


# ---------------------------------------------------------------- Voxels
def voxels(n: int, seed: int = 0, device: torch.device | str = "cpu") -> voxmma.Voxels:
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randn(n, 4, generator=generator)
    return voxmma.Voxels(random_coords(n, 12, batch=2, seed=seed), feats, batch_size=2).to(device)


def exact_logits(model: nn.Module, x: voxmma.Voxels) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = copy.deepcopy(model).double()(x.double())
    return out


def far(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(
    ("policy", "accumulator", "bound"),
    [
        (PrecisionPolicy.always_f32, "fp32", 2e-6),
        pytest.param(HALF_SUM, "fp16", 1e-2, marks=pytest.mark.slow),
        pytest.param(PrecisionPolicy.auto_mixed, "fp32", 3e-3, marks=pytest.mark.slow),
        pytest.param(PrecisionPolicy.auto_mixed_bf16, "fp32", 3e-2, marks=pytest.mark.slow),
        pytest.param(PROMOTED, "fp16_promoted", 3e-3, marks=pytest.mark.slow),
        pytest.param(RESCALED, "fp16", 3e-2, marks=pytest.mark.slow),
        pytest.param(TF32, "fp32", 3e-3, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_a_u_net_takes_voxels_of_any_coordinates(
    policy: PrecisionPolicy, accumulator: str, bound: float, device: torch.device, tmp_path: Path
) -> None:
    model = SparseUNet(4, 16, 5).to(device).eval()
    compile_model(model, (voxels(400, 1, device),), policy).save(tmp_path / "net.pt2")
    artefact = load(tmp_path / "net.pt2")
    rows = [row for row in artefact.metadata["products"] if "tile" in row]
    assert len(rows) == 9 and {row["accumulator"] for row in rows} == {accumulator}
    for n in (1, 2, 70, 1500):
        x = voxels(n, n, device)
        found = artefact(x)
        assert found.shape == (n, 5) and far(found, exact_logits(model, x)) < bound
        assert torch.equal(artefact(x), found)
    assert artefact(voxels(0, 0, device)).shape == (0, 5)
    assert not torch.equal(artefact(voxels(70, 3, device)), artefact(voxels(70, 70, device)))


class Levels(nn.Module):
    """Voxels of two levels, and a number for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = voxmma.nn.InstanceNorm(4)
        self.down = voxmma.nn.SparseConv3d(4, 8, 3, stride=2)
        self.pool, self.average = voxmma.nn.SparseMaxPool3d(2, 2), voxmma.nn.SparseAvgPool3d(3, 1)
        self.mean, self.most = voxmma.nn.GlobalAvgPool(), voxmma.nn.GlobalMaxPool()

    def forward(self, both: dict[str, Any]) -> Any:
        fine = self.norm(both["x"])
        coarse = self.average(self.down(fine))
        samples = self.mean(coarse) + self.most(coarse)
        return {"fine": fine, "coarse": coarse, "pooled": self.pool(fine)}, samples * both["factor"]


def test_structures_of_voxels_and_tensors_come_back_on_their_coordinates(device: torch.device) -> None:
    model = Levels().to(device).eval()
    ones = torch.ones(2, 1, device=device)
    artefact = compile_model(model, ({"x": voxels(300, 0, device), "factor": ones},))
    for n in (9, 300, 900):
        x = voxels(n, n, device)
        inputs = {"x": x, "factor": 3 * ones}
        with torch.no_grad():
            expected, samples = model(inputs)
        levels, found = artefact(inputs)
        for name in ("fine", "coarse", "pooled"):
            assert levels[name].coord_set is expected[name].coord_set
            assert levels[name].stride == expected[name].stride
            torch.testing.assert_close(levels[name].feats, expected[name].feats)
        torch.testing.assert_close(found, samples)
    for bad, error, message in (
        (({"x": torch.ones(3, 4), "factor": ones},), TypeError, "got .*x.*tensor"),
        ((voxels(9), voxels(9)), TypeError, "Voxels"),
        (({"x": voxmma.Voxels(random_coords(9, 4), torch.ones(9, 4)), "factor": ones},),
         ValueError, "batch_size 1"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            artefact(*bad)


def test_networks_whose_graph_depends_on_the_coordinates_are_refused() -> None:
    class Branch(nn.Module):
        def forward(self, x: voxmma.Voxels) -> torch.Tensor:
            return x.feats * (2.0 if x.num_voxels > 100 else 3.0)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = voxmma.nn.SparseConv3d(4, 4, 3)
            self.target = voxels(20, 5)

        def forward(self, x: voxmma.Voxels) -> torch.Tensor:
            return self.layer(x, coords=self.target).feats

    for model, error, message in (
        (Branch(), ArtefactError, "how many voxels"),
        (Other(), ValueError, "not made by strided"),
    ):
        with pytest.raises(error, match=message):
            compile_model(model, (voxels(200),))
    pair = nn.Module()
    x = voxels(50)
    with pytest.raises(ValueError, match="share their coordinates"):
        mapped.with_maps(pair, (x, x.half()))
    coarse = voxmma.nn.SparseConv3d(4, 4, 2, stride=2)(x)
    with pytest.raises(ValueError, match="made by a strided layer"):
        mapped.with_maps(pair, (coarse,))


def test_torch_export_takes_voxels_with_their_maps(device: torch.device) -> None:
    model = SparseUNet(4, 8, 5).to(device).eval()
    with torch.no_grad():
        inputs = mapped.with_maps(model, (voxels(300, 0, device),))
        program = mapped.export_program(model, inputs)
        for n in (2, 300, 900):
            x = voxels(n, n, device)
            with torch.enable_grad():  # layer by layer, as the graph
                expected = model(x)
            assert torch.equal(program.module()(inputs[0].layout(x)), expected)
    layout = inputs[0].layout
    assert mapped.Layout.from_json(json.loads(json.dumps(layout.to_json()))) == layout


# ---------------------------------------------------------------- machine code
class Small(nn.Module):
    """Products of every kind that goes through a package."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = voxmma.nn.SparseConv3d(4, 16, 3), nn.Linear(16, 5)

    def forward(self, x: voxmma.Voxels) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.relu(self.conv(x).feats))
        return out


@pytest.mark.slow
def test_two_packages_with_other_policies_in_one_process(device: torch.device, tmp_path: Path) -> None:
    model = Small().to(device).eval()
    for name, policy in (("exact", PrecisionPolicy.always_f32), ("short", HALF_SUM)):
        artefact = compile_model(model, (voxels(300, 0, device),), policy, aot=None)
        if artefact.engine != "aot":
            pytest.skip(f"AOTInductor does not work here: {artefact.reason}")
        artefact.save(tmp_path / name)
    before = torchflags.snapshot(), voxmma.settings.snapshot()
    unvouched = load(tmp_path / "exact")
    assert unvouched.engine == "export" and "trust_code" in unvouched.reason
    exact, short = (load(tmp_path / name, trust_code=True) for name in ("exact", "short"))
    assert (torchflags.snapshot(), voxmma.settings.snapshot()) == before
    for n in (40, 300, 800):
        x = voxels(n, n, device)
        for _ in range(2):  # side by side
            assert far(exact(x), exact_logits(model, x)) < 1e-6
            assert 1e-5 < far(short(x), exact_logits(model, x)) < 5e-3
    assert (torchflags.snapshot(), voxmma.settings.snapshot()) == before
    graph = load(tmp_path / "exact", engine="export")
    assert (exact.engine, graph.engine, graph.reason) == ("aot", "export", "asked for the graph")
    torch.testing.assert_close(graph(x), exact(x), rtol=1e-5, atol=1e-6)

    exact.metadata["aot"]["machine"]["pytorch"] = "one"
    exact.save(tmp_path / "foreign")
    foreign = load(tmp_path / "foreign", trust_code=True)
    assert foreign.engine == "export" and foreign.reason.startswith("made for pytorch one, here ")
    with pytest.raises(ArtefactError, match="made for pytorch one"):
        load(tmp_path / "foreign", engine="aot", trust_code=True)


@pytest.mark.slow
def test_a_package_is_loaded_by_another_process_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "junk.pt2").write_bytes(b"no archive")
    assert aot._not_loadable(tmp_path / "junk.pt2").startswith("it cannot be loaded: ")
    crashed = subprocess.CompletedProcess([], -11, "", "Segmentation fault")
    monkeypatch.setattr(aot.subprocess, "run", lambda *args, **kwargs: crashed)
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda program, package_path: Path(package_path).write_bytes(b"package"),
    )
    model, x = net()
    artefact = compile_model(model, (x,), aot=None)
    assert (artefact.engine, artefact.reason) == ("export", "a process that loads it ends by signal 11")


@pytest.mark.parametrize("fault", ["does not run", "numbers are off"])
def test_a_package_that_does_not_work_is_left_out(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*tensors: torch.Tensor) -> list[torch.Tensor]:
        if fault == "does not run":
            raise RuntimeError("API call failed\nmore")
        return [torch.zeros(2, 5)]

    monkeypatch.setattr(aot, "build", lambda program: (b"package", ""))
    monkeypatch.setattr(aot, "load", lambda package: run)
    model, x = net()
    artefact = compile_model(model, (x,), aot=None)
    assert artefact.engine == "export" and fault in artefact.reason
    assert error(artefact(x), model, x) < 1e-6
    with pytest.raises(ArtefactError, match=fault):
        compile_model(model, (x,), aot=True)


def test_without_a_toolchain_the_graph_runs_and_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def none(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no C++ compiler\nmore")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", none)
    model, x = net()
    artefact = compile_model(model, (x,), aot=None)
    assert (artefact.engine, artefact.reason) == ("export", "RuntimeError: no C++ compiler")
    artefact.save(tmp_path / "net.pt2")
    again = load(tmp_path / "net.pt2")
    assert again.reason == artefact.reason and torch.equal(again(x), artefact(x))
    with pytest.raises(ArtefactError, match="cannot compile this here"):
        compile_model(model, (x,), aot=True)
    with pytest.raises(ArtefactError, match="no compiled package"):
        load(tmp_path / "net.pt2", engine="aot", trust_code=True)
    with pytest.raises(ValueError, match="trust_code"):
        load(tmp_path / "net.pt2", engine="aot")
    with pytest.raises(ValueError, match="engine"):
        load(tmp_path / "net.pt2", engine="fast")
    (tmp_path / "model.py").write_text(MODEL)
    for flags, code in (([], 0), (["--no-aot"], 0), (["--aot"], 1)):
        where = [f"{tmp_path / 'model.py'}:small", "-o", str(tmp_path / "a.pt2")]
        done = CliRunner().invoke(app, ["compile", *where, *flags])
        assert done.exit_code == code
        assert ("not asked for" if flags == ["--no-aot"] else "no C++ compiler") in done.output


# ---------------------------------------------------------------- the command
MODEL = """
import torch
def small():
    torch.manual_seed(0)
    layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 4)
    return torch.nn.Sequential(*layers), (torch.randn(8, 16),)
def wrong():
    return 3
"""


def test_the_command(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    where, runner = f"{tmp_path / 'model.py'}:small", CliRunner()

    def run(*flags: str) -> Any:
        return runner.invoke(app, ["compile", where, "-o", str(tmp_path / "a.pt2"), "--no-aot", *flags])

    # torch.export writes cudnn's TF32 flag, which ends its unwritable first state: that is not ours to keep
    torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),)).run_decompositions()
    with torchflags.preserved():
        torchflags.set_tf32(True)  # whatever the process does, the default is no
        plain = run("--json")
    assert plain.exit_code == 0, plain.output
    assert json.loads(plain.stdout)["tf32"] is False
    exact = load(tmp_path / "a.pt2")
    assert run("--tf32").exit_code == 0
    fast = load(tmp_path / "a.pt2")
    x = torch.randn(8, 16)
    assert 1e-5 < float((exact(x) - fast(x)).norm() / exact(x).norm()) < 1e-2
    both = run("--policy", "auto_mixed", "--fp16-accum")
    assert both.exit_code == 0 and load(tmp_path / "a.pt2").metadata["fp16_accum"] is True
    refusals = ((("--fp16-accum",), "need an fp32 accumulator"), (("--policy", "mixed"), "unknown policy"))
    for flags, message in refusals:
        refused = run(*flags)
        assert refused.exit_code == 2 and message in refused.output
    for bad in (f"{tmp_path / 'model.py'}:wrong", f"{tmp_path / 'model.py'}:none", "nowhere.py:small"):
        assert runner.invoke(app, ["compile", bad, "-o", str(tmp_path / "b.pt2")]).exit_code == 2


def test_flags_make_a_policy_or_an_error() -> None:
    assert export.choose_policy("always_f32", True, False) == TF32
    assert export.choose_policy("auto_mixed", False, True) == HALF_SUM
    with pytest.raises(PolicyError):
        export.choose_policy("always_f32", True, True)
