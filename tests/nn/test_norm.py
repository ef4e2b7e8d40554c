"""Normalisation, activations and sums of Voxels against torch sample by sample, on both devices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck, gradgradcheck

import voxmma
from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.nn import functional as vF
from voxmma.sparse.segments import sample_mean, sample_sum, spread

import conftest

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {
    torch.float16: 3e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-10,
}  # fmt: skip
RELAXED = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def voxels(
    device: torch.device,
    counts: tuple[int, ...] = (9, 0, 30, 1),
    channels: int = 6,
    dtype: torch.dtype = torch.float64,
) -> Voxels:
    """Samples of the given sizes, rows of all samples mixed."""
    coords = torch.cat(
        [F.pad(conftest.random_coords(n, 5, seed=b)[:, 1:], (1, 0), value=b) for b, n in enumerate(counts)]
    )
    coords = coords[torch.randperm(len(coords))]
    feats = torch.randn(len(coords), channels, dtype=torch.float64) * 2 + 3
    return Voxels(coords.to(device), feats.to(device, dtype), len(counts))


def per_sample(x: Voxels, function: Any) -> torch.Tensor:
    """`function` of a (1, C, n) tensor, sample by sample, in x's row order."""
    out = torch.empty_like(x.feats)
    for b in range(x.batch_size):
        rows = x.coords[:, 0] == b
        if rows.any():
            out[rows] = function(x.feats[rows].T.unsqueeze(0))[0].T
    return out


# ---- sums over samples -------------------------------------------------------------------------------------


@RELAXED
@given(counts=st.lists(st.sampled_from([0, 1, 2, 63, 64, 65, 120]), max_size=6))
def test_sample_sums(device: torch.device, counts: list[int]) -> None:
    x = voxels(device, (*counts, 3, 0))
    batch = x.coords[:, 0].long()
    expected = torch.zeros(x.batch_size, 6, dtype=torch.float64, device=device).index_add(0, batch, x.feats)
    total = sample_sum(x.feats, x.coord_set)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(sample_mean(x.feats, x.coord_set) * x.counts.unsqueeze(1), expected)
    assert torch.equal(spread(total, x.coord_set), total[batch])


def test_no_channels(device: torch.device) -> None:
    for x in (
        voxels(device, channels=0),
        voxels(device, (0, 0), channels=0),
        voxels(device, (1,), channels=0),
    ):
        x = x.with_feats(x.feats.requires_grad_())
        assert vF.group_norm(x, 1).feats.shape == (x.num_voxels, 0)
        for pool in (vnn.GlobalSumPool(), vnn.GlobalAvgPool(), vnn.GlobalMaxPool()):
            y = pool(x)
            assert y.shape == (x.batch_size, 0) and y.dtype == x.dtype
            assert torch.autograd.grad(y.sum(), x.feats)[0].shape == x.feats.shape
        for pooling in (vnn.SparseMaxPool3d(3, 1), vnn.SparseAvgPool3d(2, 2)):
            assert pooling(x).feats.shape[1] == 0


@pytest.mark.parametrize(("n", "samples"), [(5000, 1), (5000, 300), (300_000, 3)])
def test_sample_sums_of_many(device: torch.device, n: int, samples: int) -> None:
    line = torch.arange(n)
    coords = torch.stack([torch.randint(samples, (n,)), line // 100_000, line % 100_000, line * 0], 1).int()
    x = Voxels(coords.to(device), torch.rand(n, 2, device=device), samples)
    total = sample_sum(x.feats, x.coord_set)
    expected = torch.zeros(samples, 2, dtype=torch.float64, device=device)
    expected.index_add_(0, x.coords[:, 0].long(), x.feats.double())
    torch.testing.assert_close(total.double(), expected, rtol=1e-6, atol=0)
    assert torch.equal(total, sample_sum(x.feats, Voxels(x.coords, x.feats, samples).coord_set))


def test_sample_sums_differentiate_twice(device: torch.device) -> None:
    x = voxels(device, (4, 0, 7), 2)
    f = x.feats.clone().requires_grad_()
    assert gradcheck(lambda v: sample_mean(v, x.coord_set) ** 2, f)
    assert gradgradcheck(lambda v: spread(sample_sum(v, x.coord_set) ** 2, x.coord_set) * v, f)


# ---- per sample --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3, 6])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_group_norm_is_that_of_each_sample(device: torch.device, groups: int, dtype: torch.dtype) -> None:
    x = voxels(device, dtype=dtype)
    layer = vnn.GroupNorm(groups, 6, device=device)
    with torch.no_grad():
        nn.init.normal_(layer.weight), nn.init.normal_(layer.bias)
    weight, bias = layer.weight.double(), layer.bias.double()
    wide = x.double()
    wide = wide.with_feats(wide.feats.clone().requires_grad_())
    x = x.with_feats(x.feats.clone().requires_grad_())
    out = layer(x)
    expected = per_sample(wide, lambda t: torch.group_norm(t, groups, weight, bias, 1e-5))
    assert out.feats.dtype == dtype and out.coord_set is x.coord_set
    tolerance = TOLERANCE[dtype] if dtype != torch.float64 else 1e-6  # the affine parameters are fp32
    torch.testing.assert_close(out.feats.double(), expected, rtol=tolerance, atol=4 * tolerance)
    dy = torch.randn_like(expected).to(dtype)
    (dx,) = torch.autograd.grad(out.feats, x.feats, dy)
    (expected_dx,) = torch.autograd.grad(expected, wide.feats, dy.double())
    torch.testing.assert_close(dx.double(), expected_dx, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("affine", [False, True])
def test_instance_norm_is_that_of_each_sample(device: torch.device, affine: bool) -> None:
    x = voxels(device, (9, 0, 30))
    layer = vnn.InstanceNorm(6, affine=affine, device=device, dtype=torch.float64)
    out = layer(x).feats
    torch.testing.assert_close(out, per_sample(x, lambda t: F.instance_norm(t, eps=1e-5)))
    assert len(list(layer.parameters())) == 2 * affine
    alone = [layer(part).feats for part in voxmma.unbatch(x)]  # a sample does not see the others
    order = torch.sort(x.coords[:, 0], stable=True).indices
    torch.testing.assert_close(torch.cat(alone), out[order])


def test_statistics_in_fp32_for_half(device: torch.device) -> None:
    """A large mean would overflow fp16 sums and drown the variance in bf16."""
    coords = conftest.random_coords(2000, 16).to(device)
    for dtype, mean in ((torch.float16, 3000.0), (torch.bfloat16, 100.0)):
        feats = (mean + 50 * torch.randn(2000, 4)).to(dtype).to(device)
        x = Voxels(coords, feats)
        for out in (vF.instance_norm(x), vnn.BatchNorm(4, device=device)(x)):
            expected = (feats.double() - feats.double().mean(0)) / feats.double().var(
                0, unbiased=False
            ).sqrt()
            assert out.feats.isfinite().all()
            torch.testing.assert_close(out.feats.double(), expected, rtol=2e-2, atol=2e-2)


def test_group_norm_gradients_and_refusals(device: torch.device) -> None:
    x = voxels(device, (3, 0, 4), 4)
    f = x.feats.clone().requires_grad_()
    w, b = torch.randn(2, 4, dtype=torch.float64).to(device).requires_grad_().unbind()
    assert gradcheck(lambda f, w, b: vF.group_norm(x.with_feats(f), 2, w, b).feats, (f, w, b))
    with pytest.raises(ValueError, match="num_groups=3 does not divide the 4 channels of x"):
        vF.group_norm(x, 3)
    for call in (lambda: vF.group_norm(x.feats, 2), lambda: vF.instance_norm(x.feats)):
        with pytest.raises(TypeError, match="statistics are per sample"):
            call()


# ---- over all voxels, and voxel by voxel -------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_batch_norm_is_torchs_on_the_features(device: torch.device, dtype: torch.dtype) -> None:
    x = voxels(device, dtype=dtype)
    kind = {"dtype": torch.float64} if dtype == torch.float64 else {}
    ours, theirs = vnn.BatchNorm(6, device=device, **kind), nn.BatchNorm1d(6, device=device, **kind)
    theirs.load_state_dict(ours.state_dict())
    for training in (True, True, False):
        out, expected = ours.train(training)(x), theirs.train(training)(x.feats)
        assert torch.equal(out.feats, expected) and out.coord_set is x.coord_set
    assert all(
        torch.equal(a, b)
        for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("n", [0, 1])
@pytest.mark.parametrize("track", [True, False])
def test_batch_norm_of_too_few_voxels(device: torch.device, n: int, track: bool) -> None:
    layer = vnn.BatchNorm(6, track_running_stats=track, device=device, dtype=torch.float64)
    sync = vnn.SyncBatchNorm(6, track_running_stats=track, device=device, dtype=torch.float64)
    for module in (layer, sync):
        module(voxels(device))
        before = {k: v.clone() for k, v in module.state_dict().items()}
        x = voxels(device, (n, 0))
        f = x.feats.clone().requires_grad_()
        out = module(x.with_feats(f))
        out.feats.sum().backward()
        assert out.feats.shape == (n, 6) and out.feats.isfinite().all() and f.grad.isfinite().all()
        assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
        if not track:
            assert not out.feats.any() and not f.grad.any()


@pytest.mark.parametrize(
    ("ours", "plain"),
    [
        (vnn.ReLU(), nn.ReLU()), (vnn.GELU("tanh"), nn.GELU("tanh")), (vnn.SiLU(), nn.SiLU()),
        (vnn.LeakyReLU(0.2), nn.LeakyReLU(0.2)), (vnn.Sigmoid(), nn.Sigmoid()), (vnn.Tanh(), nn.Tanh()),
        (vnn.LayerNorm(6), nn.LayerNorm(6)), (vnn.RMSNorm(6), nn.RMSNorm(6)),
        (vnn.Linear(6, 4), nn.Linear(6, 4)), (vnn.Dropout(0.4), nn.Dropout(0.4)),
        (vnn.Lift(nn.LogSigmoid()), nn.LogSigmoid()),
    ],
    ids=lambda m: type(m).__name__,
)  # fmt: skip
def test_lifted_layers_are_torchs_on_the_features(device: torch.device, ours: Any, plain: Any) -> None:
    ours, plain = copy.deepcopy(ours).to(device), copy.deepcopy(plain).to(device)
    plain.load_state_dict(ours.state_dict())
    for x in (voxels(device, dtype=torch.float32), voxels(device, (0, 0), dtype=torch.float32)):
        torch.manual_seed(1)
        out = ours(x)
        torch.manual_seed(1)
        expected = plain(x.feats)
        assert torch.equal(out.feats, expected) and out.coord_set is x.coord_set
        torch.manual_seed(1)
        assert torch.equal(ours(x.feats), expected)  # and takes a tensor


def test_functions_and_what_they_refuse(device: torch.device) -> None:
    x = voxels(device)
    for name in ("relu", "gelu", "silu", "leaky_relu", "sigmoid", "tanh", "dropout"):
        assert getattr(vF, name)(x).coord_set is x.coord_set
    assert torch.equal(vF.layer_norm(x, (6,)).feats, F.layer_norm(x.feats, (6,)))
    assert torch.equal(vF.rms_norm(x, (6,)).feats, F.rms_norm(x.feats, (6,)))
    with pytest.raises(ValueError, match="feats has 1 rows"):
        vF.lift(lambda f: f.sum(0, keepdim=True), x)


# ---- several voxels ----------------------------------------------------------------------------------------


def test_cat_and_add_compare_coordinates_not_counts(device: torch.device) -> None:
    x = voxels(device)
    shuffle = torch.randperm(x.num_voxels).to(device)
    shared, equal = x.with_feats(x.feats[:, :2]), Voxels(x.coords, x.feats, x.batch_size)
    shuffled = Voxels(x.coords[shuffle], x.feats[shuffle], x.batch_size)
    assert torch.equal(vF.cat(x, shared, shuffled).feats, torch.cat([x.feats, x.feats[:, :2], x.feats], 1))
    assert torch.equal(vF.add(x, equal, shuffled).feats, 3 * x.feats)
    moved = x.coords.clone()
    moved[5, 1] += 50
    other = Voxels(moved, x.feats, x.batch_size)
    for call in (vF.cat, vF.add):
        assert call(x).coord_set is call(x, equal).coord_set is x.coord_set
        with pytest.raises(ValueError, match=r"row 5 of the left, .* is not in the right"):
            call(x, other)
        with pytest.raises(ValueError, match="at least one"):
            call()
        with pytest.raises(TypeError, match=r"voxels\[1\] must be"):
            call(x, x.feats)
    with pytest.raises(ValueError, match="cannot concatenate voxels: stride"):
        vF.cat(x, Voxels(x.coords, x.feats, x.batch_size, stride=2))


ROWS = st.lists(st.tuples(st.integers(0, 1), *(st.integers(-1, 2),) * 3), max_size=15, unique=True)


@RELAXED
@given(a=ROWS, b=ROWS, c=ROWS)
def test_add_union(device: torch.device, a: Any, b: Any, c: Any) -> None:
    expected: dict[Any, torch.Tensor] = {}
    parts = []
    for rows in (a, b, c):
        feats = torch.randn(len(rows), 2, dtype=torch.float64)
        parts.append(
            Voxels(torch.tensor(rows, dtype=torch.int32).reshape(-1, 4).to(device), feats.to(device), 2)
        )
        for row, value in zip(rows, feats, strict=True):
            expected[row] = expected.get(row, torch.zeros(2, dtype=torch.float64)) + value
    out = vF.add_union(*parts)
    assert [tuple(r) for r in out.coords.tolist()] == sorted(expected)
    if expected:
        torch.testing.assert_close(out.feats.cpu(), torch.stack([expected[k] for k in sorted(expected)]))


def test_add_union_sharing_gradients_and_refusals(device: torch.device) -> None:
    x, y = voxels(device, (4, 0, 5), 2), voxels(device, (0, 3, 6), 2)
    assert vF.add_union(x, x).coord_set is x.coord_set
    f, g = x.feats.clone().requires_grad_(), y.feats.clone().requires_grad_()
    assert gradcheck(lambda f, g: vF.add_union(x.with_feats(f), y.with_feats(g)).feats, (f, g))
    assert vF.add_union(x.half(), y.float()).dtype == torch.float32
    for other, message in (
        (Voxels(y.coords, y.feats, 7), r"coords\[1\] has batch_size 7"),
        (y.with_feats(y.feats[:, :1]), r"voxels\[1\] has channels 1, voxels\[0\] has 2"),
        (Voxels(y.coords, y.feats, 3, stride=2), r"voxels\[1\] has stride"),
    ):
        with pytest.raises(ValueError, match=message):
            vF.add_union(x, other)


@pytest.mark.gpu
def test_norms_do_not_wait_for_the_gpu() -> None:
    x = voxels(torch.device("cuda"), dtype=torch.float32)
    layers = [vnn.GroupNorm(2, 6).cuda(), vnn.InstanceNorm(6).cuda(), vnn.BatchNorm(6).cuda(), vnn.ReLU()]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in layers:
            y = layer(x.with_feats(x.feats.clone().requires_grad_()))
            y.feats.sum().backward()
            voxmma.nn.functional.cat(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
