"""The tile table, and the one place that chooses from it.

`plan_call` decides a call's accumulator and its three tiles; it is a function of its arguments and of what is
on record, so a call under torch.compile takes the same decision as an eager one. `select_tile` is the
selector proper. Where `voxmma tune` has measured a call on this card, its winner goes before the heuristic
(voxmma.dispatch.measurements); only tiles of the accumulator that was decided compete. `tiles()` shows the
table.

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
from dataclasses import dataclass
from typing import Any

import torch

from voxmma._dynamo import constant_result, eager
from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES, sum_dtype
from voxmma.dispatch import measurements, settings, validation
from voxmma.dispatch.settings import DEFAULT_POOLS, AlgoMode, Limits, Pools
from voxmma.ops.kernels import (
    _3XTF32_MIN_CHANNELS,
    _MMA_MIN_GROUP_CHANNELS,
    _PROMOTED,
    _SM90_MIN_CHANNELS,
    Card,
    Tile,
    accumulator_label,
    compiled,
    legal,
    parse_accumulator,
    shared_memory_of,
)


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
class TileChoice:
    """A tile name ('cpu', 'cpu_p64', 'cpu_tf32', ... on the CPU) and why it was chosen."""

    name: str
    reason: str
    tuned: bool = False


def _tuned(op: str, won: measurements.Winner, heuristic: str) -> str:
    """Why a measured tile was chosen."""
    found = "the heuristic's choice confirmed" if won.tile == heuristic else f"{won.gain:.2f}x {heuristic}"
    again = f", {won.measurements} measurements" if won.measurements > 1 else ""
    return f"{op} tuned: {found}, of {won.tiles} tiles{again}"


def _why_not(names: AlgoMode, card: Card) -> str:
    """What keeps tiles from running on a card, to be added to a sentence."""
    found = [tile.obstacle(card) for tile in compiled() if tile.name in names]
    return "".join(f"; {obstacle}" for obstacle in found if obstacle)


def _covering(block: int, channels: int) -> tuple[int, int]:
    """Sorts block sizes: fewest blocks first, then the narrowest."""
    return -(-channels // block), block


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
        volume: offsets of the kernel; measurements (voxmma.dispatch.measurements) are asked where it is
            given, `target` is a device and `mode` a word.
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

    def rank(tile: Tile) -> tuple[Any, ...]:
        simt = tile.atom == "SIMT"
        deep_enough = tile.arch < 90 or reduced >= _SM90_MIN_CHANNELS
        if kind == "wgrad":
            columns, rows = _covering(tile.n, written), _covering(tile.m, reduced)
            # A block of an mma.sync tile costs its products, and as much as 64 x 64 of them whatever its size
            # (H200, 507k voxels: 0.21, 0.36, 0.85 and 1.18 ms for blocks of 32, 64, 96 and 128 channels).
            cost = columns[0] * rows[0] * (tile.m * tile.n + 64 * 64) if tile.arch < 90 else 0
            return simt != small, -tile.arch, cost, *columns, *rows, -tile.stages
        wide_chunk = reduced % 64 == 0 or reduced > (96 if tile.arch == 90 else 32)
        # Two sets of accumulators: 64 channels leave room for one block a multiprocessor, and 32 are faster
        # (H100, 507k voxels, 64 channels: 0.44 against 0.53 ms promoted, 1.39 against 1.50 ms 3xTF32).
        narrow = accum == _PROMOTED or tile.scheme == "3xtf32"
        return (
            simt != small,
            not deep_enough,
            -tile.arch,
            # On cards with 99 KB before the columns: 64 of them, 64 channels at a time, beat 128 and 32
            # (lidar_dense as on such a card, 128 channels: 0.29 against 0.35 ms).
            tile.k != (64 if wide_chunk else 32),
            *((tile.n, 0) if narrow else _covering(tile.n, written)),
            -tile.stages,
        )

    best = min(pool, key=rank)
    if free and volume and device is not None:
        names = (DTYPE_NAMES[dtype], accumulator_label(accum, chunk_wanted))
        key = measurements.Key(op, *names, c_in, c_out, groups, volume, "tf32" if tf32 else "ieee")
        won = measurements.table(device).choose(key, best.name, [tile.name for tile in pool])
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


@constant_result
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
        through voxmma.dispatch.rescale_op.conv_rescaled (see `rescaled`).
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
        evidence = validation.stamp()
    tuned = measurements.stamp(target) if volume else 0
    shape = (c_in, c_out, groups, target)
    return _plan_call(dtype, requested, decided_by, *shape, pools, chunk, evidence, volume, tuned)


_decide_outside = eager(_decide)


_HALF = (torch.float16, torch.bfloat16)


def asks_gate(
    dtype: torch.dtype, requested: bool, target: torch.device | tuple[int, int], pools: Pools = DEFAULT_POOLS
) -> bool:
    """Whether what is on record at the gate can decide a call; arguments as of `plan_call`."""
    admits = requested or pools[0][0] not in ("auto", "trimmed") or pools[3] > 0
    return admits and dtype in _HALF and isinstance(target, torch.device) and target.type == "cuda"


def rescaled(dtype: torch.dtype, accumulator: str, decided_by: str, fp16_rescale: bool) -> bool:
    """Whether a planned call must run through voxmma.dispatch.rescale_op.conv_rescaled.

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
    """`evidence`: validation.stamp(), so that new verdicts are seen; '' = none.

    `tuned`: the same of the measurements, measurements.stamp().
    """
    fwd_mode, dgrad_mode, wgrad_mode, small_ch_ceil, fp32_precision, limits = pools
    on_cpu = isinstance(target, torch.device) and target.type == "cpu"
    exact = DTYPE_NAMES[sum_dtype(dtype)]
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
            for name in chosen:
                verdict = validation.on_record(name, target)
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
