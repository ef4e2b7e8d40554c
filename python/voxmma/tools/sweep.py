"""`voxmma sweep`: the error of every precision mode against fp64, held to its worst-case bound.

Each row is one operation (forward, input gradient, weight gradient) in one mode, at one channel count, kernel
volume and input family. All cells are compared. Repeats must equal the first run bit by bit; one that does
not is compared with fp64 too, and the worst is kept. The fp64 result belongs to the operands: it is computed
once and shared by all accumulators of an input format. `run` measures and returns plain data,
voxmma.tools.sweep_show makes tables and plots of it.

A row fails on a non-finite cell, a cell above its bound, repeats that differ, or an fp16 accumulator whose
error is no larger than that of fp32: then the fp16 path never ran.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES, sum_dtype
from voxmma.ops.kernels import accumulator_label
from voxmma.sparse.tensor import Voxels
from voxmma.verify import accuracy
from voxmma.verify.accuracy import Bound, Errors
from voxmma.verify.families import FAMILIES
from voxmma.verify.overflow import rescaled_floor
from voxmma.verify.trials import (
    KERNEL_SIZES,
    MODES,
    OPS,
    Operands,
    Site,
    defaults,
    draw,
    examine,
    execute,
    limit_of,
    scene,
    site,
)

# Relative difference between results of fp16 and fp32 accumulators by channels, 3x3x3, as WarpConvNet's
# documentation gives it ("Accumulator Precision", edited 2026-05-26). Its reference rounds the running sum to
# fp16 once per kernel offset.
PUBLISHED = {8: 1.4e-5, 32: 2.4e-4, 128: 5.3e-4, 256: 7.5e-4}


@dataclass(frozen=True)
class Case:
    """One row to be. `mode` is a key of MODES."""

    volume: int
    channels: int
    op: str
    family: str
    mode: str

    def __str__(self) -> str:
        return f"{self.op} {self.mode}, C={self.channels}, K={self.volume}, {self.family}"


@dataclass(frozen=True)
class Grid:
    """The cases of a sweep: every combination, volumes varying slowest, then channels."""

    ops: Sequence[str] = OPS
    modes: Sequence[str] = tuple(MODES)
    channels: Sequence[int] = (8, 16, 32, 64, 96, 128, 256)
    volumes: Sequence[int] = (27,)
    families: Sequence[str] = tuple(FAMILIES)

    def __post_init__(self) -> None:
        known: dict[str, Sequence[Any]] = {
            "ops": OPS,
            "modes": tuple(MODES),
            "volumes": tuple(KERNEL_SIZES),
            "families": tuple(FAMILIES),
        }
        for field, allowed in known.items():
            for value in getattr(self, field):
                if value not in allowed:
                    raise ValueError(f"{field}: {value!r} is none of {', '.join(map(str, allowed))}")
        if not all(c >= 1 for c in self.channels):
            raise ValueError(f"channels must be positive, got {list(self.channels)}")

    def cases(self) -> list[Case]:
        """In the order in which they are measured. Modes of one input format stand together."""
        modes = sorted(self.modes, key=list(MODES).index)
        axes = (self.volumes, self.channels, self.ops, self.families, modes)
        return [Case(*values) for values in product(*axes)]


@dataclass(frozen=True)
class Row:
    """One case. `n` is the largest number of products that a cell sums."""

    op: str
    mode: str
    family: str
    channels: int
    volume: int
    n: int
    accumulator: str
    """What ran."""
    tile: str
    max_eta: float
    p99_eta: float
    rel_l2: float
    max_rel: float
    nonfinite: int
    cells: int
    bound: float
    ratio: float
    """max_eta / bound"""
    formula: str
    verdict: str
    """'ok', 'not run: why', or what is wrong"""

    @property
    def failed(self) -> bool:
        """Whether the verdict is neither 'ok' nor 'not run'."""
        return self.verdict != "ok" and not self.verdict.startswith("not run")


def measure(case: Case, given: Operands, where: Site, repeats: int) -> Row:
    """Runs a case `repeats` times and judges it."""
    op, mode, channels = case.op, MODES[case.mode], case.channels
    wide = DTYPE_NAMES[sum_dtype(mode.dtype)]
    wanted = wide if op == "wgrad" else mode.accumulator
    results = execute(op, mode, given, where)
    first, record = next(results)
    ran = wide if op == "wgrad" else accumulator_label(record.accumulator, record.chunk)
    tile = {"fprop": record.tile, "dgrad": record.dgrad_tile, "wgrad": record.wgrad_tile}[op]
    as_asked = ran == wanted and mode.tf32 == tile.endswith("_tf32")
    if mode.tf32 and not as_asked:  # what ran read the operands as they are
        mode = MODES["fp32 acc fp32"]
        given = draw(op, case.family, mode.dtype, channels, where)
    limit = limit_of(op, mode, ran, channels, where)
    n = where.reduction(op, channels)[0]
    operands = {
        "fprop": (given.x, given.weight),
        "dgrad": (given.dy, given.weight),
        "wgrad": (given.x, given.dy),
    }
    a, b = operands[op]
    if record.rescaled and op != "wgrad":
        floor = rescaled_floor(limit.floor, n, a, b, transpose=op == "dgrad", chunk=record.chunk)
        limit = replace(limit, floor=floor)
    if tile.endswith("_3xtf32"):
        limit = replace(limit, floor=limit.floor + accuracy.tf32_loss(n, a, b))
    found, repeatable = examine(results, given, limit, first, repeats)
    return Row(
        op=op,
        mode=case.mode,
        family=case.family,
        channels=channels,
        volume=case.volume,
        n=n,
        accumulator=ran,
        tile=tile,
        **asdict(found),
        bound=limit.eta,
        ratio=found.max_eta / limit.eta,
        formula=limit.formula,
        verdict=judge(found, limit, repeatable, "" if as_asked else record.reason),
    )


def judge(found: Errors, limit: Bound, repeatable: bool, fallback: str) -> str:
    """The verdict of one case on its own; wrong results count whatever ran."""
    if found.nonfinite:
        return f"{found.nonfinite} non-finite cells"
    if not found.within(limit):
        return "above the bound"
    if not repeatable:
        return "repeats differ"
    return f"not run: {fallback}" if fallback else "ok"


def cross_check(rows: Sequence[Row]) -> list[Row]:
    """Fails fp16-accumulator rows whose rel-L2 does not exceed that of the same case with fp32 accumulators.

    Applies to forward and dgrad of the families whose sums need rounding at every step, from four offsets on.
    """
    fp32 = {
        (r.op, r.family, r.channels, r.volume): r.rel_l2
        for r in rows
        if r.mode == MODES["fp16 acc fp32"].name
    }
    checked = []
    for row in rows:
        other = fp32.get((row.op, row.family, row.channels, row.volume))
        relevant = (
            row.mode == MODES["fp16 acc fp16"].name
            and row.accumulator == "fp16"
            and row.family in ("signed", "one_signed")
            and row.volume >= 8
        )
        if relevant and other is not None and row.n >= 4 * row.channels and not row.rel_l2 > other:
            row = replace(row, verdict="no fp16 error: the fp16 accumulator did not run")
        checked.append(row)
    return checked


def run(
    device: torch.device,
    grid: Grid | None = None,
    voxels: int | None = None,
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
    compare: bool = True,
    budget: float | None = None,
    keep: Callable[[dict[str, Any]], object] = lambda result: None,
) -> dict[str, Any]:
    """Runs a sweep.

    Args:
        device: where. grid: which cases; default all of Grid().
        voxels, repeats: size of the scene and runs of each case; see `defaults`.
        advance: called with a text before each case.
        compare: make the comparison with the published table too, before everything else.
        budget: seconds after which no further case is begun; None: no limit.
        keep: called with the result so far whenever ten seconds of work have been added to it, and before an
            exception goes on its way.

    Returns:
        Plain data: device, arch, torch, build, voxels, pairs (by kernel volume), repeats, seconds, rows
            (fields of Row), published (list), left_out (volume, channels, op and how many rows the budget
            left no time for), failed (number of rows).
    """
    begin = time.monotonic()
    cases = (grid or Grid()).cases()
    size, repeats = defaults(device, voxels, repeats)
    x = scene(device, size)
    table = published(x) if compare else []
    rows: list[Row] = []
    pairs: dict[str, int] = {}

    def result() -> dict[str, Any]:
        checked = cross_check(rows)
        left = Counter((case.volume, case.channels, case.op) for case in cases[len(rows) :])
        return {
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "arch": accuracy.arch_of(device),
            "torch": torch.__version__,
            "build": _C.BUILD_ID,
            "voxels": x.num_voxels,
            "pairs": pairs,
            "repeats": repeats,
            "seconds": time.monotonic() - begin,
            "rows": [asdict(row) for row in checked],
            "published": table,
            "left_out": [
                {"volume": volume, "channels": channels, "op": op, "rows": count}
                for (volume, channels, op), count in left.items()
            ],
            "failed": sum(row.failed for row in checked),
        }

    def begun() -> Iterator[Case]:
        kept = begin
        for case in cases:
            now = time.monotonic()
            if budget is not None and now - begin > budget:
                return
            if now - kept > 10:
                keep(result())
                kept = time.monotonic()
            advance(str(case))
            yield case

    try:
        for row in _rows(begun(), x, repeats, pairs):
            rows.append(row)
    except BaseException:  # also an interrupt
        keep(result())
        raise
    return result()


def _rows(cases: Iterable[Case], x: Voxels, repeats: int, pairs: dict[str, int]) -> Iterator[Row]:
    """Measures cases one after the other; consecutive ones share what they can. Notes the maps' `pairs`."""
    where: Site | None = None
    given: tuple[Any, Operands] | None = None
    for case in cases:
        if where is None or case.volume != where.mapping.kernel_volume:
            where = site(x, KERNEL_SIZES[case.volume])
            pairs[str(case.volume)] = where.mapping.num_pairs
        mode = MODES[case.mode]
        key = (case.volume, case.channels, case.op, case.family, mode.dtype, mode.tf32)
        if given is None or given[0] != key:
            given = None  # frees the tensors of the one before
            given = key, draw(case.op, case.family, mode.dtype, case.channels, where, mode.tf32)
        yield measure(case, given[1], where, repeats)


def offset_rounded(x: Tensor, weight: Tensor, pairs: accuracy.Pairs, n_out: int) -> Tensor:
    """A forward pass whose running sum is rounded to fp16 after each offset; products exact. (n, C_out)."""
    y = torch.zeros(n_out, weight.shape[-1], dtype=torch.float16, device=x.device)
    for k, (in_rows, out_rows) in enumerate(pairs):
        added = x[in_rows].double() @ weight[k].double()
        y[out_rows] = (y[out_rows].double() + added).half()
    return y


def published(x: Voxels) -> list[dict[str, Any]]:
    """Published differences of fp16 from fp32 accumulators beside ours: 3x3x3, signed inputs, fp16 output.

    `difference` compares our two accumulators, `per_offset` our fp16 accumulator with a reference that rounds
    once per offset, as the published reference does. Both are relative L2 norms.
    """
    where = site(x, 3)
    lines = []
    for channels, value in PUBLISHED.items():
        given = draw("fprop", "signed", torch.float16, channels, where)
        fp32, _ = next(execute("fprop", MODES["fp16 acc fp32"], given, where))
        fp16, record = next(execute("fprop", MODES["fp16 acc fp16"], given, where))
        rounded = offset_rounded(given.x, given.weight, where.pairs, x.num_voxels).double()
        lines.append(
            {
                "channels": channels,
                "published": value,
                "accumulator": record.accumulator,
                "difference": accuracy.rel_l2([fp16], [fp32]),
                "per_offset": accuracy.rel_l2([fp16], [rounded]),
            }
        )
    return lines
