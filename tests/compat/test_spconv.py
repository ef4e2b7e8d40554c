"""voxmma.compat.spconv: small networks written against spconv's interface, compared in fp64 with dense grids that
follow its rules, and what upstream code relies on beside the numbers."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from spconv_networks import networks, scene, sparse_cat, start

import voxmma
from voxmma import compat
from voxmma.compat import spconv as package
from voxmma.compat.spconv import pytorch as spconv

# ---- spconv's rules on dense grids ---------------------------------------------------------------------------


@dataclass
class Grid:
    """(B, C, *shape) values, zero where `mask` (B, *shape) is False; `maps`: what layers left under their keys."""

    values: torch.Tensor
    mask: torch.Tensor
    maps: dict[Any, Any] = field(default_factory=dict)

    def masked(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.mask.unsqueeze(1)

    def rows(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Grid:
        """A function of (N, C) on the voxels."""
        cells = self.mask.nonzero(as_tuple=True)
        made = function(self.values.movedim(1, -1)[cells])
        grid = made.new_zeros(*self.mask.shape, made.shape[1]).index_put(cells, made)
        return Grid(grid.movedim(-1, 1), self.mask, self.maps)


def dense_kernel(layer: Any) -> torch.Tensor:
    """(O, I, *k) of a layer's (O, *k, I); pointwise layers read memory as (I, O)."""
    weight = layer.weight
    if layer.conv1x1:
        flat = weight.reshape(layer.in_channels, layer.out_channels).t()
        return flat.reshape(*flat.shape, *[1] * layer.ndim)
    return weight.movedim(-1, 1)


def dense_conv(layer: Any, x: Grid) -> Grid:
    conv = getattr(F, f"conv{layer.ndim}d")
    back = getattr(F, f"conv_transpose{layer.ndim}d")
    weight = dense_kernel(layer)
    ones = torch.ones(1, 1, *layer.kernel_size, dtype=x.values.dtype, device=x.values.device)
    seen = x.mask.unsqueeze(1).to(x.values.dtype)
    window = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    maps = dict(x.maps)
    if layer.subm or layer.conv1x1:
        pad = [k // 2 * d for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        values, mask = conv(x.values, weight, padding=pad, dilation=layer.dilation), x.mask
    elif layer.inverse:
        window, mask = x.maps[layer.indice_key]
        whole = {**window, "padding": 0}
        far = list(itertools.chain(*([0, n] for n in reversed(mask.shape[1:]))))
        values = F.pad(back(x.values, weight.transpose(0, 1), **whole), far)
        cut = zip(window["padding"], mask.shape[1:], strict=True)
        values = values[(..., *(slice(p, p + n) for p, n in cut))]
    elif layer.transposed:
        window["output_padding"] = layer.output_padding
        values = back(x.values, weight.transpose(0, 1), **window)
        mask = back(seen, ones, **window)[:, 0] > 0.5
    else:
        values = conv(x.values, weight, **window)
        mask = conv(seen, ones, **window)[:, 0] > 0.5
        maps[layer.indice_key] = (window, x.mask)
    if layer.bias is not None:
        values = values + layer.bias.view(-1, *[1] * layer.ndim)
    made = Grid(values, mask, maps)
    return Grid(made.masked(values), mask, maps)


def dense_pool(layer: Any, x: Grid) -> Grid:
    window = {"stride": layer.stride, "padding": layer.padding, "dilation": layer.dilation}
    low = x.values.masked_fill(~x.mask.unsqueeze(1), -torch.inf)
    values = getattr(F, f"max_pool{layer.ndim}d")(low, layer.kernel_size, **window)
    mask = values[:, 0] > -torch.inf
    maps = {**x.maps, layer.indice_key: (window, x.mask)}
    return Grid(values.masked_fill(~mask.unsqueeze(1), 0), mask, maps)


def dense_run(module: nn.Module, x: Any) -> Any:
    if isinstance(module, spconv.SparseSequential):
        for part in module:
            x = dense_run(part, x)
        return x
    if isinstance(module, spconv.conv.SparseConvolution):
        return dense_conv(module, x)
    if isinstance(module, spconv.pool.SparseMaxPool):
        return dense_pool(module, x)
    if isinstance(module, spconv.ToDense):
        return x.values
    return x.rows(module)


def pair(shape: tuple[int, ...], device: torch.device) -> tuple[spconv.SparseConvTensor, Grid, Any, Any]:
    """The same scene as a SparseConvTensor and as a Grid, with the features that each was given."""
    indices, features = (t.to(device) for t in scene(shape))
    mine, theirs = (features.clone().requires_grad_() for _ in range(2))
    cells = tuple(indices.long().unbind(1))
    grid = theirs.new_zeros(2, *shape, features.shape[1]).index_put(cells, theirs).movedim(-1, 1)
    mask = torch.zeros(2, *shape, dtype=torch.bool, device=device)
    mask[cells] = True
    return spconv.SparseConvTensor(mine, indices, list(shape), 2), Grid(grid, mask), mine, theirs


def dense_cat(a: Grid, b: Grid) -> Grid:
    assert torch.equal(a.mask, b.mask)
    return Grid(torch.cat([a.values, b.values], 1), a.mask, {**a.maps, **b.maps})


def network(make: Any, device: torch.device, training: bool = True) -> Any:
    torch.manual_seed(2)
    return start(make()).double().to(device).train(training)


NETWORKS = list(vars(networks(spconv)).values())


@pytest.mark.parametrize("make", NETWORKS)
@pytest.mark.parametrize("training", [True, False])
def test_networks_and_their_gradients_equal_dense_grids(
    make: Any, training: bool, device: torch.device
) -> None:
    net = network(make, device, training)
    twin = copy.deepcopy(net)
    x, grid, mine, theirs = pair(make.shape, device)
    y, want = net(x, cat=sparse_cat), twin(grid, run=dense_run, cat=dense_cat)
    assert (want != 0).any()
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-11)
    ahead = torch.randn_like(want)
    (y * ahead).sum().backward()
    (want * ahead).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-10)
    for (name, got), expected in zip(net.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(
            got.grad, expected.grad, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )
        assert got.grad.is_contiguous()
    for got, expected in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(got, expected)
