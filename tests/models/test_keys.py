"""Key maps of voxmma.models: checkpoints with upstream's names and layouts load strictly, to their places."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from voxmma import convert, models

State = dict[str, Tensor]


class Writer:
    """Collects tensors in the layout of a library under upstream's keys."""

    def __init__(self, layout: str) -> None:
        self.layout, self.state = layout, State()

    def conv(self, key: str, c_in: int, c_out: int, size: int | tuple[int, ...], bias: bool = False) -> None:
        kernel = (size,) * 3 if isinstance(size, int) else size
        if self.layout == "spconv":
            self.state[f"{key}.weight"] = torch.rand(c_out, *kernel, c_in)
        else:
            volume = math.prod(kernel)
            shape = (c_in, c_out) if volume == 1 else (volume, c_in, c_out)
            self.state[f"{key}.kernel"] = torch.rand(shape)
        if bias:
            shape = (1, c_out) if self.layout == "minkowski" else (c_out,)
            self.state[f"{key}.bias"] = torch.randn(shape)

    def norm(self, key: str, channels: int) -> None:
        key += ".bn" if self.layout == "minkowski" else ""
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.state[f"{key}.{name}"] = torch.rand(channels)
        self.state[f"{key}.num_batches_tracked"] = torch.tensor(7)

    def block(self, key: str, c_in: int, c_out: int, names: tuple[str, str, str, str, str]) -> None:
        """`names`: of both convolutions, both norms and the shortcut."""
        conv1, conv2, norm1, norm2, short = names
        self.conv(f"{key}.{conv1}", c_in, c_out, 3)
        self.conv(f"{key}.{conv2}", c_out, c_out, 3)
        self.norm(f"{key}.{norm1}", c_out)
        self.norm(f"{key}.{norm2}", c_out)
        if c_in != c_out:
            self.conv(f"{key}.{short}.0", c_in, c_out, 1)
            self.norm(f"{key}.{short}.1", c_out)


PLANES = (32, 64, 128, 256, 256, 128, 96, 96)
LAYERS = (2, 3, 4, 6, 2, 2, 2, 2)


def pointcept() -> State:
    w = Writer("spconv")
    names = ("conv1", "conv2", "bn1", "bn2", "proj")
    w.conv("conv_input.0", 6, 32, 5)
    w.norm("conv_input.1", 32)
    enc, dec = 32, 96
    for s in range(4):
        w.conv(f"down.{s}.0", enc, PLANES[s], 2)
        w.norm(f"down.{s}.1", PLANES[s])
        w.conv(f"up.{s}.0", PLANES[6 - s], dec, 2)
        w.norm(f"up.{s}.1", dec)
        for i in range(LAYERS[s]):
            w.block(f"enc.{s}.block{i}", PLANES[s], PLANES[s], names)
        for i in range(LAYERS[7 - s]):
            w.block(f"dec.{s}.block{i}", dec + (0 if i else enc), dec, names)
        enc, dec = PLANES[s], PLANES[6 - s]
    w.conv("final", 96, 20, 1, bias=True)
    return w.state


def minkunet() -> State:
    w = Writer("minkowski")
    names = ("conv1", "conv2", "norm1", "norm2", "downsample")
    w.conv("conv0p1s1", 3, 32, 5)
    w.norm("bn0", 32)
    c, skips = 32, [32]
    for i in range(4):
        w.conv(f"conv{i + 1}p{2**i}s2", c, c, 2)
        w.norm(f"bn{i + 1}", c)
        for n in range(LAYERS[i]):
            w.block(f"block{i + 1}.{n}", c, PLANES[i], names)
            c = PLANES[i]
        skips.append(c)
    skips.pop()
    for i in range(4, 8):
        w.conv(f"convtr{i}p{2 ** (8 - i)}s2", c, PLANES[i], 2)
        w.norm(f"bntr{i}", PLANES[i])
        c = PLANES[i] + skips.pop()
        for n in range(LAYERS[i]):
            w.block(f"block{i + 1}.{n}", c, PLANES[i], names)
            c = PLANES[i]
    w.conv("final", 96, 20, 1, bias=True)
    return w.state


TORCHSPARSE = ("main.0", "main.3", "main.1", "main.4", "shortcut")


def resunet() -> State:
    w = Writer("torchsparse")
    for layer, c in ((0, 4), (3, 32)):
        w.conv(f"stem.{layer}", c, 32, 3)
        w.norm(f"stem.{layer + 1}", 32)
    cs = (32, *PLANES)
    for k in range(4):
        w.conv(f"encoders.{k}.0.0", cs[k], cs[k], 2)
        w.norm(f"encoders.{k}.0.1", cs[k])
        w.block(f"encoders.{k}.1", cs[k], cs[k + 1], TORCHSPARSE)
        w.block(f"encoders.{k}.2", cs[k + 1], cs[k + 1], TORCHSPARSE)
        w.conv(f"decoders.{k}.upsample.0", cs[k + 4], cs[k + 5], 2)
        w.norm(f"decoders.{k}.upsample.1", cs[k + 5])
        w.block(f"decoders.{k}.fuse.0", cs[k + 5] + cs[3 - k], cs[k + 5], TORCHSPARSE)
        w.block(f"decoders.{k}.fuse.1", cs[k + 5], cs[k + 5], TORCHSPARSE)
    return w.state


def resnet() -> State:
    w = Writer("torchsparse")
    c = 4
    for stage, channels in enumerate((16, 32, 64, 128)):
        w.conv(f"{stage}.0.0", c, channels, 3)
        w.norm(f"{stage}.0.1", channels)
        w.block(f"{stage}.1", channels, channels, TORCHSPARSE)
        w.block(f"{stage}.2", channels, channels, TORCHSPARSE)
        c = channels
    w.conv("4.0.0", 128, 128, (1, 3, 1))
    w.norm("4.0.1", 128)
    return w.state


def second() -> State:
    w = Writer("spconv")
    w.conv("conv_input.0", 4, 16, 3)
    w.norm("conv_input.1", 16)
    c = 16
    for level, (channels, layers) in enumerate(((16, 1), (32, 3), (64, 3), (64, 3)), 1):
        for layer in range(layers):
            w.conv(f"conv{level}.{layer}.0", c, channels, 3)
            w.norm(f"conv{level}.{layer}.1", channels)
            c = channels
    w.conv("conv_out.0", 64, 128, (3, 1, 1))
    w.norm("conv_out.1", 128)
    return w.state


def vae() -> State:
    w = Writer("minkowski")
    c = (1024, 512, 256, 128, 64, 32, 16)

    def pair(key: str, first: int, c_in: int, c_out: int) -> None:
        w.conv(f"{key}.{first}", c_in, c_out, 2)
        w.norm(f"{key}.{first + 1}", c_out)
        w.conv(f"{key}.{first + 3}", c_out, c_out, 3)
        w.norm(f"{key}.{first + 4}", c_out)

    pair("block1", 0, c[0], c[0])
    pair("block1", 6, c[0], c[1])
    for b in range(2, 7):
        pair(f"block{b}", 0, c[b - 1], c[b])
    for b in range(1, 7):
        w.conv(f"block{b}_cls", c[b], 1, 1, bias=True)
    return w.state


#: Network, upstream's checkpoint, layout, key map, and where some of its keys belong.
CASES: dict[
    str, tuple[Callable[[], nn.Module], Callable[[], State], str, Callable[[str], str], dict[str, str]]
] = {
    "pointcept": (
        lambda: models.spunet(6, 20),
        pointcept,
        "spconv",
        models.pointcept_spunet,
        {
            "conv_input.0.weight": "stem.0.0.weight",
            "down.2.0.weight": "down.2.0.weight",
            "enc.3.block5.conv2.weight": "encoder.3.5.body.3.weight",
            "enc.1.block0.bn2.running_var": "encoder.1.0.body.4.running_var",
            "up.0.1.bias": "up.0.1.bias",
            "dec.0.block1.conv1.weight": "decoder.0.1.body.0.weight",
            "dec.2.block0.proj.0.weight": "decoder.2.0.shortcut.0.weight",
            "final.weight": "head.weight",
        },
    ),
    "minkunet": (
        lambda: models.minkunet("34C", 3, 20),
        minkunet,
        "minkowski",
        models.minkowski_minkunet,
        {
            "conv0p1s1.kernel": "stem.0.0.weight",
            "bn0.bn.bias": "stem.0.1.bias",
            "conv3p4s2.kernel": "down.2.0.weight",
            "bn4.bn.running_mean": "down.3.1.running_mean",
            "block2.0.downsample.0.kernel": "encoder.1.0.shortcut.0.weight",
            "block4.5.norm2.bn.weight": "encoder.3.5.body.4.weight",
            "convtr4p16s2.kernel": "up.3.0.weight",
            "bntr7.bn.weight": "up.0.1.weight",
            "block5.1.conv2.kernel": "decoder.3.1.body.3.weight",
            "block8.0.downsample.1.bn.bias": "decoder.0.0.shortcut.1.bias",
            "final.kernel": "head.weight",
            "final.bias": "head.bias",
        },
    ),
    "resunet42": (
        lambda: models.resunet42(4),
        resunet,
        "torchsparse",
        models.torchsparse_resunet,
        {
            "stem.3.kernel": "stem.1.0.weight",
            "stem.4.weight": "stem.1.1.weight",
            "encoders.1.0.0.kernel": "down.1.0.weight",
            "encoders.1.2.main.3.kernel": "encoder.1.1.body.3.weight",
            "decoders.0.upsample.0.kernel": "up.3.0.weight",
            "decoders.3.fuse.0.shortcut.0.kernel": "decoder.0.0.shortcut.0.weight",
            "decoders.2.fuse.1.main.1.running_mean": "decoder.1.1.body.1.running_mean",
        },
    ),
    "resnet21d": (
        lambda: models.ResNet21D(4),
        resnet,
        "torchsparse",
        models.torchsparse_resnet,
        {
            "0.0.0.kernel": "stages.0.0.0.weight",
            "3.2.main.4.running_var": "stages.3.2.body.4.running_var",
            "2.1.main.0.kernel": "stages.2.1.body.0.weight",
            "4.0.0.kernel": "stages.4.0.0.weight",
        },
    ),
    "second": (
        lambda: models.SECONDBackbone(4),
        second,
        "spconv",
        models.openpcdet_second,
        {
            "conv_input.0.weight": "stem.0.weight",
            "conv1.0.0.weight": "levels.0.0.0.weight",
            "conv4.2.1.running_mean": "levels.3.2.1.running_mean",
            "conv_out.0.weight": "out.0.weight",
        },
    ),
    "vae": (
        models.VAEDecoder,
        vae,
        "minkowski",
        models.minkowski_vae,
        {
            "block1.0.kernel": "levels.0.0.weight",
            "block1.9.kernel": "levels.1.3.weight",
            "block1.10.bn.bias": "levels.1.4.bias",
            "block2.0.kernel": "levels.2.0.weight",
            "block6.4.bn.weight": "levels.6.4.weight",
            "block1_cls.bias": "heads.0.bias",
            "block6_cls.kernel": "heads.5.weight",
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_of_upstream_loads_strictly(name: str) -> None:
    make, write, layout, rename, places = CASES[name]
    with torch.device("meta"):
        net = make()
    net, state = net.to_empty(device="cpu"), write()  # every value is to come from the checkpoint
    report = convert.load(net, state, layout, rename=rename)
    assert report.complete and len(report.loaded) == len(state) == len(net.state_dict())
    own = net.state_dict()
    for key, place in places.items():
        value, path = state[key], place.rpartition(".")[0]
        if value.dim() > 1 and not place.endswith("bias"):
            layer = net.get_submodule(path)
            value = convert.convert_weight(value, layout, layer.kernel_size, stride=layer.stride)
        assert torch.equal(own[place], value.reshape(own[place].shape)), key


def test_what_stands_around_a_networks_keys_is_named() -> None:
    net, state = models.SECONDBackbone(4), second()
    whole = {f"module.backbone_3d.{key}": value for key, value in state.items()}
    whole |= {"module.global_step": torch.zeros(1), "module.dense_head.conv_cls.weight": torch.zeros(2, 2)}
    for given, message in (
        (
            whole,
            r"more\. 72 of its keys fit without 'module\.backbone_3d\.' before them: take those, key\.rem",
        ),
        (
            {"epoch": 3, "optimizer_state": {"state": {}}, "model_state": whole},
            r"\. 'model_state' is a dict: is",
        ),
        (state | {"conv_out.1.extra": torch.zeros(1)}, r"nothing was loaded\. With strict=False: 72 tensors"),
        ({3: torch.zeros(1)}, r"loaded\. With strict=False: 0 tensors loaded\n72 missing .*, .* and 60 more"),
    ):
        with pytest.raises(RuntimeError, match=message) as found:
            convert.load(net, given, "spconv", rename=models.openpcdet_second)
        assert len(str(found.value)) < 1500  # to be read, not searched


@pytest.mark.parametrize("name", ["resnet21d", "second"])
def test_other_keys_are_reported(name: str) -> None:
    make, write, layout, rename, _ = CASES[name]
    state = write() | {"head.cls.weight": torch.zeros(3), "epoch": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"2 unexpected: head\.cls\.weight, epoch"):
        convert.load(make(), state, layout, rename=rename)
