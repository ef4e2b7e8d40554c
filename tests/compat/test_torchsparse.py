"""voxmma.compat.torchsparse against dense references of torchsparse's semantics, 2.x and 1.x."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import voxmma
import voxmma.compat.torchsparse as torchsparse
import voxmma.compat.torchsparse.nn as spnn
import voxmma.compat.torchsparse.nn.functional as spf
from voxmma import compat, convert, models
from voxmma.compat.torchsparse import SparseTensor, options
from voxmma.compat.torchsparse.backbones.modules import (
    SparseConvBlock,
    SparseConvTransposeBlock,
    SparseResBlock,
)
from voxmma.compat.torchsparse.utils.collate import sparse_collate, sparse_collate_fn
from voxmma.compat.torchsparse.utils.quantize import sparse_quantize

from dense_grids import Grid, Triple, close, scene, sorted_rows, stored_kernel, triple

HIGH = 16


@pytest.fixture(autouse=True)
def _as_configured() -> Iterator[None]:
    yield
    options.configure()
    spf.conv_config.clear_global_conv_config()
    spf.set_kmap_mode("hashmap_on_the_fly")
    spf.set_downsample_mode("spconv")
    torchsparse.tensor.set_allow_negative_coordinates(False)


def kernel_of(kernel: Tensor, size: int | Triple) -> Tensor:
    """(O, I, x, y, z): x runs fastest where the number of offsets is odd, else z."""
    sizes = triple(size)
    return stored_kernel(kernel, sizes, bool(sizes[0] * sizes[1] * sizes[2] % 2))


class Reference:
    """The parameters of a network as leaves on the CPU, and torchsparse 2.x's layers on dense grids."""

    def __init__(self, net: nn.Module) -> None:
        self.leaves = {name: p.detach().cpu().clone().requires_grad_() for name, p in net.named_parameters()}

    def norm(self, grid: Grid, name: str) -> Grid:
        return grid.batch_norm(self.leaves[f"{name}.weight"], self.leaves[f"{name}.bias"])

    def subm(self, grid: Grid, name: str, size: int | Triple) -> Grid:
        sizes = triple(size)
        odd = sizes[0] * sizes[1] * sizes[2] % 2
        padding = tuple(k // 2 if odd else 0 for k in sizes)
        kernel = kernel_of(self.leaves[f"{name}.kernel"], size)
        return grid.conv(kernel, 1, padding, bias=self.leaves.get(f"{name}.bias"))

    def down(self, grid: Grid, name: str, size: int | Triple, stride: int | Triple, padding: Any = 0) -> Grid:
        """Sites whose window holds a voxel, as far as the largest coordinate of the batch reaches."""
        sizes, steps, pad = triple(size), triple(stride), triple(padding)
        mask = grid.clipped_windows(sizes, steps, pad)
        return grid.conv(kernel_of(self.leaves[f"{name}.kernel"], size), steps, pad, mask)

    def up(self, grid: Grid, name: str, size: int, stride: int, fine: Grid, padding: int = 0) -> Grid:
        kernel = kernel_of(self.leaves[f"{name}.kernel"], size)
        return grid.conv_transpose(kernel, stride, padding, fine.mask.shape[1:], fine.mask)


def compare(
    net: nn.Module, ref: Reference, y: SparseTensor, wanted: Grid, mine: Tensor, leaf: Tensor
) -> None:
    assert torch.equal(sorted_rows(y.C.cpu()).long(), sorted_rows(wanted.coords()))
    rows = wanted.at(y.C)
    close(y.F, rows, "values")
    weights = torch.randn(rows.shape, dtype=torch.float64)
    (rows * weights).sum().backward()
    (y.F * weights.to(y.F.device)).sum().backward()
    close(mine.grad, leaf.grad, "gradient of the features")
    for name, p in net.named_parameters():
        close(p.grad, ref.leaves[name].grad, f"gradient of {name}")


def start(net: nn.Module, device: torch.device, count: int = 500, high: int = HIGH) -> tuple[Any, ...]:
    """The network in fp64, its reference, the input of both and their leaves."""
    coords, feats = scene(0, high, count, 4)
    net = net.double().to(device).train()
    leaf, mine = feats.clone().requires_grad_(), feats.clone().to(device).requires_grad_()
    x = SparseTensor(mine, coords.to(device))
    return net, Reference(net), x, Grid.of(coords, leaf, 0, HIGH), mine, leaf


# ---- networks ----------------------------------------------------------------------------------------------


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(spnn.Conv3d(4, 8, 3), spnn.BatchNorm(8), spnn.ReLU(True))
        self.down = SparseConvBlock(8, 8, 2, stride=2)
        self.block = SparseResBlock(8, 12, 3)
        self.down2 = spnn.Conv3d(12, 10, 3, stride=2, padding=1)
        self.up2 = spnn.Conv3d(10, 6, 3, stride=2, transposed=True)
        self.up = SparseConvTransposeBlock(18, 8, 2, stride=2)
        self.head = spnn.Conv3d(16, 3, 1, bias=True)

    def forward(self, x: SparseTensor) -> SparseTensor:
        x0 = self.stem(x)
        x1 = self.block(self.down(x0))
        y1 = torchsparse.cat([self.up2(self.down2(x1)), x1])
        return self.head(torchsparse.cat([self.up(y1), x0]))


def test_unet(device: torch.device) -> None:
    net, ref, x, grid, mine, leaf = start(UNet(), device)
    y = net(x)
    x0 = ref.norm(ref.subm(grid, "stem.0", 3), "stem.1").relu()
    x1 = ref.norm(ref.down(x0, "down.0", 2, 2), "down.1").relu()
    inner = ref.norm(ref.subm(x1, "block.main.0", 3), "block.main.1").relu()
    inner = ref.norm(ref.subm(inner, "block.main.3", 3), "block.main.4")
    x1 = (inner + ref.norm(ref.subm(x1, "block.shortcut.0", 1), "block.shortcut.1")).relu()
    x2 = ref.down(x1, "down2", 3, 2, 1)
    y1 = ref.up(x2, "up2", 3, 2, x1, 1).cat(x1)  # over the map of down2, whose padding it was not told
    y0 = ref.norm(ref.up(y1, "up.0", 2, 2, x0), "up.1").relu()
    assert y.s == (1, 1, 1) and y.coords is x.coords
    compare(net, ref, y, ref.subm(y0.cat(x0), "head", 1), mine, leaf)
    assert set(x.cmaps) == {(1, 1, 1), (2, 2, 2), (4, 4, 4)}
    assert all(key[0] in x.cmaps for key in x.kmaps)


def test_strided_layers_are_clipped_by_the_data(device: torch.device) -> None:
    """k = 3, s = 2, padding 0: no output beyond (largest coordinate - 2) // 2, and none below 0."""
    net = nn.Sequential(
        spnn.Conv3d(4, 6, 3, stride=2),
        spnn.Conv3d(6, 5, (1, 3, 1), stride=(1, 2, 1)),
        spnn.Conv3d(5, 4, 2, stride=2),
    )
    for high in (16, 15, 13):  # even and odd largest coordinates
        net, ref, x, grid, mine, leaf = start(net, device, 300, high)
        net.zero_grad()
        y = ref.down(ref.down(grid, "0", 3, 2), "1", (1, 3, 1), (1, 2, 1))
        compare(net, ref, net(x), ref.down(y, "2", 2, 2), mine, leaf)
    coords = torch.tensor([[0, 0, 0, 0], [0, 4, 5, 5]]).int().to(device)
    y = net[2](SparseTensor(torch.ones(2, 5, device=device).double(), coords))
    assert y.C.tolist() == [[0, 0, 0, 0]]  # cell (2, 2, 2) would hold the other voxel, but for the largest x


def test_spatial_range_and_dense(device: torch.device) -> None:
    coords, feats = scene(0, 10, 300, 4)
    x = SparseTensor(feats.to(device), coords.to(device), spatial_range=(2, 11, 10, 12))
    conv = spnn.Conv3d(4, 3, 3, stride=2, padding=1).double().to(device)
    y = conv(x)
    assert y.spatial_range == (2, 6, 5, 6) and y.s == (2, 2, 2)
    grid = x.dense().movedim(-1, 1).cpu()
    assert grid.shape == (2, 4, 11, 10, 12)
    full = F.conv3d(grid, kernel_of(conv.kernel.detach().cpu(), 3), stride=2, padding=1)
    close(y.dense().movedim(-1, 1), full * (y.dense() != 0).any(-1).unsqueeze(1).cpu(), "dense")
    ones = F.conv3d(
        (grid != 0).any(1, True).double(), torch.ones(1, 1, 3, 3, 3).double(), stride=2, padding=1
    )
    assert len(y.C) == int((ones > 0).sum())
    with pytest.raises(ValueError, match="spatial_range"):
        SparseTensor(feats, coords).dense()


@pytest.mark.parametrize("size", [2, (3, 1, 5), (1, 2, 3), (3, 3, 2)])
def test_kernels_that_keep_the_voxels(size: Any, device: torch.device) -> None:
    """Odd numbers of offsets are centred, even ones start at 0 on every axis."""
    net, ref, x, grid, mine, leaf = start(nn.Sequential(spnn.Conv3d(4, 5, size, bias=True)), device)
    compare(net, ref, net(x), ref.subm(grid, "0", size), mine, leaf)


def test_functional_conv(device: torch.device) -> None:
    net, _, x, *_ = start(nn.Sequential(spnn.Conv3d(4, 5, 3), spnn.Conv3d(5, 5, 3, 2, bias=True)), device)
    y = spf.conv3d(x, net[0].kernel, 3, padding=1)
    z = spf.conv3d(y, net[1].kernel, kernel_size=3, bias=net[1].bias, stride=2)
    wanted = net(x)
    assert torch.equal(z.F, wanted.F) and z.C is wanted.C
    assert spf.relu(z).F.min() >= 0 and spf.leaky_relu(x, inplace=False).F.min() < 0


def test_config(device: torch.device) -> None:
    """kmap_mode hashmap centres strided kernels, and downsample_mode minkowski leads to the cells."""
    coords, feats = scene(0, HIGH, 200, 4)
    conv = spnn.Conv3d(4, 3, 3, stride=2).double().to(device)
    grid = Grid.of(coords, feats, 0, HIGH)
    for config, on_layer in itertools.product(
        ({"kmap_mode": "hashmap", "downsample_mode": "minkowski"},), (0, 1)
    ):
        conv._config = config if on_layer else None
        spf.conv_config.set_global_conv_config(None if on_layer else config)
        y = conv(SparseTensor(feats.to(device), coords.to(device)))
        wanted = grid.conv(kernel_of(conv.kernel.detach().cpu(), 3), 2, 1, grid.cells(2))
        assert torch.equal(sorted_rows(y.C.cpu()).long(), sorted_rows(wanted.coords()))
        close(y.F, wanted.at(y.C), "cells")
    assert spf.conv_config.get_default_conv_config().dataflow == spf.Dataflow.ImplicitGEMM
    with pytest.raises(ValueError, match="kmap_mode"):
        spf.set_kmap_mode("grid")
    with pytest.raises(ValueError, match="dilation=2"):
        spnn.Conv3d(4, 3, 3, dilation=2)
    options.configure(dilation="ignore")
    assert spnn.Conv3d(4, 3, 3, dilation=2).dilation == (1, 1, 1)
    options.configure(dilation="apply")
    dilated = spnn.Conv3d(4, 3, 3, dilation=2).double().to(device)
    wanted = grid.conv(kernel_of(dilated.kernel.detach().cpu(), 3), 1, 2, dilation=2)
    close(dilated(SparseTensor(feats.to(device), coords.to(device))).F, wanted.at(coords), "dilation")
    with pytest.raises(ValueError, match="generative"):
        spnn.Conv3d(4, 3, 2, 2, transposed=True, generative=True)(SparseTensor(feats, coords))


def test_negative_coordinates(device: torch.device) -> None:
    """Strided layers drop what is below 0; where it is allowed, what is below trunc((least + k - 1) / s)."""
    coords = torch.tensor([[0, -3, 0, 0], [0, -2, 1, 1], [0, 5, 3, 3]]).int().to(device)
    feats = torch.ones(3, 4, device=device).double()
    conv = spnn.Conv3d(4, 3, 2, stride=2).double().to(device)
    assert conv(SparseTensor(feats, coords)).C.tolist() == [[0, 2, 1, 1]]
    torchsparse.tensor.set_allow_negative_coordinates(True)
    y = conv(SparseTensor(feats, coords))
    assert sorted_rows(y.C).tolist() == [[0, -1, 0, 0], [0, 2, 1, 1]]
    kernel = conv.kernel.detach()
    close(y.F[0], (feats[1] @ kernel[3]).cpu(), "the offset (0, 1, 1)")


# ---- 1.x ---------------------------------------------------------------------------------------------------


def test_version_1(device: torch.device) -> None:
    """Columns (x, y, z, batch) in units of tensor stride 1; strided kernels are centred, from the smallest
    coordinate on, without an upper end; kernel size = stride leads to the cells."""
    options.configure(version=1)
    coords, feats = scene(2, HIGH, 300, 4)
    low = coords[:, 1:].amin(0).tolist()
    grid = Grid.of(coords, feats, 0, HIGH + 2)
    first = spnn.Conv3d(4, 6, 3).double().to(device)
    down = spnn.Conv3d(6, 5, 3, stride=2).double().to(device)
    half = spnn.Conv3d(5, 5, 2, stride=2).double().to(device)
    back = spnn.Conv3d(5, 4, 3, stride=2, transposed=True).double().to(device)
    x = SparseTensor(feats.to(device), coords[:, [1, 2, 3, 0]].to(device))
    x1 = first(x)
    x2 = down(x1)
    x4 = half(x2)
    y1 = back(x2)
    g1 = grid.conv(kernel_of(first.kernel.detach().cpu(), 3), 1, 1)
    mask = g1.windows((3, 3, 3), (2, 2, 2), (1, 1, 1), (10, 10, 10))
    for axis, n in enumerate(low):
        mask[(slice(None), *[slice(None)] * axis, slice(0, -(-n // 2)))] = False
    g2 = g1.conv(kernel_of(down.kernel.detach().cpu(), 3), 2, 1, mask)
    g4 = g2.conv(kernel_of(half.kernel.detach().cpu(), 2), 2, 0, g2.cells(2))
    b1 = g2.conv_transpose(kernel_of(back.kernel.detach().cpu(), 3), 2, 1, g1.mask.shape[1:], g1.mask)
    for name, y, wanted, stride in (
        ("subm", x1, g1, 1),
        ("down", x2, g2, 2),
        ("cells", x4, g4, 4),
        ("up", y1, b1, 1),
    ):
        assert y.s == (stride,) * 3, name
        cells = y.C[:, [3, 0, 1, 2]].cpu() // torch.tensor([1, stride, stride, stride])
        assert torch.equal(cells * torch.tensor([1, stride, stride, stride]), y.C[:, [3, 0, 1, 2]].cpu())
        assert torch.equal(sorted_rows(cells).long(), sorted_rows(wanted.coords())), name
        close(y.F, wanted.at(cells), name)
    assert y1.C is x.C and x.cmaps[1, 1, 1] is x.C
    # what 1.x code does by hand: maps handed on
    made = SparseTensor(x2.F, x2.C, x2.s)
    made.cmaps, made.kmaps = x2.cmaps, x2.kmaps
    assert torch.equal(back(made).F, y1.F)
    samples = [SparseTensor(np.ones((3, 2), np.float32), np.arange(9).reshape(3, 3).astype(np.int32))] * 2
    assert sparse_collate(samples).C[:, 3].tolist() == [0, 0, 0, 1, 1, 1]


# ---- points ------------------------------------------------------------------------------------------------


def between(grid: Grid, points: Tensor) -> Tensor:
    """(N, C) at points (N, 4) batch, x, y, z in cells: trilinear between the corners of cells."""
    low = points[:, 1:].floor()
    total = torch.zeros(len(points), 1, dtype=torch.float64)
    made = torch.zeros(len(points), grid.feats.shape[1], dtype=torch.float64)
    for corner in itertools.product((0, 1), repeat=3):
        cell = low + torch.tensor(corner)
        share = (1 - (points[:, 1:] - cell).abs()).prod(1, keepdim=True)
        place = torch.cat([points[:, :1], cell], 1).long()
        inside = (place[:, 1:] < torch.tensor(grid.mask.shape[1:])).all(1)
        place = torch.where(inside.unsqueeze(1), place, 0)
        there = (grid.mask[tuple(place.unbind(1))] & inside).unsqueeze(1)
        share = torch.where(there, share, 0)
        made = made + share * grid.feats.movedim(1, -1)[tuple(place.unbind(1))]
        total = total + share
    return made / (total + 1e-8)


class PointVoxel(nn.Module):
    """Points to voxels, convolutions there, and back to the points, beside a layer on the points alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = spnn.Conv3d(4, 6, 3)
        self.down = spnn.Conv3d(6, 5, 2, stride=2)
        self.point = nn.Linear(4, 5)

    def forward(self, z: torchsparse.PointTensor, locate: Any, around: Any) -> Tensor:
        cells, rows = torch.unique(z.C.floor().int(), dim=0, return_inverse=True)
        rows = locate(z.C.floor().int(), cells)
        x = SparseTensor(spf.spvoxelize(z.F, rows, spf.spcount(rows.int(), len(cells))), cells)
        x = self.down(self.conv(x))
        place = torch.cat([z.C[:, :1], z.C[:, 1:] / x.s[0]], 1)
        found = around(place.floor().int(), x.C)
        weights = spf.calc_ti_weights(place[:, 1:], found)
        return spf.spdevoxelize(x.F, found, weights) + self.point(z.F)


def by_hash(points: Tensor, cells: Tensor) -> Tensor:
    return spf.sphashquery(spf.sphash(points), spf.sphash(cells))


def around_by_hash(points: Tensor, cells: Tensor) -> Tensor:
    """1.x: hashes of the eight corners, whose columns are x, y, z, batch."""
    offsets = spnn.utils.get_kernel_offsets(2, 1, 1, device=points.device)
    last = [1, 2, 3, 0]
    return spf.sphashquery(spf.sphash(points[:, last], offsets), spf.sphash(cells[:, last])).t().contiguous()


def table(points: Tensor, cells: Tensor, size: int) -> Tensor:
    """2.x: the hash table itself."""
    keys = torch.zeros(2 * len(cells), dtype=torch.int64, device=cells.device)
    found = torchsparse.backend.GPUHashTable(keys, keys.int())
    found.insert_coords(cells[:, [1, 2, 3, 0]])
    sizes = torch.tensor([size] * 3, dtype=torch.int32, device=cells.device)
    ones = torch.ones(3, dtype=torch.int32, device=cells.device)
    return found.lookup_coords(points[:, [1, 2, 3, 0]], sizes, ones, size**3) - 1


@pytest.mark.parametrize("how", ["hash", "table"])
def test_point_voxel_branch(how: str, device: torch.device) -> None:
    net = PointVoxel().double().to(device).train()
    ref = Reference(net)
    torch.manual_seed(2)
    points = torch.cat([torch.randint(0, 2, (600, 1)), torch.rand(600, 3) * HIGH], 1).double()
    feats = torch.randn(600, 4, dtype=torch.float64)
    leaf, mine = feats.clone().requires_grad_(), feats.clone().to(device).requires_grad_()
    cells, rows = torch.unique(points.floor().int(), dim=0, return_inverse=True)
    means = torch.zeros(len(cells), 4, dtype=torch.float64).index_add(0, rows, leaf)
    means = means / torch.bincount(rows).unsqueeze(1)
    grid = ref.down(ref.subm(Grid.of(cells, means, 0, HIGH), "conv", 3), "down", 2, 2)
    wanted = between(grid, points / torch.tensor([1, 2, 2, 2])) + F.linear(
        leaf, ref.leaves["point.weight"], ref.leaves["point.bias"]
    )
    z = torchsparse.PointTensor(mine, points.to(device))
    if how == "hash":
        got = net(z, by_hash, around_by_hash)
    else:
        got = net(z, lambda a, b: table(a, b, 1).flatten(), lambda a, b: table(a, b, 2))
    close(got, wanted, "values")
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (got * weights.to(device)).sum().backward()
    close(mine.grad, leaf.grad, "gradient of the points")
    for name, p in net.named_parameters():
        close(p.grad, ref.leaves[name].grad, name)
    again = mine.grad.clone()
    mine.grad = None
    (net(z, by_hash, around_by_hash) * weights.to(device)).sum().backward()
    assert torch.equal(mine.grad, again)  # nothing is left to the order of atomics


def test_hashes(device: torch.device) -> None:
    coords = torch.tensor([[0, 0, 0, 0], [1, 2, 3, 0], [-1, 70000, -70000, 5]]).int().to(device)
    mask = (1 << 64) - 1
    wanted = []
    for row in coords.tolist():
        value = 14695981039346656037
        for number in row:
            value = ((value ^ (number & 0xFFFFFFFF)) * 1099511628211) & mask
        wanted.append((value >> 60) ^ (value & ((1 << 60) - 1)))
    assert spf.sphash(coords).tolist() == wanted
    offsets = torch.tensor([[0, 0, 0], [1, 0, -1]], device=device)
    moved = coords + torch.tensor([1, 0, -1, 0], device=device, dtype=torch.int32)
    assert torch.equal(spf.sphash(coords, offsets), torch.stack([spf.sphash(coords), spf.sphash(moved)]))
    among = torch.tensor([7, 3, 3, 9], device=device)
    assert spf.sphashquery(torch.tensor([[3, 9], [4, 7]], device=device), among).tolist() == [[1, 3], [-1, 0]]
    assert spf.spcount(torch.tensor([2, 0, 2, -1], device=device).int(), 4).tolist() == [1, 0, 2, 0]
    offsets = spnn.utils.get_kernel_offsets(3, stride=2)
    assert offsets[0].tolist() == [-2, -2, -2] and offsets[1].tolist() == [0, -2, -2]
    assert spnn.utils.get_kernel_offsets(2)[1].tolist() == [0, 0, 1]


def test_rows_that_have_no_voxel(device: torch.device) -> None:
    feats = torch.randn(5, 3, device=device).double().requires_grad_()
    rows = torch.tensor([0, 2, -1, 2, 0], device=device)
    counts = spf.spcount(rows.int(), 3)
    y = spf.spvoxelize(feats, rows, counts)
    close(y[2], (feats[1] + feats[3]).detach().cpu() / 2, "mean")
    assert y[1].tolist() == [0, 0, 0]
    y.sum().backward()
    assert feats.grad[:, 0].tolist() == [0.5, 0.5, 0, 0.5, 0.5]
    weights = torch.rand(2, 8, device=device).double()
    assert spf.spdevoxelize(feats, torch.full((2, 8), -1, device=device), weights).abs().sum() == 0


# ---- tensors and caches ------------------------------------------------------------------------------------


def test_a_coordinate_tensor_is_a_set_until_it_is_written_into(device: torch.device) -> None:
    coords, feats = scene(0, HIGH, 100, 4)
    coords, feats = coords.to(device), feats.to(device)
    conv = spnn.Conv3d(4, 4, 3).double().to(device)
    x = SparseTensor(feats, coords)
    y = conv(x)
    assert SparseTensor(feats * 2, coords).coord_set is x.coord_set is y.coord_set
    before = y.coord_set
    coords[:, 1] += 1
    again = conv(SparseTensor(feats, coords))
    assert again.coord_set is not before
    close(again.F, y.F.detach().cpu(), "the same voxels elsewhere")
    x.F = feats.float()
    assert x.feats.dtype == torch.float32 and x.half().F.dtype == torch.float16
    x.C = coords[:50]
    x.F = feats[:50]
    assert len(conv(x).F) == 50
    with pytest.raises(ValueError, match="different coordinates"):
        _ = y + conv(x)
    with pytest.raises(ValueError, match="different coordinates"):
        torchsparse.cat([y, x])
    with pytest.raises(ValueError, match="no strided layer of kernel_size"):
        spnn.Conv3d(4, 4, 2, 2, transposed=True).double().to(device)(y)
    with pytest.raises(TypeError, match="integers"):
        conv(SparseTensor(feats, coords.double()))


def test_duplicates_keep_their_rows(device: torch.device) -> None:
    coords = torch.tensor([[0, 1, 1, 1], [0, 2, 1, 1], [0, 1, 1, 1], [0, 5, 5, 4]]).int().to(device)
    feats = torch.randn(4, 4, device=device).double()
    net = nn.Sequential(
        spnn.Conv3d(4, 3, 3), spnn.Conv3d(3, 3, 2, stride=2), spnn.Conv3d(3, 3, 2, stride=2, transposed=True)
    )
    net = net.double().to(device)
    y = net(SparseTensor(feats, coords))
    single = net(SparseTensor(feats[[0, 1, 3]], coords[[0, 1, 3]]))
    close(y.F, single.F[[0, 1, 0, 2]].detach().cpu(), "rows")
    assert y.C is not None and torch.equal(y.C, coords)


def test_norms_pools_and_crops(device: torch.device) -> None:
    coords, feats = scene(0, HIGH, 200, 4)
    x = SparseTensor(feats.to(device), coords.to(device))
    norm = spnn.GroupNorm(2, 4).double().to(device)
    got = norm(x).F.cpu()
    for b in (0, 1):
        rows = coords[:, 0] == b
        close(got[rows], F.group_norm(feats[rows].t()[None], 2)[0].t(), "group norm")
    parts = [feats[coords[:, 0] == b] for b in (0, 1)]
    close(spnn.GlobalAvgPool()(x), torch.stack([p.mean(0) for p in parts]), "mean")
    close(spnn.GlobalMaxPool()(x), torch.stack([p.amax(0) for p in parts]), "max")
    cut = spnn.SparseCrop((2, 2, 2), (9, 9, 9))(x)
    wanted = ((coords[:, 1:] >= 2) & (coords[:, 1:] < 9)).all(1)
    assert torch.equal(cut.C.cpu(), coords[wanted]) and torch.equal(cut.F.cpu(), feats[wanted])
    assert isinstance(spnn.BatchNorm(4), nn.BatchNorm1d)
    assert spnn.LeakyReLU(0.1)(x).F.min() < 0 <= spnn.ReLU()(x).F.min()


def test_collate_and_quantize() -> None:
    points = np.array([[0.9, 0.1, 0], [0.2, 0.3, 0.4], [-0.1, 0, 0], [1.0, 0, 0]])
    cells, index, inverse = sparse_quantize(points, 0.5, return_index=True, return_inverse=True)
    assert cells.dtype == np.int32 and cells.tolist() == [[-1, 0, 0], [0, 0, 0], [1, 0, 0], [2, 0, 0]]
    assert index.tolist() == [2, 1, 0, 3] and inverse.tolist() == [2, 1, 0, 3]
    assert len(sparse_quantize(points, (1.0, 1.0, 1.0))) == 3
    samples = [
        {
            "x": SparseTensor(np.full((n, 2), n, np.float32), np.arange(3 * n).reshape(n, 3)),
            "label": torch.tensor(n),
            "name": str(n),
        }
        for n in (2, 3)
    ]
    made = sparse_collate_fn(samples)
    assert made["x"].C[:, 0].tolist() == [0, 0, 1, 1, 1] and made["x"].F.shape == (5, 2)
    assert made["label"].tolist() == [2, 3] and made["name"] == ["2", "3"]
    with pytest.raises(ValueError, match=r"inputs\[1\]: coords must be"):
        sparse_collate([samples[0]["x"], SparseTensor(torch.ones(2, 2), torch.zeros(2, 4))])


# ---- checkpoints, settings, names --------------------------------------------------------------------------


def test_checkpoints_go_to_voxmma_models(device: torch.device) -> None:
    """Names and layouts of torchsparse's SparseResUNet42, on a scene that is not clipped."""

    class ResUNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            c = (32, 32, 64, 128, 256, 256, 128, 96, 96)
            self.stem = nn.Sequential(*SparseConvBlock(4, 32, 3), *SparseConvBlock(32, 32, 3))
            self.encoders, self.decoders = nn.ModuleList(), nn.ModuleList()
            for k in range(4):
                blocks = SparseResBlock(c[k], c[k + 1], 3), SparseResBlock(c[k + 1], c[k + 1], 3)
                self.encoders.append(nn.Sequential(SparseConvBlock(c[k], c[k], 2, stride=2), *blocks))
                up = SparseConvTransposeBlock(c[k + 4], c[k + 5], 2, stride=2)
                fuse = SparseResBlock(c[k + 5] + c[3 - k], c[k + 5], 3), SparseResBlock(c[k + 5], c[k + 5], 3)
                self.decoders.append(nn.ModuleDict({"upsample": up, "fuse": nn.Sequential(*fuse)}))

        def forward(self, x: SparseTensor) -> SparseTensor:
            levels = [self.stem(x)]
            for encode in self.encoders:
                levels.append(encode(levels[-1]))
            y = levels.pop()
            for decode in self.decoders:
                y = decode["fuse"](torchsparse.cat([decode["upsample"](y), levels.pop()]))
            return y

    net = ResUNet().to(device).eval()
    ours = models.resunet42(4).to(device).eval()
    state = net.state_dict()
    assert state["stem.0.kernel"].shape == (27, 4, 32) and "decoders.0.upsample.0.kernel" in state
    assert convert.load(ours, state, "torchsparse", rename=models.keys.torchsparse_resunet).complete
    coords, feats = scene(0, 32, 300, 4)
    coords = torch.unique(torch.cat([coords, torch.tensor([[0, 31, 31, 31]])]).int(), dim=0)
    feats = torch.randn(len(coords), 4)
    with torch.no_grad():
        y = net(SparseTensor(feats.to(device), coords.to(device)))
        wanted = ours(voxmma.Voxels(coords.to(device), feats.to(device))).feats
    assert torch.allclose(y.F, wanted, rtol=1e-3, atol=1e-4)


def test_precision_controls_work(device: torch.device) -> None:
    coords, feats = scene(0, HIGH, 200, 4)
    net = nn.Sequential(spnn.Conv3d(4, 8, 3, stride=2), spnn.BatchNorm(8), spnn.ReLU(True)).to(device)
    x = SparseTensor(feats.float().to(device), coords.to(device))
    y = net(x)
    said = str(voxmma.explain(y))
    assert "Conv3d(4, 8, 3x3x3)" in said and said.endswith("then BatchNorm, ReLU")
    handle = voxmma.policy.apply_policy(net, "auto_mixed_bf16")
    try:
        assert voxmma.explain(net[0](x)).compute_dtype == torch.bfloat16
    finally:
        handle.revert()
    y.F = y.F + 1
    with pytest.raises(ValueError, match="record"):
        voxmma.explain(y)
    try:
        compat.install("torchsparse", accumulator="fp16")
        assert spnn.Conv3d(4, 8, 3).accumulator == "fp16"
    finally:
        compat.uninstall("torchsparse")


def test_install_gives_the_same_modules() -> None:
    assert "torchsparse" not in sys.modules
    try:
        assert compat.install("torchsparse", version=1) is torchsparse and options.version == 1
        assert importlib.import_module("torchsparse.nn") is spnn
        found = importlib.import_module("torchsparse.utils.quantize")
        assert found.sparse_quantize is sparse_quantize
        compat.install("torchsparse")
        assert options.version == 2
    finally:
        compat.uninstall("torchsparse")
    assert "torchsparse" not in sys.modules
    with pytest.raises(AttributeError, match=r"no torchsparse.nn.InstanceNorm: use voxmma.nn.InstanceNorm"):
        _ = spnn.InstanceNorm
    with pytest.raises(ValueError, match="version"):
        options.configure(version=3)


def test_inference_mode(device: torch.device) -> None:
    net = nn.Sequential(
        spnn.Conv3d(4, 4, 3), spnn.Conv3d(4, 4, 2, 2), spnn.Conv3d(4, 4, 2, 2, transposed=True)
    )
    net = net.double().to(device).eval()
    coords, feats = scene(0, HIGH, 100, 4)
    wanted = net(SparseTensor(feats.to(device), coords.to(device)))
    with torch.inference_mode():
        x = SparseTensor(feats.to(device) * 1, coords.to(device) + 0)
        y = net(x)
        assert x.coords.is_inference() and y.coord_set is x.coord_set and torch.equal(y.F, wanted.F)
    assert net(SparseTensor(feats.to(device), coords.to(device).clone())).F.requires_grad
