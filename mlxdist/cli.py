"""The commands: each parses its words, imports what it needs, and calls one function. Nothing else is decided here."""

import os
import re
import resource
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from mlxdist import __version__
from mlxdist.protocol.errors import MlxdistError, UserError

OPEN_FILES = 4096

app = typer.Typer(
    name="mlxdist",
    help="Fine-tune a language model on several Macs, with the numbers of one machine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def more_open_files(wanted: int = OPEN_FILES) -> None:
    """Raise the soft limit of open files as far as the hard one lets it, for this process and what it starts.

    macOS starts programs with 256; a coordinator needs a few per node, and its connections come and go.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 the run could not go on, 2 wrong usage or data, 130 interrupted."""
    try:
        app()
    except MlxdistError as error:
        _end(error)
    except KeyboardInterrupt:
        sys.exit(130)


def _end(error: MlxdistError) -> NoReturn:
    print(f"mlxdist: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"mlxdist {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def launch(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN.TOML]", help="The run; default: run.toml here.")] = None,
    hosts: Annotated[Path | None, typer.Option(help="The cluster. Without it: nodes on this machine.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes on this machine, without --hosts. Default 1.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the output folder.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. train.steps=20.")
    ] = None,
) -> None:
    """Train, on this machine or on a cluster."""
    from mlxdist.coordinator.config.hosts import load_hosts, local_hosts, local_only
    from mlxdist.coordinator.config.load import load_config

    more_open_files()
    if hosts is not None and nodes is not None:
        raise UserError("--nodes counts nodes on this machine and --hosts lists them in a file: give one of the two")
    cluster = load_hosts(hosts) if hosts is not None else local_hosts(nodes or 1)
    local_only(cluster)
    config = load_config(run or cluster.run, set_ or ())

    from mlxdist.coordinator.run import run as train

    sys.exit(train(config, cluster, resume=resume, environ=os.environ))


@app.command()
def node(
    connect: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where the coordinator listens for nodes.")],
    name: Annotated[str, typer.Option(help="This node's name; default: the host's.")] = "",
    wait: Annotated[str, typer.Option(help="How long to wait for a coordinator: 30s, 10m, 12h.")] = "12h",
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
) -> None:
    """Join a run by hand: wait for its coordinator, work for it, wait for the next one."""
    import socket

    from mlxdist.node.supervisor import main as supervise

    more_open_files()
    endpoint = _endpoint(connect)
    code, reason = supervise(name or socket.gethostname().removesuffix(".local"), endpoint, _seconds(wait), launched)
    if reason:
        print(f"mlxdist node: {reason}", file=sys.stderr)
    sys.exit(code)


@app.command()
def inspect(
    data: Annotated[str, typer.Argument(help="A folder, a file, a hub id, or a run.toml whose settings then hold.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer counts; without it, characters are counted.")] = "",
    method: Annotated[str, typer.Option(help="sft, dpo or kto; default: what the first rows are for.")] = "",
    max_length: Annotated[int | None, typer.Option(min=2, help="As batch.max_length.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="As batch.size.")] = None,
    micro_size: Annotated[int | None, typer.Option(min=1, help="As batch.micro_size.")] = None,
    train_on: Annotated[str | None, typer.Option(help="As data.train_on.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key of the run.toml.")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what is in the data, and what would be trained, cut or dropped; every faulty row as file:line."""
    from rich.console import Console

    from mlxdist.coordinator.inspect.inspect import InspectOptions
    from mlxdist.coordinator.inspect.inspect import inspect as show

    options = InspectOptions(method, max_length, batch_size, micro_size, train_on, set_ or (), as_json=json)
    sys.exit(show(data, model, options, Console()))


@app.command()
def plan(
    run: Annotated[Path | None, typer.Argument(metavar="[RUN.TOML]", help="The run; default: run.toml here.")] = None,
    hosts: Annotated[Path | None, typer.Option(help="The cluster. Without it: nodes on this machine.")] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes on this machine, without --hosts. Default 1.")] = None,
    tokens_per_second: Annotated[
        float | None, typer.Option(min=0.001, help="Of one node, padding included; default: as an earlier run had.")
    ] = None,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="Gbit/s of the coordinator's network.")] = 1.0,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override a key.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a run will take: memory per node, hours, bytes per step, and how many Macs pay."""
    from rich.console import Console

    from mlxdist.coordinator.config.hosts import load_hosts, local_hosts
    from mlxdist.coordinator.config.load import load_config
    from mlxdist.coordinator.plan.plan import PlanOptions, show_plan

    if hosts is not None and nodes is not None:
        raise UserError("--nodes counts nodes on this machine and --hosts lists them in a file: give one of the two")
    cluster = load_hosts(hosts) if hosts is not None else local_hosts(nodes or 1)
    config = load_config(run or cluster.run, set_ or ())
    sys.exit(show_plan(config, cluster, PlanOptions(tokens_per_second, link_gbit, json), Console()))


@app.command()
def selfcheck(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this machine by itself, in under three minutes and offline: bits, memory, speed, settings."""
    from mlxdist.node.selfcheck.selfcheck import selfcheck as check

    sys.exit(check(as_json=json))


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--connect {text}: give HOST:PORT, for instance mini-1.local:5555")
    return host, int(port)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text)
    if match is None:
        raise UserError(f"--wait {text}: give a number with s, m or h, for instance 30m")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]
