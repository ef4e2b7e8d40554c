"""Modules of several SparseConvTensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from voxmma.compat.spconv.core import missing
from voxmma.compat.spconv.pytorch.core import SparseConvTensor
from voxmma.compat.spconv.pytorch.functional import sparse_add
from voxmma.compat.spconv.pytorch.modules import SparseModule


class JoinTable(SparseModule):
    """List of tensors on the same voxels -> their channels one after another, in the first one's row
    order."""

    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        first = input[0]
        return first.replace_feature(torch.cat([first._rows_of(x, "join") for x in input], 1))


class AddTable(SparseModule):
    """List of tensors on the same voxels -> their sum, in the first one's row order."""

    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        return sum(input[1:], input[0])


class AddTableMisaligned(SparseModule):
    """List of tensors on any voxels of one grid -> their sum on the union; see functional.sparse_add."""

    def forward(self, input: list[SparseConvTensor]) -> SparseConvTensor:
        return sparse_add(*input)


class ConcatTable(SparseModule):
    """One input through several modules -> the list of their outputs."""

    def forward(self, input: Any) -> list[Any]:
        return [module(input) for module in self._modules.values() if module is not None]

    def add(self, module: nn.Module) -> ConcatTable:
        """Appends a module; returns itself."""
        self.add_module(str(len(self._modules)), module)
        return self

    def input_spatial_size(self, out_size: Any) -> Any:
        """`out_size`: the modules keep sizes."""
        return out_size


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.tables", name))
