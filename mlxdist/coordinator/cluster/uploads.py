"""Partials on their way up, and the memory that they may take.

At most `limit` buffers (nodes + 1) are held at a time, counting those that wait in the sum; beyond it only the partial
with the lowest unfinished leaf is let in, which the sum can always use, and of those `reserve` (1 + ceil(log2 M)). So a
step of M leaves never holds more than nodes + 2 + ceil(log2 M) vectors. It never waits for ever either: when so many
are held and none is arriving, more than ceil(log2 M) are below the lowest unfinished leaf, where the sum needs fewer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from mlxdist.coordinator.cluster.buffers import BufferPool
from mlxdist.protocol.errors import StaleError, WireError
from mlxdist.protocol.messages import VectorOffer
from mlxdist.protocol.vectors import IncomingVector, Vector, block_count


class DamagedError(WireError):
    """All blocks of a vector came, and its hash is another."""


@dataclass
class Uploads:
    """Offers that wait, and vectors that arrive, by node and stream."""

    pool: BufferPool
    limit: int = 2
    reserve: int = 1  # how many more the lowest ones may take
    _waiting: dict[tuple[str, int], VectorOffer] = field(default_factory=dict)
    _arriving: dict[tuple[str, int], tuple[VectorOffer, IncomingVector]] = field(default_factory=dict)
    _newest: dict[str, int] = field(default_factory=dict)  # the last stream that each worker has offered

    def offer(self, name: str, offer: VectorOffer) -> None:
        """Notes that a node has a partial. Raises WireError for a stream, or a partial, that is under way already."""
        under_way = [*self._waiting.items(), *((key, one) for key, (one, _) in self._arriving.items())]
        for key, other in under_way:
            same = (other.attempt, other.start, other.stop) == (offer.attempt, offer.start, offer.stop)
            if key[0] == name and (key[1] == offer.stream or same):
                raise WireError(f"vector {offer.stream} of {name} was offered before")
        self._waiting[name, offer.stream] = offer
        self._newest[name] = max(offer.stream, self._newest.get(name, 0))

    def admit(self, lowest_missing: int) -> Iterator[tuple[str, int, int]]:
        """Lets in what there is room for: yields (node, stream, credit) of each."""
        for key, offer in sorted(self._waiting.items(), key=lambda item: item[1].start):
            # A copy of what arrives already may overtake it, but not with the room that is kept for the lowest one.
            lowest = offer.start == lowest_missing and not self._arrives(offer)
            if self.pool.held >= self.limit + (self.reserve if lowest else 0):
                break
            del self._waiting[key]
            vector = IncomingVector(offer.stream, self.pool.take(offer.elements))
            self._arriving[key] = (offer, vector)
            yield *key, vector.upto

    def block(self, name: str, stream: int, index: int, payload: memoryview) -> int:
        """Takes one block; returns the new credit.

        Raises StaleError for a block of what was thrown away meanwhile, WireError for one that was never let in.
        """
        _, vector = self._find(name, stream)
        vector.block(index, payload)
        return vector.upto

    def end(self, name: str, stream: int, digest: str) -> tuple[VectorOffer, Vector, bool]:
        """Takes the end of a vector: returns its offer, its buffer, and true if all of it can be summed.

        Raises DamagedError, its buffer free again, when the hash differs; WireError when blocks are missing, and
        StaleError for what was thrown away meanwhile.
        """
        offer, vector = self._find(name, stream)
        try:
            vector.end(digest)
        except WireError as error:
            if vector.received < block_count(len(vector.buffer)):
                raise
            self._free_again((name, stream))
            raise DamagedError(f"the partial over [{offer.start}, {offer.stop}) arrived damaged") from error
        del self._arriving[name, stream]
        return offer, vector.buffer, vector.finite

    def arriving(self, name: str, stop: int) -> list[int]:
        """The streams of a node's partials, let in, over subtrees whose last leaf is the one before `stop`."""
        return [key[1] for key, (offer, _) in self._arriving.items() if key[0] == name and offer.stop == stop]

    @property
    def waits(self) -> bool:
        """True if a partial waits to be let in."""
        return bool(self._waiting)

    @property
    def stalled(self) -> set[str]:
        """The nodes that wait for room, and for nothing of their own."""
        return {name for name, _ in self._waiting} - {name for name, _ in self._arriving}

    def not_needed(self, needed: Callable[[VectorOffer], bool]) -> Iterator[tuple[str, int]]:
        """Throws away what is offered or arrives and is not needed any more: yields (node, stream) of each."""
        for key in [key for key, offer in self._waiting.items() if not needed(offer)]:
            del self._waiting[key]
            yield key
        for key in [key for key, (offer, _) in self._arriving.items() if not needed(offer)]:
            self._free_again(key)
            yield key

    def drop(self, name: str) -> None:
        """Throws away the offers and half partials of a node whose worker is gone."""
        for key in [key for key in self._waiting if key[0] == name]:
            del self._waiting[key]
        for key in [key for key in self._arriving if key[0] == name]:
            self._free_again(key)
        self._newest.pop(name, None)

    def _free_again(self, key: tuple[str, int]) -> None:
        _, vector = self._arriving.pop(key)
        self.pool.give_back(vector.buffer)

    def _arrives(self, offer: VectorOffer) -> bool:
        return any((one.start, one.stop) == (offer.start, offer.stop) for one, _ in self._arriving.values())

    def _find(self, name: str, stream: int) -> tuple[VectorOffer, IncomingVector]:
        if (name, stream) in self._arriving:
            return self._arriving[name, stream]
        if (name, stream) not in self._waiting and 0 < stream <= self._newest.get(name, 0):
            raise StaleError(f"vector {stream} of {name} is not needed any more")
        raise WireError(f"vector {stream} of {name} was not let in")
