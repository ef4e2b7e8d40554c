"""Times of coordinate sets, maps, pooling and voxelisation, which benchmarks/peerbench.py does not measure.

    python benchmarks/operators.py --scene surface --scene scan.npz --out operators.json

Maps: wall times from an idle device to an idle device, host included, everything made anew, and how often the
host waits for the GPU meanwhile. Pooling: device times with cold caches and launching hidden, fp16 on a GPU,
fp32 on a CPU; the roofline is features (or gradients), for max one byte an output, which input it took, each
read or written once at the bandwidth of a copy. Beside it on a GPU, where spconv can be imported, its pooling
functions with their pairs already built. Moves (points into voxels and back, coordinate operations, global
pooling, unpooling): each row says what its roofline counts. benchmarks/collect.py adds the file to
benchmarks/results.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer
from torch import Tensor

from voxmma._timing import Clock, synchronise
from voxmma.nn import functional as F
from voxmma.sparse import sampling
from voxmma.sparse import sets as coordops
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import held_bytes, kernel_map
from voxmma.sparse.tensor import Voxels
from voxmma.tools import bench
from voxmma.tuning import machine

import peers
import roofline
from peer_problem import prepared

CHANNELS = (32, 64, 128)
WINDOWS = ((2, 2), (3, 2))  # kernel size, stride
LEVELS = 5
POINTS = {"cuda": 1_000_000, "cpu": 10_000}
VOXEL_SIZE = 0.05

Row = dict[str, Any]

# ---- coordinate sets and kernel maps -----------------------------------------------------------------------


def encoder(level: CoordSet) -> list[CoordSet]:
    """The sets of an encoder: on each of its levels a 3x3x3 and a k2s2 map are made."""
    sets = [level]
    for _ in range(LEVELS):
        kernel_map(sets[-1], 3)
        sets.append(kernel_map(sets[-1], 2, stride=2).out_coords)
    return sets


def waits(make: Callable[[Any], object], given: Any, device: torch.device) -> int | None:
    """How often `make(given)` makes the host wait for the GPU; None on a CPU."""
    if device.type != "cuda":
        return None
    synchronise(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def measure_maps(coords: Tensor, clock: Clock) -> Row:
    """Times, waits and bytes on coords (N, 4)."""
    known = CoordSet(coords)
    kept: list[object] = []  # what was made: freed before the next repetition, not in its time

    def fresh(i: int) -> CoordSet:
        kept.clear()
        known.maps.clear()
        known.own.clear()
        known.derived.clear()
        return known

    ways: dict[str, tuple[Callable[[int], Any], Callable[[Any], object]]] = {
        "coordinate set": (fresh, lambda s: CoordSet(coords)),
        "coordinate set, 3x3x3 map": (fresh, lambda s: kernel_map(CoordSet(coords), 3)),
        "3x3x3 map": (fresh, lambda s: kernel_map(s, 3)),
        "k2s2 set and map": (fresh, lambda s: kernel_map(s, 2, stride=2)),
        "k3s2 set and map": (fresh, lambda s: kernel_map(s, 3, stride=2)),
        "transposed k2s2 map": (
            lambda i: kernel_map(fresh(i), 2, stride=2),
            lambda down: down.transposed().tensors,
        ),
        f"maps of an encoder, {LEVELS} levels": (fresh, encoder),
        "coordinate set, maps of the encoder": (fresh, lambda s: encoder(CoordSet(coords))),
    }
    rows = []
    for what, (prepare, make) in ways.items():

        def run(i: int, given: Any, make: Callable[[Any], object] = make) -> None:
            kept.append(make(given))

        taken = clock.wall(run, prepare=prepare)
        row = {"what": what, "ms": taken.ms, "least_ms": taken.least * 1e3}
        rows.append({**row, "waits": waits(make, prepare(0), clock.device)})
    mapping = kernel_map(fresh(0), 3)
    index = known.hash_index() if coords.is_cuda else known.sorted_keys()
    facts = {"pairs": mapping.num_pairs, "map_bytes": mapping.nbytes, "index_bytes": held_bytes(index)}
    return {"voxels": known.num, **facts, "maps": rows}


# ---- pooling -----------------------------------------------------------------------------------------------


def spconv_pool(
    problem: peers.Problem, x: Tensor, kind: str, size: int, stride: int, n_out: int
) -> Callable[[], Tensor]:
    """spconv's pooling function on x (N, C), on the pairs that its layer built.

    RuntimeError where it makes another number of outputs than `n_out`.
    """
    lib: Any = importlib.import_module("spconv.pytorch")
    functional: Any = importlib.import_module("spconv.pytorch.functional")
    name = f"indice_{kind}pool_implicit_gemm"
    pool = getattr(functional, name)
    taken: list[tuple[Any, ...]] = []

    def take(*given: Any) -> Tensor:
        taken.append(given)
        return pool(*given)

    window = peers.Layer(x.shape[1], x.shape[1], size, stride)
    shape = peers.spconv_shape(problem, window)
    layer = getattr(lib, f"Sparse{kind.title()}Pool3d")(size, stride, window.origin)
    setattr(functional, name, take)
    try:
        layer.to(x.device)(lib.SparseConvTensor(x, problem.coords, shape, problem.batch_size))
    finally:
        setattr(functional, name, pool)
    y = pool(*taken[0])
    if len(y) != n_out:
        raise RuntimeError(f"{len(y)} outputs instead of {n_out}")
    torch.autograd.grad(y, x, torch.ones_like(y))
    synchronise(x.device)
    return lambda: pool(*taken[0])


def measure_pool(
    problem: peers.Problem, x: Voxels, kind: str, size: int, stride: int, clock: Clock, bandwidth: float
) -> Row:
    """Times of one pooling of x, which requires grad, in ms, with their roofline; bandwidth in GB/s."""
    pool = {"max": F.max_pool, "avg": F.avg_pool}[kind]
    c, n_out = x.feats.shape[1], pool(x, size, stride).num_voxels
    moved = c * ((x.num_voxels + n_out) * x.feats.element_size() + (n_out if kind == "max" else 0))
    row: Row = {"kind": kind, "kernel": size, "stride": stride, "channels": c, "out_voxels": n_out}
    row |= {"dtype": "fp16" if x.dtype == torch.float16 else "fp32", "floor_ms": moved / bandwidth / 1e6}
    calls: dict[str, Callable[[], Tensor]] = {"voxmma": lambda: pool(x, size, stride).feats}
    if clock.device.type == "cuda" and peers.installed("spconv"):
        try:
            calls["spconv"] = spconv_pool(problem, x.feats, kind, size, stride, n_out)
        except Exception as error:  # a peer may raise anything; the row says what
            row["spconv_error"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
    ys = {lib: call() for lib, call in calls.items()}
    dy = torch.randn_like(ys["voxmma"])
    found = {
        "forward": clock.race({lib: lambda i, lib=lib: calls[lib]() for lib in calls}, cold=True),
        "backward": clock.race(
            {
                lib: lambda i, lib=lib: torch.autograd.grad(ys[lib], x.feats, dy, retain_graph=True)
                for lib in calls
            },
            cold=True,
        ),
    }
    for op, taken in found.items():
        row[f"{op}_ms"], row[f"{op}_spread_ms"] = taken["voxmma"].ms, taken["voxmma"].spread_ms
        row[f"{op}_over_floor"] = row[f"{op}_ms"] / row["floor_ms"]
        if "spconv" in taken:
            row[f"spconv_{op}_ms"] = taken["spconv"].ms
    return row


def measure_pools(problem: peers.Problem, clock: Clock, bandwidth: float) -> list[Row]:
    """A row a kind, window and number of channels."""
    dtype = torch.float16 if clock.device.type == "cuda" else torch.float32
    known = CoordSet(problem.coords, problem.batch_size)
    rows = []
    for kind, (size, stride), c in itertools.product(("max", "avg"), WINDOWS, CHANNELS):
        feats = torch.randn(known.num, c, device=clock.device, dtype=dtype, requires_grad=True)
        rows.append(measure_pool(problem, Voxels(known, feats), kind, size, stride, clock, bandwidth))
    return rows


# ---- points, coordinates, samples --------------------------------------------------------------------------


class Move(NamedTuple):
    """An operation that only moves data, with the bytes that it cannot avoid."""

    what: str
    channels: int
    run: Callable[[], Any]
    moved: int
    """bytes"""
    counted: str
    """what they are"""
    dtype: torch.dtype | None = None
    """of the features"""
    feats: Tensor | None = None
    """what there is a gradient for"""
    moved_back: int = 0


def scattered(coords: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """fp32 points (count, 3) within voxels drawn with repetition, in no order, and their samples."""
    generator = torch.Generator(coords.device).manual_seed(1)
    rows = torch.randint(len(coords), (count,), generator=generator, device=coords.device)
    within = torch.rand(count, 3, generator=generator, device=coords.device)
    return (coords[rows, 1:] + within) * VOXEL_SIZE, coords[rows, 0].contiguous()


def point_moves(known: CoordSet, dtype: torch.dtype) -> Iterator[Move]:
    """Voxelisation and its opposite."""
    points, batch = scattered(known.coords, POINTS[known.device.type])
    n, samples = len(points), known.batch_size
    for c, kind in ((4, torch.float32), (32, dtype)):
        word = kind.itemsize
        feats = torch.randn(n, c, device=known.device, dtype=kind, requires_grad=True)

        def quantise(feats: Tensor = feats) -> Tensor:
            given = {"batch_index": batch, "batch_size": samples}
            return sampling.sparse_quantize(points, feats, VOXEL_SIZE, **given)[0].feats

        made = len(quantise())
        yield Move(
            "sparse_quantize, mean", c, quantise,
            n * (12 + 4 + c * word + 8) + made * (16 + c * word),
            "points, their samples and features read; coordinates and features of voxels and the rows "
            "of the points written",
            kind, feats, n * (8 + c * word) + made * c * word,
        )  # fmt: skip
    for mode, c in itertools.product(("nearest", "trilinear"), (4, 32)):
        word = dtype.itemsize
        x = Voxels(known, torch.randn(known.num, c, device=known.device, dtype=dtype, requires_grad=True))
        both = (n + known.num) * c * word
        yield Move(
            f"devoxelise, {mode}", c,
            lambda x=x, mode=mode: sampling.devoxelise(x, points, VOXEL_SIZE, mode, batch_index=batch),
            n * (12 + 4) + 16 * known.num + both,
            "points, their samples, coordinates and features of all voxels read; features of points written",
            dtype, x.feats, both,
        )  # fmt: skip


def sample_moves(known: CoordSet, dtype: torch.dtype) -> Iterator[Move]:
    """Global pooling and unpooling, with what is kept for a coordinate set already made."""
    word = dtype.itemsize
    down = kernel_map(known, 2, stride=2).out_coords
    for c in CHANNELS:
        x = Voxels(known, torch.randn(known.num, c, device=known.device, dtype=dtype, requires_grad=True))
        moved = (known.num + known.batch_size) * c * word
        for kind in ("max", "avg", "sum"):
            pool = getattr(F, f"global_{kind}_pool")
            yield Move(
                f"global {kind} pool", c, lambda x=x, pool=pool: pool(x), moved,
                "features read, a row a sample written", dtype, x.feats, moved,
            )  # fmt: skip
        coarse = Voxels(down, torch.randn(down.num, c, device=known.device, dtype=dtype, requires_grad=True))
        moved = (known.num + down.num) * c * word
        yield Move(
            "unpool, 2x2x2", c, lambda x=coarse: F.unpool(x, 2, coords=known).feats, moved,
            "features read and written", dtype, coarse.feats, moved,
        )  # fmt: skip


def coordinate_moves(known: CoordSet, dtype: torch.dtype) -> Iterator[Move]:
    """Sets from sets, rows from rows."""
    n, device = known.num, known.device
    other = CoordSet(known.coords + torch.tensor([0, 1, 0, 0], dtype=torch.int32, device=device))

    def downsample() -> CoordSet:
        known.derived.clear()
        return coordops.downsample(known, 2)

    for what, made, read in (
        ("downsample, 2", downsample, n),
        ("union with itself moved by a voxel", lambda: coordops.union(known, other), 2 * n),
        ("intersection with itself moved by a voxel", lambda: coordops.intersection(known, other), 2 * n),
    ):
        yield Move(what, 0, made, 16 * (read + made().num), "coordinates read and written")
    queries = known.coords[torch.randperm(n, device=device)]
    yield Move(
        "lookup of all voxels in random order", 0, lambda: coordops.lookup(known, queries), 40 * n,
        "coordinates and queries read, rows written",
    )  # fmt: skip
    c = 32
    x = Voxels(known, torch.randn(n, c, device=device, dtype=dtype, requires_grad=True))
    mask = torch.rand(n, device=device) < 0.5
    kept = int(mask.sum())
    yield Move(
        "prune to a half", c, lambda: coordops.prune(x, mask).feats,
        n + 2 * kept * (16 + c * dtype.itemsize),
        "the mask read, coordinates and features of voxels that stay read and written",
        dtype, x.feats, (n + kept) * c * dtype.itemsize,
    )  # fmt: skip


def measure_move(move: Move, clock: Clock, bandwidth: float) -> Row:
    """Times of one operation and of its gradient, in ms, with their rooflines; bandwidth in GB/s."""
    names = {torch.float16: "fp16", torch.float32: "fp32", None: ""}
    row: Row = {"what": move.what, "channels": move.channels, "dtype": names[move.dtype]}
    row |= {"counted": move.counted, "floor_ms": move.moved / bandwidth / 1e6}
    move.run()  # makes what is kept for a coordinate set
    row["waits"] = waits(lambda given: move.run(), None, clock.device)
    row["wall_ms"] = clock.wall(lambda i: move.run()).ms
    if not row["waits"]:  # else a time of the device alone cannot be told from the host's
        row["ms"] = clock(lambda i: move.run(), cold=True).ms
    row["over_floor"] = row.get("ms", row["wall_ms"]) / row["floor_ms"]
    if move.feats is not None:
        y = move.run()
        dy = torch.randn_like(y)
        taken = clock(lambda i: torch.autograd.grad(y, move.feats, dy, retain_graph=True), cold=True)
        row["backward_floor_ms"] = move.moved_back / bandwidth / 1e6
        row["backward_ms"], row["backward_over_floor"] = taken.ms, taken.ms / row["backward_floor_ms"]
    return row


def measure_moves(coords: Tensor, batch_size: int, clock: Clock, bandwidth: float) -> list[Row]:
    """A row an operation on coords (N, 4)."""
    dtype = torch.float16 if clock.device.type == "cuda" else torch.float32
    known = CoordSet(coords, batch_size)
    makers = (point_moves, coordinate_moves, sample_moves)
    moves = itertools.chain.from_iterable(make(known, dtype) for make in makers)
    return [measure_move(move, clock, bandwidth) for move in moves]


# ---- command line ------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = "surface, lidar, room or FILE.npz; again for more; default: surface, lidar"
    parser.add_argument("--scene", action="append", help=names)
    parser.add_argument("--device", help="cpu, cuda, cuda:1; default: cuda if it can be used")
    parser.add_argument("--repeats", type=int, help="of each figure; default 30 on a GPU, 3 on a CPU")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    given = parser.parse_args(arguments)
    try:
        device = bench.chosen_device(given.device)
        on_gpu = device.type == "cuda"
        clock = Clock(device, (30 if on_gpu else 3) if given.repeats is None else given.repeats)
        loaded = bench.load_scenes(given.scene or ["surface", "lidar"], device)
        scenes = {name: prepared(coords) for name, coords in loaded.items()}
        if empty := [name for name, coords in scenes.items() if not len(coords)]:
            raise ValueError(f"{empty[0]} has no voxels")
    except (typer.BadParameter, ValueError, OSError) as error:
        parser.error(str(error))
    if on_gpu:
        torch.cuda.set_device(device)
    result: Row = {
        "kind": "operators",
        **machine.labels(device),
        "spconv": peers.version("spconv") if on_gpu and peers.installed("spconv") else None,
        "bandwidth": roofline.measure(device, ()).bandwidth,
        "repeats": clock.repeats,
        "scenes": {},
    }
    for name, coords in scenes.items():
        problem = peers.Problem(coords, device)
        part = measure_maps(problem.coords, clock)
        part["pools"] = measure_pools(problem, clock, result["bandwidth"])
        part["moves"] = measure_moves(problem.coords, problem.batch_size, clock, result["bandwidth"])
        result["scenes"][name] = part
        given.out.write_text(json.dumps(result, indent=1) + "\n")  # a run that is cut short keeps its scenes
        print(f"{name}: {len(coords):,} voxels, written to {given.out}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
