"""A policy at work until it is reverted: PyTorch's switches, our settings, and the casts of a thread."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import _get_current_function_mode_stack

from voxmma import torchflags
from voxmma._surroundings import is_running
from voxmma.dispatch import settings
from voxmma.precision.casting import PolicyMode

if TYPE_CHECKING:
    from voxmma.precision.spec import PrecisionPolicy


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


class _ThreadState(threading.local):
    """What is at work in this thread: open ``with`` blocks, and forwards that have begun under a policy.

    A forward: whose it is, its mode, and what ends it.
    """

    def __init__(self) -> None:
        self.blocks: list[AppliedPolicy] = []
        self.running: list[tuple[object, PolicyMode, Callable[[], None]]] = []

    def settle(self) -> None:
        """Ends the forwards whose call has ended without PyTorch saying so (`module_call`).

        Takes off the modes that another thread has ended.
        """
        while self.running and not is_running(self.running[-1][1].call):
            self.running.pop()[2]()
        for mode in _get_current_function_mode_stack():
            if isinstance(mode, PolicyMode) and mode.over:
                mode.__exit__(None, None, None)


THREAD = _ThreadState()
_open: list[tuple[list[AppliedPolicy], AppliedPolicy]] = []
"""The ``with`` blocks of all threads, each with the list of its thread, in the order in which they began."""
_lock = threading.Lock()


def current_policy() -> PrecisionPolicy | None:
    """The innermost policy at work in this thread, None outside of any."""
    THREAD.settle()
    if THREAD.running:
        return THREAD.running[-1][1].policy
    return THREAD.blocks[-1].policy if THREAD.blocks else None


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
        if policy.forward.accumulator_name == "fp32":
            torchflags.forbid_short_sums()
        return
    torchflags.set_cpu_fp32(policy.tf32)
    torchflags.set_tf32(policy.tf32)
    undo.callback(settings.begin(fp32_precision="tf32" if policy.tf32 else "ieee"))


def _end_mode(mode: PolicyMode, thread: int) -> None:
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
            mode = PolicyMode(policy)
            stack.callback(_end_mode, mode, threading.get_ident())
            mode.__enter__()
            applied._counters.append(mode)
        applied._undo = stack.pop_all()
    return applied


def enter(policy: PrecisionPolicy) -> None:
    """The begin of a ``with policy:`` block."""
    _not_while_compiling()
    THREAD.settle()
    block = activate(policy)
    with _lock:
        THREAD.blocks.append(block)
        _open.append((THREAD.blocks, block))


def leave(policy: PrecisionPolicy) -> None:
    """The end of the last block of ``policy``, of this thread if it has one; blocks of others may end later.

    A block of another thread ends here where a generator that holds it is closed or collected here.
    """
    with _lock:
        mine = [entry for entry in _open if entry[1].policy is policy]
        if not mine:
            raise RuntimeError(f"no block of policy {policy} is open")
        blocks, block = next((entry for entry in reversed(mine) if entry[0] is THREAD.blocks), mine[-1])
        _open[:] = [entry for entry in _open if entry[1] is not block]
        blocks[:] = [other for other in blocks if other is not block]
    block.revert()
