"""The event file as it grows: a line at a time, whole or not at all; lines that cannot be written wait in memory."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from mlxdist.coordinator.storage.run_folder import append, json_bytes, sync_file
from mlxdist.protocol.errors import SaveError

MOST_WAITING = 100_000  # lines, some 50 MB: beyond that the oldest are dropped


class EventFile:
    """Appends lines to `path`. Not safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)

    def add(self, line: str) -> SaveError | None:
        """Appends a line, behind all that still wait. Returns the reason if it must wait too."""
        self._waiting.append(line)
        return _failure_of(self.flush)

    def sync(self) -> SaveError | None:
        """Writes the lines that wait, and flushes the file to the disk. Returns the reason if that cannot be done."""
        return _failure_of(self.flush) or _failure_of(lambda: sync_file(self.path))

    def flush(self) -> None:
        """Writes the lines that wait. Raises SaveError; they then go on waiting."""
        if self._waiting:
            append(self.path, json_bytes("".join(f"{line}\n" for line in self._waiting)))
            self._waiting.clear()


def _failure_of(write: Callable[[], None]) -> SaveError | None:
    try:
        write()
    except SaveError as error:
        return error
    return None
