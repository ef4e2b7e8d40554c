"""Several samples in one Voxels, and dense tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data._utils.collate import collate as _torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from voxmma.sparse.coords import CoordSet
from voxmma.sparse.packing import BATCH_MAX
from voxmma.sparse.tensor import Voxels

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
    """The samples of all `voxels` one after another in one batch; the inverse of `unbatch`. Rows keep their
    order.

    ValueError names the first that differs from voxels[0] in device, dtype, channels, stride or spatial
    shape.
    """
    voxels = list(voxels)
    if not voxels:
        raise ValueError("voxels must hold at least one Voxels")
    for i, v in enumerate(voxels):
        if not isinstance(v, Voxels):
            raise TypeError(f"voxels[{i}] must be a Voxels, got {type(v).__name__}")
        for name, mine, first in (
            ("device", v.device, voxels[0].device),
            ("dtype", v.dtype, voxels[0].dtype),
            ("stride", v.stride, voxels[0].stride),
            ("spatial_shape", v.spatial_shape, voxels[0].spatial_shape),
            ("channels", v.feats.shape[1], voxels[0].feats.shape[1]),
        ):
            if mine != first:
                raise ValueError(f"voxels[{i}] has {name} {mine}, voxels[0] has {first}")
    samples = sum(v.batch_size for v in voxels)
    if samples > BATCH_MAX + 1:
        raise ValueError(f"voxels hold {samples} samples together, at most {BATCH_MAX + 1} are possible")
    columns = torch.cat([v.coords for v in voxels])
    start, row = 0, 0
    for v in voxels:
        columns[row : row + v.num_voxels, 0] += start
        start, row = start + v.batch_size, row + v.num_voxels
    feats = torch.cat([v.feats for v in voxels])
    repeats = any(v.coord_set.repeated is not None for v in voxels)
    coord_set = CoordSet.trusted(columns, samples, None, voxels[0].spatial_shape, repeats)
    return Voxels._make(coord_set, feats, voxels[0].stride)


def unbatch(x: Voxels) -> list[Voxels]:
    """One Voxels of batch size 1 per sample, empty ones included; rows keep their order."""
    counts = x.counts.tolist()
    order = torch.sort(x.coords[:, 0], stable=True).indices
    columns = x.coords[order]
    columns[:, 0] = 0
    parts = zip(torch.split(columns, counts), torch.split(x.feats[order], counts), strict=True)
    facts = 1, None, x.spatial_shape, x.coord_set.repeated is not None
    return [Voxels._make(CoordSet.trusted(c.contiguous(), *facts), f, x.stride) for c, f in parts]


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
    return batch(values)


_COLLATE = {Voxels: _collate_voxels, **default_collate_fn_map}
