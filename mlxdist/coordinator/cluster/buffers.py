"""The vectors that the coordinator holds, from their arrival until they are summed away."""

from dataclasses import dataclass, field
from threading import Lock

import numpy as np

from mlxdist.protocol.vectors import Vector


@dataclass
class BufferPool:
    """Buffers that are used again. The thread that receives and the thread that sums both use it."""

    held: int = 0
    most_held: int = 0
    _free: list[Vector] = field(default_factory=list)
    _lent: Vector | None = None  # the last sum, which the training loop still reads
    _lock: Lock = field(default_factory=Lock)

    def take(self, elements: int) -> Vector:
        """A buffer of so many float32 elements, with any content. It counts as held until it is given back."""
        with self._lock:
            self.held += 1
            self.most_held = max(self.most_held, self.held)
            while self._free:
                buffer = self._free.pop()
                if len(buffer) == elements:
                    return buffer
        return np.empty(elements, np.float32)

    def give_back(self, buffer: Vector) -> None:
        """Takes back a buffer that may be filled again."""
        with self._lock:
            self.held -= 1
            self._free.append(buffer)

    def add(self, left: Vector, right: Vector) -> Vector:
        """The sum, in the buffer of `left`; that of `right` is given back."""
        np.add(left, right, out=left)
        self.give_back(right)
        return left

    def lend(self, total: Vector) -> Vector:
        """The same vector; it stays held until `end_loan`."""
        self._lent = total
        return total

    def end_loan(self) -> None:
        """Takes back the vector that was lent, if any."""
        if self._lent is not None:
            self.give_back(self._lent)
            self._lent = None
