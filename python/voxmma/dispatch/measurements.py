"""Measurements of `voxmma tune`, and the tile that the selector takes from them.

They are on disk (voxmma.dispatch.store). A process reads them once, when it first chooses a tile for a card,
and never writes in a step.

The card is its model, not the one piece of it, so that ranks of a job on equal cards share measurements. Of
several measurements of one call the winner follows by a rule that does not depend on their order: processes
that read the same lines take the same tile. Processes that start while somebody is tuning may read different
ones; `share` gives all ranks of a group the lines of its first.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from voxmma.dispatch import store
from voxmma.dispatch.store import Owner

#: A winner must be this much faster than the heuristic's tile, or that one stays.
MIN_GAIN = 1.02

#: A record of kind 'times': `key` (fields of Key), `ms` by tile, and what else is worth keeping.
Body = store.Entry


class Key(NamedTuple):
    """What a choice depends on. `c_in`, `c_out`: of the layer, all groups together, whatever `op` is."""

    op: str
    """'fwd', 'dgrad' or 'wgrad'"""
    dtype: str
    """of the operands that the tile reads: 'fp16', 'bf16', 'fp32'"""
    accumulator: str
    """as tiles.parse_accumulator takes it"""
    c_in: int
    c_out: int
    groups: int
    volume: int
    """offsets of the kernel"""
    precision: str
    """'ieee' or 'tf32'; 'ieee' for 16-bit operands"""


def body(owner: Owner, key: Key, ms: Mapping[str, float], **more: Any) -> Body:
    """A measurement: milliseconds by tile, and anything else that JSON can hold."""
    return store.entry("times", owner, key._asdict(), ms=dict(ms), **more)


def _possible(measured: Body) -> bool:
    try:
        Key(**measured["key"])
        times = measured["ms"].values()
    except (KeyError, TypeError, AttributeError):
        return False
    return bool(times) and all(isinstance(ms, int | float) and 0 < ms < math.inf for ms in times)


def read(file: Path, owner: Owner) -> list[Body]:
    """The measurements of `owner` in a file; [] where there is none.

    Warns once where this card was measured with another driver or build only.
    """
    found, others = store.read(file, "times", owner, _possible)
    if others and not found:
        store.warn_once(
            f"{file} was measured with another driver or build of voxmma on this card and is ignored: "
            "run voxmma tune again"
        )
    return found


@dataclass(frozen=True)
class Winner:
    """What the measurements of a key say."""

    tile: str
    gain: float
    """time of the heuristic's tile divided by the winner's; 1 where it is the winner or was not measured"""
    tiles: int
    """that were compared"""
    measurements: int


class Table:
    """Measurements of one owner, merged by key."""

    _versions = itertools.count(1)

    def __init__(self, bodies: Iterable[Body]) -> None:
        self.version = next(Table._versions)
        """differs between any two tables of this process"""
        self.bodies = {store.digest(one): one for one in bodies}
        groups: dict[Key, list[dict[str, float]]] = {}
        for measured in self.bodies.values():
            groups.setdefault(Key(**measured["key"]), []).append(measured["ms"])
        self._scores = {key: (_scores(times), len(times)) for key, times in groups.items()}

    def __len__(self) -> int:
        return len(self._scores)

    @property
    def keys(self) -> list[Key]:
        return sorted(self._scores)

    def choose(self, key: Key, default: str, allowed: Sequence[str]) -> Winner | None:
        """The fastest of the `allowed` tiles; `default`, the heuristic's, unless another beats it clearly.

        None where the key was not measured, or no allowed tile was.
        """
        scores, measurements = self._scores.get(key, ({}, 0))
        ranked = sorted((score, name) for name, score in scores.items() if name in allowed)
        if not ranked:
            return None
        best, tile = ranked[0]
        if default not in scores or default not in allowed:
            return Winner(tile, 1.0, len(ranked), measurements)
        if scores[default] - best <= math.log(MIN_GAIN):
            tile = default
        return Winner(tile, math.exp(scores[default] - scores[tile]), len(ranked), measurements)


def _scores(times: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Mean over the measurements of the logarithm of a tile's time over the fastest's; less is faster.

    Only tiles that are in all measurements count. The sums do not depend on the order.
    """
    common = set(times[0]).intersection(*times[1:])
    least = [min((one[name] for name in common), default=1.0) for one in times]
    return {
        name: math.fsum(math.log(one[name] / low) for one, low in zip(times, least, strict=True)) / len(times)
        for name in common
    }


_tables: dict[tuple[Path, torch.device], Table] = {}
_loading = threading.Lock()
_generation = 0
_EMPTY = Table([])


def table(device: torch.device) -> Table:
    """The measurements for a device, read from the file when they are first asked for."""
    place = (store.path(), device)
    found = _tables.get(place)
    if found is None:
        owner = store.owner_of(device)
        if owner is None:
            return _EMPTY
        with _loading:
            found = _tables.get(place)
            if found is None:
                found = _tables[place] = Table(read(place[0], owner))
    return found


def generation() -> int:
    """A number that grows with every change to measurements that were in use, of whatever device."""
    return _generation


def stamp(device: object) -> int:
    """A number that changes when the measurements for a device do; 0 where there can be none."""
    if not isinstance(device, torch.device) or device.type != "cuda":
        return 0
    return table(device).version


def adopt(device: torch.device, bodies: Iterable[Body], replace: bool = False) -> None:
    """Adds measurements to those that this process uses for a device, or puts them in their place.

    Those of another owner are left out. Other devices of this owner read the file again.
    """
    owner = store.owner_of(device)
    if owner is None:
        return
    global _generation
    former = [] if replace else list(table(device).bodies.values())
    mine = [one for one in bodies if one["owner"] == asdict(owner)]
    with _loading:
        for place in [place for place in _tables if store.owner_of(place[1]) == owner]:
            del _tables[place]
        _tables[store.path(), device] = Table([*former, *mine])
        _generation += 1


def reload() -> None:
    """Forgets what was read: the next choice of a tile reads the file again."""
    global _generation
    with _loading:
        _tables.clear()
        _generation += 1


def share(device: torch.device, group: Any = None) -> None:
    """Gives every rank of a process group the measurements of its first rank. All ranks have to call it.

    Call it after init_process_group and before the first step where the file may change while a job starts,
    or where ranks do not see the same file. Without a process group it does nothing.
    """
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return
    box: list[Any] = [list(table(device).bodies.values())]
    first = dist.get_global_rank(group, 0) if group is not None else 0
    dist.broadcast_object_list(box, src=first, group=group)
    adopt(device, box[0], replace=True)


def forget() -> int:
    """Deletes all measurements; returns how many lines went. Raises OSError where that is not possible.

    Processes that run keep what they read.
    """
    count = store.forget("times")
    reload()
    return count
