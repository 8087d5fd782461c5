"""Deadlines of work, from the median of past times, so that a worker that does nothing is told from a slow one.

Times are counted per token of a leaf. A node's first leaf, and one whose longest row has a new length, are given more:
kernels are compiled then, and buffers are allocated.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from mlxdist.coordinator.config.schema import TimingConfig

REMEMBERED = 101  # leaves
FIRST_FACTOR = 5.0  # for a first leaf, or one of a new width


@dataclass
class Deadlines:
    """The deadlines of [timing].

    A worker with work may always do nothing for `progress_seconds`, and for `progress_factor` times the median time of
    such a leaf. While no time is known it has `start_timeout`.
    """

    timing: TimingConfig
    _past: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))  # seconds per token
    _median: float | None = None  # of these; None: not known for the last one
    _widths: set[int] = field(default_factory=set)

    def took(self, tokens: int, width: int, seconds: float) -> None:
        """Remembers that a leaf of so many tokens was computed."""
        self._past.append(seconds / max(tokens, 1))
        self._median = None
        self._widths.add(width)

    def usual(self, tokens: float) -> float | None:
        """The seconds that so many tokens usually take on some node; None before the first measurement."""
        if self._median is None and self._past:
            self._median = median(self._past)
        return self._median * tokens if self._median is not None else None

    def limit(self, tokens: int, width: int, *, first: bool) -> float:
        """Seconds from the node's last sign of progress to where it counts as stuck."""
        usual, timing = self.usual(tokens), self.timing
        if usual is None:
            return timing.start_timeout
        wider = FIRST_FACTOR if first or width not in self._widths else 1.0
        return max(timing.progress_seconds, timing.progress_factor * usual) * wider
