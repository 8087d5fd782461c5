"""The port at which other Macs exchange keys with a run: plain TCP, in a thread of its own, open while a code lives.

Strangers reach it, so all is limited: bytes and seconds of a connection, connections in all and of an address. Only an
exchange that takes a try computes anything, and a code has few of them.
"""

import asyncio
import errno
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime

from mlxdist.coordinator.config.hosts import listening_address
from mlxdist.coordinator.fleet.connections import plain_address
from mlxdist.keys.exchange import LENGTH_BYTES, CoordinatorsSide, Refused, framed, length_of, packed
from mlxdist.keys.invitation import Invitation
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import ConfigError, MismatchError, UserError, WireError

OFFSET = 2  # from the control port; data has the one between
CONNECTION_SECONDS = 10.0  # for a whole exchange
MOST_CONNECTIONS = 64
MOST_OF_ADDRESS = 4
LOOK_SECONDS = 0.2  # between looks at the clock


@dataclass(frozen=True)
class Joinable:
    """A run as a Mac with the code learns it, and the place where that Mac is noted."""

    public: str  # the key of its ports
    port: int  # control
    store: KeyStore
    taken: Collection[str] = ()  # names that a Mac cannot get: those of nodes that the run starts


class InvitationPort:
    """One invitation, from `open` until its code has ended or `close`."""

    def __init__(
        self,
        invitation: Invitation,
        run: Joinable,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`tell` takes a sentence for the person, in the thread of the port."""
        self._invitation, self._run, self._tell, self._clock = invitation, run, tell, clock
        self._open = Counter[str]()  # connections by address
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, bind: str) -> None:
        """Opens the port on the addresses that `bind` stands for. Raises ConfigError where it is in use."""
        port = self._run.port + OFFSET
        try:
            listener = listen(listening_address(bind), port)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            cure = "an invitation is open already, or coordinator.port should be another one" if taken else "look at it"
            raise ConfigError(f"port {port}, for the exchange of keys, cannot be opened ({error.strerror}): {cure}") from error
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(listener)), name="invitation", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits until the code has ended."""
        assert self._thread is not None
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)  # in pieces, so that Ctrl-C is heard

    def close(self) -> None:
        """Ends the invitation, and closes the port."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    async def _serve(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(self._connected, sock=listener, limit=4096)
        async with server:
            while not self._closing.is_set() and (self._open or not self._invitation.over(self._clock())):
                await asyncio.sleep(LOOK_SECONDS)
        if self._invitation.macs and (why := self._invitation.over(self._clock())):
            self._tell(f"the code for other Macs has ended: {why}. `--invite` with the same command gives another one")

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = plain_address(writer.get_extra_info("peername")[0])
        if self._open[address] >= MOST_OF_ADDRESS or self._open.total() >= MOST_CONNECTIONS:
            writer.transport.abort()
            return
        self._open[address] += 1
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                await self._exchange(reader, writer, address)
                await writer.drain()
        except (WireError, asyncio.IncompleteReadError, TimeoutError, OSError):
            pass  # a stranger, or one that is gone; a try that it took is spent, and told
        finally:
            writer.close()
            self._open[address] -= 1
            self._open += Counter()  # drops addresses without connections

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        hello = await _receive(reader)
        if not self._invitation.begin(self._clock()):
            _send(writer, packed(Refused(f"the code has ended: {self._invitation.over(self._clock())}")))
            return
        right = False
        try:
            side = CoordinatorsSide(self._invitation.code, self._run.public, self._run.port, hello)
            _send(writer, side.answer)
            side.check(await _receive(reader))
            right = self._invitation.joined(self._clock())
            if not right:
                raise MismatchError(f"the code has ended: {self._invitation.over(self._clock())}")
            name = self._run.store.welcome(
                side.hello.name, side.hello.public, taken=self._run.taken, now=datetime.now(UTC)
            )
            _send(writer, side.granted(name))
            self._tell(f"{name}: joins from {address} by the code; its key is known from now on (mlxdist nodes)")
        except (MismatchError, UserError) as error:
            _send(writer, packed(Refused(str(error)[:500])))
        finally:
            if not right:
                left = self._invitation.tries
                self._tell(f"{address} tried to join without the right code; {left} more such tries end it" if left else
                           f"{address} tried to join without the right code")


def listen(address: str, port: int) -> socket.socket:
    """Returns a socket that listens; "*" and "::" are every address of both families. Raises OSError."""
    if address in ("*", "::") and socket.has_dualstack_ipv6():
        return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server(("" if address == "*" else address, port), family=family)


async def _receive(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(length_of(await reader.readexactly(LENGTH_BYTES)))


def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    writer.write(framed(message))
