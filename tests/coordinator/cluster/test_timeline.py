"""The timeline of a step: bounded, complete where it is small, and true to what the nodes did."""

from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.cluster.timeline import MOST_ROWS, Mark, Timeline, bounded, leaf_mark
from mlxdist.coordinator.schedule.assignments import Assignment
from mlxdist.coordinator.schedule.rounds import Request
from mlxdist.protocol import messages as m
from mlxdist.protocol.tree import Span
from tests.coordinator.cluster.scripted_node import PARTIAL, Bench, working

marks = st.builds(
    lambda node, kind, began, length, leaf: Mark(node, kind, began, began + length, Span(leaf, leaf + 1)),
    st.sampled_from("abc"),
    st.sampled_from(["leaf", "copy", "up", "down", "lost"]),
    st.floats(0, 100),
    st.floats(0, 10),
    st.integers(0, 40),
)


@given(st.lists(marks, max_size=60), st.integers(1, 30))
def test_a_step_has_at_most_so_many_rows_and_losses_stay(many: list[Mark], most: int) -> None:
    many = sorted(many, key=lambda mark: (mark.node, mark.began, mark.ended))
    few = bounded(many, most)
    assert len(few) <= most
    assert few == sorted(few, key=lambda mark: (mark.node, mark.began, mark.ended)) or len(many) <= most
    losses = sum(mark.kind == "lost" for mark in many)
    assert sum(mark.kind == "lost" for mark in few) == min(losses, most)


def test_leaves_that_adjoin_become_one_row_before_anything_is_left_out() -> None:
    many = [Mark("a", "leaf", leaf, leaf + 1, Span(leaf, leaf + 1)) for leaf in range(MOST_ROWS + 1)]
    assert bounded(many) == [Mark("a", "leaf", 0, MOST_ROWS + 1, Span(0, MOST_ROWS + 1))]


def test_times_count_from_the_begin_of_the_step_and_what_ended_before_it_is_left_out() -> None:
    timeline = Timeline()
    timeline.add(Mark("a", "score", 1.0, 2.0, Span(0, 1)))  # of an evaluation between two steps
    timeline.add(Mark("a", "down", 9.5, 10.25))  # it began to travel before
    timeline.add(Mark("b", "leaf", 10.25, 11.0, Span(3, 4)))
    assert timeline.take(10.0) == {"a": [("down", 0.0, 250.0, 0, 0)], "b": [("leaf", 250.0, 1000.0, 3, 4)]}
    assert timeline.take(10.0) == {}


def test_a_lost_node_has_worked_in_vain_since_its_last_leaf() -> None:
    timeline, work = Timeline(), Assignment(1, "a", Span(0, 4), began=10.0)
    timeline.add(Mark("a", "leaf", 10.0, 11.0, Span(0, 1)))
    work.answered.add(0)
    timeline.cut_short("a", "lost", work, 13.0)
    timeline.cut_short("b", "lost", None, 13.0)
    rows = timeline.take(10.0)
    assert rows["a"][-1] == ("lost", 1000.0, 3000.0, 1, 2)
    assert rows["b"] == [("lost", 3000.0, 3000.0, 0, 0)]


def test_a_node_that_says_nonsense_about_its_time_has_worked_since_it_was_given_the_leaf() -> None:
    request, work = Request("gradient", 1, 0, ()), Assignment(1, "a", Span(0, 4), began=10.0)
    for seconds in (1e300, float("inf"), float("nan")):
        assert leaf_mark(request, work, 2, seconds, 12.0) == Mark("a", "leaf", 10.0, 12.0, Span(2, 3))
    assert leaf_mark(request, work, 2, 0.5, 12.0).began == 11.5


def test_a_step_of_a_cluster_shows_who_computed_and_sent_what_and_what_was_lost() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b")  # leaves 0 and 1, 2 and 3
    began = bench.now
    bench.now += 0.5
    a.say(*a.answer(0))
    bench.now += 1.0
    a.say(*a.answer(1))
    a.say(a.offer(Span(0, 2)))
    bench.now += 0.25
    a.send(1, PARTIAL)
    b.say(*b.answer(2))
    bench.now += 0.75
    b.tell(m.WorkerExit(b.session, "the worker was killed", ()))
    bench.now += 0.5
    a.say(*a.answer(2))
    bench.now += 0.5
    a.say(*a.answer(3))
    rows = bench.cluster.timeline.take(began)
    assert rows["a"] == [
        ("leaf", 0.0, 500.0, 0, 1),
        ("leaf", 1000.0, 1500.0, 1, 2),
        ("up", 1500.0, 1750.0, 0, 2),
        ("leaf", 2500.0, 3000.0, 2, 3),
        ("leaf", 3000.0, 3500.0, 3, 4),
    ]
    assert rows["b"] == [("leaf", 1250.0, 1750.0, 2, 3), ("lost", 1750.0, 2500.0, 3, 4)]


def test_a_copy_that_comes_first_is_shown_and_what_the_slow_node_did_in_vain() -> None:
    bench = Bench()
    a, b = working(bench, "a", "b", leaves=2)
    began = bench.now
    bench.cluster.round.assignments[b.attempt].expected = 0.1  # type: ignore[union-attr]
    bench.now += 0.5
    a.say(*a.answer(0))
    a.say(a.offer(Span(0, 1)))
    a.send(1, PARTIAL)
    bench.tick(5.0)  # b is late: a computes its leaf too
    bench.now += 0.5
    a.say(*a.answer(1))
    a.say(a.offer(Span(1, 2), 2))
    a.send(2, PARTIAL)
    rows = bench.cluster.timeline.take(began)
    assert ("copy", 5500.0, 6000.0, 1, 2) in rows["a"]
    assert rows["b"] == [("dropped", 0.0, 6000.0, 1, 2)]
