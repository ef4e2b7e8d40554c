"""Input families: named ways to draw the operands of a sparse convolution."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from voxmma.ops.formats import FORMATS, format_name

Generate = Callable[[tuple[int, ...], torch.dtype, torch.Generator, "torch.device | str"], Tensor]
"""(shape, dtype, generator, device) -> tensor, quantised to dtype; drawn on the generator's device."""


@dataclass(frozen=True)
class Family:
    """A named way to draw operands.

    ``activations`` draws (N, channels). ``weights`` draws (K, Ci, Co) or (K, G, Ci, Co) and takes K and
    dimension -2 as the reduction: for dgrad draw with Ci and Co swapped and transpose the last two.
    ``gradients`` draws (N, channels) for the second operand of wgrad, whose reduction runs over rows.
    """

    name: str
    about: str
    activations: Generate
    weights: Generate
    gradients: Generate


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.rand(shape, generator=generator, device=generator.device, dtype=torch.float32)


def _reduction(shape: tuple[int, ...]) -> int:
    """n of the cell a weight of this shape contributes to."""
    return shape[0] * shape[-2]


def _made(draw: Callable[[tuple[int, ...], torch.dtype, torch.Generator], Tensor]) -> Generate:
    """Adds quantisation and placement to a drawing function."""

    def generate(
        shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator, device: torch.device | str
    ) -> Tensor:
        return draw(shape, dtype, generator).to(dtype).to(device)

    return generate


def _column_l1(w: Tensor, limit: float) -> Tensor:
    """Weights scaled so that each output channel's absolute sum over (K, Ci) is ``limit``."""
    total = w.abs().sum(dim=(0, w.dim() - 2), keepdim=True)
    return w * (limit / total.clamp(min=1e-30))


_signed = _made(lambda s, d, g: _normal(s, g))
_scaled = _made(lambda s, d, g: _normal(s, g) / math.sqrt(max(1, _reduction(s))))
_relu = _made(lambda s, d, g: _normal(s, g).clamp(min=0))
_positive = _made(lambda s, d, g: 0.5 + _uniform(s, g))
_positive_weights = _made(lambda s, d, g: (0.5 + _uniform(s, g)) / max(1, _reduction(s)))


def _cancel_weights(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Large weights whose sign flips from one 16-channel MMA step to the next; 1/64 of noise survives."""
    offset = torch.arange(shape[0], device=generator.device).view(-1, *[1] * (len(shape) - 1))
    channel = torch.arange(shape[-2], device=generator.device).view(-1, 1)
    step = offset * math.ceil(shape[-2] / 16) + channel // 16
    return (1 - 2 * (step % 2)) * (1 + _normal(shape, generator) / 64) / 16


def _row_signs(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Rows of one sign, flipping every 16 rows."""
    row = torch.arange(shape[0], device=generator.device).view(-1, 1)
    return (1 - 2 * ((row // 16) % 2)) * (1 + _normal(shape, generator) / 64)


def _heavy(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Log-normal magnitudes (sigma 2) with random signs, cut at 2000."""
    return (_normal(shape, generator) * torch.exp(2 * _normal(shape, generator))).clamp(-2000, 2000)


def _near_max(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    return 65504 * (0.9 + 0.08 * _uniform(shape, generator))


def _subnormal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Values spread over the subnormal range of the dtype, down to its smallest number."""
    fmt = FORMATS[format_name(dtype)]
    scale = 2.0 ** (-(fmt.bits - 1) * _uniform(shape, generator).double())  # (2^-(bits-1), 1]
    sign = 1 - 2 * (_uniform(shape, generator) < 0.5).double()
    return sign * (scale * 2.0**fmt.emin)


_heavy_weights = _made(lambda s, d, g: _column_l1(_heavy(s, d, g), 30.0))
_max_weights = _made(lambda s, d, g: _column_l1(0.5 + _uniform(s, g), 0.97))

#: By name. No forward or dgrad sum exceeds 65504 in exact arithmetic: heavy-tailed weights have column sums
#: of 30 against activations cut at 2000, near-max weights 0.97 against activations up to 64,194.
FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        Family("signed", "standard normal activations, weights of variance 1/n", _signed, _scaled, _signed),
        Family("relu", "half zeros, the rest positive: what follows a ReLU", _relu, _scaled, _signed),
        Family(
            "one_signed", "all positive: truncation bias adds up", _positive, _positive_weights, _positive
        ),
        Family(
            "cancelling",
            "large half-sums of opposite sign in consecutive MMA steps, small result",
            _made(lambda s, d, g: 1 + _normal(s, g) / 64),
            _made(_cancel_weights),
            _made(_row_signs),
        ),
        Family(
            "heavy_tailed",
            "log-normal magnitudes over six decades",
            _made(_heavy),
            _heavy_weights,
            _made(_heavy),
        ),
        Family("near_max", "activations and sums close to 65504", _made(_near_max), _max_weights, _positive),
        Family(
            "subnormal",
            "activations in the subnormal range of their format",
            _made(_subnormal),
            _scaled,
            _signed,
        ),
    )
}

#: Stands apart: compared bit by bit.
INTEGERS = Family(
    "integers",
    "small integers whose partial sums every format holds exactly: results must be equal bit by bit",
    _made(lambda s, d, g: torch.randint(-2, 3, s, generator=g, device=g.device)),
    _made(lambda s, d, g: torch.randint(-1, 2, s, generator=g, device=g.device)),
    _made(lambda s, d, g: torch.randint(-1, 2, s, generator=g, device=g.device)),
)
