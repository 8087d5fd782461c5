"""The promise of the same bits is kept, by holding nodes of another class back, or taken back with step and reason."""

from dataclasses import replace
from typing import Any

import pytest

from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol import messages as m
from mlxdist.protocol.numerics import SAME_BITS, TOLERANCE, Promise
from mlxdist.protocol.tree import Span
from tests.coordinator.cluster.scripted_node import (
    ADAPTER,
    CANARY,
    PARTIAL,
    Bench,
    ScriptedNode,
    new_cluster,
    request_of,
)

OTHER = ("other", "other", "other")
UNSTEADY = ("same", "same", "other")


def started(*names: str, earlier: Promise | None = None, **changes: Any) -> tuple[Bench, list[ScriptedNode]]:
    """A run that begins its fourth step on these nodes, which have the canary of the run."""
    bench = Bench(new_cluster(**changes))
    nodes = bench.ready(*names)
    bench.cluster.set_adapter(3, ADAPTER)
    assert bench.cluster.begin_promise(1, earlier).kind == SAME_BITS
    bench.told()
    return bench, nodes


def joins(bench: Bench, name: str, canary: tuple[str, ...] = OTHER) -> ScriptedNode:
    """A node that comes late."""
    node = ScriptedNode(bench, name)
    node.get_ready(canary=canary)
    return node


def kept(bench: Bench) -> bool:
    """True while the run promises the same bits."""
    assert bench.cluster.bits.promise is not None
    return bench.cluster.bits.promise.kind == SAME_BITS


def leaves(node: ScriptedNode) -> None:
    node.tell(m.Leave(node.session))
    node.bench.tick(0.0)


def changes_told(bench: Bench) -> list[Promise]:
    """The promises that were told since the last time."""
    news = [bench.cluster.news.popleft() for _ in range(len(bench.cluster.news))]
    return [item.promise for item in news if item.promise is not None]


# ---- kept


@pytest.mark.parametrize("canary", [OTHER, UNSTEADY, ("new", "newer", "newest")], ids=str)
def test_a_late_node_of_another_class_waits_as_a_spare_and_is_sent_nothing(canary: tuple[str, ...]) -> None:
    bench, (node,) = started("a")
    late = joins(bench, "late", canary)
    assert "late: ready; it computes a test batch with other last bits than the nodes of this run: it waits" in (
        bench.told()
    )
    assert late.heard(m.VectorOffer) == []
    bench.begin(request_of(4))
    assert (node.work, late.work) == ([Span(0, 4)], [])
    assert [one.name for one in bench.cluster.ready()] == ["a"]
    assert kept(bench)


def test_a_late_node_of_the_same_class_works_at_once() -> None:
    bench, _ = started("a")
    late = joins(bench, "late", CANARY)
    assert [offer.kind for offer in late.heard(m.VectorOffer)] == ["adapter"]
    bench.begin(request_of(4))
    assert late.work == [Span(2, 4)]
    assert kept(bench)


def test_a_spare_stays_one_while_a_node_of_the_class_may_come_back() -> None:
    bench, (node,) = started("a")
    late = joins(bench, "late")
    bench.begin(request_of(4))
    node.tell(m.WorkerExit(node.session, "killed", ()))
    for _ in range(60):
        bench.tick(2.0)
        for one in (node, late):
            one.beat()
    assert late.work == []
    node.get_ready()
    assert node.work == [Span(0, 4)]
    assert kept(bench)


def test_a_spare_stays_one_while_a_launched_node_is_started_again() -> None:
    bench, (node,) = started("a", launched=frozenset("a"))
    late = joins(bench, "late")
    bench.begin(request_of(4))
    bench.cluster.supervisor_ended("a", RuntimeError("killed"), False)  # type: ignore[arg-type]
    bench.tick(1.0)
    assert (node.state, late.work) == ("dead", [])
    assert kept(bench)


def test_the_first_node_that_comes_back_with_other_bits_is_a_spare_of_those_that_stayed() -> None:
    bench, (first, second) = started("a", "b")
    first.tell(m.WorkerExit(first.session, "killed", ()))
    first.get_ready(canary=OTHER)
    bench.begin(request_of(4))
    assert (first.work, second.work) == ([], [Span(0, 4)])
    assert kept(bench)
    first.tell(m.WorkerExit(first.session, "killed", ()))
    first.get_ready()
    second.tell(m.WorkerExit(second.session, "killed", ()))
    assert first.work == [Span(0, 4)]
    assert kept(bench)


def test_a_spare_does_not_count_for_the_least_number_of_nodes_while_enough_others_may_come() -> None:
    bench, (first, _) = started("a", "b", min_nodes=2)
    late = joins(bench, "late")
    first.tell(m.WorkerExit(first.session, "killed", ()))
    bench.begin(request_of(4))
    assert bench.cluster.scheduler.paused_at is not None
    assert late.work == []
    assert kept(bench)


def test_a_silent_spare_is_suspect_and_dead_like_any_node() -> None:
    bench, (node,) = started("a")
    late = joins(bench, "late")
    bench.tick(6.5)
    node.beat()
    assert late.state == "suspect"
    bench.tick(9.0)
    assert late.state == "dead"


def test_an_audit_asks_a_node_of_another_class_without_an_end_of_the_promise() -> None:
    bench, _ = started("a")
    late = joins(bench, "late")
    question: Request = replace(request_of(1), only={0: ("late",)}, apart=frozenset([0]))
    nodes = bench.cluster.nodes
    assert bench.cluster.bits.given(nodes["late"], question, nodes) == []
    assert late.work == []
    assert kept(bench)


# ---- taken back


def test_a_spare_works_when_no_other_node_is_left_and_the_promise_ends_with_step_and_reason() -> None:
    bench, (node,) = started("a")
    late = joins(bench, "late")
    bench.begin(request_of(4))
    leaves(node)
    assert late.work == [Span(0, 4)]
    assert [offer.kind for offer in late.heard(m.VectorOffer)] == ["adapter"]
    (changed,) = changes_told(bench)
    assert (changed.kind, changed.from_step, changed.bit_class) == (TOLERANCE, 4, "")
    assert changed.reason == (
        "late computes since then: it computes a test batch with other last bits than the nodes of this run, and was "
        "used because too few of these were left"
    )
    again = joins(bench, "a", CANARY)
    assert not bench.cluster.nodes["a"].held_back
    late.say(m.Fault(late.session, "error", "gone"))
    assert again.work == [Span(0, 4)]
    assert changes_told(bench) == []


def test_a_spare_works_when_the_others_do_not_come_back_in_time() -> None:
    bench, (node,) = started("a")
    late = joins(bench, "late")
    bench.begin(request_of(4))
    node.tell(m.WorkerExit(node.session, "killed", ()))
    seconds = 0.0
    while not late.work:
        bench.tick(2.0)
        seconds += 2.0
        for one in (node, late):
            one.beat()
    assert 600.0 < seconds < 605.0
    assert not kept(bench)


def test_spares_help_to_reach_the_least_number_of_nodes_when_others_have_left() -> None:
    bench, (first, second) = started("a", "b", min_nodes=2)
    late = joins(bench, "late")
    leaves(first)
    bench.begin(request_of(4))
    assert sorted([*second.work, *late.work]) == [Span(0, 2), Span(2, 4)]
    assert not kept(bench)


def test_a_spare_that_was_not_needed_after_all_waits_again() -> None:
    bench, (first, second) = started("a", "b", min_nodes=2)
    late = joins(bench, "A")
    leaves(first)
    bench.begin(request_of(1))
    assert (second.work, late.work) == ([Span(0, 1)], [])
    again = joins(bench, "a", CANARY)
    second.say(second.offer(Span(0, 1)))
    second.send(1, PARTIAL)
    bench.begin(request_of(4, step=5, version=3))
    assert (again.work, second.work, late.work) == ([Span(0, 2)], [Span(2, 4)], [])
    assert kept(bench)


def test_a_spare_that_was_given_nothing_gets_no_copy_once_enough_others_are_there() -> None:
    bench, (first, second) = started("a", "b", min_nodes=2)
    late = joins(bench, "A")
    leaves(first)
    bench.begin(request_of(1))
    assert (second.work, late.work) == ([Span(0, 1)], [])
    joins(bench, "a", CANARY)
    assert bench.cluster.round is not None
    assert not bench.cluster.round.pending
    assert [one.name for one in bench.cluster.ready()] == ["a", "b"]


@pytest.mark.parametrize("verb", ["gradient", "score"])
def test_a_mixed_run_uses_every_node_and_its_promise_ends_with_the_first_leaf_of_another_class(verb: str) -> None:
    bench, _ = started("a", mixed="allow")
    late = joins(bench, "late")
    assert "late: ready; it computes a test batch with other last bits than the nodes of this run, and is used, as" in (
        bench.told()
    )
    assert kept(bench)
    bench.begin(request_of(4, verb=verb))
    assert late.work == [Span(2, 4)]
    (changed,) = changes_told(bench)
    assert (changed.kind, changed.from_step) == (TOLERANCE, 4)
    assert 'coordinator.mixed = "allow" uses it' in changed.reason


def test_a_node_whose_canary_did_not_tell_its_class_ends_the_promise() -> None:
    bench, _ = started("a", "b")
    bench.cluster.end_promise("b", "gives leaf 2 of step 9 other last bits", 9)
    (changed,) = changes_told(bench)
    assert (changed.kind, changed.from_step) == (TOLERANCE, 9)
    assert changed.reason == "b gives leaf 2 of step 9 other last bits; steps before may have other last bits too"
    bench.cluster.end_promise("a", "too", 10)
    assert changes_told(bench) == []


# ---- at the start, and when a run is resumed


def test_nodes_of_two_classes_at_the_start_all_work_under_a_tolerance() -> None:
    bench = Bench()
    bench.ready("a")
    other = joins(bench, "b")
    assert bench.cluster.begin_promise(1, None).kind == TOLERANCE
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(4))
    assert other.work == [Span(2, 4)]
    assert changes_told(bench) == []


def test_nodes_that_have_left_before_the_start_are_not_asked_what_is_promised() -> None:
    bench = Bench()
    leaves(joins(bench, "b"))
    bench.ready("a")
    promised = bench.cluster.begin_promise(1, None)
    assert promised.kind == SAME_BITS
    assert promised.reason.startswith("a computed a test batch with the same bits each time")


EARLIER = Promise(SAME_BITS, "of the first session", 1, CANARY[0])


def test_a_resumed_run_keeps_its_promise_with_nodes_of_its_class_and_the_others_are_spares() -> None:
    bench = Bench()
    (node,) = bench.ready("new")
    other = joins(bench, "other")
    assert bench.cluster.begin_promise(4, EARLIER) == EARLIER
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(4))
    assert (node.work, other.work) == ([Span(0, 4)], [])


@pytest.mark.parametrize("canary", [OTHER, UNSTEADY], ids=str)
def test_a_run_that_is_resumed_on_another_class_says_from_which_step(canary: tuple[str, ...]) -> None:
    bench = Bench()
    node = joins(bench, "new", canary)
    changed = bench.cluster.begin_promise(4, EARLIER)
    assert (changed.kind, changed.from_step) == (TOLERANCE, 4)
    assert changed.reason == "the run was resumed on new, with other last bits than those of the nodes before"
    bench.cluster.set_adapter(3, ADAPTER)
    bench.begin(request_of(4))
    assert node.work == [Span(0, 4)]


def test_a_tolerance_of_earlier_steps_stays_one() -> None:
    bench = Bench()
    bench.ready("a", "b")
    before = Promise(TOLERANCE, "mixed", 2)
    assert bench.cluster.begin_promise(4, before) == before


def test_a_canary_without_digests_is_none() -> None:
    bench, _ = started("a")
    late = joins(bench, "late", ("", "", ""))
    assert late.state == "connecting"
