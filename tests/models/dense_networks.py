"""Networks of voxmma.models on full grids with torch's dense layers: a mask says which cells are voxels."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import voxmma
from voxmma import models
from voxmma import nn as vnn

Grid = tuple[Tensor, Tensor]
"""(B, C, X, Y, Z) values, 0 beside the voxels, and (B, 1, X, Y, Z) bool"""


def scene(n: int, extent: int, batch: int = 2, seed: int = 0, margin: int = 16) -> Tensor:
    """(n * batch, 4) distinct random voxels of a cube `margin` cells away from 0 on each axis."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(extent**3, generator=generator)[:n] for _ in range(batch)]
    columns = [torch.stack([r // extent**2, r // extent % extent, r % extent], 1) + margin for r in rows]
    return torch.cat([F.pad(c, (1, 0), value=b) for b, c in enumerate(columns)]).int()


def randomise(net: nn.Module) -> None:
    """Weights that keep values near 1, and running statistics that are not 0 and 1."""
    for module in net.modules():
        if isinstance(module, vnn.SparseConv3d):
            k, c_in, _ = module.weight.shape
            nn.init.normal_(module.weight, std=(2 / (c_in * max(1.0, 0.4 * k))) ** 0.5)
        if isinstance(module, nn.BatchNorm1d):
            nn.init.normal_(module.running_mean, std=0.2)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.2)


def grid(x: voxmma.Voxels, side: int) -> Grid:
    filled = x.dense((side,) * 3)
    mask = x.with_feats(torch.ones_like(x.feats[:, :1])).dense((side,) * 3) > 0
    return filled, mask


def conv(layer: vnn.SparseConv3d, x: Grid, fine: Tensor | None = None) -> Grid:
    """`fine`: the mask that a transposed layer goes back to; None = all it reaches."""
    values, mask = x
    size, stride, padding = layer.kernel_size, layer.stride, layer.padding
    weight = layer.weight.unflatten(0, size)
    ones = torch.ones(1, 1, *size, dtype=values.dtype, device=values.device)
    if layer.transposed:
        made = F.conv_transpose3d(values, weight.permute(3, 4, 0, 1, 2), layer.bias, stride)
        reached = F.conv_transpose3d(mask.to(values), ones, stride=stride) > 0.5
        out = reached if fine is None else fine
    else:
        made = F.conv3d(values, weight.permute(4, 3, 0, 1, 2), layer.bias, stride, padding)
        reached = F.conv3d(mask.to(values), ones, stride=stride, padding=padding) > 0.5
        out = mask if stride == (1, 1, 1) else reached
    return made * out, out


def run(module: nn.Module, x: Grid, fine: Tensor | None = None) -> Grid:
    """A block of voxmma.models."""
    if isinstance(module, vnn.Sequential):
        for part in module:
            x = run(part, x, fine)
        return x
    if isinstance(module, models.ResidualBlock):
        y, short = run(module.body, x), run(module.shortcut, x)
        return torch.relu(y[0] + short[0]), x[1]
    if isinstance(module, vnn.SparseConv3d):
        return conv(module, x, fine)
    values, mask = x
    if isinstance(module, nn.BatchNorm1d):
        shape = (1, -1, 1, 1, 1)
        assert not module.training
        scale = module.weight / torch.sqrt(module.running_var + module.eps)
        values = (values - module.running_mean.view(shape)) * scale.view(shape) + module.bias.view(shape)
        return values * mask, mask
    if isinstance(module, nn.Identity):
        return x
    assert isinstance(module, (nn.ReLU, nn.ELU)), type(module)
    return type(module)()(values), mask


def unet(net: models.SparseUNet, x: Grid) -> Grid:
    x = run(net.stem, x)
    levels = [x]
    for down, encoder in zip(net.down, net.encoder, strict=True):
        levels.append(run(encoder, run(down, levels[-1])))
    x = levels.pop()
    for level in reversed(range(len(net.up))):
        skip = levels.pop()
        up = run(net.up[level], x, skip[1])
        x = run(net.decoder[level], (torch.cat([up[0], skip[0]], 1), skip[1]))
    return run(net.head, x)


def second(net: models.SECONDBackbone, x: Grid) -> list[Grid]:
    made = list(
        itertools.accumulate([*net.levels, net.out], lambda x, m: run(m, x), initial=run(net.stem, x))
    )
    return made[1:]


def resnet(net: models.ResNet21D, x: Grid) -> list[Grid]:
    return list(itertools.accumulate(net.stages, lambda x, m: run(m, x), initial=x))[1:]


def vae(net: models.VAEDecoder, x: Grid, target: Tensor | None) -> tuple[Grid, list[Grid]]:
    """`target`: its mask (B, 1, X, Y, Z) at the finest level, or None."""
    logits = []
    for number, level in enumerate(net.levels):
        x = run(level, x)
        if number < net.unpruned:
            continue
        logits.append(run(net.heads[number - net.unpruned], x))
        if target is None:
            keep = logits[-1][0] > 0
        else:
            keep = F.max_pool3d(target.to(x[0]), 2 ** (len(net.levels) - 1 - number)) > 0
        x = x[0] * (x[1] & keep), x[1] & keep
    return x, logits
