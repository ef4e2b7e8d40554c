"""Dense fp64 references: convolutions and pooling on full grids, seen at the voxels that exist."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

Triple = tuple[int, int, int]


def stored_kernel(kernel: Tensor, size: Triple, first_fastest: bool = True) -> Tensor:
    """(O, I, x, y, z) of a kernel (K, I, O) or (I, O) whose offsets run along x fastest, or along z."""
    kernel = kernel if kernel.dim() == 3 else kernel.unsqueeze(0)
    if first_fastest:
        return kernel.unflatten(0, size[::-1]).permute(4, 3, 2, 1, 0)
    return kernel.unflatten(0, size).permute(4, 3, 0, 1, 2)


def triple(value: int | Triple) -> Triple:
    return (value, value, value) if isinstance(value, int) else value


@dataclass
class Grid:
    """Features (B, C, X, Y, Z), zero where `mask` (B, X, Y, Z) is False; the first cell is `origin`."""

    feats: Tensor
    mask: Tensor
    origin: Triple

    @staticmethod
    def of(coords: Tensor, feats: Tensor, low: int, high: int) -> Grid:
        """From (N, 4) batch, x, y, z in [low, high), which is differentiable in `feats`."""
        batch = int(coords[:, 0].max()) + 1
        cells = high - low
        index = coords.long() - torch.tensor([0, low, low, low])
        grid = feats.new_zeros((batch, cells, cells, cells, feats.shape[1]))
        grid = grid.index_put(tuple(index.unbind(1)), feats)
        mask = torch.zeros(grid.shape[:4], dtype=torch.bool)
        mask[tuple(index.unbind(1))] = True
        return Grid(grid.movedim(-1, 1), mask, (low, low, low))

    def coords(self) -> Tensor:
        """(N, 4) of the voxels, sorted."""
        return torch.nonzero(self.mask) + torch.tensor([0, *self.origin])

    def at(self, coords: Tensor) -> Tensor:
        """(N, C) rows."""
        index = coords.cpu().long() - torch.tensor([0, *self.origin])
        return self.feats.movedim(1, -1)[tuple(index.unbind(1))]

    def rows(self) -> Tensor:
        return self.at(self.coords())

    def with_rows(self, rows: Tensor) -> Grid:
        """Other features for the voxels, in the order of `coords`."""
        grid = rows.new_zeros((*self.mask.shape, rows.shape[1]))
        grid = grid.index_put(tuple(torch.nonzero(self.mask).unbind(1)), rows)
        return Grid(grid.movedim(-1, 1), self.mask, self.origin)

    def cells(self, stride: int | Triple) -> Tensor:
        """Mask of the cells of a coarser grid that hold a voxel."""
        step = triple(stride)
        room = [r for n, s in zip(self.mask.shape[:0:-1], step[::-1], strict=True) for r in (0, -n % s)]
        return F.max_pool3d(F.pad(self.mask.double(), room).unsqueeze(1), step, step)[:, 0] > 0

    def conv(
        self,
        weight: Tensor,
        stride: int | Triple = 1,
        padding: int | Triple = 0,
        mask: Tensor | None = None,
        dilation: int | Triple = 1,
        bias: Tensor | None = None,
    ) -> Grid:
        """y[o] = sum over k of x[o * stride - padding + k * dilation] W[k] where `mask` is, default its own;
        all in cells, of the coarser grid for a stride, whose origin is floor(origin / stride)."""
        step, pad, spread = triple(stride), triple(padding), triple(dilation)
        out = self.mask if mask is None else mask
        assert all(o % s == 0 for o, s in zip(self.origin, step, strict=True))
        y = F.conv3d(self._padded(weight.shape[2:], step, pad, spread, out), weight, None, step, 0, spread)
        if bias is not None:
            y = y + bias.reshape(1, -1, 1, 1, 1)
        return Grid(y * out.unsqueeze(1), out, self._coarser(step))

    def _coarser(self, step: Triple) -> Triple:
        x, y, z = (o // s for o, s in zip(self.origin, step, strict=True))
        return x, y, z

    def _padded(self, size, step, pad, spread, out, grid: Tensor | None = None) -> Tensor:
        borders = []
        for axis in (2, 1, 0):
            n, m = self.mask.shape[1 + axis], out.shape[1 + axis]
            last = (m - 1) * step[axis] - pad[axis] + (size[axis] - 1) * spread[axis]
            borders += [pad[axis], last - (n - 1)]
        return F.pad(self.feats if grid is None else grid, borders)

    def windows(self, size: Triple, stride: Triple, padding: Triple, shape: Triple) -> Tensor:
        """Mask (B, *shape) of the sites whose window holds a voxel."""
        out = torch.ones((len(self.mask), *shape), dtype=torch.bool)
        ones = self._padded(size, stride, padding, (1, 1, 1), out, self.mask.double().unsqueeze(1))
        return F.conv3d(ones, ones.new_ones((1, 1, *size)), None, stride)[:, 0] > 0

    def clipped_windows(self, size: Triple, stride: Triple, padding: Triple) -> Tensor:
        """`windows` from 0 on and as far as the batch's largest coordinate reaches: torchsparse 2.1's."""
        last = self.coords()[:, 1:].amax(0).tolist() if bool(self.mask.any()) else [-(1 << 20)] * 3
        ends = [(m + 2 * p - k + 1) // s + 1 for m, p, k, s in zip(last, padding, size, stride, strict=True)]
        full = [max(-(-n // s), m, 1) for n, s, m in zip(self.mask.shape[1:], stride, ends, strict=True)]
        mask = self.windows(size, stride, padding, (full[0], full[1], full[2]))
        for axis, end in enumerate(ends):
            mask[(slice(None), *[slice(None)] * axis, slice(max(end, 0), None))] = False
        return mask

    def conv_transpose(
        self,
        weight: Tensor,
        stride: int | Triple,
        padding: int | Triple,
        shape: tuple[int, ...],
        mask: Tensor | None = None,
    ) -> Grid:
        """y[i * stride - padding + k] += x[i] W[k] on a grid of `shape`, where `mask` is: default where it
        reaches."""
        step, pad = triple(stride), triple(padding)

        def spread(grid: Tensor, kernel: Tensor) -> Tensor:
            full = F.conv_transpose3d(grid, kernel.transpose(0, 1), stride=step)
            borders = []
            for axis in (2, 1, 0):
                borders += [-pad[axis], shape[axis] + pad[axis] - full.shape[2 + axis]]
            return F.pad(full, borders)

        if mask is None:
            mask = (
                spread(self.mask.double().unsqueeze(1), weight.new_ones((1, 1, *weight.shape[2:])))[:, 0] > 0
            )
        x, y, z = (o * s for o, s in zip(self.origin, step, strict=True))
        return Grid(spread(self.feats, weight) * mask.unsqueeze(1), mask, (x, y, z))

    def pool(self, how: str, size: int, stride: int, padding: int, mask: Tensor | None = None) -> Grid:
        """'sum', 'avg' (over the voxels that exist) or 'max' of windows."""
        out = self.mask if mask is None else mask
        channels = self.feats.shape[1]
        sizes, step, pad = triple(size), triple(stride), triple(padding)
        one = self.feats.new_ones((1, 1, *sizes))
        there = self._padded(sizes, step, pad, (1, 1, 1), out, self.mask.double().unsqueeze(1))
        count = F.conv3d(there, one, None, step)
        grid = self._padded(sizes, step, pad, (1, 1, 1), out)
        if how == "max":
            y = F.max_pool3d(torch.where(there > 0, grid, -torch.inf), sizes, step)
            y = torch.where(count > 0, y, 0.0)
        else:
            y = F.conv3d(grid, one.expand(channels, 1, *sizes), None, step, groups=channels)
            y = y / count.clamp(min=1) if how == "avg" else y
        return Grid(torch.where(out.unsqueeze(1), y, 0.0), out, self._coarser(step))

    def batch_norm(self, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Grid:
        """Training mode: statistics of all voxels."""
        rows = self.rows()
        var, mean = torch.var_mean(rows, 0, unbiased=False)
        return self.with_rows((rows - mean) / (var + eps).sqrt() * weight + bias)

    def samples(self, function) -> Tensor:
        """(B, ...) `function` of the rows (N_i, C) of each sample."""
        coords, rows = self.coords(), self.rows()
        return torch.stack([function(rows[coords[:, 0] == b]) for b in range(len(self.mask))])

    def relu(self) -> Grid:
        return Grid(self.feats.relu(), self.mask, self.origin)

    def __add__(self, other: Grid) -> Grid:
        assert torch.equal(self.mask, other.mask)
        return Grid(self.feats + other.feats, self.mask, self.origin)

    def cat(self, other: Grid) -> Grid:
        assert torch.equal(self.mask, other.mask)
        return Grid(torch.cat([self.feats, other.feats], 1), self.mask, self.origin)


def scene(
    low: int, high: int, count: int, channels: int, batch: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Distinct voxels (N, 4) int32 in random order and features (N, C) fp64."""
    generator = torch.Generator().manual_seed(seed)
    space = torch.randint(low, high, (count, 3), generator=generator)
    samples = torch.randint(0, batch, (count, 1), generator=generator)
    coords = torch.unique(torch.cat([samples, space], dim=1), dim=0)
    coords = coords[torch.randperm(len(coords), generator=generator)].int()
    return coords, torch.randn(len(coords), channels, dtype=torch.float64, generator=generator)


def close(got: Tensor, wanted: Tensor, what: str) -> None:
    """Equal to about ten digits of the largest value."""
    got = got.detach().cpu()
    assert got.shape == wanted.shape, f"{what}: {tuple(got.shape)}, not {tuple(wanted.shape)}"
    bound = 1e-10 * max(1.0, float(wanted.detach().abs().max()) if wanted.numel() else 1.0)
    error = float((got - wanted.detach()).abs().max()) if wanted.numel() else 0.0
    assert error <= bound and math.isfinite(error), f"{what}: off by {error}"


def sorted_rows(coords: Tensor) -> Tensor:
    return coords[torch.argsort(_keys(coords))]


def _keys(coords: Tensor) -> Tensor:
    keys = torch.zeros(len(coords), dtype=torch.int64)
    for column in coords.cpu().long().unbind(1):
        keys = keys * 4096 + column + 1024
    return keys
