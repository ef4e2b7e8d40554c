"""A decoder that makes a shape out of latent voxels: it refines cells and throws the empty ones away."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import nn

import voxmma.nn as vnn
from voxmma.models.blocks import Layer, conv_norm
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.sets import downsample, lookup, prune
from voxmma.sparse.tensor import Voxels


def occupancy(x: Voxels, target: CoordSet | Voxels, factor: int) -> torch.Tensor:
    """(N,) bool: which voxels of x hold one of `target`, whose grid is finer by `factor`.

    What the logits of a VAEDecoder should say: `binary_cross_entropy_with_logits(logit.feats[:, 0],
    occupancy(logit, target, factor).float())`.
    """
    cells = downsample(target, factor) if factor > 1 else target
    return lookup(cells, x.coords) >= 0


class VAEDecoder(nn.Module):
    """Latent Voxels (M, channels[0]) -> Voxels (N, channels[-1]) on a grid finer by 2^L, and logits.

    Each of the L levels makes all eight children of every voxel (a generative transposed convolution of
    kernel size 2 and stride 2), looks at neighbours (3x3x3), asks a 1x1x1 convolution which voxels are
    occupied and drops the others. The shape of the decoder in MinkowskiEngine's examples/vae.py, which starts
    from one voxel a sample; a decoder of latent grids has fewer levels, such as channels=(256, 128, 64, 32)
    and unpruned=0 for latents on an eighth of the resolution.

    Args:
        channels: L + 1 numbers, of the latents and after each level.
        unpruned: how many of the first levels keep all their voxels and have no logits.
        norm, act: make the norm for C channels and the activation.

    Raises ValueError naming the argument that does not fit.
    """

    def __init__(
        self,
        channels: Sequence[int] = (1024, 1024, 512, 256, 128, 64, 32, 16),
        *,
        unpruned: int = 1,
        norm: Layer = vnn.BatchNorm,
        act: Callable[[], nn.Module] = nn.ELU,
    ) -> None:
        super().__init__()
        if not 0 <= unpruned < len(channels):
            raise ValueError(
                f"unpruned must be 0 to the number of levels, {len(channels) - 1}, got {unpruned}"
            )
        self.unpruned = unpruned
        self.levels = nn.ModuleList()
        for c_in, c_out in itertools.pairwise(channels):
            grow = conv_norm(
                c_in, c_out, 2, 2, norm=norm, act=act, conv=vnn.SparseConvTranspose3d, generative=True
            )
            self.levels.append(vnn.Sequential(*grow, *conv_norm(c_out, c_out, 3, norm=norm, act=act)))
        self.heads = nn.ModuleList(vnn.SparseConv3d(c, 1, 1) for c in channels[1 + unpruned :])

    def forward(self, z: Voxels, target: CoordSet | Voxels | None = None) -> tuple[Voxels, list[Voxels]]:
        """Decodes z.

        Without `target` a voxel stays where its logit is above 0. With it (training), exactly those stay that
        hold one of its voxels, whatever the logits say; MinkowskiEngine's example keeps both kinds.

        Returns:
            (voxels, logits): logits[i] is (N_i, 1), of level unpruned + i before it is pruned.
        """
        x, logits = z, []
        for number, level in enumerate(self.levels):
            x = level(x)
            if number < self.unpruned:
                continue
            logit: Voxels = self.heads[number - self.unpruned](x)
            logits.append(logit)
            if target is None:
                keep = logit.feats[:, 0] > 0
            else:
                keep = occupancy(x, target, 2 ** (len(self.levels) - 1 - number))
            x = prune(x, keep)
        return x, logits
