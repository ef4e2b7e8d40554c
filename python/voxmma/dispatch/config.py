"""What a convolution call is asked for, apart from its operands: one frozen object per layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from voxmma._dynamo import constant_result
from voxmma._types import ANY_DTYPE, DTYPE_NAMES, Triple, positive, triple
from voxmma.dispatch import settings
from voxmma.ops.kernels import parse_accumulator
from voxmma.sparse.derive import check_max_voxels
from voxmma.sparse.geometry import (
    MAX_KERNEL,
    MAX_OFFSET,
    MAX_STRIDE,
    Geometry,
    check_outputs,
    geometry_of,
    output_padding_triple,
    padding_triple,
)

KernelSize = int | tuple[int, int, int]


def kernel_triple(kernel_size: KernelSize) -> Triple:
    """A kernel size per axis; TypeError or ValueError naming `kernel_size` unless each is 1 to 9."""
    return triple(kernel_size, "kernel_size", 1, MAX_KERNEL)


def dilation_triple(dilation: KernelSize) -> Triple:
    """A dilation per axis; TypeError or ValueError naming `dilation` unless each is 1 or more."""
    return triple(dilation, "dilation", 1, MAX_OFFSET)


def stride_triple(stride: KernelSize) -> Triple:
    """A stride per axis; TypeError or ValueError naming `stride` unless each is 1 to 4096."""
    return triple(stride, "stride", 1, MAX_STRIDE)


def check_window(geometry: Geometry, generative: bool = False) -> None:
    """ValueError if the padding shifts the window of a layer whose outputs are the voxels of its input."""
    size, stride, dilation, padding = geometry
    if stride != (1, 1, 1) or generative:
        return
    usual = padding_triple(None, size, dilation)
    if padding != usual:
        raise ValueError(
            f"padding={padding} shifts the window of kernel_size={size}, dilation={dilation} at stride 1, "
            f"where the voxels of the input are kept: leave padding out or write padding={usual} "
            "(spconv ignores the padding of its submanifold layers). A shifted window on purpose is a "
            "convolution with generative=True, or coords= or kernel_map= of the function in "
            "voxmma.nn.functional"
        )


def fp16_accum_flag(use_fp16_accum: bool | None, accumulator: str | None) -> bool | None:
    """The one flag that `use_fp16_accum` and `accumulator` say together; ValueError when they contradict."""
    flag = settings.check_flag(use_fp16_accum, "use_fp16_accum")
    if accumulator is None:
        return flag
    name, _ = parse_accumulator(accumulator)
    if name == "fp64":
        raise ValueError(
            "accumulator='fp64' goes with fp64 inputs, which take it by themselves: leave it out"
        )
    if flag is not None and flag != (name != "fp32"):
        raise ValueError(f"accumulator={accumulator!r} contradicts use_fp16_accum={flag}")
    return name != "fp32"


@dataclass(frozen=True, slots=True, eq=False)
class ConvConfig:
    """A convolution as `voxmma.dispatch.calls.call` takes it; equal ones decide alike on equal operands.

    Fields as the arguments of voxmma.nn.functional.spatially_sparse_conv, geometry as triples. Each is
    checked here, by itself: the settable ones are set one after the other, so whether `use_fp16_accum` and
    `accumulator` contradict, and whether `padding` shifts the window, is asked when a call is decided.

    Raises TypeError or ValueError naming the field.
    """

    kernel_size: Triple
    stride: Triple = (1, 1, 1)
    dilation: Triple = (1, 1, 1)
    groups: int = 1
    padding: Triple | None = None
    """None: the default, or what a given kernel map has"""
    transposed: bool = False
    generative: bool = False
    max_voxels: int | None = None
    use_fp16_accum: bool | None = None
    accumulator: str | None = None
    compute_dtype: torch.dtype | None = None
    out_dtype: torch.dtype | None = None
    layer: str = "convolution"
    """name for the record"""
    output_padding: Triple = (0, 0, 0)
    outputs: str = "windows"
    map_key: str | None = None
    inverse_of: str | None = None
    stored: bool = False
    """whether weights are (C_out, *kernel_size, C_in), as torch and spconv store them; not with groups, nor
    where torch.compile traces"""
    geometry: Geometry = field(init=False, repr=False, compare=False)
    _values: tuple[Any, ...] = field(init=False, repr=False, compare=False, default=())
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        size, dilation = kernel_triple(self.kernel_size), dilation_triple(self.dilation)
        self._put("kernel_size", size)
        self._put("stride", stride_triple(self.stride))
        self._put("dilation", dilation)
        self._put("geometry", geometry_of(size, dilation, self.stride, self.padding))
        self._put("groups", positive(self.groups, "groups"))
        if self.padding is not None:
            self._put("padding", self.geometry.padding)
        check_outputs(self.outputs)
        for name in ("map_key", "inverse_of"):
            key = getattr(self, name)
            if not isinstance(key, str | None):
                raise TypeError(f"{name} must be a str or None, got {type(key).__name__}")
        self._put("output_padding", output_padding_triple(self.output_padding))
        if self.max_voxels is not None:
            self._put("max_voxels", check_max_voxels(self.max_voxels))
        settings.check_flag(self.use_fp16_accum, "use_fp16_accum")
        if self.accumulator is not None:
            fp16_accum_flag(None, self.accumulator)
        for name in ("compute_dtype", "out_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPE_NAMES):
                raise ValueError(f"{name} must be {ANY_DTYPE}, or None, got {dtype!r}")
        self._put("_values", tuple([getattr(self, f.name) for f in fields(self) if f.init]))
        self._put("_hash", hash(self._values))

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:  # layers that are alike look each other's calls up
        return self is other or (isinstance(other, ConvConfig) and self._values == other._values)

    def __reduce__(self) -> tuple[Any, ...]:  # hashes are of one process
        return ConvConfig, self._values

    @property
    def volume(self) -> int:
        """Number of offsets K."""
        return math.prod(self.kernel_size)


_known: dict[tuple[Any, ...], ConvConfig] = {}


def config_of(*values: Any) -> ConvConfig:
    """The ConvConfig of these fields, in order; made once for plain ints, or tuples of them, and the like.

    Equal values of other types, such as True, must not find what 1 left, and tensors may say something else
    next time.
    """
    if torch.compiler.is_compiling():
        return _traced_config(*values)
    key = tuple([(type(v), v, *map(type, v)) if type(v) is tuple else (type(v), v) for v in values])
    try:
        found = _known.get(key)
    except TypeError:  # not hashable: the constructor names it
        return ConvConfig(*values)
    if found is None:
        found = ConvConfig(*values)
        if not any(
            isinstance(part, torch.Tensor) for v in values for part in (v if type(v) is tuple else (v,))
        ):
            if len(_known) >= 1024:
                _known.clear()
            _known[key] = found
    return found


@constant_result
def _traced_config(*values: Any) -> ConvConfig:
    """Ints and names are constants of a graph, and so is what is made of them."""
    return ConvConfig(*values)
