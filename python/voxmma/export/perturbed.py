"""How far off an artefact may be: its graph in float64, every result moved by its worst rounding error."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_flatten, tree_map

from voxmma.dispatch.selection import plan_call
from voxmma.ops.formats import DTYPES, FORMATS
from voxmma.precision import policy_graph
from voxmma.precision.operators import OpKind, kind_of

_UNIT = {DTYPES[name]: FORMATS[name].unit for name in ("fp16", "bf16", "fp32")}


def _product_bound(node: fx.Node, args: Sequence[Any]) -> tuple[float, bool]:
    """How large eta of a product (error over sum|a||b|) may be, and whether it is attention."""
    target: Any = node.target
    name = target._schema.name.split("::")[1]
    operands = floats(args)
    accumulator = "fp32"
    tf32 = node.args[-1] == "tf32"
    if policy_graph.is_sparse_product(node):
        weight = operands[1]
        length = weight.shape[0] * weight.shape[-2]
        accumulator = args[8]
        tf32 = args[9].endswith("_tf32")
    elif name.startswith("frozen_conv") or name.startswith("conv"):
        length = operands[1][0].numel()
    elif "attention" in name:
        length = max(operands[0].shape[-1], operands[1].shape[-2])
    elif name in ("frozen_linear", "frozen_matmul", "linear", "matmul", "mm", "bmm"):
        length = operands[0].shape[-1]
    else:
        length = min(t.numel() for t in operands)  # no contraction is longer
    if accumulator == "fp16":
        eta = (2 * math.sqrt(math.ceil(length / 8)) + 1) * _UNIT[torch.float16]  # to nearest: errors average
    elif accumulator == "fp16_promoted":
        eta = 17 * _UNIT[torch.float16] + length * 2.0**-24
    else:
        eta = (length + 2) * 2.0**-23  # tensor cores truncate
    return eta + (2 * 2.0**-11 if tf32 else 0.0), "attention" in name


def _absolute(value: Any) -> Any:
    return value.abs() if isinstance(value, Tensor) and value.is_floating_point() else value


class Perturbed(fx.Interpreter):
    """Runs a graph in float64 and moves every result by its worst rounding error, in a random direction."""

    def __init__(self, gm: fx.GraphModule, seed: int, size: float) -> None:
        super().__init__(copy.deepcopy(gm).double(), garbage_collect_values=True)
        self.generator = torch.Generator().manual_seed(seed)
        self.size = size

    def _sign(self, like: Tensor) -> Tensor:
        signs = torch.randint(2, like.shape, generator=self.generator, dtype=torch.int8, device="cpu")
        return self.size * (2 * signs.to(like) - 1)

    def run_node(self, n: fx.Node) -> Any:
        found = n.meta.get("val")
        dtype = found.dtype if isinstance(found, Tensor) else None
        if n.op in ("placeholder", "output", "get_attr") or dtype not in _UNIT:
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if policy_graph.cast_target(n) is not None:
            out = args[0]
        else:
            wide = {
                k: torch.float64 if v in _UNIT else v for k, v in kwargs.items() if not isinstance(v, Tensor)
            }
            kwargs = {**kwargs, **wide}
            out = self._exact(n, args, kwargs)
            kind = kind_of(n.target)
            if kind is OpKind.Compute or (kind is None and str(n.target).startswith("voxmma.")):
                eta, attention = _product_bound(n, args)
                signless = tree_map(_absolute, args)
                if attention:  # the weights are an exponential of the scores: their error grows with them
                    score = float((args[0].abs() @ args[1].abs().transpose(-1, -2)).max())
                    scale = kwargs.get("scale") or args[0].shape[-1] ** -0.5
                    signless = (*args[:2], args[2].abs(), *args[3:])
                    eta *= 1 + 2 * score * scale
                out = out + eta * self._exact(n, signless, kwargs) * self._sign(out)
        return out * (1 + _UNIT[dtype] * self._sign(out))

    def _exact(self, n: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        target = n.target
        if policy_graph.is_sparse_product(n):
            target = torch.ops.voxmma.conv.default
            weight = args[1]
            groups = weight.shape[1] if weight.dim() == 4 else 1
            channels = (weight.shape[-2] * groups, weight.shape[-1] * groups)
            plan = plan_call(torch.float64, False, "default", *channels, groups, args[0].device)
            args = (*args[:8], "fp64", *tuple(plan)[2:5], None)
        return getattr(self, n.op)(target, args, kwargs)


def floats(value: Any) -> list[Tensor]:
    """The tensors of float dtypes in a structure."""
    return [t for t in tree_flatten(value)[0] if isinstance(t, Tensor) and t.is_floating_point()]
