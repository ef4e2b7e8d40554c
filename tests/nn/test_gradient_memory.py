"""What blocks of convolution, norm and activation keep for their gradients: not their results, which are made
again with the same bits. Without saved-tensor hooks; with them every node keeps its input itself."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from voxmma import Voxels
from voxmma import nn as vnn
from voxmma.dispatch.calls import call
from voxmma.dispatch.epilogue import Activation, Epilogue, Norm

from conftest import random_coords

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ACTIVATIONS = ("none", "relu", "leaky_relu", "silu", "gelu")
CHANNELS = 16

# ---- norm_act on the CPU, of torch's functions -------------------------------------------------------------

#: What it was given.
_ROWS: list[weakref.ref[Tensor]] = []


def _activate(kind: str, v: Tensor, slope: float) -> Tensor:
    if kind == "none":
        return v
    return F.leaky_relu(v, slope) if kind == "leaky_relu" else getattr(F, kind)(v)


def _derivative(kind: str, v: Tensor, slope: float) -> Tensor:
    if kind == "silu":
        return v.sigmoid() * (1 + v * (1 - v.sigmoid()))
    if kind == "gelu":
        return 0.5 * (1 + (v * 0.5**0.5).erf()) + v * (-0.5 * v * v).exp() * 0.39894228040143267794
    low = {"none": 1.0, "relu": 0.0, "leaky_relu": slope}[kind]
    return torch.where(v > 0, 1.0, low).to(v.dtype)


def _again(x: Tensor, stats: Tensor, residual: Tensor | None, kind: str, slope: float) -> Tensor:
    mean, _, factor, shift = stats
    v = (x.to(stats.dtype) - mean) * factor + shift
    return _activate(kind, v if residual is None else v + residual, slope).to(x.dtype)


def _forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    batches: Tensor | None,
    momentum: float,
    eps: float,
    residual: Tensor | None,
    kind: str,
    slope: float,
    keep: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    _ROWS.append(weakref.ref(x))
    v = x.to(torch.promote_types(x.dtype, torch.float32))
    invstd = (v.var(0, unbiased=False) + eps).rsqrt()
    factor = invstd if weight is None else invstd * weight
    stats = torch.stack([v.mean(0), invstd, factor, torch.zeros_like(invstd) if bias is None else bias])
    y = _again(x, stats, residual, kind, slope)
    keeps = keep and residual is not None and kind in ("relu", "leaky_relu")
    return y, stats, (y > 0).byte().flatten() if keeps else x.new_empty(0, dtype=torch.uint8)


def _backward(
    dy: Tensor,
    x: Tensor,
    stats: Tensor,
    residual: Tensor | None,
    passed: Tensor | None,
    kind: str,
    slope: float,
    residual_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, invstd, factor, shift = stats
    centred = x.to(stats.dtype) - mean
    v = centred * factor + shift if passed is None else passed.view(x.shape).to(stats.dtype)
    g = dy * _derivative(kind, v if residual is None else v + residual, slope)
    xhat, scaled = centred * invstd, g * (factor / invstd)
    dx = invstd * (g * (factor / invstd) - scaled.mean(0) - xhat * (scaled * xhat).mean(0))
    added = g.to(x.dtype) if residual_gradient else x.new_empty(0)
    return dx.to(x.dtype), (g * xhat).sum(0), g.sum(0), added


@pytest.fixture(scope="module", autouse=True)
def _norm_act_on_cpus() -> Iterator[None]:
    library = torch.library.Library("voxmma", "IMPL")
    library.impl("norm_act", _forward, "CPU")
    library.impl("norm_act_again", _again, "CPU")
    library.impl("norm_act_backward", _backward, "CPU")
    yield
    library._destroy()


# ---- networks of blocks ------------------------------------------------------------------------------------


class Block:
    """Convolution, norm in training, residual and activation: one node of the graph, on the CPU, too."""

    def __init__(self, like: Tensor, act: str = "relu") -> None:
        wide = torch.promote_types(like.dtype, torch.float32)
        self.conv = vnn.SparseConv3d(CHANNELS, CHANNELS, 3, bias=False).to(like.device, like.dtype)
        self.norm = vnn.BatchNorm(CHANNELS).to(like.device, wide)
        self.act = Activation(act, 0.2, act)
        self.results: list[weakref.ref[Tensor]] = []

    def __call__(self, x: Voxels, residual: Voxels | None = None) -> Voxels:
        n = self.norm
        numbers = n.running_mean, n.running_var, n.weight, n.bias, n.eps, "BatchNorm", n.momentum
        then = Epilogue(Norm(*numbers, n.num_batches_tracked), residual, self.act)
        y = call(self.conv.config, x, self.conv.weight, self.conv.bias, then=then)
        assert y._applied
        self.results.append(weakref.ref(y.feats))
        return y

    def parameters(self) -> list[Tensor]:
        return [self.conv.weight, self.norm.weight, self.norm.bias]


class Net:
    """Blocks in a row; every second with the input of the one before as residual. `head`: a convolution."""

    def __init__(self, like: Tensor, count: int, act: str = "relu", residual: bool = False) -> None:
        self.blocks = [Block(like, act) for _ in range(count)]
        self.head = vnn.SparseConv3d(CHANNELS, 4, 3).to(like.device, like.dtype)
        self.residual = residual

    def body(self, x: Voxels) -> Voxels:
        for i, block in enumerate(self.blocks):
            if i % 2 == 0 or not self.residual:
                before, x = x, block(x)
            else:
                x = block(x, before)
        return x

    def __call__(self, x: Voxels) -> Tensor:
        y: Tensor = self.head(self.body(x)).feats
        return y

    def parameters(self) -> list[Tensor]:
        return [*(p for block in self.blocks for p in block.parameters()), self.head.weight, self.head.bias]

    def alive(self) -> list[bool]:
        """Of the result of each block, whether somebody keeps it."""
        gc.collect()
        return [ref() is not None for block in self.blocks for ref in block.results[-1:]]


def voxels(device: torch.device, n: int = 60, dtype: torch.dtype = torch.float32) -> Voxels:
    coords = random_coords(n, 6 if n < 100 else 24).to(device)
    return Voxels(coords, torch.randn(len(coords), CHANNELS, device=device).to(dtype), 1)


def plain() -> saved_tensors_hooks:
    """Every node keeps its input."""
    return saved_tensors_hooks(lambda t: t, lambda t: t)


def gradients(f: Callable[[], Tensor], parameters: list[Tensor]) -> list[Tensor]:
    y = f()
    return [y.detach(), *torch.autograd.grad(y.square().sum(), parameters)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(u, v) for u, v in zip(a, b, strict=True))


def same_as_plain(f: Callable[[], Tensor], parameters: list[Tensor]) -> bool:
    """Whether `f` has the same bits and gradients as with everything kept."""
    with plain():
        expected = gradients(f, parameters)
    return equal(gradients(f, parameters), expected)


# ---- what is kept ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("residual", [False, True])
def test_same_bits_of_less(device: torch.device, dtype: torch.dtype, act: str, residual: bool) -> None:
    for n in (60, *((900, 9000) if device.type == "cuda" else ())):
        x = voxels(device, n, dtype)
        net = Net(x.feats, 6, act, residual)
        with plain():
            y = net(x)
        assert net.alive() == [True] * 6
        expected = [y.detach(), *torch.autograd.grad(y.square().sum(), net.parameters())]
        y = net(x)
        # Behind a residual a result is made again where that is kept anyway: as the input of the block
        # before, or by silu and gelu.
        keeps = {i for i in (1, 3) if residual and (act in ("silu", "gelu") or i == 3)}
        assert net.alive() == [i in keeps for i in range(6)]
        again = [y.detach(), *torch.autograd.grad(y.square().sum(), net.parameters())]
        assert equal(again, expected), n


def test_a_norm_before_a_convolution(device: torch.device) -> None:
    x = voxels(device).feats
    weight = torch.randn(CHANNELS, device=device).requires_grad_()
    block, given = Block(x), voxels(device)
    made: list[weakref.ref[Tensor]] = []

    def f() -> Tensor:
        y, _, _ = torch.ops.voxmma.norm_act(
            leaf, weight, None, None, None, None, 0.1, 1e-5, None, "relu", 0.0
        )
        made.append(weakref.ref(y))
        z: Tensor = block(given.with_feats(y)).feats
        return z

    leaf = given.feats.clone().requires_grad_()
    assert same_as_plain(f, [leaf, weight, *block.parameters()])
    y = f()
    gc.collect()
    assert made[-1]() is None
    with torch.no_grad():
        leaf.mul_(2)  # what the norm, and now the block, keeps
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y.sum(), block.conv.weight)


def test_rows_of_norms_are_let_go(device: torch.device) -> None:
    """When they have been used, and with the graph: nobody holds on to them, and no cycle of references."""
    if device.type == "cuda":
        pytest.skip("what a kernel was given is not seen: test_bytes_of_a_step")
    x = voxels(device)
    net = Net(x.feats, 3)
    gc.collect()
    gc.disable()
    try:
        for use in (True, False):
            _ROWS.clear()
            loss = net(x).square().sum()
            assert [ref() is not None for ref in _ROWS] == [True] * 3
            if use:
                loss.backward()  # and the graph stays
            else:
                del loss
            assert [ref() is not None for ref in _ROWS] == [False] * 3
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_pass_over_rows_by_itself(dtype: torch.dtype) -> None:
    """The bits of norm_act on rows of every number, width and alignment."""
    for n, channels in ((2, 8), (3, 5), (300, 16), (1024, 33), (5000, 24), (4100, 33), (700, 512)):
        wide = torch.randn(n, channels + 3, device="cuda").to(dtype)
        x, residual = wide[:, :channels], torch.randn(n, channels, device="cuda").to(dtype)
        weight, bias = torch.randn(2, channels, device="cuda").to(dtype)
        for act in ACTIVATIONS:
            for rows in (x, x.contiguous()):
                for added in (None, residual, wide[:, 3:]):
                    numbers = weight, bias, None, None, None, 0.1, 1e-5
                    y, stats, _ = torch.ops.voxmma.norm_act(rows, *numbers, added, act, 0.2)
                    again = torch.ops.voxmma.norm_act_again(rows, stats, added, act, 0.2)
                    assert torch.equal(y, again), (n, channels, act)
        with pytest.raises(RuntimeError, match="stats must be those of norm_act of x"):
            torch.ops.voxmma.norm_act_again(x, stats[:3], None, "relu", 0.0)


@pytest.mark.gpu
def test_bytes_of_a_step() -> None:
    x = voxels(torch.device("cuda", 0), 9000)
    net = Net(x.feats, 6)
    net(x)  # makes the maps
    size = x.feats.untyped_storage().nbytes()

    def held() -> int:
        gc.collect()
        return torch.cuda.memory_allocated()

    before = held()
    with plain():
        loss = net(x).sum()
    assert 12 * size <= held() - before < 13 * size
    del loss
    assert held() == before
    loss = net(x).sum()
    assert 6 * size <= held() - before < 7 * size
    torch.autograd.grad(loss, net.parameters())
    assert held() - before < size  # the graph is there, and has let go of everything
    del loss
    assert held() == before
    loss = net(x).sum()
    del loss
    assert held() == before


# ---- what stays as it was ----------------------------------------------------------------------------------


def test_second_gradients(device: torch.device) -> None:
    for act, residual in (("silu", False), ("silu", True), ("leaky_relu", False)):
        x = voxels(device, 12, torch.float64)
        net = Net(x.feats, 4, act, residual)

        twice = []
        for how in (plain(), contextlib.nullcontext()):
            with how:
                middle = net.blocks[0](x)
                y = net.head(net.blocks[1](middle)).feats
            first = torch.autograd.grad(y.square().sum(), net.blocks[1].conv.weight, create_graph=True)[0]
            ends = [middle.feats, net.blocks[0].conv.weight, net.blocks[1].conv.weight, net.head.weight]
            twice.append(list(torch.autograd.grad(first.square().sum(), ends)))
        assert equal(*twice)
        assert all(bool(t.any()) for t in twice[0])

        def f(feats: Tensor, *_: Tensor, net: Net = net, x: Voxels = x) -> Tensor:
            return net(x.with_feats(feats))

        given = x.feats.clone().requires_grad_()
        assert torch.autograd.gradcheck(f, (given, *net.parameters()), fast_mode=True)
        assert torch.autograd.gradgradcheck(f, (given, *net.parameters()), fast_mode=True)


def test_gradients_in_several_passes(device: torch.device) -> None:
    x = voxels(device)
    stem, left, right = (Block(x.feats) for _ in range(3))
    weights = [stem.conv.weight, left.conv.weight, right.conv.weight]

    def both() -> tuple[Tensor, Tensor]:
        y = stem(x)
        return left(y).feats.square().sum(), right(y).feats.sum()

    with plain():
        a, b = both()
        expected = [
            *torch.autograd.grad(a, weights[:2], retain_graph=True),
            *torch.autograd.grad(b, weights[::2]),
        ]
    a, b = both()
    for _ in range(2):
        first = torch.autograd.grad(a, weights[:2], retain_graph=True)
    assert equal([*first, *torch.autograd.grad(b, weights[::2])], expected)
    # The stem's node has let go of what it kept, which the other still has.
    a, b = both()
    torch.autograd.grad(a, weights[:2])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(b, weights[0], retain_graph=True)
    assert equal(list(torch.autograd.grad(b, weights[2])), expected[-1:])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(b, weights[2])


def test_results_that_are_written_to(device: torch.device) -> None:
    x = voxels(device)
    first, second = Block(x.feats), Block(x.feats)
    parameters = [*first.parameters(), *second.parameters()]

    def through(change: Callable[[Tensor], Tensor | None]) -> Callable[[], Tensor]:
        def f() -> Tensor:
            y = first(x)
            changed = change(y.feats)
            z: Tensor = second(y if changed is None else y.with_feats(changed)).feats
            return z

        return f

    def untracked(t: Tensor) -> None:
        with torch.no_grad():
            t.mul_(2)

    def detached(t: Tensor) -> None:
        t.detach()[3:9] = 1

    def replaced(t: Tensor) -> None:
        t.data = t.data + 1

    def shortened(t: Tensor) -> None:
        t.data = t.data.flip(1)

    def hooked(t: Tensor) -> None:
        t.register_hook(lambda g: 2 * g)
        t.retain_grad()

    for change in (
        untracked,
        detached,
        replaced,
        shortened,
        hooked,
        lambda t: t.mul_(2),
        lambda t: t.relu_(),
        lambda t: t.view(-1).view_as(t),
        lambda t: t * 1,
        lambda t: t.double().to(t.dtype),
        lambda t: t.unbind(0) and None,
    ):
        assert same_as_plain(through(change), parameters)
    cut = through(lambda t: t.detach())
    assert same_as_plain(cut, second.parameters())
    # Written to later: the gradient is still that of what the block was given.
    expected = gradients(through(lambda t: None), parameters)
    for later in (untracked, detached, replaced, lambda t: t.mul_(2)):
        y = first(x)
        z = second(y).feats
        later(y.feats)
        assert equal([z.detach(), *torch.autograd.grad(z.square().sum(), parameters)], expected)


def test_numbers_of_a_norm_are_not_to_change(device: torch.device) -> None:
    """Between forward and backward; what a later layer needs is there nonetheless."""
    x = voxels(device)
    net = Net(x.feats, 2)
    expected = gradients(lambda: net(x), [net.head.weight, net.blocks[1].conv.weight])
    y = net(x)
    with torch.no_grad():
        net.blocks[0].norm.weight.mul_(2)
    loss = y.square().sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, net.blocks[0].conv.weight, retain_graph=True)
    found = torch.autograd.grad(loss, [net.head.weight, net.blocks[1].conv.weight])
    assert equal([y.detach(), *found], expected)


def test_who_packs_what_is_kept_sees_inputs(device: torch.device) -> None:
    x = voxels(device)
    net = Net(x.feats, 3)
    expected = gradients(lambda: net(x), net.parameters())
    rows = len(x.feats)

    def count(run: Callable[[], Any]) -> int:
        seen: list[Tensor] = []
        with saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
            run()
        return sum(t.shape == (rows, CHANNELS) for t in seen)

    assert count(lambda: net(x)) == 3 + 4  # of the blocks, and inputs
    y = net.body(x)
    assert count(lambda: net.head(y)) == 1
    with torch.autograd.graph.save_on_cpu():
        assert equal(gradients(lambda: net(x), net.parameters()), expected)
    for reentrant in (False, True):
        start = x.feats.clone().requires_grad_()

        def f(start: Tensor = start, reentrant: bool = reentrant) -> Tensor:
            body = checkpoint(lambda t: net.body(x.with_feats(t)).feats, start, use_reentrant=reentrant)
            z: Tensor = net.head(x.with_feats(body)).feats
            return z

        y = f()
        for p in net.parameters():
            p.grad = None
        y.square().sum().backward()
        assert equal([y.detach(), *(p.grad for p in net.parameters() if p.grad is not None)], expected)


def test_frozen_weights_and_modes(device: torch.device) -> None:
    x = voxels(device)
    net = Net(x.feats, 2)
    free = [p for p in net.parameters() if p is not net.blocks[1].conv.weight and p is not net.head.weight]
    net.blocks[1].conv.weight.requires_grad_(False)
    net.head.weight.requires_grad_(False)
    assert same_as_plain(lambda: net(x), free)
    net(x)
    assert net.alive() == [False] * 2
    y = net.body(x)
    with torch.inference_mode():
        z = net.head(y).feats
    with torch.no_grad():
        assert torch.equal(net.head(y).feats, z)
    with torch.autocast(device.type, torch.bfloat16):
        assert same_as_plain(lambda: net(x), free)
    wide = Voxels(x.coords, x.feats.double(), 1)
    double = Net(wide.feats, 1)
    cast = lambda: double.head(wide.with_feats(net.body(x).feats.double())).feats  # noqa: E731
    assert same_as_plain(cast, [*free[:3], double.head.bias])


def test_threads_share_a_graph(device: torch.device) -> None:
    x = voxels(device, 300)
    stem, branches = Block(x.feats), [Block(x.feats) for _ in range(4)]

    def losses() -> list[Tensor]:
        y = stem(x)
        return [branch(y).feats.square().sum() for branch in branches]

    def of(loss: Tensor, branch: Block) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [stem.conv.weight, branch.conv.weight], retain_graph=True))

    with plain():
        expected = [of(loss, branch) for loss, branch in zip(losses(), branches, strict=True)]
    for _ in range(3):
        made = losses()
        found: dict[int, list[Tensor]] = {}

        def work(i: int, made: list[Tensor] = made, found: dict[int, list[Tensor]] = found) -> None:
            found[i] = of(made[i], branches[i])

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(equal(found[i], expected[i]) for i in range(4))


@pytest.mark.gpu
def test_another_stream_keeps_its_input() -> None:
    """Memory is reused in the order of the stream it was made on."""
    x = voxels(torch.device("cuda", 0))
    net = Net(x.feats, 2)
    expected = gradients(lambda: net(x), net.parameters())
    side = torch.cuda.Stream()

    def f() -> Tensor:
        y = net.body(x)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z: Tensor = net.head(y).feats
        torch.cuda.current_stream().wait_stream(side)
        return z

    assert equal(gradients(f, net.parameters()), expected)
    z = f()
    assert net.alive() == [False, True] and z.requires_grad
