"""Checkpoints of other sparse convolution libraries: their weight layouts, and loading that says what it did.

    report = voxmma.convert.load(model, torch.load("spconv.pth"), "spconv", rename={"conv_input.0": "stem.0"})

A layout is the order in which a library stores the weights of a convolution; the keys are the affair of the
model, and `rename` maps them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

#: Axes of the stored tensor, slowest first: 0, 1, 2 = kernel axes x, y, z; i, o = input and output channels.
LAYOUTS = {
    "voxmma": "012io",
    "spconv": "o012i",  # 2.2 and later, spconv-triton; K = 1 is stored as (C_in, C_out) behind that shape
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
    weight: torch.Tensor, layout: str, kernel_size: int | Sequence[int], groups: int = 1
) -> torch.Tensor:
    """A convolution's weight of another library as voxmma's: (K, C_in, C_out), contiguous, same dtype.

    Args:
        weight: as stored; kernel axes may be separate, flattened to one of K, or left out when K = 1.
        layout: a name of `LAYOUTS`.
        kernel_size: of the layer, one int or three (two for 2-D layers).
        groups: result (K, groups, C_in / groups, C_out / groups), from a layout whose tensor holds
            (C_in / groups, C_out), or for 'torch_transposed' (C_in, C_out / groups).

    Raises ValueError naming the layout or the shape that does not fit.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    size = (kernel_size,) * 3 if isinstance(kernel_size, int) else (*kernel_size, 1, 1)[:3]
    volume = math.prod(size)
    axes = LAYOUTS[layout]
    if layout == "torchsparse" and volume % 2 == 0:
        axes = "012io"
    first = axes.index("0") if axes[0] != "2" else 0
    lead, trail = first, len(axes) - first - 3  # channel axes before and after the kernel's
    channels = [*weight.shape[:lead], *weight.shape[weight.dim() - trail :]]
    stored = tuple(weight.shape[lead : weight.dim() - trail])
    order = [axis for axis in axes if axis in "io"]
    flat = {tuple(size[int(axis)] for axis in axes if axis in "012"), (volume,)}
    flat |= {tuple(kernel_size)} if not isinstance(kernel_size, int) else set()
    if weight.dim() < 2 or (stored not in flat and not (volume == 1 and set(stored) <= {1})):
        raise ValueError(
            f"weight {tuple(weight.shape)} is not of layout {layout!r} ({axes}) with kernel_size {size}"
        )
    length = dict(zip(order, channels, strict=True)) | {str(axis): size[axis] for axis in range(3)}
    if layout == "spconv" and volume == 1:  # its 1x1 layers compute x @ weight.view(C_in, C_out)
        axes = "012io"
    split = weight.reshape([length[axis] for axis in axes])
    made = split.permute([axes.index(axis) for axis in "012io"]).reshape(volume, length["i"], length["o"])
    if groups > 1:
        if layout == "torch_transposed":
            made = made.unflatten(1, (groups, -1))
        else:
            made = made.unflatten(2, (groups, -1)).transpose(1, 2)
    return made.contiguous()


@dataclass
class LoadReport:
    """What `load` did, by key of the model: `loaded`, `missing` (kept their values), `unexpected` (of the
    checkpoint, after renaming, not used) and `mismatched` (key: what is wrong with its shape)."""

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
                lines.append(f"{len(keys)} {name}: {', '.join(keys)}")
        lines += [f"{key}: {problem}" for key, problem in self.mismatched.items()]
        return "\n".join(lines)


def load(
    module: nn.Module,
    state_dict: Mapping[str, torch.Tensor],
    layout: str,
    *,
    strict: bool = True,
    rename: Mapping[str, str] | Callable[[str], str] | None = None,
) -> LoadReport:
    """Loads a checkpoint of another library into `module`, converting the weights of its convolutions.

    Args:
        module: a model of voxmma layers and others.
        state_dict: the checkpoint. `<layer>.weight` or `<layer>.kernel` of a voxmma convolution goes through
            `convert_weight`, its bias may be (1, C_out); everything else is copied as it is.
        layout: a name of `LAYOUTS`.
        strict: True loads all or nothing. False loads what fits and warns about everything else.
        rename: {prefix of the checkpoint: prefix of the model} (whole path parts, the longest match counts),
            or a function of the key.

    Returns a LoadReport. Raises RuntimeError with the report when `strict` and a key is missing, unexpected
    or does not fit: the module is then unchanged. ValueError for an unknown layout or two keys of one name.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    convolutions = {name: part for name, part in module.named_modules() if _is_convolution(part)}
    own = module.state_dict()
    report, values = LoadReport(), {}
    for key, tensor in state_dict.items():
        name = _renamed(key, rename)
        path, _, leaf = name.rpartition(".")
        if path in convolutions and leaf == "kernel":
            leaf = "weight"
            name = f"{path}.{leaf}" if path else leaf
        if name in values or name in report.mismatched:
            raise ValueError(f"two keys of the checkpoint become {name!r}; the second is {key!r}")
        if name not in own:
            report.unexpected.append(name)
            continue
        try:
            if path in convolutions and leaf == "weight":
                layer = convolutions[path]
                tensor = convert_weight(tensor, layout, layer.kernel_size, layer.groups)
            elif path in convolutions and leaf == "bias":
                tensor = tensor.flatten()
            if tensor.shape != own[name].shape:
                raise ValueError(f"shape {tuple(tensor.shape)}, the model has {tuple(own[name].shape)}")
        except ValueError as error:
            report.mismatched[name] = str(error)
            continue
        values[name] = tensor
    report.loaded = list(values)
    report.missing = [name for name in own if name not in values and name not in report.mismatched]
    if not report.complete:
        if strict:
            raise RuntimeError(f"the checkpoint does not fit, nothing was loaded. Of it: {report}")
        warnings.warn(f"the checkpoint was loaded in part. {report}", stacklevel=2)
    module.load_state_dict({**own, **values})
    return report


def _is_convolution(module: nn.Module) -> bool:
    return type(module).__module__.startswith("voxmma.") and all(
        hasattr(module, name) for name in ("kernel_size", "groups", "weight")
    )


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
