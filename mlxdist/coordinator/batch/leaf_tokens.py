"""The size of a leaf: the value that "auto" stands for, and the largest leaf that rows can make."""

from collections.abc import Iterator
from itertools import islice
from statistics import median_low

import numpy as np

from mlxdist.coordinator.batch.batch_order import Window, epochs
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.schema import BatchConfig
from mlxdist.protocol.leaves import item_tokens
from mlxdist.protocol.methods import METHODS

MOST = 512  # tokens: of larger leaves, a GPU computes a token no faster
PARTS = 8  # leaves of a usual window, so that eight nodes have work
WINDOWS = 50  # looked at, of the first epoch
LONGEST_ROWS = 500  # whose tokens are counted, of pairs


def auto_leaf_tokens(data: Rows, batch: BatchConfig, method: str) -> int:
    """Returns min(512, tokens of the median window / 8), rounded up so that this window has 8 leaves.

    The windows are the first ones of the first epoch.
    """
    return max(min(MOST, -(-window_tokens(data, batch, method) // PARTS)), 1)


def window_tokens(data: Rows, batch: BatchConfig, method: str) -> int:
    """Returns the tokens of the median window, as leaves count them; where no window is full, of the rows there are."""
    windows = [*islice(_windows(data, batch, method), WINDOWS)] or [tuple(range(len(data)))]
    return median_low([sum(item_tokens(data.rows(row)) for row in window) for window in windows])


def largest_leaf(data: Rows, batch: BatchConfig, leaf_tokens: int) -> int:
    """Returns the most tokens that a leaf of these rows can have.

    That is one item alone, or items into which one more was put when they had at most `leaf_tokens` and no less than
    that item.
    """
    longest = longest_item(data, batch.max_length)
    return max(longest, min(longest, leaf_tokens) + leaf_tokens if len(data) > 1 else 0)


def longest_item(data: Rows, max_length: int) -> int:
    """Returns the tokens of the largest row or pair. Of many pairs those with the longest branches are looked at."""
    lengths = np.minimum(data.lengths, max_length)
    order = np.argsort(-lengths, kind="stable")
    most, branches = 0, len(data.rows(int(order[0])))
    for index in order[:LONGEST_ROWS].tolist():
        if branches * int(lengths[index]) <= most:
            break
        most = max(most, min(item_tokens(data.rows(index)), branches * max_length))
    return most


def _windows(data: Rows, batch: BatchConfig, method: str) -> Iterator[Window]:
    first = next(
        epochs(
            data.lengths.tolist(),
            batch.size,
            order=batch.order,
            remainder=batch.remainder,
            seed=batch.seed,
            join_single=not METHODS[method].lone_row,
        )
    )
    yield from first
