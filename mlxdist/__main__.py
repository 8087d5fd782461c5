"""`python -m mlxdist`, and what the command `mlxdist` calls."""

from mlxdist.cli import main

if __name__ == "__main__":
    main()
