"""The worker process as its supervisor sees it: its orders, its last lines, its exit. No mlx here."""

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from os import environ

import msgspec

from mlxdist.keys.pair import NodeKeys
from mlxdist.protocol import messages as m

TAIL_LINES = 20
UNSEEN_LINES = 1000  # kept until they can be sent to the coordinator; beyond that the oldest are left out
LINE_CHARS = 4096  # a longer line is cut into several
KILL_SECONDS = 5.0  # from the request to end until the worker is killed
HAS = "mlxdist worker has "  # printed with the bytes of the model that are here, and all of them; not shown either
HAS_ALL = f"{HAS}0 of 0"
TAKES = "mlxdist worker takes order "  # printed by a worker with the number of the order; not shown to a person
COMMAND = ("-u", "-m", "mlxdist.node.worker")  # of the interpreter


class Order(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line on standard input, from the supervisor: the endpoint to connect to, and the name and session there."""

    endpoint: str
    name: str
    session: m.SessionId
    memory_limit_bytes: int = 0
    model: str = ""  # the folder of the model on this host; "": as the run says
    keys: NodeKeys | None = None
    models: str = ""  # the folder for models that come from the coordinator; "": that of the user


@dataclass
class Worker:
    """The worker process, its last lines, and the lines that were not sent to the coordinator yet."""

    process: subprocess.Popen[str]
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    unseen: deque[str] = field(default_factory=deque)
    left_out: int = 0  # lines, since the last that were taken
    lock: threading.Lock = field(default_factory=threading.Lock)
    reader: threading.Thread | None = None
    kill_seconds: float = KILL_SECONDS
    given: int = 0  # orders
    taken: int = 0  # the number of the order that it serves
    fetched: tuple[int, int] | None = None  # bytes of the model that are here, of all; None: it gets none

    @classmethod
    def start(cls, environment: Mapping[str, str], command: Sequence[str] = COMMAND) -> "Worker":
        """Starts a worker that waits for its first order."""
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
        """Keeps a line that the worker printed."""
        if line.startswith(TAKES) and (number := line.removeprefix(TAKES)).isdecimal():
            self.taken = int(number[:9])
            return
        if found := re.fullmatch(HAS + r"(\d{1,15}) of (\d{1,15})", line):
            here, size = map(int, found.groups())
            self.fetched = (here, size) if here < size else None
            return
        self.tail.append(line)
        with self.lock:
            self.unseen.append(line)
            while len(self.unseen) > UNSEEN_LINES:
                self.unseen.popleft()
                self.left_out += 1

    def take_lines(self, most: int = 100) -> list[str]:
        """Returns the next lines to send, under 2 MiB; the first says how many were left out before them."""
        with self.lock:
            lines = [self.unseen.popleft() for _ in range(min(most, len(self.unseen)))]
            if self.left_out:
                lines.insert(
                    0, f"[{self.left_out} lines were left out here: the worker printed more than could be sent]"
                )
                self.left_out = 0
        return lines

    def put_back(self, lines: Sequence[str]) -> None:
        """Keeps lines that could not be sent, in front of the others."""
        with self.lock:
            self.unseen.extendleft(reversed(lines))

    def order(self, order: Order) -> None:
        """Sends the worker to a coordinator."""
        assert self.process.stdin is not None
        line = msgspec.json.encode(order).decode()
        self.given += 1
        with suppress(BrokenPipeError):  # it has just ended; `cause_of_exit` says why
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    @property
    def serving(self) -> bool:
        """True if it has taken up its last order: it is not stuck in the one before."""
        return self.taken == self.given

    def cause_of_exit(self) -> str | None:
        """Returns the reason why the worker ended, as a sentence; None while it runs."""
        code = self.process.poll()
        if code is None:
            return None
        if self.reader is not None:
            self.reader.join(1.0)
        return describe_exit(code)

    def stop(self) -> None:
        """Ends the worker: first the end of its input, then SIGTERM, and SIGKILL within `kill_seconds`."""
        assert self.process.stdin is not None
        for step in (self.process.stdin.close, self.process.terminate, self.process.kill):
            try:
                step()
                self.process.wait(self.kill_seconds / 2)
            except (subprocess.TimeoutExpired, BrokenPipeError, ProcessLookupError):
                continue
            break
        self.close_pipes()

    def close_pipes(self) -> None:
        """Closes the pipes of a worker that has ended."""
        with suppress(BrokenPipeError):
            if self.process.stdin is not None:
                self.process.stdin.close()
        if self.reader is not None:
            self.reader.join(1.0)  # it ends with the worker, unless a process that the worker started still runs
            if not self.reader.is_alive() and self.process.stdout is not None:
                self.process.stdout.close()

    def kill(self) -> None:
        """Kills a worker that may not react any more."""
        self.process.kill()
        self.process.wait()


def describe_exit(code: int) -> str:
    """Returns a worker's exit code as a sentence."""
    if code >= 0:
        return f"the worker ended with exit code {code}"
    reasons = {
        6: "aborted (SIGABRT; a Metal error prints above)",
        9: "killed (SIGKILL; out of memory, or by hand)",
        11: "ended by a crash (SIGSEGV; mlx on Linux ends so when memory runs out)",
    }
    return f"the worker was {reasons.get(-code, f'ended by signal {-code}')}"
