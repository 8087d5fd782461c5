"""Coordinators that start quickly: a process that has imported everything forks one whenever it is asked to.

Each coordinator is its own process, to be killed like any other; only its imports (3 s) are shared. Run as
`python -m tests.faults.forked_coordinator`; the test uses `Coordinators`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.config.hosts import CoordinatorHost, Hosts
from mlxdist.coordinator.config.load import load_config
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.protocol.errors import MlxdistError
from tests.faults.fault_nodes import FaultNodes

ENDED_SECONDS = 120.0


@dataclass
class Coordinator:
    """One coordinator process, and the file with its output."""

    pid: int
    said: Path
    _status: Path

    @property
    def code(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        try:
            return int(self._status.read_text())
        except FileNotFoundError:
            return None

    def kill(self) -> None:
        """Sends SIGKILL and waits for the end. Does nothing to a process that has ended."""
        if self.code is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait()

    def wait(self, seconds: float = ENDED_SECONDS) -> int:
        """Waits for the end and returns the exit code."""
        deadline = time.monotonic() + seconds
        while (code := self.code) is None:
            assert time.monotonic() < deadline, f"the coordinator did not end:\n{self.said.read_text()}"
            time.sleep(0.005)
        return code


@dataclass
class Coordinators:
    """Starts coordinators over nodes started by hand; the output of each goes to a file in `folder`."""

    folder: Path
    nodes: FaultNodes
    process: "subprocess.Popen[str]"
    started: list[Coordinator] = field(default_factory=list)

    def start(
        self,
        config: Path,
        *,
        resume: bool = False,
        previous: bool = False,
        min_nodes: int = 1,
        sets: tuple[str, ...] = (),
    ) -> Coordinator:
        """Starts a new coordinator on the run file `config`."""
        number = len(self.started)
        said, status = self.folder / f"start-{number}.txt", self.folder / f"start-{number}.status"
        order = {"config": str(config), "sets": sets, "resume": resume, "previous": previous}
        order |= {"port": self.nodes.port, "min_nodes": min_nodes, "said": str(said), "status": str(status)}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self.started.append(Coordinator(int(self.process.stdout.readline()), said, status))
        return self.started[-1]


@contextmanager
def coordinators(folder: Path, nodes: FaultNodes) -> Iterator[Coordinators]:
    """Coordinators for `nodes`, which all end with the block."""
    folder.mkdir(parents=True, exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.faults.forked_coordinator"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TOKENIZERS_PARALLELISM": "false", "MLXDIST_PLAIN": "1"},
    ) as process:
        all_of_them = Coordinators(folder, nodes, process)
        try:
            yield all_of_them
        finally:
            for one in all_of_them.started:
                one.kill()
            process.kill()


# ---- the process that forks


def main() -> None:
    """Forks a coordinator for every line, prints its process id, and notes how each one ends."""
    import mlx_lm.tokenizer_utils  # noqa: F401 - 3 s

    running: dict[int, Path] = {}

    def reap(number: int, frame: object) -> None:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                path = running.pop(pid)
                aside = path.with_suffix(".aside")
                aside.write_text(str(os.waitstatus_to_exitcode(status)))
                aside.rename(path)

    signal.signal(signal.SIGCHLD, reap)
    for line in sys.stdin:
        order = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            _live(order)
        running[pid] = Path(order["status"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        print(pid, flush=True)


def _live(order: dict[str, object]) -> None:
    """Runs one coordinator, from start to end, in the forked process."""
    from mlxdist.coordinator.run import run

    code = 70  # a traceback
    with open(str(order["said"]), "w", buffering=1) as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
        os.close(0)
        try:
            sets = order["sets"]
            assert isinstance(sets, list)
            config: RunConfig = load_config(Path(str(order["config"])), sets)
            hosts = Hosts(
                None, CoordinatorHost(port=int(str(order["port"])), min_nodes=int(str(order["min_nodes"]))), ()
            )
            resume, previous = bool(order["resume"]), bool(order["previous"])
            code = run(config, hosts, resume=resume, previous=previous, environ=os.environ)
        except MlxdistError as error:
            print(f"mlxdist: {error}", flush=True)
            code = error.exit_code
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)


if __name__ == "__main__":
    main()
