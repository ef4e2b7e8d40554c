"""fp64 references, error metrics and worst-case bounds for sparse convolutions.

One output cell of a convolution is a dot product of length ``n`` = (kernel offsets) x (input channels of its
group). Everything here is about that dot product, computed from the *same quantised operands* the fast path
saw:

* ``y64``     the dot product in fp64 (its own error, ``n * 2^-53 * abs64``, is far below every other
  format's),
* ``abs64``   the sum of the absolute products, ``sum |a| |b|``,
* ``eta``     ``|y - y64| / abs64``: bounded by the arithmetic alone, however much the sum cancels. Tests
  and tools decide by it.
* ``max_rel`` ``|y - y64| / |y64|``: reported beside it; a correct kernel can show any value where the
  sum cancels.

Where the bounds come from. A tensor core computes ``d = c + sum_{i<L} a_i b_i`` over a block of ``L``
products as follows (Fasi, Higham, Mikaitis, Pranesh 2021; Li et al. 2024; Khattak and Mikaitis 2025; Xie et
al. 2025): the products are exact; all ``L + 1`` addends are aligned to the largest exponent among them and
truncated at ``F`` fraction bits; their sum is exact and then rounded to the accumulator format, toward zero
for fp32 and to nearest even for fp16. Hence one block errs by at most ``L * 2^-F * M`` (``M``: the largest
addend, which itself loses nothing) plus one rounding of the result. The tests' emulator (tests/emulator.py)
executes the same model bit by bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from voxmma.ops.formats import FORMATS, format_name, largest_finite

Pairs = Sequence[tuple[Tensor, Tensor]]
"""Per kernel offset the (input rows, output rows) that it connects: int64 tensors of equal length."""

_CHUNK_ELEMENTS = 1 << 25  # fp64 elements of one gathered operand: 256 MiB


@dataclass(frozen=True)
class Arch:
    """How one processor family adds: ``fraction`` bits F kept on alignment, block length L by format."""

    name: str
    fraction: int
    block16: int
    """Products per block of an fp16 or bf16 MMA."""
    block_tf32: int
    """Products per block of a TF32 MMA; 0 when the family has none."""

    def block(self, in_format: str) -> int:
        """Products of one block for inputs of ``in_format``.

        Raises:
            ValueError: the family has no matrix instruction for that format.
        """
        length = {"fp16": self.block16, "bf16": self.block16, "tf32": self.block_tf32}.get(in_format, 0)
        if length == 0:
            raise ValueError(f"{self.name} has no matrix instruction for {in_format} inputs")
        return length


ARCHITECTURES: dict[str, Arch] = {
    "turing": Arch("turing", 24, 4, 0),
    "ampere": Arch("ampere", 24, 8, 4),
    "ada": Arch("ada", 24, 8, 4),
    "hopper": Arch("hopper", 25, 16, 8),
}


def arch_of(device: torch.device | str) -> str:
    """The key of :data:`ARCHITECTURES` for a CUDA device, 'cpu' for a CPU.

    Families newer than Hopper take its model: published measurements give them its fraction bits and block
    length.

    Raises:
        ValueError: a CUDA device older than Turing, which has no usable matrix instruction here.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (7, 5):
        raise ValueError(f"compute capability {major}.{minor} is older than 7.5 (Turing)")
    if major == 7:
        return "turing"
    if major == 8:
        return "ada" if minor == 9 else "ampere"
    return "hopper"


# ---- references ---------------------------------------------------------------------------------------


def _grouped(w: Tensor) -> Tensor:
    """Weights as (K, G, rows, cols)."""
    if w.dim() == 3:
        return w.unsqueeze(1)
    if w.dim() != 4:
        raise ValueError(f"weight must be (K, Ci, Co) or (K, G, Ci, Co), not {tuple(w.shape)}")
    return w


def _chunks(count: int, width: int) -> list[slice]:
    """Slices of ``count`` rows of ``width`` elements, each of at most _CHUNK_ELEMENTS elements."""
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    return [slice(start, start + step) for start in range(0, count, step)]


def reference_conv(
    x: Tensor, w: Tensor, pairs: Pairs, n_out: int, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``y[i] = sum_k x[in] @ w[k] + bias`` in fp64, and the sum of absolute terms of every cell.

    Args:
        x: (n_in, G * Ci), any float dtype, already quantised to what the fast path reads.
        w: (K, Ci, Co) or (K, G, Ci, Co), likewise quantised, on the same device.
        pairs: per offset the (input rows, output rows).
        n_out: number of output rows.
        bias: (G * Co,) or None; enters ``abs64`` by its absolute value.

    Returns:
        (y64, abs64), both (n_out, G * Co) fp64.

    Raises:
        ValueError: shapes or the number of offsets do not fit together.
    """
    weight = _grouped(w)
    volume, groups, c_in, c_out = weight.shape
    if len(pairs) != volume:
        raise ValueError(f"pairs lists {len(pairs)} offsets, weight {volume}")
    if x.dim() != 2 or x.shape[1] != groups * c_in:
        raise ValueError(
            f"x must be (n_in, {groups * c_in}) for weight {tuple(w.shape)}, not {tuple(x.shape)}"
        )
    y64 = torch.zeros(n_out, groups * c_out, dtype=torch.float64, device=x.device)
    abs64 = torch.zeros_like(y64)
    if bias is not None:
        y64 += bias.double()
        abs64 += bias.double().abs()
    width = groups * max(c_in, c_out)
    for k, (in_rows, out_rows) in enumerate(pairs):
        wk = weight[k].double()
        for part in _chunks(len(in_rows), width):
            rows = x[in_rows[part]].double().view(-1, groups, c_in).transpose(0, 1)  # (G, P, Ci)
            out = out_rows[part]
            y64.index_add_(0, out, torch.bmm(rows, wk).transpose(0, 1).reshape(-1, groups * c_out))
            product = torch.bmm(rows.abs_(), wk.abs()).transpose(0, 1).reshape(-1, groups * c_out)
            abs64.index_add_(0, out, product)
    return y64, abs64


def reference_dgrad(dy: Tensor, w: Tensor, pairs: Pairs, n_in: int) -> tuple[Tensor, Tensor]:
    """``dx[in] = sum_k dy[out] @ w[k]^T`` in fp64, and its sum of absolute terms.

    Args:
        dy: (n_out, G * Co). w: the *forward* weights, (K, Ci, Co) or (K, G, Ci, Co).
        pairs: the forward map's pairs. n_in: number of input rows.

    Returns:
        (dx64, abs64), both (n_in, G * Ci) fp64.
    """
    return reference_conv(dy, w.transpose(-1, -2), [(out, inp) for inp, out in pairs], n_in)


def reference_wgrad(x: Tensor, dy: Tensor, pairs: Pairs, groups: int = 1) -> tuple[Tensor, Tensor]:
    """``dW[k] = sum over pairs of x[in]^T dy[out]`` in fp64, and its sum of absolute terms.

    Args:
        x: (n_in, G * Ci). dy: (n_out, G * Co). groups: G.

    Returns:
        (dw64, abs64), both (K, Ci, Co), or (K, G, Ci, Co) when groups > 1; fp64.

    Raises:
        ValueError: channels are not divisible by ``groups``.
    """
    if x.shape[1] % groups or dy.shape[1] % groups:
        raise ValueError(f"channels {x.shape[1]} and {dy.shape[1]} are not both divisible by groups={groups}")
    c_in, c_out = x.shape[1] // groups, dy.shape[1] // groups
    dw64 = torch.zeros(len(pairs), groups, c_in, c_out, dtype=torch.float64, device=x.device)
    abs64 = torch.zeros_like(dw64)
    width = groups * max(c_in, c_out)
    for k, (in_rows, out_rows) in enumerate(pairs):
        for part in _chunks(len(in_rows), width):
            a = x[in_rows[part]].double().view(-1, groups, c_in).permute(1, 2, 0)  # (G, Ci, P)
            b = dy[out_rows[part]].double().view(-1, groups, c_out).transpose(0, 1)  # (G, P, Co)
            dw64[k] += torch.bmm(a, b)
            abs64[k] += torch.bmm(a.abs_(), b.abs_())
    return (dw64, abs64) if groups > 1 else (dw64[:, 0], abs64[:, 0])


# ---- metrics ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """Errors over **all** cells of a result. A non-finite cell makes every error infinite."""

    max_eta: float
    p99_eta: float
    rel_l2: float
    """``||y - y64||_2 / ||y64||_2``"""
    max_rel: float
    """Largest ``|y - y64| / |y64|``: reported only, unbounded where sums cancel."""
    nonfinite: int
    cells: int

    def within(self, limit: Bound) -> bool:
        """No non-finite cell and no cell above the bound; for errors taken with ``floor=limit.floor``."""
        return self.nonfinite == 0 and self.max_eta <= limit.eta

    def worst(self, other: Errors) -> Errors:
        """The larger of each figure: for keeping the maximum over repeats."""
        return Errors(
            max(self.max_eta, other.max_eta),
            max(self.p99_eta, other.p99_eta),
            max(self.rel_l2, other.rel_l2),
            max(self.max_rel, other.max_rel),
            max(self.nonfinite, other.nonfinite),
            max(self.cells, other.cells),
        )


def errors(y: Tensor, y64: Tensor, abs64: Tensor, floor: float = 0.0) -> Errors:
    """Compares a result with its reference over all cells.

    ``eta = max(|y - y64| - floor, 0) / abs64``; 0 where that numerator is 0; infinite where ``abs64 == 0``
    and it is not, and where ``y`` is not finite. ``floor`` is the absolute part of a bound (:class:`Bound`),
    which only results in the subnormal range can feel. All figures are made on the device, which is waited
    for once; on a GPU ``p99_eta`` is rounded to fp32.

    Args:
        y: any float dtype, any shape. y64, abs64: fp64 of the same shape and device, finite.

    Raises:
        ValueError: shapes differ.
    """
    if not (y.shape == y64.shape == abs64.shape):
        raise ValueError(
            f"shapes differ: y {tuple(y.shape)}, y64 {tuple(y64.shape)}, abs64 {tuple(abs64.shape)}"
        )
    cells = y.numel()
    if cells == 0:
        return Errors(0.0, 0.0, 0.0, 0.0, 0, 0)
    ref = y64.flatten()
    diff = y.flatten().double() - ref
    finite = diff.isfinite().sum()  # y64 is finite
    diff.abs_()
    norms = [torch.linalg.vector_norm(t) for t in (ref, diff)]
    max_rel = _ratio(diff, ref).abs_().max()
    eta = _ratio(diff.sub_(floor).clamp_(min=0), abs64.flatten())
    p99 = _kth_smallest(eta, max(1, math.ceil(0.99 * cells)))
    figures = torch.stack([finite.double(), *norms, max_rel, eta.max(), p99])
    good, norm, diff_norm, worst_rel, max_eta, p99_eta = figures.tolist()  # the one wait for the device
    if good < cells:
        return Errors(math.inf, math.inf, math.inf, math.inf, cells - int(good), cells)
    rel_l2 = diff_norm / norm if norm > 0 else (0.0 if diff_norm == 0 else math.inf)
    return Errors(max_eta, p99_eta, rel_l2, worst_rel, 0, cells)


def rel_l2(found: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Relative L2 error of tensors taken as one vector, in fp64; waits for the device.

    0 where nothing differs, infinite where the reference is zero and where a difference is not finite.
    """
    pairs = [(a.double(), b.double()) for a, b in zip(found, reference, strict=True)]
    difference, norm = (
        math.sqrt(sum(float(t.square().sum()) for t in tensors))
        for tensors in ((a - b for a, b in pairs), (b for _, b in pairs))
    )
    if difference == 0:
        return 0.0
    return difference / norm if math.isfinite(difference) and norm > 0 else math.inf


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator with 0 / 0 = 0 and positive / 0 = inf."""
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=math.inf, neginf=-math.inf)


def _kth_smallest(values: Tensor, rank: int) -> Tensor:
    """The value of the given rank (from 1) among fp64 values >= 0, as a 0-d tensor.

    On a GPU to fp32 precision: torch's kthvalue leaves all of a vector to one multiprocessor there.
    """
    if values.device.type == "cpu":
        return values.kthvalue(rank).values
    return _kth_by_counting(values, rank)


def _kth_by_counting(values: Tensor, rank: int) -> Tensor:
    """As _kth_smallest, on values rounded to fp32: bit by bit, the largest number with fewer below it."""
    bits = values.float().view(torch.int32)  # of non-negative numbers: in their order
    found = torch.zeros((), dtype=torch.int32, device=values.device)
    for bit in reversed(range(31)):
        candidate = found + (1 << bit)
        found = torch.where((bits < candidate).sum() < rank, candidate, found)
    return found.view(torch.float32).double()


# ---- bounds -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Worst case of one mode: every cell satisfies ``|y - y64| <= eta * abs64 + floor``."""

    eta: float
    floor: float
    """Absolute part: what gradual underflow can lose, only felt by results in the subnormal range."""
    formula: str
    """The formula that gave ``eta``, for tables."""


#: Most parts of a sum: kMaxParts of csrc/conv/common.cuh.
MAX_PARTS = 8


def bound(
    accumulator: str,
    n: int,
    in_dtype: torch.dtype | str,
    out_dtype: torch.dtype | str,
    arch: str = "hopper",
    *,
    offsets: int = 1,
    chunk: int = 0,
) -> Bound:
    """Worst-case error of one output cell in one mode.

    The ``n`` products of a cell are spread over ``offsets`` kernel offsets that each start a new MMA block,
    so there are ``B = offsets * ceil(n / offsets / L)`` blocks of ``L`` products. ``F``: fraction bits on
    alignment; ``u = 2^-24``, ``u16 = 2^-11``, ``u_out``: unit roundoff of the output, 0 for fp32
    (it multiplies ``1 +`` what stands before it).

    fp16
        ``B u16 + n 2^-F + max(u16, u_out)``: one rounding to nearest per block (without second-order term:
        Jeannerod and Rump 2013), truncation at alignment, one rounding for bias and output. With ``L = 16``
        and full blocks that is ``(ceil(n / 16) + 1) u16``, plus a thousandth of it for the truncation.
    fp16_promoted
        ``B_c u16 + n 2^-F + ceil(n / c) u + P u + u_out``: the B_c blocks of one chunk of ``c`` products
        round in fp16, the chunks are added in fp32, so only a small term grows with n. P: parts, see below.
    fp32 on tensor cores
        ``2 B u + n 2^-F + u + u_out``: each block truncates toward zero (2 u) and at alignment. Linear in n
        and biased on one-signed data.
    fp32 elsewhere (SIMT, CPU)
        ``n u + u + u_out``: a chain of roundings to nearest, in any order of adding.
    fp64
        ``2 n 2^-53``: the reference rounds as often as the result.

    On a GPU the sum of a small set is made in up to P = 8 parts, added in fp32. A part with products in it
    has all blocks but those of the others, at least one each, whose roundings (u16, 2 u, u) pay for the
    additions (u each): the bounds hold for any number of parts, that of a promoted accumulator with P u.

    Padding a group's channels with zeros adds no error, so ``B`` counts real products only. fp32 inputs take
    the SIMT line on every arch ('ieee': a tensor-core scheme must not be worse). TF32 inputs take the
    tensor-core line, on operands that were rounded to TF32 first. ``arch='cpu'`` is the
    emulated path: products of one offset in fp32 in any order, an fp16 accumulator rounding the running sum
    at most once per 16 products.

    The absolute part of the bound counts what roundings can lose below the normal range: half the smallest
    fp16 number per fp16 rounding, the smallest fp32 number per fp32 addition, and half the output's smallest
    number.

    Args:
        accumulator: 'fp16', 'fp16_promoted', 'fp32' or 'fp64'.
        n: products per cell; an upper bound will do.
        in_dtype: format of the operands; 'tf32' is written as a name.
        out_dtype: format of the stored result.
        arch: a key of :data:`ARCHITECTURES`, 'simt' or 'cpu'.
        offsets: kernel offsets that share n.
        chunk: channels between promotions of 'fp16_promoted'; -1 = once per offset.

    Raises:
        ValueError: unknown accumulator or arch, an illegal combination, a promoted accumulator without a
            chunk.
    """
    in_name, out_name = format_name(in_dtype), format_name(out_dtype)
    if arch not in ARCHITECTURES and arch not in ("cpu", "simt"):
        raise ValueError(f"arch {arch!r} is none of {', '.join(ARCHITECTURES)}, simt, cpu")
    if n < 0 or offsets < 1:
        raise ValueError(f"n={n} must not be negative and offsets={offsets} at least 1")
    out, u32 = FORMATS[out_name], FORMATS["fp32"].unit
    u16, tiny16, tiny32 = FORMATS["fp16"].unit, FORMATS["fp16"].tiny, FORMATS["fp32"].tiny
    u_out = out.unit if out.bits < 24 else 0.0
    per_offset = math.ceil(n / offsets)

    if accumulator == "fp64":
        return Bound(2 * n * 2.0**-53 + 2.0**-53, (n + 1) * FORMATS["fp64"].tiny, "2 n 2^-53")
    if accumulator == "fp32":
        if in_name == "fp64":
            raise ValueError("fp64 inputs accumulate in fp64")
        if in_name == "fp32" or arch in ("cpu", "simt"):
            inner = (n + 1) * u32
            return Bound(inner + u_out * (1 + inner), n * tiny32 + out.tiny / 2, "n 2^-24 + u_out")
        model = ARCHITECTURES[arch]
        blocks = offsets * math.ceil(per_offset / model.block(in_name))
        inner = (2 * blocks + 1) * u32 + n * 2.0**-model.fraction
        formula = f"2 B 2^-24 + n 2^-{model.fraction} + u_out"
        return Bound(inner + u_out * (1 + inner), blocks * tiny32 + out.tiny / 2, formula)
    if accumulator not in ("fp16", "fp16_promoted"):
        raise ValueError(f"accumulator {accumulator!r} is none of fp16, fp16_promoted, fp32, fp64")
    if in_name != "fp16":
        raise ValueError(
            f"an fp16 accumulator needs fp16 operands, not {in_name} (bf16 is rescaled to fp16 first)"
        )
    if arch == "simt":
        raise ValueError("there is no SIMT kernel with an fp16 accumulator")
    length = 16 if arch == "cpu" else ARCHITECTURES[arch].block(in_name)
    fraction = 24 if arch == "cpu" else ARCHITECTURES[arch].fraction
    if accumulator == "fp16":
        blocks = offsets * math.ceil(per_offset / length)
        eta = blocks * u16 + n * 2.0**-fraction + max(u16, u_out)
        return Bound(eta, (blocks + 1) * tiny16 / 2 + out.tiny / 2, f"(ceil(n/{length}) + 1) 2^-11")
    if chunk == 0:
        raise ValueError("fp16_promoted needs chunk: channels between promotions, or -1 for one offset")
    size = per_offset if chunk == -1 else chunk
    chunks = offsets * math.ceil(per_offset / max(1, min(size, per_offset)))
    blocks = math.ceil(size / length)
    parts = 1 if arch == "cpu" else MAX_PARTS
    inner = blocks * u16 + n * 2.0**-fraction + (chunks + parts) * u32
    eta = inner + u_out * (1 + inner)
    floor = chunks * blocks * tiny16 / 2 + out.tiny / 2
    return Bound(eta, floor, f"ceil(c/{length}) 2^-11 + ceil(n/c) 2^-24 + u_out")


def tf32_loss(n: int, a: Tensor, b: Tensor) -> float:
    """What a 3xTF32 cell of `n` products of these operands may lose: an absolute part for :class:`Bound`.

    TF32 has no bits below 2^-136, so that the second piece of a number near fp32's smallest vanishes: a
    product of finite a and b is off by at most ``2^-136 (|a| + |b|)``. Waits for the device.
    """
    return 2.0**-136 * n * sum(float(largest_finite(t)) for t in (a, b))
