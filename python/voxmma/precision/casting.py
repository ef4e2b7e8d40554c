"""The casts that a call needs under a policy (`operand_plan`), and a mode that makes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_map

from voxmma._surroundings import is_running, surroundings
from voxmma.precision.operators import (
    _CAST_RESULT,
    _F32_INSIDE,
    _F32_INSIDE_MODULES,
    _FIRST_ONLY,
    _KIND_BY_NAME,
    _NEUTRAL,
    OpKind,
    _op_name,
    _writes_first,
    kind_of,
)

if TYPE_CHECKING:
    from voxmma.precision.spec import PrecisionPolicy


@dataclass(frozen=True)
class OperandPlan:
    """What to do around one call.

    Attributes:
        kind: the kind of operation, None when unknown.
        dtype: cast float operands (float32, float16, bfloat16) to this; None = leave them alone.
        first_only: cast only the first operand.
        follow_first: the call writes to its first operand: cast the others to *its* dtype and never the
            first.
        result: cast the float results to this afterwards.
    """

    kind: OpKind | None
    dtype: torch.dtype | None
    first_only: bool = False
    follow_first: bool = False
    result: torch.dtype | None = None


_LEAVE = OperandPlan(None, None)


def operand_plan(
    policy: PrecisionPolicy, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> OperandPlan:
    """The casts a call of ``target`` needs under ``policy``; ``target`` as for `kind_of`."""
    name = None if isinstance(target, nn.Module) else _op_name(target)  # which keeps what it is asked about
    if isinstance(target, nn.Module):
        kind = kind_of(target)
        if getattr(target, "inplace", False):
            return OperandPlan(kind, None, follow_first=True)
    else:
        own = getattr(target, "__module__", None) or ""
        if own.startswith("torch._ops.voxmma"):
            return _LEAVE  # its precision is in its arguments, which the layer chose
        if name is not None and (
            name in _NEUTRAL or name.startswith(("is_", "_is_", "new_", "requires_grad"))
        ):
            return _LEAVE
        kind = _KIND_BY_NAME.get(name or "")
        if _writes_first(target, args, kwargs):
            return OperandPlan(kind, None, follow_first=True)
    if name == "clone":  # what copy.deepcopy makes of a parameter is a parameter like it
        return OperandPlan(kind, None)
    dtype = policy.precision_for(kind).dtype
    if kind is OpKind.Reduction and dtype != torch.float32 and policy.reduction_inside == "f32":
        native = isinstance(target, _F32_INSIDE_MODULES) or name in _F32_INSIDE
        dtype = dtype if native else torch.float32
    if name in _CAST_RESULT or isinstance(target, nn.Embedding):
        return OperandPlan(kind, None, result=dtype)
    first_only = name in _FIRST_ONLY or isinstance(target, nn.modules.batchnorm._NormBase)
    return OperandPlan(kind, dtype, first_only=first_only)


CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def cast_value(value: Any, dtype: torch.dtype) -> Any:
    """``value`` in ``dtype`` when it is a float tensor of at most 32 bits or Voxels with such features."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in CASTABLE and value.dtype != dtype else value
    feats = getattr(value, "feats", None)
    if isinstance(feats, torch.Tensor) and hasattr(value, "with_feats"):
        return (
            value.with_feats(feats.to(dtype)) if feats.dtype in CASTABLE and feats.dtype != dtype else value
        )
    return value


_DEVICES = ("cpu", "cuda")


def _set_autocast(device_type: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_enabled(device_type, enabled)
    torch.clear_autocast_cache()  # it holds weights in the dtype of before


class PolicyMode(TorchFunctionMode):
    """Casts the operands of every PyTorch function this thread calls, as `operand_plan` says.

    Args:
        policy: the policy.
        call: the frame of the module's call that this mode is for; it ends with it. None: where it is exited.
    """

    def __init__(self, policy: PrecisionPolicy, call: FrameType | None = None) -> None:
        super().__init__()
        self.policy = policy
        self.call = call
        self.casts: Counter[str] = Counter()
        self.over = False  # ended by another thread, which cannot take it off this one
        self._before: dict[str, tuple[bool, torch.dtype]] = {}

    def __enter__(self) -> PolicyMode:
        # Autocast is what code outside PyTorch asks for its compute dtype, our sparse functions among it;
        # PyTorch's own functions run with it off, because the policy has already cast their operands.
        compute = self.policy.forward.input
        for device in _DEVICES:
            self._before[device] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            _set_autocast(
                device, compute.is_half, compute.dtype if compute.is_half else self._before[device][1]
            )
        super().__enter__()
        surroundings.modes.append(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        """Ends this mode of this thread, be it the last one or not."""
        self._forget()
        stack = _get_current_function_mode_stack()
        above = [_pop_mode() for _ in stack[stack.index(self) + 1 :]]
        super().__exit__(*exc)
        for other in reversed(above):
            _push_mode(other)

    def _forget(self) -> None:
        """Leaves the casting and the autocast state to those before it."""
        modes = surroundings.modes
        if self not in modes:
            return
        place = modes.index(self)
        later = [mode for mode in modes[place + 1 :] if isinstance(mode, PolicyMode)]
        del modes[place]
        if later:
            later[0]._before = self._before
            return
        for device, (enabled, dtype) in self._before.items():
            _set_autocast(device, enabled, dtype)

    def _cast(self, value: Any, dtype: torch.dtype, kind: OpKind | None) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dtype in CASTABLE and leaf.dtype != dtype:
                self.casts[kind.value if kind else "unknown"] += 1
                return leaf.to(dtype)
            return leaf

        return tree_map(one, value)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.over or not is_running(self.call):
            self._forget()
        if surroundings.modes[-1:] != [self]:
            return func(*args, **kwargs)  # PyTorch asks every mode in turn; the innermost decides
        plan = operand_plan(self.policy, func, args, kwargs)
        dtype = plan.dtype
        if plan.follow_first:
            first = args[0] if args else kwargs.get("input")
            dtype = first.dtype if isinstance(first, torch.Tensor) and first.dtype in CASTABLE else None
        if dtype is not None:
            split = 1 if plan.first_only else len(args)
            if plan.follow_first:
                args = args[:1] + self._cast(args[1:], dtype, plan.kind)
            else:
                args = self._cast(args[:split], dtype, plan.kind) + args[split:]
            if plan.first_only and "input" in kwargs:
                kwargs = {**kwargs, "input": self._cast(kwargs["input"], dtype, plan.kind)}
            elif not plan.first_only:
                kept = {k: v for k, v in kwargs.items() if k == "out" or (plan.follow_first and k == "input")}
                kwargs = {**self._cast(kwargs, dtype, plan.kind), **kept}
        with torch._C._DisableAutocast():
            out = func(*args, **kwargs)
        return self._cast(out, plan.result, plan.kind) if plan.result is not None else out
