"""Convolution."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from voxmma._types import Triple
from voxmma.compat.kernels import turned
from voxmma.compat.torchsparse import options
from voxmma.compat.torchsparse import tensor as _tensor
from voxmma.compat.torchsparse.nn.functional.conv_config import rule
from voxmma.compat.torchsparse.tensor import SparseTensor, coord_set, coords_of
from voxmma.compat.torchsparse.utils.tensor_cache import LayerMap
from voxmma.compat.torchsparse.utils.utils import make_triple
from voxmma.dispatch.calls import call
from voxmma.dispatch.config import ConvConfig, config_of
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.derive import Derived, windows
from voxmma.sparse.maps import Geometry, padding_triple
from voxmma.sparse.sets import downsample

__all__ = ["conv3d"]


def kernel_inside(kernel: torch.Tensor, kernel_size: Triple) -> torch.Tensor:
    """(K, C_in, C_out), offsets as voxmma.nn has them for columns turned round: an odd K is stored with x
    fastest, which is that, an even one with z fastest."""
    if kernel.dim() == 2:
        return kernel.unsqueeze(0)
    if len(kernel) % 2:
        return kernel
    return kernel.unflatten(0, kernel_size).permute(2, 1, 0, 3, 4).flatten(0, 2)


def effective_dilation(dilation: Any) -> Triple:
    """What `dilation` means under the option of that name; ValueError where it says 'error'."""
    spread = make_triple(dilation)
    if spread == (1, 1, 1) or options.dilation == "apply":
        return spread
    if options.dilation == "ignore":
        return 1, 1, 1
    raise ValueError(
        f"dilation={dilation}: torchsparse takes it and computes with 1. Say which is meant: "
        "voxmma.compat.install('torchsparse', dilation='ignore'), or 'apply'"
    )


def map_padding(size: Triple, stride: Triple, dilation: Triple, padding: Triple, how: str) -> Triple:
    """Along x, y, z: input = output * stride - padding + k * dilation for the layers of torchsparse."""
    centre = [(k - 1) // 2 * d for k, d in zip(size, dilation, strict=True)]
    if options.version == 1 or how != "window":
        x, y, z = centre
    elif stride != (1, 1, 1):
        x, y, z = padding
    else:
        x, y, z = centre if math.prod(size) % 2 else (0, 0, 0)
    return x, y, z


def conv3d(
    input: SparseTensor,
    weight: torch.Tensor,
    kernel_size: Any,
    bias: torch.Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    config: Mapping[str, Any] | None = None,
    transposed: bool = False,
    generative: bool = False,
    training: bool = False,
) -> SparseTensor:
    """A convolution with a kernel (K, C_in, C_out), or (C_in, C_out) for K = 1, as torchsparse stores it.

    Stride 1 keeps the voxels of the input. Another stride: every site whose window holds a voxel, from 0
    on and as far as the largest coordinate in the batch (or `spatial_range`) reaches with `padding`; with
    version 1 the cells of the coarser grid where each stride is 1 or the kernel size, else sites from the
    smallest coordinate on. `config`: see conv_config. Transposed: onto the voxels that a strided layer of
    the same kernel and stride started from. `training` is accepted.

    Raises ValueError where there was no such layer, for generative=True, and as
    voxmma.nn.functional.spatially_sparse_conv does.
    """
    size, step, spread = make_triple(kernel_size), make_triple(stride), effective_dilation(dilation)
    inside = config_of(
        turned(size),
        turned(step),
        turned(spread),
        1,
        None,
        transposed,
        False,
        None,
        None,
        None,
        None,
        None,
        "torchsparse.conv3d",
    )
    kernel = kernel_inside(weight, size)
    return run(inside, input, kernel, bias, size, step, spread, make_triple(padding), config, generative)


def run(
    inside: ConvConfig,
    input: SparseTensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    size: Triple,
    stride: Triple,
    dilation: Triple,
    padding: Triple,
    config: Mapping[str, Any] | None,
    generative: bool,
) -> SparseTensor:
    """`conv3d` with arguments along x, y, z that are checked; `inside` holds them turned round, but for the
    padding, and what decides on precision."""
    if generative:
        raise ValueError(
            "generative=True is not there: voxmma.nn.SparseConvTranspose3d(..., generative=True), or "
            "voxmma.compat.MinkowskiEngine's MinkowskiGenerativeConvolutionTranspose"
        )
    caches, source = input._caches, input.coord_set.sites
    caches.cmaps.setdefault(input.stride, _entry(input.coords, input.spatial_range))
    spatial_range, coords = input.spatial_range, input.coords
    target: CoordSet | None
    if inside.transposed and stride != (1, 1, 1):
        finer = make_triple([t // s for t, s in zip(input.stride, stride, strict=True)])
        found = caches.kmaps.get((finer, size, stride, dilation))
        entry = caches.cmaps.get(finer)
        if found is None or entry is None:
            raise ValueError(
                f"no strided layer of kernel_size {size} and stride {stride} ran at tensor stride {finer} "
                "before this transposed one"
            )
        pad, out_stride = found.padding, finer
        coords, spatial_range = (entry, None) if isinstance(entry, torch.Tensor) else entry
        target = coord_set(coords, out_stride)
    else:
        how = rule(config)
        pad = map_padding(size, stride, dilation, padding, how)
        out_stride = make_triple([t * s for t, s in zip(input.stride, stride, strict=True)])
        if stride == (1, 1, 1):
            target = None if pad == padding_triple(None, size, dilation) else source
        else:
            spatial_range = _range(spatial_range, size, stride, padding)
            geometry = Geometry(turned(size), turned(stride), turned(dilation), turned(pad, 0))
            key = (source, geometry, how, turned(padding), spatial_range, _tensor._allow_negative_coordinates)
            target = caches.kmaps.targets.get(key)
            if target is None:
                target = _outputs(source, geometry, how, turned(padding), spatial_range)
                caches.kmaps.targets[key] = target
            coords = coords_of(target, out_stride, caches.kmaps)
            caches.kmaps[input.stride, size, stride, dilation] = LayerMap(pad)
    made = call(_padded(inside, turned(pad, 0)), input.voxels, kernel, bias, coords=target)
    output = SparseTensor(made.feats, coords, out_stride, spatial_range)
    output._caches, output._record = caches, made._record
    output._set = (coords, coords._version, made.coord_set)
    caches.cmaps.setdefault(out_stride, _entry(coords, spatial_range))
    return output


@functools.lru_cache(maxsize=1024)
def _padded(config: ConvConfig, padding: Triple) -> ConvConfig:
    return config if config.padding == padding else replace(config, padding=padding)


def _entry(coords: torch.Tensor, spatial_range: tuple[int, ...] | None) -> Any:
    """A value of cmaps."""
    return coords if options.version == 1 else (coords, spatial_range)


def _range(
    spatial_range: tuple[int, ...] | None, size: Triple, stride: Triple, padding: Triple
) -> tuple[int, ...] | None:
    """`spatial_range` of what a strided layer makes."""
    if spatial_range is None:
        return None
    axes = zip(spatial_range[1:], size, stride, padding, strict=True)
    return (spatial_range[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in axes))


def _outputs(
    source: CoordSet, geometry: Geometry, how: str, padding: Triple, spatial_range: tuple[int, ...] | None
) -> CoordSet:
    """The output set of a strided layer: `geometry` is that of its map, `padding` what clips it."""
    size, stride, dilation, pad = geometry
    whole = all(s in (1, k) for s, k in zip(stride, size, strict=True))
    if how == "cells" or (whole and (options.version == 1 or how == "centred")):
        return downsample(source, stride)
    if source.num == 0:
        return _part(source, source.coords[:, 0] >= 0)
    step = torch.tensor(stride, dtype=torch.int32, device=source.device)
    if options.version == 1:
        # The sites that an offset leads to from a voxel, not from which it leads there: offsets negated.
        back = zip(size, dilation, pad, strict=True)
        x, y, z = ((k - 1) * d - p for k, d, p in back)
        found = windows(source, geometry._replace(padding=(x, y, z)))
        return _part(found, (found.coords[:, 1:] * step >= source.coords[:, 1:].amin(0)).all(1))
    clip = geometry._replace(padding=padding)
    if spatial_range is None:
        last: Sequence[int] = (source.coords[:, 1:].amax(0) + 1).tolist()
        x, y, z = ((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, d, p in zip(last, *clip, strict=True))
        shape = x, y, z
    else:
        shape = turned(spatial_range[1:])
    if min(shape) < 1:
        return _part(source, source.coords[:, 0] < 0)
    if not _tensor._allow_negative_coordinates:
        return Derived(clip, False, shape).make(source)
    found = windows(source, clip)
    least = source.coords[:, 1:].amin(0).tolist()
    first = [math.trunc((n - 2 * p + k - 1) / s) for n, k, s, _, p in zip(least, *clip, strict=True)]
    space = found.coords[:, 1:]
    keep = (space >= torch.tensor(first, device=source.device)).all(1)
    return _part(found, keep & (space < torch.tensor(shape, device=source.device)).all(1))


def _part(found: CoordSet, keep: torch.Tensor) -> CoordSet:
    """The rows of a set where `keep` is True."""
    return CoordSet.trusted(found.coords[keep], found.batch_size)
