"""The coordinator's work, counted in operations: for a message it does not grow with the nodes, for a step as leaves.

Counts, unlike seconds, are the same on every run.
"""

from collections.abc import Callable

import numpy as np
import pytest

from mlxdist.coordinator.cluster.cluster import LOOKS
from mlxdist.coordinator.schedule.assignments import Assignment, Assignments
from mlxdist.coordinator.schedule.node_speeds import Pacing, Speed
from mlxdist.protocol import messages as m
from mlxdist.protocol.transport import CONTROL, DATA, Parcel
from mlxdist.protocol.tree import Span
from mlxdist.protocol.wire import encode
from scripts.simulated_cluster import SimulatedCluster
from scripts.simulated_office import Mac, Office, equal_leaves
from tests.coordinator.cluster.scripted_node import ADAPTER, Bench, ScriptedNode, working
from tests.operations import operations

FEW, MANY = 4, 32
Say = Callable[[ScriptedNode], tuple[str, m.Message, bytes]]


def a_credit(node: ScriptedNode) -> tuple[str, m.Message, bytes]:
    return DATA, m.Credit(node.session, 1, 0), b""


def a_heartbeat(node: ScriptedNode) -> tuple[str, m.Message, bytes]:
    return CONTROL, m.Heartbeat(node.session, 2), b""


def a_pong(node: ScriptedNode) -> tuple[str, m.Message, bytes]:
    return DATA, m.Pong(node.session), b""


def an_answer(node: ScriptedNode) -> tuple[str, m.Message, bytes]:
    answer, payload = node.answer(node.work[0].start)
    return DATA, answer, payload


def for_a_message(nodes: int, say: Say) -> int:
    """Returns the operations for one message, its answers included, while so many nodes compute two leaves each."""
    bench = Bench()
    first, *_ = working(bench, *(f"node-{place:02}" for place in range(nodes)), leaves=2 * nodes)
    first.beat()  # its session was found once
    bench.tick(0.0)
    channel, message, payload = say(first)
    peer = first.control if channel == CONTROL else first.data
    parcel = Parcel(channel, peer, encode(message, payload))

    def take() -> None:
        bench.cluster.receive(parcel, bench.now)
        bench.cluster.tick(bench.now)
        bench.cluster.take_outgoing()

    return operations(take)


@pytest.mark.parametrize("say", [a_credit, a_heartbeat, a_pong, an_answer])
def test_a_message_takes_as_many_operations_among_many_nodes_as_among_few(say: Say) -> None:
    assert 0 < for_a_message(MANY, say) <= 1.05 * for_a_message(FEW, say)


def for_a_block(nodes: int) -> int:
    """Returns the operations for one block of a partial, while every other node has one on its way too."""
    bench = Bench()
    everyone = working(bench, *(f"node-{place:02}" for place in range(nodes)), leaves=nodes)
    for node in everyone:
        node.say(node.offer(node.work[0]))
    first = everyone[0]
    bench.tick(0.0)
    block = m.VectorBlock(first.session, 1, 0)
    parcel = Parcel(DATA, first.data, encode(block, np.zeros_like(ADAPTER).tobytes()))

    def take() -> None:
        bench.cluster.receive(parcel, bench.now)
        bench.cluster.tick(bench.now)
        bench.cluster.take_outgoing()

    return operations(take)


def test_a_block_takes_as_many_operations_among_many_vectors_as_among_few() -> None:
    assert 0 < for_a_block(MANY) <= 1.05 * for_a_block(FEW)


def for_a_step(nodes: int, leaves: int) -> int:
    """Returns the operations of a step with known speeds, each message of which comes alone."""
    macs = tuple(Mac(f"mac-{place:02}", 100.0) for place in range(nodes))
    cluster = SimulatedCluster(Office(macs, 4, one_by_one=True))
    asked = equal_leaves(leaves, 16)
    for number in range(2):
        cluster.step(number, asked)
    return operations(lambda: cluster.step(2, asked))


@pytest.mark.slow
def test_the_work_for_a_step_grows_no_faster_than_its_leaves_and_its_nodes() -> None:
    usual = for_a_step(8, 64)
    assert for_a_step(8, 128) <= 2.2 * usual
    assert for_a_step(16, 64) <= 2.2 * usual


def test_the_speed_of_a_node_is_looked_up_once_for_each_width_and_not_for_each_leaf() -> None:
    class CountingSpeed(Speed):
        asked = 0

        def per_token(self, verb: str, width: int) -> float:
            CountingSpeed.asked += 1
            return super().per_token(verb, width)

    def looked_up(leaves: int) -> int:
        pacing, before = Pacing({"a": CountingSpeed()}), CountingSpeed.asked
        pacing.seconds("gradient", [(64, 8), (32, 4)] * leaves, {"a": CountingSpeed()})
        return CountingSpeed.asked - before

    assert 0 < looked_up(256) == looked_up(1)


def test_all_nodes_are_looked_at_a_few_times_between_two_heartbeats() -> None:
    bench = Bench()
    working(bench, *(f"node-{place}" for place in range(MANY)))
    beat = bench.cluster.settings.timing.beat_seconds
    bench.tick(0.0)
    bench.tick(1.01 * beat / LOOKS)
    full = operations(lambda: bench.cluster.tick(bench.now + 1.01 * beat / LOOKS))
    again = operations(lambda: bench.cluster.tick(bench.now + 1.5 * beat / LOOKS))
    assert again < full / MANY


def test_the_work_of_a_node_is_found_without_looking_at_that_of_others() -> None:
    def found(nodes: int) -> int:
        assignments = Assignments()
        for place in range(nodes):
            assignments[place] = Assignment(place, f"node-{place}", Span(place, place + 1))
        return operations(lambda: (assignments.of("node-1"), assignments.idle("node-1")))

    assert found(MANY) == found(FEW)
