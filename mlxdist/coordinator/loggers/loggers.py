"""The loggers of a run, each in a process of its own, so that none of them can hold a step or the end of the run."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxdist.coordinator.report.sinks import Sink
from mlxdist.coordinator.storage.run_folder import RunFolder

END_SECONDS = 15.0  # that all loggers together get at the end of a run
MODULE = "mlxdist.coordinator.loggers.process"
LINE_BYTES = 4096  # of a message from a logger
MOST_SENTENCES = 8  # of one logger


class Loggers(Sink):
    """Starts its loggers at the first step of a session; they read the event file, so `take` hands nothing over.

    Args:
        names: the loggers, as train.report_to has them.
        run: the run; its config.json and event file are those of this session when its first step is told.
        environ: the environment of the processes, where services find their settings.
        end_seconds: the time that all of them get at the end.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        names: Sequence[str],
        run: RunFolder,
        environ: Mapping[str, str],
        *,
        end_seconds: float = END_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._names, self._run, self._environ = names, run, environ
        self._end_seconds, self._clock = end_seconds, clock
        self._lock = threading.Lock()
        self._started: list[Logger] = []
        self._last_step = 0

    def take(self, event: Mapping[str, object]) -> Sequence[str]:
        """Starts the loggers with the first step. Returns what they have to say, and the end of one that has failed."""
        with self._lock:
            if event.get("event") not in ("train", "val"):
                return self._news()
            first, self._last_step = not self._last_step, int(str(event["step"]))
            failures = self._start() if first else []
            return [*failures, *self._news()]

    def end(self, failure: str = "") -> Sequence[str]:
        """Gives the loggers `end_seconds` to finish, and ends those that have not."""
        with self._lock:
            for logger in self._started:
                logger.release()
            until = self._clock() + self._end_seconds
            for logger in self._started:
                logger.wait(max(until - self._clock(), 0.0), self._end_seconds, self._last_step)
            sentences = self._news()
            self._started = []
            return sentences

    def _start(self) -> list[str]:
        failures = []
        for name in self._names:
            try:
                self._started.append(start_logger(name, self._run, self._environ))
            except OSError as error:
                failures.append(f"{name} could not be started ({error}); the run goes on without it")
        return failures

    def _news(self) -> list[str]:
        return [sentence for logger in self._started for sentence in logger.news()]


@dataclass
class Logger:
    """The process of one logger, seen from the coordinator. A thread reads its messages and sees its end."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path  # of all that it prints
    run_pipe: int  # a descriptor: closed when the run is over
    tells: int  # a descriptor: its messages
    step: int = 0  # the last one that it has logged
    reader: threading.Thread | None = None
    _sentences: deque[str] = field(default_factory=lambda: deque(maxlen=MOST_SENTENCES))
    _said: str = ""  # the reason of its failure, in its own words
    _given_up: bool = False

    def news(self) -> list[str]:
        """Returns the sentences since the last call."""
        found = []
        with suppress(IndexError):
            while True:
                found.append(self._sentences.popleft())
        return found

    def release(self) -> None:
        """Lets it finish."""
        os.close(self.run_pipe)

    def wait(self, seconds: float, of: float, last_step: int) -> None:
        """Waits until it has ended; after `seconds` ends it, with all that it has started. `of`: as it is told."""
        assert self.reader is not None
        self.reader.join(seconds)
        if self.reader.is_alive():
            self._given_up = True
            self._sentences.append(
                f"{self.name} had not finished {of:g} s after the end of the run, and was stopped: "
                f"it has logged the steps up to {self.step} of {last_step}; its output is in {self.log}"
            )
            self._kill()
        self.reader.join()

    def read(self) -> None:
        """Reads messages until the process has ended, and says why if it failed; to be run by the thread."""
        with os.fdopen(self.tells, "rb") as stream:
            while line := stream.readline(LINE_BYTES):
                self._heard(line)
        self._kill()  # it has ended, and what it has started ends too; only `wait` gives its number to another process
        code = self.process.wait()
        if code and not self._given_up:
            reason = self._said or (f"it ended with exit code {code}" if code > 0 else f"signal {-code} ended it")
            self._sentences.append(f"{self.name}: {reason}. The run goes on without it; its output is in {self.log}")

    def _kill(self) -> None:
        with suppress(ProcessLookupError, PermissionError):  # macOS: the latter for a process that has ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def _heard(self, line: bytes) -> None:
        with suppress(ValueError, TypeError, AttributeError):
            message = json.loads(line)
            self.step = int(message.get("step", self.step))
            self._said = " ".join(str(message.get("say", self._said)).split())[:300]


def start_logger(name: str, run: RunFolder, environ: Mapping[str, str]) -> Logger:
    """Starts the process of a logger in a session of its own, without a standard input. Raises OSError."""
    run.logs.mkdir(exist_ok=True)
    log = run.logs / f"{name}.log"
    run_read, run_pipe = os.pipe()
    tells, tell_write = os.pipe()
    command = [sys.executable, "-m", MODULE, name, str(run.path), str(run_read), str(tell_write)]
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environ),
                pass_fds=(run_read, tell_write),
                start_new_session=True,
            )
    except OSError:
        os.close(run_pipe)
        os.close(tells)
        raise
    finally:
        os.close(run_read)
        os.close(tell_write)
    logger = Logger(name, process, log, run_pipe, tells)
    logger.reader = threading.Thread(target=logger.read, name=f"logger {name}", daemon=True)
    logger.reader.start()
    return logger
