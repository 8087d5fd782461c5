"""Commands that people type on Macs in network namespaces: with a terminal or without, and what each one prints."""

import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.config.hosts import local_hosts
from mlxdist.coordinator.run import run
from tests.faults.fault_runs import config_of, sha
from tests.faults.namespaces import OfficeNodes

WAIT = 120.0  # for a text that a command prints
CTRL_C = "\x03"


@dataclass
class Typed:
    """A command that was typed on a Mac, and what it prints. `terminal`: our end of its terminal, if it has one."""

    process: "subprocess.Popen[bytes]"
    terminal: int | None = None
    _printed: bytes = b""
    _news: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        stream = self.process.stdout.fileno() if self.process.stdout is not None else self.terminal
        assert stream is not None
        with suppress(OSError):  # the other end of a terminal is closed
            while more := os.read(stream, 65536):
                with self._news:
                    self._printed += more
                    self._news.notify_all()

    @property
    def said(self) -> str:
        """All that it has printed so far."""
        return self._printed.decode(errors="replace")

    def until(self, pattern: str, times: int = 1) -> re.Match[str]:
        """Waits until the pattern is found so many times in what it prints, and returns the last one of these."""

        def enough() -> bool:
            return len(found()) >= times or not self._reader.is_alive()

        def found() -> list[re.Match[str]]:
            return list(re.finditer(pattern, self.said))

        with self._news:
            while not enough() and self._news.wait(WAIT):
                pass
        matches = found()
        assert len(matches) >= times, f"{pattern!r} was not printed {times} times:\n{self.said}"
        return matches[times - 1]

    def press(self, keys: str) -> None:
        """Presses keys at its terminal."""
        assert self.terminal is not None
        os.write(self.terminal, keys.encode())

    def ends(self) -> int:
        """Waits for its end, and returns the exit code."""
        code = self.process.wait(WAIT)
        self._reader.join(WAIT)
        return code

    def close(self) -> None:
        """Ends it, and everything that it has started."""
        self.process.terminate()
        self.process.wait()
        self._reader.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self.terminal is not None:
            os.close(self.terminal)


@dataclass
class Desk:
    """The commands of one test, ended after it."""

    macs: OfficeNodes
    folder: Path
    model: Path
    typed: list[Typed] = field(default_factory=list)

    def type(
        self,
        where: str,
        *words: str,
        code: str = "",
        terminal: bool = False,
        under: Sequence[str] = (),
        **environment: str,
    ) -> Typed:
        """Types a command on a Mac, with a code on its standard input, or at a terminal.

        `under`: a command that runs it; it must become the command that follows.
        """
        place = self.macs.office.node(where) if where != "coordinator" else self.macs.office.coordinator
        command = [shutil.which("ip") or "ip", "netns", "exec", place, *under, sys.executable, "-m", "mlxdist", *words]
        # Namespaces of the network share the sockets of this machine's daemons: without the second, no avahi is there.
        alone = {"MLXDIST_PLAIN": "1", "DBUS_SYSTEM_BUS_ADDRESS": "unix:path=/nonexistent"}
        env = {**self.macs.environment(where), **alone, **environment}
        self.typed.append(_at_a_terminal(command, env) if terminal else _with_input(command, env, code))
        return self.typed[-1]

    def launch(
        self, *words: str, where: str = "coordinator", name: str = "run", steps: int = 6, **environment: str
    ) -> Typed:
        """Types `mlxdist launch` on a Mac. The run is in a folder of this name."""
        config = config_of(self.model, self.folder / name, "sft", steps=steps)
        lines = [
            f'model = "{config.model}"\noutput = "{name}"\ndata = "{config.data.path}"',
            f'[batch]\nsize = {config.batch.size}\norder = "{config.batch.order}"',
            f"[lora]\nrank = 4\n[train]\nsteps = {steps}\nlearning_rate = 1e-2\neval_every = 0\nsave_every = 1",
        ]
        (self.folder / f"{name}.toml").write_text("\n".join(lines))
        return self.type(where, "launch", str(self.folder / f"{name}.toml"), *words, **environment)

    def hosts(self, min_nodes: int) -> str:
        """Returns a hosts.toml without nodes of its own: all join, and the run waits for so many."""
        path = self.folder / "hosts.toml"
        path.write_text(f"nodes = []\n[coordinator]\nmin_nodes = {min_nodes}\n")
        return str(path)

    def one_machine(self, steps: int = 6) -> str:
        """Returns the SHA-256 of the adapter of the same run on one machine."""
        config = config_of(self.model, self.folder / "alone", "sft", steps=steps)
        assert run(config, local_hosts(1), resume=False, environ={"MLXDIST_PLAIN": "1"}) == 0
        return sha(self.folder / "alone")

    def end(self) -> None:
        """Ends all commands."""
        for typed in self.typed:
            typed.close()


def code_of(launch: Typed) -> str:
    """Returns the code that a launch shows, as soon as it does."""
    return launch.until(r"it asks for a code: (\d{4}-\d{4}), for 5 minutes")[1]


def _with_input(command: list[str], environment: dict[str, str], code: str) -> Typed:
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT)
    assert process.stdin is not None
    process.stdin.write(f"{code}\n".encode())
    process.stdin.close()
    return Typed(process)


def _at_a_terminal(command: list[str], environment: dict[str, str]) -> Typed:
    """Starts a command as the one in the foreground of a new terminal, so that its Ctrl-C reaches all its processes."""
    ours, its = pty.openpty()
    command = ["setsid", "--ctty", *command]  # which becomes the command
    process = subprocess.Popen(command, env=environment, stdin=its, stdout=its, stderr=its)
    os.close(its)
    return Typed(process, ours)
