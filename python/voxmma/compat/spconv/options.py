"""Which spconv is meant."""

from __future__ import annotations

version = 2
"""2, or 1: what an `indice_key` names, and the stride of pools that say none."""


def configure(version: int = 2) -> None:
    """The option of voxmma.compat.install("spconv", ...): version 1 or 2, for the whole process. ValueError
    for others.

    With version 1 an `indice_key` names one map for all layers of a network, also where the tensors it goes
    by are branches of another: a submanifold layer runs over the map that the first layer with its key made,
    with as many of its offsets, in their order, as that one has, whatever its own kernel_size. Pools have
    stride 1.
    """
    if version not in (1, 2):
        raise ValueError(f"version must be 1 (1.x) or 2 (2.x), got {version!r}")
    globals().update(version=version)
