"""What callers hand over as integers, triples and tensors. Imports nothing of the package."""

from __future__ import annotations

import math
import numbers
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch

Triple = tuple[int, int, int]


def integer(value: Any) -> int | None:
    """`value` as an int: an int, a numpy integer, an integer tensor of no dimension, what else has __index__.
    None for all others: floats that are whole, bools of any library."""
    if type(value) is int:
        return value
    if isinstance(value, (tuple, list)) or (isinstance(value, torch.Tensor) and value.dim()):
        return None  # before __index__ is asked for, whose TypeError the dynamo of torch 2.11 does not catch
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()  # of numpy or torch
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integers(value: Any, count: int) -> tuple[int, ...] | None:
    """`count` integers from one or from a sequence, array or tensor of as many; None for all others."""
    one = integer(value)
    if one is not None:
        return (one,) * count
    values = _listed(value)
    if len(values) > 1 and all(isinstance(v, torch.Tensor) and v.is_cuda and not v.dim() for v in values):
        values = torch.stack(tuple(values)).tolist()  # one wait for the GPU, not one each
    found = [integer(v) for v in values]
    made = tuple(v for v in found if v is not None)
    return made if len(values) == len(made) == count else None


def positive(value: Any, name: str) -> int:
    """`value` as an int of 1 or more, else ValueError naming it."""
    made = integer(value)
    if made is None or made < 1:
        raise ValueError(f"{name} must be a positive int, got {value!r}")
    return made


def triple(value: Any, name: str, low: int, high: int) -> Triple:
    """One integer or three as three in low..high, else TypeError or ValueError naming it."""
    if type(value) is tuple and len(value) == 3:  # every call of a layer: nothing to convert
        x, y, z = value
        plain = type(x) is type(y) is type(z) is int
        if plain and low <= x <= high and low <= y <= high and low <= z <= high:
            return value
    elif type(value) is int and low <= value <= high:
        return value, value, value
    values = integers(value, 3)
    if values is None:
        raise TypeError(f"{name} must be an int or three of them, got {value!r}")
    if any(not low <= v <= high for v in values):
        raise ValueError(f"{name} must be in {low}..{high} on every axis, got {value!r}")
    return values[0], values[1], values[2]


def three_integers(value: Any, name: str) -> Triple:
    """Three integers, else TypeError naming them."""
    values = integers(value, 3) if integer(value) is None else None
    if values is None:
        raise TypeError(f"{name} must be three ints, got {value!r}")
    return values[0], values[1], values[2]


def positive_triple(value: Any, name: str) -> Triple:
    """One integer or three as three of 1 or more, else TypeError or ValueError naming it."""
    if type(value) is int and value > 0:
        return value, value, value
    values = three_integers(value if (one := integer(value)) is None else (one,) * 3, name)
    if min(values) < 1:
        raise ValueError(f"{name} must be positive on every axis, got {value!r}")
    return values


def planar(value: Any, name: str, z: int = 1) -> Triple:
    """One integer or two as three, with `z` last; TypeError naming `name` for anything else."""
    pair = integers(value, 2)
    if pair is None:
        raise TypeError(f"{name} must be an int or two of them, got {value!r}")
    return pair[0], pair[1], z


def real_numbers(value: Any, count: int) -> tuple[float, ...] | None:
    """`count` finite floats from a sequence, array or tensor of as many; None for all others."""
    values = _listed(value)
    if len(values) != count or not all(_is_real(v) and math.isfinite(v) for v in values):
        return None
    return tuple(float(v) for v in values)


def _is_real(value: Any) -> bool:
    if type(value) in (float, int):
        return True
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and value.dtype != torch.bool and not value.is_complex()
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _listed(value: Any) -> Sequence[Any]:
    """The elements of a sequence, or of an array or tensor of one dimension; nothing for all others."""
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        value = value.tolist()
    return value if isinstance(value, Sequence) and not isinstance(value, str | bytes) else ()


def as_tensor(value: Any, name: str) -> Any:
    """`value`, a numpy array as the tensor that shares its memory; TypeError naming it if none can."""
    if isinstance(value, torch.Tensor):
        return value
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return value
    if not value.flags.writeable or any(stride < 0 for stride in value.strides):
        value = value.copy()  # torch has no tensors of either kind
    try:
        return torch.from_numpy(value)
    except TypeError as error:
        raise TypeError(f"{name} is a numpy array that no tensor can be made of: {error}") from None


#: The dtypes that are computed in, and their names.
DTYPE_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}
*_first, _last = DTYPE_NAMES.values()
#: The same for messages: 'fp16, bf16, fp32 or fp64'.
ANY_DTYPE = f"{', '.join(_first)} or {_last}"


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums of values of `dtype` are kept in: fp64 of fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
