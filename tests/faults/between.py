"""A man in the middle between two Macs: all that passes him is recorded, and changed where he likes."""

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from tests.faults.namespaces import Office

Change = Callable[[int, bytes], bytes]  # of a piece that passes at a port


@dataclass
class Between:
    """Connections through the Mac of a man in the middle to the coordinator's, at the same ports.

    `change` gets each piece as it comes, from either side, one at a time.
    """

    to: str
    change: Change
    up: dict[int, list[bytearray]] = field(
        default_factory=dict
    )  # by port: what each connection has sent to the coordinator
    down: dict[int, list[bytearray]] = field(default_factory=dict)
    _turn: threading.Lock = field(default_factory=threading.Lock)
    _open: list[socket.socket] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def listen(self, port: int) -> None:
        """Takes connections at a port. Call it in the namespace of his Mac."""
        self.up[port], self.down[port] = [], []
        listener = socket.create_server(("", port))
        self._open.append(listener)
        self._start(self._accept, listener, port)

    def _start(self, act: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=act, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        with suppress(OSError):  # the listener is closed
            while True:
                joiner, _ = listener.accept()
                self._open.append(joiner)
                there = socket.create_connection((self.to, port))
                self._open.append(there)
                self._start(self._carry, port, joiner, there, self.up[port])
                self._start(self._carry, port, there, joiner, self.down[port])

    def _carry(self, port: int, source: socket.socket, target: socket.socket, record: list[bytearray]) -> None:
        heard = bytearray()
        record.append(heard)
        with suppress(OSError):
            while piece := source.recv(65536):
                heard.extend(piece)
                with self._turn:
                    changed = self.change(port, piece)
                target.sendall(changed)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Cuts everything."""
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # which also wakes a thread that accepts
        for thread in self._threads:
            thread.join()
        for each in self._open:
            each.close()


@contextmanager
def between(office: Office, where: str, to: str, ports: Sequence[int], change: Change) -> Iterator[Between]:
    """A man in the middle on the Mac `where`, for a block."""
    man = Between(to, change)
    with office.inside(where):
        for port in ports:
            man.listen(port)
    try:
        yield man
    finally:
        man.close()
