"""The event file as it grows: a line at a time, whole or not at all; what cannot be written waits in memory."""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from mlxdist.coordinator.storage.run_folder import append, sync_file
from mlxdist.protocol.errors import SaveError

MOST_WAITING = 100_000  # lines, some 50 MB: then the oldest go


class EventFile:
    """Appends lines to `path`. Not safe to call from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: deque[str] = deque(maxlen=MOST_WAITING)

    def add(self, line: str) -> SaveError | None:
        """Append a line, behind all that still wait. Returns why it must wait too, if it must."""
        self._waiting.append(line)
        return _failure_of(self.flush)

    def sync(self) -> SaveError | None:
        """Write what waits, and flush it to the disk. Returns why that cannot be done."""
        return _failure_of(self.flush) or _failure_of(lambda: sync_file(self.path))

    def flush(self) -> None:
        """Write what waits. Raises SaveError; it then goes on waiting."""
        if self._waiting:
            append(self.path, "".join(f"{line}\n" for line in self._waiting).encode())
            self._waiting.clear()


def _failure_of(write: Callable[[], None]) -> SaveError | None:
    try:
        write()
    except SaveError as error:
        return error
    return None
