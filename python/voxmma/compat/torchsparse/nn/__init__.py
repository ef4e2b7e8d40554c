"""Layers, `functional` and `utils`."""

from voxmma.compat.names import missing as _missing
from voxmma.compat.torchsparse.nn import functional as functional
from voxmma.compat.torchsparse.nn import utils as utils
from voxmma.compat.torchsparse.nn.modules import BatchNorm as BatchNorm
from voxmma.compat.torchsparse.nn.modules import Conv3d as Conv3d
from voxmma.compat.torchsparse.nn.modules import GlobalAvgPool as GlobalAvgPool
from voxmma.compat.torchsparse.nn.modules import GlobalMaxPool as GlobalMaxPool
from voxmma.compat.torchsparse.nn.modules import GroupNorm as GroupNorm
from voxmma.compat.torchsparse.nn.modules import LeakyReLU as LeakyReLU
from voxmma.compat.torchsparse.nn.modules import ReLU as ReLU
from voxmma.compat.torchsparse.nn.modules import SiLU as SiLU
from voxmma.compat.torchsparse.nn.modules import SparseCrop as SparseCrop

_BEV = "torchsparse.utils.to_dense and torch.nn.Conv2d, or voxmma.to_dense"
__getattr__ = _missing(
    __name__,
    {
        "InstanceNorm": "voxmma.nn.InstanceNorm (torchsparse's takes (N, C) for one sample)",
        "ToBEVConvolution": _BEV,
        "ToBEVHeightCompression": _BEV,
        "ToBEVReduction": _BEV,
        "ToDenseBEVConvolution": _BEV,
    },
)
