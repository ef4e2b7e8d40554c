"""`python -m voxmma`."""

from voxmma.cli import main

main()
