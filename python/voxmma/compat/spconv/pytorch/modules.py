"""SparseModule, what holds and names such modules, and norms and activations of SparseConvTensors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from voxmma.compat.spconv.core import missing
from voxmma.compat.spconv.pytorch.core import SparseConvTensor
from voxmma.nn.modules.fusing import (
    behind_training,
    epilogue_of,
    train,
    training_norm_of,
    untouched,
    watched,
)


class SparseModule(nn.Module):
    """Base of all layers that take a SparseConvTensor; SparseSequential gives other modules its features."""

    _convolves = False
    """whether it is a SparseConvolution"""

    def __init__(self, name: str | None = None) -> None:
        nn.Module.__init__(self)
        self.name = name
        self._sparse_unique_name = ""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Here and not in the layers, so that code which replaces it converts 1.x weights its own way.
        weight = state_dict.get(f"{prefix}weight")
        if isinstance(weight, torch.Tensor):
            state_dict[f"{prefix}weight"] = self._converted(weight)
        nn.Module._load_from_state_dict(self, state_dict, prefix, *rest)

    def _converted(self, weight: torch.Tensor) -> torch.Tensor:
        """A checkpoint's weight in this module's layout."""
        return weight


def is_spconv_module(module: nn.Module) -> bool:
    """Whether the module takes SparseConvTensors."""
    return isinstance(module, _TAKE_TENSORS)


def is_sparse_conv(module: nn.Module) -> bool:
    """Whether the module is a sparse convolution."""
    return isinstance(module, SparseModule) and module._convolves


def assign_name_for_sparse_modules(module: nn.Module) -> None:
    """Names every SparseModule by its path in `module`, for `SparseConvTensor.benchmark`."""
    for path, part in module.named_modules():
        if isinstance(part, SparseModule):
            part.name = path
            part._sparse_unique_name = path


def on_features(module: nn.Module, x: SparseConvTensor) -> SparseConvTensor:
    """A module of (N, C) on the features; the record of the convolution that made them comes along."""
    if x._features.shape[0] == 0 and isinstance(module, nn.modules.batchnorm._BatchNorm):
        return x  # which has no statistics of nothing
    made = x._with(module(x._features))
    if made._record is not None:
        made._applied = (*x._applied, type(module).__name__)
    return made


class SparseSequential(SparseModule):
    """Modules one after another: SparseModules are given the tensor, others its features.

    SparseSequential(a, b), SparseSequential(OrderedDict(a=a, b=b)) or SparseSequential(a=a, b=b). Of what is
    no SparseConvTensor any more (ToDense), all modules are given the whole. Batch norms leave an empty tensor
    as it is. In evaluation, without gradients, a convolution and the batch norm and activation behind it run
    as one launch, as in voxmma.nn.Sequential; in training, on a GPU, the batch norm and activation do.
    """

    def __init__(self, *args: Any, **kwargs: nn.Module) -> None:
        super().__init__()
        named: Mapping[str, nn.Module] = {str(i): module for i, module in enumerate(args)}
        if len(args) == 1 and isinstance(args[0], OrderedDict):
            named = args[0]
        for name, module in (*named.items(), *kwargs.items()):
            if name in self._modules:
                raise ValueError(f"two modules are named {name!r}")
            self.add_module(name, module)

    def __getitem__(self, idx: int) -> Any:
        if not -len(self) <= idx < len(self):
            raise IndexError(f"index {idx} is out of range")
        return list(self._modules.values())[idx]

    def __len__(self) -> int:
        return len(self._modules)

    def add(self, module: nn.Module, name: str | None = None) -> None:
        """Appends a module; its name is its number by default."""
        name = str(len(self)) if name is None else name
        if name in self._modules:
            raise KeyError(f"a module is named {name!r} already")
        self.add_module(name, module)

    def forward(self, input: Any) -> Any:
        layers: list[Any] = list(self._modules.values())
        at = 0
        single = torch.compiler.is_compiling() or watched(getattr(input, "_features", input))
        while at < len(layers):
            layer = layers[at]
            at += 1
            if not isinstance(input, SparseConvTensor):
                input = layer(input)
                continue
            if not single and _opens(layer):
                then, end = epilogue_of(layers, at, input._features)
                input = layer.forward(input, None, then)  # nothing watches its call
                at = end if input._applied else at
                continue
            if isinstance(layer, _TAKE_TENSORS):
                input = layer(input)
                continue
            found = None if single else training_norm_of(layer, input._features)
            if found is not None:
                x = input.voxels
                end = at + behind_training(found, layers, at, x)
                if end > at:
                    y = train(found, layers[at:end], x)
                    input, at = input._with(y._feats), end
                    input._record, input._applied = y._record, y._applied
                    continue
            input = on_features(layer, input)
        return input


def _opens(layer: nn.Module) -> bool:
    """Whether a launch of this layer can take along what is behind it: a convolution as it was made."""
    kind: Any = type(layer)
    fuses = getattr(kind, "fused_forward", None)
    return fuses is not None and fuses is kind.forward and untouched(layer) and layer._activate is None


class ToDense(SparseModule):
    """SparseConvTensor -> dense grid (batch, C, *spatial_shape)."""

    def forward(self, x: SparseConvTensor) -> torch.Tensor:
        return x.dense()


class RemoveGrid(SparseModule):
    """Drops `grid`."""

    def forward(self, x: SparseConvTensor) -> SparseConvTensor:
        x.grid = None
        return x


class _OnFeatures:
    """Mixin in front of a torch layer: its forward on the features of a SparseConvTensor, or on a tensor."""

    def forward(self, input: Any) -> Any:
        if not isinstance(input, SparseConvTensor):
            return super().forward(input)  # type: ignore[misc]
        return input._with(super().forward(input._features))  # type: ignore[misc]


class SparseBatchNorm(_OnFeatures, nn.BatchNorm1d):
    """torch.nn.BatchNorm1d on SparseConvTensors."""


class SparseReLU(_OnFeatures, nn.ReLU):
    """torch.nn.ReLU on SparseConvTensors."""


class SparseIdentity(nn.Identity):
    """torch.nn.Identity."""


_TAKE_TENSORS = (SparseModule, SparseBatchNorm, SparseReLU, SparseIdentity)


def __getattr__(name: str) -> object:
    raise AttributeError(missing("pytorch.modules", name))
