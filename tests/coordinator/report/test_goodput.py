"""The cost of failures: measured against the undisturbed steps around, and never more than the time that there was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.report.goodput import Redone, StepTime, lost_seconds, lost_time


def calm(count: int, pace: float = 2.0) -> list[StepTime]:
    return [StepTime(pace * tokens / 100, tokens) for tokens in (100, 50, 200, 100, 150, *[100] * count)][:count]


def test_an_undisturbed_run_loses_nothing() -> None:
    steps = calm(30)
    whole = lost_time(steps, Redone(), 0.0, 100.0)
    assert (whole.seconds_lost, whole.leaves_recomputed, whole.steps_disturbed) == (0.0, 0, 0)
    assert whole.useful_seconds == sum(step.seconds for step in steps)
    assert whole.goodput == whole.useful_seconds / 100


def test_a_disturbed_step_has_lost_what_it_took_beyond_its_tokens_at_the_usual_pace() -> None:
    steps = [*calm(5), StepTime(10.0, 300, disturbed=True, leaves_recomputed=3), *calm(5)]
    assert list(lost_seconds(steps)) == pytest.approx([0.0] * 5 + [10.0 - 6.0] + [0.0] * 5)


def test_a_disturbed_step_that_was_no_slower_has_lost_nothing() -> None:
    assert sum(lost_seconds([*calm(5), StepTime(1.0, 100, disturbed=True)])) == 0.0


def test_the_usual_pace_is_that_of_the_time_around_since_nodes_come_and_go() -> None:
    steps = [*calm(50, pace=1.0), StepTime(5.0, 100, disturbed=True), *calm(50, pace=1.0), *calm(200, pace=4.0)]
    assert sum(lost_seconds(steps)) == pytest.approx(4.0)
    steps = [*calm(200, pace=1.0), *calm(50, pace=4.0), StepTime(5.0, 100, disturbed=True), *calm(50, pace=4.0)]
    assert sum(lost_seconds(steps)) == pytest.approx(1.0)


def test_where_no_step_was_undisturbed_only_pauses_are_known_to_be_lost() -> None:
    steps = [StepTime(10.0, 100, disturbed=True, seconds_paused=7.0), StepTime(10.0, 100, disturbed=True)]
    assert list(lost_seconds(steps)) == [7.0, 0.0]


def test_steps_done_again_and_pauses_between_steps_are_lost_whole() -> None:
    whole = lost_time(calm(2), Redone(steps=3, seconds=9.0, leaves=4), 5.0, 20.0)
    assert (whole.steps_again, whole.leaves_recomputed, whole.seconds_lost, whole.seconds_paused) == (3, 4, 14.0, 5.0)
    assert whole.goodput == 3.0 / 20


def test_before_any_time_has_passed_there_is_no_goodput() -> None:
    assert lost_time([], Redone(), 0.0, 0.0).goodput is None


seconds = st.floats(0.001, 1e4)


@st.composite
def step_times(draw: st.DrawFn) -> StepTime:
    whole, disturbed = draw(seconds), draw(st.booleans())
    paused = draw(st.floats(0, 1)) * whole if disturbed else 0.0
    return StepTime(whole, draw(st.floats(1, 1e6)), disturbed, draw(st.integers(0, 9)) if disturbed else 0, paused)


@given(st.lists(step_times(), max_size=60))
def test_no_step_loses_more_than_it_took_or_less_than_its_pause(steps: list[StepTime]) -> None:
    for step, lost in zip(steps, lost_seconds(steps), strict=True):
        assert step.seconds_paused <= lost <= step.seconds * (1 + 1e-9)
    whole = lost_time(steps, Redone(), 0.0, sum(step.seconds for step in steps) or 1.0)
    assert whole.goodput is not None
    assert -1e-9 <= whole.goodput <= 1
