"""Offsets of kernels."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from voxmma.compat.torchsparse.utils.utils import make_triple

__all__ = ["get_kernel_offsets"]


def get_kernel_offsets(size: Any, stride: Any = 1, dilation: Any = 1, device: Any = "cpu") -> torch.Tensor:
    """(K, 3) int32 offsets of a kernel, times stride and dilation: from -((size - 1) // 2) on along each
    axis, x fastest where K is odd, else z."""
    axes = [
        [(k - (n - 1) // 2) * s * d for k in range(n)]
        for n, s, d in zip(make_triple(size), make_triple(stride), make_triple(dilation), strict=True)
    ]
    if math.prod(map(len, axes)) % 2:
        offsets = [offset[::-1] for offset in itertools.product(*reversed(axes))]
    else:
        offsets = list(itertools.product(*axes))
    return torch.tensor(offsets, dtype=torch.int32, device=device)
