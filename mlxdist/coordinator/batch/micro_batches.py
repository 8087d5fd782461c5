"""Leaves: each window of a step cut in row order into micro-batches, never re-sorted, the same on every cluster."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.kl_pairs import kl_rows
from mlxdist.coordinator.batch.row_store import PairedRows, Rows
from mlxdist.protocol.leaves import Leaf, Row, leaf_width

Group = tuple[Row, ...]  # what stays together: a row, or chosen and rejected


def cut(step: Step, data: Rows, micro_size: int, max_length: int, method: str) -> tuple[Leaf, ...]:
    """The leaves of a step: `micro_size` rows or pairs each, the last of a window may be short.

    A DPO leaf alternates chosen and rejected and has two widths: they are never padded together.
    """
    windows = ([data.rows(index) for index in window] for window in step.windows)
    return tuple(_numbered(windows, micro_size, max_length, branches=2 if method == "dpo" else 1))


def cut_kl(step: Step, data: PairedRows, micro_size: int, max_length: int) -> tuple[Leaf, ...]:
    """The leaves of a KTO step's first round: every prompt with the completion of the row before it in the step."""
    rows = iter(kl_rows(data, step))
    windows = ([(next(rows),) for _ in window] for window in step.windows)
    return tuple(_numbered(windows, micro_size, max_length, branches=1))


def cut_validation(
    data: Rows, micro_size: int, max_length: int, method: str, limit: int | None = None
) -> tuple[Leaf, ...]:
    """The leaves of the validation rows, the same each time: in file order, for SFT stable by length.

    `limit` takes the first rows of the file.
    """
    chosen = np.arange(len(data) if limit is None else min(limit, len(data)))
    if method == "sft":
        chosen = chosen[np.argsort(data.lengths[chosen], kind="stable")]
    window = [data.rows(int(index)) for index in chosen]
    return tuple(_numbered([window], micro_size, max_length, branches=2 if method == "dpo" else 1))


def _numbered(windows: Iterable[Sequence[Group]], micro_size: int, max_length: int, *, branches: int) -> Iterator[Leaf]:
    index = 0
    for window in windows:
        for start in range(0, len(window), micro_size):
            groups = window[start : start + micro_size]
            widths = tuple(
                leaf_width([len(group[branch].ids) for group in groups], max_length) for branch in range(branches)
            )
            yield Leaf(index, tuple(row for group in groups for row in group), widths)
            index += 1
