"""Host times of small calls: sets, maps, first and repeated layer calls, a training step. In microseconds.

    PYTHONPATH=python python benchmarks/host_times.py
    PYTHONPATH=python python benchmarks/host_times.py --against ../older/python --device cuda --out host.json

On so few voxels that the work itself is small. A time goes from an idle device to the call's return, waits
inside the call included: making a set or a map reads numbers back from a GPU. The least of all repeats is
reported. `--against` names the folder that holds another voxmma: both run in processes of their own, by
turns, and `ratio` is ours / theirs. fp16 unless a case says fp32.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VOXELS = 30
CHANNELS = 16

Case = tuple[Callable[[], Any], Callable[[Any], Any]]
"""what is prepared before the clock runs, and the call on it"""


def cases(device: str) -> dict[str, Case]:
    """By name; only what versions of voxmma have in common."""
    import torch

    import voxmma

    nn = voxmma.nn
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(5**3, generator=generator)[:VOXELS]
    columns = [torch.zeros_like(cells), cells // 25, cells // 5 % 5, cells % 5]
    coords = torch.stack(columns, dim=1).int().to(device)
    half, full = (torch.randn(VOXELS, CHANNELS, device=device).to(t) for t in (torch.float16, torch.float32))

    def on(layer: Any, dtype: torch.dtype = torch.float16) -> Any:
        return layer.to(device, dtype)

    def fresh(feats: torch.Tensor = half) -> Any:
        return voxmma.Voxels(voxmma.CoordSet(coords), feats)

    conv = on(nn.SparseConv3d(CHANNELS, CHANNELS, 3))
    conv_full = on(nn.SparseConv3d(CHANNELS, CHANNELS, 3), torch.float32)
    down = on(nn.SparseConv3d(CHANNELS, CHANNELS, 2, stride=2))
    up = on(nn.SparseConvTranspose3d(CHANNELS, CHANNELS, 2, stride=2))
    wide_down = on(nn.SparseConv3d(CHANNELS, CHANNELS, 3, stride=2))
    block, block_down = (
        nn.Sequential(layer, on(nn.BatchNorm(CHANNELS), torch.float32), nn.ReLU())
        for layer in (conv_full, on(nn.SparseConv3d(CHANNELS, CHANNELS, 2, stride=2), torch.float32))
    )

    def step(layer: Any) -> Callable[[Any], object]:
        return lambda x: layer(x).feats.sum().backward()

    def kept(make: Callable[[], Any]) -> Callable[[], Any]:
        made = make()
        return lambda: made

    held = fresh()  # as in a U-Net, whose skip connection holds what a transposed layer goes back to

    def trained() -> Any:
        return fresh(full.detach().requires_grad_())

    return {
        "set": (lambda: coords, lambda c: voxmma.CoordSet(c, 1)),
        "voxels": (coords.clone, lambda c: voxmma.Voxels(c, half, 1)),
        "voxels, known tensor": (
            kept(lambda: voxmma.Voxels(coords, half)),
            lambda x: voxmma.Voxels(coords, x.feats),
        ),
        "map 3x3x3": (lambda: voxmma.CoordSet(coords), lambda s: voxmma.kernel_map(s, 3)),
        "map 2x2x2 stride 2": (lambda: voxmma.CoordSet(coords), lambda s: voxmma.kernel_map(s, 2, stride=2)),
        "map 3x3x3, cached": (kept(lambda: voxmma.CoordSet(coords)), lambda s: voxmma.kernel_map(s, 3)),
        "first 3x3x3": (fresh, conv),
        "first 2x2x2 stride 2": (fresh, down),
        "first 3x3x3 stride 2": (fresh, wide_down),
        "first transposed": (lambda: down(fresh()), up),
        "first block, step": (trained, step(block)),
        "first strided block, step": (trained, step(block_down)),
        "warm 3x3x3": (kept(fresh), conv),
        "warm 3x3x3, fp32": (kept(lambda: fresh(full)), conv_full),
        "warm 2x2x2 stride 2": (kept(fresh), down),
        "warm transposed": (kept(lambda: down(held)), up),
        "warm block, step": (kept(trained), step(block)),
        "warm strided block, step": (kept(trained), step(block_down)),
    }


def least(case: Case, synchronise: Callable[[], object], repeats: int) -> float:
    """Microseconds of the fastest of `repeats` calls."""
    prepare, call = case
    best = float("inf")
    for _ in range(repeats):
        given = prepare()
        synchronise()
        start = time.perf_counter_ns()
        result = call(given)
        best = min(best, time.perf_counter_ns() - start)
        del given, result  # freed while no clock runs
    return best * 1e-3


def serve(device: str, repeats: int) -> None:
    """Answers names of cases on stdin with their least times; package and names come first."""
    import torch

    import voxmma

    torch.set_num_threads(1)
    made = cases(device)
    synchronise = torch.cuda.synchronize if device == "cuda" else lambda: None
    for case in made.values():
        least(case, synchronise, 20)
    gc.collect()
    gc.disable()
    print(json.dumps([voxmma.__file__, *made]), flush=True)
    for line in sys.stdin:
        print(least(made[line.strip()], synchronise, repeats), flush=True)


class Server:
    """A process in which the voxmma of a folder runs the cases."""

    def __init__(self, folder: str | None, device: str, repeats: int) -> None:
        environment = dict(os.environ)
        if folder is not None:
            environment["PYTHONPATH"] = str(Path(folder).resolve())
        command = [sys.executable, __file__, "--serve", "--device", device, "--repeats", str(repeats)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.package, *self.names = self._answer()

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"host_times: the measuring process ended with code {self.process.wait()}")
        return json.loads(line)

    def ask(self, name: str) -> float:
        assert self.process.stdin is not None
        print(name, file=self.process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        self.process.communicate()


def measure(folders: list[str | None], device: str, starts: int, rounds: int, repeats: int) -> dict[str, Any]:
    """Least times of every case for each folder: `starts` processes, `rounds` turns in each of them."""
    packages: list[str] = []
    best: dict[str, list[float]] = {}
    for _ in range(starts):
        servers = [Server(folder, device, repeats) for folder in folders]
        packages = [server.package for server in servers]
        for _ in range(rounds):
            for name in servers[0].names:
                times = [server.ask(name) for server in servers]
                best[name] = [min(pair) for pair in zip(best.get(name, times), times, strict=True)]
        for server in servers:
            server.close()
    rows = []
    for name, times in best.items():
        row: dict[str, Any] = {"what": name, "us": round(times[0], 2)}
        if len(times) == 2:
            row |= {"against_us": round(times[1], 2), "ratio": round(times[0] / times[1], 3)}
        rows.append(row)
    return {"packages": packages, "rows": rows}


def machine_of(device: str) -> dict[str, Any]:
    """Device, driver and versions, of this process' voxmma: that of the first folder."""
    from voxmma.dispatch import store
    from voxmma.tuning import machine

    where, gpu = machine.environment(), device == "cuda"
    name = where["gpus"][0] if gpu else where["cpu"]
    return {"device": name, "driver": store.driver_version() if gpu else None, "environment": where}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--against", metavar="PATH", help="the folder that holds another voxmma")
    parser.add_argument("--starts", type=int, default=3, help="processes one after the other")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each process")
    parser.add_argument("--repeats", type=int, default=100, help="calls of a case in one turn")
    parser.add_argument("--out", type=Path, help="write the JSON here, too")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.device, given.repeats)
        return
    folders = [None] if given.against is None else [None, given.against]
    found = measure(folders, given.device, given.starts, given.rounds, given.repeats)
    found = {**machine_of(given.device), "voxels": VOXELS, "channels": CHANNELS, **found}
    text = json.dumps({"kind": "host_times", **found}, indent=1)
    print(text)
    if given.out is not None:
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
