"""Maps beside layers: the streams on which a program's steps are captured.

Coordinate sets and kernel maps depend on coordinates alone. Most of their kernels are short and fill no GPU,
so they are captured on streams of their own: the sets after one another on one, each map as soon as its sets
are there on one of the others. The layers follow on the main stream, each behind the map it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

_SETS = ("voxmma::sized_index", "voxmma::sized_sites")
_MAPS = 4  # streams of maps


class Lanes:
    """Streams for the capture that is under way on the current stream.

    Args:
        steps: of the program. side: those of them that need nothing of the others. reads: numbers of the
            tensors that a step reads. given: those of the inputs.
    """

    def __init__(
        self, steps: Sequence[Any], side: Sequence[Any], reads: Callable[[Any], list[int]], given: set[int]
    ) -> None:
        self._reads = reads
        self._main = torch.cuda.current_stream()
        beside_them = {id(step) for step in side}
        self.steps = [*side, *(step for step in steps if id(step) not in beside_them)]
        self.kept = given | {number for step in side for number in step.out if number is not None}
        """tensors that several streams read: their memory is given to nobody before the end"""
        # Layers wait for maps, not maps for layers.
        self._streams = [torch.cuda.Stream(priority=-1) for _ in range(1 + _MAPS)] if side else []
        for stream in self._streams:
            stream.wait_stream(self._main)
        self._lane: dict[int, Any] = {}
        maps = 0
        for step in side:
            if step.func._schema.name in _SETS:
                self._lane[id(step)] = self._streams[0]
            else:
                self._lane[id(step)] = self._streams[1 + maps % _MAPS]
                maps += 1
        self._made: dict[int, tuple[Any, Any]] = {}
        self._waited: set[tuple[int, int]] = set()

    def run(self) -> Iterator[Any]:
        """The steps in the order in which they are to be enqueued, each while its stream is current."""
        for step in self.steps:
            stream = self._lane.get(id(step), self._main)
            for number in self._reads(step):
                maker, event = self._made.get(number, (stream, None))
                if maker is not stream and (id(event), id(stream)) not in self._waited:
                    stream.wait_event(event)
                    self._waited.add((id(event), id(stream)))
            with torch.cuda.stream(stream):
                yield step
            if stream is not self._main:
                event = torch.cuda.Event()
                event.record(stream)
                self._made.update((number, (stream, event)) for number in step.out if number is not None)
        for stream in self._streams:
            self._main.wait_stream(stream)
