"""Sparse convolution layers."""

from __future__ import annotations

import math

import torch
from torch import nn

from voxmma.kernel_map import KernelMap
from voxmma.nn.functional.sparse_conv import (
    KernelSize,
    check_compute_dtype,
    dilation_triple,
    fp16_accum_flag,
    kernel_triple,
    spatially_sparse_conv,
    stride_triple,
)
from voxmma.voxels import Voxels


class SparseConv3d(nn.Module):
    """Submanifold sparse convolution of Voxels, with control over what the tensor cores accumulate in.

    Parameters: `weight (K, C_in, C_out)`, or `(K, groups, C_in/groups, C_out/groups)` when groups > 1,
    offsets in lexicographic order, last axis fastest; `bias (C_out,)` unless bias=False. Both are drawn
    uniformly from +-1/sqrt(fan_in) with fan_in = K * C_in / groups, the rule of torch.nn.Conv3d.

    Args:
        in_channels, out_channels: channels, divisible by groups.
        kernel_size: one int or three, 1 to 9 each. dilation: one int or three.
        stride, transposed, generative: only 1, False, False in this version.
        use_fp16_accum: True asks for fp16 accumulators, False forbids them, None leaves it to
            voxmma.set_fp16_accum, the environment and the automatic rule. accumulator='fp16' or 'fp32' says
            the same by name.
        compute_dtype: dtype of the products; None = autocast dtype where active, else the features' dtype.
        device, dtype: of the parameters.

    Raises ValueError naming the argument that is out of range.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

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
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("groups", groups), ("in_channels", in_channels), ("out_channels", out_channels)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive int, got {value!r}")
            if value % groups:
                raise ValueError(f"{name}={value} is not divisible by groups={groups}")
        check_compute_dtype(compute_dtype)
        fp16_accum_flag(use_fp16_accum, accumulator)
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_triple(kernel_size)
        self.stride = stride_triple(stride, transposed, generative)
        self.dilation = dilation_triple(dilation)
        self.groups = groups
        self.transposed = transposed
        self.generative = generative
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

    def forward(self, x: Voxels, kernel_map: KernelMap | None = None) -> Voxels:
        """Convolves (N, C_in) voxels to (N, C_out) on the same coordinates.

        `kernel_map`: a map built for the coordinates of x; by default the one cached on them. Errors as in
        voxmma.nn.functional.spatially_sparse_conv.
        """
        size = "x".join(map(str, self.kernel_size))
        return spatially_sparse_conv(
            x,
            self.weight,
            self.kernel_size,
            self.bias,
            self.stride,
            self.dilation,
            self.groups,
            transposed=self.transposed,
            generative=self.generative,
            use_fp16_accum=self.use_fp16_accum,
            accumulator=self.accumulator,
            compute_dtype=self.compute_dtype,
            kernel_map=kernel_map,
            layer=f"SparseConv3d({self.in_channels}, {self.out_channels}, {size})",
        )

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, default in (
            ("dilation", (1, 1, 1)),
            ("groups", 1),
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
