"""Looks at a run: the events since the last look, and its coordinator's process. They read its files and write none.

A run of this machine, or on a disk that it shares, is looked at here; that of another host in `remote.py`.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mlxdist.coordinator.overview.find import is_held, lock_of
from mlxdist.coordinator.report.event_log import MOST_LINES, EventLog, Line
from mlxdist.coordinator.report.history import is_whole
from mlxdist.coordinator.storage.run_folder import RunFolder


@dataclass(frozen=True)
class Look:
    """One look. Its `events` are to be taken before the next look.

    `whole`: they are all that there are, from the first one; else those since the last look. `held`: a coordinator
    writes in the run; None: that cannot be seen from here. `begun`: when it began to, 0 where that is not known. `now`:
    the time of the look. Both in seconds since 1970 by the clock of the run's host.
    """

    events: Iterable[Mapping[str, Any]]
    whole: bool
    held: bool | None
    begun: float
    now: float


class Watched(Protocol):
    """A run that is looked at."""

    @property
    def name(self) -> str:
        """The run as it is shown."""

    def look(self) -> Look:
        """Returns the next look, after a moment's wait where it is not the first one."""


@dataclass
class LocalRun:
    """A run in a folder of this machine. `wait`: called before each look but the first one."""

    path: Path
    wall: Callable[[], float] = time.time
    wait: Callable[[], None] = lambda: time.sleep(0.5)
    _log: EventLog | None = None

    @property
    def name(self) -> str:
        """The run as it is shown."""
        return self.path.name

    def look(self) -> Look:
        """Returns the next look."""
        folder, first = RunFolder(self.path), self._log is None
        if self._log is None:
            self._log = EventLog(folder.metrics_jsonl)
        else:
            self.wait()
        held, begun = is_held(folder), 0.0  # before the last events are read: a run that is gone writes none after them
        with suppress(FileNotFoundError):
            begun = lock_of(folder).stat().st_mtime
        replaced, lines = self._log.news()
        return Look(self._events(self._log, lines), replaced or first, held, begun, self.wall())

    def _events(self, log: EventLog, lines: Sequence[Line]) -> Iterator[Mapping[str, Any]]:
        """Yields the events of the lines and of those behind them, which the log gives in parts."""
        replaced = False
        while not replaced:
            yield from (line.event for line in lines if is_whole(line.event))
            if len(lines) < MOST_LINES:
                return
            replaced, lines = log.news()
        self._log = None  # the next look begins again, with the other file
