"""Scenes of benchmarks/networks.py: generated ones, grids of random voxels, and files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

Array = np.ndarray
MARGIN = 16
"""Cells between a scene and the border: no library drops outputs of strided layers there."""


def _room(n: int, rng: np.random.Generator) -> Array:
    """Floor, walls and boxes, as an indoor scan has them: about n voxels."""
    side = max(8, int((n / 3.2) ** 0.5))
    plane = np.stack(np.meshgrid(np.arange(side), np.arange(side), indexing="ij"), -1).reshape(-1, 2)
    zero = np.zeros((len(plane), 1), int)
    walls = plane[plane[:, 1] < side // 2]
    parts = [np.hstack([plane, zero]), np.hstack([walls[:, :1], 0 * walls[:, :1], walls[:, 1:]])]
    parts.append(np.hstack([0 * walls[:, :1], walls]))
    for corner in rng.integers(0, side - side // 6, (12, 2)):
        size = side // 6
        top = corner + plane[(plane < size).all(1)]
        parts.append(np.hstack([top, np.full((len(top), 1), size // 2)]))
    return np.concatenate(parts)


def _street(n: int, rng: np.random.Generator) -> Array:
    """Rings on the ground and walls around it, thinning out with the distance as a LiDAR frame does."""
    rays = int(1.1 * n)
    angle, elevation = rng.uniform(0, 2 * np.pi, rays), rng.choice(np.linspace(0.02, 0.45, 48), rays)
    wall = 150 + 350 * np.abs(np.sin(3 * angle)) ** 3
    reach = np.minimum(35 / np.tan(elevation), wall)
    height = 35 - reach * np.tan(elevation) + rng.normal(0, 0.3, rays)
    points = np.stack([600 + reach * np.cos(angle), 600 + reach * np.sin(angle), height], 1)
    return np.unique(np.maximum(points, 0).astype(int), axis=0)


def _surface(n: int, rng: np.random.Generator) -> Array:
    """A bumpy ball's surface, as 3-D generation sees shapes: about n voxels."""
    radius = (n / 19.0) ** 0.5
    way = rng.normal(size=(12 * n, 3))
    way /= np.linalg.norm(way, axis=1, keepdims=True)
    bumps = 1 + 0.08 * np.sin(7 * way[:, :1]) * np.cos(5 * way[:, 1:2]) + 0.05 * np.sin(11 * way[:, 2:])
    return np.floor(radius * bumps * way).astype(int)


GENERATED = {"room": (_room, 32_000), "street": (_street, 20_000), "surface": (_surface, 130_000)}


def scene(name: str, folder: Path | None, voxels: int | None = None) -> Array:
    """(N, 3) int32 distinct voxels, sorted, at least MARGIN away from 0.

    `grid_N`: N voxels drawn evenly from 200^3 cells (Spira's recipe). `voxels`: about how many a generated
    scene has. FileNotFoundError, KeyError for a scene that is neither generated nor in the folder.
    """
    base, _, coarser = name.partition("/")
    rng = np.random.default_rng(0)
    if base.startswith("grid_"):
        cells = np.sort(rng.choice(200**3, int(base.removeprefix("grid_")), replace=False))
        made = np.stack([cells // 40_000, cells // 200 % 200, cells % 200], 1)
    elif folder is not None:
        with np.load(folder / f"{base}.npz") as file:
            made = file["coords"].astype(np.int64)
    else:
        make, usual = GENERATED[base]
        made = make(voxels or usual, rng)
    made = (made - made.min(0)) // int(coarser or 1)
    return np.unique(made + MARGIN, axis=0).astype(np.int32)
