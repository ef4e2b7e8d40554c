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
from voxmma import Voxels, convert
from voxmma import nn as vnn

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
