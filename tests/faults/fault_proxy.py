"""A link that a test can break. It carries the messages of one node to and from the coordinator, and sees each.

The proxy understands ZeroMQ's frames, so that a test can act exactly when, for example, the first block of a partial
is sent, and can change or drop just that message. Each node has its own proxy, on two ports that it picks; the
coordinator's Accept is rewritten to name the proxy's data port.
"""

import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, NamedTuple, TypeVar

import msgspec

from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.wire import Buffer, decode, encode

M = TypeVar("M", bound=m.Message)

UP, DOWN = "up", "down"  # towards the coordinator, towards the node
HOST = "127.0.0.1"
GREETING_BYTES = 64  # of ZMTP 3, before the first frame
MORE, LONG, COMMAND = 1, 2, 4  # the flags of a ZMTP frame
LOOK_SECONDS = 1.0  # between two looks at a connection that waits
RETRY_SECONDS = 0.05  # while no coordinator listens
PATIENCE_SECONDS = 120.0  # the longest wait of an action


@dataclass
class Seen:
    """A message before it is passed on. An action may change it, drop it, or drop everything that follows."""

    direction: str
    message: m.Message
    payload: bytes
    dropped: bool = False
    last: bool = False  # everything after it on this connection and in this direction is dropped


Action = Callable[[Seen], None]
Test = Callable[[m.Message], bool]


class Rule(NamedTuple):
    """An action for a message that passes a test. `fired` is set once it was done."""

    direction: str
    test: Test
    action: Action
    once: bool
    fired: threading.Event


@dataclass
class Proxy:
    """A proxy between one node and the coordinator's control port `target` (the data port is the next one)."""

    target: int
    ports: dict[str, int] = field(default_factory=dict)
    journal: list[tuple[str, m.Message]] = field(default_factory=list)  # all messages seen, in order
    errors: list[BaseException] = field(default_factory=list)  # of the actions
    _online: threading.Event = field(default_factory=threading.Event)
    _rules: list[Rule] = field(default_factory=list)
    _listeners: list[socket.socket] = field(default_factory=list)
    _pipes: list[socket.socket] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closed: bool = False

    def start(self) -> "Proxy":
        """Listens, and passes everything."""
        self._online.set()
        for channel, port in ((CONTROL, self.target), (DATA, self.target + 1)):
            listener = socket.create_server((HOST, 0))
            self._listeners.append(listener)
            self.ports[channel] = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener, port), daemon=True).start()
        return self

    # ---- for the test

    def when(self, direction: str, test: Test, action: Action = lambda seen: None, *, once: bool = True) -> Rule:
        """Acts at the first such message (or at each); `fired` of the returned rule says that it happened."""
        rule = Rule(direction, test, action, once, threading.Event())
        with self._lock:
            self._rules.append(rule)
        return rule

    def saw(self, direction: str, kind: type[M]) -> list[M]:
        """All messages of a type that went in a direction so far, in order."""
        return [message for way, message in list(self.journal) if way == direction and isinstance(message, kind)]

    def forget(self) -> None:
        """Drops all rules and everything seen, and puts the node online."""
        with self._lock:
            self._rules.clear()
        self.journal.clear()
        self.errors.clear()
        self.online()

    @property
    def is_online(self) -> bool:
        """True while connections are passed on."""
        return self._online.is_set()

    def offline(self) -> None:
        """Closes every connection; new ones wait."""
        self._online.clear()
        self.cut()

    def online(self) -> None:
        """Lets waiting connections through."""
        self._online.set()

    def cut(self) -> None:
        """Closes every connection; new ones are passed on."""
        with self._lock:
            pipes, self._pipes = self._pipes, []
        for pipe in pipes:
            _end(pipe)

    def close(self) -> None:
        """Ends the proxy."""
        self._closed = True
        self._online.set()
        for listener in self._listeners:
            _end(listener)
        self.cut()

    # ---- passing messages on

    def _accept(self, listener: socket.socket, port: int) -> None:
        while True:
            try:
                node, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(node, port), daemon=True).start()

    def _connect(self, node: socket.socket, port: int) -> None:
        """Connects a waiting node to the coordinator, which may not run yet."""
        coordinator = None
        while coordinator is None:
            online = self._online.wait(LOOK_SECONDS)
            if self._closed or _hung_up(node):  # an offline node tries again and again: none is kept for long
                node.close()
                return
            if not online:
                continue
            try:
                coordinator = socket.create_connection((HOST, port))
            except OSError:
                time.sleep(RETRY_SECONDS)
        with self._lock:
            self._pipes += [node, coordinator]
        for source, target, direction in ((node, coordinator, UP), (coordinator, node, DOWN)):
            threading.Thread(target=self._pass, args=(source, target, direction), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, direction: str) -> None:
        try:
            left = GREETING_BYTES
            while left and (chunk := source.recv(left)):
                target.sendall(chunk)
                left -= len(chunk)
            with source.makefile("rb") as stream:
                self._pass_frames(stream, target, direction)
        except (OSError, EOFError):
            pass
        _end(source)
        _end(target)

    def _pass_frames(self, stream: BinaryIO, target: socket.socket, direction: str) -> None:
        frames: list[bytes] = []
        swallow = False
        while True:
            flags, body = _read_frame(stream)
            if flags & COMMAND:
                target.sendall(_frame(flags, body))
                continue
            frames.append(body)
            if flags & MORE:
                continue
            if not swallow:
                out, swallow = self._look(direction, frames)
                target.sendall(b"".join(_frame(MORE if i < len(out) - 1 else 0, bytes(f)) for i, f in enumerate(out)))
            frames = []

    def _look(self, direction: str, frames: list[bytes]) -> tuple[list[Buffer], bool]:
        """Returns what to pass on of a message, and true if everything after it is dropped."""
        try:
            message, payload = decode(frames)
        except WireError:
            return list(frames), False
        if isinstance(message, m.Accept):
            message = msgspec.structs.replace(message, data_port=self.ports[DATA])
        seen = Seen(direction, message, bytes(payload))
        self.journal.append((direction, message))
        with self._lock:
            due = [rule for rule in self._rules if rule.direction == direction and rule.test(message)]
            self._rules = [rule for rule in self._rules if not (rule.once and rule in due)]
        for rule in due:
            try:
                rule.action(seen)
            except BaseException as error:  # the test reads it
                self.errors.append(error)
            rule.fired.set()
        return [] if seen.dropped else encode(seen.message, seen.payload), seen.last


def wait_for(event: threading.Event, what: str) -> None:
    """Holds a message back, in an action, until something else has happened."""
    assert event.wait(PATIENCE_SECONDS), f"waited {PATIENCE_SECONDS:.0f} s for {what}"


def _read_frame(stream: BinaryIO) -> tuple[int, bytes]:
    flags = _exactly(stream, 1)[0]
    size = int.from_bytes(_exactly(stream, 8 if flags & LONG else 1), "big")
    return flags, _exactly(stream, size)


def _frame(flags: int, body: bytes) -> bytes:
    if len(body) > 255:
        return bytes([flags | LONG]) + len(body).to_bytes(8, "big") + body
    return bytes([flags & ~LONG, len(body)]) + body


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


def _hung_up(pipe: socket.socket) -> bool:
    """True if the other side has closed, whatever it has said before."""
    poll = select.poll()
    poll.register(pipe, getattr(select, "POLLRDHUP", 0))  # macOS tells it as POLLHUP, which is always looked for
    return bool(poll.poll(0))


def _end(pipe: socket.socket) -> None:
    with suppress(OSError):
        pipe.shutdown(socket.SHUT_RDWR)
    pipe.close()
