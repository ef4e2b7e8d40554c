"""Sets and maps of a network in one go: what was asked for on one input is made for the next at once.

A network asks for its output sets and kernel maps one by one, and on a GPU most are read back before the next
is made. What it asks for is the same for every input. So the first convolution that meets a new set makes,
where it did so before, all that came after it then, with sizes that stay on the device (voxmma.sparse.sized),
reads back once how large everything is, and caches it where the layers look. Rooms are guessed from the input
before; what does not fit is left to the layer that asks for it, as is what was not asked for before. What
nobody took is not made again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch

from voxmma.sparse.cached import ByTensor, Made, _capturing, keep
from voxmma.sparse.coords import _KEPT, CoordSet, kernels_take
from voxmma.sparse.derive import Derived
from voxmma.sparse.maps import Direction, Geometry, MapCore, core_between, held_sets, size_tensor
from voxmma.sparse.sized import SizedSet, derive_sized, plan_sized

_SLACK = 1.15  # of rooms over what the input before would take
_TILE = 256


@dataclass(eq=False)
class _Site:
    """An output set."""

    source: _Site | None
    """the set that it is made from; None: the input"""
    key: Derived
    rate: float
    """its voxels for one of the input"""


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
    taken: bool = True
    """whether a layer asked for it, since it was made last"""


@dataclass(eq=False)
class Asked:
    """What has been asked for since some layer met a new set. Shared by the sets that came of those."""

    sites: list[_Site] = field(default_factory=list)
    maps: list[Wanted] = field(default_factory=list)
    lock: threading.RLock = field(default_factory=threading.RLock)


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
        ends = self.site, outputs.site, core.geometry, reverse, core.flipped
        n_in, n_out = made.tensors[-1].shape[1:]
        passes, units = 0.0, 0.0
        if len(made.tensors) > 4:
            tiles = max(-(-n_out // _TILE), 1)
            passes, units = len(made.tensors[2]) / tiles, len(made.tensors[4]) / 4 / max(n_in, n_out, 1)
        with self.asked.lock:
            for known in self.asked.maps:
                if (known.inputs, known.outputs, known.geometry, known.reverse, known.flipped) == ends:
                    known.passes, known.units, known.taken = passes, units, True
                    return
            if len(self.asked.maps) < 4 * _KEPT["maps"]:
                self.asked.maps.append(Wanted(*ends, passes, units))


#: By the weight of the layer that met a new set first.
_ASKED = ByTensor(Asked)
_LOCK = threading.Lock()
_DEVICES = {"cuda"}


def meet(coords: CoordSet, weight: torch.Tensor) -> None:
    """A layer with `weight` runs on `coords`: makes what came after it the last time that the set was new."""
    if coords.place is not None or weight.device.type not in _DEVICES or coords.maps or coords.derived:
        return
    rows = coords.num
    if rows == 0 or coords.repeated is not None or held_sets.get() is not None:
        return
    if torch._C._are_functorch_transforms_active():
        return
    if weight.is_cuda and (not kernels_take(weight) or _capturing(weight.device.index)):
        return
    with _LOCK:
        asked = _ASKED.get(weight)
    coords.place = Place(asked, rows)
    if asked.maps:
        with asked.lock, torch.inference_mode(False), torch.no_grad():
            _drop_untaken(asked)
            _make(coords, asked)


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


def _make(coords: CoordSet, asked: Asked) -> None:
    device, rows = coords.device, coords.num
    status = torch.empty((len(asked.sites) + len(asked.maps), 4), dtype=torch.int64, device=device)
    lines = list(status.unbind())
    count = torch.full((1,), rows, dtype=torch.int64, device=device)
    index = coords.hash_index() if device.type == "cuda" else coords.sorted_keys()
    sets: dict[_Site | None, SizedSet] = {
        None: SizedSet(coords.coords, count, None, (index[0], index[1]), coords.bounds)
    }
    for site, line in zip(asked.sites, lines, strict=False):
        room = int(site.rate * rows * _SLACK) + _TILE
        sets[site] = derive_sized(sets[site.source], site.key, room, line)
    made: list[tuple[list[torch.Tensor], tuple[int, int]]] = []
    for wanted, line in zip(asked.maps, lines[len(asked.sites) :], strict=True):
        inputs, outputs = sets[wanted.inputs], sets[wanted.outputs]
        n_in, n_out = len(inputs.coords), len(outputs.coords)
        tiles = -(-n_out // _TILE)
        room_for = int(wanted.passes * tiles * _SLACK) + 8, int(wanted.units * max(n_in, n_out) * _SLACK) + 64
        tensors = plan_sized(inputs, outputs, wanted.geometry, wanted.reverse, room_for, line, compact=True)
        made.append((tensors, room_for))
    found = status.tolist()  # waits
    done = Made((status,), "what layers asked for")  # one event for all of it
    exact: dict[_Site | None, CoordSet] = {None: coords}
    for site, (number, outside, *_) in zip(asked.sites, found, strict=False):
        site.rate = number / rows
        source = exact.get(site.source)
        if source is not None and not outside and number <= len(sets[site].coords):
            exact[site] = _keep_set(source, sets[site], site, number, done)
    for wanted, (tensors, room_for), (units, passes, pairs, _) in zip(
        asked.maps, made, found[len(asked.sites) :], strict=True
    ):
        wanted.taken = False
        ends = exact.get(wanted.inputs), exact.get(wanted.outputs)
        if ends[0] is None or ends[1] is None:
            continue
        _keep_map(ends[0], ends[1], wanted, tensors, room_for, (passes, units), pairs, done)


def _keep_set(source: CoordSet, made: SizedSet, site: _Site, number: int, done: Made) -> CoordSet:
    """Caches an output set with `source`."""
    coords = made.coords[:number]
    first, second = made.index
    out = CoordSet.trusted(coords, source.batch_size, made.bounds, site.key.shape, beside=done)
    if coords.is_cuda:
        out._set_hashed(first[:number], second)
    else:
        out._set_sorted(first[:number], second[:number])
    site.key.link(source, out)
    assert source.place is not None
    out.place = Place(source.place.asked, source.place.rows, site, source.place.root)
    with source._index.lock:
        return keep(source.derived, site.key, out, _KEPT["derived"])


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
    size = size_tensor(inputs._coords, outputs._coords)
    if inputs.device.type == "cuda":
        passes, units = need
        tiles = -(-outputs.num // _TILE)
        wanted.passes = passes / max(tiles, 1)
        wanted.units = units / max(inputs.num, outputs.num, 1)
        if passes > room[0] or units > room[1]:
            return
        order, schedule, pass_list, frag, uniq, local, _ = tensors
        schedule = schedule.view(-1)[: 8 * tiles].view(2, tiles, 4)
        cut = (
            order[: tiles * _TILE],
            schedule,
            pass_list[:passes],
            frag[:passes],
            uniq[: 4 * units],
            local[:tiles],
        )
        direction = Direction([*cut, size], pairs, beside=done)
    else:
        direction = Direction([*tensors[:-1], size], pairs, beside=done)
    direction.wanted = wanted
    fine, coarse = (outputs, inputs) if wanted.reverse else (inputs, outputs)
    core = core_between(fine, coarse, wanted.geometry, wanted.flipped)
    with core.lock:
        if not core.freed:
            core.sides.setdefault(wanted.reverse, direction)
