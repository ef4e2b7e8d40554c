"""The dispatcher ops of ``torch.ops.voxmma``: CPU implementations (fakes: voxmma.ops.fake).

Schemas, autograd, autocast and the CUDA implementation are in csrc/torch; importing this module loads
them. ``conv`` and ``conv_wgrad`` differentiate into each other, and so do the pooling ops among themselves,
so that gradients of any order exist on both devices.

Accumulation on the CPU. Half-precision inputs are multiplied and summed in fp32 and rounded once at the
end, fp32 in fp32, fp64 in fp64, by torch's own (multi-threaded) GEMM per kernel offset.
``accumulator='fp16'`` is emulated, so that its error can be seen without a GPU: the running sum is rounded
to fp16 after each offset's product, whose inner sum over the channels stays in fp32. ``'fp16_promoted'``
rounds the product of each chunk of channels of an offset to fp16 and adds it in fp32; the tile names the
chunk: ``cpu_p32``, ``cpu_p64``, ``cpu_p128`` or ``cpu_poff`` (all channels of an offset). ``cpu_tf32`` rounds
fp32 operands to the nearest TF32 number first, as a single-pass TF32 tile does. Rows of one offset are
distinct, so no order of addition is left to chance: results are equal from run to run. Pooling adds in the
order of the offsets, as on a GPU, and with the same rounding: its results are equal on both devices.

What the process is set to does not reach them: products in fp32 are IEEE fp32, under mkldnn's bf16 and
`torch.set_float32_matmul_precision("medium")` too, and neither autocast nor a policy casts in here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from voxmma import torchflags
from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES, sum_dtype
from voxmma.ops.formats import round_tf32

__all__: list[str] = []

_LIBRARY = torch.library.Library("voxmma", "IMPL")


def _split(t: Tensor, groups: int) -> Tensor:
    """(P, groups * c) -> (groups, P, c)."""
    return t.view(t.shape[0], groups, -1).transpose(0, 1)


def _product(rows: Tensor, weight: Tensor) -> Tensor:
    """rows (P, G * ci) times weight (G, ci, co) group by group -> (P, G * co)."""
    groups, c_in, _ = weight.shape
    if groups == 1:
        return rows @ weight[0]
    if c_in == 1:  # depthwise: no GEMM, one product a channel
        return (rows.unsqueeze(-1) * weight[:, 0]).flatten(1)
    return torch.bmm(_split(rows, groups), weight).transpose(0, 1).flatten(1)


def _outer(a: Tensor, b: Tensor, groups: int) -> Tensor:
    """a (P, G * ci) transposed times b (P, G * co), group by group -> (G, ci, co)."""
    if groups == 1:
        return (a.t() @ b).unsqueeze(0)
    if a.shape[1] == groups and b.shape[1] == groups:
        return (a * b).sum(0).view(groups, 1, 1)
    return torch.bmm(_split(a, groups).transpose(1, 2), _split(b, groups))


def _conv_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    map_t: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    dgrad_tile: str,
    wgrad_tile: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    sizes = _C.check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype)
    y = _sums(x, weight, map, n_out, symmetric, transpose, accumulator, tile, sizes)
    if bias is not None:
        y += bias
    return y.to(out_dtype or x.dtype)


def _sums(
    x: Tensor,
    weight: Tensor,
    map: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    sizes: tuple[int, int, int, int],
) -> Tensor:
    """What a convolution adds up, in the compute type. sizes: K, groups, channels per group."""
    volume, groups, c_in, c_out = sizes
    chunk = _check_tile(tile, accumulator, x.dtype) or c_in
    in_rows, out_rows, kptr, _ = map
    start: list[int] = kptr.tolist()
    compute = sum_dtype(x.dtype)
    features = x.to(compute)
    # Rounded to x's type first, as the GPU does, then exact in the compute type.
    weights = weight.to(x.dtype).to(compute).reshape(volume, groups, *weight.shape[-2:])
    if tile == "cpu_tf32":
        features, weights = round_tf32(features), round_tf32(weights)
    if transpose:
        weights = weights.transpose(2, 3)
    if groups == 1 and accumulator in ("fp32", "fp64") and torch.get_num_threads() == 1:
        # In blocks that stay in the cache; more threads share out whole offsets in torch's own functions.
        mirror = transpose and symmetric
        return _C.conv_sums(features, weights[:, 0], in_rows, out_rows, kptr, n_out, mirror)
    y = torch.zeros((n_out, groups * c_out), dtype=compute, device=x.device)
    pairs_of = [end - begin for begin, end in itertools.pairwise(start)]
    ins, outs_of, weight_of = in_rows.split(pairs_of), out_rows.split(pairs_of), weights.unbind()
    for k in range(volume):
        pairs = volume - 1 - k if transpose and symmetric else k
        if not pairs_of[pairs]:
            continue
        outs = outs_of[pairs]
        rows = features.index_select(0, ins[pairs])
        if accumulator == "fp16_promoted":
            for first in range(0, c_in, chunk):
                piece = rows.view(-1, groups, c_in)[..., first : first + chunk].flatten(1)
                part = _product(piece, weight_of[k][:, first : first + chunk])
                y.index_add_(0, outs, part.half().to(compute))
            continue
        part = _product(rows, weight_of[k])
        if accumulator == "fp16":
            part += y.index_select(0, outs)
            y.index_copy_(0, outs, part.half().to(compute))
        else:
            y.index_add_(0, outs, part)
    return y


def _conv_fused_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    map: list[Tensor],
    n_out: int,
    symmetric: bool,
    transpose: bool,
    accumulator: str,
    tile: str,
    out_dtype: torch.dtype | None = None,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    mean: Tensor | None = None,
    var: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str = "none",
    slope: float = 0.0,
    packed: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    sizes = _C.check_conv(x, weight, bias, map, n_out, transpose, accumulator, out_dtype)
    numbers = (scale, shift, mean, var)
    _C.check_fused(
        x, weight, bias, map, n_out, transpose, accumulator, out_dtype, *numbers, residual, activation, out
    )
    y = _sums(x, weight, map, n_out, symmetric, transpose, accumulator, tile, sizes)
    factor, summand = fold(bias, *numbers, eps)
    if factor is not None:
        y *= factor.to(y.dtype)
    if summand is not None:
        y += summand.to(y.dtype)
    if residual is not None:
        y += residual
    return ACTIVATIONS[activation](y, slope).to(out_dtype or x.dtype)


def _conv_fused_into_cpu(*args: Any, out: Tensor, **kwargs: Any) -> None:
    out.copy_(_conv_fused_cpu(*args, out=out, **kwargs))


def _pack_weight_cpu(weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return weight.new_empty((0,), dtype=torch.uint8)


#: What `conv_fused` may do last, by the name that it has there: (rows, slope of leaky_relu) -> rows.
ACTIVATIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "none": lambda y, slope: y,
    "relu": lambda y, slope: F.relu(y),
    "leaky_relu": F.leaky_relu,
    "silu": lambda y, slope: F.silu(y),
    "gelu": lambda y, slope: F.gelu(y),
}


def fold(
    bias: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    eps: float,
) -> tuple[Tensor | None, Tensor | None]:
    """`(sum + bias - mean) / sqrt(var + eps) * scale + shift` as `sum * factor + summand`, in fp64.

    Arguments and results (C_out,); None: 1 for a factor, 0 for a summand. fold_channel of csrc/conv/pack.cu.
    """
    factor = None if scale is None else scale.double()
    if var is not None:
        root = (var.double() + eps).sqrt()
        factor = 1 / root if factor is None else factor / root
    summand = None if bias is None else bias.double()
    if mean is not None:
        summand = -mean.double() if summand is None else summand - mean.double()
    if summand is not None and factor is not None:
        summand = summand * factor
    if shift is not None:
        summand = shift.double() if summand is None else summand + shift.double()
    return factor, summand


def _conv_wgrad_cpu(
    x: Tensor,
    dy: Tensor,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    groups: int,
    symmetric: bool,
    accumulator: str,
    tile: str,
    dgrad_tile: str,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    c_in, c_out = _C.check_wgrad(x, dy, map, kernel_volume, groups, accumulator, out_dtype)
    _check_tile(tile, DTYPE_NAMES[sum_dtype(x.dtype)], x.dtype)
    in_rows, out_rows, kptr, _ = map
    start: list[int] = kptr.tolist()
    compute = sum_dtype(x.dtype)  # fp32 at least, whatever `accumulator` says
    features, grads = x.to(compute), dy.to(compute)
    if tile == "cpu_tf32":
        features, grads = round_tf32(features), round_tf32(grads)
    dw = torch.zeros((kernel_volume, groups, c_in, c_out), dtype=compute, device=x.device)
    for k in range(kernel_volume):
        begin, end = start[k], start[k + 1]
        if begin != end:
            a = features.index_select(0, in_rows[begin:end])
            dw[k] = _outer(a, grads.index_select(0, out_rows[begin:end]), groups)
    return (dw.squeeze(1) if groups == 1 else dw).to(out_dtype or x.dtype)


_CHUNKS = {"cpu_p32": 32, "cpu_p64": 64, "cpu_p128": 128, "cpu_poff": 0}


def _check_tile(tile: str, accumulator: str, dtype: torch.dtype) -> int:
    """The chunk of a CPU tile (0: all channels); RuntimeError when the tile is not this call's."""
    if accumulator == "fp16_promoted":
        if tile in _CHUNKS:
            return _CHUNKS[tile]
        names = ", ".join(_CHUNKS)
        raise RuntimeError(f"tile={tile!r} on the CPU with promoted accumulators: expected one of {names}")
    if tile != "cpu" and not (tile == "cpu_tf32" and dtype == torch.float32):
        tf32 = " or 'cpu_tf32'" if dtype == torch.float32 else ""
        raise RuntimeError(
            f"tile={tile!r} with tensors on the CPU, whose tile for {dtype} with {accumulator} accumulators "
            f"is 'cpu'{tf32}"
        )
    return 0


# ---- pooling ----------------------------------------------------------------------------------------------


def winner_dtype(kernel_volume: int) -> torch.dtype:
    """The type of the offsets that pool_max keeps, `kernel_volume` standing for "none"."""
    return torch.uint8 if kernel_volume < 256 else torch.int16


def _pairs(map: list[Tensor], mirror: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(offset, input rows, output rows) of a CPU map by offset; with `mirror` in reverse, renumbered."""
    in_rows, out_rows, kptr, _ = map
    start: list[int] = kptr.tolist()
    volume = len(start) - 1
    for k in range(volume):
        own = volume - 1 - k if mirror else k
        begin, end = start[own], start[own + 1]
        if begin != end:
            yield k, in_rows[begin:end], out_rows[begin:end]


def _per_row(count: Tensor, dtype: torch.dtype) -> Tensor:
    return count.clamp(min=1).to(dtype).unsqueeze(1)


def _pool_sum_cpu(
    x: Tensor,
    in_count: Tensor | None,
    out_count: Tensor | None,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    n_out: int,
    symmetric: bool,
    mirror: bool,
) -> Tensor:
    _C.check_pool(x, in_count, out_count, None, 0, "map", map, kernel_volume, n_out)
    wide = sum_dtype(x.dtype)
    values = x.to(wide)
    if in_count is not None:
        values = values / _per_row(in_count, wide)
    y = values.new_zeros((n_out, x.shape[1]))
    for _, ins, outs in _pairs(map, mirror):
        y.index_add_(0, outs, values.index_select(0, ins))
    if out_count is not None:
        y /= _per_row(out_count, wide)
    return y.to(x.dtype)


def _pool_max_cpu(
    x: Tensor,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    n_out: int,
    symmetric: bool,
    largest: bool,
    keep_winner: bool,
) -> tuple[Tensor, Tensor]:
    _C.check_pool(x, None, None, None, 0, "map", map, kernel_volume, n_out)
    best = x.new_zeros((n_out, x.shape[1]))
    winner = torch.full(best.shape, kernel_volume, dtype=winner_dtype(kernel_volume), device=x.device)
    for k, ins, outs in _pairs(map, False):
        value, so_far, chosen = (
            x.index_select(0, ins),
            best.index_select(0, outs),
            winner.index_select(0, outs),
        )
        better = value > so_far if largest else value < so_far
        take = (chosen == kernel_volume) | better | (value.isnan() & ~so_far.isnan())
        best.index_copy_(0, outs, torch.where(take, value, so_far))
        winner.index_copy_(0, outs, chosen.masked_fill_(take, k))
    return best, winner if keep_winner else winner.new_empty((0, x.shape[1]))


def _pool_pick_cpu(
    x: Tensor, winner: Tensor, map: list[Tensor], map_t: list[Tensor], kernel_volume: int, symmetric: bool
) -> Tensor:
    n_out = winner.shape[0] if winner.dim() else 0
    _C.check_pool(x, None, None, winner, n_out, "map", map, kernel_volume, n_out)
    y = x.new_zeros(winner.shape)
    for k, ins, outs in _pairs(map, False):
        mine = winner.index_select(0, outs) == k
        y.index_copy_(0, outs, torch.where(mine, x.index_select(0, ins), y.index_select(0, outs)))
    return y


def _pool_put_cpu(
    x: Tensor,
    winner: Tensor,
    map: list[Tensor],
    map_t: list[Tensor],
    kernel_volume: int,
    n_out: int,
    symmetric: bool,
) -> Tensor:
    if not symmetric and not map_t:
        raise RuntimeError(
            "map_t is empty, but pool_put needs the map of the opposite direction "
            "(KernelMap.transposed().tensors)"
        )
    name, back = ("map", map) if symmetric else ("map_t", map_t)
    rows = x.shape[0] if x.dim() else 0
    _C.check_pool(x, None, None, winner, rows, name, back, kernel_volume, n_out)
    wide = sum_dtype(x.dtype)
    values = x.to(wide)
    y = values.new_zeros((n_out, x.shape[1]))
    for k, ins, outs in _pairs(back, symmetric):
        mine = winner.index_select(0, ins) == k
        y.index_add_(0, outs, torch.where(mine, values.index_select(0, ins), 0))
    return y.to(x.dtype)


def _neighbor_counts_cpu(map: list[Tensor], kernel_volume: int, n_out: int) -> Tensor:
    _C.check_map(map, kernel_volume, n_out)
    return torch.bincount(map[1], minlength=n_out).int()


def _segment_sum_cpu(x: Tensor, rows: Tensor, starts: Tensor) -> Tensor:
    _C.check_segments(x, None, rows, starts)
    if x.shape[1] == 0:
        return x.new_zeros((len(starts), 0), dtype=sum_dtype(x.dtype))
    return torch.embedding_bag(x.to(sum_dtype(x.dtype)), rows, starts)[0]


def _segment_argmax_cpu(x: Tensor, candidates: Tensor | None, rows: Tensor, starts: Tensor) -> Tensor:
    _C.check_segments(x, candidates, rows, starts)
    sizes = torch.cat([starts, starts.new_full((1,), len(rows))]).diff()
    longest = int(sizes.max()) if len(sizes) else 0
    if longest == 0 or x.shape[1] == 0:
        return rows.new_full((len(starts), x.shape[1]), -1)
    place = starts.unsqueeze(1) + torch.arange(longest, device=x.device)
    source = rows[place.clamp(max=len(rows) - 1)]
    row = torch.where(torch.arange(longest, device=x.device) < sizes.unsqueeze(1), source, -1).unsqueeze(2)
    if candidates is None:
        row = row.expand(-1, -1, x.shape[1])
    else:
        row = torch.where(row >= 0, candidates[source], -1)  # (blocks, longest, C)
    values = x.gather(0, row.clamp(min=0).flatten(0, 1)).view(row.shape).masked_fill(row < 0, -torch.inf)
    slot = values.argmax(1, keepdim=True)  # the first of equals; what there is comes before what is not
    return row.gather(1, slot).squeeze(1)


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` apart from the process around it: no autocast, no function mode, IEEE fp32 products."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction(), torchflags.pinned("ieee"):
            if not torch.is_autocast_enabled("cpu"):
                return function(*args, **kwargs)
            with torch.autocast("cpu", enabled=False):
                return function(*args, **kwargs)

    return run


_CPU: dict[str, Callable[..., Any]] = {
    "conv": _conv_cpu,
    "conv_fused": _conv_fused_cpu,
    "conv_fused_into": _conv_fused_into_cpu,
    "pack_weight": _pack_weight_cpu,
    "conv_wgrad": _conv_wgrad_cpu,
    "pool_sum": _pool_sum_cpu,
    "pool_max": _pool_max_cpu,
    "pool_pick": _pool_pick_cpu,
    "pool_put": _pool_put_cpu,
    "neighbor_counts": _neighbor_counts_cpu,
    "segment_sum": _segment_sum_cpu,
    "segment_argmax": _segment_argmax_cpu,
}
for _name, _function in _CPU.items():
    _LIBRARY.impl(_name, _apart(_function), "CPU")
