"""Overflow: bf16 on fp16 accumulators, gradients of any size, the guard. Finite and right, or infinite."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

import voxmma
from voxmma.nn import BatchNorm, ReLU, Sequential, SparseConv3d
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.ops.kernels import parse_accumulator
from voxmma.verify import accuracy
from voxmma.verify.overflow import rescaled_floor

from conftest import random_coords

KINDS = ("fp16", "fp16_promoted:32", "fp16_promoted:offset")


def case(device: torch.device, n: int = 200, c: int = 32) -> tuple[voxmma.Voxels, list]:
    coords = random_coords(n, 7).to(device)
    voxels = voxmma.Voxels(coords, torch.zeros(n, c, device=device))
    return voxels, voxmma.kernel_map(voxels.coord_set, 3).pairs()


def normal(*shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


# ---- bf16 with an fp16 accumulator -------------------------------------------------------------------------


@pytest.mark.parametrize("accumulator", KINDS)
@pytest.mark.parametrize("scale", [2.0**-70, 1.0, 2.0**60], ids=["tiny", "one", "huge"])
def test_bf16_reaches_fp16_accumulators(device: torch.device, scale: float, accumulator: str) -> None:
    voxels, pairs = case(device)
    x = (normal(200, 32, device=device) * scale).bfloat16().requires_grad_()
    w = (normal(27, 32, 16, device=device) / 30).requires_grad_()
    bias = normal(16, device=device) * scale
    out = spatially_sparse_conv(voxels.with_feats(x), w, 3, bias, accumulator=accumulator)
    record = voxmma.explain(out)
    assert (record.accumulator, record.chunk) == parse_accumulator(accumulator) and record.rescaled
    assert record.compute_dtype == record.out_dtype == torch.bfloat16 and "powers of two" in record.reason
    assert "(rescaled)" in str(record) and "loses bits" in record.reason  # nobody needs a guard to read that
    dy = normal(200, 16, device=device).bfloat16()
    dx, dw = torch.autograd.grad(out.feats, (x, w), dy)
    assert dw.dtype == torch.float32 and dx.dtype == torch.bfloat16
    wq = w.detach().bfloat16()
    x64 = accuracy.reference_conv(x.detach(), wq, pairs, 200, bias)
    dx64 = accuracy.reference_dgrad(dy, wq, pairs, 200)
    for got, (y64, abs64), a, n in ((out.feats, x64, x, 27 * 32 + 1), (dx, dx64, dy, 27 * 16)):
        limit = accuracy.bound(record.accumulator, n, "fp16", "bf16", accuracy.arch_of(device), offsets=27,
                               chunk=record.chunk)  # fmt: skip
        floor = rescaled_floor(limit.floor, n, a.detach(), wq, transpose=got is dx, chunk=record.chunk)
        errors = accuracy.errors(got.detach(), y64, abs64, floor)
        assert errors.within(limit), (errors, limit)
    exact = spatially_sparse_conv(voxels.with_feats(x.detach()), w, 3, use_fp16_accum=False)
    (reference,) = torch.autograd.grad(
        spatially_sparse_conv(voxels.with_feats(x.detach()), w, 3).feats, w, dy
    )
    assert torch.equal(dw, reference), "the weight gradient is that of the fp32 accumulator, bit by bit"
    assert not voxmma.explain(exact).rescaled


def test_bf16_results_show_the_fp16_accumulator() -> None:
    """A lower bound on a case where it is certain: one-signed sums in fp16, seen through an fp32 output."""
    device = torch.device("cpu")
    voxels, pairs = case(device)
    x, w = normal(200, 32, device=device).abs().bfloat16(), normal(27, 32, 16, device=device).abs().bfloat16()
    y64, abs64 = accuracy.reference_conv(x, w, pairs, 200)
    found = [
        accuracy.errors(
            spatially_sparse_conv(
                voxels.with_feats(x), w, 3, use_fp16_accum=flag, out_dtype=torch.float32
            ).feats,
            y64,
            abs64,
        ).rel_l2
        for flag in (True, False)
    ]
    assert found[0] > 100 * found[1] and found[0] < 2e-3


def test_autocast_and_compile(device: torch.device) -> None:
    conv = SparseConv3d(16, 8, 3, use_fp16_accum=True).to(device)
    x = voxmma.Voxels(random_coords(80, 6).to(device), normal(80, 16, device=device))

    def step(v: voxmma.Voxels) -> voxmma.Voxels:
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return conv(v)

    eager = step(x)
    assert voxmma.explain(eager).rescaled and eager.feats.dtype == torch.bfloat16
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    traced = compiled(x)
    assert torch.equal(traced.feats, eager.feats) and voxmma.explain(traced) == voxmma.explain(eager)
    for y in (eager, traced):
        y.feats.float().square().sum().backward()
    gradient = conv.weight.grad
    assert gradient is not None and gradient.dtype == torch.float32
    conv.weight.grad = None
    eager = step(x)
    eager.feats.float().square().sum().backward()
    torch.testing.assert_close(gradient, 2 * conv.weight.grad)


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("accumulator", "tile"), [("fp16", "cpu"), ("fp16_promoted", "cpu_p32")])
def test_op_is_complete(dtype: torch.dtype, transpose: bool, accumulator: str, tile: str) -> None:
    """opcheck, an asymmetric map, groups, and gradients of gradients against those of an fp32 call."""
    device = torch.device("cpu")
    coords = random_coords(40, 5)
    kmap = voxmma.kernel_map(voxmma.Voxels(coords, torch.zeros(40, 1)).coord_set, (2, 1, 3))
    maps = (kmap.tensors, kmap.transposed().tensors)
    maps = maps[::-1] if transpose else maps
    c_in, c_out = (8, 4) if transpose else (4, 8)
    x = normal(40, c_in, device=device, dtype=dtype).requires_grad_()
    w = (normal(6, 2, 2, 4, device=device) / 4).requires_grad_()
    bias = normal(c_out, device=device).requires_grad_()
    rest = (*maps, 40, False, transpose)
    op = torch.ops.voxmma.conv_rescaled
    kernels = (accumulator, tile, tile, "cpu")
    arguments = (x, w, bias, *rest, *kernels, dtype)
    opcheck(op, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))

    def second(call: object) -> list[Tensor]:
        y = call()  # type: ignore[operator]
        first = torch.autograd.grad(y.float().square().sum(), (x, w, bias), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.float().square().sum() for g in first), (x, w))]

    wide = second(
        lambda: torch.ops.voxmma.conv(x, w, bias, *rest, "fp32", "cpu", "cpu", "cpu", torch.float32)
    )
    narrow = second(lambda: op(x, w, bias, *rest, *kernels, torch.float32))
    for a, b in zip(narrow, wide, strict=True):
        assert a.dtype == b.dtype
        assert float((a - b).detach().float().norm()) <= 2e-2 * float(b.detach().float().norm())


def test_missing_opposite_map_is_named() -> None:
    coords = random_coords(20, 5)
    kmap = voxmma.kernel_map(voxmma.Voxels(coords, torch.zeros(20, 1)).coord_set, 2).tensors
    x, w = torch.randn(20, 4).half().requires_grad_(), torch.randn(8, 4, 4).half()
    y = torch.ops.voxmma.conv_rescaled(
        x, w, None, kmap, [], 20, False, False, "fp16", "cpu", "cpu", "cpu", torch.float16
    )
    with pytest.raises(RuntimeError, match="map_t is empty"):
        y.float().sum().backward()


# ---- gradients and activations beyond fp16 -----------------------------------------------------------------


@pytest.mark.parametrize("accumulator", ["fp32", *KINDS])
def test_gradscaler_sized_gradients(device: torch.device, accumulator: str) -> None:
    """3e5 at an fp16 layer: infinite or NaN without the rescale, right with it; never a wrong number."""
    voxels, pairs = case(device)
    x = normal(200, 32, device=device).half()
    w = (normal(27, 32, 16, device=device) / 30).half()
    dy = torch.where(normal(200, 16, device=device) > 0, 3e5, -3e5)
    dx64, abs64 = accuracy.reference_dgrad(dy, w, pairs, 200)
    dw64, wabs64 = accuracy.reference_wgrad(x, dy, pairs)
    for rescale in (False, True):
        voxmma.settings.set_fp16_rescale(rescale)
        xs, ws = x.clone().requires_grad_(), w.float().requires_grad_()
        out = spatially_sparse_conv(
            voxels.with_feats(xs), ws, 3, accumulator=accumulator, out_dtype=torch.float32
        )
        assert voxmma.explain(out).rescaled is rescale
        dx, dw = torch.autograd.grad(out.feats, (xs, ws), dy)
        if not rescale:  # fp16 cannot hold 3e5: documented as infinite, so a GradScaler skips the step
            assert not bool(dx.isfinite().any()) and not bool(dw.isfinite().all())
            continue
        beyond = dx64.abs() > 65504
        assert bool((dx[beyond] == torch.sign(dx64[beyond]) * math.inf).float().mean() > 0.99)
        inside = dx64.abs() < 65000
        eta = ((dx.double() - dx64).abs() / abs64)[inside]
        limit = accuracy.bound("fp16", 27 * 16, "fp16", "fp16", accuracy.arch_of(device), offsets=27)
        assert bool(inside.any()) and float(eta.max()) <= limit.eta
        errors = accuracy.errors(dw, dw64, wabs64)
        assert errors.nonfinite == 0 and errors.max_eta < 2.0**-11


@pytest.mark.parametrize("accumulator", KINDS)
def test_large_activations(device: torch.device, accumulator: str) -> None:
    """Partial sums of 1e6 that cancel: infinite or NaN without the rescale, the small result with it."""
    voxels, pairs = case(device)
    half = torch.full((200, 16), 30000.0, device=device)
    x = torch.cat([half, -half + 16 * normal(200, 16, device=device).round()], dim=1).half()
    w = torch.full((27, 32, 16), 0.25, device=device).half()
    y64, abs64 = accuracy.reference_conv(x, w, pairs, 200)
    plain = spatially_sparse_conv(voxels.with_feats(x), w, 3, accumulator=accumulator).feats
    wrong = plain.isfinite() & ((plain.double() - y64).abs() > 2**-6 * abs64)
    assert not bool(wrong.any()), "a finite wrong number"
    with voxmma.settings.override(fp16_rescale=True):
        out = spatially_sparse_conv(voxels.with_feats(x), w, 3, accumulator=accumulator)
    record = voxmma.explain(out)
    limit = accuracy.bound(record.accumulator, 27 * 32, "fp16", "fp16", accuracy.arch_of(device), offsets=27,
                           chunk=record.chunk)  # fmt: skip
    floor = rescaled_floor(limit.floor, 27 * 32, x, w, chunk=record.chunk)
    assert accuracy.errors(out.feats, y64, abs64, floor).within(limit)


def test_non_finite_operands_stay_non_finite(device: torch.device) -> None:
    voxels, pairs = case(device)
    touched = torch.zeros(200, dtype=torch.bool)
    for rows, outs in pairs:
        touched[outs[rows == 5].cpu()] = True
    for bad in (math.inf, math.nan):
        x = normal(200, 32, device=device).bfloat16()
        x[5, 0] = bad
        w = normal(27, 32, 16, device=device).bfloat16()
        y = spatially_sparse_conv(voxels.with_feats(x), w, 3, accumulator="fp16").feats.cpu()
        assert not bool(y[touched].isfinite().any()) and bool(y[~touched].isfinite().all())


def test_empty_and_zero(device: torch.device) -> None:
    conv = SparseConv3d(8, 4, 3, accumulator="fp16", bias=False).to(device).bfloat16()
    empty = voxmma.Voxels(torch.zeros(0, 4, dtype=torch.int32, device=device),
                          torch.zeros(0, 8, device=device).bfloat16().requires_grad_())  # fmt: skip
    y = conv(empty).feats
    y.float().sum().backward()
    assert y.shape == (0, 4) and conv.weight.grad is not None and not bool(conv.weight.grad.any())
    coords = random_coords(30, 5).to(device)
    assert not bool(conv(voxmma.Voxels(coords, torch.zeros(30, 8, device=device).bfloat16())).feats.any())


# ---- the setting, the guard --------------------------------------------------------------------------------


def test_rescale_setting() -> None:
    assert voxmma.get_fp16_rescale() is False
    voxmma.set_fp16_rescale(True)
    assert voxmma.get_fp16_rescale() is True
    with pytest.raises(TypeError, match="must be True, False or None"):
        voxmma.set_fp16_rescale(1)  # type: ignore[arg-type]
    read = voxmma.settings.read_environment({"VOXMMA_FP16_RESCALE": "true"})
    assert read.fp16_rescale is True
    conv = SparseConv3d(8, 4, 3)
    x = voxmma.Voxels(random_coords(30, 5), torch.randn(30, 8))
    assert not voxmma.explain(conv(x)).rescaled  # fp32 is not touched
    assert voxmma.explain(conv(x.half())).rescaled
    assert not voxmma.explain(conv(x.bfloat16())).rescaled


def test_guard_counts_without_waiting(device: torch.device) -> None:
    conv = SparseConv3d(8, 4, 3, accumulator="fp16").to(device)
    x = voxmma.Voxels(random_coords(60, 5).to(device), normal(60, 8, device=device).bfloat16())
    guard = voxmma.OverflowGuard(device)
    if device.type == "cuda":
        conv(x)  # the map and the kernels are ready
        torch.cuda.set_sync_debug_mode("error")
    try:
        with guard:
            y = conv(x)
            y.feats.float().sum().backward()
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    read = guard.read()
    assert [read[op]["launches"] for op in ("fprop", "dgrad", "wgrad")] == [1, 0, 1]
    assert all(row["nonfinite"] == row["inexact"] == 0 for row in read.values())
    assert read["fprop"]["largest"] == float(y.feats.detach().float().abs().max())
    guard.reset()
    wide = x.feats.clone()
    wide[0, :2] = torch.tensor([2.0**80, 2.0**-80 * 1.5])  # 160 binades do not fit
    wide[1, 0] = math.nan
    with guard:
        z = conv(x.with_feats(wide.requires_grad_()))
    conv(x)  # not watched
    read = guard.read()
    assert read["fprop"]["launches"] == 1 and read["fprop"]["inexact"] == 1
    assert read["fprop"]["nonfinite"] == int((~z.feats.isfinite()).sum()) > 0
    if device.type == "cuda":
        other = SparseConv3d(8, 4, 3)
        with guard, pytest.raises(RuntimeError, match="this guard is on cuda"):
            other(voxmma.Voxels(random_coords(60, 5), torch.randn(60, 8)))


def test_guard_sees_fp16_overflow(device: torch.device) -> None:
    """The mutation: an accumulator that overflows is counted, in the forward and in the gradient."""
    voxels, _ = case(device)
    x = torch.full((200, 32), 6e4, device=device).half().requires_grad_()
    w = torch.ones(27, 32, 16, device=device).half()
    guard = voxmma.OverflowGuard(device)
    with guard:
        y = spatially_sparse_conv(voxels.with_feats(x), w, 3, accumulator="fp16").feats
        y.backward(torch.full_like(y, 6e4))
    read = guard.read()
    assert read["fprop"]["nonfinite"] == y.numel() and read["dgrad"]["nonfinite"] == x.numel()


@pytest.mark.gpu
def test_rescale_and_guard_in_a_cuda_graph() -> None:
    device = torch.device("cuda", 0)
    conv = SparseConv3d(32, 32, 3, accumulator="fp16", bias=False).to(device)
    x = voxmma.Voxels(random_coords(500, 10).to(device), normal(500, 32, device=device).bfloat16())
    guard = voxmma.OverflowGuard(device)
    with torch.no_grad():
        conv(x)
        static = torch.zeros_like(x.feats)
        graph = torch.cuda.CUDAGraph()
        with guard, torch.cuda.graph(graph):
            y = conv(x.with_feats(static)).feats
        for scale in (1.0, 2.0**40, math.inf):
            guard.reset()
            static.copy_(x.feats * scale)
            graph.replay()
            torch.cuda.synchronize()
            torch.testing.assert_close(y, conv(x.with_feats(static)).feats, rtol=0, atol=0, equal_nan=True)
            read = guard.read()["fprop"]
            assert read["launches"] == 1 and (read["nonfinite"] > 0) == (scale == math.inf)


@pytest.mark.gpu
@pytest.mark.parametrize("accumulator", ["fp32", *KINDS])
def test_a_captured_training_step_is_rescaled_and_guarded(accumulator: str) -> None:
    """Replays with gradients of 1, of a GradScaler (3e5) and infinite ones: as an eager step, bit by bit."""
    device = torch.device("cuda", 0)
    conv = SparseConv3d(32, 16, 3, accumulator=accumulator, bias=False).to(device)
    x = voxmma.Voxels(random_coords(500, 10).to(device), normal(500, 32, device=device).half())
    feats, dy = x.feats.clone().requires_grad_(), torch.zeros(500, 16, device=device)
    guard = voxmma.OverflowGuard(device)

    def step() -> tuple[Tensor, ...]:
        y = spatially_sparse_conv(
            x.with_feats(feats), conv.weight, 3, accumulator=accumulator, out_dtype=torch.float32
        ).feats
        return torch.autograd.grad(y, (feats, conv.weight), dy)

    with voxmma.settings.override(fp16_rescale=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), guard:
            captured = step()
        sign = normal(500, 16, device=device).sign()
        for scale in (1.0, 3e5, math.inf):
            guard.reset()
            dy.copy_(sign * scale)
            graph.replay()
            torch.cuda.synchronize()
            read = guard.read()
            for got, wanted in zip(captured, step(), strict=True):
                torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
            assert [read[op]["launches"] for op in ("fprop", "dgrad", "wgrad")] == [1, 1, 1]
            assert (read["wgrad"]["nonfinite"] > 0) == (scale == math.inf)
            assert bool(captured[1].isfinite().all()) == (scale != math.inf)


def test_fault_68_fused_convolutions_are_watched(device: torch.device) -> None:
    """As many launches as the audit lists, and cells beyond fp16's range."""
    layers = (SparseConv3d(8, 16, 3, bias=False), BatchNorm(16), ReLU(), SparseConv3d(16, 8, 3))
    model = Sequential(*layers).to(device).half().eval()
    coords = random_coords(200, 8).to(device)
    x = voxmma.Voxels(coords, torch.ones((200, 8), device=device, dtype=torch.float16))
    with torch.no_grad():
        model[0].weight.fill_(60000.0)
        with voxmma.OverflowGuard(device) as guard, voxmma.audit() as log:
            model(x)
        assert guard.read()["fprop"]["launches"] == len(log) == 2
        assert guard.read()["fprop"]["nonfinite"] >= 200 * 16
