"""Nodes that are left out of a step, what is said of it, and how they come back, by measured times."""

from collections.abc import Mapping

from mlxdist.protocol import messages as m
from mlxdist.protocol.tree import Span
from tests.coordinator.cluster.scripted_node import (
    ADAPTER,
    PARTIAL,
    Bench,
    ScriptedNode,
    give_back,
    new_cluster,
    request_of,
)

STEPS = 20  # between two looks at a node that was left out


def play(
    bench: Bench, nodes: list[ScriptedNode], leaf_seconds: Mapping[str, float], step: int
) -> dict[str, list[Span]]:
    """One step, done by all in turn, the last one first: who had which spans."""
    bench.cluster.set_adapter(step, ADAPTER)
    bench.begin(request_of(8, step=step, version=step))
    current = bench.cluster.round
    assert current is not None
    spans = {node.name: [attempt.span for attempt in current.of(node.name)] for node in nodes}
    stream = 0
    for node in reversed(nodes):
        for attempt in current.of(node.name):
            for leaf in list(attempt.unanswered):
                node.say(*node.answer(leaf, attempt=attempt.attempt, seconds=leaf_seconds[node.name]))
            for piece in sorted(attempt.missing):
                stream += 1
                node.say(node.offer(piece, stream, attempt=attempt.attempt))
                node.send(stream, PARTIAL)
        for cancel in node.heard(m.Cancel):
            node.say(m.Cancel(node.session, cancel.attempt))
    assert current.complete
    give_back(bench.cluster, [vector for _, vector in bench.cluster.fetch_partials()])
    for node in nodes:
        for cancel in node.heard(m.Cancel):
            node.say(m.Cancel(node.session, cancel.attempt))
    return spans


def told(bench: Bench) -> list[str]:
    return [f"{news.name} {news.message}" for news in bench.cluster.news if "no leaves" in news.message]


def test_the_assignment_moves_to_the_faster_node() -> None:
    bench = Bench()
    nodes = bench.ready("a", "b")
    assert play(bench, nodes, {"a": 1.0, "b": 1.0}, 0) == {"a": [Span(0, 4)], "b": [Span(4, 8)]}
    for step in range(1, 10):
        spans = play(bench, nodes, {"a": 1.0, "b": 3.0}, step)
    assert spans == {"a": [Span(0, 6)], "b": [Span(6, 8)]}
    assert not told(bench)


def test_a_node_that_costs_more_than_it_brings_is_left_out_and_named_once_with_the_numbers() -> None:
    bench = Bench()
    nodes = bench.ready("a", "b", "slow")
    seconds = {"a": 1.0, "b": 1.0, "slow": 50.0}
    for step in range(1, 18):
        spans = play(bench, nodes, seconds, step)
    assert spans == {"a": [Span(0, 4)], "b": [Span(4, 8)], "slow": []}
    assert told(bench) == [
        "slow slows the step down: a leaf takes 50 s there, 1 s on a, and its link 0.01 s more; without it a "
        "step takes 4 s; it gets no leaves for now, stays as a spare and is tried again at least every 20 steps"
    ]
    assert nodes[2].state == "ready"


def test_a_node_for_which_there_are_too_few_leaves_is_not_called_slow() -> None:
    bench = Bench()
    nodes = bench.ready("a", "b", "c", "d", "e")
    for step in range(1, 5):
        spans = play(bench, nodes, dict.fromkeys("abcde", 1.0), step)
    assert sum(not given for given in spans.values()) == 1
    assert not told(bench)


def test_a_spare_node_is_not_sent_adapters_that_it_does_not_need_and_takes_over_what_is_lost() -> None:
    bench = Bench()
    nodes = bench.ready("a", "slow")
    for step in range(1, 6):
        play(bench, nodes, {"a": 1.0, "slow": 50.0}, step)
    nodes[1].heard(m.VectorOffer)
    bench.cluster.set_adapter(9, ADAPTER)
    bench.begin(request_of(8, step=9, version=9))
    assert nodes[1].heard(m.VectorOffer) == []
    nodes[0].tell(m.WorkerExit(nodes[0].session, "killed", ()))
    assert bench.cluster.round is not None
    assert [attempt.span for attempt in bench.cluster.round.of("slow")] == [Span(0, 8)]
    assert [offer.adapter_version for offer in nodes[1].heard(m.VectorOffer)] == [9]


def test_a_node_that_has_become_fast_again_comes_back_by_a_copy_that_nobody_waits_for() -> None:
    bench = Bench()
    nodes = bench.ready("a", "slow")
    seconds = {"a": 1.0, "slow": 50.0}
    seen = [play(bench, nodes, seconds, step)["slow"] for step in range(1, 4)]
    seconds["slow"] = 1.0
    seen += [play(bench, nodes, seconds, step)["slow"] for step in range(4, 2 * STEPS)]
    assert 1 <= sum(not spans for spans in seen) <= STEPS
    assert seen[-1] == [Span(4, 8)]
    assert not bench.failure


def test_a_spare_node_that_has_still_to_let_go_of_a_leaf_pauses_no_run() -> None:
    bench = Bench(new_cluster(min_nodes=2))
    nodes = bench.ready("a", "slow")
    for step in range(1, 3):
        play(bench, nodes, {"a": 1.0, "slow": 50.0}, step)
    bench.cluster.nodes["slow"].worker.cancelled.add(99)
    bench.cluster.set_adapter(9, ADAPTER)
    bench.begin(request_of(8, step=9, version=9))
    assert bench.cluster.round is not None
    assert [attempt.span for attempt in bench.cluster.round.of("a")] == [Span(0, 8)]
    assert not any("paused" in news.message for news in bench.cluster.news)
    assert bench.cluster.scheduler.spare == {"slow": 1}
