"""Operations on sets of coordinates: coarser sets, unions, intersections, parts of a Voxels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxmma._types import Triple, as_tensor, triple
from voxmma.sparse.checks import check_columns
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import DEFAULT_MAX_VOXELS
from voxmma.sparse.geometry import MAX_STRIDE, check_outputs, geometry_of, output_padding_triple
from voxmma.sparse.levels import coarser_set, made_from
from voxmma.sparse.maps import _coord_set
from voxmma.sparse.packing import find_keys, pack, unpack
from voxmma.sparse.tensor import Voxels

# ---- sets from sets ----------------------------------------------------------------------------------------


def downsample(coords: CoordSet | Voxels, stride: int | Sequence[int]) -> CoordSet:
    """The cells of a grid coarser by `stride` (one int or three, 1 to 4096) that hold a voxel.

    Coordinates are divided and rounded down, negative ones too: -1 at stride 2 lies in cell -1. Sorted by
    (batch, x, y, z). It is one set as long as it lives (up to stride 9 as long as `coords` does): the same
    for steps 2, 2 and for 4, for layers with outputs='cells', and up to 9 for unpadded layers of that kernel
    size and stride, in a bounded grid where it divides the shape. TypeError or ValueError names the argument.
    """
    source = _coord_set(coords, "coords")
    step = triple(stride, "stride", 1, MAX_STRIDE)
    return coarser_set(source, step, max(source.num, DEFAULT_MAX_VOXELS))


def output_coords(
    coords: CoordSet | Voxels,
    kernel_size: int | Sequence[int],
    *,
    dilation: int | Sequence[int] = 1,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | None = None,
    transposed: bool = False,
    generative: bool = False,
    max_voxels: int | None = None,
    output_padding: int | Sequence[int] = 0,
    outputs: str = "windows",
) -> CoordSet:
    """The coordinates that a layer with these arguments makes, without its kernel map: the very set that the
    layer will put its result on. Arguments and errors as of `kernel_map`.
    """
    geometry = geometry_of(kernel_size, dilation, stride, padding)
    rule = check_outputs(outputs), max_voxels, output_padding_triple(output_padding)
    return made_from(_coord_set(coords, "coords"), geometry, transposed, generative, *rule)[0].full


def union(*coords: CoordSet | Voxels) -> CoordSet:
    """The voxels of at least one of the sets, sorted; the set itself when all are one and the same object.

    ValueError names the argument whose device, batch size or spatial shape differs from the first.
    """
    sets = _alike(coords)
    if all(other is sets[0] for other in sets):
        return sets[0]
    keys = torch.cat([pack(s.coords) for s in sets])
    return _from_keys(keys, sets[0].batch_size, sets[0].spatial_shape)


def intersection(*coords: CoordSet | Voxels) -> CoordSet:
    """The voxels that all sets have, sorted; otherwise as `union`."""
    sets = _alike(coords)
    if all(other is sets[0] for other in sets):
        return sets[0]
    keys = sets[0].sorted_keys()[0]
    common = torch.ones_like(keys, dtype=torch.bool)
    for other in sets[1:]:
        common &= find_keys(keys, *other.sorted_keys()) >= 0
    return CoordSet.trusted(unpack(keys[common]), sets[0].batch_size, spatial_shape=sets[0].spatial_shape)


def lookup(coords: CoordSet | Voxels, query: torch.Tensor) -> torch.Tensor:
    """(M,) int64 rows of the `query` coordinates (M, 4) int32 or int64 in `coords`, -1 where absent.

    A query may hold anything, repeated rows, coordinates and samples out of range included; those are
    absent. No host synchronisation. TypeError or ValueError names what is wrong with `query`.
    """
    _coord_set(coords, "coords")
    source = coords if isinstance(coords, CoordSet) else coords.coord_set  # with the rows that repeat
    query = as_tensor(query, "query")
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
        for name in ("device", "batch_size", "spatial_shape"):
            mine, first = getattr(s, name), getattr(sets[0], name)
            if mine != first:
                raise ValueError(f"coords[{i}] has {name} {mine}, coords[0] has {first}")
    return sets


def _from_keys(keys: torch.Tensor, batch_size: int, spatial_shape: Triple | None) -> CoordSet:
    with torch.inference_mode(False), torch.no_grad():
        return CoordSet.trusted(unpack(torch.unique(keys)), batch_size, spatial_shape=spatial_shape)


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
    repeats = x.coord_set.repeated is not None
    coords = CoordSet.trusted(x.coords[rows], x.batch_size, None, x.spatial_shape, repeats)
    return Voxels(coords, x.feats[rows], stride=x.stride)


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
    spatial_shape: int | Sequence[int] | None = None,
) -> Voxels:
    """Voxels of coordinates (N, 4) that may repeat, their features (N, C) merged, sorted.

    `reduce`: 'mean', 'sum', 'max', 'min' or 'first' (smallest row). Sums run in fp32 for half features and
    in fp64 for the others, as a tree in row order: CPU and GPU give the same bits. Errors as in Voxels.
    """
    if reduce == "error":
        raise ValueError("reduce must be 'mean', 'sum', 'max', 'min' or 'first', got 'error'")
    return Voxels(coords, feats, batch_size, stride, duplicates=reduce, spatial_shape=spatial_shape)
