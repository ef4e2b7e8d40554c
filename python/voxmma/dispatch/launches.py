"""`with voxmma.audit() as log:` lists every launch as it happens, backward ones included.

The log is taken where torch dispatches `torch.ops.voxmma.conv`, `conv_fused`, `conv_rescaled` and
`conv_wgrad`, below autograd and autocast: what it shows are the arguments that reached the kernels, not what
anybody meant to ask for. The record of each convolution call (voxmma.explain) adds the layer, the level that
decided, and the reason.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from voxmma._types import DTYPE_NAMES, sum_dtype
from voxmma.dispatch.record import Record
from voxmma.ops.kernels import chunk_of

LAUNCHES = frozenset(
    f"voxmma::{name}" for name in ("conv", "conv_fused", "conv_fused_into", "conv_rescaled", "conv_wgrad")
)
"""operators that are convolutions"""


@dataclass(frozen=True)
class Launch:
    """One launch. `layer`, `requested`, `decided_by` and `reason` are empty when no record came with it."""

    op: str
    """'fprop', 'dgrad' or 'wgrad'"""
    tile: str
    input: str
    """Format of the operands: 'fp16', 'bf16', 'fp32' or 'fp64'."""
    accumulator: str
    chunk: int
    """Products between promotions of an fp16 (or 3xTF32) sum to fp32: 0 = never, -1 = one kernel offset."""
    output: str
    c_in: int
    c_out: int
    groups: int
    volume: int
    rows: int
    """Rows written; for wgrad rows of dy."""
    rescaled: bool = False
    """Operands made fp16 by powers of two on the way (voxmma.verify.overflow)."""
    layer: str = ""
    requested: str = ""
    decided_by: str = ""
    reason: str = ""

    def __str__(self) -> str:
        chunk = {0: "", -1: " promoted every offset"}.get(self.chunk, f" promoted every {self.chunk}")
        why = f"; {self.requested} requested by {self.decided_by}; {self.reason}" if self.decided_by else ""
        groups = f", {self.groups} groups" if self.groups > 1 else ""
        inputs = f"{self.input} inputs{' (rescaled)' if self.rescaled else ''}"
        return (
            f"{self.layer or '(no layer)'} {self.op}: {self.tile}, {inputs}, {self.accumulator} "
            f"accumulator{chunk}, {self.output} output, {self.c_in} -> {self.c_out}{groups}, "
            f"{self.volume} offsets, {self.rows} rows{why}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The fields, for JSON."""
        return asdict(self)


class audit(TorchDispatchMode):
    """Context that collects a :class:`Launch` for every kernel launched by its thread, backward included.

    Iterate over it, index it, take its length, or print it. It may be nested; each one sees everything. While
    open it keeps the operands of forward calls alive, except in inference mode. Launches of compiled code are
    listed without their records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[Launch] = []
        self._thread = threading.get_ident()
        self._unclaimed: list[tuple[int, tuple[int, ...]]] = []
        self._owners: dict[int, Record] = {}
        self._kept: list[torch.Tensor] = []  # addresses below stay those of these tensors while the log grows

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs compiled under an audit (torch asks from 2.9 on; before, it runs eagerly)."""
        return True

    def __enter__(self) -> audit:
        global _active
        self._thread = threading.get_ident()
        super().__enter__()
        with _lock:
            _active = (*_active, self)
        return self

    def __exit__(self, *exception: Any) -> None:
        global _active
        with _lock:
            _active = tuple(log for log in _active if log is not self)
        leave(self, lambda: super(audit, self).__exit__(*exception))
        self._kept.clear()
        self._owners.clear()
        self._unclaimed.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in LAUNCHES:
            names = [argument.name for argument in func._schema.arguments]
            given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
            self._log(name.removeprefix("voxmma::"), given, given.get("out", result))
        return result

    def _log(self, name: str, given: dict[str, Any], result: torch.Tensor) -> None:
        wgrad, rescaled = name == "conv_wgrad", name == "conv_rescaled"
        backward = torch._C._current_graph_task_id() != -1
        x = given["x"]
        operands = [x, given["dy"] if wgrad else given["weight"]]
        owner = None
        if backward:
            # dgrad shares the forward call's weight; wgrad its x (as dy where the layer is transposed)
            shared = operands if wgrad else operands[1:]
            owner = next((self._owners[t.data_ptr()] for t in shared if t.data_ptr() in self._owners), None)
        weight = result if wgrad else given["weight"]
        groups = weight.shape[1] if weight.dim() == 4 else 1
        c_in, c_out = weight.shape[-2] * groups, weight.shape[-1] * groups
        accumulator = given["accumulator"]
        if wgrad:
            accumulator = DTYPE_NAMES[sum_dtype(x.dtype)]
        elif given["transpose"]:
            c_in, c_out = c_out, c_in
        launch = Launch(
            op="wgrad" if wgrad else "dgrad" if backward else "fprop",
            tile=given["tile"],
            input="fp16" if rescaled else DTYPE_NAMES[x.dtype],
            accumulator=accumulator,
            chunk=chunk_of(given["tile"]),
            output=DTYPE_NAMES[result.dtype],
            c_in=c_in,
            c_out=c_out,
            groups=groups,
            volume=weight.shape[0],
            rows=(given["dy"] if wgrad else result).shape[0],
            rescaled=rescaled,
        )
        self.launches.append(_signed(launch, owner) if owner is not None else launch)
        if not backward:
            kept = [] if torch.is_inference_mode_enabled() else [t for t in operands if t.numel()]
            self._unclaimed.append((len(self.launches) - 1, tuple(t.data_ptr() for t in kept)))
            self._kept += kept

    def _claim(self, record: Record) -> None:
        """Gives the newest forward launch without a record to this record."""
        if self._unclaimed and self._thread == threading.get_ident():
            index, addresses = self._unclaimed.pop()
            self.launches[index] = _signed(self.launches[index], record)
            self._owners.update(dict.fromkeys(addresses, record))

    def __len__(self) -> int:
        return len(self.launches)

    def __iter__(self) -> Iterator[Launch]:
        return iter(self.launches)

    def __getitem__(self, index: int) -> Launch:
        return self.launches[index]

    def __str__(self) -> str:
        return "\n".join(map(str, self.launches))


def _signed(launch: Launch, record: Record) -> Launch:
    return replace(
        launch,
        layer=record.layer,
        requested=record.requested,
        decided_by=record.decided_by,
        reason=record.reason,
    )


_active: tuple[audit, ...] = ()  # of all threads; replaced as a whole
_lock = threading.Lock()


def leave(mode: TorchDispatchMode, exit: Callable[[], object]) -> None:
    """Leaves a dispatch mode of this thread by `exit`, which takes off the last one, whichever was last."""
    stack = _get_current_dispatch_mode_stack()
    above = [_pop_mode() for _ in stack[stack.index(mode) + 1 :]] if mode in stack else []
    exit()
    for other in reversed(above):
        _push_mode(other)


def listening() -> bool:
    """Whether a log is open."""
    return True if _active else False  # noqa: SIM210  # torch.compile of torch 2.11 has no bool() of a tuple


def notify(record: Record) -> None:
    """Tells the open logs which call the launch just made belongs to; convolution functions call it once.

    Under torch.compile it does nothing, so that it breaks no graph.
    """
    if _active and not torch.compiler.is_compiling():
        for log in _active:
            log._claim(record)
