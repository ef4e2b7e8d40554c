"""Validation of fp16-accumulator tiles (`voxmma tiles --gate`): what is measured before one may run.

In this order; what was not measured counts as failed:

1. legality: fp16 operands (bf16 after a rescale, voxmma.verify.overflow), never a weight gradient;
2. overflow certificate: no partial sum can pass 65504 (voxmma.verify.overflow);
3. no non-finite cell, every cell within the worst-case bound (accuracy.bound), repeats equal bit by bit;
4. rel-L2 on signed inputs within the budget;
5. for the automatic rule only: a speed-up over fp32 accumulators measured on this very device. An explicit
   request runs a tile that is no faster, too.

Whether fp16 accumulation is faster is a property of the board, not of its compute capability: `board` asks
the matrix units themselves. Rates and verdicts are kept in VOXMMA_CACHE_DIR under the device's UUID, the
driver and the kernel build, so a change of any of them makes them void.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import torch

from voxmma._extension import _C
from voxmma._timing import Clock
from voxmma.dispatch import settings, store, validation
from voxmma.dispatch.selection import card
from voxmma.dispatch.validation import Check, Verdict, _measuring
from voxmma.ops.kernels import Tile, accumulator_label, compiled, parse_accumulator
from voxmma.sparse.tensor import Voxels
from voxmma.verify import trials
from voxmma.verify.accuracy import Bound, Errors
from voxmma.verify.families import FAMILIES
from voxmma.verify.overflow import Certificate, certificate
from voxmma.verify.trials import Mode, Site

#: Smallest measured speed-up for which the automatic rule takes an fp16 accumulator.
MIN_GAIN = 1.03
#: rel-L2 that an fp16 accumulator may show on signed inputs; 27 x 256 products reach 4.4e-3 on Ampere.
BUDGET = 5e-3
#: Channels of what every tile is measured on, 3x3x3 (on a GPU 200,000 voxels and more): there a skipped wait
#: once looked like saturation.
CHANNELS = 32
#: Voxels of a second scene on a GPU, where sums are made in parts (docs/precision.md).
SMALL = 1000


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
    """The verdict on what was measured. What is None was not, and fails.

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
    owner = store.owner_of(device, one_card=True)
    known = store.newest("rates", owner, {})
    if known is not None:
        return Board(float(known["fp32"]), float(known["fp16"]))
    rate: Callable[[int], float] | None = getattr(_C, "mma_rate", None)
    if rate is None:
        raise RuntimeError("this build of voxmma has no MMA rate probe")
    with torch.cuda.device(device):
        board = Board(fp32=rate(0), fp16=rate(1))
    if owner is not None and (problem := store.append([store.entry("rates", owner, {}, **asdict(board))])):
        store.warn_once(f"{problem}; the rates last for this process")
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


# ---- measuring ---------------------------------------------------------------------------------------------


def _gain(tile: Tile, where: Site) -> float:
    """Time of the fp32-accumulator tile chosen by default, divided by that of `tile`, at its own width.

    `tile` runs with the overflow rescale, as it does where the automatic rule takes it.
    """
    channels = max(CHANNELS, min(tile.n, 256))
    given = trials.draw("fprop", "signed", torch.float16, channels, where)
    fp32, fp16 = (
        trials.execute("fprop", mode, given, where) for mode in (trials.MODES["fp16 acc fp32"], _mode(tile))
    )

    def narrow(i: int) -> object:
        with settings.override(fwd_algo_mode=tile.name, fp16_rescale=True):
            return next(fp16)

    times = Clock(where.mapping.device, 20).race({"fp32": lambda i: next(fp32), "fp16": narrow})
    return times["fp32"].median / times["fp16"].median


def _mode(tile: Tile | None) -> Mode:
    """What asks for the tile's accumulator; plain fp16 for the CPU path."""
    label = "fp16" if tile is None else accumulator_label(tile.accum, tile.promote)
    return trials.MODES[f"fp16 acc {label}"]


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
        validation.keep(verdict, x.device)
    return verdict


def _measure(tile: Tile | None, x: Voxels, repeats: int) -> Verdict:
    sites, mode = [trials.site(x, 3)], _mode(tile)
    if x.device.type == "cuda":
        sites.append(trials.site(trials.scene(x.device, SMALL), 3))
    name = tile.name if tile is not None else "cpu"
    wanted = parse_accumulator(mode.accumulator)
    forced: dict[str, Any] = {"fwd_algo_mode": name, "dgrad_algo_mode": name} if tile is not None else {}
    worst: tuple[float, Errors, Bound] | None = None
    largest: Certificate | None = None
    signed, repeatable = 0.0, True
    for where, family, op in product(sites, FAMILIES, ("fprop", "dgrad")):
        given = trials.draw(op, family, torch.float16, CHANNELS, where)
        proof = certificate(
            given.x if op == "fprop" else given.dy, given.weight, transpose=op == "dgrad", chunk=wanted[1]
        )
        if largest is None or not proof.bound <= largest.bound:
            largest = proof
        limit = trials.limit_of(op, mode, mode.accumulator, CHANNELS, where)
        with settings.override(**forced):
            results = trials.execute(op, mode, given, where)
            first, record = next(results)
            ran = record.tile if op == "fprop" else record.dgrad_tile
            if (record.accumulator, record.chunk, ran) != (*wanted, name):
                label = accumulator_label(record.accumulator, record.chunk)
                return Verdict(
                    name, False, (Check("ran", False, f"{ran} with {label} ran instead: {record.reason}"),)
                )
            found, equal = trials.examine(results, given, limit, first, repeats)
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
    size, repeats = trials.defaults(device, voxels, repeats)
    x = trials.scene(device, size)
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
    owner = store.owner_of(device)
    rates = board(device) if on_gpu else None
    return {
        "kind": "gate",
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": owner and owner.driver,
        "build": owner and owner.build,
        "board": None if rates is None else {**asdict(rates), "ratio": rates.ratio},
        "verdicts": [asdict(verdict) for verdict in verdicts],
    }
