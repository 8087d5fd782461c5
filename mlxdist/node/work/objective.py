"""What each method asks of a leaf: its micro-batches, the scalar sum of its losses, and the row outputs it sends back.

Shapes: B rows of a micro-batch; DPO has two of them, chosen and rejected, which are never padded together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlxdist.node.backward.backward import MicroBatch
from mlxdist.protocol.leaves import Leaf, Row
from mlxdist.protocol.losses import PER_TOKEN_MEAN
from mlxdist.protocol.objectives import dpo_losses, kto_losses, sft_losses

RowSums = list[mx.array]  # of log-probs, [B] per micro-batch


@dataclass(frozen=True)
class Objective:
    """A method's loss over one leaf. `losses` gives one loss per row or pair [B] from the row sums."""

    losses: Callable[[RowSums], mx.array]
    policy: Callable[[RowSums], RowSums]  # the log-probs as the loss sees them
    reference: RowSums  # constants, [B] per micro-batch; empty without a reference

    def total(self, sums: RowSums) -> mx.array:
        """The scalar sum of the losses, never a mean: the division is the coordinator's."""
        return self.losses(sums).sum()

    def columns(self, sums: RowSums) -> list[mx.array]:
        """The row outputs, each [B]: loss, then policy and reference log-probs of each micro-batch."""
        return [self.losses(sums), *self.policy(sums), *self.reference]


def objective(
    method: str,
    leaf: Leaf,
    *,
    loss: str,
    scalars: Mapping[str, float],
    labels: Sequence[float],
    reference: RowSums,
) -> Objective:
    """The objective of a leaf. `reference` holds log-probs as the loss sees them, as `seen` makes them."""
    if method == "sft":
        return Objective(lambda sums: sft_losses(sums[0]), lambda sums: sums, [])
    if method == "dpo":
        counts = target_counts(leaf)

        def pair_losses(sums: RowSums) -> mx.array:
            chosen, rejected = seen(loss, sums, counts)
            return dpo_losses(
                chosen,
                rejected,
                *reference,
                loss=loss,
                beta=scalars["beta"],
                label_smoothing=scalars["label_smoothing"],
            )

        return Objective(pair_losses, lambda sums: seen(loss, sums, counts), reference)

    def row_losses(sums: RowSums) -> mx.array:
        return kto_losses(
            sums[0],
            reference[0],
            mx.array(list(labels)),
            scalars["reference_point"],
            loss=loss,
            beta=scalars["beta"],
            desirable_weight=scalars["desirable_weight"],
            undesirable_weight=scalars["undesirable_weight"],
        )

    return Objective(row_losses, lambda sums: sums, reference)


def seen(loss: str, sums: RowSums, counts: RowSums) -> RowSums:
    """Row sums as the loss takes them: for `ipo` the means over a row's targets (`counts`, [B] per micro-batch)."""
    if loss not in PER_TOKEN_MEAN:
        return sums
    return [total / count for total, count in zip(sums, counts, strict=True)]


def target_counts(leaf: Leaf) -> RowSums:
    """The targets of every row, float32 [B] per micro-batch."""
    return [mx.array([float(row.targets.sum()) for row in rows]) for rows in branches(leaf)]


def branches(leaf: Leaf) -> list[tuple[Row, ...]]:
    """The rows of each micro-batch: all of them, or chosen and rejected, which alternate in a leaf."""
    width = len(leaf.widths)
    return [leaf.rows[branch::width] for branch in range(width)]


def micro_batches(leaf: Leaf) -> list[MicroBatch]:
    """Each branch right-padded to its own width: inputs, targets and target mask, each [B, width - 1]."""
    return [micro_batch(rows, width) for rows, width in zip(branches(leaf), leaf.widths, strict=True)]


def micro_batch(rows: Sequence[Row], width: int) -> MicroBatch:
    """Rows right-padded to `width` tokens."""
    ids = np.zeros((len(rows), width), np.int32)
    mask = np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        mask[i, : len(row.ids)] = row.targets
    return MicroBatch(ids[:, :-1], ids[:, 1:], mask[:, 1:])
