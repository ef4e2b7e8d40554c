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
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

__all__ = [
    "Difference",
    "Flags",
    "FlagsError",
    "effective_fp32_precision",
    "fp32_behaviour",
    "get_flag",
    "preserved",
    "refuse_fp64",
    "restore",
    "set_flag",
    "set_tf32",
    "snapshot",
    "tf32_allowed",
]

_C: Any = torch._C
_LOCK = threading.RLock()

# Ancestors before children: the order in which nodes are read and written.
TREE_NODES: tuple[tuple[str, str], ...] = (
    ("generic", "all"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
)

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
        """Rebuilds what `to_json` wrote. Raises ValueError for a missing or an unknown part."""
        if not isinstance(data, dict) or set(data) != {"tree", "legacy", "plain"}:
            raise ValueError("a flags record has exactly the parts 'tree', 'legacy' and 'plain'")
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


# ---------------------------------------------------------------- independent switches
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

        def read() -> list[bool]:
            value = get()
            return list(value) if isinstance(value, (tuple, list)) else [value]

        return read, lambda value: put(*value)

    table = {
        "cudnn.enabled": pair("_get_cudnn_enabled", "_set_cudnn_enabled"),
        "cudnn.benchmark": pair("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
        "cudnn.deterministic": pair("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
        "cudnn.depthwise_kernel": pair("_get_cudnn_depthwise_kernel", "_set_cudnn_depthwise_kernel"),
        "cuda.matmul.allow_fp16_reduced_precision_reduction": several(
            "_get_cublas_allow_fp16_reduced_precision_reduction",
            "_set_cublas_allow_fp16_reduced_precision_reduction",
        ),
        "cuda.matmul.allow_bf16_reduced_precision_reduction": several(
            "_get_cublas_allow_bf16_reduced_precision_reduction",
            "_set_cublas_allow_bf16_reduced_precision_reduction",
        ),
        "cuda.matmul.allow_fp16_accumulation": pair(
            "_get_cublas_allow_fp16_accumulation", "_set_cublas_allow_fp16_accumulation"
        ),
        "cpu.allow_fp16_reduced_precision_reduction": pair(
            "_get_cpu_allow_fp16_reduced_precision_reduction",
            "_set_cpu_allow_fp16_reduced_precision_reduction",
        ),
        "sdp.flash": pair("_get_flash_sdp_enabled", "_set_sdp_use_flash"),
        "sdp.mem_efficient": pair("_get_mem_efficient_sdp_enabled", "_set_sdp_use_mem_efficient"),
        "sdp.math": pair("_get_math_sdp_enabled", "_set_sdp_use_math"),
        "sdp.cudnn": pair("_get_cudnn_sdp_enabled", "_set_sdp_use_cudnn"),
        "sdp.math_allow_fp16_bf16_reduction": pair(
            "_get_math_sdp_allow_fp16_bf16_reduction", "_set_math_sdp_allow_fp16_bf16_reduction"
        ),
        "mkldnn.enabled": pair("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        "mkldnn.deterministic": pair("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        "deterministic_algorithms": (
            lambda: [
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ],
            lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
        ),
    }
    if _C._has_cudnn:
        table["cudnn.benchmark_limit"] = pair(
            "_cuda_get_cudnn_benchmark_limit", "_cuda_set_cudnn_benchmark_limit"
        )
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
    with _LOCK:
        put(value)
        if get() != value:
            raise FlagsError(f"{name} was set to {value!r} but reads {get()!r}")


# ---------------------------------------------------------------- the fp32_precision tree
def _get(backend: str, op: str) -> str:
    value: str = _C._get_fp32_precision_getter(backend, op)
    return value


def _set(backend: str, op: str, value: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # a node that exists but has no hardware behind it warns on every write
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
                for op in ("matmul", "conv", "rnn"):
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
            ok, _ = _reads(get_cudnn)
            cudnn = (
                ok  # with the whole branch at TF32 the getter objects exactly when the old variable is False
            )
        finally:
            _set("cuda", "all", tree["cuda.all"])
            for leaf in leaves:
                _set(*leaf, tree[".".join(leaf)])
    return {"float32_matmul_precision": matmul, "cudnn_allow_tf32": cudnn}


def snapshot() -> Flags:
    """The stored state of every precision switch of this process. Changes nothing that outlasts the call."""
    with _LOCK:
        tree = _stored_tree()
        legacy = _stored_legacy(tree)
        return Flags(tree=tree, legacy=legacy, plain={name: get() for name, (get, _) in _PLAIN.items()})


def restore(flags: Flags, parts: tuple[str, ...] = ("tree", "legacy", "plain")) -> list[Difference]:
    """Puts back the state in ``flags`` and reads everything back.

    Args:
        flags: what `snapshot` returned.
        parts: which parts of it; the others are left as they are now and not compared.

    Returns what could not be put back: empty when the state is exactly as it was. It never raises for a
    difference, so that a caller in a ``finally`` block can decide.
    """
    with _LOCK:
        now = snapshot()
        flags = Flags(**{part: getattr(flags if part in parts else now, part) for part in now.to_json()})
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


@contextlib.contextmanager
def preserved() -> Iterator[Flags]:
    """Context that puts every switch back on leaving, also after an exception.

    Raises FlagsError on leaving when the state could not be put back exactly (an exception already under way
    is kept, and a warning is given instead).
    """
    before = snapshot()
    try:
        yield before
    except BaseException:
        left = restore(before)
        if left:
            warnings.warn("precision flags not put back: " + "; ".join(map(str, left)), stacklevel=3)
        raise
    left = restore(before)
    if left:
        raise FlagsError("precision flags not put back: " + "; ".join(map(str, left)))


# ---------------------------------------------------------------- TF32
def effective_fp32_precision(op: str) -> str:
    """What float32 ``op`` ('matmul', 'conv', 'rnn') on CUDA runs in now: 'ieee' or 'tf32'."""
    if op not in ("matmul", "conv", "rnn"):
        raise ValueError(f"op is 'matmul', 'conv' or 'rnn', not {op!r}")
    if HAS_TREE:
        return "tf32" if _get("cuda", op) == "tf32" else "ieee"
    allowed = _C._get_cublas_allow_tf32() if op == "matmul" else _C._get_cudnn_allow_tf32()
    return "tf32" if allowed else "ieee"


def tf32_allowed() -> bool:
    """The global TF32 setting: whether float32 matrix products on CUDA may use TF32 (off unless set)."""
    return effective_fp32_precision("matmul") == "tf32"


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
    with _LOCK:
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
        wrong = [
            op
            for op in ("matmul", "conv", "rnn")
            if effective_fp32_precision(op) != ("tf32" if on else "ieee")
        ]
        if wrong:
            raise FlagsError(f"TF32 {'on' if on else 'off'} did not take for {', '.join(wrong)}")


def fp32_behaviour(device: str | torch.device, n: int = 64) -> dict[str, float]:
    """What float32 arithmetic does on ``device``: max eta of a matrix product and a convolution.

    eta = |y - y64| / sum|a||b| over all cells, reduction length ``n``. IEEE float32 stays below 1e-6, TF32 is
    above 1e-5 (operands with 10 mantissa bits). Keys 'matmul' and 'conv'.
    """
    gen = torch.Generator().manual_seed(20)
    a = torch.randn(256, n, generator=gen, dtype=torch.float32, device="cpu").to(device)
    b = torch.randn(n, 256, generator=gen, dtype=torch.float32, device="cpu").to(device)
    y64, mag = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    eta = {"matmul": float(((a @ b).double() - y64).abs().div(mag).max())}
    image, kernel = (
        a.reshape(1, 256, n // 8, 8).transpose(0, 1).contiguous(),
        b.t().reshape(256, 1, n // 8, 8),
    )
    got = torch.nn.functional.conv2d(image, kernel.contiguous())
    eta["conv"] = float((got.double().reshape(256, 256) - y64).abs().div(mag).max())
    return eta
