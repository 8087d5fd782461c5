"""A partial counts whole, once, and from the first node that brings it; half, damaged or late ones change nothing."""

import numpy as np
import pytest

from mlxdist.coordinator.cluster.transfers import MOST_DAMAGED
from mlxdist.protocol import manifest as manifests
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import BLOCK_BYTES, BLOCK_ELEMENTS, Vector, digest
from tests.coordinator.cluster.scripted_node import (
    PARTIAL,
    Bench,
    ScriptedNode,
    give_back,
    request_of,
    restarted,
    snapshot,
    working,
)

LARGE = manifests.make({"layers.0.lora_a": (BLOCK_ELEMENTS + 1, 1)})
LARGE_PARTIAL: Vector = np.random.default_rng(0).random(BLOCK_ELEMENTS + 1, dtype=np.float32)


def half_sent(bench: Bench) -> ScriptedNode:
    """A node that has sent one of two blocks."""
    node = ScriptedNode(bench, "a")
    node.get_ready(LARGE)
    bench.cluster.set_adapter(3, LARGE_PARTIAL)
    bench.begin(request_of(1))
    node.say(node.offer(Span(0, 1), manifest=LARGE))
    assert [credit.upto for credit in node.heard(m.Credit)] == [2]
    node.say(m.VectorBlock(node.session, 1, 0), LARGE_PARTIAL.tobytes()[:BLOCK_BYTES])
    assert bench.cluster.transfers.pool.held == 1
    return node


def test_a_partial_counts_only_with_its_end() -> None:
    bench = Bench()
    node = half_sent(bench)
    assert bench.cluster.fetch_partials() == []
    node.say(m.VectorBlock(node.session, 1, 1), LARGE_PARTIAL.tobytes()[BLOCK_BYTES:])
    assert bench.cluster.fetch_partials() == []
    node.answer_leaves(1)
    node.say(m.VectorEnd(node.session, 1, digest(LARGE_PARTIAL)))
    ((span, vector),) = bench.cluster.fetch_partials()
    assert span == Span(0, 1)
    assert vector.tobytes() == LARGE_PARTIAL.tobytes()


def test_a_partial_without_its_last_block_does_not_count_and_its_worker_is_restarted() -> None:
    bench = Bench()
    node = half_sent(bench)
    node.say(m.VectorEnd(node.session, 1, digest(LARGE_PARTIAL)))
    restarted(node, "a: it sent what makes no sense: vector 1 ended after 1 of 2 blocks")
    assert bench.cluster.fetch_partials() == []
    assert bench.cluster.transfers.pool.held == 0


def send_damaged(node: ScriptedNode, stream: int) -> None:
    """A partial over [0, 2) of which one bit is lost on the way."""
    node.say(node.offer(Span(0, 2), stream=stream))
    damaged = bytearray(PARTIAL.tobytes())
    damaged[5] ^= 1
    node.say(m.VectorBlock(node.session, stream, 0), bytes(damaged))
    node.say(m.VectorEnd(node.session, stream, digest(PARTIAL)))


def test_a_partial_with_another_hash_does_not_count_is_asked_for_again_and_counts_then() -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    bench.told()
    send_damaged(node, 1)
    assert node.heard(m.Received) == [m.Received(node.session, 1, whole=False)]
    assert bench.told() == "a: the partial over [0, 2) arrived damaged; sent again"
    assert bench.cluster.fetch_partials() == []
    assert bench.cluster.transfers.pool.held == 0
    assert (node.state, node.work, other.work) == ("busy", [Span(0, 2)], [Span(2, 4)])
    node.say(node.offer(Span(0, 2), stream=2))
    node.send(2, PARTIAL)
    assert node.heard(m.Received) == [m.Received(node.session, 2, whole=True)]
    ((span, vector),) = bench.cluster.fetch_partials()
    assert (span, vector.tobytes()) == (Span(0, 2), PARTIAL.tobytes())


def test_a_worker_whose_vectors_arrive_damaged_again_and_again_is_restarted() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    for stream in range(1, MOST_DAMAGED + 1):
        send_damaged(node, stream)
        assert node.state == "busy"
    send_damaged(node, MOST_DAMAGED + 1)
    restarted(node, f"{MOST_DAMAGED + 1} vectors in a row arrived damaged")
    assert bench.cluster.fetch_partials() == []
    assert bench.cluster.transfers.pool.held == 0


def test_an_adapter_that_arrived_damaged_is_sent_again_with_the_reference() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    bench.cluster.set_reference(PARTIAL)
    bench.cluster.set_adapter(3, PARTIAL)
    bench.collect()
    *_, offer = node.heard(m.VectorOffer)
    node.say(m.Received(node.session, offer.stream, whole=False))
    again = node.heard(m.VectorOffer)
    assert [one.kind for one in again] == ["reference", "adapter"]
    assert all(one.stream > offer.stream for one in again)


def test_a_worker_that_was_sent_nothing_cannot_say_that_it_arrived_damaged() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    node.say(m.Received(node.session, 1, whole=False))
    restarted(node, "no adapter was sent to it")


@pytest.mark.parametrize("end", ["worker", "silence"])
def test_the_half_partial_of_a_lost_node_is_thrown_away_and_its_buffer_is_free(end: str) -> None:
    bench = Bench()
    node = half_sent(bench)
    if end == "worker":
        node.tell(m.WorkerExit(node.session, "killed", ()))
    else:
        bench.tick(16.0)
    assert bench.cluster.fetch_partials() == []
    assert bench.cluster.transfers.pool.held == 0
    assert bench.cluster.round is not None
    assert bench.cluster.round.pending == [Span(0, 1)]
    bench.mail.clear()
    give_back(bench.cluster, [])  # nothing of the lost node is let in again
    bench.collect()
    assert not bench.mail


def test_the_other_half_of_a_lost_nodes_partial_is_stale_also_when_the_node_is_back() -> None:
    bench = Bench()
    node = half_sent(bench)
    session = node.session
    node.tell(m.WorkerExit(session, "killed", ()))
    node.get_ready(LARGE)
    assert node.work == [Span(0, 1)]
    before = snapshot(bench)
    bench.mail.clear()
    node.say(m.VectorBlock(session, 1, 1), LARGE_PARTIAL.tobytes()[BLOCK_BYTES:])
    node.say(m.VectorEnd(session, 1, digest(LARGE_PARTIAL)))
    assert [stale.over for stale in node.heard(m.Stale)] == [True, True]
    assert snapshot(bench) == before
    assert bench.cluster.fetch_partials() == []


def test_blocks_that_were_not_let_in_are_refused() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    node.say(m.VectorBlock(node.session, 1, 0), PARTIAL.tobytes())
    restarted(node, "a: it sent what makes no sense: vector 1 of a was not let in")


def test_blocks_of_an_offer_that_still_waits_for_room_are_refused() -> None:
    bench = Bench()
    node, other = working(bench, "a", "b", leaves=8)
    bench.cluster.transfers.uploads.limit = 1
    bench.cluster.transfers.uploads.reserve = 0
    node.say(node.offer(Span(0, 4)))
    other.say(other.offer(Span(4, 8)))
    other.say(m.VectorBlock(other.session, 1, 0), PARTIAL.tobytes())
    restarted(other, "vector 1 of b was not let in")


def test_the_rest_of_a_vector_that_lost_a_race_is_stale_and_its_worker_goes_on() -> None:
    bench = Bench()
    slow, fast = copied(bench)
    slow.say(slow.offer(Span(0, 1)))
    assert len(slow.heard(m.Credit)) == 1
    fast.say(*fast.answer(0))
    fast.say(fast.offer(Span(0, 1), stream=2))
    fast.send(2, PARTIAL)
    assert [stale.stream for stale in slow.heard(m.Stale)] == [1]
    before = snapshot(bench)
    slow.send(1, PARTIAL + 1)  # it was on its way
    assert [stale.stream for stale in slow.heard(m.Stale)] == [1, 1]
    assert snapshot(bench) == before
    assert slow.heard(m.Restart, CONTROL) == []
    ((_, vector),) = bench.cluster.fetch_partials()
    assert vector.tobytes() == PARTIAL.tobytes()
    assert bench.cluster.transfers.pool.held == 1


def copied(bench: Bench) -> tuple[ScriptedNode, ScriptedNode]:
    """Leaf 0 is late on the one node and in work on the other one too."""
    slow, fast = bench.ready("slow", "fast")
    for node in bench.cluster.nodes.values():
        for _ in range(2):
            node.speed.leaf("gradient", (8, 8), 1.0)
    bench.cluster.set_adapter(3, PARTIAL)
    bench.begin(request_of(1))
    if not slow.work:
        slow, fast = fast, slow
    assert fast.work == []
    bench.tick(4.5)  # a beat, and twice what it should take
    assert fast.work == slow.work == [Span(0, 1)]
    bench.mail.clear()
    return slow, fast


def test_the_loser_of_a_race_is_given_nothing_until_it_has_let_go() -> None:
    bench = Bench()
    slow, fast = copied(bench)
    fast.say(*fast.answer(0))
    attempt = slow.attempt
    fast.say(fast.offer(Span(0, 1)))
    fast.send(1, PARTIAL)
    assert slow.heard(m.Cancel) == [m.Cancel(slow.session, attempt)]
    assert (slow.state, fast.state) == ("ready", "ready")
    assert [node.name for node in bench.cluster.ready()] == [fast.name]
    slow.say(m.Cancel(slow.session, attempt))
    assert len(bench.cluster.ready()) == 2


def test_a_subtree_that_comes_twice_counts_once_and_its_second_buffer_is_free() -> None:
    bench = Bench()
    slow, fast = copied(bench)
    for node in (slow, fast):
        node.say(node.offer(Span(0, 1)))
    slow.send(1, PARTIAL)
    fast.send(1, PARTIAL + 1)
    ((_, vector),) = bench.cluster.fetch_partials()
    assert vector.tobytes() == PARTIAL.tobytes()
    assert bench.cluster.transfers.pool.held == 1
    assert {stale.stream for stale in fast.heard(m.Stale)} == {1}
    assert fast.heard(m.Restart, CONTROL) == []
