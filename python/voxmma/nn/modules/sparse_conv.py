"""Sparse convolution layers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar, overload

import torch
from torch import nn

from voxmma._types import Triple, integers, planar, positive
from voxmma.dispatch.calls import call
from voxmma.dispatch.config import ConvConfig, KernelSize, check_window, fp16_accum_flag
from voxmma.dispatch.mapping import Target, resolve_map
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import padding_triple
from voxmma.sparse.maps import KernelMap
from voxmma.sparse.sets import output_coords
from voxmma.sparse.tensor import Voxels

KernelSize2d = int | tuple[int, int]
_V = TypeVar("_V")


class _Setting(Generic[_V]):
    """An attribute of a layer that is a field of its config; setting it replaces the config."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, layer: None, owner: type) -> _Setting[_V]: ...
    @overload
    def __get__(self, layer: nn.Module, owner: type) -> _V: ...
    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else getattr(layer.__dict__["config"], self.name)

    def __set__(self, layer: Any, value: _V) -> None:
        layer.config = replace(layer.config, **{self.name: value})


class SparseConv3d(nn.Module):
    """Sparse convolution of Voxels, with control over what the tensor cores accumulate in.

    Stride 1 is submanifold: the output has the voxels of the input. Another stride makes the voxels whose
    window holds one of the input; generative=True does so at stride 1 too. Where the input has a
    `spatial_shape`, they are those within torch's output shape. transposed=True goes back to the
    voxels a strided layer started from (SparseConvTranspose3d). All the rules are those of
    voxmma.nn.functional.spatially_sparse_conv.

    Parameters: `weight (K, C_in, C_out)`, or `(K, groups, C_in/groups, C_out/groups)` when groups > 1,
    offsets in lexicographic order, last axis fastest; `bias (C_out,)` unless bias=False. Both are drawn
    uniformly from +-1/sqrt(fan_in) with fan_in = K * C_in / groups, the rule of torch.nn.Conv3d.

    Args:
        in_channels, out_channels: channels, divisible by groups.
        kernel_size: one int or three, 1 to 9 each. stride, dilation: one int or three. What follows `stride`
            goes by keyword.
        transposed, generative: see above.
        use_fp16_accum: True asks for fp16 accumulators, False forbids them, None leaves it to
            voxmma.set_fp16_accum, the environment and the automatic rule. accumulator='fp16' or 'fp32' says
            the same by name; 'fp16_promoted:32', ':64', ':128' or ':offset' asks for fp16 sums that are
            promoted to fp32 every so many channels or once an offset ('fp16_promoted' alone: 64).
        compute_dtype: dtype of the products; None = autocast dtype where active, else the features' dtype.
        padding: one int or three; default (kernel_size // 2) * dilation for odd sizes, 0 for even ones. At
            stride 1 another one is refused unless generative=True: it would shift the window.
        max_voxels: most voxels the layer may make, default 2^26.
        output_padding: one int or three, 0 or more: cells that a transposed layer adds to the far side of the
            `spatial_shape` it makes; nothing else changes.
        outputs: 'cells' puts the outputs of a strided layer on the cells of the coarser grid. map_key: keeps
            the map under this key. inverse_of: the map_key of the layer that a transposed one undoes. See
            spatially_sparse_conv.
        device, dtype: of the parameters.

    The arguments but for channels, device and dtype are attributes, which may be set: `layer.config`, what a
    call is decided by, is replaced. So is `out_dtype` (None, the compute dtype, until set), which may be
    torch.float32: results as they leave the accumulator, not rounded to half.

    A state dict says the kernel size (in its metadata, which `torch.save` keeps): weights of one shape do not
    load into a layer whose kernel lies along other axes. Without metadata the shape alone is compared.

    Raises ValueError naming the argument that is out of range.
    """

    config: ConvConfig
    weight: nn.Parameter
    bias: nn.Parameter | None
    kernel_size = _Setting[Triple]()
    stride = _Setting[Triple]()
    dilation = _Setting[Triple]()
    padding = _Setting[Triple]()
    groups = _Setting[int]()
    transposed = _Setting[bool]()
    generative = _Setting[bool]()
    max_voxels = _Setting["int | None"]()
    use_fp16_accum = _Setting["bool | None"]()
    accumulator = _Setting["str | None"]()
    compute_dtype = _Setting["torch.dtype | None"]()
    out_dtype = _Setting["torch.dtype | None"]()
    output_padding = _Setting[Triple]()
    outputs = _Setting[str]()
    map_key = _Setting["str | None"]()
    inverse_of = _Setting["str | None"]()

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize,
        stride: KernelSize = 1,
        *,
        dilation: KernelSize = 1,
        groups: int = 1,
        bias: bool = True,
        transposed: bool = False,
        generative: bool = False,
        use_fp16_accum: bool | None = None,
        accumulator: str | None = None,
        compute_dtype: torch.dtype | None = None,
        padding: KernelSize | None = None,
        max_voxels: int | None = None,
        output_padding: KernelSize = 0,
        outputs: str = "windows",
        map_key: str | None = None,
        inverse_of: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        groups = positive(groups, "groups")
        in_channels = positive(in_channels, "in_channels")
        out_channels = positive(out_channels, "out_channels")
        for name, value in (("in_channels", in_channels), ("out_channels", out_channels)):
            if value % groups:
                raise ValueError(f"{name}={value} is not divisible by groups={groups}")
        fp16_accum_flag(use_fp16_accum, accumulator)
        config = ConvConfig(
            kernel_size,  # type: ignore[arg-type]  # made triples there
            stride,  # type: ignore[arg-type]
            dilation,  # type: ignore[arg-type]
            groups,
            padding,  # type: ignore[arg-type]
            transposed,
            generative,
            max_voxels,
            use_fp16_accum,
            accumulator,
            compute_dtype,
            output_padding=output_padding,  # type: ignore[arg-type]
            outputs=outputs,
            map_key=map_key,
            inverse_of=inverse_of,
        )
        size, pad = config.geometry.kernel_size, config.geometry.padding
        check_window(config.geometry, generative)
        name = f"{type(self).__name__}({in_channels}, {out_channels}, {'x'.join(map(str, size))})"
        self.config = replace(config, padding=pad, layer=name)
        self.in_channels = in_channels
        self.out_channels = out_channels
        shape = (in_channels // groups, out_channels // groups)
        lead = (config.volume,) if groups == 1 else (config.volume, groups)
        self.weight = nn.Parameter(torch.empty(*lead, *shape, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws weight and bias anew: uniform in +-1/sqrt(K * C_in / groups)."""
        bound = 1.0 / math.sqrt(self.weight.shape[0] * self.weight.shape[-2])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def kernel_map(self, x: Voxels, coords: Target | None = None) -> KernelMap:
        """The map that `forward(x, coords=coords)` runs over; its `transposed()` is that of the layer's
        inverse."""
        return resolve_map(x, self.config, coords)[0]

    def output_coords(self, x: Voxels) -> CoordSet:
        """The coordinates of `forward(x)`, without its kernel map; see voxmma.output_coords."""
        c = self.config
        if c.inverse_of is not None:
            return resolve_map(x, c)[1].full
        size, stride, dilation, padding = c.geometry
        return output_coords(
            x,
            size,
            stride=stride,
            dilation=dilation,
            padding=padding,
            transposed=c.transposed,
            generative=c.generative,
            max_voxels=c.max_voxels,
            output_padding=c.output_padding,
            outputs=c.outputs,
        )

    def forward(
        self, x: Voxels, kernel_map: KernelMap | None = None, *, coords: Target | None = None
    ) -> Voxels:
        """Convolves voxels of C_in channels to voxels of C_out channels.

        `kernel_map`: a map built for the coordinates of x; by default the one cached on them. `coords`: where
        the outputs shall be (a Voxels, a CoordSet or a tensor). Errors as in
        voxmma.nn.functional.spatially_sparse_conv.
        """
        own: dict[str, Any] = self._parameters
        if type(self) in _PLAIN and "weight" in own and "bias" in own:
            weight, bias = own["weight"], own["bias"]  # as Module.__getattr__ finds them, but fast
        else:
            weight, bias = self.weight, self.bias
        return call(self.config, x, weight, bias, coords=coords, kernel_map=kernel_map)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        metadata = getattr(destination, "_metadata", {}).get(prefix[:-1])
        if metadata is not None:
            metadata["kernel_size"] = self.kernel_size

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = integers(local_metadata.get("kernel_size", self.kernel_size), 3)
        if saved != self.kernel_size:
            error_msgs.append(
                f"{prefix}weight was saved by a layer of kernel_size={saved}, this one has {self.kernel_size}"
            )
            return
        found = missing_keys, unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *found)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"]
        for name, default in (
            ("stride", (1, 1, 1)),
            ("dilation", (1, 1, 1)),
            ("padding", padding_triple(None, self.kernel_size, self.dilation)),
            ("groups", 1),
            ("transposed", False),
            ("generative", False),
            ("max_voxels", None),
            ("output_padding", (0, 0, 0)),
            ("outputs", "windows"),
            ("map_key", None),
            ("inverse_of", None),
            ("use_fp16_accum", None),
            ("accumulator", None),
        ):
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        if self.compute_dtype is not None:
            parts.append(f"compute_dtype={self.compute_dtype}")
        if self.bias is None:
            parts.append("bias=False")
        return ", ".join(parts)


def sparse_layers(model: nn.Module) -> dict[str, SparseConv3d]:
    """The sparse convolution layers of a model by name ('' for the model itself)."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, SparseConv3d)}


_C = TypeVar("_C", bound=type[SparseConv3d])


def _options_of(base: Callable[..., None], *without: str) -> Callable[[_C], _C]:
    """Gives a class whose constructor passes `**options` on the signature of what they go to.

    Its own parameters replace those of the same name, annotations included.
    """

    def sign(cls: _C) -> _C:
        own = inspect.signature(cls.__init__).parameters
        kept = [
            own.get(name, p) for name, p in inspect.signature(base).parameters.items() if name not in without
        ]
        signature = inspect.Signature(kept, return_annotation=None)
        cls.__init__.__signature__ = signature  # type: ignore[attr-defined]
        return cls

    return sign


@_options_of(SparseConv3d.__init__, "transposed")
class SparseConvTranspose3d(SparseConv3d):
    """Transposed sparse convolution: SparseConv3d(..., transposed=True), stride where one expects it.

    `layer(x, coords=skip)` makes the voxels of `skip`. Without `coords` they are the finer voxels that
    strided layers of the same total stride made those of x from, whatever their kernel; where there are none,
    and with generative=True, every voxel that one of x reaches. An inverse convolution is
    `layer(y, down.kernel_map(x).transposed())` for the strided layer `down` that made y out of x.

    Arguments as for SparseConv3d.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize,
        stride: KernelSize = 1,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, transposed=True, **options)


@_options_of(SparseConv3d.__init__)
class SparseConv2d(SparseConv3d):
    """SparseConv3d over x and y alone: every z is a plane of its own (plain 2-D data has z = 0 everywhere).

    `kernel_size`, `stride`, `dilation`, `padding` and `output_padding` are one int or two. `weight` is
    (K, C_in, C_out) with K the product of the two kernel sizes, offsets in lexicographic order of (dx, dy).
    Else as SparseConv3d; the function behind it is spatially_sparse_conv with (k, k, 1), (stride, stride, 1),
    ...
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize2d,
        stride: KernelSize2d = 1,
        *,
        dilation: KernelSize2d = 1,
        padding: KernelSize2d | None = None,
        output_padding: KernelSize2d = 0,
        **options: Any,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            planar(kernel_size, "kernel_size"),
            planar(stride, "stride"),
            dilation=planar(dilation, "dilation"),
            padding=None if padding is None else planar(padding, "padding", 0),
            output_padding=planar(output_padding, "output_padding", 0),
            **options,
        )


@_options_of(SparseConv2d.__init__, "transposed")
class SparseConvTranspose2d(SparseConv2d):
    """SparseConvTranspose3d over x and y alone, as SparseConv2d is SparseConv3d over them."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: KernelSize2d,
        stride: KernelSize2d = 1,
        **options: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, stride, transposed=True, **options)


#: The classes whose parameters are attributes like any other: subclasses may compute theirs.
#: Not a set, at which the dynamo of torch 2.6 stops.
_PLAIN = (SparseConv3d, SparseConvTranspose3d, SparseConv2d, SparseConvTranspose2d)
