"""Public faults of this family of libraries in strided, transposed and pooling layers: one test a fault, its
number in the name (the list is in docs/faults.md), the whole kind and not only the case that was reported."""

from __future__ import annotations

import gc
import itertools
import resource
from pathlib import Path

import pytest
import torch

import voxmma
from voxmma import nn
from voxmma.nn import functional as F
from voxmma.nn.functional import sparse_conv_transpose, spatially_sparse_conv
from voxmma.sparse.tensor import Voxels

from conftest import grid_coords, random_coords


def ones(coords: torch.Tensor, device: torch.device, batch_size: int | None = None) -> Voxels:
    return Voxels(coords.to(device), torch.ones(len(coords), 1, device=device), batch_size)


def weight(kernel: int, device: torch.device) -> torch.Tensor:
    return torch.ones(kernel**3, 1, 1, device=device)


def test_fault_12_strided_layers_lose_no_voxels(device: torch.device) -> None:
    """Every voxel stays within some window when windows cover the grid, wherever it lies; N = 0 passes."""
    lonely = ones(torch.tensor([[0, 7, 153, 142]]), device)
    y = spatially_sparse_conv(lonely, weight(3, device), 3, stride=2)
    assert [0, 3, 76, 71] in y.coords.tolist() and bool((y.feats == 1).all())
    for kernel, stride in ((2, 2), (3, 2), (3, 3), (3, 1), (5, 2), (4, 2)):
        for place in itertools.product((-1, 0, 7, 199), (0, -153), (142, 199)):
            x = ones(torch.tensor([[0, *place]]), device)
            y = spatially_sparse_conv(x, weight(kernel, device), kernel, stride=stride)
            assert y.num_voxels >= 1 and bool((y.feats == 1).all())
            assert F.max_pool(x, kernel, stride).num_voxels == y.num_voxels
    for _ in range(20):  # and the last voxel survives a deep encoder
        lonely = spatially_sparse_conv(lonely, weight(2, device), 2, stride=2)
        assert lonely.num_voxels == 1
    nothing = ones(torch.zeros(0, 4, dtype=torch.int32), device, 2)
    for layer in (
        nn.SparseConv3d(1, 1, 3, 2),
        nn.SparseConvTranspose3d(1, 1, 3, 2),
        nn.SparseConv3d(1, 1, 3, generative=True),
    ):
        assert layer.to(device)(nothing).counts.tolist() == [0, 0]


def test_fault_16_transposed_without_an_encoder(device: torch.device) -> None:
    """A transposed layer on voxels no strided layer made: all children, in order, with their values."""
    x = ones(torch.tensor([[0, 3, -2, 5]]), device)
    y = nn.SparseConvTranspose3d(1, 1, 2, 2, device=device)(x)
    assert y.coords.tolist() == [
        [0, 6 + i, -4 + j, 10 + k] for i, j, k in itertools.product((0, 1), repeat=3)
    ]
    for kernel, stride in ((2, 2), (3, 2), (3, 3), (1, 2), (3, 1)):
        many = ones(random_coords(50, 8, 2), device)
        made = sparse_conv_transpose(many, weight(kernel, device), kernel, stride=stride)
        assert float(made.feats.sum()) == 50 * kernel**3 or stride == 1
        assert made.stride == (1, 1, 1)
    loaded = sparse_conv_transpose(
        ones(random_coords(9, 4), device).to("cpu"), weight(2, torch.device("cpu")), 2, stride=2
    )
    assert loaded.num_voxels == 72


def test_fault_17_strided_coordinates_are_the_expected_ones(device: torch.device) -> None:
    full = ones(grid_coords((4, 4, 4)), device)
    y = spatially_sparse_conv(full, weight(2, device), 2, stride=2)
    assert torch.equal(y.coords.cpu(), grid_coords((2, 2, 2))) and bool((y.feats == 8).all())
    for stride in (2, 3, 4):
        coords = random_coords(100, 20, 2) - torch.tensor([0, 10, 10, 10], dtype=torch.int32)
        x = ones(coords, device)
        y = spatially_sparse_conv(x, weight(stride, device), stride, stride=stride, padding=0)
        cells = {(b, i // stride, j // stride, k // stride) for b, i, j, k in coords.tolist()}
        assert [tuple(c) for c in y.coords.tolist()] == sorted(cells)
        assert float(y.feats.sum()) == 100  # a partition: every voxel counts once


def test_fault_18_pointwise_with_stride_or_padding(device: torch.device) -> None:
    """k = 1 with a stride keeps the voxels on the stride's grid, as conv3d does."""
    alone = ones(torch.tensor([[0, 4, -2, 6]]), device)
    y = spatially_sparse_conv(alone, weight(1, device), 1, stride=2)
    assert y.coords.tolist() == [[0, 2, -1, 3]] and y.feats.tolist() == [[1]]
    assert (
        spatially_sparse_conv(
            ones(torch.tensor([[0, 1, 0, 0]]), device), weight(1, device), 1, stride=2
        ).num_voxels
        == 0
    )
    coords = random_coords(200, 12)
    x = Voxels(coords.to(device), torch.randn(200, 3, dtype=torch.float64).to(device))
    w = torch.randn(1, 3, 2, dtype=torch.float64).to(device)
    for stride, padding in ((2, 0), (2, 1), (3, 2), (1, 1), (2, -1)):
        y = spatially_sparse_conv(x, w, 1, stride=stride, padding=padding, generative=True)
        kept = ((coords[:, 1:] + padding) % stride == 0).all(1)
        place = coords[kept].clone()
        place[:, 1:] = (place[:, 1:] + padding).div(stride, rounding_mode="floor")
        order = y.coord_set.lookup(place.to(device))
        assert y.num_voxels == int(kept.sum()) and bool((order >= 0).all())
        torch.testing.assert_close(y.feats[order], x.feats[kept.to(device)] @ w[0])


def test_fault_22_no_memory_blow_up(device: torch.device) -> None:
    """Memory follows the voxels, not the box around them: transposed k = 3, s = 2 on 1000 voxels in 500^3."""
    x = ones(random_coords(1000, 500), device)
    spatially_sparse_conv(x, weight(3, device), 3)  # loads everything
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    y = sparse_conv_transpose(x, weight(3, device), 3, stride=2)
    assert 20_000 < y.num_voxels <= 27_000
    if device.type == "cuda":
        assert torch.cuda.max_memory_allocated() - held < 64 << 20
    else:
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10
    with pytest.raises(ValueError, match="max_voxels"):
        sparse_conv_transpose(x, weight(3, device), 3, stride=2, max_voxels=20_000)


@pytest.mark.parametrize("steps", [pytest.param(1000, marks=pytest.mark.slow), 20])
def test_fault_22_no_leak(device: torch.device, steps: int) -> None:
    """Training steps on new coordinates, and on the same ones, leave nothing behind, collector or not."""
    down = nn.SparseConv3d(2, 2, 3, 2, device=device)
    up = nn.SparseConvTranspose3d(2, 2, 3, 2, device=device)
    grow = nn.SparseConvTranspose3d(2, 1, 2, 2, generative=True, device=device)
    same = voxmma.CoordSet(random_coords(30, 20).to(device))

    def step(i: int) -> None:
        for coords in (same, voxmma.CoordSet(random_coords(30, 20, seed=i).to(device))):
            feats = torch.ones(30, 2, device=device, requires_grad=True)
            y = down(Voxels(coords, feats))
            (up(F.max_pool(y, 2)).feats.sum() + up(y).feats.sum() + grow(y).feats.sum()).backward()

    def held() -> int:
        """Bytes: of tensors on a GPU, of the process (to the page) otherwise."""
        if device.type == "cuda":
            return torch.cuda.memory_allocated()
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    def sets() -> int:
        return sum(type(o) in (voxmma.CoordSet, torch.Tensor) for o in gc.get_objects())

    for i in range(8):
        step(i)
    gc.collect()
    gc.disable()
    try:
        step(0)
        count, memory = sets(), held()
        for i in range(steps):
            step(i)
        assert sets() == count
        assert held() - memory <= (0 if device.type == "cuda" else 16 << 20)
    finally:
        gc.enable()
