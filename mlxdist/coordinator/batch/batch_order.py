"""The order of the data: the rows of each window, and the windows of each step. Pure functions.

W windows of `size` rows make an epoch. A step takes `grad_accum_steps` windows of one epoch; the last step of an epoch
takes the rest. The cursor of a resumed run is the number of steps done.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import count

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.batch.shuffle import fisher_yates, mulberry32
from mlxdist.coordinator.config.schema import BatchConfig, TrainConfig
from mlxdist.protocol.methods import METHODS

Window = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The rows of one optimizer update: row indices by window, in the order in which leaves are cut."""

    number: int  # from 1
    windows: tuple[Window, ...]

    @property
    def rows(self) -> list[int]:
        """[R] row indices of all windows, in row order."""
        return [row for window in self.windows for row in window]


def cut_windows(rows: Sequence[int], size: int, remainder: str, *, join_single: bool = False) -> list[Window]:
    """Returns contiguous windows of `size` rows. A tail that fills none is dropped or kept, as `remainder` says.

    `join_single`: a kept tail of one row joins the window before it, where there is one.
    """
    windows = [tuple(rows[start : start + size]) for start in range(0, len(rows) - size + 1, size)]
    tail = tuple(rows[len(windows) * size :])
    if tail and remainder == "keep":
        if join_single and len(tail) == 1 and windows:
            windows[-1] += tail
        else:
            windows.append(tail)
    return windows


def epochs(
    lengths: Sequence[int], size: int, *, order: str, remainder: str, seed: int, join_single: bool = False
) -> Iterator[list[Window]]:
    """Yields the windows of each epoch, without end; one mulberry32 generator serves all epochs.

    "sorted": stable by length, the windows shuffled from that order in each epoch. "shuffled": the rows shuffled in
    each epoch, from the order of the epoch before.
    """
    draw = mulberry32(seed)
    if order == "sorted":
        by_length = np.argsort(np.asarray(lengths), kind="stable").tolist()
        fixed = cut_windows(by_length, size, remainder, join_single=join_single)
        while True:
            windows = list(fixed)
            fisher_yates(windows, draw)
            yield windows
    rows = list(range(len(lengths)))
    while True:
        fisher_yates(rows, draw)
        yield cut_windows(rows, size, remainder, join_single=join_single)


def steps(lengths: Sequence[int], batch: BatchConfig, method: str) -> Iterator[Step]:
    """Yields the steps of a run, without end. `lengths` [N]: the tokens of each row before any cut."""
    number = count(1)
    for windows in epochs(
        lengths,
        batch.size,
        order=batch.order,
        remainder=batch.remainder,
        seed=batch.seed,
        join_single=not METHODS[method].lone_row,
    ):
        if not windows:
            return
        for start in range(0, len(windows), batch.grad_accum_steps):
            yield Step(next(number), tuple(windows[start : start + batch.grad_accum_steps]))


def validation_step(lengths: npt.NDArray[np.int32], limit: int, method: str, number: int) -> Step:
    """Returns the first `limit` validation rows as one window, the same every time.

    They are in file order, or sorted by length (stable) where the method's training rows may be. `lengths` [N]: tokens.
    """
    rows = np.arange(min(limit, len(lengths)))
    if "sorted" in METHODS[method].orders:
        rows = rows[np.argsort(lengths[rows], kind="stable")]
    return Step(number, (tuple(rows.tolist()),))


def windows_per_epoch(n_rows: int, batch: BatchConfig, method: str) -> int:
    """Returns W, the windows of one epoch over `n_rows` rows."""
    full, tail = divmod(n_rows, batch.size)
    joined = not METHODS[method].lone_row and tail == 1 and full > 0
    return full + (1 if tail and batch.remainder == "keep" and not joined else 0)


def steps_per_epoch(n_rows: int, batch: BatchConfig, method: str) -> int:
    """Returns the optimizer steps of one epoch over `n_rows` rows."""
    return -(-windows_per_epoch(n_rows, batch, method) // batch.grad_accum_steps)


def total_steps(train: TrainConfig, n_rows: int, batch: BatchConfig, method: str) -> int | None:
    """Returns the steps of the whole run; None when hours decide. `epochs` = p is ceil(p * steps of an epoch)."""
    if train.epochs is not None:
        # 1.1 epochs of 10 steps are 11 steps: the decimal that was written, not its binary neighbor
        return math.ceil(Fraction(repr(train.epochs)) * steps_per_epoch(n_rows, batch, method))
    return train.steps
