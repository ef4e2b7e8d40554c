"""voxmma.compat.spconv: small networks written against spconv's interface, compared in fp64 with dense grids
that follow its rules, and what upstream code relies on beside the numbers."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import voxmma
from voxmma import compat
from voxmma.compat import spconv as package
from voxmma.compat.spconv import options
from voxmma.compat.spconv import pytorch as spconv

from spconv_networks import LIMITS, networks, scene, sparse_cat, start

# ---- spconv's rules on dense grids -----------------------------------------------------------------------


@dataclass
class Grid:
    """(B, C, *shape) values, zero where `mask` (B, *shape) is False; `maps`: what layers left under their
    keys."""

    values: torch.Tensor
    mask: torch.Tensor
    maps: dict[Any, Any] = field(default_factory=dict)

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.mask.unsqueeze(1)

    def rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Grid:
        """A function of (N, C) on the voxels."""
        cells = self.mask.nonzero(as_tuple=True)
        made = function(self.values.movedim(1, -1)[cells])
        grid = made.new_zeros(*self.mask.shape, made.shape[1]).index_put(cells, made)
        return Grid(grid.movedim(-1, 1), self.mask, self.maps)


def dense_kernel(layer: Any) -> torch.Tensor:
    """(O, I, *k) of a layer's (O, *k, I); pointwise layers read memory as (I, O)."""
    weight = layer.weight
    if layer.conv1x1:
        flat = weight.reshape(layer.in_channels, layer.out_channels).t()
        return flat.reshape(*flat.shape, *[1] * layer.ndim)
    return weight.movedim(-1, 1)


def dense_conv(layer: Any, x: Grid) -> Grid:
    conv = getattr(F, f"conv{layer.ndim}d")
    back = getattr(F, f"conv_transpose{layer.ndim}d")
    weight = dense_kernel(layer)
    ones = torch.ones(1, 1, *layer.kernel_size, dtype=x.values.dtype, device=x.values.device)
    seen = x.mask.unsqueeze(1).to(x.values.dtype)
    window = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    maps = dict(x.maps)
    if layer.subm or layer.conv1x1:
        pad = [k // 2 * d for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        values, mask = conv(x.values, weight, padding=pad, dilation=layer.dilation), x.mask
    elif layer.inverse:
        window, mask = x.maps[layer.indice_key]
        whole = {**window, "padding": 0}
        far = list(itertools.chain(*([0, n] for n in reversed(mask.shape[1:]))))
        values = F.pad(back(x.values, weight.transpose(0, 1), **whole), far)
        cut = zip(window["padding"], mask.shape[1:], strict=True)
        values = values[(..., *(slice(p, p + n) for p, n in cut))]
    elif layer.transposed:
        window["output_padding"] = layer.output_padding
        values = back(x.values, weight.transpose(0, 1), **window)
        mask = back(seen, ones, **window)[:, 0] > 0.5
    else:
        values = conv(x.values, weight, **window)
        mask = conv(seen, ones, **window)[:, 0] > 0.5
        maps[layer.indice_key] = (window, x.mask)
    if layer.bias is not None:
        values = values + layer.bias.view(-1, *[1] * layer.ndim)
    made = Grid(values, mask, maps)
    return Grid(made.masked(values), mask, maps)


def dense_pool(layer: Any, x: Grid) -> Grid:
    window = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    low = x.values.masked_fill(~x.mask.unsqueeze(1), -torch.inf)
    values = getattr(F, f"max_pool{layer.ndim}d")(low, layer.kernel_size, **window)
    mask = values[:, 0] > -torch.inf
    maps = {**x.maps, layer.indice_key: (window, x.mask)}
    return Grid(values.masked_fill(~mask.unsqueeze(1), 0), mask, maps)


def dense_run(module: nn.Module, x: Any) -> Any:
    if isinstance(module, spconv.SparseSequential):
        for part in module:
            x = dense_run(part, x)
        return x
    if isinstance(module, spconv.conv.SparseConvolution):
        return dense_conv(module, x)
    if isinstance(module, spconv.pool.SparseMaxPool):
        return dense_pool(module, x)
    if isinstance(module, spconv.ToDense):
        return x.values
    return x.rows(module)


def pair(shape: tuple[int, ...], device: torch.device) -> tuple[spconv.SparseConvTensor, Grid, Any, Any]:
    """The same scene as a SparseConvTensor and as a Grid, with the features that each was given."""
    indices, features = (t.to(device) for t in scene(shape))
    mine, theirs = (features.clone().requires_grad_() for _ in range(2))
    cells = tuple(indices.long().unbind(1))
    grid = theirs.new_zeros(2, *shape, features.shape[1]).index_put(cells, theirs).movedim(-1, 1)
    mask = torch.zeros(2, *shape, dtype=torch.bool, device=device)
    mask[cells] = True
    return spconv.SparseConvTensor(mine, indices, list(shape), 2), Grid(grid, mask), mine, theirs


def dense_cat(a: Grid, b: Grid) -> Grid:
    assert torch.equal(a.mask, b.mask)
    return Grid(torch.cat([a.values, b.values], 1), a.mask, {**a.maps, **b.maps})


def network(make: Any, device: torch.device, training: bool = True) -> Any:
    torch.manual_seed(2)
    return start(make()).double().to(device).train(training)


NETWORKS = list(vars(networks(spconv)).values())


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("training", [True, False])
def test_networks_and_their_gradients_equal_dense_grids(
    make: Any, training: bool, device: torch.device
) -> None:
    net = network(make, device, training)
    twin = copy.deepcopy(net)
    x, grid, mine, theirs = pair(make.shape, device)
    y, want = net(x, cat=sparse_cat), twin(grid, run=dense_run, cat=dense_cat)
    assert (want != 0).any()
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-11)
    ahead = torch.randn_like(want)
    (y * ahead).sum().backward()
    (want * ahead).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-10)
    for (name, got), expected in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, expected.grad, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert got.grad.is_contiguous()
    for got, expected in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(got, expected)


# ---- the real one's numbers ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded() -> dict[str, torch.Tensor]:
    """What spconv 2.3.8's CPU build gave: spconv_networks.record."""
    with np.load(Path(__file__).with_name("spconv-2.3.8.npz")) as made:
        return {name: torch.from_numpy(made[name]) for name in made}


@pytest.mark.parametrize("make", NETWORKS)
def test_checkpoints_of_spconv_give_its_results(
    make: Any, recorded: dict[str, torch.Tensor], device: torch.device
) -> None:
    name = make.__name__
    net = make().eval()
    start = f"{name}."
    net.load_state_dict({key.removeprefix(start): v for key, v in recorded.items() if key.startswith(start)})
    features, indices = (recorded[f"{name}:{part}"].to(device) for part in ("features", "indices"))
    net, features = net.double().to(device), features.double()
    with torch.no_grad():
        y = net(spconv.SparseConvTensor(features, indices, list(make.shape), 2), cat=sparse_cat)
    batch, channels, *shape = recorded[f"{name}:shape"].tolist()
    cells = tuple(recorded[f"{name}:cells"].long().unbind(1))
    want = torch.zeros(batch, *shape, channels).index_put(cells, recorded[f"{name}:values"]).movedim(-1, 1)
    assert want.abs().max() > 0.05
    torch.testing.assert_close(y.cpu(), want.double(), rtol=0, atol=5e-7)


def test_points_to_voxels_are_those_of_spconv(recorded: Any, device: torch.device) -> None:
    points, *want = (recorded[f"voxels:{part}"] for part in ("points", "voxels", "cells", "counts", "ids"))
    made = spconv.utils.PointToVoxel(*LIMITS).generate_voxel_with_id(points.to(device))
    for got, expected in zip(made, want, strict=True):
        assert got.dtype == expected.dtype and torch.equal(got.cpu(), expected)
    assert len(want[0]) == 90 and (want[2] == 3).any() and (want[3] < 0).any()  # every limit is met


# ---- points to voxels ------------------------------------------------------------------------------------


def binned(points: np.ndarray, edges: list[float], corners: list[float], limit: int, most: int) -> list[Any]:
    """One point after another, in fp32: cell, and rows of the points that were kept."""
    low, size = np.float32(corners[:3]), np.float32(edges)
    shape = np.floor((np.float32(corners[3:]) - low) / size + np.float32(0.5))
    found: dict[tuple[int, ...], list[int]] = {}
    for row, point in enumerate(points):
        cell = np.floor((point[:3] - low) / size)
        if not ((cell >= 0) & (cell < shape)).all():
            continue
        key = tuple(int(c) for c in cell[::-1])
        if key not in found and len(found) == limit:
            continue
        kept = found.setdefault(key, [])
        if len(kept) < most:
            kept.append(row)
    return [[cell, rows] for cell, rows in found.items()]


@pytest.mark.parametrize(("limit", "most"), [(1000, 9), (40, 2), (1, 1)])
def test_points_to_voxels_keeps_first_comers(limit: int, most: int, device: torch.device) -> None:
    points = (torch.rand(300, 4) * 3 - 1).to(device)
    points[5] = torch.nan
    edges, corners = [0.4, 0.3, 0.5], [-0.5, -0.6, -0.7, 1.1, 1.2, 1.6]
    voxels, indices, counts = spconv.utils.PointToVoxel(edges, corners, 4, limit, most)(points)
    want = binned(points.cpu().numpy(), edges, corners, limit, most)
    assert indices.tolist() == [list(cell) for cell, _ in want] and indices.dtype == torch.int32
    assert counts.tolist() == [len(rows) for _, rows in want] and counts.dtype == torch.int32
    assert voxels.shape == (len(want), most, 4)
    for got, (_, rows) in zip(voxels, want, strict=True):
        assert torch.equal(got[: len(rows)], points[rows]) and not got[len(rows) :].any()


def test_points_to_voxels_fills_with_means_and_gathers_back() -> None:
    points = torch.tensor([[0.1, 0.1, 0.1, 2.0], [1.1, 0.1, 0.1, 5.0], [0.3, 0.1, 0.1, 4.0], [9.0, 0, 0, 0]])
    make = spconv.utils.PointToVoxel([1, 1, 1], [0, 0, 0, 2, 1, 1], 4, 9, 3)
    voxels, indices, _, ids = make.generate_voxel_with_id(points, empty_mean=True)
    assert indices.tolist() == [[0, 0, 0], [0, 0, 1]] and ids.tolist() == [0, 1, 0, -1]
    torch.testing.assert_close(voxels[0, 2], points[[0, 2]].mean(0))
    assert torch.equal(voxels[1], points[1].expand(3, 4))
    features = torch.tensor([[1.0], [2.0]])
    gathered = spconv.utils.gather_features_by_pc_voxel_id(features, ids, -7)
    assert gathered.tolist() == [[1], [2], [1], [-7]]
    assert make.grid_size == [1, 1, 2] and make.vsize == [1, 1, 1] and make.num_point_features == 4
    none = make(points[:0])
    assert [t.shape for t in none] == [(0, 3, 4), (0, 3), (0,)]


def test_generators_of_either_release_agree() -> None:
    points = np.random.default_rng(0).random((200, 4), np.float32) * 3
    edges, corners = [0.4, 0.3, 0.5], [0.0, 0, 0, 2.4, 2.4, 2]
    want = [t.numpy() for t in spconv.utils.PointToVoxel(edges, corners, 4, 50, 3)(torch.from_numpy(points))]
    two = package.utils.Point2VoxelCPU3d(
        vsize_xyz=edges,
        coors_range_xyz=corners,
        num_point_features=4,
        max_num_points_per_voxel=3,
        max_num_voxels=50,
    )
    tensors = [t.numpy() for t in two.point_to_voxel(package.cumm.tensorview.from_numpy(points))]
    old = package.utils.VoxelGenerator(np.array(edges), np.array(corners), 3, max_voxels=50).generate(points)
    said = package.utils.VoxelGeneratorV2(edges, corners, 3, 20000).generate(points, max_voxels=50)
    assert said["voxel_num"] == len(want[0]) and said["voxel_point_mask"].sum() == want[2].sum()
    new = [said["voxels"], said["coordinates"], said["num_points_per_voxel"]]
    for made in (tensors, old, new):
        for got, expected in zip(made, want, strict=True):
            assert got.dtype == expected.dtype and np.array_equal(got, expected)
    assert (
        package.utils.VoxelGenerator(edges, corners, 3).grid_size.tolist() == two.grid_size[::-1] == [6, 8, 4]
    )


@pytest.mark.parametrize(
    ("edges", "corners", "name"),
    [([0, 1, 1], [0, 0, 0, 1, 1, 1], "vsize_xyz"), ([1, 1, 1], [0, 0, 0, 1, 0, 1], "coors_range_xyz")],
)
def test_points_to_voxels_refuses_grids_that_are_none(edges: Any, corners: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        spconv.utils.PointToVoxel(edges, corners, 4, 5, 5)


def test_points_to_voxels_refuses_points_of_other_widths() -> None:
    make = spconv.utils.PointToVoxel([1, 1, 1], [0, 0, 0, 2, 1, 1], 4, 9, 3)
    with pytest.raises(ValueError, match=r"points must be \(N, 4\), got \(3, 5\)"):
        make(torch.rand(3, 5))
    with pytest.raises(TypeError, match="floating point"):
        make(torch.zeros(3, 4, dtype=torch.int32))


# ---- tensors ---------------------------------------------------------------------------------------------


def small(channels: int = 2, shape: tuple[int, ...] = (9, 8, 7), device: Any = "cpu") -> Any:
    indices, features = scene(shape, channels, share=0.2)
    return spconv.SparseConvTensor(features.to(device), indices.to(device), list(shape), 2)


def test_a_tensor_that_was_seen_is_the_same_set() -> None:
    x = small()
    again = spconv.SparseConvTensor(x.features, x.indices, [9, 8, 7], 2)
    assert again.voxels.coord_set is x.voxels.coord_set
    y = spconv.SubMConv3d(2, 4, 3).double()(x)
    assert y.indices is x.indices  # the caller's own
    down = spconv.SparseConv3d(4, 4, 3, 2, 1).double()(y)
    wrapped = spconv.SparseConvTensor(down.features, down.indices, down.spatial_shape, down.batch_size)
    assert wrapped.voxels.coord_set is down.voxels.coord_set
    other = spconv.SparseConvTensor(x.features, x.indices.clone(), [9, 8, 7], 2)
    assert other.voxels.coord_set is not x.voxels.coord_set
    wider = spconv.SparseConvTensor(x.features, x.indices, [9, 8, 30], 2)
    assert wider.voxels.coord_set.spatial_shape == (9, 8, 30)
    assert x.voxels.coord_set.spatial_shape == (9, 8, 7)


class Reads(TorchDispatchMode):
    """Calls that give the host values of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to_host = "_to_copy" in func._schema.name and str(kwargs.get("device")) == "cpu"
        if to_host or func is torch.ops.aten._local_scalar_dense.default:
            self.found.append(str(func))
        return func(*args, **kwargs)


def test_a_grid_of_tensors_is_read_at_once(device: torch.device) -> None:
    x = small(device=device)
    shape = list(x.indices.max(0)[0] + 1)[1:]  # as TRELLIS has them
    first = spconv.SparseConvTensor(x.features, x.indices.clone(), shape, 2)
    found = first.voxels.coord_set
    with Reads() as reads:
        again = spconv.SparseConvTensor(x.features, first.indices, [size.clone() for size in shape], 2)
        assert again.voxels.coord_set is found
    assert len(reads.found) <= 1, reads.found
    wider = spconv.SparseConvTensor(x.features, first.indices, [*shape[:2], shape[2] + 3], 2)
    assert wider.voxels.coord_set.spatial_shape == (*found.spatial_shape[:2], found.spatial_shape[2] + 3)


def test_a_set_goes_with_the_tensors_on_it() -> None:
    x = small()
    kept = weakref.ref(x.voxels.coord_set)
    indices = x.indices
    del x
    assert kept() is None and indices.shape[1] == 4


def test_writes_into_indices_are_seen(device: torch.device) -> None:
    torch.manual_seed(0)
    shape = (9, 9, 9)
    x = small(3, shape, device)
    down = spconv.SparseConv3d(3, 4, 3, 2, 1).double().to(device)
    deep, layer = down(x), spconv.SubMConv3d(4, 4, 3).double().to(device)
    near = layer(deep).features
    deep.indices[:, 1:] *= 2  # as VoxelNeXt puts levels together
    deep.spatial_shape = list(shape)
    assert deep.indices[:, 1:].max() > 4 and (deep.indices[:, 1:] % 2 == 0).all()
    alone = layer(deep).features  # no two are neighbours any more
    torch.testing.assert_close(alone, deep.features @ layer.weight[:, 1, 1, 1].t() + layer.bias)
    assert not torch.equal(near, alone)
    assert torch.equal(down(x).features, deep.features)  # what it was made from is as it was
    rows = torch.cat([x.indices, deep.indices])
    unique, inverse = torch.unique(rows, dim=0, return_inverse=True)
    joined = x.replace_feature(torch.zeros(len(unique), 4, device=device, dtype=torch.float64))
    joined.indices = unique
    assert layer(joined).features.shape == (len(unique), 4) and inverse.max() == len(unique) - 1


def test_voxels_may_come_twice(device: torch.device) -> None:
    """All rows stay; strided layers see the first of each, and inverse ones give every row its voxel's
    result."""
    x = small(3, (9, 8, 7), device)
    twice = torch.cat([torch.arange(len(x.features)), torch.tensor([0, 5, 5])]).to(device)
    features = x.features[twice].clone()
    features[len(x.features) :] = 7
    y = spconv.SparseConvTensor(features, x.indices[twice], [9, 8, 7], 2)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(3, 4, 3),
        spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="d"),
        spconv.SparseInverseConv3d(4, 5, 3, indice_key="d"),
    )
    net.double().to(device)
    torch.testing.assert_close(net(y).features, net(x).features[twice])
    assert torch.equal(net(y).indices, y.indices) and torch.equal(y.dense(), x.dense())


@pytest.mark.parametrize("size", [3, 1])
def test_a_row_that_comes_twice_keeps_its_own_features(device: torch.device, size: int) -> None:
    """Submanifold layers: the middle of a row's window is the row itself, its neighbours are first rows; so
    many points in a cell (GaussianFormer) or voxels put beside others (focal convolutions) stay apart."""
    x = small(3, (9, 8, 7), device)
    rows = torch.cat([torch.arange(len(x.features)), torch.tensor([0, 5, 5])]).to(device)
    features = x.features[rows].clone()
    features[len(x.features) :] = torch.randn(3, 3, dtype=torch.float64, device=device)
    features.requires_grad_()
    y = spconv.SparseConvTensor(features, x.indices[rows], [9, 8, 7], 2)
    layer = spconv.SubMConv3d(3, 4, size).double().to(device)
    middle = layer._kernel(layer.weight)[size**3 // 2]
    first = layer(x.replace_feature(features[: len(x.features)])).features
    want = first[rows] + (features - features[rows]) @ middle
    torch.testing.assert_close(layer(y).features, want)
    seed, inputs = torch.randn_like(want), (features, layer.weight)
    ours = torch.autograd.grad(layer(y).features, inputs, seed)
    theirs = torch.autograd.grad(want, inputs, seed)
    torch.testing.assert_close(ours, theirs)
    net = spconv.SparseSequential(layer, torch.nn.BatchNorm1d(4), torch.nn.ReLU()).double().to(device).eval()
    net[1].running_mean.uniform_(-1, 1)
    with torch.no_grad():
        torch.testing.assert_close(net(y).features, net[2](net[1](want)))


def test_layers_behind_an_inverse_one_of_a_grid_by_an_array() -> None:
    """The inverse layer's result has its shape as a list, what it goes back to has it as it was given."""
    x = small(3, (9, 8, 7))
    down = spconv.SparseConv3d(3, 4, 3, 2, 1, indice_key="d").double()
    up = spconv.SparseInverseConv3d(4, 3, 3, indice_key="d").double()
    layer = spconv.SubMConv3d(3, 3, 3).double()
    for shape in (np.array([9, 8, 7]), torch.tensor([9, 8, 7]), (9, 8, 7), [9, 8, 7]):
        y = spconv.SparseConvTensor(x.features, x.indices.clone(), shape, 2)
        assert torch.equal(layer(up(down(y))).features, layer(up(down(x))).features)


@pytest.fixture
def spconv_1() -> Iterator[None]:
    options.configure(version=1)
    yield
    options.configure()


def test_a_key_of_spconv_1_names_one_map(device: torch.device, spconv_1: None) -> None:
    """A submanifold layer runs over the map that its key names, with its first weights: Cylinder3D's blocks
    of (1, 3, 3) and (3, 1, 3), which its checkpoints were trained with. So do layers of a branch."""
    x = small(3, (9, 8, 7), device)
    sizes = (1, 3, 3), (3, 1, 3), (3, 3, 3)
    layers = [spconv.SubMConv3d(3, 4, k, indice_key="k").double().to(device) for k in sizes]
    flat = spconv.SubMConv3d(3, 4, sizes[0]).double().to(device)
    made = [layer(x) for layer in layers]
    assert {tuple(y.find_indice_pair("k").ksize) for y in (x, *made)} == {sizes[0]}
    for layer, y in zip(layers, made, strict=True):
        flat.load_state_dict(
            {"weight": layer.weight.flatten(1, 3)[:, :9].view(4, 1, 3, 3, 3), "bias": layer.bias}
        )
        want = flat(x)
        torch.testing.assert_close(y.features, want.features)
        (ours,) = torch.autograd.grad(y.features.square().sum(), layer.weight)
        (theirs,) = torch.autograd.grad(want.features.square().sum(), flat.weight)
        torch.testing.assert_close(ours.flatten(1, 3)[:, :9], theirs.flatten(1, 3))
        assert not ours.flatten(1, 3)[:, 9:].any()
    with pytest.raises(ValueError, match="kernel_size"):  # a map of more offsets than there are weights
        spconv.SubMConv3d(3, 4, (1, 1, 3), indice_key="k").double().to(device)(x)
    assert spconv.SparseMaxPool3d(3).stride == [1, 1, 1]
    options.configure()
    with pytest.raises(ValueError, match="version=1"):
        layers[1](x)
    assert spconv.SparseMaxPool3d(3).stride == [3, 3, 3]
    with pytest.raises(ValueError, match="version must be 1"):
        options.configure(version=3)


def test_tensors_of_inference_mode() -> None:
    layer = spconv.SparseConv3d(2, 3, 3, 2, 1).double()
    x = small()
    with torch.no_grad():
        want = layer(x)
    with torch.inference_mode():
        y = layer(spconv.SparseConvTensor(x.features.clone(), x.indices.clone(), [9, 8, 7], 2))
        assert torch.equal(y.features, want.features)
        y.indices[:, 1] += 100
        with pytest.raises(ValueError, match="row 0"):
            spconv.SubMConv3d(3, 3, 3).double()(y)


def test_members_that_upstream_copies() -> None:
    x = small()
    x.indice_dict["key"] = "kept"  # type: ignore[assignment]
    y = spconv.SparseConvTensor(
        x.features, x.indices, x.spatial_shape, x.batch_size, x.grid, x.voxel_num, x.indice_dict
    )
    y._features = torch.zeros(len(x.features), 2, 5)  # rows of any shape, until a layer runs
    for name in ("benchmark", "benchmark_record", "thrust_allocator", "_timer", "force_algo", "int8_scale"):
        setattr(y, name, getattr(x, name))
    assert y.features.shape[1:] == (2, 5) and y.indice_dict is x.indice_dict
    assert "replace_feature" in y.__dir__()
    z = y.replace_feature(x.features)
    assert z.indice_dict is x.indice_dict and z.indices is x.indices and z.find_indice_pair("key") == "kept"
    assert z.find_indice_pair(None) is None and z.find_indice_pair("none") is None
    z.features = 2 * z.features  # 1.x
    assert torch.equal(z.features, 2 * x.features)
    assert z.spatial_size == 9 * 8 * 7 and z.sparity == len(x.features) / (2 * 9 * 8 * 7)
    assert not z.is_quantized and z.shadow_copy().features is z.features


def test_attributes_are_listed_as_by_object() -> None:
    class Own(spconv.SparseConvTensor):
        more = 1

    for kind in (spconv.SparseConvTensor, Own):
        x = kind(torch.zeros(1, 2), torch.zeros(1, 4, dtype=torch.int32), [2, 2, 2], 1)
        x.mine = 3
        assert set(x.__dir__()) == set(object.__dir__(x)) and "mine" in dir(x)


def test_dense_and_back(device: torch.device) -> None:
    for shape in [(9, 8, 7), (5, 6), (11,)]:
        x = small(3, shape, device)
        grid = x.dense(channels_first=False)
        assert grid.shape == (2, *shape, 3) and torch.equal(grid.movedim(-1, 1), x.dense())
        assert torch.equal(grid[tuple(x.indices.long().unbind(1))], x.features)
        back = spconv.SparseConvTensor.from_dense(grid)
        assert back.spatial_shape == list(shape) and back.indices.dtype == torch.int32
        assert torch.equal(back.dense(), x.dense())


def test_arithmetic_and_tables() -> None:
    x = small()
    f = x.features
    order = torch.randperm(len(f))
    other = spconv.SparseConvTensor(f[order], x.indices[order], [9, 8, 7], 2)
    for made, want in (
        (x + x, 2 * f),
        (x + other, 2 * f),  # by voxel, not by row
        (x + 1.5, f + 1.5),
        (1.5 + x, f + 1.5),
        (x - other, 0 * f),
        (1 - x, 1 - f),
        (3 * x, 3 * f),
        (x * f, f * f),
        (x / 2, f / 2),
        (-x, -f),
        (x.minus(), -f),
        (spconv.AddTable()([x, other, x]), 3 * f),
        (spconv.JoinTable()([x, other]), torch.cat([f, f], 1)),
    ):
        assert torch.equal(made.features, want) and made.indices is x.indices
    y = x
    y += f
    assert y is x and torch.equal(x.features, 2 * f)
    part = x.select_by_index(torch.arange(0, len(f), 2))
    assert torch.equal(part.indices, x.indices[::2]) and torch.equal(part.features, 2 * f[::2])
    with pytest.raises(ValueError, match="cannot add voxels"):
        _ = x + part
    table = spconv.ConcatTable().add(spconv.SparseIdentity()).add(spconv.SubMConv3d(2, 3, 1).double())
    assert [t.features.shape[1] for t in table(x)] == [2, 3]


def test_sparse_add_is_on_the_union() -> None:
    rows = torch.tensor([[0, 1, 1, 1], [0, 2, 2, 2], [0, 3, 2, 2]]).int()
    a = spconv.SparseConvTensor(torch.ones(2, 1), rows[:2].clone(), [6, 6, 6], 1)
    b = spconv.SparseConvTensor(torch.ones(2, 1) * 2, rows[[2, 0]], [6, 6, 6], 1)
    for add in (spconv.functional.sparse_add, lambda *x: spconv.tables.AddTableMisaligned()(list(x))):
        y = add(a, b)
        assert y.indices.tolist() == [[0, 1, 1, 1], [0, 2, 2, 2], [0, 3, 2, 2]]
        assert y.features.tolist() == [[3], [1], [2]]
    assert spconv.functional.sparse_add(a, a).indices is a.indices


def test_copies_and_pickles() -> None:
    x = spconv.SubMConv3d(2, 3, 3, indice_key="a").double()(small())
    x = x.replace_feature(x.features.detach())
    x.indices[0, 3] = x.indices[1, 3]
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert torch.equal(y.indices, x.indices) and y.indices is not x.indices
        assert torch.equal(y.features, x.features) and y.indice_dict.keys() == {"a"}
        assert torch.equal(y.dense(), x.dense())


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"indices": torch.zeros(3, 4)}, TypeError, "indices must be an int32 tensor, got torch.float32"),
        ({"indices": torch.zeros(3, 5).int()}, ValueError, r"indices must be \(N, ndim \+ 1\)"),
        ({"spatial_shape": [4, 4]}, TypeError, "spatial_shape must be an int or 3 of them"),
        ({"batch_size": 1.5}, TypeError, "batch_size must be an int"),
        (
            {"indices": torch.tensor([[0, 0, 0, 0], [0, 1, 4, 1], [0, 2, 2, 2]]).int()},
            ValueError,
            "indices row 1",
        ),
        ({"indices": torch.tensor([[0, 0, 0, 0], [1, 1, 1, 1], [0, 2, 2, 2]]).int()}, ValueError, "row 1"),
        ({"features": torch.zeros(2, 2)}, ValueError, "features has 2 rows, indices has 3"),
    ],
)
def test_bad_tensors_are_named(change: dict[str, Any], error: type[Exception], words: str) -> None:
    good = {
        "features": torch.zeros(3, 2),
        "indices": torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1], [0, 2, 2, 2]]).int(),
        "spatial_shape": [4, 4, 4],
        "batch_size": 1,
    }
    layer = spconv.SubMConv3d(2, 2, 3)
    layer(spconv.SparseConvTensor(**good))
    with pytest.raises(error, match=words):
        layer(spconv.SparseConvTensor(**{**good, **change}))


class Listed:
    """As OmegaConf's lists: neither a list nor a Sequence."""

    def __init__(self, values: list[int]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> Any:
        return self.values[index]


def numpy_ints(values: list[int]) -> list[Any]:
    return [np.int64(n) for n in values]


@pytest.mark.parametrize("of", [np.array, torch.tensor, tuple, Listed, numpy_ints])
def test_sizes_of_any_kind(of: Any) -> None:
    x = small()
    want = spconv.SparseConv3d(2, 3, [3, 1, 2], [2, 1, 1], [1, 0, 0]).double()
    size, stride, padding = of([3, 1, 2]), of([2, 1, 1]), of([1, 0, 0])
    layer = spconv.SparseConv3d(np.int64(2), torch.tensor(3), size, stride, padding).double()
    assert layer.kernel_size == [3, 1, 2] and layer.stride == [2, 1, 1] and layer.padding == [1, 0, 0]
    layer.load_state_dict(want.state_dict())
    y = layer(spconv.SparseConvTensor(x.features, x.indices, of([9, 8, 7]), torch.tensor(2)))
    assert y.spatial_shape == [5, 8, 6] and torch.equal(y.features, want(x).features)


# ---- layers ----------------------------------------------------------------------------------------------


def test_attributes_and_state_dicts_are_those_of_spconv() -> None:
    layer = spconv.SparseConv3d(4, 8, 3, 2, padding=1, record_voxel_count=True, indice_key="a")
    assert list(layer.state_dict()) == ["weight", "bias", "max_num_voxels_during_training"]
    assert layer.weight.shape == (8, 3, 3, 3, 4) and layer.weight.is_contiguous()
    assert layer.state_dict()._metadata == {"": {"version": 1}}
    want = {
        "ndim": 3,
        "in_channels": 4,
        "out_channels": 8,
        "kernel_size": [3, 3, 3],
        "stride": [2, 2, 2],
        "dilation": [1, 1, 1],
        "padding": [1, 1, 1],
        "output_padding": [0, 0, 0],
        "conv1x1": False,
        "transposed": False,
        "inverse": False,
        "groups": 1,
        "subm": False,
        "indice_key": "a",
        "algo": None,
        "fp32_accum": None,
        "weight_shape": [8, 3, 3, 3, 4],
        "name": None,
    }
    assert {name: getattr(layer, name) for name in want} == want
    assert spconv.SparseInverseConv3d(4, 8, 3, "a").transposed is False
    assert spconv.SparseConvTranspose3d(4, 8, 3).transposed is True
    assert spconv.SubMConv2d(4, 8, 5).weight.shape == (8, 5, 5, 4)
    bound = 1 / math.sqrt(4 * 27)
    assert 0.9 * bound < layer.weight.abs().max() <= bound and layer.bias.abs().max() <= bound


@pytest.mark.parametrize("size", [1, 3, (3, 1, 1), (3, 1, 5)])
@pytest.mark.parametrize("kind", [spconv.SubMConv3d, spconv.SparseConv3d])
def test_checkpoints_of_1x_are_converted(kind: Any, size: Any) -> None:
    stride = 1 if kind is spconv.SubMConv3d else 2
    layer = spconv.SparseSequential(kind(4, 6, size, stride, bias=False).double())
    old = torch.randn(*layer[0].kernel_size, 4, 6, dtype=torch.float64)
    given = OrderedDict({"0.weight": old})
    layer.load_state_dict(given)
    assert given["0.weight"] is old
    x = small(4)
    y = layer(x)
    ours = voxmma.nn.functional.spatially_sparse_conv(
        x.voxels, old.reshape(-1, 4, 6), size, stride=stride, padding=None if stride == 1 else 0
    )
    assert torch.equal(y.voxels.coords, ours.coords)
    torch.testing.assert_close(y.features, ours.feats)
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x).features, y.features)
    with pytest.raises(RuntimeError, match="size mismatch"):
        layer.load_state_dict({"0.weight": torch.zeros(*layer[0].kernel_size, 6, 4)})


def test_upstream_may_replace_how_checkpoints_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def load(self: Any, state_dict: Any, prefix: str, *rest: Any) -> None:
        seen.append((type(self).__name__, prefix))

    monkeypatch.setattr(spconv.SparseModule, "_load_from_state_dict", load)
    net = spconv.SparseSequential(spconv.SubMConv3d(2, 2, 3))
    net.load_state_dict({"0.weight": torch.zeros(1)}, strict=False)
    assert ("SubMConv3d", "0.") in seen


def test_subclasses_may_compute_from_the_weight() -> None:
    class Pointwise(spconv.SparseConv3d):
        def forward(self, x: Any) -> Any:  # type: ignore[override]
            return x.replace_feature(x.features @ self.weight.view(self.out_channels, self.in_channels).t())

    layer = Pointwise(2, 5, 1, bias=False).double()
    assert layer(small()).features.shape[1] == 5
    halved = spconv.SubMConv3d(2, 3, 3).double()
    x = small()
    want = halved(x).features
    nn.utils.parametrizations.weight_norm(halved)
    torch.testing.assert_close(halved(x).features, want)


def test_weights_are_read_where_they_are() -> None:
    """Whatever is written, moved or put into a layer is what runs next."""
    x = small()
    for layer in (spconv.SubMConv3d(2, 3, 3, bias=False), spconv.SubMConv3d(2, 3, 1, bias=False)):
        layer.double()
        with torch.no_grad():
            before = layer(x).features
            layer.weight.data.mul_(2)
            torch.testing.assert_close(layer(x).features, 2 * before)
            layer.weight.data = layer.weight.data * 2
            torch.testing.assert_close(layer(x).features, 4 * before)
            layer.weight = nn.Parameter(layer.weight.detach() / 4)
            torch.testing.assert_close(layer(x).features, before)
            twin = copy.deepcopy(layer)
            twin.weight.zero_()
            torch.testing.assert_close(layer(x).features, before)
            assert not twin(x).features.any()
            y = layer.float()(x.replace_feature(x.features.float()))
            torch.testing.assert_close(y.features.double(), before, rtol=1e-5, atol=1e-6)


def test_keys_name_maps() -> None:
    x = small()
    down = spconv.SparseConv3d(2, 3, 3, 2, 1, indice_key="down").double()
    same = spconv.SubMConv3d(2, 2, 3, indice_key="same").double()
    y = down(same(x))
    assert list(y.indice_dict) == ["same", "down"] and not x.indice_dict
    data = y.find_indice_pair("down")
    assert data is not None and not data.is_subm and y.indice_dict["same"].is_subm
    assert (data.ksize, data.stride, data.padding, data.dilation) == ([3] * 3, [2] * 3, [1] * 3, [1] * 3)
    assert data.indices is x.indices and torch.equal(data.out_indices, y.indices)
    assert data.spatial_shape == [9, 8, 7] and data.out_spatial_shape == y.spatial_shape == [5, 4, 4]
    pairs, counts = data.indice_pairs, data.indice_pair_num
    assert pairs.shape[:2] == (2, 27) and pairs.dtype == counts.dtype == torch.int32
    for k, offset in enumerate(itertools.product(range(3), repeat=3)):
        rows, outs = (side[k][: counts[k]].long() for side in pairs)
        where = y.indices[outs, 1:] * 2 - 1 + torch.tensor(offset)
        assert torch.equal(where.int(), x.indices[rows, 1:]) and (pairs[:, k, counts[k] :] == -1).all()
    assert counts.sum() == voxmma.kernel_map(x.voxels, 3, stride=2, padding=1).num_pairs
    up = spconv.SparseInverseConv3d(3, 4, 3, indice_key="down").double()(y)
    assert up.indices is x.indices and up.spatial_shape == [9, 8, 7] and "down" in up.indice_dict


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: spconv.SubMConv3d(2, 2, 5, indice_key="same"), r"a submanifold layer of kernel_size \[3"),
        (lambda: spconv.SparseConv3d(2, 2, 3, 2, 1, indice_key="same"), "belongs to a submanifold layer"),
        (lambda: spconv.SparseConv3d(2, 2, 3, 2, 1, indice_key="down"), "names a map of other voxels"),
        (lambda: spconv.SparseInverseConv3d(2, 2, 5, "down"), r"a strided layer of kernel_size \[3, 3"),
        (lambda: spconv.SparseInverseConv3d(2, 2, 3, "same"), "submanifold layer"),
        (lambda: spconv.SparseInverseConv3d(2, 2, 3, "none"), "'none'; there are: 'same', 'down'"),
    ],
)
def test_keys_that_do_not_fit_are_refused(make: Any, words: str) -> None:
    net = spconv.SparseSequential(
        spconv.SubMConv3d(2, 2, 3, indice_key="same"), spconv.SparseConv3d(2, 2, 3, 2, 1, indice_key="down")
    )
    y = net.double()(small())
    with pytest.raises(ValueError, match=words):
        make().double()(y)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: spconv.SubMConv3d(2, 2, 2), ValueError, "kernel_size must be odd"),
        (lambda: spconv.SubMConv3d(2, 2, 3, groups=2), NotImplementedError, "groups must be 1"),
        (lambda: spconv.SparseConv3d(2, 2, 1, padding=1), ValueError, "padding must be 0"),
        (lambda: spconv.SparseConvTranspose3d(2, 2, 3, 2, dilation=2), NotImplementedError, "dilation"),
        (lambda: spconv.SubMConv3d(2, 2, [3, 3]), TypeError, "kernel_size must be an int or 3 of them"),
        (lambda: spconv.SubMConv3d(0, 2, 3), ValueError, "in_channels"),
        (lambda: spconv.SubMConv4d(2, 2, 3), NotImplementedError, "SubMConv4d: voxmma has no 4-D grids"),
        (lambda: spconv.SparseConv4d(2, 2, 3), NotImplementedError, "4-D"),
        (lambda: spconv.SparseMaxPool4d(2), NotImplementedError, "4-D"),
        (lambda: spconv.conv.SparseConvolution(3, 2, 2, act_type="Tanh"), ValueError, "act_type"),
    ],
)
def test_layers_that_cannot_be_are_refused(make: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()


def test_layers_refuse_other_tensors() -> None:
    layer = spconv.SubMConv3d(2, 2, 3)
    with pytest.raises(TypeError, match="takes a SparseConvTensor, got Tensor"):
        layer(torch.zeros(2, 2))
    with pytest.raises(ValueError, match="takes 3-D indices, got 2-D"):
        layer(small(2, (5, 5)))
    with pytest.raises(TypeError, match="takes a SparseConvTensor"):
        spconv.SparseMaxPool3d(2)(torch.zeros(2, 2))


def test_activations_additions_and_counts() -> None:
    x = small()
    tv = package.cumm.tensorview.gemm.Activation
    kinds = {tv.None_: lambda t: t, "ReLU": torch.relu, tv.Sigmoid: torch.sigmoid}
    kinds[tv.LeakyReLU] = lambda t: F.leaky_relu(t, 0.3)
    for act, want in kinds.items():
        layer = spconv.conv.SparseConvolution(3, 2, 2, 3, subm=True, act_type=act, act_alpha=0.3).double()
        plain = spconv.SubMConv3d(2, 2, 3).double()
        plain.load_state_dict(layer.state_dict())
        for made in (layer, pickle.loads(pickle.dumps(layer)), copy.deepcopy(layer)):
            torch.testing.assert_close(made(x, add_input=x).features, want(plain(x).features + x.features))
    layer = spconv.SparseConv3d(2, 3, 3, 2, 1, record_voxel_count=True).double()
    rows = len(layer(x).features)
    layer(small(shape=(3, 3, 3)))
    layer.eval()(small(shape=(20, 20, 20)))
    assert layer.get_max_num_voxels().tolist() == [rows]
    assert spconv.SubMConv3d(2, 2, 3).get_max_num_voxels() is None


def test_empty_inputs(device: torch.device) -> None:
    x = spconv.SparseConvTensor(
        torch.zeros(0, 3, device=device), torch.zeros(0, 4, dtype=torch.int32, device=device), [9, 9, 9], 2
    )
    for training in (True, False):
        net = spconv.SparseSequential(
            spconv.SubMConv3d(3, 4, 3),
            nn.BatchNorm1d(4),
            nn.ReLU(),
            nn.Linear(4, 5),
            spconv.SparseConv3d(5, 6, 3, 2, 1, indice_key="d"),
            spconv.SparseInverseConv3d(6, 7, 3, indice_key="d"),
        )
        y = net.train(training).to(device)(x)
        assert y.features.shape == (0, 7) and y.dense().shape == (2, 7, 9, 9, 9)
    far = spconv.SparseConvTensor(
        torch.zeros(1, 3, device=device),
        torch.tensor([[0, 5, 5, 5]], dtype=torch.int32, device=device),
        [6, 6, 6],
        1,
    )
    assert len(spconv.SparseConv3d(3, 3, 3, 2).to(device)(far).features) == 0  # outside of torch's output


def test_containers() -> None:
    a, b = spconv.SubMConv3d(2, 2, 3), nn.ReLU()
    by_name = spconv.SparseSequential(OrderedDict(a=a, b=b))
    assert list(by_name._modules) == list(spconv.SparseSequential(a=a, b=b)._modules) == ["a", "b"]
    assert len(by_name) == 2 and by_name[0] is a and by_name[-1] is b and list(by_name) == [a, b]
    with pytest.raises(IndexError, match="index 5 is out of range"):
        by_name[5]
    by_name.add(nn.Tanh())
    by_name.add(nn.Tanh(), "last")
    assert list(by_name._modules) == ["a", "b", "2", "last"]
    with pytest.raises(KeyError):
        by_name.add(nn.Tanh(), "last")
    assert spconv.is_spconv_module(by_name) and spconv.is_sparse_conv(a) and not spconv.is_spconv_module(b)
    assert spconv.modules.is_spconv_module(spconv.SparseReLU()) and not spconv.is_sparse_conv(by_name)
    assert not spconv.is_spconv_module(spconv.Identity())
    x = small()
    norm = spconv.SparseBatchNorm(2).double()
    assert isinstance(spconv.SparseReLU()(norm(x)), spconv.SparseConvTensor)
    pooled = spconv.SparseSequential(by_name.double(), spconv.SparseGlobalAvgPool(), nn.Linear(2, 3).double())
    assert pooled(x).shape == (2, 3)
    best = spconv.SparseGlobalMaxPool()(x)
    for sample in range(2):
        assert torch.equal(best[sample], x.features[x.indices[:, 0] == sample].amax(0))
    assert (
        spconv.RemoveGrid()(
            spconv.SparseConvTensor(x.features, x.indices, [9, 8, 7], 2, grid=x.features)
        ).grid
        is None
    )


def test_pools_without_stride_grow_and_average(device: torch.device) -> None:
    x = small(2, (7, 6), device)
    mean = spconv.SparseAvgPool2d(3, 1, 1)(x)
    seen = F.avg_pool2d(x.dense().abs().sum(1, keepdim=True).gt(0).double(), 3, 1, 1)
    want = F.avg_pool2d(x.dense(), 3, 1, 1) / seen.masked_fill(seen == 0, 1)
    torch.testing.assert_close(mean.dense(), want)
    assert mean.spatial_shape == [7, 6] and len(mean.features) == int((seen > 0).sum())
    same = spconv.pool.SparseMaxPool(2, 3, 2, 0, subm=True)(x)
    assert same.indices is x.indices and (same.features >= x.features).all()


def test_layers_are_timed_by_name() -> None:
    net = spconv.SparseSequential(spconv.SubMConv3d(2, 2, 3), spconv.SparseConv3d(2, 3, 3, 2, 1)).double()
    x = small()
    x.benchmark = True
    with pytest.raises(ValueError, match="assign_name_for_sparse_modules"):
        net(x)
    spconv.assign_name_for_sparse_modules(net)
    y = net(net[0](x))  # 0 takes part twice
    assert set(y.benchmark_record) == {"0", "1"}
    entry = y.benchmark_record["0"]
    assert len(entry["time"]) == 2 and entry["num_points"] == [len(x.features)] * 2
    assert y.benchmark_record["1"]["num_out_points"] == [len(y.features)]


# ---- precision -------------------------------------------------------------------------------------------


@pytest.fixture
def installed() -> Iterator[Callable[..., Any]]:
    ours = ("spconv", "cumm")
    held = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ours}
    for name in held:
        del sys.modules[name]
    yield compat.install
    compat.uninstall("spconv")
    sys.modules.update(held)


def test_precision_reaches_the_layers(installed: Any) -> None:
    assert spconv.SubMConv3d(2, 2, 3).use_fp16_accum is None
    installed("spconv", use_fp16_accum=True, out_dtype=torch.float32)
    layer = spconv.SubMConv3d(2, 2, 3)
    assert layer.use_fp16_accum is True and layer.out_dtype == torch.float32
    assert spconv.SubMConv3d(2, 2, 3, fp32_accum=True).use_fp16_accum is False
    installed("spconv", accumulator="fp16_promoted:64")
    assert spconv.SparseConv3d(2, 2, 3).accumulator == "fp16_promoted:64"
    assert spconv.SparseConv3d(2, 2, 3, fp32_accum=False).use_fp16_accum is True
    with pytest.raises(ValueError, match="contradicts"):
        installed("spconv", accumulator="fp32", use_fp16_accum=True)
    with pytest.raises(ValueError, match="compute_dtype"):
        installed("spconv", compute_dtype=torch.int8)
    compat.uninstall("spconv")
    assert spconv.SubMConv3d(2, 2, 3).accumulator is None


def test_policies_records_and_audits_see_the_layers() -> None:
    net = spconv.SparseSequential(
        spconv.SubMConv3d(2, 4, 3),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        spconv.SparseConv3d(4, 4, 3, 2, 1, indice_key="d"),
        spconv.SparseInverseConv3d(4, 4, 3, indice_key="d"),
    )
    x = small()
    x = x.replace_feature(x.features.float())
    with voxmma.audit() as launched:
        y = net(x)
    assert [launch.layer for launch in launched] == [
        "SubMConv3d(2, 4, 3x3x3)",
        "SparseConv3d(4, 4, 3x3x3)",
        "SparseInverseConv3d(4, 4, 3x3x3)",
    ]
    assert voxmma.explain(y).layer == "SparseInverseConv3d(4, 4, 3x3x3)"
    assert voxmma.explain(net[0](x)).compute_dtype == torch.float32
    between = spconv.SparseSequential(*list(net)[:3])(x)
    assert voxmma.explain(between).applied == ("BatchNorm1d", "ReLU")
    with pytest.raises(ValueError, match="no record"):
        voxmma.explain(between.replace_feature(between.features))
    handle = voxmma.policy.apply_policy(net, "auto_mixed")
    with voxmma.audit() as launched:
        half = net(x)
    assert {launch.input for launch in launched} == {"fp16"} and half.features.dtype == torch.float32
    assert half.indices is x.indices
    handle.revert()
    assert voxmma.explain(net(x)).compute_dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert net(x).features.dtype == torch.bfloat16


def test_sequences_run_as_one_launch_in_evaluation(device: torch.device) -> None:
    x = small(4, (9, 8, 7), device)
    net = spconv.SparseSequential(
        spconv.SubMConv3d(4, 16, 3, indice_key="s"),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        spconv.SparseConv3d(16, 8, 3, 2, 1, indice_key="d"),
        nn.LeakyReLU(0.3),
        spconv.SparseInverseConv3d(8, 16, 3, indice_key="d", bias=False),
        nn.BatchNorm1d(16),
        spconv.SubMConv3d(16, 8, 1),
        nn.SiLU(),
    )
    net = start(net).double().to(device).eval()
    steps = list(net)
    with torch.no_grad():
        want = x
        for step in steps:
            sparse = isinstance(step, spconv.SparseModule)
            want = step(want) if sparse else want.replace_feature(step(want.features))
        y = net(x)
    torch.testing.assert_close(y.features, want.features, rtol=1e-10, atol=1e-12)
    assert voxmma.explain(y).applied == ("SiLU (fused)",) and y.indices is x.indices
    assert voxmma.explain(net(x)).applied == ("SiLU",)  # gradients want every step
    seen = []
    handle = net[0].register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad():
        torch.testing.assert_close(net(x).features, want.features, rtol=1e-10, atol=1e-12)
    assert seen == [1]
    handle.remove()

    class Doubled(spconv.SubMConv3d):
        def forward(self, input: Any) -> Any:  # type: ignore[override]
            y = super().forward(input)
            return y.replace_feature(2 * y.features)

    layer = Doubled(4, 4, 3, bias=False).double().to(device)
    with torch.no_grad():
        torch.testing.assert_close(
            spconv.SparseSequential(layer, nn.ReLU())(x).features, layer(x).features.relu()
        )


def test_norms_and_activations_share_a_pass_in_training(device: torch.device) -> None:
    x = small(4, (9, 8, 7), device)
    for dtype, close in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        net = spconv.SparseSequential(nn.BatchNorm1d(4), nn.ReLU()).to(device, dtype)
        outs = []
        for run in (net, nn.Sequential(*copy.deepcopy(net))):
            features = x.features.detach().to(dtype).requires_grad_()
            y = run(x.replace_feature(features)).features if run is net else run(features)
            y.square().sum().backward()
            norm = run[0]
            outs.append((y, features.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked))
        for got, want in zip(*outs, strict=True):
            torch.testing.assert_close(got, want, rtol=close, atol=close * 10)


# ---- installing ------------------------------------------------------------------------------------------


def test_install_and_uninstall(installed: Any) -> None:
    assert installed("spconv") is package and installed("spconv") is package
    import spconv as top
    import spconv.pytorch as layers
    from spconv.conv import SparseConvolution
    from spconv.pytorch.modules import SparseModule
    from spconv.pytorch.utils import PointToVoxel
    from spconv.utils import Point2VoxelCPU3d, VoxelGeneratorV2

    assert top is package and layers is sys.modules["voxmma.compat.spconv.pytorch"]
    assert SparseConvolution is layers.SparseConvolution and SparseModule is layers.SparseModule
    assert PointToVoxel is layers.utils.PointToVoxel and float(top.__version__[2:]) >= 2.2
    top.constants.SPCONV_USE_DIRECT_TABLE = False
    assert top.SubMConv3d is layers.SubMConv3d and top.modules.SparseModule is SparseModule  # 1.x
    import cumm.tensorview as tv

    points = np.zeros((3, 4), np.float32)
    made = Point2VoxelCPU3d([1, 1, 1], [0, 0, 0, 2, 2, 2], 4, 5, 5).point_to_voxel(tv.from_numpy(points))
    assert made[0].numpy().shape == (1, 5, 4)
    assert VoxelGeneratorV2([1, 1, 1], [0, 0, 0, 2, 2, 2], 5).generate(points)["voxel_num"] == 1
    compat.uninstall("spconv")
    compat.uninstall("spconv")
    assert not [name for name in sys.modules if name.partition(".")[0] in ("spconv", "cumm")]
    assert sys.modules["voxmma.compat.spconv.pytorch"] is layers


def test_install_refuses_a_library_in_use(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = ModuleType("spconv")
    monkeypatch.setitem(sys.modules, "spconv", theirs)
    with pytest.raises(RuntimeError, match="spconv has been imported already"):
        installed("spconv")
    compat.uninstall("spconv")
    assert sys.modules["spconv"] is theirs
    with pytest.raises(ValueError, match="name must be one of spconv"):
        installed("another")


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (spconv.ops, "get_indice_pairs", r"no pytorch.ops.get_indice_pairs: use voxmma.kernel_map"),
        (package.utils, "rbbox_iou", "no utils.rbbox_iou: use a box library"),
        (package, "nothing", "no spconv.nothing: docs/migrate.md"),
        (spconv, "nothing", "no pytorch.nothing"),
        (spconv.functional, "indice_conv", "spatially_sparse_conv"),
        (package.constants, "nothing", "no constants.nothing"),
    ],
)
def test_names_that_are_not_there_say_what_to_use(module: Any, name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(module, name)
