"""Who is shown finished calls: nobody, unless a verification or a calibration is on."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from voxmma._surroundings import is_running, module_call
from voxmma.dispatch.record import Record
from voxmma.sparse.maps import KernelMap

Observer = Callable[[str, Tensor, Tensor, "Tensor | None", KernelMap, Tensor, Record], None]
"""(name of the layer, x, weight, bias, map, y, record) of a finished call"""


class Hook:
    """A hook of a module. Copies (deepcopy, pickle) of the module have one that does nothing in its place."""

    def __init__(self, hook: Callable[..., Any]) -> None:
        self.hook = hook

    def __call__(self, *args: Any) -> Any:
        return self.hook(*args)

    def __deepcopy__(self, memo: object) -> Callable[..., None]:
        return no_hook

    def __reduce__(self) -> Any:
        return _no_hook, ()


def no_hook(*args: object) -> None:
    """What copies have in place of a `Hook`."""


def _no_hook() -> Callable[..., None]:
    return no_hook


class Listener:
    """Shows an observer every finished call of some layers, from now until `remove`. Keeps no layer alive."""

    def __init__(self, layers: Mapping[str, nn.Module], observer: Observer) -> None:
        global _observers
        self._layers = WeakValueDictionary(layers)
        self._observer = observer
        self._own = threading.local()
        self._hooks = []
        for name, layer in layers.items():
            enter, leave = Hook(partial(self._enter, name)), Hook(partial(self._leave, name))
            self._hooks.append(layer.register_forward_pre_hook(enter))
            self._hooks.append(layer.register_forward_hook(leave, always_call=True))
        with _lock:
            _observers = (*_observers, self)

    @property
    def _running(self) -> list[tuple[str, FrameType | None]]:
        """Layers whose forward has begun in this thread, the innermost last, and their calls."""
        running: list[tuple[str, FrameType | None]] = self._own.__dict__.setdefault("running", [])
        while running and not is_running(running[-1][1]):  # ended, and their hooks were not called
            running.pop()
        return running

    def _enter(self, name: str, module: nn.Module, inputs: object) -> None:
        if not torch.compiler.is_compiling():
            self._running.append((name, module_call()))

    def _leave(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not torch.compiler.is_compiling():
            running = self._running
            if running and running[-1][0] == name:
                running.pop()

    def hear(self, *call: Any) -> None:
        """Shows a call that has finished in this thread, if one of these layers made it."""
        if (running := self._running) and not _silent():
            self._observer(running[-1][0], *call)

    def remove(self) -> None:
        """Shows no further call. Those under way in other threads may still be shown."""
        global _observers
        with _lock:
            _observers = tuple(observer for observer in _observers if observer is not self)
        for hook in self._hooks:
            hook.remove()


_observers: tuple[Listener, ...] = ()
_lock = threading.Lock()
_thread = threading.local()


def _silent() -> bool:
    return bool(_thread.__dict__.get("silent", 0))


@contextlib.contextmanager
def unobserved() -> Iterator[None]:
    """Calls of this thread are shown to nobody: they are made to be written down, not for their results."""
    _thread.silent = _thread.__dict__.get("silent", 0) + 1
    try:
        yield
    finally:
        _thread.silent -= 1


def observed() -> bool:
    """Whether anybody looks at finished calls; at compiled ones nobody does."""
    if not _observers:
        return False
    return not torch.compiler.is_compiling() and not _silent()


def observe(
    x: Tensor, weight: Tensor, bias: Tensor | None, mapping: KernelMap, y: Tensor, record: Record
) -> None:
    """Shows a finished call to who listens; convolution functions call it once. Compiled calls do not."""
    if _observers and not torch.compiler.is_compiling():
        for observer in _observers:
            observer.hear(x.detach(), weight.detach(), bias, mapping, y.detach(), record)
