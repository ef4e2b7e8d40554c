"""torch.compile over scenes of several sizes: right with every backend, and a bounded number of graphs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch._dynamo.utils import counters

import voxmma
from voxmma import nn
from voxmma.dispatch import measurements, store
from voxmma.export.mapped import one_graph

from conftest import random_coords

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
SCENES = ((100, 2), (150, 2), (30, 1), (1, 1), (220, 4), (0, 3), (90, 2), (7, 1), (300, 2), (0, 3), (1, 1))
BACKENDS = ("eager", "aot_eager", "inductor")


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.norm = nn.SparseConv3d(4, 8, 3), nn.BatchNorm(8)
        self.down, self.groups = nn.SparseConv3d(8, 8, 2, stride=2), nn.GroupNorm(2, 8)
        self.deep, self.up = nn.SparseConv3d(8, 8, 3), nn.SparseConvTranspose3d(8, 8, 2, stride=2)
        self.last, self.small = nn.SparseConv3d(16, 4, 3), nn.SparseMaxPool3d(2)
        self.pool, self.head = nn.GlobalMaxPool(), torch.nn.Linear(4, 3)

    def forward(self, x: voxmma.Voxels) -> tuple[voxmma.Voxels, torch.Tensor]:
        a = nn.functional.relu(self.norm(self.wide(x)))
        b = self.up(self.deep(self.groups(self.down(a))))
        z = self.last(nn.functional.cat(a, b))
        return z, self.head(self.pool(self.small(z)))


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    torch._dynamo.reset()


def scene(n: int, batch: int, device: torch.device, seed: int = 0) -> voxmma.Voxels:
    coords = random_coords(n, 12, batch, seed=seed).to(device)
    return voxmma.Voxels(coords, torch.randn(n, 4, device=device), batch_size=batch)


def check(
    plain: torch.nn.Module, other: torch.nn.Module, compiled: Callable[..., Any], x: voxmma.Voxels
) -> voxmma.Voxels:
    """Outputs, gradients and running statistics of a training step of two equal networks."""
    results = []
    for net, run in ((plain, plain), (other, compiled)):
        net.zero_grad()
        z, out = run(x)
        (z.feats.sum() + out.square().sum()).backward()
        results.append((z, out))
    (z, out), (y, found) = results
    torch.testing.assert_close(y.feats, z.feats, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found, out, rtol=1e-4, atol=1e-4)
    assert torch.equal(y.coords, z.coords) and (y.stride, y.batch_size) == (z.stride, z.batch_size)
    for one, two in zip(plain.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-3, atol=1e-3)
    for one, two in zip(plain.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-4)
    return y


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fault_57_scenes_of_every_size(device: torch.device, backend: str) -> None:
    """New coordinates in every call. Graphs break around what makes maps; few are made, and none after all
    kinds of sizes were seen: 0, 1 and more rows, maps made by layers and, the next time, ahead of them."""
    plain = Net().to(device)
    other = copy.deepcopy(plain)
    compiled = torch.compile(other, backend=backend)
    for i, (n, batch) in enumerate((*SCENES, *SCENES)):
        check(plain, other, compiled, scene(n, batch, device, i))
    assert all("disable" in reason for reason in counters["graph_break"])  # what is left out on purpose
    known = graphs()
    assert known <= 40
    for i, (n, batch) in enumerate(SCENES):
        check(plain, other, compiled, scene(n + (2 if n > 1 else 0), batch, device, 100 + i))
    assert graphs() == known


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_fault_57_one_graph_for_every_scene(device: torch.device, backend: str) -> None:
    """The same without a break: maps are inputs of the graph."""
    plain = Net().to(device)
    other = copy.deepcopy(plain)
    compiled = one_graph(other, backend=backend)
    for i, (n, batch) in enumerate(SCENES):
        x = scene(n, batch, device, i)
        y = check(plain, other, compiled, x)
        assert y.coord_set is x.coord_set  # on the voxels that came in, maps included
    assert not counters["graph_break"]
    known = graphs()
    assert known <= 40
    for n in (110, 140, 130):
        check(plain, other, compiled, scene(n, 2, device, n))
    assert graphs() <= known + 2
    plain.eval(), other.eval()
    with torch.no_grad():
        x = scene(120, 2, device)
        torch.testing.assert_close(compiled(x)[1], plain(x)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.skipif(TORCH < (2, 12), reason="torch before 2.12 cannot decide a call for a size that varies")
def test_fault_57_records_are_not_traced(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Measured tiles are looked up by path and device, which torch.compile cannot trace. A CPU
    is looked up here as a GPU is."""
    owner = store.Owner("a card", "9.0", 1, "1.0", "a build")
    monkeypatch.setattr(store, "owner_of", lambda where, one_card=False: owner)
    monkeypatch.setattr(measurements, "stamp", lambda where: measurements.table(where).version)
    voxmma.settings._set(cache_dir=str(tmp_path))
    weights = [torch.randn(27, c, 8, device=device) for c in (4, 8, 16)]

    def step(x: voxmma.Voxels, weight: torch.Tensor, kernel_map: Any) -> torch.Tensor:
        y = nn.functional.spatially_sparse_conv(x, weight * 2, 3, kernel_map=kernel_map)
        return y.feats.sin()

    compiled = torch.compile(step, backend="eager")
    for dynamic_channels in weights:  # not parameters: their sizes become variable
        coords = random_coords(40, 6).to(device)
        x = voxmma.Voxels(coords, torch.randn(40, dynamic_channels.shape[1], device=device))
        mapping = voxmma.kernel_map(x, 3)
        torch.testing.assert_close(compiled(x, dynamic_channels, mapping), step(x, dynamic_channels, mapping))
    net = Net().to(device)
    check(net, copied := copy.deepcopy(net), torch.compile(copied, backend="eager"), scene(80, 2, device))
    assert any(place[0].parent == tmp_path for place in measurements._tables)


def test_fault_57_outputs_on_another_set(device: torch.device) -> None:
    """`coords=` makes a map under the ids of two sets: no graph is made for each of them."""
    layer = nn.SparseConv3d(4, 8, 3).to(device)

    def step(x: voxmma.Voxels, y: voxmma.Voxels) -> torch.Tensor:
        return layer(x.with_feats(x.feats.cos()), coords=y).feats.sin()

    compiled = torch.compile(step, backend="eager")
    for n in range(60, 80):
        x, y = scene(n, 2, device, n), scene(n + 5, 2, device, n + 1)
        torch.testing.assert_close(compiled(x, y), step(x, y))
    assert graphs() <= 6
