"""Number formats, and rounding to them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from voxmma._types import DTYPE_NAMES

# ---- formats and architectures ------------------------------------------------------------------------


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    ``bits`` counts the significand with its hidden one; the smallest normal number is ``2^emin``.
    """

    name: str
    bits: int
    emin: int
    max: float

    @property
    def unit(self) -> float:
        """Unit roundoff of round-to-nearest, ``2^-bits``."""
        return 2.0**-self.bits

    @property
    def tiny(self) -> float:
        """Smallest positive number (subnormal), ``2^(emin - bits + 1)``."""
        return 2.0 ** (self.emin - self.bits + 1)


def _format(dtype: torch.dtype, name: str) -> Format:
    info = torch.finfo(dtype)
    return Format(name, 1 - int(math.log2(info.eps)), int(math.log2(info.smallest_normal)), info.max)


FORMATS: dict[str, Format] = {
    **{name: _format(dtype, name) for dtype, name in DTYPE_NAMES.items()},
    "tf32": Format("tf32", 11, -126, (2 - 2.0**-10) * 2.0**127),
}

#: The dtype that holds a format's values, by its name; 'tf32' is held in fp32.
DTYPES = {**{name: dtype for dtype, name in DTYPE_NAMES.items()}, "tf32": torch.float32}


def format_name(dtype: torch.dtype | str) -> str:
    """'fp16', 'bf16', 'tf32', 'fp32' or 'fp64' of a torch dtype (or of such a name itself).

    Raises:
        ValueError: not a floating-point format this library computes in.
    """
    name = DTYPE_NAMES.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if name not in FORMATS:
        raise ValueError(f"dtype {dtype} is none of {', '.join(FORMATS)}")
    return name


def round_tf32(x: Tensor) -> Tensor:
    """fp32 rounded to 10 fraction bits, to nearest, ties away from zero (PTX ``cvt.rna.tf32.f32``)."""
    bits = x.contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def largest_finite(t: Tensor) -> Tensor:
    """The largest finite magnitude as a 0-d fp32 (of fp64: fp64) tensor; 0 where there is none."""
    if t.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=t.device)
    found = t.detach().abs().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).amax()
    return found if t.dtype == torch.float64 else found.float()
