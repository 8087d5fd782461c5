"""The supervisor of a node: it holds the control connection, sends heartbeats, and starts the worker.

No mlx here: a worker that aborts, runs out of memory or holds the interpreter's lock neither stops the heartbeats nor
ends the node.
"""

import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from os import environ
from secrets import token_hex

import psutil

from mlxdist.keys.pair import MOST_LINE, NodeKeys
from mlxdist.macos import Strain, chip, strain_on_this_mac
from mlxdist.node.link.addresses import join_endpoint
from mlxdist.node.link.troubles import sentence_on
from mlxdist.node.process import Order, Worker
from mlxdist.protocol import messages as m
from mlxdist.protocol.backoff import Backoff
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.launched import AWAY, LaunchOrder
from mlxdist.protocol.transport import Link, Trouble
from mlxdist.protocol.untrusted import sentence, worker_environment
from mlxdist.protocol.wire import decode, encode, fitted

REGISTER_SECONDS = 0.5  # between attempts to register
UNANSWERED_HEARTBEATS = 8  # until the connection counts as dead: by then the coordinator counts this node as dead
CONNECT_SECONDS = 3.0
LOOK_SECONDS = 20.0  # between two looks at this machine's swap and heat, for which macOS starts a program
ASLEEP_SECONDS = 30.0  # between two ticks, which are otherwise a heartbeat or the stop of a worker apart


def host_facts() -> dict[str, str]:
    """Returns the facts on this host that the coordinator shows, and compares as warnings."""
    names = ("MLX_ENABLE_TF32", "MLX_DISABLE_COMPILE", "OPENBLAS_CORETYPE")
    return {
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "chip": chip(),
        "python": platform.python_version(),
        "memory_bytes": str(psutil.virtual_memory().total),
        **{name: environ[name] for name in names if name in environ},
    }


class Supervisor:
    """One node's control connection, one session after another."""

    def __init__(
        self,
        name: str,
        host: str,
        link: Link,
        *,
        launched: bool,
        wait_seconds: float,
        port: int = 0,
        data_port: int = 0,
        model: str = "",
        models: str = "",
        keys: NodeKeys | None = None,
        clock: Callable[[], float] = time.monotonic,
        strain: Callable[[], Strain] = strain_on_this_mac,
        start_worker: Callable[[Mapping[str, str]], Worker] = Worker.start,
        say: Callable[[str], None] = lambda text: print(f"mlxdist node: {text}", file=sys.stderr, flush=True),
    ) -> None:
        """`launched`: leave at a Shutdown, instead of waiting for the next coordinator at the same endpoint.

        `port` is that of `link`, for messages; `keys` are given to the worker for its own connection. `data_port`: the
        end of a tunnel to the data port; `model`: the model's folder on this host; 0 and "": as the coordinator says.
        `models`: the folder for models that come from it; "": that of the user.
        """
        self.data_port, self.model, self.models = data_port, model, models
        self.keys, self.say, self.port = keys, say, port
        self.host_facts = host_facts()  # once: some ask a program of the system, and a node registers twice a second
        self.look, self.strain = strain, strain()
        self.told: set[Trouble] = set()  # what a person was told, since the last connection
        self.name, self.host, self.link, self.launched = name, host, link, launched
        self.wait_seconds, self.clock, self.start_worker = wait_seconds, clock, start_worker
        self.worker: Worker | None = None
        self.session: m.SessionId | None = None
        self.standing: m.HeartbeatAck | None = None  # what the coordinator has last said of this node
        self.environment: dict[str, str] = {}
        self.heartbeat_seconds = REGISTER_SECONDS
        self.heard = self.spoken = clock()
        self.spoken -= REGISTER_SECONDS
        self.ticked = self.looked = self.heard
        self.unanswered: float | None = None  # when the first message was sent that has no answer yet
        self.backoff = Backoff()
        self.resting_until: float | None = None  # until when a worker that ended is not started again
        self.exit_code: int | None = None
        self.reason = ""

    def run(self, orphaned: threading.Event) -> int:
        """Runs until a Shutdown, a Reject, `wait_seconds` without a coordinator, or `orphaned`: no one wants it here.

        Returns the exit code.
        """
        try:
            while self.exit_code is None:
                for frames in self.link.receive(min(self.heartbeat_seconds / 2, 0.5)):
                    self.heard, self.unanswered = self.clock(), None
                    try:
                        message, _ = decode(frames)
                    except WireError as error:
                        self._leave(1, f"the coordinator cannot be understood: {error}")
                    else:
                        self._handle(message)
                if orphaned.is_set():
                    self._leave(0, "the launcher is gone" if self.launched else "this machine is used again")
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
            self.exit_code, self.reason = code, sentence(reason)

    def _send(self, message: m.Message) -> bool:
        sent = self.link.send(encode(fitted(message)))
        if sent and self.unanswered is None:
            self.unanswered = self.clock()
        return sent

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.Accept():
                self._accepted(message)
            case m.Reject(reason=reason):
                self._leave(1, f"refused: {reason}")
            case m.Shutdown(reason=reason, session=session) if session == self.session:
                self._send(m.Leave(session))
                self.session = None
                self.heartbeat_seconds = REGISTER_SECONDS
                if self.launched:
                    self._leave(0, reason)
            case m.HeartbeatAck(session=session) if session == self.session:
                self.standing = message
            case m.Restart(worker_pid=pid, session=session) if session == self.session:
                if self.worker is not None and pid in (0, self.worker.process.pid):
                    self.worker.kill()
            case m.Stale(over=True, session=session) if session == self.session:
                self.session = None  # another coordinator runs now, or this session has ended: register again

    def _accepted(self, accept: m.Accept) -> None:
        if accept.session == self.session or self.resting_until is not None:
            return
        try:
            environment = worker_environment(accept.environment)
        except MismatchError as error:
            self._leave(1, f"nothing was started: {error}")
            return
        self.session, self.heartbeat_seconds = accept.session, accept.heartbeat_seconds
        self.backoff.first_seconds = accept.restart_seconds
        if self.worker is not None and (self.worker.process.poll() is not None or environment != self.environment):
            self.worker.stop()
            self.worker = None
        if self.worker is None:
            self.environment = environment
            self.worker = self.start_worker(environment)
        endpoint = join_endpoint(self.host, self.data_port or accept.data_port)
        order = Order(
            endpoint, self.name, accept.session, accept.memory_limit_bytes, self.model, self.keys, self.models
        )
        self.worker.order(order)

    def _look_at_connection(self) -> None:
        """Says once why the connection cannot be made. A node that was launched can change nothing, and leaves."""
        trouble = self.link.trouble
        if trouble is None:
            self.told.clear()
        elif trouble not in self.told:
            self.told.add(trouble)
            place = join_endpoint(self.host, self.port).removeprefix("tcp://")
            sentence = sentence_on(trouble, place, self.name, self.keys)
            if self.launched:
                self._leave(1, sentence)
            else:
                self.say(f"{sentence}. It goes on trying.")

    def _tick(self) -> None:
        now = self.clock()
        self._look_at_connection()
        if now - self.ticked > ASLEEP_SECONDS:
            self.heard += now - self.ticked  # this Mac slept and could not hear a coordinator
        self.ticked = now
        if now - self.heard > self.wait_seconds:
            self._leave(AWAY if self.launched else 1, self._unheard())
        if self.unanswered is not None and now - self.unanswered > UNANSWERED_HEARTBEATS * self.heartbeat_seconds:
            # Every heartbeat is answered, so this connection is broken. The system would retry it for a quarter of an
            # hour, ever more rarely; a new one works as soon as the network does.
            self.link.renew()
            self.unanswered = None
        if self.resting_until is not None and now >= self.resting_until:
            self.resting_until = self.session = None  # the next worker needs a new session: register again
        if self.session is None:
            if now - self.spoken >= REGISTER_SECONDS and self.resting_until is None:
                running = self.worker is not None and self.worker.process.poll() is None
                pid = self.worker.process.pid if self.worker is not None and running else 0
                if self._send(m.Register(m.PROTOCOL_VERSION, self.name, pid, self.host_facts)):
                    self.spoken = now
            return
        if self.worker is not None:
            self._send_lines(self.worker, self.session)
            cause = self.worker.cause_of_exit()
            if cause is not None:
                self._send_lines(self.worker, self.session)
                self._send(m.WorkerExit(self.session, cause, tuple(self.worker.tail)))
                self.worker.close_pipes()
                self.worker = None
                self._rest(now, cause)
        if now - self.spoken >= self.heartbeat_seconds:
            pid, serving = (self.worker.process.pid, self.worker.serving) if self.worker is not None else (0, False)
            if now - self.looked >= LOOK_SECONDS:
                self.strain, self.looked = self.look(), now
            self._send(m.Heartbeat(self.session, pid, serving, self.strain.swap_bytes, self.strain.heat))
            self.spoken = now

    def _unheard(self) -> str:
        """Says that no coordinator was heard, and why, as far as one attempt to connect tells."""
        silence = f"no coordinator for {self.wait_seconds:.0f} s"
        try:
            socket.create_connection((self.host, self.port), CONNECT_SECONDS).close()
        except OSError as error:
            return f"{silence}; cannot reach the coordinator at {self.host}:{self.port}: {error}"
        return silence

    def _rest(self, now: float, cause: str) -> None:
        wait = self.backoff.next(now)
        if wait is None:
            self._leave(1, f"its workers ended too often within an hour; the last time: {cause}")
        else:
            self.resting_until = now + wait

    def _send_lines(self, worker: Worker, session: m.SessionId) -> None:
        if (lines := worker.take_lines()) and not self._send(m.Log(session, tuple(lines))):
            worker.put_back(lines)


def watch_launcher(orphaned: threading.Event) -> threading.Thread:
    """Sets the event at the end of standard input: the launcher of this node is gone."""

    def wait() -> None:
        while os.read(0, 4096):  # past the buffer of sys.stdin, whose lock would be held when the interpreter ends
            pass
        orphaned.set()

    thread = threading.Thread(target=wait, name="launcher", daemon=True)
    thread.start()
    return thread


def first_line() -> bytes:
    """Returns the next line of standard input and leaves the rest, with a limit on its length."""
    line = b""
    while not line.endswith(b"\n") and len(line) < MOST_LINE and (one := os.read(0, 1)):
        line += one
    return line


def main(
    name: str,
    order: LaunchOrder,
    *,
    launched: bool,
    keys: NodeKeys | None = None,
    leave: threading.Event | None = None,
    watch: Callable[["Supervisor"], AbstractContextManager[None]] | None = None,
) -> tuple[int, str]:
    """Runs a node until it has to leave, or `leave` is set. Returns the exit code and the reason as a sentence.

    `watch`: opened while the node runs, for a person.
    """
    from mlxdist.node.link.sockets import DealerLink

    orphaned = leave or threading.Event()
    if launched:
        watch_launcher(orphaned)
    host = order.host or environ["SSH_CONNECTION"].split()[0]
    # Random, because a connection that takes an existing name takes over what is sent to it (ROUTER_HANDOVER).
    link = DealerLink(join_endpoint(host, order.port), f"{name}/{token_hex(16)}".encode(), keys=keys)
    supervisor = Supervisor(
        name,
        host,
        link,
        launched=launched,
        wait_seconds=order.wait_seconds,
        port=order.port,
        data_port=order.data_port,
        model=order.model,
        models=order.models,
        keys=keys,
    )
    with watch(supervisor) if watch is not None else nullcontext():
        code = supervisor.run(orphaned)
    return code, supervisor.reason
