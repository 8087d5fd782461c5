"""A node's ends of the two connections, over ZeroMQ. The only file of `node` that imports zmq."""

import errno
import socket
import time
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from mlxdist.keys.pair import NodeKeys
from mlxdist.node.link.addresses import addresses, join_endpoint, split_endpoint
from mlxdist.protocol.transport import Trouble
from mlxdist.protocol.wire import MAX_PAYLOAD, Frames

CONNECT_SECONDS = 3  # for one attempt; the system's own attempts come ever more rarely, up to a minute apart
HANDSHAKE_SECONDS = 10  # until a connection on which ZeroMQ's greeting was lost is opened again
AGAIN_SECONDS = 2.0  # until a connection that was refused for good, as libzmq sees it, is tried again
CERTAIN = 3  # handshakes in a row that the other side ended, until that is no accident
LAST_WORD_MS = 500  # for messages that were sent just before the end, as that this node leaves
KEEPALIVE = {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 60, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}


WATCHED = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


class DealerLink:
    """A Link over a DEALER socket. One thread receives and sends; `wake` may be called from any.

    ZeroMQ connects again by itself when a connection breaks; messages under way are lost without notice. With `probe`
    every new connection begins with an empty message, so that the other side knows, and `renew` takes a name of its
    own, because the other side gives no name of a probed connection to another one. With `keys` the connection is
    encrypted, and made only to the coordinator that has the key in them.
    """

    def __init__(
        self,
        endpoint: str,
        identity: bytes,
        *,
        probe: bool = False,
        keys: NodeKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._context = zmq.Context()
        self._host, self._port = split_endpoint(endpoint)
        self._identity, self._probe, self._keys, self._clock = identity, probe, keys, clock
        self._places = [""]  # endpoints of the host's addresses; the first one is tried now
        self._renewals = 0
        self._trouble: Trouble | None = None
        self._ended = 0  # handshakes that the other side has ended, in a row
        self._again: float | None = None  # when a connection that was refused is tried again
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._poller = zmq.Poller()
        self._poller.register(self._wake_out, zmq.POLLIN)
        self._open()

    @property
    def trouble(self) -> Trouble | None:
        """Returns the reason for which the connection cannot be made, if there is one."""
        return self._trouble

    def _open(self) -> None:
        self._socket = self._dealer()
        self._monitor = self._socket.get_monitor_socket(WATCHED)
        self._places = [join_endpoint(address, self._port) for address in addresses(self._host)]
        self._socket.connect(self._places[0])
        for each in (self._socket, self._monitor):
            self._poller.register(each, zmq.POLLIN)

    def _close_socket(self, linger_ms: int = 0) -> None:
        for each in (self._socket, self._monitor):
            self._poller.unregister(each)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

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
        dealer.setsockopt(zmq.IPV6, 1)
        if self._keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, bytes.fromhex(self._keys.coordinator))
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, bytes.fromhex(self._keys.public))
            dealer.setsockopt(zmq.CURVE_SECRETKEY, bytes.fromhex(self._keys.secret))
        return dealer

    def receive(self, timeout: float) -> list[Frames]:
        """Returns the messages that have arrived, after waiting up to `timeout` seconds for the first."""
        ready = dict(self._poller.poll(int(timeout * 1000)))
        if self._wake_out.fileno() in ready:
            _drain(self._wake_out)
        if self._monitor in ready:
            self._watch()
        if self._again is not None and self._clock() >= self._again:
            self.renew()
            return []
        arrived: list[Frames] = []
        if self._socket in ready:
            while len(arrived) < 64:
                try:
                    arrived.append([frame.buffer for frame in self._socket.recv_multipart(zmq.NOBLOCK, copy=False)])
                except zmq.Again:
                    break
        return arrived

    def _watch(self) -> None:
        """Notes how attempts to connect end, and goes on to the next address of the host after one that failed."""
        while self._monitor.poll(0):
            told = recv_monitor_message(self._monitor)
            match told["event"]:
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._trouble, self._ended = None, 0
                case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self._refused(Trouble.KEY_REFUSED)
                case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
                    self._refused(Trouble.ENCRYPTION)
                case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
                    self._ended += told["value"] != errno.EAGAIN  # which is our own limit of time
                    if self._ended >= CERTAIN:
                        self._trouble = Trouble.ENDED
                case _ if len(self._places) > 1:
                    self._next_address()

    def _refused(self, trouble: Trouble) -> None:
        """Notes a refusal, after which libzmq does not connect again by itself."""
        self._trouble, self._again = trouble, self._clock() + AGAIN_SECONDS

    def _next_address(self) -> None:
        self._socket.disconnect(self._places[0])
        self._places.append(self._places.pop(0))
        self._socket.connect(self._places[0])

    def send(self, frames: Frames) -> bool:
        """Hands the frames to ZeroMQ. Returns False while there is no connection."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=len(frames[-1]) < 65536)
        except zmq.Again:
            return False
        return True

    def renew(self) -> None:
        """Replaces the connection by a new one: under the same name, or with `probe` under another."""
        self._again = None
        self._renewals += 1
        self._close_socket()
        self._open()

    def wake(self) -> None:
        """Ends a `receive` that waits in another thread."""
        with suppress(OSError):  # a full pipe wakes it already; a closed one has no receiver left
            self._wake_in.send(b"!")

    def close(self) -> None:
        """Closes the socket. What was sent last, as that this node leaves, has a moment to go out."""
        self._close_socket(LAST_WORD_MS)
        self._context.term()
        self._wake_in.close()
        self._wake_out.close()


def _drain(pipe: socket.socket) -> None:
    try:
        while pipe.recv(4096):
            pass
    except BlockingIOError:
        pass
