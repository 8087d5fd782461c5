"""Nodes in this thread: real sessions at wires that a test may cut, with engines that are real or pretended."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import numpy as np

from mlxdist.node.link.jobs import (
    ComputeAssignment,
    ComputeCanary,
    FetchModel,
    Finish,
    Job,
    JobResults,
    LoadModel,
    Partial,
    Result,
    TakeBlock,
)
from mlxdist.node.link.session import Session
from mlxdist.node.work.locate import Locator
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError, UserError
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.transport import CONTROL, DATA, Trouble
from mlxdist.protocol.tree import Span, fold_span, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import CANARY, VERSIONS, introduction

MOST_RESTARTS = 2  # of a worker, by order of the coordinator
LEAF_SECONDS = 0.1  # said of every leaf, so that no load of this machine moves the split


@dataclass
class Wire:
    """A node's connection and what is under way on it. A cut one delivers later, a closed one cannot be used."""

    channel: str
    peer: bytes
    hear: Callable[[Frames], None] | None = None  # takes what arrives at the node; None: it waits for `receive`
    inbox: list[Frames] = field(default_factory=list)
    up: deque[Frames] = field(default_factory=deque)
    down: deque[Frames] = field(default_factory=deque)
    cut_up: bool = False
    cut_down: bool = False
    closed: bool = False
    trouble: Trouble | None = None  # of making the connection
    ended: bool = False  # the node's end is gone for good; what it had sent may still arrive

    @property
    def open(self) -> bool:
        """True if both ends can send."""
        return not self.closed and not self.ended

    def lose_all(self) -> None:
        """The connection broke: what was under way is lost."""
        self.up.clear()
        self.down.clear()

    def send(self, frames: Frames) -> bool:
        """The node's end sends."""
        if self.open:
            self.up.append([bytes(frame) for frame in frames])
        return self.open

    def receive(self, timeout: float) -> list[Frames]:
        """Takes what has arrived at the node's end; never waits."""
        arrived, self.inbox = self.inbox, []
        return arrived

    def renew(self) -> None:
        """The node's end connects again."""
        self.lose_all()

    def wake(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """The node's end is gone."""
        self.ended = True


class Connects(Protocol):
    """A hub as a node sees it."""

    def connect(self, channel: str, peer: bytes, hear: Callable[[Frames], None]) -> Wire: ...


class Performer(Protocol):
    """An engine as a worker sees it."""

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults: ...


class MemoryWorker:
    """A worker without a process: a real session and an engine; each step of it is one result."""

    def __init__(self, name: str, hub: Connects, engine: Performer) -> None:
        self.name, self.hub, self.engine = name, hub, engine
        self.session: Session | None = None
        self.wire: Wire | None = None
        self.results: JobResults | None = None  # of the job in work
        self.heard: list[m.Message] = []  # on the data connections, from the first on
        self.leaf_seconds = LEAF_SECONDS
        self.stopped = False

    def begin(self, session: m.SessionId) -> None:
        """Goes to the coordinator with this session."""
        self.hang_up()
        self.session, self.results = Session(self.name, session), None
        peer = f"{self.name}#{session.incarnation}.{session.number}".encode()
        self.wire = self.hub.connect(DATA, peer, self.hear)
        self.session.say(m.Hello(session, VERSIONS))
        self.flush()

    def hang_up(self) -> None:
        """Ends the connection, if there is one."""
        if self.wire is not None:
            self.wire.close()

    def hear(self, frames: Frames) -> None:
        """Takes one message."""
        assert self.session is not None
        message, payload = decode(frames)
        self.heard.append(message)
        self.session.handle(message, payload)
        self.flush()

    @property
    def can_work(self) -> bool:
        """True if it has anything to do."""
        there = self.session is not None and not self.stopped
        return there and (self.results is not None or bool(self.session and self.session.jobs))

    def step(self) -> Result | None:
        """Begins the next job, or goes on with the one in work, up to its next result; None at its end."""
        session = self.session
        assert session is not None
        if self.results is None:
            self.results = self.engine.perform(session.next_job(), session.id, lambda sentence: None)
        needed = session.computing is None or session.needed(session.computing)
        result = next(self.results, None) if needed else None
        match result:
            case (m.LeafAnswer() as answer, payload):
                result = (msgspec.structs.replace(answer, seconds=self.leaf_seconds), payload)
        result = self.altered(result)
        if result is None or not session.deliver(result):
            self.results.close()
            self.results = None
            session.done()
        self.flush()
        return result

    def altered(self, result: Result | None) -> Result | None:
        """The result that is delivered in place of a right one; None ends the job."""
        return result

    def flush(self) -> None:
        """Sends what the session has to say; without a connection it waits in the session."""
        if self.session is not None and self.wire is not None and self.wire.open:
            for message, payload in self.session.take_outgoing():
                self.wire.send(encode(message, payload))


class RestartedError(AssertionError):
    """The coordinator has the worker of this node restarted again and again: it does something wrong."""


class MemoryNode(MemoryWorker):
    """A worker that registers by itself; `host` is its description of its machine."""

    def __init__(self, name: str, hub: Connects, engine: Performer, host: Mapping[str, str]) -> None:
        super().__init__(name, hub, engine)
        self.refusal = ""  # what it was refused with
        self.control = hub.connect(CONTROL, name.encode(), self.hear_control)
        self.host, self.restarts = dict(host), 0
        self.register()

    def register(self) -> None:
        """Asks to take part, with another worker each time."""
        self.control.send(encode(m.Register(m.PROTOCOL_VERSION, self.name, 0, self.host)))

    def hear_control(self, frames: Frames) -> None:
        """Takes one message of the control connection."""
        match decode(frames)[0]:
            case m.Reject(reason=reason):
                self.refusal = reason
            case m.Accept(session=session):
                self.begin(session)
            case m.Stale(over=True):
                self.register()
            case m.Restart():
                self.restarts += 1
                if self.restarts > MOST_RESTARTS:
                    raise RestartedError(self.name)
                self.hang_up()
                self.register()


class WorkerEndedError(Exception):
    """The worker's process ends, for this reason."""


@dataclass
class PretendedEngine:
    """An engine without a model: functions of an assignment's job and a leaf's index make the numbers."""

    manifest: Manifest
    gradient: Callable[[ComputeAssignment, int], Vector]
    row_outputs: Callable[[ComputeAssignment, int], Vector]
    fate: Callable[[int], str] = lambda leaf: ""  # of the worker at this leaf of the step: "crash", "nan" or ""
    canary: tuple[str, ...] = CANARY
    locator: Locator | None = None  # looks for the model, and gets it; None: it is always there

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> JobResults:
        """Yields the results of one job."""
        match job:
            case LoadModel() | FetchModel() | TakeBlock():
                try:
                    if self.locator is None or (yield from self.locator.locate(job, session)) is not None:
                        yield introduction(session, self.manifest), b""
                except MlxdistError as error:
                    yield m.Fault(session, "config" if isinstance(error, UserError) else "error", str(error)), b""
            case ComputeCanary():
                yield m.CanaryAnswer(session, self.canary), b""
            case ComputeAssignment():
                yield from self._compute(job, session)
            case Finish(refused=True):
                raise WorkerEndedError("refused")

    def _compute(self, job: ComputeAssignment, session: m.SessionId) -> Iterator[Result]:
        task = job.assignment
        run = Span(task.start, task.stop)
        indices = {run.start + place: leaf.index for place, leaf in enumerate(job.leaves)}
        for piece in subtrees(task.total, run) if task.verb == "gradient" else [run]:
            for leaf in range(piece.start, piece.stop):
                fate = self.fate(leaf)
                if fate == "crash":
                    raise WorkerEndedError("killed (SIGKILL)")
                if fate == "nan" and task.verb == "gradient":
                    yield m.Fault(session, "nonfinite", "NaN", task.step, task.attempt, leaf), b""
                    return
                outputs = self.row_outputs(job, indices[leaf])
                yield (
                    m.LeafAnswer(
                        session, task.step, task.attempt, task.adapter_version, leaf, len(outputs), LEAF_SECONDS, 0
                    ),
                    outputs.tobytes(),
                )
            if task.verb == "gradient":
                yield Partial(task, piece, fold_span(piece, lambda leaf: self.gradient(job, indices[leaf]), np.add))
