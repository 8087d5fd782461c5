"""The entry of `python -m mlxdist`, and of the command `mlxdist`."""

from mlxdist.cli import main

if __name__ == "__main__":
    main()
