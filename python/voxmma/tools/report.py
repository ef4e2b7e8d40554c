"""`voxmma report`: the machine, the precision PyTorch runs in, what to set for speed and why, exact undo.

The flags are process-wide and die with the process. So ``--apply`` sets them here, shows by measurement what
they do, and writes a journal (JSON); `apply_journal` sets the same flags in a training script and
`restore_journal` takes them back. ``--restore`` puts the recorded state back and reads every switch again: a
difference is exit code 1.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Group
from rich.table import Table

from voxmma import torchflags
from voxmma._surroundings import undisturbed
from voxmma.dispatch import settings
from voxmma.tools.console import Json, show
from voxmma.tuning import gate, machine

JOURNAL_VERSION = 1
#: Above this, float32 products are not float32 any more (see machine.fp32_behaviour).
TF32_ETA = 5e-6
#: A gain below this is noise.
WORTH_IT = 1.03


class JournalError(ValueError):
    """A journal that is missing, unreadable, damaged, not one of ours, or cannot be written."""


@dataclass
class Recommendation:
    """What to set, and the decisions that led there.

    Attributes:
        changes: switch to value; ``tf32``, or a name of `torchflags.Flags.plain`.
        trace: one sentence per decision, in order.
    """

    changes: dict[str, Any] = field(default_factory=dict)
    trace: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- facts
def fp16_rate_ratio(device: torch.device) -> tuple[float | None, str]:
    """How much faster products with fp16 accumulators are than with fp32 ones on ``device``, measured.

    Returns (ratio, how it was measured) or (None, why not).
    """
    if device.type != "cuda":
        return None, "no GPU"
    try:
        return gate.board(device).ratio, "dense products, measured"
    except RuntimeError as error:
        return None, str(error)


@undisturbed()
def collect(device: torch.device | None = None) -> dict[str, Any]:
    """Facts about machine and process, as JSON types; measures on ``device`` (default: GPU 0, else CPU)."""
    if device is None:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    gpus = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            {
                "name": properties.name,
                "uuid": str(getattr(properties, "uuid", "")),
                "capability": [properties.major, properties.minor],
                "memory_gib": round(properties.total_memory / 2**30, 1),
            }
        )
    ratio, how = fp16_rate_ratio(device)
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None
    return {
        **machine.environment(),
        "cudnn": cudnn,
        "gpus": gpus,
        "device": str(device),
        "fp16_rate_ratio": ratio,
        "fp16_rate_ratio_source": how,
        "fp32": {op: torchflags.effective_fp32_precision(op) for op in ("matmul", "conv", "rnn")},
        "fp32_cpu": {op: torchflags.effective_fp32_precision(op, "cpu") for op in ("matmul", "conv", "rnn")},
        "fp32_eta": machine.fp32_behaviour(device),
        "voxmma_fp16_accum": settings.get_fp16_accum(),
    }


# ---------------------------------------------------------------- decisions
def recommend(facts: Mapping[str, Any], flags: torchflags.Flags) -> Recommendation:
    """What to set for speed on the machine in ``facts`` when the process is in state ``flags``.

    Pure: the same facts give the same answer. Nothing here lowers the precision of a sum: what it may lower
    is the rounding of float32 operands (TF32), and it says so.
    """
    advice = Recommendation()
    say, change = advice.trace.append, advice.changes

    def decide(name: str, value: Any, why: str) -> None:
        if name in flags.plain:
            if flags.plain[name] == value:
                say(f"{name} stays {value}: {why}")
            else:
                change[name] = value
                say(f"{name}: {flags.plain[name]} -> {value}: {why}")

    if not facts["gpus"]:
        say("no GPU: these switches act on CUDA alone, so there is nothing to set")
        return advice
    capability = min(tuple(gpu["capability"]) for gpu in facts["gpus"])
    shown = ".".join(map(str, capability))
    if capability >= (8, 0):
        if facts["fp32"] == dict.fromkeys(("matmul", "conv", "rnn"), "tf32"):
            say(f"TF32 stays on: capability {shown} has it")
        else:
            change["tf32"] = True
            say(
                f"TF32 on: capability {shown} has it; float32 operands keep 10 mantissa bits, sums float32. "
                "Leave it off where differences of large values count, such as relaxation or energies"
            )
        say("for training prefer bf16 autocast around forward and loss; it needs no gradient scaler")
    else:
        say(f"TF32 not touched: capability {shown} has none")
        if capability >= (7, 0):
            say("for training prefer fp16 autocast around forward and loss, with a GradScaler")
    decide(
        "cudnn.benchmark",
        True,
        "convolutions of a fixed shape get the fastest algorithm",
    )
    flash = capability >= (8, 0)
    decide("sdp.flash", flash, f"flash attention {'runs' if flash else 'does not exist'} on {shown}")
    decide("sdp.mem_efficient", True, "fused attention for what flash does not take")
    decide("sdp.math", True, "the fallback for shapes no fused kernel takes")
    for dtype in ("fp16", "bf16"):
        name = f"cuda.matmul.allow_{dtype}_reduced_precision_reduction"
        present = flags.plain.get(name, [False])
        decide(
            name, [False, *present[1:]], f"partial sums of split {dtype} products stay float32; costs little"
        )
    decide(
        "cuda.matmul.allow_fp16_accumulation", False, "cuBLAS has no check of the error; voxmma's layers do"
    )
    ratio = facts["fp16_rate_ratio"]
    if ratio is None:
        say(
            f"fp16 accumulators in voxmma's layers: not measured ({facts['fp16_rate_ratio_source']}); "
            "leave them off"
        )
    elif ratio > WORTH_IT:
        say(
            f"fp16 accumulators run {ratio:.2f}x as fast here: worth voxmma.set_fp16_accum(True) "
            "after a look at voxmma sweep"
        )
    else:
        say(f"fp16 accumulators run {ratio:.2f}x as fast here: no gain on this board, leave them off")
    return advice


def apply_changes(changes: Mapping[str, Any]) -> None:
    """Sets switches, or none: KeyError for an unknown one, FlagsError for one that does not take."""
    before = torchflags.snapshot()
    try:
        for name, value in changes.items():
            if name == "tf32":
                torchflags.set_tf32(value)
            else:
                torchflags.set_flag(name, value)
    except BaseException:
        torchflags.restore(before)
        raise


def contradictions(facts: Mapping[str, Any]) -> list[str]:
    """Where the measured error of float32 arithmetic is not what the switches say."""
    out = []
    for op in ("matmul", "conv"):
        says, eta = facts["fp32"][op], facts["fp32_eta"][op]
        if not facts["device"].startswith("cuda"):
            if facts.get("fp32_cpu", {}).get(op, "ieee") != "ieee":
                continue  # allowed to be less, which it is where the processor has the instructions
            says = "ieee"
        elif min(gpu["capability"] for gpu in facts["gpus"]) < [8, 0]:
            says = "ieee"
        does = "tf32" if eta > TF32_ETA else "ieee"
        if says == "ieee" and does == "tf32":
            out.append(f"{op}: switches say {says}, but the measured error is {eta:.1e}")
        if says == "tf32" and does == "ieee" and op == "matmul":
            out.append(f"{op}: switches say {says}, but the measured error is only {eta:.1e}")
    return out


# ---------------------------------------------------------------- journal
def default_journal() -> Path:
    """Where the journal is kept unless a path is given. JournalError where there is no home directory."""
    path = settings.get_cache_dir() / "report-journal.json"
    if problem := settings.homeless(path):
        raise JournalError(f"{path}: {problem}")
    return path


def read_journal(path: Path) -> dict[str, Any]:
    """A journal written by `run`. Raises JournalError when it is missing or not one."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise JournalError(f"no journal at {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise JournalError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict) or data.get("journal") != JOURNAL_VERSION:
        raise JournalError(f"{path} is not a journal of this version of voxmma report")
    try:
        torchflags.Flags.from_json(data.get("before", {}))
    except ValueError as error:
        raise JournalError(f"{path} is damaged: {error}") from None
    changes = data.get("changes")
    if not isinstance(changes, dict) or not all(map(_is_change, changes, changes.values())):
        raise JournalError(f"{path} is damaged: changes are {changes!r}")
    return data


def _is_change(name: str, value: Any) -> bool:
    return isinstance(value, bool) if name == "tf32" else torchflags.can_be("plain", name, value)


def _write_journal(path: Path, record: Mapping[str, Any]) -> None:
    """Writes beside the journal first: it is whole or as before. Raises JournalError where it cannot."""
    fresh = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.write_text(json.dumps(record, indent=1) + "\n")
            fresh.replace(path)
        finally:
            fresh.unlink(missing_ok=True)
    except OSError as error:
        raise JournalError(f"the journal {path} cannot be written: {error.strerror}") from None


def apply_journal(path: Path | str | None = None) -> torchflags.Flags:
    """Sets in this process what ``voxmma report --apply`` recorded.

    Returns the state before, for `torchflags.restore`. Raises JournalError for a bad journal.
    """
    before = torchflags.snapshot()
    apply_changes(read_journal(Path(path) if path else default_journal())["changes"])
    return before


def restore_journal(path: Path | str | None = None) -> list[torchflags.Difference]:
    """Puts this process into the state recorded before ``--apply``; returns what still differs."""
    journal = read_journal(Path(path) if path else default_journal())
    return torchflags.restore(torchflags.Flags.from_json(journal["before"]))


def run(
    apply: bool = False,
    restore: bool = False,
    journal: Path | None = None,
    device: torch.device | None = None,
) -> tuple[dict[str, Any], bool]:
    """The report.

    Args:
        apply: set what is recommended, measure, and write the journal.
        restore: put back: after ``apply`` the state before it, alone the state in the journal.
        journal: its path.
        device: where to measure.

    Returns (the report as JSON types, whether all is as it should be). Raises JournalError for a bad journal.
    After an exception every switch is as it was before.
    """
    before = torchflags.snapshot()
    try:
        return _run(before, apply, restore, journal, device)
    except BaseException:
        torchflags.restore(before)
        raise


def _run(
    before: torchflags.Flags,
    apply: bool,
    restore: bool,
    journal: Path | None,
    device: torch.device | None,
) -> tuple[dict[str, Any], bool]:
    path = journal or default_journal()
    saved = read_journal(path) if restore and not apply else None
    facts = collect(device)
    advice = recommend(facts, before)
    result: dict[str, Any] = {"facts": facts, **asdict(advice), "flags": before.to_json()}
    problems = contradictions(facts)
    if apply:
        apply_changes(advice.changes)
        after = torchflags.snapshot()
        applied = collect(device)
        problems += contradictions(applied)
        result["applied"] = {
            "fp32": applied["fp32"],
            "fp32_eta": applied["fp32_eta"],
            "flags": after.to_json(),
        }
    if restore:
        target = before if saved is None else torchflags.Flags.from_json(saved["before"])
        left = torchflags.restore(target)
        again = collect(device)
        problems += contradictions(again)
        result["restored"] = {
            "differences": [asdict(difference) for difference in left],
            "fp32": again["fp32"],
            "fp32_eta": again["fp32_eta"],
        }
        problems += [f"not put back: {difference}" for difference in left]
    result["problems"] = problems
    if apply:
        record = {
            "journal": JOURNAL_VERSION,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "before": before.to_json(),
            **result,
        }
        _write_journal(path, record)
        result["journal"] = str(path)
    return result, not problems


def render(result: Mapping[str, Any]) -> Group:
    """The report for a terminal."""
    facts = result["facts"]
    about = Table(title="voxmma report", show_header=False)
    gpus = (
        ", ".join(f"{g['name']} (sm_{g['capability'][0]}{g['capability'][1]})" for g in facts["gpus"])
        or "none"
    )
    ratio = facts["fp16_rate_ratio"]
    for name, value in (
        ("system", facts["system"]),
        ("torch, CUDA, cuDNN", f"{facts['torch']}, {facts['torch_cuda']}, {facts['cudnn']}"),
        ("GPU", gpus),
        (
            "fp16 : fp32 accumulator rate",
            f"{ratio:.2f}" if ratio else f"not measured: {facts['fp16_rate_ratio_source']}",
        ),
    ):
        about.add_row(name, str(value))
    states = Table(title=f"float32 on {facts['device']}")
    for head in ("state", "matmul", "eta", "conv", "eta", "rnn"):
        states.add_column(head)
    for name, part in (
        ("now", facts),
        ("applied", result.get("applied")),
        ("restored", result.get("restored")),
    ):
        if part:
            mode, eta = part["fp32"], part["fp32_eta"]
            states.add_row(
                name, mode["matmul"], f"{eta['matmul']:.1e}", mode["conv"], f"{eta['conv']:.1e}", mode["rnn"]
            )
    why = Table(title="recommendation", show_header=False)
    for step, line in enumerate(result["trace"], 1):
        why.add_row(str(step), line)
    parts: list[Any] = [about, states, why]
    parts += [f"PROBLEM {line}" for line in result["problems"]]
    if "restored" in result and not result["restored"]["differences"]:
        parts.append("restored: every switch reads as before")
    if "journal" in result:
        parts.append(f"journal: {result['journal']}")
    return Group(*parts)


def report_command(
    apply: Annotated[bool, typer.Option("--apply", help="Set what is recommended, in this process.")] = False,
    restore: Annotated[bool, typer.Option("--restore", help="Put back what was there before.")] = False,
    journal: Annotated[Path | None, typer.Option(help="Journal file; default: in the cache folder.")] = None,
    as_json: Json = False,
) -> None:
    """Say what precision PyTorch runs in here and what to set for speed; apply it, and undo it exactly.

    Exit code 1 if the restored state differs or arithmetic is not what the switches say, 2 for a bad
    journal.
    """
    try:
        result, good = run(apply, restore, journal)
    except JournalError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
    show(result, render(result), as_json)
    if not good:
        for line in result["problems"]:
            typer.echo(line, err=True)
        raise typer.Exit(1)
