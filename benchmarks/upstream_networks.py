"""Networks of other repositories that upstream.py runs: how each is made, and what it is called with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from upstream_standins import Settings

#: Which library a repository's networks are written for, where it is not spconv.
WRITTEN_FOR = {
    "MinkowskiEngine": "MinkowskiEngine",
    "torchsparse": "torchsparse",
    "core": "torchsparse",
    "models": "MinkowskiEngine",
}


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
