"""A flat float32 vector on the wire: 1 MiB blocks, a credit window, a hash at the end. No sockets.

Elements stand in manifest order. Blocks are separate messages, so that a large vector never delays a small message for
long and a receiver is never sent more than it has room for.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.errors import WireError

BLOCK_BYTES = 1 << 20
BLOCK_ELEMENTS = BLOCK_BYTES // 4
WINDOW = 8  # blocks under way per vector
LARGEST = np.float32(2.0**106)  # about 8e31: sums of four million such numbers stay in the range of float32

Vector = npt.NDArray[np.float32]


def block_count(elements: int) -> int:
    """The number of blocks of a vector with so many elements."""
    return -(-elements // BLOCK_ELEMENTS)


def digest(vector: Vector) -> str:
    """SHA-256 of the vector's little-endian bytes, in hex."""
    return hashlib.sha256(_bytes(vector)).hexdigest()


def _bytes(vector: Vector) -> memoryview:
    return vector.view(np.uint8).data  # unlike a cast of vector.data, it takes an empty one too


@dataclass
class VectorHash:
    """The hash of a vector, computed block by block while it travels; shared where it goes to many."""

    vector: Vector
    _hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)
    _hashed: int = 0  # blocks

    def upto(self, blocks: int) -> None:
        """Hashes the blocks below `blocks`, each once."""
        if blocks > self._hashed:
            self._hash.update(_bytes(self.vector)[self._hashed * BLOCK_BYTES : blocks * BLOCK_BYTES])
            self._hashed = blocks

    def end(self) -> str:
        """SHA-256 of the whole vector, in hex."""
        self.upto(block_count(len(self.vector)))
        return self._hash.hexdigest()


@dataclass
class OutgoingVector:
    """The sending half: knows which blocks may go now. A vector that goes to many has one hash, `shared`.

    One that still grows has `ready` elements that will not change any more; None: it is whole. Its END waits for that.
    """

    stream: int
    vector: Vector
    shared: VectorHash | None = None
    ready: int | None = None
    sent: int = 0
    granted: int = 0
    _hash: VectorHash = field(init=False)

    def __post_init__(self) -> None:
        self._hash = self.shared or VectorHash(self.vector)

    def credit(self, upto: int) -> None:
        """Takes a credit: the receiver has room up to this block. An older credit changes nothing."""
        self.granted = max(self.granted, min(upto, block_count(len(self.vector))))

    def blocks(self) -> Iterator[tuple[int, memoryview]]:
        """The (index, bytes) that may be sent now, each once. A block is hashed after it is taken, while it travels."""
        flat = _bytes(self.vector)
        while self.sent < min(self.granted, self._blocks_ready):
            index = self.sent
            self.sent += 1
            yield index, flat[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
            self._hash.upto(index + 1)

    @property
    def _blocks_ready(self) -> int:
        if self.ready is None or self.ready == len(self.vector):
            return block_count(len(self.vector))
        return self.ready // BLOCK_ELEMENTS

    @property
    def all_sent(self) -> bool:
        """True if only the END is left to send."""
        return self.ready is None and self.sent == block_count(len(self.vector))

    def end(self) -> str:
        """The hash that the END carries."""
        return self._hash.end()


@dataclass
class IncomingVector:
    """The receiving half: fills a buffer of the right size, in order, and checks the hash."""

    stream: int
    buffer: Vector
    received: int = 0
    finite: bool = True  # no NaN, no Inf and nothing above LARGEST has come so far
    _hash: "hashlib._Hash" = field(default_factory=hashlib.sha256)

    def block(self, index: int, payload: memoryview) -> None:
        """Writes one block. Raises WireError for a block out of order or of the wrong size."""
        if index != self.received:
            raise WireError(f"block {index} of vector {self.stream} where {self.received} was due")
        target = _bytes(self.buffer)[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]
        if payload.nbytes != target.nbytes or not payload.nbytes:
            raise WireError(f"block {index} of vector {self.stream} has {payload.nbytes} bytes, not {target.nbytes}")
        target[:] = payload.cast("B")
        self._hash.update(payload)
        block = self.buffer[index * BLOCK_ELEMENTS :][:BLOCK_ELEMENTS]
        # A NaN is both the largest and the smallest number, and within no limits. No copy is made.
        self.finite = self.finite and bool(block.max() <= LARGEST and block.min() >= -LARGEST)
        self.received += 1

    @property
    def upto(self) -> int:
        """The credit to give: as far as the window reaches."""
        return min(self.received + WINDOW, block_count(len(self.buffer)))

    def end(self, digest: str) -> None:
        """Checks the whole vector. Raises WireError when blocks are missing or the hash differs."""
        if self.received != block_count(len(self.buffer)):
            raise WireError(
                f"vector {self.stream} ended after {self.received} of {block_count(len(self.buffer))} blocks"
            )
        if self._hash.hexdigest() != digest:
            raise WireError(f"vector {self.stream} does not have the hash that its sender gave")
