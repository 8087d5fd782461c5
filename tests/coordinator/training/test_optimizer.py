"""One optimizer step: against AdamW and clipping written again in float64, and the same bits however it is cut."""

import math

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.optimizers import AdamW

from mlxdist.coordinator.config.schema import TrainConfig
from mlxdist.coordinator.training.adamw import FIRST, SECOND, no_moments
from mlxdist.coordinator.training.adamw import AdamW as Ours
from mlxdist.coordinator.training.clipping import block_square_sum, clip, norm
from mlxdist.coordinator.training.moments import Moments
from mlxdist.coordinator.training.optimizer import OPTIMIZERS, optimizer_of
from mlxdist.protocol.errors import NonFiniteError
from mlxdist.protocol.vectors import BLOCK_ELEMENTS

Vector = np.ndarray
ADAMW = Ours((0.9, 0.999), 1e-8, 0.01)


def normal(seed: int, size: int, scale: float = 1.0) -> Vector:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def plain_adamw(parameters: Vector, gradients: list[Vector], rates: list[float]) -> Vector:
    """Algorithm 2 of https://arxiv.org/abs/1711.05101 in float64, with bias correction."""
    beta1, beta2 = 0.9, 0.999
    values = parameters.astype(np.float64)
    first, second = np.zeros_like(values), np.zeros_like(values)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        first = beta1 * first + (1 - beta1) * gradient.astype(np.float64)
        second = beta2 * second + (1 - beta2) * gradient.astype(np.float64) ** 2
        values = values - rate * 0.01 * values
        values = values - rate * (first / (1 - beta1**step)) / (np.sqrt(second / (1 - beta2**step)) + 1e-8)
    return values


def train(parameters: Vector, moments: Moments, gradients: list[Vector], rates: list[float]) -> tuple[Vector, Moments]:
    for gradient, rate in zip(gradients, rates, strict=True):
        parameters, moments = ADAMW.update(parameters, gradient, moments, rate)
    return parameters, moments


def test_ten_steps_are_adamw_written_again_in_float64() -> None:
    start = normal(0, 1000)
    gradients = [normal(seed, 1000, scale=10.0 ** (seed % 4 - 3)) for seed in range(1, 11)]
    rates = [1e-3 / (1 + step) for step in range(10)]
    ours, _ = train(start, no_moments(1000), gradients, rates)
    np.testing.assert_allclose(ours, plain_adamw(start, gradients, rates), rtol=1e-6, atol=1e-7)


def test_updates_from_zero_are_adamws_as_far_as_float32_bias_correction_goes() -> None:
    """As for lora_b: no parameter hides the update. 1 - 0.999**step in float32 costs up to 1e-5 of it."""
    start = np.zeros(500, dtype=np.float32)
    gradients = [normal(seed, 500) for seed in range(1, 6)]
    ours, _ = train(start, no_moments(500), gradients, [1e-3] * 5)
    np.testing.assert_allclose(ours, plain_adamw(start, gradients, [1e-3] * 5), rtol=2e-5, atol=1e-8)


def test_the_first_update_is_one_learning_rate() -> None:
    """Without bias correction it would be 3.2 of them."""
    start, gradient = np.zeros(100, dtype=np.float32), normal(3, 100)
    after, moments = ADAMW.update(start, gradient, ADAMW.init(100), 1e-3)
    np.testing.assert_allclose(np.abs(after), 1e-3, rtol=1e-4)
    assert moments.step == 1


def test_a_resumed_run_has_the_bits_of_an_unbroken_one() -> None:
    size = BLOCK_ELEMENTS + 77
    start = normal(0, size)
    gradients, rates = [normal(seed, size) for seed in range(1, 7)], [1e-3] * 6
    unbroken, moments = train(start, no_moments(size), gradients, rates)
    half, saved = train(start, no_moments(size), gradients[:3], rates[:3])
    vectors = {name: np.frombuffer(vector.tobytes(), np.float32) for name, vector in saved.vectors.items()}
    read = Moments(saved.step, vectors)
    resumed, resumed_moments = train(np.frombuffer(half.tobytes(), np.float32), read, gradients[3:], rates[3:])
    assert resumed.tobytes() == unbroken.tobytes()
    for name in (FIRST, SECOND):
        assert resumed_moments.vectors[name].tobytes() == moments.vectors[name].tobytes()
    assert resumed_moments.step == moments.step == 6


def test_going_block_by_block_changes_no_bit() -> None:
    size = 2 * BLOCK_ELEMENTS + 13
    start, gradients = normal(0, size), [normal(seed, size) for seed in (1, 2)]
    ours, _ = train(start, no_moments(size), gradients, [1e-3, 5e-4])
    with mx.stream(mx.cpu):
        optimizer = AdamW(1e-3, [0.9, 0.999], 1e-8, 0.01, bias_correction=True)
        tree = {"all": mx.array(start)}
        for gradient, rate in zip(gradients, (1e-3, 5e-4), strict=True):
            optimizer.learning_rate = rate
            tree = optimizer.apply_gradients({"all": mx.array(gradient)}, tree)
            mx.eval(tree, optimizer.state)
    assert ours.tobytes() == np.array(tree["all"]).tobytes()


def test_a_step_changes_none_of_its_arguments() -> None:
    start, gradient, moments = normal(0, 10), normal(1, 10), no_moments(10)
    arguments = (start, gradient, *moments.vectors.values())
    copies = [vector.copy() for vector in arguments]
    ADAMW.update(start, gradient, moments, 1e-3)
    clip(gradient, 3, 0.1)
    for before, now in zip(copies, arguments, strict=True):
        assert before.tobytes() == now.tobytes()


def test_vectors_of_unequal_length_are_an_error() -> None:
    with pytest.raises(ValueError, match="10 parameters, 9 gradients"):
        ADAMW.update(normal(0, 10), normal(1, 9), no_moments(10), 1e-3)


@pytest.mark.parametrize("size", [1, 5, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1, 3 * BLOCK_ELEMENTS - 4])
def test_the_norm_is_the_2_norm(size: int) -> None:
    vector = normal(size, size)
    assert norm(vector) == pytest.approx(math.sqrt(math.fsum(vector.astype(np.float64) ** 2)), rel=1e-12)


@given(st.integers(1, 300))
def test_a_block_filled_up_with_zeros_has_the_same_bits(size: int) -> None:
    block = normal(size, size)
    assert block_square_sum(np.concatenate([block, np.zeros(512 - size, dtype=np.float32)])) == block_square_sum(block)


def test_slicing_the_vector_at_blocks_changes_no_bit_of_the_norm() -> None:
    """Several reducers, each with some of the blocks, would send the same numbers."""
    vector = normal(0, 5 * BLOCK_ELEMENTS + 9)
    blocks = [vector[start : start + BLOCK_ELEMENTS] for start in range(0, len(vector), BLOCK_ELEMENTS)]
    one, two, three, four, five, six = (block_square_sum(block.copy()) for block in blocks)
    assert norm(vector) == math.sqrt(((one + two) + (three + four)) + (five + six))


def test_the_gradient_is_the_sum_over_the_whole_weight() -> None:
    total = normal(0, 100)
    gradient, grad_norm = clip(total, 7, 0)
    assert np.array_equal(gradient, total / np.float32(7))
    assert gradient.dtype == np.float32
    assert grad_norm == norm(gradient)


@given(st.floats(0.01, 10.0), st.integers(1, 100))
def test_clipping_keeps_the_direction_and_caps_the_norm(max_grad_norm: float, weight: int) -> None:
    total = normal(1, 64, scale=20.0)
    gradient, grad_norm = clip(total, weight, max_grad_norm)
    assert grad_norm == pytest.approx(np.linalg.norm(total.astype(np.float64)) / weight, rel=1e-6)
    expected = total.astype(np.float64) / weight * min(1.0, max_grad_norm / (grad_norm + 1e-6))
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    assert norm(gradient) <= max_grad_norm * (1 + 1e-6)


def test_a_large_gradient_does_not_overflow_its_norm() -> None:
    assert clip(np.full(4, 1e30, dtype=np.float32), 1, 0)[1] == pytest.approx(2e30)


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_broken_gradient_never_reaches_the_optimizer(broken: float) -> None:
    with pytest.raises(NonFiniteError, match="No step was taken"):
        clip(np.array([1.0, broken], dtype=np.float32), 2, 1.0)


def test_no_weight_is_an_error() -> None:
    with pytest.raises(ValueError, match="must be positive"):
        clip(normal(0, 3), 0, 1.0)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_step_from_its_first_state(name: str) -> None:
    optimizer = optimizer_of(TrainConfig(), name)
    start, first = normal(0, 10), optimizer.init(10)
    after, moments = optimizer.update(start, normal(1, 10), first, 1e-3)
    assert (first.step, moments.step) == (0, 1)
    assert moments.vectors.keys() == first.vectors.keys()
    assert not np.array_equal(after, start)
