"""Folders of labelled scans in the formats of SemanticKITTI and ScanNet, read and written.

SemanticKITTI (`kitti`), as it is downloaded:

    ROOT/sequences/08/velodyne/000000.bin         N x 4 float32: x, y, z, intensity
    ROOT/sequences/08/labels/000000.label         N uint32: the label's id in the low 16 bits
    ROOT/semantic-kitti.yaml                      learning_map and labels, if they are not the benchmark's

ScanNet (`scannet`), as Pointcept's preprocessing leaves it, which most code of the field reads:

    ROOT/train/scene0000_00/coord.npy             N x 3 float32
                            color.npy             N x 3, 0 to 255
                            normal.npy            N x 3, if it is among the features that are asked for
                            segment20.npy         N or N x 1 integers: 0 to 19, negative or 255 for no label

A fault in them raises DataError with the file and the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

IGNORE = -1
"""the class of a point that has none"""


class DataError(ValueError):
    """A folder or file that is not what its format says. The text names it, and the row."""


@dataclass
class Scan:
    """A scan of N points."""

    name: str
    points: np.ndarray
    """(N, 3) float32, metres"""
    columns: dict[str, np.ndarray]
    """features by name, (N, C) float32"""
    labels: np.ndarray | None
    """(N,) int64 class of each point or IGNORE; None where the folder has no labels"""


@dataclass
class ScanFolder:
    """The scans of some parts (sequences, splits) of a folder; a subclass knows the format.

    Raises DataError where the folder or a part is missing, or has no scans.
    """

    root: Path
    parts: list[str]
    scans: list[Path] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)

    #: features that a network gets unless it is told otherwise
    features: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        need(self.root.is_dir(), self.root, "no such folder")
        for part in self.parts:
            need(self.part(part).is_dir(), self.part(part), "no such folder")
            found = self.find(part)
            need(bool(found), self.part(part), "no scans in here")
            self.scans += found

    def __len__(self) -> int:
        return len(self.scans)

    def part(self, part: str) -> Path:
        """The folder of a part."""
        raise NotImplementedError

    def find(self, part: str) -> list[Path]:
        """Its scans."""
        raise NotImplementedError

    def name(self, number: int) -> str:
        """Where scan `number` lies below the root, without an ending: `08/000000`, `val/scene0000_00`."""
        raise NotImplementedError

    def read(self, number: int) -> Scan:
        """Scan `number`. DataError says what is wrong with it."""
        raise NotImplementedError

    def write(self, folder: Path, number: int, labels: np.ndarray) -> Path:
        """Writes classes (N,) of scan `number` below `folder`, as the format has labels; returns the file."""
        raise NotImplementedError

    @classmethod
    def all_parts(cls, root: Path) -> list[str]:
        """The parts that are there and have labels."""
        raise NotImplementedError


# ---- SemanticKITTI -----------------------------------------------------------------------------------------

#: Classes of the benchmark, and the ids of each in label files; the first one is written.
KITTI: dict[str, tuple[int, ...]] = {
    "car": (10, 252), "bicycle": (11,), "motorcycle": (15,), "truck": (18, 258),
    "other-vehicle": (20, 13, 16, 256, 257, 259), "person": (30, 254), "bicyclist": (31, 253),
    "motorcyclist": (32, 255), "road": (40, 60), "parking": (44,), "sidewalk": (48,), "other-ground": (49,),
    "building": (50,), "fence": (51,), "vegetation": (70,), "trunk": (71,), "terrain": (72,), "pole": (80,),
    "traffic-sign": (81,),
}  # fmt: skip
#: Ids that are no class: unlabeled, outlier, other-structure, other-object.
KITTI_IGNORED = (0, 1, 52, 99)


class KittiFolder(ScanFolder):
    """Sequences in SemanticKITTI's format."""

    features = ("coord", "intensity")

    def __post_init__(self) -> None:
        super().__post_init__()
        mapping = self.root / "semantic-kitti.yaml"
        table = _learning_map(mapping) if mapping.exists() else KITTI
        ignored = () if mapping.exists() else KITTI_IGNORED
        self.classes = [name for name in table if name]
        self.ids = np.array([0, *(table[name][0] for name in self.classes)], np.uint32)  # of class - IGNORE
        self.lookup = np.full(1 << 16, -2, np.int64)  # class of an id; -2: no such id
        self.lookup[[*ignored, *table.get("", ())]] = IGNORE
        for number, name in enumerate(self.classes):
            self.lookup[list(table[name])] = number

    def part(self, part: str) -> Path:
        return self.root / "sequences" / part

    def find(self, part: str) -> list[Path]:
        scans = sorted((self.part(part) / "velodyne").glob("*.bin"))
        for scan in scans:
            self.label_file(scan)  # better now than in the middle of a run
        names = {scan.stem for scan in scans}
        for path in (self.part(part) / "labels").glob("*.label"):
            need(path.stem in names, path, "labels, but there is no scan of that name")
        return scans

    def name(self, number: int) -> str:
        path = self.scans[number]
        return f"{path.parents[1].name}/{path.stem}"

    def read(self, number: int) -> Scan:
        path = self.scans[number]
        rows = np.fromfile(path, "<f4").reshape(-1, 4)
        finite(path, rows)
        labels = self.label_file(path)
        found = None if labels is None else self._classes(labels)
        return Scan(self.name(number), rows[:, :3], {"intensity": rows[:, 3:]}, found)

    def label_file(self, scan: Path) -> Path | None:
        """The labels of a scan, None where its sequence has none. DataError where the sizes are wrong."""
        size = scan.stat().st_size
        need(size > 0, scan, "an empty scan")
        need(size % 16 == 0, scan, f"{size} bytes are no rows of four float32")
        path = scan.parents[1] / "labels" / f"{scan.stem}.label"
        if not path.parent.is_dir():
            return None
        need(path.is_file(), path, f"no such file, but there is {scan}")
        labels = path.stat().st_size / 4
        need(labels == size // 16, path, f"{labels:g} labels for the {size // 16} points of {scan}")
        return path

    def _classes(self, path: Path) -> np.ndarray:
        """Classes of a label file."""
        ids = np.fromfile(path, "<u4") & 0xFFFF
        labels = self.lookup[ids]
        if (labels < IGNORE).any():
            row = int((labels < IGNORE).argmax())
            raise DataError(f"{path}, row {row}: label id {ids[row]} is not in the learning map")
        return labels

    def write(self, folder: Path, number: int, labels: np.ndarray) -> Path:
        """`sequences/08/predictions/000000.label`, which the benchmark's tools read."""
        part, name = self.name(number).split("/")
        path = folder / "sequences" / part / "predictions" / f"{name}.label"
        path.parent.mkdir(parents=True, exist_ok=True)
        self.ids[labels - IGNORE].astype("<u4").tofile(path)
        return path

    @classmethod
    def all_parts(cls, root: Path) -> list[str]:
        need((root / "sequences").is_dir(), root / "sequences", "no such folder")
        return sorted(path.parent.name for path in (root / "sequences").glob("*/labels"))


def _learning_map(path: Path) -> dict[str, tuple[int, ...]]:
    """Ids of every class, by its name, and those of no class under ''; of a file like semantic-kitti.yaml."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: {' '.join(str(error).split())}") from None
    for key in ("labels", "learning_map", "learning_map_inv"):
        need(isinstance(data, dict) and isinstance(data.get(key), dict), path, f"no table {key}")
    named, written = data["labels"], {*data["learning_map_inv"].values()}
    for one in (*data["learning_map"], *data["learning_map_inv"], *written):
        good = isinstance(one, int) and 0 <= one < 1 << 16
        need(good, path, f"{one!r} is no label id or class: integers of 0 to {(1 << 16) - 1}")
    for first in written - named.keys():
        raise DataError(f"{path}: learning_map_inv has label id {first}, labels has not")
    names = {int(number): named[first] for number, first in data["learning_map_inv"].items()}
    ignored = {number for number, yes in data.get("learning_ignore", {0: True}).items() if yes}
    table: dict[str, tuple[int, ...]] = {}
    for number in sorted(names):
        ids = {int(one) for one, learned in data["learning_map"].items() if learned == number}
        first = int(data["learning_map_inv"][number])
        name = "" if number in ignored else names[number]
        table[name] = (*table.get(name, ()), first, *sorted(ids - {first}))
    return table


# ---- ScanNet -----------------------------------------------------------------------------------------------

SCANNET = (
    "wall", "floor", "cabinet", "bed", "chair", "sofa", "table", "door", "window", "bookshelf", "picture",
    "counter", "desk", "curtain", "refridgerator", "shower curtain", "toilet", "sink", "bathtub",
    "otherfurniture",
)  # fmt: skip
#: The NYU40 ids of these, which the benchmark wants.
NYU40 = np.array([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 14, 16, 24, 28, 33, 34, 36, 39])


class ScanNetFolder(ScanFolder):
    """Splits in Pointcept's layout of ScanNet."""

    features = ("color", "normal")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.classes = list(SCANNET)

    def part(self, part: str) -> Path:
        return self.root / part

    def find(self, part: str) -> list[Path]:
        scenes = sorted(path for path in self.part(part).iterdir() if path.is_dir())
        names = ["coord.npy", "color.npy"]
        if any((scene / "segment20.npy").exists() for scene in scenes):
            names.append("segment20.npy")
        for path in (scene / name for scene in scenes for name in names):
            need(path.is_file(), path, "no such file")  # better now than in the middle of a run
        return scenes

    def name(self, number: int) -> str:
        path = self.scans[number]
        return f"{path.parent.name}/{path.name}"

    def read(self, number: int) -> Scan:
        folder = self.scans[number]
        points = _rows(folder / "coord.npy", None, 3)
        need(len(points) > 0, folder / "coord.npy", "an empty scan")
        color = _rows(folder / "color.npy", len(points), 3)
        outside = ((color < 0) | (color > 255)).any(1)
        if outside.any():
            row = int(outside.argmax())
            raise DataError(f"{folder / 'color.npy'}, row {row}: {color[row].tolist()} is not in 0 to 255")
        columns = {"color": color / np.float32(127.5) - 1}
        if (folder / "normal.npy").exists():
            columns["normal"] = _rows(folder / "normal.npy", len(points), 3)
        labels = None
        path = folder / "segment20.npy"
        if path.exists():
            found = _load(path)
            need(found.dtype.kind in "iu", path, f"labels are integers, not {found.dtype}")
            need(found.size == len(points), path, f"{found.size} labels for {len(points)} points")
            labels = found.reshape(-1).astype(np.int64)
            labels[(labels < 0) | (labels == 255)] = IGNORE
            if (labels >= len(SCANNET)).any():
                row = int((labels >= len(SCANNET)).argmax())
                raise DataError(f"{path}, row {row}: label {labels[row]} is not in 0 to {len(SCANNET) - 1}")
        return Scan(self.name(number), points, columns, labels)

    def write(self, folder: Path, number: int, labels: np.ndarray) -> Path:
        """`val/scene0000_00/segment20.npy`, and beside the scene's folder the benchmark's text file of NYU40
        ids, a line a point."""
        path = folder / self.name(number) / "segment20.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, labels.astype(np.int16))
        ids = np.where(labels == IGNORE, 0, NYU40[labels])
        np.savetxt(path.parent.with_suffix(".txt"), ids, "%d")
        return path

    @classmethod
    def all_parts(cls, root: Path) -> list[str]:
        return sorted({path.parents[1].name for path in root.glob("*/*/segment20.npy")})


def _load(path: Path) -> np.ndarray:
    need(path.is_file(), path, "no such file")
    try:
        found: np.ndarray = np.load(path, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise DataError(f"{path}: {error}") from None
    return found


def _rows(path: Path, count: int | None, width: int) -> np.ndarray:
    """(count, width) float32 of a .npy file."""
    found = _load(path)
    good = found.ndim == 2 and found.shape[1] == width and found.dtype.kind in "fiu"
    need(good, path, f"shape {found.shape} of {found.dtype} instead of (N, {width}) numbers")
    need(count in (None, len(found)), path, f"{len(found)} rows for {count} points")
    found = found.astype(np.float32)
    finite(path, found)
    return found


# ---- both --------------------------------------------------------------------------------------------------

FORMATS: dict[str, type[ScanFolder]] = {"kitti": KittiFolder, "scannet": ScanNetFolder}


def format_of(root: Path) -> str:
    """'kitti' where the folder has sequences, 'scannet' where it has scenes."""
    need(root.is_dir(), root, "no such folder")
    if (root / "sequences").is_dir():
        return "kitti"
    need(
        any(root.glob("*/*/coord.npy")),
        root,
        "neither sequences/ (kitti) nor SPLIT/SCENE/coord.npy (scannet)",
    )
    return "scannet"


def need(good: bool, path: Path, what: str) -> None:
    """DataError with the path unless `good`."""
    if not good:
        raise DataError(f"{path}: {what}")


def finite(path: Path, rows: np.ndarray) -> None:
    """DataError with the first row that is not finite."""
    bad = ~np.isfinite(rows).all(1)
    if bad.any():
        row: Any = int(bad.argmax())
        raise DataError(f"{path}, row {row}: {rows[row].tolist()} is not finite")
