"""The supervisor: the node's control and life. It holds the control connection, beats, and starts the worker.

No mlx here: a worker that aborts, runs out of memory or holds the interpreter's lock neither silences the beat nor ends
the node.
"""

import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from os import environ, getpid

import psutil

from mlxdist.node.process import Worker
from mlxdist.protocol import messages as m
from mlxdist.protocol.backoff import Backoff
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.transport import Link
from mlxdist.protocol.wire import decode, encode

ENLIST_SECONDS = 0.5  # between tries to be admitted
UNANSWERED_BEATS = 8  # until the connection counts as dead: by then this node does so at the coordinator
ASLEEP_SECONDS = 30.0  # between two looks at the clock, which are otherwise a beat apart, or the end of a worker


def host_facts() -> dict[str, str]:
    """What the coordinator shows and softly compares of this host."""
    names = ("MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE", "OPENBLAS_CORETYPE")
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "memory_bytes": str(psutil.virtual_memory().total),
        **{name: environ[name] for name in names if name in environ},
    }


class Supervisor:
    """One node's dealings with its coordinators, one life after another."""

    def __init__(
        self,
        name: str,
        host: str,
        link: Link,
        *,
        launched: bool,
        wait_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        start_worker: Callable[[Mapping[str, str]], Worker] = Worker.start,
    ) -> None:
        """`launched`: leave at the goodbye, instead of waiting for the next coordinator at the same place."""
        self.name, self.host, self.link, self.launched = name, host, link, launched
        self.wait_seconds, self.clock, self.start_worker = wait_seconds, clock, start_worker
        self.worker: Worker | None = None
        self.session: m.SessionId | None = None
        self.environment: dict[str, str] = {}
        self.beat_seconds = ENLIST_SECONDS
        self.beats = 0
        self.heard = self.spoken = clock()
        self.spoken -= ENLIST_SECONDS
        self.ticked = self.heard
        self.unanswered: float | None = None  # when something was first said to which nothing has come back
        self.backoff = Backoff()
        self.resting_until: float | None = None  # when a worker that ended is started again
        self.exit_code: int | None = None
        self.reason = ""

    def run(self, orphaned: threading.Event) -> int:
        """Until the goodbye, a refusal, or nobody heard for `wait_seconds`; or until whoever launched this is gone."""
        try:
            while self.exit_code is None:
                for frames in self.link.receive(min(self.beat_seconds / 2, 0.5)):
                    self.heard, self.unanswered = self.clock(), None
                    try:
                        message, _ = decode(frames)
                    except WireError as error:
                        self._leave(1, f"the coordinator cannot be understood: {error}")
                    else:
                        self._handle(message)
                if orphaned.is_set():
                    self._leave(0, "the launcher is gone")
                if self.exit_code is None:
                    self._tick()
            return self.exit_code
        finally:
            if self.session is not None:
                self._send(m.Leave(self.session))
            if self.worker is not None:
                self.worker.stop()
            self.link.close()

    def _leave(self, code: int, reason: str) -> None:
        if self.exit_code is None:
            self.exit_code, self.reason = code, reason

    def _send(self, message: m.Message) -> bool:
        sent = self.link.send(encode(message))
        if sent and self.unanswered is None:
            self.unanswered = self.clock()
        return sent

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.Accept():
                self._admitted(message)
            case m.Reject(reason=reason):
                self._leave(1, f"refused: {reason}")
            case m.Shutdown(reason=reason, session=session) if session == self.session:
                self._send(m.Leave(session))
                self.session = None
                self.beat_seconds = ENLIST_SECONDS
                if self.launched:
                    self._leave(0, reason)
            case m.Restart(worker_pid=pid, session=session) if session == self.session:
                if self.worker is not None and pid in (0, self.worker.process.pid):
                    self.worker.kill()
            case m.Stale(over=True, session=session) if session == self.session:
                self.session = None  # another coordinator lives now, or a new life is due: ask to be admitted

    def _admitted(self, admit: m.Accept) -> None:
        if admit.session == self.session or self.resting_until is not None:
            return
        self.session, self.beat_seconds = admit.session, admit.beat_seconds
        self.backoff.first_seconds = admit.restart_seconds
        if self.worker is not None and (
            self.worker.process.poll() is not None or admit.environment != self.environment
        ):
            self.worker.stop()
            self.worker = None
        if self.worker is None:
            self.environment = admit.environment
            self.worker = self.start_worker(admit.environment)
        endpoint = f"tcp://{self.host}:{admit.data_port}"
        self.worker.order(endpoint, self.name, admit.session, admit.memory_limit_bytes)

    def _tick(self) -> None:
        now = self.clock()
        if now - self.ticked > ASLEEP_SECONDS:
            self.heard += now - self.ticked  # this Mac slept: nobody could have been heard
        self.ticked = now
        if now - self.heard > self.wait_seconds:
            self._leave(1, f"no coordinator for {self.wait_seconds:.0f} s")
        if self.unanswered is not None and now - self.unanswered > UNANSWERED_BEATS * self.beat_seconds:
            # Every beat is answered, so this connection leads nowhere. The system would try it for a quarter of an
            # hour, ever more rarely; a new one works as soon as the network does.
            self.link.renew()
            self.unanswered = None
        if self.resting_until is not None and now >= self.resting_until:
            self.resting_until = self.session = None  # the next worker is a new life: ask for it
        if self.session is None:
            if now - self.spoken >= ENLIST_SECONDS and self.resting_until is None:
                lives = self.worker is not None and self.worker.process.poll() is None
                pid = self.worker.process.pid if self.worker is not None and lives else 0
                if self._send(m.Register(m.PROTOCOL_VERSION, self.name, pid, host_facts())):
                    self.spoken = now
            return
        if self.worker is not None:
            self._pass_on_lines(self.worker, self.session)
            cause = self.worker.cause_of_exit()
            if cause is not None:
                self._pass_on_lines(self.worker, self.session)
                self._send(m.WorkerExit(self.session, cause, tuple(self.worker.tail)))
                self.worker.let_go()
                self.worker = None
                self._rest(now, cause)
        if now - self.spoken >= self.beat_seconds:
            self.beats += 1
            pid, _ = _memory(self.worker)
            self._send(m.Heartbeat(self.session, pid))
            self.spoken = now

    def _rest(self, now: float, cause: str) -> None:
        wait = self.backoff.next(now)
        if wait is None:
            self._leave(1, f"its workers ended too often within an hour, the last one so: {cause}")
        else:
            self.resting_until = now + wait

    def _pass_on_lines(self, worker: Worker, session: m.SessionId) -> None:
        if (lines := worker.news()) and not self._send(m.Log(session, tuple(lines))):
            worker.unsent(lines)


def _memory(worker: Worker | None) -> tuple[int, int]:
    if worker is None:
        return 0, 0
    try:
        return worker.process.pid, psutil.Process(worker.process.pid).memory_info().rss
    except psutil.NoSuchProcess:
        return 0, 0


def watch_launcher(orphaned: threading.Event) -> threading.Thread:
    """Set the event at the end of standard input: whoever launched this node has gone."""

    def wait() -> None:
        while os.read(0, 4096):  # past the buffer of sys.stdin, whose lock would be held when the interpreter ends
            pass
        orphaned.set()

    thread = threading.Thread(target=wait, name="launcher", daemon=True)
    thread.start()
    return thread


def main(name: str, endpoint: tuple[str, int], wait_seconds: float, launched: bool) -> tuple[int, str]:
    """Run a node until it is told to leave. Returns the exit code and the reason as a sentence."""
    from mlxdist.node.link.sockets import DealerLink

    host, port = endpoint
    orphaned = threading.Event()
    if launched:
        watch_launcher(orphaned)
    link = DealerLink(f"tcp://{host}:{port}", f"{name}/{getpid()}".encode())
    supervisor = Supervisor(name, host, link, launched=launched, wait_seconds=wait_seconds)
    code = supervisor.run(orphaned)
    return code, supervisor.reason
