"""Waiting times: for a worker's next sign of work, and before what ended is started again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.config.schema import TimingConfig
from mlxdist.coordinator.schedule.deadlines import FIRST_FACTOR, REMEMBERED, Deadlines
from mlxdist.protocol.backoff import Backoff

# ---- deadlines

TIMING = TimingConfig(progress_seconds=30.0, progress_factor=10.0, start_timeout=600.0)


def known(seconds: float = 1.0, tokens: int = 100, width: int = 100) -> Deadlines:
    """A leaf of 100 tokens was computed."""
    deadlines = Deadlines(TIMING)
    deadlines.took(tokens, width, seconds)
    return deadlines


def test_while_nothing_is_known_the_first_leaf_has_its_own_limit() -> None:
    deadlines = Deadlines(TIMING)
    assert deadlines.usual(100) is None
    for first in (True, False):
        assert deadlines.limit(10**6, 10**6, first=first) == 600.0


def test_the_limit_is_a_multiple_of_the_usual_time_of_so_many_tokens_and_never_below_the_least() -> None:
    assert known(1.0).limit(100, 100, first=False) == 30.0
    assert known(7.0).limit(100, 100, first=False) == pytest.approx(70.0)
    assert known(7.0).limit(300, 100, first=False) == pytest.approx(210.0)


def test_a_nodes_first_leaf_and_a_leaf_of_a_new_width_are_given_more() -> None:
    deadlines = known(7.0)
    ordinary = deadlines.limit(100, 100, first=False)
    assert deadlines.limit(100, 100, first=True) == pytest.approx(FIRST_FACTOR * ordinary)
    assert deadlines.limit(100, 101, first=False) == pytest.approx(FIRST_FACTOR * ordinary)
    deadlines.took(101, 101, 7.07)
    assert deadlines.limit(100, 101, first=False) == pytest.approx(ordinary)


def test_one_leaf_that_took_for_ever_does_not_move_the_limit() -> None:
    deadlines = known(7.0)
    for _ in range(4):
        deadlines.took(100, 100, 7.0)
    before = deadlines.limit(100, 100, first=False)
    deadlines.took(100, 100, 10**6)
    assert deadlines.limit(100, 100, first=False) == pytest.approx(before)


def test_old_times_are_forgotten() -> None:
    deadlines = known(1.0)
    for _ in range(REMEMBERED):
        deadlines.took(100, 100, 50.0)
    assert deadlines.usual(100) == pytest.approx(50.0)


@given(st.floats(0, 1e4), st.integers(0, 10**6), st.integers(0, 10**5), st.booleans())
def test_every_limit_is_at_least_the_least(seconds: float, tokens: int, width: int, first: bool) -> None:
    assert known(seconds).limit(tokens, width, first=first) >= 30.0


# ---- backoff


def test_the_waits_double_up_to_a_minute_and_after_ten_starts_within_an_hour_there_is_none() -> None:
    backoff = Backoff()
    waits = [backoff.next(float(second)) for second in range(12)]
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, None, None]


def test_all_waits_scale_with_the_first() -> None:
    backoff = Backoff(0.05)
    assert [backoff.next(0.0) for _ in range(7)] == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.0])


def test_a_quiet_hour_forgets_everything() -> None:
    backoff = Backoff()
    for second in range(11):
        backoff.next(float(second))
    assert backoff.next(3599.0) is None
    assert backoff.next(3610.0 + 1) == 1.0


def test_each_start_is_forgotten_after_its_own_hour() -> None:
    backoff = Backoff()
    for start in (0.0, 2000.0):
        backoff.next(start)
    assert backoff.next(3601.0) == 2.0  # only the second one counts still


@given(st.lists(st.floats(0, 5000), max_size=60))
def test_there_are_never_more_than_ten_starts_within_an_hour(gaps: list[float]) -> None:
    backoff, now, starts = Backoff(), 0.0, []
    for gap in gaps:
        now += gap
        if backoff.next(now) is not None:
            starts.append(now)
    for start in starts:
        assert sum(start <= other <= start + 3600.0 for other in starts) <= 10
