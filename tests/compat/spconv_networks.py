"""Small networks written against spconv's interface, for any module that has it, and scenes for them.

Run as a script by a Python that has spconv (its CPU build will do), it records what spconv gives:

    python tests/compat/spconv_networks.py tests/data/spconv-2.3.8.npz
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

#: Of PointToVoxel; each is met by the points below.
LIMITS = [0.51, 0.63, 0.7], [-1.0, -0.7, -1.3, 2.9, 3.2, 2.2], 5, 90, 3


def sparse_run(module: nn.Module, x: Any) -> Any:
    return module(x)


def networks(spconv: Any) -> SimpleNamespace:
    """The networks over the module `spconv`. `run` and `cat` of their forwards let other tensors through."""

    def block(*conv: Any) -> Any:
        return spconv.SparseSequential(*conv, nn.BatchNorm1d(conv[-1].out_channels, eps=1e-3), nn.ReLU())

    class Encoder(nn.Module):
        """Strided levels with paddings of all sorts, on grids of odd sizes, to a dense bird's eye view."""

        shape = (21, 34, 29)

        def __init__(self) -> None:
            super().__init__()
            self.stem = block(spconv.SubMConv3d(3, 4, 3, padding=1, bias=False, indice_key="stem"))
            self.levels = spconv.SparseSequential(
                block(spconv.SubMConv3d(4, 4, 3, padding=0, indice_key="stem")),  # padding says nothing
                block(spconv.SparseConv3d(4, 6, 3, stride=2, padding=1, bias=False, indice_key="down1")),
                block(spconv.SubMConv3d(6, 6, 3, dilation=2, bias=False)),
                block(spconv.SparseConv3d(6, 8, 3, stride=2, padding=[0, 1, 1], indice_key="down2")),
                block(spconv.SubMConv3d(8, 5, 1, padding=1)),
                spconv.SparseMaxPool3d(2, 2),
                block(spconv.SparseConv3d(5, 4, (1, 2, 2), stride=(1, 1, 1), padding=0)),
                block(spconv.SparseConv3d(4, 4, (3, 1, 1), stride=(2, 1, 1), padding=(1, 0, 0))),
            )
            self.out = spconv.ToDense()

        def forward(self, x: Any, run: Any = sparse_run, cat: Any = None) -> Any:
            return run(self.out, run(self.levels, run(self.stem, x)))

    class UNet(nn.Module):
        """Two levels down and back up over the same maps, with skip connections and a pooled branch."""

        shape = (11, 10, 13)

        def __init__(self) -> None:
            super().__init__()
            self.stem = block(spconv.SubMConv3d(3, 4, 5, padding=1, indice_key="stem"))
            self.down1 = block(spconv.SparseConv3d(4, 6, 2, stride=2, bias=False, indice_key="d1"))
            self.down2 = block(spconv.SparseConv3d(6, 8, 3, stride=2, padding=1, indice_key="d2"))
            self.up2 = block(spconv.SparseInverseConv3d(8, 6, 3, indice_key="d2", bias=False))
            self.up1 = block(spconv.SparseInverseConv3d(12, 4, 2, indice_key="d1"))
            self.pool = spconv.SparseMaxPool3d(3, 2, 1, indice_key="p")
            self.unpool = spconv.SparseInverseConv3d(4, 4, 3, indice_key="p")
            self.tail = block(spconv.SubMConv3d(12, 5, 1, bias=True))
            self.grow = spconv.SparseConvTranspose3d(5, 3, 3, stride=2, padding=1)
            self.out = spconv.ToDense()

        def forward(self, x: Any, run: Any = sparse_run, cat: Any = None) -> Any:
            top = run(self.stem, x)
            mid = run(self.down1, top)
            up = run(self.up2, run(self.down2, mid))
            up = run(self.up1, cat(mid, up))
            pooled = run(self.unpool, run(self.pool, top))
            return run(self.out, run(self.grow, run(self.tail, cat(cat(top, up), pooled))))

    class Head2d(nn.Module):
        """2-D layers on flattened voxels."""

        shape = (21, 18)

        def __init__(self) -> None:
            super().__init__()
            self.body = spconv.SparseSequential(
                block(spconv.SparseConv2d(3, 6, 3, stride=1, padding=1, bias=False, indice_key="grow")),
                block(spconv.SubMConv2d(6, 6, 3, padding=1)),
                block(spconv.SparseConv2d(6, 8, 3, stride=2, padding=1, indice_key="down")),
                spconv.SubMConv2d(8, 8, 1),
                nn.LeakyReLU(),
                block(spconv.SparseInverseConv2d(8, 4, 3, indice_key="down")),
                block(spconv.SparseConvTranspose2d(4, 4, 2, stride=2, bias=False)),
            )
            self.out = spconv.ToDense()

        def forward(self, x: Any, run: Any = sparse_run, cat: Any = None) -> Any:
            return run(self.out, run(self.body, x))

    return SimpleNamespace(Encoder=Encoder, UNet=UNet, Head2d=Head2d)


def scene(
    shape: tuple[int, ...], channels: int = 3, batch: int = 2, share: float = 0.04
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (N, ndim + 1) int32 in random order, cells of the last planes among them, and features fp64."""
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(batch, *shape, generator=generator) < share
    mask[(0, *(n - 1 for n in shape))] = True
    indices = mask.nonzero().int()
    indices = indices[torch.randperm(len(indices), generator=generator)]
    return indices, torch.randn(len(indices), channels, generator=generator, dtype=torch.float32).double()


def start(net: nn.Module) -> nn.Module:
    """Running statistics that are not those of a new norm."""
    for part in net.modules():
        if isinstance(part, nn.BatchNorm1d):
            nn.init.uniform_(part.running_mean, -0.1, 0.1)
            nn.init.uniform_(part.running_var, 0.2, 0.5)
    return net


def sparse_cat(a: Any, b: Any) -> Any:
    return a.replace_feature(torch.cat([a.features, b.features], 1))


def record(path: str) -> None:
    """Checkpoints, inputs and results of spconv, and voxels of its PointToVoxel."""
    import spconv.pytorch as spconv
    from spconv.pytorch.utils import PointToVoxel

    torch.manual_seed(0)
    made: dict[str, np.ndarray] = {}
    for name, make in vars(networks(spconv)).items():
        net = start(make())
        for part in net.modules():
            part.training = not isinstance(part, nn.BatchNorm1d)  # its CPU build adds no bias in evaluation
        indices, features = scene(make.shape)
        with torch.no_grad():
            y = net(spconv.SparseConvTensor(features.float(), indices, list(make.shape), 2), cat=sparse_cat)
        cells = (y != 0).any(1).nonzero()
        values = y.movedim(1, -1)[tuple(cells.unbind(1))]
        made |= {f"{name}.{key}": value.numpy() for key, value in net.state_dict().items()}
        made |= {f"{name}:indices": indices.numpy(), f"{name}:features": features.float().numpy()}
        made |= {f"{name}:cells": cells.short().numpy(), f"{name}:values": values.numpy()}
        made[f"{name}:shape"] = np.array(y.shape)
    points = torch.rand(500, 5) * 6 - 2
    results = PointToVoxel(*LIMITS).generate_voxel_with_id(points)
    for part, result in zip(("points", "voxels", "cells", "counts", "ids"), (points, *results), strict=True):
        made[f"voxels:{part}"] = result.numpy()
    np.savez_compressed(path, **made)


if __name__ == "__main__":
    record(sys.argv[1])
