"""A lost worker, a failure or silence: the work goes to others, and the run goes on."""

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import ConfigError, MlxdistError, NodeError
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.tree import Span
from tests.coordinator.cluster.scripted_node import (
    ADAPTER,
    PARTIAL,
    Bench,
    ScriptedNode,
    introduction,
    new_cluster,
    restarted,
    snapshot,
    turned_away,
    working,
)

# ---- workers that end


def test_the_exit_of_a_worker_gives_its_leaves_to_the_others_and_names_node_cause_and_leaves() -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2")
    bench.told()
    node.tell(m.WorkerExit(node.session, "the worker was killed (SIGKILL)", ("loading", "Killed: 9")))
    assert bench.told() == (
        "mini-1: the worker was killed (SIGKILL) at a row of 8 tokens (if memory ran out: less is needed with "
        "memory.segment_size = 1 or batch.max_length below 8, or with fewer programs open on this node); "
        "leaves [0, 2) go to others"
    )
    assert (node.state, node.work) == ("connecting", [])
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]
    assert not bench.failure


def test_an_idle_workers_exit_is_told_and_gives_nothing_away() -> None:
    bench = Bench()
    node, _ = bench.ready("mini-1", "mini-2")
    bench.told()
    node.tell(m.WorkerExit(node.session, "the worker ended with exit code 1", ()))
    assert bench.told() == "mini-1: the worker ended with exit code 1"
    assert not bench.failure


def test_what_was_finished_before_the_exit_stays_and_only_the_rest_is_given_again() -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2", leaves=6)
    assert node.work == [Span(0, 3)]  # two subtrees
    for leaf in (0, 1):
        node.say(*node.answer(leaf))
    node.say(node.offer(Span(0, 2)))
    node.send(1, PARTIAL)
    node.tell(m.WorkerExit(node.session, "killed", ()))
    assert sorted(other.work) == [Span(2, 3), Span(3, 6)]
    assert [span for span, _ in bench.cluster.fetch_partials()] == [Span(0, 2)]
    current = bench.cluster.round
    assert current is not None
    assert dict(current.crashes) == {2: 1}


def test_a_lost_exit_message_is_made_good_by_the_next_beat() -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2")
    node.beat(worker_pid=77)
    node.beat(worker_pid=0)
    assert (node.state, node.work) == ("connecting", [])
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]


def test_a_lost_order_to_end_a_worker_is_repeated_at_every_beat_that_still_has_it() -> None:
    bench = Bench()
    node, _ = working(bench, "mini-1", "mini-2")
    node.beat(worker_pid=77)
    node.say(m.Fault(node.session, "error", "something"))
    assert [restart.worker_pid for restart in node.heard(m.Restart, CONTROL)] == [77]
    node.beat(worker_pid=77)
    assert [restart.worker_pid for restart in node.heard(m.Restart, CONTROL)] == [77]
    node.beat(worker_pid=78)
    assert node.heard(m.Restart, CONTROL) == []


def test_a_worker_that_ends_three_times_before_it_is_ready_is_given_up_with_its_last_lines() -> None:
    bench = Bench(new_cluster(launched=frozenset(("mini-1",))))
    node = ScriptedNode(bench, "mini-1")
    for _ in range(3):
        assert not bench.failure
        node.enlist()
        node.hello()
        node.tell(m.WorkerExit(node.session, "the worker ended with exit code 1", ("loading", "no such file")))
    assert type(bench.cluster.failure) is NodeError
    assert bench.failure == "mini-1: the worker ended with exit code 1; its last lines:\n  | loading\n  | no such file"
    assert node.state == "left"


def test_a_worker_that_was_ready_between_two_early_ends_is_not_given_up() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "mini-1")
    for _ in range(4):
        node.enlist()
        node.hello()
        node.tell(m.WorkerExit(node.session, "killed", ()))
        node.get_ready()
        node.tell(m.WorkerExit(node.session, "killed", ()))
    assert bench.cluster.members.given_up == {}


# ---- faults


@pytest.mark.parametrize("kind", ["config", "load", "memory", "else", "nonfinite"])
def test_a_fault_of_a_working_node_gives_its_work_to_others_and_its_worker_is_restarted(kind: str) -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2")
    bench.told()
    node.say(m.Fault(node.session, kind, "something that is not of one leaf"))
    restarted(node, "mini-1: something that is not of one leaf", "leaves [0, 2) go to others")
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]


@pytest.mark.parametrize(("kind", "error"), [("config", ConfigError), ("load", NodeError), ("else", NodeError)])
def test_a_fault_while_loading_turns_the_node_away_with_its_reason(kind: str, error: type[MlxdistError]) -> None:
    bench = Bench()
    node = ScriptedNode(bench, "mini-1")
    node.enlist()
    node.hello()
    node.say(m.Fault(node.session, kind, "no folder of this name"))
    turned_away(node, error, "mini-1: no folder of this name")


def test_a_worker_that_connects_anew_is_given_nothing_before_it_has_loaded_again() -> None:
    bench = Bench()
    (node,) = working(bench, "only")
    bench.mail.clear()
    old = node.session
    node.hello()
    assert (node.state, node.work) == ("connecting", [])
    assert node.heard(m.Stale, CONTROL) == [m.Stale(old, "its worker connected again", over=True)]
    node.enlist()
    node.hello()
    assert (node.state, node.work) == ("loading", [])
    node.say(introduction(node.session))
    node.say(m.CanaryAnswer(node.session, ("a",) * 3))
    assert node.work == [Span(0, 4)]


def test_a_new_worker_of_a_node_gets_a_session_of_its_own_and_everything_again() -> None:
    bench = Bench()
    (node,) = bench.ready("mini-1")
    bench.cluster.set_reference(ADAPTER)
    bench.cluster.set_adapter(3, ADAPTER)
    bench.collect()
    before = node.session
    node.tell(m.WorkerExit(before, "killed", ()))
    bench.mail.clear()
    node.hello()
    assert len(node.heard(m.Stale)) == 1  # the session of a worker that has ended
    assert node.state == "connecting"
    node.get_ready()
    assert node.session != before
    assert node.state == "ready"
    assert [offer.kind for offer in node.heard(m.VectorOffer)] == ["reference", "adapter"]
    assert len(bench.cluster.nodes) == 1


# ---- silence


def test_a_silent_node_is_suspect_then_dead_and_its_work_goes_to_others_only_then() -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2")
    bench.tick(6.0)
    assert node.state == "busy"
    other.beat()
    bench.tick(0.5)
    assert (node.state, other.state) == ("suspect", "busy")
    assert [one.name for one in bench.cluster.ready()] == ["mini-2"]
    other.beat()
    bench.tick(8.5)
    assert (node.state, node.work) == ("suspect", [Span(0, 2)])
    other.beat()
    bench.told()
    bench.tick(0.5)
    assert (node.state, other.state) == ("dead", "busy")
    assert bench.told() == "mini-1: not heard for 15.5 s; leaves [0, 2) go to others"
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]
    assert not bench.failure


def test_a_node_that_was_declared_dead_is_told_that_its_session_is_over_and_joins_as_a_new_one() -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2")
    session, late = node.session, node.answer(0)
    bench.tick(15.0)
    other.beat()
    bench.tick(0.5)
    before = snapshot(bench)
    bench.mail.clear()
    node.say(*late)
    node.tell(m.Heartbeat(session, 2))
    assert node.heard(m.Stale) == [m.Stale(session, "LeafAnswer", over=True)]
    assert node.heard(m.Stale, CONTROL) == [m.Stale(session, "Heartbeat", over=True)]
    assert snapshot(bench) == before
    node.get_ready()
    assert (node.state, len(bench.cluster.nodes)) == ("ready", 2)
    assert node.session != session


def test_a_coordinator_that_slept_does_not_count_silence_in_that_time() -> None:
    bench = Bench()
    node, _ = working(bench, "mini-1", "mini-2")
    bench.now += 8 * 3600.0
    bench.cluster.slept(8 * 3600.0, 0.0, bench.now)
    bench.tick(0.5)
    assert (node.state, node.work) == ("busy", [Span(0, 2)])


def test_a_suspect_node_that_beats_again_is_back_at_what_it_did() -> None:
    bench = Bench()
    (idle,) = bench.ready("idle")
    bench.tick(7.0)
    idle.beat()
    assert idle.state == "ready"
    (busy,) = working(bench, "a")[:1]
    bench.tick(7.0)
    assert busy.state == "suspect"
    busy.say(*busy.answer(0))
    assert busy.state == "suspect"  # the worker's answers count; the supervisor is still silent
    busy.beat()
    assert busy.state == "busy"
    assert not bench.failure


def test_a_suspect_node_that_finishes_meanwhile_is_ready_when_it_beats_again() -> None:
    bench = Bench()
    (node,) = working(bench, "a", leaves=1)
    bench.tick(7.0)
    node.say(*node.answer(0))
    node.say(node.offer(Span(0, 1)))
    node.send(1, PARTIAL)
    assert node.state == "suspect"
    assert bench.cluster.round is not None
    assert bench.cluster.round.complete
    node.beat()
    assert node.state == "ready"


def test_a_beat_is_noted_so_that_the_node_hears_its_coordinator() -> None:
    bench = Bench()
    (node,) = bench.ready("a")
    node.tell(m.Heartbeat(node.session, 2))
    assert node.heard(m.HeartbeatAck, CONTROL) == [m.HeartbeatAck(node.session)]


def test_a_loading_node_that_is_silent_is_not_suspect_but_dies_too() -> None:
    bench = Bench()
    node = ScriptedNode(bench, "a")
    node.enlist()
    node.hello()
    bench.tick(14.0)
    assert node.state == "loading"
    bench.tick(2.0)
    assert node.state == "dead"


def test_neither_the_dead_nor_those_who_left_are_told_goodbye_or_die_again() -> None:
    bench = Bench()
    dead, left = bench.ready("dead", "left")
    left.tell(m.Leave(left.session))
    bench.tick(16.0)
    bench.mail.clear()
    bench.told()
    bench.cluster.goodbye("done")
    bench.collect()
    bench.tick(100.0)
    assert not bench.mail
    assert not bench.told()
    assert (dead.state, left.state, bench.failure) == ("dead", "left", "")


def test_lines_and_sentences_of_a_node_become_news_with_its_name() -> None:
    bench = Bench(new_cluster())
    (node,) = bench.ready("a")
    bench.cluster.news.clear()
    node.tell(m.Log(node.session, ("first", "second")))
    node.say(m.Progress(node.session, "hashing the model's files"))
    assert [(news.name, news.message, news.log) for news in bench.cluster.news] == [
        ("a", "first", True),
        ("a", "second", True),
        ("a", "hashing the model's files", False),
    ]
