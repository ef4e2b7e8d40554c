"""The processes of a run, the precision it runs in, and what it writes down as it goes."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import voxmma
from segmentation.settings import Settings, refuse
from voxmma import torchflags
from voxmma.nn import SyncBatchNorm
from voxmma.precision.schedule import PolicyScheduler

# ---- processes ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The processes that train together; one alone needs no torchrun."""

    device: torch.device
    rank: int = 0
    world: int = 1

    @classmethod
    def join(cls, kind: str | None) -> Group:
        """Of the variables that torchrun sets. `kind`: 'cpu', 'cuda' or None (cuda where there is one)."""
        kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
        local, world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if kind == "cuda":
            count = torch.cuda.device_count()
            refuse(local >= count, "--device", f"process {local} of this machine, which has {count} GPU(s)")
            torch.cuda.set_device(local)
        device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
        if world > 1:
            dist.init_process_group(
                "nccl" if kind == "cuda" else "gloo", device_id=device if kind == "cuda" else None
            )
        return cls(device, int(os.environ.get("RANK", 0)), world)

    @property
    def first(self) -> bool:
        """The process that writes and prints."""
        return self.rank == 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` added over the processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """`value` of every process, by rank."""
        values = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(values, value)
        return values

    def leave(self) -> None:
        """At the end of the program."""
        if self.world > 1:
            dist.destroy_process_group()


def spread(network: nn.Module, settings: Settings, group: Group) -> nn.Module:
    """`network` for a group: sharded (FSDP2), or in DistributedDataParallel. Norms are synchronised first."""
    refuse(settings.fsdp and group.world == 1, "--fsdp", "needs torchrun and several processes")
    if group.world == 1:
        return network
    if settings.sync_bn:
        network = SyncBatchNorm.convert_sync_batchnorm(network)
    if not settings.fsdp:
        ids = [group.device] if group.device.type == "cuda" else None
        alike = settings.sync_bn  # statistics of norms are the same on all processes: nothing to send
        return DDP(network, ids, broadcast_buffers=not alike, gradient_as_bucket_view=True)
    mesh = init_device_mesh(group.device.type, (group.world,))
    for stages in ("encoder", "decoder"):
        for stage in network.get_submodule(stages).children():
            fully_shard(stage, mesh=mesh)
    fully_shard(network, mesh=mesh)
    return network


@contextlib.contextmanager
def synchronised(model: nn.Module, last: bool) -> Iterator[None]:
    """Gradients are exchanged in the backward pass of a step's last portion alone."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
    with model.no_sync() if isinstance(model, DDP) and not last else contextlib.nullcontext():
        yield


# ---- precision ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def precision(settings: Settings, network: nn.Module) -> Iterator[Callable[[int], Any]]:
    """voxmma's and PyTorch's switches as the settings say, put back at the end. Gives what begins a step."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torchflags.preserved())
        torchflags.set_tf32(settings.allow_tf32)
        flags = {"fp16_accum": settings.fp16_accum, "fp16_rescale": settings.fp16_rescale or None}
        stack.enter_context(voxmma.settings.override(**{k: v for k, v in flags.items() if v is not None}))
        if settings.shadow:
            stack.callback(voxmma.shadow.verify(network, every=settings.shadow).remove)
        schedule = settings.schedule()
        if schedule is None:
            yield lambda step: None
        else:
            yield stack.enter_context(PolicyScheduler(schedule, network, unit="step")).start


# ---- curves ------------------------------------------------------------------------------------------------


@dataclass
class Journal:
    """`curves.jsonl`, a line for every step and evaluation, and `curves.png` of it.

    Losses stay on the device until `flush`, which waits for it.
    """

    folder: Path
    group: Group
    pending: list[tuple[dict[str, Any], torch.Tensor]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "curves.jsonl"

    def begin(self, step: int) -> None:
        """Makes the folder; drops the lines of steps after `step`, from where a run goes on."""
        if self.group.first:
            self.folder.mkdir(parents=True, exist_ok=True)
            part = self.path.with_name(self.path.name + ".part")
            part.write_text("".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step))
            os.replace(part, self.path)

    def rows(self) -> list[dict[str, Any]]:
        """What has been written; a last line that was cut off does not count."""
        lines = self.path.read_text().split("\n")[:-1] if self.path.exists() else []
        return [json.loads(line) for line in lines]

    def add(self, row: dict[str, Any], share: torch.Tensor) -> None:
        """A step; its loss is the sum of `share` over the processes."""
        self.pending.append((row, share))

    def flush(self) -> list[float]:
        """Writes the pending steps and returns their losses."""
        if not self.pending:
            return []
        losses: list[float] = self.group.sum(torch.stack([share for _, share in self.pending])).tolist()
        self.write([{**row, "loss": loss} for (row, _), loss in zip(self.pending, losses, strict=True)])
        self.pending = []
        return losses

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Adds lines."""
        if self.group.first:
            with self.path.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)

    def draw(self) -> None:
        """Losses above, mean IoU below."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        rows = self.rows()
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
        for axes, key, label in (
            (above, "loss", "training"),
            (above, "val_loss", "evaluation"),
            (below, "miou", None),
        ):
            points = [(row["step"], row[key]) for row in rows if key in row]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, linewidth=1.2)
        above.set(ylabel="loss", yscale="log")
        above.legend(frameon=False)
        below.set(xlabel="step", ylabel="mean IoU", ylim=(0, 1))
        figure.savefig(self.folder / "curves.png", dpi=110)
        pyplot.close(figure)
