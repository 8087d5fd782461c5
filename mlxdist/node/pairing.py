"""Joining by a code, as the Mac that joins does it: keys are exchanged once, and kept for the next time."""

import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from mlxdist.keys.exchange import FIRST_PORT, LENGTH_BYTES, OFFSET, JoinersSide, code_of, framed, length_of
from mlxdist.keys.pair import NodeKeys
from mlxdist.keys.store import KeyStore, Trusted
from mlxdist.protocol.errors import MismatchError, UserError, WireError
from mlxdist.protocol.untrusted import NODE_NAME, quoted

ANSWER_SECONDS = 10.0  # until the other side must have answered
AGAIN = "on the Mac that launches, the same command with --invite gives a new code, also while the run goes on"


@dataclass(frozen=True)
class Place:
    """A coordinator as a person or Bonjour names it. `port`: control; 0: not given."""

    host: str
    port: int = 0

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}" if self.port else host


@dataclass(frozen=True)
class Joined:
    """All that a node needs to work for a coordinator."""

    place: Place
    name: str
    keys: NodeKeys


def place_of(text: str) -> Place:
    """Returns the place in HOST, HOST:PORT, an IPv6 address, or one in brackets with a port. Raises UserError."""
    found = re.fullmatch(
        r"\[(?P<six>[^\]]+)\](:(?P<port6>\d+))?|(?P<bare>[^:[]+)(:(?P<port>\d+))?|(?P<plain6>[^[]*:[^[]*:[^[]*)", text
    )
    if found is not None:
        host = found["six"] or found["bare"] or found["plain6"]
        port = int(found["port6"] or found["port"] or 0)
        if port + OFFSET < 65536 and not re.search(r"[\s/]", host):
            return Place(host, port)
    raise UserError(f"{quoted(text, 80)} is no address: give HOST or HOST:PORT, as `mlxdist launch --invite` prints it")


def known(store: KeyStore, place: Place, name: str) -> Joined | None:
    """Returns what is kept on the coordinator at a place; None: no keys were exchanged with it.

    `name`: what this Mac is called, where the coordinator has given no other name.
    """
    trusted = store.trusted(place.host)
    return of(store, trusted, place, name) if trusted is not None else None


def of(store: KeyStore, trusted: Trusted, place: Place, name: str) -> Joined:
    """Returns what a node needs for a coordinator that is trusted, at a place whose port may be missing."""
    there = Place(place.host, place.port or trusted.port or FIRST_PORT)
    return Joined(there, trusted.name or name, NodeKeys(store.own_pair().secret, trusted.public))


def pair(store: KeyStore, place: Place, name: str, read_code: Callable[[], str]) -> Joined:
    """Exchanges keys with the coordinator at a place, by the code that `read_code` returns, and keeps them.

    Raises UserError where nothing answers, for a wrong code, and for one that has ended.
    """
    with _connected(place):
        pass  # so that an address without an invitation is told before a person types the code
    side = JoinersSide(code_of(read_code()), node_name(name), store.own_pair().public)
    with _connected(place) as connection:
        try:
            connection.sendall(framed(side.hello))
            connection.sendall(framed(side.proof(receive(connection))))
            granted = side.name(receive(connection))
        except MismatchError as error:
            raise UserError(f"{place} does not let this Mac join: {quoted(error, 500)}. {_cure(str(error))}") from None
        except (OSError, WireError) as error:
            raise UserError(f"{place} ended the exchange of keys ({error}): try again, or {AGAIN}") from None
    store.trust(place.host, side.answer.public, now=datetime.now(UTC), port=side.answer.port, name=granted)
    return Joined(Place(place.host, side.answer.port), granted, NodeKeys(store.own_pair().secret, side.answer.public))


def _cure(reason: str) -> str:
    return AGAIN[0].upper() + AGAIN[1:] if "has ended" in reason else "Type the command and the code once more"


def node_name(text: str) -> str:
    """Returns a name that a node can have, made from that of a Mac."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:60]
    return name if NODE_NAME.fullmatch(name) else "mac"


def _connected(place: Place) -> socket.socket:
    port = (place.port or FIRST_PORT) + OFFSET
    try:
        return socket.create_connection((place.host, port), ANSWER_SECONDS)
    except ConnectionRefusedError:
        given = "" if place.port else ", or it shows another port: give that one too, as HOST:PORT"
        raise UserError(f"{place} takes no code now: {AGAIN}{given}") from None
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"{quoted(place.host, 80)} cannot be reached ({reason}): compare it with what the other Mac shows. "
            "Both must be in one network"
        ) from None


def receive(connection: socket.socket) -> bytes:
    """Returns the next message. Raises WireError for one that is too long, or where the other side is gone."""
    return _exactly(connection, length_of(_exactly(connection, LENGTH_BYTES)))


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = connection.recv(size - len(data))
        if not more:
            raise WireError("it closed the connection")
        data += more
    return data
