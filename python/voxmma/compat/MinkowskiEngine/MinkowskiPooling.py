"""Pooling over windows and over samples."""

from __future__ import annotations

import enum
import itertools
import math
from typing import Any

import torch

from voxmma._types import sum_dtype
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase, check_dimension
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateMapKey, voxels_of
from voxmma.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import Mode, SparseTensor, merge, target_key
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import Tensor
from voxmma.nn.functional import pool
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import MAX_KERNEL, Geometry
from voxmma.sparse.index import gather_rows
from voxmma.sparse.interpolate import spread_weighted
from voxmma.sparse.maps import kernel_map
from voxmma.sparse.tensor import Voxels


class PoolingMode(enum.Enum):
    """What is made of a window or a sample. The last word chooses an implementation in MinkowskiEngine and
    means nothing here."""

    LOCAL_SUM_POOLING = 0
    LOCAL_AVG_POOLING = 1
    LOCAL_MAX_POOLING = 2
    GLOBAL_SUM_POOLING_DEFAULT = 3
    GLOBAL_AVG_POOLING_DEFAULT = 4
    GLOBAL_MAX_POOLING_DEFAULT = 5
    GLOBAL_SUM_POOLING_KERNEL = 6
    GLOBAL_AVG_POOLING_KERNEL = 7
    GLOBAL_MAX_POOLING_KERNEL = 8
    GLOBAL_SUM_POOLING_PYTORCH_INDEX = 9
    GLOBAL_AVG_POOLING_PYTORCH_INDEX = 10
    GLOBAL_MAX_POOLING_PYTORCH_INDEX = 11


_WINDOW = {
    PoolingMode.LOCAL_SUM_POOLING: pool.sum_pool,
    PoolingMode.LOCAL_AVG_POOLING: pool.avg_pool,
    PoolingMode.LOCAL_MAX_POOLING: pool.max_pool,
}
_FIELD = {"SUM": Mode.UNWEIGHTED_SUM, "AVG": Mode.UNWEIGHTED_AVERAGE, "MAX": Mode.MAX_POOL}
_SAMPLE = {"SUM": pool.global_sum_pool, "AVG": pool.global_avg_pool, "MAX": pool.global_max_pool}


class MinkowskiPoolingBase(MinkowskiModuleBase):
    """Pools the voxels that exist in a window: stride 1 on the voxels of the input, else on the cells of the
    coarser grid. Odd windows are centred, but where their size is the stride they are the cells themselves. A
    mean is over the voxels that exist. ValueError for kernels that are no HYPER_CUBE."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        pooling_mode: PoolingMode = PoolingMode.LOCAL_AVG_POOLING,
        dimension: Any = -1,
        expand_coordinates: bool = False,
    ) -> None:
        super().__init__()
        self.dimension = check_dimension(dimension)
        if kernel_generator is None:
            kernel_generator = KernelGenerator(kernel_size, stride, dilation, dimension=self.dimension)
        if kernel_generator.cells is not None:
            raise ValueError("pooling takes kernels of RegionType.HYPER_CUBE alone")
        kernel_generator.expand_coordinates = expand_coordinates
        self.kernel_generator = kernel_generator
        self.is_transpose = is_transpose
        self.pooling_mode = pooling_mode
        geometry = kernel_generator.geometry
        self._tiles = geometry.kernel_size == geometry.stride
        self._geometry = geometry._replace(padding=(0, 0, 0)) if self._tiles else geometry

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        """(N, C) to (M, C), on `coordinates` (a key, a SparseTensor, or a tensor, of tensor stride 1) where
        given."""
        manager, source = input._manager, input.coordinate_map_key
        kernel = self.kernel_generator
        geometry, rows = self._geometry, None
        if coordinates is None:
            key = manager.stride(source, kernel.kernel_stride)
            where = None if key == source else manager.coord_set(key)
        else:
            key = target_key(input, coordinates)
            where, stride, rows = manager.onto(source, key, False)
            size = stride if self._tiles else geometry.kernel_size
            geometry = geometry._replace(kernel_size=size, stride=stride)
        if max(geometry.kernel_size) > MAX_KERNEL:
            out = manager.coord_set(key) if where is None else where
            feats = _by_voxels(input.voxels, geometry, out, self.pooling_mode)
        else:
            size, stride, dilation, padding = geometry
            window = _WINDOW[self.pooling_mode]
            made = window(input.voxels, size, stride, dilation=dilation, padding=padding, coords=where)
            if rows is None:
                return SparseTensor._make(made, key, manager, input)
            feats = made.feats
        if rows is not None:
            feats = feats.new_zeros((manager.size(key), feats.shape[1])).index_copy(0, rows, feats)
        return SparseTensor._make(voxels_of(manager, key, feats), key, manager, input)

    def extra_repr(self) -> str:
        kernel = self.kernel_generator
        return (
            f"kernel_size={kernel.kernel_size}, stride={kernel.kernel_stride}, "
            f"dilation={kernel.kernel_dilation}"
        )


def _by_voxels(x: Voxels, geometry: Geometry, out: CoordSet, mode: PoolingMode) -> torch.Tensor:
    """(M, C) of windows of any size, without a kernel map: each voxel goes to the windows that hold it."""
    axes = []
    for axis, (size, step, spread, padding) in enumerate(zip(*geometry, strict=True), 1):
        place, reach = x.coords[:, axis] + padding, (size - 1) * spread
        last = torch.div(place, step, rounding_mode="floor")
        windows = [last - back for back in range(reach // step + 1)]
        axes.append([(w, (place - w * step <= reach) & ((place - w * step) % spread == 0)) for w in windows])
    feats, sums = x.feats, sum_dtype(x.dtype)
    largest = mode == PoolingMode.LOCAL_MAX_POOLING
    made = feats.new_full((out.num, x.channels), -math.inf) if largest else feats.new_zeros(1, dtype=sums)
    count = torch.zeros(out.num, dtype=sums, device=feats.device)
    cells = list(itertools.product(*axes))
    for start in range(0, len(cells), 8):
        found = []
        for cell in cells[start : start + 8]:
            inside = cell[0][1] & cell[1][1] & cell[2][1]
            rows = out.lookup(torch.stack([x.coords[:, 0], *(w for w, _ in cell)], 1).int())
            found.append(torch.where(inside, rows, -1))
        rows = torch.stack(found, 1)
        if largest:
            which, at = torch.nonzero(rows >= 0, as_tuple=True)
            to = rows[which, at].unsqueeze(1).expand(-1, x.channels)
            made = made.scatter_reduce(0, to, gather_rows(feats, which), "amax")
            continue
        ones = torch.ones_like(rows, dtype=sums)
        made = made + spread_weighted(feats.to(sums), rows, ones, out.num, found=True)
        count += spread_weighted(ones[:, :1], rows, ones, out.num, found=True).squeeze(1)
    if mode == PoolingMode.LOCAL_AVG_POOLING:
        made = made / count.clamp(min=1).unsqueeze(1)
    return torch.where(made == -math.inf, 0, made).to(x.dtype) if largest else made.to(x.dtype)


class MinkowskiSumPooling(MinkowskiPoolingBase):
    """Sum of each window."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: Any = None,
    ) -> None:
        mode = PoolingMode.LOCAL_SUM_POOLING
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, mode, dimension)


class MinkowskiAvgPooling(MinkowskiPoolingBase):
    """Mean of each window, over the voxels that exist."""

    def __init__(
        self,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: Any = None,
    ) -> None:
        mode = PoolingMode.LOCAL_AVG_POOLING
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, mode, dimension)


class MinkowskiMaxPooling(MinkowskiPoolingBase):
    """Largest of each window."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any = 1,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        dimension: Any = None,
    ) -> None:
        mode = PoolingMode.LOCAL_MAX_POOLING
        super().__init__(kernel_size, stride, dilation, kernel_generator, False, mode, dimension)


class MinkowskiPoolingTranspose(MinkowskiPoolingBase):
    """The sum, at each finer voxel, of the voxels whose window holds it; onto the voxels that the coordinate
    manager has at the finer tensor stride, for want of such or with `expand_coordinates` onto all."""

    def __init__(
        self,
        kernel_size: Any,
        stride: Any,
        dilation: Any = 1,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        dimension: Any = None,
    ) -> None:
        mode = PoolingMode.LOCAL_AVG_POOLING
        super().__init__(
            kernel_size, stride, dilation, kernel_generator, True, mode, dimension, expand_coordinates
        )

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:
        manager, source = input._manager, input.coordinate_map_key
        kernel = self.kernel_generator
        size, stride, dilation, padding = self._geometry
        if coordinates is None:
            key = CoordinateMapKey(manager.finer_strides(source, kernel.kernel_stride))
            if kernel.expand_coordinates or not manager.exists(key):
                key = manager.expand(source, kernel, True)
        else:
            key = target_key(input, coordinates)
            _, stride, _ = manager.onto(source, key, True)
            size = stride if self._tiles else size
        over = kernel_map(
            input.voxels,
            size,
            stride=stride,
            dilation=dilation,
            padding=padding,
            out_coords=manager.coord_set(key),
            transposed=True,
        )
        feats = pool._sum(input.F, over)
        made = voxels_of(manager, key, feats)
        return SparseTensor._make(made, key, manager, input)


class MinkowskiGlobalPooling(MinkowskiModuleBase):
    """One row a sample that has a row in the coordinate manager: (N, C) to (B, C), coordinates (batch,
    0, ...)."""

    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX) -> None:
        super().__init__()
        self.pooling_mode = mode

    def forward(self, input: Tensor, coordinates: Any = None) -> SparseTensor:
        return over_samples(input, self.pooling_mode.name.split("_")[1])


class MinkowskiGlobalSumPooling(MinkowskiGlobalPooling):
    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_SUM_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiGlobalAvgPooling(MinkowskiGlobalPooling):
    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_AVG_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


class MinkowskiGlobalMaxPooling(MinkowskiGlobalPooling):
    def __init__(self, mode: PoolingMode = PoolingMode.GLOBAL_MAX_POOLING_PYTORCH_INDEX) -> None:
        super().__init__(mode)


def over_samples(input: Tensor, what: str) -> SparseTensor:
    """'SUM', 'AVG' or 'MAX' of each sample as a tensor on the origin."""
    if not isinstance(input, Tensor):
        raise TypeError(f"input must be a SparseTensor or a TensorField, got {type(input).__name__}")
    manager = input._manager
    key, samples = manager.origin(), manager.samples
    if isinstance(input, SparseTensor):
        feats = _SAMPLE[what](input.voxels)
        feats = feats if len(samples) == len(feats) else feats[samples]
    else:
        feats = merge(input.F, samples, torch.searchsorted(samples, input.C[:, 0].long()), _FIELD[what])
    return SparseTensor._make(voxels_of(manager, key, feats), key, manager, input)


def to_rows(glob: SparseTensor, voxels: Voxels) -> torch.Tensor:
    """(N, C) row of each voxel's sample in a tensor on the origin. Differentiable."""
    from voxmma.sparse.segments import spread

    manager = glob._manager
    if glob.coordinate_map_key != manager.origin():
        raise ValueError(f"input_glob is on {glob.coordinate_map_key}, not on the origin of its manager")
    stats, samples = glob.F, manager.samples
    if len(samples) != voxels.batch_size:
        stats = stats.new_zeros((voxels.batch_size, stats.shape[1])).index_copy(0, samples, stats)
    return spread(stats, voxels.coord_set)
