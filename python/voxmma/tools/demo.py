"""`voxmma demo`: a small U-Net-shaped stack on the shipped scan, in every precision mode of this machine.

`run` measures and returns plain data, `render` makes one table of it, `save` writes it as JSON and PNG.

What the figures mean. rel-L2, max_rel and grad rel-L2 (all gradients as one vector) compare the whole network
with an fp64 run of it on the same quantised weights and inputs, so they hold everything the mode rounds on
the way. max eta is per layer: each convolution's output against fp64 on exactly the operands that it was
given, the largest over all layers and cells; `of bound` is the largest share of its worst-case bound that a
layer used (accuracy.bound). Tile and accumulator are those of the widest layer; the JSON file has every
layer's.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

import voxmma
from voxmma._timing import Clock
from voxmma.data import scenes
from voxmma.nn import SparseConv3d
from voxmma.sparse.maps import kernel_map
from voxmma.tools.console import can_draw
from voxmma.tuning import machine
from voxmma.verify import accuracy, shadow

VOXEL_SIZE = 0.08
#: The layer whose tile and accumulator stand in the table: Stack.middle, which does most of the work.
WIDEST = 2


@dataclass(frozen=True)
class Mode:
    """A row of the table."""

    name: str
    dtype: torch.dtype
    use_fp16_accum: bool | None
    inference: bool = False
    """Run inside torch.inference_mode(), forward only."""


MODES = (
    Mode("fp32", torch.float32, None),
    Mode("bf16", torch.bfloat16, None),
    Mode("fp16, flag False", torch.float16, False),
    Mode("fp16, flag True", torch.float16, True),
    Mode("fp16, inference_mode", torch.float16, None, inference=True),
)


@dataclass(frozen=True)
class Call:
    """One convolution of a forward pass: the layer, what it was given and what it made."""

    name: str
    layer: SparseConv3d
    given: voxmma.Voxels
    made: voxmma.Voxels


class Stack(nn.Module):
    """Convolutions of growing width, a dilated one in the middle, a skip connection and a head."""

    def __init__(self, c_in: int, classes: int, use_fp16_accum: bool | None = None) -> None:
        super().__init__()

        def conv(a: int, b: int, kernel_size: int = 3, dilation: int = 1) -> SparseConv3d:
            return SparseConv3d(a, b, kernel_size, dilation=dilation, use_fp16_accum=use_fp16_accum)

        self.stem = conv(c_in, 32)
        self.encode = conv(32, 64)
        self.middle = conv(64, 64, dilation=2)
        self.decode = conv(64 + 32, 32)
        self.head = conv(32, classes, kernel_size=1)

    def forward(self, x: voxmma.Voxels, calls: list[Call] | None = None) -> voxmma.Voxels:
        """(N, c_in) -> (N, classes) features; appends every convolution to `calls`."""

        def apply(name: str, given: voxmma.Voxels) -> voxmma.Voxels:
            layer = getattr(self, name)
            made = layer(given)
            if calls is not None:
                calls.append(Call(name, layer, given, made))
            return made

        def relu(v: voxmma.Voxels) -> voxmma.Voxels:
            return v.with_feats(torch.relu(v.feats))

        skip = relu(apply("stem", x))
        deep = relu(apply("middle", relu(apply("encode", skip))))
        joined = deep.with_feats(torch.cat([deep.feats, skip.feats], dim=1))
        return apply("head", relu(apply("decode", joined)))


# ---- measuring ---------------------------------------------------------------------------------------------


def _gradients(stack: Stack, x: voxmma.Voxels, dy: Tensor) -> list[Tensor]:
    feats = x.feats.detach().requires_grad_()
    y = stack(x.with_feats(feats))
    return list(torch.autograd.grad(y.feats, [feats, *stack.parameters()], dy))


def _layer_error(call: Call) -> dict[str, Any]:
    """One layer against fp64 on the operands it was given, and what ran."""
    layer, record = call.layer, voxmma.explain(call.made)
    mapping = kernel_map(call.given.coord_set, layer.kernel_size, dilation=layer.dilation)
    x = call.given.feats.detach()
    bias = None if layer.bias is None else layer.bias.detach()
    error, limit = shadow.check(x, layer.weight.detach(), bias, mapping, call.made.feats.detach(), record)
    return {
        "name": call.name,
        **record.as_dict(),
        "max_eta": error.max_eta,
        "bound_eta": limit.eta,
        "within_bound": error.within(limit),
    }


def _run_mode(
    mode: Mode, master: dict[str, Tensor], scene: voxmma.Voxels, dy: Tensor, repeats: int
) -> dict[str, Any]:
    device, clock = scene.device, Clock(scene.device, repeats)

    def build(dtype: torch.dtype, flag: bool | None) -> Stack:
        with torch.device(device):
            stack = Stack(scene.feats.shape[1], dy.shape[1], flag).to(dtype)
        stack.load_state_dict({name: value.to(mode.dtype) for name, value in master.items()})
        return stack

    stack, exact = build(mode.dtype, mode.use_fp16_accum), build(torch.float64, None)
    given = scene.with_feats(scene.feats.to(mode.dtype))
    dy = dy.to(device, mode.dtype)
    calls: list[Call] = []
    with torch.inference_mode() if mode.inference else torch.no_grad():
        y = stack(given, calls)  # also builds and caches the kernel maps
        forward = clock(lambda i: stack(given)).ms
    wide = given.with_feats(given.feats.double())
    with torch.no_grad():
        y64 = exact(wide).feats
    whole = accuracy.errors(y.feats, y64, y64.abs())
    layers = [_layer_error(call) for call in calls]
    widest = layers[WIDEST]
    worst = max(layers, key=lambda entry: float(entry["max_eta"]))
    row: dict[str, Any] = {
        "mode": mode.name,
        "device": device.type,
        "tile": widest["tile"],
        "accumulator": widest["accumulator"],
        "requested": widest["requested"],
        "decided_by": widest["decided_by"],
        "reason": widest["reason"],
        "forward_ms": forward,
        "backward_ms": None,
        "rel_l2": whole.rel_l2,
        "max_rel": whole.max_rel,
        "nonfinite": whole.nonfinite,
        "grad_rel_l2": None,
        "max_eta": worst["max_eta"],
        "max_eta_layer": worst["name"],
        "of_bound": max(entry["max_eta"] / entry["bound_eta"] for entry in layers),
        "within_bound": whole.nonfinite == 0 and all(entry["within_bound"] for entry in layers),
        "layers": layers,
    }
    if not mode.inference:
        gradients = _gradients(stack, given, dy)
        both = clock(lambda i: _gradients(stack, given, dy)).ms
        row["backward_ms"] = max(both - forward, 0.0)
        row["grad_rel_l2"] = accuracy.rel_l2(gradients, _gradients(exact, wide, dy.double()))
    return row


def run(
    devices: list[torch.device],
    voxel_size: float = VOXEL_SIZE,
    repeats: int | None = None,
    advance: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Runs every mode on every device.

    Args:
        devices: where to run; see doctor.usable_devices().
        voxel_size: metres.
        repeats: timed runs per figure, the median counts; default 5 on a CPU, 20 on a GPU.
        advance: called with a short text before each of the len(devices) * len(MODES) steps.

    Returns:
        plain data: `environment`, `scene`, `rows` (one per device and mode, with every layer's record).
    """
    scan = scenes.load_scan()
    points, feats = torch.from_numpy(scan.points), torch.from_numpy(scan.features())
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        with torch.device("cpu"):
            weights = Stack(4, 8).float().state_dict()
        master = {name: value.detach().double() for name, value in weights.items()}
    rows = []
    described: dict[str, Any] = {}
    for device in devices:
        voxels = voxmma.Voxels.from_points([points.to(device)], [feats.to(device)], voxel_size=voxel_size)
        if not described:
            pairs = kernel_map(voxels.coord_set, 3).num_pairs
            described = {
                "name": "scan",
                "points": len(points),
                "voxel_size": voxel_size,
                "voxels": voxels.num_voxels,
                "neighbours_3x3x3": pairs / max(voxels.num_voxels, 1),
            }
        dy = (
            torch.randn(voxels.num_voxels, 8, generator=generator, dtype=torch.float64, device="cpu")
            / voxels.num_voxels**0.5
        )
        count = repeats or (20 if device.type == "cuda" else 5)
        for mode in MODES:
            advance(f"{device.type}: {mode.name}")
            rows.append(_run_mode(mode, master, voxels, dy, count))
    return {"kind": "demo", "environment": machine.environment(), "scene": described, "rows": rows}


# ---- showing -----------------------------------------------------------------------------------------------

COLUMNS = (
    "mode", "device", "tile", "accumulator", "decided by", "forward", "backward", "rel-L2", "grad rel-L2",
    "max eta", "of bound", "max_rel",
)  # fmt: skip


def cells(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of `run` as text, in the order of COLUMNS."""

    def number(value: float | None, pattern: str) -> str:
        return "–" if value is None else format(value, pattern)

    def milliseconds(value: float | None) -> str:
        return "–" if value is None else f"{value:.3g} ms" if value < 100 else f"{value:.0f} ms"

    return (
        row["mode"],
        row["device"],
        row["tile"],
        row["accumulator"],
        row["decided_by"],
        milliseconds(row["forward_ms"]),
        milliseconds(row["backward_ms"]),
        number(row["rel_l2"], ".1e"),
        number(row["grad_rel_l2"], ".1e"),
        number(row["max_eta"], ".1e"),
        number(row["of_bound"], ".0%"),
        number(row["max_rel"], ".1e"),
    )


def title(result: dict[str, Any]) -> str:
    scene, where = result["scene"], result["environment"]
    devices = {row["device"] for row in result["rows"]}
    names = ([where["cpu"]] if "cpu" in devices else []) + (where["gpus"][:1] if "cuda" in devices else [])
    return (
        f"{scene['voxels']:,} voxels of {scene['voxel_size']} m, "
        f"{scene['neighbours_3x3x3']:.1f} neighbours each; "
        f"{' and '.join(names)}; torch {where['torch']}"
    )


def render(result: dict[str, Any]) -> Table:
    """The one table of the demo."""
    table = Table(title=title(result))
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for row in result["rows"]:
        table.add_row(*cells(row), style=None if row["within_bound"] else "bold red")
    return table


def save(result: dict[str, Any], folder: Path) -> list[Path]:
    """Writes demo.json and, with matplotlib, demo.png into `folder`, which is made if it does not exist."""
    folder.mkdir(parents=True, exist_ok=True)
    data, picture = folder / "demo.json", folder / "demo.png"
    data.write_text(json.dumps(result, indent=1) + "\n")
    if not can_draw():
        return [data]
    _draw(result, picture)
    return [data, picture]


def _draw(result: dict[str, Any], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = result["rows"]
    figure = Figure(figsize=(15, 6.2 + 0.28 * len(rows)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=(5, 0.9 + 0.28 * len(rows)))
    figure.suptitle(title(result))

    scan = scenes.load_scan()
    shown = (scan.labels != scenes.CLASSES.index("ceiling")) & (scan.points[:, 1] > 0.02)
    view: Any = figure.add_subplot(grid[0, 0], projection="3d")
    view.scatter(*scan.points[shown].T, c=scan.colors[shown] / 255, s=0.7, linewidths=0)
    view.set_box_aspect(scan.points.max(axis=0) - scan.points.min(axis=0), zoom=1.5)
    view.view_init(48, -72)
    view.set_axis_off()
    view.set_title("the scan, without its ceiling and front wall")

    bars = figure.add_subplot(grid[0, 1])
    places = range(len(rows))
    bars.barh([p - 0.2 for p in places], [r["rel_l2"] for r in rows], 0.4, label="rel-L2 of the network")
    bars.barh([p + 0.2 for p in places], [r["max_eta"] for r in rows], 0.4, label="max eta of a layer")
    bars.set_yticks(list(places), [f"{r['mode']} ({r['device']}, {r['accumulator']} acc.)" for r in rows])
    bars.invert_yaxis()
    bars.set_xscale("log")
    bars.set_xlabel("error against fp64")
    bars.legend(loc="upper right", fontsize="small")

    below = figure.add_subplot(grid[1, :])
    below.set_axis_off()
    table = below.table([cells(row) for row in rows], colLabels=COLUMNS, loc="center", cellLoc="left")
    table.auto_set_font_size(False)
    table.set_fontsize(8)
    table.auto_set_column_width(list(range(len(COLUMNS))))
    table.scale(1, 1.3)
    figure.savefig(path, dpi=110)
