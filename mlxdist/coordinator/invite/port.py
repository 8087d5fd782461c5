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
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import msgspec

from mlxdist.coordinator.fleet.connections import plain_address
from mlxdist.keys.exchange import LENGTH_BYTES, OFFSET, CoordinatorsSide, Refused, asked, framed, length_of, packed
from mlxdist.keys.invitation import MOST_TRIES, Invitation
from mlxdist.keys.pair import PublicKey
from mlxdist.keys.store import KeyStore
from mlxdist.protocol.errors import ConfigError, MismatchError, SaveError, UserError, WireError
from mlxdist.protocol.limits import Port

CONNECTION_SECONDS = 10.0  # for a whole exchange
MOST_CONNECTIONS = 64
MOST_OF_ADDRESS = 4
LOOK_SECONDS = 0.2  # between looks at the clock
SEEN_SECONDS = 0.2  # after which a run has seen a change of its store: the Mac connects as soon as it is told


class Joinable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A run that other Macs can reach, as its state tells it while the run goes on."""

    public: PublicKey  # of its ports
    port: Port  # control
    addresses: tuple[str, ...]  # that it listens on
    names: tuple[str, ...] = ()  # of the nodes that it starts itself: no other Mac gets one of them


class InvitationPort:
    """One invitation, from `open` until its code has ended or `close`."""

    def __init__(
        self,
        invitation: Invitation,
        run: Joinable,
        store: KeyStore,
        tell: Callable[[str], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        seconds: float = CONNECTION_SECONDS,
    ) -> None:
        """`store`: where Macs that join are noted. `tell` takes a sentence for a person, in the thread of the port.

        `seconds`: for a whole exchange.
        """
        self._seconds = seconds
        self._invitation, self._run, self._store, self._tell, self._clock = invitation, run, store, tell, clock
        self._open = dict[asyncio.StreamWriter, str]()  # the connections, oldest first, with their addresses
        self._serving = 0  # connections, those included that were closed for others a moment ago
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Opens the port on the addresses of the run. Raises ConfigError where it is in use."""
        port, listeners = self._run.port + OFFSET, list[socket.socket]()
        try:
            for address in self._run.addresses:
                listeners.append(listen(address, port))
        except OSError as error:
            for listener in listeners:
                listener.close()
            busy = "an invitation to this run is open already" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(
                f"port {port}, where other Macs exchange keys, cannot be opened: {busy}; wait for its end, or set "
                "coordinator.port in hosts.toml to another one"
            ) from error
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(listeners)), name="invitation", daemon=True
        )
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

    async def _serve(self, listeners: Sequence[socket.socket]) -> None:
        servers = [await asyncio.start_server(self._connected, sock=each, limit=4096) for each in listeners]
        while not self._closing.is_set() and (self._open or not self._over()):
            await asyncio.sleep(LOOK_SECONDS)
        for server in servers:
            server.close()
        await asyncio.sleep(0)  # so that a connection that was just accepted is among the open ones
        for writer in self._open:
            writer.transport.abort()
        while self._serving:
            await asyncio.sleep(0.01)
        if self._invitation.macs and not self._closing.is_set():
            self._tell(
                f"the code for other Macs has ended: {self._over()}. The same command with --invite gives another"
            )

    def _over(self) -> str:
        return self._invitation.over(self._clock())

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = plain_address(writer.get_extra_info("peername")[0])
        self._open[writer] = address
        self._serving += 1
        self._close_oldest()
        try:
            async with asyncio.timeout(self._seconds):
                await self._exchange(reader, writer, address)
                await writer.drain()
        except (WireError, asyncio.IncompleteReadError, TimeoutError, OSError):
            pass  # a stranger, or one that is gone; a try that it took is spent, and told
        finally:
            writer.close()
            self._open.pop(writer, None)
            self._serving -= 1

    def _close_oldest(self) -> None:
        """Closes the oldest connection of the address that has most, where it has too many, or all have."""
        (crowd, number), *_ = Counter(self._open.values()).most_common(1)
        if number > MOST_OF_ADDRESS or len(self._open) > MOST_CONNECTIONS:
            oldest = next(writer for writer, address in self._open.items() if address == crowd)
            del self._open[oldest]
            oldest.transport.abort()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        hello, right = await _receive(reader), False
        try:
            wish = asked(hello)
            if not self._invitation.begin(self._clock()):
                raise MismatchError(f"the code has ended: {self._over() or 'others try it now'}")
            try:
                side = CoordinatorsSide(self._invitation.code, self._run.public, self._run.port, hello)
                _send(writer, side.answer)
                side.check(await _receive(reader))
                right = self._invitation.joined(self._clock())
            finally:
                if not right:
                    left = self._invitation.tries
                    self._tell(f"{address} tried to join without the right code: {left} of {MOST_TRIES} tries are left")
            if not right:
                raise MismatchError(f"the code has ended: {self._over()}")
            name = self._store.welcome(wish.name, wish.public, taken=self._run.names, now=datetime.now(UTC))
            await asyncio.sleep(SEEN_SECONDS)
            _send(writer, side.granted(name))
            self._tell(f"{name} joins from {address} by the code, and needs none the next time (mlxdist nodes)")
        except (MismatchError, UserError, SaveError) as error:
            _send(writer, packed(Refused(str(error)[:500])))


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
