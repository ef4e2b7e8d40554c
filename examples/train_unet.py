"""Semantic segmentation of generated rooms with a sparse U-Net, once per precision policy and seed.

    python examples/train_unet.py --policies always_f32,auto_mixed,fp16_sum --steps 200

Rooms, furniture and labels come from `voxmma.data.scenes`. The network (`voxmma.tools.speedbench.SparseUNet`)
goes down two levels with strided convolutions, back up with transposed ones onto the voxels it came from, and
joins each level with what left it.
"""

from __future__ import annotations

import functools
import multiprocessing

import numpy as np
import torch
from torch.nn import functional as F

from common import Task, main
from voxmma import Voxels
from voxmma.data import scenes
from voxmma.tools.speedbench import SparseUNet

Sample = tuple[np.ndarray, np.ndarray, np.ndarray]


def sample(seed: int, rays: int, size: float) -> Sample:
    """A room as voxels (N, 3), mean colour and height of their points (N, 4), and the most frequent label."""
    scene = scenes.room(seed=seed, rooms=1, rays=rays)
    cells = np.floor(scene.points / size).astype(np.int32)
    coords, group, count = np.unique(cells, axis=0, return_inverse=True, return_counts=True)
    group = group.reshape(-1)
    feats = np.zeros((len(coords), 4), np.float32)
    np.add.at(feats, group, scene.features())
    votes = np.zeros((len(coords), len(scenes.CLASSES)), np.int32)
    np.add.at(votes, (group, scene.labels), 1)
    return coords, feats / count[:, None], votes.argmax(1)


def batch_of(samples: list[Sample], device: torch.device) -> tuple[Voxels, torch.Tensor]:
    """Voxels of several rooms and their labels (N,)."""
    coords, feats, labels = zip(*samples, strict=True)
    rows = np.concatenate([np.insert(c, 0, i, axis=1) for i, c in enumerate(coords)])
    voxels = Voxels(torch.from_numpy(rows), torch.from_numpy(np.concatenate(feats)))
    return voxels.to(device), torch.from_numpy(np.concatenate(labels)).to(device)


def task(device: torch.device) -> Task:
    """Batches of rooms, shuffled anew in every pass; held-out rooms have seeds of their own."""
    full = device.type == "cuda"
    rays, size, width = (60_000, 0.05, 32) if full else (4_000, 0.15, 16)
    count, rooms, held_out = (32, 2, 8) if full else (6, 1, 4)

    @functools.cache
    def batches() -> list[tuple[Voxels, torch.Tensor]]:
        make = functools.partial(sample, rays=rays, size=size)
        seeds = range((count + held_out) * rooms)
        if full:
            with multiprocessing.get_context("spawn").Pool() as workers:
                made = workers.map(make, seeds, chunksize=1)
        else:
            made = [make(seed) for seed in seeds]
        return [batch_of(made[i : i + rooms], device) for i in range(0, len(made), rooms)]

    @functools.lru_cache(maxsize=2)
    def order(turn: int) -> list[int]:
        shuffled: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(turn)).tolist()
        return shuffled

    def batch(step: int) -> tuple[Voxels, torch.Tensor]:
        if step < 0:
            return batches()[count + (-1 - step) % held_out]
        return batches()[order(step // count)[step % count]]

    return Task(
        "unet",
        lambda: SparseUNet(4, width, len(scenes.CLASSES)),
        batch,
        F.cross_entropy,
        steps=500 if full else 40,
        held_out=held_out,
        lr=1e-2,
        policies="always_f32,auto_mixed,fp16_promoted,fp16_sum,auto_mixed_bf16",
    )


if __name__ == "__main__":
    main(task)
