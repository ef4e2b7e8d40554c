"""Sums over the union of coordinates."""

from __future__ import annotations

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor


class MinkowskiUnion(MinkowskiModuleBase):
    """The sum of tensors of one coordinate manager on the union of their coordinates, absent rows counting
    0."""

    def forward(self, *inputs: SparseTensor) -> SparseTensor:
        if not inputs:
            raise ValueError("give at least one SparseTensor")
        first, manager = inputs[0], inputs[0]._manager
        for other in inputs[1:]:
            first._check(other)
        keys = [t.coordinate_map_key for t in inputs]
        if all(key == keys[0] for key in keys):
            return sum(inputs[1:], start=first)
        key = manager.union(keys)
        total = manager.coord_set(key)
        feats = first.F.new_zeros((total.num, first.F.shape[1]))
        for tensor in inputs:  # rows of one addition are distinct
            feats = feats.index_add(0, total.lookup(tensor.voxels.coords), tensor.F)
        return SparseTensor(feats, coordinate_map_key=key, coordinate_manager=manager)

    def __repr__(self) -> str:
        return type(self).__name__ + "()"
