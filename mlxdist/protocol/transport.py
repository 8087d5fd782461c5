"""The transport of frames as an interface: no sockets here.

The coordinator holds a Hub with many peers on two channels; a supervisor or worker holds a Link with one coordinator.
"""

from typing import NamedTuple, Protocol

from mlxdist.protocol.wire import Frames

CONTROL, DATA = "control", "data"
PROBE: Frames = [b""]  # the first thing on every new connection of a worker: what was under way on the last one is lost


class Parcel(NamedTuple):
    """Frames from or to a peer of the hub."""

    channel: str
    peer: bytes
    frames: Frames


def is_probe(frames: Frames) -> bool:
    """True if this is no message, but the sign that a connection is new."""
    return len(frames) == 1 and not len(frames[0])


class Hub(Protocol):
    """The coordinator's end."""

    def receive(self, timeout: float) -> list[Parcel]:
        """The messages that have arrived, after up to `timeout` seconds of waiting for the first; may be empty."""

    def send(self, parcel: Parcel) -> bool:
        """Hands the frames over without blocking; False when the peer is not connected."""

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

    def renew(self) -> None:
        """Drops the connection, which may be dead without a sign of it, and makes a new one.

        What was handed over and has not left is lost with it.
        """

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""

    def close(self) -> None:
        """Frees everything."""
