"""Overflow of fp16 accumulators: a bound computed on the device, the rescale that makes it fit, and a guard.

An accumulator that passes 65504 becomes infinite and stays infinite or turns NaN; it never comes back to a
finite wrong number. What is here prevents it or counts it, without ever waiting for the device, so that all
of it can be captured in a CUDA graph:

* `overflow_bound`: absmax(operand) x largest column sum of |weight| bounds every partial sum.
* `fp16_operands`, and `conv_rescaled` (torch.ops.voxmma.conv_rescaled): operands times powers of two that
  bring that bound below 65504, the sum in fp32 divided by them again. bf16 operands reach fp16 accumulators
  this way, and gradients of any size (3e5 of a GradScaler) an fp16 layer: with set_fp16_rescale(True), or
  without asking where an automatic rule chose the fp16 accumulator. What does not fit the *output* dtype is
  infinite, as everywhere.
* `OverflowGuard`: counts non-finite cells and inexact rescales per operation, and keeps the largest
  magnitude, in a small tensor on the device.
"""

from __future__ import annotations

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from voxmma import settings, torchflags
from voxmma.accuracy import FORMATS, largest_finite
from voxmma.audit import leave
from voxmma.tiles import chunk_of, select_tile

MAX_FP16 = FORMATS["fp16"].max

#: Largest power of two that a rescale multiplies by, as an exponent.
_MAX_SHIFT = 126


# ---- bound, certificate, rescale ---------------------------------------------------------------------------


def _grouped(weight: Tensor) -> Tensor:
    return weight if weight.dim() == 4 else weight.unsqueeze(1)


@torchflags.undisturbed()
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


@dataclass(frozen=True)
class Certificate:
    """The overflow bound of one call, read from the device."""

    bound: float
    shift: int
    """Multiplying the gathered operand by 2^-shift makes the bound fit; 0 when it does."""

    @property
    def fits(self) -> bool:
        """No partial sum can overflow. False for infinite and NaN bounds."""
        return self.bound <= MAX_FP16


def certificate(a: Tensor, weight: Tensor, *, transpose: bool = False, chunk: int = 0) -> Certificate:
    """The certificate of a call's operands; arguments as in :func:`overflow_bound`. Waits for the device."""
    value = float(overflow_bound(a, weight, transpose=transpose, chunk=chunk))
    if not math.isfinite(value):
        return Certificate(value, 0)
    return Certificate(value, max(0, math.ceil(math.log2(value / MAX_FP16))) if value > MAX_FP16 else 0)


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


@torchflags.undisturbed()
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


def rescaled_floor(
    floor: float, n: int, a: Tensor, weight: Tensor, *, transpose: bool = False, chunk: int = 0
) -> float:
    """The absolute part of an error bound (accuracy.Bound) of `n` products after a rescale of these operands.

    `floor` is that of the fp16 sums; they are divided by the factors, and so is what cut mantissas lose.
    Waits for the device.
    """
    got = fp16_operands(a, weight, transpose=transpose, chunk=chunk)
    largest = float(largest_finite(got.a))
    cut = 0.0 if bool(got.exact) else n * FORMATS["fp16"].tiny / 2 * (1.0 + largest)
    factors = float(got.a_factor.double() * got.w_factor.double())
    return floor * max(1.0, 1.0 / factors) + cut / factors


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


@torchflags.undisturbed()
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


# ---- the guard ---------------------------------------------------------------------------------------------

_OPS = ("fprop", "dgrad", "wgrad")


class _Asked(threading.local):
    """Guards that pass on the operation which this thread is in."""

    def __init__(self) -> None:
        self.guards: list[OverflowGuard] = []


_asked = _Asked()


class OverflowGuard(TorchDispatchMode):
    """Context that watches every result of its thread's convolutions, backward included, without waiting.

    Its tensors are made when it is, so it may be open while a CUDA graph is captured: replays go on counting.
    Example::

        guard = voxmma.OverflowGuard("cuda")
        with guard:
            loss(model(x)).backward()
        print(guard.read())            # waits for the device; `guard.counts` and `guard.largest` do not

    Args:
        device: where the watched convolutions run; results elsewhere are an error.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        device = torch.device(device)
        self.counts = torch.zeros(3, 3, dtype=torch.int64, device=device)
        """(fprop dgrad wgrad) x (launches, non-finite cells, rescales that cut a mantissa)"""
        self.largest = torch.zeros(3, dtype=torch.float32, device=device)
        """largest finite magnitude of fprop, dgrad, wgrad results"""
        self._lock = threading.Lock()  # one guard may be open in several threads

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled under a guard (torch asks from 2.9 on; before, it runs eagerly)."""
        return True

    def __exit__(self, *exception: Any) -> None:
        leave(self, lambda: super(OverflowGuard, self).__exit__(*exception))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name not in ("voxmma::conv", "voxmma::conv_rescaled", "voxmma::conv_wgrad"):
            return func(*args, **(kwargs or {}))
        _asked.guards.append(self)
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            _asked.guards.pop()
        self._watch(2 if name == "voxmma::conv_wgrad" else int(_in_backward()), result)
        return result

    def _watch(self, op: int, y: Tensor) -> None:
        if y.device.type != self.counts.device.type:
            raise RuntimeError(f"this guard is on {self.counts.device}, a convolution ran on {y.device}")
        finite = y.isfinite()
        wrong = y.numel() - finite.sum()
        peak = torch.where(finite, y, torch.zeros_like(y)).abs().amax().float() if y.numel() else None
        with self._lock:
            self.counts[op, 0] += 1
            self.counts[op, 1] += wrong
            if peak is not None:
                self.largest[op] = torch.maximum(self.largest[op], peak)

    def _inexact(self, exact: Tensor) -> None:
        if exact.device.type == self.counts.device.type:
            with self._lock:
                self.counts[int(_in_backward()), 2] += ~exact

    def read(self) -> dict[str, dict[str, float]]:
        """The figures by operation: launches, nonfinite, inexact, largest. Waits for the device."""
        largest = self.largest.tolist()
        return {
            op: {"launches": row[0], "nonfinite": row[1], "inexact": row[2], "largest": largest[i]}
            for i, (op, row) in enumerate(zip(_OPS, self.counts.tolist(), strict=True))
        }

    def reset(self) -> None:
        """Sets every figure to zero, in place and without waiting."""
        self.counts.zero_()
        self.largest.zero_()


def _in_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)
