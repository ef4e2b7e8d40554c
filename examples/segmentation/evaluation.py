"""What a network is worth: scores, label files, a picture, and an engine that agrees with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import voxmma
from segmentation.data import EvaluationScans, evaluation_loader
from segmentation.formats import IGNORE, Scan
from segmentation.run import Group


class Confusion:
    """Counts (C, C) of points by class and prediction, on the device, for which only `table` waits."""

    def __init__(self, classes: int, device: torch.device) -> None:
        self.counts = torch.zeros(classes + 1, classes, dtype=torch.int64, device=device)

    def add(self, labels: torch.Tensor, predicted: torch.Tensor) -> None:
        """Points (P,); those without a class count nothing."""
        pairs = (labels - IGNORE) * self.counts.shape[1] + predicted
        self.counts.view(-1).index_add_(0, pairs, torch.ones_like(pairs))

    def table(self, group: Group) -> torch.Tensor:
        """The counts of all processes, (C, C) float64 on the CPU."""
        return group.sum(self.counts.clone())[1:].double().cpu()


@dataclass(frozen=True)
class Scores:
    """Of all points with a class."""

    loss: float
    accuracy: float
    iou: dict[str, float]
    """intersection over union of every class that occurs"""

    @property
    def miou(self) -> float:
        """Mean over the classes that occur; NaN where none does."""
        return float(np.mean([*self.iou.values()])) if self.iou else float("nan")

    @classmethod
    def of(cls, table: torch.Tensor, loss: float, classes: Sequence[str]) -> Scores:
        """Of a confusion table."""
        hits, there = table.diagonal(), table.sum(1)
        shares = hits / (there + table.sum(0) - hits).clamp(min=1)
        occurs = [number for number in range(len(classes)) if there[number] > 0]
        accuracy = float(hits.sum() / table.sum().clamp(min=1))
        return cls(loss, accuracy, {classes[number]: float(shares[number]) for number in occurs})


@torch.no_grad()
def evaluate(
    network: nn.Module,
    data: EvaluationScans,
    group: Group,
    autocast: torch.autocast,
    workers: int = 0,
    out: Path | None = None,
) -> Scores:
    """Scores over all scans, each point with the prediction of its voxel. All processes get the same.

    With `out`, label files in the format of the data, and a picture of the first scan, are written there.
    """
    device, classes = group.device, data.folder.classes
    confusion = Confusion(len(classes), device)
    totals = torch.zeros(2, dtype=torch.float64, device=device)  # loss, points
    was = network.training
    network.eval()
    for place, voxels, rows, labels in evaluation_loader(data, group.rank, group.world, workers):
        with autocast:
            logits = network(voxels.to(device)).feats
        if place >= len(data.folder):  # keeps in step with the processes that have a scan left
            continue
        logits = logits.double()[rows.to(device)]
        predicted, labels = logits.argmax(1), labels.to(device)
        confusion.add(labels, predicted)
        totals[0] += F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
        totals[1] += (labels != IGNORE).sum()
        if out is not None:
            data.folder.write(out, place, predicted.cpu().numpy())
            if place == 0:
                picture(out / "scan.png", data.folder.read(0), predicted.cpu().numpy(), classes)
    network.train(was)
    loss, points = group.sum(totals).tolist()
    return Scores.of(confusion.table(group), loss / max(points, 1), classes)


def picture(path: Path, scan: Scan, predicted: np.ndarray, classes: Sequence[str]) -> None:
    """A scan from above, in the colours of its classes, of what was predicted, and of where they differ."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    colours = pyplot.get_cmap("tab20")
    panels = [("predicted", predicted)]
    kept = np.ones(len(predicted), bool)
    if scan.labels is not None:
        kept = scan.labels != IGNORE
        panels = [("labels", scan.labels), *panels, ("wrong", scan.labels != predicted)]
    figure, all_axes = pyplot.subplots(
        1, len(panels), figsize=(6 * len(panels), 6), layout="constrained", squeeze=False
    )
    order = np.flatnonzero(kept)[np.argsort(scan.points[kept, 2], kind="stable")]
    x, y = scan.points[order, 0], scan.points[order, 1]
    for axes, (title, values) in zip(all_axes[0], panels, strict=True):
        shown = np.where(values, "red", "lightgrey") if values.dtype == bool else colours(values % 20)
        axes.scatter(x, y, s=max(0.5, 30_000 / len(order)), c=shown[order], linewidths=0)
        axes.set(title=title, aspect="equal", xlabel="x, m", ylabel="y, m")
    there = np.unique(np.concatenate([values[kept] for _, values in panels[:2] if values.dtype != bool]))
    marks = [Line2D([], [], marker="o", ls="", color=colours(n % 20), label=classes[n]) for n in there]
    figure.legend(handles=marks, loc="outside right center", frameon=False)
    figure.suptitle(scan.name)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


# ---- engine ------------------------------------------------------------------------------------------------


class ExportError(RuntimeError):
    """The engine does not compute what the network computes."""


@torch.no_grad()
def export(
    network: nn.Module,
    data: EvaluationScans,
    device: torch.device,
    autocast: torch.autocast,
    path: Path,
    tolerance: float,
    most: int = 8,
) -> str:
    """Makes an engine for scans like the first `most`, writes and reads it, and compares it with the network.

    Returns a line that says how far they are apart; ExportError where the relative L2 is beyond `tolerance`.
    """
    frames = [data[place][1].to(device) for place in range(min(most, len(data.folder)))]
    network.eval()
    with autocast:
        wanted = [network(frame).feats.double() for frame in frames]
        engine = voxmma.engine.compile(network, frames[0], frames=frames[1:])
    voxmma.engine.save(engine, path)
    engine = voxmma.engine.load(path)
    worst, differ, rows = 0.0, 0, 0
    for frame, logits in zip(frames, wanted, strict=True):
        made = engine(frame).voxels.feats.double()
        worst = max(worst, float((made - logits).norm() / logits.norm()))
        differ += int((made.argmax(1) != logits.argmax(1)).sum())
        rows += len(logits)
    said = f"{path}: {len(frames)} scans, relative L2 {worst:.1e}, {differ} of {rows} voxels in another class"
    if not worst <= tolerance:
        raise ExportError(f"{said}; at most {tolerance:.0e} is allowed")
    return said
