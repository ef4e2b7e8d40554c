"""The flags of PyTorch, put back exactly, and the report that sets them."""

from __future__ import annotations

import json
import random
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from voxmma import torchflags
from voxmma.tools import report
from voxmma.tools.cli import app
from voxmma.tuning import machine

from conftest import Clean

needs_tree = pytest.mark.skipif(not torchflags.HAS_TREE, reason="this PyTorch has no fp32_precision tree")

# All a user may do to the switches, except writing the two nodes whose first state cannot be written back.
SETTER = getattr(torch._C, "_set_fp32_precision_setter", None)
MOVES: list[Any] = [
    *(
        lambda node=node, value=value: SETTER(*node, value)  # type: ignore[misc]
        for node in torchflags.TREE_NODES
        if node not in (("cuda", "conv"), ("cuda", "rnn"))
        for value in ("none", "ieee", "tf32", *(("bf16",) if node[0] != "cuda" else ()))
        if SETTER is not None
    ),
    *(lambda v=v: torch.set_float32_matmul_precision(v) for v in ("highest", "high", "medium")),  # type: ignore[misc]
    *(lambda v=v: torch._C._set_cublas_allow_tf32(v) for v in (True, False)),  # type: ignore[misc]
    *(lambda v=v: torchflags.set_tf32(v) for v in (True, False)),  # type: ignore[misc]
    *(
        lambda name=name, value=value: torchflags.set_flag(name, value)  # type: ignore[misc]
        for name, value in (
            ("cudnn.benchmark", True),
            ("sdp.flash", False),
            ("sdp.math", False),
            ("cuda.matmul.allow_fp16_accumulation", True),
            ("deterministic_algorithms", [True, True]),
        )
        if name in torchflags._PLAIN
    ),
]


def readings() -> list[Any]:
    """What PyTorch's own getters say, a complaint being an answer too."""
    out: list[Any] = []
    getters: list[Any] = [torch.get_float32_matmul_precision, torch._C._get_cublas_allow_tf32]
    getters += [torch._C._get_cudnn_allow_tf32]
    if torchflags.HAS_TREE:
        getters += [lambda n=n: torch._C._get_fp32_precision_getter(*n) for n in torchflags.TREE_NODES]
    for get in getters:
        try:
            out.append(get())
        except RuntimeError:
            out.append("mixed")
    return out


@pytest.mark.parametrize("seed", range(4))
def test_any_state_is_read_without_a_trace_and_put_back_exactly(seed: int) -> None:
    rng = random.Random(seed)
    first = torchflags.snapshot()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(60):
                for _ in range(rng.randint(1, 6)):
                    rng.choice(MOVES)()
                seen = readings()
                saved = torchflags.snapshot()
                assert readings() == seen, "reading the state changed it"
                assert torchflags.Flags.from_json(json.loads(json.dumps(saved.to_json()))) == saved
                for _ in range(rng.randint(1, 6)):
                    rng.choice(MOVES)()
                assert torchflags.restore(saved) == []
                assert readings() == seen
                assert torchflags.snapshot() == saved
    finally:
        assert torchflags.restore(first) == []


@needs_tree
def test_unset_stays_unset() -> None:
    get: Any = torch._C._get_fp32_precision_getter
    with torchflags.preserved():
        SETTER("generic", "all", "none")  # type: ignore[misc]
        SETTER("cuda", "all", "none")  # type: ignore[misc]
        SETTER("cuda", "matmul", "none")  # type: ignore[misc]
        SETTER("generic", "all", "tf32")  # type: ignore[misc]
        saved = torchflags.snapshot()
        assert (
            saved.tree["cuda.matmul"] == "none" and get("cuda", "matmul") == "tf32"
        )  # inherited, not stored
        torchflags.set_tf32(False)
        assert get("cuda", "matmul") == "ieee"
        assert torchflags.restore(saved) == []
        SETTER("generic", "all", "ieee")  # type: ignore[misc]
        assert get("cuda", "matmul") == "ieee"  # still follows its ancestor
        SETTER("cuda", "matmul", "tf32")  # type: ignore[misc]
        assert torchflags.restore(saved) == []


@needs_tree
def test_set_tf32_sets_all_three_from_any_state() -> None:
    rng = random.Random(7)
    with torchflags.preserved(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for turn in range(200):
            rng.choice(MOVES)()
            readable = torchflags._reads(torch.get_float32_matmul_precision)[0]
            torchflags.set_tf32(turn % 2 == 0)
            want = "tf32" if turn % 2 == 0 else "ieee"
            assert [torchflags.effective_fp32_precision(op) for op in ("matmul", "conv", "rnn")] == [want] * 3
            assert torchflags.tf32_allowed() is (turn % 2 == 0)
            ok, old = torchflags._reads(torch.get_float32_matmul_precision)
            assert ok or not readable  # old and new settings still agree if they did
            assert not ok or (old == "highest") is (turn % 2 == 1)
    with pytest.raises(ValueError, match="einsum"):
        torchflags.effective_fp32_precision("einsum")


def test_preserved_restores_after_an_exception_and_tells_parts_apart() -> None:
    first = torchflags.snapshot()
    with pytest.raises(ZeroDivisionError), torchflags.preserved():
        torchflags.set_tf32(True)
        torchflags.set_flag("cudnn.benchmark", not first.plain["cudnn.benchmark"])
        raise ZeroDivisionError
    assert torchflags.snapshot() == first
    torchflags.set_tf32(True)
    torchflags.set_flag("cudnn.benchmark", not first.plain["cudnn.benchmark"])
    assert torchflags.restore(first, parts=("tree", "legacy")) == []
    assert not torchflags.tf32_allowed()
    assert torchflags.snapshot().plain["cudnn.benchmark"] is not first.plain["cudnn.benchmark"]
    assert torchflags.restore(first) == []
    with pytest.raises(KeyError, match="benchmrak"):
        torchflags.set_flag("cudnn.benchmrak", True)
    with pytest.raises(ValueError, match="parts"):
        torchflags.Flags.from_json({"tree": {}})


@needs_tree
def test_what_cannot_be_put_back_is_reported(tmp_path: Path, clean: Clean) -> None:
    # Nothing in PyTorch can write the first state of cuda.conv again, so this needs a process of its own.
    writable, *out = clean(
        textwrap.dedent(f"""
        from pathlib import Path
        from voxmma.tools import report; from voxmma import torchflags
        before = torchflags.snapshot()
        found = [before.tree["cuda.conv"] != "default"]
        if not found[0]:
            torchflags.set_tf32(False); torchflags.set_tf32(True); torchflags.set_tf32(False)
            assert torchflags.restore(before) == []
            path = Path({str(tmp_path / "j.json")!r})
            result, good = report.run(apply=True, restore=True, journal=path)
            assert good, result["problems"]
            torch.backends.cudnn.allow_tf32 = False
            found.append(str([str(d) for d in torchflags.restore(before)]))
            assert torch.backends.cudnn.allow_tf32 is True  # what it means is back, what it is cannot be
            result, good = report.run(restore=True, journal=path)
            assert not good and "cuda.conv" in result["problems"][0]
            try:
                with torchflags.preserved():
                    torchflags._PLAIN["cudnn.benchmark"] = (lambda: True, lambda value: None)  # it sticks
            except torchflags.FlagsError as error:
                found.append(str(error))
        """)
    )
    if writable:
        pytest.skip("this PyTorch can write every node")
    assert "fp32_precision[cuda.conv]: wanted 'default', found 'tf32'" in out[0]
    assert "not put back: cudnn.benchmark: wanted False, found True" in out[1]


# ---------------------------------------------------------------- decisions
def facts(**changes: Any) -> dict[str, Any]:
    """Facts of a made-up H100, changed as asked."""
    base: dict[str, Any] = {
        "gpus": [{"name": "made up", "uuid": "", "capability": [9, 0], "memory_gib": 80.0}],
        "device": "cuda:0",
        "fp16_rate_ratio": 1.0,
        "fp16_rate_ratio_source": "made up",
        "fp32": {"matmul": "ieee", "conv": "tf32", "rnn": "tf32"},
        "fp32_eta": {"matmul": 1e-7, "conv": 1e-4},
    }
    return {**base, **changes}


def gpus(*capabilities: list[int]) -> list[dict[str, Any]]:
    return [{"name": "made up", "capability": c} for c in capabilities]


def test_recommendations_follow_the_facts() -> None:
    flags = torchflags.snapshot()
    hopper = report.recommend(facts(), flags)
    assert hopper.changes["tf32"] is True and hopper.changes["cudnn.benchmark"] is True
    assert "cuda.matmul.allow_fp16_accumulation" not in hopper.changes  # is off and stays off
    assert hopper.changes["cuda.matmul.allow_bf16_reduced_precision_reduction"][0] is False
    assert any("no gain on this board" in line for line in hopper.trace)

    turing = report.recommend(facts(gpus=gpus([7, 5])), flags)
    assert "tf32" not in turing.changes and turing.changes["sdp.flash"] is False
    assert any("GradScaler" in line for line in turing.trace)
    mixed = report.recommend(facts(gpus=gpus([9, 0], [7, 5])), flags)
    assert "tf32" not in mixed.changes
    assert report.recommend(facts(gpus=[]), flags).changes == {}

    gain = report.recommend(facts(fp16_rate_ratio=1.9), flags).trace
    assert any("1.90x" in line and "set_fp16_accum(True)" in line for line in gain)
    unknown = report.recommend(facts(fp16_rate_ratio=None, fp16_rate_ratio_source="no probe"), flags).trace
    assert any("not measured (no probe)" in line for line in unknown)
    done = report.recommend(facts(fp32=dict.fromkeys(("matmul", "conv", "rnn"), "tf32")), flags)
    assert "tf32" not in done.changes


def test_a_recommendation_once_applied_recommends_nothing_more() -> None:
    with torchflags.preserved():
        first = report.recommend(facts(), torchflags.snapshot())
        report.apply_changes(first.changes)
        now = {op: torchflags.effective_fp32_precision(op) for op in ("matmul", "conv", "rnn")}
        assert now == dict.fromkeys(now, "tf32")
        assert report.recommend(facts(fp32=now), torchflags.snapshot()).changes == {}
    with pytest.raises(KeyError, match="nonsense"):
        report.apply_changes({"nonsense": True})


@pytest.mark.parametrize(
    ("says", "eta", "capability", "device", "bad"),
    [
        ("ieee", 1e-7, [9, 0], "cuda:0", False),
        ("tf32", 1e-4, [9, 0], "cuda:0", False),
        ("ieee", 1e-4, [9, 0], "cuda:0", True),
        ("tf32", 1e-7, [9, 0], "cuda:0", True),
        ("tf32", 1e-7, [7, 5], "cuda:0", False),  # there is no TF32 to run
        ("tf32", 1e-7, [9, 0], "cpu", False),  # CUDA's switch says nothing about a CPU
        ("ieee", 1e-3, [9, 0], "cpu", True),
    ],
)
def test_arithmetic_that_contradicts_the_switches_is_found(
    says: str, eta: float, capability: list[int], device: str, bad: bool
) -> None:
    found = report.contradictions(
        facts(
            fp32={"matmul": says, "conv": says, "rnn": says},
            fp32_eta={"matmul": eta, "conv": 1e-7 if says == "ieee" else 1e-4},
            gpus=gpus(capability),
            device=device if device == "cuda:0" else "cpu",
        )
    )
    assert any(line.startswith("matmul") for line in found) is bad


def test_behaviour_is_measured_not_assumed() -> None:
    exact = machine.fp32_behaviour("cpu")
    assert set(exact) == {"matmul", "conv"} and max(exact.values()) < 1e-6

    class Coarse(torch.overrides.TorchFunctionMode):
        """Operands with 10 mantissa bits, as TF32 has."""

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") in ("matmul", "conv2d") and args[0].dtype == torch.float32:
                args = [a.half().float() if isinstance(a, torch.Tensor) else a for a in args]
            return func(*args, **(kwargs or {}))

    with Coarse():
        coarse = machine.fp32_behaviour("cpu")
    assert min(coarse.values()) > report.TF32_ETA


@pytest.mark.gpu
def test_tf32_changes_what_a_gpu_computes() -> None:
    before = torchflags.snapshot()
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no TF32 below capability 8.0")
    with torchflags.preserved():
        torchflags.set_tf32(False)
        assert max(machine.fp32_behaviour("cuda").values()) < 1e-6
        torchflags.set_tf32(True)
        assert machine.fp32_behaviour("cuda")["matmul"] > 1e-5
    assert torchflags.snapshot() == before


# ---------------------------------------------------------------- the command
def test_the_command(tmp_path: Path) -> None:
    before = torchflags.snapshot()
    runner, path = CliRunner(), tmp_path / "deep" / "journal.json"
    plain = runner.invoke(app, ["report", "--json"])
    assert plain.exit_code == 0, plain.output
    found = json.loads(plain.stdout)
    assert found["problems"] == [] and found["trace"]
    assert found["facts"]["torch"] == torch.__version__
    assert found["facts"]["fp32_eta"]["matmul"] < 1e-3
    if not torch.cuda.is_available():
        assert found["facts"]["fp16_rate_ratio"] is None and found["facts"]["fp16_rate_ratio_source"]

    missing = runner.invoke(app, ["report", "--restore", "--journal", str(path)])
    assert missing.exit_code == 2 and "no journal" in missing.output

    both = runner.invoke(app, ["report", "--apply", "--restore", "--journal", str(path)])
    assert both.exit_code == 0, both.output
    assert "every switch reads as before" in both.output
    journal = json.loads(path.read_text())
    assert journal["restored"]["differences"] == [] and journal["before"] == before.to_json()
    assert torchflags.snapshot() == before

    again = runner.invoke(app, ["report", "--restore", "--journal", str(path)])
    assert again.exit_code == 0, again.output
    path.write_text('{"journal": 99}')
    assert runner.invoke(app, ["report", "--restore", "--journal", str(path)]).exit_code == 2


def test_a_journal_is_replayed_and_undone_in_another_run(tmp_path: Path) -> None:
    before = torchflags.snapshot()
    path = tmp_path / "journal.json"
    report.run(apply=True, restore=True, journal=path)
    record = json.loads(path.read_text())
    record["changes"] = {"tf32": True, "cudnn.benchmark": True}
    path.write_text(json.dumps(record))
    saved = report.apply_journal(path)
    assert saved == before
    assert torchflags.tf32_allowed() and torch.backends.cudnn.benchmark
    assert report.restore_journal(path) == []
    assert torchflags.snapshot() == before


def test_a_difference_after_restoring_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    get, _ = torchflags._PLAIN["cudnn.benchmark"]
    path = tmp_path / "journal.json"
    real = report.apply_changes

    def apply_and_stick(changes: Any) -> None:
        real({**changes, "cudnn.benchmark": True})
        monkeypatch.setitem(torchflags._PLAIN, "cudnn.benchmark", (get, lambda value: None))

    assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(report, "apply_changes", apply_and_stick)
    try:
        done = CliRunner().invoke(app, ["report", "--apply", "--restore", "--journal", str(path)])
    finally:
        torch.backends.cudnn.benchmark = False
    assert done.exit_code == 1
    assert "not put back: cudnn.benchmark: wanted False, found True" in done.output
