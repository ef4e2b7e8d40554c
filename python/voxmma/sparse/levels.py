"""Which set a layer puts its outputs on: coarser ones, and the way back to finer ones."""

from __future__ import annotations

import weakref

import torch

from voxmma._types import Triple
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import cells, cells_shape, check_count, children, windows
from voxmma.sparse.finer import Finer
from voxmma.sparse.geometry import MAX_KERNEL, Geometry
from voxmma.sparse.packing import pack, unpack


def made_from(
    source: CoordSet,
    geometry: Geometry,
    transposed: bool,
    generative: bool,
    outputs: str,
    max_voxels: int | None,
    output_padding: Triple,
) -> tuple[CoordSet, bool]:
    """The outputs of a layer on `source`, and whether the finer set was made out of the coarser one."""
    if geometry.stride == (1, 1, 1) and not generative:
        return source, False
    if not transposed and outputs == "cells" and not generative:
        return coarser_set(source, geometry.stride, max_voxels), False
    if not transposed:
        return windows(source, geometry, max_voxels), False
    finer = None if generative else finer_set(source, geometry.stride)
    if finer is not None:
        return finer, False
    return children(source, geometry, max_voxels, output_padding), True


def finer_set(coarse: CoordSet, stride: Triple) -> CoordSet | None:
    """The set that strided layers of this total stride made `coarse` from, or of cells of which it holds
    those (`coarser_set`); None when there is none.

    ValueError when there are several: `CoordSet.remember`.
    """
    link = coarse.finer
    if link is not None and link.geometry.stride == stride and not link.ambiguous:
        return link.get()
    total, found = (1, 1, 1), coarse
    while total != stride:
        link = found.finer
        if link is None or any(t > s for t, s in zip(total, stride, strict=True)):
            return _finer_level(coarse, stride)
        if link.ambiguous:
            raise ValueError(
                "strided layers on several inputs put their outputs on the coordinates of x (coords=...): "
                "say which voxels to go back to with coords= (out_coords= of kernel_map)"
            )
        x, y, z = (t * s for t, s in zip(total, link.geometry.stride, strict=True))
        total, found = (x, y, z), link.get()
    return found


def _finer_level(coarse: CoordSet, stride: Triple) -> CoordSet | None:
    if coarse.levels is None:
        return None
    family, mine = coarse.levels
    x, y, z = (m // s if m % s == 0 else 0 for m, s in zip(mine, stride, strict=True))
    return family.get((x, y, z))


def coarser_set(source: CoordSet, stride: Triple, max_voxels: int | None = None) -> CoordSet:
    """The cells of a grid coarser by `stride` that hold a voxel: one set for every total stride from the set
    that the first of them was made from, by whatever steps.

    Raises ValueError as `voxmma.sparse.derive.windows`.
    """
    if stride == (1, 1, 1) or torch.compiler.is_compiling():
        return _cells(source, stride, max_voxels)
    with source._index.lock:
        if source.levels is None:
            source.levels = weakref.WeakValueDictionary({(1, 1, 1): source}), (1, 1, 1)
        family, mine = source.levels
        x, y, z = (m * s for m, s in zip(mine, stride, strict=True))
        made = family.get((x, y, z))
        if made is None or made._made.written:
            made = _cells(source, stride, max_voxels)
            made.levels = family, (x, y, z)
            family[x, y, z] = made
        check_count(made.num, max_voxels, source.num)
        return made


def _cells(source: CoordSet, stride: Triple, max_voxels: int | None) -> CoordSet:
    geometry = Geometry(stride, stride, (1, 1, 1), (0, 0, 0))
    if max(stride) <= MAX_KERNEL:
        return cells(source, geometry, max_voxels)
    columns = zip(source.coords.unbind(1), (1, *stride), strict=True)
    coarse = torch.stack([column.div(size, rounding_mode="floor") for column, size in columns], dim=1)
    with torch.inference_mode(False), torch.no_grad():
        rows = unpack(torch.unique(pack(coarse)))
        made = CoordSet.trusted(
            rows, source.batch_size, spatial_shape=cells_shape(source.spatial_shape, stride)
        )
    made.finer = Finer(source, geometry)
    return made
