"""Strided, generative, transposed and inverse convolution against torch's dense ones and brute force."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import re
import warnings
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as dense

import voxmma
from voxmma import nn
from voxmma.nn.functional import sparse_conv_transpose, spatially_sparse_conv
from voxmma.sparse import derive
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.tensor import Voxels

from conftest import grid_coords, random_coords, surface_coords

Triple = tuple[int, int, int]

#: kernel, stride, dilation, padding (None: the default)
SHAPES: list[tuple[Any, Any, Any, Any]] = [
    (2, 2, 1, None),
    (3, 2, 1, None),
    (3, 2, 1, 0),
    (3, 3, 1, None),
    (1, 2, 1, None),
    (1, 3, 1, 1),
    (4, 2, 1, 1),
    (2, 3, 1, None),
    (5, 2, 2, None),
    (3, 4, 2, None),
    (3, 2, 3, 1),
    ((3, 2, 1), (2, 1, 3), (1, 2, 1), (0, 1, 0)),
    ((1, 3, 4), (1, 2, 2), 1, None),
    (3, 1, 1, (2, 0, 1)),
    (3, 2, 1, -1),
]


def triple(value: int | Triple) -> Triple:
    return (value,) * 3 if isinstance(value, int) else value


def geometry(shape: tuple[Any, Any, Any, Any]) -> Geometry:
    kernel, stride, dilation, padding = shape
    k, s, d = triple(kernel), triple(stride), triple(dilation)
    if padding is None:
        pad = tuple(size // 2 * dil if size % 2 else 0 for size, dil in zip(k, d, strict=True))
    else:
        pad = triple(padding)
    return Geometry(k, s, d, (pad[0], pad[1], pad[2]))


def brute_windows(rows: list[list[int]], g: Geometry) -> list[tuple[int, ...]]:
    """Sites whose window holds one of the rows, sorted."""
    found = set()
    for b, *c in rows:
        axes = []
        for axis in range(3):
            s, d, p = g.stride[axis], g.dilation[axis], g.padding[axis]
            reach = [c[axis] + p - k * d for k in range(g.kernel_size[axis])]
            axes.append([q // s for q in reach if q % s == 0])
        found |= {(b, *o) for o in itertools.product(*axes)}
    return sorted(found)


def brute_children(rows: list[list[int]], g: Geometry) -> list[tuple[int, ...]]:
    found = set()
    for b, *c in rows:
        for offset in g.offsets():
            found.add((b, *(c[a] * g.stride[a] + offset[a] for a in range(3))))
    return sorted(found)


def brute_conv(
    src: list[tuple[int, ...]],
    dst: list[tuple[int, ...]],
    x: Tensor,
    w: Tensor,
    g: Geometry,
    transposed: bool,
) -> Tensor:
    """The definition, pair by pair, in fp64."""
    row_of = {tuple(c): i for i, c in enumerate(src)}
    y = torch.zeros(len(dst), w.shape[-1], dtype=torch.float64)
    for i, (b, *c) in enumerate(dst):
        for k, offset in enumerate(g.offsets()):
            if transposed:
                at = [c[a] - offset[a] for a in range(3)]
                if any(at[a] % g.stride[a] for a in range(3)):
                    continue
                at = [at[a] // g.stride[a] for a in range(3)]
            else:
                at = [c[a] * g.stride[a] + offset[a] for a in range(3)]
            row = row_of.get((b, *at))
            if row is not None:
                y[i] += x[row].double() @ w[k].double()
    return y


def rows_of(coords: Tensor) -> list[tuple[int, ...]]:
    return [tuple(c) for c in coords.tolist()]


def options(shape: tuple[Any, Any, Any, Any]) -> dict[str, Any]:
    kernel, stride, dilation, padding = shape
    return {"kernel_size": kernel, "stride": stride, "dilation": dilation, "padding": padding}


def volume(shape: tuple[Any, Any, Any, Any]) -> int:
    a, b, c = triple(shape[0])
    return a * b * c


def fp64(*shape: int, device: torch.device) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64).to(device)


# ---- coordinates -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_new_coordinates_match_brute_force_and_are_sorted(
    device: torch.device, shape: tuple[Any, Any, Any, Any]
) -> None:
    coords = random_coords(60, 12, batch=3, seed=1)
    coords = coords[coords[:, 0] != 1]  # sample 1 is empty
    coords[:, 1:] -= 6
    g = geometry(shape)
    for made, want in (
        (derive.windows, brute_windows(coords.tolist(), g)),
        (derive.children, brute_children(coords.tolist(), g)),
    ):
        out = made(voxmma.CoordSet(coords.to(device), 4), g)
        assert rows_of(out.coords) == want
        assert out.batch_size == 4 and out.device == device and out.coords.dtype == torch.int32
        assert out.coords.is_contiguous()


def test_pieces_give_the_same_coordinates(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    coords = random_coords(200, 12, batch=2).to(device)
    for shape in ((3, 1, 1, None), (3, 2, 1, None), (2, 2, 1, None)):
        g = geometry(shape)
        whole = [f(voxmma.CoordSet(coords), g).coords for f in (derive.windows, derive.children)]
        monkeypatch.setattr(derive, "CHUNK", 100)
        pieces = [f(voxmma.CoordSet(coords), g).coords for f in (derive.windows, derive.children)]
        monkeypatch.undo()
        for a, b in zip(whole, pieces, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("count", [1, 30, 4096, 4097])
@pytest.mark.parametrize("reach", [2, 32, 33])
def test_small_sets_made_at_once_are_as_others(
    count: int, reach: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of a GPU makes sets of up to 4,096 candidates in a box of up to 2^15 cells, if in one piece."""
    generator = torch.Generator().manual_seed(count)
    cells = torch.randperm((2 * reach) ** 3, generator=generator)[:count]
    columns = [
        torch.zeros_like(cells),
        *(cells // (2 * reach) ** axis % (2 * reach) - reach for axis in range(3)),
    ]
    coords = torch.stack(columns, dim=1).int().to(device)
    g = geometry((2, 2, 1, None))
    at_once = derive.windows(voxmma.CoordSet(coords), g)
    monkeypatch.setattr(derive, "CHUNK", max(len(coords) - 1, 1))
    others = derive.windows(voxmma.CoordSet(coords), g)
    assert rows_of(at_once.coords) == brute_windows(coords.tolist(), g)
    assert torch.equal(at_once.coords, others.coords) and at_once.bounds == others.bounds
    assert torch.equal(at_once.lookup(coords // 2), others.lookup(coords // 2))
    if device.type == "cuda":
        assert torch.equal(at_once.hash_index().order, others.hash_index().order)
    tables = [voxmma.kernel_map(made, 3).neighbor_table() for made in (at_once, others)]
    assert torch.equal(*tables)


@pytest.mark.parametrize("make", [derive.windows, derive.children])
def test_small_sets_refuse_what_others_do(make: Any, device: torch.device) -> None:
    coords = torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 0, 5]], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="makes 3 voxels or more out of 3, max_voxels is 2"):
        make(voxmma.CoordSet(coords), geometry((1, 1, 1, None)), 2)
    edge = torch.tensor([[0, 131071, 0, 0]], dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="makes voxels outside"):
        make(voxmma.CoordSet(edge), geometry((3, 1, 1, None)))


axis = st.integers(1, 4)
triples = st.tuples(axis, axis, axis)
voxel_rows = st.lists(
    st.tuples(st.integers(0, 2), *[st.integers(-7, 7)] * 3), min_size=0, max_size=12, unique=True
)


@given(voxel_rows, triples, triples, triples, st.tuples(*[st.integers(-2, 5)] * 3), st.booleans())
@settings(max_examples=60, deadline=None)
def test_property_any_shape(
    rows: list[tuple[int, ...]], k: Triple, s: Triple, d: Triple, p: Triple, transposed: bool
) -> None:
    """Coordinates, forward and gradients of random layers on random voxels, against the definition."""
    g = Geometry(k, s, d, p)
    generator = torch.Generator().manual_seed(len(rows))
    coords = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)
    x = torch.randn(len(rows), 2, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(k[0] * k[1] * k[2], 2, 3, dtype=torch.float64, generator=generator).requires_grad_()
    layer = spatially_sparse_conv(
        Voxels(coords, x, batch_size=4),
        w,
        k,
        stride=s,
        dilation=d,
        padding=p,
        transposed=transposed,
        generative=True,
    )
    listed = [list(r) for r in rows]
    want = brute_children(listed, g) if transposed else brute_windows(listed, g)
    assert rows_of(layer.coords) == want and layer.batch_size == 4
    torch.testing.assert_close(layer.feats, brute_conv(rows, want, x.detach(), w.detach(), g, transposed))
    dy = torch.randn(layer.feats.shape, dtype=torch.float64, generator=generator)
    dx, dw = torch.autograd.grad(layer.feats, (x, w), dy)
    # The layer is bilinear: <dy, y> = <dx, x> = <dw, w>, and dx is the opposite layer with w transposed.
    torch.testing.assert_close(dx, brute_conv(want, rows, dy, w.detach().mT, g, not transposed))
    torch.testing.assert_close((dw * w).sum(), (dy * layer.feats).sum())


def test_dense_conv3d_on_the_occupied_grid(device: torch.device) -> None:
    """Full and sparse grids, zeros around them: values equal conv3d's where there is an output voxel, and
    conv3d of ones is zero everywhere else."""
    margin, extent = 12, 5  # margin: a multiple of every stride below
    for shape, density in itertools.product(SHAPES, (0.2, 1.0)):
        g = geometry(shape)
        if any(margin % s for s in g.stride):
            continue
        mask = torch.rand(2, extent, extent, extent) < density
        grid = torch.zeros(2, 3, *(extent + 2 * margin,) * 3, dtype=torch.float64)
        inner = slice(margin, margin + extent)
        grid[:, :, inner, inner, inner] = torch.randn(2, 3, *(extent,) * 3, dtype=torch.float64)
        grid[:, :, inner, inner, inner] *= mask.unsqueeze(1)
        x = Voxels.from_dense(grid[:, :, inner, inner, inner].to(device), mask.to(device))
        w = torch.randn(volume(shape), 3, 2, dtype=torch.float64)
        filters = w.reshape(*g.kernel_size, 3, 2).permute(4, 3, 0, 1, 2)
        pad = tuple(max(p, 0) for p in g.padding)
        cut = [slice(max(-p, 0), None) for p in g.padding]  # negative padding drops the first cells
        kwargs = {"stride": g.stride, "padding": pad, "dilation": g.dilation}
        want = dense.conv3d(grid[(..., *cut)], filters, **kwargs)
        occupied = (grid != 0).any(1, keepdim=True).double()
        ones = dense.conv3d(occupied[(..., *cut)], torch.ones(1, 1, *g.kernel_size).double(), **kwargs)
        # Both make voxels from windows, whatever the stride.
        y = spatially_sparse_conv(x, w.to(device), generative=True, **options(shape))
        place = y.coords.long().cpu()
        place[:, 1:] += torch.tensor([margin // s for s in g.stride])
        index = (place[:, 0], slice(None), place[:, 1], place[:, 2], place[:, 3])
        torch.testing.assert_close(y.feats.cpu(), want[index])
        assert int((ones > 0.5).sum()) == y.num_voxels
        assert y.stride == (g.stride if g.stride != (1, 1, 1) else (1, 1, 1))


def test_dense_conv_transpose3d(device: torch.device) -> None:
    for shape in SHAPES:
        g = geometry(shape)
        if min(g.padding) < 0:
            continue
        coords = grid_coords((4, 4, 4), 2)[torch.randperm(128)[:50]]
        x = Voxels(coords.to(device), fp64(50, 3, device=device), batch_size=2)
        w = fp64(volume(shape), 3, 2, device=device)
        y = sparse_conv_transpose(x, w, generative=True, **options(shape))
        filters = w.cpu().reshape(*g.kernel_size, 3, 2).permute(3, 4, 0, 1, 2)
        grid = x.cpu().dense((4, 4, 4))
        full = dense.conv_transpose3d(grid, filters, stride=g.stride, dilation=g.dilation)  # no cropping
        place = y.coords.long().cpu()
        place[:, 1:] += torch.tensor(g.padding)
        torch.testing.assert_close(y.feats.cpu(), full[place[:, 0], :, place[:, 1], place[:, 2], place[:, 3]])
        assert float(full.abs().sum()) == pytest.approx(float(y.feats.abs().sum()))


# ---- forms of the layer ------------------------------------------------------------------------------------


def test_negative_coordinates_are_floored(device: torch.device) -> None:
    coords = torch.tensor([[0, -1, -2, -3], [0, -4, 1, 0]], dtype=torch.int32, device=device)
    x = Voxels(coords, torch.ones(2, 1, device=device))
    y = spatially_sparse_conv(x, torch.ones(8, 1, 1, device=device), 2, stride=2)
    assert y.coords.tolist() == [[0, -2, 0, 0], [0, -1, -1, -2]] and y.stride == (2, 2, 2)


def test_transposed_goes_back_to_the_encoder_coordinates(device: torch.device) -> None:
    x = Voxels(random_coords(100, 10, 2).to(device), fp64(100, 4, device=device))
    down1 = nn.SparseConv3d(4, 5, 3, 2, device=device, dtype=torch.float64)
    down2 = nn.SparseConv3d(5, 6, 2, 2, device=device, dtype=torch.float64)
    middle, low = down1(x), down2(down1(x))
    assert middle.stride == (2, 2, 2) and low.stride == (4, 4, 4)
    assert middle.coord_set is down1(x).coord_set  # made once
    inner = nn.SparseConv3d(6, 6, 3, device=device, dtype=torch.float64)(low)
    back = nn.SparseConvTranspose3d(6, 5, 2, 2, device=device, dtype=torch.float64)(inner)
    assert back.coord_set is middle.coord_set and back.stride == (2, 2, 2)
    top = nn.SparseConvTranspose3d(5, 4, 2, 2, device=device, dtype=torch.float64)(back)  # another kernel
    assert top.coord_set is x.coord_set and top.stride == (1, 1, 1)
    (top + x).feats.sum().backward()
    once = nn.SparseConvTranspose3d(6, 4, 4, 4, device=device, dtype=torch.float64)(
        low
    )  # both levels at once
    assert once.coord_set is x.coord_set and once.stride == (1, 1, 1)
    # The decoder of the same shape runs over the encoder's own map.
    assert len(middle.coord_set.maps) == 1
    for layer, src, dst, transposed in ((down1, x, middle, False), (down2, middle, low, False)):
        g = Geometry(layer.kernel_size, layer.stride, layer.dilation, layer.padding)
        want = brute_conv(
            rows_of(src.coords),
            rows_of(dst.coords),
            src.feats.detach().cpu(),
            layer.weight.detach().cpu(),
            g,
            transposed,
        )
        torch.testing.assert_close(dst.feats.detach().cpu(), want + layer.bias.detach().cpu())


def test_encoder_coordinates_survive_the_encoder(device: torch.device) -> None:
    """A decoder without skip connections finds the coordinates and row order of an input that is gone."""
    coords = random_coords(80, 9).to(device)
    down = nn.SparseConv3d(3, 3, 2, 2, device=device, dtype=torch.float64)
    up = nn.SparseConvTranspose3d(3, 3, 2, 2, device=device, dtype=torch.float64)

    def network() -> Voxels:
        return up(down(down(Voxels(coords, fp64(80, 3, device=device)))))

    low = down(Voxels(coords, fp64(80, 3, device=device)))
    gc.collect()
    top = up(low)
    assert torch.equal(top.coords, coords) and up(low).coord_set is top.coord_set
    assert torch.equal(up(network()).coords, coords)
    assert down(top).num_voxels == low.num_voxels
    low = low.with_feats(low.feats.detach())
    for other in (copy.deepcopy(low), pickle.loads(pickle.dumps(low))):
        assert torch.equal(up(other).coords, coords)


def test_moved_voxels_keep_their_encoder_coordinates() -> None:
    low = nn.SparseConv3d(1, 1, 2, 2)(Voxels(random_coords(30, 6), torch.ones(30, 1)))
    on_meta = low.coord_set.to("meta")
    assert on_meta.finer is not None and on_meta.finer.get().num == 30


def test_onto_given_coordinates(device: torch.device) -> None:
    x = Voxels(random_coords(60, 8).to(device), fp64(60, 3, device=device))
    targets = torch.cat([random_coords(40, 5, seed=3), torch.tensor([[0, 90, 90, 90]])]).int()
    for transposed, (k, s) in itertools.product((False, True), ((3, 2), (2, 2), (3, 1), (1, 3))):
        g = geometry((k, s, 1, None))
        w = fp64(k**3, 3, 2, device=device)
        want = brute_conv(rows_of(x.coords), rows_of(targets), x.feats.cpu(), w.cpu(), g, transposed)
        given_set = voxmma.CoordSet(targets.to(device))
        given_voxels = Voxels(given_set, torch.zeros(41, 1, device=device), stride=7)
        for target in (targets.to(device), given_set, given_voxels):
            y = spatially_sparse_conv(x, w, k, stride=s, transposed=transposed, coords=target)
            torch.testing.assert_close(y.feats.cpu(), want)
            assert torch.equal(y.coords.cpu(), targets)
            if target is not targets and not isinstance(target, Tensor):
                assert y.coord_set is given_set
        assert y.stride == (7, 7, 7)
    with pytest.raises(TypeError, match="coords must be a Voxels"):
        spatially_sparse_conv(x, w, 1, stride=3, coords=[1])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 samples"):
        spatially_sparse_conv(x, w, 1, stride=3, coords=voxmma.CoordSet(targets.to(device), 2))


def test_inverse_convolution(device: torch.device) -> None:
    """The transposed map of a strided layer, whatever made its output set, stride 1 included."""
    x = Voxels(random_coords(50, 7).to(device), fp64(50, 3, device=device))
    for k, s, generative in ((3, 2, False), (2, 2, False), (3, 1, True), (3, 1, False), (2, 1, False)):
        down = nn.SparseConv3d(3, 4, k, s, generative=generative, device=device, dtype=torch.float64)
        up = nn.SparseConvTranspose3d(4, 2, k, s, device=device, dtype=torch.float64)
        y = down(x)
        back = up(y, down.kernel_map(x).transposed())
        assert back.coord_set is x.coord_set
        g = Geometry(up.kernel_size, up.stride, up.dilation, up.padding)
        want = brute_conv(
            rows_of(y.coords), rows_of(x.coords), y.feats.detach().cpu(), up.weight.detach().cpu(), g, True
        )
        torch.testing.assert_close(back.feats.detach().cpu(), want + up.bias.detach().cpu())
    down = nn.SparseConv3d(3, 4, 3, 2, device=device, dtype=torch.float64)
    y = down(x)
    with pytest.raises(ValueError, match="not transposed, the call says transposed=True"):
        nn.SparseConvTranspose3d(3, 2, 3, 2, device=device, dtype=torch.float64)(x, down.kernel_map(x))
    with pytest.raises(ValueError, match="padding"):
        spatially_sparse_conv(x, down.weight, 3, stride=2, padding=0, kernel_map=down.kernel_map(x))
    with pytest.raises(ValueError, match="exclude"):
        spatially_sparse_conv(x, down.weight, 3, stride=2, coords=y, kernel_map=down.kernel_map(x))


def test_generative_grows_the_support(device: torch.device) -> None:
    x = Voxels(torch.tensor([[0, 0, 0, 0]], device=device), torch.ones(1, 1, device=device))
    w = torch.arange(27.0, device=device).reshape(27, 1, 1)
    y = spatially_sparse_conv(x, w, 3, generative=True)
    assert y.stride == (1, 1, 1) and rows_of(y.coords) == rows_of(
        grid_coords((3, 3, 3)) - torch.tensor([0, 1, 1, 1])
    )
    assert y.feats.flatten().tolist() == list(reversed(range(27)))
    up = sparse_conv_transpose(x, w[:8], 2, stride=2, generative=True)
    assert rows_of(up.coords) == rows_of(grid_coords((2, 2, 2))) and up.feats.flatten().tolist() == list(
        range(8)
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_max_voxels_is_checked_first(device: torch.device, transposed: bool) -> None:
    x = Voxels(
        (random_coords(100, 6) * torch.tensor([1, 5, 5, 5])).to(device), torch.ones(100, 1, device=device)
    )
    w = torch.ones(27, 1, 1, device=device)
    call = {"stride": 3 if transposed else 1, "transposed": transposed, "generative": True}
    with pytest.raises(ValueError, match=r"max_voxels is 2,699"):
        spatially_sparse_conv(x, w, 3, max_voxels=2699, **call)
    assert spatially_sparse_conv(x, w, 3, max_voxels=2700, **call).num_voxels == 2700
    with pytest.raises(ValueError, match=r"max_voxels is 2,699"):  # cached sets are held to it too
        spatially_sparse_conv(x, w, 3, max_voxels=2699, **call)
    for bad in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="max_voxels"):
            nn.SparseConv3d(1, 1, 3, generative=True, max_voxels=bad)


def test_leaving_the_packable_range_is_an_error(device: torch.device) -> None:
    far = torch.tensor([[0, 131071, 0, -131072], [0, 0, 0, 0]], device=device)
    x = Voxels(far, torch.ones(2, 1, device=device))
    with pytest.raises(ValueError, match=r"outside -131072\.\.131071"):
        spatially_sparse_conv(x, torch.ones(27, 1, 1, device=device), 3, generative=True)
    with pytest.raises(ValueError, match=r"outside -131072\.\.131071"):
        sparse_conv_transpose(x, torch.ones(8, 1, 1, device=device), 2, stride=2)
    y = spatially_sparse_conv(x, torch.ones(8, 1, 1, device=device), 2, stride=2)
    assert rows_of(y.coords) == [(0, 0, 0, 0), (0, 65535, 0, -65536)]


@pytest.mark.parametrize("rows", [0, 1])
def test_no_voxels_and_empty_samples(device: torch.device, rows: int) -> None:
    coords = torch.tensor([[2, 5, 6, 7]], device=device)[:rows]
    x = Voxels(coords, fp64(rows, 3, device=device).requires_grad_(), batch_size=4)
    for transposed, k in itertools.product((False, True), (1, 2, 3)):
        w = fp64(k**3, 3, 2, device=device).requires_grad_()
        y = spatially_sparse_conv(x, w, k, stride=2, transposed=transposed)
        assert y.batch_size == 4 and y.counts.tolist() == [0, 0, y.num_voxels, 0]
        dx, dw = torch.autograd.grad(y.feats.sum(), (x.feats, w))
        assert dx.shape == (rows, 3) and dw.shape == w.shape
        assert (y.num_voxels == 0) == (rows == 0 or (k == 1 and not transposed))


@pytest.mark.parametrize(
    "shape", [(2, 2, 1, None), (3, 2, 1, None), (3, 2, 2, 1), ((1, 3, 2), (1, 2, 3), 1, None)]
)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_gradients(device: torch.device, shape: Any, transposed: bool, groups: int) -> None:
    x = fp64(12, 4, device=device).requires_grad_()
    coords = voxmma.CoordSet(random_coords(12, 4, 2).to(device))
    lead = (volume(shape),) if groups == 1 else (volume(shape), groups)
    w = fp64(*lead, 4 // groups, 2 // groups, device=device).requires_grad_()
    b = fp64(2, device=device).requires_grad_()

    def run(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        y = spatially_sparse_conv(
            Voxels(coords, x), w, bias=b, groups=groups, transposed=transposed, **options(shape)
        )
        return y.feats

    assert torch.autograd.gradcheck(run, (x, w, b), fast_mode=True)
    assert torch.autograd.gradgradcheck(run, (x, w, b), fast_mode=True)


def test_groups_are_independent(device: torch.device) -> None:
    x = Voxels(random_coords(40, 6).to(device), fp64(40, 4, device=device))
    w = fp64(8, 2, 2, 3, device=device)
    y = spatially_sparse_conv(x, w, 2, stride=2, groups=2).feats
    parts = [
        spatially_sparse_conv(x.with_feats(x.feats[:, 2 * i : 2 * i + 2]), w[:, i], 2, stride=2).feats
        for i in (0, 1)
    ]
    torch.testing.assert_close(y, torch.cat(parts, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transposed", [False, True])
def test_half_dtypes_stay_within_bounds(device: torch.device, dtype: torch.dtype, transposed: bool) -> None:
    """One rounding of the result to its dtype, plus fp32 accumulation; the same for both gradients."""
    coords = voxmma.CoordSet(random_coords(300, 12, 2).to(device))
    x = torch.randn(300, 24).to(device, dtype).requires_grad_()
    w = (torch.randn(27, 24, 16) / 8).to(device, dtype).requires_grad_()
    y = spatially_sparse_conv(Voxels(coords, x), w, 3, stride=2, transposed=transposed, use_fp16_accum=False)
    dy = torch.randn(y.feats.shape).to(device, dtype)
    got = (y.feats, *torch.autograd.grad(y.feats, (x, w), dy))
    x64, w64 = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    y64 = spatially_sparse_conv(Voxels(coords, x64), w64, 3, stride=2, transposed=transposed).feats
    want = (y64, *torch.autograd.grad(y64, (x64, w64), dy.double()))
    tolerance = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 2**-20}[dtype]
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype and bool(a.isfinite().all())
        assert torch.linalg.vector_norm(a.double() - b) <= tolerance * torch.linalg.vector_norm(b)


def test_explain_names_strided_and_transposed_layers(device: torch.device) -> None:
    x = Voxels(random_coords(20, 5).to(device), torch.randn(20, 8).to(device))
    down = nn.SparseConv3d(8, 8, 3, 2, device=device)
    up = nn.SparseConvTranspose3d(8, 8, 3, 2, device=device)
    y = down(x)
    assert voxmma.explain(y).layer == "SparseConv3d(8, 8, 3x3x3)"
    assert voxmma.explain(up(y)).layer == "SparseConvTranspose3d(8, 8, 3x3x3)"
    assert voxmma.explain(up(y)).accumulator == "fp32" and "stride=(2, 2, 2)" in repr(up)
    explicit = nn.SparseConv3d(8, 8, 3, 2, transposed=True, device=device)
    explicit.load_state_dict(up.state_dict())
    assert torch.equal(explicit(y).feats, up(y).feats)


def test_two_dimensions(device: torch.device) -> None:
    mask = torch.rand(2, 6, 6) < 0.5
    image = torch.randn(2, 3, 6, 6, dtype=torch.float64) * mask.unsqueeze(1)
    x = Voxels.from_dense(image.unsqueeze(-1).to(device), mask.unsqueeze(-1).to(device))
    for k, s in ((2, 2), (3, 1)):
        layer = nn.SparseConv2d(3, 4, k, s, bias=False, device=device, dtype=torch.float64)
        assert layer.weight.shape == (k * k, 3, 4)
        y = layer(x)
        filters = layer.weight.detach().cpu().reshape(k, k, 3, 4).permute(3, 2, 0, 1)
        want = dense.conv2d(image, filters, stride=s, padding=k // 2 if k % 2 else 0)
        b, i, j, z = y.coords.long().cpu().unbind(1)
        assert not bool(z.any()) and y.stride == (s, s, 1)
        torch.testing.assert_close(y.feats.detach().cpu(), want[b, :, i, j])
    down = nn.SparseConv2d(3, 4, 2, 2, device=device, dtype=torch.float64)
    up = nn.SparseConvTranspose2d(4, 3, 2, 2, device=device, dtype=torch.float64)
    assert up(down(x)).coord_set is x.coord_set
    assert nn.SparseConvTranspose2d(4, 3, (1, 2), 2, padding=1).padding == (1, 1, 0)
    with pytest.raises(TypeError, match="kernel_size must be an int or two"):
        nn.SparseConv2d(3, 4, (3, 3, 3))  # type: ignore[arg-type]


# ---- maps and memory ---------------------------------------------------------------------------------------


def test_maps_of_strided_layers_are_kept_and_freed_without_the_collector(device: torch.device) -> None:
    gc.collect()
    gc.disable()
    try:
        x = Voxels(random_coords(50, 6).to(device), torch.ones(50, 2, device=device))
        w = torch.ones(8, 2, 2, device=device)
        low = spatially_sparse_conv(x, w, 2, stride=2)
        top = sparse_conv_transpose(low, w, 2, stride=2)
        more = sparse_conv_transpose(low, w, 2, stride=2, generative=True)
        again = spatially_sparse_conv(more, w, 2, stride=2)
        kept = spatially_sparse_conv(more, w, 2, stride=2, coords=low)
        assert kept.coord_set is low.coord_set
        dead = [weakref.ref(v.coord_set) for v in (x, low, top, more, again)]
        cores = [weakref.ref(core) for v in (x, low, more) for core in v.coord_set.maps.values()]
        assert len(cores) == 3  # x-low, low-more (both directions' users), more-again
        del x, low, top, more, again, kept
        assert [ref() for ref in dead] == [None] * 5
        assert [ref() for ref in cores] == [None] * len(cores)
    finally:
        gc.enable()


def test_kernel_map_objects_of_strided_layers(device: torch.device) -> None:
    x = Voxels(random_coords(50, 6).to(device), torch.ones(50, 2, device=device))
    made = voxmma.kernel_map(x, 3, stride=2)
    assert made.in_coords is x.coord_set and not made.reverse
    assert made == voxmma.kernel_map(x, 3, stride=2) and made.transposed().transposed() == made
    back = voxmma.kernel_map(made.out_coords, 3, stride=2, transposed=True)
    assert back == made.transposed() and back.out_coords is x.coord_set
    grown = voxmma.kernel_map(made.out_coords, 3, stride=2, transposed=True, generative=True)
    assert grown.reverse and grown.in_coords is made.out_coords
    loaded = pickle.loads(pickle.dumps(grown))
    assert torch.equal(loaded.neighbor_table(), grown.neighbor_table())
    table = made.neighbor_table()
    for k, (inputs, outputs) in enumerate(made.transposed().pairs()):
        assert torch.equal(table[k, inputs].long(), outputs)
    pairs = grown.num_pairs
    grown.free()
    fresh = voxmma.kernel_map(made.out_coords, 3, stride=2, transposed=True, generative=True)
    assert fresh != grown and fresh.num_pairs == pairs


def test_derived_sets_know_a_box_around_them(device: torch.device) -> None:
    for shape, low in itertools.product(SHAPES, (-9, 0, 131_000)):
        coords = random_coords(40, 8, 3) + torch.tensor([0, low, -low, low + 1], dtype=torch.int32)
        source, g = voxmma.CoordSet(coords.to(device)), geometry(shape)
        for make in (derive.windows, derive.children):
            try:
                made = make(source, g)
            except ValueError as error:
                assert "outside" in str(error)  # and low is 131000
                assert low > 0
                continue
            rows, box = made.coords.cpu(), made.bounds
            if len(rows) == 0:
                continue
            least, largest = rows.amin(0).tolist(), rows.amax(0).tolist()
            assert all(b <= v for b, v in zip(box[:4], least, strict=True))
            assert all(b >= v for b, v in zip(box[4:], largest, strict=True))
            if make is derive.children:
                assert [*box[1:4], *box[5:]] == [*least[1:], *largest[1:]]  # as small as can be
            assert all(abs(b - v) <= 20 for b, v in zip(box, (*least, *largest), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("piece", [derive.CHUNK, 5000])
@pytest.mark.parametrize("spread", [60, 3000, 100_000])  # the last: 64-bit keys
def test_gpu_makes_the_rows_of_the_cpu(spread: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    coords = torch.cat([torch.randint(0, 3, (20_000, 1)), torch.randint(-spread, spread, (20_000, 3))], 1)
    coords = torch.unique(coords, dim=0).int()
    coords = coords[torch.randperm(len(coords))]
    monkeypatch.setattr(derive, "CHUNK", piece)
    on_cpu, on_gpu = voxmma.CoordSet(coords), voxmma.CoordSet(coords.cuda())
    for shape in SHAPES:
        g = geometry(shape)
        for make in (derive.windows, derive.children):
            try:
                expected = make(on_cpu, g).coords
            except ValueError as error:
                with pytest.raises(ValueError, match=re.escape(str(error))):
                    make(on_gpu, g)
            else:
                assert torch.equal(make(on_gpu, g).coords.cpu(), expected)


@pytest.mark.gpu
def test_gpu_waits_once_for_new_coordinates() -> None:
    w = torch.ones(8, 2, 2, device="cuda")
    warm = Voxels(random_coords(500, 20).cuda(), torch.ones(500, 2, device="cuda"))
    sparse_conv_transpose(spatially_sparse_conv(warm, w, 2, stride=2), w, 2, stride=2)
    x = Voxels(random_coords(500, 20, seed=1).cuda(), torch.ones(500, 2, device="cuda"))
    many = voxmma.CoordSet(random_coords(20_000, 60).cuda())
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            low = spatially_sparse_conv(x, w, 2, stride=2)
            first = len([c for c in caught if "synchroniz" in str(c.message)])
            spatially_sparse_conv(x, w, 2, stride=2)
            sparse_conv_transpose(low, w, 2, stride=2)
            second = len([c for c in caught if "synchroniz" in str(c.message)]) - first
            voxmma.kernel_map(x, 3)
            third = len([c for c in caught if "synchroniz" in str(c.message)]) - first - second
            lower = spatially_sparse_conv(x, torch.ones(27, 2, 2, device="cuda"), 3, stride=2)
            fourth = len([c for c in caught if "synchroniz" in str(c.message)]) - first - second - third
            sparse_conv_transpose(lower, torch.ones(27, 2, 2, device="cuda"), 3, stride=2)
            fifth = len([c for c in caught if "synchroniz" in str(c.message)])
            voxmma.kernel_map(many, 3)
            sixth = len([c for c in caught if "synchroniz" in str(c.message)]) - fifth
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (first, second, third) == (1, 0, 0)  # how many voxels; nothing: there is room for any plan
    assert sixth == 1  # how large the plan is
    assert (fourth, fifth - first - second - third - fourth) == (1, 0)  # overlapping windows: the same


@pytest.mark.gpu
def test_fine_rows_are_planned_in_residue_order() -> None:
    """Of the eight offsets of 2x2x2 a tile of fine rows uses a few, every row is there once, and within the
    window of 1,024 rows that it has in Morton order."""
    coords = surface_coords(96).cuda()
    fine = voxmma.CoordSet(coords, 1)
    down = voxmma.kernel_map(fine, 2, stride=2)
    order, schedule, _, frag = down.transposed().tensors[:4]
    tiles, n = schedule.shape[1], len(coords)
    assert torch.equal(order[order >= 0].sort().values, torch.arange(n, device="cuda", dtype=order.dtype))
    morton = voxmma.kernel_map(fine, 3).tensors[0]  # stride 1: tiles are cut from the curve as it is
    for begin in range(0, len(order), 1024):
        one, other = (t[begin : begin + 1024].sort().values for t in (order, morton))
        assert torch.equal(one, other), begin
    used = sum(int((frag[:tiles] >> k & 1).any(1).sum()) for k in range(8))
    assert used <= 4 * tiles, used / tiles
