"""The benchmark of whole networks: its file, its rows, and that it leaves no trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import CliRunner

import voxmma
from voxmma import torchflags
from voxmma.tools import cli, speedbench
from voxmma.tools.cli import app
from voxmma.tools.speedbench import ConfigError, load


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny operations on a busy machine: threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


FULL = """
workloads: [mlp, transformer, classifier, sparse_unet]
scale: small
device: cpu
mode: train
rounds: 2
steps: 1
warmup: 1
seed: 3
baseline: {precision: fp32, tf32_matmul_precision: highest}
variants:
  half:
    precision: fp16
    tf32_matmul_precision: high
    compile: off
    optimizer: {name: adamw, fused: true, lr: 0.001}
    sdp_backend: math
    fp16_accum: true
  brain:
    precision: bf16
    tf32_matmul_precision: medium
    compile: {enabled: on, backend: eager, fullgraph: false, dynamic: false}
"""


def test_every_key_of_the_file() -> None:
    config = load(FULL)
    assert config.variants["half"].optimizer.fused is True
    assert config.variants["half"].compile.enabled is False
    assert config.variants["brain"].compile.backend == "eager"
    assert load("{}").workloads == ("mlp",)
    shaped = load("variants: {a: {compile: {options: {shape_padding: true}}}}").variants["a"].compile
    assert shaped.enabled and shaped.options == {"shape_padding": True}
    assert load("variants: {a: {compile: on}}").variants["a"].compile.enabled
    assert load("variants: {a: {compile: {mode: max-autotune}}}").variants["a"].compile.mode == "max-autotune"


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("rouns: 3", "rouns"),
        ("baseline: {precison: fp16}", "baseline.precison"),
        ("variants: {a: {precision: fp8}}", "variants.a.precision"),
        ("variants: {a: {tf32_matmul_precision: low}}", "variants.a.tf32_matmul_precision"),
        ("variants: {a: {sdp_backend: fast}}", "variants.a.sdp_backend"),
        ("variants: {a: {optimizer: {name: adam}}}", "variants.a.optimizer.name"),
        ("variants: {a: {optimizer: {fuse: true}}}", "variants.a.optimizer.fuse"),
        ("variants: {a: {compile: {modes: default}}}", "variants.a.compile.modes"),
        ("variants: {a: {compile: {mode: default, options: {shape_padding: true}}}}", "not both"),
        ("variants: {baseline: {}}", "variants"),
        ("workloads: []", "workloads"),
        ("workloads: [gpt]", "workloads.0"),
        ("rounds: 1", "rounds"),
        ("[1, 2]", "mapping"),
        ("a: [", "not YAML"),
    ],
)
def test_unknown_keys_and_bad_values_are_refused_by_place(text: str, place: str) -> None:
    with pytest.raises(ConfigError, match=place.replace(".", r"\.")):
        load(text)


def test_auto_precision() -> None:
    assert speedbench.resolve_precision("auto", torch.device("cpu")) == "fp32"
    assert speedbench.resolve_precision("fp16", torch.device("cpu")) == "fp16"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    torch.manual_seed(0)
    before = torchflags.snapshot(), voxmma.settings.snapshot()
    seen: list[str] = []
    eager = FULL.replace("{enabled: on,", "{enabled: off,")
    found = speedbench.run(load(eager), paranoid=True, advance=seen.append)
    assert (torchflags.snapshot(), voxmma.settings.snapshot()) == before
    assert len(seen) == 4 * 2
    json.dumps(found)
    return found


def test_every_row_has_time_spread_and_error(result: dict[str, Any]) -> None:
    rows = {(row["workload"], row["variant"]): row for row in result["rows"]}
    assert len(rows) == 4 * 3 and result["state"]["differences"] == []
    for workload in ("mlp", "transformer", "classifier", "sparse_unet"):
        base, half, brain = (rows[workload, name] for name in ("baseline", "half", "brain"))
        assert base["speedup"] == 1.0 and base["speedup_quartiles"] == [1.0, 1.0]
        for row in (base, half, brain):
            assert row["nonfinite"] == 0
            assert 0 < row["min_ms"] <= row["quartiles_ms"][0] <= row["median_ms"]
            assert row["median_ms"] <= row["quartiles_ms"][1] <= row["max_ms"]
        assert base["out_rel_l2"] < 1e-5 < half["out_rel_l2"] < 1e-2
        assert half["out_rel_l2"] < brain["out_rel_l2"] < 1e-1
        assert base["grad_rel_l2"] < 1e-4 < half["grad_rel_l2"] < 0.3
        assert base["out_max_error"] < half["out_max_error"] < brain["out_max_error"]
        assert half["precision"] == "fp16" and half["settings"]["optimizer"]["fused"] is True
    table = speedbench.render(result)
    assert table.row_count == 12


def test_a_compiled_variant_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[dict[str, Any]] = []
    honest = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **how: (called.append(how), honest(model, **how))[1])
    short = FULL.replace("[mlp, transformer, classifier, sparse_unet]", "[mlp]")
    brain = speedbench.run(load(short))["rows"][2]
    assert brain["precision"] == "bf16" and 1e-4 < brain["out_rel_l2"] < 1e-1 and brain["grad_rel_l2"] < 0.3
    assert [(how["backend"], how["dynamic"], how["fullgraph"]) for how in called] == [("eager", False, False)]


def test_inference_and_the_fp16_accumulator_reach_the_sparse_layers() -> None:
    text = """
    {workloads: [sparse_unet], scale: small, device: cpu, mode: infer, rounds: 2, steps: 1, warmup: 1,
     baseline: {precision: fp16, fp16_accum: false}, variants: {short: {precision: fp16, fp16_accum: true}}}
    """
    with voxmma.audit() as log:
        base, short = speedbench.run(load(text))["rows"]
    assert base["grad_rel_l2"] is None
    assert short["out_rel_l2"] > base["out_rel_l2"] > 0
    layers = 1 + 2 * 2 + 2 * 2  # stem, two levels down, two up
    calls = [(launch.input, launch.accumulator) for launch in log]
    assert calls.count(("fp64", "fp64")) == layers  # the reference
    assert calls.count(("fp16", "fp16")) == calls.count(("fp16", "fp32")) == layers * (1 + 1 + 2)


def test_variants_take_turns_in_rotating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(
        speedbench._Runner,
        "sample",
        lambda self, steps, paranoid: (order.append(self.name), self.samples.append(1.0)),
    )
    speedbench.run(load("{scale: small, device: cpu, rounds: 3, variants: {a: {}, b: {}}}"))
    assert order == ["baseline", "a", "b", "a", "b", "baseline", "b", "baseline", "a"]


def test_switches_hold_during_a_turn_only() -> None:
    before = torchflags.snapshot()
    variant = speedbench.Variant(tf32_matmul_precision="medium", sdp_backend="math", fp16_accum=True)
    with speedbench._switches(variant):
        assert torch.get_float32_matmul_precision() == "medium" and torchflags.tf32_allowed()
        assert torch.backends.cuda.math_sdp_enabled() and not torch.backends.cuda.flash_sdp_enabled()
        assert voxmma.get_fp16_accum()
    assert torchflags.snapshot() == before and not voxmma.get_fp16_accum()
    with speedbench._switches(speedbench.Variant()):
        assert torchflags.effective_fp32_precision("conv") == "ieee"


def test_the_command(tmp_path: Path) -> None:
    path, out = tmp_path / "speed.yaml", tmp_path / "speed.json"
    path.write_text(
        yaml.safe_dump(
            {"scale": "small", "device": "cpu", "rounds": 2, "variants": {"b": {"precision": "bf16"}}}
        )
    )
    done = CliRunner().invoke(
        app, ["bench", "run", "--config", str(path), "--paranoid", "--json", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert [row["variant"] for row in json.loads(done.stdout)["rows"]] == ["baseline", "b"]
    assert json.loads(out.read_text())["paranoid"] is True


def test_a_configuration_needs_no_subcommand(tmp_path: Path) -> None:
    path = tmp_path / "speed.yaml"
    path.write_text("{scale: small, device: cpu, rounds: 2, steps: 1, warmup: 1}")
    done = CliRunner().invoke(cli.app, ["bench", "--config", str(path), "--json"])
    assert done.exit_code == 0, done.output
    assert [row["workload"] for row in json.loads(done.stdout)["rows"]] == ["mlp"]
    for flags in (["--paranoid"], ["--out", str(tmp_path / "x.json")]):
        alone = CliRunner().invoke(cli.app, ["bench", *flags])
        assert alone.exit_code == 2 and "--config" in alone.output


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("presicion: fp16", 2, "presicion"),
        ("device: cuda", 2, "not there"),
        (
            "{scale: small, device: cpu, rounds: 2, variants: {c: {compile: {backend: no_such_backend}}}}",
            1,
            "no_such_backend",
        ),
    ],
)
def test_exit_codes(tmp_path: Path, text: str, code: int, message: str) -> None:
    if code == 2 and "cuda" in text and torch.cuda.is_available():
        pytest.skip("this machine has the device")
    path = tmp_path / "speed.yaml"
    path.write_text(text)
    done = CliRunner().invoke(app, ["bench", "run", "--config", str(path)])
    assert done.exit_code == code, done.output
    assert message in done.output
    assert CliRunner().invoke(app, ["bench", "run", "--config", str(tmp_path / "none")]).exit_code == 2
