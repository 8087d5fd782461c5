"""The learning rate of a step: pure functions, so that a resumed run and a test need no state.

With min_lr_ratio = 0 the shapes are Hugging Face's, except that the warmup starts at lr / warmup_steps, not at 0.
"""

import math

from mlxdist.coordinator.config.schema import WARMUP_SHARE, TrainConfig, warmup_steps
from mlxdist.coordinator.report.format import count, hours_phrase

SCHEDULES = ("constant", "linear", "cosine")
FIRST_SHARE = 0.001  # of the hours: the least that a warmup by time counts, so that no step has the learning rate 0


def step_learning_rate(train: TrainConfig, step: int, total_steps: int | None, elapsed_seconds: float) -> float:
    """Returns the learning rate of `step`, before which the run has trained for `elapsed_seconds`.

    The seconds count where `total_steps` is None: `max_hours` is the length of the run then.
    """
    if total_steps is None and train.max_hours is not None:
        return learning_rate_by_time(
            step,
            elapsed_seconds / (3600 * train.max_hours),
            base=train.learning_rate,
            schedule=train.schedule,
            warmup_steps=None if train.warmup_steps == "auto" else train.warmup_steps,
            min_lr_ratio=train.min_lr_ratio,
        )
    total = total_steps or 0
    return learning_rate(
        step,
        base=train.learning_rate,
        schedule=train.schedule,
        warmup_steps=warmup_steps(train, total),
        total_steps=total,
        min_lr_ratio=train.min_lr_ratio,
    )


def learning_rate(
    step: int, *, base: float, schedule: str, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """Returns the learning rate of `step` (from 1) in a run of `total_steps`.

    It rises to `base` in `warmup_steps` equal parts. Then it stays ("constant"), or falls to `min_lr_ratio * base` over
    the rest of the run, in a line ("linear") or half a cosine ("cosine"). A step past the end has the last value.
    Raises ValueError for a step below 1 or an unknown schedule.
    """
    _check(step, schedule)
    done = step - 1
    if done < warmup_steps:
        return base * (done + 1) / warmup_steps
    return base * _fall(schedule, (done - warmup_steps) / max(total_steps - warmup_steps, 1), min_lr_ratio)


def learning_rate_by_time(
    step: int, share: float, *, base: float, schedule: str, warmup_steps: int | None, min_lr_ratio: float
) -> float:
    """Returns the learning rate of `step` (from 1) in a run limited by time, when the `share` of its time is used.

    It rises to `base` over a tenth of the time (`warmup_steps` None), then falls over the rest, in the shapes of
    `learning_rate`. A warmup given in steps takes that many steps; the fall then covers the whole time, and the lower
    of both holds. Raises ValueError as `learning_rate`.
    """
    _check(step, schedule)
    warmup_share = WARMUP_SHARE if warmup_steps is None else 0.0
    fallen = base * _fall(schedule, (share - warmup_share) / (1.0 - warmup_share), min_lr_ratio)
    if warmup_steps is None:
        return min(base * max(share, FIRST_SHARE) / WARMUP_SHARE, fallen)
    return min(base * step / warmup_steps, fallen) if step <= warmup_steps else fallen


def schedule_phrase(train: TrainConfig, total_steps: int | None) -> str:
    """'cosine over 8 hours, after a warmup of 0.8 hours', 'linear over 100 steps', 'constant'."""
    if total_steps is None:
        length, warmup = hours_phrase(train.max_hours or 0), hours_phrase(WARMUP_SHARE * (train.max_hours or 0))
    else:
        length = count(total_steps, "step")
        warmup = count(warmup_steps(train, total_steps), "step")
    if train.warmup_steps != "auto":
        warmup = count(train.warmup_steps, "step")
    over = "" if train.schedule == "constant" else f" over {length}"
    return f"{train.schedule}{over}" + (f", after a warmup of {warmup}" if train.warmup_steps else "")


def _check(step: int, schedule: str) -> None:
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    if schedule not in SCHEDULES:
        raise ValueError(f'schedule "{schedule}" is none of {", ".join(SCHEDULES)}')


def _fall(schedule: str, progress: float, min_lr_ratio: float) -> float:
    """Returns the factor on the peak after the share `progress` of the fall: 1 before it, `min_lr_ratio` at its end."""
    if schedule == "constant":
        return 1.0
    progress = min(max(progress, 0.0), 1.0)
    left = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return min_lr_ratio + (1.0 - min_lr_ratio) * left
