"""A node in virtual time: the real session of a worker, a supervisor that sends heartbeats, and a chip of given speed.

Nothing is computed: a leaf takes the seconds that the chip is said to need, and its gradient is a vector of ones.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np

from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, Finish, Job, LoadModel, Partial, Result
from mlxdist.node.link.session import Session
from mlxdist.protocol import messages as m
from mlxdist.protocol.numerics import CANARY_TIMES
from mlxdist.protocol.transport import CONTROL, DATA
from mlxdist.protocol.tree import Span, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Buffer, Frames, decode

Said = tuple[str, bytes, m.Message, Buffer]  # channel, peer, message, payload
Timed = Generator[tuple[float, Result], None, None]  # seconds of work, and its result
ROW_OUTPUTS = np.zeros(1, np.float32).tobytes()
WORKER_PID = 1  # of every worker that a heartbeat names


@dataclass
class SimulatedNode:
    """A node that takes part. `leaf_seconds`: of a leaf, by its tokens. `partials`: by their leaves, for all nodes."""

    name: str
    versions: dict[str, str]
    leaf_seconds: Callable[[int], float]
    elements: int  # of the adapter
    partials: dict[int, Vector]
    load_seconds: float = 0.0
    there: bool = True
    session: Session | None = None
    leaves: int = 0  # that it has computed
    _workers: int = 0
    _work: Timed | None = None
    _control: list[m.Message] = field(default_factory=list)

    @property
    def data(self) -> bytes:
        """The transport's name of its worker's connection."""
        return f"{self.name}#{self._workers}".encode()

    def register(self) -> None:
        """Asks to take part."""
        self._control.append(m.Register(m.PROTOCOL_VERSION, self.name, 0, {}))

    def beat(self) -> None:
        """Sends a heartbeat, once it takes part."""
        if self.session is not None:
            self._control.append(m.Heartbeat(self.session.id, WORKER_PID, serving=True))

    def hear(self, channel: str, peer: bytes, frames: Frames) -> None:
        """Takes one message; one to an earlier worker is lost."""
        message, payload = decode(frames)
        if channel == CONTROL:
            self._hear_control(message)
        elif peer == self.data and self.session is not None:
            self.session.handle(message, payload)

    def _hear_control(self, message: m.Message) -> None:
        match message:
            case m.Accept(session=session):
                self._workers, self._work = self._workers + 1, None
                self.session = Session(self.name, session)
                self.session.say(m.Hello(session, self.versions))
            case m.Stale(over=True) | m.Restart():
                self.session = None
                self.register()

    def said(self) -> list[Said]:
        """Returns the messages that it sends now."""
        control, self._control = self._control, []
        said: list[Said] = [(CONTROL, self.name.encode(), message, b"") for message in control]
        if self.session is not None:
            said += [(DATA, self.data, message, payload) for message, payload in self.session.take_outgoing()]
        return said

    @property
    def waits_for_work(self) -> bool:
        """True if a job waits and none is in work."""
        return self._work is None and self.session is not None and bool(self.session.jobs)

    def begin(self) -> None:
        """Begins the next job."""
        assert self.session is not None
        self._work = self._perform(self.session.next_job(), self.session.id)

    def next_result(self) -> tuple[float, Result] | None:
        """Returns the next result of the job in work, and the seconds until it is there; None at the job's end."""
        assert self.session is not None
        assert self._work is not None
        needed = self.session.computing is None or self.session.needed(self.session.computing)
        found = next(self._work, None) if needed else None
        if found is None:
            self._work = None
            self.session.done()
        return found

    def deliver(self, result: Result) -> None:
        """Hands a result to the session."""
        assert self.session is not None
        self.session.deliver(result)

    def _perform(self, job: Job, session: m.SessionId) -> Timed:
        match job:
            case LoadModel():
                manifest = (m.TensorSpec("layers.0.lora", (self.elements,)),)
                yield self.load_seconds, (m.Loaded(session, "none", manifest), b"")
            case ComputeCanary():
                yield 0.0, (m.CanaryAnswer(session, ("0" * 64,) * CANARY_TIMES), b"")
            case ComputeAssignment():
                yield from self._compute(job, session)
            case Finish():
                self.there = False

    def _compute(self, job: ComputeAssignment, session: m.SessionId) -> Timed:
        asked = job.assignment
        span = Span(asked.start, asked.stop)
        gradient = asked.verb == "gradient"
        for piece in subtrees(asked.total, span) if gradient else [span]:
            for leaf in range(piece.start, piece.stop):
                seconds = self.leaf_seconds(job.leaves[leaf - asked.start].tokens)
                place = (asked.step, asked.attempt, asked.adapter_version, leaf)
                self.leaves += 1
                yield seconds, (m.LeafAnswer(session, *place, 1, seconds, 0), ROW_OUTPUTS)
            if gradient:
                if len(piece) not in self.partials:
                    self.partials[len(piece)] = np.full(self.elements, np.float32(len(piece)))
                yield 0.0, Partial(asked, piece, self.partials[len(piece)])
