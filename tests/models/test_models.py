"""voxmma.models: against dense fp64 networks, forward and backward on small scenes, numbers of parameters."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn

import voxmma
from voxmma import Voxels, models
from voxmma import nn as vnn

import dense_networks as dense  # isort: skip

#: Cells of a dense grid along each axis, as few as hold a scene and what its outputs reach.
SIDE = 32


def parameters(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


def small(net: nn.Module, device: torch.device, dtype: torch.dtype = torch.float64) -> nn.Module:
    dense.randomise(net)
    return net.to(device, dtype)


def agree(y: Voxels, expected: dense.Grid) -> None:
    """The same cells, and values within rounding of fp64."""
    values, mask = expected
    cells = torch.nonzero(mask[:, 0])
    assert y.num_voxels == len(cells) > 0
    rows = voxmma.lookup(y, cells.int())
    assert (rows >= 0).all()
    wanted = values[(cells[:, 0], slice(None), *cells[:, 1:].unbind(1))]
    assert float((y.feats[rows] - wanted).detach().norm() / wanted.detach().norm()) < 1e-12


def gradients_agree(net: nn.Module, x: Voxels, ours: Tensor, theirs: Tensor) -> None:
    """Of the input and all parameters, of the mean square of two results of the same network."""
    inputs = [x.feats, *(p for p in net.parameters() if p.requires_grad)]
    got = torch.autograd.grad(ours.square().sum(), inputs)
    wanted = torch.autograd.grad(theirs.square().sum(), inputs)
    for g, w in zip(got, wanted, strict=True):
        assert float(w.norm()) > 0
        assert float((g - w).norm() / w.norm()) < 1e-10


def voxels(coords: Tensor, channels: int, device: torch.device, **options: int) -> Voxels:
    feats = torch.randn(len(coords), channels, dtype=torch.float64).to(device).requires_grad_()
    return Voxels(coords.to(device), feats, **options)


@pytest.mark.parametrize("widen", ["down", "block"])
def test_unet_equals_a_dense_one(device: torch.device, widen: str) -> None:
    net = models.SparseUNet(
        3, 5, channels=(6, 8, 7, 4), blocks=(1, 2, 1, 2), stem_channels=4, stem_kernels=(5, 3), widen=widen
    )
    small(net, device).eval()
    x = voxels(dense.scene(60, 12, margin=8), 3, device)
    y, expected = net(x), dense.unet(net, dense.grid(x, 24))
    assert y.coord_set is x.coord_set
    agree(y, expected)
    gradients_agree(net, x, y.feats, expected[0])


def test_second_backbone_equals_a_dense_one(device: torch.device) -> None:
    net = small(models.SECONDBackbone(3), device).eval()
    x = voxels(dense.scene(40, 8, batch=1), 3, device)
    made, expected = net(x), dense.second(net, dense.grid(x, 48))
    assert [y.feats.shape[1] for y in made] == [16, 32, 64, 64, 128]
    assert [y.stride for y in made] == [(1, 1, 1), (2, 2, 2), (4, 4, 4), (8, 8, 8), (16, 8, 8)]
    for y, e in zip(made, expected, strict=True):
        agree(y, e)
    gradients_agree(net, x, made[-1].feats, expected[-1][0])


@pytest.mark.parametrize("padding", [0, 1])
def test_resnet_equals_a_dense_one(device: torch.device, padding: int) -> None:
    net = small(models.ResNet21D(3, width=0.25, padding=padding), device).eval()
    for module in net.modules():  # the last kernel is 1 x 3 x 1: one cell of padding is wanted on one axis
        if isinstance(module, vnn.SparseConv3d) and module.kernel_size == (1, 3, 1):
            assert module.padding == (padding,) * 3
    x = voxels(dense.scene(40, 8, batch=1), 3, device)
    made, expected = net(x), dense.resnet(net, dense.grid(x, 48))
    assert [y.feats.shape[1] for y in made] == [4, 8, 16, 32, 32] and made[-1].stride == (8, 16, 8)
    for y, e in zip(made, expected, strict=True):
        agree(y, e)
    gradients_agree(net, x, made[-1].feats, expected[-1][0])


@pytest.mark.parametrize("with_target", [False, True])
def test_vae_decoder_equals_a_dense_one(device: torch.device, with_target: bool) -> None:
    net = small(models.VAEDecoder((6, 8, 6, 4), unpruned=1), device).eval()
    target = voxels(dense.scene(50, 16), 1, device) if with_target else None
    coords = dense.scene(5, 4, margin=0)
    if target is not None:
        coords = voxmma.downsample(target, 8).coords.cpu()
    z = voxels(coords, 6, device, batch_size=2, stride=8)
    mask = None if target is None else dense.grid(target, SIDE)[1]
    y, logits = net(z, target)
    expected, heads = dense.vae(net, dense.grid(z, SIDE // 8), mask)
    agree(y, expected)
    assert y.stride == (1, 1, 1) and len(logits) == 2
    for logit, head in zip(logits, heads, strict=True):
        agree(logit, head)
    if target is not None:
        assert y.num_voxels == target.num_voxels  # the latents are its cells: nothing is lost
        assert models.occupancy(logits[-1], target, 1).sum() == target.num_voxels
    gradients_agree(
        net, z, torch.cat([y.feats.flatten(), *(g.feats.flatten() for g in logits)]),
        torch.cat([expected[0].flatten(), *(g[0].flatten() for g in heads)]),
    )  # fmt: skip


def test_a_vae_decoder_may_throw_everything_away(device: torch.device) -> None:
    net = models.VAEDecoder((4, 4, 4), unpruned=0).to(device).eval()
    for head in net.heads:
        nn.init.constant_(head.bias, -1e3)
    z = Voxels(dense.scene(5, 4, margin=0).to(device), torch.randn(10, 4, device=device), stride=4)
    y, logits = net(z)
    assert y.feats.shape == (0, 4) and [g.num_voxels for g in logits] == [80, 0]


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "spunet": (lambda: models.spunet(6, 20), 6),
    "minkunet 18A": (lambda: models.minkunet("18A", 3, 13), 3),
    "resunet42": (lambda: models.resunet42(4), 4),
    "second": (lambda: models.SECONDBackbone(4), 4),
    "resnet21d": (lambda: models.ResNet21D(4), 4),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_train_at_full_size(name: str, device: torch.device) -> None:
    make, channels = NETWORKS[name]
    net = make().to(device).train()
    x = Voxels(dense.scene(200, 12).to(device), torch.randn(400, channels, device=device))
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    with torch.autocast(device.type, dtype=dtype):
        made = net(x)
    last = made if isinstance(made, Voxels) else made[-1]
    last.feats.float().square().mean().backward()
    for key, parameter in net.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), key


def test_wrong_arguments_are_named() -> None:
    with pytest.raises(ValueError, match="channels and blocks"):
        models.SparseUNet(3, 5, channels=(4, 4, 4), blocks=(1, 1, 1))
    with pytest.raises(ValueError, match="channels and blocks"):
        models.SparseUNet(3, 5, channels=(4, 4), blocks=(1,) * 4)
    with pytest.raises(ValueError, match="widen"):
        models.SparseUNet(3, 5, widen="up")
    with pytest.raises(ValueError, match="unpruned"):
        models.VAEDecoder((4, 4), unpruned=2)
    with pytest.raises(KeyError, match="name is '50', there are 14A"):
        models.minkunet("50", 3, 5)


# ---- numbers of parameters, counted from the published lists of layers -------------------------------------


@pytest.fixture
def _without_values() -> Iterator[None]:
    with torch.device("meta"):
        yield


def conv(c_in: int, c_out: int, volume: int) -> int:
    """A convolution without bias and its norm."""
    return c_in * c_out * volume + 2 * c_out


def block(c_in: int, c_out: int) -> int:
    short = conv(c_in, c_out, 1) if c_in != c_out else 0
    return conv(c_in, c_out, 27) + conv(c_out, c_out, 27) + short


def blocks(c_in: int, c_out: int, number: int) -> int:
    return block(c_in, c_out) + (number - 1) * block(c_out, c_out)


PLANES = (32, 64, 128, 256, 256, 128, 96, 96)
LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)


def unet_count(planes: Sequence[int], layers: Sequence[int], wide: bool) -> int:
    """Stages of a U-Net without stem and head; `wide`: the strided convolution changes channels."""
    total, c, skips = 0, 32, [32]
    for i in range(4):
        entered = planes[i] if wide else c
        total += conv(c, entered, 8) + blocks(entered, planes[i], layers[i])
        c = planes[i]
        skips.append(c)
    for i in range(4, 8):
        total += conv(c, planes[i], 8) + blocks(planes[i] + skips[7 - i], planes[i], layers[i])
        c = planes[i]
    return total


@pytest.mark.usefixtures("_without_values")
def test_numbers_of_parameters() -> None:
    spunet = conv(6, 32, 125) + unet_count(PLANES, LAYERS, True) + 96 * 20 + 20
    assert parameters(models.spunet(6, 20)) == spunet and round(spunet / 1e6, 1) == 39.2  # PTv3's paper
    mink = conv(3, 32, 125) + unet_count(PLANES, LAYERS, False) + 96 * 20 + 20
    assert parameters(models.minkunet("34C", 3, 20)) == mink and round(mink / 1e6, 1) == 37.9  # PTv3's paper
    planes = (32, 64, 128, 256, 128, 128, 96, 96)
    count = conv(3, 32, 125) + unet_count(planes, (2,) * 8, False) + 96 * 20 + 20
    assert parameters(models.minkunet("18A", 3, 20)) == count
    resunet = conv(4, 32, 27) + conv(32, 32, 27) + unet_count(PLANES, (2,) * 8, False)
    assert parameters(models.resunet42(4)) == resunet and round(resunet / 1e6, 1) == 21.7  # SPVNAS' paper
    levels = ((4, 16), (16, 16), (16, 32), (32, 32), (32, 32), (32, 64), *[(64, 64)] * 5)
    second = sum(conv(i, o, 27) for i, o in levels) + conv(64, 128, 3)
    assert parameters(models.SECONDBackbone(4)) == second
    stages = sum(conv(i, o, 27) + blocks(o, o, 2) for i, o in ((4, 16), (16, 32), (32, 64), (64, 128)))
    assert parameters(models.ResNet21D(4)) == stages + conv(128, 128, 3)
    planes = (1024, 1024, 512, 256, 128, 64, 32, 16)
    steps = list(itertools.pairwise(planes))
    vae = sum(conv(i, o, 8) + conv(o, o, 27) for i, o in steps) + sum(c + 1 for c in planes[2:])
    assert parameters(models.VAEDecoder()) == vae
