"""torch.ops.voxmma.conv and conv_wgrad: values, gradients of any order, fakes, compile, autocast, bad calls.

Expected values come from neighbour lists found here by dictionary lookup, not from the library's kernel maps.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.library import opcheck
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import voxmma
from voxmma import _C
from voxmma.dispatch.selection import select_tile
from voxmma.sparse.coords import CoordSet
from voxmma.sparse.maps import KernelMap, kernel_map

from conftest import kernel_offsets, random_coords

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
conv_op, wgrad_op = torch.ops.voxmma.conv, torch.ops.voxmma.conv_wgrad

#: Unit roundoff of the output times a small factor, against sum |a||b|: fp16 and bf16 round once at the end.
TOLERANCE = {torch.float16: 6e-4, torch.bfloat16: 4.5e-3, torch.float32: 2e-6, torch.float64: 1e-14}


def brute_pairs(
    in_coords: torch.Tensor, out_coords: torch.Tensor, offsets: list[tuple[int, int, int]]
) -> Pairs:
    """(input rows, output rows) of every offset, by looking each output's neighbour up in a dictionary."""
    row = {tuple(c): i for i, c in enumerate(in_coords.tolist())}
    pairs = []
    for dx, dy, dz in offsets:
        found = [
            (row[b, x + dx, y + dy, z + dz], i)
            for i, (b, x, y, z) in enumerate(out_coords.tolist())
            if (b, x + dx, y + dy, z + dz) in row
        ]
        both = torch.tensor(found, dtype=torch.long).reshape(-1, 2)
        pairs.append((both[:, 0], both[:, 1]))
    return pairs


class Case:
    """A kernel map with its oracle, and the ops' arguments for it."""

    def __init__(
        self,
        device: torch.device | str = "cpu",
        kernel_size: tuple[int, int, int] = (3, 3, 3),
        groups: int = 1,
        channels: tuple[int, int] = (4, 6),
        transpose: bool = False,
        dtype: torch.dtype = torch.float64,
        accumulator: str | None = None,
        n: int = 40,
    ) -> None:
        self.device, self.groups, self.transpose, self.dtype = torch.device(device), groups, transpose, dtype
        self.c_in, self.c_out = channels
        self.accumulator = accumulator or ("fp64" if dtype == torch.float64 else "fp32")
        coords = random_coords(n, 5, batch=2, seed=7)
        self.map: KernelMap = kernel_map(CoordSet(coords.to(self.device), 2), kernel_size)
        _ = self.map.transposed().tensors  # built now: fakes cannot
        self.n, self.volume = n, self.map.kernel_volume
        self.pairs = brute_pairs(coords, coords, kernel_offsets(kernel_size))
        # The forward tile computes with weights (C_in, C_out); under `transpose` the roles of the two swap.
        wgrad_accumulator = "fp64" if dtype == torch.float64 else "fp32"
        fwd, dgrad = (
            select_tile(op, dtype, self.accumulator, *channels, groups, self.device).name
            for op in ("fwd", "dgrad")
        )
        self.tile, self.dgrad_tile = (dgrad, fwd) if transpose else (fwd, dgrad)
        self.wgrad_tile = select_tile("wgrad", dtype, wgrad_accumulator, *channels, groups, self.device).name

    @property
    def maps(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """`map` and `map_t` of the call: its own direction first."""
        if self.map.symmetric:
            return self.map.tensors, []
        both = self.map.tensors, self.map.transposed().tensors
        return both[::-1] if self.transpose else both

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, grad: bool = False) -> torch.Tensor:
        values = torch.randn(shape, dtype=torch.float64).to(dtype or self.dtype)
        return values.to(self.device).requires_grad_(grad)

    def x(self, **kwargs: Any) -> torch.Tensor:
        return self.tensor(self.n, self.c_out if self.transpose else self.c_in, **kwargs)

    def weight(self, **kwargs: Any) -> torch.Tensor:
        g = self.groups
        grouped = (self.volume, g, self.c_in // g, self.c_out // g)
        return self.tensor(*(grouped if g > 1 else (self.volume, self.c_in, self.c_out)), **kwargs)

    def bias(self, **kwargs: Any) -> torch.Tensor:
        return self.tensor(self.c_in if self.transpose else self.c_out, **kwargs)

    def args(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **over: Any
    ) -> tuple:
        own, opposite = self.maps
        named = {
            "x": x,
            "weight": weight,
            "bias": bias,
            "map": own,
            "map_t": opposite,
            "n_out": self.n,
            "symmetric": self.map.symmetric,
            "transpose": self.transpose,
            "accumulator": self.accumulator,
            "tile": self.tile,
            "dgrad_tile": self.dgrad_tile,
            "wgrad_tile": self.wgrad_tile,
            "out_dtype": None,
        }
        assert over.keys() <= named.keys()
        return tuple((named | over).values())

    def conv(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, **over: Any
    ) -> torch.Tensor:
        return conv_op(*self.args(x, weight, bias, **over))

    def wgrad_args(self, x: torch.Tensor, dy: torch.Tensor, **over: Any) -> tuple:
        own = self.map.tensors, ([] if self.map.symmetric else self.map.transposed().tensors)
        named = {
            "x": x,
            "dy": dy,
            "map": own[0],
            "map_t": own[1],
            "kernel_volume": self.volume,
            "groups": self.groups,
            "symmetric": self.map.symmetric,
            "accumulator": self.accumulator,
            "tile": self.wgrad_tile,
            "dgrad_tile": self.dgrad_tile,
            "out_dtype": None,
        }
        assert over.keys() <= named.keys()
        return tuple((named | over).values())

    def expected(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """fp64 result on operands rounded to x's dtype, and sum |a||b| + |bias|, one pair at a time."""
        sides = []
        for magnitude in (False, True):
            a, w, b = (
                None if t is None else t.detach().cpu().to(d).double()
                for t, d in ((x, x.dtype), (weight, x.dtype), (bias, torch.float64))
            )
            assert a is not None and w is not None
            if magnitude:
                a, w, b = a.abs(), w.abs(), None if b is None else b.abs()
            w = w.view(self.volume, self.groups, self.c_in // self.groups, self.c_out // self.groups)
            if self.transpose:
                w = w.transpose(2, 3)
            y = torch.zeros(self.n, self.groups * w.shape[3], dtype=torch.float64)
            for k, (rows_in, rows_out) in enumerate(self.pairs):
                src, dst = (rows_out, rows_in) if self.transpose else (rows_in, rows_out)
                for i, o in zip(src.tolist(), dst.tolist(), strict=True):
                    for g in range(self.groups):
                        ci, co = w.shape[2], w.shape[3]
                        y[o, g * co : (g + 1) * co] += a[i, g * ci : (g + 1) * ci] @ w[k, g]
            sides.append(y if b is None else y + b)
        return sides[0], sides[1]


def assert_within(y: torch.Tensor, reference: tuple[torch.Tensor, torch.Tensor], tolerance: float) -> None:
    y64, abs64 = reference
    assert torch.isfinite(y).all()
    error = (y.detach().cpu().double() - y64).abs()
    assert (error <= tolerance * abs64).all(), f"max eta {(error / abs64.clamp_min(1e-300)).max():.2e}"


SHAPES = list(itertools.product(((3, 3, 3), (2, 1, 3)), (1, 2, 4), (False, True)))
shapes = pytest.mark.parametrize(("kernel_size", "groups", "transpose"), SHAPES)


# ---- values ------------------------------------------------------------------------------------------------


@shapes
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_values(device, kernel_size, groups, transpose, dtype):
    case = Case(device, kernel_size, groups, (4, 4) if groups == 4 else (4, 6), transpose, dtype)
    x, weight, bias = case.x(), case.weight(), case.bias()
    y = case.conv(x, weight, bias)
    assert y.dtype == dtype and y.is_contiguous()
    assert_within(y, case.expected(x, weight, bias), TOLERANCE[dtype])
    if dtype in (torch.float16, torch.bfloat16):
        y32 = case.conv(x, weight, bias, out_dtype=torch.float32)
        assert y32.dtype == torch.float32
        assert_within(y32, case.expected(x, weight, bias), TOLERANCE[torch.float32] * 4)


@pytest.mark.parametrize("channels", [(1, 1), (3, 5), (7, 16), (18, 33)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_any_channel_count_and_strided_rows(device, channels, dtype):
    case = Case(device, channels=channels, dtype=dtype)
    wide = torch.full((case.n, channels[0] + 3), float("nan"), dtype=dtype, device=case.device)
    wide[:, 1 : 1 + channels[0]] = case.x()
    x = wide[:, 1 : 1 + channels[0]]  # neither aligned nor contiguous, between NaNs
    weight = case.weight()
    y = case.conv(x, weight)
    assert_within(y, case.expected(x, weight), TOLERANCE[dtype])
    assert torch.equal(case.conv(x.t().contiguous().t(), weight), y)
    by_column = case.conv(x, weight.transpose(1, 2).contiguous().transpose(1, 2))
    assert_within(by_column, case.expected(x, weight), TOLERANCE[dtype])
    assert device.type == "cpu" or torch.equal(by_column, y)  # BLAS adds up in the order that suits it


def test_weight_of_another_dtype_is_rounded_to_x_first(device):
    case = Case(device, dtype=torch.float16)
    x, weight = case.x(), case.weight(dtype=torch.float32, grad=True)
    y = case.conv(x, weight)
    assert torch.equal(y, case.conv(x, weight.half()))
    y.float().square().sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    # Accumulated and kept in fp32: not every value is one of fp16.
    assert not torch.equal(weight.grad, weight.grad.half().float())


def test_n_zero_and_empty_maps(device):
    for n_in, n_out in ((0, 0), (3, 2)):
        far = torch.tensor([[0, 50, 50, 50], [0, 90, 90, 90]], dtype=torch.int32)[:n_out].to(device)
        near = random_coords(3, 5)[:n_in].to(device)
        target = CoordSet(far, 1)
        table = kernel_map(CoordSet(near, 1), 3, out_coords=target)  # no output has a neighbour
        case = Case(device, dtype=torch.float32)
        x = torch.randn(n_in, 4, device=device, requires_grad=True)
        weight, bias = case.weight(grad=True), case.bias(grad=True)
        over = {"map": table.tensors, "map_t": table.transposed().tensors, "n_out": n_out, "symmetric": False}
        y = case.conv(x, weight, bias, **over)
        assert_close(y, bias.detach().expand(n_out, 6))
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape and not x.grad.any()
        assert weight.grad is not None and weight.grad.shape == weight.shape and not weight.grad.any()
        assert_close(bias.grad, torch.full_like(bias, n_out))


def test_repeats_bitwise(device):
    case = Case(device, dtype=torch.float16, channels=(32, 32), n=200)
    x, weight = case.x(grad=True), case.weight(grad=True)
    runs = []
    for _ in range(3):
        y = case.conv(x, weight)
        runs.append((y, *torch.autograd.grad(y.float().square().sum(), (x, weight))))
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


# ---- accumulators ------------------------------------------------------------------------------------------


def test_fp16_accumulator_is_emulated_once_per_offset():
    case = Case(dtype=torch.float16, channels=(64, 8), accumulator="fp16", n=150)
    x, weight = case.x(), case.weight()
    y = torch.zeros(case.n, 8)
    for k, (rows_in, rows_out) in enumerate(case.pairs):
        y[rows_out] = (y[rows_out] + x[rows_in].float() @ weight[k].float()).half().float()
    assert torch.equal(case.conv(x, weight), y.half())
    fp32 = case.conv(x, weight, accumulator="fp32", out_dtype=torch.float32)
    y64, abs64 = case.expected(x, weight)
    fp16_error = (case.conv(x, weight).double() - y64).abs().div(abs64).max()
    assert fp16_error > 2 * (fp32.double() - y64).abs().div(abs64).max()


def test_fp16_accumulator_overflows_as_fp16_does():
    case = Case(dtype=torch.float16, channels=(1, 1), accumulator="fp16", kernel_size=(2, 1, 1), n=100)
    x, weight = torch.full((100, 1), 300.0).half(), torch.full((2, 1, 1), 300.0).half()
    assert torch.isinf(case.conv(x, weight)).any()
    assert torch.isfinite(case.conv(x, weight, accumulator="fp32", out_dtype=torch.float32)).all()


def test_wgrad_ignores_the_accumulator_flag(device):
    case = Case(device, dtype=torch.float16, channels=(32, 32), n=200)
    x, dy = case.x(), case.tensor(case.n, 32)
    plain = wgrad_op(*case.wgrad_args(x, dy, out_dtype=torch.float32))
    flagged = wgrad_op(*case.wgrad_args(x, dy, out_dtype=torch.float32, accumulator="fp16"))
    assert torch.equal(plain, flagged)
    expected, magnitude = torch.zeros(case.volume, 32, 32).double(), torch.zeros(case.volume, 32, 32).double()
    for k, (rows_in, rows_out) in enumerate(case.pairs):
        a, b = x.cpu().double()[rows_in].t(), dy.cpu().double()[rows_out]
        expected[k], magnitude[k] = a @ b, a.abs() @ b.abs()
    assert_within(plain, (expected, magnitude), 4 * TOLERANCE[torch.float32])


# ---- gradients ---------------------------------------------------------------------------------------------


@shapes
def test_gradcheck(device, kernel_size, groups, transpose):
    channels = (4, 4) if groups == 4 else (2, 4)
    case = Case(device, kernel_size, groups, channels, transpose, n=8)
    inputs = case.x(grad=True), case.weight(grad=True), case.bias(grad=True)
    assert torch.autograd.gradcheck(case.conv, inputs)
    assert torch.autograd.gradgradcheck(case.conv, inputs, fast_mode=True)


def test_weights_stored_by_output_channel(device):
    """PreparedConv takes (C_out, *kernel_size, C_in) as it is, and its gradient is of that shape."""
    for kernel_size in ((3, 3, 3), (2, 1, 3)):
        case = Case(device, kernel_size, channels=(3, 4), n=8)
        operands = case.args(case.x(), case.weight())[3:]
        prepared, plain = _C.PreparedConv(*operands, stored=True), _C.PreparedConv(*operands)
        stored = case.tensor(4, *kernel_size, 3, grad=True)
        x, bias = case.x(grad=True), case.bias(grad=True)

        def viewed(x, weight, bias):
            return plain(x, weight.flatten(1, -2).permute(1, 2, 0), bias)  # noqa: B023

        for make in (torch.clone, lambda w: w.transpose(0, -1).clone().transpose(0, -1)):
            weight = make(stored.detach()).requires_grad_()
            y, expected = prepared(x, weight, bias), viewed(x, weight, bias)
            torch.testing.assert_close(y, expected)
            dy = torch.randn_like(y)
            got = torch.autograd.grad(y, (x, weight, bias), dy)
            assert all(map(torch.equal, got, torch.autograd.grad(expected, (x, weight, bias), dy)))
            with torch.no_grad():
                assert torch.equal(prepared(x, weight, bias), y)
                torch.testing.assert_close(
                    prepared.fused(x, weight, bias, None, None, None, None, 0.0, None, "relu", 0.0), y.relu()
                )
        assert torch.autograd.gradcheck(prepared, (x, stored, bias))
        assert torch.autograd.gradgradcheck(prepared, (x, stored, bias))
        for none in ((0, *kernel_size, 3), (4, *kernel_size, 0), (4,)):
            with pytest.raises(RuntimeError, match="weight must be"):
                prepared(x, case.tensor(*none), bias)


@pytest.mark.parametrize(
    ("kernel_size", "groups"), [((3, 3, 3), 1), ((3, 3, 3), 2), ((2, 1, 3), 1), ((2, 1, 3), 2)]
)
def test_gradcheck_of_wgrad(device, kernel_size, groups):
    case = Case(device, kernel_size, groups, (2, 4), n=8)
    inputs = case.tensor(8, 2, grad=True), case.tensor(8, 4, grad=True)
    assert torch.autograd.gradcheck(lambda x, dy: wgrad_op(*case.wgrad_args(x, dy)), inputs)
    run = lambda x, dy: wgrad_op(*case.wgrad_args(x, dy))  # noqa: E731
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_expanded_and_strided_gradients(device):
    case = Case(device, dtype=torch.float32)
    x, weight = case.x(grad=True), case.weight(grad=True)
    for make in (
        lambda y: torch.ones((), device=device).expand_as(y),
        lambda y: torch.randn(y.shape[::-1], device=device).t(),
        lambda y: torch.randn(y.shape[0], 2 * y.shape[1], device=device)[:, ::2],
    ):
        y = case.conv(x, weight)
        dy = make(y)
        got = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        assert all(map(torch.equal, got, torch.autograd.grad(y, (x, weight), dy.contiguous())))


class CountOps(TorchDispatchMode):
    """Names of the voxmma ops that reach the kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "voxmma":
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("needs", "ops"),
    [("x", ["conv"]), ("weight", ["conv_wgrad"]), ("bias", []), ("xw", ["conv", "conv_wgrad"])],
)
def test_only_needed_gradients_are_computed(needs, ops):
    case = Case(dtype=torch.float32)
    x, weight = case.x(grad=needs in ("x", "xw")), case.weight(grad=needs in ("weight", "xw"))
    y = case.conv(x, weight, case.bias(grad=needs == "bias"))
    with CountOps() as count:
        y.sum().backward()
    assert count.names == ops


def test_gradient_without_the_opposite_map_is_a_clear_error():
    case = Case(kernel_size=(2, 1, 3))
    y = case.conv(case.x(grad=True), case.weight(), map_t=[])
    with pytest.raises(RuntimeError, match="map_t is empty, but the gradient of x"):
        y.sum().backward()
    weight = case.weight(grad=True)  # needs this call's own direction only
    case.conv(case.x(), weight, map_t=[]).sum().backward()
    assert weight.grad is not None


def test_bias_gradient_accumulates_in_fp32(device):
    case = Case(device, dtype=torch.float16, channels=(1, 1), n=200, kernel_size=(1, 1, 1))
    bias = torch.zeros(1, dtype=torch.float16, device=device, requires_grad=True)
    y = case.conv(case.x(), case.weight(), bias)
    dy = torch.full_like(y, 0.25)
    dy[0] = 1024.0  # in fp16 each further 0.25 would be lost
    y.backward(dy)
    assert bias.grad is not None and bias.grad.item() == 1024.0 + 50.0


# ---- torch's own checks ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel_size", "groups", "transpose"), [((3, 3, 3), 1, False), ((2, 1, 3), 2, True)]
)
def test_opcheck(device, kernel_size, groups, transpose):
    case = Case(device, kernel_size, groups, (2, 4), transpose, torch.float32, n=20)
    for bias in (None, case.bias(grad=True)):
        opcheck(conv_op, case.args(case.x(grad=True), case.weight(grad=True), bias))
    opcheck(conv_op, case.args(case.x(), case.weight(), out_dtype=torch.float32))
    opcheck(wgrad_op, case.wgrad_args(case.tensor(20, 2, grad=True), case.tensor(20, 4, grad=True)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_has_no_graph_break(device, dynamic):
    case = Case(device, kernel_size=(2, 1, 3), dtype=torch.float32)

    def layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return case.conv(torch.relu(x), weight, bias, n_out=x.shape[0]).sin()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    inputs = case.x(grad=True), case.weight(grad=True), case.bias(grad=True)
    results = []
    for function in (layer, compiled):
        y = function(*inputs)
        results.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    assert_close(results[0], results[1])


def test_fake_shapes_match():
    from torch._subclasses.fake_tensor import FakeTensorMode

    for kernel_size, groups, transpose in SHAPES:
        case = Case("cpu", kernel_size, groups, (4, 8), transpose, torch.float16)
        x, weight, dy = case.x(), case.weight(), case.tensor(case.n, 8)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = case.conv(mode.from_tensor(x), mode.from_tensor(weight), out_dtype=torch.float32)
            fake_dw = wgrad_op(
                *case.wgrad_args(mode.from_tensor(case.tensor(case.n, 4)), mode.from_tensor(dy))
            )
        real = case.conv(x, weight, out_dtype=torch.float32)
        real_dw = wgrad_op(*case.wgrad_args(case.tensor(case.n, 4), dy))
        assert (fake.shape, fake.dtype, fake.stride()) == (real.shape, real.dtype, real.stride())
        assert (fake_dw.shape, fake_dw.dtype, fake_dw.stride()) == (
            real_dw.shape,
            real_dw.dtype,
            real_dw.stride(),
        )


# ---- autocast ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_autocast_decides_the_type_of_x(device, dtype, training):
    case = Case(device, dtype=dtype)
    x, weight, bias = (make(dtype=torch.float32, grad=training) for make in (case.x, case.weight, case.bias))
    with torch.autocast(device.type, dtype=dtype), torch.set_grad_enabled(training):
        y = case.conv(x, weight, bias)
    assert y.dtype == dtype
    assert torch.equal(y, case.conv(x.to(dtype), weight, bias))
    if training:
        y.float().square().sum().backward()
        assert all(t.grad is not None and t.grad.dtype == torch.float32 for t in (x, weight, bias))


def test_backward_inside_autocast_keeps_the_forward_type(device):
    case = Case(device, dtype=torch.float32)
    x, weight = case.x(grad=True), case.weight(grad=True)
    y = case.conv(x, weight)
    expected = torch.autograd.grad(y.sum(), (x, weight), retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        got = torch.autograd.grad(y.sum(), (x, weight))
    assert all(map(torch.equal, got, expected))


def test_autocast_leaves_float64_alone():
    case = Case()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert case.conv(case.x(), case.weight()).dtype == torch.float64


# ---- bad arguments -----------------------------------------------------------------------------------------

BAD: list[tuple[str, Callable[[Case], dict[str, Any]]]] = [
    ("x must have 2 dimensions", lambda c: {"x": c.x()[0]}),
    ("x has dtype Int", lambda c: {"x": c.x().int()}),
    ("weight must have 3 dimensions", lambda c: {"weight": c.weight()[0]}),
    ("weight has dtype Long", lambda c: {"weight": c.weight().long()}),
    ("weight is empty", lambda c: {"weight": c.weight()[:0]}),
    ("x has 4 channels, but weight", lambda c: {"weight": c.weight()[:, :3]}),
    ("x has 4 channels, but transposed weight", lambda c: {"transpose": True}),
    ("bias must have 1 dimensions", lambda c: {"bias": c.weight()}),
    ("bias has 4 entries for 6", lambda c: {"bias": c.bias()[:4]}),
    ("n_out is negative", lambda c: {"n_out": -1}),
    ("accumulator='fp16' needs float16", lambda c: {"accumulator": "fp16"}),
    ("accumulator='fp16' needs float16", lambda c: {"accumulator": "fp16", "x": c.x().bfloat16()}),
    ("accumulator='fp24' is unknown", lambda c: {"accumulator": "fp24"}),
    ("accumulator='fp32' with float64", lambda c: {"x": c.x().double()}),
    ("out_dtype=float16 with float32", lambda c: {"out_dtype": torch.float16}),
    ("tile='nonsense'", lambda c: {"tile": "nonsense"}),
    ("map must hold", lambda c: {"map": c.map.tensors[:2]}),
    (r"map\[1\]", lambda c: {"map": [t if i != 1 else t[:-1] for i, t in enumerate(c.map.tensors)]}),
    (r"map\[0\]", lambda c: {"map": [t.float() for t in c.map.tensors]}),
]


@pytest.mark.parametrize(("message", "change"), BAD, ids=[f"{i}-{m[:24]}" for i, (m, _) in enumerate(BAD)])
def test_bad_argument_is_named(device, message, change):
    case = Case(device, dtype=torch.float32)
    over = change(case)
    x, weight = over.pop("x", case.x()), over.pop("weight", case.weight())
    with pytest.raises(RuntimeError, match=message):
        case.conv(x, weight, **over)
    assert torch.isfinite(case.conv(case.x(), case.weight())).all()  # the context is as it was


def test_bad_argument_of_wgrad_is_named(device):
    case = Case(device, dtype=torch.float32)
    x, dy = case.tensor(case.n, 4), case.tensor(case.n, 6)
    for message, over in (
        ("dy has dtype float64 but x has float32", {"dy": dy.double()}),
        ("groups=4 must divide the channels", {"groups": 4}),
        ("kernel_volume must be positive", {"kernel_volume": 0}),
        ("map", {"kernel_volume": 5}),
        ("out_dtype=float16", {"out_dtype": torch.float16}),
    ):
        with pytest.raises(RuntimeError, match=message):
            wgrad_op(*case.wgrad_args(x, over.pop("dy", dy), **over))


@pytest.mark.skipif(_C.HAS_CUDA, reason="a build with CUDA kernels")
def test_cpu_only_build_says_what_is_missing():
    missing = "built without its CUDA kernels, because no nvcc was found"
    with pytest.raises(RuntimeError, match=missing):
        _C.index_coords(torch.zeros(1, 4, dtype=torch.int32), bounds=[])
    with pytest.raises(RuntimeError, match=missing):
        _C.StreamEvent.record(0)
    x, rows = torch.zeros(1, 4), torch.zeros(1).long()
    cuda = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    with pytest.raises(RuntimeError, match=missing):
        torch.ops.voxmma.segment_sum.default.redispatch(cuda, x, rows, rows)
    assert _C.kernel_configs() == [] and _C.CUDA_ARCHS == [] and _C.CUDA_VERSION == ""


def test_the_compiled_part_has_what_its_stub_says():
    """A CPU-only build names what it lacks a second time (csrc/torch/module.cpp)."""
    stub = ast.parse((Path(voxmma.__file__).parent / "_C.pyi").read_text())
    names = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert names == {name for name in dir(_C) if not name.startswith("__") and callable(getattr(_C, name))}


@pytest.mark.skipif(not _C.HAS_CUDA, reason="a CPU-only build")
def test_compiled_kernels_are_consistent():
    configs = _C.kernel_configs()
    names = [c["name"] for c in configs]
    assert len(set(names)) == len(names) and all(names)
    accumulators = {
        "fp16": {"fp32", "fp16", "fp16_promoted"},
        "bf16": {"fp32"},
        "fp32": {"fp32"},
        "fp64": {"fp64"},
    }
    for c in configs:
        wgrad = {"fp64"} if c["dtype"] == "fp64" else {"fp32"}
        assert c["accum"] in (accumulators[c["dtype"]] if c["op"] == "fprop" else wgrad), c
    if "9.0a" in _C.CUDA_ARCHS:
        assert {c["arch"] for c in configs} == {80, 90}
    for dtype in accumulators:  # every type has a forward and a weight gradient on the oldest architecture
        assert {c["op"] for c in configs if c["dtype"] == dtype and c["arch"] == 80} == {"fprop", "wgrad"}


# ---- CUDA only ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_operands_on_two_devices():
    case = Case("cuda", dtype=torch.float32)
    x, weight, bias = case.x(), case.weight(), case.bias()
    for message, args in (
        ("weight is on cpu but x is on cuda", (x, weight.cpu(), bias)),
        ("bias is on cpu but x is on cuda", (x, weight, bias.cpu())),
    ):
        with pytest.raises(RuntimeError, match=message):
            case.conv(*args)
    with pytest.raises(RuntimeError, match=r"map\[0\] \(order\) is on cpu but x is on cuda"):
        case.conv(x, weight, map=[t.cpu() for t in case.map.tensors])


@pytest.mark.gpu
def test_tile_must_fit_the_call():
    case = Case("cuda", dtype=torch.float16, channels=(64, 64))
    x, weight = case.x(), case.weight()
    with pytest.raises(RuntimeError, match="is wgrad for fp16"):
        case.conv(x, weight, tile=case.wgrad_tile)
    with pytest.raises(RuntimeError, match="accumulator was asked for"):
        case.conv(x, weight, accumulator="fp16")
    bf16 = Case("cuda", dtype=torch.bfloat16, channels=(64, 64))
    with pytest.raises(RuntimeError, match="for bf16 inputs"):
        case.conv(x, weight, tile=bf16.tile)


@pytest.mark.gpu
def test_runs_on_the_current_stream_and_in_a_graph():
    case = Case("cuda", dtype=torch.float16, channels=(20, 64), n=200)  # 20: padded by the binding
    x, weight, bias = case.x(), case.weight(), case.bias(dtype=torch.float32)
    expected = case.conv(x, weight, bias)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # on another stream the convolution would see zeros
        late.copy_(x)
        y = case.conv(late, weight, bias)
    stream.synchronize()
    assert torch.equal(y, expected)

    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = case.conv(static, weight, bias)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, expected)


@pytest.mark.multigpu
def test_second_device_without_set_device():
    first, second = Case("cuda:0", dtype=torch.float16), Case("cuda:1", dtype=torch.float16)
    x, weight = first.x(), first.weight()
    y = second.conv(x.to("cuda:1"), weight.to("cuda:1"))
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    assert torch.equal(y.to("cuda:0"), first.conv(x, weight))


def test_import_registers_the_ops():
    assert voxmma.ops.cpu is not None
    schema = str(conv_op.default._schema)
    assert schema.startswith(
        "voxmma::conv(Tensor x, Tensor weight, Tensor? bias, Tensor[] map, Tensor[] map_t"
    )
