"""Tensors that are made once and kept for whoever asks: any CUDA stream, any thread."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

from voxmma._extension import _C

_K = TypeVar("_K")
_V = TypeVar("_V")

#: The handle of a device's current stream; only CUDA builds of torch have it.
_raw_stream: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Made:
    """Tensors of one device that were made together, on its current stream, and are kept for later readers.

    `get()` and `use()` make the device's current stream wait for an event recorded behind the making, once
    for each stream, and tell the allocator that this stream reads the memory: it is not given to others
    before the reads are over, whoever lets go of the tensors. While a CUDA graph is captured the host waits
    instead, since a graph cannot wait for what it did not capture; the tensors have to live as long as it is
    replayed, like all inputs of a graph.

    RuntimeError when made while a CUDA graph is captured: it would exist only after a replay.
    """

    __slots__ = ("_index", "_streams", "_version", "_versioned", "event", "tensors", "what")

    def __init__(
        self, tensors: Iterable[torch.Tensor], what: str, event: _C.StreamEvent | None = None
    ) -> None:
        """`event`: of the stream that the tensors were made on, behind that. Default: one is recorded now."""
        self.tensors = tuple(tensors)
        self.what = what
        self.event: _C.StreamEvent | None = None
        self._versioned: tuple[torch.Tensor, ...] = ()  # of a traced program: none
        self._version = 0
        if torch.compiler.is_compiling():
            return
        if torch._C._are_functorch_transforms_active():
            self.tensors = tuple(map(of_no_transform, self.tensors))
        self._versioned = self.tensors
        self._version = _C.write_count(self.tensors)
        first = self.tensors[0]  # a tree_map may put other things where the tensors were
        if _raw_stream is not None and isinstance(first, torch.Tensor) and first.is_cuda:
            self._index = first.device.index
            self.event = _C.StreamEvent.record(self._index) if event is None else event
            if self.event is None:
                raise _captured(what)
            self._streams = {self.event.stream}

    def get(self) -> tuple[torch.Tensor, ...]:
        """The tensors, for the current stream. RuntimeError when they have been written to."""
        return self.tensors if torch.compiler.is_compiling() else self.eager()

    def eager(self) -> tuple[torch.Tensor, ...]:
        """`get()` where nothing is compiled."""
        if _C.write_count(self._versioned) != self._version:
            self.check()
        if self.event is not None:
            self.use()
        return self.tensors

    def check(self) -> None:
        """RuntimeError when torch has written into the tensors."""
        if self.written:
            raise RuntimeError(
                f"{self.what} were written to, but everything on these voxels shares them: write into a copy "
                "(.clone()) and make new voxels of it"
            )

    @property
    def written(self) -> bool:
        return not torch.compiler.is_compiling() and _C.write_count(self._versioned) != self._version

    def use(self) -> None:
        """Makes the device's current stream one that may read the tensors."""
        # A stream that has waited, the maker's above all, costs one look into a set.
        if self.event is not None and _raw_stream(self._index) not in self._streams:  # type: ignore[misc]
            self._join(self.event)

    def _join(self, event: _C.StreamEvent) -> None:
        if not event.wait():
            return  # a graph is captured: the host has waited
        stream = torch.cuda.current_stream(self._index)
        for tensor in self.tensors:
            tensor.record_stream(stream)
        self._streams.add(stream.cuda_stream)  # last: another thread on this stream waits, too, until here


def _capturing(index: int) -> bool:
    if torch._C._cuda_getDevice() == index:  # asked for every set and map that is made
        return torch._C._cuda_isCurrentStreamCapturing()
    with torch.cuda.device(index):
        return torch._C._cuda_isCurrentStreamCapturing()


def refuse_capture(what: str | Callable[[], str], device: torch.device) -> None:
    """RuntimeError where work on a GPU is being captured into a CUDA graph. `what` may say it when called."""
    if device.type == "cuda" and _raw_stream is not None and _capturing(device.index):
        raise _captured(what if isinstance(what, str) else what())


def _captured(what: str) -> RuntimeError:
    return RuntimeError(
        f"{what} would be made for the first time while a CUDA graph is captured, and exist only after a "
        "replay: run the layer once on these coordinates before the capture (and its backward, where "
        "that is captured, too)"
    )


def normally(make: Callable[..., _V], *given: Any) -> _V:
    """make(*given), which makes tensors of integers: of no inference mode and no transform, whoever asks."""
    if torch.is_inference_mode_enabled() or _transformed():
        with torch.inference_mode(False), outside_transforms():
            return make(*given)
    return make(*given)  # entering a mode takes longer than the rest of this


def _transformed() -> bool:
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def outside_transforms() -> contextlib.AbstractContextManager[Any]:
    """What tensors to be kept are made in: those of a transform of torch.func (grad, vmap) would be its own,
    which kernels cannot read and nobody can use after it."""
    if not _transformed():
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def of_no_transform(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of integers without what torch.func.grad and jvp wrap around all that is made inside of them.

    ValueError for one that torch.func.vmap maps over.
    """
    if _transformed() and isinstance(tensor, torch.Tensor):
        while torch._C._functorch.is_gradtrackingtensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        if torch._C._functorch.is_batchedtensor(tensor):
            raise ValueError("torch.func.vmap maps over coordinates, where it may map over features only")
    return tensor


def new_lock() -> contextlib.AbstractContextManager[Any]:
    """What a builder holds, so that the first of several threads builds and the others wait for it."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else threading.RLock()


def keep(cache: dict[_K, _V], key: _K, value: _V, limit: int) -> _V:
    """cache.setdefault(key, value) that drops the oldest beyond `limit` entries. The caller holds a lock."""
    while len(cache) >= limit and key not in cache:
        cache.pop(list(cache)[0], None)  # noqa: RUF015  a dead set's map may leave between iter() and next()
    return cache.setdefault(key, value)


class _Tensor(weakref.ref[torch.Tensor], Generic[_V]):
    __slots__ = ("key", "value")

    key: int
    value: _V


class ByTensor(Generic[_V]):
    """A value of each tensor that was asked for, by the tensor's identity, while it lives."""

    def __init__(self, make: Callable[[], _V]) -> None:
        self._make = make
        self._known: dict[int, _Tensor[_V]] = {}

    def get(self, tensor: torch.Tensor) -> _V:
        """The tensor's value, made where it has none."""
        key = id(tensor)
        known = self._known.get(key)
        if known is None or known() is not tensor:
            known = _Tensor(tensor, self._forget)
            known.key, known.value = key, self._make()
            self._known[key] = known
        return known.value

    def _forget(self, gone: weakref.ref[torch.Tensor]) -> None:
        assert isinstance(gone, _Tensor)
        if self._known.get(gone.key) is gone:
            self._known.pop(gone.key, None)

    def __len__(self) -> int:
        return len(self._known)
