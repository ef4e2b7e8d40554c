"""Numbers per axis and dense grids; `collate`, `quantize` and `tensor_cache` are modules."""

from voxmma.compat.names import missing as _missing
from voxmma.compat.torchsparse.utils.to_dense import to_dense as to_dense
from voxmma.compat.torchsparse.utils.utils import make_divisible as make_divisible
from voxmma.compat.torchsparse.utils.utils import make_ntuple as make_ntuple
from voxmma.compat.torchsparse.utils.utils import make_tensor as make_tensor

__all__ = ["make_divisible", "make_ntuple", "make_tensor", "to_dense"]
__getattr__ = _missing(__name__, {"tune": "voxmma.tune"})
