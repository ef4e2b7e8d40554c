"""Samples into batches."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from voxmma.compat.sets import on_host, whole


def batched_coordinates(coords: Any, dtype: torch.dtype = torch.int32, device: Any = None) -> torch.Tensor:
    """(N, 1 + D) from one (N_i, D) array or tensor a sample: the sample's number in front. int32 (rounded
    down) or float32. ValueError names the sample that does not fit."""
    if dtype not in (torch.int32, torch.float32):
        raise ValueError(f"dtype must be torch.int32 or torch.float32, got {dtype}")
    if isinstance(coords, torch.Tensor) or not isinstance(coords, Sequence) or not len(coords):
        raise TypeError("coords must be a sequence of arrays or tensors, at least one")
    parts: list[torch.Tensor] = []
    for number, sample in enumerate(coords):
        rows = on_host(sample)
        if rows.dim() != 2 or (parts and rows.shape[1] != parts[0].shape[1] - 1):
            raise ValueError(f"coords[{number}] must be (N, D) as the others, got {tuple(rows.shape)}")
        rows = (whole(rows, f"coords[{number}]") if dtype == torch.int32 else rows.to(dtype)).to(device)
        parts.append(torch.cat([rows.new_full((len(rows), 1), number), rows], dim=1))
    return torch.cat(parts)


def sparse_collate(
    coords: Sequence[Any],
    feats: Sequence[Any],
    labels: Sequence[Any] | None = None,
    dtype: torch.dtype = torch.int32,
    device: Any = None,
) -> tuple[Any, ...]:
    """(coordinates, features), and labels where given, of a batch: `batched_coordinates`, the rest
    concatenated. ValueError names the sample whose rows differ in number."""
    for number, (rows, values) in enumerate(zip(coords, feats, strict=True)):
        if len(rows) != len(values):
            raise ValueError(f"sample {number} has {len(rows)} coordinates and {len(values)} features")
    made = batched_coordinates(coords, dtype, device), torch.cat([on_host(f) for f in feats])
    if labels is None:
        return made
    found = [torch.from_numpy(v) if hasattr(v, "__array_interface__") else v for v in labels]
    return *made, torch.cat(found) if isinstance(found[0], torch.Tensor) else found


def batch_sparse_collate(
    data: Sequence[tuple[Any, ...]], dtype: torch.dtype = torch.int32, device: Any = None
) -> tuple[Any, ...]:
    """`sparse_collate` of a list of (coordinates, features) or (coordinates, features, labels)."""
    columns = [list(column) for column in zip(*data, strict=True)]
    return sparse_collate(columns[0], columns[1], *columns[2:], dtype=dtype, device=device)  # type: ignore[misc, arg-type]


class SparseCollation:
    """A collate_fn of (coordinates, features, labels) samples; samples from the one on that makes the points
    more than `limit_numpoints` (if positive) are left out, with a warning in the log."""

    def __init__(
        self, limit_numpoints: int = -1, dtype: torch.dtype = torch.int32, device: Any = None
    ) -> None:
        self.limit_numpoints = limit_numpoints
        self.dtype = dtype
        self.device = device

    def __call__(self, list_data: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
        points = 0
        kept: list[tuple[Any, ...]] = []
        for sample in list_data:
            points += len(sample[0])
            if 0 < self.limit_numpoints < points:
                logging.warning(
                    "a batch of %d samples has more than %d points: %d samples are kept",
                    len(list_data),
                    self.limit_numpoints,
                    len(kept),
                )
                break
            kept.append(sample)
        return batch_sparse_collate(kept, self.dtype, self.device)
