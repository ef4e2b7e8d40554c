"""`voxmma.tiles()`: the kernel table as a user reads it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from voxmma._extension import _C
from voxmma.dispatch import settings
from voxmma.dispatch.selection import card, select_tile
from voxmma.dispatch.settings import AlgoMode
from voxmma.ops.kernels import _PROMOTED, compiled

# ---- the table ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Published:
    """A tile of the published family: its shape, and the channel count whose role it plays."""

    op: str
    m: int
    n: int
    k: int
    accum: str
    stages: int
    channels: int
    rule: str
    offsets_precomputed: bool

    @property
    def name(self) -> str:
        suffix = ("_f16acc" if self.accum == "fp16" else "") + ("_3s" if self.stages == 3 else "")
        return f"{self.op}_{self.m}x{self.n}x{self.k}{suffix}{'_pcoff' if self.offsets_precomputed else ''}"


def _published() -> tuple[Published, ...]:
    family = [
        ("fwd", 32, 32, 32, "fp16", 2, 32, "C <= 48, fp16 only"),
        ("fwd", 64, 64, 32, "fp32", 2, 64, "C = 64"),
        ("fwd", 128, 64, 32, "fp32", 2, 64, "C = 64"),
        ("fwd", 64, 128, 32, "fp32", 3, 128, "C >= 128"),
        ("fwd", 64, 128, 32, "fp16", 2, 128, "C >= 128"),
        ("dgrad", 64, 64, 32, "fp32", 2, 64, "C = 64"),
        ("dgrad", 64, 128, 32, "fp32", 2, 128, "C >= 128"),
        ("dgrad", 64, 64, 32, "fp16", 2, 64, "C = 64"),
        ("dgrad", 64, 128, 32, "fp16", 2, 128, "C >= 128"),
    ]
    return tuple(Published(*row, offsets_precomputed=pcoff) for pcoff in (False, True) for row in family)


#: The published tiles of this family. All of ours read precomputed offsets (the tile plan), so one of ours
#: takes the role of a published tile and of its offset-precomputing variant.
PUBLISHED = _published()


@dataclass(frozen=True)
class TableRow:
    """A line of the table. `ours`: for published tiles, our tile in that role, or why there is none."""

    name: str
    op: str
    shape: str
    stages: int
    atom: str
    inputs: str
    accumulator: str
    architectures: str
    shared_memory: int
    channel_rule: str
    in_pool: bool
    ours: str = ""


class TileTable(Sequence[TableRow]):
    """Rows of the tile table; prints as text."""

    _columns = (
        "name",
        "op",
        "shape",
        "stages",
        "atom",
        "inputs",
        "accumulator",
        "architectures",
        "shared_memory",
        "channel_rule",
    )

    def __init__(self, rows: Sequence[TableRow], title: str) -> None:
        self.rows = tuple(rows)
        self.title = title

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return self.rows[index]

    def __iter__(self) -> Iterator[TableRow]:
        return iter(self.rows)

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """(column titles, one list of strings per row)."""
        titles = [name.replace("_", " ") for name in self._columns] + ["in pool", "our tile in this role"]
        lines = [
            [
                *(str(getattr(row, name) or "-") for name in self._columns),
                "yes" if row.in_pool else "no",
                row.ours,
            ]
            for row in self.rows
        ]
        return titles, lines

    def __str__(self) -> str:
        titles, lines = self.cells()
        widths = [max(map(len, column)) for column in zip(titles, *lines, strict=True)]
        text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
                for line in (titles, ["-" * width for width in widths], *lines)]  # fmt: skip
        return "\n".join([self.title, *text])

    __repr__ = __str__


def _admitted(accumulator: str, name: str, modes: tuple[AlgoMode, ...]) -> bool:
    """Whether the settings of this moment let a tile into one of the pools `modes`."""
    if accumulator == _PROMOTED:
        return False  # only a call's own `accumulator` asks for it
    requested, decided_by = settings.resolve_fp16_accum(None, torch.float16)
    for mode in modes:
        named = name in mode
        if mode[0] not in settings.ALGO_MODE_WORDS and not named:
            continue
        explicit = mode == ("all",) or named
        if accumulator != "fp16" or requested or (explicit and decided_by == "default"):
            return True
    return False


def tiles(device: torch.device | str | None = None) -> TileTable:
    """The tile table: every compiled kernel, the CPU path, and the published tiles of this family.

    `in_pool` says which may be chosen on `device` (default: the current CUDA device if this build can use it,
    else the CPU) with the settings of this moment and no flag on the call. For published tiles, `ours` names
    the tile that takes the role there (on a capability 9.0 device when `device` is the CPU), or says it is
    not compiled here.
    """
    if device is None:
        device = "cuda" if _C.HAS_CUDA and torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    here = card(device) if device.type == "cuda" else None
    modes = {op: settings.get_algo_mode(op) for op in settings.OPS}
    rows = []
    for tile in compiled():
        ops = ("wgrad",) if tile.op == "wgrad" else ("fwd", "dgrad")
        rows.append(
            TableRow(
                name=tile.name,
                op=tile.op,
                shape=f"{tile.m}x{tile.n}x{tile.k}",
                stages=tile.stages,
                atom=tile.atom,
                inputs=tile.input,
                accumulator=tile.accum,
                architectures=tile.architectures,
                shared_memory=tile.shared_memory,
                channel_rule=tile.channel_rule,
                in_pool=here is not None
                and tile.runs_on(here)
                and (tile.scheme != "tf32" or settings.get_fp32_precision() == "tf32")
                and _admitted(tile.accum, tile.name, tuple(modes[op] for op in ops)),
            )
        )
    on_cpu = device.type == "cpu"
    tf32 = settings.get_fp32_precision() == "tf32"
    for name, op, inputs, accumulator, possible in (
        ("cpu", "fprop", "fp16, bf16, fp32", "fp32", True),
        ("cpu", "fprop", "fp16 (emulated)", "fp16", settings.get_fp16_accum()),
        ("cpu", "fprop", "fp64", "fp64", True),
        ("cpu", "wgrad", "fp16, bf16, fp32", "fp32", True),
        ("cpu_p32, _p64, _p128, _poff", "fprop", "fp16 (emulated)", _PROMOTED, False),
        ("cpu_tf32", "fprop, wgrad", "fp32 (rounded)", "fp32", tf32),
    ):
        rows.append(
            TableRow(
                name=name,
                op=op,
                shape="any",
                stages=0,
                atom="torch GEMM an offset",
                inputs=inputs,
                accumulator=accumulator,
                architectures="cpu",
                shared_memory=0,
                channel_rule="any C",
                in_pool=on_cpu and possible,
            )
        )
    for published in PUBLISHED:
        c = published.channels
        try:
            ours = select_tile(
                published.op, torch.float16, published.accum, c, c, 1, (9, 0) if here is None else device
            ).name
        except RuntimeError:
            ours = "not compiled here"
        rows.append(
            TableRow(
                name=published.name,
                op=published.op,
                shape=f"{published.m}x{published.n}x{published.k}",
                stages=published.stages,
                atom="SM80_16x8x16",
                inputs="fp16" if published.accum == "fp16" else "fp16, bf16",
                accumulator=published.accum,
                architectures="published",
                shared_memory=0,
                channel_rule=published.rule,
                in_pool=False,
                ours=ours,
            )
        )
    where = f"{device} (sm_{here.code[0]}{here.code[1]}{here.limited})" if here else str(device)
    build = f"built for {', '.join(_C.CUDA_ARCHS)}" if _C.HAS_CUDA else "built without CUDA"
    return TileTable(rows, f"voxmma tiles, {build}; pool on {where}")
