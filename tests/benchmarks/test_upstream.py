"""benchmarks/upstream.py on a checkout that a test writes."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from conftest import script

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "upstream.py"

#: A network where SoftGroup has one, of our own.
BLOCKS = """
import spconv.pytorch as spconv
from spconv.pytorch.modules import SparseModule
from addict import Dict

class ResidualBlock(SparseModule):
    pass

class UBlock(SparseModule):
    def __init__(self, planes, norm, reps, block, indice_key_id):
        super().__init__()
        assert Dict(a=3).a == 3 and issubclass(block, SparseModule)
        self.body = spconv.SparseSequential(
            spconv.SubMConv3d(planes[0], planes[1], 3, indice_key="a"),
            norm(planes[1]),
            spconv.SparseConv3d(planes[1], planes[2], 2, 2, indice_key="b"),
            spconv.SparseInverseConv3d(planes[2], {channels}, 2, indice_key="b"),
        )

    def forward(self, x):
        return self.body(x)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    made = tmp_path / "checkout" / "softgroup" / "model"
    made.mkdir(parents=True)
    for folder in (made, made.parent):
        (folder / "__init__.py").write_text("raise ImportError('packages around a file are not imported')")
    (made / "blocks.py").write_text(BLOCKS.replace("{channels}", "5"))
    return tmp_path / "checkout"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.slow
def test_networks_of_a_checkout_are_run(checkout: Path, tmp_path: Path) -> None:
    file, results = tmp_path / "table.json", tmp_path / "results"
    done = run(checkout, "--voxels", 300, "--repeat", 1, "--jobs", 2, "--json", file)
    (row,) = json.loads(file.read_text())["rows"]
    assert row["repository"] == "checkout" and row["network"] == "UBlock" and row["voxmma_ms"] > 0
    assert done.returncode == 0 and not row["note"] and row["agrees"] in (True, None), done.stdout
    options = ["--results", str(results), "--card", "X", "--commit", "abc", "--date", "2026-01-01"]
    assert script("collect").main([str(file), *options]) == 0
    text = script("readme_tables").TABLES["upstream"](script("readme_tables").load(results))
    assert f"| checkout | UBlock | {row['voxels']} | fp64 |" in text and f"{row['voxmma_ms']:.2f}" in text
    done = run(checkout, "--budget", 0)
    assert done.returncode == 1 and "UBlock" in done.stdout and "no result within 0 s" in done.stdout
    (checkout / "softgroup/model/blocks.py").write_text("import nothing_of_that_name")
    done = run(checkout, "--voxels", 300)
    assert done.returncode == 1 and "nothing_of_that_name" in done.stdout
    assert "holds none of" in run(tmp_path).stderr
    assert "has no spconv" in run(checkout, "--reference", "nothing-of-that-name").stderr


def test_differences_are_told() -> None:
    upstream = script("upstream")
    rows, features = torch.tensor([[0, 1], [0, 2]]), torch.tensor([[1.0], [2.0]])
    assert upstream.difference([rows, features], [rows, features + 0.02]) == (pytest.approx(0.02 / 2.02), "")
    assert upstream.difference([rows], [rows + 1])[1] == "other voxels"
    assert "shapes" in upstream.difference([features], [features.t()])[1]


def test_outputs_are_compared_voxel_by_voxel() -> None:
    upstream = script("upstream")
    spconv = pytest.importorskip("voxmma.compat.spconv.pytorch")
    indices = torch.tensor([[0, 2, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]]).int()
    x = spconv.SparseConvTensor(torch.tensor([[1.0], [2.0], [4.0]]), indices, [4, 4, 4], 1)
    rows, features = upstream.flat({"b": x})
    assert rows.tolist() == [[0, 1, 0, 0], [0, 2, 0, 0]] and features.tolist() == [[2], [5]]
    assert [
        t.shape for t in upstream.flat([torch.zeros(3), {"z": torch.zeros(2), "a": torch.zeros(1)}, None])
    ] == [
        (3,),
        (1,),
        (2,),
    ]


#: A network that writes what it does into a log, and the files that are waited for.
FAKE = """
import sys, time
from pathlib import Path
folder, name = Path(sys.argv[1]), sys.argv[2]
def tell(word):
    with open(folder.parent / "log", "a") as log: print(word, file=log)
if name == "ours":
    (folder / "state.pt").touch()
elif not sys.stdin.readline() or not (folder / "state.pt").exists():
    sys.exit("no weights")
tell("ready"); (folder / f"{name}.pt").touch()
sys.stdin.readline()
for number in ("ms0", "ms1", "ms2", "ms3", "rest"):
    tell(f"{name}-begin"); time.sleep(0.02); tell(f"{name}-end"); (folder / f"{name}.{number}").touch()
    sys.stdin.readline()
tell("disturbs the next one")
"""


def pairs_of(upstream: ModuleType, folder: Path, code: str = FAKE) -> list[Any]:
    """The two processes of each of two networks."""
    children = []
    for number in "01":
        where = folder / number
        where.mkdir()
        ours = upstream.Child("a:b", where, "voxmma", sys.executable, where / "ours.pt")
        theirs = upstream.Child("a:b", where, "spconv", sys.executable, where / "theirs.pt", ours)
        for child, name in ((ours, "ours"), (theirs, "theirs")):
            child.command = [sys.executable, "-c", code, str(where), name]
            children.append(child)
    return children


@pytest.mark.parametrize("jobs", [1, 3, 4])
def test_networks_get_ready_side_by_side_and_are_timed_alone(jobs: int, tmp_path: Path) -> None:
    upstream = script("upstream")
    children = pairs_of(upstream, tmp_path)
    args = argparse.Namespace(device="cpu", dtype="fp64", voxels=1, repeat=1, jobs=jobs)
    words = []
    for first in range(0, 4, jobs):
        part = children[first : first + jobs]
        upstream.together(part, args, math.inf)
        words += ["ready"] * len(part)
        for network in ("0", "1"):  # the two libraries of one by turns
            names = [child.out.stem for child in part if child.out.parent.name == network]
            words += 5 * [f"{name}-{word}" for name in names for word in ("begin", "end")]
    assert (tmp_path / "log").read_text().split() == words
    assert [child.wrong(math.inf) for child in children] == [""] * 4 and all(c.ended() for c in children)


def test_what_is_left_of_a_network_without_its_sparse_layers() -> None:
    upstream = script("upstream")

    class Sparse(torch.nn.Linear):
        indice_key = "a"

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.head = Sparse(2, 2), torch.nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.layer(self.layer(x)))

    net, x = torch.nn.Sequential(Twice(), torch.nn.ReLU()), torch.rand(3, 2)
    want = net(x)
    (kept,) = map(upstream.Kept, upstream.sparse_layers(net))
    assert torch.equal(net(x), want) and len(kept.given) == 2
    kept.again, kept.forward = itertools.cycle(kept.given), None
    assert torch.equal(net(x), want) and torch.equal(net(x), want)


def test_networks_without_figures_say_why(tmp_path: Path) -> None:
    upstream = script("upstream")
    fails = FAKE.replace(
        'if name == "ours":', 'if name == "ours": sys.exit("no such layer")\nif name == "ours":'
    )
    children = pairs_of(upstream, tmp_path, fails)
    args = argparse.Namespace(device="cpu", dtype="fp64", voxels=1, repeat=1, jobs=4, budget=9, tolerance=0)
    upstream.together(children[:2], args, math.inf)
    row = {"difference": None, "agrees": None, "note": ""}
    assert not upstream.compare(row, *children[:2], args) and row["note"] == "no such layer"
    upstream.together(children[2:], args, 0.0)  # of which the time is over
    assert not upstream.compare(row | {"note": ""}, *children[2:], args)
    assert [child.wrong(9) for child in children[2:]] == ["no result within 9 s"] * 2
    for name in ("ours", "theirs"):
        (tmp_path / "1" / f"{name}.log").write_text(f"warning\n{name} has no such layer\n")
    for child in children[2:]:
        child.stopped = False
    assert upstream.compare(row | {"note": ""}, *children[2:], args)


def test_stand_ins_reduce_rows_and_number_cells() -> None:
    standins = script("upstream_standins")
    src, index = torch.tensor([[1.0, 2.0], [3.0, 5.0], [8.0, 6.0]]), torch.tensor([2, 0, 2])
    assert standins.scatter(src, index).tolist() == [[3, 5], [0, 0], [9, 8]]
    assert standins.scatter(src, index, reduce="mean").tolist() == [[3, 5], [0, 0], [4.5, 4]]
    many = torch.eye(5000, 1, dtype=torch.float16)
    counted = standins.scatter(many, torch.zeros(5000).long(), reduce="mean")
    assert counted.item() == pytest.approx(1 / 5000, rel=0.01)
    ends = torch.tensor([0, 1, 3])
    assert standins.segment_csr(src, ends, reduce="max").tolist() == [[1, 2], [8, 6]]
    assert standins.segment_csr(src, ends, reduce="mean").tolist() == [[1, 2], [5.5, 5.5]]
    points = torch.tensor([[5.0, 1, 0], [6, 1, 0], [7, 1, 0], [5, 9, 0], [5, 1, 4]])
    batch = torch.tensor([0, 0, 0, 1, 1])
    cells = standins.voxel_grid(points, 2, batch)
    assert cells[0] == cells[1] and len(set(cells.tolist())) == 4
