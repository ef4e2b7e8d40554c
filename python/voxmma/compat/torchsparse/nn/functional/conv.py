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
from voxmma.compat.sets import version
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
from voxmma.sparse.geometry import Geometry, padding_triple
from voxmma.sparse.sets import downsample

__all__ = ["conv3d"]


def kernel_inside(kernel: torch.Tensor, kernel_size: Triple) -> torch.Tensor:
    """(K, C_in, C_out), offsets as voxmma.nn has them for columns turned round: an odd K is stored with x
    fastest, which is that, an even one with z fastest."""
    if kernel.dim() == 2:
        return kernel.unsqueeze(0)
    if len(kernel) % 2:
        return kernel
    return kernel.unflatten(0, kernel_size).permute(2, 1, 0, 3, 4).reshape(kernel.shape)


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


class Shape:
    """What a layer is along x, y, z, and turned round. Made once (`shape_of`), compared by identity."""

    def __init__(
        self, size: Triple, stride: Triple, dilation: Triple, padding: Triple, how: str, version: int
    ) -> None:
        self.size, self.stride, self.dilation, self.padding = size, stride, dilation, padding
        self.how = how
        self.keeps = stride == (1, 1, 1)
        """whether the voxels stay"""
        centre = [(k - 1) // 2 * d for k, d in zip(size, dilation, strict=True)]
        if version == 1 or how != "window":
            x, y, z = centre
        elif self.keeps:
            x, y, z = centre if math.prod(size) % 2 else (0, 0, 0)
        else:
            x, y, z = padding
        self.map_padding = x, y, z
        """input = output * stride - map_padding + k * dilation"""
        self.usual = self.map_padding == padding_triple(None, size, dilation)
        self.geometry = Geometry(turned(size), turned(stride), turned(dilation), turned(self.map_padding, 0))
        self.clip = self.geometry._replace(padding=turned(padding, 0))
        """of the windows that clip what a strided layer makes"""


shape_of = functools.lru_cache(maxsize=1024)(Shape)


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
    shape = shape_of(size, step, spread, make_triple(padding), rule(config), options.version)
    geometry = shape.geometry
    sizes = geometry.kernel_size, geometry.stride, geometry.dilation
    inside = config_of(
        *sizes, 1, geometry.padding, transposed, False, None, None, None, None, None, "torchsparse.conv3d"
    )
    return run(inside, input, kernel_inside(weight, size), bias, shape, generative)


def run(
    inside: ConvConfig,
    input: SparseTensor,
    kernel: torch.Tensor,
    bias: torch.Tensor | None,
    shape: Shape,
    generative: bool,
) -> SparseTensor:
    """`conv3d` of a shape; `inside` holds it turned round, but for the padding, and what decides on
    precision."""
    if generative:
        raise ValueError(
            "generative=True is not there: voxmma.nn.SparseConvTranspose3d(..., generative=True), or "
            "voxmma.compat.MinkowskiEngine's MinkowskiGenerativeConvolutionTranspose"
        )
    caches, start, stride = input._caches, input.stride, shape.stride
    if start not in caches.cmaps:
        caches.cmaps[start] = _entry(input.coords, input.spatial_range)
    spatial_range, coords = input.spatial_range, input.coords
    padding = shape.geometry.padding
    target: CoordSet | None
    if shape.keeps:
        out_stride = start
        target = None if shape.usual else input.coord_set
    elif inside.transposed:
        finer = make_triple([t // s for t, s in zip(start, stride, strict=True)])
        found = caches.kmaps.get((finer, shape.size, stride, shape.dilation))
        entry = caches.cmaps.get(finer)
        if found is None or entry is None:
            raise ValueError(
                f"no strided layer of kernel_size {shape.size} and stride {stride} ran at tensor stride "
                f"{finer} before this transposed one"
            )
        padding, out_stride = turned(found.padding, 0), finer
        coords, spatial_range = (entry, None) if isinstance(entry, torch.Tensor) else entry
        target = coord_set(coords, out_stride)
    else:
        out_stride = start[0] * stride[0], start[1] * stride[1], start[2] * stride[2]
        if spatial_range is not None:
            spatial_range = _range(spatial_range, shape)
        source = input.coord_set.sites
        key = (source, shape, spatial_range, _tensor._allow_negative_coordinates)
        target = caches.kmaps.targets.get(key)
        if target is None:
            target = caches.kmaps.targets[key] = _outputs(source, shape, spatial_range)
        coords = coords_of(target, out_stride, caches.kmaps)
        caches.kmaps[start, shape.size, stride, shape.dilation] = LayerMap(shape.map_padding)
    if inside.padding != padding:
        inside = _padded(inside, padding)
    made = call(inside, input.voxels, kernel, bias, coords=target)
    if out_stride not in caches.cmaps:
        caches.cmaps[out_stride] = _entry(coords, spatial_range)
    found_set = (coords, version(coords), made._coord_set)
    return SparseTensor._make(made._feats, coords, out_stride, spatial_range, caches, found_set, made._record)


@functools.lru_cache(maxsize=1024)
def _padded(config: ConvConfig, padding: Triple) -> ConvConfig:
    return config if config.padding == padding else replace(config, padding=padding)


def _entry(coords: torch.Tensor, spatial_range: tuple[int, ...] | None) -> Any:
    """A value of cmaps."""
    return coords if options.version == 1 else (coords, spatial_range)


def _range(spatial_range: tuple[int, ...], shape: Shape) -> tuple[int, ...]:
    """`spatial_range` of what a strided layer makes."""
    axes = zip(spatial_range[1:], shape.size, shape.stride, shape.padding, strict=True)
    return (spatial_range[0], *((n + 2 * p - k) // s + 1 for n, k, s, p in axes))


def _outputs(source: CoordSet, layer: Shape, spatial_range: tuple[int, ...] | None) -> CoordSet:
    """The output set of a strided layer."""
    size, stride, dilation, pad = layer.geometry
    whole = all(s in (1, k) for s, k in zip(stride, size, strict=True))
    if layer.how == "cells" or (whole and (options.version == 1 or layer.how == "centred")):
        return downsample(source, stride)
    if source.num == 0:
        return _part(source, source.coords[:, 0] >= 0)
    step = torch.tensor(stride, dtype=torch.int32, device=source.device)
    if options.version == 1:
        # The sites that an offset leads to from a voxel, not from which it leads there: offsets negated.
        back = zip(size, dilation, pad, strict=True)
        x, y, z = ((k - 1) * d - p for k, d, p in back)
        found = windows(source, layer.geometry._replace(padding=(x, y, z)))
        return _part(found, (found.coords[:, 1:] * step >= source.coords[:, 1:].amin(0)).all(1))
    clip = layer.clip
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
    keep = (space >= torch.tensor(first, dtype=torch.int32, device=source.device)).all(1)
    return _part(found, keep & (space < torch.tensor(shape, dtype=torch.int32, device=source.device)).all(1))


def _part(found: CoordSet, keep: torch.Tensor) -> CoordSet:
    """The rows of a set where `keep` is True."""
    return CoordSet.trusted(found.coords[keep], found.batch_size)
