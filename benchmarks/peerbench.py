"""benchmarks/peerbench.py: every installed library on the same coordinates, weights and gradients.

Each library runs in a process of its own, so that a crash, a leak or a time-out costs one row. A row has the
times of kernel map, forward, both gradients and the whole step, memory, the share of the device's roofline
(benchmarks/roofline.py) and the errors against fp64. Libraries that are not installed are listed as such, and
what fails is a row with the error.

`run` starts the processes and gathers plain data; `work` is what a process does.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

import numpy as np
import torch
import typer
from torch import Tensor

import voxmma
from voxmma import torchflags
from voxmma._timing import Clock, synchronise
from voxmma.data.scenes import Array
from voxmma.dispatch import settings
from voxmma.tools import bench
from voxmma.tuning import machine
from voxmma.verify import accuracy

import benchplots
import roofline
from peer_problem import Data, Layer, Problem, lookup, prepared
from peers import ADAPTERS, Adapter, Unsupported, installed, parse_library, version
from roofline import Rates

#: A row whose output is further from fp64 than this (rel-L2) computed something else.
WRONG = 0.05
_MARK = "@@voxmma "
#: Keeps libraries from compiling or remembering anything outside the run.
_ENVIRONMENT = {
    "SPCONV_DISABLE_JIT": "1",
    "CUMM_DISABLE_JIT": "1",
    "FLEX_GEMM_USE_AUTOTUNE_CACHE": "0",
    "FLEX_GEMM_AUTOSAVE_AUTOTUNE_CACHE": "0",
    "WARPCONVNET_AUTOTUNE_LOG": "false",
    "PYTHONUNBUFFERED": "1",
}
OPS = ("forward", "dgrad", "wgrad", "backward")
LEFT_OUT = "the budget was spent"


# ---- one row, in a library's own process -------------------------------------------------------------------


def _rows_of(coords: Tensor | None, ours: Tensor) -> Tensor | None:
    """Our row of each of a library's; None when the order is the same. RuntimeError unless one to one."""
    if coords is None:
        return None
    rows = lookup(ours, coords.to(ours.device))
    if len(coords) != len(ours) or bool((rows < 0).any()) or len(rows.unique()) != len(ours):
        raise RuntimeError(f"its {len(coords)} coordinates are not the {len(ours)} expected ones")
    return rows


def _mib(device: torch.device, since: int) -> float | None:
    if device.type != "cuda":
        return None
    return (torch.cuda.memory_allocated(device) - since) / 2**20


def measure(adapter: Adapter, data: Data, rates: Rates, repeats: int, cold: bool = True) -> dict[str, Any]:
    """Measures one adapter: the figures of a row (see `run`)."""
    problem, layer, device = adapter.problem, adapter.layer, adapter.problem.device
    on_gpu = device.type == "cuda"
    clock = Clock(device, repeats)
    w = adapter.weight(data.w)
    state = adapter.fresh()
    began = time.perf_counter()
    adapter.forward(state, data.x[0].clone().requires_grad_(), w)
    synchronise(device)
    row: dict[str, Any] = {"start_s": time.perf_counter() - began}
    in_rows = _rows_of(adapter.in_coords(state), problem.inputs(layer))
    out_rows = _rows_of(adapter.out_coords(state), problem.outputs(layer))
    xs = [(x if in_rows is None else x[in_rows]).detach().requires_grad_() for x in data.x]
    dys = [dy if out_rows is None else dy[out_rows] for dy in data.dy]
    count = data.sets

    def forward(i: int, kept: dict[str, Any] = state) -> Tensor:
        return adapter.forward(kept, xs[i % count], w)

    def inference(i: int, kept: dict[str, Any] = state) -> Tensor:
        with torch.no_grad():
            return adapter.forward(kept, xs[i % count].detach(), w)

    def step(i: int, kept: dict[str, Any] = state) -> tuple[Tensor, ...]:
        y = forward(i, kept)
        return y, *torch.autograd.grad(y, (xs[i % count], w), dys[i % count])

    def in_our_order(t: Tensor, rows: Tensor | None) -> Tensor:
        if rows is None:
            return t
        made = torch.empty_like(t)
        made[rows] = t
        return made

    y, dx, dw = step(0)
    synchronise(device)
    row["start_s"] = round(time.perf_counter() - began, 3)  # its own tuning included
    found = [
        accuracy.errors(result.detach(), *reference)
        for result, reference in zip(
            (in_our_order(y, out_rows), in_our_order(dx, in_rows), adapter.gradient(dw)),
            data.references,
            strict=True,
        )
    ]
    del y, dx, dw
    row["rel_l2"] = [error.rel_l2 for error in found]
    row["max_eta"] = [error.max_eta for error in found]
    row["note"] = adapter.note()
    if not max(row["rel_l2"]) < WRONG:
        raise RuntimeError(f"computes something else: rel-L2 of y, dx, dW {row['rel_l2']}")

    if on_gpu:
        torch.cuda.empty_cache()
        base = torch.cuda.memory_allocated(device)
        kept = adapter.fresh()
        step(0, kept)
        synchronise(device)
        row["map_mib"] = _mib(device, base)
        del kept
        peaks: dict[str, Callable[[int], object]] = {"forward_peak_mib": inference, "step_peak_mib": step}
        for name, run in peaks.items():
            torch.cuda.reset_peak_memory_stats(device)
            base = torch.cuda.memory_allocated(device)
            run(1)
            synchronise(device)
            row[name] = (torch.cuda.max_memory_allocated(device) - base) / 2**20

    timed: dict[str, tuple[Callable[..., object], Callable[[int], Any] | None]] = {
        "forward": (inference, None),
        "backward": (
            lambda i, y: torch.autograd.grad(y, (xs[i % count], w), dys[i % count]),
            forward,
        ),
    }
    for name, (timed_run, ready) in timed.items():
        _put(row, name, clock(timed_run, ready))
        if cold:
            _put(row, f"{name}_cold", clock(timed_run, ready, cold=True))
    row["host_us"] = clock.host_seconds(inference) * 1e6
    _gradients(row, clock, adapter, xs, w, dys, state, cold)
    _put(row, "step", clock.wall(step, calls=5 if on_gpu else 1))
    # Whatever is made once per coordinate set, things made at first use included.
    warm, cold_step = clock.wall(step), clock.wall(lambda i: step(i, adapter.fresh()))
    row["map_ms"] = max(0.0, cold_step.ms - warm.ms)
    _put(row, "first", clock.wall(lambda i: inference(i, adapter.fresh())))
    for op in OPS:
        limit = roofline.least_time(
            op,
            rates,
            pairs=data.pairs,
            n_in=len(problem.inputs(layer)),
            n_out=len(problem.outputs(layer)),
            volume=layer.volume,
            c_in=layer.c_in,
            c_out=layer.c_out,
            dtype=layer.dtype,
        )
        row[f"{op}_floor_ms"], row[f"{op}_bound"] = limit.seconds * 1e3, limit.bound
        taken = row.get(f"{op}_ms")
        row[f"{op}_of_floor"] = limit.seconds * 1e3 / taken if taken else None
        if op in ("forward", "backward"):
            row[f"{op}_intensity"] = limit.intensity
            row[f"{op}_tflops"] = limit.flops / taken / 1e9 if taken else None
    return row


def _put(row: dict[str, Any], name: str, timing: Any) -> None:
    row[f"{name}_ms"], row[f"{name}_spread_ms"] = timing.ms, timing.spread_ms


def _gradients(
    row: dict[str, Any],
    clock: Clock,
    adapter: Adapter,
    xs: list[Tensor],
    w: Tensor,
    dys: list[Tensor],
    state: dict[str, Any],
    cold: bool,
) -> None:
    """Input and weight gradient alone, where the library can compute one without the other."""
    count = len(xs)
    plain = [x.detach() for x in xs]

    def without_weight(i: int) -> Tensor:
        w.requires_grad_(False)
        try:
            return adapter.forward(state, xs[i % count], w)
        finally:
            w.requires_grad_(True)

    ways: dict[str, tuple[Callable[[int], Tensor], Callable[[int, Tensor], object]]] = {
        "dgrad": (without_weight, lambda i, y: torch.autograd.grad(y, xs[i % count], dys[i % count])),
        "wgrad": (
            lambda i: adapter.forward(state, plain[i % count], w),
            lambda i, y: torch.autograd.grad(y, w, dys[i % count]),
        ),
    }
    both = 0.0
    made: dict[str, Any] = {}
    for name, (ready, run) in ways.items():
        try:
            timing = clock(run, ready)
        except RuntimeError:
            return  # such as a library that needs both gradients
        both += timing.ms
        _put(made, name, timing)
        if cold:
            _put(made, f"{name}_cold", clock(run, ready, cold=True))
    if both < 1.5 * row["backward_ms"]:  # else each of them computed both
        row.update(made)


@torchflags.preserved()
@settings.override(fp32_precision=None)  # adapters set it
def work(job: dict[str, Any], say: Callable[[dict[str, Any]], None]) -> None:
    """A library's process: measures the units of a job and says each as it ends."""
    device = torch.device(job["device"])
    if job["rates"] is None:
        say({"rates": roofline.measure(device, tuple(job["dtypes"])).as_dict()})
        return
    rates = Rates(**job["rates"])
    name = job["lib"]
    with np.load(job["coords"]) as file:
        scenes = {scene: file[scene] for scene in file.files}
    problem: tuple[str, Problem] | None = None
    adapter: Adapter | None = None
    data: tuple[str, Layer, Data] | None = None
    for unit in job["units"]:
        layer, scene = Layer(**unit["layer"]), unit["scene"]
        say({"start": unit["id"]})
        try:
            if problem is None or problem[0] != scene:
                problem = data = None
                problem = (scene, Problem(scenes[scene], device))
            torchflags.set_tf32(layer.dtype == "tf32")
            adapter = ADAPTERS[name](problem[1], layer, job["variant"])
            if data is None or data[:2] != (scene, layer):
                data = None
                data = (scene, layer, Data(problem[1], layer))
            result = measure(adapter, data[2], rates, job["repeats"], job["cold"])
            result["pairs"] = data[2].pairs
            result["out_voxels"] = len(problem[1].outputs(layer))
        except Unsupported as error:
            result = {"unsupported": str(error)}
        except Exception as error:  # a peer may raise anything; the row says what
            result = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        say({"done": unit["id"], "row": result})
        adapter = None
        if "error" in result and not _alive(device):
            say({"dead": True})
            return
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _alive(device: torch.device) -> bool:
    """Whether the device still answers, which it does not after an illegal access."""
    try:
        synchronise(device)
        return float(torch.ones(8, device=device, dtype=torch.float32).sum()) == 8
    except RuntimeError:
        return False


# ---- the run -----------------------------------------------------------------------------------------------


def _lines(process: subprocess.Popen[str], limit: float) -> Iterator[dict[str, Any] | None]:
    """What a process says, as it says it; None when it said nothing for `limit` seconds."""
    said: queue.Queue[str | None] = queue.Queue()
    assert process.stdout is not None

    def read(stream: TextIO) -> None:
        for line in stream:
            said.put(line)
        said.put(None)

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    deadline = time.monotonic() + limit
    while True:
        try:
            line = said.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            yield None
            return
        if line is None:
            return
        if line.startswith(_MARK):
            deadline = time.monotonic() + limit
            yield json.loads(line.removeprefix(_MARK))


def _last_words(log: Path) -> str:
    """The last line of a process's standard error."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "said nothing"


def _start(job: dict[str, Any], folder: Path, log: Path) -> subprocess.Popen[str]:
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    env = {**os.environ, **_ENVIRONMENT}
    env["FLEX_GEMM_AUTOTUNE_CACHE_PATH"] = str(folder / "flexgemm.json")
    for name in ("WARPCONVNET_BENCHMARK_CACHE_DIR_OVERRIDE", "WARPCONVNET_BENCHMARK_CACHE_DIR"):
        env[name] = str(folder)
    # this folder, and this very voxmma, installed or not
    sources = [str(Path(file).resolve().parents[up]) for file, up in ((__file__, 0), (voxmma.__file__, 1))]
    given = [os.path.abspath(part) for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    env["PYTHONPATH"] = os.pathsep.join([*sources, *given])
    with log.open("a") as errors:
        return subprocess.Popen(
            [sys.executable, "-c", "import sys, peerbench; peerbench._main(sys.argv[1])", str(path)],
            stdout=subprocess.PIPE, stderr=errors, env=env, text=True, cwd=folder,
        )  # fmt: skip


def _library(
    job: dict[str, Any], folder: Path, timeout: float, end: float, advance: Callable[[str], None]
) -> dict[int, dict[str, Any]]:
    """Runs a library's units, in as many processes as it takes: what each unit gave.

    None starts after `end` (time.monotonic); those have no result.
    """
    results: dict[int, dict[str, Any]] = {}
    log = folder / f"{job['lib']}-{job['variant']}.log"
    title = f"{job['lib']} {job['variant']}"
    while todo := [unit for unit in job["units"] if unit["id"] not in results]:
        if time.monotonic() >= end:
            return results
        process = _start({**job, "units": todo}, folder, log)
        running: int | None = None
        why = ""
        try:
            for said in _lines(process, timeout):
                if said is None:
                    why = f"nothing for {timeout:g} s: stopped"
                    break
                if "start" in said:
                    if time.monotonic() >= end:
                        return results
                    running = said["start"]
                    advance(f"{title}: {next(u['name'] for u in todo if u['id'] == running)}")
                elif "done" in said:
                    results[said["done"]], running = said["row"], None
        finally:
            process.kill()
            process.wait()
        if running is not None:
            why = why or f"the process died ({process.returncode}): {_last_words(log)}"
            results[running] = {"error": why}
        elif not any(unit["id"] in results for unit in todo):
            for unit in todo:
                advance(f"{title}: did not start")
                results[unit["id"]] = {"error": why or f"did not start: {_last_words(log)}"}
    return results


def run(
    scenes: dict[str, Array],
    layers: Sequence[Layer],
    libraries: Sequence[tuple[str, str]],
    device: torch.device,
    *,
    repeats: int | None = None,
    cold: bool = True,
    timeout: float = 300.0,
    budget: float = math.inf,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures every library on every scene and layer.

    Args:
        scenes: coordinates (N, 4) by name. layers: what to measure. libraries: (name, variant), see
            benchmarks/peers.py.
        repeats: of each figure, default 20 on a GPU, 3 on a CPU. cold: measure with a cold cache too.
        timeout: seconds without an answer after which a process is stopped.
        budget: seconds after which no row is started; those left out say so.
        advance: called with a text before each unit that runs.

    Returns:
        Plain data: environment, device, driver, rates (fields of roofline.Rates), scenes, repeats, absent
        (libraries that are not installed) and rows. A row names lib, variant, version, scene, voxels, c_in,
        c_out, kernel, stride, transposed, volume, dtype, and holds `error`, `unsupported`, `left_out` or,
        times in ms as `NAME_ms` with the tenth and ninetieth percentile in `NAME_spread_ms`:

        - forward, backward, dgrad, wgrad on the device, inputs rotated; with `_cold`, caches flushed first.
          dgrad and wgrad are missing where the library computes both or none;
        - step: forward and backward on the wall clock, host included; first: map and forward from fresh
          coordinates; map_ms: a step from fresh coordinates less one with the map kept;
        - host_us: of a forward call; start_s: import aside, the first step with its own tuning;
        - map_mib, forward_peak_mib, step_peak_mib: memory kept by the map, and peaks above what was there;
        - rel_l2, max_eta: of y, dx, dW against fp64;
        - OP_floor_ms, OP_bound, OP_of_floor: least time of the roofline, what binds it, its share of the
          time; OP_tflops, OP_intensity.
    """
    on_gpu, end = device.type == "cuda", time.monotonic() + budget
    absent = [name for name, _ in libraries if not installed(name)]
    made = {name: prepared(coords) for name, coords in scenes.items()}
    units: list[dict[str, Any]] = [
        {"id": number, "scene": scene, "layer": asdict(layer), "name": f"{scene} {layer.name}"}
        for number, (scene, layer) in enumerate(itertools.product(made, layers))
    ]
    job: dict[str, Any] = {
        "device": str(device),
        "units": units,
        "repeats": repeats or (20 if on_gpu else 3),
        "cold": cold,
        "dtypes": list(dict.fromkeys(layer.dtype for layer in layers)),
    }
    rows = []
    with tempfile.TemporaryDirectory(prefix="voxmma-peers-") as name:
        folder = Path(name)
        job["coords"] = str(folder / "coords.npz")
        np.savez(folder / "coords.npz", **made)  # type: ignore[arg-type]
        rates = _rates(job, folder, timeout)
        for lib, variant in libraries:
            if lib in absent:
                continue
            if ADAPTERS[lib].needs_gpu and not on_gpu:
                given = {unit["id"]: {"unsupported": "runs on a GPU only"} for unit in units}
            else:
                task = {**job, "lib": lib, "variant": variant, "rates": rates}
                given = _library(task, folder, timeout, end, advance)
            for unit in units:
                layer = Layer(**unit["layer"])
                rows.append(
                    {
                        "lib": lib,
                        "variant": variant,
                        "version": version(lib),
                        "scene": unit["scene"],
                        "voxels": len(made[unit["scene"]]),
                        **asdict(layer),
                        "volume": layer.volume,
                        **given.get(unit["id"], {"left_out": LEFT_OUT}),
                    }
                )
    return {
        "kind": "peers",
        **machine.labels(device),
        "rates": rates,
        "repeats": job["repeats"],
        "limits": settings.get_limits(),
        "scenes": {scene: len(coords) for scene, coords in made.items()},
        "absent": absent,
        "rows": rows,
    }


def _rates(job: dict[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """The device's rates, from a process that leaves no memory behind."""
    log = folder / "rates.log"
    process = _start({**job, "lib": "voxmma", "variant": "", "rates": None}, folder, log)
    try:
        for said in _lines(process, timeout):
            if said is not None and "rates" in said:
                return dict(said["rates"])
    finally:
        process.kill()
        process.wait()
    raise RuntimeError(f"the rates of {job['device']} could not be measured: {_last_words(log)}")


# ---- command line ------------------------------------------------------------------------------------------


def peers(
    scene: Annotated[
        list[str] | None,
        typer.Option(help="surface, lidar, room, or FILE.npz; again for more. Default: surface, lidar."),
    ] = None,
    channels: Annotated[
        str, typer.Option(help="C or C_inxC_out, with commas.")
    ] = "16,32,64,96,128,256,32x64,128x64",
    kernel: Annotated[
        str,
        typer.Option(help="Kernel sizes, s and stride behind, t if transposed: 3,2s2,2t2."),
    ] = "3",
    dtype: Annotated[str, typer.Option(help="fp16, bf16, tf32, fp32, with commas.")] = "fp16",
    libs: Annotated[str | None, typer.Option(help="NAME or NAME:VARIANT, with commas. Default: all.")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1; default: cuda if it can be used.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Of each figure; default 20 on a GPU, 3 on a CPU.", min=1)
    ] = None,
    cold: Annotated[bool, typer.Option("--cold/--no-cold", help="Also with caches flushed.")] = True,
    timeout: Annotated[
        float, typer.Option(help="Seconds without an answer before a library is stopped.", min=1)
    ] = 300.0,
    budget: Annotated[float, typer.Option(help="Seconds after which no row is started.", min=1)] = math.inf,
    out: Annotated[Path, typer.Option(help="Folder for peers.json and peers.png.")] = Path("voxmma-peers"),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time every installed sparse convolution library, each in its own process, on the same operands.

    Times of map, forward, gradients and step, memory, share of the roofline and errors against fp64.
    The exit code is 1 if voxmma itself failed on a row.
    """
    from voxmma.tools import console

    target = bench.chosen_device(device)
    try:
        wanted = [parse_library(word) for word in libs.split(",")] if libs else [
            (name, adapter.variants[0]) for name, adapter in ADAPTERS.items()
        ]  # fmt: skip
        dtypes = dtype.split(",")
        for word in dtypes:
            if word not in roofline.BYTES:
                raise ValueError(f"dtype: {word!r} is none of {', '.join(roofline.BYTES)}")
        layers = [
            Layer(c_in, c_out, size, stride, word, transposed)
            for word in dtypes
            for size, stride, transposed in bench.parse_layers(kernel)
            for c_in, c_out in bench.parse_channels(channels)
        ]
        scenes = bench.load_scenes(scene or ["surface", "lidar"], target)
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    running = [name for name, _ in wanted if installed(name)]
    if target.type != "cuda":
        running = [name for name in running if not ADAPTERS[name].needs_gpu]
    count = len(scenes) * len(layers) * len(running)
    with console.progress(count) as advance:
        result = run(
            scenes,
            layers,
            wanted,
            target,
            repeats=repeats,
            cold=cold,
            timeout=timeout,
            budget=budget,
            advance=advance,
        )
    written = benchplots.save(result, out)
    console.show(benchplots.plain(result), benchplots.peers_table(result), as_json)
    typer.echo(f"written: {', '.join(str(path) for path in written)}", err=True)
    if any("error" in row for row in result["rows"] if row["lib"] == "voxmma"):
        typer.echo("voxmma failed: see the marked rows", err=True)
        raise typer.Exit(1)


def _main(path: str) -> None:
    # A library's own prints go to standard error, so that standard output is ours alone.
    ours = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def say(what: dict[str, Any]) -> None:
        ours.write(f"{_MARK}{json.dumps(what)}\n")
        ours.flush()

    with suppress(BrokenPipeError):  # the run was stopped
        work(json.loads(Path(path).read_text()), say)
    os._exit(0)  # some libraries' destructors crash


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(peers)

if __name__ == "__main__":
    app()
