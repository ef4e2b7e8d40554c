"""Scans as batches of voxels: augmentation, voxelisation, the order of scans, the loaders.

What is random about a scan follows from (seed, pass over the data, scan) alone: neither from the number of
workers and processes, nor from what was drawn before. So a run may stop anywhere and go on as if it had not.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

import voxmma
from segmentation.formats import IGNORE, DataError, Scan, ScanFolder

Draw = tuple[int, int]
"""a pass over the data, and the number of a scan"""


@dataclass(frozen=True)
class Augment:
    """Random changes of a scan, each off at 0 or False: mirror x and y, turn about z, stretch by up to this
    share, move every point by a normal deviate (metres, cut at twice that), bend smoothly by up to so many
    metres."""

    flip: bool = True
    rotate: bool = True
    scale: float = 0.1
    jitter: float = 0.005
    elastic: float = 0.0

    def __call__(self, scan: Scan, rng: np.random.Generator) -> Scan:
        turn = np.eye(3)
        if self.rotate:
            angle = rng.uniform(0, 2 * np.pi)
            c, s = np.cos(angle), np.sin(angle)
            turn = np.array([[c, -s, 0], [s, c, 0], [0, 0, 1.0]])
        if self.flip:
            turn = turn @ np.diag([*rng.choice([-1.0, 1.0], 2), 1.0])
        factor = rng.uniform(1 - self.scale, 1 + self.scale)
        points = scan.points @ (factor * turn.T)
        if self.jitter:
            points += (self.jitter * rng.standard_normal(points.shape)).clip(
                -2 * self.jitter, 2 * self.jitter
            )
        if self.elastic:
            points += bend(points, self.elastic, rng)
        columns = dict(scan.columns)
        if "normal" in columns:
            columns["normal"] = (columns["normal"] @ turn.T).astype(np.float32)
        return Scan(scan.name, points.astype(np.float32), columns, scan.labels)


def bend(points: np.ndarray, amount: float, rng: np.random.Generator, cells: int = 6) -> np.ndarray:
    """A smooth field of shifts (N, 3): uniform in +-amount at the nodes of a grid, linear in between."""
    field = torch.from_numpy(rng.uniform(-amount, amount, (1, 3, cells, cells, cells)))
    low, high = points.min(0), points.max(0)
    place = torch.from_numpy(2 * (points - low) / np.maximum(high - low, 1e-6) - 1)
    place = place.double().view(1, -1, 1, 1, 3)
    return torch.nn.functional.grid_sample(field, place, align_corners=True).view(3, -1).T.numpy()


def crop(scan: Scan, most: int, rng: np.random.Generator) -> Scan:
    """The `most` points that are nearest to a random one."""
    if len(scan.points) <= most:
        return scan
    centre = scan.points[rng.integers(len(scan.points))]
    kept = np.argpartition(((scan.points - centre) ** 2).sum(1), most)[:most]
    labels = None if scan.labels is None else scan.labels[kept]
    return Scan(scan.name, scan.points[kept], {k: v[kept] for k, v in scan.columns.items()}, labels)


def features_of(scan: Scan, names: Sequence[str], dtype: torch.dtype) -> torch.Tensor:
    """(N, C) of the named columns; 'coord' are the points."""
    columns = {"coord": scan.points, **scan.columns}
    for name in names:
        if name not in columns:
            raise DataError(f"{scan.name} has no {name}, only {', '.join(columns)}; say so with --features")
    return torch.from_numpy(np.concatenate([columns[name] for name in names], 1)).to(dtype)


def majority(labels: torch.Tensor, rows: torch.Tensor, voxels: int, classes: int) -> torch.Tensor:
    """The most frequent class of the points of each voxel, (voxels,) int64; IGNORE where no point has one."""
    kept = labels != IGNORE
    votes = torch.bincount(rows[kept] * classes + labels[kept], minlength=voxels * classes)
    votes = votes.view(voxels, classes)
    return torch.where(votes.sum(1) > 0, votes.argmax(1), IGNORE)


@dataclass
class TrainingScans(Dataset[tuple[voxmma.Voxels, torch.Tensor]]):
    """(pass, scan) -> Voxels and the class of each, (N,) int64."""

    folder: ScanFolder
    voxel_size: float
    features: Sequence[str]
    augment: Augment
    max_points: int = 0
    seed: int = 0
    dtype: torch.dtype = torch.float32

    def __getitem__(self, draw: Draw) -> tuple[voxmma.Voxels, torch.Tensor]:
        turn, number = draw
        rng = np.random.default_rng([self.seed, turn, number])  # takes integers of any size
        scan = self.folder.read(number)
        if scan.labels is None:
            raise DataError(f"{self.folder.scans[number]}: no labels, which training needs")
        if self.max_points:
            scan = crop(scan, self.max_points, rng)
        scan = self.augment(scan, rng)
        voxels, rows = voxelise(scan, self.voxel_size, self.features, self.dtype)
        labels = torch.from_numpy(scan.labels)
        return voxels, majority(labels, rows, voxels.num_voxels, len(self.folder.classes))


@dataclass
class EvaluationScans(Dataset[tuple[int, voxmma.Voxels, torch.Tensor, torch.Tensor]]):
    """Place -> number of the scan, its Voxels, the voxel of each point (P,) and the class of each point (P,).

    Without augmentation. Places beyond the scans begin anew: every process gets as many.
    """

    folder: ScanFolder
    voxel_size: float
    features: Sequence[str]
    dtype: torch.dtype = torch.float32

    def __getitem__(self, place: int) -> tuple[int, voxmma.Voxels, torch.Tensor, torch.Tensor]:
        number = place % len(self.folder)
        scan = self.folder.read(number)
        voxels, rows = voxelise(scan, self.voxel_size, self.features, self.dtype)
        labels = np.full(len(scan.points), IGNORE) if scan.labels is None else scan.labels
        return place, voxels, rows, torch.from_numpy(labels)


def voxelise(
    scan: Scan, voxel_size: float, features: Sequence[str], dtype: torch.dtype
) -> tuple[voxmma.Voxels, torch.Tensor]:
    """Voxels with the mean features of their points, and the voxel of each point."""
    feats = features_of(scan, features, dtype)
    try:
        return voxmma.sparse_quantize(torch.from_numpy(scan.points), feats, voxel_size, batch_size=1)
    except ValueError as error:  # a point too far away
        raise DataError(f"{scan.name}: {error}") from None


class Draws(Sampler[list[Draw]]):
    """The micro-batches of one process, from step `start` on and without an end, as lists of draws.

    All processes together take `batch` scans a step from one endless row of shuffled passes over the data,
    in `accumulate` portions. A step's scans do not depend on the number of processes.
    """

    def __init__(
        self, scans: int, batch: int, accumulate: int, rank: int, world: int, seed: int, start: int
    ) -> None:
        self.scans, self.batch, self.accumulate = scans, batch, accumulate
        self.rank, self.world, self.seed, self.start = rank, world, seed, start
        self.share = batch // (accumulate * world)

    def __iter__(self) -> Iterator[list[Draw]]:
        step = self.start
        while True:
            for portion in range(self.accumulate):
                first = step * self.batch + (portion * self.world + self.rank) * self.share
                yield [self.draw(place) for place in range(first, first + self.share)]
            step += 1

    def draw(self, place: int) -> Draw:
        """What stands at a place of the endless row."""
        turn, number = divmod(place, self.scans)
        return turn, int(shuffled(self.scans, self.seed, turn)[number])


@functools.lru_cache(maxsize=2)
def shuffled(scans: int, seed: int, turn: int) -> np.ndarray:
    """The order of the scans in a pass."""
    return np.random.default_rng([seed, turn]).permutation(scans)


def training_loader(data: TrainingScans, draws: Draws, workers: int, pin: bool) -> DataLoader[Any]:
    """Batches (Voxels, classes), without an end."""
    return DataLoader(
        data,
        batch_sampler=draws,
        num_workers=workers,
        collate_fn=voxmma.collate,
        pin_memory=pin,
        generator=torch.Generator(),  # else a loader draws from torch's
    )


def evaluation_loader(data: EvaluationScans, rank: int, world: int, workers: int) -> DataLoader[Any]:
    """Single scans: every world-th, as many in every process."""
    rounds = -(-len(data.folder) // world)
    places = [world * turn + rank for turn in range(rounds)]
    return DataLoader(data, batch_size=None, sampler=places, num_workers=workers, generator=torch.Generator())
