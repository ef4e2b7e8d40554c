"""Sets and maps of a network in one go: what was asked for on one input is made for the next at once.

A network asks for its output sets and kernel maps one by one, and on a GPU most are read back before the next
is made. What it asks for is the same for every input. So the first convolution that meets a new set makes,
where it did so before, all that came after it then, with sizes that stay on the device (voxmma.sparse.sized),
reads back once how large everything is, and caches it where the layers look. Rooms are guessed from the
inputs before; what does not fit is left to the layer that asks for it, as is what was not asked for before.
What nobody took is not made again. One or two maps are sooner made one by one.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from voxmma._extension import _C
from voxmma.sparse.build import size_tensor
from voxmma.sparse.cached import ByTensor, Made, _capturing, keep
from voxmma.sparse.coords import _KEPT, CoordSet
from voxmma.sparse.cores import Direction, MapCore, core_between, held_sets
from voxmma.sparse.derive import Derived
from voxmma.sparse.geometry import Geometry
from voxmma.sparse.sized import Plan, SizedSet, derive_sized, plan_room, plans_sized

_SET_SLACK = _MAP_SLACK = 0.1  # more room than inputs before would take; a map's on top of its sets'
_SET_DOUBT = 0.15  # more of a set that one input told of, half of it after two
_MOST_GROWTH = 8  # of an input over the one before, from which rooms for it can be guessed
_MEMORY = 63  # inputs for one part in 64 of the way down to what they needed
_FEWEST = 3  # maps (H200: one map 0.39 ms as here, 0.15 ms by itself, the layer's call included)
_TILE = 256


@dataclass(eq=False)
class _Site:
    """An output set."""

    source: _Site | None
    """the set that it is made from; None: the input"""
    key: Derived
    rate: float
    """its voxels for one of the input"""
    seen: int = 1
    """how many inputs told it"""


@dataclass(eq=False)
class Wanted:
    """One direction of a kernel map."""

    inputs: _Site | None
    outputs: _Site | None
    geometry: Geometry
    reverse: bool
    flipped: bool
    passes: float
    """its passes for a tile"""
    units: float
    """its units of 4 unique rows for one of the larger side"""
    guessed: bool = False
    """nothing has told yet how many: `passes` and `units` are what is usual"""
    taken: bool = True
    """whether a layer asked for it, since it was made last"""

    def needed(self, passes: float, units: float) -> None:
        """What a plan has told."""
        if not self.guessed:
            passes, units = _rate(self.passes, passes), _rate(self.units, units)
        self.passes, self.units, self.guessed = passes, units, False


@dataclass(eq=False)
class Asked:
    """What has been asked for since some layer met a new set. Shared by the sets that came of those."""

    sites: list[_Site] = field(default_factory=list)
    maps: list[Wanted] = field(default_factory=list)
    rows: int = 0
    """voxels of the last input"""
    lock: threading.RLock = field(default_factory=threading.RLock)

    def forget(self) -> None:
        with self.lock:
            self.sites, self.maps = [], []


class Place:
    """Of a coordinate set: what it is among those of one input."""

    __slots__ = ("asked", "root", "rows", "site")

    def __init__(self, asked: Asked, rows: int, site: _Site | None = None, root: object = None) -> None:
        self.asked = asked
        self.rows = rows
        """voxels of the input"""
        self.site = site
        """None: the input"""
        self.root = self if root is None else root
        """the place of the input"""

    def derived(self, made: CoordSet, key: Derived) -> Place:
        """The place of a set that was made from this one."""
        rate = made.num / max(self.rows, 1)
        with self.asked.lock:
            for site in self.asked.sites:
                if site.source is self.site and site.key == key:
                    site.rate = rate
                    break
            else:
                site = _Site(self.site, key, rate)
                if len(self.asked.sites) < _KEPT["derived"]:
                    self.asked.sites.append(site)
        return Place(self.asked, self.rows, site, self.root)

    def mapped(self, outputs: Place | None, core: MapCore, reverse: bool, made: Direction) -> None:
        """A map from this set to that of `outputs` was built."""
        if outputs is None or outputs.root is not self.root:
            return
        how = core.geometry, reverse, core.flipped
        with self.asked.lock:
            for known in self.asked.maps:
                here = known.inputs is self.site and known.outputs is outputs.site
                if here and (known.geometry, known.reverse, known.flipped) == how:
                    if made.known:
                        known.needed(*_rates(core.geometry, reverse, made))
                    known.taken = True
                    return
            if len(self.asked.maps) < _KEPT["maps"]:
                rates = _rates(core.geometry, reverse, made)
                self.asked.maps.append(Wanted(self.site, outputs.site, *how, *rates, not made.known))


def _rates(geometry: Geometry, reverse: bool, made: Direction) -> tuple[float, float]:
    """Passes and units of a plan as in `Wanted`; what is usual where it has not told."""
    if len(made.tensors) == 4:
        return 0.0, 0.0  # a CPU's have none
    n_in, n_out = made.tensors[-1].shape[1:]
    passes, units = made.tensors[2].shape[0], made.tensors[4].shape[0] // 4
    if not made.known:  # there is room for any plan
        passes, units, *_ = plan_room(geometry, reverse, n_in, n_out)
    return passes / max(-(-n_out // _TILE), 1), units / max(n_in, n_out, 1)


#: By the weight of the layer that met a new set first; where that is a view, by what it is a view of.
_ASKED = ByTensor(Asked)
_LOCK = threading.Lock()
_DEVICES = {"cuda"}


def meet(coords: CoordSet, weight: torch.Tensor) -> None:
    """A layer with `weight` runs on `coords`: makes what came after it the last time that the set was new.

    Of several threads one makes it, and the others wait.
    """
    if coords.place is not None or not (weight.is_cuda or weight.device.type in _DEVICES):
        return
    if type(coords) is not CoordSet or coords.repeated is not None or held_sets.get() is not None:
        return  # sets of other kinds make what layers ask for themselves
    rows = coords._coords.shape[0]
    if rows == 0:
        return
    if torch._C._are_functorch_transforms_active() or not _on_this_device(weight, coords):
        return
    with coords._index.lock:
        if coords.place is not None or coords.maps or coords.derived:
            return
        with _LOCK:
            asked = _ASKED.get(weight if weight._base is None else weight._base)
        place = Place(asked, rows)
        with asked.lock:  # not held while anything is made: it is asked for under the locks of sets
            if rows > _MOST_GROWTH * asked.rows:
                asked.forget()
            asked.rows = rows
            if len(asked.maps) >= _FEWEST:
                _drop_untaken(asked)
            sites, wanted = list(asked.sites), list(asked.maps)
        if len(wanted) >= _FEWEST:
            try:
                with torch.inference_mode(False), torch.no_grad():
                    _make(coords, place, sites, wanted)
            except torch.OutOfMemoryError:  # one by one takes less: no room is guessed
                asked.forget()
        coords.place = place  # last: until here the others wait


def _on_this_device(weight: torch.Tensor, coords: CoordSet) -> bool:
    """Whether tensors can be made on the set's device now."""
    rows = coords._coords
    return not rows.is_cuda or (weight.is_cuda and not _capturing(rows.get_device()))


def _drop_untaken(asked: Asked) -> None:
    """Forgets what nobody took the last time, and what hangs on sets that are forgotten."""
    known: set[_Site | None] = {None}
    for site in asked.sites:  # sources come before what is made from them
        if site.source in known:
            known.add(site)
    asked.maps = [m for m in asked.maps if m.taken and m.inputs in known and m.outputs in known]
    needed = {end for m in asked.maps for end in (m.inputs, m.outputs)}
    for site in reversed(asked.sites):
        if site in needed:
            needed.add(site.source)
    asked.sites = [site for site in asked.sites if site in needed]


def _make(coords: CoordSet, place: Place, sites: list[_Site], maps: list[Wanted]) -> None:
    device, rows = coords.device, coords.num
    status = torch.empty((len(sites) + len(maps), 4), dtype=torch.int64, device=device)
    count = torch.full((1,), rows, dtype=torch.int64, device=device)
    index = coords.hash_index() if device.type == "cuda" else coords.sorted_keys()
    sets: dict[_Site | None, SizedSet] = {
        None: SizedSet(coords.coords, count, None, (index[0], index[1]), coords.bounds)
    }
    for site, line in zip(sites, status[: len(sites)].unbind(), strict=True):
        room = int(site.rate * rows * (1 + _SET_SLACK + _SET_DOUBT / site.seen)) + _TILE
        sets[site] = derive_sized(sets[site.source], site.key, room, line)
    plans = []
    for wanted in maps:
        inputs, outputs = sets[wanted.inputs], sets[wanted.outputs]
        n_in, n_out = inputs.coords.shape[0], outputs.coords.shape[0]  # quicker than len()
        passes = int(wanted.passes * -(-n_out // _TILE) * (1 + _MAP_SLACK)) + 8
        units = int(wanted.units * max(n_in, n_out) * (1 + _MAP_SLACK)) + 64
        plans.append(Plan(inputs, outputs, wanted.geometry, wanted.reverse, (passes, units)))
    made = plans_sized(plans, status[len(sites) :], compact=True)
    found = status.tolist()  # waits
    done = Made((status,), "what layers asked for")  # one event for all of it
    exact: dict[_Site | None, CoordSet] = {None: coords}
    for site, (number, outside, *_) in zip(sites, found, strict=False):
        source = exact.get(site.source)
        if source is None:
            continue
        site.rate, site.seen = _rate(site.rate, number / rows), site.seen + 1
        if not outside and number <= sets[site].coords.shape[0]:
            exact[site] = _keep_set(source, sets[site], Place(place.asked, rows, site, place), number, done)
    for wanted, plan, tensors, (units, passes, pairs, _) in zip(
        maps, plans, made, found[len(sites) :], strict=True
    ):
        wanted.taken = False
        inputs_set, outputs_set = exact.get(wanted.inputs), exact.get(wanted.outputs)
        if inputs_set is not None and outputs_set is not None:
            _keep_map(inputs_set, outputs_set, wanted, tensors, plan.room, (passes, units), pairs, done)


def _rate(before: float, now: float) -> float:
    """What to expect: the largest of late. Six smaller inputs sink it by less than the slack of a map."""
    return max(now, (_MEMORY * before + now) / (_MEMORY + 1))


def _keep_set(source: CoordSet, made: SizedSet, place: Place, number: int, done: Made) -> CoordSet:
    """Caches an output set with `source`."""
    assert place.site is not None
    key = place.site.key
    coords = made.coords[:number]
    first, second = made.index
    out = CoordSet.trusted(coords, source.batch_size, made.bounds, key.shape, event=done.event)
    if coords.is_cuda:
        out._set_hashed(first[:number], second)
    else:
        out._set_sorted(first[:number], second[:number])
    key.link(source, out)
    out.place = place
    with source._index.lock:
        return keep(source.derived, key, out, _KEPT["derived"])


def _keep_map(
    inputs: CoordSet,
    outputs: CoordSet,
    wanted: Wanted,
    tensors: list[torch.Tensor],
    room: tuple[int, int],
    need: tuple[int, int],
    pairs: int,
    done: Made,
) -> None:
    """Caches a map with its sets, if it found room."""
    n_in, n_out = inputs.num, outputs.num
    if inputs.device.type == "cuda":
        passes, units = need
        wanted.needed(passes / max(-(-n_out // _TILE), 1), units / max(n_in, n_out, 1))
        if passes > room[0] or units > room[1]:
            return
        tensors = _C.cut_plan(tensors, n_in, n_out, passes, units)
    else:
        tensors = [*tensors, size_tensor(inputs._coords, outputs._coords)]
    direction = Direction(tensors, pairs, event=done.event)
    direction.wanted = wanted
    fine, coarse = (outputs, inputs) if wanted.reverse else (inputs, outputs)
    core = core_between(fine, coarse, wanted.geometry, wanted.flipped)
    if not core.freed:
        core.sides.setdefault(
            wanted.reverse, direction
        )  # whoever holds its lock may wait for that of the input
