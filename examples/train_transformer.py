"""A toy transformer that learns to add numbers digit by digit, once per precision policy.

python examples/train_transformer.py --steps 300 --policies always_f32,auto_mixed_bf16
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from common import Task, default_policies, main

DIGITS = 3


class Adder(nn.Module):
    """Reads two numbers of DIGITS digits, lowest digit first, side by side; answers the digits of the sum."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(10, width), nn.Embedding(10, width)
        self.place = nn.Parameter(torch.randn(DIGITS + 1, width) * 0.3)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, digits: torch.Tensor) -> torch.Tensor:
        """digits (N, 2, DIGITS + 1) int64 to logits (N, DIGITS + 1, 10)."""
        x = self.first(digits[:, 0]) + self.second(digits[:, 1]) + self.place
        out: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return out


def task(device: torch.device) -> Task:
    """Random sums; held-out ones come from another seed."""

    def digits(number: torch.Tensor) -> torch.Tensor:
        return torch.stack([number // 10**i % 10 for i in range(DIGITS + 1)], dim=1)

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step + (1 << 40 if step < 0 else 0))
        a, b = torch.randint(10**DIGITS, (2, 128), generator=generator)
        return torch.stack([digits(a), digits(b)], dim=1).to(device), digits(a + b).to(device)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out.flatten(0, 1), target.flatten())

    return Task("transformer", Adder, batch, loss, 300, policies=default_policies(device))


if __name__ == "__main__":
    main(task)
