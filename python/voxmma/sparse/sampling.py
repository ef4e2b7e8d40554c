"""Points into cells, and back: features at the voxels are read at points."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import torch

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma._types import DTYPE_NAMES, as_tensor
from voxmma.sparse.index import kernels_take
from voxmma.sparse.interpolate import Interpolate, weighted
from voxmma.sparse.packing import COORD_MAX
from voxmma.sparse.points import (
    check_batch,
    grid_of,
    grid_positions,
    join_samples,
    per_axis,
    quantize,
    tensors,
)
from voxmma.sparse.sets import lookup
from voxmma.sparse.tensor import Voxels

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
    x = x.sites()
    points, batch_index = tensors(points, "points"), as_tensor(batch_index, "batch_index")
    nothing: torch.Tensor | list[torch.Tensor]
    if one := isinstance(points, torch.Tensor):
        nothing = points.new_zeros((len(points), 0), dtype=torch.float32)
    else:
        nothing = [p.new_zeros((len(p), 0), dtype=torch.float32) for p in points]
    points, _, batch, _ = join_samples(points, nothing, batch_index, x.batch_size, check=False)
    if points.device != x.device:
        raise ValueError(f"points is on {points.device}, x is on {x.device}")
    sized = x.coord_set.sized
    if not sized and x.num_voxels and points.dtype in DTYPE_NAMES and kernels_take(x.feats):
        located = _locate(x, points, batch, grid_of(voxel_size, origin), mode == "trilinear")
        if located is not None:  # else the lines below find out what is wrong
            return Interpolate.apply(x.feats, *located)
    if one and not sized:
        check_batch(batch, x.batch_size)
    position = grid_positions(points, voxel_size, origin)
    finite = position.isfinite().all(1)
    if sized:
        there = finite & (batch >= 0) & (batch < x.batch_size)
        x.coord_set.check_points(torch.where(there.unsqueeze(1), position, torch.nan))
        position = torch.where(finite.unsqueeze(1), position, 0)
    elif not bool(finite.all()):
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
    shares = torch.stack(weights, dim=1) / total.unsqueeze(1)
    if sized:
        return x.coord_set.weighted(x.feats, torch.stack(rows, dim=1), shares)
    return weighted(x.feats, torch.stack(rows, dim=1), shares, found=True)


@eager
def _locate(
    x: Voxels,
    points: torch.Tensor,
    batch: torch.Tensor,
    grid: tuple[Sequence[float], Sequence[float]],
    trilinear: bool,
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Rows of x around each point and their weights, with one read-back; None where a point is not finite or
    of a sample that is not there."""
    wide = x.dtype == torch.float64
    rows, weights, valid = _C.locate_points(
        points, batch, x.batch_size, *grid, x.stride, trilinear, *x.coord_set.hash_index(), wide
    )
    return (rows, weights) if valid else None
