"""A residual network that names shapes in generated images, once per precision policy.

python examples/train_resnet.py --schedule 0=auto_mixed_bf16,100=always_f32
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from common import Task, default_policies, main

SHAPES = ("disc", "ring", "square", "frame", "cross", "stripes")
SIZE = 20


class Block(nn.Module):
    """Two convolutions around a skip connection, halving the picture when stride is 2."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.second, self.norm2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.skip = nn.Identity() if c_in == c_out and stride == 1 else nn.Conv2d(c_in, c_out, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.second(F.relu(self.norm1(self.first(x)))))
        return F.relu(y + self.skip(x))


def network() -> nn.Module:
    """1 x SIZE x SIZE to logits."""
    return nn.Sequential(
        Block(1, 16, 1),
        Block(16, 32, 2),
        Block(32, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, len(SHAPES)),
    )


def images(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Noisy pictures (count, 1, SIZE, SIZE) of one shape each, and the numbers of their names."""
    label = torch.randint(len(SHAPES), (count,), generator=generator)
    place, size, noise = (
        torch.rand(count, 2, generator=generator),
        torch.rand(count, generator=generator),
        0.35,
    )
    axis = torch.arange(SIZE) + 0.5
    x = axis[None, None, :] - (0.35 + 0.3 * place[:, 0, None, None]) * SIZE
    y = axis[None, :, None] - (0.35 + 0.3 * place[:, 1, None, None]) * SIZE
    r = (0.2 + 0.12 * size[:, None, None]) * SIZE
    round_, square = (x**2 + y**2).sqrt() / r, torch.maximum(x.abs(), y.abs()) / r
    drawn = torch.stack(
        [
            round_ < 1,
            (round_ < 1) & (round_ > 0.6),
            square < 1,
            (square < 1) & (square > 0.65),
            (square < 1) & (torch.minimum(x.abs(), y.abs()) < 0.25 * r),
            (square < 1) & (torch.sin(x * 4.5 / r * 2) > 0),
        ]
    )
    picture = drawn[label, torch.arange(count)].float() + noise * torch.randn(
        count, SIZE, SIZE, generator=generator
    )
    return picture[:, None], label


def task(device: torch.device) -> Task:
    """Fresh pictures in every step."""

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        picture, label = images(64, torch.Generator().manual_seed(step + (1 << 40 if step < 0 else 0)))
        return picture.to(device), label.to(device)

    return Task("resnet", network, batch, F.cross_entropy, 150, policies=default_policies(device))


if __name__ == "__main__":
    main(task)
