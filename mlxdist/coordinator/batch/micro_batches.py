"""Leaves: the rows of a step distributed over packed micro-batches, by their tokens. The same on every cluster."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.row_store import PairedRows, Rows
from mlxdist.protocol.leaves import Leaf, Row, item_tokens

Item = tuple[Row, ...]  # a row, or chosen and rejected: what stays together


@dataclass(frozen=True)
class Cut:
    """The leaves of a step, and the rows of the data that they hold, leaf by leaf: `order` [R]."""

    leaves: tuple[Leaf, ...]
    order: list[int]


def cut(step: Step, data: Rows, leaf_tokens: int) -> Cut:
    """Returns the leaves of all windows of a step, of about `leaf_tokens` tokens each; see `fill`.

    A pair stays together. Its prompt counts once, as it is computed once.
    """
    rows = step.rows
    return _cut(rows, [data.rows(index) for index in rows], leaf_tokens)


def cut_kl(step: Step, data: PairedRows, leaf_tokens: int) -> Cut:
    """Returns the leaves of `kl_rows`; `order` has the rows that give the prompts."""
    return _cut(step.rows, [(row,) for row in kl_rows(data, step)], leaf_tokens)


def kl_rows(data: PairedRows, step: Step) -> list[Row]:
    """Returns KTO's mismatched pairs: row i of the step with the completion of row i-1 (row 0: of the last row).

    The rows are those of all windows. Each prompt is trimmed again for its new completion. Section 4.1 of
    https://arxiv.org/abs/2402.01306.
    """
    order = step.rows
    return [data.joined(row, order[place - 1]) for place, row in enumerate(order)]


def fill(costs: Sequence[int], leaf_tokens: int) -> list[list[int]]:
    """Returns the places of the items in each leaf, in order; `costs` are the items' tokens.

    There are ceil(total / leaf_tokens) leaves, but at most one for each item. The longest item that is left goes into
    the leaf with the fewest tokens; of equal ones the first. So no two leaves differ by more than the tokens of one
    item.
    """
    if not costs:
        return []
    count = min(-(-sum(costs) // leaf_tokens), len(costs))
    leaves: list[list[int]] = [[] for _ in range(count)]
    filled = [(0, leaf) for leaf in range(count)]
    for place in sorted(range(len(costs)), key=lambda place: -costs[place]):
        tokens, leaf = filled[0]
        leaves[leaf].append(place)
        heapq.heapreplace(filled, (tokens + costs[place], leaf))
    return [sorted(places) for places in leaves]


def _cut(rows: Sequence[int], items: Sequence[Item], leaf_tokens: int) -> Cut:
    filled = fill([item_tokens(item) for item in items], leaf_tokens)
    leaves = tuple(
        Leaf(index, tuple(row for place in places for row in items[place]), len(items[0]))
        for index, places in enumerate(filled)
    )
    return Cut(leaves, [rows[place] for places in filled for place in places])
