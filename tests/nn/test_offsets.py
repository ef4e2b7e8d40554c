"""Kernels with weights for some offsets."""

from __future__ import annotations

import re

import pytest
import torch

import voxmma
from voxmma import nn

from conftest import random_coords


def test_hyper_cross_is_the_centre_and_the_axes() -> None:
    assert nn.hyper_cross(3) == [
        (0, 0, 0), (1, 0, 0), (-1, 0, 0), (0, 1, 0), (0, -1, 0), (0, 0, 1), (0, 0, -1)
    ]  # fmt: skip
    assert nn.hyper_cross((5, 1, 1), 2) == [(0, 0, 0), (2, 0, 0), (4, 0, 0), (-4, 0, 0), (-2, 0, 0)]
    with pytest.raises(ValueError, match="kernel_size must be odd"):
        nn.hyper_cross(2)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_cross_is_the_sum_over_its_offsets(device: torch.device, stride: int) -> None:
    x = voxmma.Voxels(random_coords(100, 6, 2).to(device), torch.randn(100, 4, device=device).double(), 2)
    layer = nn.SparseConv3d(4, 5, 3, stride, dilation=2, device=device, dtype=torch.float64)
    before = layer.weight.detach().clone()
    cross = nn.hyper_cross(3, 2)
    assert nn.keep_offsets(layer, cross) is layer
    kept = layer.parametrizations.weight.original  # type: ignore[union-attr]
    assert kept.shape == (7, 4, 5) and [name for name, _ in layer.named_parameters()][-1].endswith("original")
    every = layer.config.geometry.offsets()
    assert torch.equal(kept, before[[every.index(offset) for offset in cross]])
    y = layer(x)
    want = layer.bias.detach().repeat(y.num_voxels, 1)  # type: ignore[union-attr]
    for offset, weight in zip(cross, kept.detach(), strict=True):
        at = y.coords * torch.tensor([1, *[stride] * 3], device=device) + torch.tensor(
            [0, *offset], device=device
        )
        rows = voxmma.lookup(x, at)
        want += torch.where(rows[:, None] >= 0, x.feats[rows.clamp(min=0)], 0.0) @ weight
    torch.testing.assert_close(y.feats, want)
    y.feats.sum().backward()
    assert kept.grad is not None and kept.grad.shape == (7, 4, 5)
    twin = nn.keep_offsets(nn.SparseConv3d(4, 5, 3, stride, dilation=2, device=device).double(), cross)
    twin.load_state_dict(layer.state_dict())
    assert torch.equal(twin(x).feats, y.feats)


def test_offsets_that_are_none_are_named() -> None:
    layer = nn.SparseConv3d(2, 2, 3)
    with pytest.raises(
        ValueError, match=re.escape("offsets[1] is (0, 0, 2), which the kernel does not have")
    ):
        nn.keep_offsets(layer, [(0, 0, 0), (0, 0, 2)])
    with pytest.raises(ValueError, match=re.escape("offsets[1] is (0, 0, 1), which comes twice")):
        nn.keep_offsets(layer, [(0, 0, 1), (0, 0, 1)])
    with pytest.raises(ValueError, match="at least one offset"):
        nn.keep_offsets(layer, [])
    with pytest.raises(TypeError, match=re.escape("offsets[0] must be three ints")):
        nn.keep_offsets(layer, [(0, 0.5, 0)])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="layer must be a sparse convolution"):
        nn.keep_offsets(torch.nn.Linear(2, 2), [(0, 0, 0)])  # type: ignore[arg-type]
