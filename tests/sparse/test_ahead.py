"""What a network asked of one input is made at once for the next, and equals what its layers would make."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma import Voxels, nn
from voxmma.compat.spconv import pytorch as spconv
from voxmma.sparse import ahead, derive, maps
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import KernelMap

from conftest import random_coords, surface_coords


class Network(torch.nn.Module):
    """Down twice and up again; with `deep`, once more."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.SparseConv3d(4, 8, 5)
        self.down = torch.nn.ModuleList(
            [
                nn.SparseConv3d(8, 8, 2, stride=2),
                nn.SparseConv3d(8, 8, 3, stride=2),
                nn.SparseConv3d(8, 8, 2, stride=2),
            ]
        )
        self.same = torch.nn.ModuleList([nn.SparseConv3d(8, 8, 3) for _ in range(3)])
        self.up = nn.SparseConvTranspose3d(8, 8, 3, stride=2)
        self.deep = True

    def forward(self, x: Voxels) -> Voxels:
        x = self.same[0](self.down[0](self.stem(x)))
        y = self.same[1](self.down[1](x))
        if self.deep:
            y = y.with_feats(y.feats + self.same[2](self.down[2](y)).feats.mean())
        return self.up(y)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_DEVICES", {"cuda", "cpu"})


class Builds:
    """What is built one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sets: list[Any] = []
        self.maps: list[Any] = []
        for module, name, to in (
            (derive, "_make_cpu", self.sets),
            (derive, "_make_cuda", self.sets),
            (maps, "build_cpu", self.maps),
            (maps, "build_cuda", self.maps),
        ):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name), to))

    def _counted(self, build: Any, to: list[Any]) -> Any:
        def counted(*args: Any) -> Any:
            to.append(args)
            return build(*args)

        return counted

    def take(self) -> tuple[int, int]:
        numbers = len(self.sets), len(self.maps)
        self.sets.clear()
        self.maps.clear()
        return numbers


def voxels(coords: Tensor, device: torch.device, grad: bool = False) -> Voxels:
    feats = torch.randn((len(coords), 4), generator=torch.Generator().manual_seed(len(coords)))
    return Voxels(coords.clone().to(device), feats.to(device).requires_grad_(grad), 3)


def alike(mine: Voxels, theirs: Voxels) -> None:
    assert torch.equal(mine.coords, theirs.coords) and torch.equal(mine.feats, theirs.feats)


SCENES = [surface_coords(40), surface_coords(48, seed=5), random_coords(3000, 60, 3), surface_coords(20)]


def test_the_second_input_finds_everything_made(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch)
    network = Network().to(device)
    numbers = []
    for grad in (False, True):
        for i, coords in enumerate((SCENES[0], SCENES[1], SCENES[1], SCENES[0])):
            with torch.set_grad_enabled(grad):
                x, z = voxels(coords, device, grad), voxels(coords, device, grad)
                y = network(x)
                made = builds.take()
                lone = Network().to(device)  # has seen nothing
                lone.load_state_dict(network.state_dict())
                expected = lone(z)
                exact = builds.take()
            alike(y, expected)
            numbers.append(exact)
            if i:
                assert made == (0, 0)
            else:
                assert made == ((0, exact[1] - numbers[0][1]) if grad else exact)
            if grad:
                y.feats.square().sum().backward()
                expected.feats.square().sum().backward()
                assert torch.equal(x.feats.grad, z.feats.grad)
                for mine, theirs in zip(network.parameters(), lone.parameters(), strict=True):
                    assert torch.equal(mine.grad, theirs.grad)  # sums over all rows, in the order of the maps
                network.zero_grad()
                assert builds.take() == (0, 0)
    assert numbers[0] == (3, 8) and numbers[-1] == (3, 10)  # beside those of the layers, two opposite ones


def test_layers_of_spconv_are_known_by_their_weight_in_inference_mode(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = Builds(monkeypatch)
    network = spconv.SparseSequential(
        spconv.SubMConv3d(4, 8, 3, indice_key="fine"),
        spconv.SparseConv3d(8, 8, 3, 2, indice_key="down"),
        spconv.SparseInverseConv3d(8, 8, 3, indice_key="down"),
    ).to(device)
    with torch.inference_mode():
        network.double()  # weights of inference mode, whose views do not say what they are of
        for coords, made in ((SCENES[0], (1, 3)), (SCENES[1], (0, 0))):
            rows = (coords - coords.amin(0)).int().to(device)
            feats = torch.ones((len(rows), 4), dtype=torch.float64, device=device)
            network(spconv.SparseConvTensor(feats, rows, [64, 64, 64], 3))
            assert builds.take() == made


def test_sets_and_maps_are_those_that_layers_make(device: torch.device) -> None:
    network = Network().to(device)
    with torch.no_grad():
        network(voxels(SCENES[0], device))
        for coords in (SCENES[1], SCENES[0]):
            x, other = voxels(coords, device), voxels(coords, device)
            network(x)
            Network().to(device)(other)
            mine, theirs = x.coord_set, other.coord_set
            for _ in range(3):
                assert mine.derived.keys() == theirs.derived.keys()
                assert len(mine.maps) == len(theirs.maps)
                for core, exact in zip(sorted_cores(mine), sorted_cores(theirs), strict=True):
                    assert core.key[0] == exact.key[0] and core.sides.keys() == exact.sides.keys()
                    for reverse in core.sides:
                        check_sides(mine, theirs, core, exact, reverse)
                (mine,), (theirs,) = mine.derived.values(), theirs.derived.values()
                assert torch.equal(mine.coords, theirs.coords) and mine.bounds == theirs.bounds
                assert mine.batch_size == theirs.batch_size and mine.finer.kind == theirs.finer.kind
                if device.type == "cuda":
                    assert torch.equal(mine.hash_index().order, theirs.hash_index().order)


def sorted_cores(coords: CoordSet) -> list[maps.MapCore]:
    return sorted(coords.maps.values(), key=lambda core: core.geometry)


def check_sides(mine: CoordSet, theirs: CoordSet, core: Any, exact: Any, reverse: bool) -> None:
    tables = []
    for coords, made in ((mine, core), (theirs, exact)):
        other = made.other or coords
        ends = (other, coords) if reverse else (coords, other)
        tables.append(KernelMap(*ends, made, reverse))
    assert torch.equal(tables[0].neighbor_table(), tables[1].neighbor_table())
    assert tables[0].num_pairs == tables[1].num_pairs
    assert [t.shape for t in tables[0].tensors] == [t.shape for t in exact.sides[reverse].settled()] and all(
        t.is_contiguous() for t in tables[0].tensors
    )


def test_what_does_not_fit_is_left_to_the_layers(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an input whose levels are small comes one whose levels are large; then there is room for both."""
    builds = Builds(monkeypatch)
    network = Network().to(device)
    scattered = 8 * random_coords(2500, 14, 1)  # each voxel a site of its own
    with torch.no_grad():
        network(voxels(surface_coords(50), device))
        builds.take()
        small = surface_coords(50)
        built = []
        for coords in (scattered, scattered, small, scattered):
            y = network(voxels(coords, device))
            built.append(builds.take())
            lone = Network().to(device)
            lone.load_state_dict(network.state_dict())
            alike(y, lone(voxels(coords, device)))
            builds.take()
        assert min(built[0]) > 0 and built[1:] == 3 * [(0, 0)]


def test_rooms_of_sets_are_closer_after_more_inputs(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []
    derive_sized = ahead.derive_sized

    def derived(source: Any, made: Any, room: int, status: Tensor) -> Any:
        rooms.append(room)
        return derive_sized(source, made, room, status)

    monkeypatch.setattr(ahead, "derive_sized", derived)
    network, spare = Network().to(device), []
    for _ in range(12):
        x = voxels(surface_coords(60), device)
        rooms.clear()
        with torch.no_grad():
            network(x)
        (made,) = [some for some in x.coord_set.derived.values() if some.num > 800]
        spare += [(rooms[0] - 256) / made.num] if rooms else []
    assert len(spare) == 11 and 1.24 < spare[0] < 1.26
    assert all(a > b for a, b in itertools.pairwise(spare)) and 1.1 < spare[-1] < 1.12


@pytest.mark.gpu
def test_rooms_follow_what_was_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the second input what is usual, of the third what the second took, with the slack of sets and maps:
    not what any plan could take, which is several times as much behind a stride."""
    builds, device = Builds(monkeypatch), torch.device("cuda", 0)
    network = nn.Sequential(*[nn.SparseConv3d(4, 4, 3, stride=s) for s in (1, 2, 1, 2, 1)]).to(device)
    for i in range(3):
        x = voxels(surface_coords(100), device, grad=True)
        network(x)
        assert (builds.take() == (0, 0)) == (i > 0)
    sets = [x.coord_set]
    for some in sets:
        sets.extend(some.derived.values())
    assert len(sets) == 3
    for core in [core for some in sets for core in some.maps.values()]:
        for side in core.sides.values():
            *shared, _, _ = side.tensors
            assert shared[-1].untyped_storage().nbytes() <= 1.6 * sum(t.nbytes for t in shared) + 40_000


def test_layers_that_make_a_view_of_their_weight_are_known(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of voxmma.compat do, whose parameters are in another library's order."""
    builds = Builds(monkeypatch)
    kept = torch.nn.Parameter(torch.randn(8, 27, 4, device=device))
    rest = nn.Sequential(nn.SparseConv3d(8, 8, 2, stride=2), nn.SparseConv3d(8, 8, 3)).to(device)
    for mode in (torch.no_grad, torch.inference_mode):
        for scene in SCENES[:2]:
            with mode():
                builds.take()
                rest(
                    nn.functional.spatially_sparse_conv(
                        voxels(scene, device), kept.permute(1, 2, 0), kernel_size=3
                    )
                )
    assert builds.take() == (0, 0)


def test_one_or_two_maps_are_made_one_by_one(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(monkeypatch)
    both = nn.Sequential(nn.SparseConv3d(4, 8, 3), nn.SparseConv3d(8, 8, 2, stride=2)).to(device)
    with torch.no_grad():
        for scene in SCENES[:3]:
            both(voxels(scene, device))
            assert builds.take() == (1, 2)


def test_what_nobody_takes_is_not_made_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(monkeypatch)
    network = Network().to(device)
    with torch.no_grad():
        network(voxels(SCENES[0], device))
        network.deep = False
        sizes = []
        for _ in range(3):
            x = voxels(SCENES[1], device)
            builds.take()
            network(x)
            assert builds.take() == (0, 0)
            level = next(iter(next(iter(x.coord_set.derived.values())).derived.values()))
            sizes.append((len(level.derived), len(level.maps)))
        assert sizes[0] > sizes[1] == sizes[2] == (0, 1)
        network.deep = True
        network(voxels(SCENES[0], device))
        assert builds.take() == (1, 2)
        network(voxels(SCENES[1], device))
        assert builds.take() == (0, 0)


def test_nothing_is_made_ahead_for_what_is_not_new(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = Network().to(device)
    made = []
    monkeypatch.setattr(ahead, "_make", lambda coords, *_: made.append(coords))
    with torch.no_grad():
        x = voxels(SCENES[0], device)
        network(x)
        network(x)
        empty = voxels(SCENES[0][:0], device)
        network.deep = False
        network(empty)
        assert not made
        y = voxels(SCENES[1], device)
        voxmma.kernel_map(y, 3)
        network(y)
        assert not made
        network(voxels(SCENES[1], device))
        assert len(made) == 1


def test_errors_are_those_of_the_layers(device: torch.device) -> None:
    network = Network().to(device)
    limited = nn.SparseConvTranspose3d(8, 8, 2, stride=2, generative=True, max_voxels=9000).to(device)
    with torch.no_grad():
        limited(network.stem(voxels(SCENES[3], device)))
        with pytest.raises(ValueError, match="max_voxels is 9,000"):
            limited(network.stem(voxels(SCENES[0], device)))
        edge = torch.tensor([[0, voxmma.sparse.packing.COORD_MAX, 3, 3], [0, 5, 5, 5]])
        with pytest.raises(ValueError, match="makes voxels outside"):
            limited(network.stem(voxels(edge, device)))


def test_nothing_keeps_networks_or_inputs_alive(device: torch.device) -> None:
    network = Network().to(device)
    gc.collect()
    before = len(ahead._ASKED)
    with torch.no_grad():
        for coords in SCENES[:3]:
            network(voxels(coords, device))
    assert len(ahead._ASKED) == before + 1
    assert not [made for made in gc.get_objects() if type(made) is CoordSet and made.num == len(SCENES[1])]
    del network
    gc.collect()
    assert len(ahead._ASKED) == before


@pytest.mark.gpu
def test_all_sizes_are_read_back_once() -> None:
    import warnings

    device = torch.device("cuda", 0)
    network = Network().to(device)
    with torch.no_grad():
        network(voxels(SCENES[0], device))
        network(voxels(SCENES[1], device))
        x = voxels(SCENES[0], device)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                network(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert len([c for c in caught if "synchroniz" in str(c.message)]) == 1


def test_rooms_are_not_guessed_from_what_says_little(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up with a voxel, and a card whose memory does not hold the rooms."""
    builds = Builds(monkeypatch)
    network = Network().to(device)
    with torch.no_grad():
        network(voxels(torch.tensor([[0, 3, 3, 3]]), device))
        one_by_one = builds.take()
        network(voxels(SCENES[0], device))
        assert builds.take() == one_by_one
        network(voxels(SCENES[1], device))
        assert builds.take() == (0, 0)

        def full(*_: Any, **__: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(ahead, "plans_sized", full)
            y = network(voxels(SCENES[1], device))
            assert builds.take() == one_by_one
        alike(y, network(voxels(SCENES[1], device)))
        assert builds.take() == (0, 0)


def test_sets_of_other_kinds_are_left_alone(device: torch.device) -> None:
    """As an engine's, which have neither an index nor a number of rows on the host."""

    class Other(CoordSet):
        __slots__ = ()

        def hash_index(self) -> Any:
            raise AssertionError("an index was asked for")

        sorted_keys = hash_index

    network = Network().to(device)
    with torch.no_grad():
        network(voxels(SCENES[0], device))
    coords = Other.trusted(SCENES[1].clone().to(device), 3)
    ahead.meet(coords, network.stem.weight)
    assert coords.place is None and not coords.maps and not coords.derived
