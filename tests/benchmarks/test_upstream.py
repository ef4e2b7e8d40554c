"""benchmarks/upstream.py on a checkout that a test writes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

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
    table = tmp_path / "table.json"
    done = run(checkout, "--voxels", 300, "--repeat", 1, "--json", table)
    (row,) = json.loads(table.read_text())
    assert row["repository"] == "softgroup" and row["network"] == "UBlock" and row["voxmma_ms"] > 0
    has_reference = row["difference"] is not None
    assert done.returncode == 0 if has_reference else not row["note"], done.stdout + done.stderr
    (checkout / "softgroup/model/blocks.py").write_text("import nothing_of_that_name")
    done = run(checkout, "--voxels", 300)
    assert done.returncode == 1 and "nothing_of_that_name" in done.stdout
    assert run(tmp_path).returncode != 0


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
