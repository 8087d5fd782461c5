"""The entry of `python -m mlxdist`, and of the command `mlxdist`."""

import sys


def main() -> None:
    """Runs the command line. Ctrl-C while it is still being imported ends it without a traceback."""
    try:
        from mlxdist.cli import main as command
    except KeyboardInterrupt:
        sys.exit(130)
    command()


if __name__ == "__main__":
    main()
