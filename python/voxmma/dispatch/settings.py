"""Settings of the process: what the environment says, what was set at run time, who decides the accumulator.

Every setting has three states at each level: a value, another value, or not set (None). A call asks, in this
order, its own argument, the run-time value, the environment variable (read once, at import), an automatic
rule where there is one, and the default. The first level that has a value decides; an explicit False is a
value like any other.

Run-time values are process-wide, as torch's own flags are: the `set_` functions change them, and `override`
does for the length of a block. Blocks may end in any order and in any thread: what holds is what was set, and
on top of it the values of the blocks that are open, in the order in which they began.

Both levels are one immutable `Settings` object that is replaced as a whole, so a call on any thread sees a
consistent state. Everything a call reads here is plain Python that torch.compile guards on: changing a
setting recompiles, it does not go unseen.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from voxmma import torchflags
from voxmma._dynamo import constant_result
from voxmma._extension import _C
from voxmma._types import integer

#: What may decide the accumulator of a call, strongest first.
LEVELS = ("module", "runtime", "environment", "inference_mode", "default")

FP32_PRECISIONS = ("ieee", "tf32")
ALGO_MODE_WORDS = ("auto", "trimmed", "all")
OPS = ("fwd", "dgrad", "wgrad")

#: One word of ALGO_MODE_WORDS, or the names of the tiles that may run.
AlgoMode = tuple[str, ...]


@dataclass(frozen=True)
class Settings:
    """The values of one level (run time or environment); None means not set at this level."""

    fp16_accum: bool | None = None
    fp32_precision: str | None = None
    fp16_rescale: bool | None = None
    deterministic: bool | None = None
    fwd_algo_mode: AlgoMode | None = None
    dgrad_algo_mode: AlgoMode | None = None
    wgrad_algo_mode: AlgoMode | None = None
    pcoff_f16acc_small_ch_ceil: int | None = None
    compute_capability: tuple[int, int] | None = None
    shared_memory: int | None = None
    cache_dir: str | None = None


# ---- checking and parsing ----------------------------------------------------------------------------------


def check_flag(value: object, name: str) -> bool | None:
    """`value` if it is True, False or None; TypeError naming the argument `name` otherwise."""
    if value is None or value is True or value is False:
        return value
    raise TypeError(f"{name} must be True, False or None, got {value!r}")


def _parse_bool(text: str) -> bool:
    word = text.strip().lower()
    if word in ("true", "1"):
        return True
    if word in ("false", "0"):
        return False
    raise ValueError("expected true, false, 1 or 0")


def _parse_fp32_precision(text: str) -> str:
    word = text.strip().lower()
    if word not in FP32_PRECISIONS:
        raise ValueError(f"expected one of {', '.join(FP32_PRECISIONS)}")
    return word


def _parse_ceiling(text: str) -> int:
    if not re.fullmatch(r"\d+", text.strip()):
        raise ValueError("expected a number of channels, 0 or more")
    return int(text)


def _parse_capability(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)\.(\d)", text.strip())
    if match is None or int(match[1]) < 8:
        raise ValueError("expected a compute capability of 8.0 or newer, such as 8.6")
    return int(match[1]), int(match[2])


def _parse_shared_memory(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text.strip()):
        raise ValueError("expected a number of bytes, 1 or more, such as 101376")
    return int(text)


def _parse_cache_dir(text: str) -> str:
    if not text.strip():
        raise ValueError("expected a directory")
    return text


def parse_algo_mode(text: str, op: str) -> AlgoMode:
    """Reads `auto`, `trimmed`, `all`, a tile name or `[name,name]` for `op` ('fwd', 'dgrad' or 'wgrad').

    Names are checked against the kernels in this build. A build without CUDA has none, so there a name only
    has to look like one; it has no effect on the CPU. Raises ValueError saying what was expected.
    """
    word = text.strip()
    if word.lower() in ALGO_MODE_WORDS:
        return (word.lower(),)
    inner = word[1:-1] if word.startswith("[") and word.endswith("]") else word
    names = tuple(name.strip() for name in inner.split(","))
    kind = "wgrad" if op == "wgrad" else "fprop"
    known = [row["name"] for row in _C.kernel_configs() if row["op"] == kind] if _C.HAS_CUDA else None
    for name in names:
        if not (name in known if known is not None else re.fullmatch(r"(sm\d+|simt)_\w+", name)):
            choices = ", ".join(known) if known else "such as sm80_f16_256x64x64_acc32"
            expected = "expected auto, trimmed, all, a tile name or [name,name]"
            raise ValueError(f"{expected}; {name!r} is no {op} tile ({choices})")
    return names


_ENVIRONMENT = {
    "fp16_accum": ("VOXMMA_USE_FP16_ACCUM", _parse_bool),
    "fp32_precision": ("VOXMMA_FP32_PRECISION", _parse_fp32_precision),
    "fp16_rescale": ("VOXMMA_FP16_RESCALE", _parse_bool),
    "fwd_algo_mode": ("VOXMMA_FWD_ALGO_MODE", lambda text: parse_algo_mode(text, "fwd")),
    "dgrad_algo_mode": ("VOXMMA_DGRAD_ALGO_MODE", lambda text: parse_algo_mode(text, "dgrad")),
    "wgrad_algo_mode": ("VOXMMA_WGRAD_ALGO_MODE", lambda text: parse_algo_mode(text, "wgrad")),
    "pcoff_f16acc_small_ch_ceil": ("VOXMMA_PCOFF_F16ACC_SMALL_CH_CEIL", _parse_ceiling),
    "compute_capability": ("VOXMMA_COMPUTE_CAPABILITY", _parse_capability),
    "shared_memory": ("VOXMMA_SHARED_MEMORY", _parse_shared_memory),
    "cache_dir": ("VOXMMA_CACHE_DIR", _parse_cache_dir),
}


def read_environment(environ: Mapping[str, str]) -> Settings:
    """The environment level. Raises ValueError naming the variable and its value when one cannot be read."""
    values: dict[str, Any] = {}
    for field, (variable, parse) in _ENVIRONMENT.items():
        if variable in environ:
            try:
                values[field] = parse(environ[variable])
            except ValueError as error:
                raise ValueError(f"environment variable {variable}={environ[variable]!r}: {error}") from None
    return Settings(**values)


_environment = read_environment(os.environ)
_base = Settings()  # what was set outside of scopes
_scopes: list[dict[str, Any]] = []  # values of the scopes that are open, in the order in which they began
_runtime = _base  # both together
_lock = threading.RLock()  # a scope may be ended by the garbage collector, wherever that runs


def _effective(field: str) -> Any:
    value = getattr(_runtime, field)
    return value if value is not None else getattr(_environment, field)


# ---- saving, restoring, setting ----------------------------------------------------------------------------


def state() -> tuple[Settings, Settings]:
    """The run-time and the environment level; while both are the same objects, no setting has changed."""
    return _runtime, _environment


def snapshot() -> Settings:
    """The run-time level as it is now; `restore` brings back exactly this state (unset stays unset)."""
    return _runtime


def restore(saved: Settings) -> None:
    """Puts back what `snapshot` returned; where a scope is open, its values, until it ends."""
    global _base
    if not isinstance(saved, Settings):
        raise TypeError(f"saved must come from snapshot(), got {type(saved).__name__}")
    with _lock:
        if not _scopes:
            _base = saved
            _compose()
            return
        _assign({f.name: getattr(saved, f.name) for f in fields(Settings)})


def _compose() -> None:
    """The run-time level anew; the very object of `_base` where no scope is open. Under the lock."""
    global _runtime
    values = {name: value for scope in _scopes for name, value in scope.items()}
    _runtime = replace(_base, **values) if values else _base


def _assign(values: Mapping[str, Any]) -> None:
    """Values where they take effect: in the last scope that has them, else in `_base`. Under the lock."""
    global _base
    for name, value in values.items():
        owner = next((scope for scope in reversed(_scopes) if name in scope), None)
        if owner is not None:
            owner[name] = value
        elif getattr(_base, name) is not value:
            _base = replace(_base, **{name: value})
    _compose()


def _checked(values: Mapping[str, Any]) -> dict[str, Any]:
    """Run-time values as `Settings` holds them; TypeError or ValueError naming the first that is none."""
    checked: dict[str, Any] = {}
    for name, value in values.items():
        if value is None:
            checked[name] = None
        elif name in ("fp16_accum", "fp16_rescale", "deterministic"):
            checked[name] = check_flag(value, name)
        elif name == "fp32_precision":
            if value not in FP32_PRECISIONS:
                raise ValueError(
                    f"fp32_precision must be one of {', '.join(FP32_PRECISIONS)} or None, got {value!r}"
                )
            checked[name] = value
        elif name.endswith("_algo_mode"):
            parts = (
                (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else ()
            )
            if not (parts and all(isinstance(part, str) for part in parts)):
                raise TypeError(f"{name} must be a word, a tile name or several names, got {value!r}")
            text = ",".join(parts)
            try:
                checked[name] = parse_algo_mode(text, name.removesuffix("_algo_mode"))
            except ValueError as error:
                raise ValueError(f"{name}={value!r}: {error}") from None
        elif name == "pcoff_f16acc_small_ch_ceil":
            channels = integer(value)
            if channels is None or channels < 0:
                raise ValueError(f"{name} must be a number of channels, 0 or more, got {value!r}")
            checked[name] = channels
        elif name == "compute_capability":
            ok = isinstance(value, tuple) and len(value) == 2 and all(type(v) is int for v in value)
            if not ok or value < (8, 0) or value[1] not in range(10):
                raise ValueError(f"{name} must be a tuple such as (8, 6), (8, 0) or newer, got {value!r}")
            checked[name] = value
        elif name == "shared_memory":
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be a number of bytes, 1 or more, got {value!r}")
            checked[name] = value
        elif name == "cache_dir":
            folder = os.fspath(value) if isinstance(value, str | os.PathLike) else None
            if not isinstance(folder, str):
                raise TypeError(f"{name} must be a path, got {value!r}")
            if not folder.strip() or "\0" in folder:
                raise ValueError(f"{name} must be a directory, got {value!r}")
            checked[name] = folder
        else:
            known = ", ".join(field.name for field in fields(Settings))
            raise TypeError(f"unknown setting {name!r}; settings are {known}")
    return checked


def _set(**values: Any) -> None:
    """Sets run-time values after checking them."""
    checked = _checked(values)
    with _lock:
        _assign(checked)


def begin(**values: Any) -> Callable[[], None]:
    """Begins what `override` does; the function returned ends it (once; later calls of it do nothing)."""
    scope = _checked(values)
    with _lock:
        _scopes.append(scope)
        _compose()

    def end() -> None:
        with _lock:
            _scopes[:] = [other for other in _scopes if other is not scope]
            _compose()

    return end


@contextmanager
def override(**values: Any) -> Iterator[None]:
    """Run-time settings for the length of a `with` block, by the names of `Settings`; None means unset.

    Example: `with voxmma.settings.override(fp16_accum=True, fwd_algo_mode="all"): ...`. Process-wide while it
    lasts: calls of every thread see it. Where blocks overlap, the one that began last decides; on the way
    out, also after an exception, a block takes away its own values and nothing else. A `set_` function called
    inside takes effect at once, for what a block names until that block ends.
    """
    end = begin(**values)
    try:
        yield
    finally:
        end()


# ---- fp16 accumulation -------------------------------------------------------------------------------------


def set_fp16_accum(value: bool | None) -> None:
    """Asks for fp16 accumulators (True), forbids them (False), or leaves it to the levels below (None).

    Layers and calls with their own `use_fp16_accum` are not affected. Raises TypeError for anything else.
    """
    _set(fp16_accum=check_flag(value, "value"))


def get_fp16_accum() -> bool:
    """What the run-time setting and the environment say together; False when neither is set.

    The automatic rule for `torch.inference_mode()` is per call and not part of this answer: see
    resolve_fp16_accum.
    """
    return bool(_effective("fp16_accum"))


@constant_result
def _inference_mode() -> bool:
    return torch.is_inference_mode_enabled()


def resolve_fp16_accum(use_fp16_accum: bool | None, dtype: torch.dtype) -> tuple[bool, str]:
    """Which accumulator a call asks for, and which of the five levels decided.

    Args:
        use_fp16_accum: the flag of the layer or call; None = not set.
        dtype: the effective compute dtype of the call (under autocast, the autocast dtype).

    Returns:
        (True for an fp16 accumulator, level) with a level of `LEVELS`. This is the request; whether an fp16
        accumulator is legal for `dtype` and this device is the tile selector's matter, and what ran is in
        explain().

    Under torch.compile the 'inference_mode' level is never seen: torch leaves inference mode while it traces
    and keeps no trace of it that could be read or guarded on. As that level is a permission and not an order,
    compiled calls without a flag accumulate in fp32, in or out of inference mode; orders are seen and guarded
    on.
    """
    if check_flag(use_fp16_accum, "use_fp16_accum") is not None:
        return bool(use_fp16_accum), "module"
    if _runtime.fp16_accum is not None:
        return _runtime.fp16_accum, "runtime"
    if _environment.fp16_accum is not None:
        return _environment.fp16_accum, "environment"
    if dtype in (torch.float16, torch.bfloat16) and _inference_mode():
        return True, "inference_mode"
    return False, "default"


# ---- the other settings ------------------------------------------------------------------------------------


def set_fp16_rescale(value: bool | None) -> None:
    """Whether calls that compute in fp16 rescale their operands by powers of two, so that no sum overflows.

    Applies to forward and gradients, with either accumulator, and costs a pass over each operand; see
    voxmma.verify.overflow. None leaves it to VOXMMA_FP16_RESCALE; the default is False. Raises TypeError for
    anything else.
    """
    _set(fp16_rescale=check_flag(value, "value"))


def get_fp16_rescale() -> bool:
    """True where set_fp16_rescale or VOXMMA_FP16_RESCALE asks for it."""
    return bool(_effective("fp16_rescale"))


def set_fp32_precision(value: str | None) -> None:
    """How fp32 inputs are multiplied: 'ieee', 'tf32', or None to follow the environment and then torch.

    Raises ValueError for anything else.
    """
    _set(fp32_precision=value)


@constant_result
def _torch_fp32_precision() -> str:  # torch.compile guards on torch's TF32 state by itself
    return torchflags.process_fp32_precision()


def get_fp32_precision() -> str:
    """'ieee' or 'tf32': run time, then VOXMMA_FP32_PRECISION, then torch.backends.cuda.matmul."""
    return str(_effective("fp32_precision") or _torch_fp32_precision())


def set_deterministic(value: bool | None) -> None:
    """Allows (False) kernels whose rounding depends on the order of threads; True and the default do not.

    `torch.use_deterministic_algorithms(True)` forbids them whatever this says. No kernel of this version has
    such an order, so results are bitwise reproducible in every state. Raises TypeError for what is not True,
    False or None.
    """
    _set(deterministic=check_flag(value, "value"))


def get_deterministic() -> bool:
    """True unless set_deterministic(False) was called and torch.use_deterministic_algorithms is off."""
    return torch.are_deterministic_algorithms_enabled() or _runtime.deterministic is not False


def get_algo_mode(op: str) -> AlgoMode:
    """The tiles that `op` ('fwd', 'dgrad', 'wgrad') may take: a word of ALGO_MODE_WORDS or tile names.

    The words differ in what `voxmma tune` measures: under 'trimmed' the few tiles that the heuristic ranks
    first, under 'auto' all but the hopeless, under 'all' every legal one. Under each of them a call takes the
    tile that was measured fastest, else the heuristic's; under 'all' fp16-accumulator tiles may run without
    the flag, where a validation record allows them.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}")
    return _effective(f"{op}_algo_mode") or ("auto",)


def get_pcoff_f16acc_small_ch_ceil() -> int:
    """Channel count up to which fp16-accumulator tiles may enter a pool without the flag; 0 = never."""
    return _effective("pcoff_f16acc_small_ch_ceil") or 0


#: A smaller card to behave like: compute capability, bytes of shared memory a block; None: the device's own.
Limits = tuple[tuple[int, int] | None, int | None]
NO_LIMITS: Limits = (None, None)


def get_limits() -> Limits:
    """What VOXMMA_COMPUTE_CAPABILITY and VOXMMA_SHARED_MEMORY, or the run time, allow the tiles of a device.

    Checked against the device where tiles are chosen (voxmma.dispatch.selection.card).
    """
    chosen, fallback = _runtime, _environment
    return (
        chosen.compute_capability or fallback.compute_capability,
        chosen.shared_memory or fallback.shared_memory,
    )


#: What the settings say about the choice of tiles, beside the accumulator request: pools of forward, input
#: gradient and weight gradient, small-channel ceiling, fp32 precision, limits.
Pools = tuple[AlgoMode, AlgoMode, AlgoMode, int, str, Limits]
DEFAULT_POOLS: Pools = (("auto",), ("auto",), ("auto",), 0, "ieee", NO_LIMITS)


def get_pools(dtype: torch.dtype = torch.float32) -> Pools:
    """The settings of this moment, as voxmma.dispatch.selection.plan_call takes them for a call that computes
    in `dtype`.

    Only fp32 calls ask for the fp32 precision; the others get 'ieee'.
    """
    chosen, fallback = _runtime, _environment
    return (
        chosen.fwd_algo_mode or fallback.fwd_algo_mode or ("auto",),
        chosen.dgrad_algo_mode or fallback.dgrad_algo_mode or ("auto",),
        chosen.wgrad_algo_mode or fallback.wgrad_algo_mode or ("auto",),
        get_pcoff_f16acc_small_ch_ceil(),
        get_fp32_precision() if dtype == torch.float32 else "ieee",
        get_limits(),
    )


def get_cache_dir() -> Path:
    """Directory of the tuning cache: VOXMMA_CACHE_DIR or ~/.cache/voxmma. It need not exist.

    Where there is no home directory the ~ stays, and nothing is kept (`homeless`).
    """
    return _expanded(_effective("cache_dir") or "~/.cache/voxmma")


@functools.lru_cache(maxsize=64)
def _expanded(folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # HOME is not set, and the system does not know the user
        return Path(folder)


def homeless(path: Path) -> str:
    """Why a path in the cache's directory cannot be written, '' where it has a home."""
    return "there is no home directory: set VOXMMA_CACHE_DIR" if path.parts[0].startswith("~") else ""
