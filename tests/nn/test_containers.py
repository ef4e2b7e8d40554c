"""Networks of voxels inside torch's machinery: containers, checkpointing, copies, data loaders, compile, and
several processes."""

from __future__ import annotations

import copy
import io
import os
import pickle
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.data import DataLoader

import voxmma
from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.nn import functional as vF

import conftest


def voxels(device: torch.device | str = "cpu", n: int = 40, seed: int = 0, batch: int = 2) -> Voxels:
    generator = torch.Generator().manual_seed(seed)
    coords = conftest.random_coords(n, 5, batch=batch, seed=seed)
    return Voxels(coords.to(device), torch.randn(n, 4, generator=generator).to(device), batch)


class Block(nn.Module):
    """A user's module of Voxels with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = vnn.Sequential(
            vnn.SparseConv3d(channels, channels, 3), vnn.GroupNorm(2, channels), nn.ReLU(), nn.Dropout(0.0)
        )

    def forward(self, x: Voxels) -> Voxels:
        return self.body(x) + x


def network() -> vnn.Sequential:
    torch.manual_seed(0)
    return vnn.Sequential(
        vnn.SparseConv3d(4, 8, 3),
        nn.BatchNorm1d(8),
        nn.Sequential(nn.Linear(8, 8), nn.SiLU()),
        Block(8),
        vnn.Sequential(nn.LayerNorm(8), vnn.SparseConv3d(8, 3, 2)),
    )


def same(a: Voxels, b: Voxels) -> bool:
    return a.coord_set.equal(b.coord_set) and torch.equal(a.feats, b.feats) and a.stride == b.stride


# ---- containers --------------------------------------------------------------------------------------------


def test_sequential_mixes_layers_of_voxels_and_of_tensors(device: torch.device) -> None:
    model, x = network().to(device), voxels(device)
    y = x
    for part in (model[0], vnn.Lift(model[1]), vnn.Lift(model[2]), model[3], model[4]):
        y = part(y)
    again = copy.deepcopy(model)
    again.load_state_dict(model.state_dict())
    assert torch.equal(model.eval()(x).feats, again.eval()(x).feats)
    together = model.train()(x)  # the norm's sums are added in another order, on a GPU
    torch.testing.assert_close(together.feats, y.feats, rtol=1e-5, atol=1e-6)
    assert together.coord_set is y.coord_set is x.coord_set
    empty = Voxels(x.coords[:0], x.feats[:0].requires_grad_(), 2)
    model(empty).feats.sum().backward()
    assert empty.feats.grad is not None

    class OfTensor(nn.Module):
        def forward(self, t: torch.Tensor) -> torch.Tensor:
            return t.abs().sum(1, keepdim=True)

    class Pool(nn.Module):
        def forward(self, v: Voxels) -> torch.Tensor:
            return v.feats.mean(0, keepdim=True)

    tail = vnn.Sequential(vnn.Lift(OfTensor()), Pool(), nn.Linear(1, 2, device=device), nn.ReLU())
    assert tail(x).shape == (1, 2)
    wrapped = vnn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 2, device=device)))
    assert wrapped(x).feats.shape == (40, 2)


def test_state_dict_pickle_and_deepcopy_of_networks(device: torch.device) -> None:
    model, x = network().to(device), voxels(device)
    model(x)
    expected = model.eval()(x)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "x": x}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    fresh = network().to(device)
    assert not torch.equal(fresh.eval()(x).feats, expected.feats)
    fresh.load_state_dict(loaded["model"])
    for other in (fresh, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other.eval()(loaded["x"]).feats, expected.feats)
    assert vnn.SyncBatchNorm.convert_sync_batchnorm(fresh).state_dict().keys() == model.state_dict().keys()
    assert type(fresh[1]) is vnn.SyncBatchNorm and torch.equal(fresh(x).feats, expected.feats)
    assert torch.equal(pickle.loads(pickle.dumps(fresh))(x).feats, expected.feats)


def test_full_graph_compile(device: torch.device) -> None:
    model, x = network().to(device), voxels(device)
    expected = model(x)  # and the maps are there
    model.zero_grad()
    y = torch.compile(model, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(y.feats, expected.feats)
    assert y.coord_set is x.coord_set


# ---- gradient checkpointing --------------------------------------------------------------------------------


def gradients(run: Any, model: nn.Module, x: Voxels) -> list[torch.Tensor]:
    model.zero_grad()
    f = x.feats.clone().requires_grad_()
    run(x.with_feats(f)).feats.square().sum().backward()
    assert f.grad is not None
    return [f.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(device: torch.device, reentrant: bool) -> None:
    model, x = Block(4).to(device), voxels(device)
    runs = []

    def block(v: Voxels) -> Voxels:
        assert v.coord_set is x.coord_set  # maps are not built anew in the backward pass
        runs.append(torch.is_grad_enabled())
        return model(v)

    plain = gradients(block, model, x)
    runs.clear()
    ours = gradients(lambda v: vF.checkpoint(block, v, use_reentrant=reentrant) + v, model, x)
    skip = gradients(lambda v: block(v) + v, model, x)
    assert len(runs) == 3
    torch.testing.assert_close(ours, skip)
    if not reentrant:
        direct = gradients(lambda v: torch_checkpoint(block, v, use_reentrant=False), model, x)
        assert all(torch.equal(a, b) for a, b in zip(direct, plain, strict=True))

    def nested(pair: dict[str, Any], scale: float) -> tuple[Voxels, dict[str, torch.Tensor]]:
        return model(pair["x"]) + pair["x"].with_feats(pair["t"]), {"t": pair["t"] * scale}

    t = torch.randn(40, 4, device=device, requires_grad=True)
    y, rest = vF.checkpoint(nested, {"x": x, "t": t}, 2.0, use_reentrant=reentrant)
    assert y.coord_set is x.coord_set
    (y.feats.sum() + rest["t"].sum()).backward()
    torch.testing.assert_close(t.grad, torch.full_like(t, 3.0))


# ---- data loaders ------------------------------------------------------------------------------------------


class Scans(torch.utils.data.Dataset):
    """(coords, feats, label of the scan, labels of the voxels)."""

    def __init__(self, three_columns: bool) -> None:
        self.three_columns = three_columns

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Any, ...]:
        coords = conftest.random_coords(10 * i, 4, seed=i)
        return (
            coords[:, 1:] if self.three_columns else coords,
            torch.full((10 * i, 2), float(i)),
            i,
            coords[:, 1],
        )


@pytest.mark.parametrize("three_columns", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_collate_in_a_data_loader(workers: int, three_columns: bool) -> None:
    data = Scans(three_columns)
    loader = DataLoader(data, batch_size=2, num_workers=workers, collate_fn=voxmma.collate)
    for batch, (x, label, labels) in enumerate(loader):
        assert isinstance(x, Voxels) and x.batch_size == 2
        assert label.tolist() == [2 * batch, 2 * batch + 1] and torch.equal(labels, x.coords[:, 1])
        for sample, part in enumerate(voxmma.unbatch(x)):
            coords, feats, _, _ = Scans(False)[2 * batch + sample]
            assert torch.equal(part.coords, coords) and torch.equal(part.feats, feats)


def test_collate_of_other_samples() -> None:
    parts = [voxels(n=n, batch=1) for n in (5, 0, 7)]
    assert same(voxmma.collate(parts), voxmma.batch(parts))
    out = voxmma.collate([{"x": p, "y": (i, "name")} for i, p in enumerate(parts)])
    assert same(out["x"], voxmma.batch(parts)) and out["y"][0].tolist() == [0, 1, 2]
    x, y = voxmma.collate([(p, torch.ones(3)) for p in parts])
    assert same(x, voxmma.batch(parts)) and y.shape == (3, 3)
    good = (torch.zeros(1, 3, dtype=torch.int32), torch.zeros(1, 2))
    with pytest.raises(ValueError, match=r"samples\[1\]: feats has 2 rows"):
        voxmma.collate([good, (good[0], torch.zeros(2, 2))])
    with pytest.raises(ValueError, match=r"samples\[1\]: coords must be \(N, 3\) or \(N, 4\)"):
        voxmma.collate([good, (good[0][:, :2], good[1])])
    with pytest.raises(ValueError, match="at least one"):
        voxmma.collate([])
    leaves = pytree.tree_leaves(voxmma.collate([good, good]))
    assert [leaf.dtype for leaf in leaves] == [torch.int32, torch.float32]


# ---- several processes -------------------------------------------------------------------------------------


def ranks_train(rank: int, device: torch.device) -> None:
    """DistributedDataParallel: gradients are the mean of both ranks' own."""
    model = network().to(device)
    model[1] = nn.GroupNorm(2, 8).to(device)  # no statistics over ranks or samples: plain, per row
    whole = copy.deepcopy(model)
    parallel = nn.parallel.DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None
    )
    parts = [voxels(device, n=20 + 10 * r, seed=r) for r in range(2)]
    parallel(parts[rank]).feats.square().mean().backward()
    sum(whole(x).feats.square().mean() / 2 for x in parts).backward()  # type: ignore[union-attr]
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def ranks_normalise(rank: int, device: torch.device) -> None:
    """SyncBatchNorm: outputs, gradients and running statistics are those of all voxels together, also when a
    rank has none."""
    for sizes in ((20, 35), (0, 30), (40, 0)):
        torch.manual_seed(3)
        reference = vnn.BatchNorm(4, dtype=torch.float64, device=device)
        nn.init.normal_(reference.weight)
        sync = vnn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
        assert type(sync) is vnn.SyncBatchNorm
        parts = [voxels(device, n=n, seed=n).double() for n in sizes]
        feats = [p.feats.clone().requires_grad_() for p in parts]
        expected = reference(torch.cat(feats))
        weights = torch.randn_like(expected)
        expected_grads = torch.autograd.grad((expected * weights).sum(), feats)
        start = 0 if rank == 0 else sizes[0]
        mine = slice(start, start + sizes[rank])
        out = sync(parts[rank].with_feats(feats[rank])).feats
        torch.testing.assert_close(out, expected[mine])
        (grad,) = torch.autograd.grad((out * weights[mine]).sum(), feats[rank])
        torch.testing.assert_close(grad, expected_grads[rank])
        for a, b in zip(sync.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(a, b)


def ranks_do_not_warn(rank: int, device: torch.device) -> None:
    """A step of a network with SyncBatchNorm calls nothing that is deprecated."""
    model = vnn.SyncBatchNorm.convert_sync_batchnorm(network()).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model(voxels(device, n=20 + 10 * rank)).feats.square().mean().backward()
    assert any(p.grad is not None for p in model.parameters())


def ranks_shard(rank: int, device: torch.device) -> None:
    """FSDP2: a sharded network computes and trains as the whole one."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = network().to(device).eval()
    whole = copy.deepcopy(model)
    mesh = init_device_mesh(device.type, (2,))
    for part in (model[0], model[3], model[4]):
        fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    parts = [voxels(device, n=20 + 10 * r, seed=r) for r in range(2)]
    out = model(parts[rank])
    torch.testing.assert_close(out.feats, whole(parts[rank]).feats)
    assert out.coord_set is parts[rank].coord_set
    out.feats.square().mean().backward()
    sum(whole(x).feats.square().mean() / 2 for x in parts).backward()  # type: ignore[union-attr]
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad, rtol=1e-4, atol=1e-6)  # type: ignore[union-attr]


def ranks_start_cold(rank: int, device: torch.device) -> None:
    """The first step with an empty tuning cache, other shapes on each rank, opens no file, starts no process
    and reads no clock: there is nothing that could hold up a collective."""
    model = network().to(device)
    model[1] = nn.Identity()
    parallel = nn.parallel.DistributedDataParallel(
        model, device_ids=[device] if device.type == "cuda" else None
    )
    x = voxels(device, n=30 + 50 * rank, seed=rank)
    seen: list[str] = []
    watching = True

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and event in (
            "open",
            "os.listdir",
            "os.mkdir",
            "subprocess.Popen",
            "os.system",
            "sqlite3.connect",
        ):
            where = "".join(traceback.format_stack(limit=6))
            if "importlib" not in where and "linecache" not in where:
                seen.append(f"{event} {arguments[:1]} {where}")

    sys.addaudithook(audit)
    clocks = {name: getattr(time, name) for name in ("time", "perf_counter", "perf_counter_ns", "monotonic")}

    def clock(*_: Any) -> None:
        seen.append("a clock was read: " + "".join(traceback.format_stack(limit=4)))

    event_time = torch.cuda.Event.elapsed_time
    try:
        for name in clocks:
            setattr(time, name, clock)
        torch.cuda.Event.elapsed_time = clock  # type: ignore[assignment, method-assign]
        parallel(x).feats.square().mean().backward()
    finally:
        watching = False
        torch.cuda.Event.elapsed_time = event_time  # type: ignore[method-assign]
        for name, function in clocks.items():
            setattr(time, name, function)
    assert not seen, "\n".join(seen)


CHECKS = [ranks_train, ranks_normalise, ranks_do_not_warn, ranks_shard, ranks_start_cold]


def _rank(rank: int, folder: str, kind: str) -> None:
    """One of two processes: runs every check and writes what came out."""
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(device)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=2)
    results = {}
    for check in CHECKS:
        try:
            check(rank, device)
            results[check.__name__] = ""
        except Exception:
            results[check.__name__] = traceback.format_exc()
    torch.save(results, f"{folder}/{rank}.pt")
    dist.barrier()  # neither leaves while the other still talks to it
    # Without destructors: gloo's threads now and then abort a process that takes its groups down ("terminate
    # called without an active exception"), after everything that is checked here.
    os._exit(0)


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.multigpu)])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, clean: conftest.Clean
) -> list[dict[str, str]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    clean(
        "import torch.distributed.fsdp, torch.multiprocessing as mp\n"
        f"sys.path[:0] = {[str(path) for path in Path(__file__).parents[:2]]!r}\n"
        f"os.environ['VOXMMA_CACHE_DIR'] = {str(folder / 'cache')!r}\n"
        "def rank(number):\n"
        "    import test_containers\n"
        f"    test_containers._rank(number, {str(folder)!r}, {request.param!r})\n"
        "mp.start_processes(rank, nprocs=2, start_method='fork')\n"
        "found = None"
    )
    assert not (folder / "cache").exists() or not list((folder / "cache").iterdir())
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def outcome(ranks: list[dict[str, str]], check: Any) -> str:
    return "\n".join(result[check.__name__] for result in ranks if result[check.__name__])


def test_distributed_data_parallel(ranks: list[dict[str, str]]) -> None:
    assert not outcome(ranks, ranks_train)


def test_sync_batch_norm(ranks: list[dict[str, str]]) -> None:
    assert not outcome(ranks, ranks_normalise)


def test_fault_65_nothing_deprecated_is_called_over_ranks(ranks: list[dict[str, str]]) -> None:
    assert not outcome(ranks, ranks_do_not_warn)


def test_fully_sharded(ranks: list[dict[str, str]]) -> None:
    assert not outcome(ranks, ranks_shard)


def test_fault_24_nothing_is_tuned_inside_a_step(ranks: list[dict[str, str]]) -> None:
    assert not outcome(ranks, ranks_start_cold)
