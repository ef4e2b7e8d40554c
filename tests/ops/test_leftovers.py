"""What an earlier launch left in shared memory is not read.

A launch that reads a row before its copy has arrived finds what the last launch of the same shape left there.
Repeats on the same operands leave what they are about to read; so here every second one is of large numbers.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma.dispatch.selection import card
from voxmma.ops import formats
from voxmma.ops.kernels import Tile, compiled

from conftest import random_coords

TURNS = 6


@pytest.fixture(scope="module")
def maps() -> list[tuple[int, voxmma.KernelMap]]:
    """A few tiles, whose sums are divided over CTAs, and more of them than an H200 has multiprocessors."""
    made = []
    for n, extent in ((300, 8), (3000, 17), (40_000, 48)):
        coords = random_coords(n, extent, batch=1).cuda()
        made.append((n, voxmma.kernel_map(voxmma.CoordSet(coords), 3)))
    return made


def run(tile: Tile, found: voxmma.KernelMap, n: int, a: Tensor, b: Tensor, transpose: bool) -> Tensor:
    if tile.op == "wgrad":
        wgrad = torch.ops.voxmma.conv_wgrad
        return wgrad(a, b, found.tensors, [], 27, 1, True, tile.accum, tile.name, "", None)
    rest = n, True, transpose, tile.accum, tile.name, tile.name, "", None
    return torch.ops.voxmma.conv(a, b, None, found.tensors, [], *rest)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [8, 32, 64, 96, 192])
@pytest.mark.parametrize("op", ["fprop", "dgrad", "wgrad"])
def test_leftovers_of_a_launch_are_not_read(
    maps: list[tuple[int, voxmma.KernelMap]], op: str, channels: int
) -> None:
    here = card(torch.device("cuda"))
    tiles = [t for t in compiled() if t.op == op.replace("dgrad", "fprop") and t.runs_on(here)]
    tiles = [t for t in tiles if t.atom != "SIMT"]  # those keep no rows in shared memory
    for tile in tiles:
        dtype = formats.DTYPES[tile.input]
        for n, found in maps:
            generator = torch.Generator("cuda").manual_seed(channels)
            shape = (n, channels) if op == "wgrad" else (27, channels, channels)
            a = torch.randn(n, channels, device="cuda", generator=generator).to(dtype)
            b = torch.randn(shape, device="cuda", generator=generator).to(dtype) / 64
            large = torch.full_like(a, 3e4), torch.full_like(b, 3e4)  # sums stay finite in fp32
            first = run(tile, found, n, a, b, op == "dgrad")
            assert bool(first.isfinite().all()), (tile.name, n)
            for _ in range(TURNS):
                run(tile, found, n, *large, op == "dgrad")
                again = run(tile, found, n, a, b, op == "dgrad")
                assert torch.equal(again, first), (tile.name, n)
