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
from torch.library import opcheck
from torch.nn import functional as dense

import voxmma
from voxmma import nn
from voxmma.nn import functional as F
from voxmma.sparse.tensor import Voxels

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
    y = LOCAL[kind](x, kernel, stride, dilation=dilation)
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
    check(kind, x, LOCAL[kind](x, kernel, stride, dilation=dilation), kernel, stride, dilation, 1e-12)


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
    coords = voxmma.CoordSet(random_coords(20, 3, 2).to(device))
    feats = torch.randperm(40, dtype=torch.float64).reshape(20, 2).to(device).requires_grad_()
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
        for window, options in (
            ((2,), {}),
            ((3, 2), {}),
            ((3, 2), {"dilation": 2}),
            ((3, 2), {"padding": 0}),
            (((1, 2, 3), 1), {}),
        ):
            y, z = layer(*window, **options)(x), LOCAL[kind](x, *window, **options)
            assert torch.equal(y.feats, z.feats) and y.coord_set is z.coord_set
    kinds = {"max": nn.GlobalMaxPool, "sum": nn.GlobalSumPool, "avg": nn.GlobalAvgPool}
    for kind, layer in kinds.items():
        assert torch.equal(layer()(x), GLOBAL[kind](x))
    low = nn.SparseMaxPool3d(2)(x)
    assert low.coord_set is nn.SparseConv3d(4, 4, 2, 2, device=device)(x).coord_set
    assert torch.equal(nn.Unpool(2)(low).feats, F.unpool(low, 2).feats)
    assert "stride=(2, 2, 2)" in repr(nn.SparseMaxPool3d(2)) and "padding" in repr(
        nn.SparseMaxPool3d(3, 2, dilation=1, padding=0)
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


# ---- unpooling onto the winners ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_max_unpool_is_that_of_dense_grids(device: torch.device, dtype: torch.dtype) -> None:
    coords = grid_coords((6, 4, 8), 2)
    feats = torch.stack([torch.randperm(len(coords)) for _ in range(5)], 1).to(device, dtype)
    x = Voxels(coords.to(device), feats)
    y, indices = nn.SparseMaxPool3d(2, return_indices=True)(x)
    assert torch.equal(y.feats, F.max_pool(x, 2).feats)
    assert torch.equal(x.feats.gather(0, indices.rows()), y.feats)
    grid = x.cpu().dense().float()
    pooled, places = dense.max_pool3d(grid, 2, return_indices=True)
    back = nn.MaxUnpool()(y, indices)
    assert back.coord_set is x.coord_set and back.stride == x.stride and back.dtype == dtype
    if (
        dtype != torch.bfloat16
    ):  # in which not all of the numbers differ: ties may go elsewhere in a dense grid
        assert torch.equal(back.cpu().dense().float(), dense.max_unpool3d(pooled, places, 2))


def test_max_unpool_adds_where_windows_overlap(device: torch.device) -> None:
    coords = random_coords(80, 6, 2)
    feats = torch.randint(-9, 10, (80, 3), dtype=torch.float64).to(device)
    x = Voxels(coords.to(device), feats)
    for pool, kernel, stride in ((F.max_pool_with_indices, 3, 1), (F.min_pool_with_indices, 3, 2)):
        y, indices = pool(x, kernel, stride)
        values = torch.randn(y.feats.shape, dtype=torch.float64).to(device).requires_grad_()
        back = F.max_unpool(y.with_feats(values), indices)
        rows = indices.rows()
        assert torch.equal(feats.gather(0, rows), y.feats)
        want = torch.zeros_like(feats).scatter_add_(0, rows, values.detach())
        torch.testing.assert_close(back.feats.detach(), want)
        g = torch.randn_like(feats)
        (dv,) = torch.autograd.grad(back.feats, values, g)
        assert torch.equal(dv, g.gather(0, rows))
        assert torch.autograd.gradcheck(
            lambda v, y=y, i=indices: F.max_unpool(y.with_feats(v), i).feats, (values,), fast_mode=True
        )


def test_max_unpool_of_windows_without_voxels(device: torch.device) -> None:
    x = Voxels(torch.tensor([[0, 0, 0, 0]], device=device), torch.full((1, 2), -3.0, device=device))
    target = torch.tensor([[0, 50, 0, 0], [0, 0, 0, 0]], device=device)
    y, indices = F.max_pool_with_indices(x, 2, coords=target)
    assert indices.rows().tolist() == [[-1, -1], [0, 0]]
    back = F.max_unpool(y.with_feats(torch.ones_like(y.feats)), indices)
    assert back.feats.tolist() == [[1, 1]]


def test_max_unpool_says_what_is_wrong(device: torch.device) -> None:
    x = Voxels(random_coords(40, 5, 2).to(device), torch.randn(40, 3, device=device))
    y, indices = F.max_pool_with_indices(x, 2)
    assert "3 channels" in repr(indices)
    with pytest.raises(TypeError, match="Voxels"):
        F.max_unpool(y.feats, indices)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="indices must be PoolIndices, got Tensor"):
        F.max_unpool(y, indices.winner)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="other coordinates"):
        F.max_unpool(x, indices)
    with pytest.raises(ValueError, match="x has 1 channels, the indices are of 3"):
        F.max_unpool(y.with_feats(y.feats[:, :1]), indices)


# ---- 2-D ---------------------------------------------------------------------------------------------------


def test_planar_layers(device: torch.device) -> None:
    layers: dict[str, tuple[Any, Any]] = {
        "max": (nn.SparseMaxPool2d, nn.SparseMaxPool3d),
        "min": (nn.SparseMinPool2d, nn.SparseMinPool3d),
        "sum": (nn.SparseSumPool2d, nn.SparseSumPool3d),
        "avg": (nn.SparseAvgPool2d, nn.SparseAvgPool3d),
    }
    x = Voxels(random_coords(90, 6, 2).to(device), torch.randn(90, 4).to(device))
    for flat, solid in layers.values():
        for plain, full in (
            (((2,), {}), (((2, 2, 1),), {})),
            ((((3, 2), 1), {}), (((3, 2, 1), 1), {})),
            (((3, (2, 1)), {"padding": 0}), (((3, 3, 1), (2, 1, 1)), {"padding": (0, 0, 0)})),
            (
                ((3, 2), {"dilation": 2, "padding": (1, 2)}),
                (((3, 3, 1), (2, 2, 1)), {"dilation": (2, 2, 1), "padding": (1, 2, 0)}),
            ),
        ):
            one, other = flat(*plain[0], **plain[1]), solid(*full[0], **full[1])
            y, z = one(x), other(x)
            assert torch.equal(y.feats, z.feats) and y.coord_set is z.coord_set and y.stride == z.stride
            assert repr(one).split("(", 1)[1] == repr(other).split("(", 1)[1]
        with pytest.raises(TypeError, match="kernel_size must be an int or two"):
            flat((2, 2, 2))
    coords = grid_coords((6, 6, 1))
    grid = Voxels(coords.to(device), torch.randn(36, 3, dtype=torch.float64).to(device))
    image = grid.cpu().dense()[..., 0]
    got = nn.SparseMaxPool2d(2)(grid).cpu().dense()[..., 0]
    pooled, places = dense.max_pool2d(image, 2, return_indices=True)
    assert torch.equal(got, pooled)
    y, indices = nn.SparseMaxPool2d(2, return_indices=True)(grid)
    back = nn.MaxUnpool()(y, indices).cpu().dense()[..., 0]
    assert torch.equal(back, dense.max_unpool2d(pooled, places, 2))


# ---- the ops -----------------------------------------------------------------------------------------------


class Window:
    """A map and the arguments that the ops take for it."""

    def __init__(self, device: torch.device, kernel: int, stride: int, n: int = 60, extent: int = 6) -> None:
        coords = voxmma.CoordSet(random_coords(n, extent, 2, seed=4).to(device), 2)
        self.map = voxmma.kernel_map(coords, kernel, stride=stride)
        self.maps = self.map.tensors, [] if self.map.symmetric else self.map.transposed().tensors
        self.n_in, self.n_out, self.volume = coords.num, self.map.out_coords.num, self.map.kernel_volume
        self.facts = self.volume, self.n_out, self.map.symmetric

    def sum(self, x: Tensor, in_count: Tensor | None = None, out_count: Tensor | None = None) -> Tensor:
        return torch.ops.voxmma.pool_sum(x, in_count, out_count, *self.maps, *self.facts, False)

    def max(self, x: Tensor, keep: bool = True) -> tuple[Tensor, Tensor]:
        return torch.ops.voxmma.pool_max(x, *self.maps, *self.facts, True, keep)

    def pick(self, x: Tensor, winner: Tensor) -> Tensor:
        return torch.ops.voxmma.pool_pick(x, winner, *self.maps, self.volume, self.map.symmetric)

    def put(self, x: Tensor, winner: Tensor) -> Tensor:
        return torch.ops.voxmma.pool_put(x, winner, *self.maps, self.volume, self.n_in, self.map.symmetric)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), pytest.param(3, 1, marks=pytest.mark.slow)])
def test_opcheck(device: torch.device, kernel: int, stride: int) -> None:
    over = Window(device, kernel, stride)
    ops, maps, (volume, n_out, symmetric) = torch.ops.voxmma, over.maps, over.facts
    x = torch.randn(over.n_in, 3, device=device, requires_grad=True)
    dy = torch.randn(over.n_out, 3, device=device, requires_grad=True)
    count, back = over.map.counts, over.map.transposed().counts
    for counts in ((None, None), (None, count), (back, count)):
        opcheck(ops.pool_sum, (x, *counts, *maps, *over.facts, False))
    winner = over.max(x.detach())[1]
    for largest, keep in ((True, True), (False, True)):
        opcheck(ops.pool_max, (x, *maps, *over.facts, largest, keep))
    opcheck(ops.pool_max, (x.detach(), *maps, *over.facts, True, False))
    opcheck(ops.pool_pick, (x, winner, *maps, volume, symmetric))
    opcheck(ops.pool_put, (dy, winner, *maps, volume, over.n_in, symmetric))
    opcheck(ops.neighbor_counts, (maps[0], volume, n_out))
    rows, starts = torch.arange(over.n_in, device=device), torch.tensor([0, 7, 7], device=device)
    opcheck(ops.segment_sum, (x.detach(), rows, starts))
    opcheck(ops.segment_argmax, (x.detach(), None, rows, starts))
    best = ops.segment_argmax(x.detach(), None, rows, starts)
    assert best[1].tolist() == [-1, -1, -1]
    opcheck(ops.segment_argmax, (x.detach(), best, torch.arange(3, device=device), starts[:1]))


def test_pick_and_put_are_transposes_of_each_other(device: torch.device) -> None:
    for kernel, stride in ((2, 2), (3, 1), (3, 2)):
        over = Window(device, kernel, stride)
        x, dy = (torch.randn(n, 2, dtype=torch.float64, device=device) for n in (over.n_in, over.n_out))
        y, winner = over.max(x)
        assert torch.equal(over.pick(x, winner), y)
        torch.testing.assert_close((over.pick(x, winner) * dy).sum(), (x * over.put(dy, winner)).sum())
        for run in (over.pick, lambda v, w, put=over.put: put(v, w)):
            values = (x if run == over.pick else dy).clone().requires_grad_()
            function = lambda v, run=run, w=winner: run(v, w)  # noqa: E731
            assert torch.autograd.gradcheck(function, (values,), fast_mode=True)
            assert torch.autograd.gradgradcheck(function, (values,), fast_mode=True)


def test_winners_take_one_byte_where_that_is_enough(device: torch.device) -> None:
    x = torch.randn(30, 2, device=device)
    for kernel, dtype in ((6, torch.uint8), (7, torch.int16)):
        over = Window(device, kernel, 2, n=30)
        y, winner = over.max(x)
        assert winner.dtype == dtype and int(winner.max()) < over.volume
        assert torch.equal(over.pick(x, winner), y)
    assert over.max(x, keep=False)[1].shape == (0, 2)


def test_winners_may_lie_anywhere(device: torch.device) -> None:
    for kernel, channels in ((6, 32), (7, 16)):
        over = Window(device, kernel, 2)
        x = torch.randn(over.n_in, channels, device=device)
        y, winner = over.max(x)
        memory = winner.new_zeros(winner.numel() + 1)
        moved = memory[1:].view(winner.shape).copy_(winner)
        assert torch.equal(over.pick(x, moved), y)
        assert torch.equal(over.put(y, moved), over.put(y, winner))


def test_counts_are_those_of_the_table(device: torch.device) -> None:
    for kernel, stride in ((2, 2), (3, 1), (3, 2), (7, 1)):
        made = Window(device, kernel, stride).map
        for way in (made, made.transposed()):
            assert torch.equal(way.counts, (way.neighbor_table() >= 0).sum(0).int())
            assert way.counts is way.counts


BAD: list[tuple[str, Callable[[Window, Tensor], Any]]] = [
    ("x must have 2 dimensions", lambda w, x: w.sum(x[0])),
    ("x has dtype Int", lambda w, x: w.sum(x.int())),
    ("in_count must be contiguous Int", lambda w, x: w.sum(x, w.map.counts)),
    ("out_count must be contiguous Int", lambda w, x: w.sum(x, None, w.map.counts.long())),
    ("winner must be contiguous Byte", lambda w, x: w.pick(x, w.max(x)[1][:, :2])),
    ("winner must be contiguous Byte", lambda w, x: w.put(x, w.max(x)[1])),
    ("winner must be contiguous Byte", lambda w, x: w.pick(x, w.max(x)[1].short())),
    (
        "map_t is empty, but pool_put",
        lambda w, x: torch.ops.voxmma.pool_put(
            w.max(x)[0], w.max(x)[1], w.maps[0], [], w.volume, w.n_in, False
        ),
    ),
    (
        "map must hold",
        lambda w, x: torch.ops.voxmma.pool_sum(x, None, None, w.maps[0][:2], [], *w.facts, False),
    ),
    (
        "keep_winner=True",
        lambda w, x: torch.autograd.grad(w.max(x.requires_grad_(), False)[0].sum(), x),
    ),
]


@pytest.mark.parametrize(("message", "call"), BAD, ids=[f"{i}-{m[:20]}" for i, (m, _) in enumerate(BAD)])
def test_bad_argument_is_named(device: torch.device, message: str, call: Any) -> None:
    over = Window(device, 2, 2)
    x = torch.randn(over.n_in, 3, device=device)
    with pytest.raises(RuntimeError, match=message):
        call(over, x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_strides(device: torch.device, dtype: torch.dtype) -> None:
    """Rows that are neither aligned nor contiguous, between NaNs; columns; expanded and strided gradients."""
    for channels in (1, 3, 8, 24):
        for kernel, stride in ((2, 2), (3, 1)):
            over = Window(device, kernel, stride)
            x = torch.randn(over.n_in, channels).to(device, dtype)
            wide = torch.full((over.n_in, channels + 9), math.nan, dtype=dtype, device=device)
            wide[:, 1 : 1 + channels] = x
            for like in (wide[:, 1 : 1 + channels], x.t().contiguous().t()):
                assert torch.equal(over.sum(like), over.sum(x))
                for got, want in zip(over.max(like), over.max(x), strict=True):
                    assert torch.equal(got, want)
            x.requires_grad_()
            for make in (
                lambda y: torch.ones((), device=device, dtype=dtype).expand_as(y),
                lambda y: torch.randn(y.shape[::-1], device=device).to(dtype).t(),
                lambda y: torch.randn(y.shape[1], device=device).to(dtype).expand_as(y),
            ):
                for run in (over.sum, lambda v, over=over: over.max(v)[0]):
                    y = run(x)
                    dy = make(y)
                    got = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
                    assert torch.equal(got, torch.autograd.grad(y, x, dy.contiguous())[0])


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind in ("min", "sum"))) for kind in LOCAL]
)
def test_compile_has_no_graph_break(device: torch.device, kind: str) -> None:
    coords = voxmma.CoordSet(random_coords(50, 5, 2).to(device), 2)
    feats = torch.randn(50, 4, device=device, requires_grad=True)
    given = voxmma.kernel_map(coords, 2, stride=2)

    def network(f: Tensor) -> Tensor:
        low = LOCAL[kind](Voxels(coords, f.sin()), 2, kernel_map=given)
        same = LOCAL[kind](Voxels(coords, f), 3, 1)
        return F.unpool(low, 2, coords=coords).feats.cos() + same.feats

    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    results = []
    for function in (network, compiled):
        y = function(feats)
        results.append((y, *torch.autograd.grad(y.square().sum(), feats)))
    torch.testing.assert_close(results[0], results[1])


def test_autocast_changes_nothing(device: torch.device) -> None:
    x = Voxels(random_coords(50, 5).to(device), torch.randn(50, 4, device=device))
    for pool in (*LOCAL.values(),):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = pool(x, 2)
        assert y.dtype == torch.float32 and torch.equal(y.feats, pool(x, 2).feats)


def test_deterministic_mode(device: torch.device) -> None:
    """Nothing refuses it; and it fills fresh memory with NaN, which must be overwritten."""
    coords = voxmma.CoordSet(random_coords(700, 9, 2).to(device), 3)
    feats = torch.randn(700, 8).to(device).requires_grad_()

    def run() -> list[Tensor]:
        x = Voxels(coords, feats)
        made = [pool(x, 3, 2).feats for pool in LOCAL.values()] + [pool(x) for pool in GLOBAL.values()]
        return [*made, *(torch.autograd.grad(y.square().sum(), feats)[0] for y in made)]

    plain = run()
    torch.use_deterministic_algorithms(True)
    try:
        strict = run()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, strict, strict=True))


# ---- CUDA only ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (3, 1), (5, 2), (7, 3)])
def test_cpu_and_gpu_agree_bit_by_bit(dtype: torch.dtype, kernel: int, stride: int) -> None:
    coords = random_coords(4000, 22, 2)
    for channels in (1, 4, 20, 64, 264):
        feats = torch.randn(4000, channels).to(dtype)
        feats[torch.rand(feats.shape) < 0.02] = math.nan
        feats[torch.rand(feats.shape) < 0.02] = 0.0
        feats[torch.rand(feats.shape) < 0.02] = -0.0
        seen = []
        for place in ("cpu", "cuda"):
            f = feats.to(place).requires_grad_()
            x = Voxels(coords.to(place), f)
            generator = torch.Generator().manual_seed(1)
            for pool in LOCAL.values():
                y = pool(x, kernel, stride)
                dy = torch.randn(y.feats.shape, generator=generator).to(dtype)
                (dx,) = torch.autograd.grad(y.feats, f, dy.to(place))
                seen.append((y.feats.detach().cpu(), dx.cpu()))
            y, indices = F.max_pool_with_indices(x, kernel, stride)
            seen.append((indices.rows().cpu(), F.max_unpool(y, indices).feats.detach().cpu()))
            for whole in GLOBAL.values():
                y = whole(x)
                (dx,) = torch.autograd.grad(y, f, torch.ones_like(y))
                seen.append((y.detach().cpu() if whole is F.global_max_pool else dx.cpu(), dx.cpu()))
        half = len(seen) // 2
        for ours, theirs in zip(seen[:half], seen[half:], strict=True):
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_no_host_synchronisation() -> None:
    coords = voxmma.CoordSet(random_coords(5000, 25, 2).cuda(), 2)
    feats = torch.randn(5000, 32, device="cuda", requires_grad=True)

    def run() -> None:
        x = Voxels(coords, feats)
        low, indices = F.max_pool_with_indices(x, 2)
        made = [pool(x, 3, 2).feats for pool in LOCAL.values()]
        made += [pool(x) for pool in GLOBAL.values()]
        made += [F.unpool(low, 2).feats, F.max_unpool(low, indices).feats]
        torch.autograd.grad([y.sum() for y in made], feats)

    run()  # makes the maps
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_runs_in_a_graph_and_on_the_current_stream() -> None:
    coords = voxmma.CoordSet(random_coords(3000, 20).cuda(), 1)
    feats = torch.randn(3000, 20).half().cuda()
    run = lambda f: [pool(Voxels(coords, f), 3, 2).feats for pool in LOCAL.values()]  # noqa: E731
    expected = run(feats)
    torch.cuda.synchronize()
    stream, late = torch.cuda.Stream(), torch.zeros_like(feats)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # on another stream the pools would see zeros
        late.copy_(feats)
        made = run(late)
    stream.synchronize()
    assert all(map(torch.equal, made, expected))
    static, graph = torch.zeros_like(feats), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(static)
    static.copy_(feats)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, made, expected))


@pytest.mark.gpu
@pytest.mark.slow
def test_more_than_two_to_the_31_elements() -> None:
    coords = voxmma.CoordSet(grid_coords((64, 64, 64)).cuda(), 1)
    feats = torch.empty(64**3, 8200, dtype=torch.float16, device="cuda").normal_()
    assert feats.numel() > 1 << 31
    last = feats[:, -8:].clone()
    for pool in (F.max_pool, F.avg_pool):
        wide, narrow = (pool(Voxels(coords, f), 3, 1).feats for f in (feats, last))
        assert torch.equal(wide[:, -8:], narrow)
    for whole in (F.global_max_pool, F.global_sum_pool):
        assert torch.equal(whole(Voxels(coords, feats))[:, -8:], whole(Voxels(coords, last)))
