"""A precision policy as a pass over torch.fx graphs, and as a backend wrapper for torch.compile.

The pass works in two steps that can be counted. First every operation gets a cast on each float operand,
exactly as the rule book of `voxmma.policy` says, needed or not. Then redundant casts are removed:

* ``same``: the value already has that dtype;
* ``repeated``: the same value was already cast to that dtype;
* ``widened``: a cast to fp32 whose result is only cast back or onwards; fp32 holds every 16-bit value,
  so the second cast can start from the narrow value (fp16 -> fp32 -> fp16 disappears,
  fp32 -> fp16 -> fp32 rounds and stays);
* ``unused``: nobody reads the result.

Casts the graph had before are subject to the same rules and counted with them.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from voxmma import torchflags
from voxmma.dispatch import settings
from voxmma.dispatch.selection import plan_call, rescaled
from voxmma.ops.kernels import parse_accumulator
from voxmma.precision.casting import CASTABLE, PolicyMode, operand_plan
from voxmma.precision.operators import OpKind, kind_of
from voxmma.precision.policy import Precision, PrecisionPolicy, as_policy, sparse_accumulator

__all__ = ["CastReport", "PolicyBackend", "policy_backend", "remove_redundant_casts", "rewrite", "trace"]

_HALVES = (torch.float16, torch.bfloat16)


@dataclass
class CastReport:
    """What the pass did to one graph.

    Attributes:
        policy: versioned name.
        inserted: casts the first step put in, needed or not.
        existing: casts the graph already had.
        removed: casts taken out by the second step, by reason.
        remaining: casts in the finished graph.
        kinds: operations by kind, 'unknown' for those that run in float32 because nobody knows them.
        unknown: names of those operations.
    """

    policy: str
    inserted: int = 0
    existing: int = 0
    removed: Counter[str] = field(default_factory=Counter)
    remaining: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    unknown: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "removed": dict(self.removed), "kinds": dict(self.kinds)}

    def __str__(self) -> str:
        removed = ", ".join(f"{n} {reason}" for reason, n in sorted(self.removed.items())) or "none"
        return (
            f"{self.policy}: {self.inserted} casts inserted, {self.existing} there before, "
            f"removed: {removed}; {self.remaining} remain"
        )


class _UnderPolicy(nn.Module):
    """A leaf module of a traced graph whose own parameters have to be cast where they are used."""

    def __init__(self, inner: nn.Module, policy: PrecisionPolicy) -> None:
        super().__init__()
        self.inner = inner
        self.policy = policy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with PolicyMode(self.policy):
            return self.inner(*args, **kwargs)


# ---------------------------------------------------------------- reading a graph
def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def is_float(node: fx.Node) -> bool:
    value = _value(node)
    return isinstance(value, torch.Tensor) and value.dtype in CASTABLE


def cast_target(node: fx.Node) -> torch.dtype | None:
    """The dtype a pure dtype conversion converts to; None for any other node."""
    if (
        not is_float(node)
        or not node.args
        or not isinstance(node.args[0], fx.Node)
        or not is_float(node.args[0])
    ):
        return None
    before, after = _value(node.args[0]), _value(node)
    dtype: torch.dtype = after.dtype
    if node.op == "call_method":
        plain = node.target in ("float", "half", "bfloat16") and len(node.args) == 1 and not node.kwargs
        to = (
            node.target in ("to", "type")
            and len(node.args) + len(node.kwargs) == 2
            and isinstance([*node.args[1:], *node.kwargs.values()][0], torch.dtype)
        )
        return dtype if (plain or to) and before.device == after.device else None
    if node.op == "call_function" and node.target is torch.ops.aten.to.dtype and len(node.args) == 2:
        return dtype
    return None


def _target(node: fx.Node) -> Any:
    """What `kind_of` understands: the function, the method name, or the module."""
    if node.op == "call_module":
        assert node.graph.owning_module is not None
        return node.graph.owning_module.get_submodule(str(node.target))
    return node.target


def _storage(node: fx.Node) -> int:
    """Identity of the memory behind a tensor value, the same for all views of it."""
    storage: int = _value(node).untyped_storage()._cdata
    return storage


def _writes(graph: fx.Graph) -> dict[int, list[int]]:
    """Where in the graph which memory is written in place: storage to positions."""
    found: dict[int, list[int]] = {}
    for position, node in enumerate(graph.nodes):
        if node.op not in ("call_function", "call_method", "call_module"):
            continue
        if not operand_plan(PrecisionPolicy.always_f32, _target(node), node.args, node.kwargs).follow_first:
            continue
        out = node.kwargs.get("out") or (node.args[0] if node.args else node.kwargs.get("input"))
        for operand in [out] if isinstance(out, fx.Node) else list(node.all_input_nodes):
            if is_float(operand):
                found.setdefault(_storage(operand), []).append(position)
    return found


def _propagate(gm: fx.GraphModule, inputs: Sequence[Any]) -> None:
    """Runs the graph on fake tensors and leaves every node's value in ``node.meta['val']``."""
    mode = detect_fake_mode(inputs) or FakeTensorMode(allow_non_fake_inputs=True)

    def fake(value: Any) -> Any:
        real = isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor)
        return mode.from_tensor(value, static_shapes=True) if real else value

    FakeTensorProp(gm, mode).propagate_dont_convert_inputs(*map(fake, inputs))


def _count_casts(graph: fx.Graph) -> int:
    return sum(cast_target(node) is not None for node in graph.nodes)


# ---------------------------------------------------------------- step one: insert
def _cast(node: fx.Node, dtype: torch.dtype, report: CastReport) -> fx.Node:
    """A cast of ``node``, placed at the graph's insertion point."""
    report.inserted += 1
    cast = node.graph.call_method("to", (node, dtype))
    cast.meta["val"] = _value(node).to(dtype)
    return cast


def _insert(gm: fx.GraphModule, policy: PrecisionPolicy, report: CastReport) -> None:
    for node in list(gm.graph.nodes):
        _insert_around(gm, node, policy, report)


def is_sparse_product(node: fx.Node) -> bool:
    """A sparse convolution, as layers call it."""
    conv, scaled = torch.ops.voxmma.conv, torch.ops.voxmma.conv_rescaled
    return node.op == "call_function" and node.target in (conv, conv.default, scaled, scaled.default)


def _plan_sparse(node: fx.Node, policy: PrecisionPolicy, report: CastReport) -> None:
    """Has a sparse convolution compute as the policy says: operand, accumulator, tiles, result."""
    x, weight = node.args[0], node.args[1]
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    if _value(x).dtype not in CASTABLE:
        return
    spec, shape = policy.forward, _value(weight).shape
    groups = shape[1] if len(shape) == 4 else 1
    channels = [int(shape[-2] * groups), int(shape[-1] * groups)]
    if node.args[7]:
        channels.reverse()
    label = sparse_accumulator(policy)
    chunk = 0 if label is None else parse_accumulator(label)[1]
    dtype, short = spec.input.dtype, spec.accumulator is Precision.F16
    pools = (*settings.get_pools(dtype)[:4], "tf32" if policy.tf32 else "ieee", settings.get_limits())
    device, volume = _value(x).device, int(shape[0])
    plan = plan_call(dtype, short, "module", *channels, groups, device, pools, chunk, volume)
    scaled = rescaled(dtype, plan[0], "module", settings.get_fp16_rescale())
    written = spec.output_format.dtype
    with node.graph.inserting_before(node):
        operand = _cast(x, dtype, report)
    node.target = torch.ops.voxmma.conv_rescaled.default if scaled else torch.ops.voxmma.conv.default
    node.args = (operand, *node.args[1:8], plan[0], *plan[2:])
    if scaled or written != dtype:  # AOTInductor of torch 2.11 garbles dtypes: none where none is needed
        node.args = (*node.args, written)
    report.kinds[OpKind.Compute.value] += 1


def _insert_around(gm: fx.GraphModule, node: fx.Node, policy: PrecisionPolicy, report: CastReport) -> None:
    """The casts of one node."""
    graph = gm.graph
    if node.op == "output":
        with graph.inserting_before(node):
            node.args = fx.node.map_arg(
                node.args, lambda n: _cast(n, torch.float32, report) if is_float(n) else n
            )
        report.kinds[OpKind.Boundary.value] += 1
        return
    if node.op not in ("call_function", "call_method", "call_module") or cast_target(node) is not None:
        return
    if is_sparse_product(node):
        _plan_sparse(node, policy, report)
        return
    target = _target(node)
    plan = operand_plan(policy, target, node.args, node.kwargs)
    opaque = getattr(target, "__module__", None) or ""
    if plan.kind is not None:
        report.kinds[plan.kind.value] += 1
    elif plan.dtype is not None or plan.follow_first:
        report.kinds["unknown"] += 1
        report.unknown.append(str(node.target))
    first: Any = node.args[0] if node.args else node.kwargs.get("input")

    def wanted(operand: fx.Node, position: int | str) -> torch.dtype | None:
        if opaque.startswith("torch._ops.voxmma"):
            fixed: torch.dtype = traced[operand]
            return fixed  # its arguments fix the dtypes it was traced with
        if plan.follow_first:
            own = position in (0, "out", "input") or not isinstance(first, fx.Node) or not is_float(first)
            dtype: torch.dtype | None = None if own else _value(first).dtype
            return dtype
        return None if plan.first_only and position not in (0, "input") else plan.dtype

    def convert(value: Any, position: int | str) -> Any:
        def one(operand: fx.Node) -> fx.Node:
            dtype = wanted(operand, position) if is_float(operand) else None
            return operand if dtype is None else _cast(operand, dtype, report)

        return fx.node.map_arg(value, one)

    traced = {n: _value(n).dtype for n in node.all_input_nodes if is_float(n)}
    with graph.inserting_before(node):
        node.args = tuple(convert(value, i) for i, value in enumerate(node.args))
        node.kwargs = {key: convert(value, key) for key, value in node.kwargs.items()}
    if plan.result is not None:
        with graph.inserting_after(node):
            users = list(node.users)
            cast = _cast(node, plan.result, report)
        for user in users:
            user.replace_input_with(node, cast)
    if node.op == "call_module" and policy.precision_for(kind_of(target)).is_half:
        own = [*target.parameters(), *target.buffers()]
        if any(t.dtype in CASTABLE for t in own):
            gm.set_submodule(str(node.target), _UnderPolicy(target, policy))


# ---------------------------------------------------------------- step two: remove
def remove_redundant_casts(gm: fx.GraphModule) -> Counter[str]:
    """Takes out casts that change nothing, and returns how many for which reason.

    Needs ``node.meta['val']`` on every node (`rewrite` leaves it). The results of the graph stay bitwise the
    same.
    """
    removed: Counter[str] = Counter()
    graph = gm.graph

    def drop(node: fx.Node, instead: fx.Node, reason: str) -> None:
        node.replace_all_uses_with(instead)
        graph.erase_node(node)
        removed[reason] += 1

    writes = _writes(graph)
    order = {node: position for position, node in enumerate(graph.nodes)}

    def unwritten(values: tuple[fx.Node, ...], after: fx.Node, before: fx.Node | None = None) -> bool:
        """Whether none of ``values`` is written in place after one node (and before another)."""
        end = order[before] if before is not None else len(order)
        spots = [spot for value in values for spot in writes.get(_storage(value), [])]
        return not any(order[after] < spot < end for spot in spots)

    def may_widen(node: fx.Node, wide: fx.Node, narrow: fx.Node) -> bool:
        """Whether ``node``, a cast of the wide copy of ``narrow``, may start from ``narrow`` itself."""
        if _value(narrow).dtype not in _HALVES or not unwritten((wide, narrow), wide, node):
            return False
        # Back in the narrow format it will be the same memory, no copy: then neither may change later.
        return _value(narrow).dtype != _value(node).dtype or unwritten((narrow, node), wide)

    changed = True
    while changed:
        changed = False
        seen: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
        for node in list(graph.nodes):
            dtype = cast_target(node)
            if dtype is None:
                continue
            source = node.args[0]
            earlier = seen.get((source, dtype))
            narrow = source.args[0] if cast_target(source) is torch.float32 else None
            if _value(source).dtype == dtype:
                drop(node, source, "same")
            elif narrow and may_widen(node, source, narrow):
                node.replace_input_with(source, narrow)
                if not source.users:
                    if seen.get((narrow, torch.float32)) is source:
                        del seen[narrow, torch.float32]
                    graph.erase_node(source)
                    removed["widened"] += 1
            elif not node.users:
                graph.erase_node(node)
                removed["unused"] += 1
            elif (
                earlier is not None
                and unwritten((source,), earlier, node)
                and unwritten((earlier, node), earlier)  # they become one tensor
            ):
                drop(node, earlier, "repeated")
            else:
                seen[source, dtype] = node
                continue
            changed = True
    gm.recompile()
    return removed


# ---------------------------------------------------------------- the pass
def rewrite(
    gm: fx.GraphModule,
    policy: PrecisionPolicy | str | Mapping[str, Any],
    example_inputs: Sequence[Any],
) -> tuple[fx.GraphModule, CastReport]:
    """A copy of ``gm`` that computes as ``policy`` says, sharing its parameters, and the count of casts.

    Args:
        gm: a graph of torch functions, methods, aten operators and leaf modules.
        policy: a policy, its name or its record.
        example_inputs: one input per placeholder, real or fake tensors; only shapes and dtypes matter.

    Outputs of the new graph are float32 (or wider). Raises TypeError when an input or parameter is float64.
    """
    policy = as_policy(policy)
    new = fx.GraphModule(gm, copy.deepcopy(gm.graph))
    tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    torchflags.refuse_fp64([*tensors, *new.parameters(), *new.buffers()], f"policy {policy}")
    report = CastReport(policy.versioned_name)
    _propagate(new, example_inputs)
    report.existing = _count_casts(new.graph)
    _insert(new, policy, report)
    new.recompile()
    _propagate(new, example_inputs)
    report.removed = remove_redundant_casts(new)
    new.graph.lint()
    report.remaining = _count_casts(new.graph)
    return new, report


def trace(
    module: nn.Module,
    policy: PrecisionPolicy | str | Mapping[str, Any],
    example_inputs: Sequence[Any],
) -> tuple[fx.GraphModule, CastReport]:
    """`torch.fx.symbolic_trace` of ``module`` followed by `rewrite`."""
    return rewrite(fx.symbolic_trace(module), policy, example_inputs)


class PolicyBackend:
    """A backend for torch.compile that rewrites each graph under a policy and hands it to another backend.

    Attributes:
        policy: the policy.
        reports: one `CastReport` per graph compiled so far.
    """

    def __init__(self, policy: PrecisionPolicy, inner: Callable[..., Any]) -> None:
        self.policy = policy
        self.inner = inner
        self.reports: list[CastReport] = []

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        new, report = rewrite(gm, self.policy, example_inputs)
        self.reports.append(report)
        return self.inner(new, example_inputs, **options)


def policy_backend(
    policy: PrecisionPolicy | str | Mapping[str, Any], inner: str | Callable[..., Any] = "inductor"
) -> PolicyBackend:
    """``torch.compile(model, backend=policy_backend("auto_mixed"))``.

    Args:
        policy: a policy, its name or its record.
        inner: the backend that compiles the rewritten graph, by name or as a callable.
    """
    from torch._dynamo.backends.registry import lookup_backend

    return PolicyBackend(as_policy(policy), lookup_backend(inner) if isinstance(inner, str) else inner)
