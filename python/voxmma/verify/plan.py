"""Calibrated plans: which accumulator each layer may use, measured on representative batches.

    plan = voxmma.calibrate(model, batches, budget=1e-3)
    Path("plan.json").write_text(json.dumps(plan))
    ...
    voxmma.apply_plan(model, json.loads(Path("plan.json").read_text()))

A plan holds, for every sparse convolution layer, the accumulators that were tried with max eta, rel-L2,
overflow margin and time of each, and the one chosen: the fastest whose numbers hold, together within the
budget. It belongs to the weights, the device, its driver and the kernel build it was measured with; where any
of them differs, `apply_plan` puts the layers on fp32 accumulators and says what differs.

What is measured is the forward pass; input gradients run with the accumulator that was chosen for it.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from voxmma._extension import _C
from voxmma._timing import Clock
from voxmma.dispatch import observers, store
from voxmma.dispatch.calls import convolve
from voxmma.dispatch.config import ConvConfig
from voxmma.dispatch.record import Record
from voxmma.nn.modules.sparse_conv import sparse_layers
from voxmma.ops.kernels import CHUNKS, parse_accumulator
from voxmma.ops.rescale import MAX_FP16, overflow_bound
from voxmma.sparse.maps import KernelMap
from voxmma.verify import accuracy, shadow

FORMAT = 1
#: Smallest quotient of 65504 and the overflow bound for which fp16 sums without rescale are planned.
MIN_MARGIN = 2.0
#: Accumulators that are tried, besides fp32, where the layer computes in fp16 or bf16.
CANDIDATES = ("fp16", *(f"fp16_promoted:{name}" for name in reversed(CHUNKS)))


@dataclass(frozen=True)
class Trial:
    """One accumulator on one layer, the worst of all batches."""

    accumulator: str
    """As `accumulator=` takes it."""
    ran: str
    """What ran, such as 'fp16_promoted'."""
    tile: str
    max_eta: float
    of_bound: float
    """max_eta divided by the worst-case bound"""
    rel_l2: float
    difference: float
    """rel-L2 of the result against that with fp32 accumulators"""
    margin: float | None
    """65504 divided by the overflow bound; None where the sums are fp32 or the operands are rescaled"""
    milliseconds: float
    refused: str
    """Why this one cannot be chosen; empty when it can."""


# ---- what a plan belongs to --------------------------------------------------------------------------------


def weights_hash(layers: Mapping[str, Any]) -> str:
    """SHA-256 of names, shapes, dtypes and bytes of the layers' parameters. Copies them to the host."""
    digest = hashlib.sha256()
    for name, layer in sorted(layers.items()):
        for key, value in sorted(layer.state_dict().items()):
            digest.update(f"{name}.{key} {tuple(value.shape)} {value.dtype}\n".encode())
            data = value.detach().cpu().contiguous()
            digest.update(data.flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def identity(layers: Mapping[str, Any], device: torch.device) -> dict[str, str]:
    """The weights, device, driver and build that a plan is bound to; 'unknown' never equals anything."""
    place, driver = device.type, "none"
    if device.type == "cuda":
        owner = store.owner_of(device, one_card=True)
        place, driver = (owner.device, owner.driver) if owner else ("unknown", "unknown")
    return {"weights": weights_hash(layers), "device": place, "driver": driver, "build": _C.BUILD_ID}


def _differences(then: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    return [
        f"{name} ({then.get(name)!r} in the plan, {value!r} here)"
        for name, value in now.items()
        if then.get(name) != value or value == "unknown"
    ]


# ---- calibration -------------------------------------------------------------------------------------------


@dataclass
class _Call:
    """Operands of one observed call."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    mapping: KernelMap
    record: Record


def _observe(model: nn.Module, layers: Mapping[str, Any], batch: Any) -> dict[str, list[_Call]]:
    """The calls that each layer makes for one batch."""
    calls: dict[str, list[_Call]] = {name: [] for name in layers}

    def note(
        name: str,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        mapping: KernelMap,
        y: Tensor,
        record: Record,
    ) -> None:
        calls[name].append(_Call(x, weight, bias, mapping, record))

    listener = observers.Listener(layers, note)
    try:
        _run(model, batch)
    finally:
        listener.remove()
    return calls


def _run(model: nn.Module, batch: Any) -> Any:
    with torch.no_grad():
        return model(*batch) if isinstance(batch, tuple) else model(batch)


def _output(result: Any) -> Tensor:
    """All features of a model's output, as one fp64 vector."""
    if isinstance(result, Tensor):
        return result.detach().double().flatten()
    if hasattr(result, "feats"):
        return result.feats.detach().double().flatten()
    if isinstance(result, Mapping):
        return torch.cat([_output(value) for value in result.values()])
    if isinstance(result, tuple | list):
        return torch.cat([_output(value) for value in result])
    raise TypeError(f"the model must return tensors or Voxels, not {type(result).__name__}")


def _try(accumulator: str, call: _Call, groups: int, rows: int, repeats: int) -> Trial:
    """Measures one accumulator on the operands of one call."""
    device = call.x.device

    def run(wanted: str) -> tuple[Tensor, Record]:
        config = ConvConfig(
            call.mapping.kernel_size, groups=groups, accumulator=wanted, out_dtype=call.record.out_dtype,
            layer=call.record.layer,
        )  # fmt: skip
        return convolve(config, call.x, call.weight, call.bias, call.mapping, call.record.compute_dtype)

    with torch.no_grad():
        wide = run("fp32")[0]
        y, record = run(accumulator)
        spread = torch.linspace(
            0, max(0, len(y) - 1), min(rows, len(y)), dtype=torch.float64, device="cpu"
        ).long()
        errors, limit = shadow.check(call.x, call.weight, call.bias, call.mapping, y, record, spread)
        took = Clock(device, repeats)(lambda i: run(accumulator)).ms
    margin = None
    narrow = record.accumulator.startswith("fp16")
    if narrow and not record.rescaled:
        bound = float(overflow_bound(call.x, call.weight.to(call.x.dtype), chunk=record.chunk))
        margin = MAX_FP16 / bound if bound > 0 else float("inf")
    refused = ""
    if accumulator != "fp32" and record.accumulator != parse_accumulator(accumulator)[0]:
        refused = record.reason
    elif not errors.within(limit):
        refused = f"max eta {errors.max_eta:.2e} above the bound {limit.eta:.2e}"
    elif margin is not None and not margin >= MIN_MARGIN:
        refused = f"overflow margin {margin:.2g}, {MIN_MARGIN} needed"
    return Trial(
        accumulator=accumulator,
        ran=record.accumulator,
        tile=record.tile,
        max_eta=errors.max_eta,
        of_bound=errors.max_eta / limit.eta,
        rel_l2=errors.rel_l2,
        difference=accuracy.rel_l2([y], [wide]),
        margin=margin,
        milliseconds=took,
        refused=refused,
    )


def _worst(first: Trial | None, second: Trial) -> Trial:
    """Both calls of a layer as one: errors and margin the worse, times added."""
    if first is None:
        return second
    margins = [m for m in (first.margin, second.margin) if m is not None]
    return Trial(
        accumulator=first.accumulator,
        ran=first.ran if first.ran == second.ran else "fp32",
        tile=first.tile,
        max_eta=max(first.max_eta, second.max_eta),
        of_bound=max(first.of_bound, second.of_bound),
        rel_l2=max(first.rel_l2, second.rel_l2),
        difference=max(first.difference, second.difference),
        margin=min(margins) if margins else None,
        milliseconds=first.milliseconds + second.milliseconds,
        refused=first.refused or second.refused,
    )


def choose(trials: Mapping[str, list[Trial]], budget: float) -> dict[str, str]:
    """Least time with the sum of the layers' differences within the budget: an accumulator per layer.

    Starts from fp32 everywhere and takes, one after the other, the change that saves most time for its
    additional difference. The sum is a first-order estimate; `calibrate` measures the whole model afterwards.
    """
    current = {name: next(t for t in found if t.accumulator == "fp32") for name, found in trials.items()}
    spent = 0.0
    while True:
        best: tuple[float, str, Trial] | None = None
        for name, found in trials.items():
            for trial in found:
                saved = current[name].milliseconds - trial.milliseconds
                more = trial.difference - current[name].difference
                if trial.refused or saved <= 0 or not spent + more <= budget:
                    continue
                rate = saved / max(more, 1e-12)
                if best is None or rate > best[0]:
                    best = (rate, name, trial)
        if best is None:
            return {name: trial.accumulator for name, trial in current.items()}
        spent += best[2].difference - current[best[1]].difference
        current[best[1]] = best[2]


def calibrate(
    model: nn.Module, batches: Iterable[Any], budget: float = 1e-3, *, rows: int = 4096, repeats: int = 10
) -> dict[str, Any]:
    """Measures a plan for the sparse convolution layers of `model`; the model is left as it was.

    Args:
        batches: representative inputs; a tuple is several arguments. Under autocast call this inside it.
        budget: largest rel-L2 by which the model's output may differ from that with fp32 accumulators.
        rows: output rows of a call that are compared with fp64, evenly spread. repeats: timed runs of each.

    Returns:
        Plain data for json.dumps: format, identity, budget, error (of the whole model under the plan),
        batches, and by layer the chosen accumulator and the trials (fields of Trial).

    Raises:
        ValueError: no sparse convolution layer, no batch, or a budget below 0.
    """
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("model has no sparse convolution layer")
    if not budget >= 0:
        raise ValueError(f"budget must not be negative, got {budget}")
    given = list(batches)
    if not given:
        raise ValueError("batches is empty")
    former = {name: (layer.use_fp16_accum, layer.accumulator) for name, layer in layers.items()}
    training = {module: module.training for module in model.modules()}
    device = _device(layers)
    try:
        model.eval()  # statistics of norms are not to move while measuring
        _set(layers, dict.fromkeys(layers, "fp32"))
        trials: dict[str, dict[str, Trial]] = {name: {} for name in layers}
        for batch in given:
            for name, calls in _observe(model, layers, batch).items():
                for call in calls:
                    half = call.record.compute_dtype in (torch.float16, torch.bfloat16)
                    for accumulator in ("fp32", *CANDIDATES) if half else ("fp32",):
                        groups = call.weight.shape[1] if call.weight.dim() == 4 else 1
                        trial = _try(accumulator, call, groups, rows, repeats)
                        trials[name][accumulator] = _worst(trials[name].get(accumulator), trial)
        measured = {name: list(found.values()) for name, found in trials.items() if found}
        chosen = choose(measured, budget)
        references = [_output(_run(model, batch)) for batch in given]
        while True:
            _set(layers, chosen)
            pairs = zip(given, references, strict=True)
            error = max(accuracy.rel_l2([_output(_run(model, batch))], [wanted]) for batch, wanted in pairs)
            changed = [name for name, accumulator in chosen.items() if accumulator != "fp32"]
            if error <= budget or not changed:
                break
            worst = max(changed, key=lambda name: trials[name][chosen[name]].difference)
            chosen[worst] = "fp32"
    finally:
        for name, own in former.items():
            layers[name].use_fp16_accum, layers[name].accumulator = own
        for module, mode in training.items():
            module.training = mode
    return {
        "format": FORMAT,
        "identity": identity(layers, device),
        "budget": budget,
        "error": error,
        "batches": len(given),
        "layers": {
            name: {"accumulator": chosen[name], "trials": [_plain(trial) for trial in found]}
            for name, found in measured.items()
        },
    }


def _plain(trial: Trial) -> dict[str, Any]:
    """Fields of a trial as strict JSON can hold them: infinite figures as strings."""
    fields = asdict(trial)
    return {k: str(v) if isinstance(v, float) and abs(v) == float("inf") else v for k, v in fields.items()}


def _device(layers: Mapping[str, Any]) -> torch.device:
    return next(next(layer.parameters()).device for layer in layers.values())


def _set(layers: Mapping[str, Any], accumulators: Mapping[str, str]) -> None:
    for name, accumulator in accumulators.items():
        layers[name].use_fp16_accum = None
        layers[name].accumulator = accumulator


# ---- application -------------------------------------------------------------------------------------------


def apply_plan(model: nn.Module, plan: Mapping[str, Any]) -> list[str]:
    """Sets each layer's `accumulator` as a plan says; on fp32, with a warning, where the plan is stale.

    Layers of the model that the plan does not know (they were never called) are set to fp32 too.

    Returns:
        What differs between the plan and here; empty when the plan was applied.

    Raises:
        ValueError: not a plan of this format, or one that names an accumulator which does not exist.
    """
    try:
        if plan["format"] != FORMAT:
            raise ValueError(f"this is a plan of format {plan['format']!r}, known is {FORMAT}")
        wanted = {name: str(entry["accumulator"]) for name, entry in plan["layers"].items()}
        then = dict(plan["identity"])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"not a plan of voxmma.calibrate: {error!r} is missing or of the wrong type"
        ) from None
    for accumulator in wanted.values():
        parse_accumulator(accumulator)
    layers = sparse_layers(model)
    if not layers:
        raise ValueError("model has no sparse convolution layer")
    stale = _differences(then, identity(layers, _device(layers)))
    stale += [f"layer {name!r} is not in the model" for name in wanted if name not in layers]
    chosen = dict.fromkeys(layers, "fp32")
    if stale:
        warnings.warn(
            f"this plan is stale, so its layers run with fp32 accumulators: {'; '.join(stale)}", stacklevel=2
        )
    else:
        chosen.update(wanted)
    _set(layers, chosen)
    return stale
