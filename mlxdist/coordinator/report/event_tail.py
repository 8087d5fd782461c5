"""The event file as it grows, for programs that follow a run: each whole line once, read on from where it was left."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PART = 1 << 20  # bytes that are read at once


class EventTail:
    """Reads the events of a file that another process appends to. It need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0  # of the first byte that was not read yet
        self._rest = b""  # of a line without its end

    def new(self) -> Iterator[dict[str, Any]]:
        """Yields the events since the last call; what is no JSON object is passed over."""
        try:
            stream = self._path.open("rb")
        except FileNotFoundError:
            return
        with stream:
            stream.seek(self._offset)
            while data := stream.read(PART):
                self._offset += len(data)
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    try:
                        event = json.loads(line)
                    except ValueError:
                        continue
                    if isinstance(event, dict):
                        yield event
