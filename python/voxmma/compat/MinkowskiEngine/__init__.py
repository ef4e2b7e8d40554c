"""MinkowskiEngine 0.5's names, made of voxmma: `import voxmma.compat.MinkowskiEngine as ME`, or
`voxmma.compat.install("MinkowskiEngine")` before `import MinkowskiEngine as ME`.

Semantics are MinkowskiEngine's: coordinates in units of tensor stride 1, one coordinate set for a tensor
stride and name, strided layers lead to the cells of the coarser grid. Parameters have its names and
layouts. Layers are voxmma.nn.SparseConv3d, so that policies, plans, voxmma.explain and voxmma.audit work
on them.
"""

import torch as _torch

from voxmma.compat.MinkowskiEngine import MinkowskiFunctional as MinkowskiFunctional
from voxmma.compat.MinkowskiEngine import MinkowskiOps as MinkowskiOps
from voxmma.compat.MinkowskiEngine import modules as modules
from voxmma.compat.MinkowskiEngine import utils as utils
from voxmma.compat.MinkowskiEngine.MinkowskiBroadcast import (
    BroadcastMode as BroadcastMode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiBroadcast import (
    MinkowskiBroadcast as MinkowskiBroadcast,
)
from voxmma.compat.MinkowskiEngine.MinkowskiBroadcast import (
    MinkowskiBroadcastAddition as MinkowskiBroadcastAddition,
)
from voxmma.compat.MinkowskiEngine.MinkowskiBroadcast import (
    MinkowskiBroadcastConcatenation as MinkowskiBroadcastConcatenation,
)
from voxmma.compat.MinkowskiEngine.MinkowskiBroadcast import (
    MinkowskiBroadcastMultiplication as MinkowskiBroadcastMultiplication,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import (
    MinkowskiModuleBase as MinkowskiModuleBase,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import (
    convert_to_int_list as convert_to_int_list,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCommon import (
    convert_to_int_tensor as convert_to_int_tensor,
)
from voxmma.compat.MinkowskiEngine.MinkowskiConvolution import (
    ConvolutionMode as ConvolutionMode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiConvolution import (
    MinkowskiConvolution as MinkowskiConvolution,
)
from voxmma.compat.MinkowskiEngine.MinkowskiConvolution import (
    MinkowskiConvolutionBase as MinkowskiConvolutionBase,
)
from voxmma.compat.MinkowskiEngine.MinkowskiConvolution import (
    MinkowskiConvolutionTranspose as MinkowskiConvolutionTranspose,
)
from voxmma.compat.MinkowskiEngine.MinkowskiConvolution import (
    MinkowskiGenerativeConvolutionTranspose as MinkowskiGenerativeConvolutionTranspose,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    CoordinateManager as CoordinateManager,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    CoordinateMapKey as CoordinateMapKey,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    CoordinateMapType as CoordinateMapType,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    GPUMemoryAllocatorType as GPUMemoryAllocatorType,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    MinkowskiAlgorithm as MinkowskiAlgorithm,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    set_gpu_allocator as set_gpu_allocator,
)
from voxmma.compat.MinkowskiEngine.MinkowskiCoordinateManager import (
    set_memory_manager_backend as set_memory_manager_backend,
)
from voxmma.compat.MinkowskiEngine.MinkowskiInterpolation import (
    MinkowskiInterpolation as MinkowskiInterpolation,
)
from voxmma.compat.MinkowskiEngine.MinkowskiKernelGenerator import (
    KernelGenerator as KernelGenerator,
)
from voxmma.compat.MinkowskiEngine.MinkowskiKernelGenerator import (
    RegionType as RegionType,
)
from voxmma.compat.MinkowskiEngine.MinkowskiKernelGenerator import (
    get_kernel_volume as get_kernel_volume,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNetwork import (
    MinkowskiNetwork as MinkowskiNetwork,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiAlphaDropout as MinkowskiAlphaDropout,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiCELU as MinkowskiCELU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiDropout as MinkowskiDropout,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiELU as MinkowskiELU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiGELU as MinkowskiGELU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiHardshrink as MinkowskiHardshrink,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiHardsigmoid as MinkowskiHardsigmoid,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiHardswish as MinkowskiHardswish,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiHardtanh as MinkowskiHardtanh,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiLeakyReLU as MinkowskiLeakyReLU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiLogSigmoid as MinkowskiLogSigmoid,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiLogSoftmax as MinkowskiLogSoftmax,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiPReLU as MinkowskiPReLU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiReLU as MinkowskiReLU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiReLU6 as MinkowskiReLU6,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiRReLU as MinkowskiRReLU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSELU as MinkowskiSELU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSigmoid as MinkowskiSigmoid,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSiLU as MinkowskiSiLU,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSinusoidal as MinkowskiSinusoidal,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSoftmax as MinkowskiSoftmax,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSoftmin as MinkowskiSoftmin,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSoftplus as MinkowskiSoftplus,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSoftshrink as MinkowskiSoftshrink,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiSoftsign as MinkowskiSoftsign,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiTanh as MinkowskiTanh,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiTanhshrink as MinkowskiTanhshrink,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNonlinearity import (
    MinkowskiThreshold as MinkowskiThreshold,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNormalization import (
    MinkowskiBatchNorm as MinkowskiBatchNorm,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNormalization import (
    MinkowskiInstanceNorm as MinkowskiInstanceNorm,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNormalization import (
    MinkowskiStableInstanceNorm as MinkowskiStableInstanceNorm,
)
from voxmma.compat.MinkowskiEngine.MinkowskiNormalization import (
    MinkowskiSyncBatchNorm as MinkowskiSyncBatchNorm,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiLinear as MinkowskiLinear,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiStackCat as MinkowskiStackCat,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiStackMean as MinkowskiStackMean,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiStackSum as MinkowskiStackSum,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiStackVar as MinkowskiStackVar,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiToDenseTensor as MinkowskiToDenseTensor,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiToFeature as MinkowskiToFeature,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    MinkowskiToSparseTensor as MinkowskiToSparseTensor,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import _sum as sum  # noqa: F401
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    cat as cat,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    dense_coordinates as dense_coordinates,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    mean as mean,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    to_sparse as to_sparse,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    to_sparse_all as to_sparse_all,
)
from voxmma.compat.MinkowskiEngine.MinkowskiOps import (
    var as var,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiAvgPooling as MinkowskiAvgPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiGlobalAvgPooling as MinkowskiGlobalAvgPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiGlobalMaxPooling as MinkowskiGlobalMaxPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiGlobalPooling as MinkowskiGlobalPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiGlobalSumPooling as MinkowskiGlobalSumPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiMaxPooling as MinkowskiMaxPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiPoolingTranspose as MinkowskiPoolingTranspose,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    MinkowskiSumPooling as MinkowskiSumPooling,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPooling import (
    PoolingMode as PoolingMode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiPruning import (
    MinkowskiPruning as MinkowskiPruning,
)
from voxmma.compat.MinkowskiEngine.MinkowskiSparseTensor import (
    SparseTensor as SparseTensor,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    SparseTensorOperationMode as SparseTensorOperationMode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    SparseTensorQuantizationMode as SparseTensorQuantizationMode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    clear_global_coordinate_manager as clear_global_coordinate_manager,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    global_coordinate_manager as global_coordinate_manager,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    set_global_coordinate_manager as set_global_coordinate_manager,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    set_sparse_tensor_operation_mode as set_sparse_tensor_operation_mode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensor import (
    sparse_tensor_operation_mode as sparse_tensor_operation_mode,
)
from voxmma.compat.MinkowskiEngine.MinkowskiTensorField import (
    TensorField as TensorField,
)
from voxmma.compat.MinkowskiEngine.MinkowskiUnion import (
    MinkowskiUnion as MinkowskiUnion,
)
from voxmma.compat.MinkowskiEngine.options import configure as configure
from voxmma.compat.names import missing as _missing

__version__ = "0.5.4"


def is_cuda_available() -> bool:
    """Whether there is a GPU."""
    return _torch.cuda.is_available()


__getattr__ = _missing(
    __name__,
    {
        "CoordsManager": "CoordinateManager, its name since MinkowskiEngine 0.5",
        "MinkowskiAdaptiveLogSoftmaxWithLoss": "torch.nn.AdaptiveLogSoftmaxWithLoss on x.F",
        "MinkowskiAvgUnpooling": "MinkowskiPoolingTranspose",
        "MinkowskiChannelwiseConvolution": "voxmma.nn.SparseConv3d(channels, channels, ..., groups=channels)",
        "spmm": "torch.sparse.mm, or voxmma.nn.functional's pooling over a kernel map",
    },
)
