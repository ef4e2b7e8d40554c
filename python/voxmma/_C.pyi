"""Signatures of the compiled part (csrc/torch)."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, dtype

HAS_CUDA: bool
CUDA_ARCHS: list[str]
CUDA_VERSION: str
BUILD_ID: str
TORCH_VERSION: str

def kernel_configs() -> list[dict[str, Any]]: ...
def tile_parts(
    tile: str, n_out: int, kernel_volume: int, c_in: int, c_out: int, groups: int, sm_count: int
) -> int:
    """CTAs that share an output of an fprop tile, or partial sums of dW of a wgrad tile; 1: none is shared.

    Channels are per group, sm_count: multiprocessors of the device. ValueError: no such tile, a size below 1.
    """

def build_runs_on(archs: str, tile_arch: int, major: int, minor: int) -> bool:
    """Whether a build for `archs` ("8.0 9.0a") has code of a tile of `arch` 80 or 90 for a capability."""

def driver_version() -> int:
    """The newest CUDA that the installed driver is for, 13000; 0: no driver. Only with CUDA kernels."""

def runtime_version() -> int:
    """CUDA's version of the kernel library, 13000. Only with CUDA kernels."""

def driver_problem(driver: int, runtime: int) -> str:
    """What is wrong with a driver for a CUDA runtime, in one sentence; "" where it serves."""

def shared_memory(device: int) -> int:
    """Bytes of shared memory that a block may have on a CUDA device."""

def index_coords(coords: Tensor, bounds: Sequence[int] = ()) -> tuple[Tensor, Tensor, list[int]]:
    """Order, bricks, and without `bounds` [bad row, duplicate row, its twin, smallest 4, largest 4]."""

def derive_coords(
    coords: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    to_children: bool,
    shape: Sequence[int],
    bounds: Sequence[int],
    piece: int,
    limit: int,
) -> tuple[Tensor, Tensor, Tensor, int, bool]:
    """Coordinates, Morton order, bricks, how many, and whether one is outside the packable range."""

def build_plan(
    out_coords: Tensor,
    out_order: Tensor,
    bricks: Tensor,
    in_order: Tensor,
    size: Sequence[int],
    start: Sequence[int],
    step: Sequence[int],
    mul: Sequence[int],
    div: Sequence[int],
) -> tuple[list[Tensor], Tensor, int]:
    """The tensors of a map, PlanStats, and the number of pairs, -1 where they are not read."""

def write_count(tensors: tuple[object, ...]) -> int:
    """Changes whenever torch writes into one of the tensors; not by .data, numpy or DLPack.

    What is no tensor, or is an inference tensor, counts as 0.
    """

def map_size(like: Tensor, n_in: int, n_out: int) -> Tensor:
    """Empty int32 of shape (0, n_in, n_out) on the device of `like`, never an inference tensor."""

def cut_plan(plan: Sequence[Tensor], n_in: int, n_out: int, passes: int, units: int) -> list[Tensor]:
    """The tensors of a map: what a compact plan of `plans_sized` used, which had room for that."""

def first_rows(tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
    """The first rows of each tensor, -1: the tensor itself. Writes are counted with those of the tensor; no
    graph leads to it."""

def put(buffers: Sequence[Tensor], sources: Sequence[Tensor | int]) -> None:
    """Copies tensors into the first rows and columns of contiguous buffers on their CUDA device, 32 in a
    launch. Of int64 into int32, numbers beyond 2^30 and -2^30 become these. An int is put into all of an
    int64 buffer."""

def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of tensors of one CUDA device, 32 in a launch, without a graph; never inference tensors."""

class Told:
    """Numbers that a CUDA device tells the host."""

    @staticmethod
    def of(numbers: Tensor, buffers: Sequence[Tensor], sources: Sequence[Tensor | int]) -> Told:
        """Copies int64 numbers to the host, and does `put` in the same launch."""

    def numbers(self) -> list[int]:
        """Waits for them."""

def index_sized(
    coords: Tensor, count: Tensor, bounds: Sequence[int], status: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`index_coords` of the first `count` of (capacity, 4) int32 rows: order (capacity,), bricks, inner (8,).

    Never reads back, like all `*_sized` functions, which take any count from 0 to capacity. count: (1,) int64
    on the device. bounds: smallest and largest (batch, x, y, z) that rows may have. inner, int32: those that
    they have; the Morton order is that of the box around them, so that it is the order of a set whose host
    knows it. status, (4,) int64 on the device, becomes [count as given, smallest row out of bounds or -1,
    duplicate row << 32 | its earliest twin or -1, unused]. Such rows have a rank, too: order[:count] is a
    permutation of the rows in any case. What is behind it means nothing.
    """

def derive_sized(
    coords: Tensor,
    count: Tensor,
    inner: Tensor | None,
    size: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    to_children: bool,
    shape: Sequence[int],
    bounds: Sequence[int],
    capacity: int,
    status: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """`derive_coords` of the first `count` rows: coordinates (capacity, 4), count (1,), inner, order, bricks.

    inner: of the rows; returned, of the sites (voxmma.sparse.derive.reach). bounds: what that may be; where
    inner is None, what it is. status becomes [sites, not 0 if one was outside bounds or the packable range,
    unused, unused]. Where there are more sites than capacity, count is 0; the number of sites is then exact
    if bounds hold at most 2^27 cells, with the extent of every axis rounded up to a power of two, else some
    number above the capacity.
    """

def plan_room(
    n_out: int,
    n_in: int,
    size: Sequence[int],
    start: Sequence[int],
    step: Sequence[int],
    mul: Sequence[int],
    div: Sequence[int],
) -> tuple[int, int, int, int]:
    """Passes and units of 4 entries of uniq that a plan takes as a rule, and those that always suffice."""

def plans_sized(
    out_coords: Sequence[Tensor],
    out_count: Sequence[Tensor],
    out_order: Sequence[Tensor],
    bricks: Sequence[Tensor],
    in_order: Sequence[Tensor],
    rules: Sequence[Sequence[int]],
    status: Tensor,
    compact: bool = False,
) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """Several `build_plan`, side by side, of the first `out_count` outputs each: order, schedule, passes,
    frag, uniq, local. A rule is size, start, step, mul, div, pass_capacity and uniq4_capacity, 17 integers.

    There are ceil(capacity / 256) tiles. Those without rows are empty: order -1, local kMissing, cost 0, and
    passes without unique rows, which they share, behind pass_capacity others. So is a tile that finds no
    room. A row of status, (plans, 4), becomes what is needed: [units of 4 entries of uniq, passes, pairs,
    unused]. compact: only tiles that have rows are on the schedule, (2, tiles, 4) at the beginning of its
    memory.
    """

class StreamEvent:
    """An event behind what a CUDA device's current stream had to do when `record` was called."""

    @staticmethod
    def record(device: int) -> StreamEvent | None:
        """None while a CUDA graph is captured on that stream: the event would be part of it."""

    def wait(self) -> bool:
        """Makes the current stream wait; False while a CUDA graph is captured on it: the host has waited."""

    def done(self) -> bool:
        """Whether the device is done with that; does not wait."""

    @property
    def stream(self) -> int:
        """Handle of the stream of `record`."""

def plan_to_table(plan: list[Tensor], n_out: int) -> Tensor: ...
def cells_of_points(
    points: Tensor, batch: Tensor | None, origin: Sequence[float], edge: Sequence[float]
) -> Tensor:
    """(N, 4) int32 cells of points on a GPU; what has none gets a row outside the packable range."""

def group_cells(cells: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, list[int]]:
    """Sorted coordinates, order, starts, run of each row, [bad row, longest run, smallest 4, largest 4]."""

def merge_runs(x: Tensor, order: Tensor, start: Tensor, longest: int, mean: bool, wide: bool) -> Tensor:
    """Sum or mean of the rows of each run, as a balanced tree."""

def lookup_rows(query: Tensor, order: Tensor, bricks: Tensor) -> Tensor:
    """(M,) int64 rows of (M, 4) int32 or int64 coordinates, -1 where absent. Never waits for the GPU."""

def locate_points(
    points: Tensor,
    batch: Tensor | None,
    batch_size: int,
    shift: Sequence[float],
    edge: Sequence[float],
    stride: Sequence[float],
    trilinear: bool,
    order: Tensor,
    bricks: Tensor,
    wide: bool,
) -> tuple[Tensor, Tensor, bool]:
    """Rows (M, corners) int32, -1 = none, weights in fp32 or `wide` fp64, whether all is valid."""

def gather_weighted(x: Tensor, rows: Tensor, weights: Tensor) -> Tensor: ...
def scatter_weighted(dy: Tensor, entries: Tensor, starts: Tensor, weights: Tensor) -> Tensor: ...
def mma_probe(kind: int, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """One matrix instruction a tile, see csrc/include/voxmma/probe.h."""

def mma_rate(kind: int) -> float:
    """TFLOP/s of an mma.sync kind (0 to 3, see probe.h) on the current CUDA device; takes about 8 ms."""

class PreparedConv:
    """torch.ops.voxmma.conv with all arguments but three; autocast does not reach it."""

    def __init__(
        self,
        map: list[Tensor],
        map_t: list[Tensor],
        n_out: int,
        symmetric: bool,
        transpose: bool,
        accumulator: str,
        tile: str,
        dgrad_tile: str,
        wgrad_tile: str,
        out_dtype: dtype | None,
        stored: bool = False,
    ) -> None:
        """stored: weights are (C_out, ..., C_in), and so are their gradients."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...
    def fused(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        eps: float,
        residual: Tensor | None,
        activation: str,
        slope: float,
    ) -> Tensor:
        """torch.ops.voxmma.conv_fused."""

    def fused_into(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        scale: Tensor | None,
        shift: Tensor | None,
        mean: Tensor | None,
        var: Tensor | None,
        eps: float,
        residual: Tensor | None,
        activation: str,
        slope: float,
        out: Tensor,
    ) -> None:
        """torch.ops.voxmma.conv_fused_into."""

    def trained(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        batches: Tensor | None,
        momentum: float,
        eps: float,
        residual: Tensor | None,
        activation: str,
        slope: float,
    ) -> Tensor | None:
        """torch.ops.voxmma.conv and norm_act, as one node of the graph; None where norm_act does not take
        such rows or numbers."""

def operand_facts(x: Tensor, weight: Tensor, bias: Tensor | None) -> bytes | None:
    """Types and shapes of the operands, autocast, inference mode; None where they are on several devices."""

def conv_sums(
    x: Tensor, weight: Tensor, in_rows: Tensor, out_rows: Tensor, kptr: Tensor, n_out: int, mirror: bool
) -> Tensor:
    """A convolution on the CPU: x (N, C_in), weight (K, C_in, C_out), fp32 or fp64 -> (n_out, C_out)."""

def match_rows(
    ordered: Tensor,
    in_row: Tensor,
    out_row: Tensor,
    batch: Tensor,
    axes: list[Tensor],
    masks: list[Tensor],
    n_out: int,
) -> tuple[Tensor, Tensor]:
    """(in_rows, out_rows) of one offset, output rows ascending: where `batch` + `axes` is in `ordered`."""

def mirror_pairs(in_rows: Tensor, out_rows: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """(in_rows, out_rows) of the opposite offset of a symmetric map, output rows ascending."""

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

def check_fused(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    n_out: int,
    transpose: bool,
    accumulator: str,
    out_dtype: dtype | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out: Tensor | None,
) -> None:
    """Raises what the CUDA op would."""

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

def check_pool(
    x: Tensor,
    in_count: Tensor | None,
    out_count: Tensor | None,
    winner: Tensor | None,
    winner_rows: int,
    name: str,
    map: list[Tensor],
    kernel_volume: int,
    n_out: int,
) -> None:
    """Raises what the CUDA op would; `name` is what the op calls the map."""

def check_map(map: list[Tensor], kernel_volume: int, n_out: int) -> None:
    """Raises what the CUDA op would."""

def check_segments(x: Tensor, candidates: Tensor | None, rows: Tensor, starts: Tensor) -> None:
    """Raises what the CUDA op would."""
