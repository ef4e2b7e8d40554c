"""Times of one 3x3x3 layer on sets of a few tiles, as the deep levels of a network have them.

    python benchmarks/small_sets.py --out small.json
    python benchmarks/small_sets.py --voxels 254 --channels 256 --repeats 50 --out small.json

Forward and training step (forward and both gradients), fp16 on a GPU, fp32 on a CPU, maps kept, on as many
voxels of a surface. `kernel_us`: sum of the device times of all kernels of a call (torch.profiler); `us`: of
the call on the device from its first kernel to its last, launching hidden. On a CPU both are wall times.
Beside it spconv where it can be imported, on the same weights; `parts`: CTAs that share an output of ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import typer
from torch import Tensor

import voxmma
from voxmma._timing import Clock, synchronise
from voxmma.data import scenes
from voxmma.tools import bench
from voxmma.tuning import machine

import peers
from peer_problem import Problem, prepared

VOXELS = (254, 1082, 4541, 15578, 32493)
CHANNELS = (64, 128, 256)

Row = dict[str, Any]


def some_voxels(n: int) -> Tensor:
    """(n, 4) voxels of a wavy surface that lie together."""
    side = 16
    while len(coords := scenes.surface(side)) < n:
        side *= 2
    found = torch.from_numpy(coords)
    key = found[:, 1].long() // 8 << 40 | found[:, 2].long() // 8 << 20 | found[:, 3].long() // 8
    return found[key.argsort(stable=True)[:n]].contiguous()


def kernel_seconds(run: Callable[[int], object], clock: Clock) -> float:
    """Device time of all kernels of a call; on a CPU its wall time."""
    if clock.device.type != "cuda":
        return clock(run).median
    from torch.profiler import ProfilerActivity, profile

    for i in range(3):
        run(i)
    synchronise(clock.device)
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for i in range(clock.repeats):
            run(i)
        synchronise(clock.device)
    on_device = [event for event in found.key_averages() if str(event.device_type).endswith("CUDA")]
    return sum(event.self_device_time_total for event in on_device) * 1e-6 / clock.repeats


def measure(adapter: peers.Adapter, x: Tensor, w: Tensor, dy: Tensor, clock: Clock) -> Row:
    """us of the forward and of a step of one library's layer."""
    state, leaf, x = adapter.fresh(), adapter.weight(w), x.detach().requires_grad_()

    def forward(i: int) -> Tensor:
        with torch.no_grad():
            return adapter.forward(state, x, leaf)

    def step(i: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad(adapter.forward(state, x, leaf), (x, leaf), dy)

    row: Row = {"note": ""}
    for name, run in (("forward", forward), ("step", step)):
        taken = clock(run)
        row[f"{name}_us"], row[f"{name}_spread_us"] = taken.ms * 1e3, [v * 1e3 for v in taken.spread_ms]
        row[f"{name}_kernel_us"] = kernel_seconds(run, clock) * 1e6
    row["note"] = adapter.note()
    return row


def measure_layer(coords: Tensor, c: int, clock: Clock) -> list[Row]:
    """A row a library of a 3x3x3 layer of c channels on coords (N, 4)."""
    on_gpu = clock.device.type == "cuda"
    layer = peers.Layer(c, c, 3, 1, "fp16" if on_gpu else "fp32")
    problem = Problem(prepared(coords.numpy()), clock.device)
    dtype = peers.DTYPES[layer.dtype]
    n = len(problem.coords)
    generator = torch.Generator(clock.device).manual_seed(0)
    x, dy, w = (
        torch.randn(shape, generator=generator, device=clock.device).to(dtype)
        for shape in ((n, c), (n, c), (layer.volume, c, c))
    )
    w = w / (layer.volume * c) ** 0.5
    made = voxmma.nn.functional.spatially_sparse_conv(voxmma.Voxels(problem.coords, x), w, 3)
    libraries: list[tuple[str, type[peers.Adapter], str]] = [("voxmma", peers.Voxmma, "fp32")]
    if on_gpu and peers.installed("spconv"):
        libraries.append(("spconv", peers.Spconv, "implicit"))
    rows = []
    for name, adapter, variant in libraries:
        row: Row = {"lib": name, "variant": variant, "voxels": n, "channels": c, "dtype": layer.dtype}
        try:
            row |= measure(adapter(problem, layer, variant), x, w, dy, clock)
        except Exception as error:  # a peer may raise anything; the row says what
            if name == "voxmma":
                raise
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        rows.append(row | ({"parts": voxmma.explain(made).parts} if name == "voxmma" else {}))
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--voxels", type=int, action="append", help=f"again for more; default {VOXELS}")
    parser.add_argument("--channels", type=int, action="append", help=f"again for more; default {CHANNELS}")
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda if it can be used")
    parser.add_argument("--repeats", type=int, help="of each figure; default 50 on a GPU, 3 on a CPU")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    given = parser.parse_args(arguments)
    sizes = {"--voxels": given.voxels or VOXELS, "--channels": given.channels or CHANNELS}
    try:
        if bad := [name for name, values in sizes.items() if min(values) < 1]:
            raise ValueError(f"{bad[0]} must be at least 1")
        device = bench.chosen_device(given.device)
        on_gpu = device.type == "cuda"
        clock = Clock(device, (50 if on_gpu else 3) if given.repeats is None else given.repeats)
    except (typer.BadParameter, ValueError) as error:
        parser.error(str(error))
    if on_gpu:
        torch.cuda.set_device(device)
    result: Row = {
        "kind": "small_sets",
        **machine.labels(device),
        "spconv": peers.version("spconv") if on_gpu and peers.installed("spconv") else None,
        "repeats": clock.repeats,
        "rows": [],
    }
    for n in sizes["--voxels"]:
        coords = some_voxels(n)
        for c in sizes["--channels"]:
            for row in measure_layer(coords, c, clock):
                result["rows"].append(row)
                shown = {key: value for key, value in row.items() if key not in ("note", "dtype")}
                print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in shown.items()}))
        given.out.write_text(json.dumps(result, indent=1) + "\n")  # a run that is cut short keeps its sizes
    return 0


if __name__ == "__main__":
    sys.exit(main())
