"""Coordinates from points, batches, initialisation."""

from voxmma.compat.MinkowskiEngine.utils.collation import SparseCollation as SparseCollation
from voxmma.compat.MinkowskiEngine.utils.collation import batch_sparse_collate as batch_sparse_collate
from voxmma.compat.MinkowskiEngine.utils.collation import batched_coordinates as batched_coordinates
from voxmma.compat.MinkowskiEngine.utils.collation import sparse_collate as sparse_collate
from voxmma.compat.MinkowskiEngine.utils.init import kaiming_normal_ as kaiming_normal_
from voxmma.compat.MinkowskiEngine.utils.quantization import fnv_hash_vec as fnv_hash_vec
from voxmma.compat.MinkowskiEngine.utils.quantization import ravel_hash_vec as ravel_hash_vec
from voxmma.compat.MinkowskiEngine.utils.quantization import sparse_quantize as sparse_quantize
from voxmma.compat.MinkowskiEngine.utils.quantization import unique_coordinate_map as unique_coordinate_map
from voxmma.compat.names import missing as _missing

__getattr__ = _missing(__name__, {"summary": "voxmma.explain and voxmma.audit, or print the model"})
