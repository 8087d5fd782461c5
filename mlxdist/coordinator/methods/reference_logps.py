"""Reference log-probs by row, as the loss sees them: computed once, at a row's first visit, then kept and saved.

NaN stands for a row not visited yet; the worker that gets it computes it with the row's leaf, in the same widths and
head positions as the gradient, so that the first step has rewards of exactly 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]  # [rows of a data set, branches]: a row's, or chosen's and rejected's


@dataclass
class References:
    """The tables of the training and the validation rows, and how many forwards of rows they have saved."""

    train: Table
    valid: Table
    saved_forwards: int = 0

    def take(self, rows: Sequence[int]) -> Table:
        """What is known of these training rows [rows, branches], in a copy."""
        return self.train[list(rows)]

    def keep(self, rows: Sequence[int], values: Table) -> None:
        """Keep what was computed of training rows; what was known before stays as it was."""
        index = list(rows)
        known = self.train[index]
        self.train[index] = np.where(np.isnan(known), values, known)


def unknown(train_rows: int, valid_rows: int, branches: int) -> References:
    """Nothing is known yet. `branches`: 2 for pairs, 1 for rows, 0 without a reference."""
    return References(
        np.full((train_rows, branches), np.nan, np.float32), np.full((valid_rows, branches), np.nan, np.float32)
    )
