"""The objectives against TRL's own numbers, at their extremes, and as sums over rows."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxdist.protocol.errors import ConfigError, NonFiniteError
from mlxdist.protocol.losses import DPO_LOSSES, KTO_LOSSES, LABEL_SMOOTHING, REFUSED
from mlxdist.protocol.methods import check_loss, loss_fault
from mlxdist.protocol.objectives import dpo_losses, kto_losses, reference_point, sft_losses

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "preference_losses.json").read_text())
PAIRS = [case for case in GOLDEN["dpo"] if case["loss_type"] in DPO_LOSSES]
ROWS = GOLDEN["kto"]


def floats(values: list[float]) -> mx.array:
    return mx.array(np.array(values, dtype=np.float32))


def name(case: dict[str, Any]) -> str:
    return f"{case['loss_type']}-{case['beta']}"


def assert_close(ours: mx.array, theirs: list[float]) -> None:
    """1e-6 of the largest; and 2e-5 of each, as float32 log-probabilities of 30 nats fix a small gradient no better."""
    found, golden = np.array(ours, dtype=np.float64), np.array(theirs)
    np.testing.assert_allclose(found, golden, rtol=0, atol=1e-6 * np.abs(golden).max())
    np.testing.assert_allclose(found, golden, rtol=2e-5, atol=0)


def test_every_loss_has_golden_cases() -> None:
    assert {case["loss_type"] for case in PAIRS} == set(DPO_LOSSES)
    assert {case["loss_type"] for case in ROWS} == set(KTO_LOSSES)
    assert len(PAIRS) == 2 * len(DPO_LOSSES)


@pytest.mark.parametrize("case", PAIRS, ids=name)
def test_dpo_losses_and_their_gradients_are_those_of_trl(case: dict[str, Any]) -> None:
    chosen, rejected = floats(case["policy_chosen"]), floats(case["policy_rejected"])
    ref_chosen, ref_rejected = floats(case["ref_chosen"]), floats(case["ref_rejected"])

    def losses(chosen: mx.array, rejected: mx.array) -> mx.array:
        return dpo_losses(
            chosen,
            rejected,
            ref_chosen,
            ref_rejected,
            loss=case["loss_type"],
            beta=case["beta"],
            label_smoothing=case["label_smoothing"],
        )

    assert_close(losses(chosen, rejected), case["loss_per_pair"])
    pairs = len(case["loss_per_pair"])
    gradients = mx.grad(lambda c, r: losses(c, r).sum() / pairs, argnums=(0, 1))(chosen, rejected)
    assert_close(gradients[0], case["grad_chosen"])
    assert_close(gradients[1], case["grad_rejected"])
    assert losses(chosen, rejected).sum().item() / pairs == pytest.approx(case["loss"], rel=1e-6)


@pytest.mark.parametrize("case", ROWS, ids=name)
def test_kto_losses_and_their_gradients_are_those_of_trl(case: dict[str, Any]) -> None:
    policy, ref, labels = (
        floats(case["policy"]),
        floats(case["ref"]),
        mx.array(np.array(case["labels"], dtype=np.uint8)),
    )
    z0 = reference_point(np.array(case["policy_kl"], dtype=np.float32), np.array(case["ref_kl"], dtype=np.float32))
    if case["loss_type"] == "kto":
        assert z0 == pytest.approx(case["kl"], rel=1e-6)

    def mean_loss(policy: mx.array) -> mx.array:
        losses = kto_losses(
            policy,
            ref,
            labels,
            z0,
            loss=case["loss_type"],
            beta=case["beta"],
            desirable_weight=case["desirable_weight"],
            undesirable_weight=case["undesirable_weight"],
        )
        return losses.sum() / len(case["labels"])

    assert mean_loss(policy).item() == pytest.approx(case["loss"], rel=1e-6)
    assert_close(mx.grad(mean_loss)(policy), case["grad_policy"])


def test_exo_without_label_smoothing_has_trls_smallest() -> None:
    values = [floats([-31.0]), floats([-30.0]), floats([-30.5]), floats([-30.5])]
    zero = dpo_losses(*values, loss="exo_pair", beta=0.1, label_smoothing=0.0)
    assert zero.item() == dpo_losses(*values, loss="exo_pair", beta=0.1, label_smoothing=1e-3).item()


@pytest.mark.parametrize("loss", DPO_LOSSES)
@pytest.mark.parametrize("far", [-1e4, -200.0, 200.0, 1e4])
def test_pairs_that_are_far_off_have_finite_losses_and_gradients(loss: str, far: float) -> None:
    zero = mx.zeros(1)

    def total(chosen: mx.array, rejected: mx.array) -> mx.array:
        return dpo_losses(chosen, rejected, zero, zero, loss=loss, beta=0.5, label_smoothing=0.1).sum()

    for chosen, rejected in ((far, 0.0), (0.0, far), (far, far), (far, -far)):
        value, gradients = mx.value_and_grad(total, argnums=(0, 1))(mx.array([chosen]), mx.array([rejected]))
        assert all(math.isfinite(x.item()) for x in (value, *gradients)), (chosen, rejected)


@pytest.mark.parametrize("far", [-1e4, 1e4])
@pytest.mark.parametrize("label", [0, 1])
def test_kto_rows_that_are_far_off_have_finite_losses_and_gradients(far: float, label: int) -> None:
    def total(policy: mx.array) -> mx.array:
        return kto_losses(policy, mx.zeros(1), mx.array([label]), 0.5, loss="kto", beta=0.5).sum()

    value, gradient = mx.value_and_grad(total)(mx.array([far]))
    assert 0.0 <= value.item() <= 1.0
    assert math.isfinite(gradient.item())


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_a_fresh_adapter_has_the_loss_of_a_margin_of_exactly_0(loss: str) -> None:
    """The first step: policy and reference agree in every bit, whatever the rows' own log-probabilities."""
    chosen, rejected = floats([-31.7, -4.1e3, -0.3]), floats([-17.9, -2.2, -811.5])
    first = dpo_losses(chosen, rejected, chosen, rejected, loss=loss, beta=0.1)
    zeros = mx.zeros(3)
    assert np.array_equal(np.array(first), np.array(dpo_losses(zeros, zeros, zeros, zeros, loss=loss, beta=0.1)))
    if loss == "sigmoid":
        assert np.array_equal(np.array(first), np.full(3, np.float32(math.log(2))))


@pytest.mark.parametrize("loss", DPO_LOSSES)
def test_the_losses_of_a_batch_are_those_of_its_pairs_alone(loss: str) -> None:
    rng = np.random.default_rng(7)
    rows = [mx.array(rng.normal(-30, 4, 5).astype(np.float32)) for _ in range(4)]
    whole = dpo_losses(*rows, loss=loss, beta=0.1)
    alone = [dpo_losses(*(row[i : i + 1] for row in rows), loss=loss, beta=0.1).item() for i in range(5)]
    np.testing.assert_allclose(np.array(whole), alone, rtol=3e-7)


def test_sft_loss_is_the_negative_sum_over_targets() -> None:
    assert sft_losses(floats([-12.5, -0.25])).tolist() == [12.5, 0.25]


def test_kto_weights_scale_their_class_only() -> None:
    policy, ref, labels = floats([-10, -20, -30]), floats([-11, -19, -30]), mx.array([1, 0, 1])
    plain = np.array(kto_losses(policy, ref, labels, 0.3, loss="kto", beta=0.1))
    scaled = kto_losses(policy, ref, labels, 0.3, loss="kto", beta=0.1, desirable_weight=4.0, undesirable_weight=0.5)
    assert np.array_equal(np.array(scaled), plain * np.array([4.0, 0.5, 4.0], dtype=np.float32))


def test_apo_zero_unpaired_does_not_read_the_reference_point() -> None:
    policy, ref, labels = floats([-10, -20]), floats([-11, -19]), mx.array([1, 0])
    with_z0 = kto_losses(policy, ref, labels, 5.0, loss="apo_zero_unpaired", beta=0.1)
    assert with_z0.tolist() == kto_losses(policy, ref, labels, 0.0, loss="apo_zero_unpaired", beta=0.1).tolist()


def test_the_reference_point_is_never_negative() -> None:
    assert reference_point(np.array([-3.0, -1.0], dtype=np.float32), np.array([-1.0, -1.0], dtype=np.float32)) == 0.0


def test_the_reference_point_is_one_mean_over_all_rows_and_no_mean_of_means() -> None:
    policy = np.array([-1.0, -2.0, -3.0, -10.0, -30.0], dtype=np.float32)
    ref = np.array([-2.0, -4.0, -6.0, -14.0, -35.0], dtype=np.float32)
    assert reference_point(policy, ref) == 3.0  # (1 + 2 + 3 + 4 + 5) / 5
    parts = [reference_point(policy[:2], ref[:2]), reference_point(policy[2:], ref[2:])]
    assert sum(parts) / 2 != 3.0


def test_the_reference_point_keeps_what_float32_sums_lose() -> None:
    policy = np.array([1e8, 1.0, -1e8, 1.0], dtype=np.float32)
    assert reference_point(policy, np.zeros(4, dtype=np.float32)) == 0.5


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_reference_point_of_a_broken_row_names_the_row(broken: float) -> None:
    with pytest.raises(NonFiniteError, match="row 1 of the step"):
        reference_point(np.array([-1.0, broken], dtype=np.float32), np.zeros(2, dtype=np.float32))


def test_a_reference_point_of_no_rows_is_an_error() -> None:
    with pytest.raises(ValueError, match="needs rows"):
        reference_point(np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.float32))


@pytest.mark.parametrize("loss", REFUSED)
@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_refused_loss_is_refused_with_its_reason_and_what_is_allowed(method: str, loss: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_loss(method, loss)
    assert f'preference.loss is "{loss}"' in str(refusal.value)
    assert REFUSED[loss] in str(refusal.value)
    assert "apo_zero" in str(refusal.value)


def test_refused_losses_are_not_trained() -> None:
    zeros = mx.zeros(1)
    with pytest.raises(ConfigError, match="running mean"):
        dpo_losses(zeros, zeros, zeros, zeros, loss="bco_pair", beta=0.1)
    with pytest.raises(ConfigError, match=r'which is for method "dpo"'):
        kto_losses(zeros, zeros, zeros, 0.0, loss="sigmoid", beta=0.1)


def test_a_misspelt_loss_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r'did you mean "sigmoid"\?'):
        check_loss("dpo", "sigmoi")


def test_a_loss_of_the_other_method_is_refused_with_that_method() -> None:
    with pytest.raises(ConfigError, match=r'which is for method "kto"'):
        check_loss("dpo", "apo_zero_unpaired")


@pytest.mark.parametrize("loss", [*DPO_LOSSES, *KTO_LOSSES])
def test_label_smoothing_is_refused_where_it_has_no_meaning(loss: str) -> None:
    method = "dpo" if loss in DPO_LOSSES else "kto"
    assert loss_fault(method, loss, 0.0) is None
    fault = loss_fault(method, loss, 0.1)
    if loss in LABEL_SMOOTHING:
        assert fault is None
    else:
        assert fault is not None
        assert fault[0] == "preference.label_smoothing"
