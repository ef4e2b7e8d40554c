"""Grids with borders: torch's dense layers on zero-padded grids, at every site and nowhere else."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from typing import Any

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.nn import functional as dense

import voxmma
from voxmma import nn
from voxmma.sparse import derive
from voxmma.sparse.tensor import Voxels

from conftest import random_coords

GRID = (9, 8, 7)

#: kernel, stride, dilation, padding (None: the default)
SHAPES: list[tuple[Any, Any, Any, Any]] = [
    (3, 2, 1, None),
    (3, 2, 1, 0),
    (2, 2, 1, None),
    (3, 3, 1, None),
    (1, 2, 1, None),
    (4, 2, 1, 1),
    (3, 2, 2, 1),
    (3, 1, 1, None),
    (3, 1, 1, (2, 0, 1)),
    ((3, 2, 1), (2, 1, 3), (1, 2, 1), (0, 1, 0)),
    (3, 2, 1, (0, 1, 1)),
]


def scene(device: torch.device, channels: int = 4, samples: int = 2, n: int = 200) -> Voxels:
    """fp64 voxels of GRID, some at every border."""
    coords = random_coords(n, 9, samples)
    coords = coords[(coords[:, 1:] < torch.tensor(GRID, dtype=torch.int32)).all(1)]
    assert all(int(coords[:, 1 + a].min()) == 0 for a in range(3))
    assert all(int(coords[:, 1 + a].max()) == GRID[a] - 1 for a in range(3))
    feats = torch.randn(len(coords), channels, dtype=torch.float64)
    return Voxels(coords.to(device), feats.to(device), samples, spatial_shape=GRID)


def layer_of(shape: tuple[Any, ...], device: torch.device, **more: Any) -> nn.SparseConv3d:
    kernel, stride, dilation, padding = shape
    return nn.SparseConv3d(
        4,
        5,
        kernel,
        stride,
        dilation=dilation,
        padding=padding,
        generative=True,
        bias=False,
        device=device,
        dtype=torch.float64,
        **more,
    )


def dense_of(layer: nn.SparseConv3d, grid: Tensor, weight: Tensor) -> Tensor:
    """torch's layer with the weight of `layer` on (B, C, X, Y, Z)."""
    kernel = weight.view(*layer.kernel_size, *weight.shape[1:])
    options: dict[str, Any] = {
        "stride": layer.stride,
        "padding": layer.padding,
        "dilation": layer.dilation,
    }
    if layer.transposed:
        more = layer.output_padding
        return dense.conv_transpose3d(grid, kernel.permute(3, 4, 0, 1, 2), output_padding=more, **options)
    return dense.conv3d(grid, kernel.permute(4, 3, 0, 1, 2), **options)


def rows(coords: Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in coords.tolist()]


def reached(layer: nn.SparseConv3d, x: Voxels) -> list[tuple[int, ...]]:
    """Sites of the dense output that a voxel contributes to."""
    ones = x.with_feats(torch.ones(x.num_voxels, 4, dtype=torch.float64, device=x.device)).dense()
    return rows(torch.nonzero(dense_of(layer, ones, torch.ones_like(layer.weight))[:, 0] > 0.5))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_strided_and_generative_layers_are_torchs(device: torch.device, shape: Any) -> None:
    x, layer = scene(device), layer_of(shape, device)
    y = layer(x)
    want = dense_of(layer, x.dense(), layer.weight)
    assert y.spatial_shape == tuple(want.shape[2:])
    assert rows(y.coords) == reached(layer, x)
    torch.testing.assert_close(y.dense(), want)


@pytest.mark.parametrize("more", [0, 1, (1, 0, 1)], ids=str)
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[1] != 1], ids=str)
def test_transposed_layers_are_torchs(device: torch.device, shape: Any, more: Any) -> None:
    if shape[1] == (2, 1, 3):
        more = 0  # torch takes none at stride 1 without dilation
    x, layer = scene(device), layer_of(shape, device, transposed=True, output_padding=more)
    y = layer(x)
    want = dense_of(layer, x.dense(), layer.weight)
    assert y.spatial_shape == tuple(want.shape[2:])
    assert rows(y.coords) == reached(layer, x)
    torch.testing.assert_close(y.dense(), want)


@pytest.mark.parametrize("piece", [derive.CHUNK, 64])
def test_pieces_are_clipped_too(device: torch.device, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive, "CHUNK", piece)
    x, layer = scene(device), layer_of((3, 2, 1, 0), device)
    assert rows(layer(x).coords) == reached(layer, x)


def test_a_grid_too_large_for_a_bitmap(device: torch.device) -> None:
    # 2^18 cells an axis do not fit into the bitmap: 64-bit keys on a GPU
    ends = torch.tensor([0, 1, 65535, 131070, 131071])
    coords = torch.cartesian_prod(torch.arange(2), ends, ends, ends).int().to(device)
    x = voxmma.CoordSet(coords, 2, spatial_shape=131072)
    made = voxmma.output_coords(x, 3, stride=2, padding=0)
    assert made.spatial_shape == (65535,) * 3
    # o * 2 + k = v with k in 0..2 and o < 65535: 131071 is met by none
    axis = {0: [0], 1: [0], 65535: [32767], 131070: [65534], 131071: []}
    want = {(b, *site) for b, *v in coords.tolist() for site in itertools.product(*(axis[c] for c in v))}
    assert rows(made.coords) == sorted(want)
    grown = voxmma.output_coords(x, 3, generative=True)
    assert grown.spatial_shape == (131072,) * 3
    assert int(grown.coords[:, 1:].min()) == 0 and int(grown.coords[:, 1:].max()) == 131071
    assert grown.num == 2 * 9**3  # 0..2, 65534..65536 and 131069..131071 an axis


def test_no_output_is_left(device: torch.device) -> None:
    coords = torch.tensor([[0, 8, 0, 0]], dtype=torch.int32, device=device)
    x = Voxels(coords, torch.ones(1, 2, device=device), spatial_shape=(9, 2, 2))
    y = nn.SparseConv3d(2, 3, 2, 2, device=device)(x)  # the last plane of an odd grid goes
    assert y.num_voxels == 0 and y.spatial_shape == (4, 1, 1) and y.dense().shape == (1, 3, 4, 1, 1)


def test_pooling_is_clipped(device: torch.device) -> None:
    x = scene(device)
    x = x.with_feats(x.feats.abs() + 1)
    y = nn.SparseMaxPool3d(3, 2, padding=0)(x)
    want = dense.max_pool3d(x.dense(), 3, 2)
    assert y.spatial_shape == tuple(want.shape[2:])
    torch.testing.assert_close(y.dense(), want)
    s = nn.SparseSumPool3d(2)(x)
    torch.testing.assert_close(s.dense(), dense.avg_pool3d(x.dense(), 2) * 8)
    back = nn.Unpool(2)(s)
    assert back.coord_set is x.coord_set
    grown = nn.Unpool(2, generative=True)(s)
    assert grown.spatial_shape == (8, 8, 6)


def test_gradients_are_torchs(device: torch.device) -> None:
    x = scene(device)
    feats = x.feats.clone().requires_grad_()
    layer = layer_of((3, 2, 1, 0), device)
    y = layer(x.with_feats(feats))
    dy = torch.randn_like(y.feats)
    got = torch.autograd.grad(y.feats, (feats, layer.weight), dy)
    grid = dense_of(layer, x.with_feats(feats).dense(), layer.weight)
    want = torch.autograd.grad(grid, (feats, layer.weight), y.with_feats(dy).dense())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_layers_carry_the_shape(device: torch.device) -> None:
    x = scene(device)
    same = nn.SparseConv3d(4, 4, 3, device=device, dtype=torch.float64)(x)
    assert same.coord_set is x.coord_set and same.spatial_shape == GRID
    down = nn.SparseConv3d(4, 4, 3, 2, device=device, dtype=torch.float64)
    up = nn.SparseConvTranspose3d(4, 4, 3, 2, device=device, dtype=torch.float64)
    low = down(same)
    assert low.spatial_shape == (5, 4, 4)
    assert down(x).coord_set is low.coord_set  # made once
    assert up(low).coord_set is x.coord_set
    alone = Voxels(voxmma.CoordSet(low.coords, 2, (5, 4, 4)), low.feats)
    assert up(alone).spatial_shape == (9, 7, 7)
    assert (
        nn.functional.relu(low).spatial_shape
        == (low + low).spatial_shape
        == (low * 2).spatial_shape
        == (5, 4, 4)
    )
    flat = nn.SparseConv2d(4, 4, 3, 2, device=device, dtype=torch.float64)(x)
    assert flat.spatial_shape == (5, 4, 7)


def test_copies_keep_the_shape(device: torch.device) -> None:
    x = scene(device)
    low = nn.SparseConv3d(4, 4, 3, 2, device=device, dtype=torch.float64)(x).detach()
    copies = [
        pickle.loads(pickle.dumps(low)),
        copy.deepcopy(low),
        low.to("cpu"),
        low.half(),
        pytree.tree_map(torch.clone, low),
        low.with_feats(low.feats),
        voxmma.prune(low, low.coords[:, 1] > 0),
        voxmma.crop(low, 1, 3),
        voxmma.batch(voxmma.unbatch(low)),
        voxmma.collate(voxmma.unbatch(low)),
    ]
    assert [made.spatial_shape for made in copies] == [(5, 4, 4)] * len(copies)
    assert all(part.spatial_shape == (5, 4, 4) for part in voxmma.unbatch(low))
    assert pickle.loads(pickle.dumps(low)).coord_set.finer.get().spatial_shape == GRID
    assert "spatial_shape=(5, 4, 4)" in repr(low) and "spatial_shape=(5, 4, 4)" in repr(low.coord_set)
    assert voxmma.union(low, voxmma.CoordSet(low.coords, 2, (5, 4, 4))).spatial_shape == (5, 4, 4)
    again = Voxels(low.coord_set, low.feats, spatial_shape=(6, 6, 6))
    assert again.spatial_shape == (6, 6, 6) and low.spatial_shape == (5, 4, 4)
    assert low.with_spatial_shape(None).spatial_shape is None
    assert low.with_spatial_shape((5, 4, 4)).coord_set is low.coord_set


def test_without_a_shape_nothing_is_clipped(device: torch.device) -> None:
    x = scene(device)
    free = Voxels(x.coord_set, x.feats).with_spatial_shape(None)
    layer = layer_of((3, 2, 1, 0), device)
    open_grid, bounded = layer(free), layer(x)
    assert open_grid.spatial_shape is None and free.coord_set is not x.coord_set
    assert open_grid.num_voxels > bounded.num_voxels
    inside = voxmma.lookup(open_grid, bounded.coords)
    assert bool((inside >= 0).all())
    torch.testing.assert_close(open_grid.feats[inside], bounded.feats)


@pytest.mark.parametrize(
    "shape",
    [
        [9, 8, 7],
        numpy.array([9, 8, 7]),
        torch.tensor([9, 8, 7]),
        torch.Size([9, 8, 7]),
        (numpy.int64(9), 8, 7),
    ],
    ids=lambda shape: type(shape).__name__,
)
def test_what_stands_for_a_shape(device: torch.device, shape: Any) -> None:
    x = scene(device)
    assert Voxels(x.coords.clone(), x.feats, 2, spatial_shape=shape).spatial_shape == GRID
    made = x.with_spatial_shape(numpy.int64(9)).spatial_shape
    assert made == (9, 9, 9) and all(type(n) is int for n in made)


def test_dense_needs_no_shape(device: torch.device) -> None:
    coords = torch.tensor([[0, 1, 1, 1]], dtype=torch.int32, device=device)
    x = Voxels(coords, torch.ones(1, 2, device=device), spatial_shape=(5, 6, 7))
    assert x.dense().shape == (1, 2, 5, 6, 7)
    assert x.dense(origin=(1, 1, 0)).shape == (1, 2, 4, 5, 7)
    assert x.dense((2, 2, 2)).shape == (1, 2, 2, 2, 2)
    grid, mask = voxmma.to_dense(x)
    assert grid.shape[2:] == mask.shape[1:] == (5, 6, 7)


def test_downsample_keeps_the_cell_that_the_border_cuts(device: torch.device) -> None:
    x = scene(device)
    for stride in (2, (2, 3, 4), 12):
        made = voxmma.downsample(x, stride)
        step = (stride,) * 3 if isinstance(stride, int) else stride
        assert made.spatial_shape == tuple(-(-n // s) for n, s in zip(GRID, step, strict=True))
        cells = {(b, *(v // s for v, s in zip(c, step, strict=True))) for b, *c in x.coords.tolist()}
        assert rows(made.coords) == sorted(cells)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((9, 8), "spatial_shape must be an int or three of them"),
        ("9", "spatial_shape must be an int or three of them"),
        (0, "spatial_shape must be in 1..131072"),
        ((9, 8, 131073), "spatial_shape must be in 1..131072"),
        ((9, 8, 6), "coords row 3, (1, 2, 3, 6), lies outside of spatial_shape (9, 8, 6)"),
    ],
)
@pytest.mark.parametrize("duplicates", ["error", "keep", "mean"])
def test_bad_shapes_are_named(device: torch.device, shape: Any, message: str, duplicates: str) -> None:
    coords = torch.tensor([[0, 0, 0, 0], [0, 8, 7, 5], [1, 0, 0, 0], [1, 2, 3, 6]], device=device)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        Voxels(coords, torch.zeros(4, 1, device=device), spatial_shape=shape, duplicates=duplicates)
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        voxmma.CoordSet(coords).with_spatial_shape(shape)


def test_bad_outputs_are_named(device: torch.device) -> None:
    coords = torch.tensor([[0, 0, 0, 0]], device=device)
    with pytest.raises(ValueError, match=re.escape("coords row 0, (0, -1, 0, 0), lies outside")):
        Voxels(
            coords - torch.tensor([0, 1, 0, 0], device=device),
            torch.zeros(1, 1, device=device),
            spatial_shape=4,
        )
    x = Voxels(coords, torch.zeros(1, 4, device=device, dtype=torch.float64), spatial_shape=(2, 2, 2))
    with pytest.raises(
        ValueError, match=re.escape("makes a grid of (0, 0, 0) out of spatial_shape (2, 2, 2)")
    ):
        layer_of((3, 2, 1, 0), device)(x)
    wide = x.with_spatial_shape(100_000)
    with pytest.raises(ValueError, match="makes a grid of"):
        layer_of((2, 2, 1, 0), device, transposed=True)(wide)
    other = Voxels(coords.clone(), x.feats, spatial_shape=3)
    with pytest.raises(ValueError, match="cannot add voxels: spatial_shape"):
        x + other
    with pytest.raises(ValueError, match="has spatial_shape"):
        voxmma.batch([x, other])
    with pytest.raises(ValueError, match="has spatial_shape"):
        voxmma.union(x, other)
    with pytest.raises(ValueError, match="output_padding must be in"):
        nn.SparseConv3d(4, 5, 3, 2, output_padding=-1)


@pytest.mark.slow
def test_export_keeps_the_shape() -> None:
    from voxmma.export import mapped

    x = scene(torch.device("cpu"))
    net = torch.nn.Sequential(
        nn.SparseConv3d(4, 4, 3, 2, padding=0, dtype=torch.float64),
        nn.SparseConv3d(4, 4, 3, dtype=torch.float64),
    ).eval()
    with torch.no_grad():
        given = mapped.with_maps(net, (x,))
        layout = type(given[0].layout).from_json(pickle.loads(pickle.dumps(given[0].layout.to_json())))
        assert layout == given[0].layout and layout.spatial_shape == GRID
        other = scene(torch.device("cpu"), n=100)
        out = net(layout(other))
        assert out.spatial_shape == (4, 3, 3)
        torch.testing.assert_close(out.feats, net(other).feats)
        with pytest.raises(ValueError, match="spatial_shape"):
            layout(other.with_spatial_shape(20))
        run = mapped.one_graph(net, backend="eager")
        torch.testing.assert_close(run(other).feats, net(other).feats)
