"""Public faults that show in how a step runs rather than in what an operator means: races, first calls. One
test a fault, its number in the name (docs/faults.md)."""

from __future__ import annotations

import pytest
import torch

import voxmma
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv
from voxmma.verify import accuracy

from conftest import Clean, random_coords, surface_coords


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("channels", "size", "stride"), [(128, 2, 2), (32, 3, 1), (64, 3, 2)], ids=str)
def test_fault_06_no_race_in_strided_layers(
    device: torch.device, dtype: torch.dtype, channels: int, size: int, stride: int
) -> None:
    """C = 128 with k = s = 2, and the shape with one k-tile a step: small integers, whose products and sums
    are exact in any order, must come out exact everywhere, and again bit for bit in every repetition."""
    gpu = device.type == "cuda"
    coords = (surface_coords(400) if gpu else random_coords(400, 10)).to(device)
    x = torch.randint(-2, 3, (len(coords), channels), device=device).to(dtype).requires_grad_()
    w = torch.randint(-1, 2, (size**3, channels, 32), device=device).to(dtype).requires_grad_()
    dy, first = None, None
    for _ in range(10 if gpu else 2):
        voxels = voxmma.Voxels(coords.clone(), x)  # its own maps
        out = spatially_sparse_conv(
            voxels, w, size, stride=stride, use_fp16_accum=False, out_dtype=torch.float32
        )
        if dy is None:
            dy = torch.randint(-1, 2, out.feats.shape, device=device).to(out.feats.dtype)
        got = [out.coords, out.feats.detach(), *torch.autograd.grad(out.feats, (x, w), dy)]
        assert all(t.isfinite().all() for t in got)
        first = first or got
        assert all(torch.equal(a, b) for a, b in zip(got, first, strict=True))
    kernel_map = voxmma.kernel_map(voxels.coord_set, size, stride=stride, out_coords=out.coord_set)
    expected, _ = accuracy.reference_conv(x.detach(), w.detach(), kernel_map.pairs(), out.num_voxels)
    assert torch.equal(out.feats.double(), expected)


FIRST_STEP = """
import voxmma
coords = torch.cartesian_prod(torch.zeros(1), *[torch.arange(24.0)] * 3).int().to(device)
x = torch.randn(len(coords), 18, device=device, requires_grad=True)  # also builds torch's own context
net = voxmma.nn.Sequential(voxmma.nn.SparseConv3d(18, 33, 3), voxmma.nn.GroupNorm(3, 33), torch.nn.ReLU())
net = net.to(device)
(torch.randn(64, 64, device=device) @ torch.randn(64, 64, device=device)).sum().item()
seen, watching = [], True
def audit(event, arguments):
    if watching and event in ("subprocess.Popen", "os.system", "os.posix_spawn", "os.exec", "os.fork"):
        seen.append((event, arguments))
    if watching and event == "open" and arguments[1] and set(str(arguments[1])) & set("wax+"):
        seen.append((event, arguments))
sys.addaudithook(audit)
for _ in range(3):
    voxels = voxmma.Voxels(coords, x)
    net(voxels).feats.square().mean().backward()
    x.grad.sum().item()
watching, found = False, list(map(str, seen))
"""


def test_fault_21_the_first_call_compiles_and_tunes_nothing(device: torch.device, clean: Clean) -> None:
    """In a fresh process the first steps start no compiler and write no file."""
    assert clean(f"device = {device.type!r}\n{FIRST_STEP}") == []
