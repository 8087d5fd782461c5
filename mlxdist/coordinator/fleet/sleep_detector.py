"""Finds the time in which this process did nothing, from two clocks: it was stopped, or its Mac slept.

A process that is stopped finds its monotonic clock far ahead. On a Mac that sleeps, that clock stands still, and only
the wall clock tells; so it does when the clock is set. Both are taken for sleep: that costs nothing but some patience
with nodes that are silent.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Absence:
    """Looks at both clocks, in seconds, whenever it is asked."""

    monotonic: Callable[[], float]
    wall: Callable[[], float]

    def __post_init__(self) -> None:
        self._before = (self.monotonic(), self.wall())

    def since_last_look(self, usual: float) -> tuple[float, float]:
        """(monotonic seconds, more than `usual`, since the last look; else 0; seconds of sleep that they do not show).

        A clock that is set back, or the few milliseconds in which it follows the time of the network, are no sleep.
        """
        before, self._before = self._before, (self.monotonic(), self.wall())
        gap = self._before[0] - before[0]
        unseen = self._before[1] - before[1] - gap
        return gap if gap > usual else 0.0, unseen if unseen > usual else 0.0
