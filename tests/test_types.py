"""What configurations hand over: integers and arrays of other libraries, and padding copied from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import voxmma
from voxmma import Voxels, _types
from voxmma import nn as vnn
from voxmma.nn import functional as F
from voxmma.sparse import sampling, sets

import conftest

ONE: list[Any] = [
    2,
    np.int64(2),
    np.uint8(2),
    np.array(2),
    torch.tensor(2),
    torch.tensor(2, dtype=torch.int8),
]
THREE: list[Any] = [
    (1, 2, 3),
    [1, 2, 3],
    range(1, 4),
    deque([1, 2, 3]),
    torch.Size([1, 2, 3]),
    np.array([1, 2, 3]),
    torch.tensor([1, 2, 3]),
    (np.int32(1), torch.tensor(2), 3),
]
NEITHER: list[Any] = [
    2.0,
    True,
    np.float32(2),
    np.bool_(True),
    torch.tensor(2.0),
    torch.tensor(True),
    "2",
    "222",
    None,
    {1, 2, 3},
    {1: 1, 2: 2, 3: 3},
    (1, 2, 3.0),
    (1, 2, True),
    np.array([1.0, 2.0, 3.0]),
    np.array([True, True, True]),
    torch.tensor([1.0, 2.0, 3.0]),
    np.array([[1, 2, 3]]),
    np.array([2]),
    torch.tensor([2]),
    [2, 2],
]


@pytest.mark.parametrize("value", ONE, ids=repr)
def test_fault_32_integers_of_every_library_are_integers(value: Any) -> None:
    assert _types.integer(value) == 2 and type(_types.integer(value)) is int
    made = _types.triple(value, "stride", 1, 9)
    assert made == (2, 2, 2) and all(type(v) is int for v in made)
    assert _types.planar(value, "stride") == (2, 2, 1) and _types.positive(value, "groups") == 2
    assert _types.positive_triple(value, "stride") == (2, 2, 2)


@pytest.mark.parametrize("value", THREE, ids=repr)
def test_fault_32_three_integers_come_in_any_sequence(value: Any) -> None:
    for made in (
        _types.triple(value, "stride", 1, 9),
        _types.three_integers(value, "origin"),
        _types.positive_triple(value, "stride"),
    ):
        assert made == (1, 2, 3) and type(made) is tuple and all(type(v) is int for v in made)
    assert _types.planar([value[0], value[1]], "stride") == (1, 2, 1)


@pytest.mark.parametrize("value", NEITHER, ids=repr)
def test_floats_and_bools_are_no_integers(value: Any) -> None:
    for check in (
        lambda: _types.triple(value, "stride", 1, 9),
        lambda: _types.three_integers(value, "stride"),
        lambda: _types.positive_triple(value, "stride"),
    ):
        with pytest.raises(TypeError, match="stride must be "):
            check()
    with pytest.raises(ValueError, match="groups must be a positive int"):
        _types.positive(value, "groups")
    if not isinstance(value, list):
        with pytest.raises(TypeError, match="stride must be an int or two"):
            _types.planar(value, "stride")


def test_fault_32_every_argument_takes_the_integers_of_numpy() -> None:
    """The value counts, not the type: what is kept is a plain int."""
    n = np.int64
    coords = conftest.random_coords(60, 5)
    x = Voxels(coords, torch.randn(60, 4), n(1), n(1))
    layers: list[Callable[[Any], Any]] = [
        lambda i: vnn.SparseConv3d(i(4), i(6), i(3), i(2), dilation=i(1), groups=i(2), max_voxels=i(1000)),
        lambda i: vnn.SparseConv3d(4, 6, [i(3), i(1), i(3)], padding=np.array([1, 0, 1])),
        lambda i: vnn.SparseConvTranspose3d(i(4), 6, np.array([2, 2, 2]), np.array(2), generative=True),
        lambda i: vnn.SparseConv2d(i(4), 6, torch.tensor([3, 1]), padding=torch.tensor([1, 0])),
        lambda i: vnn.SparseMaxPool3d(i(2), np.array([2, 2, 1])),
        lambda i: vnn.SparseAvgPool2d(i(3), torch.tensor(1)),
        lambda i: vnn.Unpool(i(2), generative=True, max_voxels=i(10_000)),
        lambda i: vnn.GroupNorm(i(2), i(4)),
    ]
    for make in layers:
        torch.manual_seed(0)
        theirs = make(n)
        torch.manual_seed(0)
        ours = make(int)
        assert repr(theirs) == repr(ours)
        assert torch.equal(theirs(x).feats, ours(x).feats)
    w = torch.randn(27, 4, 2)
    expected = F.spatially_sparse_conv(x, w, 3)
    for size in (n(3), np.array([3, 3, 3]), torch.tensor(3), [3, 3, 3], torch.Size([3, 3, 3])):
        assert torch.equal(F.spatially_sparse_conv(x, w, size, groups=n(1)).feats, expected.feats)
    assert type(x.batch_size) is int and x.stride == (1, 1, 1)
    assert voxmma.downsample(x, n(2)) is voxmma.downsample(x, 2)
    assert sets.crop(x, n(0), np.array([3, 3, 3])).num_voxels == sets.crop(x, 0, 3).num_voxels
    assert torch.equal(x.dense(np.array([9, 9, 9]), np.array([-2, -2, -2])), x.dense((9, 9, 9), (-2, -2, -2)))
    assert torch.equal(F.group_norm(x, n(2)).feats, F.group_norm(x, 2).feats)
    with voxmma.settings.override(pcoff_f16acc_small_ch_ceil=n(8)):
        pass


def test_a_tensor_as_an_argument_is_read_at_every_call() -> None:
    x, w = Voxels(conftest.random_coords(50, 4), torch.randn(50, 3)), torch.randn(27, 3, 2)
    dilation = torch.tensor(1)
    F.spatially_sparse_conv(x, w, 3, dilation=dilation)
    dilation.fill_(2)
    again = F.spatially_sparse_conv(x, w, 3, dilation=dilation)
    assert torch.equal(again.feats, F.spatially_sparse_conv(x, w, 3, dilation=2).feats)


def test_fault_33_numpy_arrays_are_coordinates_points_and_features() -> None:
    coords, feats = conftest.random_coords(50, 5), torch.randn(50, 3)
    x, a, f = Voxels(coords, feats), coords.numpy(), feats.numpy()
    for rows in (a, a.astype(np.int64), np.asfortranarray(a), a[::-1][::-1]):
        made = Voxels(rows, f)
        assert torch.equal(made.coords, x.coords) and torch.equal(made.feats, feats)
    backwards = Voxels(a[::-1], f[::-1])
    assert torch.equal(backwards.coords, coords.flip(0)) and torch.equal(backwards.feats, feats.flip(0))
    frozen = a.copy()
    frozen.flags.writeable = False
    assert torch.equal(voxmma.CoordSet(frozen, np.int64(1)).coords, coords)
    assert sets.lookup(x, a).tolist() == list(range(50))
    assert torch.equal(x.with_feats(f).feats, feats)
    assert sets.prune(x, np.arange(50) < 7).num_voxels == 7
    grid = Voxels.from_dense(x.dense().numpy())
    assert grid.num_voxels == 50
    layer = vnn.SparseConv3d(3, 2, 3)
    assert torch.equal(layer(x, coords=a).feats, layer(x, coords=coords).feats)

    p = torch.rand(40, 3, dtype=torch.float64)
    index = torch.randint(0, 2, (40,))
    q = torch.randn(40, 2)
    size, origin = np.array([0.3, 0.2, 0.3]), np.array([0.1, 0.0, 0.0])
    theirs = Voxels.from_points(
        p.numpy(), q.numpy(), size, batch_index=index.numpy(), batch_size=np.int64(2), origin=origin
    )
    ours = Voxels.from_points(p, q, (0.3, 0.2, 0.3), batch_index=index, batch_size=2, origin=(0.1, 0.0, 0.0))
    assert torch.equal(theirs.coords, ours.coords) and torch.equal(theirs.feats, ours.feats)
    got = sampling.devoxelise(theirs, p.numpy(), size, batch_index=index.numpy(), origin=origin)
    assert torch.equal(got, sampling.devoxelise(ours, p, size, batch_index=index, origin=(0.1, 0.0, 0.0)))
    parts = Voxels.from_points([p.numpy(), p.numpy()], [q.numpy(), q.numpy()], np.float32(0.5))
    assert torch.equal(parts.feats, Voxels.from_points([p, p], [q, q], float(np.float32(0.5))).feats)
    assert sampling.devoxelise(parts, [p.numpy(), p.numpy()], 0.5).shape == (80, 2)


def test_numpy_arrays_that_cannot_be_taken_are_named() -> None:
    f = torch.zeros(1, 4)
    with pytest.raises(TypeError, match=r"coords must be int32 or int64, got .*float64; Voxels"):
        Voxels(np.zeros((1, 4)), f)
    with pytest.raises(TypeError, match=r"coords must be int32 or int64, got .*int16"):
        Voxels(np.zeros((1, 4), np.int16), f)
    with pytest.raises(TypeError, match="coords is a numpy array that no tensor can be made of"):
        Voxels(np.full((1, 4), None), f)
    with pytest.raises(TypeError, match=r"feats must be fp16, bf16, fp32 or fp64, got .*int64"):
        Voxels(np.zeros((1, 4), np.int32), np.zeros((1, 4), np.int64))
    for size in ("0.1", None, np.array([0.1, 0.1]), True, 0.0, [0.1, 0.1, -0.1], np.array([1, 1, np.inf])):
        with pytest.raises(ValueError, match="voxel_size must be a positive number or three"):
            Voxels.from_points(torch.rand(3, 3), torch.rand(3, 1), size)
    for origin in (0.0, (0.0, 0.0), np.array([0.0, 0.0, np.nan]), "000"):
        with pytest.raises(ValueError, match="origin must be three finite numbers"):
            Voxels.from_points(torch.rand(3, 3), torch.rand(3, 1), 0.1, origin=origin)


# ---- padding -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "dilation", "padding", "usual"),
    [
        (5, 1, 1, (2, 2, 2)),
        (1, 1, 1, (0, 0, 0)),
        (3, 1, 0, (1, 1, 1)),
        (3, 2, 1, (2, 2, 2)),
        (2, 1, 1, (0, 0, 0)),
        ((1, 3, 3), 1, (1, 1, 1), (0, 1, 1)),
    ],
)
def test_fault_34_padding_does_not_shift_the_window_of_a_submanifold_layer(
    size: Any, dilation: Any, padding: Any, usual: Any
) -> None:
    """Copied from a library that ignores it there: refused with what to write. The usual one is taken."""
    x = Voxels(conftest.random_coords(50, 4), torch.randn(50, 3))
    cure = rf"padding=\(.*shifts the window of kernel_size.*write padding=\({', '.join(map(str, usual))}\)"
    w = torch.randn(vnn.SparseConv3d(3, 2, size).weight.shape)
    for call in (
        lambda p: vnn.SparseConv3d(3, 2, size, dilation=dilation, padding=p),
        lambda p: vnn.SparseConvTranspose3d(3, 2, size, dilation=dilation, padding=p),
        lambda p: vnn.SparseMaxPool3d(size, 1, dilation=dilation, padding=p),
        lambda p: F.spatially_sparse_conv(x, w, size, dilation=dilation, padding=p),
        lambda p: F.sparse_conv_transpose(x, w, size, dilation=dilation, padding=p),
        lambda p: F.avg_pool(x, size, 1, dilation=dilation, padding=p),
        lambda p: F.max_pool_with_indices(x, size, 1, dilation=dilation, padding=p),
    ):
        with pytest.raises(ValueError, match=cure):
            call(padding)
        call(usual)
    with pytest.raises(ValueError, match=r"write padding=\(1, 0, 0\)"):
        vnn.SparseConv2d(3, 2, (3, 2), padding=1)
    with pytest.raises(ValueError, match="shifts the window"):
        vnn.SparseMaxPool2d(3, 1, padding=0)


def test_a_shifted_window_can_be_asked_for() -> None:
    """Outputs that are named, a map that is made for it, and generative layers have the padding they say."""
    x = Voxels(conftest.random_coords(50, 4), torch.randn(50, 3))
    layer = vnn.SparseConv3d(3, 2, 3, padding=0, generative=True)
    named = layer(x, coords=x)
    shifted = voxmma.kernel_map(x, 3, padding=0)
    mapped = F.spatially_sparse_conv(x, layer.weight, 3, layer.bias, kernel_map=shifted)
    called = F.spatially_sparse_conv(x, layer.weight, 3, layer.bias, padding=0, coords=x)
    for y in (mapped, called):
        torch.testing.assert_close(y.feats, named.feats)
    everywhere = layer(x)
    assert everywhere.num_voxels > x.num_voxels
    torch.testing.assert_close(everywhere.feats[everywhere.coord_set.lookup(x.coords)], named.feats)
    assert F.sum_pool(x, 3, 1, padding=0, coords=x).num_voxels == x.num_voxels
    vnn.SparseConv3d(3, 2, 3, stride=(1, 1, 2), padding=0)  # not submanifold
