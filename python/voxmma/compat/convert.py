"""Checkpoints of other sparse convolution libraries: their weight layouts, and loading that says what it did.

    report = voxmma.convert.load(model, torch.load("spconv.pth"), "spconv", rename={"conv_input.0": "stem.0"})

A layout is the order in which a library stores the weights of a convolution; the keys are those of the
model, and `rename` maps them.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from voxmma._types import integers, planar, positive, positive_triple
from voxmma.nn.modules.sparse_conv import SparseConv3d

#: Axes of the stored tensor, slowest first: 0, 1, 2 = kernel axes, along the first, second and third spatial
#: column; i, o = input and output channels.
LAYOUTS = {
    "voxmma": "012io",
    "spconv": "o012i",  # 2.2 and later, spconv-triton; K = 1: see flat_1x1
    "spconv1": "012io",  # 1.x
    "mmcv": "012io",
    "spconv2.1": "012oi",  # the Native algorithm of 2.1
    "flexgemm": "o012i",
    "torch": "oi012",  # Conv3d
    "torch_transposed": "io012",  # ConvTranspose3d
    "warpconvnet": "012io",
    "minkowski": "210io",
    "torchsparse": "210io",  # 2.1, odd K; even K: "012io"
    "fvdb": "oi012",
}


def convert_weight(
    weight: torch.Tensor,
    layout: str,
    kernel_size: int | Sequence[int],
    groups: int = 1,
    *,
    stride: int | Sequence[int] = 1,
    axes: str = "xyz",
    flat_1x1: bool | None = None,
) -> torch.Tensor:
    """A convolution's weight of another library as voxmma's: (K, C_in, C_out), contiguous, same dtype.

    Args:
        weight: as stored; kernel axes may be separate, flattened to one of K, or left out when K = 1. Where
            the kernel has one cell in z, as in 2-D layers, that axis may be missing.
        layout: a name of `LAYOUTS`.
        kernel_size: of the layer, one int or three (two for 2-D layers), for x, y, z.
        groups: result (K, groups, C_in / groups, C_out / groups), from a layout whose tensor holds
            (C_in / groups, C_out), or for 'torch_transposed' (C_in, C_out / groups).
        stride: of the layer.
        axes: which of our columns each of the kernel's stored axes runs along. 'xyz': coordinates are handed
            over with the columns they had there; 'zyx': theirs were (batch, z, y, x) and ours are
            (batch, x, y, z), for 2-D layers (batch, y, x) and (batch, x, y).
        flat_1x1: for layout 'spconv' alone, which in submanifold and other 1x1 layers of stride 1 multiplies
            by the memory of the weight read as (C_in, C_out), whatever its shape says, but in strided ones
            does not. True or False says which; default: by `stride`.

    Raises TypeError or ValueError naming the argument, the layout or the shape that does not fit.
    """
    _check_options(layout, axes, flat_1x1)
    if not isinstance(weight, torch.Tensor):
        raise TypeError(f"weight must be a tensor, got {type(weight).__name__}")
    size = integers(kernel_size, 3)
    if size is None:
        size = planar(kernel_size, "kernel_size")
    groups, step = positive(groups, "groups"), positive_triple(stride, "stride")
    volume = math.prod(size)
    order = LAYOUTS[layout]
    if layout == "torchsparse" and volume % 2 == 0:
        order = "012io"
    stored_size = {str(place): size["xyz".index(axis)] for place, axis in enumerate(axes)}
    first = min(order.index(place) for place in "012")
    lead, trail = first, len(order) - first - 3  # channel axes before and after the kernel's
    channels = [*weight.shape[:lead], *weight.shape[weight.dim() - trail :]]
    stored = tuple(weight.shape[lead : weight.dim() - trail])
    kernel = [place for place in order if place in stored_size]
    flat = {tuple(stored_size[place] for place in kernel), (volume,)}
    if size[2] == 1:
        flat.add(tuple(stored_size[place] for place in kernel if axes[int(place)] != "z"))
    if weight.dim() < 2 or (stored not in flat and not (volume == 1 and set(stored) <= {1})):
        raise ValueError(
            f"weight {tuple(weight.shape)} is not of layout {layout!r} ({order}) with kernel_size {size}"
        )
    length = dict(zip((axis for axis in order if axis in "io"), channels, strict=True)) | stored_size
    if length["i" if layout == "torch_transposed" else "o"] % groups:
        raise ValueError(f"weight {tuple(weight.shape)} of layout {layout!r} has no {groups} groups")
    if layout == "spconv" and volume == 1 and (step == (1, 1, 1) if flat_1x1 is None else flat_1x1):
        order = "012io"
    split = weight.reshape([length[axis] for axis in order])
    ours = [str(axes.index(axis)) for axis in "xyz"]
    made = split.permute([order.index(axis) for axis in (*ours, "i", "o")])
    made = made.reshape(volume, length["i"], length["o"])
    if groups > 1:
        if layout == "torch_transposed":
            made = made.unflatten(1, (groups, -1))
        else:
            made = made.unflatten(2, (groups, -1)).transpose(1, 2)
    return made.contiguous()


_SHOWN = 12
"""keys of a kind that a report prints"""


@dataclass
class LoadReport:
    """What `load` did, by key of the model: `loaded`, `missing` (kept their values), `unexpected` (of the
    checkpoint, after renaming, not used) and `mismatched` (key: what is wrong with its shape). Printed, it
    names the first ones of each."""

    loaded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: dict[str, str] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return not (self.missing or self.unexpected or self.mismatched)

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded"]
        for name, keys in (("missing in the checkpoint", self.missing), ("unexpected", self.unexpected)):
            if keys:
                lines.append(f"{len(keys)} {name}: {', '.join(keys[:_SHOWN])}{_rest(keys)}")
        wrong = [f"{key}: {problem}" for key, problem in self.mismatched.items()]
        return "\n".join([*lines, *wrong[:_SHOWN]]) + _rest(wrong)


def _rest(shown: Sequence[str]) -> str:
    return f" and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""


def load(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    layout: str,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
    axes: str = "xyz",
    flat_1x1: bool | Mapping[str, bool] | None = None,
) -> LoadReport:
    """Loads a checkpoint of another library into `module`, converting the weights of its convolutions.

    Args:
        module: a model of voxmma layers, subclasses of them, and others.
        state_dict: the checkpoint. The weight of a voxmma convolution goes through `convert_weight`; with
            layouts 'minkowski' and 'torchsparse' it may be named `kernel`. Vectors may be (1, C) with layout
            'minkowski', as its biases and norms are. Everything else is copied as it is. An entry that is no
            tensor (`epoch`, a nested dict, None) is reported as unexpected.
        layout: a name of `LAYOUTS`. 'torch' stands for 'torch_transposed' in transposed layers.
        strict: True loads all or nothing. False loads what fits and warns about everything else.
        rename: {prefix of the checkpoint: prefix of the model} (whole path parts, the longest match counts),
            or a function of the key.
        axes, flat_1x1: see `convert_weight`. flat_1x1 may be a dict of the model's layers: {"head.0": False}.

    Returns a LoadReport. Raises RuntimeError with the report when `strict` and a key is missing, unexpected
    or does not fit; ValueError for an unknown layout, `axes`, a layer of `flat_1x1` that is not there, or two
    keys of one name. The module is unchanged whenever this raises, in the middle of copying too.
    """
    _check_options(layout, axes, flat_1x1)
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict of tensors, got {type(state_dict).__name__}")
    own: dict[str, Any] = module.state_dict(keep_vars=True)
    weights, others = _weights(module)
    flat = dict(flat_1x1) if isinstance(flat_1x1, Mapping) else {}
    for path in flat:
        if id(own.get(f"{path}.weight" if path else "weight")) not in weights:
            raise ValueError(f"flat_1x1 names {path!r}, which is no convolution of the model")
    report, values = LoadReport(), {}

    def own_name(key: str) -> str:
        """What a key of the checkpoint is called in the model."""
        name = _renamed(key, rename)
        path, _, leaf = name.rpartition(".")
        if layout in ("minkowski", "torchsparse") and leaf == "kernel" and name not in own:
            weight_name = f"{path}.weight" if path else "weight"
            name = weight_name if id(own.get(weight_name)) in weights else name
        return name

    for key, value in state_dict.items():
        name = own_name(key) if isinstance(key, str) else repr(key)
        path = name.rpartition(".")[0]
        if name in values or name in report.mismatched:
            raise ValueError(f"two keys of the checkpoint become {name!r}; the second is {key!r}")
        if name not in own:
            report.unexpected.append(name)
            continue
        target = own[name]
        if not isinstance(target, torch.Tensor):  # extra state of a module, which checks it
            values[name] = value
            continue
        try:
            _check(value, target)
            if id(target) in weights:
                layer = weights[id(target)]
                choice = flat.get(path) if isinstance(flat_1x1, Mapping) else flat_1x1
                value = _convert(value, layer, layout, axes, choice)
            elif id(target) in others and layout != "voxmma":
                raise ValueError(
                    f"a weight of layout {layout!r} cannot be told for it: remove parametrizations first"
                )
            elif layout == "minkowski" and target.dim() == 1 and value.dim() == 2 and len(value) == 1:
                value = value[0]
            if value.shape != target.shape:
                raise ValueError(f"shape {tuple(value.shape)}, the model has {tuple(target.shape)}")
        except ValueError as error:
            report.mismatched[name] = str(error)
            continue
        values[name] = value
    report.loaded = list(values)
    report.missing = [name for name in own if name not in values and name not in report.mismatched]
    if not report.complete and strict:
        hint = _hint(state_dict, own, own_name)
        raise RuntimeError(
            f"the checkpoint does not fit, nothing was loaded. With strict=False: {report}{hint}"
        )
    _copy(module, own, values)
    if not report.complete:
        warnings.warn(f"the checkpoint was loaded in part. {report}", stacklevel=2)
    return report


def _hint(state_dict: Mapping[Any, Any], own: Mapping[str, Any], own_name: Callable[[str], str]) -> str:
    """What may have been meant: a dict in the checkpoint, or its keys without what stands before each."""
    inside = {key: value for key, value in state_dict.items() if isinstance(value, Mapping)}
    if inside:
        key = max(inside, key=lambda key: sum(isinstance(one, torch.Tensor) for one in inside[key].values()))
        return f". {key!r} is a dict: is the checkpoint that?"
    fits: Counter[str] = Counter()
    for key in filter(lambda key: isinstance(key, str), state_dict):
        for end in (place + 1 for place, letter in enumerate(key) if letter == "."):
            with contextlib.suppress(Exception):  # of a function of the caller's, which may expect other keys
                fits[key[:end]] += own_name(key[end:]) in own
    prefix, count = max(fits.items(), key=lambda pair: (pair[1], -len(pair[0])), default=("", 0))
    if count <= sum(own_name(key) in own for key in state_dict if isinstance(key, str)):
        return ""
    return (
        f". {count} of its keys fit without {prefix!r} before them: take those, key.removeprefix({prefix!r})"
    )


def _check_options(layout: str, axes: str, flat_1x1: object) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if sorted(axes) != ["x", "y", "z"]:
        raise ValueError(f"axes must be 'xyz' in the order of the checkpoint's columns, got {axes!r}")
    if flat_1x1 is not None and layout != "spconv":
        raise ValueError(f"flat_1x1 goes with layout 'spconv', not with {layout!r}")


def _weights(module: nn.Module) -> tuple[dict[int, SparseConv3d], set[int]]:
    """The layer of each convolution's weight by the tensor's id, whatever name it has in a state_dict, and
    the ids of tensors that a weight is computed from."""
    weights, others = {}, set()
    for layer in module.modules():
        if isinstance(layer, SparseConv3d):
            weight = layer._parameters.get("weight", layer._buffers.get("weight"))
            if weight is not None:
                weights[id(weight)] = layer
            shape = layer.weight.shape
            others |= {id(t) for t in (*layer.parameters(), *layer.buffers()) if t.shape == shape}
    return weights, others


def _check(value: object, target: torch.Tensor) -> None:
    """ValueError where a copy of `value` to `target` would fail, or say something else."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"a {type(value).__name__}, not a tensor")
    if nn.parameter.is_lazy(target):
        raise ValueError("the model's has no shape yet: call the lazy layer once")
    if target.is_meta:
        raise ValueError("the model's is on the meta device: module.to_empty(device=...) first")
    if value.is_meta:
        raise ValueError("a tensor on the meta device, which has no values")
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else "sparse"
        cure = ".dequantize()" if value.is_quantized else ".to_dense()"
        raise ValueError(f"a {kind} tensor ({value.layout}): {cure} makes it one that can be loaded")
    if value.is_complex() and not target.is_complex():
        raise ValueError(f"complex ({value.dtype}), the model has {target.dtype}")
    if target.is_floating_point() and not value.is_floating_point():
        raise ValueError(f"{value.dtype}, the model has {target.dtype}")


def _convert(
    value: torch.Tensor, layer: SparseConv3d, layout: str, axes: str, flat_1x1: bool | None
) -> torch.Tensor:
    """The weight of a layer; ValueError names the layouts that its shape is of."""

    def converted(weight: torch.Tensor, name: str) -> torch.Tensor:
        if name == "torch" and layer.transposed:
            name = "torch_transposed"
        made = convert_weight(
            weight,
            name,
            layer.kernel_size,
            layer.groups,
            stride=layer.stride,
            axes=axes,
            flat_1x1=flat_1x1 if name == "spconv" else None,
        )
        if made.shape != layer.weight.shape:
            raise ValueError(
                f"weight {tuple(weight.shape)} of layout {name!r} becomes {tuple(made.shape)}, the model has "
                f"{tuple(layer.weight.shape)}"
            )
        return made

    try:
        return converted(value, layout)
    except ValueError as error:
        fitting = []
        for name in LAYOUTS:
            with contextlib.suppress(ValueError):
                converted(value.to("meta"), name)
                fitting.append(name)
        raise ValueError(f"{error}; its shape is that of {', '.join(fitting) or 'no layout'}") from None


def _copy(module: nn.Module, own: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Loads `values`; whatever raises on the way, hooks of the module included, it is as it was."""
    before = {
        name: own[name].detach().clone() if isinstance(own[name], torch.Tensor) else own[name]
        for name in values
    }
    try:
        module.load_state_dict({**own, **values})
    except BaseException:
        for name, value in before.items():
            with contextlib.suppress(Exception), torch.no_grad():  # what refuses a copy was not changed
                if isinstance(value, torch.Tensor):
                    own[name].copy_(value)
                else:
                    module.get_submodule(name.rpartition(".")[0]).set_extra_state(value)
        raise


def _renamed(key: str, rename: Mapping[str, str] | Callable[[str], str] | None) -> str:
    if rename is None:
        return key
    if callable(rename):
        return rename(key)
    matches = [old for old in rename if key == old or key.startswith(f"{old}.")]
    if not matches:
        return key
    old = max(matches, key=len)
    return (rename[old] + key[len(old) :]).removeprefix(".")
