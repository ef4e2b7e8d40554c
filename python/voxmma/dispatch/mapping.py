"""The kernel map that a convolution or pooling call runs over."""

from __future__ import annotations

from typing import NamedTuple

import torch

from voxmma._types import Triple, as_tensor
from voxmma.dispatch.config import ConvConfig, KernelSize, check_window
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.keyed import inverse_map, keep_map
from voxmma.sparse.maps import KernelMap, map_over
from voxmma.sparse.tensor import Voxels

Target = Voxels | CoordSet | torch.Tensor


class Window(NamedTuple):
    """What a map is resolved by, with the names of `ConvConfig`: of a pooling."""

    geometry: Geometry
    padding: KernelSize | None
    """None: not said"""
    transposed: bool = False
    generative: bool = False
    max_voxels: int | None = None
    output_padding: Triple = (0, 0, 0)
    outputs: str = "windows"
    map_key: str | None = None
    inverse_of: str | None = None


def resolve_map(
    x: Voxels, config: ConvConfig | Window, coords: Target | None = None, given: KernelMap | None = None
) -> tuple[KernelMap, CoordSet, Triple]:
    """The map a layer runs over, its output coordinates and their tensor stride.

    `config`: geometry and outputs of it count here. The others as in `spatially_sparse_conv`, `given` its
    `kernel_map`, whose padding counts where the call has not said any.
    """
    geometry, transposed = config.geometry, config.transposed
    stride = geometry.stride
    if config.inverse_of is not None:
        if coords is not None or given is not None or not transposed:
            raise ValueError("inverse_of goes with transposed=True, and without coords and kernel_map")
        made = inverse_map(config.inverse_of, x.coord_set)
        stride = made.stride
        _check_map(made, x, geometry, ("kernel_size",), transposed)
    elif given is None:
        target = None if coords is None else _target(coords, x.batch_size)
        if config.padding is not None and target is None and stride == (1, 1, 1):
            check_window(geometry, config.generative)
        outputs = config.outputs, config.max_voxels, config.output_padding
        made = map_over(x._coord_set, geometry, target, transposed, config.generative, *outputs)
    else:
        if coords is not None:
            raise ValueError("coords and kernel_map exclude each other: the map leads to its own coordinates")
        said = Geometry._fields if config.padding is not None else ("kernel_size", "stride", "dilation")
        _check_map(given, x, geometry, said, transposed)
        made = given
    if config.map_key is not None and not torch.compiler.is_compiling():
        keep_map(config.map_key, made)
    if made.out_coords is made.in_coords:
        return made, x.coord_set, x.stride
    if isinstance(coords, Voxels):
        return made, made.out_coords, coords.stride
    a, b, c = (-(-t // s) if transposed else t * s for t, s in zip(x.stride, stride, strict=True))
    return made, made.out_coords, (a, b, c)


def _target(coords: Target, batch_size: int) -> CoordSet:
    target = coords.coord_set if isinstance(coords, Voxels) else as_tensor(coords, "coords")
    if isinstance(target, torch.Tensor):
        target = CoordSet.of(target, batch_size)
    if not isinstance(target, CoordSet):
        raise TypeError(f"coords must be a Voxels, a CoordSet or a tensor, got {type(coords).__name__}")
    return target


def _check_map(
    given: KernelMap, x: Voxels, geometry: Geometry, said: tuple[str, ...], transposed: bool
) -> None:
    """`said`: fields of `geometry` that the map has to agree with."""
    if not isinstance(given, KernelMap):
        raise TypeError(f"kernel_map must be a voxmma.KernelMap, got {type(given).__name__}")
    for name in said:
        mine, theirs = getattr(geometry, name), getattr(given, name)
        if theirs != mine:
            raise ValueError(f"kernel_map was built for {name}={theirs}, the call says {mine}")
    if given.device != x.feats.device:
        raise ValueError(f"kernel_map is on {given.device}, x is on {x.feats.device}")
    if not given.in_coords.equal(x.coord_set):
        raise ValueError("kernel_map was built for other coordinates than those of x")
    if given.reverse != transposed and not given.symmetric:
        direction = "transposed" if given.reverse else "not transposed"
        raise ValueError(f"kernel_map is {direction}, the call says transposed={transposed}")
