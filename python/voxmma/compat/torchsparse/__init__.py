"""torchsparse's names, made of voxmma: `voxmma.compat.install("torchsparse")` before `import torchsparse`.

Semantics are those of torchsparse 2.1, or with version=1 of 1.4 (`options`): which columns coordinates
have, which voxels strided layers make. Parameters have its names and layouts. Layers are
voxmma.nn.SparseConv3d, so that policies, plans, voxmma.explain and voxmma.audit work on them.
"""

from voxmma.compat.names import missing as _missing
from voxmma.compat.torchsparse import backend as backend
from voxmma.compat.torchsparse import backends as backends
from voxmma.compat.torchsparse import nn as nn
from voxmma.compat.torchsparse import utils as utils
from voxmma.compat.torchsparse.operators import cat as cat
from voxmma.compat.torchsparse.options import configure as configure
from voxmma.compat.torchsparse.tensor import PointTensor as PointTensor
from voxmma.compat.torchsparse.tensor import SparseTensor as SparseTensor
from voxmma.compat.torchsparse.utils import collate as _collate  # noqa: F401
from voxmma.compat.torchsparse.utils import quantize as _quantize  # noqa: F401

__version__ = "2.1.0"
__getattr__ = _missing(
    __name__,
    {
        "generative_add": "voxmma.nn.functional.add_union",
        "tune": "voxmma.tune",
    },
)
