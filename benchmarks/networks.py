"""Whole networks, from coordinates on the device to the result, in voxmma and in other libraries.

    python benchmarks/networks.py --out networks.json
    python benchmarks/networks.py --scenes DIR --libraries voxmma,spconv --path FOLDER_OF_SPCONV --out r.json

Networks are those of voxmma.models: SpUNet and MinkUNet34C, SECOND's backbone, ResNet21D, a VAE decoder, and
one 3x3x3 layer, on grids of random voxels and at deep levels. In other libraries the same networks are built
from theirs, layer by layer, with the same weights. DIR holds NAME.npz with `coords` (N, 3), integers,
distinct: indoor_scannet, lidar_kitti, lidar_nuscenes, lidar_dense, surface_256, surface_512; without it
scenes are generated. Each library runs in a process of its own, all on the same cores of the host, and takes
its turn in every job; one that cannot be imported is named with the reason. The first jobs are those of the
README. Rows are written as they are measured, and what stands in the file already is not measured again: a
run that ended, or whose --budget did, goes on where it stopped. Of a row:

- infer_ms: inference, fp16 weights and features, everything made anew from the coordinates; kept_ms: with
  maps kept, where the library can; train_ms: fp32 weights, autocast to fp16, forward and backward from the
  coordinates. Wall times from an idle GPU to an idle GPU, medians; `_least_ms` the least.
- gpu_ms, kernels: sum and number of all kernels and copies in such a call, from the profiler; idle: share of
  the wall time that is not kernels. train_gpu_ms, ... likewise.
- infer_mib, train_mib: peak of memory beyond what was there before.
- rel_l2, rel_l2_fp32: relative L2 error of the result with fp16 and with fp32 weights and features, against
  the same weights in plain torch and fp64. cells_missing, cells_more: voxels of the result that are in the
  reference or here alone; errors are of those in both. seconds: that measuring the row took.

`voxmma-engine` is the network as voxmma.engine compiles it, on a GPU CUDA graphs: no training, and nothing of
what is compiled once in the times; infer_mib has its buffers. Its result is read in every call. It is no copy
(copy=False): as with the other libraries a result is held once, but here the next call writes over it.
stream_ms: of a frame among several in a row with copies, each read when the next one has been called.

`voxmma-spconv` is voxmma.compat.spconv, `voxmma-rows` the same code with voxmma's own layers: the quotient of
the two is what the interface costs.

On a CPU everything is fp32, without kernels and memory. benchmarks/collect.py adds the file to the results.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import voxmma
from voxmma import models
from voxmma import nn as vnn
from voxmma._timing import Clock, synchronise
from voxmma.tuning import machine

import host_cores
from network_libraries import LIBRARIES, USUAL, Index, Torch, ported, shrunk
from network_scenes import MARGIN, scene

Row = dict[str, Any]
Array = np.ndarray
ENGINE = "voxmma-engine"

# ---- what is measured --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    make: Callable[[], nn.Module]
    channels: int
    """of the input"""
    height_first: bool = False
    """columns (batch, z, y, x)"""
    factor: int = 1
    """how much coarser than the scene its input is; the scene is then the target"""


NETWORKS: dict[str, Network] = {
    "spunet": Network(lambda: models.spunet(6, 20), 6),
    "minkunet34c": Network(lambda: models.minkunet("34C", 6, 20), 6),
    "second": Network(lambda: models.SECONDBackbone(4), 4, height_first=True),
    "resnet21d": Network(lambda: models.ResNet21D(4), 4),
    "vae": Network(lambda: models.VAEDecoder((256, 128, 64, 32), unpruned=0), 256, factor=8),
    **{
        f"conv{c}": Network(lambda c=c: vnn.Sequential(vnn.SparseConv3d(c, c, 3, bias=False)), c)  # type: ignore[misc]
        for c in (4, 16, 32, 64, 128, 256)
    },
}


@dataclass(frozen=True)
class Job:
    network: str
    scene: str
    """a file of the folder or a generated scene; 'NAME/4': on a grid coarser by 4"""
    batch: int = 1

    @property
    def name(self) -> str:
        return f"{self.network}:{self.scene}:{self.batch}"


def jobs(folder: bool, grids: Sequence[int] = (10_000, 100_000, 1_000_000)) -> list[Job]:
    """The table's rows, of scenes in a folder or of generated ones; the most important first."""
    if folder:
        indoor, lidar, dense = "indoor_scannet", "lidar_kitti", "lidar_dense"
        surfaces, more = ["surface_256", "surface_512"], "lidar_nuscenes"
    else:
        indoor, surfaces = "room", ["surface"]
        lidar = dense = more = "street"
    made = [Job("spunet", indoor), Job("second", lidar), Job("spunet", indoor, 4), Job("second", lidar, 4)]
    made += [Job("spunet", name) for name in (dense, surfaces[-1], more)]
    made += [Job("second", more), Job("second", dense)]
    made += [Job("minkunet34c", indoor), Job("resnet21d", lidar), Job("vae", surfaces[0])]
    made += [Job("minkunet34c", indoor, 4), Job("resnet21d", lidar, 4), Job("vae", surfaces[0], 4)]
    made += [Job("spunet", more, 4), Job("minkunet34c", dense), Job("resnet21d", dense)]
    made += [Job("vae", surface) for surface in surfaces[1:]]
    made += [Job(f"conv{c}", f"grid_{n}") for n in grids for c in (4, 16, 32, 64, 128)]
    made += [Job(f"conv{c}", f"{indoor}/{2**level}") for level in range(5) for c in (64, 128, 256)]
    return list(dict.fromkeys(made))


class Problem:
    """A network's input on a device: `batch` times the same scene."""

    def __init__(self, network: Network, cells: Array, batch: int, device: torch.device) -> None:
        if network.height_first:
            cells = cells[:, ::-1]
        batches = [np.insert(cells, 0, b, axis=1) for b in range(batch)]
        self.batch = batch
        self.target = torch.from_numpy(np.ascontiguousarray(np.concatenate(batches))).to(device)
        self.factor = network.factor
        self.coords = torch.unique(shrunk(self.target, self.factor), dim=0)
        self.shape = [-(-(int(side) + 2 * MARGIN) // 64) * 64 // self.factor for side in cells.max(0)]
        feats = torch.randn(len(self.coords), network.channels, generator=torch.Generator().manual_seed(1))
        self.feats = feats.to(device)


class Runner:
    """A network in one library, with the weights of a reference."""

    def __init__(self, network: Network, lib: str, state: dict[str, Tensor], problem: Problem) -> None:
        self.problem = problem
        net = network.make()
        net.load_state_dict(state)
        kind = LIBRARIES[lib]
        self.library = None if kind is None else kind(problem.feats.device)
        self.as_engine = lib == ENGINE
        self.engine: Any = None
        self.keeps_maps = not self.as_engine and (self.library is None or self.library.keeps_maps)
        self.net = net if self.library is None else ported(net, self.library)[0]
        self.net.to(problem.feats.device)

    def prepare(self, dtype: torch.dtype) -> None:
        """What is done once for a type: an engine is compiled, for a quarter more voxels than there are."""
        self.net.to(dtype)
        if self.as_engine:
            p = self.problem
            example = voxmma.Voxels(p.coords, p.feats.to(dtype), batch_size=p.batch)
            self.engine = voxmma.engine.compile(self.net, example)

    def input(self, dtype: torch.dtype) -> tuple[Any, ...]:
        """A tensor of the library and, for a decoder, the target; on coordinates that it has not seen."""
        p = self.problem
        coords, feats = p.coords.clone(), p.feats.to(dtype)
        if self.library is not None:
            return self.library.start(coords, feats, p), p.target
        if self.engine is not None:
            return ((coords, feats),)
        x = voxmma.Voxels(coords, feats, batch_size=p.batch, stride=p.factor)
        return (x,) if p.factor == 1 else (x, voxmma.CoordSet(p.target.clone(), p.batch))

    def run(self, given: tuple[Any, ...]) -> list[Any]:
        """The result and whatever else the loss shall see."""
        made = self.net(*given) if self.engine is None else self.engine(*given, copy=False).get()
        if self.library is not None:
            return made
        if isinstance(made, tuple):
            return [made[0], *made[1]]
        return [made[-1] if isinstance(made, list) else made]

    def feats(self, x: Any) -> Tensor:
        return x.feats if self.library is None else self.library.feats(x)

    def coords(self, x: Any) -> Tensor:
        return x.coords if self.library is None else self.library.coords(x)


# ---- measuring ---------------------------------------------------------------------------------------------


def drawn(network: Network) -> nn.Module:
    """The network with weights that keep the size of features, the same in every call."""
    net = network.make()
    generator = torch.Generator().manual_seed(0)
    for module in net.modules():
        if isinstance(module, vnn.SparseConv3d):
            k, c_in, _ = module.weight.shape
            scale = (2.0 / (c_in * max(1.0, 0.35 * k))) ** 0.5
            module.weight.data = torch.randn(module.weight.shape, generator=generator) * scale
            if module.bias is not None:
                module.bias.data.zero_()
    return net


def reference(network: Network, problem: Problem, device: torch.device) -> dict[str, Any]:
    """Weights, statistics of the norms on the problem, and its result in plain torch and fp64."""
    net, library = drawn(network), Torch(device)
    copy, port = ported(net, library)
    copy.to(device, torch.float64)
    for _, norm in port.norms:
        norm.momentum = 1.0

    def run() -> Any:
        return copy(library.start(problem.coords, problem.feats.double(), problem), problem.target)[0]

    with torch.no_grad():
        run()  # training: the norms take the statistics of this input
        for ours, norm in port.norms:
            for name in ("running_mean", "running_var"):
                getattr(norm, name).copy_(getattr(norm, name).float())  # as the state dict will hold them
                getattr(ours, name).copy_(getattr(norm, name))
        copy.eval()
        made = run()
    return {
        "state": net.state_dict(),
        "coords": library.coords(made).cpu(),
        "feats": library.feats(made).cpu(),
    }


def errors(runner: Runner, made: Any, wanted: dict[str, Any]) -> Row:
    """rel_l2 over the cells in both, and how many are in one alone. RuntimeError if none is in both."""
    coords, feats = runner.coords(made).cpu(), runner.feats(made).double().cpu()
    rows = Index(coords).find(wanted["coords"])
    there = rows >= 0
    if not bool(there.any()):
        raise RuntimeError(
            f"none of the reference's {len(there)} voxels is among the {len(coords)} of the result"
        )
    expected = wanted["feats"][there]
    error = float((feats[rows[there]] - expected).norm() / expected.norm())
    both = int(there.sum())
    return {"rel_l2": error, "cells_missing": len(there) - both, "cells_more": len(coords) - both}


def wall(call: Callable[[], object], repeats: int, device: torch.device) -> tuple[float, float]:
    """Median and least wall time in ms, from an idle device to an idle device."""
    for _ in range(min(3, repeats - 1)):
        call()
    taken = Clock(device, repeats).wall(lambda i: call())
    return taken.ms, taken.least * 1e3


def on_gpu(call: Callable[[], object], device: torch.device) -> tuple[float, int, float]:
    """Time of all kernels and copies in ms, their number, and the peak of memory in MiB, of one call."""
    from torch.profiler import ProfilerActivity, profile

    synchronise(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    synchronise(device)
    peak = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        call()
        synchronise(device)
    events = [e for e in seen.key_averages() if str(e.device_type).endswith("CUDA")]
    return sum(e.self_device_time_total for e in events) / 1e3, sum(e.count for e in events), peak


FRAMES = 10


def in_a_row(runner: Runner, dtype: torch.dtype) -> None:
    """Frames of an engine, read one behind."""
    last = None
    for _ in range(FRAMES):
        result = runner.engine(*runner.input(dtype))
        if last is not None:
            last.get()
        last = result
    assert last is not None
    last.get()


def infer(runner: Runner, wanted: dict[str, Any], half: torch.dtype, repeats: int) -> Row:
    """Errors, and the figures of inference."""
    device = runner.problem.feats.device
    runner.net.eval()
    with torch.inference_mode():
        runner.prepare(torch.float32)
        exact = errors(runner, runner.run(runner.input(torch.float32))[0], wanted)
        runner.prepare(half)
        row = errors(runner, runner.run(runner.input(half))[0], wanted)
        row["rel_l2_fp32"] = exact["rel_l2"]

        def call() -> object:
            return runner.run(runner.input(half))

        row["infer_ms"], row["infer_least_ms"] = wall(call, repeats, device)
        if device.type == "cuda":
            row["gpu_ms"], row["kernels"], row["infer_mib"] = on_gpu(call, device)
            if runner.engine is not None:
                row["infer_mib"] += runner.engine.memory / 2**20
            row["idle"] = max(0.0, 1.0 - row["gpu_ms"] / row["infer_ms"])
        if runner.engine is not None:
            median, least = wall(lambda: in_a_row(runner, half), repeats, device)
            row["stream_ms"], row["stream_least_ms"] = median / FRAMES, least / FRAMES
        if runner.keeps_maps:
            given = runner.input(half)
            row["kept_ms"], row["kept_least_ms"] = wall(lambda: runner.run(given), repeats, device)
    return row


def train(runner: Runner, half: torch.dtype, repeats: int) -> Row:
    """The figures of training."""
    device = runner.problem.feats.device
    runner.net.train()

    def step() -> None:
        runner.net.zero_grad(set_to_none=True)
        with torch.autocast(device.type, half, enabled=half != torch.float32):
            made = runner.run(runner.input(torch.float32))
        torch.stack([runner.feats(y).float().square().mean() for y in made]).sum().backward()

    step()
    missing = [name for name, parameter in runner.net.named_parameters() if parameter.grad is None]
    if missing:
        raise RuntimeError(f"no gradient for {', '.join(missing[:5])}")
    row: Row = {}
    row["train_ms"], row["train_least_ms"] = wall(step, repeats, device)
    if device.type == "cuda":
        row["train_gpu_ms"], row["train_kernels"], row["train_mib"] = on_gpu(step, device)
        row["train_idle"] = max(0.0, 1.0 - row["train_gpu_ms"] / row["train_ms"])
    return row


def measure(job: Job, lib: str, cells: Array, wanted: Row, device: torch.device, repeats: int) -> Row:
    """The figures of a row (see the head of this file); `train_error` where training alone fails."""
    half = torch.float16 if device.type == "cuda" else torch.float32
    network = NETWORKS[job.network]
    problem = Problem(network, cells, job.batch, device)
    runner = Runner(network, lib, wanted["state"], problem)
    row: Row = {"parameters": sum(parameter.numel() for parameter in runner.net.parameters())}
    row |= infer(runner, wanted, half, repeats)
    if lib == ENGINE:
        return row
    runner = Runner(network, lib, wanted["state"], problem)
    try:
        row |= train(runner, half, repeats)
    except Exception as error:  # a library may raise anything
        traceback.print_exc()
        row["train_error"] = said(error)
    return row


def said(error: Exception) -> str:
    """An exception in a row."""
    return f"{type(error).__name__}: {error}".strip()[:400]


# ---- processes ---------------------------------------------------------------------------------------------


def work(lib: str, device: torch.device, repeats: int) -> None:
    """A library's process: a job a line on standard input, its row a line on standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    voxmma.set_fp32_precision("ieee")
    kind, hello = LIBRARIES.get(lib), {}
    if device.type == "cuda":
        host_cores.pin()
    try:
        torch.zeros(1, device=device)
        if kind is not None:
            kind(device)
    except Exception as error:  # a library may raise anything where it is imported
        traceback.print_exc()
        hello = {"absent": said(error)}
    out.write(json.dumps(hello) + "\n")
    for line in sys.stdin:
        given = json.loads(line)
        job, file = Job(**given["job"]), Path(given["reference"])
        cells = np.load(given["cells"])
        try:
            if lib == "reference":
                network = NETWORKS[job.network]
                problem = Problem(network, cells, job.batch, device)
                torch.save(reference(network, problem, device), file)
                row: Row = {}
            else:
                wanted = torch.load(file, weights_only=True)
                row = measure(job, lib, cells, wanted, device, repeats)
        except Exception as error:  # a library may raise anything; the row says what
            traceback.print_exc()
            row = {"error": said(error)}
        gc.collect()
        if device.type == "cuda":
            try:
                synchronise(device)
                torch.cuda.empty_cache()
            except RuntimeError:  # after a faulty kernel nothing runs in this process any more
                row["broken"] = True
        out.write(json.dumps(row) + "\n")


class Worker:
    """A library's process; started again after it died."""

    def __init__(self, lib: str, options: list[str], log: Path) -> None:
        self.lib, self.options, self.log = lib, options, log
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.greeted = False
        self.absent: str | None = None
        """why there is no such library, where there is none"""

    def start(self) -> None:
        """Returns at once; what is imported is imported meanwhile."""
        if self.process is not None:
            return
        command = [sys.executable, str(Path(__file__).resolve()), "--work", self.lib, *self.options]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1
            )
        self.lines, self.greeted = queue.Queue(), False
        stream, lines = self.process.stdout, self.lines
        assert stream is not None

        def read() -> None:
            for line in stream:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()

    def _line(self, end: float, timeout: float) -> Row:
        """The next line; one with `error` if the process dies or says nothing until `end`."""
        assert self.process is not None
        try:
            line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
        except queue.Empty:
            self.close()
            return {"error": f"no answer in {timeout:.0f} s"}
        if line is None:
            code = self.process.wait()
            self.close()
            last = [text for text in self.log.read_text(errors="replace").splitlines() if text.strip()][-1:]
            return {"error": f"the process died ({code}): {' '.join(last)[:300]}"}
        row: Row = json.loads(line)
        return row

    def ready(self, timeout: float) -> Row:
        """Waits until the library is imported: {}, or why it was not."""
        self.start()
        if self.greeted or self.absent is not None:
            return {}
        hello = self._line(time.monotonic() + timeout, timeout)
        self.absent = hello.get("absent")
        self.greeted = not hello
        return hello

    def ask(self, job: Row, timeout: float) -> Row:
        """The row of a job; one with `error` if the process dies or says nothing for `timeout` seconds."""
        start = time.monotonic()
        end = start + timeout
        if hello := self.ready(timeout):
            return hello
        assert self.process is not None and self.process.stdin is not None
        with suppress(OSError):  # of a process that has died
            self.process.stdin.write(json.dumps(job) + "\n")
        row = self._line(end, timeout)
        row["seconds"] = round(time.monotonic() - start, 1)
        if row.pop("broken", False):
            self.close()
        return row

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def version(lib: str) -> str:
    """Of an installed library, '' where there is no record of it."""
    kind = LIBRARIES[lib]
    if kind is None:
        return voxmma.__version__
    for name in kind.distributions:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def missing(lib: str) -> str | None:
    """Why a library cannot be imported; None where it may be there."""
    kind = LIBRARIES[lib]
    there = kind is None or importlib.util.find_spec(kind.package) is not None
    return None if there or kind is None else f"no module named {kind.package}"


#: Of a result: what has to be alike for its rows to stand together.
SAME = ("kind", "device", "driver", "environment", "repeats", "dtype")


def key(row: Row) -> tuple[Any, ...]:
    """What names a row."""
    return row["network"], row["scene"], row["batch"], row["lib"]


def new_result(device: torch.device, repeats: int) -> Row:
    """A result without rows."""
    dtype = "fp16" if device.type == "cuda" else "fp32"
    kind = {"kind": "networks", **machine.labels(device), "repeats": repeats, "dtype": dtype}
    return {**kind, "absent": {}, "rows": []}


def run(
    todo: Sequence[Job],
    libraries: Sequence[str],
    device: torch.device,
    *,
    folder: Path | None = None,
    paths: Sequence[str] = (),
    voxels: int | None = None,
    repeats: int = 15,
    budget: float = math.inf,
    timeout: float = 300.0,
    known: Sequence[Row] = (),
    show: Callable[[Row], None] = lambda row: None,
    keep: Callable[[Row], None] = lambda result: None,
) -> Row:
    """Measures every library in every job.

    Args:
        folder: of the scenes; None = generated ones, of about `voxels` voxels.
        paths: folders in front of sys.path of the processes of other libraries.
        budget: seconds after which nothing is measured any more; rows left out say so. timeout: of a row.
        known: rows that stay, and are not measured again where they have figures.
        show: called with each new row. keep: called with everything so far, after each.
    """
    end = time.monotonic() + budget
    result = new_result(device, repeats)
    rows: dict[tuple[Any, ...], Row] = {key(row): row for row in known}
    options = ["--device", str(device), "--repeats", str(repeats)]
    options += [word for path in paths for word in ("--path", path)]
    absent: dict[str, str] = result["absent"]
    absent |= {lib: why for lib in libraries if (why := missing(lib)) is not None}

    def measured(job: Job, lib: str) -> bool:
        row = rows.get((job.network, job.scene, job.batch, lib), {})
        return "infer_ms" in row or "unsupported" in row

    def add(row: Row) -> None:
        rows[key(row)] = row
        result["rows"] = list(rows.values())
        show(row)
        keep(result)

    open_jobs = [(job, [lib for lib in libraries if not measured(job, lib)]) for job in todo]
    result["rows"] = list(rows.values())
    with tempfile.TemporaryDirectory(prefix="voxmma-networks-") as name:
        wanted = {lib for _, libs in open_jobs for lib in libs if lib not in absent}
        workers = {lib: Worker(lib, options, Path(name) / f"{lib}.log") for lib in wanted | {"reference"}}
        try:
            used = workers.items() if wanted and budget > 0 else ()
            for _, worker in used:
                worker.start()
            for lib, worker in used:
                if "absent" in (hello := worker.ready(max(0.0, min(timeout, end - time.monotonic())))):
                    absent[lib] = hello["absent"]
            for job, libs in open_jobs:
                here = [lib for lib in libs if lib not in absent]
                if not here:
                    continue
                task = {"job": asdict(job), "cells": f"{name}/cells.npy", "reference": f"{name}/reference.pt"}
                head: Row = {**asdict(job)}

                def ask(lib: str, task: Row = task) -> Row:
                    left = end - time.monotonic()
                    row = workers[lib].ask(task, min(timeout, left)) if left > 0 else {"error": ""}
                    cut = "error" in row and time.monotonic() >= end
                    return {"left_out": "no time was left"} if cut else row

                failed: Row | None = None
                if time.monotonic() >= end:
                    failed = {"left_out": "no time was left"}
                try:
                    if failed is None:
                        cells = scene(job.scene, folder, voxels)
                        np.save(task["cells"], cells)
                        head["voxels"] = len(cells) * job.batch
                        made = ask("reference")
                        if "left_out" in made:
                            failed = made
                        elif why := made.get("error") or made.get("absent"):
                            failed = {"error": f"reference: {why}"}
                except (OSError, KeyError, ValueError) as error:
                    failed = {"error": f"scene: {said(error)}"}
                for lib in here:
                    row = {"lib": lib, "version": version(lib), **head}
                    kind = LIBRARIES[lib]
                    if kind is not None and kind.needs_gpu and device.type != "cuda":
                        row["unsupported"] = "runs on a GPU only"
                    elif lib == ENGINE and NETWORKS[job.network].factor != 1:
                        row["unsupported"] = "prunes to a target"
                    else:
                        row |= failed if failed is not None else ask(lib)
                    add(row)
        finally:
            for worker in workers.values():
                worker.close()
    return result


# ---- command line ------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    """A row as a line of text."""
    name = f"{row['network']:12} {row['scene']:18} x{row['batch']} {row['lib']:14}"
    for why in ("error", "unsupported", "left_out"):
        if why in row:
            return f"{name} {why}: {row[why]}"
    figures = [
        ("infer", "infer_ms", ".3f"), ("kept", "kept_ms", ".3f"), ("gpu", "gpu_ms", ".3f"),
        ("idle", "idle", ".0%"), ("kernels", "kernels", "d"), ("MiB", "infer_mib", ".0f"),
        ("train", "train_ms", ".3f"), ("gpu", "train_gpu_ms", ".3f"), ("MiB", "train_mib", ".0f"),
        ("err", "rel_l2", ".1e"), ("err32", "rel_l2_fp32", ".1e"),
    ]  # fmt: skip
    shown = [f"{label} {row[key]:{pattern}}" for label, key, pattern in figures if key in row]
    shown += [f"training failed: {row['train_error']}"] if "train_error" in row else []
    apart = row["cells_missing"] or row["cells_more"]
    shown += [f"cells -{row['cells_missing']} +{row['cells_more']}"] if apart else []
    shown += [f"{row['seconds']:.0f} s"] if "seconds" in row else []
    return f"{name} {row['voxels']:>9,}  {'  '.join(shown)}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenes", type=Path, metavar="DIR", help="folder of NAME.npz; default: generated scenes"
    )
    parser.add_argument(
        "--libraries", help=f"of {', '.join(LIBRARIES)}; default: of {', '.join(USUAL)} those installed"
    )
    parser.add_argument("--path", action="append", default=[], help="folder with another library's packages")
    parser.add_argument("--networks", help=f"of {', '.join(NETWORKS)}; default: all")
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="jobs with it in the name"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the jobs and stop")
    parser.add_argument("--voxels", type=int, help="size of generated scenes and grids, about")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--budget", type=float, default=math.inf, metavar="SECONDS")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of a row")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, default=Path("networks.json"))
    parser.add_argument("--again", action="store_true", help="measure rows anew that are in --out already")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    device = torch.device(given.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    if given.work in (None, "voxmma", ENGINE, "reference"):
        ours = list(sys.path)
    sys.path[:0] = given.path
    if given.work:
        if given.work in ("voxmma", ENGINE, "reference"):
            sys.path[:] = ours
        work(given.work, device, given.repeats)
        return 0
    libraries = given.libraries.split(",") if given.libraries else list(USUAL)
    networks = given.networks.split(",") if given.networks else list(NETWORKS)
    for what, names, there in (("library", libraries, LIBRARIES), ("network", networks, NETWORKS)):
        unknown = [name for name in names if name not in there]
        if unknown:
            parser.error(f"no {what} {unknown[0]!r}; there are {', '.join(there)}")
    if given.scenes is not None and not given.scenes.is_dir():
        parser.error(f"--scenes: {given.scenes} is no folder")
    grids = {"grids": (given.voxels,)} if given.voxels else {}
    todo = [job for job in jobs(given.scenes is not None, **grids) if job.network in networks]
    todo = [job for job in todo if not given.only or any(text in job.name for text in given.only)]
    if given.list:
        print("\n".join(job.name for job in todo))
        return 0
    if not todo:
        parser.error("no job is left")

    known: list[Row] = []
    if given.out.exists():
        former, mine = json.loads(given.out.read_text()), new_result(device, given.repeats)
        apart = [name for name in SAME if former.get(name) != mine[name]]
        if apart and not given.again:
            parser.error(f"{given.out} has another {', '.join(apart)}: name another --out, or say --again")
        known = [] if apart else former["rows"]
        if given.again:
            asked = {(job.network, job.scene, job.batch, lib) for job in todo for lib in libraries}
            known = [row for row in known if key(row) not in asked]

    def keep(result: Row) -> None:
        written = given.out.with_name(f".{given.out.name}")
        written.write_text(json.dumps(result, indent=1) + "\n")
        written.replace(given.out)

    result = run(
        todo, libraries, device, folder=given.scenes, paths=given.path, voxels=given.voxels,
        repeats=given.repeats, budget=given.budget, timeout=given.timeout, known=known,
        show=lambda row: print(line(row), flush=True), keep=keep,
    )  # fmt: skip
    keep(result)
    for lib, why in result["absent"].items():
        print(f"{lib} is absent: {why}", file=sys.stderr)
    print(f"written: {given.out}", file=sys.stderr)
    return 1 if any("error" in row and row["lib"] == "voxmma" for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
