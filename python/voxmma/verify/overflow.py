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

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from voxmma.dispatch.launches import LAUNCHES, leave
from voxmma.dispatch.rescale_op import _asked
from voxmma.ops.formats import FORMATS, largest_finite
from voxmma.ops.rescale import MAX_FP16, fp16_operands, overflow_bound


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


# ---- the guard ---------------------------------------------------------------------------------------------

_OPS = ("fprop", "dgrad", "wgrad")


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
        if name not in LAUNCHES:
            return func(*args, **(kwargs or {}))
        _asked.guards.append(self)
        try:
            result = func(*args, **(kwargs or {}))
        finally:
            _asked.guards.pop()
        made = (kwargs or {}).get("out", result)
        self._watch(2 if name == "voxmma::conv_wgrad" else int(_in_backward()), made)
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
