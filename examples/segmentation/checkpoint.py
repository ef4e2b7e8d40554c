"""Checkpoints: everything a run goes on from, bit for bit.

A file holds tensors and plain Python values and is read with `weights_only=True`; parameters have the names
of the bare network, whether it was trained on one GPU, with DDP or with FSDP2.
"""

from __future__ import annotations

import contextlib
import os
import random
import textwrap
from collections.abc import Iterator
from dataclasses import fields
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
    """Writes `paths` in this order, each whole or not. Every process calls it; `facts`: plain values."""
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
    unknown = found["settings"].keys() - {one.name for one in fields(Settings)}
    if unknown:
        raise CheckpointError(f"{path} has settings that this script has not: {', '.join(sorted(unknown))}")
    return found


@contextlib.contextmanager
def fitting(settings: Settings) -> Iterator[None]:
    """Block that loads weights: CheckpointError where they are not those of the settings' network."""
    try:
        yield
    except RuntimeError as error:
        said = textwrap.shorten(str(error), 400)
        raise CheckpointError(f"the weights are not those of --model {settings.model}: {said}") from None


def same_classes(found: dict[str, Any], classes: list[str], data: Path) -> None:
    """CheckpointError where the data has other classes than the network has learned, or in another order."""
    learned = found["classes"]
    if learned != classes:
        raise CheckpointError(
            f"the network has learned {len(learned)} classes ({', '.join(learned)}), {data} has "
            f"{len(classes)} ({', '.join(classes)})"
        )


def restore(
    found: dict[str, Any],
    settings: Settings,
    model: nn.Module,
    optimiser: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> None:
    """Puts everything back but the random states. CheckpointError for other settings or another network."""
    now = settings.as_dict()
    other = [name for name, value in found["settings"].items() if name not in FREE and now[name] != value]
    if other:
        said = ", ".join(f"--{name.replace('_', '-')} {found['settings'][name]}" for name in other)
        raise CheckpointError(
            f"the run in {settings.out} was begun with {said}: go on with these, or choose another --out"
        )
    with fitting(settings):
        names = {name.removeprefix("module.") for name in model.state_dict()}  # with DDP's prefix
        if names != found["model"].keys():  # set_state_dict would leave what is missing as it is
            raise RuntimeError(f"{', '.join(sorted(names ^ found['model'].keys()))} in one of both alone")
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
    legacy: Any = np.random.get_state()
    name, keys, place, has_gauss, gauss = legacy
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
