"""Partials on their way up: whatever arrives when, the sum has the same bits, memory is bounded, and the step ends."""

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.cluster.buffers import BufferPool
from mlxdist.coordinator.cluster.uploads import Uploads
from mlxdist.coordinator.schedule.assign import NodeSeconds
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.jobs import ComputeAssignment, ComputeCanary, LoadModel, Partial
from mlxdist.node.link.session import Session
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span, TreeSum, fold, fold_span, subtrees
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames, decode, encode
from tests.coordinator.cluster.scripted_node import (
    CANARY,
    MANIFEST,
    VERSIONS,
    give_back,
    introduction,
    leaf_of,
    new_cluster,
)

ELEMENTS = manifests.size(MANIFEST)


def gradient_of(leaf: int, adapter: Vector) -> Vector:
    """A leaf's grad_sum: values of very different sizes, another one for every adapter."""
    drawn = np.random.default_rng(leaf).standard_normal(ELEMENTS) * 10.0 ** (leaf % 7 - 3)
    return (drawn * (1 + adapter)).astype(np.float32)


def add(left: Vector, right: Vector) -> Vector:
    return left + right


@dataclass
class RacingNode:
    """A real session with a pretended model; its link delivers one message at a time, when it is told to."""

    name: str
    session: Session | None = None
    up: deque[Frames] = field(default_factory=deque)
    down: deque[Frames] = field(default_factory=deque)
    jobs: deque[Callable[[], None]] = field(default_factory=deque)  # the worker's own pace
    lowest: int = 0  # the leaf that it works on, for the adversary's choice

    def start(self, session: m.SessionId) -> None:
        self.session = Session(self.name, session, elements=ELEMENTS)
        self.session.say(m.Hello(session, VERSIONS))
        self.flush()

    def flush(self) -> None:
        assert self.session is not None
        self.up.extend(encode(*outgoing) for outgoing in self.session.take_outgoing())

    def hear(self) -> None:
        assert self.session is not None
        self.session.handle(*decode(self.down.popleft()))
        while self.session.jobs:
            match self.session.jobs.popleft():
                case LoadModel():
                    self.session.say(introduction(self.session.id))
                case ComputeCanary():
                    self.session.say(m.CanaryAnswer(self.session.id, CANARY))
                case ComputeAssignment() as job:
                    for span in subtrees(job.assignment.total, Span(job.assignment.start, job.assignment.stop)):
                        self.jobs.append(lambda span=span, job=job: self.compute(job, span))  # type: ignore[misc]
        self.flush()

    def compute(self, job: ComputeAssignment, span: Span) -> None:
        assert self.session is not None
        self.lowest = span.start
        task = job.assignment

        def one(leaf: int) -> Vector:
            assert self.session is not None
            answer = m.LeafAnswer(self.session.id, task.step, task.attempt, task.adapter_version, leaf, 1, 1.0, 0)
            self.session.say(answer, np.float32([leaf]).tobytes())
            return gradient_of(leaf, job.adapter)

        self.session.deliver(Partial(task, span, fold_span(span, one, add)))
        self.flush()


class Race:
    """A cluster, nodes and the loop that sums; `moves` are all that could happen next.

    `cuts` split the leaves among the nodes, at worse places than any good assignment would.
    """

    def __init__(self, nodes: int) -> None:
        self.cluster = new_cluster()
        self.cluster.scheduler.assigner = self.split
        self.cuts: Sequence[int] = ()
        self.nodes = {f"node-{index}": RacingNode(f"node-{index}") for index in range(nodes)}
        self.fetched: list[tuple[Span, Vector]] = []
        self.freed: list[Vector] = []
        self.total: TreeSum[Vector] = TreeSum(1, self.add)
        for name, node in self.nodes.items():
            self.receive(CONTROL, name, encode(m.Register(m.PROTOCOL_VERSION, name, 0, {})))
            node.start(self.cluster.nodes[name].session)
        while any(node.up or node.down for node in self.nodes.values()):
            for _, move in self.moves():
                move()
        assert all(node.works for node in self.cluster.nodes.values())

    def split(self, seconds: Mapping[str, NodeSeconds]) -> dict[str, Span]:
        total = len(next(iter(seconds.values())).leaves)
        edges = [0, *sorted(min(cut, total) for cut in self.cuts), total]
        runs = (Span(start, stop) for start, stop in pairwise(edges))
        return {name: run for name, run in zip(seconds, runs, strict=True) if len(run)}

    def add(self, left: Vector, right: Vector) -> Vector:
        np.add(left, right, out=left)
        self.freed.append(right)
        return left

    def receive(self, channel: str, peer: str, frames: Frames) -> None:
        self.cluster.receive(Parcel(channel, peer.encode(), frames), 0.0)
        assert self.cluster.failure is None
        self.collect()

    def collect(self) -> None:
        for parcel in self.cluster.take_outgoing():
            if parcel.channel == DATA:
                self.nodes[parcel.peer.decode()].down.append([bytes(frame) for frame in parcel.frames])

    def begin(self, request: Request, adapter: Vector) -> None:
        self.cluster.set_adapter(request.adapter_version, adapter)
        self.total = TreeSum(len(request.leaves), self.add)
        self.cluster.begin(request)
        self.collect()

    def moves(self) -> list[tuple[str, Callable[[], None]]]:
        found: list[tuple[str, Callable[[], None]]] = []
        for name, node in self.nodes.items():
            if node.jobs:
                found.append((f"work {node.lowest}", lambda node=node: node.jobs.popleft()()))  # type: ignore[misc]
            if node.down:
                found.append((f"down {node.lowest}", node.hear))
            if node.up:
                found.append(
                    (f"up {node.lowest}", lambda name=name, node=node: self.receive(DATA, name, node.up.popleft()))
                )  # type: ignore[misc]
        current = self.cluster.round
        if self.fetched:
            found.append(("sum", self.sum_one))
        elif current is not None and current.partials:
            found.append(("fetch", lambda: self.fetched.extend(self.cluster.fetch_partials())))
        return found

    def sum_one(self) -> None:
        self.total.put(*self.fetched.pop(0))
        if not self.fetched:  # the loop gives back once per fetch
            give_back(self.cluster, self.freed)
            self.freed = []
            self.collect()

    def finish(self, choose: Callable[[list[tuple[str, Callable[[], None]]]], Callable[[], None]]) -> Vector:
        current = self.cluster.round
        assert current is not None
        while not (self.total.done and current.complete):
            moves = self.moves()
            assert moves, "nothing can happen any more, and the step is not done"
            choose(moves)()
        assert self.freed == []
        result = self.total.result.copy()
        give_back(self.cluster, [self.total.result])
        return result


def bound(nodes: int, leaves: int) -> int:
    return nodes + 2 + (leaves - 1).bit_length()


Choice = Callable[[list[tuple[str, Callable[[], None]]]], Callable[[], None]]


def at_random(seed: int) -> Choice:
    drawn = random.Random(seed)
    return lambda moves: drawn.choice(moves)[1]


def highest_leaf_first(moves: list[tuple[str, Callable[[], None]]]) -> Callable[[], None]:
    """The sum can use nothing for as long as possible."""
    return max(moves, key=lambda move: int(move[0].split()[1]) if " " in move[0] else 10**6)[1]


def the_loop_last(seed: int) -> Choice:
    """The loop is slower than any link: it sums only when nothing else can happen."""
    drawn = random.Random(seed)
    return lambda moves: drawn.choice([move for move in moves if " " in move[0]] or moves)[1]


def highest_leaf_first_and_the_loop_last(moves: list[tuple[str, Callable[[], None]]]) -> Callable[[], None]:
    links = [move for move in moves if " " in move[0]]
    return highest_leaf_first(links or moves)


STRATEGIES: dict[str, Callable[[int], Choice]] = {
    "at random": at_random,
    "the highest leaf first": lambda seed: highest_leaf_first,
    "the loop last": the_loop_last,
    "both": lambda seed: highest_leaf_first_and_the_loop_last,
}


@settings(max_examples=100)
@given(st.data())
def test_any_arrival_order_ends_with_the_same_bits_within_the_bound(data: st.DataObject) -> None:
    nodes = data.draw(st.integers(1, 7), label="nodes")
    race = Race(nodes)
    strategy = STRATEGIES[data.draw(st.sampled_from(sorted(STRATEGIES)), label="strategy")]
    for step in (1, 2):
        leaves = tuple(leaf_of(index) for index in range(data.draw(st.integers(1, 130), label="leaves")))
        cut = st.integers(0, len(leaves))
        race.cuts = data.draw(st.lists(cut, min_size=nodes - 1, max_size=nodes - 1), label="cuts")
        adapter = np.full(ELEMENTS, np.float32(step))
        race.cluster.transfers.pool.most_held = 0
        race.begin(Request("gradient", step, step - 1, leaves), adapter)
        result = race.finish(strategy(data.draw(st.integers(0, 2**32), label="seed")))
        whole = fold([gradient_of(index, adapter) for index in range(len(leaves))], add)
        assert result.tobytes() == whole.tobytes()
        assert race.cluster.transfers.pool.most_held <= bound(nodes, len(leaves))
        assert race.cluster.transfers.pool.held == 0
        assert all(node.state.value == "ready" for node in race.cluster.nodes.values())


LEAVES = tuple(leaf_of(index) for index in range(127))


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_unfair_shares_with_many_partials_fill_the_memory_to_the_bound_and_not_beyond(strategy: str) -> None:
    fullest = 0
    for nodes in (1, 2, 3, 5):
        for first in range(1, 33, 2):  # at odd leaves, so that a run has many subtrees
            race = Race(nodes)
            race.cuts = [first + index * 25 for index in range(nodes - 1)]
            race.begin(Request("gradient", 1, 0, LEAVES), np.zeros(ELEMENTS, np.float32))
            race.finish(STRATEGIES[strategy](first))
            assert race.cluster.transfers.pool.most_held <= bound(nodes, len(LEAVES))
            fullest = max(fullest, race.cluster.transfers.pool.most_held - nodes)
    assert fullest >= 2  # the limit was reached, so the law was tried


def offer_of(start: int, stop: int, stream: int) -> m.VectorOffer:
    return m.VectorOffer(m.SessionId("run", 1, "1"), stream, "partial", 0, ELEMENTS, 1, 1, start, stop, 0, ELEMENTS)


def admitted(uploads: Uploads, lowest: int) -> list[tuple[str, int, int]]:
    return list(uploads.admit(lowest))


def test_while_the_limit_is_reached_only_the_lowest_unfinished_leaf_is_let_in() -> None:
    uploads = Uploads(BufferPool(), limit=2, reserve=2)
    for leaf in (5, 6, 7, 0, 1):
        uploads.offer("a", offer_of(leaf, leaf + 1, stream=leaf))
    assert admitted(uploads, 0) == [("a", 0, 1), ("a", 1, 1)]
    assert admitted(uploads, 2) == []
    uploads.offer("b", offer_of(2, 3, stream=2))
    assert admitted(uploads, 2) == [("b", 2, 1)]
    assert admitted(uploads, 3) == []
    uploads.offer("b", offer_of(3, 4, stream=3))
    assert admitted(uploads, 3) == [("b", 3, 1)]
    uploads.offer("b", offer_of(4, 5, stream=4))
    assert admitted(uploads, 4) == []  # the reserve is used up
    for _ in range(3):
        uploads.pool.give_back(np.empty(ELEMENTS, np.float32))
    assert admitted(uploads, 4) == [("b", 4, 1)]
    assert uploads.pool.most_held == 4


def test_what_waits_is_let_in_by_leaf_and_not_by_arrival() -> None:
    uploads = Uploads(BufferPool(), limit=3)
    for leaf in (9, 2, 7, 4):
        uploads.offer("a", offer_of(leaf, leaf + 1, stream=leaf))
    assert [stream for _, stream, _ in admitted(uploads, 0)] == [2, 4, 7]


def test_a_released_buffer_is_filled_again_and_no_new_one_is_made() -> None:
    uploads = Uploads(BufferPool(), limit=1)
    uploads.offer("a", offer_of(0, 1, stream=1))
    admitted(uploads, 0)
    buffer = np.empty(ELEMENTS, np.float32)
    uploads.pool.give_back(buffer)
    uploads.offer("a", offer_of(1, 2, stream=2))
    admitted(uploads, 1)
    assert uploads._arriving["a", 2][1].buffer is buffer


def test_a_vector_is_offered_once() -> None:
    uploads = Uploads(BufferPool(), limit=1)
    uploads.offer("a", offer_of(0, 1, stream=1))
    with pytest.raises(WireError, match="offered before"):
        uploads.offer("a", offer_of(1, 2, stream=1))
    admitted(uploads, 0)
    with pytest.raises(WireError, match="offered before"):
        uploads.offer("a", offer_of(1, 2, stream=1))
    uploads.offer("b", offer_of(1, 2, stream=1))


def test_what_a_lost_node_offered_or_half_sent_is_forgotten() -> None:
    uploads = Uploads(BufferPool(), limit=2)
    for name in ("a", "b"):
        uploads.offer(name, offer_of(0, 1, stream=1))
        uploads.offer(name, offer_of(1, 2, stream=2))
    assert [(name, stream) for name, stream, _ in admitted(uploads, 0)] == [("a", 1), ("b", 1)]
    uploads.drop("a")
    assert uploads.pool.held == 1
    assert [(name, stream) for name, stream, _ in admitted(uploads, 5)] == [("b", 2)]
