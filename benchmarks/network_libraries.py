"""The networks of voxmma.models in other sparse convolution libraries, with the same weights.

A `Library` makes layers; `ported` takes a network of voxmma.models apart and puts it together from them.
Used by benchmarks/networks.py. Nothing here imports a library before its class is made.
"""

from __future__ import annotations

import copy
import importlib
import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from voxmma import Voxels, models
from voxmma import nn as vnn


class Problem(Protocol):
    """What a library is told of an input besides coordinates and features."""

    batch: int
    shape: list[int]
    """cells of the grid, for the columns of the coordinates"""
    factor: int
    """tensor stride of the input"""


# ---- plain torch on coordinates ----------------------------------------------------------------------------


def keys(coords: Tensor) -> Tensor:
    """One number for each (batch, x, y, z) of +-2^17 cells."""
    made = coords[:, 0].long()
    for axis in (1, 2, 3):
        made = (made << 18) + coords[:, axis].long() + (1 << 17)
    return made


def shrunk(coords: Tensor, factor: int) -> Tensor:
    """The cell of each row on a grid coarser by `factor`; several rows may be in one."""
    if factor == 1:
        return coords
    return torch.cat([coords[:, :1], coords[:, 1:].div(factor, rounding_mode="floor")], 1)


class Index:
    """Rows by coordinates (N, 4); of equal ones, any."""

    def __init__(self, coords: Tensor) -> None:
        self.ordered, self.rows = keys(coords).sort()

    def find(self, queries: Tensor) -> Tensor:
        """Row of each query (M, 4), -1 where there is none."""
        if not len(self.rows):
            return torch.full((len(queries),), -1, device=queries.device)
        wanted = keys(queries)
        place = torch.searchsorted(self.ordered, wanted).clamp_(max=len(self.rows) - 1)
        return torch.where(self.ordered[place] == wanted, self.rows[place], -1)


# ---- libraries ---------------------------------------------------------------------------------------------


class Library:
    """How a library makes and calls the parts of a network."""

    distributions: ClassVar[tuple[str, ...]] = ()
    """names under which it may be installed"""
    package: ClassVar[str] = ""
    needs_gpu: ClassVar[bool] = True
    keeps_maps: ClassVar[bool] = False
    """whether a call on the tensor of an earlier one makes no map"""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def start(self, coords: Tensor, feats: Tensor, problem: Problem) -> Any:
        """Its tensor; nothing is known about the coordinates."""
        raise NotImplementedError

    def feats(self, x: Any) -> Tensor:
        raise NotImplementedError

    def coords(self, x: Any) -> Tensor:
        """(N, 4) batch and cell on the grid of x."""
        raise NotImplementedError

    def put(self, x: Any, feats: Tensor) -> Any:
        """Other features on the coordinates of x."""
        raise NotImplementedError

    def prune(self, x: Any, keep: Tensor) -> Any:
        raise NotImplementedError

    def conv(self, layer: vnn.SparseConv3d, key: str) -> nn.Module:
        """A layer with the weights of `layer`; `key` names its map, the same in the layer that it undoes."""
        raise NotImplementedError

    def rows(self, module: nn.Module) -> nn.Module:
        """A norm or an activation of torch as what stands in `sequence`."""
        return module

    def sequence(self, parts: list[nn.Module]) -> nn.Module:
        raise NotImplementedError


Pairs = list[tuple[Tensor, Tensor]]
"""(input rows, output rows) of each offset"""


class Sites:
    """Coordinates of plain torch, with the pairs of rows found on them."""

    def __init__(self, coords: Tensor) -> None:
        self.coords = coords
        self.finer: tuple[Sites, Pairs] | None = None
        """where a strided layer made these from"""
        self.known: dict[Any, tuple[Sites, Pairs]] = {}

    def reached(self, layer: vnn.SparseConv3d) -> tuple[Sites, Pairs]:
        """Where the layer's outputs are, and its pairs."""
        if layer.transposed and not layer.generative:
            assert self.finer is not None
            sites, pairs = self.finer
            return sites, [(out, rows) for rows, out in pairs]
        key = (layer.kernel_size, layer.stride, layer.padding, layer.transposed)
        if key not in self.known:
            self.known[key] = self._grow(layer) if layer.transposed else self._find(layer)
        return self.known[key]

    def _vector(self, *numbers: int) -> Tensor:
        return torch.tensor(numbers, device=self.coords.device)

    def _offsets(self, layer: vnn.SparseConv3d) -> list[Tensor]:
        """Of the cell at stride * output, in the order of the weight."""
        cells = itertools.product(*(range(k) for k in layer.kernel_size))
        return [self._vector(0, *cell) - self._vector(0, *layer.padding) for cell in cells]

    def _grow(self, layer: vnn.SparseConv3d) -> tuple[Sites, Pairs]:
        """A generative transposed layer whose windows do not overlap."""
        assert layer.kernel_size == layer.stride and not any(layer.padding)
        rows = torch.arange(len(self.coords), device=self.coords.device)
        base, offsets = self.coords * self._vector(1, *layer.stride), self._offsets(layer)
        made = torch.cat([base + offset for offset in offsets]).int()
        return Sites(made), [(rows, rows + i * len(rows)) for i in range(len(offsets))]

    def _find(self, layer: vnn.SparseConv3d) -> tuple[Sites, Pairs]:
        step, offsets, out = self._vector(1, *layer.stride), self._offsets(layer), self
        if layer.stride != (1, 1, 1):
            moved = torch.cat([self.coords - offset for offset in offsets])
            whole = (moved.remainder(step) == 0).all(1)
            out = Sites(torch.unique(moved[whole].div(step, rounding_mode="floor"), dim=0).int())
        pairs, index = [], Index(self.coords)
        for offset in offsets:
            rows = index.find(out.coords * step + offset)
            there = torch.nonzero(rows >= 0).flatten()
            pairs.append((rows[there], there))
        if out is not self:
            out.finer = self, pairs
        return out, pairs


class Torch(Library):
    """Gather, matrix product and scatter of each offset; in fp64 the reference."""

    package, distributions, needs_gpu, keeps_maps = "torch", ("torch",), False, True

    class Conv(nn.Module):
        def __init__(self, layer: vnn.SparseConv3d) -> None:
            super().__init__()
            self.layer = [layer]  # not a submodule
            self.weight = nn.Parameter(layer.weight.detach().clone())
            self.bias = None if layer.bias is None else nn.Parameter(layer.bias.detach().clone())

        def forward(self, x: tuple[Sites, Tensor]) -> tuple[Sites, Tensor]:
            sites, feats = x
            out, pairs = sites.reached(self.layer[0])
            if torch.is_autocast_enabled(feats.device.type):
                feats = feats.to(torch.get_autocast_dtype(feats.device.type))
            weight = self.weight.to(feats.dtype)
            y = feats.new_zeros(len(out.coords), weight.shape[2])
            for offset, (rows, there) in enumerate(pairs):
                y = y.index_add(0, there, feats[rows] @ weight[offset])
            return out, y if self.bias is None else y + self.bias.to(y.dtype)

    class Rows(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, x: tuple[Sites, Tensor]) -> tuple[Sites, Tensor]:
            return x[0], self.module(x[1])

    def start(self, coords: Tensor, feats: Tensor, problem: Problem) -> Any:
        return Sites(coords), feats

    def feats(self, x: Any) -> Tensor:
        return x[1]

    def coords(self, x: Any) -> Tensor:
        return x[0].coords

    def put(self, x: Any, feats: Tensor) -> Any:
        return x[0], feats

    def prune(self, x: Any, keep: Tensor) -> Any:
        return Sites(x[0].coords[keep]), x[1][keep]

    def conv(self, layer: vnn.SparseConv3d, key: str) -> nn.Module:
        return self.Conv(layer)

    def rows(self, module: nn.Module) -> nn.Module:
        return self.Rows(module)

    def sequence(self, parts: list[nn.Module]) -> nn.Module:
        return nn.Sequential(*parts)


class Spconv(Library):
    """spconv 2.3 as it comes: its own choice of algorithm and accumulators."""

    package: ClassVar[str] = "spconv"
    distributions: ClassVar[tuple[str, ...]] = (
        *(f"spconv-cu{v}" for v in (126, 124, 121, 120, 118, 117, 116, 114)),
        "spconv",
    )
    needs_gpu = False

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.sp: Any = importlib.import_module(f"{self.package}.pytorch")
        with suppress(ImportError):
            constants: Any = importlib.import_module(f"{self.package}.constants")
            constants.SPCONV_ALLOW_TF32 = False

    def start(self, coords: Tensor, feats: Tensor, problem: Problem) -> Any:
        return self.sp.SparseConvTensor(feats, coords, problem.shape, problem.batch)

    def feats(self, x: Any) -> Tensor:
        return x.features

    def coords(self, x: Any) -> Tensor:
        return x.indices

    def put(self, x: Any, feats: Tensor) -> Any:
        return x.replace_feature(feats)

    def prune(self, x: Any, keep: Tensor) -> Any:
        return self.sp.SparseConvTensor(x.features[keep], x.indices[keep], x.spatial_shape, x.batch_size)

    def conv(self, layer: vnn.SparseConv3d, key: str) -> nn.Module:
        c_in, c_out, bias = layer.in_channels, layer.out_channels, layer.bias is not None
        size, options = list(layer.kernel_size), {"indice_key": key, "bias": bias}
        if self.device.type == "cpu":
            options["algo"] = self.sp.ConvAlgo.Native  # the one there is
        if layer.transposed and layer.generative:
            made = self.sp.SparseConvTranspose3d(c_in, c_out, size, list(layer.stride), **options)
        elif layer.transposed:
            made = self.sp.SparseInverseConv3d(c_in, c_out, size, **options)
        elif layer.stride != (1, 1, 1):
            padding = list(layer.padding)
            made = self.sp.SparseConv3d(c_in, c_out, size, list(layer.stride), padding, **options)
        else:
            made = self.sp.SubMConv3d(c_in, c_out, size, **options)
        weight = layer.weight.detach()
        if layer.kernel_size == layer.stride == (1, 1, 1):  # it takes x @ weight.view(c_in, c_out)
            made.weight.data.view(c_in, c_out).copy_(weight[0])
        else:
            made.weight.data.copy_(weight.unflatten(0, layer.kernel_size).permute(4, 0, 1, 2, 3))
        if bias:
            made.bias.data.copy_(layer.bias.detach())
        return made

    def sequence(self, parts: list[nn.Module]) -> nn.Module:
        whole = any(isinstance(part, Residual) for part in parts)  # it would be given the features
        return nn.Sequential(*parts) if whole else self.sp.SparseSequential(*parts)


class VoxmmaSpconv(Spconv):
    """voxmma behind spconv's interface."""

    package, distributions = "voxmma.compat.spconv", ()


class VoxmmaRows(Library):
    """voxmma's layers in the code that networks of other libraries are written in: sums, concatenations and
    the activations behind them are torch's, on rows. What an interface costs is measured against it."""

    package, needs_gpu, keeps_maps = "voxmma", False, True

    def start(self, coords: Tensor, feats: Tensor, problem: Problem) -> Any:
        shape = problem.shape if problem.factor == 1 else None
        return Voxels(coords, feats, problem.batch, problem.factor, spatial_shape=shape)

    def feats(self, x: Any) -> Tensor:
        return x.feats

    def coords(self, x: Any) -> Tensor:
        return x.coords

    def put(self, x: Any, feats: Tensor) -> Any:
        return x.with_feats(feats)

    def prune(self, x: Any, keep: Tensor) -> Any:
        return Voxels(x.coords[keep], x.feats[keep], x.batch_size, x.stride)

    def conv(self, layer: vnn.SparseConv3d, key: str) -> nn.Module:
        return copy.deepcopy(layer)

    def sequence(self, parts: list[nn.Module]) -> nn.Module:
        return vnn.Sequential(*parts)


class SpconvTriton(Spconv):
    """spconv's interface on Triton kernels."""

    package, distributions, needs_gpu = "spconv_triton", ("spconv-triton",), True


class TorchSparse(Library):
    """torchsparse 2.1 (TorchSparse++), default dataflow."""

    package, distributions, keeps_maps = "torchsparse", ("torchsparse",), True

    class Strided(nn.Module):
        """A strided layer. It leaves the hash table of its outputs where layers look for that of its inputs,
        so that one of another kernel size there, as on a U-Net's way up, would search it: that is undone."""

        def __init__(self, conv: nn.Module) -> None:
            super().__init__()
            self.conv = conv

        def forward(self, x: Any) -> Any:
            tables = x._caches.hashmaps
            before = tables.get(x.stride)
            y = self.conv(x)
            tables.pop(x.stride, None)
            if before is not None:
                tables[x.stride] = before
            return y

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.ts: Any = importlib.import_module("torchsparse")
        self.nn: Any = importlib.import_module("torchsparse.nn")
        self.ts.backends.allow_tf32 = False
        self.ts.backends.hash_rsv_ratio = 8  # a 3x3x3 layer of stride 2 reaches up to 8 voxels from one

    def _make(self, coords: Tensor, feats: Tensor, stride: Any, limits: Any) -> Any:
        return self.ts.SparseTensor(coords=coords, feats=feats, stride=stride, spatial_range=limits)

    def start(self, coords: Tensor, feats: Tensor, problem: Problem) -> Any:
        return self._make(coords, feats, problem.factor, (problem.batch, *problem.shape))

    def feats(self, x: Any) -> Tensor:
        return x.feats

    def coords(self, x: Any) -> Tensor:
        return x.coords

    def put(self, x: Any, feats: Tensor) -> Any:
        made = self._make(x.coords, feats, x.stride, x.spatial_range)
        made._caches = x._caches
        return made

    def prune(self, x: Any, keep: Tensor) -> Any:
        return self._make(x.coords[keep].contiguous(), x.feats[keep], x.stride, x.spatial_range)

    def conv(self, layer: vnn.SparseConv3d, key: str) -> nn.Module:
        options: dict[str, Any] = {"bias": layer.bias is not None, "stride": layer.stride}
        if layer.transposed:
            options["transposed"] = True
            if layer.generative:  # its usual way to make maps has none of these
                usual = self.nn.functional.conv_config.get_default_conv_config()
                config = type(usual)(list(usual.items()))  # the usual one is shared
                config.kmap_mode = "hashmap"
                options |= {"generative": True, "config": config}
        else:  # of a submanifold layer: by it the limits of the grid stay what they are
            strided = layer.stride != (1, 1, 1)
            options["padding"] = layer.padding if strided else tuple(k // 2 for k in layer.kernel_size)
        made = self.nn.Conv3d(layer.in_channels, layer.out_channels, layer.kernel_size, **options)
        weight = layer.weight.detach()
        if len(weight) % 2:  # odd kernels: the first axis is the fastest
            weight = weight.unflatten(0, layer.kernel_size).permute(2, 1, 0, 3, 4).flatten(0, 2)
        made.kernel.data.copy_(weight.reshape(made.kernel.shape))
        if layer.bias is not None:
            made.bias.data.copy_(layer.bias.detach())
        return self.Strided(made) if layer.stride != (1, 1, 1) and not layer.transposed else made

    def rows(self, module: nn.Module) -> nn.Module:
        if isinstance(module, nn.BatchNorm1d):
            made = self.nn.BatchNorm(module.num_features, eps=module.eps, momentum=module.momentum)
            made.load_state_dict(module.state_dict())
            return made
        if isinstance(module, nn.ReLU):
            return self.nn.ReLU(True)
        library = self

        class Rows(nn.Module):
            def forward(self, x: Any) -> Any:
                return library.put(x, module(library.feats(x)))

        return Rows()

    def sequence(self, parts: list[nn.Module]) -> nn.Module:
        return nn.Sequential(*parts)


LIBRARIES: dict[str, type[Library] | None] = {
    "voxmma": None,  # voxmma.models themselves
    "voxmma-engine": None,  # in inference, by voxmma.engine
    "spconv": Spconv,
    "torchsparse": TorchSparse,
    "spconv-triton": SpconvTriton,
    "voxmma-rows": VoxmmaRows,
    "voxmma-spconv": VoxmmaSpconv,
    "torch": Torch,
}
#: Measured by default, where they are installed.
USUAL = tuple(name for name in LIBRARIES if name not in ("voxmma-rows", "voxmma-spconv", "torch"))

# ---- the networks in another library -----------------------------------------------------------------------


class Port:
    """Makes parts of voxmma.models out of a library's layers. Levels are counted as parts are made, so they
    must be made in the order in which they run."""

    def __init__(self, library: Library) -> None:
        self.library, self.level = library, 0
        self.norms: list[tuple[nn.BatchNorm1d, nn.BatchNorm1d]] = []
        """ours and its copy"""

    def __call__(self, part: nn.Module) -> nn.Module:
        if isinstance(part, models.ResidualBlock):
            return Residual(self, part)
        if isinstance(part, vnn.Sequential):
            return self.library.sequence([self(inner) for inner in part])
        if isinstance(part, vnn.SparseConv3d):
            key = f"stay{self.level} {part.kernel_size}"
            if part.stride != (1, 1, 1):
                self.level -= part.transposed
                key = f"move{self.level}"
                self.level += not part.transposed
            return self.library.conv(part, key)
        if isinstance(part, nn.BatchNorm1d):
            dtype = part.running_mean.dtype
            made = nn.BatchNorm1d(part.num_features, part.eps, part.momentum, dtype=dtype)
            made.load_state_dict(part.state_dict())
            self.norms.append((part, made))
            return self.library.rows(made)
        if isinstance(part, (nn.ReLU, nn.ELU)):
            return self.library.rows(nn.ReLU() if isinstance(part, nn.ReLU) else nn.ELU())
        if isinstance(part, nn.Identity):
            return nn.Identity()
        raise TypeError(f"no counterpart of {type(part).__name__}")


class Residual(nn.Module):
    def __init__(self, port: Port, block: models.ResidualBlock) -> None:
        super().__init__()
        self.library = port.library
        self.body, self.shortcut = port(block.body), port(block.shortcut)

    def forward(self, x: Any) -> Any:
        y, feats = self.body(x), self.library.feats
        return self.library.put(y, torch.relu(feats(y) + feats(self.shortcut(x))))


class Chain(nn.Module):
    """Parts one after the other: a layer, SECOND's backbone, ResNet21D."""

    def __init__(self, port: Port, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList([port(part) for part in parts])

    def forward(self, x: Any, target: Tensor | None = None) -> list[Any]:
        for part in self.parts:
            x = part(x)
        return [x]


class UNet(nn.Module):
    def __init__(self, port: Port, net: models.SparseUNet) -> None:
        super().__init__()
        self.library, self.stem = port.library, port(net.stem)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for parts in zip(net.down, net.encoder, strict=True):
            self.down.append(nn.Sequential(*map(port, parts)))
        self.decoder = nn.ModuleList()
        for up, decoder in zip(reversed(net.up), reversed(net.decoder), strict=True):
            self.up.append(port(up))
            self.decoder.append(port(decoder))
        self.head = port(net.head)

    def forward(self, x: Any, target: Tensor | None = None) -> list[Any]:
        x, skips, feats = self.stem(x), [], self.library.feats
        for down in self.down:
            skips.append(x)
            x = down(x)
        for up, decoder in zip(self.up, self.decoder, strict=True):
            x, skip = up(x), skips.pop()
            x = decoder(self.library.put(x, torch.cat([feats(x), feats(skip)], 1)))
        return [self.head(x)]


class Decoder(nn.Module):
    def __init__(self, port: Port, net: models.VAEDecoder) -> None:
        super().__init__()
        assert net.unpruned == 0
        self.library = port.library
        pairs = [(port(level), port(head)) for level, head in zip(net.levels, net.heads, strict=True)]
        self.levels, self.heads = (nn.ModuleList(parts) for parts in zip(*pairs, strict=True))

    def forward(self, x: Any, target: Tensor) -> list[Any]:
        logits = []
        for number, (level, head) in enumerate(zip(self.levels, self.heads, strict=True), 1):
            x = level(x)
            logits.append(head(x))
            there = Index(shrunk(target, 2 ** (len(self.levels) - number)))
            x = self.library.prune(x, there.find(self.library.coords(x)) >= 0)
        return [x, *logits]


def ported(net: nn.Module, library: Library) -> tuple[nn.Module, Port]:
    """`net` in another library, with its weights: tensor, target (N, 4) -> tensors, the result first."""
    port = Port(library)
    if isinstance(net, models.SparseUNet):
        return UNet(port, net), port
    if isinstance(net, models.VAEDecoder):
        return Decoder(port, net), port
    if isinstance(net, models.SECONDBackbone):
        return Chain(port, [net.stem, *net.levels, net.out]), port
    if isinstance(net, models.ResNet21D):
        return Chain(port, list(net.stages)), port
    return Chain(port, [net]), port
