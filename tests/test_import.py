"""`import voxmma` in a process of its own: what it brings along, and what loads when it is touched."""

from __future__ import annotations

import pytest

from conftest import Clean

HEAVY = ("torch._dynamo", "matplotlib", "pydantic", "rich", "typer", "yaml")
PUBLIC = ("accuracy", "convert", "export", "gate", "models", "nn", "policy", "schedule", "settings", "shadow")


def test_import_brings_nothing_heavy(clean: Clean) -> None:
    found = clean(
        f"import voxmma; found = [n for n in {HEAVY!r} if n in sys.modules and n not in before]\n"
        "late = ('voxmma.tools', 'voxmma.tuning', 'voxmma.export', 'voxmma.precision.policy')\n"
        "found += [n for n in sys.modules if n.startswith(late)]"
    )
    assert found == []


def test_a_layer_runs_without_anything_heavy(clean: Clean) -> None:
    """Nor does an eager call of a layer: the seconds of torch._dynamo would fall into its first step."""
    found = clean(
        "import voxmma\n"
        "coords = torch.randint(0, 9, (50, 3)).unique(dim=0)\n"
        "coords = torch.cat([coords.new_zeros(len(coords), 1), coords], 1).int()\n"
        "x = voxmma.Voxels(coords, torch.randn(len(coords), 4))\n"
        "down = voxmma.nn.SparseConv3d(4, 4, 2, stride=2)(voxmma.nn.SparseConv3d(4, 4, 3)(x))\n"
        "voxmma.nn.GlobalAvgPool()(down).sum().backward()\n"
        f"found = [n for n in {HEAVY!r} if n in sys.modules and n not in before]"
    )
    assert found == []


def test_import_registers_every_op_of_a_layer(clean: Clean) -> None:
    """What loads later registers only the operators of frozen programs and of engines."""
    found = clean(
        "import importlib, pkgutil, voxmma\n"
        "def ops(): return {n for n in torch._C._dispatch_get_all_op_names() if n.startswith('voxmma::')}\n"
        "early = ops()\n"
        "for module in pkgutil.walk_packages(voxmma.__path__, 'voxmma.'):\n"
        "    if module.name.split('.')[1] not in ('tools', '__main__'):\n"
        "        importlib.import_module(module.name)\n"
        "found = [len(early), sorted(ops() - early)]"
    )
    assert (
        found[0] > 0
        and found[1]
        and all(name.startswith(("voxmma::frozen_", "voxmma::sized_")) for name in found[1])
    )


def test_a_rescaled_layer_runs_in_a_clean_process(clean: Clean) -> None:
    found = clean(
        "import voxmma\n"
        "x = voxmma.Voxels(torch.zeros(1, 4).int(), torch.full((1, 4), 3.0).bfloat16())\n"
        "layer = voxmma.nn.SparseConv3d(4, 4, 1, bias=False, use_fp16_accum=True).bfloat16()\n"
        "torch.nn.init.ones_(layer.weight)\n"
        "y = layer(x)\n"
        "found = [y.feats.tolist(), voxmma.explain(y).rescaled]"
    )
    assert found == [[[12.0] * 4], True]


def test_public_names_are_attributes(clean: Clean) -> None:
    found = clean(
        f"import voxmma; names = [*voxmma.__all__, *{PUBLIC!r}]\n"
        "found = [n for n in names if n not in dir(voxmma) or getattr(voxmma, n, None) is None]\n"
        "assert callable(voxmma.tune) and callable(voxmma.policy.apply_policy)\n"
        "found += [n for n in voxmma.nn.__all__ if not hasattr(voxmma.nn, n)]\n"
        "from voxmma.nn.modules.sparse_conv import SparseConv3d\n"
        "from voxmma.nn.functional.sparse_conv import spatially_sparse_conv"
    )
    assert found == []


def test_a_name_that_is_not_there(clean: Clean) -> None:
    assert clean("import voxmma; found = hasattr(voxmma, 'nothing_of_the_kind')") is False


def test_decorators_do_what_torch_compiler_does(clean: Clean) -> None:
    """voxmma._dynamo sets the attributes that torch's decorators set, without torch._dynamo."""
    found = clean(
        "from voxmma._dynamo import constant_result, eager\n"
        "def one(): pass\n"
        "def other(): pass\n"
        "constant_result(one); lean = 'torch._dynamo' not in sys.modules or 'torch._dynamo' in before\n"
        "torch.compiler.assume_constant_result(other)\n"
        "def count(x): return x + 1\n"
        "ours, theirs = vars(eager(count)), vars(torch.compiler.disable(count))\n"
        "found = [lean, sorted(vars(one)) == sorted(vars(other)), ours['_torchdynamo_disable'] is True,\n"
        "         theirs['_torchdynamo_disable'] is True]"
    )
    assert found == [True, True, True, True]


def test_the_command_names_the_extra_it_needs(clean: Clean) -> None:
    found = clean(
        "sys.modules['typer'] = None\n"
        "from voxmma.__main__ import main\n"
        "try:\n    main()\n"
        "except SystemExit as exit:\n    found = exit.code"
    )
    assert "typer" in found and "pip install 'voxmma[cli]'" in found


def test_environment_is_read_at_import(clean: Clean) -> None:
    found = clean(
        "os.environ['VOXMMA_USE_FP16_ACCUM'] = 'True'\n"
        "import voxmma; found = [voxmma.get_fp16_accum(), voxmma.resolve_fp16_accum(None, torch.float32)]"
    )
    assert found == [True, [True, "environment"]]


def test_bad_environment_is_an_error_at_import(clean: Clean) -> None:
    with pytest.raises(AssertionError, match=r"VOXMMA_USE_FP16_ACCUM='on'.*true, false, 1 or 0"):
        clean("os.environ['VOXMMA_USE_FP16_ACCUM'] = 'on'; import voxmma; found = None")
