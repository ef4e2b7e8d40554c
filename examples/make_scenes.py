"""Small made-up scenes in the folder formats of SemanticKITTI and ScanNet, for first runs and tests.

    python examples/make_scenes.py scenes/kitti                        streets, as a LiDAR sees them
    python examples/make_scenes.py scenes/scannet --format scannet     rooms

Scenes come from `voxmma.data.scenes`; the same options write the same files. `segmentation.formats` describes
both formats. Numbers of the classes are the benchmarks'; many classes do not occur.
"""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

from segmentation.formats import IGNORE, KITTI, SCANNET
from voxmma.data import scenes

#: Classes of the benchmarks for those of `scenes.CLASSES`; what is not here has no label.
AS_KITTI = {"floor": "road", "wall": "building", "vehicle": "car", "vegetation": "vegetation", "pole": "pole"}
AS_SCANNET = {"floor": "floor", "wall": "wall", "table": "table", "chair": "chair", "cabinet": "cabinet"}
AS_SCANNET |= {"lamp": "otherfurniture", "object": "otherfurniture"}


class Format(str, Enum):
    """A folder format."""

    kitti = "kitti"
    scannet = "scannet"


def write_kitti(root: Path, part: str, number: int, seed: int, points: int) -> None:
    """One sweep as `sequences/PART/velodyne/NUMBER.bin` and `labels/NUMBER.label`."""
    rings = max(8, round((points / 34) ** 0.5))
    scene = scenes.lidar(seed=seed, rings=rings, azimuths=-(-points // rings))
    ids = [KITTI[AS_KITTI[name]][0] if name in AS_KITTI else 0 for name in scenes.CLASSES]
    labels = np.array(ids, np.uint32)[scene.labels]
    labels |= (scene.labels == scenes.CLASSES.index("vehicle")).astype(np.uint32) << 16  # an instance
    intensity = scene.colors.mean(1, keepdims=True) / 255
    for folder, ending, data in (
        ("velodyne", "bin", np.concatenate([scene.points, intensity], 1).astype("<f4")),
        ("labels", "label", labels.astype("<u4")),
    ):
        path = root / "sequences" / part / folder / f"{number:06d}.{ending}"
        path.parent.mkdir(parents=True, exist_ok=True)
        data.tofile(path)


def write_scannet(root: Path, part: str, number: int, seed: int, points: int) -> None:
    """One room as `PART/sceneNUMBER_00` with coord.npy, color.npy, normal.npy and segment20.npy."""
    scene = scenes.room(seed=seed, rooms=1, rays=points)
    classes = [SCANNET.index(AS_SCANNET[name]) if name in AS_SCANNET else IGNORE for name in scenes.CLASSES]
    folder = root / part / f"scene{number:04d}_00"
    folder.mkdir(parents=True, exist_ok=True)
    np.save(folder / "coord.npy", scene.points)
    np.save(folder / "color.npy", scene.colors)
    np.save(folder / "normal.npy", scene.normals)
    np.save(folder / "segment20.npy", np.array(classes, np.int16)[scene.labels])


def main(
    root: Annotated[Path, typer.Argument(help="Folder to write; it must not hold scenes yet.")],
    format: Annotated[Format, typer.Option(help="Whose folders to write.")] = Format.kitti,
    train: Annotated[int, typer.Option(min=1, help="Scenes to train on (sequence 00, or train/).")] = 16,
    val: Annotated[int, typer.Option(min=1, help="Scenes to evaluate on (sequence 08, or val/).")] = 4,
    points: Annotated[int, typer.Option(min=100, help="Rays cast in a scene; most give a point.")] = 20_000,
    seed: Annotated[int, typer.Option(min=0, help="Other scenes for another number.")] = 0,
) -> None:
    """Writes made-up scenes in the format of SemanticKITTI or ScanNet."""
    parts = ("00", "08") if format is Format.kitti else ("train", "val")
    write = write_kitti if format is Format.kitti else write_scannet
    for part in parts:
        place = root / "sequences" / part if format is Format.kitti else root / part
        if place.exists():
            raise typer.BadParameter(f"{place} is already there", param_hint="root")
    jobs = [(part, i) for part, count in zip(parts, (train, val), strict=True) for i in range(count)]
    for place, (part, number) in enumerate(track(jobs, "scenes", transient=True)):
        write(root, part, number, seed * len(jobs) + place, points)


if __name__ == "__main__":
    typer.run(main)
