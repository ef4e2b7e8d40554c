"""The kernel map that a convolution or pooling call runs over."""

from __future__ import annotations

import torch

from voxmma._types import Triple, as_tensor
from voxmma.dispatch.config import check_window
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import Geometry, KernelMap, map_over
from voxmma.sparse.tensor import Voxels

Target = Voxels | CoordSet | torch.Tensor


def resolve_map(
    x: Voxels,
    geometry: Geometry,
    said_padding: bool,
    transposed: bool = False,
    generative: bool = False,
    coords: Target | None = None,
    max_voxels: int | None = None,
    given: KernelMap | None = None,
) -> tuple[KernelMap, CoordSet, Triple]:
    """The map a layer runs over, its output coordinates and their tensor stride.

    Arguments as in `spatially_sparse_conv`, `given` its `kernel_map`, whose padding counts where the call has
    not said any.
    """
    stride = geometry.stride
    if given is None:
        target = coords.coord_set if isinstance(coords, Voxels) else as_tensor(coords, "coords")
        if isinstance(target, torch.Tensor):
            target = CoordSet(target, x.batch_size)
        if target is not None and not isinstance(target, CoordSet):
            raise TypeError(f"coords must be a Voxels, a CoordSet or a tensor, got {type(coords).__name__}")
        if said_padding and target is None and stride == (1, 1, 1):
            check_window(geometry, generative)
        made = map_over(x._coord_set, geometry, target, transposed, generative, max_voxels)
    else:
        if coords is not None:
            raise ValueError("coords and kernel_map exclude each other: the map leads to its own coordinates")
        _check_map(given, x, geometry, said_padding, transposed)
        made = given
    if made.out_coords is made.in_coords:
        return made, x.coord_set, x.stride
    if isinstance(coords, Voxels):
        return made, made.out_coords, coords.stride
    a, b, c = (-(-t // s) if transposed else t * s for t, s in zip(x.stride, stride, strict=True))
    return made, made.out_coords, (a, b, c)


def _check_map(given: KernelMap, x: Voxels, geometry: Geometry, said_padding: bool, transposed: bool) -> None:
    if not isinstance(given, KernelMap):
        raise TypeError(f"kernel_map must be a voxmma.KernelMap, got {type(given).__name__}")
    for name in ("kernel_size", "dilation", "stride", "padding")[: 4 if said_padding else 3]:
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
