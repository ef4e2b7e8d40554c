"""Base of networks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import nn


class MinkowskiNetwork(nn.Module, ABC):
    """A network over `D` spatial axes."""

    def __init__(self, D: int) -> None:
        super().__init__()
        self.D = D

    @abstractmethod
    def forward(self, x: Any) -> Any:
        pass

    def init(self, x: Any) -> None:
        """Does nothing: coordinates of coarser levels are made when they are needed."""
