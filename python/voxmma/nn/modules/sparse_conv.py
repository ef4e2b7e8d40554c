"""Sparse convolution layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from voxmma._dynamo import eager
from voxmma._types import planar, positive
from voxmma.dispatch.calls import fp16_accum_flag
from voxmma.nn.functional.sparse_conv import (
    KernelSize,
    Target,
    check_compute_dtype,
    check_window,
    dilation_triple,
    kernel_triple,
    resolve_map,
    sparse_conv,
    stride_triple,
)
from voxmma.sparse.derive import check_max_voxels
from voxmma.sparse.maps import Geometry, KernelMap, padding_triple, traceable
from voxmma.sparse.tensor import Voxels

KernelSize2d = int | tuple[int, int]


class SparseConv3d(nn.Module):
    """Sparse convolution of Voxels, with control over what the tensor cores accumulate in.

    Stride 1 is submanifold: the output has the voxels of the input. Another stride makes the voxels whose
    window holds one of the input; generative=True does so at stride 1 too. transposed=True goes back to the
    voxels a strided layer started from (SparseConvTranspose3d). All the rules are those of
    voxmma.nn.functional.spatially_sparse_conv.

    Parameters: `weight (K, C_in, C_out)`, or `(K, groups, C_in/groups, C_out/groups)` when groups > 1,
    offsets in lexicographic order, last axis fastest; `bias (C_out,)` unless bias=False. Both are drawn
    uniformly from +-1/sqrt(fan_in) with fan_in = K * C_in / groups, the rule of torch.nn.Conv3d.

    Args:
        in_channels, out_channels: channels, divisible by groups.
        kernel_size: one int or three, 1 to 9 each. stride, dilation: one int or three.
        transposed, generative: see above.
        use_fp16_accum: True asks for fp16 accumulators, False forbids them, None leaves it to
            voxmma.set_fp16_accum, the environment and the automatic rule. accumulator='fp16' or 'fp32' says
            the same by name; 'fp16_promoted:32', ':64', ':128' or ':offset' asks for fp16 sums that are
            promoted to fp32 every so many channels or once an offset ('fp16_promoted' alone: 64).
        compute_dtype: dtype of the products; None = autocast dtype where active, else the features' dtype.
        padding: one int or three; default (kernel_size // 2) * dilation for odd sizes, 0 for even ones. At
            stride 1 another one is refused unless generative=True: it would shift the window.
        max_voxels: most voxels the layer may make, default 2^26.
        device, dtype: of the parameters.

    The attribute `out_dtype` (None, the compute dtype, until set) may be torch.float32: results as they leave
    the accumulator, not rounded to half.

    Raises ValueError naming the argument that is out of range.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    out_dtype: torch.dtype | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize,
        stride: KernelSize = 1,
        dilation: KernelSize = 1,
        groups: int = 1,
        bias: bool = True,
        transposed: bool = False,
        generative: bool = False,
        use_fp16_accum: bool | None = None,
        accumulator: str | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        padding: KernelSize | None = None,
        max_voxels: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = positive(groups, "groups")
        in_channels = positive(in_channels, "in_channels")
        out_channels = positive(out_channels, "out_channels")
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            if value % groups:
                raise ValueError(f"{name}={value} is not divisible by groups={groups}")
        check_compute_dtype(compute_dtype)
        fp16_accum_flag(use_fp16_accum, accumulator)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_triple(kernel_size)
        self.stride = stride_triple(stride)
        self.dilation = dilation_triple(dilation)
        self.padding = padding_triple(padding, self.kernel_size, self.dilation)
        self.groups = groups
        self.transposed = transposed
        self.generative = generative
        check_window(self.kernel_size, self.stride, self.dilation, self.padding, generative)
        self.max_voxels = None if max_voxels is None else check_max_voxels(max_voxels)
        self.use_fp16_accum = use_fp16_accum
        self.accumulator = accumulator
        self.compute_dtype = compute_dtype
        shape = (in_channels // groups, out_channels // groups)
        lead = (math.prod(self.kernel_size),) if groups == 1 else (math.prod(self.kernel_size), groups)
        self.weight = nn.Parameter(torch.empty(*lead, *shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias anew: uniform in +-1/sqrt(K * C_in / groups)."""
        bound = 1.0 / math.sqrt(self.weight.shape[0] * self.weight.shape[-2])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def kernel_map(self, x: Voxels, coords: Target | None = None) -> KernelMap:
        """The map that `forward(x, coords=coords)` runs over; its `transposed()` is that of the layer's
        inverse."""
        made, _, _ = resolve_map(
            x,
            self.kernel_size,
            self.stride,
            self.dilation,
            self.padding,
            self.transposed,
            self.generative,
            coords,
            self.max_voxels,
        )
        return made

    def forward(
        self, x: Voxels, kernel_map: KernelMap | None = None, *, coords: Target | None = None
    ) -> Voxels:
        """Convolves voxels of C_in channels to voxels of C_out channels.

        `kernel_map`: a map built for the coordinates of x; by default the one cached on them. `coords`: where
        the outputs shall be (a Voxels, a CoordSet or a tensor). Errors as in
        voxmma.nn.functional.spatially_sparse_conv.
        """
        if torch.compiler.is_compiling() and kernel_map is None and isinstance(x, Voxels):
            geometry = Geometry(self.kernel_size, self.stride, self.dilation, self.padding)
            if not traceable(x.coord_set, geometry, self.generative or coords is not None):
                return _outside(self, x, coords)
        own: dict[str, Any] = self._parameters
        if type(self) in _PLAIN and "weight" in own and "bias" in own:
            weight, bias = own["weight"], own["bias"]  # as Module.__getattr__ finds them, but fast
        else:
            weight, bias = self.weight, self.bias
        arguments = (
            self.kernel_size,
            self.stride,
            self.dilation,
            self.groups,
            self.padding,
            self.transposed,
            self.generative,
            self.max_voxels,
            self.use_fp16_accum,
            self.accumulator,
            self.compute_dtype,
            self.out_dtype,
            type(self),
            self.in_channels,
            self.out_channels,
        )
        return sparse_conv(x, weight, bias, arguments, coords, kernel_map)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, default in (
            ("stride", (1, 1, 1)),
            ("dilation", (1, 1, 1)),
            ("padding", padding_triple(None, self.kernel_size, self.dilation)),
            ("groups", 1),
            ("transposed", False),
            ("generative", False),
            ("max_voxels", None),
            ("use_fp16_accum", None),
            ("accumulator", None),
        ):
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        if self.compute_dtype is not None:
            parts.append(f"compute_dtype={self.compute_dtype}")
        if self.bias is None:
            parts.append("bias=False")
        return ", ".join(parts)


def sparse_layers(model: nn.Module) -> dict[str, SparseConv3d]:
    """The sparse convolution layers of a model by name ('' for the model itself)."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, SparseConv3d)}


@eager
def _outside(layer: SparseConv3d, x: Voxels, coords: Target | None) -> Voxels:
    """A layer between two graphs of torch.compile, so that it traces no cache and no bookkeeping."""
    return SparseConv3d.forward(layer, x, coords=coords)


class SparseConvTranspose3d(SparseConv3d):
    """Transposed sparse convolution: SparseConv3d(..., transposed=True), stride where one expects it.

    `layer(x, coords=skip)` makes the voxels of `skip`. Without `coords` they are the finer voxels that
    strided layers of the same total stride made those of x from, whatever their kernel; where there are none,
    and with generative=True, every voxel that one of x reaches. An inverse convolution is
    `layer(y, down.kernel_map(x).transposed())` for the strided layer `down` that made y out of x.

    Arguments as for SparseConv3d.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize,
        stride: KernelSize = 1,
        dilation: KernelSize = 1,
        groups: int = 1,
        bias: bool = True,
        generative: bool = False,
        use_fp16_accum: bool | None = None,
        accumulator: str | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        padding: KernelSize | None = None,
        max_voxels: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            groups,
            bias,
            True,
            generative,
            use_fp16_accum,
            accumulator,
            compute_dtype,
            padding=padding,
            max_voxels=max_voxels,
            device=device,
            dtype=dtype,
        )


class SparseConv2d(SparseConv3d):
    """SparseConv3d over x and y alone: every z is a plane of its own (plain 2-D data has z = 0 everywhere).

    `kernel_size`, `stride`, `dilation` and `padding` are one int or two. `weight` is (K, C_in, C_out) with K
    the product of the two kernel sizes, offsets in lexicographic order of (dx, dy). Else as SparseConv3d;
    the function behind it is spatially_sparse_conv with (k, k, 1), (stride, stride, 1), ...
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize2d,
        stride: KernelSize2d = 1,
        dilation: KernelSize2d = 1,
        groups: int = 1,
        bias: bool = True,
        transposed: bool = False,
        generative: bool = False,
        use_fp16_accum: bool | None = None,
        accumulator: str | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        padding: KernelSize2d | None = None,
        max_voxels: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            planar(kernel_size, "kernel_size"),
            planar(stride, "stride"),
            planar(dilation, "dilation"),
            groups,
            bias,
            transposed,
            generative,
            use_fp16_accum,
            accumulator,
            compute_dtype,
            padding=None if padding is None else planar(padding, "padding", 0),
            max_voxels=max_voxels,
            device=device,
            dtype=dtype,
        )


class SparseConvTranspose2d(SparseConv2d):
    """SparseConvTranspose3d over x and y alone, as SparseConv2d is SparseConv3d over them."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize2d,
        stride: KernelSize2d = 1,
        dilation: KernelSize2d = 1,
        groups: int = 1,
        bias: bool = True,
        generative: bool = False,
        use_fp16_accum: bool | None = None,
        accumulator: str | None = None,
        compute_dtype: torch.dtype | None = None,
        *,
        padding: KernelSize2d | None = None,
        max_voxels: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            dilation,
            groups,
            bias,
            True,
            generative,
            use_fp16_accum,
            accumulator,
            compute_dtype,
            padding=padding,
            max_voxels=max_voxels,
            device=device,
            dtype=dtype,
        )


#: The classes whose parameters are attributes like any other: subclasses may compute theirs.
#: Not a set, at which the dynamo of torch 2.6 stops.
_PLAIN = (SparseConv3d, SparseConvTranspose3d, SparseConv2d, SparseConvTranspose2d)
