"""Functions that put several Voxels together, and checkpointing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.utils.checkpoint import checkpoint as _torch_checkpoint

from voxmma.sparse.sets import lookup, union
from voxmma.sparse.tensor import Voxels

# ---- several Voxels ----------------------------------------------------------------------------------------


def cat(*voxels: Voxels) -> Voxels:
    """The channels of all `voxels`, (N, C1 + C2 + ...), in the row order of the first.

    Coordinates must be equal: the same set, or the same voxels in whatever order (see Voxels.align), never
    just as many. ValueError names what differs. `voxmma.batch` is the concatenation of samples.
    """
    first = _first(voxels)
    return first.with_feats(torch.cat([first.align(v, "concatenate") for v in voxels], dim=1))


def add(*voxels: Voxels) -> Voxels:
    """The sum of the features of voxels on equal coordinates, as `+`."""
    total = _first(voxels)
    for other in voxels[1:]:
        total = total + other
    return total


def add_union(*voxels: Voxels) -> Voxels:
    """The sum of the features (N_i, C) on the union of the coordinates, absent voxels counting 0.

    The union is sorted by (batch, x, y, z); voxels that all share one coordinate set keep it, and its order.
    ValueError names the argument whose device, batch size, stride or channels differ from the first.
    """
    first = _first(voxels)
    for i, v in enumerate(voxels):
        for name, mine, other in (
            ("stride", v.stride, first.stride),
            ("channels", v.feats.shape[1], first.feats.shape[1]),
        ):
            if mine != other:
                raise ValueError(f"voxels[{i}] has {name} {mine}, voxels[0] has {other}")
    coords = union(*voxels)
    if all(v.coord_set is coords for v in voxels):
        return add(*voxels)
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in voxels))
    total = torch.zeros((coords.num, first.feats.shape[1]), dtype=dtype, device=first.device)
    for v in voxels:  # rows of one addition are distinct: no order is left to chance
        total = total.index_add(0, lookup(coords, v.coords), v.feats.to(dtype))
    return Voxels(coords, total, stride=first.stride)


def _first(voxels: tuple[Voxels, ...]) -> Voxels:
    if not voxels:
        raise ValueError("voxels must be at least one Voxels")
    for i, v in enumerate(voxels):
        if not isinstance(v, Voxels):
            raise TypeError(f"voxels[{i}] must be a voxmma.Voxels, got {type(v).__name__}")
    return voxels[0]


# ---- memory ------------------------------------------------------------------------------------------------


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """torch.utils.checkpoint.checkpoint for functions of Voxels: recomputes `function(*args)` in backward.

    Without `use_reentrant`, torch's own function takes Voxels as well. With it, torch only sees gradients of
    plain tensors among the arguments and results; this one hands it the features of every Voxels in `args`
    and in the result (nested at will), and coordinates and their maps stay shared. kwargs go to torch.
    """
    leaves, spec = pytree.tree_flatten(args)
    moving = [i for i, leaf in enumerate(leaves) if _is_float(leaf)]
    result: list[Any] = []

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        filled = list(leaves)
        for i, tensor in zip(moving, tensors, strict=True):
            filled[i] = tensor
        out, out_spec = pytree.tree_flatten(function(*pytree.tree_unflatten(filled, spec)))
        if not result:
            result.extend(([None if _is_float(leaf) else leaf for leaf in out], out_spec))
        return tuple(leaf for leaf in out if _is_float(leaf))

    inputs = [leaves[i] for i in moving]
    tensors = iter(_torch_checkpoint(run, *inputs, use_reentrant=use_reentrant, **kwargs))
    kept, out_spec = result
    return pytree.tree_unflatten([next(tensors) if leaf is None else leaf for leaf in kept], out_spec)


def _is_float(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
