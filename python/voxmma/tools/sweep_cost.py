"""What a sweep will take: products, bytes and seconds, block by block, before it runs.

The rates are those of an H100 (benchmarks/results/tiles-*.json; fp64 and memory: about 70 % of the maker's
figures), and rough ones of two CPU threads. On other devices the seconds are a guess; `--budget` holds a run
to its time whatever the estimate says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from voxmma.sparse.maps import kernel_map
from voxmma.tools.sweep import Grid
from voxmma.verify import trials
from voxmma.verify.trials import MODES, Mode


@dataclass(frozen=True)
class Rates:
    """What a device does."""

    wgmma: float
    """Tera-operations a second of 16-bit products with plain accumulators, on many channels"""
    promoted: float
    ieee: float
    tf32: float
    fp64: float
    """of cuBLAS"""
    simt64: float
    """of our own fp64 kernels"""
    memory: float
    """TB/s of elementwise passes"""
    launch: float
    """seconds a kernel launch"""
    call: float
    """seconds a call through a layer"""


H100 = Rates(400.0, 125.0, 40.0, 65.0, 45.0, 15.0, 2.2, 5e-6, 1.5e-4)
CPU = Rates(0.08, 0.08, 0.08, 0.08, 0.04, 0.04, 0.004, 5e-6, 3e-4)

#: Half of the full rate is reached at this many channels.
_HALF = 48
#: fp64 passes over a cell: metrics (percentile included) and one comparison of a repeat.
_METRIC_BYTES, _REPEAT_BYTES = 360, 6
#: fp64 passes over a gathered element of the reference: gather, widen, two products, two sums.
_GATHER_BYTES = 112


@dataclass(frozen=True)
class Block:
    """All rows of one kernel volume and channel count."""

    volume: int
    channels: int
    rows: int
    kernel_tflop: float
    """of the library's own kernels, all repeats"""
    reference_tflop: float
    """of the fp64 references"""
    seconds: float
    until: float
    """seconds from the start to the end of this block"""


def _rate(mode: Mode, op: str, channels: int, rates: Rates) -> float:
    """Tera-operations a second of one of our kernels."""
    if mode.dtype == torch.float64:
        return rates.simt64
    if mode.dtype == torch.float32:
        return (rates.tf32 if mode.tf32 else rates.ieee) * (0.7 if op == "wgrad" else 1.0)
    full = rates.promoted if "promoted" in mode.accumulator and op != "wgrad" else rates.wgmma
    return full * (0.7 if op == "wgrad" else 1.0) * channels / (channels + _HALF)


def _block(
    grid: Grid, volume: int, channels: int, voxels: int, pairs: int, repeats: int, rates: Rates
) -> tuple[int, float, float, float]:
    """(rows, operations of kernels, operations of references, seconds) of one block."""
    modes = [MODES[name] for name in grid.modes]
    formats = len({(mode.dtype, mode.tf32) for mode in modes})
    families = len(grid.families)
    flop = 2.0 * pairs * channels**2
    kernels = seconds = 0.0
    for op in grid.ops:
        cells = volume * channels**2 if op == "wgrad" else voxels * channels
        for mode in modes:
            once = max(rates.call, flop / (_rate(mode, op, channels, rates) * 1e12))
            forward = 0.0 if op == "fprop" else flop / (_rate(mode, "fprop", channels, rates) * 1e12)
            metrics = cells * (_METRIC_BYTES + _REPEAT_BYTES * (repeats - 1)) / (rates.memory * 1e12)
            seconds += families * (repeats * once + forward + metrics + 150 * rates.launch)
            kernels += families * (repeats * flop + (0.0 if op == "fprop" else flop))
        gathered = pairs * channels * _GATHER_BYTES / (rates.memory * 1e12)
        reference = 2 * flop / (rates.fp64 * 1e12) + gathered + 12 * volume * rates.launch
        seconds += families * formats * reference
    references = 2 * flop * families * formats * len(grid.ops)
    return len(modes) * families * len(grid.ops), kernels, references, seconds


def estimate(
    device: torch.device,
    grid: Grid,
    voxels: int | None = None,
    repeats: int | None = None,
    budget: float | None = None,
) -> dict[str, Any]:
    """The work of `sweep.run` with these arguments; the device itself need not be there.

    Returns:
        Plain data: device, voxels, pairs (by kernel volume), repeats, budget, blocks (fields of Block, in the
            order in which they are measured), seconds.
    """
    size, repeats = trials.defaults(device, voxels, repeats)
    x = trials.scene(torch.device("cpu"), size)
    rates = H100 if device.type == "cuda" else CPU
    pairs = {v: kernel_map(x.coord_set, trials.KERNEL_SIZES[v]).num_pairs for v in grid.volumes}
    blocks: list[Block] = []
    until = 0.0
    for volume in grid.volumes:
        for channels in grid.channels:
            rows, kernels, references, seconds = _block(
                grid, volume, channels, x.num_voxels, pairs[volume], repeats, rates
            )
            until += seconds
            blocks.append(Block(volume, channels, rows, kernels / 1e12, references / 1e12, seconds, until))
    return {
        "device": str(device),
        "voxels": x.num_voxels,
        "pairs": {str(volume): count for volume, count in pairs.items()},
        "repeats": repeats,
        "budget": budget,
        "blocks": [asdict(block) for block in blocks],
        "seconds": until,
    }


def render(result: dict[str, Any]) -> Table:
    """A line a block; what a budget leaves no time for is marked."""
    budget = math.inf if result["budget"] is None else result["budget"]
    total = f"{sum(block['rows'] for block in result['blocks']):,} rows, about {result['seconds']:.0f} s"
    machine = "the rates of an H100" if result["device"].startswith("cuda") else "rates of two CPU threads"
    table = Table(
        *("K", "C", "rows", "kernels, TFLOP", "fp64 references, TFLOP", "seconds", "until", ""),
        title=f"{total}, at {machine}; {result['voxels']:,} voxels, {result['repeats']} runs a row",
    )
    for block in result["blocks"]:
        begin = block["until"] - block["seconds"]
        verdict = "" if block["until"] <= budget else "in part" if begin < budget else "left out"
        table.add_row(
            *(str(block[key]) for key in ("volume", "channels", "rows")),
            *(f"{block[key]:.3g}" for key in ("kernel_tflop", "reference_tflop", "seconds")),
            f"{block['until']:.0f}",
            verdict,
        )
    return table


__all__: Sequence[str] = ("Block", "Rates", "estimate", "render")
