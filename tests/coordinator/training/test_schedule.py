"""Learning rates against Hugging Face's formulas, written again here, and against hand numbers."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.training.schedule import SCHEDULES, learning_rate


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
