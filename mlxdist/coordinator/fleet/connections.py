"""The system's own view of a connection, by its file descriptor: the other end, and an end by force."""

import ipaddress
import os
import socket
from contextlib import suppress
from struct import Struct
from typing import NamedTuple

from mlxdist.macos import RECEIVED_OF_CONNECTION

RECEIVED = Struct("@Q")


class Source(NamedTuple):
    """The other end of a connection, as the system names it."""

    address: str
    port: int


GONE = Source("an address that was gone at once", 0)


def source_of(descriptor: int) -> Source:
    """Returns the other end of a connection; GONE where it has ended already, or is no TCP connection."""
    try:
        with _copy(descriptor) as end:
            address, port = end.getpeername()[:2]
    except (OSError, ValueError):
        return GONE
    return Source(plain_address(address), int(port))


def shut(descriptor: int, source: Source) -> None:
    """Ends a connection that belongs to a library, which then notices and frees it.

    The number may have been given to another file by now: one with another end is left alone.
    """
    if source != GONE and source_of(descriptor) == source:
        with suppress(OSError), _copy(descriptor) as end:
            end.shutdown(socket.SHUT_RDWR)


def received_bytes(descriptor: int) -> int:
    """Returns how many bytes have come in over a connection; 0 where the system does not say."""
    level, option, place = RECEIVED_OF_CONNECTION
    try:
        with _copy(descriptor) as end:
            said = end.getsockopt(level, option, place + RECEIVED.size)
    except (OSError, ValueError):
        return 0
    return int(RECEIVED.unpack_from(said, place)[0]) if len(said) == place + RECEIVED.size else 0


def _copy(descriptor: int) -> socket.socket:
    """Returns the socket with a descriptor of its own. Raises OSError for a file that is no socket (any more)."""
    copy = os.dup(descriptor)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def plain_address(text: str) -> str:
    """Returns an IPv4 address as such, also from a port for both families, which shows it as ::ffff:192.0.2.1."""
    address = ipaddress.ip_address(text)
    return str(address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else text
