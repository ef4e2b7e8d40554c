"""Signatures of the compiled part (csrc/binding.cpp)."""

from typing import Any

from torch import Tensor, dtype

HAS_CUDA: bool
CUDA_ARCHS: list[str]
CUDA_VERSION: str
BUILD_ID: str
TORCH_VERSION: str

def kernel_configs() -> list[dict[str, Any]]: ...
def index_coords(coords: Tensor, check: bool = True) -> tuple[Tensor, Tensor, Tensor, list[int]]: ...
def build_plan(
    out_coords: Tensor,
    out_order: Tensor,
    keys: Tensor,
    rows: Tensor,
    n_in: int,
    add: Tensor,
    mul: list[int],
    div: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, int]: ...
def plan_to_table(plan: list[Tensor], n_out: int) -> Tensor: ...
def mma_probe(kind: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One matrix instruction a tile, see csrc/include/voxmma/probe.h."""

def mma_rate(kind: int) -> float:
    """TFLOP/s of an mma.sync kind (0 to 3, see probe.h) on the current CUDA device; takes about 8 ms."""

def check_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    n_out: int,
    transpose: bool,
    accumulator: str,
    out_dtype: dtype | None,
) -> tuple[int, int, int, int]:
    """Raises what the CUDA op would; returns (kernel volume, groups, C_in / groups, C_out / groups)."""

def check_wgrad(
    x: Tensor,
    dy: Tensor,
    map: list[Tensor],
    kernel_volume: int,
    groups: int,
    accumulator: str,
    out_dtype: dtype | None,
) -> tuple[int, int]:
    """Raises what the CUDA op would; returns (C_in / groups, C_out / groups)."""
