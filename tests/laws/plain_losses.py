"""The losses and schedules written again the plain way, as the papers and TRL print them. No code of the trainer."""

import math
from collections.abc import Callable

import mlx.core as mx

PairFormula = Callable[[mx.array, mx.array, float, float], mx.array]


def s(x: mx.array) -> mx.array:
    return mx.sigmoid(x)


def log_s(x: mx.array) -> mx.array:
    return mx.log(mx.sigmoid(x))


# c and r: the log-ratios of chosen and rejected to the reference; b: beta; e: label smoothing.
PAIR_LOSSES: dict[str, PairFormula] = {
    "sigmoid": lambda c, r, b, e: -(1 - e) * log_s(b * (c - r)) - e * log_s(-b * (c - r)),
    "hinge": lambda c, r, b, e: mx.maximum(0, 1 - b * (c - r)),
    "ipo": lambda c, r, b, e: ((c - r) - 1 / (2 * b)) ** 2,
    "robust": lambda c, r, b, e: (-(1 - e) * log_s(b * (c - r)) + e * log_s(-b * (c - r))) / (1 - 2 * e),
    "apo_zero": lambda c, r, b, e: (1 - s(b * c)) + s(b * r),
    "apo_down": lambda c, r, b, e: s(b * c) + (1 - s(b * (c - r))),
    "exo_pair": lambda c, r, b, e: (
        s(b * (c - r)) * (log_s(b * (c - r)) - math.log(1 - (e or 1e-3)))
        + s(-b * (c - r)) * (log_s(-b * (c - r)) - math.log(e or 1e-3))
    ),
    "nca_pair": lambda c, r, b, e: -log_s(b * c) - 0.5 * log_s(-b * c) - 0.5 * log_s(-b * r),
    "sppo_hard": lambda c, r, b, e: (c - 0.5 / b) ** 2 + (r + 0.5 / b) ** 2,
    "discopop": lambda c, r, b, e: (
        -log_s(b * (c - r)) * (1 - s(b * (c - r) / 0.05)) + mx.exp(-b * (c - r)) * s(b * (c - r) / 0.05)
    ),
}


def row_losses(loss: str, ratio: mx.array, labels: mx.array, z0: mx.array, beta: float) -> mx.array:
    """KTO's losses without the classes' weights; `labels` is 1 where desirable."""
    if loss == "apo_zero_unpaired":
        z0 = mx.array(0.0)
    return labels * (1 - s(beta * (ratio - z0))) + (1 - labels) * (1 - s(beta * (z0 - ratio)))


def rate_at(
    updates_done: int, base: float, schedule: str, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """The learning rate of the update that comes after `updates_done` of them."""
    if updates_done < warmup_steps:
        return base * (updates_done + 1) / warmup_steps
    p = (updates_done - warmup_steps) / max(total_steps - warmup_steps, 1)
    falling = {"constant": 1.0, "linear": 1 - p, "cosine": (1 + math.cos(math.pi * p)) / 2}[schedule]
    floor = 1.0 if schedule == "constant" else min_lr_ratio
    return base * (floor + (1 - floor) * falling)
