"""examples/segment.py: data of both formats, training, resuming, several processes, evaluation, bad input."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer

import make_scenes
import segment
from segmentation import checkpoint, formats
from segmentation.data import Augment, Draws, TrainingScans, bend, crop, majority
from segmentation.evaluation import ExportError, Scores, evaluate, export, picture
from segmentation.formats import DataError, KittiFolder, ScanNetFolder
from segmentation.run import Group, Journal
from segmentation.settings import MODELS, Settings
from voxmma import Voxels
from voxmma.models import SparseUNet

MODELS["tiny"] = functools.partial(
    SparseUNet, channels=(8, 16, 16, 8), blocks=(1,) * 4, stem_channels=8, stem_kernels=(3,)
)
EXAMPLES = Path(segment.__file__).parent
CPU = Group(torch.device("cpu"))


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> Any:
    """And no curves.png, but of the runs from the command line, which the fixture `run` made before."""
    monkeypatch.setattr(Journal, "draw", lambda self: None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders kitti and scannet of four scans to train on, and three to evaluate on."""
    root: Path = tmp_path_factory.mktemp("scenes")
    for kind in make_scenes.Format:
        make_scenes.main(root / kind.value, kind, train=4, val=2, points=800)
    return root


def settings(data: Path, out: Path, **more: Any) -> Settings:
    """A short run: six steps, evaluations after the third and the last."""
    cell = 0.5 if data.name == "kitti" else 0.2
    given = {"model": "tiny", "epochs": 3, "batch": 2, "voxel_size": cell, "workers": 0, "lr": 1e-2, **more}
    made = Settings(data, out=out, eval_every=2, **given)
    made.check()
    return made


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in map(json.loads, (out / "curves.jsonl").open()) if "loss" in row]


def tensors(value: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a checkpoint by path."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, part in pairs for name, leaf in tensors(part, f"{path}/{key}").items()}
    return {path: value}


def assert_same(a: Path, b: Path) -> None:
    """Two runs ended in the same state, bit for bit, and wrote the same curves."""
    one, two = (tensors(checkpoint.read(run / "last.pt")) for run in (a, b))
    free = [f"/settings/{name}" for name in ("out", "resume")]
    assert one.keys() == two.keys() and any("exp_avg" in name or "momentum" in name for name in one)
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, two[name]), name
        else:
            assert value == two[name] or name in free, name
    assert (a / "curves.jsonl").read_text() == (b / "curves.jsonl").read_text()


# ---- data --------------------------------------------------------------------------------------------------


def test_scenes_are_read_as_they_were_made(scenes: Path, tmp_path: Path) -> None:
    kitti = KittiFolder(scenes / "kitti", ["00", "08"])
    assert len(kitti) == 6 and kitti.name(0) == "00/000000" and kitti.name(5) == "08/000001"
    scan, raw = kitti.read(4), scenes / "kitti" / "sequences" / "08"
    rows = np.fromfile(raw / "velodyne" / "000000.bin", np.float32).reshape(-1, 4)
    assert np.array_equal(scan.points, rows[:, :3]) and np.array_equal(scan.columns["intensity"], rows[:, 3:])
    ids = np.fromfile(raw / "labels" / "000000.label", np.uint32)
    assert (ids >> 16).any()  # instances, which are no part of the class
    names = {10: "car", 40: "road", 50: "building", 70: "vegetation", 80: "pole"}
    assert [kitti.classes[label] for label in scan.labels] == [names[one & 0xFFFF] for one in ids]

    scannet = ScanNetFolder(scenes / "scannet", ["val"])
    scan, raw = scannet.read(1), scenes / "scannet" / "val" / "scene0001_00"
    assert np.array_equal(scan.points, np.load(raw / "coord.npy")) and scan.columns["color"].min() >= -1
    assert np.array_equal(scan.labels, np.load(raw / "segment20.npy")) and (scan.labels == -1).any()
    for folder in (kitti, scannet):
        for number in range(len(folder)):
            folder.write(tmp_path, number, folder.read(number).labels)
    written = np.fromfile(tmp_path / "sequences/08/predictions/000000.label", np.uint32)
    assert np.array_equal(written, ids & 0xFFFF)
    found = np.load(tmp_path / "val/scene0001_00/segment20.npy")
    assert np.array_equal(found, scan.labels)
    nyu = np.loadtxt(tmp_path / "val/scene0001_00.txt", dtype=int)
    assert np.array_equal(nyu == 0, found == -1) and set(nyu) <= {0, 1, 2, 3, 5, 7, 39}
    make_scenes.main(tmp_path / "again", make_scenes.Format.kitti, train=4, val=2, points=800)
    again = tmp_path / "again" / "sequences" / "08" / "velodyne" / "000000.bin"
    assert again.read_bytes() == (scenes / "kitti" / "sequences/08/velodyne/000000.bin").read_bytes()
    with pytest.raises(typer.BadParameter, match="already there"):
        make_scenes.main(tmp_path / "again")


def test_a_learning_map_of_the_folder_replaces_the_benchmarks(scenes: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    make_scenes.main(root, train=1, val=1, points=400)
    (root / "semantic-kitti.yaml").write_text(
        "labels: {0: none, 10: car, 40: road, 50: building, 70: green, 80: pole, 252: moving}\n"
        "learning_map: {0: 0, 40: 1, 50: 2, 10: 3, 252: 3, 70: 0, 80: 0}\n"
        "learning_map_inv: {0: 0, 1: 40, 2: 50, 3: 10}\nlearning_ignore: {0: true, 1: false, 2: false}\n"
    )
    folder = KittiFolder(root, ["00"])
    assert folder.classes == ["road", "building", "car"] and folder.ids.tolist() == [0, 40, 50, 10]
    ids = np.fromfile(root / "sequences/00/labels/000000.label", np.uint32) & 0xFFFF
    wanted = [{40: 0, 50: 1, 10: 2}.get(int(one), -1) for one in ids]
    assert folder.read(0).labels.tolist() == wanted
    assert folder.lookup[252] == 2 and folder.lookup[99] == -2
    for text, message in (
        ("labels: {}\n", "no table learning_map"),
        ("labels: [", "while parsing a flow .* line 1, column"),
        (
            "labels: {0: none}\nlearning_map: {0: 0, 40: 1}\nlearning_map_inv: {0: 0, 1: 40}\n",
            "learning_map_inv has label id 40, labels has not",
        ),
        (
            "labels: {0: none}\nlearning_map: {0: 0, 70000: 0}\nlearning_map_inv: {0: 0}\n",
            "70000 is no label id or class: integers of 0 to 65535",
        ),
    ):
        (root / "semantic-kitti.yaml").write_text(text)
        with pytest.raises(DataError, match=f"semantic-kitti.yaml: {message}"):
            KittiFolder(root, ["00"])


def write(path: Path, data: np.ndarray) -> None:
    np.save(path, data) if path.suffix == ".npy" else data.tofile(path)


BAD = {
    "empty scan": ("kitti", "velodyne/000001.bin", lambda x: x[:0], r"000001\.bin: an empty scan"),
    "torn scan": ("kitti", "velodyne/000001.bin", lambda x: x[:-1], r"\.bin: \d+ bytes are no rows"),
    "short labels": ("kitti", "labels/000001.label", lambda x: x[:-3], r"\.label: \d+ labels for the \d+ p"),
    "unknown id": ("kitti", "labels/000001.label", lambda x: put(x, 7, 333), r", row 7: label id 333 is not"),
    "infinite": ("kitti", "velodyne/000001.bin", lambda x: put(x, 38, np.inf), r", row 9: .*not finite"),
    "label range": ("scannet", "segment20.npy", lambda x: put(x, 5, 20), r", row 5: label 20 is not in"),
    "label length": ("scannet", "segment20.npy", lambda x: x[:-1], r"segment20\.npy: \d+ labels for"),
    "float labels": ("scannet", "segment20.npy", lambda x: x * 1.0, r"segment20\.npy: labels are integers"),
    "no points": ("scannet", "coord.npy", lambda x: x[:0], r"coord\.npy: an empty scan"),
    "colour": ("scannet", "color.npy", lambda x: put(x.astype(int), (3, 0), 256), r"or\.npy, row 3: \[256"),
    "colours": ("scannet", "color.npy", lambda x: x[1:], r"color\.npy: \d+ rows for \d+ points"),
    "columns": ("scannet", "coord.npy", lambda x: x[:, :2], r"coord\.npy: shape \(\d+, 2\) of float32"),
    "objects": ("scannet", "coord.npy", lambda x: np.array([None]), r"coord\.npy: Object arrays cannot"),
}  # fmt: skip


def put(x: np.ndarray, place: Any, value: Any) -> np.ndarray:
    x = x.copy()
    x[place] = value
    return x


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_named(name: str, tmp_path: Path) -> None:
    kind, file, change, message = BAD[name]
    make_scenes.main(tmp_path, make_scenes.Format(kind), train=2, val=1, points=300)
    path = tmp_path / ("sequences/00" if kind == "kitti" else "train/scene0001_00") / file
    dtype = {".bin": np.float32, ".label": np.uint32}.get(path.suffix)
    write(path, change(np.load(path) if dtype is None else np.fromfile(path, dtype)))
    with pytest.raises(DataError, match=message):
        formats.FORMATS[kind](tmp_path, ["00" if kind == "kitti" else "train"]).read(1)


def test_missing_files_and_folders_are_named(scenes: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sequences/03: no such folder"):
        KittiFolder(scenes / "kitti", ["00", "03"])
    with pytest.raises(DataError, match="nowhere: no such folder"):
        settings(tmp_path / "nowhere", tmp_path, voxel_size=1.0).folder(True)
    with pytest.raises(DataError, match=r"neither sequences/"):
        settings(tmp_path, tmp_path).folder(True)
    root = tmp_path / "kitti"
    make_scenes.main(root, train=2, val=1, points=300)
    (root / "sequences/00/labels/000001.label").rename(root / "sequences/00/labels/000002.label")
    with pytest.raises(DataError, match=r"000001\.label: no such file, but there is .*000001\.bin"):
        KittiFolder(root, ["00"])
    (root / "sequences/00/velodyne/000001.bin").unlink()
    with pytest.raises(DataError, match=r"000002\.label: labels, but there is no scan"):
        KittiFolder(root, ["00"])
    (root / "sequences/05/velodyne").mkdir(parents=True)
    with pytest.raises(DataError, match=r"sequences/05: no scans in here"):
        KittiFolder(root, ["05"])
    root = tmp_path / "scannet"
    make_scenes.main(root, make_scenes.Format.scannet, train=2, val=1, points=300)
    (root / "train/scene0000_00/normal.npy").unlink()
    data = settings(root, tmp_path).training_scans()
    with pytest.raises(DataError, match=r"train/scene0000_00 has no normal, only coord, color; say so with"):
        data[0, 0]
    assert replace(data, features=["color"])[0, 0][0].channels == 3
    (root / "train/scene0000_00/segment20.npy").unlink()
    with pytest.raises(DataError, match=r"scene0000_00/segment20\.npy: no such file"):
        ScanNetFolder(root, ["train"])  # scene0001_00 has labels
    (root / "train/scene0001_00/segment20.npy").unlink()
    assert len(ScanNetFolder(root, ["train"])) == 2
    with pytest.raises(DataError, match=r"scene0000_00: no labels"):
        data[0, 0]
    for name in ("color.npy", "coord.npy"):
        (root / "train/scene0000_00" / name).unlink()
        with pytest.raises(DataError, match=rf"{name}: no such file"):
            ScanNetFolder(root, ["train"])
    (root / "val/scene0000_00/coord.npy").unlink()
    (root / "val/scene0000_00/coord.npy").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r"coord\.npy: no such file"):
        ScanNetFolder(root, ["val"])


def test_a_point_too_far_away_is_named_with_its_scan(scenes: Path, tmp_path: Path) -> None:
    make_scenes.main(tmp_path / "data", make_scenes.Format.scannet, train=1, val=1, points=300)
    path = tmp_path / "data/train/scene0000_00/coord.npy"
    write(path, put(np.load(path), (3, 1), 1e30))
    data = settings(tmp_path / "data", tmp_path).training_scans()
    with pytest.raises(DataError, match=r"train/scene0000_00: points row 3, .* outside"):
        data[0, 0]


def test_augmentation_moves_points_and_turns_normals(scenes: Path) -> None:
    scan = ScanNetFolder(scenes / "scannet", ["val"]).read(0)
    none = Augment(False, False, 0.0, 0.0, 0.0)(scan, np.random.default_rng(0))
    assert np.array_equal(none.points, scan.points)
    for rigid in (Augment(True, False, 0, 0), Augment(False, True, 0, 0), Augment(True, True, 0, 0)):
        for seed in range(4):
            made = rigid(scan, np.random.default_rng(seed))
            turn = np.linalg.lstsq(scan.points.astype(float), made.points.astype(float), rcond=None)[0]
            np.testing.assert_allclose(turn @ turn.T, np.eye(3), atol=1e-5)
            np.testing.assert_allclose(scan.columns["normal"] @ turn, made.columns["normal"], atol=1e-5)
            np.testing.assert_allclose(made.points[:, 2], scan.points[:, 2], atol=1e-5)
    made = Augment(False, False, 0.2, 0, 0)(scan, np.random.default_rng(1))
    share = float(np.linalg.norm(made.points) / np.linalg.norm(scan.points))
    assert 0.8 <= share <= 1.2 and abs(share - 1) > 1e-3
    np.testing.assert_allclose(made.points, share * scan.points, atol=1e-5)
    made = Augment(False, False, 0, 0.01, 0)(scan, np.random.default_rng(1))
    assert 0.005 < np.abs(made.points - scan.points).max() <= 0.02 + 1e-5
    shifts = bend(scan.points, 0.3, np.random.default_rng(1))
    assert 0.05 < np.abs(shifts).max() <= 0.3
    cell = np.ptp(scan.points, axis=0) / 5
    steps = np.abs(np.diff(scan.points, axis=0)) / cell  # neighbours move together
    assert (np.abs(np.diff(shifts, axis=0)) <= 0.6 * steps.sum(1, keepdims=True) + 1e-6).all()
    kept = crop(scan, 100, np.random.default_rng(2))
    assert len(kept.points) == len(kept.labels) == len(kept.columns["normal"]) == 100


def test_a_voxel_has_the_class_of_most_of_its_points() -> None:
    labels = torch.tensor([3, 1, 1, -1, -1, -1, 0, 2])
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    assert majority(labels, rows, 4, 5).tolist() == [1, -1, 0, 2]


def test_a_scan_follows_from_seed_pass_and_number_alone(scenes: Path) -> None:
    data = settings(scenes / "kitti", Path("out"), seed=1 << 40).training_scans()
    assert isinstance(data, TrainingScans)
    x, labels = data[1 << 70, 3]
    torch.rand(5), np.random.rand(5), data[0, 3]
    again, same = data[1 << 70, 3]
    assert torch.equal(x.coords, again.coords) and torch.equal(x.feats, again.feats)
    assert torch.equal(labels, same) and not torch.equal(data[5, 3][0].feats[:50], x.feats[:50])


def test_the_scans_of_a_step_do_not_depend_on_the_processes() -> None:
    def steps(world: int, accumulate: int, start: int, count: int = 5) -> list[list[Any]]:
        streams = [iter(Draws(7, 4, accumulate, rank, world, 9, start)) for rank in range(world)]
        return [[d for _ in range(accumulate) for s in streams for d in next(s)] for _ in range(count)]

    whole = steps(1, 1, 0)
    assert steps(2, 1, 0) == steps(1, 2, 0) == steps(2, 2, 0) == steps(4, 1, 0) == whole
    assert steps(2, 1, 2, 3) == whole[2:]
    flat = [draw for step in steps(1, 1, 0, 7) for draw in step]
    for turn in range(4):
        assert sorted(number for t, number in flat if t == turn) == list(range(7))
    assert [n for t, n in flat if t == 0] != [n for t, n in flat if t == 1]


# ---- training ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["kitti", "scannet"])
def run(request: pytest.FixtureRequest, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run from the command line."""
    out: Path = tmp_path_factory.mktemp("run")
    options = "--model small --epochs 4 --batch 2 --lr 1e-2 --log-every 3 --device cpu --eval-every 2"
    options += f" --workers {int(request.param == 'kitti')}"
    options += f" --voxel-size {0.5 if request.param == 'kitti' else 0.2} --out"
    argv = ["segment.py", "train", str(scenes / request.param), *options.split(), str(out)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", argv)
        with pytest.raises(SystemExit) as end:
            segment.main()
    assert end.value.code in (0, None)
    return out


def test_a_run_learns_and_leaves_what_it_says(run: Path) -> None:
    found = losses(run)
    assert len(found) == 8 and sum(found[-2:]) < 0.7 * sum(found[:2])
    rows = [row for row in map(json.loads, (run / "curves.jsonl").open()) if "miou" in row]
    assert [row["step"] for row in rows] == [4, 8]
    assert all(abs(row["miou"] - np.mean([*row["iou"].values()])) < 1e-12 for row in rows)
    names = {path.name for path in run.iterdir()}
    assert names == {"last.pt", "best.pt", "curves.jsonl", "curves.png", "engine.vxe"}
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoint.read(run / "best.pt")["best"] == max(row["miou"] for row in rows)


def test_evaluation_writes_the_labels_that_its_scores_are_of(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segment.evaluate_command(run / "best.pt", None, None, tmp_path, None, "cpu", 0)
    printed = capsys.readouterr().out
    found = checkpoint.read(run / "best.pt")
    folder = Settings.from_dict(found["settings"]).folder(training=False)
    assert (tmp_path / "scan.png").read_bytes().startswith(b"\x89PNG")
    hits, union = np.zeros(len(folder.classes)), np.zeros(len(folder.classes))
    occurs = set()
    for number in range(len(folder)):
        labels = folder.read(number).labels
        if isinstance(folder, KittiFolder):
            part, name = folder.name(number).split("/")
            path = tmp_path / "sequences" / part / "predictions" / f"{name}.label"
            predicted = folder.lookup[np.fromfile(path, np.uint32)]
        else:
            predicted = np.load(tmp_path / folder.name(number) / "segment20.npy")
        assert predicted.shape == labels.shape and predicted.min() >= 0
        kept = labels >= 0
        occurs |= set(labels[kept])
        for one in range(len(folder.classes)):
            a, b = labels[kept] == one, predicted[kept] == one
            hits[one] += (a & b).sum()
            union[one] += (a | b).sum()
    miou = float(np.mean([hits[one] / union[one] for one in occurs]))
    assert miou == pytest.approx(found["best"], abs=1e-12) and f"{miou:.2%}" in printed


def interrupt(patch: pytest.MonkeyPatch, step: int) -> None:
    """Training breaks off in the middle of a step."""
    backward = segment.F.cross_entropy
    count = iter(range(1000))

    def breaks(*args: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and next(count) == step:
            raise KeyboardInterrupt
        return backward(*args, **options)

    patch.setattr(segment.F, "cross_entropy", breaks)


@pytest.mark.parametrize(
    ("more", "broken"),
    [
        pytest.param({"save_every": 2, "workers": 1}, 5, marks=pytest.mark.slow),
        ({"save_every": 3, "policy": "0=always_f32,4=auto_mixed_bf16", "elastic": 0.1, "max_points": 500}, 1),
        pytest.param(
            {"save_every": 1, "precision": "fp16", "optimiser": "sgd", "accumulate": 2},
            7,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["adamw", "schedule", "fp16-sgd-accumulate"],
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    more: dict[str, Any], broken: int, scenes: Path, tmp_path: Path, device: torch.device
) -> None:
    group = Group(device)
    whole = settings(scenes / "scannet", tmp_path / "whole", **more)
    segment.train(whole, group)
    cut = replace(whole, out=tmp_path / "cut", resume=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, broken)
        segment.train(cut, group)
    np.random.seed(5), torch.manual_seed(5)
    assert len(losses(cut.out)) < 6
    segment.train(cut, group)
    assert_same(whole.out, cut.out)


def test_a_run_that_ends_between_two_files_finds_its_best(scenes: Path, tmp_path: Path) -> None:
    whole = settings(scenes / "kitti", tmp_path / "whole", epochs=1)
    segment.train(whole, CPU)
    cut = replace(whole, out=tmp_path / "cut", resume=True)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        write, count = checkpoint.write, iter(range(10))

        def once(path: Path, value: Any) -> None:
            if next(count):
                raise KeyboardInterrupt
            write(path, value)

        patch.setattr(checkpoint, "write", once)
        segment.train(cut, CPU)
    segment.train(cut, CPU)
    assert_same(whole.out, cut.out)
    whole_best, cut_best = (checkpoint.read(run.out / "best.pt") for run in (whole, cut))
    for name, value in whole_best["model"].items():
        assert torch.equal(cut_best["model"][name], value), name
    assert cut_best["step"] == whole_best["step"] == 2


@pytest.mark.slow
def test_a_killed_process_goes_on(scenes: Path, tmp_path: Path) -> None:
    options = "--model small --epochs 20 --batch 2 --voxel-size 0.5 --save-every 1 --no-export --device cpu"
    command = [sys.executable, str(EXAMPLES / "segment.py"), "train", str(scenes / "kitti"), "--resume"]
    command += [*options.split(), "--eval-every", "10", "--out"]
    subprocess.run([*command, str(tmp_path / "whole")], check=True, timeout=600)
    first = subprocess.Popen([*command, str(tmp_path / "cut")], start_new_session=True)
    while not (tmp_path / "cut" / "last.pt").exists():
        assert first.poll() is None
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    subprocess.run([*command, str(tmp_path / "cut")], check=True, timeout=600)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_a_checkpoint_is_replaced_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    checkpoint.write(path, {"model": {}, "settings": {}, "classes": [], "step": 1})

    def torn(value: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="disk full"):
        checkpoint.write(path, {})
    assert checkpoint.read(path)["step"] == 1
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(checkpoint.CheckpointError, match=r"last\.pt cannot be read"):
        checkpoint.read(path)
    with pytest.raises(checkpoint.CheckpointError, match=r"none\.pt: no such file"):
        checkpoint.read(tmp_path / "none.pt")


def test_what_does_not_go_together_is_refused(scenes: Path, tmp_path: Path) -> None:
    given = settings(scenes / "kitti", tmp_path / "run", epochs=1, precision="bf16")
    segment.train(given, CPU)
    with pytest.raises(typer.BadParameter, match=r"last\.pt is there: --resume goes on"):
        segment.train(given, CPU)
    with pytest.raises(checkpoint.CheckpointError, match=r"was begun with --epochs 1, --lr 0\.01: go on"):
        segment.train(replace(given, resume=True, epochs=2, lr=0.02), CPU)
    for more, message in (
        ({"batch": 3, "accumulate": 2}, "3 scans cannot be shared by 2"),
        ({"val_on": "00,08"}, "has labels of 00, 08 alone"),
        ({"fsdp": True}, "needs torchrun"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            segment.train(replace(given, out=tmp_path / "other", **more), CPU)
    for more, message in (
        ({"model": "unet"}, "'unet' is none of spunet"),
        ({"fsdp": True, "policy": "auto_mixed"}, "does not go with --fsdp"),
        ({"policy": "5=auto_mixed"}, "needs key 0"),
        ({"policy": "nonsense"}, "nonsense"),
        ({"lr": 0.0}, "not positive"),
    ):
        with pytest.raises(typer.BadParameter, match=message):
            replace(given, precision="fp32", **more).check()


def test_a_checkpoint_of_another_network_is_refused(scenes: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_scenes.main(data, train=2, val=1, points=300)
    given = settings(data, tmp_path / "run", epochs=1)
    segment.train(given, CPU)
    last = given.out / "last.pt"
    whole = checkpoint.read(last)
    for change, message in (
        ({"settings": {**whole["settings"], "gone": 1}}, r"settings that this script has not: gone"),
        ({"settings": {**whole["settings"], "model": "small"}}, "of --model small: .*size mismatch for stem"),
    ):
        checkpoint.write(tmp_path / "other.pt", {**whole, **change})
        with pytest.raises(checkpoint.CheckpointError, match=message):
            segment.evaluate_command(tmp_path / "other.pt", None, None, None, None, "cpu", 0)
    weights = {name: value for name, value in whole["model"].items() if name != "head.bias"}
    checkpoint.write(last, {**whole, "model": weights})
    with pytest.raises(checkpoint.CheckpointError, match=r"not those of --model tiny: .*head\.bias"):
        segment.train(replace(given, resume=True), CPU)
    checkpoint.write(last, whole)
    (data / "semantic-kitti.yaml").write_text(  # the same names in another order would learn on, wrongly
        "labels: {0: none, 10: car, 40: road, 50: building, 70: green, 80: pole}\nlearning_map: "
        "{0: 0, 40: 1, 50: 2, 10: 3, 70: 0, 80: 0}\nlearning_map_inv: {0: 0, 1: 40, 2: 50, 3: 10}\n"
    )
    message = r"learned 19 classes \(car, .*\), .*data has 3 \(road, building, car\)"
    with pytest.raises(checkpoint.CheckpointError, match=message):
        segment.train(replace(given, resume=True), CPU)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        segment.evaluate_command(last, None, None, None, None, "cpu", 0)
    with pytest.raises(checkpoint.CheckpointError, match=r"scannet has 20 \(wall, "):
        segment.evaluate_command(last, scenes / "scannet", None, None, None, "cpu", 0)


def test_a_run_without_a_labelled_point_to_evaluate_keeps_its_latest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_scenes.main(tmp_path / "data", train=2, val=1, points=300)
    path = tmp_path / "data/sequences/08/labels/000000.label"
    write(path, 0 * np.fromfile(path, np.uint32))
    given = settings(tmp_path / "data", tmp_path / "run", shadow=1)
    segment.train(given, CPU)
    assert "no point of the evaluation scans has a class" in capsys.readouterr().err
    assert checkpoint.read(given.out / "best.pt")["step"] == 3
    segment.export_best(given, CPU)  # shadow verification is on, and sees nothing of it
    assert (given.out / "engine.vxe").exists()


@pytest.mark.slow
def test_a_fault_of_the_data_is_one_line(tmp_path: Path) -> None:
    make_scenes.main(tmp_path / "data", train=2, val=1, points=300)
    path = tmp_path / "data/sequences/00/labels/000001.label"
    write(path, put(np.fromfile(path, np.uint32), 7, 333))
    options = "--batch 2 --model small --epochs 1 --voxel-size 0.5 --device cpu --workers 1 --out"
    command = [sys.executable, str(EXAMPLES / "segment.py"), "train", str(tmp_path / "data")]
    command += [*options.split(), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last == f"error: {path}, row 7: label id 333 is not in the learning map"
    done = subprocess.run([*command[:-1], str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr.strip() == f"error: [Errno 17] File exists: '{path}'"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"precision": "fp16", "fp16_accum": True}, "fp16 inputs, fp16 accumulator"),
        pytest.param({"precision": "fp16"}, "fp16 inputs, fp32 accumulator", marks=pytest.mark.slow),
        ({"policy": "fp16_promoted"}, "fp16 inputs, fp16_promoted accumulator promoted every 64"),
        ({"allow_tf32": True, "shadow": 3}, "fp32 inputs, fp32 accumulator"),
    ],
    ids=["fp16-accum", "fp16", "promoted", "tf32"],
)
def test_what_is_asked_for_is_what_runs(
    more: dict[str, Any], said: str, scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    seen = []
    step = segment.Trainer.train_step

    def watch(self: Any, portions: Any) -> None:
        seen.append(torch.backends.cuda.matmul.allow_tf32)
        step(self, portions)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segment.Trainer, "train_step", watch)
        segment.train(settings(scenes / "kitti", tmp_path, audit=True, epochs=1, **more), CPU)
    launches = [line for line in capsys.readouterr().err.splitlines() if " fprop: " in line]
    assert len(launches) > 10 and all(said in line for line in launches)
    assert seen == [more.get("allow_tf32", False)] * 2 and torch.backends.cuda.matmul.allow_tf32 == before


@pytest.mark.parametrize("added", [1.0, float("nan")])
def test_an_engine_that_disagrees_is_an_error(added: float, run: Path, tmp_path: Path) -> None:
    given, network = segment.load(checkpoint.read(run / "best.pt"), CPU.device)
    data, autocast = given.evaluation_scans(), given.autocast(CPU.device)
    said = export(network, data, CPU.device, autocast, tmp_path / "a.vxe", 1e-6)
    assert "2 scans" in said
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ExportError, match="in another class; at most"):
        read = segment.voxmma.engine.load

        def other(path: Path) -> Any:
            engine = read(path)
            weight = max(engine._program.consts, key=lambda tensor: tensor.numel())
            weight.add_(added)
            return engine

        patch.setattr(segment.voxmma.engine, "load", other)
        export(network, data, CPU.device, autocast, tmp_path / "a.vxe", 1e-6)


def test_points_that_overflow_are_counted(scenes: Path) -> None:
    data = settings(scenes / "kitti", Path("out")).evaluation_scans()

    class Network(torch.nn.Module):
        """Logits 0 but for those of the first voxel."""

        def forward(self, x: Voxels) -> Voxels:
            logits = x.feats.new_zeros((len(x), 19))
            logits[0] = torch.tensor([float("inf"), float("-inf"), *[float("nan")] * 17])
            return x.with_feats(logits)

    found = evaluate(Network(), data, CPU, torch.autocast("cpu", enabled=False))
    assert found.overflown == sum(int((data[place][2] == 0).sum()) for place in range(2)) > 0
    assert found.loss == pytest.approx(np.log(19))


def test_scores_of_a_table() -> None:
    table = torch.tensor([[3, 1, 0], [2, 4, 0], [0, 0, 0]]).double()
    found = Scores.of(table, 0.5, ["a", "b", "c"])
    assert found.iou == {"a": 3 / 6, "b": 4 / 7} and found.accuracy == 0.7
    assert found.miou == pytest.approx((3 / 6 + 4 / 7) / 2)


def test_a_picture_without_labels(scenes: Path, tmp_path: Path) -> None:
    folder = KittiFolder(scenes / "kitti", ["08"])
    scan = folder.read(0)
    picture(tmp_path / "a.png", replace(scan, labels=None), scan.labels, folder.classes)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---- several processes -------------------------------------------------------------------------------------

#: Runs of two processes, and how far their curves may be from those of one.
RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "ddp": ({"precision": "fp64"}, 1e-10),
    "accumulate": ({"precision": "fp64", "batch": 4, "accumulate": 2, "epochs": 2}, 1e-10),
    "fsdp": ({"precision": "fp64", "fsdp": True, "save_every": 2}, 1e-10),
    "fp32": ({"lr": 1e-3}, 1e-2),
}


def _rank(rank: int, folder: str, data: str, kind: str) -> None:
    """One of two processes: every run, and what went wrong in it."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=2)
    said = {}
    for name, (more, _) in RUNS.items():
        try:
            given = settings(Path(data), Path(folder) / name, **more)
            if given.fsdp:  # breaks off and goes on
                with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
                    interrupt(patch, 3)
                    segment.train(given, Group(device, rank, 2))
                    raise AssertionError("the run was not interrupted")
            segment.train(replace(given, resume=True), Group(device, rank, 2))
        except Exception:
            said[name] = traceback.format_exc()
    torch.save(said, f"{folder}/{rank}.pt")
    dist.barrier()
    os._exit(0)  # without gloo's destructors, see tests/nn/test_containers.py


def _of_three(rank: int, folder: str, data: str) -> None:
    """One of three processes: a whole run, and one that breaks off and goes on."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 3)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    group = Group(torch.device("cpu"), rank, 3)
    given = settings(Path(data), Path(folder) / "whole", model="small", batch=3, save_every=2)
    segment.train(given, group)
    cut = replace(given, out=Path(folder) / "cut", resume=True)
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        interrupt(patch, 3)
        segment.train(cut, group)
    segment.train(cut, group)
    dist.barrier()
    os._exit(0)


@pytest.mark.slow
def test_three_processes_resume_bit_for_bit(scenes: Path, tmp_path: Path) -> None:
    """Sums over three depend on their order, and so on how DDP lays out its buckets."""
    mp.spawn(_of_three, (str(tmp_path), str(scenes / "kitti")), nprocs=3)  # type: ignore[no-untyped-call]
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def two(request: pytest.FixtureRequest, scenes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the runs of two processes."""
    folder: Path = tmp_path_factory.mktemp("two") / request.param
    folder.mkdir()
    mp.spawn(_rank, (str(folder), str(scenes / "kitti"), request.param), nprocs=2)  # type: ignore[no-untyped-call]
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_two_processes_with_half_the_batch_learn_as_one(
    name: str, two: Path, scenes: Path, tmp_path: Path
) -> None:
    failed = [torch.load(two / f"{rank}.pt").get(name, "") for rank in range(2)]
    assert not any(failed), "\n".join(failed)
    more, tolerance = RUNS[name]
    # Statistics of norms are those of a portion, over all processes.
    given = settings(scenes / "kitti", tmp_path, **{**more, "fsdp": False})
    segment.train(given, Group(torch.device(two.name)))
    one, both = losses(tmp_path), losses(two / name)
    assert len(one) == 6 - 4 * (name == "accumulate")
    np.testing.assert_allclose(both, one, rtol=tolerance)
    np.testing.assert_allclose(both[0], one[0], rtol=1e-5)
    if tolerance < 1e-6:
        weights, shared = (checkpoint.read(run / "last.pt")["model"] for run in (tmp_path, two / name))
        assert weights.keys() == shared.keys()
        for key, value in weights.items():
            torch.testing.assert_close(
                shared[key], value, rtol=1e-6, atol=1e-8, msg=lambda m, k=key: f"{k}: {m}"
            )
