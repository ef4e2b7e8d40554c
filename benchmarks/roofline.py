"""The roofline: the least time in which a device could do a convolution, from rates measured on that device.

    least time = max(2 * pairs * C_in * C_out / MMA rate, compulsory bytes / bandwidth)

The MMA rate is the larger of what one instruction reaches with its operands in registers (the probe of the
gate) and what a large dense matrix product of the vendor's library reaches. Compulsory bytes are every
operand read once and every result written once, features, weights and gradients; a kernel map is not counted,
as each library has its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from voxmma import _C, torchflags
from voxmma._surroundings import undisturbed
from voxmma._timing import Clock
from voxmma.ops import formats

#: Kinds of _C.mma_rate by dtype.
_KINDS = {"fp16": 0, "bf16": 2, "tf32": 3}
_DTYPES = ("fp16", "bf16", "tf32", "fp32")
BYTES = {"fp16": 2, "bf16": 2, "tf32": 4, "fp32": 4}


@dataclass(frozen=True)
class Rates:
    """What a device can do: TFLOP/s by dtype ('fp32': at the accuracy of fp32), GB/s of a copy."""

    tflops: dict[str, float]
    bandwidth: float
    probe: dict[str, float]
    """TFLOP/s of one mma.sync instruction, by dtype; empty on a CPU."""
    gemm: dict[str, float]
    """TFLOP/s of a dense matrix product, by dtype."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class LeastTime:
    """Least seconds of an operation and what binds it, 'compute' or 'memory'."""

    seconds: float
    bound: str
    flops: float
    bytes: float

    @property
    def intensity(self) -> float:
        """FLOP per compulsory byte."""
        return self.flops / self.bytes if self.bytes else 0.0


def _best(run: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Least seconds of `run`."""
    taken = Clock(device, repeats)(lambda i: run())
    return taken.low if device.type == "cuda" else taken.least


def _gemm(device: torch.device, dtype: str, size: int) -> float:
    """TFLOP/s of size x size x size in `dtype`; fp32 with TF32 off."""
    a = torch.randn(size, size, device=device, dtype=torch.float32).to(formats.DTYPES[dtype])
    b = torch.randn(size, size, device=device, dtype=torch.float32).to(formats.DTYPES[dtype])
    out = torch.empty_like(a)
    with undisturbed(), torchflags.preserved():
        torchflags.set_tf32(dtype == "tf32")
        return 2 * size**3 / _best(lambda: torch.mm(a, b, out=out), device, 5) / 1e12


def _copy(device: torch.device, words: int) -> float:
    """GB/s, read and written, of a copy of so many 32-bit words."""
    source = torch.zeros(words, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 8 * words / _best(lambda: target.copy_(source), device, 5) / 1e9


def measure(device: torch.device, dtypes: tuple[str, ...] = ("fp16",)) -> Rates:
    """Measures the rates of a device: about a tenth of a second each on a GPU.

    On a CPU every dtype has the rate of an fp32 product, in which it computes there.
    """
    unknown = [name for name in dtypes if name not in _DTYPES]
    if unknown:
        raise ValueError(f"dtypes: {unknown[0]!r} is none of {', '.join(_DTYPES)}")
    on_gpu = device.type == "cuda"
    bandwidth = _copy(device, 1 << (28 if on_gpu else 23))
    if not on_gpu:
        rate = _gemm(device, "fp32", 768)
        return Rates(dict.fromkeys(dtypes, rate), bandwidth, {}, {"fp32": rate})
    probe, gemm = {}, {}
    with torch.cuda.device(device):
        for name in dtypes:
            kind = _KINDS.get(name, _KINDS["tf32"])
            gemm[name] = _gemm(device, name, 8192 if name in ("fp16", "bf16") else 4096)
            if _C.HAS_CUDA:
                # Three TF32 products make one at the accuracy of fp32.
                probe[name] = _C.mma_rate(kind) / (3 if name == "fp32" else 1)
    tflops = {name: max(gemm[name], probe.get(name, 0.0)) for name in dtypes}
    return Rates(tflops, bandwidth, probe, gemm)


def least_time(
    op: str,
    rates: Rates,
    *,
    pairs: int,
    n_in: int,
    n_out: int,
    volume: int,
    c_in: int,
    c_out: int,
    dtype: str,
) -> LeastTime:
    """The least time of 'forward', 'dgrad', 'wgrad' or 'backward' (both gradients, dy read once).

    Args:
        pairs: (offset, output row) pairs with an input. n_in, n_out: rows. volume: offsets of the kernel.
        dtype: of all operands, a key of `rates.tflops`.
    """
    word = BYTES[dtype]
    x, y, w = n_in * c_in * word, n_out * c_out * word, volume * c_in * c_out * word
    products = 2.0 * pairs * c_in * c_out
    flops, bytes_ = {
        "forward": (products, x + w + y),
        "dgrad": (products, y + w + x),
        "wgrad": (products, x + y + w),
        "backward": (2 * products, 2 * x + y + 2 * w),
    }[op]
    compute, memory = flops / (rates.tflops[dtype] * 1e12), bytes_ / (rates.bandwidth * 1e9)
    return LeastTime(max(compute, memory), "compute" if compute >= memory else "memory", flops, bytes_)
