"""What tensors made of one another share."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

import torch

from voxmma._types import Triple
from voxmma.sparse.coords import CoordSet


class TensorCacheMode(enum.Enum):
    """Whether every new tensor has a cache of its own, or all share one until it is cleared."""

    SEPARATE_TENSOR_CACHE = 0
    GLOBAL_TENSOR_CACHE = 1


class LayerMap(NamedTuple):
    """What a strided layer was: a value of `kmaps`."""

    padding: Triple
    """of the map along x, y, z: input = output * stride - padding + k"""


class KernelMaps(dict[Any, Any]):
    """`kmaps`: LayerMaps by (tensor stride, kernel size, stride, dilation); and what goes with them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.coords: dict[CoordSet, torch.Tensor] = {}
        """coordinate tensor of each set that a layer made"""
        self.targets: dict[Any, CoordSet] = {}
        """output sets of strided layers, by input set and geometry"""


class TensorCache:
    """`cmaps`: coordinates by tensor stride, with version 2 as (coordinates, spatial_range); `kmaps`;
    `hashmaps`, which is kept for code that looks at it and stays empty."""

    def __init__(self) -> None:
        self.cmaps: dict[Any, Any] = {}
        self.kmaps = KernelMaps()
        self.hashmaps: dict[Any, Any] = {}


_mode = TensorCacheMode.SEPARATE_TENSOR_CACHE
_shared: TensorCache | None = None


def set_tensor_cache_mode(mode: TensorCacheMode) -> None:
    global _mode
    _mode = TensorCacheMode(mode)


def get_tensor_cache_mode() -> TensorCacheMode:
    return _mode


def get_global_tensor_cache() -> TensorCache | None:
    return _shared


def set_global_tensor_cache(tensor_cache: TensorCache | None) -> None:
    global _shared
    _shared = tensor_cache


def clear_global_tensor_cache() -> None:
    """To be called after each step where all tensors share a cache."""
    set_global_tensor_cache(None)


def cache_for() -> TensorCache:
    """The cache of a new tensor."""
    if _mode == TensorCacheMode.SEPARATE_TENSOR_CACHE:
        return TensorCache()
    if _shared is None:
        set_global_tensor_cache(TensorCache())
    assert _shared is not None
    return _shared
