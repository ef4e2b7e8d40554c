"""Layers that follow each other, run in fewer launches where nobody can tell but by the rounding."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import has_torch_function

from voxmma.dispatch.calls import call
from voxmma.dispatch.epilogue import Activation, Epilogue, Norm, one_pass
from voxmma.dispatch.observers import observed
from voxmma.nn.functional.activation import apply_module
from voxmma.nn.functional.container import cat
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

_RELU, _SILU, _GELU = (Activation(n.lower(), 0.0, n) for n in ("ReLU", "SiLU", "GELU"))

#: Activations of the epilogue, by exact class. None: the layer is set to something else.
_ACTIVATIONS: dict[type, Callable[[Any], Activation | None]] = {}
for _ours, _theirs, _kind in (
    (activation.ReLU, nn.ReLU, lambda layer: _RELU),
    (
        activation.LeakyReLU,
        nn.LeakyReLU,
        lambda layer: Activation("leaky_relu", float(layer.negative_slope), "LeakyReLU"),
    ),
    (activation.SiLU, nn.SiLU, lambda layer: _SILU),
    (activation.GELU, nn.GELU, lambda layer: _GELU if layer.approximate == "none" else None),
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
    try:
        mean, var, weight, bias = (
            own["running_mean"],
            own["running_var"],
            parameters["weight"],
            parameters["bias"],
        )
    except KeyError:  # parametrized
        return None
    return None if mean is None or var is None else Norm(mean, var, weight, bias, layer.eps, name)


def training_norm_of(layer: Any, x: Tensor) -> Norm | None:
    """A layer in training as a norm by the statistics of its rows, on the device of `x`, and of this process;
    None where it is none, counts batches for an average, or has no kernels."""
    name = _NORMS.get(type(layer))
    if name is None or not layer.training or not x.is_cuda or layer.momentum is None:
        return None
    if not untouched(layer) or (type(layer) is norm.SyncBatchNorm and dist.is_initialized()):
        return None
    own, parameters = layer._buffers, layer._parameters
    if "weight" not in parameters or "bias" not in parameters:
        return None
    numbers = own.get("running_mean"), own.get("running_var"), parameters["weight"], parameters["bias"]
    return Norm(*numbers, layer.eps, name, layer.momentum, own.get("num_batches_tracked"))


def activation_of(layer: Any) -> Activation | None:
    """A layer as an activation of the epilogue; None where it is none."""
    what = _ACTIVATIONS.get(type(layer))
    return what(layer) if what is not None and untouched(layer) else None


def epilogue_of(layers: Sequence[nn.Module | Add], first: int, x: Tensor) -> tuple[Epilogue | None, int]:
    """What may follow a convolution of rows `x`, of the layers from `first` on: norm, sum, activation, in
    this order; and the layer after it. None where nothing may."""
    at, end = first, len(layers)
    found = residual = act = None
    if at < end:
        after: Any = layers[at]
        if type(after) in _NORMS:
            found = training_norm_of(after, x) if after.training else norm_of(after)
            at += found is not None
    add = layers[at] if at < end else None
    if isinstance(add, Add):
        residual = add.residual
        at += 1
    if at < end:
        act = activation_of(layers[at])
        at += act is not None
    return (None if at == first else Epilogue(found, residual, act)), at


def run_layers(layers: Sequence[nn.Module | Add], x: Any, beside: tuple[Voxels, ...] = ()) -> Any:
    """The layers one after another on Voxels; plain torch modules (`is_plain`) on the features. The result is
    concatenated with `beside`, whose columns the last launch leaves free where it can.

    A convolution of voxmma.nn and the BatchNorm, sum and activation (ReLU, LeakyReLU, SiLU, GELU with erf)
    behind it run as one call where none of them has a hook or a forward of its own: with the BatchNorm in
    evaluation and no gradient asked for one launch, rounded once at its end; in training, on a GPU, one node
    of the graph, in which norm, sum and activation share their passes, as without a convolution before them.
    Otherwise each runs by itself.
    """
    at, count = 0, len(layers)
    single = torch.compiler.is_compiling() or watched(x)
    while at < count:
        layer = layers[at]
        at += 1
        if isinstance(layer, Add):
            x = layer.residual + x if layer.first else x + layer.residual
            continue
        if not single and isinstance(x, Voxels):
            if type(layer) in _CONVOLUTIONS and untouched(layer):
                conv: Any = layer
                own = conv._parameters
                if "weight" in own and "bias" in own:
                    then, end = epilogue_of(layers, at, x._feats)
                    last = end == count and bool(beside) and _writes_beside(then)
                    if last:
                        then = (then or Epilogue())._replace(beside=beside)
                    x = call(conv.config, x, own["weight"], own["bias"], then=then)
                    if then is not None and x._applied:
                        at, beside = end, () if last else beside
                    continue
            trained = training_norm_of(layer, x._feats)
            end = at if trained is None else at + behind_training(trained, layers, at, x)
            if trained is not None and end > at:
                x = train(trained, layers[at:end], x)
                at = end
                continue
        x = apply_module(layer, x) if is_plain(layer) else layer(x)
    return cat(x, *beside) if beside else x


def _writes_beside(then: Epilogue | None) -> bool:
    """Whether a launch may write into columns of a wider tensor: not in training, nor where a mode records
    operators."""
    return not (then is not None and then.trains()) and torch._C._len_torch_dispatch_stack() == 0


def behind_training(found: Norm, layers: Sequence[nn.Module | Add], first: int, x: Voxels) -> int:
    """How many layers behind a norm in training, the `first` of them there, run in its pass: a sum, an
    activation."""
    at, rows = first, None
    add = layers[first] if first < len(layers) else None
    if isinstance(add, Add):
        if add.residual._coord_set is not x._coord_set:
            return 0
        at, rows = first + 1, add.residual._feats
    at += int(at < len(layers) and activation_of(layers[at]) is not None)
    numbers = found.weight, found.bias, found.mean, found.var
    return at - first if at > first and one_pass(x._feats, rows, numbers) else 0


def train(found: Norm, behind: Sequence[nn.Module | Add], x: Voxels) -> Voxels:
    """A norm in training and what is behind it, as torch's layer counts batches and keeps statistics."""
    add = behind[0] if isinstance(behind[0], Add) else None
    act = activation_of(behind[-1])
    kind, slope, name = act or ("none", 0.0, "")
    rows = None if add is None else add.residual._feats
    numbers = found.weight, found.bias, found.mean, found.var, found.batches, found.momentum, found.eps
    y, _, _ = torch.ops.voxmma.norm_act(x._feats, *numbers, rows, kind, slope)
    if add is not None:
        return Voxels._make(x._coord_set, y, x._stride)
    return x._after(y, f"{found.name} (fused)")._after(y, f"{name} (fused)")
