"""Kernels of other shapes than a box: weights for some of its offsets."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize

from voxmma._types import Triple, three_integers
from voxmma.dispatch.config import KernelSize, dilation_triple, kernel_triple
from voxmma.nn.modules.sparse_conv import SparseConv3d


def hyper_cross(kernel_size: KernelSize, dilation: KernelSize = 1) -> list[Triple]:
    """The offsets of a kernel that lie on its axes, in the order of MinkowskiEngine's HYPER_CROSS: the centre
    first, then along x, y and z +1, +2, ..., -2, -1 times the dilation; 7 for 3x3x3. `keep_offsets` takes
    them.

    ValueError unless each `kernel_size` is odd, TypeError or ValueError for what is no size or dilation.
    """
    size, spread = kernel_triple(kernel_size), dilation_triple(dilation)
    if any(k % 2 == 0 for k in size):
        raise ValueError(f"kernel_size must be odd on every axis, got {size}")
    found: list[Triple] = [(0, 0, 0)]
    for axis, (k, d) in enumerate(zip(size, spread, strict=True)):
        for step in (*range(1, k // 2 + 1), *range(-(k // 2), 0)):
            x, y, z = (step * d if a == axis else 0 for a in range(3))
            found.append((x, y, z))
    return found


def keep_offsets(layer: SparseConv3d, offsets: Sequence[Sequence[int]]) -> SparseConv3d:
    """Gives `layer` weights for some offsets of its kernel only, in the order of `offsets`; the others count
    as zero. Returns the layer.

    A parametrisation (torch.nn.utils.parametrize): the parameter is `layer.parametrizations.weight.original`,
    (len(offsets), ...) of the weight that the layer has now, and `layer.weight` is the whole kernel. The
    layer multiplies the zeros, too: it takes as long as the whole kernel.

    Args:
        offsets: (dx, dy, dz) as in `KernelMap.offsets`: k * dilation - padding.

    Raises TypeError or ValueError naming the offset that is none of the kernel's or comes twice.
    """
    if not isinstance(layer, SparseConv3d):
        raise TypeError(f"layer must be a sparse convolution, got {type(layer).__name__}")
    place = {offset: k for k, offset in enumerate(layer.config.geometry.offsets())}
    rows = []
    for i, given in enumerate(offsets):
        offset = three_integers(given, f"offsets[{i}]")
        if offset not in place:
            raise ValueError(f"offsets[{i}] is {offset}, which the kernel does not have: {list(place)}")
        if place[offset] in rows:
            raise ValueError(f"offsets[{i}] is {offset}, which comes twice")
        rows.append(place[offset])
    if not rows:
        raise ValueError("offsets must hold at least one offset")
    parametrize.register_parametrization(layer, "weight", _Kept(rows, len(place), layer.weight.device))
    return layer


class _Kept(nn.Module):
    """Rows of a kernel that have weights, and the kernel of them."""

    rows: torch.Tensor

    def __init__(self, rows: list[int], volume: int, device: torch.device) -> None:
        super().__init__()
        self.volume = volume
        self.register_buffer("rows", torch.tensor(rows, dtype=torch.int64, device=device), persistent=False)

    def forward(self, kept: torch.Tensor) -> torch.Tensor:
        whole = kept.new_zeros((self.volume, *kept.shape[1:]))
        return whole.index_copy(0, self.rows, kept)

    def right_inverse(self, whole: torch.Tensor) -> torch.Tensor:
        return whole[self.rows]
