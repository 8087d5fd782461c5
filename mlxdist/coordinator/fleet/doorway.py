"""Connections of which no node is known yet: at most so many, and a line on those that end there. No socket library.

A connection waits here, by its file descriptor, from the moment it is accepted until the cluster knows whose it is.
Where too many wait, the oldest of the address that has most of them is closed: no address can keep out another.
"""

from collections import Counter
from dataclasses import dataclass, field

from mlxdist.coordinator.fleet.connections import Source
from mlxdist.protocol.transport import Refusal

MOST_WAITING = 256
NO_HANDSHAKE = "it sent nothing that a node sends"


@dataclass
class Doorway:
    """The connections that wait, oldest first, and the refusals since the last look."""

    most: int = MOST_WAITING
    waiting: dict[int, Source] = field(default_factory=dict)
    refusals: list[Refusal] = field(default_factory=list)
    _reason: str = ""  # of the connection that ends next

    def accepted(self, descriptor: int, source: Source) -> tuple[int, Source] | None:
        """Notes a new connection. Returns the one that must be closed for it, if any."""
        self.waiting.pop(descriptor, None)
        self.waiting[descriptor] = source
        if len(self.waiting) <= self.most:
            return None
        crowd, _ = Counter(each.address for each in self.waiting.values()).most_common(1)[0]
        oldest = next(number for number, each in self.waiting.items() if each.address == crowd)
        source = self.waiting.pop(oldest)
        self.refusals.append(Refusal(crowd, f"{self.most} connections without a node were open"))
        return oldest, source

    def admitted(self, descriptor: int) -> None:
        """Notes that the node of a connection is known now."""
        self.waiting.pop(descriptor, None)

    def failed(self, reason: str) -> None:
        """Notes why the connection that ends next could not be used."""
        self._reason = reason

    def closed(self, descriptor: int) -> None:
        """Notes the end of a connection; of one that still waits here, it is a refusal."""
        source, reason, self._reason = self.waiting.pop(descriptor, None), self._reason, ""
        if source is not None:
            self.refusals.append(Refusal(source.address, reason or NO_HANDSHAKE))

    def take_refusals(self) -> list[Refusal]:
        """Returns the refusals since the last call."""
        taken, self.refusals = self.refusals, []
        return taken
