"""All that a worker has to send: messages, and partials that leave block by block, also while they still grow.

A partial that grows is offered before it is whole. Its END goes only when it is whole, so nothing counts before. One
that will not become whole is withdrawn, and the coordinator, told why by another message, drops its part too.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec

from mlxdist.protocol import messages as m
from mlxdist.protocol.vectors import OutgoingVector, Vector
from mlxdist.protocol.wire import Buffer


@dataclass
class Outgoing:
    """The messages and vectors of one session, in the order in which they may go."""

    session: m.SessionId
    clock: Callable[[], float] = time.monotonic
    closed: bool = False
    grew: dict[int, float] = field(default_factory=dict)  # seconds from the offer until it was whole, by stream
    vectors: dict[int, OutgoingVector] = field(default_factory=dict)  # by stream; until their END is sent
    _offered: dict[int, float] = field(default_factory=dict)  # when, by stream, while the vector grows
    _kept: dict[int, tuple[m.VectorOffer, Vector]] = field(default_factory=dict)  # until they are received whole
    _outbox: deque[tuple[m.Message, Buffer]] = field(default_factory=deque)
    _streams: int = 0

    def say(self, message: m.Message, payload: Buffer = b"") -> None:
        """Queues a message."""
        if not self.closed:
            self._outbox.append((message, payload))

    def offer(self, offer: m.VectorOffer, vector: Vector, ready: int | None = None) -> int:
        """Announces a vector, of which `ready` elements are final (None: all). Returns its stream number."""
        self._streams += 1
        if not self.closed:
            self.vectors[self._streams] = OutgoingVector(self._streams, vector, ready=ready)
            self._kept[self._streams] = (msgspec.structs.replace(offer, stream=self._streams), vector)
            self.say(self._kept[self._streams][0])
            if ready is not None:
                self._offered[self._streams] = self.clock()
        return self._streams

    def grow(self, stream: int, ready: int | None) -> None:
        """Notes that `ready` elements of a vector are final (None: all, and it counts), unless it was dropped."""
        if (vector := self.vectors.get(stream)) is None:
            return
        vector.ready = ready
        if ready is None:
            self.grew[stream] = self.clock() - self._offered.pop(stream)

    def take(self) -> Iterator[tuple[m.Message, Buffer]]:
        """Yields what may be sent now, each once: queued messages, then blocks with credit that will not change.

        Between two of them, messages may be queued, and vectors may grow or be dropped.
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
        """True while anything is not sent yet."""
        return bool(self.vectors or self._outbox)

    def credit(self, stream: int, upto: int) -> None:
        """Allows the blocks below `upto`, for which the coordinator has room."""
        if stream in self.vectors:
            self.vectors[stream].credit(upto)

    def received(self, stream: int, whole: bool) -> None:
        """Forgets a vector that has arrived; offers one that arrived damaged again, all of it."""
        kept = self._kept.pop(stream, None) if stream not in self.vectors else None
        if kept is not None and not whole:
            self.offer(*kept)

    def drop(self, stream: int) -> None:
        """Forgets a vector that is not needed any more."""
        self.vectors.pop(stream, None)
        self._kept.pop(stream, None)
        self.grew.pop(stream, None)
        self._offered.pop(stream, None)

    def drop_attempt(self, attempt: int) -> None:
        """Forgets the vectors of an attempt that is not needed any more."""
        for stream in [stream for stream, (offer, _) in self._kept.items() if offer.attempt == attempt]:
            self.drop(stream)

    def close(self) -> None:
        """Forgets everything: nothing is sent any more."""
        self.closed = True
        self._outbox.clear()
        self.vectors.clear()
        self._kept.clear()
