"""torch's default device and dtype are the user's: nothing the library computes depends on them."""

from __future__ import annotations

import ast
import copy
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import voxmma
from voxmma import nn as vnn
from voxmma.dispatch.selection import card
from voxmma.export import artefact as export
from voxmma.export import mapped
from voxmma.nn import functional as F
from voxmma.ops import rescale
from voxmma.ops.kernels import compiled
from voxmma.precision import policy
from voxmma.tools import demo, doctor, speedbench
from voxmma.tuning import gate, machine, tuner
from voxmma.verify import accuracy, families, shadow, trials

from conftest import random_coords

DEFAULTS: dict[str, tuple[str | None, torch.dtype]] = {
    "meta": ("meta", torch.float32),
    "fp64": (None, torch.float64),
    "fp16": (None, torch.float16),
    "meta fp64": ("meta", torch.float64),
    "cpu": ("cpu", torch.float32),
    "cuda": ("cuda", torch.float32),
}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.gpu if name == "cuda" else ()) for name in DEFAULTS]
)
def defaults(request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """A function that sets a default device and dtype, which hold until the test's end."""
    device, dtype = DEFAULTS[request.param]

    def apply() -> None:
        torch.set_default_device(device)
        torch.set_default_dtype(dtype)

    yield apply
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


class Net(torch.nn.Module):
    """Every kind of layer once."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = vnn.SparseConv3d(4, 8, 3)
        self.norms = torch.nn.Sequential(vnn.BatchNorm(8), vnn.GroupNorm(2, 8), vnn.ReLU())
        self.down = vnn.SparseConv3d(8, 8, 2, stride=2)
        self.up = vnn.SparseConvTranspose3d(8, 4, 2, stride=2)
        self.pool, self.head = vnn.GlobalMaxPool(), torch.nn.Linear(4, 3)

    def forward(self, x: voxmma.Voxels) -> tuple[voxmma.Voxels, torch.Tensor]:
        z = self.up(self.down(self.norms(self.wide(x))))
        return z, self.head(self.pool(z))


class Data:
    """Tensors and modules made before the defaults change; coordinate sets are made anew by every call."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.coords = random_coords(120, 6, 2).to(device)
        self.other = random_coords(100, 7, 2, seed=1).to(device)
        self.feats = torch.randn(120, 4, device=device)
        self.points = [5 * torch.rand(40, 3, device=device), 5 * torch.rand(30, 3, device=device)]
        self.colours = [torch.rand(40, 2, device=device), torch.rand(30, 2, device=device)]
        self.net = Net().to(device)
        self.dense = torch.randn(2, 3, 4, 4, 4, device=device)

    @property
    def x(self) -> voxmma.Voxels:
        return voxmma.Voxels(self.coords, self.feats, batch_size=2)

    @property
    def y(self) -> voxmma.Voxels:
        return voxmma.Voxels(self.other, self.feats[:100], batch_size=2)

    def step(self, net: Callable[..., Any] | None = None) -> list[Any]:
        """A training step of the network, and its gradients."""
        net = net or copy.deepcopy(self.net)
        feats = self.feats.clone().requires_grad_()
        z, out = net(voxmma.Voxels(self.coords, feats, batch_size=2))
        (grad,) = torch.autograd.grad(z.feats.sum() + out.square().sum(), feats)
        return [z, out, grad]


def _pools(d: Data) -> list[Any]:
    top, where = F.max_pool_with_indices(d.x, 3, 2)
    return [
        *(pool(d.x, 2) for pool in (F.max_pool, F.min_pool, F.sum_pool, F.avg_pool)),
        *(top, F.max_unpool(top, where), where.rows(), F.unpool(top, 2, generative=True)),
        *(pool(d.x) for pool in (F.global_max_pool, F.global_avg_pool, F.global_sum_pool)),
    ]


def _convolutions(d: Data) -> list[Any]:
    weight = d.feats[:108].reshape(27, 4, 4)
    found: list[Any] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        x = d.x.to(dtype)
        found += [F.spatially_sparse_conv(x, weight.to(dtype), 3)]
        found += [F.spatially_sparse_conv(x, weight.to(dtype), 3, stride=2, generative=True)]
    found.append(F.spatially_sparse_conv(d.x.half(), weight.half(), 3, accumulator="fp16_promoted:32"))
    with voxmma.settings.override(fp16_rescale=True):
        found.append(F.spatially_sparse_conv(d.x.half(), weight.half(), 3, accumulator="fp16"))
    mapping = voxmma.kernel_map(d.x, 3)
    return [*found, mapping.counts, mapping.neighbor_table(), mapping.num_pairs]


def _points(d: Data) -> list[Any]:
    made = [
        voxmma.Voxels.from_points(d.points, d.colours, voxel_size=0.4, reduce=how)
        for how in ("mean", "sum", "max", "min", "first")
    ]
    joined = torch.cat(d.points)
    batch = torch.tensor([0] * 40 + [1] * 30, device=d.device)
    asked = [
        voxmma.devoxelise(made[0], joined, voxel_size=0.4, batch_index=batch, mode=mode)
        for mode in ("trilinear", "nearest")
    ]
    return [*made, *asked]


def _sets(d: Data) -> list[Any]:
    twice = torch.cat([d.coords, d.coords[:7]])
    parts = voxmma.unbatch(d.x)
    return [
        *(voxmma.union(d.x, d.y).coords, voxmma.intersection(d.x, d.y).coords),
        *(voxmma.lookup(d.x, d.other), voxmma.downsample(d.x, 3).coords, F.add_union(d.x, d.y)),
        *(voxmma.crop(d.x, 1, 5), voxmma.prune(d.x, d.feats[:, 0] > 0)),
        voxmma.Voxels(twice, torch.cat([d.feats, d.feats[:7]]), batch_size=2, duplicates="mean"),
        *(*parts, voxmma.batch(parts), voxmma.collate(parts), d.x.counts),
        *(d.x.dense(), *voxmma.to_dense(d.x), voxmma.from_dense(d.dense), d.x.to(d.device)),
    ]


def _shadow(d: Data) -> list[Any]:
    net = copy.deepcopy(d.net)
    watch = shadow.verify(net, every=1, rows=16)
    made = d.step(net)
    watch.remove()
    return [*made, sum(watch.checked.values()), len(watch.breaches)]


def _overflow(d: Data) -> list[Any]:
    weight = d.feats[:108].reshape(27, 4, 4)
    found = rescale.fp16_operands(d.feats.bfloat16(), weight)
    net = copy.deepcopy(d.net).half()
    guard = voxmma.OverflowGuard(d.device)
    with guard:
        net(d.x.half())
    return [rescale.overflow_bound(d.feats.half(), weight), found.restore(found.a.float()), guard.read()]


def _accuracy(d: Data) -> list[Any]:
    generator = torch.Generator(d.device).manual_seed(0)
    drawn = [
        made((60, 8), torch.float16, generator, d.device)
        for family in families.FAMILIES.values()
        for made in (family.activations, family.gradients)
    ]
    pairs = voxmma.kernel_map(d.x, 3).pairs()
    weight = d.feats[:108].reshape(27, 4, 4)
    y64, abs64 = accuracy.reference_conv(d.feats, weight, pairs, 120)
    return [*drawn, y64, abs64, asdict(accuracy.errors(d.feats, y64, abs64))]


def _sweep(d: Data) -> list[Any]:
    where = trials.site(trials.scene(d.device, 200), 3)
    given = trials.draw("fprop", "signed", torch.float16, 16, where)
    return [given.x, given.weight, given.dy, given.y64, given.abs64]


def _calibrated(d: Data) -> list[Any]:
    net = copy.deepcopy(d.net).half()
    plan = voxmma.calibrate(net, [d.x.half()], 1e-2, repeats=1)
    return [sorted(plan["layers"])]


def _policies(d: Data) -> list[Any]:
    net = copy.deepcopy(d.net).eval()
    applied = policy.apply_policy(net, "auto_mixed")
    with torch.no_grad():
        found = [*net(d.x)]
    applied.revert()
    return found


def _mapped(d: Data) -> list[Any]:
    (given,) = mapped.with_maps(copy.deepcopy(d.net), (d.x,))
    return [*d.net(given)]


def _frozen(d: Data) -> list[Any]:
    artefact = export.compile_model(copy.deepcopy(d.net).eval(), (d.x,), "auto_mixed")
    with tempfile.TemporaryDirectory() as folder:
        artefact.save(Path(folder) / "net.pt2")
        loaded = export.load(Path(folder) / "net.pt2")
    return [*loaded(d.x), *artefact(d.x), artefact.metadata["tolerance"]]


def _checks(d: Data) -> list[Any]:
    return [doctor._check_convolution(d.device).status, sorted(machine.fp32_behaviour(d.device))]


#: "meta fp64" sets both defaults to what no tensor here has; "fp16" has another dtype again.
MARKS = {"meta": pytest.mark.slow, "fp64": pytest.mark.slow, "cpu": pytest.mark.slow, "cuda": pytest.mark.gpu}
MARKED = [pytest.param(name, marks=MARKS.get(name, ())) for name in DEFAULTS]

CALLS: dict[str, Callable[[Data], list[Any]]] = {
    "network": Data.step,
    "convolutions": _convolutions,
    "pools": _pools,
    "points": _points,
    "sets": _sets,
    "instance norm": lambda d: [F.instance_norm(d.x), F.group_norm(d.x, 2), F.rms_norm(d.x, (4,))],
    "shadow": _shadow,
    "overflow": _overflow,
    "accuracy": _accuracy,
    "sweep": _sweep,
    "calibrate": _calibrated,
    "policy": _policies,
    "maps": _mapped,
    "artefact": _frozen,
    "checks": _checks,
}


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return (a.dtype, a.device) == (b.dtype, b.device) and torch.equal(a, b)
    return bool(a == b)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "artefact")) for name in CALLS]
)
@pytest.mark.parametrize("defaults", MARKED, indirect=True)
def test_fault_58_default_device_and_dtype_change_nothing(
    device: torch.device, name: str, defaults: Callable[[], None]
) -> None:
    data = Data(device)
    state = torch.get_rng_state()
    expected = tree_leaves(CALLS[name](data))
    torch.set_rng_state(state)
    defaults()
    found = tree_leaves(CALLS[name](data))
    assert len(found) == len(expected) > 0
    for one, other in zip(expected, found, strict=True):
        assert _same(one, other)


@pytest.mark.parametrize("defaults", MARKED, indirect=True)
def test_fault_58_programs_run_under_any_default(device: torch.device, defaults: Callable[[], None]) -> None:
    """The demonstration and the speed benchmark, which make networks of their own."""
    defaults()
    shown = demo.run([device], voxel_size=1.0, repeats=1)
    assert {row["device"] for row in shown["rows"]} == {device.type}
    config = speedbench.load(
        f"{{scale: small, device: {device.type}, rounds: 2, steps: 1, warmup: 1, variants: {{c: {{}}}}, "
        "workloads: [mlp, transformer, classifier, sparse_unet]}"
    )
    rows = speedbench.run(config)["rows"]
    assert len(rows) == 4 * 2 and not [row for row in rows if row.get("error")]


@pytest.mark.gpu
def test_fault_58_gate_and_tuner_run_under_any_default(tmp_path: Path, defaults: Callable[[], None]) -> None:
    device = torch.device("cuda", 0)
    data = Data(device)
    defaults()
    with voxmma.settings.override(cache_dir=str(tmp_path)):
        tile = next(t for t in compiled() if t.accum == "fp16" and t.runs_on(card(device)))
        assert gate.measure(tile, data.x.half(), repeats=1).checks
        assert tuner.tune(copy.deepcopy(data.net).half(), data.x.half(), repeats=2)


# ---- every call that makes a tensor says where and of what type ------------------------------------------

#: Functions that ask torch for a device.
_PLACED = {
    "empty",
    "empty_strided",
    "zeros",
    "ones",
    "full",
    "eye",
    "arange",
    "linspace",
    "logspace",
    "rand",
    "randn",
    "randint",
    "randperm",
    "tensor",
    "as_tensor",
    "asarray",
    "scalar_tensor",
    "tril_indices",
    "triu_indices",
    "sparse_coo_tensor",
}
#: Those of them whose type may be torch's default one. Integers are what this package gives the others.
_TYPED = _PLACED - {"arange", "randint", "randperm", "tril_indices", "triu_indices"}


def unsaid(source: str) -> list[tuple[int, str]]:
    """Line and call of everything in `source` that leaves a device or a type to torch's defaults."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        name, said = node.func.attr, {keyword.arg for keyword in node.keywords}
        wanted = ({"device"} if name in _PLACED else set()) | ({"dtype"} if name in _TYPED else set())
        branches = node.args[1:] if name == "where" else []
        two_numbers = len(branches) == 2 and all(isinstance(b, ast.Constant | ast.UnaryOp) for b in branches)
        if wanted - said or two_numbers:
            found.append((node.lineno, ast.unparse(node)))
    return found


def test_fault_58_every_tensor_has_a_device_and_a_type() -> None:
    package = Path(voxmma.__file__).parent
    found = {str(p.relative_to(package)): unsaid(p.read_text()) for p in package.rglob("*.py")}
    assert len(found) > 40
    assert {name: calls for name, calls in found.items() if calls} == {}


def test_the_check_finds_what_it_is_for() -> None:
    """Otherwise the test above could not fail."""
    said = "torch.zeros(3, dtype=torch.int64, device=d); torch.arange(4, device=d); torch.where(m, x, 0)"
    assert unsaid(said) == []
    for line in ("torch.zeros(3, device=d)", "torch.arange(3)", "torch.where(m, -1.0, 1.0)"):
        assert unsaid(f"x = 1\n{line}") == [(2, line)]
