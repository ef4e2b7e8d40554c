"""Whether a file that torch.export would read is only data.

torch.export.load runs code that a file brings along: it unpickles tensors and objects without restriction,
loads AOTInductor's libraries out of data/aotinductor, evaluates sizes as expressions (sympy), and puts names
of the graph into Python source. `checked` refuses a file in which any of this could be anything but data, so
that nothing of it reaches torch.
"""

from __future__ import annotations

import io
import json
import re
import stat
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from voxmma import _structures

MAX_ENTRIES = 100_000
MAX_EXPRESSION = 10_000  # characters

#: What there may be in an archive, after its root folder; up to torch 2.8 there is none.
_ENTRY = re.compile(
    r"models/\w+\.json|data/(?:weights|constants)/(?:(?:weight|tensor)_\d+|\w+_config\.json|\w+\.pt)"
    r"|data/sample_inputs/\w+\.pt|(?:extra|extra_files)/[\w.-]+|voxmma/aot\.pt2|\.data/\w+|[\w.-]+",
    re.ASCII,
)
_EXTRA = re.compile(r"[\w.-]+/extra/[\w.-]+|extra_files/[\w.-]+", re.ASCII)
_OPERATORS = (
    r"_operator\.(?:add|sub|mul|floordiv|truediv|mod|neg|pos|pow|abs|getitem|eq|ne|lt|le|gt|ge|and_|or_|not_)"
)
_TARGET = re.compile(
    rf"torch\.ops\.(?:aten|prims|voxmma)\.(?!from_file)\w+\.\w+|{_OPERATORS}|math\.\w+|torch\.sym_\w+"
)
_NAME = re.compile(r"[\w.]*", re.ASCII)
_EXPRESSION = re.compile(r"(?:'[suz]\d+'|[A-Za-z]\w*|\d+|[-+*/(),=<>&|~ ])*", re.ASCII)
_WORDS = set(
    """Symbol Integer Rational Float Add Mul Pow Max Min Mod PythonMod FloorDiv CleanDiv CeilDiv
    ModularIndexing Where Piecewise ceiling floor CeilToInt FloorToInt TruncToInt RoundToInt
    IntTrueDiv FloatTrueDiv ToFloat PowByNatural
    FloatPow OpaqueUnaryFn_sqrt Identity Eq Ne Lt Le Gt Ge And Or Not Abs True False positive
    negative integer nonnegative real finite zero evaluate int_oo oo""".split()  # noqa: SIM905
)
#: Values that are graphs, operators or objects of their own.
_FOREIGN = {"as_graph", "as_custom_obj", "as_operator", "as_opaque_obj"}


class NotData(ValueError):
    """What in a file is more than data."""


def checked(path: str | Path) -> bytes:
    """The bytes of an archive of torch.export, once nothing in it can run code.

    Raises NotData naming the entry, OSError where the file cannot be read.
    """
    content = Path(path).read_bytes()
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_entries(archive, content)
            for info in archive.infolist():
                _check_content(info.filename, archive)
    except (zipfile.BadZipFile, LookupError, TypeError, AttributeError, RuntimeError, EOFError) as error:
        raise NotData(f"it is no intact archive: {error}") from error
    return content


def _check_entries(archive: zipfile.ZipFile, content: bytes) -> None:
    """Names, kinds and sizes. Entries that are stored as they are cannot be larger than the file together."""
    infos = archive.infolist()
    if archive.comment or content[-22:-18] != b"PK\x05\x06":  # two readers might see two archives
        raise NotData("something follows the archive")
    if len(infos) > MAX_ENTRIES:
        raise NotData(f"it has {len(infos):,} entries, at most {MAX_ENTRIES:,} are read")
    root, slash, _ = infos[0].filename.partition("/") if infos else ("", "", "")
    seen: set[str] = set()
    for info in infos:
        name = info.filename
        if name in seen:
            raise NotData(f"entry {name!r} is there twice")
        seen.add(name)
        inner = name.removeprefix(root + slash) if slash else name
        if ".." in name or not (_ENTRY.fullmatch(name) or _ENTRY.fullmatch(inner)):
            raise NotData(f"entry {name!r} is none of an artefact")
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
            raise NotData(f"entry {name!r} is no plain file")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
            raise NotData(f"entry {name!r} is compressed")
    if sum(info.file_size for info in infos) > len(content):
        raise NotData("its entries are larger than the file")


def _check_content(name: str, archive: zipfile.ZipFile) -> None:
    data = archive.read(name)  # also compares its checksum
    if name.endswith(".pt"):
        _check_tensors(name, data)
    elif name.endswith(".json") and not _EXTRA.fullmatch(name):
        try:
            program = json.loads(data)
        except ValueError as error:
            raise NotData(f"entry {name!r} is no JSON: {error}") from error
        for key, value in _strings(program):
            _check_string(name, key, value)
        if name.endswith("_config.json"):
            folder = name.rpartition("/")[0]
            for payload in program["config"].values():
                if payload["use_pickle"]:
                    stored = f"{folder}/{payload['path_name']}"
                    _check_tensors(stored, archive.read(stored))


def _check_tensors(name: str, data: bytes) -> None:
    """torch.export falls back to unrestricted pickles where this fails."""
    if not data:
        return
    try:
        torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged pickle raises
        raise NotData(f"entry {name!r} holds more than tensors: {str(error).splitlines()[0]}") from error


def _strings(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Every string of a JSON value with the name of its field, and every name of a field with ''.

    Not what nodes carry as metadata: stack traces and the like, which nothing evaluates.
    """
    if isinstance(value, dict):
        for name, item in value.items():
            if (
                name == "metadata"
                and isinstance(item, dict)
                and all(isinstance(v, str) for v in item.values())
            ):
                continue
            yield "", name
            yield from _strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, str):
        yield key, value


def _check_string(name: str, key: str, value: str) -> None:
    if key == "" and value in _FOREIGN:
        raise NotData(f"entry {name!r} holds a value {value!r}, which may be code")
    if key == "target" and not _TARGET.fullmatch(value):
        raise NotData(f"entry {name!r} calls {value!r}, which is no operator of a network")
    if key == "expr_str" and not is_expression(value):
        raise NotData(f"entry {name!r} has a size {value[:80]!r}, which is no expression of sizes")
    if (key == "" or key.endswith("name")) and not _NAME.fullmatch(value):
        raise NotData(f"entry {name!r} has a name {value[:80]!r}")
    if key == "path_name" and not re.fullmatch(r"(?:weight|tensor)_\d+", value):
        raise NotData(f"entry {name!r} points to {value!r}, which holds no tensor")
    if key.endswith("_spec") and value:
        try:
            _structures.check(value)
        except ValueError as error:
            raise NotData(f"entry {name!r}: {error}") from None


def is_expression(text: str) -> bool:
    """Whether a size is made of symbols, numbers, arithmetic and functions of sizes alone."""
    if len(text) > MAX_EXPRESSION or not _EXPRESSION.fullmatch(text):
        return False
    words = re.findall(r"[A-Za-z]\w*", re.sub(r"'[^']*'", "", text))
    return all(word in _WORDS or re.fullmatch(r"[suz]\d+", word) for word in words)
