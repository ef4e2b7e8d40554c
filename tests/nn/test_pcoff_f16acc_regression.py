"""Known history of this family: a race in narrow fp16-accumulator tiles (C_in <= 32, one k-step, missing
wait) corrupted isolated cells by a factor of several hundred at (C = 32, 3x3x3, N >= 200k), while p99 and the
mean stayed clean.

So: every compiled tile at that shape, forward and both gradients, every cell against fp64, ten repeats
bitwise; small integers, whose sums are exact in every format, bit by bit; on the CPU the same checks of the
emulated accumulator at a small size. Gates here look at the maximum over all cells, never at a percentile.
And such tiles never run below the small-channel ceiling without a verdict of the gate that was measured on
this very device; the ceiling is 0 unless somebody raises it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma.dispatch import settings, store, validation
from voxmma.dispatch.selection import card, select_tile
from voxmma.nn import SparseConv3d
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv
from voxmma.ops import formats
from voxmma.ops.kernels import Tile, compiled
from voxmma.sparse.maps import KernelMap
from voxmma.verify import accuracy
from voxmma.verify.accuracy import Bound
from voxmma.verify.families import FAMILIES, INTEGERS, Family

from conftest import random_coords, surface_coords

CHANNELS = 32
REPEATS = 10
CASES = [
    (tile, op) for tile in compiled() for op in (("wgrad",) if tile.op == "wgrad" else ("fprop", "dgrad"))
]


class Case:
    """Operands of one op at the shape of the regression, its fp64 result and the bound of a tile's."""

    def __init__(self, tile: Tile, op: str, family: Family, kmap: KernelMap) -> None:
        self.tile, self.op, self.kmap, self.n = tile, op, kmap, kmap.in_coords.num
        device, dtype = kmap.device, formats.DTYPES[tile.input]
        generator = torch.Generator(device).manual_seed(5)
        shapes = ((self.n, CHANNELS), (27, CHANNELS, CHANNELS), (self.n, CHANNELS))
        draws = (family.activations, family.weights, family.gradients)
        self.x, self.w, self.dy = (
            draw(shape, dtype, generator, device) for draw, shape in zip(draws, shapes, strict=True)
        )
        read = (formats.round_tf32(t) if tile.scheme == "tf32" else t for t in (self.x, self.w, self.dy))
        x, w, dy = read
        pairs = kmap.pairs()
        if op == "fprop":
            self.y64, self.abs64 = accuracy.reference_conv(x, w, pairs, self.n)
        elif op == "dgrad":
            self.y64, self.abs64 = accuracy.reference_dgrad(dy, w, pairs, self.n)
        else:
            self.y64, self.abs64 = accuracy.reference_wgrad(x, dy, pairs)

    def run(self) -> Tensor:
        tile, shared = self.tile, (self.kmap.tensors, [])
        if self.op == "wgrad":
            wide = torch.promote_types(self.x.dtype, torch.float32)
            return torch.ops.voxmma.conv_wgrad(
                self.x, self.dy, *shared, 27, 1, True, tile.accum, tile.name, "", wide
            )
        a, transpose = (self.x, False) if self.op == "fprop" else (self.dy, True)
        return torch.ops.voxmma.conv(
            a, self.w, None, *shared, self.n, True, transpose, tile.accum, tile.name, tile.name, "", None
        )

    def limit(self) -> Bound:
        tile = self.tile
        n, offsets = (self.n, 1) if self.op == "wgrad" else (27 * CHANNELS, 27)
        read = "tf32" if tile.scheme == "tf32" else self.x.dtype
        out = torch.promote_types(self.x.dtype, torch.float32) if self.op == "wgrad" else self.x.dtype
        arch = "simt" if tile.atom == "SIMT" else accuracy.arch_of(self.kmap.device)
        chunk = tile.promote if tile.accum == "fp16_promoted" else 0
        return accuracy.bound(tile.accum, n, read, out, arch, offsets=offsets, chunk=chunk)


def within(y: Tensor, case: Case) -> bool:
    limit = case.limit()
    return accuracy.errors(y, case.y64, case.abs64, floor=limit.floor).within(limit)


def test_cpu_emulation_has_no_corrupt_cell() -> None:
    coords = random_coords(6000, 22)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6000, CHANNELS, generator=generator).clamp(min=0).half()
    w = (torch.randn(27, CHANNELS, CHANNELS, generator=generator) / (27 * CHANNELS) ** 0.5).half()
    voxels = voxmma.Voxels(coords, x)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    y64, abs64 = accuracy.reference_conv(x, w, pairs, len(x))
    for flag, accumulator in ((False, "fp32"), (True, "fp16")):
        limit = accuracy.bound(accumulator, 27 * CHANNELS, x.dtype, x.dtype, "cpu", offsets=27)
        first = spatially_sparse_conv(voxels, w, 3, use_fp16_accum=flag)
        assert voxmma.explain(first).accumulator == accumulator
        found = accuracy.errors(first.feats, y64, abs64, floor=limit.floor)
        assert found.nonfinite == 0 and found.within(limit), (found, limit)
        for _ in range(REPEATS - 1):
            assert torch.equal(spatially_sparse_conv(voxels, w, 3, use_fp16_accum=flag).feats, first.feats)


def test_nothing_runs_below_the_ceiling_without_the_gate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Fails if the gate is removed from the selector, or lets a tile through that it has not measured."""
    from voxmma.dispatch import selection, table

    owner = store.Owner("a card", "9.0", 132, "1.0", "b", device="GPU-1")
    monkeypatch.setattr(store, "owner_of", lambda device, one_card=False: owner)
    monkeypatch.setattr(
        selection,
        "select_tile",
        lambda op, dtype, accum, *rest, **more: selection.TileChoice(f"t_{accum}", ""),
    )
    monkeypatch.setattr(
        table, "select_tile", lambda op, dtype, accum, *rest, **more: selection.TileChoice(f"t_{accum}", "")
    )
    device = torch.device("cuda", 0)

    def plan(ceiling: int, c: int = CHANNELS, level: str = "default") -> str:
        selection._plan_call.cache_clear()
        pools = (("auto",), ("auto",), ("auto",), ceiling, "ieee", settings.NO_LIMITS)
        return str(
            selection.plan_call(torch.float16, level == "inference_mode", level, c, c, 1, device, pools)[0]
        )

    def record(failed: str | None) -> None:
        checks = [validation.Check("bound", failed != "bound", "")]
        if failed == "gain":
            checks.append(validation.Check("gain", False, ""))
        validation.keep(validation.Verdict("t_fp16", failed is None, tuple(checks)), device)

    with settings.override(cache_dir=str(tmp_path)):
        assert settings.get_pcoff_f16acc_small_ch_ceil() == 0
        assert plan(48) == plan(0, level="inference_mode") == "fp32"  # nothing measured
        for failed in ("bound", "gain"):
            record(failed)
            assert plan(48) == plan(0, level="inference_mode") == "fp32", failed
        record(None)
        assert plan(48) == plan(0, level="inference_mode") == "fp16"
        assert plan(0) == plan(CHANNELS - 1) == "fp32"
        assert plan(48, level="module") == plan(48, level="environment") == "fp32"
    selection._plan_call.cache_clear()


@pytest.mark.gpu
def test_the_gate_decides_on_this_device(tmp_path: Path) -> None:
    """The same on the card, to what runs: fp16 tiles below the ceiling come and go with their verdict."""
    device = torch.device("cuda", 0)
    names = {select_tile(op, torch.float16, "fp16", 32, 32, 1, device).name for op in ("fwd", "dgrad")}
    coords = random_coords(2000, 16).to(device)
    x = voxmma.Voxels(coords, torch.randn(2000, CHANNELS, device=device).half())
    conv = SparseConv3d(CHANNELS, CHANNELS, 3).to(device).half()

    def record(allowed: bool) -> None:
        checks = tuple(validation.Check(name, allowed, "") for name in ("bound", "gain"))
        for name in names:
            validation.keep(validation.Verdict(name, allowed, checks), device)

    with settings.override(cache_dir=str(tmp_path), pcoff_f16acc_small_ch_ceil=48):
        found = voxmma.explain(conv(x))
        assert found.accumulator == "fp32" and "no measurement on record" in found.reason, found
        record(False)
        found = voxmma.explain(conv(x))
        assert found.accumulator == "fp32" and "the gate refuses" in found.reason, found
        record(True)
        found = voxmma.explain(conv(x))
        assert found.accumulator == "fp16" and found.tile in names and found.rescaled, found
        with settings.override(pcoff_f16acc_small_ch_ceil=0):
            assert voxmma.explain(conv(x)).accumulator == "fp32"


@pytest.fixture(scope="module")
def kmap() -> KernelMap:
    """The map of 200,000 voxels and more."""
    coords = surface_coords(330).cuda()
    assert len(coords) >= 200_000
    return voxmma.kernel_map(voxmma.Voxels(coords, torch.zeros(len(coords), 1).cuda()).coord_set, 3)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "op"), CASES, ids=[f"{tile.name}-{op}" for tile, op in CASES])
def test_tile_has_no_corrupt_cell(tile: Tile, op: str, kmap: KernelMap) -> None:
    if not tile.runs_on(card(torch.device("cuda"))):
        pytest.skip(f"{tile.name} does not run on this device")
    case = Case(tile, op, FAMILIES["relu"], kmap)
    first = case.run()
    limit = case.limit()
    found = accuracy.errors(first, case.y64, case.abs64, floor=limit.floor)
    assert found.within(limit), (found, limit)
    for _ in range(REPEATS - 1):
        assert torch.equal(case.run(), first)
    if op != "wgrad":  # would it be seen? one fragment of 16 x 8 cells, stored from the data of another
        corrupt = first.clone()
        corrupt[16:32, 8:16] = first[:16, 8:16]
        assert not within(corrupt, case)


@pytest.mark.gpu
@pytest.mark.parametrize(("tile", "op"), CASES, ids=[f"{tile.name}-{op}" for tile, op in CASES])
def test_tile_adds_integers_exactly(tile: Tile, op: str, kmap: KernelMap) -> None:
    """Whatever is lost or added twice shows: no sum of these needs more bits than its accumulator has."""
    if not tile.runs_on(card(torch.device("cuda"))):
        pytest.skip(f"{tile.name} does not run on this device")
    case = Case(tile, op, INTEGERS, kmap)
    assert float(case.abs64.max()) <= (2048 if op != "wgrad" else 1 << 24)
    first = case.run()
    assert torch.equal(first, case.y64.to(first.dtype))
    for _ in range(REPEATS - 1):
        assert torch.equal(case.run(), first)
