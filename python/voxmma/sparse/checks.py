"""What coordinates and the arguments of a coordinate set have to be."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from voxmma._types import Triple, integer, triple
from voxmma.sparse.packing import BATCH_MAX, COORD_MAX, COORD_MIN

_INT32 = torch.iinfo(torch.int32)


def check_columns(coords: torch.Tensor) -> None:
    """Raises TypeError or ValueError unless `coords` is a (N, 4) int32 or int64 tensor on a CPU or a GPU."""
    if not isinstance(coords, torch.Tensor):
        raise TypeError(f"coords must be a tensor, got {type(coords).__name__}")
    if coords.dtype not in (torch.int32, torch.int64):
        hint = "; Voxels.from_points takes points" if coords.is_floating_point() else ""
        raise TypeError(f"coords must be int32 or int64, got {coords.dtype}{hint}")
    shape = coords.shape
    if len(shape) != 2 or shape[1] != 4:
        raise ValueError(f"coords must be (N, 4) rows of batch, x, y, z, got shape {tuple(shape)}")
    if shape[0] > _INT32.max:
        raise ValueError(f"coords has {shape[0]} rows, at most {_INT32.max} are possible")
    if not (coords.is_cpu or coords.is_cuda) or coords.layout != torch.strided:
        raise ValueError(
            f"coords must be dense on a CPU or a CUDA device, got {coords.layout} on {coords.device}"
        )


def check_batch_size(batch_size: int | None) -> int | None:
    """`batch_size` as an int; TypeError or ValueError unless it is None or in 0..1023."""
    if batch_size is None:
        return None
    made = integer(batch_size)
    if made is None:
        raise TypeError(f"batch_size must be an int or None, got {type(batch_size).__name__}")
    if not 0 <= made <= BATCH_MAX + 1:
        raise ValueError(f"batch_size must be in 0..{BATCH_MAX + 1}, got {batch_size}")
    return made


def check_spatial_shape(spatial_shape: int | Sequence[int] | None) -> Triple | None:
    """`spatial_shape` as a triple or None; TypeError or ValueError unless each axis is in 1..131072."""
    return None if spatial_shape is None else triple(spatial_shape, "spatial_shape", 1, COORD_MAX + 1)


def check_inside(coords: torch.Tensor, shape: Triple) -> None:
    """ValueError names the first row of (N, 4) integer coordinates outside of [0, shape)."""
    space = coords[:, 1:]
    outside = ((space < 0) | (space >= torch.tensor(shape, dtype=coords.dtype, device=coords.device))).any(1)
    if bool(outside.any()):
        row = int(torch.nonzero(outside)[0])
        raise ValueError(
            f"coords row {row}, {tuple(coords[row].tolist())}, lies outside of spatial_shape {shape}"
        )


def resolve_batch_size(batch_size: int | None, largest: int, rows: torch.Tensor, name: str) -> int:
    """`batch_size`, or largest + 1 when None. ValueError names the first of `rows`, batch indices (N,) or
    coordinates (N, 4), above it."""
    if batch_size is None:
        return largest + 1
    if largest >= batch_size:
        batch = rows if rows.dim() == 1 else rows[:, 0]
        row = int(torch.nonzero(batch >= batch_size)[0])
        raise ValueError(f"{name} row {row} has batch index {int(batch[row])}, batch_size is {batch_size}")
    return batch_size


def first_unpackable(coords: torch.Tensor) -> int:
    """Smallest row of (N, 4) integer coordinates outside the packable range, -1 when there is none."""
    space, batch = coords[:, 1:], coords[:, 0]
    bad = ((space < COORD_MIN) | (space > COORD_MAX)).any(1) | (batch < 0) | (batch > BATCH_MAX)
    return int(torch.nonzero(bad)[0]) if bool(bad.any()) else -1


def narrow(coords: torch.Tensor) -> torch.Tensor:
    """A contiguous int32 copy of integer coordinates; what does not fit stays outside the packable range."""
    if coords.dtype == torch.int64:
        return coords.clamp(_INT32.min, _INT32.max).to(torch.int32, memory_format=torch.contiguous_format)
    return coords.clone(memory_format=torch.contiguous_format)


def explain_unpackable(row: int, values: list[int]) -> str:
    """The message for a row outside the packable range."""
    where = f"coords row {row} is {tuple(values)}"
    if values[0] < 0:
        return f"{where}: the batch index is negative"
    if values[0] > BATCH_MAX:
        return f"{where}: the batch index must be in 0..{BATCH_MAX}"
    axis = next(axis for axis in range(3) if not COORD_MIN <= values[1 + axis] <= COORD_MAX)
    return f"{where}: {'xyz'[axis]} must be in {COORD_MIN}..{COORD_MAX}"
