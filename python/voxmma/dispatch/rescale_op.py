"""torch.ops.voxmma.conv_rescaled: a convolution whose operands are made fp16 by powers of two."""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import Tensor

from voxmma._surroundings import undisturbed
from voxmma.dispatch import settings
from voxmma.dispatch.selection import select_tile
from voxmma.ops.formats import largest_finite
from voxmma.ops.kernels import chunk_of
from voxmma.ops.rescale import fp16_operands, safe_factor

# ---- the op ------------------------------------------------------------------------------------------------

_SCHEMA = (
    "(Tensor x, Tensor weight, Tensor? bias, Tensor[] map, Tensor[] map_t, SymInt n_out, bool symmetric, "
    "bool transpose, str accumulator, str tile, str dgrad_tile, str wgrad_tile, ScalarType out_dtype) -> "
    "Tensor"
)


@torch.library.custom_op("voxmma::conv_rescaled", mutates_args=(), schema=_SCHEMA)
def conv_rescaled(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    map_t: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    dgrad_tile: str,
    wgrad_tile: str,
    out_dtype: torch.dtype,
) -> Tensor:
    """torch.ops.voxmma.conv on operands made fp16 by powers of two, the result divided by them.

    Arguments as there, with these differences: `x` and `weight` are fp16, bf16 or fp32 and are rounded to
    fp16 only after they are scaled; `tile` and `dgrad_tile` take fp16 operands; `wgrad_tile` takes those of
    the layer (bf16 if either operand of the weight gradient is, else fp16); `out_dtype` is given. Gradients
    are rescaled in turn, each by its own factors, to any order; the weight's comes back in its own dtype.
    """
    with torch.autocast(x.device.type, enabled=False):
        # Rounded to the compute dtype first, as without rescale.
        rounded = weight.to(x.dtype) if x.dtype in (torch.float16, torch.bfloat16) else weight
        got = fp16_operands(x, rounded, transpose=transpose, chunk=chunk_of(tile))
        y = torch.ops.voxmma.conv(
            got.a, got.weight, None, map, map_t, n_out, symmetric, transpose, accumulator, tile, dgrad_tile,
            wgrad_tile, torch.float32,
        )  # fmt: skip
        y = got.restore(y)
        for guard in _asked.guards:
            guard._inexact(got.exact)
        if bias is not None:
            y = y + bias
        return y.to(out_dtype)


@conv_rescaled.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    map_t: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    dgrad_tile: str,
    wgrad_tile: str,
    out_dtype: torch.dtype,
) -> Tensor:
    groups = weight.shape[1] if weight.dim() == 4 else 1
    channels = groups * (weight.shape[-2] if transpose else weight.shape[-1])
    return x.new_empty((n_out, channels), dtype=out_dtype)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, *rest = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.rest = rest


def _wgrad_operand(t: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """An operand of the weight gradient, whose sums are fp32: only its own range can be too large."""
    if t.dtype == dtype or dtype != torch.float16:
        return t.to(dtype), None
    factor = safe_factor(largest_finite(t).float())
    return (t * factor).to(dtype), factor


@functools.lru_cache(maxsize=1024)
def _wide_tile(c_in: int, c_out: int, groups: int, device: torch.device, limits: settings.Limits) -> str:
    return select_tile("dgrad", torch.bfloat16, "fp32", c_in, c_out, groups, device, limits=limits).name


@undisturbed()
def _gradients(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    own, own_t, _, symmetric, transpose, accumulator, tile, dgrad_tile, wgrad_tile, _ = ctx.rest
    opposite, forward = (own, own_t) if symmetric else (own_t, own)
    needs_opposite = ctx.needs_input_grad[0] or (ctx.needs_input_grad[1] and transpose)
    if needs_opposite and not opposite:
        raise RuntimeError(
            "map_t is empty, but a gradient needs the map of the opposite direction "
            "(KernelMap.transposed().tensors)"
        )
    dx = dw = db = None
    if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
        db = dy.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    if x.dtype == torch.bfloat16:
        dy = dy.to(x.dtype)
    if ctx.needs_input_grad[0]:
        dx = conv_rescaled(
            dy, weight, None, opposite, forward, x.shape[0], symmetric, not transpose, accumulator,
            dgrad_tile, tile, wgrad_tile, x.dtype,
        )  # fmt: skip
    if ctx.needs_input_grad[1]:
        groups = weight.shape[1] if weight.dim() == 4 else 1
        dtype = torch.bfloat16 if torch.bfloat16 in (x.dtype, dy.dtype, weight.dtype) else torch.float16
        (a, a_factor), (b, b_factor) = _wgrad_operand(x, dtype), _wgrad_operand(dy, dtype)
        maps = (own, own_t)
        if transpose:
            a, b, maps = b, a, (opposite, forward)
        if dtype == torch.bfloat16:  # a gradient of this gradient is not rescaled: fp32 sums
            accumulator = "fp32"
            channels = (weight.shape[-2] * groups, weight.shape[-1] * groups)
            dgrad_tile = _wide_tile(*channels, groups, x.device, settings.get_limits())
        dw = torch.ops.voxmma.conv_wgrad(
            a,
            b,
            *maps,
            weight.shape[0],
            groups,
            symmetric,
            accumulator,
            wgrad_tile,
            dgrad_tile,
            torch.float32,
        )
        for factor in (a_factor, b_factor):
            dw = dw if factor is None else dw / factor
        dw = dw.reshape(weight.shape).to(weight.dtype)
    return dx, dw, db, [None] * len(own), [None] * len(own_t), *[None] * 8


conv_rescaled.register_autograd(_gradients, setup_context=_keep)


class _Asked(threading.local):
    """Guards that pass on the operation which this thread is in."""

    def __init__(self) -> None:
        self.guards: list[Any] = []


_asked = _Asked()
