"""Overflow of fp16 accumulators: its bound on the device, and powers of two that make operands fit."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from voxmma._surroundings import undisturbed
from voxmma.ops.formats import FORMATS, largest_finite

MAX_FP16 = FORMATS["fp16"].max

#: Largest power of two that a rescale multiplies by, as an exponent.
_MAX_SHIFT = 126


# ---- bound, certificate, rescale ---------------------------------------------------------------------------


def _grouped(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 4 else weight.unsqueeze(1)


@undisturbed()
def overflow_bound(a: Tensor, weight: Tensor, *, transpose: bool = False, chunk: int = 0) -> Tensor:
    """Upper bound of every partial sum of an accumulator: absmax(a) x largest column sum of |weight|.

    Stays on the device and never waits for it (safe under CUDA graphs).

    Args:
        a: (n, channels), the operand that is gathered. weight: (K, Ci, Co) or (K, G, Ci, Co).
        transpose: input gradient: the sum runs over Co.
        chunk: products between promotions; 0 = one accumulator for all offsets, -1 = one offset.

    Returns:
        0-d fp32 tensor; infinite or NaN when an operand is.
    """
    w = _grouped(weight).abs().float()
    if transpose:
        w = w.transpose(-1, -2)
    if chunk > 0:
        steps = math.ceil(w.shape[-2] / chunk)
        w = torch.nn.functional.pad(w, (0, 0, 0, steps * chunk - w.shape[-2]))
        w = w.unflatten(-2, (steps, chunk))
    sums = w.sum(dim=-2) if chunk else w.sum(dim=(0, -2))
    if a.numel() == 0 or sums.numel() == 0:
        return torch.zeros((), device=a.device, dtype=torch.float32)
    # fp32 addition may round the sum down by this much at most
    slack = 1 + w.shape[-2] * w.shape[0] * 2.0**-23
    return a.abs().amax().float() * sums.amax() * slack


def _power_of_two(exponent: Tensor) -> Tensor:
    """2^exponent as fp32, exactly, for int32 exponents; those beyond +-126 are cut."""
    return ((exponent.clamp(-_MAX_SHIFT, _MAX_SHIFT) + 127) << 23).view(torch.float32)


def safe_factor(bound: Tensor) -> Tensor:
    """The power of two, at most 1, that brings an overflow bound to 65504 or less; without waiting.

    1 for a bound that is infinite or NaN: such a result stays what it is, never a finite wrong number.
    """
    _, exponent = torch.frexp(bound / MAX_FP16)
    wanted = _power_of_two(-exponent.clamp(min=0))
    return torch.where((bound > MAX_FP16) & bound.isfinite(), wanted, torch.ones_like(bound))


@dataclass(frozen=True)
class Fp16Operands:
    """Operands times powers of two; all on the device. The result is to be divided by both, one by one."""

    a: Tensor
    weight: Tensor
    a_factor: Tensor
    w_factor: Tensor
    exact: Tensor
    """0-d bool: no mantissa changed, so fp16 products equal the original ones times both factors"""

    @property
    def factor(self) -> Tensor:
        """0-d fp32: the product of both powers of two."""
        return self.a_factor * self.w_factor

    def restore(self, y: Tensor) -> Tensor:
        """An fp32 result of these operands, divided by both factors (a product of the two may overflow)."""
        return y / self.a_factor / self.w_factor


def _equal(narrow: Tensor, wide: Tensor) -> Tensor:
    return ((narrow.float() == wide) | wide.isnan()).all()


@undisturbed()
def fp16_operands(a: Tensor, weight: Tensor, *, transpose: bool = False, chunk: int = 0) -> Fp16Operands:
    """bf16 (or fp32, fp16) operands as fp16 under power-of-two factors whose overflow bound fits.

    The weight is scaled to a largest magnitude in [0.5, 1), `a` as high as the bound allows, so that as few
    values as possible fall among the subnormals, where mantissas would be cut; `exact` says whether none did.
    Infinities and NaN stay what they are and change no factor. Without waiting for the device. Arguments as
    in :func:`overflow_bound`.
    """
    one = torch.ones((), device=a.device, dtype=torch.float32)
    largest = largest_finite(weight).float()
    _, exponent = torch.frexp(torch.where(largest > 0, largest, one))
    w_factor = _power_of_two(-exponent)
    scaled = weight.float() * w_factor
    finite = scaled.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    largest = largest_finite(a).float()
    bound = overflow_bound(largest, finite, transpose=transpose, chunk=chunk)
    bound = torch.maximum(bound, largest)  # `a` itself is to fit, where columns of the weight are below 1
    _, exponent = torch.frexp(torch.where(bound.isfinite() & (bound > 0), bound / MAX_FP16, one / 2))
    a_factor = _power_of_two(-exponent)
    wide = a.float() * a_factor
    a16, w16 = wide.half(), scaled.half()
    exact = _equal(a16, wide) & _equal(w16, scaled)
    return Fp16Operands(a16, w16, a_factor, w_factor, exact)
