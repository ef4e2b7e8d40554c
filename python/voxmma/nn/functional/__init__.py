"""Functions on Voxels; every layer of voxmma.nn has one of the same meaning here."""

from voxmma.nn.functional.sparse_conv import spatially_sparse_conv

__all__ = ["spatially_sparse_conv"]
