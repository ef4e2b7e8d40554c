"""Semantic segmentation of generated rooms with sparse convolutions, once per precision policy.

    python examples/train_unet.py --policies always_f32,auto_mixed,fp16_sum --steps 200

Rooms, furniture and labels come from `voxmma.scenes`. The network is a U of dilations (1, 2, 4, 2, 1 with
skip connections) on one grid, short enough to train in seconds: it has no strided layers.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from common import Task, main
from torch import nn
from torch.nn import functional as F

from voxmma import Voxels, scenes
from voxmma.nn import SparseConv3d


class Stage(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, c_in: int, c_out: int, dilation: int) -> None:
        super().__init__()
        self.conv, self.norm = (
            SparseConv3d(c_in, c_out, 3, dilation=dilation, bias=False),
            nn.BatchNorm1d(c_out),
        )

    def forward(self, x: Voxels) -> Voxels:
        y = self.conv(x)
        return y.with_feats(F.relu(self.norm(y.feats)))


class DilatedU(nn.Module):
    """Voxels (N, 4) to logits (N, classes)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([Stage(4, width, 1), Stage(width, width, 2), Stage(width, 2 * width, 4)])
        self.up = nn.ModuleList([Stage(3 * width, width, 2), Stage(2 * width, width, 1)])
        self.head = nn.Linear(width, len(scenes.CLASSES))

    def forward(self, x: Voxels) -> torch.Tensor:
        skips = []
        for stage in self.down:
            x = stage(x)
            skips.append(x)
        for stage, skip in zip(self.up, (skips[1], skips[0]), strict=True):
            x = stage(x.with_feats(torch.cat([x.feats, skip.feats.to(x.feats.dtype)], dim=1)))
        out: torch.Tensor = self.head(x.feats)
        return out


def voxels(scene: scenes.Scene, size: float) -> tuple[Voxels, torch.Tensor]:
    """One voxel per occupied cell: mean colour and height of its points, label of its first point."""
    cells = np.floor(scene.points / size).astype(np.int32)
    coords, first, group = np.unique(cells, axis=0, return_index=True, return_inverse=True)
    group = torch.from_numpy(group.reshape(-1))
    feats = torch.zeros(len(coords), 4).index_add_(0, group, torch.from_numpy(scene.features()))
    feats /= torch.bincount(group)[:, None]
    rows = torch.from_numpy(np.concatenate([np.zeros((len(coords), 1), np.int32), coords], axis=1))
    return Voxels(rows, feats), torch.from_numpy(scene.labels[first].astype(np.int64))


def task(device: torch.device) -> Task:
    """Rooms by seed; held-out rooms have seeds of their own. Small on a CPU."""
    rays, size, width, rooms = (120_000, 0.04, 32, 40) if device.type == "cuda" else (5_000, 0.15, 16, 6)

    @functools.lru_cache(maxsize=64)
    def room(seed: int) -> tuple[Voxels, torch.Tensor]:
        x, labels = voxels(scenes.room(seed=seed, rooms=1, rays=rays), size)
        return x.to(device), labels.to(device)

    def batch(step: int) -> tuple[Voxels, torch.Tensor]:
        return room(step % rooms if step >= 0 else 1000 - step)

    steps = 400 if device.type == "cuda" else 40
    policies = "always_f32,auto_mixed,auto_mixed_bf16,fp16_sum"
    return Task("unet", lambda: DilatedU(width), batch, F.cross_entropy, steps, 5e-3, policies)


if __name__ == "__main__":
    main(task)
