"""A node's ends of the two connections, over ZeroMQ. The only file of `node` that imports zmq."""

import socket
from contextlib import suppress

import zmq

from mlxdist.protocol.wire import MAX_PAYLOAD, Frames

CONNECT_SECONDS = 3  # for one attempt; the system's own attempts come ever more rarely, up to a minute apart
HANDSHAKE_SECONDS = 10  # until a connection on which ZeroMQ's greeting was lost is opened again
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}


class DealerLink:
    """A Link over a DEALER socket. One thread receives and sends; `wake` may be called from any.

    ZeroMQ connects again by itself when a connection breaks; messages under way are lost without notice. With `probe`
    every new connection begins with an empty message, so that the other side knows, and `renew` takes a name of its
    own, because the other side gives no name of a probed connection to another one.
    """

    def __init__(self, endpoint: str, identity: bytes, *, probe: bool = False) -> None:
        self._context = zmq.Context()
        self._endpoint, self._identity, self._probe = endpoint, identity, probe
        self._renewals = 0
        self._socket = self._dealer()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_out, zmq.POLLIN)

    def _dealer(self) -> "zmq.Socket[bytes]":
        dealer = self._context.socket(zmq.DEALER)
        ending = f".{self._renewals}".encode() if self._probe else b""
        dealer.setsockopt(zmq.IDENTITY, self._identity + ending)
        dealer.setsockopt(zmq.LINGER, 0)
        # Otherwise a message for a coordinator that has ended waits, and reaches the next one.
        dealer.setsockopt(zmq.IMMEDIATE, 1)
        dealer.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD)
        dealer.setsockopt(zmq.RECONNECT_IVL, 100)
        dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        dealer.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_SECONDS * 1000)
        dealer.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_SECONDS * 1000)
        for option, value in KEEPALIVE.items():
            dealer.setsockopt(option, value)
        dealer.setsockopt(zmq.SNDHWM, 0)
        dealer.setsockopt(zmq.PROBE_ROUTER, int(self._probe))
        dealer.connect(self._endpoint)
        return dealer

    def receive(self, timeout: float) -> list[Frames]:
        """Returns the messages that have arrived, after waiting up to `timeout` seconds for the first."""
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._wake_out.fileno() in ready:
            _drain(self._wake_out)
        arrived: list[Frames] = []
        if self._socket in ready:
            while len(arrived) < 64:
                try:
                    arrived.append([frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)])
                except zmq.Again:
                    break
        return arrived

    def send(self, frames: Frames) -> bool:
        """Hands the frames to ZeroMQ. Returns False while there is no connection."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames[-1]) < 65536)
        except zmq.Again:
            return False
        return True

    def renew(self) -> None:
        """Replaces the connection by a new one: under the same name, or with `probe` under another."""
        self._renewals += 1
        self._poller.unregister(self._socket)
        self._socket.close(0)
        self._socket = self._dealer()
        self._poller.register(self._socket, zmq.POLLIN)

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""
        with suppress(OSError):  # a full pipe wakes it already; a closed one has no receiver left
            self._wake_in.send(b"!")

    def close(self) -> None:
        """Closes the socket; unsent messages are dropped."""
        self._poller.unregister(self._socket)
        self._socket.close(0)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()


def _drain(pipe: socket.socket) -> None:
    try:
        while pipe.recv(4096):
            pass
    except BlockingIOError:
        pass
