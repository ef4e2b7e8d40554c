"""Cells of points."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from voxmma.compat.MinkowskiEngine import options
from voxmma.compat.sets import distinct, on_host, whole


def fnv_hash_vec(arr: np.ndarray) -> np.ndarray:
    """64-bit FNV-1 hash of each row of (N, D) integers."""
    made = np.full(len(arr), 14695981039346656037, dtype=np.uint64)
    for column in arr.astype(np.uint64).T:
        made = (made * np.uint64(1099511628211)) ^ column
    return made


def ravel_hash_vec(arr: np.ndarray) -> np.ndarray:
    """The number of each row of (N, D) integers in the box around them all, last axis fastest."""
    cells = (arr - arr.min(0)).astype(np.uint64)
    size = cells.max(0) + np.uint64(1)
    made = np.zeros(len(cells), dtype=np.uint64)
    for column, length in zip(cells.T, size, strict=True):
        made = made * length + column
    return made


def sparse_quantize(
    coordinates: Any,
    features: Any = None,
    labels: Any = None,
    ignore_label: int = -100,
    return_index: bool = False,
    return_inverse: bool = False,
    return_maps_only: bool = False,
    quantization_size: Any = None,
    device: Any = "cpu",
) -> Any:
    """The cells (M, D) int32 that hold points (N, D), in the order of the first point in each.

    Args:
        coordinates: array or tensor.
        features, labels: (N, ...) of the same kind; those of the first point come back, but labels of a cell
            whose points differ become `ignore_label`.
        return_index: also the first point of each cell, int64 (M,). return_inverse: also the cell of each
            point, int64 (N,). return_maps_only: these alone. With version 0.4 (`options`) return_index is
            return_maps_only, and with labels gives (first points, labels).
        quantization_size: edge length of a cell, one number or D.
        device: of the cells.

    ValueError names what does not fit.
    """
    points = on_host(coordinates)
    array = isinstance(coordinates, np.ndarray)
    if points.dim() != 2:
        raise ValueError(f"coordinates must be (N, D), got shape {tuple(points.shape)}")
    for name, values in (("features", features), ("labels", labels)):
        if values is not None and len(values) != len(points):
            raise ValueError(f"{name} has {len(values)} rows, coordinates has {len(points)}")
    if return_inverse and not (return_index or return_maps_only):
        raise ValueError("return_inverse needs return_index")
    if quantization_size is not None:
        edge = on_host(quantization_size).double()
        if edge.dim() and edge.shape != points.shape[1:]:
            raise ValueError(
                f"quantization_size must be one number or {points.shape[1]}, got {edge.tolist()}"
            )
        points = points.double() / edge.to(points.device)
    cells = whole(points, "coordinates").to(device)
    found = distinct(cells)
    numbers = torch.arange(len(cells), device=cells.device)
    unique: Any
    inverse: Any
    unique, inverse = (numbers, numbers) if found is None else found
    if return_index and options.version == 0.4:
        maps: list[Any] = [unique]
        if labels is not None:
            maps.append(_labels(labels, unique, inverse, ignore_label))
        elif return_inverse:
            maps.append(inverse)
        maps = [m.cpu().numpy() if array and isinstance(m, torch.Tensor) else m for m in maps]
        return maps[0] if len(maps) == 1 else tuple(maps)
    if return_maps_only:
        return (unique, inverse) if return_inverse else unique
    made: list[Any] = [cells[unique]]
    first = unique.cpu().numpy() if isinstance(features, np.ndarray) else unique
    if features is not None:
        made.append(features[first])
    if labels is not None:
        made.append(_labels(labels, unique, inverse, ignore_label))
        if array:  # with labels, arrays come back as arrays
            made[0], unique, inverse = made[0].cpu().numpy(), unique.cpu().numpy(), inverse.cpu().numpy()
    if return_index:
        made.append(unique)
    if return_inverse:
        made.append(inverse)
    return made[0] if len(made) == 1 else tuple(made)


def _labels(labels: Any, unique: torch.Tensor, inverse: torch.Tensor, ignore_label: int) -> Any:
    """The label of each cell, in the kind of `labels`."""
    values = on_host(labels).to(unique.device)
    chosen = values[unique]
    differs = torch.zeros(len(unique), dtype=torch.bool, device=unique.device)
    differs[inverse[values != chosen[inverse]]] = True
    chosen = torch.where(differs, ignore_label, chosen)
    return chosen.cpu().numpy() if isinstance(labels, np.ndarray) else chosen


def unique_coordinate_map(
    coordinates: torch.Tensor, tensor_stride: Any = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of (N, 1 + D) coordinates that come first of their kind, and for each row its place among
    these."""
    found = distinct(coordinates)
    numbers = torch.arange(len(coordinates), device=coordinates.device)
    return (numbers, numbers) if found is None else found
