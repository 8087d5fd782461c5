"""Advice on the settings and the progress of a run: each function returns one sentence, or None when all is well.

The numbers are rules of thumb. Advice never stops a run.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mlxdist.protocol.methods import METHODS

COLLAPSED_LOSS = 0.1
COLLAPSED_REWARD = -5.0  # beta * nats: at beta 0.1 the chosen answer is e^50 times less likely than at the start


def learning_rate_advice(method: str, learning_rate: float) -> str | None:
    """Returns a sentence when `train.learning_rate` is far from the usual ones of the method."""
    low, high = METHODS[method].usual_learning_rates
    if low <= learning_rate <= high:
        return None
    side, effect = ("above", "diverge") if learning_rate > high else ("below", "change nothing visible")
    return (
        f"train.learning_rate = {learning_rate:g} is {side} the usual range of {method} with LoRA "
        f"({low:g} to {high:g}): the run may {effect}."
    )


def collapse_advice(metrics: Mapping[str, float]) -> str | None:
    """Returns a sentence when a DPO step made both answers unlikely: loss near 0, both rewards strongly negative."""
    chosen, rejected = metrics.get("rewards/chosen", 0.0), metrics.get("rewards/rejected", 0.0)
    if metrics["loss"] >= COLLAPSED_LOSS or chosen >= COLLAPSED_REWARD or rejected >= COLLAPSED_REWARD:
        return None
    return (
        f"The rewards collapse: the loss is {metrics['loss']:.3g}, but the chosen answers also became much less "
        f"likely (rewards/chosen {chosen:.1f}, rewards/rejected {rejected:.1f}); lower "
        "train.learning_rate, take fewer steps, or raise preference.beta."
    )


def kto_weights_advice(labels: npt.NDArray[np.uint8], desirable_weight: float, undesirable_weight: float) -> str | None:
    """Returns a sentence when the weights of the two classes do not balance their counts, by TRL's rule.

    `labels` [N] are those of the whole training set, 1 where desirable. A class without rows counts as one row. With
    equal counts the weights do not matter.
    """
    desirable = max(int(np.count_nonzero(labels)), 1)
    undesirable = max(len(labels) - desirable, 1)
    if desirable == undesirable:
        return None
    good, bad = weight_ranges(desirable, undesirable, desirable_weight, undesirable_weight)
    if good[0] <= desirable_weight <= good[1] or bad[0] <= undesirable_weight <= bad[1]:
        return None
    return (
        f"The data has {desirable} desirable and {undesirable} undesirable rows, and the weights do not balance them: "
        f"set either preference.desirable_weight from {good[0]:g} to {good[1]:g} or "
        f"preference.undesirable_weight from {bad[0]:g} to {bad[1]:g}, not both."
    )


def weight_ranges(
    desirable: int, undesirable: int, desirable_weight: float, undesirable_weight: float
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Returns the range of the desirable and of the undesirable weight, while the other weight stays as it is.

    `desirable` and `undesirable` count rows and are above 0. Within one of the ranges the quotient
    (desirable weight * desirable rows) / (undesirable weight * undesirable rows) is 1 to 1.33: Eq. 8 of
    https://arxiv.org/abs/2402.01306, with bounds rounded to two places, as TRL does it.
    """
    up = undesirable * undesirable_weight / desirable
    down = desirable * desirable_weight / undesirable
    return (round(up, 2), round(up * 1.33, 2)), (round(down / 1.33, 2), round(down, 2))
