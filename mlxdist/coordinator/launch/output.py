"""The output of a node's process, read as it comes: it never waits for us, however much it prints.

Before the marker of a command on another host, the lines are those of the login shell and of ssh itself.
"""

import re
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import IO

from mlxdist.coordinator.launch.ssh import Answer

MOST_BYTES = 8 << 20  # that wait to be written to a log; the log keeps no more
LINE_BYTES = 4096  # a longer line is cut into several
TAIL_LINES = 20
SAID_LINES = 200  # of ssh and the login shell
FORWARDED = re.compile(r"Allocated port (\d+) for remote forward to \S+:(\d+)")


@dataclass
class Output:
    """Both streams of a process, read by two threads until they end. `marker` "": all lines are the process's own."""

    marker: str = ""
    reached: bool = False  # the command on the host has begun
    header: str = ""  # the first line that it prints
    ports: dict[int, int] = field(default_factory=dict)  # on the host, by the port here that they lead to
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    _said: dict[str, deque[str]] = field(default_factory=dict)  # before the marker, by stream
    _lines: deque[str] = field(default_factory=deque)
    _size: int = 0
    _left_out: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def read(self, out: IO[bytes], err: IO[bytes]) -> None:
        """Starts reading."""
        for name, stream in (("out", out), ("err", err)):
            self._said[name] = deque(maxlen=SAID_LINES)
            thread = threading.Thread(target=self._read, args=(name, stream), name=f"output-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _read(self, name: str, stream: IO[bytes]) -> None:
        own, first = not self.marker, name == "out" and bool(self.marker)
        with stream:
            while data := stream.readline(LINE_BYTES):
                line = data.decode(errors="replace").rstrip("\r\n")
                if not own:
                    if line == self.marker:
                        own = self.reached = True
                    else:
                        self._before(name, line)
                elif first:
                    self.header, first = line, False
                else:
                    self._keep(line)

    def _before(self, name: str, line: str) -> None:
        self._said[name].append(line)
        if match := FORWARDED.search(line):
            self.ports[int(match[2])] = int(match[1])

    def _keep(self, line: str) -> None:
        with self._lock:
            self.tail.append(line)
            self._lines.append(line)
            self._size += len(line) + 1
            while self._size > MOST_BYTES:
                self._size -= len(self._lines.popleft()) + 1
                self._left_out += 1

    def take(self) -> list[str]:
        """Returns the lines since the last call; the first one says how many were left out before them."""
        with self._lock:
            lines, self._lines, self._size = list(self._lines), deque(), 0
            left_out, self._left_out = self._left_out, 0
        note = [f"[{left_out} lines were left out here: more was printed than could be written]"] if left_out else []
        return note + lines

    @property
    def whole(self) -> bool:
        """True if both streams have ended; a process that has ended may have left one to another process."""
        return not any(thread.is_alive() for thread in self._threads)

    def finish(self, seconds: float = 1.0) -> None:
        """Waits a moment for the last lines of a process that has ended."""
        for thread in self._threads:
            thread.join(seconds)

    def answer(self, code: int | None) -> Answer:
        """Returns the outcome so far, as that of a command on a host."""
        said = {name: "\n".join(lines).strip("\n") for name, lines in self._said.items()}
        printed = "\n".join(self.tail)
        return Answer(code, "", printed, self.reached, said.get("out", ""), said.get("err", ""))
