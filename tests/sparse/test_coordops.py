"""Operations on coordinates against brute force on small random grids, on both devices."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import warnings
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

import voxmma
from voxmma import Voxels
from voxmma.sparse import batching, sampling
from voxmma.sparse import sets as coordops

import conftest

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
RELAXED = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
BATCH = 4  # samples 0..2 may hold voxels, sample 3 never does

Row = tuple[int, int, int, int]
ROWS = st.lists(
    st.tuples(st.integers(0, 2), *(st.integers(-3, 3),) * 3), max_size=25, unique=True
)  # any order, negative, gaps in the batch, none at all


def voxels_of(rows: list[Row], device: torch.device, channels: int = 2, **options: Any) -> Voxels:
    coords = torch.tensor(rows, dtype=torch.int32, device=device).reshape(-1, 4)
    feats = torch.randn(len(rows), channels, dtype=torch.float64).to(device)
    return Voxels(coords, feats, BATCH, **options)


def rows_of(coords: Any) -> list[Row]:
    return [tuple(row) for row in coords.coords.tolist()]


# ---- sets --------------------------------------------------------------------------------------------------


@RELAXED
@given(rows=ROWS, stride=st.one_of(st.integers(1, 4), st.tuples(*(st.integers(1, 4),) * 3)))
def test_downsample_divides_and_rounds_down(device: torch.device, rows: list[Row], stride: Any) -> None:
    steps = (stride,) * 3 if isinstance(stride, int) else stride
    coarse = coordops.downsample(voxels_of(rows, device), stride)
    expected = {(b, *(v // s for v, s in zip(xyz, steps, strict=True))) for b, *xyz in rows}
    assert rows_of(coarse) == sorted(expected) and coarse.batch_size == BATCH
    assert coarse.coords.dtype == torch.int32 and coarse.device == device


def test_downsample_and_a_layer_of_that_stride_share_their_set(device: torch.device) -> None:
    fine = voxels_of([(0, 1, 2, 3), (1, -1, 0, 5)], device)
    assert coordops.downsample(fine, 3) is voxmma.kernel_map(fine, 3, stride=3, padding=0).out_coords


@RELAXED
@given(a=ROWS, b=ROWS, c=ROWS)
def test_union_and_intersection(device: torch.device, a: list[Row], b: list[Row], c: list[Row]) -> None:
    sets = [voxels_of(rows, device) for rows in (a, b, c)]
    assert rows_of(coordops.union(*sets)) == sorted({*a, *b, *c})
    assert rows_of(coordops.intersection(*sets)) == sorted({*a} & {*b} & {*c})
    for operation in (coordops.union, coordops.intersection):
        assert operation(sets[0], sets[0].coord_set) is sets[0].coord_set
        assert operation(sets[0]) is sets[0].coord_set


@RELAXED
@given(rows=ROWS, query=st.lists(st.tuples(st.integers(-2, 4), *(st.integers(-4, 4),) * 3), max_size=20))
def test_lookup(device: torch.device, rows: list[Row], query: list[Row]) -> None:
    far = [(0, 2**31 - 1, 0, 0), (5000, 0, 0, 0), (0, 0, -(2**31), 0), (0, 0, 0, 2**18), (-1, 0, 0, 0)]
    asked = query + far + rows[::-1]
    expected = [rows.index(q) if q in rows else -1 for q in asked]
    x = voxels_of(rows, device)
    for dtype in (torch.int32, torch.int64):
        queries = torch.tensor(asked, dtype=dtype, device=device)
        for asking in (queries, queries.t().contiguous().t()):
            got = coordops.lookup(x, asking)
            assert got.dtype == torch.int64 and got.tolist() == expected
    turns = torch.tensor([[1 << 32, 0, 0, 0], [0, 1 << 32, 0, 0], [0, 0, 0, -1 << 32]])
    wrapped = (torch.tensor(rows, dtype=torch.int64).reshape(-1, 1, 4) + turns).reshape(-1, 4)
    assert (coordops.lookup(x, wrapped.to(device)) == -1).all()


@pytest.mark.gpu
def test_gpu_lookup_does_not_wait() -> None:
    coords = conftest.random_coords(2000, 40, batch=2)
    x = Voxels(coords, torch.zeros(2000, 1), 2).to("cuda")
    query = torch.cat([coords.flip(0), coords + 50]).cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = coordops.lookup(x, query)  # indexes the set, too
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(rows.cpu(), coordops.lookup(x.cpu(), query.cpu()))
    assert torch.equal(rows[:2000].cpu(), torch.arange(1999, -1, -1))


def test_bad_arguments_are_named(device: torch.device) -> None:
    x = voxels_of([(0, 0, 0, 0), (1, 2, 3, 4)], device)
    other = Voxels(x.coords, x.feats, 9)
    n = torch.zeros(2, 3, device=device)
    nan = n + torch.tensor([[0.0], [math.nan]], device=device)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: coordops.downsample(x, 0), ValueError, "stride"),
        (lambda: coordops.downsample(x.coords, 2), TypeError, "coords must be a CoordSet"),
        (lambda: coordops.union(), ValueError, "at least one"),
        (lambda: coordops.union(x, other), ValueError, r"coords\[1\] has batch_size 9, coords\[0\] has 4"),
        (lambda: coordops.intersection(x, 1), TypeError, r"coords\[1\] must be"),
        (lambda: coordops.lookup(x, n), TypeError, "query must be int32 or int64"),
        (lambda: coordops.lookup(x, x.coords[:, :3]), ValueError, r"query must be \(N, 4\)"),
        (lambda: coordops.prune(x, torch.ones(3, device=device) > 0), ValueError, r"mask .*\(2,\)"),
        (lambda: coordops.prune(x, torch.ones(2, device=device)), TypeError, "mask must be a bool"),
        (lambda: coordops.crop(x, 0.5, 1), TypeError, "low must be"),
        (lambda: coordops.unique(x.coords, x.feats, "median"), ValueError, "duplicates must be"),
        (lambda: coordops.unique(x.coords, x.feats, "error"), ValueError, "reduce must be"),
        (lambda: sampling.devoxelise(x, n, 1.0, "cubic"), ValueError, "mode must be"),
        (lambda: sampling.devoxelise(x, n.long(), 1.0), TypeError, "points must be a floating"),
        (lambda: sampling.devoxelise(x, n[:, :2], 1.0), ValueError, r"points must be \(N, 3\)"),
        (lambda: sampling.devoxelise(x, n, -1.0), ValueError, "voxel_size must be"),
        (lambda: sampling.devoxelise(x, nan, 1.0), ValueError, "points row 1 is not finite"),
        (
            lambda: sampling.devoxelise(x, n, 1.0, batch_index=torch.tensor([0, 4], device=device)),
            ValueError,
            "batch_index row 1 has batch index 4, batch_size is 4",
        ),
        (lambda: sampling.sparse_quantize(n / 0, n, 1.0), ValueError, "points row 0 is not finite"),
    ]  # fmt: skip
    for call, error, message in cases:
        with pytest.raises(error, match=message):
            call()


# ---- rows --------------------------------------------------------------------------------------------------


@RELAXED
@given(rows=ROWS, low=st.tuples(*(st.integers(-4, 4),) * 3), high=st.tuples(*(st.integers(-4, 4),) * 3))
def test_prune_and_crop_keep_the_order(
    device: torch.device, rows: list[Row], low: tuple[int, ...], high: tuple[int, ...]
) -> None:
    x = voxels_of(rows, device, stride=2)
    keep = [all(a <= v < b for a, v, b in zip(low, xyz, high, strict=True)) for _, *xyz in rows]
    mask = torch.tensor(keep, dtype=torch.bool, device=device)
    for y in (coordops.crop(x, low, high), coordops.prune(x, mask), voxmma.nn.Prune()(x, mask)):
        assert rows_of(y) == list(itertools.compress(rows, keep))
        assert torch.equal(y.feats, x.feats[mask]) and (y.batch_size, y.stride) == (BATCH, x.stride)
    whole = coordops.crop(x, -100, 100)
    assert rows_of(whole) == rows


@RELAXED
@given(
    rows=st.lists(st.tuples(st.integers(0, 1), *(st.integers(-1, 1),) * 3), max_size=20),
    reduce=st.sampled_from(["mean", "sum", "max", "min", "first"]),
)
def test_unique_merges(device: torch.device, rows: list[Row], reduce: str) -> None:
    coords = torch.tensor(rows, dtype=torch.int32).reshape(-1, 4)
    feats = torch.randn(len(rows), 2, dtype=torch.float64)
    y = coordops.unique(coords.to(device), feats.to(device), reduce, batch_size=BATCH)
    assert rows_of(y) == sorted(set(rows))
    for place, row in enumerate(rows_of(y)):
        mine = feats[[i for i, other in enumerate(rows) if other == row]]
        expected = {
            "mean": mine.mean(0), "sum": mine.sum(0), "max": mine.amax(0), "min": mine.amin(0),
            "first": mine[0],
        }[reduce]  # fmt: skip
        torch.testing.assert_close(y.feats[place].cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min", "first"])
def test_fault_19_averaging_duplicates_gives_no_nan(
    device: torch.device, dtype: torch.dtype, reduce: str
) -> None:
    """Duplicates of any multiplicity, large values, no voxels, single ones: finite, forward and backward."""
    for rows, repeats in ((0, 1), (1, 1), (1, 70), (40, 5), (3, 1000)):
        coords = conftest.random_coords(rows, 5).repeat(repeats, 1).to(device)
        big = 30000.0 if reduce != "sum" else 20.0
        feats = torch.full((len(coords), 3), big, dtype=dtype, device=device, requires_grad=True)
        y = coordops.unique(coords, feats, reduce, batch_size=2)
        z = Voxels.from_points(coords[:, 1:].float() + 0.5, feats, 1.0, reduce)
        for out in (y, z):
            scale = repeats if reduce == "sum" else 1
            assert out.feats.dtype == dtype and out.num_voxels == rows
            torch.testing.assert_close(out.feats, torch.full_like(out.feats, big * scale))
            (gradient,) = torch.autograd.grad(out.feats.float().sum(), feats)
            assert gradient.isfinite().all() and float(gradient.sum()) == pytest.approx(
                3 * rows * scale, rel=2e-2
            )


# ---- points ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sparse_quantize_uses_half_open_cells(device: torch.device, dtype: torch.dtype) -> None:
    steps = torch.arange(-8, 9, dtype=torch.float64) / 4
    points = torch.cartesian_prod(steps, steps[:5], steps[:3]).to(dtype)  # exact in every dtype
    feats = torch.randn(len(points), 2).to(dtype)
    x, rows = sampling.sparse_quantize(points.to(device), feats.to(device), 0.5, "max", origin=(0.25, 0, 0))
    assert rows.dtype == torch.int64 and rows.shape == (len(points),)
    cells = torch.floor((points.double() - torch.tensor([0.25, 0, 0])) / 0.5).int()
    assert torch.equal(x.coords[rows][:, 1:].cpu(), cells)
    for row in range(x.num_voxels):
        assert torch.equal(x.feats[row].cpu(), feats[rows.cpu() == row].amax(0))


@pytest.mark.parametrize("reduce", ["mean", "sum", "max", "min", "first"])
@pytest.mark.parametrize("channels", [3, 8])
@pytest.mark.parametrize(("cells", "n"), [(1, 157), (3, 157), (60, 157), (1, 4096), (1, 5000), (2, 8000)])
def test_merged_rows_are_a_balanced_tree_in_row_order(
    device: torch.device, reduce: str, cells: int, n: int, channels: int
) -> None:
    coords = torch.zeros(n, 4, dtype=torch.int32)
    coords[:, 1] = torch.randint(cells, (n,))
    feats = torch.randn(n, channels).half()
    combine = {"max": torch.maximum, "min": torch.minimum}.get(reduce, torch.add)
    expected = []
    for cell in coords[:, 1].unique():
        rows = list(
            feats[coords[:, 1] == cell].to(feats.dtype if reduce in ("max", "min") else torch.float32)
        )
        count = len(rows)
        while len(rows) > 1 and reduce != "first":
            pairs = [combine(a, b) for a, b in zip(rows[::2], rows[1::2], strict=False)]
            rows = [*pairs, *rows[2 * len(pairs) :]]
        expected.append((rows[0] / count if reduce == "mean" else rows[0]).half())
    made = coordops.unique(coords.to(device), feats.to(device), reduce)
    assert torch.equal(made.feats.cpu(), torch.stack(expected))
    assert made.coords[:, 1].tolist() == coords[:, 1].unique().tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [1, 300])
@pytest.mark.parametrize("samples", [0, 3])  # 0: one tensor and an index
def test_gpu_waits_of_points_do_not_grow_with_them(copies: int, samples: int) -> None:
    points = torch.rand(500, 3, device="cuda").repeat(copies, 1)
    feats, batch = torch.rand(len(points), 2, device="cuda"), torch.zeros_like(points[:, 0]).int()
    x, _ = sampling.sparse_quantize(points, feats, 0.1, batch_index=batch, batch_size=1)
    x.coord_set.sorted_keys()
    given: dict[str, Any] = {"points": points, "feats": feats, "batch_index": batch, "batch_size": 1}
    if samples:
        given = {"points": [points] * samples, "feats": [feats] * samples}
        sampling.sparse_quantize(**given, voxel_size=0.1)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            sampling.sparse_quantize(**given, voxel_size=0.1)
            first = len([c for c in caught if "synchroniz" in str(c.message)])
            sampling.devoxelise(x, points, 0.1, batch_index=batch)
            second = len([c for c in caught if "synchroniz" in str(c.message)]) - first
    finally:
        torch.cuda.set_sync_debug_mode("default")
    # Extents, with what is out of range; numbers of voxels and of points in one. Samples and points in one.
    assert (first, second) == (2, 1)


def test_sparse_quantize_of_samples(device: torch.device) -> None:
    parts = [torch.rand(n, 3, device=device) for n in (7, 0, 12)]
    feats = [torch.rand(len(p), 2, device=device) for p in parts]
    x, rows = sampling.sparse_quantize(parts, feats, 0.4, "sum")
    assert x.batch_size == 3 and x.counts[1] == 0
    assert x.coords[rows][:, 0].tolist() == [0] * 7 + [2] * 12
    expected = torch.zeros_like(x.feats).index_add(0, rows, torch.cat(feats))
    torch.testing.assert_close(x.feats, expected)


def brute_devoxelise(
    x: Voxels, points: torch.Tensor, batch: list[int], size: float, mode: str
) -> torch.Tensor:
    table = {row: x.feats[i].cpu() for i, row in enumerate(rows_of(x))}
    out = torch.zeros(len(points), x.feats.shape[1], dtype=torch.float64)
    for i, (b, point) in enumerate(zip(batch, points.tolist(), strict=True)):
        place = [p / (size * s) for p, s in zip(point, x.stride, strict=True)]
        if mode == "nearest":
            out[i] = table.get((b, *(math.floor(p) for p in place)), torch.zeros_like(out[i]))
            continue
        total = 0.0
        for corner in itertools.product((0, 1), repeat=3):
            base = [math.floor(p - 0.5) for p in place]
            weight = math.prod(
                1 - abs(p - 0.5 - (c + d)) for p, c, d in zip(place, base, corner, strict=True)
            )
            row = (b, *(c + d for c, d in zip(base, corner, strict=True)))
            if row in table:
                out[i] += weight * table[row]
                total += weight
        if total > 0:
            out[i] /= total
    return out


@RELAXED
@given(rows=ROWS, mode=st.sampled_from(["nearest", "trilinear"]), stride=st.sampled_from([1, 2]))
def test_devoxelise(device: torch.device, rows: list[Row], mode: str, stride: int) -> None:
    x = voxels_of(rows, device, stride=stride)
    points = torch.cat([torch.rand(20, 3, dtype=torch.float64) * 4 - 2, torch.full((1, 3), 1e9).double()])
    batch = [0, 1, 2] * 7
    got = sampling.devoxelise(x, points.to(device), 0.5, mode, batch_index=torch.tensor(batch, device=device))
    torch.testing.assert_close(got.cpu(), brute_devoxelise(x, points, batch, 0.5, mode))


def devoxelise_step_by_step(
    x: Voxels, points: torch.Tensor, batch: list[int], size: float, origin: Any, mode: str
) -> torch.Tensor:
    """Every operation rounded on its own, in the documented precision and order."""
    table = {row: x.feats[i].cpu() for i, row in enumerate(rows_of(x))}
    compute = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    out = torch.zeros(len(points), x.feats.shape[1], dtype=compute)
    for i, (b, point) in enumerate(zip(batch, points.tolist(), strict=True)):
        place = [(p - o) / size for p, o in zip(point, origin, strict=True)]
        place = [
            (p if mode == "trilinear" else math.floor(p)) / s for p, s in zip(place, x.stride, strict=True)
        ]
        shares: list[tuple[float, torch.Tensor]] = []
        if mode == "trilinear":
            place = [p - 0.5 for p in place]
        base = [math.floor(p) for p in place]
        for corner in itertools.product((0, 1), repeat=3) if mode == "trilinear" else [(0, 0, 0)]:
            share = 1.0
            for p, c, d in zip(place, base, corner, strict=True):
                share *= (p - c if d else 1 - (p - c)) if mode == "trilinear" else 1.0
            row = (b, *(c + d for c, d in zip(base, corner, strict=True)))
            if row in table:
                shares.append((share, table[row]))
        total = functools.reduce(operator.add, (share for share, _ in shares), 0.0)
        for share, feats in shares:
            if share > 0:
                out[i] = out[i] + feats.to(compute) * torch.tensor(share / total, dtype=torch.float64).to(
                    compute
                )
    return out.to(x.dtype)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3, 4, 32])
def test_devoxelise_bits(device: torch.device, dtype: torch.dtype, mode: str, channels: int) -> None:
    coords = conftest.random_coords(200, 7, batch=3)
    coords[:, 1:] -= 3
    feats = torch.randn(200, channels).to(dtype)
    feats[7] = math.inf  # seen by those around it alone
    x = Voxels(coords.to(device), feats.to(device), 3, stride=(1, 2, 1))
    for point_dtype in DTYPES:
        points = (torch.rand(60, 3) * 3 - 1).to(point_dtype)
        points[:3] = torch.tensor(
            [[6e4, -6e4, 0.0], [0.25, 0.25, 0.25], [-0.0, 0.5, -0.25]], dtype=point_dtype
        )
        batch = torch.randint(0, 3, (60,), dtype=torch.int32)
        origin = (0.25, -0.1, 0.0)
        expected = devoxelise_step_by_step(x, points, batch.tolist(), 0.3, origin, mode)
        for index in (batch.to(device), batch.long().to(device)):
            got = sampling.devoxelise(x, points.to(device), 0.3, mode, batch_index=index, origin=origin)
            assert got.dtype == dtype and torch.equal(got.cpu().nan_to_num(77), expected.nan_to_num(77))
            with torch.inference_mode():
                inferred = sampling.devoxelise(
                    x, points.to(device), 0.3, mode, batch_index=index, origin=origin
                )
            assert torch.equal(inferred.nan_to_num(77), got.nan_to_num(77))


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 3, 4, 32, 160])
def test_devoxelise_gradient(device: torch.device, dtype: torch.dtype, mode: str, channels: int) -> None:
    coords = conftest.random_coords(40, 4)
    x = Voxels(coords.to(device), torch.randn(40, channels).to(device, dtype), 1)
    points = torch.cat([coords[:, 1:] + 0.5, torch.rand(660, 3) * 6 - 1]).to(device)
    identity = x.with_feats(torch.eye(40, dtype=torch.float64, device=device))
    matrix = sampling.devoxelise(identity, points, 1.0, mode)
    assert (matrix.amax(0) > 0).all() and (matrix.amax(1) == 0).any()  # all voxels get one, some points none
    dy = torch.randn(700, channels).to(device, dtype)
    results = []
    for grad in (dy, dy, dy.t().contiguous().t()):
        feats = x.feats.detach().requires_grad_()
        sampling.devoxelise(x.with_feats(feats), points, 1.0, mode).backward(grad)
        results.append(feats.grad)
    assert all(torch.equal(results[0], again) for again in results[1:])
    tolerance = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(
        results[0].double(), matrix.t() @ dy.double(), rtol=tolerance, atol=tolerance * 10
    )


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_devoxelise_gradients_of_any_order(device: torch.device, mode: str) -> None:
    x = voxels_of([(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, 0), (2, 0, 0, 0)], device)
    points = torch.rand(30, 3, device=device) * 3 - 0.5
    feats = x.feats.clone().requires_grad_()

    def run(f: torch.Tensor) -> torch.Tensor:
        return sampling.devoxelise(x.with_feats(f), points, 1.0, mode)

    assert gradcheck(run, feats, check_forward_ad=True) and gradgradcheck(run, feats)
    square = torch.func.grad(lambda f: run(f).square().sum())(feats.detach())
    torch.testing.assert_close(square, torch.autograd.grad(run(feats).square().sum(), feats)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_gpu_devoxelise_on_another_stream(mode: str) -> None:
    coords = conftest.random_coords(3000, 20)
    on_cpu = Voxels(coords, torch.randn(3000, 8), 1)
    points = torch.rand(20000, 3) * 20
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x, there = on_cpu.to("cuda"), points.cuda()
        feats = x.feats.requires_grad_()
        torch.cuda._sleep(10_000_000)  # whatever does not wait for this stream is early
        y = sampling.devoxelise(x.with_feats(feats + 0), there, 1.0, mode)
        y.sum().backward()
    stream.synchronize()
    assert torch.equal(y.detach().cpu(), sampling.devoxelise(on_cpu, points, 1.0, mode))
    assert feats.grad is not None
    cpu_feats = on_cpu.feats.clone().requires_grad_()
    sampling.devoxelise(on_cpu.with_feats(cpu_feats), points, 1.0, mode).sum().backward()
    torch.testing.assert_close(feats.grad.cpu(), cpu_feats.grad)


STRIDES = range(1, 13)


def grid_points(size: float, origin: float, dtype: torch.dtype) -> torch.Tensor:
    """(N, 3) points on the faces of cells as arithmetic of that dtype puts them, and next to them."""
    steps = torch.arange(-40, 41, dtype=torch.float64)
    on_faces = torch.cat([(steps * size + origin).to(dtype), steps.to(dtype) * size + origin])
    there = torch.cat([on_faces, *(torch.nextafter(on_faces.float(), end) for end in (FAR, -FAR))]).to(dtype)
    return torch.stack([there, there.flip(0), there.roll(7)], dim=1)


FAR = torch.tensor(math.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.1, 0.05, 0.3, 1 / 3, 0.07, 1.0])
@pytest.mark.parametrize("origin", [0.0, -51.2, 0.1])
def test_fault_31_a_point_belongs_to_the_voxel_it_was_put_into(
    device: torch.device, size: float, origin: float, dtype: torch.dtype
) -> None:
    """At every stride, the nearest voxel of a point is the one that holds the voxel made of it."""
    points, start = grid_points(size, origin, dtype).to(device), (origin, origin, origin)
    fine, row = sampling.sparse_quantize(points, points[:, :1].float(), size, origin=start)
    for stride in STRIDES:
        coarse = coordops.downsample(fine, stride)
        number = torch.arange(coarse.num, dtype=torch.float64, device=device).unsqueeze(1)
        x = Voxels(coarse, number, stride=stride)
        cell = fine.coords[row].long()
        cell[:, 1:] = cell[:, 1:].div(stride, rounding_mode="floor")
        expected = coarse.lookup(cell)
        assert int(expected.min()) >= 0
        got = sampling.devoxelise(x, points, size, "nearest", origin=start)
        assert torch.equal(got[:, 0].long(), expected)


def test_fault_31_the_smallest_numbers_have_a_cell_of_their_own(device: torch.device) -> None:
    """The largest number below 0 lies in cell -1 of every grid, although halved it is 0."""
    points = torch.tensor([[-5e-324, 0.0, 5e-324]], dtype=torch.float64, device=device)
    fine, _ = sampling.sparse_quantize(points, points, 1.0)
    assert fine.coords.tolist() == [[0, -1, 0, 0]]
    for stride in STRIDES:
        x = Voxels(coordops.downsample(fine, stride), torch.ones(1, 1, device=device), stride=stride)
        assert sampling.devoxelise(x, points, 1.0, "nearest").item() == 1


@pytest.mark.parametrize("stride", [1, 2, 3, 6, 7, 9])
def test_trilinear_weights_agree_with_the_cells(device: torch.device, stride: int) -> None:
    """A field that is linear in the cells is met at every point, across all faces: weights are continuous."""
    lattice = torch.cartesian_prod(*[torch.arange(-8, 8)] * 3)
    coords = torch.cat([torch.zeros(len(lattice), 1, dtype=torch.int64), lattice], dim=1).to(device)
    x = Voxels(coords, coords[:, 1:].double() + 0.5, stride=stride)
    points = grid_points(0.05, 0.1, torch.float64).to(device)
    points = points[(points.abs() < 0.25).all(1)]
    got = sampling.devoxelise(x, points, 0.05, origin=(0.1, 0.1, 0.1))
    torch.testing.assert_close(got, (points - 0.1) / 0.05 / stride, rtol=0, atol=1e-12)
    if device.type == "cuda":
        again = sampling.devoxelise(x.cpu(), points.cpu(), 0.05, origin=(0.1, 0.1, 0.1))
        assert torch.equal(got.cpu(), again)


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_devoxelise_border_constant_and_gradient(device: torch.device, mode: str) -> None:
    x = voxels_of([(0, 0, 0, 0), (0, 1, 0, 0), (0, 1, 1, 0), (2, 0, 0, 0)], device)
    inside = torch.tensor([[0.5, 0.5, 0.5], [1.5, 0.9, 0.2], [1.99, 1.99, 0.01]], device=device)
    for dtype in DTYPES:
        constant = x.with_feats(torch.full((4, 2), 3.0, dtype=dtype, device=device))
        got = sampling.devoxelise(constant, inside, 1.0, mode)
        assert got.dtype == dtype and torch.equal(got, torch.full_like(got, 3.0))
    torch.testing.assert_close(sampling.devoxelise(x, inside[:1], 1.0, mode)[0], x.feats[0])
    poisoned = x.with_feats(x.feats.clone())
    poisoned.feats[3] = math.nan  # of another sample: must not be seen
    points = torch.rand(30, 3, device=device) * 3 - 0.5
    assert sampling.devoxelise(poisoned, points, 1.0, mode).isfinite().all()
    feats = x.feats.clone().requires_grad_()
    assert gradcheck(lambda f: sampling.devoxelise(x.with_feats(f), points, 1.0, mode), feats)
    per_sample = sampling.devoxelise(x, [points[:3], points[:0], points[3:5]], 1.0, mode)
    index = torch.tensor([0, 0, 0, 2, 2], device=device)
    assert torch.equal(per_sample, sampling.devoxelise(x, points[:5], 1.0, mode, batch_index=index))


def test_devoxelise_undoes_quantisation_of_distinct_cells(device: torch.device) -> None:
    points = conftest.random_coords(50, 6)[:, 1:].unique(dim=0).double().to(device) * 0.2 + 0.1
    feats = torch.randn(len(points), 3, device=device)
    x, rows = sampling.sparse_quantize(points, feats, 0.2)
    assert torch.equal(sampling.devoxelise(x, points, 0.2, "nearest"), feats)
    assert torch.equal(x.feats[rows], feats)


# ---- dense grids and batches -------------------------------------------------------------------------------


@RELAXED
@given(rows=ROWS)
def test_dense_and_back(device: torch.device, rows: list[Row]) -> None:
    x = voxels_of(rows, device)
    x = x.with_feats(x.feats * (torch.arange(len(rows), device=device) % 3 > 0).unsqueeze(1))  # some are zero
    origin = (-3, -3, -3)
    grid, mask = batching.to_dense(x, (7, 7, 7), origin)
    y = batching.from_dense(grid, mask, origin)
    order = x.coord_set.sorted_keys()[1]
    assert torch.equal(y.coords, x.coords[order]) and torch.equal(y.feats, x.feats[order])
    again, same_mask = batching.to_dense(y, (7, 7, 7), origin)
    assert torch.equal(again, grid) and torch.equal(same_mask, mask) and y.batch_size == BATCH


@RELAXED
@given(rows=ROWS, more=ROWS)
def test_batch_and_unbatch(device: torch.device, rows: list[Row], more: list[Row]) -> None:
    parts = [voxels_of(rows, device), voxels_of(more, device)]
    together = batching.batch(parts)
    assert together.batch_size == 2 * BATCH
    assert rows_of(together) == rows + [(b + BATCH, *xyz) for b, *xyz in more]
    singles = batching.unbatch(together)
    assert [rows_of(s) for s in singles] == [
        [(0, *xyz) for b, *xyz in part if b == sample] for part in (rows, more) for sample in range(BATCH)
    ]
    back = batching.batch(singles)
    assert sorted(rows_of(back)) == sorted(rows_of(together)) and back.batch_size == together.batch_size


def test_nothing_works_everywhere(device: torch.device) -> None:
    x = voxels_of([], device)
    feats = x.feats.requires_grad_()
    points = torch.rand(5, 3, device=device)
    none = torch.zeros(0, dtype=torch.bool, device=device)
    assert coordops.downsample(x, 2).num == coordops.union(x, x).num == 0
    assert coordops.lookup(x, torch.zeros(3, 4, dtype=torch.int32, device=device)).tolist() == [-1] * 3
    outputs = [sampling.devoxelise(x, points, 1.0, mode) for mode in ("nearest", "trilinear")]
    outputs += [coordops.prune(x, none).feats, coordops.crop(x, 0, 1).feats, batching.to_dense(x)[0]]
    outputs += [sampling.devoxelise(x, points[:0], 1.0), batching.batch([x, x]).feats]
    assert all(not out.any() for out in outputs)
    sum(out.sum() for out in outputs).backward()  # type: ignore[union-attr]
    assert feats.grad is not None and feats.grad.shape == (0, 2)


def test_new_sets_are_equal_on_both_devices_and_runs(device: torch.device) -> None:
    coords = conftest.random_coords(3000, 40, batch=2)
    x, on_cpu = (
        Voxels(coords.to(device), torch.zeros(3000, 1, device=device)),
        Voxels(coords, torch.zeros(3000, 1)),
    )
    for made, expected in (
        (coordops.downsample(x, 3), coordops.downsample(on_cpu, 3)),
        (
            coordops.union(x, coordops.downsample(x, 2)),
            coordops.union(on_cpu, coordops.downsample(on_cpu, 2)),
        ),
        (
            coordops.intersection(x, coordops.downsample(x, 2)),
            coordops.intersection(on_cpu, coordops.downsample(on_cpu, 2)),
        ),
    ):
        assert torch.equal(made.coords.cpu(), expected.coords)
        keys = made.sorted_keys()
        assert torch.equal(keys[1], torch.arange(made.num, device=device))
