"""Sets of a few tiles, whose sums several CTAs share on a GPU: every tile's values, repeats and limits."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma import _C
from voxmma.dispatch.selection import card, select_tile
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.ops import formats
from voxmma.ops.kernels import Tile, compiled
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import KernelMap, kernel_map
from voxmma.verify import accuracy
from voxmma.verify.families import FAMILIES, INTEGERS, Family

from conftest import random_coords, script, surface_coords

ROWS = (1, 5, 254, 1082, 4541)
CHANNELS = ((16, 16), (64, 64), (128, 128), (256, 256), (18, 20), (64, 200), (6, 40))
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
#: kernel size, stride, transposed
Layer = tuple[int, int, bool]
LAYERS: tuple[Layer, ...] = ((3, 1, False), (5, 1, False), (2, 2, False), (2, 2, True), (3, 2, True))

conv_op, wgrad_op = torch.ops.voxmma.conv, torch.ops.voxmma.conv_wgrad


def cpu_tile(op: str) -> Tile:
    return Tile("cpu", op, "fp32", "fp32", 0, 0, 0, 0, "", 0, 0, 0)


def tiles_of(device: torch.device, op: str) -> list[Tile]:
    """Every tile of 'fprop' or 'wgrad' that runs on the device."""
    if device.type == "cpu":
        return [cpu_tile(op)]
    here = card(device)
    return [tile for tile in compiled() if tile.op == op and tile.runs_on(here)]


def shapes_of(device: torch.device, layer: Layer = LAYERS[0]) -> list[tuple[int, int]]:
    """Channels; few for 125 offsets, which are the several passes of a tile whatever the channels."""
    shapes = CHANNELS if device.type == "cuda" else ((16, 16), (18, 20))
    return [channels for channels in shapes if layer[0] < 5 or max(channels) <= 64]


def rows_of(device: torch.device) -> tuple[int, ...]:
    return ROWS if device.type == "cuda" else ROWS[:3]


def pairwise(
    tiles: Sequence[Tile], rows: Sequence[int], shapes: Sequence[tuple[int, int]], turn: int = 0
) -> list[tuple[int, tuple[int, int], list[Tile]]]:
    """(rows, channels, tiles that run on them): each tile meets each number of rows and each channels, and of
    five tiles in a row one meets each pair of these. `turn`: where the pairs of the first tile begin."""
    met: dict[tuple[int, tuple[int, int]], list[Tile]] = {}
    for i, tile in enumerate(tiles, turn):
        for k in range(max(len(rows), len(shapes))):
            met.setdefault((rows[(k + i) % len(rows)], shapes[k % len(shapes)]), []).append(tile)
    return [(n, channels, some) for (n, channels), some in met.items()]


@functools.cache
def layer_map(device: torch.device, n: int, layer: Layer, scattered: bool = False) -> KernelMap:
    """A map of n voxels, on a surface or so far apart that few have a neighbour, or of its transpose."""
    size, stride, transposed = layer
    coords = random_coords(n, 90, seed=n) if scattered else surface_coords(int((0.6 * n) ** 0.5) + 8)[:n]
    assert len(coords) == n
    found = kernel_map(CoordSet(coords.to(device), 1), size, stride=stride)
    return found.transposed() if transposed else found


def maps_of(kmap: KernelMap) -> tuple[list[Tensor], list[Tensor]]:
    return kmap.tensors, ([] if kmap.symmetric else kmap.transposed().tensors)


def draw(
    family: Family, tile: Tile, kmap: KernelMap, channels: tuple[int, int], groups: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """x, w, dy of a tile's input format, the same on every device."""
    device, dtype = kmap.out_coords.device, DTYPES[tile.input]
    generator = torch.Generator().manual_seed(3)
    c_in, c_out = channels
    shape = (kmap.kernel_volume, groups, c_in // groups, c_out // groups)
    x = family.activations((kmap.in_coords.num, c_in), dtype, generator, device)
    w = family.weights(shape, dtype, generator, device)
    dy = family.gradients((kmap.out_coords.num, c_out), dtype, generator, device)
    return x, w if groups > 1 else w[:, 0].contiguous(), dy


def wgrad_tile(tile: Tile, channels: tuple[int, int], groups: int, device: torch.device) -> str:
    dtype = DTYPES[tile.input]
    exact = "fp64" if dtype == torch.float64 else "fp32"
    return select_tile("wgrad", dtype, exact, *channels, groups, device).name


def run_fprop(
    tile: Tile, kmap: KernelMap, x: Tensor, w: Tensor, dy: Tensor, bias: Tensor | None = None, groups: int = 1
) -> tuple[Tensor, Tensor]:
    """Forward and input gradient, both with the one tile."""
    x = x.detach().requires_grad_()
    own, opposite = maps_of(kmap)
    back = wgrad_tile(tile, (x.shape[1], dy.shape[1]), groups, x.device)
    names = (tile.accum, tile.name, tile.name, back)
    y = conv_op(x, w, bias, own, opposite, kmap.out_coords.num, kmap.symmetric, False, *names, None)
    return y.detach(), torch.autograd.grad(y, x, dy)[0]


def run_wgrad(
    tile: Tile, kmap: KernelMap, x: Tensor, dy: Tensor, out: torch.dtype, groups: int = 1
) -> Tensor:
    own, opposite = maps_of(kmap)
    names = ("fp64" if tile.accum == "fp64" else "fp32", tile.name, tile.name)
    return wgrad_op(x, dy, own, opposite, kmap.kernel_volume, groups, kmap.symmetric, *names, out)


@pytest.mark.parametrize("scattered", [False, True], ids=["surface", "scattered"])
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_sums_are_exact_and_the_same_in_every_run(
    device: torch.device, layer: Layer, scattered: bool
) -> None:
    """Integers, whose sums every accumulator holds in any order: a lost, doubled or raced part shows."""
    turn = 2 * LAYERS.index(layer) + scattered
    shapes = shapes_of(device, layer)
    for n, channels, tiles in pairwise(tiles_of(device, "fprop"), rows_of(device), shapes, turn):
        kmap = layer_map(device, n, layer, scattered)
        pairs, answers = kmap.pairs(), {}
        for tile in tiles:
            x, w, dy = draw(INTEGERS, tile, kmap, channels)
            bias = torch.arange(channels[1], device=device, dtype=torch.float32) % 5 - 2
            if tile.input not in answers:
                answers[tile.input] = (
                    accuracy.reference_conv(x, w, pairs, kmap.out_coords.num, bias)[0],
                    accuracy.reference_dgrad(dy, w, pairs, kmap.in_coords.num)[0],
                )
            first = run_fprop(tile, kmap, x, w, dy, bias)
            for got, want in zip(first, answers[tile.input], strict=True):
                assert torch.equal(got, want.to(got.dtype)), (tile.name, n, channels)
            again = run_fprop(tile, kmap, x, w, dy, bias)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), (tile.name, n, channels)


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_weight_gradients_are_exact_and_the_same_in_every_run(device: torch.device, layer: Layer) -> None:
    shapes, turn = shapes_of(device, layer), LAYERS.index(layer)
    for n, channels, tiles in pairwise(tiles_of(device, "wgrad"), rows_of(device), shapes, turn):
        kmap, want = layer_map(device, n, layer), None
        for tile in tiles:
            x, _, dy = draw(INTEGERS, tile, kmap, channels)
            if want is None:  # equal in every format
                want = accuracy.reference_wgrad(x, dy, kmap.pairs())[0]
            for out in {x.dtype, torch.float64 if x.dtype == torch.float64 else torch.float32}:
                got = run_wgrad(tile, kmap, x, dy, out)
                assert torch.equal(got, want.to(out)), (tile.name, n, channels, out)
                assert torch.equal(run_wgrad(tile, kmap, x, dy, out), got), (tile.name, n, channels, out)


@pytest.mark.parametrize("groups", [2, 4])
def test_groups(device: torch.device, groups: int) -> None:
    rows, shapes = rows_of(device), ((64, 128), (24, 40))
    for n, channels, tiles in pairwise(tiles_of(device, "fprop"), rows, shapes, groups):
        kmap = layer_map(device, n, LAYERS[0])
        for tile in tiles:
            x, w, dy = draw(INTEGERS, tile, kmap, channels, groups)
            want = (
                accuracy.reference_conv(x, w, kmap.pairs(), n)[0],
                accuracy.reference_dgrad(dy, w, kmap.pairs(), n)[0],
            )
            for got, exact in zip(run_fprop(tile, kmap, x, w, dy, groups=groups), want, strict=True):
                assert torch.equal(got, exact.to(got.dtype)), (tile.name, n, channels)
    for n, channels, tiles in pairwise(tiles_of(device, "wgrad"), rows, shapes, groups):
        kmap = layer_map(device, n, LAYERS[0])
        for tile in tiles:
            x, _, dy = draw(INTEGERS, tile, kmap, channels, groups)
            exact = accuracy.reference_wgrad(x, dy, kmap.pairs(), groups)[0]
            got = run_wgrad(tile, kmap, x, dy, x.dtype, groups)
            assert torch.equal(got, exact.to(x.dtype)), (tile.name, n, channels)


@pytest.mark.parametrize("family", ["signed", "one_signed", "cancelling"])
def test_errors_are_within_the_bound(device: torch.device, family: str) -> None:
    given, turn = FAMILIES[family], list(FAMILIES).index(family)
    for n, channels, tiles in pairwise(tiles_of(device, "fprop"), rows_of(device), shapes_of(device), turn):
        kmap = layer_map(device, n, LAYERS[0])
        pairs, volume = kmap.pairs(), kmap.kernel_volume
        for tile in tiles:
            x, w, dy = draw(given, tile, kmap, channels)
            read = "tf32" if tile.scheme == "tf32" else x.dtype
            if read == "tf32":
                x, w, dy = (formats.round_tf32(t) for t in (x, w, dy))
            arch = "simt" if tile.atom == "SIMT" else accuracy.arch_of(device)
            found = zip(
                run_fprop(tile, kmap, x, w, dy),
                (accuracy.reference_conv(x, w, pairs, n), accuracy.reference_dgrad(dy, w, pairs, n)),
                channels,
                strict=True,
            )
            for got, (y64, abs64), reduced in found:
                chunk = tile.promote if tile.accum == "fp16_promoted" else 0
                products = volume * reduced
                limit = accuracy.bound(tile.accum, products, read, x.dtype, arch, offsets=volume, chunk=chunk)
                errors = accuracy.errors(got, y64, abs64, floor=limit.floor)
                assert errors.nonfinite == 0 and errors.within(limit), (tile.name, n, channels, errors, limit)


def test_no_rows(device: torch.device) -> None:
    """No outputs, and no inputs for two outputs: nothing is launched, and the bias is what is left."""
    far = torch.tensor([[0, 50, 50, 50], [0, 70, 70, 70]], dtype=torch.int32, device=device)
    one = torch.zeros(1, 4, dtype=torch.int32, device=device)
    for n_in, n_out in ((1, 0), (0, 2), (0, 0), (1, 2)):
        kmap = kernel_map(CoordSet(one[:n_in], 1), 3, out_coords=CoordSet(far[:n_out], 1))
        for tile in tiles_of(device, "fprop"):
            x, w, dy = draw(INTEGERS, tile, kmap, (64, 64))
            bias = torch.ones(64, device=device)
            y, dx = run_fprop(tile, kmap, x, w, dy, bias)
            assert y.shape == (n_out, 64) and bool((y == 1).all()), tile.name
            assert dx.shape == (n_in, 64) and not dx.any(), tile.name


@pytest.mark.gpu
def test_what_is_shared_is_what_would_leave_the_device_idle() -> None:
    """fprop: at most eight parts, one where there are as many tiles as multiprocessors."""
    device = torch.device("cuda", 0)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for tile in tiles_of(device, "fprop"):
        for c, volume in itertools.product((16, 64, 256), (1, 8, 27, 125)):
            sizes = (1, 254, 4541, 256 * sms, 500_000)
            found = [_C.tile_parts(tile.name, n, volume, c, c, 1, sms) for n in sizes]
            assert all(1 <= parts <= accuracy.MAX_PARTS for parts in found), (tile.name, c, volume, found)
            assert found[-2:] == [1, 1], (tile.name, c, volume, found)
            if volume == 27:
                assert min(found[:2]) > 1, (tile.name, c, found)
            if tile.arch == 90:  # its cost does not depend on bytes
                assert found[0] == found[1]
        if tile.arch == 90:
            assert _C.tile_parts(tile.name, 254, 27, 64, 64, 1, 8) == 1  # no cluster fits
    for tile in tiles_of(device, "wgrad"):
        for n in (1, 254, 4541, 500_000):
            assert 1 <= _C.tile_parts(tile.name, n, 27, 64, 64, 1, sms) <= max(1, -(-n // 256)), tile.name
    with pytest.raises(ValueError, match="tile='no_such_tile' is not among"):
        _C.tile_parts("no_such_tile", 1, 1, 1, 1, 1, 1)
    with pytest.raises(ValueError, match="must be positive"):
        _C.tile_parts(tiles_of(device, "fprop")[0].name, 0, 1, 1, 1, 1, 1)


def test_the_record_says_into_how_many_parts(device: torch.device) -> None:
    coords = surface_coords(30)
    for n in (254, 1500):
        x = torch.randn(n, 64, device=device).half()
        w = torch.randn(27, 64, 64, device=device).half() / 40
        out = spatially_sparse_conv(voxmma.Voxels(coords[:n].to(device), x), w, 3)
        record = voxmma.explain(out)
        if device.type == "cpu":
            assert record.parts == 1 and " parts" not in str(record)
            continue
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        assert record.parts == _C.tile_parts(record.tile, n, 27, 64, 64, 1, sms) > 1
        assert f"tile {record.tile} in {record.parts} parts" in str(record)


@pytest.mark.gpu
def test_small_sets_run_in_a_graph() -> None:
    """Captured and replayed with other inputs: what a launch leaves behind does not reach into the next."""
    device = torch.device("cuda", 0)
    kmap = layer_map(device, 254, LAYERS[0])
    for tile in tiles_of(device, "fprop"):
        x, w, dy = draw(INTEGERS, tile, kmap, (64, 64))
        run_fprop(tile, kmap, x, w, dy)
        own, opposite = maps_of(kmap)
        arguments = (own, opposite, 254, kmap.symmetric, False, tile.accum, tile.name, tile.name)
        back, given = wgrad_tile(tile, (64, 64), 1, device), x.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = conv_op(given, w, None, *arguments, back, None)
        for factor in (1, -1, 0, 1):
            given.copy_(x * factor)
            graph.replay()
            want = accuracy.reference_conv(given, w, kmap.pairs(), 254)[0]
            assert torch.equal(y, want.to(y.dtype)), (tile.name, factor)


def test_small_sets_are_timed(tmp_path: Path, device: torch.device, capsys: pytest.CaptureFixture) -> None:
    timed, out = script("small_sets"), tmp_path / "small.json"
    options = [
        "--voxels",
        "5",
        "--voxels",
        "254",
        "--channels",
        "8",
        "--repeats",
        "1",
        "--device",
        str(device),
    ]
    assert timed.main([*options, "--out", str(out)]) == 0
    stored = json.loads(out.read_text())
    assert stored["kind"] == "small_sets" and stored["repeats"] == 1
    rows = [row for row in stored["rows"] if row["lib"] == "voxmma"]
    assert [(row["voxels"], row["channels"]) for row in rows] == [(5, 8), (254, 8)]
    for row in rows:
        assert row["parts"] >= 1 and row["note"]
        assert row["forward_us"] > 0 and row["step_us"] > 0 and row["step_kernel_us"] > 0
    coords = timed.some_voxels(254)
    assert len(torch.unique(coords, dim=0)) == 254
    assert voxmma.kernel_map(CoordSet(coords, 1), 3).num_pairs > 5 * 254  # they lie together
    for bad in (["--voxels", "0"], ["--channels", "-1"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            timed.main([*bad, "--out", str(out)])
        assert "must be at least 1" in capsys.readouterr().err
