"""The coordinator's half of the protocol: messages in, messages and results out. No socket, no thread, no clock.

    Enlist -> Admit                 Hello -> Welcome       Loaded -> Canary       CanaryAnswer -> ready, adapter
    request -> Task, LeafRows  ...  LeafAnswer, VectorOffer -> Credit -> VectorBlock ... VectorEnd -> partial

The shell (coordinator/fleet.py) carries frames, asks for work and fetches results.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mlxdist.coordinator.assign import assign
from mlxdist.coordinator.hosts import NAME
from mlxdist.coordinator.roster import Node, speeds
from mlxdist.coordinator.rounds import Request, Round, begin_round, leaf_tokens
from mlxdist.coordinator.uploads import Uploads
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import (
    ConfigError,
    MismatchError,
    MlxdistError,
    NodeError,
    NonFiniteError,
    StaleError,
    WireError,
)
from mlxdist.protocol.leaves import pack_leaf
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.numerics import CANARY_TIMES, WORKER_ENVIRONMENT
from mlxdist.protocol.states import NodeEvent, NodeState
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import OutgoingVector, Vector, digest
from mlxdist.protocol.wire import Buffer, decode, encode

PARTIAL_SECONDS = 0.01  # what one more partial per step is taken to cost, until links are measured


@dataclass(frozen=True)
class Rules:
    """What the cluster is told once: the run, and the constants of its dealings with nodes."""

    run: str
    incarnation: int
    spec: m.RunSpec
    versions: dict[str, str]
    data_port: int
    beat_seconds: float
    suspect_seconds: float
    dead_seconds: float


@dataclass(frozen=True)
class NodeNews:
    """Something about a node that a person may want to read; a `log` line is one that its worker printed."""

    name: str
    state: str
    message: str
    log: bool = False


@dataclass
class Cluster:
    """All nodes and the round in work. `failure` is what the run cannot go on after."""

    rules: Rules
    split: Callable[[Sequence[float], Mapping[str, float], float], dict[str, Span]] = assign
    nodes: dict[str, Node] = field(default_factory=dict)
    introduction: m.Loaded | None = None
    round: Round | None = None
    failure: MlxdistError | None = None
    news: deque[NodeNews] = field(default_factory=deque)
    _outbox: list[Parcel] = field(default_factory=list)
    _uploads: Uploads = field(default_factory=Uploads)
    _downloads: dict[tuple[str, int], OutgoingVector] = field(default_factory=dict)
    _adapter: tuple[int, Vector, str] | None = None  # version, values, digest
    _reference: tuple[Vector, str] | None = None
    _over: bool = False
    _sessions: int = 0
    _streams: int = 0
    _attempts: int = 0

    # ---- what the loop asks

    @property
    def manifest(self) -> Manifest:
        """The adapter's tensors, as the first worker found them."""
        assert self.introduction is not None
        return self.introduction.manifest

    def ready(self) -> list[Node]:
        """The nodes that can work, in the order of their names."""
        return [node for _, node in sorted(self.nodes.items()) if node.works]

    def set_adapter(self, version: int, vector: Vector) -> None:
        """A new adapter: it starts on its way to every node that can work. `vector` must not change afterwards."""
        self._adapter = (version, vector, digest(vector))
        for node in self.ready():
            self._send_adapter(node)

    def set_reference(self, vector: Vector) -> None:
        """The reference's adapter, sent once per worker. `vector` must not change afterwards."""
        self._reference = (vector, digest(vector))
        for node in self.ready():
            self._send_reference(node)

    def begin(self, request: Request) -> None:
        """Give the leaves of a request to the nodes that are ready."""
        assert self.round is None or self.round.complete, "one round at a time"
        if not (nodes := self.ready()):
            raise NodeError("no node is ready to work")
        self._attempts += 1
        runs = self.split(request.costs, speeds(nodes), PARTIAL_SECONDS)
        self.round = begin_round(self.round, request, self._attempts, runs)
        self._uploads.limit, self._uploads.reserve = len(nodes) + 1, 1 + (len(request.leaves) - 1).bit_length()
        for name, run in runs.items():
            self._send_work(self.nodes[name], self.round, run)

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
        self._over = True
        for node in self.nodes.values():
            if node.state not in (NodeState.DEAD, NodeState.LEFT):
                bye = m.Bye(node.life, reason)
                if node.data is not None:
                    self._send(DATA, node.data, bye)
                self._send(CONTROL, node.control, bye)

    # ---- what the shell does

    def take_outgoing(self) -> list[Parcel]:
        """The frames to send now."""
        for (name, stream), download in list(self._downloads.items()):
            node = self.nodes[name]
            assert node.data is not None
            for index, block in download.blocks():
                self._send(DATA, node.data, m.VectorBlock(node.life, stream, index), block)
            if download.all_sent:
                del self._downloads[name, stream]
                self._send(DATA, node.data, m.VectorEnd(node.life, stream, download.end()))
        outgoing, self._outbox = self._outbox, []
        return outgoing

    def receive(self, parcel: Parcel, now: float) -> None:
        """Take one message. What cannot be accepted is answered, and changes nothing."""
        try:
            message, payload = decode(parcel.frames)
        except WireError as error:
            self.news.append(NodeNews("coordinator", "", f"a message was refused: {error}", log=True))
            self._send(parcel.channel, parcel.peer, m.Refuse(str(error)))
            return
        if isinstance(message, m.Enlist):
            if parcel.channel == CONTROL:
                self._enlist(message, parcel.peer, now)
            else:
                reason = "this is the data port of the run: --connect takes its control port"
                self._send(parcel.channel, parcel.peer, m.Refuse(reason))
            return
        life = getattr(message, "life", None)
        node = next((one for one in self.nodes.values() if one.life == life), None)
        if node is None:
            if isinstance(life, m.Life):
                self._send(parcel.channel, parcel.peer, m.Stale(life, type(message).__name__, over=True))
            return
        try:
            if parcel.channel == CONTROL:
                self._on_control(node, message, now)
            else:
                self._on_data(node, message, payload, parcel.peer)
        except StaleError as error:
            stream = message.stream if isinstance(message, m.VectorOffer | m.VectorBlock | m.VectorEnd) else 0
            self._send(parcel.channel, parcel.peer, m.Stale(node.life, str(error), stream))
        except MismatchError as error:
            self._send(parcel.channel, parcel.peer, m.Refuse(str(error)))
            self._fail(error)
        except (WireError, ValueError) as error:  # ValueError: the state table has no place for the message
            self._fail(NodeError(f"{node.name} sent what makes no sense: {error}"))

    def tick(self, now: float) -> None:
        """Look at the beats."""
        for node in self.nodes.values():
            silent = now - node.last_beat
            if node.state in (NodeState.DEAD, NodeState.LEFT):
                continue
            if silent > self.rules.dead_seconds:
                node.move(NodeEvent.LOST)
                self._forget_worker(node)
                self._fail(
                    NodeError(f"{node.name} has not been heard for {silent:.0f} s; look at its log, then run again")
                )
            elif silent > self.rules.suspect_seconds and node.works:
                node.move(NodeEvent.SILENT)
                self._tell(node, f"no beat for {silent:.0f} s")

    # ---- control

    def _enlist(self, message: m.Enlist, peer: bytes, now: float) -> None:
        if self._over:
            return
        if message.protocol != m.PROTOCOL_VERSION:
            reason = f"{message.name} speaks protocol {message.protocol}, the coordinator {m.PROTOCOL_VERSION}"
            self._send(CONTROL, peer, m.Refuse(f"{reason}: install the same mlxdist on both"))
            return
        if not NAME.fullmatch(message.name):  # it names a log file
            allowed = "letters, digits, points, dashes, underscores"
            reason = f"a node cannot be named {message.name[:80]!r}: --name takes {allowed}"
            self._send(CONTROL, peer, m.Refuse(reason))
            return
        known = self.nodes.get(message.name)
        if known is not None and known.state not in (NodeState.DEAD, NodeState.LEFT):
            if known.control != peer:
                self._send(
                    CONTROL,
                    peer,
                    m.Refuse(f"a node named {message.name!r} takes part already; give this one another name"),
                )
                return
        else:
            self._sessions += 1
            life = m.Life(self.rules.run, self.rules.incarnation, self._sessions)
            known = Node(message.name, life, peer, now, host=message.host)
            self.nodes[message.name] = known
            self._tell(known, "connected")
        admit = m.Admit(known.life, self.rules.data_port, self.rules.beat_seconds, WORKER_ENVIRONMENT)
        self._send(CONTROL, peer, admit)

    def _on_control(self, node: Node, message: m.Message, now: float) -> None:
        node.last_beat = now
        if node.state is NodeState.SUSPECT:
            busy = self.round is not None and not self.round.finished(node.name)
            node.move(NodeEvent.BEAT_AGAIN_BUSY if busy else NodeEvent.BEAT_AGAIN)
            self._tell(node, "beats again")
        match message:
            case m.Beat(count=count):
                self._send(CONTROL, node.control, m.Noted(node.life, count))
            case m.Log(lines=lines):
                self.news.extend(NodeNews(node.name, node.state.value, line, log=True) for line in lines)
            case m.WorkerExit(cause=cause, tail=tail):
                node.move(NodeEvent.WORKER_EXIT)
                self._forget_worker(node)
                last = "\n".join(f"  | {line}" for line in tail)
                self._fail(NodeError(f"{node.name}: {cause}" + (f"; its last lines:\n{last}" if last else "")))
            case m.Left():
                node.move(NodeEvent.BYE)
            case _:
                raise WireError(f"{type(message).__name__} on the control connection")

    # ---- data

    def _on_data(self, node: Node, message: m.Message, payload: memoryview, peer: bytes) -> None:
        handlers: dict[type[m.Message], Callable[..., None]] = {
            m.Loaded: self._on_loaded,
            m.CanaryAnswer: self._on_canary,
            m.Fault: self._on_fault,
            m.VectorOffer: self._on_offer,
            m.VectorEnd: self._on_end,
        }
        if peer != node.data and not isinstance(message, m.Hello):
            raise StaleError(f"{type(message).__name__} from another worker than {node.name}'s")
        match message:
            case m.Hello():
                self._on_hello(node, message, peer)
            case m.Progress(message=sentence):
                self._tell(node, sentence)
            case m.Credit(stream=stream, upto=upto):
                if download := self._downloads.get((node.name, stream)):
                    download.credit(upto)
            case m.LeafAnswer():
                self._on_leaf(node, message, payload)
            case m.VectorBlock(stream=stream, index=index):
                self._credit(node, stream, self._uploads.block(node.name, stream, index, payload))
            case _ if type(message) in handlers:
                handlers[type(message)](node, message)
            case _:
                raise WireError(f"{type(message).__name__} on the data connection")

    def _on_hello(self, node: Node, message: m.Hello, peer: bytes) -> None:
        for package, mine in self.rules.versions.items():
            theirs = message.versions.get(package, "absent")
            if theirs != mine:
                raise MismatchError(
                    f"{node.name} has {package} {theirs}, the coordinator {mine}: install the same version"
                )
        node.move(NodeEvent.WORKER_HELLO)
        node.data, node.versions = peer, message.versions
        self._tell(node, "loading the model")
        self._send(DATA, peer, m.Welcome(node.life, self.rules.spec))

    def _on_loaded(self, node: Node, message: m.Loaded) -> None:
        if node.state is not NodeState.LOADING:
            raise WireError("a model was loaded twice")
        if self.introduction is None:
            self.introduction = message
        elif message.model_hash != self.introduction.model_hash:
            raise MismatchError(
                f"{node.name} has another model: hash {message.model_hash[:12]}, the run's is "
                f"{self.introduction.model_hash[:12]}; copy the same files to it"
            )
        elif message.manifest != self.manifest:
            what = "; ".join(list(manifests.differences(self.manifest, message.manifest))[:3])
            raise MismatchError(f"{node.name} has another adapter manifest: {what}")
        assert node.data is not None
        self._send(DATA, node.data, m.Canary(node.life))

    def _on_canary(self, node: Node, message: m.CanaryAnswer) -> None:
        if len(message.digests) != CANARY_TIMES:
            raise WireError(f"{len(message.digests)} canary answers where {CANARY_TIMES} were due")
        node.move(NodeEvent.CANARY_ANSWERED)
        node.canary = message.digests
        self._tell(node, "ready")
        self._send_reference(node)
        if self._adapter is not None:
            self._send_adapter(node)

    def _on_fault(self, node: Node, message: m.Fault) -> None:
        kind = {"nonfinite": NonFiniteError, "config": ConfigError}.get(message.kind, NodeError)
        self._fail(kind(f"{node.name}: {message.message}"))

    def _on_leaf(self, node: Node, message: m.LeafAnswer, payload: memoryview) -> None:
        current = self._current()
        span = Span(message.leaf, message.leaf + 1)
        current.check(node.name, message.step, message.attempt, message.adapter_version, span)
        leaf = current.request.leaves[message.leaf]
        rows = len(leaf.rows) // len(leaf.widths)
        if message.columns < 1 or payload.nbytes != 4 * rows * message.columns:
            what = f"{payload.nbytes} bytes in {message.columns} columns for {rows} rows"
            raise WireError(f"the answer to leaf {message.leaf} has {what}")
        numbers = np.frombuffer(payload, np.float32).reshape(rows, message.columns)
        current.answer(message.leaf, numbers)
        node.peak_bytes = max(node.peak_bytes, message.peak_bytes)
        if current.request.verb == "gradient":
            node.measured(sum(leaf_tokens(leaf)), message.seconds)
        self._free_when_done(node)

    def _on_offer(self, node: Node, offer: m.VectorOffer) -> None:
        current = self._current()
        span = Span(offer.start, offer.stop)
        current.check(node.name, offer.step, offer.attempt, offer.adapter_version, span)
        elements = manifests.size(self.manifest)
        if offer.kind != "partial" or (offer.elements, offer.slice_start, offer.slice_stop) != (elements, 0, elements):
            raise MismatchError(f"{node.name} offers a vector that is not of this run's manifest ({elements} elements)")
        if span not in current.missing:
            raise StaleError(f"the partial over {span} is not missing")
        self._uploads.offer(node.name, offer)
        self._admit_uploads()

    def _on_end(self, node: Node, message: m.VectorEnd) -> None:
        span, vector = self._uploads.end(node.name, message.stream, message.digest)
        try:
            self._current().partial(span, vector)
        except StaleError:
            self._uploads.release(vector)
            raise
        self._free_when_done(node)
        self._admit_uploads()

    # ---- helpers

    def _current(self) -> Round:
        if self.round is None:
            raise StaleError("no step is in work")
        return self.round

    def _admit_uploads(self) -> None:
        if self.round is not None:
            for name, stream, upto in self._uploads.admit(self.round.lowest_missing):
                self._credit(self.nodes[name], stream, upto)

    def _credit(self, node: Node, stream: int, upto: int) -> None:
        assert node.data is not None
        self._send(DATA, node.data, m.Credit(node.life, stream, upto))

    def _free_when_done(self, node: Node) -> None:
        if node.state is NodeState.BUSY and self.round is not None and self.round.finished(node.name):
            node.move(NodeEvent.FINISHED)

    def _forget_worker(self, node: Node) -> None:
        node.data, node.adapter_version, node.has_reference = None, -1, False
        self._downloads = {key: download for key, download in self._downloads.items() if key[0] != node.name}
        self._uploads.drop(node.name)

    def _send_reference(self, node: Node) -> None:
        if self._reference is not None and not node.has_reference:
            node.has_reference = True
            self._send_vector(node, "reference", 0, *self._reference)

    def _send_adapter(self, node: Node) -> None:
        assert self._adapter is not None
        version, vector, hashed = self._adapter
        if node.adapter_version != version:
            node.adapter_version = version
            self._send_vector(node, "adapter", version, vector, hashed)

    def _send_vector(self, node: Node, kind: str, version: int, vector: Vector, hashed: str) -> None:
        assert node.data is not None
        self._streams += 1
        self._downloads[node.name, self._streams] = OutgoingVector(self._streams, vector, hashed)
        offer = m.VectorOffer(node.life, self._streams, kind, version, len(vector), slice_stop=len(vector))
        self._send(DATA, node.data, offer)

    def _send_work(self, node: Node, current: Round, run: Span) -> None:
        assert node.data is not None
        request = current.request
        self._send_reference(node)
        self._send_adapter(node)
        task = m.Task(
            life=node.life,
            verb=request.verb,
            step=request.step,
            attempt=current.attempt,
            adapter_version=request.adapter_version,
            start=run.start,
            stop=run.stop,
            total=len(request.leaves),
            loss=request.loss,
            parameters=request.parameters,
            scalars=dict(request.scalars),
        )
        self._send(DATA, node.data, task)
        for leaf in request.leaves[run.start : run.stop]:
            rows = m.LeafRows(
                life=node.life,
                step=request.step,
                attempt=current.attempt,
                leaf=leaf.index,
                widths=leaf.widths,
                row_ids=tuple(row.row_id for row in leaf.rows),
                lengths=tuple(len(row.ids) for row in leaf.rows),
                numbers=dict(request.numbers.get(leaf.index, {})),
            )
            self._send(DATA, node.data, rows, pack_leaf(leaf))
        node.move(NodeEvent.ASSIGNED)

    def _send(self, channel: str, peer: bytes, message: m.Message, payload: Buffer = b"") -> None:
        self._outbox.append(Parcel(channel, peer, encode(message, payload)))

    def _tell(self, node: Node, sentence: str) -> None:
        self.news.append(NodeNews(node.name, node.state.value, sentence))

    def _fail(self, error: MlxdistError) -> None:
        if self.failure is None:
            self.failure = error
