"""What a policy says: formats, products (`ComputeSpec`), and the precision of every kind of operation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map

from voxmma.precision import active
from voxmma.precision.casting import cast_value
from voxmma.precision.operators import OpKind


class PolicyError(ValueError):
    """A policy that asks for something impossible or unsafe."""


class Precision(str, Enum):
    """A number format. TF32 is float32 storage whose products round the operands to 10 mantissa bits."""

    F32 = "f32"
    TF32 = "tf32"
    F16 = "f16"
    BF16 = "bf16"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds a value of this precision."""
        return {"f16": torch.float16, "bf16": torch.bfloat16}.get(self.value, torch.float32)

    @property
    def is_half(self) -> bool:
        """Whether values take 16 bits."""
        return self in (Precision.F16, Precision.BF16)


CHUNKS = (32, 64, 128, "offset")


@dataclass(frozen=True)
class ComputeSpec:
    """The precisions inside one product: operands, running sum, how often the sum is promoted, result.

    Attributes:
        input: what the operands are rounded to.
        accumulator: F32 or F16.
        chunk: with an F16 accumulator, after how many addends (32, 64, 128 or one kernel 'offset') the sum is
            added to a float32 total; None = never.
        output: what the result is rounded to; None = the storage of ``input``.
        rescale: allows BF16 operands with an F16 accumulator, by converting them to fp16 with a power-of-two
            scale.

    Raises PolicyError for a combination no kernel of this library has.
    """

    input: Precision = Precision.F32
    accumulator: Precision = Precision.F32
    chunk: int | str | None = None
    output: Precision | None = None
    rescale: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "input", _precision(self.input))
        object.__setattr__(self, "accumulator", _precision(self.accumulator))
        default = self.input if self.input.is_half else Precision.F32
        object.__setattr__(self, "output", default if self.output is None else _precision(self.output))
        if self.accumulator not in (Precision.F32, Precision.F16):
            raise PolicyError(f"an accumulator is fp32 or fp16, not {self.accumulator.value}")
        if self.accumulator is Precision.F16:
            if not self.input.is_half:
                raise PolicyError(f"{self.input.value} operands need an fp32 accumulator")
            if self.input is Precision.BF16 and not self.rescale:
                raise PolicyError(
                    "no tensor core adds bf16 products in fp16; ask for rescale=True (operands converted to "
                    "fp16 with a power-of-two scale) or an fp32 accumulator"
                )
        if self.rescale and not (self.input is Precision.BF16 and self.accumulator is Precision.F16):
            raise PolicyError("rescale belongs to bf16 operands with an fp16 accumulator")
        if self.chunk is not None:
            if self.accumulator is not Precision.F16:
                raise PolicyError("a chunk belongs to an fp16 accumulator; an fp32 sum is not promoted")
            if isinstance(self.chunk, bool) or self.chunk not in CHUNKS:
                raise PolicyError(
                    f"chunk is one of {', '.join(map(str, CHUNKS))} or None, not {self.chunk!r}"
                )
        result = self.output_format
        if result is not Precision.F32 and result is not default:
            raise PolicyError(f"{self.input.value} operands give fp32 or {default.value}, not {result.value}")

    @property
    def output_format(self) -> Precision:
        """What the result is rounded to."""
        return Precision.F32 if self.output is None else self.output

    @property
    def accumulator_name(self) -> str:
        """The library's name of the accumulator: 'fp32', 'fp16' or 'fp16_promoted'."""
        if self.accumulator is Precision.F32:
            return "fp32"
        return "fp16" if self.chunk is None else "fp16_promoted"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; `from_json` is the inverse."""
        return {
            "input": self.input.value,
            "accumulator": self.accumulator.value,
            "chunk": self.chunk,
            "output": self.output_format.value,
            "rescale": self.rescale,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ComputeSpec:
        """Rebuilds what `to_json` wrote; an unknown key is a PolicyError."""
        unknown = set(data) - {"input", "accumulator", "chunk", "output", "rescale"}
        if unknown:
            raise PolicyError(f"unknown keys in a compute specification: {', '.join(sorted(unknown))}")
        return cls(**data)


def _precision(value: Precision | str) -> Precision:
    try:
        return Precision(value)
    except ValueError:
        raise PolicyError(
            f"unknown precision {value!r}; there are {', '.join(p.value for p in Precision)}"
        ) from None


def _kind(value: Any) -> OpKind | None:
    """The kind by member or by name (any case), None when there is no such kind."""
    if isinstance(value, OpKind):
        return value
    return next((k for k in OpKind if isinstance(value, str) and k.value.lower() == value.lower()), None)


@dataclass(frozen=True)
class PrecisionPolicy:
    """Which precision each kind of operation runs in. Make one by name or with `custom`.

    ``PrecisionPolicy.always_f32`` (the default), ``always_f16``, ``auto_mixed_conservative``, ``auto_mixed``
    and ``auto_mixed_bf16`` are the named policies. Entering a policy (``with policy:``) applies it to what
    this thread calls in the block.

    Attributes:
        name, version: identity; a meaning never changes under the same version.
        kinds: the operand precision of every kind, in the order of `OpKind`.
        reduction_inside: what reductions add up in (their operands are ``precision_for(Reduction)``).
        forward, dgrad, wgrad: the products, in detail.
    """

    name: str
    version: int
    kinds: tuple[Precision, ...]
    reduction_inside: Precision
    forward: ComputeSpec
    dgrad: ComputeSpec
    wgrad: ComputeSpec

    always_f32: ClassVar[PrecisionPolicy]
    always_f16: ClassVar[PrecisionPolicy]
    auto_mixed_conservative: ClassVar[PrecisionPolicy]
    auto_mixed: ClassVar[PrecisionPolicy]
    auto_mixed_bf16: ClassVar[PrecisionPolicy]

    def __post_init__(self) -> None:
        by_kind = dict(zip(OpKind, self.kinds, strict=True))
        if by_kind[OpKind.Boundary] is not Precision.F32:
            raise PolicyError("Boundary is always fp32")
        for kind in (OpKind.Reduction, OpKind.Elementwise, OpKind.DataMovement):
            if by_kind[kind] is Precision.TF32:
                raise PolicyError(f"tf32 is a way to multiply: it fits Compute, not {kind.value}")
        if (
            self.reduction_inside is not Precision.F32
            and self.reduction_inside is not by_kind[OpKind.Reduction]
        ):
            raise PolicyError("a reduction adds up in fp32 or in the precision of its operands")
        if self.forward.input is not by_kind[OpKind.Compute]:
            compute = by_kind[OpKind.Compute].value
            raise PolicyError(
                f"Compute is {compute} but the forward product takes {self.forward.input.value}"
            )
        if self.wgrad.accumulator is not Precision.F32:
            raise PolicyError("the weight gradient always accumulates in fp32")

    @classmethod
    def custom(
        cls,
        kinds: Mapping[OpKind | str, Precision | str],
        *,
        forward: ComputeSpec | None = None,
        dgrad: ComputeSpec | None = None,
        wgrad: ComputeSpec | None = None,
        reduction_inside: Precision | str = Precision.F32,
    ) -> PrecisionPolicy:
        """A policy of one's own. Kinds not named are fp32.

        Args:
            kinds: kind (member or name) to precision.
            forward, dgrad, wgrad: the products in detail. ``forward`` defaults to Compute's precision with an
                fp32 accumulator, ``dgrad`` to ``forward``, ``wgrad`` to the forward operands, fp32 sums and
                result.
            reduction_inside: fp32, or the precision of Reduction.

        Raises PolicyError for an unknown kind or precision, a Boundary other than fp32, an illegal product.
        """
        table = dict.fromkeys(OpKind, Precision.F32)
        for key, value in kinds.items():
            kind = _kind(key)
            if kind is None:
                raise PolicyError(f"unknown kind {key!r}; there are {', '.join(k.value for k in OpKind)}")
            table[kind] = _precision(value)
        if forward is not None and not any(_kind(k) is OpKind.Compute for k in kinds):
            table[OpKind.Compute] = forward.input
        forward = forward or ComputeSpec(table[OpKind.Compute])
        policy = cls(
            name="custom",
            version=1,
            kinds=tuple(table.values()),
            reduction_inside=_precision(reduction_inside),
            forward=forward,
            dgrad=dgrad or forward,
            wgrad=wgrad or ComputeSpec(forward.input, output=Precision.F32),
        )
        return next((p for p in NAMED.values() if p.same_as(policy)), policy)

    def with_compute(self, forward: ComputeSpec, dgrad: ComputeSpec | None = None) -> PrecisionPolicy:
        """This policy with other products (a custom policy): forward, and dgrad where it is not the same."""
        kinds: dict[OpKind | str, Precision | str] = dict(zip(OpKind, self.kinds, strict=True))
        kinds[OpKind.Compute] = forward.input
        return self.custom(kinds, forward=forward, dgrad=dgrad, reduction_inside=self.reduction_inside)

    # ---- questions
    def precision_for(self, kind: OpKind | str | None) -> Precision:
        """The operand precision of ``kind``. Anything that is not a known kind gives F32 (fails closed)."""
        known = _kind(kind)
        return Precision.F32 if known is None else dict(zip(OpKind, self.kinds, strict=True))[known]

    @property
    def tf32(self) -> bool:
        """Whether float32 products may use TF32."""
        return self.forward.input is Precision.TF32

    def same_as(self, other: PrecisionPolicy) -> bool:
        """Whether both mean the same, whatever their names."""
        return replace(self, name="", version=0) == replace(other, name="", version=0)

    @property
    def versioned_name(self) -> str:
        """``auto_mixed@1``; a custom policy adds a digest of its contents."""
        stem = f"{self.name}@{self.version}"
        if NAMED.get(self.name) == self:
            return stem
        text = json.dumps(self.to_json(), sort_keys=True)
        return f"{stem}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def __str__(self) -> str:
        return self.versioned_name

    # ---- records
    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, complete; `from_json` is the inverse."""
        return {
            "name": self.name,
            "version": self.version,
            "kinds": {k.value: p.value for k, p in zip(OpKind, self.kinds, strict=True)},
            "reduction_inside": self.reduction_inside.value,
            "forward": self.forward.to_json(),
            "dgrad": self.dgrad.to_json(),
            "wgrad": self.wgrad.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PrecisionPolicy:
        """Rebuilds what `to_json` wrote.

        Raises PolicyError when keys are missing or unknown, the version is not one this release knows, or a
        named policy's contents are not what its name means.
        """
        expected = {"name", "version", "kinds", "reduction_inside", "forward", "dgrad", "wgrad"}
        if set(data) != expected:
            raise PolicyError(f"a policy record has exactly the keys {', '.join(sorted(expected))}")
        if data["version"] != 1:
            raise PolicyError(f"policy version {data['version']!r} is not known here")
        if set(data["kinds"]) != {k.value for k in OpKind}:
            raise PolicyError("a policy record names every kind once")
        policy = cls(
            name=data["name"],
            version=data["version"],
            kinds=tuple(_precision(data["kinds"][k.value]) for k in OpKind),
            reduction_inside=_precision(data["reduction_inside"]),
            forward=ComputeSpec.from_json(data["forward"]),
            dgrad=ComputeSpec.from_json(data["dgrad"]),
            wgrad=ComputeSpec.from_json(data["wgrad"]),
        )
        if policy.name != "custom" and NAMED.get(policy.name) != policy:
            raise PolicyError(
                f"the record says {policy.name}@{policy.version} but its contents are not that policy"
            )
        return policy

    # ---- use
    def boundary(self, value: Any) -> Any:
        """``value`` as it leaves a model: 16-bit floats (also inside containers, Voxels) become float32."""
        return tree_map(
            lambda leaf: cast_value(leaf, torch.float32), value, is_leaf=lambda v: hasattr(v, "with_feats")
        )

    def __enter__(self) -> PrecisionPolicy:
        active.enter(self)
        return self

    def __exit__(self, *exc: object) -> None:
        active.leave(self)


def _named(name: str, compute: str, reduction: str, inside: str, rest: str) -> PrecisionPolicy:
    kinds = tuple(map(Precision, (compute, reduction, rest, rest, "f32")))
    forward = ComputeSpec(Precision(compute))
    wgrad = ComputeSpec(Precision(compute), output=Precision.F32)
    return PrecisionPolicy(name, 1, kinds, Precision(inside), forward, forward, wgrad)


#: The named policies by name.
NAMED: dict[str, PrecisionPolicy] = {
    p.name: p
    for p in (
        _named("always_f32", "f32", "f32", "f32", "f32"),
        _named("always_f16", "f16", "f16", "f16", "f16"),
        _named("auto_mixed_conservative", "f16", "f32", "f32", "f16"),
        _named("auto_mixed", "f16", "f16", "f32", "f16"),
        _named("auto_mixed_bf16", "bf16", "bf16", "f32", "bf16"),
    )
}
for _policy in NAMED.values():
    setattr(PrecisionPolicy, _policy.name, _policy)


def as_policy(value: PrecisionPolicy | str | Mapping[str, Any]) -> PrecisionPolicy:
    """The one resolver: a policy, a name (``'auto_mixed'`` or ``'auto_mixed@1'``) or a record of `to_json`.

    Raises PolicyError for an unknown name or version, TypeError for another type.
    """
    if isinstance(value, PrecisionPolicy):
        return value
    if isinstance(value, str):
        name, _, version = value.partition("@")
        if name not in NAMED:
            raise PolicyError(f"unknown policy {value!r}; there are {', '.join(NAMED)}")
        if version and version != str(NAMED[name].version):
            raise PolicyError(f"{name} exists in version {NAMED[name].version}, not {version}")
        return NAMED[name]
    if isinstance(value, Mapping):
        return PrecisionPolicy.from_json(value)
    raise TypeError(f"expected a PrecisionPolicy, its name or its record, not {type(value).__name__}")
