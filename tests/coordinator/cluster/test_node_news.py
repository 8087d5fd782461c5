"""News of the nodes: a cause and what was done for each change, a pause at both its ends."""

from mlxdist.coordinator.cluster.cluster import Cluster
from mlxdist.coordinator.cluster.events import NodeNews
from mlxdist.protocol import messages as m
from mlxdist.protocol.tree import Span
from tests.coordinator.cluster.scripted_node import ADAPTER, Bench, new_cluster, request_of, working


def told(bench: Bench) -> list[NodeNews]:
    news = list(bench.cluster.news)
    bench.cluster.news.clear()
    return news


def needing(min_nodes: int) -> Cluster:
    return new_cluster(min_nodes=min_nodes)


def test_a_loss_says_why_what_was_done_and_which_leaves_go_to_others() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b", leaves=4)
    told(bench)
    node.tell(m.WorkerExit(node.session, "the worker was killed", ()))
    (lost, *_) = told(bench)
    assert (lost.name, lost.state, lost.action, lost.leaves) == (
        "a",
        "connecting",
        "leaves [0, 2) go to others",
        (Span(0, 2),),
    )
    assert lost.cause.startswith("the worker was killed")
    assert lost.message == f"{lost.cause}; {lost.action}"


def test_a_node_without_work_is_lost_without_leaves() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    told(bench)
    node.tell(m.Leave(node.session))
    assert told(bench) == [NodeNews("a", "left", "left")]


def test_a_worker_that_is_restarted_is_told_as_what_was_done() -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b", leaves=4)
    told(bench)
    node.say(m.Fault(node.session, "memory", "out of memory"))
    (lost, *_) = told(bench)
    assert (lost.cause, lost.action) == ("out of memory", "its worker is restarted; leaves [0, 2) go to others")


def test_too_few_nodes_are_a_pause_whose_end_says_how_long_it_was() -> None:
    bench = Bench(needing(2))
    node, other = working(bench, "a", "b", leaves=4)
    told(bench)
    node.tell(m.Leave(node.session))
    lost, pause = told(bench)
    assert (lost.name, lost.leaves) == ("a", (Span(0, 2),))  # the cause comes first
    assert (pause.name, pause.state) == ("", "paused")
    assert pause.message == "paused: 1 of at least 2 nodes can work; waiting for more"
    for _ in range(15):
        bench.tick(1.0)
        other.beat()
    assert told(bench) == []
    bench.ready("c")
    over = told(bench)[-1]
    assert (over.state, over.seconds) == ("training", 15.0)
    assert over.message == "going on after 15 s: 2 of at least 2 nodes can work"


def test_leaves_count_as_recomputed_when_they_were_begun_and_not_when_they_only_waited() -> None:
    bench = Bench()
    bench.cluster.set_adapter(3, ADAPTER)
    node, other = bench.ready("a", "b")
    bench.begin(request_of(8))
    scheduler = bench.cluster.scheduler
    assert scheduler.round is not None
    for leaf in (0, 1):  # computed, but their partial never comes
        node.say(*node.answer(leaf))
    node.tell(m.Leave(node.session))
    assert scheduler.round.recomputed == 1  # leaf 2 was begun, leaf 3 was not
    for leaf in (4, 5, 6, 7):
        other.say(*other.answer(leaf))
    for leaf in (0, 1, 2, 3):
        other.say(*other.answer(leaf, attempt=scheduler.round.of("b")[-1].attempt))
    assert scheduler.round.recomputed == 3
