"""A link that a test can hurt: passes bytes between nodes and a coordinator, watches for message types, and breaks.

A message's type stands in its header in plain letters, so that a test can act at the very moment in which, say, the
first block of a partial goes up.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

UP, DOWN = "up", "down"
HOST = "127.0.0.2"  # beside the coordinator's 127.0.0.1, so that both can have the same ports


@dataclass
class Proxy:
    """Between 127.0.0.2 and 127.0.0.1, on `ports`. `triggers`: (direction, bytes) -> what to do at its first sight."""

    ports: tuple[int, ...]
    triggers: dict[tuple[str, bytes], Callable[[], None]] = field(default_factory=dict)
    damage: dict[str, int] = field(default_factory=dict)  # direction -> how many large chunks get one bit flipped
    passing: dict[str, threading.Event] = field(
        default_factory=lambda: {UP: threading.Event(), DOWN: threading.Event()}
    )
    damaged: int = 0
    _listeners: list[socket.socket] = field(default_factory=list)
    _pipes: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def start(self) -> "Proxy":
        """Listen, and pass everything."""
        for direction in (UP, DOWN):
            self.passing[direction].set()
        for port in self.ports:
            listener = socket.create_server((HOST, port))
            self._listeners.append(listener)
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()
        return self

    def cut(self) -> None:
        """Close every connection that there is; new ones are passed."""
        with self._lock:
            pipes, self._pipes = self._pipes, []
        for pipe in pipes:
            _end(pipe)

    def close(self) -> None:
        """End."""
        for listener in self._listeners:
            _end(listener)
        for direction in (UP, DOWN):
            self.passing[direction].set()
        self.cut()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                node, _ = listener.accept()
            except OSError:
                return
            try:
                coordinator = socket.create_connection(("127.0.0.1", port))
            except OSError:
                node.close()
                continue
            with self._lock:
                self._pipes += [node, coordinator]
            for source, target, direction in ((node, coordinator, UP), (coordinator, node, DOWN)):
                threading.Thread(target=self._pass, args=(source, target, direction), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        seen = b""
        try:
            while chunk := source.recv(65536):
                self.passing[direction].wait()
                seen = seen[-32:] + chunk
                for key in [key for key in self.triggers if key[0] == direction and key[1] in seen]:
                    if action := self.triggers.pop(key, None):
                        action()
                target.sendall(self._hurt(chunk, seen, direction))
        except OSError:
            pass
        _end(source)
        _end(target)

    def _hurt(self, chunk: bytes, seen: bytes, direction: str) -> bytes:
        """One flipped bit in the last byte of a chunk that ends within a block's numbers."""
        if not self.damage.get(direction) or b"VectorBlock" not in seen or b"VectorEnd" in seen or len(chunk) < 2000:
            return chunk
        self.damage[direction] -= 1
        self.damaged += 1
        place = chunk.index(b"VectorBlock") + 1500 if b"VectorBlock" in chunk[:-1600] else len(chunk) - 300
        return chunk[:place] + bytes([chunk[place] ^ 1]) + chunk[place + 1 :]


def _end(pipe: socket.socket) -> None:
    with suppress(OSError):
        pipe.shutdown(socket.SHUT_RDWR)
    pipe.close()
