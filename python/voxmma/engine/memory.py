"""Where an engine's memory goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from voxmma.engine.program import Capacity, Program, Ref, each, made, reads

Kind = tuple[str, int]
"""'sets', 'maps', 'features' or 'workspace', and the level, -1 for none"""
WORKSPACE: Kind = ("workspace", -1)
_BLOCK = 512  # bytes that a GPU's allocator deals out
_LARGE = 1 << 20  # bytes beyond which it takes a tensor from the large blocks


def kinds(program: Program) -> dict[int, Kind]:
    """What each tensor of a program is, by number."""
    told = {r.status.number: r for r in program.reports if isinstance(r.status, Ref)}
    lines = {(r.status.number, r.line): r for r in program.reports if isinstance(r.status, Ref)}
    found: dict[int, Kind] = {}
    for step in program.steps:
        name, outs = step.func._schema.name, made(step)
        if name == "voxmma::sized_maps":
            count = len(step.args[1])
            some = (len(step.out) - 1) // count
            for at, number in enumerate(outs[:-1]):
                found[number] = "maps", program.plans[lines[outs[-1], at // some].number].target
            found[outs[-1]] = "maps", -1
            continue
        if name in ("voxmma::sized_index", "voxmma::sized_sites", "voxmma::sized_voxels"):
            kind = "sets", told[outs[-1]].number
        else:
            sizes = [place.level for place in (*each(step.args, Capacity), *each(step.kwargs, Capacity))]
            operands = [found[number][1] for number in reads(step, Ref) if number in found]
            kind = "features", next((level for level in (*sizes, *operands) if level >= 0), -1)
        found.update(dict.fromkeys(outs, kind))
    return found


class Meter:
    """Bytes that are alive while a program runs, beside its inputs and weights.

    Attributes:
        peak: most bytes at a time, and of these `parts` by kind and level.
        large: of tensors that a GPU's allocator takes from large blocks, most at a time.
    """

    def __init__(self, program: Program, given: Sequence[Tensor], device: torch.device) -> None:
        self.peak = 0
        self.parts: Mapping[Kind, int] = {}
        self.large = 0
        self._kinds, self._device = kinds(program), device
        self._given = {_address(tensor) for tensor in (*given, *program.consts)}
        self._alive: dict[int, tuple[int, Kind]] = {}
        self._before = 0

    def _allocated(self) -> int:
        """Bytes that the device ever dealt out."""
        if self._device.type != "cuda":
            return 0
        return int(torch.cuda.memory_stats(self._device)["allocated_bytes.all.allocated"])

    def before(self) -> None:
        self._before = self._allocated()

    def after(self, outs: Sequence[int], env: Mapping[int, Tensor]) -> None:
        """After a step that made the tensors `outs`, while all that it read is there."""
        workspace = self._allocated() - self._before
        known = {_address(tensor) for number, tensor in env.items() if number not in outs}
        self._alive = {at: one for at, one in self._alive.items() if at in known}
        for number in outs:
            at, size = _address(env[number]), env[number].untyped_storage().nbytes()
            if at not in known and at not in self._given and at not in self._alive:
                self._alive[at] = size, self._kinds[number]
                workspace -= -(-size // _BLOCK) * _BLOCK
        workspace = max(workspace, 0)
        parts = Counter({WORKSPACE: workspace})
        for size, kind in self._alive.values():
            parts[kind] += size
        sizes = (workspace, *(size for size, _ in self._alive.values()))
        self.large = max(self.large, sum(size for size in sizes if size > _LARGE))
        if parts.total() > self.peak:
            self.peak, self.parts = parts.total(), parts


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
