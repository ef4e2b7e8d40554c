"""A row depends on its own neighbours only: an infinite or NaN weight, input row or gradient row reaches the
cells that a sum over pairs gives it to, and no others, in every tile."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma._types import DTYPE_NAMES
from voxmma.dispatch.selection import card
from voxmma.nn import SparseConv3d
from voxmma.nn import functional as F
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.ops import formats
from voxmma.ops.kernels import compiled
from voxmma.sparse.sampling import devoxelise
from voxmma.sparse.tensor import Voxels
from voxmma.verify import accuracy, shadow

from conftest import random_coords

BAD = (math.inf, -math.inf, math.nan)
CPU_TILES = [
    *(("cpu", "fprop", kind, "fp64" if kind == "fp64" else "fp32") for kind in DTYPE_NAMES.values()),
    ("cpu_tf32", "fprop", "fp32", "fp32"),
    ("cpu", "fprop", "fp16", "fp16"),
    ("cpu_p32", "fprop", "fp16", "fp16_promoted"),
    *(("cpu", "wgrad", kind, "fp64" if kind == "fp64" else "fp32") for kind in DTYPE_NAMES.values()),
    ("cpu_tf32", "wgrad", "fp32", "fp32"),
]


def tiles(device: torch.device, op: str) -> Iterator[tuple[str, torch.dtype, str]]:
    """(name, dtype, accumulator) of every tile of an operation that the device can run."""
    rows = CPU_TILES
    if device.type == "cuda":
        here = card(device)
        rows = [(t.name, t.op, t.input, t.accum) for t in compiled() if t.runs_on(here)]
    found = [(name, formats.DTYPES[kind], accum) for name, of, kind, accum in rows if of == op]
    assert found
    yield from found


def some(choices: Iterable[Any], turn: int) -> list[Any]:
    """Every third of the choices. With turn = tile + shape each tile meets each shape, and both meet all
    choices."""
    return list(choices)[turn % 3 :: 3]


def grid_and_strays(device: torch.device) -> Tensor:
    """Rows with many neighbours and rows with none, more than two tiles of them, in random order."""
    coords = torch.cat(
        [random_coords(500, 9), 4 * random_coords(150, 9) + torch.tensor([0, 40, 40, 40]).int()]
    )
    order = torch.randperm(len(coords), generator=torch.Generator().manual_seed(1))
    return coords[order].to(device)


class Case:
    """A map and its operands: channels c_in -> c_out of each group, `size`^3 offsets."""

    def __init__(self, device: torch.device, size: int, groups: int, c_in: int, c_out: int) -> None:
        if device.type == "cpu":
            groups = min(groups, 16)  # more are a matter of CTAs
        self.coords = grid_and_strays(device)
        self.map = voxmma.kernel_map(voxmma.CoordSet(self.coords), size)
        self.pairs, self.symmetric = self.map.pairs(), self.map.symmetric
        self.n, self.volume, self.groups = len(self.coords), size**3, groups
        generator = torch.Generator().manual_seed(0)
        shape = (self.volume, groups, c_in, c_out) if groups > 1 else (self.volume, c_in, c_out)
        self.x, self.dy, self.w = (
            torch.randn(s, generator=generator).to(device) / 8
            for s in ((self.n, groups * c_in), (self.n, groups * c_out), shape)
        )
        self.x[::7, 1] = 0  # 0 * inf is NaN, too, where it is met
        self.far = (
            0 if size == 3 else self.volume - 1
        )  # an offset that a row without neighbours has none under
        met = torch.zeros(self.n, dtype=torch.int64)
        for _, outs in self.pairs:
            met[outs.cpu()] += 1
        self.lonely, self.busy = int(met.argmin()), int(met.argmax())
        assert met[self.lonely] <= 1 < met[self.busy]

    def maps(self, transpose: bool) -> tuple[list[Tensor], list[Tensor]]:
        own, other = self.map.tensors, [] if self.symmetric else self.map.transposed().tensors
        return (other, own) if transpose and not self.symmetric else (own, other)

    def conv(
        self, a: Tensor, w: Tensor, tile: str, accum: str, transpose: bool, bias: Tensor | None = None
    ) -> Tensor:
        return torch.ops.voxmma.conv(
            a, w, bias, *self.maps(transpose), self.n, self.symmetric, transpose, accum, tile, tile, "", None
        )  # fmt: skip

    def wgrad(self, x: Tensor, dy: Tensor, tile: str, accum: str) -> Tensor:
        wide = x.dtype if x.dtype == torch.float64 else torch.float32
        return torch.ops.voxmma.conv_wgrad(
            x, dy, *self.maps(False), self.volume, self.groups, self.symmetric, accum, tile, "", wide
        )


SHAPES = {
    "3x3x3": (3, 1, 40, 24),
    "2x2x2_two_blocks": (2, 1, 72, 136),
    "groups": (3, 2, 24, 40),
    "unaligned": (2, 1, 5, 3),
    "narrow_groups": (3, 4, 5, 3),
    "depthwise": (3, 16, 1, 1),
    "too_many_to_share": (3, 64, 8, 8),
}
CASES = pytest.mark.parametrize("shape", list(SHAPES))


def operands(tile: str, dtype: torch.dtype, *given: Tensor) -> list[Tensor]:
    """fp64 of what the tile reads."""
    read = [t.to(dtype) for t in given]
    return [(formats.round_tf32(t) if tile.endswith("_tf32") else t).double() for t in read]


def agree(got: Tensor, want: Tensor, what: object, classes: bool = True) -> None:
    """Non-finite in the same cells; `classes`: each infinite with the same sign, or NaN, there."""
    got, want = got.double(), want.to(got.device)
    assert torch.equal(got.isfinite(), want.isfinite()), what
    if classes:
        bad = ~want.isfinite()
        assert torch.equal(got[bad].nan_to_num(0, 1, -1), want[bad].nan_to_num(0, 1, -1)), what


@CASES
@pytest.mark.parametrize("transpose", [False, True], ids=["fprop", "dgrad"])
def test_fault_43_weights_reach_the_rows_that_meet_them(
    device: torch.device, shape: str, transpose: bool
) -> None:
    """A bad weight, a whole offset of them, fp32 weights that are infinite in fp16, bf16 or TF32 only."""
    case, first = Case(device, *SHAPES[shape]), list(SHAPES).index(shape)
    a, channels = (case.dy, case.x.shape[1]) if transpose else (case.x, case.dy.shape[1])
    reference = accuracy.reference_dgrad if transpose else accuracy.reference_conv
    bias = torch.linspace(-1, 1, channels, device=device)
    for turn, (name, dtype, accum) in enumerate(tiles(device, "fprop"), first):
        changes: list[Callable[[Tensor], Any]] = [
            lambda w: w[case.far].fill_(math.inf),
            lambda w: w[-1].fill_(1e6),
        ]
        for bad in (*BAD, 3.4028e38):
            changes.append(lambda w, bad=bad: w.view(case.volume, -1)[case.far, 2].fill_(bad))
        for i, change in some(enumerate(changes), turn):
            w = case.w.clone()
            change(w)
            a64, w64 = operands(name, dtype, a, w)
            clean = w.masked_fill(~w64.isfinite(), 0)
            y = case.conv(a.to(dtype), w, name, accum, transpose, bias)
            y64 = reference(a64, w64, case.pairs, case.n)[0] + bias.double()
            agree(y, y64, (name, i))
            assert bool(y[case.lonely].isfinite().all()), (name, i)
            same = case.conv(a.to(dtype), clean, name, accum, transpose, bias)
            finite = y64.isfinite()
            assert torch.equal(y[finite], same[finite]), (name, i)
            assert bool(finite.all()) == bool(w64.isfinite().all()), (name, i)


@CASES
@pytest.mark.parametrize("transpose", [False, True], ids=["fprop", "dgrad"])
def test_fault_43_input_rows_reach_the_rows_that_meet_them(
    device: torch.device, shape: str, transpose: bool
) -> None:
    """A bad input, alone and times a bad weight. 3xTF32 tiles may give NaN for infinite inputs: their pieces
    are inf - inf."""
    case, first = Case(device, *SHAPES[shape]), list(SHAPES).index(shape)
    given = case.dy if transpose else case.x
    reference = accuracy.reference_dgrad if transpose else accuracy.reference_conv
    for turn, (name, dtype, accum) in enumerate(tiles(device, "fprop"), first):
        for bad, weight in some(itertools.product(BAD, (0.5, -math.inf)), turn):
            a, w, clean = given.clone(), case.w.clone(), given.clone()
            a[case.busy, 0], clean[case.busy, 0] = bad, 0
            w.view(case.volume, -1)[case.far, 0] = weight
            y = case.conv(a.to(dtype), w, name, accum, transpose)
            a64, w64 = operands(name, dtype, a, w)
            y64 = reference(a64, w64, case.pairs, case.n)[0]
            agree(y, y64, (name, bad, weight), classes=not name.endswith("_3xtf32"))
            same = case.conv(clean.to(dtype), w, name, accum, transpose)
            finite = y64.isfinite()
            assert torch.equal(y[finite], same[finite]), (name, bad, weight)
            assert bool(finite[case.lonely].all()) and not bool(finite.all())


@CASES
def test_fault_43_weight_gradients_take_their_own_pairs(device: torch.device, shape: str) -> None:
    """A bad row of dy, or of both: right under offsets that do not pair it, as pairs give it under others."""
    case, first = Case(device, *SHAPES[shape]), list(SHAPES).index(shape)
    for turn, (name, dtype, accum) in enumerate(tiles(device, "wgrad"), first):
        for bad, row, x_too in some(itertools.product(BAD, (case.lonely, case.busy), (False, True)), turn):
            x, dy = case.x.clone(), case.dy.clone()
            dy[row, 0] = bad
            if x_too:
                x[row, 1] = bad
            what = (name, bad, row, x_too)
            got = case.wgrad(x.to(dtype), dy.to(dtype), name, accum)
            x64, dy64 = operands(name, dtype, x, dy)
            want, scale = accuracy.reference_wgrad(x64, dy64, case.pairs, case.groups)
            agree(got, want, what, classes=not name.endswith("_3xtf32"))
            assert not bool(want.isfinite().all()) and bool(want.isfinite().any()), what
            finite = want.isfinite()
            error = (got.double() - want)[finite].abs() / scale[finite].clamp(min=1e-30)
            assert float(error.max()) <= 1e-4, what  # fp32 sums of at most 650 products
            dy[row, 0] = 0
            if x_too:
                x[row, 1] = 0
            same = case.wgrad(x.to(dtype), dy.to(dtype), name, accum)
            column = finite.clone()  # of dy's channel 0: some of these sums are made again from pairs
            (column[:, 0] if case.groups > 1 else column)[..., 0] = False
            assert torch.equal(got[column], same[column]), what
            again = case.wgrad(x.to(dtype), dy.to(dtype), name, accum)
            assert torch.equal(again, same), what


def test_fault_43_repeats_bit_by_bit(device: torch.device) -> None:
    case = Case(device, 3, 1, 40, 24)
    case.dy[case.busy] = math.inf
    case.w[0] = math.nan
    for name, dtype, accum in tiles(device, "wgrad"):
        first, second = (case.wgrad(case.x.to(dtype), case.dy.to(dtype), name, accum) for _ in range(2))
        assert torch.equal(first.nan_to_num(7, 8, 9), second.nan_to_num(7, 8, 9)), name
    for name, dtype, accum in tiles(device, "fprop"):
        first, second = (case.conv(case.x.to(dtype), case.w, name, accum, False) for _ in range(2))
        assert torch.equal(first.nan_to_num(7, 8, 9), second.nan_to_num(7, 8, 9)), name


# ---- what watches: the guard, shadow verification, the rescale ---------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_fault_43_guard_counts_the_cells_that_pairs_give(device: torch.device, dtype: torch.dtype) -> None:
    coords = grid_and_strays(device)
    layer = SparseConv3d(32, 48, 3, bias=False).to(device, dtype)
    with torch.no_grad():
        layer.weight[0, 3, 5] = math.inf
    x = torch.randn(len(coords), 32, device=device).to(dtype).requires_grad_()
    voxels = Voxels(coords, x)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    guard = voxmma.OverflowGuard(device)
    dy = torch.randn(len(coords), 48, device=device).to(dtype)
    with guard:
        y = layer(voxels).feats
        y.backward(dy)
    w64 = layer.weight.detach().double()
    want = [
        accuracy.reference_conv(x.detach().double(), w64, pairs, len(coords))[0],
        accuracy.reference_dgrad(dy.double(), w64, pairs, len(coords))[0],
    ]
    read = guard.read()
    counts = [int((~t.isfinite()).sum()) for t in want]
    assert counts[0] == len(pairs[0][0]) > 0
    assert [read[op]["nonfinite"] for op in ("fprop", "dgrad", "wgrad")] == [*counts, 0]
    assert x.grad is not None and torch.equal(x.grad.isfinite(), want[1].isfinite())


@pytest.mark.parametrize("accumulator", ["fp32", "fp16", "fp16_promoted:32"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_fault_43_shadow_verification_follows_the_rule(
    device: torch.device, dtype: torch.dtype, accumulator: str
) -> None:
    """No breach for what pairs give, by plain and rescaled calls; one for a cell poisoned beyond that."""
    coords = grid_and_strays(device)
    layer = SparseConv3d(32, 48, 3, accumulator=accumulator).to(device)
    with torch.no_grad():
        layer.weight[0, 3, 5] = math.inf
    x = torch.randn(len(coords), 32, device=device).to(dtype)
    x[17, 2] = math.nan
    voxels = Voxels(coords, x)
    watch = shadow.verify(layer, every=1, rows=len(coords))
    out = layer(voxels)
    watch.remove()
    assert watch.checked[""] == 1 and not watch.breaches
    y = out.feats.detach().clone()
    finite = y.isfinite()
    assert bool(finite.any()) and not bool(finite.all())
    mapping, rows = voxmma.kernel_map(voxels.coord_set, 3), torch.arange(len(coords))
    arguments = (x, layer.weight.detach(), layer.bias.detach(), mapping)
    record = voxmma.explain(out)
    errors, limit = shadow.check(*arguments, y, record, rows)
    assert errors.within(limit) and errors.cells == y.numel()
    for poison, at in ((math.nan, finite.nonzero()[0]), (0.0, (~finite).nonzero()[0])):
        wrong = y.clone()
        wrong[tuple(at)] = poison
        errors, limit = shadow.check(*arguments, wrong, record, rows)
        assert errors.nonfinite == 1 and not errors.within(limit)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("what", ["weight", "input", "gradient"])
def test_fault_43_rescale_looks_at_finite_numbers(device: torch.device, what: str, bad: float) -> None:
    """Factors come from finite magnitudes: cells that do not meet the bad number keep their bits."""
    case = Case(device, 3, 1, 32, 16)
    case.x *= 2.0**30  # far beyond fp16

    def run(value: float) -> list[Tensor]:
        x, w, dy = (t.bfloat16() for t in (case.x, case.w, 2.0**30 * case.dy))
        {"weight": w[0], "input": x[case.busy], "gradient": dy[case.busy]}[what].view(-1)[3] = value
        x, w = x.requires_grad_(), w.requires_grad_()
        out = spatially_sparse_conv(Voxels(case.coords, x), w, 3, accumulator="fp16", out_dtype=torch.float32)
        assert voxmma.explain(out).rescaled
        dx, dw = torch.autograd.grad(out.feats, (x, w), dy.float())
        y64 = accuracy.reference_conv(x.detach().double(), w.detach().double(), case.pairs, case.n)[0]
        dx64 = accuracy.reference_dgrad(dy.double(), w.detach().double(), case.pairs, case.n)[0]
        dw64 = accuracy.reference_wgrad(x.detach().double(), dy.double(), case.pairs)[0]
        for got, want in ((out.feats, y64), (dx, dx64), (dw, dw64)):
            agree(got.detach(), want, what)
        return [out.feats.detach(), dx, dw]

    guard = voxmma.OverflowGuard(device)
    with guard:
        got, clean = run(bad), run(0.0)
    assert all(bool(t.isfinite().all()) for t in clean)
    assert not all(bool(t.isfinite().all()) for t in got)
    for t, same in zip(got[:2], clean[:2], strict=True):
        finite = t.isfinite()
        assert torch.equal(t[finite], same[finite]) and bool(finite[case.lonely].all())


def test_rescaled_operands_fit_whatever_the_columns_sum_to(device: torch.device) -> None:
    """A column below 1 lets the sum fit where its operand does not: 1e5 times 0.5, and times nothing."""
    coords = random_coords(30, 5).to(device)
    x = torch.full((30, 8), 99840.0, device=device).bfloat16()
    w = torch.zeros(27, 8, 8, device=device).bfloat16()
    for value in (0.5, 0.0):
        w[13] = value * torch.eye(8)
        y = spatially_sparse_conv(Voxels(coords, x), w, 3, accumulator="fp16").feats
        assert torch.equal(y, value * x)


# ---- pooling and points ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", list(DTYPE_NAMES), ids=str)
def test_fault_43_pooling_and_points(device: torch.device, dtype: torch.dtype, bad: float) -> None:
    """Everything that does not read row 5 gives the same bits as without it."""
    coords = torch.cat([random_coords(200, 6), random_coords(60, 6) + torch.tensor([1, 0, 0, 0]).int()])
    feats = torch.randn(260, 8).to(dtype)
    points = coords[:, 1:].to(device).double() + 0.3

    def run(value: float) -> list[Tensor]:
        f = feats.clone()
        f[5, 2] = value
        f = f.to(device).requires_grad_()
        x = Voxels(coords.to(device), f)
        low, indices = F.max_pool_with_indices(x, 2)
        made = [pool(x, k, s).feats for pool in (F.max_pool, F.min_pool, F.sum_pool, F.avg_pool)
                for k, s in ((2, 2), (3, 2), (3, 1))]  # fmt: skip
        made += [F.unpool(low, 2).feats, F.max_unpool(low, indices).feats]
        batch = coords[:, 0].to(device).long()
        made += [devoxelise(x, points, 1.0, mode, batch_index=batch) for mode in ("nearest", "trilinear")]
        # A gradient row that is bad, in place of an input row.
        grads = []
        for y in made:
            dy = torch.ones_like(y)
            dy.view(-1)[0] = value
            grads.append(torch.autograd.grad(y, f, dy, retain_graph=True)[0])
        return [t.detach() for t in (*made, *grads)]

    for got, clean in zip(run(bad), run(0.0), strict=True):
        finite = got.isfinite()
        assert bool(clean.isfinite().all()) and int((~finite).sum()) <= 27  # the windows of one cell
        assert torch.equal(got[:, 3:], clean[:, 3:])  # channels that hold neither


@pytest.mark.parametrize("bad", BAD)
def test_fault_43_samples_are_reduced_apart(device: torch.device, bad: float) -> None:
    coords = torch.cat([random_coords(200, 6), random_coords(60, 6) + torch.tensor([1, 0, 0, 0]).int()])
    feats = torch.randn(260, 8)
    feats[5, 2] = bad
    f = feats.to(device).requires_grad_()
    x = Voxels(coords.to(device), f)
    merged = torch.cat([coords[:200, 1:] // 2, coords[200:, 1:] // 2 + 100]).to(device).double() + 0.5
    for y in (
        F.global_sum_pool(x),
        F.global_avg_pool(x),
        F.global_max_pool(x),
        Voxels.from_points(merged, f, 1.0, "sum").feats,
        Voxels.from_points(merged, f, 1.0, "mean").feats,
    ):
        seen = ~y.isfinite()
        assert int(seen.sum()) <= 1 and not bool(seen[1, :2].any()) and not bool(seen[:, 3:].any())
        dy = torch.ones_like(y)
        dy[0, 0] = bad
        grad = torch.autograd.grad(y, f, dy)[0]
        assert bool(grad[200:].isfinite().all()) and bool(grad[:, 1:].isfinite().all())


def test_fault_43_corners_whose_weight_rounds_to_zero_count_nothing(device: torch.device) -> None:
    """2^-53 along each axis: a share that fp32 does not hold, of a voxel that is infinite."""
    coords = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]], dtype=torch.int32, device=device)
    feats = torch.tensor([[1.5], [math.inf]], device=device, requires_grad=True)
    points = torch.full((1, 3), 0.5 + 2.0**-53, dtype=torch.float64, device=device)
    y = devoxelise(Voxels(coords, feats), points, 1.0, "trilinear")
    assert y.tolist() == [[1.5]]
    y.sum().backward()
    assert feats.grad is not None and feats.grad.tolist() == [[1.0], [0.0]]
