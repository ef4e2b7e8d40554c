"""Sparse convolution as a function: kernel map, precision, tiles, one call of torch.ops.voxmma.conv."""

from __future__ import annotations

import math
from typing import Any

import torch

from voxmma._dynamo import eager
from voxmma._types import DTYPE_NAMES, Triple, as_tensor, positive, triple
from voxmma.dispatch.calls import convolve, find_repeat, fp16_accum_flag
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import (
    MAX_KERNEL,
    MAX_OFFSET,
    MAX_STRIDE,
    Geometry,
    KernelMap,
    padding_triple,
    traceable,
)
from voxmma.sparse.maps import kernel_map as build_kernel_map
from voxmma.sparse.tensor import Voxels

KernelSize = int | tuple[int, int, int]
Target = Voxels | CoordSet | torch.Tensor


def kernel_triple(kernel_size: KernelSize) -> Triple:
    """A kernel size per axis; TypeError or ValueError naming `kernel_size` unless each is 1 to 9."""
    return triple(kernel_size, "kernel_size", 1, MAX_KERNEL)


def dilation_triple(dilation: KernelSize) -> Triple:
    """A dilation per axis; TypeError or ValueError naming `dilation` unless each is 1 or more."""
    return triple(dilation, "dilation", 1, MAX_OFFSET)


def stride_triple(stride: KernelSize) -> Triple:
    """A stride per axis; TypeError or ValueError naming `stride` unless each is 1 to 4096."""
    return triple(stride, "stride", 1, MAX_STRIDE)


def check_window(
    size: Triple, stride: Triple, dilation: Triple, padding: Triple, generative: bool = False
) -> None:
    """ValueError if `padding` shifts the window of a layer whose outputs are the voxels of its input."""
    if stride != (1, 1, 1) or generative:
        return
    usual = padding_triple(None, size, dilation)
    if padding != usual:
        raise ValueError(
            f"padding={padding} shifts the window of kernel_size={size}, dilation={dilation} at stride 1, "
            f"where the voxels of the input are kept: leave padding out or write padding={usual} "
            "(spconv ignores the padding of its submanifold layers). A shifted window on purpose is a "
            "convolution with generative=True, or coords= or kernel_map= of the function in "
            "voxmma.nn.functional"
        )


def _check_tensor(value: object, name: str, x: Voxels) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in DTYPE_NAMES:
        raise TypeError(f"{name} must be fp16, bf16, fp32 or fp64, got {value.dtype}")
    if value.device != x.feats.device:
        raise ValueError(f"{name} is on {value.device}, the features of x are on {x.feats.device}")
    return value


def _check_operands(
    x: Voxels, weight: torch.Tensor, bias: torch.Tensor | None, volume: int, groups: int
) -> int:
    """Checks everything about the operands and returns the number of output channels."""
    if not isinstance(x, Voxels):
        raise TypeError(f"x must be a voxmma.Voxels, got {type(x).__name__}")
    _check_tensor(weight, "weight", x)
    _check_tensor(x.feats, "the features of x", x)
    shape, channels = weight.shape, x.feats.shape[1]
    if len(shape) != (3 if groups == 1 else 4) or (groups > 1 and shape[1] != groups):
        expected = "(K, C_in, C_out)" if groups == 1 else f"(K, {groups}, C_in / {groups}, C_out / {groups})"
        raise ValueError(f"weight must be {expected} with groups={groups}, got {tuple(shape)}")
    if shape[0] != volume:
        raise ValueError(f"weight has {shape[0]} offsets, kernel_size has {volume}")
    c_in, c_out = shape[-2] * groups, shape[-1] * groups
    if c_in == 0 or c_out == 0:
        raise ValueError(f"weight must have at least one channel on each side, got {tuple(shape)}")
    if channels != c_in:
        raise ValueError(f"x has {channels} channels, weight {tuple(shape)} takes {c_in}")
    if bias is not None and _check_tensor(bias, "bias", x).shape != (c_out,):
        raise ValueError(f"bias must be ({c_out},), got {tuple(bias.shape)}")
    return c_out


def _check_map(given: KernelMap, x: Voxels, geometry: dict[str, Triple], transposed: bool) -> None:
    if not isinstance(given, KernelMap):
        raise TypeError(f"kernel_map must be a voxmma.KernelMap, got {type(given).__name__}")
    for name, mine in geometry.items():
        theirs = getattr(given, name)
        if theirs != mine:
            raise ValueError(f"kernel_map was built for {name}={theirs}, the call says {mine}")
    if given.device != x.feats.device:
        raise ValueError(f"kernel_map is on {given.device}, x is on {x.feats.device}")
    if not given.in_coords.equal(x.coord_set):
        raise ValueError("kernel_map was built for other coordinates than those of x")
    if given.reverse != transposed and not given.symmetric:
        direction = "transposed" if given.reverse else "not transposed"
        raise ValueError(f"kernel_map is {direction}, the call says transposed={transposed}")


def resolve_map(
    x: Voxels,
    kernel_size: Triple,
    stride: Triple,
    dilation: Triple,
    padding: KernelSize | None,
    transposed: bool = False,
    generative: bool = False,
    coords: Target | None = None,
    max_voxels: int | None = None,
    given: KernelMap | None = None,
) -> tuple[KernelMap, CoordSet, Triple]:
    """The map a layer runs over, its output coordinates and their tensor stride.

    Arguments as in `spatially_sparse_conv`, `given` its `kernel_map`.
    """
    if given is None:
        target = coords.coord_set if isinstance(coords, Voxels) else as_tensor(coords, "coords")
        if isinstance(target, torch.Tensor):
            target = CoordSet(target, x.batch_size)
        if target is not None and not isinstance(target, CoordSet):
            raise TypeError(f"coords must be a Voxels, a CoordSet or a tensor, got {type(coords).__name__}")
        if padding is not None and target is None and stride == (1, 1, 1):
            pad = padding_triple(padding, kernel_size, dilation)
            check_window(kernel_size, stride, dilation, pad, generative)
        made = build_kernel_map(
            x.coord_set,
            kernel_size,
            dilation,
            stride=stride,
            padding=padding,
            out_coords=target,
            transposed=transposed,
            generative=generative,
            max_voxels=max_voxels,
        )
    else:
        if coords is not None:
            raise ValueError("coords and kernel_map exclude each other: the map leads to its own coordinates")
        geometry = {"kernel_size": kernel_size, "dilation": dilation, "stride": stride}
        if padding is not None:
            geometry["padding"] = padding_triple(padding, kernel_size, dilation)
        _check_map(given, x, geometry, transposed)
        made = given
    if made.out_coords is made.in_coords:
        return made, x.coord_set, x.stride
    if isinstance(coords, Voxels):
        return made, made.out_coords, coords.stride
    a, b, c = (-(-t // s) if transposed else t * s for t, s in zip(x.stride, stride, strict=True))
    return made, made.out_coords, (a, b, c)


def _compute_dtype(x: torch.Tensor, compute_dtype: torch.dtype | None) -> torch.dtype:
    """The argument, else the active autocast dtype (fp64 stays fp64, as in torch), else the features' own."""
    if compute_dtype is not None:
        return compute_dtype
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def check_compute_dtype(compute_dtype: torch.dtype | None) -> None:
    """ValueError unless `compute_dtype` is None or a dtype this library computes in."""
    if compute_dtype is not None and compute_dtype not in DTYPE_NAMES:
        raise ValueError(f"compute_dtype must be fp16, bf16, fp32, fp64 or None, got {compute_dtype!r}")


def spatially_sparse_conv(
    x: Voxels,
    weight: torch.Tensor,
    kernel_size: KernelSize,
    bias: torch.Tensor | None = None,
    stride: KernelSize = 1,
    dilation: KernelSize = 1,
    groups: int = 1,
    *,
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
) -> Voxels:
    """Sparse convolution, submanifold, strided, generative or transposed.

    Cross-correlation on the voxels that exist. With o and i the coordinates of output and input voxels,

        y[o] = bias + sum over k of x[o * stride - padding + k * dilation] @ weight[k]
        y[i * stride - padding + k * dilation] += x[i] @ weight[k]        (transposed)

    which is torch's conv3d and conv_transpose3d with the same stride, padding and dilation, on a grid without
    borders, seen at the output voxels. Coordinates of a coarser level are grid coordinates of that level, and
    a negative one belongs to the cell below: k = s = 2 puts voxel -1 into cell -1. Output voxels are

    - `coords`, where given;
    - with stride 1: those of x in the same order (submanifold);
    - with another stride, or generative: every o whose window holds a voxel of x, sorted by (batch, x, y, z);
    - transposed with another stride: the finer voxels that strided layers made those of x from (or that they
      read when they were given those of x as `coords`), in the order they had there; for want of such, or
      generative: every voxel that one of x reaches, sorted.

    Coordinates and maps are made once for the coordinates of x and shared by all layers of the same shape.

    Args:
        x: N voxels with C_in channels, fp16, bf16, fp32 or fp64; N may be 0.
        weight: (K, C_in, C_out), or (K, groups, C_in/groups, C_out/groups) when groups > 1. Offsets in
            lexicographic order of (dx, dy, dz), the last fastest; odd kernels are centred, even kernels start
            at 0. Any float dtype: fp32 weights serve half features, their gradient comes back in the weight's
            dtype.
        kernel_size: one int or three, 1 to 9 each; K is their product.
        bias: (C_out,) or None, any float dtype.
        stride: one int or three, 1 to 4096. The tensor stride of the output is that of x times this, or,
            transposed, divided by it and rounded up.
        dilation: one int or three, 1 or more: the distance between neighbouring offsets.
        padding: one int or three; default (kernel_size // 2) * dilation for odd sizes, 0 for even ones. It
            may be negative. At stride 1 another one than the default goes with generative, coords or
            kernel_map only: it would shift the window.
        transposed, generative: see above.
        coords: output coordinates: a Voxels, a CoordSet or (M, 4) as in Voxels. The map is kept as long as
            both coordinate sets live; a tensor makes a set, and so a map, of its own every time. With a
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

    Returns:
        Voxels with C_out channels, carrying the record of what ran.

    Raises:
        TypeError, ValueError: naming the argument: wrong type, dtype, shape, device (both are named), kernel
            size out of range, padding that shifts the window of a submanifold call, contradicting flags, a
            kernel map of other coordinates or another kernel; more than `max_voxels` output voxels, before
            they come into being.
        RuntimeError: this build has no kernel for the device of x.
    """
    geometry = (kernel_size, stride, dilation, groups, padding, transposed, generative, max_voxels)
    precision = (use_fp16_accum, accumulator, compute_dtype, out_dtype)
    return sparse_conv(x, weight, bias, (*geometry, *precision, layer), coords, kernel_map)


def sparse_conv(
    x: Voxels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: tuple[Any, ...],
    coords: Target | None,
    kernel_map: KernelMap | None,
) -> Voxels:
    """`spatially_sparse_conv` with its arguments in one tuple, the key of a repeated call.

    They end in the layer's name, or in the class, in_channels and out_channels that make one.
    """
    key = None
    if coords is None and kernel_map is None and not torch.compiler.is_compiling() and isinstance(x, Voxels):
        key, again = find_repeat(x, weight, bias, arguments)
        if again is not None:
            return again.run(x, weight, bias)
    kernel_size, stride, dilation, groups, padding, transposed, generative, max_voxels, *precision = arguments
    use_fp16_accum, accumulator, compute_dtype, out_dtype, *named = precision
    step = stride_triple(stride)
    check_compute_dtype(compute_dtype)
    groups = positive(groups, "groups")
    size, dil = kernel_triple(kernel_size), dilation_triple(dilation)
    if torch.compiler.is_compiling() and kernel_map is None and isinstance(x, Voxels):
        geometry = Geometry(size, step, dil, padding_triple(padding, size, dil))
        if not traceable(x.coord_set, geometry, generative or coords is not None):
            return _outside(x, weight, bias, arguments, coords)
    fp16_accum_flag(use_fp16_accum, accumulator)
    _check_operands(x, weight, bias, math.prod(size), groups)
    made, out_coords, out_stride = resolve_map(
        x, size, step, dil, padding, transposed, generative, coords, max_voxels, kernel_map
    )
    if transposed or (len(named) == 1 and _holds_tensor(arguments)):
        key = None  # a tensor may say something else next time
    if transposed and made.symmetric:
        weight = weight.flip(0)  # the opposite direction of a symmetric map is the map with mirrored offsets

    dtype = _compute_dtype(x.feats, compute_dtype)
    if out_dtype not in (None, dtype) and not (out_dtype == torch.float32 and dtype != torch.float64):
        raise ValueError(
            f"out_dtype must be {dtype} or torch.float32 when computing in {dtype}, got {out_dtype}"
        )
    y, record = convolve(
        x.feats,
        weight,
        bias,
        made,
        groups=groups,
        use_fp16_accum=use_fp16_accum,
        accumulator=accumulator,
        compute_dtype=dtype,
        out_dtype=out_dtype,
        layer=named[0] if len(named) == 1 else _layer_name(size, named[0], weight, groups),
        key=key,
    )
    return Voxels._make(out_coords, y, out_stride, record)


def _holds_tensor(arguments: tuple[Any, ...]) -> bool:
    parts = (part for a in arguments for part in (a if type(a) is tuple else (a,)))
    return any(isinstance(part, torch.Tensor) for part in parts)


@eager
def _outside(
    x: Voxels,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    arguments: tuple[Any, ...],
    coords: Target | None,
) -> Voxels:
    """`sparse_conv` between two graphs of torch.compile, so that it traces no cache and no bookkeeping."""
    return sparse_conv(x, weight, bias, arguments, coords, None)


def _layer_name(size: Triple, kind: type, weight: torch.Tensor, groups: int) -> str:
    """From the weight: torch.compile may take a layer's ints for variable."""
    a, b, c = size
    return f"{kind.__name__}({weight.shape[-2] * groups}, {weight.shape[-1] * groups}, {a}x{b}x{c})"


def sparse_conv_transpose(
    x: Voxels,
    weight: torch.Tensor,
    kernel_size: KernelSize,
    bias: torch.Tensor | None = None,
    stride: KernelSize = 1,
    dilation: KernelSize = 1,
    groups: int = 1,
    *,
    coords: Target | None = None,
    generative: bool = False,
    layer: str = "sparse_conv_transpose",
    **options: Any,
) -> Voxels:
    """`spatially_sparse_conv` with transposed=True; `options` are its other keyword arguments."""
    return spatially_sparse_conv(
        x,
        weight,
        kernel_size,
        bias,
        stride,
        dilation,
        groups,
        transposed=True,
        generative=generative,
        coords=coords,
        layer=layer,
        **options,
    )
