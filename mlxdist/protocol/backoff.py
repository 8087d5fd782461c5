"""The wait before something that ended is started again: 1, 2, 4 … 60 s, and at most ten times an hour."""

from collections import deque
from dataclasses import dataclass, field

DOUBLINGS = 6  # of the first wait
MOST_FACTOR = 60.0  # of the first wait
MOST_STARTS = 10
PERIOD_FACTOR = 3600.0  # of the first wait: an hour


@dataclass
class Backoff:
    """Waits that double. `first_seconds`: the first one, from which all other times follow."""

    first_seconds: float = 1.0
    _starts: deque[float] = field(default_factory=deque)

    def next(self, now: float) -> float | None:
        """The seconds to wait; None after too many starts within the last hour."""
        while self._starts and now - self._starts[0] > PERIOD_FACTOR * self.first_seconds:
            self._starts.popleft()
        if len(self._starts) >= MOST_STARTS:
            return None
        wait = self.first_seconds * min(2.0 ** min(len(self._starts), DOUBLINGS), MOST_FACTOR)
        self._starts.append(now)
        return wait
