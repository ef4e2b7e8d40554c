"""What ran, and why: the record every convolution attaches to its output."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from voxmma.ops.kernels import accumulator_label

if TYPE_CHECKING:
    from voxmma.sparse.tensor import Voxels


@dataclass(frozen=True)
class Record:
    """One convolution call: what its precision settings resolved to, what ran, and why they differ.

    `requested` is 'fp32', 'fp16' or 'fp16_promoted:64' and the like, `decided_by` the level that asked for it
    ('module', 'runtime', 'environment', 'inference_mode', 'default'), `accumulator` what runs in the forward
    and the input gradient (the weight gradient always accumulates in fp32, or fp64 for fp64). `chunk` is the
    number of channels between promotions of 'fp16_promoted' (-1: once per kernel offset; 0: not promoted),
    `rescaled` whether the operands were made fp16 by powers of two (voxmma.verify.overflow). `tile`,
    `dgrad_tile` and `wgrad_tile` are names of the tile table; the latter two are what a backward pass of this
    call runs. `parts`: into how many fp32 sums, added in order, the forward's sums were divided because the
    set was too small for the device (docs/precision.md); 0 under torch.compile, whose calls serve many sizes.
    `applied`: norms, activations and numbers that were applied to the result since, in order; their own
    precision is that of torch.
    """

    layer: str
    requested: str
    decided_by: str
    accumulator: str
    tile: str
    dgrad_tile: str
    wgrad_tile: str
    compute_dtype: torch.dtype
    out_dtype: torch.dtype
    reason: str
    chunk: int = 0
    rescaled: bool = False
    parts: int = field(default=1, compare=False)
    applied: tuple[str, ...] = ()

    def __str__(self) -> str:
        compute, out = (str(dtype).removeprefix("torch.") for dtype in (self.compute_dtype, self.out_dtype))
        dtypes = compute if compute == out else f"{compute} -> {out}"
        accumulator = accumulator_label(self.accumulator, self.chunk)
        inputs = f"{dtypes} inputs{' (rescaled)' if self.rescaled else ''}"
        parts = f" in {self.parts} parts" if self.parts > 1 else ""
        return (
            f"{self.layer}: {accumulator} accumulator on {inputs}, tile {self.tile}{parts}; "
            f"{self.requested} requested by {self.decided_by}; {self.reason}"
            f"{'; then ' + ', '.join(self.applied) if self.applied else ''}"
        )

    def as_dict(self) -> dict[str, str]:
        """The fields as strings, for JSON."""
        return {name: str(value).removeprefix("torch.") for name, value in asdict(self).items()}


def explain(voxels: Voxels) -> Record:
    """The record of the convolution that made `voxels`, and what was applied to its result since.

    It comes along through the norms and activations of voxmma.nn, through arithmetic with numbers and through
    `detach`. TypeError when `voxels` is no Voxels, ValueError where no one convolution says what ran:
    features given by hand (`with_feats`, `to`), sums and concatenations of several Voxels, pooling, other
    coordinates.
    """
    if not hasattr(voxels, "_record"):
        raise TypeError(f"voxels must be a voxmma.Voxels, got {type(voxels).__name__}")
    if voxels._record is None:
        raise ValueError(
            "voxels carries no record: it is not the output of a voxmma convolution, nor of norms, "
            "activations and numbers applied to one (sums and concatenations of Voxels, pooling, "
            "with_feats() and to() start anew)"
        )
    return replace(voxels._record, applied=voxels._applied) if voxels._applied else voxels._record
