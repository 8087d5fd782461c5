"""Starts and ends the nodes on this machine: one supervisor process each, in a process group of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.config.hosts import NodeSpec
from mlxdist.coordinator.fleet.access import Access
from mlxdist.coordinator.fleet.macos import keep_awake
from mlxdist.keys.pair import keys_line
from mlxdist.protocol.backoff import Backoff
from mlxdist.protocol.errors import NodeError

TAIL_BYTES = 2000
TERM_SECONDS = 2.0  # from SIGTERM to SIGKILL


@dataclass(frozen=True)
class Ended:
    """A supervisor that has ended without being asked to; `final`: it is not started again."""

    name: str
    error: NodeError
    final: bool


@dataclass
class LocalNodes:
    """The supervisors that this coordinator has started, and starts again when they are killed."""

    logs: Path
    stop_seconds: float
    restart_seconds: float
    clock: Callable[[], float] = time.monotonic
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _nodes: dict[str, NodeSpec] = field(default_factory=dict)
    _place: str = ""  # HOST:PORT that they connect to
    _lines: dict[str, bytes] = field(default_factory=dict)  # with the keys of each, for its standard input
    _backoff: dict[str, Backoff] = field(default_factory=dict)
    _due: dict[str, float] = field(default_factory=dict)  # when a supervisor that ended is started again

    def start(
        self, nodes: Sequence[NodeSpec], port: int, address: str = "127.0.0.1", access: Access | None = None
    ) -> None:
        """Starts a supervisor for each node, with keys of its own where there is `access`.

        It leaves when its standard input ends, so it cannot outlive us.
        """
        self._place = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        for node in nodes:
            self._nodes[node.name] = node
            self._lines[node.name] = keys_line(access.keys_for(node.name) if access is not None else None)
            self._backoff[node.name] = Backoff(self.restart_seconds)
            self._start(node)

    def _start(self, node: NodeSpec) -> None:
        with (self.logs / f"{node.name}.log").open("ab") as log:
            command = [sys.executable, "-m", "mlxdist", "node", "--launched", "--name", node.name]
            process = subprocess.Popen(
                [*(keep_awake() if node.caffeinate else []), *command, "--connect", self._place],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in the terminal is for the coordinator alone
            )
        self.processes[node.name] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, and `watch` says why
            process.stdin.write(self._lines[node.name])
            process.stdin.flush()

    def watch(self) -> list[Ended]:
        """The supervisors that have ended since the last look; one that was killed is started again after a while.

        One that left of itself (refused, or with too many workers that ended) has said why, and stays away.
        """
        now, ended = self.clock(), []
        for name, process in list(self.processes.items()):
            code = process.poll()
            if code is None:
                continue
            del self.processes[name]
            if process.stdin is not None:
                process.stdin.close()
            signal_group(process.pid, signal.SIGKILL)
            wait = self._backoff[name].next(now) if code < 0 else None
            if wait is not None:
                self._due[name] = now + wait
            ended.append(Ended(name, self._error(name, code), wait is None))
        for name in [name for name, due in self._due.items() if now >= due]:
            del self._due[name]
            self._start(self._nodes[name])
        return ended

    def _error(self, name: str, code: int) -> NodeError:
        log = self.logs / f"{name}.log"
        with log.open("rb") as stream:
            stream.seek(max(stream.seek(0, 2) - TAIL_BYTES, 0))
            tail = stream.read().decode(errors="replace").strip().splitlines()[-20:]
        lines = "\n".join(f"  | {line}" for line in tail)
        return NodeError(f"{name}: its supervisor ended with exit code {code}; the end of {log}:\n{lines}")

    def stop(self) -> None:
        """Waits `stop_seconds` for every process to end after the goodbye; then SIGTERM, a moment later SIGKILL."""
        self._due.clear()
        for process in self.processes.values():
            if process.stdin is not None:
                process.stdin.close()
        patient_until = time.monotonic() + self.stop_seconds
        for send, until in ((signal.SIGTERM, patient_until), (signal.SIGKILL, patient_until + TERM_SECONDS)):
            for process in self.processes.values():
                if not ends(process, until):
                    signal_group(process.pid, send)
        for process in self.processes.values():
            process.wait()
            signal_group(process.pid, signal.SIGKILL)  # whatever of the group outlived its leader
        self.processes.clear()


def ends(process: "subprocess.Popen[bytes]", until: float) -> bool:
    """True if the process ends before the monotonic time `until`."""
    try:
        process.wait(max(until - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        return False
    return True


def signal_group(group: int, number: signal.Signals) -> None:
    """Signals a process group of ours that may be gone."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
