"""What a worker has to send: messages, and partials that leave block by block, also while they still grow.

A partial that grows is offered before it is whole. Its END goes only when it is finished, so nothing counts before; one
that cannot be finished is withdrawn, and the coordinator, told why by another message, throws its part away too.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from mlxdist.protocol import messages as m
from mlxdist.protocol.vectors import OutgoingVector, Vector
from mlxdist.protocol.wire import Buffer


class Growing(Protocol):
    """A partial on its way; whoever computes it says how far it is."""

    def grow(self, ready: int) -> None:
        """So many elements, from the first on, are final."""

    def finish(self) -> None:
        """All of it is final, and counts."""

    def withdraw(self) -> None:
        """It will not be finished."""


@dataclass(frozen=True)
class Stream:
    """One partial of an `Outgoing`. What was dropped meanwhile is nobody's concern: then nothing happens."""

    outgoing: "Outgoing"
    number: int
    offered: float  # when, in seconds

    def grow(self, ready: int) -> None:
        """So many elements, from the first on, are final."""
        if (vector := self.outgoing.vectors.get(self.number)) is not None:
            vector.ready = ready

    def finish(self) -> None:
        """All of it is final, and counts."""
        if (vector := self.outgoing.vectors.get(self.number)) is not None:
            vector.ready = None
            self.outgoing.grew[self.number] = self.outgoing.clock() - self.offered

    def withdraw(self) -> None:
        """It will not be finished."""
        self.outgoing.drop(self.number)


@dataclass
class Outgoing:
    """The messages and vectors of one life, in the order in which they may go."""

    session: m.SessionId
    clock: Callable[[], float] = time.monotonic
    closed: bool = False
    grew: dict[int, float] = field(default_factory=dict)  # seconds from the offer to the whole, by stream
    vectors: dict[int, OutgoingVector] = field(default_factory=dict)  # by stream; until their END is sent
    _kept: dict[int, tuple[m.VectorOffer, Vector]] = field(default_factory=dict)  # until they are received whole
    _outbox: deque[tuple[m.Message, Buffer]] = field(default_factory=deque)
    _streams: int = 0

    def say(self, message: m.Message, payload: Buffer = b"") -> None:
        """Queue a message."""
        if not self.closed:
            self._outbox.append((message, payload))

    def offer(self, offer: m.VectorOffer, vector: Vector, ready: int | None = None) -> Stream:
        """Announce a vector under the next stream number; `ready` elements are final, None: all."""
        self._streams += 1
        if not self.closed:
            self.vectors[self._streams] = OutgoingVector(self._streams, vector, ready=ready)
            self._kept[self._streams] = (msgspec.structs.replace(offer, stream=self._streams), vector)
            self.say(self._kept[self._streams][0])
        return Stream(self, self._streams, self.clock())

    def take(self) -> Iterator[tuple[m.Message, Buffer]]:
        """What may be sent now, each once: what was said, then the blocks that have credit and will not change.

        Between two messages, others may be said and vectors grow or be dropped.
        """
        yield from self._said()
        for stream, vector in list(self.vectors.items()):
            for index, block in vector.blocks():
                yield from self._said()
                if self.vectors.get(stream) is not vector:
                    break
                yield m.VectorBlock(self.session, stream, index), block
            if vector.all_sent and self.vectors.get(stream) is vector:
                yield from self._said()  # the answer to its last leaf stands before the END
                if self.vectors.pop(stream, None) is not None:
                    yield m.VectorEnd(self.session, stream, vector.end(), self.grew.pop(stream, 0.0)), b""

    def _said(self) -> Iterator[tuple[m.Message, Buffer]]:
        while self._outbox:
            yield self._outbox.popleft()

    @property
    def waiting(self) -> bool:
        """Whether anything is not sent yet."""
        return bool(self.vectors or self._outbox)

    def credit(self, stream: int, upto: int) -> None:
        """The coordinator has room for blocks below `upto`."""
        if stream in self.vectors:
            self.vectors[stream].credit(upto)

    def received(self, stream: int, whole: bool) -> None:
        """A vector has arrived, and may be forgotten; or, damaged, is offered again, all of it."""
        kept = self._kept.pop(stream, None) if stream not in self.vectors else None
        if kept is not None and not whole:
            self.offer(*kept)

    def drop(self, stream: int) -> None:
        """Nobody needs this vector."""
        self.vectors.pop(stream, None)
        self._kept.pop(stream, None)
        self.grew.pop(stream, None)

    def drop_attempt(self, attempt: int) -> None:
        """Nobody needs the vectors of this attempt."""
        for stream in [stream for stream, (offer, _) in self._kept.items() if offer.attempt == attempt]:
            self.drop(stream)

    def close(self) -> None:
        """Nothing is sent any more."""
        self.closed = True
        self._outbox.clear()
        self.vectors.clear()
        self._kept.clear()
