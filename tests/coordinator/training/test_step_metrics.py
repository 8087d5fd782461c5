"""Metrics against hand numbers, and against TRL's definitions written again with plain sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxdist.coordinator.methods.step_metrics import dpo_metrics, kto_metrics, sft_metrics
from mlxdist.protocol.methods import DPO


def floats(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def of_pairs(*columns: np.ndarray) -> dict[str, np.ndarray]:
    """Losses, then the log-probabilities of the policy's chosen and rejected and of the reference's, by name."""
    return dict(zip(DPO.row_outputs, columns, strict=True))


def test_sft_loss_is_per_token_of_the_whole_batch_and_no_mean_of_row_means() -> None:
    assert sft_metrics({"loss": floats(2.0, 30.0)}, total_weight=1 + 15) == {"loss": 2.0}
    assert sft_metrics({"loss": floats(3.0, 30.0)}, total_weight=1 + 15)["loss"] != (3.0 / 1 + 30.0 / 15) / 2


def test_the_mean_of_24_float32_ln_2_is_ln_2() -> None:
    ln2 = np.full(24, np.float32(math.log(2)))
    zeros = np.zeros(24, dtype=np.float32)
    metrics = dpo_metrics(of_pairs(ln2, zeros, zeros, zeros, zeros), beta=0.1)
    assert metrics["loss"] == float(np.float32(math.log(2)))


def test_dpo_hand_numbers() -> None:
    columns = {
        "policy_chosen": floats(-10, -20),
        "policy_rejected": floats(-12, -26),
        "ref_chosen": floats(-11, -18),
        "ref_rejected": floats(-11, -22),
        "loss": floats(0.5, 0.25),
    }
    metrics = dpo_metrics(columns, beta=0.5)
    assert metrics == {
        "loss": 0.375,
        "rewards/chosen": -0.25,  # (0.5 - 1) / 2
        "rewards/rejected": -1.25,  # (-0.5 - 2) / 2
        "rewards/margins": 1.0,
        "rewards/accuracies": 1.0,
        "logps/chosen": -15.0,
        "logps/rejected": -19.0,
    }


def test_a_fresh_adapter_has_rewards_of_exactly_0_and_no_wins() -> None:
    chosen, rejected = floats(-31.7, -4.1e3), floats(-17.9, -811.5)
    metrics = dpo_metrics(of_pairs(floats(0.7, 0.7), chosen, rejected, chosen, rejected), beta=0.1)
    assert metrics["rewards/chosen"] == metrics["rewards/rejected"] == metrics["rewards/margins"] == 0.0
    assert metrics["rewards/accuracies"] == 0.0


def test_kto_hand_numbers() -> None:
    columns = {
        "policy": floats(-10, -20, -6),
        "ref": floats(-12, -19, -5),
        "labels": floats(1, 0, 0),
        "loss": floats(0.25, 0.5, 0.75),
    }
    metrics = kto_metrics(columns, 0.125, beta=0.5)
    assert metrics == {
        "loss": 0.5,
        "kl": 0.125,
        "count/chosen": 1,
        "rewards/chosen": 1.0,
        "logps/chosen": -10.0,
        "count/rejected": 2,
        "rewards/rejected": -0.5,
        "logps/rejected": -13.0,
        "rewards/margins": 1.5,
    }


@pytest.mark.parametrize(("label", "present", "absent"), [(1, "chosen", "rejected"), (0, "rejected", "chosen")])
def test_a_batch_of_one_class_reports_that_class_alone(label: int, present: str, absent: str) -> None:
    columns = {"policy": floats(-1, -2), "ref": floats(-1, -1), "labels": floats(label, label)}
    metrics = kto_metrics({**columns, "loss": floats(0.5, 0.5)}, 0.0, beta=0.1)
    assert (metrics[f"count/{present}"], metrics[f"count/{absent}"]) == (2, 0)
    assert f"rewards/{present}" in metrics
    assert not {f"rewards/{absent}", f"logps/{absent}", "rewards/margins"} & set(metrics)


log_probability = st.floats(-500, 0, width=32)


@given(st.lists(st.tuples(*[log_probability] * 4), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_dpo_metrics_are_trls_definitions(rows: list[tuple[float, ...]], beta: float) -> None:
    columns = [floats(*column) for column in zip(*rows, strict=True)]
    metrics = dpo_metrics(of_pairs(np.zeros(len(rows), dtype=np.float32), *columns), beta=beta)
    won = [
        beta * (chosen - ref_chosen) > beta * (rejected - ref_rejected)
        for chosen, rejected, ref_chosen, ref_rejected in rows
    ]
    assert metrics["rewards/accuracies"] == sum(won) / len(rows)
    assert metrics["rewards/margins"] == pytest.approx(
        metrics["rewards/chosen"] - metrics["rewards/rejected"], abs=1e-9
    )
    assert metrics["logps/chosen"] == pytest.approx(sum(row[0] for row in rows) / len(rows), rel=1e-9)
