"""The gate: what must be shown before an fp16 accumulator runs, and the proof on record. It fails closed.

In this order, and evidence that is missing counts as failed:

1. legality: fp16 operands (bf16 after a rescale, voxmma.overflow), never a weight gradient;
2. overflow certificate: no partial sum can pass 65504 (voxmma.overflow);
3. no non-finite cell, every cell within the worst-case bound (accuracy.bound), repeats equal bit by bit;
4. rel-L2 on signed inputs within the budget;
5. for the automatic rule only: a speed-up over fp32 accumulators measured on this very device. An explicit
   request is a contract, to which speed is no objection.

Whether fp16 accumulation is faster is a property of the board, not of its compute capability: `board` asks
the matrix units themselves. Boards and verdicts are kept in VOXMMA_CACHE_DIR under the device's UUID, the
driver and the kernel build, so a change of any of them makes them void.
"""

from __future__ import annotations

import contextvars
import functools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from voxmma import _C, settings, sweep
from voxmma.accuracy import FAMILIES, Bound, Errors
from voxmma.overflow import Certificate, certificate
from voxmma.sweep import Mode, Site
from voxmma.tiles import Tile, accumulator_label, card, compiled, parse_accumulator
from voxmma.timing import Clock
from voxmma.tunecache import driver_version
from voxmma.voxels import Voxels

#: Smallest measured speed-up for which the automatic rule takes an fp16 accumulator.
MIN_GAIN = 1.03
#: rel-L2 that an fp16 accumulator may show on signed inputs; 27 x 256 products reach 4.4e-3 on Ampere.
BUDGET = 5e-3
#: The regression case of every tile: 3x3x3 at 32 channels (on a GPU 200,000 voxels and more), where a skipped
#: wait once looked like saturation.
CHANNELS = 32
#: Voxels of the second case of a GPU's tiles, whose sums are made in parts (docs/precision.md).
SMALL = 1000


# ---- verdicts ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Check:
    """One step of the gate: a figure against its limit."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class Verdict:
    """Whether an fp16 accumulator may run, and the steps up to the first that failed."""

    subject: str
    allowed: bool
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        """The step that failed, or that all passed."""
        if self.allowed:
            return "all checks passed"
        return f"{self.checks[-1].name}: {self.checks[-1].detail}"

    @property
    def runs_on_request(self) -> bool:
        """Whether an explicit request is honoured: only speed or a missing measurement speaks against it."""
        return all(check.passed or check.name in ("gain", "record") for check in self.checks)

    @property
    def accumulator(self) -> str:
        """What may run: 'fp16' or 'fp32'."""
        return "fp16" if self.allowed else "fp32"


def judge(
    subject: str,
    op: str,
    dtype: torch.dtype,
    *,
    automatic: bool,
    certificate: Certificate | None = None,
    errors: Errors | None = None,
    limit: Bound | None = None,
    repeatable: bool | None = None,
    rel_l2: float | None = None,
    budget: float = BUDGET,
    gain: float | None = None,
) -> Verdict:
    """Applies the gate to evidence. What is None was not measured and fails.

    Args:
        subject: what is judged, such as a tile's name. op: 'fprop', 'dgrad' or 'wgrad'.
        dtype: of the operands that reach the matrix unit.
        automatic: the automatic rule asks, which a measured gain must justify.
        certificate: of the operands. errors, limit: of the worst case measured. repeatable: whether further
            runs equalled the first bit by bit. rel_l2: on signed inputs.
        gain: fp32-accumulator time divided by fp16-accumulator time on this device.
    """
    checks: list[Check] = []

    def holds(name: str, passed: bool, detail: str) -> bool:
        checks.append(Check(name, passed, detail))
        return passed

    def steps() -> Iterator[bool]:
        yield holds(
            "legality", op != "wgrad" and dtype == torch.float16, f"{op} on {dtype}".replace("torch.", "")
        )
        fits = certificate is not None and certificate.fits
        yield holds(
            "overflow", fits, f"sums up to {certificate.bound:.3g}" if certificate else "not measured"
        )
        finite = errors is not None and errors.nonfinite == 0
        yield holds("finite", finite, f"{errors.nonfinite} cells" if errors else "not measured")
        within = errors is not None and limit is not None and errors.within(limit)
        detail = f"max eta {errors.max_eta:.2e} of {limit.eta:.2e}" if errors and limit else "not measured"
        yield holds("bound", within, detail)
        detail = {True: "equal bit by bit", False: "differ", None: "not measured"}[repeatable]
        yield holds("repeats", repeatable is True, detail)
        small = rel_l2 is not None and rel_l2 <= budget
        yield holds(
            "budget", small, f"rel-L2 {rel_l2:.2e} of {budget:.2e}" if rel_l2 is not None else "not measured"
        )
        if automatic:
            faster = gain is not None and gain > MIN_GAIN
            detail = f"{gain:.2f}x, {MIN_GAIN}x needed" if gain is not None else "not measured on this device"
            yield holds("gain", faster, detail)

    return Verdict(subject, all(steps()), tuple(checks))


# ---- what is on record -------------------------------------------------------------------------------------


def identity(device: torch.device) -> dict[str, str] | None:
    """What a measurement belongs to: device UUID, driver and kernel build. None where one is unknown."""
    if device.type != "cuda" or (driver := driver_version()) is None:
        return None
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    return {"device": uuid, "driver": driver, "build": _C.BUILD_ID}


_measuring = contextvars.ContextVar("voxmma_gate_measuring", default=False)


def stamp() -> str:
    """The state of the records, part of the key under which a call's plan is cached; '' when there are none.

    Also '' inside `measure`, whose explicit requests must reach a tile whatever was found before.
    """
    if _measuring.get():
        return ""
    path = _record_file()
    try:
        found = os.stat(path)
    except OSError:
        return ""
    return f"{path}:{found.st_mtime_ns}:{found.st_size}"


@functools.lru_cache(maxsize=64)
def _file_in(folder: Path) -> Path:
    return folder / "gate.jsonl"


def _record_file() -> Path:
    return _file_in(settings.get_cache_dir())


@functools.cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


def _read(kind: str, subject: str, owner: dict[str, str] | None) -> dict[str, Any] | None:
    """The newest entry of this kind and subject that belongs to `owner`."""
    if owner is None:
        return None
    try:
        lines = _record_file().read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            entry = json.loads(line)
            if (entry["kind"], entry["subject"], entry["owner"]) == (kind, subject, owner):
                return dict(entry["data"])
        except (ValueError, KeyError, TypeError):
            _warn_once(f"{_record_file()} holds a line that cannot be read; it is ignored")
    return None


def _write(kind: str, subject: str, owner: dict[str, str] | None, data: dict[str, Any]) -> None:
    """Appends an entry in one write, so that many processes may do it. Failing to is a warning, no error."""
    if owner is None:
        return
    line = json.dumps({"kind": kind, "subject": subject, "owner": owner, "data": data}) + "\n"
    try:
        _record_file().parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(_record_file(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(handle, line.encode())
        finally:
            os.close(handle)
    except OSError as error:
        _warn_once(
            f"{_record_file()} cannot be written ({error.strerror}); measurements last for this process"
        )


@dataclass(frozen=True)
class Board:
    """Dense MMA rates of a device in TFLOP/s, fp16 operands, by accumulator."""

    fp32: float
    fp16: float

    @property
    def ratio(self) -> float:
        """How much faster fp16 accumulators are: 2 on GeForce boards, 1 on data-centre boards."""
        return self.fp16 / self.fp32


@functools.cache
def _board(device: torch.device) -> Board:
    owner = identity(device)
    known = _read("board", "mma", owner)
    if known is not None:
        return Board(float(known["fp32"]), float(known["fp16"]))
    rate: Callable[[int], float] | None = getattr(_C, "mma_rate", None)
    if rate is None:
        raise RuntimeError("this build of voxmma has no MMA rate probe")
    with torch.cuda.device(device):
        board = Board(fp32=rate(0), fp16=rate(1))
    _write("board", "mma", owner, asdict(board))
    return board


def board(device: torch.device | str) -> Board:
    """The device's rates, measured once (about 20 ms) and kept on record.

    Raises:
        ValueError: not a CUDA device. RuntimeError: this build or device has no MMA kernels.
    """
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device must be a CUDA device, got {device}")
    index = device.index if device.index is not None else torch.cuda.current_device()
    return _board(torch.device("cuda", index))


def on_record(tile: str, device: torch.device) -> Verdict:
    """The automatic rule's verdict on a tile as measured on this device before; refused when there is none.

    `voxmma tiles --gate` measures and records.
    """
    data = _read("tile", tile, identity(device))
    if data is None:
        return Verdict(tile, False, (Check("record", False, "no measurement on record for this device"),))
    checks = tuple(Check(**check) for check in data["checks"])
    return Verdict(tile, bool(data["allowed"]) and all(check.passed for check in checks), checks)


# ---- measuring ---------------------------------------------------------------------------------------------


def _gain(tile: Tile, where: Site) -> float:
    """Time of the fp32-accumulator tile chosen by default, divided by that of `tile`, at its own width.

    `tile` runs with the overflow rescale, as it does where the automatic rule takes it.
    """
    channels = max(CHANNELS, min(tile.n, 256))
    given = sweep.draw("fprop", "signed", torch.float16, channels, where)
    fp32, fp16 = (
        sweep.execute("fprop", mode, given, where) for mode in (sweep.MODES["fp16 acc fp32"], _mode(tile))
    )

    def narrow(i: int) -> object:
        with settings.override(fwd_algo_mode=tile.name, fp16_rescale=True):
            return next(fp16)

    times = Clock(where.mapping.device, 20).race({"fp32": lambda i: next(fp32), "fp16": narrow})
    return times["fp32"].median / times["fp16"].median


def _mode(tile: Tile | None) -> Mode:
    """What asks for the tile's accumulator; plain fp16 for the CPU path."""
    label = "fp16" if tile is None else accumulator_label(tile.accum, tile.promote)
    return sweep.MODES[f"fp16 acc {label}"]


def measure(tile: Tile | None, x: Voxels, repeats: int = 10) -> Verdict:
    """Judges a forward tile with fp16 accumulators for the automatic rule, and puts the verdict on record.

    Every input family at 32 channels, 3x3x3, all cells of forward and input gradient, `repeats` runs each; on
    a GPU again on a set of SMALL voxels.

    Args:
        tile: a compiled tile, plain or promoted; None: the CPU path. x: the scene, on the device to judge.
        repeats: 1 leaves repeatability unmeasured, which counts as failed.
    """
    token = _measuring.set(True)
    try:
        verdict = _measure(tile, x, repeats)
    finally:
        _measuring.reset(token)
    if verdict.checks[-1].name != "ran":  # otherwise nothing was learned about the tile
        data = {"allowed": verdict.allowed, "checks": [asdict(check) for check in verdict.checks]}
        _write("tile", verdict.subject, identity(x.device), data)
    return verdict


def _measure(tile: Tile | None, x: Voxels, repeats: int) -> Verdict:
    sites, mode = [sweep.site(x, 3)], _mode(tile)
    if x.device.type == "cuda":
        sites.append(sweep.site(sweep.scene(x.device, SMALL), 3))
    name = tile.name if tile is not None else "cpu"
    wanted = parse_accumulator(mode.accumulator)
    forced: dict[str, Any] = {"fwd_algo_mode": name, "dgrad_algo_mode": name} if tile is not None else {}
    worst: tuple[float, Errors, Bound] | None = None
    largest: Certificate | None = None
    signed, repeatable = 0.0, True
    for where, family, op in product(sites, FAMILIES, ("fprop", "dgrad")):
        given = sweep.draw(op, family, torch.float16, CHANNELS, where)
        proof = certificate(
            given.x if op == "fprop" else given.dy, given.weight, transpose=op == "dgrad", chunk=wanted[1]
        )
        if largest is None or not proof.bound <= largest.bound:
            largest = proof
        limit = sweep.limit_of(op, mode, mode.accumulator, CHANNELS, where)
        with settings.override(**forced):
            results = sweep.execute(op, mode, given, where)
            first, record = next(results)
            ran = record.tile if op == "fprop" else record.dgrad_tile
            if (record.accumulator, record.chunk, ran) != (*wanted, name):
                label = accumulator_label(record.accumulator, record.chunk)
                return Verdict(
                    name, False, (Check("ran", False, f"{ran} with {label} ran instead: {record.reason}"),)
                )
            found, equal = sweep.examine(results, given, limit, first, repeats)
        repeatable = repeatable and equal
        share = found.max_eta / limit.eta
        if worst is None or not share <= worst[0]:
            worst = (share, found, limit)
        if family == "signed":
            signed = max(signed, found.rel_l2)
    assert worst is not None
    gain = _gain(tile, sites[0]) if tile is not None and x.device.type == "cuda" else None
    return judge(
        name,
        "fprop",
        torch.float16,
        automatic=True,
        certificate=largest,
        errors=worst[1],
        limit=worst[2],
        repeatable=repeatable if repeats > 1 else None,
        rel_l2=signed,
        gain=gain,
    )


def run(
    device: torch.device,
    voxels: int | None = None,
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> list[Verdict]:
    """Measures every fp16-accumulator tile of `device` (on a CPU its path) and records the verdicts.

    Args:
        voxels, repeats: default 200,000 and 10 on a GPU, 500 and 2 on a CPU. advance: called before each
            tile.
    """
    size, repeats = sweep.defaults(device, voxels, repeats)
    x = sweep.scene(device, size)
    verdicts = []
    for tile in candidates(device):
        advance(tile.name if tile else "cpu")
        verdicts.append(measure(tile, x, repeats))
    return verdicts


def candidates(device: torch.device) -> list[Tile | None]:
    """The tiles that `run` judges; None stands for the CPU path."""
    if device.type != "cuda":
        return [None]
    here = card(device)
    return [t for t in compiled() if t.op == "fprop" and t.accum.startswith("fp16") and t.runs_on(here)]


def describe(device: torch.device, verdicts: list[Verdict]) -> dict[str, Any]:
    """Verdicts and the board they were measured on, as plain data.

    kind ('gate'), device, driver and build (None on a CPU), board (fields of Board and their ratio, or None),
    verdicts (fields of Verdict).
    """
    on_gpu = device.type == "cuda"
    owner = identity(device) or {}
    rates = board(device) if on_gpu else None
    return {
        "kind": "gate",
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": owner.get("driver"),
        "build": owner.get("build"),
        "board": None if rates is None else {**asdict(rates), "ratio": rates.ratio},
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }


def title(found: dict[str, Any]) -> str:
    """A line on what `describe` found out about the board."""
    name, rates = f"fp16-accumulator gate (automatic rule) on {found['device']}", found["board"]
    if rates is None:
        return name
    speeds = f"{rates['fp16']:.0f} and {rates['fp32']:.0f} TFLOP/s"
    return f"{name}: its matrix units add in fp16 {rates['ratio']:.2f}x as fast as in fp32 ({speeds})"


def render(verdicts: list[Verdict], title: str = "fp16-accumulator gate (automatic rule)") -> Table:
    """A table: one line a tile, one column a check."""
    names = ("legality", "overflow", "finite", "bound", "repeats", "budget", "gain")
    table = Table("tile", *names, "verdict", title=title)
    for verdict in verdicts:
        details = {
            check.name: f"{'' if check.passed else 'FAILED: '}{check.detail}" for check in verdict.checks
        }
        outcome = "admitted" if verdict.allowed else f"refused, {verdict.reason}"
        table.add_row(verdict.subject, *(details.get(name, "-") for name in names), outcome)
    return table
