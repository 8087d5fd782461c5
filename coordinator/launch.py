"""Starting and ending the nodes on this machine: one supervisor process each, in a process group of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.hosts import NodeSpec
from mlxdist.coordinator.macos import keep_awake
from mlxdist.protocol.errors import NodeError

TAIL_BYTES = 2000
TERM_SECONDS = 2.0  # from SIGTERM to SIGKILL


@dataclass
class LocalNodes:
    """The supervisors that this coordinator has started."""

    logs: Path
    stop_seconds: float
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, nodes: Sequence[NodeSpec], port: int) -> None:
        """Start a supervisor for each node. It leaves when its standard input ends, so it cannot outlive us."""
        for node in nodes:
            with (self.logs / f"{node.name}.log").open("ab") as log:
                command = [sys.executable, "-m", "mlxdist", "node", "--launched", "--name", node.name]
                self.processes[node.name] = subprocess.Popen(
                    [*(keep_awake() if node.caffeinate else []), *command, "--connect", f"127.0.0.1:{port}"],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C in the terminal is for the coordinator alone
                )

    def failure(self) -> NodeError | None:
        """The first supervisor that has ended although nobody asked it to."""
        for name, process in self.processes.items():
            code = process.poll()
            if code is not None:
                log = self.logs / f"{name}.log"
                tail = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip().splitlines()[-20:]
                lines = "\n".join(f"  | {line}" for line in tail)
                return NodeError(f"{name}: its supervisor ended with exit code {code}; the end of {log}:\n{lines}")
        return None

    def stop(self) -> None:
        """After the goodbye: wait `stop_seconds` for every process to end, then SIGTERM, a moment, SIGKILL."""
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
    """Whether the process ends before the monotonic time `until`."""
    try:
        process.wait(max(until - time.monotonic(), 0.01))
    except subprocess.TimeoutExpired:
        return False
    return True


def signal_group(group: int, number: signal.Signals) -> None:
    """Signal a process group of ours that may be gone."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
