"""Layers that hold other layers, or choose voxels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from voxmma.nn.functional import activation
from voxmma.nn.modules.fusing import Add, run_layers, untouched, watched
from voxmma.sparse.sets import prune
from voxmma.sparse.tensor import Voxels


class Lift(nn.Module):
    """Any module of a tensor (N, C) -> (N, C') as a module of Voxels: `Lift(MyActivation())`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Any:
        return activation.apply_module(self.module, x)


class Prune(nn.Module):
    """Keeps the voxels where the mask (N,) bool is True: `Prune()(x, mask)`; see voxmma.sparse.sets.prune."""

    def forward(self, x: Voxels, mask: torch.Tensor) -> Voxels:
        return prune(x, mask)


class Sequential(nn.Sequential):
    """torch.nn.Sequential over Voxels in which plain torch modules work on the features.

    Plain is a module made of torch's own classes alone, inside too; it is given the features (N, C). All
    others, your own included, are given the Voxels; `Lift` wraps your own module of a tensor. Once a module
    returns no Voxels (global pooling), the rest is called on what it returned. A convolution and the norm in
    evaluation and activation behind it run as one launch where they can (fusing.run_layers).
    """

    def forward(self, x: Any) -> Any:
        return run_layers(list(self), x)


def residual(body: nn.Module, x: Voxels, shortcut: Voxels, act: nn.Module) -> Any:
    """`act(body(x) + shortcut)`; the sum and `act` in the launch of the body's last convolution where they
    can be (`run_layers`)."""
    return run_layers([*_layers_of(body, x), Add(shortcut), act], x)


def cat_behind(body: nn.Module, x: Voxels, *others: Voxels) -> Any:
    """`functional.cat(body(x), *others)`; the body's last launch writes into its columns of the wider tensor
    where it can (`run_layers`)."""
    return run_layers(_layers_of(body, x), x, others)


def _layers_of(body: nn.Module, x: Voxels) -> list[nn.Module | Add]:
    inner = type(body) is Sequential and untouched(body) and not watched(x)
    return list(body) if inner else [body]  # type: ignore[call-overload]
