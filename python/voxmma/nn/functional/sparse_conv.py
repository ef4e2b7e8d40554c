"""Sparse convolution as a function."""

from __future__ import annotations

from typing import Any

import torch

from voxmma.dispatch.calls import call
from voxmma.dispatch.config import KernelSize, config_of
from voxmma.dispatch.mapping import Target
from voxmma.sparse.maps import KernelMap
from voxmma.sparse.tensor import Voxels


def spatially_sparse_conv(
    x: Voxels,
    weight: torch.Tensor,
    kernel_size: KernelSize,
    bias: torch.Tensor | None = None,
    stride: KernelSize = 1,
    *,
    dilation: KernelSize = 1,
    groups: int = 1,
    padding: KernelSize | None = None,
    transposed: bool = False,
    generative: bool = False,
    coords: Target | None = None,
    max_voxels: int | None = None,
    use_fp16_accum: bool | None = None,
    accumulator: str | None = None,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_map: KernelMap | None = None,
    layer: str = "spatially_sparse_conv",
    output_padding: KernelSize = 0,
    outputs: str = "windows",
    map_key: str | None = None,
    inverse_of: str | None = None,
) -> Voxels:
    """Sparse convolution, submanifold, strided, generative or transposed.

    Cross-correlation on the voxels that exist. With o and i the coordinates of output and input voxels,

        y[o] = bias + sum over k of x[o * stride - padding + k * dilation] @ weight[k]
        y[i * stride - padding + k * dilation] += x[i] @ weight[k]        (transposed)

    which is torch's conv3d and conv_transpose3d with the same stride, padding and dilation, seen at the
    output voxels: on a grid without borders, or where x has a `spatial_shape` on a grid of that shape.
    Coordinates of a coarser level are grid coordinates of that level, and a negative one belongs to the cell
    below: k = s = 2 puts voxel -1 into cell -1. Output voxels are

    - `coords`, where given;
    - with stride 1: those of x in the same order (submanifold);
    - with another stride, or generative: every o whose window holds a voxel of x, sorted by (batch, x, y, z);
    - transposed with another stride: the finer voxels that strided layers made those of x from (or that they
      read when they were given those of x as `coords`), in the order they had there; for want of such, or
      generative: every voxel that one of x reaches, sorted.

    Where x has a `spatial_shape`, what is made here lies within torch's output shape, which the output has:
    floor((n + 2 * padding - dilation * (k - 1) - 1) / stride) + 1 per axis, or transposed (n - 1) * stride -
    2 * padding + dilation * (k - 1) + output_padding + 1. `coords` and finer voxels keep their own.

    Coordinates and maps are made once for the coordinates of x and shared by all layers of the same shape.

    Args:
        x: N voxels with C_in channels, fp16, bf16, fp32 or fp64; N may be 0.
        weight: (K, C_in, C_out), or (K, groups, C_in/groups, C_out/groups) when groups > 1. Offsets in
            lexicographic order of (dx, dy, dz), the last fastest; odd kernels are centred, even kernels start
            at 0. The dtype of the features or a wider one: fp32 weights serve half features, their gradient
            comes back in the weight's dtype. Any float dtype under autocast and with compute_dtype.
        kernel_size: one int or three, 1 to 9 each; K is their product.
        bias: (C_out,) or None, dtypes as for `weight`.
        stride: one int or three, 1 to 4096. The tensor stride of the output is that of x times this, or,
            transposed, divided by it and rounded up.
        dilation: one int or three, 1 or more: the distance between neighbouring offsets.
        padding: one int or three; default (kernel_size // 2) * dilation for odd sizes, 0 for even ones. It
            may be negative. At stride 1 another one than the default goes with generative, coords or
            kernel_map only: it would shift the window.
        transposed, generative: see above.
        coords: output coordinates: a Voxels, a CoordSet or (M, 4) as in Voxels. The map is kept as long as
            both coordinate sets live; a tensor stands for the set it had before, as in `CoordSet.of`. With a
            stride, a set that no strided layer made remembers the voxels of x; where several that are alive
            compete, transposed layers raise ValueError until they are given `coords`.
        max_voxels: most voxels that the layer may make, default 2^26.
        use_fp16_accum: the call's own level of the accumulator precedence (settings.resolve_fp16_accum).
        accumulator: 'fp32' or 'fp16', the same request by name, or 'fp16_promoted:32', ':64', ':128' or
            ':offset': fp16 sums of so many channels (or of one offset) that are added up in fp32.
            'fp16_promoted' alone means 64.
        compute_dtype: dtype the products are formed in. Default: the autocast dtype where autocast is active
            (in training and evaluation alike), else the dtype of the features.
        out_dtype: the compute dtype (default) or torch.float32.
        kernel_map: a map built for the coordinates of x, which also says where the outputs are; by default
            the one cached on them is used. An inverse convolution of a strided layer is a transposed one over
            `voxmma.kernel_map(x, ...).transposed()` of that layer's input x.
        layer: name for the record that voxmma.explain() gives.
        output_padding: one int or three, 0 or more; see above. It changes nothing without a `spatial_shape`.
        outputs: 'cells' makes a strided layer put its outputs on the cells of the coarser grid that hold a
            voxel of x, whatever kernel and padding: the set of `voxmma.downsample(x, stride)`, one for each
            total stride (MinkowskiEngine's rule). Layers that are transposed or generative do not ask.
        map_key: keeps the map on the coordinates of input and output, where `x.maps[map_key]` finds it.
        inverse_of: with transposed=True, the map_key of the layer that made the coordinates of x: this call
            runs over the opposite of its map, back to the voxels that it came from. Stride, dilation and
            padding are those of the map.

    Returns:
        Voxels with C_out channels, carrying the record of what ran.

    Raises:
        TypeError, ValueError: naming the argument: wrong type, dtype, shape, device (both are named),
            features that are wider than the parameters, kernel size out of range, padding that shifts the
            window of a submanifold call, contradicting flags, a kernel map of other coordinates or another
            kernel; an output shape that cannot be; more than `max_voxels` output voxels, before they come
            into being.
        RuntimeError: this build has no kernel for the device of x.
    """
    geometry = (kernel_size, stride, dilation, groups, padding, transposed, generative, max_voxels)
    precision = (use_fp16_accum, accumulator, compute_dtype, out_dtype)
    config = config_of(*geometry, *precision, layer, output_padding, outputs, map_key, inverse_of)
    return call(config, x, weight, bias, coords=coords, kernel_map=kernel_map)


def sparse_conv_transpose(
    x: Voxels,
    weight: torch.Tensor,
    kernel_size: KernelSize,
    bias: torch.Tensor | None = None,
    stride: KernelSize = 1,
    *,
    layer: str = "sparse_conv_transpose",
    **options: Any,
) -> Voxels:
    """`spatially_sparse_conv` with transposed=True; `options` are its other keyword arguments."""
    return spatially_sparse_conv(
        x, weight, kernel_size, bias, stride, transposed=True, layer=layer, **options
    )
