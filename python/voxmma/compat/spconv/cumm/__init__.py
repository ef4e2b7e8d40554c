"""Stands in for cumm, spconv's tensor library, where that is not installed."""

from __future__ import annotations

from voxmma.compat.spconv.cumm import tensorview as tensorview
