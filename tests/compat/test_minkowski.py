"""voxmma.compat.MinkowskiEngine against dense references of MinkowskiEngine's semantics."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor, nn

import voxmma
import voxmma.compat.MinkowskiEngine as ME
import voxmma.compat.MinkowskiEngine.MinkowskiFunctional as MF
from voxmma import compat, convert, models
from voxmma.compat.MinkowskiEngine.modules.resnet_block import BasicBlock, Bottleneck
from voxmma.compat.MinkowskiEngine.modules.senet_block import SEBasicBlock

from dense_grids import Grid, close, scene, sorted_rows, stored_kernel

LOW, HIGH = -16, 16


class Reference:
    """A layer's parameters on the CPU as leaves of their own."""

    def __init__(self, net: nn.Module) -> None:
        self.leaves = {name: p.detach().cpu().clone().requires_grad_() for name, p in net.named_parameters()}
        self.sizes = {
            name: tuple(m.kernel_generator.kernel_size)
            for name, m in net.named_modules()
            if hasattr(m, "kernel_generator") and hasattr(m, "kernel")
        }

    def kernel(self, name: str) -> Tensor:
        return stored_kernel(self.leaves[f"{name}.kernel"], self.sizes[name])

    def norm(self, grid: Grid, name: str) -> Grid:
        return grid.batch_norm(self.leaves[f"{name}.bn.weight"], self.leaves[f"{name}.bn.bias"])

    def conv(self, grid: Grid, name: str, stride: int = 1, mask: Tensor | None = None) -> Grid:
        """A strided layer leads to cells of the coarser grid; odd kernels are centred, even start at 0."""
        size = self.sizes[name]
        padding = tuple(k // 2 if k % 2 else 0 for k in size)
        if stride > 1 and mask is None:
            mask = grid.cells(stride)
        bias = self.leaves.get(f"{name}.bias")
        return grid.conv(self.kernel(name), stride, padding, mask, bias=bias)

    def up(self, grid: Grid, name: str, fine: Grid | None, stride: int = 2) -> Grid:
        size = self.sizes[name]
        padding = tuple(k // 2 if k % 2 else 0 for k in size)
        shape = tuple(n * stride for n in grid.mask.shape[1:])
        mask = None if fine is None else fine.mask
        return grid.conv_transpose(self.kernel(name), stride, padding, shape, mask)


def check(
    net: nn.Module,
    reference: Callable[[Reference, Grid], Grid | Tensor],
    device: torch.device,
    channels: int = 3,
    count: int = 700,
    seed: int = 0,
) -> Any:
    """Coordinates, values and all gradients of a network against its reference."""
    coords, feats = scene(LOW, HIGH, count, channels, seed=seed)
    net = net.double().to(device).train()
    ref = Reference(net)
    leaf, mine = feats.clone().requires_grad_(), feats.to(device).requires_grad_()
    wanted = reference(ref, Grid.of(coords, leaf, LOW, HIGH))
    x = ME.SparseTensor(mine, coords.to(device))
    assert torch.equal(x.C.cpu(), coords)
    y = net(x)
    if isinstance(wanted, Grid):
        stride = torch.tensor([1, *y.tensor_stride], device=device)
        cells = y.C.div(stride, rounding_mode="floor")
        assert torch.equal(y.C, cells * stride)
        assert torch.equal(sorted_rows(cells.cpu()).long(), sorted_rows(wanted.coords()))
        wanted, got = wanted.at(cells), y.F
    else:
        got = y.F if hasattr(y, "F") else y
    close(got, wanted, "values")
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (got * weights.to(device)).sum().backward()
    close(mine.grad, leaf.grad, "gradient of the features")
    for name, p in net.named_parameters():
        assert p.grad is not None, name
        close(p.grad, ref.leaves[name].grad, f"gradient of {name}")
    return y


# ---- networks ----------------------------------------------------------------------------------------------


class UNet(nn.Module):
    """Two levels with skips; the coarser one by a kernel that overlaps, whose transposed layer differs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = ME.MinkowskiConvolution(3, 8, kernel_size=5, dimension=3)
        self.bn0 = ME.MinkowskiBatchNorm(8)
        self.down1 = ME.MinkowskiConvolution(8, 8, kernel_size=2, stride=2, dimension=3)
        self.block1 = BasicBlock(8, 8, dimension=3)
        self.down2 = ME.MinkowskiConvolution(8, 12, kernel_size=3, stride=2, bias=True, dimension=3)
        self.up2 = ME.MinkowskiConvolutionTranspose(12, 8, kernel_size=2, stride=2, dimension=3)
        self.up1 = ME.MinkowskiConvolutionTranspose(16, 6, kernel_size=3, stride=2, dimension=3)
        self.head = ME.MinkowskiConvolution(14, 5, kernel_size=1, bias=True, dimension=3)
        self.relu = ME.MinkowskiReLU(inplace=True)

    def forward(self, x: Any) -> Any:
        x0 = self.relu(self.bn0(self.stem(x)))
        x1 = self.block1(self.relu(self.down1(x0)))
        x2 = MF.relu(self.down2(x1))
        y1 = ME.cat(self.up2(x2), x1)
        return self.head(ME.cat([self.up1(y1), x0]))


def unet(ref: Reference, x: Grid) -> Grid:
    x0 = ref.norm(ref.conv(x, "stem"), "bn0").relu()
    x1 = ref.conv(x0, "down1", 2).relu()
    inner = ref.norm(ref.conv(x1, "block1.conv1"), "block1.norm1").relu()
    x1 = (ref.norm(ref.conv(inner, "block1.conv2"), "block1.norm2") + x1).relu()
    x2 = ref.conv(x1, "down2", 2).relu()
    y1 = ref.up(x2, "up2", x1).cat(x1)
    return ref.conv(ref.up(y1, "up1", x0).cat(x0), "head")


def test_unet(device: torch.device) -> None:
    y = check(UNet(), unet, device)
    assert y.tensor_stride == [1, 1, 1]
    keys = {str(key) for key in y.coordinate_manager._sets}
    assert keys == {f"coordinate map key:[{s}, {s}, {s}]" for s in (1, 2, 4)}  # one set a tensor stride


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shortcut = nn.Sequential(
            ME.MinkowskiConvolution(6, 16, kernel_size=1, stride=2, dimension=3), ME.MinkowskiBatchNorm(16)
        )
        self.conv = ME.MinkowskiConvolution(3, 6, kernel_size=3, stride=2, dimension=3)
        self.pool = ME.MinkowskiMaxPooling(kernel_size=2, stride=2, dimension=3)
        self.block = Bottleneck(6, 4, stride=2, downsample=shortcut, dimension=3)
        self.glob = ME.MinkowskiGlobalMaxPooling()
        self.final = ME.MinkowskiLinear(16, 5)

    def forward(self, x: Any) -> Any:
        return self.final(self.glob(self.block(self.pool(self.conv(x)))))


def resnet(ref: Reference, x: Grid) -> Tensor:
    x = ref.conv(x, "conv", 2)
    x = x.pool("max", 2, 2, 0, x.cells(2))
    y = ref.norm(ref.conv(x, "block.conv1"), "block.norm1").relu()
    y = ref.norm(ref.conv(y, "block.conv2", 2), "block.norm2").relu()
    y = ref.norm(ref.conv(y, "block.conv3"), "block.norm3")
    short = ref.norm(ref.conv(x, "block.downsample.0", 2), "block.downsample.1")
    y = (y + short).relu()
    top = y.samples(lambda rows: rows.amax(0))
    return top @ ref.leaves["final.linear.weight"].T + ref.leaves["final.linear.bias"]


def test_resnet(device: torch.device) -> None:
    check(ResNet(), resnet, device)


class Decoder(nn.Module):
    """Makes children, looks at neighbours, drops those whose score is low."""

    def __init__(self) -> None:
        super().__init__()
        self.down = ME.MinkowskiConvolution(3, 6, kernel_size=2, stride=2, dimension=3)
        self.grow = ME.MinkowskiGenerativeConvolutionTranspose(6, 5, kernel_size=2, stride=2, dimension=3)
        self.conv = ME.MinkowskiConvolution(5, 4, kernel_size=3, dimension=3)
        self.score = ME.MinkowskiConvolution(4, 1, kernel_size=1, bias=True, dimension=3)
        self.act = ME.MinkowskiELU()
        self.prune = ME.MinkowskiPruning()
        self.last = ME.MinkowskiConvolution(4, 2, kernel_size=3, dimension=3)

    def forward(self, x: Any) -> Any:
        x = self.act(self.conv(self.grow(self.down(x))))
        keep = (self.score(x).F > 0).squeeze(1)
        return self.last(self.prune(x, keep))


def decoder(ref: Reference, x: Grid) -> Grid:
    x = ref.up(ref.conv(x, "down", 2), "grow", None)
    x = ref.conv(x, "conv")
    x = Grid(nn.functional.elu(x.feats) * x.mask.unsqueeze(1), x.mask, x.origin)
    keep = (ref.conv(x, "score").feats > 0)[:, 0] & x.mask
    return ref.conv(Grid(x.feats * keep.unsqueeze(1), keep, x.origin), "last")


def test_pruning_decoder(device: torch.device) -> None:
    net = Decoder()
    net.score.requires_grad_(False)  # it decides alone
    coords, _ = scene(LOW, HIGH, 60, 3)
    net = net.double()
    names = {name for name, p in net.named_parameters() if p.requires_grad}
    assert "grow.kernel" in names and net.grow.kernel.shape == (8, 6, 5)
    ref = Reference(net.to(device).train())
    feats = torch.randn(len(coords), 3, dtype=torch.float64)
    leaf, mine = feats.clone().requires_grad_(), feats.to(device).requires_grad_()
    wanted = decoder(ref, Grid.of(coords, leaf, LOW, HIGH))
    y = net(ME.SparseTensor(mine, coords.to(device)))
    assert torch.equal(sorted_rows(y.C.cpu()).long(), sorted_rows(wanted.coords()))
    rows = wanted.at(y.C)
    close(y.F, rows, "values")
    weights = torch.randn(rows.shape, dtype=torch.float64)
    (rows * weights).sum().backward()
    (y.F * weights.to(device)).sum().backward()
    close(mine.grad, leaf.grad, "gradient of the features")
    for name in names:
        close(net.get_parameter(name).grad, ref.leaves[name].grad, name)


def test_transposed_layers_after_pruning(device: torch.device) -> None:
    """They go back to the voxels of the input, not to a set of the pruned tensor's own."""
    coords, feats = scene(LOW, HIGH, 200, 3)
    down = ME.MinkowskiConvolution(3, 4, kernel_size=2, stride=2, dimension=3).double().to(device)
    up = ME.MinkowskiConvolutionTranspose(4, 2, kernel_size=2, stride=2, dimension=3).double().to(device)
    x = ME.SparseTensor(feats.to(device), coords.to(device))
    y = down(x)
    keep = torch.arange(len(y), device=device) % 2 == 0
    z = ME.MinkowskiPruning()(y, keep)
    assert z.coordinate_map_key.get_key() == ([2, 2, 2], "pruned") and torch.equal(z.F, y.F[keep])
    back = up(z)
    assert back.coordinate_map_key == x.coordinate_map_key
    grid = Grid.of(coords, feats, LOW, HIGH)
    coarse = grid.conv(stored_kernel(down.kernel.detach().cpu(), (2, 2, 2)), 2, 0, grid.cells(2))
    cells = z.C.cpu() // torch.tensor([1, 2, 2, 2])
    kept = torch.zeros_like(coarse.mask)
    kept[tuple((cells - torch.tensor([0, *coarse.origin])).long().unbind(1))] = True
    coarse = Grid(coarse.feats * kept.unsqueeze(1), kept, coarse.origin)
    kernel = stored_kernel(up.kernel.detach().cpu(), (2, 2, 2))
    close(back.F, coarse.conv_transpose(kernel, 2, 0, grid.mask.shape[1:], grid.mask).at(coords), "values")


# ---- kernels -----------------------------------------------------------------------------------------------


def test_hyper_cross_and_custom_regions(device: torch.device) -> None:
    """The offsets of a cross: the cell, then +1, -1 along x, y, z; of a custom region: as given; of a hybrid
    one: the cell, along each axis of the box what is there so far, moved, then axes of the cross."""
    custom = torch.tensor([[0, 0, 0], [2, -1, 0], [0, 1, 3], [-2, 0, -1]], dtype=torch.int32)
    cross = [(0, 0, 0)]
    for axis, step in itertools.product(range(3), (1, -1)):
        cross.append(tuple(step if a == axis else 0 for a in range(3)))
    hybrid = [(0, 0, 0), (-1, 0, 0), (1, 0, 0)]
    hybrid += [(x, 0, z) for x, _, _ in hybrid for z in (-1, 1)] + [(0, -1, 0), (0, 1, 0)]
    regions = ME.RegionType.HYPER_CROSS, ME.RegionType.CUSTOM, ME.RegionType.HYBRID
    types = [ME.RegionType.HYPERCUBE, ME.RegionType.HYPERCROSS, ME.RegionType.HYPERCUBE]
    coords, feats = scene(LOW, HIGH, 900, 3, seed=3)
    index = {tuple(row): i for i, row in enumerate(coords.tolist())}
    for stride, (region, offsets) in itertools.product(
        (1, 2), zip(regions, (cross, custom.tolist(), hybrid), strict=True)
    ):
        generator = ME.KernelGenerator(
            3,
            stride,
            region_type=region,
            region_offsets=custom if region == ME.RegionType.CUSTOM else None,
            axis_types=types if region == ME.RegionType.HYBRID else None,
            dimension=3,
        )
        layer = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=3).double().to(device)
        assert layer.kernel.shape == (len(offsets), 3, 4)
        x = ME.SparseTensor(feats.to(device).requires_grad_(), coords.to(device))
        y = layer(x)
        kernel = layer.kernel.detach().cpu()
        wanted = torch.zeros(len(y), 4, dtype=torch.float64)
        for row, (b, *cell) in enumerate(y.C.tolist()):
            for k, offset in enumerate(offsets):
                found = index.get((b, *(c + o for c, o in zip(cell, offset, strict=True))))
                if found is not None:
                    wanted[row] += feats[found] @ kernel[k]
        close(y.F, wanted, f"{region!r}, stride {stride}")
        y.F.sum().backward()
        assert layer.kernel.grad.shape == layer.kernel.shape and bool(layer.kernel.grad.abs().sum() > 0)
    with pytest.raises(ValueError, match="odd"):
        ME.KernelGenerator(2, region_type=ME.RegionType.HYPER_CROSS, dimension=3)
    with pytest.raises(ValueError, match="odd"):
        ME.KernelGenerator(2, region_type=ME.RegionType.HYBRID, axis_types=types, dimension=3)
    with pytest.raises(ValueError, match="3 axis_types"):
        ME.KernelGenerator(3, region_type=ME.RegionType.HYBRID, axis_types=types[:2], dimension=3)
    with pytest.raises(ValueError, match="twice"):
        twice = torch.zeros((2, 3), dtype=torch.int32)
        ME.KernelGenerator(1, region_type=ME.RegionType.CUSTOM, region_offsets=twice, dimension=3)


def test_cross_weights_move_as_they_are(device: torch.device) -> None:
    generator = ME.KernelGenerator(5, region_type=ME.RegionType.HYPER_CROSS, dimension=3)
    layer = ME.MinkowskiConvolution(3, 4, kernel_generator=generator, dimension=3).double().to(device)
    offsets = voxmma.nn.hyper_cross(5)
    ours = voxmma.nn.keep_offsets(voxmma.nn.SparseConv3d(3, 4, 5, bias=False), offsets).double().to(device)
    with torch.no_grad():
        ours.parametrizations.weight.original.copy_(layer.kernel)
    coords, feats = scene(LOW, HIGH, 900, 3)
    coords, feats = coords.to(device), feats.to(device)
    close(
        ours(voxmma.Voxels(coords, feats)).feats,
        layer(ME.SparseTensor(feats, coords)).F.detach().cpu(),
        "cross",
    )


@pytest.mark.parametrize("size", [(3, 1, 5), (2, 4, 1), (1, 2, 3)])
def test_kernels_of_other_shapes(size: tuple[int, int, int], device: torch.device) -> None:
    for stride in (1, (2, 1, 4)):
        layer = ME.MinkowskiConvolution(3, 4, kernel_size=size, stride=stride, dimension=3)
        steps = (stride,) * 3 if isinstance(stride, int) else stride
        padding = tuple(k // 2 if k % 2 else 0 for k in size)

        def reference(ref: Reference, x: Grid, steps: Any = steps, padding: Any = padding) -> Grid:
            kernel = stored_kernel(ref.leaves["0.kernel"], size)
            return x.conv(kernel, steps, padding, x.cells(steps))

        check(nn.Sequential(layer), reference, device)


def test_dilation_and_expanded_coordinates(device: torch.device) -> None:
    layer = ME.MinkowskiConvolution(3, 4, kernel_size=3, dilation=2, dimension=3)
    check(nn.Sequential(layer), lambda ref, x: x.conv(ref.kernel("0"), 1, 2, dilation=2), device)
    grown = ME.MinkowskiConvolution(3, 4, kernel_size=3, expand_coordinates=True, dimension=3)
    coords, feats = scene(-12, 12, 300, 3)
    x = Grid.of(coords, feats, LOW, HIGH)
    mask = x.windows((3, 3, 3), (1, 1, 1), (1, 1, 1), (32, 32, 32))
    grown = grown.double().to(device)
    wanted = x.conv(stored_kernel(grown.kernel.detach().cpu(), (3, 3, 3)), 1, 1, mask)
    y = grown(ME.SparseTensor(feats.to(device), coords.to(device)))
    assert torch.equal(sorted_rows(y.C.cpu()).long(), sorted_rows(wanted.coords()))
    close(y.F, wanted.at(y.C), "values")


def test_two_dimensions(device: torch.device) -> None:
    torch.manual_seed(1)
    pixels = torch.randperm(400)[:200]
    coords = torch.stack([pixels // 200, pixels % 20, (pixels // 20) % 10], 1).int()
    feats = torch.randn(200, 3, dtype=torch.float64)
    image = torch.zeros(2, 3, 20, 10, dtype=torch.float64)
    image[coords[:, 0].long(), :, coords[:, 1].long(), coords[:, 2].long()] = feats
    layer = ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=2).double().to(device)
    x = ME.SparseTensor(feats.to(device), coords.to(device))
    y = layer(x)
    weight = layer.kernel.detach().cpu().view(3, 3, 3, 4).permute(3, 2, 1, 0)
    wanted = nn.functional.conv2d(image, weight, padding=1)
    close(y.F, wanted[coords[:, 0].long(), :, coords[:, 1].long(), coords[:, 2].long()], "2-D")
    assert torch.equal(x.C.cpu(), coords) and x.D == 2
    with pytest.raises(ValueError, match="three spatial axes"):
        ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=4)


def test_pooling(device: torch.device) -> None:
    for how, kind in (
        ("sum", ME.MinkowskiSumPooling),
        ("avg", ME.MinkowskiAvgPooling),
        ("max", ME.MinkowskiMaxPooling),
    ):
        for size, stride in ((2, 2), (3, 2), (3, 1), (3, 4), (3, 3)):
            net = nn.Sequential(kind(kernel_size=size, stride=stride, dimension=3))

            def reference(
                ref: Reference, x: Grid, how: str = how, size: int = size, stride: int = stride
            ) -> Grid:
                if size == stride == 3:  # cells, from a multiple of 3 on
                    room = (2, 0) * 3
                    x = Grid(F.pad(x.feats, room), F.pad(x.mask, room), (LOW - 2,) * 3)
                padding = size // 2 if size % 2 and size != stride else 0
                return x.pool(how, size, stride, padding, x.cells(stride))

            check(net, reference, device, seed=size)


@pytest.mark.parametrize(("size", "stride", "dilation"), [(17, 8, 1), (12, 4, 1), (11, 2, 1), (11, 4, 2)])
def test_pooling_over_large_windows(size: int, stride: int, dilation: int, device: torch.device) -> None:
    """Sizes above 9, as of pyramids (CAGroup3D's has 17 and 33): the voxels that exist in each window."""
    coords, feats = scene(LOW, HIGH, 400, 3)
    reach = (size - 1) * dilation
    low = -(reach // 2) if size % 2 else 0
    for kind in (ME.MinkowskiSumPooling, ME.MinkowskiAvgPooling, ME.MinkowskiMaxPooling):
        layer = kind(kernel_size=size, stride=stride, dilation=dilation, dimension=3)
        leaf = feats.to(device, copy=True).requires_grad_()
        y = layer(ME.SparseTensor(leaf, coords.to(device)))
        assert y.tensor_stride == [stride] * 3 and len(y) == len(
            torch.unique(torch.cat([coords[:, :1], coords[:, 1:] // stride], 1), dim=0)
        )
        away = coords[None, :, 1:] - y.C[:, None, 1:].cpu() - low
        inside = ((away >= 0) & (away <= reach) & (away % dilation == 0)).all(2)
        inside &= coords[None, :, 0] == y.C[:, None, 0].cpu()
        own = feats.clone().requires_grad_()
        if kind is ME.MinkowskiMaxPooling:
            want = torch.where(inside.unsqueeze(2), own, -torch.inf).amax(1)
            want = torch.where(want == -torch.inf, 0, want)
        else:
            want = inside.double() @ own
            if kind is ME.MinkowskiAvgPooling:
                want = want / inside.sum(1, keepdim=True).clamp(min=1)
        close(y.F, want.detach(), kind.__name__)
        seed = torch.randn_like(want)
        y.F.backward(seed.to(device))
        want.backward(seed)
        close(leaf.grad, own.grad, kind.__name__)


@pytest.mark.parametrize("size", [2, 3])
def test_pooling_transpose(size: int, device: torch.device) -> None:
    """The sum of all coarse voxels whose window holds a fine one."""
    net = nn.Sequential(
        ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=3),
        ME.MinkowskiPoolingTranspose(kernel_size=size, stride=2, dimension=3),
    )

    def reference(ref: Reference, x: Grid) -> Grid:
        pooled = x.pool("sum", 2, 2, 0, x.cells(2))
        each = torch.eye(3, dtype=torch.float64)[:, :, None, None, None].expand(-1, -1, *[size] * 3)
        return pooled.conv_transpose(each, 2, size // 2 if size % 2 else 0, x.mask.shape[1:], x.mask)

    check(net, reference, device)


def test_samples_broadcasts_and_norms(device: torch.device) -> None:
    coords, feats = scene(LOW, HIGH, 500, 4)
    coords = coords.clone()
    coords[:, 0] *= 2  # sample 1 is empty
    x = ME.SparseTensor(feats.to(device), coords.to(device))
    parts = [feats[coords[:, 0] == b] for b in (0, 2)]
    for kind, function in (
        (ME.MinkowskiGlobalAvgPooling, lambda rows: rows.mean(0)),
        (ME.MinkowskiGlobalSumPooling, lambda rows: rows.sum(0)),
        (ME.MinkowskiGlobalMaxPooling, lambda rows: rows.amax(0)),
    ):
        glob = kind()(x)
        stats = torch.stack([function(rows) for rows in parts])
        assert glob.C.tolist() == [[0, 0, 0, 0], [2, 0, 0, 0]] and glob.tensor_stride == [0, 0, 0]
        close(glob.F, stats, kind.__name__)
        at = stats[(coords[:, 0] // 2).long()]
        close(ME.MinkowskiBroadcast()(x, glob).F, at, "broadcast")
        close(ME.MinkowskiBroadcastAddition()(x, glob).F, feats + at, "broadcast +")
        close(ME.MinkowskiBroadcastMultiplication()(x, glob).F, feats * at, "broadcast *")
        close(ME.MinkowskiBroadcastConcatenation()(x, glob).F, torch.cat([feats, at], 1), "broadcast cat")
    norm = ME.MinkowskiInstanceNorm(4).double().to(device)
    nn.init.normal_(norm.weight)
    got = norm(x).F
    wanted = torch.empty_like(feats)
    for b, rows in zip((0, 2), parts, strict=True):
        var, mean = torch.var_mean(rows, 0, unbiased=False)
        scaled = (rows - mean) / (var + 1e-8).sqrt()
        wanted[coords[:, 0] == b] = scaled * norm.weight.detach().cpu() + norm.bias.detach().cpu()
    close(got, wanted, "instance norm")
    assert [len(f) for f in x.decomposed_features] == [len(parts[0]), 0, len(parts[1])]
    assert [len(rows) for rows in x.coordinate_manager.origin_map(x.coordinate_map_key)[1]][1] == 0
    for sample, rows in enumerate(x.decomposed_coordinates):
        assert torch.equal(rows.cpu(), coords[coords[:, 0] == sample, 1:])
    block = SEBasicBlock(4, 4, reduction=2, D=3).double().to(device)
    assert block(x).F.shape == (len(x), 4) and "se.fc.0.linear.weight" in block.state_dict()


# ---- tensors -----------------------------------------------------------------------------------------------


def test_duplicates_merge_and_are_mapped_back(device: torch.device) -> None:
    coords = torch.tensor([[0, 4, 0, -2], [1, 0, 0, 0], [0, 4, 0, -2], [0, 1, 1, 1], [1, 0, 0, 0]]).int()
    feats = torch.arange(10.0).view(5, 2)
    mode = ME.SparseTensorQuantizationMode
    for how, wanted in (
        (mode.RANDOM_SUBSAMPLE, [[0, 1], [2, 3], [6, 7]]),
        (mode.UNWEIGHTED_AVERAGE, [[2, 3], [5, 6], [6, 7]]),
        (mode.UNWEIGHTED_SUM, [[4, 6], [10, 12], [6, 7]]),
        (mode.MAX_POOL, [[4, 5], [8, 9], [6, 7]]),
    ):
        leaf = feats.clone().to(device).requires_grad_()
        x = ME.SparseTensor(leaf, coords.to(device), quantization_mode=how)
        assert x.C.tolist() == coords[[0, 1, 3]].tolist() and x.F.tolist() == wanted
        assert x.inverse_mapping.tolist() == [0, 1, 0, 2, 1] and x.unique_index.tolist() == [0, 1, 3]
        assert x.slice(x).F.tolist() == [wanted[i] for i in (0, 1, 0, 2, 1)]
        x.F.sum().backward()
        share = {mode.UNWEIGHTED_AVERAGE: 0.5, mode.UNWEIGHTED_SUM: 1.0}.get(
            how, 0.0 if how == mode.MAX_POOL else 1
        )
        assert leaf.grad[0].tolist() == [share, share]
    with pytest.raises(ValueError, match="twice"):
        ME.SparseTensor(feats, coords, quantization_mode=mode.NO_QUANTIZATION)
    with pytest.raises(ValueError, match=r"row 1, \(0, 3, 2, 2\)"):
        ME.SparseTensor(feats[:2], torch.tensor([[0, 2, 2, 2], [0, 3, 2, 2]]).int(), tensor_stride=2)


def test_arithmetic(device: torch.device) -> None:
    a = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [0, 2, 0, 0]]).int().to(device)
    x = ME.SparseTensor(torch.tensor([[1.0], [2], [3]], device=device), a)
    y = ME.SparseTensor(
        torch.tensor([[10.0], [20]], device=device),
        a[1:] + torch.tensor([0, 1, 1, 1], dtype=torch.int32, device=device),
        coordinate_manager=x.coordinate_manager,
    )
    z = ME.SparseTensor(
        torch.tensor([[10.0], [20]], device=device), a[[2, 0]], coordinate_manager=x.coordinate_manager
    )
    assert (x + x).F.flatten().tolist() == [2, 4, 6] and (x * x).F.flatten().tolist() == [1, 4, 9]
    assert (x - 1).F.flatten().tolist() == [0, 1, 2]
    total = x + z
    rows = {tuple(c): f for c, f in zip(total.C[:, 1:].tolist(), total.F.flatten().tolist(), strict=True)}
    assert rows == {(0, 0, 0): 21.0, (1, 0, 0): 2.0, (2, 0, 0): 13.0}
    assert len(x + y) == 5 and float((x + y).F.sum()) == 36.0
    assert len(ME.MinkowskiUnion()(x, y, z)) == 5
    with pytest.raises(ValueError, match="in place"):
        x += z
    with pytest.raises(ValueError, match="key"):
        ME.cat(x, z)
    with pytest.raises(ValueError, match="coordinate managers"):
        x + ME.SparseTensor(x.F, a)
    before = x
    x += before
    assert x is before and x.F.flatten().tolist() == [2, 4, 6]


def test_dense_and_back(device: torch.device) -> None:
    coords, feats = scene(0, 9, 300, 3)
    x = ME.SparseTensor(feats.to(device).requires_grad_(), coords.to(device))
    grid, low, stride = x.dense(torch.Size([2, 3, 9, 9, 9]))
    close(grid, Grid.of(coords, feats, 0, 9).feats, "dense")
    assert stride.tolist() == [1, 1, 1] and low.shape == (1, 3)
    back = ME.to_sparse(grid.detach())
    assert torch.equal(sorted_rows(back.C.cpu()), sorted_rows(coords))
    assert torch.equal(back.features_at_coordinates(x.C.double()), x.F.detach())
    y = ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=3)(x)
    grid, _, stride = y.dense(torch.Size([2, 3, 5, 5, 5]))
    padded = nn.functional.pad(Grid.of(coords, feats, 0, 9).feats, (0, 1) * 3)
    close(grid, nn.functional.avg_pool3d(padded, 2) * 8, "dense of a coarser grid")
    assert stride.tolist() == [2, 2, 2]
    with pytest.raises(ValueError, match="lies outside"):
        x.dense(torch.Size([2, 3, 4, 4, 4]))
    every = ME.MinkowskiToSparseTensor()(torch.zeros(1, 2, 3, 3, 3, device=device))
    assert len(every) == 27


def test_features_between_voxels(device: torch.device) -> None:
    coords, feats = scene(-4, 4, 300, 3)
    x = ME.SparseTensor(feats.to(device).requires_grad_(), coords.to(device))
    y = ME.MinkowskiSumPooling(kernel_size=2, stride=2, dimension=3)(x)
    points = torch.cat([torch.randint(0, 2, (50, 1)), torch.randn(50, 3) * 3], 1).double()
    for tensor, step in ((x, 1), (y, 2)):
        rows = {tuple(c): f for c, f in zip(tensor.C.tolist(), tensor.F.detach().cpu(), strict=True)}
        wanted = torch.zeros(50, 3, dtype=torch.float64)
        for i, (b, *place) in enumerate(points.tolist()):
            low = [int(np.floor(p / step)) * step for p in place]
            for corner in itertools.product((0, step), repeat=3):
                cell = [v + c for v, c in zip(low, corner, strict=True)]
                share = np.prod([1 - abs(p - c) / step for p, c in zip(place, cell, strict=True)])
                if (int(b), *cell) in rows:
                    wanted[i] += share * rows[(int(b), *cell)]
        close(tensor.features_at_coordinates(points.to(device)), wanted, f"tensor stride {step}")
    got, (rows, places), shares = ME.MinkowskiInterpolation(True, True)(x, points.to(device))
    again = torch.zeros_like(got).index_add(0, places, x.F[rows] * shares.unsqueeze(1))
    close(again, got.detach().cpu(), "the maps of an interpolation")


class FieldNet(ME.MinkowskiNetwork):
    """Points through a network on voxels, and back to the points."""

    def __init__(self) -> None:
        super().__init__(3)
        self.point = nn.Sequential(ME.MinkowskiLinear(3, 5), ME.MinkowskiBatchNorm(5), ME.MinkowskiReLU())
        self.conv = ME.MinkowskiConvolution(5, 4, kernel_size=3, dimension=3)
        self.out = ME.MinkowskiLinear(9, 2)

    def forward(self, x: Any) -> Any:
        x = self.point(x)
        y = self.conv(x.sparse())
        return self.out(y.cat_slice(x))


def test_tensor_field(device: torch.device) -> None:
    net = FieldNet().double().to(device).train()
    points = torch.cat([torch.randint(0, 2, (400, 1)), torch.randn(400, 3) * 3], 1).double()
    feats = torch.randn(400, 3, dtype=torch.float64)
    ref = Reference(net)
    leaf, mine = feats.clone().requires_grad_(), feats.to(device).requires_grad_()
    rows = leaf @ ref.leaves["point.0.linear.weight"].T + ref.leaves["point.0.linear.bias"]
    var, mean = torch.var_mean(rows, 0, unbiased=False)
    rows = (rows - mean) / (var + 1e-5).sqrt() * ref.leaves["point.1.bn.weight"] + ref.leaves[
        "point.1.bn.bias"
    ]
    rows = rows.relu()
    cells, inverse = torch.unique(points.floor().int(), dim=0, return_inverse=True)
    counts = torch.bincount(inverse).unsqueeze(1)
    means = torch.zeros(len(cells), 5, dtype=torch.float64).index_add(0, inverse, rows) / counts
    grid = ref.conv(Grid.of(cells, means, LOW, HIGH), "conv")
    both = torch.cat([grid.at(cells)[inverse], rows], 1)
    wanted = both @ ref.leaves["out.linear.weight"].T + ref.leaves["out.linear.bias"]
    x = ME.TensorField(mine, points.to(device))
    y = net(x)
    assert isinstance(y, ME.TensorField) and torch.equal(y.C.cpu(), points)
    close(y.F, wanted, "values")
    weights = torch.randn(wanted.shape, dtype=torch.float64)
    (wanted * weights).sum().backward()
    (y.F * weights.to(device)).sum().backward()
    close(mine.grad, leaf.grad, "gradient of the features")
    for name, p in net.named_parameters():
        close(p.grad, ref.leaves[name].grad, name)


# ---- coordinate managers -----------------------------------------------------------------------------------


def test_targets_of_a_decoder(device: torch.device) -> None:
    """What completion networks do: target coordinates in the manager, strided, met by a kernel map."""
    coords, feats = scene(0, 16, 200, 2)
    x = ME.SparseTensor(feats.to(device), coords.to(device))
    manager = x.coordinate_manager
    target, _ = manager.insert_and_map(coords[:150].to(device), string_id="target")
    assert target.get_key() == ([1, 1, 1], "target") and manager.size(target) == 150
    coarse = ME.MinkowskiConvolution(2, 3, kernel_size=2, stride=4, dimension=3).double().to(device)(x)
    strided = manager.stride(target, coarse.tensor_stride[0])
    hit = torch.zeros(len(coarse), dtype=torch.bool, device=device)
    for pairs in manager.kernel_map(
        coarse.coordinate_map_key, strided, kernel_size=1, region_type=1
    ).values():
        hit[pairs[0].long()] = True
    wanted = {
        tuple(row)
        for row in (coords[:150] // torch.tensor([1, 4, 4, 4]) * torch.tensor([1, 4, 4, 4])).tolist()
    }
    assert {tuple(row) for row in coarse.C[hit].tolist()} == wanted
    inside, rows = manager.stride_map(x.coordinate_map_key, coarse.coordinate_map_key)
    assert len(inside) == len(x) and torch.equal(
        coarse.C[rows],
        x.C.div(torch.tensor([1, 4, 4, 4], device=device), rounding_mode="floor")
        * torch.tensor([1, 4, 4, 4], device=device),
    )
    onto = ME.MinkowskiConvolution(2, 3, kernel_size=3, dimension=3).double().to(device)
    assert torch.equal(onto(x, target).C, manager.get_coordinates(target))


def test_shared_coordinate_manager(device: torch.device) -> None:
    coords, feats = scene(0, 8, 50, 2)
    share = ME.SparseTensorOperationMode.SHARE_COORDINATE_MANAGER
    ME.set_sparse_tensor_operation_mode(share)
    try:
        x, y = (ME.SparseTensor(feats.to(device), coords.to(device)) for _ in range(2))
        assert x.coordinate_manager is y.coordinate_manager is ME.global_coordinate_manager()
        assert len(x + y) == len(x)
    finally:
        ME.clear_global_coordinate_manager()
        ME.set_sparse_tensor_operation_mode(ME.SparseTensorOperationMode.SEPARATE_COORDINATE_MANAGER)
    assert ME.global_coordinate_manager() is None


# ---- checkpoints, settings, names --------------------------------------------------------------------------


class MinkUNet14A(nn.Module):
    """The names and shapes of MinkowskiEngine's MinkUNet14A checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        planes, c = (32, 64, 128, 256, 128, 128, 96, 96), 32
        conv, up = ME.MinkowskiConvolution, ME.MinkowskiConvolutionTranspose
        self.conv0p1s1, self.bn0 = conv(3, c, kernel_size=5, dimension=3), ME.MinkowskiBatchNorm(c)
        skips = [c]
        for i in range(4):
            setattr(self, f"conv{i + 1}p{2**i}s2", conv(c, c, kernel_size=2, stride=2, dimension=3))
            setattr(self, f"bn{i + 1}", ME.MinkowskiBatchNorm(c))
            setattr(self, f"block{i + 1}", self._blocks(c, planes[i]))
            c = planes[i]
            skips.append(c)
        skips.pop()
        for i in range(4, 8):
            name = f"convtr{i}p{2 ** (8 - i)}s2"
            setattr(self, name, up(c, planes[i], kernel_size=2, stride=2, dimension=3))
            setattr(self, f"bntr{i}", ME.MinkowskiBatchNorm(planes[i]))
            setattr(self, f"block{i + 1}", self._blocks(planes[i] + skips.pop(), planes[i]))
            c = planes[i]
        self.final = conv(96, 20, kernel_size=1, bias=True, dimension=3)

    @staticmethod
    def _blocks(c_in: int, c_out: int) -> nn.Sequential:
        short = None
        if c_in != c_out:
            conv = ME.MinkowskiConvolution(c_in, c_out, kernel_size=1, dimension=3)
            short = nn.Sequential(conv, ME.MinkowskiBatchNorm(c_out))
        return nn.Sequential(BasicBlock(c_in, c_out, downsample=short, dimension=3))

    def forward(self, x: Any) -> Any:
        x = MF.relu(self.bn0(self.conv0p1s1(x)))
        skips = []
        for i in range(1, 5):
            skips.append(x)
            down, norm = getattr(self, f"conv{i}p{2 ** (i - 1)}s2"), getattr(self, f"bn{i}")
            x = getattr(self, f"block{i}")(MF.relu(norm(down(x))))
        for i in range(4, 8):
            up, norm = getattr(self, f"convtr{i}p{2 ** (8 - i)}s2"), getattr(self, f"bntr{i}")
            x = getattr(self, f"block{i + 1}")(ME.cat(MF.relu(norm(up(x))), skips.pop()))
        return self.final(x)


def test_checkpoints_go_to_voxmma_models(device: torch.device) -> None:
    net = MinkUNet14A().double().to(device).eval()
    state = net.state_dict()
    assert state["conv0p1s1.kernel"].shape == (125, 3, 32) and state["final.kernel"].shape == (96, 20)
    assert state["final.bias"].shape == (1, 20) and "block1.0.norm1.bn.running_mean" in state
    ours = models.minkunet("14A", 3, 20).double().to(device).eval()
    report = convert.load(ours, state, "minkowski", rename=models.keys.minkowski_minkunet)
    assert report.complete
    coords, feats = scene(LOW, HIGH, 300, 3)
    with torch.no_grad():
        y = net(ME.SparseTensor(feats.to(device), coords.to(device)))
        close(y.F, ours(voxmma.Voxels(coords.to(device), feats.to(device))).feats.cpu(), "voxmma.models")
    again = MinkUNet14A().double()
    again.load_state_dict(state)
    with pytest.raises(RuntimeError, match="kernel_size"):
        ME.MinkowskiConvolution(3, 4, kernel_size=(1, 3, 1), dimension=3).load_state_dict(
            ME.MinkowskiConvolution(3, 4, kernel_size=(3, 1, 1), dimension=3).state_dict()
        )


def test_precision_controls_work(device: torch.device) -> None:
    coords, feats = scene(LOW, HIGH, 300, 3)
    net = nn.Sequential(
        ME.MinkowskiConvolution(3, 8, kernel_size=3, dimension=3),
        ME.MinkowskiBatchNorm(8),
        ME.MinkowskiReLU(),
    )
    net = net.to(device)
    x = ME.SparseTensor(feats.float().to(device), coords.to(device))
    said = str(voxmma.explain(net(x)))
    assert "MinkowskiConvolution(3, 8, 3x3x3)" in said and said.endswith("then BatchNorm, ReLU")
    handle = voxmma.policy.apply_policy(net, "auto_mixed_bf16")
    try:
        assert voxmma.explain(net[0](x)).compute_dtype == torch.bfloat16
        assert net(x).F.dtype == torch.float32
    finally:
        handle.revert()
    try:
        compat.install("MinkowskiEngine", use_fp16_accum=True)
        assert ME.MinkowskiConvolution(3, 8, kernel_size=3, dimension=3).use_fp16_accum is True
    finally:
        compat.uninstall("MinkowskiEngine")
    assert ME.MinkowskiConvolution(3, 8, kernel_size=3, dimension=3).use_fp16_accum is None


def test_copies_and_trees(device: torch.device) -> None:
    coords, feats = scene(LOW, HIGH, 100, 3)
    x = ME.SparseTensor(feats, coords)
    moved = pytree.tree_map(lambda t: t.to(device).clone(), {"x": x})["x"]
    net = UNet().double().to(device).eval()
    again = pickle.loads(pickle.dumps(copy.deepcopy(net)))
    assert moved.device.type == device.type and moved.coordinate_manager is not x.coordinate_manager
    close(
        again(moved).F, net(ME.SparseTensor(feats.to(device), coords.to(device))).F.detach().cpu(), "copies"
    )
    doubled = pytree.tree_map(lambda t: t * 2 if t.is_floating_point() else t, x)
    assert doubled.coordinate_manager is x.coordinate_manager and torch.equal((x + x).F, doubled.F)


def test_install_gives_the_same_modules() -> None:
    import importlib

    assert "MinkowskiEngine" not in sys.modules
    try:
        assert compat.install("MinkowskiEngine") is ME
        for name, ours in (
            ("MinkowskiEngine", ME),
            ("MinkowskiEngine.MinkowskiFunctional", MF),
            ("MinkowskiEngine.utils", ME.utils),
        ):
            assert importlib.import_module(name) is ours
        block = importlib.import_module("MinkowskiEngine.modules.resnet_block")
        assert block.BasicBlock is BasicBlock
    finally:
        compat.uninstall("MinkowskiEngine")
    assert "MinkowskiEngine" not in sys.modules
    with pytest.raises(AttributeError, match=r"no MinkowskiEngine.MinkowskiChannelwise.*groups"):
        _ = ME.MinkowskiChannelwiseConvolution
    with pytest.raises(AttributeError, match=r"no MinkowskiEngine.nothing: docs/migrate.md"):
        _ = ME.nothing
    with pytest.raises(TypeError, match="dilation"):
        compat.install("MinkowskiEngine", dilation="ignore")


# ---- utils -------------------------------------------------------------------------------------------------


def test_quantize_and_collate() -> None:
    points = np.array([[0.1, 0.2, 0.3], [1.9, 0, 0], [0.4, 0.4, 0.4], [-0.1, 0, 0], [1.1, 0.5, 0.9]])
    feats, labels = np.arange(10.0).reshape(5, 2), np.array([1, 2, 1, 3, 4])
    cells, picked, found, index, inverse = ME.utils.sparse_quantize(
        points, feats, labels, ignore_label=-1, return_index=True, return_inverse=True, quantization_size=1.0
    )
    assert cells.tolist() == [[0, 0, 0], [1, 0, 0], [-1, 0, 0]] and index.tolist() == [0, 1, 3]
    assert inverse.tolist() == [0, 1, 0, 2, 1] and found.tolist() == [1, -1, 3]
    assert picked.tolist() == feats[[0, 1, 3]].tolist()
    only = ME.utils.sparse_quantize(torch.from_numpy(points), quantization_size=0.5)
    assert only.dtype == torch.int32 and only.shape == (4, 3)
    assert ME.utils.sparse_quantize(points, return_maps_only=True).tolist() == [0, 1, 3]
    a, b = torch.randint(0, 9, (4, 3)), np.array([[1.5, 2, -0.5]])
    coords, values, targets = ME.utils.sparse_collate(
        [a, b], [torch.ones(4, 2), np.zeros((1, 2), np.float32)], [torch.zeros(4), torch.ones(1)]
    )
    assert coords.dtype == torch.int32 and coords[:, 0].tolist() == [0] * 4 + [1]
    assert coords[4].tolist() == [1, 1, 2, -1] and values.shape == (5, 2) and targets.shape == (5,)
    data = [(a, torch.ones(4, 2), torch.zeros(4)), (torch.as_tensor(b), torch.ones(1, 2), torch.ones(1))]
    assert torch.equal(ME.utils.batch_sparse_collate(data)[0], coords)
    assert len(ME.utils.SparseCollation(limit_numpoints=4)(data)[0]) == 4
    assert ME.utils.batched_coordinates([a.float() + 0.5, a], dtype=torch.float32).shape == (8, 4)
    with pytest.raises(ValueError, match=r"sample 1 has 4 coordinates and 3"):
        ME.utils.sparse_collate([a, a], [torch.ones(4, 2), torch.ones(3, 2)])
    kernel = ME.utils.kaiming_normal_(torch.empty(27, 64, 32), mode="fan_out", nonlinearity="relu")
    assert abs(float(kernel.std()) - (2 / (27 * 32)) ** 0.5) < 2e-3


# ---- outputs that the caller chooses -----------------------------------------------------------------------


def windows_at(
    x: ME.SparseTensor, out: Tensor, size: int, unit: int, transposed: bool
) -> list[tuple[int, int, int]]:
    """(row of `out`, offset, row of x) of every pair: offsets count `unit` cells."""
    rows = {tuple(row): i for i, row in enumerate(x.C.tolist())}
    low, found = -(size // 2) if size % 2 else 0, []
    for n, (b, *cell) in enumerate(out.tolist()):
        for k, steps in enumerate(itertools.product(range(size), repeat=3)):
            away = [(-1 if transposed else 1) * (step + low) * unit for step in reversed(steps)]
            i = rows.get((b, *(c + a for c, a in zip(cell, away, strict=True))))
            if i is not None:
                found.append((n, k, i))
    return found


@pytest.mark.parametrize("given", ["tensor", "coarse", "fine"])
@pytest.mark.parametrize("kind", ["conv", "transposed", "generative", "pool", "unpool"])
def test_a_layer_onto_coordinates_that_are_given(kind: str, given: str, device: torch.device) -> None:
    """Offsets count cells of the input's grid (of the output's where transposed), and the stride of the layer
    says nothing: onto cells of any tensor stride, as CAGroup3D's heads do it."""
    coords, feats = scene(-8, 8, 150, 3)
    x = ME.SparseTensor(feats.to(device), coords.to(device))
    x2 = ME.MinkowskiConvolution(3, 3, kernel_size=2, stride=2, dimension=3).double().to(device)(x)
    back = kind in ("transposed", "generative", "unpool")
    sources = (x2,) if back else (x, x2)
    layers = {
        "conv": ME.MinkowskiConvolution,
        "transposed": ME.MinkowskiConvolutionTranspose,
        "generative": ME.MinkowskiGenerativeConvolutionTranspose,
        "pool": ME.MinkowskiSumPooling,
        "unpool": ME.MinkowskiPoolingTranspose,
    }
    for source, size, stride in itertools.product(sources, (2, 3), (1, 2)):
        if kind in ("pool", "unpool"):
            if size == stride:
                continue  # cells, not windows
            layer = layers[kind](kernel_size=size, stride=stride, dimension=3)
        else:
            layer = layers[kind](3, 4, kernel_size=size, stride=stride, dimension=3).double().to(device)
        multiple = (
            source.tensor_stride[0] if kind == "conv" else source.tensor_stride[0] // stride if back else 1
        )
        points = torch.unique(torch.cat([coords[::3, :1], coords[::3, 1:] // multiple * multiple], 1), dim=0)
        y = layer(source, {"tensor": points.to(device), "coarse": x2, "fine": x.coordinate_map_key}[given])
        unit = (y if back else source).tensor_stride[0]
        want = torch.zeros(len(y), y.shape[1], dtype=torch.float64)
        pairs = windows_at(source, y.C.cpu(), size, unit, back)
        if source.coordinate_map_key != y.coordinate_map_key:
            keys = source.coordinate_map_key, y.coordinate_map_key
            found = x.coordinate_manager.kernel_map(*keys, stride, size, is_transpose=back)
            assert {(n, k, i) for k, both in found.items() for i, n in both.T.tolist()} == set(pairs)
        for n, k, i in pairs:
            row = source.F[i].detach().cpu()
            want[n] += row if kind in ("pool", "unpool") else row @ layer.kernel[k].detach().cpu()
        close(y.F, want, f"{kind} of {size}, stride {stride}, {source.tensor_stride} to {y.tensor_stride}")
        assert given != "tensor" or torch.equal(y.C.cpu(), points)
    with pytest.raises(ValueError, match="cannot lead"):
        (layer if back else ME.MinkowskiConvolution(3, 4, kernel_size=3, dimension=3).double().to(device))(
            x if back else x2, x2 if back else ME.MinkowskiGlobalSumPooling()(x2)
        )


# ---- MinkowskiEngine 0.4 -----------------------------------------------------------------------------------


def test_names_of_0_4() -> None:
    """Keywords and members as networks of 0.4 write them (DeepGlobalRegistration, PointContrast)."""
    coords, feats = scene(LOW, HIGH, 300, 3)
    x = ME.SparseTensor(feats=feats, coords=coords)
    assert x.feats is x.F and torch.equal(x.coords, coords)
    down = ME.MinkowskiConvolution(3, 4, kernel_size=3, stride=2, has_bias=True, dimension=3).double()
    up = {"kernel_size": 3, "stride": 2, "has_bias": False, "dimension": 3}
    onto = ME.MinkowskiConvolutionTranspose(4, 3, generate_new_coords=False, **up).double()
    grown = ME.MinkowskiConvolutionTranspose(4, 3, generate_new_coords=True, **up).double()
    y = down(x)
    back = onto(y)
    assert down.bias is not None and onto.bias is None and back.coords_key == x.coords_key
    assert len(grown(y)) > len(x)
    other = ME.SparseTensor(back.F + 1, coords_key=back.coords_key, coords_manager=back.coords_man)
    assert other.coords_man is x.coordinate_manager and torch.equal(other.C, x.C)
    with pytest.raises(TypeError, match="same argument"):
        ME.MinkowskiConvolution(3, 4, kernel_size=3, has_bias=True, bias=True, dimension=3)


def test_sparse_quantize_of_0_4() -> None:
    """return_index returns the rows and no cells."""
    points, labels = np.array([[0.2, 0], [0.7, 0], [3, 1]]), np.array([1, 2, 3])
    try:
        compat.install("MinkowskiEngine", version=0.4)
        assert ME.utils.sparse_quantize(points, return_index=True).tolist() == [0, 2]
        rows, inverse = ME.utils.sparse_quantize(points, return_index=True, return_inverse=True)
        assert rows.tolist() == [0, 2] and inverse.tolist() == [0, 0, 1] and isinstance(rows, np.ndarray)
        rows, found = ME.utils.sparse_quantize(points, labels=labels, return_index=True)
        assert rows.tolist() == [0, 2] and found.tolist() == [-100, 3]
        tensor = ME.utils.sparse_quantize(torch.from_numpy(points), return_index=True)
        assert isinstance(tensor, Tensor) and tensor.tolist() == [0, 2]
        with pytest.raises(ValueError, match=r"0\.4 or 0\.5"):
            compat.install("MinkowskiEngine", version=0.3)
    finally:
        compat.install("MinkowskiEngine")
        compat.uninstall("MinkowskiEngine")
    assert len(ME.utils.sparse_quantize(points, return_index=True)) == 2
