"""The sparse convolution with spconv's arguments, weights and semantics, run by voxmma.

It is a voxmma.nn.SparseConv3d, too, so that precision flags, policies and plans take hold of it; its weight
is stored (C_out, *kernel_size, C_in), which kernels read as it lies.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from voxmma import compat
from voxmma._types import positive
from voxmma.compat.spconv import options
from voxmma.compat.spconv.core import ConvAlgo
from voxmma.compat.spconv.pytorch.core import (
    _ONE,
    IndiceData,
    Places,
    SparseConvTensor,
    _of_state,
    padded,
    sizes,
)
from voxmma.compat.spconv.pytorch.modules import SparseModule
from voxmma.compat.spconv.pytorch.timing import timed
from voxmma.dispatch.calls import call
from voxmma.dispatch.config import ConvConfig
from voxmma.dispatch.epilogue import Epilogue
from voxmma.nn.modules.sparse_conv import SparseConv3d as _SparseConv3d
from voxmma.sparse.ahead import meet
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.index import gather_rows
from voxmma.sparse.tensor import Voxels

_VOXELS_SEEN = "max_num_voxels_during_training"


class _Axes:
    """A setting of the config as a list of one size per axis."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, layer: Any, owner: type) -> Any:
        return self if layer is None else list(getattr(layer.__dict__["config"], self.name)[: layer.ndim])

    def __set__(self, layer: Any, value: Any) -> None:
        axes = padded(sizes(value, layer.ndim, self.name), 0 if "padding" in self.name else 1)
        layer.config = replace(layer.config, **{self.name: axes})


class SparseConvolution(SparseModule, _SparseConv3d):  # type: ignore[misc]
    """A sparse convolution of any kind; `SubMConv3d` and the like say which.

    Args:
        ndim: 1, 2 or 3 axes of the grid.
        in_channels, out_channels: channels.
        kernel_size, stride, padding, dilation, output_padding: one or ndim sizes, in the order of the columns
            of `indices`; integers of any library.
        groups: 1.
        subm: outputs are the inputs' voxels; stride and padding are then kept and ignored.
        transposed, inverse: see SparseConvTranspose3d, SparseInverseConv3d.
        indice_key: name of the map, for inverse layers.
        algo, large_kernel_fast_algo: kept; they choose among spconv's kernels.
        fp32_accum: True forbids fp16 accumulators, False asks for them, None leaves that to what
            `voxmma.compat.install` and voxmma's settings say (use_fp16_accum of voxmma.nn.SparseConv3d).
        record_voxel_count: keep the largest number of outputs seen in training in the buffer
            `max_num_voxels_during_training`, which state dicts hold.
        act_type, act_alpha, act_beta: an activation applied to the result, 'ReLU', 'Sigmoid' or 'LeakyReLU'
            of slope act_alpha, by name or by a member of cumm's enumeration. act_beta is kept.
        name: for `SparseConvTensor.benchmark`.

    Parameters: `weight` (out_channels, *kernel_size, in_channels), `bias` (out_channels,) unless bias=False;
    drawn uniformly from +-1/sqrt(in_channels * K). Layers of one offset whose outputs are the inputs read the
    weight's memory as (in_channels, out_channels), as spconv does. State dicts of spconv 1.x, (*kernel_size,
    in, out), are converted when they are loaded: known by their shape.

    Raises TypeError, ValueError or NotImplementedError naming the argument.
    """

    kernel_size: Any = _Axes()
    stride: Any = _Axes()
    dilation: Any = _Axes()
    padding: Any = _Axes()
    output_padding: Any = _Axes()
    _convolves = True
    transposed: Any = False
    """as spconv has it: not for inverse layers, which config.transposed counts in"""

    def __init__(
        self,
        ndim: int,
        in_channels: int,
        out_channels: int,
        kernel_size: Any = 3,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        bias: bool = True,
        subm: bool = False,
        output_padding: Any = 0,
        transposed: bool = False,
        inverse: bool = False,
        indice_key: Any = None,
        algo: ConvAlgo | None = None,
        fp32_accum: bool | None = None,
        record_voxel_count: bool = False,
        act_type: Any = None,
        act_alpha: float = 0,
        act_beta: float = 0,
        large_kernel_fast_algo: bool = False,
        name: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(name)
        if ndim == 4:
            raise NotImplementedError(
                f"{type(self).__name__}: voxmma has no 4-D grids; a time axis can be the sample index of "
                "3-D layers"
            )
        if positive(groups, "groups") != 1:
            raise NotImplementedError("groups must be 1, as in spconv; voxmma.nn.SparseConv3d has groups")
        size = sizes(kernel_size, ndim, "kernel_size")
        step, spread = sizes(stride, ndim, "stride"), sizes(dilation, ndim, "dilation")
        pad, extra = sizes(padding, ndim, "padding"), sizes(output_padding, ndim, "output_padding")
        volume = math.prod(size)
        if subm and not all(k % 2 for k in size):
            raise ValueError(f"kernel_size must be odd on every axis of a submanifold layer, got {size}")
        if transposed and set(spread) != {1}:
            raise NotImplementedError(
                f"dilation={spread} in a transposed layer: spconv's output shape forgets it and cuts the "
                "result; voxmma.nn.SparseConvTranspose3d does what torch does"
            )
        pointwise = volume == 1 and (subm or set(step) == {1})
        if pointwise and not subm and any(pad):
            raise ValueError(f"padding must be 0 in a layer of one offset and stride 1, got {pad}")
        self.ndim = ndim
        self.in_channels = positive(in_channels, "in_channels")
        self.out_channels = positive(out_channels, "out_channels")
        self.conv1x1 = pointwise
        self.subm = subm
        self.inverse = inverse
        self.transposed = transposed
        self.indice_key = indice_key
        self.algo = algo
        self.fp32_accum = fp32_accum
        self.large_kernel_fast_algo = large_kernel_fast_algo
        self.record_voxel_count = record_voxel_count
        self.act_type, self.act_alpha, self.act_beta = act_type, act_alpha, act_beta
        self._activate = _activation(act_type, act_alpha)
        precision = dict(compat.PRECISION["spconv"])
        if fp32_accum is not None:
            precision.pop("accumulator", None)
            precision["use_fp16_accum"] = not fp32_accum
        self.config = ConvConfig(
            padded(size, 1),
            padded(step, 1),
            padded(spread, 1),
            padding=padded(pad, 0),
            transposed=transposed or inverse,
            generative=not (subm or inverse),
            output_padding=padded(extra, 0),
            layer=f"{type(self).__name__}({in_channels}, {out_channels}, {'x'.join(map(str, size))})",
            **precision,
        )
        self._ran: tuple[Any, ...] = ()
        self.weight = nn.Parameter(torch.empty(out_channels, *size, in_channels, device=device, dtype=dtype))
        if bias:
            self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype))
        else:
            self.register_parameter("bias", None)
        if record_voxel_count:
            self.register_buffer(_VOXELS_SEEN, torch.zeros(1, dtype=torch.int32, device=device))
        self.reset_parameters()

    @property
    def weight_shape(self) -> list[int]:
        return list(self.weight.shape)

    def reset_parameters(self) -> None:
        """Draws weight and bias anew: uniform in +-1/sqrt(in_channels * K)."""
        bound = 1.0 / math.sqrt(self.weight[0].numel())
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def get_max_num_voxels(self) -> torch.Tensor | None:
        """(1,) int32: the most outputs seen in training; None unless record_voxel_count."""
        return self._buffers.get(_VOXELS_SEEN)

    # ---- the call ----------------------------------------------------------------------------------------

    def forward(  # type: ignore[override]
        self,
        input: SparseConvTensor,
        add_input: SparseConvTensor | None = None,
        then: Epilogue | None = None,
    ) -> SparseConvTensor:
        """SparseConvTensor of in_channels -> of out_channels; `add_input`: added before the activation.
        `then`: norm and activation, done in the same launch or not at all (SparseSequential).

        Raises:
            TypeError: input is no SparseConvTensor.
            ValueError: an `indice_key` that is not there (inverse layers) or belongs to another
                kernel; all that voxmma.nn.functional.spatially_sparse_conv refuses.
        """
        if not isinstance(input, SparseConvTensor):
            raise TypeError(f"{self.config.layer} takes a SparseConvTensor, got {type(input).__name__}")
        if input.benchmark:
            return timed(self, input, add_input, then)
        places, features = input._here(), input._features
        if places.ndim != self.ndim or features.shape[0] != places.count:
            raise _misfit(self, places, features)
        own: dict[str, Any] = self._parameters
        coords = places.coords
        weight = own["weight"] if "weight" in own else self.weight  # noqa: SIM401
        bias = own["bias"] if "bias" in own else self.bias  # noqa: SIM401  # which is slow to look up
        data = self._named(input) if self.inverse and not self.conv1x1 else None
        config, viewed, geometry = self._ran_as(None if data is None else data.geometry)
        if self.conv1x1 or torch.compiler.is_compiling():
            if coords.place is None and not coords.calls and not torch.compiler.is_compiling():
                meet(coords, weight)  # by this tensor: a view in inference mode may not say what it is of
            config, weight = viewed, self._kernel(weight)
        found = input.indice_dict.get(self.indice_key) if options.version == 1 and self.subm else None
        if found is not None and found.geometry != geometry:
            config, weight, geometry = self._over(found, coords, weight)
        back = None if data is None else data.back
        own_rows = coords.repeated is not None and (self.subm or self.conv1x1)
        last = None if own_rows else then
        y = call(config, Voxels._make(coords, features, _ONE), weight, bias, kernel_map=back, then=last)
        if own_rows:
            y = self._with_own_rows(y, coords, features)
        state = input.__dict__.copy()
        if data is not None:
            state["_places"], state["spatial_shape"] = data.inputs, data.spatial_shape
        elif self.subm or self.conv1x1:
            if self.indice_key is not None and not self.conv1x1:
                self._remember(state, geometry, places, places)
        else:
            shape = y._coord_set.spatial_shape
            state["spatial_shape"] = grid = list(shape[: self.ndim])  # type: ignore[index]
            state["_places"] = out = Places(None, y._coord_set, grid, input.batch_size, self.ndim)
            if self.indice_key is not None:
                self._remember(state, geometry, places, out)
        rows, state["_record"], state["_applied"] = y._feats, y._record, y._applied
        if self.record_voxel_count and self.training:
            self._buffers[_VOXELS_SEEN].clamp_(min=rows.shape[0])  # type: ignore[union-attr]
        state["_features"] = rows
        made = _of_state(state)
        if add_input is not None:
            made._features = rows = rows + made._rows_of(add_input, "add")
        if self._activate is not None:
            made._features = self._activate(rows)
        return made

    def _with_own_rows(self, y: Voxels, coords: CoordSet, features: torch.Tensor) -> Voxels:
        """Where rows repeat a voxel: the middle of the window is the row itself, as in spconv's algorithms
        all, and not the voxel's first row, which stays what others see of it."""
        first, site = coords.repeated.rows.get()  # type: ignore[union-attr]
        kernel = self._kernel(self.weight)
        middle = kernel[len(kernel) // 2]
        other = features - gather_rows(features, first[site])
        rows = y._feats + (other.to(middle.dtype) @ middle).to(y._feats.dtype)
        return Voxels._make(coords, rows, _ONE, y._record)

    def _kernel(self, weight: torch.Tensor) -> torch.Tensor:
        """The weight as the products take it, (K, C_in, C_out): a view."""
        if self.conv1x1:
            return weight.reshape(1, self.in_channels, self.out_channels)
        return weight.reshape(self.out_channels, -1, self.in_channels).permute(1, 2, 0)

    def _ran_as(self, geometry: Geometry | None) -> tuple[Any, ...]:
        """What runs over a map of this geometry (None: the layer's own), made once: the config for the weight
        as it is stored, that for `_kernel` of it, and its geometry."""
        ran = self._ran
        if ran and ran[0] is self.config and ran[1] == geometry:
            return ran[2]
        config = self.config
        if self.subm or self.conv1x1:
            made = replace(config, stride=_ONE, padding=None, transposed=False, generative=False)
        elif geometry is not None:
            made = replace(
                config, stride=geometry.stride, dilation=geometry.dilation, padding=geometry.padding
            )
        else:
            made = config
        self._ran = config, geometry, (replace(made, stored=True), made, made.geometry)
        return self._ran[2]

    def _over(
        self, data: IndiceData, coords: CoordSet, weight: torch.Tensor
    ) -> tuple[ConvConfig, torch.Tensor, Geometry]:
        """Version 1: config, weight and geometry of a call over the map that the layer's key names, another
        kernel's. ValueError where that map is of other voxels, or has more offsets."""
        kernel, volume = self._kernel(self.weight), math.prod(data.geometry.kernel_size)
        if data.inputs._coords is not coords or not data.is_subm or volume > len(kernel):
            self._check_same(data, self.config.geometry)
        geometry = data.geometry
        config = replace(self._ran_as(None)[1], kernel_size=geometry.kernel_size, dilation=geometry.dilation)
        return config, kernel[:volume], geometry

    def _remember(self, state: dict[str, Any], geometry: Geometry, inputs: Places, outputs: Places) -> None:
        """Leaves the map under the layer's key, in a dict of the output's own."""
        key = self.indice_key
        known: dict[Any, IndiceData] = state["indice_dict"]
        data = known.get(key)
        if data is not None:
            if (
                data.inputs._coords is inputs._coords
                and data.geometry == geometry
                and data.is_subm == self.subm
            ):
                return
            self._check_same(data, geometry)
            if not self.subm:
                raise ValueError(
                    f"{self.config.layer}: indice_key={key!r} names a map of other voxels already; inverse "
                    "layers could not tell which they mean"
                )
        made = IndiceData(inputs, outputs, geometry, self.subm, self.algo, self.transposed)
        if options.version == 1:
            known[key] = made
        else:
            state["indice_dict"] = {**known, key: made}

    def _check_same(self, data: IndiceData, geometry: Geometry) -> None:
        if data.is_subm != self.subm or data.geometry.kernel_size != geometry.kernel_size:
            kind = "submanifold" if data.is_subm else "strided"
            raise ValueError(
                f"{self.config.layer}: indice_key={self.indice_key!r} belongs to a {kind} layer of "
                f"kernel_size {data.ksize}, this one has {self.kernel_size}"
                + ("; spconv 1.x ran over that map: install('spconv', version=1)" if data.is_subm else "")
            )

    def _named(self, input: SparseConvTensor) -> IndiceData:
        """The map that an inverse layer goes back by."""
        data = input.indice_dict.get(self.indice_key)
        if data is None:
            known = ", ".join(map(repr, input.indice_dict)) or "none"
            raise ValueError(
                f"{self.config.layer}: no layer before it has indice_key={self.indice_key!r}; "
                f"there are: {known}"
            )
        if data.is_subm or data.geometry.kernel_size != self.config.kernel_size:
            self._check_same(data, self.config.geometry)
            raise ValueError(
                f"{self.config.layer}: indice_key={self.indice_key!r} is that of a submanifold layer"
            )
        return data

    #: What SparseSequential asks of a class before it hands over `then`: that its forward is this one.
    fused_forward = forward

    # ---- checkpoints -------------------------------------------------------------------------------------

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        nn.Module._save_to_state_dict(self, destination, prefix, keep_vars)  # no metadata of ours

    def _converted(self, weight: torch.Tensor) -> torch.Tensor:
        """(*kernel_size, C_in, C_out), spconv 1.x -> (C_out, *kernel_size, C_in)."""
        size = tuple(self.kernel_size)
        if weight.shape == self.weight.shape or weight.shape != (*size, self.in_channels, self.out_channels):
            return weight
        if self.conv1x1:
            return weight.reshape(self.weight.shape)  # memory is read as (C_in, C_out) on both sides
        return weight.permute(weight.dim() - 1, *range(weight.dim() - 1)).contiguous()

    def extra_repr(self) -> str:
        parts = [
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        ]
        for name in ("padding", "dilation", "output_padding"):
            parts.append(f"{name}={getattr(self, name)}")
        parts.append(f"algo={self.algo}")
        for name in ("use_fp16_accum", "accumulator", "compute_dtype"):
            if getattr(self, name) is not None:
                parts.append(f"{name}={getattr(self, name)!r}")
        if self.bias is None:
            parts.append("bias=False")
        return ", ".join(parts)


def _misfit(layer: SparseConvolution, places: Places, features: torch.Tensor) -> ValueError:
    if places.ndim != layer.ndim:
        return ValueError(f"{layer.config.layer} takes {layer.ndim}-D indices, got {places.ndim}-D ones")
    return ValueError(f"features has {features.shape[0]} rows, indices has {places.count}")


def _activation(act_type: Any, alpha: float) -> Any:
    """A function of the features, None for none; ValueError for an activation that is not known."""
    name = getattr(act_type, "name", act_type)
    known = {
        None: None,
        "None_": None,
        "ReLU": torch.relu,
        "Sigmoid": torch.sigmoid,
        "LeakyReLU": partial(nn.functional.leaky_relu, negative_slope=alpha),
    }
    if name not in known:
        raise ValueError(f"act_type must be one of None_, ReLU, Sigmoid and LeakyReLU, got {act_type!r}")
    return known[name]
