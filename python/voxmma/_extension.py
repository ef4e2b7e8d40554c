"""The compiled part, `_C`: loaded once, and explained where it is missing or was built for another torch."""

from __future__ import annotations

import torch

_REBUILD = "run 'pip install --no-build-isolation .' in voxmma's source folder"
try:
    from voxmma import _C as _C
except ImportError as error:
    raise ImportError(
        f"voxmma's compiled part cannot be loaded with torch {torch.__version__} ({error}): {_REBUILD}"
    ) from error
if _C.TORCH_VERSION.split(".")[:2] != torch.__version__.split(".")[:2]:  # C++ interfaces change
    raise ImportError(
        f"voxmma was built for torch {_C.TORCH_VERSION}, this is torch {torch.__version__}: {_REBUILD}"
    )
