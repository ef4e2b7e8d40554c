"""Samples into batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from voxmma.compat.sets import on_host
from voxmma.compat.torchsparse import options
from voxmma.compat.torchsparse.tensor import SparseTensor

__all__ = ["sparse_collate", "sparse_collate_fn"]


def sparse_collate(inputs: list[SparseTensor]) -> SparseTensor:
    """One SparseTensor of samples whose coordinates (N_i, 3) have no batch column yet (arrays or tensors).

    ValueError names the sample whose stride or coordinates do not fit.
    """
    if not inputs:
        raise ValueError("inputs must hold at least one SparseTensor")
    stride, coords, feats = inputs[0].stride, [], []
    for number, sample in enumerate(inputs):
        rows, values = on_host(sample.coords), on_host(sample.feats)
        if sample.stride != stride:
            raise ValueError(f"inputs[{number}] has stride {sample.stride}, inputs[0] has {stride}")
        if rows.dim() != 2 or rows.shape[1] != 3:
            raise ValueError(f"inputs[{number}]: coords must be (N, 3), got {tuple(rows.shape)}")
        batch = torch.full((len(rows), 1), number, dtype=torch.int32, device=rows.device)
        coords.append(torch.cat([rows, batch] if options.version == 1 else [batch, rows], dim=1))
        feats.append(values)
    return SparseTensor(torch.cat(feats), torch.cat(coords), stride)


def sparse_collate_fn(inputs: list[Any]) -> Any:
    """A collate_fn of dicts: SparseTensors become one, arrays and tensors are stacked, dicts done
    likewise, the rest are lists. What is no dict comes back as it is."""
    first = inputs[0]
    if not isinstance(first, dict):
        return inputs
    made = {}
    for name, example in first.items():
        values = [sample[name] for sample in inputs]
        if isinstance(example, dict):
            made[name] = sparse_collate_fn(values)
        elif isinstance(example, np.ndarray | torch.Tensor):
            made[name] = torch.stack([on_host(value) for value in values])
        elif isinstance(example, SparseTensor):
            made[name] = sparse_collate(values)
        else:
            made[name] = values
    return made
