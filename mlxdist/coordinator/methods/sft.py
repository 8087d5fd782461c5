"""What a training method asks of the fleet and reads out of its answers; the simplest one. The loop knows none.

Shapes: R rows or pairs of the whole step, in row order.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from mlxdist.coordinator.batch.batch_order import Step
from mlxdist.coordinator.batch.micro_batches import cut, cut_validation
from mlxdist.coordinator.batch.row_store import Rows
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.reference_logps import References, unknown
from mlxdist.coordinator.methods.step_metrics import Metrics, sft_metrics
from mlxdist.coordinator.schedule.rounds import Request, RowOutputs
from mlxdist.protocol.errors import MlxdistError
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.vectors import Vector

Numbers = npt.NDArray[np.float32]
PLACES = 8  # rows of a leaf at fault that are named by file and line


@dataclass(frozen=True)
class StepAnswer:
    """The step's sum before any division, what to divide it by, and the metrics (`loss` among them)."""

    grad_sum: Vector
    weight: int
    metrics: Metrics
    leaves: tuple[Leaf, ...]


class Method(Protocol):
    """One of sft, dpo, kto. `references` is what a resumed run must know again."""

    references: References

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int) -> StepAnswer:
        """The gradient sum of the step's global batch under an adapter version."""

    def evaluate(self, fleet: Fleet, limit: int, adapter_version: int) -> Metrics:
        """The metrics of the first `limit` validation rows."""

    def advice(self, metrics: Metrics) -> str | None:
        """What a person should know of a run that took such a step, once; None: nothing, or it was said."""


@dataclass
class Sft:
    """Supervised fine-tuning: cross-entropy, averaged over the supervised tokens of the whole step."""

    config: RunConfig
    rows: Rows
    valid: Rows | None
    references: References = field(default_factory=lambda: unknown(0, 0, 0))

    def gradient(self, fleet: Fleet, step: Step, adapter_version: int) -> StepAnswer:
        """One round: every leaf's gradient."""
        batch = self.config.batch
        leaves = cut(step, self.rows, batch.micro_size, batch.max_length, "sft")
        with places_named(self.rows, rows_of(step), leaves):
            grad_sum, numbers = fleet.gradient(Request("gradient", step.number, adapter_version, leaves))
        weight = supervised_tokens(leaves)
        return StepAnswer(grad_sum, weight, sft_metrics(joined(numbers)[:, 0], weight), leaves)

    def evaluate(self, fleet: Fleet, limit: int, adapter_version: int) -> Metrics:
        """The loss over the rows' supervised tokens."""
        leaves = validation_leaves(self.config, self.valid, limit)
        numbers = joined(fleet.score(Request("score", adapter_version, adapter_version, leaves)))
        return sft_metrics(-numbers[:, 0], supervised_tokens(leaves))

    def advice(self, metrics: Metrics) -> str | None:
        """Nothing."""
        return None


def rows_of(step: Step) -> list[int]:
    """The row indices of a step, in row order."""
    return [row for window in step.windows for row in window]


@contextmanager
def places_named(rows: Rows, order: Sequence[int], leaves: Sequence[Leaf]) -> Iterator[None]:
    """An error that a leaf is at fault for says where the leaf's rows stand: `order` [R] are the rows of `leaves`."""
    try:
        yield
    except MlxdistError as error:
        if error.leaf is None:
            raise
        start = sum(count_of(leaf) for leaf in leaves[: error.leaf])
        mine = order[start : start + count_of(leaves[error.leaf])]
        places = ", ".join(rows.where(index) for index in mine[:PLACES])
        more = f" and {len(mine) - PLACES} more" if len(mine) > PLACES else ""
        raise type(error)(f"{error}. The leaf holds {places}{more}", leaf=error.leaf) from error


def count_of(leaf: Leaf) -> int:
    """The rows of a leaf, or its pairs."""
    return len(leaf.rows) // len(leaf.widths)


def joined(numbers: Sequence[RowOutputs]) -> Numbers:
    """The row outputs of all leaves [R, columns], in row order."""
    return np.concatenate(numbers)


def validation_leaves(config: RunConfig, rows: Rows | None, limit: int) -> tuple[Leaf, ...]:
    """The leaves of the first `limit` validation rows, the same every time."""
    assert rows is not None
    return cut_validation(rows, config.batch.micro_size, config.batch.max_length, config.method, limit)


def supervised_tokens(leaves: Iterable[Leaf]) -> int:
    """The targets of all rows."""
    return sum(int(row.targets.sum()) for leaf in leaves for row in leaf.rows)


def all_tokens(leaves: Iterable[Leaf]) -> int:
    """The tokens of all rows, without padding."""
    return sum(len(row.ids) for leaf in leaves for row in leaf.rows)
