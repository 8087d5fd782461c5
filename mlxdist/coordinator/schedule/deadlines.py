"""How long work may take: from the median of past times, so that a worker that does nothing is told from a slow one.

Times are counted per padded token of a leaf. A node's first leaf, and a leaf of a new width, are given more:
kernels are compiled then, and memory is laid out anew.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

REMEMBERED = 101  # leaves
FIRST_FACTOR = 5.0  # for a first leaf, or one of a new width


@dataclass
class Deadlines:
    """`least_seconds` is always given; `factor` times the median beyond it; `first_seconds` while nothing is known."""

    least_seconds: float = 30.0
    factor: float = 10.0
    first_seconds: float = 600.0
    _past: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # seconds per token
    _widths: set[int] = field(default_factory=set)

    def took(self, tokens: int, width: int, seconds: float) -> None:
        """A leaf of so many tokens was computed."""
        self._past.append(seconds / max(tokens, 1))
        self._widths.add(width)

    def usual(self, tokens: float) -> float | None:
        """What so many tokens usually take on some node; None before the first measurement."""
        return median(self._past) * tokens if self._past else None

    def limit(self, tokens: int, width: int, *, first: bool) -> float:
        """Seconds from the node's last sign of progress to where it counts as stuck."""
        usual = self.usual(tokens)
        if usual is None:
            return self.first_seconds
        wider = FIRST_FACTOR if first or width not in self._widths else 1.0
        return max(self.least_seconds, self.factor * usual) * wider
