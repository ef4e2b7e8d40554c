"""The one object that a call is decided by, the layers that hold it, and their arguments."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
import torch

import voxmma
from voxmma import nn
from voxmma.dispatch.config import ConvConfig, config_of
from voxmma.nn import functional as F

import conftest

LAYERS = (nn.SparseConv3d, nn.SparseConvTranspose3d, nn.SparseConv2d, nn.SparseConvTranspose2d)
POOLS = (nn.SparseMaxPool3d, nn.SparseMinPool3d, nn.SparseSumPool3d, nn.SparseAvgPool3d)
POOLS_2D = (nn.SparseMaxPool2d, nn.SparseMinPool2d, nn.SparseSumPool2d, nn.SparseAvgPool2d)
FUNCTIONS = (F.spatially_sparse_conv, F.sparse_conv_transpose, F.max_pool, F.min_pool, F.sum_pool, F.avg_pool)


def test_a_config_is_checked_once_frozen_and_a_key() -> None:
    config = ConvConfig(3, stride=2, padding=1, max_voxels=7)  # type: ignore[arg-type]
    assert config.kernel_size == (3, 3, 3) and config.stride == (2, 2, 2) and config.padding == (1, 1, 1)
    assert config.geometry == ((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)) and config.volume == 27
    assert not hasattr(config, "__dict__")
    with pytest.raises(FrozenInstanceError):
        config.groups = 2  # type: ignore[misc]
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config and hash(other) == hash(config) and {config: 1}[other] == 1
    assert config != ConvConfig((3, 3, 3), stride=(2, 2, 2), max_voxels=7)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kernel_size", 10), ("stride", 0), ("dilation", "1"), ("groups", 0), ("max_voxels", 0),
        ("use_fp16_accum", 1), ("accumulator", "fp8"), ("accumulator", "fp64"), ("compute_dtype", torch.int8),
        ("out_dtype", "fp32"), ("padding", 1.5),
    ],
)  # fmt: skip
def test_a_config_names_what_is_wrong(field: str, value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=field):
        ConvConfig(**{"kernel_size": (3, 3, 3), field: value})
    layer = nn.SparseConv3d(4, 4, 3)
    before = layer.config
    with pytest.raises((TypeError, ValueError), match=field):
        setattr(layer, field, value)
    assert layer.config is before


def test_arguments_of_other_types_do_not_find_what_others_left() -> None:
    tail = (False, False, None, None, None, None, None, "f")
    assert config_of(3, 1, 1, 1, None, *tail) is config_of(3, 1, 1, 1, None, *tail)
    for size in (True, (True, 1, 1), 1.0, (1.0, 1, 1)):
        config_of((1, 1, 1), 1, 1, 1, None, *tail)
        config_of(1, 1, 1, 1, None, *tail)
        with pytest.raises(TypeError, match="kernel_size"):
            config_of(size, 1, 1, 1, None, *tail)
    changing = torch.tensor(1)
    assert config_of(changing, 1, 1, 1, None, *tail).kernel_size == (1, 1, 1)
    changing.fill_(3)
    assert config_of(changing, 1, 1, 1, None, *tail).kernel_size == (3, 3, 3)
    assert config_of([3, 1, 3], 1, 1, 1, None, *tail).kernel_size == (3, 1, 3)


@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_settable_attributes_replace_the_config(kind: Any) -> None:
    layer = kind(4, 6, 3, accumulator="fp16")
    first, twin = layer.config, copy.deepcopy(layer)
    assert first.layer == f"{kind.__name__}(4, 6, {'3x3x1' if '2d' in kind.__name__ else '3x3x3'})"
    # one after the other, over a state in which the two contradict
    layer.use_fp16_accum, layer.accumulator = False, None
    layer.compute_dtype, layer.out_dtype = torch.float16, torch.float32
    assert layer.config != first and twin.config == first and twin.accumulator == "fp16"
    assert (layer.use_fp16_accum, layer.compute_dtype, layer.out_dtype) == (
        False,
        torch.float16,
        torch.float32,
    )
    x = voxmma.Voxels(conftest.random_coords(20, 5), torch.randn(20, 4))
    assert layer(x).dtype == torch.float32 and voxmma.explain(layer(x)).compute_dtype == torch.float16
    layer.accumulator = "fp16"
    with pytest.raises(ValueError, match="contradicts"):
        layer(x)
    assert pickle.loads(pickle.dumps(layer)).config == layer.config


def test_constructors_say_their_arguments() -> None:
    whole = inspect.signature(nn.SparseConv3d).parameters
    for kind in LAYERS:
        found = inspect.signature(kind).parameters
        assert set(whole) - set(found) == ({"transposed"} if "Transpose" in kind.__name__ else set())
        assert list(found) == [name for name in whole if name in found]
        assert {name: p.default for name, p in found.items()}.items() <= {
            name: p.default for name, p in whole.items()
        }.items()
        assert ("2d" in str(found["padding"].annotation)) == ("2d" in kind.__name__)
    with pytest.raises(TypeError, match="transposed"):
        nn.SparseConvTranspose3d(4, 4, 3, transposed=False)
    with pytest.raises(TypeError, match="unexpected"):
        nn.SparseConvTranspose2d(4, 4, 3, dilatoin=2)


def test_fault_61_what_follows_stride_goes_by_keyword() -> None:
    """The fifth argument is `padding` in torch and spconv."""
    for kind in (*LAYERS, *POOLS, *POOLS_2D):
        names = list(inspect.signature(kind).parameters)
        positional = names[: names.index("stride") + 1]
        with pytest.raises(TypeError, match="positional"):
            kind(*([4, 4, 3, 1] if "Conv" in kind.__name__ else [3, 1]), 1)
        for name, p in inspect.signature(kind).parameters.items():
            assert (p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD)) == (name not in positional), (kind, name)
    for function in FUNCTIONS:
        parameters = list(inspect.signature(function).parameters.values())
        after = parameters[[p.name for p in parameters].index("stride") + 1 :]
        assert all(p.kind in (p.KEYWORD_ONLY, p.VAR_KEYWORD) for p in after), function
    with pytest.raises(TypeError, match="positional"):
        voxmma.kernel_map(voxmma.CoordSet(conftest.random_coords(5, 5)), 3, 2)  # type: ignore[misc]


# ---- state dicts -------------------------------------------------------------------------------------------


def test_fault_62_weights_of_another_axis_do_not_load() -> None:
    flat, upright = (torch.nn.Sequential(nn.SparseConv3d(4, 4, size)) for size in ((3, 3, 1), (1, 3, 3)))
    before = {name: value.clone() for name, value in upright.state_dict().items()}
    file = io.BytesIO()
    torch.save(flat.state_dict(), file)
    file.seek(0)
    stored = torch.load(file, weights_only=True)
    for state in (flat.state_dict(), stored):
        with pytest.raises(RuntimeError, match=r"0\.weight was saved by a layer of kernel_size=\(3, 3, 1\)"):
            upright.load_state_dict(state)
        assert all(torch.equal(before[name], value) for name, value in upright.state_dict().items())
        torch.nn.Sequential(nn.SparseConv3d(4, 4, (3, 3, 1))).load_state_dict(state)
        torch.nn.Sequential(nn.SparseConv2d(4, 4, 3)).load_state_dict(state)
    upright.load_state_dict(dict(stored))  # no metadata: older files, safetensors
    assert torch.equal(upright[0].weight, flat[0].weight)
    assert list(stored) == ["0.weight", "0.bias"]


# ---- Voxels ------------------------------------------------------------------------------------------------


def test_arithmetic_with_numbers_keeps_the_coordinates(device: torch.device) -> None:
    feats = torch.randn(20, 4, device=device, requires_grad=True)
    x = voxmma.Voxels(conftest.random_coords(20, 5).to(device), feats, stride=2)
    for y, want in (
        (x * 2, feats * 2), (2 * x, feats * 2), (x + 1, feats + 1), (1 + x, feats + 1), (-x, -feats),
        (x / 2, feats / 2), (x - 1, feats - 1), (1 - x, 1 - feats),
    ):  # fmt: skip
        assert torch.equal(y.feats, want) and y.coord_set is x.coord_set and y.stride == x.stride
    assert torch.equal(sum([x, x]).feats, feats + feats)  # type: ignore[union-attr]
    for wrong in (True, "2", None, feats):
        with pytest.raises(TypeError):
            x * wrong  # type: ignore[operator]
    assert len(x) == 20 and x.channels == 4 and x.requires_grad
    y = x.detach()
    assert not y.requires_grad and y.coord_set is x.coord_set and y.feats.data_ptr() == feats.data_ptr()
    assert voxmma.Voxels(x.coords[:0], feats[:0]), "voxels without voxels are still voxels"


# ---- explain -----------------------------------------------------------------------------------------------


def test_explain_follows_norms_and_activations(device: torch.device) -> None:
    x = voxmma.Voxels(conftest.random_coords(20, 5).to(device), torch.randn(20, 4, device=device))
    conv = nn.SparseConv3d(4, 4, 3)
    net = nn.Sequential(conv, nn.BatchNorm(4), nn.ReLU(), torch.nn.SiLU(), torch.nn.LayerNorm(4)).to(device)
    own = voxmma.explain(conv(x))
    for _ in range(2):
        y = F.relu(net(x) * 2 + 1)
        record = voxmma.explain(y)
        steps = [name.removesuffix(" (fused)") for name in record.applied]
        assert steps == ["BatchNorm", "ReLU", "SiLU", "LayerNorm", "* 2", "+ 1", "relu"]
        assert (record.layer, record.tile) == (own.layer, own.tile) and own.applied == ()
        assert str(record) == f"{own}; then {', '.join(record.applied)}"
    grouped = voxmma.explain(nn.GroupNorm(2, 4).to(device)(conv(x)).detach())
    assert grouped.applied == ("group_norm(2)",)
    again = voxmma.explain(conv(nn.ReLU()(conv(x))))
    assert again.applied == ()
    for z in (
        y + y,
        F.cat(y, y),
        y.with_feats(y.feats),
        nn.SparseMaxPool3d(2)(y),
        nn.Linear(4, 4).to(device)(y),
    ):
        with pytest.raises(ValueError, match=r"no record: .*start anew"):
            voxmma.explain(z)
