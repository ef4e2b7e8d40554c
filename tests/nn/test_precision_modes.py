"""Promoted fp16 accumulators, fp32 on tensor cores, and the machine code behind the tile table."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

import voxmma
from voxmma.dispatch.selection import card
from voxmma.nn import SparseConv3d
from voxmma.nn.functional import spatially_sparse_conv
from voxmma.ops import formats
from voxmma.ops.kernels import CHUNKS, Tile, compiled
from voxmma.verify import accuracy
from voxmma.verify.families import FAMILIES

from conftest import random_coords

CPU = torch.device("cpu")


def scene(device: torch.device, n: int = 300) -> voxmma.Voxels:
    size = 20_000 if device.type == "cuda" else n
    coords = random_coords(size, 40 if device.type == "cuda" else 8, seed=3).to(device)
    return voxmma.Voxels(coords, torch.zeros(size, 1, device=device))


def draw(family: str, dtype: torch.dtype, n: int, c: int, c_out: int, device: torch.device) -> list[Tensor]:
    drawn = FAMILIES[family]
    g = torch.Generator().manual_seed(7)
    shapes = ((n, c), (27, c, c_out), (n, c_out))
    made = (drawn.activations, drawn.weights, drawn.gradients)
    return [make(shape, dtype, g, device) for make, shape in zip(made, shapes, strict=True)]


# ---- promoted accumulators ---------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("chunk", list(CHUNKS))
def test_cpu_rounds_every_chunk_of_an_offset(chunk: str, groups: int) -> None:
    """The emulation, written out once more: per offset and chunk a product rounded to fp16, added in fp32."""
    coords, c = random_coords(60, 5), 96
    x = torch.randint(-40, 41, (60, c * groups)).half() / 8  # products and sums exact in fp32
    w = torch.randint(-40, 41, (27, groups, c, 5)).half() / 8
    w = w if groups > 1 else w[:, 0]
    voxels = voxmma.Voxels(coords, x)
    out = spatially_sparse_conv(
        voxels, w, 3, groups=groups, accumulator=f"fp16_promoted:{chunk}", out_dtype=torch.float32
    )
    step = c if chunk == "offset" else int(chunk)
    expected = torch.zeros(60, groups, 5)
    grouped = w.view(27, groups, c, 5).float()
    for k, (rows, outs) in enumerate(voxmma.kernel_map(voxels.coord_set, 3).pairs()):
        taken = x[rows].view(-1, groups, c).float()
        for first in range(0, c, step):
            piece = torch.einsum("pgc,gco->pgo", taken[..., first : first + step],
                                 grouped[k, :, first : first + step])  # fmt: skip
            expected[outs] += piece.half().float()
    assert torch.equal(out.feats, expected.flatten(1))
    record = voxmma.explain(out)
    assert (record.accumulator, record.chunk) == ("fp16_promoted", CHUNKS[chunk])
    assert record.requested == f"fp16_promoted:{chunk}" and record.decided_by == "module"
    assert record.tile == record.dgrad_tile == ("cpu_poff" if chunk == "offset" else f"cpu_p{chunk}")
    assert record.wgrad_tile == "cpu" and f"fp16_promoted:{chunk} accumulator" in str(record)


@pytest.mark.parametrize("chunk", list(CHUNKS))
def test_promoted_error_does_not_grow_with_channels(device: torch.device, chunk: str) -> None:
    """Forward and dgrad within the bound, within twice the fp16 output floor, and flat from C = 32 to 256."""
    voxels = scene(device)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    seen: dict[str, list[float]] = {"forward": [], "dgrad": []}
    plain = []
    for c in (32, 256):
        x, w, dy = draw("signed", torch.float16, voxels.num_voxels, c, c, device)
        x.requires_grad_()
        out = spatially_sparse_conv(voxels.with_feats(x), w, 3, accumulator=f"fp16_promoted:{chunk}")
        record = voxmma.explain(out)
        assert (record.accumulator, record.chunk) == ("fp16_promoted", CHUNKS[chunk]), record
        (dx,) = torch.autograd.grad(out.feats, x, dy)
        arch = accuracy.arch_of(device)
        limit = accuracy.bound(
            "fp16_promoted", 27 * c, x.dtype, x.dtype, arch, offsets=27, chunk=CHUNKS[chunk]
        )
        references = {
            "forward": (out.feats, accuracy.reference_conv(x.detach(), w, pairs, len(x))),
            "dgrad": (dx, accuracy.reference_dgrad(dy, w, pairs, len(x))),
        }
        for what, (got, (y64, abs64)) in references.items():
            errors = accuracy.errors(got.detach(), y64, abs64, limit.floor)
            assert errors.within(limit), (what, errors, limit)
            floor = accuracy.errors(y64.half(), y64, abs64).rel_l2
            if CHUNKS[chunk] == 32 or device.type == "cpu":  # longer chunks round more often on a GPU
                assert errors.rel_l2 < 2 * floor, (what, c, errors, floor)
            seen[what].append(errors.rel_l2)
        narrow = spatially_sparse_conv(voxels.with_feats(x.detach()), w, 3, accumulator="fp16").feats
        plain.append(accuracy.errors(narrow, *references["forward"][1]).rel_l2)
    for small, large in seen.values():
        assert large < 1.5 * small
    assert plain[1] > 1.3 * seen["forward"][1]  # what an accumulator that is never promoted shows


def test_promoted_requests_are_checked_and_explained() -> None:
    x = voxmma.Voxels(random_coords(40, 5), torch.randn(40, 8))
    with pytest.raises(ValueError, match="contradicts use_fp16_accum=False"):
        SparseConv3d(8, 8, 3, accumulator="fp16_promoted:32", use_fp16_accum=False)
    with pytest.raises(ValueError, match="accumulator must be one of"):
        SparseConv3d(8, 8, 3, accumulator="fp16_promoted:48")
    with pytest.raises(ValueError, match="leave it out"):
        SparseConv3d(8, 8, 3, accumulator="fp64")
    conv = SparseConv3d(8, 8, 3, accumulator="fp16_promoted:32", use_fp16_accum=True)
    record = voxmma.explain(conv(x))
    assert record.accumulator == "fp32" and record.chunk == 0 and "never become fp16" in record.reason
    assert "fp16_promoted:32" in repr(conv)
    half = voxmma.explain(conv.half()(x.half()))
    voxmma.set_fp16_accum(False)
    assert voxmma.explain(conv(x.half())) == half  # the layer is above the run-time setting
    for tile, accumulator in (("cpu", "fp16_promoted"), ("cpu_p64", "fp16"), ("cpu_tf32", "fp32")):
        kmap = voxmma.kernel_map(x.coord_set, 3).tensors
        w = torch.randn(27, 8, 8).half()
        with pytest.raises(RuntimeError, match=f"tile='{tile}'"):
            torch.ops.voxmma.conv(
                x.feats.half(), w, None, kmap, [], 40, True, False, accumulator, tile, "", "", None
            )


def test_compiled_and_audited_promotion(device: torch.device) -> None:
    conv = SparseConv3d(16, 8, 3, accumulator="fp16_promoted:32").to(device).half()
    x = voxmma.Voxels(random_coords(80, 6).to(device), torch.randn(80, 16, device=device).half())
    with voxmma.audit() as log:
        eager = conv(x)
        eager.feats.float().sum().backward()
    assert [(launch.op, launch.chunk) for launch in log if launch.op == "fprop"] == [("fprop", 32)]
    assert {launch.chunk for launch in log if launch.op == "wgrad"} == {0}
    assert log[0].layer == voxmma.explain(eager).layer and "promoted every 32" in str(log[0])
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    traced = compiled(x)
    assert torch.equal(traced.feats, eager.feats) and voxmma.explain(traced) == voxmma.explain(eager)
    with voxmma.audit() as log:
        assert torch.equal(compiled(x).feats, eager.feats)
    assert [(launch.op, launch.chunk) for launch in log] == [("fprop", 32)]


def test_compiled_layers_of_other_channels(device: torch.device) -> None:
    """Layers share the code that torch.compile sees, which may take channels for variable: one graph."""
    coords = random_coords(60, 6).to(device)
    for channels in (4, 16, 8, 12):
        conv = SparseConv3d(channels, 8, 3, accumulator="fp16_promoted:32").to(device).half()
        x = voxmma.Voxels(coords, torch.randn(60, channels, device=device).half())
        voxmma.kernel_map(x.coord_set, 3)
        expected = conv(x)
        compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x).feats, expected.feats)


# ---- fp32 --------------------------------------------------------------------------------------------------


def subnormal_loss(tile: str, length: int, *operands: torch.Tensor) -> float:
    """What a 3xTF32 cell of `length` products may lose near fp32's smallest numbers (csrc/conv/fprop_f32.cu).

    TF32 has no bits below 2^-136, so a product of a and b is off by at most 2^-136 (|a| + |b|).
    """
    if not tile.endswith("_3xtf32"):
        return 0.0
    return 2.0**-135 * length * max(float(t.abs().max()) for t in operands)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("c", [32, 64])
def test_tf32_rounds_to_nearest_and_ieee_does_not_round(device: torch.device, family: str, c: int) -> None:
    voxels = scene(device)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    x, w, dy = draw(family, torch.float32, voxels.num_voxels, c, c, device)
    n, rows = len(x), max(len(a) for a, _ in pairs)
    for precision in ("ieee", "tf32"):
        with voxmma.settings.override(fp32_precision=precision):
            xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
            out = spatially_sparse_conv(voxels.with_feats(xs), ws, 3)
        record = voxmma.explain(out)
        tf32 = record.tile.endswith("_tf32")
        assert tf32 == (precision == "tf32" and (device.type == "cpu" or "no tf32" not in record.reason))
        dx, dw = torch.autograd.grad(out.feats, (xs, ws), dy)
        wanted = (
            (record.tile, out.feats.detach(), 27 * c, 27, accuracy.reference_conv, (x, w, pairs, n)),
            (record.dgrad_tile, dx, 27 * c, 27, accuracy.reference_dgrad, (dy, w, pairs, n)),
            (record.wgrad_tile, dw, rows, 1, accuracy.reference_wgrad, (x, dy, pairs)),
        )
        for tile, got, length, offsets, reference, (a, b, *rest) in wanted:
            read = "tf32" if tile.endswith("_tf32") else "fp32"  # of a small card's weight gradient: fp32
            if read == "tf32":
                a, b = formats.round_tf32(a), formats.round_tf32(b)
            y64, abs64 = reference(a, b, *rest)
            limit = accuracy.bound("fp32", length, read, "fp32",
                                   accuracy.arch_of(device), offsets=offsets)  # fmt: skip
            floor = limit.floor + subnormal_loss(tile, length, x, w, dy)
            errors = accuracy.errors(got, y64, abs64, floor)
            assert errors.within(limit), (precision, record, errors, limit)


def test_tf32_shows_its_rounding() -> None:
    """A lower bound: results without rounded operands would be far closer to fp64."""
    voxels = scene(CPU)
    x, w, _ = draw("signed", torch.float32, 300, 64, 64, CPU)
    y64, abs64 = accuracy.reference_conv(x, w, voxmma.kernel_map(voxels.coord_set, 3).pairs(), 300)
    ieee = spatially_sparse_conv(voxels.with_feats(x), w, 3)
    assert voxmma.explain(ieee).tile == "cpu" and accuracy.errors(ieee.feats, y64, abs64).rel_l2 < 2e-6
    voxmma.set_fp32_precision("tf32")
    tf32 = spatially_sparse_conv(voxels.with_feats(x), w, 3)
    assert voxmma.explain(tf32).tile == "cpu_tf32"
    assert 1e-4 < accuracy.errors(tf32.feats, y64, abs64).rel_l2 < 1e-3
    half = spatially_sparse_conv(voxels.with_feats(x.half()), w, 3)
    assert voxmma.explain(half).tile == "cpu"


@pytest.mark.gpu
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_3xtf32_is_as_exact_as_plain_fmas(family: str) -> None:
    """Forward and both gradients: rel-L2 no larger than that of plain FMAs, on every input family."""
    device = torch.device("cuda", 0)
    plain = {"fprop": "simt_f32", "wgrad": "simt_f32_wgrad"}
    fitting = [tile for tile in compiled() if tile.scheme == "3xtf32" and tile.runs_on(card(device))]
    if not fitting:
        pytest.skip("no 3xTF32 tile of this build runs here")
    split = {**plain, **{tile.op: tile.name for tile in fitting}}
    voxels = scene(device)
    pairs = voxmma.kernel_map(voxels.coord_set, 3).pairs()
    x, w, dy = draw(family, torch.float32, voxels.num_voxels, 64, 64, device)
    references = {
        "fwd": (accuracy.reference_conv(x, w, pairs, len(x)), 27 * 64),
        "dgrad": (accuracy.reference_dgrad(dy, w, pairs, len(x)), 27 * 64),
        "wgrad": (accuracy.reference_wgrad(x, dy, pairs), max(len(rows) for rows, _ in pairs)),
    }
    found: dict[str, list[accuracy.Errors]] = {op: [] for op in references}
    for names in (split, plain):
        modes = {f"{op}_algo_mode": names["wgrad" if op == "wgrad" else "fprop"] for op in references}
        with voxmma.settings.override(**modes):
            xs, ws = x.clone().requires_grad_(), w.clone().requires_grad_()
            out = spatially_sparse_conv(voxels.with_feats(xs), ws, 3)
            results = (out.feats.detach(), *torch.autograd.grad(out.feats, (xs, ws), dy))
        record = voxmma.explain(out)
        assert [record.tile, record.dgrad_tile, record.wgrad_tile] == list(modes.values())
        for (op, ((y64, abs64), length)), got in zip(references.items(), results, strict=True):
            found[op].append(accuracy.errors(got, y64, abs64))
            worst = float((got.double() - y64).abs().max())
            if family == "subnormal" and names is split and op != "dgrad":  # of gradients and weights
                assert worst <= subnormal_loss(names["fprop"], length, x, w, dy), (op, worst)
    for op, (tensor, fma) in found.items():
        if family != "subnormal" or op == "dgrad":  # there TF32's missing bits show, within the bound above
            assert tensor.nonfinite == 0 and tensor.rel_l2 <= 1.05 * fma.rel_l2 + 1e-12, (op, tensor, fma)


# ---- the machine code --------------------------------------------------------------------------------------

_MMA = re.compile(r"\b(HMMA|HGMMA)\.[\w.]+")


def accumulator_types(instructions: set[str]) -> set[str]:
    """'F16' or 'F32' of each matrix instruction: HMMA.16816.F16 and HGMMA.64x64x16.F32.BF16 say it first."""
    found = set()
    for text in instructions:
        found.add(next(part for part in text.split(".") if part in ("F16", "F32")))
    return found


def test_accumulator_types_are_read_from_the_mnemonic() -> None:
    assert demangled("_ZN6voxmma3fooIfEEvi") == "void voxmma::foo<float>(int)"
    lines = (
        "/*0a10*/ HMMA.16816.F32 R4, R8, R12, R4 ;\n/*0a20*/ HMMA.16816.F32.BF16 R4, R8, R12, R4 ;\n"
        "/*0a30*/ HMMA.16816.F16 R4, R8, R12, R4 ;\n/*0a40*/ HGMMA.64x64x16.F16 R24, R8, gdesc[UR4], R24 ;"
    )
    found = [match.group() for match in _MMA.finditer(lines)]
    assert [accumulator_types({text}) for text in found] == [{"F32"}, {"F32"}, {"F16"}, {"F16"}]


@pytest.fixture(scope="module")
def kernels() -> dict[tuple[str, str], set[str]]:
    """The matrix instructions in this build's machine code, by (kernel, architecture)."""
    kernels = Path(voxmma._C.__file__).parents[1] / "libvoxmma_kernels.so"  # of an installed package
    tool = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    if not Path(tool).exists():
        pytest.skip("cuobjdump is not installed here")
    done = subprocess.run(
        [tool, "-sass", kernels if kernels.exists() else voxmma._C.__file__],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    found: dict[tuple[str, str], set[str]] = {}
    arch = name = ""
    for line in done.stdout.splitlines():
        if "arch = " in line:
            arch = line.split("=")[1].strip()
        elif "Function : " in line:
            name = demangled(line.split(":")[1].strip())
        elif match := _MMA.search(line):
            found.setdefault((name, arch), set()).add(match.group())
    return found


def accumulator_of(kernel: str) -> str:
    """'F16' or 'F32': what the template arguments in a convolution kernel's name say it accumulates in."""
    if "wgrad" in kernel:
        return "F32"
    if match := re.search(r"FpropSm80<\(voxmma::DType\)\d, \(voxmma::Accum\)(\d)", kernel):
        return {"0": "F32", "1": "F16", "2": "F16"}[match[1]]
    match = re.search(r"FpropConfig<[\w:]+, ([\w:]+),", kernel)
    assert match is not None, f"what {kernel} accumulates in is not known"
    return {"float": "F32", "cutlass::half_t": "F16"}[match[1]]


def test_template_arguments_are_read_from_the_name() -> None:
    sm80 = "void voxmma::fprop_sm80_kernel<voxmma::FpropSm80<(voxmma::DType)0, (voxmma::Accum){}, 64> >(int)"
    sm90 = "void voxmma::sm90::fprop_kernel<voxmma::sm90::FpropConfig<cutlass::half_t, {}, 64, 32> >(int)"
    assert [accumulator_of(sm80.format(i)) for i in range(3)] == ["F32", "F16", "F16"]
    assert [accumulator_of(sm90.format(t)) for t in ("float", "cutlass::half_t")] == ["F32", "F16"]
    with pytest.raises(AssertionError, match="is not known"):
        accumulator_of("void voxmma::fprop_new_kernel<int>(int)")


@pytest.mark.slow
@pytest.mark.skipif(not voxmma._C.HAS_CUDA, reason="voxmma was built without CUDA")
def test_machine_code_accumulates_as_the_names_of_its_kernels_say(
    kernels: dict[tuple[str, str], set[str]],
) -> None:
    """Without a GPU: no convolution kernel multiplies into another accumulator, and none is missing."""
    checked: dict[tuple[str, str], set[str]] = {}
    for (name, arch), codes in kernels.items():
        if "fprop" not in name and "wgrad" not in name:
            continue  # the MMA probe has one of each
        expected = accumulator_of(name)
        assert accumulator_types(codes) == {expected}, (name, arch, codes)
        checked.setdefault(("wgrad" if "wgrad" in name else "fprop", expected), set()).add(name)
    for op in ("fprop", "wgrad"):
        for kind, names in (("F32", ("fp32",)), ("F16", ("fp16", "fp16_promoted"))):
            tiles = [t for t in compiled() if t.op == op and t.accum in names and t.atom != "SIMT"]
            assert len(checked.get((op, kind), ())) >= len(tiles), (op, kind, checked.get((op, kind)))


@pytest.mark.gpu
def test_machine_code_has_the_accumulators_of_the_table(kernels: dict[tuple[str, str], set[str]]) -> None:
    """Every kernel that a tile's launcher can start uses matrix instructions of the table's accumulator only.

    Kernels are told apart by what the profiler sees each tile launch.
    """
    here = card(torch.device("cuda", 0))
    checked = 0
    for tile in compiled():
        if tile.atom == "SIMT" or not tile.runs_on(here):
            continue
        launched = _kernels_of(tile)
        codes = [codes for (name, _), codes in kernels.items() if name in launched]
        assert codes, f"no matrix instruction in what {tile.name} launches: {launched}"
        expected = "F16" if tile.accum.startswith("fp16") else "F32"
        for code in codes:
            assert accumulator_types(code) == {expected}, (tile.name, code)
        checked += 1
    assert checked


def _kernels_of(tile: Tile) -> set[str]:
    """Names of the kernels that one call of a tile launches."""
    from torch.profiler import ProfilerActivity, profile

    dtype = formats.DTYPES[tile.input]
    device = torch.device("cuda", 0)
    voxels = scene(device)
    kmap = voxmma.kernel_map(voxels.coord_set, 3)
    n = voxels.num_voxels
    x = torch.randn(n, 64, device=device).to(dtype)
    w = torch.randn(27, 64, 64, device=device).to(dtype)

    def run() -> None:
        if tile.op == "wgrad":
            torch.ops.voxmma.conv_wgrad(x, x, kmap.tensors, [], 27, 1, True, "fp32", tile.name, "", None)
        else:
            torch.ops.voxmma.conv(
                x, w, None, kmap.tensors, [], n, True, False, tile.accum, tile.name, "", "", None
            )

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        run()
        torch.cuda.synchronize()
    return {event.name for event in trace.events()}


def demangled(name: str) -> str:
    """A C++ symbol as the profiler prints it, which asks the same function of the C++ runtime."""
    runtime = ctypes.CDLL("libstdc++.so.6")
    runtime.__cxa_demangle.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = runtime.__cxa_demangle(name.encode(), None, None, ctypes.byref(status))
    return ctypes.cast(text, ctypes.c_char_p).value.decode() if status.value == 0 else name  # type: ignore[union-attr]
