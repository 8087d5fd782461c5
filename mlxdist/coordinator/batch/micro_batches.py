"""Leaves: each window of a step cut into micro-batches in row order, never sorted again, the same on every cluster."""

from collections.abc import Iterable, Iterator, Sequence

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.row_store import PairedRows, Rows
from mlxdist.protocol.leaves import Leaf, Row, leaf_width

Item = tuple[Row, ...]  # a row, or chosen and rejected: what stays together


def cut(step: Step, data: Rows, micro_size: int, max_length: int) -> tuple[Leaf, ...]:
    """Returns the leaves of a step: `micro_size` rows or pairs each, fewer in the last leaf of a window.

    A leaf of pairs alternates chosen and rejected and has two widths: they are never padded together. `max_length`:
    tokens.
    """
    windows = ([data.rows(index) for index in window] for window in step.windows)
    return tuple(_numbered(windows, micro_size, max_length))


def cut_kl(step: Step, data: PairedRows, micro_size: int, max_length: int) -> tuple[Leaf, ...]:
    """Returns the leaves of `kl_rows`, cut at the windows of the step."""
    rows = iter(kl_rows(data, step))
    windows = ([(next(rows),) for _ in window] for window in step.windows)
    return tuple(_numbered(windows, micro_size, max_length))


def kl_rows(data: PairedRows, step: Step) -> list[Row]:
    """Returns KTO's mismatched pairs: row i of the step with the completion of row i-1 (row 0: of the last row).

    The rows are those of all windows. Each prompt is trimmed again for its new completion. Section 4.1 of
    https://arxiv.org/abs/2402.01306.
    """
    order = step.rows
    return [data.joined(row, order[place - 1]) for place, row in enumerate(order)]


def _numbered(windows: Iterable[Sequence[Item]], micro_size: int, max_length: int) -> Iterator[Leaf]:
    index = 0
    for window in windows:
        for start in range(0, len(window), micro_size):
            items = window[start : start + micro_size]
            branches = zip(*items, strict=True)
            widths = tuple(leaf_width([len(row.ids) for row in rows], max_length) for rows in branches)
            yield Leaf(index, tuple(row for item in items for row in item), widths)
            index += 1
