"""The commands before a first run."""

from pathlib import Path
from typing import Annotated

import typer


def init(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder with train.jsonl, a file, or a hub id.")],
    model: Annotated[
        str, typer.Option(help="The model, a folder or hub id. Default: one that suits this machine is suggested.")
    ] = "",
    output: Annotated[
        Path, typer.Option(metavar="RUN.TOML", help="The file to write; one that exists is never overwritten.")
    ] = Path("run.toml"),
) -> None:
    """Look at some data and this machine, and write a run.toml with a reason beside each value."""
    from rich.console import Console

    from mlxdist.coordinator.starter.show import write_first_run

    write_first_run(data, model, output, Console())
