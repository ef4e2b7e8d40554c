"""Output coordinates of strided, generative and transposed layers: sorted by (batch, x, y, z), the same on
every device.

Both rules are products of one rule an axis, so a voxel's candidates are the product of those along each axis.
They become packed keys; repeats are dropped, on a CPU by sorting, on a GPU by a bitmap over the box that
they can lie in (csrc/map/cells.cu), or by a hash table where that has more than 2^27 cells
(csrc/map/derive.cu). Candidates outside of a bounded grid are dropped as they are made. One thing comes back
to the host: how many there are. Work above `CHUNK` candidates is done in pieces, so that memory stays bounded
by the result, one piece and the bitmap (48 MiB at most); with a hash table each piece reads its count back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from voxmma._dynamo import eager
from voxmma._extension import _C
from voxmma._types import Triple, positive
from voxmma.sparse.cached import Made, keep, outside_transforms, refuse_capture
from voxmma.sparse.coords import _KEPT, CoordSet
from voxmma.sparse.finer import Finer
from voxmma.sparse.index import _COORDS, _HASHED, _Index
from voxmma.sparse.packing import COORD_MAX, COORD_MIN, Bounds, pack_axis, pack_batch, unpack

if TYPE_CHECKING:
    from voxmma.sparse.geometry import Geometry

DEFAULT_MAX_VOXELS = 1 << 26
CHUNK = 1 << 24  # candidates at a time: 128 MiB of keys, a few times that while they are sorted
_NONE = torch.iinfo(torch.int64).max  # above every packed key: no candidate here
_OUTSIDE = _NONE - 1  # a candidate whose coordinate cannot be packed

#: An axis' candidates (N, m): coordinate, and which of them exist (None: all).
_Axis = tuple[torch.Tensor, torch.Tensor | None]


def windows(fine: CoordSet, geometry: Geometry, max_voxels: int | None = None) -> CoordSet:
    """The sites whose kernel window holds a voxel of `fine`: o * stride - padding + k * dilation for some k.

    Without a `spatial_shape` the grid has no borders, and these are the non-zero outputs of a dense
    convolution of ones on a grid with enough zeros around the voxels. With one they are those within the
    shape that torch's convolution has. Made once for `fine` and a geometry. The result remembers `fine` where
    the stride is not 1 (`CoordSet.finer`).

    Raises ValueError before more than `max_voxels` (default 2^26) come into being, for sites outside the
    packable range, and where the shape is none that can be.
    """
    return _cached(fine, Derived(geometry, False, windows_shape(fine.spatial_shape, geometry)), max_voxels)


def children(
    coarse: CoordSet,
    geometry: Geometry,
    max_voxels: int | None = None,
    output_padding: Triple = (0, 0, 0),
) -> CoordSet:
    """The sites that the voxels of `coarse` reach: o * stride - padding + k * dilation for every k, within
    the shape of torch's transposed convolution where `coarse` has a `spatial_shape`.

    Made once for `coarse` and a geometry. Raises as `windows`.
    """
    shape = children_shape(coarse.spatial_shape, geometry, output_padding)
    return _cached(coarse, Derived(geometry, True, shape), max_voxels)


def cells(fine: CoordSet, geometry: Geometry, max_voxels: int | None = None) -> CoordSet:
    """The cells of a coarser grid that hold a voxel of `fine`, the one that its border cuts included.

    `geometry`: kernel size and stride are those of a cell, without dilation and padding. Else as `windows`.
    """
    shape = cells_shape(fine.spatial_shape, geometry.stride)
    return _cached(fine, Derived(geometry, False, shape), max_voxels)


class Derived(NamedTuple):
    """Which set another one makes: key of `CoordSet.derived`."""

    geometry: Geometry
    to_children: bool
    shape: Triple | None
    """of the grid that it lies in; None: no borders"""

    def make(self, source: CoordSet) -> CoordSet:
        """The set that `source` makes so, as it is cached."""
        return _cached(source, self, None)

    def link(self, source: CoordSet, made: CoordSet) -> None:
        """Lets a coarser set remember the finer one."""
        if not self.to_children and self.geometry.stride != (1, 1, 1):
            made.finer = Finer(source, self.geometry)


def windows_shape(shape: Triple | None, geometry: Geometry) -> Triple | None:
    """floor((n + 2 * padding - dilation * (kernel_size - 1) - 1) / stride) + 1 per axis, as torch.nn.Conv3d.

    ValueError where that is none, or more than can be packed.
    """
    if shape is None:
        return None
    x, y, z = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in zip(shape, *geometry, strict=True))
    return _check_shape((x, y, z), shape, geometry)


def children_shape(
    shape: Triple | None, geometry: Geometry, output_padding: Triple = (0, 0, 0)
) -> Triple | None:
    """(n - 1) * stride - 2 * padding + dilation * (kernel_size - 1) + output_padding + 1 per axis, as
    torch.nn.ConvTranspose3d.

    ValueError where that is none, or more than can be packed.
    """
    if shape is None:
        return None
    x, y, z = (
        (n - 1) * s - 2 * p + d * (k - 1) + more + 1
        for n, k, s, d, p, more in zip(shape, *geometry, output_padding, strict=True)
    )
    return _check_shape((x, y, z), shape, geometry)


def cells_shape(shape: Triple | None, stride: Triple) -> Triple | None:
    """ceil(n / stride) per axis."""
    if shape is None:
        return None
    x, y, z = (-(-n // s) for n, s in zip(shape, stride, strict=True))
    return x, y, z


def _check_shape(made: Triple, shape: Triple, geometry: Geometry) -> Triple:
    if min(made) < 1 or max(made) > COORD_MAX + 1:
        raise ValueError(
            f"the layer ({_kernel(geometry)}) makes a grid of {made} out of spatial_shape {shape}: "
            f"1 to {COORD_MAX + 1} cells an axis are possible"
        )
    return made


def _cached(source: CoordSet, key: Derived, max_voxels: int | None) -> CoordSet:
    limit = check_max_voxels(max_voxels)
    _ = source.coords  # still what the cached sets were made of?
    made = source.derived.get(key)
    if made is None or made._made.written:
        made = _made_once(source, key, limit)
    if made.num > limit:
        raise _too_many(made.num, limit, source.num)
    return made


@eager
def _made_once(source: CoordSet, key: Derived, limit: int) -> CoordSet:
    with source._index.lock:
        made = source.derived.get(key)
        if made is not None and made._made.written:
            del source.derived[key]  # somebody wrote into its coordinates
            made = None
        if made is None:
            made = _make(source, key, limit)
            keep(source.derived, key, made, _KEPT["derived"])
            if source.place is not None:
                made.place = source.place.derived(made, key)
    return made


def _make(source: CoordSet, key: Derived, limit: int) -> CoordSet:
    if source.sized:
        return source.derive(key)
    geometry = key.geometry
    if source._coords.is_cuda:
        refuse_capture(lambda: f"the output coordinates of a layer ({_kernel(geometry)})", source.device)
        with outside_transforms():
            made = _make_cuda(source, key, limit)
    else:
        with torch.inference_mode(False), torch.no_grad(), outside_transforms():
            made = _make_cpu(source, key, limit)
    key.link(source, made)
    return made


def check_max_voxels(max_voxels: int | None) -> int:
    """The bound that `max_voxels` means; ValueError unless it is None or a positive int."""
    if max_voxels is None:
        return DEFAULT_MAX_VOXELS
    return positive(max_voxels, "max_voxels")


def check_count(count: int, max_voxels: int | None, source: int) -> None:
    """ValueError where a layer makes more than `max_voxels` voxels out of `source`."""
    limit = check_max_voxels(max_voxels)
    if count > limit:
        raise _too_many(count, limit, source)


def _too_many(count: int, limit: int, source: int) -> ValueError:
    return ValueError(
        f"the layer makes {count:,} voxels or more out of {source:,}, max_voxels is {limit:,}: raise "
        "max_voxels, or prune the voxels first"
    )


def _outside(geometry: Geometry) -> ValueError:
    return ValueError(f"the layer ({_kernel(geometry)}) makes voxels outside {COORD_MIN}..{COORD_MAX}")


def _kernel(geometry: Geometry) -> str:
    size, stride, dilation, padding = geometry
    return f"kernel_size {size}, stride {stride}, dilation {dilation}, padding {padding}"


def _make_cuda(source: CoordSet, key: Derived, limit: int) -> CoordSet:
    """The output set and its index."""
    bounds = reach(source.bounds, *key)
    coords, order, hash_blocks, count, outside = _C.derive_coords(
        source.coords, *key.geometry, key.to_children, key.shape or (), bounds, CHUNK, limit
    )
    if outside:
        raise _outside(key.geometry)
    if count > limit:
        raise _too_many(count, limit, source.num)
    index, kept = _Index(), Made((coords,), _COORDS)
    index.hashed, index.bounds = Made((order, hash_blocks), _HASHED, kept.event), bounds
    return CoordSet._of_parts(kept, source.batch_size, index, key.shape)


def _make_cpu(source: CoordSet, key: Derived, limit: int) -> CoordSet:
    keys = _expand(source, key, limit)
    made = CoordSet.trusted(unpack(keys), source.batch_size, reach(source.bounds, *key), key.shape)
    made._set_sorted(keys, torch.arange(len(keys), device=keys.device))
    return made


def reach(bounds: Bounds, geometry: Geometry, to_children: bool, shape: Triple | None = None) -> Bounds:
    """Bounds of the packable sites that voxels within `bounds` lead to, within `shape`."""
    low, high = [bounds[0]], [bounds[4]]
    start, end = COORD_MIN, COORD_MAX
    for axis, (size, stride, dilation, padding) in enumerate(zip(*geometry, strict=True)):
        first, last, span = bounds[1 + axis], bounds[5 + axis], (size - 1) * dilation
        if to_children:
            first, last = first * stride - padding, last * stride - padding + span
        else:
            first, last = -((span - padding - first) // stride), (last + padding) // stride
        if shape is not None:
            start, end = 0, shape[axis] - 1
        first = start if first < start else end if first > end else first  # each call makes this, and fast
        last = end if last > end else last
        low.append(first)
        high.append(first if last < first else last)
    return (*low, *high)


def _expand(source: CoordSet, key: Derived, limit: int) -> torch.Tensor:
    """Packed keys of the output set, ascending."""
    geometry, to_children, _ = key
    slots = math.prod(_slots(geometry, axis, to_children) for axis in range(3))
    rows = max(1, CHUNK // slots)
    keys = torch.empty(0, dtype=torch.int64, device=source.device)
    for begin in range(0, source.num, rows):
        coords = source.coords[begin : begin + rows]
        found, outside = _distinct(_candidates(coords, key))
        if begin and not outside:
            found, _ = _distinct(torch.cat([keys, found]))
        if outside:
            raise _outside(geometry)
        keys = found
        if len(keys) > limit:
            raise _too_many(len(keys), limit, source.num)
    return keys


def _distinct(keys: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """Ascending distinct keys without the two special ones, and whether `_OUTSIDE` was among them.

    One read-back for both answers.
    """
    ordered = torch.sort(keys).values
    first = ordered < _OUTSIDE
    first[1:] &= ordered[1:] != ordered[:-1]
    place = torch.cumsum(first, 0)
    count, outside = torch.stack([place[-1], (ordered == _OUTSIDE).any().long()]).tolist()
    found = torch.empty(count + 1, dtype=torch.int64, device=keys.device)  # the last takes what is dropped
    found.scatter_(0, torch.where(first, place - 1, count), ordered)
    return found[:count], bool(outside)


def _candidates(coords: torch.Tensor, made: Derived) -> torch.Tensor:
    """Packed keys of all candidates of (N, 4) coordinates, `_NONE` and `_OUTSIDE` where there is no key."""
    geometry, to_children, grid = made
    shapes = ((-1, 1, 1), (1, -1, 1), (1, 1, -1))
    key = pack_batch(coords[:, 0]).view(-1, 1, 1, 1)
    exists: torch.Tensor | None = None
    inside: torch.Tensor | None = None
    for axis, shape in enumerate(shapes):
        rule = _children_of if to_children else _windows_of
        value, ok = rule(coords[:, 1 + axis].long().unsqueeze(1), geometry, axis)
        full = (len(coords), *shape)
        key = key + pack_axis(value, axis).view(full)
        if grid is not None:
            bounded = (value >= 0) & (value < grid[axis])
            ok = bounded if ok is None else ok & bounded
        fits = ((value >= COORD_MIN) & (value <= COORD_MAX)).view(full)
        inside = fits if inside is None else inside & fits
        if ok is not None:
            exists = ok.view(full) if exists is None else exists & ok.view(full)
    assert inside is not None
    key = torch.where(inside, key, _OUTSIDE)
    if exists is not None:
        key = torch.where(exists, key, _NONE)
    return key.flatten()


def _slots(geometry: Geometry, axis: int, to_children: bool) -> int:
    """Most candidates a voxel has along an axis."""
    size = geometry.kernel_size[axis]
    return size if to_children else -(-size // _period(geometry, axis))


def _period(geometry: Geometry, axis: int) -> int:
    """Kernel positions along an axis after which the same sites of the stride's grid are met again."""
    stride = geometry.stride[axis]
    return stride // math.gcd(stride, geometry.dilation[axis])


def _children_of(column: torch.Tensor, geometry: Geometry, axis: int) -> _Axis:
    """(N, 1) coordinates -> coordinate * stride - padding + k * dilation, (N, kernel_size)."""
    k = torch.arange(geometry.kernel_size[axis], device=column.device)
    return column * geometry.stride[axis] + (k * geometry.dilation[axis] - geometry.padding[axis]), None


def _windows_of(column: torch.Tensor, geometry: Geometry, axis: int) -> _Axis:
    """(N, 1) coordinates -> (coordinate + padding - k * dilation) / stride for the k where that is whole.

    With g = gcd(stride, dilation) there is such a k only if g divides q = coordinate + padding, and then they
    are those of one residue modulo stride / g: one candidate in every stretch of that many k.
    """
    size, stride, dilation = geometry.kernel_size[axis], geometry.stride[axis], geometry.dilation[axis]
    period = _period(geometry, axis)
    shared = stride // period
    inverse = pow(dilation // shared, -1, period) if period > 1 else 0
    q = column + geometry.padding[axis]
    residue = torch.div(q, shared, rounding_mode="floor") * inverse % period
    k = residue + torch.arange(0, size, period, device=column.device)
    ok = k < size if size % period else None
    if shared > 1:
        whole = (q % shared == 0).expand_as(k)
        ok = whole if ok is None else ok & whole
    return torch.div(q - k * dilation, stride, rounding_mode="floor"), ok
