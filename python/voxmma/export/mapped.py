"""Voxels whose kernel maps are tensors among others: what a sparse network is exported on.

Searches that build kernel maps depend on the coordinates and belong to no graph. So an exported network takes
the maps as inputs: `with_maps` runs the network once to see which it asks for and returns its inputs with
every `Voxels` replaced by `MappedVoxels`, a `Voxels` that torch's pytree takes apart into features,
coordinates and map tensors. The recipe (`Layout`) makes the same of other voxels, so one graph serves all:

    inputs = with_maps(model, (voxels,))
    program = export_program(model, inputs)
    y = program.module()(inputs[0].layout(other_voxels))

`voxmma.export` does all this by itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.fx.experimental._config
import torch.utils._pytree as pytree
from torch import nn

from voxmma._types import Triple
from voxmma.sparse import segments
from voxmma.sparse.cached import Made
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.cores import Direction, MapCore, core_between, held_sets
from voxmma.sparse.derive import Derived
from voxmma.sparse.finer import Finer
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.maps import KernelMap
from voxmma.sparse.tensor import Voxels

__all__ = ["Layout", "MappedVoxels", "dynamic_shapes", "export_program", "one_graph", "with_maps"]

_GRAPHS = 64  # for sizes of 0, 1 and more on every level, which torch.compile keeps apart
_names = itertools.count()
_LEVELS = 5  # of the tree over samples: enough for 64**5 voxels


class Site(NamedTuple):
    """A coordinate set made from another one, by its place in the list of sets (0: the input's)."""

    parent: int
    rule: Derived


class Edge(NamedTuple):
    """One direction of a kernel map between two sets; `tensors` says how many it consists of."""

    owner: int
    other: int
    geometry: Geometry
    flipped: bool
    reverse: bool
    tensors: int


@dataclass(frozen=True)
class Layout:
    """Which coordinate sets and kernel maps a network uses. Calling it makes `MappedVoxels` of Voxels.

    Attributes:
        batch_size, stride, spatial_shape: of the input.
        sites: the sets after the input's own. edges: the maps. trees: sets whose samples are summed over.
    """

    batch_size: int
    stride: Triple
    spatial_shape: Triple | None
    sites: tuple[Site, ...]
    edges: tuple[Edge, ...]
    trees: tuple[int, ...]

    def __call__(self, voxels: Voxels) -> MappedVoxels:
        """`voxels` with the maps of this layout, made where they are not cached on its coordinates yet.

        Raises TypeError for anything but Voxels, ValueError when batch size, stride or spatial shape are
        other ones.
        """
        if not isinstance(voxels, Voxels):
            raise TypeError(f"expected voxmma.Voxels, got {type(voxels).__name__}")
        for name in ("batch_size", "stride", "spatial_shape"):
            mine, theirs = getattr(self, name), getattr(voxels, name)
            if mine != theirs:
                raise ValueError(f"voxels have {name} {theirs}, the network was exported for {mine}")
        if voxels.coord_set.repeated is not None:
            raise ValueError("the voxels have duplicates (duplicates='keep'): merge them first")
        sets = self._sets(voxels.coord_set)
        return _assemble(self, sets, voxels.feats, list(self.tensors(sets)))

    def _sets(self, root: CoordSet) -> list[CoordSet]:
        sets = [root]
        for site in self.sites:
            sets.append(site.rule.make(sets[site.parent]))
        return sets

    def tensors(self, sets: list[CoordSet]) -> Iterator[torch.Tensor]:
        """Coordinates, map tensors, levels of the trees: what `fill` takes back."""
        yield from (made.coords for made in sets)
        for edge in self.edges:
            yield from _map(sets, edge).tensors
        for place in self.trees:
            for rows, starts in _deep_tree(sets[place]):
                yield from (rows, starts)

    def fill(self, tensors: Iterator[Any]) -> list[CoordSet]:
        """Coordinate sets of `tensors` that find their maps in their caches."""
        sets = [CoordSet.trusted(next(tensors), self.batch_size, spatial_shape=self.spatial_shape)]
        for site in self.sites:
            geometry, to_children, shape = site.rule
            parent = sets[site.parent]
            made = CoordSet.trusted(next(tensors), self.batch_size, spatial_shape=shape)
            if not to_children and geometry.stride != (1, 1, 1):
                made.finer = Finer(parent, geometry)
            parent.derived[site.rule] = made
            sets.append(made)
        for edge in self.edges:
            owner, other = sets[edge.owner], sets[edge.other]
            core = MapCore(edge.geometry, None if owner is other else other, edge.flipped).cached(owner)
            core.sides[edge.reverse] = Direction([next(tensors) for _ in range(edge.tensors)], -1)
        for place in self.trees:
            levels = [next(tensors) for _ in range(2 * _LEVELS)]
            sets[place]._index.segments = Made(levels, segments.WHAT)
        for made in sets:
            made.traced = True
        return sets

    def to_json(self) -> list[Any]:
        """JSON types; `from_json` is the inverse."""
        return [self.batch_size, self.stride, self.spatial_shape, self.sites, self.edges, self.trees]

    @classmethod
    def from_json(cls, data: list[Any]) -> Layout:
        """Rebuilds what `to_json` wrote, after a way through JSON."""

        def geometry(parts: list[Any]) -> Geometry:
            return Geometry(*map(tuple, parts))

        def shape(parts: list[Any] | None) -> Any:
            return None if parts is None else tuple(parts)

        batch_size, stride, grid, sites, edges, trees = data
        return cls(
            batch_size,
            tuple(stride),
            shape(grid),
            tuple(Site(parent, Derived(geometry(g), down, shape(n))) for parent, (g, down, n) in sites),
            tuple(Edge(a, b, geometry(g), *rest) for a, b, g, *rest in edges),
            tuple(trees),
        )


class MappedVoxels(Voxels):
    """Voxels with the maps of a `Layout`. Whatever is computed from them is plain `Voxels`."""

    layout: Layout
    sets: list[CoordSet]
    """kept alive here: a set holds those made from it, but not the one it was made from"""
    tensors: list[torch.Tensor]
    """of the layout"""


def _assemble(
    layout: Layout, sets: list[CoordSet], feats: torch.Tensor, tensors: list[torch.Tensor]
) -> MappedVoxels:
    made = MappedVoxels.__new__(MappedVoxels)
    made._start(sets[0], feats, layout.stride)
    made.layout, made.sets, made.tensors = layout, sets, tensors
    return made


def _map(sets: list[CoordSet], edge: Edge) -> KernelMap:
    owner, other = sets[edge.owner], sets[edge.other]
    fine, coarse = (other, owner) if edge.flipped else (owner, other)
    core = core_between(fine, coarse, edge.geometry, edge.flipped)
    return KernelMap(coarse, fine, core, True) if edge.reverse else KernelMap(fine, coarse, core, False)


def _deep_tree(coords: CoordSet) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The tree over samples with levels that change nothing after its own, so that all are equally deep."""
    levels = list(segments.tree(coords))
    for _ in range(_LEVELS - len(levels)):
        same = torch.arange(coords.batch_size, device=coords.device)
        levels.append((same, same.clone()))
    return levels


def _survey(root: CoordSet, stride: Triple) -> Layout:
    """The layout of everything that has been made from `root`."""
    sets, sites = [root], []
    for place, made in enumerate(sets):  # grows while it runs
        for rule, child in made.derived.items():
            sets.append(child)
            sites.append(Site(place, rule))
    places = {id(made): place for place, made in enumerate(sets)}
    edges = []
    for place, made in enumerate(sets):
        for core in made.maps.values():
            other = place if core._other is None else places.get(id(core.other), -1)
            if other < 0:
                raise ValueError(
                    "the network uses coordinates that are not made by strided or generative layers from "
                    "its input: export it on coordinates that it holds"
                )
            for reverse, side in core.sides.items():
                edges.append(Edge(place, other, core.geometry, core.flipped, reverse, len(side.tensors)))
    trees = tuple(place for place, made in enumerate(sets) if made._index.segments is not None)
    return Layout(root.batch_size, stride, root.spatial_shape, tuple(sites), tuple(edges), trees)


def with_maps(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """`inputs` with every Voxels replaced by MappedVoxels with the maps that ``model(*inputs)`` asks for.

    Runs the model once, with gradients if they are enabled: then the maps of the backward are among them.

    Raises ValueError for voxels that share their coordinates with others among the inputs or that a strided
    layer made, and for a network that makes coordinates in other ways than by its layers.
    """
    leaves, spec = pytree.tree_flatten(inputs, is_leaf=lambda leaf: isinstance(leaf, Voxels))
    fresh = []
    for leaf in leaves:
        if isinstance(leaf, Voxels):
            root = leaf.coord_set
            if root.repeated is not None:
                raise ValueError("the input has duplicates (duplicates='keep'): merge them first")
            if root.finer is not None:
                raise ValueError("the input was made by a strided layer: export from what it was made from")
            copied = CoordSet.trusted(root.coords, root.batch_size, spatial_shape=root.spatial_shape)
            copied._index = replace(root._index, segments=None)
            leaf = Voxels._make(copied, leaf.feats, leaf.stride)
        fresh.append(leaf)
    roots = [
        leaf.coord_set.coords.data_ptr() for leaf in fresh if isinstance(leaf, Voxels) and len(leaf.coords)
    ]
    if len(set(roots)) < len(roots):
        raise ValueError("two inputs share their coordinates: give their features as one, or as tensors")
    before = held_sets.set([])  # a set that the network made would take its maps with it
    try:
        model(*pytree.tree_unflatten(fresh, spec))
        mapped = [
            _survey(leaf.coord_set, leaf.stride)(leaf) if isinstance(leaf, Voxels) else leaf for leaf in fresh
        ]
    finally:
        held_sets.reset(before)
    return tuple(pytree.tree_unflatten(mapped, spec))


def one_graph(model: nn.Module, **options: Any) -> Callable[..., Any]:
    """torch.compile of `model` with fullgraph=True, for inputs of new coordinates in every call.

    Coordinate sets and maps are made outside of the graph, which takes their tensors; so the bookkeeping is
    never traced and nothing breaks the graph, in training and in evaluation. Voxels may sit anywhere in the
    inputs and outputs; those that come out lie on the coordinate sets of the inputs. The first call with a
    batch size and tensor stride, and after `train()` or `eval()`, runs a copy of the model once to see which
    maps it asks for.

    Args:
        options: of torch.compile, but for `fullgraph` and `dynamic`.

    The result raises as `with_maps` does, and for structures that torch.compile cannot trace.
    """
    recipes: dict[Any, tuple[list[Layout | None], Callable[..., Any], list[Any]]] = {}

    def prepare(inputs: tuple[Any, ...]) -> tuple[list[Layout | None], Callable[..., Any], list[Any]]:
        with torch.random.fork_rng():
            given = with_maps(copy.deepcopy(model), inputs)
        leaves, spec = pytree.tree_flatten(given, is_leaf=_is_voxels)
        layouts = [leaf.layout if isinstance(leaf, MappedVoxels) else None for leaf in leaves]
        shape: list[Any] = []

        def run(*tensors: Any) -> tuple[Any, ...]:
            left = iter(tensors)
            filled = []
            for layout in layouts:
                if layout is None:
                    filled.append(next(left))
                else:
                    feats = next(left)
                    filled.append(Voxels._make(layout.fill(left)[0], feats, layout.stride))
            out = model(*pytree.tree_unflatten(filled, spec))
            flat, form = pytree.tree_flatten(out, is_leaf=_is_voxels)
            shape[:] = [form, [leaf.stride if isinstance(leaf, Voxels) else None for leaf in flat]]
            return tuple((leaf.coords, leaf.feats) if isinstance(leaf, Voxels) else leaf for leaf in flat)

        # torch.compile counts recompiles, and learns which ints vary, by code and its name.
        code = run.__code__.replace(co_name=f"run_{next(_names)}")
        own = types.FunctionType(code, run.__globals__, code.co_name, None, run.__closure__)
        return layouts, torch.compile(own, fullgraph=True, **options), shape

    @functools.wraps(model.forward)
    def call(*inputs: Any) -> Any:
        leaves, spec = pytree.tree_flatten(inputs, is_leaf=_is_voxels)
        facts = [(v.batch_size, v.stride, v.spatial_shape) if isinstance(v, Voxels) else None for v in leaves]
        needs = [isinstance(v, Voxels) and v.feats.requires_grad for v in leaves]
        key = (repr(spec), tuple(facts), tuple(needs), torch.is_grad_enabled(), model.training)
        if key not in recipes:
            recipes[key] = prepare(inputs)
        layouts, compiled, shape = recipes[key]
        given = [leaf if how is None else how(leaf) for how, leaf in zip(layouts, leaves, strict=True)]
        for leaf in given:
            if isinstance(leaf, MappedVoxels):
                for tensor, axes in zip(_flatten(leaf)[0], variable_sizes(leaf), strict=True):
                    torch._dynamo.maybe_mark_dynamic(tensor, list(axes))
        with torch._dynamo.config.patch(recompile_limit=_GRAPHS):
            out = compiled(*pytree.tree_leaves(given))
        sets = [made for leaf in given if isinstance(leaf, MappedVoxels) for made in leaf.sets]
        form, strides = shape
        flat = []
        for leaf, stride in zip(out, strides, strict=True):
            if stride is not None:
                coords, feats = leaf
                known = next(made for made in sets if made.coords is coords)
                leaf = Voxels._make(known, feats, stride)
            flat.append(leaf)
        return pytree.tree_unflatten(flat, form)

    return call


def _is_voxels(value: Any) -> bool:
    return isinstance(value, Voxels)


def dynamic_shapes(inputs: tuple[Any, ...]) -> Any:
    """For torch.export: the numbers of voxels and of map entries may vary, all else may not."""
    shapes = torch.export.ShapesCollection()
    for leaf in pytree.tree_leaves(inputs, is_leaf=lambda leaf: isinstance(leaf, Voxels)):
        if isinstance(leaf, MappedVoxels):
            for tensor, axes in zip(_flatten(leaf)[0], variable_sizes(leaf), strict=True):
                if axes:
                    shapes[tensor] = dict.fromkeys(axes, torch.export.Dim.AUTO)
    return shapes


def export_program(model: nn.Module, inputs: tuple[Any, ...]) -> torch.export.ExportedProgram:
    """torch.export of ``model`` on inputs of `with_maps`, for any number of voxels and of map entries.

    Sizes of 1, such as the tiles of a small level, are variable too: torch.export alone takes them as fixed.
    """
    with contextlib.ExitStack() as stack:
        config: Any = torch.fx.experimental._config
        if hasattr(config, "backed_size_oblivious"):  # not in every torch
            stack.enter_context(config.patch(backed_size_oblivious=True))
        return torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes(inputs))


def variable_sizes(voxels: MappedVoxels) -> list[dict[int, int]]:
    """For each flattened tensor of `voxels` the axes whose sizes depend on coordinates: axis to id.

    Sizes of one id are always equal.
    """
    sets = 1 + len(voxels.layout.sites)
    number = itertools.count(sets)
    found = [{0: 0}, *({0: place} for place in range(sets))]  # features and coordinates
    tensors = iter(voxels.tensors[sets:])
    for edge in voxels.layout.edges:
        *parts, _ = itertools.islice(tensors, edge.tensors)
        if parts[0].device.type == "cpu":  # in_rows, out_rows, kptr, which has a place for every offset
            pairs = next(number)
            found += [{0: pairs}, {0: pairs}, {}]
        else:
            found += [{axis: next(number) for axis in range(part.dim())} for part in parts]
        ends = (edge.owner, edge.other)  # the last: (0, n_in, n_out)
        inputs, outputs = ends if edge.reverse == edge.flipped else ends[::-1]
        found.append({1: inputs, 2: outputs})
    for _ in voxels.layout.trees:
        found += [{0: next(number)} for _ in range(2 * _LEVELS - 1)]
        found.append({})  # at last one block for each sample
    return found


def _flatten(voxels: MappedVoxels) -> tuple[list[Any], Layout]:
    return [voxels.feats, *voxels.tensors], voxels.layout


def _flatten_with_keys(voxels: MappedVoxels) -> tuple[list[tuple[pytree.KeyEntry, Any]], Layout]:
    leaves, layout = _flatten(voxels)
    return [(pytree.SequenceKey(place), leaf) for place, leaf in enumerate(leaves)], layout


def _unflatten(leaves: Any, layout: Layout) -> MappedVoxels:
    feats, *tensors = leaves
    return _assemble(layout, layout.fill(iter(tensors)), feats, tensors)


pytree.register_pytree_node(
    MappedVoxels,
    _flatten,
    _unflatten,
    serialized_type_name="voxmma.MappedVoxels",
    to_dumpable_context=Layout.to_json,
    from_dumpable_context=Layout.from_json,
    flatten_with_keys_fn=_flatten_with_keys,
)
