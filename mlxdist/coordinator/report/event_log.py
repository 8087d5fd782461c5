"""The event file of a run, read as it grows: each whole line once, a replaced file from its start again."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

HEAD_BYTES = 256  # by which a new file is known that took the inode of the old one
MOST_LINES = 5_000  # of one look, so that a long file takes little memory


@dataclass(frozen=True, slots=True)
class Line:
    """One event, and its place in the file in bytes."""

    event: dict[str, Any]
    start: int
    length: int


@dataclass
class EventLog:
    """Reads the lines of `path` that were added since the last look. A line without its end waits for it."""

    path: Path
    _file: tuple[int, int] = (0, 0)  # device and inode
    _head: bytes = b""
    _read: int = 0  # bytes

    def news(self) -> tuple[bool, list[Line]]:
        """Returns true if the file is another one than before, and the next events that were added to it.

        A long file takes several looks: the last one brings nothing.
        """
        try:
            with self.path.open("rb") as stream:
                replaced = self._is_replaced(stream)
                if replaced:
                    self._read = 0
                    self._head = b""
                found = list(islice(self._lines(stream), MOST_LINES))
                if len(self._head) < HEAD_BYTES:
                    stream.seek(0)
                    self._head = stream.read(min(HEAD_BYTES, self._read))
                return replaced, found
        except FileNotFoundError:
            gone, self._file, self._read, self._head = self._read > 0, (0, 0), 0, b""
            return gone, []

    def _is_replaced(self, stream: BinaryIO) -> bool:
        state = os.fstat(stream.fileno())
        before, self._file = self._file, (state.st_dev, state.st_ino)
        if not self._read:
            return False
        return before != self._file or state.st_size < self._read or stream.read(len(self._head)) != self._head

    def _lines(self, stream: BinaryIO) -> Iterator[Line]:
        stream.seek(self._read)
        for line in stream:
            if not line.endswith(b"\n"):
                return
            start, self._read = self._read, self._read + len(line)
            if (event := event_of(line)) is not None:
                yield Line(event, start, len(line))


def event_of(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line; None for a line that a crash tore, or that is none."""
    try:
        event = msgspec.json.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        try:
            event = json.loads(line)  # takes half a surrogate pair, as the path of a folder may have it
        except (ValueError, RecursionError):
            return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None
