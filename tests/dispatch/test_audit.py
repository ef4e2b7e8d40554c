"""The audit lists what reached the kernels."""

from __future__ import annotations

import threading

import pytest
import torch

import voxmma
from voxmma.dispatch.launches import Launch, audit, notify
from voxmma.nn import SparseConv3d
from voxmma.verify import trials


@pytest.fixture
def x(device: torch.device) -> voxmma.Voxels:
    scene = trials.scene(device, 80)
    return scene.with_feats(torch.randn(scene.num_voxels, 16, device=device).half())


def fields(launch: Launch) -> tuple[str, str, str, str]:
    return launch.op, launch.input, launch.accumulator, launch.output


def test_forward_and_backward_launches(x: voxmma.Voxels) -> None:
    first = SparseConv3d(16, 32, 3).to(x.device)
    second = SparseConv3d(32, 8, 2, use_fp16_accum=True).to(x.device)
    with audit() as log:
        hidden = first(x)
        y = second(hidden.with_feats(hidden.feats.relu()))
        y.feats.float().sum().backward()
    assert sorted(map(fields, log)) == sorted(
        [
            ("fprop", "fp16", "fp32", "fp16"),
            ("fprop", "fp16", "fp16", "fp16"),
            ("dgrad", "fp16", "fp16", "fp16"),
            ("wgrad", "fp16", "fp32", "fp32"),
            ("wgrad", "fp16", "fp32", "fp32"),
        ]
    )
    forward = [launch for launch in log if launch.op == "fprop"]
    assert [(launch.c_in, launch.c_out, launch.volume) for launch in forward] == [(16, 32, 27), (32, 8, 8)]
    assert all(launch.rows == x.num_voxels for launch in log)
    records = [voxmma.explain(hidden), voxmma.explain(y)]
    assert [launch.tile for launch in forward] == [record.tile for record in records]
    dgrad = next(launch for launch in log if launch.op == "dgrad")
    assert dgrad.tile == records[1].dgrad_tile and (dgrad.c_in, dgrad.c_out) == (8, 32)
    assert {launch.tile for launch in log if launch.op == "wgrad"} == {
        record.wgrad_tile for record in records
    }


def test_launches_carry_their_records(x: voxmma.Voxels) -> None:
    layers = [SparseConv3d(16, 16, 3).to(x.device), SparseConv3d(16, 8, 3, use_fp16_accum=True).to(x.device)]
    with audit() as log:
        y = x
        for layer in layers:
            y = layer(y)
        y.feats.float().sum().backward()
    record = voxmma.explain(y)
    mine = [launch for launch in log if launch.layer == record.layer]
    assert sorted(launch.op for launch in mine) == ["dgrad", "fprop", "wgrad"]
    assert {launch.decided_by for launch in mine} == {"module"} and {launch.requested for launch in mine} == {
        "fp16"
    }
    assert all(record.reason in str(launch) and record.layer in str(launch) for launch in mine)
    assert all(launch.layer for launch in log) and "requested by default" in str(log)


def test_convolutions_announce_their_records(x: voxmma.Voxels) -> None:
    with audit() as log:
        y = SparseConv3d(16, 8, 3).to(x.device)(x)
    assert log[0].layer == voxmma.explain(y).layer


def test_nested_finished_and_foreign_logs(x: voxmma.Voxels) -> None:
    layer = SparseConv3d(16, 8, 1).to(x.device)
    with audit() as outer:
        layer(x)
        with audit() as inner, torch.inference_mode():
            layer(x)
        layer(x)
        other = threading.Thread(target=lambda: layer(x))
        other.start()
        other.join()
    layer(x)
    assert (len(inner), len(outer)) == (1, 3) and outer[0].op == "fprop"
    assert outer[0].as_dict()["c_out"] == 8
    notify(voxmma.explain(layer(x)))  # no log open: nothing to do
    with audit() as log:
        layer(x)
        notify(voxmma.explain(layer(x)))  # announced twice: the second finds nothing to claim
    assert len(log) == 2 and all(launch.layer for launch in log)


def test_an_exception_leaves_no_log_open(x: voxmma.Voxels) -> None:
    layer = SparseConv3d(16, 8, 1).to(x.device)
    with pytest.raises(RuntimeError, match="stop"), audit() as log:
        layer(x)
        raise RuntimeError("stop")
    layer(x)
    assert len(log) == 1


def test_grouped_and_wide_calls(x: voxmma.Voxels) -> None:
    layer = SparseConv3d(16, 16, 3, groups=4).to(x.device).double()
    with audit() as log, torch.no_grad():
        layer(x.with_feats(x.feats.double()))
    (launch,) = log
    assert (launch.groups, launch.c_in, launch.c_out) == (4, 16, 16)
    assert fields(launch) == ("fprop", "fp64", "fp64", "fp64")
