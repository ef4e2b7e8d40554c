"""Kernel maps against brute force, their cache and life, and the tile plan against a plain Python builder."""

from __future__ import annotations

import concurrent.futures
import copy
import functools
import gc
import io
import itertools
import math
import operator
import pickle
import sys
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import voxmma
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.index import HashIndex
from voxmma.sparse.maps import KernelMap, kernel_map
from voxmma.sparse.packing import COORD_MAX, COORD_MIN
from voxmma.sparse.tensor import Voxels

import conftest

Triple = tuple[int, int, int]

# ---- brute force -------------------------------------------------------------------------------------------


def brute_table(
    inputs: torch.Tensor,
    outputs: torch.Tensor,
    offsets: Sequence[Triple],
    mul: Triple = (1, 1, 1),
    div: Triple = (1, 1, 1),
) -> torch.Tensor:
    """(K, n_out) input row of every offset and output row through a dict, -1 = none."""
    rows = {tuple(c): row for row, c in enumerate(inputs.tolist())}
    table = torch.full((len(offsets), len(outputs)), -1, dtype=torch.int32)
    for k, offset in enumerate(offsets):
        for out, (batch, *space) in enumerate(outputs.tolist()):
            query = [c * m + o for c, m, o in zip(space, mul, offset, strict=True)]
            if all(q % d == 0 for q, d in zip(query, div, strict=True)):
                table[k, out] = rows.get((batch, *(q // d for q, d in zip(query, div, strict=True))), -1)
    return table


def check_map(made: KernelMap, table: torch.Tensor) -> None:
    """The map's table, pairs and pair count agree with a brute force table."""
    assert torch.equal(made.neighbor_table().cpu(), table)
    assert made.num_pairs == int((table >= 0).sum())
    pairs = made.pairs()
    assert len(pairs) == len(table)
    for (in_rows, out_rows), row in zip(pairs, table, strict=True):
        expected = torch.nonzero(row >= 0).flatten()
        assert torch.equal(out_rows.cpu(), expected)
        assert torch.equal(in_rows.cpu(), row[expected].long())


SHAPES = [(1, 1), (2, 1), (3, 1), (3, 2), ((1, 2, 3), (3, 2, 1)), (4, 1), ((5, 1, 2), 1), (5, 2)]


@pytest.mark.parametrize(("size", "dilation"), SHAPES, ids=str)
def test_submanifold_matches_brute_force(device: torch.device, size: Any, dilation: Any) -> None:
    coords = conftest.random_coords(400, 7, batch=3, seed=1)
    coords[:, 1:] -= 3
    made = kernel_map(CoordSet(coords.to(device)), size, dilation=dilation)
    offsets = conftest.kernel_offsets(size, dilation)
    assert made.offsets == offsets
    check_map(made, brute_table(coords, coords, offsets))


@pytest.mark.parametrize("size", [5, 7, (1, 9, 9), (9, 1, 4)], ids=str)
def test_fault_29_more_than_32_offsets(device: torch.device, size: Any) -> None:
    coords = conftest.random_coords(300, 8, seed=2)
    check_map(
        kernel_map(CoordSet(coords.to(device)), size),
        brute_table(coords, coords, conftest.kernel_offsets(size)),
    )


def test_pairs_of_rows_that_repeat_hold_nothing_else() -> None:
    """A set whose coordinates a tree_map moved together is still one of distinct voxels to whoever has it."""
    ins, outs = torch.tensor([1, 1, 0]), torch.tensor([0, 2, 1])
    assert [t.tolist() for t in voxmma._C.mirror_pairs(ins, outs, 3)] == [[1, 2], [0, 1]]
    rows, zero = torch.arange(3), torch.zeros(3, dtype=torch.int64)
    found = voxmma._C.match_rows(rows, rows, torch.tensor([2, 0, 2]), zero, [rows, zero, zero], [], 3)
    assert [t.tolist() for t in found] == [[1, 2], [0, 2]]


@pytest.mark.parametrize("size", [(3, 7, 7), (4, 5, 8)], ids=str)
def test_the_first_map_of_a_process_may_have_any_kernel(
    device: torch.device, size: Triple, clean: conftest.Clean
) -> None:
    """129 to 160 offsets: their plan takes nearly the shared memory that a block has without asking."""
    coords = conftest.random_coords(300, 8, seed=2)
    pairs = clean(
        "from voxmma.sparse.coords import CoordSet\n"
        "from voxmma.sparse.maps import kernel_map\n"
        f"coords = torch.tensor({coords.tolist()}, device={str(device)!r})\n"
        f"found = kernel_map(CoordSet(coords), {size}).num_pairs"
    )
    assert pairs == int((brute_table(coords, coords, conftest.kernel_offsets(size)) >= 0).sum())


def test_threads_make_maps_of_large_kernels(device: torch.device) -> None:
    """Their plans are made by one kernel, and take different amounts of shared memory."""
    coords = conftest.random_coords(300, 8, seed=2)
    wanted = {size: kernel_map(CoordSet(coords), size).num_pairs for size in (6, 7, 8, 9)}
    repeats = 300 if device.type == "cuda" else 2

    def make(size: int) -> set[int]:
        inputs, pairs = CoordSet(coords.to(device)), set()
        for _ in range(repeats):
            made = kernel_map(inputs, size)
            pairs.add(made.num_pairs)
            made.free()
        return pairs

    with concurrent.futures.ThreadPoolExecutor(len(wanted)) as threads:
        made = dict(zip(wanted, threads.map(make, wanted), strict=True))
    assert made == {size: {pairs} for size, pairs in wanted.items()}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.sets(st.tuples(st.integers(0, 2), *(st.integers(-4, 4),) * 3), max_size=40),
    size=st.tuples(*(st.integers(1, 4),) * 3),
    dilation=st.tuples(*(st.integers(1, 3),) * 3),
)
def test_any_map_is_the_brute_force_one_and_its_transpose_swaps_pairs(
    device: torch.device, rows: set[tuple[int, ...]], size: Triple, dilation: Triple
) -> None:
    coords = torch.tensor(list(rows), dtype=torch.int32).reshape(-1, 4)
    made = kernel_map(CoordSet(coords.to(device)), size, dilation=dilation)
    check_map(made, brute_table(coords, coords, made.offsets))
    assert made.symmetric == all(k % 2 == 1 for k in size)
    opposite = made.transposed()
    for k, (in_rows, out_rows) in enumerate(made.pairs()):
        mirrored = len(made.offsets) - 1 - k if made.symmetric else k
        forward = set(zip(in_rows.tolist(), out_rows.tolist(), strict=True))
        swapped = opposite.pairs()[mirrored]
        assert forward == set(zip(swapped[1].tolist(), swapped[0].tolist(), strict=True))


@pytest.mark.parametrize(
    ("size", "stride", "padding"), [(2, 2, None), (3, 2, 1), (5, 3, 2), ((1, 2, 3), (1, 2, 3), 0)], ids=str
)
def test_strided_maps_and_their_opposite(device: torch.device, size: Any, stride: Any, padding: Any) -> None:
    fine = conftest.random_coords(400, 9, batch=2, seed=3)
    fine[:, 1:] -= 4
    step = torch.tensor((stride,) * 3 if isinstance(stride, int) else stride)
    coarse = fine.clone()
    coarse[:, 1:] = fine[:, 1:].div(step, rounding_mode="floor")
    coarse = torch.unique(coarse, dim=0).int()
    inputs, outputs = CoordSet(fine.to(device), 2), CoordSet(coarse.to(device), 2)
    made = kernel_map(inputs, size, stride=stride, padding=padding, out_coords=outputs)
    mul = tuple(step.tolist())
    check_map(made, brute_table(fine, coarse, made.offsets, mul=mul))
    back = made.transposed()
    assert back.in_coords is outputs and back.out_coords is inputs and back.transposed() == made
    assert back.offsets == [(-x, -y, -z) for x, y, z in made.offsets]
    check_map(back, brute_table(coarse, fine, back.offsets, div=mul))
    assert not made.symmetric and back.num_pairs == made.num_pairs > 0


def test_cpu_tensors_are_sorted_by_offset_and_output() -> None:
    made = kernel_map(CoordSet(conftest.random_coords(200, 6, seed=4)), 3)
    in_rows, out_rows, kptr, size = made.tensors
    assert {t.dtype for t in made.tensors[:3]} == {torch.int64} and size.shape == (0, 200, 200)
    assert kptr[0] == 0 and kptr[-1] == len(in_rows) == len(out_rows) and len(kptr) == 28
    for k in range(27):
        assert bool((out_rows[kptr[k] : kptr[k + 1]].diff() > 0).all())


# ---- faults of the family, at the level of the map ---------------------------------------------------------


def test_fault_03_dilation_counts(device: torch.device) -> None:
    coords = CoordSet(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 2]], device=device))
    assert kernel_map(coords, 3).num_pairs == 2
    dilated = kernel_map(coords, 3, dilation=2)
    assert dilated.num_pairs == 4 and dilated.offsets[14] == (0, 0, 2)
    assert dilated.neighbor_table()[14].tolist() == [1, -1]


def test_fault_05_the_whole_coordinate_range_is_kept_apart(device: torch.device) -> None:
    corners = list(
        itertools.product((0, 1022), *((COORD_MIN, COORD_MIN + 1, -1, 0, 65535, 65536, COORD_MAX),) * 3)
    )
    coords = torch.tensor(corners, dtype=torch.int32)
    made = kernel_map(CoordSet(coords.to(device)), 3)
    check_map(made, brute_table(coords, coords, made.offsets))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_fault_12_no_voxels_and_a_single_one(device: torch.device, size: int) -> None:
    empty = CoordSet(torch.zeros((0, 4), dtype=torch.int32, device=device), 2)
    made = kernel_map(empty, size)
    assert made.num_pairs == 0 and made.transposed().num_pairs == 0
    assert made.neighbor_table().shape == (size**3, 0)
    single = CoordSet(torch.tensor([[0, 7, 153, 142]], device=device))
    assert kernel_map(single, size).num_pairs == 1
    onto = kernel_map(single, size, out_coords=CoordSet(empty.coords, 1))
    assert onto.num_pairs == 0 and onto.transposed().neighbor_table().tolist() == [[-1]] * size**3


def test_fault_25_an_even_kernel_has_no_identity_in_its_middle(device: torch.device) -> None:
    coords = conftest.grid_coords((2, 2, 2))
    made = kernel_map(CoordSet(coords.to(device)), 2)
    assert not made.symmetric and made.offsets[0] == (0, 0, 0) and made.offsets[-1] == (1, 1, 1)
    table = made.neighbor_table()
    assert table[0].tolist() == list(range(8)) and table[7].tolist() == [7] + [-1] * 7
    assert made.transposed().neighbor_table()[7].tolist() == [-1] * 7 + [0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_fault_27_a_map_made_without_gradients_serves_training(device: torch.device, mode: Any) -> None:
    with mode():
        coords = CoordSet(conftest.random_coords(50, 4).to(device))
        first = kernel_map(coords, 2)
    made = kernel_map(coords, 2)
    assert made == first
    tensors = [
        *made.tensors,
        *made.transposed().tensors,
    ]  # the opposite direction is built when it is asked for
    assert not any(tensor.is_inference() for tensor in tensors)
    assert made.transposed().num_pairs == made.num_pairs > 0


def test_fault_28_equal_counts_do_not_share_maps(device: torch.device) -> None:
    a = CoordSet(conftest.random_coords(60, 5, seed=1).to(device))
    b = CoordSet(conftest.random_coords(60, 5, seed=2).to(device))
    assert kernel_map(a, 3) != kernel_map(b, 3)
    check_map(kernel_map(b, 3), brute_table(b.coords.cpu(), b.coords.cpu(), conftest.kernel_offsets(3)))
    # Output sets that come and go at the same address: the key must not outlive what it names.
    gc.freeze()  # what other tests left is not looked through eight times
    for seed in range(8):
        out = CoordSet(conftest.random_coords(60, 5, seed=10 + seed).to(device))
        made = kernel_map(a, 2, out_coords=out)
        check_map(made, brute_table(a.coords.cpu(), out.coords.cpu(), made.offsets))
        del out, made
        gc.collect()
    gc.unfreeze()


# ---- cache and life ----------------------------------------------------------------------------------------


def test_maps_are_cached_by_kernel_shape_and_sets(device: torch.device) -> None:
    coords = CoordSet(conftest.random_coords(60, 5).to(device))
    made = kernel_map(coords, 3)
    assert (
        kernel_map(Voxels(coords, torch.zeros(60, 1, device=device)), (3, 3, 3), dilation=[1, 1, 1]) == made
    )
    assert kernel_map(coords, 3).tensors[0] is made.tensors[0]
    others = [
        kernel_map(coords, 3, dilation=2),
        kernel_map(coords, (3, 3, 1)),
        kernel_map(coords, 3, padding=0),
    ]
    others.append(kernel_map(coords, 3, out_coords=CoordSet(coords.coords)))
    assert len({made, *others}) == 5 and len(coords.maps) == 5
    assert not others[2].symmetric and not others[3].symmetric


def test_free_releases_and_the_next_call_builds_again(device: torch.device) -> None:
    coords = CoordSet(conftest.random_coords(60, 5).to(device))
    made = kernel_map(coords, 2)
    small = made.nbytes
    _ = made.transposed().tensors
    assert made.nbytes > small > 0
    made.transposed().free()
    assert coords.maps == {} and made.nbytes == 0 and "freed" in repr(made)
    for use in (lambda: made.tensors, lambda: made.transposed().num_pairs, lambda: pickle.dumps(made)):
        with pytest.raises(RuntimeError, match="freed"):
            use()
    assert kernel_map(coords, 2).num_pairs > 0


def test_nothing_lives_on_in_reference_cycles(device: torch.device) -> None:
    gc.disable()
    try:
        coords = CoordSet(conftest.random_coords(60, 5).to(device))
        out = CoordSet(conftest.random_coords(30, 5).to(device))
        made = kernel_map(coords, 2)
        tensors = [weakref.ref(t) for t in (*made.tensors, *made.transposed().tensors)]
        strided = kernel_map(coords, 2, out_coords=out)
        tensors += [weakref.ref(t) for t in (*strided.tensors, *strided.transposed().tensors)]
        del coords, out, made, strided
        assert all(reference() is None for reference in tensors)
    finally:
        gc.enable()


def test_pickle_needs_no_rebuild_and_fills_the_cache(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    coords = CoordSet(conftest.random_coords(60, 5).to(device))
    made = kernel_map(coords, 2)
    table, back = made.neighbor_table(), made.transposed().neighbor_table()
    data = pickle.dumps((coords, made, made.transposed()))
    monkeypatch.setattr(KernelMap, "_build", lambda self: pytest.fail("built a map again"))
    loaded, forward, backward = pickle.loads(data)
    assert forward.in_coords is loaded and forward.out_coords is loaded
    assert kernel_map(loaded, 2) == forward and forward.device == device
    assert torch.equal(forward.neighbor_table(), table)
    assert torch.equal(backward.neighbor_table(), back)


def test_deepcopy_is_independent(device: torch.device) -> None:
    coords = CoordSet(conftest.random_coords(60, 5).to(device))
    made = kernel_map(coords, 3)
    other = copy.deepcopy(made)
    assert other != made and other.in_coords is coords
    made.free()
    assert other.num_pairs == kernel_map(coords, 3).num_pairs


def test_share_moves_cpu_tensors_to_shared_memory() -> None:
    made = kernel_map(CoordSet(conftest.random_coords(60, 5)), 2)
    _ = made.transposed().tensors
    assert made.share() is made
    assert all(t.is_shared() for t in (*made.tensors, *made.transposed().tensors, made.in_coords.coords))


def test_to_the_same_device_is_itself(device: torch.device) -> None:
    made = kernel_map(CoordSet(conftest.random_coords(60, 5).to(device)), 3)
    assert made.to(device) is made


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3])
def test_to_another_device_is_the_map_there(size: int) -> None:
    x = Voxels(conftest.random_coords(500, 9), torch.zeros(500, 1))
    made = kernel_map(x, size)
    moved = made.to("cuda")
    on_gpu = x.to("cuda")
    assert moved.in_coords is on_gpu.coord_set and kernel_map(on_gpu, size) == moved
    for mine, theirs in ((made, moved), (made.transposed(), moved.transposed())):
        assert torch.equal(mine.neighbor_table(), theirs.neighbor_table().cpu())
    assert moved.to("cpu") == made


def test_summary_and_repr(device: torch.device) -> None:
    made = kernel_map(CoordSet(conftest.surface_coords(24).to(device)), (3, 3, 1), dilation=2)
    text = made.summary()
    assert "3x3x1" in text and "dilation (2, 2, 1)" not in text and f"{made.num_pairs:,}" in text
    assert ("useful MMA" in text) == (device.type == "cuda")
    assert f"pairs={made.num_pairs}" in repr(made)
    if device.type == "cpu":
        with pytest.raises(ValueError, match="GPU"):
            made.mma_efficiency()
    else:
        assert 0 < made.mma_efficiency(256) <= made.mma_efficiency(64) <= made.mma_efficiency(16) <= 1


BAD_ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"kernel_size": 0}, ValueError, "kernel_size"),
    ({"kernel_size": 10}, ValueError, "kernel_size"),
    ({"kernel_size": 3.0}, TypeError, "kernel_size"),
    ({"kernel_size": True}, TypeError, "kernel_size"),
    ({"kernel_size": (3, 3)}, TypeError, "kernel_size"),
    ({"kernel_size": 3, "dilation": 0}, ValueError, "dilation"),
    ({"kernel_size": 3, "dilation": (1 << 20) + 1}, ValueError, "dilation"),
    ({"kernel_size": 9, "dilation": (1 << 18) + 1}, ValueError, "dilation"),
    ({"kernel_size": 3, "dilation": "2"}, TypeError, "dilation"),
    ({"kernel_size": 3, "stride": 2, "max_voxels": 0}, ValueError, "max_voxels"),
    ({"kernel_size": 3, "stride": 0}, ValueError, "stride"),
    ({"kernel_size": 3, "padding": 0.5}, TypeError, "padding"),
    ({"kernel_size": 3, "out_coords": torch.zeros(1, 4)}, TypeError, "out_coords"),
]


@pytest.mark.parametrize(("arguments", "error", "named"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments_are_named(arguments: dict[str, Any], error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named):
        kernel_map(CoordSet(torch.zeros((1, 4), dtype=torch.int32)), **arguments)


def test_sets_that_do_not_go_together_are_refused() -> None:
    coords = CoordSet(torch.zeros((1, 4), dtype=torch.int32))
    with pytest.raises(TypeError, match="in_coords"):
        kernel_map(coords.coords, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 samples"):
        kernel_map(coords, 3, out_coords=CoordSet(coords.coords, 2))


def test_the_same_map_on_every_run(device: torch.device) -> None:
    coords = conftest.surface_coords(40).to(device)
    first = kernel_map(CoordSet(coords), 3).neighbor_table()
    for _ in range(3):
        assert torch.equal(kernel_map(CoordSet(coords), 3).neighbor_table(), first)


# ---- the tile plan (csrc/include/voxmma/plan.h) ---------------------------------------------------------

TILE, FRAGMENT, UNIQUE_MAX, PASS_OFFSETS = 256, 16, 512, 32
MISSING = UNIQUE_MAX
Plan = list[np.ndarray]  # order, schedule, passes, frag, uniq, local as in KernelMap.tensors, without size


def reference_cluster(masks: list[int]) -> list[int]:
    """Order of the rows of a tile, as `cluster_rows` of csrc/map/plan.cu.

    Sorted with the rarest bits on top, then halved three times by the bit that leaves the smallest unions.
    """
    count = [sum(mask >> b & 1 for mask in masks) for b in range(32)]
    place = [sum((count[j], -j) > (count[b], -b) for j in range(32)) for b in range(32)]
    key = [sum(1 << place[b] for b in range(32) if mask >> b & 1) for mask in masks]
    rows = sorted(range(TILE), key=lambda i: (-key[i], i))
    for size in (256, 128, 64):
        for begin in range(0, TILE, size):
            node, best = rows[begin : begin + size], (10**9, rows)
            for b in range(32):
                ones = [i for i in node if key[i] >> b & 1]
                halved = ones + [i for i in node if not key[i] >> b & 1]
                halves = halved[: size // 2], halved[size // 2 :]
                cost = sum(int.bit_count(functools.reduce(operator.or_, (key[i] for i in h))) for h in halves)
                if cost < best[0] and (b == 0 or 0 < len(ones) < size):
                    best = cost, halved
            rows[begin : begin + size] = best[1]
    return rows


COLOURINGS = [(1, 3, 5), (2, 1, 3), (1, 2, 4), (3, 5, 1), (1, 1, 3), (1, 5, 2), (4, 1, 2), (2, 4, 1)]
COLOURS, WARP = 8, 32


def reference_deal(colours: list[int]) -> tuple[list[int], int]:
    """Places of a warp's rows in groups of eight, one of each colour where there are enough groups, and the
    number of rows that got none of their own."""
    groups: list[list[int]] = [[] for _ in range(WARP // COLOURS)]
    rest = []
    for row, colour in enumerate(colours):
        rank = colours[:row].count(colour)
        (groups[rank] if rank < len(groups) else rest).append(row)
    undealt = len(rest)
    for group in groups:
        while len(group) < COLOURS:
            group.append(rest.pop(0))
    return [row for group in groups for row in group], undealt


def reference_slots(colours: list[int]) -> list[int]:
    """Slot of each unique row: of its colour modulo eight, or one that no row of that colour takes."""
    total, slots = len(colours), []
    room = [(total - c + COLOURS - 1) // COLOURS for c in range(COLOURS)]
    count = [colours.count(c) for c in range(COLOURS)]
    free = [COLOURS * i + c for c in range(COLOURS) for i in range(count[c], room[c])]
    for row, colour in enumerate(colours):
        place = colours[:row].count(colour)
        before = sum(max(count[c] - room[c], 0) for c in range(colour))
        own = place < room[colour]
        slots.append(COLOURS * place + colour if own else free[before + place - room[colour]])
    return slots


def reference_cost(bits: np.ndarray) -> int:
    """Offsets used by each block of 64 rows, summed, from the (16,) fragment masks of a pass."""
    return sum(
        int.bit_count(int(np.bitwise_or.reduce(block)))
        for block in bits.view(np.uint32).reshape(-1, 64 // FRAGMENT)
    )


def reference_plan(
    table: np.ndarray, out_order: np.ndarray, offsets: Sequence[Triple], coords: torch.Tensor
) -> Plan:
    """The plan of csrc/map/plan.cu in plain Python. `table` is (K, n), `out_order` (n,), `coords` (n, 4)."""
    volume, n_out = table.shape
    tiles = math.ceil(n_out / TILE)
    place = np.array(offsets, dtype=np.float64) * volume
    distance = ((place - place.mean(0)) ** 2).sum(1).round(3)
    rank = np.empty(volume, dtype=np.int64)
    rank[np.lexsort((np.arange(volume), distance))] = np.arange(volume)
    bit = rank * 32 // max(volume, 32)

    order = np.full(tiles * TILE, -1, dtype=np.int32)
    local = np.full((tiles, volume, TILE), MISSING, dtype=np.int16)
    schedule, passes, frag, uniq = [], [], [], []
    for tile in range(tiles):
        rows = out_order[tile * TILE : (tile + 1) * TILE]
        masks = [sum({1 << int(b) for b in bit[table[:, row] >= 0]}) for row in rows]
        rows = rows[[i for i in reference_cluster(masks + [0] * (TILE - len(rows))) if i < len(rows)]]
        warps = [rows[i : i + WARP] for i in range(0, len(rows) // WARP * WARP, WARP)]
        dealt = []  # by colouring: rows that got no group of their own, rows
        for factors in COLOURINGS:
            places = [
                reference_deal((coords[warp, 1:].numpy() @ factors % COLOURS).tolist()) for warp in warps
            ]
            order_of = [warp[place] for warp, (place, _) in zip(warps, places, strict=True)]
            dealt.append((sum(undealt for _, undealt in places), order_of))
        best = min(range(len(COLOURINGS)), key=lambda i: dealt[i][0])
        rows = np.concatenate([*dealt[best][1], rows[len(warps) * WARP :]])
        colour_of = coords[:, 1:].numpy() @ COLOURINGS[best] % COLOURS
        order[tile * TILE : tile * TILE + len(rows)] = rows
        nearby = np.full((volume, TILE), -1, dtype=np.int64)
        nearby[:, : len(rows)] = table[:, rows]
        first_pass, k = len(passes), 0
        while k < volume:
            begin, unique = k, {}
            bits = np.zeros(TILE // FRAGMENT, dtype=np.uint32)
            while k < volume and k // PASS_OFFSETS == begin // PASS_OFFSETS:
                fresh = [int(v) for v in nearby[k] if v >= 0 and int(v) not in unique]
                if len(unique) + len(fresh) > UNIQUE_MAX:
                    break
                unique.update({v: len(unique) + i for i, v in enumerate(fresh)})
                active = (nearby[k] >= 0).reshape(-1, FRAGMENT).any(1)
                bits |= active.astype(np.uint32) << np.uint32(k - begin)
                k += 1
            unique = dict(zip(unique, reference_slots([int(colour_of[v]) for v in unique]), strict=True))
            for j in range(begin, k):
                local[tile, j] = [unique[int(v)] if v >= 0 else MISSING for v in nearby[j]]
            listed = sorted(unique, key=lambda v: unique[v])
            passes.append((begin, k - begin, len(uniq) // 4, len(unique)))
            frag.append(bits)
            uniq += [*listed, *[listed[-1]] * (-len(listed) % 4)] if listed else []
        cost = sum(reference_cost(bits) for bits in frag[first_pass:])
        schedule.append((tile, first_pass, len(passes) - first_pass, cost))
    balanced = sorted(schedule, key=lambda row: -row[3])  # stable; one window: the map is small
    return [
        order,
        np.array([balanced, schedule], dtype=np.int32).reshape(2, -1, 4),
        np.array(passes, dtype=np.int32).reshape(-1, 4),
        np.array(frag, dtype=np.uint32).reshape(-1, TILE // FRAGMENT).view(np.int32),
        np.array(uniq, dtype=np.int32),
        local,
    ]


def check_schedules(schedules: np.ndarray, window: int) -> None:
    """AssertionError unless both orders hold every tile and the first has each window heaviest first."""
    balanced, in_order = schedules
    tiles = np.arange(len(in_order))
    assert np.array_equal(in_order[:, 0], tiles), "the second schedule is not in the order of the tiles"
    assert np.array_equal(balanced, in_order[balanced[:, 0]]), "the schedules differ in a tile"
    place = balanced[:, 0] // max(window, 1) * 10**6 - balanced[:, 3]  # heaviest first, then in order
    assert np.array_equal(np.lexsort((balanced[:, 0], place)), tiles), "a window is not in its order"


def check_plan(plan: Plan, table: np.ndarray, n_in: int) -> None:
    """Raises AssertionError unless the plan keeps every promise of plan.h and says what `table` says."""
    order, schedules, passes, frag, uniq, local = plan
    check_schedules(schedules, math.ceil(table.shape[1] / TILE))
    schedule = schedules[1]
    volume, n_out = table.shape
    tiles = math.ceil(n_out / TILE)
    assert order.shape == (tiles * TILE,) and local.shape == (tiles, volume, TILE) and len(schedule) == tiles
    assert np.array_equal(np.sort(order[order >= 0]), np.arange(n_out)), "order is no permutation of the rows"
    assert bool((order[:n_out] >= 0).all()), "padding not at the end"
    assert bool(((uniq >= 0) & (uniq < n_in)).all()), "an entry of uniq, padding included, is no input row"
    pass_used, uniq_used = np.zeros(len(passes), dtype=int), np.zeros(len(uniq), dtype=int)
    for tile, first_pass, tile_passes, cost in schedule.tolist():
        rows = order[tile * TILE : (tile + 1) * TILE]
        assert cost == sum(reference_cost(frag[p]) for p in range(first_pass, first_pass + tile_passes))
        expected = np.where(rows >= 0, table[:, rows], -1)
        k = 0
        for p in range(first_pass, first_pass + tile_passes):
            pass_used[p] += 1
            begin, count, begin4, unique = passes[p].tolist()
            assert begin == k and 1 <= count <= PASS_OFFSETS, "passes do not cover the offsets in order"
            assert 0 <= unique <= UNIQUE_MAX, "too many unique rows"
            k += count
            uniq_used[4 * begin4 : 4 * begin4 + -(-unique // 4) * 4] += 1
            entries = uniq[4 * begin4 : 4 * begin4 + unique]
            assert len(entries) == unique == len(np.unique(entries)), "unique rows are not unique"
            index = local[tile, begin:k].astype(int)
            assert bool(((index < unique) | (index == MISSING)).all()), "local index out of range"
            assert len(np.unique(index[index < unique])) == unique, "a unique row nobody needs"
            padded = np.concatenate([entries, np.full(UNIQUE_MAX + 1 - unique, -1)])
            assert np.array_equal(padded[index], expected[begin:k]), "wrong neighbour"
            active = (expected[begin:k].reshape(count, -1, FRAGMENT) >= 0).any(2).astype(np.int64)
            bits = (active << np.arange(count)[:, None]).sum(0)
            assert np.array_equal(frag[p].view(np.uint32), bits.astype(np.uint32)), "wrong fragment bits"
        assert k == volume, "offsets without a pass"
    assert bool((pass_used == 1).all()) and bool((uniq_used == 1).all()), (
        "passes or lists overlap or are lost"
    )


def plan_of(made: KernelMap) -> Plan:
    """The plan of a map on a GPU, without unused room."""
    return [tensor.cpu().numpy() for tensor in made._direction().settled()[:-1]]


def plan_case(name: str) -> tuple[torch.Tensor, int | Triple]:
    """Coordinates and kernel size of the plan tests."""
    return {
        "surface": (conftest.surface_coords(40), 3),
        "dense": (conftest.grid_coords((12, 12, 12), batch=2), 3),  # exceeds 512 unique rows
        "sparse": (conftest.random_coords(700, 4000, batch=3), 3),
        "scattered": (conftest.random_coords(900, 11), 5),
        "wide": (conftest.grid_coords((9, 9, 9)), (1, 9, 9)),
        "even": (conftest.surface_coords(20), 2),
        "one tile": (conftest.grid_coords((4, 8, 8)), 3),
        "one row": (torch.tensor([[1022, COORD_MIN, COORD_MAX, 0]], dtype=torch.int32), 3),
        "empty": (torch.zeros((0, 4), dtype=torch.int32), 3),
    }[name]


PLAN_CASES = ["surface", "dense", "sparse", "scattered", "wide", "even", "one tile", "one row", "empty"]


@pytest.mark.parametrize("name", PLAN_CASES)
def test_the_reference_plan_keeps_the_promises(name: str) -> None:
    coords, size = plan_case(name)
    made = kernel_map(CoordSet(coords), size)
    table = made.neighbor_table().numpy()
    plan = reference_plan(table, np.arange(len(coords)), made.offsets, coords)
    check_plan(plan, table, len(coords))
    assert name != "dense" or bool((plan[1][0][:, 2] > 1).any())


def test_the_plan_check_sees_every_kind_of_damage() -> None:
    coords, size = plan_case("surface")
    made = kernel_map(CoordSet(coords), size)
    table = made.neighbor_table().numpy()
    plan = reference_plan(table, np.arange(len(coords)), made.offsets, coords)
    filled = np.argwhere(plan[5] < MISSING)[0]
    damages = [
        (0, (0,), plan[0][1]),
        (1, (1, 0, 0), 1),
        (1, (0, 0, 0), plan[1][0, 1, 0]),
        (1, (slice(None), 0, 1), plan[1][1, 1, 1]),
        (1, (1, 0, 2), 0),
        (1, (1, 0, 3), plan[1][1, 0, 3] + 1),
        (1, (0, slice(0, 2)), plan[1][0, 1::-1]),
        (2, (0, 1), 5),
        (2, (0, 3), plan[2][0, 3] - 1),
        (3, (0, 0), plan[3][0, 0] ^ 1),
        (4, (0,), plan[4][1]),
        (4, (0,), len(coords)),
        (5, tuple(filled), MISSING),
        (5, tuple(filled), plan[5][tuple(filled)] + 1),
    ]
    for part, place, value in damages:
        damaged = [array.copy() for array in plan]
        damaged[part][place] = value
        with pytest.raises((AssertionError, IndexError)):
            check_plan(damaged, table, len(coords))


@pytest.mark.gpu
@pytest.mark.parametrize("name", PLAN_CASES)
def test_gpu_plan_is_the_reference_plan(name: str) -> None:
    coords, size = plan_case(name)
    made = kernel_map(CoordSet(coords.cuda()), size)
    table = kernel_map(CoordSet(coords), size).neighbor_table().numpy()
    plan = plan_of(made)
    check_plan(plan, table, len(coords))
    expected = reference_plan(table, made.in_coords.hash_index().order.cpu().numpy(), made.offsets, coords)
    assert np.array_equal(plan[0], expected[0]) and np.array_equal(plan[5], expected[5])
    assert np.array_equal(plan[1][:, :, [0, 2, 3]], expected[1][:, :, [0, 2, 3]])
    for (_, first, count, _), (_, first_expected, _, _) in zip(plan[1][0], expected[1][0], strict=True):
        # the arena places passes freely: compare them tile by tile
        mine, theirs = slice(first, first + count), slice(first_expected, first_expected + count)
        assert np.array_equal(plan[2][mine][:, [0, 1, 3]], expected[2][theirs][:, [0, 1, 3]])
        assert np.array_equal(plan[3][mine], expected[3][theirs])
    assert np.array_equal(made.neighbor_table().cpu().numpy(), table)


@pytest.mark.gpu
def test_gpu_plan_of_the_opposite_and_of_strided_maps() -> None:
    fine = conftest.surface_coords(40)
    coarse = torch.unique(torch.cat([fine[:, :1], fine[:, 1:].div(2, rounding_mode="floor")], 1), dim=0).int()
    inputs, outputs = CoordSet(fine.cuda()), CoordSet(coarse.cuda())
    for size in (2, 3):
        made = kernel_map(inputs, size, stride=2, out_coords=outputs)
        forward = brute_table(fine, coarse, made.offsets, mul=(2, 2, 2)).numpy()
        check_plan(plan_of(made), forward, len(fine))
        back = made.transposed()
        backward = brute_table(coarse, fine, back.offsets, div=(2, 2, 2)).numpy()
        check_plan(plan_of(back), backward, len(coarse))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "stride", "dilation"),
    [(2, 2, 1), (3, 2, 1), (3, 2, 2), (3, 3, 2), ((5, 1, 2), (2, 1, 4), 1), (9, 4, 1)],
)
@pytest.mark.parametrize("spread", [12, 400, 100_000])  # neighbours everywhere, here and there, hardly any
def test_gpu_plans_of_strided_maps(size: Any, stride: Any, dilation: int, spread: int) -> None:
    coords = torch.unique(torch.randint(-spread, spread, (3000, 3)), dim=0).int()
    coords = torch.cat([torch.randint(0, 3, (len(coords), 1)).int(), coords], 1)[torch.randperm(len(coords))]
    on_cpu, on_gpu = CoordSet(coords, 3), CoordSet(coords.cuda(), 3)
    cpu = kernel_map(on_cpu, size, dilation=dilation, stride=stride)
    gpu = kernel_map(on_gpu, size, dilation=dilation, stride=stride)
    assert torch.equal(gpu.out_coords.coords.cpu(), cpu.out_coords.coords)
    for mine, theirs in ((gpu, cpu), (gpu.transposed(), cpu.transposed())):
        assert torch.equal(
            mine.neighbor_table().cpu(), theirs.neighbor_table()
        )  # from tensors with unused room
        room = [len(tensor) for tensor in mine.tensors]
        check_plan(plan_of(mine), theirs.neighbor_table().numpy(), mine.in_coords.num)
        assert all(used <= had for used, had in zip(map(len, mine.tensors), room, strict=True))
        assert mine.num_pairs == theirs.num_pairs
        assert torch.equal(pickle.loads(pickle.dumps(mine)).neighbor_table(), mine.neighbor_table())


def check_index(coords: torch.Tensor, index: HashIndex) -> None:
    """Raises AssertionError unless rows of a hash block are together in the order, where the table says."""
    order, table = index.order.cpu(), index.hash_blocks.cpu()
    assert torch.equal(order.sort().values, torch.arange(len(coords), dtype=torch.int32))
    blocks: dict[tuple[int, ...], tuple[int, int]] = {}
    for rank, (b, x, y, z) in enumerate(coords[order.long()].tolist()):
        block = b, x >> 1, y >> 1, z >> 1
        first, mask = blocks.get(block, (rank, 0))
        bit = 1 << ((x & 1) * 4 + (y & 1) * 2 + (z & 1))
        assert mask < bit and rank == first + mask.bit_count()  # neighbours in the order, cells ascending
        blocks[block] = first, mask | bit
    buckets = table.view(-1, 2, 4, 2)  # of four slots: keys, then first ranks and masks
    listed = buckets[:, 1][buckets[:, 0, :, 1] != -1]
    assert sorted(map(tuple, listed.tolist())) == sorted(blocks.values())


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [5, 300, 2000, 131_072])  # 22 to 64 bits of sort key
def test_gpu_order_and_blocks_are_those_of_the_rows(spread: int) -> None:
    coords = torch.unique(torch.randint(-spread, spread, (20_000, 3)), dim=0).int()
    coords = torch.cat([torch.randint(0, 1023, (len(coords), 1)).int(), coords], 1)
    coords = coords[torch.randperm(len(coords))]
    checked = CoordSet(coords.cuda())
    check_index(coords, checked.hash_index())
    assert checked.bounds == (*coords.amin(0).tolist(), *coords.amax(0).tolist())
    check_index(coords, CoordSet.trusted(coords.cuda(), 1023).hash_index())  # nothing known but the range
    check_index(coords, CoordSet(coords).to("cuda").hash_index())
    made = kernel_map(checked, 3, stride=2).out_coords
    check_index(made.coords.cpu(), made.hash_index())


@pytest.mark.gpu
@pytest.mark.parametrize(("spread", "waits"), [(30, 1), (2000, 2)])  # the second has no bitmap
def test_gpu_indexing_reads_back_once(spread: int, waits: int) -> None:
    coords = conftest.random_coords(500, spread)
    on_gpu = coords.cuda()
    CoordSet(on_gpu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            made = CoordSet(on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([c for c in caught if "synchroniz" in str(c.message)]) == waits
    check_index(coords, made.hash_index())
    for repeats in ([7], [7, 3, 3, 499]):
        with pytest.raises(ValueError, match=f"rows {repeats[0]} and 500 are the same voxel"):
            CoordSet(torch.cat([on_gpu, on_gpu[repeats]]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "extents", [(1, 512, 512, 512), (4, 512, 256, 256), (2, 512, 512, 512), (1, 2, 1, 1)]
)
def test_gpu_sets_around_the_largest_bitmap(extents: tuple[int, ...]) -> None:
    """Boxes of 2^27 cells, the most that bitmaps have, of twice as many, for a hash table, and few."""
    low = torch.tensor([4, -256, 77_000, -131_072])
    cells = torch.stack([torch.randint(0, extent, (9000,)) for extent in extents], 1)
    corners = torch.tensor([[0] * 4, [extent - 1 for extent in extents]])
    coords = torch.unique(torch.cat([cells, corners]) + low, dim=0).int()
    coords = coords[torch.randperm(len(coords))]
    on_cpu, on_gpu = CoordSet(coords), CoordSet(coords.cuda())
    for options in ({"kernel_size": 1, "generative": True}, {"kernel_size": 2, "stride": 2}):
        expected, made = kernel_map(on_cpu, **options), kernel_map(on_gpu, **options)
        assert torch.equal(made.out_coords.coords.cpu(), expected.out_coords.coords)
        check_index(made.out_coords.coords.cpu(), made.out_coords.hash_index())
        assert torch.equal(made.neighbor_table().cpu(), expected.neighbor_table())
        around = kernel_map(made.out_coords, 3).neighbor_table()
        assert torch.equal(around.cpu(), kernel_map(expected.out_coords, 3).neighbor_table())


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 2])  # statistics read, and left on the device
def test_gpu_map_tensors_share_memory_and_can_be_saved(stride: int) -> None:
    coords = conftest.surface_coords(60)
    with torch.inference_mode():
        made = kernel_map(CoordSet(coords.cuda()), stride + 1, stride=stride)
    assert not any(tensor.is_inference() or tensor.requires_grad for tensor in made.tensors)
    assert all(tensor.data_ptr() % 256 == 0 and tensor.is_contiguous() for tensor in made.tensors)
    used = sum(tensor.nbytes for tensor in made.tensors)
    assert used <= made.nbytes < 1.2 * used + 4096  # a storage counts once
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.neighbor_table(), made.neighbor_table())
    assert loaded.num_pairs == made.num_pairs
    ends = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in made.tensors]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(sorted(ends)))


@pytest.mark.gpu
def test_gpu_and_cpu_maps_agree_on_a_large_scene() -> None:
    coords = conftest.surface_coords(300)
    cpu, gpu = kernel_map(CoordSet(coords), 3), kernel_map(CoordSet(coords.cuda()), 3)
    assert torch.equal(cpu.neighbor_table(), gpu.neighbor_table().cpu())
    check_index(coords, gpu.in_coords.hash_index())
    assert gpu.mma_efficiency(16) > 0.5  # the rows were sorted by their neighbours: dataflow.md
    schedules = gpu.tensors[1].cpu().numpy()
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    assert schedules.shape[1] > 4 * multiprocessors, "a map of several windows is wanted here"
    check_schedules(schedules, 2 * multiprocessors)


def test_the_build_is_not_called_twice(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "build_cuda" if device.type == "cuda" else "build_cpu"
    calls = []
    map_module = sys.modules[KernelMap.__module__]  # voxmma.kernel_map itself names the function
    build = getattr(map_module, name)
    monkeypatch.setattr(map_module, name, lambda *args: calls.append(args) or build(*args))
    coords = CoordSet(conftest.random_coords(60, 5).to(device))
    for _ in range(3):
        _ = kernel_map(coords, 3).transposed().tensors  # symmetric: one direction serves both
        _ = kernel_map(coords, 2).transposed().tensors
    assert len(calls) == 3
