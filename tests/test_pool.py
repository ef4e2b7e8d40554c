"""Pooling over windows and samples, and unpooling, against brute force and torch's dense pooling."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as dense

import voxmma
from voxmma import nn
from voxmma.nn import functional as F
from voxmma.voxels import Voxels

from conftest import grid_coords, kernel_offsets, random_coords

LOCAL: dict[str, Callable[..., Voxels]] = {
    "max": F.max_pool,
    "min": F.min_pool,
    "sum": F.sum_pool,
    "avg": F.avg_pool,
}
GLOBAL: dict[str, Callable[[Voxels], Tensor]] = {
    "max": F.global_max_pool,
    "sum": F.global_sum_pool,
    "avg": F.global_avg_pool,
}
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def brute_pool(kind: str, x: Voxels, out: Tensor, kernel: Any, stride: int, dilation: int, dy: Tensor) -> Any:
    """Output and input gradient by the definition, in fp64: windows in offset order, first of equals wins."""
    rows = {tuple(c): i for i, c in enumerate(x.coords.tolist())}
    feats = x.feats.detach().double().cpu()
    y = torch.zeros(len(out), feats.shape[1], dtype=torch.float64)
    dx = torch.zeros_like(feats)
    for i, (b, *c) in enumerate(out.tolist()):
        window = []
        for offset in kernel_offsets(kernel, dilation):
            row = rows.get((b, *(c[a] * stride + offset[a] for a in range(3))))
            if row is not None:
                window.append(row)
        if not window:
            continue
        if kind in ("sum", "avg"):
            scale = 1 / len(window) if kind == "avg" else 1.0
            y[i] = feats[window].sum(0) * scale
            for row in window:
                dx[row] += dy[i].double() * scale
            continue
        for channel in range(feats.shape[1]):
            values = feats[window, channel].tolist()
            best = values.index(max(values) if kind == "max" else min(values))
            y[i, channel] = values[best]
            dx[window[best], channel] += dy[i, channel].double()
    return y, dx


def check(kind: str, x: Voxels, out: Voxels, kernel: Any, stride: int, dilation: int, rtol: float) -> None:
    dy = torch.randn(out.feats.shape, dtype=torch.float64).to(out.dtype)
    want, dx_want = brute_pool(kind, x, out.coords.cpu(), kernel, stride, dilation, dy)
    (dx,) = torch.autograd.grad(out.feats, x.feats, dy.to(out.device))
    assert out.dtype == x.dtype and dx.dtype == x.dtype
    for got, expected in ((out.feats, want), (dx, dx_want)):
        torch.testing.assert_close(got.detach().cpu().double(), expected, rtol=rtol, atol=8 * rtol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", LOCAL)
@pytest.mark.parametrize(
    ("kernel", "stride", "dilation"), [(2, 2, 1), (3, 2, 1), (3, 1, 1), (2, 1, 2), (1, 2, 1)]
)
def test_windows(
    device: torch.device, kind: str, dtype: torch.dtype, kernel: int, stride: int, dilation: int
) -> None:
    """Small integers: ties everywhere, and sums are exact in every dtype."""
    coords = random_coords(60, 6, 3, seed=2)
    coords = coords[coords[:, 0] != 1]  # sample 1 is empty
    coords[:, 1:] -= 3
    feats = torch.randint(-2, 3, (len(coords), 5)).to(device, dtype).requires_grad_()
    x = Voxels(coords.to(device), feats, batch_size=4)
    y = LOCAL[kind](x, kernel, stride, dilation)
    assert y.batch_size == 4 and y.stride == (stride,) * 3
    assert (y.coord_set is x.coord_set) == (stride == 1)
    rtol = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
    check(kind, x, y, kernel, stride, dilation, rtol)


@given(
    st.lists(st.tuples(st.integers(0, 2), *[st.integers(-4, 4)] * 3), max_size=14, unique=True),
    st.sampled_from(sorted(LOCAL)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 2),
)
@settings(max_examples=60, deadline=None)
def test_property_windows(rows: list[Any], kind: str, kernel: int, stride: int, dilation: int) -> None:
    coords = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)
    generator = torch.Generator().manual_seed(len(rows))
    feats = torch.randint(-1, 2, (len(rows), 2), generator=generator).double().requires_grad_()
    x = Voxels(coords, feats, batch_size=4)
    check(kind, x, LOCAL[kind](x, kernel, stride, dilation), kernel, stride, dilation, 1e-12)


def test_dense_pooling_of_full_grids(device: torch.device) -> None:
    coords = grid_coords((6, 6, 6), 2)
    feats = torch.randn(len(coords), 3, dtype=torch.float64)
    x = Voxels(coords.to(device), feats.to(device))
    grid = x.cpu().dense()
    for kernel, stride in ((2, 2), (3, 3)):
        y = {kind: pool(x, kernel, stride, padding=0) for kind, pool in LOCAL.items()}
        cells = y["max"].cpu().dense()
        torch.testing.assert_close(cells, dense.max_pool3d(grid, kernel, stride))
        torch.testing.assert_close(y["min"].cpu().dense(), -dense.max_pool3d(-grid, kernel, stride))
        torch.testing.assert_close(y["avg"].cpu().dense(), dense.avg_pool3d(grid, kernel, stride))
        want = dense.avg_pool3d(grid, kernel, stride) * kernel**3
        torch.testing.assert_close(y["sum"].cpu().dense(), want)


def test_average_divides_by_the_count_present(device: torch.device) -> None:
    coords = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1], [0, 2, 0, 0]], device=device)
    x = Voxels(coords, torch.tensor([[1.0], [4.0], [7.0]], device=device))
    assert F.avg_pool(x, 2).feats.flatten().tolist() == [2.5, 7.0]


def test_ties_take_the_first_offset_and_nan_wins(device: torch.device) -> None:
    coords = torch.tensor([[0, 1, 1, 1], [0, 0, 0, 1], [0, 0, 0, 0]], device=device)
    feats = torch.tensor([[5.0, 1.0], [5.0, math.nan], [5.0, 2.0]], device=device, requires_grad=True)
    for pool in (F.max_pool, F.min_pool):
        y = pool(Voxels(coords, feats), 2).feats
        assert y[0, 0] == 5 and bool(y[0, 1].isnan())
        (dx,) = torch.autograd.grad(y.sum(), feats)
        assert dx.tolist() == [[0, 0], [0, 1], [1, 0]]  # (0,0,0) has offset 0
    infinite = Voxels(coords, torch.full((3, 1), -math.inf, device=device))
    assert F.max_pool(infinite, 2).feats.tolist() == [[-math.inf]]


def test_windows_without_voxels_give_zero_and_no_gradient(device: torch.device) -> None:
    feats = torch.full((1, 2), -3.0, device=device, requires_grad=True)
    x = Voxels(torch.tensor([[0, 0, 0, 0]], device=device), feats)
    target = torch.tensor([[0, 50, 0, 0], [0, 0, 0, 0]], device=device)
    for pool in LOCAL.values():
        y = pool(x, 2, coords=target).feats
        assert y.tolist() == [[0, 0], [-3, -3]]
        assert torch.autograd.grad(y[0].sum(), feats, retain_graph=True)[0].tolist() == [[0, 0]]
        assert torch.autograd.grad(y.sum(), feats)[0].tolist() == [[1, 1]]


@pytest.mark.parametrize("pool", LOCAL.values(), ids=LOCAL)
def test_window_gradients(device: torch.device, pool: Callable[..., Voxels]) -> None:
    coords = voxmma.CoordSet(random_coords(20, 4, 2).to(device))
    feats = torch.randperm(60, dtype=torch.float64).reshape(20, 3).to(device).requires_grad_()
    for kernel, stride in ((2, 2), (3, 2), (3, 1), (2, 1)):
        run = lambda f, k=kernel, s=stride: pool(Voxels(coords, f), k, s).feats  # noqa: E731
        assert torch.autograd.gradcheck(run, (feats,))
        assert torch.autograd.gradgradcheck(run, (feats,), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_sums_are_kept_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """512 ones and a 2048: adding in the dtype itself would lose every one of them."""
    coords = grid_coords((8, 8, 8))
    feats = torch.ones(512, 1).to(device, dtype)
    feats[0] = 2048
    x = Voxels(coords.to(device), feats)
    for got, want in (
        (F.sum_pool(x, 8).feats, 2559),
        (F.avg_pool(x, 8).feats, 2559 / 512),
        (F.global_sum_pool(x), 2559),
        (F.global_avg_pool(x), 2559 / 512),
    ):
        assert got.dtype == dtype and got.item() == torch.tensor(want).to(dtype).item()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", GLOBAL)
@pytest.mark.parametrize("rows", [0, 1, 63, 64, 65, 300, 9000])
def test_samples(device: torch.device, kind: str, dtype: torch.dtype, rows: int) -> None:
    """One row a sample, empty ones give 0 without gradient, ties go to the smallest row."""
    coords = random_coords(rows, 16, 3, seed=rows)
    coords[coords[:, 0] == 1, 0] = 3
    values = torch.randint(-3, 4, (rows, 3)) - 5 * (kind == "max")
    feats = values.to(device, dtype).requires_grad_()
    x = Voxels(coords.to(device), feats, batch_size=5)
    y = GLOBAL[kind](x)
    assert y.shape == (5, 3) and y.dtype == dtype
    dy = torch.randint(1, 4, (5, 3)).to(device, dtype)
    (dx,) = torch.autograd.grad(y, feats, dy)
    want, dx_want = torch.zeros(5, 3, dtype=torch.float64), torch.zeros(rows, 3, dtype=torch.float64)
    for b in range(5):
        mine = torch.nonzero(coords[:, 0] == b).flatten()
        if not len(mine):
            continue
        v, g = values[mine].double(), dy[b].cpu().double()
        if kind == "max":
            best = torch.tensor([v[:, c].tolist().index(v[:, c].max()) for c in range(3)])
            want[b] = v.amax(0)
            dx_want[mine[best], torch.arange(3)] = g
        else:
            scale = 1 / len(mine) if kind == "avg" else 1.0
            want[b], dx_want[mine] = v.sum(0) * scale, g * scale
    rtol = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(dtype, 1e-6)
    torch.testing.assert_close(y.detach().cpu().double(), want, rtol=rtol, atol=rtol)
    torch.testing.assert_close(dx.cpu().double(), dx_want, rtol=rtol, atol=1e-7)


def test_global_max_takes_nan_and_minus_infinity(device: torch.device) -> None:
    feats = torch.full((200, 2), -math.inf, device=device)
    feats[150, 1] = math.nan
    feats.requires_grad_()
    y = F.global_max_pool(Voxels(random_coords(200, 10).to(device), feats))
    assert y[0, 0] == -math.inf and bool(y[0, 1].isnan())
    (dx,) = torch.autograd.grad(y.sum(), feats)
    assert torch.nonzero(dx).tolist() == [[0, 0], [150, 1]]
    nothing = Voxels(torch.zeros(0, 4, dtype=torch.int32, device=device), torch.zeros(0, 2, device=device))
    assert [pool(nothing).shape for pool in GLOBAL.values()] == [(0, 2)] * 3


@pytest.mark.parametrize("pool", GLOBAL.values(), ids=GLOBAL)
def test_global_gradients(device: torch.device, pool: Callable[[Voxels], Tensor]) -> None:
    coords = voxmma.CoordSet(random_coords(100, 6, 3).to(device), 4)
    feats = torch.randperm(200, dtype=torch.float64).reshape(100, 2).to(device).requires_grad_()
    assert torch.autograd.gradcheck(lambda f: pool(Voxels(coords, f)), (feats,))
    assert torch.autograd.gradgradcheck(lambda f: pool(Voxels(coords, f)), (feats,), fast_mode=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unpool_undoes_the_shape_of_pooling(device: torch.device, dtype: torch.dtype) -> None:
    x = Voxels(
        (random_coords(80, 9, 2) - torch.tensor([0, 4, 4, 4])).to(device),
        torch.randn(80, 3).to(device, dtype),
    )
    for kernel, stride in ((2, 2), (3, 2), (3, 3)):
        low = F.max_pool(x, kernel, stride)
        feats = low.feats.clone().requires_grad_()
        top = F.unpool(low.with_feats(feats), stride)
        assert top.coord_set is x.coord_set and top.stride == x.stride
        cell = x.coords.clone()
        cell[:, 1:] = cell[:, 1:].div(stride, rounding_mode="floor")
        parent = low.coord_set.lookup(cell)
        if (kernel, stride) != (3, 3):  # there the window of a cell's neighbour may hold it instead
            assert int(parent.min()) >= 0
        want = torch.where((parent >= 0).unsqueeze(1), low.feats[parent.clamp(min=0)], 0)
        assert torch.equal(top.feats, want)
        (dx,) = torch.autograd.grad(top.feats.sum(), feats)
        present = torch.bincount(parent[parent >= 0].cpu(), minlength=low.num_voxels)
        assert torch.equal(dx.cpu().long(), present.unsqueeze(1).expand(-1, 3))
    all_children = F.unpool(low, 2, generative=True)
    assert all_children.num_voxels == 8 * low.num_voxels
    torch.testing.assert_close(F.max_pool(all_children, 2).feats, low.feats[low.coord_set.sorted_keys()[1]])


def test_layers_are_their_functions(device: torch.device) -> None:
    x = Voxels(random_coords(60, 6, 2).to(device), torch.randn(60, 4).to(device), batch_size=3)
    layers = {
        "max": nn.SparseMaxPool3d,
        "min": nn.SparseMinPool3d,
        "sum": nn.SparseSumPool3d,
        "avg": nn.SparseAvgPool3d,
    }
    for kind, layer in layers.items():
        for window in ((2,), (3, 2), (3, 2, 2), (3, 2, 1, 0), ((1, 2, 3), 1)):
            y, z = layer(*window)(x), LOCAL[kind](x, *window)
            assert torch.equal(y.feats, z.feats) and y.coord_set is z.coord_set
    kinds = {"max": nn.GlobalMaxPool, "sum": nn.GlobalSumPool, "avg": nn.GlobalAvgPool}
    for kind, layer in kinds.items():
        assert torch.equal(layer()(x), GLOBAL[kind](x))
    low = nn.SparseMaxPool3d(2)(x)
    assert low.coord_set is nn.SparseConv3d(4, 4, 2, 2, device=device)(x).coord_set
    assert torch.equal(nn.Unpool(2)(low).feats, F.unpool(low, 2).feats)
    assert "stride=(2, 2, 2)" in repr(nn.SparseMaxPool3d(2)) and "padding" in repr(
        nn.SparseMaxPool3d(3, 2, 1, 0)
    )
    for layer, bad in itertools.product(
        layers.values(), ({"kernel_size": 0}, {"kernel_size": 2, "stride": 0})
    ):
        with pytest.raises(ValueError, match=r"kernel_size|stride"):
            layer(**bad)
    with pytest.raises(TypeError, match="Voxels"):
        F.max_pool(x.feats, 2)  # type: ignore[arg-type]


def test_results_repeat_bit_by_bit(device: torch.device) -> None:
    coords = random_coords(3000, 20, 2).to(device)
    feats = torch.randn(3000, 8).to(device).requires_grad_()

    def run() -> list[Tensor]:
        x = Voxels(coords, feats)
        made = [pool(x, 3, 2).feats for pool in LOCAL.values()] + [pool(x) for pool in GLOBAL.values()]
        return [*made, *(torch.autograd.grad(y.square().sum(), feats)[0] for y in made)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))
