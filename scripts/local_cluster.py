"""A run on this machine that a script may disturb: nodes started by hand, a coordinator, a tiny random model.

Every process that was started ends with the block, including stopped processes and workers without a supervisor.
"""

import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from random import SystemRandom
from typing import Any

import psutil

from scripts.toy_preferences import write_model, write_rows

RUN_TOML = """
model = "model"
data = "data"
method = "{method}"
[batch]
size = {leaves}
leaf_tokens = 1
order = "shuffled"
[lora]
rank_scaling = "constant"
[train]
learning_rate = 1e-3
schedule = "constant"
warmup_steps = 0
eval_every = 0
report_every = 100
[timing]
{timing}
"""
HOSTS_TOML = "nodes = []\n[coordinator]\nport = {port}\nmin_nodes = {min_nodes}\n"
WORKER = "mlxdist.node.worker"


@dataclass
class LocalCluster:
    """Nodes by name, and one coordinator after another at the same port. Times are in seconds."""

    folder: Path
    port: int
    nodes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)
    coordinator: "subprocess.Popen[bytes] | None" = None
    seen: dict[int, psutil.Process] = field(default_factory=dict)  # every process that was started, by pid

    def start_node(self, name: str) -> None:
        """Starts a node as a person would by hand; it leaves after two minutes without a coordinator."""
        command = ["node", "--connect", f"127.0.0.1:{self.port}", "--name", name, "--wait", "2m"]
        self.nodes[name] = self._start(command, f"{name}.log")

    def launch(
        self, output: str, settings: Mapping[str, object], *, resume: bool = False, options: Sequence[str] = ()
    ) -> "subprocess.Popen[bytes]":
        """Starts a coordinator that trains into `folder`/`output`."""
        pairs = {"output": json.dumps(output), **settings}
        changes = [word for key, value in pairs.items() for word in ("--set", f"{key}={value}")]
        changes += ["--resume"] if resume else []
        self.coordinator = self._start(
            ["launch", "run.toml", "--hosts", "hosts.toml", *changes, *options], f"{output}.txt"
        )
        return self.coordinator

    def _start(self, command: list[str], log: str) -> "subprocess.Popen[bytes]":
        with (self.folder / log).open("ab") as stream:
            process = subprocess.Popen(
                [sys.executable, "-m", "mlxdist", *command],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,  # Ctrl-C reaches only the script, which ends them
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
        self.seen[process.pid] = psutil.Process(process.pid)
        return process

    def alive(self) -> list[str]:
        """The names of the nodes whose supervisor runs."""
        return sorted(name for name, process in self.nodes.items() if process.poll() is None)

    def supervisor(self, name: str) -> psutil.Process:
        """The supervisor of a node."""
        return psutil.Process(self.nodes[name].pid)

    def worker(self, name: str) -> psutil.Process | None:
        """The worker of a node; None while it has none."""
        with suppress(psutil.Error):
            for child in self.supervisor(name).children():
                with suppress(psutil.Error):
                    if WORKER in child.cmdline():
                        self.seen[child.pid] = child
                        return child
        return None

    def end(self) -> None:
        """Ends every process that was started here and still runs."""
        for name in self.alive():
            self.worker(name)
        left = [process for process in self.seen.values() if process.is_running()]
        for process in left:
            with suppress(psutil.Error):
                left += [child for child in process.children(recursive=True) if child.pid not in self.seen]
        for process in left:
            send(process, signal.SIGCONT)
            send(process, signal.SIGKILL)
        for started in (*self.nodes.values(), *([self.coordinator] if self.coordinator else [])):
            started.wait()
        psutil.wait_procs(left, timeout=10)


def send(process: psutil.Process | None, number: signal.Signals) -> bool:
    """Sends a signal to a process that may be gone; returns true if it was there."""
    if process is None:
        return False
    try:
        process.send_signal(number)
    except psutil.Error:
        return False
    return True


@contextmanager
def local_cluster(
    folder: Path, *, method: str, leaves: int, timing: Mapping[str, float], min_nodes: int = 1, rows: int = 80
) -> Iterator[LocalCluster]:
    """A cluster without nodes, in a folder with model, rows and configuration, which are made where missing."""
    if not (folder / "model").exists():
        write_model(folder / "model")
        write_rows(folder / "data", method, rows)
    port = free_ports()
    seconds = "\n".join(f"{key} = {value}" for key, value in timing.items())
    (folder / "run.toml").write_text(RUN_TOML.format(method=method, leaves=leaves, timing=seconds))
    (folder / "hosts.toml").write_text(HOSTS_TOML.format(port=port, min_nodes=min_nodes))
    cluster = LocalCluster(folder, port)
    try:
        yield cluster
    finally:
        cluster.end()


def free_ports() -> int:
    """Returns a port that is free together with the next one.

    It is below the range for outgoing connections, so that the system cannot take it while no coordinator listens.
    """
    while True:
        port = SystemRandom().randrange(20_000, 32_000, 2)
        with socket.socket() as first, socket.socket() as second, suppress(OSError):
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


@dataclass
class Events:
    """The events of a run as they are written, each read once. A resumed run writes a new file, read from the start."""

    path: Path
    told: list[dict[str, Any]] = field(default_factory=list)
    _read: int = 0
    _file: int = 0

    def news(self) -> list[dict[str, Any]]:
        """Returns the events since the last call."""
        fresh: list[dict[str, Any]] = []
        if self.path.exists():
            with self.path.open("rb") as lines:
                file = os.fstat(lines.fileno()).st_ino
                if file != self._file:
                    self._file, self._read, self.told = file, 0, []
                lines.seek(self._read)
                for line in lines:
                    if not line.endswith(b"\n"):
                        break
                    self._read += len(line)
                    fresh.append(json.loads(line))
        self.told += fresh
        return fresh

    @property
    def steps(self) -> int:
        """The last finished step."""
        return next((event["step"] for event in reversed(self.told) if event["event"] == "train"), 0)

    def wait_for_step(self, step: int, run: "subprocess.Popen[bytes]", timeout: float) -> None:
        """Waits for the end of a step. Raises SystemExit if the run ends before, or after `timeout` seconds."""
        until = time.monotonic() + timeout
        while self.steps < step:
            self.news()
            if run.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"step {step} was not reached: the run is at {self.steps} (exit code {run.poll()})")
            time.sleep(0.01)


def adapter_sha(run: Path) -> str:
    """Returns the SHA-256 of the saved adapter of a run."""
    return hashlib.sha256((run / "adapters.safetensors").read_bytes()).hexdigest()


def machine() -> dict[str, Any]:
    """Returns the machine and the versions of a measurement."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("mlxdist", "mlx", "mlx-lm", "pyzmq")},
    }


@contextmanager
def interruptible() -> Iterator[None]:
    """Lets SIGTERM end the script as Ctrl-C does, with exit status 130, so that no process stays behind."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        print("interrupted; everything that was started has ended", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
