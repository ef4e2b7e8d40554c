"""Functions of the features, offsets of kernels."""

from voxmma.compat.torchsparse.nn.utils.apply import fapply as fapply
from voxmma.compat.torchsparse.nn.utils.kernel import get_kernel_offsets as get_kernel_offsets

__all__ = ["fapply", "get_kernel_offsets"]
