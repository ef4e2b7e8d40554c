"""Blocks (`modules`); the backbones are voxmma.models.ResNet21D and resunet42, or torchsparse's own files."""

from voxmma.compat.names import missing as _missing
from voxmma.compat.torchsparse.backbones import modules as modules

__getattr__ = _missing(
    __name__,
    {
        "SparseResNet21D": "voxmma.models.ResNet21D and its keys.torchsparse_resnet",
        "SparseResUNet42": "voxmma.models.resunet42 and its keys.torchsparse_resunet",
    },
)
