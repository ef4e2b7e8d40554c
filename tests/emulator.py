"""CPU emulator of tensor-core arithmetic, bit by bit, in numpy.

One block of an MMA instruction computes ``d = c + sum_{i<L} a_i b_i``. The model (own code, from published
measurements; see voxmma.accuracy for the sources and the per-architecture numbers):

1. every product is exact, with exponent ``e(a) + e(b)`` and a significand in [0, 4): it is not normalised,
and a
   subnormal operand keeps the smallest normal exponent; a zero product takes no part in the alignment;
2. all addends, ``c`` included, are aligned to the largest exponent and truncated (toward zero) at F fraction
bits; 3. their sum is exact, then rounded to the accumulator: fp32 toward zero, fp16 to nearest even.

An instruction of depth k runs its blocks of L products one after another, lowest k first. Values travel as
float64, which holds every operand, product and partial sum exactly.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from voxmma.verify.accuracy import ARCHITECTURES

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Kind:
    """One matrix instruction: input format, accumulator format and depth k."""

    name: str
    in_format: str
    accumulator: str
    k: int
    in_emin: int
    acc_emin: int


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("f16_f32", "fp16", "fp32", 16, -14, -126),
        Kind("f16_f16", "fp16", "fp16", 16, -14, -14),
        Kind("bf16_f32", "bf16", "fp32", 16, -126, -126),
        Kind("tf32_f32", "tf32", "fp32", 8, -126, -126),
    )
}


def exponent(x: Array, emin: int) -> NDArray[np.int64]:
    """floor(log2 |x|) of finite values, at least ``emin`` (subnormals are not normalised); of zero, emin."""
    _, e = np.frexp(x)
    return np.where(x == 0, emin, np.maximum(e.astype(np.int64) - 1, emin))


def round_fp32_toward_zero(x: Array) -> Array:
    """The fp32 value next to ``x`` in the direction of zero; infinite from 2^128 on."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    past = np.abs(near.astype(np.float64)) > np.abs(x)
    toward = np.where(past, np.nextafter(near, np.float32(0)), near).astype(np.float64)
    return np.where(np.abs(x) >= 2.0**128, np.copysign(np.inf, x), toward)


def round_fp16(x: Array) -> Array:
    """The nearest fp16 value, ties to even; infinite from 65520 on."""
    with np.errstate(over="ignore"):
        return x.astype(np.float16).astype(np.float64)


def _round(x: Array, accumulator: str) -> Array:
    return round_fp32_toward_zero(x) if accumulator == "fp32" else round_fp16(x)


def block(a: Array, b: Array, c: Array, kind: Kind, fraction: int) -> Array:
    """One block of finite float64 values of the kind's formats: a, b (..., L), c (...). Returns d (...)."""
    products = a * b  # exact: at most 22 significant bits
    exponents = exponent(a, kind.in_emin) + exponent(b, kind.in_emin)
    lowest = np.int64(-(1 << 20))
    exponents = np.where(products == 0, lowest, exponents)
    c_exponent = np.where(c == 0, lowest, exponent(c, kind.acc_emin))
    largest = np.maximum(exponents.max(axis=-1), c_exponent)
    largest = np.where(largest == lowest, 0, largest)
    shift = fraction - largest
    total = np.trunc(np.ldexp(products, shift[..., None])).sum(axis=-1) + np.trunc(np.ldexp(c, shift))
    return _round(np.ldexp(total, -shift), kind.accumulator)


def mma_dot(a: Array, b: Array, c: Array, kind: str, arch: str) -> Array:
    """``d = c + a . b`` as one instruction (or any number of consecutive blocks) computes it.

    Args:
        a, b: (..., K) values of the input format, K a multiple of the block length; broadcast against each
            other.
        c: (...) values of the accumulator format.
        kind: a key of KINDS. arch: a key of voxmma.accuracy.ARCHITECTURES.

    Returns:
        d (...) as float64. Where an operand is not finite, the IEEE result: infinity, or NaN.
    """
    spec, model = KINDS[kind], ARCHITECTURES[arch]
    length = model.block(spec.in_format)
    a, b = np.broadcast_arrays(np.asarray(a, np.float64), np.asarray(b, np.float64))
    if a.shape[-1] % length:
        raise ValueError(f"K={a.shape[-1]} is no multiple of the block length {length}")
    d = np.broadcast_to(np.asarray(c, np.float64), a.shape[:-1])
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, a.shape[-1], length):
            part_a, part_b = a[..., start : start + length], b[..., start : start + length]
            plain = np.isfinite(part_a).all(-1) & np.isfinite(part_b).all(-1) & np.isfinite(d)
            if plain.all():
                d = block(part_a, part_b, d, spec, model.fraction)
                continue
            special = (part_a * part_b).sum(-1) + d
            safe_a, safe_b = (np.where(plain[..., None], part, 0.0) for part in (part_a, part_b))
            safe = block(safe_a, safe_b, np.where(plain, d, 0.0), spec, model.fraction)
            d = np.where(plain, safe, special)
    return d


def conv_dot(a: Array, b: Array, kind: str, arch: str, chunk: int = 0, parts: int = 1) -> Array:
    """A whole dot product of a convolution cell, in instruction steps over one accumulator.

    Args:
        a, b: (..., n), n a multiple of the instruction's k (pad with zeros).
        chunk: 0 = one accumulator from start to end; else the accumulator is added to an fp32 total (round to
            nearest) and cleared every ``chunk`` products: the promoted scheme.
        parts: pieces of the products, nearly equal and whole instructions, that are summed on their own and
            added in fp32 (round to nearest) in order, as the kernels do for small sets.

    Returns:
        (...) as float64, in the accumulator's format (fp32: promoted, in parts), before output rounding.
    """
    n, step = a.shape[-1], KINDS[kind].k
    if parts > 1:
        ends = [n // step * part // parts * step for part in range(parts + 1)]
        sums = [
            conv_dot(a[..., i:j], b[..., i:j], kind, arch, chunk).astype(np.float32)
            for i, j in itertools.pairwise(ends)
        ]
        return functools.reduce(np.add, sums).astype(np.float64)
    if n % step or chunk % step:
        raise ValueError(f"n={n} and chunk={chunk} must be multiples of k={step}")
    zero = np.zeros(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]))
    if chunk == 0:
        return mma_dot(a, b, zero, kind, arch)
    total = zero.astype(np.float32)
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        total = total + mma_dot(a[..., part], b[..., part], zero, kind, arch).astype(np.float32)
    return total.astype(np.float64)


def simt_dot(a: Array, b: Array) -> Array:
    """The same dot product as a chain of fp32 multiply-adds on CUDA cores, one rounding to nearest each."""
    total = np.zeros(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]), np.float32)
    for i in range(a.shape[-1]):
        # float64 holds the product of two fp32 values exactly; its sum with the total is within 2^-53 of
        # exact
        total = (a[..., i] * b[..., i] + total.astype(np.float64)).astype(np.float32)
    return total.astype(np.float64)


def tf32(x: Array) -> Array:
    """fp32 values rounded to TF32: 10 fraction bits, ties away from zero (PTX cvt.rna.tf32.f32)."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)


def bf16(x: Array) -> Array:
    """fp32 values rounded to bf16, nearest even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def quantise(x: Array, in_format: str) -> Array:
    """Values rounded to nearest in an input format of a Kind."""
    if in_format == "fp16":
        return round_fp16(np.asarray(x, np.float64))
    return tf32(x) if in_format == "tf32" else bf16(x)


def split_tf32_dot(a: Array, b: Array, arch: str, chunk: int = 32) -> Array:
    """3xTF32: fp32 operands as two TF32 pieces each, the three large products, chunks added in fp32.

    The two small products run through the accumulator before the large one. (..., n) fp32 values; returns
    (...).
    """
    a_big, b_big = tf32(a), tf32(b)
    a_small, b_small = tf32(a - a_big), tf32(b - b_big)
    zero = np.zeros(np.broadcast_shapes(a.shape[:-1], b.shape[:-1]))
    total = zero.astype(np.float32)
    for start in range(0, a.shape[-1], chunk):
        part = slice(start, start + chunk)
        d = mma_dot(a_small[..., part], b_big[..., part], zero, "tf32_f32", arch)
        d = mma_dot(a_big[..., part], b_small[..., part], d, "tf32_f32", arch)
        d = mma_dot(a_big[..., part], b_big[..., part], d, "tf32_f32", arch)
        total = total + d.astype(np.float32)
    return total.astype(np.float64)
