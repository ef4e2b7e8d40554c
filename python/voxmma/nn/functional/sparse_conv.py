"""Sparse convolution as a function: kernel map, precision, tiles, one call of torch.ops.voxmma.conv."""

from __future__ import annotations

import contextlib
import math

import torch

from voxmma import settings
from voxmma.explain import Record
from voxmma.kernel_map import MAX_KERNEL, MAX_OFFSET, MAX_STRIDE, KernelMap, Triple, _triple
from voxmma.kernel_map import kernel_map as build_kernel_map
from voxmma.tiles import DTYPE_NAMES, plan_call
from voxmma.voxels import Voxels

KernelSize = int | tuple[int, int, int]

#: What `accumulator=` may say, and the flag of the same meaning.
_ACCUMULATORS = {"fp32": False, "fp16": True}


def kernel_triple(kernel_size: KernelSize) -> Triple:
    """A kernel size per axis; TypeError or ValueError naming `kernel_size` unless each is 1 to 9."""
    return _triple(kernel_size, "kernel_size", 1, MAX_KERNEL)


def dilation_triple(dilation: KernelSize) -> Triple:
    """A dilation per axis; TypeError or ValueError naming `dilation` unless each is 1 or more."""
    return _triple(dilation, "dilation", 1, MAX_OFFSET)


def stride_triple(stride: KernelSize, transposed: bool, generative: bool) -> Triple:
    """A stride per axis; refuses what this version has no kernel map for."""
    step = _triple(stride, "stride", 1, MAX_STRIDE)
    if step != (1, 1, 1):
        raise ValueError(f"stride={stride!r}: this version has submanifold (stride 1) convolution only")
    if transposed or generative:
        raise ValueError(
            "transposed and generative must be False: this version has submanifold convolution only"
        )
    return step


def fp16_accum_flag(use_fp16_accum: bool | None, accumulator: str | None) -> bool | None:
    """The one flag that `use_fp16_accum` and `accumulator` say together; ValueError when they contradict."""
    flag = settings.check_flag(use_fp16_accum, "use_fp16_accum")
    if accumulator is None:
        return flag
    if accumulator not in _ACCUMULATORS:
        raise ValueError(
            f"accumulator must be one of {', '.join(_ACCUMULATORS)} or None, got {accumulator!r}"
        )
    if flag is not None and flag != _ACCUMULATORS[accumulator]:
        raise ValueError(f"accumulator={accumulator!r} contradicts use_fp16_accum={flag}")
    return _ACCUMULATORS[accumulator]


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
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ValueError(f"groups must be a positive int, got {groups!r}")
    _check_tensor(weight, "weight", x)
    _check_tensor(x.feats, "the features of x", x)
    expected = "(K, C_in, C_out)" if groups == 1 else f"(K, {groups}, C_in / {groups}, C_out / {groups})"
    if weight.dim() != (3 if groups == 1 else 4) or (groups > 1 and weight.shape[1] != groups):
        raise ValueError(f"weight must be {expected} with groups={groups}, got {tuple(weight.shape)}")
    if weight.shape[0] != volume:
        raise ValueError(f"weight has {weight.shape[0]} offsets, kernel_size has {volume}")
    c_in, c_out = weight.shape[-2] * groups, weight.shape[-1] * groups
    if c_in == 0 or c_out == 0:
        raise ValueError(f"weight must have at least one channel on each side, got {tuple(weight.shape)}")
    if x.feats.shape[1] != c_in:
        raise ValueError(f"x has {x.feats.shape[1]} channels, weight {tuple(weight.shape)} takes {c_in}")
    if bias is not None and _check_tensor(bias, "bias", x).shape != (c_out,):
        raise ValueError(f"bias must be ({c_out},), got {tuple(bias.shape)}")
    return c_out


def _check_map(given: KernelMap, x: Voxels, kernel_size: Triple, dilation: Triple, stride: Triple) -> None:
    if not isinstance(given, KernelMap):
        raise TypeError(f"kernel_map must be a voxmma.KernelMap, got {type(given).__name__}")
    for name, mine, theirs in (
        ("kernel_size", kernel_size, given.kernel_size),
        ("dilation", dilation, given.dilation),
        ("stride", stride, given.stride),
    ):
        if theirs != mine:
            raise ValueError(f"kernel_map was built for {name}={theirs}, the call says {mine}")
    if given.device != x.feats.device:
        raise ValueError(f"kernel_map is on {given.device}, x is on {x.feats.device}")
    if not given.in_coords.equal(x.coord_set):
        raise ValueError("kernel_map was built for other coordinates than those of x")
    if given.in_coords is not given.out_coords:
        raise ValueError(
            "kernel_map leads to other coordinates: this version has submanifold convolution only"
        )


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
    transposed: bool = False,
    generative: bool = False,
    use_fp16_accum: bool | None = None,
    accumulator: str | None = None,
    compute_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    kernel_map: KernelMap | None = None,
    layer: str = "spatially_sparse_conv",
) -> Voxels:
    """Submanifold sparse convolution: `y[i] = sum_k x[row at coord_i + offset_k] @ weight[k] + bias`.

    Cross-correlation on the voxels that exist; the output has the coordinates and the row order of `x`.

    Args:
        x: N voxels with C_in channels, fp16, bf16, fp32 or fp64; N may be 0.
        weight: (K, C_in, C_out), or (K, groups, C_in/groups, C_out/groups) when groups > 1. Offsets in
            lexicographic order of (dx, dy, dz), the last fastest; odd kernels are centred, even kernels start
            at 0. Any float dtype: fp32 weights serve half features, their gradient comes back in the weight's
            dtype.
        kernel_size: one int or three, 1 to 9 each; K is their product.
        bias: (C_out,) or None, any float dtype.
        stride, transposed, generative: only 1, False, False in this version.
        dilation: one int or three, 1 or more: the distance between neighbouring offsets.
        use_fp16_accum: the call's own level of the accumulator precedence (settings.resolve_fp16_accum).
        accumulator: 'fp32' or 'fp16', the same request by name.
        compute_dtype: dtype the products are formed in. Default: the autocast dtype where autocast is active
            (in training and evaluation alike), else the dtype of the features.
        out_dtype: the compute dtype (default) or torch.float32.
        kernel_map: a map built for the coordinates of x; by default the one cached on them is used.
        layer: name for the record that voxmma.explain() gives.

    Returns:
        Voxels with features (N, C_out), carrying the record of what ran.

    Raises:
        TypeError, ValueError: naming the argument: wrong type, dtype, shape, device (both are named), kernel
            size out of range, contradicting flags, a kernel map of other coordinates or another kernel.
        RuntimeError: this build has no kernel for the device of x.
    """
    step = stride_triple(stride, transposed, generative)
    check_compute_dtype(compute_dtype)
    size, dil = kernel_triple(kernel_size), dilation_triple(dilation)
    flag = fp16_accum_flag(use_fp16_accum, accumulator)
    c_out = _check_operands(x, weight, bias, math.prod(size), groups)
    if kernel_map is None:
        kernel_map = build_kernel_map(x.coord_set, size, dil)
    else:
        _check_map(kernel_map, x, size, dil, step)

    dtype = _compute_dtype(x.feats, compute_dtype)
    if out_dtype not in (None, dtype) and not (out_dtype == torch.float32 and dtype != torch.float64):
        raise ValueError(
            f"out_dtype must be {dtype} or torch.float32 when computing in {dtype}, got {out_dtype}"
        )
    requested, decided_by = settings.resolve_fp16_accum(flag, dtype)
    ran, reason, tile, dgrad_tile, wgrad_tile = plan_call(
        dtype,
        requested,
        decided_by,
        x.feats.shape[1],
        c_out,
        groups,
        x.feats.device,
        settings.get_pools(),
    )
    needs_grad = torch.is_grad_enabled() and (x.feats.requires_grad or weight.requires_grad)
    opposite = [] if kernel_map.symmetric or not needs_grad else kernel_map.transposed().tensors
    # The compute dtype is decided here, so the op's own autocast rule must not decide again.
    autocast = torch.is_autocast_enabled(x.feats.device.type)
    with torch.autocast(x.feats.device.type, enabled=False) if autocast else contextlib.nullcontext():
        y = torch.ops.voxmma.conv(
            x.feats.to(dtype),
            weight,
            bias,
            kernel_map.tensors,
            opposite,
            x.feats.shape[0],
            kernel_map.symmetric,
            False,
            ran,
            tile,
            dgrad_tile,
            wgrad_tile,
            out_dtype,
        )
    out = x.with_feats(y)
    out._record = Record(
        layer=layer,
        requested="fp16" if requested else "fp32",
        decided_by=decided_by,
        accumulator=ran,
        tile=tile,
        dgrad_tile=dgrad_tile,
        wgrad_tile=wgrad_tile,
        compute_dtype=dtype,
        out_dtype=y.dtype,
        reason=reason,
    )
    return out
