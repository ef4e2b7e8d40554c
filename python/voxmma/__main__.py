"""`python -m voxmma`, and the `voxmma` script."""

import sys


def main() -> None:
    """Runs the command line, or says which extra it needs."""
    try:
        import pydantic  # noqa: F401
        import rich  # noqa: F401
        import typer  # noqa: F401
        import yaml  # noqa: F401
    except ImportError as error:
        sys.exit(f"the voxmma command needs {error.name}: pip install 'voxmma[cli]'")
    from voxmma.tools.cli import app

    app(prog_name="voxmma")


if __name__ == "__main__":
    main()
