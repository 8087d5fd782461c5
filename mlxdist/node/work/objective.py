"""The objective of a leaf: its micro-batches, the scalar sum of its losses, and the row outputs that it sends back.

Shapes: B rows or pairs of a leaf. Chosen and rejected rows are two micro-batches: they are never padded together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxdist.node.backward.backward import MicroBatch
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.losses import PER_TOKEN_MEAN
from mlxdist.protocol.methods import LOSS, MethodSpec
from mlxdist.protocol.objectives import row_losses

ByBatch = list[mx.array]  # one value per row, [B] for each micro-batch


@dataclass(frozen=True)
class Objective:
    """The loss of a method over one leaf, as a function of the row sums that the forward gives."""

    method: MethodSpec
    loss: str  # of a preference method
    scalars: Mapping[str, float]
    constants: Mapping[str, mx.array]  # [B] each: labels, and reference log-probs as the loss sees them
    counts: ByBatch  # the targets of every row

    def losses(self, sums: ByBatch) -> mx.array:
        """Returns the loss of each row or pair [B]."""
        return row_losses(self.method.name, self.loss, self._columns(sums), self.scalars)

    def total(self, sums: ByBatch) -> mx.array:
        """Returns the scalar sum of the losses, never a mean: the division is the coordinator's."""
        return self.losses(sums).sum()

    def row_outputs(self, sums: ByBatch) -> mx.array:
        """Returns the row outputs [B, columns], in the order of `MethodSpec.row_outputs`."""
        columns = {LOSS: self.losses(sums), **self._columns(sums)}
        return mx.stack([columns[name] for name in self.method.row_outputs], axis=1)

    def _columns(self, sums: ByBatch) -> dict[str, mx.array]:
        return {**dict(zip(self.method.policy, seen(self.loss, sums, self.counts), strict=True)), **self.constants}


def seen(loss: str, sums: ByBatch, counts: ByBatch) -> ByBatch:
    """Returns row sums as the loss takes them: for some losses the means over the `counts` targets of a row."""
    means = PER_TOKEN_MEAN.get(loss, 0)  # of the first branches
    return [total / count for total, count in zip(sums[:means], counts, strict=False)] + sums[means:]


def target_counts(leaf: Leaf) -> ByBatch:
    """Returns the targets of every row, float32 [B] for each micro-batch."""
    return [mx.array([float(row.targets.sum()) for row in rows]) for rows in branches(leaf)]


def branches(leaf: Leaf) -> list[tuple[Row, ...]]:
    """Returns the rows of each micro-batch: all of them, or chosen and rejected, which alternate in a leaf."""
    width = len(leaf.widths)
    return [leaf.rows[branch::width] for branch in range(width)]


def micro_batches(leaf: Leaf) -> list[MicroBatch]:
    """Returns each branch padded on the right to its own width: inputs, targets, target mask, [B, width - 1] each."""
    return [micro_batch(rows, width) for rows, width in zip(branches(leaf), leaf.widths, strict=True)]


def micro_batch(rows: Sequence[Row], width: int) -> MicroBatch:
    """Returns rows padded on the right to `width` tokens."""
    ids = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        mask[i, : len(row.ids)] = row.targets
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask[:, 1:])
