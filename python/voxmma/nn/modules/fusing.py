"""Layers that follow each other, run in fewer launches where nobody can tell but by the rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import has_torch_function

from voxmma.dispatch.calls import call
from voxmma.dispatch.epilogue import Activation, Epilogue, Norm
from voxmma.dispatch.observers import observed
from voxmma.nn.functional.activation import apply_module
from voxmma.nn.functional.norm import norm_act, one_pass
from voxmma.nn.modules import activation, norm
from voxmma.nn.modules.sparse_conv import _PLAIN as _CONVOLUTIONS
from voxmma.sparse.tensor import Voxels


class Add(NamedTuple):
    """In a list of layers: the sum with these voxels. `first`: they stand on the left of it."""

    residual: Voxels
    first: bool = False


#: Layers whose evaluation is a scale and a shift, by their exact class, and the name that explain() has.
_NORMS: dict[type, str] = {
    norm.BatchNorm: "BatchNorm",
    norm.SyncBatchNorm: "BatchNorm",
    nn.BatchNorm1d: "BatchNorm1d",
}

#: Activations of the epilogue, by exact class: kind and slope. None: the layer is set to something else.
_ACTIVATIONS: dict[type, Callable[[Any], tuple[str, float] | None]] = {}
for _ours, _theirs, _kind in (
    (activation.ReLU, nn.ReLU, lambda layer: ("relu", 0.0)),
    (activation.LeakyReLU, nn.LeakyReLU, lambda layer: ("leaky_relu", float(layer.negative_slope))),
    (activation.SiLU, nn.SiLU, lambda layer: ("silu", 0.0)),
    (activation.GELU, nn.GELU, lambda layer: ("gelu", 0.0) if layer.approximate == "none" else None),
):
    _ACTIVATIONS[_ours] = _ACTIVATIONS[_theirs] = _kind


def is_plain(module: nn.Module) -> bool:
    """Whether every module inside is of a class that, bases included, comes from torch."""
    of_torch = _of_torch if torch.compiler.is_compiling() else _known_of_torch
    return of_torch(type(module)) and all(of_torch(type(part)) for part in module.modules())


def _of_torch(cls: type) -> bool:
    return all(
        base.__module__.partition(".")[0] in ("torch", "builtins", "typing", "abc") for base in cls.__mro__
    )


_known_of_torch = functools.lru_cache(maxsize=256)(_of_torch)


def untouched(module: nn.Module) -> bool:
    """Whether calling the module is running the forward of its class: no hook, no forward of its own."""
    state = module.__dict__
    return not (
        state["_forward_hooks"]
        or state["_forward_pre_hooks"]
        or state["_backward_hooks"]
        or state["_backward_pre_hooks"]
        or "forward" in state
    )


def watched(x: Any) -> bool:
    """Whether somebody wants to see every module or function called: hooks of all modules, a verification, a
    mode or a subclass of torch's functions."""
    seen: bool = nn.modules.module._has_any_global_hook()
    return seen or observed() or has_torch_function((x._feats if isinstance(x, Voxels) else x,))


def norm_of(layer: Any) -> Norm | None:
    """A layer as a norm by running statistics; None where it is none, or takes those of its input."""
    name = _NORMS.get(type(layer))
    if name is None or layer.training or not untouched(layer):
        return None
    own, parameters = layer._buffers, layer._parameters
    mean, var = own.get("running_mean"), own.get("running_var")
    if mean is None or var is None or "weight" not in parameters or "bias" not in parameters:
        return None
    return Norm(mean, var, parameters["weight"], parameters["bias"], layer.eps, name)


def activation_of(layer: Any) -> Activation | None:
    """A layer as an activation of the epilogue; None where it is none."""
    what = _ACTIVATIONS.get(type(layer))
    found = what(layer) if what is not None and untouched(layer) else None
    return None if found is None else Activation(*found, type(layer).__name__)


def epilogue_of(layers: Sequence[nn.Module | Add], first: int) -> tuple[Epilogue | None, int]:
    """What may follow a convolution, of the layers from `first` on: norm, sum, activation, in this order; and
    the layer after it. None where nothing may."""
    at, end = first, len(layers)
    found = norm_of(layers[at]) if at < end else None
    at += found is not None
    add = layers[at] if at < end else None
    at += isinstance(add, Add)
    act = activation_of(layers[at]) if at < end else None
    at += act is not None
    if at == first:
        return None, at
    if isinstance(add, Add):
        return Epilogue(found, add.residual, act, add.first), at
    return Epilogue(found, None, act), at


def run_layers(layers: Sequence[nn.Module | Add], x: Any) -> Any:
    """The layers one after another on Voxels; plain torch modules (`is_plain`) on the features.

    A convolution of voxmma.nn and the BatchNorm in evaluation, sum and activation (ReLU, LeakyReLU, SiLU,
    GELU with erf) behind it run as one launch, rounded once at its end, where none of them has a hook or a
    forward of its own and no gradient is asked for. Otherwise each runs by itself.
    """
    at = 0
    single = torch.compiler.is_compiling() or watched(x)
    while at < len(layers):
        layer = layers[at]
        at += 1
        if isinstance(layer, Add):
            x = layer.residual + x if layer.first else x + layer.residual
            continue
        if not single and type(layer) in _CONVOLUTIONS and isinstance(x, Voxels) and untouched(layer):
            conv: Any = layer
            own = conv._parameters
            then, end = epilogue_of(layers, at)
            if then is not None and "weight" in own and "bias" in own:
                x = call(conv.config, x, own["weight"], own["bias"], then=then)
                at = end
                continue
        if not single and type(layer) in _NORMS and layer.training and isinstance(x, Voxels):
            end = at + behind_training(layer, layers, at, x)
            if end > at:
                x = train(layer, layers[at:end], x)
                at = end
                continue
        x = apply_module(layer, x) if is_plain(layer) else layer(x)
    return x


def behind_training(layer: Any, layers: Sequence[nn.Module | Add], first: int, x: Voxels) -> int:
    """How many layers behind a norm in training, the `first` of them there, run in its pass: a sum, an
    activation. Only on a GPU, where there are kernels for it, and by the statistics of this process."""
    if not x._feats.is_cuda or not untouched(layer) or layer.momentum is None:
        return 0
    if type(layer) is norm.SyncBatchNorm and dist.is_initialized():
        return 0
    at, rows = first, None
    add = layers[first] if first < len(layers) else None
    if isinstance(add, Add):
        if add.residual._coord_set is not x._coord_set:
            return 0
        at, rows = first + 1, add.residual._feats
    at += int(at < len(layers) and activation_of(layers[at]) is not None)
    numbers = layer.weight, layer.bias, layer.running_mean, layer.running_var
    return at - first if at > first and one_pass(x._feats, rows, numbers) else 0


def train(layer: Any, behind: Sequence[nn.Module | Add], x: Voxels) -> Voxels:
    """A norm in training and what is behind it, as torch's layer counts batches and keeps statistics."""
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
    add = behind[0] if isinstance(behind[0], Add) else None
    act = activation_of(behind[-1])
    kind, slope, name = act or ("none", 0.0, "")
    rows = None if add is None else add.residual._feats
    running = layer.running_mean, layer.running_var
    numbers = (*running, layer.weight, layer.bias, layer.momentum, layer.eps)
    y = norm_act(x._feats, *numbers, rows, kind, slope)
    if add is not None:
        return Voxels._make(x._coord_set, y, x._stride)
    return x._after(y, f"{_NORMS[type(layer)]} (fused)")._after(y, f"{name} (fused)")
