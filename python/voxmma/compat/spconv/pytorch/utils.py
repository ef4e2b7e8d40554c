"""Points to voxels, as spconv gathers them: voxels in the order of their first points, points in their
order."""

from __future__ import annotations

import math
from typing import Any

import torch

from voxmma._types import positive, real_numbers
from voxmma.compat.spconv.core import missing


class Binning:
    """A grid of cells and how many points and voxels are kept; `__call__` puts points into it.

    Args:
        vsize_xyz: edge lengths of a cell. coors_range_xyz: smallest, then largest corner; the grid has
            round((largest - smallest) / edge) cells per axis, in fp32.
        num_point_features: columns of the points, coordinates first.
        max_num_voxels: voxels beyond these are dropped with their points.
        max_num_points_per_voxel: points beyond these are dropped.

    Attributes are in the order of the indices: z, y, x. Raises TypeError or ValueError naming the argument.
    """

    def __init__(
        self,
        vsize_xyz: Any,
        coors_range_xyz: Any,
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
    ) -> None:
        self.ndim = ndim = len(vsize_xyz)
        edges, corners = real_numbers(vsize_xyz, ndim), real_numbers(coors_range_xyz, 2 * ndim)
        if edges is None or not ndim or min(edges) <= 0:
            raise ValueError(f"vsize_xyz must be positive numbers, got {vsize_xyz!r}")
        if corners is None or any(a >= b for a, b in zip(corners[:ndim], corners[ndim:], strict=True)):
            raise ValueError(
                f"coors_range_xyz must be {ndim} smallest and {ndim} larger numbers, got {coors_range_xyz!r}"
            )
        size = torch.tensor(edges[::-1], dtype=torch.float32, device="cpu")
        low, high = (
            torch.tensor(c[::-1], dtype=torch.float32, device="cpu") for c in (corners[:ndim], corners[ndim:])
        )
        self.vsize: list[float] = size.tolist()
        self.coors_range: list[float] = [*low.tolist(), *high.tolist()]
        self.grid_size = [math.floor(n + 0.5) for n in ((high - low) / size).tolist()]
        self.grid_stride = [math.prod(self.grid_size[i + 1 :]) for i in range(ndim)]
        self.num_point_features = positive(num_point_features, "num_point_features")
        self.max_num_voxels = positive(max_num_voxels, "max_num_voxels")
        self.max_num_points_per_voxel = positive(max_num_points_per_voxel, "max_num_points_per_voxel")

    def __call__(self, pc: torch.Tensor, empty_mean: bool = False) -> tuple[torch.Tensor, ...]:
        """Points (N, C) -> voxels (V, P, C) fp32, indices (V, ndim) int32, points of each (V,) int32, and the
        voxel of each point (N,) int64, -1 for none.

        Cells are floor((p - smallest) / edge) in fp32. Slots without a point are 0, with empty_mean the mean
        of the voxel's points. The same on every device.
        """
        points, ndim = self._checked(pc), self.ndim
        low = points.new_tensor(self.coors_range[:ndim])
        cell = torch.floor((points[:, :ndim].flip(1) - low) / points.new_tensor(self.vsize))
        inside = ((cell >= 0) & (cell < points.new_tensor(self.grid_size))).all(1)
        rows = torch.nonzero(inside).flatten()
        stride = torch.tensor(self.grid_stride, dtype=torch.int64, device=pc.device)
        cells, which = torch.unique((cell[rows].long() * stride).sum(1), return_inverse=True)
        first = rows.new_full(cells.shape, len(points)).scatter_reduce_(0, which, rows, "amin")
        order = torch.argsort(first)[: self.max_num_voxels]
        number = rows.new_full(cells.shape, -1)
        number[order] = torch.arange(len(order), device=pc.device)
        voxel_of = rows.new_full((len(points),), -1)
        voxel_of[rows] = number[which]

        kept, by_voxel = torch.sort(voxel_of, stable=True)
        start = int((kept < 0).sum())
        kept, by_voxel = kept[start:], by_voxel[start:]
        count = torch.bincount(kept, minlength=len(order))
        slot = torch.arange(len(kept), device=pc.device) - (count.cumsum(0) - count)[kept]
        fits = slot < self.max_num_points_per_voxel
        voxels = points.new_zeros(len(order), self.max_num_points_per_voxel, self.num_point_features)
        voxels[kept[fits], slot[fits]] = points[by_voxel[fits]]
        count = count.clamp(max=self.max_num_points_per_voxel).int()
        if empty_mean:
            empty = torch.arange(self.max_num_points_per_voxel, device=pc.device) >= count.unsqueeze(1)
            mean = voxels.sum(1) / count.unsqueeze(1)
            voxels = torch.where(empty.unsqueeze(2), mean.unsqueeze(1), voxels)
        sizes = torch.tensor(self.grid_size, dtype=torch.int64, device=pc.device)
        indices = cells[order].unsqueeze(1) // stride % sizes
        return voxels, indices.int(), count, voxel_of

    def _checked(self, pc: torch.Tensor) -> torch.Tensor:
        if not isinstance(pc, torch.Tensor) or not pc.is_floating_point():
            what = pc.dtype if isinstance(pc, torch.Tensor) else type(pc).__name__
            raise TypeError(f"points must be a floating point tensor, got {what}")
        if pc.dim() != 2 or pc.shape[1] != self.num_point_features:
            raise ValueError(f"points must be (N, {self.num_point_features}), got {tuple(pc.shape)}")
        return pc.float()


class PointToVoxel:
    """Points to voxels on the device of the points; arguments and results as of `Binning`.

    `device` says nothing more: there are no buffers, so that `clear_voxels` has nothing to clear.
    """

    def __init__(
        self,
        vsize_xyz: Any,
        coors_range_xyz: Any,
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        limits = num_point_features, max_num_voxels, max_num_points_per_voxel
        self._bin = Binning(vsize_xyz, coors_range_xyz, *limits)
        self.device = torch.device(device)

    def __call__(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Points (N, C) -> voxels (V, P, C), indices (V, ndim) z, y, x, and points of each voxel (V,)."""
        voxels, indices, count, _ = self._bin(pc, empty_mean)
        return voxels, indices, count

    def generate_voxel_with_id(
        self, pc: torch.Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """As a call, and the voxel of each point (N,) int64, -1 for none."""
        return self._bin(pc, empty_mean)

    def __getattr__(self, name: str) -> object:
        if name == "_bin":
            raise AttributeError(name)
        return getattr(self._bin, name)


def gather_features_by_pc_voxel_id(
    seg_res_features: torch.Tensor, pc_voxel_id: torch.Tensor, invalid_value: float = 0
) -> torch.Tensor:
    """Features (V, C) of the voxel of each point (N,), `invalid_value` where it has none -> (N, C)."""
    found = pc_voxel_id >= 0
    if len(seg_res_features) == 0:
        return seg_res_features.new_full((len(pc_voxel_id), seg_res_features.shape[1]), invalid_value)
    rows = seg_res_features[pc_voxel_id.long().clamp(min=0)]
    return torch.where(found.unsqueeze(1), rows, invalid_value)


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.utils", name))
