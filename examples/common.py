"""What the training examples share: flags, the loop, the table and the picture.

Every example trains the same network from the same start on the same batches once per policy, and prints the
final accuracy of each. A schedule replaces the policies: ``--schedule 0=auto_mixed,80=always_f32``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import nn

from voxmma.policy import NAMED, ComputeSpec, Precision, PrecisionPolicy, as_policy
from voxmma.schedule import PolicyScheduler

_HALF = PrecisionPolicy.auto_mixed
#: The named policies, and auto_mixed with other accumulators in the sparse layers.
POLICIES = {
    **NAMED,
    "fp16_sum": _HALF.with_compute(ComputeSpec(Precision.F16, Precision.F16)),
    "fp16_promoted": _HALF.with_compute(ComputeSpec(Precision.F16, Precision.F16, chunk=64)),
}


@dataclass
class Task:
    """What to train. ``batch(step)`` gives (inputs, targets); a negative step is a held-out batch."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Any, torch.Tensor]]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    steps: int
    lr: float = 2e-3
    policies: str = "always_f32,auto_mixed"


def default_policies(device: torch.device) -> str:
    """What dense networks are trained under: CPUs multiply fp16 slowly, so not that there."""
    if device.type == "cuda":
        return "always_f32,auto_mixed_conservative,auto_mixed,auto_mixed_bf16"
    return "always_f32,auto_mixed_bf16"


@dataclass
class Outcome:
    """One training run: the loss of every step, held-out accuracy in 0..1, seconds."""

    losses: list[float]
    accuracy: float
    seconds: float


def train(
    task: Task, schedule: dict[int, PrecisionPolicy], steps: int, device: torch.device, seed: int
) -> Outcome:
    """Trains once. fp16 gradients go through a GradScaler; the policy covers forward and loss."""
    torch.manual_seed(seed)
    model = task.model().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.lr)
    half = any(policy.forward.input is Precision.F16 for policy in schedule.values())
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10, enabled=half)
    losses = []
    start = time.perf_counter()
    with PolicyScheduler(schedule, model, unit="step") as run:
        for step in track(
            range(steps), f"{task.name} {run.schedule[0]}", console=Console(stderr=True), transient=True
        ):
            run.start(step)
            inputs, targets = task.batch(step)
            loss = task.loss(model(inputs), targets)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(float(loss.detach()))
        model.eval()
        hits = count = 0
        with torch.no_grad():
            for step in range(-4, 0):
                inputs, targets = task.batch(step)
                right = model(inputs).argmax(-1) == targets
                hits, count = hits + int(right.sum()), count + right.numel()
    return Outcome(losses, hits / count, time.perf_counter() - start)


def draw(results: dict[str, Outcome], path: Path, title: str) -> None:
    """Loss curves as a PNG, smoothed over five steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, outcome in results.items():
        smooth = torch.tensor(outcome.losses).unfold(0, min(5, len(outcome.losses)), 1).mean(1)
        axes.plot(smooth.tolist(), label=f"{name}, {outcome.accuracy:.1%}", linewidth=1.2)
    axes.set(xlabel="step", ylabel="loss", title=title, yscale="log")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


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
        seed: Annotated[int, typer.Option()] = 0,
        out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("."),
    ) -> None:
        where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        task = task_on(where)
        if schedule:
            runs = {schedule: parse_schedule(schedule)}
        else:
            runs = {name: parse_schedule(f"0={name}") for name in (policies or task.policies).split(",")}
        results = {name: train(task, plan, steps or task.steps, where, seed) for name, plan in runs.items()}
        table = Table(title=f"{task.name} on {where}, {steps or task.steps} steps")
        for head in ("policy", "last loss", "held-out accuracy", "seconds"):
            table.add_column(head, justify="left" if head == "policy" else "right")
        for name, outcome in results.items():
            last = sum(outcome.losses[-5:]) / len(outcome.losses[-5:])
            table.add_row(name, f"{last:.4f}", f"{outcome.accuracy:.1%}", f"{outcome.seconds:.1f}")
        Console(width=100).print(table)
        out.mkdir(parents=True, exist_ok=True)
        draw(results, out / f"{task.name}.png", task.name)

    typer.run(command)
