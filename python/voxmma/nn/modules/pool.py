"""Pooling layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from voxmma._types import planar
from voxmma.dispatch.config import KernelSize, check_window, dilation_triple, kernel_triple, stride_triple
from voxmma.dispatch.mapping import Target
from voxmma.nn.functional import pool as F
from voxmma.nn.modules.sparse_conv import KernelSize2d
from voxmma.sparse.derive import check_max_voxels
from voxmma.sparse.geometry import Geometry, padding_triple
from voxmma.sparse.maps import KernelMap
from voxmma.sparse.tensor import Voxels


class _Pool3d(nn.Module):
    def __init__(
        self,
        kernel_size: KernelSize,
        stride: KernelSize | None = None,
        *,
        dilation: KernelSize = 1,
        padding: KernelSize | None = None,
    ) -> None:
        super().__init__()
        self.kernel_size = kernel_triple(kernel_size)
        self.stride = self.kernel_size if stride is None else stride_triple(stride)
        self.dilation = dilation_triple(dilation)
        self.padding = padding_triple(padding, self.kernel_size, self.dilation)
        check_window(Geometry(self.kernel_size, self.stride, self.dilation, self.padding))

    @staticmethod
    def _pool(x: Voxels, *window: Any, **target: Any) -> Voxels:
        raise NotImplementedError

    def forward(
        self, x: Voxels, kernel_map: KernelMap | None = None, *, coords: Target | None = None
    ) -> Voxels:
        """(N, C) voxels to (M, C) voxels; `kernel_map` and `coords` as in SparseConv3d."""
        return self._pool(
            x,
            self.kernel_size,
            self.stride,
            dilation=self.dilation,
            padding=self.padding,
            coords=coords,
            kernel_map=kernel_map,
        )

    def extra_repr(self) -> str:
        parts = [f"kernel_size={self.kernel_size}, stride={self.stride}"]
        if self.dilation != (1, 1, 1):
            parts.append(f"dilation={self.dilation}")
        if self.padding != padding_triple(None, self.kernel_size, self.dilation):
            parts.append(f"padding={self.padding}")
        return ", ".join(parts)


class _ExtremePool3d(_Pool3d):
    _pool_with_indices: Callable[..., tuple[Voxels, F.PoolIndices]]

    def __init__(
        self,
        kernel_size: KernelSize,
        stride: KernelSize | None = None,
        *,
        dilation: KernelSize = 1,
        padding: KernelSize | None = None,
        return_indices: bool = False,
    ) -> None:
        super().__init__(kernel_size, stride, dilation=dilation, padding=padding)
        self.return_indices = return_indices

    def forward(self, x: Voxels, kernel_map: KernelMap | None = None, *, coords: Target | None = None) -> Any:
        """(N, C) voxels to (M, C) voxels, with return_indices to a pair of these and PoolIndices.

        `kernel_map` and `coords` as in SparseConv3d.
        """
        if not self.return_indices:
            return super().forward(x, kernel_map, coords=coords)
        where: dict[str, Any] = {"coords": coords, "kernel_map": kernel_map}
        window = {"dilation": self.dilation, "padding": self.padding}
        return self._pool_with_indices(x, self.kernel_size, self.stride, **window, **where)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", return_indices=True" if self.return_indices else "")


class SparseMaxPool3d(_ExtremePool3d):
    """Largest voxel of each window; see voxmma.nn.functional.max_pool.

    Args:
        kernel_size: one int or three, 1 to 9 each. stride: default kernel_size; 1 keeps the voxels of x.
        dilation, padding: one int or three; padding defaults to (kernel_size // 2) * dilation for odd sizes
            and 0 for even ones, and at stride 1 is that: another one would shift the window.
        return_indices: return a pair, the voxels and what MaxUnpool takes to undo the pooling.

    Raises TypeError or ValueError naming the argument.
    """

    _pool = staticmethod(F.max_pool)
    _pool_with_indices = staticmethod(F.max_pool_with_indices)


class SparseMinPool3d(_ExtremePool3d):
    """Smallest voxel of each window; see voxmma.nn.functional.min_pool. Arguments as SparseMaxPool3d."""

    _pool = staticmethod(F.min_pool)
    _pool_with_indices = staticmethod(F.min_pool_with_indices)


class SparseSumPool3d(_Pool3d):
    """Sum of each window; see voxmma.nn.functional.sum_pool. Arguments as SparseMaxPool3d."""

    _pool = staticmethod(F.sum_pool)


class SparseAvgPool3d(_Pool3d):
    """Mean of the voxels present in each window; see voxmma.nn.functional.avg_pool. Arguments as
    SparseMaxPool3d."""

    _pool = staticmethod(F.avg_pool)


class _Planar(_Pool3d):
    """Turns the arguments of a 2d form into those of its 3d form, which comes next among the bases."""

    def __init__(
        self,
        kernel_size: KernelSize2d,
        stride: KernelSize2d | None = None,
        *,
        dilation: KernelSize2d = 1,
        padding: KernelSize2d | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            planar(kernel_size, "kernel_size"),
            None if stride is None else planar(stride, "stride"),
            dilation=planar(dilation, "dilation"),
            padding=None if padding is None else planar(padding, "padding", 0),
            **options,
        )


class SparseMaxPool2d(_Planar, SparseMaxPool3d):
    """SparseMaxPool3d over x and y alone: every z is a plane of its own. `kernel_size`, `stride`, `dilation`
    and `padding` are one int or two; return_indices by keyword."""


class SparseMinPool2d(_Planar, SparseMinPool3d):
    """SparseMinPool3d over x and y alone, as SparseMaxPool2d is SparseMaxPool3d over them."""


class SparseSumPool2d(_Planar, SparseSumPool3d):
    """SparseSumPool3d over x and y alone, as SparseMaxPool2d is SparseMaxPool3d over them."""


class SparseAvgPool2d(_Planar, SparseAvgPool3d):
    """SparseAvgPool3d over x and y alone, as SparseMaxPool2d is SparseMaxPool3d over them."""


class MaxUnpool(nn.Module):
    """Puts values back where a max or min pooling with return_indices=True took them from, 0 elsewhere; see
    voxmma.nn.functional.max_unpool. The indices know the window, 3d or 2d."""

    def forward(self, x: Voxels, indices: F.PoolIndices) -> Voxels:
        """(M, C) voxels to the (N, C) voxels that were pooled."""
        return F.max_unpool(x, indices)


class Unpool(nn.Module):
    """Every voxel takes the features of its coarse voxel; see voxmma.nn.functional.unpool.

    Args:
        stride: one int or three, 1 to 9 each.
        generative: all children instead of the finer voxels that strided layers started from.
        max_voxels: most voxels the layer may make, default 2^26.

    Raises TypeError or ValueError naming the argument.
    """

    def __init__(
        self, stride: KernelSize = 2, *, generative: bool = False, max_voxels: int | None = None
    ) -> None:
        super().__init__()
        self.stride = kernel_triple(stride)
        self.generative = generative
        self.max_voxels = None if max_voxels is None else check_max_voxels(max_voxels)

    def forward(self, x: Voxels, *, coords: Target | None = None) -> Voxels:
        """(N, C) voxels to (M, C) finer voxels, those of `coords` where given."""
        return F.unpool(x, self.stride, coords=coords, generative=self.generative, max_voxels=self.max_voxels)

    def extra_repr(self) -> str:
        return f"stride={self.stride}" + (", generative=True" if self.generative else "")


class GlobalMaxPool(nn.Module):
    """(batch_size, C) largest feature of each sample; see voxmma.nn.functional.global_max_pool."""

    def forward(self, x: Voxels) -> torch.Tensor:
        return F.global_max_pool(x)


class GlobalAvgPool(nn.Module):
    """(batch_size, C) mean of each sample, 0 for an empty one."""

    def forward(self, x: Voxels) -> torch.Tensor:
        return F.global_avg_pool(x)


class GlobalSumPool(nn.Module):
    """(batch_size, C) sum of each sample, 0 for an empty one."""

    def forward(self, x: Voxels) -> torch.Tensor:
        return F.global_sum_pool(x)
