"""spconv.pytorch.constants."""

from __future__ import annotations

import torch

from voxmma.compat.spconv.core import missing

PYTORCH_VERSION = [int(part) for part in torch.__version__.partition("+")[0].split(".")[:2]]
"""major and minor version of torch"""


def is_amp_enabled() -> bool:
    """Whether autocast is on for CUDA."""
    return torch.is_autocast_enabled("cuda")


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.constants", name))
