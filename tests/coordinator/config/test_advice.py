"""Advice is one sentence with what to do. Ordinary runs get none."""

import numpy as np
import pytest

from mlxdist.coordinator.config.advice import collapse_advice, kto_weights_advice, learning_rate_advice


def rows(desirable: int, undesirable: int) -> np.ndarray:
    return np.array([1] * desirable + [0] * undesirable, dtype=np.uint8)


@pytest.mark.parametrize(("method", "default"), [("sft", 2e-4), ("dpo", 5e-5), ("kto", 5e-5)])
def test_default_learning_rates_get_no_advice(method: str, default: float) -> None:
    assert learning_rate_advice(method, default) is None


@pytest.mark.parametrize(
    ("method", "rate", "side"), [("dpo", 1e-3, "above"), ("kto", 1e-8, "below"), ("sft", 1e-2, "above")]
)
def test_an_unusual_learning_rate_gets_one_sentence_with_the_usual_ones(method: str, rate: float, side: str) -> None:
    advice = learning_rate_advice(method, rate)
    assert advice is not None
    assert f"train.learning_rate = {rate:g} is {side}" in advice
    assert advice.count(". ") == 0


def test_a_loss_that_falls_by_making_both_answers_unlikely_is_reported() -> None:
    advice = collapse_advice({"loss": 1e-4, "rewards/chosen": -12.0, "rewards/rejected": -40.0})
    assert advice is not None
    assert "rewards/chosen -12.0" in advice
    assert "train.learning_rate" in advice


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": 1e-4, "rewards/chosen": 2.0, "rewards/rejected": -40.0},  # a win
        {"loss": 0.69, "rewards/chosen": -12.0, "rewards/rejected": -12.0},  # no win
        {"loss": 0.05, "rewards/chosen": -0.5, "rewards/rejected": -9.0},  # the ordinary drift
        {"loss": 0.01},  # no rewards at all
    ],
)
def test_ordinary_steps_are_no_collapse(metrics: dict[str, float]) -> None:
    assert collapse_advice(metrics) is None


def test_classes_of_one_size_need_no_weights() -> None:
    assert kto_weights_advice(rows(5, 5), 1.0, 7.0) is None  # TRL does not look at weights then either


def test_trls_ranges_for_three_to_one() -> None:
    advice = kto_weights_advice(rows(75, 25), 1.0, 1.0)
    assert advice is not None
    assert "75 desirable and 25 undesirable" in advice
    assert "desirable_weight from 0.33 to 0.44" in advice
    assert "undesirable_weight from 2.26 to 3," in advice


@pytest.mark.parametrize(
    ("desirable_weight", "undesirable_weight"), [(0.33, 1.0), (0.44, 1.0), (1.0, 3.0), (1.0, 2.26)]
)
def test_weights_at_the_ends_of_trls_ranges_are_in_them(desirable_weight: float, undesirable_weight: float) -> None:
    assert kto_weights_advice(rows(75, 25), desirable_weight, undesirable_weight) is None


def test_data_of_one_class_counts_the_other_as_one_row() -> None:
    assert kto_weights_advice(rows(2, 0), 1.0, 2.0) is None
    assert kto_weights_advice(rows(10, 0), 1.0, 1.0) is not None
