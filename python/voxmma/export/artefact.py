"""`voxmma compile`: a network exported with its precision frozen into its operators.

`compile_model` exports a module with torch.export, rewrites the graph under a policy, and replaces every
float32 product by an operator that carries its precision as an attribute (``voxmma::frozen_linear(...,
fp32_precision="ieee")``); sparse convolutions carry their accumulator and tiles anyway. So an artefact
computes the same whatever the process around it is set to, and two with different policies run side by side.
`load` touches no process-wide state; it runs the stored example and compares it with the stored float64
result. Beside the graph an artefact may hold machine code that AOTInductor made of it (`voxmma.export.aot`).

Where a product's frozen precision is not the process's, the operator holds PyTorch's switches for the length
of its launch (`torchflags.pinned`) and puts them back. On a CPU, which has no TF32, the operands are rounded
as TF32 rounds them. Autocast and policies around a call, or around `compile_model`, stay outside.

The graph takes and returns plain tensors; `Voxels` become features, coordinates and kernel maps
(`voxmma.export.mapped`), which are made for each input outside of it.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import json
import logging
import math
import re
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from voxmma import _structures, torchflags
from voxmma._surroundings import undisturbed
from voxmma._version import __version__
from voxmma.dispatch import settings
from voxmma.export import aot, archive
from voxmma.export.frozen import ArtefactError, _freeze
from voxmma.export.mapped import Layout, MappedVoxels, variable_sizes, with_maps
from voxmma.export.perturbed import Perturbed, floats
from voxmma.nn.modules.sparse_conv import SparseConv3d
from voxmma.precision import policy_graph
from voxmma.precision.policy import (
    Precision,
    PrecisionPolicy,
    as_policy,
    refuse_narrow_state,
    set_sparse_layer,
)
from voxmma.sparse.derive import DEFAULT_MAX_VOXELS
from voxmma.sparse.tensor import Voxels
from voxmma.verify import accuracy

__all__ = ["Artefact", "ArtefactError", "Check", "compile_model", "load"]

_LOG = logging.getLogger("voxmma.export")
_FORMAT = 3
_EXTRA = ("voxmma.json", "voxmma.check")
_PACKAGE = "voxmma/aot.pt2"  # in the archive, beside what torch.export writes


@dataclass(frozen=True)
class Check:
    """The stored example, run here: relative L2 error against float64, and what the bound allows."""

    error: float
    tolerance: float

    @property
    def good(self) -> bool:
        """Whether the error is finite and within the tolerance."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        word = "within" if self.good else "ABOVE"
        return f"relative L2 error {self.error:.2e}, {word} the tolerance {self.tolerance:.2e}"


class Artefact:
    """A frozen network. Call it as the module was called; it is for inference.

    Attributes:
        program: the torch.export program, from and to plain tensors.
        metadata: policy, products with their precision, versions, tolerance, hash of the weights.
        engine: what runs: 'aot' for the compiled package, 'export' for the program's graph.
        reason: why it is not the package; '' when it is.
    """

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        metadata: dict[str, Any],
        example: tuple[tuple[Tensor, ...], list[Tensor]],
        package: bytes = b"",
        reason: str = "",
    ) -> None:
        self.program = program
        self.metadata = metadata
        self._example = example
        self._package = package
        self.engine, self.reason = ("aot", "") if package and not reason else ("export", reason)
        self._run = aot.load(package) if self.engine == "aot" else program.module()
        self._inputs = _structures.loads(metadata["inputs"])
        self._outputs = _structures.loads(metadata["outputs"])
        self._layouts = list(_layouts(self._inputs))

    @property
    def policy(self) -> PrecisionPolicy:
        """The policy that was frozen."""
        return as_policy(self.metadata["policy"])

    def __call__(self, *inputs: Any) -> Any:
        """The network's outputs. Voxels may be any of the frozen batch size and stride; their maps are cached
        on their coordinates. Raises TypeError or ValueError for inputs of another structure."""
        leaves, spec = tree_flatten(inputs, is_leaf=_is_voxels)
        layouts = iter(self._layouts)
        leaves = [_with_layout(next(layouts, None), leaf) if _is_voxels(leaf) else leaf for leaf in leaves]
        flat, found = tree_flatten(tree_unflatten(leaves, spec))
        if found != self._inputs:
            raise TypeError(f"expected inputs built as {_shown(self._inputs)}, got {_shown(found)}")
        outputs = self._flat(*flat)
        for output, place in self.metadata["passed"].items():
            outputs[int(output)] = flat[place]
        sets = [made for leaf in leaves if isinstance(leaf, MappedVoxels) for made in leaf.sets]

        def reunite(leaf: Any) -> Any:
            """Voxels on the very coordinate set they lie on, maps included."""
            if not isinstance(leaf, Voxels):
                return leaf
            known = next((made for made in sets if made.coords is leaf.coords), leaf.coord_set)
            return Voxels._make(known, leaf.feats, leaf.stride)

        return tree_map(reunite, tree_unflatten(outputs, self._outputs), is_leaf=_is_voxels)

    def _flat(self, *tensors: Any) -> list[Any]:
        with torch.no_grad(), undisturbed():
            return list(self._run(*tensors))

    def check(self) -> Check:
        """Runs the stored example and compares it with the stored float64 result."""
        inputs, wanted = self._example
        return Check(accuracy.rel_l2(floats(self._flat(*inputs)), wanted), self.metadata["tolerance"])

    def save(self, path: str | Path) -> None:
        """Writes the artefact (a torch.export archive)."""
        buffer = io.BytesIO()
        torch.save(self._example, buffer)
        extra = {
            _EXTRA[0]: json.dumps(self.metadata, indent=1),
            _EXTRA[1]: base64.b64encode(buffer.getvalue()).decode(),
        }
        torch.export.save(self.program, str(path), extra_files=extra)
        if self._package:
            with zipfile.ZipFile(path, "a") as file:
                root = file.namelist()[0].split("/")[0]
                file.writestr(f"{root}/{_PACKAGE}", self._package)


def _is_voxels(value: Any) -> bool:
    return isinstance(value, Voxels)


def _layouts(spec: TreeSpec) -> Iterator[Layout]:
    """The layouts of the Voxels in a structure, in order."""
    if spec.type is MappedVoxels:
        yield spec.context
        return
    for child in spec.children() if hasattr(spec, "children") else spec.children_specs:
        yield from _layouts(child)


def _shown(spec: TreeSpec) -> str:
    """A structure for a message, such as (tensor, Voxels)."""

    def named(node: Any) -> Any:
        return "Voxels" if isinstance(node, MappedVoxels) else "tensor"

    tree = tree_unflatten([None] * spec.num_leaves, spec)
    return str(tree_map(named, tree, is_leaf=lambda node: node is None or _is_voxels(node))).replace("'", "")


def _with_layout(layout: Layout | None, voxels: Voxels) -> MappedVoxels:
    if layout is None:
        raise TypeError("the inputs hold Voxels where the example had none")
    return layout(voxels)


def _weights_hash(state: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(state.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class _Flat(nn.Module):
    """A module from and to plain tensors."""

    def __init__(self, module: nn.Module, inputs: TreeSpec) -> None:
        super().__init__()
        self.module = module
        self.inputs = inputs

    def forward(self, *tensors: Any) -> tuple[Any, ...]:
        return tuple(tree_leaves(self.module(*tree_unflatten(list(tensors), self.inputs))))


Axes = list[dict[int, int]]  # as voxmma.export.mapped.variable_sizes


def _variable(inputs: tuple[Any, ...]) -> Axes:
    """`variable_sizes` of the flat inputs, ids of several Voxels apart."""
    found: Axes = []
    for leaf in tree_leaves(inputs, is_leaf=_is_voxels):
        own = variable_sizes(leaf) if isinstance(leaf, MappedVoxels) else [{}]
        start = 1 + max((number for axes in found for number in axes.values()), default=-1)
        found += [{axis: start + number for axis, number in axes.items()} for axes in own]
    return found


def _export(module: nn.Module, flat: Sequence[Any], variable: Axes) -> torch.export.ExportedProgram:
    """torch.export with the variable sizes as such."""
    shapes: Any = torch.export.ShapesCollection()
    traced = []
    for leaf, axes in zip(flat, variable, strict=True):
        if axes:
            leaf = leaf.view_as(leaf)  # one of its own, since shapes go by identity
            shapes[leaf] = dict.fromkeys(axes, torch.export.Dim.AUTO)
        traced.append(leaf)
    return torch.export.export(module, tuple(traced), dynamic_shapes=shapes if any(variable) else None)


def _resized(flat: Sequence[Any], variable: Axes, size: Callable[[int, int], int]) -> list[Any]:
    """Blank tensors of variable sizes ``size(id, present one)`` in place of those that have others."""
    found = []
    for leaf, axes in zip(flat, variable, strict=True):
        if axes:
            shape = [size(axes[i], n) if i in axes else n for i, n in enumerate(leaf.shape)]
            leaf = leaf if shape == list(leaf.shape) else leaf.new_zeros(shape)
        found.append(leaf)
    return found


def _refuse_fixed_sizes(program: torch.export.ExportedProgram, variable: Axes) -> None:
    """Raises ArtefactError when the graph holds for some numbers of voxels alone."""
    users = set(program.graph_signature.user_inputs)
    nodes = [n for n in program.graph.nodes if n.op == "placeholder" and n.name in users]
    values = [(n.meta["val"], axis) for n, axes in zip(nodes, variable, strict=True) for axis in axes]
    found = []
    for value, axis in values:
        size = value.shape[axis]
        bounds = None if isinstance(size, int) else program.range_constraints.get(size.node.expr)
        if bounds is None or bounds.lower > 2 or bounds.upper < DEFAULT_MAX_VOXELS:
            found.append(f"{size}" if bounds is None else f"{size} in {bounds}")
    if values:
        for guard in values[0][0].fake_mode.shape_env.guards:
            text = str(guard.expr)  # every layer's own limit, and equal sizes are no matter: see _exported
            if not (text.endswith(f"<= {DEFAULT_MAX_VOXELS}") or re.fullmatch(r"Eq\(s\d+, s\d+\)", text)):
                found.append(text)
    if found:
        raise ArtefactError(
            f"the network's graph depends on how many voxels there are ({'; '.join(found)}): export it on "
            "coordinates that it holds"
        )


def _exported(module: nn.Module, flat: Sequence[Any], variable: Axes) -> fx.GraphModule:
    """The module as one graph of operators, without the checks that export adds.

    It is traced in sizes that are equal only where they always are.
    """
    program = _export(module, _resized(flat, variable, lambda number, _: 101 + 2 * number), variable)
    _refuse_fixed_sizes(program, variable)
    gm = program.module()
    assert isinstance(gm, fx.GraphModule)
    _inline(gm)
    for node in list(gm.graph.nodes):
        if node.target == "_guards_fn" or node.target is torch.ops.aten._assert_tensor_metadata.default:
            gm.graph.erase_node(node)
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            raise ArtefactError(
                f"{node.name} ({node.target}) holds a graph of its own, which cannot be frozen"
            )
    gm.recompile()
    return gm


def _inline(gm: fx.GraphModule) -> None:
    """Puts regions of another gradient mode into the graph: an artefact has no gradients."""
    for node in list(gm.graph.nodes):
        if node.target is not torch.ops.higher_order.wrap_with_set_grad_enabled:
            continue
        inner = gm.get_submodule(node.args[1].target)
        assert isinstance(inner, fx.GraphModule)
        _inline(inner)
        values = dict(
            zip((n for n in inner.graph.nodes if n.op == "placeholder"), node.args[2:], strict=True)
        )
        with gm.graph.inserting_before(node):
            results: Any = gm.graph.graph_copy(inner.graph, values)
        for user in list(node.users):  # each takes one of the results
            user.replace_all_uses_with(results[user.args[1]])
            gm.graph.erase_node(user)
        gm.graph.erase_node(node)


def _told(inputs: TreeSpec, outputs: TreeSpec) -> dict[str, str]:
    """The structures of inputs and outputs as text."""
    told = {}
    for name, spec in (("inputs", inputs), ("outputs", outputs)):
        try:
            told[name] = _structures.dumps(spec)
        except (NotImplementedError, ValueError) as error:
            raise ArtefactError(f"the {name} cannot be in an artefact: {error}") from None
    return told


def _passed(gm: fx.GraphModule) -> dict[str, int]:
    """Outputs that are inputs as they came: place among the outputs to place among the inputs."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    (outputs,) = (node.args[0] for node in gm.graph.nodes if node.op == "output")
    return {str(i): inputs.index(n) for i, n in enumerate(cast(tuple[Any, ...], outputs)) if n in inputs}


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@undisturbed()
def compile_model(
    module: nn.Module,
    inputs: tuple[Any, ...],
    policy: PrecisionPolicy | str | Mapping[str, Any] = "always_f32",
    aot: bool | None = False,
) -> Artefact:
    """Freezes ``module`` under ``policy`` for inference on inputs like ``inputs``.

    Args:
        module: not changed.
        inputs: example inputs, on the device the artefact will run on; kept in the artefact for its check.
            Tensors have these sizes later too; `Voxels` may be any of this batch size and stride.
        policy: decides everything, whatever the process is set to. Sparse layers get its accumulator.
        aot: compile the graph with AOTInductor; None: where that works here. It takes a C++ compiler, and
            Triton for a GPU.

    Raises TypeError for float64 modules, PolicyError for a policy the layers cannot follow, ArtefactError for
    a float32 product whose precision cannot be frozen, for a graph that depends on the number of voxels, for
    inputs or outputs that a file cannot describe, when the artefact misses its own tolerance, or when
    AOTInductor was asked for and fails.
    """
    policy = as_policy(policy)
    torchflags.refuse_fp64(module, f"policy {policy}")
    module = copy.deepcopy(module).eval().requires_grad_(False)
    for name, layer in module.named_modules():
        refuse_narrow_state(name, layer, policy)
        if isinstance(
            layer, SparseConv3d
        ):  # traced in float32 like the rest; the graph pass puts the policy on them
            set_sparse_layer(layer, PrecisionPolicy.always_f32)
    precision = "tf32" if policy.tf32 else "ieee"
    hold = torchflags.Hold()
    try:
        with torch.no_grad(), settings.override(fp32_precision=precision, fp16_accum=None):
            inputs = with_maps(module, inputs)
            wrapped = _Flat(module, tree_flatten(inputs)[1])
            told = _told(wrapped.inputs, tree_flatten(module(*inputs))[1])
            flat, variable = tree_leaves(inputs), _variable(inputs)
            new, casts = policy_graph.rewrite(_exported(wrapped, flat, variable), policy, flat)
            products = _freeze(new, precision)
            # Export takes sizes of 0 and 1 for fixed.
            program = _export(new, _resized(flat, variable, lambda _, size: max(size, 2)), variable)
            double = list(map(_double, flat))
            exact = floats(Perturbed(new, 0, 0.0).run(*double))
            spread = max(
                accuracy.rel_l2(floats(Perturbed(new, seed, 1.0).run(*double)), exact) for seed in range(1, 4)
            )
    finally:
        hold.release()
    metadata = {
        "format": _FORMAT,
        "policy": policy.to_json(),
        "name": policy.versioned_name,
        "tf32": policy.tf32,
        "fp16_accum": policy.forward.accumulator is Precision.F16,
        "products": products,
        "casts": casts.to_json(),
        "tolerance": 2 * spread,
        "weights": _weights_hash(program.state_dict),
        **told,
        "passed": _passed(new),
        "voxmma": __version__,
        "torch": torch.__version__,
    }
    metadata["aot"] = {"missing": "not asked for"}
    artefact = Artefact(program, metadata, (tuple(flat), exact), reason="not asked for")
    check = artefact.check()
    metadata["error"] = check.error
    if not check.good:
        raise ArtefactError(f"the frozen network misses its own tolerance: {check}")
    return artefact if aot is False else _with_package(artefact, aot)


def _machine(flat: Sequence[Any]) -> aot.Machine:
    return aot.Machine.here(next((t.device for t in flat if isinstance(t, Tensor)), torch.device("cpu")))


def _with_package(artefact: Artefact, wanted: bool | None) -> Artefact:
    """The artefact with AOTInductor's package, or why there is none: it has to compile, run, and be exact."""
    program, example = artefact.program, artefact._example
    with torch.no_grad():
        package, reason = aot.build(program)
    made = artefact
    if not reason:
        metadata = {**artefact.metadata, "aot": {"machine": _machine(example[0]).to_json()}}
        made = Artefact(program, metadata, example, package)
        try:
            check = made.check()
            metadata["error"] = check.error
            reason = "" if check.good else f"its numbers are off: {check}"
        except RuntimeError as error:
            reason = f"it does not run: {str(error).strip().splitlines()[0]}"
    if not reason:
        return made
    if wanted:
        raise ArtefactError(f"AOTInductor cannot compile this here: {reason}")
    return Artefact(program, {**artefact.metadata, "aot": {"missing": reason}}, example, reason=reason)


def _metadata(text: str) -> dict[str, Any]:
    """The metadata of an artefact. ValueError, LookupError, TypeError or AttributeError where it is none."""
    found: dict[str, Any] = json.loads(text)
    if found["format"] != _FORMAT:
        raise ValueError(f"it is of format {found['format']!r}")
    as_policy(found["policy"])
    inputs, outputs = (_structures.loads(found[name]).num_leaves for name in ("inputs", "outputs"))
    if not all(int(output) in range(outputs) and i in range(inputs) for output, i in found["passed"].items()):
        raise ValueError(f"it passes on {found['passed']}")
    if not (isinstance(found["tolerance"], float) and math.isfinite(found["tolerance"])):
        raise ValueError(f"its tolerance is {found['tolerance']!r}")
    if not (found["aot"].keys() & {"missing", "machine"}):
        raise ValueError("it does not say whether it has a package")
    return found


def load(
    path: str | Path, check: bool = True, engine: str | None = None, *, trust_code: bool = False
) -> Artefact:
    """Reads an artefact. Touches no process-wide state, and runs no code that the file brings along.

    Args:
        path: the file.
        check: run the stored example and compare; the result is logged (logger voxmma.export).
        engine: 'export' for the graph; 'aot' for the compiled package, an error where there is none that fits
            this machine; None: the package where there is one, else the graph, and the log says why.
        trust_code: may run the compiled package. It is machine code, which can do whatever this process may:
            say True for files of your own alone. Without it the graph runs.

    Raises OSError for a file that cannot be read; ValueError for engine='aot' without trust_code;
    ArtefactError for a file that is no artefact of this format or was cut, that holds anything but data
    (voxmma.export.archive), whose weights are not those that were frozen, or whose numbers are off on this
    machine.
    """
    if engine not in (None, "export", "aot"):
        raise ValueError(f"engine is 'export', 'aot' or None, not {engine!r}")
    if engine == "aot" and not trust_code:
        raise ValueError("engine='aot' runs machine code out of the file: it needs trust_code=True")
    extra = dict.fromkeys(_EXTRA, "")
    with torch.device("cpu"):  # torch.export reads into the default device
        try:
            content = archive.checked(path)
        except archive.NotData as error:
            raise ArtefactError(f"{path} is not read: {error}") from error
        try:
            program = torch.export.load(io.BytesIO(content), extra_files=extra)
        except Exception as error:  # a whole archive, but of something else
            first = (str(error).strip().splitlines() or [""])[0]
            raise ArtefactError(f"{path} is no artefact: {type(error).__name__}: {first}") from None
    if hasattr(program, "_guards_code"):
        program._guards_code = []  # source text, which program.module() would compile
    if not all(extra.values()):
        raise ArtefactError(f"{path} was not written by voxmma compile")
    try:
        metadata = _metadata(extra[_EXTRA[0]])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtefactError(f"{path} is damaged, or of another format than {_FORMAT}: {error}") from None
    if _weights_hash(program.state_dict) != metadata["weights"]:
        raise ArtefactError(f"{path}: the weights are not those that were frozen")
    try:
        example = torch.load(io.BytesIO(base64.b64decode(extra[_EXTRA[1]])), weights_only=True)
    except Exception as error:  # whatever a damaged pickle raises
        raise ArtefactError(f"{path} has a damaged example: {str(error).splitlines()[0]}") from None
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        entries = [name for name in file.namelist() if name.endswith("/" + _PACKAGE)]
        package = file.read(entries[0]) if entries else b""
    reason = "asked for the graph" if engine == "export" else metadata["aot"].get("missing", "")
    if not reason and not trust_code:
        reason = "its machine code runs with trust_code=True alone"
    if not reason:
        reason = _machine(example[0]).mismatch(metadata["aot"]["machine"]) or (
            "" if package else "not in the file"
        )
    if reason and engine == "aot":
        raise ArtefactError(f"{path} has no compiled package for this machine: {reason}")
    artefact = Artefact(program, metadata, example, package, reason)
    _LOG.info("%s runs its %s%s", path, "package" if not reason else "graph", f": {reason}" if reason else "")
    if check:
        found = artefact.check()
        _LOG.info("%s (%s): %s", path, metadata["name"], found)
        if not found.good:
            raise ArtefactError(f"{path} gives other numbers here: {found}")
    return artefact
