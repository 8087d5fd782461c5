"""The coordinator's two ports over ZeroMQ: the only file of the coordinator that uses it."""

import errno
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq
from zmq.auth import Authenticator
from zmq.utils.monitor import recv_monitor_message

from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.connections import received_bytes, shut, source_of
from mlxdist.coordinator.fleet.doorway import LOOK_SECONDS, Doorway
from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.transport import CONTROL, DATA, REVOKED, Parcel, Refusal
from mlxdist.protocol.wire import Frames

BATCH = 256  # messages taken from a port before the other one is looked at, …
BATCH_BYTES = 8 << 20  # … or about so many bytes
MOST_EVENTS = 128  # of connections, noted before messages are taken again: a flood of them must not keep messages out
MOST_QUEUED = 16  # messages that wait of one peer; then TCP makes it wait
MOST_FRAMES = 3  # of a message of ours
MOST_FRAME = 2 << 20  # bytes: no message to the coordinator has a longer frame; blocks have 1 MiB

# A node that vanished leaves a connection that is open at this end only. One with nothing under way is
# found by the keepalive, one with unacknowledged blocks by the retry limit (Linux; macOS gives up by itself, later).
HANDSHAKE_SECONDS = 10
RETRY_SECONDS = 60
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}

BACKLOG = 512  # connections that the system keeps until they are accepted: one that is lost comes again 1 s later
MOST_IO_THREADS = 4  # encryption is done in them, at 0.2 GB/s and more in each
DOMAIN = "mlxdist"
WATCHED = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
FAILURES: dict[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "its key is not known here",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it made no handshake in time",
}
PROTOCOL_FAILURES: dict[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "it does not encrypt as this run does",
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it expects a coordinator with another key",
}


class _KeyCheck(Authenticator):
    """Asks the list of a run for every key that wants to connect; the key stands on each message afterwards."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", access: Access) -> None:
        super().__init__(context)
        self.access = access
        self.configure_curve_callback(DOMAIN, self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Returns True for the key, in Z85, of a node that may connect."""
        return self.access.name_of(zmq.utils.z85.decode(key).hex()) is not None

    def curve_user_id(self, client_public_key: bytes) -> str:
        """Returns the name of a key on its messages: the key itself, since a name may get another one."""
        return client_public_key.hex()

    def answer(self) -> None:
        """Answers the questions of connections that wait."""
        self.access.refresh()
        while self.zap_socket.poll(0):
            with suppress(StopIteration):  # a coroutine that waits for nothing, so it needs no event loop
                self.handle_zap_message(self.zap_socket.recv_multipart()).send(None)


class RouterHub:
    """A Hub over two ROUTER sockets. One thread receives and sends; `wake` may be called from any."""

    def __init__(
        self,
        addresses: Sequence[str],
        port: int,
        access: Access | None = None,
        *,
        io_threads: int = 0,
        handshake_seconds: int = HANDSHAKE_SECONDS,
    ) -> None:
        """Binds control to `port` and data to `port + 1` of all addresses; 0 picks both. "*" is every address.

        With `access` every connection is encrypted, and only its keys are let in. `io_threads`: 0 = a quarter of the
        cores where connections are encrypted, else one.

        Raises ConfigError for a port in use, or an address that is not this machine's.
        """
        quarter = (os.cpu_count() or 1) // 4
        self._context = zmq.Context(io_threads or (max(1, min(quarter, MOST_IO_THREADS)) if access is not None else 1))
        self._check = _KeyCheck(self._context, access) if access is not None else None
        if self._check is not None:
            self._check.start()  # before any port is open: without it libzmq lets every key in
        self._access, self._doorway = access, Doorway()
        self._sockets = {
            CONTROL: self._router(handshake_seconds, handover=True),
            DATA: self._router(handshake_seconds, handover=False),
        }
        self._monitors = {channel: self._monitor(channel) for channel in self._sockets}
        self.ports: dict[str, int] = {}
        for offset, channel in enumerate(self._sockets):
            self.ports[channel] = self._bind(channel, addresses, port + offset if port else 0)
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._poller = zmq.Poller()
        for each in (*self._sockets.values(), *self._monitors.values(), self._woken):
            self._poller.register(each, zmq.POLLIN)
        if self._check is not None:
            self._poller.register(self._check.zap_socket, zmq.POLLIN)

    def _router(self, handshake_seconds: int, *, handover: bool) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A supervisor that comes back after a half-open connection must not be refused for its own name. On the data
        # port no connection takes the name of another: a worker that comes back gets a new session and name.
        router.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
        router.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME)
        router.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.setsockopt(zmq.HANDSHAKE_IVL, handshake_seconds * 1000)
        router.setsockopt(zmq.TCP_MAXRT, RETRY_SECONDS * 1000)
        for option, value in KEEPALIVE.items():
            router.setsockopt(option, value)
        # Credits bound what is under way, so a high-water mark would only lose small messages.
        router.setsockopt(zmq.SNDHWM, 0)
        if self._access is not None:
            router.setsockopt(zmq.CURVE_SERVER, 1)
            router.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(self._access.server.secret))
            router.setsockopt_string(zmq.ZAP_DOMAIN, DOMAIN)
        return router

    def _monitor(self, channel: str) -> "zmq.Socket[bytes]":
        """Returns the socket that tells of the connections of a channel."""
        place = f"inproc://monitor-{channel}"
        self._sockets[channel].monitor(place, WATCHED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.RCVHWM, 0)  # with a limit, a flood of connections would stop libzmq's thread
        monitor.connect(place)
        return monitor

    def _bind(self, channel: str, addresses: Sequence[str], port: int) -> int:
        """Binds a channel on all addresses. Returns its port. Raises ConfigError."""
        router = self._sockets[channel]
        for address in addresses:
            router.setsockopt(zmq.IPV6, int(address == "*" or ":" in address))
            place = f"[{address}]" if ":" in address else address
            try:
                if port:
                    router.bind(f"tcp://{place}:{port}")
                else:
                    port = int(router.bind_to_random_port(f"tcp://{place}"))
            except zmq.ZMQError as error:
                self._close_sockets()
                if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    raise ConfigError(
                        f"coordinator.bind: {address} is not an address of this machine: take one that "
                        "`ifconfig` (macOS) or `ip address` (Linux) shows"
                    ) from error
                raise ConfigError(
                    f"coordinator.port: {place}:{port} cannot be bound ({error.strerror}); "
                    "another run may be using it: take another port, or 0 for any"
                ) from error
        return port

    def receive(self, timeout: float) -> list[Parcel]:
        """The parcels that have arrived on either port, after up to `timeout` seconds of waiting for the first."""
        timeout = min(timeout, LOOK_SECONDS) if self._doorway.waiting else timeout
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._woken.fileno() in ready:
            try:
                while self._woken.recv(4096):
                    pass
            except BlockingIOError:
                pass
        if self._check is not None:
            self._check.answer()
        for monitor in self._monitors.values():
            if monitor in ready:
                self._watch(monitor)
        for greedy in self._doorway.too_much(received_bytes, time.monotonic()):
            shut(*greedy)
        arrived: list[Parcel] = []
        for channel, router in self._sockets.items():
            if router not in ready:
                continue
            taken = 0
            for _ in range(BATCH):
                try:
                    peer, frames, owner, number = _receive(router)
                except zmq.Again:
                    break
                if self._access is not None:
                    owner = self._access.name_of(owner) or ""
                    if not owner:  # its key was taken off the list
                        arrived.append(Parcel(channel, peer, [], REVOKED))
                        continue
                if len(frames) > MOST_FRAMES:
                    self._doorway.refused(end := source_of(number), f"a message of over {MOST_FRAMES} frames")
                    shut(number, end)
                number = number if number in self._doorway.waiting else -1
                arrived.append(Parcel(channel, peer, frames, owner, number))
                taken += sum(map(len, frames))
                if taken > BATCH_BYTES:
                    break
        return arrived

    def _watch(self, monitor: "zmq.Socket[bytes]") -> None:
        """Notes connections that come and go, up to MOST_EVENTS: the next `receive` looks at once for more."""
        for _ in range(MOST_EVENTS):
            if not monitor.poll(0):
                return
            told = recv_monitor_message(monitor)
            match told["event"]:
                case zmq.EVENT_ACCEPTED:
                    crowded = self._doorway.accepted(told["value"], source_of(told["value"]))
                    if crowded is not None:
                        shut(*crowded)
                case zmq.EVENT_DISCONNECTED:
                    self._doorway.closed(told["value"])
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._doorway.failed(PROTOCOL_FAILURES.get(told["value"], "it speaks another protocol"))
                case failure:
                    self._doorway.failed(FAILURES.get(failure, ""))

    def admitted(self, waiting: int) -> None:
        """Notes that the node of a connection is known; `waiting` is the number in its parcel."""
        self._doorway.admitted(waiting)

    def take_refusals(self) -> list[Refusal]:
        """Returns the connections that were refused since the last call."""
        return self._doorway.take_refusals()

    def send(self, parcel: Parcel) -> bool:
        """Hands the frames to ZeroMQ; False when the peer is not connected."""
        router = self._sockets[parcel.channel]
        try:
            router.send(parcel.peer, zmq.SNDMORE | zmq.NOBLOCK)
            router.send_multipart(parcel.frames, zmq.NOBLOCK, copy=len(parcel.frames[-1]) < 65536)
        except (zmq.Again, zmq.ZMQError):
            return False
        return True

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""
        with suppress(OSError):  # a full pipe wakes it already; a closed one has no thread to wake
            self._wake_up.send(b"!")

    def close(self) -> None:
        """Closes both ports; unsent messages are dropped."""
        self._close_sockets()
        self._wake_up.close()
        self._woken.close()

    def _close_sockets(self) -> None:
        for channel, router in self._sockets.items():
            router.disable_monitor()
            self._monitors[channel].close(0)
            router.close(0)
        if self._check is not None:
            self._check.stop()
        self._context.term()


def _receive(router: "zmq.Socket[bytes]") -> tuple[bytes, Frames, str, int]:
    """One message: its peer, its frames, the key that opened its connection, the number of that connection.

    Of more frames than a message of ours has, one more is kept as a sign of it, and the rest dropped one by one.
    """
    frames: list[memoryview] = []
    frame = router.recv(zmq.NOBLOCK, copy=False)
    peer, key, number = frame.bytes, "", -1
    while frame.more:
        frame = router.recv(zmq.NOBLOCK, copy=False)
        if not frames:
            key, number = _user(frame), _connection(frame)
        if len(frames) <= MOST_FRAMES:
            frames.append(frame.buffer)
    return peer, frames, key, number


def _user(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:  # the connection is not encrypted
        return ""


def _connection(frame: zmq.Frame) -> int:
    """The number of the connection; -1 for a peer that libzmq takes for one of the first ZeroMQ, such as TLS."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1
