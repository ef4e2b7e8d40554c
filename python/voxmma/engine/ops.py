"""Operators on sets and rows whose number lies on the device: what an engine's program consists of beside
torch's own and the ops of voxmma.ops.

Tensors have as many rows as the engine has room for (their capacity); `count` (1,) int64 says how many there
are. What is behind them means nothing and is read by none of these. The other tensors of a set are those of
voxmma.sparse.sized.SizedSet. `status` (4,) int64 is what the engine reads after the frame.
"""

from __future__ import annotations

import torch
from torch import Tensor

from voxmma.sparse import segments, sized
from voxmma.sparse.derive import Derived
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.interpolate import weighted
from voxmma.sparse.sized import SizedSet

_SET = "Tensor {0}coords, Tensor {0}count, Tensor {0}inner, Tensor {0}first, Tensor {0}second"
_SCHEMAS = (
    "sized_index(Tensor coords, Tensor count, int[] bounds)"
    " -> (Tensor inner, Tensor first, Tensor second, Tensor status)",
    "sized_voxels(Tensor points, Tensor? batch, Tensor feats, Tensor count, Tensor box, float[] edge,"
    " float[] origin, str reduce, int capacity)"
    " -> (Tensor coords, Tensor voxel_feats, Tensor voxel_count, Tensor status)",
    f"sized_sites({_SET.format('')}, int[] bounds, int[] geometry, bool to_children,"
    " int[] shape, int capacity)"
    f" -> ({_SET.format('')}, Tensor status)",
    "sized_maps(Tensor[] sets, int[] inputs, int[] outputs, int[] geometries, int[] reverse, float[] rooms)"
    " -> (Tensor[] maps, Tensor status)",
    f"sized_lookup(Tensor query, {_SET.format('')}) -> Tensor rows",
    "sized_rows(Tensor x, Tensor count) -> Tensor",
    "sized_weighted(Tensor x, Tensor rows, Tensor weights) -> Tensor",
    "sized_tree(Tensor coords, Tensor count, int samples) -> Tensor[]",
    "sized_counts(Tensor coords, Tensor count, int samples) -> Tensor",
    "sized_dense(Tensor x, Tensor coords, Tensor count, int samples, int[] shape, int[] origin)"
    " -> (Tensor grid, Tensor status)",
    "sized_finite(Tensor x, Tensor count) -> Tensor status",
)
_LIBRARY = torch.library.Library("voxmma", "FRAGMENT")
for _schema in _SCHEMAS:
    _LIBRARY.define(_schema)

LEVELS = 4
"""of the tree over samples: enough for 64**4 rows"""
STATUS = 4
SET = 5
"""tensors of a set"""
_ANYWHERE = (0,) * 8  # bounds of a set that is only read
_SPARE = (16, 1024)  # passes and units that any plan has room for on top: small ones vary the most


def flat(geometry: Geometry) -> list[int]:
    """A geometry as the operators take it."""
    return [value for triple in geometry for value in triple]


def _geometry(values: list[int]) -> Geometry:
    size, stride, dilation, padding = (tuple(values[i : i + 3]) for i in range(0, 12, 3))
    return Geometry(size, stride, dilation, padding)  # type: ignore[arg-type]


def _status(like: Tensor) -> Tensor:
    return torch.empty(STATUS, dtype=torch.int64, device=like.device)


# ---- sets and maps: voxmma.sparse.sized --------------------------------------------------------------------


def _index(coords: Tensor, count: Tensor, bounds: list[int]) -> tuple[Tensor, ...]:
    status = _status(coords)
    made = sized.index_sized(coords, count, tuple(bounds), status)
    assert made.inner is not None
    return made.inner, *made.index, status


def _voxels(
    points: Tensor,
    batch: Tensor | None,
    feats: Tensor,
    count: Tensor,
    box: Tensor,
    edge: list[float],
    origin: list[float],
    reduce: str,
    capacity: int,
) -> tuple[Tensor, ...]:
    status = _status(points)
    made = sized.voxels_sized(points, batch, feats, count, (edge, origin, reduce), box, capacity, status)
    return *made, status


def _sites(
    coords: Tensor,
    count: Tensor,
    inner: Tensor,
    first: Tensor,
    second: Tensor,
    bounds: list[int],
    geometry: list[int],
    to_children: bool,
    shape: list[int],
    capacity: int,
) -> tuple[Tensor, ...]:
    status = _status(coords)
    source = SizedSet(coords, count, inner, (first, second), tuple(bounds))
    x, y, z = shape or (0, 0, 0)
    key = Derived(_geometry(geometry), to_children, (x, y, z) if shape else None)
    made = sized.derive_sized(source, key, capacity, status)
    assert made.inner is not None
    return made.coords, made.count, made.inner, *made.index, status


def plan_capacity(geometry: Geometry, reverse: bool, n_in: int, n_out: int, room: float) -> tuple[int, int]:
    """Passes, and units of 4 unique rows, that a plan may have: `room` times what it takes as a rule."""
    passes, units, *most = sized.plan_room(geometry, reverse, n_in, n_out)
    return (
        min(most[0], int(passes * room) + _SPARE[0]),
        min(most[1], int(units * room) + _SPARE[1]),
    )


def plan_room(geometry: Geometry, reverse: bool, n_in: int, n_out: int, passes: int, units: int) -> float:
    """The room that a plan of so many passes and units takes."""
    usual = sized.plan_room(geometry, reverse, n_in, n_out)
    return max(passes / max(usual[0], 1), units / max(usual[1], 1))


def _maps(
    sets: list[Tensor],
    inputs: list[int],
    outputs: list[int],
    geometries: list[int],
    reverse: list[int],
    rooms: list[float],
) -> tuple[list[Tensor], Tensor]:
    """The tensors of one map after another, and their status (maps, 4).

    sets: `SET` tensors each. inputs, outputs: of each map, among these. geometries: 12 numbers of each.
    """
    known = [
        SizedSet(sets[i], sets[i + 1], sets[i + 2], (sets[i + 3], sets[i + 4]), _ANYWHERE)
        for i in range(0, len(sets), SET)
    ]
    plans = []
    for number, (a, b, room) in enumerate(zip(inputs, outputs, rooms, strict=True)):
        rule, turned = _geometry(geometries[12 * number : 12 * number + 12]), bool(reverse[number])
        limits = (0, 0)
        if sets[0].is_cuda:
            limits = plan_capacity(rule, turned, len(known[a].coords), len(known[b].coords), room)
        plans.append(sized.Plan(known[a], known[b], rule, turned, limits))
    status = torch.empty((len(plans), STATUS), dtype=torch.int64, device=sets[0].device)
    return [tensor for made in sized.plans_sized(plans, status) for tensor in made], status


def _lookup(
    query: Tensor, coords: Tensor, count: Tensor, inner: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """Rows (M,) int64 of a query (M, 4), -1 where the set has none."""
    return sized.lookup_sized(SizedSet(coords, count, inner, (first, second), _ANYWHERE), query)


# ---- rows --------------------------------------------------------------------------------------------------


def _there(count: Tensor, capacity: int) -> Tensor:
    """(capacity,) bool: the rows that there are."""
    return torch.arange(capacity, device=count.device) < count


def _rows(x: Tensor, count: Tensor) -> Tensor:
    """x with zeros behind its rows."""
    there = _there(count, len(x)).view(-1, *[1] * (x.dim() - 1))
    return torch.where(there, x, torch.zeros((), dtype=x.dtype, device=x.device))


def _samples(coords: Tensor, count: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """The sample of each row, `samples` where there is none, and how many each of samples + 1 has. int64."""
    batch = torch.where(_there(count, len(coords)), coords[:, 0].long(), samples)
    batch = torch.where((batch >= 0) & (batch < samples), batch, samples)  # out of bounds: reported
    zeros = torch.zeros(samples + 1, dtype=torch.int64, device=coords.device)
    return batch, zeros.index_add_(0, batch, torch.ones_like(batch))


def _counts(coords: Tensor, count: Tensor, samples: int) -> Tensor:
    return _samples(coords, count, samples)[1][:samples].clone()


def _tree(coords: Tensor, count: Tensor, samples: int) -> list[Tensor]:
    """segments.tree with one more sample, the last, of what is behind the rows; always `LEVELS` deep."""
    batch, size = _samples(coords, count, samples)
    return [tensor for level in segments.levels(batch, size, LEVELS) for tensor in level]


def _dense(
    x: Tensor, coords: Tensor, count: Tensor, samples: int, shape: list[int], origin: list[int]
) -> tuple[Tensor, Tensor]:
    """The grid of Voxels.dense, and the smallest row outside of it, or -1."""
    there = _there(count, len(x))
    sample = coords[:, 0].long()
    inside, place = (sample >= 0) & (sample < samples), sample
    for axis, (first, side) in enumerate(
        zip(origin, shape, strict=True)
    ):  # numbers: nothing is copied to a GPU
        cell = coords[:, 1 + axis].long() - first
        inside, place = inside & (cell >= 0) & (cell < side), place * side + cell
    row = torch.arange(len(x), device=x.device)
    outside = torch.where(there & ~inside, row, len(x)).amin()
    cells = samples * shape[0] * shape[1] * shape[2]
    grid = x.new_zeros((cells + 1, x.shape[1]))  # the last takes what is nowhere
    grid.index_copy_(0, torch.where(there & inside, place, cells), x)
    status = torch.zeros(STATUS, dtype=torch.int64, device=x.device)
    status[0] = torch.where(outside < len(x), outside, -1)
    made = grid[:-1].view(samples, *shape, x.shape[1]).permute(0, 4, 1, 2, 3)
    return made, status


def _finite(x: Tensor, count: Tensor) -> Tensor:
    """The smallest row with a value that is not finite, or -1."""
    bad = ~x.isfinite().all(1) & _there(count, len(x))
    row = torch.where(bad, torch.arange(len(x), device=x.device), len(x)).amin()
    status = torch.zeros(STATUS, dtype=torch.int64, device=x.device)
    status[0] = torch.where(row < len(x), row, -1)
    return status


for _name, _function in (
    ("sized_index", _index),
    ("sized_voxels", _voxels),
    ("sized_sites", _sites),
    ("sized_maps", _maps),
    ("sized_lookup", _lookup),
    ("sized_rows", _rows),
    ("sized_weighted", weighted),
    ("sized_tree", _tree),
    ("sized_counts", _counts),
    ("sized_dense", _dense),
    ("sized_finite", _finite),
):
    for _device in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _function, _device)
