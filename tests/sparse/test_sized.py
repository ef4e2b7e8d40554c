"""Sets and maps whose sizes stay on the device equal those whose sizes the host knows, for every count."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma.data.scenes import load_scan
from voxmma.dispatch.selection import card
from voxmma.ops.kernels import compiled
from voxmma.sparse import derive
from voxmma.sparse.build import neighbor_table
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.cores import MapCore
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.maps import KernelMap, kernel_map
from voxmma.sparse.packing import COORD_MAX, COORD_MIN
from voxmma.sparse.sized import Plan, SizedSet, derive_sized, index_sized, plan_room, plans_sized

from conftest import grid_coords, random_coords, surface_coords

TILE, MISSING = 256, 512
BOUNDS = (0, -64, -64, -64, 3, 191, 191, 191)  # of the sets here; few enough cells for a bitmap
FAR = (0, *[COORD_MIN] * 3, 1022, *[COORD_MAX] * 3)  # for a hash table
CASES = ["random", "dense", "surface", "strays", "scan", "one", "empty", "tile"]
GEOMETRIES = {  # and whether the sites are children
    "k2s2": (Geometry((2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0)), False),
    "k3s2": (Geometry((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1)), False),
    "k3s3d2": (Geometry((3, 1, 2), (3, 2, 1), (2, 1, 1), (0, 0, -3)), False),
    "children": (Geometry((2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0)), True),
    "dilated": (Geometry((3, 3, 1), (1, 1, 1), (2, 1, 1), (2, 1, 0)), True),
}
SAME = Geometry((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))


def case(name: str) -> Tensor:
    """(N, 4) int32 rows within BOUNDS, in no order."""
    rows = {
        "random": lambda: random_coords(3000, 30, batch=3) - torch.tensor([0, 11, 60, 0]),
        "dense": lambda: (
            grid_coords((13, 12, 11), batch=2) + torch.tensor([1, 3, -6, 150])
        ),  # many unique rows
        "surface": lambda: surface_coords(60),
        "strays": lambda: 5 * random_coords(500, 36) + torch.tensor([2, 1, -7, 0]),
        "scan": lambda: torch.from_numpy(load_scan().coords(0.1)),
        "one": lambda: torch.tensor([[3, 191, -64, 0]]),
        "empty": lambda: torch.zeros((0, 4)),
        "tile": lambda: surface_coords(30)[:TILE],
    }[name]()
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))
    return rows[order].int()


def status_of(device: torch.device) -> tuple[Tensor, Callable[[], list[int]]]:
    """A status between numbers that must stay as they are, and what reads it."""
    whole = torch.full((12,), 77, dtype=torch.int64, device=device)

    def read() -> list[int]:
        numbers = whole.tolist()
        assert numbers[:4] == numbers[8:] == [77] * 4
        return numbers[4:7]

    return whole[4:8], read


def padded(coords: Tensor, capacity: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows with worthless ones behind them: repetitions, and some that cannot be packed. And their number."""
    worthless = torch.full((capacity - len(coords), 4), COORD_MAX + 5, dtype=torch.int32)
    if len(coords):
        worthless[::2] = coords[: len(worthless[::2])].repeat(capacity // len(coords) + 1, 1)[
            : len(worthless[::2])
        ]
    return torch.cat([coords, worthless]).to(device), torch.tensor([len(coords)], device=device)


def sized_set(
    coords: Tensor, capacity: int, device: torch.device, bounds: tuple[int, ...] = BOUNDS
) -> SizedSet:
    status, read = status_of(device)
    made = index_sized(*padded(coords, capacity, device), bounds, status)
    assert read() == [len(coords), -1, -1]
    return made


def check_set(made: SizedSet, coords: CoordSet) -> None:
    """AssertionError unless the sets are the same, index and order included."""
    n = coords.num
    assert made.count.tolist() == [n]
    assert torch.equal(made.coords[:n], coords.coords)
    if n and made.inner is not None:
        assert tuple(made.inner.tolist()) == coords.bounds
    if coords.device.type == "cuda":
        assert torch.equal(made.index[0][:n], coords.hash_index().order)
        if n:
            assert torch.equal(
                voxmma._C.lookup_rows(coords.coords, *made.index), torch.arange(n, device="cuda")
            )
            far = coords.coords + coords.coords.new_tensor([0, 1000, 0, 0])
            assert bool((voxmma._C.lookup_rows(far, *made.index) == -1).all())
    else:
        keys, order = coords.sorted_keys()
        assert torch.equal(made.index[0][:n], keys) and torch.equal(made.index[1][:n], order)
        assert bool((made.index[0][n:] > keys.amax()).all() if n else True)


def eager_map(inputs: CoordSet, outputs: CoordSet, geometry: Geometry, reverse: bool) -> KernelMap:
    core = MapCore(geometry, None if inputs is outputs else outputs)
    return KernelMap(inputs, outputs, core, reverse)._built()


def plan_sized(*plan: Any, status: Tensor, compact: bool = False) -> list[Tensor]:
    """The tensors of one map. plan: fields of Plan."""
    return plans_sized([Plan(*plan)], status.view(1, 4), compact)[0]


def plan(inputs: SizedSet, outputs: SizedSet, geometry: Geometry, reverse: bool, share: float = 1) -> Any:
    """The tensors of plan_sized and its status; `share` of the room that always suffices."""
    device = outputs.coords.device
    room = (0, 0)
    if device.type == "cuda":
        *_, passes, uniq4 = plan_room(geometry, reverse, len(inputs.coords), len(outputs.coords))
        room = int(share * passes), int(share * uniq4)
    status, read = status_of(device)
    return plan_sized(inputs, outputs, geometry, reverse, room, status=status), read


def check_map(tensors: list[Tensor], expected: KernelMap, capacity: int) -> None:
    """AssertionError unless the maps lead the same rows to the same rows, on a GPU by equal tiles."""
    n, volume = expected.out_coords.num, expected.kernel_volume
    if n:
        table = neighbor_table(tensors, volume, capacity)[:, :n]
        assert torch.equal(table, expected.neighbor_table())
    if expected.device.type == "cpu":
        assert all(map(torch.equal, tensors[:3], expected.tensors[:3]))
        return
    mine = [t.cpu() for t in tensors[:-1]]
    theirs = [t.cpu() for t in expected._direction().settled()[:-1]]
    used, tiles = theirs[1].shape[1], -(-capacity // TILE)
    assert torch.equal(mine[0][: used * TILE], theirs[0]) and torch.equal(mine[5][:used], theirs[5])
    assert bool((mine[0][used * TILE :] == -1).all()) and bool((mine[5][used:] == MISSING).all())
    numbers = [0, 2, 3]  # the arena places passes freely
    assert torch.equal(mine[1][:, :used, numbers], theirs[1][:, :, numbers])
    empty = mine[1][:, used:]
    assert empty[..., 0].tolist() == [list(range(used, tiles))] * 2
    assert bool((empty[..., 3] == 0).all()) and bool((empty[..., 2] == -(-volume // 32)).all())
    for (_, first, count, _), (_, other, _, _) in zip(mine[1][1], theirs[1][1], strict=False):
        here, there = slice(first, first + count), slice(other, other + count)
        assert torch.equal(mine[2][here][:, [0, 1, 3]], theirs[2][there][:, [0, 1, 3]])
        assert torch.equal(mine[3][here], theirs[3][there])
        for (_, _, begin, unique), (_, _, begin_there, _) in zip(
            mine[2][here], theirs[2][there], strict=True
        ):
            listed = mine[4][4 * begin : 4 * begin + unique]
            assert torch.equal(listed, theirs[4][4 * begin_there : 4 * begin_there + unique])
    check_empty_tiles(mine, empty[0], volume)


def check_empty_tiles(tensors: list[Tensor], rows: Tensor, volume: int) -> None:
    for _, first, count, _ in rows.tolist():
        passes, frag = tensors[2][first : first + count], tensors[3][first : first + count]
        assert passes[:, 0].tolist() == list(range(0, volume, 32))
        assert passes[:, 1].tolist() == [min(32, volume - k) for k in range(0, volume, 32)]
        assert not passes[:, 2:].any() and not frag.any()


@pytest.mark.parametrize("more", [0, 1, 300, 5000])
@pytest.mark.parametrize("name", CASES)
def test_an_index_is_that_of_the_rows(device: torch.device, name: str, more: int) -> None:
    coords = case(name)
    check_set(sized_set(coords, len(coords) + more, device), CoordSet(coords.to(device)))


@pytest.mark.parametrize("bounds", [BOUNDS, pytest.param(FAR, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", GEOMETRIES)
@pytest.mark.parametrize("name", CASES)
def test_output_sets_and_maps_are_those_of_the_rows(
    device: torch.device, name: str, kind: str, bounds: tuple[int, ...]
) -> None:
    geometry, to_children = GEOMETRIES[kind]
    coords = case(name)
    rooms: list[Any] = [(0, None), (700, None), (40, (20, 9, 130))]
    if device.type == "cpu":  # one set for each geometry and scene: both meet all three
        rooms = [rooms[(CASES.index(name) + list(GEOMETRIES).index(kind)) % 3]]
    for more, shape in rooms:
        exact = CoordSet(coords.to(device), 4)
        expected = derive.Derived(geometry, to_children, shape).make(exact)
        source = sized_set(coords, len(coords) + more, device, bounds)
        status, read = status_of(device)
        key = derive.Derived(geometry, to_children, shape)
        made = derive_sized(source, key, expected.num + more, status)
        assert read()[:2] == [expected.num, 0]
        check_set(made, expected)
        fine, coarse = (
            ((made, expected), (source, exact)) if to_children else ((source, exact), (made, expected))
        )
        for (inputs, ins), (outputs, outs), reverse in ((fine, coarse, False), (coarse, fine, True)):
            tensors, read = plan(inputs, outputs, geometry, reverse)
            between = eager_map(ins, outs, geometry, reverse)
            check_map(tensors, between, len(outputs.coords))
            assert read()[2] == between.num_pairs
        tensors, _ = plan(made, made, SAME, False)  # and one level down
        check_map(tensors, eager_map(expected, expected, SAME, False), len(made.coords))


@pytest.mark.parametrize("size", [(3, 3, 3), (2, 2, 2), (5, 5, 5), (1, 9, 9)])
@pytest.mark.parametrize("name", CASES)
def test_maps_of_a_set_to_itself(device: torch.device, name: str, size: tuple[int, int, int]) -> None:
    coords = case(name)
    exact = CoordSet(coords.to(device), 4)
    geometry = kernel_map(exact, size).core.geometry
    for more in (0, 5, 3000):
        made = sized_set(coords, len(coords) + more, device)
        tensors, read = plan(made, made, geometry, False)
        expected = eager_map(exact, exact, geometry, False)
        check_map(tensors, expected, len(made.coords))
        assert read()[2] == expected.num_pairs


def test_several_maps_at_once(device: torch.device) -> None:
    """More than go into a launch, of all sizes and directions, one of them too large to go with others."""
    down, fine = GEOMETRIES["k3s2"][0], case("surface")
    exact = CoordSet(fine.to(device), 4)
    coarse = derive.windows(exact, down)
    source = sized_set(fine, len(fine) + 900, device)
    made = derive_sized(source, derive.Derived(down, False, None), coarse.num + 900, status_of(device)[0])
    none = sized_set(fine[:0], 0, device)
    empty = CoordSet(fine[:0].to(device), 4)
    wide = Geometry((1, 9, 9), (1, 1, 1), (1, 1, 1), (0, 4, 4))
    five = Geometry((5, 5, 5), (1, 1, 1), (1, 1, 1), (2, 2, 2))
    asked = [
        *[(s, e, s, e, g, False) for g in (SAME, five, wide) for s, e in ((source, exact), (made, coarse))],
        (source, exact, made, coarse, down, False),
        (made, coarse, source, exact, down, True),
        (none, empty, none, empty, SAME, False),
        *[(source, exact, source, exact, SAME, False)] * 16,
    ]
    plans = []
    for inputs, _, outputs, _, geometry, reverse in asked:
        room = (0, 0)
        if device.type == "cuda":
            room = plan_room(geometry, reverse, len(inputs.coords), len(outputs.coords))[2:]
        plans.append(Plan(inputs, outputs, geometry, reverse, room))
    status = torch.full((len(plans), 4), 7, dtype=torch.int64, device=device)
    for tensors, line, (_, ins, outputs, outs, geometry, reverse) in zip(
        plans_sized(plans, status), status.tolist(), asked, strict=True
    ):
        expected = eager_map(ins, outs, geometry, reverse)
        check_map(tensors, expected, len(outputs.coords))
        assert line[2] == expected.num_pairs
    assert plans_sized([], status[:0]) == []


@pytest.mark.gpu
def test_many_tiles_have_the_schedule_of_the_rows() -> None:
    """More tiles than a window, and room for more than there are, on both sides of four rounds."""
    coords = surface_coords(300)
    device = torch.device("cuda", 0)
    for n, capacity in (
        (len(coords), len(coords) + 90_000),
        (90_000, 180_000),
        (130_000, 180_000),
        (900, 180_000),
    ):
        exact = CoordSet(coords[:n].to(device))
        status, _ = status_of(device)
        bounds = (0, 0, 0, 0, 0, 511, 511, 511)
        made = index_sized(*padded(coords[:n], capacity, device), bounds, status)
        check_set(made, exact)
        check_map(plan(made, made, SAME, False)[0], eager_map(exact, exact, SAME, False), capacity)


def frames() -> list[Tensor]:
    """Sets of all sizes up to 4000 rows."""
    return [case("random"), case("empty"), case("one"), surface_coords(44)[:3872], random_coords(4000, 17)]


def test_a_captured_graph_serves_every_frame(device: torch.device) -> None:
    """Three levels and their maps, made once by a CUDA graph and then for other sets in the same buffers."""
    down = GEOMETRIES["k3s2"][0]
    coords, count = padded(torch.zeros((0, 4)).int(), 4000, device)
    numbers = torch.zeros((9, 4), dtype=torch.int64, device=device)

    def network() -> list[tuple[SizedSet, list[list[Tensor]]]]:
        status = iter(numbers)
        level = index_sized(coords, count, BOUNDS, next(status))
        levels = []
        for capacity in (9000, 3000, None):
            maps = [plan_sized(level, level, SAME, False, room(SAME, level, level), status=next(status))]
            finer = level
            if capacity is not None:
                level = derive_sized(finer, derive.Derived(down, False, None), capacity, next(status))
                rooms = room(down, finer, level)
                maps.append(plan_sized(finer, level, down, False, rooms, status=next(status)))
            levels.append((finer, maps))
        return levels

    def room(geometry: Geometry, inputs: SizedSet, outputs: SizedSet) -> tuple[int, int]:
        if device.type == "cpu":
            return 0, 0
        *_, passes, uniq4 = plan_room(geometry, False, len(inputs.coords), len(outputs.coords))
        return passes, uniq4

    run = network
    if device.type == "cuda":
        network()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = network()

        def run() -> list[tuple[SizedSet, list[list[Tensor]]]]:
            graph.replay()
            return made

    for rows in frames():
        coords.copy_(padded(rows, 4000, device)[0])
        count.fill_(len(rows))
        levels = run()
        exact = CoordSet(rows.to(device), 4)
        for finer, maps in levels:
            check_set(finer, exact)
            check_map(maps[0], eager_map(exact, exact, SAME, False), len(finer.coords))
            if len(maps) == 2:
                coarse = derive.windows(exact, down)
                capacity = maps[1][-1].shape[2]
                check_map(maps[1], eager_map(exact, coarse, down, False), capacity)
                exact = coarse


# ---- kernels over plans with room -------------------------------------------------------------------------


def whole_numbers(rows: int, columns: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Small whole numbers: sums of products are exact in any order."""
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    return torch.randint(-2, 3, (rows, columns), generator=generator).to(device, dtype)


def with_room(rows: Tensor, capacity: int) -> Tensor:
    """NaN behind the rows: nobody may read them."""
    made = rows.new_full((capacity, rows.shape[1]), torch.nan)
    made[: len(rows)] = rows
    return made


def some_tiles(device: torch.device, op: str) -> list[tuple[str, torch.dtype, str]]:
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    if device.type == "cpu":
        return [("cpu", torch.float32, "fp32")]
    here = card(device)
    return [(t.name, dtypes[t.input], t.accum) for t in compiled() if t.op == op and t.runs_on(here)]


def conv(x: Tensor, w: Tensor, maps: list[Tensor], rows: int, tile: str, accum: str) -> Tensor:
    rest = rows, False, False, accum, tile, tile, "", None
    return torch.ops.voxmma.conv(x, w, None, maps, [], *rest)


def wgrad(x: Tensor, dy: Tensor, maps: list[Tensor], volume: int, tile: str, accum: str) -> Tensor:
    return torch.ops.voxmma.conv_wgrad(x, dy, maps, [], volume, 1, False, accum, tile, "", None)


@pytest.mark.parametrize("name", ["dense", "one", "empty", "surface"])
@pytest.mark.parametrize("size", [3, 4])  # one group of offsets and two
def test_kernels_run_over_plans_with_room(device: torch.device, name: str, size: int) -> None:
    coords = case(name)
    n, capacity, volume, c_in, c_out = len(coords), len(coords) + 1700, size**3, 32, 48
    exact = CoordSet(coords.to(device), 4)
    expected = kernel_map(exact, size)
    geometry = expected.core.geometry
    made = sized_set(coords, capacity, device)
    tensors, _ = plan(made, made, geometry, False)
    ops = torch.ops.voxmma
    for tile, dtype, accum in some_tiles(device, "fprop"):
        x = whole_numbers(n, c_in, device, dtype)
        w = whole_numbers(volume * c_in, c_out, device, dtype).view(volume, c_in, c_out)
        for weight in (w, w.index_fill(2, torch.tensor([5], device=device), torch.inf)):
            y = conv(with_room(x, capacity), weight, tensors, capacity, tile, accum)[:n]
            wanted = conv(x, weight, expected.tensors, n, tile, accum)
            assert torch.equal(y.nan_to_num(7), wanted.nan_to_num(7)), tile
    for tile, dtype, accum in some_tiles(device, "wgrad"):
        x, dy = whole_numbers(n, c_in, device, dtype), whole_numbers(n, c_out, device, dtype)
        for _ in range(2):
            both = with_room(x, capacity), with_room(dy, capacity)
            dw = wgrad(*both, tensors, volume, tile, accum)
            wanted = wgrad(x, dy, expected.tensors, volume, tile, accum)
            assert torch.equal(dw.nan_to_num(7), wanted.nan_to_num(7)), tile
            dy[1:2, 3] = torch.inf
    x = whole_numbers(n, c_in, device, torch.float32)
    wide = with_room(x, capacity)
    counts = ops.neighbor_counts(tensors, volume, capacity)[:n]
    assert torch.equal(counts, ops.neighbor_counts(expected.tensors, volume, n))
    pooled = ops.pool_sum(wide, None, None, tensors, [], volume, capacity, False, False)[:n]
    assert torch.equal(pooled, ops.pool_sum(x, None, None, expected.tensors, [], volume, n, False, False))
    for largest in (True, False):
        found = ops.pool_max(wide, tensors, [], volume, capacity, False, largest, True)
        wanted = ops.pool_max(x, expected.tensors, [], volume, n, False, largest, True)
        assert all(torch.equal(mine[:n], theirs) for mine, theirs in zip(found, wanted, strict=True))
        picked = ops.pool_pick(wide, found[1], tensors, [], volume, False)[:n]
        assert torch.equal(picked, ops.pool_pick(x, wanted[1], expected.tensors, [], volume, False))


# ---- faults: told, never raised, and nothing is touched outside the buffers ------------------------------


@pytest.mark.parametrize("extra", [0, 500])
def test_bad_rows_are_told_and_are_nobodys_neighbours(device: torch.device, extra: int) -> None:
    coords = case("surface")
    worst = [
        [0, 192, 0, 0],
        [4, 0, 0, 0],
        [-1, 5, 5, 5],
        [2**31 - 1, 5, 5, 5],
        [0, -(2**31), 5, 5],
        [0, COORD_MIN, COORD_MAX, 2**31 - 1],
    ]
    for values in worst:
        rows = coords.clone()
        rows[[70, 9, 3000]] = torch.tensor(values, dtype=torch.int32)
        good = torch.ones(len(rows), dtype=torch.bool)
        good[[70, 9, 3000]] = False
        status, read = status_of(device)
        made = index_sized(*padded(rows, len(rows) + extra, device), BOUNDS, status)
        assert read() == [len(rows), 9, -1]
        order = made.index[device.type == "cpu"][: len(rows)].long().cpu()
        assert torch.equal(order.sort().values, torch.arange(len(rows)))
        assert sorted(order[-3:].tolist()) == [9, 70, 3000]
        # The other rows are as they were without the bad ones.
        tensors, _ = plan(made, made, SAME, False)
        table = neighbor_table(tensors, 27, len(rows) + extra)[:, : len(rows)].cpu()
        expected = kernel_map(CoordSet(rows[good]), 3).neighbor_table()
        kept = torch.nonzero(good).flatten().int()
        mapped = torch.where(expected >= 0, kept[expected.clamp(min=0).long()], -1)
        assert torch.equal(table[:, good], mapped)
        for geometry, to_children in GEOMETRIES.values():
            derived = derive_sized(
                made, derive.Derived(geometry, to_children, None), 80_000, status_of(device)[0]
            )
            assert 0 < derived.count.item() <= 80_000
            plan(derived, derived, SAME, False)


@pytest.mark.parametrize("repeats", [[7], [7, 3, 3, 499]])
def test_duplicates_are_told(device: torch.device, repeats: list[int]) -> None:
    coords = random_coords(500, 180)
    rows = torch.cat([coords, coords[repeats]])
    status, read = status_of(device)
    made = index_sized(*padded(rows, len(rows) + 40, device), BOUNDS, status)
    assert read() == [len(rows), -1, 500 << 32 | repeats[0]]
    tensors, _ = plan(made, made, SAME, False)
    table = neighbor_table(tensors, 27, len(rows) + 40)[:, : len(rows)]
    assert int(table.max()) < len(rows)
    same = torch.cat([coords[:1]] * 700)
    status, read = status_of(device)
    made = index_sized(*padded(same, 700, device), BOUNDS, status)
    assert read() == [700, -1, 1 << 32 | 0]
    plan(made, made, SAME, False)


@pytest.mark.parametrize(("given", "taken"), [(-5, 0), (0, 0), (3872, 3600), (1 << 40, 3600), (3600, 3600)])
def test_counts_are_clamped_and_told(device: torch.device, given: int, taken: int) -> None:
    coords = surface_coords(44)[:3600]
    status, read = status_of(device)
    count = torch.tensor([given], device=device)
    made = index_sized(coords.to(device), count, BOUNDS, status)
    assert read() == [given, -1, -1]
    tensors, read = plan(made, made, SAME, False)
    assert read()[2] == (kernel_map(CoordSet(coords), 3).num_pairs if taken else 0)
    derived = derive_sized(
        made, derive.Derived(GEOMETRIES["k2s2"][0], False, None), 3600, status_of(device)[0]
    )
    expected = derive.windows(CoordSet(coords[:taken]), GEOMETRIES["k2s2"][0])
    assert derived.count.tolist() == [expected.num]
    assert torch.equal(derived.coords[: expected.num].cpu(), expected.coords)
    del tensors


@pytest.mark.parametrize("bounds", [BOUNDS, FAR])
@pytest.mark.parametrize("short", [0, 1, 500, 1500])
def test_a_set_without_room_is_empty_and_tells_its_need(
    device: torch.device, short: int, bounds: tuple[int, ...]
) -> None:
    geometry = GEOMETRIES["k3s2"][0]
    coords = case("surface")
    need = derive.windows(CoordSet(coords), geometry).num
    source = sized_set(coords, 8000, device, bounds)
    status, read = status_of(device)
    made = derive_sized(source, derive.Derived(geometry, False, None), need - short, status)
    sites, outside, _ = read()
    assert outside == 0 and (sites > need - short if short and bounds == FAR else sites == need)
    assert made.count.tolist() == [0 if short else need]
    status, read = status_of(device)
    below = derive_sized(made, derive.Derived(geometry, False, None), 100 if short else 8000, status)
    assert (read()[0] == 0) == bool(short) and (below.count.item() == 0) == bool(short)
    tensors, read = plan(source, made, geometry, False)
    assert (read()[2] == 0) == bool(short)
    if short and device.type == "cuda":
        assert bool((tensors[0] == -1).all())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_compact_schedules_have_the_tiles_that_have_rows(name: str) -> None:
    device = torch.device("cuda", 0)
    coords = case(name)
    exact = CoordSet(coords.to(device), 4)
    made = sized_set(coords, len(coords) + 3000, device)
    n = len(made.coords)
    room = plan_room(SAME, False, n, n)[2:]
    whole = plan_sized(made, made, SAME, False, room, status=status_of(device)[0], compact=True)
    tensors = voxmma._C.cut_plan(whole, len(coords), len(coords), len(whole[2]), len(whole[4]) // 4)
    check_map(tensors, eager_map(exact, exact, SAME, False), len(coords))


@pytest.mark.parametrize("name", [name for name in CASES if name != "empty"])
def test_bounds_may_be_known_to_the_host(device: torch.device, name: str) -> None:
    coords = case(name)
    exact = CoordSet(coords.to(device), 4)
    source = sized_set(coords, len(coords), device)
    for geometry, to_children in GEOMETRIES.values():
        known = dataclasses.replace(source, inner=None, bounds=exact.bounds)
        expected = (derive.children if to_children else derive.windows)(exact, geometry)
        made = derive_sized(
            known, derive.Derived(geometry, to_children, None), expected.num + 9, status_of(device)[0]
        )
        assert made.inner is None and made.bounds == expected.bounds
        check_set(made, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("passes", "uniq4"), [(0, None), (None, 0), (5, None), (None, 300), (7, 500), (0, 0)]
)
def test_tiles_without_room_are_empty_and_tell_their_need(passes: int | None, uniq4: int | None) -> None:
    device = torch.device("cuda", 0)
    for name, size in (("dense", 3), ("surface", 3), ("random", 5)):
        coords = case(name)
        exact = CoordSet(coords.to(device), 4)
        expected = kernel_map(exact, size)
        made = sized_set(coords, len(coords) + 600, device)
        geometry, n = expected.core.geometry, exact.num
        *_, most_passes, most_uniq4 = plan_room(geometry, False, len(made.coords), len(made.coords))
        room = (most_passes if passes is None else passes, most_uniq4 if uniq4 is None else uniq4)
        status, read = status_of(device)
        tensors = plan_sized(made, made, geometry, False, room, status=status)
        theirs = expected._direction().settled()
        assert read() == [len(theirs[4]) // 4, len(theirs[2]), expected.num_pairs]
        mine = [t.cpu() for t in tensors]
        assert len(mine[2]) == len(mine[3]) == room[0] + -(-(size**3) // 32) and len(mine[4]) == 4 * room[1]
        empty = mine[1][1][:, 1] == room[0]
        assert bool(empty.any()) and bool((mine[1][1][empty, 3] == 0).all())
        check_empty_tiles(mine, mine[1][1][empty], size**3)
        assert torch.equal(mine[1][0][:, 0].sort().values, torch.arange(mine[1].shape[1], dtype=torch.int32))
        # Tiles that found room are right, the others have no rows.
        order, local = mine[0].view(-1, TILE), mine[5]
        assert bool((order[empty] == -1).all()) and bool((local[empty] == MISSING).all())
        table = neighbor_table(tensors, size**3, len(made.coords)).cpu()
        rows = order[~empty].flatten()
        rows = rows[rows >= 0].long()
        assert torch.equal(table[:, rows], expected.neighbor_table().cpu()[:, rows])
        x = whole_numbers(n, 16, device, torch.float16)
        w = whole_numbers(size**3 * 16, 16, device, torch.float16).view(-1, 16, 16)
        for tile, dtype, accum in some_tiles(device, "fprop"):
            if dtype == torch.float16:
                y = conv(with_room(x, len(made.coords)), w, tensors, len(made.coords), tile, accum)
                assert torch.equal(y.cpu()[rows], conv(x, w, expected.tensors, n, tile, accum).cpu()[rows])


def test_sites_outside_the_range_are_told(device: torch.device) -> None:
    coords = torch.tensor([[0, COORD_MAX, 5, 5], [0, COORD_MAX - 3, 5, 5]], dtype=torch.int32)
    bounds = (0, COORD_MAX - 7, 0, 0, 0, COORD_MAX, 7, 7)
    status, read = status_of(device)
    source = index_sized(*padded(coords, 10, device), bounds, status)
    geometry = Geometry((3, 1, 1), (1, 1, 1), (1, 1, 1), (1, 0, 0))
    status, read = status_of(device)
    made = derive_sized(source, derive.Derived(geometry, True, None), 100, status)
    sites, outside, _ = read()
    assert outside != 0 and sites == 5 and made.count.tolist() == [5]


@pytest.mark.gpu
def test_bindings_refuse_what_does_not_fit() -> None:
    device = torch.device("cuda", 0)
    coords, count = padded(case("tile"), 300, device)
    status, _ = status_of(device)
    for wrong in (count.int(), count.cpu(), count.repeat(2)):
        with pytest.raises((ValueError, RuntimeError), match="count"):
            voxmma._C.index_sized(coords, wrong, BOUNDS, status)
    for wrong in (status[:3], status.cpu(), status.int()):
        with pytest.raises((ValueError, RuntimeError), match="status"):
            voxmma._C.index_sized(coords, count, BOUNDS, wrong)
    made = index_sized(coords, count, BOUNDS, status)
    with pytest.raises(ValueError, match="pass_capacity"):
        plan_sized(made, made, SAME, False, (-1, 5), status=status)
    with pytest.raises(ValueError, match="capacity"):
        derive_sized(made, derive.Derived(GEOMETRIES["k2s2"][0], False, None), -1, status)


@pytest.mark.gpu
def test_nothing_is_read_back() -> None:
    device = torch.device("cuda", 0)
    coords = case("surface")
    args = padded(coords, 8000, device)
    status = torch.zeros(4, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        made = index_sized(*args, BOUNDS, status)
        for geometry, to_children in GEOMETRIES.values():
            derived = derive_sized(made, derive.Derived(geometry, to_children, None), 20_000, status)
            for reverse, (inputs, outputs) in itertools.product((False, True), ((made, derived),)):
                plan(inputs, outputs, geometry, reverse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
