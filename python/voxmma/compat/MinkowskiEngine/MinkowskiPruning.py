"""Pruning."""

from __future__ import annotations

import torch

from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor
from voxmma.sparse.sets import prune


class MinkowskiPruning(MinkowskiModuleBase):
    """The rows where `mask` (N,) bool is True, on a coordinate set of their own."""

    def forward(self, input: SparseTensor, mask: torch.Tensor) -> SparseTensor:
        made = prune(input.voxels, mask.to(input.device))
        key = input._manager.add(made.coord_set, input.tensor_stride, "pruned")
        return SparseTensor._make(made, key, input._manager, input)

    def __repr__(self) -> str:
        return type(self).__name__ + "()"
