"""Weights of other libraries: every layout, written out one by one, and loading that hides nothing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import voxmma
from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.compat import convert

import conftest

Position = tuple[int, int, int]

#: What each library stores for the weight from input i to output o at kernel position p of kernel size k, as
#: an index into its tensor of C_in = ci, C_out = co. Written out one by one, without the library's table.
STORED: dict[str, Callable[..., tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "voxmma": lambda k, ci, co, p, i, o: ((k[0] * k[1] * k[2], ci, co), (last_fastest(k, p), i, o)),
    "warpconvnet": lambda k, ci, co, p, i, o: ((k[0] * k[1] * k[2], ci, co), (last_fastest(k, p), i, o)),
    "spconv": lambda k, ci, co, p, i, o: ((co, *k, ci), (o, *p, i)),
    "flexgemm": lambda k, ci, co, p, i, o: ((co, *k, ci), (o, *p, i)),
    "spconv1": lambda k, ci, co, p, i, o: ((*k, ci, co), (*p, i, o)),
    "mmcv": lambda k, ci, co, p, i, o: ((*k, ci, co), (*p, i, o)),
    "spconv2.1": lambda k, ci, co, p, i, o: ((*k, co, ci), (*p, o, i)),
    "torch": lambda k, ci, co, p, i, o: ((co, ci, *k), (o, i, *p)),
    "fvdb": lambda k, ci, co, p, i, o: ((co, ci, *k), (o, i, *p)),
    "torch_transposed": lambda k, ci, co, p, i, o: ((ci, co, *k), (i, o, *p)),
    "minkowski": lambda k, ci, co, p, i, o: ((k[0] * k[1] * k[2], ci, co), (first_fastest(k, p), i, o)),
    "torchsparse": lambda k, ci, co, p, i, o: (
        (k[0] * k[1] * k[2], ci, co),
        ((first_fastest if k[0] * k[1] * k[2] % 2 else last_fastest)(k, p), i, o),
    ),
}


def last_fastest(k: Position, p: Position) -> int:
    return (p[0] * k[1] + p[1]) * k[2] + p[2]


def first_fastest(k: Position, p: Position) -> int:
    return (p[2] * k[1] + p[1]) * k[0] + p[0]


def test_every_layout_is_tested() -> None:
    assert STORED.keys() == convert.LAYOUTS.keys()


@pytest.mark.parametrize("size", [(3, 3, 3), (2, 2, 2), (1, 3, 5), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("layout", STORED)
def test_one_hot_weights_of_every_layout(layout: str, size: Position) -> None:
    """A single 1 at every kernel position, input and output comes out at ours."""
    ci, co = 2, 3
    for p in itertools.product(*map(range, size)):
        for i, o in itertools.product(range(ci), range(co)):
            shape, place = STORED[layout](size, ci, co, p, i, o)
            stored = torch.zeros(shape)
            stored[place] = 1
            made = convert.convert_weight(stored, layout, size)
            assert made.shape == (size[0] * size[1] * size[2], ci, co) and made.is_contiguous()
            assert made[last_fastest(size, p), i, o] == 1 and made.sum() == 1


@pytest.mark.parametrize("layout", STORED)
def test_fault_02_pointwise_weights_of_every_layout(layout: str) -> None:
    """k = 1, 4 -> 5 channels: the layer computes what its library computed, whichever way it was stored."""
    w = torch.randn(4, 5)
    stored = torch.zeros(STORED[layout]((1, 1, 1), 4, 5, (0, 0, 0), 0, 0)[0])
    for i, o in itertools.product(range(4), range(5)):
        stored[STORED[layout]((1, 1, 1), 4, 5, (0, 0, 0), i, o)[1]] = w[i, o]
    expected = w
    if layout == "spconv":  # its 1x1 layers read the memory of that tensor as (C_in, C_out)
        expected = stored.reshape(4, 5)
        assert not torch.equal(expected, w)
    assert torch.equal(convert.convert_weight(stored, layout, 1), expected[None])
    if layout in ("minkowski", "torchsparse", "warpconvnet"):  # and without the axis of kernel positions
        assert torch.equal(convert.convert_weight(w, layout, 1), w[None])
    layer = vnn.SparseConv3d(4, 5, 1, bias=False)
    convert.load(layer, {"weight": stored}, layout)
    x = Voxels(conftest.random_coords(10, 3), torch.randn(10, 4))
    torch.testing.assert_close(layer(x).feats, x.feats @ expected)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("size", [(3, 3, 3), (1, 3, 5)], ids=str)
def test_dense_convolution_with_torchs_weights(device: torch.device, size: Position, groups: int) -> None:
    reference = torch.nn.Conv3d(4, 6, size, padding=tuple(k // 2 for k in size), groups=groups).double()
    layer = vnn.SparseConv3d(4, 6, size, groups=groups, device=device, dtype=torch.float64)
    report = convert.load(layer, reference.state_dict(), "torch")
    assert report.complete and set(report.loaded) == {"weight", "bias"}
    x = Voxels.from_dense(torch.randn(2, 4, 4, 5, 6, dtype=torch.float64).to(device))
    torch.testing.assert_close(layer(x).dense().cpu(), reference(x.dense().cpu()))


@pytest.mark.parametrize("groups", [1, 2])
def test_transposed_convolution_weights(groups: int) -> None:
    """out[i * s + k] += x[i] @ w[k], checked against torch at stride = kernel size."""
    x, w = torch.randn(1, 4, 3, 3, 3), torch.randn(4, 6 // groups, 2, 2, 2)
    ours = convert.convert_weight(w, "torch_transposed", 2, groups)
    assert ours.shape == ((8, 4, 6) if groups == 1 else (8, 2, 2, 3))
    y = F.conv_transpose3d(x, w, stride=2, groups=groups)
    for k, (a, b, c) in enumerate(itertools.product((0, 1), repeat=3)):
        split = x[0].unflatten(0, (groups, -1))
        part = torch.einsum("gixyz,gio->goxyz", split, ours[k].reshape(groups, 4 // groups, 6 // groups))
        torch.testing.assert_close(y[0, :, a::2, b::2, c::2], part.flatten(0, 1), rtol=1e-4, atol=1e-5)


def test_wrong_weights_are_refused() -> None:
    cases: list[tuple[Any, str, Any, str]] = [
        (torch.zeros(27, 2, 3), "keras", 3, "layout must be one of voxmma, spconv"),
        (torch.zeros(27, 2, 3), "spconv", 3, r"weight \(27, 2, 3\) is not of layout 'spconv'"),
        (torch.zeros(8, 2, 3), "minkowski", 3, r"\(8, 2, 3\) is not of layout 'minkowski'"),
        (torch.zeros(3, 5, 1, 1, 1), "spconv", (1, 3, 5), "is not of layout"),
        (torch.zeros(3), "torch", 1, "is not of layout"),
    ]
    for weight, layout, size, message in cases:
        with pytest.raises(ValueError, match=message):
            convert.convert_weight(weight, layout, size)


# ---- checkpoints -------------------------------------------------------------------------------------------


def network() -> vnn.Sequential:
    return vnn.Sequential(vnn.SparseConv3d(2, 3, 3), vnn.BatchNorm(3), vnn.ReLU(), vnn.SparseConv3d(3, 4, 2))


def test_fault_01_keys_that_differ_are_not_passed_over() -> None:
    """Every way a checkpoint can fail to reach a layer is an error, or with strict=False a warning that names
    it; a failed strict load leaves the model alone."""
    source = {
        k: torch.randn_like(v) if v.is_floating_point() else v for k, v in network().state_dict().items()
    }
    swapped = {"0.weight": "3.weight", "3.weight": "0.weight"}
    broken: dict[str, tuple[dict[str, Tensor], list[str]]] = {
        "renamed": ({k.replace("0.", "conv.", 1): v for k, v in source.items()}, ["0.weight", "conv.weight"]),
        "left out": ({k: v for k, v in source.items() if k != "3.weight"}, ["3.weight"]),
        "swapped": ({swapped.get(k, k): v for k, v in source.items()}, ["0.weight", "3.weight"]),
        "one more": ({**source, "4.weight": torch.zeros(1)}, ["4.weight"]),
        "empty": ({}, list(source)),
    }
    for name, (checkpoint, keys) in broken.items():
        model = network()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(RuntimeError, match="nothing was loaded") as error:
            convert.load(model, checkpoint, "voxmma")
        assert all(key in str(error.value) for key in keys), name
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        with pytest.warns(UserWarning, match="loaded in part") as caught:
            report = convert.load(model, checkpoint, "voxmma", strict=False)
        assert all(key in str(caught[0].message) for key in keys) and not report.complete
        for key, value in model.state_dict().items():  # what was reported as loaded was, and nothing else
            assert torch.equal(value, source[key] if key in report.loaded else before[key])
        with pytest.raises(RuntimeError, match=r"Missing key|Unexpected key|size mismatch"):
            model.load_state_dict(checkpoint)  # torch's own strict load agrees
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = network()
        assert convert.load(model, source, "voxmma").complete
    assert all(torch.equal(v, source[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("layout", STORED)
def test_a_checkpoint_of_every_library_loads(layout: str) -> None:
    """Random networks stored the library's way compute the same afterwards, keys and bias shapes mapped."""
    source, target = network(), network()
    checkpoint = {}
    for key, value in source.state_dict().items():
        name = key.replace("0.", "stem.conv.", 1) if key.startswith("0.") else f"head.{key}"
        if value.dim() == 3:
            size = source[int(key[0])].kernel_size
            ci, co = value.shape[1:]
            stored = torch.zeros(STORED[layout](size, ci, co, (0, 0, 0), 0, 0)[0])
            for p in itertools.product(*map(range, size)):
                for i, o in itertools.product(range(ci), range(co)):
                    stored[STORED[layout](size, ci, co, p, i, o)[1]] = value[last_fastest(size, p), i, o]
            value = stored
            if layout in ("minkowski", "torchsparse"):
                name = name.replace("weight", "kernel")
        elif layout == "minkowski" and key in ("0.bias", "3.bias"):
            value = value[None]
        checkpoint[name] = value
    report = convert.load(target, checkpoint, layout, rename={"stem.conv": "0", "head": ""})
    assert report.complete and len(report.loaded) == len(checkpoint)
    x = Voxels(conftest.random_coords(30, 4), torch.randn(30, 2))
    assert torch.equal(source.eval()(x).feats, target.eval()(x).feats)
    with pytest.raises(ValueError, match="two keys of the checkpoint become"):
        convert.load(target, checkpoint, layout, rename=lambda key: "0.weight")
    with pytest.raises(ValueError, match="layout must be"):
        voxmma.convert.load(target, checkpoint, "keras")


# ---- which tensors are weights -----------------------------------------------------------------------------


def stored_as(layout: str, weight: Tensor, size: Position) -> Tensor:
    """Our weight (K, C_in, C_out) as the library stores it, element by element."""
    ci, co = weight.shape[1:]
    stored = torch.zeros(STORED[layout](size, ci, co, (0, 0, 0), 0, 0)[0], dtype=weight.dtype)
    for p in itertools.product(*map(range, size)):
        for i, o in itertools.product(range(ci), range(co)):
            stored[STORED[layout](size, ci, co, p, i, o)[1]] = weight[last_fastest(size, p), i, o]
    return stored


class Own(vnn.SparseConv3d):
    """A layer of one's own."""


class Own2d(vnn.SparseConv2d):
    """Another."""


@pytest.mark.parametrize("layout", STORED)
def test_fault_35_weights_of_subclasses_are_converted(layout: str) -> None:
    for layer in (Own(2, 3, 3), Own2d(2, 3, (3, 2))):
        size = layer.kernel_size
        w, b = torch.randn(layer.weight.shape), torch.randn(3)
        checkpoint = {"weight": stored_as(layout, w, size), "bias": b}
        assert convert.load(layer, checkpoint, layout).complete
        assert torch.equal(layer.weight, w) and torch.equal(layer.bias, b)


def test_fault_35_a_weight_is_known_by_itself_not_by_its_name() -> None:
    """A layer that stands in two places, or that a wrapper renames in its state_dict, is converted too."""

    class Renamed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Own(2, 3, 3, bias=False)
            self._register_state_dict_hook(self.rename)

        @staticmethod
        def rename(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
            state[prefix + "weight"] = state.pop(prefix + "inner.weight")

        def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
            state[prefix + "inner.weight"] = state.pop(prefix + "weight")
            super()._load_from_state_dict(state, prefix, *rest)

    w = torch.randn(27, 2, 3)
    stored = stored_as("minkowski", w, (3, 3, 3))
    model = torch.nn.ModuleDict({"a": Renamed()})
    assert convert.load(model, {"a.kernel": stored}, "minkowski").complete
    assert torch.equal(model["a"].inner.weight, w)
    shared = Own(2, 3, 3, bias=False)
    model = torch.nn.ModuleDict({"a": shared, "b": shared})
    assert convert.load(model, {"a.kernel": stored, "b.kernel": stored}, "minkowski").complete
    assert torch.equal(shared.weight, w)


def test_fault_35_a_parametrized_weight_is_not_loaded_in_another_order() -> None:
    for wrap in (torch.nn.utils.parametrizations.orthogonal, torch.nn.utils.parametrizations.weight_norm):
        layer = vnn.SparseConv3d(2, 3, 3)
        wrap(layer)
        checkpoint = {key: torch.randn_like(value) for key, value in layer.state_dict().items()}
        with pytest.raises(RuntimeError, match="remove parametrizations first"):
            convert.load(layer, checkpoint, "torchsparse")
        assert convert.load(layer, checkpoint, "voxmma").complete


def test_other_names_of_a_weight_belong_to_their_libraries() -> None:
    layer = vnn.SparseConv3d(2, 3, 3, bias=False)
    for layout in STORED:
        checkpoint = {"kernel": stored_as(layout, torch.randn(27, 2, 3), (3, 3, 3))}
        if layout in ("minkowski", "torchsparse"):
            assert convert.load(layer, checkpoint, layout).loaded == ["weight"]
        else:
            with pytest.raises(RuntimeError, match="1 unexpected: kernel"):
                convert.load(layer, checkpoint, layout)


def test_a_layout_that_cannot_be_is_named_with_those_that_can() -> None:
    layer = vnn.SparseConv3d(4, 8, 3, bias=False)
    before = layer.weight.detach().clone()
    for shape, layout, fits in (
        ((8, 3, 3, 3, 4), "mmcv", "spconv, flexgemm"),
        ((27, 4, 8), "spconv", "voxmma, spconv1, mmcv, warpconvnet, minkowski, torchsparse"),
        ((8, 4, 3, 3, 3), "minkowski", "torch, fvdb"),
        ((4, 8, 3, 3, 3), "torch", "torch_transposed"),
        ((27, 8, 4), "voxmma", "spconv2.1"),
        ((8, 5, 3, 3, 3), "torch", "no layout"),
    ):
        with pytest.raises(RuntimeError, match=rf"layout '{layout}'.* its shape is that of {fits}$"):
            convert.load(layer, {"weight": torch.zeros(shape)}, layout)
    assert torch.equal(layer.weight, before)
    with pytest.raises(ValueError, match="has no 2 groups"):
        convert.convert_weight(torch.zeros(27, 2, 3), "voxmma", 3, 2)


def test_one_torch_checkpoint_with_both_kinds_of_layers() -> None:
    """Equal channels, where the shape does not tell one kind from the other."""
    dense = torch.nn.ModuleDict(
        {"down": torch.nn.Conv3d(4, 4, 2, 2), "up": torch.nn.ConvTranspose3d(4, 4, 2, 2)}
    )
    model = torch.nn.ModuleDict(
        {"down": vnn.SparseConv3d(4, 4, 2, 2), "up": vnn.SparseConvTranspose3d(4, 4, 2, 2)}
    )
    convert.load(model, dense.state_dict(), "torch")
    x = Voxels.from_dense(torch.randn(1, 4, 4, 4, 6))
    y = dense["up"](dense["down"](x.dense()))
    torch.testing.assert_close(model["up"](model["down"](x)).dense(), y, rtol=1e-4, atol=1e-5)


# ---- dimensions and columns --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(3, 3, 1), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("layout", STORED)
def test_fault_36_two_dimensional_layers_of_every_layout(layout: str, size: Position) -> None:
    w = torch.randn(size[0] * size[1], 2, 3)
    stored = stored_as(layout, w, size)
    if stored.dim() == 5:  # the library's 2-D layers have two kernel axes
        stored = stored.squeeze(stored.shape.index(1))
    for layer in (vnn.SparseConv2d(2, 3, size[:2], bias=False), vnn.SparseConv3d(2, 3, size, bias=False)):
        assert convert.load(layer, {"weight": stored}, layout).complete
        assert torch.equal(layer.weight, w)


def test_two_dimensional_convolution_with_torchs_weights() -> None:
    reference = torch.nn.Conv2d(3, 4, (3, 5), padding=(1, 2))
    layer = vnn.SparseConv2d(3, 4, (3, 5))
    assert convert.load(layer, reference.state_dict(), "torch").complete
    image = torch.randn(1, 3, 5, 6)
    y = layer(Voxels.from_dense(image.unsqueeze(-1))).dense().squeeze(-1)
    torch.testing.assert_close(y, reference(image), rtol=1e-4, atol=1e-5)


def test_fault_36_norms_with_a_leading_axis() -> None:
    model = torch.nn.ModuleDict(
        {"i": vnn.InstanceNorm(8, affine=True), "b": vnn.BatchNorm(8), "t": torch.nn.BatchNorm1d(8)}
    )
    flat = {k: torch.rand_like(v) if v.is_floating_point() else v + 3 for k, v in model.state_dict().items()}
    checkpoint = {k: v[None] if v.dim() else v for k, v in flat.items()}
    assert convert.load(model, checkpoint, "minkowski").complete
    assert all(torch.equal(v, flat[k]) for k, v in model.state_dict().items())
    with pytest.raises(RuntimeError, match=r"i.bias: shape \(1, 8\), the model has \(8,\)"):
        convert.load(model, checkpoint, "spconv")
    with pytest.raises(RuntimeError, match=r"i.bias: shape \(2, 4\), the model has \(8,\)"):
        convert.load(model, {**flat, "i.bias": torch.zeros(2, 4)}, "minkowski")


@pytest.mark.parametrize("size", [(3, 3, 3), (2, 2, 2), (1, 3, 5), (2, 3, 4), (1, 1, 3), (3, 2, 1)], ids=str)
@pytest.mark.parametrize("layout", STORED)
def test_fault_37_checkpoints_whose_columns_were_zyx(layout: str, size: Position) -> None:
    """Columns kept: their numbers. Columns turned round and axes='zyx': the same numbers."""
    z, y, x = size
    kept, turned = vnn.SparseConv3d(2, 3, (z, y, x)), vnn.SparseConv3d(2, 3, (x, y, z))
    checkpoint = {"weight": stored_as(layout, torch.randn(z * y * x, 2, 3), size), "bias": torch.randn(3)}
    convert.load(kept, checkpoint, layout)
    convert.load(turned, checkpoint, layout, axes="zyx")
    zyx, feats = conftest.random_coords(60, 5, batch=2), torch.randn(60, 2)
    theirs, ours = kept(Voxels(zyx, feats)), turned(Voxels(zyx[:, [0, 3, 2, 1]], feats))
    torch.testing.assert_close(ours.feats, theirs.feats)
    if checkpoint["weight"].dim() == 5 and size != size[::-1]:  # kernel axes that were not turned round
        with pytest.raises(RuntimeError, match="does not fit"):
            convert.load(vnn.SparseConv3d(2, 3, size), checkpoint, layout, axes="zyx")


def test_columns_of_two_dimensional_layers() -> None:
    yx, feats = conftest.random_coords(60, 9)[:, :3], torch.randn(60, 2)
    plane = torch.zeros(60, 1, dtype=torch.int32)
    rows = torch.unique(torch.cat([yx, plane], 1), dim=0)
    feats = feats[: len(rows)]
    w = torch.randn(3, 3, 2, 2)
    kept, turned = vnn.SparseConv2d(2, 3, (3, 2), bias=False), vnn.SparseConv2d(2, 3, (2, 3), bias=False)
    convert.load(kept, {"weight": w}, "spconv")
    convert.load(turned, {"weight": w}, "spconv", axes="zyx")
    torch.testing.assert_close(
        turned(Voxels(rows[:, [0, 2, 1, 3]], feats)).feats, kept(Voxels(rows, feats)).feats
    )
    for axes in ("", "xy", "xyzz", "abc"):
        with pytest.raises(ValueError, match="axes must be"):
            convert.load(kept, {}, "spconv", axes=axes)


def test_fault_39_pointwise_weights_by_kind_of_layer() -> None:
    """spconv: `x @ weight.view(C_in, C_out)` at stride 1, by shape (C_out, ..., C_in) at another stride."""
    stored = torch.randn(5, 1, 1, 1, 4)
    memory, shape = stored.reshape(4, 5), stored.reshape(5, 4).t()
    for layer, expected in (
        (vnn.SparseConv3d(4, 5, 1, bias=False), memory),
        (vnn.SparseConv3d(4, 5, 1, generative=True, bias=False), memory),
        (vnn.SparseConv3d(4, 5, 1, 2, bias=False), shape),
        (vnn.SparseConv3d(4, 5, 1, (1, 1, 2), bias=False), shape),
        (vnn.SparseConvTranspose3d(4, 5, 1, 2, bias=False), shape),
        (vnn.SparseConv2d(4, 5, 1, bias=False), memory),
        (vnn.SparseConv2d(4, 5, 1, 2, bias=False), shape),
    ):
        weight = stored[..., 0, :] if isinstance(layer, vnn.SparseConv2d) else stored
        convert.load(layer, {"weight": weight}, "spconv")
        assert torch.equal(layer.weight[0], expected)
        for flat in (True, False):
            convert.load(layer, {"weight": weight}, "spconv", flat_1x1=flat)
            assert torch.equal(layer.weight[0], memory if flat else shape)
    model = torch.nn.ModuleDict({"a": vnn.SparseConv3d(4, 5, 1), "b": vnn.SparseConv3d(4, 5, 1)})
    checkpoint = {
        f"{k}.{leaf}": v for k in "ab" for leaf, v in (("weight", stored), ("bias", torch.zeros(5)))
    }
    convert.load(model, checkpoint, "spconv", flat_1x1={"b": False})
    assert torch.equal(model["a"].weight[0], memory) and torch.equal(model["b"].weight[0], shape)
    with pytest.raises(ValueError, match="flat_1x1 names 'c'"):
        convert.load(model, checkpoint, "spconv", flat_1x1={"c": False})
    with pytest.raises(ValueError, match="flat_1x1 goes with layout 'spconv'"):
        convert.load(model, checkpoint, "flexgemm", flat_1x1=True)


# ---- what is in a file -------------------------------------------------------------------------------------


def test_fault_38_what_is_no_weight_is_named() -> None:
    source = network().state_dict()
    w = source["0.weight"]
    wrong: list[tuple[str, Any, str]] = [
        ("epoch", 3, "1 unexpected: epoch"),
        ("state_dict", dict(source), "1 unexpected: state_dict\n?.*'state_dict' is a dict"),
        ("note", "text", "1 unexpected: note"),
        ("optimizer", None, "1 unexpected: optimizer"),
        (7, torch.zeros(1), "1 unexpected: 7"),
        ("0.bias", None, "0.bias: a NoneType, not a tensor"),
        ("0.weight", [1.0], "0.weight: a list, not a tensor"),
        ("0.weight", w.to(torch.complex64), "0.weight: complex"),
        ("0.bias", source["0.bias"].to(torch.complex64), "0.bias: complex"),
        ("0.weight", w.to("meta"), "0.weight: a tensor on the meta device"),
        ("0.weight", w.to_sparse(), r"0.weight: a sparse tensor \(torch.sparse_coo\): .to_dense"),
        ("1.weight", source["1.weight"].to_sparse(), r"1.weight: a sparse tensor"),
        ("0.weight", torch.zeros(w.shape, dtype=torch.int8), "0.weight: torch.int8, the model has"),
        ("1.bias", torch.zeros(3, dtype=torch.bool), "1.bias: torch.bool, the model has"),
    ]
    for key, value, message in wrong:
        model = network()
        before = {k: v.clone() for k, v in model.state_dict().items()}
        with pytest.raises(RuntimeError, match=message):
            convert.load(model, {**source, key: value}, "voxmma")
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
        with pytest.warns(UserWarning, match="loaded in part"):
            report = convert.load(model, {**source, key: value}, "voxmma", strict=False)
        assert not report.complete and key not in report.loaded
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name] if name == key else source[name])
    with pytest.raises(RuntimeError, match="the model's is on the meta device"):
        convert.load(network().to("meta"), source, "voxmma")
    with pytest.raises(RuntimeError, match="no shape yet"):
        convert.load(torch.nn.LazyLinear(3), torch.nn.Linear(2, 3).state_dict(), "voxmma")
    with pytest.raises(TypeError, match="state_dict must be a dict"):
        convert.load(network(), [source], "voxmma")  # type: ignore[arg-type]
    half = {k: v.double() if v.is_floating_point() else v.float() for k, v in source.items()}
    assert convert.load(network(), half, "voxmma").complete  # another width is converted


class Fails(torch.nn.Module):
    """Refuses to be loaded, after the modules before it were."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))

    def _load_from_state_dict(self, *_: Any) -> None:
        raise KeyError("refused")


class Counts(torch.nn.Module):
    """Has a state that is no tensor."""

    state = 0

    def get_extra_state(self) -> int:
        return self.state

    def set_extra_state(self, state: int) -> None:
        self.state = state


@pytest.mark.parametrize("strict", [True, False])
def test_fault_38_a_load_that_raises_changes_nothing(strict: bool) -> None:
    with torch.inference_mode():
        frozen = torch.nn.Linear(2, 2)  # its parameters take no copy outside
    for last, error in ((Fails(), KeyError), (frozen, RuntimeError)):
        model = torch.nn.Sequential(vnn.SparseConv3d(2, 3, 3), vnn.BatchNorm(3), Counts(), last)
        before = {k: v.clone() for k, v in model.state_dict().items() if isinstance(v, Tensor)}
        checkpoint: dict[str, Any] = {k: v + 1 for k, v in before.items()}
        with pytest.raises(error):
            convert.load(model, {**checkpoint, "2._extra_state": 5}, "voxmma", strict=strict)
        assert all(torch.equal(model.state_dict()[k], v) for k, v in before.items())
        assert model[2].state == 0
        model = model[:3]
        checkpoint = {k: v for k, v in checkpoint.items() if k[0] != "3"}
        assert convert.load(model, {**checkpoint, "2._extra_state": 5}, "voxmma").complete
        assert model[2].state == 5
