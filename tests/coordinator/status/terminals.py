"""Programs on a terminal: a pseudo-terminal whose bytes are read, and tmux, whose screen is."""

import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SECONDS = 60.0  # of waiting for something to appear, on a machine with much else to do


def command(*words: str) -> list[str]:
    """Returns the words that run an mlxdist command from this folder."""
    return [sys.executable, "-m", "mlxdist", *words]


def environment(**more: str) -> dict[str, str]:
    """Returns this environment without what a terminal sets in it."""
    kept = {name: value for name, value in os.environ.items() if name not in ("TERM", "NO_COLOR", "COLUMNS", "LINES")}
    return {**kept, "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8", **more}


@dataclass
class Terminal:
    """A program on a pseudo-terminal."""

    process: "subprocess.Popen[bytes]"
    master: int
    read: bytearray = field(default_factory=bytearray)

    def until(self, pattern: str) -> str:
        """Returns what was printed up to the first match, from behind the one before. Raises AssertionError."""
        sought = re.compile(pattern.encode(), re.DOTALL)
        while (found := sought.search(self.read)) is None:
            if not select.select([self.master], [], [], SECONDS)[0]:
                raise AssertionError(f"no {pattern!r} in {bytes(self.read)!r}")
            try:
                self.read += os.read(self.master, 65536)
            except OSError as error:  # Linux says so that the program has closed it
                raise AssertionError(f"no {pattern!r} in {bytes(self.read)!r}") from error
        seen = bytes(self.read[: found.end()])
        del self.read[: found.end()]
        return seen.decode(errors="replace")

    def rest(self) -> str:
        """Returns what else was printed until the program has ended."""
        while True:
            try:
                data = os.read(self.master, 65536)
            except OSError:
                data = b""
            if not data:
                self.process.wait()
                return bytes(self.read).decode(errors="replace")
            self.read += data

    def resize(self, width: int, height: int) -> None:
        """Changes the size, of which the system tells the program by SIGWINCH."""
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def interrupt(self) -> None:
        """Types Ctrl-C."""
        os.write(self.master, b"\x03")


@contextmanager
def terminal(words: Sequence[str], environ: Mapping[str, str], width: int = 80, height: int = 24) -> Iterator[Terminal]:
    """A program on a terminal of its own, which ends with the block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def own_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True, preexec_fn=own_terminal
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        os.close(master)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Tmux:
    """One window of a tmux server of its own."""

    socket: str

    def do(self, *words: str) -> str:
        """Runs a command of tmux and returns what it prints."""
        done = subprocess.run(
            [tmux_path(), "-L", self.socket, "-f", "/dev/null", *words], capture_output=True, text=True, check=True
        )
        return done.stdout

    def screen(self) -> list[str]:
        """Returns the lines of the screen as a person sees them, without the empty ones at its end."""
        return self.do("capture-pane", "-p").rstrip("\n").splitlines()

    def until(self, pattern: str) -> list[str]:
        """Returns the screen once a line of it matches; the test's time limit ends the waiting."""
        while True:
            screen = self.screen()
            if any(re.search(pattern, line) for line in screen):
                return screen
            time.sleep(0.1)  # between two looks

    def ended(self) -> list[str]:
        """Returns the screen once the program has ended; tmux may notice its end before it says so on the screen."""
        while self.do("list-panes", "-F", "#{pane_dead}").strip() != "1":
            time.sleep(0.1)  # between two looks
        return self.screen()


def tmux_path() -> str:
    """Returns where tmux is; "" where there is none."""
    return shutil.which("tmux") or ""


@contextmanager
def tmux(words: Sequence[str], environ: Mapping[str, str], width: int, height: int) -> Iterator[Tmux]:
    """A program in tmux, whose server ends with the block; the window stays when the program ends."""
    server = Tmux(f"mlxdist-{uuid.uuid4().hex[:12]}")
    start = [tmux_path(), "-L", server.socket, "-f", "/dev/null"]
    options = ["set-option", "-g", "remain-on-exit", "on", ";", "set-option", "-g", "status", "off", ";"]
    window = ["new-session", "-d", "-x", str(width), "-y", str(height), *words]
    subprocess.run([*start, "start-server", ";", *options, *window], env=environ, check=True)
    try:
        yield server
    finally:
        server.do("kill-server")
