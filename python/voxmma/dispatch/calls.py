"""One convolution call: precision decided, tiles chosen, the op launched, the record made.

Every convolution function ends here, so that what is decided, audited and verified is so for all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from voxmma._dynamo import constant_result
from voxmma._extension import _C
from voxmma.dispatch import measurements, settings, validation
from voxmma.dispatch.launches import listening, notify
from voxmma.dispatch.observers import observe, observed
from voxmma.dispatch.record import Record
from voxmma.dispatch.selection import Plan, asks_gate, plan_call, rescaled
from voxmma.ops.kernels import accumulator_label, parse_accumulator
from voxmma.sparse.cached import Made, keep
from voxmma.sparse.coords import _KEPT
from voxmma.sparse.maps import KernelMap, MapCore
from voxmma.sparse.tensor import Voxels


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


def _parts(tile: str, weight: Tensor, mapping: KernelMap, device: torch.device) -> int:
    """`Record.parts` of a call. weight: (K, C_in, C_out) or (K, G, C_in, C_out)."""
    if device.type != "cuda":
        return 1
    if torch.compiler.is_compiling():
        return 0
    if mapping.out_coords.num == 0:
        return 1
    volume, *_, c_in, c_out = weight.shape
    groups = weight.shape[1] if weight.dim() == 4 else 1
    sms = _multiprocessors(device)
    return _C.tile_parts(tile, mapping.out_coords.num, volume, c_in, c_out, groups, sms)


@dataclass(frozen=True, slots=True)
class Repeat:
    """What a submanifold call decided, kept on its coordinate set for the calls that are like it.

    A layer runs many times with the same arguments; all but the first find their map, tiles and record here.
    What the arguments do not say is compared at every call: settings, records of the gate and of the tuner.
    """

    core: MapCore
    runtime: settings.Settings
    environment: settings.Settings
    gate: str | None
    """validation.stamp() of the decision; None where no validation record can decide it"""
    tuned: int
    """measurements.generation() of the decision"""
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

    def holds(self) -> bool:
        """Whether the decision would be the same now."""
        runtime, environment = settings.state()
        return (
            self.runtime is runtime
            and self.environment is environment
            and not self.core.freed
            and self.tuned == measurements.generation()
            and (self.gate is None or self.gate == validation.stamp())
        )

    def run(self, x: Voxels, weight: Tensor, bias: Tensor | None) -> Voxels:
        """The call itself."""
        coords, feats = x._coord_set, x._feats
        coords.use(self.made)
        if self.dtype is not None:
            feats = feats.to(self.dtype)
        if self.prepared is None or has_torch_function((feats, weight, bias)):
            y = _launch(self.op, (feats, weight, bias, *self.operands))
        else:
            y = self.prepared(feats, weight, bias)
        if listening():
            notify(self.record)
        if observed():
            observe(feats, weight, bias, KernelMap(coords, coords, self.core), y, self.record)
        return Voxels._make(coords, y, x._stride, self.record)


Key = tuple[tuple[Any, ...], bytes]


def find_repeat(
    x: Voxels, weight: Tensor, bias: Tensor | None, arguments: tuple[Any, ...]
) -> tuple[Key | None, Repeat | None]:
    """Key of a call among `CoordSet.calls`, and what is there and holds. No key: the call cannot have one.

    `arguments`: what the caller passed. Equal keys mean equal decisions as long as `Repeat.holds`.
    """
    try:
        facts = _C.operand_facts(x._feats, weight, bias)
        if facts is None:
            return None, None
        key = arguments, facts
        found = x._coord_set.calls.get(key)
    except TypeError:  # an argument of a wrong type: whoever checks them names it
        return None, None
    return key, found if found is not None and found.holds() else None


def _launch(op: Callable[..., Tensor], operands: tuple[Any, ...]) -> Tensor:
    device_type = operands[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return op(*operands)
    # The compute dtype is decided here, so the op's own autocast rule must not decide again.
    with torch.autocast(device_type, enabled=False):
        return op(*operands)


def convolve(
    feats: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mapping: KernelMap,
    *,
    groups: int,
    use_fp16_accum: bool | None,
    accumulator: str | None,
    compute_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    layer: str,
    key: Key | None = None,
) -> tuple[Tensor, Record]:
    """Runs a convolution whose operands have been checked, over `mapping`, and says what ran.

    Args:
        feats: (n_in, C_in), any float dtype. weight: (K, C_in, C_out), or grouped. bias: (C_out,) or None.
        mapping: from the rows of `feats` to the rows of the result.
        use_fp16_accum, accumulator: the call's own level of the precedence.
        compute_dtype: of the products. out_dtype: of the result; None = compute_dtype.
        layer: name for the record.
        key: from `find_repeat`, under which the decision is kept for calls that are like this one.

    Returns:
        ((n_out, C_out), record).
    """
    before = None if key is None else (*settings.state(), measurements.generation())
    flag = fp16_accum_flag(use_fp16_accum, accumulator)
    chunk = 0 if accumulator is None else parse_accumulator(accumulator)[1]
    requested, decided_by = settings.resolve_fp16_accum(flag, compute_dtype)
    # From the weight: torch.compile may treat the features' channels as variable, a parameter's never.
    c_in, c_out = weight.shape[-2] * groups, weight.shape[-1] * groups
    plan = plan_call(
        compute_dtype,
        requested,
        decided_by,
        c_in,
        c_out,
        groups,
        feats.device,
        settings.get_pools(compute_dtype),
        chunk,
        weight.shape[0],
    )
    ran, _, tile, dgrad_tile, wgrad_tile = plan
    scaled = rescaled(compute_dtype, ran, decided_by, settings.get_fp16_rescale())
    needs_grad = torch.is_grad_enabled() and feats.requires_grad  # the weight gradient runs over `mapping`
    opposite = [] if mapping.symmetric or not needs_grad else mapping.transposed().tensors
    x = feats if feats.dtype == compute_dtype else feats.to(compute_dtype)
    op, written = torch.ops.voxmma.conv, out_dtype
    if scaled:
        op, written = torch.ops.voxmma.conv_rescaled, out_dtype or compute_dtype
    shared = (mapping.tensors, opposite, mapping.out_coords.num, mapping.symmetric, False)
    operands = (*shared, ran, tile, dgrad_tile, wgrad_tile, written)
    y = _launch(op, (x, weight, bias, *operands))
    parts = _parts(tile, weight, mapping, feats.device)
    record = _record(layer, requested, decided_by, plan, chunk, compute_dtype, y.dtype, scaled, parts)
    core = mapping.core_of_one_set()
    # float32 calls also follow torch's TF32 switches, which tell nobody when they change
    if before is not None and key is not None and core is not None and compute_dtype != torch.float32:
        runtime, environment, tuned = before
        evidence = None
        if asks_gate(compute_dtype, requested, feats.device, settings.get_pools(compute_dtype)):
            evidence = validation.stamp()
        prepared = None if scaled else _C.PreparedConv(*operands)
        cast = None if feats.dtype == compute_dtype else compute_dtype
        made = mapping.made
        repeat = Repeat(
            core, runtime, environment, evidence, tuned, op, operands, prepared, cast, record, made
        )
        coords = mapping.in_coords
        with coords._index.lock:
            coords.calls.pop(key, None)
            keep(coords.calls, key, repeat, _KEPT["calls"])
    notify(record)
    observe(x, weight, bias, mapping, y, record)
    return y, record
