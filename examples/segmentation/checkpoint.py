"""Checkpoints: everything a run goes on from, bit for bit.

A file holds tensors and plain Python values and is read with `weights_only=True`; parameters have the names
of the bare network, whether it was trained on one GPU, with DDP or with FSDP2.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from segmentation.run import Group
from segmentation.settings import FREE, Settings

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


class CheckpointError(ValueError):
    """A checkpoint that this run cannot go on from."""


def save(
    paths: list[Path],
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    group: Group,
    facts: dict[str, Any],
) -> None:
    """Writes `paths`, all or nothing each. Every process calls it; `facts` are plain values kept beside."""
    weights, moments = get_state_dict(model, optimiser, options=WHOLE)
    states = group.gather(random_state(group.device))
    if group.first:
        whole = {
            **facts,
            "model": weights,
            "optimiser": moments,
            "scaler": scaler.state_dict(),
            "random": states,
        }
        for path in paths:
            write(path, whole)


def write(path: Path, value: Any) -> None:
    """torch.save into a file of another name, which takes the place of `path` when it is complete."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def read(path: Path) -> dict[str, Any]:
    """A checkpoint on the CPU. CheckpointError where the file is not one."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
    if not isinstance(found, dict) or not {"model", "settings", "classes"} <= found.keys():
        raise CheckpointError(f"{path} is no checkpoint of this script")
    return found


def restore(
    found: dict[str, Any],
    settings: Settings,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Puts everything back but the random states. CheckpointError for other settings."""
    now = settings.as_dict()
    other = [name for name, value in found["settings"].items() if name not in FREE and now[name] != value]
    if other:
        said = ", ".join(f"--{name.replace('_', '-')} {found['settings'][name]}" for name in other)
        raise CheckpointError(
            f"the run in {settings.out} was begun with {said}: go on with these, or choose another --out"
        )
    set_state_dict(
        model,
        optimiser,
        model_state_dict=found["model"],
        optim_state_dict=found["optimiser"],
        options=WHOLE,
    )
    if found["scaler"]:
        scaler.load_state_dict(found["scaler"])


# ---- random states -----------------------------------------------------------------------------------------


def random_state(device: torch.device) -> dict[str, Any]:
    """The generators of torch, CUDA, numpy and Python, as tensors and plain values."""
    name, keys, place, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        "numpy": [name, torch.from_numpy(keys.astype(np.int64)), int(place), int(has_gauss), float(gauss)],
        "python": random.getstate(),
    }


def set_random_state(states: list[dict[str, Any]], group: Group) -> None:
    """That of this process. Where more processes go on than there were, the new ones keep what they have."""
    if group.rank >= len(states):
        return
    state = states[group.rank]
    torch.set_rng_state(state["torch"])
    if group.device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], group.device)
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    random.setstate(state["python"])
