"""Which torchsparse is meant."""

from __future__ import annotations

version = 2
"""2: columns (batch, x, y, z) in cells of the tensor's own grid, strided layers as spconv's. 1: columns
(x, y, z, batch) in units of tensor stride 1, strided layers centred."""
dilation = "error"
"""'error', 'apply' or 'ignore': what a dilation other than 1 does. torchsparse 1.4 to 2.1 ignore it."""


def configure(version: int = 2, dilation: str = "error") -> None:
    """Options of voxmma.compat.install("torchsparse", ...): version 1 or 2, dilation 'error', 'apply' or
    'ignore'. ValueError for others. They hold for the whole process."""
    if version not in (1, 2):
        raise ValueError(f"version must be 1 (1.x) or 2 (2.x), got {version!r}")
    if dilation not in ("error", "apply", "ignore"):
        raise ValueError(f"dilation must be 'error', 'apply' or 'ignore', got {dilation!r}")
    globals().update(version=version, dilation=dilation)
