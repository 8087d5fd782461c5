"""A step's metrics under TRL's names, from row outputs: pure functions over the whole global batch.

Shapes: R rows or pairs of the step, in row order, float32 as they came over the wire. Every mean is `math.fsum` over
float64 in row order, so that it is the same for every cut of the batch, and the mean of 24 float32 ln 2 is ln 2.
"""

import math

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float32]
Labels = npt.NDArray[np.uint8]
Metrics = dict[str, float]


def sft_metrics(losses: Numbers, total_weight: int) -> Metrics:
    """`loss` in nats per supervised token. `losses` [R]: each row's sum; `total_weight`: the targets of all rows."""
    return {"loss": math.fsum(losses) / total_weight}


def dpo_metrics(
    policy_chosen: Numbers,
    policy_rejected: Numbers,
    ref_chosen: Numbers,
    ref_rejected: Numbers,
    losses: Numbers,
    *,
    beta: float,
) -> Metrics:
    """TRL's DPO metrics over R pairs, from losses [R] and log-probabilities [R] in nats as the loss saw them.

    These are means over the targets for `ipo`. A reward is beta * (policy - reference). `rewards/accuracies` counts
    strict wins: a tie, as in the first step, is none.
    """
    chosen = _rewards(policy_chosen, ref_chosen, beta)
    rejected = _rewards(policy_rejected, ref_rejected, beta)
    return {
        "loss": _mean(losses),
        "rewards/chosen": _mean(chosen),
        "rewards/rejected": _mean(rejected),
        "rewards/margins": _mean(chosen - rejected),
        "rewards/accuracies": int(np.count_nonzero(chosen > rejected)) / len(losses),
        "logps/chosen": _mean(policy_chosen),
        "logps/rejected": _mean(policy_rejected),
    }


def kto_metrics(
    policy: Numbers, ref: Numbers, labels: Labels, losses: Numbers, reference_point: float, *, beta: float
) -> Metrics:
    """TRL's KTO metrics over R rows: log-probabilities [R] in nats, `labels` [R] 1 where desirable, losses [R].

    `kl` is the reference point of the step. A class without a row in the global batch has a count of 0 and no means;
    `rewards/margins` needs both.
    """
    rewards = _rewards(policy, ref, beta)
    metrics = {"loss": _mean(losses), "kl": reference_point}
    for name, members in (("chosen", labels == 1), ("rejected", labels == 0)):
        metrics[f"count/{name}"] = int(np.count_nonzero(members))
        if members.any():
            metrics[f"rewards/{name}"] = _mean(rewards[members])
            metrics[f"logps/{name}"] = _mean(policy[members])
    if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


def _rewards(policy: Numbers, ref: Numbers, beta: float) -> npt.NDArray[np.float64]:
    """Rewards [R]; the difference of two float32 is exact in float64 unless they are far apart."""
    return beta * (policy.astype(np.float64) - ref.astype(np.float64))


def _mean(values: npt.NDArray[np.floating]) -> float:
    """The mean in row order, rounded once."""
    return math.fsum(values) / len(values)
