"""Leaves that give NaN, and leaves at which workers die: computed elsewhere, then alone, and only then a failure."""

from typing import Any

import pytest

from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.protocol import messages as m
from mlxdist.protocol.errors import NodeError, NonFiniteError
from mlxdist.protocol.tree import Span
from tests.coordinator.cluster.scripted_node import (
    PARTIAL,
    Bench,
    ScriptedNode,
    failed_with,
    restarted,
    snapshot,
    working,
)


def attempts(bench: Bench) -> list[Assignment]:
    return list(bench.cluster.round.assignments.values()) if bench.cluster.round is not None else []


def nonfinite(node: ScriptedNode, at: int, **changes: Any) -> m.Fault:
    values = {"step": 4, "attempt": node.attempt, "leaf": at}
    return m.Fault(node.session, "nonfinite", f"NaN in leaf {at}", **{**values, **changes})


def test_a_leaf_that_is_nan_on_one_node_is_computed_alone_on_another_and_the_run_goes_on() -> None:
    bench = Bench()
    bad, good = working(bench, "bad", "good")
    for leaf in (2, 3):
        good.say(*good.answer(leaf))
    good.say(good.offer(Span(2, 4)))
    good.send(1, PARTIAL)
    bad.say(nonfinite(bad, 0))
    assert "bad: NaN or Inf in leaf 0 of step 4 (rows 0); computed on another node" in bench.told()
    assert good.work == [Span(0, 1)]
    assert bad.work == [Span(1, 2)]
    assert not bench.failure


def test_a_leaf_that_is_nan_on_two_nodes_ends_the_run_and_names_rows_and_nodes() -> None:
    bench = Bench()
    first, second = working(bench, "a", "b", leaves=2)
    second.say(*second.answer(1))
    second.say(second.offer(Span(1, 2)))
    second.send(1, PARTIAL)
    first.say(nonfinite(first, 0))
    assert not bench.failure
    second.say(nonfinite(second, 0))
    failed_with(bench, NonFiniteError, "NaN or Inf in leaf 0 of step 4 (rows 0), on a and on b: no step was taken")


def test_the_worker_of_the_only_node_is_restarted_at_a_nan_and_the_same_again_ends_the_run() -> None:
    bench = Bench()
    (node,) = working(bench, "a", leaves=2)
    node.say(nonfinite(node, 1))
    restarted(node, "a: NaN or Inf in leaf 1 of step 4 (rows 1); its worker is restarted")
    node.get_ready()
    assert not bench.failure
    alone = next(one for one in attempts(bench) if one.alone)
    assert alone.span == Span(1, 2)
    node.say(nonfinite(node, 1, attempt=alone.attempt))
    failed_with(
        bench,
        NonFiniteError,
        "leaf 1 of step 4 (rows 1), on a, also after its worker was restarted, and no other node is there",
    )


def test_a_restart_at_one_leaf_does_not_blame_the_rows_of_another_leaf() -> None:
    bench = Bench()
    (node,) = working(bench, "a", leaves=2)
    node.say(nonfinite(node, 1))
    restarted(node, "NaN or Inf in leaf 1 of step 4")
    node.get_ready()
    node.say(node.offer(Span(1, 2)))
    node.send(1, PARTIAL)
    node.say(nonfinite(node, 0))
    restarted(node, "NaN or Inf in leaf 0 of step 4 (rows 0); its worker is restarted")
    node.get_ready()
    node.say(nonfinite(node, 0))
    failed_with(bench, NonFiniteError, "leaf 0 of step 4 (rows 0), on a, also after its worker was restarted")


def test_nan_that_one_worker_finds_twice_in_a_leaf_is_no_result_when_the_other_node_has_left() -> None:
    bench = Bench()
    (node,) = working(bench, "a", leaves=2)
    node.say(nonfinite(node, 1))
    restarted(node, "NaN or Inf in leaf 1 of step 4")
    node.get_ready()
    node.say(node.offer(Span(1, 2)))
    node.send(1, PARTIAL)
    other = ScriptedNode(bench, "b")
    other.get_ready()
    node.say(nonfinite(node, 0))
    assert "computed on another node" in bench.told()
    other.tell(m.Leave(other.session))
    node.say(nonfinite(node, 0))
    restarted(node, "NaN or Inf in leaf 0 of step 4 (rows 0); its worker is restarted")


@pytest.mark.parametrize("change", [{"step": 3}, {"attempt": 99}, {"attempt": 0}], ids=str)
def test_a_nan_of_another_step_or_attempt_is_stale_and_changes_nothing(change: dict[str, int]) -> None:
    bench = Bench()
    node, _ = working(bench, "a", "b")
    bench.mail.clear()
    before = snapshot(bench)
    node.say(nonfinite(node, 0, **change))
    assert len(node.heard(m.Stale)) == 1
    assert snapshot(bench) == before


def dies(bench: Bench, name: str) -> None:
    """The node's worker ends at its first leaf, and its next one is ready."""
    node = ScriptedNode(bench, name)
    node.tell(m.WorkerExit(node.session, "killed", ()))
    node.get_ready()


def test_a_leaf_in_work_at_two_crashes_goes_alone_to_an_idle_node_and_a_third_crash_there_names_its_rows() -> None:
    bench = Bench()
    _, second = working(bench, "a", "b", leaves=2)
    second.say(*second.answer(1))
    second.say(second.offer(Span(1, 2)))
    second.send(1, PARTIAL)
    dies(bench, "a")
    assert [(one.node, one.span, one.alone) for one in attempts(bench)] == [("b", Span(0, 1), False)]
    dies(bench, "b")
    ((taker, run, alone),) = [(one.node, one.span, one.alone) for one in attempts(bench)]
    assert (run, alone) == (Span(0, 1), True)
    assert not bench.failure
    ScriptedNode(bench, taker).tell(m.WorkerExit(ScriptedNode(bench, taker).session, "killed", ()))
    failed_with(
        bench,
        NodeError,
        "3 workers ended while they computed leaf 0 of step 4 (rows 0), the last one with nothing else",
    )


def test_a_third_crash_beside_other_work_ends_nothing_and_the_leaf_goes_alone_then() -> None:
    bench = Bench()
    working(bench, "a", "b", leaves=4)
    current = bench.cluster.round
    assert current is not None
    current.crashes[0] = 2  # in work twice, and for a third time now, beside leaf 1
    dies(bench, "a")
    assert not bench.failure
    assert current.crashes[0] == 3
    taken = [(one.span, one.alone) for one in attempts(bench) if one.span.start == 0]
    assert taken == [(Span(0, 1), True)]


@pytest.mark.parametrize("how", ["left", "turned away", "connected again"])
def test_who_leaves_is_turned_away_or_connects_anew_is_no_crash_of_its_leaf(how: str) -> None:
    bench = Bench()
    node, other = working(bench, "a", "b")
    if how == "left":
        node.tell(m.Leave(node.session))
    elif how == "turned away":
        node.say(node.offer(Span(0, 2), kind="adapter"))
    else:
        node.hello()
    assert node.work == []
    assert sorted(other.work) == [Span(0, 2), Span(2, 4)]
    assert bench.cluster.round is not None
    assert not +bench.cluster.round.crashes
