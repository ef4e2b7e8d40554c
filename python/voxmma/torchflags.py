"""Exact snapshot and restore of PyTorch's process-wide precision switches.

PyTorch keeps the precision of float32 arithmetic twice: in a tree of ``fp32_precision`` nodes (torch >= 2.9;
``generic.all`` above ``cuda.all`` above ``cuda.matmul``, ``cuda.conv``, ``cuda.rnn``, and the same for
``mkldnn``) and in older variables (``allow_tf32``, ``set_float32_matmul_precision``) whose setters also write
into the tree. A getter of the tree returns the *inherited* value, so copying what the getters say turns unset
nodes into set ones, and reading an old flag raises when the two disagree. This module reads and writes what
is really **stored**:

* an unset node is found by varying its ancestors for an instant and watching whether the node follows;
* an old flag is read with the tree held in a state in which its getter cannot object;
* restoring writes old flags first (their setters write tree nodes), then the tree from the root to the
  leaves, and only what differs; then everything is read back and every remaining difference is returned.

``cuda.conv`` and ``cuda.rnn`` start in a third state, here called ``"default"`` (TF32 unless an ancestor says
otherwise), which no setter of PyTorch can write. So nothing in this package ever writes a node that is in it:
`set_tf32` works through ``cuda.all`` then. Code that assigns such a node itself makes an exact restore
impossible, and `restore` says so.

While a snapshot is being taken the ancestors hold other values for some microseconds: take it while no other
thread launches float32 work. Calls from several threads are serialised among themselves.

`Hold` and `preserved` are scopes that may end in any order and in any thread; the last to end puts back what
the first found. `pinned` has the switches at given values for one launch. Whatever here reads or changes the
switches waits for the launches that are under way, and they for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

_C: Any = torch._C
_LOCK = threading.RLock()

# Ancestors before children: the order in which nodes are read and written.
_OPS = ("matmul", "conv", "rnn")
TREE_NODES = (("generic", "all"), *((backend, op) for backend in ("cuda", "mkldnn") for op in ("all", *_OPS)))

HAS_TREE = hasattr(_C, "_get_fp32_precision_getter")


class FlagsError(RuntimeError):
    """The process-wide precision state could not be set or put back as asked."""


@dataclass(frozen=True)
class Difference:
    """One switch whose value is not the wanted one: its name, the wanted and the present value."""

    name: str
    wanted: Any
    found: Any

    def __str__(self) -> str:
        return f"{self.name}: wanted {self.wanted!r}, found {self.found!r}"


@dataclass(frozen=True)
class Flags:
    """The stored state of every precision switch.

    Attributes:
        tree: node name (``"cuda.matmul"``) to stored value: ``"none"`` (unset), ``"default"``, ``"ieee"``,
            ``"tf32"``, ``"bf16"``. Empty where this PyTorch has no tree.
        legacy: ``float32_matmul_precision`` and ``cudnn_allow_tf32`` as the old variables hold them.
        plain: every independent switch (cudnn, SDPA, reduced-precision reductions, determinism).
    """

    tree: dict[str, str]
    legacy: dict[str, Any]
    plain: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain JSON types; `from_json` is its inverse."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Flags:
        """Rebuilds what `to_json` wrote. Raises ValueError for a missing, an unknown or a damaged part."""
        if not isinstance(data, dict) or set(data) != {"tree", "legacy", "plain"}:
            raise ValueError("a flags record has exactly the parts 'tree', 'legacy' and 'plain'")
        for part, values in data.items():
            if not isinstance(values, dict):
                raise ValueError(f"{part} of a flags record is no dictionary")
            for name, value in values.items():
                if not can_be(part, name, value):
                    raise ValueError(f"{part} of a flags record has {name} = {value!r}")
        return cls(tree=dict(data["tree"]), legacy=dict(data["legacy"]), plain=dict(data["plain"]))

    def differences(self, found: Flags) -> list[Difference]:
        """What in ``found`` is not as in this record, over all switches either of them knows."""
        missing = "(absent)"
        out = []
        for part in ("tree", "legacy", "plain"):
            wanted, present = getattr(self, part), getattr(found, part)
            for name in list(wanted) + [n for n in present if n not in wanted]:
                a, b = wanted.get(name, missing), present.get(name, missing)
                if a != b:
                    out.append(Difference(name if part != "tree" else f"fp32_precision[{name}]", a, b))
        return out


def can_be(part: str, name: str, value: Any) -> bool:
    """Whether a switch can have that value; of switches that this PyTorch does not have, anything."""
    if part == "tree":
        return value in ("none", "default", "ieee", "tf32", "bf16")
    if name == "float32_matmul_precision":
        return value in ("highest", "high", "medium")
    if name == "cudnn_allow_tf32":
        return isinstance(value, bool)
    now = get_flag(name)
    if isinstance(now, list):
        return isinstance(value, list) and list(map(type, value)) == list(map(type, now))
    return now is None or type(value) is type(now)


# ---------------------------------------------------------------- independent switches
#: Names of switches, and what follows _get_ and _set_ in torch._C.
_SWITCHES = {
    "cudnn.enabled": "cudnn_enabled",
    "cudnn.benchmark": "cudnn_benchmark",
    "cudnn.deterministic": "cudnn_deterministic",
    "cudnn.depthwise_kernel": "cudnn_depthwise_kernel",
    "cuda.matmul.allow_fp16_accumulation": "cublas_allow_fp16_accumulation",
    "cpu.allow_fp16_reduced_precision_reduction": "cpu_allow_fp16_reduced_precision_reduction",
    "sdp.math_allow_fp16_bf16_reduction": "math_sdp_allow_fp16_bf16_reduction",
    "mkldnn.enabled": "mkldnn_enabled",
    "mkldnn.deterministic": "mkldnn_deterministic",
}
_SDP = {"flash": "flash_sdp", "mem_efficient": "mem_efficient_sdp", "math": "math_sdp", "cudnn": "cudnn_sdp"}


def _plain_table() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Name to (getter, setter) of every independent switch that this PyTorch has."""

    def pair(getter: str, setter: str) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
        get, put = getattr(_C, getter, None), getattr(_C, setter, None)
        return None if get is None or put is None else (get, put)

    def several(getter: str, setter: str) -> tuple[Callable[[], Any], Callable[[Any], Any]] | None:
        """A switch of one or two booleans, kept as a list so that JSON gives back the same value."""
        found = pair(getter, setter)
        if found is None:
            return None
        get, put = found
        read = lambda: list(value) if isinstance(value := get(), tuple | list) else [value]  # noqa: E731
        return read, lambda value: put(*value)

    table = {name: pair(f"_get_{words}", f"_set_{words}") for name, words in _SWITCHES.items()}
    for name, words in _SDP.items():
        table[f"sdp.{name}"] = pair(f"_get_{words}_enabled", f"_set_sdp_use_{name}")
    for dtype in ("fp16", "bf16"):
        name = f"allow_{dtype}_reduced_precision_reduction"
        table[f"cuda.matmul.{name}"] = several(f"_get_cublas_{name}", f"_set_cublas_{name}")
    table["deterministic_algorithms"] = (
        lambda: [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ],
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    )
    if _C._has_cudnn:
        limit = "cudnn_benchmark_limit"
        table["cudnn.benchmark_limit"] = pair(f"_cuda_get_{limit}", f"_cuda_set_{limit}")
    return {name: entry for name, entry in table.items() if entry is not None}


_PLAIN = _plain_table()


def get_flag(name: str) -> Any:
    """One independent switch by its name in `Flags.plain`; None when this PyTorch does not have it."""
    return _PLAIN[name][0]() if name in _PLAIN else None


def set_flag(name: str, value: Any) -> None:
    """Sets one independent switch by its name in `Flags.plain`, and reads it back.

    Raises KeyError for a name this PyTorch does not have and FlagsError when the value did not take.
    """
    if name not in _PLAIN:
        raise KeyError(f"unknown switch {name!r}; this PyTorch has {', '.join(sorted(_PLAIN))}")
    get, put = _PLAIN[name]
    with _exclusive():
        put(value)
        if get() != value:
            raise FlagsError(f"{name} was set to {value!r} but reads {get()!r}")


#: What PyTorch's libraries may do to the sums of 16-bit products: add them up in 16 bits.
SHORT_SUMS = (
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cuda.matmul.allow_fp16_accumulation",
    "cpu.allow_fp16_reduced_precision_reduction",
    "sdp.math_allow_fp16_bf16_reduction",
)


def forbid_short_sums() -> None:
    """Sums of 16-bit products in float32, by every switch that this PyTorch has."""
    for name in SHORT_SUMS:
        now = get_flag(name)
        wanted = [False, *now[1:]] if isinstance(now, list) else False
        if now not in (None, wanted):
            set_flag(name, wanted)


# ---------------------------------------------------------------- the fp32_precision tree
def _get(backend: str, op: str) -> str:
    return str(_C._get_fp32_precision_getter(backend, op))


def _set(backend: str, op: str, value: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a node without hardware behind it warns on every write
        _C._set_fp32_precision_setter(backend, op, value)


def _follows(parent: tuple[str, str], node: tuple[str, str]) -> tuple[bool, str]:
    """Whether ``node`` inherits from ``parent``, or else what it stores. Leaves ``parent`` at 'tf32'."""
    _set(*parent, "ieee")
    under_ieee = _get(*node)
    _set(*parent, "tf32")
    return under_ieee != _get(*node), under_ieee


def _stored_tree() -> dict[str, str]:
    """The stored value of every node. Only ancestors are written, and they are put back."""
    if not HAS_TREE:
        return {}
    root = ("generic", "all")
    stored = {"generic.all": _get(*root)}
    try:
        for backend in ("cuda", "mkldnn"):
            top = (backend, "all")
            inherits, value = _follows(root, top)
            stored[f"{backend}.all"] = "none" if inherits else value
            _set(*root, "none")
            try:
                for op in _OPS:
                    inherits, value = _follows(top, (backend, op))
                    if inherits:
                        _set(*top, "none")
                        value = "default" if _get(backend, op) != "none" else "none"
                    stored[f"{backend}.{op}"] = value
            finally:
                _set(*top, stored[f"{backend}.all"])
    finally:
        _set(*root, stored["generic.all"])
    return {f"{b}.{o}": stored[f"{b}.{o}"] for b, o in TREE_NODES}


def _reads(getter: Callable[[], Any]) -> tuple[bool, Any]:
    """(True, value), or (False, None) when the getter objects that old and new settings disagree."""
    try:
        return True, getter()
    except RuntimeError:
        return False, None


def _stored_legacy(tree: dict[str, str]) -> dict[str, Any]:
    """The old variables, read with the tree held where their getters do not object."""
    get_cudnn = _C._get_cudnn_allow_tf32
    if not tree:
        return {
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
            "cudnn_allow_tf32": get_cudnn(),
        }
    ok, matmul = _reads(torch.get_float32_matmul_precision)
    if not ok:
        try:
            _set("cuda", "matmul", "ieee")
            _set("mkldnn", "matmul", "ieee")
            ok, matmul = _reads(torch.get_float32_matmul_precision)
        finally:
            _set("cuda", "matmul", tree["cuda.matmul"])
            _set("mkldnn", "matmul", tree["mkldnn.matmul"])
        if not ok:
            raise FlagsError("torch.get_float32_matmul_precision() raises in every state of the tree")
    ok, cudnn = _reads(get_cudnn)
    if not ok:
        leaves = [("cuda", op) for op in ("conv", "rnn") if tree[f"cuda.{op}"] != "default"]
        try:
            _set("cuda", "all", "tf32")
            for leaf in leaves:
                _set(*leaf, "tf32")
            cudnn, _ = _reads(get_cudnn)  # which objects, the branch being at TF32, exactly when it is False
        finally:
            _set("cuda", "all", tree["cuda.all"])
            for leaf in leaves:
                _set(*leaf, tree[".".join(leaf)])
    return {"float32_matmul_precision": matmul, "cudnn_allow_tf32": cudnn}


def snapshot() -> Flags:
    """The stored state of every precision switch of this process. Changes nothing that outlasts the call."""
    with _exclusive():
        tree = _stored_tree()
        legacy = _stored_legacy(tree)
        return Flags(tree=tree, legacy=legacy, plain={name: get() for name, (get, _) in _PLAIN.items()})


def restore(flags: Flags, parts: tuple[str, ...] = ("tree", "legacy", "plain")) -> list[Difference]:
    """Puts back the state in ``flags`` and reads everything back.

    Args:
        flags: what `snapshot` returned.
        parts: which parts of it, or names of independent switches; the others are left as they are now and
            not compared.

    Returns what could not be put back: empty when the state is exactly as it was. It never raises for a
    difference, so that a caller in a ``finally`` block can decide.
    """
    with _exclusive():
        now = snapshot()
        wanted_parts = {part: getattr(flags if part in parts else now, part) for part in now.to_json()}
        named = {name: value for name, value in flags.plain.items() if name in parts}
        flags = Flags(**{**wanted_parts, "plain": {**wanted_parts["plain"], **named}})
        if now == flags:
            return []
        for name, value in flags.plain.items():
            if name in _PLAIN and now.plain[name] != value:
                _PLAIN[name][1](value)
        wanted, found = flags.legacy, now.legacy
        if wanted.get("float32_matmul_precision") not in (None, found["float32_matmul_precision"]):
            torch.set_float32_matmul_precision(wanted["float32_matmul_precision"])
        if wanted.get("cudnn_allow_tf32") not in (None, found["cudnn_allow_tf32"]):
            _C._set_cudnn_allow_tf32(wanted["cudnn_allow_tf32"])
        if HAS_TREE and flags.tree:
            tree = _stored_tree()
            for backend, op in TREE_NODES:
                value = flags.tree.get(f"{backend}.{op}")
                if value in (None, tree[f"{backend}.{op}"]):
                    continue
                # "default" cannot be written; TF32 is what it means while its ancestors are unset.
                _set(backend, op, "tf32" if value == "default" else value)
        return flags.differences(snapshot())


class Hold:
    """A scope of the switches: `release` puts parts of them back as they were when it was made.

    Holds end in any order and in any thread: one that ends before a later one leaves what it found to that
    one, so that the last to end puts back what the first found.

    Args:
        parts: as `restore` takes them.
    """

    def __init__(self, parts: tuple[str, ...] = ("tree", "legacy")) -> None:
        with _exclusive():
            self.found = snapshot()
            plain = self.found.plain if "plain" in parts else ()
            self._parts = {*parts, *plain} - {"plain"}
            _holds.append(self)

    def release(self) -> list[Difference]:
        """Ends the scope; returns what could not be put back. A second call does nothing."""
        with _exclusive():
            if self not in _holds:
                return []
            later = _holds[_holds.index(self) + 1 :]
            _holds.remove(self)
            mine = []
            for part in self._parts:
                heir = next((hold for hold in later if part in hold._parts), None)
                if heir is None:
                    mine.append(part)
                elif part in ("tree", "legacy"):
                    heir.found = replace(heir.found, **{part: getattr(self.found, part)})
                elif part in self.found.plain:
                    heir.found.plain[part] = self.found.plain[part]
            return restore(self.found, tuple(mine)) if mine else []


_holds: list[Hold] = []  # that have not ended, in the order in which they were made


@contextlib.contextmanager
def preserved() -> Iterator[Flags]:
    """Context that puts every switch back on leaving, also after an exception.

    Raises FlagsError on leaving when the state could not be put back exactly (an exception already under way
    is kept, and a warning is given instead).
    """
    hold = Hold(("tree", "legacy", "plain"))
    failed = True
    try:
        yield hold.found
        failed = False
    finally:
        if left := hold.release():
            text = "precision flags not put back: " + "; ".join(map(str, left))
            if not failed:
                raise FlagsError(text)
            warnings.warn(text, stacklevel=3)


# ---------------------------------------------------------------- one launch
class _Launches:
    """Launches under way that rely on the switches; all of them want the same."""

    def __init__(self) -> None:
        self.count = 0
        self.wanted: Any = None
        self.found: str | None = None  # fp32 precision of CUDA's products where it is held at another one
        self.undo = contextlib.ExitStack()


_launches = _Launches()
_IDLE = threading.Condition(_LOCK)
_own = threading.local()  # .launches: how many this thread is in


def _forked() -> None:
    """A child process has one thread: launches of others are over there, and what they held is put back."""
    global _LOCK, _IDLE, _launches
    former, own = _launches, getattr(_own, "launches", 0)
    _LOCK = threading.RLock()
    _IDLE, _launches = threading.Condition(_LOCK), _Launches()
    if own:
        _launches, former.count = former, own
    else:
        former.undo.close()


os.register_at_fork(after_in_child=_forked)


@contextlib.contextmanager
def _exclusive() -> Iterator[None]:
    """The lock, while no other thread is in a launch."""
    with _LOCK:
        while _launches.count > getattr(_own, "launches", 0):
            _IDLE.wait()
        yield


@contextlib.contextmanager
def pinned(
    fp32_precision: str, device_type: str = "cpu", plain: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """For one launch: float32 products on ``device_type`` in this precision, and these values of `set_flag`.

    Launches that want the same run side by side; others wait for each other. The switches are the process's,
    so work that other threads launch meanwhile, outside of this package, sees them too. Switches that this
    PyTorch does not have are left out. A CPU has 'ieee' alone.
    """
    wanted = (fp32_precision, device_type, plain)
    with _LOCK:
        while _launches.count and _launches.wanted != wanted:
            _IDLE.wait()
        if not _launches.count:
            with contextlib.ExitStack() as stack:
                _change(fp32_precision, device_type, plain or {}, stack)
                _launches.undo, _launches.wanted = stack.pop_all(), wanted
        _launches.count += 1
    _own.launches = getattr(_own, "launches", 0) + 1
    try:
        yield
    finally:
        _own.launches -= 1
        with _LOCK:
            _launches.count -= 1
            if not _launches.count:
                try:
                    _launches.undo.close()
                finally:
                    _launches.found = None
                    _IDLE.notify_all()


def _change(precision: str, device_type: str, plain: Mapping[str, Any], undo: contextlib.ExitStack) -> None:
    """Sets what is not as wanted; ``undo`` gets what puts it back."""
    for name, value in plain.items():
        now = get_flag(name)
        if isinstance(now, list):
            value = [value, *now[1:]]
        if now is not None and now != value:
            put = _PLAIN[name][1]
            undo.callback(put, now)
            put(value)
    if device_type == "cuda":
        if any(effective_fp32_precision(op) != precision for op in ("matmul", "conv")):
            undo.callback(restore, snapshot(), ("tree", "legacy"))
            _launches.found = effective_fp32_precision("matmul")
            set_tf32(precision == "tf32")
    elif not HAS_TREE:
        if torch.get_float32_matmul_precision() != "highest":
            undo.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
    elif off := [op for op in ("matmul", "conv") if effective_fp32_precision(op, device_type) != "ieee"]:
        tree = _stored_tree()
        for op in off:
            undo.callback(_set, "mkldnn", op, tree[f"mkldnn.{op}"])
            _set("mkldnn", op, "ieee")


# ---------------------------------------------------------------- TF32
def effective_fp32_precision(op: str, device_type: str = "cuda") -> str:
    """What float32 ``op`` ('matmul', 'conv', 'rnn') may run in now.

    'ieee' or 'tf32' on CUDA, 'ieee', 'tf32' or 'bf16' on a CPU, which does so where it has the instructions.
    """
    if op not in _OPS:
        raise ValueError(f"op is 'matmul', 'conv' or 'rnn', not {op!r}")
    if device_type == "cpu":
        if HAS_TREE:
            found = _get("mkldnn", op)
        else:
            found = {"medium": "bf16"}.get(torch.get_float32_matmul_precision(), "ieee")
        return found if found in ("tf32", "bf16") else "ieee"
    if HAS_TREE:
        return "tf32" if _get("cuda", op) == "tf32" else "ieee"
    allowed = _C._get_cublas_allow_tf32() if op == "matmul" else _C._get_cudnn_allow_tf32()
    return "tf32" if allowed else "ieee"


def process_fp32_precision() -> str:
    """What the process says of float32 products on CUDA, whatever a launch holds meanwhile (`pinned`)."""
    with _LOCK:
        return _launches.found or effective_fp32_precision("matmul")


def tf32_allowed() -> bool:
    """The global TF32 setting: whether float32 matrix products on CUDA may use TF32 (off unless set)."""
    return process_fp32_precision() == "tf32"


def refuse_fp64(model: Any, what: str) -> None:
    """Raises TypeError when ``model`` (a module or an iterable of tensors) holds float64 tensors.

    TF32 and the 16-bit policies do nothing to float64 arithmetic, so a request for them there is a mistake.
    """
    if isinstance(model, torch.nn.Module):
        named: Any = [*model.named_parameters(), *model.named_buffers()]
    else:
        named = [(f"[{i}]", t) for i, t in enumerate(model)]
    doubles = [name for name, t in named if t.dtype in (torch.float64, torch.complex128)]
    if doubles:
        shown = ", ".join(doubles[:3]) + (f" and {len(doubles) - 3} more" if len(doubles) > 3 else "")
        raise TypeError(f"{what} has no effect on a float64 model; these are float64: {shown}")


def set_tf32(on: bool, model: torch.nn.Module | None = None) -> None:
    """Allows or forbids TF32 for float32 matrix products, convolutions and RNNs on CUDA.

    Args:
        on: True allows TF32 in all three, False makes all three IEEE float32.
        model: refused with TypeError when it holds float64 tensors.

    Raises FlagsError when the three do not read as asked afterwards. Nodes in the unwritable 'default' state
    are steered through ``cuda.all``; until it is put back, reading ``torch.backends.cudnn.allow_tf32`` raises
    PyTorch's own message about mixed settings when the two disagree.
    """
    if model is not None:
        refuse_fp64(model, "TF32")
    with _exclusive():
        if not HAS_TREE:
            _C._set_cublas_allow_tf32(on)
            _C._set_cudnn_allow_tf32(on)
        else:
            want = "tf32" if on else "ieee"
            readable, _ = _reads(torch.get_float32_matmul_precision)
            _C._set_cublas_allow_tf32(on)
            if readable and not _reads(torch.get_float32_matmul_precision)[0]:
                # 'high' and 'medium' set the CPU's half too: both halves of that old setting move together.
                torch.set_float32_matmul_precision("high" if on else "highest")
            _set("cuda", "matmul", want)
            tree = _stored_tree()
            own = [op for op in ("conv", "rnn") if tree[f"cuda.{op}"] != "default"]
            if len(own) == 2:
                _C._set_cudnn_allow_tf32(on)
            elif any(effective_fp32_precision(op) != want for op in ("conv", "rnn") if op not in own):
                _set("cuda", "all", want)
            for op in own:
                _set("cuda", op, want)
        wrong = [op for op in _OPS if effective_fp32_precision(op) != ("tf32" if on else "ieee")]
        if wrong:
            raise FlagsError(f"TF32 {'on' if on else 'off'} did not take for {', '.join(wrong)}")


def set_cpu_fp32(tf32: bool) -> None:
    """Makes float32 products on the CPU IEEE float32, or at most TF32, where the process allows less.

    Before torch 2.9 that is `torch.set_float32_matmul_precision`, which is CUDA's, too.
    """
    with _exclusive():
        allowed = ("ieee", "tf32") if tf32 else ("ieee",)
        low = [op for op in _OPS if effective_fp32_precision(op, "cpu") not in allowed]
        if low and not HAS_TREE:
            torch.set_float32_matmul_precision("high" if tf32 else "highest")
        elif low:
            for op in low:
                _set("mkldnn", op, "ieee")
