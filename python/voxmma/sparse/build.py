"""The tensors of a kernel map: pairs on a CPU, a tile plan on a GPU."""

from __future__ import annotations

import itertools

import torch

from voxmma._extension import _C
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.cores import Direction
from voxmma.sparse.geometry import Geometry, plan_rule
from voxmma.sparse.packing import COORD_MAX, COORD_MIN, pack_axis, pack_batch


def build_cuda(in_coords: CoordSet, out_coords: CoordSet, geometry: Geometry, reverse: bool) -> Direction:
    """The tile plan; symmetry saves nothing there."""
    in_order, hash_blocks = in_coords._hashed()
    out_order = in_order if out_coords is in_coords else out_coords._hashed()[0]
    (rows,) = out_coords._made.eager()
    tensors, stats, pairs = _C.build_plan(
        rows, out_order, hash_blocks, in_order, *plan_rule(geometry, reverse)
    )
    return Direction(tensors, None, stats) if pairs < 0 else Direction(tensors, pairs)


def size_tensor(in_coords: torch.Tensor, out_coords: torch.Tensor) -> torch.Tensor:
    """What tells the ops, by its shape alone, between how many rows a map leads."""
    return _C.map_size(in_coords, in_coords.shape[0], out_coords.shape[0])


def build_cpu(
    in_coords: CoordSet, out_coords: CoordSet, geometry: Geometry, reverse: bool, symmetric: bool
) -> Direction:
    """A symmetric map searches half its offsets; the other half holds the same pairs the other way round."""
    out_row = out_coords.sorted_keys()[1]
    tensors = cpu_pairs(
        *in_coords.sorted_keys(), out_row, out_coords.coords, geometry, reverse, symmetric=symmetric
    )
    return Direction([*tensors, size_tensor(in_coords._coords, out_coords._coords)], len(tensors[0]))


def cpu_pairs(
    ordered: torch.Tensor,
    in_row: torch.Tensor,
    out_row: torch.Tensor,
    out_coords: torch.Tensor,
    geometry: Geometry,
    reverse: bool,
    *,
    symmetric: bool = False,
) -> list[torch.Tensor]:
    """in_rows, out_rows and kptr of a map on a CPU: searches of the output rows `out_row` per offset.

    `ordered` are the inputs' ascending keys, `in_row` the row of each. `out_row` comes in the order of the
    outputs' keys, so that a search starts where the one before ended.
    """
    one = (1, 1, 1)
    mul, div = (one, geometry.stride) if reverse else (geometry.stride, one)
    offsets = geometry.offsets(reverse)
    coords = out_coords[out_row]
    batch, *columns = coords.long().unbind(1)
    axes = [
        {add: _axis_query(column, mul[axis], add, div[axis], axis) for add in {o[axis] for o in offsets}}
        for axis, column in enumerate(columns)
    ]
    batch = pack_batch(batch)
    in_rows: list[torch.Tensor] = []
    out_rows: list[torch.Tensor] = []
    for k, offset in enumerate(offsets):
        mirror = len(offsets) - 1 - k
        if symmetric and mirror < k:
            pairs = _C.mirror_pairs(in_rows[mirror], out_rows[mirror], len(out_coords))
        else:
            queries = [cache[add] for cache, add in zip(axes, offset, strict=True)]
            keys, masks = [key for key, _ in queries], [ok for _, ok in queries if ok is not None]
            pairs = _C.match_rows(ordered, in_row, out_row, batch, keys, masks, len(out_coords))
        in_rows.append(pairs[0])
        out_rows.append(pairs[1])
    kptr = [0, *itertools.accumulate(len(rows) for rows in out_rows)]
    starts = torch.tensor(kptr, dtype=torch.int64, device=coords.device)
    return [torch.cat(in_rows), torch.cat(out_rows), starts]


def _axis_query(
    column: torch.Tensor, mul: int, add: int, div: int, axis: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Part of the packed query key that an int64 column makes, and which rows have one (None: all)."""
    query = column + add if mul == 1 else column * mul + add
    ok = (query >= COORD_MIN * div) & (query <= COORD_MAX * div)
    if div != 1:
        ok &= query % div == 0
        query = query.div(div, rounding_mode="floor")
    return pack_axis(query, axis), None if bool(ok.all()) else ok


def neighbor_table(tensors: list[torch.Tensor], kernel_volume: int, n_out: int) -> torch.Tensor:
    """KernelMap.neighbor_table() from the tensors of a map. Does not wait for a GPU."""
    if tensors[0].is_cuda:
        return _C.plan_to_table(tensors, n_out)
    in_rows, out_rows, kptr, _ = tensors
    table = torch.full((kernel_volume, n_out), -1, dtype=torch.int32, device=in_rows.device)
    offset = torch.repeat_interleave(torch.arange(kernel_volume, device=in_rows.device), kptr.diff())
    table[offset, out_rows] = in_rows.int()
    return table
