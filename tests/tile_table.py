"""The tile table of a build for sm_80 and sm_90a, for tests of the selector on builds without CUDA.

It is checked in as tile_table.json; test_tiles.py compares it with the build at hand where that has CUDA.

    python tests/tile_table.py      # rewrite it from this build, which must be for 8.0 and 9.0a
"""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from voxmma import _C
from voxmma.dispatch import settings

FILE = Path(__file__).with_suffix(".json")
ARCHS = ["8.0", "9.0a"]


def snapshot() -> list[dict[str, Any]]:
    """The rows of the file, as _C.kernel_configs() gives them."""
    columns, *rows = json.loads(FILE.read_text())
    return [dict(zip(columns, row, strict=True)) for row in rows]


def stand_in(monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], archs: list[str]) -> None:
    """Has the selector see a build of these rows, and devices with a Hopper's shared memory and no limits."""
    made = SimpleNamespace(
        HAS_CUDA=bool(rows),
        CUDA_ARCHS=archs,
        kernel_configs=lambda: rows,
        build_runs_on=_C.build_runs_on,
        shared_memory=lambda index: 227 * 1024,
    )
    monkeypatch.setattr(importlib.import_module("voxmma.ops.kernels"), "_C", made)
    monkeypatch.setattr(importlib.import_module("voxmma.dispatch.table"), "_C", made)
    monkeypatch.setattr(importlib.import_module("voxmma.dispatch.selection"), "_C", made)
    monkeypatch.setattr(settings, "_C", made)
    environment = replace(settings._environment, compute_capability=None, shared_memory=None)
    monkeypatch.setattr(settings, "_environment", environment)


def main() -> None:
    """Writes the file."""
    if _C.CUDA_ARCHS != ARCHS:
        raise SystemExit(f"this voxmma was built for {_C.CUDA_ARCHS}, the table is that of {ARCHS}")
    rows = _C.kernel_configs()
    lines = [json.dumps(list(row.values())) for row in rows]
    FILE.write_text("[\n" + ",\n".join([json.dumps(list(rows[0])), *lines]) + "\n]\n")


if __name__ == "__main__":
    main()
