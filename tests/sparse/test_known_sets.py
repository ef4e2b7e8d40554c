"""Repeated rows, sets found by their tensor, output coordinates, maps under keys, sets of cells."""

from __future__ import annotations

import copy
import gc
import pickle
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import voxmma
from voxmma import nn
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.tensor import Voxels
from voxmma.sparse.wrapped import _wrapped

from conftest import random_coords

# ---- duplicates='keep' -------------------------------------------------------------------------------------


def repeated(device: torch.device, requires_grad: bool = False) -> tuple[Voxels, Voxels, torch.Tensor]:
    """Voxels whose rows repeat, the distinct ones with features of the first rows, which one each row is."""
    distinct = random_coords(60, 5, 2)
    generator = torch.Generator().manual_seed(1)
    place = torch.cat([torch.arange(60), torch.randint(60, (25,), generator=generator)])
    place = place[torch.randperm(85, generator=generator)]
    feats = torch.randn(85, 4, dtype=torch.float64, generator=generator).to(device)
    first = torch.stack([torch.nonzero(place == i)[0, 0] for i in range(60)]).to(device)
    feats.requires_grad_(requires_grad)
    x = Voxels(distinct[place].to(device), feats, 2, duplicates="keep")
    return x, Voxels(distinct.to(device), feats[first], 2), place.to(device)


def fp64(made: nn.SparseConv3d, device: torch.device) -> nn.SparseConv3d:
    return made.to(device, torch.float64)


def pools() -> list[Callable[[Voxels], Voxels]]:
    return [
        nn.SparseMaxPool3d(3, 1),
        nn.SparseSumPool3d(3, 1),
        nn.SparseAvgPool3d(3, 1),
        nn.SparseMinPool3d(3, 1),
    ]


def test_every_row_gets_the_result_of_its_voxel(device: torch.device) -> None:
    x, distinct, place = repeated(device)
    assert x.num_voxels == 85 and x.sites().num_voxels == 60
    for layer in [fp64(nn.SparseConv3d(4, 5, 3), device), fp64(nn.SparseConv3d(4, 5, 2), device), *pools()]:
        for _ in range(2):
            y = layer(x)
            assert y.coord_set is x.coord_set
            torch.testing.assert_close(y.feats, layer(distinct).feats[place], rtol=0, atol=1e-12)


def test_strided_layers_see_the_first_rows_and_transposed_ones_restore_all(device: torch.device) -> None:
    x, distinct, place = repeated(device)
    down = fp64(nn.SparseConv3d(4, 4, 3, 2), device)
    up = fp64(nn.SparseConvTranspose3d(4, 5, 3, 2), device)
    low, want = down(x), down(distinct)
    assert torch.equal(low.coords, want.coords)
    torch.testing.assert_close(low.feats, want.feats, rtol=0, atol=1e-12)
    for coarse in (low, low, pickle.loads(pickle.dumps(low.detach())), pytree.tree_map(torch.clone, low)):
        back = up(coarse)
        assert torch.equal(back.coords, x.coords)
        torch.testing.assert_close(back.feats, up(want).feats[place], rtol=0, atol=1e-12)
    assert up(low).coord_set is x.coord_set
    onto = up(Voxels(low.coords.clone(), low.feats, 2), coords=x)
    assert onto.coord_set is x.coord_set
    torch.testing.assert_close(onto.feats, up(want).feats[place], rtol=0, atol=1e-12)
    pooled, indices = nn.SparseMaxPool3d(2, return_indices=True)(x)
    assert nn.MaxUnpool()(pooled, indices).coord_set is nn.Unpool(2)(pooled).coord_set is x.coord_set


def test_gradients_of_repeated_rows(device: torch.device) -> None:
    x, distinct, place = repeated(device, requires_grad=True)
    layer = fp64(nn.SparseConv3d(4, 5, 3), device)
    dy = torch.randn(85, 5, dtype=torch.float64, device=device)
    inputs = (x.feats, layer.weight, layer.bias)
    got = torch.autograd.grad(layer(x).feats, inputs, dy)
    want = torch.autograd.grad(layer(distinct).feats[place], inputs, dy)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-11)
    again = torch.autograd.grad(layer(x).feats, inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


def test_what_else_takes_repeated_rows(device: torch.device) -> None:
    x, distinct, place = repeated(device)
    assert torch.equal(x.coords[voxmma.lookup(x, x.coords)], x.coords)
    assert torch.equal(
        voxmma.lookup(x, distinct.coords), torch.stack([torch.nonzero(place == i)[0, 0] for i in range(60)])
    )
    assert torch.equal(x.dense((5, 5, 5)), distinct.dense((5, 5, 5)))
    assert voxmma.downsample(x, 2).num == voxmma.downsample(distinct, 2).num
    assert voxmma.union(x, distinct).num == voxmma.intersection(x, distinct).num == 60
    norm = nn.BatchNorm(4).to(device, torch.float64)(x)  # over all rows
    torch.testing.assert_close(norm.feats.mean(0), torch.zeros(4, dtype=torch.float64, device=device))
    torch.testing.assert_close(nn.GlobalSumPool()(x).sum(0), x.feats.sum(0))
    assert (x + x).coord_set is x.coord_set
    with pytest.raises(ValueError, match="they have duplicates"):
        x + Voxels(x.coords.flip(0).contiguous(), x.feats, 2, duplicates="keep")
    for made in (
        pickle.loads(pickle.dumps(x)),
        copy.deepcopy(x),
        pytree.tree_map(torch.clone, x),
        voxmma.prune(x, torch.ones(85, dtype=torch.bool, device=device)),
        voxmma.batch(voxmma.unbatch(voxmma.prune(x, torch.ones(85, dtype=torch.bool, device=device)))),
        x.with_spatial_shape(5),
    ):
        assert made.num_voxels == 85 and made.sites().num_voxels == 60
    points = x.coords[:, 1:].double() + 0.5
    seen = voxmma.devoxelise(x, points, 1.0, batch_index=x.coords[:, 0])
    assert torch.equal(seen, distinct.feats[place])


def test_maps_of_repeated_rows_are_those_of_the_distinct_voxels(device: torch.device) -> None:
    x, _, _ = repeated(device)
    made = voxmma.kernel_map(x, 3)
    assert made.in_coords is x.coord_set.sites and made.in_coords.num == 60
    layer = fp64(nn.SparseConv3d(4, 5, 3), device)
    y = layer(x, made)
    assert y.coord_set is x.coord_set and torch.equal(y.feats, layer(x).feats)
    assert voxmma.output_coords(x, 3) is x.coord_set
    down = fp64(nn.SparseConv3d(4, 4, 3, 2, map_key="a"), device)
    up = fp64(nn.SparseConvTranspose3d(4, 4, 3, inverse_of="a"), device)
    low = down(x)
    assert up(low).coord_set is up.output_coords(low) is x.coord_set and set(x.maps) == {"a"}


def test_rows_that_do_not_repeat_are_an_ordinary_set(device: torch.device) -> None:
    coords = random_coords(50, 5).to(device)
    x = Voxels(coords, torch.randn(50, 2, device=device), duplicates="keep")
    assert x.coord_set.repeated is None and x.sites() is x
    empty = Voxels(coords[:0], torch.zeros(0, 2, device=device), duplicates="keep")
    assert empty.coord_set.repeated is None
    with pytest.raises(ValueError, match=re.escape("coords rows 0 and 1 are the same voxel")):
        CoordSet(coords[[0, 0]])
    with pytest.raises(ValueError, match="duplicates must be"):
        CoordSet(coords, duplicates="mean")


@pytest.mark.gpu
def test_gpu_gives_the_rows_of_the_cpu() -> None:
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    x, y = repeated(cpu)[0], repeated(cuda)[0]
    layer = fp64(nn.SparseConv3d(4, 5, 3), cpu)
    want = layer(x).feats
    torch.testing.assert_close(layer.to(cuda)(y).feats.cpu(), want, rtol=0, atol=1e-12)
    moved = x.to(cuda)
    assert moved.sites().num_voxels == 60
    torch.testing.assert_close(layer(moved).feats.cpu(), want, rtol=0, atol=1e-12)


# ---- the same tensor ---------------------------------------------------------------------------------------


def test_the_same_tensor_is_the_same_set(device: torch.device) -> None:
    coords = random_coords(50, 5, 2).to(device)
    feats = torch.randn(50, 4, device=device)
    layer = nn.SparseConv3d(4, 4, 3, device=device)
    x = Voxels(coords, feats, 2)
    layer(x)
    again = Voxels(coords, feats, 2)
    assert again.coord_set is x.coord_set and len(again.coord_set.own) == 1
    assert Voxels(x.coords, feats, 2).coord_set is x.coord_set  # what it hands out is it, too
    low = nn.SparseConv3d(4, 4, 2, 2, device=device)(x)
    assert Voxels(low.coords, low.feats, 2).coord_set is low.coord_set
    assert layer(Voxels(low.coords, low.feats, 2), coords=x.coords).coord_set is not None
    assert Voxels(coords.clone(), feats, 2).coord_set is not x.coord_set
    assert Voxels(coords.view(50, 4), feats, 2).coord_set is not x.coord_set
    assert Voxels(coords, feats, 3).coord_set is not x.coord_set
    assert Voxels(coords, feats, 2, spatial_shape=5).coord_set is not x.coord_set
    assert CoordSet(coords, 2) is not x.coord_set


def test_a_write_makes_another_set(device: torch.device) -> None:
    coords = random_coords(50, 5).to(device)
    x = Voxels(coords, torch.randn(50, 4, device=device))
    before = x.coords.clone()
    coords[:, 1:] *= 2
    y = Voxels(coords, x.feats)
    assert y.coord_set is not x.coord_set
    assert torch.equal(y.coords, coords) and torch.equal(x.coords, before)
    assert Voxels(coords, x.feats).coord_set is y.coord_set
    coords.data = coords.clone()  # other memory
    assert Voxels(coords, x.feats).coord_set is not y.coord_set
    coords[1] = coords[0]
    with pytest.raises(ValueError, match="are the same voxel"):
        Voxels(coords, x.feats)
    z = Voxels(coords, x.feats, duplicates="keep")
    assert z.coord_set.repeated is not None
    with pytest.raises(ValueError, match="are the same voxel"):
        Voxels(z.coords, x.feats, 1)


def test_writes_that_torch_does_not_count_are_seen_on_a_cpu() -> None:
    coords = random_coords(50, 5)
    x = Voxels(coords, torch.randn(50, 4))
    coords.numpy()[:, 1:] *= 2
    y = Voxels(coords, x.feats)
    assert y.coord_set is not x.coord_set and torch.equal(y.coords, coords)


def test_sets_of_tensors_are_not_kept(device: torch.device) -> None:
    coords = random_coords(50, 5).to(device)
    gc.collect()
    before = len(_wrapped)
    gone = weakref.ref(Voxels(coords, torch.randn(50, 4, device=device)).coord_set)
    assert gone() is None and len(_wrapped) == before + 1
    x = Voxels(coords, torch.randn(50, 4, device=device))
    del coords
    assert len(_wrapped) == before
    assert x.num_voxels == 50


def test_a_tensor_keeps_no_sets_that_are_gone() -> None:
    coords, feats = random_coords(50, 5), torch.randn(50, 4)
    kept = Voxels(coords, feats, spatial_shape=99)
    for size in range(100, 400):
        Voxels(coords, feats, spatial_shape=size)
    assert len(_wrapped.get(coords).sets) <= 64
    assert Voxels(coords, feats, spatial_shape=99).coord_set is kept.coord_set


def test_coordinates_in_shared_memory_lead_back_to_their_set() -> None:
    x = Voxels(random_coords(50, 5), torch.randn(50, 4))
    coords = x.coords
    before = coords.data_ptr()
    coords.share_memory_()
    assert coords.data_ptr() != before
    assert Voxels(coords, x.feats, x.batch_size).coord_set is x.coord_set


# ---- output coordinates, maps under keys -------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2},
        {"generative": True},
        {"stride": 2, "transposed": True},
        {"stride": 2, "transposed": True, "generative": True},
        {"stride": 2, "outputs": "cells"},
        {"stride": 2, "padding": 0, "dilation": 2},
    ],
    ids=str,
)
def test_output_coordinates_are_those_of_the_layer(device: torch.device, options: dict[str, Any]) -> None:
    x = Voxels(random_coords(50, 6, 2).to(device), torch.randn(50, 4, device=device), 2, spatial_shape=6)
    layer = nn.SparseConv3d(4, 4, 3, device=device, **options)
    made = voxmma.output_coords(x, 3, **options)
    assert layer.output_coords(x) is made
    assert not x.coord_set.maps and not made.maps  # no map was made
    assert layer(x).coord_set is made


def test_maps_under_keys_and_their_inverses(device: torch.device) -> None:
    x = Voxels(random_coords(60, 6, 2).to(device), torch.randn(60, 4, device=device), 2)
    first = nn.SparseConv3d(4, 4, 3, 2, padding=0, map_key="first", device=device)
    second = nn.SparseConv3d(4, 4, 2, 2, map_key="second", device=device)
    same = nn.SparseConv3d(4, 4, 3, map_key="same", device=device)
    back = nn.SparseConvTranspose3d(4, 4, 2, inverse_of="second", device=device)
    home = nn.SparseConvTranspose3d(4, 4, 3, inverse_of="first", device=device)
    for _ in range(2):  # decided, and repeated
        a = same(first(x))
        b = second(a)
        c = back(b)
        d = home(c)
        assert c.coord_set is a.coord_set and d.coord_set is x.coord_set
        assert (b.stride, c.stride, d.stride) == ((4, 4, 4), (2, 2, 2), (1, 1, 1))
    assert len(b.coord_set.calls) == 1
    assert (
        set(x.maps) == {"first"} and set(a.maps) == {"first", "same", "second"} and set(b.maps) == {"second"}
    )
    assert a.maps["first"] == x.maps["first"] == first.kernel_map(x)
    assert a.maps["second"] == second.kernel_map(a) and a.maps["same"] == same.kernel_map(a)
    want = nn.functional.spatially_sparse_conv(
        c, home.weight, 3, home.bias, 2, kernel_map=first.kernel_map(x).transposed(), transposed=True
    )
    assert torch.equal(want.feats, d.feats) and "nothing" not in x.maps
    feats = b.feats.detach().requires_grad_()
    back(b.with_feats(feats)).feats.sum().backward()
    assert feats.grad is not None and bool((feats.grad != 0).any())


def test_maps_under_keys_live_as_long_as_their_sets(device: torch.device) -> None:
    x = Voxels(random_coords(60, 6).to(device), torch.randn(60, 4, device=device))
    coords = x.coords.clone()
    down = nn.SparseConv3d(4, 4, 2, 2, map_key="a", device=device)
    up = nn.SparseConvTranspose3d(4, 4, 2, inverse_of="a", device=device)
    gc.disable()
    try:
        y = down(x)
        assert up(y).coord_set is x.coord_set
        alone = weakref.ref(x.coord_set)
        del x
        assert alone() is None  # no cycle
        restored = up(y)
        assert torch.equal(restored.coords, coords)
        gone = weakref.ref(y.coord_set)
        del y
        assert gone() is None and not list(restored.maps)
    finally:
        gc.enable()


def test_keys_that_do_not_fit_are_named(device: torch.device) -> None:
    x = Voxels(random_coords(60, 6).to(device), torch.randn(60, 4, device=device))
    y = nn.SparseConv3d(4, 4, 3, 2, map_key="a", device=device)(x)
    up = nn.SparseConvTranspose3d(4, 4, 3, inverse_of="b", device=device)
    with pytest.raises(
        ValueError, match=re.escape("inverse_of='b': no layer with this map_key made the coordinates")
    ):
        up(y)
    up.inverse_of = "a"
    with pytest.raises(ValueError, match=re.escape("inverse_of='a'")):
        up(x)  # the map leads from there
    with pytest.raises(ValueError, match="without coords and kernel_map"):
        up(y, coords=x)
    with pytest.raises(ValueError, match="goes with transposed=True"):
        nn.SparseConv3d(4, 4, 3, inverse_of="a", device=device)(y)
    with pytest.raises(ValueError, match="kernel_map was built for kernel_size"):
        nn.SparseConvTranspose3d(4, 4, 2, inverse_of="a", device=device)(y)
    nn.SparseConv3d(4, 4, 3, map_key="s", device=device)(x)
    with pytest.raises(ValueError, match=re.escape("map_key='s' is the key of another map")):
        nn.SparseConv3d(4, 4, 3, dilation=2, map_key="s", device=device)(x)
    for name in ("map_key", "inverse_of"):
        with pytest.raises(TypeError, match=f"{name} must be a str"):
            nn.SparseConv3d(4, 4, 3, **{name: 1})


# ---- cells of the coarser grid -----------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", [1, 2, 3, 5])
def test_outputs_are_the_cells_whatever_the_kernel(device: torch.device, kernel: int) -> None:
    coords = random_coords(80, 9, 2) - torch.tensor([0, 4, 4, 4], dtype=torch.int32)
    x = Voxels(coords.to(device), torch.randn(80, 4, device=device, dtype=torch.float64), 2)
    layer = fp64(nn.SparseConv3d(4, 5, kernel, 2, outputs="cells"), device)
    y = layer(x)
    cells = {(b, *(v // 2 for v in c)) for b, *c in coords.tolist()}
    assert [tuple(row) for row in y.coords.tolist()] == sorted(cells)
    wide = fp64(nn.SparseConv3d(4, 5, kernel, 2), device)
    wide.load_state_dict(layer.state_dict())
    want = wide(x, coords=y.coord_set)  # the same numbers at these sites
    torch.testing.assert_close(y.feats, want.feats, rtol=0, atol=0)


def test_one_set_for_each_stride(device: torch.device) -> None:
    x = Voxels(random_coords(200, 16, 2).to(device), torch.randn(200, 4, device=device), 2)

    def layer(kernel: int, stride: Any, transposed: bool = False) -> nn.SparseConv3d:
        kind = nn.SparseConvTranspose3d if transposed else nn.SparseConv3d
        return kind(4, 4, kernel, stride, outputs="cells", device=device)

    four = layer(5, 4)(x)
    two = layer(3, 2)(x)
    assert layer(3, 2)(two).coord_set is four.coord_set is voxmma.downsample(two, 2)
    assert layer(2, 2)(x).coord_set is two.coord_set is voxmma.downsample(x, 2)
    assert voxmma.downsample(x, (4, 2, 2)) is not voxmma.downsample(x, (2, 4, 2))
    assert voxmma.downsample(voxmma.downsample(x, 4), 4) is voxmma.downsample(voxmma.downsample(x, 2), 8)
    assert voxmma.downsample(x, 1) is not x.coord_set  # sorted
    up = layer(2, 2, transposed=True)
    for _ in range(2):  # `four` was made from x, which has stride 1
        assert up(four).coord_set is two.coord_set
        assert up(two).coord_set is x.coord_set
    bounded = x.with_spatial_shape((17, 16, 16))
    assert layer(3, 2)(bounded).spatial_shape == (9, 8, 8)
    grown = nn.SparseConv3d(4, 4, 3, 2, outputs="cells", generative=True, device=device)(x)
    assert grown.num_voxels > two.num_voxels  # generative layers do not ask
    with pytest.raises(ValueError, match="outputs must be 'windows' or 'cells'"):
        nn.SparseConv3d(4, 4, 3, 2, outputs="cell")
    with pytest.raises(ValueError, match="max_voxels"):
        nn.SparseConv3d(4, 4, 3, 2, outputs="cells", max_voxels=5, device=device)(x)


def test_sets_of_cells_are_not_kept(device: torch.device) -> None:
    gc.disable()
    try:
        x = Voxels(random_coords(60, 8).to(device), torch.randn(60, 4, device=device))
        y = nn.SparseConv3d(4, 4, 3, 2, outputs="cells", device=device)(x)
        root, made = weakref.ref(x.coord_set), weakref.ref(y.coord_set)
        del x
        assert root() is None
        del y
        assert made() is None
    finally:
        gc.enable()
