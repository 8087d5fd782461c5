"""The transport of frames as an interface: no sockets here.

The coordinator holds a Hub with many peers on two channels; a supervisor or worker holds a Link with one coordinator.
"""

from enum import Enum
from typing import NamedTuple, Protocol

from mlxdist.protocol.wire import Frames

CONTROL, DATA = "control", "data"
PROBE: Frames = [b""]  # the first thing on every new connection of a worker: what was under way on the last one is lost


class Parcel(NamedTuple):
    """Frames from or to a peer of the hub.

    `owner`: the name of the node whose key has opened the connection; empty where connections are not encrypted.
    `waiting`: the connection's number at the hub until the hub is told that its node is known; then -1.
    """

    channel: str
    peer: bytes
    frames: Frames
    owner: str = ""
    waiting: int = -1


class Refusal(NamedTuple):
    """A connection that ended before its node was known: its address, and the reason as a clause."""

    address: str
    reason: str


class Trouble(Enum):
    """A reason for which a node's connection cannot be made, as the transport tells it."""

    KEY_REFUSED = "the coordinator does not know the key of this node"
    ENCRYPTION = "one side encrypts and the other does not"
    ENDED = "the other side ends every handshake: it has another key, does not encrypt, or is no coordinator"


def is_probe(frames: Frames) -> bool:
    """True if this is no message, but the sign that a connection is new."""
    return len(frames) == 1 and not len(frames[0])


class Hub(Protocol):
    """The coordinator's end."""

    def receive(self, timeout: float) -> list[Parcel]:
        """The messages that have arrived, after up to `timeout` seconds of waiting for the first; may be empty."""

    def send(self, parcel: Parcel) -> bool:
        """Hands the frames over without blocking; False when the peer is not connected."""

    def admitted(self, waiting: int) -> None:
        """Notes that the node of a connection is known; `waiting` is the number in its parcel."""

    def take_refusals(self) -> list[Refusal]:
        """The connections that were refused since the last call."""

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""

    def close(self) -> None:
        """Frees everything."""


class Link(Protocol):
    """A node's end."""

    def receive(self, timeout: float) -> list[Frames]:
        """The messages that have arrived, after up to `timeout` seconds of waiting for the first; may be empty."""

    def send(self, frames: Frames) -> bool:
        """Hands the frames over without blocking; False when there is no connection yet or no room."""

    @property
    def trouble(self) -> Trouble | None:
        """The reason for which the connection cannot be made; None: it is open, or no other side has answered yet."""

    def renew(self) -> None:
        """Drops the connection, which may be dead without a sign of it, and makes a new one.

        What was handed over and has not left is lost with it.
        """

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""

    def close(self) -> None:
        """Frees everything."""
