"""Everything that is asked of macOS itself, in one place; elsewhere each answer is empty, or Linux's."""

import socket
import sys

# The socket option that describes a TCP connection, and the place of the bytes received in the answer:
# struct tcp_connection_info of macOS, struct tcp_info of Linux.
RECEIVED_OF_CONNECTION = (socket.IPPROTO_TCP, 0x106, 88) if sys.platform == "darwin" else (socket.IPPROTO_TCP, 11, 128)


def keep_awake() -> list[str]:
    """The words before a command that keep a Mac from sleeping while it runs; none on other systems."""
    return ["/usr/bin/caffeinate", "-is"] if sys.platform == "darwin" else []
