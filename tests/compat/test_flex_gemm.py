"""voxmma.compat.flex_gemm against dense references; the backend for TRELLIS.2 under a tensor like its own."""

from __future__ import annotations

import importlib
import itertools
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import voxmma
import voxmma.compat.flex_gemm as flex_gemm
from voxmma import compat
from voxmma.compat import trellis2
from voxmma.compat.flex_gemm.ops.grid_sample import grid_sample_3d
from voxmma.compat.flex_gemm.ops.spconv import sparse_conv3d, sparse_submanifold_conv3d

from dense_grids import Grid, close, scene

SHAPE = (2, 4, 16, 16, 16)


def leaves(device: torch.device, *size: int) -> tuple[Tensor, Tensor]:
    """The same fp64 values twice: on the CPU and on the device, both leaves."""
    values = torch.randn(size, dtype=torch.float64)
    return values.clone().requires_grad_(), values.clone().to(device).requires_grad_()


@pytest.mark.parametrize(
    "size, dilation", [((3, 3, 3), 1), ((3, 1, 5), 1), ((3, 3, 3), (1, 2, 3)), ((1, 1, 1), 1)]
)
def test_submanifold_conv(size: tuple[int, ...], dilation: Any, device: torch.device) -> None:
    coords, _ = scene(0, 16, 400, 1)
    (x, mine), (w, weight), (b, bias) = (
        leaves(device, *shape) for shape in ((len(coords), 4), (6, *size, 4), (6,))
    )
    spread = (dilation,) * 3 if isinstance(dilation, int) else dilation
    padding = tuple(k // 2 * d for k, d in zip(size, spread, strict=True))
    grid = Grid.of(coords, x, 0, 16)
    wanted = grid.conv(w.movedim(-1, 1), 1, padding, dilation=spread, bias=b).at(coords)
    where = coords.to(device)
    got, cache = sparse_submanifold_conv3d(mine, where, SHAPE, weight, bias, None, dilation)
    close(got, wanted, "values")
    again, same = sparse_submanifold_conv3d(mine, where.clone(), SHAPE, weight, bias, cache, dilation)
    assert same is cache and torch.equal(again, got)
    _, other = sparse_submanifold_conv3d(mine, where, SHAPE, weight, bias)
    assert other.coord_set is cache.coord_set  # the same tensor is the same set, without a cache handed on
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * upstream).sum().backward()
    (got * upstream.to(device)).sum().backward()
    for name, a, c in (("feats", mine, x), ("weight", weight, w), ("bias", bias, b)):
        close(a.grad, c.grad, f"gradient of {name}")


@pytest.mark.parametrize("stride, padding", [(1, 0), (1, 1), (2, 1), ((2, 1, 3), (0, 1, 2))])
def test_conv_on_a_bounded_grid(stride: Any, padding: Any, device: torch.device) -> None:
    coords, _ = scene(0, 16, 200, 1)
    (x, mine), (w, weight) = leaves(device, len(coords), 4), leaves(device, 5, 3, 3, 3, 4)
    got, out, cache = sparse_conv3d(mine, coords.to(device), SHAPE, weight, stride=stride, padding=padding)
    grid = Grid.of(coords, x, 0, 16)
    full = F.conv3d(grid.feats, w.movedim(-1, 1), None, stride, padding)
    ones = F.conv3d(
        grid.mask.double().unsqueeze(1), torch.ones(1, 1, 3, 3, 3).double(), None, stride, padding
    )
    assert torch.equal(out.cpu().long(), torch.nonzero(ones[:, 0] > 0))
    wanted = full.movedim(1, -1)[tuple(out.cpu().long().unbind(1))]
    close(got, wanted, "values")
    wanted.sum().backward()
    got.sum().backward()
    close(weight.grad, w.grad, "gradient of weight")
    close(mine.grad, x.grad, "gradient of feats")
    again = sparse_conv3d(mine, coords.to(device), SHAPE, weight, None, cache, stride=stride, padding=padding)
    assert torch.equal(again[0], got)
    some = out[::2].contiguous()
    onto = sparse_conv3d(
        mine, coords.to(device), SHAPE, weight, out_coords=some, stride=stride, padding=padding
    )
    assert onto[1] is some
    close(onto[0], got[::2].detach().cpu(), "given outputs")


def test_what_does_not_fit() -> None:
    coords, feats = scene(0, 16, 50, 4)
    weight = torch.zeros(5, 3, 3, 3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="odd"):
        sparse_submanifold_conv3d(feats, coords, SHAPE, weight[:, :2])
    with pytest.raises(ValueError, match="C_out, K_x"):
        sparse_submanifold_conv3d(feats, coords, SHAPE, weight[0])
    with pytest.raises(ValueError, match="feats has 49 rows"):
        sparse_submanifold_conv3d(feats[1:], coords, SHAPE, weight)
    with pytest.raises(ValueError, match="outside of spatial_shape"):
        sparse_conv3d(feats, coords + torch.tensor([0, 9, 0, 0]).int(), SHAPE, weight)
    with pytest.raises(ValueError, match="algorithm must be"):
        flex_gemm.ops.spconv.set_algorithm("winograd")
    flex_gemm.ops.spconv.set_algorithm(flex_gemm.ops.spconv.Algorithm.IMPLICIT_GEMM)
    with pytest.raises(AttributeError, match=r"no flex_gemm.kernels: use voxmma.nn.functional"):
        _ = flex_gemm.kernels


@pytest.mark.parametrize("mode", ["trilinear", "nearest"])
def test_grid_sample(mode: str, device: torch.device) -> None:
    """Voxel i covers [i, i + 1), its feature sits at i + 0.5; weights of voxels that exist sum to 1."""
    coords, _ = scene(0, 6, 150, 1)
    x, mine = leaves(device, len(coords), 4)
    points = torch.rand(2, 80, 3, dtype=torch.float64) * 6
    grid = Grid.of(coords, x, 0, 6)
    wanted = []
    for b, place in itertools.chain.from_iterable(((b, p) for p in points[b]) for b in range(2)):
        if mode == "nearest":
            cells = [(tuple(place.long().tolist()), 1.0)]
        else:
            low = (place - 0.5).floor().long()
            cells = []
            for corner in itertools.product((0, 1), repeat=3):
                cell = low + torch.tensor(corner)
                cells.append((tuple(cell.tolist()), float((1 - (place - 0.5 - cell).abs()).prod())))
        there = [(c, s) for c, s in cells if all(0 <= v < 6 for v in c) and bool(grid.mask[b][c])]
        total = sum(s for _, s in there)
        rows = [grid.feats[b][:, c[0], c[1], c[2]] * (s / total) for c, s in there]
        wanted.append(sum(rows, torch.zeros(4, dtype=torch.float64)))
    expected = torch.stack(wanted).view(2, 80, 4)
    got = grid_sample_3d(mine, coords.to(device), (2, 4, 6, 6, 6), points.to(device), mode)
    close(got, expected, mode)
    expected.square().sum().backward()
    got.square().sum().backward()
    close(mine.grad, x.grad, "gradient")
    with pytest.raises(ValueError, match="grid must be"):
        grid_sample_3d(mine, coords.to(device), (3, 4, 6, 6, 6), points.to(device), mode)


# ---- TRELLIS.2 ---------------------------------------------------------------------------------------------


@dataclass
class SparseTensor:
    """What the backend uses of TRELLIS' tensors."""

    feats: Tensor
    coords: Tensor
    spatial_cache: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> torch.Size:
        return torch.Size([2, self.feats.shape[1]])

    @property
    def spatial_shape(self) -> torch.Size:
        return torch.Size([16, 16, 16])

    def get_spatial_cache(self, key: str) -> Any:
        return self.spatial_cache.get(key)

    def register_spatial_cache(self, key: str, value: Any) -> None:
        self.spatial_cache[key] = value

    def replace(self, feats: Tensor) -> SparseTensor:
        return SparseTensor(feats, self.coords, self.spatial_cache)


class SparseConv3d(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        trellis2.sparse_conv3d_init(self, *args, **kwargs)

    def forward(self, x: SparseTensor) -> SparseTensor:
        return trellis2.sparse_conv3d_forward(self, x)


def test_trellis_backend(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    coords, _ = scene(0, 16, 300, 1)
    net = nn.Sequential(
        SparseConv3d(4, 8, 3), SparseConv3d(8, 8, 3, dilation=2), SparseConv3d(8, 3, 1, bias=False)
    )
    net = net.double().to(device)
    shapes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    assert shapes["0.weight"] == (8, 3, 3, 3, 4) and shapes["0.bias"] == (8,) and "2.bias" not in shapes
    x, mine = leaves(device, len(coords), 4)
    start = SparseTensor(mine, coords.to(device))
    y = net(start)
    grid = Grid.of(coords, x, 0, 16)
    params = {name: p.detach().cpu() for name, p in net.named_parameters()}
    grid = grid.conv(params["0.weight"].movedim(-1, 1), 1, 1, bias=params["0.bias"])
    grid = grid.conv(params["1.weight"].movedim(-1, 1), 1, 2, dilation=2, bias=params["1.bias"])
    wanted = grid.conv(params["2.weight"].movedim(-1, 1)).at(coords)
    close(y.feats, wanted, "values")
    wanted.sum().backward()
    y.feats.sum().backward()
    close(mine.grad, x.grad, "gradient")
    assert len(y.spatial_cache) == 1  # one set for all kernels
    assert voxmma.CoordSet is type(next(iter(y.spatial_cache.values())))
    with pytest.raises(NotImplementedError, match="stride=2"):
        SparseConv3d(4, 8, 3, stride=2)
    names = (
        "trellis2",
        "trellis2.modules",
        "trellis2.modules.sparse",
        "trellis2.modules.sparse.conv",
        "trellis2.modules.sparse.conv.conv",
    )
    modules = {name: ModuleType(name) for name in names}
    modules["trellis2.modules.sparse"].config = ModuleType("config")  # type: ignore[attr-defined]
    modules["trellis2.modules.sparse.conv.conv"]._backends = {}  # type: ignore[attr-defined]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    trellis2.use()
    assert modules[names[2]].config.CONV == "voxmma" and modules[names[4]]._backends["voxmma"] is trellis2


def test_install() -> None:
    assert "flex_gemm" not in sys.modules
    coords, feats = scene(0, 16, 50, 4)
    weight = torch.randn(5, 3, 3, 3, 4)
    try:
        assert compat.install("flex_gemm", compute_dtype=torch.bfloat16) is flex_gemm
        ops = importlib.import_module("flex_gemm.ops.spconv")
        assert ops.sparse_submanifold_conv3d is sparse_submanifold_conv3d
        y, _ = ops.sparse_submanifold_conv3d(feats.float(), coords, SHAPE, weight)
        assert y.dtype == torch.bfloat16
    finally:
        compat.uninstall("flex_gemm")
    assert sparse_submanifold_conv3d(feats.float(), coords, SHAPE, weight)[0].dtype == torch.float32
