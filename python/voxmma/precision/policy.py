"""Declarative precision: one policy object, what kind each operation is, and how a policy is put to work.

A `PrecisionPolicy` says in which precision the five kinds of operation run (`OpKind`), and for the products
of a convolution or linear layer also the accumulator, its chunk and the output, for forward, dgrad and wgrad
apart (`ComputeSpec`). Policies are immutable, checked when they are made, and have versioned names.

There is one rule book for what casts an operation needs (`voxmma.precision.casting`). Three things use it:

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
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from voxmma import torchflags
from voxmma._dynamo import eager
from voxmma._surroundings import module_call
from voxmma.dispatch.config import fp16_accum_flag
from voxmma.nn.modules.sparse_conv import SparseConv3d
from voxmma.precision.active import THREAD, AppliedPolicy, LayerRow, activate, current_policy
from voxmma.precision.casting import PolicyMode
from voxmma.precision.operators import OpKind, kind_of
from voxmma.precision.spec import NAMED, ComputeSpec, PolicyError, Precision, PrecisionPolicy, as_policy

__all__ = [
    "NAMED",
    "AppliedPolicy",
    "ComputeSpec",
    "LayerRow",
    "OpKind",
    "PolicyError",
    "Precision",
    "PrecisionPolicy",
    "applied",
    "apply_policy",
    "as_policy",
    "current_policy",
]


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

    @eager
    def before(self, module: nn.Module, args: Any) -> None:
        THREAD.settle()
        with self._lock:
            self._running += 1
        mode = PolicyMode(self.policy, module_call())
        mode.__enter__()
        THREAD.running.append((self, mode, lambda: self._end(module, mode)))

    @eager
    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        THREAD.settle()
        if not THREAD.running or THREAD.running[-1][0] is not self:
            return output  # an earlier hook failed before the forward began
        THREAD.running.pop()[2]()
        return self.policy.boundary(output)

    def _end(self, module: nn.Module, mode: PolicyMode) -> None:
        mode.__exit__(None, None, None)
        with self._lock:
            self._running -= 1
            self.casts += mode.casts
            if not (self._on or self._running):
                self._unhook(module)

    def remove(self, module: nn.Module) -> None:
        """Takes the policy off; forwards that have begun in other threads end under it."""
        THREAD.settle()
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
