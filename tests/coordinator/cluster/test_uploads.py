"""Partials on their way up: whatever arrives when, the sum has the same bits, memory is bounded, and the step ends."""

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxdist.coordinator.cluster.buffers import BufferPool
from mlxdist.coordinator.cluster.uploads import Uploads
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.node.link.jobs import Partial
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import WireError
from mlxdist.protocol.tree import TreeSum, fold
from mlxdist.protocol.vectors import Vector
from mlxdist.protocol.wire import Frames
from tests.coordinator.cluster.scripted_node import MANIFEST, give_back, leaf_of, new_cluster
from tests.memory_cluster import Move, SummingCluster, split_at
from tests.memory_nodes import MemoryNode, PretendedEngine

Choice = Callable[[list[Move]], Callable[[], object]]

ELEMENTS = manifests.size(MANIFEST)


def gradient_of(leaf: int, adapter: Vector) -> Vector:
    """A leaf's grad_sum: values of very different sizes, another one for every adapter."""
    drawn = np.random.default_rng(leaf).standard_normal(ELEMENTS) * 10.0 ** (leaf % 7 - 3)
    return (drawn * (1 + adapter)).astype(np.float32)


def add(left: Vector, right: Vector) -> Vector:
    return left + right


ENGINE = PretendedEngine(
    MANIFEST, lambda job, leaf: gradient_of(leaf, job.adapter), lambda job, leaf: np.array([leaf], np.float32)
)


class Race(SummingCluster):
    """A cluster, nodes and the loop that sums; `moves` are all that could happen next.

    A link delivers one message at a time, and a node computes one subtree at a time, when it is told to. `cuts` split
    the leaves among the nodes, at worse places than any good assignment would.
    """

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.coordinate(new_cluster())
        self.cluster.scheduler.assigner = lambda seconds: split_at(self.cuts, seconds)
        self.cuts: Sequence[int] = ()
        self.lowest: dict[str, int] = defaultdict(int)  # the leaf that a node works on, for the adversary's choice
        for _ in range(nodes):
            self.join(ENGINE)
        while moves := self.moves():
            for _, move in moves:
                move()
        assert all(node.works for node in self.cluster.nodes.values())

    def post(self, channel: str, peer: bytes, frames: Frames) -> None:
        super().post(channel, peer, frames)
        self.pump()
        assert self.cluster.failure is None

    def work(self, node: MemoryNode) -> None:
        while node.can_work:
            if isinstance(result := node.step(), Partial):
                self.lowest[node.name] = result.span.start
                return

    def begin(self, request: Request, adapter: Vector) -> None:
        self.cluster.set_adapter(request.adapter_version, adapter)
        self.total = TreeSum(len(request.leaves), self.add)
        self.cluster.begin(request)
        self.pump()

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for node in self.nodes.values():
            lowest = self.lowest[node.name]
            if node.can_work:
                found.append((f"work {lowest}", partial(self.work, node)))
            for wire in (node.control, *([node.wire] if node.wire else [])):
                if wire.down:
                    found.append((f"down {lowest}", partial(self.deliver_down, wire)))
                if wire.up:
                    found.append((f"up {lowest}", partial(self.deliver_up, wire)))
        if (loop := self.loop()) is not None:
            found.append(("loop", loop))
        return found

    def finish(self, choose: Choice) -> Vector:
        current = self.cluster.round
        assert current is not None
        assert self.total is not None
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


def at_random(seed: int) -> Choice:
    drawn = random.Random(seed)
    return lambda moves: drawn.choice(moves)[1]


def highest_leaf_first(moves: list[Move]) -> Callable[[], object]:
    """The sum can use nothing for as long as possible."""
    return max(moves, key=lambda move: int(move[0].split()[1]) if " " in move[0] else 10**6)[1]


def the_loop_last(seed: int) -> Choice:
    """The loop is slower than any link: it sums only when nothing else can happen."""
    drawn = random.Random(seed)
    return lambda moves: drawn.choice([move for move in moves if " " in move[0]] or moves)[1]


def highest_leaf_first_and_the_loop_last(moves: list[Move]) -> Callable[[], object]:
    links = [move for move in moves if " " in move[0]]
    return highest_leaf_first(links or moves)


STRATEGIES: dict[str, Callable[[int], Choice]] = {
    "at random": at_random,
    "the highest leaf first": lambda seed: highest_leaf_first,
    "the loop last": the_loop_last,
    "both": lambda seed: highest_leaf_first_and_the_loop_last,
}


@pytest.mark.slow
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


@pytest.mark.slow
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
