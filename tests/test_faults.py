"""Public faults of this family of libraries that submanifold convolution can show: one test a fault, its
number in the name (the list is in docs/faults.md). Each test covers the kind of fault, not only the case that
was reported."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import voxmma
from voxmma.dispatch.selection import card
from voxmma.nn import functional as F
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv
from voxmma.nn.modules.sparse_conv import SparseConv3d
from voxmma.ops.kernels import compiled
from voxmma.sparse.sampling import devoxelise
from voxmma.verify import accuracy

from conftest import Clean, kernel_offsets, random_coords, surface_coords


def brute_force(coords: Tensor, x: Tensor, weight: Tensor, offsets: list) -> Tensor:
    """The definition, row by row, in fp64 on the CPU."""
    rows = {tuple(c): i for i, c in enumerate(coords.tolist())}
    x, weight = x.detach().double().cpu(), weight.detach().double().cpu()
    out = torch.zeros(len(coords), weight.shape[-1], dtype=torch.float64)
    for i, (b, cx, cy, cz) in enumerate(coords.tolist()):
        for k, (dx, dy, dz) in enumerate(offsets):
            row = rows.get((b, cx + dx, cy + dy, cz + dz))
            if row is not None:
                out[i] += x[row] @ weight[k]
    return out


def voxels_of(rows: list[tuple[int, int, int, int]], channels: int, device: torch.device) -> voxmma.Voxels:
    coords = torch.tensor(rows, dtype=torch.int32, device=device)
    return voxmma.Voxels(coords, torch.randn(len(rows), channels, dtype=torch.float64, device=device))


def test_fault_02_pointwise_weights_are_not_transposed(device: torch.device) -> None:
    """k = 1 follows the rule of every other kernel size: y = x @ weight[k]; nothing is special about 1x1."""
    x = voxmma.Voxels(random_coords(20, 4).to(device), torch.randn(20, 4, dtype=torch.float64, device=device))
    w = torch.randn(1, 4, 5, dtype=torch.float64, device=device)
    torch.testing.assert_close(spatially_sparse_conv(x, w, 1).feats, x.feats @ w[0])
    centre = torch.zeros(27, 4, 5, dtype=torch.float64, device=device)
    centre[13] = w[0]
    torch.testing.assert_close(spatially_sparse_conv(x, centre, 3).feats, x.feats @ w[0])
    with pytest.raises(ValueError, match=r"x has 4 channels, weight .* takes 5"):
        spatially_sparse_conv(x, w.transpose(1, 2), 1)


@pytest.mark.parametrize("dilation", [2, 3, (1, 2, 3), (4, 1, 1)], ids=str)
def test_fault_03_dilation_is_not_ignored(device: torch.device, dilation: int | tuple[int, int, int]) -> None:
    pair = voxels_of([(0, 0, 0, 0), (0, 2, 0, 0)], 1, device)
    ones = torch.ones(27, 1, 1, dtype=torch.float64, device=device)
    assert torch.allclose(spatially_sparse_conv(pair, ones, 3, dilation=2).feats, pair.feats.sum())
    assert torch.equal(spatially_sparse_conv(pair, ones, 3, dilation=1).feats, pair.feats)
    coords = random_coords(200, 9)
    x = torch.randn(200, 3, dtype=torch.float64, device=device)
    for size in (3, 2):
        offsets = kernel_offsets(size, dilation)
        w = torch.randn(len(offsets), 3, 2, dtype=torch.float64, device=device)
        y = spatially_sparse_conv(voxmma.Voxels(coords.to(device), x), w, size, dilation=dilation).feats
        torch.testing.assert_close(y.cpu(), brute_force(coords, x, w, offsets))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "n", "c"),
    [(torch.float16, 5_700_000, 192), (torch.float32, 8_500_000, 64), (torch.float16, 8_600_000, 256)],
    ids=["fp16_c192_bytes", "fp32_c64_bytes", "fp16_c256_elements"],
)
def test_fault_04_offsets_past_2_31(dtype: torch.dtype, n: int, c: int) -> None:
    """Byte (and in the last case element) offsets past 2^31, forward and backward, checked at both ends."""
    device = torch.device("cuda")
    line = torch.arange(n, device=device)
    coords = torch.stack([line // 100_000_000, line // 40_000, line // 200 % 200, line % 200], 1).int()
    assert n * c * dtype.itemsize > 2**31
    x = torch.empty(n, c, dtype=dtype, device=device).uniform_(-1, 1).requires_grad_()
    w = (torch.randn(3, c, c, device=device) / c**0.5).to(dtype).requires_grad_()
    out = spatially_sparse_conv(voxmma.Voxels(coords, x), w, (1, 1, 3))
    dy = torch.zeros_like(out.feats)
    ends = torch.cat([torch.arange(400, device=device), torch.arange(n - 400, n, device=device)])
    dy[ends] = torch.empty(800, c, device=device).uniform_(-1, 1).to(dtype)
    dx, dw = torch.autograd.grad(out.feats, (x, w), dy)
    with torch.no_grad():
        y64 = torch.zeros(800, c, dtype=torch.float64, device=device)
        dx64, dw64 = torch.zeros_like(y64), torch.zeros(3, c, c, dtype=torch.float64, device=device)
        for k, offset in enumerate((-1, 0, 1)):
            row = ends + offset
            ok = (row >= 0) & (row < n) & (ends // 200 == row // 200)
            y64[ok] += x[row[ok]].double() @ w[k].double()
            dw64[k] = x[row[ok]].double().T @ dy[ends[ok]].double()
            back = ends - offset
            ok = (back >= 0) & (back < n) & (ends // 200 == back // 200)
            dx64[ok] += dy[back[ok]].double() @ w[k].double().T
    tolerance = 2e-3 if dtype == torch.float16 else 1e-5
    for got, want in ((out.feats[ends], y64), (dx[ends], dx64), (dw, dw64)):
        assert torch.linalg.vector_norm(got.double() - want) <= tolerance * torch.linalg.vector_norm(want)
    middle = torch.randint(400, n - 400, (1000,), device=device)
    assert dx[middle[(middle > 1000) & (middle < n - 1000)]].count_nonzero() == 0


@pytest.mark.gpu
@pytest.mark.slow
def test_fault_42_rows_that_span_more_than_64_gib() -> None:
    """Column slices of a tensor whose rows lie 8 KiB apart: every tile and pooling as on dense rows."""
    device, n = torch.device("cuda"), 8_600_000
    room = 80 << 30
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info(device)[0] < room:
        pytest.skip(f"needs {room >> 30} GiB of free GPU memory")
    line = torch.arange(n, device=device)
    coords = torch.stack([line * 0, line // 65536, line // 256 % 256, line % 256], 1).int()
    wide = torch.empty(n, 4096, dtype=torch.float16, device=device)
    assert n * wide.stride(0) * 2 > 64 << 30
    x, dy = wide[:, :32], wide[:, 4064:]
    for slice_ in (x, dy):
        slice_.copy_(torch.randn(n, 32, device=device, dtype=torch.float16))
    dense, dense_dy = x.contiguous(), dy.contiguous()
    voxels = voxmma.Voxels(coords, x)
    w = torch.zeros(27, 32, 32, device=device, dtype=torch.float16)
    w[13] = torch.eye(32)
    assert torch.equal(spatially_sparse_conv(voxels, w, 3).feats, dense)
    w = torch.randn(27, 32, 32, device=device, dtype=torch.float16) / 20
    kmap = voxmma.kernel_map(voxels.coord_set, 3)
    ops, seen = torch.ops.voxmma, set()
    for tile in compiled():
        if tile.input != "fp16" or not tile.runs_on(card(device)):
            continue
        seen.add((tile.op, tile.arch))
        if tile.op == "wgrad":
            both = [
                ops.conv_wgrad(a, b, kmap.tensors, [], 27, 1, True, "fp32", tile.name, "", None)
                for a, b in ((x, dy), (dense, dense_dy))
            ]
            assert torch.equal(*both), tile.name
            continue
        for transpose, operands in ((False, (x, dense)), (True, (dy, dense_dy))):
            both = [
                ops.conv(
                    a, w, None, kmap.tensors, [], n, True, transpose, tile.accum, tile.name, "", "", None
                )
                for a in operands
            ]
            assert torch.equal(*both), (tile.name, transpose)
    assert {op for op, _ in seen} == {"fprop", "wgrad"}
    for run in (
        lambda v: F.max_pool(v, 2, 2).feats,
        lambda v: F.avg_pool(v, 3, 1).feats,
        F.global_sum_pool,
        F.global_max_pool,
        lambda v: devoxelise(v, coords[-1000:, 1:].double() + 0.3, 1.0),
        lambda v: voxmma.Voxels.from_points(coords[:, 1:].float(), v.feats, 2.0).feats,
    ):
        assert torch.equal(run(voxels), run(voxels.with_feats(dense)))


@pytest.mark.gpu
def test_fault_42_rows_that_no_copy_brings_into_reach_are_refused() -> None:
    """More than 2^32 pieces of 16 bytes in dense rows: wgmma tiles say so before they are copied."""
    device = torch.device("cuda")
    names = [
        t.name
        for t in compiled()
        if t.arch == 90 and t.op == "fprop" and t.input == "fp16" and t.accum == "fp32"
    ]
    if not names or torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("no wgmma tile runs here")
    kmap = voxmma.kernel_map(voxmma.CoordSet(torch.zeros(1, 4, dtype=torch.int32, device=device)), 3)
    x = torch.ones(1, 64, device=device, dtype=torch.float16).expand(540_000_000, 64)
    tensors = [*kmap.tensors[:-1], torch.empty(0, len(x), 1, device=device, dtype=torch.int32)]
    w = torch.ones(27, 64, 64, device=device, dtype=torch.float16)
    for name in names:
        with pytest.raises(
            RuntimeError, match=r"x has 540000000 rows of 128 bytes: tile .* reaches 68719476720 bytes"
        ):
            torch.ops.voxmma.conv(x, w, None, tensors, [], 1, True, False, "fp32", name, "", "", None)


def test_fault_05_wide_coordinate_ranges_do_not_collide(device: torch.device) -> None:
    """Voxels whose 32-bit linear keys coincide, and voxels at the ends of the packable range, stay apart."""
    far = 131071
    rows = [
        (0, 65535, 65535, 0),
        (0, 65535, 65535, 1),
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (0, 32768, 0, 0),
        (1, 0, 0, 0),
    ]
    rows += [
        (0, far, far, far),
        (0, far - 1, far, far),
        (0, -far - 1, -far - 1, -far - 1),
        (0, -far, -far - 1, -far - 1),
    ]
    x = voxels_of(rows, 2, device)
    for size in (3, 2):
        offsets = kernel_offsets(size)
        w = torch.randn(len(offsets), 2, 3, dtype=torch.float64, device=device)
        out = spatially_sparse_conv(x, w, size)
        torch.testing.assert_close(out.feats.cpu(), brute_force(x.coords.cpu(), x.feats, w, offsets))
        assert torch.equal(out.coords, x.coords)
    one = voxels_of([(0, 65535, 65535, 0)], 1, device)
    assert torch.equal(
        spatially_sparse_conv(one, torch.ones(8, 1, 1, dtype=torch.float64, device=device), 2).feats,
        one.feats,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fault_07_no_nan_at_long_reductions(device: torch.device, dtype: torch.dtype) -> None:
    """K * C = 3456, features around 30, and partial sums far past 65504 that cancel: within bounds."""
    n = 20_000 if device.type == "cuda" else 300
    coords = random_coords(n, 28 if device.type == "cuda" else 8)
    generator = torch.Generator().manual_seed(0)
    x = (30 + torch.randn(n, 128, generator=generator)).to(dtype).to(device)
    mild = ((torch.rand(27, 128, 32, generator=generator) - 0.5) / 29).to(dtype).to(device)
    wild = torch.ones(27, 128, 32) * 60
    wild[:, 64:] *= -1
    voxels = voxmma.Voxels(coords.to(device), x)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    for w, flags in ((mild, (None, True)), (wild.to(dtype).to(device), (None,))):
        y64, abs64 = accuracy.reference_conv(x, w, pairs, n)
        assert float(y64.abs().max()) < 65504
        for flag in flags:
            out = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=flag)
            ran = voxmma.explain(out).accumulator
            operands = torch.float16 if ran == "fp16" else dtype  # bf16 is rescaled to fp16 there
            limit = accuracy.bound(ran, 27 * 128, operands, dtype, accuracy.arch_of(device), offsets=27)
            found = accuracy.errors(out.feats, y64, abs64, floor=limit.floor)
            assert found.nonfinite == 0 and found.within(limit), (found, limit)


@pytest.mark.parametrize("c", [5, 16])
def test_fault_08_same_input_same_output(device: torch.device, c: int) -> None:
    """100k voxels, twice from scratch: rows in the caller's order, outputs and gradients bitwise equal."""
    coords = surface_coords(225)[:100_000].to(device)
    x = torch.randn(len(coords), c, device=device)
    w = torch.randn(27, c, c, device=device) / 10

    def run() -> list[Tensor]:
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = spatially_sparse_conv(voxmma.Voxels(coords.clone(), xs), ws, 3)
        out.feats.square().sum().backward()
        assert torch.equal(out.coords, coords)
        return [out.feats.detach(), xs.grad, ws.grad]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_fault_09_half_features_with_fp32_weights_in_eval(device: torch.device) -> None:
    coords = random_coords(60, 5).to(device)
    for c, features in itertools.product((8, 18), (torch.float16, torch.float32)):
        conv = SparseConv3d(c, c, 3, device=device).eval()
        x = voxmma.Voxels(coords, torch.randn(60, c, device=device).to(features))
        with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):
            out = conv(x)
        assert out.feats.dtype == torch.float16
        expected = brute_force(coords.cpu(), x.feats.half(), conv.weight.half(), kernel_offsets(3))
        assert conv.bias is not None
        expected += conv.bias.detach().double().cpu()
        torch.testing.assert_close(out.feats.double().cpu(), expected, rtol=2e-3, atol=2e-3)
        plain = spatially_sparse_conv(x.with_feats(x.feats.half()), conv.weight.detach().half(), 3)
        assert plain.feats.dtype == torch.float16 and plain.feats.isfinite().all()


@pytest.mark.parametrize("n", [0, 1, 77])
@pytest.mark.parametrize("c", [1, 7, 32])
def test_fault_10_bf16_works(device: torch.device, n: int, c: int) -> None:
    coords = random_coords(n, 5).to(device)
    conv = SparseConv3d(c, c, 3, device=device, dtype=torch.bfloat16)
    x = torch.randn(n, c, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = conv(voxmma.Voxels(coords, x, batch_size=1))
    out.feats.sum().backward()
    assert out.feats.dtype == x.grad.dtype == conv.weight.grad.dtype == torch.bfloat16  # type: ignore[union-attr]
    expected = (
        brute_force(coords.cpu(), x, conv.weight, kernel_offsets(3)) + conv.bias.detach().double().cpu()
    )  # type: ignore[union-attr]
    torch.testing.assert_close(out.feats.double().cpu(), expected, rtol=2e-2, atol=2e-2)


def test_fault_11_mixed_precision_training(device: torch.device) -> None:
    """fp16 features, fp32 weights, with and without autocast: fp16 products, gradients keep their dtypes."""
    coords = random_coords(60, 5).to(device)
    for autocast in (False, True):
        conv = SparseConv3d(8, 8, 3, device=device)
        feats = torch.randn(
            60, 8, device=device, dtype=torch.float32 if autocast else torch.float16, requires_grad=True
        )
        with torch.autocast(device.type, dtype=torch.float16, enabled=autocast):
            out = conv(voxmma.Voxels(coords, feats))
        assert out.feats.dtype == torch.float16
        out.feats.float().square().mean().backward()
        assert feats.grad is not None and feats.grad.dtype == feats.dtype and feats.grad.any()
        assert (
            conv.weight.grad is not None
            and conv.weight.grad.dtype == torch.float32
            and conv.weight.grad.any()
        )
        assert conv.bias is not None and conv.bias.grad is not None and conv.bias.grad.dtype == torch.float32


@pytest.mark.parametrize("batch_size", [0, 1, 3])
def test_fault_12_no_voxels_is_no_error(device: torch.device, batch_size: int) -> None:
    """N = 0 through a stack of layers, forward and backward, and empty samples beside full ones."""
    layers = torch.nn.ModuleList([SparseConv3d(4, 8, 3, device=device), SparseConv3d(8, 4, 2, device=device)])
    feats = torch.zeros(0, 4, device=device, requires_grad=True)
    x = voxmma.Voxels(torch.zeros(0, 4, dtype=torch.int32, device=device), feats, batch_size=batch_size)
    for layer in layers:
        x = layer(x)
    x.feats.sum().backward()
    assert x.feats.shape == (0, 4) and feats.grad is not None and len(x.counts) == batch_size
    coords = random_coords(30, 4)
    coords[:, 0] = 1
    out = layers[0](voxmma.Voxels(coords.to(device), torch.randn(30, 4, device=device), batch_size=3))
    assert out.counts.tolist() == [0, 30, 0]


def test_fault_13_weights_on_another_device_are_named() -> None:
    """The rule, on any machine: both devices are in the message and nothing is launched."""
    for c in range(3, 9):
        conv = SparseConv3d(c, 4, 3).to("meta")
        x = voxmma.Voxels(random_coords(100, 6), torch.randn(100, c))
        with pytest.raises(ValueError, match="weight is on meta, the features of x are on cpu"):
            conv(x)


@pytest.mark.gpu
def test_fault_13_cpu_weights_with_cuda_voxels() -> None:
    for c in range(3, 9):
        conv = SparseConv3d(c, 4, 3)
        x = voxmma.Voxels(random_coords(100, 6).cuda(), torch.randn(100, c, device="cuda"))
        with pytest.raises(ValueError, match="weight is on cpu, the features of x are on cuda:0"):
            conv(x)
        with pytest.raises(ValueError, match="weight is on cuda:0, the features of x are on cpu"):
            conv.cuda()(x.cpu())
        assert conv(x).feats.isfinite().all()  # the context is alive


def test_fault_14_bad_coordinates_are_refused(device: torch.device) -> None:
    """Named at construction; a later call on the same device works."""
    feats = torch.randn(3, 4, device=device)
    good = [[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]]
    bad = [
        (torch.tensor(good, device=device).float(), 1),
        (torch.tensor([*good[:2], [0, 200_000, 0, 0]], dtype=torch.int32, device=device), 1),
        (torch.tensor([*good[:2], [0, 0, -200_000, 0]], dtype=torch.int32, device=device), 1),
        (torch.tensor([*good[:2], [1, 0, 0, 0]], dtype=torch.int32, device=device), 1),
        (torch.tensor([*good[:2], [-1, 0, 0, 0]], dtype=torch.int32, device=device), 1),
        (torch.tensor([*good[:2], good[0]], dtype=torch.int32, device=device), 1),
        (torch.tensor(good[:2], dtype=torch.int32, device=device), 1),
        (torch.tensor(good, dtype=torch.int32, device=device)[:, :3], 1),
    ]
    for coords, batch_size in bad:
        with pytest.raises((ValueError, TypeError)):
            voxmma.Voxels(coords, feats, batch_size=batch_size)
    with pytest.raises(ValueError, match=r"\b2\b"):  # the offending row is named
        voxmma.Voxels(bad[1][0], feats, batch_size=1)
    out = SparseConv3d(4, 4, 3, device=device)(
        voxmma.Voxels(torch.tensor(good, dtype=torch.int32, device=device), feats)
    )
    assert out.feats.isfinite().all()


@pytest.mark.gpu
@pytest.mark.multigpu
def test_fault_15_second_device_without_set_device() -> None:
    assert torch.cuda.current_device() == 0
    results = []
    for device in ("cuda:0", "cuda:1"):
        torch.manual_seed(0)
        x = voxmma.Voxels(
            random_coords(10, 3).to(device), torch.randn(10, 16).half().to(device).requires_grad_()
        )
        w = torch.randn(27, 16, 16).half().to(device).requires_grad_()
        out = spatially_sparse_conv(x, w, 3)
        out.feats.float().square().sum().backward()
        assert out.feats.device == torch.device(device) and torch.cuda.current_device() == 0
        results.append([t.cpu() for t in (out.feats.detach(), x.feats.grad, w.grad)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_fault_20_side_stream_under_cache_pressure(dtype: torch.dtype) -> None:
    """On a side stream, with freed memory handed to another stream meanwhile, results do not change."""
    coords = surface_coords(400).cuda()
    x = torch.randn(len(coords), 32, device="cuda").to(dtype)
    w = (torch.randn(27, 32, 32, device="cuda") / 30).to(dtype)

    def run() -> tuple[Tensor, ...]:
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        out = spatially_sparse_conv(voxmma.Voxels(coords.clone(), xs), ws, 3)
        return (out.feats.detach(), *torch.autograd.grad(out.feats, (xs, ws), out.feats.detach()))

    expected = run()
    torch.cuda.synchronize()
    side, noise = torch.cuda.Stream(), torch.cuda.Stream()
    for _ in range(5):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2_000_000)  # so that memory freed too early has time to be reused
            got = run()
        with torch.cuda.stream(noise):
            for size in (1 << 18, 1 << 22, 1 << 24, 1 << 26):
                torch.full((size // 4,), float("nan"), device="cuda")
        side.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        torch.cuda.empty_cache()


def test_fault_23_import_without_a_gpu(clean: Clean) -> None:
    table, record, refused = clean(
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''\n"
        "import voxmma\n"
        "assert not torch.cuda.is_available()\n"
        "x = voxmma.Voxels(torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0]], dtype=torch.int32), torch.ones(2, 4))\n"
        "found = [str(voxmma.tiles()), str(voxmma.explain(voxmma.nn.SparseConv3d(4, 4, 3)(x))), '']\n"
        "from voxmma.dispatch.selection import select_tile\n"
        "try:\n"
        "    select_tile('fwd', torch.float16, 'fp32', 64, 64, 1, (7, 0))\n"
        "except RuntimeError as error:\n"
        "    found[2] = str(error)\n"
    )
    assert table and "tile cpu" in record
    assert refused.startswith("no fprop kernel") and "sm_70" in refused and "built" in refused


@pytest.mark.parametrize("size", [2, 3, 4, (2, 1, 3)], ids=str)
def test_fault_25_no_bias_and_even_kernels(device: torch.device, size: int | tuple[int, int, int]) -> None:
    """bias=None has a backward, and no offset of an even kernel is taken for the identity."""
    coords = random_coords(70, 5)
    offsets = kernel_offsets(size)
    x = torch.randn(70, 3, dtype=torch.float64, device=device, requires_grad=True)
    conv = SparseConv3d(3, 2, size, bias=False, device=device, dtype=torch.float64)
    out = conv(voxmma.Voxels(coords.to(device), x)).feats
    torch.testing.assert_close(out.cpu(), brute_force(coords, x, conv.weight, offsets))
    dy = torch.randn_like(out)
    out.backward(dy)
    mirrored = [tuple(-d for d in offset) for offset in offsets]
    assert x.grad is not None and conv.weight.grad is not None
    torch.testing.assert_close(x.grad.cpu(), brute_force(coords, dy, conv.weight.transpose(1, 2), mirrored))
    for k, offset in enumerate(offsets):
        shifted = brute_force(coords, x, torch.eye(3, dtype=torch.float64)[None], [offset])
        torch.testing.assert_close(conv.weight.grad[k].cpu(), shifted.T @ dy.cpu())


def test_fault_26_no_shared_configuration(device: torch.device) -> None:
    """Two layers of different settings, in any order, leave each other and the process alone."""
    before = (
        voxmma.settings.snapshot(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )
    x = voxmma.Voxels(random_coords(80, 5).to(device), torch.rand(80, 32, device=device).half())
    w = torch.rand(27, 32, 8, device=device).half()
    fast = SparseConv3d(32, 8, 3, use_fp16_accum=True, dilation=2, device=device, dtype=torch.float16)
    exact = SparseConv3d(32, 8, 3, use_fp16_accum=False, device=device, dtype=torch.float16)
    default = SparseConv3d(32, 8, 3, device=device, dtype=torch.float16)
    with torch.no_grad():
        for layer in (fast, exact, default):
            layer.weight.copy_(w)
    alone = [layer(x).feats for layer in (fast, exact, default)]
    for order in itertools.permutations(range(3)):
        for index in order:
            layer = (fast, exact, default)[index]
            out = layer(x)
            assert torch.equal(out.feats, alone[index])
            assert voxmma.explain(out).accumulator == ("fp16" if index == 0 else "fp32")
    assert before == (
        voxmma.settings.snapshot(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.allow_tf32,
    )


@pytest.mark.parametrize("size", [3, 2], ids=["odd", "even"])
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_fault_27_map_made_without_gradients_serves_training(
    device: torch.device, context: type[torch.no_grad], size: int
) -> None:
    conv = SparseConv3d(4, 4, size, device=device, dtype=torch.float64)
    coords = random_coords(60, 5).to(device)
    feats = torch.randn(60, 4, dtype=torch.float64, device=device, requires_grad=True)

    def gradients(x: voxmma.Voxels) -> tuple[Tensor, ...]:
        return torch.autograd.grad(conv(x).feats.square().sum(), (feats, conv.weight))

    fresh = gradients(voxmma.Voxels(coords, feats))
    reused = voxmma.Voxels(coords, feats)
    with context():
        conv(reused)
    assert all(torch.equal(a, b) for a, b in zip(fresh, gradients(reused), strict=True))


def test_fault_28_equal_counts_are_not_equal_coordinates(device: torch.device) -> None:
    """Many coordinate sets of one size, each freed before the next is made: none meets another's map."""
    w = torch.randn(27, 2, 2, dtype=torch.float64, device=device)
    feats = torch.randn(40, 2, dtype=torch.float64, device=device)
    for seed in range(12):
        coords = random_coords(40, 5, seed=seed)
        x = voxmma.Voxels(coords.to(device), feats)
        torch.testing.assert_close(
            spatially_sparse_conv(x, w, 3).feats.cpu(), brute_force(coords, feats, w, kernel_offsets(3))
        )
        del x
    a, b = (voxmma.Voxels(random_coords(40, 5, seed=seed).to(device), feats) for seed in (1, 2))
    assert voxmma.kernel_map(a.coord_set, 3) == voxmma.kernel_map(a.coord_set, 3)
    assert voxmma.kernel_map(a.coord_set, 3) != voxmma.kernel_map(b.coord_set, 3)
    assert voxmma.kernel_map(a.coord_set, 3) != voxmma.kernel_map(a.coord_set, 3, dilation=2)


@pytest.mark.parametrize("size", [5, 7, (1, 9, 9), (4, 3, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_fault_29_more_than_32_offsets(
    device: torch.device, dtype: torch.dtype, size: int | tuple[int, int, int]
) -> None:
    coords = random_coords(60, 6)
    offsets = kernel_offsets(size)
    assert len(offsets) > 32
    x = torch.randn(60, 4, device=device).to(dtype).requires_grad_()
    w = (torch.randn(len(offsets), 4, 3, device=device) / 10).to(dtype).requires_grad_()
    y = spatially_sparse_conv(voxmma.Voxels(coords.to(device), x), w, size).feats
    expected = brute_force(coords, x, w, offsets)
    tolerance = {"rtol": 1e-11, "atol": 1e-11} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(y.double().cpu(), expected, **tolerance)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    mirrored = [tuple(-d for d in offset) for offset in offsets]
    torch.testing.assert_close(
        dx.double().cpu(), brute_force(coords, dy, w.transpose(1, 2), mirrored), **tolerance
    )
    last = brute_force(coords, x, torch.eye(4, dtype=torch.float64)[None], offsets[-1:])
    torch.testing.assert_close(dw[-1].double().cpu(), last.T @ dy.double().cpu(), **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [5, 7], ids=str)
def test_fault_29_large_kernels_are_not_slow(size: int) -> None:
    """Work grows with the number of offsets, not faster: as many launches, passes within 3x per offset."""
    coords = surface_coords(200).cuda()
    x = voxmma.Voxels(coords, torch.randn(len(coords), 64, device="cuda").half())

    def work(k: int) -> tuple[int, int]:
        """Kernels that a call launches, passes of its map."""
        w = torch.randn(k**3, 64, 64, device="cuda").half()
        spatially_sparse_conv(x, w, k)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            spatially_sparse_conv(x, w, k)
            torch.cuda.synchronize()
        schedule = voxmma.kernel_map(x.coord_set, k).tensors[
            1
        ]  # (2, tiles, 4): tile, first pass, passes, cost
        return len(trace.events()), int(schedule[0, :, 2].sum())

    (launches, passes), (plain_launches, plain_passes) = work(size), work(3)
    assert 0 < launches <= plain_launches
    assert passes / size**3 < 3 * plain_passes / 27


def test_fault_30_asking_for_fp32_gives_fp32(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """use_fp16_accum=False holds against every other level and in every pool; the numbers prove it."""
    settings = voxmma.settings
    n = 20_000 if device.type == "cuda" else 400
    coords = random_coords(n, 28 if device.type == "cuda" else 8).to(device)
    x = torch.rand(n, 64, device=device).half().requires_grad_()
    w = (torch.rand(27, 64, 64, device=device) / 40).half()
    voxels = voxmma.Voxels(coords, x)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    y64, abs64 = accuracy.reference_conv(x.detach(), w, pairs, n)
    dy = torch.rand(n, 64, device=device).half()
    dx64, dx_abs64 = accuracy.reference_dgrad(dy, w, pairs, n)
    narrow = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=True)
    assert accuracy.errors(narrow.feats.detach(), y64, abs64).rel_l2 > 4e-4, (
        "the comparison must be able to fail"
    )

    monkeypatch.setattr(settings, "_environment", settings.read_environment({"VOXMMA_USE_FP16_ACCUM": "1"}))
    modes: list[str] = ["auto", "trimmed", "all"]
    modes += [row["name"] for row in voxmma._C.kernel_configs() if row["accum"] == "fp16"][:2]
    for mode in modes:
        with settings.override(
            fp16_accum=True, fwd_algo_mode=mode, dgrad_algo_mode=mode, pcoff_f16acc_small_ch_ceil=512
        ):
            out = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=False)
            with torch.inference_mode():
                inference = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=False)
        assert voxmma.explain(out).accumulator == voxmma.explain(inference).accumulator == "fp32"
        (dx,) = torch.autograd.grad(out.feats, x, dy)
        assert torch.equal(out.feats, inference.feats)
        assert accuracy.errors(out.feats.detach(), y64, abs64).rel_l2 < 2.5e-4
        assert accuracy.errors(dx, dx64, dx_abs64).rel_l2 < 2.5e-4
