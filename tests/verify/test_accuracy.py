"""The judge is judged: references, metrics, bounds and input families."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from voxmma.ops.formats import DTYPES, FORMATS, round_tf32
from voxmma.verify import accuracy
from voxmma.verify.accuracy import (
    Errors,
    bound,
    errors,
    reference_conv,
    reference_dgrad,
    reference_wgrad,
)
from voxmma.verify.families import FAMILIES, INTEGERS

U16, U32, UBF = 2.0**-11, 2.0**-24, 2.0**-8
Pairs = list[tuple[Tensor, Tensor]]


def random_pairs(n_in: int, n_out: int, volume: int, seed: int = 0) -> Pairs:
    """Offsets with between none and all of the rows connected, each row at most once an offset."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, min(n_in, n_out) + 1, (volume,), generator=g).tolist()
    counts[0] = 0
    return [(torch.randperm(n_in, generator=g)[:c], torch.randperm(n_out, generator=g)[:c]) for c in counts]


def dense(x: Tensor, w: Tensor, pairs: Pairs, n_out: int) -> Tensor:
    """The definition, one pair and one group at a time."""
    w = w if w.dim() == 4 else w[:, None]
    _, groups, c_in, c_out = w.shape
    y = torch.zeros(n_out, groups * c_out, dtype=torch.float64)
    for k, (rows, outs) in enumerate(pairs):
        for i, o in zip(rows.tolist(), outs.tolist(), strict=True):
            for g in range(groups):
                part = x[i, g * c_in : (g + 1) * c_in].double()
                y[o, g * c_out : (g + 1) * c_out] += part @ w[k, g].double()
    return y


# ---- references ----------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("chunk", [7, 1 << 25])
def test_references_follow_the_definition(groups: int, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "_CHUNK_ELEMENTS", chunk)
    n_in, n_out, c_in, c_out = 23, 17, 6, 12
    pairs = random_pairs(n_in, n_out, 5)
    x, dy = torch.randn(n_in, c_in).half(), torch.randn(n_out, c_out).half()
    shape = (5, c_in, c_out) if groups == 1 else (5, groups, c_in // groups, c_out // groups)
    w, bias = torch.randn(shape).half(), torch.randn(c_out).half()

    y, y_abs = reference_conv(x, w, pairs, n_out, bias)
    torch.testing.assert_close(y, dense(x, w, pairs, n_out) + bias.double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(y_abs, dense(x.abs(), w.abs(), pairs, n_out) + bias.double().abs())

    leaf_x, leaf_w = x.double().requires_grad_(), w.double().requires_grad_()
    grouped = leaf_w if groups > 1 else leaf_w[:, None]
    out = torch.zeros(n_out, c_out, dtype=torch.float64)
    for k, (rows, outs) in enumerate(pairs):
        product = torch.einsum(
            "pgi,gio->pgo", leaf_x[rows].view(len(rows), groups, c_in // groups), grouped[k]
        )
        out = out.index_add(0, outs, product.reshape(len(rows), c_out))
    out.backward(dy.double())
    dx, dx_abs = reference_dgrad(dy, w, pairs, n_in)
    dw, dw_abs = reference_wgrad(x, dy, pairs, groups)
    assert leaf_x.grad is not None and leaf_w.grad is not None
    torch.testing.assert_close(dx, leaf_x.grad, rtol=0, atol=1e-13)
    torch.testing.assert_close(dw, leaf_w.grad, rtol=0, atol=1e-13)
    assert dw.shape == w.shape and bool(
        (dx_abs >= dx.abs() - 1e-12).all() and (dw_abs >= dw.abs() - 1e-12).all()
    )


def test_references_take_empty_inputs() -> None:
    none = torch.zeros(0, dtype=torch.int64)
    y, y_abs = reference_conv(torch.zeros(0, 4), torch.ones(2, 4, 3), [(none, none)] * 2, 5)
    assert y.shape == (5, 3) and not y.any() and not y_abs.any()
    assert reference_conv(torch.zeros(3, 4), torch.ones(2, 4, 3), [(none, none)] * 2, 0)[0].shape == (0, 3)


def test_references_name_what_does_not_fit() -> None:
    pairs = random_pairs(4, 4, 3)
    with pytest.raises(ValueError, match="pairs lists 3 offsets, weight 2"):
        reference_conv(torch.zeros(4, 4), torch.zeros(2, 4, 4), pairs, 4)
    with pytest.raises(ValueError, match=r"x must be \(n_in, 4\)"):
        reference_conv(torch.zeros(4, 5), torch.zeros(3, 4, 4), pairs, 4)
    with pytest.raises(ValueError, match="weight must be"):
        reference_conv(torch.zeros(4, 4), torch.zeros(4, 4), pairs, 4)
    with pytest.raises(ValueError, match="groups=3"):
        reference_wgrad(torch.zeros(4, 4), torch.zeros(4, 6), pairs, 3)


# ---- metrics ----------------------------------------------------------------------------------


def test_errors_cover_every_cell() -> None:
    y64 = torch.full((1000, 200), 2.0, dtype=torch.float64)
    clean = errors(y64.half(), y64, y64)
    assert clean == Errors(0.0, 0.0, 0.0, 0.0, 0, 200_000)
    corrupt = y64.clone()
    corrupt[999, 199] = 3.0  # one cell in 2e5: invisible to p99, plain to the maximum
    found = errors(corrupt, y64, 2 * y64)
    assert (found.max_eta, found.p99_eta, found.max_rel) == (0.25, 0.0, 0.5)
    assert found.rel_l2 == pytest.approx(0.5 / math.sqrt(200_000))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_one_nonfinite_cell_is_fatal(bad: float) -> None:
    y64 = torch.ones(100, 10, dtype=torch.float64)
    y = y64.clone()
    y[50, 5] = bad
    found = errors(y, y64, y64)
    assert found.nonfinite == 1 and found.max_eta == found.rel_l2 == math.inf
    assert not found.within(bound("fp16", 1 << 20, "fp16", "fp16"))


def test_errors_of_empty_sums() -> None:
    y64 = torch.zeros(3, dtype=torch.float64)
    assert errors(torch.zeros(3), y64, y64).max_eta == 0.0
    found = errors(torch.tensor([0.0, 0.0, 1e-30]), y64, y64)
    assert found.max_eta == found.max_rel == found.rel_l2 == math.inf
    assert errors(torch.tensor([0.0, 0.0, 1e-30]), y64, y64, floor=1e-29).max_eta == 0.0
    assert errors(y64[:0], y64[:0], y64[:0]).cells == 0
    with pytest.raises(ValueError, match="shapes differ"):
        errors(torch.zeros(2), y64, y64)


def test_rank_by_counting_is_the_rank_by_sorting() -> None:
    """What finds the percentile on a GPU, on ties, zeros, tiny, infinite and NaN values (largest of all)."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.randn(3000, generator=generator).double().abs() * 2.0 ** torch.randint(-120, 120, (3000,))
    ties = torch.randint(0, 5, (3000,), generator=generator).double()
    special = torch.tensor([0.0, -0.0, 1e-45, math.inf, math.nan], dtype=torch.float64)
    for values in (spread, ties, torch.zeros(3), special):
        ordered = values.float().double().sort().values
        for rank in {1, 2, len(values) // 2, math.ceil(0.99 * len(values)), len(values)}:
            found = accuracy._kth_by_counting(values.double(), rank)
            torch.testing.assert_close(found, ordered[rank - 1], rtol=0, atol=0, equal_nan=True)


def test_errors_wait_for_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        honest = getattr(Tensor, name)
        monkeypatch.setattr(
            Tensor,
            name,
            lambda self, *rest, call=honest, name=name: (reads.append(name), call(self, *rest))[1],
        )
    errors(torch.ones(50, 4).half(), torch.ones(50, 4).double(), torch.ones(50, 4).double())
    assert reads == ["tolist"]


def test_tf32_loss_is_two_operands_times_the_missing_bits() -> None:
    a, b = torch.tensor([-3.0, 1.0]), torch.tensor([[0.5]])
    assert accuracy.tf32_loss(10, a, b) == 10 * 3.5 * 2.0**-136
    assert accuracy.tf32_loss(10, a, b[:0]) == 10 * 3.0 * 2.0**-136


def test_p99_is_the_value_that_99_percent_stay_within() -> None:
    abs64 = torch.ones(1000, dtype=torch.float64)
    found = errors(torch.arange(1000, dtype=torch.float64), torch.zeros_like(abs64), abs64)
    assert (found.p99_eta, found.max_eta) == (989.0, 999.0)
    assert found.worst(Errors(1e9, 0, 0, 0, 0, 1)).max_eta == 1e9


# ---- bounds ----------------------------------------------------------------------------------


def test_bound_is_the_documented_formula() -> None:
    for n in (16, 432, 27 * 64, 27 * 512):
        hopper, ampere = (bound("fp16", n, "fp16", "fp16", arch).eta for arch in ("hopper", "ampere"))
        assert hopper == pytest.approx((n // 16 + 1) * U16, rel=2e-3)
        assert ampere == pytest.approx((n // 8 + 1) * U16, rel=2e-3)
        assert hopper >= (n // 16 + 1) * U16
    # every offset starts a new MMA step, so 27 x 8 channels round 27 times, not 14
    assert bound("fp16", 216, "fp16", "fp16", "hopper", offsets=27).eta == pytest.approx(28 * U16, rel=2e-3)
    linear = [bound("fp32", n, "fp16", "fp32", "hopper").eta for n in (1 << 10, 1 << 11, 1 << 12)]
    assert linear[2] - linear[1] == pytest.approx(2 * (linear[1] - linear[0]))
    assert linear[0] == pytest.approx((1 << 10) * (2.0**-25 + 2.0**-27), rel=2e-3)
    assert bound("fp32", 0, "bf16", "bf16").eta == pytest.approx(UBF, rel=1e-4)
    assert bound("fp32", 100, "fp32", "fp32", "hopper") == bound("fp32", 100, "fp32", "fp32", "simt")
    assert bound("fp32", 100, "fp32", "fp32", "cpu").eta == 101 * U32
    assert bound("fp64", 1000, "fp64", "fp64").eta < 1e-12


def test_promoted_bound_does_not_grow_with_channels() -> None:
    eta = {c: bound("fp16_promoted", 27 * c, "fp16", "fp16", offsets=27, chunk=32).eta for c in (32, 512)}
    assert eta[32] == pytest.approx(3 * U16, rel=0.03)
    assert eta[512] < 1.35 * eta[32] < 0.01 * bound("fp16", 27 * 512, "fp16", "fp16", offsets=27).eta
    per_offset = bound("fp16_promoted", 27 * 64, "fp16", "fp16", offsets=27, chunk=-1).eta
    assert per_offset == pytest.approx(5 * U16, rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp8", 16, "fp16", "fp16"), "accumulator 'fp8'"),
        (("fp16", 16, "bf16", "bf16"), "needs fp16 operands, not bf16"),
        (("fp16", 16, "fp32", "fp32"), "needs fp16 operands"),
        (("fp32", 16, "fp64", "fp64"), "accumulate in fp64"),
        (("fp16_promoted", 16, "fp16", "fp16"), "needs chunk"),
        (("fp16", 16, "fp16", "fp16", "simt"), "no SIMT kernel"),
        (("fp32", 16, "fp16", "fp16", "volta"), "arch 'volta'"),
        (("fp32", -1, "fp16", "fp16"), "n=-1"),
        (("fp32", 16, torch.int8, "fp16"), "torch.int8"),
        (("fp32", 16, "tf32", "fp32", "turing"), "no matrix instruction for tf32"),
    ],
)
def test_bound_refuses_what_does_not_exist(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bound(*arguments)


def test_formats_match_torch() -> None:
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("fp32", torch.float32)):
        info = torch.finfo(dtype)
        fmt = FORMATS[name]
        assert (fmt.max, 2 * fmt.unit, 2.0**fmt.emin, fmt.tiny) == (
            info.max,
            info.eps,
            info.tiny,
            info.smallest_normal * info.eps,
        )
        assert torch.tensor([1 + fmt.unit * 1.01], dtype=torch.float64).to(DTYPES[name]) == 1 + 2 * fmt.unit
    assert round_tf32(torch.tensor([1 + 2.0**-11, 1 + 2.0**-12, -math.inf])).tolist() == [
        1 + 2.0**-10,
        1.0,
        -math.inf,
    ]


# ---- input families ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", [*FAMILIES, "integers"])
def test_families_are_what_they_say(name: str, dtype: torch.dtype) -> None:
    family = {**FAMILIES, "integers": INTEGERS}[name]
    rows, volume, channels = 512, 27, 64

    def draw() -> tuple[Tensor, Tensor, Tensor]:
        g = torch.Generator().manual_seed(3)
        return (
            family.activations((rows, channels), dtype, g, "cpu"),
            family.weights((volume, channels, 32), dtype, g, "cpu"),
            family.gradients((rows, 32), dtype, g, "cpu"),
        )

    x, w, dy = draw()
    for tensor, again in zip((x, w, dy), draw(), strict=True):
        assert tensor.dtype == dtype and bool(tensor.isfinite().all()) and torch.equal(tensor, again)
    everywhere = [(torch.randperm(rows), torch.arange(rows)) for _ in range(volume)]
    y, y_abs = reference_conv(x, w, everywhere, rows)
    assert float(y_abs.max()) <= 65504 or (name == "heavy_tailed" and float(y.abs().max()) <= 65504)
    cancels = float(y.norm() / y_abs.norm())
    if name == "relu":
        assert 0.45 < float((x == 0).float().mean()) < 0.55 and float(x.min()) == 0
    if name in ("one_signed", "near_max"):
        assert float(x.min()) > 0 and float(w.min()) > 0 and cancels == pytest.approx(1)
    if name == "near_max":
        assert float(y.max()) > 0.7 * 65504 and float(x.max()) > 0.95 * 65504
    if name == "cancelling":
        half_sums = (w[0, :16].double().sum(0), w[0, 16:32].double().sum(0))
        assert cancels < 0.01 and bool((half_sums[0] > 0.8).all() and (half_sums[1] < -0.8).all())
    if name == "heavy_tailed":
        assert float(x.abs().max()) > 300 * float(x.abs().median())
    if name == "subnormal":
        assert 0 < float(x.abs().max()) <= torch.finfo(dtype).tiny
        assert float((x.abs() < torch.finfo(dtype).tiny).float().mean()) > 0.95
    if name == "integers":
        assert torch.equal(x, x.round()) and float(y_abs.max()) <= 2048 and torch.equal(y.float().double(), y)


def test_grouped_weights_reduce_over_their_own_channels() -> None:
    g = torch.Generator().manual_seed(0)
    w = FAMILIES["near_max"].weights((3, 4, 16, 8), torch.float32, g, "cpu")
    torch.testing.assert_close(w.abs().sum(dim=(0, 2)), torch.full((4, 8), 0.97))


@pytest.mark.gpu
def test_errors_agree_between_devices() -> None:
    y64 = torch.randn(5000, 40).double()
    abs64, y = y64.abs() + torch.rand(5000, 40), y64.half()
    cpu, gpu = errors(y, y64, abs64, 1e-6), errors(y.cuda(), y64.cuda(), abs64.cuda(), 1e-6)
    for name, value in asdict(cpu).items():
        assert asdict(gpu)[name] == pytest.approx(value, rel=1e-6), name
    y[3, 3] = math.inf
    assert errors(y.cuda(), y64.cuda(), abs64.cuda()) == errors(y, y64, abs64)


@pytest.mark.gpu
def test_references_agree_between_devices() -> None:
    pairs = random_pairs(3000, 2500, 27)
    on_gpu = [(i.cuda(), o.cuda()) for i, o in pairs]
    x, w, dy = torch.randn(3000, 64).half(), torch.randn(27, 64, 32).half(), torch.randn(2500, 32).half()
    for cpu, gpu in (
        (reference_conv(x, w, pairs, 2500), reference_conv(x.cuda(), w.cuda(), on_gpu, 2500)),
        (reference_dgrad(dy, w, pairs, 3000), reference_dgrad(dy.cuda(), w.cuda(), on_gpu, 3000)),
        (reference_wgrad(x, dy, pairs), reference_wgrad(x.cuda(), dy.cuda(), on_gpu)),
    ):
        for a, b in zip(cpu, gpu, strict=True):
            torch.testing.assert_close(a, b.cpu(), rtol=0, atol=1e-10)
