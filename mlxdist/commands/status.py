"""The command that looks at a run without touching it."""

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

from mlxdist.commands.options import AsJson, HostsFile, cluster_of
from mlxdist.protocol.errors import UserError


def status(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN",
            help="The output folder of a run, or its run.toml; on another Mac HOST:FOLDER, or with --hosts its name.",
        ),
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until the run ends. Ctrl-C ends the view alone.")
    ] = False,
    hosts: HostsFile = None,
    json: AsJson = False,
) -> None:
    """Look at a run from another terminal or another Mac: its steps, losses and nodes. It is only read."""
    from mlxdist.coordinator.status.show import show_status
    from mlxdist.interrupts import interruptible

    cluster = cluster_of(hosts, None) if hosts is not None else None
    if not run and cluster is None:
        raise UserError("name a run: its output folder, its run.toml, HOST:FOLDER, or --hosts hosts.toml")
    if watch and json:
        raise UserError("--json prints one look: leave --watch out, or follow the run's metrics.jsonl")
    with suppress(KeyboardInterrupt), interruptible():  # the view ends, and the run goes on
        show_status(run, cluster, watch=watch, as_json=json, stream=sys.stdout, environ=os.environ)
