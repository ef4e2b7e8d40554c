"""Precision policies: their meaning, what they refuse, and what they do to modules, functions and graphs."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import operator
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack

import voxmma
from voxmma import torchflags
from voxmma.precision import policy_graph
from voxmma.precision.operators import OpKind, kind_of
from voxmma.precision.policy import (
    NAMED,
    ComputeSpec,
    PolicyError,
    Precision,
    PrecisionPolicy,
    apply_policy,
    as_policy,
    current_policy,
)

from conftest import random_coords

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

TABLE = {  # Compute, Reduction operands, Reduction inside, Elementwise, DataMovement, Boundary
    "always_f32": ("f32", "f32", "f32", "f32", "f32", "f32"),
    "always_f16": ("f16", "f16", "f16", "f16", "f16", "f32"),
    "auto_mixed_conservative": ("f16", "f32", "f32", "f16", "f16", "f32"),
    "auto_mixed": ("f16", "f16", "f32", "f16", "f16", "f32"),
    "auto_mixed_bf16": ("bf16", "bf16", "f32", "bf16", "bf16", "f32"),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Tiny operations on a busy machine: threads cost more than they bring."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# ---------------------------------------------------------------- the object
@pytest.mark.parametrize("name", TABLE)
def test_named_policies_mean_what_the_table_says(name: str) -> None:
    policy = getattr(PrecisionPolicy, name)
    compute, reduction, inside, elementwise, movement, boundary = TABLE[name]
    assert [policy.precision_for(kind).value for kind in OpKind] == [
        compute,
        reduction,
        elementwise,
        movement,
        boundary,
    ]
    assert policy.reduction_inside.value == inside
    assert policy.versioned_name == f"{name}@1"
    assert as_policy(f"{name}@1") is policy is as_policy(name)
    for spec in (policy.forward, policy.dgrad, policy.wgrad):
        assert (spec.input.value, spec.accumulator_name, spec.chunk) == (compute, "fp32", None)


@pytest.mark.parametrize("kind", [None, "Convolve", "", 7, object(), nn.Linear])
@pytest.mark.parametrize("name", TABLE)
def test_unknown_kinds_fail_closed(kind: Any, name: str) -> None:
    assert as_policy(name).precision_for(kind) is Precision.F32


def legal(
    given: str, accumulator: str, chunk: Any, output: str | None, rescale: bool
) -> bool:  # the rules of the precision guide, written again
    if accumulator not in ("f32", "f16"):
        return False
    half = given in ("f16", "bf16")
    if accumulator == "f16" and given != ("bf16" if rescale else "f16"):
        return False
    if rescale and accumulator != "f16":
        return False
    if chunk is not None and (accumulator != "f16" or chunk not in (32, 64, 128, "offset") or chunk is True):
        return False
    return output in (None, "f32") or (half and output == given)


def test_every_combination_of_a_product_is_accepted_or_refused_by_the_rules() -> None:
    formats = ("f32", "tf32", "f16", "bf16")
    accepted = 0
    for combination in itertools.product(
        formats, formats, (None, 16, 32, 64, 128, "offset", True), (None, *formats), (False, True)
    ):
        try:
            ComputeSpec(*combination)  # type: ignore[arg-type]
        except PolicyError:
            assert not legal(*combination), combination
        else:
            assert legal(*combination), combination
            accepted += 1
    assert accepted == 40


def test_the_weight_gradient_accumulates_in_f32_only() -> None:
    half_sum = ComputeSpec("f16", "f16")  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="weight gradient"):
        PrecisionPolicy.custom({"Compute": "f16"}, wgrad=half_sum)
    policy = PrecisionPolicy.custom({"Compute": "f16"}, forward=half_sum)
    assert policy.dgrad == half_sum
    assert policy.wgrad.accumulator is Precision.F32


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"Boundary": "f16"}, "Boundary"),
        ({OpKind.Boundary: Precision.BF16}, "Boundary"),
        ({"Elementwise": "tf32"}, "Compute"),
        ({"Reductions": "f16"}, "unknown kind"),
        ({"Compute": "f8"}, "unknown precision"),
    ],
)
def test_custom_maps_refuse_nonsense(kinds: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        PrecisionPolicy.custom(kinds)


def test_custom_maps() -> None:
    policy = PrecisionPolicy.custom({"compute": "bf16", OpKind.Elementwise: "f16"})
    assert [policy.precision_for(k).value for k in OpKind] == ["bf16", "f32", "f16", "f32", "f32"]
    assert PrecisionPolicy.custom({}) is PrecisionPolicy.always_f32
    with pytest.raises(PolicyError, match="forward product"):
        PrecisionPolicy.custom({"Compute": "bf16"}, forward=ComputeSpec(Precision.F16))


@st.composite
def policies(draw: st.DrawFn) -> PrecisionPolicy:
    half = st.sampled_from(["f32", "f16", "bf16"])
    kinds = {k: draw(half) for k in ("Reduction", "Elementwise", "DataMovement")}
    given_ = draw(st.sampled_from(["f32", "tf32", "f16", "bf16"]))
    accumulator = draw(st.sampled_from(["f32", "f16"])) if given_ in ("f16", "bf16") else "f32"
    chunk = draw(st.sampled_from([None, 32, 64, 128, "offset"])) if accumulator == "f16" else None
    rescale = given_ == "bf16" and accumulator == "f16"
    forward = ComputeSpec(Precision(given_), Precision(accumulator), chunk, None, rescale)
    inside = draw(st.sampled_from(["f32", kinds["Reduction"]]))
    return PrecisionPolicy.custom(kinds, forward=forward, reduction_inside=inside)


@settings(deadline=None, max_examples=60)
@given(policies(), policies())
def test_records_and_names_identify_a_policy(a: PrecisionPolicy, b: PrecisionPolicy) -> None:
    again = as_policy(json.loads(json.dumps(a.to_json())))
    assert again == a
    assert again.versioned_name == a.versioned_name
    assert (a.versioned_name == b.versioned_name) == (a == b)
    assert pickle.loads(pickle.dumps(a)) == a


def test_records_that_lie_are_refused() -> None:
    record = PrecisionPolicy.auto_mixed.to_json()
    for change, message in (
        ({"version": 2}, "version 2"),
        ({"kinds": {**record["kinds"], "Elementwise": "f32"}}, "not that policy"),
        ({"extra": 1}, "exactly the keys"),
        ({"kinds": {"Compute": "f16"}}, "every kind"),
    ):
        with pytest.raises(PolicyError, match=message):
            as_policy({**record, **change})
    for name, message in (("auto_mixed@2", "version 1"), ("mixed", "unknown policy")):
        with pytest.raises(PolicyError, match=message):
            as_policy(name)
    with pytest.raises(TypeError, match="int"):
        as_policy(3)  # type: ignore[arg-type]


# ---------------------------------------------------------------- kinds
@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (nn.Linear(2, 2), "Compute"),
        (nn.ConvTranspose2d(2, 2, 1), "Compute"),
        (nn.MultiheadAttention(4, 1), "Compute"),
        (nn.LSTM(2, 2), "Compute"),
        (voxmma.nn.SparseConv3d(2, 2, 3), "Compute"),
        (nn.LayerNorm(2), "Reduction"),
        (nn.BatchNorm3d(2), "Reduction"),
        (nn.Softmax(-1), "Reduction"),
        (nn.CrossEntropyLoss(), "Reduction"),
        (nn.AdaptiveAvgPool2d(1), "Reduction"),
        (nn.GELU(), "Elementwise"),
        (nn.PReLU(), "Elementwise"),
        (nn.Dropout2d(), "Elementwise"),
        (nn.Embedding(2, 2), "DataMovement"),
        (nn.MaxPool2d(2), "DataMovement"),
        (nn.Bilinear(2, 2, 2), "Compute"),
        (nn.Upsample(scale_factor=2), None),
        (nn.Sequential(), None),
        (F.linear, "Compute"),
        (torch.ops.aten.convolution.default, "Compute"),
        (torch.Tensor.__matmul__, "Compute"),
        (torch.Tensor.__rmatmul__, "Compute"),
        (F.scaled_dot_product_attention, "Compute"),
        (F.layer_norm, "Reduction"),
        (torch.softmax, "Reduction"),
        (torch.ops.aten._softmax.default, "Reduction"),
        (torch.Tensor.mean, "Reduction"),
        (operator.add, "Elementwise"),
        (operator.iadd, "Elementwise"),
        (torch.Tensor.__rsub__, "Elementwise"),
        (torch.Tensor.mul_, "Elementwise"),
        ("masked_fill_", "Elementwise"),
        (torch.cat, "DataMovement"),
        (operator.getitem, "DataMovement"),
        (torch.special.i0, None),
    ],
)
def test_classification(target: Any, kind: str | None) -> None:
    found = kind_of(target)
    assert (found.value if found else None) == kind


def test_a_function_of_someone_else_is_unknown_whatever_it_is_called() -> None:
    def linear(x: torch.Tensor) -> torch.Tensor:
        return x

    assert kind_of(linear) is None
    assert kind_of(F.linear) is OpKind.Compute


# ---------------------------------------------------------------- with policy:
def results(x: torch.Tensor, w: torch.Tensor) -> dict[str, torch.Tensor]:
    """One call of each kind on float32 operands."""
    return {
        "Compute": F.linear(x, w),
        "Reduction": torch.softmax(x, -1),
        "Elementwise": F.gelu(x),
        "DataMovement": torch.cat([x, x]),
        "unknown": torch.special.i0(x),
    }


@pytest.mark.parametrize("name", TABLE)
def test_functions_run_in_the_precision_of_their_kind(name: str) -> None:
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    policy = as_policy(name)
    with policy:
        assert current_policy() is policy
        found = results(x, w)
    assert current_policy() is None
    exact = results(x.double(), w.double())
    for kind, value in found.items():
        precision = policy.precision_for(kind)
        assert value.dtype == precision.dtype, kind
        error = float((value.double() - exact[kind]).norm() / exact[kind].norm())
        bound = {"f32": 1e-6, "f16": 1e-3, "bf16": 8e-3}[precision.value]
        assert error < bound, (kind, error)
        if precision.is_half:
            assert error > bound / 100, f"{kind} did not run in {precision.value}"


def test_reductions_add_up_in_f32_inside() -> None:
    ones = torch.full((40_000,), 0.25)
    with PrecisionPolicy.auto_mixed:
        total, loss = ones.sum(), F.cross_entropy(torch.zeros(3, 9), torch.tensor([0, 1, 2]))
        spread = torch.var(torch.tensor([1000.0, 1001.0, 1002.0]))
    assert total.dtype == F16 and float(total) == 10_000  # an fp16 sum sticks at 512
    assert loss.dtype == F32
    assert abs(float(loss) - 2.1972246) < 1e-6
    assert spread.dtype == F32 and float(spread) == 1.0


def test_operands_may_be_keywords_and_lists() -> None:
    x, w = torch.randn(3, 4), torch.randn(5, 4)
    with PrecisionPolicy.auto_mixed:
        assert F.linear(input=x, weight=w).dtype == F16
        assert torch.stack([x, x.half()]).dtype == F16
        assert torch.einsum("ij,kj->ik", x, w).dtype == F16


def test_writing_in_place_keeps_the_destination() -> None:
    with PrecisionPolicy.auto_mixed:
        x = torch.full((4,), 2049.0)
        alias = x
        x += torch.ones(4).half()
        assert x is alias and x.dtype == F32 and float(x[0]) == 2050.0  # 2049 is no fp16 number
        F.relu(x, inplace=True)
        F.dropout(x, 0.5, False, True)
        x.mul_(2)
        assert alias.dtype == F32 and float(alias[0]) == 4100.0
        out = torch.empty(4)
        torch.add(x, x.half(), out=out)
        assert out.dtype == F32 and float(out[0]) == 8200.0


def test_float64_is_left_alone() -> None:
    x = torch.randn(4, 4, dtype=torch.float64)
    with PrecisionPolicy.auto_mixed:
        assert (x @ x).dtype == torch.float64
        assert torch.equal(x @ x, torch.matmul(x, x))


def test_the_innermost_block_decides_alone() -> None:
    x, w = torch.randn(16, 32), torch.randn(8, 32)
    with PrecisionPolicy.auto_mixed:
        with PrecisionPolicy.always_f32:
            assert torch.equal(F.linear(x, w), x @ w.t()) and F.linear(x, w).dtype == F32
        with PrecisionPolicy.auto_mixed_bf16:
            assert F.linear(x, w).dtype == BF16
            assert torch.equal(F.linear(x, w).float(), F.linear(x.bfloat16(), w.bfloat16()).float())
        assert F.linear(x, w).dtype == F16


def test_other_threads_are_not_touched() -> None:
    seen = []
    with PrecisionPolicy.auto_mixed:
        worker = threading.Thread(target=lambda: seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype))
        worker.start()
        worker.join()
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == F16
    assert seen == [F32]


def test_a_block_may_end_in_another_thread() -> None:
    """A generator is closed, or collected, by whoever has it last."""
    flags, own = torchflags.snapshot(), voxmma.settings.snapshot()
    tf32 = PrecisionPolicy.custom({"Compute": "tf32"})

    def held() -> Iterator[None]:
        with tf32:
            yield

    def close(generator: Any) -> None:
        with tf32:  # a block of its own, which ends first
            pass
        generator.close()

    generator = held()
    next(generator)
    worker = threading.Thread(target=close, args=(generator,))
    worker.start()
    worker.join()
    assert current_policy() is None
    assert _get_current_function_mode_stack() == [] and not torch.is_autocast_enabled("cpu")
    assert torchflags.snapshot() == flags and voxmma.settings.snapshot() == own
    with pytest.raises(RuntimeError, match="no block of policy custom@1"):
        tf32.__exit__(None, None, None)


def test_blocks_nest_and_put_everything_back() -> None:
    flags, own = torchflags.snapshot(), voxmma.settings.snapshot()
    x = torch.randn(4, 4)
    tf32 = PrecisionPolicy.custom({"Compute": "tf32"})
    with tf32:
        assert torchflags.tf32_allowed() and voxmma.get_fp32_precision() == "tf32"
        with pytest.raises(KeyError), PrecisionPolicy.always_f32:
            assert not torchflags.tf32_allowed() and voxmma.get_fp32_precision() == "ieee"
            raise KeyError
        with PrecisionPolicy.auto_mixed:
            assert torchflags.tf32_allowed()  # nothing it computes is float32: the switches stay as they are
        assert current_policy() is tf32 and torchflags.tf32_allowed()
        assert (x @ x).dtype == F32
    assert torchflags.snapshot() == flags
    assert voxmma.settings.snapshot() == own
    assert _get_current_function_mode_stack() == []
    assert not torch.is_autocast_enabled("cpu")


# ---------------------------------------------------------------- modules
class Transformer(nn.Module):
    """Every kind of layer that a small language model has."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(40, 32)
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)
        self.mix = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.0), nn.Linear(64, 32))
        self.batch = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 11)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        x = self.batch((x + self.mix(x)).transpose(1, 2)).transpose(1, 2)
        out: torch.Tensor = self.head(x.mean(1))
        return out


class Image(nn.Module):
    """Convolution, batch norm, in-place activations and an in-place residual."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm1(self.first(x)))
        y = self.norm2(self.second(x))
        y += x
        return F.log_softmax(self.head(self.relu(y).mean((2, 3))), -1)


def image_case() -> tuple[nn.Module, torch.Tensor]:
    return Image(), torch.randn(4, 3, 8, 8)


def transformer_case() -> tuple[nn.Module, torch.Tensor]:
    return Transformer(), torch.randint(40, (4, 9))


CASES: list[Callable[[], tuple[nn.Module, torch.Tensor]]] = [image_case, transformer_case]
#: Policies that treat all kinds of operators alike: one network shows what a graph makes of them.
UNIFORM = ("always_f32", "always_f16")


def as_double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("case", CASES)
def test_a_module_under_a_policy(case: Callable[..., Any], name: str) -> None:
    model, x = case()
    exact_model = copy.deepcopy(model).double()
    exact = exact_model(as_double(x))
    exact.square().mean().backward()
    plain = copy.deepcopy(model)
    applied = apply_policy(model, name)
    out = model(x)
    assert out.dtype == F32
    out.square().mean().backward()
    precision = as_policy(name).precision_for("Compute")
    error = float(((out.double() - exact).norm() / exact.norm()).detach())
    bound = {"f32": 2e-6, "f16": 3e-3, "bf16": 2e-2}[precision.value]
    assert error < bound
    assert bool(applied.casts) == precision.is_half
    if precision.is_half:
        assert error > bound / 100
    assert all(p.grad is not None and p.grad.dtype == p.dtype == F32 for p in model.parameters())
    gradient, exact_gradient = (
        torch.cat([p.grad.double().flatten() for p in m.parameters() if p.grad is not None])
        for m in (model, exact_model)
    )
    assert float((gradient - exact_gradient).norm() / exact_gradient.norm()) < 20 * bound
    for (label, b), q in zip(model.named_buffers(), exact_model.buffers(), strict=True):
        assert b.dtype in (F32, torch.int64)
        torch.testing.assert_close(b.double(), q.double(), rtol=20 * bound, atol=20 * bound, msg=label)

    applied.revert()
    applied.revert()
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model(x), plain(x))
    assert _get_current_function_mode_stack() == []


def test_rows_name_each_layer() -> None:
    model, _ = transformer_case()
    with apply_policy(model, "auto_mixed", {"head": "always_f32"}) as applied:
        rows = {row.name: row for row in applied.rows}
    assert rows["token"].kind == "DataMovement"
    assert rows["norm"].precision == "f16, f32 inside"
    assert rows["mix.1"].kind == "Elementwise"
    assert rows["head"].precision == "f32" and "always_f32@1" in rows["head"].note
    assert "attention" in rows and "" not in rows and "mix" not in rows
    assert "MultiheadAttention" in applied.table()


def test_overrides_run_a_part_differently() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    x = torch.randn(8, 64)
    with apply_policy(model, "auto_mixed", {"1": "always_f32"}):
        mixed = model(x)
    first = F.linear(x.half(), model[0].weight.half(), model[0].bias.half()).float()
    assert torch.equal(mixed, F.linear(first, model[1].weight, model[1].bias))
    with pytest.raises(KeyError, match="nose"):
        apply_policy(model, "auto_mixed", {"nose": "always_f32"})
    with pytest.raises(PolicyError, match="process-wide"):
        apply_policy(model, "auto_mixed", {"1": PrecisionPolicy.custom({"Compute": "tf32"})})
    assert torch.equal(model(x), model[1](model[0](x)))


def test_a_failing_forward_leaves_no_mode_behind() -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ZeroDivisionError

    model = nn.Sequential(nn.Linear(2, 2), Fails())
    with apply_policy(model, "auto_mixed"):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                model(torch.ones(1, 2))
            assert _get_current_function_mode_stack() == []
            assert current_policy() is None
            assert not torch.is_autocast_enabled("cpu")


class Interrupted(nn.Module):
    """What Ctrl-C does to a forward. PyTorch calls no hook for it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_an_interrupted_forward_leaves_no_policy_behind() -> None:
    class Goes(nn.Module):  # on, whatever happens to its part
        def __init__(self) -> None:
            super().__init__()
            self.part = Interrupted()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(KeyboardInterrupt):
                self.part(x)
            assert current_policy() is PrecisionPolicy.always_f32
            return x @ x + (x.half() @ x.half()).float()

    model, x = nn.Sequential(nn.Linear(2, 2), Interrupted()), torch.ones(2, 2)
    for look in (
        lambda: current_policy() is None,
        lambda: (x @ x).dtype == F32 and not torch.is_autocast_enabled("cpu"),
    ):
        handle = apply_policy(model, "auto_mixed")
        with pytest.raises(KeyboardInterrupt) as kept:  # as a debugger does: the frames stay
            model(x)
        assert look()
        assert model[0](x).dtype == F32
        handle.revert()
        assert not model._forward_hooks and handle.casts["Compute"] > 0
        assert _get_current_function_mode_stack() == []
        assert kept.traceback
    outer = Goes()
    with apply_policy(outer, "always_f32", {"part": "auto_mixed"}):
        assert torch.equal(outer(x), 2 * (x @ x))
        assert current_policy() is None
        assert _get_current_function_mode_stack() == []


def test_copies_of_a_module_keep_the_policy_and_their_own_weights() -> None:
    model, x = nn.Linear(16, 16), torch.randn(4, 16)
    apply_policy(model, "auto_mixed")
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), model(x))
        with torch.no_grad():
            twin.weight.zero_()
        assert torch.equal(twin(x), twin.bias.half().float().expand(4, 16))


@pytest.mark.filterwarnings("ignore:Dynamo")
def test_a_module_under_a_policy_compiles_with_breaks_and_not_as_one_graph() -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(4, 8)
    with apply_policy(model, "auto_mixed"):
        expected = model(x)
        assert torch.equal(torch.compile(model, backend="eager")(x), expected)
        torch._dynamo.reset()
        with pytest.raises(torch._dynamo.exc.Unsupported):
            torch.compile(model, backend="eager", fullgraph=True)(x)
    assert _get_current_function_mode_stack() == []


def test_applying_twice_and_float64_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    flags = torchflags.snapshot()
    with apply_policy(model[0], "auto_mixed"), pytest.raises(RuntimeError, match="already applied to 0"):
        apply_policy(model, "auto_mixed")
    with pytest.raises(TypeError, match="float64"):
        apply_policy(model.double(), "auto_mixed")
    assert torchflags.snapshot() == flags


# ---------------------------------------------------------------- sparse layers
class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = voxmma.nn.SparseConv3d(8, 16, 3)
        self.norm = nn.BatchNorm1d(16)
        self.second = voxmma.nn.SparseConv3d(16, 4, 3, use_fp16_accum=True)

    def forward(self, x: voxmma.Voxels) -> voxmma.Voxels:
        x = self.first(x)
        return self.second(x.with_feats(F.relu(self.norm(x.feats))))


def test_sparse_layers_follow_the_policy_and_come_back() -> None:
    model = Sparse()
    coords = random_coords(300, 9)
    x = voxmma.Voxels(coords, torch.randn(300, 8))
    exact = copy.deepcopy(model).double()(x.with_feats(x.feats.double())).feats
    model.eval()
    model.train()
    half_sum = PrecisionPolicy.auto_mixed.with_compute(ComputeSpec(Precision.F16, Precision.F16))
    errors = {}
    for policy in (PrecisionPolicy.always_f32, PrecisionPolicy.auto_mixed, half_sum):
        with apply_policy(model, policy) as applied:
            out = model(x)
            record = voxmma.explain(model.first(x))
        assert record.compute_dtype == policy.forward.input.dtype
        assert record.accumulator == policy.forward.accumulator_name
        assert record.decided_by == "module"
        notes = {row.name: row.note for row in applied.rows}
        assert notes["first"] == notes["second"] == f"accumulator {policy.forward.accumulator_name}"
        assert out.feats.dtype == F32
        errors[str(policy)] = float(((out.feats.double() - exact).norm() / exact.norm()).detach())
        assert (model.first.use_fp16_accum, model.first.compute_dtype) == (None, None)
        assert model.second.use_fp16_accum is True
    assert errors["always_f32@1"] < 1e-5 < errors["auto_mixed@1"] < errors[str(half_sum)] < 2e-2


def test_a_block_decides_the_compute_dtype_of_sparse_layers() -> None:
    layer = voxmma.nn.SparseConv3d(8, 16, 3)
    x = voxmma.Voxels(random_coords(100, 6), torch.randn(100, 8))
    half_sum = PrecisionPolicy.auto_mixed.with_compute(ComputeSpec(Precision.F16, Precision.F16))
    for policy, accumulator in ((PrecisionPolicy.auto_mixed_bf16, "fp32"), (half_sum, "fp16")):
        with policy:
            record = voxmma.explain(layer(x))
        assert record.compute_dtype == policy.forward.input.dtype
        assert (record.accumulator, record.decided_by) == (accumulator, "runtime")
    assert voxmma.explain(layer(x)).compute_dtype == F32


def test_a_policy_that_sparse_layers_cannot_follow_is_refused_whole() -> None:
    model = Sparse()
    before = [{k: v for k, v in vars(m).items() if k == "compute_dtype"} for m in model.modules()]
    forward = ComputeSpec(Precision.F16, Precision.F16)
    policy = PrecisionPolicy.auto_mixed.with_compute(forward, dgrad=ComputeSpec(Precision.F16))
    flags = torchflags.snapshot()
    with pytest.raises(PolicyError, match="one accumulator"):
        apply_policy(model, policy)
    assert before == [{k: v for k, v in vars(m).items() if k == "compute_dtype"} for m in model.modules()]
    assert torchflags.snapshot() == flags
    assert not model._forward_pre_hooks


# ---------------------------------------------------------------- graphs
@pytest.mark.parametrize("name", TABLE)
def test_a_traced_graph_computes_what_the_module_does_under_the_policy(name: str) -> None:
    model, x = image_case()
    exact = copy.deepcopy(model).double()(x.double())
    graph, report = policy_graph.trace(copy.deepcopy(model), name, (x,))
    out = graph(x)
    assert out.dtype == F32
    bound = {"f32": 2e-6, "f16": 3e-3, "bf16": 2e-2}[TABLE[name][0]]
    assert float(((out.double() - exact).norm() / exact.norm()).detach()) < bound
    assert report.inserted - sum(report.removed.values()) == report.remaining
    if name == "always_f32":
        assert report.remaining == 0 and torch.equal(out, copy.deepcopy(model)(x))
    else:
        assert report.remaining > 0
    out.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == F32 for p in graph.parameters())


@pytest.mark.parametrize(
    ("case", "name"),
    [
        pytest.param(case, name, marks=[pytest.mark.slow] * (case is transformer_case and name in UNIFORM))
        for case in CASES
        for name in TABLE
    ],
)
def test_torch_compile_with_a_policy_backend(case: Callable[..., Any], name: str) -> None:
    torch._dynamo.reset()
    model, x = case()
    direct = copy.deepcopy(model)
    applied = apply_policy(direct, name)
    backend = policy_graph.policy_backend(name, "eager")
    out = torch.compile(model, backend=backend, fullgraph=True)(x)
    expected = direct(x)
    applied.revert()
    assert torch.equal(out, expected)
    (report,) = backend.reports
    assert report.unknown == []
    out.square().mean().backward()
    expected.square().mean().backward()
    for p, q in zip(model.parameters(), direct.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        torch.testing.assert_close(
            p.grad, q.grad, rtol=5e-3, atol=2e-5
        )  # shared casts add up in another order


MIXED = PrecisionPolicy.auto_mixed
SPARSE_POLICIES = {
    **NAMED,
    "fp16 sums": MIXED.with_compute(ComputeSpec(Precision.F16, Precision.F16)),
    "promoted": MIXED.with_compute(ComputeSpec(Precision.F16, Precision.F16, chunk="offset")),
    "bf16, fp16 sums": MIXED.with_compute(ComputeSpec(Precision.BF16, Precision.F16, rescale=True)),
    "fp16, f32 results": MIXED.with_compute(ComputeSpec(Precision.F16, output=Precision.F32)),
    "tf32": PrecisionPolicy.custom({"Compute": "tf32"}),
}


#: Each way of computing once; what the others choose is held by the next test.
COMPILED = ("auto_mixed", "promoted", "bf16, fp16 sums", "tf32")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in COMPILED)) for name in SPARSE_POLICIES],
)
def test_sparse_layers_in_a_graph_compute_as_the_module_does(name: str, device: torch.device) -> None:
    torch._dynamo.reset()
    model, policy = Sparse().to(device), SPARSE_POLICIES[name]
    x = voxmma.Voxels(random_coords(300, 9), torch.randn(300, 8)).to(device)
    model(x)  # makes the map, which is no matter of the graph
    direct = copy.deepcopy(model)
    with apply_policy(direct, policy):
        expected = direct(x).feats
    backend = policy_graph.policy_backend(policy, "aot_eager")
    out = torch.compile(model, backend=backend, fullgraph=True)(x).feats
    if device.type == "cpu":
        assert torch.equal(out, expected)
    else:  # the norm between the layers may be another kernel there
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-2 * float(expected.detach().abs().max()))
    assert backend.reports[0].kinds["Compute"] == 2
    out.square().sum().backward()
    expected.square().sum().backward()
    for p, q in zip(model.parameters(), direct.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        share = 1e-3 if device.type == "cpu" else 5e-2
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=share * float(q.grad.abs().max()))


def test_sparse_layers_in_a_graph_take_the_accumulator_and_tiles_of_the_policy() -> None:
    ops = torch.ops.voxmma
    x, weight = torch.randn(5, 32), torch.randn(1, 32, 32)
    rows = torch.arange(5)
    maps = [rows, rows, torch.tensor([0, 5]), torch.empty(0, 5, 5, dtype=torch.int32)]

    def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ops.conv(x, weight, None, maps, [], 5, True, False, "fp32", "cpu", "cpu", "cpu")

    found = {}
    for name, policy in SPARSE_POLICIES.items():
        new, _ = policy_graph.rewrite(fx.symbolic_trace(layer), policy, (x, weight))
        (node,) = (n for n in new.graph.nodes if n.op == "call_function" and "voxmma" in str(n.target))
        found[name] = (
            node.target,
            *node.args[8:10],
            node.args[12] if len(node.args) > 12 else None,
            node.all_input_nodes[0].meta["val"].dtype,
        )
        assert new(x, weight).dtype == F32
    conv, scaled = ops.conv.default, ops.conv_rescaled.default
    assert found == {
        "always_f32": (conv, "fp32", "cpu", None, F32),
        **dict.fromkeys(list(NAMED)[1:4], (conv, "fp32", "cpu", None, F16)),
        "auto_mixed_bf16": (conv, "fp32", "cpu", None, BF16),
        "fp16 sums": (conv, "fp16", "cpu", None, F16),
        "promoted": (conv, "fp16_promoted", "cpu_poff", None, F16),
        "bf16, fp16 sums": (scaled, "fp16", "cpu", BF16, BF16),
        "fp16, f32 results": (conv, "fp32", "cpu", F32, F16),
        "tf32": (conv, "fp32", "cpu_tf32", None, F32),
    }
    two = MIXED.with_compute(ComputeSpec(Precision.F16, Precision.F16), dgrad=ComputeSpec(Precision.F16))
    with pytest.raises(PolicyError, match="one accumulator"):
        policy_graph.rewrite(fx.symbolic_trace(layer), two, (x, weight))


def test_the_backend_wraps_others_and_dynamic_shapes() -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    backend = policy_graph.policy_backend("auto_mixed", "aot_eager")
    compiled = torch.compile(model, backend=backend, dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 8)
        with apply_policy(model, "auto_mixed"):
            expected = model(x)
        torch.testing.assert_close(compiled(x), expected, rtol=2e-3, atol=2e-3)
    assert len(backend.reports) == 1


def graph_of(build: Callable[[fx.Graph, fx.Node], Any]) -> fx.GraphModule:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    return fx.GraphModule(nn.Module(), graph)


def test_redundant_casts_are_counted_by_reason() -> None:
    def build(g: fx.Graph, x: fx.Node) -> Any:
        half = g.call_method("half", (x,))
        again = g.call_method("to", (x, F16))  # repeated
        same = g.call_method("half", (again,))  # same
        wide = g.call_method("float", (half,))
        back = g.call_method("half", (wide,))  # widened, then same
        g.call_method("bfloat16", (x,))  # unused
        rounded = g.call_method("float", (g.call_method("half", (x,)),))  # its half is repeated
        return [same, back, rounded]

    gm = graph_of(build)
    x = torch.randn(50)
    expected = gm(x)
    policy_graph._propagate(gm, (x,))
    removed = policy_graph.remove_redundant_casts(gm)
    assert removed == {"same": 2, "repeated": 2, "widened": 1, "unused": 1}
    assert policy_graph._count_casts(gm.graph) == 2
    for a, b in zip(gm(x), expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
    assert not torch.equal(gm(x)[2], x)  # rounding to fp16 must survive


def test_a_cast_across_a_write_is_not_redundant() -> None:
    def build(g: fx.Graph, x: fx.Node) -> Any:
        y = g.call_function(torch.mul, (x, 2.0))
        before = g.call_method("half", (y,))
        view = g.call_method("view", (y, -1))
        written = g.call_method("add_", (view, 1.0))  # through another name of the same memory
        after = g.call_method("half", (y,))
        return [before, after, written]

    gm = graph_of(build)
    x = torch.randn(5)
    policy_graph._propagate(gm, (x,))
    assert policy_graph.remove_redundant_casts(gm) == {}
    before, after, _ = gm(x)
    assert torch.equal(before, (x * 2).half()) and torch.equal(after, (x * 2 + 1).half())


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 30), st.integers(0, 30)), max_size=14))
def test_removing_casts_never_changes_a_bit(steps: list[tuple[int, int, int]]) -> None:
    def one(g: fx.Graph, step: int, a: fx.Node, b: fx.Node) -> fx.Node:
        if step == 3:
            return g.call_function(torch.add, (a, b))
        if step == 4:
            return g.call_method("add_", (g.call_function(torch.clone, (a,)), b))
        if step == 5 and a.op != "placeholder":
            return g.call_method("mul_", (a, 1.5))
        name = ["half", "float", "to", "", "", "neg", "view"][step]
        return g.call_method(name, {"to": (a, BF16), "view": (a, -1)}.get(name, (a,)))

    def build(g: fx.Graph, x: fx.Node) -> Any:
        values = [x]
        for step, i, j in steps:
            values.append(one(g, step, values[i % len(values)], values[j % len(values)]))
        return values[1:] or [x]

    gm = graph_of(build)
    x = torch.randn(7)
    expected = [value.clone() for value in gm(x.clone())]
    policy_graph._propagate(gm, (x,))
    policy_graph.remove_redundant_casts(gm)
    for a, b in zip(gm(x.clone()), expected, strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_a_traced_module_is_not_kept() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    parts = [weakref.ref(part) for part in model]
    graph, _ = policy_graph.trace(model, "auto_mixed", (torch.ones(2, 4),))
    del model, graph
    gc.collect()
    assert [part() for part in parts] == [None, None]


def test_unknown_functions_in_a_graph_run_in_f32() -> None:
    gm = graph_of(
        lambda g, x: g.call_function(torch.special.i0, (g.call_function(torch.neg, (x,)),)),
    )
    x = torch.randn(20)
    new, report = policy_graph.rewrite(gm, "auto_mixed", (x,))
    assert len(report.unknown) == 1 and report.kinds["unknown"] == 1
    assert torch.equal(new(x), torch.special.i0((-x.half()).float()))


def test_float64_graphs_are_refused() -> None:
    model, x = image_case()
    with pytest.raises(TypeError, match="float64"):
        policy_graph.trace(model.double(), "auto_mixed", (x.double(),))


def test_every_name_is_in_one_table_only() -> None:
    from voxmma.precision import operators

    names = [name for group in operators._FUNCTIONS.values() for name in group]
    assert len(names) == len(set(names))
    assert not operators._NEUTRAL & (set(names) - {"index"})
    assert set(NAMED) == set(TABLE)
