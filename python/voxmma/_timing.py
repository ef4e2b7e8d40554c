"""Times of short device work: medians with their spread, inputs rotated, the launch overhead kept apart.

On a GPU a time is that between two CUDA events. Before each repetition a pause is queued that outlasts the
host's work for it, so that launching costs are not in it; what they are is measured beside it. On a CPU it is
wall time. `cold` runs write a buffer larger than the last cache first, so that operands come from memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Bytes written before a cold repetition on a CPU.
_CPU_FLUSH = 1 << 25
_WARM_UP = 2
#: Seconds that the pause before a repetition may take at most.
_LONGEST_PAUSE = 0.03


@dataclass(frozen=True)
class Timing:
    """Median, the tenth and ninetieth percentile and the least of `count` repetitions, in seconds."""

    median: float
    low: float
    high: float
    count: int
    least: float

    @property
    def ms(self) -> float:
        """The median in milliseconds."""
        return self.median * 1e3

    @property
    def spread_ms(self) -> list[float]:
        """Both percentiles in milliseconds."""
        return [self.low * 1e3, self.high * 1e3]


def summary(samples: Sequence[float]) -> Timing:
    """The figures of samples in seconds; ValueError for none."""
    if not samples:
        raise ValueError("samples is empty")
    ordered = sorted(samples)
    last = len(ordered) - 1
    low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
    return Timing(statistics.median(ordered), low, high, len(ordered), ordered[0])


def synchronise(device: torch.device) -> None:
    """Returns when the device has done all work given to it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def l2_bytes(device: torch.device) -> int:
    """Size of the last cache: of a GPU's L2, 0 for a CPU."""
    if device.type != "cuda":
        return 0
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 50 << 20))


def input_sets(device: torch.device, bytes_a_set: int, least: int = 2) -> int:
    """How many sets of inputs to rotate, `least` to 8: together at least twice the last cache."""
    return max(least, min(8, -(-2 * l2_bytes(device) // max(1, bytes_a_set))))


class Clock:
    """Times on one device.

    A function that is timed takes the number of the repetition, by which it picks its inputs, and what
    `prepare` returned for that number, if there is a `prepare` (whose work is not timed).
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        if repeats < 1:
            raise ValueError(f"repeats must be at least 1, got {repeats}")
        self.device = device
        self.repeats = repeats
        self._flush: torch.Tensor | None = None

    def flush(self) -> None:
        """Writes more bytes than the last cache holds."""
        if self._flush is None:
            size = 2 * l2_bytes(self.device) or _CPU_FLUSH
            self._flush = torch.empty(size, dtype=torch.uint8, device=self.device)
        self._flush.zero_()

    def host_seconds(self, run: Callable[..., object], prepare: Callable[[int], Any] | None = None) -> float:
        """How long a call keeps the host, the device idle before it."""
        samples = []
        for i in range(5):
            given = () if prepare is None else (prepare(i),)
            synchronise(self.device)
            start = time.perf_counter()
            run(i, *given)
            samples.append(time.perf_counter() - start)
        synchronise(self.device)
        return statistics.median(samples)

    def __call__(
        self,
        run: Callable[..., object],
        prepare: Callable[[int], Any] | None = None,
        *,
        cold: bool = False,
    ) -> Timing:
        """The time of `run(i)`, or of `run(i, prepare(i))`."""
        return self.race({"": run}, prepare, cold=cold)[""]

    def race(
        self,
        runs: Mapping[str, Callable[..., object]],
        prepare: Callable[[int], Any] | None = None,
        *,
        cold: bool = False,
        repeats: int | None = None,
    ) -> dict[str, Timing]:
        """Times of several functions, which take turns in rotating order: drift of clocks hits all alike."""
        for run in runs.values():
            for i in range(_WARM_UP):
                run(i, *(() if prepare is None else (prepare(i),)))
        pauses = {}
        if self.device.type == "cuda":
            for name, run in runs.items():
                pauses[name] = min(_LONGEST_PAUSE, 1.5 * self.host_seconds(run, prepare) + 1e-4)
        names = list(runs)
        samples: dict[str, list[Any]] = {name: [] for name in names}
        for i in range(repeats or self.repeats):
            shift = i % len(names)
            for name in names[shift:] + names[:shift]:
                given = () if prepare is None else (prepare(i),)
                if cold:
                    self.flush()
                samples[name].append(self._once(runs[name], i, given, pauses.get(name, 0.0)))
                del given
        synchronise(self.device)
        if self.device.type == "cuda":
            samples = {n: [a.elapsed_time(b) / 1e3 for a, b in pairs] for n, pairs in samples.items()}
        return {name: summary(values) for name, values in samples.items()}

    def _once(self, run: Callable[..., object], i: int, given: tuple[Any, ...], pause: float) -> Any:
        """Seconds on a CPU; on a GPU the two events, not waited for."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            run(i, *given)
            return time.perf_counter() - start
        with torch.cuda.device(self.device):
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(int(pause * 2e9))  # cycles; at lower clocks the pause is longer
            before.record()
            run(i, *given)
            after.record()
        return before, after

    def wall(
        self, run: Callable[..., object], calls: int = 1, prepare: Callable[[int], Any] | None = None
    ) -> Timing:
        """Wall time of a call in a row of `calls`, from an idle device to an idle device.

        `prepare` is called before each row; what it returned goes to every call of the row.
        """
        run(0, *(() if prepare is None else (prepare(0),)))
        samples = []
        for repetition in range(self.repeats):
            given = () if prepare is None else (prepare(repetition),)
            synchronise(self.device)
            start = time.perf_counter()
            for i in range(calls):
                run(i, *given)
            synchronise(self.device)
            samples.append((time.perf_counter() - start) / calls)
            del given
        return summary(samples)
