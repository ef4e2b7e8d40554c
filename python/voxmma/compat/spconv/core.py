"""Enumerations of spconv.core, and what is said about names that are not there."""

from __future__ import annotations

import enum


class ConvAlgo(enum.Enum):
    """spconv's algorithms. Layers keep what they are given; what runs is voxmma's one algorithm, with the
    tile that its settings choose."""

    Native = 0
    MaskImplicitGemm = 1
    MaskSplitImplicitGemm = 2


class AlgoHint(enum.Enum):
    """What spconv's tuner was asked about; nothing here reads it."""

    NoHint = 0
    Fowrard = 1  # spelt so there
    BackwardInput = 2
    BackwardWeight = 4


#: What to use instead of names that are not there, by name or by its end.
_INSTEAD = {
    "get_indice_pairs": "voxmma.kernel_map(...).pairs()",
    "get_indice_pairs_implicit_gemm": "voxmma.kernel_map(...).neighbor_table()",
    "implicit_gemm": "voxmma.nn.functional.spatially_sparse_conv",
    "indice_conv": "voxmma.nn.functional.spatially_sparse_conv",
    "indice_subm_conv": "voxmma.nn.functional.spatially_sparse_conv",
    "indice_inverse_conv": "voxmma.nn.functional.spatially_sparse_conv with kernel_map=...transposed()",
    "indice_maxpool": "voxmma.nn.functional.max_pool",
    "indice_maxpool_implicit_gemm": "voxmma.nn.functional.max_pool",
    "indice_avgpool_implicit_gemm": "voxmma.nn.functional.avg_pool",
    "rbbox_iou": "a box library (torchvision, shapely)",
    "rbbox_intersection": "a box library (torchvision, shapely)",
    "rbbox_iou_loss": "a box library (torchvision, shapely)",
    "BoxOps": "a box library (torchvision, shapely)",
    "non_max_suppression_cpu": "torchvision.ops.nms",
    "rotate_non_max_suppression_cpu": "a box library (torchvision, shapely)",
    "nms": "a box library (torchvision, shapely)",
    "non_max_suppression": "a box library (torchvision, shapely)",
    "FocalsConv3d": "a focal convolution in Python: this one is of a fork of spconv",
    "SpatialGroupConv3d": "SubMConv3d with shared weights: this one is of a fork of spconv",
    "HashTable": "voxmma.lookup on a voxmma.CoordSet",
    "RemoveDuplicate": "voxmma.unique",
    "SparseSyncBatchNorm": "voxmma.nn.SyncBatchNorm",
    "CUDAKernelTimer": "torch.profiler",
    "core_cc": "voxmma's own kernels, voxmma.nn.functional",
}


def missing(module: str, name: str) -> str:
    """The message for a name that is not in `module`."""
    said = f"voxmma.compat has no {module}.{name}"
    return (
        f"{said}: use {_INSTEAD[name]}"
        if name in _INSTEAD
        else f"{said}: docs/migrate.md lists what there is"
    )
