"""Engines: a whole network as one program on the device, for frames of any size up to a capacity.

engine = voxmma.engine.compile(model.eval(), example, capacity=120_000)
result = engine((coords, feats))     # returns at once
y = result.voxels                    # waits, and raises what was wrong with the frame
"""

from voxmma.engine.compiled import Engine
from voxmma.engine.compiling import compile
from voxmma.engine.errors import EngineError
from voxmma.engine.file import load, save
from voxmma.engine.inputs import Points
from voxmma.engine.result import Result

__all__ = ["Engine", "EngineError", "Points", "Result", "compile", "load", "save"]
