"""A coordinator's cluster on a workbench: nodes that say what the test wants, a clock that the test moves, no model."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import numpy as np

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.node import Node
from mlxdist.coordinator.cluster.settings import ClusterSettings
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import MlxdistError
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.manifest import Manifest
from mlxdist.protocol.messages import Message, SessionId
from mlxdist.protocol.packing import PACKED
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import Vector, digest
from mlxdist.protocol.wire import decode, encode
from tests.protocol.example_messages import example

M = TypeVar("M", bound=Message)

SPEC: m.RunSpec = msgspec.structs.replace(example(m.RunSpec), packing=PACKED)
VERSIONS = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
MODEL_HASH = "0123456789abcdef" * 4
MANIFEST = manifests.make({"model.layers.0.q_proj.lora_a": (2, 3), "model.layers.0.q_proj.lora_b": (3, 2)})
CANARY = ("same", "same", "same")
ELEMENTS = manifests.size(MANIFEST)
PARTIAL = np.arange(ELEMENTS, dtype=np.float32)
ADAPTER = np.full(ELEMENTS, np.float32(0.25))


def new_cluster(**changes: Any) -> Cluster:
    """A cluster with the default timing, and what a test changes of its settings."""
    values = {"run": "run", "incarnation": 5, "spec": SPEC, "versions": VERSIONS, "data_port": 7001}
    return Cluster(ClusterSettings(**{**values, **changes}))


def introduction(session: SessionId, manifest: Manifest = MANIFEST, model_hash: str = MODEL_HASH) -> m.Loaded:
    """A worker's description of its model."""
    return m.Loaded(session, model_hash, manifest)


@dataclass
class Bench:
    """The cluster, the time, and what was sent to whom."""

    cluster: Cluster = field(default_factory=new_cluster)
    now: float = 100.0
    mail: dict[tuple[str, bytes], list[tuple[Message, bytes]]] = field(default_factory=lambda: defaultdict(list))
    deaf: set[bytes] = field(default_factory=set)  # data connections on which no ping is answered

    def post(self, channel: str, peer: bytes, message: Message, payload: bytes = b"") -> None:
        """One message to the cluster, and its answers into the mail."""
        self.cluster.receive(Parcel(channel, peer, encode(message, payload)), self.now)
        self.collect()

    def collect(self) -> None:
        """Puts the messages that the cluster sends into the mail."""
        for parcel in self.cluster.take_outgoing():
            message, payload = decode(parcel.frames)
            if not isinstance(message, m.Ping):
                self.mail[parcel.channel, parcel.peer].append((message, bytes(payload)))
            elif parcel.peer not in self.deaf:
                self.post(DATA, parcel.peer, m.Pong(message.session))

    def begin(self, request: Request) -> None:
        """A round."""
        self.cluster.begin(request)
        self.collect()

    def tick(self, seconds: float) -> None:
        """Time goes by without a message."""
        self.now += seconds
        self.cluster.tick(self.now)
        self.collect()

    def ready(self, *names: str) -> "list[ScriptedNode]":
        """Nodes that have answered the canary."""
        nodes = [ScriptedNode(self, name) for name in names]
        for node in nodes:
            node.get_ready()
        return nodes

    def told(self) -> str:
        """The news since the last time, one sentence a line."""
        news = [self.cluster.news.popleft() for _ in range(len(self.cluster.news))]
        return "\n".join(f"{item.name}: {item.message}" for item in news)

    @property
    def failure(self) -> str:
        """The error that ends the run, or nothing."""
        return str(self.cluster.failure or "")


@dataclass
class ScriptedNode:
    """A node's two peers."""

    bench: Bench
    name: str
    pid: int = 1

    @property
    def control(self) -> bytes:
        return f"{self.name}/{self.pid}".encode()

    @property
    def data(self) -> bytes:
        return f"{self.name}#{self.pid}".encode()

    @property
    def session(self) -> SessionId:
        return self.bench.cluster.nodes[self.name].session

    @property
    def state(self) -> str:
        return self.bench.cluster.nodes[self.name].state.value

    def say(self, message: Message, payload: bytes = b"") -> None:
        """On the data connection."""
        self.bench.post(DATA, self.data, message, payload)

    def tell(self, message: Message) -> None:
        """On the control connection."""
        self.bench.post(CONTROL, self.control, message)

    def heard(self, kind: type[M], channel: str = DATA) -> list[M]:
        """The messages of one type that came since the last time; the others are forgotten."""
        mail = self.bench.mail.pop((channel, self.data if channel == DATA else self.control), [])
        return [message for message, _ in mail if isinstance(message, kind)]

    def enlist(self, **host: str) -> None:
        self.tell(m.Register(m.PROTOCOL_VERSION, self.name, 0, host))

    def hello(self, **versions: str) -> None:
        self.say(m.Hello(self.session, {**VERSIONS, **versions}))

    def get_ready(self, manifest: Manifest = MANIFEST, canary: Sequence[str] = CANARY) -> None:
        self.enlist()
        self.hello()
        self.say(introduction(self.session, manifest))
        self.say(m.CanaryAnswer(self.session, tuple(canary)))

    def beat(self, worker_pid: int = 2) -> None:
        self.tell(m.Heartbeat(self.session, worker_pid))

    @property
    def work(self) -> list[Span]:
        """The runs that it has in its hands."""
        current = self.bench.cluster.round
        return [attempt.span for attempt in current.of(self.name)] if current is not None else []

    @property
    def attempt(self) -> int:
        """Its first attempt in the round in work; 0 when it has none."""
        current = self.bench.cluster.round
        return next((one.attempt for one in current.of(self.name)), 0) if current is not None else 0

    def answer(self, leaf: int, **changes: Any) -> tuple[m.LeafAnswer, bytes]:
        """The answer to a leaf of the round in work, with one row number."""
        current = self.bench.cluster.round
        assert current is not None
        request = current.request
        values = {
            "session": self.session,
            "step": request.step,
            "attempt": self.attempt,
            "adapter_version": request.adapter_version,
            "leaf": leaf,
            "columns": 1,
            "seconds": 0.5,
            "peak_bytes": 10,
        }
        return m.LeafAnswer(**{**values, **changes}), np.float32([leaf]).tobytes()

    def offer(self, span: Span, stream: int = 1, manifest: Manifest = MANIFEST, **changes: Any) -> m.VectorOffer:
        """The offer of a partial of the round in work."""
        current = self.bench.cluster.round
        assert current is not None
        request, elements = current.request, manifests.size(manifest)
        values = {
            "session": self.session,
            "stream": stream,
            "kind": "partial",
            "adapter_version": request.adapter_version,
            "elements": elements,
            "step": request.step,
            "attempt": self.attempt,
            "start": span.start,
            "stop": span.stop,
            "slice_start": 0,
            "slice_stop": elements,
        }
        return m.VectorOffer(**{**values, **changes})

    def answer_leaves(self, stream: int) -> None:
        """Answers the leaves of a partial under way that have no answer yet, as a worker does before its end."""
        arriving = self.bench.cluster.transfers.uploads._arriving.get((self.name, stream))
        current = self.bench.cluster.round
        if arriving is not None and current is not None and arriving[0].attempt in current.assignments:
            offer, answered = arriving[0], current.assignments[arriving[0].attempt].answered
            for leaf in sorted({*range(offer.start, offer.stop)} - answered):
                self.say(*self.answer(leaf, attempt=offer.attempt))

    def send(self, stream: int, vector: Vector) -> None:
        """A vector of one block, and its end."""
        self.answer_leaves(stream)
        self.say(m.VectorBlock(self.session, stream, 0), vector.tobytes())
        self.say(m.VectorEnd(self.session, stream, digest(vector)))


def give_back(cluster: Cluster, buffers: Iterable[Vector]) -> None:
    """Buffers are summed away, and what waits for them is let in."""
    for buffer in buffers:
        cluster.transfers.pool.give_back(buffer)
    cluster.tick(cluster.now)


def leaf_of(index: int, tokens: int = 8) -> Leaf:
    """A leaf of one row."""
    ids = np.full(tokens, index % 96, np.int32)
    return Leaf(index, (Row(index, ids, np.ones(tokens, np.uint8)),))


def request_of(leaves: int, *, step: int = 4, version: int = 3, verb: str = "gradient") -> Request:
    """A request over equal leaves."""
    return Request(verb, step, version, tuple(leaf_of(index) for index in range(leaves)))


def snapshot(bench: Bench) -> Any:
    """All state that must not change when a message does not count."""
    return state_of(bench.cluster)


def state_of(cluster: Cluster) -> Any:
    """The same, of a cluster."""
    current = cluster.round
    nodes = {
        name: (
            node.session,
            node.state,
            node.canary,
            node.speed.tokens_per_second,
            node.wrong_answers,
            node.held_back,
            *worker_of(node),
        )
        for name, node in cluster.nodes.items()
    }
    work = current and (
        dict(current.answers),
        list(current.partials),
        list(current.pending),
        {
            one.attempt: (one.node, one.span, set(one.missing), set(one.answered))
            for one in current.assignments.values()
        },
        dict(current.crashes),
        dict(current.nonfinite),
    )
    uploads = cluster.transfers.uploads
    vectors = (uploads.pool.held, dict(uploads._waiting), set(uploads._arriving))
    return nodes, work, vectors, dict(cluster.members.given_up), cluster.failure, cluster.introduction


def worker_of(node: Node) -> tuple[Any, ...]:
    """A worker's part of that state."""
    return (node.worker.data, node.worker.ended, set(node.worker.cancelled))


def working(bench: Bench, *names: str, leaves: int = 4) -> list[ScriptedNode]:
    """Ready nodes with a round of equal leaves in work."""
    nodes = bench.ready(*names)
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(leaves))
    return nodes


def failed_with(bench: Bench, kind: type[MlxdistError], *words: str) -> None:
    """The run cannot go on, for this reason."""
    assert type(bench.cluster.failure) is kind
    for word in words:
        assert word in bench.failure


def turned_away(node: ScriptedNode, kind: type[MlxdistError], *words: str) -> None:
    """The node was told why, on both connections that it has, and takes no part; the run goes on."""
    assert node.state == "left"
    told = node.bench.told()
    refusals = [*node.heard(m.Reject), *node.heard(m.Reject, CONTROL)]
    assert len(refusals) == 2
    error = node.bench.cluster.members.given_up[node.name]
    assert type(error) is kind
    for text in (str(error), told, *(refusal.reason for refusal in refusals)):
        assert all(word in text for word in words), text
    assert not node.bench.failure


def restarted(node: ScriptedNode, *words: str) -> None:
    """The node's worker is to end, its work is with the others or pending, and the run goes on."""
    session, current = node.session, node.bench.cluster.round
    assert node.state == "connecting"
    (restart,) = node.heard(m.Restart, CONTROL)
    told = node.bench.told()
    for word in (*words, "its worker is restarted"):
        assert word in told
    assert restart.session == session
    assert node.work == []
    if current is not None:
        held = [*current.missing, *current.pending, *(span for span, _ in current.partials)]
        leaves = [leaf for span in held for leaf in range(span.start, span.stop)]
        assert sorted(leaves) == list(range(len(current.request.leaves)))
    assert not node.bench.failure
    before = snapshot(node.bench)
    node.say(m.Progress(session, "I am still here"))
    assert len(node.heard(m.Stale)) == 1
    assert snapshot(node.bench) == before
