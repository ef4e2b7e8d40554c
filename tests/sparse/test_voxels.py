"""Coordinate sets and voxels: what is refused, what is shared, every operation against plain torch."""

from __future__ import annotations

import copy
import io
import itertools
import math
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from voxmma import batch, unbatch
from voxmma.sparse import sampling
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import kernel_map
from voxmma.sparse.packing import COORD_MAX, COORD_MIN, pack, unpack
from voxmma.sparse.sets import downsample
from voxmma.sparse.tensor import Voxels

import conftest

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RELAXED = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def voxels(device: torch.device, n: int = 40, c: int = 3, batch: int = 3, **options: Any) -> Voxels:
    coords = conftest.random_coords(n, 5, batch=batch).to(device)
    return Voxels(coords, torch.randn(n, c).to(device), batch, **options)


def same(a: Voxels, b: Voxels) -> bool:
    return a.coord_set.equal(b.coord_set) and torch.equal(a.feats, b.feats) and a.stride == b.stride


# ---- coordinate sets ---------------------------------------------------------------------------------------

GOOD = torch.tensor([[0, 0, 0, 0], [0, 1, 2, 3], [1, -5, 6, 7]], dtype=torch.int32)


def with_row(*row: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """GOOD with row 1 replaced."""
    coords = GOOD.to(dtype, copy=True)
    coords[1] = torch.tensor(row, dtype=dtype)
    return coords


BAD_COORDS: list[tuple[Any, int | None, type[Exception], str]] = [
    (GOOD.float(), None, TypeError, r"coords must be int32 or int64, got torch.float32; Voxels.from_points"),
    (GOOD.half(), None, TypeError, "coords must be int32"),
    (GOOD.bool(), None, TypeError, "coords must be int32 or int64, got torch.bool"),
    (GOOD.to(torch.uint8), None, TypeError, "coords must be int32"),
    (GOOD.tolist(), None, TypeError, "coords must be a tensor, got list"),
    (GOOD[:, :3], None, ValueError, r"coords must be \(N, 4\).*\(3, 3\)"),
    (GOOD[0], None, ValueError, r"coords must be \(N, 4\)"),
    (GOOD.to_sparse(), None, ValueError, "coords must be dense"),
    (
        with_row(-1, 0, 0, 0),
        None,
        ValueError,
        r"coords row 1 is \(-1, 0, 0, 0\): the batch index is negative",
    ),
    (with_row(1023, 0, 0, 0), None, ValueError, r"coords row 1 .* must be in 0..1022"),
    (with_row(0, COORD_MAX + 1, 0, 0), None, ValueError, "coords row 1 .*: x must be in -131072..131071"),
    (with_row(0, 0, COORD_MIN - 1, 0), None, ValueError, "coords row 1 .*: y must be"),
    (with_row(0, 0, 0, 2**31 - 1), None, ValueError, "coords row 1 .*: z must be"),
    (
        with_row(0, 0, 0, 2**32 + 1, dtype=torch.int64),
        None,
        ValueError,
        "coords row 1 .*4294967297.*: z must be",
    ),
    (with_row(-(2**63), 0, 0, 0, dtype=torch.int64), None, ValueError, "coords row 1 .*negative"),
    (GOOD, 1, ValueError, "coords row 2 has batch index 1, batch_size is 1"),
    (GOOD, 1024, ValueError, r"batch_size must be in 0..1023, got 1024"),
    (GOOD, -1, ValueError, "batch_size must be in"),
    (GOOD, 2.0, TypeError, "batch_size must be an int"),
    (GOOD, True, TypeError, "batch_size must be an int"),
    (with_row(0, 0, 0, 0), None, ValueError, r"coords rows 0 and 1 are the same voxel \(0, 0, 0, 0\)"),
    (torch.cat([GOOD, GOOD.flip(0)]), None, ValueError, "coords rows 2 and 3 are the same voxel"),
]


@pytest.mark.parametrize(("coords", "batch_size", "error", "message"), BAD_COORDS)
def test_fault_14_bad_coordinates_are_refused_by_name_and_row(
    device: torch.device, coords: Any, batch_size: Any, error: type[Exception], message: str
) -> None:
    if isinstance(coords, torch.Tensor):
        coords = coords.to(device)
    with pytest.raises(error, match=message):
        CoordSet(coords, batch_size)
    with pytest.raises(error, match=message):
        Voxels(coords, torch.zeros(len(coords), 1, device=device), batch_size)
    CoordSet(GOOD.to(device))  # and the device still works


@RELAXED
@given(rows=st.lists(st.tuples(st.integers(0, 1), *(st.integers(-1, 1),) * 3), min_size=2, max_size=12))
def test_duplicates_name_the_first_pair(device: torch.device, rows: list[tuple[int, ...]]) -> None:
    coords = torch.tensor(rows, dtype=torch.int32, device=device)
    repeated = [row for row in range(len(rows)) if rows.index(rows[row]) != row]
    if repeated:
        with pytest.raises(
            ValueError, match=f"coords rows {rows.index(rows[repeated[0]])} and {repeated[0]} are"
        ):
            CoordSet(coords)
    else:
        assert torch.equal(CoordSet(coords).coords, coords)


def test_duplicates_of_wide_sets_name_the_first_pair(device: torch.device) -> None:
    """Extents of more than 32 bits in all: what a GPU sorts by in two steps."""
    coords = torch.randint(COORD_MIN, COORD_MAX + 1, (5000, 4), dtype=torch.int32)
    coords[:, 0] %= 700
    coords[0, 1:], coords[1, 1:] = COORD_MIN, COORD_MAX
    coords[4000], coords[3000], coords[3500] = coords[2000], coords[1000], coords[1000]
    with pytest.raises(ValueError, match="coords rows 1000 and 3000 are"):
        CoordSet(coords.to(device))
    first = torch.cat([coords[:3000], coords[3001:3500], coords[3501:]])  # 4000 has become 3998
    with pytest.raises(ValueError, match="coords rows 2000 and 3998 are"):
        CoordSet(first.to(device))


def test_coordinates_are_a_private_copy_in_the_callers_order(device: torch.device) -> None:
    coords = conftest.random_coords(50, 6, batch=2).to(device)
    strided = torch.stack([coords, coords], dim=2).long()[:, :, 0]
    assert not strided.is_contiguous()
    made = CoordSet(strided)
    strided.zero_()
    assert (
        torch.equal(made.coords, coords) and made.coords.dtype == torch.int32 and made.coords.is_contiguous()
    )


def test_counts_include_empty_samples(device: torch.device) -> None:
    x = Voxels(GOOD.to(device) * 2, torch.zeros(3, 1, device=device), batch_size=5)
    assert x.counts.tolist() == [2, 0, 1, 0, 0] and x.counts.dtype == torch.int64
    assert Voxels(GOOD.to(device), x.feats).batch_size == 2


def test_packed_keys_have_the_order_of_the_coordinates(device: torch.device) -> None:
    corners = list(itertools.product((0, 511, 512, 1022), *((COORD_MIN, -1, 0, COORD_MAX),) * 3))
    coords = torch.tensor(corners, dtype=torch.int32, device=device)
    keys = pack(coords)
    assert bool((keys.diff() > 0).all()) and torch.equal(unpack(keys), coords)


def test_lookup_finds_rows(device: torch.device) -> None:
    made = CoordSet(GOOD.to(device))
    wanted = torch.tensor(
        [[1, -5, 6, 7], [0, 0, 0, 1], [1022, COORD_MAX, COORD_MAX, COORD_MAX], [0, 0, 0, 0]]
    )
    assert made.lookup(wanted.int().to(device)).tolist() == [2, -1, -1, 0]
    assert CoordSet(made.coords[:0]).lookup(made.coords).tolist() == [-1] * 3


def test_coordinate_sets_copy_and_pickle(device: torch.device) -> None:
    made = CoordSet(GOOD.to(device), 4)
    assert copy.deepcopy(made) is made and copy.copy(made) is made and made.to(device) is made
    loaded = pickle.loads(pickle.dumps(made))
    assert loaded is not made and loaded.equal(made) and loaded.maps == {}
    assert not made.equal(CoordSet(GOOD.to(device), 5)) and not made.equal(CoordSet(GOOD[:2].to(device), 4))
    assert not made.equal(CoordSet(GOOD.flip(0).to(device), 4))


# ---- voxels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("feats", "error", "message"),
    [
        (torch.zeros(3, 2, dtype=torch.int64), TypeError, "feats must be fp16"),
        (torch.zeros(3, 2, dtype=torch.complex64), TypeError, "feats must be fp16"),
        ([[0.0]] * 3, TypeError, "feats must be a tensor"),
        (torch.zeros(3), ValueError, r"feats must be \(N, C\)"),
        (torch.ones(3, 2).to_sparse(), ValueError, r"feats must be \(N, C\) and dense, got torch.sparse_coo"),
        (torch.zeros(4, 2), ValueError, "feats has 4 rows, coords has 3"),
        (torch.zeros(3, 2, device="meta"), ValueError, "feats is on meta, coords is on"),
    ],
)
def test_bad_features_are_named(
    device: torch.device, feats: Any, error: type[Exception], message: str
) -> None:
    if isinstance(feats, torch.Tensor) and feats.device.type != "meta":
        feats = feats.to(device)
    for duplicates in ("error", "mean"):
        with pytest.raises(error, match=message):
            Voxels(GOOD.to(device), feats, duplicates=duplicates)
    good = Voxels(GOOD.to(device), torch.zeros(3, 1, device=device))
    with pytest.raises(error, match=message):
        good.with_feats(feats)


@pytest.mark.gpu
def test_rows_that_a_tree_map_moved_off_their_alignment_are_named() -> None:
    """Kernels read a row at once; coordinates of a caller are copied."""
    x = voxels(torch.device("cuda", 0))

    def moved(t: torch.Tensor) -> torch.Tensor:
        return t.new_zeros(t.numel() + 1)[1:].view(t.shape).copy_(t)

    assert torch.equal(Voxels(moved(x.coords), x.feats).coords, x.coords)
    there = pytree.tree_map(moved, x)
    with pytest.raises(RuntimeError, match=r"coords must be contiguous Int, at a multiple of 16 bytes"):
        downsample(there, 2)
    with pytest.raises(RuntimeError, match=r"coords must be contiguous Int, at a multiple of 16 bytes"):
        kernel_map(there, 3)


def test_other_bad_arguments_are_named() -> None:
    feats = torch.zeros(3, 1)
    with pytest.raises(ValueError, match="duplicates must be 'error'"):
        Voxels(GOOD, feats, duplicates="median")
    with pytest.raises(ValueError, match="stride must be positive"):
        Voxels(GOOD, feats, stride=0)
    with pytest.raises(TypeError, match="stride must be three ints"):
        Voxels(GOOD, feats, stride=(1, 2))
    with pytest.raises(ValueError, match="batch_size is 3, the CoordSet has 2"):
        Voxels(CoordSet(GOOD), feats, batch_size=3)
    with pytest.raises(TypeError, match=r"not torch\.int32"):
        Voxels(GOOD, feats).to(torch.int32)


def test_values_are_immutable_and_described(device: torch.device) -> None:
    x = voxels(device, stride=(1, 2, 4))
    for name in ("coords", "feats", "batch_size", "stride", "coord_set"):
        with pytest.raises(AttributeError):
            setattr(x, name, None)
    assert x.stride == (1, 2, 4) and x.num_voxels == 40 and x.dtype == torch.float32 and x.device == device
    assert "num_voxels=40" in repr(x) and "channels=3" in repr(x) and "batch_size=3" in repr(x)


def test_coordinates_are_shared_by_everything_that_keeps_them(device: torch.device) -> None:
    x = voxels(device)
    made = [x.with_feats(x.feats[:, :1]), x + x, x.half(), x.to(torch.float64), x.to(device)]
    made += [Voxels(x.coord_set, x.feats), copy.deepcopy(x), x.to(device, torch.bfloat16)]
    made += [x.to(torch.zeros(1, dtype=torch.float64, device=device))]
    assert all(y.coord_set is x.coord_set for y in made)
    assert [y.dtype for y in made[-3:]] == [torch.float32, torch.bfloat16, torch.float64]
    assert x.bfloat16().float().double().dtype == torch.float64
    assert x.cpu().device.type == "cpu"


def test_non_contiguous_features_are_accepted(device: torch.device) -> None:
    feats = torch.randn(3, 40, device=device).t()
    assert torch.equal(voxels(device).with_feats(feats).feats, feats)


@pytest.mark.gpu
def test_moving_keeps_sharing() -> None:
    x = voxels(torch.device("cpu"))
    y = x.with_feats(x.feats + 1)
    a, b = x.cuda(), y.to("cuda:0", torch.float16)
    assert a.coord_set is b.coord_set and a.cpu().coord_set is x.coord_set
    assert (
        b.device == torch.device("cuda:0")
        and b.dtype == torch.float16
        and torch.equal(a.coords.cpu(), x.coords)
    )
    with pytest.raises(ValueError, match="feats is on cpu, coords is on cuda:0"):
        a.with_feats(x.feats)
    with pytest.raises(ValueError, match="device"):
        _ = a + x
    assert x.pin_memory().coords.is_pinned() and same(x.pin_memory(), x)


# ---- duplicates and points ---------------------------------------------------------------------------------


def reduced(rows: list[Any], feats: torch.Tensor, reduce: str) -> tuple[list[Any], torch.Tensor]:
    """Distinct rows in order and their features, combined in fp64."""
    members: dict[Any, list[int]] = defaultdict(list)
    for i, row in enumerate(rows):
        members[tuple(row)].append(i)
    keys = sorted(members)
    combine = {
        "mean": lambda f: f.mean(0), "sum": lambda f: f.sum(0), "max": lambda f: f.amax(0),
        "min": lambda f: f.amin(0), "first": lambda f: f[0],
    }[reduce]  # fmt: skip
    values = [combine(feats[members[key]].double()) for key in keys]
    return keys, torch.stack(values).to(feats.dtype) if values else feats[:0]


@RELAXED
@given(
    rows=st.lists(st.tuples(st.integers(0, 1), *(st.integers(-1, 1),) * 3), max_size=40),
    reduce=st.sampled_from(["mean", "sum", "max", "first"]),
    dtype=st.sampled_from(DTYPES),
)
def test_duplicates_are_merged(
    device: torch.device, rows: list[tuple[int, ...]], reduce: str, dtype: torch.dtype
) -> None:
    coords = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)
    feats = torch.randint(-8, 9, (len(rows), 2)).to(dtype)  # sums are exact
    x = Voxels(coords.to(device), feats.to(device), batch_size=2, duplicates=reduce)
    keys, values = reduced(rows, feats, reduce)
    assert x.coords.tolist() == [list(key) for key in keys] and x.batch_size == 2
    torch.testing.assert_close(x.feats.cpu(), values, rtol=torch.finfo(dtype).eps, atol=0)


def test_merging_still_checks_the_coordinates(device: torch.device) -> None:
    feats = torch.zeros(3, 1, device=device)
    for coords, batch_size, error, message in BAD_COORDS[:-2]:
        if isinstance(coords, torch.Tensor) and coords.shape == (3, 4):
            with pytest.raises(error, match=message):
                Voxels(coords.to(device), feats, batch_size, duplicates="sum")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min", "first"])
def test_points_fall_into_half_open_cells(device: torch.device, dtype: torch.dtype, reduce: str) -> None:
    points = torch.tensor(
        [[0.0, 0.0, 0.0], [0.5, 0.49, -0.01], [-0.5, 1.0, -1.0], [0.25, 0.25, 0.25], [-0.51, 0.0, 0.0]]
    )
    feats = torch.arange(10.0).reshape(5, 2)
    x = Voxels.from_points(points.to(device, dtype), feats.to(device, dtype), 0.5, reduce)
    rows = [(0, 0, 0, 0), (0, 1, 0, -1), (0, -1, 2, -2), (0, 0, 0, 0), (0, -2, 0, 0)]
    keys, values = reduced(rows, feats.to(dtype), reduce)
    assert x.coords.tolist() == [list(key) for key in keys] and x.batch_size == 1
    assert torch.equal(x.feats.cpu(), values)


def test_the_cell_is_the_floor_of_the_fp64_quotient(device: torch.device) -> None:
    values = torch.arange(-200, 200, dtype=torch.float32).mul(
        0.05
    )  # on the edges of the cells, or a rounding off
    size, origin = (0.05, 0.1, 0.15), (0.0, 0.1, 0.0)
    points = values.unsqueeze(1).expand(-1, 3).to(device)
    x = Voxels.from_points(points, torch.zeros(400, 1, device=device), size, origin=origin)
    cells = {
        tuple(math.floor((value - o) / s) for o, s in zip(origin, size, strict=True))
        for value in values.tolist()
    }
    assert [tuple(cell) for cell in x.coords[:, 1:].tolist()] == sorted(cells)


def test_points_come_as_samples_or_with_an_index(device: torch.device) -> None:
    clouds = [torch.randn(n, 3, device=device) for n in (20, 0, 7)]
    feats = [torch.randn(len(cloud), 4, device=device) for cloud in clouds]
    listed = Voxels.from_points(clouds, feats, 0.7)
    index = torch.repeat_interleave(torch.arange(3), torch.tensor([20, 0, 7])).to(device)
    joined = Voxels.from_points(torch.cat(clouds), torch.cat(feats), 0.7, batch_index=index.int())
    assert same(listed, joined) and listed.batch_size == 3 and listed.counts[1] == 0
    assert Voxels.from_points(clouds, feats, 0.7, batch_size=5).batch_size == 5
    single = Voxels.from_points(clouds[0], feats[0], 0.7)
    assert single.batch_size == 1 and same(single, unbatch(listed)[0])
    keys = [tuple(row) for row in listed.coords.tolist()]
    assert keys == sorted(keys)


POINTS = torch.tensor([[0.0, 0.0, 0.0], [1.0, 2.0, 3.0]])
ONES = torch.ones(2, 1)
INF, NAN = float("inf"), float("nan")
BAD_POINTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"points": torch.tensor([[0.0, 0, 0], [0, NAN, 0]])}, ValueError, "points row 1 is not finite"),
    ({"points": torch.tensor([[0.0, 0, 0], [0, 0, -INF]])}, ValueError, "points row 1 is not finite"),
    (
        {"points": torch.tensor([[0.0, 0, 0], [3e4, 0, 0]])},
        ValueError,
        "points row 1.*outside -131072..131071",
    ),
    ({"points": POINTS.int()}, TypeError, "points must be a floating point tensor"),
    ({"points": POINTS[:, :2]}, ValueError, r"points must be \(N, 3\)"),
    ({"points": [POINTS, POINTS.tolist()], "feats": [ONES, ONES]}, TypeError, r"points\[1\]"),
    ({"points": [POINTS, POINTS.double()], "feats": [ONES, ONES]}, ValueError, r"points\[1\] differs"),
    ({"points": [POINTS, POINTS], "feats": [ONES, torch.ones(2, 2)]}, ValueError, r"feats\[1\] differs"),
    ({"points": [POINTS, POINTS], "feats": [ONES]}, ValueError, "feats must be a sequence of 2"),
    ({"points": [], "feats": []}, ValueError, "points must hold at least one"),
    ({"points": [POINTS], "feats": [ONES], "batch_index": torch.tensor([0, 0])}, ValueError, "batch_index"),
    ({"points": [POINTS, POINTS], "feats": [ONES, ONES], "batch_size": 1}, ValueError, "batch_size is 1"),
    ({"feats": ONES.long()}, TypeError, "feats must be a fp16"),
    ({"feats": torch.ones(3, 1)}, ValueError, r"feats must be \(2, C\)"),
    ({"feats": torch.ones(2, 1).to_sparse()}, ValueError, r"feats must be \(2, C\) like points and dense"),
    ({"points": torch.ones(2, 3).to_sparse()}, ValueError, r"points must be \(N, 3\) and dense"),
    ({"feats": torch.ones(2, 1, device="meta")}, ValueError, "feats is on meta"),
    ({"voxel_size": 0.0}, ValueError, "voxel_size"),
    ({"voxel_size": -1}, ValueError, "voxel_size"),
    ({"voxel_size": NAN}, ValueError, "voxel_size"),
    ({"voxel_size": (1.0, 2.0)}, ValueError, "voxel_size"),
    ({"origin": (0.0, 0.0, INF)}, ValueError, "origin"),
    ({"reduce": "median"}, ValueError, "reduce must be one of"),
    ({"batch_index": torch.tensor([0, -1])}, ValueError, "batch_index row 1 is -1"),
    ({"batch_index": torch.tensor([0, 1023])}, ValueError, "batch_index row 1 is 1023"),
    (
        {"batch_index": torch.tensor([0, 3]), "batch_size": 3},
        ValueError,
        "batch_index row 1 has batch index 3",
    ),
    ({"batch_index": torch.tensor([0.0, 1.0])}, TypeError, "batch_index must be an int32"),
    ({"batch_index": torch.tensor([0])}, ValueError, r"batch_index must be \(2,\)"),
    ({"batch_size": 0}, ValueError, "batch_size is 0"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_POINTS, ids=[m for _, _, m in BAD_POINTS])
def test_bad_points_are_named(
    device: torch.device, changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    given = {"points": POINTS, "feats": ONES, "voxel_size": 0.1, **changes}
    given = pytree.tree_map_only(torch.Tensor, lambda t: t if t.is_meta else t.to(device), given)
    with pytest.raises(error, match=message):
        Voxels.from_points(**given)


def test_what_is_wrong_with_samples_is_said_before_what_is_wrong_with_points(device: torch.device) -> None:
    points = torch.tensor([[NAN, 0, 0], [0, 0, 0]], device=device)
    batch = torch.tensor([0, -1], device=device)
    with pytest.raises(ValueError, match="batch_index row 1 is -1"):
        Voxels.from_points(points, torch.ones(2, 1, device=device), 0.1, batch_index=batch)
    with pytest.raises(ValueError, match="batch_index row 1 is 4294967296"):
        Voxels.from_points(
            points.nan_to_num(), torch.ones(2, 1, device=device), 0.1, batch_index=2**32 * -batch
        )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min", "first"])
@pytest.mark.parametrize("channels", [1, 4, 5, 32])
def test_points_give_the_same_bits_on_cpu_and_gpu(dtype: torch.dtype, reduce: str, channels: int) -> None:
    points = torch.randn(20_000, 3).to(dtype)
    points[5000:5300] = points[0]
    feats = (torch.randn(20_000, channels) * 10).to(dtype)
    batch = torch.randint(3, (20_000,))
    out_grad, second = torch.randn(20_000, channels).to(dtype), torch.randn_like(feats)
    results = []
    for where in ("cpu", "cuda"):
        f = feats.to(where, copy=True).requires_grad_()
        x, rows = sampling.sparse_quantize(
            points.to(where), f, 0.3, reduce, batch_index=batch.to(where), origin=(0.1, -0.2, 0.3)
        )
        g = out_grad[: x.num_voxels].to(where, copy=True).requires_grad_()
        (grad,) = torch.autograd.grad(x.feats, f, g, create_graph=True)
        (back,) = torch.autograd.grad(grad, g, second.to(where))
        results.append((x.coords, rows, x.feats, grad, back))
    mine, theirs = results
    assert len(mine[0]) < 20_000
    for a, b in zip(mine[:4], theirs[:4], strict=True):
        assert torch.equal(a, b.cpu())
    close = {"rtol": 2e-2, "atol": 0.1} if dtype in DTYPES[:2] else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(mine[4], theirs[4].cpu(), **close)  # autograd adds in another order


@pytest.mark.parametrize("span", [1, 40, 3000, COORD_MAX])
def test_points_in_boxes_of_any_size(device: torch.device, span: int) -> None:
    """Boxes of one cell, of up to 32 bits, and beyond."""
    cells = torch.randint(-span, span, (500, 3))
    cells[:250] = cells[250:].flip(0)
    batch = torch.randint(1023, (500,)) if span > 1 else torch.zeros(500, dtype=torch.int64)
    if span == COORD_MAX:
        cells[:2], batch[:2] = torch.tensor([[COORD_MIN] * 3, [COORD_MAX] * 3]), torch.tensor([0, 1022])
    rows = torch.cat([batch.unsqueeze(1), cells], dim=1)
    expected, place = torch.unique(rows, dim=0, return_inverse=True)
    feats = torch.ones(500, 4)
    sums = torch.zeros(len(expected), 4).index_add(0, place, feats)
    x, found = sampling.sparse_quantize(
        cells.double().to(device) + 0.5, feats.to(device), 1.0, "sum", batch_index=batch.to(device)
    )
    y = Voxels(rows.to(device), feats.to(device), duplicates="sum")
    assert torch.equal(x.coords.cpu().long(), expected) and torch.equal(found.cpu(), place)
    for made in (x, y):
        assert torch.equal(made.feats.cpu(), sums) and torch.equal(made.coords, x.coords)
        assert bool((made.coord_set.lookup(x.coords) == torch.arange(len(expected), device=device)).all())
        low, high = torch.tensor(made.coord_set.bounds).reshape(2, 4)
        assert (low <= expected.amin(0)).all() and (high >= expected.amax(0)).all()


@pytest.mark.gpu
def test_points_on_a_side_stream_and_under_inference_mode() -> None:
    points, feats = torch.randn(20_000, 3), torch.randn(20_000, 4)
    expected = Voxels.from_points(points, feats, 0.3)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.inference_mode():
        made = Voxels.from_points(points.cuda(), feats.cuda(), 0.3)
    stream.synchronize()
    assert torch.equal(made.feats.cpu(), expected.feats) and torch.equal(made.coords.cpu(), expected.coords)
    low, high = expected.coords.aminmax(dim=0)
    assert not made.coords.is_inference() and made.coord_set.bounds == (*low.tolist(), *high.tolist())


# ---- dense grids, samples, sums ----------------------------------------------------------------------------


def test_dense_and_back(device: torch.device) -> None:
    x = Voxels(conftest.random_coords(40, 5, batch=3).to(device), torch.randn(40, 2, device=device), 4)
    grid = x.dense((6, 5, 7))
    assert grid.shape == (4, 2, 6, 5, 7) and int((grid != 0).any(1).sum()) == 40
    for (b, *cell), f in zip(x.coords.tolist(), x.feats, strict=True):
        assert torch.equal(grid[(b, slice(None), *cell)], f)
    back = Voxels.from_dense(grid, stride=2)
    assert back.coords.is_contiguous()  # nonzero gives columns on CUDA, and the kernels want rows
    assert back.stride == (2, 2, 2) and back.batch_size == 4
    rows = back.coords.tolist()
    assert rows == sorted(x.coords.tolist())
    assert torch.equal(back.feats[x.coord_set.lookup(back.coords).argsort()], x.feats)
    assert x.dense().shape == (4, 2, *(x.coords[:, 1:].amax(0) + 1).tolist())


def test_dense_with_an_origin_and_a_mask(device: torch.device) -> None:
    x = Voxels(GOOD.to(device), torch.ones(3, 1, device=device))
    grid = x.dense((7, 7, 8), origin=(-5, 0, 0))
    assert torch.equal(grid.sum((2, 3, 4)).flatten().cpu(), torch.tensor([2.0, 1.0]))
    assert Voxels.from_dense(grid, origin=(-5, 0, 0)).coord_set.equal(x.coord_set)
    mask = torch.zeros(2, 7, 7, 8, dtype=torch.bool, device=device)
    mask[1, 6, 0, 2] = True
    chosen = Voxels.from_dense(grid, mask, origin=(-5, 0, 0))
    assert chosen.coords.tolist() == [[1, 1, 0, 2]] and chosen.feats.tolist() == [[0.0]]


def test_bad_grids_are_named() -> None:
    x = Voxels(GOOD, torch.ones(3, 1))
    with pytest.raises(ValueError, match=r"coords row 2, \(1, -5, 6, 7\), lies outside the grid"):
        x.dense()
    with pytest.raises(ValueError, match="coords row 1"):
        x.dense((1, 9, 9))
    with pytest.raises(TypeError, match="origin"):
        x.dense((9, 9, 9), origin=(0.5, 0, 0))  # type: ignore[arg-type]
    grid = torch.zeros(1, 1, 2, 2, 2)
    for arguments, error, message in (
        ((grid[0],), ValueError, r"dense must be \(B, C, X, Y, Z\)"),
        ((grid.long(),), TypeError, "dense must be a fp16"),
        ((grid, grid[:, 0]), TypeError, "mask must be a bool"),
        ((grid, grid == 0), ValueError, r"mask must be \(1, 2, 2, 2\)"),
        ((grid, None, (0, 0, COORD_MAX)), ValueError, "origin .*: z of the grid"),
        ((grid.expand(1024, 1, 2, 2, 2),), ValueError, "dense has 1024 samples"),
    ):
        with pytest.raises(error, match=message):
            Voxels.from_dense(*arguments)  # type: ignore[arg-type]


def test_batch_and_unbatch_are_inverse(device: torch.device) -> None:
    coords = conftest.random_coords(40, 5, batch=2)
    coords[:, 0] *= 2  # samples 0 and 2, mixed
    x = Voxels(coords.to(device), torch.randn(40, 3, device=device), 4, stride=2)
    parts = unbatch(x)
    assert [p.num_voxels for p in parts] == x.counts.tolist() and parts[1].num_voxels == parts[
        3
    ].num_voxels == 0
    for sample, part in enumerate(parts):
        rows = torch.nonzero(x.coords[:, 0] == sample).flatten()
        assert part.batch_size == 1 and part.stride == x.stride and torch.equal(part.feats, x.feats[rows])
        assert torch.equal(part.coords[:, 1:], x.coords[rows, 1:]) and not bool(part.coords[:, 0].any())
    joined = batch(parts)
    order = torch.sort(x.coords[:, 0], stable=True).indices
    assert joined.batch_size == 4 and torch.equal(joined.coords, x.coords[order])
    assert torch.equal(joined.feats, x.feats[order])
    twice = batch([joined, joined])
    assert twice.batch_size == 8 and twice.counts.tolist() == joined.counts.tolist() * 2
    CoordSet(twice.coords, 8)  # valid


def test_bad_batch_is_named() -> None:
    x = Voxels(GOOD, torch.ones(3, 1))
    for others, error, message in (
        ([], ValueError, "at least one"),
        ([x, x.feats], TypeError, r"voxels\[1\] must be a Voxels"),
        ([x, x.half()], ValueError, r"voxels\[1\] has dtype"),
        ([x, x.with_feats(torch.ones(3, 2))], ValueError, r"voxels\[1\] has channels 2"),
        ([x, Voxels(GOOD, x.feats, stride=2)], ValueError, r"voxels\[1\] has stride"),
        ([x] * 512, ValueError, "1024 samples"),
    ):
        with pytest.raises(error, match=message):
            batch(others)  # type: ignore[arg-type]


def test_sum_needs_equal_coordinates_not_equal_counts(device: torch.device) -> None:
    x = voxels(device)
    assert torch.equal((x + x.with_feats(x.feats * 2)).feats, x.feats * 3)
    other = Voxels(x.coords, x.feats, 3)  # equal content, another set
    assert torch.equal((x + other).feats, x.feats * 2) and (x + other).coord_set is x.coord_set
    order = torch.randperm(40).to(device)
    shuffled = Voxels(x.coords[order], x.feats[order], 3)
    assert torch.equal((x + shuffled).feats, x.feats * 2)
    moved = x.coords.clone()
    moved[7, 3] += 100
    wrong = [
        (Voxels(moved, x.feats, 3), "row 7 of the left"),
        (Voxels(x.coords[1:], x.feats[1:], 3), "40 on the left, 39 on the right"),
        (Voxels(x.coords, x.feats, 4), "batch_size 3 on the left, 4"),
        (Voxels(x.coords, x.feats, 3, stride=2), "stride"),
        (x.with_feats(x.feats[:, :1]), "3 channels on the left, 1 on the right"),
    ]
    for y, message in wrong:
        with pytest.raises(ValueError, match=message):
            _ = x + y
    with pytest.raises(TypeError):
        _ = x + x.feats  # type: ignore[operator]


def test_fault_12_nothing_works_everywhere(device: torch.device) -> None:
    coords, feats = torch.zeros((0, 4), dtype=torch.int32, device=device), torch.zeros((0, 3), device=device)
    assert Voxels(coords, feats).batch_size == 0
    feats.requires_grad_()
    for duplicates in ("error", "mean", "sum", "max", "first"):
        x = Voxels(coords, feats, batch_size=2, duplicates=duplicates)
        assert x.num_voxels == 0 and x.counts.tolist() == [0, 0] and x.feats.shape == (0, 3)
        loaded = pickle.loads(pickle.dumps(x.with_feats(feats.detach())))
        made = [x + x, x.half(), x.with_feats(feats[:, :1]), batch([x, x]), *unbatch(x), loaded]
        assert [y.batch_size for y in made] == [2, 2, 2, 4, 1, 1, 2]
        assert x.dense().shape == (2, 3, 1, 1, 1) and x.dense((4, 5, 6)).shape == (2, 3, 4, 5, 6)
    none = torch.zeros((0, 3), device=device)
    for reduce in ("mean", "sum", "max", "min", "first"):
        y = Voxels.from_points(none, feats, 0.1, reduce)
        assert y.num_voxels == 0 and y.batch_size == 1
    assert Voxels.from_points([none, none], [feats, feats], 0.1).batch_size == 2
    assert Voxels.from_dense(torch.zeros(2, 3, 4, 4, 4, device=device)).num_voxels == 0
    total = y.feats.sum() + x.dense().sum() + (x + x).feats.sum()
    total.backward()
    assert feats.grad is not None and feats.grad.shape == (0, 3)


def test_gradients(device: torch.device) -> None:
    n = 14
    points = torch.rand(n, 3, dtype=torch.float64, device=device) * 2
    feats = torch.randn(n, 2, dtype=torch.float64, device=device, requires_grad=True)
    for reduce in ("mean", "sum", "max", "min", "first"):
        assert Voxels.from_points(points, feats, 1.0, reduce).num_voxels < n
        assert gradcheck(lambda f, r=reduce: Voxels.from_points(points, f, 1.0, r).feats, feats)
    for reduce in ("mean", "sum"):
        assert gradgradcheck(lambda f, r=reduce: Voxels.from_points(points, f, 1.0, r).feats ** 2, feats)
    x = Voxels(conftest.random_coords(n, 4, batch=2).to(device), feats)
    shuffled = Voxels(x.coords.flip(0), torch.ones_like(feats))
    repeated = torch.cat([x.coords[:7], x.coords[:7]])
    checks = [
        lambda f: x.with_feats(f).dense((4, 4, 4)),
        lambda f: (x.with_feats(f) + shuffled).feats,
        lambda f: (shuffled + x.with_feats(f)).feats,
        lambda f: batch([x.with_feats(f), x.with_feats(2 * f)]).feats,
        lambda f: unbatch(x.with_feats(f))[0].feats,
        lambda f: Voxels(repeated, f, duplicates="mean").feats,
        lambda f: Voxels.from_dense(f.reshape(1, 2, 7, 2, 1)).feats,
    ]
    for check in checks:
        assert gradcheck(check, feats)


# ---- torch's machinery -------------------------------------------------------------------------------------


def test_pytree_sees_the_tensors_and_keeps_the_sharing(device: torch.device) -> None:
    x = voxels(device, stride=2)
    leaves, spec = pytree.tree_flatten({"x": x, "y": [x.half()]})
    assert [leaf.dtype for leaf in leaves] == [torch.int32, torch.float32, torch.int32, torch.float16]
    again = pytree.tree_unflatten(leaves, spec)
    assert again["x"].coord_set is x.coord_set is again["y"][0].coord_set and again["x"].stride == x.stride
    cloned = pytree.tree_map(torch.clone, x)
    assert cloned.coord_set is not x.coord_set and same(cloned, x)
    other = Voxels(conftest.random_coords(40, 5, batch=3, seed=9).to(device), x.feats, 3, stride=2)
    assert pytree.tree_structure(x) == pytree.tree_structure(other) != pytree.tree_structure(voxels(device))
    assert pytree.tree_map(lambda t: tuple(t.shape), x).feats == (40, 3)
    with pytest.raises(TypeError, match="coords of voxels must stay int32"):
        pytree.tree_map(torch.Tensor.half, x)
    dumped = pytree.treespec_dumps(pytree.tree_structure(x))
    assert pytree.treespec_loads(dumped) == pytree.tree_structure(x)
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(x)[0]]
    assert paths == [".coords", ".feats"]


def test_pickle_save_and_deepcopy(device: torch.device) -> None:
    x = voxels(device, stride=4)
    assert same(pickle.loads(pickle.dumps(x)), x)
    one, two = pickle.loads(pickle.dumps((x, x.half())))
    assert one.coord_set is two.coord_set
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False), x)
    clone = copy.deepcopy(x)
    assert same(clone, x) and clone.feats.data_ptr() != x.feats.data_ptr()


def test_a_data_loader_brings_voxels_from_its_workers() -> None:
    data = [voxels(torch.device("cpu"), n=10 + i) for i in range(4)]
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, collate_fn=batch)  # type: ignore[arg-type]
    batches = list(loader)
    assert [b.batch_size for b in batches] == [6, 6]
    assert same(batches[1], batch(data[2:]))


def test_distributed_training_finds_the_features(device: torch.device) -> None:
    from torch.nn.parallel.distributed import _find_tensors

    x = voxels(device)
    assert any(tensor is x.feats for tensor in _find_tensors([x]))


def test_full_graph_compile_of_operations_that_keep_the_coordinates(device: torch.device) -> None:
    x = voxels(device)
    run = torch.compile(
        lambda v: (v.with_feats(v.feats.relu() * 2) + v).half(), fullgraph=True, backend="eager"
    )
    y = run(x)
    assert y.coord_set is x.coord_set and torch.equal(y.feats, (x.feats.relu() * 2 + x.feats).half())
