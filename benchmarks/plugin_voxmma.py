"""voxmma as an adapter of a peer benchmark: one object per (C_in, C_out, dtype, variant).

The driver hands over `p` with `coords` (N, 4) int32 batch, x, y, z on the GPU and `B` samples, makes x and
weights (27, C_in, C_out) with offset (dx, dy, dz) at row (dx+1)*9 + (dy+1)*3 + (dz+1), and calls

  weight(W)        the leaf tensor that holds the weights
  unweight(g)      its gradient as (27, C_in, C_out)
  fresh()          a context without a kernel map
  fwd(ctx, x, w)   y (N, C_out); builds the map at the first call with a context

`variant` is the accumulator: 'fp32' or 'fp16'. The flag is always explicit, whatever the settings say.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

import voxmma
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv


class Plugin:
    """Submanifold 3x3x3 convolution, stride 1, no bias."""

    def __init__(self, p: Any, ci: int, co: int, dtype: str, variant: str) -> None:
        if variant not in ("fp32", "fp16"):
            raise ValueError(f"variant must be fp32 or fp16, got {variant!r}")
        self.coords, self.batch_size, self.fp16_accum = p.coords, p.B, variant == "fp16"
        voxmma.settings.set_fp32_precision("tf32" if dtype == "tf32" else "ieee")
        self.described = False

    def weight(self, w: Tensor) -> Tensor:
        return w.clone().requires_grad_()

    def unweight(self, gradient: Tensor) -> Tensor:
        return gradient

    def fresh(self) -> dict[str, Any]:
        return {"voxels": None}

    def fwd(self, ctx: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if ctx["voxels"] is None:  # a new coordinate set: checked, indexed and mapped again
            ctx["voxels"] = voxmma.Voxels(voxmma.CoordSet(self.coords, self.batch_size), x.detach())
        voxels = ctx["voxels"].with_feats(x)
        made = spatially_sparse_conv(voxels, w, kernel_size=3, use_fp16_accum=self.fp16_accum)
        if not self.described:
            print(voxmma.explain(made), flush=True)  # what runs; the driver keeps it in its log
            self.described = True
        y: Tensor = made.feats
        return y
