"""Layers that follow a convolution, run in its launch: what agrees, when it happens, and when it must not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import voxmma
from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.models.blocks import ResidualBlock
from voxmma.nn.modules import fusing

from conftest import random_coords, surface_coords

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "ReLU": vnn.ReLU,
    "LeakyReLU": lambda: vnn.LeakyReLU(0.2),
    "SiLU": vnn.SiLU,
    "GELU": vnn.GELU,
    "torch ReLU": nn.ReLU,
    "torch LeakyReLU": lambda: nn.LeakyReLU(0.3),
    "torch SiLU": nn.SiLU,
    "torch GELU": nn.GELU,
}


def voxels(
    device: torch.device, n: int = 300, channels: int = 16, dtype: torch.dtype = torch.float32
) -> Voxels:
    coords = random_coords(n, 9) if n < 700 else surface_coords(int((0.6 * n) ** 0.5) + 8)[:n]
    feats = torch.randn((n, channels), generator=torch.Generator().manual_seed(0))
    return Voxels(coords.to(device), feats.to(device, dtype), 1)


def settled(model: nn.Module, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """In evaluation, with running statistics and affine parameters as a trained network has them."""
    g = torch.Generator().manual_seed(1)
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm1d):
            for name, low in (("running_mean", -1.0), ("running_var", 0.3), ("weight", 0.5), ("bias", -1.0)):
                value = getattr(layer, name)
                if value is not None:
                    value.data.copy_(torch.rand(value.shape, generator=g) * 1.5 + low)
    return model.eval().to(device, dtype)


def each_by_itself(layers: Any, x: Voxels) -> Voxels:
    for layer in layers:
        x = fusing.apply_module(layer, x) if fusing.is_plain(layer) else layer(x)
    return x


def applied(y: Voxels) -> tuple[str, ...]:
    return voxmma.explain(y).applied


def close(fused: Tensor, single: Tensor, size: float) -> None:
    """Fused rounds once where the layers round after each of up to four steps (docs/precision.md)."""
    eps = torch.finfo(fused.dtype).eps
    allowed = 4 * eps * (single.double().abs() + size)
    assert ((fused.double() - single.double()).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
def test_sequences_agree_with_their_layers(device: torch.device, dtype: torch.dtype, act: str) -> None:
    x = voxels(device, dtype=dtype)
    for i, norm in enumerate((vnn.BatchNorm, vnn.SyncBatchNorm, nn.BatchNorm1d)):
        conv = vnn.SparseConv3d(16, 24, 3, bias=i != 1)
        model = settled(vnn.Sequential(conv, norm(24, affine=i != 2), ACTIVATIONS[act]()), device, dtype)
        with torch.no_grad():
            first, again, single = model(x), model(x), each_by_itself(model, x)
        assert torch.equal(first.feats, again.feats) and first.dtype == single.dtype == dtype
        named = "BatchNorm1d" if i == 2 else "BatchNorm"
        assert applied(first) == applied(again) == (f"{named} (fused)", f"{type(model[2]).__name__} (fused)")
        assert "fused" not in str(voxmma.explain(single))
        close(first.feats, single.feats, float(single.feats.abs().max()))


def test_statistics_are_read_in_every_call(device: torch.device) -> None:
    """Parameters and statistics may be written to in any way between two calls."""
    x = voxels(device)
    model = settled(vnn.Sequential(vnn.SparseConv3d(16, 16, 3), vnn.BatchNorm(16), vnn.ReLU()), device)
    with torch.no_grad():
        for change in range(4):
            y = model(x)
            assert applied(y)
            close(y.feats, each_by_itself(model, x).feats, 4.0)
            target = (model[1].running_var, model[1].weight, model[0].weight, model[0].bias)[change]
            target.data.mul_(3.0)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "strided": lambda: vnn.SparseConv3d(16, 24, 2, 2),
    "transposed": lambda: vnn.SparseConvTranspose3d(16, 24, 3, generative=True),
    "grouped": lambda: vnn.SparseConv3d(16, 24, 3, groups=4),
    "planar": lambda: vnn.SparseConv2d(16, 24, 3),
}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("n", [0, 1, 300, 1500])
def test_every_kind_of_layer(device: torch.device, layer: str, n: int) -> None:
    x = voxels(device, n)
    model = settled(vnn.Sequential(LAYERS[layer](), vnn.BatchNorm(24), vnn.ReLU()), device)
    with torch.no_grad():
        y, single = model(x), each_by_itself(model, x)
    assert y.coord_set.equal(single.coord_set) and y.stride == single.stride
    assert len(applied(y)) == 2 and "fused" in applied(y)[0]
    close(y.feats, single.feats, float(single.feats.abs().max()) if len(single) else 0.0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("channels", [(16, 16), (16, 24)])
def test_residual_blocks_add_in_the_launch(
    device: torch.device, dtype: torch.dtype, channels: tuple[int, int]
) -> None:
    block = settled(ResidualBlock(*channels), device, dtype)
    x = voxels(device, dtype=dtype)
    with torch.no_grad():
        y = block(x)
        single = block.relu(each_by_itself(block.body, x) + each_by_itself(
            block.shortcut if isinstance(block.shortcut, vnn.Sequential) else [], x
        ))  # fmt: skip
    assert applied(y) == ("BatchNorm (fused)", "+ residual (fused)", "ReLU (fused)")
    close(y.feats, single.feats, 4 * float(single.feats.abs().max()))


def test_under_autocast(device: torch.device) -> None:
    x = voxels(device)
    block = settled(ResidualBlock(16, 24), device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        y, again = block(x), block(x)
    assert y.dtype == torch.bfloat16 and torch.equal(y.feats, again.feats)
    assert len(applied(y)) == 3
    with torch.no_grad():
        exact = copy.deepcopy(block).double()(x.double()).feats
    assert (y.feats.double() - exact).norm() < 2e-2 * exact.norm()


def unfused(model: nn.Module, x: Voxels) -> bool:
    with torch.no_grad():
        return "fused" not in str(voxmma.explain(model(x)))


def test_what_wants_to_see_a_layer_sees_it(device: torch.device) -> None:
    """Hooks, forwards of their own, subclasses, training: each keeps the layers apart."""
    x = voxels(device)

    def make() -> Any:
        return settled(vnn.Sequential(vnn.SparseConv3d(16, 16, 3), vnn.BatchNorm(16), vnn.ReLU()), device)

    assert not unfused(make(), x)
    seen: list[str] = []

    def note(module: nn.Module, *rest: Any) -> None:
        seen.append(type(module).__name__)

    for i in range(3):
        model = make()
        handle = model[i].register_forward_hook(note)
        with torch.no_grad():
            model(x)
        assert seen.pop() == type(model[i]).__name__ and not seen
        handle.remove()
        assert not unfused(model, x)
        model[i].register_forward_pre_hook(note)
        with torch.no_grad():
            model(x)
        assert seen.pop() == type(model[i]).__name__ and not seen
    model = make()
    everywhere = nn.modules.module.register_module_forward_hook(note)
    try:
        assert unfused(model, x) and seen[-4:] == ["SparseConv3d", "BatchNorm", "ReLU", "Sequential"]
    finally:
        everywhere.remove()
    seen.clear()

    class Own(vnn.SparseConv3d):
        """A user's layer."""

    class OwnNorm(vnn.BatchNorm):
        """A user's norm."""

    for i, layer in enumerate((Own(16, 16, 3), OwnNorm(16))):
        model = make()
        model[i] = settled(layer, device)
        assert unfused(model, x)
    model = make()
    kept = model[1].forward
    model[1].forward = lambda v: (seen.append("own"), kept(v))[1]
    with torch.no_grad():
        model(x)
    assert seen == ["own"]
    assert "fused" not in str(voxmma.explain(make()(x)))  # a gradient is asked for
    model = make()
    model[1].train()
    before = model[1].running_mean.clone()
    with torch.no_grad():
        model(x)
    assert not torch.equal(before, model[1].running_mean)
    assert unfused(settled(vnn.Sequential(vnn.SparseConv3d(16, 16, 3), vnn.GELU("tanh")), device), x)
    no_statistics = vnn.BatchNorm(16, track_running_stats=False)
    assert unfused(settled(vnn.Sequential(vnn.SparseConv3d(16, 16, 3), no_statistics), device), x)


def test_gradients_are_those_of_the_layers(device: torch.device) -> None:
    """Frozen norms in evaluation, weights that learn: nothing is fused, and the gradients are there."""
    x = voxels(device)
    model = settled(ResidualBlock(16, 16), device)
    model(x).feats.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.requires_grad_(False)
    assert "fused" in str(voxmma.explain(model(x)))  # nothing learns and no input asks
    feats = x.feats.clone().requires_grad_()
    model(x.with_feats(feats)).feats.sum().backward()
    assert feats.grad is not None


def test_precision_tools_see_the_layers(device: torch.device) -> None:
    x = voxels(device)
    model = settled(vnn.Sequential(vnn.SparseConv3d(16, 16, 3), vnn.BatchNorm(16), vnn.ReLU()), device)
    mode = torch.overrides.BaseTorchFunctionMode()
    with mode:
        assert unfused(model, x)
    assert not unfused(model, x)


def test_a_residual_of_another_order_or_type_is_added_as_before(device: torch.device) -> None:
    x = voxels(device)
    body = settled(vnn.Sequential(vnn.SparseConv3d(16, 16, 3), vnn.BatchNorm(16)), device)
    act = vnn.ReLU()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3)).to(device)
    other = Voxels(x.coords[order], x.feats[order], 1)
    with torch.no_grad():
        y = fusing.residual(body, x, other, act)
        assert torch.equal(y.feats, act(each_by_itself(body, x) + other).feats)
        wide = fusing.residual(body, x, x.double(), act)
        assert wide.dtype == torch.float64
        with pytest.raises(ValueError, match="cannot add voxels"):
            fusing.residual(body, x, x.with_feats(x.feats[:, :3]), act)


def test_rescaled_sums_are_not_fused_and_the_layers_still_run(device: torch.device) -> None:
    x = voxels(device, dtype=torch.bfloat16)
    model = settled(
        vnn.Sequential(vnn.SparseConv3d(16, 16, 3, use_fp16_accum=True), vnn.BatchNorm(16), vnn.ReLU()),
        device, torch.bfloat16,
    )  # fmt: skip
    with torch.no_grad():
        y, again = model(x), model(x)
        assert torch.equal(y.feats, again.feats)
        assert torch.equal(y.feats, each_by_itself(model, x).feats)
    assert voxmma.explain(y).rescaled and "fused" not in str(voxmma.explain(y))
