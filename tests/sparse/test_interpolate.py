"""Weighted sums of rows, and their transpose, as functions of any rows and weights."""

from __future__ import annotations

import pytest
import torch

from voxmma.sparse.interpolate import spread_weighted, weighted

import conftest


@pytest.mark.parametrize("corners", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_weighted_rows_and_their_transpose(corners: int, dtype: torch.dtype, device: torch.device) -> None:
    feats = torch.randn(30, 5, dtype=torch.float64)
    rows = torch.randint(-1, 30, (50, corners))
    weights = torch.randn(50, corners, dtype=torch.float64)
    weights[::7] = 0
    feats = feats.to(dtype).double()
    there = torch.where(rows >= 0, weights, 0).unsqueeze(2)
    wanted = (feats[rows.clamp(min=0)] * there).sum(1)
    mine = feats.to(device, dtype).requires_grad_()
    got = weighted(mine, rows.to(device), weights.to(device))
    bound = {torch.float64: 1e-13, torch.float32: 1e-5, torch.float16: 1e-2}[dtype]
    assert got.dtype == dtype and torch.allclose(got.detach().cpu().double(), wanted, rtol=bound, atol=bound)
    upstream = torch.randn(50, 5, dtype=torch.float64).to(dtype)
    got.backward(upstream.to(device))
    flat = torch.where(rows >= 0, rows, 30).flatten()
    terms = (upstream.double().unsqueeze(1) * there).flatten(0, 1)
    spread = torch.zeros(31, 5, dtype=torch.float64).index_add(0, flat, terms)[:30]
    slack = {"rtol": 20 * bound, "atol": 20 * bound}
    assert torch.allclose(mine.grad.cpu().double(), spread, **slack)
    made = spread_weighted(upstream.to(device), rows.to(device), weights.to(device), 30)
    assert made.dtype == dtype and torch.allclose(made.cpu().double(), spread, **slack)


def test_fault_52_rows_that_are_not_there_are_refused(device: torch.device, clean: conftest.Clean) -> None:
    """On a GPU by the device, like those of torch's own indexing: what runs there is lost."""
    calls = ("weighted(torch.ones(3, 2, **on), ", "spread_weighted(torch.ones(2, 2, **on), ")
    for call, rest in zip(calls, ("", ", 3"), strict=True):
        told = clean(
            "from voxmma.sparse.interpolate import spread_weighted, weighted\n"
            f"on, found = {{'device': {str(device)!r}}}, ''\n"
            "rows = torch.tensor([[-1, 2], [0, 3]], **on)\n"
            "try:\n"
            f"    {call}rows, torch.ones(2, 2, **on){rest}).sum().item()\n"
            "except (IndexError, RuntimeError) as error:\n"
            "    found = str(error)"
        )
        assert told == "rows[1] is [0, 3], there are 3" or (device.type == "cuda" and "assert" in told)


def test_rows_without_weight_are_not_read(device: torch.device) -> None:
    feats = torch.tensor([[1.0], [torch.inf], [torch.nan]], device=device).requires_grad_()
    rows = torch.tensor([[0, 1], [-1, 2], [0, 0]], device=device)
    weights = torch.tensor([[2.0, 0.0], [5.0, 0.0], [1.0, 1.0]], device=device)
    y = weighted(feats, rows, weights)
    assert y.flatten().tolist() == [2.0, 0.0, 2.0]
    y.sum().backward()
    assert feats.grad.flatten().tolist() == [4.0, 0.0, 0.0]


def test_gradients_of_gradients_and_nothing(device: torch.device) -> None:
    feats = torch.randn(6, 2, dtype=torch.float64, device=device).requires_grad_()
    rows = torch.randint(-1, 6, (9, 4), device=device)
    weights = torch.rand(9, 4, dtype=torch.float64, device=device)
    assert torch.autograd.gradcheck(lambda f: weighted(f, rows, weights), feats)
    assert torch.autograd.gradgradcheck(lambda f: weighted(f, rows, weights).square(), feats)
    points = torch.randn(9, 2, dtype=torch.float64, device=device).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: spread_weighted(p, rows, weights, 6), points)
    assert weighted(
        feats[:0], torch.full((3, 8), -1, device=device), torch.ones(3, 8, device=device)
    ).shape == (3, 2)
    none = torch.zeros((0, 1), dtype=torch.int64, device=device)
    assert spread_weighted(points[:0], none, none.double(), 4).abs().sum() == 0
    with pytest.raises(ValueError, match="K of 1 to 8"):
        weighted(feats, torch.zeros((2, 9), device=device).long(), torch.ones(2, 9, device=device))
