"""All that a run can be told: each field is an option of `segment.py train`, and lies in its checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from common import parse_schedule
from segmentation.data import Augment, EvaluationScans, TrainingScans
from segmentation.formats import FORMATS, ScanFolder, format_of
from voxmma import models
from voxmma.models import MINKUNETS, SparseUNet
from voxmma.precision.policy import Precision
from voxmma.precision.schedule import parse_schedule as complete

MODELS: dict[str, Callable[[int, int], nn.Module]] = {
    "spunet": models.spunet,
    "small": partial(
        SparseUNet, channels=(32, 64, 64, 32), blocks=(1,) * 4, stem_channels=16, stem_kernels=(3,)
    ),
    **{f"minkunet{name}": partial(models.minkunet, name) for name in MINKUNETS},
}
PRECISIONS = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
OPTIMISERS = ("adamw", "sgd")
#: Edge of a voxel in metres, where nothing else is asked for.
VOXEL_SIZES = {"kitti": 0.05, "scannet": 0.02}
#: What may differ between a run and its continuation.
FREE = {
    "data",
    "out",
    "resume",
    "device",
    "workers",
    "fsdp",
    "save_every",
    "eval_every",
    "log_every",
    "audit",
    "export",
}


def option(panel: str, text: str, **rules: Any) -> Any:
    """A typer option with help, below a heading."""
    return typer.Option(help=text, rich_help_panel=panel, **rules)


_DATA, _NET, _TRAIN, _PRECISION, _RUN = "Data", "Network", "Training", "Precision", "Run"


@dataclass(frozen=True)
class Settings:
    """Options. Numbers of scans are of all processes together."""

    data: Annotated[
        Path, typer.Argument(help="Folder in SemanticKITTI's format or Pointcept's layout of ScanNet.")
    ]
    format: Annotated[str | None, option(_DATA, "kitti or scannet; default: what the folder looks like.")] = (
        None
    )
    train_on: Annotated[
        str | None,
        option(_DATA, "Sequences or splits, with commas. Default: all that have labels but --val-on."),
    ] = None
    val_on: Annotated[
        str | None, option(_DATA, "Sequences or splits to evaluate on. Default: 08, or val.")
    ] = None
    voxel_size: Annotated[
        float | None, option(_DATA, "Edge of a voxel in metres. Default: 0.05 (kitti), 0.02 (scannet).")
    ] = None
    features: Annotated[
        str | None,
        option(
            _DATA,
            "With commas, of coord, intensity, color, normal. Default: coord,intensity or color,normal.",
        ),
    ] = None
    max_points: Annotated[
        int, option(_DATA, "Train on this many points of a scan, those around a random one; 0: all.", min=0)
    ] = 0
    flip: Annotated[bool, option(_DATA, "Mirror scans in x and y at random.")] = True
    rotate: Annotated[bool, option(_DATA, "Turn scans about the vertical.")] = True
    scale: Annotated[float, option(_DATA, "Stretch scans by up to this share.", min=0, max=0.9)] = 0.1
    jitter: Annotated[float, option(_DATA, "Move points by normal deviates of so many metres.", min=0)] = (
        0.005
    )
    elastic: Annotated[float, option(_DATA, "Bend scans smoothly by up to so many metres.", min=0)] = 0.0
    workers: Annotated[int, option(_DATA, "Worker processes of each loader.", min=0)] = 2

    model: Annotated[str, option(_NET, f"One of {', '.join(MODELS)}.")] = "spunet"
    sync_bn: Annotated[bool, option(_NET, "BatchNorm statistics of all processes together.")] = True

    epochs: Annotated[int, option(_TRAIN, "Passes over the scans.", min=1)] = 50
    batch: Annotated[int, option(_TRAIN, "Scans a step.", min=1)] = 4
    accumulate: Annotated[
        int, option(_TRAIN, "Portions that a step is computed in, to save memory.", min=1)
    ] = 1
    optimiser: Annotated[str, option(_TRAIN, f"One of {', '.join(OPTIMISERS)}.")] = "adamw"
    lr: Annotated[
        float, option(_TRAIN, "Largest rate: reached after a fifth of the steps, then a cosine to 0.")
    ] = 2e-3
    weight_decay: Annotated[float, option(_TRAIN, "Weight decay.", min=0)] = 5e-3
    clip: Annotated[float, option(_TRAIN, "Largest norm of the gradient; 0: no limit.", min=0)] = 10.0
    seed: Annotated[int, option(_TRAIN, "Start of the network, order and augmentation of scans.", min=0)] = 0

    precision: Annotated[
        str,
        option(
            _PRECISION, "fp32, fp64 (whole network), or autocast to fp16 (with a gradient scaler) or bf16."
        ),
    ] = "fp32"
    policy: Annotated[
        str | None,
        option(_PRECISION, "A policy in place of autocast, or a schedule STEP=POLICY,...; docs/policy.md."),
    ] = None
    fp16_accum: Annotated[
        bool | None,
        option(_PRECISION, "Sums of fp16 products in fp16 where legal, or never. Default: unset."),
    ] = None
    fp16_rescale: Annotated[
        bool, option(_PRECISION, "Operands of fp16 sums scaled so that none overflows.")
    ] = False
    allow_tf32: Annotated[bool, option(_PRECISION, "TF32 for fp32 products, PyTorch's too.")] = False
    audit: Annotated[bool, option(_PRECISION, "Print every launch of the first step.")] = False
    shadow: Annotated[
        int, option(_PRECISION, "Compare one call in so many of each layer with fp64; 0: none.", min=0)
    ] = 0

    device: Annotated[str | None, option(_RUN, "cpu or cuda. Default: cuda where there is one.")] = None
    out: Annotated[Path, option(_RUN, "Folder of the run: checkpoints, curves, engine.")] = Path(
        "runs/segment"
    )
    resume: Annotated[bool, option(_RUN, "Go on from OUT/last.pt if it is there; else begin.")] = False
    fsdp: Annotated[bool, option(_RUN, "Shard parameters over the processes (FSDP2) instead of DDP.")] = False
    save_every: Annotated[
        int, option(_RUN, "Steps between checkpoints; 0: only after evaluations.", min=0)
    ] = 0
    eval_every: Annotated[int, option(_RUN, "Epochs between evaluations.", min=1)] = 1
    log_every: Annotated[
        int, option(_RUN, "Steps between looks at the loss (each waits for the GPU).", min=1)
    ] = 10
    export: Annotated[bool, option(_RUN, "Write an engine at the end, and check it.")] = True

    def check(self) -> None:
        """typer.BadParameter for what does not go together."""
        for name, value, known in (
            ("--format", self.format, [None, *FORMATS]),
            ("--model", self.model, MODELS),
            ("--optimiser", self.optimiser, OPTIMISERS),
            ("--precision", self.precision, PRECISIONS),
            ("--device", self.device, [None, "cpu", "cuda"]),
        ):
            refuse(value not in known, name, f"{value!r} is none of {', '.join(filter(None, known))}")
        refuse(self.lr <= 0, "--lr", f"{self.lr} is not positive")
        refuse((self.voxel_size or 1) <= 0, "--voxel-size", f"{self.voxel_size} is not positive")
        refuse(self.policy is not None and self.precision != "fp32", "--policy", "excludes --precision")
        refuse(self.fsdp and self.policy is not None, "--policy", "does not go with --fsdp")
        try:
            self.schedule()
        except (KeyError, ValueError) as error:
            raise typer.BadParameter(f"{self.policy!r}: {error}", param_hint="--policy") from None

    def as_dict(self) -> dict[str, Any]:
        """Plain types."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """The inverse of `as_dict`."""
        return cls(**{**values, "data": Path(values["data"]), "out": Path(values["out"])})

    # ---- what follows from them

    def kind(self) -> str:
        """The format of the folder."""
        return self.format or format_of(self.data)

    def folder(self, training: bool) -> ScanFolder:
        """The scans to train or to evaluate on."""
        reader = FORMATS[self.kind()]
        val = (self.val_on or {"kitti": "08", "scannet": "val"}[self.kind()]).split(",")
        if not training:
            return reader(self.data, val)
        parts = self.train_on.split(",") if self.train_on else sorted({*reader.all_parts(self.data)} - {*val})
        refuse(not parts, "--train-on", f"{self.data} has labels of {', '.join(val)} alone")
        return reader(self.data, parts)

    def cell(self) -> float:
        """Edge of a voxel."""
        return VOXEL_SIZES[self.kind()] if self.voxel_size is None else self.voxel_size

    def columns(self) -> list[str]:
        """Names of the features."""
        return self.features.split(",") if self.features else [*FORMATS[self.kind()].features]

    def dtype(self) -> torch.dtype:
        """Of parameters and features."""
        return torch.float64 if self.precision == "fp64" else torch.float32

    def training_scans(self) -> TrainingScans:
        """Augmented, with the classes of voxels."""
        augment = Augment(self.flip, self.rotate, self.scale, self.jitter, self.elastic)
        rest = augment, self.max_points, self.seed, self.dtype()
        return TrainingScans(self.folder(True), self.cell(), self.columns(), *rest)

    def evaluation_scans(self) -> EvaluationScans:
        """As they are, with the classes of points."""
        return EvaluationScans(self.folder(False), self.cell(), self.columns(), self.dtype())

    def network(self, channels: int, classes: int) -> nn.Module:
        """A new network: (N, channels) -> (N, classes)."""
        return MODELS[self.model](channels, classes).to(self.dtype())

    def autocast(self, device: torch.device) -> torch.autocast:
        """For forward and loss."""
        low = self.precision in ("fp16", "bf16")
        return torch.autocast(device.type, PRECISIONS[self.precision] if low else None, enabled=low)

    def schedule(self) -> dict[int, Any] | None:
        """Policies by step."""
        if self.policy is None:
            return None
        return complete(parse_schedule(self.policy if "=" in self.policy else f"0={self.policy}"))

    def scales(self) -> bool:
        """Whether gradients are fp16 at times, and so need a scaler."""
        policies: Iterable[Any] = (self.schedule() or {}).values()
        return self.precision == "fp16" or any(one.forward.input is Precision.F16 for one in policies)


def refuse(bad: bool, name: str, why: str) -> None:
    """typer.BadParameter where `bad`."""
    if bad:
        raise typer.BadParameter(why, param_hint=name)
