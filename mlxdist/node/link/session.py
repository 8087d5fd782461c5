"""The worker's half of the data connection: messages in, work and messages out. No socket, no thread, no mlx.

Welcome -> LoadModel          Canary -> ComputeCanary
VectorOffer, VectorBlock, VectorEnd -> a new adapter version, or the reference's adapter
Assignment, LeafRows -> ComputeLeaves, as soon as all rows and the adapter version are here
Credit -> blocks of a partial; Received -> it may be forgotten, or is offered again
Cancel -> an assignment is dropped

What leaves again is in outgoing.py.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mlxdist.node.link.outgoing import Growing, Outgoing
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.leaves import Leaf, unpack_leaf
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import IncomingVector, Vector
from mlxdist.protocol.wire import Buffer


@dataclass(frozen=True)
class LoadModel:
    """Load the model of this run."""

    spec: m.RunSpec


@dataclass(frozen=True)
class ComputeCanary:
    """Compute the canary leaf."""


@dataclass(frozen=True)
class ComputeLeaves:
    """Work on one assignment; `row_inputs[leaf]` are the per-row inputs of the loss."""

    task: m.Assignment
    leaves: tuple[Leaf, ...]
    row_inputs: tuple[dict[str, tuple[float, ...]], ...]
    adapter: Vector
    reference: Vector | None  # the reference's adapter; None: the base


@dataclass(frozen=True)
class Finish:
    """The coordinator has said goodbye, or refused this node."""

    reason: str
    refused: bool


Work = LoadModel | ComputeCanary | ComputeLeaves | Finish


@dataclass
class _Assignment:
    task: m.Assignment
    leaves: dict[int, Leaf] = field(default_factory=dict)
    row_inputs: dict[int, dict[str, tuple[float, ...]]] = field(default_factory=dict)


@dataclass
class Session:
    """One worker's dealings with one coordinator."""

    name: str
    id: m.SessionId
    elements: int = 0  # of the adapter; known when the model is loaded
    spec: m.RunSpec | None = None
    work: deque[Work] = field(default_factory=deque)
    computing: int | None = None  # the attempt that the engine works on
    over: bool = False  # the coordinator does not know this life any more
    _cancelled: set[int] = field(default_factory=set)
    _adapters: dict[int, Vector] = field(default_factory=dict)
    _reference: Vector | None = None
    _reference_damaged: bool = False  # it comes again; until then nothing is computed, for the base would be taken
    _incoming: dict[int, tuple[m.VectorOffer, IncomingVector]] = field(default_factory=dict)
    _assignments: deque[_Assignment] = field(default_factory=deque)
    outgoing: Outgoing = field(init=False)

    def __post_init__(self) -> None:
        self.outgoing = Outgoing(self.id)

    def say(self, message: m.Message, payload: Buffer = b"") -> None:
        """Queue a message for the coordinator; one that does not know this life any more is not told anything."""
        if not self.over:
            self.outgoing.say(message, payload)

    def end(self) -> None:
        """This life is over: nothing of it is sent or begun any more."""
        self.over = True
        self.outgoing.close()
        self._incoming.clear()
        self._assignments.clear()
        self.work.clear()

    def next_work(self) -> Work:
        """Take the next piece of work; an assignment counts as being computed until `done`."""
        work = self.work.popleft()
        self.computing = work.task.attempt if isinstance(work, ComputeLeaves) else None
        return work

    def needed(self, attempt: int) -> bool:
        """Whether somebody still waits for the answers of this attempt."""
        return not self.over and attempt not in self._cancelled

    def done(self) -> None:
        """The engine has let go of its work; the coordinator is told when it had asked for that."""
        if self.computing in self._cancelled:
            assert self.computing is not None
            self._cancelled.discard(self.computing)
            self.say(m.Cancel(self.id, self.computing))
        self.computing = None

    def take_outgoing(self) -> Iterator[tuple[m.Message, Buffer]]:
        """The messages to send now, each once: what was said, then the blocks that have credit."""
        return self.outgoing.take()

    def offer_partial(self, task: m.Assignment, span: Span, vector: Vector, *, growing: bool = False) -> Growing:
        """Announce the sum over one subtree; its blocks go when the coordinator has room.

        `growing`: no element is final yet; what is returned says later how far they are, and whether it counts.
        """
        offer = m.VectorOffer(
            session=self.id,
            stream=0,
            kind="partial",
            adapter_version=task.adapter_version,
            elements=len(vector),
            step=task.step,
            attempt=task.attempt,
            start=span.start,
            stop=span.stop,
            slice_stop=len(vector),
        )
        return self.outgoing.offer(offer, vector, ready=0 if growing else None)

    @property
    def uploading(self) -> bool:
        """Whether a partial, or a message, still waits to be sent."""
        return self.outgoing.waiting

    def handle(self, message: m.Message, payload: memoryview) -> None:
        """Take one message. Another life's changes nothing; raises WireError for one that makes no sense here."""
        if isinstance(message, m.Reject):
            self.work.append(Finish(message.reason, refused=True))
            return
        if getattr(message, "session", None) != self.id or self.over:
            return
        match message:
            case m.Welcome(spec=spec):
                self.spec = spec
                self.work.append(LoadModel(spec))
            case m.Canary():
                self.work.append(ComputeCanary())
            case m.VectorOffer():
                self._accept_adapter(message)
            case m.VectorBlock(stream=stream, index=index):
                _, vector = self._stream(stream)
                vector.block(index, payload)
                self.say(m.Credit(self.id, stream, vector.upto))
            case m.VectorEnd(stream=stream, digest=digest):
                offer, vector = self._stream(stream)
                del self._incoming[stream]
                try:
                    vector.end(digest)
                except WireError:
                    self._reference_damaged |= offer.kind == "reference"
                    self.say(m.Received(self.id, stream, whole=False))  # it is offered again
                    return
                self.say(m.Received(self.id, stream, whole=True))
                if offer.kind == "reference":
                    self._reference, self._reference_damaged = vector.buffer, False
                elif offer.adapter_version >= max(self._adapters, default=-1):  # a late older one changes nothing
                    self._adapters = {offer.adapter_version: vector.buffer}
                self._start_ready()
            case m.Assignment():
                self._take_task(message)
            case m.LeafRows():
                self._take_rows(message, payload)
                self._start_ready()
            case m.Credit(stream=stream, upto=upto):
                self.outgoing.credit(stream, upto)
            case m.Cancel(attempt=attempt):
                self._cancel(attempt)
            case m.Received(stream=stream, whole=whole):
                self.outgoing.received(stream, whole)
            case m.Stale(over=True):
                self.end()
            case m.Stale(stream=stream):
                self.outgoing.drop(stream)
            case m.Shutdown(reason=reason):
                self.work.append(Finish(reason, refused=False))
            case _:
                raise WireError(f"a worker is not sent {type(message).__name__}")

    def _cancel(self, attempt: int) -> None:
        """Drop what was not begun, and say so at once; what is being computed ends at its next leaf or segment."""
        self.outgoing.drop_attempt(attempt)
        self._assignments = deque(one for one in self._assignments if one.task.attempt != attempt)
        self.work = deque(
            one for one in self.work if not (isinstance(one, ComputeLeaves) and one.task.attempt == attempt)
        )
        if attempt == self.computing:
            self._cancelled.add(attempt)
        else:
            self.say(m.Cancel(self.id, attempt))
        self._start_ready()

    def _accept_adapter(self, offer: m.VectorOffer) -> None:
        if offer.kind not in ("adapter", "reference") or offer.stream in self._incoming:
            raise WireError(f"a worker is not offered the {offer.kind} vector {offer.stream}")
        if (offer.elements, offer.slice_start, offer.slice_stop) != (self.elements, 0, self.elements):
            raise MismatchError(
                f"{self.name}: offered elements {Span(offer.slice_start, offer.slice_stop)} of a vector of "
                f"{offer.elements}; this model's adapter has {self.elements}"
            )
        vector = IncomingVector(offer.stream, np.empty(self.elements, np.float32))
        self._incoming[offer.stream] = (offer, vector)
        self.say(m.Credit(self.id, offer.stream, vector.upto))

    def _stream(self, stream: int) -> tuple[m.VectorOffer, IncomingVector]:
        try:
            return self._incoming[stream]
        except KeyError:
            raise WireError(f"a block of vector {stream}, which was not offered") from None

    def _take_task(self, task: m.Assignment) -> None:
        if task.verb not in ("gradient", "score") or not 0 <= task.start < task.stop <= task.total:
            raise WireError(f"a task to {task.verb} leaves {Span(task.start, task.stop)} of {task.total}")
        self._assignments.append(_Assignment(task))

    def _take_rows(self, message: m.LeafRows, payload: memoryview) -> None:
        for assignment in self._assignments:
            task = assignment.task
            if (task.step, task.attempt) == (message.step, message.attempt) and task.start <= message.leaf < task.stop:
                assignment.leaves[message.leaf] = unpack_leaf(message, payload)
                assignment.row_inputs[message.leaf] = message.row_inputs
                return
        raise WireError(f"rows of leaf {message.leaf}, which no task names")

    def _start_ready(self) -> None:
        while self._assignments:
            task = self._assignments[0].task
            adapter = self._adapters.get(task.adapter_version)
            indices = range(task.start, task.stop)
            if task.adapter_version < max(self._adapters, default=-1):
                raise WireError(f"a task with adapter version {task.adapter_version}, which was replaced")
            if adapter is None or len(self._assignments[0].leaves) < len(indices):
                return
            if self._reference_damaged or any(offer.kind == "reference" for offer, _ in self._incoming.values()):
                return  # offered before the task, so the task is to be done with it
            ready = self._assignments.popleft()
            leaves = tuple(ready.leaves[index] for index in indices)
            row_outputs = tuple(ready.row_inputs[index] for index in indices)
            self.work.append(ComputeLeaves(task, leaves, row_outputs, adapter, self._reference))
