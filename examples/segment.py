"""Trains a sparse U-Net to name every point of a scan; folders in the formats of SemanticKITTI and ScanNet.

    python examples/make_scenes.py scenes/kitti                            made-up scans, to begin with
    python examples/segment.py train scenes/kitti --model small --voxel-size 0.3 --epochs 10
    python examples/segment.py evaluate runs/segment/best.pt --out labels

    torchrun --nproc-per-node 8 examples/segment.py train DATA --precision fp16 --batch 32 --resume

A run's folder holds last.pt (to go on from), best.pt (the best mean IoU), curves.jsonl, curves.png, and in
the end engine.vxe: the network as one program, compared with the network itself. The number of processes
changes neither which scans a step sees nor, but for rounding, what is learned.
"""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import voxmma
from common import one_cycle
from segmentation import checkpoint
from segmentation.data import Draws, training_loader
from segmentation.evaluation import Confusion, ExportError, Scores, evaluate, export
from segmentation.formats import IGNORE, DataError
from segmentation.run import Group, Journal, precision, spread, synchronised
from segmentation.settings import OPTIMISERS, Settings, refuse

Portion = tuple[voxmma.Voxels, torch.Tensor]
CONSOLE = Console(stderr=True)


class Trainer:
    """A run: everything that changes as it goes, and one step of it."""

    def __init__(self, settings: Settings, group: Group) -> None:
        parts = group.world * settings.accumulate
        refuse(
            settings.batch % parts != 0,
            "--batch",
            f"{settings.batch} scans cannot be shared by {parts} portions",
        )
        self.settings, self.group = settings, group
        self.data, self.held_out = settings.training_scans(), settings.evaluation_scans()
        labelled = self.held_out.folder.read(0).labels is not None
        refuse(not labelled, "--val-on", f"{self.held_out.folder.scans[0]} has no labels to compare with")
        self.classes = self.data.folder.classes
        first, _ = self.data[0, 0]
        self.channels = first.channels
        self.per_epoch = -(-len(self.data.folder) // settings.batch)
        self.steps = settings.epochs * self.per_epoch

        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(settings.seed % 2**32)
        self.network = settings.network(self.channels, len(self.classes)).to(group.device)
        self.model = spread(self.network, settings, group)
        self.optimiser = make_optimiser(settings, self.model)
        self.scaler = torch.amp.GradScaler(group.device.type, init_scale=2.0**12, enabled=settings.scales())
        self.autocast = settings.autocast(group.device)
        self.seen = Confusion(len(self.classes), group.device)  # of the training scans, for the bar
        self.journal = Journal(settings.out, group)
        self.step, self.best = 0, -1.0
        if isinstance(self.model, nn.parallel.DistributedDataParallel):
            self.settle(first.to(group.device))

    def settle(self, x: voxmma.Voxels) -> None:
        """A step that changes nothing. After its first one DDP lays out the buckets of gradients anew, and
        last bits of sums over three or more processes depend on them: a resumed run is to find the same.
        """
        buffers = {name: buffer.clone() for name, buffer in self.network.named_buffers()}
        with self.autocast:
            self.model(x).feats.sum().backward()
        self.optimiser.zero_grad(set_to_none=True)
        for name, buffer in self.network.named_buffers():
            buffer.copy_(buffers[name])

    def restore(self, found: dict[str, Any]) -> None:
        """Goes back to a checkpoint."""
        checkpoint.same_classes(found, self.classes, self.settings.data)
        checkpoint.restore(found, self.settings, self.model, self.optimiser, self.scaler)
        self.step, self.best = found["step"], found["best"]
        checkpoint.set_random_state(found["random"], self.group)

    def save(self, *names: str) -> None:
        """Writes checkpoints of these names."""
        facts = {"settings": self.settings.as_dict(), "classes": self.classes, "channels": self.channels}
        facts |= {"step": self.step, "best": self.best}
        paths = [self.settings.out / name for name in names]
        checkpoint.save(paths, self.model, self.optimiser, self.scaler, self.group, facts)

    def batches(self) -> Iterator[list[Portion]]:
        """The portions of a step, step after step from the present one, without an end."""
        s, group = self.settings, self.group
        draws = Draws(
            len(self.data.folder), s.batch, s.accumulate, group.rank, group.world, s.seed, self.step
        )
        loader = iter(training_loader(self.data, draws, s.workers, pin=group.device.type == "cuda"))
        while True:
            yield [next(loader) for _ in range(s.accumulate)]

    def train_step(self, portions: list[Portion]) -> None:
        """One step of the optimiser. The loss is the mean over the labelled voxels of all processes."""
        s, device = self.settings, self.group.device
        lr = s.lr * one_cycle(self.step, self.steps)
        for part in self.optimiser.param_groups:
            part["lr"] = lr
        on_device = [(x.to(device, non_blocking=True), y.to(device, non_blocking=True)) for x, y in portions]
        voxels = torch.stack([(labels != IGNORE).sum() for _, labels in on_device]).sum()
        voxels = self.group.sum(voxels).clamp(min=1)
        share = torch.zeros((), device=device, dtype=torch.float64)
        self.optimiser.zero_grad(set_to_none=True)
        for number, (x, labels) in enumerate(on_device):
            with synchronised(self.model, last=number == len(on_device) - 1):
                with self.autocast:
                    logits = self.model(x).feats
                    loss = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum") / voxels
                self.scaler.scale(loss * self.group.world).backward()  # exchanged gradients are a mean
            share += loss.detach()
            self.seen.add(labels, logits.detach().argmax(1))
        if s.clip:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        self.step += 1
        self.journal.add({"step": self.step, "lr": lr}, share)

    def recent(self) -> tuple[list[float], float]:
        """Losses and mean IoU of the steps since the last look at them. Waits for the device."""
        miou = Scores.of(self.seen.table(self.group), 0.0, self.classes).miou
        self.seen = Confusion(len(self.classes), self.group.device)
        return self.journal.flush(), miou

    def evaluate(self) -> Scores:
        """Scores of the present network, written down."""
        self.journal.flush()
        scores = evaluate(self.network, self.held_out, self.group, self.autocast, self.settings.workers)
        row: dict[str, Any] = {
            "step": self.step,
            "val_loss": scores.loss,
            "miou": scores.miou,
            "accuracy": scores.accuracy,
        }
        row |= {"overflown": scores.overflown, "scale": self.scaler.get_scale(), "iou": scores.iou}
        self.journal.write([row])
        if self.group.first:
            self.journal.draw()
        return scores


def make_optimiser(settings: Settings, model: nn.Module) -> torch.optim.Optimizer:
    """Fused: its step runs on the device, the gradient scaler's verdict included."""
    assert settings.optimiser in OPTIMISERS
    options: dict[str, Any] = {"lr": settings.lr, "weight_decay": settings.weight_decay, "fused": True}
    if settings.optimiser == "sgd":
        return torch.optim.SGD(model.parameters(), momentum=0.9, nesterov=True, **options)
    return torch.optim.AdamW(model.parameters(), **options)


def train(settings: Settings, group: Group) -> Trainer:
    """A whole run, or the rest of one."""
    last = settings.out / "last.pt"
    refuse(last.exists() and not settings.resume, "--out", f"{last} is there: --resume goes on with that run")
    trainer = Trainer(settings, group)
    if settings.resume and last.exists():
        trainer.restore(checkpoint.read(last))
    trainer.journal.begin(trainer.step)
    batches, every = trainer.batches(), settings.eval_every * trainer.per_epoch
    with precision(settings, trainer.network) as begin, bar(trainer) as show:
        while trainer.step < trainer.steps:
            begin(trainer.step)
            with watched(settings.audit and trainer.step == 0 and group.first):
                trainer.train_step(next(batches))
            show(*trainer.recent() if trainer.step % settings.log_every == 0 else ())
            names = ["last.pt"] if settings.save_every and trainer.step % settings.save_every == 0 else []
            if trainer.step % every == 0 or trainer.step == trainer.steps:
                scores = trainer.evaluate()
                report(trainer, scores)
                names = ["last.pt"]
                if not scores.miou <= trainer.best:  # the latest, where no point has a class
                    trainer.best, names = scores.miou, ["best.pt", "last.pt"]  # last.pt knows of best.pt
            if names:
                trainer.journal.flush()
                trainer.save(*names)
    return trainer


# ---- what it shows -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def bar(trainer: Trainer) -> Iterator[Callable[..., None]]:
    """A progress bar; gives what moves it, and shows losses and mean IoU of the last steps where given."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=CONSOLE, disable=not trainer.group.first) as progress:
        task = progress.add_task("training", total=trainer.steps, completed=trainer.step)

        def show(losses: Sequence[float] = (), miou: float = 0.0) -> None:
            text = f"loss {sum(losses) / len(losses):.4f}, mIoU {miou:.1%}" if losses else None
            progress.update(task, completed=trainer.step, description=text)

        yield show


@contextlib.contextmanager
def watched(audit: bool) -> Iterator[None]:
    """With `audit`, every launch of the block is printed."""
    if not audit:
        yield
        return
    with voxmma.audit() as log:
        yield
    CONSOLE.print(str(log), soft_wrap=True, highlight=False, markup=False)


def report(trainer: Trainer, scores: Scores) -> None:
    """A line for each evaluation."""
    if trainer.group.first:
        epoch = trainer.step / trainer.per_epoch
        CONSOLE.print(
            f"epoch {epoch:g}, step {trainer.step}: evaluation loss {scores.loss:.4f}, "
            f"accuracy {scores.accuracy:.2%}, mean IoU {scores.miou:.2%}"
            if scores.iou
            else f"step {trainer.step}: no point of the evaluation scans has a class, best.pt is the latest"
        )
        if scores.overflown:
            CONSOLE.print(
                f"{scores.overflown} points have logits that are not finite: too large for this precision? "
                "`evaluate --precision fp32` of the checkpoint tells."
            )


def table(scores: Scores) -> Table:
    """IoU by class, their mean, and the share of points that are right."""
    made = Table("class")
    made.add_column("IoU", justify="right")
    for name, share in [*scores.iou.items(), ("mean", scores.miou), ("accuracy", scores.accuracy)]:
        made.add_row(name, f"{share:.2%}")
    return made


# ---- a trained network -------------------------------------------------------------------------------------


def load(found: dict[str, Any], device: torch.device) -> tuple[Settings, nn.Module]:
    """The settings and the network of a checkpoint."""
    settings = Settings.from_dict(found["settings"])
    network = settings.network(found["channels"], len(found["classes"]))
    with checkpoint.fitting(settings):
        network.load_state_dict(found["model"])
    return settings, network.to(device).eval()


def export_best(settings: Settings, group: Group) -> None:
    """Engine of the best network, for the precision that it was trained in."""
    found = checkpoint.read(settings.out / "best.pt")
    _, network = load(found, group.device)
    exact = "bf16" if settings.policy else "fp16" if settings.allow_tf32 else settings.precision
    tolerance = {"fp64": 1e-10, "fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2}[exact]
    with precision(settings, network) as begin:
        begin(found["step"] - 1)
        where = settings.out / "engine.vxe"
        autocast = settings.autocast(group.device)
        said = export(network, settings.evaluation_scans(), group.device, autocast, where, tolerance)
    CONSOLE.print(said, soft_wrap=True)


# ---- command line ------------------------------------------------------------------------------------------

app = typer.Typer(add_completion=False, help=__doc__.split("\n\n")[0], no_args_is_help=True)


def train_command(**options: Any) -> None:
    """Trains a network, evaluates it as it goes, and writes an engine of the best one."""
    settings = Settings(**options)
    settings.check()
    group = Group.join(settings.device)
    train(settings, group)
    if settings.export and group.first:
        export_best(settings, group)
    group.leave()


# Its options are the fields of Settings.
train_command.__signature__ = inspect.signature(Settings, eval_str=True)  # type: ignore[attr-defined]
train_command.__annotations__ = get_type_hints(Settings, include_extras=True)
app.command("train")(train_command)


@app.command("evaluate")
def evaluate_command(
    weights: Annotated[Path, typer.Argument(help="best.pt or last.pt of a run.")],
    data: Annotated[Path | None, typer.Option(help="Folder of scans. Default: that of the run.")] = None,
    val_on: Annotated[
        str | None, typer.Option(help="Sequences or splits. Default: the run's --val-on.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write label files and a picture here.")] = None,
    precision_as: Annotated[
        str | None, typer.Option("--precision", help="fp32, fp16 or bf16. Default: as it was trained.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda where there is one.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Worker processes.")] = 2,
) -> None:
    """Prints the scores of a trained network; writes labels in the format of the data."""
    group = Group.join(device)
    found = checkpoint.read(weights)
    changes: dict[str, Any] = {"data": data and str(data), "val_on": val_on, "precision": precision_as}
    if precision_as:
        found["settings"]["policy"] = None
    found["settings"] |= {name: value for name, value in changes.items() if value}
    settings, network = load(found, group.device)
    settings.check()
    with precision(settings, network) as begin:
        begin(found["step"] - 1)
        scans = settings.evaluation_scans()
        checkpoint.same_classes(found, scans.folder.classes, settings.data)
        scores = evaluate(network, scans, group, settings.autocast(group.device), workers, out)
    if group.first:
        Console().print(table(scores) if scores.iou else "no labels to compare with")
    group.leave()


def main() -> None:
    """Runs the command line; what is wrong with data, a file or a checkpoint is one line."""
    try:
        app()
    except (DataError, checkpoint.CheckpointError, ExportError, OSError) as error:
        last = (str(error).strip() or repr(error)).splitlines()[-1]  # a worker's is behind its traceback
        sys.exit(f"error: {last.removeprefix('segmentation.formats.DataError: ')}")


if __name__ == "__main__":
    main()
