"""Pooling with spconv's arguments."""

from __future__ import annotations

from typing import Any

import torch

from voxmma.compat.spconv import options
from voxmma.compat.spconv.core import ConvAlgo, missing
from voxmma.compat.spconv.pytorch.convolution import _VOXELS_SEEN
from voxmma.compat.spconv.pytorch.core import _ONE, IndiceData, Places, SparseConvTensor, padded, sizes
from voxmma.compat.spconv.pytorch.modules import SparseModule
from voxmma.nn.functional import pool
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.maps import kernel_map


class _Pool(SparseModule):
    """Pooling over windows; outputs as those of SparseConvolution, `subm` as there.

    Args:
        ndim: 1, 2 or 3 axes of the grid.
        kernel_size, stride, padding, dilation: one or ndim sizes; stride None: kernel_size,
            with version 1 (`options`) 1.
        indice_key: name of the map, for inverse layers.
        algo: kept.
        record_voxel_count: as in SparseConvolution.
        name: for `assign_name_for_sparse_modules`.

    Raises TypeError, ValueError or NotImplementedError naming the argument.
    """

    _pool: Any

    def __init__(
        self,
        ndim: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: Any = None,
        subm: bool = False,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if ndim == 4:
            raise NotImplementedError(f"{type(self).__name__}: voxmma has no 4-D grids")
        self.ndim = ndim
        self.kernel_size = list(sizes(kernel_size, ndim, "kernel_size"))
        default = 1 if options.version == 1 else kernel_size
        self.stride = list(sizes(default if stride is None else stride, ndim, "stride"))
        self.padding = list(sizes(padding, ndim, "padding"))
        self.dilation = list(sizes(dilation, ndim, "dilation"))
        self.indice_key = indice_key
        self.subm = subm
        self.algo = algo
        self.record_voxel_count = record_voxel_count
        if record_voxel_count:
            self.register_buffer(_VOXELS_SEEN, torch.zeros(1, dtype=torch.int32, device=None))

    def _geometry(self) -> Geometry:
        size, spread = padded(tuple(self.kernel_size), 1), padded(tuple(self.dilation), 1)
        if self.subm:
            x, y, z = (k // 2 * d for k, d in zip(size, spread, strict=True))
            return Geometry(size, _ONE, spread, (x, y, z))
        return Geometry(size, padded(tuple(self.stride), 1), spread, padded(tuple(self.padding), 0))

    def forward(self, input: SparseConvTensor) -> SparseConvTensor:
        """SparseConvTensor of C channels -> of C channels. TypeError or ValueError names what is wrong."""
        if not isinstance(input, SparseConvTensor):
            raise TypeError(f"{type(self).__name__} takes a SparseConvTensor, got {type(input).__name__}")
        x, geometry, places = input.voxels, self._geometry(), input._here()
        size, stride, dilation, padding = geometry
        window: dict[str, Any] = {"stride": stride, "dilation": dilation, "padding": padding}
        over = kernel_map(x, size, generative=not self.subm, **window) if stride == _ONE else None
        y = type(self)._pool(x, size, kernel_map=over, **window)
        made = input.replace_feature(y._feats)
        if not self.subm:
            made.spatial_shape = list(y._coord_set.spatial_shape or ())[: self.ndim]
            made._places = Places(None, y._coord_set, made.spatial_shape, input.batch_size, self.ndim)
        if self.indice_key is not None:
            data = IndiceData(places, made._places, geometry, self.subm, self.algo)
            made.indice_dict = {**input.indice_dict, self.indice_key: data}
        if self.record_voxel_count and self.training:
            self._buffers[_VOXELS_SEEN].clamp_(min=y.num_voxels)  # type: ignore[union-attr]
        return made

    def get_max_num_voxels(self) -> torch.Tensor | None:
        """(1,) int32: the most outputs seen in training; None unless record_voxel_count."""
        return self._buffers.get(_VOXELS_SEEN)

    def extra_repr(self) -> str:
        names = ("kernel_size", "stride", "padding", "dilation")
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)


class SparseMaxPool(_Pool):
    """Largest voxel of each window, empty cells not counted (spconv's Native algorithm counts them as 0)."""

    _pool = staticmethod(pool.max_pool)


class SparseAvgPool(_Pool):
    """Mean of the voxels present in each window."""

    _pool = staticmethod(pool.avg_pool)


class _OfAxes(_Pool):
    _ndim: int

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        indice_key: Any = None,
        algo: ConvAlgo | None = None,
        record_voxel_count: bool = False,
        name: str | None = None,
    ) -> None:
        window = kernel_size, stride, padding, dilation
        super().__init__(self._ndim, *window, indice_key, False, algo, record_voxel_count, name)


class SparseMaxPool1d(_OfAxes, SparseMaxPool):
    """SparseMaxPool(1, ...); stride None: kernel_size."""

    _ndim = 1


class SparseMaxPool2d(_OfAxes, SparseMaxPool):
    """SparseMaxPool(2, ...); stride None: kernel_size."""

    _ndim = 2


class SparseMaxPool3d(_OfAxes, SparseMaxPool):
    """SparseMaxPool(3, ...); stride None: kernel_size."""

    _ndim = 3


class SparseMaxPool4d(_OfAxes, SparseMaxPool):
    """Placeholder of the name: making one raises NotImplementedError."""

    _ndim = 4


class SparseAvgPool1d(_OfAxes, SparseAvgPool):
    """SparseAvgPool(1, ...); stride None: kernel_size."""

    _ndim = 1


class SparseAvgPool2d(_OfAxes, SparseAvgPool):
    """SparseAvgPool(2, ...); stride None: kernel_size."""

    _ndim = 2


class SparseAvgPool3d(_OfAxes, SparseAvgPool):
    """SparseAvgPool(3, ...); stride None: kernel_size."""

    _ndim = 3


class SparseGlobalMaxPool(SparseModule):
    """SparseConvTensor -> (batch_size, C) largest feature of each sample, 0 for an empty one."""

    def forward(self, input: SparseConvTensor) -> torch.Tensor:
        return pool.global_max_pool(input.voxels)


class SparseGlobalAvgPool(SparseModule):
    """SparseConvTensor -> (batch_size, C) mean of each sample, 0 for an empty one."""

    def forward(self, input: SparseConvTensor) -> torch.Tensor:
        return pool.global_avg_pool(input.voxels)


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.pool", name))
