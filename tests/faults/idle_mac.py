"""A Mac whose user is a terminal that a test owns: touching it is a change of the file's time of last access."""

import os
import platform
import pty
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

USER_PROCESS = 7
# utmp(5) on x86_64: type, pid, terminal, id, user, host, exit, session, time, address
RECORD = struct.Struct("h2xi32s4s32s256shhiii16s20x")
LONG_AGO = 3600.0  # seconds


def why_not() -> str:
    """The reason for which this machine cannot have such a user; empty when it can."""
    return "" if platform.machine() == "x86_64" else "the file of the users that are logged in has another form here"


@dataclass(frozen=True)
class IdleMac:
    """A user, logged in at a terminal. `under`: runs a command that sees this user alone, in mounts of its own."""

    terminal: str
    under: tuple[str, ...]

    def touch(self) -> None:
        """The user types something."""
        self._last_used(time.time())

    def rest(self) -> None:
        """The user went away an hour ago."""
        self._last_used(time.time() - LONG_AGO)

    def _last_used(self, when: float) -> None:
        os.utime(self.terminal, (when, when))


@contextmanager
def idle_mac(folder: Path) -> Iterator[IdleMac]:
    """Such a user, for a block; at first someone types."""
    ours, its = pty.openpty()
    try:
        terminal = os.ttyname(its)
        line = terminal.removeprefix("/dev/").encode()
        users = folder / "utmp"
        users.write_bytes(
            RECORD.pack(USER_PROCESS, os.getpid(), line, b"1", b"ada", b"", 0, 0, 0, int(time.time()), 0, b"")
        )
        script = f'mount -t tmpfs none /run && cp {users} /run/utmp && exec "$@"'
        mac = IdleMac(terminal, ("unshare", "--mount", "sh", "-c", script, "sh"))
        mac.touch()
        yield mac
    finally:
        os.close(ours)
        os.close(its)
