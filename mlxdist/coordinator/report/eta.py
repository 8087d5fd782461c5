"""How long the rest of a run takes, from the pace of its last steps."""

from collections import deque
from collections.abc import Callable

from mlxdist.coordinator.report.format import StepReport

_WINDOW = 50  # steps; long enough to hold an evaluation, short enough to follow a node that joins


class Pace:
    """Seconds left, evaluations and saves between the steps included."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=_WINDOW)
        self._last: StepReport | None = None

    def step(self, report: StepReport) -> None:
        """A step has just ended."""
        self._ends.append(self._clock())
        self._last = report

    def seconds_left(self) -> float | None:
        """Seconds from now to the last step's end; None before the first step and where there is no last one."""
        if self._last is None or self._last.total_steps is None:
            return None
        spans = len(self._ends) - 1
        a_step = (self._ends[-1] - self._ends[0]) / spans if spans else self._last.seconds
        remaining = max(self._last.total_steps - self._last.step, 0)
        return max(a_step * remaining - (self._clock() - self._ends[-1]), 0.0)
