"""The convolution against dense torch, against fp64 with error bounds, and the contracts of its arguments."""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import voxmma
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv
from voxmma.nn.modules.sparse_conv import SparseConv3d
from voxmma.verify import accuracy
from voxmma.verify.families import FAMILIES, INTEGERS, Family

from conftest import grid_coords, kernel_offsets, random_coords

HALF = (torch.float16, torch.bfloat16)
CHANNELS = (1, 3, 5, 8, 16, 18, 32, 64, 96, 128)


Triple = tuple[int, int, int]


def dense_conv(
    x: Tensor, coords: Tensor, shape: Triple, batch: int, weight: Tensor, bias: Tensor | None,
    size: Triple, dilation: Triple,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.conv3d on the occupied grid, read back at the voxels; differentiable."""
    grouped = weight if weight.dim() == 4 else weight.unsqueeze(1)
    _, groups, c_in, c_out = grouped.shape
    kernel = grouped.reshape(*size, groups, c_in, c_out).permute(3, 5, 4, 0, 1, 2)
    kernel = kernel.reshape(groups * c_out, c_in, *size)
    b, i, j, k = coords.long().T
    dense = x.new_zeros(batch, *shape, x.shape[1]).index_put((b, i, j, k), x).permute(0, 4, 1, 2, 3)
    padding: list[int] = []
    for s, d in zip(reversed(size), reversed(dilation), strict=True):  # F.pad starts with the last axis
        before = s // 2 * d if s % 2 else 0
        padding += [before, (s - 1) * d - before]
    out = F.conv3d(F.pad(dense, padding), kernel, bias, dilation=dilation, groups=groups)
    return out[b, :, i, j, k]


def weight_shape(volume: int, c_in: int, c_out: int, groups: int) -> tuple[int, ...]:
    return (volume, c_in, c_out) if groups == 1 else (volume, groups, c_in // groups, c_out // groups)


def three(value: int | tuple[int, int, int]) -> tuple[int, int, int]:
    return (value,) * 3 if isinstance(value, int) else value


# ---- against dense torch -----------------------------------------------------------------------------------

DENSE_CASES = [
    # kernel_size, dilation, C_in, C_out, groups, bias
    (3, 1, 4, 6, 1, True),
    (3, 1, 5, 3, 1, False),
    (1, 1, 4, 5, 1, True),
    (2, 1, 3, 4, 1, True),
    (4, 1, 2, 3, 1, False),
    (5, 1, 2, 2, 1, True),
    (7, 1, 1, 2, 1, False),
    ((1, 2, 3), 1, 3, 2, 1, True),
    ((3, 1, 5), 1, 2, 3, 1, True),
    ((1, 9, 9), 1, 2, 2, 1, False),
    (3, 2, 3, 4, 1, True),
    (3, (1, 2, 3), 3, 2, 1, False),
    (2, (3, 1, 2), 2, 3, 1, True),
    (3, 1, 6, 4, 2, True),
    (3, 2, 8, 8, 8, True),
    (2, 1, 4, 12, 4, False),
]


@pytest.mark.parametrize(("kernel_size", "dilation", "c_in", "c_out", "groups", "with_bias"), DENSE_CASES)
@pytest.mark.parametrize("full", [True, False], ids=["full_grid", "random_voxels"])
def test_equals_dense_conv3d(
    device: torch.device, full: bool, kernel_size: int, dilation: int, c_in: int, c_out: int, groups: int,
    with_bias: bool,
) -> None:  # fmt: skip
    shape, batch = (6, 6, 6), 2
    coords = grid_coords(shape, batch) if full else random_coords(150, 6, batch)
    size, dil = three(kernel_size), three(dilation)
    x = torch.randn(len(coords), c_in, dtype=torch.float64, device=device, requires_grad=True)
    w = torch.randn(weight_shape(math.prod(size), c_in, c_out, groups), dtype=torch.float64, device=device)
    w.requires_grad_()
    b = torch.randn(c_out, dtype=torch.float64, device=device, requires_grad=True) if with_bias else None
    inputs = [t for t in (x, w, b) if t is not None]

    voxels = voxmma.Voxels(coords.to(device), x, batch_size=batch)
    y = spatially_sparse_conv(voxels, w, kernel_size, b, dilation=dilation, groups=groups).feats
    expected = dense_conv(x, coords.to(device), shape, batch, w, b, size, dil)
    upstream = torch.randn_like(expected)
    torch.testing.assert_close(y, expected, rtol=1e-11, atol=1e-11)
    for got, want in zip(
        torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("kernel_size", [3, 2, (1, 2, 3), (5, 1, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_hot_weights_read_the_documented_offset(
    device: torch.device, dtype: torch.dtype, kernel_size: int | tuple[int, int, int]
) -> None:
    """With one weight of 1 at offset k, the output is the input at that offset, and nothing else."""
    coords = random_coords(120, 7).to(device)
    x = torch.arange(1, 121, dtype=dtype, device=device).view(-1, 1)
    voxels = voxmma.Voxels(coords, x)
    table = {tuple(c): row for row, c in enumerate(coords[:, 1:].tolist())}
    offsets = kernel_offsets(kernel_size)
    for k, offset in enumerate(offsets):
        weight = torch.zeros(len(offsets), 1, 1, dtype=dtype, device=device)
        weight[k] = 1
        y = spatially_sparse_conv(voxels, weight, kernel_size).feats
        rows = [
            table.get(tuple(a + b for a, b in zip(c, offset, strict=True))) for c in coords[:, 1:].tolist()
        ]
        expected = [0.0 if row is None else float(row + 1) for row in rows]
        assert y.flatten().tolist() == expected, offset


# ---- against fp64, with bounds -----------------------------------------------------------------------------


@functools.cache
def scene(device: torch.device, size: str) -> tuple[Tensor, voxmma.KernelMap]:
    n, extent = {"small": (300, 8), "large": (20_000, 40)}[size]
    coords = random_coords(n, extent, batch=1, seed=3).to(device)
    return coords, voxmma.kernel_map(voxmma.Voxels(coords, torch.zeros(n, 1, device=device)).coord_set, 3)


def draw(family: Family | str, dtype: torch.dtype, device: torch.device, n: int, c: int, c_out: int) -> list:
    """x, w, dy of a family, drawn on the CPU so that every device sees the same numbers."""
    family = FAMILIES[family] if isinstance(family, str) else family
    generator = torch.Generator().manual_seed(7)
    x = family.activations((n, c), dtype, generator, device)
    w = family.weights((27, c, c_out), dtype, generator, device)
    return [x, w, family.gradients((n, c_out), dtype, generator, device)]


def measure(
    x: Tensor, w: Tensor, dy: Tensor, accumulator: str
) -> tuple[dict[str, accuracy.Errors], dict[str, accuracy.Bound]]:
    """Errors and bounds of forward, dgrad and wgrad of one layer on the shared scene."""
    device = x.device
    coords, kmap = scene(device, "large" if device.type == "cuda" else "small")
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    out = spatially_sparse_conv(
        voxmma.Voxels(coords, x), w, 3, kernel_map=None, use_fp16_accum=accumulator == "fp16"
    )
    record = voxmma.explain(out)
    assert record.accumulator == accumulator, record
    dx, dw = torch.autograd.grad(out.feats, (x, w), dy)
    pairs = kmap.pairs()
    n, k = len(x), len(pairs)
    c_in, c_out = w.shape[-2:]
    rows = max(len(a) for a, _ in pairs)
    arch = "simt" if record.tile.startswith("simt") else accuracy.arch_of(device)
    wgrad_arch = "simt" if record.wgrad_tile.startswith("simt") else accuracy.arch_of(device)
    references = {
        "forward": (out.feats.detach(), accuracy.reference_conv(x.detach(), w.detach(), pairs, n)),
        "dgrad": (dx, accuracy.reference_dgrad(dy, w.detach(), pairs, n)),
        "wgrad": (dw, accuracy.reference_wgrad(x.detach(), dy, pairs)),
    }
    exact = "fp64" if x.dtype == torch.float64 else "fp32"
    bounds = {
        "forward": accuracy.bound(accumulator, k * c_in, x.dtype, x.dtype, arch, offsets=k),
        "dgrad": accuracy.bound(accumulator, k * c_out, x.dtype, x.dtype, arch, offsets=k),
        "wgrad": accuracy.bound(exact, rows, x.dtype, x.dtype, wgrad_arch),
    }
    found = {
        what: accuracy.errors(got, y64, abs64, floor=bounds[what].floor)
        for what, (got, (y64, abs64)) in references.items()
    }
    return found, bounds


@pytest.mark.parametrize("c", CHANNELS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_error_is_within_the_bound(device: torch.device, dtype: torch.dtype, c: int) -> None:
    """Max eta over all cells, no non-finite cell, every channel count and accumulator; lower bounds too."""
    x, w, dy = draw("signed", dtype, device, 20_000 if device.type == "cuda" else 300, c, c)
    found: dict[str, dict[str, accuracy.Errors]] = {}
    for accumulator in ("fp32", "fp16") if dtype == torch.float16 else ("fp32",):
        found[accumulator], bounds = measure(x, w, dy, accumulator)
        for what, errors in found[accumulator].items():
            assert errors.within(bounds[what]), (accumulator, what, errors, bounds[what])
    if dtype == torch.float32:
        assert max(e.rel_l2 for e in found["fp32"].values()) < 2e-6  # fp16 or tf32 products would show 1e-4
    if dtype == torch.float16 and c >= 16:
        for what in ("forward", "dgrad"):
            assert found["fp16"][what].rel_l2 > 1.1 * found["fp32"][what].rel_l2, (
                "the fp16 accumulator never ran"
            )
        assert found["fp16"]["wgrad"].rel_l2 < 1.05 * found["fp32"]["wgrad"].rel_l2, "wgrad must stay fp32"


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_every_input_family_is_within_the_bound(
    device: torch.device, dtype: torch.dtype, family: str
) -> None:
    x, w, dy = draw(family, dtype, device, 20_000 if device.type == "cuda" else 300, 32, 32)
    for accumulator in ("fp32", "fp16") if dtype == torch.float16 else ("fp32",):
        if accumulator == "fp16" and family in ("near_max", "heavy_tailed"):
            dy = dy / 64  # the gradients' sums are not kept below 65504 by the family
        found, bounds = measure(x, w, dy, accumulator)
        for what, errors in found.items():
            if what == "forward" or family not in ("near_max", "heavy_tailed"):
                assert errors.within(bounds[what]), (accumulator, what, errors, bounds[what])


@pytest.mark.parametrize("c_in,c_out", [(3, 64), (64, 5), (18, 40), (128, 16)])
def test_unequal_channels_are_within_the_bound(device: torch.device, c_in: int, c_out: int) -> None:
    x, w, dy = draw("relu", torch.float16, device, 20_000 if device.type == "cuda" else 300, c_in, c_out)
    for accumulator in ("fp32", "fp16"):
        found, bounds = measure(x, w, dy, accumulator)
        for what, errors in found.items():
            assert errors.within(bounds[what]), (accumulator, what, errors, bounds[what])


@pytest.mark.parametrize("c", [8, 32, 64])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_integers_are_exact(device: torch.device, dtype: torch.dtype, c: int) -> None:
    """Sums that every format holds come out bit by bit, in every accumulator: races and lost rows show."""
    n = 20_000 if device.type == "cuda" else 300
    x, w, dy = draw(INTEGERS, dtype, device, n, c, c)
    coords, kmap = scene(device, "large" if device.type == "cuda" else "small")
    pairs = kmap.pairs()
    expected = [
        accuracy.reference_conv(x, w, pairs, n)[0],
        accuracy.reference_dgrad(dy, w, pairs, n)[0],
        accuracy.reference_wgrad(x, dy, pairs)[0],
    ]
    for flag in (False, True) if dtype == torch.float16 else (False,):
        xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = spatially_sparse_conv(voxmma.Voxels(coords, xs), ws, 3, use_fp16_accum=flag).feats
        for got, want in zip((y, *torch.autograd.grad(y, (xs, ws), dy)), expected, strict=True):
            assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("flag", [False, True], ids=["acc32", "acc16"])
def test_ten_runs_are_bitwise_equal(device: torch.device, dtype: torch.dtype, flag: bool) -> None:
    n = 20_000 if device.type == "cuda" else 2_000
    coords = random_coords(n, 30, seed=1).to(device)
    x = torch.randn(n, 24, device=device).to(dtype).requires_grad_()
    w = (torch.randn(27, 24, 40, device=device) / 25).to(dtype).requires_grad_()
    dy = torch.randn(n, 40, device=device).to(dtype)

    def run() -> tuple[Tensor, ...]:
        y = spatially_sparse_conv(voxmma.Voxels(coords, x), w, 3, use_fp16_accum=flag).feats
        return (y.detach(), *torch.autograd.grad(y, (x, w), dy))

    first = run()
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, run(), strict=True))


@pytest.mark.parametrize("groups", [1, 4, 32])
def test_half_groups_and_bias(device: torch.device, groups: int) -> None:
    coords = random_coords(200, 7).to(device)
    x = torch.randn(200, 32, device=device).half()
    w = (torch.randn(weight_shape(27, 32, 64, groups), device=device) / 8).half()
    bias = torch.randn(64, device=device)
    voxels = voxmma.Voxels(coords, x)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    y64, abs64 = accuracy.reference_conv(x, w, pairs, 200, bias)
    for flag in (False, True):
        out = spatially_sparse_conv(voxels, w, 3, bias, groups=groups, use_fp16_accum=flag)
        record = voxmma.explain(out)
        assert record.accumulator == ("fp16" if flag else "fp32")
        arch = "simt" if record.tile.startswith("simt") else accuracy.arch_of(device)
        n = 27 * 32 // groups + 1
        limit = accuracy.bound(record.accumulator, n, torch.float16, torch.float16, arch, offsets=27)
        found = accuracy.errors(out.feats, y64, abs64, floor=limit.floor)
        assert found.within(limit), (found, limit)


def test_out_dtype_fp32_keeps_what_fp16_output_rounds_away(device: torch.device) -> None:
    x, w, _ = draw("signed", torch.float16, device, 300, 32, 32)
    coords = random_coords(300, 8).to(device)
    voxels = voxmma.Voxels(coords, x)
    wide = spatially_sparse_conv(voxels, w, 3, out_dtype=torch.float32)
    y64, abs64 = accuracy.reference_conv(x, w, voxmma.kernel_map(voxels.coord_set, 3).pairs(), 300)
    assert wide.feats.dtype == torch.float32 == voxmma.explain(wide).out_dtype
    assert accuracy.errors(wide.feats, y64, abs64).rel_l2 < 1e-5
    with pytest.raises(ValueError, match="out_dtype"):
        spatially_sparse_conv(voxels, w, 3, out_dtype=torch.bfloat16)


# ---- shapes, dtypes, contexts ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("kernel_size", [3, 2], ids=["odd", "even"])
def test_no_voxels(device: torch.device, dtype: torch.dtype, kernel_size: int) -> None:
    conv = SparseConv3d(4, 6, kernel_size, device=device, dtype=dtype)
    x = torch.zeros(0, 4, device=device, dtype=dtype, requires_grad=True)
    out = conv(voxmma.Voxels(torch.zeros(0, 4, dtype=torch.int32, device=device), x, batch_size=2))
    assert out.feats.shape == (0, 6) and out.feats.dtype == dtype
    out.feats.sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 4)
    assert conv.weight.grad is not None and not conv.weight.grad.any()
    assert conv.bias is not None and conv.bias.grad is not None and not conv.bias.grad.any()


def test_rows_keep_their_order_and_non_contiguous_features_work(device: torch.device) -> None:
    coords = random_coords(100, 6).to(device)
    x = torch.randn(8, 100, device=device).T
    assert not x.is_contiguous()
    conv = SparseConv3d(8, 8, 3, device=device)
    out = conv(voxmma.Voxels(coords, x))
    assert torch.equal(out.coords, coords)
    shuffle = torch.randperm(100, device=device)
    shuffled = conv(voxmma.Voxels(coords[shuffle], x[shuffle]))
    torch.testing.assert_close(shuffled.feats, out.feats[shuffle], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_autocast_is_honoured(device: torch.device, dtype: torch.dtype, training: bool) -> None:
    conv = SparseConv3d(8, 16, 3, device=device).train(training)
    x = voxmma.Voxels(random_coords(80, 5).to(device), torch.randn(80, 8, device=device, requires_grad=True))
    with torch.autocast(device.type, dtype=dtype):
        out = conv(x)
    record = voxmma.explain(out)
    assert out.feats.dtype == dtype == record.compute_dtype
    out.feats.float().sum().backward()
    assert conv.weight.grad is not None and conv.weight.grad.dtype == torch.float32
    assert x.feats.grad is not None and x.feats.grad.dtype == torch.float32
    plain = spatially_sparse_conv(
        x.with_feats(x.feats.detach().to(dtype)), conv.weight.detach(), 3, conv.bias
    )
    assert torch.equal(plain.feats, out.feats)


def test_compute_dtype_is_stronger_than_autocast(device: torch.device) -> None:
    x = voxmma.Voxels(random_coords(80, 5).to(device), torch.randn(80, 8, device=device))
    conv = SparseConv3d(8, 8, 3, compute_dtype=torch.float32, device=device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = conv(x)
    assert out.feats.dtype == torch.float32
    assert torch.equal(out.feats, conv(x).feats)
    half = spatially_sparse_conv(x, conv.weight, 3, compute_dtype=torch.float16)
    assert half.feats.dtype == torch.float16 == voxmma.explain(half).compute_dtype
    with torch.autocast(device.type, dtype=torch.float16):
        double = SparseConv3d(8, 8, 3, device=device, dtype=torch.float64)(x.with_feats(x.feats.double()))
    assert double.feats.dtype == torch.float64


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_inference_mode_asks_and_the_record_says_what_ran(device: torch.device, dtype: torch.dtype) -> None:
    conv = SparseConv3d(8, 8, 3, device=device, dtype=dtype)
    coords, feats = random_coords(80, 5).to(device), torch.randn(80, 8, device=device).to(dtype)
    for context, expected in (
        (torch.no_grad, ("fp32", "default")),
        (torch.inference_mode, ("fp16", "inference_mode")),
    ):
        with context():
            record = voxmma.explain(conv.eval()(voxmma.Voxels(coords, feats)))
            forbidden = voxmma.explain(
                spatially_sparse_conv(voxmma.Voxels(coords, feats), conv.weight, 3, use_fp16_accum=False)
            )
        assert (record.requested, record.decided_by) == expected
        assert record.accumulator == "fp32"
        assert (forbidden.requested, forbidden.decided_by, forbidden.accumulator) == (
            "fp32",
            "module",
            "fp32",
        )
        if expected[0] == "fp16":
            wanted = "CPU" if device.type == "cpu" else "no measurement on record"
            assert wanted in record.reason


def test_compiled_code_does_not_see_inference_mode_but_every_order(device: torch.device) -> None:
    """torch leaves inference mode while it traces, so a permission turns into fp32, whoever compiled it."""
    conv = SparseConv3d(64, 8, 3, device=device, dtype=torch.float16).eval()
    x = voxmma.Voxels(random_coords(80, 5).to(device), torch.rand(80, 64, device=device).half())
    conv(x)  # makes the map
    with torch.inference_mode():
        assert voxmma.explain(conv(x)).decided_by == "inference_mode"
    for first, second in ((torch.no_grad, torch.inference_mode), (torch.inference_mode, torch.no_grad)):
        torch._dynamo.reset()
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        for context in (first, second, first):
            with context():
                record = voxmma.explain(compiled(x))
            assert (record.requested, record.accumulator, record.decided_by) == ("fp32", "fp32", "default")
        with torch.inference_mode(), voxmma.settings.override(fp16_accum=True):
            ordered = voxmma.explain(compiled(x))
        assert (ordered.accumulator, ordered.decided_by) == ("fp16", "runtime")


def test_flag_levels_reach_the_kernel(device: torch.device) -> None:
    """The record, and the numbers: True gives the fp16 accumulator's result, False the fp32 one's."""
    x, w, _ = draw("one_signed", torch.float16, device, 300, 64, 8)
    voxels = voxmma.Voxels(random_coords(300, 8).to(device), x)
    narrow = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=True).feats
    wide = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=False).feats
    assert not torch.equal(narrow, wide)
    assert torch.equal(spatially_sparse_conv(voxels, w, 3, accumulator="fp16").feats, narrow)
    assert torch.equal(spatially_sparse_conv(voxels, w, 3, accumulator="fp32").feats, wide)
    assert torch.equal(spatially_sparse_conv(voxels, w, 3).feats, wide)
    voxmma.set_fp16_accum(True)
    by_setting = spatially_sparse_conv(voxels, w, 3)
    assert torch.equal(by_setting.feats, narrow)
    assert voxmma.explain(by_setting).decided_by == "runtime"
    assert torch.equal(spatially_sparse_conv(voxels, w, 3, use_fp16_accum=False).feats, wide)
    line = str(voxmma.explain(by_setting))
    assert "\n" not in line and "fp16 accumulator" in line and "runtime" in line


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_compiles_to_one_graph(device: torch.device, dtype: torch.dtype) -> None:
    """fullgraph on a given map, forward and backward; a changed setting is seen by compiled code."""
    conv = SparseConv3d(16, 8, 3, device=device, dtype=dtype)
    coords = random_coords(120, 6).to(device)
    x = torch.randn(120, 16, device=device).to(dtype)
    voxels = voxmma.Voxels(coords, x)
    kmap = voxmma.kernel_map(voxels.coord_set, 3)

    def layer(v: voxmma.Voxels) -> voxmma.Voxels:
        return conv(v, kernel_map=kmap)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    eager, traced = layer(voxels), compiled(voxels)
    assert torch.equal(eager.feats, traced.feats)
    assert voxmma.explain(traced) == voxmma.explain(eager)
    (gradient,) = torch.autograd.grad(traced.feats.float().square().sum(), conv.weight)
    (expected,) = torch.autograd.grad(eager.feats.float().square().sum(), conv.weight)
    assert torch.equal(gradient, expected)
    voxmma.set_fp16_accum(True)
    flagged = compiled(voxels)
    assert voxmma.explain(flagged).decided_by == "runtime"
    assert torch.equal(flagged.feats, layer(voxels).feats)
    if dtype == torch.float16:
        assert voxmma.explain(flagged).accumulator == "fp16"
        assert not torch.equal(flagged.feats, traced.feats)
    voxmma.set_fp16_accum(None)
    assert torch.equal(compiled(voxels).feats, traced.feats)


def test_compiled_layer_takes_other_coordinates_and_cached_maps(device: torch.device) -> None:
    """One compiled layer serves inputs of any size whose maps exist, without a map among its arguments."""
    conv = SparseConv3d(4, 8, 3, device=device)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for n in (50, 60, 75, 90):
        x = voxmma.Voxels(random_coords(n, 6, seed=n).to(device), torch.randn(n, 4, device=device))
        expected = conv(x)  # builds the map
        assert torch.equal(compiled(x).feats, expected.feats)


def test_threads_with_different_flags(device: torch.device) -> None:
    """Concurrent calls on one coordinate set, map building included, each get their own accumulator."""
    x, w, _ = draw("one_signed", torch.float16, device, 300, 64, 8)
    coords = random_coords(300, 8).to(device)
    expected = {
        flag: spatially_sparse_conv(voxmma.Voxels(coords, x), w, 3, use_fp16_accum=flag).feats
        for flag in (True, False)
    }
    voxels = voxmma.Voxels(coords, x)

    def work(index: int) -> bool:
        flag = index % 2 == 0
        out = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=flag)
        return (
            torch.equal(out.feats, expected[flag])
            and voxmma.explain(out).accumulator == f"fp{16 if flag else 32}"
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(40)))


# ---- the layer ---------------------------------------------------------------------------------------------


def test_parameters_and_state_dict() -> None:
    conv = SparseConv3d(6, 4, (1, 2, 3), groups=2)
    assert conv.weight.shape == (6, 2, 3, 2) and conv.bias is not None and conv.bias.shape == (4,)
    assert SparseConv3d(6, 4, 3).weight.shape == (27, 6, 4)
    assert voxmma.nn.SparseConv3d is SparseConv3d
    bound = 1 / math.sqrt(6 * 3)
    assert conv.weight.abs().max() <= bound and conv.weight.std() > bound / 3
    before = conv.weight.detach().clone()
    conv.reset_parameters()
    assert not torch.equal(conv.weight, before)
    other = SparseConv3d(6, 4, (1, 2, 3), groups=2)
    other.load_state_dict(conv.state_dict())
    assert torch.equal(other.weight, conv.weight)
    with pytest.raises(RuntimeError, match="kernel"):
        other.load_state_dict({"kernel": conv.weight, "bias": conv.bias})
    assert set(SparseConv3d(2, 2, 1, bias=False).state_dict()) == {"weight"}
    text = repr(
        SparseConv3d(6, 4, 3, dilation=2, bias=False, use_fp16_accum=True, compute_dtype=torch.float16)
    )
    for part in (
        "6, 4",
        "kernel_size=(3, 3, 3)",
        "dilation=(2, 2, 2)",
        "bias=False",
        "use_fp16_accum=True",
        "float16",
    ):
        assert part in text


def test_given_map_is_used_and_checked(device: torch.device) -> None:
    coords = random_coords(100, 6).to(device)
    x = voxmma.Voxels(coords, torch.randn(100, 4, device=device))
    conv = SparseConv3d(4, 4, 3, device=device)
    kmap = voxmma.kernel_map(x.coord_set, 3)
    assert torch.equal(conv(x, kernel_map=kmap).feats, conv(x).feats)
    same = voxmma.Voxels(coords.clone(), x.feats)
    assert torch.equal(conv(same, kernel_map=kmap).feats, conv(x).feats)
    moved = voxmma.Voxels(coords + torch.tensor([0, 1, 0, 0], device=device, dtype=torch.int32), x.feats)
    with pytest.raises(ValueError, match="other coordinates"):
        conv(moved, kernel_map=kmap)
    with pytest.raises(ValueError, match="kernel_map was built for kernel_size"):
        SparseConv3d(4, 4, 5, device=device)(x, kernel_map=kmap)
    with pytest.raises(ValueError, match="kernel_map was built for dilation"):
        SparseConv3d(4, 4, 3, dilation=2, device=device)(x, kernel_map=kmap)
    with pytest.raises(TypeError, match="kernel_map"):
        conv(x, kernel_map=kmap.tensors)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"in_channels": 0}, "in_channels must be a positive int"),
        ({"out_channels": 2.5}, "out_channels must be a positive int"),
        ({"groups": 3}, "in_channels=4 is not divisible by groups=3"),
        ({"groups": 0}, "groups must be a positive int"),
        ({"kernel_size": 0}, r"kernel_size must be in 1\.\.9"),
        ({"kernel_size": (3, 3, 10)}, r"kernel_size must be in 1\.\.9"),
        ({"kernel_size": (3, 3)}, "kernel_size must be an int or three"),
        ({"kernel_size": 3.0}, "kernel_size must be an int or three"),
        ({"dilation": 0}, "dilation must be in 1"),
        ({"stride": 0}, r"stride must be in 1\.\.4096"),
        ({"accumulator": "fp8"}, "accumulator must be one of fp32, fp16"),
        ({"accumulator": "fp32", "use_fp16_accum": True}, "contradicts"),
        ({"compute_dtype": torch.int8}, "compute_dtype"),
    ],
)
def test_layer_refuses_bad_arguments(arguments: dict[str, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        SparseConv3d(**{"in_channels": 4, "out_channels": 4, "kernel_size": 3, **arguments})  # type: ignore[arg-type]


def test_call_refuses_bad_operands(device: torch.device) -> None:
    x = voxmma.Voxels(random_coords(50, 5).to(device), torch.randn(50, 4, device=device))
    w = torch.randn(27, 4, 6, device=device)
    bad = [
        ((x, w[:, :3], 3), {}, ValueError, "x has 4 channels, weight .* takes 3"),
        ((x, w[:8], 3), {}, ValueError, "weight has 8 offsets, kernel_size has 27"),
        ((x, w[0], 3), {}, ValueError, "weight must be"),
        ((x, w, 3), {"groups": 2}, ValueError, "weight must be"),
        ((x, w.long(), 3), {}, TypeError, "weight must be fp16, bf16, fp32 or fp64"),
        ((x, w.tolist(), 3), {}, TypeError, "weight must be a tensor"),
        ((x, w, 3, torch.zeros(5, device=device)), {}, ValueError, r"bias must be \(6,\)"),
        ((x, w.to("meta"), 3), {}, ValueError, f"weight is on meta, the features of x are on {device.type}"),
        ((x, w, 3, torch.zeros(6, device="meta")), {}, ValueError, "bias is on meta"),
        ((x.feats, w, 3), {}, TypeError, "x must be a voxmma.Voxels"),
        ((x, w, 3), {"use_fp16_accum": 1}, TypeError, "use_fp16_accum must be True, False or None"),
        ((x, w[:, :, :0], 3), {}, ValueError, "at least one channel"),
    ]
    for arguments, named, error, message in bad:
        with pytest.raises(error, match=message):
            spatially_sparse_conv(*arguments, **named)


def test_explain_refuses_what_no_convolution_made() -> None:
    x = voxmma.Voxels(random_coords(5, 5), torch.randn(5, 4))
    with pytest.raises(ValueError, match="no record"):
        voxmma.explain(x)
    with pytest.raises(TypeError, match=r"voxmma\.Voxels"):
        voxmma.explain(x.feats)  # type: ignore[arg-type]
    y = SparseConv3d(4, 4, 1)(x)
    assert set(voxmma.explain(y).as_dict()) >= {
        "layer",
        "requested",
        "decided_by",
        "accumulator",
        "tile",
        "reason",
    }
    with pytest.raises(ValueError, match="no record"):
        voxmma.explain(y.with_feats(y.feats))


def test_every_level_combination_keeps_wgrad_in_fp32(device: torch.device) -> None:
    """The weight gradient is bitwise the same whatever accumulates the forward."""
    x, w, dy = draw("signed", torch.float16, device, 300, 32, 16)
    voxels = voxmma.Voxels(random_coords(300, 8).to(device), x)
    gradients = []
    for module, runtime in itertools.product((None, True, False), repeat=2):
        voxmma.set_fp16_accum(runtime)
        weight = w.clone().requires_grad_()
        out = spatially_sparse_conv(voxels, weight, 3, use_fp16_accum=module)
        gradients.append(torch.autograd.grad(out.feats, weight, dy)[0])
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@pytest.mark.parametrize(("dtype", "most"), [(torch.float16, 20), (torch.float32, 25)], ids=str)
@pytest.mark.parametrize(("kind", "more"), [("same", 0), ("strided", 2), ("transposed", 5)])
def test_a_warm_layer_calls_little_besides_its_op(
    dtype: torch.dtype, most: int, kind: str, more: int
) -> None:
    """Functions that our Python calls in a warm layer call, beside those of the op.

    `voxmma bench` times them.
    """
    x = voxmma.Voxels(random_coords(50, 6), torch.randn(50, 16, dtype=dtype))
    if kind == "transposed":
        fine, x = x, SparseConv3d(16, 16, 2, 2).to(dtype)(x).detach()
    make = voxmma.nn.SparseConvTranspose3d if kind == "transposed" else SparseConv3d
    layer = make(16, 16, *((1,) if kind == "same" else (2, 2))).to(dtype)
    y = layer(x)
    assert kind != "transposed" or y.coord_set is fine.coord_set
    made, ran = layer.kernel_map(x), voxmma.explain(y)
    tiles = (ran.tile, ran.dgrad_tile, ran.wgrad_tile)
    shared = (made.tensors, [], made.out_coords.num, made.symmetric, False, ran.accumulator)
    package = str(Path(voxmma.__file__).parent)

    def calls(call: Callable[[], object]) -> list[str]:
        found: list[str] = []

        def note(frame: FrameType, event: str, function: object) -> None:
            if event in ("call", "c_call") and frame.f_code.co_filename.startswith(package):
                found.append(frame.f_code.co_name if event == "call" else str(function))

        call()
        sys.setprofile(note)
        try:
            call()
        finally:
            sys.setprofile(None)
        return found

    op = calls(lambda: torch.ops.voxmma.conv(x.feats, layer.weight, layer.bias, *shared, *tiles))
    whole = calls(lambda: layer(x))
    print(len(whole), len(op), whole)
    assert 0 < len(whole) - len(op) <= most + more, whole
