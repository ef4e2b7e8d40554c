"""The tuning cache under many writers, kills and full disks; the selector that reads it; the tuner itself."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

import voxmma
from voxmma import _timing as timing
from voxmma import _types
from voxmma.dispatch import measurements, selection, settings, store, validation
from voxmma.dispatch.measurements import Key, Table
from voxmma.dispatch.store import Owner
from voxmma.ops import kernels
from voxmma.sparse.maps import kernel_map
from voxmma.tools.cli import app
from voxmma.tuning import tuner

from conftest import in_child, random_coords, surface_coords
from tile_table import ARCHS, snapshot, stand_in

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OWNER = Owner("Some Card", "9.0", 132, "580.1", "build-1")
KEY = Key("fwd", "fp16", "fp32", 64, 64, 1, 27, "ieee")
H100 = (9, 0)
HEURISTIC, OTHER = "sm90_f16_256x64x64_acc32", "sm80_f16_256x64x32_acc32"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path) -> Iterator[Path]:
    """The cache file, which does not exist, and nothing read or warned about before."""
    measurements.reload()
    store.warn_once.cache_clear()
    with settings.override(cache_dir=str(tmp_path / "cache")):
        yield tmp_path / "cache" / "records.jsonl"
    measurements.reload()


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner is known for every device, the CPU too."""
    monkeypatch.setattr(store, "owner_of", lambda device, one_card=False: OWNER)


def measured(owner: Owner = OWNER, key: Key = KEY, **ms: float) -> measurements.Body:
    return measurements.body(owner, key, ms or {HEURISTIC: 2.0, OTHER: 1.0}, at="now")


# ---- the file ----------------------------------------------------------------------------------------------


def test_what_was_written_is_read(cache: Path) -> None:
    assert measurements.read(cache, OWNER) == []
    first, second = measured(), measured(a=1.25, b=0.1 + 0.2)
    assert store.append([first]) is None and store.append([second]) is None
    assert measurements.read(cache, OWNER) == [first, second]
    assert len(cache.read_text().splitlines()) == 2


def test_measurements_of_another_card_driver_or_build_are_ignored(cache: Path) -> None:
    others = [
        replace(OWNER, card="Other Card"),
        replace(OWNER, driver="580.2"),
        replace(OWNER, build="build-2"),
        replace(OWNER, multiprocessors=114),
    ]
    store.append([measured(owner) for owner in others])
    with pytest.warns(UserWarning, match="another driver or build .* run voxmma tune again"):
        assert measurements.read(cache, OWNER) == []
    ours = measured()
    store.append([ours])
    assert measurements.read(cache, OWNER) == [ours]


def test_a_shared_file_does_not_warn_about_other_cards(cache: Path, recwarn: pytest.WarningsRecorder) -> None:
    store.append([measured(replace(OWNER, card="Other Card")), measured(replace(OWNER, driver="1.0"))])
    store.append([measured()])
    assert len(measurements.read(cache, OWNER)) == 1
    assert len(measurements.read(cache, replace(OWNER, card="New Card"))) == 0
    assert not recwarn.list


def test_a_line_cut_short_anywhere_costs_only_itself(cache: Path) -> None:
    first, second, third = measured(a=1.0), measured(b=2.0), measured(c=3.0)
    store.append([first, second])
    whole = cache.read_bytes()
    end_of_first = whole.index(b"\n") + 1
    for cut in range(end_of_first + 1, len(whole) - 1, 7):
        cache.write_bytes(whole[:cut])
        store.warn_once.cache_clear()
        with pytest.warns(UserWarning, match=r"1 damaged line"):
            assert measurements.read(cache, OWNER) == [first]
        assert store.append([third]) is None  # begins a line of its own
        store.warn_once.cache_clear()
        with pytest.warns(UserWarning, match=r"1 damaged line"):
            assert measurements.read(cache, OWNER) == [first, third]


@pytest.mark.parametrize(
    "damage",
    [
        lambda line: line.replace(b"2.0", b"1.0"),
        lambda line: line.replace(b'"fwd"', b'"bwd"'),
        lambda line: b"\xff\xfe" + line,
        lambda line: b"[1, 2]\n",
        lambda line: b"{}\n",
    ],
)
def test_a_changed_line_fails_its_checksum(cache: Path, damage: Callable[[bytes], bytes]) -> None:
    good = measured(a=1.0)
    store.append([measured(), good])
    bad, rest = cache.read_bytes().split(b"\n", 1)
    cache.write_bytes(damage(bad + b"\n") + rest)
    with pytest.warns(UserWarning, match="damaged"):
        assert measurements.read(cache, OWNER) == [good]


@pytest.mark.parametrize("ms", [{}, {"a": 0.0}, {"a": -1.0}, {"a": float("nan")}, {"a": "fast"}])
def test_impossible_times_are_damage(cache: Path, ms: dict[str, Any]) -> None:
    store.append([measurements.body(OWNER, KEY, ms)])
    with pytest.warns(UserWarning, match="damaged"):
        assert measurements.read(cache, OWNER) == []


@pytest.mark.parametrize("kind", ["folder", "endless", "huge"])
def test_a_file_that_cannot_be_read_is_no_error(
    cache: Path, card: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    store.append([measured()])
    if kind == "huge":
        monkeypatch.setattr(store, "MAX_BYTES", 100)
    else:
        cache.unlink()
        cache.mkdir() if kind == "folder" else cache.symlink_to("/dev/zero")
    with pytest.warns(UserWarning, match=r"cannot be read .* nothing that was measured is used"):
        assert len(measurements.table(GPU)) == 0


# ---- many writers, kills, full disks -----------------------------------------------------------------------


def test_eight_processes_write_at_once(
    cache: Path, card: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LOCK_SECONDS", 600.0)  # however slowly the others get on
    context = multiprocessing.get_context("fork")
    start = context.Barrier(8)
    done = context.Barrier(8)

    def write(number: int) -> None:
        start.wait()
        for i in range(25):
            ms = {"a": 1.0 + number / 8, "b": 1.5, f"only-{number}-{i}": 0.1}
            if store.append([measured(**ms)]) is not None:
                os._exit(1)
        done.wait()
        won = measurements.table(GPU).choose(KEY, "b", ["a", "b"])
        (tmp_path / f"won-{number}").write_text(repr(won))
        os._exit(0)

    children = [context.Process(target=write, args=(number,)) for number in range(8)]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0] * 8
    assert len(measurements.read(cache, OWNER)) == 200 and len(cache.read_bytes().splitlines()) == 200
    answers = {(tmp_path / f"won-{number}").read_text() for number in range(8)}
    assert len(answers) == 1 and "tile='a'" in answers.pop()


def test_a_writer_killed_in_the_middle_of_a_line(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = measured(a=1.0), measured(b=1.0)
    store.append([before])
    real = os.write

    def half(handle: int, data: bytes) -> int:
        real(handle, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
        return 0

    def work() -> None:
        os.write = half  # type: ignore[assignment]
        store.append([measured(c=1.0)])

    assert in_child(work) == -signal.SIGKILL
    assert not cache.read_bytes().endswith(b"\n")
    with monkeypatch.context() as patch:
        patch.setattr(store.time, "sleep", lambda seconds: pytest.fail("the lock outlived its holder"))
        assert store.append([after]) is None
    with pytest.warns(UserWarning, match="1 damaged line"):
        assert measurements.read(cache, OWNER) == [before, after]


def test_writers_killed_at_any_time_leave_a_file_of_whole_lines(cache: Path) -> None:
    def work() -> None:
        while True:
            store.append([measured(a=1.0), measured(b=1.0)])

    for size in (1, 20_000, 50_000):
        child = multiprocessing.get_context("fork").Process(target=work)
        child.start()
        deadline = time.monotonic() + 600
        while not (cache.exists() and cache.stat().st_size > size) and time.monotonic() < deadline:
            time.sleep(1e-3)
        os.kill(child.pid or 0, signal.SIGKILL)
        child.join(600)
    before = len(measurements.read(cache, OWNER))
    assert store.append([measured()]) is None
    assert before >= 50_000 // 1000 and len(measurements.read(cache, OWNER)) == before + 1


def test_a_full_disk_is_said_and_survived(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.symlink_to("/dev/full")
    problem = store.append([measured()])
    assert problem is not None and os.strerror(errno.ENOSPC) in problem and str(cache) in problem


def test_a_write_cut_short_by_the_system_is_undone(cache: Path) -> None:
    """A limit on the size of files lets a write through in part, as a disk does that fills up."""
    first = measured(a=1.0)
    store.append([first])
    whole = cache.read_bytes()

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 40, len(whole) + 40))
        problem = store.append([measured(b=1.0)])
        os._exit(0 if problem is not None and os.strerror(errno.EFBIG) in problem else 1)

    assert in_child(work) == 0
    assert cache.read_bytes() == whole


def test_a_full_disk_when_the_data_is_flushed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append([measured(a=1.0)])
    whole = cache.read_bytes()

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)  # where a network file system reports it
    assert os.strerror(errno.ENOSPC) in (store.append([measured()]) or "")
    assert cache.read_bytes() == whole


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    with settings.override(cache_dir=os.devnull):
        assert "cannot be written" in (store.append([measured()]) or "")


def test_without_a_home_directory_nothing_is_kept(
    card: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No HOME, and a user whom the system does not know: reading goes on, writing says why not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # what it gives then
    with settings.override(cache_dir="~/.cache/voxmma of nobody"):
        assert store.stamp() == store.recent_stamp() == "" and store.newest("rates", OWNER, {}) is None
        assert len(measurements.table(GPU)) == 0
        assert "set VOXMMA_CACHE_DIR" in (store.append([measured()]) or "")
        assert measurements.forget() == 0
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_never_released_delays_and_does_not_stop(
    cache: Path, card: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append([measured(a=1.0)])
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    with cache.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with monkeypatch.context() as patch:
            patch.delattr(store, "_locked")
            assert len(measurements.table(GPU)) == 1  # readers take no lock
        assert store.append([measured(b=1.0)]) is None
    assert len(measurements.read(cache, OWNER)) == 2


# ---- merging -----------------------------------------------------------------------------------------------


def test_the_winner_does_not_depend_on_the_order() -> None:
    bodies = [
        measured(a=1.0, b=1.1, c=1.2),
        measured(a=10.0, b=7.0, c=9.0),
        measured(a=1.0, b=0.9, c=1.0, d=0.1),
    ]
    orders = [Table(order).choose(KEY, "a", "abcd") for order in itertools.permutations(bodies)]
    assert len(set(map(repr, orders))) == 1
    won = orders[0]
    assert (
        won is not None and won.tile == "b" and won.measurements == 3 and won.tiles == 3
    )  # d is in one only
    assert won.gain == pytest.approx((1 / 1.1 * 10 / 7 * 1 / 0.9) ** (1 / 3))


@pytest.mark.parametrize(
    ("ms", "default", "allowed", "expected"),
    [
        ({"a": 1.0, "b": 0.5}, "a", "ab", "b"),
        ({"a": 1.0, "b": 0.99}, "a", "ab", "a"),  # too close to leave the heuristic
        ({"a": 1.0, "b": 0.5}, "a", "a", "a"),
        ({"a": 1.0, "b": 0.5}, "c", "abc", "b"),  # the heuristic's tile was not measured
        ({"b": 1.0, "a": 1.0}, "c", "abc", "a"),  # a tie
    ],
)
def test_which_tile_wins(ms: dict[str, float], default: str, allowed: str, expected: str) -> None:
    won = Table([measured(**ms)]).choose(KEY, default, allowed)
    assert won is not None and won.tile == expected


def test_what_was_not_measured_has_no_winner() -> None:
    table = Table([measured(a=1.0)])
    assert table.choose(KEY, "x", ["x"]) is None
    for change in ({"op": "dgrad"}, {"accumulator": "fp16"}, {"c_in": 65}, {"volume": 8}, {"dtype": "bf16"}):
        assert table.choose(KEY._replace(**change), "a", ["a"]) is None
    assert Table([measured(a=1.0), measured(b=1.0)]).choose(KEY, "a", ["a", "b"]) is None


# ---- reading once ------------------------------------------------------------------------------------------


def test_the_file_is_read_once_and_lazily(cache: Path, card: None, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Path] = []
    honest = measurements.read

    def counted(file: Path, owner: Owner) -> list[measurements.Body]:
        reads.append(file)
        return honest(file, owner)

    monkeypatch.setattr(measurements, "read", counted)
    assert measurements.stamp(CPU) == measurements.stamp((9, 0)) == 0 and not reads
    first = measurements.stamp(GPU)
    store.append([measured()])
    assert measurements.stamp(GPU) == first and len(measurements.table(GPU)) == 0 and reads == [cache]
    measurements.reload()
    assert measurements.stamp(GPU) != first and len(measurements.table(GPU)) == 1 and len(reads) == 2


def test_adopted_measurements_count_at_once(cache: Path, card: None) -> None:
    before = measurements.stamp(GPU)
    measurements.adopt(GPU, [measured(), measured(replace(OWNER, build="other"), a=1.0)])
    assert (
        measurements.stamp(GPU) != before and len(measurements.table(GPU).bodies) == 1 and not cache.exists()
    )
    measurements.adopt(GPU, [measured(), measured(a=1.0)])
    assert len(measurements.table(GPU).bodies) == 2
    measurements.adopt(GPU, [measured(b=1.0)], replace=True)
    assert len(measurements.table(GPU).bodies) == 1


def test_forget_empties_the_file(cache: Path, card: None) -> None:
    assert measurements.forget() == 0
    store.append([measured(), measured(a=1.0)])
    assert len(measurements.table(GPU)) == 1
    assert measurements.forget() == 2
    assert cache.read_bytes() == b"" and len(measurements.table(GPU)) == 0


def test_forget_leaves_what_is_not_of_its_kind_and_what_others_write(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file may be shared with a newer voxmma, whose records this one cannot read."""
    newer = {
        **store.entry("verdict", OWNER, {}),
        "format": store.FORMAT + 1,
        "owner": {"card": "x", "new": 1},
    }
    store.append([newer, measured()])
    assert measurements.forget() == 1
    assert cache.read_bytes() == store._line(newer)
    store.append([measured()])
    monkeypatch.setattr(store, "LOCK_SECONDS", 0.05)
    with cache.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        with pytest.raises(OSError, match="another process is writing"):
            measurements.forget()
    with monkeypatch.context() as patch:

        def none(*args: object) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        patch.setattr(fcntl, "flock", none)
        assert measurements.forget() == 1
    assert cache.read_bytes() == store._line(newer)


# ---- the selector ------------------------------------------------------------------------------------------


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, card: None) -> Iterator[None]:
    """A build that holds every tile, on a card of capability 9.0."""
    stand_in(monkeypatch, snapshot(), ARCHS)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: H100)
    kernels.compiled.cache_clear()
    selection._plan_call.cache_clear()
    yield
    monkeypatch.undo()
    kernels.compiled.cache_clear()
    selection._plan_call.cache_clear()


def select(op: str = "fwd", accumulator: str = "fp32", **more: Any) -> Any:
    given = {"volume": 27, "target": GPU, **more}
    return selection.select_tile(op, torch.float16, accumulator, 64, 64, **given)


def test_the_selector_takes_the_tuned_tile(build: None) -> None:
    assert select().name == HEURISTIC and not select().tuned
    measurements.adopt(GPU, [measured()])
    choice = select()
    assert (choice.name, choice.tuned) == (OTHER, True)
    assert choice.reason == f"fwd tuned: 2.00x {HEURISTIC}, of 2 tiles"
    for change in ({"op": "dgrad"}, {"volume": 8}, {"volume": 0}, {"target": H100}, {"accumulator": "fp16"}):
        assert not select(**change).tuned
    named = select(mode=(HEURISTIC,))
    assert named.name == HEURISTIC and not named.tuned  # a name in the settings is an order


def test_a_tile_of_another_accumulator_or_build_never_wins(build: None) -> None:
    wrong = {"sm90_f16_256x64x64_acc16": 0.1, "sm90_f16_gone": 0.1, "sm80_bf16_256x64x64_acc32": 0.1}
    measurements.adopt(GPU, [measured(**wrong, **{HEURISTIC: 1.0})])
    assert select().name == HEURISTIC and "confirmed" in select().reason


def test_a_plan_says_tuned_and_follows_new_measurements(build: None) -> None:
    def plan(volume: int = 27) -> Any:
        return selection.plan_call(
            torch.float16, False, "default", 64, 64, 1, GPU, settings.DEFAULT_POOLS, 0, volume
        )

    assert "tuned" not in plan()[1]
    for op, mine in (("fwd", OTHER), ("dgrad", OTHER), ("wgrad", "sm90_f16_wgrad_32x64")):
        measurements.adopt(GPU, [measured(key=KEY._replace(op=op), **{mine: 1.0})])
        assert f"{op} tuned" in plan()[1] and mine in plan()[2:]
    assert "tuned" not in plan(8)[1]


def test_a_plan_reads_no_file_in_a_warm_call(build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (torch.float16, False, "default", 64, 64, 1, GPU, settings.DEFAULT_POOLS, 0, 27)
    selection.plan_call(*arguments)

    def never(*_: Any) -> Any:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(measurements, "read", never)
    monkeypatch.setattr(store, "_locked", never)
    selection.plan_call(*arguments)


def test_trimmed_and_all_pools_use_measurements_too(build: None) -> None:
    measurements.adopt(GPU, [measured()])
    for word in ("trimmed", "all"):
        assert select(mode=(word,)).tuned


# ---- the tuner ---------------------------------------------------------------------------------------------


def case(channels: int = 8, voxels: int = 60, **more: Any) -> tuner.Case:
    voxels_ = voxmma.Voxels(random_coords(voxels, 6), torch.zeros(voxels, 1))
    return tuner.Case(kernel_map(voxels_.coord_set, 3), channels, channels, torch.float32, **more)


@pytest.fixture
def fake_tiles(monkeypatch: pytest.MonkeyPatch, card: None) -> None:
    """Four tiles on the CPU: quick, slow, a wrong one and one that cannot run. The clock is made up."""
    honest = tuner.Bench.runner
    now = [0.0]
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    names = ["slow", "quick", "wrong", "broken"]
    monkeypatch.setattr(tuner, "candidates", lambda case, op: (list(names), {"gated": "gate: bound"}))
    monkeypatch.setattr(tuner, "_heuristic", lambda case, op: "slow")

    def runner(self: tuner.Bench, op: str, tile: str) -> Any:
        if tile == "broken":
            raise RuntimeError("no such kernel\nmore")
        _, result, record = honest(self, op, tile)
        record = replace(record, tile=tile, dgrad_tile=tile, wgrad_tile=tile)
        taken = {"slow": 1.5e-3, "quick": 1e-3, "wrong": 1e-5}[tile]

        def run(i: int) -> None:
            now[0] += taken

        return run, result * 1.01 if tile == "wrong" else result, record

    monkeypatch.setattr(tuner.Bench, "runner", runner)


def test_tune_measures_proves_and_keeps(fake_tiles: None, cache: Path) -> None:
    said: list[str] = []
    report = voxmma.tune([case(), case(layer="again")], repeats=2, advance=said.append)
    assert [result.key.op for result in report.results] == ["fwd", "dgrad", "wgrad"] and len(said) == 3
    for result in report.results:
        assert (result.default, result.winner, result.layers) == ("slow", "quick", ["again"])
        assert set(result.ms) == {"slow", "quick"} and result.gain == pytest.approx(1.5)
        assert "wrong: max eta" in result.refused["wrong"]
        assert result.refused["broken"] == "no such kernel" and result.refused["gated"] == "gate: bound"
    assert report.written == str(cache) and not report.problem
    kept = measurements.read(cache, OWNER)
    assert [body["key"]["op"] for body in kept] == ["fwd", "dgrad", "wgrad"]
    assert all(body["by"].endswith(f":{os.getpid()}") and body["refused"] for body in kept)
    measurements.reload()  # what another process sees
    won = measurements.table(CPU).choose(report.results[0].key, "slow", ["slow", "quick"])
    assert won is not None and won.tile == "quick"
    assert json.loads(json.dumps(report.as_dict()))["results"][0]["gain"] == pytest.approx(1.5)
    assert "quick" in str(report)


def test_tune_on_a_full_disk_says_so_and_goes_on(fake_tiles: None, cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.symlink_to("/dev/full")
    with (
        pytest.warns(UserWarning, match=r"No space left.*last for this process"),
        pytest.warns(UserWarning, match="cannot be read"),
    ):
        report = voxmma.tune([case()], ops=["fwd"], repeats=1)
    assert "No space left" in report.problem and not report.written
    assert report.results[0].winner == "quick" and len(measurements.table(CPU)) == 1


def test_tune_without_save_leaves_no_file(fake_tiles: None, cache: Path) -> None:
    report = voxmma.tune([case()], ops=["fwd"], repeats=1, save=False)
    assert report.results[0].winner == "quick" and not cache.exists()


def test_tune_a_model_and_leave_it_as_it_was(cache: Path) -> None:
    nn = voxmma.nn
    model = nn.Sequential(
        nn.SparseConv3d(4, 8, 3),
        nn.BatchNorm(8),
        nn.SparseConv3d(8, 8, 3),
        nn.SparseConv3d(8, 8, 3),
        nn.SparseConv3d(8, 16, 2, stride=2),
        nn.SparseConvTranspose3d(16, 8, 2, stride=2, groups=2),
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    x = voxmma.Voxels(surface_coords(8), torch.randn(128, 4))
    found = tuner.cases_of(model, [x])
    assert [(c.c_in, c.c_out, c.mapping.kernel_volume, c.groups) for c in found] == [
        (4, 8, 27, 1), (8, 8, 27, 1), (8, 8, 27, 1), (8, 16, 8, 1), (16, 8, 8, 2),
    ]  # fmt: skip
    report = voxmma.tune(model, x, repeats=1)
    assert len(report.results) == 12  # two layers are alike
    assert report.results[3].layers == ["2", "3"]
    for result in report.results:
        assert set(result.ms) == {"cpu"} and result.winner == "cpu" and not result.refused
    assert report.skipped == ["nothing is kept: a CPU has one tile for each call"] and not cache.exists()
    assert model.training and all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    for value in model.parameters():
        assert value.grad is None


@pytest.mark.parametrize(
    ("dtype", "accumulator", "precision"),
    [
        (torch.float16, "fp16", "ieee"),
        (torch.float16, "fp16_promoted:32", "ieee"),
        (torch.bfloat16, "fp32", "ieee"),
        (torch.bfloat16, "fp16", "ieee"),
        (torch.float32, "fp32", "tf32"),
    ],
)
def test_every_mode_proves_itself(dtype: torch.dtype, accumulator: str, precision: str) -> None:
    given = replace(case(16), dtype=dtype, accumulator=accumulator, precision=precision)
    for op in tuner.OPS:
        result, _ = tuner.measure(given, op, 1)
        assert len(result.ms) == 1 and not result.refused, (op, result)
    key = given.key("fwd")
    assert key.dtype == ("fp16" if accumulator != "fp32" else _types.DTYPE_NAMES[dtype])
    assert given.key("wgrad").accumulator == "fp32" and key.precision == precision


def test_candidates_are_the_legal_tiles_the_gate_admits(build: None, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = replace(case(64), mapping=SimpleNamespace(device=GPU, kernel_volume=27), dtype=torch.float16)
    names, refused = tuner.candidates(on_gpu, "fwd")
    assert {HEURISTIC, OTHER} < set(names) and not refused
    assert all("acc32" in name for name in names)
    narrow = replace(on_gpu, groups=16)  # four channels a group: the heuristic takes plain FMAs
    assert "simt_f16" in tuner.candidates(narrow, "fwd")[0]
    wide = replace(on_gpu, dtype=torch.float32)
    assert "simt_f32" in tuner.candidates(wide, "fwd")[0] and len(tuner.candidates(wide, "fwd")[0]) > 1
    assert all("wgrad" in name for name in tuner.candidates(on_gpu, "wgrad")[0])
    check = SimpleNamespace(runs_on_request=False, reason="bound: 1 of 0.1")
    fine = SimpleNamespace(runs_on_request=True, reason="")
    bad = "sm90_f16_256x64x64_acc16"
    monkeypatch.setattr(validation, "on_record", lambda name, device: check if name == bad else fine)
    names, refused = tuner.candidates(replace(on_gpu, accumulator="fp16"), "fwd")
    assert bad not in names and refused == {bad: "validation: bound: 1 of 0.1"}
    assert names and all("acc16" in name for name in names)


def test_the_setting_says_how_many_candidates_are_measured(build: None) -> None:
    on_gpu = replace(case(64), mapping=SimpleNamespace(device=GPU, kernel_volume=27), dtype=torch.float16)
    found = {}
    for word in settings.ALGO_MODE_WORDS:
        with settings.override(fwd_algo_mode=(word,)):
            found[word], refused = tuner.candidates(on_gpu, "fwd")
            assert len(set(found[word])) == len(found[word]) and not refused
            assert HEURISTIC in found[word] and len(tuner.candidates(on_gpu, "wgrad")[0]) > tuner.TRIMMED
    legal = [tile.name for tile in kernels.legal("fwd", torch.float16, "fp32", selection.card(GPU))]
    assert found["all"] == legal and set(legal) - set(found["auto"]) == {"simt_f16"}
    assert found["trimmed"][0] == HEURISTIC and len(found["trimmed"]) == tuner.TRIMMED < len(found["auto"])
    for place, name in enumerate(
        found["trimmed"][1:], 1
    ):  # each is the choice where those before are not there
        assert select(mode=tuple(set(found["auto"]) - set(found["trimmed"][:place]))).name == name


@pytest.mark.parametrize(
    ("word", "timed"), [("trimmed", {"quick"}), ("auto", {"quick"}), ("all", {"slow", "quick"})]
)
def test_hopeless_tiles_are_timed_to_the_end_under_all_alone(
    word: str, timed: set[str], fake_tiles: None, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raced: list[set[str]] = []
    honest = timing.Clock.race

    def race(self: timing.Clock, runs: Any, **more: Any) -> Any:
        raced.append(set(runs))
        return honest(self, runs, **more)

    monkeypatch.setattr(timing.Clock, "race", race)
    monkeypatch.setattr(tuner, "HOPELESS", 1.2)  # slow takes 1.5 times what quick takes
    with settings.override(fwd_algo_mode=(word,)):
        (result,) = voxmma.tune([case()], ops=["fwd"], repeats=2).results
    assert raced == [{"slow", "quick"}, timed] and set(result.ms) == {"slow", "quick"}


def test_nothing_to_tune_is_an_error() -> None:
    with pytest.raises(ValueError, match="no convolution to tune"):
        voxmma.tune([])
    with pytest.raises(ValueError, match="no sparse convolution layer"):
        voxmma.tune(torch.nn.Linear(2, 2), torch.ones(1, 2))
    with pytest.raises(ValueError, match="'bwd' is none of fwd, dgrad, wgrad"):
        voxmma.tune([case()], ops=["bwd"])


def test_fp64_and_empty_maps_are_passed_over() -> None:
    empty = voxmma.Voxels(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, 1), batch_size=1)
    cases = [replace(case(layer="a"), dtype=torch.float64), tuner.Case(kernel_map(empty, 3), 4, 4)]
    report = voxmma.tune(cases, ops=["fwd"], repeats=1)
    assert report.skipped[0] == "a: fp64 has one tile" and report.results[0].ms == {}


# ---- ranks -------------------------------------------------------------------------------------------------


def ranks(tmp_path: Path, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns in two forked processes with a process group; errors as their text."""

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        store = dist.FileStore(str(tmp_path / "store"), 2)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
        try:
            said = work(rank)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        (tmp_path / f"{rank}.json").write_text(json.dumps(said))
        dist.barrier()
        os._exit(0)

    children = [multiprocessing.get_context("fork").Process(target=run, args=(rank,)) for rank in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0, 0]
    return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]


def scores() -> list[Any]:
    table = measurements.table(CPU)
    return [[*key, sorted(table._scores[key][0].items())] for key in table.keys]


def test_ranks_divide_the_work_and_agree(fake_tiles: None, cache: Path, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        said: list[str] = []
        report = voxmma.tune([case(8), case(12)], repeats=1, advance=said.append)
        dist.barrier()
        return {"said": said, "winners": [r.winner for r in report.results], "scores": scores()}

    first, second = ranks(tmp_path, work)
    assert len(first["said"]) == len(second["said"]) == 3 and not set(first["said"]) & set(second["said"])
    assert first["winners"] == second["winners"] == ["quick"] * 6
    assert first["scores"] == second["scores"] and len(first["scores"]) == 6
    assert len(measurements.read(cache, OWNER)) == 6  # written once


def test_a_rank_that_fails_is_known_to_all(fake_tiles: None, cache: Path, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        return bool(voxmma.tune([case()] if rank == 0 else [], repeats=1))

    assert ranks(tmp_path, work) == [
        "RuntimeError: tuning failed on rank 1: ValueError: no convolution to tune",
        "ValueError: no convolution to tune",
    ]
    assert not cache.exists()


def test_share_gives_every_rank_the_first_ones_measurements(card: None, tmp_path: Path) -> None:
    def work(rank: int) -> Any:
        measurements.adopt(CPU, [measured(a=1.0 + rank), measured(b=2.0)][: 2 - rank])
        before = scores()
        measurements.share(CPU)
        return [before, scores()]

    first, second = ranks(tmp_path, work)
    assert first[0] != second[0] and first[0] == first[1] == second[1]
    measurements.share(CPU)  # without a process group it does nothing


# ---- command line ------------------------------------------------------------------------------------------


def invoke(*arguments: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["tune", *arguments])
    assert result.exit_code == code, result.output
    return result


def test_command_tunes_shapes(fake_tiles: None, cache: Path, tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "tiny.npz", coords=random_coords(50, 6).numpy().astype(np.int16))
    options = ["--scene", str(tmp_path / "tiny.npz"), "--channels", "4,4x8", "--kernel", "3,2s2"]
    options += ["--device", "cpu", "--repeats", "1", "--dtype", "fp32"]
    report = json.loads(invoke(*options, "--ops", "fwd", "--json").stdout)
    shapes = [(r["key"]["c_in"], r["key"]["c_out"], r["key"]["volume"]) for r in report["results"]]
    assert shapes == [(4, 4, 27), (4, 8, 27), (4, 4, 8), (4, 8, 8)]
    assert all(r["winner"] == "quick" for r in report["results"]) and report["written"] == str(cache)
    kept = json.loads(invoke("--list", "--device", "cpu", "--json").stdout)
    assert [line["volume"] for line in kept] == [27, 27, 8, 8]
    assert "quick" in invoke("--list", "--device", "cpu").stdout
    assert "4 line(s) deleted" in invoke("--forget").stdout and cache.read_bytes() == b""
    cache.unlink()
    cache.symlink_to("/dev/full")
    assert "No space left" in invoke(*options, "--ops", "fwd", "--json", code=1).output


def test_command_tunes_a_model(tmp_path: Path) -> None:
    source = tmp_path / "model.py"
    source.write_text(
        "import torch, voxmma\n"
        "def make():\n"
        "    x = voxmma.Voxels(torch.tensor([[0, 0, 0, 0], [0, 0, 0, 1]]).int(), torch.randn(2, 4))\n"
        "    return voxmma.nn.SparseConv3d(4, 6, 3), (x,)\n"
    )
    text = invoke(f"{source}:make", "--device", "cpu", "--repeats", "1").stdout
    assert "4x6" in text and "one tile for each call" in " ".join(text.split())


@pytest.mark.parametrize(
    ("option", "value"),
    [("--channels", "x"), ("--kernel", "10"), ("--dtype", "fp8"), ("--ops", "bwd"), ("--scene", "moon"),
     ("--device", "tpu"), ("--accumulator", "fp12")],
)  # fmt: skip
def test_command_names_what_it_cannot_do(option: str, value: str) -> None:
    assert value in invoke("--scene", "surface", "--device", "cpu", option, value, code=2).output


# ---- on a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_tuned_layer_says_so_on_a_gpu(cache: Path) -> None:
    feats = torch.randn(8192, 64, device="cuda").half().requires_grad_()
    x = voxmma.Voxels(surface_coords(64).cuda(), feats)
    layer = voxmma.nn.SparseConv3d(64, 64, 3, bias=False).cuda().half()
    before = layer(x)
    report = voxmma.tune(layer, x, repeats=3)
    assert len(report.results) == 3 and not any(
        "wrong" in why for r in report.results for why in r.refused.values()
    )
    for result in report.results:
        assert result.winner in result.ms and result.default in result.ms
    assert any(len(result.ms) > 1 for result in report.results)  # small cards have one tile for some
    with voxmma.audit() as log:
        after = layer(x)
        after.feats.sum().backward()
    record = voxmma.explain(after)
    assert [record.tile, record.dgrad_tile, record.wgrad_tile] == [r.winner for r in report.results]
    assert all(f"{op} tuned" in record.reason for op in tuner.OPS)
    assert len(log) == 3 and all("tuned" in launch.reason for launch in log)
    torch.testing.assert_close(before.feats, after.feats, rtol=2e-3, atol=2e-3)
    measurements.reload()  # as a new process
    assert voxmma.explain(layer(x)).tile == record.tile
    measurements.forget()
    assert "tuned" not in voxmma.explain(layer(x)).reason
