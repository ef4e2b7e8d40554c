"""Is a training equal bit for bit when it is run again? Of voxmma and of other libraries, alone and with DDP.

    python benchmarks/reproducible.py --out reproducible.json
    python benchmarks/reproducible.py --processes 1,2 --libraries voxmma,spconv --path FOLDER_OF_SPCONV

SpUNet is trained under autocast with a GradScaler on augmented scenes: turned, scaled and thinned out, other
voxels in every step, all of it seeded. Each library trains in a fresh process, in another fresh one, and
there once more from a checkpoint in the middle: what was warm there is cold now (kernel maps made ahead), and
what was cold is warm (allocator, whatever a library has tuned). Weights, statistics of norms and the state of
the optimiser are compared, and in every step the loss and all weights. Of a row:

- equal, equal_resumed: whether the second training and the one that was taken up have the bits of the first.
- first_step: the first step (of 0, 1, ...) in which one of them differs, None if none does.
- weights_apart, loss_apart: relative L2 distance of the weights and relative distance of the last losses, the
  larger of both. ranks_agree: all processes end with the same weights.

voxmma is given points, which it takes into voxels (means) and back; the others are given the same voxels with
the features of a point in each. One scene a process and step. On a CPU autocast is to bf16.
benchmarks/collect.py adds the file to the results.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import voxmma
from voxmma import models
from voxmma.tuning import machine

import networks
import ranks
from network_libraries import LIBRARIES, keys
from network_scenes import MARGIN, scene
from networks import Network, Row, Runner

CLASSES = 20
NETWORKS = {
    "spunet": networks.NETWORKS["spunet"],
    "minkunet34c": networks.NETWORKS["minkunet34c"],
    "small": Network(
        lambda: models.SparseUNet(
            6, CLASSES, channels=(16, 24, 24, 16), blocks=(1, 1, 1, 1), stem_channels=8
        ),
        6,
    ),
}
OPTIMISERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
}


class Sample:
    """The points of a step, and the voxels that they lie in; what a library is told of an input."""

    batch, factor = 1, 1

    def __init__(self, cells: np.ndarray, step: int, rank: int, device: torch.device) -> None:
        rng = np.random.default_rng([step, rank])
        angle, scale = rng.uniform(0, 2 * np.pi), rng.uniform(0.9, 1.1)
        turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        kept = cells[rng.random(len(cells)) < 0.9]
        points = kept + rng.random(kept.shape)
        points[:, :2] = points[:, :2] @ turn.T
        points += MARGIN - np.floor(points.min(0))
        labels = kept[:, 2] * CLASSES // (int(cells[:, 2].max()) + 1)
        feats = np.concatenate([points / 100 - 1, rng.normal(size=points.shape)], 1)
        self.points = torch.from_numpy(points).to(device)
        self.given = torch.from_numpy(feats).float().to(device)
        self.labels = torch.from_numpy(labels).long().to(device)
        place = torch.from_numpy(np.insert(np.floor(points).astype(np.int32), 0, 0, axis=1))
        _, cell = torch.unique(keys(place), return_inverse=True)
        rows = np.unique(cell.numpy(), return_index=True)[1]
        first = torch.from_numpy(rows)
        self.coords = place[first].contiguous().to(device)
        self.feats, self.voxel_labels = self.given[first.to(device)], self.labels[first.to(device)]
        self.shape = [-(-(int(side) + 2 * MARGIN) // 64) * 64 for side in place[:, 1:].max(0).values]


def losses(runner: Runner, net: nn.Module, sample: Sample) -> Tensor:
    """The loss of a step: over points in voxmma, over voxels in another library."""
    if runner.library is None:
        x = voxmma.Voxels.from_points([sample.points], [sample.given], voxel_size=1.0)
        logits, labels = voxmma.devoxelise(net(x), [sample.points], voxel_size=1.0), sample.labels
    else:
        made = net(runner.library.start(sample.coords, sample.feats, sample), None)[0]
        logits, labels = runner.library.feats(made), sample.voxel_labels
    return nn.functional.cross_entropy(logits.float(), labels)


def trained(
    lib: str,
    cells: np.ndarray,
    given: argparse.Namespace,
    device: torch.device,
    checkpoint: tuple[Any, ...] | None = None,
) -> tuple[dict[str, Any], tuple[Any, ...]]:
    """A training: the loss and the sum of the weights' bits of every step, the weights, and a hash of the
    rest. From a checkpoint: that from the middle on. The checkpoint in the middle comes with it."""
    network = NETWORKS[given.network]
    runner = Runner(network, lib, networks.drawn(network).state_dict(), Sample(cells, 0, given.rank, device))
    net = ranks.parallel(runner.net.train(), given, device)
    optimiser = OPTIMISERS[given.optimiser](net.parameters())
    scaler = torch.amp.GradScaler(device.type)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    seen: dict[str, list[Tensor]] = {"losses": [], "sums": []}
    parts, middle = (runner.net, optimiser, scaler), given.steps // 2
    if checkpoint is not None:
        for part, state in zip(parts, checkpoint, strict=True):
            part.load_state_dict(state)
    for step in range(0 if checkpoint is None else middle, given.steps):
        if step == middle:
            checkpoint = tuple(copy.deepcopy(part.state_dict()) for part in parts)
        sample = Sample(cells, step, given.rank, device)
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(device.type, half):
            loss = losses(runner, net, sample)
        scaler.scale(loss).backward()
        scaler.step(optimiser)
        scaler.update()
        seen["losses"].append(loss.detach())
        flat = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
        seen["sums"].append(flat.view(torch.int32).sum(dtype=torch.int64))
    if not torch.isfinite(flat).all():
        raise RuntimeError("weights are not finite")
    digest = hashlib.sha256()
    state = [*runner.net.buffers(), *(v for s in optimiser.state.values() for v in s.values())]
    for value in state:
        digest.update(torch.as_tensor(value).detach().cpu().contiguous().numpy().tobytes())
    assert checkpoint is not None
    rest = {"weights": flat.cpu(), "rest": digest.hexdigest(), "scale": scaler.get_scale()}
    return rest | {name: torch.stack(values).cpu() for name, values in seen.items()}, checkpoint


def compared(runs: list[dict[str, Any]]) -> Row:
    """What differs between the first training and the second, and the one taken up in the middle."""
    first, *others = runs
    steps = len(first["losses"])
    row: Row = {}
    first_steps, apart = [], {"weights_apart": 0.0, "loss_apart": 0.0}
    for name, other in zip(("equal", "equal_resumed"), others, strict=True):
        begin = steps - len(other["losses"])
        mine = first | {part: first[part][begin:] for part in ("losses", "sums")}
        bits = [
            torch.equal(mine[part].view(torch.uint8), other[part].view(torch.uint8))
            for part in ("losses", "sums", "weights")
        ]
        row[name] = all(bits) and all(mine[part] == other[part] for part in ("rest", "scale"))
        differs = (mine["losses"] != other["losses"]) | (mine["sums"] != other["sums"])
        first_steps += [begin + step for step in torch.nonzero(differs).flatten().tolist()[:1]]
        distance = (first["weights"].double() - other["weights"].double()).norm()
        apart["weights_apart"] = max(
            apart["weights_apart"], float(distance / first["weights"].double().norm())
        )
        last, theirs = float(first["losses"][-1]), float(other["losses"][-1])
        apart["loss_apart"] = max(apart["loss_apart"], abs(last - theirs) / abs(last))
    row["first_step"] = min(first_steps, default=None)
    return row | apart | {"first_loss": float(first["losses"][0]), "last_loss": float(first["losses"][-1])}


def measure(lib: str, n: int, options: list[str], timeout: float) -> Row:
    """The row of a library in `n` processes."""
    runs, agree = [], True
    for trainings in (1, 2):
        with tempfile.TemporaryDirectory(prefix="voxmma-reproducible-") as name:
            arguments = ["--work", lib, "--trainings", str(trainings), *options]
            ranks.together(Path(__file__).resolve(), arguments, n, Path(name), timeout)
            for number in range(trainings):
                found = [torch.load(Path(name) / f"{number}-{rank}.pt") for rank in range(n)]
                agree = agree and all(torch.equal(found[0]["weights"], other["weights"]) for other in found)
                runs.append(found[0])
    return compared(runs) | {"ranks_agree": agree}


def work(given: argparse.Namespace) -> None:
    """A process of `measure`."""
    device, _ = ranks.join(given)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    cells = scene(given.scene, given.scenes, given.voxels)
    checkpoint = None
    for number in range(given.trainings):
        found, checkpoint = trained(given.work, cells, given, device, checkpoint)
        torch.save(found, given.folder / f"{number}-{given.rank}.pt")
    ranks.leave(given)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="1", help="such as 1,2; one a GPU")
    parser.add_argument("--network", choices=list(NETWORKS), default="spunet")
    parser.add_argument("--optimiser", choices=list(OPTIMISERS), default="adamw")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--scene", default="room", help="a generated one, or NAME of --scenes")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of two trainings")
    parser.add_argument("--out", type=Path, default=Path("reproducible.json"))
    parser.add_argument("--trainings", type=int, help=argparse.SUPPRESS)
    ranks.add_arguments(parser)
    given = parser.parse_args(arguments)
    ranks.add_packages(given)
    if given.work:
        work(given)
    libraries = ranks.libraries_of(parser, given)
    counts = [int(text) for text in given.processes.split(",")]
    if min(*counts, given.steps) < 1:
        parser.error("--processes and --steps must be at least 1")
    device = torch.device(given.device)
    if device.type == "cuda" and max(counts) > torch.cuda.device_count():
        parser.error(f"--processes: {torch.cuda.device_count()} GPUs are here, {max(counts)} were asked for")
    names = ("network", "optimiser", "steps", "scene", "scenes", "voxels", "device")
    options = ranks.options_of(given, *names)
    fixed = {name: getattr(given, name) for name in ("network", "optimiser", "scene", "steps")}
    result: Row = {"kind": "reproducible", **machine.labels(device), "absent": {}, "rows": []}
    for lib in libraries:
        if (why := networks.missing(lib)) is not None:
            result["absent"][lib] = why
            print(f"{lib} is absent: {why}", file=sys.stderr)
            continue
        for n in counts:
            row: Row = {"lib": lib, "version": networks.version(lib), "processes": n, **fixed}
            kind = LIBRARIES[lib]
            if kind is not None and kind.needs_gpu and device.type != "cuda":
                row["unsupported"] = "runs on a GPU only"
            else:
                try:
                    row |= measure(lib, n, options, given.timeout)
                except Exception as error:  # a library may raise anything; the row says what
                    traceback.print_exc()
                    row["error"] = networks.said(error)
            result["rows"].append(row)
            print(json.dumps(row), flush=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    ours_rows = [row for row in result["rows"] if row["lib"] == "voxmma"]
    return 0 if all(row.get("equal") and row.get("equal_resumed") for row in ours_rows) else 1


if __name__ == "__main__":
    sys.exit(main())
