"""Looks at a run: the events since the last look, and its coordinator's process. They read its files and write none.

A run of this machine, or on a disk that it shares, is looked at here; that of another host in `remote.py`.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from mlxdist.coordinator.overview.find import is_held, lock_of
from mlxdist.coordinator.report.history import EventLines
from mlxdist.coordinator.storage.run_folder import RunFolder

READ_BYTES = 2**20


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
class Place:
    """A place in an event file that grows, and is replaced by --resume: then its reading begins again."""

    inode: int = 0
    offset: int = 0
    lines: EventLines = field(default_factory=EventLines)

    def begins_again(self, inode: int, size: int) -> bool:
        """Returns true where the file is another one than before, or shorter: all of it is to be read then."""
        if inode == self.inode and size >= self.offset:
            return False
        self.inode, self.offset, self.lines = inode, 0, EventLines()
        return True

    def take(self, data: bytes) -> Iterator[Mapping[str, Any]]:
        """Yields the events in the next bytes of the file."""
        self.offset += len(data)
        yield from self.lines.take(data)


@dataclass
class LocalRun:
    """A run in a folder of this machine. `wait`: called before each look but the first one."""

    path: Path
    wall: Callable[[], float] = time.time
    wait: Callable[[], None] = lambda: time.sleep(0.5)
    _place: Place = field(default_factory=Place)
    _looked: bool = False

    @property
    def name(self) -> str:
        """The run as it is shown."""
        return self.path.name

    def look(self) -> Look:
        """Returns the next look."""
        if self._looked:
            self.wait()
        folder, self._looked = RunFolder(self.path), True
        held = is_held(folder)  # before the last events are read: a run that is gone writes none after them
        begun = 0.0
        with suppress(FileNotFoundError):
            begun = lock_of(folder).stat().st_mtime
        try:
            state = folder.metrics_jsonl.stat()
        except FileNotFoundError:
            return Look((), self._place.begins_again(0, 0), held, begun, self.wall())
        whole = self._place.begins_again(state.st_ino, state.st_size)
        return Look(self._read(folder.metrics_jsonl, state), whole, held, begun, self.wall())

    def _read(self, path: Path, state: os.stat_result) -> Iterator[Mapping[str, Any]]:
        """Yields the events up to the file's size at the look; nothing of another file that took its place since."""
        with path.open("rb") as stream:
            if os.fstat(stream.fileno()).st_ino != state.st_ino:
                return
            stream.seek(self._place.offset)
            while self._place.offset < state.st_size and (data := stream.read(READ_BYTES)):
                yield from self._place.take(data)
