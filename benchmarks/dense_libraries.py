"""MinkowskiEngine and torchsparse on full grids: what their layers mean, in torch's dense operators alone.

A reference for `upstream.py` where the libraries themselves cannot be had: slow, exact in fp64, for inputs in
[0, `CELLS`) on every axis. What a network asks for and is not here raises AttributeError.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import nn

from dense_grids import Grid, Triple, stored_kernel, triple

CELLS = 32


def numbers(value: Any) -> Triple:
    return triple(value if isinstance(value, int) else tuple(value))


class Rows:
    """A sparse tensor: a grid, its tensor stride, and what tensors made of one another share."""

    def __init__(self, grid: Grid, stride: Triple, shared: dict[Any, Any]) -> None:
        self.grid, self.stride, self.shared = grid, stride, shared
        shared.setdefault(stride, grid)

    @property
    def C(self) -> torch.Tensor:
        """(N, 4) batch, x, y, z in cells of the tensor's grid."""
        return self.grid.coords()

    @property
    def F(self) -> torch.Tensor:
        return self.grid.rows()

    def over(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Rows:
        return self.to(self.grid.with_rows(function(self.grid.rows())), self.stride)

    def to(self, grid: Grid, stride: Triple) -> Rows:
        kind = MinkowskiRows if isinstance(self, MinkowskiRows) else Rows
        made = kind.__new__(kind)
        Rows.__init__(made, grid, stride, self.shared)
        return made

    def __add__(self, other: Rows) -> Rows:
        return self.to(self.grid + other.grid, self.stride)


class MinkowskiRows(Rows):
    @property
    def C(self) -> torch.Tensor:
        """(N, 4) in units of tensor stride 1."""
        return self.grid.coords() * torch.tensor([1, *self.stride])


class MinkowskiTensor(MinkowskiRows):
    def __init__(self, features: torch.Tensor, coordinates: torch.Tensor) -> None:
        super().__init__(Grid.of(coordinates, features, 0, CELLS), (1, 1, 1), {})


class TorchsparseTensor(Rows):
    def __init__(self, feats: torch.Tensor, coords: torch.Tensor) -> None:
        super().__init__(Grid.of(coords, feats, 0, CELLS), (1, 1, 1), {})


class Layer(nn.Module):
    """A torch layer on the rows, under its own name as the library has it."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self._name = name
        self.add_module(name, layer)

    def forward(self, x: Rows) -> Rows:
        return x.over(self.get_submodule(self._name))


class Convolution(nn.Module):
    """`kernel` and `bias` as both libraries store them."""

    def __init__(self, c_in: int, c_out: int, size: Triple, stride: Triple, bias: bool, wide: bool) -> None:
        super().__init__()
        self.size, self.step = size, stride
        volume = math.prod(size)
        flat = volume == 1 and stride == (1, 1, 1)
        self.kernel = nn.Parameter(torch.empty((c_in, c_out) if flat else (volume, c_in, c_out)))
        self.bias = nn.Parameter(torch.empty((1, c_out) if wide else c_out)) if bias else None

    def ends(self, x: Rows) -> Triple:
        """The coarser and the finer tensor stride."""
        a, b, c = (t * s for t, s in zip(x.stride, self.step, strict=True))
        return a, b, c

    def finer(self, x: Rows) -> Triple:
        a, b, c = (t // s for t, s in zip(x.stride, self.step, strict=True))
        return a, b, c

    def added(self, grid: Grid) -> Grid:
        return grid if self.bias is None else grid.with_rows(grid.rows() + self.bias.view(-1))


# ---- MinkowskiEngine ---------------------------------------------------------------------------------------


def minkowski() -> dict[str, ModuleType]:
    """The modules of a stand-in, by name."""

    class MinkowskiConvolution(Convolution):
        TRANSPOSED = False

        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: Any = -1,
            stride: Any = 1,
            dilation: Any = 1,
            bias: bool = False,
            kernel_generator: Any = None,
            dimension: int = 3,
        ) -> None:
            if kernel_generator is not None:
                kernel_size, stride, dilation = kernel_generator.arguments
            assert numbers(dilation) == (1, 1, 1)
            super().__init__(
                in_channels, out_channels, numbers(kernel_size), numbers(stride), bias, wide=True
            )

        def forward(self, x: Rows) -> Rows:
            weight = stored_kernel(self.kernel, self.size)
            padding = tuple(k // 2 if k % 2 else 0 for k in self.size)
            if self.TRANSPOSED:
                fine = x.shared[self.finer(x)].mask
                made = x.grid.conv_transpose(weight, self.step, padding, fine.shape[1:], fine)
                return x.to(self.added(made), self.finer(x))
            stride = self.ends(x)
            mask = x.shared[stride].mask if stride in x.shared else x.grid.cells(self.step)
            return x.to(self.added(x.grid.conv(weight, self.step, padding, mask)), stride)

    class MinkowskiConvolutionTranspose(MinkowskiConvolution):
        TRANSPOSED = True

    class Pooling(nn.Module):
        HOW = ""

        def __init__(self, kernel_size: int, stride: int = 1, dimension: int = 3) -> None:
            super().__init__()
            self.window = kernel_size, stride, kernel_size // 2 if kernel_size % 2 else 0

        def forward(self, x: Rows) -> Rows:
            size, step, padding = self.window
            a, b, c = (t * step for t in x.stride)
            mask = x.shared[a, b, c].mask if (a, b, c) in x.shared else x.grid.cells(step)
            return x.to(x.grid.pool(self.HOW, size, step, padding, mask), (a, b, c))

    class Samples(nn.Module):
        def __init__(self, *args: Any) -> None:
            super().__init__()

        def forward(self, x: Rows) -> Rows:
            stats = x.grid.samples(self.reduce)
            mask = torch.ones((len(stats), 1, 1, 1), dtype=torch.bool)
            return x.to(Grid(stats[:, :, None, None, None], mask, (0, 0, 0)), (0, 0, 0))

        @staticmethod
        def reduce(rows: torch.Tensor) -> torch.Tensor:
            return rows.mean(0)

    class MinkowskiGlobalMaxPooling(Samples):
        @staticmethod
        def reduce(rows: torch.Tensor) -> torch.Tensor:
            return rows.amax(0)

    class MinkowskiInstanceNorm(nn.Module):
        def __init__(self, num_features: int) -> None:
            super().__init__()
            self.weight, self.bias = (nn.Parameter(torch.empty(1, num_features)) for _ in range(2))

        def forward(self, x: Rows) -> Rows:
            batch = x.grid.coords()[:, 0]
            rows = x.F
            made = torch.empty_like(rows)
            for sample in batch.unique():
                part = rows[batch == sample]
                var, mean = torch.var_mean(part, 0, unbiased=False)
                made[batch == sample] = (part - mean) / (var + 1e-8).sqrt()
            return x.over(lambda _: made * self.weight + self.bias)

    class KernelGenerator:
        def __init__(
            self,
            kernel_size: Any,
            stride: Any = 1,
            dilation: Any = 1,
            region_type: Any = 0,
            dimension: int = 3,
            **kwargs: Any,
        ) -> None:
            assert int(region_type) == 0
            self.arguments = kernel_size, stride, dilation

    class MinkowskiNetwork(nn.Module):
        def __init__(self, D: int) -> None:
            super().__init__()
            self.D = D

    def layer(name: str, make: Callable[..., nn.Module]) -> type[Layer]:
        class Made(Layer):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                kwargs.pop("inplace", None)
                super().__init__(name, make(*args, **kwargs))

        return Made

    def cat(*tensors: Any) -> Rows:
        found = list(tensors[0]) if isinstance(tensors[0], (list, tuple)) else list(tensors)
        for other in found[1:]:
            assert torch.equal(found[0].grid.mask, other.grid.mask)
        return found[0].over(lambda _: torch.cat([t.F for t in found], 1))

    regions = {"HYPER_CUBE": 0, "HYPER_CROSS": 1, "CUSTOM": 2}
    names = {
        "SparseTensor": MinkowskiTensor,
        "TensorField": type("TensorField", (), {}),
        "MinkowskiConvolution": MinkowskiConvolution,
        "MinkowskiConvolutionTranspose": MinkowskiConvolutionTranspose,
        "MinkowskiMaxPooling": type("MaxPooling", (Pooling,), {"HOW": "max"}),
        "MinkowskiAvgPooling": type("AvgPooling", (Pooling,), {"HOW": "avg"}),
        "MinkowskiSumPooling": type("SumPooling", (Pooling,), {"HOW": "sum"}),
        "MinkowskiGlobalPooling": Samples,
        "MinkowskiGlobalAvgPooling": Samples,
        "MinkowskiGlobalMaxPooling": MinkowskiGlobalMaxPooling,
        "MinkowskiInstanceNorm": MinkowskiInstanceNorm,
        "MinkowskiBatchNorm": layer("bn", nn.BatchNorm1d),
        "MinkowskiLinear": layer("linear", nn.Linear),
        "MinkowskiReLU": layer("module", nn.ReLU),
        "MinkowskiGELU": layer("module", nn.GELU),
        "MinkowskiDropout": layer("module", nn.Dropout),
        "MinkowskiNetwork": MinkowskiNetwork,
        "KernelGenerator": KernelGenerator,
        "RegionType": type("RegionType", (int,), regions),
        "cat": cat,
    }
    return package(
        "MinkowskiEngine",
        names,
        MinkowskiOps=names,
        MinkowskiPooling=names,
        MinkowskiFunctional={"relu": lambda x: x.over(torch.relu)},
        utils={"kaiming_normal_": lambda tensor, **kwargs: tensor},
    )


# ---- torchsparse 2.1 ---------------------------------------------------------------------------------------


def torchsparse() -> dict[str, ModuleType]:
    """The modules of a stand-in, by name."""

    class Conv3d(Convolution):
        def __init__(
            self,
            in_channels: int,
            out_channels: int,
            kernel_size: Any = 3,
            stride: Any = 1,
            padding: Any = 0,
            dilation: int = 1,
            bias: bool = False,
            transposed: bool = False,
        ) -> None:
            super().__init__(
                in_channels, out_channels, numbers(kernel_size), numbers(stride), bias, wide=False
            )
            self.padding, self.transposed = numbers(padding), transposed

        def forward(self, x: Rows) -> Rows:
            odd = math.prod(self.size) % 2 == 1
            weight = stored_kernel(self.kernel, self.size, odd)
            if self.step == (1, 1, 1):
                padding = tuple(k // 2 if odd else 0 for k in self.size)
                return x.to(self.added(x.grid.conv(weight, 1, padding)), x.stride)
            if self.transposed:
                stride = self.finer(x)
                fine = x.shared[stride].mask
                padding = x.shared["layer", stride, self.size, self.step]
                made = x.grid.conv_transpose(weight, self.step, padding, fine.shape[1:], fine)
                return x.to(self.added(made), stride)
            x.shared["layer", x.stride, self.size, self.step] = self.padding
            mask = x.grid.clipped_windows(self.size, self.step, self.padding)
            return x.to(self.added(x.grid.conv(weight, self.step, self.padding, mask)), self.ends(x))

    class BatchNorm(nn.BatchNorm1d):
        def forward(self, x: Any) -> Any:
            return x.over(super().forward)

    class ReLU(nn.ReLU):
        def forward(self, x: Any) -> Any:
            return x.over(torch.relu)

    def cat(tensors: list[Rows]) -> Rows:
        return tensors[0].over(lambda _: torch.cat([t.F for t in tensors], 1))

    spnn = {"Conv3d": Conv3d, "BatchNorm": BatchNorm, "ReLU": ReLU}
    return package("torchsparse", {"SparseTensor": TorchsparseTensor, "cat": cat}, nn=spnn)


def package(name: str, names: dict[str, Any], **parts: dict[str, Any]) -> dict[str, ModuleType]:
    made = {name: ModuleType(name)}
    made[name].__dict__.update(names)
    for part, members in parts.items():
        made[f"{name}.{part}"] = found = ModuleType(f"{name}.{part}")
        found.__dict__.update(members)
        setattr(made[name], part, found)
    made[name].__path__ = []
    return made


def install(name: str) -> None:
    """`import NAME` gives the stand-in from now on."""
    sys.modules.update({"MinkowskiEngine": minkowski, "torchsparse": torchsparse}[name]())
