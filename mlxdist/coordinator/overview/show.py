"""The command `mlxdist runs`: its list, or its comparison."""

import sys
from pathlib import Path

from rich.console import Console

from mlxdist.coordinator.overview.compare import as_json, compare
from mlxdist.coordinator.overview.find import runs_below
from mlxdist.coordinator.overview.view import print_comparison, print_runs, runs_as_json

WIDE = 160  # columns for a file or a pipe, which have no width


def show_runs(folder: Path, *, json: bool) -> None:
    """Prints the runs below a folder. Raises UserError where there is no such folder."""
    folder = folder.absolute()
    runs = runs_below(folder)
    print(runs_as_json(runs, folder)) if json else print_runs(runs, folder, _console())


def show_comparison(one: Path, other: Path, *, json: bool) -> None:
    """Prints two runs side by side. Raises UserError where one of them is no run."""
    comparison = compare(one.absolute(), other.absolute())
    print(as_json(comparison)) if json else print_comparison(comparison, _console())


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else WIDE)
