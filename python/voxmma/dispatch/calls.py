"""One convolution call: map, precision and tiles decided, the op launched, the record made.

Every convolution ends here, so that what is decided, audited and verified is so for all of them: `call` for
Voxels, its lower half `convolve` for rows over a map.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from voxmma import torchflags
from voxmma._dynamo import constant_result, eager
from voxmma._extension import _C
from voxmma._types import ANY_DTYPE, DTYPE_NAMES, Triple
from voxmma.dispatch import measurements, settings, validation
from voxmma.dispatch.config import ConvConfig, fp16_accum_flag
from voxmma.dispatch.epilogue import Epilogue
from voxmma.dispatch.launches import listening, notify
from voxmma.dispatch.mapping import Target, resolve_map
from voxmma.dispatch.observers import observe, observed
from voxmma.dispatch.record import Record
from voxmma.dispatch.selection import Plan, asks_gate, plan_call, rescaled
from voxmma.ops.kernels import accumulator_label, parse_accumulator
from voxmma.sparse.ahead import meet
from voxmma.sparse.cached import Made, keep
from voxmma.sparse.coords import _KEPT, CoordSet
from voxmma.sparse.cores import Direction, MapCore
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.levels import finer_set
from voxmma.sparse.maps import KernelMap, traceable
from voxmma.sparse.tensor import Voxels

# ---- the call ----------------------------------------------------------------------------------------------


def call(
    config: ConvConfig,
    x: Voxels,
    weight: Tensor,
    bias: Tensor | None,
    *,
    coords: Target | None = None,
    kernel_map: KernelMap | None = None,
    then: Epilogue | None = None,
) -> Voxels:
    """A convolution of Voxels: arguments, result and errors as of voxmma.nn.functional.spatially_sparse_conv.

    `then`: what follows it, done in the same launch or not at all (`Epilogue`). A call like an earlier one on
    the same coordinates takes its map, tiles and record over (`Repeat`).
    """
    key = place = known = None
    compiling = torch.compiler.is_compiling()
    if isinstance(x, Voxels):
        if not compiling:
            key = _key(config, x, weight, bias, coords, kernel_map)
            again = None if key is None else x._coord_set.calls.get(key)
            if again is not None:
                out = again.leads_to(x)
                if out is not None:
                    x._coord_set.use(again.made)
                    stride = x._stride if again.route is None else again.route.out_stride
                    y, applied = again.run(x._coord_set, x._feats, weight, bias, out, then)
                    return Voxels._make(out, y, stride, again.record, applied)
            if key is not None:
                place = config, x._feats.device, key[1]
                known = _decided.get(place)
        elif kernel_map is None and not traceable(
            x.coord_set,
            config.geometry,
            config.generative or coords is not None or config.inverse_of is not None,
        ):
            return _outside(config, x, weight, bias, coords, then)
    if known is None:  # else operands like these have been checked
        fp16_accum_flag(config.use_fp16_accum, config.accumulator)
        _check_operands(x, _kernel(config, weight), bias, config.volume, config.groups)
    if x._coord_set.repeated is not None:
        key, x = None, x.sites()
    if kernel_map is None and not compiling:
        meet(x._coord_set, weight)
    mapping, out, stride = resolve_map(x, config, coords, kernel_map)
    if config.transposed and mapping.symmetric:
        key = None
        if config.stored:
            config, weight = replace(config, stored=False), _kernel(config, weight)
        weight = weight.flip(0)  # the opposite direction of a symmetric map is the map with mirrored offsets
    if known is None or not known.holds():
        dtype = _compute_dtype(config, x.feats, weight, bias) if known is None else known.dtype
        known = _decide(config, _kernel(config, weight), x.device, dtype)
        if place is not None:
            if len(_decided) >= 4096:
                _decided.clear()
            _decided[place] = known
    if out._full is not None:  # the result is on other rows
        key = None
    back, route = _opposite(mapping, x._feats), None
    if key is not None and not mapping.symmetric:
        route = _route(key, config, x, mapping, back, stride, coords is not None, kernel_map is not None)
    made = _prepare(config, x._feats, weight, mapping, back, known, route)
    y, applied = made.run(mapping.in_coords, x._feats, weight, bias, mapping.out_coords, then)
    if key is not None:
        with x._coord_set._index.lock:
            x._coord_set.calls.pop(key, None)
            keep(x._coord_set.calls, key, made, _KEPT["calls"])
    rows, feats = out.expand(y)
    return Voxels._make(rows, feats, stride, made.record, applied)


@eager
def _outside(
    config: ConvConfig,
    x: Voxels,
    weight: Tensor,
    bias: Tensor | None,
    coords: Target | None,
    then: Epilogue | None,
) -> Voxels:
    """A call between two graphs of torch.compile, so that it traces no cache and no bookkeeping."""
    return call(config, x, weight, bias, coords=coords, then=then)


def _kernel(config: ConvConfig, weight: Tensor) -> Tensor:
    """The weight as (K, C_in, C_out), or grouped: a view."""
    return weight.flatten(1, -2).permute(1, 2, 0) if config.stored else weight


def _channels(config: ConvConfig, weight: Tensor) -> int:
    """Output channels over all groups."""
    return weight.shape[0] if config.stored else weight.shape[-1] * config.groups


# ---- its operands ------------------------------------------------------------------------------------------


def _compute_dtype(config: ConvConfig, x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The argument, else the active autocast dtype (fp64 stays fp64, as in torch), else the features' own.

    ValueError where that is left to features that are wider than the parameters, or `out_dtype` does not fit.
    """
    dtype = config.compute_dtype or _dtype_of_operands(x, weight, bias)
    wide = config.out_dtype == torch.float32 and dtype != torch.float64
    if config.out_dtype not in (None, dtype) and not wide:
        raise ValueError(
            f"out_dtype must be {dtype} or torch.float32 when computing in {dtype}, got {config.out_dtype}"
        )
    return dtype


def _dtype_of_operands(x: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(x.device.type)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype and not _is_wider(tensor.dtype, x.dtype):
            theirs, mine = DTYPE_NAMES[x.dtype], DTYPE_NAMES[tensor.dtype]
            raise ValueError(
                f"the features of x are {theirs}, {name} is {mine}, which is not as wide: convert one of "
                f"them (x.to({tensor.dtype}), or the layer with .to({x.dtype})), say compute_dtype=, or call "
                "under torch.autocast"
            )
    return x.dtype


def _is_wider(weight: torch.dtype, feats: torch.dtype) -> bool:
    """Whether weights of another dtype serve the features: they are rounded to it, no feature is."""
    return torch.promote_types(weight, feats) == weight


def _check_tensor(value: object, name: str, x: Voxels) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if value.dtype not in DTYPE_NAMES:
        raise TypeError(f"{name} must be {ANY_DTYPE}, got {value.dtype}")
    if value.device != x.feats.device:
        raise ValueError(f"{name} is on {value.device}, the features of x are on {x.feats.device}")
    return value


def _check_operands(
    x: Voxels, weight: torch.Tensor, bias: torch.Tensor | None, volume: int, groups: int
) -> int:
    """Checks everything about the operands and returns the number of output channels."""
    if not isinstance(x, Voxels):
        raise TypeError(f"x must be a voxmma.Voxels, got {type(x).__name__}")
    _check_tensor(weight, "weight", x)
    _check_tensor(x.feats, "the features of x", x)
    shape, channels = weight.shape, x.feats.shape[1]
    if len(shape) != (3 if groups == 1 else 4) or (groups > 1 and shape[1] != groups):
        expected = "(K, C_in, C_out)" if groups == 1 else f"(K, {groups}, C_in / {groups}, C_out / {groups})"
        raise ValueError(f"weight must be {expected} with groups={groups}, got {tuple(shape)}")
    if shape[0] != volume:
        raise ValueError(f"weight has {shape[0]} offsets, kernel_size has {volume}")
    c_in, c_out = shape[-2] * groups, shape[-1] * groups
    if c_in == 0 or c_out == 0:
        raise ValueError(f"weight must have at least one channel on each side, got {tuple(shape)}")
    if channels != c_in:
        raise ValueError(f"x has {channels} channels, weight {tuple(shape)} takes {c_in}")
    if bias is not None and _check_tensor(bias, "bias", x).shape != (c_out,):
        raise ValueError(f"bias must be ({c_out},), got {tuple(bias.shape)}")
    return c_out


# ---- what is decided ---------------------------------------------------------------------------------------


class _Decision(NamedTuple):
    """Accumulator and tiles of a call, and what they were decided by beside its configuration and the types
    and shapes of its operands: settings, records of the gate and of the tuner, torch's TF32 switches."""

    dtype: torch.dtype
    """that is computed in"""
    requested: bool
    decided_by: str
    plan: Plan
    chunk: int
    scaled: bool
    runtime: settings.Settings
    environment: settings.Settings
    tuned: int
    """measurements.generation()"""
    gate: str | None
    """validation.stamp(); None where no validation record can decide"""
    switches: str | None
    """torchflags.process_fp32_precision(); None where that does not matter"""

    def holds(self) -> bool:
        """Whether it would be decided alike now."""
        runtime, environment = settings.state()
        return (
            self.runtime is runtime
            and self.environment is environment
            and self.tuned == measurements.generation()
            and (self.gate is None or self.gate == validation.stamp(recent=True))
            and (self.switches is None or self.switches == torchflags.process_fp32_precision())
        )


Place = tuple[ConvConfig, torch.device, bytes]
"""configuration, device, and facts of the operands as in a `Key`"""

#: Calls whose operands were found to be right, for those on new coordinates.
_decided: dict[Place, _Decision] = {}


def _decide(config: ConvConfig, weight: Tensor, device: torch.device, dtype: torch.dtype) -> _Decision:
    (runtime, environment), tuned = settings.state(), measurements.generation()
    accumulator, groups = config.accumulator, config.groups
    flag = fp16_accum_flag(config.use_fp16_accum, accumulator)
    chunk = 0 if accumulator is None else parse_accumulator(accumulator)[1]
    requested, decided_by = settings.resolve_fp16_accum(flag, dtype)
    # From the weight: torch.compile may treat the features' channels as variable, a parameter's never.
    c_in, c_out = weight.shape[-2] * groups, weight.shape[-1] * groups
    pools = settings.get_pools(dtype)
    evidence = switches = None
    if not torch.compiler.is_compiling():
        evidence = validation.stamp() if asks_gate(dtype, requested, device, pools) else None
        said = runtime.fp32_precision or environment.fp32_precision
        switches = pools[4] if dtype == torch.float32 and said is None else None
    volume = weight.shape[0]
    plan = plan_call(dtype, requested, decided_by, c_in, c_out, groups, device, pools, chunk, volume)
    scaled = rescaled(dtype, plan[0], decided_by, settings.get_fp16_rescale())
    found = dtype, requested, decided_by, plan, chunk, scaled
    return _Decision(*found, runtime, environment, tuned, evidence, switches)


# ---- a repeated call ---------------------------------------------------------------------------------------

Key = tuple[Any, ...]
"""The configuration, facts of the operands, and where the caller says that the outputs are. Equal keys mean
equal decisions as long as `Repeat.leads_to`. Ids in it are of what the repeat holds, or dies with."""


def _key(
    config: ConvConfig,
    x: Voxels,
    weight: Tensor,
    bias: Tensor | None,
    coords: Target | None,
    kernel_map: KernelMap | None,
) -> Key | None:
    """Key of a call among `CoordSet.calls`; None: it cannot have one."""
    try:
        facts = _C.operand_facts(x._feats, weight, bias)
    except TypeError:  # an operand of a wrong type: `_check_operands` names it
        return None
    if facts is None:
        return None
    if kernel_map is not None:
        # Only for the very set: that others are equal is to be seen each time.
        mine = coords is None and isinstance(kernel_map, KernelMap) and kernel_map.in_coords is x._coord_set
        return (config, facts, id(kernel_map.core), kernel_map.reverse) if mine else None
    if coords is None:
        return config, facts
    if isinstance(coords, Voxels):
        return config, facts, id(coords._coord_set), coords._stride
    return (config, facts, id(coords), None) if isinstance(coords, CoordSet) else None


class _Route(NamedTuple):
    """Where a call that is not submanifold with an odd kernel leads, and what may change about that."""

    target: weakref.ref[CoordSet] | None
    """the output set, which is not held; None: the inputs themselves"""
    opposite: Made | None
    """the map of the input gradient; None while none was asked for"""
    in_stride: Triple
    out_stride: Triple
    back: Triple | None
    """a stride by which `finer_set` is asked, and whether it knew"""
    known: bool
    given: Geometry | None
    """of a strided layer that was given its outputs, which remember the inputs"""

    def leads_to(self, x: Voxels) -> CoordSet | None:
        """The output set; None where it may be another one, or lacks a gradient's map."""
        coords = x._coord_set
        if self.target is None:
            out = coords
        else:
            target = self.target()
            if target is None or target._coords._version != target._version:
                return None
            out = target
        if x._stride != self.in_stride:
            return None
        if self.back is not None and finer_set(coords, self.back) is not (out if self.known else None):
            return None
        if torch.is_grad_enabled() and x._feats.requires_grad:
            if self.opposite is None:
                return None
            self.opposite.get()
        if self.given is not None:
            out.remember(coords, self.given)
        return out


class Repeat(NamedTuple):
    """What a call decided, kept on the coordinates of its input for the calls that are like it.

    A layer runs many times with the same arguments; all but the first find their map, tiles and record here.
    What the arguments do not say is compared at every call: that the decision holds, the sets that strided
    layers link.
    """

    config: ConvConfig
    core: MapCore
    reverse: bool
    decision: _Decision
    op: Callable[..., Tensor]
    operands: tuple[Any, ...]
    """the op's arguments from `map` on"""
    prepared: _C.PreparedConv | None
    """torch.ops.voxmma.conv with these operands; None where another op runs"""
    dtype: torch.dtype | None
    """that the features are converted to; None where they have it"""
    record: Record
    made: Made
    """the tensors of the map"""
    route: _Route | None
    """None: the outputs are the inputs, over a map that is its own opposite"""

    def leads_to(self, x: Voxels) -> CoordSet | None:
        """Where the outputs of a call with this key are; None where it might be decided otherwise now."""
        if self.core.freed or not self.decision.holds():
            return None
        return x._coord_set if self.route is None else self.route.leads_to(x)

    def run(
        self,
        coords: CoordSet,
        feats: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        out: CoordSet,
        then: Epilogue | None,
    ) -> tuple[Tensor, tuple[str, ...]]:
        """The call itself, from rows on `coords` to rows on `out`; and what followed in it, by name."""
        if self.dtype is not None:
            feats = feats.to(self.dtype)
        prepared, y, seen = self.prepared, None, observed()
        applied: tuple[str, ...] = ()
        if prepared is None or has_torch_function((feats, weight, bias)):
            y = _launch(self.op, (feats, _kernel(self.config, weight), bias, *self.operands))
        elif then is not None and not seen:
            channels = _channels(self.config, weight)
            y = then.run(prepared, feats, weight, bias, self.record.out_dtype, out, channels)
            applied = () if y is None else then.names()
        if y is None:
            y = prepared(feats, weight, bias)  # type: ignore[misc]
        if listening():
            notify(self.record)
        if seen:
            mapping = KernelMap(coords, out, self.core, self.reverse)
            observe(feats, _kernel(self.config, weight), bias, mapping, y, self.record)
        return y, applied


def _prepare(
    config: ConvConfig,
    feats: Tensor,
    weight: Tensor,
    mapping: KernelMap,
    back: Direction | None,
    decision: _Decision,
    route: _Route | None = None,
) -> Repeat:
    """What runs over `mapping`, for operands that have been checked."""
    dtype, requested, decided_by, plan, chunk, scaled, *_ = decision
    ran, _, tile, dgrad_tile, wgrad_tile = plan
    here = mapping._direction()
    op, written = torch.ops.voxmma.conv, config.out_dtype
    if scaled:
        op, written = torch.ops.voxmma.conv_rescaled, config.out_dtype or dtype
    n_out = mapping.out_coords.num
    over = here.tensors, [] if back is None else back.tensors, n_out, mapping.symmetric, False
    operands = (*over, ran, tile, dgrad_tile, wgrad_tile, written)
    prepared = None
    if not (scaled or torch.compiler.is_compiling()):
        make: Any = _C.PreparedConv  # mypy does not know how many operands there are
        prepared = make(*operands, config.stored)  # names take a microsecond
    channels, out_dtype = _channels(config, weight), written or dtype
    parts = _parts(tile, n_out, mapping.kernel_volume, feats.shape[1], channels, config.groups, feats.device)
    record = _record(config.layer, requested, decided_by, plan, chunk, dtype, out_dtype, scaled, parts)
    cast = None if feats.dtype == dtype else dtype
    core, reverse = mapping._core, mapping.reverse
    return Repeat(config, core, reverse, decision, op, operands, prepared, cast, record, here.made, route)


def _opposite(mapping: KernelMap, feats: Tensor) -> Direction | None:
    """The map that the input gradient runs over, where one is asked for and it is another; the weight
    gradient runs over `mapping`."""
    if mapping.symmetric or not (torch.is_grad_enabled() and feats.requires_grad):
        return None
    return mapping.transposed()._direction()


def _route(
    key: Key,
    config: ConvConfig,
    x: Voxels,
    mapping: KernelMap,
    back: Direction | None,
    stride: Triple,
    given_coords: bool,
    given_map: bool,
) -> _Route:
    """Where calls go that are like this one, over a map that is not its own opposite."""
    coords, out = x._coord_set, mapping.out_coords
    own = out is coords
    moves = config.stride != (1, 1, 1) and not given_map
    asks = moves and config.transposed and not config.generative and not given_coords
    told = moves and not config.transposed and given_coords and not own
    return _Route(
        None if own else weakref.ref(out, functools.partial(_drop, weakref.ref(coords), key)),
        None if back is None else back.made,
        x._stride,
        stride,
        config.stride if asks else None,
        asks and finer_set(coords, config.stride) is out,
        config.geometry if told else None,
    )


def _drop(owner: weakref.ref[CoordSet], key: Key, target: weakref.ref[CoordSet]) -> None:
    """Forgets a call whose output set is gone, and the tensors of the map to it."""
    coords = owner()
    found = None if coords is None else coords.calls.get(key)
    if coords is not None and found is not None and found.route is not None and found.route.target is target:
        coords.calls.pop(key, None)


# ---- rows over a map ---------------------------------------------------------------------------------------


def convolve(
    config: ConvConfig,
    feats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mapping: KernelMap,
    compute_dtype: torch.dtype,
) -> tuple[Tensor, Record]:
    """Runs a convolution whose operands have been checked, over `mapping`, and says what ran.

    Args:
        config: groups, accumulator, out_dtype and layer of it count here; the geometry is that of `mapping`.
        feats: (n_in, C_in), any float dtype. weight: (K, C_in, C_out), or grouped. bias: (C_out,) or None.
        mapping: from the rows of `feats` to the rows of the result.
        compute_dtype: of the products.

    Returns:
        ((n_out, C_out), record).
    """
    decision = _decide(config, _kernel(config, weight), feats.device, compute_dtype)
    made = _prepare(config, feats, weight, mapping, _opposite(mapping, feats), decision)
    y, _ = made.run(mapping.in_coords, feats, weight, bias, mapping.out_coords, None)
    return y, made.record


def _launch(op: Callable[..., Tensor], operands: tuple[Any, ...]) -> Tensor:
    device_type = operands[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return op(*operands)
    # The compute dtype is decided here, so the op's own autocast rule must not decide again.
    with torch.autocast(device_type, enabled=False):
        return op(*operands)


# ---- the record --------------------------------------------------------------------------------------------


@constant_result  # which a cached function cannot be itself
def _record(*facts: Any) -> Record:
    """`_record_of`, for eager and compiled calls alike."""
    return _record_of(*facts)


@functools.lru_cache(maxsize=4096)
def _record_of(
    layer: str,
    requested: bool,
    decided_by: str,
    plan: Plan,
    chunk: int,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype,
    rescaled: bool,
    parts: int,
) -> Record:
    """The record of a call; calls that are alike share it."""
    ran, reason, tile, dgrad_tile, wgrad_tile = plan
    return Record(
        layer=layer,
        requested=accumulator_label("fp16_promoted", chunk) if chunk else "fp16" if requested else "fp32",
        decided_by=decided_by,
        accumulator=ran,
        tile=tile,
        dgrad_tile=dgrad_tile,
        wgrad_tile=wgrad_tile,
        compute_dtype=compute_dtype,
        out_dtype=out_dtype,
        reason=reason,
        chunk=chunk if ran == "fp16_promoted" else 0,
        rescaled=rescaled,
        parts=parts,
    )


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _parts(
    tile: str, n_out: int, volume: int, c_in: int, c_out: int, groups: int, device: torch.device
) -> int:
    """`Record.parts` of a call of that many channels over all groups."""
    if device.type != "cuda":
        return 1
    if torch.compiler.is_compiling():
        return 0
    if n_out == 0:
        return 1
    sms = _multiprocessors(device)
    return _C.tile_parts(tile, n_out, volume, c_in // groups, c_out // groups, groups, sms)
