"""The coordinator's two ports over ZeroMQ: the only file of the coordinator that uses it."""

import socket
from contextlib import suppress

import zmq

from mlxdist.protocol.errors import ConfigError
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.wire import Frames

BATCH = 256  # messages taken from a port before the other one is looked at, …
BATCH_BYTES = 8 << 20  # … or about so many bytes
MOST_QUEUED = 16  # messages that wait of one peer; then TCP makes it wait
MOST_FRAME = 2 << 20  # bytes: no message to the coordinator has a longer frame; blocks have 1 MiB

# A node that vanished leaves a connection that is open at this end only. One with nothing under way is
# found by the keepalive, one with unacknowledged blocks by the retry limit (Linux; macOS gives up by itself, later).
HANDSHAKE_SECONDS = 10
RETRY_SECONDS = 60
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}


class RouterHub:
    """A Hub over two ROUTER sockets. One thread receives and sends; `wake` may be called from any."""

    def __init__(self, bind: str, port: int) -> None:
        """Binds control to `port` and data to `port + 1`; 0 picks both. Raises ConfigError for a port in use."""
        self._context = zmq.Context()
        self._sockets = {CONTROL: self._router(handover=True), DATA: self._router(handover=False)}
        self.ports: dict[str, int] = {}
        for offset, (channel, router) in enumerate(self._sockets.items()):
            try:
                if port == 0:
                    self.ports[channel] = int(router.bind_to_random_port(f"tcp://{bind}"))
                else:
                    router.bind(f"tcp://{bind}:{port + offset}")
                    self.ports[channel] = port + offset
            except zmq.ZMQError as error:
                self._context.destroy(0)
                raise ConfigError(
                    f"coordinator.port: {bind}:{port + offset} cannot be bound ({error.strerror}); "
                    "another run may be using it: take another port, or 0 for any"
                ) from error
        self._wake_up, self._woken = socket.socketpair()
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._poller = zmq.Poller()
        for router in self._sockets.values():
            self._poller.register(router, zmq.POLLIN)
        self._poller.register(self._woken, zmq.POLLIN)

    def _router(self, *, handover: bool) -> "zmq.Socket[bytes]":
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A supervisor that comes back after a half-open connection must not be refused for its own name. On the data
        # port no connection takes the name of another: a worker that comes back gets a new session and name.
        router.setsockopt(zmq.ROUTER_HANDOVER, int(handover))
        router.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME)
        router.setsockopt(zmq.RCVHWM, MOST_QUEUED)
        router.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
        router.setsockopt(zmq.TCP_MAXRT, RETRY_SECONDS * 1000)
        for option, value in KEEPALIVE.items():
            router.setsockopt(option, value)
        # Credits bound what is under way, so a high-water mark would only lose small messages.
        router.setsockopt(zmq.SNDHWM, 0)
        return router

    def receive(self, timeout: float) -> list[Parcel]:
        """The parcels that have arrived on either port, after up to `timeout` seconds of waiting for the first."""
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._woken.fileno() in ready:
            try:
                while self._woken.recv(4096):
                    pass
            except BlockingIOError:
                pass
        arrived: list[Parcel] = []
        for channel, router in self._sockets.items():
            if router not in ready:
                continue
            taken = 0
            for _ in range(BATCH):
                try:
                    peer, frames = _receive(router)
                except zmq.Again:
                    break
                arrived.append(Parcel(channel, peer, frames))
                taken += sum(map(len, frames))
                if taken > BATCH_BYTES:
                    break
        return arrived

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
        for router in self._sockets.values():
            self._poller.unregister(router)
            router.close(0)
        self._context.term()
        self._wake_up.close()
        self._woken.close()


def _receive(router: "zmq.Socket[bytes]") -> tuple[bytes, Frames]:
    """One message and its peer; of more frames than a message of ours has, the rest is dropped one by one."""
    frames: list[memoryview] = []
    frame = router.recv(zmq.NOBLOCK, copy=False)
    peer = frame.bytes
    while frame.more:
        frame = router.recv(zmq.NOBLOCK, copy=False)
        if len(frames) < 4:
            frames.append(frame.buffer)
    return peer, frames
