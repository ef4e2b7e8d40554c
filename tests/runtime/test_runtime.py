"""libvoxmma: engines without Python give what Python's give, and what is wrong is a code and a sentence."""

from __future__ import annotations

import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import voxmma
from voxmma import models
from voxmma import nn as vnn
from voxmma.data.scenes import load_scan
from voxmma.engine import Points, compile, file, save
from voxmma.nn import functional as F

from conftest import random_coords
from libvoxmma import ROOT, Library, Loaded, RuntimeFault, build, cuda_options, kernels, run, tool

Device = torch.device


@pytest.fixture
def library(device: Device) -> Library:
    return _library(device.type)


_LIBRARIES: dict[str, Library] = {}


def _library(kind: str) -> Library:
    if kind not in _LIBRARIES:
        if kind == "cuda" and kernels() is None:
            pytest.skip("setup.py has built no kernel library here")
        options = cuda_options() if kind == "cuda" else []
        programs = ("voxmma", "run_engine", "capi")
        made = build(kind, *options, "-DVOXMMA_EXAMPLES=ON", "-DVOXMMA_TESTS=ON", targets=programs)
        _LIBRARIES[kind] = Library(made)
    return _LIBRARIES[kind]


def folder(library: Library) -> Path:
    return Path(library.c._name).parent


def trained(net: nn.Module, device: Device, dtype: torch.dtype, exact: bool) -> nn.Module:
    """A network in evaluation whose activations keep their size.

    `exact`: every output channel has two weights, 1 or -1, so that sums are those of integers, exact in fp32
    and the same in any order.
    """
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in (*net.named_parameters(), *net.named_buffers()):
            if not value.is_floating_point():
                continue
            noise = torch.randn(value.shape, generator=generator)
            if value.dim() > 1 and exact:
                signs = noise.sign().flatten(0, -2)
                picked = torch.rand(signs.shape, generator=generator).topk(min(2, len(signs)), 0).indices
                noise = torch.zeros_like(signs).scatter(0, picked, signs.gather(0, picked)).view(value.shape)
            elif value.dim() > 1:
                noise *= (2 / value[..., 0].numel()) ** 0.5 * 2
            elif name.endswith("var"):
                noise = torch.ones(value.shape) if exact else noise.abs() + 0.5
            elif exact:
                noise = torch.ones(value.shape) if name.endswith("weight") else noise.round()
            else:
                noise = 1 + 0.1 * noise if name.endswith("weight") else 0.2 * noise
            value.copy_(noise)
        for module in net.modules():
            if exact and isinstance(module, vnn.BatchNorm):
                module.eps = 0.0
    return net.to(device, dtype).eval()


def frame(
    n: int, device: Device, dtype: torch.dtype = torch.float32, seed: int = 1, channels: int = 4
) -> Any:
    """(coords, feats) of two samples; features are small integers."""
    coords = random_coords(n, 14, 2, seed).to(device)
    generator = torch.Generator().manual_seed(seed)
    feats = torch.randint(-2, 3, (n, channels), generator=generator).to(device, dtype)
    return coords, feats


class Others(nn.Module):
    """What the runtime knows beside the operators of the models."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = vnn.SparseConv3d(6, 20, 3, groups=2)
        self.grow = vnn.SparseConvTranspose3d(20, 8, 2, stride=2, generative=True)
        self.bounded = vnn.SparseConv3d(20, 12, 3, stride=2, padding=1)

    def forward(self, x: voxmma.Voxels) -> tuple[Any, ...]:
        y = self.wide(x)
        low = F.max_pool(y, 2)
        low = F.add(low, F.avg_pool(low, 3, 1))
        up = F.unpool(low, 2)
        both = F.relu(F.cat(y, up))
        dense = self.bounded(low).dense((9, 9, 9), origin=(-1, -1, -1))
        return both, self.grow(low), dense.flatten(1, 2), low.coords


class Rows(nn.Module):
    """torch's layers on rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.flat = vnn.Linear(4, 24), nn.Linear(24, 24, bias=False)
        self.norm, self.conv = vnn.BatchNorm(24), vnn.SparseConv3d(24, 8, 3)

    def forward(self, x: voxmma.Voxels) -> tuple[Any, ...]:
        y = F.relu(self.norm(self.linear(x)))
        y = y.with_feats(self.flat(y.feats) * torch.sigmoid(y.feats))
        feats = y.feats
        for function in (nn.functional.leaky_relu, nn.functional.gelu, nn.functional.silu):
            feats = feats + function(feats)
        return y, self.conv(y), feats


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "second": (lambda: models.SECONDBackbone(4), 4),
    "unet": (
        lambda: models.SparseUNet(
            4, 5, channels=(16, 32, 32, 16), blocks=(1, 1, 1, 1), stem_channels=16, stem_kernels=(3,)
        ),
        4,
    ),
    "resnet": (lambda: models.ResNet21D(4, width=0.5), 4),
    "others": (Others, 6),
}


def flat(value: Any) -> list[Any]:
    return [leaf for part in value for leaf in flat(part)] if isinstance(value, list | tuple) else [value]


def agree(loaded: Loaded, given: Any, wanted: Any, exact: bool) -> None:
    """A frame's results are those of Python's engine: coordinates and, with `exact`, all bits."""
    loaded.run(given, stream=stream_of(given[0].device))
    assert loaded.status().code == 0
    leaves = flat(wanted)
    assert len(leaves) == loaded.info.outputs
    for i, leaf in enumerate(leaves):
        coords, data = loaded.read(i)
        if isinstance(leaf, voxmma.Voxels):
            assert coords is not None and torch.equal(coords, leaf.coords.cpu())
            assert tuple(loaded.outputs[i].stride) == leaf.stride
            leaf = leaf.feats
        leaf = leaf.cpu()
        assert data.dtype == leaf.dtype and data.shape == leaf.shape
        if exact or not leaf.is_floating_point():
            assert torch.equal(data, leaf)
        elif leaf.numel():
            limit = {torch.float32: 1e-5, torch.float64: 1e-13}.get(leaf.dtype, 4e-3)
            assert float((data.double() - leaf.double()).norm()) <= limit * float(leaf.double().norm())


def stream_of(device: Device) -> int | None:
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("second", torch.float32), ("second", torch.float16),
        ("unet", torch.float32), ("unet", torch.float16),
        ("resnet", torch.float32), ("resnet", torch.bfloat16), ("others", torch.float32),
        ("others", torch.float16), ("others", torch.bfloat16), ("others", torch.float64),
    ],
)  # fmt: skip
def test_frames_are_those_of_pythons_engine(
    name: str, dtype: torch.dtype, device: Device, library: Library, tmp_path: Path
) -> None:
    """Bit for bit on a GPU. On a CPU torch's products may add the channels in another order: bits are equal
    where sums are exact, else their rounding may differ."""
    make, channels = NETWORKS[name]
    for exact in (True, False):
        net = trained(make(), device, dtype, exact)
        first = frame(700, device, dtype, channels=channels)
        engine = compile(
            net, voxmma.Voxels(*first, batch_size=2), capacity=900, check_finite=name == "resnet"
        )
        save(engine, tmp_path / "net.engine")
        with library.load(tmp_path / "net.engine") as loaded:
            assert bool(loaded.info.cuda) == (device.type == "cuda") and loaded.info.inputs == 1
            for n in (700, 3, 0, 900):
                given = frame(n, device, dtype, seed=n, channels=channels)
                wanted = engine(given).get()
                agree(loaded, given, wanted, exact or device.type == "cuda")


@pytest.mark.parametrize("accumulator", ["fp16", "fp16_promoted:32"])
def test_half_sums(accumulator: str, device: Device, library: Library, tmp_path: Path) -> None:
    """Sums of integers below 2048 are exact in fp16, too."""
    net = trained(
        vnn.SparseConv3d(40, 8, 3, bias=False, accumulator=accumulator), device, torch.float16, True
    )
    given = frame(500, device, torch.float16, channels=40)
    engine = compile(net, voxmma.Voxels(*given, batch_size=2))
    save(engine, tmp_path / "net.engine")
    with library.load(tmp_path / "net.engine") as loaded:
        agree(loaded, given, engine(given).get(), True)


def test_without_a_graph_and_with_the_callers_memory(
    device: Device, library: Library, tmp_path: Path
) -> None:
    net = trained(models.SECONDBackbone(4), device, torch.float32, False)
    given = frame(300, device)
    engine = compile(net, voxmma.Voxels(*given, batch_size=2))
    save(engine, tmp_path / "net.engine")
    taken: dict[int, torch.Tensor] = {}

    def allocate(context: Any, size: int) -> int:
        block = torch.empty(size + 256, dtype=torch.uint8, device=device)
        address = -(-block.data_ptr() // 256) * 256
        taken[address] = block
        return address

    def release(context: Any, memory: int) -> None:
        del taken[memory]

    options = library.options()
    options.graph = 0
    options.allocator.allocate = options.allocator.ALLOCATE(allocate)
    options.allocator.release = options.allocator.RELEASE(release)
    with library.load(tmp_path / "net.engine", options) as loaded:
        assert sum(block.numel() - 256 for block in taken.values()) >= loaded.info.memory > 0
        agree(loaded, given, engine(given).get(), device.type == "cuda")
    assert not taken
    options.allocator.allocate = options.allocator.ALLOCATE(lambda context, size: 0)
    with pytest.raises(RuntimeFault, match=r"ERROR_MEMORY: .* bytes"):
        library.load(tmp_path / "net.engine", options)
    calls = iter((True, False))  # the second is refused: the first is given back
    options.allocator.allocate = options.allocator.ALLOCATE(
        lambda context, size: allocate(context, size) if next(calls) else 0
    )
    with pytest.raises(RuntimeFault, match="ERROR_MEMORY"):
        library.load(tmp_path / "net.engine", options)
    assert not taken


def test_a_number_of_rows_that_the_device_knows(device: Device, library: Library, tmp_path: Path) -> None:
    net = trained(models.SECONDBackbone(4), device, torch.float32, True)
    coords, feats = frame(300, device)
    engine = compile(net, voxmma.Voxels(coords, feats, batch_size=2))
    save(engine, tmp_path / "net.engine")
    coords[200:] = coords[0]  # behind the rows: nobody looks
    with library.load(tmp_path / "net.engine") as loaded:
        for n in (200, 0, 17):
            wanted = engine((coords[:n], feats[:n])).get()
            loaded.run((coords, feats), stream=stream_of(device), count=torch.tensor([n], device=device))
            loaded.status()
            assert loaded.rows(0) == n
            for i, leaf in enumerate(wanted):
                got, data = loaded.read(i)
                assert got is not None and torch.equal(got, leaf.coords.cpu())
                assert torch.equal(data, leaf.feats.cpu())


def test_faults_of_a_frame(device: Device, library: Library, tmp_path: Path) -> None:
    net = trained(NETWORKS["others"][0](), device, torch.float32, True)
    coords, feats = frame(300, device, channels=6)
    engine = compile(
        net, voxmma.Voxels(coords, feats, batch_size=2), check_finite=True, bounds=(0, 0, 0, 13, 13, 13)
    )
    save(engine, tmp_path / "net.engine")

    def faulty(row: int, values: list[int]) -> Any:
        wrong = coords.clone()
        wrong[row] = torch.tensor(values, dtype=torch.int32, device=device)
        return wrong, feats

    full = frame(310, device, channels=6, seed=5)
    dense = torch.cartesian_prod(torch.arange(1), *3 * [torch.arange(0, 14, 2)]).int().to(device)
    sparse = dense, feats[:1].expand(len(dense), 6).contiguous()
    bad = feats.clone()
    bad[7, 2] = torch.inf
    with library.load(tmp_path / "net.engine") as loaded:

        def fault(given: Any) -> RuntimeFault:
            loaded.run(given, stream=stream_of(device))
            with pytest.raises(RuntimeFault) as caught:
                loaded.status()
            with pytest.raises(RuntimeFault, match="ERROR_ARGUMENT: the status of the last frame"):
                loaded.rows(0)
            return caught.value

        for row, values in ((4, [0, 14, 0, 0]), (0, [2, 1, 1, 1]), (299, [0, 0, -1, 0]), (9, [-1, 0, 0, 0])):
            found = fault(faulty(row, values))
            assert found.code == "FRAME_BOUNDS" and found.frame.row == row and found.frame.level == 0
            assert f"coords row {row} is outside of the engine's bounds" in str(found)
        found = fault(faulty(200, coords[30].tolist()))
        assert found.code == "FRAME_DUPLICATE" and (found.frame.row, found.frame.twin) == (200, 30)
        found = fault((coords, bad))
        assert found.code == "FRAME_FINITE" and found.frame.row == 7
        agree(loaded, full, engine(full).get(), True)  # the engine is none the worse
    small = compile(
        net, voxmma.Voxels(*frame(40, device, channels=6), batch_size=2), capacity=len(dense), levels={1: 41}
    )
    save(small, tmp_path / "small.engine")
    with library.load(tmp_path / "small.engine") as loaded:
        loaded.run(sparse)
        with pytest.raises(RuntimeFault, match=r"level 1 needs .* rows, its capacity is 41") as caught:
            loaded.status()
        assert caught.value.code == "FRAME_CAPACITY" and caught.value.frame.level == 1
        assert caught.value.frame.needed > caught.value.frame.capacity == 41


def test_voxels_outside_of_the_dense_grid(device: Device, library: Library, tmp_path: Path) -> None:
    net = lambda x: x.dense((8, 8, 8))  # noqa: E731
    inside = torch.cartesian_prod(torch.arange(2), *3 * [torch.arange(4)]).int().to(device)
    feats = torch.randn(len(inside), 3, device=device)
    engine = compile(net, voxmma.Voxels(inside, feats, batch_size=2), bounds=(0, 0, 0, 15, 15, 15))
    save(engine, tmp_path / "net.engine")
    with library.load(tmp_path / "net.engine") as loaded:
        loaded.run((inside, feats))
        loaded.status()
        out = loaded.output(0)
        shape, strides = list(loaded.outputs[0].shape[:5]), list(out.strides[:5])
        assert shape == [2, 3, 8, 8, 8] and strides == [1536, 1, 192, 24, 3]
        with pytest.raises(RuntimeFault, match="ERROR_UNSUPPORTED: result 0 is not contiguous"):
            loaded.read(0)
        outside = inside.clone()
        outside[5, 2] = 8
        loaded.run((outside, feats))
        with pytest.raises(RuntimeFault) as caught:
            loaded.status()
        assert caught.value.code == "FRAME_DENSE" and caught.value.frame.row == 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("samples", [1, 2])
def test_points(samples: int, dtype: torch.dtype, device: Device, library: Library, tmp_path: Path) -> None:
    """Voxels of points have the bits of Python's, means of real numbers, too."""
    net = trained(vnn.SparseConv3d(5, 8, 3, stride=2), device, dtype, True)
    both = lambda x: (net(x), x)  # noqa: E731

    def points(n: int, seed: int) -> tuple[Any, Points]:
        generator = torch.Generator().manual_seed(seed)
        where = (3 * torch.rand(n, 3, generator=generator) - 1).to(device)
        feats = torch.randn(n, 5, generator=generator).to(device, dtype)
        batch = torch.randint(samples, (n,), generator=generator).to(device)
        given = (where, feats, batch) if samples > 1 else (where, feats)
        index = batch if samples > 1 else None
        return given, Points(where, feats, 0.3, index, samples, origin=(0.1, 0.0, 0.2))

    engine = compile(both, points(900, 1)[1], capacity=1000)
    save(engine, tmp_path / "net.engine")
    with library.load(tmp_path / "net.engine") as loaded:
        assert loaded.inputs[0].kind == 2 and loaded.inputs[0].point_dtype == 2
        for n in (900, 1, 0, 1000):
            given, of_python = points(n, n)
            wanted = engine(of_python).get()
            loaded.run(given, stream=stream_of(device))
            loaded.status()
            coords, feats = loaded.read(1)
            assert torch.equal(coords, wanted[1].coords.cpu()) and torch.equal(feats, wanted[1].feats.cpu())
            assert torch.equal(loaded.read(0)[0], wanted[0].coords.cpu())
        for row, value in ((7, torch.nan), (3, 1e9), (5, 400.0)):
            given, _ = points(50, 2)
            given[0][row, 1] = value
            loaded.run(given, stream=stream_of(device))
            with pytest.raises(RuntimeFault) as caught:
                loaded.status()
            assert caught.value.code == "FRAME_POINTS" and caught.value.frame.row == row
        agree_points, of_python = points(80, 3)
        loaded.run(agree_points, stream=stream_of(device))  # the engine is none the worse
        loaded.status()
        assert torch.equal(loaded.read(1)[1], engine(of_python).get()[1].feats.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_layers_on_rows(dtype: torch.dtype, device: Device, library: Library, tmp_path: Path) -> None:
    """What torch computes may round otherwise, on a GPU as well."""
    net = trained(Rows(), device, dtype, False)
    engine = compile(net, voxmma.Voxels(*frame(300, device, dtype), batch_size=2))
    save(engine, tmp_path / "net.engine")
    with library.load(tmp_path / "net.engine") as loaded:
        for n in (300, 1):
            given = frame(n, device, dtype, seed=n)
            agree(loaded, given, engine(given).get(), False)


# ---- files -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    device = torch.device("cpu")
    engine = compile(
        trained(models.SECONDBackbone(4), device, torch.float32, True),
        voxmma.Voxels(*frame(60, device), batch_size=2),
    )
    path: Path = tmp_path_factory.mktemp("saved") / "second.engine"
    save(engine, path)
    return path


@pytest.fixture
def second(saved: Path, tmp_path: Path) -> Path:
    """A file of a test's own."""
    return Path(shutil.copy(saved, tmp_path))


def edited(path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    head, tensors = file._read(path)
    sizes = [len(tensor) for tensor in tensors]
    change(head)
    made = path.with_name("edited.engine")
    file._write(made, head, map(bytes, tensors), sizes)
    return made


def _cuda_head(head: dict[str, Any]) -> None:
    head["machine"].update(device="cuda", card="Another", capability=[1, 0])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda head: head["machine"].update(voxmma="0.0.9"), "ERROR_VERSION: the engine is of voxmma 0.0.9"),
        (_cuda_head, "ERROR_DEVICE: the engine is for "),
        (lambda head: head["machine"].update(device="tpu"), "ERROR_UNSUPPORTED: engines for device 'tpu'"),
        (lambda head: head["steps"][3].__setitem__(0, "aten::mish.default"), "operator aten::mish"),
        (lambda head: head["steps"].pop(0), "ERROR_FORMAT: tensor . is read before it is made"),
        (lambda head: head["steps"].append(head["steps"][0]), "ERROR_FORMAT: tensor . is made twice"),
        (lambda head: head.pop("levels"), "ERROR_FORMAT: the head has no 'levels'"),
        (lambda head: head["capacities"].__setitem__(0, 1 << 40), "ERROR_FORMAT: .* for a number from 1 to"),
        (lambda head: head["capacities"].__setitem__(0, 3.5), "ERROR_FORMAT: the head is no JSON"),
        (lambda head: head["tensors"][0].__setitem__(1, [27, 4, 17]), "ERROR_FORMAT"),
        (lambda head: head["tensors"][0].__setitem__(0, "int16"), "ERROR_UNSUPPORTED: tensors of dtype"),
    ],
)  # fmt: skip
def test_engines_that_do_not_fit(change: Callable[[dict[str, Any]], Any], message: str, second: Path) -> None:
    with pytest.raises(RuntimeFault, match=message):
        _library("cpu").load(edited(second, change))


def test_files_of_another_format(second: Path) -> None:
    content = bytearray(second.read_bytes())
    content[8:12] = struct.pack("<I", 2)
    second.write_bytes(content)
    with pytest.raises(RuntimeFault, match=r"ERROR_VERSION: .* has format 2, this version reads 3"):
        _library("cpu").load(second)


@pytest.mark.slow
def test_damaged_files_under_sanitizers(second: Path, tmp_path: Path) -> None:
    """Cut and changed files and programs that lie: refused, or run without touching foreign memory."""
    built = build(
        "sanitized",
        "-DVOXMMA_SANITIZE=ON",
        "-DBUILD_SHARED_LIBS=OFF",
        "-DVOXMMA_TESTS=ON",
        "-DCMAKE_BUILD_TYPE=Debug",
    )
    assert "VXM_ERROR_FORMAT" in run(built / "tests" / "fuzz", second, tmp_path, "40")
    run(built / "tests" / "capi", second)


# ---- the programs ------------------------------------------------------------------------------------------


def write_voxels(path: Path, coords: torch.Tensor, feats: torch.Tensor) -> None:
    with path.open("wb") as out:
        out.write(struct.pack("<qq", *feats.shape))
        out.write(coords.cpu().contiguous().numpy().tobytes())
        out.write(feats.cpu().contiguous().view(torch.uint8).numpy().tobytes())


def read_results(path: Path, dtype: torch.dtype) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    data, at = bytearray(path.read_bytes()), 0

    def take(kind: torch.dtype, *shape: int) -> torch.Tensor:
        nonlocal at
        size = int(np.prod(shape)) * kind.itemsize
        made = torch.frombuffer(data[at : at + size] or bytearray(8), dtype=kind)[: int(np.prod(shape))]
        at += size
        return made.reshape(shape)

    while at < len(data):
        rows, channels = take(torch.int64, 2).tolist()
        yield take(torch.int32, rows, 4), take(dtype, rows, channels)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "real"])
def test_the_example_runs_second_on_the_shipped_scan(
    exact: bool, device: Device, library: Library, tmp_path: Path
) -> None:
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    scan = load_scan()
    feats = np.concatenate([scan.points.round(), scan.colors[:, :1] // 86], 1).astype(np.float32)
    voxels = voxmma.Voxels.from_points(
        [torch.from_numpy(scan.points).to(device)], [torch.from_numpy(feats).to(device)], voxel_size=0.1
    )
    voxels = voxels.with_feats(voxels.feats.round().to(dtype))
    engine = compile(trained(models.SECONDBackbone(4), device, dtype, exact), voxels)
    save(engine, tmp_path / "second.engine")
    write_voxels(tmp_path / "scan.voxels", voxels.coords, voxels.feats)
    program = folder(library) / "example" / "run_engine"
    said = run(program, tmp_path / "second.engine", tmp_path / "scan.voxels", tmp_path / "result", "2")
    assert said.count("frame of") == 2 and "result 4" in said
    wanted = engine(voxels).get()
    results = list(read_results(tmp_path / "result", dtype))
    assert len(results) == len(wanted) == 5
    for (coords, got), leaf in zip(results, wanted, strict=True):
        assert torch.equal(coords, leaf.coords.cpu())
        feats_of = leaf.feats.cpu()
        assert float(feats_of.abs().max()) > 0
        if exact or device.type == "cuda":
            assert torch.equal(got, feats_of)
        else:
            assert float((got - feats_of).norm()) < 1e-5 * float(feats_of.norm())
    (tmp_path / "scan.voxels").write_bytes(b"nothing")
    failed = subprocess.run(
        [program, tmp_path / "second.engine", tmp_path / "scan.voxels", tmp_path / "x"], capture_output=True
    )
    assert failed.returncode == 1 and b"holds no voxels" in failed.stderr


def test_an_installed_library_is_found_by_cmake(second: Path, tmp_path: Path) -> None:
    library = _library("cpu")
    run(tool("cmake"), "--install", folder(library), "--prefix", tmp_path / "prefix")
    run(
        tool("cmake"), "-S", ROOT / "examples" / "cpp", "-B", tmp_path / "example", "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}",
    )  # fmt: skip
    run(tool("cmake"), "--build", tmp_path / "example")
    write_voxels(tmp_path / "in", *frame(10, torch.device("cpu")))
    assert "result 4" in run(tmp_path / "example" / "run_engine", second, tmp_path / "in", tmp_path / "out")


def test_the_header_is_c99_and_calls_report(second: Path) -> None:
    library = _library("cpu")
    run(folder(library) / "tests" / "capi", second)
    assert library.c.vxm_voxmma_version().decode() == voxmma.__version__
