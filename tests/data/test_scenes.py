"""Generated scenes: deterministic, valid as coordinates, and shaped like what they stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from voxmma.data import scenes

POINT_SCENES = {
    "room": lambda seed: scenes.room(seed, rooms=2, rays=6_000),
    "lidar": lambda seed: scenes.lidar(seed, rings=16, azimuths=400),
}


@pytest.mark.parametrize("name", POINT_SCENES)
def test_point_scenes_are_deterministic_and_differ_by_seed(name: str) -> None:
    first, again, other = (POINT_SCENES[name](seed) for seed in (3, 3, 4))
    for field in ("points", "normals", "colors", "labels"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    assert not np.array_equal(first.points[:100], other.points[:100])


@pytest.mark.parametrize("name", POINT_SCENES)
def test_point_scenes_are_well_formed(name: str) -> None:
    scene = POINT_SCENES[name](0)
    n = len(scene.points)
    assert n > 4_000
    assert scene.points.dtype == np.float32 and np.isfinite(scene.points).all()
    assert scene.normals.shape == (n, 3) and scene.colors.shape == (n, 3) and scene.labels.shape == (n,)
    np.testing.assert_allclose(np.linalg.norm(scene.normals, axis=1), 1, atol=1e-5)
    assert scene.labels.max() < len(scenes.CLASSES)
    features = scene.features()
    assert features.shape == (n, 4) and features.dtype == np.float32
    assert (features >= 0).all() and (features[:, :3] <= 1).all()


def test_room_holds_its_furniture_and_respects_walls() -> None:
    scene = scenes.room(seed=1, rooms=2, rays=20_000, noise=0.0)
    seen = {scenes.CLASSES[label] for label in np.unique(scene.labels)}
    assert seen == {"floor", "wall", "ceiling", "table", "chair", "cabinet", "lamp", "object"}
    assert scene.points[:, 2].min() >= -1e-4 and scene.points[:, 2].max() <= 2.7 + 1e-4
    floor = scene.labels == scenes.CLASSES.index("floor")
    np.testing.assert_allclose(scene.points[floor, 2], 0, atol=1e-4)
    np.testing.assert_allclose(scene.normals[floor], [[0, 0, 1]] * floor.sum(), atol=1e-6)


def test_lidar_sees_rings_and_no_further_than_its_range() -> None:
    scene = scenes.lidar(seed=0, rings=16, azimuths=400, noise=0.0, max_range=40.0)
    distance = np.linalg.norm(scene.points, axis=1)
    assert distance.max() <= 40 + 1e-3
    elevation = np.degrees(np.arcsin(scene.points[:, 2] / distance))
    nearest = np.linspace(-25, 5, 16)
    assert np.abs(elevation[:, None] - nearest).min(axis=1).max() < 1e-2


@pytest.mark.parametrize("kind", ["box", "cylinder", "sphere"])
def test_rays_hit_solids_where_they_stand(kind: str) -> None:
    half = (0.5, 0.5, 1.0) if kind == "cylinder" else (0.5, 0.5, 0.5)
    solid = scenes.Solid(kind, (3.0, 1.0, 0.0), half, 0, yaw=np.pi / 2)
    origin = np.array([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [3.0, 1.0, 0.0], [3.0, 1.0, 5.0]])
    direction = np.array([[1.0, 0, 0], [-1.0, 0, 0], [1.0, 0, 0], [0, 0, -1.0]])
    distance, normal = solid.hit(origin, direction)
    np.testing.assert_allclose(distance, [2.5, np.inf, np.inf, 5.0 - half[2]])
    np.testing.assert_allclose(normal[[0, 3]], [[-1, 0, 0], [0, 0, 1]], atol=1e-9)


@pytest.mark.parametrize("shape", ["sphere", "torus"])
def test_surface_is_the_boundary_of_a_closed_body(shape: str) -> None:
    size = 48
    coords = scenes.surface(size, seed=2, shape=shape)
    assert coords.dtype == np.int32 and coords.shape[1] == 4 and (coords[:, 0] == 0).all()
    np.testing.assert_array_equal(coords, np.unique(coords, axis=0))  # sorted, distinct
    assert coords[:, 1:].min() > 0 and coords[:, 1:].max() < size - 1  # nowhere cut off by the grid
    wall = np.zeros((size,) * 3, dtype=bool)
    wall[tuple(coords[:, 1:].T)] = True
    outside = np.zeros_like(wall)
    outside[0] = True  # flood from one face, through faces of cells
    while True:
        grown = outside.copy()
        for axis in range(3):
            for step in (1, -1):
                grown |= np.roll(outside, step, axis=axis)
        grown &= ~wall
        if (grown == outside).all():
            break
        outside = grown
    enclosed = ~outside & ~wall
    assert enclosed.sum() > 100  # watertight: the flood does not get in


def test_surface_refuses_what_would_not_be_closed() -> None:
    with pytest.raises(ValueError, match="roughness"):
        scenes.surface(16, roughness=0.5)
    with pytest.raises(ValueError, match="shape"):
        scenes.surface(16, shape="cube")


def test_voxelise_floors_and_drops_duplicates() -> None:
    points = np.array([[0.0, 0.0, 0.0], [0.99, 0.5, 0.0], [-0.01, 0.0, 1.0], [0.5, 0.99, 0.01]])
    np.testing.assert_array_equal(scenes.voxelise(points, 1.0), [[0, -1, 0, 1], [0, 0, 0, 0]])
    assert scenes.voxelise(np.zeros((0, 3)), 0.1).shape == (0, 4)
    with pytest.raises(ValueError, match="voxel_size"):
        scenes.voxelise(points, 0.0)


def test_shipped_scan_is_what_the_generator_makes(tmp_path: Path) -> None:
    scenes.write_scan(tmp_path / "scan.npz")
    assert (tmp_path / "scan.npz").stat().st_size < 1_000_000
    shipped = scenes.load_scan()
    with np.load(tmp_path / "scan.npz") as made:
        points = made["points_mm"].astype(np.float32) / np.float32(1000)
        assert len(points) == len(shipped.points)
        same = np.isclose(points, shipped.points, atol=0.0015).all(axis=1) & (
            made["labels"] == shipped.labels
        )
    assert same.mean() > 0.999  # another processor may round a ray past an edge
