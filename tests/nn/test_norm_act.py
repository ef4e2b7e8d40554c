"""Batch norm in training with the sum and activation behind it: values, gradients of two orders, statistics,
repeats; alone and where containers use it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import voxmma
from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.models.blocks import ResidualBlock
from voxmma.nn import functional as vF
from voxmma.nn.modules import fusing

from conftest import random_coords

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ACTIVATIONS = {
    "none": lambda v: v,
    "relu": F.relu,
    "leaky_relu": lambda v: F.leaky_relu(v, 0.2),
    "silu": F.silu,
    "gelu": F.gelu,
}
#: rows and channels: two rows, one CTA, several, unaligned channels, more channels than a CTA has threads for
SIZES = ((2, 8), (3, 5), (300, 16), (5000, 24), (4100, 33), (700, 512), (60000, 64))


def sizes(device: torch.device) -> tuple[tuple[int, int], ...]:
    return SIZES if device.type == "cuda" else SIZES[:3]


class Case:
    def __init__(
        self, device: torch.device, n: int, channels: int, dtype: torch.dtype, residual: bool
    ) -> None:
        g = torch.Generator().manual_seed(n + channels)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=g, dtype=torch.float64)

        wide = torch.promote_types(dtype, torch.float32)
        self.x = (draw(n, channels) * 2 + 3 * draw(channels)).to(device, dtype)
        self.weight, self.bias = draw(channels).to(device, wide), draw(channels).to(device, wide)
        self.residual = draw(n, channels).to(device, dtype) if residual else None
        self.dy = draw(n, channels).to(device, dtype)

    def leaves(self, dtype: torch.dtype | None = None) -> list[Tensor | None]:
        made = [self.x, self.weight, self.bias, self.residual]
        return [None if t is None else t.detach().to(dtype or t.dtype).clone().requires_grad_() for t in made]


def run(case: Case, act: str, dtype: torch.dtype | None = None) -> tuple[Tensor, list[Tensor]]:
    x, weight, bias, residual = case.leaves(dtype)
    if dtype is None:
        y = vF.norm_act(x, None, None, weight, bias, residual=residual, activation=act, slope=0.2)
    else:
        y = F.batch_norm(x, None, None, weight, bias, True)
        y = ACTIVATIONS[act](y if residual is None else y + residual)
    y.backward(case.dy.to(y.dtype))
    return y.detach(), [t.grad for t in (x, weight, bias, residual) if t is not None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_values_and_gradients(device: torch.device, dtype: torch.dtype, act: str, residual: bool) -> None:
    for n, channels in sizes(device):
        case = Case(device, n, channels, dtype, residual)
        y, gradients = run(case, act)
        again, repeated = run(case, act)
        assert torch.equal(y, again)
        assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))
        exact, expected = run(case, act, torch.float64)
        eps = torch.finfo(dtype).eps
        scale = float(exact.abs().max()) + 4
        assert (y.double() - exact).abs().max() <= 4 * eps * scale, (n, channels)
        # Where a relu decides, a value on the edge may fall on either side: of half types a few, of others as
        # many as lie within the rounding of a norm.
        on_edge = 2e-2
        if eps < 1e-4:
            before, _ = run(case, "none", torch.float64)
            on_edge = 2 * float((before.abs() <= eps * scale).double().mean()) ** 0.5
        for got, right, name in zip(gradients, expected, ("x", "weight", "bias", "residual"), strict=False):
            assert got.dtype == getattr(case, name).dtype and got.shape == right.shape
            if n == 2:
                continue  # x - mean is +- the same: gradients are differences of equal numbers
            error = (got.double() - right).norm() / (right.norm() + 1e-9)
            assert error <= 40 * eps + (on_edge if act in ("relu", "leaky_relu") else 0.0), (name, n)


def test_statistics(device: torch.device) -> None:
    """Running ones as torch's, of channels far from zero, constant ones, and with an outlier, too."""
    for n, channels in sizes(device):
        x = torch.randn((n, channels), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        x[:, 0] += 1000
        x[:, 1] = 3
        x[0, 2] += 1e5
        x = x.float().to(device)
        mean, var = torch.zeros(channels, device=device), torch.ones(channels, device=device)
        exact_mean, exact_var = mean.double(), var.double()
        y = vF.norm_act(x, mean, var, momentum=0.25, activation="relu")
        exact = F.batch_norm(x.double(), exact_mean, exact_var, training=True, momentum=0.25).relu()
        assert torch.allclose(mean.double(), exact_mean, rtol=1e-6, atol=1e-6)
        assert torch.allclose(var.double(), exact_var, rtol=1e-4 if n > 2 else 1e-2, atol=1e-6)
        keep = torch.arange(channels, device=device) != 1
        assert (y.double() - exact)[:, keep].abs().max() <= 2e-3
        assert (y[:, 1].abs() <= 1e-3).all()


def test_second_gradients(device: torch.device) -> None:
    for act in ("none", "silu", "gelu", "relu"):
        for residual in (False, True):
            case = Case(device, 12, 6, torch.float64, residual)
            leaves = [t for t in case.leaves() if t is not None]

            def f(x: Tensor, weight: Tensor, bias: Tensor, *rest: Tensor, act: str = act) -> Tensor:
                return vF.norm_act(
                    x, None, None, weight, bias, residual=rest[0] if rest else None, activation=act
                )

            assert torch.autograd.gradcheck(f, leaves)
            if act != "relu":
                assert torch.autograd.gradgradcheck(f, leaves)


def test_on_voxels(device: torch.device) -> None:
    x = Voxels(random_coords(60, 6).to(device), torch.randn(60, 8, device=device), 1)
    y = vF.norm_act(x, activation="silu", residual=x)
    assert isinstance(y, Voxels) and y.coord_set is x.coord_set
    assert torch.allclose(
        y.feats, F.silu(F.batch_norm(x.feats, None, None, training=True) + x.feats), atol=1e-5
    )
    other = Voxels(x.coords.clone(), x.feats, 1)
    with pytest.raises(ValueError, match="residual must be on the coordinate set of x"):
        vF.norm_act(x, residual=other)
    with pytest.raises(ValueError, match="activation must be one of"):
        vF.norm_act(x, activation="tanh")


def one_by_one(block: Any, x: Voxels) -> Voxels:
    y = x
    for layer in block.body:
        y = layer(y)
    return block.relu(y + block.shortcut(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_blocks_train_as_their_layers(device: torch.device, dtype: torch.dtype) -> None:
    x = Voxels(random_coords(600, 10).to(device), torch.randn(600, 16, device=device, dtype=dtype), 1)
    torch.manual_seed(1)
    block = ResidualBlock(16, 16).to(device, dtype).train()
    twin = copy.deepcopy(block)
    y, single = block(x), one_by_one(twin, x)
    limit = 1e-4 if dtype == torch.float32 else 1e-10
    assert (y.feats - single.feats).abs().max() < limit
    for result in (y, single):
        result.feats.square().sum().backward()
    for (name, mine), other in zip(block.named_parameters(), twin.parameters(), strict=True):
        assert (mine.grad - other.grad).norm() <= 10 * limit * other.grad.norm(), name
    for (name, mine), other in zip(block.named_buffers(), twin.buffers(), strict=True):
        assert torch.allclose(mine, other, rtol=1e-4), name
    assert block.body[1].num_batches_tracked == 1
    if device.type == "cuda":
        inner = vnn.Sequential(block.body[0], block.body[1], block.body[2])
        assert voxmma.explain(inner(x)).applied == ("BatchNorm (fused)", "ReLU (fused)")


def test_training_passes_keep_to_hooks_and_momentum(device: torch.device) -> None:
    x = Voxels(random_coords(100, 6).to(device), torch.randn(100, 8, device=device), 1)
    seen: list[str] = []
    for i in range(2):
        layers = vnn.Sequential(vnn.BatchNorm(8), vnn.ReLU()).to(device)
        layers[i].register_forward_hook(lambda module, *rest: seen.append(type(module).__name__))
        layers(x)
        assert seen.pop() == type(layers[i]).__name__ and not seen
    average = vnn.Sequential(vnn.BatchNorm(8, momentum=None), vnn.ReLU()).to(device)
    average(x)
    average(x)
    assert torch.allclose(average[0].running_mean, x.feats.mean(0), atol=1e-5)
    few = Voxels(x.coords[:1], x.feats[:1], 1)
    layers = vnn.Sequential(vnn.BatchNorm(8), vnn.ReLU()).to(device)
    layers(few)
    assert (layers[0].running_mean == 0).all()
    assert isinstance(fusing.run_layers([vnn.ReLU()], x), Voxels) and isinstance(nn.ReLU()(x.feats), Tensor)


# ---- with the convolution before it ------------------------------------------------------------------------


def chain(channels: int, act: str) -> list[Any]:
    layers = {
        "relu": vnn.ReLU,
        "leaky_relu": lambda: vnn.LeakyReLU(0.2),
        "silu": vnn.SiLU,
        "gelu": vnn.GELU,
    }
    made: list[Any] = [vnn.SparseConv3d(channels, channels, 3), vnn.BatchNorm(channels, momentum=0.25)]
    return made + ([layers[act]()] if act != "none" else [])


def step(
    layers: list[Any], coords: Tensor, feats: Tensor, residual: Tensor | None, dy: Tensor, alone: bool
) -> tuple[Tensor, list[Tensor]]:
    """Result and gradients of what a chain is given and has, in one go or layer by layer."""
    x = Voxels(coords, feats.clone().requires_grad_(), 1)
    added = None if residual is None else x.with_feats(residual.clone().requires_grad_())
    parts = [*layers[:2], *([] if added is None else [fusing.Add(added)]), *layers[2:]]
    y = x
    for some in [[part] for part in parts] if alone else [parts]:
        y = fusing.run_layers(some, y)
    y.feats.backward(dy.to(y.dtype))
    given = [x.feats] + ([] if added is None else [added.feats])
    return y.feats.detach(), [t.grad for t in given + [p for layer in layers for p in layer.parameters()]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_convolution_norm_and_activation(
    device: torch.device, dtype: torch.dtype, act: str, residual: bool
) -> None:
    """Values, gradients and statistics of training against fp64, and the same bits again."""
    for n in (40, 700, *((9000,) if device.type == "cuda" else ())):
        torch.manual_seed(n)
        coords = random_coords(n, 9 if n < 700 else 24).to(device)
        feats, added, dy = (torch.randn(len(coords), 16, device=device).to(dtype) for _ in range(3))
        layers = [layer.to(device, dtype) for layer in chain(16, act)]
        if dtype.itemsize == 2:
            layers[1].float()
        exact = [copy.deepcopy(layer).double() for layer in layers]
        twins = copy.deepcopy(layers)
        rest = added if residual else None
        y, gradients = step(layers, coords, feats, rest, dy, alone=False)
        again, repeated = step(twins, coords, feats, rest, dy, alone=False)
        assert torch.equal(y, again)
        assert all(torch.equal(a, b) for a, b in zip(gradients, repeated, strict=True))
        wide = None if rest is None else rest.double()
        right, expected = step(exact, coords, feats.double(), wide, dy.double(), alone=True)
        eps = torch.finfo(dtype).eps
        assert (y.double() - right).abs().max() <= 16 * eps * (right.abs().max() + 4), (n, act)
        for i, (got, wanted) in enumerate(zip(gradients, expected, strict=True)):
            bias = i == len(gradients) - 3  # of the convolution: 0 but for rounding
            scale = expected[i - 1].norm() if bias else wanted.norm()
            assert got.shape == wanted.shape
            assert (got.double() - wanted).norm() <= (60 * eps + (4e-2 if eps > 1e-4 else 0)) * scale, (n, i)
        for name, value in layers[1].named_buffers():
            known = dict(exact[1].named_buffers())[name]
            assert torch.allclose(value.double(), known.double(), rtol=8 * eps, atol=8 * eps), name
        assert layers[1].num_batches_tracked == 1


def test_one_node_of_the_graph(device: torch.device) -> None:
    """On a GPU a convolution, norm, sum and activation are one node of the graph; under autocast, too."""
    x = Voxels(random_coords(300, 9).to(device), torch.randn(300, 16, device=device).requires_grad_(), 1)
    layers = [layer.to(device) for layer in chain(16, "relu")]
    block = vnn.Sequential(*layers)
    for enabled in (False, True):
        for _ in range(2):  # the second call is a repeated one
            with torch.autocast(device.type, torch.bfloat16, enabled=enabled):
                y = block(x)
            assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
            if device.type == "cuda":
                inputs = {node for node, _ in y.feats.grad_fn.next_functions}
                leaves = {node.variable for node in inputs if hasattr(node, "variable")}
                assert all(any(p is leaf for leaf in leaves) for p in block.parameters())
                assert voxmma.explain(y).applied == ("BatchNorm (fused)", "ReLU (fused)")
            y.feats.float().sum().backward()
            assert all(p.grad.dtype == torch.float32 for p in block.parameters())
    seen: list[int] = []
    block[0].register_forward_hook(lambda *rest: seen.append(1))
    hooked = block(x)
    assert seen == [1]
    if device.type == "cuda":
        assert len(hooked.feats.grad_fn.next_functions) == 3


def test_second_gradients_through_a_convolution(device: torch.device) -> None:
    for act in ("none", "silu", "leaky_relu"):
        layers = [layer.to(device, torch.float64) for layer in chain(3, act)]
        coords = random_coords(12, 3).to(device)
        x = torch.randn(12, 3, device=device, dtype=torch.float64).requires_grad_()
        added = torch.randn(12, 3, device=device, dtype=torch.float64).requires_grad_()

        def f(feats: Tensor, rest: Tensor, layers: list[Any] = layers, coords: Tensor = coords) -> Tensor:
            v = Voxels(coords, feats, 1)
            y: Tensor = fusing.run_layers([*layers[:2], fusing.Add(v.with_feats(rest)), *layers[2:]], v).feats
            return y

        assert torch.autograd.gradcheck(f, (x, added))
        assert torch.autograd.gradgradcheck(f, (x, added), fast_mode=True)


def test_training_chains_keep_to_modes_and_rows(device: torch.device) -> None:
    coords, feats = random_coords(60, 6).to(device), torch.randn(60, 8, device=device)
    x = Voxels(coords, feats, 1)
    block = vnn.Sequential(*chain(8, "relu")).to(device)
    for rows in (0, 1):  # no statistics: running ones stand in, and stay
        few = Voxels(coords[:rows], feats[:rows], 1)
        assert block(few).feats.shape == (rows, 8)
        assert (block[1].running_mean == 0).all() and block[1].num_batches_tracked == 0
    torchs = vnn.Sequential(vnn.SparseConv3d(8, 8, 3), nn.BatchNorm1d(8), nn.ReLU()).to(device)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torchs(Voxels(coords[:1], feats[:1], 1))
    block(x)
    before = block[1].running_mean.clone()
    assert (before != 0).any()
    block.eval()
    block(x)
    assert torch.equal(block[1].running_mean, before) and block[1].num_batches_tracked == 1
    block.train()
    with torch.no_grad():
        assert not block(x).feats.requires_grad
    assert block[1].num_batches_tracked == 2
    h = block[0](x).feats.detach()
    average = vnn.Sequential(block[0], vnn.BatchNorm(8, momentum=None), vnn.ReLU()).to(device)
    average(x)
    average(x)
    assert torch.allclose(average[1].running_mean, h.mean(0), atol=1e-5)
    block[1].requires_grad_(False)
    block[0].weight.grad = None
    block(x).feats.sum().backward()
    assert block[0].weight.grad is not None and block[1].weight.grad is None


def test_what_is_kept_for_the_gradient(device: torch.device) -> None:
    """A relu behind a residual passes the gradient where its result is not 0, and keeps neither of them."""
    x, residual = (torch.randn(333, 20, device=device).half().requires_grad_() for _ in range(2))
    kept: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    for act in ("relu", "leaky_relu"):
        kept.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = vF.norm_act(x, residual=residual, activation=act, slope=0.5)
        if device.type == "cuda":
            assert [t.shape for t in kept if t.is_floating_point() and t.shape == x.shape] == [x.shape]
        (grad,) = torch.autograd.grad(y.sum(), residual)
        low = 0.0 if act == "relu" else 0.5
        assert torch.equal(grad == low, y <= 0) and torch.equal(grad == 1, y > 0)
    y = vF.norm_act(x, residual=residual)
    dy = torch.randn_like(y)
    assert torch.equal(torch.autograd.grad(y, residual, dy)[0], dy)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [400, 6000])
def test_a_training_block_fits_a_cuda_graph(n: int) -> None:
    torch.manual_seed(0)
    coords = random_coords(n, 24).cuda()
    block = ResidualBlock(16, 32).cuda().train()
    static = torch.randn(len(coords), 16, device="cuda")
    x = Voxels(coords, static, 1)

    def step() -> list[Tensor]:
        y = block(x).feats
        return [y.detach(), *torch.autograd.grad(y.square().sum(), list(block.parameters()))]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # builds the maps
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    counted = int(block.body[1].num_batches_tracked)
    for i in range(2):
        static.normal_()
        expected = [t.clone() for t in step()]
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        assert block.body[1].num_batches_tracked == counted + 2 * (i + 1)
