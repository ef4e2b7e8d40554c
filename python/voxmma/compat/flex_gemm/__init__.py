"""FlexGEMM's names, made of voxmma: `voxmma.compat.install("flex_gemm")` before `import flex_gemm`."""

from voxmma.compat.flex_gemm import ops as ops
from voxmma.compat.names import missing as _missing

__getattr__ = _missing(
    __name__, {"kernels": "voxmma.nn.functional", "utils": "voxmma.tune", "autotune": "voxmma.tune"}
)
