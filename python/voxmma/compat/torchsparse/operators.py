"""Concatenation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxmma.compat.torchsparse.tensor import SparseTensor, same_rows

__all__ = ["cat"]


def cat(inputs: Sequence[SparseTensor]) -> SparseTensor:
    """The channels of tensors on the same coordinates, one after the other; ValueError where they differ."""
    first = inputs[0]
    return first._like(torch.cat([first.feats, *(same_rows(first, other) for other in inputs[1:])], dim=1))
