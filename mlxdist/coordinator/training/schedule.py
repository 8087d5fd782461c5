"""The learning rate of a step: a pure function, so that a resumed run and a test need no state.

With min_lr_ratio = 0 the shapes are Hugging Face's, except that the warmup starts at lr / warmup_steps, not at 0.
"""

import math

SCHEDULES = ("constant", "linear", "cosine")


def learning_rate(
    step: int, *, base: float, schedule: str, warmup_steps: int, total_steps: int, min_lr_ratio: float
) -> float:
    """Returns the learning rate of `step` (from 1) in a run of `total_steps`.

    It rises to `base` in `warmup_steps` equal parts. Then it stays ("constant"), or falls to `min_lr_ratio * base` over
    the rest of the run, in a line ("linear") or half a cosine ("cosine"). A step past the end has the last value.
    Raises ValueError for a step below 1 or an unknown schedule.
    """
    if step < 1:
        raise ValueError(f"steps count from 1, not {step}")
    if schedule not in SCHEDULES:
        raise ValueError(f'schedule "{schedule}" is none of {", ".join(SCHEDULES)}')
    done = step - 1
    if done < warmup_steps:
        return base * (done + 1) / warmup_steps
    if schedule == "constant":
        return base
    progress = min(1.0, (done - warmup_steps) / max(total_steps - warmup_steps, 1))
    left = 1.0 - progress if schedule == "linear" else (1.0 + math.cos(math.pi * progress)) / 2.0
    return base * (min_lr_ratio + (1.0 - min_lr_ratio) * left)
