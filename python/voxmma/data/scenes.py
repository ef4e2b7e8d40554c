"""Scenes for the demo, the benchmarks and the tests, generated from a seed: nothing is downloaded.

`room` and `lidar` build a small world of boxes, upright cylinders and spheres and look at it along rays, so
what they return has what real scans have: occlusion, density that falls with distance, range noise, rings.
`surface` returns the voxels which a wavy closed surface passes through, as networks for 3-D generation see
them.

The scan that ships with the package, `data/scan.npz`, is `scan()` below, rounded to millimetres; `python -m
voxmma.data.scenes FILE` writes it again. It is part of this project and under its licence.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Class names; a point's label is an index into this tuple.
CLASSES = (
    "floor",
    "wall",
    "ceiling",
    "table",
    "chair",
    "cabinet",
    "lamp",
    "object",
    "vehicle",
    "vegetation",
    "pole",
)

_COLORS = np.array(
    [
        [148, 119, 92],
        [214, 208, 196],
        [236, 236, 232],
        [131, 84, 50],
        [58, 84, 128],
        [178, 150, 112],
        [232, 200, 96],
        [176, 62, 54],
        [96, 104, 120],
        [74, 118, 62],
        [128, 128, 132],
    ],
    dtype=np.float64,
)


@dataclass(frozen=True)
class Scene:
    """A labelled point cloud. All arrays have N rows."""

    name: str
    points: Array
    """(N, 3) float32, metres"""
    normals: Array
    """(N, 3) float32, unit length, towards the sensor"""
    colors: Array
    """(N, 3) uint8"""
    labels: Array
    """(N,) uint8, an index into CLASSES"""

    def features(self) -> Array:
        """(N, 4) float32: colour in [0, 1] and height above the lowest point in metres."""
        height = self.points[:, 2:] - self.points[:, 2].min(initial=0)
        return np.concatenate([self.colors / np.float32(255), height], axis=1).astype(np.float32)

    def coords(self, voxel_size: float) -> Array:
        """(M, 4) int32 batch, x, y, z of the occupied voxels; see `voxelise`."""
        return voxelise(self.points, voxel_size)


def voxelise(points: Array, voxel_size: float) -> Array:
    """Occupied voxels of points (N, 3): (M, 4) int32, batch 0, distinct, sorted, half-open by floor."""
    if not voxel_size > 0:
        raise ValueError(f"voxel_size must be positive, got {voxel_size}")
    cells = np.unique(np.floor(np.asarray(points, dtype=np.float64) / voxel_size).astype(np.int32), axis=0)
    return np.concatenate([np.zeros((len(cells), 1), dtype=np.int32), cells], axis=1)


# ---- solids and rays ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Solid:
    """A box turned about the vertical, an upright cylinder, or a sphere."""

    kind: str
    """'box', 'cylinder' or 'sphere'"""
    center: tuple[float, float, float]
    half: tuple[float, float, float]
    """box: half extents. cylinder: radius, radius, half height. sphere: radius three times."""
    label: int
    yaw: float = 0.0

    def hit(self, origin: Array, direction: Array) -> tuple[Array, Array]:
        """Distance (R,) to where each ray enters, inf if never or from inside, and normals (R, 3)."""
        c, s = np.cos(self.yaw), np.sin(self.yaw)
        turn = np.array([[c, -s, 0.0], [s, c, 0.0], [0.0, 0.0, 1.0]])
        o, d = (origin - np.asarray(self.center)) @ turn, direction @ turn
        d = np.where(np.abs(d) < 1e-12, 1e-12, d)
        half = np.asarray(self.half)
        near, far = (-np.sign(d) * half - o) / d, (np.sign(d) * half - o) / d  # the slabs of the bounding box
        if self.kind == "sphere":
            near, far = _quadratic(o, d, half[0])
            normal_axis = np.full(len(o), 3)
        elif self.kind == "cylinder":
            side_near, side_far = _quadratic(o[:, :2], d[:, :2], half[0])
            normal_axis = np.where(side_near > near[:, 2], 3, 2)
            near, far = np.maximum(side_near, near[:, 2]), np.minimum(side_far, far[:, 2])
        else:
            normal_axis = near.argmax(axis=1)
            near, far = near.max(axis=1), far.min(axis=1)
        entered = (near < far) & (near > 1e-6)
        distance = np.where(entered, near, np.inf)
        at = o + np.where(entered, near, 0.0)[:, None] * d
        round_normal = at / half[0]
        if self.kind == "cylinder":
            round_normal[:, 2] = 0.0
        flat_normal = -np.sign(d) * (np.arange(3) == normal_axis[:, None])
        normal = np.where(normal_axis[:, None] == 3, round_normal, flat_normal)
        return distance, normal @ turn.T


def _quadratic(o: Array, d: Array, radius: float) -> tuple[Array, Array]:
    """Both crossings of rays with the circle or sphere of that radius around 0; (inf, -inf) if none."""
    a, b, c = (d * d).sum(axis=1), (o * d).sum(axis=1), (o * o).sum(axis=1) - radius**2
    root = np.sqrt(np.maximum(b * b - a * c, 0.0))
    missed = b * b - a * c <= 0
    return np.where(missed, np.inf, (-b - root) / a), np.where(missed, -np.inf, (-b + root) / a)


def _look(
    name: str,
    solids: Sequence[Solid],
    origin: Array,
    direction: Array,
    noise: float,
    max_range: float,
    rng: np.random.Generator,
) -> Scene:
    """What sensors at `origin` (R, 3) see along unit vectors `direction` (R, 3); noise in metres."""
    best = np.full(len(origin), np.inf)
    label = np.zeros(len(origin), dtype=np.uint8)
    normal = np.zeros((len(origin), 3))
    for solid in solids:
        distance, facing = solid.hit(origin, direction)
        closer = distance < best
        best[closer], label[closer], normal[closer] = distance[closer], solid.label, facing[closer]
    seen = best < max_range
    best, label, normal = best[seen], label[seen], normal[seen]
    jitter = rng.normal(0.0, noise, len(best)) * (1 + 0.1 * best)
    points = origin[seen] + (best + jitter)[:, None] * direction[seen]
    light = np.array([0.4, 0.3, 0.866])
    shade = 0.55 + 0.45 * np.abs(normal @ light)[:, None]
    colors = _COLORS[label] * shade + rng.normal(0.0, 6.0, (len(label), 3))
    return Scene(
        name,
        points.astype(np.float32),
        normal.astype(np.float32),
        colors.clip(0, 255).astype(np.uint8),
        label,
    )


# ---- indoor ------------------------------------------------------------------------------------------------


def room(seed: int = 0, rooms: int = 2, rays: int = 60_000, noise: float = 0.003) -> Scene:
    """Furnished rooms in a row, with doorways, scanned from three places in each.

    Args:
        seed: everything random follows from it.
        rooms: number of rooms, each about 4.5 x 4 x 2.7 m.
        rays: rays cast in all; nearly every one returns a point.
        noise: standard deviation of the range in metres, at range 0.
    """
    rng = np.random.default_rng(seed)
    widths, depth, height, wall = rng.uniform(4.0, 5.0, rooms), rng.uniform(3.8, 4.6), 2.7, 0.06
    total = float(widths.sum())
    floor_center = (total / 2, depth / 2)
    solids = [
        _box((*floor_center, -0.05), (total / 2 + 0.2, depth / 2 + 0.2, 0.05), "floor"),
        _box((*floor_center, height + 0.05), (total / 2 + 0.2, depth / 2 + 0.2, 0.05), "ceiling"),
        _box((total / 2, -wall, height / 2), (total / 2, wall, height / 2), "wall"),
        _box((total / 2, depth + wall, height / 2), (total / 2, wall, height / 2), "wall"),
        _box((-wall, depth / 2, height / 2), (wall, depth / 2, height / 2), "wall"),
        _box((total + wall, depth / 2, height / 2), (wall, depth / 2, height / 2), "wall"),
    ]
    eyes = []
    left = 0.0
    for index, width in enumerate(widths):
        if index:  # the wall to the room before, with a doorway
            door = rng.uniform(0.8, depth - 1.7)
            solids += [
                _box((left, door / 2, height / 2), (wall, door / 2, height / 2), "wall"),
                _box(
                    (left, (door + 0.9 + depth) / 2, height / 2),
                    (wall, (depth - door - 0.9) / 2, height / 2),
                    "wall",
                ),
                _box((left, door + 0.45, (2.1 + height) / 2), (wall, 0.45, (height - 2.1) / 2), "wall"),
            ]
        solids += _furniture(rng, left, float(width), float(depth))
        for _ in range(3):
            eyes.append(
                (left + rng.uniform(0.3, 0.7) * width, rng.uniform(0.3, 0.7) * depth, rng.uniform(1.3, 1.8))
            )
        left += float(width)
    count = -(-rays // len(eyes))
    origin = np.repeat(np.array(eyes), count, axis=0)[:rays]
    direction = rng.normal(size=(rays, 3))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return _look(f"room-{seed}", solids, origin, direction, noise, 30.0, rng)


def _label(name: str) -> int:
    return CLASSES.index(name)


def _box(center: Sequence[float], half: Sequence[float], label: str, yaw: float = 0.0) -> Solid:
    cx, cy, cz = (float(v) for v in center)
    hx, hy, hz = (float(v) for v in half)
    return Solid("box", (cx, cy, cz), (hx, hy, hz), _label(label), yaw)


def _cylinder(x: float, y: float, bottom: float, top: float, radius: float, label: str) -> Solid:
    return Solid("cylinder", (x, y, (bottom + top) / 2), (radius, radius, (top - bottom) / 2), _label(label))


def _sphere(x: float, y: float, z: float, radius: float, label: str) -> Solid:
    return Solid("sphere", (x, y, z), (radius, radius, radius), _label(label))


def _furniture(rng: np.random.Generator, left: float, width: float, depth: float) -> list[Solid]:
    """A table with chairs and things on it, cabinets along a wall, a sofa and a lamp."""
    solids = []
    tx, ty, yaw = left + width * rng.uniform(0.4, 0.6), depth * rng.uniform(0.42, 0.58), rng.uniform(0, np.pi)
    along, across = np.array([np.cos(yaw), np.sin(yaw)]), np.array([-np.sin(yaw), np.cos(yaw)])
    solids.append(_box((tx, ty, 0.73), (0.7, 0.4, 0.02), "table", yaw))
    for i in (-1, 1):
        for j in (-1, 1):
            leg = np.array([tx, ty]) + 0.62 * i * along + 0.33 * j * across
            solids.append(_cylinder(leg[0], leg[1], 0.0, 0.71, 0.025, "table"))
            seat = np.array([tx, ty]) + 0.35 * i * along + 0.62 * j * across
            back = seat + 0.2 * j * across
            solids.append(_box((*seat, 0.45), (0.21, 0.2, 0.02), "chair", yaw))
            solids.append(_box((*back, 0.7), (0.2, 0.015, 0.25), "chair", yaw))
            for k in (-1, 1):
                for m in (-1, 1):
                    foot = seat + 0.18 * k * along + 0.17 * m * across
                    solids.append(_cylinder(foot[0], foot[1], 0.0, 0.43, 0.015, "chair"))
    for _ in range(4):
        x, y = np.array([tx, ty]) + rng.uniform(-0.5, 0.5) * along + rng.uniform(-0.25, 0.25) * across
        size = rng.uniform(0.04, 0.1)
        thing = rng.integers(3)
        if thing == 0:
            solids.append(_sphere(x, y, 0.75 + size, size, "object"))
        elif thing == 1:
            solids.append(_cylinder(x, y, 0.75, 0.75 + 2.5 * size, size / 2, "object"))
        else:
            solids.append(
                _box((x, y, 0.75 + size / 2), (size, 1.4 * size, size / 2), "object", rng.uniform(0, np.pi))
            )
    x = left + 0.5
    while x < left + width - 0.9:  # cabinets of different height along the back wall
        half, tall = rng.uniform(0.25, 0.45), rng.uniform(0.7, 2.0)
        solids.append(_box((x + half, depth - 0.25, tall / 2), (half - 0.01, 0.22, tall / 2), "cabinet"))
        x += 2 * half + rng.choice([0.0, 0.7])
    sx = left + width * rng.uniform(0.35, 0.65)
    solids.append(_box((sx, 0.45, 0.21), (0.8, 0.4, 0.21), "chair"))
    solids.append(_box((sx, 0.14, 0.62), (0.8, 0.1, 0.2), "chair"))
    for side in (-1, 1):
        solids.append(_box((sx + side * 0.87, 0.45, 0.3), (0.09, 0.4, 0.3), "chair"))
    lx, ly = left + width - 0.45, 0.4
    solids += [
        _cylinder(lx, ly, 0.0, 0.03, 0.16, "lamp"),
        _cylinder(lx, ly, 0.03, 1.5, 0.02, "lamp"),
        _sphere(lx, ly, 1.6, 0.17, "lamp"),
    ]
    return solids


# ---- outdoor -----------------------------------------------------------------------------------------------


def lidar(
    seed: int = 0, rings: int = 32, azimuths: int = 1_090, noise: float = 0.01, max_range: float = 70.0
) -> Scene:
    """One sweep of a spinning LiDAR 1.8 m above a street with cars, buildings, poles and trees.

    Args:
        seed: everything random follows from it.
        rings: beams, spread from -25 to +5 degrees of elevation.
        azimuths: directions of one turn.
        noise: standard deviation of the range in metres, at range 0.
        max_range: metres; what is further away gives no point. One return in twenty is lost besides.
    """
    rng = np.random.default_rng(seed)
    ground = -1.8
    solids = [_box((0, 0, ground - 0.5), (200, 200, 0.5), "floor")]
    for side in (-1, 1):
        x = -80.0
        while x < 80:  # a row of houses
            half, deep, tall = rng.uniform(4, 9), rng.uniform(4, 7), rng.uniform(4, 12)
            y = side * (rng.uniform(11, 15) + deep)
            solids.append(_box((x + half, y, ground + tall / 2), (half, deep, tall / 2), "wall"))
            x += 2 * half + rng.uniform(0, 5)
        for x in np.arange(-60, 60, 20) + rng.uniform(-4, 4, 6):
            y = side * rng.uniform(7.5, 8.5)
            if rng.random() < 0.5:
                solids.append(_cylinder(x, y, ground, ground + 6, 0.09, "pole"))
            else:
                crown = rng.uniform(1.2, 2.2)
                solids.append(_cylinder(x, y, ground, ground + 2.5, 0.16, "vegetation"))
                solids.append(_sphere(x, y, ground + 2.2 + crown, crown, "vegetation"))
        for x in np.arange(-50, 50, 9.0) + rng.uniform(-2, 2, 12):
            if abs(x) > 4 and rng.random() < 0.7:  # parked and passing cars, never around the sensor
                y, yaw = side * rng.choice([2.2, 5.6]), rng.normal(0, 0.05)
                solids.append(_box((x, y, ground + 0.6), (2.2, 0.88, 0.4), "vehicle", yaw))
                solids.append(_box((x - 0.2, y, ground + 1.25), (1.2, 0.8, 0.28), "vehicle", yaw))
                for i in (-1.35, 1.35):
                    solids.append(_sphere(x + i, y - side * 0.75, ground + 0.32, 0.32, "vehicle"))
    elevation = np.deg2rad(np.linspace(-25, 5, rings))[:, None]
    azimuth = np.linspace(0, 2 * np.pi, azimuths, endpoint=False)[None] + rng.normal(
        0, 2e-4, (rings, azimuths)
    )
    flat = np.cos(elevation)
    direction = np.stack(
        [flat * np.cos(azimuth), flat * np.sin(azimuth), np.broadcast_to(np.sin(elevation), azimuth.shape)],
        axis=-1,
    ).reshape(-1, 3)
    direction = direction[rng.random(len(direction)) >= 0.05]
    return _look(f"lidar-{seed}", solids, np.zeros_like(direction), direction, noise, max_range, rng)


# ---- closed surfaces ---------------------------------------------------------------------------------------


def surface(resolution: int = 256, seed: int = 0, shape: str = "sphere", roughness: float = 0.1) -> Array:
    """Voxels of a resolution^3 grid that a wavy closed surface passes through.

    Args:
        resolution: cells along an axis; a sphere gives about 2.5 * resolution^2 voxels, 14.7 neighbours each.
        seed: of the waves. shape: 'sphere' or 'torus'.
        roughness: amplitude of the waves relative to the half cube, 0 to 0.2.

    Returns:
        (N, 4) int32 batch 0, x, y, z; distinct and sorted.
    """
    if shape not in ("sphere", "torus"):
        raise ValueError(f"shape must be 'sphere' or 'torus', got {shape!r}")
    if not 0 <= roughness <= 0.2:
        raise ValueError(f"roughness must be in 0 .. 0.2, got {roughness}")
    rng = np.random.default_rng(seed)
    waves = 8
    frequency = rng.normal(size=(waves, 3)) * np.geomspace(2.0, 14.0, waves)[:, None]
    phase = rng.uniform(0, 2 * np.pi, waves)
    amplitude = roughness * np.geomspace(1.0, 0.15, waves) / np.geomspace(1.0, 0.15, waves).sum()
    axis = np.linspace(-1, 1, resolution + 1)  # cell corners
    along_y, along_z = np.outer(axis, frequency[:, 1]), np.outer(axis, frequency[:, 2])
    z_part = np.concatenate([np.cos(along_z), np.sin(along_z)], axis=1)
    inside_before: Array | None = None
    found = []
    for index, x in enumerate(axis):
        # sin(a + b) = sin a cos b + cos a sin b: all waves over one (y, z) slice are one small matrix product
        a = along_y + frequency[:, 0] * x + phase
        displacement = (np.concatenate([np.sin(a), np.cos(a)], axis=1) * np.tile(amplitude, 2)) @ z_part.T
        yz = axis[:, None] ** 2 + axis[None] ** 2
        if shape == "sphere":
            distance = np.sqrt(x * x + yz) - 0.72
        else:
            flat = np.sqrt(x * x + axis[:, None] ** 2)
            distance = np.sqrt((flat - 0.52) ** 2 + axis[None] ** 2) - 0.22
        inside = distance + displacement < 0
        if inside_before is not None:
            corners = [
                plane[y : y + resolution, z : z + resolution]
                for plane in (inside_before, inside)
                for y in (0, 1)
                for z in (0, 1)
            ]
            crossed = np.logical_or.reduce(corners) & ~np.logical_and.reduce(corners)
            y, z = np.nonzero(crossed)
            found.append(np.stack([np.zeros_like(y), np.full_like(y, index - 1), y, z], axis=1))
        inside_before = inside
    return np.concatenate(found).astype(np.int32)


# ---- the scan that ships -----------------------------------------------------------------------------------


def scan() -> Scene:
    """Generates the shipped scan: two furnished rooms, 45,000 rays."""
    return room(seed=7, rooms=2, rays=45_000)


def write_scan(path: Path) -> None:
    """Writes `scan()` as npz: points in millimetres (int16), normals times 127 (int8), colours, labels."""
    made = scan()
    order = np.lexsort(np.round(made.points * 20).T[::-1])  # neighbours together: a smaller file
    np.savez_compressed(
        path,
        points_mm=np.round(made.points[order] * 1000).astype(np.int16),
        normals=np.round(made.normals[order] * 127).astype(np.int8),
        colors=made.colors[order],
        labels=made.labels[order],
    )


def load_scan() -> Scene:
    """The scan that ships with the package (about 45,000 points of two furnished rooms)."""
    with (resources.files("voxmma") / "data" / "scan.npz").open("rb") as file, np.load(file) as data:
        normals = data["normals"].astype(np.float32)
        return Scene(
            "scan",
            data["points_mm"].astype(np.float32) / np.float32(1000),
            normals / np.linalg.norm(normals, axis=1, keepdims=True).clip(min=1).astype(np.float32),
            data["colors"],
            data["labels"],
        )


if __name__ == "__main__":
    write_scan(Path(sys.argv[1]))
