"""Sets and maps of few rows, made by bitmaps and by few launches, equal those made by sorts and on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from voxmma._extension import _C
from voxmma.sparse import derive
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.packing import COORD_MAX, COORD_MIN
from voxmma.sparse.sized import (
    Plan,
    SizedSet,
    derive_sized,
    index_sized,
    lookup_sized,
    plan_room,
    plans_sized,
)

from conftest import random_coords

NEAR = (0, -64, -64, -64, 3, 191, 191, 191)  # 26 bits: a bitmap for the set and for what is derived from it
MIDDLE = (0, -2048, -2048, -64, 3, 2047, 2047, 63)  # 33 bits: a sort, then a hash table
TALL = (0, -1024, -1024, -64, 3, 1023, 1023, 63)  # 31 bits: a two-level bitmap, then a hash table
FAR = (0, *[COORD_MIN] * 3, 1022, *[COORD_MAX] * 3)
BOUNDS = {"near": NEAR, "tall": TALL, "middle": MIDDLE, "far": FAR}
SIZES = [0, 1, 63, 64, 65, 256, 257, 5000]
SAME = Geometry((3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1))
FIVE = Geometry((5, 5, 5), (1, 1, 1), (1, 1, 1), (2, 2, 2))
DOWN = Geometry((3, 3, 3), (2, 2, 2), (1, 1, 1), (1, 1, 1))
HALF = Geometry((2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0))


def rows_of(n: int, samples: int) -> Tensor:
    """n rows of `samples` samples, negative ones too, within NEAR, in no order."""
    side = max(4, round((3 * n / samples) ** (1 / 3)) + 2)
    rows = random_coords(-(-n // samples), side, batch=samples)
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(n))[:n]]
    return (rows - torch.tensor([0, side // 2, 1, 5])).int()


def made(
    rows: Tensor, capacity: int, bounds: tuple[int, ...], device: torch.device
) -> tuple[SizedSet, Tensor]:
    """index_sized of `rows` with others behind them that repeat them, and its status."""
    coords = torch.full((capacity, 4), 3, dtype=torch.int32, device=device)
    coords[: len(rows)] = rows.to(device)
    status = torch.full((4,), 77, dtype=torch.int64, device=device)
    count = torch.tensor([len(rows)], dtype=torch.int64, device=device)
    return index_sized(coords, count, bounds, status), status


def ranks(made: SizedSet, n: int) -> Tensor:
    """Rows by rank, on the CPU."""
    return made.index[0 if made.coords.is_cuda else 1][:n].long().cpu()


def ordered(made: SizedSet, n: int) -> list[Tensor]:
    """What the first n rows of a set have to be equal in, however they were indexed."""
    assert made.inner is not None
    return [made.coords[:n].cpu(), ranks(made, n), made.inner.cpu()]


@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("n", SIZES)
def test_sets_do_not_depend_on_how_far_the_bounds_reach(device: torch.device, n: int, samples: int) -> None:
    """The bitmaps, the two-level one and the sorts make the same order, bounds and derived sets."""
    rows = rows_of(n, samples)
    n = len(rows)
    exact = CoordSet(rows.to(device), 4)
    if n and device.type == "cuda":
        expected = exact.hash_index().order.long().cpu()
    for capacity in {n, n + 1, n + 700}:
        for name, bounds in BOUNDS.items():
            one, status = made(rows, capacity, bounds, device)
            assert status.tolist()[:3] == [n, -1, -1], name
            assert one.inner is not None and (not n or tuple(one.inner.tolist()) == exact.bounds), name
            if n and device.type == "cuda":
                assert torch.equal(ranks(one, n), expected), name
                looked = lookup_sized(one, exact.coords)
                assert torch.equal(looked.cpu(), torch.arange(n)), name
                assert bool(
                    (lookup_sized(one, exact.coords + exact.coords.new_tensor([0, 0, 900, 0])) == -1).all()
                )
            for geometry in (DOWN, HALF):
                below = derive.windows(exact, geometry)
                for room in {below.num, below.num + 300}:
                    line = torch.zeros(4, dtype=torch.int64, device=device)
                    coarse = derive_sized(one, derive.Derived(geometry, False, None), room, line)
                    assert line.tolist()[:2] == [below.num, 0], name
                    assert coarse.count.tolist() == [below.num], name
                    assert torch.equal(coarse.coords[: below.num], below.coords), name
                    if below.num and device.type == "cuda":
                        assert torch.equal(coarse.index[0][: below.num], below.hash_index().order), name
                        assert torch.equal(
                            lookup_sized(coarse, below.coords).cpu(), torch.arange(below.num)
                        ), name


@pytest.mark.parametrize("n", [3, 64, 65, 5000])
@pytest.mark.parametrize("fault", ["bad", "twice", "both", "all the same", "over", "below"])
def test_faults_are_told_alike(device: torch.device, n: int, fault: str) -> None:
    """Row numbers of bad rows and duplicates are those of the CPU; every row keeps exactly one rank."""
    rows = rows_of(n, 2)
    n = len(rows)
    if fault in ("bad", "both"):
        rows[[n - 1, n // 2]] = torch.tensor([[0, 2**31 - 1, 0, 0], [1, 5, -(2**31), 5]], dtype=torch.int32)
    if fault in ("twice", "both"):
        rows = torch.cat([rows, rows[[0, n // 3, 0]]])
    if fault == "all the same":
        rows = rows[:1].repeat(n, 1)
    given = {"over": len(rows) + 5, "below": -3}.get(fault, len(rows))
    told = []
    for name, bounds in (*BOUNDS.items(), ("cpu", NEAR)):
        where = torch.device("cpu") if name == "cpu" else device
        status = torch.full((4,), 77, dtype=torch.int64, device=where)
        count = torch.tensor([given], dtype=torch.int64, device=where)
        one = index_sized(rows.to(where).contiguous(), count, bounds, status)
        told.append(status.tolist()[:3])
        used = max(0, min(given, len(rows)))
        assert torch.equal(ranks(one, used).sort().values, torch.arange(used)), name
    assert all(line == told[-1] for line in told), told
    assert told[-1][0] == given
    assert (told[-1][1] >= 0) == (fault in ("bad", "both"))
    assert (told[-1][2] >= 0) == (fault in ("twice", "both", "all the same"))


@pytest.mark.parametrize("short", [0, 1, 40])
@pytest.mark.parametrize("bounds", BOUNDS)
def test_room_that_is_short_is_told(device: torch.device, bounds: str, short: int) -> None:
    rows = rows_of(3000, 1)
    need = derive.windows(CoordSet(rows), DOWN).num
    one, _ = made(rows, 3300, BOUNDS[bounds], device)
    status = torch.zeros(4, dtype=torch.int64, device=device)
    coarse = derive_sized(one, derive.Derived(DOWN, False, None), need - short, status)
    sites, outside = status.tolist()[:2]
    assert outside == 0 and (sites == need if bounds == "near" or not short else sites > need - short)
    assert coarse.count.tolist() == [0 if short else need]


@pytest.mark.parametrize("n", [1, 255, 256, 257, 5000])
def test_many_plans_at_once_are_those_made_one_by_one(device: torch.device, n: int) -> None:
    """More than go into a launch; ranked by the last block, compact or not."""
    one, _ = made(rows_of(n, 1), n + 300, NEAR, device)
    status = torch.zeros(4, dtype=torch.int64, device=device)
    coarse = derive_sized(one, derive.Derived(DOWN, False, None), 2 * n + 300, status)
    asked = [
        (one, one, SAME, False),
        (one, coarse, DOWN, False),
        (coarse, one, DOWN, True),
        (one, one, FIVE, False),
    ]
    plans = []
    for inputs, outputs, geometry, reverse in asked * 6:
        room = (0, 0)
        if device.type == "cuda":
            room = plan_room(geometry, reverse, len(inputs.coords), len(outputs.coords))[2:]
        plans.append(Plan(inputs, outputs, geometry, reverse, room))
    for compact in (False, True):
        lines = torch.full((len(plans), 4), 7, dtype=torch.int64, device=device)
        together = plans_sized(plans, lines, compact)
        for plan, tensors, line in zip(plans, together, lines, strict=True):
            alone_line = torch.full((1, 4), 7, dtype=torch.int64, device=device)
            (alone,) = plans_sized([plan], alone_line, compact)
            assert torch.equal(alone_line[0], line)
            if device.type == "cpu":
                assert all(map(torch.equal, alone, tensors))
                continue
            used = -(-int(plan.outputs.count) // 256)
            tiles = used if compact else len(tensors[5])
            for half in range(2):
                mine, theirs = (t[1].view(-1)[: 8 * tiles].view(2, tiles, 4)[half] for t in (tensors, alone))
                assert torch.equal(mine[:, [0, 2, 3]], theirs[:, [0, 2, 3]])
                if not half:
                    assert bool((mine[: max(used - 1, 0), 3] >= mine[1:used, 3]).all())
            assert torch.equal(tensors[0][: 256 * used], alone[0][: 256 * used])
            assert torch.equal(tensors[5][:used], alone[5][:used])


def test_plans_are_cut_to_what_they_use() -> None:
    whole = torch.arange(5000, dtype=torch.int32)
    plan = [whole[:1024], whole[1024:1056].view(2, 4, 4), whole[1056:1096].view(10, 4)]
    plan += [
        whole[1100:1260].view(10, 16),
        whole[1260:1660],
        torch.arange(4 * 8 * 256).short().view(4, 8, 256),
    ]
    made = _C.cut_plan(plan, 700, 300, 3, 20)
    order, schedule, passes, frag, uniq, local = plan
    expected = [order[:512], schedule.view(-1)[:16].view(2, 2, 4), passes[:3], frag[:3], uniq[:80], local[:2]]
    assert all(
        torch.equal(a, b) and a.data_ptr() == b.data_ptr() for a, b in zip(made, expected, strict=False)
    )
    assert made[6].shape == (0, 700, 300) and made[6].dtype == torch.int32
    before = _C.write_count(tuple(made))
    made[4][0] = 7
    assert _C.write_count(tuple(made)) != before and uniq[0] == 7
    for sizes in ((1, 1025, 3, 20), (1, 300, 11, 20), (1, 300, 3, 101)):
        with pytest.raises(ValueError, match="no "):
            _C.cut_plan(plan, *sizes)


@pytest.mark.gpu
def test_few_launches() -> None:
    """What a frame's sets and maps may launch: counted in a CUDA graph, of a set and a level below."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.device("cuda", 0)
    rows = rows_of(5000, 1)
    status = torch.zeros((4, 4), dtype=torch.int64, device=device)

    def kernels(work: object) -> int:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()  # type: ignore[operator]
            torch.cuda.synchronize()
        return sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profiler.events())

    coords, count = rows.to(device), torch.tensor([len(rows)], device=device)
    one = index_sized(coords, count, TALL, status[0])
    near = index_sized(coords, count, NEAR, status[0])
    room = plan_room(SAME, False, len(rows), len(rows))[2:]
    plans = [Plan(one, one, SAME, False, room)] * 3
    lines = torch.zeros((3, 4), dtype=torch.int64, device=device)
    kernels(lambda: index_sized(coords, count, TALL, status[0]))  # the profiler's own start
    assert kernels(lambda: index_sized(coords, count, TALL, status[0])) == 7
    assert kernels(lambda: derive_sized(near, derive.Derived(DOWN, False, None), 9000, status[1])) == 4
    assert kernels(lambda: plans_sized(plans, lines)) == 2
