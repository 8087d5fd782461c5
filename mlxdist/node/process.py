"""The worker as its supervisor holds it: a process, its last lines, its end. No mlx here."""

import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import environ

import msgspec

from mlxdist.protocol import messages as m

TAIL_LINES = 20
UNSEEN_LINES = 1000  # kept until the coordinator can be told; of more, the oldest are left out
LINE_CHARS = 4096  # a longer line is cut into several
KILL_SECONDS = 5.0  # from asking a worker to end until it is killed
COMMAND = ("-u", "-m", "mlxdist.node.worker")  # of the interpreter


@dataclass
class Worker:
    """The worker process, its last lines, and the lines that the coordinator has not seen yet."""

    process: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    unseen: deque[str] = field(default_factory=deque)
    left_out: int = 0  # lines, since the last that were passed on
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: threading.Thread | None = None
    kill_seconds: float = KILL_SECONDS

    @classmethod
    def start(cls, environment: Mapping[str, str], command: Sequence[str] = COMMAND) -> "Worker":
        """Start a worker that waits for its first order."""
        process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**environ, **environment},
        )
        worker = cls(process)
        worker.reader = threading.Thread(target=worker._read, daemon=True)
        worker.reader.start()
        return worker

    def _read(self) -> None:
        assert self.process.stdout is not None
        while line := self.process.stdout.readline(LINE_CHARS):
            self.printed(line.rstrip())

    def printed(self, line: str) -> None:
        """Keep a line that the worker printed."""
        self.tail.append(line)
        with self.lock:
            self.unseen.append(line)
            while len(self.unseen) > UNSEEN_LINES:
                self.unseen.popleft()
                self.left_out += 1

    def news(self, most: int = 200) -> list[str]:
        """The next lines that the coordinator has not seen; the first says how many were left out before them."""
        with self.lock:
            lines = [self.unseen.popleft() for _ in range(min(most, len(self.unseen)))]
            if self.left_out:
                lines.insert(
                    0, f"[{self.left_out} lines were left out here: the worker printed more than could be sent]"
                )
                self.left_out = 0
        return lines

    def unsent(self, lines: Sequence[str]) -> None:
        """There was no connection: these lines are news still."""
        with self.lock:
            self.unseen.extendleft(reversed(lines))

    def order(self, endpoint: str, name: str, session: m.SessionId, memory_limit_bytes: int) -> None:
        """Send the worker to a coordinator."""
        assert self.process.stdin is not None
        order = {"endpoint": endpoint, "name": name, "session": session, "memory_limit_bytes": memory_limit_bytes}
        line = msgspec.json.encode(order).decode()
        with suppress(BrokenPipeError):  # it has just ended: the next look at it says why
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def cause_of_exit(self) -> str | None:
        """Why the worker ended, as a sentence; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if self.reader is not None:
            self.reader.join(1.0)
        return describe_exit(code)

    def stop(self) -> None:
        """End the worker: the end of its input first, then SIGTERM, and SIGKILL within `KILL_SECONDS`."""
        assert self.process.stdin is not None
        for step in (self.process.stdin.close, self.process.terminate, self.process.kill):
            try:
                step()
                self.process.wait(self.kill_seconds / 2)
            except (subprocess.TimeoutExpired, BrokenPipeError, ProcessLookupError):
                continue
            break
        self.let_go()

    def let_go(self) -> None:
        """Close the pipes of a worker that has ended."""
        with suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.reader is not None:
            self.reader.join(1.0)  # it ends with the worker, unless something that the worker started lives on
            if not self.reader.is_alive() and self.process.stdout is not None:
                self.process.stdout.close()

    def kill(self) -> None:
        """End a worker that may not listen any more."""
        self.process.kill()
        self.process.wait()


def describe_exit(code: int) -> str:
    """An exit code of a worker as a sentence."""
    if code >= 0:
        return f"the worker ended with exit code {code}"
    reasons = {
        6: "aborted (SIGABRT; a Metal error prints above)",
        9: "killed (SIGKILL; out of memory, or by hand)",
        11: "ended by a crash (SIGSEGV; mlx on Linux ends so when memory runs out)",
    }
    return f"the worker was {reasons.get(-code, f'ended by signal {-code}')}"
