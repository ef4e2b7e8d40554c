"""conv_fused, conv_fused_into and pack_weight: every tile and activation, residuals, slices, weights that are
not finite, against the sums that the plain op has and what follows them in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import voxmma
from voxmma.dispatch.selection import card
from voxmma.ops.kernels import compiled
from voxmma.sparse.maps import KernelMap

from conftest import random_coords, surface_coords

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
ACTIVATIONS = {
    "none": lambda y: y,
    "relu": F.relu,
    "leaky_relu": lambda y: F.leaky_relu(y, 0.125),
    "silu": F.silu,
    "gelu": F.gelu,
}
CPU_TILES = [
    *(("cpu", kind, "fp64" if kind == "fp64" else "fp32") for kind in DTYPES),
    ("cpu_tf32", "fp32", "fp32"),
    ("cpu", "fp16", "fp16"),
    ("cpu_p32", "fp16", "fp16_promoted"),
]
#: groups, channels of a group: aligned and not, more than one block of columns, narrow groups
SHAPES = ((1, 64, 64), (1, 40, 136), (1, 24, 20), (1, 5, 3), (2, 16, 24), (4, 5, 3))


def tiles(device: torch.device) -> list[tuple[str, torch.dtype, str]]:
    rows = CPU_TILES
    if device.type == "cuda":
        here = card(device)
        rows = [(t.name, t.input, t.accum) for t in compiled() if t.op == "fprop" and t.runs_on(here)]
    return [(name, DTYPES[kind], accum) for name, kind, accum in rows]


class Case:
    """Operands of one convolution, and what may follow it."""

    def __init__(
        self, device: torch.device, n: int, groups: int, c_in: int, c_out: int, size: int = 3
    ) -> None:
        coords = surface_coords(int((0.6 * n) ** 0.5) + 8)[:n] if n > 200 else random_coords(n, 9)
        self.map: KernelMap = voxmma.kernel_map(voxmma.CoordSet(coords.to(device), 1), size)
        self.n, self.channels = n, groups * c_out
        g = torch.Generator().manual_seed(n)
        shape = (size**3, groups, c_in, c_out) if groups > 1 else (size**3, c_in, c_out)

        def draw(*sizes: int) -> Tensor:
            return torch.randn(sizes, generator=g).to(device)

        self.x, self.w = draw(n, groups * c_in), draw(*shape) / (4 * c_in) ** 0.5
        self.bias, self.mean, self.shift, self.scale = (draw(self.channels) for _ in range(4))
        self.var = draw(self.channels).square()
        self.residual = draw(n, self.channels)

    def numbers(self, turn: int) -> dict[str, Any]:
        """One of several choices of what is given."""
        norm = {"mean": self.mean, "var": self.var, "eps": 1e-3}
        affine = {"scale": self.scale.double(), "shift": self.shift}
        return [norm | affine, {}, affine, norm, {"shift": self.shift}, {"var": self.var, "eps": 0.5}][
            turn % 6
        ]

    def operands(self, dtype: torch.dtype, bias: bool) -> tuple[Any, ...]:
        wide = torch.promote_types(dtype, torch.float32)
        return self.x.to(dtype), self.w.to(wide), self.bias.half() if bias else None

    def geometry(self) -> tuple[Any, ...]:
        return self.map.tensors, self.n, self.map.symmetric, False

    def sums(self, x: Tensor, w: Tensor, tile: str, accum: str) -> Tensor:
        """Unrounded sums without bias, in fp32 or fp64."""
        wide = torch.promote_types(x.dtype, torch.float32)
        tensors, *rest = self.geometry()
        return torch.ops.voxmma.conv(x, w, None, tensors, [], *rest, accum, tile, tile, "", wide)


def expected(
    sums: Tensor, bias: Tensor | None, residual: Tensor | None, act: str, **n: Any
) -> tuple[Tensor, Tensor]:
    """The result in fp64, and what its fp32 roundings are relative to."""
    factor = n["scale"].double() if "scale" in n else torch.ones_like(sums[0]).double()
    if "var" in n:
        factor = factor / (n["var"].double() + n.get("eps", 0.0)).sqrt()
    add = torch.zeros_like(factor)
    for value, sign in ((bias, 1), (n.get("mean"), -1)):
        add = add if value is None else add + sign * value.double()
    add = add * factor
    if "shift" in n:
        add = add + n["shift"].double()
    y, size = sums.double() * factor + add, (sums.double() * factor).abs() + add.abs()
    if residual is not None:
        y, size = y + residual.double(), size + residual.double().abs()
    return ACTIVATIONS[act](y), size


def check(y: Tensor, reference: Tensor, size: Tensor, what: object) -> None:
    eps = torch.finfo(y.dtype).eps
    inner = torch.finfo(torch.promote_types(y.dtype, torch.float32)).eps
    tiny = torch.finfo(y.dtype).tiny * eps
    allowed = reference.abs() * (0.5 + 1e-3) * eps + size * 8 * inner + tiny
    assert ((y.double() - reference).abs() <= allowed).all(), what


def calls(device: torch.device) -> Iterator[tuple[str, torch.dtype, str, tuple[int, int, int], int]]:
    """Every tile with two of the shapes, in turn."""
    for i, (tile, dtype, accum) in enumerate(tiles(device)):
        for k in range(2):
            yield tile, dtype, accum, SHAPES[(i + 3 * k) % len(SHAPES)], i + k


@pytest.mark.parametrize("n", [90, 1300, pytest.param(40000, marks=pytest.mark.gpu)])
def test_every_tile_does_what_follows(device: torch.device, n: int) -> None:
    """Small sets, whose sums several CTAs share, and large ones; every activation on every tile."""
    if n == 40000 and device.type == "cpu":
        pytest.skip("for the GPU's full waves")
    cases: dict[Any, Case] = {}
    for tile, dtype, accum, shape, turn in calls(device):
        if shape not in cases:
            cases[shape] = Case(device, n, *shape)
        case = cases[shape]
        for i, act in enumerate(ACTIVATIONS, turn):
            x, w, bias = case.operands(dtype, bias=i % 2 == 0)
            wide_out = i % 3 == 0 and dtype != torch.float64
            out = torch.float32 if wide_out else dtype
            residual = case.residual.to(out) if i % 4 < 2 else None
            numbers = case.numbers(i)
            y = torch.ops.voxmma.conv_fused(
                x, w, bias, *case.geometry(), accum, tile, out, **numbers, residual=residual, activation=act,
                slope=0.125,
            )  # fmt: skip
            assert y.dtype == out and y.shape == (n, case.channels)
            reference, size = expected(case.sums(x, w, tile, accum), bias, residual, act, **numbers)
            check(y, reference, size, (tile, shape, act, i))


def test_packed_weights_and_slices_change_no_bit(device: torch.device) -> None:
    for tile, dtype, accum, shape, turn in calls(device):
        case = Case(device, 700, *shape)
        x, w, bias = case.operands(dtype, bias=True)
        numbers = case.numbers(turn)
        residual = case.residual.to(dtype)
        then = numbers | {"activation": "relu"}
        y = torch.ops.voxmma.conv_fused(
            x, w, bias, *case.geometry(), accum, tile, None, **then, residual=residual
        )
        packed = torch.ops.voxmma.pack_weight(
            w, bias, case.map.symmetric, False, accum, tile, dtype, **numbers
        )
        again = torch.ops.voxmma.conv_fused(
            x, w, bias, *case.geometry(), accum, tile, None, **then, residual=residual, packed=packed
        )
        assert torch.equal(y, again), tile
        for first, after in ((16, 8), (1, 2)):  # aligned, and not
            wide = torch.full((700, first + case.channels + after), 7.0, dtype=dtype, device=device)
            res = torch.full_like(wide, 7.0)
            res[:, first : first + case.channels] = residual
            torch.ops.voxmma.conv_fused_into(
                x, w, bias, *case.geometry(), accum, tile, None, **then,
                residual=res[:, first : first + case.channels], out=wide[:, first : first + case.channels],
            )  # fmt: skip
            assert torch.equal(wide[:, first : first + case.channels], y), (tile, first)
            assert (wide[:, :first] == 7).all() and (wide[:, first + case.channels :] == 7).all(), tile


def test_plain_calls_fused_or_not_are_equal(device: torch.device) -> None:
    """With a bias alone conv_fused is conv, into a slice too."""
    for tile, dtype, accum, shape, _ in calls(device):
        case = Case(device, 700, *shape)
        x, w, bias = case.operands(dtype, bias=True)
        tensors, *rest = case.geometry()
        y = torch.ops.voxmma.conv(x, w, bias, tensors, [], *rest, accum, tile, tile, "", None)
        assert torch.equal(torch.ops.voxmma.conv_fused(x, w, bias, *case.geometry(), accum, tile), y), tile
        for first in (8, 3):
            wide = torch.zeros((700, first + case.channels + 5), dtype=dtype, device=device)
            part = wide[:, first : first + case.channels]
            torch.ops.voxmma.conv_fused_into(x, w, bias, *case.geometry(), accum, tile, out=part)
            assert torch.equal(part, y), tile
            assert not wide[:, :first].any() and not wide[:, first + case.channels :].any()


def in_last(w: Tensor) -> Tensor:
    """The same weights, of each output channel one after another, its input channels adjacent."""
    return w.movedim(-1, 0).contiguous().movedim(0, -1)


def loose(w: Tensor) -> Tensor:
    """The same weights among others, no row aligned."""
    wide = w.new_full((*w.shape[:-1], w.shape[-1] + 3), torch.nan)
    wide[..., 1:-2] = w
    return wide[..., 1:-2]


@pytest.mark.parametrize("transpose", [False, True], ids=["fprop", "dgrad"])
@pytest.mark.parametrize("n", [90, 1300])
@pytest.mark.parametrize("lay", [Tensor.contiguous, in_last, loose], ids=["plain", "in_last", "loose"])
def test_weights_read_as_they_are_and_packed_give_the_same_bits(
    device: torch.device, n: int, transpose: bool, lay: Callable[[Tensor], Tensor]
) -> None:
    """Weights of the operands' type, which small sets read without packing where their rows allow it."""
    for tile, dtype, accum, (groups, c_in, c_out), turn in calls(device):
        case = Case(device, n, groups, *((c_out, c_in) if transpose else (c_in, c_out)))
        x, w = (case.residual if transpose else case.x).to(dtype), case.w.to(dtype)
        numbers: dict[str, Any] = {} if transpose else case.numbers(turn)
        bias = None if transpose or turn % 2 else case.bias.half()
        geometry = (case.map.tensors, n, True, transpose)
        y = torch.ops.voxmma.conv_fused(x, w, bias, *geometry, accum, tile, None, **numbers)
        w = lay(w)
        packed = torch.ops.voxmma.pack_weight(w, bias, True, transpose, accum, tile, dtype, **numbers)
        for given in (None, packed):
            again = torch.ops.voxmma.conv_fused(
                x, w, bias, *geometry, accum, tile, None, **numbers, packed=given
            )
            what = tile, groups, c_in, c_out, given is None
            if device.type == "cpu":  # whose BLAS adds up in the order that suits it
                eps = 4 * torch.finfo(dtype).eps
                assert ((y - again).abs() <= eps * (y.abs() + y.abs().max())).all(), what
            else:
                assert torch.equal(y, again), what


@pytest.mark.parametrize("wide", [True, False], ids=["wide_weights", "weights_of_the_type"])
def test_gradient_direction_of_a_symmetric_map(device: torch.device, wide: bool) -> None:
    """transpose=True over a symmetric map mirrors the offsets, packed or not."""
    for tile, dtype, accum, (groups, c_in, c_out), _ in calls(device):
        case = Case(device, 300, groups, c_in, c_out)
        w = case.w.to(torch.promote_types(dtype, torch.float32) if wide else dtype)
        dy = case.residual.to(dtype)
        y = torch.ops.voxmma.conv(
            dy, w, None, case.map.tensors, [], 300, True, True, accum, tile, tile, "", None
        )
        packed = torch.ops.voxmma.pack_weight(w, None, True, True, accum, tile, dtype)
        again = torch.ops.voxmma.conv_fused(
            dy, w, None, case.map.tensors, 300, True, True, accum, tile, packed=packed
        )
        assert torch.equal(y, again), tile


@pytest.mark.parametrize("wide", [True, False], ids=["wide_weights", "weights_of_the_type"])
@pytest.mark.parametrize("act", ["none", "relu"])
@pytest.mark.parametrize("n", [150, 1300])
def test_weights_that_are_not_finite(device: torch.device, act: str, n: int, wide: bool) -> None:
    """Reach the outputs that they reach on their own, as the sums that they make, through the epilogue."""
    bad = (torch.inf, -torch.inf, torch.nan)
    for tile, dtype, accum, shape, turn in calls(device):
        case = Case(device, n, *shape)
        case.x[::7] = 0
        x, w, bias = case.operands(dtype, bias=True)
        w = w if wide else w.to(dtype)
        for k, value in zip(
            (0, 5, 20), itertools.islice(itertools.cycle(bad), turn % 3, turn % 3 + 3), strict=True
        ):
            w.view(27, -1)[k, (7 * k + turn) % w[0].numel()] = value
        w = w if turn % 2 else in_last(w)
        numbers = case.numbers(turn)
        residual = case.residual.to(dtype)
        y = torch.ops.voxmma.conv_fused(
            x, w, bias, *case.geometry(), accum, tile, None, **numbers, residual=residual, activation=act
        )
        sums = case.sums(x, w, tile, accum)
        assert not sums.isfinite().all() and sums.isfinite().any()
        reference, size = expected(sums, bias, residual, act, **numbers)
        there = reference.isfinite() & sums.isfinite()
        check(y[there], reference[there], size[there], (tile, shape))
        rest = reference[~there].to(dtype)
        assert torch.equal(y[~there].nan_to_num(7, 8, 9), rest.nan_to_num(7, 8, 9)), (tile, shape)


def test_no_rows(device: torch.device) -> None:
    for tile, dtype, accum, shape, turn in calls(device):
        groups, c_in, c_out = shape
        case = Case(device, 90, *shape)
        _, w, bias = case.operands(dtype, bias=True)
        none = voxmma.CoordSet(torch.zeros((0, 4), dtype=torch.int32, device=device), 1)
        numbers, residual = case.numbers(turn), case.residual.to(dtype)
        x = torch.zeros((0, groups * c_in), dtype=dtype, device=device)
        own = voxmma.kernel_map(none, 3)
        y = torch.ops.voxmma.conv_fused(x, w, bias, own.tensors, 0, True, False, accum, tile, **numbers)
        assert y.shape == (0, groups * c_out)
        into = voxmma.kernel_map(none, 3, out_coords=case.map.out_coords)
        y = torch.ops.voxmma.conv_fused(
            x,
            w,
            bias,
            into.tensors,
            90,
            False,
            False,
            accum,
            tile,
            **numbers,
            residual=residual,
            activation="silu",
        )
        zero = torch.zeros(
            (90, case.channels), dtype=torch.promote_types(dtype, torch.float32), device=device
        )
        check(y, *expected(zero, bias, residual, "silu", **numbers), (tile, shape))


def test_what_it_refuses(device: torch.device) -> None:
    case = Case(device, 90, 1, 8, 8)
    tile, dtype, accum = tiles(device)[0]
    x, w, bias = case.operands(dtype, bias=True)
    op, into = torch.ops.voxmma.conv_fused, torch.ops.voxmma.conv_fused_into

    def run(**then: Any) -> Tensor:
        return op(x, w, bias, *case.geometry(), accum, tile, **then)

    for then, message in (
        ({"activation": "tanh"}, "activation='tanh' is unknown"),
        ({"scale": case.scale[:5]}, "scale has 5 entries for 8"),
        ({"mean": case.mean.int()}, "mean has dtype"),
        ({"residual": case.residual.to(torch.float64)}, "residual must be"),
        ({"residual": case.residual[:7].to(dtype)}, "residual must be"),
    ):
        with pytest.raises(RuntimeError, match=message):
            run(**then)
    with pytest.raises(RuntimeError, match="has no gradient"):
        op(x.requires_grad_(), w, bias, *case.geometry(), accum, tile)
    with torch.no_grad():
        run()
    x = x.detach()
    wide = torch.zeros((90, 16), dtype=dtype, device=device)
    for out, message in (
        (wide, "out must be"),
        (wide[:, ::2], "adjacent channels"),
        (wide[:1, :8].expand(90, 8), "out|single memory location"),
    ):
        with pytest.raises(RuntimeError, match=message):
            into(x, w, bias, *case.geometry(), accum, tile, out=out)
    memory = torch.zeros(91 * 20, dtype=dtype, device=device)
    columns = [memory.as_strided((90, 8), (20, 1), first) for first in (0, 4, 8, 12, 16, 20)]
    for rows in columns:  # of 20: those of the fifth end in the next row, the last are those of the next
        for name, given, residual in (("x", rows, None), ("residual", x, rows)):
            if rows is columns[2] or rows is columns[3]:
                into(given, w, bias, *case.geometry(), accum, tile, out=columns[0], residual=residual)
                continue
            message = f"out and {name} have memory in common|single memory location"
            with pytest.raises(RuntimeError, match=message):
                into(given, w, bias, *case.geometry(), accum, tile, out=columns[0], residual=residual)
    version = wide._version
    into(x, w, bias, *case.geometry(), accum, tile, out=wide[:, :8])
    assert wide._version > version
    if device.type == "cuda":
        packed = torch.ops.voxmma.pack_weight(w, bias, True, False, accum, tile, dtype)
        with pytest.raises(RuntimeError, match="packed must be what pack_weight makes"):
            run(scale=case.scale, packed=packed)


def test_fakes_agree(device: torch.device) -> None:
    tile, dtype, accum = tiles(device)[0]
    case = Case(device, 90, 1, 8, 16)
    x, w, bias = case.operands(dtype, bias=True)
    torch.library.opcheck(
        torch.ops.voxmma.conv_fused.default,
        (x, w, bias, *case.geometry(), accum, tile),
        {"scale": case.scale, "activation": "gelu"},
    )
    torch.library.opcheck(
        torch.ops.voxmma.conv_fused_into.default,
        (x, w, bias, *case.geometry(), accum, tile),
        {"out": torch.zeros((90, 16), dtype=dtype, device=device)},
    )
