"""Networks and checkpoints of other libraries."""

from voxmma.compat.install import install as install
