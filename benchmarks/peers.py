"""Other sparse convolution libraries behind one interface, for benchmarks/peerbench.py.

An adapter is one layer (channels, kernel, stride, dtype) of one library on one problem. It is told x, weights
and gradients in voxmma's conventions and converts the weight's layout once, outside of what is timed. A
library's own order of output (or input) rows stays its own: `out_coords` and `in_coords` say what it is.

Nothing here imports a peer before its adapter is made: each runs in a process of its own
(benchmarks/peerbench.py).
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from typing import Any, ClassVar

import torch
from torch import Tensor

from voxmma.compat.convert import LAYOUTS, convert_weight
from voxmma.ops.formats import DTYPES

from peer_problem import Layer, Problem, find_pairs, reached


class Unsupported(RuntimeError):
    """A layer that a library, or its adapter here, does not have."""


# ---- weights -----------------------------------------------------------------------------------------------


def to_layout(weight: Tensor, layout: str, kernel: int) -> Tensor:
    """(K, C_in, C_out) in another library's layout with the kernel's axes apart; undoes convert_weight."""
    axes = LAYOUTS[layout]
    if layout == "torchsparse" and kernel % 2 == 0:
        axes = LAYOUTS["voxmma"]
    split = weight.reshape(kernel, kernel, kernel, *weight.shape[1:])
    return split.permute([("012io").index(axis) for axis in axes]).contiguous()


# ---- adapters ----------------------------------------------------------------------------------------------


class Adapter:
    """One layer of one library. `forward` with a state that `fresh` made builds the kernel map into it."""

    package: ClassVar[str] = ""
    """what is imported"""
    distributions: ClassVar[tuple[str, ...]] = ()
    """names under which the package is installed, for its version"""
    variants: ClassVar[tuple[str, ...]] = ("default",)
    layout: ClassVar[str] = "voxmma"
    flat: ClassVar[bool] = False
    """the weight's kernel axes are one"""
    needs_gpu: ClassVar[bool] = True
    strided: ClassVar[bool] = True
    transposes: ClassVar[bool] = False

    def __init__(self, problem: Problem, layer: Layer, variant: str) -> None:
        if variant not in self.variants:
            raise Unsupported(f"variant {variant!r} is none of {', '.join(self.variants)}")
        if self.needs_gpu and problem.device.type != "cuda":
            raise Unsupported("runs on a GPU only")
        if layer.stride > 1 and not self.strided:
            raise Unsupported("no strided layer with a kept map in this adapter")
        if layer.transposed and not self.transposes:
            raise Unsupported("no transposed layer in this adapter")
        self.problem, self.layer, self.variant = problem, layer, variant
        self.dtype = DTYPES[layer.dtype]
        self.setup()

    def setup(self) -> None:
        """Imports the library and makes its layer."""

    def weight(self, w: Tensor) -> Tensor:
        """The leaf that holds `w` (K, C_in, C_out)."""
        made = to_layout(w, self.layout, self.layer.kernel)
        if self.flat:
            made = made.flatten(0, 2)
        return self.adopt(made)

    def adopt(self, w: Tensor) -> Tensor:
        """Makes a weight in the library's layout the layer's; returns the leaf."""
        return w.clone().requires_grad_()

    def gradient(self, g: Tensor) -> Tensor:
        """A gradient of that leaf as (K, C_in, C_out)."""
        return convert_weight(g, self.layout, self.layer.kernel)

    def fresh(self) -> dict[str, Any]:
        """A state without a kernel map."""
        return {}

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        """(n_out, C_out) in the library's order of rows."""
        raise NotImplementedError

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        """(n_out, 4) batch and output cell of each row after a forward; None = the problem's order."""
        return None

    def in_coords(self, state: dict[str, Any]) -> Tensor | None:
        """(n_in, 4) of the rows in which x is taken; None = the problem's order."""
        return None

    def note(self) -> str:
        """What ran, where the library can say; after a forward."""
        return ""


class Voxmma(Adapter):
    """This library; the variant is the accumulator, asked for explicitly."""

    package, distributions, needs_gpu, flat = "voxmma", ("voxmma",), False, True
    variants = ("fp32", "fp16")
    transposes = True

    def setup(self) -> None:
        import voxmma

        self.lib = voxmma
        voxmma.settings.set_fp32_precision("tf32" if self.layer.dtype == "tf32" else "ieee")
        self.said = ""

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if not state:
            coords = self.lib.CoordSet(self.problem.coords, self.problem.batch_size)
            if self.layer.transposed:
                coords = self.lib.kernel_map(coords, self.layer.kernel, stride=self.layer.stride).out_coords
            state["voxels"] = self.lib.Voxels(coords, x.detach())
        made = self.lib.nn.functional.spatially_sparse_conv(
            state["voxels"].with_feats(x),
            w,
            self.layer.kernel,
            stride=self.layer.stride,
            transposed=self.layer.transposed,
            use_fp16_accum=self.variant == "fp16",
        )
        state["out"] = made.coord_set
        if not self.said:
            record = self.lib.explain(made)
            self.said = f"{record.tile}, {record.dgrad_tile}, {record.wgrad_tile}"
        return made.feats

    def in_coords(self, state: dict[str, Any]) -> Tensor | None:
        return state["voxels"].coords if self.layer.transposed else None

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        return None if self.layer.stride == 1 else state["out"].coords

    def note(self) -> str:
        return self.said


class GatherGemm(Adapter):
    """Plain torch: rows of each offset gathered, one matrix product, rows added. The baseline that is always
    there."""

    package, distributions, needs_gpu, flat = "torch", ("torch",), False, True
    transposes = True

    def setup(self) -> None:
        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor, w: Tensor, pairs: Any, n_out: int) -> Tensor:
                ctx.save_for_backward(x, w)
                ctx.pairs = pairs
                y = x.new_zeros(n_out, w.shape[2])
                for k, (rows, out) in enumerate(pairs):
                    y.index_add_(0, out, x[rows] @ w[k])
                return y

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> Any:
                x, w = ctx.saved_tensors
                dx, dw = torch.zeros_like(x), torch.zeros_like(w)
                for k, (rows, out) in enumerate(ctx.pairs):
                    part = dy[out]
                    if ctx.needs_input_grad[0]:
                        dx.index_add_(0, rows, part @ w[k].t())
                    if ctx.needs_input_grad[1]:
                        dw[k] = x[rows].t() @ part
                wanted = ctx.needs_input_grad
                return dx if wanted[0] else None, dw if wanted[1] else None, None, None

        self.function = Function

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if not state:
            coords, layer = self.problem.coords, self.layer
            cells = reached(coords, layer)
            pairs = find_pairs(coords, cells, layer)
            state["pairs"] = [(out, rows) for rows, out in pairs] if layer.transposed else pairs
            state["n_out"] = len(coords if layer.transposed else cells)
        y: Tensor = self.function.apply(x, w, state["pairs"], state["n_out"])
        return y


def spconv_shape(problem: Problem, layer: Layer) -> list[int]:
    """Whole cells on every axis, and one more where windows overlap: spconv drops outputs beyond."""
    more = layer.stride if layer.kernel > layer.stride > 1 else 0
    return [-(-side // layer.stride) * layer.stride + more for side in problem.shape]


class Spconv(Adapter):
    """spconv 2.3; `implicit` asks for fp32 accumulators."""

    package = "spconv"
    distributions: ClassVar[tuple[str, ...]] = (
        "spconv-cu126",
        "spconv-cu124",
        "spconv-cu121",
        "spconv-cu120",
        "spconv-cu118",
        "spconv",
    )
    variants: ClassVar[tuple[str, ...]] = ("implicit", "split", "native")
    layout, transposes = "spconv", True

    def setup(self) -> None:
        layer, root = self.layer, self.package
        self.sp = importlib.import_module(f"{root}.pytorch")
        constants: Any = importlib.import_module(f"{root}.constants")
        constants.SPCONV_ALLOW_TF32 = layer.dtype == "tf32"
        names = {"implicit": "MaskImplicitGemm", "split": "MaskSplitImplicitGemm", "native": "Native"}
        if layer.stride > 1 and not layer.transposed and self.variant == "native":
            raise Unsupported("no strided layer with a kept map in this variant")
        options: dict[str, Any] = {
            "bias": False, "indice_key": "map", "algo": getattr(self.sp.ConvAlgo, names[self.variant]),
        }  # fmt: skip
        if layer.dtype in ("fp16", "bf16"):
            options["fp32_accum"] = True
        strided = {"stride": layer.stride, "padding": layer.origin, **options}
        if layer.transposed:
            self.conv = self.sp.SparseInverseConv3d(layer.c_in, layer.c_out, layer.kernel, **options)
            # A map comes from a strided layer only. Few channels: its convolution is beside the point.
            self.down = self.sp.SparseConv3d(8, 8, layer.kernel, **strided)
            self.down.to(self.problem.device, self.dtype).train()
            self.fine = torch.zeros(len(self.problem.coords), 8, dtype=self.dtype, device=self.problem.device)
        elif layer.stride > 1:
            self.conv = self.sp.SparseConv3d(layer.c_in, layer.c_out, layer.kernel, **strided)
        else:
            self.conv = self.sp.SubMConv3d(layer.c_in, layer.c_out, layer.kernel, **options)
        self.conv.to(self.problem.device, self.dtype).train()
        self.shape = spconv_shape(self.problem, layer)

    def adopt(self, w: Tensor) -> Tensor:
        self.conv.weight = torch.nn.Parameter(w)
        return self.conv.weight

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if not state:
            p = self.problem
            if self.layer.transposed:
                with torch.no_grad():
                    fine = self.sp.SparseConvTensor(self.fine, p.coords, self.shape, p.batch_size)
                    state["input"] = self.down(fine)
                made = self.conv(state["input"].replace_feature(x))
                state["out"] = made.indices
                state["input"] = state["input"].replace_feature(x.detach())  # as below
                return made.features
            made = self.conv(self.sp.SparseConvTensor(x, p.coords, self.shape, p.batch_size))
            state["out"], state["map"] = made.indices, made.find_indice_pair("map")
            state["input"] = made.replace_feature(x.detach())  # keeps no tensor alive but the map
            return made.features
        if self.layer.stride == 1 or self.layer.transposed:  # both take the map they are given
            return self.conv(state["input"].replace_feature(x)).features
        # A strided layer of spconv makes its map anew in each call; this is the rest of that call.
        m, conv, apply = state["map"], self.conv, self.sp.functional.implicit_gemm
        y: Tensor = apply(
            x, w, m.pair_fwd, m.pair_bwd, m.pair_mask_fwd_splits, m.pair_mask_bwd_splits,
            m.mask_argsort_fwd_splits, m.mask_argsort_bwd_splits, len(state["out"]), m.masks, True, False,
            state["input"]._timer, conv.fp32_accum, None, conv.act_alpha, conv.act_beta, conv.act_type,
        )  # fmt: skip
        return y

    def in_coords(self, state: dict[str, Any]) -> Tensor | None:
        return state["input"].indices if self.layer.transposed else None

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        return None if self.layer.stride == 1 else state["out"]


class SpconvTriton(Spconv):
    """spconv's interface on Triton kernels."""

    package, distributions, variants = "spconv_triton", ("spconv-triton",), ("implicit",)


class TorchSparse(Adapter):
    """torchsparse 2.1 (TorchSparse++)."""

    package, distributions, layout, flat = "torchsparse", ("torchsparse",), "torchsparse", True
    variants = ("implicit", "sorted", "gather", "fetch")

    def setup(self) -> None:
        lib, layer = importlib.import_module("torchsparse"), self.layer
        functional = importlib.import_module("torchsparse.nn.functional")
        lib.backends.allow_tf32 = layer.dtype == "tf32"
        lib.backends.hash_rsv_ratio = 4
        default = functional.conv_config._default_conv_config
        config = type(default)(list(default.items()))  # a copy: the default is shared
        flows = {"gather": "GatherScatter", "fetch": "FetchOnDemand"}
        config.dataflow = getattr(functional.Dataflow, flows.get(self.variant, "ImplicitGEMM"))
        config.ifsort, config.split_mask_num = self.variant == "sorted", 1
        made = importlib.import_module("torchsparse.nn").Conv3d(
            layer.c_in, layer.c_out, layer.kernel, stride=layer.stride, bias=False, config=config
        )
        self.conv = made.to(self.problem.device, self.dtype).train()
        self.tensor = lib.SparseTensor
        self.range = (self.problem.batch_size, *self.problem.shape)

    def adopt(self, w: Tensor) -> Tensor:
        self.conv.kernel = torch.nn.Parameter(w)
        return self.conv.kernel

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        given = self.tensor(x, self.problem.coords, 1, self.range)
        given._caches = state.setdefault("caches", given._caches)
        made = self.conv(given)
        state["out"] = made.coords
        return made.feats

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        return None if self.layer.stride == 1 else state["out"]


class Minkowski(Adapter):
    """MinkowskiEngine 0.5, which takes fp32 and fp64 only."""

    package, distributions = "MinkowskiEngine", ("MinkowskiEngine",)
    layout, flat = "minkowski", True

    def setup(self) -> None:
        self.me, layer = importlib.import_module("MinkowskiEngine"), self.layer
        made = self.me.MinkowskiConvolution(
            layer.c_in, layer.c_out, kernel_size=layer.kernel, stride=layer.stride, dimension=3
        )
        self.conv = made.to(self.problem.device, self.dtype).train()

    def adopt(self, w: Tensor) -> Tensor:
        self.conv.kernel = torch.nn.Parameter(w)
        return self.conv.kernel

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if not state:
            given = self.me.SparseTensor(features=x, coordinates=self.problem.coords)
            state.update(key=given.coordinate_map_key, manager=given.coordinate_manager, rows=given.C)
        given = self.me.SparseTensor(
            features=x, coordinate_map_key=state["key"], coordinate_manager=state["manager"]
        )
        made = self.conv(given)
        state["out"] = made.C
        return made.F

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        cells: Tensor = state["out"].clone()
        cells[:, 1:] = cells[:, 1:].div(self.layer.stride, rounding_mode="floor")
        return cells

    def in_coords(self, state: dict[str, Any]) -> Tensor | None:
        return state["rows"]


class WarpConvNet(Adapter):
    """WarpConvNet; it measures its algorithms in the first calls of a shape."""

    package, distributions, flat = "warpconvnet", ("warpconvnet",), True
    variants = ("auto",)

    def setup(self) -> None:
        types = importlib.import_module("warpconvnet.geometry.types.voxels")
        self.convolve = importlib.import_module("warpconvnet.nn.functional.sparse_conv").spatially_sparse_conv
        self.voxels = types.Voxels
        counts = torch.bincount(self.problem.coords[:, 0].long(), minlength=self.problem.batch_size).cpu()
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64, device=counts.device), counts.cumsum(0)])
        self.sites = self.problem.coords[:, 1:].contiguous()
        self.options = dict.fromkeys(("fwd_algo", "dgrad_algo", "wgrad_algo"), self.variant)

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if not state:
            state["input"] = self.voxels(self.sites, x.detach(), offsets=self.offsets)
        made = self.convolve(
            state["input"].replace(batched_features=x),
            w,
            kernel_size=self.layer.kernel,
            stride=self.layer.stride,
            implicit_matmul_fwd_block_size=None,
            implicit_matmul_bwd_block_size=None,
            **self.options,
        )
        if self.layer.stride == 1:  # the map is kept on what the layer returns
            state["input"] = made.replace(batched_features=x.detach())
        else:
            state["out"] = made.batch_indexed_coordinates
        return made.feature_tensor

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        return None if self.layer.stride == 1 else state["out"]


class FlexGemm(Adapter):
    """FlexGEMM, submanifold layers."""

    package, distributions, layout = "flex_gemm", ("flex_gemm", "flex-gemm"), "flexgemm"
    variants = ("masked_splitk", "masked")
    strided = False

    def setup(self) -> None:
        self.ops, layer = importlib.import_module("flex_gemm.ops.spconv"), self.layer
        names = {"masked_splitk": "MASKED_IMPLICIT_GEMM_SPLITK", "masked": "MASKED_IMPLICIT_GEMM"}
        self.ops.set_algorithm(getattr(self.ops.Algorithm, names[self.variant]))
        config: Any = importlib.import_module("flex_gemm.kernels.triton.spconv.config")
        config.allow_tf32 = layer.dtype == "tf32"
        self.shape = torch.Size([self.problem.batch_size, layer.c_in, *self.problem.shape])
        # Its backward needs a bias.
        self.bias = torch.zeros(layer.c_out, dtype=self.dtype, device=self.problem.device)

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        # A map made without gradients lacks what backward needs.
        with torch.set_grad_enabled(torch.is_grad_enabled() or not state):
            given = x if state or x.requires_grad else x.detach().requires_grad_()
            y: Tensor
            y, state["map"] = self.ops.sparse_submanifold_conv3d(
                given, self.problem.coords, self.shape, w, self.bias, state.get("map")
            )
        return y


class Fvdb(Adapter):
    """fVDB, submanifold layers."""

    package, distributions, layout = "fvdb", ("fvdb-core", "fvdb"), "fvdb"
    strided = False

    def setup(self) -> None:
        self.lib = importlib.import_module("fvdb")

    def forward(self, state: dict[str, Any], x: Tensor, w: Tensor) -> Tensor:
        if not state:
            coords = self.problem.coords
            samples = [coords[coords[:, 0] == b, 1:] for b in range(self.problem.batch_size)]
            grid = self.lib.GridBatch.from_ijk(self.lib.JaggedTensor(samples))
            plan = self.lib.ConvolutionPlan.from_grid_batch(
                kernel_size=self.layer.kernel, stride=1, source_grid=grid, target_grid=grid
            )
            state.update(grid=grid, plan=plan)
        made = state["plan"].execute(state["grid"].jagged_like(x), w)
        y: Tensor = made.jdata
        return y

    def in_coords(self, state: dict[str, Any]) -> Tensor | None:
        ijk = state["grid"].ijk
        return torch.cat([ijk.jidx.to(ijk.jdata).unsqueeze(1), ijk.jdata], dim=1).int()

    def out_coords(self, state: dict[str, Any]) -> Tensor | None:
        return self.in_coords(state)


#: Every library by its name on the command line, ours first.
ADAPTERS: dict[str, type[Adapter]] = {
    "voxmma": Voxmma,
    "torch": GatherGemm,
    "spconv": Spconv,
    "spconv-triton": SpconvTriton,
    "torchsparse": TorchSparse,
    "minkowski": Minkowski,
    "warpconvnet": WarpConvNet,
    "flexgemm": FlexGemm,
    "fvdb": Fvdb,
}


def installed(name: str) -> bool:
    """Whether the library's package can be found, without importing it."""
    return importlib.util.find_spec(ADAPTERS[name].package) is not None


def version(name: str) -> str:
    """The installed version, '' where the package has none on record."""
    for distribution in ADAPTERS[name].distributions:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def parse_library(text: str) -> tuple[str, str]:
    """'spconv' or 'spconv:native' as (library, variant). Raises ValueError naming the choices."""
    name, _, variant = text.strip().partition(":")
    if name not in ADAPTERS:
        raise ValueError(f"{name!r} is none of {', '.join(ADAPTERS)}")
    choices = ADAPTERS[name].variants
    if variant and variant not in choices:
        raise ValueError(f"{name} has the variants {', '.join(choices)}, not {variant!r}")
    return name, variant or choices[0]
