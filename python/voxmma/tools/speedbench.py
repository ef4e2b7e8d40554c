"""`voxmma bench --config speed.yaml`: whole networks under different precision settings, side by side.

Variants take turns (interleaved, in rotating order), so that drift of clocks and temperature hits all alike.
Every row has its error against the float64 network beside its time. Switches are set for a variant's turn
only and put back exactly; the state before and after the whole run is compared.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
import yaml  # type: ignore[import-untyped, unused-ignore]
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from rich.table import Table
from torch import nn
from torch.nn import functional as F

from voxmma import nn as sparse
from voxmma import torchflags
from voxmma._timing import synchronise
from voxmma.data import scenes
from voxmma.dispatch import settings
from voxmma.models.blocks import conv_norm
from voxmma.nn.functional import cat
from voxmma.precision.policy import PrecisionPolicy
from voxmma.sparse.tensor import Voxels
from voxmma.tools.console import Json, progress, show
from voxmma.tuning import machine
from voxmma.verify import accuracy


class ConfigError(ValueError):
    """A configuration file that cannot be used; the message lists every fault with its place."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Compile(_Strict):
    """How torch.compile is called."""

    enabled: bool = True
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    options: dict[str, bool | int | str] = Field(default_factory=dict)
    dynamic: bool | None = None
    fullgraph: bool = False
    backend: str = "inductor"

    @model_validator(mode="after")
    def _one_of(self) -> Compile:
        if self.mode is not None and self.options:
            raise ValueError("torch.compile takes mode or options, not both")
        return self


class Optimizer(_Strict):
    """The optimiser of training steps."""

    name: Literal["adamw", "sgd"] = "adamw"
    fused: bool = False
    lr: float = Field(default=1e-3, gt=0)


class Variant(_Strict):
    """One way to run a network.

    ``precision``: fp32, or autocast to fp16 or bf16 around forward and loss (fp16 training with a
    GradScaler); auto is bf16 on GPUs of capability 8.0 and later, fp16 on older ones, fp32 on a CPU.
    ``tf32_matmul_precision`` is PyTorch's word: highest is IEEE float32, also for convolutions.
    """

    precision: Literal["fp16", "bf16", "fp32", "auto"] = "fp32"
    tf32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    compile: Compile = Compile(enabled=False)
    optimizer: Optimizer = Optimizer()
    sdp_backend: Literal["auto", "flash", "mem_efficient", "math", "cudnn"] = "auto"
    fp16_accum: bool | None = None

    @field_validator("compile", mode="before")
    @classmethod
    def _switch(cls, value: Any) -> Any:
        return {"enabled": value} if isinstance(value, bool) else value


class Config(_Strict):
    """A benchmark: what to run, how often, and the ways to compare with the first, ``baseline``."""

    workloads: tuple[Literal["mlp", "transformer", "classifier", "sparse_unet"], ...] = Field(
        default=("mlp",), min_length=1
    )
    scale: Literal["full", "small", "auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    mode: Literal["train", "infer"] = "train"
    rounds: int = Field(default=10, ge=2)
    steps: int = Field(default=5, ge=1)
    warmup: int = Field(default=3, ge=1)
    seed: int = 0
    baseline: Variant = Variant()
    variants: dict[str, Variant] = Field(default_factory=dict)

    @field_validator("variants")
    @classmethod
    def _free_name(cls, value: dict[str, Variant]) -> dict[str, Variant]:
        if "baseline" in value:
            raise ValueError("'baseline' is the name of the first row")
        return value


def load(text: str) -> Config:
    """Reads YAML. Raises ConfigError naming each unknown key or bad value."""
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError("a configuration is a mapping of keys to values")
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        faults = (f"{'.'.join(map(str, e['loc'])) or 'file'}: {e['msg']}" for e in error.errors())
        raise ConfigError("\n".join(faults)) from None


# ---------------------------------------------------------------- networks
@dataclass
class Workload:
    """A network with one batch: ``model(*inputs)`` gives the outputs, ``loss(outputs)`` a scalar."""

    name: str
    size: str
    model: nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[[torch.Tensor], torch.Tensor]


class _Transformer(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(length, width, dtype=torch.float32, device="cpu"))
        block = nn.TransformerEncoderLayer(width, width // 32, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.blocks(self.token(tokens) + self.position))
        return out


class _Classifier(nn.Module):
    """A residual network for images."""

    def __init__(self, width: int, blocks: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        self.down = nn.ModuleList(nn.Conv2d(width << i, width << (i + 1), 3, 2, 1) for i in range(blocks))
        self.same = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width << (i + 1), width << (i + 1), 3, padding=1),
                nn.BatchNorm2d(width << (i + 1)),
                nn.ReLU(),
            )
            for i in range(blocks)
        )
        self.head = nn.Linear(width << blocks, classes)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.stem(image)
        for down, same in zip(self.down, self.same, strict=True):
            x = down(x)
            x = x + same(x)
        out: torch.Tensor = self.head(x.mean((2, 3)))
        return out


class SparseUNet(nn.Module):
    """A U-Net on voxels: Voxels (N, channels) to logits (N, classes).

    ``levels`` times down with strided convolutions, twice as wide each time, and up again with transposed
    ones onto the voxels of the level, whose features are joined to theirs.
    """

    def __init__(self, channels: int, width: int, classes: int, levels: int = 2) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.stem = conv_norm(channels, width, 3)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList(
            sparse.Sequential(conv_norm(a, b, 2, 2), conv_norm(b, b, 3)) for a, b in pairs
        )
        self.up = nn.ModuleList(
            sparse.SparseConvTranspose3d(b, a, 2, stride=2, bias=False) for a, b in reversed(pairs)
        )
        self.merge = nn.ModuleList(conv_norm(2 * a, a, 3) for a, _ in reversed(pairs))
        self.head = nn.Linear(width, classes)

    def forward(self, voxels: Voxels) -> torch.Tensor:
        x = self.stem(voxels)
        skips = []
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, merge, skip in zip(self.up, self.merge, reversed(skips), strict=True):
            x = merge(cat(up(x, coords=skip), skip))
        out: torch.Tensor = self.head(x.feats)
        return out


def _mlp(full: bool) -> Workload:
    def wide(out: torch.Tensor) -> torch.Tensor:
        return out if out.dtype == torch.float64 else out.float()

    width, batch = (8192, 512) if full else (256, 64)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    target = torch.randn(batch, width, dtype=torch.float32, device="cpu")
    return Workload(
        "mlp",
        f"3 x Linear({width}, {width}), batch {batch}",
        model,
        (torch.randn(batch, width, dtype=torch.float32, device="cpu"),),
        lambda out: F.mse_loss(wide(out), target.to(wide(out))),
    )


def _transformer(full: bool) -> Workload:
    vocabulary, width, layers, length, batch = (4096, 512, 6, 256, 16) if full else (128, 64, 2, 32, 4)
    tokens = torch.randint(vocabulary, (batch, length + 1), device="cpu")
    return Workload(
        "transformer",
        f"{layers} layers of {width}, {batch} x {length} tokens",
        _Transformer(vocabulary, width, layers, length),
        (tokens[:, :-1],),
        lambda out: F.cross_entropy(out.flatten(0, 1), tokens[:, 1:].reshape(-1).to(out.device)),
    )


def _classifier(full: bool) -> Workload:
    width, blocks, size, batch = (64, 3, 64, 64) if full else (8, 2, 16, 8)
    labels = torch.randint(10, (batch,), device="cpu")
    return Workload(
        "classifier",
        f"residual, {blocks} stages from {width} channels, {batch} images of {size} x {size}",
        _Classifier(width, blocks, 10),
        (torch.randn(batch, 3, size, size, dtype=torch.float32, device="cpu"),),
        lambda out: F.cross_entropy(out, labels.to(out.device)),
    )


def _sparse_unet(full: bool) -> Workload:
    width, levels = (64, 3) if full else (16, 2)
    scene = scenes.room(rooms=4, rays=600_000) if full else scenes.room(rays=4_000)
    coords = torch.from_numpy(scene.coords(0.03 if full else 0.12))
    labels = torch.randint(len(scenes.CLASSES), (len(coords),), device="cpu")
    return Workload(
        "sparse_unet",
        f"U-Net of {levels + 1} levels from {width} channels, {len(coords)} voxels",
        SparseUNet(4, width, len(scenes.CLASSES), levels),
        (Voxels(coords, torch.randn(len(coords), 4, dtype=torch.float32, device="cpu")),),
        lambda out: F.cross_entropy(out, labels.to(out.device)),
    )


_WORKLOADS = {
    "mlp": _mlp,
    "transformer": _transformer,
    "classifier": _classifier,
    "sparse_unet": _sparse_unet,
}


def _moved(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """An input on ``device``, floats in ``dtype``."""
    if isinstance(value, Voxels):
        moved = value.to(device)
        return moved.with_feats(moved.feats.to(dtype)) if dtype else moved
    return value.to(device, dtype if value.is_floating_point() else None)


# ---------------------------------------------------------------- one variant
def resolve_precision(precision: str, device: torch.device) -> str:
    """What ``auto`` is on ``device``; anything else is itself."""
    if precision != "auto":
        return precision
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"


_POLICIES = {
    "fp32": PrecisionPolicy.always_f32,
    "fp16": PrecisionPolicy.auto_mixed_conservative,
    "bf16": PrecisionPolicy.auto_mixed_bf16,
}


@contextlib.contextmanager
def _switches(variant: Variant) -> Iterator[None]:
    """The process-wide switches of a variant, put back exactly."""
    with torchflags.preserved(), settings.override(fp16_accum=variant.fp16_accum):
        torchflags.set_tf32(variant.tf32_matmul_precision != "highest")
        torch.set_float32_matmul_precision(variant.tf32_matmul_precision)
        if variant.sdp_backend != "auto":
            for name in ("flash", "mem_efficient", "math", "cudnn"):
                torchflags.set_flag(f"sdp.{name}", name == variant.sdp_backend)
        yield


class _Runner:
    """A variant with its own copy of the network, ready to take steps."""

    def __init__(
        self, name: str, variant: Variant, work: Workload, config: Config, device: torch.device
    ) -> None:
        self.name = name
        self.variant = variant
        self.work = work
        self.device = device
        self.training = config.mode == "train"
        self.precision = resolve_precision(variant.precision, device)
        self.model = copy.deepcopy(work.model).to(device).train(self.training)
        self.inputs = tuple(_moved(value, device) for value in work.inputs)
        how = variant.compile
        self.call: Callable[..., torch.Tensor] = self.model
        if how.enabled:
            self.call = torch.compile(
                self.model,
                mode=how.mode,
                options=dict(how.options) or None,
                dynamic=how.dynamic,
                fullgraph=how.fullgraph,
                backend=how.backend,
            )
        kind = torch.optim.AdamW if variant.optimizer.name == "adamw" else torch.optim.SGD
        self.optimizer: torch.optim.Optimizer = kind(
            self.model.parameters(), lr=variant.optimizer.lr, fused=variant.optimizer.fused or None
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.training and self.precision == "fp16")
        self.samples: list[float] = []

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor]:
        compute = _POLICIES[self.precision].forward.input
        with torch.autocast(
            self.device.type, compute.dtype if compute.is_half else torch.bfloat16, enabled=compute.is_half
        ):
            out = self.call(*self.inputs)
            return out, self.work.loss(out)

    def step(self) -> None:
        """One training step, or one forward pass."""
        if not self.training:
            with torch.no_grad():
                self._forward()
            return
        self.optimizer.zero_grad(set_to_none=True)
        _, loss = self._forward()
        self.scaler.scale(loss).backward()
        # torch counts steps in tensors on the default device, made in the first step
        with contextlib.nullcontext() if self.optimizer.state else torch.device("cpu"):
            self.scaler.step(self.optimizer)
        self.scaler.update()

    def first(self) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Output, loss and, in training, unscaled gradients of the untouched network, in float64."""
        with torch.set_grad_enabled(self.training):
            out, loss = self._forward()
        grads: list[torch.Tensor] = []
        if self.training:
            scale = self.scaler.get_scale() if self.scaler.is_enabled() else 1.0
            self.scaler.scale(loss).backward()
            grads = [p.grad.double() / scale for p in self.model.parameters() if p.grad is not None]
            self.optimizer.zero_grad(set_to_none=True)
        return out.detach().double(), loss.detach().double(), grads

    def sample(self, steps: int, paranoid: bool) -> None:
        """Times ``steps`` steps, keeps seconds per step; ``paranoid`` waits for the device after each."""
        synchronise(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
            if paranoid:
                synchronise(self.device)
        synchronise(self.device)
        self.samples.append((time.perf_counter() - start) / steps)


def _reference(
    work: Workload, config: Config, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
    """Output, loss and gradients of the float64 network."""
    model = copy.deepcopy(work.model).to(device).double().train(config.mode == "train")
    inputs = tuple(_moved(value, device, torch.float64) for value in work.inputs)
    out = model(*inputs)
    loss = work.loss(out)
    grads: list[torch.Tensor] = []
    if config.mode == "train":
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
    return out.detach(), loss.detach(), grads


def _errors(
    found: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]],
    wanted: tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]],
) -> dict[str, Any]:
    """How far one forward (and backward) is from the float64 one."""
    out, reference = found[0], wanted[0]
    return {
        "out_rel_l2": accuracy.rel_l2([out], [reference]),
        "out_max_error": float((out - reference).abs().max() / reference.abs().max()),
        "loss_rel_error": abs(float(found[1] - wanted[1]) / float(wanted[1])),
        "grad_rel_l2": accuracy.rel_l2(found[2], wanted[2]) if wanted[2] else None,
        "nonfinite": int((~torch.isfinite(out)).sum()),
    }


# ---------------------------------------------------------------- all of it
def _quartiles(samples: list[float]) -> tuple[float, float]:
    cut = statistics.quantiles(samples, n=4, method="inclusive")
    return cut[0], cut[2]


def _row(
    runner: _Runner, base: _Runner, work: Workload, errors: Mapping[str, Any], first: float
) -> dict[str, Any]:
    low, high = _quartiles(runner.samples)
    ratios = [b / s for b, s in zip(base.samples, runner.samples, strict=True)]
    return {
        "workload": work.name,
        "size": work.size,
        "variant": runner.name,
        "precision": runner.precision,
        "settings": runner.variant.model_dump(),
        "median_ms": statistics.median(runner.samples) * 1e3,
        "quartiles_ms": [low * 1e3, high * 1e3],
        "min_ms": min(runner.samples) * 1e3,
        "max_ms": max(runner.samples) * 1e3,
        "speedup": statistics.median(ratios),
        "speedup_quartiles": list(_quartiles(ratios)),
        "first_call_s": first,
        **errors,
    }


def run(
    config: Config, paranoid: bool = False, advance: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """Runs the benchmark.

    Args:
        config: what to run.
        paranoid: wait for the device after every step and compare all switches after every turn.
        advance: called with a short text once per workload and round.

    Returns JSON types: ``rows``, ``environment``, ``state`` (``differences`` of the switches after the run
    from those before it; empty = as before). A variant that cannot run here has a row with ``failed`` instead
    of figures. Raises ConfigError when the device is not there.
    """
    cuda = torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise ConfigError("device: cuda was asked for but is not there")
    device = torch.device("cpu" if config.device == "cpu" or not cuda else "cuda")
    full = config.scale == "full" or (config.scale == "auto" and device.type == "cuda")
    before, settings_before = torchflags.snapshot(), settings.snapshot()
    rows: list[dict[str, Any]] = []
    for name in config.workloads:
        torch.manual_seed(config.seed)
        with torch.device("cpu"):
            work = _WORKLOADS[name](full)
        work.model.float()  # whatever the default dtype
        reference = _reference(work, config, device)
        runners: list[tuple[_Runner, dict[str, Any], float]] = []
        for label, variant in {"baseline": config.baseline, **config.variants}.items():
            try:
                with _switches(variant):
                    runner = _Runner(label, variant, work, config, device)
                    start = time.perf_counter()
                    errors = _errors(runner.first(), reference)
                    synchronise(device)
                    first = time.perf_counter() - start
                    for _ in range(config.warmup):
                        runner.step()
            except RuntimeError as error:
                if label == "baseline":
                    raise
                rows.append({"workload": name, "variant": label, "failed": str(error).splitlines()[0]})
                continue
            runners.append((runner, errors, first))
        for turn in range(config.rounds):
            advance(f"{name}, round {turn + 1}")
            shift = turn % len(runners)
            for runner, _, _ in runners[shift:] + runners[:shift]:
                with _switches(runner.variant):
                    runner.sample(config.steps, paranoid)
                if paranoid and (moved := before.differences(torchflags.snapshot())):
                    raise torchflags.FlagsError(f"after {runner.name}: " + "; ".join(map(str, moved)))
        rows += [_row(runner, runners[0][0], work, errors, first) for runner, errors, first in runners]
    left = [str(difference) for difference in before.differences(torchflags.snapshot())]
    if settings.snapshot() != settings_before:
        left.append(f"voxmma settings: {settings_before} became {settings.snapshot()}")
    return {
        "environment": machine.environment(),
        "device": str(device),
        "config": config.model_dump(),
        "paranoid": paranoid,
        "rows": rows,
        "state": {"differences": left},
    }


def render(result: Mapping[str, Any]) -> Table:
    """The rows for a terminal."""
    table = Table(title=f"{result['config']['mode']} steps on {result['device']}")
    for head in (
        "workload",
        "variant",
        "precision",
        "median ms",
        "quartiles",
        "speed-up",
        "out rel-L2",
        "max error",
    ):
        table.add_column(head, justify="left" if head in ("workload", "variant", "precision") else "right")
    table.add_column("grad rel-L2", justify="right")
    for row in result["rows"]:
        if "failed" in row:
            table.add_row(row["workload"], row["variant"], "failed", row["failed"])
            continue
        low, high = row["quartiles_ms"]
        table.add_row(
            row["workload"],
            row["variant"],
            row["precision"],
            f"{row['median_ms']:.3f}",
            f"{low:.3f} - {high:.3f}",
            f"{row['speedup']:.2f}",
            f"{row['out_rel_l2']:.1e}",
            f"{row['out_max_error']:.1e}",
            "" if row["grad_rel_l2"] is None else f"{row['grad_rel_l2']:.1e}",
        )
    return table


_CONFIG = typer.Option(help="YAML file; the keys are in docs/bench.md.")


def command(
    config: Annotated[Path, _CONFIG],
    paranoid: Annotated[
        bool, typer.Option("--paranoid", help="Wait after every step, check switches after every turn.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the JSON here.")] = None,
    as_json: Json = False,
) -> None:
    """Time whole networks under the precision settings of a file, each with its error against float64.

    Exit code 1 if a variant failed or the switches of PyTorch are not as before, 2 for a bad file.
    """
    try:
        wanted = load(config.read_text())
        with progress(len(wanted.workloads) * wanted.rounds) as advance:
            result = run(wanted, paranoid, advance)
    except OSError as error:
        typer.echo(f"{config}: {error.strerror}", err=True)
        raise typer.Exit(2) from None
    except ConfigError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    show(result, render(result), as_json)
    bad = result["state"]["differences"] + [r["failed"] for r in result["rows"] if "failed" in r]
    for line in bad:
        typer.echo(line, err=True)
    if bad:
        raise typer.Exit(1)
