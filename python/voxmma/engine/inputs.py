"""What an engine is given: described when it is compiled, checked in every frame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from voxmma import _surroundings
from voxmma._types import Triple, as_tensor
from voxmma.engine import ops
from voxmma.sparse import segments
from voxmma.sparse.coords import CoordSet, check_columns
from voxmma.sparse.derive import DEFAULT_MAX_VOXELS
from voxmma.sparse.tensor import Voxels

MOST_ROWS = min(segments.BLOCK**ops.LEVELS, DEFAULT_MAX_VOXELS)
"""that an engine takes"""


def is_voxels(value: Any) -> bool:
    return isinstance(value, Voxels)


def _is_sparse(value: Any) -> bool:
    """Voxels, or a pair of tensors with coordinates first."""
    if is_voxels(value):
        return True
    if type(value) is not tuple or len(value) != 2:
        return False
    first = value[0]
    return not isinstance(first, Voxels | tuple | list | dict) and getattr(first, "ndim", 0) == 2


@dataclass(frozen=True)
class Input:
    """A place of the network's inputs: Voxels (`root` its number) or a tensor of one shape."""

    shape: tuple[int, ...]
    """of the tensor, or (channels,)"""
    dtype: torch.dtype
    root: int = -1
    batch_size: int = 0
    stride: Triple = (1, 1, 1)
    spatial_shape: Triple | None = None

    @property
    def sparse(self) -> bool:
        return self.root >= 0


def described(leaves: Sequence[Any]) -> list[Input]:
    found, roots = [], 0
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, Voxels):
            found.append(
                Input((leaf.channels,), leaf.dtype, roots, leaf.batch_size, leaf.stride, leaf.spatial_shape)
            )
            roots += 1
        elif isinstance(leaf, Tensor):
            found.append(Input(tuple(leaf.shape), leaf.dtype))
        else:
            raise TypeError(f"input {place} must be voxmma.Voxels or a tensor, got {type(leaf).__name__}")
    if not roots:
        raise TypeError("example must hold Voxels")
    return found


def as_inputs(example: Any) -> list[Any]:
    return list(example) if isinstance(example, tuple) else [example]


@_surroundings.undisturbed()
def fresh(leaf: Any) -> Any:
    """A copy: of Voxels on a set of their own that nothing was made from yet."""
    if not isinstance(leaf, Voxels):
        return leaf.detach().clone()
    if leaf.coord_set.finer is not None:
        raise ValueError("the input was made by a strided layer: compile from what it was made from")
    copied = CoordSet.trusted(leaf.coords, leaf.batch_size, spatial_shape=leaf.spatial_shape)
    copied._index = replace(leaf.coord_set._index, segments=None)
    return Voxels._make(copied, leaf.feats.detach().clone(), leaf.stride)


def _flat(inputs: Sequence[Any], spec: Any, wanted: Sequence[Input]) -> list[Any]:
    """The inputs flat, pairs for Voxels not taken apart."""
    for is_leaf in (_is_sparse, is_voxels):  # a pair may be two tensors, too
        leaves, its_spec = pytree.tree_flatten(list(inputs), is_leaf=is_leaf)
        if its_spec == spec:
            return list(leaves)
    form = pytree.tree_unflatten(["Voxels" if one.sparse else "tensor" for one in wanted], spec)
    got = pytree.tree_map(
        lambda value: "Voxels" if _is_sparse(value) else "tensor", list(inputs), is_leaf=_is_sparse
    )
    raise TypeError(f"expected inputs built as {form}, got {got}".replace("'", ""))


def check_frame(inputs: Sequence[Any], spec: Any, wanted: Sequence[Input], device: torch.device) -> list[Any]:
    """The inputs flat: (coords, feats, batch size, coordinate set or None) of each sparse one."""
    leaves = _flat(inputs, spec, wanted)
    found: list[Any] = []
    for place, (given, leaf) in enumerate(zip(wanted, leaves, strict=True)):
        name = f"input {place}" if len(leaves) > 1 else "the input"
        if given.sparse:
            found.append(_check_voxels(name, leaf, given, device))
            continue
        tensor = as_tensor(leaf, name)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(leaf).__name__}")
        _same(name, tensor, given.dtype, device)
        if tuple(tensor.shape) != given.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the engine takes {given.shape}")
        found.append(tensor)
    return found


def _check_voxels(name: str, leaf: Any, given: Input, device: torch.device) -> tuple[Any, ...]:
    if isinstance(leaf, Voxels):
        for what, got, most in (
            ("stride", leaf.stride, given.stride),
            ("spatial_shape", leaf.spatial_shape, given.spatial_shape),
        ):
            if got != most:
                raise ValueError(f"{name} has {what} {got}, the engine takes {most}")
        if leaf.batch_size > given.batch_size:
            raise ValueError(f"{name} has {leaf.batch_size} samples, the engine takes {given.batch_size}")
        if leaf.coord_set.repeated is not None:
            raise ValueError(f"{name} has repeated rows: an engine takes distinct voxels")
        made: Any = (leaf.coords, leaf.feats, leaf.batch_size, leaf.coord_set)
    elif isinstance(leaf, tuple) and len(leaf) == 2:
        made = (as_tensor(leaf[0], "coords"), as_tensor(leaf[1], "feats"), given.batch_size, None)
    else:
        raise TypeError(f"{name} must be Voxels or (coords, feats), got {type(leaf).__name__}")
    coords, feats = made[:2]
    check_columns(coords)
    if not isinstance(feats, Tensor):
        raise TypeError(f"feats must be a tensor, got {type(feats).__name__}")
    _same("feats", feats, given.dtype, device)
    if coords.device != device:
        raise ValueError(f"coords is on {coords.device}, the engine on {device}")
    if feats.dim() != 2 or feats.shape[0] != coords.shape[0]:
        raise ValueError(f"feats must be ({coords.shape[0]}, C), got shape {tuple(feats.shape)}")
    if feats.shape[1] != given.shape[0]:
        raise ValueError(f"feats has {feats.shape[1]} channels, the engine takes {given.shape[0]}")
    if len(coords) > MOST_ROWS:
        raise ValueError(f"coords has {len(coords):,} rows, an engine takes {MOST_ROWS:,} at most")
    return made


def _same(name: str, tensor: Tensor, dtype: torch.dtype, device: torch.device) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, the engine takes {dtype}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the engine on {device}")
