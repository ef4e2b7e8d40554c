"""Up to 8 input channels, as first layers have them: 16-bit tiles run such sums in kernels of their own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import voxmma
from voxmma import _C
from voxmma.dispatch.selection import card
from voxmma.ops import formats
from voxmma.ops.kernels import Tile, compiled

from conftest import surface_coords

SHAPES = ((1, 16), (4, 32), (6, 72), (8, 130))


def tiles(op: str) -> list[Tile]:
    here = card(torch.device("cuda"))
    return [t for t in compiled() if t.op == op and t.input in ("fp16", "bf16") and t.runs_on(here)]


def wide(size: int) -> tuple[int, voxmma.KernelMap]:
    """A map of more tiles than there are multiprocessors, so that nobody shares a sum."""
    n = 256 * torch.cuda.get_device_properties(0).multi_processor_count
    coords = surface_coords(int((0.6 * n) ** 0.5) + 8)[:n]
    assert len(coords) == n
    return n, voxmma.kernel_map(voxmma.CoordSet(coords.cuda()), size)


def integers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers of which sums of any order are exact in fp32."""
    return torch.randint(-3, 4, shape, device="cuda").to(dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3, 5])
def test_sums_are_those_with_channels_of_zeros(size: int) -> None:
    n, found = wide(size)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    torch.manual_seed(0)
    for tile in tiles("fprop"):
        for c_in, c_out in SHAPES:
            assert _C.tile_parts(tile.name, n, size**3, c_in, c_out, 1, sms) == 1
            x = torch.randn(n, c_in, device="cuda").to(formats.DTYPES[tile.input])
            w = torch.randn(size**3, c_in, c_out, device="cuda").to(x.dtype) / size
            bias = torch.randn(c_out, device="cuda")

            def run(x: Tensor, w: Tensor, tile: Tile = tile, bias: Tensor = bias) -> Tensor:
                names = (tile.accum, tile.name, tile.name, "")
                return torch.ops.voxmma.conv(x, w, bias, found.tensors, [], n, True, False, *names, None)

            got = run(x, w)
            more = 16 - c_in
            assert torch.equal(got, run(F.pad(x, (0, more)), F.pad(w, (0, 0, 0, more)))), (tile.name, c_in)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [3, 5])
def test_weight_gradients_are_those_with_channels_of_zeros(size: int) -> None:
    n, found = wide(size)
    torch.manual_seed(0)
    for tile in tiles("wgrad"):
        for c_in, c_out in SHAPES:
            x = integers((n, c_in), formats.DTYPES[tile.input])
            dy = integers((n, c_out), x.dtype)

            def run(x: Tensor, tile: Tile = tile, dy: Tensor = dy) -> Tensor:
                names = (tile.accum, tile.name, "")
                return torch.ops.voxmma.conv_wgrad(
                    x, dy, found.tensors, [], size**3, 1, True, *names, torch.float32
                )

            got = run(x)
            assert torch.equal(got, run(F.pad(x, (0, 16 - c_in)))[:, :c_in]), (tile.name, c_in)
