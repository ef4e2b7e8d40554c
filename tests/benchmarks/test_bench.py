"""Timing, rooflines, the peers benchmark with stand-ins for peers, and the scaling benchmark."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import voxmma
from voxmma import _timing as timing
from voxmma import torchflags
from voxmma.compat.convert import LAYOUTS, convert_weight
from voxmma.tools import bench

import benchplots
import peerbench
import peers
import roofline
import scaling
from conftest import random_coords, script, surface_coords
from peer_problem import Data, Layer, Problem, lookup, prepared
from peers import Unsupported
from roofline import Rates

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
RATES = Rates({"fp16": 100.0, "fp32": 10.0}, 1000.0, {}, {})


def invoke(*arguments: str, code: int = 0) -> Any:
    name, *options = arguments
    result = CliRunner().invoke({"peers": peerbench, "scaling": scaling}[name].app, options)
    assert result.exit_code == code, result.output
    return result


# ---- timing ------------------------------------------------------------------------------------------------


def test_summary_is_median_and_percentiles() -> None:
    found = timing.summary([float(i) for i in range(11)])
    assert (found.median, found.low, found.high, found.count) == (5.0, 1.0, 9.0, 11)
    assert found.ms == 5000.0 and found.spread_ms == [1000.0, 9000.0]
    with pytest.raises(ValueError, match="empty"):
        timing.summary([])
    with pytest.raises(ValueError, match="at least 1"):
        timing.Clock(CPU, 0)


def test_race_takes_turns_and_times_only_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def prepare(i: int) -> int:
        now[0] += 5.0
        return 10 * i

    def run(name: str) -> Any:
        def body(i: int, given: int) -> None:
            assert given == 10 * i
            order.append(name)
            now[0] += ord(name)

        return body

    found = timing.Clock(CPU, 4).race({name: run(name) for name in "abc"}, prepare)
    assert "".join(order[6:]) == "abcbcacababc"  # after two calls of each to warm up
    assert {name: (result.low, result.high, result.count) for name, result in found.items()} == {
        name: (ord(name), ord(name), 4) for name in "abc"
    }


def test_cold_runs_flush_before_each_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    clock = timing.Clock(CPU, 3)
    monkeypatch.setattr(clock, "flush", lambda: events.append("flush"))
    clock(lambda i: events.append("run"))
    assert "flush" not in events
    events.clear()
    clock(lambda i: events.append("run"), cold=True)
    assert events[2:] == ["flush", "run"] * 3


def test_rotated_inputs_exceed_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "l2_bytes", lambda device: 50)
    assert [timing.input_sets(CPU, size) for size in (1, 20, 50, 100, 1000)] == [8, 5, 2, 2, 2]
    assert timing.input_sets(CPU, 1000, least=1) == 1


@pytest.mark.gpu
def test_launch_overhead_is_not_in_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    x = torch.zeros(8, device=device)

    def slow_host(i: int) -> None:
        time.sleep(2e-3)
        x.add_(1)

    cycles: list[int] = []
    sleep = torch.cuda._sleep
    monkeypatch.setattr(torch.cuda, "_sleep", lambda n: (cycles.append(n), sleep(n)))
    clock = timing.Clock(device, 5)
    clock(slow_host)
    assert len(cycles) == 5 and min(cycles) > 2e-3 * 2e9  # the device is kept for longer than the host takes
    assert clock.host_seconds(slow_host) > 2e-3 and clock.wall(slow_host).median > 2e-3


# ---- roofline ----------------------------------------------------------------------------------------------


def test_the_floor_is_the_larger_of_arithmetic_and_traffic() -> None:
    size: dict[str, Any] = {"n_in": 1000, "n_out": 500, "volume": 27, "c_in": 64, "c_out": 32}
    found = roofline.least_time("forward", RATES, pairs=10**6, dtype="fp16", **size)
    flops, traffic = 2 * 10**6 * 64 * 32, 2 * (1000 * 64 + 27 * 64 * 32 + 500 * 32)
    assert (found.flops, found.bytes, found.bound) == (flops, traffic, "compute")
    assert found.seconds == pytest.approx(flops / 1e14)
    assert found.intensity == pytest.approx(flops / traffic)
    few = roofline.least_time("forward", RATES, pairs=10, dtype="fp16", **size)
    assert few.bound == "memory" and few.seconds == pytest.approx(traffic / 1e12)
    both = roofline.least_time("backward", RATES, pairs=10**6, dtype="fp16", **size)
    parts = [roofline.least_time(op, RATES, pairs=10**6, dtype="fp16", **size) for op in ("dgrad", "wgrad")]
    assert both.flops == sum(part.flops for part in parts)
    assert both.bytes == sum(part.bytes for part in parts) - 2 * 500 * 32  # dy is read once


def test_rates_are_measured(device: torch.device) -> None:
    found = roofline.measure(device, ("fp32",) if device.type == "cpu" else ("fp16", "tf32", "fp32"))
    assert found.bandwidth > 0.5 and all(rate > 1e-3 for rate in found.tflops.values())
    if device.type == "cuda":
        assert found.tflops["fp16"] > found.tflops["tf32"] > found.tflops["fp32"]
        assert all(found.tflops[name] >= found.probe[name] for name in found.probe)
    with pytest.raises(ValueError, match="'fp8' is none of"):
        roofline.measure(device, ("fp8",))


# ---- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "torch_transposed"])
@pytest.mark.parametrize("kernel", [2, 3])
def test_weights_go_to_a_layout_and_back(layout: str, kernel: int) -> None:
    weight = torch.randn(kernel**3, 4, 5)
    assert torch.equal(convert_weight(peers.to_layout(weight, layout, kernel), layout, kernel), weight)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (5, 1), (2, 2), (3, 2), (5, 2), (2, 3)])
def test_pairs_found_with_torch_are_those_of_the_library(kernel: int, stride: int) -> None:
    coords = prepared(random_coords(200, 6, batch=2).numpy())
    problem, layer = Problem(coords, CPU), Layer(4, 4, kernel, stride)
    voxels = voxmma.Voxels(problem.coords, torch.zeros(len(coords), 1))
    mapping = voxmma.kernel_map(voxels, kernel, stride=stride)
    assert torch.equal(mapping.out_coords.coords, problem.outputs(layer))
    for (rows, out), (rows_, out_) in zip(problem.pairs(layer), mapping.pairs(), strict=True):
        assert torch.equal(rows, rows_) and torch.equal(out, out_)
    if stride > 1:
        back, onto = Layer(4, 4, kernel, stride, transposed=True), mapping.transposed()
        assert problem.inputs(back) is problem.outputs(layer) and problem.outputs(back) is problem.coords
        assert torch.equal(onto.in_coords.coords, problem.inputs(back))
        assert torch.equal(onto.out_coords.coords, problem.outputs(back))
        for (rows, out), (rows_, out_) in zip(problem.pairs(back), onto.pairs(), strict=True):
            assert set(zip(rows.tolist(), out.tolist(), strict=True)) == set(
                zip(rows_.tolist(), out_.tolist(), strict=True)
            )


def test_prepared_coordinates() -> None:
    given = np.array([[1, 5, -2, 3], [0, 4, 0, 3], [1, 5, -2, 3], [0, 9, 9, 9]], dtype=np.int16)
    made = prepared(given)
    assert made.dtype == np.int32 and made.tolist() == [[0, 0, 2, 0], [0, 5, 11, 6], [1, 1, 0, 0]]
    with pytest.raises(ValueError, match="float64"):
        prepared(given.astype(float))


def test_lookup_finds_negative_coordinates_and_nothing_else() -> None:
    rows = torch.tensor([[0, -1, 2, 3], [1, 0, 0, 0]])
    queries = torch.tensor([[1, 0, 0, 0], [0, -1, 2, 3], [0, 1, 2, 3], [2, 0, 0, 0]])
    assert lookup(rows, queries).tolist() == [1, 0, -1, -1]
    assert lookup(rows[:0], queries).tolist() == [-1] * 4


def test_libraries_by_name() -> None:
    assert peers.parse_library("spconv") == ("spconv", "implicit")
    assert peers.parse_library("spconv:native") == ("spconv", "native")
    for wrong in ("spconv:fast", "numpy"):
        with pytest.raises(ValueError, match=r"has the variants|is none of"):
            peers.parse_library(wrong)
    assert peers.installed("torch") and peers.version("torch") == torch.__version__


def test_gpu_libraries_say_that_they_need_one() -> None:
    problem = Problem(prepared(surface_coords(4).numpy()), CPU)
    with pytest.raises(Unsupported, match="GPU only"):
        peers.ADAPTERS["spconv"](problem, Layer(4, 4), "implicit")
    with pytest.raises(Unsupported, match="variant"):
        peers.ADAPTERS["torch"](problem, Layer(4, 4), "other")


def test_spconv_transposes_on_the_map_of_its_strided_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for spconv, whose rows beyond are in an order of its own."""
    problem = Problem(prepared(random_coords(80, 6, batch=2).numpy()), CPU)
    layer, made = Layer(4, 6, 2, 2, "fp32", True), {"map": 0}
    cells = problem.inputs(layer)
    order = torch.randperm(len(cells), generator=torch.Generator().manual_seed(1))
    place = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))

    class Tensor:
        def __init__(self, features: Any, indices: Any, shape: Any, batch: int, maps: Any = None) -> None:
            self.features, self.indices, self.shape, self.batch = features, indices, shape, batch
            self.maps = maps or {}

        def replace_feature(self, features: torch.Tensor) -> Tensor:
            return Tensor(features, self.indices, self.shape, self.batch, self.maps)

    class Conv(torch.nn.Module):
        def __init__(self, c_in: int, c_out: int, size: int, *, bias: bool, indice_key: str, algo: str,
                     **options: int) -> None:  # fmt: skip
            super().__init__()
            assert not bias and algo == "implicit" and options in ({}, {"stride": 2, "padding": 0})
            self.weight = torch.nn.Parameter(torch.zeros(c_out, size, size, size, c_in))
            self.key = indice_key

    class Down(Conv):
        def forward(self, given: Tensor) -> Tensor:
            assert len(given.features) == len(problem.coords) and not torch.is_grad_enabled()
            assert all(side % 2 == 0 for side in given.shape)
            made["map"] += 1
            features = torch.zeros(len(cells), 8)
            return Tensor(features, cells[order], given.shape, given.batch, {self.key: given.indices})

    class Up(Conv):
        def forward(self, given: Tensor) -> Tensor:
            assert torch.equal(given.indices, cells[order])
            w = self.weight.permute(1, 2, 3, 4, 0).flatten(0, 2)
            y = torch.zeros(len(problem.coords), layer.c_out)
            for k, (rows, out) in enumerate(problem.pairs(layer)):
                y = y.index_add(0, out, given.features[place[rows]] @ w[k])
            return Tensor(y, given.maps[self.key], given.shape, given.batch)

    lib, constants = ModuleType("spconv.pytorch"), ModuleType("spconv.constants")
    lib.SparseConvTensor, lib.SparseConv3d, lib.SparseInverseConv3d = Tensor, Down, Up  # type: ignore[attr-defined]
    lib.ConvAlgo = SimpleNamespace(MaskImplicitGemm="implicit")  # type: ignore[attr-defined]
    for module in (lib, constants):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers.Spconv, "needs_gpu", False)
    adapter = peers.Spconv(problem, layer, "implicit")
    row = peerbench.measure(adapter, Data(problem, layer), RATES, 2)
    assert max(row["rel_l2"]) < 1e-6 and row["map_ms"] >= 0
    # Only fresh states make a map: one at the start, two times three of a step and of a forward.
    assert made["map"] == 7


def test_adapters_without_transposed_layers_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(prepared(surface_coords(4).numpy()), CPU)
    for adapter in (peers.TorchSparse, peers.Minkowski, peers.WarpConvNet):
        monkeypatch.setattr(adapter, "needs_gpu", False)
        with pytest.raises(Unsupported, match="no transposed layer"):
            adapter(problem, Layer(4, 4, 2, 2, transposed=True), adapter.variants[0])


# ---- a row -------------------------------------------------------------------------------------------------


class Shuffled(peers.GatherGemm):
    """A library with orders of input and output rows, and a weight layout, of its own; no gradient alone."""

    layout, flat = "spconv", False

    def setup(self) -> None:
        super().setup()
        problem, layer = self.problem, self.layer
        generator = torch.Generator().manual_seed(1)
        inputs, outputs = problem.inputs(layer), problem.outputs(layer)
        self.into = torch.randperm(len(inputs), generator=generator)
        out = self.into if layer.stride == 1 else torch.randperm(len(outputs), generator=generator)
        self.out, self.cells, self.rows = out, outputs[out], inputs[self.into]

    def forward(self, state: dict[str, Any], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        assert w.shape == (self.layer.c_out, *[self.layer.kernel] * 3, self.layer.c_in)
        unsorted = torch.empty_like(self.into).scatter_(0, self.into, torch.arange(len(self.into)))
        plain = w.permute(1, 2, 3, 4, 0).reshape(-1, self.layer.c_in, self.layer.c_out)
        return super().forward(state, x[unsorted], plain)[self.out]

    def in_coords(self, state: dict[str, Any]) -> torch.Tensor:
        return self.rows

    def out_coords(self, state: dict[str, Any]) -> torch.Tensor:
        return self.cells


class Wrong(peers.GatherGemm):
    def forward(self, state: dict[str, Any], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return super().forward(state, x, w.flip(0))


class Elsewhere(peers.GatherGemm):
    def out_coords(self, state: dict[str, Any]) -> torch.Tensor:
        return self.problem.coords + 1


TIMED = ("forward", "backward", "dgrad", "wgrad")


@pytest.mark.parametrize("adapter", [peers.Voxmma, peers.GatherGemm, Shuffled])
@pytest.mark.parametrize(
    "layer",
    [Layer(8, 12, 3, 1, "fp32"), *(Layer(8, 4, 2, 2, "fp32", transposed) for transposed in (False, True))],
)
def test_a_row_has_times_errors_and_floors(adapter: type[peers.Adapter], layer: Layer) -> None:
    problem = Problem(prepared(random_coords(150, 8, batch=2).numpy()), CPU)
    data = Data(problem, layer)
    row = peerbench.measure(adapter(problem, layer, adapter.variants[0]), data, RATES, 2)
    assert max(row["rel_l2"]) < 1e-6 and max(row["max_eta"]) < 1e-5 and len(row["rel_l2"]) == 3
    for name in (
        *(f"{op}{cold}" for op in ("forward", "backward") for cold in ("", "_cold")),
        "step",
        "first",
    ):
        low, high = row[f"{name}_spread_ms"]
        assert 0 < low <= row[f"{name}_ms"] <= high
    assert row["map_ms"] >= 0 and row["host_us"] > 0
    for op in ("forward", "backward"):
        assert row[f"{op}_of_floor"] == pytest.approx(row[f"{op}_floor_ms"] / row[f"{op}_ms"])
    products = 2 * data.pairs * layer.c_in * layer.c_out
    assert row["forward_tflops"] == pytest.approx(products / row["forward_ms"] / 1e9)


def test_other_results_and_other_coordinates_are_errors() -> None:
    problem, layer = Problem(prepared(surface_coords(5).numpy()), CPU), Layer(4, 4, 3, 1, "fp32")
    data = Data(problem, layer)
    with pytest.raises(RuntimeError, match="computes something else"):
        peerbench.measure(Wrong(problem, layer, "default"), data, RATES, 1)
    with pytest.raises(RuntimeError, match="are not the 50 expected ones"):
        peerbench.measure(Elsewhere(problem, layer, "default"), data, RATES, 1)


def test_every_process_draws_the_same_operands() -> None:
    problem, layer = Problem(prepared(surface_coords(5).numpy()), CPU), Layer(4, 8, 3, 1, "tf32")
    first, second = (Data(problem, layer) for _ in range(2))
    assert torch.equal(first.w, second.w) and torch.equal(first.dy[1], second.dy[1])
    assert not torch.equal(first.x[0], first.x[1]) and len(first.x) == first.sets >= 2
    assert torch.equal(voxmma.ops.formats.round_tf32(first.w), first.w)


def test_a_process_tells_errors_of_a_unit_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "coords.npz", scene=prepared(surface_coords(5).numpy()))

    class Moody(peers.GatherGemm):
        def setup(self) -> None:
            super().setup()
            if self.layer.c_in == 5:
                raise Unsupported("five channels")
            if self.layer.c_in == 6:
                raise KeyError("six\nlines")

    monkeypatch.setitem(peers.ADAPTERS, "torch", Moody)
    units = [
        {"id": c, "scene": "scene", "layer": {"c_in": c, "c_out": 4, "dtype": "fp32"}, "name": ""}
        for c in (5, 6, 4)
    ]
    job = {"device": "cpu", "lib": "torch", "variant": "default", "units": units, "rates": RATES.as_dict()}
    said: list[dict[str, Any]] = []
    before = torchflags.snapshot()
    peerbench.work({**job, "coords": str(tmp_path / "coords.npz"), "repeats": 1, "cold": False}, said.append)
    assert torchflags.snapshot() == before
    done = {line["done"]: line["row"] for line in said if "done" in line}
    assert done[5] == {"unsupported": "five channels"} and done[6]["error"].startswith("KeyError: ")
    assert done[4]["forward_ms"] > 0 and done[4]["out_voxels"] == 50 and done[4]["pairs"] > 50


# ---- processes ---------------------------------------------------------------------------------------------


def play(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Every library's process runs `script` instead, which finds the job in `job`."""
    head = (
        "import json, sys, time\njob = json.load(open('job.json'))\n"
        f"def say(**what): print({peerbench._MARK!r} + json.dumps(what), flush=True)\n"
    )

    def start(job: dict[str, Any], folder: Path, log: Path) -> subprocess.Popen[str]:
        (folder / "job.json").write_text(json.dumps(job))
        with log.open("a") as errors:
            command = [sys.executable, "-S", "-c", head + script]
            return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder)

    monkeypatch.setattr(peerbench, "_start", start)


def gathered(tmp_path: Path, timeout: float = 600.0) -> tuple[dict[int, dict[str, Any]], list[str]]:
    said: list[str] = []
    units = [{"id": i, "name": f"unit {i}"} for i in range(3)]
    job = {"lib": "spconv", "variant": "split", "units": units}
    return peerbench._library(job, tmp_path, timeout, math.inf, said.append), said


def test_a_crash_costs_one_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(
        monkeypatch,
        """
print("a library talks")
for unit in job["units"]:
    say(start=unit["id"])
    if unit["id"] == 1: print("illegal access", file=sys.stderr); sys.exit(7)
    say(done=unit["id"], row={"ok": unit["id"]})
""",
    )
    found, said = gathered(tmp_path)
    assert found == {0: {"ok": 0}, 1: {"error": "the process died (7): illegal access"}, 2: {"ok": 2}}
    assert said == [f"spconv split: unit {i}" for i in range(3)]


def test_a_process_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(
        monkeypatch,
        """
for unit in job["units"]:
    say(start=unit["id"])
    if unit["id"] == 1: time.sleep(3600)
    say(done=unit["id"], row={"ok": unit["id"]})
""",
    )
    lines = peerbench._lines

    def impatient(process: subprocess.Popen[str], limit: float) -> Iterator[dict[str, Any] | None]:
        """As the real ones, but unit 1 has no time at all: how long the others take does not matter."""
        for said in lines(process, limit):
            yield said
            if said == {"start": 1}:
                yield None

    monkeypatch.setattr(peerbench, "_lines", impatient)
    found, _ = gathered(tmp_path)
    assert found == {0: {"ok": 0}, 1: {"error": "nothing for 600 s: stopped"}, 2: {"ok": 2}}


def test_silence_is_noticed() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, stdout=-1, text=True) as process:
        assert list(peerbench._lines(process, 0.05)) == [None]
        process.kill()


def test_a_library_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    play(monkeypatch, "import sys; print('no libcuda', file=sys.stderr); sys.exit(1)")
    found, said = gathered(tmp_path)
    assert all(row == {"error": "did not start: no libcuda"} for row in found.values()) and len(said) == 3


# ---- the command -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """One run of the command on a small file, with a library that is not there: JSON, table, folder."""
    folder = tmp_path_factory.mktemp("peers")
    np.savez(folder / "tiny.npz", coords=random_coords(120, 8, batch=2).numpy().astype(np.int16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peerbench, "installed", lambda name: name in ("voxmma", "torch", "spconv"))
        arguments = [
            "--scene",
            str(folder / "tiny.npz"),
            "--channels",
            "8x4",
            "--kernel",
            "3,2s2,2t2",
            "--dtype",
            "fp32",
        ]
        arguments += ["--libs", "voxmma,torch,spconv,fvdb", "--device", "cpu", "--repeats", "1", "--no-cold"]
        text = invoke("peers", *arguments, "--out", str(folder / "out")).stdout
    return json.loads((folder / "out" / "peers.json").read_text()), text, folder / "out"


@pytest.mark.slow
def test_a_spent_budget_leaves_rows_out() -> None:
    scenes, layers = {"s": random_coords(30, 4).numpy()}, [Layer(8, 8), Layer(16, 16)]
    libraries = [("voxmma", "fp32"), ("torch", peers.ADAPTERS["torch"].variants[0])]
    rows = peerbench.run(scenes, layers, libraries, torch.device("cpu"), repeats=1, budget=0.0)["rows"]
    assert len(rows) == 4 and {row.get("left_out") for row in rows} == {peerbench.LEFT_OUT}
    assert not any("forward_ms" in row for row in rows)


@pytest.mark.slow
def test_peers_measures_every_library_in_its_process(run: tuple[dict[str, Any], str, Path]) -> None:
    result, text, folder = run
    assert result["absent"] == ["fvdb"] and result["scenes"] == {"tiny": 120}
    rows = {(row["lib"], row["volume"], row["transposed"]): row for row in result["rows"]}
    layers = [(27, False), (8, False), (8, True)]
    assert set(rows) == {(lib, *layer) for lib in ("voxmma", "torch", "spconv") for layer in layers}
    for lib in ("voxmma", "torch"):
        assert rows[lib, 8, True]["out_voxels"] == 120 > rows[lib, 8, False]["out_voxels"]
        assert rows[lib, 8, True]["pairs"] == rows[lib, 8, False]["pairs"]
        for layer in layers:
            row = rows[(lib, *layer)]
            assert max(row["rel_l2"]) < 1e-6 and row["forward_ms"] > 0 and row["forward_of_floor"] > 0
            assert (row["voxels"], row["c_in"], row["c_out"]) == (120, 8, 4) and "forward_cold_ms" not in row
        assert rows[lib, 27, False]["pairs"] == rows["voxmma", 27, False]["pairs"]
    assert rows["spconv", 27, False]["unsupported"] == "runs on a GPU only"
    assert "not installed: fvdb" in text and "runs on a GPU only" in text
    assert "8x4 k2s2 fp32" in text and "8x4 k2t2 fp32" in text
    assert (folder / "peers.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert result["rates"]["tflops"]["fp32"] > 0 and result["rates"]["bandwidth"] > 0


@pytest.mark.slow
def test_failures_are_in_table_and_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: tuple[dict[str, Any], str, Path]
) -> None:
    result = json.loads(json.dumps(run[0]))
    kept = ("lib", "variant", "scene", "c_in", "c_out", "kernel", "stride", "dtype")
    result["rows"][0] = {**{key: result["rows"][0][key] for key in kept}, "error": "it broke"}
    monkeypatch.setattr(peerbench, "run", lambda *_, **__: result)
    output = invoke("peers", "--device", "cpu", "--scene", "surface", "--out", str(tmp_path), code=1).output
    assert "it broke" in output and "voxmma failed" in output


@pytest.mark.slow
def test_speed_ups_are_drawn_from_any_mix_of_rows(
    tmp_path: Path, run: tuple[dict[str, Any], str, Path]
) -> None:
    for rows in ([], run[0]["rows"][:1], [r for r in run[0]["rows"] if r["lib"] == "torch"]):
        benchplots.draw_peers({**run[0], "rows": rows}, tmp_path / "a.png")
        assert (tmp_path / "a.png").stat().st_size > 1000
        benchplots.peers_table({**run[0], "rows": rows})


def test_fastest_peer_leaves_out_ourselves_and_the_yardstick() -> None:
    same = {"scene": "s", "c_in": 8, "c_out": 8, "kernel": 3, "stride": 1, "dtype": "fp16"}
    rows = [
        {**same, "lib": lib, "variant": "", "forward_ms": ms}
        for lib, ms in (("voxmma", 1.0), ("torch", 0.1), ("spconv", 3.0), ("flexgemm", 2.0))
    ]
    assert benchplots.fastest_peer(rows[0], rows, "forward_ms") == 2.0
    assert benchplots.fastest_peer({**rows[0], "scene": "t"}, rows, "forward_ms") is None
    assert benchplots.fastest_peer({**rows[0], "transposed": True}, rows, "forward_ms") is None


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--scene", "moon"),
        ("--scene", "missing.npz"),
        ("--channels", "0"),
        ("--kernel", "3x"),
        ("--dtype", "fp8"),
        ("--libs", "numpy"),
        ("--device", "tpu"),
    ],
)
def test_peers_names_what_it_cannot_run(option: str, value: str) -> None:
    assert value in invoke("peers", "--device", "cpu", option, value, code=2).output


def test_scenes_from_files(tmp_path: Path) -> None:
    coords = random_coords(20, 4).numpy()
    np.savez(tmp_path / "a.npz", coords=coords.astype(np.int16), other=np.zeros(3))
    np.savez(tmp_path / "b.npz", anything=coords)
    found = bench.load_scenes([str(tmp_path / "a.npz"), str(tmp_path / "b.npz")], CPU)
    assert all(np.array_equal(found[name], coords) and found[name].dtype == np.int32 for name in "ab")
    np.savez(tmp_path / "c.npz", x=coords, y=coords)
    np.savez(tmp_path / "d.npz", coords=coords.astype(float))
    for name, why in (("c", "no array 'coords' among x, y"), ("d", "got float64")):
        with pytest.raises(ValueError, match=why):
            bench.load_scenes([str(tmp_path / f"{name}.npz")], CPU)
    assert bench.parse_kernels("3,2s2,5") == [(3, 1), (2, 2), (5, 1)]
    layers = [(3, 1, False), (2, 2, False), (2, 2, True), (3, 12, True)]
    assert bench.parse_layers("3,2s2,2t2,3t12") == layers
    for wrong in ("2t1", "2t", "t2", "2s2t2", ""):
        with pytest.raises(ValueError, match="expected such as"):
            bench.parse_layers(wrong)


# ---- result files and tables -------------------------------------------------------------------------------


@pytest.mark.slow
def test_figures_become_tables_and_plots(tmp_path: Path, run: tuple[dict[str, Any], str, Path]) -> None:
    collect, tables = script("collect"), script("readme_tables")
    raw = json.loads(json.dumps(run[0]))
    scaled = scaling.run(CPU, [200, 100], [4], dtype="fp32", repeats=1)
    (tmp_path / "scaling.json").write_text(json.dumps({**scaled, "device": "Card"}))
    folder, docs = tmp_path / "results", tmp_path / "docs"
    docs.mkdir()

    def take(name: str, commit: str = "abc", **change: Any) -> Any:
        (tmp_path / name).write_text(json.dumps({**raw, "device": "Card", **change}))
        files = [str(tmp_path / name), str(tmp_path / "scaling.json")]
        options = ["--results", str(folder), "--driver", "1.2", "--commit", commit, "--date", "2026-01-01"]
        assert collect.main([*files, *options]) == 0
        (stored,) = tables.load(folder)
        return stored["scenes"]["tiny"]

    part = take("peers.json")
    assert (part["driver"], part["commit"], part["voxels"], part["pairs"]) == (
        "1.2", "abc", 120, raw["rows"][0]["pairs"]
    )  # fmt: skip
    assert len(part["rows"]) == 6 and len(part["failed"]) == 3
    assert "spconv implicit 8x4 k2t2 fp32" in part["failed"]
    more = [{**row, "c_in": 16} for row in raw["rows"][:1]]
    assert len(take("peers.json", rows=more)["rows"]) == 7  # added to those of the same commit
    former = json.loads((folder / "card.json").read_text())
    for row in former["scenes"]["tiny"]["rows"]:  # as they were before there were transposed layers
        if not row["transposed"]:
            del row["transposed"]
    (folder / "card.json").write_text(json.dumps(former))
    assert len(take("peers.json", rows=more)["rows"]) == 7
    results = tables.load(folder)
    assert "8x4 fp32, K = 8, stride 2 transposed" in tables.speed_table(results)
    assert "* runs on a GPU only: spconv implicit 8x4 k3s1 fp32" in tables.peers_table(results)
    assert all(str(row["voxels"]) in tables.scaling_table(results) for row in scaled["rows"])
    names = tables.stale_plots(results, docs)
    assert names == ["peers-card-tiny.png", "scaling-card.png"]
    tables.draw_plots(results, docs)
    assert tables.stale_plots(results, docs) == [] and all(
        name in tables.speed_plots_block(results) for name in names
    )
    assert len(take("peers.json", commit="def", rows=more)["rows"]) == 1  # another commit starts anew
    kept = take("peers.json", commit="def", limits=[[8, 6], 101_376])  # of a smaller card: beside them
    assert len(kept["rows"]) == 1 and "with 101,376 bytes" not in tables.speed_table(tables.load(folder))
    smaller = tables.speed_table(tables.load(folder), "smaller")
    assert (
        "**tiny** on Card as if of capability 8.6 with 101,376 bytes of shared memory: 120 voxels" in smaller
    )
    assert tables.stale_plots(tables.load(folder), docs) == names


# ---- operators ---------------------------------------------------------------------------------------------


def test_operators_are_measured_and_become_a_table(tmp_path: Path, device: torch.device) -> None:
    operators, collect, tables = script("operators"), script("collect"), script("readme_tables")
    assert "No run" in tables.operators_table([])
    out, folder, coords = tmp_path / "operators.json", tmp_path / "results", surface_coords(10)
    coords -= coords.amin(0)  # what is measured begins at 0
    np.savez(tmp_path / "tiny.npz", coords=coords.numpy())
    options = ["--scene", str(tmp_path / "tiny.npz"), "--device", str(device), "--repeats", "2"]
    operators.POINTS = {"cpu": 700, "cuda": 700}
    assert operators.main([*options, "--out", str(out)]) == 0
    raw = json.loads(out.read_text())
    part = raw["scenes"]["tiny"]
    mapping = voxmma.kernel_map(voxmma.CoordSet(coords.to(device)), 3)
    facts = (part["voxels"], part["pairs"], part["map_bytes"])
    assert facts == (len(coords), mapping.num_pairs, mapping.nbytes)
    assert part["index_bytes"] >= 4 * len(coords)
    assert len(part["maps"]) == 8 and all(0 < row["least_ms"] <= row["ms"] for row in part["maps"])
    waits = [row["waits"] for row in part["maps"]]
    assert (waits[0] == 1 and waits[-2] >= 5) if device.type == "cuda" else waits == [None] * 8
    assert [row["channels"] for row in part["pools"]] == [32, 64, 128] * 4
    halves = len(torch.unique(coords // 2, dim=0))
    for row in part["pools"]:
        if row["kernel"] == 2:
            word, winner = (2 if device.type == "cuda" else 4), row["kind"] == "max"
            moved = row["channels"] * (len(coords) * word + halves * (word + winner))
            assert row["out_voxels"] == halves
            assert row["floor_ms"] == pytest.approx(moved / raw["bandwidth"] / 1e6)
        for op in ("forward", "backward"):
            assert row[f"{op}_over_floor"] == pytest.approx(row[f"{op}_ms"] / row["floor_ms"])

    moves = {(row["what"], row["channels"]): row for row in part["moves"]}
    assert len(moves) == len(part["moves"]) == 2 + 4 + 5 + 12
    points, batch = operators.scattered(coords.to(device), 700)
    made, _ = voxmma.sparse_quantize(points, points, operators.VOXEL_SIZE, batch_index=batch)
    assert not (~(made.coords[:, None] == coords.to(device)).all(2).any(1)).any()  # within the scene's voxels
    word = 2 if device.type == "cuda" else 4
    samples, n = int(coords[:, 0].max()) + 1, len(coords)
    for key, moved, back in (
        (("sparse_quantize, mean", 4), 700 * 40 + made.num_voxels * 32, 700 * 24 + made.num_voxels * 16),
        (("devoxelise, trilinear", 32), 700 * 16 + 16 * n + 32 * word * (700 + n), 32 * word * (700 + n)),
        (("global max pool", 64), 64 * word * (n + samples), 64 * word * (n + samples)),
        (("unpool, 2x2x2", 128), 128 * word * (n + halves), 128 * word * (n + halves)),
        (("downsample, 2", 0), 16 * (n + halves), None),
    ):  # fmt: skip
        row = moves[key]
        assert row["floor_ms"] == pytest.approx(moved / raw["bandwidth"] / 1e6)
        assert row.get("backward_floor_ms") == (back and pytest.approx(back / raw["bandwidth"] / 1e6))
    for row in moves.values():
        assert row["wall_ms"] > 0 and (row["waits"] is None) == (device.type == "cpu")
        assert ("ms" in row) == (not row["waits"])
        assert row["over_floor"] == pytest.approx(row.get("ms", row["wall_ms"]) / row["floor_ms"])
    if device.type == "cuda":
        assert all(
            row["waits"] == 0 for (what, _), row in moves.items() if "pool" in what or "lookup" in what
        )

    def take(name: str, commit: str) -> Any:
        part["moves"][0] |= {"waits": 3, "wall_ms": 0.123}
        part["moves"][0].pop("ms", None)
        part["pools"][0] |= {"spconv_forward_ms": 0.1234, "spconv_backward_ms": 0.5}
        part["pools"][1]["spconv_error"] = "RuntimeError: no"
        given = {**raw, "device": "Card", "driver": "9.9", "spconv": "2.3", "scenes": {name: part}}
        out.write_text(json.dumps(given))
        more = ["--results", str(folder), "--commit", commit, "--date", "2026-01-01"]
        assert collect.main([str(out), *more]) == 0
        (stored,) = tables.load(folder)
        return stored["operators"]

    take("tiny", "abc")
    stored = take("other", "def")
    assert [(name, part["commit"]) for name, part in stored.items()] == [("tiny", "abc"), ("other", "def")]
    assert stored["tiny"]["driver"] == "9.9" and stored["tiny"]["torch"] == torch.__version__
    text = tables.operators_table(tables.load(folder))
    assert f"**tiny** on Card: {len(coords)} voxels" in text and "(1) points, their samples" in text
    assert "* RuntimeError: no: max, k2s2, C = 64" in text and "commit def, 2026-01-01" in text
    assert stored == take("other", "def")  # the same scene again: replaced


def test_every_repetition_of_a_map_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"map": 0, "set": 0}
    for module, name, what in (("maps", "build_cpu", "map"), ("derive", "_make_cpu", "set")):
        source = sys.modules[f"voxmma.sparse.{module}"]
        real = getattr(source, name)

        def count(*given: Any, real: Any = real, what: str = what) -> Any:
            made[what] += 1
            return real(*given)

        monkeypatch.setattr(source, name, count)
    seen: list[tuple[int, int]] = []

    class Counting(timing.Clock):
        def wall(self, run: Any, calls: int = 1, prepare: Any = None) -> timing.Timing:
            for _ in range(2):
                given = prepare(0)
                before = dict(made)
                run(0, given)
                seen.append((made["map"] - before["map"], made["set"] - before["set"]))
            return timing.summary([1.0])

    script("operators").measure_maps(surface_coords(10), Counting(CPU, 1))
    assert seen[::2] == seen[1::2] == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 1), (1, 0), (10, 5), (10, 5)]


def test_wall_prepares_each_row_outside_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, order = [0.0], []
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def prepare(i: int) -> int:
        now[0] += 100.0
        return 10 * i

    def run(i: int, given: int) -> None:
        order.append((i, given))
        now[0] += 1.0 + given

    found = timing.Clock(CPU, 2).wall(run, calls=2, prepare=prepare)
    assert order == [(0, 0), (0, 0), (1, 0), (0, 10), (1, 10)]
    assert (found.least, found.median, found.high) == (1.0, 6.0, 11.0)


def test_spconv_pools_on_the_pairs_of_its_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    lib, functional = ModuleType("spconv.pytorch"), ModuleType("spconv.pytorch.functional")
    rows, layers = torch.tensor([2, 0]), []

    def pool(x: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        return x[given]

    class Layer:
        def __init__(self, *given: int) -> None:
            layers.append(given)

        def to(self, device: torch.device) -> Layer:
            return self

        def __call__(self, given: Any) -> torch.Tensor:
            layers.append(given[2:])
            return functional.indice_maxpool_implicit_gemm(given[0], rows)

    functional.indice_maxpool_implicit_gemm = pool  # type: ignore[attr-defined]
    lib.SparseMaxPool3d, lib.SparseConvTensor = Layer, lambda *given: given  # type: ignore[attr-defined]
    for module in (lib, functional):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    problem = Problem(np.array([[0, 0, 0, 0], [1, 4, 1, 0], [1, 3, 3, 3]], np.int32), CPU)
    x = torch.randn(3, 2, requires_grad=True)
    operators = script("operators")
    call = operators.spconv_pool(problem, x, "max", 2, 2, 2)
    assert torch.equal(call(), x[rows]) and functional.indice_maxpool_implicit_gemm is pool
    with pytest.raises(RuntimeError, match="2 outputs instead of 5"):
        operators.spconv_pool(problem, x, "max", 3, 2, 5)
    assert functional.indice_maxpool_implicit_gemm is pool
    # Whole cells, and one more where windows overlap.
    assert layers == [(2, 2, 0), ([6, 4, 4], 2), (3, 2, 1), ([8, 6, 6], 2)]


@pytest.mark.parametrize(
    "options", [["--scene", "nowhere"], ["--repeats", "0"], ["--device", "abacus"], ["--scene", "empty.npz"]]
)
def test_operators_refuse_bad_options(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("empty.npz", coords=np.zeros((0, 4), np.int32))
    with pytest.raises(SystemExit, match="2"):
        script("operators").main([*options, "--out", "x.json"])
    assert options[1].removesuffix(".npz") in capsys.readouterr().err and not Path("x.json").exists()


# ---- scaling -----------------------------------------------------------------------------------------------


def test_scaling_scenes_have_the_size_and_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_RESOLUTION", 24)
    small, large = scaling.coordinates(1400, CPU), scaling.coordinates(10_000, CPU)
    assert abs(len(small) / 1400 - 1) < 0.1 and abs(len(large) / 10_000 - 1) < 0.1
    maps = [voxmma.kernel_map(voxmma.Voxels(c, torch.zeros(len(c), 1)), 3) for c in (small, large)]
    assert len(large.unique(dim=0)) == len(large) and int(large[-1, 0]) == len(large) // len(small) - 1
    each = [mapping.num_pairs / mapping.in_coords.num for mapping in maps]
    assert each[0] == pytest.approx(each[1], rel=0.02)


def test_scaling_measures_and_draws(tmp_path: Path) -> None:
    arguments = [
        "--voxels",
        "200,1e3",
        "--channels",
        "4,8",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--repeats",
        "1",
    ]
    text = invoke("scaling", *arguments, "--out", str(tmp_path)).stdout
    result = json.loads((tmp_path / "scaling.json").read_text())
    assert [row["channels"] for row in result["rows"]] == [4, 8, 4, 8] and "time a pair" in text
    for row in result["rows"]:
        assert row["within_bound"] and row["forward_ps_a_pair"] == pytest.approx(
            row["forward_ms"] * 1e9 / row["pairs"]
        )
        assert row["map_ns_a_voxel"] == pytest.approx(row["map_ms"] * 1e6 / row["voxels"])
    for line in result["growth"]:
        times = [row["dgrad_ps_a_pair"] for row in result["rows"] if row["channels"] == line["channels"]]
        assert line["dgrad"] == pytest.approx(times[1] / times[0])
    assert (tmp_path / "scaling.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_scaling_goes_on_after_memory_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = scaling._layer

    def layer(mapping: Any, coords: Any, channels: int, *rest: Any) -> Any:
        if channels == 8 and len(coords) > 300:
            raise torch.OutOfMemoryError("CUDA out of memory\nmore")
        return honest(mapping, coords, channels, *rest)

    monkeypatch.setattr(scaling, "_layer", layer)
    result = scaling.run(CPU, [500, 200], [4, 8], dtype="fp32", repeats=1)
    assert [row.get("error") for row in result["rows"]] == [None, None, None, "CUDA out of memory"]
    assert result["growth"][0]["wgrad"] > 0 and result["growth"][1]["wgrad"] is None
    benchplots.scaling_table(result)


@pytest.mark.parametrize(("option", "value"), [("--voxels", "many"), ("--channels", "0"), ("--dtype", "fp8")])
def test_scaling_names_what_it_cannot_run(option: str, value: str) -> None:
    output = invoke("scaling", "--device", "cpu", option, value, code=2).output
    assert option in output and value in output


def test_plain_figures_are_json() -> None:
    given = {"a": [1.5, math.inf, {"b": math.nan}], "c": "x"}
    assert json.loads(json.dumps(benchplots.plain(given), allow_nan=False)) == {
        "a": [1.5, "inf", {"b": "nan"}],
        "c": "x",
    }


@pytest.mark.gpu
def test_peers_on_a_gpu(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", coords=surface_coords(64).numpy())
    arguments = [
        "--scene",
        str(tmp_path / "s.npz"),
        "--channels",
        "32",
        "--kernel",
        "3,2s2",
        "--repeats",
        "3",
    ]
    invoke("peers", *arguments, "--libs", "voxmma,torch", "--out", str(tmp_path))
    result = json.loads((tmp_path / "peers.json").read_text())
    for row in result["rows"]:
        assert row["map_mib"] > 0 and row["step_peak_mib"] > 0 and row["forward_cold_ms"] > 0
        assert 0 < row["forward_of_floor"] < 1 and max(row["rel_l2"]) < 2e-2
