"""Functions."""

from voxmma.compat.names import missing as _missing
from voxmma.compat.torchsparse.nn.functional import conv_config as conv_config
from voxmma.compat.torchsparse.nn.functional.activation import leaky_relu as leaky_relu
from voxmma.compat.torchsparse.nn.functional.activation import relu as relu
from voxmma.compat.torchsparse.nn.functional.activation import silu as silu
from voxmma.compat.torchsparse.nn.functional.conv import conv3d as conv3d
from voxmma.compat.torchsparse.nn.functional.conv_config import ConvMode as ConvMode
from voxmma.compat.torchsparse.nn.functional.conv_config import Dataflow as Dataflow
from voxmma.compat.torchsparse.nn.functional.conv_config import get_conv_mode as get_conv_mode
from voxmma.compat.torchsparse.nn.functional.conv_config import get_downsample_mode as get_downsample_mode
from voxmma.compat.torchsparse.nn.functional.conv_config import get_kmap_mode as get_kmap_mode
from voxmma.compat.torchsparse.nn.functional.conv_config import set_conv_mode as set_conv_mode
from voxmma.compat.torchsparse.nn.functional.conv_config import set_downsample_mode as set_downsample_mode
from voxmma.compat.torchsparse.nn.functional.conv_config import set_kmap_mode as set_kmap_mode
from voxmma.compat.torchsparse.nn.functional.count import spcount as spcount
from voxmma.compat.torchsparse.nn.functional.crop import spcrop as spcrop
from voxmma.compat.torchsparse.nn.functional.devoxelize import calc_ti_weights as calc_ti_weights
from voxmma.compat.torchsparse.nn.functional.devoxelize import spdevoxelize as spdevoxelize
from voxmma.compat.torchsparse.nn.functional.hash import sphash as sphash
from voxmma.compat.torchsparse.nn.functional.pooling import global_avg_pool as global_avg_pool
from voxmma.compat.torchsparse.nn.functional.pooling import global_max_pool as global_max_pool
from voxmma.compat.torchsparse.nn.functional.query import sphashquery as sphashquery
from voxmma.compat.torchsparse.nn.functional.voxelize import spvoxelize as spvoxelize

__getattr__ = _missing(
    __name__,
    {
        "build_kernel_map": "voxmma.kernel_map",
        "spdownsample": "voxmma.downsample, or the coordinates that a strided layer makes",
        "spupsample_generative": "voxmma.nn.SparseConvTranspose3d(..., generative=True)",
        "transpose_kernel_map": "voxmma.KernelMap.transposed",
    },
)
