"""The timeline of a step: bounded, complete where it is small, and true to what the nodes did."""

from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.cluster.timeline import MOST_ROWS, Mark, Timeline, bounded, leaf_mark
from mlxdist.coordinator.schedule.rounds import Assignment, Request
from mlxdist.protocol.tree import Span

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
