"""Engines: frames of any size give what the eager network gives, and what is refused and reported."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import json
import math
import pickle
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import voxmma
from voxmma import models
from voxmma import nn as vnn
from voxmma.engine import Engine, EngineError, Points, compile, file, load, optimise, save
from voxmma.engine.optimise import beside
from voxmma.engine.program import Ref, reads
from voxmma.engine.result import Result
from voxmma.nn import functional as F
from voxmma.precision.policy import PrecisionPolicy, apply_policy
from voxmma.sparse import segments

from conftest import random_coords, surface_coords

Device = torch.device
SIZES = (700, 3, 50, 1, 400, 0, 900)


def evaluated(net: nn.Module, device: Device, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A network whose norms have statistics, ready for inference."""
    generator = torch.Generator().manual_seed(7)
    for module in net.modules():
        for name, spread in (("running_mean", 0.3), ("running_var", 0.4)):
            value = getattr(module, name, None)
            if isinstance(value, torch.Tensor):
                noise = torch.rand(value.shape, generator=generator) * spread
                value.copy_(noise if name == "running_mean" else noise + 0.6)
    return net.eval().to(device, dtype)


def frame(
    n: int,
    device: Device,
    channels: int = 4,
    seed: int = 0,
    batch: int = 2,
    extent: int = 13,
    dtype: torch.dtype = torch.float32,
) -> voxmma.Voxels:
    coords = random_coords(n, extent, batch, seed)
    feats = torch.randn(n, channels, generator=torch.Generator().manual_seed(seed))
    return voxmma.Voxels(coords.to(device), feats.to(device, dtype), batch_size=batch)


def leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def assert_same(got: Any, wanted: Any, exact: bool | None = None) -> None:
    """Bit for bit on a CPU; on a GPU convolutions divide sums into parts by the number of tiles."""
    for a, b in zip(leaves(got), leaves(wanted), strict=True):
        if isinstance(b, voxmma.Voxels):
            assert torch.equal(a.coords, b.coords)
            assert a.stride == b.stride and a.batch_size == b.batch_size
            a, b = a.feats, b.feats
        assert a.dtype == b.dtype and a.shape == b.shape
        if exact or (exact is None and a.device.type == "cpu"):
            assert torch.equal(a, b)
        elif b.numel():
            limit = 1e-5 if b.dtype == torch.float32 else 4e-3
            assert float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) < limit


def agree(engine: Engine, net: Callable[..., Any], frames: list[voxmma.Voxels]) -> None:
    for x in frames:
        with torch.no_grad():
            wanted = net(x)
        first = engine((x.coords.clone(), x.feats)).get()
        assert_same(first, wanted)
        assert_same(engine(x).get(), first, exact=True)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "second": lambda: models.SECONDBackbone(4),
    "unet": lambda: models.SparseUNet(
        4, 5, channels=(16, 32, 32, 16), blocks=(1, 1, 1, 1), stem_channels=16, stem_kernels=(3,)
    ),
    "resnet": lambda: models.ResNet21D(4, width=0.5),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_frames_of_any_size_are_those_of_the_eager_network(name: str, device: Device) -> None:
    net = evaluated(NETWORKS[name](), device)
    engine = compile(net, frame(800, device, extent=14), capacity=1000)
    agree(engine, net, [frame(n, device, seed=n) for n in SIZES])
    assert engine.frames == 2 * len(SIZES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
def test_bits_are_those_of_the_eager_network_where_tiles_are_as_many(
    device: Device, dtype: torch.dtype
) -> None:
    net = evaluated(NETWORKS["unet"](), device, dtype)
    x = frame(5000, device, extent=24, dtype=dtype)
    with torch.no_grad():
        needs = [x.num_voxels, F.max_pool(x, 2).num_voxels, F.max_pool(F.max_pool(x, 2), 2).num_voxels]
        wanted = net(x)
    engine = compile(net, x, capacity=x.num_voxels, levels=dict(enumerate(needs)))
    assert engine.capacities == needs
    assert_same(engine(x).get(), wanted, exact=True)


def test_half_precision_under_autocast_is_frozen(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device)
    half = torch.float16 if device.type == "cuda" else torch.bfloat16
    x = frame(500, device)
    with torch.autocast(device.type, half):
        engine = compile(net, x)
        with torch.no_grad():
            wanted = net(x)
    assert wanted.dtype == half
    assert_same(engine(x).get(), wanted)  # outside of autocast
    with torch.autocast(
        device.type, torch.float32 if device.type == "cuda" else torch.float16, enabled=False
    ):
        assert_same(engine(x).get(), wanted)


class Everything(nn.Module):
    """Whatever of voxmma.nn an engine takes beside convolutions and norms, and torch's own layers on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = vnn.SparseConv3d(4, 16, 3)
        self.linear, self.norm = nn.Linear(16, 16), nn.LayerNorm(16)
        self.grow = vnn.SparseConvTranspose3d(16, 16, 2, stride=2, generative=True)
        self.head = nn.Linear(16, 3)
        self.table = nn.Embedding(13, 16)

    def forward(self, x: voxmma.Voxels) -> dict[str, Any]:
        y = self.conv(x)
        y = y.with_feats(self.norm(nn.functional.gelu(self.linear(y.feats)) * 2 + y.feats))
        y = y.with_feats(y.feats + self.table(x.coords[:, 1]))
        low = F.avg_pool(y, 2)
        low = F.add(low, F.max_pool(low, 3, 1))
        up = F.unpool(low, 2)
        y = F.cat(y, up)
        gate = torch.sigmoid(y.feats.unflatten(1, (2, 16)).mean(2, keepdim=True))
        y = y.with_feats((y.feats.unflatten(1, (2, 16)) * gate).flatten(1).softmax(1))
        fine = self.grow(low)
        pooled = F.global_avg_pool(y), F.global_max_pool(low), F.global_sum_pool(fine)
        y = F.group_norm(y, 4)
        return {
            "voxels": y,
            "fine": fine,
            "feats": low.feats[:, 1:5],
            "logits": self.head(pooled[1]),
            "pooled": torch.cat(pooled, 1),
            "dense": low.dense((7, 7, 7)).amax(2),
            "number": 3,
        }


def test_other_layers(device: Device) -> None:
    net = evaluated(Everything(), device)
    engine = compile(net, frame(800, device), capacity=1200)
    for n in SIZES:
        x = frame(n, device, seed=n)
        with torch.no_grad():
            wanted = net(x)
        got = engine(x).get()
        assert list(got) == list(wanted)
        assert got.pop("number") == wanted.pop("number")
        # torch's own products and functions may round otherwise for another number of rows
        assert_same(list(got.values()), list(wanted.values()), exact=False)


@pytest.mark.parametrize(
    "activation",
    [
        nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh, nn.LeakyReLU,
        nn.LogSigmoid, nn.Mish, nn.ReLU, nn.ReLU6, nn.SELU, nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink,
        nn.Softsign, nn.Tanh, nn.Tanhshrink,
    ],
)  # fmt: skip
def test_activations_of_torch(activation: type[nn.Module], device: Device) -> None:
    """Tagged as pointwise or not. Near eager, not equal: a CPU computes the last few values otherwise."""

    def net(x: voxmma.Voxels) -> voxmma.Voxels:
        return x.with_feats(activation()(x.feats))

    engine = compile(net, frame(40, device))
    for n in (40, 7):
        x = frame(n, device, seed=n)
        torch.testing.assert_close(engine(x).get().feats, net(x).feats)


def test_tree_of_a_sized_set_sums_like_that_of_its_rows(device: Device) -> None:
    n, room, samples = 5000, 9001, 3
    coords = random_coords(n, 20, samples, 3).to(device)
    values = torch.randn(n, 5, device=device)
    wanted = segments.sample_sum(values, voxmma.CoordSet(coords, samples))
    padded = coords.new_full((room, 4), 99)
    padded[:n] = coords
    rows = torch.full((room, 5), torch.nan, device=device)
    rows[:n] = values
    count = torch.tensor([n], device=device)
    tree = torch.ops.voxmma.sized_tree(padded, count, samples)
    for where, starts in zip(tree[::2], tree[1::2], strict=True):
        rows = torch.ops.voxmma.segment_sum(rows, where, starts)
    assert torch.equal(rows[:samples], wanted)


def test_several_inputs(device: Device) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = vnn.SparseConv3d(4, 8, 3), vnn.SparseConv3d(2, 8, 3, stride=2)

        def forward(self, pair: list[voxmma.Voxels], scale: torch.Tensor) -> tuple[Any, ...]:
            a, b = self.a(pair[0]), self.b(pair[1])
            return a.with_feats(a.feats * scale), b, F.global_sum_pool(a) + F.global_sum_pool(b)

    net = Two().eval().to(device)
    scale = torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 8], device=device)
    engine = compile(net, ([frame(300, device), frame(200, device, 2)], scale), capacity=400)
    for n in (100, 350):
        a, b = frame(n, device, seed=n), frame(n + 5, device, 2, seed=n + 1)
        with torch.no_grad():
            wanted = net([a, b], scale + n)
        assert_same(engine([a, (b.coords, b.feats)], scale + n).get(), wanted)
    with pytest.raises(TypeError, match=r"expected inputs built as \[\[Voxels, Voxels\], tensor\], got"):
        engine(a, b, scale)
    with pytest.raises(ValueError, match=r"input 2 has shape \(4,\), the engine takes \(8,\)"):
        engine([a, b], scale[:4])


@pytest.mark.parametrize("mode", ["nearest", "trilinear"])
def test_devoxelising_at_points_that_are_an_input(mode: str, device: Device) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.down = vnn.SparseConv3d(4, 8, 3), vnn.SparseConv3d(8, 8, 2, stride=2)

        def forward(self, x: voxmma.Voxels, points: torch.Tensor, batch: torch.Tensor) -> list[Any]:
            fine = self.conv(x)
            low = self.down(fine)
            at_points = [
                voxmma.devoxelise(y, points, 0.5, mode, batch_index=batch, origin=(0.1, 0, 0))
                for y in (fine, low)
            ]
            centres = x.coords[:, 1:].float() + 0.5
            up = voxmma.devoxelise(low, centres, 1.0, mode, batch_index=x.coords[:, 0])
            return [
                *at_points,
                up,
                voxmma.lookup(
                    low,
                    torch.div(
                        x.coords, torch.tensor([1, 2, 2, 2], device=x.device), rounding_mode="floor"
                    ).int(),
                ),
            ]

    net = Net().eval().to(device)

    def given(n: int) -> tuple[voxmma.Voxels, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(n)
        points = 7 * torch.rand(200, 3, generator=generator) - 0.2
        batch = torch.randint(2, (200,), generator=generator)
        return frame(n, device, seed=n), points.to(device), batch.to(device)

    engine = compile(net, given(500))
    for n in (500, 3, 77):
        x, points, batch = given(n)
        with torch.no_grad():
            wanted = net(x, points, batch)
        assert_same(engine((x.coords, x.feats), points, batch).get(), wanted)
    bad = points.clone()
    bad[17, 1] = torch.nan
    with pytest.raises(ValueError, match="points row 17 is not finite"):
        engine(x, bad, batch).get()
    batch[4] = 2
    with pytest.raises(ValueError, match="points row 4 is not finite, or of a sample that is not there"):
        engine(x, bad, batch).get()


# ---- points ------------------------------------------------------------------------------------------------


def cloud(
    n: int, device: Device, seed: int = 0, batch: int = 2, dtype: torch.dtype = torch.float32, **how: Any
) -> Points:
    generator = torch.Generator().manual_seed(seed)
    points = 6 * torch.rand(n, 3, generator=generator) - 2
    feats = torch.randn(n, 4, generator=generator)
    samples = torch.randint(batch, (n,), generator=generator).to(device) if batch > 1 else None
    return Points(
        points.to(device, dtype),
        feats.to(device, dtype),
        (0.5, 0.4, 0.5),
        samples,
        batch,
        origin=(0.1, 0, 0),
        **how,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@pytest.mark.parametrize(("batch", "reduce"), [(1, "sum"), (2, "mean")])
def test_points_become_the_voxels_of_from_points(
    batch: int, reduce: str, dtype: torch.dtype, device: Device, tmp_path: Path
) -> None:
    net = evaluated(NETWORKS["unet"](), device, dtype)

    def both(x: voxmma.Voxels) -> list[voxmma.Voxels]:
        return [x, net(x)]

    engine = compile(both, cloud(900, device, batch=batch, reduce=reduce, dtype=dtype), capacity=1200)
    assert "cells that hold points of level 0" in engine.levels() and engine.capacities[0] == 1200
    save(engine, tmp_path / "net.engine")
    for made, sizes in ((engine, (900, 1, 0, 1100)), (load(tmp_path / "net.engine"), (300, 0))):
        for n in sizes:
            x = cloud(n, device, n, batch, dtype, reduce=reduce)
            with torch.no_grad():
                voxels, wanted = both(x.voxels())
            got, result = made(x).get()
            assert_same(got, voxels, exact=True)
            assert_same(result, wanted)
            if batch == 1:
                assert_same(made((x.points, x.feats)).get(), [got, result], exact=True)


def test_points_that_an_engine_cannot_take(device: Device) -> None:
    net = evaluated(NETWORKS["second"](), device)
    engine = compile(net, cloud(300, device), check_finite=True)
    x = cloud(200, device)

    def changed(**fields: Any) -> Points:
        return dataclasses.replace(x, **fields)

    points, batch = x.points.clone(), x.batch_index.clone()
    points[31, 2] = torch.nan
    with pytest.raises(
        ValueError, match=r"points row 31 of sample \d, .*nan.*, is not finite or lies in a cell"
    ):
        engine(changed(points=points)).get()
    points[31, 2] = 1e6
    with pytest.raises(ValueError, match="points row 31 of sample"):
        engine(changed(points=points)).get()
    batch[17] = 2
    with pytest.raises(ValueError, match="points row 17 of sample 2"):
        engine(changed(batch_index=batch)).get()
    with pytest.raises(ValueError, match="feats row 5 of input 0 is not finite"):
        engine(changed(feats=x.feats.index_fill(0, torch.tensor([5], device=device), torch.inf))).get()
    with pytest.raises(ValueError, match=r"the input is Grid\(.*, the engine takes Grid"):
        engine(changed(voxel_size=0.25))
    with pytest.raises(ValueError, match="the input has 3 samples, the engine takes 2"):
        engine(changed(batch_size=3))
    with pytest.raises(TypeError, match="the input must be Points, got Voxels"):
        engine(x.voxels())
    with pytest.raises(ValueError, match="the frame has 400 points, the engine's capacity is 375"):
        engine(cloud(400, device))
    with pytest.raises(ValueError, match="reduce must be 'mean' or 'sum', got 'max'"):
        changed(reduce="max")
    with pytest.raises(TypeError, match="batch_index must be int64"):
        changed(batch_index=x.batch_index.int())
    with pytest.raises(ValueError, match="batch_size is 2: batch_index must say"):
        changed(batch_index=None)
    assert_same(engine(x).get(), net(x.voxels()))  # and nothing of the frames before is left


def test_more_voxels_of_points_than_there_is_room_for(device: Device) -> None:
    """As many points in more cells."""
    net = evaluated(NETWORKS["second"](), device)
    near = dataclasses.replace(cloud(600, device), points=cloud(600, device).points / 4)
    bounds = (-20, -20, -20, 20, 20, 20)
    engine = compile(net, near, bounds=bounds)
    far = cloud(600, device)
    need = far.voxels().num_voxels
    with pytest.raises(
        EngineError, match=rf"level 1 \(cells that hold points of level 0\) needs {need} rows"
    ):
        engine(far).get()
    grown = compile(net, near, bounds=bounds, grow=True)
    for x in (far, cloud(2000, device, 3)):
        with torch.no_grad():
            assert_same(grown(x).get(), net(x.voxels()))


# ---- what is frozen ----------------------------------------------------------------------------------------


def test_weights_and_settings_of_later_change_nothing(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device, torch.float16 if device.type == "cuda" else torch.float32)
    dtype = next(net.parameters()).dtype
    x = frame(600, device, dtype=dtype)
    with torch.no_grad():
        wanted = net(x)
    engine = compile(net, x, grow=True)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(1)
    voxmma.set_fp16_accum(True)
    assert_same(engine(x).get(), wanted)
    big = frame(1500, device, dtype=dtype)
    engine(big).get()  # grows: a new graph
    assert engine.capacities[0] >= 1500
    assert_same(engine(x).get(), wanted)
    assert {step["accumulator"] for step in engine.plan} == {"fp32"}


@pytest.mark.parametrize("on", ["block", "module"])
def test_a_policy_is_frozen(on: str, device: Device) -> None:
    net, x = evaluated(NETWORKS["unet"](), device), frame(300, device)
    with contextlib.ExitStack() as stack:
        if on == "block":
            stack.enter_context(PrecisionPolicy.auto_mixed_bf16)
        else:
            applied = apply_policy(net, "auto_mixed_bf16")
        with voxmma.audit():
            engine = compile(net, x)
        with torch.no_grad():
            wanted = net(x)
        assert_same(engine(x).get(), wanted)
    if on == "module":
        applied.revert()
    assert_same(engine(x).get(), wanted)
    with PrecisionPolicy.always_f16:
        assert_same(engine((x.coords.long(), x.feats)).get(), wanted)


@pytest.mark.parametrize("policy", [None, "auto_mixed_bf16"])
def test_what_a_larger_frame_left_reaches_no_smaller_one(policy: str | None, device: Device) -> None:
    """Behind the rows of a frame lie those of an earlier one: here ones that are not finite."""
    net = evaluated(NETWORKS["unet"](), device)
    small, large = frame(300, device), frame(900, device, seed=1)
    with contextlib.nullcontext() if policy is None else getattr(PrecisionPolicy, policy):
        engine = compile(net, large)
    wanted = engine(small).get()
    assert torch.isfinite(wanted.feats).all()
    bad = engine(large.with_feats(torch.full_like(large.feats, torch.nan))).get()
    assert bad.feats.isnan().any()
    assert torch.equal(engine(small).get().feats, wanted.feats)


def test_weights_are_packed_once(device: Device) -> None:
    net = evaluated(Everything(), device)
    engine = compile(net, frame(300, device))
    steps = [step for step in engine._program.steps if step.func._schema.name.startswith("voxmma::conv")]
    assert len(steps) == 2
    assert all(step.func is torch.ops.voxmma.conv_fused.default for step in steps)
    packed = [engine._program.consts[step.kwargs["packed"].number] for step in steps]
    assert all(t.dtype == torch.uint8 for t in packed)
    assert device.type == "cpu" or all(t.numel() for t in packed)
    assert not any("pack_weight" in step.func._schema.name for step in engine._program.steps)


def test_plan_is_the_precision_at_compile(device: Device) -> None:
    net = evaluated(NETWORKS["second"](), device, torch.float16)
    x = frame(300, device, dtype=torch.float16)
    with voxmma.settings.override(fp16_accum=True):
        engine = compile(net, x)
        with torch.no_grad():
            wanted = net(x)
    assert "fp16" in {step["accumulator"] for step in engine.plan}
    assert_same(engine(x).get(), wanted)


def test_the_frame_is_not_kept_by_its_result(device: Device) -> None:
    """Results stay what they were when later frames run."""
    net = evaluated(NETWORKS["unet"](), device)
    engine = compile(net, frame(500, device))
    xs = [frame(n, device, seed=n) for n in (500, 20, 300)]
    results = [engine((x.coords, x.feats)) for x in xs]
    for x, result in zip(xs, results, strict=True):
        with torch.no_grad():
            assert_same(result.get(), net(x))
        assert result.ready


# ---- results that are no copies ----------------------------------------------------------------------------


def storages(values: list[Any]) -> set[int]:
    tensors = [t for v in values for t in ((v.coords, v.feats) if isinstance(v, voxmma.Voxels) else (v,))]
    return {t.untyped_storage().data_ptr() for t in tensors if t.numel()}


def test_a_result_without_copies_is_there_until_the_next_frame(device: Device) -> None:
    net = evaluated(NETWORKS["second"](), device)
    engine = compile(net, frame(500, device))
    for n in (500, 3, 0, 60):
        x = frame(n, device, seed=n)
        with torch.no_grad():
            wanted = net(x)
        result = engine((x.coords, x.feats), copy=False)
        assert_same(result.get(), wanted)
        assert storages(result.get()) <= storages(engine._instance.results)
    weight = torch.ones(1, device=device, requires_grad=True)
    read = result.get()
    loss = (read[0].feats * weight).sum()
    late = engine((x.coords, x.feats), copy=False)
    kept = engine((x.coords, x.feats))
    for gone in (result, late):  # read before, and not
        with pytest.raises(RuntimeError, match="in the engine's memory, which a later frame has"):
            gone.get()
    with pytest.raises(RuntimeError, match="were written to"):
        read[1].coords  # noqa: B018
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    engine(frame(90, device, seed=7), copy=False).check()
    assert_same(kept.get(), wanted)
    assert not storages(kept.get()) & storages(engine._instance.results)


def test_a_result_without_copies_under_inference_mode(device: Device) -> None:
    net, x = evaluated(NETWORKS["second"](), device), frame(200, device)
    engine = compile(net, x)
    with torch.inference_mode():
        read = engine((x.coords, x.feats), copy=False).get()
        assert_same(read, net(x))
        engine(x)
    with pytest.raises(RuntimeError, match="were written to"):
        read[2].coords  # noqa: B018


def test_errors_of_a_result_without_copies(device: Device) -> None:
    engine = compile(evaluated(NETWORKS["second"](), device), frame(200, device))
    x = frame(100, device)
    coords = x.coords.clone()
    coords[70] = coords[30]
    result = engine((coords, x.feats), copy=False)
    for _ in range(2):
        with pytest.raises(ValueError, match="coords rows 30 and 70 are the same voxel"):
            result.get()
        engine(x, copy=False).check()  # what was read once is still so after the next frame
    result = engine((coords, x.feats), copy=False)
    engine(x).check()
    with pytest.raises(RuntimeError, match="which a later frame has"):
        result.get()


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("grow", [False, True])
def test_a_result_without_copies_is_the_next_frame(pair: bool, grow: bool, device: Device) -> None:
    """It is read before sets, maps and layers write to where it lies; so are its coordinates."""
    net = evaluated(vnn.SparseConv3d(4, 4, 3, padding=1), device)
    engine = compile(net, frame(400, device), grow=grow)
    x = frame(350, device, seed=1)
    y = engine((x.coords, x.feats), copy=False).get()  # its coordinates lie there, too
    for copies in (False, True):  # the second of what the first has lent
        y = engine((y.coords, y.feats) if pair else y, copy=copies).get()
    with torch.no_grad():
        assert_same(y, net(net(net(x))), exact=False)


def test_growing_without_copies(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device)
    line = torch.zeros(400, 4, dtype=torch.int32)
    line[:, 1] = 2 * torch.arange(400)
    thin = voxmma.Voxels(line.to(device), torch.randn(400, 4, device=device))
    thick = frame(300, device, batch=1, extent=7)
    engine = compile(net, thick, capacity=300, bounds=(0, 0, 0, 1023, 15, 15), grow=True)
    with torch.no_grad():
        wanted = net(thin)
    kept = engine(thick)
    result = engine((thin.coords, thin.feats), copy=False)
    assert_same(result.get(), wanted)  # runs it again
    frames = engine.frames
    assert_same(result.get(), wanted)
    assert engine.frames == frames
    with torch.no_grad():
        assert_same(kept.get(), net(thick))
    engine(thick)
    with pytest.raises(RuntimeError, match="which a later frame has"):
        result.get()


def test_a_frame_that_fails_on_its_way_leaves_the_next_one_alone(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first launch and the result."""
    net = evaluated(NETWORKS["unet"](), device)
    engine = compile(net, frame(300, device))
    x, y = frame(300, device, seed=1), frame(200, device, seed=2)
    lent = engine(x, copy=False)

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_results", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine(y)
    with pytest.raises(RuntimeError, match="which a later frame has"):
        lent.get()
    stream = torch.cuda.Stream() if device.type == "cuda" else None
    with torch.cuda.stream(stream), torch.no_grad():
        assert_same(engine((y.coords, y.feats)).get(), net(y))


def test_a_result_outlives_its_engine(device: Device) -> None:
    net = evaluated(NETWORKS["second"](), device)
    xs = [frame(n, device, seed=n) for n in (300, 170)]
    with torch.no_grad():
        wanted = [net(x) for x in xs]
    engines = [compile(net, xs[0]) for _ in xs]
    known = [weakref.ref(engine) for engine in engines]
    results = [
        engine((x.coords, x.feats), copy=c) for engine, x, c in zip(engines, xs, (True, False), strict=True)
    ]
    del engines
    gc.collect()
    read = [result.get() for result in results]
    del results
    gc.collect()
    assert [engine() for engine in known] == [None, None]
    noise = [torch.full((1 << 18,), torch.nan, device=device) for _ in range(40)]
    for got, one in zip(read, wanted, strict=True):
        assert_same(got, one)
    del noise


@pytest.mark.gpu
@pytest.mark.parametrize("copies", [True, False])
def test_an_engine_that_is_dropped_while_its_frame_runs(copies: bool) -> None:
    """What the frame runs on is not given to others before it is done."""
    device = torch.device("cuda", 0)
    net = evaluated(NETWORKS["unet"](), device)
    x = frame(3000, device)
    for cycles in (
        10**8,
        10**9,
        10**10,
    ):  # longer where the machine is so busy that the frame was done before
        engine = compile(net, x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            result = engine((x.coords, x.feats), copy=copies)
            end = stream.record_event()
        buffers = {t.data_ptr() for t in (*engine._instance.inputs, *engine._program.consts)}
        del engine, result
        gc.collect()
        taken = [torch.full((n,), -1, dtype=torch.int32, device=device) for n in (128, 3000, 12000) * 20]
        if running := not end.query():
            break
    assert running and not buffers & {t.data_ptr() for t in taken}
    torch.cuda.synchronize()


def test_no_frame_begins_while_a_result_without_copy_is_given(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread's frame begins before, and the result is refused, or waits for the reader's stream."""
    x = frame(50, device)
    engine = compile(evaluated(vnn.SparseConv3d(4, 8, 3), device), x)
    held: list[bool] = []
    enter = Result._enter

    def watched(self: Result) -> None:
        held.append(engine._lock._is_owned())  # type: ignore[attr-defined]
        enter(self)

    monkeypatch.setattr(Result, "_enter", watched)
    result = engine((x.coords, x.feats), copy=False)
    result.get()
    result.get()
    assert held == [True, True]


@pytest.mark.gpu
def test_a_result_is_read_on_another_stream() -> None:
    device = torch.device("cuda", 0)
    net, x = evaluated(NETWORKS["second"](), device), frame(2000, device)
    engine = compile(net, x)
    with torch.no_grad():
        wanted = net(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for copies in (True, False):
        with torch.cuda.stream(stream):
            given = x.coords.clone(), x.feats.clone()
            torch.cuda._sleep(20_000_000)
            result = engine(given, copy=copies)
        read = result.get()
        with torch.cuda.stream(torch.cuda.Stream()):  # nobody reads what was given any more
            given[0].zero_()
            given[1].zero_()
        assert_same([y.with_feats(y.feats.clone()) for y in read], wanted)
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_next_frame_waits_for_readers_of_a_result_without_copies(elsewhere: bool) -> None:
    """Whatever stream it is on, and they are."""
    device = torch.device("cuda", 0)
    net, x, y = evaluated(NETWORKS["second"](), device), frame(2000, device), frame(1900, device, seed=5)
    engine = compile(net, x)
    with torch.no_grad():
        wanted = net(x)
    here, other = torch.cuda.current_stream(), torch.cuda.Stream()
    other.wait_stream(here)
    result = engine((x.coords, x.feats), copy=False)
    reader, caller = (other, here) if elsewhere else (here, other)
    with torch.cuda.stream(reader):
        read = result.get()
        torch.cuda._sleep(20_000_000)
        copies = [v.feats.clone() for v in read]
    with torch.cuda.stream(caller):
        engine((y.coords, y.feats), copy=False)
    torch.cuda.synchronize()
    for got, one in zip(copies, wanted, strict=True):
        assert_same(got, one.feats)


@pytest.mark.gpu
def test_an_engine_is_not_captured() -> None:
    device = torch.device("cuda", 0)
    x = frame(300, device)
    engine = compile(evaluated(NETWORKS["second"](), device), x)
    graph = torch.cuda.CUDAGraph()
    with (
        torch.cuda.graph(graph),
        pytest.raises(RuntimeError, match="cannot be called while another one"),
    ):
        engine((x.coords, x.feats))
    engine(x).check()


def test_inputs_are_not_written_to(device: Device) -> None:
    net = nn.Sequential(_Inplace(), vnn.SparseConv3d(4, 8, 3)).to(device)
    x = frame(100, device)
    before = x.feats.clone()
    engine = compile(net.eval(), x)
    for _ in range(2):
        with torch.no_grad():
            wanted = net(x.with_feats(before.clone()))
        assert_same(engine(x).get(), wanted)
    assert torch.equal(x.feats, before)


def test_fault_64_what_is_written_in_place_is_read_in_order(device: Device) -> None:
    net = nn.Sequential(_Inplace(), vnn.SparseConv3d(4, 8, 3)).to(device)
    engine = compile(net.eval(), frame(100, device), check_finite=True)
    program = engine._program
    names = [step.func._schema.name.split("::")[1] for step in program.steps]
    assert names.index("sized_finite") < names.index("relu_")
    for bad in (torch.nan, -torch.inf):  # -inf is 0 behind relu_
        x = frame(90, device)
        x.feats[7, 2] = bad
        with pytest.raises(ValueError, match="feats row 7 of input 0 is not finite"):
            engine(x).get()


def test_inputs_are_as_wide_as_kernels_read_them(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of 3 channels: no frame is copied and padded."""
    monkeypatch.setitem(optimise._ALIGN, "cpu", 16)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    net = evaluated(
        nn.Sequential(_Inplace(), vnn.SparseConv3d(3, 8, 3), vnn.SparseConv3d(8, 8, 3)), device, dtype
    )
    whole = lambda x: [net(x), x * 2, x]  # noqa: E731
    engine = compile(whole, frame(200, device, 3, dtype=dtype), check_finite=True)
    (wide,) = engine._program.widths.values()
    assert wide == 16 // dtype.itemsize and engine._instance.inputs[1].shape[1] == wide
    save(engine, tmp_path / "net.engine")
    for made in (engine, load(tmp_path / "net.engine")):
        for n in (170, 3):
            x = frame(n, device, 3, seed=n, dtype=dtype)
            with torch.no_grad():
                wanted = whole(x.with_feats(x.feats.clone()))
            assert_same(made(x).get(), wanted, exact=False)


class _Inplace(nn.Module):
    def forward(self, x: voxmma.Voxels) -> voxmma.Voxels:
        return x.with_feats(x.feats.relu_().add_(1))


@dataclasses.dataclass
class _Opaque:
    value: Any


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (
            lambda x: (x, len(x)),
            "something else for another frame: [0-9]+, which depends on the number of rows",
        ),
        (lambda x: (x, x.feats.shape), "something else for another frame"),
        (lambda x: [x] * (1 + len(x) % 5), "something else for another frame"),
        (lambda x: (x * 2, x)[len(x) % 2], "something else for another frame"),
        (lambda x: _Opaque(x), "returns a _Opaque, which an engine does not look into"),
        (lambda x: iter([x]), "returns a list_iterator, which an engine does not look into"),
    ],
)
def test_results_that_are_not_the_same_for_every_frame_are_refused(
    net: Callable[..., Any], message: str, device: Device
) -> None:
    with pytest.raises(EngineError, match=message):
        compile(net, frame(100, device))
    kept = compile(lambda x: (x, None, 3, 2.5, "name", x.dtype, float("nan")), frame(100, device))
    assert kept(frame(7, device)).get()[1:6] == (None, 3, 2.5, "name", torch.float32)


# ---- capacities --------------------------------------------------------------------------------------------


def test_too_many_voxels_are_refused_at_once(device: Device) -> None:
    engine = compile(evaluated(NETWORKS["second"](), device), frame(100, device), capacity=150)
    x = frame(151, device)
    with pytest.raises(ValueError, match="the frame has 151 voxels, the engine's capacity is 150"):
        engine(x)
    engine(frame(150, device)).check()


def test_a_level_that_does_not_fit_is_named(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device)
    thick = frame(800, device, batch=1, extent=10)  # many voxels in few coarse ones
    line = torch.zeros(200, 4, dtype=torch.int32)
    line[:, 1] = 2 * torch.arange(200)
    thin = voxmma.Voxels(line.to(device), torch.randn(200, 4, device=device))
    with torch.no_grad():
        need = F.avg_pool(thin, 2).num_voxels
    bounds = (0, 0, 0, 511, 15, 15)
    engine = compile(net, thick, capacity=800, bounds=bounds)
    assert engine.capacities[1] < need
    result = engine((thin.coords, thin.feats))
    message = (
        rf"level 1 \(layer of kernel_size \(2, 2, 2\), stride \(2, 2, 2\) on level 0\) needs {need} rows"
    )
    for _ in range(2):  # as often as it is read
        with pytest.raises(EngineError, match=message):
            result.get()
    agree(engine, net, [thick])  # the engine is none the worse
    wide = compile(net, thick, capacity=800, bounds=bounds, levels={1: need, 2: need})
    agree(wide, net, [thin, thick])


def test_growing(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device)
    line = torch.zeros(400, 4, dtype=torch.int32)
    line[:, 1] = 2 * torch.arange(400)
    thin = voxmma.Voxels(line.to(device), torch.randn(400, 4, device=device))
    thick = frame(300, device, batch=1, extent=7)
    engine = compile(net, thick, capacity=300, bounds=(0, 0, 0, 1023, 15, 15), grow=True)
    before = engine.capacities
    result = engine((thin.coords, thin.feats))
    kept = engine((thick.coords, thick.feats))
    with torch.no_grad():
        assert_same(result.get(), net(thin))
        assert_same(kept.get(), net(thick))
    assert all(a >= b for a, b in zip(engine.capacities, before, strict=True))
    assert engine.capacities[0] >= 400 and engine.capacities[2] >= 100
    agree(engine, net, [thin, thick])


def test_an_engine_that_could_not_grow_is_what_it_was(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = evaluated(vnn.SparseConv3d(4, 8, 3), device)
    engine = compile(net, frame(10, device), grow=True, bounds=(0, 0, 0, 12, 12, 12))
    before, x = engine.levels(), frame(200, device)

    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(Engine, "_build", full)
        engine(x)
    assert engine.levels() == before
    for wanted in (frame(9, device), x):
        with torch.no_grad():
            assert_same(engine(wanted).get(), net(wanted), exact=False)


def test_further_examples_count(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device)
    a, b = frame(100, device, seed=1), frame(700, device, seed=2)
    engine = compile(net, a, frames=[b])
    assert engine.capacities[0] >= 700
    agree(engine, net, [a, b])
    assert "kernel_size (2, 2, 2)" in engine.levels()
    dense = frame(300, device, batch=1, extent=8, seed=3)  # has a smaller share of coarse voxels
    assert compile(net, dense, frames=[a]).capacities[1] > compile(net, dense).capacities[1]
    with pytest.raises(ValueError, match="capacity is 600, an example has 700 voxels"):
        compile(net, a, frames=[b], capacity=600)
    with pytest.raises(ValueError, match=r"levels\[1\] is 2, an example needs"):
        compile(net, a, levels={1: 2})


def test_headroom_comes_once(device: Device) -> None:
    """Levels have the room beyond what the examples need that the input has, at least a quarter."""
    net, x = evaluated(NETWORKS["second"](), device), frame(800, device)
    with torch.no_grad():
        needs = [x.num_voxels, *(y.num_voxels for y in net(x)[1:])]
    for capacity, more in ((None, 1.25), (800, 1.25), (2400, 3.0)):
        made = compile(net, x, capacity=capacity, bounds=(-99, -99, -99, 99, 99, 99)).capacities
        assert made == [capacity or 1000, *(max(64, math.ceil(need * more)) for need in needs[1:])]


def test_memory_is_what_is_alive_at_a_time(device: Device) -> None:
    rows, wide = 6000, 64
    net = evaluated(nn.Sequential(*[vnn.SparseConv3d(wide, wide, 3, padding=1) for _ in range(5)]), device)
    engine = compile(net, frame(rows, device, wide, extent=20), capacity=rows)
    engine(frame(rows, device, wide, extent=20)).check()
    tensor = rows * wide * 4
    _, *levels, total = engine.levels().splitlines()
    _, capacity, needed, made, maps, features, *_ = levels[0].split()
    assert (capacity, needed) == ("6,000", "6,000") and len(levels) == 1
    assert float(features) == pytest.approx(
        2 * tensor / 2**20, abs=0.06
    )  # what a layer reads, what it writes
    assert float(total.split()[0]) == pytest.approx(engine.memory / 2**20, abs=0.06)
    parts = sum(map(float, (made, maps, features)))
    assert parts <= engine.memory / 2**20 + 0.2
    assert device.type == "cpu" or engine.memory <= engine.reserved <= engine.memory + (
        48 << 20
    )  # blocks of 20 MiB


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("second", {"conv_fused": 12, "sized_index": 1, "sized_sites": 4, "sized_maps": 1}),
        (
            "unet",
            {
                "conv_fused": 12,
                "conv_fused_into": 4,
                "sized_index": 1,
                "sized_sites": 2,
                "sized_maps": 1,
                "empty": 2,
                "slice": 4,
            },
        ),
    ],
)
def test_operators_of_a_frame(name: str, wanted: dict[str, int], device: Device) -> None:
    """Norms, activations and residuals are the convolutions', maps are made together: no more than these."""
    engine = compile(evaluated(NETWORKS[name](), device), frame(300, device))
    assert engine.operators == wanted


class _Joined(nn.Module):
    """Results of convolutions that are concatenated, and read elsewhere, too."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (vnn.SparseConv3d(c, 8, 3) for c in (4, 8, 16))
        self.inplace = inplace

    def forward(self, x: voxmma.Voxels) -> voxmma.Voxels:
        a = self.a(x)
        joined = F.cat(a, F.cat(x, x))
        if self.inplace:
            joined.feats.relu_()
        y = self.c(joined)
        return F.add(self.b(a), y)


@pytest.mark.parametrize("inplace", [False, True])
def test_columns_of_a_concatenation_are_read_elsewhere(inplace: bool, device: Device, tmp_path: Path) -> None:
    """Where it is written to afterwards, they are not its columns."""
    net = evaluated(_Joined(inplace), device)
    engine = compile(net, frame(300, device))
    assert ("conv_fused_into" in engine.operators) is not inplace
    save(engine, tmp_path / "net.engine")
    for made in (engine, load(tmp_path / "net.engine")):
        agree(made, net, [frame(n, device, seed=n) for n in (300, 20)])


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(device: Device) -> Engine:
    return compile(evaluated(NETWORKS["second"](), device), frame(200, device), check_finite=True)


def test_duplicates_are_reported_when_the_result_is_read(small: Engine, device: Device) -> None:
    x = frame(100, device)
    coords = x.coords.clone()
    coords[70] = coords[30]
    result = small((coords, x.feats))
    found = tuple(coords[70].tolist())
    with pytest.raises(
        ValueError, match=rf"coords rows 30 and 70 are the same voxel \({found[0]}, {found[1]}"
    ):
        result.get()
    small(x).check()


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((2, 1, 1, 1), r"coords row 40 is \(2, 1, 1, 1\): the batch index must be in 0..1, .* 2 samples"),
        ((-1, 1, 1, 1), r"coords row 40 is \(-1, 1, 1, 1\): the batch index"),
        ((0, 1, 5000, 1), r"coords row 40 is \(0, 1, 5000, 1\): the engine's bounds are"),
        ((0, 1, 1, -(1 << 17) - 5), r"coords row 40 is .*: the engine's bounds are"),
    ],
)
def test_coordinates_out_of_bounds(small: Engine, device: Device, row: tuple[int, ...], message: str) -> None:
    x = frame(100, device)
    coords = x.coords.clone()
    coords[40] = torch.tensor(row, device=device)
    coords[60] = coords[40]
    with pytest.raises(ValueError, match=message):
        small((coords, x.feats)).get()
    far = coords.long()
    far[40, 1] = 1 << 40
    with pytest.raises(ValueError, match=r"coords row 40 is"):
        small((far, x.feats)).get()
    good = frame(100, device)
    small((good.coords.long(), good.feats)).check()


def test_values_that_are_not_finite(small: Engine, device: Device) -> None:
    x = frame(100, device)
    feats = x.feats.clone()
    feats[33, 1], feats[50, 2] = torch.nan, torch.inf
    with pytest.raises(ValueError, match="feats row 33 of input 0 is not finite"):
        small((x.coords, feats)).get()
    small(x).check()  # and nothing of the frame before is left


def test_inputs_of_the_wrong_kind(small: Engine, device: Device) -> None:
    x = frame(50, device)
    for bad, error, message in (
        ((x.coords, x.feats.half()), TypeError, "feats is torch.float16, the engine takes torch.float32"),
        ((x.coords, x.feats[:, :3]), ValueError, "feats has 3 channels, the engine takes 4"),
        ((x.coords, x.feats[:20]), ValueError, r"feats must be \(50, C\), got shape \(20, 4\)"),
        ((x.coords.float(), x.feats), TypeError, "coords must be int32 or int64"),
        ((x.coords[:, :3], x.feats), ValueError, r"coords must be \(N, 4\)"),
        (frame(50, device, batch=3), ValueError, "the input has 3 samples, the engine takes 2"),
        (voxmma.Voxels(x.coords, x.feats, 2, stride=2), ValueError, r"the input has stride \(2, 2, 2\)"),
        (7, TypeError, "the input must be Voxels or"),
    ):
        with pytest.raises(error, match=message):
            small(bad)
    with pytest.raises(ValueError, match="feats is on meta, the engine on"):
        small((x.coords, x.feats.to("meta")))
    with pytest.raises(TypeError, match="expected inputs built as"):
        small(x, x)
    fewer = voxmma.Voxels(x.coords[x.coords[:, 0] == 0], x.feats[x.coords[:, 0] == 0], 1)
    assert small(fewer).get()[0].batch_size == 1


def test_voxels_outside_of_a_dense_grid(device: Device) -> None:
    net = lambda x: vnn.functional.max_pool(x, 2).dense((6, 6, 6))  # noqa: E731
    engine = compile(net, frame(200, device, extent=12), bounds=(0, 0, 0, 30, 30, 30))
    x = frame(100, device, extent=12)
    assert_same(engine(x).get(), net(x))
    coords = x.coords.clone()
    coords[9, 3] = 20
    with pytest.raises(ValueError, match=r"a voxel of level 1 .* lies outside of the dense grid"):
        engine((coords, x.feats)).get()


# ---- what is refused ---------------------------------------------------------------------------------------


def _positive(x: voxmma.Voxels) -> torch.Tensor:
    return x.feats[:, 0] > 0


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (lambda x: x.feats.sum(0), r"aten.sum: it goes over the rows"),
        (lambda x: x.feats.softmax(0), r"aten._softmax: it goes over the rows"),
        (lambda x: x.feats.t() @ x.feats, r"aten.mm: it sums over the rows"),
        (lambda x: x.feats.cumsum(0), r"aten.cumsum: it goes over the rows"),
        (lambda x: x.feats[:3], r"aten.slice: it goes over the rows"),
        (lambda x: x.feats[torch.tensor([0, 1], device=x.device)], r"aten.index: it picks rows by number"),
        (lambda x: x.feats[0], r"aten.select: it goes over the rows"),
        (lambda x: x.feats.flatten(), r"aten.*: it mixes the rows"),
        (lambda x: x.feats.flip(0), r"aten.flip: it goes over the rows"),
        (lambda x: x.feats[_positive(x)], r"a boolean mask|aten.index"),
        (lambda x: torch.nonzero(_positive(x)), r"a boolean mask or torch.nonzero \(aten.nonzero\)"),
        (lambda x: x if bool((x.feats > 9).any()) else None, r"reading a number on the host|aten.any"),
        (lambda x: voxmma.prune(x, _positive(x)), r"cannot take"),
        (lambda x: F.add_union(x, F.unpool(F.max_pool(x, 2), 2, generative=True)), r"an engine cannot"),
        (lambda x: x.feats + torch.randn_like(x.feats), r"aten.randn_like: it is random"),
        (lambda x: x.feats * x.num_voxels, r"aten.mul: its argument .* depends on the number of rows"),
        (lambda x: x.feats.view(-1), r"it mixes the rows"),
        (lambda x: x.with_feats(nn.functional.dropout(x.feats, training=True)), r"it is random"),
        (lambda x: vnn.functional.batch_norm(x, None, None, training=True), r"statistics of the rows"),
        (
            lambda x: voxmma.intersection(x, F.unpool(F.max_pool(x, 2), 2, generative=True)),
            "an engine cannot",
        ),
        (lambda x: x.dense(), "cannot take"),
    ],
)
def test_what_mixes_rows_is_refused_by_name(net: Callable[..., Any], message: str, device: Device) -> None:
    with pytest.raises(EngineError, match=message):
        compile(net, frame(100, device))


def test_training_mode_is_refused(device: Device) -> None:
    with pytest.raises(ValueError, match=r"training mode: call model.eval\(\)"):
        compile(NETWORKS["second"](), frame(100, torch.device("cpu")))


def test_code_that_looks_at_the_rows_is_refused(device: Device) -> None:
    seen: list[int] = []

    def net(x: voxmma.Voxels) -> voxmma.Voxels:
        seen.append(x.num_voxels)
        return x * 2 if len(seen) % 2 else x + 1

    with pytest.raises(EngineError, match="another"):
        compile(net, frame(100, device))


def test_bad_arguments(device: Device) -> None:
    x, net = frame(100, device), vnn.SparseConv3d(4, 8, 3).eval().to(device)
    with pytest.raises(TypeError, match="example must hold Voxels or Points"):
        compile(net, x.feats)
    with pytest.raises(ValueError, match="bounds must be 6 integers"):
        compile(net, x, bounds=(1, 2))
    with pytest.raises(ValueError, match="x must rise within"):
        compile(net, x, bounds=(5, 0, 0, 1, 9, 9))
    with pytest.raises(ValueError, match="coords row"):
        compile(net, x, bounds=(0, 0, 0, 1, 9, 9))
    with pytest.raises(ValueError, match="levels has 4"):
        compile(net, x, levels={4: 100})
    with pytest.raises(ValueError, match="at most 16,777,216 are possible"):
        compile(net, x, levels={0: 10**12})
    with pytest.raises(TypeError, match="levels must be a mapping"):
        compile(net, x, levels=[(0, 500)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Points or a tensor, got NoneType"):
        compile(net, x, frames=[None])
    strided = vnn.SparseConv3d(4, 8, 2, stride=2).eval().to(device)
    with pytest.raises(ValueError, match="made by a strided layer"):
        with torch.no_grad():
            y = strided(x)
        compile(vnn.SparseConv3d(8, 8, 3).eval().to(device), y)


def test_sets_and_maps_need_nothing_of_the_layers(device: Device) -> None:
    """What runs beside the layers may run before them."""
    net = evaluated(Everything(), device)
    engine = compile(net, frame(300, device))
    x = frame(200, device)
    wanted = list(engine(x).get().values())
    program = engine._program
    side = beside(program)
    names = [step.func._schema.name.split("::")[1] for step in side]
    assert {"sized_index", "sized_sites", "sized_maps", "sized_tree"} <= set(names)
    assert names.count("sized_maps") == 1 and len(side[-1].args[1]) == len(program.plans)
    assert program.steps[: len(side)] == side
    program.steps = [*side[:-1], *program.steps[len(side) :]]
    first = next(
        i for i, step in enumerate(program.steps) if set(side[-1].out).intersection(reads(step, Ref))
    )
    program.steps.insert(first, side[-1])
    for step in program.steps:
        step.frees = ()
    engine._instance = engine._build(engine.capacities, engine._instance.rooms)
    got = list(engine(x).get().values())
    assert got.pop() == wanted.pop() == 3
    assert_same(got, wanted, exact=True)


# ---- side by side ------------------------------------------------------------------------------------------


def test_threads_share_an_engine(device: Device) -> None:
    net = evaluated(NETWORKS["unet"](), device)
    engine = compile(net, frame(400, device))
    other = compile(evaluated(NETWORKS["second"](), device), frame(400, device))
    xs = [frame(50 + 30 * i, device, seed=i) for i in range(8)]
    with torch.no_grad():
        wanted = [net(x) for x in xs]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            stream = torch.cuda.Stream() if device.type == "cuda" else None
            with torch.cuda.stream(stream):
                for turn in range(4):
                    at = (number + turn) % len(xs)
                    result = engine((xs[at].coords, xs[at].feats))
                    other(xs[at]).check()
                    assert_same(result.get(), wanted[at])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.multigpu
def test_two_gpus() -> None:
    engines = []
    for index in range(2):
        device = torch.device("cuda", index)
        net = evaluated(NETWORKS["second"](), device)
        engines.append((compile(net, frame(300, device)), net, device))
    for engine, net, device in engines:
        agree(engine, net, [frame(n, device, seed=n) for n in (10, 300)])
    with pytest.raises(ValueError, match="the engine on cuda:0"):
        engines[0][0](frame(10, torch.device("cuda", 1)))


@pytest.mark.multigpu
def test_threads_on_two_gpus() -> None:
    """An engine on each, called from threads whose current device is the other one's."""
    devices = [torch.device("cuda", index) for index in range(2)]
    nets = [evaluated(NETWORKS["unet"](), device) for device in devices]
    engines = [compile(net, frame(400, device), grow=True) for net, device in zip(nets, devices, strict=True)]
    xs = [[frame(n, device, seed=n) for n in (30, 350, 700)] for device in devices]
    with torch.no_grad():
        wanted = [[net(x) for x in frames] for net, frames in zip(nets, xs, strict=True)]
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            torch.cuda.set_device(number)
            for turn in range(12):
                at = (number + turn) % 2
                which = turn % 3
                assert_same(engines[at](xs[at][which]).get(), wanted[at][which])
                assert torch.cuda.current_device() == number
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.gpu
def test_a_frame_does_not_wait_for_the_device() -> None:
    device = torch.device("cuda", 0)
    engine = compile(evaluated(NETWORKS["unet"](), device), frame(500, device))
    x = frame(300, device)
    engine(x).check()
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = engine((x.coords, x.feats))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    result.check()


def test_real_scan_shapes(device: Device) -> None:
    """Surfaces of several sizes through one engine."""
    net = evaluated(NETWORKS["unet"](), device)

    def scan(extent: int) -> voxmma.Voxels:
        coords = surface_coords(extent, seed=extent).to(device)
        feats = torch.randn(len(coords), 4, generator=torch.Generator().manual_seed(extent)).to(device)
        return voxmma.Voxels(coords, feats, batch_size=1)

    engine = compile(net, scan(40), bounds=(0, 0, 0, 63, 63, 63))
    agree(engine, net, [scan(extent) for extent in (40, 11, 33)])


# ---- files -------------------------------------------------------------------------------------------------


def test_a_saved_engine_does_the_same(device: Device, tmp_path: Path) -> None:
    net = evaluated(Everything(), device)
    engine = compile(net, frame(800, device), capacity=1200, grow=True, check_finite=True)
    save(engine, tmp_path / "net.engine")
    again = load(tmp_path / "net.engine")
    assert again.device == engine.device and again.capacities == engine.capacities
    again(frame(1, device)).check()
    assert again.levels() == engine.levels() and again.plan == engine.plan and again.grow
    for n in (0, 5, 900, 1400):  # the last grows
        x = frame(n, device, seed=n)
        got, wanted = again(x).get(), engine(x).get()
        assert got.pop("number") == wanted.pop("number") == 3
        assert_same(list(got.values()), list(wanted.values()), exact=True)
    with pytest.raises(ValueError, match="is not finite"):
        again(frame(3, device) / 0.0).get()


def test_bounded_grids(device: Device, tmp_path: Path) -> None:
    net = evaluated(NETWORKS["second"](), device)
    shape = (40, 32, 32)

    def bounded(n: int, seed: int) -> voxmma.Voxels:
        x = frame(n, device, seed=seed, extent=32)
        return voxmma.Voxels(x.coords, x.feats, 2, spatial_shape=shape)

    engine = compile(net, bounded(400, 1))
    save(engine, tmp_path / "net.engine")
    again = load(tmp_path / "net.engine")
    for n in (400, 7):
        x = bounded(n, n)
        with torch.no_grad():
            wanted = net(x)
        for got in (engine(x).get(), again((x.coords, x.feats)).get()):
            assert_same(got, wanted)
            assert [y.spatial_shape for y in got] == [y.spatial_shape for y in wanted]
    coords = x.coords.clone()
    coords[3, 2] = 32
    with pytest.raises(ValueError, match=r"coords row 3 is .*: the engine's bounds are"):
        engine((coords, x.feats)).get()
    with pytest.raises(
        ValueError, match=r"the input has spatial_shape None, the engine takes \(40, 32, 32\)"
    ):
        engine(frame(7, device))


def edited(path: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a file with another head."""
    head, tensors = file._read(path)
    sizes = [len(tensor) for tensor in tensors]
    change(head)
    made = path.with_name("edited.engine")
    file._write(made, head, map(bytes, tensors), sizes)
    return made


def test_files_that_are_no_engine_of_this_machine(tmp_path: Path) -> None:
    device = torch.device("cpu")
    path = tmp_path / "net.engine"
    save(compile(evaluated(NETWORKS["second"](), device), frame(50, device)), path)
    for name, value in (("card", "another"), ("build", "0"), ("torch", "1.0"), ("device", "cuda")):
        wrong = edited(path, lambda head: head["machine"].update({name: value}))  # noqa: B023
        with pytest.raises(EngineError, match=rf"is for {name}|is no engine"):
            load(wrong)
    content = path.read_bytes()
    other = path.with_name("other.engine")
    other.write_bytes(content[:8] + (file._FORMAT - 1).to_bytes(4, "little") + content[12:])
    with pytest.raises(
        EngineError, match=f"has format {file._FORMAT - 1}, this version reads {file._FORMAT}"
    ):
        load(other)
    for operator, message in (
        ("aten::from_file.default", "belongs to no network"),
        ("prims::add.default", "is not one of aten or voxmma"),
        ("aten::nothing.default", "is no engine"),
    ):
        wrong = edited(path, lambda head: head["steps"][0].__setitem__(0, operator))  # noqa: B023
        with pytest.raises(EngineError, match=message):
            load(wrong)
    for place, value, message in (
        (1, [1 << 40], "is not in it"),
        (1, [-1], "is not in it|is no engine"),
        (2, [0, 0], "axes are no permutation"),
    ):
        with pytest.raises(EngineError, match=message):
            load(edited(path, lambda head: head["tensors"][0].__setitem__(place, value)))  # noqa: B023
    context = {"default_factory_module": "antigravity", "default_factory_name": "f", "dict_context": ["a"]}
    leaf = {"type": None, "context": None, "children_spec": []}
    named = {"type": "collections.defaultdict", "context": context, "children_spec": [leaf]}
    for name in ("returned", "built"):
        wrong = edited(path, lambda head: head.__setitem__(name, json.dumps([1, named])))  # noqa: B023
        with pytest.raises(EngineError, match="to be imported: antigravity"):
            load(wrong)
    cut = tmp_path / "cut.engine"
    for length, message in ((-2000, "is damaged: it has"), (20, "is no engine"), (0, "is no engine")):
        cut.write_bytes(path.read_bytes()[:length])
        with pytest.raises(EngineError, match=message):
            load(cut)
    flipped = bytearray(path.read_bytes())
    flipped[len(flipped) // 2] ^= 0xFF
    cut.write_bytes(flipped)
    with pytest.raises(EngineError, match="is damaged: its checksum is another"):
        load(cut)
    with pytest.raises(OSError):
        load(tmp_path / "none.engine")


def test_a_head_whose_parts_do_not_fit_is_refused(tmp_path: Path) -> None:
    """With a right checksum. Kernels are not given indices that no operator has made."""
    path = tmp_path / "net.engine"
    save(compile(evaluated(NETWORKS["second"](), torch.device("cpu")), frame(50, torch.device("cpu"))), path)
    assert load(edited(path, lambda head: None)).operators == load(path).operators
    steps = {step[0]: at for at, step in enumerate(file._read(path)[0]["steps"])}
    maps, conv = steps["voxmma::sized_maps.default"], steps["voxmma::conv_fused.default"]
    changes: dict[str, Callable[[dict[str, Any]], Any]] = {
        "reads a tensor that is not there": lambda h: h["steps"].reverse(),
        "frees a tensor that is not there": lambda h: h["steps"][conv][4].append(10**6),
        "Capacity that there is not": lambda h: h["steps"][conv][1].__setitem__(4, {"capacity": 5}),
        "Room that there is not": lambda h: h["steps"][maps][1][5].__setitem__(0, {"room": 8}),
        "Const that there is not": lambda h: h["steps"][conv][1].__setitem__(1, {"const": 10**6}),
        "kernel map that no operator made": lambda h: h["steps"][conv][1].__setitem__(3, [{"const": 0}]),
        "index or kernel map that no": lambda h: h["steps"][maps][1][0].__setitem__(3, {"ref": 0}),
        "zero_ has an index": lambda h: h["steps"].insert(
            maps + 1, ["aten::zero_.default", [{"ref": h["steps"][maps][3][0]}], {}, [], []]
        ),
        "kernel_size": lambda h: h["steps"][maps][1][3].__setitem__(0, 1 << 31),
        "a level or map has no size": lambda h: h["rooms"].pop(),
        "capacities are": lambda h: h["capacities"].__setitem__(1, 1 << 40),
        "rooms are": lambda h: h["rooms"].__setitem__(0, {"float": "-0x1p0"}),
        "level 1 is made of none": lambda h: h["levels"][1].__setitem__(1, 1),
        "an input is of no level": lambda h: h["inputs"][0].__setitem__("root", 1),
        "an input is not in the program": lambda h: h["given"].append(10**6),
        "a kernel map is of no level": lambda h: h["plans"][0].__setitem__(0, 5),
        "a report is of nothing": lambda h: h["reports"][0].__setitem__(1, 5),
        "is no engine: KeyError": lambda h: h["reports"][0].__setitem__(0, "other"),
        "a result is of no level": lambda h: h["outputs"][0]["voxels"].__setitem__(0, -1),
        "a result is not there": lambda h: h["outputs"][0]["voxels"].__setitem__(1, {"ref": 10**6}),
        "a result has no place": lambda h: h["outputs"].pop(),
    }
    for message, change in changes.items():
        with pytest.raises(EngineError, match=message):
            load(edited(path, change))


def test_what_has_no_word_in_a_file_is_not_saved(tmp_path: Path) -> None:
    device = torch.device("cpu")
    engine = compile(lambda x: (x, 3j), frame(50, device))
    with pytest.raises(EngineError, match="cannot be saved"):
        save(engine, tmp_path / "net.engine")


def test_files_are_saved_by_several_threads_under_one_name(tmp_path: Path) -> None:
    engine = compile(evaluated(vnn.SparseConv3d(4, 8, 3), Device("cpu")), frame(50, Device("cpu")))
    start, failed = threading.Barrier(3), []

    def run() -> None:
        start.wait()
        try:
            for _ in range(15):
                save(engine, tmp_path / "net.engine")
                load(tmp_path / "net.engine")
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and [path.name for path in tmp_path.iterdir()] == ["net.engine"]


def test_compiled_code_calls_an_engine_as_it_is(device: Device) -> None:
    """Its own steps are in none of the graphs."""
    net = evaluated(vnn.SparseConv3d(4, 8, 3), device)
    engine, x = compile(net, frame(50, device)), frame(30, device)
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def call(coords: torch.Tensor, feats: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = engine((coords, feats * 2)).get().feats
        return made + 1

    with torch.no_grad():
        got = torch.compile(call, backend=backend)(x.coords, x.feats)
        assert_same(got, net(x * 2).feats + 1)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.op.startswith("call")]
    assert len(calls) in (1, 2)


def test_engines_are_not_copied(device: Device) -> None:
    """Their buffers and graph are one engine's; a copy would share them."""
    engine = compile(evaluated(NETWORKS["second"](), device), frame(50, device))
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="save and load"):
            attempt(engine)
