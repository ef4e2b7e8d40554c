"""What the training examples share: flags, the loop, the table, the picture and the record.

Every example trains the same network on the same batches once per policy and seed: a seed fixes the start and
the order of the batches, so runs of one seed differ in precision alone. A schedule replaces the policies:
``--schedule 0=auto_mixed,80=always_f32``.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from voxmma.precision.policy import NAMED, ComputeSpec, Precision, PrecisionPolicy, as_policy
from voxmma.precision.schedule import PolicyScheduler
from voxmma.tuning import machine

_HALF = PrecisionPolicy.auto_mixed
#: The named policies, and auto_mixed with other accumulators in the sparse layers.
POLICIES = {
    **NAMED,
    "fp16_sum": _HALF.with_compute(ComputeSpec(Precision.F16, Precision.F16)),
    "fp16_promoted": _HALF.with_compute(ComputeSpec(Precision.F16, Precision.F16, chunk=64)),
}
BLOCK = 5  # steps that one point of a loss curve averages


@dataclass
class Task:
    """What to train.

    ``batch(step)`` gives (inputs, targets); steps -1 to -held_out are held-out batches. ``loss`` takes
    (logits, targets), targets counting the last dimension of the logits. ``lr``: largest learning rate.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    steps: int
    held_out: int = 4
    lr: float = 2e-3
    policies: str = "always_f32,auto_mixed"


def default_policies(device: torch.device) -> str:
    """What dense networks are trained under: CPUs multiply fp16 slowly, so not that there."""
    if device.type == "cuda":
        return "always_f32,auto_mixed_conservative,auto_mixed,auto_mixed_bf16"
    return "always_f32,auto_mixed_bf16"


@dataclass
class Outcome:
    """One training run.

    Attributes:
        losses: of every step.
        accuracy: share of held-out targets that are right.
        iou: intersection over union, averaged over the classes that occur among the held-out targets.
        skipped: steps that the gradient scaler skipped because a gradient was not finite.
        seconds: of the training loop.
    """

    losses: list[float]
    accuracy: float
    iou: float
    skipped: int
    seconds: float

    def curve(self) -> list[float]:
        """Mean loss of every `BLOCK` steps (and of the rest)."""
        return [statistics.fmean(self.losses[i : i + BLOCK]) for i in range(0, len(self.losses), BLOCK)]


def train(
    task: Task, schedule: dict[int, PrecisionPolicy], steps: int, device: torch.device, seed: int
) -> Outcome:
    """Trains once. fp16 gradients go through a GradScaler; the policy covers forward and loss.

    Nothing in a step waits for the GPU: losses stay there until the end, and the fused optimiser takes the
    scaler's verdict on the device.
    """
    torch.manual_seed(seed)
    model = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr, fused=True)
    rate = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: one_cycle(step, steps))
    half = any(policy.forward.input is Precision.F16 for policy in schedule.values())
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=half)
    losses = torch.zeros(steps, device=device)
    task.batch(0), task.batch(-1)  # making the data is no part of the time
    start = time.perf_counter()
    with PolicyScheduler(schedule, model, unit="step") as run:
        title = f"{task.name} {run.schedule[0]}, seed {seed}"
        for step in track(range(steps), title, console=Console(stderr=True), transient=True):
            run.start(step)
            inputs, targets = task.batch(seed * steps + step)
            loss = task.loss(model(inputs), targets)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            rate.step()
            losses[step] = loss.detach()
        kept = losses.tolist()  # waits for the GPU
        seconds = time.perf_counter() - start
        accuracy, iou = evaluate(task, model)
    taken = int(
        next(iter(optimizer.state.values()))["step"]
    )  # the fused optimiser does not count skipped steps
    return Outcome(kept, accuracy, iou, steps - taken, seconds)


def one_cycle(step: int, steps: int) -> float:
    """Factor of the learning rate: up in a fifth of the steps, then down to 0 along a cosine."""
    up = max(1, steps // 5)
    return min((step + 1) / up, 0.5 + 0.5 * math.cos(math.pi * max(0, step + 1 - up) / (steps + 1 - up)))


def evaluate(task: Task, model: nn.Module) -> tuple[float, float]:
    """Accuracy and mean intersection over union on the held-out batches."""
    model.eval()
    confusion = None
    with torch.no_grad():
        for step in range(-task.held_out, 0):
            inputs, targets = task.batch(step)
            logits = model(inputs)
            classes = logits.shape[-1]
            pairs = targets.flatten() * classes + logits.argmax(-1).flatten()
            counts = torch.bincount(pairs, minlength=classes * classes).view(classes, classes)
            confusion = counts if confusion is None else confusion + counts
    assert confusion is not None
    table = confusion.double().cpu()
    hits, there = table.diagonal(), table.sum(1)
    union = there + table.sum(0) - hits
    return float(hits.sum() / table.sum()), float((hits / union.clamp(min=1))[there > 0].mean())


def draw(results: Mapping[str, Sequence[Outcome]], path: Path, title: str) -> None:
    """Loss curves as a PNG: mean over the seeds, and the band between their smallest and largest."""
    curves = {name: [run.curve() for run in runs] for name, runs in results.items()}
    labels = {
        name: f"{name}, {statistics.fmean(r.accuracy for r in runs):.2%}" for name, runs in results.items()
    }
    draw_curves(curves, labels, path, title)


def draw_curves(
    curves: Mapping[str, Sequence[Sequence[float]]],
    labels: Mapping[str, str],
    path: Path,
    title: str,
    metadata: dict[str, str] | None = None,
) -> None:
    """`draw` for curves: by name, one list of block means for each seed. `metadata`: texts for the PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, of_seeds in curves.items():
        values = torch.tensor(of_seeds)
        steps = [BLOCK * (i + 0.5) for i in range(values.shape[1])]
        (line,) = axes.plot(steps, values.mean(0).tolist(), label=labels[name], linewidth=1.2)
        low, high = values.amin(0).tolist(), values.amax(0).tolist()
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="step", ylabel=f"loss, mean of {BLOCK} steps", title=title, yscale="log")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110, metadata=metadata)
    pyplot.close(figure)


def spread(values: Sequence[float]) -> float:
    """Standard deviation over the seeds, 0 for a single one."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def record(
    task: Task, results: Mapping[str, Sequence[Outcome]], device: torch.device, seeds: Sequence[int]
) -> dict[str, Any]:
    """Everything as JSON types; losses as block means of four digits."""

    def plain(run: Outcome) -> dict[str, Any]:
        losses = [float(f"{value:.4g}") if math.isfinite(value) else None for value in run.curve()]
        return {**asdict(run), "losses": losses}

    return {
        "kind": "training",
        "task": task.name,
        "device": device.type,
        "environment": machine.environment(),
        "steps": len(next(iter(results.values()))[0].losses),
        "block": BLOCK,
        "seeds": list(seeds),
        "runs": {name: [plain(run) for run in runs] for name, runs in results.items()},
    }


def parse_schedule(text: str) -> dict[int, PrecisionPolicy]:
    """Reads ``0=auto_mixed,80=always_f32``."""
    entries = (entry.partition("=") for entry in text.split(","))
    return {int(step): POLICIES[name] if name in POLICIES else as_policy(name) for step, _, name in entries}


def main(task_on: Callable[[torch.device], Task]) -> None:
    """The command line of an example; ``task_on`` makes the task for a device."""

    def command(
        policies: Annotated[str | None, typer.Option(help=f"With commas, of {', '.join(POLICIES)}.")] = None,
        schedule: Annotated[str | None, typer.Option(help="STEP=POLICY,..., in place of policies.")] = None,
        steps: Annotated[int | None, typer.Option(min=1, help="Training steps.")] = None,
        device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
        seeds: Annotated[int, typer.Option(min=1, help="Runs of each policy, from other starts.")] = 1,
        seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
        out: Annotated[Path, typer.Option(help="Folder for the picture and the JSON.")] = Path("."),
    ) -> None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        task = task_on(where)
        count = steps or task.steps
        if schedule:
            plans = {schedule: parse_schedule(schedule)}
        else:
            plans = {name: parse_schedule(f"0={name}") for name in (policies or task.policies).split(",")}
        starts = range(seed, seed + seeds)
        results: dict[str, list[Outcome]] = {name: [] for name in plans}
        for start in starts:  # policies take turns, so that what warms up or drifts hits all alike
            for name, plan in plans.items():
                results[name].append(train(task, plan, count, where, start))
        table = Table(title=f"{task.name} on {where}, {count} steps, {seeds} seed{'s' * (seeds > 1)}")
        for head in ("policy", "last loss", "held-out accuracy", "mean IoU", "skipped", "seconds"):
            table.add_column(head, justify="left" if head == "policy" else "right")
        for name, runs in results.items():
            last = statistics.fmean(run.curve()[-1] for run in runs)
            cells = [
                f"{statistics.fmean(values):.2%}" + (f" ± {spread(values):.2%}" if seeds > 1 else "")
                for values in ([run.accuracy for run in runs], [run.iou for run in runs])
            ]
            skipped = sum(run.skipped for run in runs)
            seconds = statistics.fmean(run.seconds for run in runs)
            table.add_row(name, f"{last:.4f}", *cells, str(skipped), f"{seconds:.1f}")
        Console(width=110).print(table)
        out.mkdir(parents=True, exist_ok=True)
        draw(results, out / f"{task.name}.png", task.name)
        text = json.dumps(record(task, results, where, starts), indent=1)
        (out / f"{task.name}.json").write_text(text + "\n")

    typer.run(command)
