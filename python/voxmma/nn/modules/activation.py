"""Layers that treat every voxel by itself."""

from __future__ import annotations

from typing import Any

from torch import nn

from voxmma.nn.functional import activation


class _OnVoxels(nn.Module):
    """Mixin in front of a torch layer: its forward on the features of Voxels, or on a tensor as it is."""

    def forward(self, x: Any) -> Any:
        return activation.follow(type(self).__name__, super().forward, x)


class ReLU(_OnVoxels, nn.ReLU):
    """torch.nn.ReLU on Voxels."""


class GELU(_OnVoxels, nn.GELU):
    """torch.nn.GELU on Voxels."""


class SiLU(_OnVoxels, nn.SiLU):
    """torch.nn.SiLU on Voxels."""


class LeakyReLU(_OnVoxels, nn.LeakyReLU):
    """torch.nn.LeakyReLU on Voxels."""


class Sigmoid(_OnVoxels, nn.Sigmoid):
    """torch.nn.Sigmoid on Voxels."""


class Tanh(_OnVoxels, nn.Tanh):
    """torch.nn.Tanh on Voxels."""


class Dropout(_OnVoxels, nn.Dropout):
    """torch.nn.Dropout on Voxels: drops single features."""


class Linear(nn.Linear):
    """torch.nn.Linear on Voxels: (N, in_features) -> (N, out_features)."""

    def forward(self, x: Any) -> Any:
        return activation.lift(super().forward, x)


class LayerNorm(_OnVoxels, nn.LayerNorm):
    """torch.nn.LayerNorm on Voxels: over the channels of each voxel."""


class RMSNorm(_OnVoxels, nn.RMSNorm):
    """torch.nn.RMSNorm on Voxels: over the channels of each voxel."""
