"""spconv.pytorch.functional: what networks call of it."""

from __future__ import annotations

from voxmma.compat.spconv.core import missing
from voxmma.compat.spconv.pytorch.core import Places, SparseConvTensor
from voxmma.sparse.sets import union


def sparse_add(*tens: SparseConvTensor) -> SparseConvTensor:
    """Sum of tensors on the union of their voxels, sorted; those of the first where all have the same.

    Differentiable. ValueError where grids, batch sizes, devices or channels differ.
    """
    if not tens:
        raise ValueError("sparse_add takes at least one SparseConvTensor")
    first, voxels = tens[0], [x.voxels for x in tens]
    channels = {x.channels for x in voxels}
    if len(channels) > 1:
        raise ValueError(f"sparse_add takes tensors of the same channels, got {sorted(channels)}")
    coords = union(*voxels)
    total = first.features.new_zeros((coords.num, voxels[0].channels))
    for x in voxels:
        total = (
            total + x.feats if x.coord_set is coords else total.index_add(0, coords.lookup(x.coords), x.feats)
        )
    made = first.replace_feature(total)
    if coords is not voxels[0].coord_set:
        made._places = Places(None, coords, first.spatial_shape, first.batch_size, first._places.ndim)
        made.indice_dict = {}
    return made


sparse_add_hash_based = sparse_add


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.functional", name))
