"""Processes of one script that work together, one a GPU, for reproducible.py and ddp.py."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn


def together(script: Path, arguments: Sequence[str], n: int, folder: Path, timeout: float) -> None:
    """Runs `n` processes of a script with `--rank R --of N --folder FOLDER` behind its arguments.

    Raises:
        RuntimeError: one failed, with the last line that it printed, or they took more than `timeout`
            seconds.
    """
    command = [sys.executable, str(script), *arguments, "--of", str(n), "--folder", str(folder)]
    environment = {"OMP_NUM_THREADS": "1", **os.environ}  # as torchrun has it
    logs = [folder / f"{rank}.log" for rank in range(n)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("w") as file:
                one = [*command, "--rank", str(rank)]
                started = subprocess.Popen(one, stdout=file, stderr=subprocess.STDOUT, env=environment)
                processes.append(started)
        end = time.monotonic() + timeout
        while any(codes := [process.poll() for process in processes]) or None in codes:
            bad = next((rank for rank, code in enumerate(codes) if code), None)
            if bad is not None:
                lines = [line for line in logs[bad].read_text(errors="replace").splitlines() if line.strip()]
                raise RuntimeError(
                    f"process {bad} of {n} ended with {codes[bad]}: {' '.join(lines[-1:])[:300]}"
                )
            if time.monotonic() > end:
                raise RuntimeError(f"{n} processes took more than {timeout:.0f} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `together` hands to each process."""
    for name in ("--rank", "--of"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def join(given: argparse.Namespace) -> tuple[torch.device, dist.Store]:
    """The device of this process, and a store that all see; a process group where they are several."""
    device = torch.device(given.device)
    if device.type == "cuda":
        device = torch.device("cuda", given.rank if device.index is None else device.index + given.rank)
        torch.cuda.set_device(device)
    store = dist.FileStore(str(given.folder / "store"), given.of)
    if given.of > 1:
        options = {"device_id": device} if device.type == "cuda" else {}
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore("group", store), rank=given.rank, world_size=given.of, **options,
        )  # fmt: skip
    return device, store


def parallel(net: nn.Module, given: argparse.Namespace, device: torch.device, **options: Any) -> nn.Module:
    """The network under DistributedDataParallel, or as it is where there is one process."""
    if given.of == 1:
        return net
    devices = [device] if device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(net, device_ids=devices, **options)


def leave(given: argparse.Namespace) -> NoReturn:
    """Ends this process when all have come so far, without destructors: those of gloo abort now and then."""
    if given.of > 1:
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)
