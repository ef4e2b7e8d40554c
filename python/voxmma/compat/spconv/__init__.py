"""spconv's interface (2.3, and the names of 1.x), run by voxmma: `import voxmma.compat.spconv.pytorch as
spconv`, or `voxmma.compat.install("spconv")` before a network imports spconv.

What the names mean, and where that is not what spconv does: docs/migrate.md.
"""

from __future__ import annotations

from voxmma.compat.spconv import constants as constants
from voxmma.compat.spconv import core as core
from voxmma.compat.spconv import cumm as cumm
from voxmma.compat.spconv import pytorch as pytorch
from voxmma.compat.spconv import utils as utils
from voxmma.compat.spconv.core import AlgoHint as AlgoHint
from voxmma.compat.spconv.core import ConvAlgo as ConvAlgo
from voxmma.compat.spconv.options import configure as configure
from voxmma.compat.spconv.pytorch import *  # noqa: F403  # 1.x had the layers here
from voxmma.compat.spconv.pytorch import conv as conv
from voxmma.compat.spconv.pytorch import functional as functional
from voxmma.compat.spconv.pytorch import modules as modules
from voxmma.compat.spconv.pytorch import ops as ops
from voxmma.compat.spconv.pytorch import pool as pool
from voxmma.compat.spconv.pytorch import tables as tables

#: The release whose interface this is; code asks for it to tell 1.x from 2.x.
__version__ = "2.3.8"


def __getattr__(name: str) -> object:
    raise AttributeError(core.missing("spconv", name))
