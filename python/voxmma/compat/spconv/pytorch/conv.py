"""The kinds of sparse convolutions."""

from __future__ import annotations

from typing import Any

from voxmma.compat.spconv.core import ConvAlgo as ConvAlgo
from voxmma.compat.spconv.core import missing
from voxmma.compat.spconv.pytorch.convolution import SparseConvolution as SparseConvolution


class _OfKind(SparseConvolution):
    """A kind of layer for a number of axes, which its subclasses say."""

    _ndim: int


class _SubM(_OfKind):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: Any = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self._ndim,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            subm=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class _Strided(_OfKind):
    _transposed = False

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        indice_key: Any = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self._ndim,
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            transposed=self._transposed,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            record_voxel_count=record_voxel_count,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class _Inverse(_OfKind):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any,
        indice_key: Any,
        bias: bool = True,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(
            self._ndim,
            in_channels,
            out_channels,
            kernel_size,
            bias=bias,
            inverse=True,
            indice_key=indice_key,
            algo=algo,
            fp32_accum=fp32_accum,
            large_kernel_fast_algo=large_kernel_fast_algo,
            name=name,
        )


class _Transposed(_Strided):
    _transposed = True


class SubMConv1d(_SubM):
    """Submanifold: the outputs are the inputs' voxels. stride and padding are kept and ignored."""

    _ndim = 1


class SubMConv2d(_SubM):
    """Submanifold: the outputs are the inputs' voxels. stride and padding are kept and ignored."""

    _ndim = 2


class SubMConv3d(_SubM):
    """Submanifold: the outputs are the inputs' voxels. stride and padding are kept and ignored."""

    _ndim = 3


class SubMConv4d(_SubM):
    """Placeholder of the name: making one raises NotImplementedError."""

    _ndim = 4


class SparseConv1d(_Strided):
    """Outputs are the sites of torch's output grid whose window holds a voxel, at stride 1 too."""

    _ndim = 1


class SparseConv2d(_Strided):
    """Outputs are the sites of torch's output grid whose window holds a voxel, at stride 1 too."""

    _ndim = 2


class SparseConv3d(_Strided):
    """Outputs are the sites of torch's output grid whose window holds a voxel, at stride 1 too."""

    _ndim = 3


class SparseConv4d(_Strided):
    """Placeholder of the name: making one raises NotImplementedError."""

    _ndim = 4


class SparseConvTranspose1d(_Transposed):
    """Outputs are the sites that a voxel reaches, within (n - 1) * stride - 2 * padding + kernel_size."""

    _ndim = 1


class SparseConvTranspose2d(_Transposed):
    """Outputs are the sites that a voxel reaches, within (n - 1) * stride - 2 * padding + kernel_size."""

    _ndim = 2


class SparseConvTranspose3d(_Transposed):
    """Outputs are the sites that a voxel reaches, within (n - 1) * stride - 2 * padding + kernel_size."""

    _ndim = 3


class SparseConvTranspose4d(_Transposed):
    """Placeholder of the name: making one raises NotImplementedError."""

    _ndim = 4


class SparseInverseConv1d(_Inverse):
    """Goes back over the map that the layer with this `indice_key` made, to the voxels it started from."""

    _ndim = 1


class SparseInverseConv2d(_Inverse):
    """Goes back over the map that the layer with this `indice_key` made, to the voxels it started from."""

    _ndim = 2


class SparseInverseConv3d(_Inverse):
    """Goes back over the map that the layer with this `indice_key` made, to the voxels it started from."""

    _ndim = 3


class SparseInverseConv4d(_Inverse):
    """Placeholder of the name: making one raises NotImplementedError."""

    _ndim = 4


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.conv", name))
