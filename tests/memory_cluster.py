"""A cluster in one thread: real sessions at wires that a test may cut or damage, with real or pretended engines.

Messages move and results are computed when a test says so; in a `RunningCluster`, whenever the coordinator waits.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import msgspec
import numpy as np

from mlxdist.coordinator.cluster.audit import Audit
from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.schedule.assign import NodeSeconds
from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, Finish, Job, LoadModel, Partial, Result, Results
from mlxdist.node.link.session import Session
from mlxdist.protocol import messages as m
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.transport import CONTROL, DATA, Parcel, is_probe
from mlxdist.protocol.tree import Span, TreeSum, fold_span, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import CANARY, VERSIONS, give_back, introduction

Move = tuple[str, Callable[[], object]]  # something that may happen next, and of what kind it is

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
        """What has arrived at the node's end; never waits."""
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


class Performer(Protocol):
    """An engine as a worker sees it."""

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> Results: ...


class MemoryWorker:
    """A worker without a process: a real session and an engine; each step of it is one result."""

    def __init__(self, name: str, cluster: "MemoryCluster", engine: Performer) -> None:
        self.name, self.cluster, self.engine = name, cluster, engine
        self.session: Session | None = None
        self.wire: Wire | None = None
        self.results: Results | None = None  # of the job in work
        self.heard: list[m.Message] = []  # on the data connections, from the first on
        self.leaf_seconds = LEAF_SECONDS
        self.stopped = False

    def begin(self, session: m.SessionId) -> None:
        """Goes to the coordinator with this session."""
        self.hang_up()
        self.session, self.results = Session(self.name, session), None
        peer = f"{self.name}#{session.incarnation}.{session.number}".encode()
        self.wire = self.cluster.connect(DATA, peer, self.hear)
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
        if result is None or not session.deliver(result):
            self.results.close()
            self.results = None
            session.done()
        self.flush()
        return result

    def flush(self) -> None:
        """Sends what the session has to say; without a connection it waits in the session."""
        if self.session is not None and self.wire is not None and self.wire.open:
            for message, payload in self.session.take_outgoing():
                self.wire.send(encode(message, payload))


class MemoryNode(MemoryWorker):
    """A worker that registers by itself; `host` is its description of its machine."""

    def __init__(self, name: str, cluster: "MemoryCluster", engine: Performer, host: Mapping[str, str]) -> None:
        super().__init__(name, cluster, engine)
        self.refusal = ""  # what it was refused with
        self.control = cluster.connect(CONTROL, name.encode(), self.hear_control)
        self.control.send(encode(m.Register(m.PROTOCOL_VERSION, name, 0, dict(host))))

    def hear_control(self, frames: Frames) -> None:
        """Takes one message of the control connection."""
        match decode(frames)[0]:
            case m.Reject(reason=reason):
                self.refusal = reason
            case m.Accept(session=session):
                self.begin(session)


class MemoryCluster:
    """A coordinator's cluster and fleet, the wires to it, and its nodes. It is the hub of the fleet."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now
        self.wires: dict[tuple[str, bytes], Wire] = {}
        self.nodes: dict[str, MemoryNode] = {}
        self.inbox: list[Parcel] = []  # has arrived at the coordinator
        self.damage_up = self.damage_down = 0  # blocks that are to lose a bit on their way

    def coordinate(
        self, cluster: Cluster, on_news: Callable[[NodeNews], None] = lambda news: None, audit: Audit | None = None
    ) -> None:
        """From now on this is the coordinator."""

        def clock() -> float:
            return self.now

        self.cluster = cluster
        self.fleet = Fleet(cluster, self, on_news=on_news, clock=clock, wall=clock, audit=audit, threaded=False)

    def join(self, engine: Performer, name: str = "", host: Mapping[str, str] | None = None) -> MemoryNode:
        """A new node, which registers."""
        node = MemoryNode(name or f"node-{len(self.nodes)}", self, engine, host or {})
        self.nodes[node.name] = node
        return node

    # ---- the hub

    def connect(self, channel: str, peer: bytes, hear: Callable[[Frames], None] | None = None) -> Wire:
        """A new connection; one of the same name is replaced."""
        self.wires.pop((channel, peer), None)
        wire = self.wires[channel, peer] = Wire(channel, peer, hear)
        return wire

    def receive(self, timeout: float) -> list[Parcel]:
        """The parcels that have arrived; never waits."""
        arrived, self.inbox = self.inbox, []
        return arrived

    def send(self, parcel: Parcel) -> bool:
        """Onto the peer's wire, when it is connected."""
        wire = self.wires.get((parcel.channel, parcel.peer))
        if wire is None or not wire.open:
            return False
        wire.down.append([bytes(frame) for frame in parcel.frames])
        return True

    def wake(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """Nothing is open."""

    # ---- moves

    def pump(self) -> None:
        """The coordinator's thread goes round once."""
        self.fleet._pump(0.0)

    def deliver_up(self, wire: Wire) -> None:
        """One message reaches the coordinator."""
        frames, self.damage_up = _perhaps_damaged(wire.up.popleft(), self.damage_up)
        self.post(wire.channel, wire.peer, frames)

    def post(self, channel: str, peer: bytes, frames: Frames) -> None:
        """A message of any peer has arrived."""
        self.inbox.append(Parcel(channel, peer, frames))

    def deliver_down(self, wire: Wire) -> None:
        """One message reaches the node."""
        frames, self.damage_down = _perhaps_damaged(wire.down.popleft(), self.damage_down)
        (wire.hear or wire.inbox.append)(frames)


class SummingCluster(MemoryCluster):
    """A cluster with a loop that sums one partial at a time; what is summed away is given back once per fetch."""

    def __init__(self, now: float = 0.0) -> None:
        super().__init__(now)
        self.total: TreeSum[Vector] | None = None
        self.fetched: list[tuple[Span, Vector]] = []
        self.freed: list[Vector] = []

    def add(self, left: Vector, right: Vector) -> Vector:
        """The sum, in the buffer of `left`."""
        self.freed.append(right)
        return np.add(left, right, out=left)

    def loop(self) -> Callable[[], None] | None:
        """The next move of the loop, if any."""
        if self.fetched:
            return self.sum_one
        if self.cluster.round is not None and self.cluster.round.partials:
            return lambda: self.fetched.extend(self.cluster.fetch_partials())
        return None

    def sum_one(self) -> None:
        """Adds the next partial."""
        assert self.total is not None
        self.total.put(*self.fetched.pop(0))
        if not self.fetched:
            give_back(self.cluster, self.freed)
            self.freed = []
            self.pump()


class RunningCluster(MemoryCluster):
    """A cluster in which everything moves whenever the coordinator waits: all messages, and one result of each node."""

    def receive(self, timeout: float) -> list[Parcel]:
        """Lets the nodes work, then takes what they sent."""
        for wire in list(self.wires.values()):
            while wire.down:
                self.deliver_down(wire)
        for node in self.nodes.values():
            if node.can_work:
                self.came(node, node.step())
        for wire in list(self.wires.values()):
            while wire.up:
                self.deliver_up(wire)
        return super().receive(timeout)

    def came(self, node: MemoryNode, result: Result | None) -> None:
        """A node has done a step; this is the result of it."""

    def settle(self) -> None:
        """Goes on until nothing is under way and no node has work."""
        while any(wire.up or wire.down for wire in self.wires.values()) or any(
            node.can_work for node in self.nodes.values()
        ):
            self.pump()


def split_at(cuts: Sequence[int], seconds: Mapping[str, NodeSeconds]) -> dict[str, Span]:
    """The leaves of a step split at these places, worse than any good assignment: many subtrees, nodes without work."""
    total = len(next(iter(seconds.values())).leaves)
    edges = [0, *sorted(min(cut, total) for cut in cuts[: len(seconds) - 1]), total]
    runs = (Span(start, stop) for start, stop in pairwise(edges))
    return {name: run for name, run in zip(seconds, runs, strict=False) if len(run)}


class WorkerEndedError(Exception):
    """The worker's process ends, for this reason."""


@dataclass
class PretendedEngine:
    """An engine without a model: functions of an assignment's job and a leaf's index make the numbers."""

    manifest: Manifest
    gradient: Callable[[ComputeAssignment, int], Vector]
    row_outputs: Callable[[ComputeAssignment, int], Vector]
    fate: Callable[[int], str] = lambda leaf: ""  # of the worker at this leaf of the step: "crash", "nan" or ""

    def perform(self, job: Job, session: m.SessionId, progress: Callable[[str], None]) -> Results:
        """Yields the results of one job."""
        match job:
            case LoadModel():
                yield introduction(session, self.manifest), b""
            case ComputeCanary():
                yield m.CanaryAnswer(session, CANARY), b""
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


def _perhaps_damaged(frames: Frames, damage: int) -> tuple[Frames, int]:
    """The frames, with one bit changed if this is a block to damage, and how many blocks are left to damage."""
    if not damage or is_probe(frames) or not isinstance(decode(frames)[0], m.VectorBlock):
        return frames, damage
    *head, payload = frames
    return [*head, bytes([*payload[:2], payload[2] ^ 0x40, *payload[3:]])], damage - 1
