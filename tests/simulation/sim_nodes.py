"""Nodes without processes, sockets or mlx, for random histories: real sessions, pretended models, wires that may break.

A vector is of small integers, so that sums are exact in any order and every leaf, step, adapter and reference that went
into one can be read off it.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, Finish, LoadModel, Partial
from mlxdist.node.link.session import Session
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.backoff import Backoff
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.tree import Span, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import CANARY, VERSIONS, introduction

MOST_LEAVES = 12
ELEMENTS = MOST_LEAVES + 3
MANIFEST = manifests.make({"layers.0.lora_a": (ELEMENTS, 1)})
WAIT_SECONDS = 12 * 3600.0
ENLIST_SECONDS = 0.5


def gradient_of(leaves: Span, step: int, adapter: float, reference: float) -> Vector:
    """The sum over these leaves of what each brings: itself, its step, and with what it was computed."""
    vector = np.zeros(ELEMENTS, np.float32)
    vector[leaves.start : leaves.stop] = 1
    vector[MOST_LEAVES:] = np.float32([step, adapter, reference]) * len(leaves)
    return vector


def numbers_of(leaf: int, step: int, adapter: float, reference: float) -> Vector:
    """A leaf's row outputs, one row."""
    return np.float32([leaf, step, adapter, reference])


@dataclass
class Wire:
    """One connection: what is under way in both directions. A cut one delivers later, a closed one cannot be used."""

    channel: str
    peer: bytes
    up: deque[Frames] = field(default_factory=deque)
    down: deque[Frames] = field(default_factory=deque)
    cut_up: bool = False
    cut_down: bool = False
    closed: bool = False
    ended: bool = False  # the node's end is gone for good; what it had sent may still arrive

    def send(self, message: m.Message, payload: bytes = b"") -> bool:
        """The node's end."""
        if not self.closed and not self.ended:
            self.up.append([bytes(frame) for frame in encode(message, payload)])
        return not self.closed and not self.ended

    def lose_all(self) -> None:
        """The connection broke: what was under way is lost."""
        self.up.clear()
        self.down.clear()


class Surroundings(Protocol):
    """The world as a node needs it: the time, wires, and what is wrong with the leaves."""

    now: float

    def connect(self, channel: str, peer: bytes) -> Wire: ...
    def new_pid(self) -> int: ...
    def fate(self, worker: "SimWorker", leaf: int) -> str: ...


class SimWorker:
    """A worker: a real session, an engine that needs no time of its own, one leaf per `step`."""

    def __init__(self, world: Surroundings, name: str) -> None:
        self.world, self.name = world, name
        self.pid = world.new_pid()
        self.exit: str | None = None
        self.stopped = self.slow = False
        self.bad = self.doomed = False  # the next leaf gives NaN; the next leaf is the last
        self.disturbed = False  # something of it was lost or damaged on the way
        self.session: Session | None = None
        self.wire: Wire | None = None
        self.job: Iterator[None] | None = None

    def order(self, session: m.SessionId) -> None:
        """Goes to a coordinator, with this session."""
        if self.exit is None:
            self._hang_up()
            self.job = None
            self.session = Session(self.name, session)
            self.wire = self.world.connect(DATA, f"{self.name}#{session.incarnation}.{session.number}".encode())
            self.session.say(m.Hello(session, VERSIONS))
            self.flush()

    def end(self, cause: str) -> None:
        """The process ends."""
        if self.exit is None:
            self.exit, self.job = cause, None
            self._hang_up()

    def _hang_up(self) -> None:
        if self.wire is not None:
            self.wire.ended = True

    @property
    def can_work(self) -> bool:
        """True if it has anything to do."""
        there = self.exit is None and not self.stopped and self.session is not None
        return there and (self.job is not None or bool(self.session and self.session.jobs))

    def hear(self, frames: Frames) -> None:
        """Take one message. A real worker ends at one that makes no sense, and so does this one."""
        assert self.session is not None
        try:
            self.session.handle(*decode(frames))
        except (WireError, MismatchError) as error:
            if not self.disturbed:
                raise AssertionError(f"{self.name} was sent what makes no sense: {error}") from error
            self.end("exit code 1")
        self.flush()

    def step(self) -> None:
        """Compute one leaf, or answer."""
        assert self.session is not None
        if self.job is None:
            match self.session.next_job():
                case LoadModel():
                    self.session.elements = ELEMENTS
                    self.session.say(introduction(self.session.id, MANIFEST))
                case ComputeCanary():
                    self.session.say(m.CanaryAnswer(self.session.id, CANARY))
                case ComputeAssignment() as job:
                    self.job = self._compute(job, self.session)
                case Finish(refused=True):
                    self.end("refused")
        elif next(self.job, self) is self:
            self.job = None
            self.session.done()
        self.flush()

    def _compute(self, job: ComputeAssignment, session: Session) -> Iterator[None]:
        task, session_id = job.assignment, session.id
        adapter = float(job.adapter[0])
        reference = float(job.reference[0]) if job.reference is not None else 0.0
        run = Span(task.start, task.stop)
        pieces = subtrees(task.total, run) if task.verb == "gradient" else [run]
        for piece in pieces:
            total = np.zeros(ELEMENTS, np.float32)
            for leaf in range(piece.start, piece.stop):
                if not session.needed(task.attempt):
                    return
                fate = self.world.fate(self, leaf)
                if fate == "crash":
                    self.end("killed (SIGKILL)")
                    return
                if fate == "nan" and task.verb == "gradient":
                    session.say(m.Fault(session_id, "nonfinite", "NaN", task.step, task.attempt, leaf))
                    return
                index = job.leaves[leaf - run.start].index
                total += gradient_of(Span(index, index + 1), task.step, adapter, reference)
                seconds = 5.0 if self.slow else 0.5
                answer = m.LeafAnswer(session_id, task.step, task.attempt, task.adapter_version, leaf, 4, seconds, 0)
                session.say(answer, numbers_of(index, task.step, adapter, reference).tobytes())
                yield
            if task.verb == "gradient":
                session.deliver(Partial(task, piece, total))

    def flush(self) -> None:
        """Send what the session has to say, if there is a connection."""
        if self.session is None or self.wire is None or self.exit is not None or self.wire.closed:
            return  # what cannot be sent now waits in the session
        for message, payload in self.session.take_outgoing():
            self.wire.send(message, bytes(payload))


class SimSupervisor:
    """A supervisor: the dealings of node/supervisor.py, with a pretended worker."""

    def __init__(self, world: Surroundings, name: str, *, launched: bool = False) -> None:
        self.world, self.name, self.launched = world, name, launched
        self.pid = world.new_pid()
        self.wire = world.connect(CONTROL, f"{name}/{self.pid}".encode())
        self.inbox: deque[Frames] = deque()
        self.worker: SimWorker | None = None
        self.session: m.SessionId | None = None
        self.ahead = 0.0  # seconds by which its clock has jumped
        self.stopped = False
        self.beat_seconds, self.beats = ENLIST_SECONDS, 0
        self.heard = self.clock()
        self.spoken = self.heard - ENLIST_SECONDS
        self.backoff = Backoff()
        self.resting_until: float | None = None
        self.exit: str | None = None

    def clock(self) -> float:
        """Its own monotonic clock."""
        return self.world.now + self.ahead

    def turn(self) -> None:
        """Take what has arrived, then look at the worker and the clock."""
        while self.inbox and self.exit is None:
            self.heard = self.clock()
            self._handle(decode(self.inbox.popleft())[0])
        if self.exit is None:
            self._tick(self.clock())

    def leave(self, reason: str) -> None:
        """End as a supervisor does that was told to."""
        if self.exit is None:
            if self.session is not None:
                self.wire.send(m.Leave(self.session))
            self.end(reason)

    def end(self, reason: str) -> None:
        """The process ends, and its worker with it."""
        self.exit = self.exit or reason
        self.wire.ended = True
        if self.worker is not None:
            self.worker.end("its supervisor is gone")

    def _handle(self, message: m.Message) -> None:
        match message:
            case m.Accept():
                self._admitted(message)
            case m.Reject(reason=reason):
                self.leave(f"refused: {reason}")
            case m.Shutdown(session=session) if session == self.session:
                self.leave("goodbye")
            case m.Restart(worker_pid=pid, session=session) if session == self.session:
                if self.worker is not None and pid in (0, self.worker.pid):
                    self.worker.end("killed (SIGKILL)")
            case m.Stale(over=True, session=session) if session == self.session:
                self.session = None

    def _admitted(self, admit: m.Accept) -> None:
        if admit.session == self.session or self.resting_until is not None:
            return
        self.session, self.beat_seconds = admit.session, admit.beat_seconds
        self.backoff.first_seconds = admit.restart_seconds
        if self.worker is None or self.worker.exit is not None:
            self.worker = SimWorker(self.world, self.name)
        self.worker.order(admit.session)

    def _tick(self, now: float) -> None:
        if now - self.heard > WAIT_SECONDS:
            self.leave("no coordinator")
            return
        if self.resting_until is not None and now >= self.resting_until:
            self.resting_until = self.session = None
        if self.session is None:
            if now - self.spoken >= ENLIST_SECONDS and self.resting_until is None:
                pid = self.worker.pid if self.worker is not None else 0
                if self.wire.send(m.Register(m.PROTOCOL_VERSION, self.name, pid, {})):
                    self.spoken = now
            return
        if self.worker is not None and self.worker.exit is not None:
            cause = self.worker.exit
            self.wire.send(m.WorkerExit(self.session, cause, ()))
            self.worker = None
            wait = self.backoff.next(now)
            if wait is None:
                self.leave(f"its workers ended too often, the last one so: {cause}")
                return
            self.resting_until = now + wait
        if now - self.spoken >= self.beat_seconds:
            self.beats += 1
            self.wire.send(m.Heartbeat(self.session, self.worker.pid if self.worker is not None else 0))
            self.spoken = now


Move = tuple[str, Callable[[], None]]
