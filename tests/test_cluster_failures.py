"""What ends a run, and with whose name: exits, faults and silence."""

import pytest

from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import ConfigError, MlxdistError, NodeError, NonFiniteError
from mlxdist.protocol.transport import CONTROL
from mlxdist.protocol.tree import Span
from tests.scripted_node import (
    ADAPTER,
    PARTIAL,
    Bench,
    ScriptedNode,
    failed_with,
    introduction,
    new_cluster,
    working,
)

# ---- what ends a run


def test_the_exit_of_a_worker_names_the_node_the_cause_and_its_last_lines() -> None:
    bench = Bench()
    node, other = working(bench, "mini-1", "mini-2")
    node.tell(m.WorkerExit(node.life, "the worker was killed (SIGKILL)", ("loading", "Killed: 9")))
    failed_with(bench, NodeError)
    assert bench.failure == ("mini-1: the worker was killed (SIGKILL); its last lines:\n  | loading\n  | Killed: 9")
    assert node.state == "connecting"
    other.tell(m.WorkerExit(other.life, "later", ()))
    assert "mini-1" in bench.failure  # the first cause is the one to know


def test_the_exit_of_a_worker_without_a_line_needs_no_heading() -> None:
    bench = Bench()
    (node,) = working(bench, "mini-1")
    node.tell(m.WorkerExit(node.life, "the worker ended with exit code 1", ()))
    assert bench.failure == "mini-1: the worker ended with exit code 1"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("nonfinite", NonFiniteError),
        ("config", ConfigError),
        ("load", NodeError),
        ("memory", NodeError),
        ("else", NodeError),
    ],
)
def test_a_fault_is_the_failure_that_its_kind_says_with_the_nodes_name(kind: str, error: type[MlxdistError]) -> None:
    bench = Bench()
    (node,) = working(bench, "mini-1")
    node.say(m.Fault(node.life, kind, "NaN in step 4, leaf 0, rows 17"))
    failed_with(bench, error)
    assert bench.failure == "mini-1: NaN in step 4, leaf 0, rows 17"


def test_a_new_worker_of_a_node_gets_everything_anew() -> None:
    bench = Bench()
    (node,) = bench.ready("mini-1")
    bench.cluster.set_reference(ADAPTER)
    bench.cluster.set_adapter(3, ADAPTER)
    bench.collect()
    node.tell(m.WorkerExit(node.life, "killed", ()))
    bench.mail.clear()
    node.hello()
    node.say(introduction(node.life))
    node.say(m.CanaryAnswer(node.life, ("a",) * 3))
    assert node.state == "ready"
    assert [offer.kind for offer in node.heard(m.VectorOffer)] == ["reference", "adapter"]


# ---- silence


def test_a_silent_node_is_suspect_then_dead_and_the_failure_says_how_long() -> None:
    bench = Bench()
    node, other = bench.ready("mini-1", "mini-2")
    bench.tick(6.0)
    assert node.state == "ready"
    other.beat()
    bench.tick(0.5)
    assert (node.state, other.state) == ("suspect", "ready")
    assert [one.name for one in bench.cluster.ready()] == ["mini-2"]
    other.beat()
    bench.tick(8.5)
    assert node.state == "suspect"
    other.beat()
    bench.tick(0.5)
    assert (node.state, other.state) == ("dead", "ready")
    failed_with(bench, NodeError, "mini-1 has not been heard for 16 s")


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
    node.tell(m.Beat(node.life, 41, 2, 3))
    assert node.heard(m.Noted, CONTROL) == [m.Noted(node.life, 41)]


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
    left.tell(m.Left(left.life))
    bench.tick(16.0)
    bench.mail.clear()
    failure = bench.failure
    bench.cluster.goodbye("done")
    bench.collect()
    bench.tick(100.0)
    assert not bench.mail
    assert (dead.state, left.state, bench.failure) == ("dead", "left", failure)


def test_lines_and_sentences_of_a_node_become_news_with_its_name() -> None:
    bench = Bench(new_cluster())
    (node,) = bench.ready("a")
    bench.cluster.news.clear()
    node.tell(m.Log(node.life, ("first", "second")))
    node.say(m.Progress(node.life, "hashing the model's files"))
    assert [(news.name, news.message, news.log) for news in bench.cluster.news] == [
        ("a", "first", True),
        ("a", "second", True),
        ("a", "hashing the model's files", False),
    ]
