"""Operators with their precision as an attribute, which an exported program calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from voxmma import torchflags
from voxmma.ops.formats import round_tf32
from voxmma.precision import policy_graph
from voxmma.precision.operators import OpKind, kind_of


class ArtefactError(RuntimeError):
    """A module that cannot be frozen, or a file that is not what it says."""


# ---------------------------------------------------------------- products with their precision as an
# attribute


#: Sums of 16-bit products in float32; for the choice of algorithms PyTorch's defaults, and none by time.
_FROZEN_FLAGS = {
    **dict.fromkeys(torchflags.SHORT_SUMS, False),
    "cudnn.enabled": True,
    "cudnn.benchmark": False,
    "sdp.flash": True,
    "sdp.mem_efficient": True,
    "sdp.math": True,
    "sdp.cudnn": True,
    "mkldnn.enabled": True,
}
_FROZEN_CONVOLUTION = {**_FROZEN_FLAGS, "cudnn.deterministic": True}


def _frozen(
    call: Callable[..., Tensor],
    fp32_precision: str,
    *operands: Tensor,
    flags: Mapping[str, bool] = _FROZEN_FLAGS,
) -> Tensor:
    """``call`` on the operands in the frozen precision, whatever the process is set to."""
    if fp32_precision not in ("ieee", "tf32"):
        raise ValueError(f"fp32_precision is 'ieee' or 'tf32', not {fp32_precision!r}")
    device_type = operands[0].device.type
    if device_type != "cuda" and fp32_precision == "tf32":
        operands = tuple(round_tf32(t) if t.dtype == torch.float32 else t for t in operands)
    with torchflags.pinned(fp32_precision, device_type, flags):
        return call(*operands)


@torch.library.custom_op("voxmma::frozen_linear", mutates_args=())
def frozen_linear(x: Tensor, weight: Tensor, bias: Tensor | None, fp32_precision: str) -> Tensor:
    """x (..., C_in) times weight (C_out, C_in) transposed, plus bias (C_out,)."""
    return _frozen(lambda a, b: F.linear(a, b, bias), fp32_precision, x, weight)


@frozen_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, fp32_precision: str) -> Tensor:
    return F.linear(x, weight, bias)


@torch.library.custom_op("voxmma::frozen_matmul", mutates_args=())
def frozen_matmul(a: Tensor, b: Tensor, fp32_precision: str) -> Tensor:
    """torch.matmul of a and b."""
    return _frozen(torch.matmul, fp32_precision, a, b)


@frozen_matmul.register_fake
def _(a: Tensor, b: Tensor, fp32_precision: str) -> Tensor:
    return torch.matmul(a, b)


@torch.library.custom_op("voxmma::frozen_convolution", mutates_args=())
def frozen_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    fp32_precision: str,
) -> Tensor:
    """torch.convolution: x (N, C_in, ...), weight as torch.nn.ConvNd or ConvTransposeNd stores it."""
    rest = (list(stride), list(padding), list(dilation), transposed, list(output_padding), groups)

    def call(a: Tensor, b: Tensor) -> Tensor:
        return torch.convolution(a, b, bias, *rest)

    return _frozen(call, fp32_precision, x, weight, flags=_FROZEN_CONVOLUTION)


@frozen_convolution.register_fake
def _(x: Any, weight: Any, bias: Any, *rest: Any) -> Tensor:
    return torch.convolution(x, weight, bias, *rest[:-1])


@torch.library.custom_op("voxmma::frozen_attention", mutates_args=())
def frozen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    fp32_precision: str,
) -> Tensor:
    """scaled_dot_product_attention without dropout."""
    return _frozen(
        lambda a, b, c: F.scaled_dot_product_attention(
            a, b, c, mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        ).contiguous(),
        fp32_precision,
        q,
        k,
        v,
    )


@frozen_attention.register_fake
def _(q: Any, k: Any, v: Any, mask: Any, causal: bool, scale: Any, gqa: bool, fp32_precision: str) -> Tensor:
    out = F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=gqa)
    return torch.empty(out.shape, dtype=out.dtype, device=out.device)


def _convolution_arguments(name: str, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of torch.convolution for one of aten's convolutions."""
    size = 1 if name.endswith("1d") else 2 if name.endswith("2d") else 3

    def each(value: Any) -> list[int]:
        values = [value] if isinstance(value, int) else list(value)
        return values * size if len(values) == 1 else values

    return (
        given["input"],
        given["weight"],
        given.get("bias"),
        each(given.get("stride", 1)),
        each(given.get("padding", 0)),
        each(given.get("dilation", 1)),
        name.startswith("conv_transpose"),
        each(given.get("output_padding", 0)),
        given.get("groups", 1),
    )


def _frozen_call(node: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The frozen operator in place of ``node`` and its arguments but for the precision, or None."""
    target: Any = node.target
    name = target._schema.name.split("::")[1]
    given = {a.name: v for a, v in zip(target._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    ops = torch.ops.voxmma
    if name == "linear":
        return ops.frozen_linear.default, (given["input"], given["weight"], given.get("bias"))
    if name in ("matmul", "mm", "bmm"):
        return ops.frozen_matmul.default, tuple(node.args[:2])
    if name in (f"conv{t}{n}d" for t in ("", "_transpose") for n in (1, 2, 3)):
        if isinstance(given.get("padding"), str):
            return None
        return ops.frozen_convolution.default, _convolution_arguments(name, given)
    if name == "scaled_dot_product_attention" and not given.get("dropout_p"):
        return ops.frozen_attention.default, (
            given["query"],
            given["key"],
            given["value"],
            given.get("attn_mask"),
            given.get("is_causal", False),
            given.get("scale"),
            given.get("enable_gqa", False),
        )
    return None


def _dtype_name(node: fx.Node) -> str:
    return str(node.meta["val"].dtype).removeprefix("torch.")


def _freeze(gm: fx.GraphModule, fp32_precision: str) -> list[dict[str, str]]:
    """Replaces products by frozen operators; returns every product with its precision."""
    products = []
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        operands = [n for n in node.all_input_nodes if policy_graph.is_float(n)]
        if policy_graph.is_sparse_product(node):
            products.append(
                {
                    "node": node.name,
                    "op": str(node.target),
                    "accumulator": node.args[8],
                    "tile": node.args[9],
                    "out": _dtype_name(node),
                }
            )
            if not node.args[4]:  # AOTInductor cannot pass an empty list; without a backward nobody reads it
                node.args = (*node.args[:4], node.args[3], *node.args[5:])
            continue
        if kind_of(node.target) is not OpKind.Compute or not operands:
            continue
        short = not any(n.meta["val"].dtype == torch.float32 for n in operands)
        frozen = _frozen_call(node)
        if frozen is None:
            if not short:
                raise ArtefactError(
                    f"{node.name} ({node.target}) is a float32 product whose precision cannot be frozen"
                )
            found = {"operands": _dtype_name(operands[0]), "sums": "as the process allows"}
            products.append({"node": node.name, "op": str(node.target), **found})
            continue
        target, arguments = frozen
        with gm.graph.inserting_before(node):
            new = gm.graph.call_function(target, (*arguments, fp32_precision))
        new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
        gm.graph.erase_node(node)
        found = (
            {"operands": _dtype_name(operands[0]), "sums": "fp32"}
            if short
            else {"fp32_precision": fp32_precision}
        )
        products.append({"node": new.name, "op": str(target), **found})
    gm.graph.lint()
    gm.recompile()
    return products
