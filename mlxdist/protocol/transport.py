"""The transport of frames as an interface, and its in-memory implementation for tests: no sockets here.

The coordinator holds a Hub with many peers on two channels; a supervisor or worker holds a Link with one coordinator.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from mlxdist.protocol.wire import Buffer, Frames

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


@dataclass
class MemoryHub:
    """A hub in one process: `run` lets the peers work whenever the hub would wait."""

    run: Callable[[], None] = lambda: None
    inbox: deque[Parcel] = field(default_factory=deque)
    links: dict[tuple[str, bytes], "MemoryLink"] = field(default_factory=dict)

    def connect(self, channel: str, peer: bytes) -> "MemoryLink":
        """A new peer's link to this hub."""
        link = MemoryLink(self, channel, peer)
        self.links[channel, peer] = link
        return link

    def receive(self, timeout: float) -> list[Parcel]:
        """Lets the peers work, then takes what they sent."""
        self.run()
        arrived, self.inbox = list(self.inbox), deque()
        return arrived

    def send(self, parcel: Parcel) -> bool:
        """Puts a copy of the frames where the peer finds them."""
        link = self.links.get((parcel.channel, parcel.peer))
        if link is None:
            return False
        link.inbox.append(_copied(parcel.frames))
        return True

    def wake(self) -> None:
        """Does nothing: no `receive` waits."""

    def close(self) -> None:
        """Drops all peers."""
        self.links.clear()


@dataclass
class MemoryLink:
    """One peer's end of a MemoryHub."""

    hub: MemoryHub
    channel: str
    peer: bytes
    inbox: deque[Frames] = field(default_factory=deque)

    def receive(self, timeout: float) -> list[Frames]:
        """The messages that have arrived; never waits."""
        arrived, self.inbox = list(self.inbox), deque()
        return arrived

    def send(self, frames: Frames) -> bool:
        """Puts a copy of the frames where the hub finds them."""
        self.hub.inbox.append(Parcel(self.channel, self.peer, _copied(frames)))
        return True

    def renew(self) -> None:
        """Does nothing: no connection can be half open here."""

    def wake(self) -> None:
        """Does nothing: no `receive` waits."""

    def close(self) -> None:
        """Leaves the hub."""
        self.hub.links.pop((self.channel, self.peer), None)


def _copied(frames: Iterable[Buffer]) -> Frames:
    return [bytes(frame) for frame in frames]
