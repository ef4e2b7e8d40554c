"""spconv.utils: voxel generators of 2.x and 1.x. See voxmma.compat.spconv.pytorch.utils for the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from voxmma._types import as_tensor, positive, real_numbers
from voxmma.compat.spconv.core import missing
from voxmma.compat.spconv.pytorch.utils import Binning


class _Point2Voxel:
    """Points of ndim coordinates to voxels; arguments as of `Binning`. Results have `.numpy()`."""

    _ndim: int

    def __init__(
        self,
        vsize_xyz: Any,
        coors_range_xyz: Any,
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
    ) -> None:
        if len(vsize_xyz) != self._ndim:
            raise ValueError(f"vsize_xyz must be {self._ndim} numbers, got {vsize_xyz!r}")
        limits = num_point_features, max_num_voxels, max_num_points_per_voxel
        self._bin = Binning(vsize_xyz, coors_range_xyz, *limits)

    @property
    def grid_size(self) -> list[int]:
        """Cells per axis, z, y, x."""
        return self._bin.grid_size

    def point_to_voxel(self, points: Any, clear_voxels: bool = True) -> tuple[torch.Tensor, ...]:
        """Points (N, C), a tensor or an array, or what has `.numpy()` -> voxels (V, P, C), indices (V, ndim),
        and points of each voxel (V,)."""
        return self._bin(_points(points))[:3]

    def point_to_voxel_empty_mean(self, points: Any, clear_voxels: bool = True) -> tuple[torch.Tensor, ...]:
        """The same with the mean of a voxel's points in its empty slots."""
        return self._bin(_points(points), empty_mean=True)[:3]


def _points(points: Any) -> Any:
    if not isinstance(points, torch.Tensor) and hasattr(points, "numpy"):
        points = points.numpy()  # cumm's tensors
    return as_tensor(points, "points")


class Point2VoxelCPU1d(_Point2Voxel):
    """Points of one coordinate."""

    _ndim = 1


class Point2VoxelCPU2d(_Point2Voxel):
    """Points of two coordinates."""

    _ndim = 2


class Point2VoxelCPU3d(_Point2Voxel):
    """Points of three coordinates."""

    _ndim = 3


class Point2VoxelCPU4d(_Point2Voxel):
    """Points of four coordinates."""

    _ndim = 4


class Point2VoxelGPU1d(Point2VoxelCPU1d):
    """The same on points of a GPU."""


class Point2VoxelGPU2d(Point2VoxelCPU2d):
    """The same on points of a GPU."""


class Point2VoxelGPU3d(Point2VoxelCPU3d):
    """The same on points of a GPU."""


class Point2VoxelGPU4d(Point2VoxelCPU4d):
    """The same on points of a GPU."""


class VoxelGenerator:
    """The generator of spconv 1.x, on numpy arrays.

    Args:
        voxel_size: edge lengths x, y, z. point_cloud_range: smallest, then largest corner.
        max_num_points: points kept of a voxel. max_voxels: voxels kept.
        full_mean: fill slots without a point with the mean of the voxel's points.
    """

    def __init__(
        self,
        voxel_size: Any,
        point_cloud_range: Any,
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
    ) -> None:
        edges, corners = real_numbers(voxel_size, 3), real_numbers(point_cloud_range, 6)
        if edges is None or corners is None:
            raise ValueError(
                f"voxel_size must be 3 and point_cloud_range 6 numbers, got "
                f"{voxel_size!r}, {point_cloud_range!r}"
            )
        self._range, self._size = np.array(corners, np.float32), np.array(edges, np.float32)
        self._points = positive(max_num_points, "max_num_points")
        self._voxels = positive(max_voxels, "max_voxels")
        self._full_mean = full_mean
        self._grid = np.array(Binning(edges, corners, 3, 1, 1).grid_size[::-1], np.int64)

    def _bins(self, points: np.ndarray, max_voxels: int | None) -> tuple[np.ndarray, ...]:
        limit = self._voxels if max_voxels is None else positive(max_voxels, "max_voxels")
        rows = as_tensor(points, "points")
        cells = Binning(self._size, self._range, rows.shape[1], limit, self._points)
        return tuple(made.numpy() for made in cells(rows, self._full_mean)[:3])

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> Any:
        """Points (N, C) -> (voxels (V, P, C), coordinates (V, 3) z, y, x, points of each voxel (V,))."""
        return self._bins(points, max_voxels)

    @property
    def voxel_size(self) -> np.ndarray:
        return self._size

    @property
    def max_num_points_per_voxel(self) -> int:
        return self._points

    @property
    def point_cloud_range(self) -> np.ndarray:
        return self._range

    @property
    def grid_size(self) -> np.ndarray:
        """Cells per axis, x, y, z."""
        return self._grid


class VoxelGeneratorV2(VoxelGenerator):
    """The same with a dict as result; `block_filtering` is not there."""

    def __init__(
        self,
        voxel_size: Any,
        point_cloud_range: Any,
        max_num_points: int,
        max_voxels: int = 20000,
        full_mean: bool = False,
        block_filtering: bool = False,
        **unused: Any,
    ) -> None:
        if block_filtering:
            raise NotImplementedError("block_filtering: drop the points before they are voxelised")
        super().__init__(voxel_size, point_cloud_range, max_num_points, max_voxels, full_mean)

    def generate(self, points: np.ndarray, max_voxels: int | None = None) -> dict[str, Any]:
        """Points (N, C) -> voxels (V, P, C), coordinates (V, 3) z, y, x, num_points_per_voxel (V,),
        voxel_num, and voxel_point_mask (V, P, 1): 1 where a slot holds a point."""
        voxels, indices, count = self._bins(points, max_voxels)
        mask = np.arange(self._points) < count[:, None]
        return {
            "voxels": voxels,
            "coordinates": indices,
            "num_points_per_voxel": count,
            "voxel_point_mask": mask[..., None].astype(voxels.dtype),
            "voxel_num": len(voxels),
        }


def __getattr__(name: str) -> object:
    raise AttributeError(missing("utils", name))
