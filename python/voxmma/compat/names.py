"""Names that are not there."""

from __future__ import annotations

from typing import Any


def missing(module: str, hints: dict[str, str]) -> Any:
    """A module's `__getattr__`: names that are not there raise AttributeError and say what to use."""

    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        hint = hints.get(name, "voxmma.nn and voxmma.nn.functional hold all layers and functions")
        raise AttributeError(f"voxmma's {module.removeprefix('voxmma.compat.')} has no {name!r}: {hint}")

    return getattribute
