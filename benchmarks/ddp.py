"""Training steps on several GPUs (DistributedDataParallel, one scene a process) against those on one.

    python benchmarks/ddp.py --out ddp.json
    python benchmarks/ddp.py --scenes DIR --processes 2 --libraries voxmma,spconv --path FOLDER_OF_SPCONV

A step is forward and backward from coordinates that nothing is known of, under autocast to fp16 with fp32
weights. Phases take turns, --rounds times, each --steps steps in a row, the last of them waited for; figures
are medians over the rounds, the slowest process counting. Of a row:

- alone_ms: a step of one process while the others wait. beside_ms: all processes, each for itself, without
  DDP: what they take from each other (memory, cores of the host).
- ddp_ms: under DDP; efficiency = alone_ms / ddp_ms, of_beside = beside_ms / ddp_ms. `options`: `default`, or
  `views`: gradient_as_bucket_view=True, and broadcast_buffers=False (statistics of norms are not taken from
  process 0 before every step); `static`: static_graph=True as well.
- gradients_agree: all processes have the same gradients, bit by bit. mean_rel: their relative L2 distance
  from the mean of the processes' own gradients.

With one process alone_ms and ddp_ms show what DDP costs the host. benchmarks/collect.py adds the file.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import voxmma
from voxmma._timing import synchronise
from voxmma.tuning import machine

import networks
import ranks
from network_scenes import scene
from networks import NETWORKS, Problem, Row, Runner

OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "views": {"gradient_as_bucket_view": True, "broadcast_buffers": False},
    "static": {"gradient_as_bucket_view": True, "broadcast_buffers": False, "static_graph": True},
}
JOBS = {
    True: ["spunet:indoor_scannet", "second:lidar_kitti", "spunet:lidar_dense", "spunet:surface_512"],
    False: ["spunet:room", "second:street", "spunet:street", "spunet:surface"],
}
"""NETWORK:SCENE with a folder of scenes and without one"""


class Rank:
    """This process's part of a job in one library."""

    def __init__(self, lib: str, given: argparse.Namespace, device: torch.device, store: dist.Store) -> None:
        self.given, self.device, self.store = given, device, store
        name, place = given.job.split(":", 1)
        network = NETWORKS[name]
        problem = Problem(network, scene(place, given.scenes, given.voxels), 1, device)
        problem.feats += 0.01 * given.rank  # gradients that are not those of the others
        self.voxels = len(problem.target)
        self.runner = Runner(network, lib, networks.drawn(network).state_dict(), problem)
        self.net = self.runner.net.train()
        self.half = torch.float16 if device.type == "cuda" else torch.bfloat16
        self.met = 0

    def meet(self) -> None:
        """Waits for the others, the device idle and the host asleep."""
        synchronise(self.device)
        self.met += 1
        self.store.set(f"{self.met}-{self.given.rank}", "")
        for rank in range(self.given.of):
            self.store.wait([f"{self.met}-{rank}"], datetime.timedelta(seconds=self.given.timeout))

    def step(self, net: nn.Module) -> None:
        net.zero_grad(set_to_none=True)
        self.runner.net = net
        with torch.autocast(self.device.type, self.half):
            made = self.runner.run(self.runner.input(torch.float32))
        torch.stack([self.runner.feats(y).float().square().mean() for y in made]).sum().backward()

    def time(self, net: nn.Module) -> float:
        """Milliseconds a step, of `--steps` in a row."""
        synchronise(self.device)
        start = time.perf_counter()
        for _ in range(self.given.steps):
            self.step(net)
        synchronise(self.device)
        return (time.perf_counter() - start) / self.given.steps * 1e3

    def gradients(self, net: nn.Module) -> torch.Tensor:
        self.step(net)
        return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def checked(rank: Rank, wrapped: nn.Module) -> Row:
    """Gradients of DDP on all processes, against the mean of their own."""
    n = rank.given.of
    own, mean = rank.gradients(rank.net), rank.gradients(wrapped)
    if n == 1:
        return {}
    everyone = [torch.empty_like(mean) for _ in range(n)]
    dist.all_gather(everyone, mean)
    dist.all_reduce(own)
    apart = (mean.double() - own.double() / n).norm() / (own.double() / n).norm()
    return {"gradients_agree": all(torch.equal(everyone[0], g) for g in everyone), "mean_rel": float(apart)}


def work(given: argparse.Namespace) -> None:
    """A process of `measure`: its times of every phase, in FOLDER/RANK.json."""
    device, store = ranks.join(given)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    voxmma.set_fp32_precision("ieee")
    if given.of == 1:  # to see what DDP itself costs
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store), rank=0, world_size=1,
        )  # fmt: skip
    rank = Rank(given.work, given, device, store)
    devices = [device] if device.type == "cuda" else None
    wrapped = {
        name: nn.parallel.DistributedDataParallel(
            copy.deepcopy(rank.net), device_ids=devices, **OPTIONS[name]
        )
        for name in given.options.split(",")
    }
    checks = {name: checked(rank, net) for name, net in wrapped.items()}
    phases: dict[str, Callable[[], float]] = {
        "alone": lambda: rank.time(rank.net) if given.rank == 0 else 0.0,
        "beside": lambda: rank.time(rank.net),
        **{name: lambda net=net: rank.time(net) for name, net in wrapped.items()},  # type: ignore[misc]
    }
    times: dict[str, list[float]] = {name: [] for name in phases}
    for number in range(given.rounds + 1):
        for name, phase in phases.items():
            rank.meet()
            taken = phase()
            if number:  # the first round is not counted
                times[name].append(taken)
    found = {"voxels": rank.voxels, "times": times, "checks": checks}
    (given.folder / f"{given.rank}.json").write_text(json.dumps(found))
    rank.meet()
    ranks.leave(given)


def rows_of(found: list[Row]) -> list[Row]:
    """A row an option, of what all processes measured."""

    def median(name: str) -> float:
        return statistics.median(
            max(values) for values in zip(*(f["times"][name] for f in found), strict=True)
        )

    alone, beside, rows = median("alone"), median("beside"), []
    for name, check in found[0]["checks"].items():
        ddp = median(name)
        row = {"options": name, "voxels": found[0]["voxels"], "alone_ms": alone, "beside_ms": beside}
        rows.append(row | {"ddp_ms": ddp, "efficiency": alone / ddp, "of_beside": beside / ddp} | check)
    return rows


def measure(lib: str, job: str, options: list[str], n: int, timeout: float) -> list[Row]:
    """The rows of a library in a job."""
    with tempfile.TemporaryDirectory(prefix="voxmma-ddp-") as name:
        arguments = ["--work", lib, "--job", job, *options]
        ranks.together(Path(__file__).resolve(), arguments, n, Path(name), timeout)
        return rows_of([json.loads((Path(name) / f"{rank}.json").read_text()) for rank in range(n)])


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", action="append", help="NETWORK:SCENE; again for more")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--options", default=",".join(OPTIONS), help=f"of {', '.join(OPTIONS)}")
    parser.add_argument("--steps", type=int, default=8, help="in a row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of a job")
    parser.add_argument("--out", type=Path, default=Path("ddp.json"))
    ranks.add_arguments(parser)
    given = parser.parse_args(arguments)
    ranks.add_packages(given)
    if given.work:
        (given.job,) = given.job
        work(given)
    libraries, jobs = ranks.libraries_of(parser, given), given.job or JOBS[given.scenes is not None]
    for job in jobs:
        if job.partition(":")[0] not in NETWORKS or ":" not in job:
            parser.error(f"--job: expected NETWORK:SCENE, got {job!r}; networks are {', '.join(NETWORKS)}")
    if unknown := [name for name in given.options.split(",") if name not in OPTIONS]:
        parser.error(f"no options {unknown[0]!r}; there are {', '.join(OPTIONS)}")
    if min(given.processes, given.steps, given.rounds) < 1:
        parser.error("--processes, --steps and --rounds must be at least 1")
    device = torch.device(given.device)
    if device.type == "cuda" and given.processes > torch.cuda.device_count():
        parser.error(f"--processes: {torch.cuda.device_count()} GPUs are here, not {given.processes}")
    names = ("scenes", "options", "steps", "rounds", "voxels", "device", "timeout")
    options = ranks.options_of(given, *names)
    result: Row = {
        "kind": "ddp",
        **machine.labels(device),
        "steps": given.steps,
        "rounds": given.rounds,
    }
    result |= {"absent": {lib: why for lib in libraries if (why := networks.missing(lib))}, "rows": []}
    end = time.monotonic() + given.budget
    for job in jobs:
        for lib in (lib for lib in libraries if lib not in result["absent"]):
            name, _, place = job.partition(":")
            head: Row = {"network": name, "scene": place, "lib": lib, "version": networks.version(lib)}
            head["processes"] = given.processes
            left = end - time.monotonic()
            try:
                made = [{"left_out": "no time was left"}]
                if left > 0:
                    made = measure(lib, job, options, given.processes, min(given.timeout, left))
            except Exception as error:  # a library may raise anything; the row says what
                traceback.print_exc()
                made = [{"error": networks.said(error)}]
            for row in made:
                result["rows"].append({"options": "", **head, **row})
                print(json.dumps(result["rows"][-1]), flush=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    for lib, why in result["absent"].items():
        print(f"{lib} is absent: {why}", file=sys.stderr)
    return 1 if any("error" in row and row["lib"] == "voxmma" for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
