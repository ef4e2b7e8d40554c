"""Unmodified networks of other repositories, run by voxmma.compat and by spconv, and how far they agree.

    git clone https://github.com/open-mmlab/OpenPCDet; git clone https://github.com/Pointcept/Pointcept; ...
    python benchmarks/upstream.py OpenPCDet Pointcept CenterPoint SoftGroup mmdetection3d TRELLIS SphereFormer
    python benchmarks/upstream.py OpenPCDet --reference PYTHON --device cuda --voxels 60000 --repeat 20
    python benchmarks/upstream.py MinkowskiEngine torchsparse spvnas Mask3D

Each network runs in a process of its own, straight from its file: packages around it are not imported, and
what a file imports beside torch and spconv (registries, timm, addict, ...) is stood in for. Both libraries
get the same weights and voxels, in evaluation; fp64 on a CPU, fp32 or `--dtype` on a GPU. `--reference` is a
Python that has spconv (default: this one, if it has); without one, networks are run and nothing is compared.
A network that runs in neither library is no failure: the note has what both say. (VoxelBackBone8xFocal makes
tensors on a GPU whatever its input is on; in fp16 it puts features into fp32 tensors and hands these to
layers of fp16 weights, which is for autocast.)
Times are medians of whole forwards on new coordinates, maps included, after a few that are not counted.
`--jobs` processes (two a network) get ready side by side, and are then timed alone, the two of a network by
turns; networks that have no figures after `--budget` seconds say so. `rest ms` is such a time when sparse
layers give at once what they gave before, the smaller one of the two libraries: what no library gets below.

Networks of MinkowskiEngine and torchsparse are compared with these libraries' rules on full grids
(`dense_libraries.py`), on a CPU in fp64, in a scene of 32 cells an axis.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

# ---- imports of a checkout without its packages ----------------------------------------------------------


class Anything:
    """Stands for a class, decorator or function that is named on import and not called for its result."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class Module(ModuleType):
    """A module with given members; every other one is `Anything`."""

    def __init__(self, name: str, members: dict[str, Any], path: list[str]) -> None:
        super().__init__(name)
        self.__path__ = path
        self.__dict__.update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if any((Path(folder) / f"{name}.py").exists() for folder in self.__path__):
            return importlib.import_module(f"{self.__name__}.{name}")
        return type(name, (nn.Module,), {}) if name[:1].isupper() else Anything()


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Packages of the checkout without their __init__, and modules that are stood in for."""

    def __init__(self, root: Path, bare: set[str], given: dict[str, dict[str, Any]]) -> None:
        self.root, self.bare, self.given = root, bare, given

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name in self.bare or name in self.given:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        folder = [str(self.root / spec.name.replace(".", "/"))] if spec.name in self.bare else []
        return Module(spec.name, self.given.get(spec.name, {}), folder)

    def exec_module(self, module: ModuleType) -> None: ...


class Settings(dict[str, Any]):
    """A dict whose keys are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Registry(dict[str, Any]):
    """mmengine's MODELS as far as layers use it."""

    def register_module(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], type):
            return self.setdefault(args[0].__name__, args[0])
        return lambda cls: self.setdefault(cls.__name__, cls)

    def _register_module(self, cls: Any, name: str, force: bool = False) -> None:
        self[name] = cls


MODELS = Registry()
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16}
#: Largest difference that counts as agreement. Libraries add up in another order, so a layer's result is
#: rounded elsewhere, and dozens of layers carry that on: of fp16 about ten roundings were seen (6e-3), thirty
#: are allowed. fp32 products may be made of several TF32 ones.
TOLERANCE = {"fp64": 1e-12, "fp32": 1e-4, "fp16": 2e-2}


def build_conv_layer(cfg: dict[str, Any] | None, *args: Any, **kwargs: Any) -> Any:
    options = dict(cfg or {"type": "Conv2d"})
    return MODELS[options.pop("type")](*args, **kwargs, **options)


def build_norm_layer(cfg: dict[str, Any], channels: int, postfix: Any = "") -> tuple[str, nn.Module]:
    options = {k: v for k, v in cfg.items() if k not in ("type", "requires_grad")}
    return f"bn{postfix}", nn.BatchNorm1d(channels, **options)


class BasicBlock(nn.Module):
    """What mmdet's residual block makes: two layers of 3 and their norms."""

    def __init__(
        self, inplanes: int, planes: int, stride: Any = 1, downsample: Any = None, **cfg: Any
    ) -> None:
        nn.Module.__init__(self)
        conv, norm = cfg["conv_cfg"], cfg["norm_cfg"]
        self.conv1 = build_conv_layer(conv, inplanes, planes, 3, stride=stride, padding=1, bias=False)
        self.conv2 = build_conv_layer(conv, planes, planes, 3, padding=1, bias=False)
        self.norm1, self.norm2 = (build_norm_layer(norm, planes)[1] for _ in range(2))
        self.relu, self.downsample = nn.ReLU(), downsample


def scatter(src: torch.Tensor, index: torch.Tensor, dim: int = 0, reduce: str = "sum") -> torch.Tensor:
    """Rows of `src` added up by `index`, or their mean; as torch_geometric does it."""
    made = src.new_zeros(int(index.max()) + 1, *src.shape[1:])
    made.scatter_add_(0, index.view(-1, *[1] * (src.dim() - 1)).expand_as(src), src)
    if reduce == "mean":
        ones = torch.ones(len(index), device=src.device)  # fp16 does not count beyond 2048
        count = ones.new_zeros(len(made)).scatter_add_(0, index, ones)
        made /= count.clamp(min=1).view(-1, *[1] * (src.dim() - 1))
    return made


def scatter_mean(src: torch.Tensor, index: torch.Tensor, dim: int = 0) -> torch.Tensor:
    return scatter(src, index, dim, "mean")


def segment_csr(src: torch.Tensor, ptr: torch.Tensor, reduce: str = "sum") -> torch.Tensor:
    """Runs of rows of `src` reduced, by one kernel as torch_scatter's."""
    return torch.segment_reduce(src.contiguous(), reduce, offsets=ptr, unsafe=True)


def voxel_grid(pos: torch.Tensor, size: Any, batch: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """The number of each point's cell, counted through the box of the points, without sorting."""
    cell = torch.div(pos - pos.amin(0), size, rounding_mode="floor").long()
    number = batch.long()
    for axis, cells in enumerate(cell.amax(0) + 1):
        number = number * cells + cell[:, axis]
    return number


class BaseModule(nn.Module):
    """mmengine's."""

    def __init__(self, init_cfg: Any = None) -> None:
        super().__init__()


class RowWise(nn.Module):
    """In the place of SphereFormer's attention: a layer of each row and where it is."""

    def __init__(self, channels: int, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(channels, channels)

    def forward(self, feats: torch.Tensor, xyz: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        return feats + self.layer(feats) * xyz.sum(1, keepdim=True).sin().to(feats.dtype)


class DropPath(nn.Identity):
    """timm's, in evaluation."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()


GIVEN: dict[str, dict[str, Any]] = {
    "addict": {"Dict": Settings},
    "open3d": {},
    "timm": {},
    "timm.layers": {"DropPath": DropPath, "trunc_normal_": nn.init.trunc_normal_},
    "timm.models": {},
    "timm.models.layers": {"DropPath": DropPath, "trunc_normal_": nn.init.trunc_normal_},
    "torch_scatter": {"segment_csr": segment_csr, "scatter": scatter, "scatter_mean": scatter_mean},
    "torch_geometric": {},
    "torch_geometric.utils": {"scatter": scatter},
    "torch_geometric.nn": {},
    "torch_geometric.nn.pool": {"voxel_grid": voxel_grid},
    "SharedArray": {},
    "mmcv": {},
    "mmcv.cnn": {"build_conv_layer": build_conv_layer, "build_norm_layer": build_norm_layer},
    "mmcv.ops": {},
    "mmdet": {},
    "mmdet.models": {},
    "mmdet.models.losses": {},
    "mmdet.models.backbones": {},
    "mmdet.models.backbones.resnet": {"BasicBlock": BasicBlock},
    "mmengine": {},
    "mmengine.registry": {"MODELS": MODELS},
    "mmengine.runner": {},
    "mmengine.model": {"BaseModule": BaseModule},
    # of the checkouts themselves: what would pull in the rest of them
    "pcdet.ops.roiaware_pool3d.roiaware_pool3d_utils": {},
    "pcdet.models.backbones_3d.focal_sparse_conv.SemanticSeg.pyramid_ffn": {},
    "model.spherical_transformer": {"SphereFormer": RowWise},
    "det3d.models.registry": {"BACKBONES": Registry()},
    "det3d.models.utils": {"build_norm_layer": build_norm_layer},
    "pointcept.models.builder": {"MODELS": Registry(), "MODULES": Registry()},
    "pointcept.engines.hooks": {"HookBase": object},
    "pointcept.models.point_prompt_training": {"PDNorm": type("PDNorm", (nn.Module,), {})},
    "mmdet3d.registry": {"MODELS": MODELS},
    "mmdet3d.utils": {"OptConfigType": Any},
    "mmdet3d.structures": {},
}  # fmt: skip

BARE = """
pcdet pcdet.ops pcdet.ops.roiaware_pool3d pcdet.utils pcdet.models pcdet.models.backbones_3d det3d
det3d.models det3d.models.backbones pointcept pointcept.models pointcept.engines
pointcept.models.sparse_unet pointcept.models.oacnns pointcept.models.point_transformer_v3 softgroup
softgroup.model mmdet3d mmdet3d.models mmdet3d.models.middle_encoders mmdet3d.models.layers trellis
trellis.models trellis.modules core core.models core.models.semantic_kitti models model
"""

#: Which library a repository's networks are written for, where it is not spconv.
WRITTEN_FOR = {
    "MinkowskiEngine": "MinkowskiEngine",
    "torchsparse": "torchsparse",
    "core": "torchsparse",
    "models": "MinkowskiEngine",
}


# ---- networks --------------------------------------------------------------------------------------------


class Scene:
    """A wavy sheet of voxels in two samples: (N, 4) int32 batch, z, y, x of `grid` (Z, Y, X); features."""

    def __init__(self, voxels: int, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        side = max(16, int((voxels / 1.6) ** 0.5))
        self.grid = [41, side + 7, side]
        y, x = torch.meshgrid(torch.arange(self.grid[1]), torch.arange(side), indexing="ij")
        rows = []
        for sample in range(2):
            phase = 6.28 * torch.rand(3, generator=generator)
            height = 18 + 9 * torch.sin(9.0 * x / side + phase[0]) + 8 * torch.cos(7.0 * y / side + phase[1])
            for up in (0, 1):
                kept = torch.rand(y.shape, generator=generator) < 0.4
                columns = [torch.full_like(x, sample), height.long() + up, y, x]
                rows.append(torch.stack([c[kept] for c in columns], 1))
        self.indices = torch.cat(rows).int().to(device)
        self.dtype = dtype
        self._generator = generator

    def features(self, channels: int) -> torch.Tensor:
        made = torch.randn(len(self.indices), channels, generator=self._generator, dtype=torch.float64)
        return made.to(self.indices.device, self.dtype)

    def points(self, channels: int) -> dict[str, torch.Tensor]:
        """As Pointcept's loaders give them."""
        ends = torch.bincount(self.indices[:, 0]).cumsum(0)
        coord = self.indices[:, 1:].to(self.dtype) * 0.02
        return {
            "grid_coord": self.indices[:, 1:].long(),
            "coord": coord,
            "offset": ends,
            "feat": self.features(channels),
            "grid_size": torch.tensor(0.02, dtype=self.dtype),
        }


Made = tuple[nn.Module, Callable[[nn.Module, Scene], Callable[[], Any]]]
"""A network, and what makes a call of it on a scene, giving tensors, SparseConvTensors or containers"""


def load(name: str) -> Any:
    return importlib.import_module(name)


def pcdet(file: str, cls: str, channels: int = 4, **cfg: Any) -> Callable[[Scene], Made]:
    def make(scene: Scene) -> Made:
        import numpy as np

        grid = np.array(scene.grid[::-1]) - np.array([0, 0, 1])
        pillars = "2d" in file
        net = getattr(load(f"pcdet.models.backbones_3d.{file}"), cls)(
            Settings(cfg),
            channels,
            grid,
            voxel_size=[0.05, 0.05, 0.1],
            point_cloud_range=[0, -40, -3, 70, 40, 1],
        )

        def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
            rows, features = scene.indices, scene.features(32 if pillars else channels)
            if pillars:
                rows = torch.unique(rows[:, [0, 2, 3]], dim=0)
                features = features[: len(rows)]
            kind = "pillar" if pillars else "voxel"

            def run() -> Any:
                batch = {f"{kind}_features": features, f"{kind}_coords": rows.clone(), "batch_size": 2}
                out = net(batch)
                names = (
                    "encoded_spconv_tensor",
                    "multi_scale_3d_features",
                    "multi_scale_2d_features",
                    "point_features",
                )
                return [out[name] for name in names if name in out]

            return run

        return net, prepare

    return make


def centerpoint(scene: Scene) -> Made:
    net = load("det3d.models.backbones.scn").SpMiddleResNetFHD(5)

    def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
        features, (z, y, x) = scene.features(5), scene.grid
        return lambda: net(features, scene.indices.clone(), 2, [x, y, z - 1])

    return net, prepare


def pointcept(file: str, cls: str, **options: Any) -> Callable[[Scene], Made]:
    def make(scene: Scene) -> Made:
        net = getattr(load(f"pointcept.models.{file}"), cls)(in_channels=6, **options)

        def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
            points = scene.points(6)

            def run() -> Any:
                out = net(dict(points))
                return out.feat if hasattr(out, "feat") else out

            return run

        return net, prepare

    return make


def softgroup(scene: Scene) -> Made:
    from functools import partial

    blocks = load("softgroup.model.blocks")
    norm = partial(nn.BatchNorm1d, eps=1e-4, momentum=0.1)
    net = blocks.UBlock([16, 32, 48, 64], norm, 2, blocks.ResidualBlock, indice_key_id=1)

    def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
        import spconv.pytorch as spconv

        features = scene.features(16)
        return lambda: net(spconv.SparseConvTensor(features, scene.indices.clone(), scene.grid, 2))

    return net, prepare


def sphereformer(scene: Scene) -> Made:
    """Its U-Net, which reads the pairs of rows behind each strided layer; without the attention."""
    import numpy as np

    window, sphere = np.array([0.3, 0.3, 0.3]), np.array([2.0, 2.0, 80.0])
    net = load("model.unet_spherical_transformer").Semantic(
        4,
        16,
        19,
        2,
        True,
        [16, 32, 48, 64],
        window,
        sphere,
        window / 24,
        sphere / 24,
        window_size_scale=[2, 1.5],
    )

    def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
        import spconv.pytorch as spconv

        features, rows = scene.features(4), scene.indices
        xyz, batch = rows[:, 1:].to(scene.dtype) * 0.05, rows[:, 0].long()
        return lambda: net(spconv.SparseConvTensor(features, rows.clone(), scene.grid, 2), xyz, batch)

    return net, prepare


def mmdet3d(file: str, cls: str, **options: Any) -> Callable[[Scene], Made]:
    def make(scene: Scene) -> Made:
        block = load("mmdet3d.models.layers.sparse_block")
        layers = sys.modules["mmdet3d.models.layers"]
        layers.SparseBasicBlock = block.SparseBasicBlock  # type: ignore[attr-defined]
        layers.make_sparse_convmodule = block.make_sparse_convmodule  # type: ignore[attr-defined]
        net = getattr(load(f"mmdet3d.models.middle_encoders.{file}"), cls)(4, scene.grid, **options)

        def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
            features = scene.features(4)
            return lambda: net(features, scene.indices.clone(), 2)

        return net, prepare

    return make


def trellis(scene: Scene) -> Made:
    sp = load("trellis.modules.sparse")

    class Blocks(nn.Module):
        """Convolutions, norms and pooling of TRELLIS' sparse modules."""

        def __init__(self) -> None:
            super().__init__()
            self.stem = sp.SparseConv3d(8, 32, 3, indice_key="res_64")
            self.norm = sp.SparseGroupNorm(8, 32)
            self.act = sp.SparseSiLU()
            self.down, self.up = sp.SparseDownsample(2), sp.SparseUpsample(2)
            self.deep = sp.SparseConv3d(32, 32, 3, indice_key="res_32")
            self.strided = sp.SparseConv3d(32, 48, 3, stride=2, padding=1, indice_key="s")
            self.out = sp.SparseLinear(32, 5)

        def forward(self, x: Any) -> Any:
            h = self.act(self.norm(self.stem(x)))
            h = h + self.up(self.act(self.deep(self.down(h)))) * 0.5
            return self.out(h).feats, self.strided(h).data

    def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
        rows = scene.indices[scene.indices[:, 0] == 0]  # its strided layers take one sample
        features = scene.features(8)[: len(rows)]
        return lambda: net(sp.SparseTensor(feats=features, coords=rows.clone()))

    return Blocks(), prepare


def cube(scene: Scene) -> None:
    """Puts a sheet of voxels in [0, 32)^3, sorted, into the scene: (N, 4) batch, x, y, z."""
    x, y = torch.meshgrid(torch.arange(32), torch.arange(32), indexing="ij")
    rows = []
    for sample in range(2):
        height = 16 + 7 * torch.sin(0.3 * x + sample) + 8 * torch.cos(0.23 * y)
        for up in (0, 1):
            rows.append(torch.stack([torch.full_like(x, sample), x, y, height.long() + up], -1).view(-1, 4))
    cells = torch.unique(torch.cat(rows), dim=0)
    keep = torch.rand(len(cells), generator=torch.Generator().manual_seed(0)) < 0.5
    scene.indices = cells[keep].int().to(scene.indices.device)


def minkowski(module: str, cls: str, *options: Any, **more: Any) -> Callable[[Scene], Made]:
    def make(scene: Scene) -> Made:
        cube(scene)
        Path("1.ply").touch()  # or examples/resnet.py downloads one
        net = getattr(load(module), cls)(3, 20, *options, **more)

        def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
            import MinkowskiEngine as ME

            features, seen = scene.features(3), []
            for name, part in net.named_children():  # its end is a voxel a sample in so small a scene
                if name.startswith("layer"):
                    part.register_forward_hook(lambda part, args, out: seen.append(out))

            def run() -> Any:
                seen.clear()
                return [net(ME.SparseTensor(features, scene.indices.clone())), *seen]

            return run

        return net, prepare

    return make


def torchsparse(module: str, cls: str, **options: Any) -> Callable[[Scene], Made]:
    def make(scene: Scene) -> Made:
        cube(scene)
        net = getattr(load(module), cls)(**options)

        def prepare(net: nn.Module, scene: Scene) -> Callable[[], Any]:
            from torchsparse import SparseTensor

            features = scene.features(4)
            return lambda: net(SparseTensor(features, scene.indices.clone()))

        return net, prepare

    return make


MASK3D = Settings(bn_momentum=0.02, conv1_kernel_size=5)

CASES: dict[str, dict[str, Callable[[Scene], Made]]] = {
    "pcdet": {
        "VoxelBackBone8x": pcdet("spconv_backbone", "VoxelBackBone8x"),
        "VoxelResBackBone8x": pcdet("spconv_backbone", "VoxelResBackBone8x"),
        "UNetV2": pcdet("spconv_unet", "UNetV2"),
        "VoxelResBackBone8xVoxelNeXt": pcdet("spconv_backbone_voxelnext", "VoxelResBackBone8xVoxelNeXt"),
        "VoxelResBackBone8xVoxelNeXt2D": pcdet(
            "spconv_backbone_voxelnext2d", "VoxelResBackBone8xVoxelNeXt2D"
        ),
        "PillarBackBone8x": pcdet("spconv_backbone_2d", "PillarBackBone8x"),
        "PillarRes18BackBone8x": pcdet("spconv_backbone_2d", "PillarRes18BackBone8x"),
        "VoxelBackBone8xFocal": pcdet("spconv_backbone_focal", "VoxelBackBone8xFocal"),
    },
    "det3d": {"SpMiddleResNetFHD": centerpoint},
    "pointcept": {
        "SpUNetBase": pointcept("sparse_unet.spconv_unet_v1m1_base", "SpUNetBase", num_classes=13),
        "OACNNs": pointcept("oacnns.oacnns_v1m1_base", "OACNNs", num_classes=13),
        "PointTransformerV3": pointcept(
            "point_transformer_v3.point_transformer_v3m1_base",
            "PointTransformerV3",
            enable_flash=False,
            shuffle_orders=False,
        ),
    },
    "softgroup": {"UBlock": softgroup},
    "model": {"U-Net without attention": sphereformer},
    "mmdet3d": {
        "SparseEncoder": mmdet3d("sparse_encoder", "SparseEncoder"),
        "SparseEncoder, basicblock": mmdet3d(
            "sparse_encoder",
            "SparseEncoder",
            order=("conv", "norm", "act"),
            encoder_channels=((16, 16, 32), (32, 32, 64), (64, 64, 128), (128, 128)),
            encoder_paddings=((0, 0, 1), (0, 0, 1), (0, 0, [0, 1, 1]), (0, 0)),
            block_type="basicblock",
        ),
        "SparseUNet": mmdet3d("sparse_unet", "SparseUNet"),
    },
    "trellis": {"sparse modules": trellis},
    "MinkowskiEngine": {
        **{
            f"MinkUNet{n}": minkowski("examples.minkunet", f"MinkUNet{n}")
            for n in ("14A", "18A", "34C", "50")
        },
        **{f"ResNet{n}": minkowski("examples.resnet", f"ResNet{n}") for n in ("14", "34", "50")},
    },
    "torchsparse": {
        "SparseResNet21D": torchsparse("upstream_backbones.resnet", "SparseResNet21D"),
        "SparseResUNet42": torchsparse("upstream_backbones.unet", "SparseResUNet42"),
    },
    "core": {"MinkUNet": torchsparse("core.models.semantic_kitti.minkunet", "MinkUNet", num_classes=19)},
    "models": {
        f"Res16UNet{n}": minkowski("models.res16unet", f"Res16UNet{n}", MASK3D, D=3) for n in ("14A", "34C")
    },
}


#: In how many rounds a network's forwards are timed, in both libraries by turns: a machine's speed drifts.
ROUNDS = 4

# ---- one network in one library: a process ---------------------------------------------------------------


def flat(value: Any) -> list[torch.Tensor]:
    """Outputs as tensors: of a SparseConvTensor its voxels, sorted, and the sum of the rows of each."""
    if hasattr(value, "C") and hasattr(value, "F"):
        rows, order = torch.unique(value.C.long(), dim=0, return_inverse=True)
        return [rows.cpu(), torch.empty_like(value.F).index_copy(0, order, value.F).double().cpu()]
    if hasattr(value, "indices") and hasattr(value, "features"):
        rows, which = torch.unique(value.indices.long(), dim=0, return_inverse=True)
        features = value.features.double()
        total = features.new_zeros(len(rows), features.shape[1]).index_add(0, which, features)
        return [rows.cpu(), total.cpu()]
    if isinstance(value, torch.Tensor):
        return [value.double().cpu()]
    if isinstance(value, dict):
        return [t for key in sorted(value) for t in flat(value[key])]
    return [t for part in value for t in flat(part)] if isinstance(value, (list, tuple)) else []


def run_case(args: argparse.Namespace) -> None:
    repository, name = args.case.split(":", 1)
    interface = WRITTEN_FOR.get(repository, "spconv")
    root = Path(args.checkouts[0]).resolve()
    if args.library == "voxmma":
        import voxmma.compat

        voxmma.compat.install(interface)
    elif args.library == "dense":
        import dense_libraries

        dense_libraries.install(interface)
        if repository == "MinkowskiEngine":
            part = "MinkowskiEngine.modules"
            sys.modules[part] = Module(part, {}, [str(root / "MinkowskiEngine" / "modules")])
    if interface != "spconv":
        os.chdir(Path(args.out).parent)
        sys.path.append(str(root))
        sys.modules["upstream_backbones"] = Module(
            "upstream_backbones", {}, [str(root / "torchsparse" / "backbones")]
        )
    sys.meta_path.insert(0, Finder(root, set(BARE.split()), GIVEN))
    os.environ["SPCONV_ALGO"] = "native" if args.device == "cpu" else "auto"
    device = torch.device(args.device)
    dtype = DTYPES[args.dtype]
    torch.manual_seed(0)
    scene = Scene(args.voxels, device, dtype)
    net, prepare = CASES[repository][name](scene)
    state = Path(args.out).with_name("state.pt")
    if args.library == "voxmma":
        for part in net.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                nn.init.uniform_(part.running_mean, -0.1, 0.1)
                nn.init.uniform_(part.running_var, 0.5, 1.5)
        save(net.state_dict(), state)
    else:
        told()
        net.load_state_dict(torch.load(state, weights_only=False))
    net = net.to(device, dtype).eval()
    if args.library == "spconv" and device.type == "cpu":
        for part in net.modules():  # its CPU build adds no bias in evaluation
            if hasattr(part, "indice_key"):
                part.training = True
    run = prepare(net, scene)
    torch.manual_seed(1)  # some draw in evaluation, too
    with torch.no_grad():
        save({"tensors": flat(run()), "voxels": len(scene.indices)}, Path(args.out))
        if args.repeat:
            take_times(net, run, args)


def take_times(net: nn.Module, run: Callable[[], Any], args: argparse.Namespace) -> None:
    """Times forwards in rounds, when it is this process' turn, and at last without the sparse layers."""
    *rounds, rest = time_files(Path(args.out))
    synchronize = torch.cuda.synchronize if args.device.startswith("cuda") else lambda: None

    def milliseconds() -> float:
        times = []
        for _ in range(-(-args.repeat // ROUNDS)):
            synchronize()
            start = time.perf_counter()
            run()
            synchronize()
            times.append(time.perf_counter() - start)
        return statistics.median(times) * 1e3

    told()
    for _ in range(min(args.repeat, 3)):
        run()  # what is learnt from earlier inputs, caches of memory
    for file in rounds:
        save(milliseconds(), file)
        told()  # another one is timed: nothing is taken down beside it
    kept = [Kept(layer) for layer in sparse_layers(net)]
    run()
    for layer in kept:
        layer.again = itertools.cycle(layer.given)
    save(milliseconds(), rest)
    told()


def time_files(out: Path) -> list[Path]:
    """Where a process that writes its result to `out` leaves its times: of each round, and of the rest."""
    return [out.with_suffix(f".ms{number}") for number in range(ROUNDS)] + [out.with_suffix(".rest")]


def sparse_layers(net: nn.Module) -> list[nn.Module]:
    """Sparse layers, and containers of them, with which norms and activations come."""
    return [
        part
        for part in net.modules()
        if part is not net and (type(part).__name__ == "SparseSequential" or hasattr(part, "indice_key"))
    ]


class Kept:
    """In place of a layer's forward: takes down what it gives, and gives it `again` when that is set."""

    def __init__(self, layer: nn.Module) -> None:
        self.forward, self.given = layer.forward, list[Any]()
        self.again: Iterator[Any] | None = None
        layer.forward = self  # type: ignore[method-assign]

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        if self.again is not None:
            return next(self.again)
        self.given.append(self.forward(*inputs, **options))
        return self.given[-1]


def save(value: Any, path: Path) -> None:
    """Writes what another process waits for: it is there when it is whole."""
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def told() -> None:
    """Waits until the process that started this one says to go on; ends where it does not."""
    if not sys.stdin.readline():
        raise SystemExit(0)


# ---- processes -------------------------------------------------------------------------------------------


def version_of_spconv(python: str) -> str | None:
    command = [python, "-c", "import spconv.pytorch as s, spconv; print(spconv.__version__)"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    except (OSError, subprocess.CalledProcessError):
        return None


class Child:
    """A network in one library, in a process of its own: what it gave is in `out`, then its times in files.

    One of another library waits for the weights of `weights_of`.
    """

    def __init__(
        self, case: str, checkout: Path, library: str, python: str, out: Path, weights_of: Child | None = None
    ) -> None:
        self.command = [python, str(Path(__file__).resolve()), str(checkout), "--case", case]
        self.command += ["--library", library, "--out", str(out)]
        self.library, self.out, self.weights_of = library, out, weights_of
        *self.rounds, self.rest = time_files(out)
        self.state = out.with_name("state.pt")
        self.process: subprocess.Popen[str] | None = None
        self.repeat, self.stopped = 0, False

    def start(self, args: argparse.Namespace) -> None:
        dense = self.library == "dense"
        self.repeat = 0 if dense else args.repeat
        options = {"device": "cpu" if dense else args.device, "dtype": "fp64" if dense else args.dtype}
        options |= {"voxels": str(args.voxels), "repeat": str(self.repeat)}
        command = self.command + [word for name, text in options.items() for word in (f"--{name}", text)]
        threads = max(1, (os.cpu_count() or 1) // args.jobs)  # on a CPU they are part of what is measured
        fewer = {"OMP_NUM_THREADS": str(threads)} if args.device != "cpu" else {}
        if self.library == "spconv" and args.device == "cpu" and not self.repeat:
            fewer = {
                "OMP_NUM_THREADS": "1"
            }  # several add to a row at once: its results differ from run to run
        with open(self.out.with_suffix(".log"), "w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, env={**fewer, **os.environ}
            )

    def ended(self) -> bool:
        return self.process is None or self.process.poll() is not None

    def go_on(self) -> None:
        if self.process is not None and self.process.stdin is not None and not self.ended():
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("\n")
                self.process.stdin.flush()

    def ready(self) -> bool:
        """Whether it has run its network or ended; hands over the weights when they are there."""
        if self.weights_of is not None and (self.state.exists() or self.weights_of.ended()):
            self.weights_of = None
            if self.state.exists():
                self.go_on()
            else:
                self.stop()
        return self.out.exists() or self.ended()

    def time(self, file: Path, end: float) -> None:
        """Lets it take the next of its times, which `file` is for; the caller keeps others from running."""
        if not self.repeat:
            return
        self.go_on()
        while not (file.exists() or self.ended()) and time.monotonic() < end:
            time.sleep(0.02)
        if not file.exists():
            self.stop()

    def times(self) -> dict[str, float]:
        """Medians of milliseconds by name, of those that are there."""
        wanted = {"ms": self.rounds, "rest_ms": [self.rest]}
        whole = {name: files for name, files in wanted.items() if all(file.exists() for file in files)}
        return {
            f"{self.library}_{name}": statistics.median(torch.load(f, weights_only=False) for f in files)
            for name, files in whole.items()
        }

    def stop(self) -> None:
        """Ends it; `stopped` says whether it had not ended itself."""
        if not self.ended() or self.process is None:
            self.stopped = True
        if self.process is not None:
            self.process.kill()
            self.process.communicate()

    def wrong(self, budget: float) -> str:
        """An empty string, or what went wrong: the last line that it printed."""
        if self.out.exists() and (self.rounds[-1].exists() or not self.repeat):
            return ""
        if self.stopped:
            return f"no {'time' if self.out.exists() else 'result'} within {budget:g} s"
        lines = self.out.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        return (lines or ["ended without a word"])[-1]


def together(children: list[Child], args: argparse.Namespace, end: float) -> None:
    """Runs networks side by side, and then takes their times alone, those of one network by turns.

    Getting ready may take half of the time that is left until `end`.
    """
    until = (time.monotonic() + end) / 2
    for child in children:
        if time.monotonic() < end:
            child.start(args)
    try:
        while sum(child.ready() for child in children) < len(children) and time.monotonic() < until:
            time.sleep(0.02)
        for child in children:
            if not child.out.exists():
                child.stop()  # or it would be at work beside those that are timed
        for _, found in itertools.groupby(children, key=lambda child: child.out.parent):
            for taken in zip(
                *([(child, file) for file in (*child.rounds, child.rest)] for child in list(found)),
                strict=True,
            ):
                for child, file in taken:
                    child.time(file, end)
    finally:
        for child in children:
            child.stop()


# ---- the table -------------------------------------------------------------------------------------------


def difference(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> tuple[float, str]:
    """Largest difference, over the largest value of each output, and what does not fit."""
    if [t.shape for t in mine] != [t.shape for t in theirs]:
        return float(
            "nan"
        ), f"shapes {[list(t.shape) for t in mine]} against {[list(t.shape) for t in theirs]}"
    worst = 0.0
    for a, b in zip(mine, theirs, strict=True):
        if a.dtype == torch.int64:
            if not torch.equal(a, b):
                return float("nan"), "other voxels"
        elif a.numel():
            a, b = a.double(), b.double()
            worst = max(worst, float((a - b).abs().max() / b.abs().max().clamp(min=1e-30)))
    return worst, ""


def compare(row: dict[str, Any], ours: Child, theirs: Child | None, args: argparse.Namespace) -> bool:
    """Puts figures and a note into the row of a network; whether they are as they should be."""
    wrong, there, library = ours.wrong(args.budget), "", ""
    found = {}
    for child in (ours, theirs):
        if child is not None and child.out.exists():
            found[child.library] = torch.load(child.out, weights_only=False)
        if child is not None:
            row |= child.times()
    if theirs is not None:
        there, library = theirs.wrong(args.budget), theirs.library
    if "voxmma" in found:
        row["voxels"] = found["voxmma"]["voxels"]
    if len(found) == 2:
        row["difference"], row["note"] = difference(*(part["tensors"] for part in found.values()))
        row["agrees"] = not row["note"] and row["difference"] <= args.tolerance
    elif wrong and there and not ours.stopped and not theirs.stopped:
        row["note"] = f"runs in neither: {wrong[:80]}; {library}: {there[:80]}"
        return True
    row["note"] = row["note"] or wrong or (there and f"{library}: {there}")[:200]
    return not row["note"] and row["agrees"] is not False


def show(row: dict[str, Any]) -> None:
    cells = [f"{row['repository']} {row['network']}"[:44].ljust(44), f"{row.get('voxels', ''):>8}"]
    cells += [f"{row['difference']:>11.1e}" if row["difference"] is not None else f"{'':>11}"]
    cells += [f"{v:>10.2f}" if (v := row.get(k)) else f"{'':>10}" for k in ("voxmma_ms", "spconv_ms")]
    times = [row.get("voxmma_ms"), row.get("spconv_ms")]
    cells += [f"{'':>6}" if None in times else f"{times[0] / times[1]:>6.2f}"]
    rest = [row[key] for key in ("voxmma_rest_ms", "spconv_rest_ms") if key in row]
    cells += [f"{min(rest):>8.2f}" if rest else f"{'':>8}"]
    print(" ".join(cells), row["note"], flush=True)


def table(args: argparse.Namespace, folder: Path) -> int:
    from voxmma.tuning import machine

    end = time.monotonic() + args.budget
    reference = args.reference or sys.executable
    version = version_of_spconv(reference)
    if args.reference and version is None:
        raise SystemExit(f"--reference {args.reference} has no spconv")
    pairs: list[tuple[dict[str, Any], Child, Child | None]] = []
    for checkout in args.checkouts:
        root = Path(checkout).resolve()
        found = [name for name in CASES if (root / name).is_dir()]
        if not found:
            raise SystemExit(f"{checkout} holds none of {', '.join(CASES)}")
        for name in CASES[found[0]]:
            if args.only and args.only not in name:
                continue
            where = folder / str(len(pairs))
            where.mkdir()
            row = {"repository": root.name, "network": name, "dtype": args.dtype}
            row |= {"tolerance": args.tolerance, "difference": None, "agrees": None, "note": ""}
            case = f"{found[0]}:{name}"
            ours, theirs = Child(case, root, "voxmma", sys.executable, where / "ours.pt"), None
            dense = found[0] in WRITTEN_FOR
            if dense or version is not None:
                row["reference"] = f"{WRITTEN_FOR[found[0]]}'s rules" if dense else f"spconv {version}"
                library, python = ("dense", sys.executable) if dense else ("spconv", reference)
                theirs = Child(case, root, library, python, where / "theirs.pt", ours)
            pairs.append((row, ours, theirs))
    result = {"kind": "upstream", **machine.labels(torch.device(args.device))}
    result |= {"repeats": args.repeat, "rows": []}
    print(f"{'network':44} {'voxels':>8} {'difference':>11} {'voxmma ms':>10}", end=" ")
    print(f"{'spconv ms':>10} {'ratio':>6} {'rest ms':>8}")
    waiting = [child for _, *pair in pairs for child in pair if child is not None]
    failed = 0
    while waiting:
        together(waiting[: args.jobs], args, end)
        del waiting[: args.jobs]
        while pairs and not any(child in waiting for child in pairs[0][1:]):
            row, ours, theirs = pairs.pop(0)
            failed += not compare(row, ours, theirs, args)
            show(row)
            result["rows"].append(row)
            shutil.rmtree(ours.out.parent)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkouts", nargs="+", help="folders of repositories")
    parser.add_argument("--reference", help="a Python that has spconv")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and features; fp64 on a CPU, else fp32")
    parser.add_argument("--voxels", type=int, default=3000)
    parser.add_argument("--repeat", type=int, default=0, help="forwards to take the time of")
    parser.add_argument("--jobs", type=int, default=1, help="processes that get ready side by side")
    parser.add_argument(
        "--budget",
        type=float,
        default=math.inf,
        metavar="SECONDS",
        help="after which networks have no figures",
    )
    parser.add_argument("--only", help="networks whose name holds this")
    parser.add_argument(
        "--tolerance",
        type=float,
        help="largest difference that counts as agreement; default: "
        + ", ".join(f"{name} {bound:g}" for name, bound in TOLERANCE.items()),
    )
    parser.add_argument("--json", help="a file for the table")
    parser.add_argument("--verbose", action="store_true")
    for name in ("--case", "--library", "--out"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")
    args.dtype = args.dtype or ("fp64" if args.device == "cpu" else "fp32")
    args.tolerance = TOLERANCE[args.dtype] if args.tolerance is None else args.tolerance
    if args.case:
        run_case(args)
    else:
        with tempfile.TemporaryDirectory(prefix="voxmma-upstream-") as folder:
            raise SystemExit(min(table(args, Path(folder)), 1))


if __name__ == "__main__":
    main()
