"""Shadow verification: now and then a call is recomputed in fp64, and a layer that errs goes back to fp32.

    watch = voxmma.shadow.verify(model, every=100, rows=64)
    ...                                  # train or infer as always
    watch.breaches                       # what was found; empty is good
    watch.remove()

One call in `every` of each sparse convolution layer is checked: `rows` of its output rows, all channels,
against fp64 on the very operands the kernel read, held to the worst-case bound of the mode that ran
(accuracy.bound). Such a call waits for the device; the others cost a counter. Where a row is outside its
bound the layer is set to fp32 accumulators, which an explicit False makes final, with one warning and an
entry in `breaches`.

A model may run in several threads at once. A copy of a watched model (deepcopy, pickle, an EMA) is a plain
one: `verify` it, too.
"""

from __future__ import annotations

import threading
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from voxmma._surroundings import undisturbed
from voxmma.dispatch.observers import Listener
from voxmma.dispatch.record import Record
from voxmma.nn.modules.sparse_conv import sparse_layers
from voxmma.ops import formats
from voxmma.sparse.maps import KernelMap
from voxmma.verify import accuracy
from voxmma.verify.overflow import rescaled_floor


def limit(x: Tensor, weight: Tensor, record: Record, biased: bool = False) -> accuracy.Bound:
    """The worst-case bound of a call's cells, every offset active.

    Waits for the device where it depends on the operands: after a rescale, and for 3xTF32.
    """
    volume, reduced = weight.shape[0], weight.shape[-2]
    chip = "simt" if record.tile.startswith("simt") else accuracy.arch_of(x.device)
    narrow = record.accumulator.startswith("fp16")
    operands: torch.dtype | str = torch.float16 if narrow or record.rescaled else record.compute_dtype
    if record.tile.endswith("_tf32"):
        operands = "tf32"
    found = accuracy.bound(
        record.accumulator,
        volume * reduced + biased,
        operands,
        record.out_dtype,
        chip,
        offsets=volume,
        chunk=record.chunk,
    )
    floor = found.floor
    if record.rescaled:
        floor = rescaled_floor(floor, volume * reduced, x, weight.to(x.dtype), chunk=record.chunk)
    if record.tile.endswith("_3xtf32"):
        floor += accuracy.tf32_loss(volume * reduced, x, weight)
    return replace(found, floor=floor)


def reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, mapping: KernelMap, rows: Tensor, record: Record
) -> tuple[Tensor, Tensor]:
    """(y64, abs64) of the output rows `rows`, both (len(rows), C_out), on the operands that the tile read."""
    table = mapping.neighbor_table()[:, rows.to(mapping.device)].long()
    pairs = []
    for row in table:
        out = torch.nonzero(row >= 0).flatten()
        pairs.append((row[out], out))
    operands = [x, weight.to(x.dtype)]
    if record.tile.endswith("_tf32"):
        operands = [formats.round_tf32(t) for t in operands]
    return accuracy.reference_conv(operands[0], operands[1], pairs, len(rows), bias)


@dataclass(frozen=True)
class Breach:
    """A checked call that was outside its bound."""

    layer: str
    call: int
    """Number of the layer's call, from 0."""
    record: Record
    errors: accuracy.Errors
    limit: accuracy.Bound

    def __str__(self) -> str:
        if self.errors.nonfinite:
            what = f"{self.errors.nonfinite} of {self.errors.cells} checked cells are not finite"
        else:
            what = f"max eta {self.errors.max_eta:.2e} is above the bound {self.limit.eta:.2e}"
        return f"{self.layer}, call {self.call}: {what} ({self.record})"


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mapping: KernelMap,
    y: Tensor,
    record: Record,
    rows: Tensor | None = None,
) -> tuple[accuracy.Errors, accuracy.Bound]:
    """Errors of the given output rows, or of all, and the bound that they should keep. Waits for the device.

    Cells whose fp64 value is beyond the output's range count as right when they are infinite with its sign,
    and cells whose fp64 value is not finite, as their own operands are not, when they are not finite either.
    """
    with undisturbed():
        every = torch.arange(len(y), device="cpu") if rows is None else rows
        return _check(x, weight, bias, mapping, y, record, every)


def _check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    mapping: KernelMap,
    y: Tensor,
    record: Record,
    rows: Tensor,
) -> tuple[accuracy.Errors, accuracy.Bound]:
    y64, abs64 = reference(x, weight, bias, mapping, rows, record)
    got = y[rows.to(y.device)].double()
    largest = formats.FORMATS[formats.format_name(record.out_dtype)].max
    unbounded = (y64.abs() > largest) & (got == torch.sign(y64) * torch.inf)
    right = unbounded | ~(y64.isfinite() | got.isfinite())
    got, y64, abs64 = (t.masked_fill(right, 0) for t in (got, y64, abs64))
    bound = limit(x, weight, record, bias is not None)
    return accuracy.errors(got, y64, abs64, bound.floor), bound


class Watch(Listener):
    """What `verify` returns: counters, breaches, and `remove()`."""

    def __init__(self, layers: dict[str, Any], every: int, rows: int, seed: int) -> None:
        self.breaches: list[Breach] = []
        self.calls = dict.fromkeys(layers, 0)
        self.checked = dict.fromkeys(layers, 0)
        self._every, self._rows = every, rows
        self._generator = torch.Generator().manual_seed(seed)
        self._lock = threading.Lock()  # the layers may run in several threads
        super().__init__(layers, self._observe)

    def _observe(
        self,
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mapping: KernelMap,
        y: Tensor,
        record: Record,
    ) -> None:
        with self._lock:
            call = self.calls[name]
            self.calls[name] += 1
            if call % self._every or y.numel() == 0:
                return
            self.checked[name] += 1
            rows = torch.randperm(len(y), generator=self._generator, device="cpu")[: self._rows]
        bias = None if bias is None else bias.detach()
        errors, bound = check(x, weight, bias, mapping, y, record, rows)
        if not errors.within(bound):
            self._demote(Breach(name, call, record, errors, bound))

    def _demote(self, breach: Breach) -> None:
        with self._lock:
            first = not any(found.layer == breach.layer for found in self.breaches)
            self.breaches.append(breach)
        layer: Any = self._layers.get(breach.layer)
        if layer is not None:
            layer.use_fp16_accum, layer.accumulator = False, None
        if first:
            warnings.warn(f"shadow verification: {breach}; the layer runs in fp32 from now on", stacklevel=2)

    def remove(self) -> None:
        """Stops watching. Layers that were demoted stay so."""
        super().remove()


def verify(model: nn.Module, every: int = 100, rows: int = 64, seed: int = 0) -> Watch:
    """Watches the sparse convolution layers of `model` from the next call on, see the module.

    Args:
        every: one call of each layer in so many is checked, the first one included. rows: output rows
            recomputed a check. seed: of their choice.

    Compiled calls are not seen. Raises ValueError when the model has no sparse convolution layer, or for a
    number below 1.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("model has no sparse convolution layer")
    if every < 1 or rows < 1:
        raise ValueError(f"every and rows must be at least 1, got {every} and {rows}")
    return Watch(layers, every, rows, seed)
