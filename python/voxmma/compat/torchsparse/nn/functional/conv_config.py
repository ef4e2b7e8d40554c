"""Configuration of convolutions: accepted, and where it changes results, followed.

`kmap_mode` "hashmap" centres strided kernels as those of stride 1, and its `downsample_mode` "minkowski"
leads to the cells of the coarser grid; "spconv" is the default. The rest (dataflow, ifsort, split_mask_num,
split_mask_num_bwd, epsilon, mm_thresh, FOD_fusion) chooses kernels in torchsparse and nothing here: the tile
table and voxmma.tune do that.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

__all__ = [
    "ConvMode",
    "Dataflow",
    "get_conv_mode",
    "get_downsample_mode",
    "get_kmap_mode",
    "set_conv_mode",
    "set_downsample_mode",
    "set_kmap_mode",
]

KMAP_MODES = ("hashmap_on_the_fly", "hashmap")
DOWNSAMPLE_MODES = ("spconv", "minkowski")


class Dataflow(enum.Enum):
    ImplicitGEMM = 0
    GatherScatter = 1
    FetchOnDemand = 2
    CodedCSR = 3


class ConvMode(enum.Enum):
    mode0 = 0
    mode1 = 1
    mode2 = 2


class ConvConfig(dict[str, Any]):
    """A configuration whose entries are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


_modes: dict[str, Any] = {"kmap": KMAP_MODES[0], "downsample": DOWNSAMPLE_MODES[0], "conv": ConvMode.mode0}
_global: ConvConfig | None = None


def _checked(value: str, allowed: tuple[str, ...], name: str) -> str:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
    return value


def set_kmap_mode(kmap_mode: str) -> None:
    _modes["kmap"] = _checked(kmap_mode, KMAP_MODES, "kmap_mode")


def get_kmap_mode() -> str:
    return _modes["kmap"]


def set_downsample_mode(downsample_mode: str) -> None:
    _modes["downsample"] = _checked(downsample_mode, DOWNSAMPLE_MODES, "downsample_mode")


def get_downsample_mode() -> str:
    return _modes["downsample"]


def set_conv_mode(conv_mode: Any) -> None:
    _modes["conv"] = ConvMode(conv_mode)


def get_conv_mode() -> ConvMode:
    return _modes["conv"]


def get_default_conv_config(conv_mode: Any = None, training: bool = False) -> ConvConfig:
    """A configuration with the modes that are set."""
    return ConvConfig(
        dataflow=Dataflow.ImplicitGEMM,
        ifsort=False,
        kmap_mode=get_kmap_mode(),
        downsample_mode=get_downsample_mode(),
        split_mask_num=1,
        split_mask_num_bwd=3,
        epsilon=0.0,
        mm_thresh=0,
        FOD_fusion=True,
    )


def set_global_conv_config(conv_config: Mapping[str, Any] | None) -> None:
    """What layers without a configuration of their own use."""
    global _global
    _global = None if conv_config is None else ConvConfig(get_default_conv_config() | dict(conv_config))


def get_global_conv_config() -> ConvConfig | None:
    return _global


def clear_global_conv_config() -> None:
    set_global_conv_config(None)


def rule(config: Mapping[str, Any] | None) -> str:
    """What strided layers do under a configuration: 'window', 'centred' or 'cells'."""
    found = config or _global
    if not found:
        if _modes["kmap"] == KMAP_MODES[0]:
            return "window"
        found = {}
    kmap = _checked(found.get("kmap_mode", get_kmap_mode()), KMAP_MODES, "kmap_mode")
    mode = found.get("downsample_mode", get_downsample_mode())
    if kmap == KMAP_MODES[0]:
        return "window"
    return "cells" if _checked(mode, DOWNSAMPLE_MODES, "downsample_mode") == "minkowski" else "centred"
