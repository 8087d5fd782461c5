"""Learning rates against Hugging Face's formulas, written again here, and against hand numbers."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.training.schedule import (
    FIRST_SHARE,
    SCHEDULES,
    learning_rate,
    learning_rate_by_time,
    schedule_phrase,
    step_learning_rate,
)


def hf_cosine(updates_done: int, warmup_steps: int, total_steps: int) -> float:
    """get_cosine_schedule_with_warmup's factor with half a cycle."""
    if updates_done < warmup_steps:
        return updates_done / max(1, warmup_steps)
    progress = (updates_done - warmup_steps) / max(1, total_steps - warmup_steps)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 0.5 * 2.0 * progress)))


def hf_linear(updates_done: int, warmup_steps: int, total_steps: int) -> float:
    """get_linear_schedule_with_warmup's factor."""
    if updates_done < warmup_steps:
        return updates_done / max(1, warmup_steps)
    return max(0.0, (total_steps - updates_done) / max(1, total_steps - warmup_steps))


@pytest.mark.parametrize(("schedule", "hf"), [("cosine", hf_cosine), ("linear", hf_linear)])
@pytest.mark.parametrize("warmup_steps", [0, 1, 10])
def test_without_a_floor_the_shapes_are_hugging_faces(schedule: str, hf: object, warmup_steps: int) -> None:
    assert callable(hf)
    for step in range(warmup_steps + 1, 101):
        ours = learning_rate(
            step, base=5e-5, schedule=schedule, warmup_steps=warmup_steps, total_steps=100, min_lr_ratio=0.0
        )
        assert ours == pytest.approx(5e-5 * hf(step - 1, warmup_steps, 100), rel=1e-12, abs=1e-20)


def test_warm_up_rises_in_equal_parts_and_never_starts_at_0() -> None:
    rates = [
        learning_rate(step, base=8.0, schedule="cosine", warmup_steps=4, total_steps=20, min_lr_ratio=0.1)
        for step in range(1, 6)
    ]
    assert rates == [2.0, 4.0, 6.0, 8.0, 8.0]


def test_hand_numbers() -> None:
    def rate(step: int, schedule: str) -> float:
        return learning_rate(step, base=1.0, schedule=schedule, warmup_steps=0, total_steps=4, min_lr_ratio=0.2)

    assert [rate(step, "constant") for step in (1, 4)] == [1.0, 1.0]
    assert [rate(step, "linear") for step in (1, 2, 3, 4)] == pytest.approx([1.0, 0.8, 0.6, 0.4])
    half = math.sqrt(0.5)
    cosine = [1.0, 0.2 + 0.4 * (1 + half), 0.6, 0.2 + 0.4 * (1 - half)]
    assert [rate(step, "cosine") for step in (1, 2, 3, 4)] == pytest.approx(cosine)


def test_a_constant_schedule_warms_up_too() -> None:
    rates = [
        learning_rate(step, base=1.0, schedule="constant", warmup_steps=2, total_steps=9, min_lr_ratio=0.1)
        for step in (1, 2, 3, 9)
    ]
    assert rates == [0.5, 1.0, 1.0, 1.0]


@given(
    schedule=st.sampled_from(SCHEDULES),
    total_steps=st.integers(1, 500),
    warmup_steps=st.integers(0, 600),
    min_lr_ratio=st.floats(0.0, 1.0),
)
def test_after_the_warm_up_rates_never_rise_and_stay_above_the_floor(
    schedule: str, total_steps: int, warmup_steps: int, min_lr_ratio: float
) -> None:
    rates = [
        learning_rate(
            step,
            base=3e-4,
            schedule=schedule,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            min_lr_ratio=min_lr_ratio,
        )
        for step in range(1, total_steps + 3)
    ]
    assert all(0.0 <= rate <= 3e-4 * (1 + 1e-12) for rate in rates)
    falling = rates[warmup_steps:]
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(falling))
    assert all(rate >= min_lr_ratio * 3e-4 * (1 - 1e-12) for rate in falling)


def test_a_step_past_the_end_has_the_last_value() -> None:
    rate = learning_rate(41, base=1.0, schedule="cosine", warmup_steps=0, total_steps=10, min_lr_ratio=0.1)
    assert rate == pytest.approx(0.1)


def test_nonsense_is_an_error() -> None:
    with pytest.raises(ValueError, match="count from 1"):
        learning_rate(0, base=1.0, schedule="linear", warmup_steps=0, total_steps=1, min_lr_ratio=0.0)
    with pytest.raises(ValueError, match="constant, linear, cosine"):
        learning_rate(1, base=1.0, schedule="step", warmup_steps=0, total_steps=1, min_lr_ratio=0.0)


# ---- runs limited by time


def by_time(share: float, schedule: str = "cosine", step: int = 9, warmup: int | None = 0, floor: float = 0.1) -> float:
    return learning_rate_by_time(step, share, base=2e-4, schedule=schedule, warmup_steps=warmup, min_lr_ratio=floor)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("step", [1, 2, 7, 20])
def test_a_share_of_the_time_gives_the_learning_rate_of_the_same_share_of_the_steps(schedule: str, step: int) -> None:
    rate = learning_rate(step, base=2e-4, schedule=schedule, warmup_steps=0, total_steps=20, min_lr_ratio=0.1)
    assert by_time((step - 1) / 20, schedule) == pytest.approx(rate, rel=1e-12)


def test_an_automatic_warmup_takes_a_tenth_of_the_time_and_never_starts_at_0() -> None:
    rates = [by_time(share, warmup=None) for share in (0.0, 0.025, 0.05, 0.1, 0.55, 1.0)]
    first = 2e-4 * FIRST_SHARE / 0.1
    assert rates == pytest.approx([first, 0.5e-4, 1e-4, 2e-4, 1.1e-4, 0.2e-4])


def test_a_warmup_in_steps_stays_one_in_steps_and_never_lifts_the_rate_above_the_fall() -> None:
    assert [by_time(0.0, step=step, warmup=4) for step in (1, 2, 4, 5)] == [0.5e-4, 1e-4, 2e-4, 2e-4]
    assert by_time(0.99, step=3, warmup=4) == by_time(0.99)


@given(
    schedule=st.sampled_from(SCHEDULES),
    shares=st.lists(st.floats(0.0, 3.0), min_size=1, max_size=30),
    warmup=st.one_of(st.none(), st.integers(0, 40)),
    floor=st.floats(0.0, 1.0),
)
def test_however_time_passes_the_rate_is_never_0_with_a_floor_and_never_above_the_peak(
    schedule: str, shares: list[float], warmup: int | None, floor: float
) -> None:
    rates = [by_time(share, schedule, step, warmup, floor) for step, share in enumerate(sorted(shares), 1)]
    assert all(0.0 <= rate <= 2e-4 * (1 + 1e-12) for rate in rates)
    assert floor == 0.0 or min(rates) > 0.0
    peak = rates.index(max(rates))
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(rates[peak:]))


def test_hours_give_the_schedule_that_was_asked_for_and_a_constant_one_what_steps_would_give() -> None:
    train = TrainConfig(steps=None, max_hours=2.0, schedule="cosine", warmup_steps="auto", learning_rate=5e-5)
    rates = [step_learning_rate(train, 50, None, seconds) for seconds in (360.0, 720.0, 3960.0, 7200.0, 9000.0)]
    assert rates == pytest.approx([2.5e-5, 5e-5, 2.75e-5, 5e-6, 5e-6])
    assert schedule_phrase(train, None) == "cosine over 2 hours, after a warmup of 0.2 hours"
    constant = TrainConfig(steps=None, max_hours=2.0, warmup_steps=3)
    in_steps = TrainConfig(steps=10, warmup_steps=3)
    for step in (1, 2, 3, 4, 10):
        assert step_learning_rate(constant, step, None, 100.0) == step_learning_rate(in_steps, step, 10, 100.0)
    assert schedule_phrase(constant, None) == "constant, after a warmup of 3 steps"
