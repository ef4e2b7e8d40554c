"""The tile table, and the one place that chooses from it.

`plan_call` decides a call's accumulator and its three tiles; it is a pure function of its arguments, so a
call under torch.compile takes the same decision as an eager one. `select_tile` is the selector proper.
`tiles()` shows the table.

An fp16-accumulator tile can be chosen in three ways only: the request resolved to True; nobody said False and
an algorithm mode names the tile; nobody said False, the mode is `all`, and a measurement prefers the tile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from voxmma import _C, settings
from voxmma.settings import DEFAULT_POOLS, AlgoMode, Pools

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

#: Capabilities with more than 99 KB of shared memory a block.
_LARGE_SHARED_MEMORY = {(8, 0), (8, 7), (9, 0), (10, 0), (10, 3)}
#: Groups of fewer channels fill less than half of one MMA step and run on plain FMAs.
_MMA_MIN_GROUP_CHANNELS = 8
#: Fewest reduced channels for which the wgmma pipeline is worth its fill.
_SM90_MIN_CHANNELS = 16


@dataclass(frozen=True)
class Tile:
    """One compiled kernel. `op` is 'fprop' (forward and input gradient) or 'wgrad'.

    fprop: m output rows x n output channels x k-channel chunks; wgrad: m x n block of dW, k rows a step.
    `promote`: channels between promotions of an fp16 accumulator (0 never, -1 every offset). `arch`: 80 runs
    on sm_80 and newer, 90 on sm_90 only.
    """

    name: str
    op: str
    input: str
    accum: str
    m: int
    n: int
    k: int
    stages: int
    atom: str
    promote: int
    arch: int

    @property
    def needs_large_shared_memory(self) -> bool:
        """More than 99 KB a block: fprop with 64-channel chunks, wgrad with two stages (plain FMAs never)."""
        return self.atom != "SIMT" and (self.k > 32 if self.op == "fprop" else self.stages > 1)

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a device of this compute capability can run this build's kernel."""
        if not built_for(capability) or (self.arch == 90 and capability != (9, 0)):
            return False
        if self.needs_large_shared_memory and capability not in _LARGE_SHARED_MEMORY:
            return False
        return capability[0] * 10 + capability[1] >= self.arch

    @property
    def architectures(self) -> str:
        if self.arch == 90:
            return "sm_90"
        return f"sm_{self.arch} and newer{', > 99 KB' if self.needs_large_shared_memory else ''}"

    @property
    def channel_rule(self) -> str:
        if self.atom == "SIMT":
            small = f", groups with fewer than {_MMA_MIN_GROUP_CHANNELS} channels"
            return "any C" + (small if self.input in ("fp16", "bf16") else "")
        if self.op == "wgrad":
            return "any C"
        largest = max(tile.n for tile in compiled() if tile.op == "fprop")
        columns = "any C_out" if self.n == largest else f"C_out <= {self.n}"
        return f"{columns}, C_in {'% 64 = 0 or > 96' if self.k == 64 else '<= 96'}"


@functools.cache
def compiled() -> tuple[Tile, ...]:
    """The kernels in this build, in table order; empty in a build without CUDA."""
    return tuple(Tile(input=row.pop("dtype"), **row) for row in map(dict, _C.kernel_configs()))


def built_for(capability: tuple[int, int]) -> bool:
    """Whether this build holds machine code (or PTX) for a device: 9.0a serves 9.0 only, 8.0 every 8.x."""
    for arch in _C.CUDA_ARCHS:
        major, minor = (int(part.rstrip("a")) for part in arch.removesuffix("+PTX").split("."))
        if (major, minor) == capability or (arch.endswith("+PTX") and (major, minor) <= capability):
            return True
        if "a" not in arch and major == capability[0] and minor <= capability[1]:
            return True
    return False


@dataclass(frozen=True)
class TileChoice:
    """A tile name ('cpu' on the CPU) and why it was chosen."""

    name: str
    reason: str


# ---- the selector ------------------------------------------------------------------------------------------


def _covering(block: int, channels: int) -> tuple[bool, int]:
    """Sorts block sizes: the smallest that holds all channels, else the largest."""
    return (block < channels, block if block >= channels else -block)


def select_tile(
    op: str,
    dtype: torch.dtype,
    accumulator: str,
    c_in: int,
    c_out: int,
    groups: int = 1,
    target: torch.device | str | tuple[int, int] = "cpu",
    mode: AlgoMode = ("auto",),
) -> TileChoice:
    """Chooses the tile of one operation.

    Args:
        op: 'fwd', 'dgrad' or 'wgrad'.
        dtype: compute dtype.
        accumulator: 'fp32', 'fp16' or 'fp64'; only tiles with this accumulator are considered.
        c_in, c_out: channels of the layer (all groups together), whatever `op` is.
        target: a device, or a compute capability such as (9, 0).
        mode: the tile pool, as settings.get_algo_mode(op) gives it. Names limit the pool to tiles that can
            run this call; when none can, the whole pool is used and the reason says so.

    Raises RuntimeError naming what is missing when this build has no kernel for the call.
    """
    if op not in settings.OPS:
        raise ValueError(f"op must be one of {', '.join(settings.OPS)}, got {op!r}")
    if not isinstance(target, tuple):
        target = torch.device(target)
        if target.type == "cpu":
            return TileChoice("cpu", "CPU path")
        target = torch.cuda.get_device_capability(target)
    kind = "wgrad" if op == "wgrad" else "fprop"
    reduced, written = (
        (c_out // groups, c_in // groups) if op == "dgrad" else (c_in // groups, c_out // groups)
    )

    pool = [
        tile
        for tile in compiled()
        if (tile.op, tile.input, tile.accum) == (kind, DTYPE_NAMES[dtype], accumulator)
        and tile.runs_on(target)
    ]
    if not pool:
        built = f"for {', '.join(_C.CUDA_ARCHS)}" if compiled() else "without CUDA"
        raise RuntimeError(
            f"no {kind} kernel for {DTYPE_NAMES[dtype]} inputs with {accumulator} accumulators runs on "
            f"sm_{target[0]}{target[1]}: this voxmma was built {built}; rebuild with TORCH_CUDA_ARCH_LIST="
            f"{target[0]}.{target[1]}{'a' if target[0] == 9 else ''}"
        )
    note = ""
    if mode[0] not in settings.ALGO_MODE_WORDS:
        named = [tile for tile in pool if tile.name in mode]
        note = (
            f" of {op} pool [{', '.join(mode)}]"
            if named
            else f" ({op} pool [{', '.join(mode)}] cannot run this)"
        )
        pool = named or pool

    small = groups > 1 and min(reduced, written) < _MMA_MIN_GROUP_CHANNELS
    chunk = 64 if reduced % 64 == 0 or reduced > 96 else 32

    def rank(tile: Tile) -> tuple[Any, ...]:
        simt = tile.atom == "SIMT"
        deep_enough = tile.arch < 90 or kind == "wgrad" or reduced >= _SM90_MIN_CHANNELS
        blocks = _covering(tile.m, reduced) if kind == "wgrad" else (tile.k != chunk,)
        return (
            simt != small,
            not deep_enough,
            -tile.arch,
            *_covering(tile.n, written),
            *blocks,
            -tile.stages,
        )

    best = min(pool, key=rank)
    if best.atom == "SIMT":
        why = (
            f"groups of {min(reduced, written)} channels"
            if small
            else f"{DTYPE_NAMES[dtype]} runs on plain FMAs"
        )
    else:
        why = f"{written} output and {reduced} reduced channels on sm_{target[0]}{target[1]}"
    return TileChoice(best.name, why + note)


# ---- a call's accumulator and tiles ------------------------------------------------------------------------


Plan = tuple[str, str, str, str, str]


@torch.compiler.assume_constant_result
def plan_call(
    dtype: torch.dtype,
    requested: bool,
    decided_by: str,
    c_in: int,
    c_out: int,
    groups: int,
    target: torch.device | tuple[int, int],
    pools: Pools = DEFAULT_POOLS,
) -> Plan:
    """Decides one convolution call.

    Args:
        dtype: compute dtype; requested, decided_by: what settings.resolve_fp16_accum answered.
        c_in, c_out, groups: channels of the layer; target: device, or compute capability.
        pools: what settings.get_pools() answered.

    Returns:
        (accumulator, reason, tile, dgrad_tile, wgrad_tile), all strings. Forward and input gradient run with
        the one accumulator; the weight gradient's tile accumulates in fp32 (fp64 for fp64) whatever was
        requested.
    """
    return _plan_call(dtype, requested, decided_by, c_in, c_out, groups, target, pools)


@functools.lru_cache(maxsize=4096)
def _plan_call(
    dtype: torch.dtype,
    requested: bool,
    decided_by: str,
    c_in: int,
    c_out: int,
    groups: int,
    target: torch.device | tuple[int, int],
    pools: Pools,
) -> Plan:
    fwd_mode, dgrad_mode, wgrad_mode, small_ch_ceil, fp32_precision = pools
    on_cpu = isinstance(target, torch.device) and target.type == "cpu"
    exact = "fp64" if dtype == torch.float64 else "fp32"
    shape = (c_in, c_out, groups, target)

    def tiles_for(accumulator: str, reason: str) -> Plan:
        forward = select_tile("fwd", dtype, accumulator, *shape, fwd_mode)
        dgrad = select_tile("dgrad", dtype, accumulator, *shape, dgrad_mode)
        wgrad = select_tile("wgrad", dtype, exact, *shape, wgrad_mode)
        reasons = [reason, forward.reason]
        for choice, mode in ((dgrad, dgrad_mode), (wgrad, wgrad_mode)):
            reasons += [] if mode[0] in settings.ALGO_MODE_WORDS else [choice.reason]
        return accumulator, "; ".join(reasons), forward.name, dgrad.name, wgrad.name

    def fp16_runs() -> str | None:
        """Why no fp16-accumulator tile can run this call; None when one can."""
        try:
            for op in ("fwd", "dgrad"):
                select_tile(op, dtype, "fp16", *shape)
        except RuntimeError as error:
            return str(error)
        return None

    if dtype in (torch.float32, torch.float64):
        if requested:
            return tiles_for(exact, f"{DTYPE_NAMES[dtype]} inputs never become fp16")
        if fp32_precision == "tf32" and dtype == torch.float32:
            return tiles_for(exact, "tf32 allowed, but this build has no tf32 tile: ieee")
        return tiles_for(exact, f"{DTYPE_NAMES[dtype]} inputs")

    forbidden = not requested and decided_by != "default"
    named = {tile.accum for tile in compiled() if tile.name in fwd_mode and tile.op == "fprop"}
    if requested:
        if dtype == torch.bfloat16:
            return tiles_for(
                "fp32", "bf16 products do not fit an fp16 accumulator and no rescale is available yet"
            )
        if decided_by == "inference_mode":
            if on_cpu:
                return tiles_for("fp32", "the automatic rule does not apply on the CPU: emulation is no gain")
            return tiles_for("fp32", "automatic rule: no measured gain on record for this device")
        if on_cpu:
            return tiles_for("fp16", "emulated: the running sum is rounded to fp16 after every offset")
        missing = fp16_runs()
        if missing is not None:
            return tiles_for("fp32", missing)
        return tiles_for("fp16", "requested explicitly")
    if on_cpu or forbidden or dtype != torch.float16:
        return tiles_for("fp32", "fp16 accumulators forbidden" if forbidden else "default")
    if named == {"fp16"} and fp16_runs() is None:
        return tiles_for("fp16", "the forward pool names fp16-accumulator tiles only")
    if fwd_mode == ("all",) or "fp16" in named or max(c_in, c_out) <= small_ch_ceil:
        return tiles_for(
            "fp32", "fp16-accumulator tiles are admitted, but no measurement on record prefers one"
        )
    return tiles_for("fp32", "default")


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
    channel_rule: str
    in_pool: bool
    ours: str = ""


class TileTable(Sequence[TableRow]):
    """Rows of the tile table; prints as text, and as a table under rich."""

    _columns = (
        "name",
        "op",
        "shape",
        "stages",
        "atom",
        "inputs",
        "accumulator",
        "architectures",
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

    def __rich__(self) -> Any:
        from rich.table import Table

        titles, lines = self.cells()
        table = Table(*titles, title=self.title)
        for line in lines:
            table.add_row(*line)
        return table


def _admitted(accumulator: str, names: tuple[str, ...], modes: tuple[AlgoMode, ...]) -> bool:
    """Whether the settings of this moment let a tile of these names into one of the pools `modes`."""
    requested, decided_by = settings.resolve_fp16_accum(None, torch.float16)
    for mode in modes:
        named = any(name in mode for name in names)
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
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    modes = {op: settings.get_algo_mode(op) for op in settings.OPS}
    rows = []
    for tile in compiled():
        ops = ("wgrad",) if tile.op == "wgrad" else ("fwd", "dgrad")
        here = capability is not None and tile.runs_on(capability)
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
                channel_rule=tile.channel_rule,
                in_pool=here and _admitted(tile.accum, (tile.name,), tuple(modes[op] for op in ops)),
            )
        )
    on_cpu = device.type == "cpu"
    for accumulator, inputs in (("fp32", "fp16, bf16, fp32"), ("fp16", "fp16 (emulated)"), ("fp64", "fp64")):
        rows.append(
            TableRow(
                "cpu",
                "fprop",
                "any",
                0,
                "torch GEMM an offset",
                inputs,
                accumulator,
                "cpu",
                "any C",
                on_cpu and (accumulator != "fp16" or settings.get_fp16_accum()),
            )
        )
    rows.append(
        TableRow(
            "cpu",
            "wgrad",
            "any",
            0,
            "torch GEMM an offset",
            "fp16, bf16, fp32",
            "fp32",
            "cpu",
            "any C",
            on_cpu,
        )
    )
    for published in PUBLISHED:
        c = published.channels
        try:
            ours = select_tile(
                published.op, torch.float16, published.accum, c, c, 1, capability or (9, 0)
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
                channel_rule=published.rule,
                in_pool=False,
                ours=ours,
            )
        )
    where = f"{device} (sm_{capability[0]}{capability[1]})" if capability else str(device)
    build = f"built for {', '.join(_C.CUDA_ARCHS)}" if _C.HAS_CUDA else "built without CUDA"
    return TileTable(rows, f"voxmma tiles, {build}; pool on {where}")
