"""Names that are not there."""

from __future__ import annotations

from typing import Any


def missing(module: str, hints: dict[str, str]) -> Any:
    """A module's `__getattr__`: names that are not there raise AttributeError and say what to use."""

    def getattribute(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        said = f"voxmma.compat has no {module.removeprefix('voxmma.compat.')}.{name}"
        hint = f"use {hints[name]}" if name in hints else "docs/migrate.md lists what there is"
        raise AttributeError(f"{said}: {hint}")

    return getattribute
