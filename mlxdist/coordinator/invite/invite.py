"""An invitation to a run: one command and one code for the other Macs, while the run starts, trains or waits."""

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mlxdist.bonjour import announced
from mlxdist.coordinator.config.hosts import is_loopback, own_addresses
from mlxdist.coordinator.invite.port import InvitationPort, Joinable
from mlxdist.keys.exchange import FIRST_PORT, KIND, SHOWN_DIGITS
from mlxdist.keys.files import read_private, write_private
from mlxdist.keys.invitation import CODE_SECONDS, Invitation
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import UserError

FILE = "joinable"  # in the run's state


@contextmanager
def invited(
    run: Joinable,
    store: KeyStore,
    macs: int,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[InvitationPort]:
    """Lets so many Macs exchange keys with a run by a new code, until the code has ended or the block.

    `say` takes a sentence for a person alone: the code is written to no file. `clock`: in seconds.

    Raises ConfigError where the port of the exchange is in use.
    """
    invitation = Invitation(macs, clock() + CODE_SECONDS)
    port = InvitationPort(invitation, run, store, say, clock=clock)
    port.open()
    try:
        say(command_sentence(run, macs, own_addresses()))
        say(f"it asks for a code: {invitation.code}, for {CODE_SECONDS / 60:.0f} minutes")
        yield port
    finally:
        port.close()


@contextmanager
def announced_run(run: Joinable) -> Iterator[bool]:
    """Announces a run by Bonjour while the block lasts, so that `mlxdist join` needs no address."""
    name, key = socket.gethostname().removesuffix(".local"), {"key": run.public[:SHOWN_DIGITS]}
    addresses = [each for each in own_addresses() if not is_loopback(each)]
    with announced(KIND, name, run.port, key, addresses) as there:
        yield there


def command_sentence(run: Joinable, macs: int, own: list[str]) -> str:
    """Returns the command for the other Macs. `own`: the addresses of this machine."""
    every = [address for address in run.addresses if address in ("*", "::", "0.0.0.0")]
    numeric = [each for each in (own if every else run.addresses) if not is_loopback(each)]
    numeric.sort(key=lambda each: ":" in each)  # an IPv4 address is easier to type
    places = [*([socket.gethostname()] if every else []), *map(place_in_words, numeric[:1])]
    port = "" if run.port == FIRST_PORT else f":{run.port}"
    who = "one other Mac" if macs == 1 else f"{macs} other Macs"
    other = f" (where that name is not found: mlxdist join {places[1]}{port})" if len(places) > 1 else ""
    return f"on {who}, type: mlxdist join {places[0]}{port}{other}"


def place_in_words(address: str) -> str:
    """Returns an address as it stands before a port."""
    return f"[{address}]" if ":" in address else address


def note_joinable(state: Path, run: Joinable | None) -> None:
    """Notes in a run's state where other Macs reach it; None: they do not. Raises SaveError."""
    if run is not None:
        write_private(state / FILE, run)
    else:
        (state / FILE).unlink(missing_ok=True)


def invite_to_running(
    output: Path,
    macs: int,
    store: KeyStore,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Lets other Macs join the run that goes on in a folder, by a code; returns when the code has ended.

    `clock`: in seconds.

    Raises UserError where no other Mac can reach the run.
    """
    path = output / "state" / FILE
    if not path.exists():
        raise UserError(
            f"the run in {output} listens on this machine alone, so no other Mac can join it: stop it with Ctrl-C, "
            "which saves, and start it with --resume and --invite"
        )
    if not macs:
        say("the run takes Macs that are known already: on each, type `mlxdist join`")
        return
    with invited(read_private(path, Joinable), store, macs, say, clock) as port:
        port.wait()
