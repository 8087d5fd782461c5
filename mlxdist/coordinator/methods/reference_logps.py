"""Reference log-probs by row, as the loss sees them: computed once, at a row's first visit, then kept and saved.

NaN stands for a row that was not visited yet. The worker that gets such a row computes the reference with the row's
leaf, in the same layout and head positions as the gradient, so that the first step has rewards of exactly 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float32]  # [rows of a data set, branches]: of a row, or of chosen and rejected


@dataclass(frozen=True)
class References:
    """The tables of the training and the validation rows, and the forwards of rows that they have saved.

    It is never changed: a step returns the references that are known after it.
    """

    train: Table
    valid: Table
    saved_forwards: int = 0

    def with_train(self, rows: Sequence[int], values: Table, saved: int) -> "References":
        """Returns the references with `values` [rows, branches] of training rows; `saved`: forwards it did without."""
        return replace(self, train=filled(self.train, rows, values), saved_forwards=self.saved_forwards + saved)

    def with_valid(self, rows: Sequence[int], values: Table, saved: int) -> "References":
        """The same for validation rows."""
        return replace(self, valid=filled(self.valid, rows, values), saved_forwards=self.saved_forwards + saved)


def unknown(train_rows: int, valid_rows: int, branches: int) -> References:
    """Returns tables in which nothing is known. `branches`: 2 for pairs, 1 for rows, 0 without a reference."""
    if not branches:
        train_rows = valid_rows = 0
    return References(
        np.full((train_rows, branches), np.nan, np.float32), np.full((valid_rows, branches), np.nan, np.float32)
    )


def filled(table: Table, rows: Sequence[int], values: Table) -> Table:
    """Returns a copy of the table with `values` [rows, branches] where it was unknown; known values stay."""
    copy = table.copy()
    if table.shape[1]:
        copy[rows] = np.where(np.isnan(table[rows]), values, table[rows])
    return copy


def taken(table: Table, rows: Sequence[int]) -> Table:
    """Returns the entries of these rows [rows, branches], in a copy."""
    return table[rows] if table.shape[1] else np.empty((len(rows), 0), np.float32)
