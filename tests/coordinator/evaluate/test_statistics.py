"""The standard error of a ratio: against the spread of the ratio over many samples, and against the mean's."""

import numpy as np
import pytest

from mlxdist.coordinator.evaluate.statistics import standard_error


def test_with_equal_weights_it_is_the_standard_error_of_a_mean() -> None:
    losses = np.random.default_rng(0).normal(2.0, 1.0, 50)
    assert standard_error(losses, np.ones(50)) == pytest.approx(losses.std(ddof=1) / np.sqrt(50), rel=1e-12)
    assert standard_error(losses * 7, np.full(50, 7.0)) == pytest.approx(losses.std(ddof=1) / np.sqrt(50), rel=1e-12)


def test_it_is_the_spread_of_the_token_weighted_loss_over_samples_of_rows() -> None:
    random = np.random.default_rng(1)
    ratios, errors, naive = [], [], []
    for _ in range(2000):
        tokens = random.integers(1, 60, 200).astype(np.float64)
        losses = tokens * random.gamma(4.0, 0.5, 200)
        ratios.append(losses.sum() / tokens.sum())
        errors.append(standard_error(losses, tokens))
        naive.append(np.std(losses / tokens, ddof=1) / np.sqrt(200))
    assert np.mean(errors) == pytest.approx(np.std(ratios), rel=0.05)
    # rows of equal weight would give another number: long rows count more, and so the mean is less certain
    assert np.mean(errors) > 1.1 * np.mean(naive)


def test_a_loss_that_is_the_same_for_every_token_has_no_error() -> None:
    tokens = np.array([1.0, 5.0, 30.0])
    assert standard_error(2.5 * tokens, tokens) == pytest.approx(0.0, abs=1e-15)


def test_one_row_says_nothing_of_the_spread() -> None:
    assert standard_error(np.array([3.0]), np.array([2.0])) is None
