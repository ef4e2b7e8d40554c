"""Coordinate sets of other libraries' coordinate tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from voxmma.sparse.coords import CoordSet

_lock = threading.Lock()
_known: WeakIdKeyDictionary = WeakIdKeyDictionary()


def on_host(value: Any) -> torch.Tensor:
    """A tensor as it is; numpy arrays and numbers on the CPU, whatever torch's default device is."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.as_tensor(value, device="cpu", dtype=None)


def version(coords: torch.Tensor) -> int:
    """Changes with every write into a tensor, but for those of inference mode, where torch counts none."""
    return -1 if coords.is_inference() else coords._version


def known(coords: torch.Tensor, kind: Hashable, make: Callable[[], CoordSet]) -> CoordSet:
    """The set that `coords` was turned into, as long as it lives and nobody writes into it; else `make()`.

    `kind` is whatever else decides what the set is.
    """
    with _lock:
        found = _known.get(coords)
    if found is not None and found[0] == version(coords) and found[1] == kind:
        return found[2]
    made = make()
    remember(coords, kind, made)
    return made


def remember(coords: torch.Tensor, kind: Hashable, made: CoordSet) -> None:
    """Tells `known` that `coords` stands for a set, which must not hold it."""
    with _lock:
        _known[coords] = (version(coords), kind, made)


def distinct(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Which of the rows (N, D) come first of their kind, in their order, int64 (M,), and for each row its
    place among these, int64 (N,). None where no row comes twice. Waits for a GPU."""
    found, inverse = torch.unique(rows, dim=0, return_inverse=True)
    if len(found) == len(rows):
        return None
    numbers = torch.arange(len(rows), device=rows.device)
    first = torch.full((len(found),), len(rows), dtype=torch.int64, device=rows.device)
    first = first.scatter_reduce(0, inverse, numbers, "amin")
    first, order = torch.sort(first)
    return first, torch.argsort(order)[inverse]


def whole(value: Any, name: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Coordinates as integers: floats are rounded down."""
    value = on_host(value)
    if value.dim() != 2:
        raise ValueError(f"{name} must be (N, columns), got shape {tuple(value.shape)}")
    return (value.floor() if value.is_floating_point() else value).to(dtype)
