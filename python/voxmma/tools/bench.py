"""`voxmma bench`: times and errors of single layers on generated scenes, on this machine.

Every row has its error against fp64 beside its times. GPU times are CUDA events, with the work queued behind
a pause so that launching costs are hidden; CPU times are wall time. Medians. TFLOP/s count only pairs that
exist.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from rich.table import Table

import voxmma
from voxmma._timing import Clock
from voxmma.data import scenes
from voxmma.nn.functional.sparse_conv import spatially_sparse_conv
from voxmma.ops import formats
from voxmma.sparse.maps import kernel_map
from voxmma.tuning import machine
from voxmma.verify import shadow

DTYPES = ("fp16", "bf16", "fp32")

#: Scenes by name: the coordinates for a GPU, and smaller ones for a CPU.
SCENES: dict[str, tuple[Callable[[], scenes.Array], Callable[[], scenes.Array]]] = {
    "surface": (lambda: scenes.surface(512), lambda: scenes.surface(80)),
    "lidar": (
        lambda: scenes.lidar(rings=128, azimuths=2_000).coords(0.1),
        lambda: scenes.lidar(rings=32, azimuths=800).coords(0.1),
    ),
    "room": (
        lambda: scenes.room(rooms=4, rays=600_000).coords(0.03),
        lambda: scenes.room(rays=20_000).coords(0.06),
    ),
}


def parse_channels(text: str) -> list[tuple[int, int]]:
    """'64' and '32x64', with commas, as (C_in, C_out). ValueError for anything else."""
    if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)?(,[1-9]\d*(x[1-9]\d*)?)*", text):
        raise ValueError(f"expected such as 64 or 32x64,128, got {text!r}")
    return [(int(word.split("x")[0]), int(word.split("x")[-1])) for word in text.split(",")]


def parse_kernels(text: str) -> list[tuple[int, int]]:
    """'3' and '2s2', with commas, as (kernel size, stride). ValueError for anything else."""
    if "t" in text:
        raise ValueError(f"expected such as 3 or 3,2s2,5, got {text!r}")
    return [(size, stride) for size, stride, _ in parse_layers(text)]


def parse_layers(text: str) -> list[tuple[int, int, bool]]:
    """'3', '2s2', '2t2', with commas, as (kernel size, stride, transposed). ValueError for anything else."""
    word = r"[1-9](s[1-9]\d{0,3}|t([2-9]|[1-9]\d{1,3}))?"
    if not re.fullmatch(f"{word}(,{word})*", text):
        raise ValueError(f"expected such as 3 or 3,2s2,2t2, got {text!r}")
    return [(int(word[0]), int(word[2:] or 1), "t" in word) for word in text.split(",")]


def load_scenes(names: Sequence[str], device: torch.device) -> dict[str, scenes.Array]:
    """Coordinates (N, 4) of scenes, by name: keys of `SCENES` in the size for `device`, or .npz files.

    A file holds integers (N, 4) = batch, x, y, z under 'coords', or as its only array. Raises ValueError
    naming the scene, OSError where a file cannot be read.
    """
    found = {}
    for name in names:
        if name in SCENES:
            large, small = SCENES[name]
            found[name] = (large if device.type == "cuda" else small)()
            continue
        if not name.endswith(".npz"):
            raise ValueError(f"{name!r} is neither a .npz file nor one of {', '.join(SCENES)}")
        with np.load(name) as file:
            keys = ["coords"] if "coords" in file.files else file.files
            if len(keys) != 1:
                raise ValueError(f"{name}: no array 'coords' among {', '.join(file.files) or 'none'}")
            coords = file[keys[0]]
        if coords.ndim != 2 or coords.shape[1] not in (3, 4) or not np.issubdtype(coords.dtype, np.integer):
            raise ValueError(
                f"{name}: coords must be integers (N, 4) or (N, 3), got {coords.dtype} {coords.shape}"
            )
        if coords.shape[1] == 3:  # of one sample
            coords = np.pad(coords, ((0, 0), (1, 0)))
        found[Path(name).stem] = coords.astype(np.int32)
    return found


def chosen_device(name: str | None) -> torch.device:
    """The device of an option --device: None = the GPU if this build can use it, else the CPU.

    Raises typer.BadParameter for one that cannot be used here.
    """
    usable = {found.type: found for found in machine.usable_devices()}
    if name is None:
        return usable.get("cuda", usable["cpu"])
    try:
        wanted = torch.device(name)
    except RuntimeError:
        wanted = torch.device("meta")
    if wanted.type not in usable or (wanted.index or 0) >= max(1, torch.cuda.device_count()):
        raise typer.BadParameter(f"{name!r} cannot be used here; see voxmma doctor", param_hint="--device")
    return torch.device("cuda", wanted.index or 0) if wanted.type == "cuda" else wanted


@dataclass(frozen=True)
class Case:
    """One row: a layer on a scene."""

    scene: str
    c_in: int
    c_out: int
    dtype: str
    fp16_accum: bool


def cases(
    names: Sequence[str], channels: Sequence[tuple[int, int]], dtypes: Sequence[str], fp16_accum: bool
) -> list[Case]:
    """Every combination; with `fp16_accum`, fp16 is run with both accumulators."""
    return [
        Case(scene, c_in, c_out, dtype, flag)
        for scene in names
        for c_in, c_out in channels
        for dtype in dtypes
        for flag in ((False, True) if fp16_accum and dtype == "fp16" else (False,))
    ]


def run_case(case: Case, coords: torch.Tensor, repeats: int) -> dict[str, Any]:
    """Measures one case on coords (N, 4) int32 on the device to measure."""
    device, dtype, n = coords.device, formats.DTYPES[case.dtype], len(coords)
    clock = Clock(device, repeats)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, case.c_in, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
    weight = torch.randn(27, case.c_in, case.c_out, generator=generator, dtype=torch.float32, device="cpu")
    weight = (weight / math.sqrt(27 * case.c_in)).to(device, dtype)
    dy = torch.randn(n, case.c_out, generator=generator, dtype=torch.float32, device="cpu").to(device, dtype)
    voxels = voxmma.Voxels(coords, x)
    mapping = kernel_map(voxels.coord_set, 3)

    def conv(feats: torch.Tensor, w: torch.Tensor) -> voxmma.Voxels:
        return spatially_sparse_conv(
            voxels.with_feats(feats), w, kernel_size=3, use_fp16_accum=case.fp16_accum
        )

    with torch.no_grad():
        made = conv(x, weight)
        forward = clock(lambda i: conv(x, weight))
    x_leaf, weight_leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
    through_x, through_weight = conv(x_leaf, weight).feats, conv(x, weight_leaf).feats
    dgrad = clock(lambda i: torch.autograd.grad(through_x, x_leaf, dy, retain_graph=True))
    wgrad = clock(lambda i: torch.autograd.grad(through_weight, weight_leaf, dy, retain_graph=True))
    mapped = Clock(device, min(repeats, 10)).wall(lambda i: kernel_map(voxmma.CoordSet(coords), 3))
    record = voxmma.explain(made)
    error, limit = shadow.check(x, weight, None, mapping, made.feats, record)
    flops = 2 * mapping.num_pairs * case.c_in * case.c_out
    return {
        "scene": case.scene,
        "device": device.type,
        "voxels": n,
        "neighbours": mapping.num_pairs / max(n, 1),
        "c_in": case.c_in,
        "c_out": case.c_out,
        "dtype": case.dtype,
        **{key: value for key, value in record.as_dict().items() if key != "layer"},
        "forward_ms": forward.ms,
        "dgrad_ms": dgrad.ms,
        "wgrad_ms": wgrad.ms,
        "map_ms": mapped.ms,
        "map_mib": mapping.nbytes / 2**20,
        "forward_tflops": flops / forward.median / 1e12,
        "wgrad_tflops": flops / wgrad.median / 1e12,
        "rel_l2": error.rel_l2,
        "max_eta": error.max_eta,
        "max_rel": error.max_rel,
        "within_bound": error.within(limit),
    }


def run(
    wanted: Sequence[Case],
    device: torch.device,
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Measures every case; plain data: `environment`, `rows`. `repeats`: by default 30 on a GPU, else 3."""
    count = repeats or (30 if device.type == "cuda" else 3)
    coords: dict[str, torch.Tensor] = {}
    rows = []
    for case in wanted:
        advance(f"{case.scene} {case.c_in}x{case.c_out} {case.dtype}")
        if case.scene not in coords:
            large, small = SCENES[case.scene]
            coords[case.scene] = torch.from_numpy((large if device.type == "cuda" else small)()).to(device)
        rows.append(run_case(case, coords[case.scene], count))
    return {"kind": "bench", "environment": machine.environment(), "repeats": count, "rows": rows}


COLUMNS = (
    "scene", "voxels", "nbrs", "C", "dtype", "acc.", "tile", "forward", "dgrad", "wgrad", "map", "map MiB",
    "TFLOP/s", "rel-L2", "max eta",
)  # fmt: skip


def render(result: dict[str, Any]) -> Table:
    """The rows as a table."""
    where = result["environment"]
    on_gpu = any(row["device"] == "cuda" for row in result["rows"])
    device = where["gpus"][0] if on_gpu else f"{where['cpu']}, {where['threads']} threads"
    table = Table(title=f"3x3x3 submanifold layers, ms, on {device}")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in result["rows"]:
        table.add_row(
            row["scene"],
            f"{row['voxels']:,}",
            f"{row['neighbours']:.1f}",
            f"{row['c_in']}x{row['c_out']}",
            row["dtype"],
            row["accumulator"],
            row["tile"],
            *(f"{row[name]:.3g}" for name in ("forward_ms", "dgrad_ms", "wgrad_ms", "map_ms")),
            f"{row['map_mib']:.1f}",
            f"{row['forward_tflops']:.3g}",
            f"{row['rel_l2']:.1e}",
            f"{row['max_eta']:.1e}",
            style=None if row["within_bound"] else "bold red",
        )
    return table
