"""The tile table, and the one place that chooses from it.

`plan_call` decides a call's accumulator and its three tiles; it is a function of its arguments and of what is
on record, so a call under torch.compile takes the same decision as an eager one. `select_tile` is the
selector proper. Where `voxmma tune` has measured a call on this card, its winner goes before the heuristic
(voxmma.tunecache); only tiles of the accumulator that was decided compete. `tiles()` shows the table.

An fp16-accumulator tile can be chosen in these ways only, and never against a False:

* an explicit request (layer or call, run time, environment), unless a measurement on record found the tile
  wrong on this device; speed is no reason to refuse;
* an algorithm mode that names fp16-accumulator tiles only;
* where it is merely admitted (inference mode, mode `all` or a list with other tiles, the small-channel
  ceiling): if the gate (voxmma.gate) has a verdict on record for this very device that allows it, gain
  included.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from voxmma import _C, settings, tunecache
from voxmma.settings import DEFAULT_POOLS, AlgoMode, Limits, Pools

DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}

#: KB of shared memory a block may have, by capability: CUDA Programming Guide, "Compute Capabilities",
#: "Maximum amount of shared memory per thread block". All others from 8.0 on have _LEAST_SHARED_MEMORY.
_SHARED_MEMORY = {(8, 0): 163, (8, 7): 163, (9, 0): 227, (10, 0): 227, (10, 3): 227, (11, 0): 227}
_LEAST_SHARED_MEMORY = 99
#: Groups of fewer channels fill less than half of one MMA step and run on plain FMAs.
_MMA_MIN_GROUP_CHANNELS = 8
#: Fewest reduced channels for which the wgmma pipeline is worth its fill.
_SM90_MIN_CHANNELS = 16
#: Fewest channels, on either side of a group, for which three TF32 products beat one plain FMA.
_3XTF32_MIN_CHANNELS = 64

#: Chunks of promoted fp16 accumulators as they are written: channels between promotions, 'offset' = -1.
CHUNKS = {"32": 32, "64": 64, "128": 128, "offset": -1}
DEFAULT_CHUNK = 64
_PROMOTED = "fp16_promoted"


def parse_accumulator(text: str) -> tuple[str, int]:
    """('fp32', 0), ('fp16', 0), ('fp64', 0) or ('fp16_promoted', chunk) of what `accumulator=` may say.

    'fp16_promoted' alone promotes every 64 channels; 'fp16_promoted:32', ':64', ':128' and ':offset' (once
    per kernel offset, chunk -1) say it. Raises ValueError naming the choices.
    """
    name, _, chunk = text.partition(":") if isinstance(text, str) else ("", "", "")
    if name == _PROMOTED and (chunk in CHUNKS or text == _PROMOTED):
        return name, CHUNKS.get(chunk, DEFAULT_CHUNK)
    if text in ("fp32", "fp16", "fp64"):
        return text, 0
    choices = ", ".join(f"{_PROMOTED}:{name}" for name in CHUNKS)
    raise ValueError(f"accumulator must be one of fp32, fp16, {choices} or None, got {text!r}")


def accumulator_label(name: str, chunk: int = 0) -> str:
    """The inverse of parse_accumulator: such as 'fp16_promoted:64'."""
    return f"{name}:{'offset' if chunk == -1 else chunk}" if name == _PROMOTED else name


class Card(NamedTuple):
    """What tiles are chosen for: a device as the settings let it appear, or any device of a capability."""

    capability: tuple[int, int]
    shared_memory: int
    """bytes that a block may have"""
    code: tuple[int, int]
    """the capability whose code is run: the device's own, whatever the settings say"""
    limited: str = ""
    """what the settings changed, for reports"""


def shared_memory_of(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that a block may have on devices of a compute capability."""
    return 1024 * _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY)


def card(target: torch.device | tuple[int, int], limits: Limits | None = None) -> Card:
    """The card that tiles are chosen for.

    Args:
        target: a CUDA device, asked itself; or a compute capability, to which no setting applies.
        limits: what settings.get_limits() answered; None asks it.

    Raises ValueError where the settings ask for a newer card or for more shared memory than the device has.
    """
    if isinstance(target, tuple):
        return Card(target, shared_memory_of(target), target)
    index = torch.cuda.current_device() if target.index is None else target.index
    own = torch.cuda.get_device_capability(target)
    capability, memory = own, _C.shared_memory(index) if _C.HAS_CUDA else shared_memory_of(own)
    asked, asked_memory = settings.get_limits() if limits is None else limits
    said = ""
    if asked is not None:
        if asked > own:
            raise ValueError(
                f"compute_capability={asked} (VOXMMA_COMPUTE_CAPABILITY): cuda:{index} has {own[0]}.{own[1]} "
                f"and cannot behave like a newer card"
            )
        capability, memory = asked, min(memory, shared_memory_of(asked))
        said = f", as if of capability {asked[0]}.{asked[1]}"
    if asked_memory is not None:
        if asked_memory > memory:
            raise ValueError(
                f"shared_memory={asked_memory} (VOXMMA_SHARED_MEMORY): cuda:{index} allows {memory} bytes a "
                f"block{said}"
            )
        memory = asked_memory
    if (capability, asked_memory) != (own, None):
        said += f", with {memory:,} bytes of shared memory a block"
    return Card(capability, memory, own, said)


@dataclass(frozen=True)
class Tile:
    """One compiled kernel. `op` is 'fprop' (forward and input gradient) or 'wgrad'.

    fprop: m output rows x n output channels x k-channel chunks; wgrad: m x n block of dW, k rows a step.
    `promote`: channels between promotions of an fp16 (or 3xTF32) sum to fp32 (0 never, -1 every offset).
    `arch`: 80 runs on sm_80 and newer, 90 on sm_90 only. `shared_memory`: bytes a block is given at launch.
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
    shared_memory: int

    @property
    def scheme(self) -> str:
        """How fp32 inputs reach the matrix unit: '3xtf32', 'tf32' (operands rounded), or '' (they do not)."""
        tail = self.name.rpartition("_")[2]
        return tail if tail in ("3xtf32", "tf32") else ""

    def obstacle(self, card: Card) -> str:
        """Why a card cannot run this build's kernel; empty where it can."""
        (major, minor), archs = card.capability, " ".join(_C.CUDA_ARCHS)
        if self.arch == 90 and card.capability != (9, 0):
            return f"{self.name} runs on sm_90 only, not on sm_{major}{minor}"
        if not _C.build_runs_on(archs, self.arch, *card.code):
            return f"this voxmma was built for {', '.join(_C.CUDA_ARCHS)}"
        if self.shared_memory > card.shared_memory:
            return (
                f"{self.name} needs {self.shared_memory:,} bytes of shared memory a block, "
                f"sm_{major}{minor} allows {card.shared_memory:,}"
            )
        return ""

    def runs_on(self, card: Card) -> bool:
        """Whether a card can run this build's kernel."""
        return not self.obstacle(card)

    @property
    def architectures(self) -> str:
        return "sm_90" if self.arch == 90 else f"sm_{self.arch} and newer"

    @property
    def channel_rule(self) -> str:
        if self.atom == "SIMT":
            small = f", groups with fewer than {_MMA_MIN_GROUP_CHANNELS} channels"
            return "any C" + (small if self.input in ("fp16", "bf16") else "")
        if self.scheme == "3xtf32":
            return f"C >= {_3XTF32_MIN_CHANNELS}"
        if self.op == "wgrad" or self.scheme:
            return "any C"
        largest = max(tile.n for tile in compiled() if (tile.op, tile.accum) == ("fprop", self.accum))
        columns = "any C_out" if self.n == largest else f"C_out <= {self.n}"
        return f"{columns}, C_in {'% 64 = 0 or > 96' if self.k == 64 else '<= 96'}"


@functools.cache
def compiled() -> tuple[Tile, ...]:
    """The kernels in this build, in table order; empty in a build without CUDA."""
    return tuple(Tile(input=row.pop("dtype"), **row) for row in map(dict, _C.kernel_configs()))


@functools.lru_cache(maxsize=256)
def chunk_of(tile: str) -> int:
    """Channels between promotions of a tile's sum to fp32 (0 never, -1 every offset), by its name.

    On the CPU the name says it: 'cpu_p32', 'cpu_p64', 'cpu_p128', 'cpu_poff'.
    """
    if tile.startswith("cpu_p"):
        return -1 if tile == "cpu_poff" else int(tile.removeprefix("cpu_p"))
    return next((row.promote for row in compiled() if row.name == tile), 0)


@dataclass(frozen=True)
class TileChoice:
    """A tile name ('cpu', 'cpu_p64', 'cpu_tf32', ... on the CPU) and why it was chosen."""

    name: str
    reason: str
    tuned: bool = False


# ---- the selector ------------------------------------------------------------------------------------------


def legal(
    op: str,
    dtype: torch.dtype,
    accumulator: str,
    card: Card | None,
    fp32_precision: str = "ieee",
) -> list[Tile]:
    """The tiles that can run an operation on a card (None: on any), whatever its channels.

    The other arguments are those of `select_tile`.

    For fp32 operands and 'tf32' single-pass TF32 tiles and plain FMAs, where there is such a tile.
    """
    accum, chunk = parse_accumulator(accumulator)
    kind = "wgrad" if op == "wgrad" else "fprop"
    pool = [
        tile
        for tile in compiled()
        if (tile.op, tile.input, tile.accum) == (kind, DTYPE_NAMES[dtype], accum)
        and (accum != _PROMOTED or tile.promote == chunk)
        and (card is None or tile.runs_on(card))
    ]
    single_pass = [tile for tile in pool if tile.scheme == "tf32"]
    if dtype == torch.float32 and fp32_precision == "tf32" and single_pass:
        return [tile for tile in pool if tile.scheme == "tf32" or tile.atom == "SIMT"]
    return [tile for tile in pool if tile not in single_pass]


def _tuned(op: str, won: tunecache.Winner, heuristic: str) -> str:
    """Why a measured tile was chosen."""
    found = "the heuristic's choice confirmed" if won.tile == heuristic else f"{won.gain:.2f}x {heuristic}"
    again = f", {won.measurements} measurements" if won.measurements > 1 else ""
    return f"{op} tuned: {found}, of {won.tiles} tiles{again}"


def _why_not(names: AlgoMode, card: Card) -> str:
    """What keeps tiles from running on a card, to be added to a sentence."""
    found = [tile.obstacle(card) for tile in compiled() if tile.name in names]
    return "".join(f"; {obstacle}" for obstacle in found if obstacle)


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
    fp32_precision: str = "ieee",
    volume: int = 0,
    limits: Limits | None = None,
) -> TileChoice:
    """Chooses the tile of one operation: the one that `voxmma tune` found fastest, else by a heuristic.

    Args:
        op: 'fwd', 'dgrad' or 'wgrad'.
        dtype: compute dtype.
        accumulator: 'fp32', 'fp16', 'fp64' or 'fp16_promoted:64' and the like (parse_accumulator); only tiles
            with this accumulator and chunk are considered.
        c_in, c_out: channels of the layer (all groups together), whatever `op` is.
        target: a device, or a compute capability such as (9, 0).
        mode: the tile pool, as settings.get_algo_mode(op) gives it. Names limit the pool to tiles that can
            run this call; when none can, the whole pool is used and the reason says so, and why.
        fp32_precision: for fp32 inputs: 'ieee' never takes a single-pass TF32 tile, 'tf32' takes one where
            there is one.
        volume: offsets of the kernel; measurements (voxmma.tunecache) are asked where it is given, `target`
            is a device and `mode` a word.
        limits: of a device, as settings.get_limits() gives them; None asks it.

    Raises RuntimeError naming what is missing when this build has no kernel for the call.
    """
    if op not in settings.OPS:
        raise ValueError(f"op must be one of {', '.join(settings.OPS)}, got {op!r}")
    accum, chunk_wanted = parse_accumulator(accumulator)
    tf32 = dtype == torch.float32 and fp32_precision == "tf32"
    device: torch.device | None = None
    if not isinstance(target, tuple):
        device = torch.device(target)
        if device.type == "cpu":
            suffix = f"_p{'off' if chunk_wanted == -1 else chunk_wanted}" if chunk_wanted else ""
            return TileChoice(f"cpu{'_tf32' if tf32 else suffix}", "CPU path")
    here = card(target if isinstance(target, tuple) else torch.device(target), limits)
    sm = f"sm_{here.capability[0]}{here.capability[1]}"
    kind = "wgrad" if op == "wgrad" else "fprop"
    reduced, written = (
        (c_out // groups, c_in // groups) if op == "dgrad" else (c_in // groups, c_out // groups)
    )

    pool = legal(op, dtype, accumulator, here, fp32_precision)
    tf32 = tf32 and any(tile.scheme == "tf32" for tile in pool)
    if not pool:
        what = (
            f"no {kind} kernel for {DTYPE_NAMES[dtype]} inputs with {accumulator} accumulators runs on {sm}"
        )
        anywhere = legal(op, dtype, accumulator, None, fp32_precision)
        if anywhere and _C.build_runs_on(" ".join(_C.CUDA_ARCHS), 80, *here.code):
            raise RuntimeError(f"{what}: {min(anywhere, key=lambda t: t.shared_memory).obstacle(here)}")
        built = f"for {', '.join(_C.CUDA_ARCHS)}" if compiled() else "without CUDA"
        raise RuntimeError(
            f"{what}: this voxmma was built {built}; rebuild with TORCH_CUDA_ARCH_LIST="
            f"{here.code[0]}.{here.code[1]}{'a' if here.code[0] == 9 else ''}"
        )
    note = ""
    free = mode[0] in settings.ALGO_MODE_WORDS
    if not free:
        named = [tile for tile in pool if tile.name in mode]
        note = (
            f" of {op} pool [{', '.join(mode)}]"
            if named
            else f" ({op} pool [{', '.join(mode)}] cannot run this{_why_not(mode, here)})"
        )
        pool = named or pool

    least = _3XTF32_MIN_CHANNELS if dtype == torch.float32 and not tf32 else _MMA_MIN_GROUP_CHANNELS
    small = (groups > 1 or least == _3XTF32_MIN_CHANNELS) and min(reduced, written) < least
    chunk = 64 if reduced % 64 == 0 or reduced > 96 else 32

    def rank(tile: Tile) -> tuple[Any, ...]:
        simt = tile.atom == "SIMT"
        deep_enough = tile.arch < 90 or kind == "wgrad" or reduced >= _SM90_MIN_CHANNELS
        blocks = _covering(tile.m, reduced) if kind == "wgrad" else (tile.k != chunk,)
        # Two sets of accumulators: 64 channels leave room for one block a multiprocessor, and 32 are faster
        # (H100, 507k voxels, 64 channels: 0.44 against 0.53 ms promoted, 1.39 against 1.50 ms 3xTF32).
        narrow = kind == "fprop" and (accum == _PROMOTED or tile.scheme == "3xtf32")
        return (
            simt != small,
            not deep_enough,
            -tile.arch,
            *((tile.n, 0) if narrow else _covering(tile.n, written)),
            *blocks,
            -tile.stages,
        )

    best = min(pool, key=rank)
    if free and volume and device is not None:
        names = (DTYPE_NAMES[dtype], accumulator_label(accum, chunk_wanted))
        key = tunecache.Key(op, *names, c_in, c_out, groups, volume, "tf32" if tf32 else "ieee")
        won = tunecache.table(device).choose(key, best.name, [tile.name for tile in pool])
        if won is not None:
            return TileChoice(won.tile, _tuned(op, won, best.name), tuned=True)
    if best.atom == "SIMT":
        if groups > 1 and small:
            why = f"groups of {min(reduced, written)} channels"
        elif small and any(tile.scheme for tile in pool):
            why = f"fp32 below {_3XTF32_MIN_CHANNELS} channels runs on plain FMAs"
        else:
            why = f"{DTYPE_NAMES[dtype]} runs on plain FMAs"
    elif best.scheme:
        passes = (
            "three TF32 products, ieee accuracy" if best.scheme == "3xtf32" else "operands rounded to tf32"
        )
        why = f"{passes}; {written} output and {reduced} reduced channels on {sm}{here.limited}"
    else:
        why = f"{written} output and {reduced} reduced channels on {sm}{here.limited}"
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
    chunk: int = 0,
    volume: int = 0,
) -> Plan:
    """Decides one convolution call.

    Args:
        dtype: compute dtype; requested, decided_by: what settings.resolve_fp16_accum answered.
        c_in, c_out, groups: channels of the layer; target: device, or compute capability.
        pools: what settings.get_pools() answered.
        chunk: of a promoted fp16 accumulator, when `requested` asks for that; 0 = not promoted.
        volume: offsets of the kernel; 0 = unknown, so that no measurement is looked up.

    Returns:
        (accumulator, reason, tile, dgrad_tile, wgrad_tile), all strings. Forward and input gradient run with
        the one accumulator; the weight gradient's tile accumulates in fp32 (fp64 for fp64) whatever was
        requested. For bf16 and an fp16 accumulator the first two tiles take fp16 operands: such a call runs
        through voxmma.overflow.conv_rescaled (see `rescaled`).
    """
    # As a frame of its own, where it is no constant, torch.compile would trace the records.
    decide = _decide_outside if torch.compiler.is_compiling() else _decide
    return decide(dtype, requested, decided_by, c_in, c_out, groups, target, pools, chunk, volume)


def _decide(
    dtype: torch.dtype,
    requested: bool,
    decided_by: str,
    c_in: int,
    c_out: int,
    groups: int,
    target: torch.device | tuple[int, int],
    pools: Pools,
    chunk: int,
    volume: int,
) -> Plan:
    """`plan_call`, by what is on record now."""
    evidence = ""
    if asks_gate(dtype, requested, target, pools):
        from voxmma import gate

        evidence = gate.stamp()
    tuned = tunecache.stamp(target) if volume else 0
    shape = (c_in, c_out, groups, target)
    return _plan_call(dtype, requested, decided_by, *shape, pools, chunk, evidence, volume, tuned)


_decide_outside = torch.compiler.disable(_decide)


_HALF = (torch.float16, torch.bfloat16)


def asks_gate(
    dtype: torch.dtype, requested: bool, target: torch.device | tuple[int, int], pools: Pools = DEFAULT_POOLS
) -> bool:
    """Whether what is on record at the gate can decide a call; arguments as of `plan_call`."""
    admits = requested or pools[0][0] not in ("auto", "trimmed") or pools[3] > 0
    return admits and dtype in _HALF and isinstance(target, torch.device) and target.type == "cuda"


def rescaled(dtype: torch.dtype, accumulator: str, decided_by: str, fp16_rescale: bool) -> bool:
    """Whether a planned call must run through voxmma.overflow.conv_rescaled.

    bf16 operands with an fp16 accumulator have no other way. fp16 accumulators that no flag asked for get the
    overflow certificate of the gate by it. All other fp16 calls take it where settings.set_fp16_rescale asks.
    """
    if dtype == torch.float16 and fp16_rescale:
        return True
    return accumulator.startswith("fp16") and (
        dtype == torch.bfloat16 or decided_by in ("inference_mode", "default")
    )


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
    chunk: int,
    evidence: str,
    volume: int,
    tuned: int,
) -> Plan:
    """`evidence`: the state of the gate's records, gate.stamp(), so that new verdicts are seen; '' = none.

    `tuned`: the same of the measurements, tunecache.stamp().
    """
    fwd_mode, dgrad_mode, wgrad_mode, small_ch_ceil, fp32_precision, limits = pools
    on_cpu = isinstance(target, torch.device) and target.type == "cpu"
    exact = "fp64" if dtype == torch.float64 else "fp32"
    shape = (c_in, c_out, groups, target)
    narrow = accumulator_label(_PROMOTED, chunk) if chunk else "fp16"

    def tiles_for(accumulator: str, reason: str) -> Plan:
        operands = dtype if accumulator == exact else torch.float16
        rest = (fp32_precision, volume, limits)
        forward = select_tile("fwd", operands, accumulator, *shape, fwd_mode, *rest)
        dgrad = select_tile("dgrad", operands, accumulator, *shape, dgrad_mode, *rest)
        wgrad = select_tile("wgrad", dtype, exact, *shape, wgrad_mode, *rest)
        reasons = [reason, forward.reason]
        for choice, mode in ((dgrad, dgrad_mode), (wgrad, wgrad_mode)):
            said = choice.tuned or mode[0] not in settings.ALGO_MODE_WORDS
            reasons += [choice.reason] if said else []
        accum = parse_accumulator(accumulator)[0]
        return accum, "; ".join(reasons), forward.name, dgrad.name, wgrad.name

    def refused(automatic: bool) -> str | None:
        """Why no fp16-accumulator tile may run this call; None when one may.

        With `automatic`, evidence that is missing counts against the tile; without, only evidence of errors.
        """
        try:
            chosen = [
                select_tile(op, torch.float16, narrow, *shape, mode, volume=volume, limits=limits).name
                for op, mode in (("fwd", fwd_mode), ("dgrad", dgrad_mode))
            ]
        except RuntimeError as error:
            return str(error)
        if automatic and not (evidence and isinstance(target, torch.device)):
            return "no measurement on record for this device"
        if evidence and isinstance(target, torch.device):
            from voxmma import gate

            for name in chosen:
                verdict = gate.on_record(name, target)
                if not (verdict.allowed if automatic else verdict.runs_on_request):
                    return f"the gate refuses {name}: {verdict.reason}"
        return None

    if dtype in (torch.float32, torch.float64):
        if requested:
            return tiles_for(exact, f"{DTYPE_NAMES[dtype]} inputs never become fp16")
        if fp32_precision == "tf32" and dtype == torch.float32:
            plan = tiles_for(exact, "tf32 allowed")
            if plan[2].endswith("_tf32"):
                return plan
            why = "groups too narrow for a tf32 tile" if _has_tf32() else "this build has no tf32 tile"
            return tiles_for(exact, f"tf32 allowed, but {why}: ieee")
        return tiles_for(exact, f"{DTYPE_NAMES[dtype]} inputs")

    forbidden = not requested and decided_by != "default"
    named = {tile.accum for tile in compiled() if tile.name in fwd_mode and tile.op == "fprop"}
    if requested:
        automatic = decided_by == "inference_mode"
        if automatic and on_cpu:
            return tiles_for("fp32", "the automatic rule does not apply on the CPU: emulation is no gain")
        if on_cpu:
            how = "the running sum is rounded to fp16 after every offset"
            if chunk:
                part = f"{chunk} channels of an offset" if chunk > 0 else "one offset"
                how = f"sums of {part} are rounded to fp16 and added in fp32"
            return tiles_for(narrow, f"emulated: {how}{_RESCALED if dtype == torch.bfloat16 else ''}")
        missing = refused(automatic)
        if missing is not None:
            return tiles_for("fp32", f"automatic rule: {missing}" if automatic else missing)
        reason = "automatic rule: all checks of the gate passed" if automatic else "requested explicitly"
        return tiles_for(narrow, reason + (_RESCALED if dtype == torch.bfloat16 else ""))
    if on_cpu or forbidden or dtype != torch.float16:
        return tiles_for("fp32", "fp16 accumulators forbidden" if forbidden else "default")
    if named == {"fp16"} and refused(automatic=False) is None:
        return tiles_for("fp16", "the forward pool names fp16-accumulator tiles only")
    if fwd_mode == ("all",) or "fp16" in named or max(c_in, c_out) <= small_ch_ceil:
        missing = refused(automatic=True)
        admitted = "fp16-accumulator tiles are admitted"
        if missing is None:
            return tiles_for("fp16", f"{admitted}, and the gate allows this one")
        return tiles_for("fp32", f"{admitted}, but {missing}")
    return tiles_for("fp32", "default")


_RESCALED = (
    "; bf16 operands become fp16 by powers of two on the device, the result is divided by them; a value that "
    "lands among fp16's subnormals loses bits (voxmma.OverflowGuard counts such calls)"
)


def _has_tf32() -> bool:
    return any(tile.scheme == "tf32" for tile in compiled())


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

    def __rich__(self) -> Any:
        from rich.table import Table

        titles, lines = self.cells()
        table = Table(*titles, title=self.title)
        for line in lines:
            table.add_row(*line)
        return table


def _admitted(accumulator: str, names: tuple[str, ...], modes: tuple[AlgoMode, ...]) -> bool:
    """Whether the settings of this moment let a tile of these names into one of the pools `modes`."""
    if accumulator == _PROMOTED:
        return False  # only a call's own `accumulator` asks for it
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
                and _admitted(tile.accum, (tile.name,), tuple(modes[op] for op in ops)),
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
