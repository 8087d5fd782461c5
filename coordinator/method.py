"""What a training method asks of the fleet and reads out of its answers. The loop knows no method."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from mlxdist.coordinator.rounds import Request, RowNumbers
from mlxdist.coordinator.step_metrics import Metrics, sft_metrics
from mlxdist.protocol.leaves import Leaf


class Method(Protocol):
    """One of sft, dpo, kto."""

    def request(self, verb: str, step: int, adapter_version: int, leaves: Sequence[Leaf]) -> Request:
        """The gradient or the scores of these leaves."""

    def weight(self, leaves: Sequence[Leaf]) -> int:
        """total_weight: what the loss is averaged over."""

    def metrics(self, leaves: Sequence[Leaf], numbers: Sequence[RowNumbers]) -> Metrics:
        """`loss` and the method's other metrics over the leaves, from their row numbers."""


@dataclass(frozen=True)
class Sft:
    """Supervised fine-tuning: cross-entropy, averaged over the supervised tokens of the whole step."""

    def request(self, verb: str, step: int, adapter_version: int, leaves: Sequence[Leaf]) -> Request:
        """The gradient or the scores of these leaves."""
        return Request(verb, step, adapter_version, tuple(leaves), loss="sft")

    def weight(self, leaves: Sequence[Leaf]) -> int:
        """total_weight: the supervised tokens."""
        return supervised_tokens(leaves)

    def metrics(self, leaves: Sequence[Leaf], numbers: Sequence[RowNumbers]) -> Metrics:
        """`loss` over the leaves, from each row's log-prob sum."""
        losses = -np.concatenate([leaf_numbers[:, 0] for leaf_numbers in numbers])
        return sft_metrics(losses, self.weight(leaves))


def supervised_tokens(leaves: Sequence[Leaf]) -> int:
    """The targets of all rows."""
    return sum(int(row.targets.sum()) for leaf in leaves for row in leaf.rows)


def all_tokens(leaves: Sequence[Leaf]) -> int:
    """The tokens of all rows, without padding."""
    return sum(len(row.ids) for leaf in leaves for row in leaf.rows)
