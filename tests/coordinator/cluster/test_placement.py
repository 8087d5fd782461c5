"""Placements: every pending leaf to one node, the suspicious ones alone, copies of late ones to idle nodes."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.cluster.node import Control, Node
from mlxdist.coordinator.cluster.placement import Placement, copies, place
from mlxdist.coordinator.schedule.assign import NodeSeconds
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Round, begin_round, joined_spans, without
from mlxdist.protocol.messages import SessionId
from mlxdist.protocol.tree import Span
from mlxdist.protocol.vectors import Vector
from tests.coordinator.cluster.scripted_node import PARTIAL, new_cluster, request_of


def nodes_of(*names: str) -> list[Node]:
    return [
        Node(name, SessionId("run", 1, str(index)), Control(name.encode(), 0.0)) for index, name in enumerate(names)
    ]


def placed(round_: Round, nodes: Sequence[Node]) -> list[Placement]:
    """The placements, given."""
    seconds = {node.name: NodeSeconds([1.0] * len(round_.request.leaves)) for node in nodes}
    placements = list(place(round_, nodes, seconds))
    for placement in placements:
        round_.give(
            len(round_.assignments) + 1 + 100 * round_.recomputed, placement.node, placement.span, alone=placement.alone
        )
    return placements


def round_of(leaves: int, *, crashes: dict[int, int] | None = None, nan: dict[int, list[str]] | None = None) -> Round:
    round_ = begin_round(None, request_of(leaves))
    round_.crashes.update(crashes or {})
    round_.nonfinite.update(nan or {})
    return round_


@given(
    leaves=st.integers(1, 16),
    names=st.integers(1, 5),
    crashes=st.dictionaries(st.integers(0, 15), st.integers(0, 4), max_size=3),
    nan=st.dictionaries(st.integers(0, 15), st.just(["a"]), max_size=2),
)
def test_every_pending_leaf_is_given_to_one_node_or_stays_pending_and_the_suspicious_ones_are_alone(
    leaves: int, names: int, crashes: dict[int, int], nan: dict[int, list[str]]
) -> None:
    round_ = round_of(leaves, crashes=crashes, nan=nan)
    placements = placed(round_, nodes_of(*"abcde"[:names]))
    spans = [*(placement.span for placement in placements), *round_.pending]
    assert Counter(leaf for span in spans for leaf in range(span.start, span.stop)) == Counter(range(leaves))
    marked = {leaf for leaf in range(leaves) if crashes.get(leaf, 0) >= 2 or leaf in nan}
    for placement in placements:
        assert placement.alone == (placement.span.start in marked)
        if placement.alone:
            assert len(placement.span) == 1
            assert [one.node for one in placements].count(placement.node) == 1, "something else with it"
    if marked:
        assert any(placement.alone for placement in placements), "all wait although a node is idle"


@pytest.mark.parametrize(("crashes", "alone"), [(0, False), (1, False), (2, True), (3, True)])
def test_a_leaf_goes_alone_after_two_crashes_with_it_in_work(crashes: int, alone: bool) -> None:
    round_ = round_of(4, crashes={2: crashes})
    placements = placed(round_, nodes_of("a", "b"))
    assert any(placement.alone and placement.span == Span(2, 3) for placement in placements) is alone


def test_a_suspicious_leaf_waits_for_a_node_that_is_idle() -> None:
    round_ = round_of(4)
    nodes = nodes_of("a", "b")
    placed(round_, nodes)
    lost = next(attempt for attempt in round_.assignments.values() if attempt.node == "a")
    round_.crashes[0] = 2
    round_.drop(lost)
    assert placed(round_, nodes[1:]) == [Placement("b", Span(1, 2))]  # b is at work: leaf 0 waits, the other does not
    assert round_.pending == [Span(0, 1)]


def test_a_node_with_a_leaf_alone_is_given_nothing_else() -> None:
    round_ = round_of(1, crashes={0: 2})
    nodes = nodes_of("a")
    assert placed(round_, nodes) == [Placement("a", Span(0, 1), alone=True)]
    round_.pending = [Span(0, 1)]  # whatever it may be
    round_.crashes.clear()
    assert placed(round_, nodes) == []


def test_a_leaf_that_gave_nan_goes_to_a_node_on_which_it_did_not() -> None:
    round_ = round_of(2, nan={0: ["a"]})
    alone = [placement for placement in placed(round_, nodes_of("a", "b")) if placement.alone]
    assert alone == [Placement("b", Span(0, 1), alone=True)]


def test_two_leaves_that_gave_nan_on_one_node_both_wait_for_the_other_node() -> None:
    round_ = round_of(2, nan={0: ["a"], 1: ["a"]})
    nodes = nodes_of("a", "b")
    assert placed(round_, nodes) == [Placement("b", Span(0, 1), alone=True)]
    assert round_.pending == [Span(1, 2)]
    assert placed(round_, nodes) == []


def test_a_node_whose_partial_waits_for_room_takes_the_leaf_that_the_sum_waits_for() -> None:
    round_ = round_of(8)
    waiting = round_.give(1, "a", Span(4, 8))
    waiting.answered.update(range(4, 8))
    lost = round_.give(2, "b", Span(0, 4))
    round_.drop(lost)
    round_.nonfinite[0] = ["b"]
    assert Placement("a", Span(0, 1), alone=True) in placed(round_, nodes_of("a", "b"))


def test_the_only_node_computes_a_nan_once_more_itself() -> None:
    round_ = round_of(2, nan={1: ["a"]})
    assert Placement("a", Span(1, 2), alone=True) in placed(round_, nodes_of("a"))


def late(attempt: Assignment) -> bool:
    return True


def test_what_is_late_is_copied_once_by_an_idle_node_and_never_while_something_is_pending() -> None:
    round_ = round_of(4)
    nodes = nodes_of("a", "b", "c")
    round_.give(1, "a", Span(0, 4))
    placements = list(copies(round_, nodes, late))
    assert placements == [Placement("b", Span(0, 4), copy=True)]
    round_.give(2, "b", Span(0, 4), copy=True)
    assert list(copies(round_, nodes, late)) == []  # c has nothing to do, and there is nothing more to copy
    round_.pending = [Span(0, 1)]
    assert list(copies(round_, nodes, late)) == []


def test_neither_a_copy_nor_a_leaf_that_is_alone_is_copied() -> None:
    round_ = round_of(2)
    round_.give(1, "a", Span(0, 1), alone=True)
    round_.give(2, "b", Span(1, 2), copy=True)
    assert list(copies(round_, nodes_of("a", "b", "c"), late)) == []


# ---- what is lost


def test_a_lost_attempt_of_which_a_copy_lives_gives_back_only_what_the_copy_does_not_have() -> None:
    round_ = round_of(6)
    first = round_.give(1, "a", Span(0, 6))
    assert first.missing == {Span(0, 6)}
    round_.assignments.clear()
    round_.pending = [Span(0, 6)]
    first = round_.give(1, "a", Span(0, 3))  # [0, 2) and [2, 3)
    round_.give(2, "b", Span(3, 6))
    round_.give(3, "c", Span(2, 3), copy=True)
    assert round_.drop(first) == [Span(0, 2)]
    assert round_.pending == [Span(0, 2)]
    assert round_.missing >= {Span(2, 3)}


def test_the_first_of_two_results_counts_and_the_second_is_stale() -> None:
    round_ = round_of(1)
    round_.give(1, "a", Span(0, 1))
    copy = round_.give(2, "b", Span(0, 1), copy=True)
    copy.answered.add(0)
    vector: Vector = PARTIAL.copy()
    done = round_.partial(2, Span(0, 1), vector)
    assert [attempt.attempt for attempt in done] == [1]  # still at its leaf: it is told to stop
    assert round_.assignments == {}
    assert not round_.misses(1, Span(0, 1))
    assert len(round_.partials) == 1


@pytest.mark.parametrize("blame", [True, False])
def test_a_crash_is_counted_at_the_leaf_in_work_and_only_when_the_leaf_may_be_the_cause(blame: bool) -> None:
    scheduler = new_cluster().scheduler
    scheduler.begin(request_of(4))
    attempt = scheduler.round.give(1, "a", Span(0, 4))  # type: ignore[union-attr]
    attempt.answered |= {0, 1}
    assert scheduler.lost("a", blame) == [Span(0, 4)]
    assert scheduler.round is not None
    assert +scheduler.round.crashes == ({2: 1} if blame else {})


def test_the_third_crash_of_a_leaf_that_was_alone_names_its_rows_and_no_other_crash_is_a_failure() -> None:
    scheduler = new_cluster().scheduler
    round_ = scheduler.begin(request_of(4))
    for number, alone in ((1, False), (2, False), (3, False), (4, True)):
        assert scheduler.failure is None
        round_.give(number, "a", Span(2, 3), alone=alone)
        scheduler.lost("a", True)
    assert "leaf 2 of step 4 (rows 2)" in str(scheduler.failure)


@given(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12), st.integers(0, 12))
def test_a_span_without_a_hole_is_the_rest_and_joined_runs_are_the_same_leaves(a: int, b: int, c: int, d: int) -> None:
    span, hole = Span(min(a, b), max(a, b) + 1), Span(min(c, d), max(c, d) + 1)
    rest = list(without(span, hole))
    inside = [leaf for span in rest for leaf in range(span.start, span.stop)]
    assert inside == [leaf for leaf in range(span.start, span.stop) if not hole.start <= leaf < hole.stop]
    joined = joined_spans(Span(leaf, leaf + 1) for leaf in reversed(inside))
    assert [leaf for span in joined for leaf in range(span.start, span.stop)] == inside
    assert all(one.stop < other.start for one, other in pairwise(joined))
