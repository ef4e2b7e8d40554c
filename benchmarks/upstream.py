"""Unmodified networks of other repositories, run by voxmma.compat and by spconv, and how far they agree.

    git clone https://github.com/open-mmlab/OpenPCDet; git clone https://github.com/Pointcept/Pointcept; ...
    python benchmarks/upstream.py OpenPCDet Pointcept CenterPoint SoftGroup mmdetection3d TRELLIS SphereFormer
    python benchmarks/upstream.py OpenPCDet --reference PYTHON --device cuda --voxels 60000 --repeat 20
    python benchmarks/upstream.py MinkowskiEngine torchsparse spvnas Mask3D

Each network runs in a process of its own, straight from its file: packages around it are not imported, and
what a file imports beside torch and spconv (registries, timm, addict, ...) is stood in for. Both libraries
get the same weights and voxels, in evaluation; fp64 on a CPU, fp32 or `--dtype` on a GPU. `--reference` is a
Python that has spconv (default: this one, if it has); without one, networks are run and nothing is compared.
A network that runs in neither library is no failure: the note has what both say. (VoxelBackBone8xFocal makes
tensors on a GPU whatever its input is on; in fp16 it puts features into fp32 tensors and hands these to
layers of fp16 weights, which is for autocast.)
Times are medians of whole forwards on new coordinates, maps included, after a few that are not counted.
`--jobs` processes (two a network) get ready side by side, and are then timed alone, the two of a network by
turns; networks that have no figures after `--budget` seconds say so. `rest ms` is such a time when sparse
layers give at once what they gave before, the smaller one of the two libraries: what no library gets below.

Networks of MinkowskiEngine and torchsparse are compared with these libraries' rules on full grids
(`dense_libraries.py`), on a CPU in fp64, in a scene of 32 cells an axis.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import host_cores
from upstream_networks import CASES, WRITTEN_FOR, Scene
from upstream_standins import BARE, GIVEN, Finder, Module

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
#: Largest difference that counts as agreement. Libraries add up in another order, so a layer's result is
#: rounded elsewhere, and dozens of layers carry that on: of fp16 about ten roundings were seen (6e-3), thirty
#: are allowed. fp32 products may be made of several TF32 ones.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-4, "fp16": 2e-2}

#: In how many rounds a network's forwards are timed, in both libraries by turns: a machine's speed drifts.
ROUNDS = 4

# ---- one network in one library: a process ---------------------------------------------------------------


def flat(value: Any) -> list[torch.Tensor]:
    """Outputs as tensors: of a SparseConvTensor its voxels, sorted, and the sum of the rows of each."""
    if hasattr(value, "C") and hasattr(value, "F"):
        rows, order = torch.unique(value.C.long(), dim=0, return_inverse=True)
        return [rows.cpu(), torch.empty_like(value.F).index_copy(0, order, value.F).double().cpu()]
    if hasattr(value, "indices") and hasattr(value, "features"):
        rows, which = torch.unique(value.indices.long(), dim=0, return_inverse=True)
        features = value.features.double()
        total = features.new_zeros(len(rows), features.shape[1]).index_add(0, which, features)
        return [rows.cpu(), total.cpu()]
    if isinstance(value, torch.Tensor):
        return [value.double().cpu()]
    if isinstance(value, dict):
        return [t for key in sorted(value) for t in flat(value[key])]
    return [t for part in value for t in flat(part)] if isinstance(value, (list, tuple)) else []


def run_case(args: argparse.Namespace) -> None:
    repository, name = args.case.split(":", 1)
    interface = WRITTEN_FOR.get(repository, "spconv")
    root = Path(args.checkouts[0]).resolve()
    if args.library == "voxmma":
        import voxmma.compat

        voxmma.compat.install(interface)
    elif args.library == "dense":
        import dense_libraries

        dense_libraries.install(interface)
        if repository == "MinkowskiEngine":
            part = "MinkowskiEngine.modules"
            sys.modules[part] = Module(part, {}, [str(root / "MinkowskiEngine" / "modules")])
    if interface != "spconv":
        os.chdir(Path(args.out).parent)
        sys.path.append(str(root))
        sys.modules["upstream_backbones"] = Module(
            "upstream_backbones", {}, [str(root / "torchsparse" / "backbones")]
        )
    sys.meta_path.insert(0, Finder(root, set(BARE.split()), GIVEN))
    os.environ["SPCONV_ALGO"] = "native" if args.device == "cpu" else "auto"
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype]
    torch.manual_seed(0)
    scene = Scene(args.voxels, device, dtype)
    net, prepare = CASES[repository][name](scene)
    state = Path(args.out).with_name("state.pt")
    if args.library == "voxmma":
        for part in net.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                nn.init.uniform_(part.running_mean, -0.1, 0.1)
                nn.init.uniform_(part.running_var, 0.5, 1.5)
        save(net.state_dict(), state)
    else:
        told()
        net.load_state_dict(torch.load(state, weights_only=False))
    net = net.to(device, dtype).eval()
    if args.library == "spconv" and device.type == "cpu":
        for part in net.modules():  # its CPU build adds no bias in evaluation
            if hasattr(part, "indice_key"):
                part.training = True
    run = prepare(net, scene)
    torch.manual_seed(1)  # some draw in evaluation, too
    with torch.no_grad():
        save({"tensors": flat(run()), "voxels": len(scene.indices)}, Path(args.out))
        if args.repeat:
            take_times(net, run, args)


def take_times(net: nn.Module, run: Callable[[], Any], args: argparse.Namespace) -> None:
    """Times forwards in rounds, when it is this process' turn, and at last without the sparse layers."""
    *rounds, rest = time_files(Path(args.out))
    synchronize = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None

    def milliseconds() -> float:
        times = []
        for _ in range(-(-args.repeat // ROUNDS)):
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    told()
    if args.device.startswith("cuda"):
        host_cores.pin()
    for _ in range(min(args.repeat, 3)):
        run()  # what is learnt from earlier inputs, caches of memory
    for file in rounds:
        save(milliseconds(), file)
        told()  # another one is timed: nothing is taken down beside it
    kept = [Kept(layer) for layer in sparse_layers(net)]
    run()
    for layer in kept:
        layer.again = itertools.cycle(layer.given)
    save(milliseconds(), rest)
    told()


def time_files(out: Path) -> list[Path]:
    """Where a process that writes its result to `out` leaves its times: of each round, and of the rest."""
    return [out.with_suffix(f".ms{number}") for number in range(ROUNDS)] + [out.with_suffix(".rest")]


def sparse_layers(net: nn.Module) -> list[nn.Module]:
    """Sparse layers, and containers of them, with which norms and activations come."""
    return [
        part
        for part in net.modules()
        if part is not net and (type(part).__name__ == "SparseSequential" or hasattr(part, "indice_key"))
    ]


class Kept:
    """In place of a layer's forward: takes down what it gives, and gives it `again` when that is set."""

    def __init__(self, layer: nn.Module) -> None:
        self.forward, self.given = layer.forward, list[Any]()
        self.again: Iterator[Any] | None = None
        layer.forward = self  # type: ignore[method-assign]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.again is not None:
            return next(self.again)
        self.given.append(self.forward(*inputs, **options))
        return self.given[-1]


def save(value: Any, path: Path) -> None:
    """Writes what another process waits for: it is there when it is whole."""
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def told() -> None:
    """Waits until the process that started this one says to go on; ends where it does not."""
    if not sys.stdin.readline():
        raise SystemExit(0)


# ---- processes -------------------------------------------------------------------------------------------


def version_of_spconv(python: str) -> str | None:
    command = [python, "-c", "import spconv.pytorch as s, spconv; print(spconv.__version__)"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    except (OSError, subprocess.CalledProcessError):
        return None


class Child:
    """A network in one library, in a process of its own: what it gave is in `out`, then its times in files.

    One of another library waits for the weights of `weights_of`.
    """

    def __init__(
        self, case: str, checkout: Path, library: str, python: str, out: Path, weights_of: Child | None = None
    ) -> None:
        self.command = [python, str(Path(__file__).resolve()), str(checkout), "--case", case]
        self.command += ["--library", library, "--out", str(out)]
        self.library, self.out, self.weights_of = library, out, weights_of
        *self.rounds, self.rest = time_files(out)
        self.state = out.with_name("state.pt")
        self.process: subprocess.Popen[str] | None = None
        self.repeat, self.stopped = 0, False

    def start(self, args: argparse.Namespace) -> None:
        dense = self.library == "dense"
        self.repeat = 0 if dense else args.repeat
        options = {"device": "cpu" if dense else args.device, "dtype": "fp64" if dense else args.dtype}
        options |= {"voxels": str(args.voxels), "repeat": str(self.repeat)}
        command = self.command + [word for name, text in options.items() for word in (f"--{name}", text)]
        threads = max(1, (os.cpu_count() or 1) // args.jobs)  # on a CPU they are part of what is measured
        fewer = {"OMP_NUM_THREADS": str(threads)} if args.device != "cpu" else {}
        if self.library == "spconv" and args.device == "cpu" and not self.repeat:
            fewer = {
                "OMP_NUM_THREADS": "1"
            }  # several add to a row at once: its results differ from run to run
        with open(self.out.with_suffix(".log"), "w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env={**fewer, **os.environ}
            )

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def go_on(self) -> None:
        if self.process is not None and self.process.stdin is not None and not self.ended():
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("\n")
                self.process.stdin.flush()

    def ready(self) -> bool:
        """Whether it has run its network or ended; hands over the weights when they are there."""
        if self.weights_of is not None and (self.state.exists() or self.weights_of.ended()):
            self.weights_of = None
            if self.state.exists():
                self.go_on()
            else:
                self.stop()
        return self.out.exists() or self.ended()

    def time(self, file: Path, end: float) -> None:
        """Lets it take the next of its times, which `file` is for; the caller keeps others from running."""
        if not self.repeat:
            return
        self.go_on()
        while not (file.exists() or self.ended()) and time.monotonic() < end:
            time.sleep(0.02)
        if not file.exists():
            self.stop()

    def times(self) -> dict[str, float]:
        """Medians of milliseconds by name, of those that are there."""
        wanted = {"ms": self.rounds, "rest_ms": [self.rest]}
        whole = {name: files for name, files in wanted.items() if all(file.exists() for file in files)}
        return {
            f"{self.library}_{name}": statistics.median(torch.load(f, weights_only=False) for f in files)
            for name, files in whole.items()
        }

    def stop(self) -> None:
        """Ends it; `stopped` says whether it had not ended itself."""
        if not self.ended() or self.process is None:
            self.stopped = True
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def wrong(self, budget: float) -> str:
        """An empty string, or what went wrong: the last line that it printed."""
        if self.out.exists() and (self.rounds[-1].exists() or not self.repeat):
            return ""
        if self.stopped:
            return f"no {'time' if self.out.exists() else 'result'} within {budget:g} s"
        lines = self.out.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        return (lines or ["ended without a word"])[-1]


def together(children: list[Child], args: argparse.Namespace, end: float) -> None:
    """Runs networks side by side, and then takes their times alone, those of one network by turns.

    Getting ready may take half of the time that is left until `end`.
    """
    until = (time.monotonic() + end) / 2
    for child in children:
        if time.monotonic() < end:
            child.start(args)
    try:
        while sum(child.ready() for child in children) < len(children) and time.monotonic() < until:
            time.sleep(0.02)
        for child in children:
            if not child.out.exists():
                child.stop()  # or it would be at work beside those that are timed
        for _, found in itertools.groupby(children, key=lambda child: child.out.parent):
            for taken in zip(
                *([(child, file) for file in (*child.rounds, child.rest)] for child in list(found)),
                strict=True,
            ):
                for child, file in taken:
                    child.time(file, end)
    finally:
        for child in children:
            child.stop()


# ---- the table -------------------------------------------------------------------------------------------


def difference(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, str]:
    """Largest difference, over the largest value of each output, and what does not fit."""
    if [t.shape for t in mine] != [t.shape for t in theirs]:
        return float(
            "nan"
        ), f"shapes {[list(t.shape) for t in mine]} against {[list(t.shape) for t in theirs]}"
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if a.dtype == torch.int64:
            if not torch.equal(a, b):
                return float("nan"), "other voxels"
        elif a.numel():
            a, b = a.double(), b.double()
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return worst, ""


def compare(row: dict[str, Any], ours: Child, theirs: Child | None, args: argparse.Namespace) -> bool:
    """Puts figures and a note into the row of a network; whether they are as they should be."""
    wrong, there, library = ours.wrong(args.budget), "", ""
    found = {}
    for child in (ours, theirs):
        if child is not None and child.out.exists():
            found[child.library] = torch.load(child.out, weights_only=False)
        if child is not None:
            row |= child.times()
    if theirs is not None:
        there, library = theirs.wrong(args.budget), theirs.library
    if "voxmma" in found:
        row["voxels"] = found["voxmma"]["voxels"]
    if len(found) == 2:
        row["difference"], row["note"] = difference(*(part["tensors"] for part in found.values()))
        row["agrees"] = not row["note"] and row["difference"] <= args.tolerance
    elif wrong and there and not ours.stopped and not theirs.stopped:
        row["note"] = f"runs in neither: {wrong[:80]}; {library}: {there[:80]}"
        return True
    row["note"] = row["note"] or wrong or (there and f"{library}: {there}")[:200]
    return not row["note"] and row["agrees"] is not False


def show(row: dict[str, Any]) -> None:
    cells = [f"{row['repository']} {row['network']}"[:44].ljust(44), f"{row.get('voxels', ''):>8}"]
    cells += [f"{row['difference']:>11.1e}" if row["difference"] is not None else f"{'':>11}"]
    cells += [f"{v:>10.2f}" if (v := row.get(k)) else f"{'':>10}" for k in ("voxmma_ms", "spconv_ms")]
    times = [row.get("voxmma_ms"), row.get("spconv_ms")]
    cells += [f"{'':>6}" if None in times else f"{times[0] / times[1]:>6.2f}"]
    rest = [row[key] for key in ("voxmma_rest_ms", "spconv_rest_ms") if key in row]
    cells += [f"{min(rest):>8.2f}" if rest else f"{'':>8}"]
    print(" ".join(cells), row["note"], flush=True)


def table(args: argparse.Namespace, folder: Path) -> int:
    from voxmma.tuning import machine

    end = time.monotonic() + args.budget
    reference = args.reference or sys.executable
    version = version_of_spconv(reference)
    if args.reference and version is None:
        raise SystemExit(f"--reference {args.reference} has no spconv")
    pairs: list[tuple[dict[str, Any], Child, Child | None]] = []
    for checkout in args.checkouts:
        root = Path(checkout).resolve()
        found = [name for name in CASES if (root / name).is_dir()]
        if not found:
            raise SystemExit(f"{checkout} holds none of {', '.join(CASES)}")
        for name in CASES[found[0]]:
            if args.only and args.only not in name:
                continue
            where = folder / str(len(pairs))
            where.mkdir()
            row = {"repository": root.name, "network": name, "dtype": args.dtype}
            row |= {"tolerance": args.tolerance, "difference": None, "agrees": None, "note": ""}
            case = f"{found[0]}:{name}"
            ours, theirs = Child(case, root, "voxmma", sys.executable, where / "ours.pt"), None
            dense = found[0] in WRITTEN_FOR
            if dense or version is not None:
                row["reference"] = f"{WRITTEN_FOR[found[0]]}'s rules" if dense else f"spconv {version}"
                library, python = ("dense", sys.executable) if dense else ("spconv", reference)
                theirs = Child(case, root, library, python, where / "theirs.pt", ours)
            pairs.append((row, ours, theirs))
    result = {"kind": "upstream", **machine.labels(torch.device(args.device))}
    result |= {"repeats": args.repeat, "rows": []}
    print(f"{'network':44} {'voxels':>8} {'difference':>11} {'voxmma ms':>10}", end=" ")
    print(f"{'spconv ms':>10} {'ratio':>6} {'rest ms':>8}")
    waiting = [child for _, *pair in pairs for child in pair if child is not None]
    failed = 0
    while waiting:
        together(waiting[: args.jobs], args, end)
        del waiting[: args.jobs]
        while pairs and not any(child in waiting for child in pairs[0][1:]):
            row, ours, theirs = pairs.pop(0)
            failed += not compare(row, ours, theirs, args)
            show(row)
            result["rows"].append(row)
            shutil.rmtree(ours.out.parent)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkouts", nargs="+", help="folders of repositories")
    parser.add_argument("--reference", help="a Python that has spconv")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and features; fp64 on a CPU, else fp32")
    parser.add_argument("--voxels", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=0, help="forwards to take the time of")
    parser.add_argument("--jobs", type=int, default=1, help="processes that get ready side by side")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="after which networks have no figures",
    )
    parser.add_argument("--only", help="networks whose name holds this")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference that counts as agreement; default: "
        + ", ".join(f"{name} {bound:g}" for name, bound in TOLERANCE.items()),
    )
    parser.add_argument("--json", help="a file for the table")
    parser.add_argument("--verbose", action="store_true")
    for name in ("--case", "--library", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    args.dtype = args.dtype or ("fp64" if args.device == "cpu" else "fp32")
    args.tolerance = TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance
    if args.case:
        run_case(args)
    else:
        with tempfile.TemporaryDirectory(prefix="voxmma-upstream-") as folder:
            raise SystemExit(min(table(args, Path(folder)), 1))


if __name__ == "__main__":
    main()
