"""Layers that follow a convolution, run in its launch: what agrees, when it happens, and when it must not."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import voxmma
from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.models.blocks import ResidualBlock
from voxmma.nn.modules import container, fusing

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
        y = container.residual(body, x, other, act)
        assert torch.equal(y.feats, act(each_by_itself(body, x) + other).feats)
        wide = container.residual(body, x, x.double(), act)
        assert wide.dtype == torch.float64
        with pytest.raises(ValueError, match="cannot add voxels"):
            container.residual(body, x, x.with_feats(x.feats[:, :3]), act)


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


# ---- fuse: whole models ------------------------------------------------------------------------------------


class Basic(nn.Module):
    """A residual block as users write it."""

    def __init__(self, c_in: int, c_out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = vnn.SparseConv3d(c_in, c_out, 3, bias=False), vnn.BatchNorm(c_out)
        self.conv2, self.bn2 = vnn.SparseConv3d(c_out, c_out, 3, bias=False), vnn.BatchNorm(c_out)
        self.relu = vnn.ReLU()
        self.down: nn.Module | None = None
        if c_in != c_out:
            self.down = vnn.Sequential(vnn.SparseConv3d(c_in, c_out, 1), vnn.BatchNorm(c_out))

    def forward(self, x: Voxels) -> Voxels:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        if self.down is not None:
            x = self.down(x)
        return self.relu(x + y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = vnn.SparseConv3d(16, 16, 3), vnn.BatchNorm(16)
        self.blocks = nn.ModuleList([Basic(16, 16), Basic(16, 32)])
        self.wide = nn.Sequential(vnn.SparseConv3d(32, 24, 3), vnn.BatchNorm(24), vnn.SiLU())
        self.head = vnn.SparseConv3d(24, 4, 1)

    def forward(self, x: Voxels) -> Voxels:
        x = vnn.functional.leaky_relu(self.norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.wide(x))


FUSED = {
    ("stem", "norm", "leaky_relu"),
    ("blocks.0.conv1", "blocks.0.bn1", "blocks.0.relu"),
    ("blocks.0.conv2", "blocks.0.bn2", "+", "blocks.0.relu"),
    ("blocks.1.conv1", "blocks.1.bn1", "blocks.1.relu"),
    ("blocks.1.conv2", "blocks.1.bn2", "+", "blocks.1.relu"),
    ("blocks.1.down.0", "blocks.1.down.1"),
    ("wide.0", "wide.1", "wide.2"),
}


def launches(model: nn.Module, x: Voxels) -> list[tuple[str, ...]]:
    """What each convolution took along: the epilogues of the calls, in order."""
    seen: list[tuple[str, ...]] = []
    run = fusing.call

    def call(*args: Any, then: Any, **kwargs: Any) -> Any:
        y = run(*args, then=then, **kwargs)
        seen.append(applied(y))
        return y

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fusing, "call", call)
        with torch.no_grad():
            model(x)
    return seen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fuse_reads_forwards(device: torch.device, dtype: torch.dtype) -> None:
    x = voxels(device, dtype=dtype)
    model = settled(Net(), device, dtype)
    names = list(model.state_dict())
    with torch.no_grad():
        single = model(x)
        exact = copy.deepcopy(model).double()(x.double()).feats
    model.train()  # what is read is the evaluation's
    same, report = voxmma.fuse(model)
    model.eval()
    assert same is model and list(model.state_dict()) == names
    assert set(report.fused) == FUSED
    assert [name for name, _ in report.left] == ["head"] and "launches take" in str(report)
    with torch.no_grad():
        y, again = model(x), model(x)
    assert torch.equal(y.feats, again.feats)
    error, before = ((v.feats.double() - exact).norm() for v in (y, single))
    assert error <= 1.5 * before + 20 * torch.finfo(dtype).eps * exact.norm()
    seen = launches(model, x)
    assert len(seen) == 7 and all("fused" in name for names in seen for name in names)
    assert sum("+ residual (fused)" in names for names in seen) == 2


def test_fused_models_train_copy_and_change_as_before(device: torch.device) -> None:
    x = voxels(device)
    model, plain = settled(Net(), device), settled(Net(), device)
    plain.load_state_dict(model.state_dict())
    voxmma.fuse(model)
    with torch.no_grad():
        y = model(x)
        twin = copy.deepcopy(model)
        assert torch.equal(twin(x).feats, y.feats) and len(launches(twin, x)) == 7
        twin.stem.weight.data.mul_(2)
        assert not torch.equal(twin(x).feats, y.feats) and torch.equal(model(x).feats, y.feats)
        loaded = pickle.loads(pickle.dumps(model))
        assert torch.equal(loaded(x).feats, plain(x).feats)
        assert torch.equal(voxmma.fuse(loaded)[0](x).feats, y.feats)
        model.blocks[0].conv1 = settled(vnn.SparseConv3d(16, 16, 3), device)
        assert not torch.equal(model(x).feats, y.feats)
        model.blocks[0].conv1 = plain.blocks[0].conv1
        assert torch.equal(model(x).feats, y.feats)
    for network in (model.train(), plain.train()):
        network(x).feats.square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert (
            mine is other or (mine.grad - other.grad).norm() <= 1e-3 * other.grad.norm() + 1e-4
        )  # a bias before a norm: 0
    voxmma.fuse(model)  # again
    assert len(launches(model.eval(), x)) == 7


def test_fuse_leaves_what_it_cannot_read(device: torch.device) -> None:
    x = voxels(device)

    class Asks(Basic):
        def forward(self, x: Any) -> Any:
            return super().forward(x) if isinstance(x, Voxels) else None

    class Counts(Basic):
        def forward(self, x: Any) -> Any:
            self.calls = getattr(self, "calls", 0) + 1
            return super().forward(x)

    class Optional(Basic):
        def forward(self, x: Any, skip: Any = None) -> Any:
            return super().forward(x if skip is None else skip)

    class Measures(Basic):
        def forward(self, x: Any) -> Any:
            return super().forward(x) if len(x) > 3 else x

    class Twice(Basic):
        def forward(self, x: Any) -> Any:
            y = self.conv1(x)
            return self.bn1(y) + y

    class Writes(Basic):
        def forward(self, x: Any) -> Any:
            y = self.bn1(self.conv1(x))
            x.feats.mul_(2)
            return self.relu(y + x)

    class Numbers(Basic):
        def forward(self, x: Any) -> Any:
            return self.relu(self.bn1(self.conv1(x)) + 1)

    for kind, why in (
        (Asks, "class of a value"),
        (Counts, "it sets calls"),
        (Optional, "optional arguments"),
        (Measures, "cannot be read"),
        (Twice, "used 2 times"),
    ):
        model = settled(kind(16, 16), device)
        with torch.no_grad():
            before = model(x).feats
        _, report = voxmma.fuse(model)
        assert not report.fused and why in str(report), kind
        assert "forward" not in model.__dict__
        with torch.no_grad():
            assert torch.equal(model(x).feats, before)
    for kind in (Writes, Numbers):
        model = settled(kind(16, 16), device)
        with torch.no_grad():
            before = model(x.with_feats(x.feats.clone())).feats
        _, report = voxmma.fuse(model)
        assert report.fused == [("conv1", "bn1")]
        with torch.no_grad():
            close(model(x.with_feats(x.feats.clone())).feats, before, float(before.abs().max()))


def test_what_differs_in_training_is_fused_for_evaluation_alone(device: torch.device) -> None:
    x = voxels(device)

    class Differs(Basic):
        def forward(self, x: Any) -> Any:
            y = self.bn1(self.conv1(x))
            return y if self.training else self.relu(y)

    model = settled(Differs(16, 16), device)
    assert voxmma.fuse(model)[1].fused == [("conv1", "bn1", "relu")]
    assert len(launches(model, x)) == 1 and (model(x).feats >= 0).all()
    assert (model.train()(x).feats < 0).any()


def test_fuse_reports_sequences_and_networks(device: torch.device) -> None:
    from voxmma.models import spunet

    model = spunet(16, 4)
    _, report = voxmma.fuse(settled(model, device))
    convolutions = sum(isinstance(layer, vnn.SparseConv3d) for layer in model.modules())
    assert len(report.fused) == convolutions - 1 and report.left == []
    other = vnn.Sequential(vnn.SparseConv3d(4, 4, 3), vnn.GroupNorm(2, 4), vnn.ReLU())
    assert voxmma.fuse(other)[1].left == [("0", "GroupNorm follows")]


# ---- concatenations ----------------------------------------------------------------------------------------


class Decoder(nn.Module):
    """A level of a U-Net: up, concatenated with what was there, and through a convolution without a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.down = vnn.SparseConv3d(16, 24, 2, 2)
        self.up = vnn.Sequential(vnn.SparseConvTranspose3d(24, 8, 2, stride=2), vnn.BatchNorm(8), vnn.ReLU())
        self.last = vnn.SparseConv3d(24, 16, 3)

    def forward(self, x: Voxels) -> Any:
        return vnn.functional.cat(self.last(vnn.functional.cat(self.up(self.down(x)), x)), x, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_concatenations_are_written_by_the_launch(device: torch.device, dtype: torch.dtype) -> None:
    x = voxels(device, dtype=dtype)
    body = settled(vnn.Sequential(vnn.SparseConv3d(16, 24, 3), vnn.BatchNorm(24), vnn.SiLU()), device, dtype)
    for layers in (list(body), list(body)[:1]):
        part = vnn.Sequential(*layers)
        with torch.no_grad():
            first, again = (container.cat_behind(part, x, x, x) for _ in range(2))
            alone = part(x)
        both = torch.cat([alone.feats, x.feats, x.feats], dim=1)
        assert torch.equal(first.feats, both) and torch.equal(again.feats, both)
        assert first.feats.is_contiguous() and first.coord_set is x.coord_set
        assert applied(first) == applied(again) == (*applied(alone), "cat (fused)")
    wanted = vnn.functional.cat(body(x), x)
    assert wanted.feats.requires_grad
    y = container.cat_behind(body, x, x)
    assert torch.equal(y.feats, wanted.feats) and y.feats.requires_grad and y._record is None
    shuffled = Voxels(x.coords.flip(0), x.feats.flip(0), 1)
    wide = x.with_feats(x.feats.double())
    with torch.no_grad():
        for other in (shuffled, wide):  # of another order, of another type
            y, single = container.cat_behind(body, x, other), vnn.functional.cat(body(x), other)
            assert y.dtype == single.dtype
            close(y.feats.to(dtype), single.feats.to(dtype), 8.0)
        body.train()
        trained, twin = container.cat_behind(body, x, x), vnn.functional.cat(copy.deepcopy(body)(x), x)
    assert trained.feats.shape == twin.feats.shape and body[1].num_batches_tracked == 1
    elsewhere = Voxels(x.coords + torch.tensor([0, 1, 1, 1], device=device), x.feats, 1)
    with pytest.raises(ValueError, match="concatenate"):
        container.cat_behind(body, x, elsewhere)


def test_fuse_finds_concatenations(device: torch.device) -> None:
    x = voxels(device)
    net = settled(Decoder(), device)
    twin = copy.deepcopy(net)
    _, report = voxmma.fuse(net)
    assert ("up", "cat") in report.fused and ("last", "cat") in report.fused
    with torch.no_grad():
        for _ in range(2):
            y, single = net(x), twin(x)
            close(y.feats, single.feats, 8.0)
            assert applied(y) == ("cat (fused)",)
    net.train()
    net(x).feats.sum().backward()
    assert net.up[0].weight.grad is not None
