"""Networks of the field out of voxmma's layers, to read, to train and to load other libraries' weights into.

    net = voxmma.models.spunet(in_channels=6, out_channels=20)
    logits = net(voxels).feats                                       # (N, 20)
    voxmma.convert.load(net, checkpoint, "spconv", rename=voxmma.models.pointcept_spunet)

| network | shape of | key map | layout |
| --- | --- | --- | --- |
| `spunet` | Pointcept's SpUNet-v1m1 | `pointcept_spunet` | spconv |
| `minkunet` | MinkowskiEngine's MinkUNet14A ... 34C | `minkowski_minkunet` | minkowski |
| `resunet42` | torchsparse's SparseResUNet42 | `torchsparse_resunet` | torchsparse |
| `SECONDBackbone` | OpenPCDet's VoxelBackBone8x | `openpcdet_second` | spconv |
| `ResNet21D` | torchsparse's SparseResNet21D | `torchsparse_resnet` | torchsparse |
| `VAEDecoder` | the decoder of MinkowskiEngine's VAE example | `minkowski_vae` | minkowski |
"""

from voxmma.models.blocks import ResidualBlock, conv_norm
from voxmma.models.keys import (
    minkowski_minkunet,
    minkowski_vae,
    openpcdet_second,
    pointcept_spunet,
    torchsparse_resnet,
    torchsparse_resunet,
)
from voxmma.models.resnet import ResNet21D
from voxmma.models.second import SECONDBackbone
from voxmma.models.unet import MINKUNETS, SparseUNet, minkunet, resunet42, spunet
from voxmma.models.vae import VAEDecoder, occupancy

__all__ = [
    "MINKUNETS",
    "ResNet21D",
    "ResidualBlock",
    "SECONDBackbone",
    "SparseUNet",
    "VAEDecoder",
    "conv_norm",
    "minkowski_minkunet",
    "minkowski_vae",
    "minkunet",
    "occupancy",
    "openpcdet_second",
    "pointcept_spunet",
    "resunet42",
    "spunet",
    "torchsparse_resnet",
    "torchsparse_resunet",
]
