"""Frozen programs: `compile_model` makes an artefact, `load` reads it."""

from voxmma.export.artefact import Artefact, Check, compile_model, load
from voxmma.export.frozen import ArtefactError

__all__ = ["Artefact", "ArtefactError", "Check", "compile_model", "load"]
