"""The commands with which other Macs join: `mlxdist join` there, `mlxdist launch --invite` here."""

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from mlxdist.commands.keys import this_mac
from mlxdist.commands.open_files import more_open_files
from mlxdist.commands.options import Models, Wait, models_folder, seconds_of
from mlxdist.keys.exchange import code_of
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import UserError

if TYPE_CHECKING:
    from mlxdist.coordinator.config.hosts import Hosts
    from mlxdist.node.pairing import Joined
    from mlxdist.protocol.launched import LaunchOrder


def open_or_invite(cluster: "Hosts", output: Path, invite: int, *, insecure_lan: bool) -> "Hosts":
    """Returns the cluster as other Macs reach it. With a run that goes on already, invites to that one, and ends."""
    from mlxdist.coordinator.config.hosts import open_to_others
    from mlxdist.coordinator.invite.invite import invite_to_running
    from mlxdist.coordinator.storage.open_run import is_running

    if insecure_lan:
        raise UserError("--invite exchanges keys, and --insecure-lan connects without: leave one of the two out")
    if is_running(output):
        invite_to_running(output, invite, KeyStore.of_user(), lambda sentence: print(sentence, flush=True))
        sys.exit(0)
    return open_to_others(cluster)


def join(
    place: Annotated[
        str,
        typer.Argument(
            metavar="HOST[:PORT]",
            help="The Mac that launches, as `mlxdist launch --invite` prints it. Default: one that is known, or found.",
        ),
    ] = "",
    name: Annotated[str, typer.Option(help="The name of this Mac in reports. Default: its own.")] = "",
    wait: Wait = "12h",
    again: Annotated[
        bool, typer.Option("--again", help="Ask for a code although keys were exchanged: one side has new ones.")
    ] = False,
    models: Models = None,
    while_idle: Annotated[
        bool,
        typer.Option("--while-idle", help="Work only after 5 minutes without a touch, and never on battery."),
    ] = False,
) -> None:
    """Let this Mac work for the runs of another one: the first time by a code, later without.

    The code comes from `mlxdist launch --invite` there; it is asked for, or read from standard input.
    """
    from mlxdist.interrupts import interruptible

    with interruptible():
        from mlxdist.node.nearby import look_for
        from mlxdist.node.pairing import Joined, Place, known, pair, place_of
        from mlxdist.protocol.launched import LaunchOrder

        more_open_files()
        store, name, seconds = KeyStore.of_user(), name or this_mac(), seconds_of(wait)
        where = place_of(place) if place else look_for(store, name)
        member = where if isinstance(where, Joined) else None if again else known(store, where, name)
        if member is None:
            assert isinstance(where, Place)
            member = pair(store, where, name, lambda: read_code(sys.stdin))
            print(f"keys were exchanged: this Mac is {member.name} there, and needs no code the next time", flush=True)
        print(f"works for {member.place}, as {member.name}; Ctrl-C leaves", flush=True)
        order = LaunchOrder(member.place.host, member.place.port, models=models_folder(models), wait_seconds=seconds)
        try:
            code, reason = work(member, order, while_idle=while_idle)
        except KeyboardInterrupt:
            print(f"left {member.place}; `mlxdist join` works for it again", flush=True)
            raise
    if reason:
        print(f"mlxdist join: {reason}", file=sys.stderr)
    sys.exit(code)


def work(member: "Joined", order: "LaunchOrder", *, while_idle: bool) -> tuple[int, str]:
    """Works for a coordinator until the node has to leave; `while_idle`: only while no one uses this machine.

    Returns the exit code and the reason as a sentence.
    """
    from mlxdist.node.idle import used_again, wait_until_free
    from mlxdist.node.screen import screen
    from mlxdist.node.supervisor import Supervisor
    from mlxdist.node.supervisor import main as supervise

    def watch(supervisor: Supervisor) -> AbstractContextManager[None]:
        return screen(supervisor, str(member.place))

    if not while_idle:
        return supervise(member.name, order, launched=False, keys=member.keys, watch=watch)
    while True:
        print("waits until no one uses this Mac", flush=True)
        wait_until_free()
        print("no one uses this Mac: it works", flush=True)
        with used_again() as used:
            code, reason = supervise(member.name, order, launched=False, keys=member.keys, leave=used, watch=watch)
        if not used.is_set():
            return code, reason


def read_code(source: TextIO) -> str:
    """Returns the code that a person types at a terminal, asked for until it can be one, or the first line of a file.

    Raises UserError where there is none.
    """
    if not source.isatty():
        if line := source.readline().strip():
            return line
        raise UserError(
            "there is no terminal to ask for the code, and none on standard input: echo CODE | mlxdist join"
        )
    while True:
        print("The code that the other Mac shows: ", end="", flush=True)
        try:
            typed = source.readline()
            return code_of(typed)
        except UserError as error:
            if not typed:  # the end of the input
                raise
            print(error, flush=True)
        except KeyboardInterrupt:
            print(flush=True)  # so that what follows stands on a line of its own
            raise
