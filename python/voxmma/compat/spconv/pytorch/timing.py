"""Times of layers, for `SparseConvTensor.benchmark`."""

from __future__ import annotations

import time
from typing import Any

import torch

from voxmma.compat.spconv.pytorch.core import SparseConvTensor
from voxmma.dispatch.epilogue import Epilogue


def timed(
    layer: Any,
    input: SparseConvTensor,
    add_input: SparseConvTensor | None,
    then: Epilogue | None,
) -> SparseConvTensor:
    """A call of a SparseConvolution whose time goes into `benchmark_record`."""
    if layer.name is None:
        raise ValueError("benchmark=True needs names of layers: assign_name_for_sparse_modules(model)")
    clock = _Clock(input.features.device)
    untimed = input.shadow_copy()
    untimed.benchmark = False
    made: SparseConvTensor = layer(untimed, add_input, then)
    made.benchmark = True
    entry = made.benchmark_record.setdefault(
        layer.name,
        {
            "type": "SparseConvolution",
            "indice_gen_time": [],
            "time": [],
            "num_points": [],
            "num_out_points": [],
            "params": {
                "kernel_size": layer.kernel_size,
                "stride": layer.stride,
                "padding": layer.padding,
                "dilation": layer.dilation,
                "output_padding": layer.output_padding,
                "subm": layer.subm,
                "transposed": layer.transposed,
                "input_channels": layer.in_channels,
                "out_channels": layer.out_channels,
            },
        },
    )
    entry["time"].append(clock.seconds())
    entry["num_points"].append(input.features.shape[0])
    entry["num_out_points"].append(made.features.shape[0])
    return made


class _Clock:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.start = self._now()

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def seconds(self) -> float:
        return self._now() - self.start
