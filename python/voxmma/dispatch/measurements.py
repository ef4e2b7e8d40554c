"""Measurements of `voxmma tune`: where they are kept, and the tile that the selector takes from them.

They are lines of tune.jsonl in VOXMMA_CACHE_DIR, each with a checksum and the card, driver and kernel build
it belongs to. Writers append under a lock; a line that was cut short (a killed process, a full disk, a file
system that does not append in one piece) fails its checksum and is ignored with one warning. Readers take no
lock: a process reads the file once, when it first chooses a tile for a card, and never writes in a step.

The card is its model, not the one piece of it, so that ranks of a job on equal cards share measurements. Of
several measurements of one call the winner follows by a rule that does not depend on their order: processes
that read the same lines take the same tile. Processes that start while somebody is tuning may read different
ones; `share` gives all ranks of a group the lines of its first.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import math
import os
import stat
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from voxmma._extension import _C
from voxmma.dispatch import settings

FORMAT = 1
#: A winner must be this much faster than the heuristic's tile, or that one stays.
MIN_GAIN = 1.02
#: A larger file is not read: a process would wait for it in its first step.
MAX_BYTES = 64 << 20
#: Seconds that a writer waits for the others.
LOCK_SECONDS = 5.0

#: A measurement as plain data: `owner`, `key` (fields of Key), `ms` by tile, and what else is worth keeping.
Body = dict[str, Any]


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


@dataclass(frozen=True)
class Owner:
    """What measurements belong to."""

    card: str
    capability: str
    multiprocessors: int
    driver: str
    build: str

    @property
    def digest(self) -> str:
        """Short name of all of it."""
        return _digest(asdict(self))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def driver_version() -> str | None:
    """The display driver's version; None where it cannot be read."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    return next((word for word in text.split() if word[0].isdigit() and "." in word), None)


@lru_cache(maxsize=64)
def owner_of(device: torch.device) -> Owner | None:
    """The owner of measurements on a device; None for a CPU and where the driver is unknown."""
    if device.type != "cuda" or (driver := driver_version()) is None:
        return None
    card = torch.cuda.get_device_properties(device)
    return Owner(
        card=card.name,
        capability=f"{card.major}.{card.minor}",
        multiprocessors=card.multi_processor_count,
        driver=driver,
        build=_C.BUILD_ID,
    )


def path() -> Path:
    """The file, which need not exist."""
    return _in(settings.get_cache_dir())


@lru_cache(maxsize=64)
def _in(folder: Path) -> Path:
    return folder / "tune.jsonl"


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)


# ---- lines -------------------------------------------------------------------------------------------------


def body(owner: Owner, key: Key, ms: Mapping[str, float], **more: Any) -> Body:
    """A measurement: milliseconds by tile, and anything else that JSON can hold."""
    return {"format": FORMAT, "owner": asdict(owner), "key": key._asdict(), "ms": dict(ms), **more}


def _line(measured: Body) -> bytes:
    """A measurement as a line of the file, end of line included."""
    owner = measured["owner"]
    head = {"of": _digest(owner), "card": owner["card"], "sum": _digest(measured)}
    return json.dumps({**head, "body": measured}).encode() + b"\n"


def _parsed(line: bytes) -> Body | None:
    """The measurement of a line, None for a line that is damaged or says something impossible."""
    try:
        entry = json.loads(line)
        measured = entry["body"]
        if entry["sum"] != _digest(measured) or measured["format"] != FORMAT:
            return None
        Owner(**measured["owner"])
        Key(**measured["key"])
        times = measured["ms"].values()
        good = times and all(isinstance(ms, int | float) and 0 < ms < math.inf for ms in times)
        return dict(measured) if good else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


# ---- reading -----------------------------------------------------------------------------------------------


def read(file: Path, owner: Owner) -> list[Body]:
    """The measurements of `owner` in a file; [] where there is none.

    Warns once about damaged lines, and once where this card was measured with another driver or build only.
    """
    try:
        known = file.stat()
        if not stat.S_ISREG(known.st_mode) or known.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"no file of at most {MAX_BYTES >> 20} MiB")
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        _warn_once(f"{file} cannot be read ({error.strerror}); tiles are chosen by the heuristic")
        return []
    ours, card = owner.digest.encode(), json.dumps(owner.card).encode()
    found: list[Body] = []
    damaged = stale = 0
    for line in lines:
        if ours not in line:  # of another owner, which costs no parsing
            stale += card in line
            damaged += bool(line) and not (line.startswith(b'{"of"') and line.endswith(b"}"))
            continue
        measured = _parsed(line)
        if measured is None:
            damaged += 1
        elif measured["owner"] == asdict(owner):
            found.append(measured)
    if damaged:
        _warn_once(f"{file} holds {damaged} damaged line(s), which are ignored")
    if stale and not found:
        _warn_once(
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
        self.bodies = {_digest(one): one for one in bodies}
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
    place = (path(), device)
    found = _tables.get(place)
    if found is None:
        owner = owner_of(device)
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
    owner = owner_of(device)
    if owner is None:
        return
    global _generation
    former = [] if replace else list(table(device).bodies.values())
    mine = [one for one in bodies if one["owner"] == asdict(owner)]
    with _loading:
        for place in [place for place in _tables if owner_of(place[1]) == owner]:
            del _tables[place]
        _tables[path(), device] = Table([*former, *mine])
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


# ---- writing -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(handle: int) -> Iterator[bool]:
    """Holds the lock of an open file; False where others keep it for too long or there are no locks."""
    import fcntl

    held = False
    deadline = time.monotonic() + LOCK_SECONDS
    while not held:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError as error:
            busy = error.errno in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK)
            if not busy or time.monotonic() > deadline:
                break
            time.sleep(0.01)
    try:
        yield held
    finally:
        if held:
            fcntl.flock(handle, fcntl.LOCK_UN)


def append(bodies: Sequence[Body]) -> str | None:
    """Adds measurements to the file, all or none of them. Returns None, or why that was not possible.

    Safe under any number of processes. A killed writer leaves at most one damaged line.
    """
    if not bodies:
        return None
    file = path()
    lines = b"".join(map(_line, bodies))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            with _locked(handle) as held:
                size = os.fstat(handle).st_size
                # A line that somebody left unfinished ends here, so that it takes none of ours with it.
                whole = size == 0 or os.pread(handle, 1, size - 1) == b"\n"
                left = lines if whole else b"\n" + lines
                try:
                    while left:  # more than once on a disk that is nearly full: the next write says so
                        left = left[os.write(handle, left) :]
                    os.fsync(handle)
                except OSError:
                    if held:  # nobody else has written since
                        with contextlib.suppress(OSError):
                            os.ftruncate(handle, size)
                    raise
        finally:
            os.close(handle)
    except OSError as error:
        return f"{file} cannot be written ({error.strerror})"
    return None


def forget() -> int:
    """Empties the file; returns how many lines it had. Raises OSError where that is not possible.

    Processes that run keep what they read.
    """
    try:
        handle = os.open(path(), os.O_RDWR)
    except FileNotFoundError:
        return 0
    try:
        with _locked(handle):
            with open(handle, "rb", closefd=False) as stream:
                count = sum(1 for line in stream if line.strip())
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)
    reload()
    return count
