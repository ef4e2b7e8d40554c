"""Declarative precision: one policy object, what kind each operation is, and how a policy is put to work.

A `PrecisionPolicy` says in which precision the five kinds of operation run (`OpKind`), and for the products
of a convolution or linear layer also the accumulator, its chunk and the output, for forward, dgrad and wgrad
apart (`ComputeSpec`). Policies are immutable, checked when they are made, and have versioned names.

There is one rule book for what casts an operation needs (`operand_plan`). Three things use it:

* ``with policy:`` every PyTorch function called in the block by this thread;
* `apply_policy`: everything a module calls in its forward, with sparse convolution layers set as the policy
  says;
* `voxmma.precision.policy_graph`: torch.fx graphs, and torch.compile through a backend wrapper.

Parameters stay in the precision they are stored in; they are cast where they are used, so gradients and
optimiser state stay float32. float64 operands are never touched.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._pytree import tree_map

from voxmma import torchflags
from voxmma.dispatch import settings
from voxmma.dispatch.config import fp16_accum_flag
from voxmma.nn.modules.sparse_conv import SparseConv3d
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

__all__ = [
    "AppliedPolicy",
    "ComputeSpec",
    "Direction",
    "LayerRow",
    "OpKind",
    "PolicyError",
    "Precision",
    "PrecisionPolicy",
    "activate",
    "applied",
    "apply_policy",
    "as_policy",
    "current_policy",
    "kind_of",
]


class PolicyError(ValueError):
    """A policy that asks for something impossible or unsafe."""


class Precision(str, Enum):
    """A number format. TF32 is float32 storage whose products round the operands to 10 mantissa bits."""

    F32 = "f32"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds a value of this precision."""
        return {"f16": torch.float16, "bf16": torch.bfloat16}.get(self.value, torch.float32)

    @property
    def is_half(self) -> bool:
        """Whether values take 16 bits."""
        return self in (Precision.F16, Precision.BF16)


class Direction(str, Enum):
    """The three products of a layer: its output, the gradient of its input, the gradient of its weight."""

    forward = "forward"
    dgrad = "dgrad"
    wgrad = "wgrad"


CHUNKS = (32, 64, 128, "offset")


@dataclass(frozen=True)
class ComputeSpec:
    """The precisions inside one product: operands, running sum, how often the sum is promoted, result.

    Attributes:
        input: what the operands are rounded to.
        accumulator: F32 or F16.
        chunk: with an F16 accumulator, after how many addends (32, 64, 128 or one kernel 'offset') the sum is
            added to a float32 total; None = never.
        output: what the result is rounded to; None = the storage of ``input``.
        rescale: allows BF16 operands with an F16 accumulator, by converting them to fp16 with a power-of-two
            scale.

    Raises PolicyError for a combination no kernel of this library has.
    """

    input: Precision = Precision.F32
    accumulator: Precision = Precision.F32
    chunk: int | str | None = None
    output: Precision | None = None
    rescale: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "input", _precision(self.input))
        object.__setattr__(self, "accumulator", _precision(self.accumulator))
        default = self.input if self.input.is_half else Precision.F32
        object.__setattr__(self, "output", default if self.output is None else _precision(self.output))
        if self.accumulator not in (Precision.F32, Precision.F16):
            raise PolicyError(f"an accumulator is fp32 or fp16, not {self.accumulator.value}")
        if self.accumulator is Precision.F16:
            if not self.input.is_half:
                raise PolicyError(f"{self.input.value} operands need an fp32 accumulator")
            if self.input is Precision.BF16 and not self.rescale:
                raise PolicyError(
                    "no tensor core adds bf16 products in fp16; ask for rescale=True (operands converted to "
                    "fp16 with a power-of-two scale) or an fp32 accumulator"
                )
        if self.rescale and not (self.input is Precision.BF16 and self.accumulator is Precision.F16):
            raise PolicyError("rescale belongs to bf16 operands with an fp16 accumulator")
        if self.chunk is not None:
            if self.accumulator is not Precision.F16:
                raise PolicyError("a chunk belongs to an fp16 accumulator; an fp32 sum is not promoted")
            if isinstance(self.chunk, bool) or self.chunk not in CHUNKS:
                raise PolicyError(
                    f"chunk is one of {', '.join(map(str, CHUNKS))} or None, not {self.chunk!r}"
                )
        result = self.output_format
        if result is not Precision.F32 and result is not default:
            raise PolicyError(f"{self.input.value} operands give fp32 or {default.value}, not {result.value}")

    @property
    def output_format(self) -> Precision:
        """What the result is rounded to."""
        return Precision.F32 if self.output is None else self.output

    @property
    def accumulator_name(self) -> str:
        """The library's name of the accumulator: 'fp32', 'fp16' or 'fp16_promoted'."""
        if self.accumulator is Precision.F32:
            return "fp32"
        return "fp16" if self.chunk is None else "fp16_promoted"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return {
            "input": self.input.value,
            "accumulator": self.accumulator.value,
            "chunk": self.chunk,
            "output": self.output_format.value,
            "rescale": self.rescale,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ComputeSpec:
        """Rebuilds what `to_json` wrote; an unknown key is a PolicyError."""
        unknown = set(data) - {"input", "accumulator", "chunk", "output", "rescale"}
        if unknown:
            raise PolicyError(f"unknown keys in a compute specification: {', '.join(sorted(unknown))}")
        return cls(**data)


def _precision(value: Precision | str) -> Precision:
    try:
        return Precision(value)
    except ValueError:
        raise PolicyError(
            f"unknown precision {value!r}; there are {', '.join(p.value for p in Precision)}"
        ) from None


def _kind(value: Any) -> OpKind | None:
    """The kind by member or by name (any case), None when there is no such kind."""
    if isinstance(value, OpKind):
        return value
    return next((k for k in OpKind if isinstance(value, str) and k.value.lower() == value.lower()), None)


# ---------------------------------------------------------------- the policy
@dataclass(frozen=True)
class PrecisionPolicy:
    """Which precision each kind of operation runs in. Make one by name or with `custom`.

    ``PrecisionPolicy.always_f32`` (the default), ``always_f16``, ``auto_mixed_conservative``, ``auto_mixed``
    and ``auto_mixed_bf16`` are the named policies. Entering a policy (``with policy:``) applies it to what
    this thread calls in the block.

    Attributes:
        name, version: identity; a meaning never changes under the same version.
        kinds: the operand precision of every kind, in the order of `OpKind`.
        reduction_inside: what reductions add up in (their operands are ``precision_for(Reduction)``).
        forward, dgrad, wgrad: the products, in detail.
    """

    name: str
    version: int
    kinds: tuple[Precision, ...]
    reduction_inside: Precision
    forward: ComputeSpec
    dgrad: ComputeSpec
    wgrad: ComputeSpec

    always_f32: ClassVar[PrecisionPolicy]
    always_f16: ClassVar[PrecisionPolicy]
    auto_mixed_conservative: ClassVar[PrecisionPolicy]
    auto_mixed: ClassVar[PrecisionPolicy]
    auto_mixed_bf16: ClassVar[PrecisionPolicy]

    def __post_init__(self) -> None:
        by_kind = dict(zip(OpKind, self.kinds, strict=True))
        if by_kind[OpKind.Boundary] is not Precision.F32:
            raise PolicyError("Boundary is always fp32")
        for kind in (OpKind.Reduction, OpKind.Elementwise, OpKind.DataMovement):
            if by_kind[kind] is Precision.TF32:
                raise PolicyError(f"tf32 is a way to multiply: it fits Compute, not {kind.value}")
        if (
            self.reduction_inside is not Precision.F32
            and self.reduction_inside is not by_kind[OpKind.Reduction]
        ):
            raise PolicyError("a reduction adds up in fp32 or in the precision of its operands")
        if self.forward.input is not by_kind[OpKind.Compute]:
            compute = by_kind[OpKind.Compute].value
            raise PolicyError(
                f"Compute is {compute} but the forward product takes {self.forward.input.value}"
            )
        if self.wgrad.accumulator is not Precision.F32:
            raise PolicyError("the weight gradient always accumulates in fp32")

    @classmethod
    def custom(
        cls,
        kinds: Mapping[OpKind | str, Precision | str],
        *,
        forward: ComputeSpec | None = None,
        dgrad: ComputeSpec | None = None,
        wgrad: ComputeSpec | None = None,
        reduction_inside: Precision | str = Precision.F32,
    ) -> PrecisionPolicy:
        """A policy of one's own. Kinds not named are fp32.

        Args:
            kinds: kind (member or name) to precision.
            forward, dgrad, wgrad: the products in detail. ``forward`` defaults to Compute's precision with an
                fp32 accumulator, ``dgrad`` to ``forward``, ``wgrad`` to the forward operands, fp32 sums and
                result.
            reduction_inside: fp32, or the precision of Reduction.

        Raises PolicyError for an unknown kind or precision, a Boundary other than fp32, an illegal product.
        """
        table = dict.fromkeys(OpKind, Precision.F32)
        for key, value in kinds.items():
            kind = _kind(key)
            if kind is None:
                raise PolicyError(f"unknown kind {key!r}; there are {', '.join(k.value for k in OpKind)}")
            table[kind] = _precision(value)
        if forward is not None and not any(_kind(k) is OpKind.Compute for k in kinds):
            table[OpKind.Compute] = forward.input
        forward = forward or ComputeSpec(table[OpKind.Compute])
        policy = cls(
            name="custom",
            version=1,
            kinds=tuple(table.values()),
            reduction_inside=_precision(reduction_inside),
            forward=forward,
            dgrad=dgrad or forward,
            wgrad=wgrad or ComputeSpec(forward.input, output=Precision.F32),
        )
        return next((p for p in NAMED.values() if p.same_as(policy)), policy)

    def with_compute(self, forward: ComputeSpec, dgrad: ComputeSpec | None = None) -> PrecisionPolicy:
        """This policy with other products (a custom policy): forward, and dgrad where it is not the same."""
        kinds: dict[OpKind | str, Precision | str] = dict(zip(OpKind, self.kinds, strict=True))
        kinds[OpKind.Compute] = forward.input
        return self.custom(kinds, forward=forward, dgrad=dgrad, reduction_inside=self.reduction_inside)

    # ---- questions
    def precision_for(self, kind: OpKind | str | None) -> Precision:
        """The operand precision of ``kind``. Anything that is not a known kind gives F32 (fails closed)."""
        known = _kind(kind)
        return Precision.F32 if known is None else dict(zip(OpKind, self.kinds, strict=True))[known]

    def compute_for(self, direction: Direction | str) -> ComputeSpec:
        """The product of one direction. Raises ValueError for an unknown direction."""
        return {"forward": self.forward, "dgrad": self.dgrad, "wgrad": self.wgrad}[Direction(direction).value]

    @property
    def tf32(self) -> bool:
        """Whether float32 products may use TF32."""
        return self.forward.input is Precision.TF32

    def same_as(self, other: PrecisionPolicy) -> bool:
        """Whether both mean the same, whatever their names."""
        return replace(self, name="", version=0) == replace(other, name="", version=0)

    @property
    def versioned_name(self) -> str:
        """``auto_mixed@1``; a custom policy adds a digest of its contents."""
        stem = f"{self.name}@{self.version}"
        if NAMED.get(self.name) == self:
            return stem
        text = json.dumps(self.to_json(), sort_keys=True)
        return f"{stem}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def __str__(self) -> str:
        return self.versioned_name

    # ---- records
    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, complete; `from_json` is the inverse."""
        return {
            "name": self.name,
            "version": self.version,
            "kinds": {k.value: p.value for k, p in zip(OpKind, self.kinds, strict=True)},
            "reduction_inside": self.reduction_inside.value,
            "forward": self.forward.to_json(),
            "dgrad": self.dgrad.to_json(),
            "wgrad": self.wgrad.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """Rebuilds what `to_json` wrote.

        Raises PolicyError when keys are missing or unknown, the version is not one this release knows, or a
        named policy's contents are not what its name means.
        """
        expected = {"name", "version", "kinds", "reduction_inside", "forward", "dgrad", "wgrad"}
        if set(data) != expected:
            raise PolicyError(f"a policy record has exactly the keys {', '.join(sorted(expected))}")
        if data["version"] != 1:
            raise PolicyError(f"policy version {data['version']!r} is not known here")
        if set(data["kinds"]) != {k.value for k in OpKind}:
            raise PolicyError("a policy record names every kind once")
        policy = cls(
            name=data["name"],
            version=data["version"],
            kinds=tuple(_precision(data["kinds"][k.value]) for k in OpKind),
            reduction_inside=_precision(data["reduction_inside"]),
            forward=ComputeSpec.from_json(data["forward"]),
            dgrad=ComputeSpec.from_json(data["dgrad"]),
            wgrad=ComputeSpec.from_json(data["wgrad"]),
        )
        if policy.name != "custom" and NAMED.get(policy.name) != policy:
            raise PolicyError(
                f"the record says {policy.name}@{policy.version} but its contents are not that policy"
            )
        return policy

    # ---- use
    def boundary(self, value: Any) -> Any:
        """``value`` as it leaves a model: 16-bit floats (also inside containers, Voxels) become float32."""
        return tree_map(
            lambda leaf: _cast_value(leaf, torch.float32), value, is_leaf=lambda v: hasattr(v, "with_feats")
        )

    def __enter__(self) -> PrecisionPolicy:
        _not_while_compiling()
        _THREAD.blocks.append(activate(self))
        return self

    def __exit__(self, *exc: object) -> None:
        blocks = _THREAD.blocks  # the last one of this policy: blocks of others may end later
        place = max(i for i, block in enumerate(blocks) if block.policy is self)
        blocks.pop(place).revert()


def _named(name: str, compute: str, reduction: str, inside: str, rest: str) -> PrecisionPolicy:
    kinds = tuple(map(Precision, (compute, reduction, rest, rest, "f32")))
    forward = ComputeSpec(Precision(compute))
    wgrad = ComputeSpec(Precision(compute), output=Precision.F32)
    return PrecisionPolicy(name, 1, kinds, Precision(inside), forward, forward, wgrad)


#: The named policies by name.
NAMED: dict[str, PrecisionPolicy] = {
    p.name: p
    for p in (
        _named("always_f32", "f32", "f32", "f32", "f32"),
        _named("always_f16", "f16", "f16", "f16", "f16"),
        _named("auto_mixed_conservative", "f16", "f32", "f32", "f16"),
        _named("auto_mixed", "f16", "f16", "f32", "f16"),
        _named("auto_mixed_bf16", "bf16", "bf16", "f32", "bf16"),
    )
}
for _policy in NAMED.values():
    setattr(PrecisionPolicy, _policy.name, _policy)


def as_policy(value: PrecisionPolicy | str | Mapping[str, Any]) -> PrecisionPolicy:
    """The one resolver: a policy, a name (``'auto_mixed'`` or ``'auto_mixed@1'``) or a record of `to_json`.

    Raises PolicyError for an unknown name or version, TypeError for another type.
    """
    if isinstance(value, PrecisionPolicy):
        return value
    if isinstance(value, str):
        name, _, version = value.partition("@")
        if name not in NAMED:
            raise PolicyError(f"unknown policy {value!r}; there are {', '.join(NAMED)}")
        if version and version != str(NAMED[name].version):
            raise PolicyError(f"{name} exists in version {NAMED[name].version}, not {version}")
        return NAMED[name]
    if isinstance(value, Mapping):
        return PrecisionPolicy.from_json(value)
    raise TypeError(f"expected a PrecisionPolicy, its name or its record, not {type(value).__name__}")


# ---------------------------------------------------------------- the rule book
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
    name = _op_name(target)
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
    precision = policy.precision_for(kind)
    if kind is OpKind.Reduction and precision.is_half and policy.reduction_inside is Precision.F32:
        native = isinstance(target, _F32_INSIDE_MODULES) or name in _F32_INSIDE
        precision = precision if native else Precision.F32
    if name in _CAST_RESULT or isinstance(target, nn.Embedding):
        return OperandPlan(kind, None, result=precision.dtype)
    first_only = name in _FIRST_ONLY or isinstance(target, nn.modules.batchnorm._NormBase)
    return OperandPlan(kind, precision.dtype, first_only=first_only)


_CASTABLE = (torch.float32, torch.float16, torch.bfloat16)


def _cast_value(value: Any, dtype: torch.dtype) -> Any:
    """``value`` in ``dtype`` when it is a float tensor of at most 32 bits or Voxels with such features."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _CASTABLE and value.dtype != dtype else value
    feats = getattr(value, "feats", None)
    if isinstance(feats, torch.Tensor) and hasattr(value, "with_feats"):
        return (
            value.with_feats(feats.to(dtype)) if feats.dtype in _CASTABLE and feats.dtype != dtype else value
        )
    return value


_DEVICES = ("cpu", "cuda")


def _set_autocast(device_type: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_dtype(device_type, dtype)
    torch.set_autocast_enabled(device_type, enabled)
    torch.clear_autocast_cache()  # it holds weights in the dtype of before


class _PolicyMode(TorchFunctionMode):
    """Casts the operands of every PyTorch function this thread calls, as `operand_plan` says."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.casts: Counter[str] = Counter()
        self.over = False  # ended by another thread, which cannot take it off this one
        self._before: dict[str, tuple[bool, torch.dtype]] = {}

    def __enter__(self) -> _PolicyMode:
        # Autocast is what code outside PyTorch asks for its compute dtype, our sparse functions among it;
        # PyTorch's own functions run with it off, because the policy has already cast their operands.
        compute = self.policy.forward.input
        for device in _DEVICES:
            self._before[device] = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
            _set_autocast(
                device, compute.is_half, compute.dtype if compute.is_half else self._before[device][1]
            )
        super().__enter__()
        torchflags.surroundings.modes.append(self)
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
        modes = torchflags.surroundings.modes
        if self not in modes:
            return
        place = modes.index(self)
        later = [mode for mode in modes[place + 1 :] if isinstance(mode, _PolicyMode)]
        del modes[place]
        if later:
            later[0]._before = self._before
            return
        for device, (enabled, dtype) in self._before.items():
            _set_autocast(device, enabled, dtype)

    def _cast(self, value: Any, dtype: torch.dtype, kind: OpKind | None) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor) and leaf.dtype in _CASTABLE and leaf.dtype != dtype:
                self.casts[kind.value if kind else "unknown"] += 1
                return leaf.to(dtype)
            return leaf

        return tree_map(one, value)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.over:
            self._forget()
        if torchflags.surroundings.modes[-1:] != [self]:
            return func(*args, **kwargs)  # PyTorch asks every mode in turn; the innermost decides
        plan = operand_plan(self.policy, func, args, kwargs)
        dtype = plan.dtype
        if plan.follow_first:
            first = args[0] if args else kwargs.get("input")
            dtype = first.dtype if isinstance(first, torch.Tensor) and first.dtype in _CASTABLE else None
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


# ---------------------------------------------------------------- putting a policy to work
class _ThreadState(threading.local):
    """What is at work in this thread: open ``with`` blocks, and forwards that have begun under a policy."""

    def __init__(self) -> None:
        self.blocks: list[AppliedPolicy] = []
        self.running: list[tuple[_OnModule, _PolicyMode]] = []


_THREAD = _ThreadState()


def current_policy() -> PrecisionPolicy | None:
    """The innermost policy at work in this thread, None outside of any."""
    if _THREAD.running:
        return _THREAD.running[-1][0].policy
    return _THREAD.blocks[-1].policy if _THREAD.blocks else None


class _OnModule:
    """A policy on a module, whose forward runs under it. A copy of the module has a copy of this."""

    def __init__(self, policy: PrecisionPolicy) -> None:
        self.policy = policy
        self.casts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._running = 0
        self._on = True

    def __getstate__(self) -> PrecisionPolicy:
        return self.policy

    def __setstate__(self, policy: PrecisionPolicy) -> None:
        self.__init__(policy)  # type: ignore[misc]

    def put_on(self, module: nn.Module) -> None:
        module.register_forward_pre_hook(self.before, prepend=True)
        module.register_forward_hook(self.after, always_call=True)

    @torch.compiler.disable
    def before(self, module: nn.Module, args: Any) -> None:
        with self._lock:
            self._running += 1
        mode = _PolicyMode(self.policy)
        mode.__enter__()
        _THREAD.running.append((self, mode))

    @torch.compiler.disable
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        running = _THREAD.running
        if not running or running[-1][0] is not self:
            return output  # an earlier hook failed before the forward began
        mode = running.pop()[1]
        mode.__exit__(None, None, None)
        with self._lock:
            self._running -= 1
            self.casts += mode.casts
            if not (self._on or self._running):
                self._unhook(module)
        return self.policy.boundary(output)

    def remove(self, module: nn.Module) -> None:
        """Takes the policy off; forwards that have begun in other threads end under it."""
        with self._lock:
            self._on = False
            _remove_hook(module._forward_pre_hooks, self)
            if not self._running:
                self._unhook(module)

    def _unhook(self, module: nn.Module) -> None:
        for key in _remove_hook(module._forward_hooks, self):
            module._forward_hooks_always_called.pop(key, None)


def _remove_hook(hooks: dict[int, Any], owner: object) -> list[int]:
    """Removes the hooks that are methods of ``owner``; returns their keys."""
    found = [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is owner]
    for key in found:
        del hooks[key]
    return found


def _on_module(module: nn.Module) -> _OnModule | None:
    owners = (getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, _OnModule)), None)


@dataclass(frozen=True)
class LayerRow:
    """What a policy does to one layer: its name, class, kind, operand precision, and a remark."""

    name: str
    module: str
    kind: str
    precision: str
    note: str


@dataclass
class AppliedPolicy:
    """A policy at work; `revert` undoes everything. Also a context manager that reverts at its end.

    Attributes:
        policy: the policy.
        rows: one `LayerRow` per layer (empty for a ``with policy:`` block).
    """

    policy: PrecisionPolicy
    rows: list[LayerRow] = field(default_factory=list)
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack, repr=False)
    _counters: list[Any] = field(default_factory=list, repr=False)

    @property
    def casts(self) -> dict[str, int]:
        """Casts made so far, by kind of the operation that needed them."""
        return dict(sum((c.casts for c in self._counters), Counter()))

    def revert(self) -> None:
        """Removes the policy and puts everything back as it was. A second call does nothing.

        Raises torchflags.FlagsError when PyTorch's TF32 switches could not be put back exactly.
        """
        self._undo.close()

    def __enter__(self) -> AppliedPolicy:
        return self

    def __exit__(self, *exc: object) -> None:
        self.revert()

    def table(self) -> str:
        """The rows as aligned text."""
        cells = [("layer", "class", "kind", "operands", "")]
        cells += [(r.name or "(root)", r.module, r.kind, r.precision, r.note) for r in self.rows]
        widths = [max(len(row[i]) for row in cells) for i in range(5)]
        lines = ("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in cells)
        return "\n".join(line.rstrip() for line in lines)


def _set_switches(policy: PrecisionPolicy, undo: contextlib.ExitStack) -> None:
    """Sets PyTorch's switches and this library's float32 precision as Compute says; ``undo`` puts them back.

    float32 or TF32: which of the two, on a CPU, too. 16 bits with float32 sums: no sums in 16 bits.
    """
    wide = not policy.forward.input.is_half
    hold = torchflags.Hold(("tree", "legacy") if wide else torchflags.SHORT_SUMS)

    def put_back() -> None:
        left = hold.release()
        if left:
            text = "not put back: " + "; ".join(map(str, left))
            if any(difference.wanted != "default" for difference in left):
                raise torchflags.FlagsError(text)
            warnings.warn(text + " (the same precision, but PyTorch cannot write it back)", stacklevel=2)

    undo.callback(put_back)
    if not wide:
        if policy.forward.accumulator is Precision.F32:
            torchflags.forbid_short_sums()
        return
    torchflags.set_cpu_fp32(policy.tf32)
    torchflags.set_tf32(policy.tf32)
    undo.callback(settings.begin(fp32_precision="tf32" if policy.tf32 else "ieee"))


def _end_mode(mode: _PolicyMode, thread: int) -> None:
    """Ends a mode at once in its own thread; from another, when that thread calls its next function."""
    if threading.get_ident() == thread:
        mode.__exit__(None, None, None)
    else:
        mode.over = True


def _not_while_compiling() -> None:
    if torch.compiler.is_dynamo_compiling():
        raise RuntimeError(
            "torch.compile cannot trace a policy that casts as it goes; revert it and compile the plain "
            "model with backend=voxmma.precision.policy_graph.policy_backend(policy)"
        )


def activate(policy: PrecisionPolicy, switches_only: bool = False) -> AppliedPolicy:
    """What ``with policy:`` does, until `AppliedPolicy.revert`.

    Compute in fp32 has TF32 (on a CPU bf16, too) off, tf32 has it on; fp16, bf16 leave those switches alone,
    but with fp32 accumulators have PyTorch's libraries add up in fp32.

    The switches and this library's accumulator setting are process-wide, the casts belong to this
    thread. ``switches_only`` leaves it at the switches.
    """
    applied = AppliedPolicy(policy)
    with contextlib.ExitStack() as stack:
        _set_switches(policy, stack)
        if not switches_only:
            # A promoted sum can only be asked of a layer; without one the more exact fp32 sum runs.
            stack.callback(settings.begin(fp16_accum=policy.forward.accumulator_name == "fp16"))
            mode = _PolicyMode(policy)
            stack.callback(_end_mode, mode, threading.get_ident())
            mode.__enter__()
            applied._counters.append(mode)
        applied._undo = stack.pop_all()
    return applied


def sparse_accumulator(policy: PrecisionPolicy) -> str | None:
    """What sparse layers take as ``accumulator`` under a policy; None where ``use_fp16_accum`` says it all.

    Raises PolicyError for a policy they cannot follow.
    """
    spec = policy.forward
    if policy.dgrad.accumulator_name != spec.accumulator_name or policy.dgrad.chunk != spec.chunk:
        raise PolicyError("sparse layers use one accumulator for forward and dgrad; the policy asks for two")
    return f"{spec.accumulator_name}:{spec.chunk}" if spec.chunk is not None else None


def set_sparse_layer(
    layer: nn.Module, policy: PrecisionPolicy, undo: contextlib.ExitStack | None = None
) -> str:
    """Sets the precision attributes of a sparse convolution layer and returns the remark for its row."""
    spec = policy.forward
    wanted: dict[str, Any] = {
        "use_fp16_accum": spec.accumulator is Precision.F16,
        "accumulator": sparse_accumulator(policy),
        "compute_dtype": spec.input.dtype,
        "out_dtype": spec.output_format.dtype,
    }
    try:
        fp16_accum_flag(wanted["use_fp16_accum"], wanted["accumulator"])
    except ValueError as error:
        raise PolicyError(f"sparse layers cannot follow {policy}: {error}") from None
    if undo is not None:
        layer.__dict__["_without_policy"] = {name: getattr(layer, name) for name in wanted}
        undo.callback(_reset_sparse_layer, layer)
    for name, value in wanted.items():
        setattr(layer, name, value)
    return f"accumulator {spec.accumulator_name}"


def refuse_narrow_state(name: str, part: nn.Module, policy: PrecisionPolicy) -> None:
    """Raises PolicyError for a layer of 16-bit state that PyTorch's kernels do not take under ``policy``.

    Norms with running statistics and recurrent layers want their state in float32 or in the dtype of their
    input, which the policy decides.
    """
    if not isinstance(part, nn.modules.batchnorm._NormBase | nn.RNNBase):
        return
    dtype = policy.precision_for(kind_of(part)).dtype
    own = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
    wrong = {t.dtype for t in own if t.dtype in (torch.float16, torch.bfloat16)} - {dtype}
    if wrong:
        found = ", ".join(str(t).removeprefix("torch.") for t in sorted(wrong, key=str))
        raise PolicyError(
            f"{name or 'the module'} ({type(part).__name__}) holds {found} tensors, but its operands are "
            f"{str(dtype).removeprefix('torch.')} under {policy}: call .float() on the model or this layer"
        )


def _reset_sparse_layer(layer: nn.Module) -> None:
    """What the layer was set to before `set_sparse_layer`; the layer itself knows, copies of it too."""
    for name, value in vars(layer).pop("_without_policy", {}).items():
        setattr(layer, name, value)


def applied(module: nn.Module) -> AppliedPolicy | None:
    """The handle of the policy on a copy of a module that is under one; None where there is no policy.

    Copies (deepcopy, pickle, an EMA) keep the policy: casts, and settings of sparse layers. The TF32 switches
    of the process stay with the handle that `apply_policy` returned. ``revert`` makes the copy a plain model.
    """
    parts = [(part, found) for part in module.modules() if (found := _on_module(part)) is not None]
    if not parts:
        return None
    handle = AppliedPolicy(parts[0][1].policy)
    for part, on_module in parts:
        handle._undo.callback(on_module.remove, part)
        handle._counters.append(on_module)
    for part in module.modules():
        if isinstance(part, SparseConv3d):
            handle._undo.callback(_reset_sparse_layer, part)
    return handle


def apply_policy(
    module: nn.Module,
    policy: PrecisionPolicy | str | Mapping[str, Any],
    overrides: Mapping[str, PrecisionPolicy | str | Mapping[str, Any]] | None = None,
) -> AppliedPolicy:
    """Makes ``module`` run under ``policy`` until the returned object's `revert`.

    Everything the forward calls has its operands cast by kind, outputs leave in float32, sparse convolution
    layers get ``use_fp16_accum``, ``accumulator``, ``compute_dtype`` and ``out_dtype``, and PyTorch's TF32
    switches are set as Compute says (process-wide, until reverted). Parameters, buffers and the state dict
    stay as they are.

    Args:
        module: the model, or any part of one. One that goes through torch.compile is compiled with
            `voxmma.precision.policy_graph.policy_backend` instead.
        policy: a policy, its name or its record.
        overrides: policies of parts, by module name with shell wildcards (``{"head*": "always_f32"}``).

    Raises TypeError for a module with float64 tensors, PolicyError for a policy the layers cannot follow (a
    norm of 16-bit state in another precision among them) or overrides that differ in TF32 (process-wide),
    KeyError for an override that matches nothing, RuntimeError when a policy is already applied to the module
    or a part of it.
    """
    policy = as_policy(policy)
    torchflags.refuse_fp64(module, f"policy {policy}")
    for name, part in module.named_modules():
        if _on_module(part) is not None:
            where = name or "this module"
            raise RuntimeError(f"a policy is already applied to {where}; revert it first (see `applied`)")
    owners = {"": policy}
    for pattern, value in (overrides or {}).items():
        own = as_policy(value)
        if own.tf32 != policy.tf32:
            raise PolicyError("TF32 is process-wide: a part cannot differ from the whole in it")
        hits = [n for n, _ in module.named_modules() if n and fnmatch.fnmatchcase(n, pattern)]
        if not hits:
            raise KeyError(f"no part of the module is called {pattern!r}")
        owners.update(dict.fromkeys(hits, own))

    def policy_of(name: str) -> PrecisionPolicy:
        return owners[max((o for o in owners if o in ("", name) or name.startswith(o + ".")), key=len)]

    for name, part in module.named_modules():
        refuse_narrow_state(name, part, policy_of(name))
    applied, switches = AppliedPolicy(policy), activate(policy, switches_only=True)
    applied._undo.callback(switches.revert)
    dropped = weakref.finalize(module, switches.revert)  # nobody can revert a policy on what is gone
    dropped.atexit = False
    applied._undo.callback(dropped.detach)
    try:
        for name, own in owners.items():
            part = module.get_submodule(name)
            on_module = _OnModule(own)
            on_module.put_on(part)
            applied._undo.callback(on_module.remove, part)
            applied._counters.append(on_module)
        for name, part in module.named_modules():
            own = policy_of(name)
            kind = kind_of(part)
            if kind is None and any(True for _ in part.children()):
                continue
            note = "" if kind is not None else "unknown class: its functions decide, unknown ones run in fp32"
            if isinstance(part, SparseConv3d):
                note = set_sparse_layer(part, own, applied._undo)
            precision = own.precision_for(kind).value
            if kind is OpKind.Reduction and own.precision_for(kind).is_half:
                precision += f", {own.reduction_inside.value} inside"
            if own is not policy:
                note = f"{note}; {own}" if note else str(own)
            row_kind = kind.value if kind else "unknown"
            applied.rows.append(LayerRow(name, type(part).__name__, row_kind, precision, note))
    except BaseException:
        applied.revert()
        raise
    return applied
