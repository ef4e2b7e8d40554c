"""spconv.pytorch.identity."""

from __future__ import annotations

from torch import nn


class Identity(nn.Identity):
    """torch.nn.Identity."""
