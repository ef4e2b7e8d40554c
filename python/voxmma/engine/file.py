"""Engines as files: data alone, a list of operators and tensors, never unpickled.

The layout is that of docs/runtime.md: 32 bytes, a head in JSON, the bytes of every tensor. Operators are
those of aten and of voxmma that a program may hold; a file can make this process compute, and nothing else.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from voxmma import _structures
from voxmma._extension import _C
from voxmma._types import Triple
from voxmma._version import __version__
from voxmma.engine import ops as _ops  # noqa: F401  defines the operators
from voxmma.engine.compiled import Engine
from voxmma.engine.errors import EngineError
from voxmma.engine.inputs import MOST_ROWS, Grid, Input
from voxmma.engine.program import (
    CELLS,
    Capacity,
    Const,
    Level,
    Plan,
    Program,
    Ref,
    Report,
    Room,
    Step,
    TensorOut,
    VoxelsOut,
    each,
    made,
    reads,
)
from voxmma.sparse.derive import Derived
from voxmma.sparse.geometry import Geometry, geometry_of

_FORMAT = 3
_MAGIC = b"VXENGINE"
_PREFIX = struct.Struct("<8sIIQQ")
"""magic, format, CRC-32 of what follows these 16 bytes, bytes of the file, bytes of the head"""
_SUMMED = 16
_ALIGNED = 64  # tensors begin at multiples of it
_PLACES = {"ref": Ref, "const": Const, "capacity": Capacity, "room": Room}
_KINDS = {kind: name for name, kind in _PLACES.items()}
#: Operators without an operand: others of these read files, or make what a program never makes.
_CREATE = frozenset(["arange", "empty", "eye", "full", "linspace", "ones", "scalar_tensor", "zeros"])
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d)


def _word(value: Any) -> str:
    """'float16' of torch.float16."""
    return str(value).removeprefix("torch.")


_NAMED: dict[str, dict[str, Any]] = {
    "dtype": {_word(value): value for value in vars(torch).values() if isinstance(value, torch.dtype)},
    "layout": {"strided": torch.strided},
    "memory_format": {_word(value): value for value in _FORMATS},
}


def machine(device: torch.device) -> dict[str, Any]:
    """What an engine's numbers and kernels depend on."""
    made: dict[str, Any] = {
        "voxmma": __version__, "build": _C.BUILD_ID, "torch": torch.__version__, "device": device.type
    }  # fmt: skip
    if device.type == "cuda":
        made["card"] = torch.cuda.get_device_name(device)
        made["capability"] = list(torch.cuda.get_device_capability(device))
    return made


# ---- writing -----------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    kind = type(value)
    if kind in _KINDS:
        return {_KINDS[kind]: next(iter(asdict(value).values()))}
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return {"float": value.hex()}
    if kind in (list, tuple):
        return [_encoded(part) for part in value]
    if kind is torch.device:
        return {"device": value.type}
    for name, table in _NAMED.items():
        for text, known in table.items():
            if known is value:
                return {name: text}
    raise EngineError(f"the engine cannot be saved: an argument is {kind.__name__} {value!r}")


def _output(out: Any) -> Any:
    if isinstance(out, VoxelsOut):
        return {"voxels": [out.level, _encoded(out.feats), _encoded(out.coords), list(out.stride)]}
    if isinstance(out, TensorOut):
        return {"tensor": [out.level, _encoded(out.value)]}
    return {"value": _encoded(out)}


def _axes(tensor: Tensor) -> list[int]:
    """Dimensions in the order in which they lie in memory, which products may round by."""
    return sorted(range(tensor.dim()), key=lambda dim: -tensor.stride()[dim])


def _bytes(tensor: Tensor) -> bytes:
    laid = tensor.detach().permute(_axes(tensor)).cpu().contiguous()
    data: bytes = laid.reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def _spec(tree: Any) -> str:
    try:
        return _structures.dumps(tree)
    except (NotImplementedError, ValueError) as error:
        raise EngineError(f"the engine cannot be saved: {error}") from None


def save(engine: Engine, path: str | Path) -> None:
    """Writes an engine to a file, which appears under its name once it is whole; `load` reads it.

    EngineError for inputs or results of types that JSON has no word for, OSError where it cannot be written.
    """
    program = engine._program
    inputs = [_input(given) for given in engine._inputs]
    with engine._lock:
        head = {
            "machine": machine(engine.device),
            "grow": engine.grow,
            "capacities": engine._instance.capacities,
            "rooms": [_encoded(float(room)) for room in engine._instance.rooms],
            "needs": engine._needs,
            "inputs": inputs,
            "built": _spec(engine._spec),
            "levels": [[list(_path(level)), level.parent, list(level.bounds)] for level in program.levels],
            "plans": [[plan.source, plan.target, plan.geometry, plan.reverse] for plan in program.plans],
            "given": [ref.number for ref in program.inputs],
            "steps": [
                [f"{step.func._schema.name}.{step.func._overloadname}", _encoded(step.args),
                 {name: _encoded(value) for name, value in step.kwargs.items()}, step.out, step.frees]
                for step in program.steps
            ],
            "reports": [
                [report.kind, report.number, _encoded(report.status), report.line]
                for report in program.reports
            ],
            "outputs": [_output(out) for out in program.outputs],
            "returned": _spec(program.spec),
            "widths": list(program.widths.items()),
            "tensors": [
                [_word(t.dtype), list(t.shape), _axes(t), t.device.type] for t in program.consts
            ],
        }  # fmt: skip
    _write(path, head, map(_bytes, program.consts), [tensor.nbytes for tensor in program.consts])


def _write(path: str | Path, head: dict[str, Any], tensors: Iterable[bytes], sizes: Sequence[int]) -> None:
    """A file of a head, whose tensors get their places, and their bytes, of these sizes.

    It appears under its name once it is whole.
    """
    places = [0, *itertools.accumulate(_up(size) for size in sizes)]
    listed = [[*entry[:4], place] for entry, place in zip(head["tensors"], places, strict=False)]
    text = json.dumps({**head, "tensors": listed}, separators=(",", ":")).encode()
    prefix = _PREFIX.pack(_MAGIC, _FORMAT, 0, _up(_PREFIX.size + len(text)) + places[-1], len(text))
    part = Path(f"{path}.{os.getpid()}.{threading.get_ident()}.part")
    try:
        with part.open("wb") as file:
            file.write(prefix[:_SUMMED])
            crc = 0
            for data in itertools.chain([prefix[_SUMMED:] + text], tensors):
                filled = data.ljust(_up(file.tell() + len(data)) - file.tell(), b"\0")
                crc = zlib.crc32(filled, crc)
                file.write(filled)
            file.seek(len(_MAGIC))
            file.write(struct.pack("<II", _FORMAT, crc))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _up(size: int) -> int:
    return size + -size % _ALIGNED


def _input(given: Input) -> dict[str, Any]:
    made = {**asdict(given), "dtype": _encoded(given.dtype)}
    if given.grid is not None:
        made["grid"] = {name: _encoded(value) for name, value in vars(given.grid).items()}
    return made


def _path(level: Level) -> Iterator[Any]:
    first, *rest = level.path
    yield first
    yield from (step if step == CELLS else list(step) for step in rest)


# ---- reading -----------------------------------------------------------------------------------------------


@contextmanager
def _data(path: str | Path) -> Iterator[None]:
    """Whatever a file that is cut or made up leads to is an EngineError."""
    try:
        yield
    except (EngineError, OSError):
        raise
    except Exception as error:
        raise EngineError(f"{path} is no engine: {type(error).__name__}: {error}") from error


def _read(path: str | Path) -> tuple[dict[str, Any], list[memoryview]]:
    """The head of a file, and the bytes of its tensors. EngineError for one that is cut or damaged."""
    content = memoryview(Path(path).read_bytes())
    if content[: len(_MAGIC)] != _MAGIC or len(content) < _PREFIX.size:
        raise EngineError(f"{path} is no engine")
    _, found, crc, size, length = _PREFIX.unpack(content[: _PREFIX.size])
    if found != _FORMAT:
        raise EngineError(f"{path} has format {found}, this version reads {_FORMAT}")
    if size != len(content):
        raise EngineError(f"{path} is damaged: it has {len(content):,} bytes and says {size:,}")
    if zlib.crc32(content[_SUMMED:]) != crc:
        raise EngineError(f"{path} is damaged: its checksum is another")
    head = json.loads(bytes(content[_PREFIX.size : _PREFIX.size + length]))
    stored = content[_up(_PREFIX.size + length) :]
    tensors = []
    for dtype, shape, _, _, begin in head["tensors"]:
        nbytes = math.prod(shape) * _NAMED["dtype"][dtype].itemsize
        if not 0 <= begin <= len(stored) - nbytes or nbytes < 0:
            raise EngineError(f"{path} is damaged: a tensor of {nbytes:,} bytes is not in it")
        tensors.append(stored[begin : begin + nbytes])
    return head, tensors


class _Reader:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def decoded(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.decoded(part) for part in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind in _PLACES:
            if type(content) is not int or content < 0:
                raise EngineError(f"a place of the program is {content!r}")
            return _PLACES[kind](content)
        if kind == "float":
            return float.fromhex(content)
        if kind == "device":
            return torch.device("cpu") if content == "cpu" else self.device
        return _NAMED[kind][content]

    def operator(self, name: str) -> Any:
        """An operator that a program may hold."""
        space, _, rest = name.partition("::")
        base, _, overload = rest.partition(".")
        if space not in ("aten", "voxmma"):
            raise EngineError(f"operator {name!r} is not one of aten or voxmma")
        found = getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        operands = any("Tensor" in str(argument.type) for argument in found._schema.arguments)
        if not operands and base not in _CREATE:
            raise EngineError(f"operator {name!r} belongs to no network")
        return found

    def output(self, value: Any) -> Any:
        ((kind, content),) = value.items()
        if kind == "voxels":
            level, feats, coords, stride = content
            return VoxelsOut(level, self.decoded(feats), self.decoded(coords), tuple(stride))
        if kind == "tensor":
            return TensorOut(content[0], self.decoded(content[1]))
        return self.decoded(content)


def _geometry(parts: Sequence[Sequence[int]]) -> Geometry:
    return Geometry(*map(tuple, parts))  # type: ignore[arg-type]


def _tensor(
    content: memoryview, dtype: torch.dtype, shape: list[int], axes: list[int], device: torch.device
) -> Tensor:
    if sorted(axes) != list(range(len(shape))):
        raise EngineError("a tensor's axes are no permutation")
    flat = torch.empty(0, dtype=torch.uint8, device="cpu")
    if content:
        flat = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    laid = flat.view(dtype).reshape([shape[axis] for axis in axes])
    return laid.permute([axes.index(dim) for dim in range(len(shape))]).to(device)


def _triple(shape: list[int] | None) -> Triple | None:
    return None if shape is None else (shape[0], shape[1], shape[2])


def _grid(reader: _Reader, given: dict[str, Any] | None) -> Grid | None:
    if given is None:
        return None
    dtype, edge, origin, reduce = (
        reader.decoded(given[name]) for name in ("dtype", "edge", "origin", "reduce")
    )
    return Grid(dtype, tuple(edge), tuple(origin), reduce)


def _derived(geometry: Any, to_children: bool, shape: list[int] | None) -> Derived:
    return Derived(_geometry(geometry), bool(to_children), _triple(shape))


#: Of each kind of report, what its number counts.
_REPORTS = {
    "index": "levels", "voxels": "levels", "sites": "levels", "dense": "levels", "points": "levels",
    "map": "plans", "finite": "inputs",
}  # fmt: skip


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise EngineError(f"the program is damaged: {what}")


def _check_steps(program: Program) -> None:
    """EngineError unless tensors are there when they are read, and indices of sets and kernel maps are what
    the operators make.

    Kernels trust these: those that a file brings along might have them read and write anywhere.
    """
    there = {ref.number for ref in program.inputs}
    most = {Const: len(program.consts), Capacity: len(program.levels), Room: len(program.plans)}
    trusted: set[tuple[int, ...]] = set()
    for step in program.steps:
        name, given, outs = step.func._schema.name, step.named(), made(step)
        ours = name.startswith("voxmma::")
        _require(there.issuperset(reads(step, Ref)), f"{name} reads a tensor that is not there")
        for kind, count in most.items():
            named = [
                value for place in each([step.args, step.kwargs], kind) for value in vars(place).values()
            ]
            _require(
                all(number < count for number in named), f"{name} has a {kind.__name__} that there is not"
            )
        _require(
            all(type(number) is int and number >= 0 for number in outs), f"{name} makes a nameless tensor"
        )
        _require(ours or not set().union(*trusted).intersection(reads(step, Ref)), f"{name} has an index")
        sets = given.get("sets", [])
        indices = [sets[at + 2 : at + 5] for at in range(0, len(sets), 5)]
        if "inner" in given:
            indices.append([given["inner"], given["first"], given["second"]])
        indices += [given[what] for what in ("map", "map_t") if ours and given.get(what)]
        for index in indices:
            numbers = tuple(place.number for place in index if isinstance(place, Ref))
            _require(numbers in trusted, f"{name} has an index or kernel map that no operator made")
        if name in ("voxmma::sized_index", "voxmma::sized_sites"):
            trusted.add(tuple(outs[-4:-1]))
        if name == "voxmma::sized_maps":
            count = max(len(given["inputs"]), 1)
            some = (len(outs) - 1) // count
            trusted |= {tuple(outs[at : at + some]) for at in range(0, count * some, some)}
        values = [*given.get("geometry", []), *given.get("geometries", [])] if ours else []
        for at in range(0, len(values), 12):
            size, stride, dilation, padding = (values[at + i : at + i + 3] for i in range(0, 12, 3))
            geometry_of(size, dilation, stride, padding)
        there.update(outs)
        _require(there.issuperset(step.frees), f"{name} frees a tensor that is not there")
        there.difference_update(step.frees)
    for place in program.places():
        ok = place.number in there if isinstance(place, Ref) else place.number < len(program.consts)
        _require(ok, "a result is not there")


def _check(
    program: Program, inputs: Sequence[Input], capacities: list[int], rooms: list[float], needs: list[int]
) -> None:
    """EngineError unless the parts of an engine fit each other."""
    levels, plans = len(program.levels), len(program.plans)
    _check_steps(program)
    _require(len(capacities) == len(needs) == levels and len(rooms) == plans, "a level or map has no size")
    _require(all(1 <= rows <= MOST_ROWS for rows in capacities), f"capacities are {capacities}")
    _require(all(room >= 0 for room in rooms), f"rooms are {rooms}")
    for number, level in enumerate(program.levels):
        _require(-1 <= level.parent < number and len(level.bounds) == 8, f"level {number} is made of none")
    sparse = [given.root for given in inputs if given.sparse]
    roots = sum(level.parent < 0 for level in program.levels)
    _require(sparse == list(range(roots)) and roots > 0, "an input is of no level")
    _require(sum(given.count for given in inputs) == len(program.inputs), "an input is not in the program")
    for plan in program.plans:
        _require(0 <= plan.source < levels and 0 <= plan.target < levels, "a kernel map is of no level")
    most = {"levels": levels, "plans": plans, "inputs": roots}
    for report in program.reports:
        low = -1 if report.kind == "points" else 0
        _require(
            low <= report.number < most[_REPORTS[report.kind]] and report.line >= 0, "a report is of nothing"
        )
    for out in program.outputs:
        if isinstance(out, VoxelsOut | TensorOut):
            low = 0 if isinstance(out, VoxelsOut) else -1
            _require(low <= out.level < levels, "a result is of no level")


def load(path: str | Path, device: torch.device | str | None = None) -> Engine:
    """Reads an engine that `Engine.save` wrote; runs no code that the file brings along.

    Args:
        path: the file.
        device: where it runs, a device of the kind that it was compiled on. Default: that, and of GPUs the
            current one.

    Raises OSError for a file that cannot be read, EngineError for a file that is no engine or was cut, that
    holds operators of no network, or that was written by another version or build of voxmma, by another
    PyTorch, or for another card.
    """
    with _data(path):
        head, contents = _read(path)
        made_on = head["machine"]
        target = torch.empty(0, dtype=torch.uint8, device=device or made_on["device"]).device
        here = machine(target)
        for name, wanted in made_on.items():
            if here.get(name) != wanted:
                raise EngineError(f"{path} is for {name} {wanted}, this is {here.get(name)}")
        reader = _Reader(target)
        consts = [
            _tensor(
                content,
                _NAMED["dtype"][dtype],
                shape,
                axes,
                torch.device("cpu") if place == "cpu" else target,
            )
            for content, (dtype, shape, axes, place, _) in zip(contents, head["tensors"], strict=True)
        ]
        levels = [
            Level(
                (steps[0], *(step if step == CELLS else _derived(*step) for step in steps[1:])),
                parent,
                tuple(bounds),
            )
            for steps, parent, bounds in head["levels"]
        ]
        program = Program(
            levels,
            [Plan(source, target_, _geometry(g), reverse) for source, target_, g, reverse in head["plans"]],
            [Ref(number) for number in head["given"]],
            [
                Step(
                    reader.operator(name),
                    reader.decoded(args),
                    {key: reader.decoded(value) for key, value in kwargs.items()},
                    tuple(out),
                    tuple(frees),
                )
                for name, args, kwargs, out, frees in head["steps"]
            ],
            consts,
            [
                Report(kind, number, reader.decoded(status), line)
                for kind, number, status, line in head["reports"]
            ],
            [reader.output(out) for out in head["outputs"]],
            _structures.loads(head["returned"]),
            dict(head["widths"]),
        )
        inputs = [
            Input(
                tuple(given["shape"]),
                reader.decoded(given["dtype"]),
                given["root"],
                given["batch_size"],
                tuple(given["stride"]),
                _triple(given["spatial_shape"]),
                _grid(reader, given["grid"]),
            )
            for given in head["inputs"]
        ]
        built, rooms = _structures.loads(head["built"]), [reader.decoded(room) for room in head["rooms"]]
        _check(program, inputs, head["capacities"], rooms, head["needs"])
        _require(built.num_leaves == len(inputs), "an input has no place")
        _require(program.spec.num_leaves == len(program.outputs), "a result has no place")
        return Engine(
            program, inputs, built, head["capacities"], rooms, target, bool(head["grow"]), head["needs"]
        )
