"""A stopwatch of the processor time of a part of the process, with a profile of that part if one is wanted."""

import cProfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import process_time


@dataclass
class Stopwatch:
    """The processor time of the coordinator alone: it stands while the nodes and the network have their turn."""

    seconds: float = 0.0
    profile: cProfile.Profile | None = None
    _since: float = field(default_factory=process_time)
    _runs: bool = False

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts the time of a block."""
        self._go()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Leaves the time of a block out."""
        runs = self._runs
        if runs:
            self._stop()
        try:
            yield
        finally:
            if runs:
                self._go()

    def _go(self) -> None:
        self._runs, self._since = True, process_time()
        if self.profile is not None:
            self.profile.enable()

    def _stop(self) -> None:
        if self.profile is not None:
            self.profile.disable()
        self._runs, self.seconds = False, self.seconds + process_time() - self._since
