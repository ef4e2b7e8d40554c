"""What coordinate sets and maps keep: other streams, CUDA graphs, threads, memory, copies, writes.

A case that kills the CUDA context where the fault is present runs in a process of its own.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

import voxmma
from voxmma import CoordSet, Voxels, nn
from voxmma.export.mapped import with_maps
from voxmma.sparse.cached import Made
from voxmma.sparse.coords import _KEPT
from voxmma.sparse.cores import Direction
from voxmma.sparse.maps import KernelMap

from conftest import random_coords

# ---- streams and captures ----------------------------------------------------------------------------------

SCENE = """
import copy, gc, torch, voxmma
from voxmma import Voxels, nn
import voxmma.nn.functional as F
d = torch.device("cuda", 0)
g = torch.Generator().manual_seed(0)
c = (torch.rand(2, 60, 60, 60, generator=g) < 0.3).nonzero().int().to(d)
f = torch.randn(len(c), 32, generator=g).half().to(d)
down = nn.SparseConv3d(32, 32, 2, stride=2).to(d).half()
up = nn.SparseConvTranspose3d(32, 32, 2, stride=2).to(d).half()
same = nn.SparseConv3d(32, 32, 3).to(d).half()
even = nn.SparseConv3d(32, 32, 2).to(d).half()
wide = nn.SparseConv3d(32, 32, 3, stride=2).to(d).half()
LATE = 400_000_000  # cycles

def overwrite():
    sizes = [1 << n for n in range(10, 23)] * 8
    return [torch.full((size,), 123456, device=d, dtype=torch.int32) for size in sizes]

def trained(layer, y):
    feats = y.feats.detach().clone().requires_grad_()
    out = layer(y.with_feats(feats)).feats
    return torch.cat([out, torch.autograd.grad(out.float().sum(), feats)[0][: len(out)]])

USES = {
    "transposed": lambda y: up(y).feats,
    "submanifold": lambda y: same(y).feats,
    "even": lambda y: trained(even, y),
    "strided": lambda y: trained(wide, y),
    "counts of a map": lambda y: F.avg_pool(y, 3, 1).feats,
    "counts": lambda y: y.counts,
    "samples": lambda y: torch.cat([F.global_avg_pool(y), F.global_max_pool(y)]),
    "index": lambda y: voxmma.lookup(y, y.coords.flip(0)),
    "sorted": lambda y: y.coord_set.sorted_keys()[0],
    "pairs": lambda y: torch.tensor(voxmma.kernel_map(y, 2, stride=2).num_pairs),
    "coordinates": lambda y: voxmma.kernel_map(y, 2, stride=2).out_coords.coords,
}
"""

STREAM_CASES = {
    "made late on one stream, used on another": """
for name, use in USES.items():
    want = use(down(Voxels(c, f))).clone()
    torch.cuda.synchronize()
    for _ in range(5):
        y = down(Voxels(c.clone(), f.clone()))
        torch.cuda.synchronize()
        s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(s1):
            torch.cuda._sleep(LATE)
            use(y)
        with torch.cuda.stream(s2):
            z = use(y)
        s2.synchronize()
        assert torch.equal(z, want), name
        torch.cuda.synchronize()
""",
    "a set made on one stream, used on another": """
for name, use in USES.items():
    want = use(Voxels(c, f)).clone()
    torch.cuda.synchronize()
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(s1):
        torch.cuda._sleep(LATE)
        y = Voxels(voxmma.CoordSet.trusted((c + 0).contiguous(), 2), f)
    with torch.cuda.stream(s2):
        z = use(y)
    s2.synchronize()
    assert torch.equal(z, want), name
    torch.cuda.synchronize()
""",
    "a set that dies while another stream reads": """
for name, use in USES.items():
    want = use(Voxels(c, f)).clone()
    torch.cuda.synchronize()
    for _ in range(3):
        y = Voxels(c.clone(), f)
        use(y)
        torch.cuda.synchronize()
        s = torch.cuda.Stream()
        if name == "pairs":
            continue  # has waited
        with torch.cuda.stream(s):
            torch.cuda._sleep(LATE)
            z = use(y)
        del y
        gc.collect()
        junk = overwrite()
        s.synchronize()
        assert torch.equal(z, want), name
        torch.cuda.synchronize()
        del junk
""",
    "a copy from page-locked memory": """
for name, use in USES.items():
    want = use(Voxels(c, f)).clone()
    host = Voxels(c.cpu(), f.cpu()).pin_memory()
    torch.cuda.synchronize()
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(s1):
        torch.cuda._sleep(LATE)
        moved = host.coord_set.to(d, non_blocking=True)
    with torch.cuda.stream(s2):
        z = use(Voxels(moved, f))
    s2.synchronize()
    assert torch.equal(z, want), name
    torch.cuda.synchronize()
""",
    "a map that dies while its layer's backward runs elsewhere": """
feats = f.clone().requires_grad_()
want = torch.autograd.grad(even(Voxels(c, feats)).feats.float().sum(), feats)[0].clone()
for _ in range(3):
    y = Voxels(c.clone(), feats)
    even(y)
    torch.cuda.synchronize()
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
        total = even(y).feats.float().sum()
        torch.cuda._sleep(LATE)
        (grad,) = torch.autograd.grad(total, feats)
    del y, total
    gc.collect()
    junk = overwrite()
    s.synchronize()
    assert torch.equal(grad, want)
    torch.cuda.synchronize()
    del junk
""",
}

CAPTURE_CASES = {
    "first made while capturing is refused, and nothing is left behind": """
for name, use in USES.items():
    if name == "coordinates":
        continue  # what the use before it says
    with torch.no_grad() if name not in ("even", "strided") else torch.enable_grad():
        want = use(down(Voxels(c, f))).clone()
        other = copy.deepcopy(down)  # which nobody asked for anything yet
        y = other(Voxels(c.clone(), f))
        y.coord_set._index.hashed = None  # strided layers leave an index
        torch.cuda.synchronize()
        junk = [torch.full((1 << 22,), 123456, device=d, dtype=torch.int32) for _ in range(20)]
        del junk
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                use(y)
        except RuntimeError as error:
            assert "graph is captured" in str(error) and "before the capture" in str(error), error
        else:
            raise AssertionError(name)
        assert torch.equal(use(y), want), name
        torch.cuda.synchronize()
""",
    "what was made before is captured, made on whatever stream": """
with torch.inference_mode():
    for name in ("transposed", "submanifold", "even", "counts of a map", "samples", "index"):
        use = USES[name] if name != "even" else lambda y: even(y).feats
        want = use(down(Voxels(c, f))).clone()
        y = down(Voxels(c.clone(), f.clone()))
        torch.cuda.synchronize()
        s = torch.cuda.Stream()
        with torch.cuda.stream(s):
            torch.cuda._sleep(LATE)
            use(y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            z = use(y)
        z.zero_()
        for _ in range(2):
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(z, want), name
        assert torch.equal(use(y), want), name
""",
    "captured without the synchronisation of torch.cuda.graph": """
with torch.inference_mode():
    want = up(down(Voxels(c, f))).feats.clone()
    y = down(Voxels(c.clone(), f.clone()))
    torch.cuda.synchronize()
    s1, s2 = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(s2):
        up(down(Voxels(c, f)))  # kernels are loaded, memory is there
    torch.cuda.synchronize()
    with torch.cuda.stream(s1):
        torch.cuda._sleep(LATE)
        up(y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(s2):
        graph.capture_begin()
        z = up(y)
        graph.capture_end()
        graph.replay()
    s2.synchronize()
    assert torch.equal(z.feats, want)
""",
    "reduce-overhead": """
import torch._dynamo
with torch.no_grad():
    y = Voxels(c.clone(), f.clone())
    want = even(same(y)).feats.clone()
    run = torch.compile(lambda feats: even(same(y.with_feats(feats))).feats, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        assert torch.equal(run(y.feats), want)
""",
}


def in_a_process(body: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCENE + body], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("case", STREAM_CASES)
def test_fault_50_what_is_kept_is_safe_on_any_stream(case: str) -> None:
    in_a_process(STREAM_CASES[case])


@pytest.mark.gpu
@pytest.mark.parametrize("case", CAPTURE_CASES)
def test_fault_51_nothing_is_first_made_inside_a_capture(case: str) -> None:
    in_a_process(CAPTURE_CASES[case])


@pytest.mark.multigpu
def test_fault_50_copies_on_a_second_gpu_are_safe_on_any_stream() -> None:
    in_a_process("""
d1 = torch.device("cuda", 1)
want = same(Voxels(c, f)).feats.clone()
there = nn.SparseConv3d(32, 32, 3).to(d1).half()
there.load_state_dict(same.state_dict())
for _ in range(3):
    x = Voxels(c.clone(), f)
    moved_feats = f.to(d1)
    torch.cuda.synchronize(0)
    torch.cuda.synchronize(1)
    s0, s1, s2 = torch.cuda.Stream(d), torch.cuda.Stream(d1), torch.cuda.Stream(d1)
    with torch.cuda.stream(s0), torch.cuda.stream(s1):
        torch.cuda._sleep(LATE)
        moved = x.coord_set.to(d1)
    with torch.cuda.stream(s2):
        z = there(Voxels(moved, moved_feats)).feats
    s2.synchronize()
    assert torch.equal(z.to(d), want)
""")


class _FakeStreams:
    """A device of which only streams exist: what `Made` asks torch for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.capturing = 7, False
        self.did: list[tuple[str, int]] = []
        fake = self

        class Stream:
            cuda_stream = property(lambda self: fake.now)

        class StreamEvent:
            def __init__(self) -> None:
                self.stream = fake.now

            @staticmethod
            def record(device: int) -> StreamEvent | None:
                if fake.capturing:
                    return None
                fake.did.append(("record", fake.now))
                return StreamEvent()

            def wait(self) -> bool:
                fake.did.append(("host" if fake.capturing else "wait", fake.now))
                return not fake.capturing

        module = sys.modules[Made.__module__]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
        monkeypatch.setattr(module, "_raw_stream", lambda index: fake.now)
        monkeypatch.setattr(voxmma._C, "StreamEvent", StreamEvent, raising=False)

    def tensor(self) -> Any:
        fake = self

        class Tensor(torch.Tensor):
            device = property(lambda self: torch.device("cuda", 0))  # type: ignore[assignment]
            is_cuda = True  # type: ignore[assignment]

            def record_stream(self, stream: Any) -> None:
                fake.did.append(("memory", fake.now))

        return torch.zeros(3).as_subclass(Tensor)


def test_a_stream_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _FakeStreams(monkeypatch)
    made = Made([fake.tensor(), fake.tensor()], "two tensors")
    made.get()
    assert fake.did == [("record", 7)]  # the stream that made them waits for nothing
    fake.now = 8
    for _ in range(3):
        made.get()
    assert fake.did[1:] == [("wait", 8), ("memory", 8), ("memory", 8)]
    fake.now, fake.capturing, fake.did = 9, True, []
    made.get()
    assert fake.did == [("host", 9)]  # and is not one that has waited
    fake.capturing = False
    made.get()
    assert fake.did[1:] == [("wait", 9), ("memory", 9), ("memory", 9)]
    fake.capturing = True
    with pytest.raises(RuntimeError, match=r"two tensors .* while a CUDA graph is captured"):
        Made([fake.tensor()], "two tensors")


# ---- a map knows its sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, 2])
def test_fault_52_fewer_rows_than_a_map_refers_to_are_refused(device: torch.device, size: int) -> None:
    x = Voxels(random_coords(300, 9).to(device), torch.randn(300, 4, device=device))
    other = CoordSet(random_coords(200, 9, seed=3).to(device))
    made = voxmma.kernel_map(x, size, out_coords=other)
    volume, n_out, ops = made.kernel_volume, other.num, torch.ops.voxmma
    own, back = made.tensors, made.transposed().tensors
    tile = voxmma.explain(nn.SparseConv3d(4, 4, 3, device=device)(x))
    tiles = (tile.tile, tile.dgrad_tile, tile.wgrad_tile)
    w = torch.randn(volume, 4, 4, device=device)
    y, winner = ops.pool_max(x.feats, own, back, volume, n_out, False, True, True)
    grad = torch.randn_like(y)
    calls: list[Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], Any]] = [
        lambda x, y, win, n: ops.conv(x, w, None, own, back, n, False, False, "fp32", *tiles),
        lambda x, y, win, n: ops.conv(y, w, None, back, own, len(x), False, True, "fp32", *tiles),
        lambda x, y, win, n: ops.conv_wgrad(x, y, own, back, volume, 1, False, "fp32", *tiles[2:], tiles[1]),
        lambda x, y, win, n: ops.pool_sum(x, None, None, own, back, volume, n, False, False),
        lambda x, y, win, n: ops.pool_max(x, own, back, volume, n, False, True, True),
        lambda x, y, win, n: ops.pool_pick(x, win, own, back, volume, False),
        lambda x, y, win, n: ops.pool_put(y, win, own, back, volume, len(x), False),
    ]
    for i, call in enumerate(calls):
        call(x.feats, grad, winner, n_out)
        for rows in (x.feats[:100], x.feats[:0], torch.cat([x.feats, x.feats])):
            with pytest.raises(RuntimeError, match=r"leads from (300 to 200|200 to 300)"):
                call(rows, grad, winner, n_out)
        if i not in (3, 4):  # which take no tensor of output rows
            with pytest.raises(RuntimeError, match="leads from"):
                call(x.feats, grad[:50], winner[:50], 50)
    for n in (0, n_out - 1, n_out + 1):
        with pytest.raises(RuntimeError, match="leads from 300 to 200 rows, but the call has"):
            ops.neighbor_counts(own, volume, n)
    # A gradient runs over the other direction: it is checked, too.
    feats = x.feats.clone().requires_grad_()
    wrong = voxmma.kernel_map(CoordSet(x.coords[:50].clone()), size, out_coords=other).transposed().tensors
    with pytest.raises(RuntimeError, match="leads from 200 to 50"):
        ops.conv(feats, w, None, own, wrong, n_out, False, False, "fp32", *tiles).sum().backward()


def test_fault_52_segments_name_every_row(device: torch.device) -> None:
    ops = torch.ops.voxmma
    x = torch.randn(10, 3, device=device)
    rows, starts = torch.arange(10, device=device), torch.tensor([0, 4], device=device)
    assert len(ops.segment_sum(x, rows, starts)) == 2
    found = ops.segment_argmax(x, None, rows, starts)
    for call in (
        lambda: ops.segment_sum(x[:5], rows, starts),
        lambda: ops.segment_argmax(x[:5], None, rows, starts),
        lambda: ops.segment_argmax(x, found, rows, starts),
    ):
        with pytest.raises(RuntimeError, match="rows has 10 entries for"):
            call()


# ---- threads -----------------------------------------------------------------------------------------------


@pytest.fixture
def eager_switching() -> Iterator[None]:
    """Threads take turns as often as Python lets them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(work: Callable[[], Any], threads: int = 8) -> list[Any]:
    """What `work` returns in each of several threads that start it together."""
    barrier, results = threading.Barrier(threads), [None] * threads
    errors: list[BaseException] = []

    def run(place: int) -> None:
        try:
            barrier.wait()
            results[place] = work()
        except BaseException as error:
            errors.append(error)

    started = [threading.Thread(target=run, args=(i,)) for i in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if errors:
        raise errors[0]
    return results


def test_fault_53_threads_share_a_map(
    device: torch.device, eager_switching: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    coords = random_coords(200, 8).to(device)
    feats = torch.randn(200, 4, device=device)
    down, up = nn.SparseConv3d(4, 4, 2, 2, device=device), nn.SparseConvTranspose3d(4, 4, 2, 2, device=device)
    same = nn.SparseConv3d(4, 4, 3, device=device)
    builds = []
    module = sys.modules[KernelMap.__module__]
    name = "build_cuda" if device.type == "cuda" else "build_cpu"
    inner = getattr(module, name)
    monkeypatch.setattr(module, name, lambda *a: builds.append(a) or inner(*a))

    with torch.no_grad():

        def step(x: Voxels) -> tuple[Any, ...]:
            low = down(same(x))
            top = up(low)
            pairs = voxmma.kernel_map(x, 3).num_pairs, voxmma.kernel_map(x, 2, stride=2).num_pairs
            sums = nn.GlobalAvgPool()(x)
            return top.feats, sums, x.counts, pairs, low.coord_set, top.coord_set

        want = step(Voxels(coords, feats))
        for _ in range(20):
            x = Voxels(coords.clone(), feats)  # another tensor, another set
            builds.clear()
            for got in at_once(lambda x=x: step(x)):  # type: ignore[misc]
                assert all(torch.equal(a, b) for a, b in zip(got[:3], want[:3], strict=True))
                assert got[3] == want[3] and got[5] is x.coord_set
                assert got[4] is voxmma.kernel_map(x, 2, stride=2).out_coords
            # 3x3x3, 2x2x2 both ways; on a GPU one thread makes them ahead (voxmma.sparse.ahead)
            assert len(builds) == (3 if device.type == "cpu" else 0)


def test_fault_53_threads_ask_for_the_number_of_pairs(eager_switching: None) -> None:
    for _ in range(200):
        parts = [
            torch.zeros(256),
            torch.zeros(2, 1, 4),
            torch.zeros(9, 4),
            torch.zeros(9, 16),
            torch.zeros(99),
        ]
        plan = [*parts, torch.zeros(1, 27, 256), torch.zeros(0, 5, 5)]
        direction = Direction(plan, None, torch.tensor([3, 2, 50]))
        assert set(at_once(lambda d=direction: d.num_pairs)) == {50}  # type: ignore[misc]
        assert [len(t) for t in direction.tensors] == [256, 2, 2, 2, 12, 1, 0]


def test_fault_53_threads_find_one_finer_set(eager_switching: None) -> None:
    down = nn.SparseConv3d(2, 2, 2, 2)
    for _ in range(50):
        low = down(Voxels(random_coords(50, 6), torch.ones(50, 2))).coord_set
        assert low.finer is not None and not low.finer.alive
        found = at_once(low.finer.get)
        assert all(one is found[0] for one in found)
        moved = at_once(lambda low=low: low.to("meta"))  # type: ignore[misc]
        assert all(one is moved[0] for one in moved)


# ---- what is kept ------------------------------------------------------------------------------------------


def test_fault_54_a_long_lived_set_does_not_grow(device: torch.device) -> None:
    coords = random_coords(200, 8).to(device)
    x = Voxels(coords, torch.randn(200, 4, device=device))
    same, down = nn.SparseConv3d(4, 4, 3, device=device), nn.SparseConv3d(4, 4, 2, 2, device=device)
    up = nn.SparseConvTranspose3d(4, 4, 2, 2, device=device)
    fixed = CoordSet(random_coords(60, 4).to(device))
    targets = [random_coords(100, 8, seed=i).to(device) for i in range(3)]
    gc.collect()
    gc.disable()
    try:
        seen, tensors = [], []
        for i in range(40):
            target = targets[i % 3]
            for fresh in (target, CoordSet(target), Voxels(target, torch.zeros(100, 1, device=device))):
                y = same(x, coords=fresh)
                down(x, coords=fresh)
                up(x, coords=fresh)
                made = voxmma.kernel_map(x, 3, out_coords=y)
                tensors += [weakref.ref(t) for t in (*made.tensors, *made.transposed().tensors)]
            young = Voxels(target, torch.zeros(100, 4, device=device))
            down(young, coords=fixed)
            same(young, coords=x)
            del y, fresh, young, made
            seen.append([(len(s.maps), len(s.derived), len(s.calls)) for s in (x.coord_set, fixed)])
        assert seen[5] == seen[-1] and all(reference() is None for reference in tensors)
        assert x.coord_set.maps == {} and fixed.maps == {}
        w = torch.zeros(8, 4, 4, device=device)
        for i in range(_KEPT["maps"] + 20):
            voxmma.nn.functional.spatially_sparse_conv(x, w, 2, dilation=1 + i)
            voxmma.kernel_map(x, 1, stride=2 + i)
        assert len(x.coord_set.maps) == _KEPT["maps"] and len(x.coord_set.derived) == _KEPT["derived"]
        w, half = torch.zeros(27, 4, 4, device=device), x.half()
        for i in range(_KEPT["calls"] + 20):
            voxmma.nn.functional.spatially_sparse_conv(half, w, 3, layer=f"layer {i}")
        assert len(x.coord_set.calls) == _KEPT["calls"]
    finally:
        gc.enable()


def test_a_map_serves_as_long_as_both_sets_live(device: torch.device) -> None:
    x = Voxels(random_coords(200, 8).to(device), torch.randn(200, 4, device=device))
    target = CoordSet(random_coords(100, 8, seed=1).to(device))
    made = voxmma.kernel_map(x, 3, out_coords=target)
    assert voxmma.kernel_map(x, 3, out_coords=target) == made
    assert voxmma.kernel_map(target, 3, out_coords=x, transposed=True) == made.transposed()
    other = copy.deepcopy(made)
    held = x.coord_set
    del target
    assert len(held.maps) == 1  # the map holds it
    del made, other
    assert held.maps == {}


def test_an_export_names_sets_that_the_network_makes(device: torch.device) -> None:
    x = Voxels(random_coords(50, 6).to(device), torch.ones(50, 2, device=device))
    layer, target = nn.SparseConv3d(2, 2, 3, device=device), x.coords[::2].clone()

    class Network(torch.nn.Module):
        def forward(self, x: Voxels) -> torch.Tensor:
            return layer(x, coords=target).feats

    with pytest.raises(ValueError, match="export it on coordinates that it holds"):
        with_maps(Network(), (x,))


# ---- the finer set -----------------------------------------------------------------------------------------


def _layers(device: torch.device) -> tuple[Any, Any, Any]:
    x = Voxels(
        torch.unique(random_coords(200, 16), dim=0).flip(0).to(device), torch.randn(200, 4, device=device)
    )
    down = nn.SparseConv3d(4, 4, 2, 2, device=device)
    return x, down, nn.SparseConvTranspose3d(4, 4, 2, 2, device=device)


def test_fault_55_given_coordinates_remember_the_finer_set(device: torch.device) -> None:
    x, down, up = _layers(device)
    low = voxmma.downsample(x, 2)
    some = low.coords[::2].clone()
    for coords in (low, low.coords.clone(), CoordSet(low.coords, 1), some, CoordSet(some, 1)):
        assert up(down(x, coords=coords)).coord_set is x.coord_set
        assert nn.Unpool(2)(down(x, coords=coords)).coord_set is x.coord_set
        assert up(nn.SparseMaxPool3d(2)(x, coords=coords)).coord_set is x.coord_set
    for coords in (low.coords.clone(), some):
        given = Voxels(coords, torch.zeros(len(coords), 1, device=device), batch_size=1)
        assert up(down(x, coords=given)).coord_set is x.coord_set
    again = down(down(x, coords=some), coords=voxmma.downsample(CoordSet(some, 1), 2).coords.clone())
    assert nn.SparseConvTranspose3d(4, 4, 4, 4, device=device)(again).coord_set is x.coord_set


def test_fault_55_a_set_that_two_inputs_lead_to_is_not_guessed(device: torch.device) -> None:
    x, down, up = _layers(device)
    low = down(x)
    other = Voxels(random_coords(90, 16, seed=2).to(device), torch.randn(90, 4, device=device))
    assert up(down(other, coords=low)).coord_set is x.coord_set  # made from x: stays so
    fixed = CoordSet(low.coords.clone(), 1)
    for _ in range(3):  # one input after another
        young = Voxels(random_coords(80, 16, seed=3).to(device), torch.randn(80, 4, device=device))
        assert up(down(young, coords=fixed)).coord_set is young.coord_set
        del young
    y, z = down(x, coords=fixed), down(other, coords=fixed)
    copied = pytree.tree_map(lambda t: t.clone(), z)
    for v in (y, z, pickle.loads(pickle.dumps(z.with_feats(z.feats.detach()))), copied):
        with pytest.raises(ValueError, match="which voxels to go back to"):
            up(v)
    assert up(z, coords=other).coord_set is other.coord_set
    assert up(z, coords=x).coord_set is x.coord_set


class _Rows(torch.utils.data.Dataset[Any]):
    def __init__(self, low: Voxels) -> None:
        self.low = low

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Voxels:
        return self.low


def _first(samples: list[Any]) -> Any:
    return samples[0]


@pytest.mark.parametrize("given", [False, True])
def test_fault_55_copies_remember_the_finer_set(device: torch.device, given: bool) -> None:
    x, down, up = _layers(device)
    low = down(x, coords=voxmma.downsample(x, 2).coords.clone()) if given else down(x)
    low = low.with_feats(low.feats.detach())
    want, voxels = up(low).feats.detach(), x.coords.clone()
    copies = {
        "tree_map": pytree.tree_map(lambda t: t.clone(), low),
        "twice": pytree.tree_map(lambda t: t.clone(), pytree.tree_map(lambda t: t.clone(), low)),
        "deepcopy": copy.deepcopy(low),
        "pickle": pickle.loads(pickle.dumps(low)),
        "pickle of a copy": pickle.loads(pickle.dumps(pytree.tree_map(lambda t: t.clone(), low))),
        "detach": pytree.tree_map(lambda t: t.detach(), low),
    }
    with torch.inference_mode():
        copies["inference"] = pytree.tree_map(lambda t: t.clone(), low)
    if device.type == "cuda":
        host = low.cpu()
        copies["cpu and back"] = host.to(device)
        copies["pinned"] = host.pin_memory().to(device, non_blocking=True)
        copies["tree_map from the host"] = pytree.tree_map(lambda t: t.to(device), host)
    del x, low
    gc.collect()
    with torch.no_grad():
        for name, other in copies.items():
            got = up(other)
            assert torch.equal(got.coords, voxels), name
            assert torch.equal(got.feats, want), name


def test_fault_55_changed_coordinates_forget_the_finer_set(device: torch.device) -> None:
    x, down, up = _layers(device)
    moved = pytree.tree_map(lambda t: t + 1 if t.dtype == torch.int32 else t, down(x))
    moved = moved.with_feats(moved.feats.detach())
    assert moved.coord_set.finer is None
    assert up(moved).num_voxels == 8 * moved.num_voxels


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_fault_55_worker_processes_keep_the_finer_set(context: str) -> None:
    x, down, up = _layers(torch.device("cpu"))
    low = down(x, coords=voxmma.downsample(x, 2).coords.clone())
    low = low.with_feats(low.feats.detach())
    loader: Any = torch.utils.data.DataLoader(
        _Rows(low), num_workers=1, collate_fn=_first, multiprocessing_context=context
    )
    for other in loader:
        assert torch.equal(up(other).coords, x.coords)


# ---- writes ------------------------------------------------------------------------------------------------

WRITES: dict[str, Callable[[Voxels], torch.Tensor]] = {
    "coordinates": lambda y: y.coords,
    "a view of them": lambda y: y.coords[:, 1:],
    "detached": lambda y: y.coords.detach(),
    "counts": lambda y: y.counts,
    "sorted keys": lambda y: y.coord_set.sorted_keys()[1],
    "map": lambda y: voxmma.kernel_map(y, 3).tensors[0],
    "counts of a map": lambda y: voxmma.kernel_map(y, 3).counts,
    "leaf of a tree": lambda y: pytree.tree_leaves(y)[0],
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("what", WRITES)
def test_fault_56_writes_are_found_out(device: torch.device, what: str, inference: bool) -> None:
    x, down, _ = _layers(device)
    same = nn.SparseConv3d(4, 4, 3, device=device, dtype=torch.float16)  # keeps its decision
    reads: dict[str, Callable[[Voxels], Any]] = {
        "coordinates": lambda y: (y.coords, same(y.half()), down(y), y.counts, voxmma.lookup(y, x.coords)),
        "counts": lambda y: y.counts,
        "sorted keys": lambda y: y.coord_set.sorted_keys(),
        "map": lambda y: same(y.half()),
        "counts of a map": lambda y: nn.SparseAvgPool3d(3, 1)(y),
    }
    steps: dict[str, list[Callable[[Voxels], Any]]] = {
        "coordinates": [
            lambda y: y.coords,
            lambda y: same(y.half()),
            lambda y: down(y),
            lambda y: voxmma.downsample(y, 2),
            lambda y: voxmma.kernel_map(y, 5),
            lambda y: pickle.dumps(y),
        ]
    }
    with torch.inference_mode(inference):
        y = down(x)
        good = y.coords.clone()
        for _ in range(2):
            same(y.half())
        kind = what if what in reads else "coordinates"
        reads[kind](y)
        with torch.no_grad():
            WRITES[what](y).mul_(2)
        for read in steps.get(kind, [reads[kind]]):
            with pytest.raises(RuntimeError, match=r"written to.*clone"):
                read(y)
        if kind == "coordinates":
            z = down(x)  # what x keeps is as if nobody had written
            assert torch.equal(z.coords, good) and torch.equal(z.feats, y.feats)


@pytest.mark.parametrize("what", ["submanifold", "strided", "block", "max", "average", "counts of a map"])
def test_fault_56_writes_before_the_gradient_are_found_out(device: torch.device, what: str) -> None:
    layers: dict[str, tuple[Callable[..., torch.nn.Module], int, int]] = {
        "submanifold": (lambda: nn.SparseConv3d(4, 4, 3), 3, 1),
        "strided": (lambda: nn.SparseConv3d(4, 4, 2, 2), 2, 2),
        "block": (lambda: nn.Sequential(nn.SparseConv3d(4, 4, 3), nn.BatchNorm(4), nn.ReLU()), 3, 1),
        "max": (lambda: nn.SparseMaxPool3d(2, 2), 2, 2),
        "average": (lambda: nn.SparseAvgPool3d(3, 1), 3, 1),
        "counts of a map": (lambda: nn.SparseAvgPool3d(3, 1), 3, 1),
    }
    make, size, stride = layers[what]
    x = Voxels(random_coords(50, 6).to(device), torch.ones(50, 4, device=device, requires_grad=True))
    y = make().to(device)(x)
    made = voxmma.kernel_map(x, size, stride=stride)
    tensor = made.counts if what == "counts of a map" else made.tensors[0]
    tensor.mul_(1)
    with pytest.raises(RuntimeError, match=r"written to.*clone|modified by an inplace operation"):
        y.feats.sum().backward()


def test_what_is_first_made_under_torch_func_outlives_it(device: torch.device) -> None:
    """Sets, maps and indices that a transform asks for first are those that everybody has."""
    rows, feats = random_coords(50, 6, batch=2).to(device), torch.randn(50, 4, device=device)
    strided, same = nn.SparseConv3d(4, 4, 2, 2).to(device), nn.SparseConv3d(4, 4, 3).to(device)
    reads: dict[str, Callable[[Voxels], torch.Tensor]] = {
        "largest": lambda x: nn.GlobalMaxPool()(x),
        "counts": lambda x: x.feats * x.counts.sum(),
        "rows": lambda x: x.feats[voxmma.lookup(x, rows)],
        "layers": lambda x: strided(same(x)).feats,
        "pools": lambda x: nn.SparseAvgPool3d(3, 1)(nn.SparseMaxPool3d(2, 2)(x)).feats,
    }
    for name, read in reads.items():
        for coords in (CoordSet(rows), CoordSet.trusted(rows.clone(), 2)):

            def run(f: torch.Tensor) -> torch.Tensor:
                return read(Voxels(coords, f)).square().sum()  # noqa: B023

            leaf = feats.clone().requires_grad_()
            if name in ("layers", "pools"):
                with pytest.raises(RuntimeError, match="functorch"):
                    torch.func.grad(run)(feats)
            else:
                gradient = torch.func.grad(run)(feats)
                assert torch.equal(gradient, torch.autograd.grad(run(leaf), leaf)[0]), name
            assert torch.equal(read(Voxels(coords, feats)), read(Voxels(CoordSet(rows), feats))), name
    with pytest.raises(ValueError, match="maps over coordinates"):
        torch.func.vmap(lambda c: Voxels(c, feats).counts)(torch.stack([rows, rows]))


def test_the_list_of_a_map_is_the_callers(device: torch.device) -> None:
    x = Voxels(random_coords(50, 6).to(device), torch.ones(50, 2, device=device))
    made = voxmma.kernel_map(x, 3)
    made.tensors.clear()
    made.offsets.clear()
    assert len(made.tensors) == (7 if device.type == "cuda" else 4) and len(made.offsets) == 27


@pytest.mark.gpu
def test_fault_56_writes_into_the_index_are_found_out() -> None:
    coords = CoordSet(random_coords(50, 6).cuda())
    coords.hash_index().order.zero_()
    with pytest.raises(RuntimeError, match=r"written to.*clone"):
        voxmma.lookup(coords, coords.coords)
