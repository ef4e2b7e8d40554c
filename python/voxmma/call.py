"""One convolution call: precision decided, tiles chosen, the op launched, the record made.

Every convolution function ends here, so that what is decided, audited and verified is so for all of them.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from voxmma import settings
from voxmma.audit import notify
from voxmma.explain import Record
from voxmma.kernel_map import KernelMap
from voxmma.shadow import observe
from voxmma.tiles import Plan, accumulator_label, parse_accumulator, plan_call, rescaled


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


@torch.compiler.assume_constant_result  # which a cached function cannot be itself
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
    )


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
) -> tuple[Tensor, Record]:
    """Runs a convolution whose operands have been checked, over `mapping`, and says what ran.

    Args:
        feats: (n_in, C_in), any float dtype. weight: (K, C_in, C_out), or grouped. bias: (C_out,) or None.
        mapping: from the rows of `feats` to the rows of the result.
        use_fp16_accum, accumulator: the call's own level of the precedence.
        compute_dtype: of the products. out_dtype: of the result; None = compute_dtype.
        layer: name for the record.

    Returns:
        ((n_out, C_out), record).
    """
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
    operands = (x, weight, bias, *shared, ran, tile, dgrad_tile, wgrad_tile, written)
    if torch.is_autocast_enabled(feats.device.type):
        # The compute dtype is decided here, so the op's own autocast rule must not decide again.
        with torch.autocast(feats.device.type, enabled=False):
            y = op(*operands)
    else:
        y = op(*operands)
    record = _record(layer, requested, decided_by, plan, chunk, compute_dtype, y.dtype, scaled)
    notify(record)
    observe(x, weight, bias, mapping, y, record)
    return y, record
