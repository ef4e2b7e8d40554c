"""Convolutions."""

from __future__ import annotations

import enum
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from voxmma.compat.kernels import KernelConv
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import MinkowskiModuleBase, check_dimension, renamed
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import CoordinateMapKey, voxels_of
from voxmma.compat.MinkowskiEngine.MinkowskiKernelGenerator import KernelGenerator
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import SparseTensor, target_key
from voxmma.dispatch.calls import call


class ConvolutionMode(enum.Enum):
    """Accepted; the tile table and voxmma.tune decide about kernels."""

    DEFAULT = 0
    DIRECT_GEMM = 1
    COPY_GEMM = 2


class MinkowskiConvolutionBase(KernelConv, MinkowskiModuleBase):
    """`kernel` (K, C_in, C_out), offsets along the first axis fastest, or (C_in, C_out) of a kernel of one
    cell and stride 1; `bias` (1, C_out) or None.

    With a `kernel_generator` kernel size, stride and dilation are its own.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        is_transpose: bool = False,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: Any = -1,
    ) -> None:
        self_dimension = check_dimension(dimension)
        if kernel_generator is None:
            kernel_generator = KernelGenerator(
                kernel_size, stride, dilation, expand_coordinates=expand_coordinates, dimension=self_dimension
            )
        kernel_generator.expand_coordinates = expand_coordinates
        use_mm = kernel_generator.kernel_volume == 1 and kernel_generator.requires_strided_coordinates
        super().__init__(
            in_channels,
            out_channels,
            tuple(kernel_generator.kernel_size),
            tuple(kernel_generator.kernel_stride),
            tuple(kernel_generator.kernel_dilation),
            interface="MinkowskiEngine",
            bias=bias,
            flat=use_mm,
            transposed=is_transpose,
        )
        self.is_transpose = is_transpose
        self.dimension = self_dimension
        self.kernel_generator = kernel_generator
        self.convolution_mode = convolution_mode
        self.use_mm = use_mm
        self.padding = kernel_generator.geometry.padding
        cells = kernel_generator.cells
        if cells is not None:
            self.kernel = nn.Parameter(self.kernel.new_empty((len(cells), in_channels, out_channels)))
        self.register_buffer("_cells", cells, persistent=False)
        if self.bias is not None:
            self.bias = nn.Parameter(self.bias.detach().unsqueeze(0))
        self.reset_parameters()

    @property
    def weight(self) -> torch.Tensor:  # type: ignore[override]
        """The kernel over the box around its offsets."""
        cells = self._buffers.get("_cells")
        if cells is None:
            return super().weight
        kernel = self.kernel
        box = kernel.new_zeros((self.config.volume, *kernel.shape[1:]))
        return box.index_copy(0, cells, kernel)

    def forward(self, input: SparseTensor, coordinates: Any = None) -> SparseTensor:  # type: ignore[override]
        """(N, C_in) to (M, C_out), on `coordinates` (a key, a SparseTensor or a tensor) where given: a tensor
        is of the input's tensor stride, for a transposed layer of the finer one."""
        if not isinstance(input, SparseTensor):
            raise TypeError(f"input must be a MinkowskiEngine.SparseTensor, got {type(input).__name__}")
        if self.dimension != input.D:
            raise ValueError(f"input has {input.D} spatial axes, the layer {self.dimension}")
        manager, source = input._manager, input.coordinate_map_key
        key = source if self.use_mm else self._out_key(input, coordinates)
        config, where, rows = self.config, None, None
        if coordinates is not None and not self.use_mm:
            where, stride, rows = manager.onto(source, key, self.is_transpose)
            config = config if stride == config.stride else replace(config, stride=stride)
        elif key != source or self.kernel_generator.region_offsets is not None:
            where = manager.coord_set(key)
        bias = None if self.bias is None else self.bias.view(-1)
        made = call(config, input.voxels, self.weight, bias, coords=where)
        if rows is not None:
            feats = made.feats.new_zeros((manager.size(key), self.out_channels))
            feats = feats if bias is None else feats + bias.to(feats.dtype)
            made = voxels_of(manager, key, feats.index_copy(0, rows, made.feats))
        return SparseTensor._make(made, key, manager, input)

    def _out_key(self, input: SparseTensor, coordinates: Any) -> CoordinateMapKey:
        manager, source = input._manager, input.coordinate_map_key
        kernel = self.kernel_generator
        if coordinates is not None:
            strides = input.tensor_stride
            if self.is_transpose and isinstance(coordinates, torch.Tensor):
                strides = manager.finer_strides(source, kernel.kernel_stride)
            return target_key(input, coordinates, strides)
        if kernel.expand_coordinates:
            return manager.expand(source, kernel, self.is_transpose)
        if not self.is_transpose:
            if kernel.requires_strided_coordinates:
                return source
            return manager.stride(source, kernel.kernel_stride)
        finer = CoordinateMapKey(manager.finer_strides(source, kernel.kernel_stride))
        return finer if manager.exists(finer) else manager.expand(source, kernel, True)

    def extra_repr(self) -> str:
        kernel = self.kernel_generator
        return (
            f"in={self.in_channels}, out={self.out_channels}, kernel_size={kernel.kernel_size}, "
            f"stride={kernel.kernel_stride}, dilation={kernel.kernel_dilation}"
        )


class MinkowskiConvolution(MinkowskiConvolutionBase):
    """Convolution. Stride 1 keeps the voxels of its input, another leads to the cells of the coarser grid;
    `expand_coordinates` makes every cell that the kernel (of odd size) reaches."""

    @renamed(has_bias="bias")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: Any = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            False,
            expand_coordinates,
            convolution_mode,
            dimension,
        )


class MinkowskiConvolutionTranspose(MinkowskiConvolutionBase):
    """Transposed convolution, onto the voxels that the coordinate manager has at the finer tensor stride
    (under no string, as the input of a network has, whatever that of the layer's input); for want of such,
    or with `expand_coordinates`, onto every cell that the kernel reaches."""

    @renamed(has_bias="bias", generate_new_coords="expand_coordinates")
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        expand_coordinates: bool = False,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: Any = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            True,
            expand_coordinates,
            convolution_mode,
            dimension,
        )


class MinkowskiGenerativeConvolutionTranspose(MinkowskiConvolutionTranspose):
    """Transposed convolution onto every cell that the kernel reaches."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = -1,
        stride: Any = 1,
        dilation: Any = 1,
        bias: bool = False,
        kernel_generator: KernelGenerator | None = None,
        convolution_mode: ConvolutionMode = ConvolutionMode.DEFAULT,
        dimension: Any = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            bias,
            kernel_generator,
            True,
            convolution_mode,
            dimension,
        )
