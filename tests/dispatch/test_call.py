"""A call that is like an earlier one takes its decision over; whatever can change the decision is seen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import voxmma
from voxmma import torchflags
from voxmma.dispatch import calls, measurements, settings, validation
from voxmma.nn.functional import spatially_sparse_conv

import conftest

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls that were not repeats of another one on the same coordinates, in order."""
    return counted(monkeypatch, "_prepare")


def counted(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """One entry for each call of a function of `calls` from now on."""
    seen: list[str] = []
    function = getattr(calls, name)

    def run(*arguments: Any) -> Any:
        seen.append("decided")
        return function(*arguments)

    monkeypatch.setattr(calls, name, run)
    return seen


def voxels(device: torch.device, dtype: torch.dtype = FP16) -> voxmma.Voxels:
    coords = conftest.random_coords(200, 8)
    return voxmma.Voxels(coords.to(device), torch.randn(len(coords), 16, device=device).to(dtype))


def test_a_repeated_call_is_not_decided_again_and_says_the_same(
    device: torch.device, decisions: list[str]
) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    first, again = layer(x), layer(x.with_feats(x.feats.clone()))
    assert len(decisions) == 1
    assert torch.equal(first.feats, again.feats) and again.coord_set is x.coord_set
    assert again._record == first._record and again.stride == first.stride
    with voxmma.audit() as log:
        layer(x)
    assert len(decisions) == 1 and len(log) == 1


def test_gradients_of_a_repeated_call_are_those_of_the_first(device: torch.device) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    grads = []
    for _ in range(2):
        feats = x.feats.clone().requires_grad_()
        layer.zero_grad()
        layer(x.with_feats(feats)).feats.float().square().sum().backward()
        assert layer.weight.grad is not None and layer.bias is not None and layer.bias.grad is not None
        grads.append((feats.grad, layer.weight.grad.clone(), layer.bias.grad.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_everything_that_decides_is_seen(device: torch.device, decisions: list[str]) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)

    def decides(run: Any = lambda: layer(x)) -> str:
        before = len(decisions)
        record = run()._record
        assert len(decisions) == before + 1, "an earlier decision was taken over"
        assert run()._record == record and len(decisions) == before + 1, "decided twice"
        return str(record.decided_by)

    assert decides() == "default"
    with settings.override(fp16_accum=False):
        assert decides() == "runtime"
    with torch.inference_mode():
        assert decides() == "inference_mode"
    layer.use_fp16_accum = True
    assert decides() == "module"
    layer.use_fp16_accum, layer.accumulator = None, "fp16_promoted:32"
    assert decides() == "module"
    layer.accumulator, layer.compute_dtype = None, BF16
    assert decides() == "default"
    layer.compute_dtype, layer.out_dtype = None, FP32
    assert layer(x).feats.dtype == FP32
    layer.out_dtype = None
    with torch.autocast(device.type, BF16):
        assert decides() == "default" and layer(x).feats.dtype == BF16
    y = x.with_feats(x.feats.bfloat16())
    assert decides(lambda: layer(y)) == "default" and layer(y).feats.dtype == BF16
    layer.half()
    decides()
    other = voxels(device)
    assert decides(lambda: layer(other)) == "default"


def test_new_coordinates_take_the_decision_over(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_decided", {})
    seen = counted(monkeypatch, "_decide")
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    first = layer(voxels(device))
    again = layer(voxels(device))
    assert len(seen) == 1 and again._record == first._record and again.coord_set is not first.coord_set
    with settings.override(fp16_accum=True):
        assert layer(voxels(device))._record.decided_by == "runtime" and len(seen) == 2
    assert layer(voxels(device))._record == first._record and len(seen) == 3
    layer(voxels(device))
    assert len(seen) == 3
    measurements.reload()
    layer(voxels(device))
    assert len(seen) == 4
    for wrong in (
        voxels(device, FP32),
        voxmma.Voxels(first.coords, torch.zeros(200, 8, device=device).half()),
    ):
        for _ in range(2):
            with pytest.raises(ValueError, match="channels" if wrong.channels == 8 else "not as wide"):
                layer.half()(wrong)
    assert len(seen) == 4


def test_a_freed_map_is_built_again(device: torch.device, decisions: list[str]) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    first = layer(x)
    layer.kernel_map(x).free()
    assert torch.equal(layer(x).feats, first.feats) and len(decisions) == 2


def test_new_records_of_the_gate_and_of_the_tuner_are_seen(
    device: torch.device, decisions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    layer(x)
    measurements.reload()
    layer(x)
    layer(x)
    assert len(decisions) == 2
    layer.use_fp16_accum = True
    layer(x)
    assert len(decisions) == 3
    monkeypatch.setattr(validation, "stamp", lambda recent=False: "changed")
    layer(x)
    layer(x)
    assert len(decisions) == (4 if device.type == "cuda" else 3)  # the gate does not count on a CPU


def test_float32_calls_follow_torchs_switches(device: torch.device, decisions: list[str]) -> None:
    x = voxels(device, FP32)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    with torchflags.preserved():
        torchflags.set_tf32(False)
        ieee = voxmma.explain(layer(x)).tile
        layer(x)
        assert len(decisions) == 1
        torchflags.set_tf32(True)
        assert voxmma.explain(layer(x)).tile != ieee
        layer(x)
        assert len(decisions) == 2
        torchflags.set_tf32(False)
        assert voxmma.explain(layer(x)).tile == ieee
        voxmma.set_fp32_precision("ieee")
        layer(x)
        decided = len(decisions)
        torchflags.set_tf32(True)  # which the setting goes before
        assert voxmma.explain(layer(x)).tile == ieee and len(decisions) == decided


KINDS: dict[str, Callable[[torch.device], torch.nn.Module]] = {
    "even": lambda d: voxmma.nn.SparseConv3d(16, 24, 2, device=d),
    "mixed": lambda d: voxmma.nn.SparseConv3d(16, 24, (3, 1, 2), device=d),
    "strided": lambda d: voxmma.nn.SparseConv3d(16, 24, 2, 2, device=d),
    "overlapping": lambda d: voxmma.nn.SparseConv3d(16, 24, 3, 2, device=d),
    "generative": lambda d: voxmma.nn.SparseConv3d(16, 24, 3, generative=True, device=d),
    "transposed": lambda d: voxmma.nn.SparseConvTranspose3d(16, 24, 2, 2, device=d),
    "upwards": lambda d: voxmma.nn.SparseConvTranspose3d(16, 24, 3, 2, generative=True, device=d),
}


@pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_map_keeps_its_decision(
    device: torch.device, decisions: list[str], kind: str, dtype: torch.dtype
) -> None:
    """First and repeated calls, without and with gradients, give the same bits on the same sets."""
    x = (
        voxmma.nn.SparseConv3d(16, 16, 2, 2, device=device)(voxels(device, dtype))
        if kind == "transposed"
        else None
    )
    x = voxels(device, dtype) if x is None else x.detach()
    layer = KINDS[kind](device)
    decisions.clear()
    with torch.no_grad():
        first, again = layer(x), layer(x)
    assert len(decisions) == 1 and again.coord_set is first.coord_set and again.stride == first.stride
    assert torch.equal(first.feats, again.feats) and again._record == first._record
    grads = []
    for _ in range(2):
        feats = x.feats.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x.with_feats(feats))
        y.feats.float().square().sum().backward()
        assert torch.equal(y.feats, first.feats) and y.coord_set is first.coord_set
        grads.append((feats.grad, *(p.grad for p in layer.parameters())))
    assert len(decisions) == 2  # the map of the input gradient had not been asked for
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    with torch.no_grad():
        layer(x)
        other = voxmma.Voxels(x.coord_set, x.feats, stride=6)
        assert layer(other).stride != first.stride or x.stride == (6, 6, 6)
    assert decisions[2:] in ([], ["decided"])


def test_outputs_that_are_given_keep_their_decision(device: torch.device, decisions: list[str]) -> None:
    x = voxels(device)
    down = voxmma.nn.SparseConv3d(16, 24, 2, 2, device=device)
    up = voxmma.nn.SparseConvTranspose3d(24, 16, 2, 2, device=device)
    with torch.no_grad():
        y = down(x)
        inverse = down.kernel_map(x).transposed()
        targets: list[Any] = [y, y.coord_set]
        for run in (
            *(lambda t=t: down(x, coords=t) for t in targets),
            lambda: up(y, inverse),
            lambda: up(y, coords=x),
        ):
            decisions.clear()
            first, again = run(), run()
            assert len(decisions) == 1 and torch.equal(first.feats, again.feats)
            assert again.coord_set is first.coord_set and again.stride == first.stride
        decisions.clear()
        up(y.with_feats(y.feats), down.kernel_map(x).transposed())  # the same map by another object
        assert not decisions
        inverse.free()
        assert not [c for c in (*x.coord_set.calls.values(), *y.coord_set.calls.values()) if c.core.freed]
        with pytest.raises(RuntimeError, match="was freed"):
            up(y, inverse)


def test_a_repeated_call_goes_where_the_first_would(device: torch.device) -> None:
    """Sets that died, were written to, or were linked anew since."""
    x = voxels(device)
    down = voxmma.nn.SparseConv3d(16, 24, 2, 2, device=device)
    up = voxmma.nn.SparseConvTranspose3d(24, 16, 2, 2, device=device)
    with torch.no_grad():
        y, lone = (
            down(x),
            voxmma.Voxels(voxels(device).coords.clone(), torch.zeros(200, 24, device=device).half()),
        )
        assert up(y).coord_set is up(y).coord_set is x.coord_set
        first = up(lone)
        assert up(lone).coord_set is first.coord_set and first.coord_set is not x.coord_set
        fine = voxmma.Voxels(
            first.coord_set.coords.clone(), torch.zeros(len(first), 16, device=device).half()
        )
        down(fine, coords=lone)  # from now on lone knows a finer set
        assert up(lone).coord_set is fine.coord_set
        assert up(lone).coord_set is fine.coord_set
        other = voxels(device)
        down(other, coords=lone)
        with pytest.raises(ValueError, match="which voxels to go back to"):
            up(lone)
        calls = len(lone.coord_set.calls)
        del fine, first
        assert len(lone.coord_set.calls) < calls
        good = y.coords.clone()
        y.coords.add_(1)
        assert torch.equal(down(x).coords, good) and torch.equal(down(x).coords, good)
        x.coords.add_(1)
        with pytest.raises(RuntimeError, match="written to"):
            down(x)


def test_fault_60_a_narrower_layer_refuses_its_input(device: torch.device) -> None:
    x = voxels(device, FP32)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device).half()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"features of x are fp32, weight is fp16.*convert"):
            layer(x)
    with pytest.raises(ValueError, match="features of x are bf16, weight is fp16"):
        layer(x.bfloat16())
    with torch.autocast(device.type, FP16):
        assert layer(x).dtype == FP16
    layer.compute_dtype = FP16
    assert layer(x).dtype == FP16
    layer.compute_dtype = None
    layer.weight.data = layer.weight.data.float()
    with pytest.raises(ValueError, match="features of x are fp32, bias is fp16"):
        layer(x)


def test_wrong_arguments_are_still_named(device: torch.device) -> None:
    x = voxels(device)
    weight = torch.randn(27, 16, 8, device=device)
    spatially_sparse_conv(x, weight, 3)
    with pytest.raises(TypeError, match="weight must be a tensor"):
        spatially_sparse_conv(x, [1.0], 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"x must be a voxmma\.Voxels"):
        spatially_sparse_conv(x.feats, weight, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="bias must be"):
        spatially_sparse_conv(x, weight, 3, torch.zeros(7, device=device))
    with pytest.raises(ValueError, match="weight has 27 offsets"):
        spatially_sparse_conv(x, weight, 5)


def test_a_freed_map_leaves_memory(device: torch.device) -> None:
    import weakref

    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    with torch.no_grad():
        layer(x)
    mapping = layer.kernel_map(x)
    storage = weakref.ref(mapping.tensors[0])
    other = voxmma.nn.SparseConv3d(16, 24, 5, device=device)
    with torch.no_grad():
        other(x)
    mapping.free()
    assert storage() is None and len(x.coord_set.calls) == 1


def test_repeated_calls_say_what_is_wrong_as_the_first_does(device: torch.device) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    layer(x)
    with pytest.raises(ValueError, match="x has 8 channels"):
        layer(x.with_feats(x.feats[:, :8]))
    layer.bias = torch.nn.Parameter(torch.zeros(24, 1, device=device))
    with pytest.raises(ValueError, match="bias must be"):
        layer(x)
    layer.bias = None
    assert torch.isfinite(layer(x).feats).all()
    layer.weight.data = layer.weight.data[1:]
    with pytest.raises(ValueError, match="weight has 26 offsets"):
        layer(x)


class _Functions(torch.overrides.TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class _Dispatched(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func), args))
        return func(*args, **(kwargs or {}))


class _Subclass(torch.Tensor):
    seen: ClassVar[list[str]] = []

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


def test_modes_and_subclasses_see_the_op_of_a_repeated_call(
    device: torch.device, decisions: list[str]
) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    first = layer(x)
    with _Functions() as functions:
        assert torch.equal(layer(x).feats, first.feats)
    assert functions.seen.count("voxmma.conv") == 1
    with _Dispatched() as dispatched:
        layer(x)
    conv = [args for name, args in dispatched.seen if name == "voxmma.conv.default"]
    assert len(conv) == 1 and conv[0][3:] == (
        layer.kernel_map(x).tensors, [], len(x.coords), True, False, "fp32", *_tiles(first),
    )  # fmt: skip
    marked = x.with_feats(x.feats.as_subclass(_Subclass))
    _Subclass.seen.clear()
    assert isinstance(layer(marked).feats, _Subclass) and "voxmma.conv" in _Subclass.seen
    assert len(decisions) == 1


def _tiles(y: voxmma.Voxels) -> tuple[str, str, str]:
    record = voxmma.explain(y)
    return record.tile, record.dgrad_tile, record.wgrad_tile


@pytest.mark.parametrize("enabled", [True, False])
def test_autocast_decides_once(device: torch.device, decisions: list[str], enabled: bool) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device, compute_dtype=FP16)
    with torch.autocast(device.type, BF16, enabled=enabled):
        for _ in range(2):
            with _Dispatched() as dispatched:
                y = layer(x)
            assert y.feats.dtype == FP16 and torch.is_autocast_enabled(device.type) == enabled
            (args,) = [args for name, args in dispatched.seen if name == "voxmma.conv.default"]
            assert args[0].dtype == FP16
    assert len(decisions) == 1


def test_repeated_calls_make_normal_and_inference_tensors(device: torch.device) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    for _ in range(2):
        with torch.inference_mode():
            assert layer(x).feats.is_inference()
        with torch.no_grad():
            y = layer(x).feats
        assert not y.is_inference() and not y.requires_grad
        assert layer(x).feats.requires_grad


def test_repeated_calls_run_on_parameters_that_are_swapped_in(device: torch.device) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    layer(x)
    others = {name: torch.randn_like(p) for name, p in layer.named_parameters()}
    expected = spatially_sparse_conv(x, others["weight"], 3, others["bias"])
    swapped = torch.func.functional_call(layer, others, (x,))
    assert torch.equal(swapped.feats, expected.feats)


def test_a_subclass_may_compute_its_weight(device: torch.device) -> None:
    class Centred(voxmma.nn.SparseConv3d):
        @property
        def weight(self) -> torch.Tensor:  # type: ignore[override]
            own: torch.Tensor = self._parameters["weight"]  # type: ignore[assignment]
            return own - own.mean()

    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    layer.__class__ = Centred
    expected = spatially_sparse_conv(x, layer.weight, 3, layer.bias)
    for _ in range(2):
        assert torch.equal(layer(x).feats, expected.feats)
    plain = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    plain(x)
    torch.nn.utils.parametrize.register_parametrization(plain, "weight", _Doubled())
    doubled = spatially_sparse_conv(x, plain.weight, 3, plain.bias)
    for _ in range(2):
        assert torch.equal(plain(x).feats, doubled.feats)


class _Doubled(torch.nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_what_holds_repeated_calls_can_be_copied_and_pickled(device: torch.device) -> None:
    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    first = layer(x)
    for other, same in ((copy.deepcopy(x), copy.deepcopy(layer)), pickle.loads(pickle.dumps((x, layer)))):
        for _ in range(2):
            assert torch.equal(same(other).feats, first.feats)


def test_a_coordinate_set_goes_when_its_voxels_do(device: torch.device) -> None:
    import gc
    import weakref

    x = voxels(device)
    layer = voxmma.nn.SparseConv3d(16, 24, 3, device=device)
    layer(x)
    layer(x)
    alive = weakref.ref(x.coord_set)
    gc.disable()
    try:
        del x
        assert alive() is None, "a reference cycle keeps it"
    finally:
        gc.enable()


class _Network(torch.nn.Module):
    """Two levels with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        nn = voxmma.nn
        self.stem = nn.Sequential(nn.SparseConv3d(16, 32, 3, bias=False), nn.BatchNorm(32), nn.ReLU())
        self.down = nn.SparseConv3d(32, 64, 2, stride=2)
        self.body = nn.Sequential(nn.SparseConv3d(64, 64, 3), nn.LayerNorm(64), nn.ReLU())
        self.up = nn.SparseConvTranspose3d(64, 32, 2, stride=2)
        self.pool = nn.SparseMaxPool3d(2)

    def forward(self, x: voxmma.Voxels) -> torch.Tensor:
        fine = self.stem(x)
        coarse = self.body(self.down(fine)) + self.pool(fine).with_feats(self.pool(fine).feats.repeat(1, 2))
        out: torch.Tensor = (self.up(coarse, coords=fine) + fine).feats
        return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize("backward", [False, True])
def test_a_network_fits_a_cuda_graph(dtype: torch.dtype, backward: bool) -> None:
    torch.manual_seed(0)
    coords = conftest.surface_coords(48).cuda()
    network = _Network().cuda().to(dtype)
    static = torch.randn(len(coords), 16, device="cuda", dtype=dtype)
    voxels = voxmma.Voxels(coords, static)
    parameters = list(network.parameters())

    def step() -> list[torch.Tensor]:
        with torch.set_grad_enabled(backward):
            y = network(voxels)
        if not backward:
            return [y]
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), parameters)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # builds the maps
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(2):
        static.normal_()
        expected = [tensor.clone() for tensor in step()]
        for tensor in captured:
            tensor.zero_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))
        assert float(captured[0].float().norm()) > 0
