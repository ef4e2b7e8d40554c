"""Initialisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn


def kaiming_normal_(
    tensor: torch.Tensor, a: float = 0, mode: str = "fan_in", nonlinearity: Any = "leaky_relu"
) -> torch.Tensor:
    """torch.nn.init.kaiming_normal_ for a kernel (K, C_in, C_out): fans are K * C_in and K * C_out. A matrix
    (C_in, C_out) has fan_in C_out, as in MinkowskiEngine."""
    if tensor.dim() < 2 or mode not in ("fan_in", "fan_out"):
        raise ValueError(f"tensor must have two axes or more and mode be fan_in or fan_out, got {mode!r}")
    if tensor.dim() == 2:
        fan_out, fan_in = tensor.shape
    else:
        fan_in, fan_out = len(tensor) * tensor.shape[1], len(tensor) * tensor.shape[2]
    std = nn.init.calculate_gain(nonlinearity, a) / math.sqrt(fan_in if mode == "fan_in" else fan_out)
    with torch.no_grad():
        return tensor.normal_(0, std)
