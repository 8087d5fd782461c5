"""The objective of a leaf: its passes, the scalar sum of its losses, and the row outputs that it sends back.

Shapes: B rows or pairs of a leaf, R = B * branches its rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import mlx.core as mx

from mlxdist.node.backward.choose_packing import PackingChoice
from mlxdist.node.backward.layout import alone, pack
from mlxdist.node.backward.supervised import Supervised
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.losses import PER_TOKEN_MEAN
from mlxdist.protocol.methods import LOSS, MethodSpec
from mlxdist.protocol.objectives import row_losses
from mlxdist.protocol.packing import APART

ByPass = list[mx.array]  # one value for each row, those of a pass together; [R] over all
ByBranch = list[mx.array]  # the same for each branch, [B] each


@dataclass(frozen=True)
class Objective:
    """The loss of a method over one leaf, as a function of the row sums that the forward gives."""

    method: MethodSpec
    loss: str  # of a preference method
    scalars: Mapping[str, float]
    constants: Mapping[str, mx.array]  # [B] each: labels, and reference log-probs as the loss sees them
    counts: ByBranch  # the targets of every row

    def losses(self, sums: ByPass) -> mx.array:
        """Returns the loss of each row or pair [B]."""
        return row_losses(self.method.name, self.loss, self._columns(sums), self.scalars)

    def total(self, sums: ByPass) -> mx.array:
        """Returns the scalar sum of the losses, never a mean: the division is the coordinator's."""
        return self.losses(sums).sum()

    def row_outputs(self, sums: ByPass) -> mx.array:
        """Returns the row outputs [B, columns], in the order of `MethodSpec.row_outputs`."""
        columns = {LOSS: self.losses(sums), **self._columns(sums)}
        return mx.stack([columns[name] for name in self.method.row_outputs], axis=1)

    def _columns(self, sums: ByPass) -> dict[str, mx.array]:
        policy = seen(self.loss, by_branch(sums, self.method.branches), self.counts)
        return {**dict(zip(self.method.policy, policy, strict=True)), **self.constants}


def seen(loss: str, sums: ByBranch, counts: ByBranch) -> ByBranch:
    """Returns row sums as the loss takes them: for some losses the means over the `counts` targets of a row."""
    means = PER_TOKEN_MEAN.get(loss, 0)  # of the first branches
    return [total / count for total, count in zip(sums[:means], counts, strict=False)] + sums[means:]


def by_branch(values: ByPass, branches: int) -> ByBranch:
    """Returns the values of all rows by branch: chosen and rejected rows alternate in a leaf."""
    rows = mx.concatenate(values)
    return [rows[branch::branches] for branch in range(branches)]


def target_counts(leaf: Leaf) -> ByBranch:
    """Returns the targets of every row, float32 [B] for each branch."""
    return by_branch([mx.array([float(row.targets.sum()) for row in leaf.rows])], leaf.branches)


def passes(leaf: Leaf, packing: PackingChoice) -> list[Supervised]:
    """Returns what the model is called on: the whole leaf as one packed row, or each of its rows."""
    if packing.mode == APART:
        return [alone(row) for row in leaf.rows]
    items = [leaf.rows[start : start + leaf.branches] for start in range(0, len(leaf.rows), leaf.branches)]
    return [pack(items, packing.mixers)]
