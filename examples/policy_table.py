"""What each precision policy does to a small transformer and to a sparse network: casts, error, time.

    python examples/policy_table.py                 CPU or GPU, whichever torch finds

Casts: made per training step by `apply_policy`; for the transformer also what the graph pass inserts, removes
and leaves. Error: relative L2 of output and gradients against the same network in float64.
"""

from __future__ import annotations

import copy
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from voxmma import policy_graph, speedbench
from voxmma.policy import NAMED, ComputeSpec, Precision, PrecisionPolicy, apply_policy

POLICIES = {
    **NAMED,
    "auto_mixed, fp16 sums": PrecisionPolicy.auto_mixed.with_compute(
        ComputeSpec(Precision.F16, Precision.F16)
    ),
}


def measure(work: speedbench.Workload, device: torch.device, repeats: int) -> list[dict[str, Any]]:
    """One row per policy."""
    config = speedbench.load("mode: train")
    reference = speedbench._reference(work, config, device)
    rows = []
    for name, policy in POLICIES.items():
        model = copy.deepcopy(work.model).to(device)
        inputs = tuple(speedbench._moved(value, device) for value in work.inputs)
        with apply_policy(model, policy) as applied:
            out = model(*inputs)
            loss = work.loss(out)
            (loss * 1024).backward()  # type: ignore[no-untyped-call]
            grads = [p.grad.double() / 1024 for p in model.parameters() if p.grad is not None]
            errors = speedbench._errors((out.detach().double(), loss.detach().double(), grads), reference)
            casts = sum(applied.casts.values())
            times = []
            for _ in range(repeats):
                speedbench.wait(device)
                start = time.perf_counter()
                work.loss(model(*inputs)).backward()  # type: ignore[no-untyped-call]
                speedbench.wait(device)
                times.append(time.perf_counter() - start)
        row = {
            "workload": work.name,
            "policy": name,
            "casts": casts,
            "ms": statistics.median(times) * 1e3,
            **errors,
        }
        if work.name == "transformer":
            torch._dynamo.reset()
            backend = policy_graph.policy_backend(policy, "eager")
            torch.compile(copy.deepcopy(work.model).to(device), backend=backend)(*inputs)
            row["graph"] = backend.reports[0]
        rows.append(row)
    return rows


def main() -> None:
    """Prints the table."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    full = device.type == "cuda"
    table = Table(title=f"one training step on {device}")
    for head in (
        "network",
        "policy",
        "casts",
        "graph: inserted/removed/left",
        "out rel-L2",
        "grad rel-L2",
        "ms",
    ):
        table.add_column(head, justify="left" if head in ("network", "policy") else "right")
    for name in ("transformer", "sparse_unet"):
        torch.manual_seed(0)
        for row in measure(speedbench._WORKLOADS[name](full), device, 10 if full else 5):
            graph = row.get("graph")
            counts = f"{graph.inserted}/{sum(graph.removed.values())}/{graph.remaining}" if graph else ""
            table.add_row(
                name,
                row["policy"],
                str(row["casts"]),
                counts,
                f"{row['out_rel_l2']:.1e}",
                f"{row['grad_rel_l2']:.1e}",
                f"{row['ms']:.1f}",
            )
    Console(width=130).print(table)


if __name__ == "__main__":
    main()
