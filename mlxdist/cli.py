"""The commands: each parses its arguments, imports what it needs, and calls one function."""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
import typer.core

from mlxdist.commands import begin, clusters, join, page, results, status
from mlxdist.commands.keys import key, known_nodes, this_mac
from mlxdist.commands.open_files import more_open_files
from mlxdist.commands.options import (
    AsJson,
    Changes,
    HostsFile,
    InsecureLan,
    Models,
    NodeCount,
    RunFile,
    Wait,
    cluster_of,
    models_folder,
    seconds_of,
)
from mlxdist.protocol.errors import MlxdistError, UserError
from mlxdist.protocol.version import VERSION


class _Commands(typer.core.TyperGroup):
    """Ends a command that is interrupted, and what it has started, with one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            from mlxdist.coordinator.launch.ssh import end_children

            end_children()
            print("mlxdist: interrupted", file=sys.stderr)
            raise typer.Exit(130) from None


app = typer.Typer(
    name="mlxdist",
    cls=_Commands,
    help="Fine-tune one language model on several Macs at once. The result is that of one machine, only sooner.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(key)
app.command()(join.join)
app.add_typer(known_nodes, name="nodes")


def open_closed_streams() -> None:
    """Opens /dev/null in place of standard streams that the caller has closed.

    The next file would take the number of the closed stream, and receive what is printed.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def main() -> None:
    """Runs the command line. Exit codes: 0 done, 1 the run could not go on, 2 wrong usage or data, 130 interrupted."""
    open_closed_streams()
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
        print(f"mlxdist {VERSION}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


class _Launch(typer.core.TyperCommand):
    """Lets --resume stand alone, for `--resume last`, and --invite, for `--invite 1`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, with_values(args))


VALUES = {"--resume": ("last", re.compile("last|previous")), "--invite": ("1", re.compile(r"\d+"))}


def with_values(args: Sequence[str]) -> list[str]:
    """Returns the arguments with the default value after each --resume and --invite that none of its values follows."""
    given = list[str]()
    for arg, after in zip(args, [*args, ""][1:], strict=True):
        given.append(arg)
        if arg in VALUES and not VALUES[arg][1].fullmatch(after):
            given.append(VALUES[arg][0])
    return given


@app.command(cls=_Launch)
def launch(
    run: RunFile = None,
    hosts: HostsFile = None,
    nodes: NodeCount = None,
    resume: Annotated[
        Literal["last", "previous"] | None,
        typer.Option(
            "--resume",
            help="Go on with the run in its output folder, after its last saved step. "
            "--resume previous: from the save before the last, where a damaged file makes that necessary.",
        ),
    ] = None,
    mixed: Annotated[
        Literal["spare", "allow"] | None,
        typer.Option(
            help="A node that joins with other last bits than the run's nodes: spare, used when no other is left, or "
            "allow, used like any. Default: as hosts.toml says, else spare."
        ),
    ] = None,
    set_: Changes = None,
    sync_first: Annotated[
        bool, typer.Option("--sync", help="First put an equal environment and the model on every host.")
    ] = False,
    invite: Annotated[
        int | None,
        typer.Option(
            "--invite",
            min=0,
            max=64,
            metavar="[N]",
            help="Let other Macs join: show the command to type there, and a code for one Mac, or for N. --invite 0: "
            "only Macs that have joined before. With a run that goes on already, the code is for that run.",
        ),
    ] = None,
    insecure_lan: InsecureLan = False,
    view: Annotated[
        bool, typer.Option("--view", help="Show the run in a browser too: the page's address is printed at the start.")
    ] = False,
    attach: Annotated[
        bool, typer.Option("--attach", help="Watch a run whose coordinator is another Mac ([coordinator] host).")
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="End such a run, after its last step is saved.")] = False,
) -> None:
    """Train, on this machine or on several.

    Ctrl-C saves the last step and stops; the same command with --resume goes on from there.
    """
    from mlxdist.interrupts import interruptible

    with interruptible():
        from mlxdist.coordinator.config.hosts import is_local
        from mlxdist.coordinator.config.load import load_config

        more_open_files()
        cluster = cluster_of(hosts, nodes, mixed)
        config = load_config(run or cluster.run, set_ or ())
        away = not is_local(cluster.coordinator.host)
        if (attach or stop) and not away:
            raise UserError("--attach and --stop are for a run on another coordinator: see [coordinator] host")
        if invite is not None:
            if away:
                raise UserError(
                    f"--invite shows a code where the coordinator runs: type it on {cluster.coordinator.host}"
                )
            cluster = join.open_or_invite(cluster, config.output, invite, insecure_lan=insecure_lan)
        if sync_first:
            from rich.console import Console

            if hosts is None:
                raise UserError("--sync copies to the hosts of a file: name it, as --hosts hosts.toml")
            clusters.synced(
                cluster, config.model, Console(), clean=False
            )  # launch itself says which hosts can take part

        if away and hosts is not None:
            from mlxdist.coordinator.status import viewer

            if view:
                raise UserError(f"--view shows runs of this Mac: use mlxdist view on {cluster.coordinator.host}")
            options = [*(["--resume", resume] if resume else []), *(["--insecure-lan"] if insecure_lan else [])]
            options += ["--mixed", mixed] if mixed else []
            sys.exit(viewer.view(config, cluster, hosts, run, set_ or (), options, attach=attach, stop=stop))

        from mlxdist.coordinator.run import run as train

        previous = resume == "previous"
        with page.page_beside(config.output) if view else nullcontext():
            code = train(
                config,
                cluster,
                resume=resume is not None,
                previous=previous,
                environ=os.environ,
                insecure_lan=insecure_lan,
                invite=invite or 0,
            )
        sys.exit(code)


@app.command()
def node(
    connect: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="The address of the Mac that runs launch, as mini-1.local:5555.")
    ] = "",
    name: Annotated[str, typer.Option(help="The name of this node in reports. Default: that of this Mac.")] = "",
    wait: Wait = "12h",
    coordinator: Annotated[
        str, typer.Option(metavar="KEY", help="The public key of that Mac, as launch prints it; it is remembered.")
    ] = "",
    keys: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A file (mode 0600) with this node's secret key and the coordinator's key."),
    ] = None,
    insecure_lan: InsecureLan = False,
    models: Models = None,
    launched: Annotated[bool, typer.Option("--launched", hidden=True)] = False,
    tag: Annotated[str, typer.Option(hidden=True)] = "",  # shows in a process list whose node it is
) -> None:
    """Let this Mac work for a run that another Mac launches: wait for it, work, wait for the next one."""
    from mlxdist.keys.choose import INSECURE, chosen_keys
    from mlxdist.keys.pair import keys_of_line
    from mlxdist.keys.store import KeyStore
    from mlxdist.node.supervisor import first_line
    from mlxdist.node.supervisor import main as supervise
    from mlxdist.protocol.launched import LaunchOrder, order_of_line

    more_open_files()
    name = name or this_mac()
    if launched:
        own, order = keys_of_line(first_line()), order_of_line(first_line())
    else:
        host, port = _endpoint(connect)
        own = chosen_keys(KeyStore.of_user(), name, host, coordinator=coordinator, file=keys, insecure_lan=insecure_lan)
        order = LaunchOrder(host, port, models=models_folder(models), wait_seconds=seconds_of(wait))
        if insecure_lan:
            print(f"mlxdist node: {INSECURE}", file=sys.stderr)
    code, reason = supervise(name, order, launched=launched, keys=own)
    if reason:
        print(f"mlxdist node: {reason}", file=sys.stderr)
    sys.exit(code)


@app.command()
def inspect(
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="A folder, a file, a hub id, or a run.toml, whose settings then hold.")
    ],
    model: Annotated[
        str,
        typer.Option(help="A model folder or hub id, in whose tokens lengths are counted. Default: characters."),
    ] = "",
    method: Annotated[str, typer.Option(help="sft, dpo, kto or orpo. Default: the one that the first rows fit.")] = "",
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Longer rows are cut to this, as by batch.max_length.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows or pairs of a batch, as batch.size.")] = None,
    leaf_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that one node computes at once, as batch.leaf_tokens.")
    ] = None,
    train_on: Annotated[
        str | None, typer.Option(help="The trained turns of a conversation: last, all or everything, as data.train_on.")
    ] = None,
    set_: Changes = None,
    json: AsJson = False,
) -> None:
    """Show the data before training: what would be trained, cut or dropped, and every faulty row as file:line."""
    from rich.console import Console

    from mlxdist.coordinator.inspect.inspect import InspectOptions, show_inspection

    options = InspectOptions(method, max_length, batch_size, leaf_tokens, train_on, set_ or (), as_json=json)
    sys.exit(show_inspection(data, model, options, Console()))


@app.command()
def plan(
    run: RunFile = None,
    hosts: HostsFile = None,
    nodes: NodeCount = None,
    tokens_per_second: Annotated[
        float | None,
        typer.Option(min=0.001, help="The speed of one node. Default: that of an earlier run."),
    ] = None,
    link_gbit: Annotated[float, typer.Option(min=0.001, help="The speed of this Mac's network, in Gbit/s.")] = 1.0,
    set_: Changes = None,
    json: AsJson = False,
) -> None:
    """Estimate a run before it starts: memory per node, hours, bytes per step, and how many Macs are worth it."""
    from rich.console import Console

    from mlxdist.coordinator.config.load import load_config
    from mlxdist.coordinator.plan.plan import PlanOptions, show_plan

    cluster = cluster_of(hosts, nodes)
    config = load_config(run or cluster.run, set_ or ())
    sys.exit(show_plan(config, cluster, PlanOptions(tokens_per_second, link_gbit, json), Console()))


@app.command()
def selfcheck(
    json: AsJson = False,
) -> None:
    """Check this machine alone, offline, in under three minutes: its bits, memory, speed and settings."""
    more_open_files()
    from mlxdist.node.selfcheck.selfcheck import selfcheck as check

    sys.exit(check(as_json=json))


app.command()(begin.init)
app.add_typer(clusters.hosts, name="hosts")
app.command()(clusters.sync)
app.command()(clusters.doctor)
app.command()(results.evaluate)
app.command()(results.generate)
app.command()(results.export)
app.command()(results.report)
app.command()(results.runs)
app.command()(status.status)
app.command()(page.view)


def _endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise UserError(f"--connect {text}: an IPv6 address stands in brackets, for instance [fe80::1%en0]:5555")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--connect {text}: give HOST:PORT, for instance mini-1.local:5555")
    return host, int(port)
