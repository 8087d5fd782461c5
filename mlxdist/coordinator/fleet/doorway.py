"""Connections of which no node is known yet: at most so many, and a line on those that end there. No socket library.

A connection waits here, by its file descriptor, from the moment it is accepted until the cluster knows whose it is.
Where too many wait, the oldest of the address that has most of them is closed: no address can keep out another.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from mlxdist.coordinator.fleet.connections import Source
from mlxdist.protocol.transport import Refusal

MOST_WAITING = 256
MOST_BYTES = 1 << 20  # over a connection before its node is known: a first message has a few thousand
LOOK_SECONDS = 0.05  # between two looks at them
NO_HANDSHAKE = "it sent nothing that a node sends"


@dataclass
class Doorway:
    """The connections that wait, oldest first, and the refusals since the last look."""

    most: int = MOST_WAITING
    waiting: dict[int, Source] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    _known: set[int] = field(default_factory=set)  # open, of nodes
    _shut: set[int] = field(default_factory=set)  # closed from here, and not ended yet
    _ended_early: set[int] = field(default_factory=set)  # ended, and their beginning was not told yet
    _reason: str = ""  # of the connection that ends next
    _looked: float = -LOOK_SECONDS  # at the bytes

    def accepted(self, descriptor: int, source: Source) -> tuple[int, Source] | None:
        """Notes a new connection. Returns the one that must be closed for it, if any."""
        if descriptor in self._ended_early:
            self._ended_early.remove(descriptor)
            self.refusals.append(Refusal(source.address, NO_HANDSHAKE))
            return None
        self._known.discard(descriptor)
        self._shut.discard(descriptor)
        self.waiting.pop(descriptor, None)
        self.waiting[descriptor] = source
        if len(self.waiting) <= self.most:
            return None
        crowd, _ = Counter(each.address for each in self.waiting.values()).most_common(1)[0]
        oldest = next(number for number, each in self.waiting.items() if each.address == crowd)
        source = self.waiting.pop(oldest)
        self._shut.add(oldest)
        self.refusals.append(Refusal(crowd, f"{self.most} connections without a node were open"))
        return oldest, source

    def too_much(self, received: Callable[[int], int], now: float) -> list[tuple[int, Source]]:
        """Returns the connections that must be closed: they have sent too much. `received`: bytes of a descriptor."""
        if now - self._looked < LOOK_SECONDS:
            return []
        self._looked = now
        found = [(number, source) for number, source in self.waiting.items() if received(number) > MOST_BYTES]
        for number, source in found:
            del self.waiting[number]
            self._shut.add(number)
            self.refusals.append(Refusal(source.address, f"it sent {MOST_BYTES >> 20} MiB before its node was known"))
        return found

    def admitted(self, descriptor: int) -> None:
        """Notes that the node of a connection is known now."""
        if self.waiting.pop(descriptor, None) is not None:
            self._known.add(descriptor)

    def refused(self, source: Source, reason: str) -> None:
        """Notes that a connection is closed for what it has sent."""
        self.refusals.append(Refusal(source.address, reason))

    def failed(self, reason: str) -> None:
        """Notes why the connection that ends next could not be used."""
        self._reason = reason

    def closed(self, descriptor: int) -> None:
        """Notes the end of a connection; of one that still waits here, it is a refusal."""
        source, reason, self._reason = self.waiting.pop(descriptor, None), self._reason, ""
        if source is not None:
            self.refusals.append(Refusal(source.address, reason or NO_HANDSHAKE))
        elif descriptor in self._known:
            self._known.remove(descriptor)
        elif descriptor in self._shut:
            self._shut.remove(descriptor)
        else:  # another thread of libzmq tells of the beginning, which comes later
            self._ended_early.add(descriptor)

    def take_refusals(self) -> list[Refusal]:
        """Returns the refusals since the last call."""
        taken, self.refusals = self.refusals, []
        return taken
