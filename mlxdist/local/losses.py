"""The validation loss of a model in this process: rows, leaves and sums are those of `evaluate`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from mlxdist.coordinator.batch.row_store import StoredRows
from mlxdist.coordinator.config.schema import RunConfig
from mlxdist.coordinator.fleet.fleet import Fleet
from mlxdist.coordinator.methods.kinds import KINDS
from mlxdist.coordinator.schedule.rounds import Request, RowOutputs
from mlxdist.node.work.compute import Computer
from mlxdist.protocol.leaves import Leaf
from mlxdist.protocol.methods import LOSS


@dataclass
class LocalFleet:
    """Answers requests for scores with a model of this process, whatever layers it has now.

    The reference's log-probs are computed before the model is fused, and kept: a fused model has no reference.
    """

    computer: Computer
    _references: dict[bytes, RowOutputs] = field(default_factory=dict)

    def score(self, request: Request) -> Sequence[RowOutputs]:
        """Returns each leaf's row outputs."""
        return [self._leaf(leaf, request.parameters.split("+")) for leaf in request.leaves]

    def _leaf(self, leaf: Leaf, sides: Sequence[str]) -> RowOutputs:
        columns = []
        for side in sides:
            if side == "current":
                columns.append(self.computer.score(leaf))
                continue
            key = b"".join(row.ids.tobytes() + row.targets.tobytes() for row in leaf.rows)
            if key not in self._references:
                self._references[key] = self.computer.score(leaf, side)
            columns.append(self._references[key])
        return np.concatenate(columns, axis=1)


@dataclass
class LocalLosses:
    """Validation losses of one run, one after another, on the same rows."""

    config: RunConfig
    rows: StoredRows
    fleet: LocalFleet

    def loss(self) -> float:
        """Returns the loss over all rows of the model as it is now."""
        method = KINDS[self.config.method](self.config, self.rows, self.rows)
        fleet = cast(Fleet, self.fleet)  # of a fleet, a score needs this one method
        metrics, _ = method.evaluate(fleet, len(self.rows), 0, method.unknown_references())
        return metrics[LOSS]
