"""The hash table that point-voxel networks use directly, with voxmma's index of coordinate sets behind it."""

from __future__ import annotations

import itertools
import math

import torch

from voxmma.compat.names import missing as _missing
from voxmma.compat.torchsparse.nn.functional.query import find_rows
from voxmma.compat.torchsparse.utils.utils import make_triple
from voxmma.sparse.coords import CoordSet


class GPUHashTable:
    """Looks up coordinates (N, 4) x, y, z, batch, or int64 keys; on a CPU, too. The two tensors, in which
    torchsparse keeps the table, stay as they are."""

    def __init__(self, table_keys: torch.Tensor | int, table_vals: torch.Tensor | None = None) -> None:
        self._set: CoordSet | None = None
        self._keys: torch.Tensor | None = None

    def insert_coords(self, coords: torch.Tensor) -> None:
        """The coordinates to be found; of equal ones the first is. ValueError names a row out of range."""
        self._set = CoordSet(coords[:, [3, 0, 1, 2]], duplicates="keep")

    def lookup_coords(
        self,
        coords: torch.Tensor,
        kernel_sizes: torch.Tensor,
        tensor_strides: torch.Tensor,
        kernel_volume: int,
    ) -> torch.Tensor:
        """(N, K) int32 row + 1 of what was inserted at coords * stride + offset, 0 where there is none.

        Offsets start at -((size - 1) // 2) on every axis, x fastest where K is odd, else z.
        """
        if self._set is None:
            raise RuntimeError("nothing was inserted: call insert_coords first")
        size, stride = make_triple(kernel_sizes), make_triple(tensor_strides)
        if math.prod(size) != kernel_volume:
            raise ValueError(f"kernel_volume is {kernel_volume}, kernel_sizes are {size}")
        axes = [[k - (n - 1) // 2 for k in range(n)] for n in size]
        if kernel_volume % 2:
            offsets = [offset[::-1] for offset in itertools.product(*reversed(axes))]
        else:
            offsets = list(itertools.product(*axes))
        shift = torch.tensor(offsets, dtype=coords.dtype, device=coords.device)
        step = torch.tensor(stride, dtype=coords.dtype, device=coords.device)
        space = (coords[:, None, :3] * step + shift).flatten(0, 1)
        batch = coords[:, None, 3:].expand(-1, len(offsets), -1).flatten(0, 1)
        rows = self._set.lookup(torch.cat([batch, space], dim=1).int().contiguous())
        return (rows + 1).int().view(len(coords), len(offsets))

    def insert_vals(self, keys: torch.Tensor) -> None:
        """The keys (N,) int64 to be found."""
        self._keys = keys

    def lookup_vals(self, keys: torch.Tensor) -> torch.Tensor:
        """(M,) int32 row + 1 of each key in what was inserted, 0 where there is none."""
        if self._keys is None:
            raise RuntimeError("nothing was inserted: call insert_vals first")
        return (find_rows(keys, self._keys) + 1).int()


__getattr__ = _missing(__name__, {})
