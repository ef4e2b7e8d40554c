"""Command lines and processes of scripts that train on several GPUs: reproducible.py and ddp.py."""

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

from network_libraries import LIBRARIES
from networks import ENGINE


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
    """Libraries, scene and device, and what `together` hands to each process; --work: the library it runs."""
    parser.add_argument("--libraries", default="voxmma", help=f"of {', '.join(LIBRARIES)}")
    parser.add_argument("--path", action="append", default=[], help="folder with another library's packages")
    parser.add_argument("--scenes", type=Path, metavar="DIR", help="folder of NAME.npz")
    parser.add_argument("--voxels", type=int, help="of a generated scene, about")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    for name in ("--rank", "--of"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)


def add_packages(given: argparse.Namespace) -> None:
    """Puts --path before everything else, where voxmma is not what runs."""
    if given.work != "voxmma":
        sys.path[:0] = given.path


def libraries_of(parser: argparse.ArgumentParser, given: argparse.Namespace) -> list[str]:
    """--libraries; the parser's error for one that does not train."""
    names: list[str] = given.libraries.split(",")
    for name in names:
        if name not in LIBRARIES or name == ENGINE:
            parser.error(f"no library {name!r} that trains; there are {', '.join(LIBRARIES)}")
    return names


def options_of(given: argparse.Namespace, *names: str) -> list[str]:
    """Command line of the options of these names that are given, and of --path."""
    found = [(name, getattr(given, name)) for name in names] + [("path", path) for path in given.path]
    return [word for name, value in found if value for word in (f"--{name}", str(value))]


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
