"""The metrics of a step under TRL's names, from row outputs: pure functions over the whole global batch.

Shapes: R rows or pairs of the step, in row order. Columns are float32 as they came over the wire. Every mean is
`math.fsum` over float64 in row order, so that it is the same for every cut of the batch, and the mean of 24 float32
ln 2 is ln 2. A new metric of a method is a line here.
"""

import math

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.methods import LABELS, LOSS, Column, Columns

Metrics = dict[str, float]


def sft_metrics(columns: Columns, total_weight: int) -> Metrics:
    """Returns `loss` in nats per supervised token. `total_weight`: the targets of all rows."""
    return {"loss": math.fsum(columns[LOSS]) / total_weight}


def dpo_metrics(columns: Columns, *, beta: float) -> Metrics:
    """Returns TRL's DPO metrics over R pairs, from losses and from log-probabilities in nats as the loss saw them.

    These are means over the targets for `ipo`. A reward is beta * (policy - reference). `rewards/accuracies` counts
    strict wins: a tie, as in the first step, is none.
    """
    chosen = _rewards(columns["policy_chosen"], columns["ref_chosen"], beta)
    rejected = _rewards(columns["policy_rejected"], columns["ref_rejected"], beta)
    return {
        "loss": _mean(columns[LOSS]),
        "rewards/chosen": _mean(chosen),
        "rewards/rejected": _mean(rejected),
        "rewards/margins": _mean(chosen - rejected),
        "rewards/accuracies": int(np.count_nonzero(chosen > rejected)) / len(chosen),
        "logps/chosen": _mean(columns["policy_chosen"]),
        "logps/rejected": _mean(columns["policy_rejected"]),
    }


def orpo_metrics(columns: Columns, *, beta: float, text_weight: float) -> Metrics:
    """Returns TRL's ORPO metrics over R pairs. Rewards are beta * mean log-probs, as there is no reference.

    `nll_loss` is the cross-entropy of prompts and chosen answers for each token.
    """
    chosen, rejected = (columns[name].astype(np.float64) for name in ("policy_chosen", "policy_rejected"))
    with np.errstate(divide="ignore"):
        odds = (chosen - rejected) - (np.log(-np.expm1(chosen)) - np.log(-np.expm1(rejected)))
    return {
        "loss": _mean(columns[LOSS]),
        "nll_loss": -text_weight * _mean(columns["policy_text"].astype(np.float64)),
        "log_odds_ratio": _mean(-np.logaddexp(0.0, -odds)),
        "log_odds_chosen": _mean(odds),
        "rewards/chosen": beta * _mean(chosen),
        "rewards/rejected": beta * _mean(rejected),
        "rewards/margins": beta * _mean(chosen - rejected),
        "rewards/accuracies": int(np.count_nonzero(chosen > rejected)) / len(chosen),
        "logps/chosen": _mean(chosen),
        "logps/rejected": _mean(rejected),
    }


def kto_metrics(columns: Columns, reference_point: float, *, beta: float) -> Metrics:
    """Returns TRL's KTO metrics over R rows, from losses, log-probabilities in nats, and labels (1 where desirable).

    `kl` is the reference point of the step. A class without a row in the global batch has a count of 0 and no means;
    `rewards/margins` needs both.
    """
    policy, labels = columns["policy"], columns[LABELS]
    rewards = _rewards(policy, columns["ref"], beta)
    metrics = {"loss": _mean(columns[LOSS]), "kl": reference_point}
    for name, members in (("chosen", labels == 1), ("rejected", labels == 0)):
        metrics[f"count/{name}"] = int(np.count_nonzero(members))
        if members.any():
            metrics[f"rewards/{name}"] = _mean(rewards[members])
            metrics[f"logps/{name}"] = _mean(policy[members])
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


def _rewards(policy: Column, ref: Column, beta: float) -> npt.NDArray[np.float64]:
    """Returns rewards [R]; the difference of two float32 is exact in float64 unless they are far apart."""
    return beta * (policy.astype(np.float64) - ref.astype(np.float64))


def _mean(values: npt.NDArray[np.floating]) -> float:
    """Returns the mean in row order, rounded once."""
    return math.fsum(values) / len(values)
