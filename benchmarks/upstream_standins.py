"""Imports of a checkout without its packages, and stand-ins for what its files import beside torch."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn


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
