"""The kernel table: every compiled tile, what it computes and where it runs."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES

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
        wide, narrow = ("% 64 = 0 or > 96", "<= 96") if self.arch == 90 else ("> 32", "<= 32")
        return f"{columns}, C_in {wide if self.k == 64 else narrow}"


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
