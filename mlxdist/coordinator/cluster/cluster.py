"""The coordinator's half of the protocol: messages in, messages and results out. No socket, no thread, no clock.

    Register -> Accept                 Hello -> Welcome       Loaded -> Canary       CanaryAnswer -> ready, adapter
    request -> Assignment, LeafRows  ...  LeafAnswer, VectorOffer -> Credit -> VectorBlock ... VectorEnd -> partial

The shell (coordinator/fleet/fleet.py) carries frames, asks for work and fetches results. Who takes part: membership.py; who
works on what: scheduler.py.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from mlxdist.coordinator.cluster.compatibility import check_model, check_versions
from mlxdist.coordinator.cluster.downloads import Downloads
from mlxdist.coordinator.cluster.membership import Membership
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.placement import Assigner
from mlxdist.coordinator.cluster.scheduler import TRIED_AGAIN, Scheduler
from mlxdist.coordinator.cluster.settings import NodeNews, Rules
from mlxdist.coordinator.cluster.uploads import DamagedError, Uploads
from mlxdist.coordinator.schedule.assign import assign
from mlxdist.coordinator.schedule.node_speeds import Transfers
from mlxdist.coordinator.schedule.rounds import Assignment, Request, Round, leaf_tokens
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import ConfigError, MismatchError, MlxdistError, NodeError, StaleError, WireError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.numerics import CANARY_TIMES
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import CONTROL, DATA, Parcel, is_probe
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Buffer, decode, encode

LEAST_SECONDS = 1e-6  # of a partial on its way
SPOILED = 5  # vectors of a worker that came with another hash, after which it is started anew


@dataclass
class Cluster:
    """All nodes and the round in work. `failure` is what the run cannot go on after."""

    rules: Rules
    assigner: Assigner = assign
    introduction: m.Loaded | None = None
    now: float = 0.0
    members: Membership = field(init=False)
    scheduler: Scheduler = field(init=False)
    _failure: MlxdistError | None = None
    _outbox: list[Parcel] = field(default_factory=list)
    _uploads: Uploads = field(default_factory=Uploads)
    _transfers: Transfers = field(default_factory=Transfers)
    _downloads: Downloads = field(init=False)
    _paused_at: float = 0.0

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.rules, self.assigner)
        self._downloads = Downloads(self._send, self._transfers)
        self.members = Membership(
            self.rules, self._send, self._on_lost, self._at_work, self._in_work, self.scheduler.survived
        )

    # ---- what the loop asks

    @property
    def nodes(self) -> dict[str, Node]:
        """All nodes by name, also those that are gone."""
        return self.members.nodes

    @property
    def news(self) -> deque[NodeNews]:
        """What a person may want to read, oldest first."""
        return self.members.news

    @property
    def round(self) -> Round | None:
        """The round in work, or the last one."""
        return self.scheduler.round

    @property
    def failure(self) -> MlxdistError | None:
        """What the run cannot go on after: a leaf that no node can compute, or nobody left."""
        return self._failure or self.scheduler.failure or self.members.hopeless

    @failure.setter
    def failure(self, error: MlxdistError | None) -> None:
        self._failure = self._failure or error

    @property
    def manifest(self) -> Manifest:
        """The adapter's tensors, as the first worker found them."""
        assert self.introduction is not None
        return self.introduction.manifest

    def ready(self) -> list[Node]:
        """The nodes that can work, in the order of their names."""
        return self.members.ready()

    def set_adapter(self, version: int, vector: Vector) -> None:
        """A new adapter: it starts on its way to every node that will work. `vector` must not change afterwards."""
        self._downloads.set_adapter(version, vector)
        for node in self.ready():
            if node.name not in self.scheduler.spare:  # a spare one gets it with its first leaf
                self._downloads.adapters_to(node, self.now)

    def set_reference(self, vector: Vector) -> None:
        """The reference's adapter, sent once per worker. `vector` must not change afterwards."""
        self._downloads.set_reference(vector)
        for node in self.ready():
            self._downloads.reference_to(node, self.now)

    def begin(self, request: Request) -> None:
        """Give the leaves of a request to the nodes that are ready; without any they wait for one."""
        self.scheduler.begin(request)
        self._uploads.limit = len(self.ready()) + 1
        self._uploads.reserve = 1 + (len(request.leaves) - 1).bit_length()
        self._place()

    def fetch_partials(self) -> list[tuple[Span, Vector]]:
        """The partials that have come since the last call. Each buffer counts as held until `release`."""
        if self.round is None:
            return []
        partials, self.round.partials = self.round.partials, []
        return partials

    def release(self, buffers: Iterable[Vector]) -> None:
        """Buffers that are summed away and may be filled again."""
        for buffer in buffers:
            self._uploads.release(buffer)
        self._admit_uploads()

    def goodbye(self, reason: str) -> None:
        """Tell every node that this run is over for it; nobody is admitted any more."""
        self.members.over = True
        for node in self.nodes.values():
            if not node.gone:
                bye = m.Shutdown(node.session, reason)
                if node.data is not None:
                    self._send(DATA, node.data, bye)
                self._send(CONTROL, node.control, bye)

    # ---- what the shell does

    def take_outgoing(self) -> list[Parcel]:
        """The frames to send now."""
        self._downloads.send_blocks(self.nodes)
        outgoing, self._outbox = self._outbox, []
        return outgoing

    def receive(self, parcel: Parcel, now: float) -> None:
        """Take one message. What cannot be accepted is answered, and changes nothing."""
        self.now = now
        if is_probe(parcel.frames):
            if parcel.channel == DATA and (node := self.members.by_data(parcel.peer)) is not None:
                self.members.begin_anew(node, "its data connection broke, and is there again", now)
            return
        try:
            message, payload = decode(parcel.frames)
        except WireError as error:
            self.news.append(NodeNews("coordinator", "", f"a message was refused: {error}", log=True))
            self._send(parcel.channel, parcel.peer, m.Reject(str(error)))
            return
        if isinstance(message, m.Register):
            if parcel.channel == CONTROL:
                self.members.enlist(message, parcel.peer, now)
            else:
                reason = "this is the data port of the run: --connect takes its control port"
                self._send(parcel.channel, parcel.peer, m.Reject(reason))
            return
        session = getattr(message, "session", None)
        node = self.members.by_session(session)
        if node is None:
            if isinstance(session, m.SessionId):
                self._send(parcel.channel, parcel.peer, m.Stale(session, type(message).__name__, over=True))
            return
        try:
            if parcel.channel == CONTROL:
                self.members.on_control(node, message, now)
            else:
                self._on_data(node, message, payload, parcel.peer)
        except StaleError as error:
            stream = message.stream if isinstance(message, m.VectorOffer | m.VectorBlock | m.VectorEnd) else 0
            self._send(parcel.channel, parcel.peer, m.Stale(node.session, str(error), stream))
        except (MismatchError, ConfigError) as error:
            self.members.turn_away(node, error)
        except (WireError, ValueError) as error:  # ValueError: the state table has no place for the message
            self.members.restart_worker(node, f"it sent what makes no sense: {error}")

    def tick(self, now: float) -> None:
        """Look at the clock: who is silent, who is stuck, what is late, whether a pause is over."""
        self.now = now
        self.members.tick(now)
        for node in list(self.nodes.values()):
            if self._uploads.stalled(node.name) and self._in_work(node) is None:
                node.progressed = now  # it waits for us
            if not node.gone and not node.spent and (idle := self.scheduler.stuck(node, now)) is not None:
                self.members.restart_worker(node, f"it did nothing for {idle:.3g} s")
        self._place()
        for assignment in self.scheduler.copy_late(self.ready(), now):
            slow = next(
                one for one in self._current().assignments.values() if not one.copy and one.missing & assignment.missing
            )
            what = f"leaves {assignment.span} take long there"
            self.members.tell(self.nodes[slow.node], what, f"{assignment.node} computes them too")
            self._send_work(assignment)

    def slept(self, gap: float, asleep: float, now: float) -> None:
        """This process did nothing, for seconds that its clock shows and others that it does not (sleep_detector.py).

        That time is held against nobody, and measures nothing.
        """
        self.members.slept(gap, asleep, now)
        self._transfers.forget()
        for assignment in self.round.assignments.values() if self.round is not None else ():
            assignment.began = now if asleep else min(assignment.began + gap, now)

    def unreachable(self, parcel: Parcel, now: float) -> None:
        """A message could not be sent."""
        self.members.unreachable(parcel.channel, parcel.peer, now)

    # ---- data

    def _on_data(self, node: Node, message: m.Message, payload: memoryview, peer: bytes) -> None:
        handlers: dict[type[m.Message], Callable[..., None]] = {
            m.Loaded: self._on_loaded,
            m.CanaryAnswer: self._on_canary,
            m.Fault: self._on_fault,
            m.VectorOffer: self._on_offer,
            m.VectorEnd: self._on_end,
        }
        if node.spent or (peer != node.data and not isinstance(message, m.Hello)):
            raise StaleError(f"{type(message).__name__} from another worker than {node.name}'s")
        node.progressed = self.now
        match message:
            case m.Hello():
                self._on_hello(node, message, peer)
            case m.Progress(message=sentence):
                self.members.tell(node, sentence)
            case m.Credit(stream=stream, upto=upto):
                self._downloads.credit(node.name, stream, upto)
            case m.Received(stream=stream, whole=whole):
                seconds, version = self._transfers.end("down", node.name, stream, self.now)
                if whole:
                    node.speed.sent_down(seconds)
                    node.adapter_here = max(node.adapter_here, version)
                else:
                    self._send_again(node)
            case m.Cancel(attempt=attempt):
                node.cancelled.discard(attempt)
                self._place()
            case m.LeafAnswer():
                self._on_leaf(node, message, payload)
            case m.VectorBlock(stream=stream, index=index):
                self._credit(node, stream, self._uploads.block(node.name, stream, index, payload))
            case _ if type(message) in handlers:
                handlers[type(message)](node, message)
            case _:
                raise WireError(f"{type(message).__name__} on the data connection")

    def _on_hello(self, node: Node, message: m.Hello, peer: bytes) -> None:
        if node.data == peer and node.state is NodeState.LOADING:
            return  # said again while the welcome was on its way
        if node.data is not None:
            self.members.begin_anew(node, "its worker said hello again", self.now)
            return
        node.move(NodeEvent.WORKER_HELLO)
        node.data, node.versions = peer, message.versions
        check_versions(node.name, self.rules.versions, message.versions)
        self.members.tell(node, "loading the model")
        self._send(DATA, peer, m.Welcome(node.session, self.rules.spec))

    def _on_loaded(self, node: Node, message: m.Loaded) -> None:
        if node.state is not NodeState.LOADING:
            raise WireError("a model was loaded twice")
        if self.introduction is None:
            self.introduction = message
        check_model(node.name, self.introduction, message)
        assert node.data is not None
        self._send(DATA, node.data, m.Canary(node.session))

    def _on_canary(self, node: Node, message: m.CanaryAnswer) -> None:
        if len(message.digests) != CANARY_TIMES:
            raise WireError(f"{len(message.digests)} canary answers where {CANARY_TIMES} were due")
        node.move(NodeEvent.CANARY_ANSWERED)
        node.canary, node.early_exits = message.digests, 0
        self.members.tell(node, "ready")
        self._downloads.adapters_to(node, self.now)
        self._place()

    def _on_fault(self, node: Node, message: m.Fault) -> None:
        if message.kind == "nonfinite" and message.leaf >= 0:
            span = Span(message.leaf, message.leaf + 1)
            assignment = self._current().check(node.name, message.step, message.attempt, self._version(), span)
            self.members.tell(node, self.scheduler.nonfinite(assignment, message.leaf), "computed once more")
            self._settle()
        elif node.state is NodeState.LOADING:
            kind = ConfigError if message.kind == "config" else NodeError
            self.members.turn_away(node, kind(f"{node.name}: {message.message}"))
        else:
            self.members.restart_worker(node, message.message)

    def _on_leaf(self, node: Node, message: m.LeafAnswer, payload: memoryview) -> None:
        current = self._current()
        span = Span(message.leaf, message.leaf + 1)
        assignment = current.check(node.name, message.step, message.attempt, message.adapter_version, span)
        leaf = current.request.leaves[message.leaf]
        rows = len(leaf.rows) // len(leaf.widths)
        if message.columns < 1 or payload.nbytes != 4 * rows * message.columns:
            what = f"{payload.nbytes} bytes in {message.columns} columns for {rows} rows"
            raise WireError(f"the answer to leaf {message.leaf} has {what}")
        numbers = np.frombuffer(payload, np.float32).reshape(rows, message.columns)
        if current.request.verb == "score" and not np.isfinite(numbers).all() and message.leaf not in current.nonfinite:
            # The same again is what it is, and for whoever asked: a validation loss may be infinite, KTO's z0 may not.
            self.members.tell(node, self.scheduler.nonfinite(assignment, message.leaf), "computed once more")
            self._after_result([assignment])
            return
        done = current.answer(assignment, message.leaf, numbers)
        node.leaves_done += 1
        node.peak_bytes = max(node.peak_bytes, message.peak_bytes)
        tokens = leaf_tokens(leaf)
        self.scheduler.deadlines.took(sum(tokens), max(tokens), message.seconds)
        node.speed.leaf(current.request.verb, (sum(tokens), max(tokens)), message.seconds)
        for stream in self._uploads.arriving(node.name, message.leaf + 1):  # it left while the leaf was in work
            self._transfers.begin("up", node.name, stream, self.now)
        self._after_result(done)

    def _on_offer(self, node: Node, offer: m.VectorOffer) -> None:
        current = self._current()
        span = Span(offer.start, offer.stop)
        assignment = current.check(node.name, offer.step, offer.attempt, offer.adapter_version, span)
        elements = manifests.size(self.manifest)
        if offer.kind != "partial" or (offer.elements, offer.slice_start, offer.slice_stop) != (elements, 0, elements):
            raise MismatchError(f"{node.name} offers a vector that is not of this run's manifest ({elements} elements)")
        if span not in assignment.missing:
            raise StaleError(f"the partial over {span} is not missing")
        self._uploads.offer(node.name, offer)
        self._transfers.begin("offer", node.name, offer.stream, self.now)
        self._admit_uploads()

    def _on_end(self, node: Node, message: m.VectorEnd) -> None:
        try:
            offer, vector = self._uploads.end(node.name, message.stream, message.digest)
        except DamagedError as error:
            self._spoiled(node)
            self.members.tell(node, str(error), "sent again")
            self._received(node, message.stream, whole=False)
            return
        since_credit = self._transfers.end("up", node.name, message.stream, self.now)[0]
        since_offer = self._transfers.end("offer", node.name, message.stream, self.now)[0]
        if message.grew:  # what left while its last leaf still computed costs the step nothing
            since_credit = max(min(since_credit, since_offer - message.grew), LEAST_SECONDS)
        node.speed.sent_up(since_credit)
        try:
            done = self._current().partial(offer.attempt, Span(offer.start, offer.stop), vector)
        except StaleError:
            self._uploads.release(vector)
            raise
        self._received(node, message.stream, whole=True)
        self._after_result(done)

    # ---- helpers

    def _current(self) -> Round:
        if self.round is None:
            raise StaleError("no step is in work")
        return self.round

    def _version(self) -> int:
        return self._current().request.adapter_version

    def _needed(self, offer: m.VectorOffer) -> bool:
        return self.round is not None and self.round.misses(offer.attempt, Span(offer.start, offer.stop))

    def _at_work(self, node: Node) -> bool:
        return self.round is not None and not self.round.finished(node.name)

    def _in_work(self, node: Node) -> Leaf | None:
        return self.round.in_work(node.name) if self.round is not None else None

    def _place(self) -> None:
        paused, there = self.scheduler.paused, sum(node.there for node in self.nodes.values())
        for assignment in self.scheduler.place(self.ready(), there, self.now):
            self._send_work(assignment)
        while self.scheduler.left_out:
            name, why = self.scheduler.left_out.popleft()
            action = (
                f"it gets no leaves for now, stays as a spare and is tried again at least every {TRIED_AGAIN} steps"
            )
            self.members.tell(self.nodes[name], why, action)
        if self.scheduler.paused != paused:
            what = f"{there} of at least {self.rules.min_nodes} nodes can work"
            if self.scheduler.paused:
                self._paused_at = self.now
                news = NodeNews("", "paused", f"paused: {what}", action="waiting for more")
            else:
                seconds = self.now - self._paused_at
                news = NodeNews("", "training", f"going on after {seconds:.3g} s: {what}", seconds=seconds)
            self.news.append(news)

    def _after_result(self, done: Iterable[Assignment]) -> None:
        """Something came: what nobody needs any more is cancelled."""
        for assignment in done:
            loser = self.nodes[assignment.node]
            if loser.data is not None:
                loser.cancelled.add(assignment.attempt)
                self._send(DATA, loser.data, m.Cancel(loser.session, assignment.attempt))
        self._settle()

    def _settle(self) -> None:
        """Something came, or was lost: who has finished is ready, what is pending and what waits goes on its way."""
        for node in self.nodes.values():
            if node.state is NodeState.BUSY and not self._at_work(node):
                node.move(NodeEvent.FINISHED)
        for name, stream in self._uploads.not_needed(self._needed):
            other = self.nodes[name]
            for kind in ("up", "offer"):
                self._transfers.end(kind, name, stream, self.now)
            if other.data is not None:
                self._send(DATA, other.data, m.Stale(other.session, "another node was faster", stream))
        self._place()
        self._admit_uploads()

    def _on_lost(self, node: Node, blame: bool) -> list[Span]:
        """The node's worker is gone: half partials are thrown away, what it had is given to others."""
        spans = self.scheduler.lost(node.name, blame)
        self._downloads.drop(node.name)
        self._uploads.drop(node.name)
        self._transfers.drop(node.name)
        self._settle()
        return spans

    def _send_again(self, node: Node) -> None:
        """An adapter arrived damaged: both go once more."""
        if not node.has_reference and node.adapter_version < 0:
            raise WireError("no adapter was sent to it")
        self._spoiled(node)
        self.members.tell(node, "an adapter arrived damaged there", "sent again")
        node.adapter_version, node.has_reference = -1, False
        self._downloads.adapters_to(node, self.now)

    def _spoiled(self, node: Node) -> None:
        node.spoiled += 1
        if node.spoiled > SPOILED:
            raise WireError(f"{node.spoiled} vectors arrived damaged")

    def _admit_uploads(self) -> None:
        if self.round is not None:
            for name, stream, upto in self._uploads.admit(self.round.lowest_missing):
                self._transfers.begin("up", name, stream, self.now)
                self._credit(self.nodes[name], stream, upto)

    def _credit(self, node: Node, stream: int, upto: int) -> None:
        assert node.data is not None
        self._send(DATA, node.data, m.Credit(node.session, stream, upto))

    def _received(self, node: Node, stream: int, *, whole: bool) -> None:
        assert node.data is not None
        self._send(DATA, node.data, m.Received(node.session, stream, whole))

    def _send_work(self, assignment: Assignment) -> None:
        node = self.nodes[assignment.node]
        self._downloads.work_to(node, self._current().request, assignment, self.now)
        node.move(NodeEvent.ASSIGNED)

    def _send(self, channel: str, peer: bytes, message: m.Message, payload: Buffer = b"") -> None:
        self._outbox.append(Parcel(channel, peer, encode(message, payload)))
