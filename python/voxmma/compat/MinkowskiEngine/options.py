"""Which MinkowskiEngine is meant."""

from __future__ import annotations

version = 0.5
"""0.5, or 0.4: what sparse_quantize(return_index=True) returns. Names of 0.4 are there with both."""


def configure(version: float = 0.5) -> None:
    """The option of voxmma.compat.install("MinkowskiEngine", ...): version 0.4 or 0.5, for the whole process.
    ValueError for others."""
    if version not in (0.4, 0.5):
        raise ValueError(f"version must be 0.4 or 0.5, got {version!r}")
    globals().update(version=version)
