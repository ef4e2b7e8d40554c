"""What was measured on this machine, on disk: times of `voxmma tune`, validation by `voxmma tiles --gate`.

They are lines of records.jsonl in VOXMMA_CACHE_DIR, each with a checksum, its kind, and the card, driver and
kernel build it belongs to. Writers append under a lock; a line that was cut short (a killed process, a full
disk, a file system that does not append in one piece) fails its checksum and is ignored with one warning.
Readers take no lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from voxmma._extension import _C
from voxmma.dispatch import settings

FORMAT = 2
#: A larger file is not read: a process would wait for it in its first step.
MAX_BYTES = 64 << 20
#: Seconds that a writer waits for the others.
LOCK_SECONDS = 5.0
#: Seconds after which calls that are repeated look whether the file has changed.
LOOK_SECONDS = 0.03

#: A record as plain data: `kind`, `owner` (fields of Owner), `key`, and what was found.
Entry = dict[str, Any]


@dataclass(frozen=True)
class Owner:
    """What records belong to."""

    card: str
    capability: str
    multiprocessors: int
    driver: str
    build: str
    device: str = ""
    """UUID of the one card; '' for what holds on every card of this model"""

    @property
    def digest(self) -> str:
        """Short name of all of it."""
        return digest(asdict(self))


def digest(value: Any) -> str:
    """Short name of plain data."""
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
def owner_of(device: torch.device, one_card: bool = False) -> Owner | None:
    """The owner of records on a device; None for a CPU and where the driver is unknown.

    Args:
        one_card: of what holds on this very card, and not on others of its model.
    """
    if device.type != "cuda" or (driver := driver_version()) is None:
        return None
    card = torch.cuda.get_device_properties(device)
    return Owner(
        card=card.name,
        capability=f"{card.major}.{card.minor}",
        multiprocessors=card.multi_processor_count,
        driver=driver,
        build=_C.BUILD_ID,
        device=str(card.uuid) if one_card else "",
    )


def path() -> Path:
    """The file, which need not exist."""
    return _in(settings.get_cache_dir())


@lru_cache(maxsize=64)
def _in(folder: Path) -> Path:
    return folder / "records.jsonl"


_writes = 0
"""how often this process has had the file open to be written"""

_looked: tuple[float, int, str] | None = None
"""when `stamp` looked last, `_writes` before it did, and what it said"""


def stamp() -> str:
    """A text that changes when the file does; '' where there is none."""
    global _looked
    file, now, writes = path(), time.monotonic(), _writes
    try:
        found = os.stat(file)
        text = f"{file}:{found.st_mtime_ns}:{found.st_size}"
    except OSError:
        text = ""
    _looked = now, writes, text
    return text


def recent_stamp() -> str:
    """`stamp()` as it was in the last LOOK_SECONDS. What this process has written shows at once."""
    looked = _looked
    if looked is not None and looked[1] == _writes and time.monotonic() - looked[0] < LOOK_SECONDS:
        return looked[2]
    return stamp()


@cache
def warn_once(text: str) -> None:
    """A warning, the first time that it is given in this process."""
    warnings.warn(text, stacklevel=3)


# ---- reading -----------------------------------------------------------------------------------------------


def entry(kind: str, owner: Owner, key: Mapping[str, Any], **found: Any) -> Entry:
    """A record; `key` and `found` are anything that JSON can hold."""
    return {"format": FORMAT, "kind": kind, "owner": asdict(owner), "key": dict(key), **found}


def _line(made: Entry) -> bytes:
    """A record as a line of the file, end of line included."""
    owner = made["owner"]
    head = {"of": digest(owner), "kind": made["kind"], "card": owner["card"], "sum": digest(made)}
    return json.dumps({**head, "body": made}).encode() + b"\n"


def _whole(line: bytes) -> Entry | None:
    """The record of a line, of whatever format, None for a line that is damaged."""
    try:
        said = json.loads(line)
        return dict(said["body"]) if said["sum"] == digest(said["body"]) else None
    except (ValueError, KeyError, TypeError):
        return None


def _parsed(line: bytes) -> Entry | None:
    """The record of a line, None for a line that is damaged or of another format."""
    made = _whole(line)
    try:
        return made if made and made["format"] == FORMAT and Owner(**made["owner"]) else None
    except (KeyError, TypeError):
        return None


def read(
    file: Path, kind: str, owner: Owner, possible: Callable[[Entry], bool] = lambda made: True
) -> tuple[list[Entry], bool]:
    """The records of a kind and an owner in a file, and whether this card has some of another owner.

    Warns once where the file cannot be read, and about lines that are damaged or not `possible`.
    """
    try:
        known = file.stat()
        if not stat.S_ISREG(known.st_mode) or known.st_size > MAX_BYTES:
            raise OSError(errno.EFBIG, f"no file of at most {MAX_BYTES >> 20} MiB")
        lines = file.read_bytes().split(b"\n")
    except FileNotFoundError:
        return [], False
    except OSError as error:
        warn_once(f"{file} cannot be read ({error.strerror}); nothing that was measured is used")
        return [], False
    ours, card = owner.digest.encode(), json.dumps(owner.card).encode()
    wanted = f'"kind": "{kind}"'.encode()
    found: list[Entry] = []
    damaged, others = 0, False
    for line in lines:
        if ours not in line or wanted not in line:  # which costs no parsing
            others |= card in line and wanted in line
            damaged += bool(line) and not (line.startswith(b'{"of"') and line.endswith(b"}"))
            continue
        made = _parsed(line)
        if made is None or not possible(made):
            damaged += 1
        elif made["kind"] == kind and made["owner"] == asdict(owner):
            found.append(made)
    if damaged:
        warn_once(f"{file} holds {damaged} damaged line(s), which are ignored")
    return found, others


@lru_cache(maxsize=16)
def _by_key(stamp: str, file: Path, kind: str, owner: Owner) -> dict[str, Entry]:
    return {digest(made["key"]): made for made in read(file, kind, owner)[0]}


def newest(kind: str, owner: Owner | None, key: Mapping[str, Any]) -> Entry | None:
    """The last record of a key. The file is read again when it has changed."""
    return None if owner is None else _by_key(stamp(), path(), kind, owner).get(digest(dict(key)))


# ---- writing -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(handle: int) -> Iterator[bool | None]:
    """Holds the lock of a file that is open to be written; False where others keep it for too long, None
    where there are no locks."""
    global _writes
    import fcntl

    held: bool | None = False
    deadline = time.monotonic() + LOCK_SECONDS
    while not held:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            held = True
        except OSError as error:
            if error.errno not in (errno.EAGAIN, errno.EACCES, errno.EWOULDBLOCK):
                held = None
            if held is None or time.monotonic() > deadline:
                break
            time.sleep(0.01)
    try:
        yield held
    finally:
        _writes += 1
        if held:
            fcntl.flock(handle, fcntl.LOCK_UN)


def append(entries: Sequence[Entry]) -> str | None:
    """Adds records to the file, all or none of them. Returns None, or why that was not possible.

    Safe under any number of processes. A killed writer leaves at most one damaged line.
    """
    if not entries:
        return None
    file = path()
    if problem := settings.homeless(file):
        return f"{file} cannot be written ({problem})"
    lines = b"".join(map(_line, entries))
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


def forget(kind: str) -> int:
    """Deletes the records of a kind, and damaged lines; returns how many lines went.

    Raises OSError where that is not possible, as while another process keeps the lock. A kill in the middle
    leaves lines, which may be damaged.
    """
    try:
        handle = os.open(path(), os.O_RDWR)
    except FileNotFoundError:
        return 0
    try:
        with _locked(handle) as held:
            if held is False:  # what is appended meanwhile would be lost
                raise OSError(errno.EBUSY, "another process is writing to it", str(path()))
            with open(handle, "rb", closefd=False) as stream:
                lines = [line for line in stream if line.strip()]
            kept = [line for line in lines if (made := _whole(line)) is not None and made.get("kind") != kind]
            left, place = b"".join(kept), 0
            while left[place:]:
                place += os.pwrite(handle, left[place:], place)
            os.ftruncate(handle, len(left))
    finally:
        os.close(handle)
    return len(lines) - len(kept)
