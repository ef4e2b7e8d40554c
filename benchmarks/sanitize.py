"""What compute-sanitizer watches: every tile over 27 and 8 offsets both ways, maps, pooling, points, norms.

    compute-sanitizer --tool memcheck  python benchmarks/sanitize.py
    compute-sanitizer --tool racecheck python benchmarks/sanitize.py --channels 8,32,64,128

racecheck wants a build with VOXMMA_RACECHECK=1 (csrc/common/memory.cuh says why). The option
`--kernel-name kns=voxmma` saves time. Needs a CUDA GPU. Scenes: a hollow ball (unique rows of a tile
fit one pass), a full box (two passes), random points, and so many of them that no tile is shared by several
CTAs (docs/precision.md, "Small sets"), as all others are. Every result is compared with fp64, so that a run
that only seems to work is seen too: exit code 1.
"""

from __future__ import annotations

import argparse
import sys

import torch

from voxmma._types import DTYPE_NAMES
from voxmma.dispatch.selection import card
from voxmma.nn import functional as F
from voxmma.ops import formats
from voxmma.ops.cpu import ACTIVATIONS
from voxmma.ops.kernels import Tile, compiled
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import kernel_map
from voxmma.sparse.sampling import devoxelise
from voxmma.sparse.tensor import Voxels
from voxmma.verify import accuracy

POOLS = (F.max_pool, F.min_pool, F.sum_pool, F.avg_pool)
TOLERANCE = {"fp16": 2e-3, "bf16": 1e-2, "fp32": 2e-6, "fp64": 1e-12}  # rel-L2


def scenes() -> dict[str, torch.Tensor]:
    r = torch.arange(-9, 9)
    grid = torch.stack(torch.meshgrid(r, r, r, indexing="ij"), -1).reshape(-1, 3)
    distance = grid.double().norm(dim=1)
    generator = torch.Generator().manual_seed(0)
    ball = grid[(distance < 8.6) & (distance > 6.9)]
    box = grid[(grid >= 0).all(1)]
    points = torch.randint(-16, 16, (700, 3), generator=generator).unique(dim=0)
    many = torch.randint(-60, 60, (18000, 3), generator=generator).unique(dim=0)
    made = {"ball": ball, "box": box, "points": points, "many": many}
    return {name: torch.nn.functional.pad(c, (1, 0)).int().cuda() for name, c in made.items()}


def check(tile: Tile, coords: torch.Tensor, c: int, size: int) -> float:
    """Largest rel-L2 of the tile's forward and dgrad, or of its wgrad, at c -> c channels, size^3 offsets."""
    name, kind = tile.name, tile.input
    dtype, accumulator = formats.DTYPES[kind], tile.accum
    made, volume, mirrored = kernel_map(CoordSet(coords, 1), size), size**3, size % 2 == 1
    n, pairs, opposite = coords.shape[0], made.pairs(), [] if mirrored else made.transposed().tensors
    g = torch.Generator(device="cuda").manual_seed(c)
    x, dy = (torch.randn(n, c, device="cuda", generator=g).to(dtype) for _ in range(2))
    w = (torch.randn(volume, c, c, device="cuda", generator=g) / (volume * c / 2) ** 0.5).to(dtype)
    rel = lambda y, ref: float((y.double() - ref).norm() / ref.norm())  # noqa: E731
    if tile.op == "wgrad":
        dw = torch.ops.voxmma.conv_wgrad(
            x, dy, made.tensors, opposite, volume, 1, mirrored, accumulator, name, "", None
        )
        return rel(dw, accuracy.reference_wgrad(x, dy, pairs)[0])
    conv = torch.ops.voxmma.conv
    y = conv(x, w, None, made.tensors, opposite, n, mirrored, False, accumulator, name, name, "", None)
    back = (made.tensors, []) if mirrored else (opposite, made.tensors)
    dx = conv(dy, w, None, *back, n, mirrored, True, accumulator, name, name, "", None)
    return max(
        rel(y, accuracy.reference_conv(x, w, pairs, n)[0]),
        rel(dx, accuracy.reference_dgrad(dy, w, pairs, n)[0]),
    )


def check_pooling(kind: str, coords: torch.Tensor, c: int) -> float:
    """Largest rel-L2 of pooling, merging and devoxelising from what the CPU gives: there is none.

    Gradients too, but for devoxelising and global sums, which add in another order on each device.
    """
    g = torch.Generator().manual_seed(c)
    feats = torch.randn(len(coords), c, generator=g).to(formats.DTYPES[kind])
    seen = []
    for device in ("cpu", "cuda"):
        f = feats.to(device, copy=True).requires_grad_()
        x = Voxels(coords.to(device), f)
        low, indices = F.max_pool_with_indices(x, 2)
        made = [pool(x, k, s).feats for pool in POOLS for k, s in ((2, 2), (3, 2), (3, 1))]
        made += [F.unpool(low, 2).feats, F.max_unpool(low, indices).feats]
        points = x.coords[:, 1:].float()
        made += [Voxels.from_points(points, f, 3.0, reduce).feats for reduce in ("sum", "mean", "first")]
        made += [F.global_sum_pool(x), F.global_max_pool(x)]
        grads = [torch.autograd.grad(y.sum(), f, retain_graph=True)[0] for y in made]
        del made[-2]
        placed = [devoxelise(x, points + 0.3, 1.0, mode) for mode in ("nearest", "trilinear")]
        for y in placed:
            torch.autograd.grad(y.sum(), f, retain_graph=True)
        seen.append([t.detach().cpu() for t in (*made, *placed, *grads)])
    pairs = zip(*((t.double() for t in side) for side in seen), strict=True)
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def check_norm(kind: str, n: int, c: int) -> float:
    """Largest rel-L2 of norm_act and its gradients on n rows."""
    g = torch.Generator(device="cuda").manual_seed(c)
    dtype, worst = formats.DTYPES[kind], 0.0
    x, residual, dy = (torch.randn(n, c, device="cuda", generator=g).to(dtype) for _ in range(3))
    for activation in ("none", "relu", "leaky_relu", "silu", "gelu"):
        for added in (None, residual):
            sides = []
            for wide in (False, True):
                given = [t.double() if wide else t for t in (x, residual, dy)]
                leaves = [t.clone().requires_grad_() for t in given[: 2 if added is not None else 1]]
                if wide:
                    y = torch.nn.functional.batch_norm(leaves[0], None, None, training=True)
                    y = ACTIVATIONS[activation](y if added is None else y + leaves[1], 0.01)
                else:
                    rest = None if added is None else leaves[1]
                    y = F.norm_act(leaves[0], residual=rest, activation=activation)
                sides.append([y.detach(), *torch.autograd.grad(y, leaves, given[2])])
            pairs = zip(*sides, strict=True)
            worst = max(worst, *(float((a.double() - b).norm() / b.norm()) for a, b in pairs))
    return worst


def check_maps(coords: torch.Tensor) -> int:
    """Kernel maps that differ from the CPU's, of one tile and of several, the last one of any size."""
    different = 0
    for rows in (30, 50, 100, 200, 300, 360, len(coords)):
        some = coords[:rows]
        here, there = CoordSet(some), CoordSet(some.cpu())
        for size, stride in ((2, 2), (3, 1), (3, 2), ((4, 3, 3), 1), (5, 1)):
            made, other = kernel_map(here, size, stride=stride), kernel_map(there, size, stride=stride)
            different += not torch.equal(made.neighbor_table().cpu(), other.neighbor_table())
    return different


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--channels", default="8,16,32,64,96,128")
    parser.add_argument(
        "--tiles", default="", help="parts of names, with commas; 'maps', 'pool': pooling and points, 'norm'"
    )
    parser.add_argument("--scenes", default="ball,box,points,many")
    args = parser.parse_args()
    parts = args.tiles.split(",")
    here = card(torch.device("cuda"))
    failed = ran = 0
    for scene, coords in scenes().items():
        if scene not in args.scenes.split(","):
            continue
        for tile in compiled():
            if not any(part in tile.name for part in parts) or not tile.runs_on(here):
                continue
            for c in (int(v) for v in args.channels.split(",")):
                error = max(check(tile, coords, c, size) for size in (3, 2))
                bound = TOLERANCE[tile.input]
                if tile.name.endswith("_tf32"):
                    bound = 1e-3
                elif tile.accum == "fp16":
                    bound = 1e-2
                ran += 1
                verdict = "ok" if error <= bound else f"above {bound:.0e}"
                failed += verdict != "ok"
                print(f"{tile.name} C={c} {scene}: rel-L2 {error:.2e} {verdict}", flush=True)
        if "maps" in parts or parts == [""]:
            different = check_maps(coords)
            ran += 1
            failed += different != 0
            print(f"maps {scene}: {different} different", flush=True)
        for kind in DTYPE_NAMES.values() if "pool" in parts or parts == [""] else ():
            for c in (*(int(v) for v in args.channels.split(",")), 5):
                error = check_pooling(kind, coords, c)
                ran += 1
                verdict = "ok" if error == 0 else "above 0"
                failed += verdict != "ok"
                print(f"pool_{kind} C={c} {scene}: rel-L2 {error:.2e} {verdict}", flush=True)
        for kind in DTYPE_NAMES.values() if "norm" in parts or parts == [""] else ():
            for c in (*(int(v) for v in args.channels.split(",")), 5):
                error, bound = check_norm(kind, len(coords), c), 5 * TOLERANCE[kind]
                ran += 1
                verdict = "ok" if error <= bound else f"above {bound:.0e}"
                failed += verdict != "ok"
                print(f"norm_{kind} C={c} {scene}: rel-L2 {error:.2e} {verdict}", flush=True)
    print(f"{ran} runs, {failed} above the bound")
    return 1 if failed or not ran else 0


if __name__ == "__main__":
    sys.exit(main())
