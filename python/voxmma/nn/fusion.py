"""`fuse`: convolution, norm, sum and activation of any model in one launch, where its forward can be read."""

from __future__ import annotations

import inspect
import operator
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from voxmma.nn import functional
from voxmma.nn.functional import activation as _functions
from voxmma.nn.modules import activation
from voxmma.nn.modules.container import Lift
from voxmma.nn.modules.container import Sequential as VoxelsSequential
from voxmma.nn.modules.fusing import (
    _ACTIVATIONS,
    _NORMS,
    Add,
    activation_of,
    run_layers,
    untouched,
    watched,
)
from voxmma.nn.modules.sparse_conv import _PLAIN, SparseConv3d
from voxmma.sparse.tensor import Voxels

# ---- what it answers ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FusionReport:
    """What `fuse` found. `fused`: chains of layers that run as one launch in evaluation, by name ("+" is a
    sum, "cat" that the result is written into its columns of a concatenation). `left`: (name of a
    convolution or module, why it stays as it is)."""

    fused: list[tuple[str, ...]] = field(default_factory=list)
    left: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.fused)} launches take what follows them along:"]
        lines += ["  " + " -> ".join(chain) for chain in self.fused]
        if self.left:
            lines += ["as before:", *(f"  {name}: {why}" for name, why in self.left)]
        return "\n".join(lines)


def fuse(model: nn.Module) -> tuple[nn.Module, FusionReport]:
    """Lets convolutions of `model` take along what follows them, and says which do and why others do not.

    Chains of convolution, BatchNorm, sum with other Voxels and activation (ReLU, LeakyReLU, SiLU, GELU with
    erf) run as one launch, and functional.cat of the result first copies the others only: in evaluation,
    without gradients, hooks or a precision policy. In training, on a GPU, the chain is one node of the graph
    (nn.functional.norm_act behind the convolution); in all other cases each layer runs.
    voxmma.nn.Sequential and the blocks of voxmma.models do so by themselves; this does it for forwards that
    call their layers one by one.

    Each module's forward is read with torch.fx, its submodules as they are: one that asks what its values are
    (`if`, `len`, isinstance), has optional arguments or changes the module stays as it is. Parameters,
    names, hooks and the state_dict stay what they are. Other numbers and flags of a module that its forward
    reads are those it had when `fuse` was called. Results are rounded once a launch instead of after every
    layer (docs/precision.md).

    Returns:
        (model, report): the same model; copies of it are fused, too, pickles are not.
    """
    report = FusionReport()
    for name, module in list(model.named_modules()):
        if type(module) is VoxelsSequential:
            _report_sequence(name, module, report)
        elif _owns_convolutions(module):
            _fuse_module(name, module, report)
    return model, report


# ---- one module --------------------------------------------------------------------------------------------


def _owns_convolutions(module: nn.Module) -> bool:
    """Whether the forward may call convolutions, or sequences that end with one, itself."""
    if isinstance(module, SparseConv3d | Lift | nn.ModuleList | nn.ModuleDict) or hasattr(
        module, "fuses_itself"
    ):
        return False
    return any(
        isinstance(child, SparseConv3d) or (type(child) is VoxelsSequential and len(child))
        for child in _children(module)
    )


def _children(module: nn.Module) -> list[nn.Module]:
    """The children, those of lists and dicts of modules among them."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _children(child) if isinstance(child, nn.ModuleList | nn.ModuleDict) else [child]
    return found


def _fuse_module(name: str, module: nn.Module, report: FusionReport) -> None:
    shown = name or type(module).__name__
    own = module.__dict__.get("forward")
    if isinstance(own, _Fused) or getattr(own, "__func__", None) is type(module).forward:
        del module.__dict__["forward"]
    elif own is not None:
        report.left.append((shown, "has a forward of its own, set on the instance"))
        return
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is not p.POSITIONAL_OR_KEYWORD or p.default is not p.empty for p in parameters):
        report.left.append((shown, "its forward has optional arguments"))
        return
    try:
        graph, trained = (_read(module, training) for training in (False, True))
    except Exception as error:  # whatever a forward does when it is given no values
        report.left.append((shown, f"its forward cannot be read without values: {_first_line(error)}"))
        return
    same = graph.python_code("self").src == trained.python_code("self").src
    chains = _fuse_graph(name, module, graph, report)
    if not chains:
        return
    report.fused.extend(chains)
    graph.lint()
    module.forward = _Fused(module, type(fx.GraphModule(module, graph)).forward, same)


def _read(module: nn.Module, training: bool) -> fx.Graph:
    """The graph of a module's forward in training or evaluation; the module is afterwards as it was."""
    modes = {part: part.training for part in module.modules()}
    for part in modes:
        part.training = training
    before = dict(module.__dict__)
    try:
        graph = _Tracer().trace(module)
    finally:
        after = dict(module.__dict__)
        module.__dict__.clear()
        module.__dict__.update(before)
        for part, mode in modes.items():
            part.training = mode
    changed = {key for key in {*before, *after} if before.get(key) is not after.get(key)}
    if changed:
        raise fx.proxy.TraceError(f"it sets {', '.join(sorted(changed))} of the module")
    return graph


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


class _Value(fx.Proxy):
    """A value of a traced forward. Nobody can say of which class: isinstance outside of torch raises."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        asking = sys._getframe(1).f_globals.get("__name__", "")
        if asking.partition(".")[0] == "torch" or asking == __name__:
            return _Value
        raise fx.proxy.TraceError("it asks for the class of a value")


class _Tracer(fx.Tracer):
    """Reads the forward of one module; submodules and functions of voxmma are calls."""

    def __init__(self) -> None:
        super().__init__(autowrap_modules=(functional,))

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


class _Fused:
    """The forward of a fused module. trains: it is the same in training."""

    def __init__(self, module: nn.Module, function: Callable[..., Any], trains: bool) -> None:
        self.module, self.function, self.trains = module, function, trains

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        plain = (
            (module.training and not self.trains)
            or torch.compiler.is_compiling()
            or not all(_plain_argument(a) for a in (*args, *kwargs.values()))
        )
        if plain:
            return type(module).forward(module, *args, **kwargs)
        return self.function(module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Fused:
        return _Fused(memo[id(self.module)], self.function, self.trains)

    def __reduce__(self) -> Any:
        return _as_written, (self.module,)


def _as_written(module: nn.Module) -> Callable[..., Any]:
    return types.MethodType(type(module).forward, module)


def _plain_argument(argument: Any) -> bool:
    """Whether it is a value as the traced one was, and nobody watches."""
    return isinstance(argument, Voxels | torch.Tensor) and not watched(argument)


# ---- its graph ---------------------------------------------------------------------------------------------

#: Functions of voxmma.nn.functional that are activations of the epilogue when called with the voxels alone.
_FUNCTIONS: dict[Any, Callable[[], nn.Module]] = {
    _functions.relu: activation.ReLU,
    _functions.silu: activation.SiLU,
    _functions.gelu: activation.GELU,
    _functions.leaky_relu: activation.LeakyReLU,
}
_ADDS = (operator.add, operator.iadd)


def _layer(node: fx.Node, module: nn.Module) -> nn.Module | None:
    """The submodule that a node calls with one argument."""
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return None
    return module.get_submodule(str(node.target))


def _stage(layer: nn.Module | None) -> int | None:
    """What a launch of a convolution has behind it at the end of this layer: 0 nothing, 1 a norm, 3 an
    activation. None where there is no such launch."""
    if type(layer) is not VoxelsSequential:
        return 0 if type(layer) in _PLAIN else None
    parts, stage = list(layer), 0
    if parts and activation_of(parts[-1]) is not None:
        stage = 3
        parts.pop()
    if parts and type(parts[-1]) in _NORMS:
        stage = max(stage, 1)
        parts.pop()
    return stage if parts and type(parts[-1]) in _PLAIN else None


def _fuse_graph(name: str, module: nn.Module, graph: fx.Graph, report: FusionReport) -> list[tuple[str, ...]]:
    """Replaces chains of the graph by calls of `run_layers`; their layers, by name."""
    prefix = f"{name}." if name else ""
    chains: list[tuple[str, ...]] = []
    for node in list(graph.nodes):
        layer = _layer(node, module)
        stage = _stage(layer)  # norm, sum, activation: each at most once, in this order
        if stage is None or node not in graph.nodes:
            continue
        nodes, layers, names = [node], [str(node.target)], [prefix + str(node.target)]
        spec: list[Any] = [0]
        others: list[fx.Node] = []
        why = ""
        while stage < 3:
            last = nodes[-1]
            users = list(last.users)
            if len(users) != 1:
                why = f"its result is used {len(users)} times"
                break
            after = users[0]
            then = _layer(after, module)
            if type(then) in _NORMS and stage < 1:
                stage = 1
            elif (
                after.op == "call_function"
                and after.target in _ADDS
                and stage < 2
                and after.args[0] is not after.args[1]
            ):
                first = after.args[1] is last
                other = after.args[0] if first else after.args[1]
                if not isinstance(other, fx.Node):
                    why = "a number is added to it"
                    break
                spec.append((len(others), first))
                others.append(other)
                nodes.append(after)
                names.append("+")
                stage = 2
                continue
            elif type(then) in _ACTIVATIONS and activation_of(then) is not None:
                stage = 3
            elif (
                after.op == "call_function"
                and after.target in _FUNCTIONS
                and len(after.args) == 1
                and not after.kwargs
            ):
                spec.append(_FUNCTIONS[after.target]())
                nodes.append(after)
                names.append(after.target.__name__)
                stage = 3
                continue
            else:
                why = f"{_what(after, then)} follows"
                break
            spec.append(len(layers))
            layers.append(str(after.target))
            nodes.append(after)
            names.append(prefix + str(after.target))
        beside = _concatenated(nodes[-1])
        if beside:
            nodes.append(next(iter(nodes[-1].users)))
            names.append("cat")
        if (others or beside) and _writes_between(graph, module, nodes):
            why, cut = "something in between writes in place", names.index("+" if others else "cat")
            nodes, names, spec, others, beside = nodes[:cut], names[:cut], spec[:cut], [], ()
        if len(nodes) == 1:
            if type(layer) in _PLAIN:
                report.left.append((names[0], why))
            continue
        end = nodes[-1]
        with graph.inserting_before(end if others or beside else node):
            modules = tuple(graph.get_attr(target) for target in layers)
            made = graph.call_function(_chain(spec), (node.args[0], modules, tuple(others), beside))
        end.replace_all_uses_with(made)
        for dead in reversed(nodes):
            graph.erase_node(dead)
        chains.append(tuple(names))
    return chains


def _concatenated(last: fx.Node) -> tuple[fx.Node, ...]:
    """The other arguments of the functional.cat that alone uses the end of a chain, as its first one."""
    users = list(last.users)
    if len(users) != 1 or users[0].op != "call_function" or users[0].target is not functional.cat:
        return ()
    first, *others = users[0].args or (None,)
    fits = first is last and last not in others and all(isinstance(other, fx.Node) for other in others)
    return tuple(others) if fits and not users[0].kwargs else ()  # type: ignore[arg-type]


def _writes_between(graph: fx.Graph, module: nn.Module, chain: list[fx.Node]) -> bool:
    """Whether what runs between the first and the last of a chain, besides it, may write to its operands."""
    order = list(graph.nodes)
    between = order[order.index(chain[0]) : order.index(chain[-1])]
    for node in between:
        if node in chain:
            continue
        if node.op == "call_module":
            parts = module.get_submodule(str(node.target)).modules()
            if any(getattr(part, "inplace", False) for part in parts):
                return True
        elif node.op in ("call_function", "call_method"):
            name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "_")
            if name.endswith("_") or name in ("iadd", "setitem") or node.kwargs.get("inplace"):
                return True
    return False


def _what(node: fx.Node, layer: nn.Module | None) -> str:
    if layer is not None:
        return type(layer).__name__
    return "the end" if node.op == "output" else str(getattr(node.target, "__name__", node.target))


def _chain(spec: list[Any]) -> Callable[..., Any]:
    """The function of a chain: an int is a module, a pair one of the others and whether it is on the left."""

    def fused_chain(
        x: Any, modules: tuple[nn.Module, ...], others: tuple[Any, ...], beside: tuple[Any, ...]
    ) -> Any:
        layers: list[Any] = []
        for item in spec:
            if isinstance(item, int):
                layer = modules[item]
                layers += list(layer) if type(layer) is VoxelsSequential and untouched(layer) else [layer]
            elif isinstance(item, tuple):
                layers.append(Add(others[item[0]], item[1]))
            else:
                layers.append(item)
        return run_layers(layers, x, beside)

    return fused_chain


def _report_sequence(name: str, module: VoxelsSequential, report: FusionReport) -> None:
    """What voxmma.nn.Sequential does by itself."""
    layers = list(module)
    names = [f"{name}.{key}" if name else key for key in module._modules]
    at = 0
    while at < len(layers):
        first = at
        at += 1
        if type(layers[first]) not in _PLAIN:
            continue
        if at < len(layers) and type(layers[at]) in _NORMS:
            at += 1
        if at < len(layers) and activation_of(layers[at]) is not None:
            at += 1
        if at - first > 1:
            report.fused.append(tuple(names[first:at]))
        elif at < len(layers):
            report.left.append((names[first], f"{type(layers[at]).__name__} follows"))
