"""Operations on coordinates: sets from sets, voxels from points and back, samples into batches.

Row order, on CPU and GPU alike: a new coordinate set (`downsample`, `union`, `intersection`, `unique`,
`sparse_quantize`, `from_dense`) is sorted by (batch, x, y, z); `prune`, `crop`, `batch` and `unbatch` keep
the order of the rows they keep. Everything takes N = 0 and empty samples, and all that returns features is
differentiable with respect to them. On a GPU each operation reads back to the host once; `sparse_quantize`
and merging repeated coordinates twice: what their values are checked by, and sizes.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data._utils.collate import collate as _torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from voxmma._types import as_tensor, triple
from voxmma.coords import (
    COORD_MAX,
    CoordSet,
    check_columns,
    find_keys,
    kernels_take,
    pack,
    unpack,
)
from voxmma.derive import DEFAULT_MAX_VOXELS, windows
from voxmma.interpolate import Interpolate
from voxmma.kernel_map import MAX_KERNEL, MAX_STRIDE, Geometry, _coord_set
from voxmma.points import (
    FEATURE_DTYPES,
    check_batch,
    grid_of,
    grid_positions,
    join_samples,
    per_axis,
    quantize,
    tensors,
)
from voxmma.voxels import Voxels

# ---- sets from sets ----------------------------------------------------------------------------------------


def downsample(coords: CoordSet | Voxels, stride: int | Sequence[int]) -> CoordSet:
    """The cells of a grid coarser by `stride` (one int or three, 1 to 4096) that hold a voxel.

    Coordinates are divided and rounded down, negative ones too: -1 at stride 2 lies in cell -1. Sorted by
    (batch, x, y, z). Up to stride 9 it is made once, and shared with unpadded layers of that kernel size and
    stride. TypeError or ValueError names the argument.
    """
    source = _coord_set(coords, "coords")
    step = triple(stride, "stride", 1, MAX_STRIDE)
    if max(step) <= MAX_KERNEL and source.num <= DEFAULT_MAX_VOXELS:  # a layer without overlap makes this set
        return windows(source, Geometry(step, step, (1, 1, 1), (0, 0, 0)))
    columns = zip(source.coords.unbind(1), (1, *step), strict=True)
    coarse = torch.stack([column.div(size, rounding_mode="floor") for column, size in columns], dim=1)
    return _from_keys(pack(coarse), source.batch_size)


def union(*coords: CoordSet | Voxels) -> CoordSet:
    """The voxels of at least one of the sets, sorted; the set itself when all are one and the same object.

    ValueError names the argument whose device or batch size differs from the first.
    """
    sets = _alike(coords)
    if all(other is sets[0] for other in sets):
        return sets[0]
    return _from_keys(torch.cat([pack(s.coords) for s in sets]), sets[0].batch_size)


def intersection(*coords: CoordSet | Voxels) -> CoordSet:
    """The voxels that all sets have, sorted; otherwise as `union`."""
    sets = _alike(coords)
    if all(other is sets[0] for other in sets):
        return sets[0]
    keys = sets[0].sorted_keys()[0]
    common = torch.ones_like(keys, dtype=torch.bool)
    for other in sets[1:]:
        common &= find_keys(keys, *other.sorted_keys()) >= 0
    return CoordSet.trusted(unpack(keys[common]), sets[0].batch_size)


def lookup(coords: CoordSet | Voxels, query: torch.Tensor) -> torch.Tensor:
    """(M,) int64 rows of the `query` coordinates (M, 4) int32 or int64 in `coords`, -1 where absent.

    A query may hold anything, repeated rows, coordinates and samples out of range included; those are
    absent. No host synchronisation. TypeError or ValueError names what is wrong with `query`.
    """
    source, query = _coord_set(coords, "coords"), as_tensor(query, "query")
    try:
        check_columns(query)
    except (TypeError, ValueError) as error:
        raise type(error)(str(error).replace("coords", "query", 1)) from None
    if query.device != source.device:
        raise ValueError(f"query is on {query.device}, coords is on {source.device}")
    return source.lookup(query)


def _alike(coords: Sequence[CoordSet | Voxels]) -> list[CoordSet]:
    if not coords:
        raise ValueError("coords must be at least one coordinate set")
    sets = [_coord_set(c, f"coords[{i}]") for i, c in enumerate(coords)]
    for i, s in enumerate(sets):
        for name in ("device", "batch_size"):
            mine, first = getattr(s, name), getattr(sets[0], name)
            if mine != first:
                raise ValueError(f"coords[{i}] has {name} {mine}, coords[0] has {first}")
    return sets


def _from_keys(keys: torch.Tensor, batch_size: int) -> CoordSet:
    with torch.inference_mode(False), torch.no_grad():
        return CoordSet.trusted(unpack(torch.unique(keys)), batch_size)


# ---- rows of voxels ----------------------------------------------------------------------------------------


def prune(x: Voxels, mask: torch.Tensor) -> Voxels:
    """The voxels where `mask` (N,) bool is True, in their order. TypeError or ValueError names `mask`."""
    mask = as_tensor(mask, "mask")
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, got {getattr(mask, 'dtype', type(mask).__name__)}")
    if mask.shape != (x.num_voxels,) or mask.device != x.device:
        raise ValueError(
            f"mask must be ({x.num_voxels},) on {x.device}, got {tuple(mask.shape)} on {mask.device}"
        )
    rows = torch.nonzero(mask).flatten()
    return Voxels(CoordSet.trusted(x.coords[rows], x.batch_size), x.feats[rows], stride=x.stride)


def crop(x: Voxels, low: int | Sequence[int], high: int | Sequence[int]) -> Voxels:
    """The voxels with low <= (x, y, z) < high on every axis, in their order, coordinates unchanged.

    `low`, `high`: one int or three, in the voxels' own grid; an empty box keeps nothing.
    """
    limit = 1 << 30
    start, stop = (triple(v, name, -limit, limit) for v, name in ((low, "low"), (high, "high")))
    mask = torch.ones(x.num_voxels, dtype=torch.bool, device=x.device)
    for column, first, end in zip(x.coords[:, 1:].unbind(1), start, stop, strict=True):
        mask &= (column >= first) & (column < end)
    return prune(x, mask)


def unique(
    coords: torch.Tensor,
    feats: torch.Tensor,
    reduce: str = "mean",
    *,
    batch_size: int | None = None,
    stride: int | Sequence[int] = 1,
) -> Voxels:
    """Voxels of coordinates (N, 4) that may repeat, their features (N, C) merged, sorted.

    `reduce`: 'mean', 'sum', 'max', 'min' or 'first' (smallest row). Sums run in fp32 for half features and
    in fp64 for the others, as a tree in row order: CPU and GPU give the same bits. Errors as in Voxels.
    """
    if reduce == "error":
        raise ValueError("reduce must be 'mean', 'sum', 'max', 'min' or 'first', got 'error'")
    return Voxels(coords, feats, batch_size, stride, duplicates=reduce)


# ---- points ------------------------------------------------------------------------------------------------


def sparse_quantize(
    points: torch.Tensor | Sequence[torch.Tensor],
    feats: torch.Tensor | Sequence[torch.Tensor],
    voxel_size: float | Sequence[float],
    reduce: str = "mean",
    *,
    batch_index: torch.Tensor | None = None,
    batch_size: int | None = None,
    origin: Sequence[float] = (0.0, 0.0, 0.0),
) -> tuple[Voxels, torch.Tensor]:
    """Voxels of the cells that hold points, and the row (N,) int64 of the voxel each point fell into.

    Arguments, cells (half-open, by floor, in fp64 whatever the dtype of the points), order and errors are
    those of `Voxels.from_points`; of a sequence of tensors, the rows are those of its concatenation.
    """
    coord_set, merged, rows = quantize(points, feats, voxel_size, reduce, batch_index, batch_size, origin)
    return Voxels._make(coord_set, merged, (1, 1, 1)), rows()


def devoxelise(
    x: Voxels,
    points: torch.Tensor | Sequence[torch.Tensor],
    voxel_size: float | Sequence[float],
    mode: str = "trilinear",
    *,
    batch_index: torch.Tensor | None = None,
    origin: Sequence[float] = (0.0, 0.0, 0.0),
) -> torch.Tensor:
    """(M, C) features at points, in the dtype of x. Differentiable with respect to the features of x.

    Voxel i of an axis covers [i, i + 1) * voxel_size * x.stride + origin; its feature sits at the centre.
    'nearest' takes the voxel whose cell holds the point, 0 where there is none: the point's cell of
    `Voxels.from_points`, divided by x.stride and rounded down as `downsample` does it. 'trilinear' weighs the
    eight voxels whose centres surround the point; those that do not exist count nothing and the weights of
    the others are scaled to sum to 1, so a constant field stays constant up to its border; a point with no
    voxel around it gets 0. Positions and weights are computed in fp64, sums in fp32 for half features, corner
    after corner: CPU and GPU give the same bits. The gradient is the same in every run; a GPU rounds it once,
    in an order of additions of its own.

    Args:
        x: voxels.
        points: (M, 3) floating point positions, or a sequence with one (M_i, 3) tensor per sample, whose
            results are concatenated.
        voxel_size, origin: those of `Voxels.from_points`, at tensor stride 1 (one number or three).
        mode: 'nearest' or 'trilinear'.
        batch_index: (M,) int32 or int64 sample of each point, with one tensor only; default sample 0.

    Raises TypeError or ValueError naming the argument and the row.
    """
    if mode not in ("nearest", "trilinear"):
        raise ValueError(f"mode must be 'nearest' or 'trilinear', got {mode!r}")
    points, batch_index = tensors(points, "points"), as_tensor(batch_index, "batch_index")
    nothing: torch.Tensor | list[torch.Tensor]
    if one := isinstance(points, torch.Tensor):
        nothing = points.new_zeros((len(points), 0), dtype=torch.float32)
    else:
        nothing = [p.new_zeros((len(p), 0), dtype=torch.float32) for p in points]
    points, _, batch, _ = join_samples(points, nothing, batch_index, x.batch_size, check=False)
    if points.device != x.device:
        raise ValueError(f"points is on {points.device}, x is on {x.device}")
    if x.num_voxels and points.dtype in FEATURE_DTYPES and kernels_take(x.feats):
        located = _locate(x, points, batch, grid_of(voxel_size, origin), mode == "trilinear")
        if located is not None:  # else the lines below find out what is wrong
            return Interpolate.apply(x.feats, *located)
    if one:
        check_batch(batch, x.batch_size)
    position = grid_positions(points, voxel_size, origin)
    finite = position.isfinite().all(1)
    if not bool(finite.all()):
        row = int(torch.nonzero(~finite)[0])
        raise ValueError(f"points row {row} is not finite: {tuple(points[row].tolist())}")
    size = per_axis(x.stride, points.device)
    # The floor of a whole number far below 2^53 divided by another is that of the exact quotient.
    position = position / size - 0.5 if mode == "trilinear" else position.floor() / size
    far = float(2 * COORD_MAX)  # absent, and safe to convert
    base = torch.floor(position).clamp(-far, far)
    corners = list(itertools.product((0, 1), repeat=3)) if mode == "trilinear" else [(0, 0, 0)]
    rows, weights = [], []
    for corner in corners:
        cell, share = [batch], torch.ones_like(position[:, 0])
        for axis, step in enumerate(corner):
            cell.append(base[:, axis].long() + step)
            if mode == "trilinear":
                fraction = position[:, axis] - base[:, axis]
                share = share * (fraction if step else 1 - fraction)
        rows.append(lookup(x, torch.stack(cell, dim=1)))
        weights.append(torch.where(rows[-1] >= 0, share, 0))
    total = functools.reduce(torch.add, weights)  # one after another, as the kernel does
    total = torch.where(total > 0, total, 1)
    feats = x.feats if x.num_voxels else x.feats.new_zeros((1, x.feats.shape[1])) + x.feats.sum(0)
    compute = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    # Rows without weight pick some row, each another one (equal ones would be added up one by one in the
    # backward pass), and its value is masked, not multiplied: it may be inf or nan.
    other = torch.arange(len(points), device=x.device) % len(feats)
    out = torch.zeros((len(points), feats.shape[1]), dtype=compute, device=x.device)
    for found, share in zip(rows, weights, strict=True):
        picked = _gather(feats, torch.where(found >= 0, found, other)).to(compute)
        weight = (share / total).to(compute).unsqueeze(1)
        out = out + torch.where(weight > 0, picked * weight, 0)
    return out.to(x.dtype)


@torch.compiler.disable
def _locate(
    x: Voxels,
    points: torch.Tensor,
    batch: torch.Tensor,
    grid: tuple[Sequence[float], Sequence[float]],
    trilinear: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows of x around each point and their weights, with one read-back; None where a point is not finite or
    of a sample that is not there."""
    from voxmma import _C

    wide = x.dtype == torch.float64
    rows, weights, valid = _C.locate_points(
        points, batch, x.batch_size, *grid, x.stride, trilinear, *x.coord_set.hash_index(), wide
    )
    return (rows, weights) if valid else None


def _gather(feats: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """feats[rows] by the operator whose backward is deterministic on the device although rows repeat."""
    return feats[rows] if feats.is_cuda else feats.index_select(0, rows)


# ---- dense grids -------------------------------------------------------------------------------------------


def to_dense(
    x: Voxels, spatial_shape: Sequence[int] | None = None, origin: Sequence[int] = (0, 0, 0)
) -> tuple[torch.Tensor, torch.Tensor]:
    """The grid (B, C, X, Y, Z) of `x.dense(spatial_shape, origin)` and the mask (B, X, Y, Z) of its voxels.

    `from_dense(*to_dense(x, shape, origin), origin)` is x with its rows sorted, voxels of all zeros included.
    """
    grid = x.dense(spatial_shape, origin)
    here = x.with_feats(torch.ones((x.num_voxels, 1), device=x.device, dtype=torch.float32))
    return grid, here.dense(grid.shape[2:], origin)[:, 0] != 0


def from_dense(
    dense: torch.Tensor,
    mask: torch.Tensor | None = None,
    origin: Sequence[int] = (0, 0, 0),
    stride: int | Sequence[int] = 1,
) -> Voxels:
    """`Voxels.from_dense`: voxels of a grid (B, C, X, Y, Z) where `mask` (B, X, Y, Z) or a channel is set."""
    return Voxels.from_dense(dense, mask, origin, stride)


# ---- samples -----------------------------------------------------------------------------------------------


def batch(voxels: Sequence[Voxels]) -> Voxels:
    """`Voxels.cat`: all samples of all `voxels` in one batch, rows in order."""
    return Voxels.cat(voxels)


def unbatch(x: Voxels) -> list[Voxels]:
    """`x.unbind()`: one Voxels per sample, empty ones included; the inverse of `batch`."""
    return x.unbind()


def collate(samples: Sequence[Any]) -> Any:
    """`collate_fn` of a torch DataLoader: a list of samples into one batch; runs in worker processes.

    A sample is a Voxels, a tuple (coords, feats, *targets), or a tuple, list or dict of Voxels and whatever
    torch's default_collate takes, nested at will. Voxels are batched; in (coords, feats, *targets), coords
    is (N, 3) or (N, 4) int32 or int64 whose batch column, if any, is ignored, and coords and feats become
    one Voxels. Of targets, those of N rows in every sample are per voxel and are concatenated; everything
    else is stacked by torch's default rules.

    Raises TypeError or ValueError naming the sample.
    """
    if not samples:
        raise ValueError("samples must hold at least one sample")
    first = samples[0]
    if isinstance(first, tuple) and len(first) >= 2 and all(map(_is_tensor, first[:2])):
        samples = [_voxels_first(sample, i, len(first)) for i, sample in enumerate(samples)]
        first = samples[0]
    if type(first) is tuple and first and isinstance(first[0], Voxels):
        sizes = [sample[0].num_voxels for sample in samples]
        return tuple(_collate_column(list(column), sizes) for column in zip(*samples, strict=True))
    return _torch_collate(list(samples), collate_fn_map=_COLLATE)


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _voxels_first(sample: Any, index: int, length: int) -> tuple[Any, ...]:
    if not isinstance(sample, tuple) or len(sample) != length:
        raise ValueError(f"samples[{index}] is not a tuple of {length} like samples[0]")
    coords, feats, *targets = sample
    if not _is_tensor(coords) or coords.dim() != 2 or coords.shape[1] not in (3, 4):
        raise ValueError(f"samples[{index}]: coords must be (N, 3) or (N, 4)")
    columns = coords.new_zeros((len(coords), 4))
    columns[:, 1:] = coords[:, -3:]
    try:
        return Voxels(columns, feats, batch_size=1), *targets
    except (TypeError, ValueError) as error:
        raise type(error)(f"samples[{index}]: {error}") from None


def _collate_column(values: list[Any], sizes: list[int]) -> Any:
    per_voxel = all(
        isinstance(v, torch.Tensor) and v.dim() > 0 and len(v) == n
        for v, n in zip(values, sizes, strict=True)
    )
    return torch.cat(values) if per_voxel else _torch_collate(values, collate_fn_map=_COLLATE)


def _collate_voxels(values: Sequence[Voxels], *, collate_fn_map: Any = None) -> Voxels:
    return Voxels.cat(values)


_COLLATE = {Voxels: _collate_voxels, **default_collate_fn_map}
