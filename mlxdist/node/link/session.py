"""The worker's half of the data connection: messages in, jobs and messages out. No socket, no thread, no mlx.

Welcome -> LoadModel          ModelFiles -> FetchModel          FileBlock -> TakeBlock
Canary -> ComputeCanary          Ping -> Pong
VectorOffer, VectorBlock, VectorEnd -> a new adapter version, or the reference's adapter
Assignment, LeafRows -> ComputeAssignment, as soon as all rows and the adapter version are here
Credit -> blocks of a partial; Received -> the partial is forgotten, or offered again
Cancel -> an assignment is dropped

The way out is in outgoing.py.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from mlxdist.node.link.jobs import (
    ComputeAssignment,
    ComputeCanary,
    FetchModel,
    Finish,
    Job,
    LoadModel,
    Partial,
    Result,
    RowInputs,
    TakeBlock,
)
from mlxdist.node.link.outgoing import Outgoing
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MismatchError, WireError
from mlxdist.protocol.leaves import Leaf, unpack_leaf
from mlxdist.protocol.model_files import WINDOW
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import IncomingVector, Vector
from mlxdist.protocol.wire import Buffer

MOST_VECTORS = 8  # on their way down at once; a coordinator of ours sends two
MOST_JOBS = 65_536  # that wait, of one step
MOST_ROW_BYTES = 1 << 30  # of their rows
INPUT_BYTES = 32  # of one row input


@dataclass
class _Arriving:
    """An assignment that waits for rows or for its adapter."""

    assignment: m.Assignment
    rows: dict[int, tuple[Leaf, RowInputs]] = field(default_factory=dict)  # by leaf
    row_bytes: int = 0


@dataclass
class Session:
    """The state of one worker's session with one coordinator."""

    name: str
    id: m.SessionId
    elements: int = 0  # of the adapter; known when the model is loaded
    spec: m.RunSpec | None = None
    jobs: deque[Job] = field(default_factory=deque)
    computing: int | None = None  # the attempt of the assignment in work
    over: bool = False  # the coordinator does not know this session any more
    _cancelled: set[int] = field(default_factory=set)
    _adapters: dict[int, Vector] = field(default_factory=dict)
    _reference: Vector | None = None
    _reference_damaged: bool = False  # it is sent again; until then the base would be used, so nothing is computed
    _incoming: dict[int, tuple[m.VectorOffer, IncomingVector]] = field(default_factory=dict)
    _arriving: deque[_Arriving] = field(default_factory=deque)
    _row_bytes: int = 0  # of all assignments that wait
    _growing: int | None = None  # the stream of the partial that is not whole yet
    outgoing: Outgoing = field(init=False)

    def __post_init__(self) -> None:
        self.outgoing = Outgoing(self.id)

    def say(self, message: m.Message, payload: Buffer = b"") -> None:
        """Queues a message for the coordinator, unless it does not know this session any more."""
        if not self.over:
            self.outgoing.say(message, payload)

    def end(self) -> None:
        """Ends the session: nothing of it is sent or begun any more."""
        self.over = True
        self.outgoing.close()
        self._incoming.clear()
        self._arriving.clear()
        self.jobs.clear()

    def next_job(self) -> Job:
        """Takes the next job; an assignment counts as being computed until `done`."""
        job = self.jobs.popleft()
        self.computing = None
        if isinstance(job, ComputeAssignment):
            self.computing = job.assignment.attempt
            self._row_bytes -= job.row_bytes
        return job

    def needed(self, attempt: int) -> bool:
        """Returns True while the coordinator waits for the answers of this attempt."""
        return not self.over and attempt not in self._cancelled

    def deliver(self, result: Result) -> bool:
        """Queues one result of the job in work. Returns False when the rest of an assignment is not needed any more."""
        if isinstance(result, Partial):
            self._deliver_partial(result)
        else:
            message, payload = result
            if isinstance(message, m.Loaded):
                self.elements = manifests.size(message.manifest)
            if isinstance(message, m.Fault):
                self._withdraw()  # before the coordinator hears why
            self.say(message, payload)
        return self.computing is None or self.needed(self.computing)

    def done(self) -> None:
        """Ends the job in work, complete or not; the coordinator is told if it had cancelled it."""
        self._withdraw()
        if self.computing in self._cancelled:
            assert self.computing is not None
            self._cancelled.discard(self.computing)
            self.say(m.Cancel(self.id, self.computing))
        self.computing = None

    def take_outgoing(self) -> Iterator[tuple[m.Message, Buffer]]:
        """Yields the messages to send now, each once: the queued ones, then the blocks that have credit."""
        return self.outgoing.take()

    def _deliver_partial(self, partial: Partial) -> None:
        """Offers a partial, or continues the one that grows; its blocks go when the coordinator has room."""
        if self._growing is not None:
            self.outgoing.grow(self._growing, partial.ready)
        else:
            offer = m.VectorOffer(
                session=self.id,
                stream=0,
                kind="partial",
                adapter_version=partial.assignment.adapter_version,
                elements=len(partial.vector),
                step=partial.assignment.step,
                attempt=partial.assignment.attempt,
                start=partial.span.start,
                stop=partial.span.stop,
                slice_stop=len(partial.vector),
            )
            self._growing = self.outgoing.offer(offer, partial.vector, partial.ready)
        if partial.ready is None:
            self._growing = None

    def _withdraw(self) -> None:
        if self._growing is not None:
            self.outgoing.drop(self._growing)
            self._growing = None

    @property
    def uploading(self) -> bool:
        """True while a partial, or a message, still waits to be sent."""
        return self.outgoing.waiting

    def handle(self, message: m.Message, payload: memoryview) -> None:
        """Takes one message; another session's changes nothing. Raises WireError for one that makes no sense here."""
        if isinstance(message, m.Reject):
            self._add(Finish(message.reason, refused=True))
            return
        if getattr(message, "session", None) != self.id or self.over:
            return
        match message:
            case m.Welcome(spec=spec):
                self.spec = spec
                self._add(LoadModel(spec))
            case m.ModelFiles(files=files):
                self._add(FetchModel(files))
            case m.FileBlock():
                if sum(isinstance(job, TakeBlock) for job in self.jobs) >= WINDOW:
                    raise WireError(f"more than {WINDOW} blocks of files that were not asked for")
                self._add(TakeBlock(message, payload))
            case m.Ping():
                self.say(m.Pong(self.id))
            case m.Canary():
                self._add(ComputeCanary())
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
                self._take_assignment(message)
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
                self._add(Finish(reason, refused=False))
            case _:
                raise WireError(f"a worker is not sent {type(message).__name__}")

    def _add(self, job: Job) -> None:
        self._check_room()
        self.jobs.append(job)

    def _check_room(self) -> None:
        if len(self.jobs) + len(self._arriving) >= MOST_JOBS:
            raise WireError(f"more than {MOST_JOBS} jobs for one worker")

    def _cancel(self, attempt: int) -> None:
        """Drops an assignment: at once if it was not begun, otherwise at its next leaf or segment."""
        self.outgoing.drop_attempt(attempt)
        self._arriving = deque(one for one in self._arriving if one.assignment.attempt != attempt)
        self.jobs = deque(
            job for job in self.jobs if not (isinstance(job, ComputeAssignment) and job.assignment.attempt == attempt)
        )
        waiting = sum(job.row_bytes for job in self.jobs if isinstance(job, ComputeAssignment))
        self._row_bytes = waiting + sum(one.row_bytes for one in self._arriving)
        if attempt == self.computing:
            self._cancelled.add(attempt)
        else:
            self.say(m.Cancel(self.id, attempt))
        self._start_ready()

    def _accept_adapter(self, offer: m.VectorOffer) -> None:
        if offer.kind not in ("adapter", "reference") or offer.stream in self._incoming:
            raise WireError(f"a worker is not offered the {offer.kind} vector {offer.stream}")
        if len(self._incoming) >= MOST_VECTORS:
            raise WireError(f"more than {MOST_VECTORS} vectors on their way to one worker")
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

    def _take_assignment(self, asked: m.Assignment) -> None:
        if asked.verb not in ("gradient", "score") or not 0 <= asked.start < asked.stop <= asked.total:
            raise WireError(f"an assignment to {asked.verb} leaves {Span(asked.start, asked.stop)} of {asked.total}")
        self._check_room()
        self._arriving.append(_Arriving(asked))

    def _take_rows(self, message: m.LeafRows, payload: memoryview) -> None:
        for one in self._arriving:
            asked = one.assignment
            if (asked.step, asked.attempt) == (message.step, message.attempt) and (
                asked.start <= message.leaf < asked.stop
            ):
                size = payload.nbytes + INPUT_BYTES * sum(map(len, message.row_inputs.values()))
                if self._row_bytes + size > MOST_ROW_BYTES:
                    raise WireError(f"more than {MOST_ROW_BYTES >> 20} MiB of rows for one worker")
                one.rows[message.leaf] = unpack_leaf(message, payload), message.row_inputs
                one.row_bytes += size
                self._row_bytes += size
                return
        raise WireError(f"rows of leaf {message.leaf}, which no assignment names")

    def _start_ready(self) -> None:
        """Moves assignments of which everything has arrived to the jobs, in their order."""
        while self._arriving:
            asked, rows = self._arriving[0].assignment, self._arriving[0].rows
            adapter = self._adapters.get(asked.adapter_version)
            if asked.adapter_version < max(self._adapters, default=-1):
                raise WireError(f"an assignment with adapter version {asked.adapter_version}, which was replaced")
            if adapter is None or len(rows) < asked.stop - asked.start:
                return
            if self._reference_damaged or any(offer.kind == "reference" for offer, _ in self._incoming.values()):
                return  # offered before the assignment, so the assignment needs it
            leaves, row_inputs = zip(*(rows[index] for index in range(asked.start, asked.stop)), strict=True)
            size = self._arriving.popleft().row_bytes
            self.jobs.append(ComputeAssignment(asked, leaves, row_inputs, adapter, self._reference, size))
