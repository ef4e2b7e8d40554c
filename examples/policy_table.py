"""What each precision policy does to a small transformer and to a sparse U-Net: casts, error, time.

    python examples/policy_table.py                 CPU or GPU, whichever torch finds

Casts: made per training step by `apply_policy` (a sparse layer's own, of its input and weight, come on top),
and what the graph pass inserts, removes and leaves. Error: relative L2 of output and gradients against the
same network in float64. Time: of a step of forward, loss and backward; the policies take turns.
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from common import POLICIES
from voxmma import export
from voxmma.precision import policy_graph
from voxmma.precision.policy import PrecisionPolicy, apply_policy
from voxmma.tools import speedbench
from voxmma.tuning import machine

SCALE = 1024.0  # of the loss, so that fp16 gradients stay in range


class Row:
    """One policy on a copy of a network."""

    def __init__(self, work: speedbench.Workload, name: str, policy: PrecisionPolicy, device: torch.device):
        self.work, self.name, self.policy, self.device = work, name, policy, device
        self.model = copy.deepcopy(work.model).to(device)
        self.inputs = tuple(speedbench._moved(value, device) for value in work.inputs)
        self.times: list[float] = []

    def step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward, loss and backward."""
        self.model.zero_grad(set_to_none=True)
        out = self.model(*self.inputs)
        loss = self.work.loss(out)
        (loss * SCALE).backward()  # type: ignore[no-untyped-call]
        return out.detach(), loss.detach()

    def first(self, reference: Any) -> dict[str, Any]:
        """Casts and errors of one step."""
        with apply_policy(self.model, self.policy) as applied:
            out, loss = self.step()
            casts = sum(applied.casts.values())
        grads = [p.grad.double() / SCALE for p in self.model.parameters() if p.grad is not None]
        errors = speedbench._errors((out.double(), loss.double(), grads), reference)
        return {"casts": casts, **errors, "graph": self.graph()}

    def graph(self) -> dict[str, int]:
        """Casts of the graph pass: under torch.compile, or for Voxels in the export (of any size)."""
        model = copy.deepcopy(self.work.model)
        if all(isinstance(value, torch.Tensor) for value in self.inputs):
            torch._dynamo.reset()
            backend = policy_graph.policy_backend(self.policy, "eager")
            torch.compile(model.to(self.device), backend=backend)(*self.inputs)
            found = backend.reports[0].to_json()
        else:
            few = speedbench._WORKLOADS[self.work.name](False).inputs
            found = export.compile_model(model.cpu(), few, self.policy).metadata["casts"]
        removed = sum(found["removed"].values())
        return {"inserted": found["inserted"], "removed": removed, "left": found["remaining"]}

    def time(self) -> None:
        """Times one step."""
        with apply_policy(self.model, self.policy):
            speedbench.wait(self.device)
            start = time.perf_counter()
            self.step()
            speedbench.wait(self.device)
            self.times.append(time.perf_counter() - start)


def measure(work: speedbench.Workload, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """One record per policy."""
    reference = speedbench._reference(work, speedbench.load("mode: train"), device)
    rows = [Row(work, name, policy, device) for name, policy in POLICIES.items()]
    facts = [row.first(reference) for row in rows]
    for turn in range(repeats + 1):
        for row in rows[turn % len(rows) :] + rows[: turn % len(rows)]:
            row.time()
    return [
        {"network": work.name, "policy": row.name, "ms": statistics.median(row.times[1:]) * 1e3, **found}
        for row, found in zip(rows, facts, strict=True)
    ]


HEADER = ("network", "policy", "casts", "graph: in/out/left", "output rel-L2", "gradient rel-L2", "ms")


def cells(row: dict[str, Any]) -> list[str]:
    """A record as text."""
    graph = row["graph"]
    return [
        row["network"],
        row["policy"],
        str(row["casts"]),
        f"{graph['inserted']}/{graph['removed']}/{graph['left']}",
        f"{row['out_rel_l2']:.1e}",
        f"{row['grad_rel_l2']:.1e}",
        f"{row['ms']:.1f}",
    ]


def main(
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Timed steps of each policy.")] = None,
    out: Annotated[Path | None, typer.Option(help="Also write the figures here, as JSON.")] = None,
) -> None:
    """Prints the table."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    full = where.type == "cuda"
    rows, sizes = [], {}
    for name in ("transformer", "sparse_unet"):
        torch.manual_seed(0)
        work = speedbench._WORKLOADS[name](full)
        sizes[name] = work.size
        rows += measure(work, where, repeats or (20 if full else 5))
    table = Table(title=f"one training step on {where}")
    for head in HEADER:
        table.add_column(head, justify="left" if head in HEADER[:2] else "right")
    for row in rows:
        table.add_row(*cells(row))
    Console(width=130).print(table)
    if out is not None:
        record = {"kind": "policies", "device": where.type, "environment": machine.environment()}
        out.write_text(json.dumps({**record, "sizes": sizes, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
