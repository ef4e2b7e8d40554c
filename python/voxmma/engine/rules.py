"""Which operators may be given rows of which only some exist: those that keep rows apart.

A row of a result may depend on the same row of the operands and on nothing else of them, since what is behind
the rows means nothing. Dimensions are known to be rows by their size: the recorder gives every set a capacity
that nothing else has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from voxmma.engine.errors import EngineError

Rows = Callable[[Any], list[int]]
"""the dimensions of a tensor that are rows"""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Not tagged as pointwise by some torch, and so nevertheless; creation included.
_POINTWISE = _names(
    "celu elu gelu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid log_sigmoid_forward mish "
    "relu6 selu silu softplus softshrink threshold "
    "_to_copy alias clone contiguous copy copy_ detach detach_ empty_like fill fill_ full_like lift "
    "lift_fresh masked_fill masked_fill_ new_empty new_full new_ones new_zeros ones_like positive "
    "prelu _prelu_kernel resolve_conj resolve_neg to type_as zero_ zeros_like"
)
_VIEWS = _names("_reshape_alias _unsafe_view expand flatten reshape unflatten unsqueeze view view_as")
#: Functions along one or several dimensions, which are not to be rows. Name: place of the argument, default.
_ALONG: dict[str, tuple[int, Any]] = {
    "_log_softmax": (1, None), "_softmax": (1, None), "all": (1, None), "amax": (1, ()), "amin": (1, ()),
    "any": (1, None), "argmax": (1, None), "argmin": (1, None), "argsort": (1, -1), "cat": (1, 0),
    "constant_pad_nd": (1, None), "count_nonzero": (1, None), "cummax": (1, None), "cumprod": (1, None),
    "cumsum": (1, None), "flip": (1, ()), "glu": (1, -1),
    "linalg_vector_norm": (2, None), "log_softmax": (1, None), "logsumexp": (1, ()), "max": (1, None),
    "mean": (1, None), "min": (1, None), "narrow": (1, None), "norm": (2, None), "prod": (1, None),
    "roll": (2, ()), "select": (1, None), "slice": (1, 0), "softmax": (1, None), "sort": (1, -1),
    "split": (2, 0), "split_with_sizes": (2, 0), "squeeze": (1, None), "stack": (1, 0), "std": (1, None),
    "sum": (1, None), "tensor_split": (2, 0), "topk": (2, -1), "unbind": (1, 0), "unsafe_split": (2, 0),
    "var": (1, None), "var_mean": (1, None),
}  # fmt: skip
_REORDER = frozenset(["movedim", "permute", "t", "transpose", "numpy_T", "swapaxes"])
_PRODUCTS = frozenset(["_addmm_activation", "addmm", "baddbmm", "bmm", "linear", "matmul", "mm", "mv"])
_NORMS = _names("cudnn_batch_norm miopen_batch_norm native_batch_norm")
_FIXED_NORMS = _names("_batch_norm_no_update _native_batch_norm_legit_no_training")
_OURS = _names(
    "conv conv_fused conv_rescaled neighbor_counts pool_max pool_pick pool_put pool_sum segment_argmax "
    "segment_sum sized_counts sized_dense sized_finite sized_index sized_lookup sized_maps sized_rows "
    "sized_sites sized_tree sized_voxels sized_weighted"
)
#: Functions that may be given the number of rows, as a size.
_SIZED = _VIEWS | _names(
    "arange conv conv_fused conv_rescaled empty full neighbor_counts new_empty new_full new_ones new_zeros "
    "ones pool_max pool_put pool_sum sized_sites sized_voxels slice zeros"
)
#: Instead of a bare name, where a user would not know what to look for.
_SAID = {
    "_local_scalar_dense": "reading a number on the host (.item(), bool(), int(), an if on a tensor)",
    "equal": "comparing tensors on the host (torch.equal, sums of voxels on different sets)",
    "nonzero": "a boolean mask or torch.nonzero",
    "masked_select": "a boolean mask",
}


def name_of(func: Any) -> str:
    """'aten.relu' as 'relu', of any overload."""
    return str(func._schema.name.split("::")[1])


def full_name(func: Any) -> str:
    """An operator for a message."""
    said = _SAID.get(name_of(func))
    name = func._schema.name.replace("::", ".")
    return f"{said} ({name})" if said else name


def refuse(func: Any, why: str) -> EngineError:
    return EngineError(f"an engine cannot take {full_name(func)}: {why}")


def check_host(func: Any, args: Sequence[Any]) -> None:
    """EngineError for an operator that the host waits for, of a result of unknown size, or of chance."""
    tags, name = func.tags, name_of(func)
    if torch.Tag.data_dependent_output in tags:
        raise refuse(func, "the host would wait for the device in every frame")
    if torch.Tag.nondeterministic_seeded in tags or name in ("rand_like", "dropout", "native_dropout"):
        raise refuse(func, "it is random (a layer in training mode? call model.eval())")
    if torch.Tag.dynamic_output_shape in tags:
        masks = name == "index" and any(
            isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1]
        )
        if name != "index" or masks:
            raise refuse(func, "the size of its result depends on values")


def takes_size(func: Any, name: str | int) -> bool:
    """Whether an argument, by its name or place, may be the number of rows: it is a size, and no value."""
    if name_of(func) not in _SIZED:
        return False
    arguments = func._schema.arguments
    kind = next(str(a.type) for i, a in enumerate(arguments) if name in (i, a.name))
    return "Int" in kind or "int" in kind or name_of(func) == "arange"


def check(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, rows: Rows, out_rows: Rows
) -> None:
    """EngineError unless rows stay apart in this call.

    `args` are complete but for trailing defaults, `out` is the result. `rows` is for operands, `out_rows` for
    results.
    """
    space, name = func._schema.name.split("::")
    given = [t for value in args for t in _tensors(value)] + [t for v in kwargs.values() for t in _tensors(v)]
    if not any(map(rows, given)):
        return
    if space == "voxmma" and name in _OURS:
        return
    if space == "voxmma":
        raise refuse(func, "it is not made for rows that may not exist")
    results = _tensors(out)
    lost = not results or not out_rows(results[0])
    x = args[0] if args else None
    if torch.Tag.pointwise in func.tags or name in _POINTWISE:
        return
    if name in _FIXED_NORMS:
        return
    if name in _NORMS:
        if args[5]:
            raise refuse(func, "it takes statistics of the rows (a norm in training mode? call model.eval())")
        return
    if name == "native_layer_norm":
        first = x.dim() - len(args[1])  # type: ignore[union-attr]
        if any(dim >= first for dim in rows(x)):
            raise refuse(func, "it takes statistics over the rows")
        return
    if name == "native_group_norm" or name == "group_norm":
        if rows(x) != [0]:
            raise refuse(func, "it takes statistics over the rows")
        return
    if name in _VIEWS:
        if lost or not _same_rows(x, results[0], rows, out_rows):
            raise refuse(func, "it mixes the rows with another dimension")
        return
    if name in _REORDER:
        return
    if name in _ALONG:
        _check_along(func, name, args, kwargs, rows)
        if lost:
            raise refuse(func, "it reduces over the rows")
        return
    if name in _PRODUCTS:
        _check_product(func, name, args, rows)
        if lost:
            raise refuse(func, "it sums over the rows")
        return
    if name in ("embedding", "gather", "index", "index_select"):
        return  # what is picked out of the rows: the index says which
    raise refuse(func, "it is not known to keep the rows apart")


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [t for v in value for t in _tensors(v)] if isinstance(value, list | tuple) else []


def _same_rows(x: Any, y: Tensor, rows: Rows, out_rows: Rows) -> bool:
    """Whether a view leaves the rows where they are among the elements."""

    def places(t: Tensor, dims: list[int]) -> list[tuple[int, int]]:
        return [(math.prod(t.shape[:dim]), t.shape[dim]) for dim in dims]

    before = y.shape[: max(y.dim() - x.dim(), 0)]  # expand() may repeat the whole
    kept = places(y, out_rows(y))
    return all(
        (math.prod(before) * first, size) in kept or (first, size) in kept
        for first, size in places(x, rows(x))
    )


def _check_along(func: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any], rows: Rows) -> None:
    place, default = _ALONG[name]
    dims = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", default))
    tensors = _tensors(args[0])
    if name == "constant_pad_nd":
        dims = [-1 - i for i in range(len(args[1]) // 2) if args[1][2 * i] or args[1][2 * i + 1]]
    if name == "squeeze" and dims is None:
        return  # sizes of 1 alone
    for t in tensors:
        count = t.dim() + (name == "stack")
        taken = (
            range(count)
            if dims is None or ((dims == [] or dims == ()) and name not in ("flip", "constant_pad_nd"))
            else [d % count for d in ([dims] if isinstance(dims, int) else dims)]
        )
        for dim in rows(t):
            at = dim + (name == "stack" and isinstance(dims, int) and dim >= dims % count)
            if at not in taken:
                continue
            if name == "slice":
                start, end, step = (list(args[2:5]) + [None] * 3)[:3]
                if not start and (end is None or end >= t.shape[dim]) and step in (None, 1):
                    continue
            if name == "stack":
                continue
            raise refuse(func, "it goes over the rows")


def _check_product(func: Any, name: str, args: Sequence[Any], rows: Rows) -> None:
    a, b = args[1:3] if name in ("addmm", "baddbmm", "_addmm_activation") else args[:2]
    last = a.dim() - 1
    contracted = b.dim() - 1 if name == "linear" else max(b.dim() - 2, 0)
    if last in rows(a) or contracted in rows(b):
        raise refuse(func, "it sums over the rows")
